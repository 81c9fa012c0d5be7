// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable delivery and congestion control of RoCE v2 (IBA 9.7, annex A17.9): which packet is sent next, which packets
//! are lost, and how fast packets may leave.
//!
//! The crate does no I/O, starts no thread, and reads no clock: its caller sends and receives packets, sets timers, and
//! passes the time to each call that needs it. A caller that passes the same packets at the same times gets the same
//! decisions, so a whole network can be simulated in virtual time; the tests of this crate do that. A message is any
//! type `T` of the caller, which comes back when the message is complete; only a responder that holds packets has
//! payload.
//!
//! # The two ends
//! A connection has a requester and a responder. A requester has
//!
//! * a [`SendWindow`]: its messages, the PSNs of their packets, and which of them the peer has acknowledged. The window
//!   contains the congestion window, the measurement of round trips ([`Probe`]) and the rate of the flow ([`Flow`]);
//! * a [`Pace`]: how long it pauses while its peer has no receive.
//!
//! A responder has
//!
//! * an [`Expected`]: the PSN that comes next, which judges the PSN of each request ([`Verdict`]);
//! * a [`Held`]: packets that came before an earlier one, within the [`HoldQuota`] of all connections of a guest;
//! * a [`Naks`]: how often the responder may tell the requester that a packet is missing;
//! * a [`Flow`]: the rate of its responses.
//!
//! A [`RateLimit`] is shared by all flows that have one limit together.
//!
//! # The contract of a requester
//! The caller does the following, in this order, whenever a packet arrives, a timer expires, or a message is posted:
//!
//! 1. **What has happened.** A packet that is not [under way](SendWindow::is_in_flight) is dropped, unless it
//!    [tells of receives](SendWindow::is_credit_update). For another one, the caller calls
//!    [`SendWindow::handle_credits`] if it tells of receives, [`SendWindow::handle_ack`] for an acknowledgement,
//!    [`SendWindow::handle_sack`] and [`SendWindow::measure_held`] for a selective one, and for a NAK of a sequence error `handle_ack` for the PSN in front of it and [`SendWindow::handle_nak`].
//!    For a packet of a response it calls [`SendWindow::handle_response`], writes the payload to memory, and calls
//!    [`SendWindow::accept_response`]. When [`SendWindow::timeout_at`] is over it calls [`SendWindow::handle_timeout`],
//!    when [`SendWindow::probe_at`] is over [`SendWindow::handle_probe_timeout`], and when [`SendWindow::credit_at`] is
//!    over [`SendWindow::lend_credit`], or [`SendWindow::ask_for_credit`] if no message may be sent without a receive.
//!    For a message it asks [`SendWindow::has_room`] and calls [`SendWindow::push`].
//! 2. **Progress.** If [`SendWindow::take_progress`] says so, the caller renews its retries, and calls
//!    [`SendWindow::handle_progress`].
//! 3. **Completions.** [`SendWindow::poll_completed`] returns each message that is complete, in order.
//! 4. **Packets.** The caller calls [`SendWindow::set_mtu`]. As long as [`SendWindow::poll_transmit`] returns a packet and [`Flow::wait`] lets the packet pass,
//!    the caller sends the packet, and calls [`SendWindow::transmitted`] and [`Flow::sent`]. It sends a question for
//!    selective acknowledgements if [`SendWindow::poll_sack_question`] returns one.
//! 5. **Timers.** If [`SendWindow::awaits_answer`] says that an answer is due and no timer runs, the caller sets
//!    `timeout_at` by the time-out of the connection, and `probe_at` by [`SendWindow::probe_delay`]. It sets `credit_at`
//!    by [`SendWindow::credit_delay`], as long as [`SendWindow::lacks_credit`] says so.
//!
//! Calls of step 1 may be repeated before the other steps. None of the steps allocates memory by a number that a peer
//! has chosen.
//!
//! # The contract of a responder
//! The caller asks [`Expected::judge`] for each request. It does a request that is next, and calls [`Expected::done`].
//! A request that is ahead is held ([`Held::hold`]) or dropped, and [`Naks::ask`] says whether the requester is told.
//! After each request that was done, [`Held::take`] returns the next one if it is held. Timers are
//! [`Held::until`] and [`Naks::next`].
//!
//! # Example
//! ```
//! use reliability::{Kind, SendWindow};
//! use roce::Psn;
//!
//! let mut window = SendWindow::new(Psn::new(100));
//! window.push("a message of two packets", 2, Kind::default());
//!
//! let mut sent = Vec::new();
//! while let Some(packet) = window.poll_transmit(1) {
//!     sent.push(packet.psn.get());
//!     window.transmitted();
//! }
//! assert_eq!(sent, [100, 101]);
//!
//! // The first packet is lost, and the responder sends a NAK for its PSN.
//! window.handle_ack(Psn::new(99));
//! window.handle_nak();
//! assert_eq!(window.poll_transmit(1).map(|packet| packet.psn), Some(Psn::new(100)));
//! window.transmitted();
//! window.transmitted();
//!
//! window.handle_ack(Psn::new(101));
//! assert!(window.take_progress());
//! assert_eq!(window.poll_completed(), Some("a message of two packets"));
//! ```
//!
//! # States that are saved
//! A [`SendWindow`], an [`Expected`], a [`Held`], a [`Naks`] and a [`Flow`] can be saved, and go on in another process.
//! What is loaded is checked: a state that no connection can be in is refused ([`Wrong`]). Times are saved as distances
//! from now ([`Moment`]).

#![forbid(unsafe_code)]
// Sizes and numbers of packets are far below 2^32.
#![allow(clippy::cast_possible_truncation)]

#[cfg(test)]
mod adapter;
mod cwnd;
mod dcqcn;
#[cfg(test)]
mod drop_tail;
mod expected;
mod flow;
mod gaps;
mod held;
#[cfg(test)]
mod incast;
mod naks;
mod pace;
mod probe;
mod queue;
#[cfg(test)]
mod random;
mod rate_limit;
mod saved;
#[cfg(test)]
mod simulation;
mod sync;
mod trains;
mod window;

pub use dcqcn::{Notifier, LINE_RATE};
pub use expected::{Expected, Verdict, MOST_UNDER_WAY};
pub use flow::Flow;
pub use held::{Held, HeldPacket, Hold, HoldQuota};
pub use naks::Naks;
pub use pace::Pace;
pub use probe::Probe;
pub use rate_limit::{RateLimit, Turn};
pub use saved::{require, Moment, Wrong};
pub use window::{
    Kind, Response, SavedSendWindow, SendWindow, Transmit, MOST_OFFERS, MOST_PACKETS_OF_MESSAGE,
};
