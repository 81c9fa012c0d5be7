// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which faults packets meet, and how many met them.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Which share of the packets meets each fault, from 0 to 1. What is left out is 0.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Decides which packets these are, and all else that is random.
    pub seed: u64,
    /// The packet does not arrive.
    pub loss: f64,
    /// The packet arrives twice. Each of the two meets further faults on its own.
    pub duplicate: f64,
    /// Some bits of the packet are flipped, or its end is missing.
    pub corrupt: f64,
    /// The packets behind this one, eight at most, arrive before it.
    pub reorder: f64,
    /// The packet arrives late.
    pub delay: f64,
    /// The most that a packet is late, in milliseconds.
    pub delay_ms: u16,
}

impl Faults {
    /// Reads faults from a line of JSON. Returns what is wrong with it, if anything is.
    pub fn parse(line: &str) -> Result<Self, String> {
        let faults: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let shares = [faults.loss, faults.duplicate, faults.corrupt, faults.reorder, faults.delay];
        match shares.iter().find(|share| !(0.0..=1.0).contains(*share)) {
            Some(share) => Err(format!("{share} is no share of packets, from 0 to 1")),
            None => Ok(faults),
        }
    }
}

/// How many packets of RoCE v2 met each fault, and what else came.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Counters {
    /// The packets of RoCE v2 that came.
    pub packets: u64,
    /// Those that do not arrive.
    pub lost: u64,
    /// Those that arrive twice.
    pub duplicated: u64,
    /// Those that arrive with other bits.
    pub corrupted: u64,
    /// Those that packets behind them have passed, or had the chance to pass.
    pub reordered: u64,
    /// Those that were late.
    pub delayed: u64,
    /// The frames that are no packets of RoCE v2. They pass.
    pub others: u64,
    /// The frames that the kernel did not take.
    pub refused: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.corrupted += other.corrupted;
        self.reordered += other.reordered;
        self.delayed += other.delayed;
        self.others += other.others;
        self.refused += other.refused;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_zero() {
        let faults = Faults::parse(r#"{"loss": 0.01, "seed": 7}"#).unwrap();
        assert_eq!((faults.seed, faults.duplicate, faults.delay_ms), (7, 0.0, 0));
        assert!((faults.loss - 0.01).abs() < f64::EPSILON);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for line in [r#"{"loss": 1.5}"#, r#"{"delay": -1}"#, r#"{"los": 0.5}"#, "loss", ""] {
            Faults::parse(line).unwrap_err();
        }
    }
}
