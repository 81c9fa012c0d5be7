// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The driver's side of the device, for tests.

use std::cell::Cell;
use std::collections::HashMap;
use std::mem::offset_of;
use std::sync::atomic::{fence, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use abi::*;
use memory::GuestMemory;
use reliability::SendWindow;
use ring::{Layout, SplitQueue};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::cable::cable;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::transport::rnr::PATIENCE;
use crate::{
    Clock, Counter, Device, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Gid, Limits,
    LoadError, Next, Signal, Wake,
};

/// The bytes of guest memory. Rings are in its lower part, data from [`DATA`] on.
pub const MEMORY: u64 = 32 << 20;
/// The address at which the data of tests begins.
pub const DATA: u64 = 8 << 20;
/// The binary logarithm of the bytes of the smallest page.
pub const PAGE_SHIFT: u8 = VIRTIO_RDMA_PAGE_SHIFT as u8;
/// The address and the length of a region that a test can take away from a guest.
pub const EXTRA: (u64, u64) = (1 << 41, 0x4000);
/// The number of entries of every ring.
pub const RING: u16 = 64;

/// The largest number of nanoseconds that a turn takes, as the engine estimates it. Another guest of the
/// same thread may have to wait for so long. It is less than a third of a millisecond.
pub const TURN: u64 = 300_000;

/// The number of completion event vectors of a device with rings.
pub const VECTORS: u16 = 2;
/// The bytes of an entry of a send or receive ring.
pub const STRIDE: u32 = 512;
/// The largest number of bytes of inline data.
pub const INLINE: u32 = 256;
/// The sizes of a device and of its objects.
#[derive(Clone)]
pub struct Setup {
    pub limits: Limits,
    /// The policy of the guest.
    pub policy: DevicePolicy,
    /// Whether the guest adds its GID when it starts.
    pub adds_gid: bool,
    /// The bytes of guest memory.
    pub memory: u64,
    /// The number of entries of send and receive rings.
    pub depth: u32,
    /// The bytes of an entry.
    pub stride: u32,
    /// The SGEs of a work request.
    pub sges: u32,
    /// The bytes of inline data of a QP.
    pub inline: u32,
    /// The address of the first of the regions of rings.
    pub regions: u64,
    /// The bytes of a region.
    pub region_len: u64,
    /// The number of regions.
    pub region_count: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            limits: limits(),
            policy: DevicePolicy::default(),
            adds_gid: true,
            memory: MEMORY,
            depth: RING.into(),
            stride: STRIDE,
            sges: 16,
            inline: INLINE,
            regions: 1 << 20,
            region_len: 0x1_4000,
            region_count: 12,
        }
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

pub const READ: u32 = VIRTIO_RDMA_ACCESS_REMOTE_READ;
pub const WRITE: u32 = VIRTIO_RDMA_ACCESS_REMOTE_WRITE;
pub const ATOMIC: u32 = VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;
pub const LOCAL: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE;
pub const ALL: u32 = READ | WRITE | ATOMIC | LOCAL;

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

/// The driver's side of a virtqueue.
pub struct Queue {
    desc: u64,
    avail: u64,
    used: u64,
    next: u16,
    seen: u16,
    pub signals: Arc<Count>,
}

impl Queue {
    pub fn layout(&self) -> Layout {
        Layout { size: RING, desc: self.desc, avail: self.avail, used: self.used, event_idx: false }
    }
}

/// The owner's side of the rings of a QP.
pub struct QpRings {
    pub region: u64,
    pub producers: [u32; 2],
}

/// The owner's side of the ring of a CQ.
pub struct CqRing {
    pub region: u64,
    pub depth: u32,
    pub consumer: u32,
    arms: [u32; 2],
    vector: u16,
    events: u32,
}

/// The owner's side of the ring of an SRQ.
pub struct SrqRing {
    pub region: u64,
    pub producer: u32,
    pub depth: u32,
}

/// A buffer: its address, its length, and whether the device writes to it.
pub type Buffer = (u64, u32, bool);

pub struct Guest {
    pub device: Arc<Device>,
    number: u8,
    pub memory: GuestMemory,
    pub clock: Arc<TestClock>,
    pub gid: Gid,
    pub setup: Setup,
    /// Whether VIRTIO_RDMA_F_RINGS is agreed on.
    pub rings: bool,
    /// Whether the device's thread never sleeps, and so polls queues that had work.
    pub awake: bool,
    /// The RNR retry count of its RC QPs.
    pub rnr_retry: u8,
    /// The path MTU of its connections (`enum ib_mtu`).
    pub path_mtu: u8,
    /// The traffic class and the service level of its connections, and the MAC address that they go to.
    pub class: (u8, u8),
    pub dmac: [u8; 6],
    /// The PSN that its connections send first.
    pub sq_psn: u32,
    /// The PSN that its connections expect first.
    pub rq_psn: u32,
    pub qp_rings: HashMap<u32, QpRings>,
    pub cq_rings: HashMap<u32, CqRing>,
    pub srq_rings: HashMap<u32, SrqRing>,
    regions: Vec<u64>,
    queues: Vec<Queue>,
    scratch: u64,
    wake: Arc<dyn Wake>,
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
    FabricConfig { name: "test".into(), clock, uplink: None, random: || 0 }
}

pub fn gid(number: u8) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 0, 0, number]);
    gid
}

/// Returns the request ADD_GID for a GID that belongs to no VLAN.
fn gid_request(index: u16, gid: Gid, gid_type: u32) -> virtio_rdma_cmd_add_gid {
    let vlan_id = VIRTIO_RDMA_NO_VLAN as u16;
    virtio_rdma_cmd_add_gid { gid, gid_type, index, vlan_id, port_num: 1 }
}

/// Returns what the device of a guest is made with.
fn config(setup: &Setup, number: u8, wake: &Arc<dyn Wake>) -> DeviceConfig {
    DeviceConfig {
        name: format!("guest{number}"),
        mac: Some([0x52, 0x54, 0, 0, 0, number]),
        policy: setup.policy.clone(),
        limits: setup.limits.clone(),
        rings: true,
        wake: Arc::clone(wake),
    }
}

impl Guest {
    /// Makes a guest whose driver has started and added its GID at index 0.
    pub fn new(fabric: &Arc<Fabric>, clock: &Arc<TestClock>, number: u8) -> Self {
        Self::with_wake(fabric, clock, number, Arc::new(NoWake))
    }

    pub fn with_wake(
        fabric: &Arc<Fabric>,
        clock: &Arc<TestClock>,
        number: u8,
        wake: Arc<dyn Wake>,
    ) -> Self {
        Self::with_setup(fabric, clock, number, wake, Setup::default())
    }

    pub fn with_setup(
        fabric: &Arc<Fabric>,
        clock: &Arc<TestClock>,
        number: u8,
        wake: Arc<dyn Wake>,
        setup: Setup,
    ) -> Self {
        let device = fabric.add_device(config(&setup, number, &wake));
        let memory = GuestMemory::anonymous(&[(0, setup.memory), EXTRA]).unwrap();
        let mut guest = Self {
            device,
            number,
            memory,
            clock: Arc::clone(clock),
            gid: gid(number),
            setup,
            rings: RINGS.get(),
            awake: false,
            rnr_retry: 3,
            path_mtu: 3,
            class: (0, 0),
            dmac: [0; 6],
            sq_psn: 0,
            rq_psn: 0,
            qp_rings: HashMap::new(),
            cq_rings: HashMap::new(),
            srq_rings: HashMap::new(),
            regions: Vec::new(),
            queues: Vec::new(),
            scratch: 0,
            wake,
        };
        guest.start();
        guest
    }

    /// Sets up every queue and adds the GID.
    pub fn start(&mut self) {
        let without = if self.rings { 0 } else { 1 << VIRTIO_RDMA_F_RINGS };
        self.start_with(self.device.features() & !without);
    }

    /// Does what `start` does, with these features.
    pub fn start_with(&mut self, features: u64) {
        self.queues.clear();
        self.qp_rings.clear();
        self.cq_rings.clear();
        self.srq_rings.clear();
        let setup = &self.setup;
        let region = |index| setup.regions + index * setup.region_len;
        self.regions = (0..setup.region_count).rev().map(region).collect();
        self.device.set_driver_features(features);
        self.scratch = 4 << 20;
        let mut rings = Vec::new();
        let count = if self.rings { 3 + VECTORS } else { self.device.queue_count() };
        for index in 0..count {
            let base = 0x1000 + u64::from(index) * 0x3000;
            let queue = Queue {
                desc: base,
                avail: base + 0x1000,
                used: base + 0x2000,
                next: 0,
                seen: 0,
                signals: Arc::new(Count { count: AtomicU32::new(0), wake: Arc::clone(&self.wake) }),
            };
            self.memory.write(base, &[0; 0x3000]).unwrap();
            let ring = SplitQueue::new(&self.memory, queue.layout(), 0).unwrap();
            rings.push((index, ring, Arc::clone(&queue.signals) as Arc<dyn Signal>));
            self.queues.push(queue);
        }
        self.device.start(&self.memory, rings);
        if self.rings {
            for vector in 0..VECTORS {
                for _ in 0..RING {
                    self.add_completion_event_buffer(vector);
                }
            }
        }
        if self.setup.adds_gid {
            self.add_gid(0, self.gid, 0).unwrap();
        }
    }

    /// Returns what its device is made with.
    pub fn config(&self) -> DeviceConfig {
        config(&self.setup, self.number, &self.wake)
    }

    /// Loads an image into a device, with the virtqueues of this guest.
    pub fn load(&self, device: &Device, image: &[u8]) -> Result<(), LoadError> {
        self.load_in(device, image, &self.memory)
    }

    /// Does what `load` does, in other memory.
    pub fn load_in(
        &self,
        device: &Device,
        image: &[u8],
        memory: &GuestMemory,
    ) -> Result<(), LoadError> {
        let queue = |(index, queue): (u16, &Queue)| {
            (index, queue.layout(), Arc::clone(&queue.signals) as Arc<dyn Signal>)
        };
        device.load(image, memory, (0..).zip(&self.queues).map(queue))
    }

    pub fn send_queue(&self, qpn: u32) -> u16 {
        1 + self.setup.limits.max_cq + 2 * (qpn as u16 - 1)
    }

    pub fn receive_queue(&self, qpn: u32) -> u16 {
        self.send_queue(qpn) + 1
    }

    pub fn event_queue(&self) -> u16 {
        if self.rings {
            return 2 + VECTORS;
        }
        1 + self.setup.limits.max_cq + 2 * self.setup.limits.max_qp
    }

    /// Returns the address of a queue's descriptor table.
    pub fn descriptors(&self, queue: u16) -> u64 {
        self.queues[usize::from(queue)].desc
    }

    pub fn signals(&self, queue: u16) -> u32 {
        self.queues[usize::from(queue)].signals.count.load(Ordering::Relaxed)
    }

    /// Makes a chain available whose descriptors begin at `head`.
    pub fn add_at(&mut self, queue: u16, head: u16, buffers: &[Buffer]) {
        let queue = &mut self.queues[usize::from(queue)];
        for (i, &(addr, len, write)) in (0_u16..).zip(buffers) {
            let last = usize::from(i) + 1 == buffers.len();
            let flags = u16::from(!last) | u16::from(write) << 1;
            let index = (head + i) % RING;
            let at = queue.desc + u64::from(index) * 16;
            self.memory.write(at, addr.as_bytes()).unwrap();
            self.memory.write(at + 8, len.as_bytes()).unwrap();
            self.memory.write(at + 12, flags.as_bytes()).unwrap();
            let next = (index + 1) % RING;
            self.memory.write(at + 14, next.as_bytes()).unwrap();
        }
        let slot = u64::from(queue.next % RING);
        self.memory.write(queue.avail + 4 + slot * 2, head.as_bytes()).unwrap();
        queue.next = queue.next.wrapping_add(1);
        self.memory.write(queue.avail + 2, queue.next.as_bytes()).unwrap();
    }

    /// Makes a chain available whose descriptors begin at the next entry, and kicks the device.
    pub fn add(&mut self, queue: u16, buffers: &[Buffer]) {
        let head = self.queues[usize::from(queue)].next % RING;
        self.add_at(queue, head, buffers);
        self.device.kick(queue);
    }

    /// Takes the next used entry, and returns its head and its length.
    pub fn used(&mut self, queue: u16) -> Option<(u32, u32)> {
        let queue = &mut self.queues[usize::from(queue)];
        let index: u16 = self.memory.read_obj(queue.used + 2).unwrap();
        if index == queue.seen {
            return None;
        }
        let at = queue.used + 4 + u64::from(queue.seen % RING) * 8;
        queue.seen = queue.seen.wrapping_add(1);
        let entry: [u32; 2] = self.memory.read_obj(at).unwrap();
        Some((entry[0], entry[1]))
    }

    /// Returns the number of buffers that the device has used so far.
    pub fn used_index(&self, queue: u16) -> u16 {
        self.memory.read_obj(self.queues[usize::from(queue)].used + 2).unwrap()
    }

    fn allocate(&mut self, len: u64) -> u64 {
        let at = self.scratch;
        self.scratch += len.next_multiple_of(64);
        if self.scratch > DATA {
            self.scratch = 4 << 20;
            return self.allocate(len);
        }
        at
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

    /// Returns all bytes of the guest's memory but those of [`EXTRA`].
    pub fn all_bytes(&self) -> Vec<u8> {
        self.bytes(0, self.setup.memory as usize)
    }

    /// Makes the guest go on in a copy of its memory, without the contents of [`EXTRA`]. Returns the former memory.
    pub fn move_memory(&mut self) -> GuestMemory {
        let copy = GuestMemory::anonymous(&[(0, self.setup.memory), EXTRA]).unwrap();
        for (addr, page) in pages_in_use(&self.all_bytes()) {
            copy.write(addr, page).unwrap();
        }
        self.device.begin_memory(&copy);
        self.end_change();
        std::mem::replace(&mut self.memory, copy)
    }

    /// Returns how many buffers of a queue the guest has taken so far.
    pub fn used_so_far(&self, queue: u16) -> u16 {
        self.queues[usize::from(queue)].seen
    }

    /// Writes words to memory that nothing uses, and returns the address.
    pub fn memory_for(&mut self, words: &[u64]) -> u64 {
        let at = self.allocate(words.as_bytes().len() as u64);
        self.memory.write(at, words.as_bytes()).unwrap();
        at
    }

    /// Sends a command through the control queue, and does not wait. Returns where its reply will be.
    pub fn begin_command<Q: IntoBytes + Immutable>(&mut self, command: u32, request: &Q) -> u64 {
        let bytes = [&[command as u8], request.as_bytes()].concat();
        let (request, reply) = (self.allocate(bytes.len() as u64), self.allocate(64));
        self.memory.write(request, &bytes).unwrap();
        self.add(0, &[(request, bytes.len() as u32, false), (reply, 64, true)]);
        reply
    }

    /// Sends a request through the control queue. Returns the status and the reply.
    pub fn request(&mut self, bytes: &[u8], room: usize) -> (u8, Vec<u8>) {
        let request = self.allocate(bytes.len() as u64);
        let reply = self.allocate(room as u64);
        self.memory.write(request, bytes).unwrap();
        let room = room as u32;
        self.add(0, &[(request, bytes.len() as u32, false), (reply, room, true)]);
        self.run();
        let (_, length) = self.used(0).expect("a reply");
        let mut reply_bytes = vec![0; length as usize];
        self.memory.read(reply, &mut reply_bytes).unwrap();
        (reply_bytes[0], reply_bytes[1..].to_vec())
    }

    pub fn command<Q: IntoBytes + Immutable, R: FromBytes>(
        &mut self,
        command: u32,
        request: &Q,
    ) -> Result<R, u32> {
        let bytes = [&[command as u8], request.as_bytes()].concat();
        let (status, reply) = self.request(&bytes, 1 + size_of::<R>());
        if u32::from(status) == VIRTIO_RDMA_STATUS_OK {
            Ok(R::read_from_bytes(&reply).unwrap())
        } else {
            assert!(reply.is_empty());
            Err(status.into())
        }
    }

    pub fn add_gid(&mut self, index: u16, gid: Gid, extra_type: u32) -> Result<(), u32> {
        let request = gid_request(index, gid, VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP + extra_type);
        self.command(VIRTIO_RDMA_CMD_ADD_GID, &request)
    }

    pub fn add_vlan_gid(&mut self, index: u16, gid: Gid, vlan_id: u32) -> Result<(), u32> {
        let mut request = gid_request(index, gid, VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP);
        request.vlan_id = vlan_id as u16;
        self.command(VIRTIO_RDMA_CMD_ADD_GID, &request)
    }

    pub fn del_gid(&mut self, index: u16) -> Result<(), u32> {
        let request = virtio_rdma_cmd_del_gid { index, reserved_02: 0, port: 1 };
        self.command(VIRTIO_RDMA_CMD_DEL_GID, &request)
    }

    pub fn create_pd(&mut self) -> u32 {
        let reply: virtio_rdma_rsp_create_pd =
            self.command(VIRTIO_RDMA_CMD_CREATE_PD, &()).unwrap();
        reply.pdn
    }

    /// Returns an unused region for rings, and fills it with zeros.
    pub fn take_region(&mut self) -> u64 {
        let region = self.regions.pop().expect("a region");
        self.memory.write(region, &vec![0; self.setup.region_len as usize]).unwrap();
        region
    }

    pub fn describe(&mut self, region: u64) -> virtio_rdma_ring_region {
        let pages: Vec<u64> =
            (0..self.setup.region_len).step_by(0x1000).map(|at| region + at).collect();
        let table = self.allocate(pages.as_bytes().len() as u64);
        self.memory.write(table, pages.as_bytes()).unwrap();
        virtio_rdma_ring_region { pages: table, npages: pages.len() as u32, reserved_0c: 0 }
    }

    pub fn cq_ring_request(&mut self, region: u64, cqe: u32) -> virtio_rdma_cmd_create_ring_cq {
        let region = self.describe(region);
        virtio_rdma_cmd_create_ring_cq { region, cqe, comp_vector: 1 }
    }

    fn create_ring_cq(&mut self, depth: u32) -> u32 {
        let region = self.take_region();
        let request = self.cq_ring_request(region, depth);
        let reply: virtio_rdma_rsp_create_cq =
            self.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request).unwrap();
        let ring = CqRing { region, depth, consumer: 0, arms: [0; 2], vector: 1, events: 0 };
        self.cq_rings.insert(reply.cqn, ring);
        reply.cqn
    }

    pub fn resize_cq(&mut self, cqn: u32, depth: u32) -> Result<u32, u32> {
        let new = self.take_region();
        let region = self.describe(new);
        let request = virtio_rdma_cmd_resize_cq { region, cqe: depth, cqn };
        let result = self.command(VIRTIO_RDMA_CMD_RESIZE_CQ, &request);
        let reply: virtio_rdma_rsp_resize_cq = result.inspect_err(|_| self.regions.push(new))?;
        let ring = self.cq_rings.get_mut(&cqn).unwrap();
        (ring.depth, ring.consumer) = (depth, 0);
        self.regions.push(std::mem::replace(&mut ring.region, new));
        Ok(reply.moved)
    }

    pub fn destroy_cq(&mut self, cqn: u32) -> Result<(), u32> {
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_CQ, &virtio_rdma_cmd_destroy_cq { cqn })?;
        if let Some(ring) = self.cq_rings.remove(&cqn) {
            self.regions.insert(0, ring.region);
        }
        Ok(())
    }

    pub fn destroy_qp(&mut self, qpn: u32) -> Result<(), u32> {
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_QP, &virtio_rdma_cmd_destroy_qp { qpn })?;
        if let Some(rings) = self.qp_rings.remove(&qpn) {
            self.regions.insert(0, rings.region);
        }
        Ok(())
    }

    fn add_completion_event_buffer(&mut self, vector: u16) {
        let queue = 1 + vector;
        let head = self.queues[usize::from(queue)].next % RING;
        let at = completion_event_at(vector, head);
        self.add_at(queue, head, &[(at, 8, true)]);
        self.device.kick(queue);
    }

    /// Takes completion events, and counts them for their CQs.
    fn take_completion_events(&mut self, vector: u16) {
        while let Some((head, length)) = self.used(1 + vector) {
            assert_eq!(length, 8);
            let at = completion_event_at(vector, head as u16);
            let event: virtio_rdma_comp_event = self.memory.read_obj(at).unwrap();
            if let Some(ring) = self.cq_rings.get_mut(&event.cqn) {
                assert_eq!(ring.vector, vector);
                ring.events += 1;
            }
            self.add_completion_event_buffer(vector);
        }
    }

    /// Returns how many events for completions in a CQ the guest got.
    pub fn cq_signals(&mut self, cqn: u32) -> u32 {
        if !self.rings {
            return self.signals(1 + cqn as u16);
        }
        for vector in 0..VECTORS {
            self.take_completion_events(vector);
        }
        self.cq_rings[&cqn].events
    }

    /// Creates a CQ with `buffers` buffers.
    pub fn create_cq(&mut self, buffers: u16) -> u32 {
        if self.rings {
            return self.create_ring_cq(buffers.next_power_of_two().into());
        }
        let request = virtio_rdma_cmd_create_cq { cqe: RING.into() };
        let reply: virtio_rdma_rsp_create_cq =
            self.command(VIRTIO_RDMA_CMD_CREATE_CQ, &request).unwrap();
        let queue = 1 + reply.cqn as u16;
        for _ in 0..buffers {
            self.add_cq_buffer(queue);
        }
        reply.cqn
    }

    fn add_cq_buffer(&mut self, queue: u16) {
        let head = self.queues[usize::from(queue)].next % RING;
        let at = cqe_at(queue, head);
        self.add_at(queue, head, &[(at, size_of::<virtio_rdma_cqe>() as u32, true)]);
    }

    /// Takes a CQE out of a ring.
    pub fn poll_ring(&mut self, cqn: u32) -> Option<virtio_rdma_ring_cqe> {
        let ring = self.cq_rings.get_mut(&cqn)?;
        let at = ring.region + 128 + u64::from(ring.consumer % ring.depth) * 64;
        let lap: u32 = self.memory.read_obj(at + 60).unwrap();
        if lap != ring.consumer / ring.depth + 1 {
            return None;
        }
        fence(Ordering::Acquire);
        let cqe = self.memory.read_obj(at).unwrap();
        ring.consumer = ring.consumer.wrapping_add(1);
        self.memory.write(ring.region, &ring.consumer.to_le_bytes()).unwrap();
        Some(cqe)
    }

    /// Takes a CQE out of a CQ, and gives its buffer back.
    pub fn poll(&mut self, cqn: u32) -> Option<virtio_rdma_cqe> {
        if self.rings {
            let cqe = self.poll_ring(cqn)?;
            let mut short = virtio_rdma_cqe::new_zeroed();
            (short.wr_id, short.status, short.opcode) = (cqe.wr_id, cqe.status, cqe.opcode);
            (short.byte_len, short.ex, short.qp_num) = (cqe.byte_len, cqe.ex, cqe.qp_num);
            (short.src_qp, short.wc_flags) = (cqe.src_qp, cqe.wc_flags);
            (short.pkey_index, short.sl, short.port_num) = (cqe.pkey_index, cqe.sl, cqe.port_num);
            short.vlan_id = cqe.vlan_id;
            return Some(short);
        }
        let queue = 1 + cqn as u16;
        let (head, length) = self.used(queue)?;
        assert_eq!(length as usize, size_of::<virtio_rdma_cqe>());
        let cqe = self.memory.read_obj(cqe_at(queue, head as u16)).unwrap();
        self.add_cq_buffer(queue);
        Some(cqe)
    }

    pub fn arm_cq(&mut self, cqn: u32, flags: u32) -> Result<(), u32> {
        if self.rings {
            let which = usize::from(flags & VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION == 0);
            let ring = self.cq_rings.get_mut(&cqn).unwrap();
            ring.arms[which] = ring.arms[which].wrapping_add(1);
            let at = ring.region + (offset_of!(virtio_rdma_cq_ring, arm_next) + 4 * which) as u64;
            self.memory.write(at, &ring.arms[which].to_le_bytes()).unwrap();
            fence(Ordering::SeqCst);
            return Ok(());
        }
        let request = virtio_rdma_cmd_req_notify { cqn, flags };
        self.command(VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ, &request)
    }

    /// Registers `[addr, addr + len)` of guest memory. Peers name it by the same address.
    pub fn reg_mr(&mut self, pdn: u32, addr: u64, len: u64, access: u32) -> virtio_rdma_rsp_mr {
        let first = addr & !0xfff;
        let npages = (addr + len - first).div_ceil(0x1000);
        let pages: Vec<u64> = (0..npages).map(|page| first + page * 0x1000).collect();
        self.reg_pages(pdn, addr, len, access, &pages).unwrap()
    }

    pub fn reg_pages(
        &mut self,
        pdn: u32,
        addr: u64,
        len: u64,
        access: u32,
        pages: &[u64],
    ) -> Result<virtio_rdma_rsp_mr, u32> {
        let table = self.allocate(pages.as_bytes().len() as u64);
        self.memory.write(table, pages.as_bytes()).unwrap();
        let request = virtio_rdma_cmd_reg_user_mr {
            pdn,
            access_flags: access,
            start: addr,
            length: len,
            virt_addr: addr,
            pages: table,
            npages: pages.len() as u32,
            levels: 0,
            page_shift: PAGE_SHIFT,
            reserved_2e: [0; 2],
        };
        self.command(VIRTIO_RDMA_CMD_REG_USER_MR, &request)
    }

    pub fn create_mr(&mut self, pdn: u32, pages: u32) -> Result<virtio_rdma_rsp_mr, u32> {
        let request = virtio_rdma_cmd_create_mr { pdn, access_flags: 0, max_num_sg: pages };
        self.command(VIRTIO_RDMA_CMD_CREATE_MR, &request)
    }

    /// Returns the work request that gives `pages` to a region. Peers name its first byte by `iova`.
    pub fn registration(
        &mut self,
        key: u32,
        access: u32,
        iova: u64,
        length: u64,
        pages: &[u64],
    ) -> WrReg {
        let list = self.allocate(pages.as_bytes().len() as u64);
        self.memory.write(list, pages.as_bytes()).unwrap();
        let npages = pages.len() as u32;
        WrReg {
            key,
            access,
            npages,
            pages: list,
            iova,
            length,
            page_shift: PAGE_SHIFT,
            ..WrReg::new_zeroed()
        }
    }

    pub fn alloc_mw(&mut self, pdn: u32, kind: u32) -> Result<virtio_rdma_rsp_alloc_mw, u32> {
        let request = virtio_rdma_cmd_alloc_mw { pdn, type_: kind as u8, reserved_05: [0; 3] };
        self.command(VIRTIO_RDMA_CMD_ALLOC_MW, &request)
    }

    pub fn dealloc_mw(&mut self, mwn: u32) -> Result<(), u32> {
        self.command(VIRTIO_RDMA_CMD_DEALLOC_MW, &virtio_rdma_cmd_dealloc_mw { mwn })
    }

    pub fn dereg_mr(&mut self, mrn: u32) -> Result<(), u32> {
        self.command(VIRTIO_RDMA_CMD_DEREG_MR, &virtio_rdma_cmd_dereg_mr { mrn })
    }

    pub fn qp_request(pdn: u32, cqn: u32, kind: u32) -> virtio_rdma_cmd_create_qp {
        let mut request = virtio_rdma_cmd_create_qp::new_zeroed();
        request.pdn = pdn;
        request.qp_type = kind as u8;
        request.sq_sig_type = VIRTIO_RDMA_SIGNAL_REQ_WR as u8;
        (request.max_send_wr, request.max_recv_wr) = (16, 16);
        (request.max_send_sge, request.max_recv_sge) = (16, 16);
        (request.send_cqn, request.recv_cqn) = (cqn, cqn);
        request
    }

    pub fn qp_ring_request(
        &mut self,
        region: u64,
        mut base: virtio_rdma_cmd_create_qp,
    ) -> virtio_rdma_cmd_create_ring_qp {
        base.max_inline_data = self.setup.inline;
        (base.max_send_sge, base.max_recv_sge) = (self.setup.sges, self.setup.sges);
        let (depth, stride) = (self.setup.depth, self.setup.stride);
        let first = stride.max(256);
        let region = self.describe(region);
        let shape = |offset| virtio_rdma_ring_shape { depth, stride, offset, reserved_0c: 0 };
        let (sq, rq) = (shape(first), shape(first + stride * depth));
        let mut request = virtio_rdma_cmd_create_ring_qp::new_zeroed();
        (request.base, request.flags) = (base, VIRTIO_RDMA_QP_PRIVILEGED);
        (request.region, request.sq, request.rq) = (region, sq, rq);
        request
    }

    pub fn create_qp(&mut self, pdn: u32, cqn: u32, kind: u32) -> u32 {
        self.try_create_qp(Self::qp_request(pdn, cqn, kind)).unwrap()
    }

    pub fn try_create_qp(&mut self, request: virtio_rdma_cmd_create_qp) -> Result<u32, u32> {
        if self.rings {
            let region = self.take_region();
            let request = self.qp_ring_request(region, request);
            let result = self.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
            let reply: virtio_rdma_rsp_create_qp =
                result.inspect_err(|_| self.regions.push(region))?;
            self.qp_rings.insert(reply.qpn, QpRings { region, producers: [0; 2] });
            return Ok(reply.qpn);
        }
        let reply: virtio_rdma_rsp_create_qp = self.command(VIRTIO_RDMA_CMD_CREATE_QP, &request)?;
        Ok(reply.qpn)
    }

    /// Sends ATTACH_MCAST or DETACH_MCAST.
    pub fn mcast(&mut self, command: u32, qpn: u32, gid: Gid) -> Result<(), u32> {
        let request = virtio_rdma_cmd_mcast { gid, qpn, lid: 0, reserved_16: 0 };
        self.command(command, &request)
    }

    pub fn query_counters(&mut self) -> Result<virtio_rdma_rsp_query_counters, u32> {
        let request = virtio_rdma_cmd_query_counters { port: 1 };
        self.command(VIRTIO_RDMA_CMD_QUERY_COUNTERS, &request)
    }

    pub fn srq_request(&mut self, region: u64, pdn: u32) -> virtio_rdma_cmd_create_srq {
        let mut request = virtio_rdma_cmd_create_srq::new_zeroed();
        let (depth, stride) = (self.setup.depth, self.setup.stride);
        let offset = stride.max(256);
        request.ring = virtio_rdma_ring_shape { depth, stride, offset, reserved_0c: 0 };
        request.region = self.describe(region);
        (request.pdn, request.max_sge) = (pdn, 4);
        request
    }

    pub fn create_srq(&mut self, pdn: u32) -> u32 {
        let region = self.take_region();
        let request = self.srq_request(region, pdn);
        let reply: virtio_rdma_rsp_create_srq =
            self.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request).unwrap();
        let depth = request.ring.depth;
        self.srq_rings.insert(reply.srqn, SrqRing { region, producer: 0, depth });
        reply.srqn
    }

    pub fn arm_srq(&mut self, srqn: u32, srq_limit: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_modify_srq { srqn, srq_limit };
        self.command(VIRTIO_RDMA_CMD_MODIFY_SRQ, &request)
    }

    pub fn query_srq(&mut self, srqn: u32) -> Result<virtio_rdma_rsp_query_srq, u32> {
        self.command(VIRTIO_RDMA_CMD_QUERY_SRQ, &virtio_rdma_cmd_query_srq { srqn })
    }

    /// Moves an SRQ to a ring of `depth` entries. Returns how many entries the device moved.
    pub fn resize_srq(&mut self, srqn: u32, depth: u32) -> Result<u32, u32> {
        let new = self.take_region();
        let mut request = virtio_rdma_cmd_resize_srq::new_zeroed();
        let create = self.srq_request(new, 0);
        (request.region, request.ring, request.srqn) = (create.region, create.ring, srqn);
        request.ring.depth = depth;
        let result = self.command(VIRTIO_RDMA_CMD_RESIZE_SRQ, &request);
        let reply: virtio_rdma_rsp_resize_srq = result.inspect_err(|_| self.regions.push(new))?;
        let ring = self.srq_rings.get_mut(&srqn).unwrap();
        let old = std::mem::replace(ring, SrqRing { region: new, producer: reply.moved, depth });
        assert_eq!(self.memory.read_obj(new), Ok(reply.moved));
        self.regions.push(old.region);
        Ok(reply.moved)
    }

    pub fn destroy_srq(&mut self, srqn: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_destroy_srq { srqn };
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_SRQ, &request)?;
        if let Some(ring) = self.srq_rings.remove(&srqn) {
            self.regions.insert(0, ring.region);
        }
        Ok(())
    }

    /// Creates a QP that receives from an SRQ.
    pub fn create_srq_qp(&mut self, pdn: u32, cqn: u32, kind: u32, srqn: u32) -> Result<u32, u32> {
        let region = self.take_region();
        let base = Self::qp_request(pdn, cqn, kind);
        let mut request = self.qp_ring_request(region, base);
        request.rq = virtio_rdma_ring_shape::new_zeroed();
        (request.base.max_recv_wr, request.srqn) = (0, srqn);
        let result = self.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
        let reply: virtio_rdma_rsp_create_qp = result.inspect_err(|_| self.regions.push(region))?;
        self.qp_rings.insert(reply.qpn, QpRings { region, producers: [0; 2] });
        Ok(reply.qpn)
    }

    pub fn alloc_xrcd(&mut self) -> Result<u32, u32> {
        let reply: virtio_rdma_rsp_alloc_xrcd = self.command(VIRTIO_RDMA_CMD_ALLOC_XRCD, &())?;
        Ok(reply.xrcdn)
    }

    pub fn dealloc_xrcd(&mut self, xrcdn: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_dealloc_xrcd { xrcdn };
        self.command(VIRTIO_RDMA_CMD_DEALLOC_XRCD, &request)
    }

    /// Creates an SRQ for XRC.
    pub fn create_xrc_srq(&mut self, pdn: u32, xrcdn: u32, cqn: u32) -> Result<u32, u32> {
        let region = self.take_region();
        let mut request = self.srq_request(region, pdn);
        (request.xrcdn, request.cqn) = (xrcdn, cqn);
        let depth = request.ring.depth;
        let result = self.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request);
        let reply: virtio_rdma_rsp_create_srq =
            result.inspect_err(|_| self.regions.push(region))?;
        self.srq_rings.insert(reply.srqn, SrqRing { region, producer: 0, depth });
        Ok(reply.srqn)
    }

    pub fn xrc_tgt_request(xrcdn: u32) -> virtio_rdma_cmd_create_ring_qp {
        let mut request = virtio_rdma_cmd_create_ring_qp::new_zeroed();
        request.base.qp_type = VIRTIO_RDMA_QPT_XRC_TGT as u8;
        request.xrcdn = xrcdn;
        request
    }

    pub fn create_xrc_tgt(&mut self, xrcdn: u32) -> Result<u32, u32> {
        let request = Self::xrc_tgt_request(xrcdn);
        let reply: virtio_rdma_rsp_create_qp =
            self.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request)?;
        Ok(reply.qpn)
    }

    /// Creates an XRC initiator, whose request is that of a QP with SRQ number 0.
    pub fn create_xrc_ini(&mut self, pdn: u32, cqn: u32) -> Result<u32, u32> {
        self.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_XRC_INI, 0)
    }

    /// Brings an XRC initiator to RTS.
    pub fn connect_ini(&mut self, qpn: u32, dgid: Gid, dest: u32) {
        self.make_init(qpn, 0);
        self.make_rtr(qpn, dgid, dest, false).unwrap();
        self.make_rts(qpn, true).unwrap();
    }

    /// Brings an XRC target to RTS.
    pub fn connect_tgt(&mut self, qpn: u32, dgid: Gid, dest: u32) {
        self.make_init(qpn, ALL);
        self.make_rtr(qpn, dgid, dest, true).unwrap();
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.timeout) = (VIRTIO_RDMA_QPS_RTS as u8, 14);
        let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_SQ_PSN | VIRTIO_RDMA_QP_TIMEOUT;
        self.modify(qpn, mask, attr).unwrap();
    }

    /// Posts a receive to an SRQ, and rings the doorbell if the device asks for it.
    pub fn post_srq_recv(&mut self, srqn: u32, wr_id: u64, sges: &[virtio_rdma_sge]) {
        let header = virtio_rdma_rq_wqe { num_sge: sges.len() as u32, reserved_04: 0, wr_id };
        self.write_srq_entry(srqn, &[header.as_bytes(), sges.as_bytes()].concat());
        fence(Ordering::SeqCst);
        let wake = self.srq_rings[&srqn].region + offset_of!(virtio_rdma_srq_ring, wake) as u64;
        if self.memory.read_obj::<u32>(wake).unwrap() != 0 {
            self.ring_doorbell(srqn, VIRTIO_RDMA_DOORBELL_SRQ);
        }
    }

    /// Writes an entry to the ring of an SRQ without a doorbell.
    pub fn write_srq_entry(&mut self, srqn: u32, bytes: &[u8]) {
        let stride = self.setup.stride;
        let ring = self.srq_rings.get_mut(&srqn).unwrap();
        let at = stride.max(256) + ring.producer % ring.depth * stride;
        ring.producer = ring.producer.wrapping_add(1);
        self.memory.write(ring.region + u64::from(at), bytes).unwrap();
        fence(Ordering::Release);
        self.memory.write(ring.region, &ring.producer.to_le_bytes()).unwrap();
    }

    /// Returns how many receives of an SRQ the device has taken by its own count.
    pub fn srq_consumer(&self, srqn: u32) -> u32 {
        let at = offset_of!(virtio_rdma_srq_ring, consumer) as u64;
        self.memory.read_obj(self.srq_rings[&srqn].region + at).unwrap()
    }

    pub fn modify(&mut self, qpn: u32, mask: u32, attr: virtio_rdma_qp_attr) -> Result<(), u32> {
        let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask: mask, attr };
        self.command(VIRTIO_RDMA_CMD_MODIFY_QP, &request)
    }

    pub fn set_state(&mut self, qpn: u32, state: u32) -> Result<(), u32> {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = state as u8;
        self.modify(qpn, VIRTIO_RDMA_QP_STATE, attr)?;
        if let (VIRTIO_RDMA_QPS_RESET, Some(rings)) = (state, self.qp_rings.get_mut(&qpn)) {
            rings.producers = [0; 2];
            for at in [0, 64] {
                self.memory.write(rings.region + at, &[0; 4]).unwrap();
            }
        }
        Ok(())
    }

    /// Posts an entry to a ring of a QP, and rings the doorbell if the device asks for it.
    pub fn post_entry(&mut self, qpn: u32, queue: u32, bytes: &[u8]) {
        self.write_entry(qpn, queue, bytes);
        self.ring_if_asleep(qpn, queue);
    }

    /// Writes an entry to a ring of a QP without a doorbell.
    pub fn write_entry(&mut self, qpn: u32, queue: u32, bytes: &[u8]) {
        let which = queue as usize;
        let rings = self.qp_rings.get_mut(&qpn).unwrap();
        let index = rings.producers[which];
        rings.producers[which] = index.wrapping_add(1);
        let region = rings.region;
        let (depth, stride) = (self.setup.depth, self.setup.stride);
        let at = stride.max(256) + (queue * depth + index % depth) * stride;
        self.memory.write(region + u64::from(at), bytes).unwrap();
        fence(Ordering::Release);
        let producer = index.wrapping_add(1).to_le_bytes();
        self.memory.write(region + 64 * u64::from(queue), &producer).unwrap();
    }

    /// Rings the doorbell if the device does not poll the ring.
    pub fn ring_if_asleep(&mut self, qpn: u32, queue: u32) {
        fence(Ordering::SeqCst);
        let at = self.qp_rings[&qpn].region + 128 + 4 * u64::from(queue);
        if self.memory.read_obj::<u32>(at).unwrap() != 0 {
            self.ring_doorbell(qpn, queue);
        }
    }

    pub fn ring_doorbell(&mut self, number: u32, queue: u32) {
        let bell = virtio_rdma_doorbell { number, queue };
        let bells = 1 + VECTORS;
        while self.used(bells).is_some() {}
        let Queue { next, seen, .. } = self.queues[usize::from(bells)];
        if next.wrapping_sub(seen) == RING {
            // The driver waits for room.
            self.run();
            while self.used(bells).is_some() {}
        }
        self.post(bells, bell.as_bytes());
    }

    pub fn query(&mut self, qpn: u32) -> virtio_rdma_qp_attr {
        let request = virtio_rdma_cmd_query_qp { qpn, attr_mask: 0 };
        let reply: virtio_rdma_rsp_query_qp =
            self.command(VIRTIO_RDMA_CMD_QUERY_QP, &request).unwrap();
        reply.attr
    }

    pub fn make_init(&mut self, qpn: u32, access: u32) {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_INIT as u8;
        attr.port_num = 1;
        attr.qp_access_flags = access;
        let mask = VIRTIO_RDMA_QP_STATE
            | VIRTIO_RDMA_QP_PKEY_INDEX
            | VIRTIO_RDMA_QP_PORT
            | VIRTIO_RDMA_QP_ACCESS_FLAGS;
        self.modify(qpn, mask, attr).unwrap();
    }

    pub fn make_rtr(&mut self, qpn: u32, dgid: Gid, dest: u32, rc: bool) -> Result<(), u32> {
        self.make_rtr_from(qpn, 0, dgid, dest, rc)
    }

    pub fn make_rtr_from(
        &mut self,
        qpn: u32,
        sgid_index: u8,
        dgid: Gid,
        dest: u32,
        rc: bool,
    ) -> Result<(), u32> {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RTR as u8;
        (attr.path_mtu, attr.rq_psn) = (self.path_mtu, self.rq_psn);
        attr.dest_qp_num = dest;
        attr.ah_attr.grh.dgid = dgid;
        attr.ah_attr.grh.sgid_index = sgid_index;
        (attr.ah_attr.grh.traffic_class, attr.ah_attr.sl) = self.class;
        attr.ah_attr.dmac = self.dmac;
        attr.ah_attr.ah_flags = VIRTIO_RDMA_AH_GRH as u8;
        attr.ah_attr.port_num = 1;
        let mut mask = VIRTIO_RDMA_QP_STATE
            | VIRTIO_RDMA_QP_AV
            | VIRTIO_RDMA_QP_PATH_MTU
            | VIRTIO_RDMA_QP_DEST_QPN
            | VIRTIO_RDMA_QP_RQ_PSN;
        if rc {
            attr.max_dest_rd_atomic = 4;
            attr.min_rnr_timer = 12;
            mask |= VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
        }
        self.modify(qpn, mask, attr)
    }

    pub fn make_rts(&mut self, qpn: u32, rc: bool) -> Result<(), u32> {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RTS as u8;
        attr.sq_psn = self.sq_psn;
        let mut mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_SQ_PSN;
        if rc {
            (attr.timeout, attr.retry_cnt, attr.max_rd_atomic) = (14, 3, 4);
            attr.rnr_retry = self.rnr_retry;
            mask |= VIRTIO_RDMA_QP_TIMEOUT
                | VIRTIO_RDMA_QP_RETRY_CNT
                | VIRTIO_RDMA_QP_RNR_RETRY
                | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(qpn, mask, attr)
    }

    pub fn connect(&mut self, qpn: u32, dgid: Gid, dest: u32) {
        self.make_init(qpn, ALL);
        self.make_rtr(qpn, dgid, dest, true).unwrap();
        self.make_rts(qpn, true).unwrap();
    }

    /// Posts bytes to a work queue in a new buffer.
    pub fn post(&mut self, queue: u16, bytes: &[u8]) {
        let at = self.allocate(bytes.len() as u64);
        self.memory.write(at, bytes).unwrap();
        self.add(queue, &[(at, bytes.len() as u32, false)]);
    }

    pub fn post_send(&mut self, qpn: u32, send: &Send) {
        if self.rings {
            return self.post_entry(qpn, VIRTIO_RDMA_DOORBELL_SQ, &send.entry());
        }
        self.post(self.send_queue(qpn), &send.bytes());
    }

    pub fn post_recv(&mut self, qpn: u32, wr_id: u64, sges: &[virtio_rdma_sge]) {
        let header = virtio_rdma_rq_wqe { num_sge: sges.len() as u32, reserved_04: 0, wr_id };
        let bytes = [header.as_bytes(), sges.as_bytes()].concat();
        if self.rings {
            return self.post_entry(qpn, VIRTIO_RDMA_DOORBELL_RQ, &bytes);
        }
        self.post(self.receive_queue(qpn), &bytes);
    }

    pub fn add_event_buffer(&mut self) {
        let queue = self.event_queue();
        let head = self.queues[usize::from(queue)].next % RING;
        let at = (2 << 20) + u64::from(head) * 8;
        self.add_at(queue, head, &[(at, 8, true)]);
        self.device.kick(queue);
    }

    pub fn poll_event(&mut self) -> Option<(u32, u32)> {
        let (head, length) = self.used(self.event_queue())?;
        assert_eq!(length, 8);
        let at = (2 << 20) + u64::from(head) * 8;
        let event: virtio_rdma_event = self.memory.read_obj(at).unwrap();
        Some((event.event, event.handle))
    }

    pub fn fill(&self, addr: u64, len: usize, seed: u8) -> Vec<u8> {
        let data: Vec<u8> =
            (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        self.memory.write(addr, &data).unwrap();
        data
    }

    pub fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(addr, &mut bytes).unwrap();
        bytes
    }
}

/// Returns the pages that are not all zeros, with their addresses.
pub fn pages_in_use(bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    const PAGE: usize = 4096;
    let pages = (0..).step_by(PAGE).zip(bytes.chunks(PAGE));
    pages.filter(|(_, page)| *page != &[0; PAGE][..page.len()])
}

/// Returns the address of the completion event of a buffer.
fn completion_event_at(vector: u16, head: u16) -> u64 {
    (2 << 20) + (u64::from(vector + 1) * u64::from(RING) + u64::from(head)) * 8
}

/// Returns the address of the CQE of a buffer.
fn cqe_at(queue: u16, head: u16) -> u64 {
    (3 << 20) + (u64::from(queue) * u64::from(RING) + u64::from(head)) * 64
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

pub fn sge(addr: u64, length: u32, lkey: u32) -> virtio_rdma_sge {
    virtio_rdma_sge { addr, length, lkey }
}

/// A send work request.
#[derive(Clone)]
pub struct Send {
    pub wr_id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub imm: u32,
    pub sges: Vec<virtio_rdma_sge>,
    pub wr: Vec<u8>,
    pub inline: Option<Vec<u8>>,
    /// The number of the SRQ for which a message of an XRC initiator is.
    pub srqn: Option<u32>,
}

impl Send {
    pub fn new(wr_id: u64, opcode: u32, sges: &[virtio_rdma_sge]) -> Self {
        let flags = VIRTIO_RDMA_SEND_SIGNALED;
        let (sges, wr) = (sges.to_vec(), Vec::new());
        Self { wr_id, opcode, flags, imm: 0, sges, wr, inline: None, srqn: None }
    }

    pub fn rdma(mut self, remote_addr: u64, rkey: u32) -> Self {
        self.wr = WrRdma { remote_addr, rkey, reserved_0c: 0 }.as_bytes().to_vec();
        self
    }

    pub fn atomic(mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) -> Self {
        let atomic = WrAtomic { remote_addr, compare_add, swap, rkey, reserved_1c: 0 };
        self.wr = atomic.as_bytes().to_vec();
        self
    }

    pub fn ud(mut self, dgid: Gid, qpn: u32, qkey: u32, pdn: u32) -> Self {
        let mut ud = WrUd::new_zeroed();
        (ud.remote_qpn, ud.remote_qkey) = (qpn, qkey);
        (ud.av.port, ud.av.pdn, ud.av.dgid, ud.av.hop_limit) = (1, pdn, dgid, 64);
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Sends the datagram with this traffic class and service level.
    pub fn in_class(mut self, (traffic_class, sl): (u8, u8)) -> Self {
        let mut ud = WrUd::read_from_bytes(&self.wr).unwrap();
        ud.av.sl_tclass_flowlabel = u32::from(sl) << 28 | u32::from(traffic_class) << 20;
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Sends the datagram to this MAC address.
    pub fn at_mac(mut self, dmac: [u8; 6]) -> Self {
        let mut ud = WrUd::read_from_bytes(&self.wr).unwrap();
        ud.av.dmac = dmac;
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Sends the datagram from another entry of the GID table.
    pub fn from(mut self, gid_index: u8) -> Self {
        let mut ud = WrUd::read_from_bytes(&self.wr).unwrap();
        ud.av.gid_index = gid_index;
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Carries these bytes in place of SGEs. Only rings have inline data.
    pub fn inline(mut self, bytes: &[u8]) -> Self {
        self.flags |= VIRTIO_RDMA_SEND_INLINE;
        self.inline = Some(bytes.to_vec());
        self
    }

    /// Sends the message to an SRQ at the other end of an XRC.
    pub fn srqn(mut self, srqn: u32) -> Self {
        self.srqn = Some(srqn);
        self
    }

    /// Returns a REG_MR.
    pub fn reg_mr(wr_id: u64, reg: WrReg) -> Self {
        Self { wr: reg.as_bytes().to_vec(), ..Self::new(wr_id, VIRTIO_RDMA_WR_REG_MR, &[]) }
    }

    /// Returns a BIND_MW, which only rings have.
    pub fn bind_mw(wr_id: u64, mut bind: virtio_rdma_ring_bind_wqe) -> Self {
        let opcode = VIRTIO_RDMA_WR_BIND_MW;
        (bind.wr_id, bind.opcode) = (wr_id, opcode as u8);
        Self { wr: bind.as_bytes().to_vec(), ..Self::new(wr_id, opcode, &[]) }
    }

    /// Sets the key that the work request invalidates.
    pub fn invalidate(mut self, key: u32) -> Self {
        self.imm = key;
        self
    }

    /// Returns the work request as an entry of a ring.
    pub fn entry(&self) -> Vec<u8> {
        if self.opcode == VIRTIO_RDMA_WR_REG_MR {
            let wr = WrReg::read_from_bytes(&self.wr).unwrap();
            let mut entry = virtio_rdma_ring_reg_wqe::new_zeroed();
            (entry.wr_id, entry.opcode) = (self.wr_id, self.opcode as u8);
            entry.send_flags = self.flags as u16;
            (entry.access, entry.npages, entry.key) = (wr.access, wr.npages as u16, wr.key);
            (entry.iova, entry.pages, entry.length) = (wr.iova, wr.pages, wr.length);
            entry.page_shift = wr.page_shift;
            return entry.as_bytes().to_vec();
        }
        if self.opcode == VIRTIO_RDMA_WR_FLUSH {
            let mut entry = virtio_rdma_ring_flush_wqe::read_from_bytes(&self.wr).unwrap();
            (entry.wr_id, entry.opcode) = (self.wr_id, self.opcode as u8);
            entry.send_flags = self.flags as u16;
            entry.num_sge = self.sges.len() as u8;
            return [entry.as_bytes(), self.sges.as_bytes()].concat();
        }
        if self.opcode == VIRTIO_RDMA_WR_BIND_MW {
            let mut entry = virtio_rdma_ring_bind_wqe::read_from_bytes(&self.wr).unwrap();
            entry.send_flags = self.flags as u16;
            entry.num_sge = self.sges.len() as u8;
            return [entry.as_bytes(), self.sges.as_bytes()].concat();
        }
        let mut header = virtio_rdma_ring_sq_wqe::new_zeroed();
        header.wr_id = self.wr_id;
        header.opcode = self.opcode as u8;
        header.num_sge = self.sges.len() as u8;
        header.send_flags = self.flags as u16;
        header.ex = self.imm;
        header.inline_len = self.inline.as_ref().map_or(0, |bytes| bytes.len() as u16);
        let mut bytes = Vec::new();
        if self.wr.len() == size_of::<WrUd>() {
            let wr = WrUd::read_from_bytes(&self.wr).unwrap();
            let mut ud =
                virtio_rdma_ring_ud_wqe::read_from_prefix(&[header.as_bytes(), &[0; 64]].concat())
                    .unwrap()
                    .0;
            (ud.remote_qpn, ud.remote_qkey, ud.av) = (wr.remote_qpn, wr.remote_qkey, wr.av);
            bytes.extend_from_slice(ud.as_bytes());
        } else {
            if self.wr.len() == size_of::<WrAtomic>() {
                let wr = WrAtomic::read_from_bytes(&self.wr).unwrap();
                (header.remote_addr, header.rkey) = (wr.remote_addr, wr.rkey);
                (header.compare_add, header.swap) = (wr.compare_add, wr.swap);
            } else if let Ok(wr) = WrRdma::read_from_bytes(&self.wr) {
                (header.remote_addr, header.rkey) = (wr.remote_addr, wr.rkey);
            }
            bytes.extend_from_slice(header.as_bytes());
            if let Some(remote_srqn) = self.srqn {
                let reserved_34 = [0; 12];
                let wqe = virtio_rdma_ring_xrc_wqe { base: header, remote_srqn, reserved_34 };
                bytes = wqe.as_bytes().to_vec();
            }
        }
        bytes.extend_from_slice(self.sges.as_bytes());
        bytes.extend_from_slice(self.inline.as_deref().unwrap_or_default());
        bytes
    }

    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = imm;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut header = virtio_rdma_sq_wqe::new_zeroed();
        header.num_sge = self.sges.len() as u32;
        header.send_flags = self.flags;
        header.opcode = self.opcode;
        header.wr_id = self.wr_id;
        header.ex = self.imm;
        let mut bytes = header.as_bytes().to_vec();
        let at = offset_of!(virtio_rdma_sq_wqe, wr);
        bytes[at..at + self.wr.len()].copy_from_slice(&self.wr);
        bytes.extend_from_slice(self.sges.as_bytes());
        bytes
    }
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
        let fabric = Fabric::new(FabricConfig { clock: other, ..fabric_config(&clock) });
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

/// Returns `wr_id`, status and opcode of a CQE.
pub fn brief(cqe: Option<virtio_rdma_cqe>) -> Option<(u64, u32, u32)> {
    cqe.map(|cqe| (cqe.wr_id, cqe.status.into(), cqe.opcode.into()))
}
