// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of one queue: all that the front end has said of it so far.

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
    /// The layout that the device has the queue with, if the queue has started since the last reset.
    pub(crate) started: Option<Layout>,
    /// Whether `base` is not yet what the device left in the queue, which has stopped.
    pub(crate) is_base_old: bool,
    pub(crate) call: Arc<Call>,
}

/// The phase of a queue. The encoding of the first two phases is that of a `bool`, which earlier versions had in this
/// place. Earlier versions read a state without stopped queues, and refuse a state with some.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
enum Phase {
    /// The device does not have the queue.
    New,
    /// The queue runs.
    Runs,
    /// The device has the queue, which the front end has stopped or disabled.
    Stopped,
}

/// The state of one queue, as the front end has set it, without its descriptors.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SavedVring {
    size: u16,
    base: u16,
    addr: Option<VringAddr>,
    enabled: bool,
    phase: Phase,
    /// Whether there is a descriptor for kicks, and one for calls.
    kick: bool,
    call: bool,
}

impl SavedVring {
    /// Returns how many descriptors belong to the queue.
    pub(crate) fn descriptors(&self) -> usize {
        usize::from(self.kick) + usize::from(self.call)
    }

    /// Returns whether the device has the queue.
    pub(crate) fn has_started(&self) -> bool {
        self.phase != Phase::New
    }
}

impl Vring {
    /// Returns what the front end has said, and adds the descriptors, that of the kick first.
    pub(crate) fn save(&self, descriptors: &mut Vec<Arc<OwnedFd>>) -> SavedVring {
        let call = self.call.descriptor();
        descriptors.extend(self.kick.iter().chain(&call).cloned());
        SavedVring {
            size: self.size,
            base: self.base,
            addr: self.addr,
            enabled: self.enabled,
            phase: self.phase(),
            kick: self.kick.is_some(),
            call: call.is_some(),
        }
    }

    /// Makes a queue that has not started of what the front end has said, with the descriptors in the same order.
    pub(crate) fn load(
        saved: &SavedVring,
        descriptors: &mut impl Iterator<Item = Arc<OwnedFd>>,
    ) -> Self {
        let &SavedVring { size, base, addr, enabled, .. } = saved;
        let mut take = |is_there: bool| is_there.then(|| descriptors.next()).flatten();
        let kick = take(saved.kick);
        let call = Arc::new(Call::of(take(saved.call)));
        Self { size, base, addr, kick, enabled, started: None, is_base_old: false, call }
    }

    /// Returns whether the front end wants the queue to run.
    fn is_wanted(&self) -> bool {
        self.enabled && self.kick.is_some()
    }

    /// Returns whether the front end has said everything that the queue needs, and it has not started.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_wanted() && self.addr.is_some() && self.size > 0 && self.started.is_none()
    }

    /// Returns whether the device has the queue, and the front end has stopped or disabled it.
    pub(crate) fn is_stopped(&self) -> bool {
        self.started.is_some() && !self.is_wanted()
    }

    fn phase(&self) -> Phase {
        match (&self.started, self.is_stopped()) {
            (None, _) => Phase::New,
            (Some(_), false) => Phase::Runs,
            (Some(_), true) => Phase::Stopped,
        }
    }
}
