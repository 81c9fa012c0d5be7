// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Code that the fuzz targets share.
//!
//! Each target reads the fuzzer's bytes as a [`Program`]. A program consists of plain bytes and of
//! operations that a guest, its driver or its VMM could do. Most operations are right but for some
//! details. "make fuzz" runs the targets. A panic or a failed assertion is a finding.

mod guest;
mod program;
mod rings;
mod secret;
mod socket;
mod tracked;
mod verbs;

pub use guest::{
    command, config, modify, Clock, Guest, Queue, DOORBELL_BYTES, INLINE, REGIONS, RING,
    RING_BYTES, SCRATCH, WINDOW,
};
pub use program::Program;
pub use rings::RING_PAGES;
pub use secret::{
    check_second_region, has_secret, hide_secrets, reg_others, GIVEN, OTHER_PD, OWN, READABLE,
};
pub use socket::{connect, serve, Conversation, Peer};
pub use tracked::Tracked;
pub use verbs::{connect_qp, create_cq, create_pd, create_qp, qp_request, reg_mr, set_state};
