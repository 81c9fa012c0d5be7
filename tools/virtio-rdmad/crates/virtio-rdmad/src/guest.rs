// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: the state that outlives the connections of its VMM, and the link to the worker that serves it.

pub mod events;
pub mod guests;
pub mod histogram;
pub mod mailbox;
pub mod seat;
pub mod times;
pub mod trace;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::{Device, Incident};
use memory::Share;

use crate::handover::Kept;
use crate::os::socket::Socket;
use crate::spec::{GuestSpec, Origin, PolicyChange, SpecError};
use events::{Event, Events};
use mailbox::Mailbox;
use seat::Seat;

/// The value of [`Link::worker`] for a guest that no worker serves.
const NOBODY: usize = usize::MAX;

/// The value of [`Guest::node`] for a guest whose node is not known.
pub(crate) const NO_NODE: u32 = u32::MAX;

/// Leads from a guest to the worker that serves it at present.
pub struct Link {
    mailboxes: Arc<[Mailbox]>,
    /// Index of the worker, or [`NOBODY`].
    worker: AtomicUsize,
    /// Index of the guest.
    guest: u32,
    /// Name of the guest.
    name: String,
    events: Arc<Events>,
}

impl Link {
    /// Makes the link of the guest with this index and name, which no worker serves yet.
    pub fn new(mailboxes: Arc<[Mailbox]>, guest: u32, name: String, events: Arc<Events>) -> Self {
        Self { mailboxes, worker: AtomicUsize::new(NOBODY), guest, name, events }
    }

    /// Reports an event of the guest to the clients that watch.
    pub fn tell(&self, event: Event) {
        self.events.note(&self.name, event);
    }

    /// Returns the index of the worker that serves the guest.
    pub fn worker(&self) -> Option<usize> {
        Some(self.worker.load(Ordering::Acquire)).filter(|worker| *worker != NOBODY)
    }

    /// Changes the worker that serves the guest.
    pub fn set_worker(&self, worker: Option<usize>) {
        self.worker.store(worker.unwrap_or(NOBODY), Ordering::Release);
    }
}

impl engine::Wake for Link {
    /// Makes the guest's worker give it a turn. A guest that no worker serves gets one when it is
    /// served.
    fn wake(&self) {
        let worker = || self.worker().and_then(|index| self.mailboxes.get(index));
        let wakes = || worker().is_none_or(|worker| worker.want(self.guest));
        // A worker that has retired passes nothing on. The link names another one by then.
        let _ = wakes() || wakes();
    }

    fn note(&self, incident: Incident) {
        self.tell(Event::Incident(incident));
    }
}

/// A guest.
pub struct Guest {
    /// The specification with which the guest came. The policy may have changed since: [`Self::current`] is the present
    /// specification.
    pub spec: GuestSpec,
    /// The present specification.
    pub current: Mutex<GuestSpec>,
    /// The specification as the origin of the guest names it. The policy may have been set to something else.
    pub named: Mutex<GuestSpec>,
    /// The origin that has named the guest.
    pub origin: Origin,
    /// The index of the guest while it is there.
    pub index: u32,
    /// The device of the guest.
    pub device: Arc<Device>,
    /// The feature bits of the device that its driver is not offered.
    pub withheld: u64,
    /// The link to the worker that serves the guest. A guest is served from when its VMM connects until it disconnects.
    pub link: Arc<Link>,
    /// Whether its driver, if it has started the device, agreed on rings.
    pub rings: AtomicBool,
    /// The time that turns of the guest with work have taken so far, in nanoseconds. Only the worker that serves the
    /// guest writes it.
    pub(crate) work: AtomicU64,
    /// The NUMA node of its memory, as far as that is known, or [`NO_NODE`].
    pub(crate) node: AtomicU32,
    /// The share that it has of the regions of memory that the process can map.
    pub memory: Share,
    /// The socket to which the VMM connects.
    pub socket: Socket,
    /// The socket to which the VMM connects for a network interface, if the guest has one.
    pub nic_socket: Option<Arc<Socket>>,
    /// The place for its VMM.
    pub seat: Seat,
    /// Whether it leaves when its VMM does.
    pub leaves: AtomicBool,
    /// The state that is kept for a later process, if any.
    pub kept: Option<Mutex<Kept>>,
}

impl Guest {
    /// Adds the time of a turn with work. The worker that serves the guest calls this.
    pub fn count_work(&self, time: Duration) {
        times::add(&self.work, u64::try_from(time.as_nanos()).unwrap_or(0));
    }

    /// Notes the NUMA node of its memory. The worker that serves the guest calls this.
    pub fn set_node(&self, node: Option<u32>) {
        self.node.store(node.unwrap_or(NO_NODE), Ordering::Relaxed);
    }

    /// Returns the NUMA node of its memory, if that is known: the node of the first virtqueue, since the driver last
    /// started it. Most VMMs have the memory of a guest on one node.
    pub fn node(&self) -> Option<u32> {
        Some(self.node.load(Ordering::Relaxed)).filter(|node| *node != NO_NODE)
    }

    /// Returns whether the main thread is to look for VMMs that connect.
    pub fn is_open(&self) -> bool {
        self.link.worker().is_none() || !self.seat.is_awaited()
    }

    /// Returns how long its turns with work have taken so far.
    pub fn work(&self) -> Duration {
        Duration::from_nanos(self.work.load(Ordering::Relaxed))
    }

    /// Gives up the state that is kept for a later process, because the guest is removed.
    pub fn end(&self) {
        if let Some(mut kept) = self.kept() {
            kept.end();
        }
    }

    /// Makes the guest leave when its VMM does, also if a later process serves it then.
    pub fn leave_with_vmm(&self) {
        self.leaves.store(true, Ordering::Relaxed);
        if let Some(mut kept) = self.kept() {
            kept.set_leaves();
        }
    }

    /// Returns the present specification.
    pub fn current(&self) -> GuestSpec {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the specification as the origin of the guest names it.
    pub fn named(&self) -> GuestSpec {
        self.named.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the policy of the guest, also for a later process. With `renamed`, the origin of the guest names this
    /// policy. An error changes nothing.
    pub fn set_policy(&self, change: &PolicyChange, renamed: bool) -> Result<GuestSpec, SpecError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let spec = change.of(&current)?;
        if renamed {
            *named = change.of(&named)?;
        }
        self.device.set_policy(spec.policy());
        if let Some(mut kept) = self.kept() {
            kept.set_named(&named);
            kept.set_spec(&spec);
        }
        spec.clone_into(&mut current);
        Ok(spec)
    }

    /// Returns the subject that a worker writes on the board while it works for the guest, or 0 if nothing of the guest
    /// is kept for a later process.
    pub fn subject(&self) -> u64 {
        self.kept().map_or(0, |kept| kept.subject())
    }

    /// Returns whether it is not served, because processes have aborted while they served it.
    pub fn is_fenced(&self) -> bool {
        self.kept().is_some_and(|kept| kept.is_fenced())
    }

    /// Returns the state that is kept for a later process, if any, locked.
    pub fn kept(&self) -> Option<MutexGuard<'_, Kept>> {
        Some(self.kept.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
