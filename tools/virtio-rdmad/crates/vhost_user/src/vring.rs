// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the front end has said of one queue so far.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ring::Layout;

use crate::signal::Call;
use crate::wire::VringAddr;

/// The state of one queue.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub(crate) size: u16,
    pub(crate) base: u16,
    pub(crate) addr: Option<VringAddr>,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) enabled: bool,
    /// The layout that the queue runs with, if it runs.
    pub(crate) running: Option<Layout>,
    /// The layout that the queue ran with, until `base` is what the device left there.
    pub(crate) stopped: Option<Layout>,
    pub(crate) call: Arc<Call>,
}

impl Vring {
    /// Returns whether the front end has said everything that the queue needs, and it does not run
    /// yet.
    pub(crate) fn is_ready(&self) -> bool {
        let complete = self.addr.is_some() && self.kick.is_some() && self.size > 0;
        self.enabled && complete && self.running.is_none()
    }
}
