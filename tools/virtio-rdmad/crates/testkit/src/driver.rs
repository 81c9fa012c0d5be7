// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of the device: it makes objects, posts work requests and takes completions.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};

use abi::*;
use memory::GuestMemory;
use ring::Layout;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::command::{self, Gid};
use crate::memory::Memory;
use crate::rings::{CqRing, QpRings, SrqRing};
use crate::virtqueue::{Buffer, Virtqueue};
use crate::wqe::{self, Send};

/// The bytes of guest memory. Queues and rings are in its lower part, data from [`DATA`] on.
pub const MEMORY: u64 = 32 << 20;
/// The address at which the data of tests begins.
pub const DATA: u64 = 8 << 20;
/// The binary logarithm of the bytes of the smallest page.
pub const PAGE_SHIFT: u8 = VIRTIO_RDMA_PAGE_SHIFT as u8;
/// The number of entries of every virtqueue.
pub const RING: u16 = 64;
/// The number of completion event vectors of a device with rings.
pub const VECTORS: u16 = 2;
/// The bytes of an entry of a send or receive ring.
pub const STRIDE: u32 = 512;
/// The largest number of bytes of inline data.
pub const INLINE: u32 = 256;

/// The address of the first virtqueue, and the bytes of each of them.
const VIRTQUEUES: u64 = 0x1000;
const VIRTQUEUE: u64 = 0x3000;
/// The addresses of the buffers for events and for CQEs.
const EVENTS: u64 = 2 << 20;
const CQES: u64 = 3 << 20;
/// The address of the first of the buffers that are used in turn, up to [`DATA`].
const SCRATCH: u64 = 4 << 20;
/// The bytes in front of the entries of a ring.
const HEAD: u32 = size_of::<virtio_rdma_qp_ring>() as u32;
/// The room for the reply to a command that nobody waits for at once.
const ROOM: usize = 256;
/// The bytes of an event.
const EVENT: u32 = size_of::<virtio_rdma_event>() as u32;

/// The access right of peers to read.
pub const READ: u32 = VIRTIO_RDMA_ACCESS_REMOTE_READ;
/// The access right of peers to write.
pub const WRITE: u32 = VIRTIO_RDMA_ACCESS_REMOTE_WRITE;
/// The access right of peers to do atomic operations.
pub const ATOMIC: u32 = VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;
/// The access right of the guest's own requests to write.
pub const LOCAL: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE;
/// All of these rights.
pub const ALL: u32 = READ | WRITE | ATOMIC | LOCAL;

/// The way to a device.
pub trait Transport {
    /// Starts the device with these features and these virtqueues.
    fn start(&mut self, features: u64, memory: &GuestMemory, virtqueues: &BTreeMap<u16, Virtqueue>);

    /// Tells the device that there are buffers in a virtqueue.
    fn kick(&self, virtqueue: u16);

    /// Lets the device work until it has used a buffer of a virtqueue, or does nothing more.
    fn wait(&self, virtqueue: u16, is_used: &dyn Fn() -> bool);
}

/// The sizes of a guest and of its objects.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// The bytes of guest memory.
    pub memory: u64,
    /// The number of CQs of the device without rings. The numbers of its virtqueues depend on it.
    pub max_cq: u16,
    /// The number of QPs, as `max_cq`.
    pub max_qp: u16,
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

impl Default for Sizes {
    fn default() -> Self {
        Self {
            memory: MEMORY,
            max_cq: 4,
            max_qp: 6,
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

/// A driver, and the programs of its guest. What its transport has besides is reached through it.
pub struct Driver<T> {
    transport: T,
    /// The guest's memory.
    pub memory: GuestMemory,
    /// The sizes.
    pub sizes: Sizes,
    /// The GID of the guest.
    pub gid: Gid,
    /// Whether VIRTIO_RDMA_F_RINGS is agreed on.
    pub rings: bool,
    /// The retry count of its RC QPs.
    pub retry_cnt: u8,
    /// The RNR retry count of its RC QPs.
    pub rnr_retry: u8,
    /// The path MTU of its connections (`enum ib_mtu`).
    pub path_mtu: u8,
    /// The traffic class and the service level of its connections.
    pub class: (u8, u8),
    /// The MAC address that its connections go to.
    pub dmac: [u8; 6],
    /// The PSN that its connections send first.
    pub sq_psn: u32,
    /// The PSN that its connections expect first.
    pub rq_psn: u32,
    /// The rings of its QPs.
    pub qp_rings: HashMap<u32, QpRings>,
    /// The rings of its CQs.
    pub cq_rings: HashMap<u32, CqRing>,
    /// The rings of its SRQs.
    pub srq_rings: HashMap<u32, SrqRing>,
    /// Its virtqueues.
    pub virtqueues: BTreeMap<u16, Virtqueue>,
    /// The regions of rings that are not in use.
    regions: Vec<u64>,
    scratch: u64,
}

impl<T> Deref for Driver<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.transport
    }
}

impl<T> DerefMut for Driver<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.transport
    }
}

impl<T: Transport> Driver<T> {
    /// Returns a driver that has not started.
    pub fn over(transport: T, memory: GuestMemory, sizes: Sizes, gid: Gid) -> Self {
        Self {
            transport,
            memory,
            sizes,
            gid,
            rings: false,
            retry_cnt: 3,
            rnr_retry: 3,
            path_mtu: 3,
            class: (0, 0),
            dmac: [0; 6],
            sq_psn: 0,
            rq_psn: 0,
            qp_rings: HashMap::new(),
            cq_rings: HashMap::new(),
            srq_rings: HashMap::new(),
            virtqueues: BTreeMap::new(),
            regions: Vec::new(),
            scratch: SCRATCH,
        }
    }

    /// Sets these virtqueues up, as a driver does that starts, and forgets all objects. With rings, the virtqueues of
    /// completion events are full of buffers then.
    pub fn set_up(&mut self, features: u64, virtqueues: impl IntoIterator<Item = u16>) {
        self.virtqueues.clear();
        self.qp_rings.clear();
        self.cq_rings.clear();
        self.srq_rings.clear();
        let Sizes { regions, region_len, region_count, .. } = self.sizes;
        self.regions = (0..region_count).rev().map(|index| regions + index * region_len).collect();
        self.scratch = SCRATCH;
        for (at, index) in virtqueues.into_iter().enumerate() {
            let desc = VIRTQUEUES + at as u64 * VIRTQUEUE;
            let (avail, used) = (desc + 0x1000, desc + 0x2000);
            self.memory.write_bytes(desc, &[0; VIRTQUEUE as usize]);
            let layout = Layout { size: RING, desc, avail, used, event_idx: false };
            self.virtqueues.insert(index, Virtqueue::new(layout));
        }
        self.transport.start(features, &self.memory, &self.virtqueues);
        for vector in 0..if self.rings { VECTORS } else { 0 } {
            for _ in 0..RING {
                self.add_completion_event_buffer(vector);
            }
        }
    }

    /// Returns the virtqueue of a CQ.
    pub fn cq_queue(&self, cqn: u32) -> u16 {
        1 + cqn as u16
    }

    /// Returns the virtqueue of a QP's sends.
    pub fn send_queue(&self, qpn: u32) -> u16 {
        1 + self.sizes.max_cq + 2 * (qpn as u16 - 1)
    }

    /// Returns the virtqueue of a QP's receives.
    pub fn receive_queue(&self, qpn: u32) -> u16 {
        self.send_queue(qpn) + 1
    }

    /// Returns the virtqueue of asynchronous events.
    pub fn event_queue(&self) -> u16 {
        if self.rings {
            return 2 + VECTORS;
        }
        1 + self.sizes.max_cq + 2 * self.sizes.max_qp
    }

    /// Returns the address of a virtqueue's descriptor table.
    pub fn descriptors(&self, virtqueue: u16) -> u64 {
        self.virtqueues[&virtqueue].layout.desc
    }

    fn virtqueue(&mut self, index: u16) -> &mut Virtqueue {
        self.virtqueues.get_mut(&index).expect("a virtqueue")
    }

    /// Makes a chain available whose descriptors begin at `head`.
    pub fn add_at(&mut self, virtqueue: u16, head: u16, buffers: &[Buffer]) {
        let queue = self.virtqueues.get_mut(&virtqueue).expect("a virtqueue");
        queue.add(&self.memory, head, buffers);
    }

    /// Makes a chain available whose descriptors begin at the next entry, and kicks the device.
    pub fn add(&mut self, virtqueue: u16, buffers: &[Buffer]) {
        let head = self.virtqueue(virtqueue).next_head();
        self.add_at(virtqueue, head, buffers);
        self.transport.kick(virtqueue);
    }

    /// Makes a buffer available to the device, at an address that depends on its descriptor, and kicks the device.
    fn add_event_at(&mut self, virtqueue: u16, len: u32, address: impl Fn(u32) -> u64) {
        let head = self.virtqueue(virtqueue).next_head();
        self.add(virtqueue, &[(address(head.into()), len, true)]);
    }

    /// Takes the next used entry, and returns its head and its length.
    pub fn used(&mut self, virtqueue: u16) -> Option<(u32, u32)> {
        let queue = self.virtqueues.get_mut(&virtqueue).expect("a virtqueue");
        queue.take(&self.memory)
    }

    /// Returns the number of buffers that the device has used so far.
    pub fn used_index(&self, virtqueue: u16) -> u16 {
        self.virtqueues[&virtqueue].used_index(&self.memory)
    }

    /// Returns how many buffers of a virtqueue the guest has taken so far.
    pub fn used_so_far(&self, virtqueue: u16) -> u16 {
        self.virtqueues[&virtqueue].seen
    }

    /// Returns the address of a buffer of this length, which stays for as long as the buffers of the next megabytes.
    pub fn allocate(&mut self, len: u64) -> u64 {
        let at = self.scratch;
        self.scratch += len.next_multiple_of(64);
        if self.scratch > DATA {
            self.scratch = SCRATCH;
            return self.allocate(len);
        }
        at
    }

    /// Puts bytes where the device may read them, and returns the address.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        let at = self.allocate(bytes.len() as u64);
        self.memory.write_bytes(at, bytes);
        at
    }

    /// Writes words to memory that nothing uses, and returns the address.
    pub fn memory_for(&mut self, words: &[u64]) -> u64 {
        self.place(words.as_bytes())
    }

    /// Writes a pattern that depends on `seed` to memory, and returns it.
    pub fn fill(&self, addr: u64, len: usize, seed: u8) -> Vec<u8> {
        let byte = |at: usize| (at as u8).wrapping_mul(31).wrapping_add(seed);
        let data: Vec<u8> = (0..len).map(byte).collect();
        self.memory.write_bytes(addr, &data);
        data
    }

    /// Returns bytes of memory.
    pub fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(addr, &mut bytes);
        bytes
    }

    /// Sends the bytes of a command, and does not wait. Returns where its reply will be.
    fn send_command(&mut self, request: &[u8], room: usize) -> u64 {
        let at = self.allocate(request.len() as u64);
        let reply = self.allocate(room as u64);
        self.memory.write_bytes(at, request);
        self.add(0, &[(at, request.len() as u32, false), (reply, room as u32, true)]);
        reply
    }

    /// Waits for a reply, which will be there, and returns it.
    pub fn await_reply(&mut self, reply: u64) -> Vec<u8> {
        let (queue, memory) = (&self.virtqueues[&0], &self.memory);
        self.transport.wait(0, &|| queue.used_index(memory) != queue.seen);
        let (_, length) = self.used(0).expect("a reply");
        self.bytes(reply, length as usize)
    }

    /// Sends a command, and does not wait. Returns where its reply will be.
    pub fn begin_command(&mut self, command: u32, request: &(impl IntoBytes + Immutable)) -> u64 {
        self.send_command(&command::encode(command, request), ROOM)
    }

    /// Sends a request through the control queue. Returns the status and the reply.
    pub fn request(&mut self, bytes: &[u8], room: usize) -> (u8, Vec<u8>) {
        let reply = self.send_command(bytes, room);
        let reply = self.await_reply(reply);
        (reply[0], reply[1..].to_vec())
    }

    /// Sends a command, and returns the reply, or the status if it failed.
    pub fn command<Q: IntoBytes + Immutable, R: FromBytes>(
        &mut self,
        command: u32,
        request: &Q,
    ) -> Result<R, u32> {
        let request = command::encode(command, request);
        let reply = self.send_command(&request, 1 + size_of::<R>());
        command::decode(&self.await_reply(reply))
    }

    /// Adds a GID of RoCE v2. `extra_type` is added to its type.
    pub fn add_gid(&mut self, index: u16, gid: Gid, extra_type: u32) -> Result<(), u32> {
        let mut request = command::add_gid(index, gid);
        request.gid_type += extra_type;
        self.command(VIRTIO_RDMA_CMD_ADD_GID, &request)
    }

    /// Adds a GID that belongs to a VLAN.
    pub fn add_vlan_gid(&mut self, index: u16, gid: Gid, vlan_id: u32) -> Result<(), u32> {
        let vlan_id = vlan_id as u16;
        let request = virtio_rdma_cmd_add_gid { vlan_id, ..command::add_gid(index, gid) };
        self.command(VIRTIO_RDMA_CMD_ADD_GID, &request)
    }

    /// Deletes a GID.
    pub fn del_gid(&mut self, index: u16) -> Result<(), u32> {
        let request = virtio_rdma_cmd_del_gid { index, reserved_02: 0, port: 1 };
        self.command(VIRTIO_RDMA_CMD_DEL_GID, &request)
    }

    /// Creates a PD.
    pub fn create_pd(&mut self) -> u32 {
        let reply: virtio_rdma_rsp_create_pd =
            self.command(VIRTIO_RDMA_CMD_CREATE_PD, &()).unwrap();
        reply.pdn
    }

    /// Returns an unused region for rings, and fills it with zeros.
    pub fn take_region(&mut self) -> u64 {
        let region = self.regions.pop().expect("a region");
        self.memory.write_bytes(region, &vec![0; self.sizes.region_len as usize]);
        region
    }

    /// Takes a region back that the device does not use. It is used again after all others.
    fn put_region(&mut self, region: u64) {
        self.regions.insert(0, region);
    }

    /// Returns what a command says of a region.
    pub fn describe(&mut self, region: u64) -> virtio_rdma_ring_region {
        let pages = command::pages_of(region, self.sizes.region_len);
        command::region(self.memory_for(&pages), pages.len() as u32)
    }

    /// Returns the request for a CQ with a ring.
    pub fn cq_ring_request(&mut self, region: u64, cqe: u32) -> virtio_rdma_cmd_create_ring_cq {
        let region = self.describe(region);
        virtio_rdma_cmd_create_ring_cq { region, cqe, comp_vector: 1 }
    }

    fn create_ring_cq(&mut self, depth: u32) -> u32 {
        let region = self.take_region();
        let request = self.cq_ring_request(region, depth);
        let reply: virtio_rdma_rsp_create_cq =
            self.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request).unwrap();
        self.cq_rings.insert(reply.cqn, CqRing::new(region, depth, 1));
        reply.cqn
    }

    /// Moves a CQ to a ring of `depth` entries. Returns how many entries the device moved.
    pub fn resize_cq(&mut self, cqn: u32, depth: u32) -> Result<u32, u32> {
        let new = self.take_region();
        let region = self.describe(new);
        let request = virtio_rdma_cmd_resize_cq { region, cqe: depth, cqn };
        let result = self.command(VIRTIO_RDMA_CMD_RESIZE_CQ, &request);
        let reply: virtio_rdma_rsp_resize_cq = result.inspect_err(|_| self.regions.push(new))?;
        let old = self.cq_rings.get_mut(&cqn).unwrap().moved(new, depth);
        self.regions.push(old);
        Ok(reply.moved)
    }

    /// Sets how many completions, or how many microseconds, an event is held back.
    pub fn modify_cq(&mut self, cqn: u32, cq_count: u16, cq_period: u16) -> Result<(), u32> {
        let request = virtio_rdma_cmd_modify_cq { cqn, cq_count, cq_period };
        self.command(VIRTIO_RDMA_CMD_MODIFY_CQ, &request)
    }

    /// Destroys a CQ.
    pub fn destroy_cq(&mut self, cqn: u32) -> Result<(), u32> {
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_CQ, &virtio_rdma_cmd_destroy_cq { cqn })?;
        if let Some(ring) = self.cq_rings.remove(&cqn) {
            self.put_region(ring.region);
        }
        Ok(())
    }

    /// Destroys a QP.
    pub fn destroy_qp(&mut self, qpn: u32) -> Result<(), u32> {
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_QP, &virtio_rdma_cmd_destroy_qp { qpn })?;
        if let Some(rings) = self.qp_rings.remove(&qpn) {
            self.put_region(rings.region);
        }
        Ok(())
    }

    fn add_completion_event_buffer(&mut self, vector: u16) {
        self.add_event_at(1 + vector, EVENT, |head| completion_event_at(vector, head));
    }

    /// Takes completion events, and counts them for their CQs.
    fn take_completion_events(&mut self, vector: u16) {
        while let Some((head, length)) = self.used(1 + vector) {
            assert_eq!(length, EVENT);
            let event: virtio_rdma_comp_event = self.memory.get(completion_event_at(vector, head));
            if let Some(ring) = self.cq_rings.get_mut(&event.cqn) {
                assert_eq!(ring.vector, vector);
                ring.events += 1;
            }
            self.add_completion_event_buffer(vector);
        }
    }

    /// Returns how many events for completions in a CQ with a ring the guest got.
    pub fn cq_events(&mut self, cqn: u32) -> u32 {
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
        for _ in 0..buffers {
            self.add_cq_buffer(reply.cqn);
        }
        reply.cqn
    }

    fn add_cq_buffer(&mut self, cqn: u32) {
        let queue = self.cq_queue(cqn);
        let len = size_of::<virtio_rdma_cqe>() as u32;
        let head = self.virtqueue(queue).next_head();
        self.add_at(queue, head, &[(cqe_at(queue, head.into()), len, true)]);
    }

    /// Takes a CQE out of a ring.
    pub fn poll_ring(&mut self, cqn: u32) -> Option<virtio_rdma_ring_cqe> {
        let ring = self.cq_rings.get_mut(&cqn)?;
        let cqe = ring.take(&self.memory)?;
        ring.release(&self.memory);
        Some(cqe)
    }

    /// Takes a CQE out of a CQ, and gives its buffer back.
    pub fn poll(&mut self, cqn: u32) -> Option<virtio_rdma_cqe> {
        if self.rings {
            return self.poll_ring(cqn).as_ref().map(wqe::shortened);
        }
        let queue = self.cq_queue(cqn);
        let (head, length) = self.used(queue)?;
        assert_eq!(length as usize, size_of::<virtio_rdma_cqe>());
        let cqe = self.memory.get(cqe_at(queue, head));
        self.add_cq_buffer(cqn);
        Some(cqe)
    }

    /// Asks for an event at the next completion of a CQ.
    pub fn arm_cq(&mut self, cqn: u32, flags: u32) -> Result<(), u32> {
        if self.rings {
            let is_solicited = flags & VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION == 0;
            self.cq_rings.get_mut(&cqn).unwrap().arm(&self.memory, is_solicited);
            return Ok(());
        }
        let request = virtio_rdma_cmd_req_notify { cqn, flags };
        self.command(VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ, &request)
    }

    /// Registers `[addr, addr + len)` of guest memory. Peers name it by the same address.
    pub fn reg_mr(&mut self, pdn: u32, addr: u64, len: u64, access: u32) -> virtio_rdma_rsp_mr {
        let pages = command::pages_of(addr, len);
        self.reg_pages(pdn, addr, len, access, &pages).unwrap()
    }

    /// Registers memory that has these pages.
    pub fn reg_pages(
        &mut self,
        pdn: u32,
        addr: u64,
        len: u64,
        access: u32,
        pages: &[u64],
    ) -> Result<virtio_rdma_rsp_mr, u32> {
        let table = (self.memory_for(pages), pages.len() as u32);
        let request = command::reg_user_mr(pdn, access, (addr, len), table);
        self.command(VIRTIO_RDMA_CMD_REG_USER_MR, &request)
    }

    /// Registers all memory.
    pub fn get_dma_mr(&mut self, pdn: u32, access: u32) -> Result<virtio_rdma_rsp_mr, u32> {
        let request = virtio_rdma_cmd_get_dma_mr { pdn, access_flags: access };
        self.command(VIRTIO_RDMA_CMD_GET_DMA_MR, &request)
    }

    /// Creates an MR for fast registration.
    pub fn create_mr(&mut self, pdn: u32, pages: u32) -> Result<virtio_rdma_rsp_mr, u32> {
        let request = virtio_rdma_cmd_create_mr { pdn, access_flags: 0, max_num_sg: pages };
        self.command(VIRTIO_RDMA_CMD_CREATE_MR, &request)
    }

    /// Returns the work request that gives `pages` to an MR. Peers name its first byte by `iova`.
    pub fn registration(
        &mut self,
        key: u32,
        access: u32,
        iova: u64,
        length: u64,
        pages: &[u64],
    ) -> WrReg {
        let (npages, page_shift) = (pages.len() as u32, PAGE_SHIFT);
        let pages = self.memory_for(pages);
        WrReg { key, access, npages, pages, iova, length, page_shift, ..WrReg::new_zeroed() }
    }

    /// Allocates a memory window.
    pub fn alloc_mw(&mut self, pdn: u32, kind: u32) -> Result<virtio_rdma_rsp_alloc_mw, u32> {
        let request = virtio_rdma_cmd_alloc_mw { pdn, type_: kind as u8, reserved_05: [0; 3] };
        self.command(VIRTIO_RDMA_CMD_ALLOC_MW, &request)
    }

    /// Frees a memory window.
    pub fn dealloc_mw(&mut self, mwn: u32) -> Result<(), u32> {
        self.command(VIRTIO_RDMA_CMD_DEALLOC_MW, &virtio_rdma_cmd_dealloc_mw { mwn })
    }

    /// Deregisters an MR.
    pub fn dereg_mr(&mut self, mrn: u32) -> Result<(), u32> {
        self.command(VIRTIO_RDMA_CMD_DEREG_MR, &virtio_rdma_cmd_dereg_mr { mrn })
    }

    /// Returns the request for a QP whose work requests say whether they end with a CQE.
    pub fn qp_request(pdn: u32, cqn: u32, kind: u32) -> virtio_rdma_cmd_create_qp {
        let mut request = command::create_qp(pdn, cqn, kind, 16);
        request.sq_sig_type = VIRTIO_RDMA_SIGNAL_REQ_WR as u8;
        request
    }

    /// Returns the request for a QP with rings.
    pub fn qp_ring_request(
        &mut self,
        region: u64,
        mut base: virtio_rdma_cmd_create_qp,
    ) -> virtio_rdma_cmd_create_ring_qp {
        base.max_inline_data = self.sizes.inline;
        (base.max_send_sge, base.max_recv_sge) = (self.sizes.sges, self.sizes.sges);
        let Sizes { depth, stride, .. } = self.sizes;
        let first = stride.max(HEAD);
        let shapes = [first, first + stride * depth].map(|at| command::shape(depth, stride, at));
        command::create_ring_qp(base, self.describe(region), shapes)
    }

    /// Creates a QP.
    pub fn create_qp(&mut self, pdn: u32, cqn: u32, kind: u32) -> u32 {
        self.try_create_qp(Self::qp_request(pdn, cqn, kind)).unwrap()
    }

    /// Creates a QP, with rings if the guest has them.
    pub fn try_create_qp(&mut self, request: virtio_rdma_cmd_create_qp) -> Result<u32, u32> {
        if self.rings {
            let region = self.take_region();
            let request = self.qp_ring_request(region, request);
            return self.create_ring_qp(region, &request);
        }
        let reply: virtio_rdma_rsp_create_qp = self.command(VIRTIO_RDMA_CMD_CREATE_QP, &request)?;
        Ok(reply.qpn)
    }

    fn create_ring_qp(
        &mut self,
        region: u64,
        request: &virtio_rdma_cmd_create_ring_qp,
    ) -> Result<u32, u32> {
        let result = self.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, request);
        let reply: virtio_rdma_rsp_create_qp = result.inspect_err(|_| self.regions.push(region))?;
        self.qp_rings.insert(reply.qpn, QpRings::new(region, [request.sq, request.rq]));
        Ok(reply.qpn)
    }

    /// Sends ATTACH_MCAST or DETACH_MCAST.
    pub fn mcast(&mut self, command: u32, qpn: u32, gid: Gid) -> Result<(), u32> {
        let request = virtio_rdma_cmd_mcast { gid, qpn, lid: 0, reserved_16: 0 };
        self.command(command, &request)
    }

    /// Returns the counters of the port.
    pub fn query_counters(&mut self) -> Result<virtio_rdma_rsp_query_counters, u32> {
        let request = virtio_rdma_cmd_query_counters { port: 1 };
        self.command(VIRTIO_RDMA_CMD_QUERY_COUNTERS, &request)
    }

    /// Returns the request for an SRQ.
    pub fn srq_request(&mut self, region: u64, pdn: u32) -> virtio_rdma_cmd_create_srq {
        let Sizes { depth, stride, .. } = self.sizes;
        let ring = command::shape(depth, stride, stride.max(HEAD));
        command::create_srq(pdn, self.describe(region), ring)
    }

    fn try_create_srq(
        &mut self,
        region: u64,
        request: &virtio_rdma_cmd_create_srq,
    ) -> Result<u32, u32> {
        let result = self.command(VIRTIO_RDMA_CMD_CREATE_SRQ, request);
        let reply: virtio_rdma_rsp_create_srq =
            result.inspect_err(|_| self.regions.push(region))?;
        let ring = SrqRing { region, shape: request.ring, producer: 0 };
        self.srq_rings.insert(reply.srqn, ring);
        Ok(reply.srqn)
    }

    /// Creates an SRQ.
    pub fn create_srq(&mut self, pdn: u32) -> u32 {
        let region = self.take_region();
        let request = self.srq_request(region, pdn);
        self.try_create_srq(region, &request).unwrap()
    }

    /// Asks for an event when fewer receives than this wait.
    pub fn arm_srq(&mut self, srqn: u32, srq_limit: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_modify_srq { srqn, srq_limit };
        self.command(VIRTIO_RDMA_CMD_MODIFY_SRQ, &request)
    }

    /// Returns the attributes of an SRQ.
    pub fn query_srq(&mut self, srqn: u32) -> Result<virtio_rdma_rsp_query_srq, u32> {
        self.command(VIRTIO_RDMA_CMD_QUERY_SRQ, &virtio_rdma_cmd_query_srq { srqn })
    }

    /// Moves an SRQ to a ring of `depth` entries. Returns how many entries the device moved.
    pub fn resize_srq(&mut self, srqn: u32, depth: u32) -> Result<u32, u32> {
        let region = self.take_region();
        let create = self.srq_request(region, 0);
        let shape = virtio_rdma_ring_shape { depth, ..create.ring };
        let request = command::resize_srq(srqn, create.region, shape);
        let result = self.command(VIRTIO_RDMA_CMD_RESIZE_SRQ, &request);
        let reply: virtio_rdma_rsp_resize_srq =
            result.inspect_err(|_| self.regions.push(region))?;
        let ring = self.srq_rings.get_mut(&srqn).unwrap();
        let old = std::mem::replace(ring, SrqRing { region, shape, producer: reply.moved });
        assert_eq!(self.memory.get::<u32>(region), reply.moved);
        self.regions.push(old.region);
        Ok(reply.moved)
    }

    /// Destroys an SRQ.
    pub fn destroy_srq(&mut self, srqn: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_destroy_srq { srqn };
        self.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_SRQ, &request)?;
        if let Some(ring) = self.srq_rings.remove(&srqn) {
            self.put_region(ring.region);
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
        self.create_ring_qp(region, &request)
    }

    /// Allocates an XRC domain.
    pub fn alloc_xrcd(&mut self) -> Result<u32, u32> {
        let reply: virtio_rdma_rsp_alloc_xrcd = self.command(VIRTIO_RDMA_CMD_ALLOC_XRCD, &())?;
        Ok(reply.xrcdn)
    }

    /// Frees an XRC domain.
    pub fn dealloc_xrcd(&mut self, xrcdn: u32) -> Result<(), u32> {
        let request = virtio_rdma_cmd_dealloc_xrcd { xrcdn };
        self.command(VIRTIO_RDMA_CMD_DEALLOC_XRCD, &request)
    }

    /// Creates an SRQ for XRC.
    pub fn create_xrc_srq(&mut self, pdn: u32, xrcdn: u32, cqn: u32) -> Result<u32, u32> {
        let region = self.take_region();
        let mut request = self.srq_request(region, pdn);
        (request.xrcdn, request.cqn) = (xrcdn, cqn);
        self.try_create_srq(region, &request)
    }

    /// Creates the target of an XRC.
    pub fn create_xrc_tgt(&mut self, xrcdn: u32) -> Result<u32, u32> {
        let request = command::create_xrc_tgt(xrcdn);
        let reply: virtio_rdma_rsp_create_qp =
            self.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request)?;
        Ok(reply.qpn)
    }

    /// Creates an XRC initiator, whose request is that of a QP with SRQ number 0.
    pub fn create_xrc_ini(&mut self, pdn: u32, cqn: u32) -> Result<u32, u32> {
        self.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_XRC_INI, 0)
    }

    /// Changes the attributes of a QP that the mask names.
    pub fn modify(&mut self, qpn: u32, mask: u32, attr: virtio_rdma_qp_attr) -> Result<(), u32> {
        let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask: mask, attr };
        self.command(VIRTIO_RDMA_CMD_MODIFY_QP, &request)
    }

    /// Takes a QP to a state that needs no other attribute.
    pub fn set_state(&mut self, qpn: u32, state: u32) -> Result<(), u32> {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = state as u8;
        self.modify(qpn, VIRTIO_RDMA_QP_STATE, attr)?;
        if let (VIRTIO_RDMA_QPS_RESET, Some(rings)) = (state, self.qp_rings.get_mut(&qpn)) {
            rings.restart(&self.memory);
        }
        Ok(())
    }

    /// Returns the attributes of a QP.
    pub fn query(&mut self, qpn: u32) -> virtio_rdma_qp_attr {
        let request = virtio_rdma_cmd_query_qp { qpn, attr_mask: 0 };
        let reply: virtio_rdma_rsp_query_qp =
            self.command(VIRTIO_RDMA_CMD_QUERY_QP, &request).unwrap();
        reply.attr
    }

    /// Takes a connection's QP from RESET to INIT.
    pub fn make_init(&mut self, qpn: u32, access: u32) {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.port_num) = (VIRTIO_RDMA_QPS_INIT as u8, 1);
        attr.qp_access_flags = access;
        let mask = command::attr_mask(VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPS_INIT);
        self.modify(qpn, mask, attr).unwrap();
    }

    /// Takes a connection's QP from INIT to RTR. `rc` says whether the connection is reliable.
    pub fn make_rtr(&mut self, qpn: u32, dgid: Gid, dest: u32, rc: bool) -> Result<(), u32> {
        self.make_rtr_from(qpn, 0, dgid, dest, rc)
    }

    /// Does what `make_rtr` does, with another entry of the GID table.
    pub fn make_rtr_from(
        &mut self,
        qpn: u32,
        sgid_index: u8,
        dgid: Gid,
        dest: u32,
        rc: bool,
    ) -> Result<(), u32> {
        let attr = self.of_rtr(sgid_index, dgid, dest, rc);
        self.modify(qpn, command::attr_mask(connection(rc), VIRTIO_RDMA_QPS_RTR), attr)
    }

    /// Returns the attributes with which a connection's QP goes to RTR.
    fn of_rtr(&self, sgid_index: u8, dgid: Gid, dest: u32, rc: bool) -> virtio_rdma_qp_attr {
        let mut attr = command::attributes(VIRTIO_RDMA_QPS_RTR, dgid, dest);
        (attr.path_mtu, attr.rq_psn) = (self.path_mtu, self.rq_psn);
        attr.ah_attr.grh.sgid_index = sgid_index;
        (attr.ah_attr.grh.traffic_class, attr.ah_attr.sl) = self.class;
        attr.ah_attr.dmac = self.dmac;
        if rc {
            (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (4, 12);
        }
        attr
    }

    /// Takes a reliable connection's QP from RESET to RTR at once.
    pub fn make_rtr_at_once(
        &mut self,
        qpn: u32,
        access: u32,
        dgid: Gid,
        dest: u32,
    ) -> Result<(), u32> {
        let mut attr = self.of_rtr(0, dgid, dest, true);
        attr.qp_access_flags = access;
        let [init, rtr] = [VIRTIO_RDMA_QPS_INIT, VIRTIO_RDMA_QPS_RTR]
            .map(|state| command::attr_mask(VIRTIO_RDMA_QPT_RC, state));
        self.modify(qpn, init | rtr, attr)
    }

    /// Takes a connection's QP from RTR to RTS.
    pub fn make_rts(&mut self, qpn: u32, rc: bool) -> Result<(), u32> {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.sq_psn) = (VIRTIO_RDMA_QPS_RTS as u8, self.sq_psn);
        if rc {
            (attr.timeout, attr.retry_cnt, attr.max_rd_atomic) = (14, self.retry_cnt, 4);
            attr.rnr_retry = self.rnr_retry;
        }
        self.modify(qpn, command::attr_mask(connection(rc), VIRTIO_RDMA_QPS_RTS), attr)
    }

    /// Connects an RC QP, whose peer may do everything.
    pub fn connect(&mut self, qpn: u32, dgid: Gid, dest: u32) {
        self.connect_with(qpn, ALL, dgid, dest);
    }

    /// Connects an RC QP, whose peer may do this.
    pub fn connect_with(&mut self, qpn: u32, access: u32, dgid: Gid, dest: u32) {
        self.make_init(qpn, access);
        self.make_rtr(qpn, dgid, dest, true).unwrap();
        self.make_rts(qpn, true).unwrap();
    }

    /// Brings an XRC initiator to RTS, which has nothing of a responder.
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
        self.write_srq_entry(srqn, &wqe::receive(wr_id, sges));
        if self.srq_rings[&srqn].must_ring(&self.memory) {
            self.ring_doorbell(srqn, VIRTIO_RDMA_DOORBELL_SRQ);
        }
    }

    /// Writes an entry to the ring of an SRQ without a doorbell.
    pub fn write_srq_entry(&mut self, srqn: u32, bytes: &[u8]) {
        self.srq_rings.get_mut(&srqn).unwrap().write(&self.memory, bytes);
    }

    /// Returns how many receives of an SRQ the device has taken by its own count.
    pub fn srq_consumer(&self, srqn: u32) -> u32 {
        self.srq_rings[&srqn].consumer(&self.memory)
    }

    /// Posts an entry to a ring of a QP, and rings the doorbell if the device asks for it.
    pub fn post_entry(&mut self, qpn: u32, queue: u32, bytes: &[u8]) {
        self.write_entry(qpn, queue, bytes);
        self.ring_if_asleep(qpn, queue);
    }

    /// Writes an entry to a ring of a QP without a doorbell.
    pub fn write_entry(&mut self, qpn: u32, queue: u32, bytes: &[u8]) {
        self.qp_rings.get_mut(&qpn).unwrap().write(&self.memory, queue, bytes);
    }

    /// Rings the doorbell if the device does not poll the ring.
    pub fn ring_if_asleep(&mut self, qpn: u32, queue: u32) {
        if self.qp_rings[&qpn].must_ring(&self.memory, queue) {
            self.ring_doorbell(qpn, queue);
        }
    }

    /// Rings a doorbell. A driver whose doorbell queue is full waits for room.
    pub fn ring_doorbell(&mut self, number: u32, queue: u32) {
        let bells = 1 + VECTORS;
        while self.used(bells).is_some() {}
        let virtqueue = &self.virtqueues[&bells];
        if virtqueue.outstanding() == RING {
            let memory = &self.memory;
            self.transport.wait(bells, &|| virtqueue.used_index(memory) != virtqueue.seen);
            while self.used(bells).is_some() {}
        }
        self.post(bells, &wqe::doorbell(number, queue));
    }

    /// Posts bytes to a work queue in a new buffer.
    pub fn post(&mut self, virtqueue: u16, bytes: &[u8]) {
        let at = self.place(bytes);
        self.add(virtqueue, &[(at, bytes.len() as u32, false)]);
    }

    /// Posts a send.
    pub fn post_send(&mut self, qpn: u32, send: &Send) {
        if self.rings {
            return self.post_entry(qpn, VIRTIO_RDMA_DOORBELL_SQ, &send.entry());
        }
        self.post(self.send_queue(qpn), &send.bytes());
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, qpn: u32, wr_id: u64, sges: &[virtio_rdma_sge]) {
        let bytes = wqe::receive(wr_id, sges);
        if self.rings {
            return self.post_entry(qpn, VIRTIO_RDMA_DOORBELL_RQ, &bytes);
        }
        self.post(self.receive_queue(qpn), &bytes);
    }

    /// Gives the device a buffer for an asynchronous event.
    pub fn add_event_buffer(&mut self) {
        self.add_event_at(self.event_queue(), EVENT, event_at);
    }

    /// Takes an asynchronous event, and returns its type and its object.
    pub fn poll_event(&mut self) -> Option<(u32, u32)> {
        let (head, length) = self.used(self.event_queue())?;
        assert_eq!(length, EVENT);
        let event: virtio_rdma_event = self.memory.get(event_at(head));
        Some((event.event, event.handle))
    }
}

/// Returns the type of a connection's QP.
fn connection(is_reliable: bool) -> u32 {
    if is_reliable {
        VIRTIO_RDMA_QPT_RC
    } else {
        VIRTIO_RDMA_QPT_UC
    }
}

/// Returns the address of the event of a buffer.
fn event_at(head: u32) -> u64 {
    EVENTS + u64::from(head) * u64::from(EVENT)
}

/// Returns the address of the completion event of a buffer.
fn completion_event_at(vector: u16, head: u32) -> u64 {
    event_at(u32::from(vector + 1) * u32::from(RING) + head)
}

/// Returns the address of the CQE of a buffer.
fn cqe_at(virtqueue: u16, head: u32) -> u64 {
    CQES + (u64::from(virtqueue) * u64::from(RING) + u64::from(head)) * 64
}
