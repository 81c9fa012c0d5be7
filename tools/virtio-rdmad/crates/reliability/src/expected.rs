// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PSN that a responder expects (IBA 9.7.4.1).

use roce::{Msn, Psn};
use serde::{Deserialize, Serialize};

/// The most packets that a requester may have under way behind a lost one: 5 ms of packets of 4 KiB at 400 Gbit/s. IBA
/// has no such limit but half of all PSNs. After the lost request of a READ of more packets, no packet is answered
/// until the requester repeats the request.
pub const MOST_UNDER_WAY: i32 = 1 << 16;

/// The judgement of the PSN of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request is the expected one.
    Next,
    /// The request has arrived before.
    Duplicate,
    /// Packets in front of the request are missing (IBA 9.7.5.2.8).
    Ahead {
        /// Whether the requester is told: it was not told before that the expected request is missing.
        nak: bool,
    },
    /// No requester can have sent the request.
    Beyond,
}

/// The PSN that a responder expects, and the number of messages that it has received.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Expected {
    /// The PSN of the expected request.
    pub psn: Psn,
    /// The message sequence number: the number of messages that were received (IBA 9.7.7.1).
    pub msn: Msn,
    /// Whether a NAK was sent, and the expected request has not arrived since.
    told: bool,
}

impl Expected {
    /// Returns the state of a responder whose first request has the PSN `psn`.
    pub fn new(psn: Psn) -> Self {
        Self { psn, ..Self::default() }
    }

    /// Judges the PSN of a request.
    pub fn judge(&self, psn: Psn) -> Verdict {
        match psn.distance_from(self.psn) {
            0 => Verdict::Next,
            ..0 => Verdict::Duplicate,
            1..=MOST_UNDER_WAY => Verdict::Ahead { nak: !self.told },
            _ => Verdict::Beyond,
        }
    }

    /// Notes that the expected request was done. `packets` is the number of its PSNs; `ends_message` is whether the
    /// request is the last one of its message.
    pub fn done(&mut self, packets: u32, ends_message: bool) {
        self.psn = self.psn.plus(packets);
        if ends_message {
            self.msn = self.msn.next();
        }
        self.told = false;
    }

    /// Returns whether the requester was told to send the expected request again.
    pub fn is_told(&self) -> bool {
        self.told
    }

    /// Notes that the requester was told to send the expected request again.
    pub fn tell(&mut self) {
        self.told = true;
    }
}
