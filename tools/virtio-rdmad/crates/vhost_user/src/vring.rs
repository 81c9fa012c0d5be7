// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the front end said of one queue so far.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::GuestMemory;
use ring::Layout;

use crate::wire::VringAddr;
use crate::Signal;

/// A queue that is ready to run.
#[derive(Debug)]
pub struct QueueSetup {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// Where the queue is, in guest addresses, and how it works.
    pub layout: Layout,
    /// Available index to begin at.
    pub base: u16,
    /// Becomes readable when the driver made buffers available. An eventfd that front end and
    /// guest write to: watch it edge-triggered and never read it.
    pub kick: OwnedFd,
    /// Interrupts the guest.
    pub signal: Arc<Signal>,
}

/// The state of one queue.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub(crate) size: u16,
    pub(crate) base: u16,
    pub(crate) addr: Option<VringAddr>,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) enabled: bool,
    /// The layout it runs with, if it runs.
    pub(crate) running: Option<Layout>,
    /// The layout that it ran with, until `base` is what the device left there.
    pub(crate) stopped: Option<Layout>,
    pub(crate) signal: Arc<Signal>,
}

impl Vring {
    /// Whether everything is there and it does not run yet.
    pub(crate) fn ready(&self) -> bool {
        let complete = self.addr.is_some() && self.kick.is_some() && self.size > 0;
        self.enabled && complete && self.running.is_none()
    }
}
