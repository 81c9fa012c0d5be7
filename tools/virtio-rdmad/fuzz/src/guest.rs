// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: its memory, and its driver's side of the virtqueues.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use abi::{
    virtio_rdma_comp_event, virtio_rdma_cqe, virtio_rdma_event, virtio_rdma_qp_attr,
    VIRTIO_RDMA_AH_GRH, VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_QPS_INIT, VIRTIO_RDMA_QPS_RTR,
    VIRTIO_RDMA_QPS_RTS, VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UC, VIRTIO_RDMA_QP_ACCESS_FLAGS,
    VIRTIO_RDMA_QP_AV, VIRTIO_RDMA_QP_DEST_QPN, VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC,
    VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC, VIRTIO_RDMA_QP_MIN_RNR_TIMER, VIRTIO_RDMA_QP_PATH_MTU,
    VIRTIO_RDMA_QP_PKEY_INDEX, VIRTIO_RDMA_QP_PORT, VIRTIO_RDMA_QP_QKEY, VIRTIO_RDMA_QP_RETRY_CNT,
    VIRTIO_RDMA_QP_RNR_RETRY, VIRTIO_RDMA_QP_RQ_PSN, VIRTIO_RDMA_QP_SQ_PSN, VIRTIO_RDMA_QP_STATE,
    VIRTIO_RDMA_QP_TIMEOUT,
};
use engine::{
    Device, DeviceConfig, DevicePolicy, Fabric, Gid, Limits, LoadError, Next, Signal, Wake,
};
use memory::GuestMemory;
use ring::{Layout, SplitQueue};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::owner::{CqRing, QpRings, INLINE};

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
/// The bytes of one virtqueue.
pub const RING_BYTES: u64 = 0x400;
const AVAIL: u64 = 0x200;
const USED: u64 = 0x280;
/// The flags of a descriptor.
const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
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
    base: u64,
    /// The largest number of descriptors of a chain: one if the device writes CQEs or completion events
    /// here, two otherwise.
    step: u16,
    next: u16,
    seen: u16,
    /// The number of bytes that the device may write into each chain that it has, by head.
    held: [Option<u32>; RING as usize],
    /// Whether the virtqueue may have been overwritten, so that its content is not checked.
    pub wild: bool,
}

impl Queue {
    fn new(index: u16, step: u16) -> Self {
        let base = u64::from(index) * RING_BYTES;
        Self { base, step, next: 0, seen: 0, held: [None; RING as usize], wild: false }
    }

    fn layout(&self) -> Layout {
        let (desc, avail, used) = (self.base, self.base + AVAIL, self.base + USED);
        Layout { size: RING, desc, avail, used, event_idx: false }
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
    pub memory: GuestMemory,
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
    kept: RefCell<Kept>,
}

/// The expected content of the lower half of memory.
struct Kept {
    bytes: Box<[u8]>,
    /// Whether the device may write here.
    open: Box<[bool]>,
}

impl Kept {
    fn new() -> Self {
        let len = WINDOW.start as usize;
        Self { bytes: vec![0; len].into(), open: vec![false; len].into() }
    }

    /// Returns the part of `[addr, addr + len)` that is in the lower half.
    fn part(addr: u64, len: u64) -> Range<usize> {
        let end = addr.saturating_add(len).min(WINDOW.start) as usize;
        (addr.min(WINDOW.start) as usize).min(end)..end
    }
}

/// Returns what the device of the guest of this number is made with.
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
        rings: true,
        wake: Arc::new(Nobody),
    }
}

impl Guest {
    /// Makes a guest whose driver has set up every virtqueue and added the GID.
    pub fn new(fabric: &Arc<Fabric>, number: u8, rings: bool) -> Self {
        let device = fabric.add_device(config(number));
        let memory = zeroed_memory(number);
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, number]);
        let mut guest = Self {
            device,
            memory,
            gid,
            queues: Vec::new(),
            rings,
            qp_rings: HashMap::new(),
            cq_rings: HashMap::new(),
            scratch: SCRATCH.start,
            kept: RefCell::new(Kept::new()),
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
        let without = if self.rings { 0 } else { 1 << VIRTIO_RDMA_F_RINGS };
        self.device.set_driver_features(self.device.features() & !without);
        self.store(0, &vec![0; usize::from(count) * 0x400]);
        self.queues = (0..count).map(|index| Queue::new(index, self.step(index))).collect();
        for queue in &self.queues {
            self.open(queue.base + USED, RING_BYTES - USED);
        }
        let rings = (0..).zip(&self.queues).map(|(index, queue)| {
            let ring = SplitQueue::new(&self.memory, queue.layout(), 0).expect("a good layout");
            (index, ring, Arc::new(Nobody) as Arc<dyn Signal>)
        });
        self.device.start(&self.memory, rings);
        let add = abi::virtio_rdma_cmd_add_gid {
            gid: self.gid,
            gid_type: abi::VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP,
            index: 0,
            vlan_id: abi::VIRTIO_RDMA_NO_VLAN as u16,
            port_num: 1,
        };
        // The command fails if the other guest took this GID.
        let _: Result<(), u8> = command(&self.device, abi::VIRTIO_RDMA_CMD_ADD_GID, &add);
    }

    /// Has a device take over the state of an image, with the virtqueues of this guest.
    pub fn load_image(&self, device: &Device, image: &[u8]) -> Result<(), LoadError> {
        let queues = (0..)
            .zip(&self.queues)
            .map(|(index, queue)| (index, queue.layout(), Arc::new(Nobody) as Arc<dyn Signal>));
        device.load(image, &self.memory, queues)
    }

    /// Stops a virtqueue, and sets it up again where the device left it.
    pub fn restart_queue(&mut self, index: u16) {
        let Some(base) = self.device.stop_queue(index) else { return };
        let layout = self.queues[usize::from(index)].layout();
        if let Ok(ring) = SplitQueue::new(&self.memory, layout, base) {
            self.device.set_queue(index, ring, Arc::new(Nobody));
        }
    }

    /// Writes to an address within memory.
    pub fn store(&self, addr: u64, bytes: &[u8]) {
        self.memory.write(addr, bytes).expect("an address within memory");
        let part = Kept::part(addr, bytes.len() as u64);
        let len = part.len();
        self.kept.borrow_mut().bytes[part].copy_from_slice(&bytes[..len]);
    }

    /// Allows the device to write to these bytes from now on.
    pub fn open(&self, addr: u64, len: u64) {
        self.kept.borrow_mut().open[Kept::part(addr, len)].fill(true);
    }

    /// Returns an address in the lower half of memory that the device wrote to without permission.
    pub fn written(&self) -> Option<usize> {
        let kept = self.kept.borrow();
        let now = self.load(0, kept.bytes.len());
        let differ = |(i, (now, kept)): (usize, (&u8, &u8))| (now != kept).then_some(i);
        let mut places = now.iter().zip(kept.bytes.iter()).enumerate().filter_map(differ);
        places.find(|i| !kept.open[*i])
    }

    /// Reads bytes of memory.
    pub fn load(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(addr, &mut bytes).expect("an address within memory");
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
        self.store(at, bytes);
        self.scratch += len;
        at
    }

    /// Makes a chain available, if the virtqueue has room, and returns its head. Each descriptor is an
    /// address, a length, flags and the index of the next descriptor.
    pub fn add(&mut self, index: u16, chain: &[(u64, u32, u16, u16)], room: u32) -> Option<u16> {
        let queue = &self.queues[usize::from(index)];
        let head = queue.free_head()?;
        let store = |at, bytes: &[u8]| self.store(at, bytes);
        for (i, (addr, len, flags, next)) in (head..head + queue.step).zip(chain) {
            if flags & F_WRITE != 0 {
                self.open(*addr, (*len).into());
            }
            let at = queue.base + u64::from(i) * 16;
            store(at, addr.as_bytes());
            store(at + 8, len.as_bytes());
            store(at + 12, flags.as_bytes());
            store(at + 14, next.as_bytes());
        }
        let slot = u64::from(queue.next % RING);
        store(queue.base + AVAIL + 4 + slot * 2, head.as_bytes());
        let next = queue.next.wrapping_add(1);
        store(queue.base + AVAIL + 2, next.as_bytes());
        let queue = &mut self.queues[usize::from(index)];
        queue.next = next;
        queue.held[usize::from(head)] = Some(room);
        self.device.kick(index);
        Some(head)
    }

    /// Posts a work request. Returns whether there was room.
    pub fn post(&mut self, index: u16, bytes: &[u8]) -> bool {
        let Some(head) = self.queues[usize::from(index)].free_head() else { return false };
        let slot = u64::from(index & 1) * u64::from(RING) / 2 + u64::from(head) / 2;
        let at = WORK_REQUESTS + slot * WORK_REQUEST;
        self.store(at, &bytes[..bytes.len().min(WORK_REQUEST as usize)]);
        self.add(index, &[(at, bytes.len() as u32, 0, 0)], 0).is_some()
    }

    /// Makes a buffer available that the device may write to.
    fn add_writable(&mut self, index: u16, addr: u64, len: u32) {
        self.add(index, &[(addr, len, F_WRITE, 0)], len);
    }

    /// Makes a request and room for its reply available.
    pub fn add_request(&mut self, bytes: &[u8], room: u32) {
        let Some(head) = self.queues[0].free_head() else { return };
        let request = self.place(bytes);
        let reply = self.place(&vec![0; room as usize]);
        self.add(
            0,
            &[(request, bytes.len() as u32, F_NEXT, head + 1), (reply, room, F_WRITE, 0)],
            room,
        );
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
            self.memory.read_obj(cqe_at(cqn, head)).expect("a CQE in memory")
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
            let at = completion_event_at(index, head);
            let event: virtio_rdma_comp_event = self.memory.read_obj(at).expect("an event");
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
        self.store(at, &bytes[..bytes.len().min(DOORBELL_BYTES)]);
        self.add(index, &[(at, bytes.len() as u32, 0, 0)], 0);
    }

    /// Takes the chains that the device gave back. Checks that the device had each of them, and wrote no
    /// more bytes into it than it has room for.
    pub fn take_used(&mut self, index: u16) -> Vec<(u16, u32)> {
        let memory = &self.memory;
        let queue = &mut self.queues[usize::from(index)];
        let used = queue.base + USED;
        let idx: u16 = memory.read_obj(used + 2).expect("a ring in memory");
        let count = idx.wrapping_sub(queue.seen);
        if queue.wild {
            queue.held = [None; RING as usize];
            queue.seen = idx;
            return Vec::new();
        }
        assert!(usize::from(count) <= queue.outstanding(), "more returned than was held");
        let take = |_| {
            let at = used + 4 + u64::from(queue.seen % RING) * 8;
            let [head, len]: [u32; 2] = memory.read_obj(at).expect("a ring in memory");
            let held = queue.held.get_mut(head as usize).and_then(Option::take);
            assert!(held.is_some_and(|room| len <= room), "queue {index}: {head}, {len} bytes");
            queue.seen = queue.seen.wrapping_add(1);
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
) -> Result<R, u8> {
    let bytes = [&[number as u8], request.as_bytes()].concat();
    let mut reply = vec![0; 1 + size_of::<R>()];
    let written = device.command(&bytes, &mut reply);
    match reply[0] {
        0 => {
            assert_eq!(written, reply.len(), "a reply is whole");
            Ok(R::read_from_bytes(&reply[1..]).expect("a reply of this size"))
        }
        status => {
            assert_eq!(written, 1, "an error has no reply");
            Err(status)
        }
    }
}

/// Returns the attributes and the mask that take a QP of this type to INIT, RTR or RTS.
pub fn modify(kind: u32, state: u32, dgid: Gid, dest: u32) -> (u32, virtio_rdma_qp_attr) {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    let connected = matches!(kind, VIRTIO_RDMA_QPT_RC | VIRTIO_RDMA_QPT_UC);
    let rc = kind == VIRTIO_RDMA_QPT_RC;
    attr.qp_state = state as u8;
    attr.port_num = 1;
    attr.qkey = 0x1111;
    attr.qp_access_flags = 0xf;
    attr.path_mtu = 1;
    attr.dest_qp_num = dest;
    attr.ah_attr.grh.dgid = dgid;
    attr.ah_attr.ah_flags = VIRTIO_RDMA_AH_GRH as u8;
    attr.ah_attr.port_num = 1;
    (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (4, 4);
    (attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry) = (1, 8, 2, 2);
    let mut mask = VIRTIO_RDMA_QP_STATE;
    match state {
        VIRTIO_RDMA_QPS_INIT => {
            mask |= VIRTIO_RDMA_QP_PKEY_INDEX | VIRTIO_RDMA_QP_PORT;
            mask |= if connected { VIRTIO_RDMA_QP_ACCESS_FLAGS } else { VIRTIO_RDMA_QP_QKEY };
        }
        VIRTIO_RDMA_QPS_RTR if connected => {
            mask |= VIRTIO_RDMA_QP_AV | VIRTIO_RDMA_QP_PATH_MTU;
            mask |= VIRTIO_RDMA_QP_DEST_QPN | VIRTIO_RDMA_QP_RQ_PSN;
            if rc {
                mask |= VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
            }
        }
        VIRTIO_RDMA_QPS_RTS => {
            mask |= VIRTIO_RDMA_QP_SQ_PSN;
            if rc {
                mask |= VIRTIO_RDMA_QP_TIMEOUT | VIRTIO_RDMA_QP_RETRY_CNT;
                mask |= VIRTIO_RDMA_QP_RNR_RETRY | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
            }
        }
        _ => {}
    }
    (mask, attr)
}
