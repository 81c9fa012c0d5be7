// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a responder expects by its PSN (IBA 9.7.4.1).

use roce::{Msn, Psn};
use serde::{Deserialize, Serialize};

/// What the PSN of a request tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the one that is expected.
    Next,
    /// It came before.
    Duplicate,
    /// Packets in front of it were lost; whether the requester is told (IBA 9.7.5.2.8: once).
    Ahead {
        /// Whether a NAK is due.
        nak: bool,
    },
}

/// What a responder expects, and how many messages it has done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Expected {
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
    pub fn judge(&mut self, psn: Psn) -> Verdict {
        match psn.distance_from(self.psn) {
            0 => Verdict::Next,
            ..0 => Verdict::Duplicate,
            _ => Verdict::Ahead { nak: !std::mem::replace(&mut self.told, true) },
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

    /// Notes that no NAK is sent for the last request that was judged, as it is held.
    pub fn hold(&mut self) {
        self.told = false;
    }

    /// Notes that the requester was told to send the expected request again.
    pub fn tell(&mut self) {
        self.told = true;
    }
}
