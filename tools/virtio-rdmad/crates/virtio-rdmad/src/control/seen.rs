// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reports that a client gets of the guest that it traces: the events of messages, and the frames.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use engine::{Observation, Seen};

use super::report::{FrameReport, SeenReport};
use super::told::{name_of_status, refused_report};

/// Returns the report of something that was seen at this time in a guest.
pub fn report(time: SystemTime, guest: &str, Seen { qpn, psn, what }: &Seen) -> SeenReport {
    let seen = SeenReport {
        guest: Some(guest.to_owned()),
        qpn: Some(*qpn),
        psn: *psn,
        ..SeenReport::at(time, "")
    };
    let named = |event: &str, seen| SeenReport { event: event.to_owned(), ..seen };
    let text = |text: &str| Some(text.to_owned());
    match what {
        Observation::Posted { opcode, wr_id, length } => {
            let (opcode, wr_id) = (text(opcode), Some(hex(*wr_id)));
            named("posted", SeenReport { opcode, wr_id, length: Some(*length), ..seen })
        }
        Observation::Copied { offset, length } => {
            let (offset, length) = (Some(*offset), Some(*length));
            named("copied", SeenReport { offset, length, ..seen })
        }
        Observation::Refused { reason, refused } => {
            let refused = refused.map(refused_report);
            named("refused", SeenReport { reason: text(reason), refused, ..seen })
        }
        Observation::Nak { reason } => named("nak", SeenReport { reason: text(reason), ..seen }),
        Observation::Completed { wr_id, is_receive, status, length } => {
            let event = if *is_receive { "receive_completed" } else { "send_completed" };
            let (wr_id, status) = (Some(hex(*wr_id)), text(name_of_status(*status)));
            named(event, SeenReport { wr_id, status, length: Some((*length).into()), ..seen })
        }
        Observation::Retried { reason, left } => {
            let (reason, retries_left) = (text(reason), *left);
            named("retried", SeenReport { reason, retries_left, ..seen })
        }
        // Clients that trace are not told of it.
        Observation::Frame { frame, .. } => {
            named("frame", SeenReport { length: Some(frame.len() as u64), ..seen })
        }
        Observation::Packet { leaves, opcode, length } => {
            let event = if *leaves { "packet_out" } else { "packet_in" };
            named(event, SeenReport { opcode: text(opcode), length: Some(*length), ..seen })
        }
    }
}

/// Returns the report of a frame, with its first bytes; `None` if this is none.
pub fn frame_report(time: SystemTime, seen: &Seen, snaplen: u32) -> Option<FrameReport> {
    let Observation::Frame { leaves, frame } = &seen.what else { return None };
    let most = if snaplen == 0 { frame.len() } else { frame.len().min(snaplen as usize) };
    let mut digits = String::with_capacity(2 * most);
    for byte in &frame[..most] {
        // A write to a string does not fail.
        let _ = write!(digits, "{byte:02x}");
    }
    Some(FrameReport {
        qpn: Some(seen.qpn),
        leaves: *leaves,
        length: u32::try_from(frame.len()).unwrap_or(u32::MAX),
        frame: Some(digits),
        ..FrameReport::at(time, "frame")
    })
}

fn hex(number: u64) -> String {
    format!("{number:#x}")
}

impl SeenReport {
    /// Makes the report of an event of this kind and time, which concerns no QP.
    pub fn at(time: SystemTime, event: &str) -> Self {
        Self { time_nsec: nanoseconds(time), event: event.to_owned(), ..Self::default() }
    }

    /// Makes the report of events that the client was not told of.
    pub fn of_lost(count: u64) -> Self {
        Self { lost: Some(count), ..Self::at(SystemTime::now(), "lost") }
    }
}

impl FrameReport {
    /// Makes the report of an event of this kind and time, without a frame.
    pub fn at(time: SystemTime, event: &str) -> Self {
        Self { time_nsec: nanoseconds(time), event: event.to_owned(), ..Self::default() }
    }

    /// Makes the report of frames that were not told.
    pub fn of_lost(count: u64) -> Self {
        Self { lost: Some(count), ..Self::at(SystemTime::now(), "lost") }
    }
}

/// Returns the nanoseconds since 1970.
fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
