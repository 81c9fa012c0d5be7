// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When one half of a QP may send its next packet over the wire, and what it has told its peer of
//! congestion.

use std::time::Instant;

use crate::dcqcn::{Dcqcn, Notifier, IDLE};
use crate::rate_limit::{RateLimit, Turn};
use crate::saved::Moment;

/// The packets that one half of a QP sends and receives over the wire, as far as rates are concerned.
#[derive(Default)]
pub struct Flow {
    /// Its rate, if a CNP has come.
    rate: Option<Box<Dcqcn>>,
    /// When the limit of the guest lets its next packet pass, if it was asked.
    turn: Option<Turn>,
    /// When its last packet was sent.
    sent_at: Option<Instant>,
    /// Whether its peer is told of packets that come marked.
    pub notifier: Notifier,
}

impl Flow {
    /// Returns what is saved of it: when its last packet was sent.
    ///
    /// Its rate is not. The network says it again by CNPs, as it does to a new flow. Its reservation at the limit of
    /// the guest and the last CNP that it has sent are not either: the one costs a turn, the other one CNP more.
    pub fn save(&self, now: Instant) -> Option<Moment> {
        self.sent_at.map(|time| Moment::of(time, now))
    }

    /// Returns a flow that has no rate yet.
    pub fn load(sent_at: Option<Moment>, now: Instant) -> Self {
        Self { sent_at: sent_at.map(|sent| sent.time(now)), ..Self::default() }
    }

    /// Follows a CNP. `line_rate` is the rate of a flow that was never cut, in bytes per second. Returns `false` if
    /// the CNP is ignored: it comes too soon after another one, or no packet was sent lately that can be marked.
    pub fn cut(&mut self, now: Instant, line_rate: u64) -> bool {
        if self.is_idle(now) {
            return false;
        }
        if let Some(rate) = &mut self.rate {
            return rate.cut(now);
        }
        self.rate = Some(Box::new(Dcqcn::new(now, line_rate)));
        true
    }

    /// Returns whether a CNP has cut its rate, which has not come back.
    pub fn is_cut(&self) -> bool {
        self.rate.is_some()
    }

    /// Returns whether it has sent nothing for so long that nothing is known of the network any more.
    pub fn is_idle(&self, now: Instant) -> bool {
        self.sent_at.is_none_or(|sent| now.saturating_duration_since(sent) >= IDLE)
    }

    /// Returns until when a packet of so many bytes has to wait; `None` if it may be sent now.
    pub fn wait(&mut self, now: Instant, bytes: u64, limit: &RateLimit) -> Option<Instant> {
        if let Some(rate) = &self.rate {
            if rate.is_released(now) {
                self.rate = None;
            } else if rate.next() > now {
                return Some(rate.next());
            }
        }
        limit.wait(&mut self.turn, bytes, now)
    }

    /// Notes that the packet was sent that need not wait.
    pub fn sent(&mut self, now: Instant, bytes: u64) {
        self.turn = None;
        self.sent_at = Some(now);
        if let Some(rate) = &mut self.rate {
            rate.sent(now, bytes);
        }
    }
}
