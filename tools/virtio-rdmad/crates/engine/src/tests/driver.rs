// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests in the process of the test, whose drivers are those of the crate `testkit`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use abi::*;
use memory::GuestMemory;
use reliability::SendWindow;
use ring::SplitQueue;
pub use testkit::{
    brief, gid, sge, QpRings, Send, Sizes, ALL, ATOMIC, DATA, INLINE, LOCAL, MEMORY, PAGE_SHIFT,
    READ, RING, VECTORS, WRITE,
};
use testkit::{Driver, Transport, Virtqueue};

use super::cable::cable;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::transport::rnr::PATIENCE;
use crate::{
    Clock, Counter, Device, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Limits, LoadError,
    Next, Paths, Signal, Wake,
};

/// The address and the length of a region that a test can take away from a guest.
pub const EXTRA: (u64, u64) = (1 << 41, 0x4000);

/// The largest number of nanoseconds that a turn takes, as the engine estimates it. Another guest of the
/// same thread may have to wait for so long. It is less than a third of a millisecond.
pub const TURN: u64 = 300_000;

/// The configuration of a guest.
#[derive(Clone)]
pub struct Setup {
    pub limits: Limits,
    /// The policy of the guest.
    pub policy: DevicePolicy,
    /// Whether the guest adds its GID when it starts.
    pub adds_gid: bool,
    /// The sizes of its memory and of its objects.
    pub sizes: Sizes,
}

impl Default for Setup {
    fn default() -> Self {
        let (policy, sizes) = (DevicePolicy::default(), Sizes::default());
        Self { limits: limits(), policy, adds_gid: true, sizes }
    }
}

thread_local! {
    static RINGS: Cell<bool> = const { Cell::new(false) };
    /// Whether devices are upgraded whenever guests settle.
    static HAS_UPGRADES: Cell<bool> = Cell::new(std::env::var_os("UPGRADES").is_some());
}

/// Runs a test without upgrades, because it measures rates or waits. After an upgrade a flow has no rate, a requester
/// that pauses asks its peer at once, and a packet that is missing has all of its time.
pub fn without_upgrades() {
    HAS_UPGRADES.set(false);
}

/// Runs a test whose guests agree on VIRTIO_RDMA_F_RINGS.
pub fn with_rings<T>(test: impl FnOnce() -> T) -> T {
    RINGS.set(true);
    let result = test();
    RINGS.set(false);
    result
}

/// The RNR timer of these tests.
pub const RNR_TIMER: Duration = Duration::from_micros(640);

/// The time for which a requester pauses before it waits for a receive.
pub const PAUSE: Duration = Duration::from_micros(160);

/// The time for which a requester that has more to send polls, before it asks to be told of a receive.
pub const ASKED: Duration = PATIENCE.saturating_add(RNR_TIMER);

/// A clock whose time passes only when a test says so.
pub struct TestClock {
    base: Instant,
    passed: Mutex<Duration>,
}

impl TestClock {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { base: Instant::now(), passed: Mutex::new(Duration::ZERO) })
    }

    pub fn advance_to(&self, time: Instant) {
        let mut passed = self.passed.lock().unwrap();
        *passed = (*passed).max(time - self.base);
    }

    /// Moves to the time for which an idle device waits, if that may be the end of a pause of a
    /// requester. Returns whether it moved.
    pub fn end_pause(&self, next: Next) -> bool {
        match next {
            Next::At(time) if time.saturating_duration_since(self.now()) <= PAUSE => {
                self.advance_to(time);
                true
            }
            _ => false,
        }
    }

    pub fn passed(&self) -> Duration {
        *self.passed.lock().unwrap()
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        self.base + self.passed()
    }
}

pub struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// An interrupt, which is counted and wakes the thread that waits for it.
pub struct Count {
    count: AtomicU32,
    wake: Arc<dyn Wake>,
}

impl Signal for Count {
    fn signal(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.wake.wake();
    }
}

pub fn limits() -> Limits {
    Limits {
        max_qp: 6,
        max_cq: 4,
        wq_size: RING,
        cq_size: RING,
        max_mr: 64,
        max_mw: 8,
        max_pd: 4,
        gid_table: 4,
        max_extents: 1024,
        max_mcast_grp: 3,
        max_mcast_qp_attach: 2,
        max_mcast_attach: 5,
        comp_vectors: VECTORS,
        ring_qp: 6,
        ring_cq: 4,
        max_srq: 3,
        ring_wr: RING.into(),
        ring_cqe: 256,
        inline_data: INLINE as u16,
        ..Limits::default()
    }
}

pub fn fabric() -> (Arc<Fabric>, Arc<TestClock>) {
    let clock = TestClock::new();
    (Fabric::new(fabric_config(&clock)), clock)
}

pub fn fabric_config(clock: &Arc<TestClock>) -> FabricConfig {
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    FabricConfig { name: "test".into(), clock, uplink: None, random: || 0, helpers: None }
}

/// A guest whose device is in the process of the test.
pub type Guest = Driver<InProcess>;

/// The device of a guest, which works only when the test says so.
pub struct InProcess {
    pub device: Arc<Device>,
    number: u8,
    pub clock: Arc<TestClock>,
    pub setup: Setup,
    /// Whether the device's thread never sleeps, and so polls queues that had work.
    pub awake: bool,
    /// The interrupts of the virtqueues.
    interrupts: BTreeMap<u16, Arc<Count>>,
    wake: Arc<dyn Wake>,
}

impl Transport for InProcess {
    fn start(
        &mut self,
        features: u64,
        memory: &GuestMemory,
        virtqueues: &BTreeMap<u16, Virtqueue>,
    ) {
        self.device.set_driver_features(features);
        let count = || Count { count: AtomicU32::new(0), wake: Arc::clone(&self.wake) };
        self.interrupts = virtqueues.keys().map(|index| (*index, Arc::new(count()))).collect();
        let rings = virtqueues.iter().map(|(index, queue)| {
            let ring = SplitQueue::new(memory, queue.layout, 0).unwrap();
            (*index, ring, self.interrupt(*index))
        });
        self.device.start(memory, rings.collect::<Vec<_>>());
    }

    fn kick(&self, virtqueue: u16) {
        self.device.kick(virtqueue);
    }

    fn wait(&self, _: u16, _: &dyn Fn() -> bool) {
        self.run();
    }
}

impl InProcess {
    /// Returns the configuration of its device.
    pub fn config(&self) -> DeviceConfig {
        config(&self.setup, self.number, &self.wake)
    }

    fn interrupt(&self, virtqueue: u16) -> Arc<dyn Signal> {
        Arc::clone(&self.interrupts[&virtqueue]) as _
    }

    /// Returns how many interrupts of a virtqueue the guest got.
    pub fn signals(&self, virtqueue: u16) -> u32 {
        self.interrupts[&virtqueue].count.load(Ordering::Relaxed)
    }

    /// Runs the device once, and checks that it does no more work than a turn may have.
    fn turn(&self) -> Next {
        let work = || self.device.counter(Counter::Work);
        let before = work();
        let next = self.device.run(64);
        let took = work() - before;
        assert!(took <= TURN, "a turn of {took} ns");
        next
    }

    /// Runs the device until it has nothing to do now.
    pub fn run(&self) -> Next {
        for _ in 0..1_000_000 {
            match self.turn() {
                Next::Busy => {}
                next if self.awake || !self.device.arm() => return next,
                _ => {}
            }
        }
        panic!("the device never rests");
    }

    /// Runs the device until a change that has begun comes to its end.
    pub fn end_change(&self) {
        for _ in 0..1_000_000 {
            if self.device.is_settled() {
                return;
            }
            self.turn();
        }
        panic!("the change never ends");
    }

    /// Freezes the device.
    pub fn freeze(&self) {
        self.device.begin_freeze();
        self.end_change();
        assert!(self.device.is_frozen());
    }
}

/// Returns the configuration of the device of a guest.
fn config(setup: &Setup, number: u8, wake: &Arc<dyn Wake>) -> DeviceConfig {
    DeviceConfig {
        name: format!("guest{number}"),
        mac: Some([0x52, 0x54, 0, 0, 0, number]),
        policy: setup.policy.clone(),
        limits: setup.limits.clone(),
        paths: Paths::ALL,
        wake: Arc::clone(wake),
    }
}

/// The operations of a test on a guest, besides those of its driver.
pub trait OfEngine: Sized {
    /// Makes a guest whose driver has started and added its GID at index 0.
    fn new(fabric: &Arc<Fabric>, clock: &Arc<TestClock>, number: u8) -> Self {
        Self::with_wake(fabric, clock, number, Arc::new(NoWake))
    }

    /// Does what `new` does. The device wakes its thread by this.
    fn with_wake(
        fabric: &Arc<Fabric>,
        clock: &Arc<TestClock>,
        number: u8,
        wake: Arc<dyn Wake>,
    ) -> Self {
        Self::with_setup(fabric, clock, number, wake, Setup::default())
    }

    fn with_setup(
        fabric: &Arc<Fabric>,
        clock: &Arc<TestClock>,
        number: u8,
        wake: Arc<dyn Wake>,
        setup: Setup,
    ) -> Self;

    /// Sets up every queue and adds the GID.
    fn start(&mut self);

    /// Does what `start` does, with these features.
    fn start_with(&mut self, features: u64);

    /// Loads an image into a device, with the virtqueues of this guest.
    fn load(&self, device: &Device, image: &[u8]) -> Result<(), LoadError>;

    /// Does what `load` does, in other memory.
    fn load_in(&self, device: &Device, image: &[u8], memory: &GuestMemory)
        -> Result<(), LoadError>;

    /// Returns all bytes of the guest's memory but those of [`EXTRA`].
    fn all_bytes(&self) -> Vec<u8>;

    /// Makes the guest go on in a copy of its memory, without the contents of [`EXTRA`]. Returns the former memory.
    fn move_memory(&mut self) -> GuestMemory;

    /// Does what `move_memory` does, and puts the copy into this memory, which is full of zeros.
    fn move_to(&mut self, memory: GuestMemory) -> GuestMemory;

    /// Returns how many events for completions in a CQ the guest got.
    fn cq_signals(&mut self, cqn: u32) -> u32;
}

impl OfEngine for Guest {
    fn with_setup(
        fabric: &Arc<Fabric>,
        clock: &Arc<TestClock>,
        number: u8,
        wake: Arc<dyn Wake>,
        setup: Setup,
    ) -> Self {
        let Limits { max_cq, max_qp, .. } = setup.limits;
        let sizes = Sizes { max_cq, max_qp, ..setup.sizes.clone() };
        let memory = GuestMemory::anonymous(&[(0, sizes.memory), EXTRA]).unwrap();
        let (interrupts, clock) = (BTreeMap::new(), Arc::clone(clock));
        let device = fabric.add_device(config(&setup, number, &wake));
        let transport = InProcess { device, number, clock, setup, awake: false, interrupts, wake };
        let mut guest = Self::over(transport, memory, sizes, gid(number));
        guest.rings = RINGS.get();
        guest.start();
        guest
    }

    fn start(&mut self) {
        let other = if self.rings { VIRTIO_RDMA_F_VIRTQUEUES } else { VIRTIO_RDMA_F_RINGS };
        self.start_with(closed(self.device.features() & !(1 << other)));
    }

    fn start_with(&mut self, features: u64) {
        let count = if self.rings { 3 + VECTORS } else { self.device.queue_count() };
        self.set_up(features, 0..count);
        if self.setup.adds_gid {
            self.add_gid(0, self.gid, 0).unwrap();
        }
    }

    fn load(&self, device: &Device, image: &[u8]) -> Result<(), LoadError> {
        self.load_in(device, image, &self.memory)
    }

    fn load_in(
        &self,
        device: &Device,
        image: &[u8],
        memory: &GuestMemory,
    ) -> Result<(), LoadError> {
        let queue =
            |(index, queue): (&u16, &Virtqueue)| (*index, queue.layout, self.interrupt(*index));
        device.load(image, memory, self.virtqueues.iter().map(queue))
    }

    fn all_bytes(&self) -> Vec<u8> {
        self.bytes(0, self.sizes.memory as usize)
    }

    fn move_memory(&mut self) -> GuestMemory {
        self.move_to(GuestMemory::anonymous(&[(0, self.sizes.memory), EXTRA]).unwrap())
    }

    fn move_to(&mut self, memory: GuestMemory) -> GuestMemory {
        for (addr, page) in pages_in_use(&self.all_bytes()) {
            memory.write(addr, page).unwrap();
        }
        self.device.begin_memory(&memory);
        self.end_change();
        std::mem::replace(&mut self.memory, memory)
    }

    fn cq_signals(&mut self, cqn: u32) -> u32 {
        if self.rings {
            return self.cq_events(cqn);
        }
        self.signals(self.cq_queue(cqn))
    }
}

/// Returns the pages that are not all zeros, with their addresses.
pub fn pages_in_use(bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    const PAGE: usize = 4096;
    let pages = (0..).step_by(PAGE).zip(bytes.chunks(PAGE));
    pages.filter(|(_, page)| *page != &[0; PAGE][..page.len()])
}

/// Runs all guests until no guest has anything to do now. Returns the time of the earliest timer.
pub fn settle(guests: &[&Guest]) -> Option<Instant> {
    if HAS_UPGRADES.get() {
        upgrade(guests);
    }
    for _ in 0..10_000 {
        let next: Vec<_> = guests.iter().map(|guest| guest.run()).collect();
        if cable().is_some_and(|cable| cable.deliver()) {
            continue;
        }
        if guests.iter().all(|guest| guest.device.run(64) != Next::Busy) {
            let times = next.iter().filter_map(|next| match next {
                Next::At(time) => Some(*time),
                _ => None,
            });
            let arrival = cable().and_then(|cable| cable.next());
            return times.chain(arrival).min();
        }
    }
    panic!("the guests never rest");
}

/// Saves, resets and loads the devices of guests, which then go on where they were.
pub fn upgrade(guests: &[&Guest]) {
    let images: Vec<_> = guests.iter().map(|guest| guest.device.save()).collect();
    for guest in guests {
        guest.device.reset();
    }
    for (guest, image) in guests.iter().zip(&images) {
        guest.load(&guest.device, image).unwrap();
    }
    for (guest, image) in guests.iter().zip(&images) {
        assert!(guest.device.save() == *image, "the image of guest {} changes", guest.number);
    }
}

/// Makes guests of a network go on in another one: their devices are saved, and loaded there. They have the same images
/// again.
pub fn reload(guests: &mut [&mut Guest], fabric: &Fabric) {
    let images: Vec<_> = guests.iter().map(|guest| guest.device.save()).collect();
    for (guest, image) in guests.iter_mut().zip(&images) {
        guest.device = fabric.add_device(guest.config());
        guest.load(&guest.device, image).unwrap();
    }
    for (guest, image) in guests.iter().zip(&images) {
        assert!(guest.device.save() == *image, "the image of guest {} changes", guest.number);
    }
}

/// Tells a QP that its peer knows selective acknowledgements, as after a loss.
pub fn know_selective(guest: &Guest, qpn: u32) {
    let qp = guest.device.hca().qps.get(Slot::of_number(qpn).unwrap()).unwrap();
    let mut requester = lock(&qp.requester);
    let psn = requester.sq_psn();
    let window = requester.window.get_or_insert_with(|| Box::new(SendWindow::new(psn)));
    (window.is_selective, window.names_marked) = (true, true);
    let mut responder = lock(&qp.responder);
    let inbound = responder.inbound.get_or_insert_default();
    inbound.is_selective = true;
}

/// Runs all guests, and moves the clock from timer to timer until no timer is left.
pub fn settle_in_time(guests: &[&Guest]) {
    for _ in 0..1000 {
        match settle(guests) {
            Some(time) => guests[0].clock.advance_to(time),
            None => return,
        }
    }
    panic!("the timers never end");
}

/// Two guests with a connected pair of QPs, and all of their data registered.
pub struct Pair {
    pub clock: Arc<TestClock>,
    pub fabric: Arc<Fabric>,
    pub a: Guest,
    pub b: Guest,
    pub ends: [End; 2],
}

/// The objects of one guest of a pair.
#[derive(Clone, Copy)]
pub struct End {
    pub pdn: u32,
    pub cqn: u32,
    pub qpn: u32,
    pub key: u32,
    pub mrn: u32,
}

impl End {
    pub fn new(guest: &mut Guest, kind: u32) -> Self {
        let pdn = guest.create_pd();
        let cqn = guest.create_cq(RING);
        let mr = guest.reg_mr(pdn, DATA, MEMORY - DATA, ALL);
        let qpn = guest.create_qp(pdn, cqn, kind);
        for _ in 0..8 {
            guest.add_event_buffer();
        }
        Self { pdn, cqn, qpn, key: mr.lkey, mrn: mr.mrn }
    }
}

impl Pair {
    /// Makes two guests whose QPs are in RESET.
    pub fn unconnected(kind: u32) -> Self {
        let (mut fabric, clock) = fabric();
        let mut other = Arc::clone(&fabric);
        if let Some(cable) = cable() {
            [fabric, other] = cable.fabrics(|| fabric_config(&clock));
        }
        Self::in_fabrics([fabric, other], clock, kind)
    }

    /// Makes a guest in each of these networks.
    fn in_fabrics([fabric, other]: [Arc<Fabric>; 2], clock: Arc<TestClock>, kind: u32) -> Self {
        let mut a = Guest::new(&fabric, &clock, 1);
        let mut b = Guest::new(&other, &clock, 2);
        let ends = [End::new(&mut a, kind), End::new(&mut b, kind)];
        Self { clock, fabric, a, b, ends }
    }

    /// Makes two guests whose QPs are connected and in RTS.
    pub fn new() -> Self {
        Self::unconnected(VIRTIO_RDMA_QPT_RC).connected()
    }

    /// Makes two such guests of a network with another clock, which moves this one.
    pub fn by_clock(other: Arc<dyn Clock>, clock: Arc<TestClock>) -> Self {
        Self::in_network(FabricConfig { clock: other, ..fabric_config(&clock) }, clock)
    }

    /// Makes two such guests of a network that is configured like this.
    pub fn in_network(config: FabricConfig, clock: Arc<TestClock>) -> Self {
        let fabric = Fabric::new(config);
        Self::in_fabrics([fabric.clone(), fabric], clock, VIRTIO_RDMA_QPT_RC).connected()
    }

    fn connected(mut self) -> Self {
        let [a, b] = self.ends;
        self.a.connect(a.qpn, self.b.gid, b.qpn);
        self.b.connect(b.qpn, self.a.gid, a.qpn);
        self
    }

    pub fn settle(&self) -> Option<Instant> {
        settle(&[&self.a, &self.b])
    }

    /// Tells both ends that the other one knows selective acknowledgements.
    pub fn know_selective(&self) {
        let [a, b] = self.ends;
        know_selective(&self.a, a.qpn);
        know_selective(&self.b, b.qpn);
    }

    pub fn settle_in_time(&self) {
        settle_in_time(&[&self.a, &self.b]);
    }

    /// Does what `settle` does, and moves the clock to the end of each pause of a requester.
    pub fn settle_and_pause(&self) -> Option<Instant> {
        loop {
            let time = self.settle()?;
            if !self.clock.end_pause(Next::At(time)) {
                return Some(time);
            }
        }
    }

    /// Does what `settle` does, and moves the clock by `time`, from one timer to the next.
    pub fn settle_for(&self, time: Duration) {
        let end = self.clock.now() + time;
        while let Some(next) = self.settle().filter(|&next| next <= end) {
            self.clock.advance_to(next);
        }
        self.clock.advance_to(end);
    }

    /// Returns what the devices of both guests have counted.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.a.device.counter(counter) + self.b.device.counter(counter)
    }

    pub fn poll_a(&mut self) -> Option<virtio_rdma_cqe> {
        self.a.poll(self.ends[0].cqn)
    }

    pub fn poll_b(&mut self) -> Option<virtio_rdma_cqe> {
        self.b.poll(self.ends[1].cqn)
    }
}
