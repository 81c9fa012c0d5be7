// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HCA of one guest: the objects that messages reach, by the guest's own thread and those of its
//! peers.
//!
//! What peers touch is under locks of its own, of which a thread holds one of a kind (see the crate's
//! contract of concurrency).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use abi::{
    VIRTIO_RDMA_EVENT_CQ_ERR, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, VIRTIO_RDMA_EVENT_QP_FATAL,
    VIRTIO_RDMA_EVENT_QP_REQ_ERR, VIRTIO_RDMA_EVENT_SRQ_ERR,
};

use super::network::Network;
use crate::base::address::Address;
use crate::base::counters::{Counter, Stats};
use crate::base::features::Features;
use crate::base::host::{Clock, Incident, Wake};
use crate::base::identity::Identity;
use crate::base::limits::Limits;
use crate::base::queues::Jobs;
use crate::base::rate_limit::RateLimit;
use crate::base::ready_set::ReadySet;
use crate::base::sync::lock;
use crate::base::table::Table;
use crate::base::timers::Timers;
use crate::memory::key_table::KeyTable;
use crate::qp::halves;
use crate::qp::held::HoldQuota;
use crate::queue::cq::{Cq, Cqe};
use crate::queue::cq_ring::Due;
use crate::queue::event::{asynchronous, completion, Events};
use crate::queue::inbox::Inbox;
use crate::queue::srq::Srq;

/// A QP of an HCA, whose other end belongs to another one.
pub(crate) type Qp = halves::Qp<Hca>;
/// The half of a QP that sends.
pub(crate) type Requester = halves::Requester<Hca>;
/// The half of a QP that receives.
pub(crate) type Responder = halves::Responder<Hca>;
/// Where the other end of a connection was found.
pub(crate) type Peer = halves::Peer<Hca>;
/// The HCA of one guest.
pub(crate) struct Hca {
    /// Which HCA it is.
    pub identity: Identity,
    /// What the guest may use.
    pub limits: Limits,
    /// What driver and device agreed on.
    pub features: Features,
    /// Counters, and the guest's name.
    pub stats: Stats,
    /// Frames that came over the wire.
    pub inbox: Mutex<Inbox>,
    /// How much the guest may send over the wire, if that is limited.
    pub rate_limit: Option<Mutex<RateLimit>>,
    /// What its connections hold of packets that came too early.
    pub hold_quota: HoldQuota,
    /// Where the other devices are.
    pub network: Arc<Network<Hca>>,
    /// CQs by number.
    pub cqs: Table<Mutex<Cq>>,
    /// QPs by place: their number less one.
    pub qps: Table<Qp>,
    /// SRQs by place: their number less one.
    pub srqs: Table<Mutex<Option<Srq>>>,
    /// Regions and windows by key.
    pub keys: RwLock<KeyTable>,
    /// The GID table.
    gids: Mutex<Box<[Option<Address>]>>,
    /// The asynchronous events.
    pub events: Mutex<Events>,
    /// The completion events by vector.
    pub completion_events: Box<[Mutex<Events>]>,
    /// A number for each queue.
    pub jobs: Jobs,
    /// When queues that wait are visited again.
    pub timers: Mutex<Timers>,
    /// Which queues have work.
    pub ready: ReadySet,
    wake: Arc<dyn Wake>,
    needs_reset: AtomicBool,
}

impl Hca {
    /// Returns the HCA of a guest that has no object.
    pub fn new(
        name: String,
        mac: [u8; 6],
        limits: Limits,
        network: Arc<Network<Self>>,
        wake: Arc<dyn Wake>,
    ) -> Self {
        let jobs = Jobs::new(&limits);
        Self {
            identity: Identity::new(mac),
            features: Features::default(),
            stats: Stats::new(name),
            inbox: Mutex::default(),
            rate_limit: limits
                .wire_rate
                .map(|rate| Mutex::new(RateLimit::new(rate, network.clock().now()))),
            hold_quota: HoldQuota::default(),
            network,
            cqs: Table::new(limits.max_cq.max(limits.ring_cq)),
            qps: Table::new(limits.max_qp.max(limits.ring_qp)),
            srqs: Table::new(limits.max_srq),
            keys: RwLock::new(KeyTable::default()),
            gids: Mutex::new(vec![None; limits.gid_table.into()].into()),
            events: Mutex::new(Events::default()),
            completion_events: (0..limits.comp_vectors).map(|_| Mutex::default()).collect(),
            jobs,
            timers: Mutex::new(Timers::default()),
            ready: ReadySet::new(jobs.count()),
            wake,
            needs_reset: AtomicBool::new(false),
            limits,
        }
    }

    /// Returns the clock.
    pub fn clock(&self) -> &dyn Clock {
        self.network.clock()
    }

    /// Returns the place of a QP number, if there was ever a QP of that number.
    pub fn slot_of(&self, qpn: u32) -> Option<u16> {
        let slot = u16::try_from(qpn.checked_sub(1)?).ok()?;
        self.qps.get(slot).map(|_| slot)
    }

    /// Returns the place of an SRQ number, if there was ever an SRQ of that number.
    pub fn srq_slot_of(&self, srqn: u32) -> Option<u16> {
        let slot = u16::try_from(srqn.checked_sub(1)?).ok()?;
        self.srqs.get(slot).map(|_| slot)
    }

    /// Calls `f` with the SRQ in a place, if there is one.
    pub fn with_srq<R>(&self, slot: u16, f: impl FnOnce(&mut Srq) -> R) -> Option<R> {
        lock(self.srqs.get(slot)?).as_mut().map(f)
    }

    /// Returns an entry of the GID table.
    pub fn gid(&self, index: usize) -> Option<Address> {
        *lock(&self.gids).get(index)?
    }

    /// Returns the entries of the GID table that are set, with their indices. No lock is held when it
    /// returns: commands take this one with that of the control queue held.
    pub fn gids(&self) -> Vec<(u16, Address)> {
        let gids = lock(&self.gids);
        (0..).zip(gids.iter()).filter_map(|(index, entry)| Some((index, (*entry)?))).collect()
    }

    /// Returns whether the guest has a GID in a VLAN. What belongs to no VLAN, every guest gets.
    pub fn is_in_vlan(&self, vlan: Option<u16>) -> bool {
        vlan.is_none() || lock(&self.gids).iter().flatten().any(|address| address.vlan == vlan)
    }

    /// Sets or clears an entry of the GID table; `None` if there is no such
    /// entry, `Some(false)` if another guest has the GID.
    pub fn set_gid(self: &Arc<Self>, index: usize, address: Option<Address>) -> Option<bool> {
        let mut gids = lock(&self.gids);
        let entry = gids.get_mut(index)?;
        if *entry == address {
            return Some(true);
        }
        if let Some(address) = address {
            if !self.network.claim(address, self) {
                return Some(false);
            }
        }
        if let Some(before) = std::mem::replace(entry, address) {
            self.network.release(before, self);
        }
        Some(true)
    }

    /// Has the guest's own thread visit a queue, and wakes the thread if it sleeps.
    pub fn make_ready(&self, queue: u16) {
        if self.ready.call(queue) {
            self.wake.wake();
        }
    }

    /// Sets when the send queue of a QP is visited again, or takes that back.
    pub fn set_timer(&self, slot: u16, deadline: Option<Instant>) {
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

    /// Raises an event of an object.
    pub fn raise(&self, event: u32, handle: u32) {
        self.stats.add(Counter::Events, 1);
        lock(&self.events).raise(asynchronous(event, handle), &self.stats);
        let incident = match event {
            VIRTIO_RDMA_EVENT_QP_FATAL
            | VIRTIO_RDMA_EVENT_QP_REQ_ERR
            | VIRTIO_RDMA_EVENT_QP_ACCESS_ERR => Incident::Qp { qpn: handle, event },
            VIRTIO_RDMA_EVENT_CQ_ERR => Incident::Cq { cqn: handle },
            VIRTIO_RDMA_EVENT_SRQ_ERR => Incident::Srq { srqn: handle },
            _ => return,
        };
        self.wake.note(incident);
    }

    /// Tells the process that a work request of a QP has ended with an error.
    #[cold]
    pub fn note_error(&self, qpn: u32, status: u32) {
        self.wake.note(Incident::Send { qpn, status });
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

    /// Tells the guest of completions that were placed, if it wants to know.
    pub fn announce(&self, cq: u16) {
        let Some(place) = self.cqs.get(cq) else { return };
        let due = lock(place).take_event(self.clock());
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
            lock(events).raise(completion(cq.into()), &self.stats);
        }
    }
}
