// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which faults packets meet, and how many met them.

use std::fmt;
use std::ops::AddAssign;

use clap::Args;
use serde::{Deserialize, Serialize};

/// The faults that packets meet, each with the share of the packets that meet it, from 0 to 1. What is left out is 0.
/// The comments are the help of the options as well.
#[derive(Args, Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// The share of the packets that do not arrive.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    pub loss: f64,
    /// The share that arrive twice. Each of the two meets further faults on its own.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    pub duplicate: f64,
    /// The share that arrive with flipped bits, four at most, or without their end.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    pub corrupt: f64,
    /// The share that packets behind them pass, eight at most, within 2 ms.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    pub reorder: f64,
    /// The share that arrive late.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0", requires = "delay_ms")]
    pub delay: f64,
    /// The most that such a packet is late, in milliseconds. Each is late by another time, from 0 on.
    #[arg(long, value_name = "MS", default_value = "0", requires = "delay")]
    pub delay_ms: u16,
    /// The share that arrive as packets that met congestion (ECN), of those whose sender reacts to that.
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    pub mark: f64,
    /// The number that decides which packets these are, and all else that is random.
    #[arg(long, value_name = "N", default_value = "0")]
    pub seed: u64,
}

impl Faults {
    /// Reads faults from a line of JSON. Returns what is wrong with it, if anything is.
    pub fn parse(line: &str) -> Result<Self, String> {
        let faults: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let Self { loss, duplicate, corrupt, reorder, delay, mark, .. } = faults;
        for each in [loss, duplicate, corrupt, reorder, delay, mark] {
            check(each)?;
        }
        Ok(faults)
    }
}

/// Reads a share of packets.
fn share(text: &str) -> Result<f64, String> {
    check(text.parse().map_err(|_| "this is no number".to_owned())?)
}

/// Returns a number that is a share of packets. Returns what is wrong with another one.
fn check(share: f64) -> Result<f64, String> {
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err(format!("{share} is no share of packets, from 0 to 1"))
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
    /// Those that arrive with a mark of congestion that they did not have.
    pub marked: u64,
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
        self.marked += other.marked;
        self.others += other.others;
        self.refused += other.refused;
    }
}

/// Shows a line for each counter.
impl fmt::Display for Counters {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters = [
            ("packets", self.packets),
            ("lost", self.lost),
            ("duplicated", self.duplicated),
            ("corrupted", self.corrupted),
            ("reordered", self.reordered),
            ("delayed", self.delayed),
            ("marked", self.marked),
            ("others", self.others),
            ("refused", self.refused),
        ];
        counters.iter().try_for_each(|(name, count)| writeln!(out, "{name:<12}{count:>12}"))
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
        for line in [
            r#"{"loss": 1.5}"#,
            r#"{"delay": -1}"#,
            r#"{"mark": 2}"#,
            r#"{"los": 0.5}"#,
            "loss",
            "",
        ] {
            Faults::parse(line).unwrap_err();
        }
    }

    #[test]
    fn counters_add_up_and_show_all() {
        let mut sum = Counters { packets: 5, refused: 1, ..Counters::default() };
        sum += Counters { packets: 2, marked: 3, ..Counters::default() };
        assert_eq!(sum, Counters { packets: 7, marked: 3, refused: 1, ..Counters::default() });
        let shown = serde_json::to_value(sum).unwrap();
        let text = sum.to_string();
        assert_eq!(text.lines().count(), shown.as_object().unwrap().len());
        for line in text.lines() {
            let (name, count) = line.split_once(' ').unwrap();
            assert_eq!(shown[name], count.trim().parse::<u64>().unwrap(), "{name}");
        }
    }
}
