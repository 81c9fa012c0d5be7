// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: its memory, and its driver's side of the virtqueues.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use abi::{
    closed, virtio_rdma_comp_event, virtio_rdma_cqe, virtio_rdma_event, virtio_rdma_qp_attr,
    VIRTIO_RDMA_CMD_ADD_GID, VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_VIRTQUEUES,
};
use engine::{
    Device, DeviceConfig, DevicePolicy, Fabric, Gid, Limits, LoadError, Next, Paths, Signal, Wake,
};
use memory::GuestMemory;
use ring::{Layout, SplitQueue};
use testkit::command::{add_gid, attr_mask, attributes, decode, encode};
use testkit::{gid, CqRing, Descriptor, Memory, QpRings, Virtqueue, F_WRITE};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::tracked::Tracked;

/// The number of entries of every virtqueue.
pub const RING: u16 = 32;
/// The regions of a guest's memory, with a hole between them. Virtqueues, rings and memory of the driver
/// are in the lower half of the first region, which ends where [`WINDOW`] begins.
pub const REGIONS: [(u64, u64); 2] = [(0, 0x1_4000), (0x2_0000, 0x2000)];
/// The memory for requests, which the driver writes one after the other.
pub const SCRATCH: Range<u64> = 0x4000..0x4800;
/// The address of the memory for work requests. Each kind and head has a place of its own, because the
/// device may read a work request at any time.
const WORK_REQUESTS: u64 = 0x4800;
/// The bytes of the largest work request.
const WORK_REQUEST: u64 = 0xc0;
/// The address of the buffers for CQEs, of 64 bytes each.
const CQES: u64 = 0x6000;
/// The address of the buffer for events.
const EVENTS: u64 = 0x7800;
/// The address of the buffers for the completion events of each vector.
const COMPLETION_EVENTS: u64 = 0x7808;
/// The address of the buffers for doorbells. Each head has a place of its own.
const DOORBELLS: u64 = 0x7c00;
/// The largest number of bytes of doorbells in one buffer.
pub const DOORBELL_BYTES: usize = 0x40;
/// The memory for data, up to the end of the first region.
pub const WINDOW: Range<u64> = 0x8000..0x1_4000;

/// The number of CQs of a guest. Their virtqueues have the indices from 1 on.
const CQS: u16 = 3;
/// The number of completion event vectors of a guest with rings. Their virtqueues have the indices from 1
/// on. The virtqueues of doorbells and of events follow.
pub const VECTORS: u16 = 2;
/// The bytes of inline data of a QP.
pub const INLINE: u32 = 64;
/// The bytes of one virtqueue.
pub const RING_BYTES: u64 = 0x400;
const AVAIL: u64 = 0x200;
const USED: u64 = 0x280;
/// The largest number of calls of [`Device::run`] that a device without new work may need until it rests.
const ROUNDS: u32 = 20_000;

/// A clock whose time passes only when a target says so.
#[derive(Debug)]
pub struct Clock {
    base: Instant,
    passed: Mutex<Duration>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { base: Instant::now(), passed: Mutex::default() }
    }
}

impl Clock {
    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        *self.passed.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }

    /// Lets time pass until `time`.
    pub fn advance_to(&self, time: Instant) {
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        *passed = (*passed).max(time.saturating_duration_since(self.base));
    }
}

impl engine::Clock for Clock {
    fn now(&self) -> Instant {
        self.base + *self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ignores interrupts and wake-ups, because nothing waits for them here.
struct Nobody;

impl Signal for Nobody {
    fn signal(&self) {}
}

impl Wake for Nobody {
    fn wake(&self) {}
}

/// The driver's side of a virtqueue.
#[derive(Clone, Debug)]
pub struct Queue {
    virtqueue: Virtqueue,
    /// The largest number of descriptors of a chain: one if the device writes CQEs or completion events
    /// here, two otherwise.
    step: u16,
    /// The number of bytes that the device may write into each chain that it has, by head.
    held: [Option<u32>; RING as usize],
    /// Whether the virtqueue may have been overwritten, so that its content is not checked.
    pub wild: bool,
}

impl Queue {
    fn new(index: u16, step: u16) -> Self {
        let desc = u64::from(index) * RING_BYTES;
        let (avail, used) = (desc + AVAIL, desc + USED);
        let layout = Layout { size: RING, desc, avail, used, event_idx: false };
        let virtqueue = Virtqueue::new(layout);
        Self { virtqueue, step, held: [None; RING as usize], wild: false }
    }

    /// Returns the head of the next chain, if there is room for one.
    fn free_head(&self) -> Option<u16> {
        (0..RING).step_by(self.step.into()).find(|head| self.held[usize::from(*head)].is_none())
    }

    /// Returns the number of chains that the device has.
    fn outstanding(&self) -> usize {
        self.held.iter().flatten().count()
    }
}

/// A guest.
pub struct Guest {
    /// Its device.
    pub device: Arc<Device>,
    /// Its memory.
    pub memory: Tracked,
    /// Its only GID.
    pub gid: Gid,
    /// Its virtqueues.
    pub queues: Vec<Queue>,
    /// Whether VIRTIO_RDMA_F_RINGS was negotiated.
    pub rings: bool,
    /// The rings of its QPs, by the number of the QP.
    pub(crate) qp_rings: HashMap<u32, QpRings>,
    /// The rings of its CQs, by the number of the CQ.
    pub(crate) cq_rings: HashMap<u32, CqRing>,
    scratch: u64,
}

/// Returns the configuration of the device of the guest with this number.
pub fn config(number: u8) -> DeviceConfig {
    let limits = Limits {
        max_qp: 5,
        max_cq: CQS,
        wq_size: RING,
        cq_size: RING,
        max_mr: 16,
        max_pd: 4,
        gid_table: 4,
        max_extents: 256,
        comp_vectors: VECTORS,
        ring_qp: 5,
        ring_cq: 4,
        ring_wr: 16,
        ring_cqe: 32,
        inline_data: INLINE as u16,
        ..Limits::default()
    };
    DeviceConfig {
        name: format!("guest{number}"),
        mac: Some([2, 0, 0, 0, 0, number]),
        limits,
        policy: DevicePolicy::default(),
        paths: Paths::ALL,
        wake: Arc::new(Nobody),
    }
}

impl Guest {
    /// Makes a guest whose driver has set up every virtqueue and added the GID.
    pub fn new(fabric: &Arc<Fabric>, number: u8, rings: bool) -> Self {
        let device = fabric.add_device(config(number));
        let mut guest = Self {
            device,
            memory: Tracked::new(zeroed_memory(number)),
            gid: gid(number),
            queues: Vec::new(),
            rings,
            qp_rings: HashMap::new(),
            cq_rings: HashMap::new(),
            scratch: SCRATCH.start,
        };
        guest.start();
        guest
    }

    /// Returns the largest number of descriptors of a chain in this virtqueue.
    fn step(&self, index: u16) -> u16 {
        let ones = if self.rings { VECTORS } else { CQS };
        if (1..=ones).contains(&index) {
            1
        } else {
            2
        }
    }

    /// Sets up every virtqueue again and adds the GID, as a driver does after a reset.
    pub fn start(&mut self) {
        let count = if self.rings { 3 + VECTORS } else { self.device.queue_count() };
        self.qp_rings.clear();
        self.cq_rings.clear();
        let other = if self.rings { VIRTIO_RDMA_F_VIRTQUEUES } else { VIRTIO_RDMA_F_RINGS };
        self.device.set_driver_features(closed(self.device.features() & !(1 << other)));
        self.memory.write_bytes(0, &vec![0; usize::from(count) * 0x400]);
        self.queues = (0..count).map(|index| Queue::new(index, self.step(index))).collect();
        for queue in &self.queues {
            self.memory.open(queue.virtqueue.layout.used, RING_BYTES - USED);
        }
        let rings = (0..).zip(&self.queues).map(|(index, queue)| {
            let layout = queue.virtqueue.layout;
            let ring = SplitQueue::new(&self.memory.map, layout, 0).expect("a good layout");
            (index, ring, Arc::new(Nobody) as Arc<dyn Signal>)
        });
        self.device.start(&self.memory.map, rings);
        // The command fails if the other guest took this GID.
        let request = add_gid(0, self.gid);
        let _: Result<(), u32> = command(&self.device, VIRTIO_RDMA_CMD_ADD_GID, &request);
    }

    /// Loads an image into a device, with the virtqueues of this guest.
    pub fn load_image(&self, device: &Device, image: &[u8]) -> Result<(), LoadError> {
        let queues = (0..).zip(&self.queues).map(|(index, queue)| {
            (index, queue.virtqueue.layout, Arc::new(Nobody) as Arc<dyn Signal>)
        });
        device.load(image, &self.memory.map, queues)
    }

    /// Stops a virtqueue, and sets it up again where the device left it.
    pub fn restart_queue(&mut self, index: u16) {
        let Some(base) = self.device.stop_queue(index) else { return };
        let layout = self.queues[usize::from(index)].virtqueue.layout;
        if let Ok(ring) = SplitQueue::new(&self.memory.map, layout, base) {
            self.device.set_queue(index, ring, Arc::new(Nobody));
        }
    }

    /// Reads bytes of memory.
    pub fn load(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(addr, &mut bytes);
        bytes
    }

    /// Reads all of memory.
    pub fn snapshot(&self) -> Vec<u8> {
        REGIONS.map(|(start, len)| self.load(start, len as usize)).concat()
    }

    /// Puts bytes where the device may read them.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        let len = (bytes.len() as u64).next_multiple_of(8);
        if self.scratch + len > SCRATCH.end {
            self.scratch = SCRATCH.start;
        }
        let at = self.scratch;
        self.memory.write_bytes(at, bytes);
        self.scratch += len;
        at
    }

    /// Makes a chain available, if the virtqueue has room, and returns its head.
    pub fn add(&mut self, index: u16, chain: &[Descriptor], room: u32) -> Option<u16> {
        let queue = &mut self.queues[usize::from(index)];
        let head = queue.free_head()?;
        for (i, descriptor) in (head..head + queue.step).zip(chain) {
            if descriptor.flags & F_WRITE != 0 {
                self.memory.open(descriptor.addr, descriptor.len.into());
            }
            descriptor.write(&self.memory, queue.virtqueue.layout.desc, i);
        }
        queue.virtqueue.offer(&self.memory, head);
        queue.held[usize::from(head)] = Some(room);
        self.device.kick(index);
        Some(head)
    }

    /// Makes a buffer available that the device may read. Returns whether there was room.
    pub fn add_readable(&mut self, index: u16, addr: u64, len: u32) -> bool {
        self.add(index, &[Descriptor::new((addr, len, false), None)], 0).is_some()
    }

    /// Posts a work request. Returns whether there was room.
    pub fn post(&mut self, index: u16, bytes: &[u8]) -> bool {
        let Some(head) = self.queues[usize::from(index)].free_head() else { return false };
        let slot = u64::from(index & 1) * u64::from(RING) / 2 + u64::from(head) / 2;
        let at = WORK_REQUESTS + slot * WORK_REQUEST;
        self.memory.write_bytes(at, &bytes[..bytes.len().min(WORK_REQUEST as usize)]);
        self.add_readable(index, at, bytes.len() as u32)
    }

    /// Makes a buffer available that the device may write to.
    fn add_writable(&mut self, index: u16, addr: u64, len: u32) {
        self.add(index, &[Descriptor::new((addr, len, true), None)], len);
    }

    /// Makes a request and room for its reply available.
    pub fn add_request(&mut self, bytes: &[u8], room: u32) {
        let Some(head) = self.queues[0].free_head() else { return };
        let request = self.place(bytes);
        let reply = self.place(&vec![0; room as usize]);
        let request = (request, bytes.len() as u32, false);
        let request = Descriptor::new(request, Some(head + 1));
        self.add(0, &[request, Descriptor::new((reply, room, true), None)], room);
    }

    /// Gives a CQ as many buffers as fit.
    pub fn add_cq_buffers(&mut self, cqn: u16) {
        while let Some(head) = self.queues[usize::from(1 + cqn)].free_head() {
            self.add_writable(1 + cqn, cqe_at(cqn, head), size_of::<virtio_rdma_cqe>() as u32);
        }
    }

    /// Takes the CQEs out of a CQ and gives their buffers back.
    pub fn poll(&mut self, cqn: u16) -> Vec<virtio_rdma_cqe> {
        let used = self.take_used(1 + cqn);
        let cqe = |&(head, len): &(u16, u32)| {
            assert_eq!(len as usize, size_of::<virtio_rdma_cqe>());
            self.memory.get(cqe_at(cqn, head))
        };
        let cqes = used.iter().map(cqe).collect();
        self.add_cq_buffers(cqn);
        cqes
    }

    /// Gives the event queue a buffer, and the queues of completion events as many as fit.
    pub fn add_event_buffers(&mut self) {
        let index = self.queues.len() as u16 - 1;
        self.add_writable(index, EVENTS, size_of::<virtio_rdma_event>() as u32);
        for index in 1..=if self.rings { VECTORS } else { 0 } {
            while let Some(head) = self.queues[usize::from(index)].free_head() {
                let at = completion_event_at(index, head);
                self.add_writable(index, at, size_of::<virtio_rdma_comp_event>() as u32);
            }
        }
    }

    /// Takes the completion events of a virtqueue, and returns the CQs that they name.
    pub fn take_completion_events(&mut self, index: u16) -> Vec<u32> {
        let used = self.take_used(index);
        let named = |&(head, len): &(u16, u32)| {
            let event: virtio_rdma_comp_event = self.memory.get(completion_event_at(index, head));
            assert_eq!(len as usize, size_of::<virtio_rdma_comp_event>());
            assert_eq!(event.reserved_04, 0);
            event.cqn
        };
        used.iter().map(named).collect()
    }

    /// Puts bytes into the doorbell queue, if it has room.
    pub fn ring_doorbell(&mut self, bytes: &[u8]) {
        let index = 1 + VECTORS;
        self.take_used(index);
        let Some(head) = self.queues[usize::from(index)].free_head() else { return };
        let at = DOORBELLS + u64::from(head) / 2 * DOORBELL_BYTES as u64;
        self.memory.write_bytes(at, &bytes[..bytes.len().min(DOORBELL_BYTES)]);
        self.add_readable(index, at, bytes.len() as u32);
    }

    /// Takes the chains that the device gave back. Checks that the device had each of them, and wrote no
    /// more bytes into it than it has room for.
    pub fn take_used(&mut self, index: u16) -> Vec<(u16, u32)> {
        let memory = &self.memory;
        let queue = &mut self.queues[usize::from(index)];
        let used = queue.virtqueue.used_index(memory);
        if queue.wild {
            queue.held = [None; RING as usize];
            queue.virtqueue.seen = used;
            return Vec::new();
        }
        let count = used.wrapping_sub(queue.virtqueue.seen);
        assert!(usize::from(count) <= queue.outstanding(), "more returned than was held");
        let take = |_| {
            let (head, len) = queue.virtqueue.take(memory).expect("a used chain");
            let held = queue.held.get_mut(head as usize).and_then(Option::take);
            assert!(held.is_some_and(|room| len <= room), "queue {index}: {head}, {len} bytes");
            (head as u16, len)
        };
        (0..count).map(take).collect()
    }

    /// Runs the device until it rests.
    pub fn settle(&self) -> Next {
        for _ in 0..ROUNDS {
            match self.device.run(64) {
                Next::Busy => {}
                next if !self.device.arm() => return next,
                _ => {}
            }
        }
        panic!("the device never rests");
    }
}

/// Returns the memory of the guest of this number. All runs use the same memory, because a new mapping for
/// each run would take most of the time.
fn zeroed_memory(number: u8) -> GuestMemory {
    thread_local! {
        static MEMORY: [OnceCell<GuestMemory>; 2] = const { [const { OnceCell::new() }; 2] };
    }
    let new = || GuestMemory::anonymous(&REGIONS).expect("memory for a guest");
    let memory = MEMORY.with(|all| all[usize::from(number) % 2].get_or_init(new).clone());
    for (start, len) in REGIONS {
        memory.write(start, &vec![0; len as usize]).expect("an address within memory");
    }
    memory
}

/// Returns the address of the completion event of a buffer.
fn completion_event_at(index: u16, head: u16) -> u64 {
    COMPLETION_EVENTS + (u64::from(index - 1) * u64::from(RING) + u64::from(head)) * 8
}

/// Returns the address of the CQE of a buffer.
fn cqe_at(cqn: u16, head: u16) -> u64 {
    CQES + (u64::from(cqn) * u64::from(RING) + u64::from(head)) * 64
}

/// Makes a device handle one request without the control queue.
pub fn command<Q: IntoBytes + Immutable, R: FromBytes>(
    device: &Device,
    number: u32,
    request: &Q,
) -> Result<R, u32> {
    let mut reply = vec![0; 1 + size_of::<R>()];
    let written = device.command(&encode(number, request), &mut reply);
    decode(&reply[..written])
}

/// Returns the attributes and the mask that take a QP of this type to INIT, RTR or RTS.
pub fn modify(kind: u32, state: u32, dgid: Gid, dest: u32) -> (u32, virtio_rdma_qp_attr) {
    let mut attr = attributes(state, dgid, dest);
    (attr.qkey, attr.qp_access_flags, attr.path_mtu) = (0x1111, 0xf, 1);
    (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (4, 4);
    (attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry) = (1, 8, 2, 2);
    (attr_mask(kind, state), attr)
}
