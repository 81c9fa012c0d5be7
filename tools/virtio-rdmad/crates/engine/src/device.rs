// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device of one guest.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use abi::{
    VIRTIO_RDMA_EVENT_CQ_ERR, VIRTIO_RDMA_EVENT_QP_FATAL, VIRTIO_RDMA_F_CQ_MODERATION,
    VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_XRC,
    VIRTIO_RDMA_WC_LOC_ACCESS_ERR, VIRTIO_RDMA_WC_LOC_LEN_ERR, VIRTIO_RDMA_WC_LOC_PROT_ERR,
    VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_MW_BIND_ERR, VIRTIO_RDMA_WC_REM_ACCESS_ERR,
    VIRTIO_RDMA_WC_REM_INV_REQ_ERR, VIRTIO_RDMA_WC_REM_OP_ERR, VIRTIO_RDMA_WC_RETRY_EXC_ERR,
    VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR, VIRTIO_RDMA_WC_WR_FLUSH_ERR,
};
use memory::GuestMemory;
use ring::{SplitQueue, MAX_SIZE};

use crate::base::counters::{Counter, Stats};
use crate::base::ready_set::{Hot, Set};
use crate::base::sync::lock;
use crate::base::table::Table;
use crate::base::timers::Timers;
use crate::config::{config_space, features, Jobs, Layout, Queue};
use crate::control::queue::Control;
use crate::memory::mr::KeyTable;
use crate::qp::halves::Qp;
use crate::qp::state::{QpState, QpType};
use crate::queue::cq::Cq;
use crate::queue::cq_ring::Due;
use crate::queue::event::{asynchronous, completion, Events};
use crate::queue::srq::Srq;
use crate::queue::users::User;
use crate::queue::virtqueue::RingQueue;
use crate::queue::wq_ring::Watch;
use crate::rights::Rights;
use crate::schedule::busy_poll::PolledSet;
use crate::schedule::change::{Change, Remap, Reset};
use crate::transport::requester::Visit;
use crate::transport::turn::{cost, Completion, Turn};
use crate::{Address, Clock, DeviceConfig, DeviceStatus, Fabric, Limits, QpStatus, Signal, Wake};

/// Entries of the virtqueues that are no QP's or CQ's; of the control queue, the fewest.
const CONTROL_SIZE: u16 = 256;
const EVENT_SIZE: u16 = 256;
const COMPLETION_EVENT_SIZE: u16 = 1024;
const DOORBELL_SIZE: u16 = 1024;

/// Timers that are taken in one call of [`Device::run`].
const MOST_TIMERS: usize = 256;
/// Queues that one call of [`Device::arm`] asks for kicks of.
const MOST_ARMED: usize = 256;

/// What [`Device::run`] leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Something was done, or is left: call again.
    Busy,
    /// There was nothing to do.
    Idle,
    /// There was nothing to do, and will be at this time.
    At(Instant),
}

/// What [`Device::run`] remembers from one call to the next.
struct Service {
    /// Queues that have work.
    active: Set,
    /// Queues that had work lately, and ask for no kicks.
    polled: PolledSet,
    /// Queues that were asked for no kicks.
    quiet: Set,
    /// Where the next call begins.
    cursor: u16,
    /// Room for the completions of a turn.
    room: Vec<Completion>,
    /// What comes before everything else.
    change: Option<Change>,
}

impl Service {
    fn new(queues: u16) -> Self {
        Self {
            active: Set::new(queues),
            polled: PolledSet::new(queues),
            quiet: Set::new(queues),
            cursor: 0,
            room: Vec::new(),
            change: None,
        }
    }

    fn clear(&mut self) {
        self.active.clear();
        self.polled.clear();
        self.quiet.clear();
        self.cursor = 0;
    }

    /// A queue whose ring is new.
    fn forget(&mut self, index: u16) {
        self.polled.remove(index);
        self.quiet.remove(index);
    }
}

/// What the guest's own thread and those of its peers share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) limits: Limits,
    pub(crate) jobs: Jobs,
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) rights: Rights,
    pub(crate) stats: Stats,
    pub(crate) cqs: Table<Mutex<Cq>>,
    pub(crate) qps: Table<Qp>,
    pub(crate) srqs: Table<Mutex<Option<Srq>>>,
    pub(crate) keys: RwLock<KeyTable>,
    pub(crate) control: Mutex<Control>,
    pub(crate) doorbells: Mutex<RingQueue>,
    /// The device-specific feature bits that are agreed on.
    agreed: AtomicU64,
    gids: Mutex<Box<[Option<Address>]>>,
    pub(crate) events: Mutex<Events>,
    pub(crate) completion_events: Box<[Mutex<Events>]>,
    /// When queues are looked at again that wait.
    pub(crate) timers: Mutex<Timers>,
    service: Mutex<Service>,
    pub(crate) hot: Hot,
    wake: Arc<dyn Wake>,
    started: AtomicBool,
    pub(crate) needs_reset: AtomicBool,
    /// What the turn under way is yet to be charged with, in nanoseconds.
    charged: AtomicU64,
}

impl Shared {
    /// Counts bad input of this guest, and logs it the first time.
    pub fn complain(&self, counter: Counter, detail: &dyn Display) {
        self.stats.complain(&self.name, counter, detail);
    }

    /// The time.
    pub fn clock(&self) -> &dyn Clock {
        self.fabric.clock()
    }

    /// Whether a feature bit is agreed on.
    pub fn has(&self, feature: u32) -> bool {
        self.agreed.load(Ordering::Acquire) & 1 << feature != 0
    }

    /// Whether queues are rings in guest memory.
    pub fn has_rings(&self) -> bool {
        self.has(VIRTIO_RDMA_F_RINGS)
    }

    /// Whether there are SRQs.
    pub fn has_srqs(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_SRQ)
    }

    /// Whether there are extended reliable connections.
    pub fn has_xrc(&self) -> bool {
        self.has_srqs() && self.has(VIRTIO_RDMA_F_XRC)
    }

    /// Whether completion events are held back.
    pub fn has_cq_moderation(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_CQ_MODERATION)
    }

    /// Whether there are memory windows.
    pub fn has_mws(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_MW)
    }

    /// The numbering of virtqueues that was agreed on.
    pub fn layout(&self) -> Layout {
        Layout::new(&self.limits, self.has_rings())
    }

    /// The place of a QP number, if there was one ever.
    pub fn slot_of(&self, qpn: u32) -> Option<u16> {
        let slot = u16::try_from(qpn.checked_sub(1)?).ok()?;
        self.qps.get(slot).map(|_| slot)
    }

    /// An entry of the GID table.
    pub fn gid(&self, index: usize) -> Option<Address> {
        *lock(&self.gids).get(index)?
    }

    /// Whether the guest has a GID in a VLAN; what belongs to none, every guest
    /// gets.
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
            if !self.fabric.claim(address, self) {
                return Some(false);
            }
        }
        if let Some(before) = std::mem::replace(entry, address) {
            self.fabric.release(before, self);
        }
        Some(true)
    }

    /// Raises an event of an object.
    pub fn raise(&self, event: u32, handle: u32) {
        self.stats.add(Counter::Events, 1);
        lock(&self.events).raise(asynchronous(event, handle), &self.name, &self.stats);
    }

    /// Tells the guest of completions that were placed, if it wants to know.
    pub fn announce(&self, cq: u16) {
        let Some(place) = self.cqs.get(cq) else { return };
        let due = lock(place).take_event(self.clock());
        match due {
            Due::No => {}
            Due::Now(vector) => self.raise_completion(cq, vector),
            // The guest's own thread waits for that.
            Due::At(_) => self.make_hot(self.jobs.completion(cq)),
        }
    }

    /// Raises the event of a CQ that was held back, if it is due.
    fn release_event(&self, cq: u16) {
        let now = self.clock().now();
        let Some(place) = self.cqs.get(cq) else { return };
        let due = lock(place).take_held(now);
        let time = if let Due::At(time) = due { Some(time) } else { None };
        lock(&self.timers).set(self.jobs.completion(cq), time);
        if let Due::Now(vector) = due {
            self.raise_completion(cq, vector);
        }
    }

    fn raise_completion(&self, cq: u16, vector: u16) {
        if let Some(events) = self.completion_events.get(usize::from(vector)) {
            self.stats.add(Counter::CompletionEvents, 1);
            lock(events).raise(completion(cq.into()), &self.name, &self.stats);
        }
    }

    /// Has the guest's thread look at a queue.
    pub fn make_hot(&self, queue: u16) {
        if self.hot.call(queue) {
            self.wake.wake();
        }
    }

    /// When the send queue of a QP goes on.
    pub fn set_timer(&self, slot: u16, deadline: Option<Instant>) {
        lock(&self.timers).set(self.jobs.send(slot), deadline);
    }

    /// No event of a CQ is waited for any more.
    pub fn forget_event(&self, cq: u16) {
        lock(&self.timers).set(self.jobs.completion(cq), None);
    }

    /// Places CQEs.
    pub fn complete<'a>(&self, cq: u16, completions: impl Iterator<Item = &'a Completion>) {
        let Some(place) = self.cqs.get(cq) else { return };
        let mut overflow = false;
        let mut place = lock(place);
        for Completion { cqe, solicited, .. } in completions {
            overflow |= place.complete(cqe, *solicited, &self.name, &self.stats).is_err();
        }
        drop(place);
        if overflow {
            self.fail_cq(cq);
        }
    }

    /// A CQ has come to be in error.
    pub fn fail_cq(&self, cq: u16) {
        self.raise(VIRTIO_RDMA_EVENT_CQ_ERR, cq.into());
        self.make_hot(self.jobs.completion(cq));
    }

    /// Counts a CQE with an error.
    pub fn count_error(&self, status: u32) {
        let counter = match status {
            VIRTIO_RDMA_WC_LOC_LEN_ERR => Counter::LocalLength,
            VIRTIO_RDMA_WC_LOC_QP_OP_ERR => Counter::LocalQpOperation,
            VIRTIO_RDMA_WC_LOC_PROT_ERR => Counter::LocalProtection,
            VIRTIO_RDMA_WC_LOC_ACCESS_ERR => Counter::LocalAccess,
            VIRTIO_RDMA_WC_WR_FLUSH_ERR => Counter::Flushed,
            VIRTIO_RDMA_WC_MW_BIND_ERR => Counter::MemoryManagement,
            VIRTIO_RDMA_WC_REM_INV_REQ_ERR => Counter::RemoteInvalidRequest,
            VIRTIO_RDMA_WC_REM_ACCESS_ERR => Counter::RemoteAccess,
            VIRTIO_RDMA_WC_REM_OP_ERR => Counter::RemoteOperation,
            VIRTIO_RDMA_WC_RETRY_EXC_ERR => Counter::RetryExceeded,
            VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR => Counter::RnrRetryExceeded,
            _ => return,
        };
        self.stats.add(counter, 1);
    }

    /// The GIDs that are set, by index. No lock is held when it returns: commands take this one with
    /// that of the control queue held.
    fn gids(&self) -> Vec<(u16, Address)> {
        let gids = lock(&self.gids);
        (0..).zip(gids.iter()).filter_map(|(index, entry)| Some((index, (*entry)?))).collect()
    }

    /// After a CQ has overflowed: every QP and SRQ that uses it fails. Whether some are left at the
    /// end of the turn.
    fn service_overflow(&self, cq: u16, turn: &mut Turn) -> bool {
        let Some(place) = self.cqs.get(cq) else { return false };
        self.fail_users(turn, || lock(place).users.next_to_fail())
    }

    /// Has all users fail that `next` names, until the turn is over; whether some are left.
    pub fn fail_users(&self, turn: &mut Turn, mut next: impl FnMut() -> Option<User>) -> bool {
        while !turn.is_over() {
            match next() {
                Some(User::Qp(slot)) => self.fail_qp(slot),
                Some(User::Srq(slot)) => self.fail_srq(slot),
                None => return false,
            }
            turn.work(cost::OBJECT);
        }
        true
    }

    /// Has a QP fail, unless it has or does nothing.
    fn fail_qp(&self, slot: u16) {
        let Some(qp) = self.qps.get(slot) else { return };
        let mut responder = lock(&qp.responder);
        if responder.config.is_some() && !matches!(qp.state(), QpState::Err | QpState::Reset) {
            self.fail_responder(slot, &mut responder, Some(VIRTIO_RDMA_EVENT_QP_FATAL));
        }
    }

    /// Does what a queue has to do in its turn.
    fn visit(self: &Arc<Self>, queue: Queue, turn: &mut Turn) -> Visit {
        match queue {
            Queue::Control => self.service_control(turn),
            Queue::Completion(cq) => {
                let more = self.service_overflow(cq, turn);
                self.release_event(cq);
                if more {
                    Visit::More
                } else {
                    Visit::Parked
                }
            }
            Queue::Send(slot) => self.service_send(slot, turn),
            Queue::Receive(slot) if self.service_receive(slot, turn) => Visit::More,
            Queue::Srq(slot) if self.service_srq(slot, turn) => Visit::More,
            Queue::Receive(_) | Queue::Srq(_) => Visit::Parked,
            Queue::Event => lock(&self.events).service(&self.name, &self.stats, turn),
            Queue::CompletionEvents(vector) => {
                match self.completion_events.get(usize::from(vector)) {
                    Some(events) => lock(events).service(&self.name, &self.stats, turn),
                    None => Visit::Parked,
                }
            }
            Queue::Doorbell => self.service_doorbells(turn),
        }
    }

    /// Calls `f` with the virtqueue of a queue; `None` if it is none.
    pub fn with_virtqueue<R>(
        &self,
        queue: Queue,
        f: impl FnOnce(&mut RingQueue) -> R,
    ) -> Option<R> {
        Some(match queue {
            Queue::Control => f(&mut lock(&self.control).ring),
            Queue::Completion(cq) => f(lock(self.cqs.take(cq)).virtqueue()?),
            Queue::Send(slot) => f(lock(&self.qps.take(slot).requester).queue.virtqueue()?),
            Queue::Receive(slot) => f(lock(&self.qps.take(slot).responder).queue.virtqueue()?),
            Queue::Event => f(&mut lock(&self.events).ring),
            Queue::CompletionEvents(vector) => {
                f(&mut lock(self.completion_events.get(usize::from(vector))?).ring)
            }
            Queue::Doorbell => f(&mut lock(&self.doorbells)),
            Queue::Srq(_) => return None,
        })
    }

    /// Asks to be told of the next work in a queue that is looked at; whether
    /// there is some already.
    fn enable_notify(&self, queue: Queue) -> bool {
        match queue {
            Queue::Send(slot) => {
                let Some(qp) = self.qps.get(slot) else { return false };
                lock(&qp.requester).queue.enable_notify()
            }
            queue => self.with_virtqueue(queue, RingQueue::enable_notify).unwrap_or(false),
        }
    }

    /// Asks not to be told, as the queue is looked at.
    fn disable_notify(&self, queue: Queue) {
        match queue {
            Queue::Send(slot) => {
                if let Some(qp) = self.qps.get(slot) {
                    lock(&qp.requester).queue.disable_notify();
                }
            }
            queue => {
                self.with_virtqueue(queue, RingQueue::disable_notify);
            }
        }
    }

    /// Whether a queue is looked at without being kicked.
    fn is_polled(queue: Queue) -> bool {
        matches!(queue, Queue::Control | Queue::Doorbell | Queue::Send(_))
    }

    /// One turn for each queue that has work; whether work was done or is left.
    fn round(self: &Arc<Self>, service: &mut Service, turn: &mut Turn, budget: u32) -> bool {
        let looks = service.polled.look(&mut service.active);
        turn.work_between(looks as u64 * cost::LOOK);
        while let Some(number) = service.polled.next_tired() {
            turn.work_between(cost::VISIT);
            self.arm(service, number);
        }
        let mut left = budget;
        let mut worked = false;
        let start = service.cursor;
        for (from, to) in [(start, self.jobs.count()), (0, start)] {
            let mut at = from;
            while let Some(number) = service.active.next(at).filter(|number| *number < to) {
                if left == 0 || turn.is_round_over() {
                    service.cursor = number;
                    return true;
                }
                worked |= self.turn(service, number, turn, &mut left);
                at = number + 1;
            }
        }
        service.cursor = 0;
        worked
    }

    /// One turn of [`Device::run`] for one queue; whether work was done.
    fn turn(
        self: &Arc<Self>,
        service: &mut Service,
        number: u16,
        turn: &mut Turn,
        left: &mut u32,
    ) -> bool {
        let Some(queue) = self.jobs.queue(number) else { return false };
        if Self::is_polled(queue) && !service.quiet.contains(number) {
            service.quiet.insert(number);
            self.disable_notify(queue);
        }
        if queue == Queue::Control {
            // Deregistration waits for whoever holds a region.
            turn.release();
        }
        let given = turn.begin(*left, service.active.len() <= 1);
        let visit = self.visit(queue, turn);
        turn.work(self.take_charge());
        turn.end();
        if queue == Queue::Doorbell {
            // The rings that it named have their turn in this round.
            self.hot.take(&mut service.active);
        }
        let spent = given - turn.left();
        *left -= spent;
        service.active.remove(number);
        match visit {
            Visit::More => service.active.insert(number),
            Visit::Done => service.polled.had_work(number, turn.taken, || self.watch(queue)),
            Visit::Parked => service.polled.remove(number),
            Visit::Empty => {
                if service.polled.was_empty(number, turn.taken, || self.watch(queue)) {
                    self.arm(service, number);
                }
            }
        }
        if queue == Queue::Control && visit != Visit::Empty {
            service.polled.forget_watches();
        }
        spent != 0 || visit == Visit::More
    }

    /// Charges the turn under way, of the guest's own thread, with work of so many nanoseconds.
    pub fn charge(&self, nanoseconds: u64) {
        self.charged.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// What was charged since this was last asked.
    pub fn take_charge(&self) -> u64 {
        // Most turns are charged with nothing.
        match self.charged.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.charged.swap(0, Ordering::Relaxed),
        }
    }

    /// A watch of a send ring.
    fn watch(&self, queue: Queue) -> Option<Watch> {
        let Queue::Send(slot) = queue else { return None };
        lock(&self.qps.get(slot)?.requester).queue.watch()
    }

    /// Asks for kicks of a polled queue; whether work has come meanwhile.
    fn arm(&self, service: &mut Service, number: u16) -> bool {
        service.polled.remove(number);
        service.quiet.remove(number);
        let Some(queue) = self.jobs.queue(number) else { return false };
        let more = self.enable_notify(queue);
        if more {
            service.active.insert(number);
        }
        more
    }

    /// The control queue is broken: only a reset helps.
    pub fn set_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
    }
}

/// The device of one guest: what a transport drives.
///
/// All methods but [`Device::status`] are for the one thread that serves the
/// guest.
pub struct Device {
    shared: Arc<Shared>,
    config_space: [u8; 256],
    features: u64,
}

impl Device {
    pub(crate) fn new(fabric: Arc<Fabric>, config: DeviceConfig) -> Self {
        let DeviceConfig { name, mac, addresses, limits, rings, wake } = config;
        let limits = limits.clamped();
        let jobs = Jobs::new(&limits);
        let node = mac.unwrap_or_else(random_mac);
        let config_space = config_space(&limits, rings, mac, node);
        let shared = Shared {
            name,
            jobs,
            fabric,
            rights: Rights::new(mac, addresses),
            stats: Stats::new(),
            cqs: Table::new(limits.max_cq.max(limits.ring_cq)),
            qps: Table::new(limits.max_qp.max(limits.ring_qp)),
            srqs: Table::new(limits.max_srq),
            keys: RwLock::new(KeyTable::default()),
            control: Mutex::new(Control::new(&limits)),
            doorbells: Mutex::new(RingQueue::default()),
            agreed: AtomicU64::new(0),
            gids: Mutex::new(vec![None; limits.gid_table.into()].into()),
            events: Mutex::new(Events::default()),
            completion_events: (0..limits.comp_vectors).map(|_| Mutex::default()).collect(),
            timers: Mutex::new(Timers::default()),
            service: Mutex::new(Service::new(jobs.count())),
            hot: Hot::new(jobs.count()),
            wake,
            started: AtomicBool::new(false),
            needs_reset: AtomicBool::new(false),
            charged: AtomicU64::new(0),
            limits,
        };
        Self { shared: Arc::new(shared), config_space, features: features(mac, rings) }
    }

    /// What peers use of it.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The configuration space.
    pub fn config_space(&self) -> [u8; 256] {
        self.config_space
    }

    /// Device-specific feature bits.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// What driver and device agreed on (FEATURES_OK): the device-specific bits
    /// among `features`, all of which were offered. It decides what the
    /// virtqueues are for, so it comes before the first of them, and changes
    /// nothing afterwards; it stays over a reset until the next call.
    pub fn set_driver_features(&self, features: u64) {
        if self.shared.started.load(Ordering::Acquire) {
            return;
        }
        self.shared.agreed.store(self.features & features, Ordering::Release);
    }

    /// How many virtqueues there are, whatever the driver agrees on.
    pub fn queue_count(&self) -> u16 {
        self.layouts().map(Layout::count).max().unwrap_or(0)
    }

    /// The largest size of a virtqueue, whatever the driver agrees on; 0 if there
    /// is no such queue.
    pub fn queue_max_size(&self, index: u16) -> u16 {
        let limits = &self.shared.limits;
        let size = |queue| match queue {
            Queue::Control => control_size(limits.max_cq),
            Queue::Completion(_) => limits.cq_size,
            Queue::Send(_) | Queue::Receive(_) => limits.wq_size,
            Queue::Event => EVENT_SIZE,
            Queue::CompletionEvents(_) => COMPLETION_EVENT_SIZE,
            Queue::Doorbell => DOORBELL_SIZE,
            Queue::Srq(_) => 0,
        };
        self.layouts().filter_map(|layout| layout.queue(index)).map(size).max().unwrap_or(0)
    }

    /// The numberings of virtqueues that the driver may agree on.
    fn layouts(&self) -> impl Iterator<Item = Layout> {
        let limits = self.shared.limits.clone();
        let rings = self.features & 1 << VIRTIO_RDMA_F_RINGS != 0;
        [false, true]
            .into_iter()
            .filter(move |with| !with || rings)
            .map(move |with| Layout::new(&limits, with))
    }

    /// Starts the device (DRIVER_OK): the guest's memory, and for each queue
    /// that the guest set up its ring and its interrupt.
    pub fn start(
        &self,
        memory: &GuestMemory,
        queues: impl IntoIterator<Item = (u16, SplitQueue, Arc<dyn Signal>)>,
    ) {
        if self.shared.started.swap(true, Ordering::AcqRel) {
            self.set_memory(memory);
        } else {
            self.settle();
            self.shared.give_memory(&mut lock(&self.shared.control), memory);
        }
        for (index, ring, signal) in queues {
            self.set_queue(index, ring, signal);
        }
    }

    /// Puts a queue in place, for transports that bring one at a time. Ignored
    /// for an index that does not exist.
    pub fn set_queue(&self, index: u16, ring: SplitQueue, signal: Arc<dyn Signal>) {
        let shared = &self.shared;
        let Some(queue) = shared.layout().queue(index) else { return };
        let number = shared.jobs.number(queue);
        shared.started.store(true, Ordering::Release);
        lock(&shared.service).forget(number);
        self.finish_request(queue);
        shared.with_virtqueue(queue, |place| place.set(Some(ring), Some(signal)));
        if let Queue::Receive(slot) = queue {
            lock(&shared.qps.take(slot).responder).notify = true;
        }
        shared.make_hot(number);
    }

    /// Replaces the interrupt of a queue.
    pub fn set_signal(&self, index: u16, signal: Arc<dyn Signal>) {
        if let Some(queue) = self.shared.layout().queue(index) {
            self.shared.with_virtqueue(queue, |place| place.set_signal(signal));
        }
    }

    /// Takes a queue away and returns the available index to go on from;
    /// `None` if there was none.
    pub fn stop_queue(&self, index: u16) -> Option<u16> {
        let queue = self.shared.layout().queue(index)?;
        lock(&self.shared.service).forget(self.shared.jobs.number(queue));
        self.finish_request(queue);
        let ring = self.shared.with_virtqueue(queue, RingQueue::take)??;
        Some(ring.next_avail())
    }

    /// Ends a request that was taken from a queue that goes, if it is the control queue.
    fn finish_request(&self, queue: Queue) {
        if queue == Queue::Control {
            let mut control = lock(&self.shared.control);
            self.shared.go_on_request(&mut control, &mut Turn::endless());
        }
    }

    /// Begins to follow a change of the guest's memory map: rings and memory regions are found again.
    /// A region that is no longer in memory is invalid until a later change brings it back.
    ///
    /// [`Device::run`] goes on with it, and does nothing else before it has come to its end. Once the
    /// device [is settled](Self::is_settled), nothing of the old map is in use but by rings that the
    /// new one does not hold. What was begun before and has not come to its end does so now, however
    /// long that takes.
    pub fn begin_memory(&self, memory: &GuestMemory) {
        self.settle();
        let mut service = lock(&self.shared.service);
        service.polled.forget_watches();
        service.change = Some(Change::Memory(Box::new(Remap::new(memory))));
    }

    /// Begins to reset the device (status 0, or the guest has gone): everything that the guest made is
    /// destroyed. As with [`Self::begin_memory`], [`Device::run`] goes on with it; once the device is
    /// settled, no thread touches the guest's memory.
    ///
    /// There is nothing to do for a device that was not started since the last reset.
    pub fn begin_reset(&self) {
        self.settle();
        if self.shared.started.swap(false, Ordering::AcqRel) {
            let mut service = lock(&self.shared.service);
            service.clear();
            service.change = Some(Change::Reset(Reset::new()));
        }
    }

    /// Whether what [`Self::begin_memory`] or [`Self::begin_reset`] began last has come to its end.
    pub fn is_settled(&self) -> bool {
        lock(&self.shared.service).change.is_none()
    }

    /// Goes on at once to the end of what was begun, however long that takes.
    pub fn settle(&self) {
        let change = lock(&self.shared.service).change.take();
        if let Some(mut change) = change {
            while !change.run(&self.shared, &mut Turn::endless()) {
                std::thread::yield_now();
            }
        }
    }

    /// Follows a change of the guest's memory map at once, as [`Self::begin_memory`].
    pub fn set_memory(&self, memory: &GuestMemory) {
        self.begin_memory(memory);
        self.settle();
    }

    /// Resets the device at once, as [`Self::begin_reset`].
    pub fn reset(&self) {
        self.begin_reset();
        self.settle();
    }

    /// Whether the guest broke its control queue, so that the status of the
    /// device shows DEVICE_NEEDS_RESET.
    pub fn needs_reset(&self) -> bool {
        self.shared.needs_reset.load(Ordering::Acquire)
    }

    /// A queue has new buffers. Cheap; [`Device::run`] does the work.
    pub fn kick(&self, index: u16) {
        if let Some(queue) = self.shared.layout().queue(index) {
            self.shared.hot.set(self.shared.jobs.number(queue));
        }
    }

    /// Does what there is to do, `budget` messages or chunks at most, and no more than 0.2 ms of
    /// work: what takes longer goes on with the next call. What [`Device::begin_memory`] or
    /// [`Device::begin_reset`] began comes first.
    ///
    /// Queues that had work are looked at again by each later call, without
    /// being kicked, until [`Device::arm`].
    pub fn run(&self, budget: u32) -> Next {
        let shared = &self.shared;
        let mut service = lock(&shared.service);
        let service = &mut *service;
        shared.hot.begin();
        shared.hot.take(&mut service.active);
        let mut turn = Turn::default();
        if let Some(mut change) = service.change.take() {
            turn.begin(budget, true);
            if !change.run(shared, &mut turn) {
                service.change = Some(change);
            }
            turn.end();
            shared.stats.add(Counter::Work, turn.finish(shared));
            return Next::Busy;
        }
        let is_late = self.expire(service, &mut turn);
        turn.outbox.completions = std::mem::take(&mut service.room);
        let worked = shared.round(service, &mut turn, budget);
        shared.stats.add(Counter::Work, turn.finish(shared));
        service.room = turn.outbox.completions;
        if worked || is_late || !service.active.is_empty() || !shared.hot.is_empty() {
            return Next::Busy;
        }
        lock(&shared.timers).next().map_or(Next::Idle, Next::At)
    }

    /// Makes queues hot whose time has come; whether some are left for the next call.
    fn expire(&self, service: &mut Service, turn: &mut Turn) -> bool {
        let shared = &self.shared;
        let mut timers = lock(&shared.timers);
        if timers.next().is_none() {
            return false;
        }
        let now = shared.clock().now();
        for _ in 0..MOST_TIMERS {
            let Some(queue) = timers.pop(now) else { return false };
            turn.work_between(cost::TIMER);
            service.active.insert(queue);
        }
        true
    }

    /// Prepares for sleep: asks the guest for kicks of every queue. `true`: work
    /// has come meanwhile, or there are many queues; call [`Device::run`] again. `false`: the thread may
    /// sleep until a kick, a [`Wake`] or the time that `run` named.
    pub fn arm(&self) -> bool {
        let shared = &self.shared;
        let mut service = lock(&shared.service);
        let mut more = false;
        for _ in 0..MOST_ARMED {
            let Some(number) = service.polled.any() else { break };
            more |= shared.arm(&mut service, number);
        }
        more || service.polled.any().is_some()
            || !service.active.is_empty()
            || !shared.hot.is_empty()
    }

    /// Handles one control request outside of the control queue: the bytes that
    /// the device reads, and room for those that it writes. Returns how many it
    /// wrote; 0 if there was no room for a status.
    pub fn command(&self, request: &[u8], reply: &mut [u8]) -> usize {
        lock(&self.shared.service).polled.forget_watches();
        self.shared.command_at_once(&mut lock(&self.shared.control), request, reply)
    }

    /// What the device tells of itself. For any thread; waits for a control
    /// command under way.
    pub fn status(&self) -> DeviceStatus {
        let shared = &self.shared;
        let gids = shared.gids();
        let (mrs, mws, pds) = lock(&shared.control).counts();
        DeviceStatus {
            name: shared.name.clone(),
            started: shared.started.load(Ordering::Acquire),
            gids,
            qps: shared.qps.iter().filter_map(|(slot, qp)| qp_status(slot, qp)).collect(),
            srqs: shared.srq_status(),
            cqs: shared.cqs.iter().filter(|(_, cq)| lock(cq).is_live()).count(),
            mrs,
            mws,
            pds,
            counters: Counter::ALL.iter().map(|c| (c.name(), shared.stats.get(*c))).collect(),
        }
    }

    /// A counter's value.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.shared.stats.get(counter)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.reset();
    }
}

fn qp_status(slot: u16, qp: &Qp) -> Option<QpStatus> {
    let sends = lock(&qp.requester).queue.waiting();
    let responder = lock(&qp.responder);
    let kind = responder.config?.kind;
    let state = qp.state();
    let peer = kind.is_connected() && !matches!(state, QpState::Reset | QpState::Init);
    Some(QpStatus {
        qpn: u32::from(slot) + 1,
        service: match kind {
            QpType::Gsi => "GSI",
            QpType::Rc => "RC",
            QpType::Uc => "UC",
            QpType::Ud => "UD",
            QpType::XrcIni => "XRC_INI",
            QpType::XrcTgt => "XRC_TGT",
        },
        state,
        dest_qpn: peer.then_some(responder.attr.dest_qp_num),
        dest_gid: peer.then_some(responder.attr.ah_attr.grh.dgid),
        sends,
        receives: responder.queue.waiting(),
    })
}

/// Entries of the control queue: two for a notification of each CQ, and for another command
/// (specification, chapter 2).
fn control_size(max_cq: u16) -> u16 {
    let needed = 2 * (u32::from(max_cq) + 1);
    u16::try_from(needed.next_power_of_two()).map_or(MAX_SIZE, |size| size.max(CONTROL_SIZE))
}

/// A locally administered address, for a device without a network interface.
fn random_mac() -> [u8; 6] {
    let mut mac = [0; 6];
    // Without random numbers all such devices have one GUID, which only
    // management tools look at.
    let _ = getrandom::fill(&mut mac);
    mac[0] = mac[0] & 0xfe | 2;
    mac
}
