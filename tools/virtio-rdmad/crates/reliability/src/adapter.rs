// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The reaction point of an adapter, as a model for `incast.rs`: DCQCN with the parameters that NVIDIA documents for
//! ConnectX-4 and later ("DCQCN CC Parameters"), all of which have their defaults:
//!
//! | parameter | value | meaning |
//! |---|---|---|
//! | `dce_tcp_rtt` | 1 µs | alpha changes once in this time |
//! | `dce_tcp_g` | 1019 | the thousand-and-twenty-fourths of alpha that stay |
//! | `initial_alpha_value` | 1023 | alpha at the first CNP of a flow |
//! | `rate_reduce_monitor_period` | 4 µs | the time between two cuts, at least |
//! | `rpg_gd`, `rpg_min_dec_fac` | 11, 50 % | a cut takes half of alpha, and half of the rate at most |
//! | `rpg_time_reset` | 300 µs | the time of a step |
//! | `rpg_byte_reset` | 32767 | the bytes of a step, in units of 64 |
//! | `rpg_threshold` | 1 | the steps of fast recovery |
//! | `clamp_tgt_rate`, `clamp_tgt_rate_after_time_inc` | 0, 1 | a cut sets the target only behind a step of time |
//! | `rpg_ai_rate`, `rpg_hai_rate` | 5, 50 Mbit/s | the additive and the hyper increase |
//! | `rpg_min_rate` | 1 Mbit/s | the lowest rate |
//! | `min_time_between_cnps` | 4 µs | the time between two CNPs of a receiver, at least |

// Rates are positive, and far below 2^52.
#![allow(clippy::cast_precision_loss, clippy::cast_sign_loss)]

use std::time::{Duration, Instant};

use crate::rate_limit::time_of;

const MIN_RATE: f64 = 125_000.0;
const ADDITIVE: f64 = 625_000.0;
const HYPER: f64 = 10.0 * ADDITIVE;
const PERIOD: Duration = Duration::from_micros(300);
const BYTES: u64 = 32767 * 64;
const FAST_RECOVERY: u32 = 1;
const KEPT: f64 = 1019.0 / 1024.0;
const CUT_INTERVAL: Duration = Duration::from_micros(4);
/// The time between two CNPs, at least.
pub(crate) const CNP_INTERVAL: Duration = Duration::from_micros(4);

/// A flow of an adapter after its first CNP. Rates are in bytes per second.
pub(crate) struct Adapter {
    rate: f64,
    target: f64,
    line_rate: f64,
    alpha: f64,
    /// The time at which alpha had its value.
    alpha_at: Instant,
    cut_at: Instant,
    increase_at: Instant,
    bytes: u64,
    time_steps: u32,
    byte_steps: u32,
    next: Instant,
}

impl Adapter {
    pub fn new(now: Instant, line_rate: u64) -> Self {
        let line_rate = line_rate as f64;
        let mut flow = Self {
            rate: line_rate,
            target: line_rate,
            line_rate,
            alpha: 1.0,
            alpha_at: now,
            cut_at: now,
            increase_at: now + PERIOD,
            bytes: 0,
            time_steps: 1,
            byte_steps: 0,
            next: now,
        };
        flow.cut(now);
        flow
    }

    pub fn cut(&mut self, now: Instant) {
        if now < self.cut_at {
            return;
        }
        self.pass(now);
        self.cut_at = now + CUT_INTERVAL;
        let micros = now.duration_since(self.alpha_at).as_micros() as i32;
        self.alpha = self.alpha * KEPT.powi(micros.max(1)) + 1.0 - KEPT;
        self.alpha_at = now;
        if self.time_steps != 0 {
            self.target = self.rate;
        }
        self.rate = (self.rate * (1.0 - self.alpha / 2.0)).max(MIN_RATE);
        self.increase_at = now + PERIOD;
        (self.bytes, self.time_steps, self.byte_steps) = (0, 0, 0);
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    pub fn is_released(&self) -> bool {
        self.rate >= self.line_rate
    }

    pub fn sent(&mut self, now: Instant, bytes: u64) {
        self.pass(now);
        self.bytes += bytes;
        if self.bytes >= BYTES {
            self.bytes -= BYTES;
            self.byte_steps += 1;
            self.increase();
        }
        self.next = self.next.max(now) + time_of(bytes, self.rate as u64);
    }

    /// Makes the steps of time that are over.
    fn pass(&mut self, now: Instant) {
        while self.increase_at <= now {
            self.increase_at += PERIOD;
            self.time_steps += 1;
            self.increase();
        }
    }

    fn increase(&mut self) {
        let (most, fewest) =
            (self.time_steps.max(self.byte_steps), self.time_steps.min(self.byte_steps));
        let step = if fewest > FAST_RECOVERY {
            HYPER * f64::from(fewest - FAST_RECOVERY)
        } else if most > FAST_RECOVERY {
            ADDITIVE
        } else {
            0.0
        };
        self.target = (self.target + step).min(self.line_rate);
        self.rate = f64::midpoint(self.rate, self.target);
        if self.target - self.rate <= ADDITIVE {
            self.rate = self.target;
        }
    }
}
