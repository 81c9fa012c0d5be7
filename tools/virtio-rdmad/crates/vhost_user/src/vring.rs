// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the front end has said of one queue so far.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ring::Layout;
use serde::{Deserialize, Serialize};

use crate::signal::Call;
use crate::wire::VringAddr;

/// The state of one queue.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub(crate) size: u16,
    pub(crate) base: u16,
    pub(crate) addr: Option<VringAddr>,
    pub(crate) kick: Option<Arc<OwnedFd>>,
    pub(crate) enabled: bool,
    /// The layout that the queue runs with, if it runs.
    pub(crate) running: Option<Layout>,
    /// The layout that the queue ran with, until `base` is what the device left there.
    pub(crate) stopped: Option<Layout>,
    pub(crate) call: Arc<Call>,
}

/// What the front end has said of one queue, without its descriptors.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Saved {
    size: u16,
    base: u16,
    addr: Option<VringAddr>,
    enabled: bool,
    /// Whether the queue runs.
    running: bool,
    /// Which descriptors there are.
    kick: bool,
    call: bool,
}

impl Saved {
    /// Returns how many descriptors belong to the queue.
    pub(crate) fn descriptors(&self) -> usize {
        usize::from(self.kick) + usize::from(self.call)
    }

    /// Returns whether the queue runs.
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }
}

impl Vring {
    /// Returns what the front end has said, and adds the descriptors, that of the kick first.
    pub(crate) fn save(&self, descriptors: &mut Vec<Arc<OwnedFd>>) -> Saved {
        let call = self.call.descriptor();
        descriptors.extend(self.kick.iter().chain(&call).cloned());
        Saved {
            size: self.size,
            base: self.base,
            addr: self.addr,
            enabled: self.enabled,
            running: self.running.is_some(),
            kick: self.kick.is_some(),
            call: call.is_some(),
        }
    }

    /// Makes a queue that does not run of what the front end has said, with the descriptors in the same order.
    pub(crate) fn load(
        saved: &Saved,
        descriptors: &mut impl Iterator<Item = Arc<OwnedFd>>,
    ) -> Self {
        let &Saved { size, base, addr, enabled, .. } = saved;
        let mut take = |is_there: bool| is_there.then(|| descriptors.next()).flatten();
        let kick = take(saved.kick);
        let call = Arc::new(Call::of(take(saved.call)));
        Self { size, base, addr, kick, enabled, running: None, stopped: None, call }
    }

    /// Returns whether the front end has said everything that the queue needs, and it does not run
    /// yet.
    pub(crate) fn is_ready(&self) -> bool {
        let complete = self.addr.is_some() && self.kick.is_some() && self.size > 0;
        self.enabled && complete && self.running.is_none()
    }
}
