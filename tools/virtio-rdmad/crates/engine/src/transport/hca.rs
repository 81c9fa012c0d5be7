// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HCA of one guest: the objects that messages reach, by the guest's own thread and those of its
//! peers.
//!
//! What peers touch is under locks of its own, of which a thread holds one of a kind (see the crate's
//! contract of concurrency).

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use abi::{
    VIRTIO_RDMA_EVENT_CQ_ERR, VIRTIO_RDMA_EVENT_PORT_ACTIVE, VIRTIO_RDMA_EVENT_PORT_ERR,
    VIRTIO_RDMA_EVENT_SRQ_ERR, VIRTIO_RDMA_PORT,
};
use reliability::{HoldQuota, RateLimit};
use roce::Psn;

use super::fabric_core::FabricCore;
use crate::base::address::Address;
use crate::base::counters::{Counter, Stats};
use crate::base::features::Features;
use crate::base::guest_clock::GuestClock;
use crate::base::host::{Clock, Incident, Wake};
use crate::base::identity::Identity;
use crate::base::limits::Limits;
use crate::base::observe::{Observation, Observer, Seen};
use crate::base::port::PortState;
use crate::base::queues::Jobs;
use crate::base::quota::Quota;
use crate::base::ready_set::ReadySet;
use crate::base::slot::Slot;
use crate::base::sync::{lock, read, write};
use crate::base::table::Table;
use crate::base::timers::Timers;
use crate::base::traffic_class::{CurrentClasses, TrafficClasses};
use crate::memory::key_table::KeyTable;
use crate::qp::halves;
use crate::qp::state::QpState;
use crate::queue::cq::{Cq, Cqe};
use crate::queue::cq_ring::Due;
use crate::queue::event::{asynchronous, completion, Event, Events};
use crate::queue::inbox::Inbox;
use crate::queue::srq::Srq;

/// A QP of an HCA, whose other end belongs to another one.
pub(crate) type Qp = halves::Qp<Hca>;
/// The half of a QP that sends.
pub(crate) type RequesterHalf = halves::RequesterHalf<Hca>;
/// The half of a QP that receives.
pub(crate) type ResponderHalf = halves::ResponderHalf<Hca>;
/// The responder of a QP.
pub(crate) type Responder = halves::Responder<Hca>;
/// The other end of a connection, as it was found.
pub(crate) type Peer = halves::Peer<Hca>;

impl Responder {
    /// Makes the requester that waits for this responder try again, if one waits. Returns whether the requester can do
    /// so now: its QP has not come to an end, and its guest is not frozen.
    pub fn rouse(&mut self) -> bool {
        let Some((device, slot)) = self.waiter.take() else { return false };
        device.make_ready(device.jobs.send(slot));
        let sends = |qp: &Qp| matches!(qp.state(), QpState::Rts | QpState::Sqd);
        !device.is_frozen() && device.qps.get(slot).is_some_and(sends)
    }
}

/// The QPs of an HCA, and the time of the guest, which stands still while the device is frozen. Each message of a peer
/// finds its QP and asks whether the device is frozen, so both are in one cache line.
#[repr(align(64))]
pub(crate) struct Qps {
    table: Table<Qp, Slot>,
    clock: GuestClock,
}

const _: () = assert!(size_of::<Qps>() == 64, "it is one cache line");

impl Deref for Qps {
    type Target = Table<Qp, Slot>;

    fn deref(&self) -> &Table<Qp, Slot> {
        &self.table
    }
}

/// An entry of the GID table.
#[derive(Clone, Copy, PartialEq, Eq)]
struct GidEntry {
    address: Address,
    /// Whether the guest may not use the address any more. It has the address again when it may.
    is_withdrawn: bool,
}

/// The reason why an address cannot be put into the GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GidError {
    /// There is no entry of this index.
    NoEntry,
    /// The guest may not use the address.
    Forbidden,
    /// Another guest has it.
    Taken,
}

/// The HCA of one guest.
pub(crate) struct Hca {
    /// The identity of the HCA.
    pub identity: Identity,
    /// The limits of the guest.
    pub limits: Limits,
    /// The part of the limits that the guest may use.
    quota: Mutex<Quota>,
    /// The features that driver and device agreed on.
    pub features: Features,
    /// Counters, and the guest's name.
    pub stats: Stats,
    /// Frames that came over the wire.
    pub inbox: Mutex<Inbox>,
    /// The classes of traffic that its packets may be in.
    pub classes: CurrentClasses,
    /// The limit of the rate at which the guest sends over the wire.
    pub rate_limit: RateLimit,
    /// The limit of the rate of the guest's work requests.
    pub message_limit: RateLimit,
    /// The quota of packets that came too early and that its connections hold.
    pub hold_quota: HoldQuota,
    /// The fabric of the device, by which it finds the other devices.
    pub fabric: Arc<FabricCore<Hca>>,
    /// CQs by number.
    pub cqs: Table<Mutex<Cq>>,
    /// QPs by place: their number less one.
    pub qps: Qps,
    /// SRQs by place: their number less one.
    pub srqs: Table<Mutex<Option<Srq>>, Slot>,
    /// Held by a thread that counts, for the status, the work requests that wait in rings.
    pub status: Mutex<()>,
    /// Regions and windows by key.
    pub keys: RwLock<KeyTable>,
    /// The GID table.
    gids: Mutex<Box<[Option<GidEntry>]>>,
    /// The state of the port that the guest was told of last, if it was told of any.
    told_port: Mutex<Option<PortState>>,
    /// The asynchronous events.
    pub events: Mutex<Events>,
    /// The completion events by vector.
    pub completion_events: Box<[Mutex<Events>]>,
    /// A number for each queue.
    pub jobs: Jobs,
    /// The times at which queues that wait are visited again.
    pub timers: Mutex<Timers>,
    /// The queues that may have work.
    pub ready: ReadySet,
    wake: Arc<dyn Wake>,
    observer: RwLock<Option<Arc<dyn Observer>>>,
    needs_reset: AtomicBool,
}

impl Hca {
    /// Returns the HCA of a guest that has no object.
    pub fn new(
        name: String,
        mac: [u8; 6],
        limits: Limits,
        classes: TrafficClasses,
        quota: Quota,
        fabric: Arc<FabricCore<Self>>,
        wake: Arc<dyn Wake>,
    ) -> Self {
        let jobs = Jobs::new(&limits);
        Self {
            identity: Identity::new(mac),
            features: Features::default(),
            stats: Stats::new(name),
            inbox: Mutex::default(),
            classes: CurrentClasses::new(classes),
            rate_limit: RateLimit::new(quota.wire_rate, fabric.clock().now()),
            message_limit: RateLimit::new(quota.message_rate, fabric.clock().now()),
            quota: Mutex::new(quota),
            hold_quota: HoldQuota::default(),
            cqs: Table::new(limits.max_cq.max(limits.ring_cq)),
            qps: Qps {
                table: Table::new(limits.max_qp.max(limits.ring_qp)),
                clock: GuestClock::new(fabric.clock()),
            },
            srqs: Table::new(limits.max_srq),
            status: Mutex::default(),
            keys: RwLock::new(KeyTable::default()),
            gids: Mutex::new(vec![None; limits.gid_table.into()].into()),
            told_port: Mutex::default(),
            events: Mutex::new(Events::default()),
            completion_events: (0..limits.comp_vectors).map(|_| Mutex::default()).collect(),
            jobs,
            timers: Mutex::new(Timers::default()),
            ready: ReadySet::new(jobs.count()),
            wake,
            observer: RwLock::default(),
            needs_reset: AtomicBool::new(false),
            fabric,
            limits,
        }
    }

    /// Returns the clock of the guest.
    pub fn clock(&self) -> &dyn Clock {
        &self.qps.clock
    }

    /// Returns the time that the clock of the network shows when the clock of the guest shows `time`.
    pub fn in_network(&self, time: Instant) -> Instant {
        self.qps.clock.in_network(time)
    }

    /// Returns whether the guest's memory may not be touched. Other threads than the guest's own ask this when they
    /// have locked what guards that memory: a half of a QP, an SRQ, a CQ, a queue of events, or [`Self::status`]. The
    /// device is frozen once its own thread has had each of these locks after [`Self::freeze`].
    #[inline]
    pub fn is_frozen(&self) -> bool {
        self.qps.clock.is_stopped()
    }

    /// Marks the guest as frozen, for threads that take a lock from now on. Own thread only.
    pub fn freeze(&self) {
        self.qps.clock.stop();
    }

    /// Ends a freeze. Returns whether the guest was frozen. Own thread only, which then makes each queue ready.
    pub fn thaw(&self) -> bool {
        self.qps.clock.start()
    }

    /// Returns the place of a QP number, if there was ever a QP of that number.
    pub fn slot_of(&self, qpn: u32) -> Option<Slot> {
        let slot = Slot::of_number(qpn)?;
        self.qps.get(slot).map(|_| slot)
    }

    /// Returns the place of an SRQ number, if there was ever an SRQ of that number.
    pub fn srq_slot_of(&self, srqn: u32) -> Option<Slot> {
        let slot = Slot::of_number(srqn)?;
        self.srqs.get(slot).map(|_| slot)
    }

    /// Calls `f` with the SRQ in a place, if there is one.
    pub fn with_srq<R>(&self, slot: Slot, f: impl FnOnce(&mut Srq) -> R) -> Option<R> {
        lock(self.srqs.get(slot)?).as_mut().map(f)
    }

    /// Returns an entry of the GID table.
    pub fn gid(&self, index: usize) -> Option<Address> {
        let entry = (*lock(&self.gids).get(index)?)?;
        (!entry.is_withdrawn).then_some(entry.address)
    }

    /// Returns the addresses that the guest has, with the indices of their entries in the GID table. No lock is held
    /// when it returns: commands take this one with that of the control queue held.
    pub fn gids(&self) -> Vec<(u16, Address)> {
        self.gids_that_are(false)
    }

    /// Returns the addresses that the guest has added and may not use any more, likewise.
    pub fn withdrawn_gids(&self) -> Vec<(u16, Address)> {
        self.gids_that_are(true)
    }

    fn gids_that_are(&self, withdrawn: bool) -> Vec<(u16, Address)> {
        let gids = lock(&self.gids);
        let entries = (0..).zip(gids.iter()).filter_map(|(index, entry)| Some((index, (*entry)?)));
        let entries = entries.filter(|(_, entry)| entry.is_withdrawn == withdrawn);
        entries.map(|(index, entry)| (index, entry.address)).collect()
    }

    /// Returns whether the guest has a GID in a VLAN. Every guest gets packets that belong to no VLAN.
    pub fn is_in_vlan(&self, vlan: Option<u16>) -> bool {
        let is_in_it = |entry: &GidEntry| !entry.is_withdrawn && entry.address.vlan == vlan;
        vlan.is_none() || lock(&self.gids).iter().flatten().any(is_in_it)
    }

    /// Puts an address into an entry of the GID table, in the place of the one that is there.
    pub fn add_gid(self: &Arc<Self>, index: usize, address: Address) -> Result<(), GidError> {
        let mut gids = lock(&self.gids);
        let entry = gids.get_mut(index).ok_or(GidError::NoEntry)?;
        // The table is locked, so that no change of the rights comes between the check and the entry.
        if !self.fabric.may_use(&address, self) {
            return Err(GidError::Forbidden);
        }
        self.put_gid(entry, address)
    }

    /// Puts an address into an entry that the guest has had before, whoever may claim that address now.
    pub fn restore_gid(self: &Arc<Self>, index: usize, address: Address) -> Result<(), GidError> {
        let mut gids = lock(&self.gids);
        self.put_gid(gids.get_mut(index).ok_or(GidError::NoEntry)?, address)
    }

    fn put_gid(
        self: &Arc<Self>,
        entry: &mut Option<GidEntry>,
        address: Address,
    ) -> Result<(), GidError> {
        let new = GidEntry { address, is_withdrawn: false };
        if *entry == Some(new) {
            return Ok(());
        }
        if !self.fabric.claim(address, self) {
            return Err(GidError::Taken);
        }
        self.forget_gid(entry.replace(new));
        Ok(())
    }

    /// Notes that the guest has added an address that it may not use any more.
    pub fn withdraw_gid(&self, index: usize, address: Address) -> Result<(), GidError> {
        let mut gids = lock(&self.gids);
        let entry = gids.get_mut(index).ok_or(GidError::NoEntry)?;
        self.forget_gid(entry.replace(GidEntry { address, is_withdrawn: true }));
        Ok(())
    }

    /// Clears an entry of the GID table.
    pub fn del_gid(&self, index: usize) -> Result<(), GidError> {
        let mut gids = lock(&self.gids);
        self.forget_gid(gids.get_mut(index).ok_or(GidError::NoEntry)?.take());
        Ok(())
    }

    /// Releases the address of an entry that was replaced.
    fn forget_gid(&self, entry: Option<GidEntry>) {
        if let Some(GidEntry { address, is_withdrawn: false }) = entry {
            self.fabric.release(address, self);
        }
    }

    /// Follows a change of the addresses that the guest may use. The guest loses those that it may not use any more,
    /// and gets those back that it may use again and that no other guest has taken.
    pub fn review_gids(self: &Arc<Self>) {
        for entry in lock(&self.gids).iter_mut().flatten() {
            let is_withdrawn = !self.fabric.may_keep(&entry.address, self);
            if is_withdrawn == entry.is_withdrawn {
                continue;
            }
            if is_withdrawn {
                self.fabric.release(entry.address, self);
                entry.is_withdrawn = true;
            } else if self.fabric.may_use(&entry.address, self) {
                entry.is_withdrawn = !self.fabric.claim(entry.address, self);
            }
        }
    }

    /// Returns how much the guest may use.
    pub fn quota(&self) -> Quota {
        *lock(&self.quota)
    }

    /// Changes the quota of the guest. Queues that wait because of a rate that has changed are visited again. Any
    /// thread may call this.
    pub fn set_quota(&self, quota: Quota) {
        let before = std::mem::replace(&mut *lock(&self.quota), quota);
        let (is_other_wire_rate, is_other_message_rate) =
            (before.wire_rate != quota.wire_rate, before.message_rate != quota.message_rate);
        let now = self.clock().now();
        if is_other_wire_rate {
            self.rate_limit.set(quota.wire_rate, now);
        }
        if is_other_message_rate {
            self.message_limit.set(quota.message_rate, now);
        }
        if !is_other_wire_rate && !is_other_message_rate {
            return;
        }
        for (slot, _) in self.qps.iter() {
            self.make_ready(self.jobs.send(slot));
            self.make_ready(self.jobs.receive(slot));
        }
    }

    /// Makes a queue ready for the guest's own thread, and wakes the thread if it sleeps.
    pub fn make_ready(&self, queue: u16) {
        if self.ready.call(queue) {
            self.wake.wake();
        }
    }

    /// Sets when the send queue of a QP is visited again, or takes that back.
    pub fn set_timer(&self, slot: Slot, deadline: Option<Instant>) {
        lock(&self.timers).set(self.jobs.send(slot), deadline);
    }

    /// Notes that a queue is broken without which the device is of no use: only a reset helps.
    pub fn set_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
    }

    /// Notes that the device was reset.
    pub fn clear_needs_reset(&self) {
        self.needs_reset.store(false, Ordering::Release);
    }

    /// Returns whether only a reset helps.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Changes the observer of the QPs.
    pub fn set_observer(&self, observer: Option<Arc<dyn Observer>>) {
        *write(&self.observer) = observer;
        for (slot, qp) in self.qps.iter() {
            // The order is that in which a QP is made.
            let (mut requester, mut responder) = (lock(&qp.requester), lock(&qp.responder));
            let is_observed = self.is_observed(slot);
            (requester.observed, responder.observed) = (is_observed, is_observed);
        }
    }

    /// Returns whether somebody observes the QP in this place.
    pub fn is_observed(&self, slot: Slot) -> bool {
        read(&self.observer).as_ref().is_some_and(|observer| observer.wants(slot.number()))
    }

    /// Returns whether somebody wants to see the frames of the QP in this place.
    pub fn wants_frames(&self, slot: Slot) -> bool {
        read(&self.observer).as_ref().is_some_and(|observer| observer.wants_frames(slot.number()))
    }

    /// Reports an event of a message of a QP to the observer.
    #[cold]
    pub fn observe(&self, slot: Slot, psn: Option<Psn>, what: Observation) {
        if let Some(observer) = &*read(&self.observer) {
            observer.observe(Seen { qpn: slot.number(), psn: psn.map(Psn::get), what });
        }
    }

    /// Raises an event of an object.
    pub fn raise(&self, event: u32, handle: u32) {
        self.raise_only(event, handle);
        let incident = match event {
            VIRTIO_RDMA_EVENT_CQ_ERR => Incident::Cq { cqn: handle },
            VIRTIO_RDMA_EVENT_SRQ_ERR => Incident::Srq { srqn: handle },
            _ => return,
        };
        self.note(incident);
    }

    /// Tells the guest of the state of the port, if that is another one than it was told of last. Own thread only.
    pub fn follow_port(&self) {
        let Some(state) = self.fabric.port_state() else { return };
        if lock(&self.told_port).replace(state) == Some(state) {
            return;
        }
        let (event, other) = match state {
            PortState::Active => (VIRTIO_RDMA_EVENT_PORT_ACTIVE, VIRTIO_RDMA_EVENT_PORT_ERR),
            PortState::Down => (VIRTIO_RDMA_EVENT_PORT_ERR, VIRTIO_RDMA_EVENT_PORT_ACTIVE),
        };
        // Each kind waits once. So one that is not true any more must not stand behind the other one.
        lock(&self.events).withdraw(asynchronous(other, VIRTIO_RDMA_PORT));
        self.raise(event, VIRTIO_RDMA_PORT);
    }

    /// Raises an event of an object, and does not tell the process.
    pub fn raise_only(&self, event: u32, handle: u32) {
        self.stats.add(Counter::Events, 1);
        self.post_event(&self.events, asynchronous(event, handle));
    }

    /// Reports an incident to the process.
    #[cold]
    pub fn note(&self, incident: Incident) {
        self.wake.note(incident);
    }

    /// Places CQEs in a CQ, under one lock, each with whether it is solicited.
    pub fn complete<'a>(&self, cq: u16, completions: impl Iterator<Item = (&'a Cqe, bool)>) {
        let Some(place) = self.cqs.get(cq) else { return };
        let mut overflow = false;
        let mut place = lock(place);
        for (cqe, solicited) in completions {
            overflow |= place.complete(cqe, solicited, &self.stats).is_err();
        }
        drop(place);
        if overflow {
            self.report_cq_error(cq);
        }
    }

    /// Tells the guest of a CQ that has come to be in error, and has those fail that use it.
    pub fn report_cq_error(&self, cq: u16) {
        self.raise(VIRTIO_RDMA_EVENT_CQ_ERR, cq.into());
        self.make_ready(self.jobs.completion(cq));
    }

    /// Tells the guest of completions that were placed, if it wants to know. A guest that is frozen is told when it is
    /// not any more: its own thread does this for each CQ then.
    pub fn announce(&self, cq: u16) {
        let Some(place) = self.cqs.get(cq) else { return };
        let mut place = lock(place);
        if self.is_frozen() {
            return;
        }
        let due = place.take_event(self.clock());
        drop(place);
        match due {
            Due::No => {}
            Due::Now(vector) => self.raise_completion(cq, vector),
            // The guest's own thread waits for that.
            Due::At(_) => self.make_ready(self.jobs.completion(cq)),
        }
    }

    /// Raises the event of a CQ that was held back, if it is due.
    pub fn release_event(&self, cq: u16) {
        let now = self.clock().now();
        let Some(place) = self.cqs.get(cq) else { return };
        let due = lock(place).take_held(now);
        let time = if let Due::At(time) = due { Some(time) } else { None };
        lock(&self.timers).set(self.jobs.completion(cq), time);
        if let Due::Now(vector) = due {
            self.raise_completion(cq, vector);
        }
    }

    /// Forgets the event of a CQ that is held back, as the CQ is gone.
    pub fn forget_event(&self, cq: u16) {
        lock(&self.timers).set(self.jobs.completion(cq), None);
    }

    fn raise_completion(&self, cq: u16, vector: u16) {
        if let Some(events) = self.completion_events.get(usize::from(vector)) {
            self.stats.add(Counter::CompletionEvents, 1);
            self.post_event(events, completion(cq.into()));
        }
    }

    /// Raises an event in a queue. That of a guest that is frozen waits there until it is not any more.
    fn post_event(&self, events: &Mutex<Events>, event: Event) {
        let mut events = lock(events);
        events.raise(event);
        if !self.is_frozen() {
            events.deliver(&self.stats);
        }
    }
}
