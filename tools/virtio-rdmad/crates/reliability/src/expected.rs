// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a responder expects by its PSN (IBA 9.7.4.1).

use roce::{Msn, Psn};
use serde::{Deserialize, Serialize};

/// Packets that a requester may have under way behind a lost one. IBA has no such limit but half of all PSNs. This is 5 ms
/// of packets of 4 KiB at 400 Gbit/s. Behind the lost request of a READ of more packets nothing is answered until the
/// requester repeats it.
pub const MOST_UNDER_WAY: i32 = 1 << 16;

/// What the PSN of a request tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is the one that is expected.
    Next,
    /// It came before.
    Duplicate,
    /// Packets in front of it were lost; whether the requester is told (IBA 9.7.5.2.8: once).
    Ahead {
        /// Whether the requester does not know that.
        nak: bool,
    },
    /// No requester can have sent it.
    Beyond,
}

/// What a responder expects, and how many messages it has done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Expected {
    /// The PSN of the next request.
    pub psn: Psn,
    /// The message sequence number: messages that were done (IBA 9.7.7.1).
    pub msn: Msn,
    /// Whether a NAK was sent, and nothing that was expected has come since.
    told: bool,
}

impl Expected {
    /// Returns what a responder expects that was told this PSN.
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

    /// Notes that the expected request was done, which takes so many PSNs, and whether it ends its
    /// message.
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
