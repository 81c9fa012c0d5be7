// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rings of objects, between the guest and the engine.
//!
//! The engine writes its CQEs into a ring of this process. So only this module writes the guest's
//! completion rings and tells the guest of completions. It takes every CQE for a solicited one, and
//! keeps the CQEs that do not fit, where the engine's CQ would overflow. The engine reads send and
//! receive rings where they are. With `direct` it has the guest's completion rings too, and this
//! module does nothing with CQEs.

use std::collections::{BTreeMap, VecDeque};
use std::mem::offset_of;
use std::sync::atomic::{fence, Ordering};

use abi::{
    virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_create_srq,
    virtio_rdma_cmd_resize_cq, virtio_rdma_cmd_resize_srq, virtio_rdma_cq_ring,
    virtio_rdma_ring_cqe, virtio_rdma_ring_region, VIRTIO_RDMA_CMD_CREATE_RING_CQ,
    VIRTIO_RDMA_CMD_CREATE_RING_QP, VIRTIO_RDMA_CMD_CREATE_SRQ, VIRTIO_RDMA_CMD_DESTROY_CQ,
    VIRTIO_RDMA_CMD_DESTROY_QP, VIRTIO_RDMA_CMD_DESTROY_SRQ, VIRTIO_RDMA_CMD_MODIFY_QP,
    VIRTIO_RDMA_CMD_RESIZE_CQ, VIRTIO_RDMA_CMD_RESIZE_SRQ, VIRTIO_RDMA_QPS_RESET,
    VIRTIO_RDMA_QP_STATE, VIRTIO_RDMA_STATUS_FAULT, VIRTIO_RDMA_STATUS_INVAL,
    VIRTIO_RDMA_STATUS_NO_OBJECT, VIRTIO_RDMA_STATUS_NO_RESOURCE, VIRTIO_RDMA_STATUS_OK,
};
use engine::{Device, Limits};
use memory::{GuestMemory, MemoryError, Pages};
use zerocopy::{FromBytes, IntoBytes};

use crate::rule::{Forgery, Object, Rule};

/// The bytes of this process's memory for one CQ: the ring, and its page table in the last page.
pub const SLOT: u64 = 0x20000;
/// The offset of the page table in a slot.
const TABLE: u64 = SLOT - PAGE;
/// The entries of the engine's ring. One turn of the engine cannot fill as many.
const DEPTH: u32 = 1024;
const PAGE: u64 = 4096;
const HEAD: usize = size_of::<virtio_rdma_cq_ring>();
const CQE: usize = size_of::<virtio_rdma_ring_cqe>();
const LAP: usize = offset_of!(virtio_rdma_ring_cqe, lap);
const OPCODE: usize = offset_of!(virtio_rdma_ring_cqe, opcode);
const QP_NUM: usize = offset_of!(virtio_rdma_ring_cqe, qp_num);
const CONSUMER: usize = offset_of!(virtio_rdma_cq_ring, consumer);
const ARM: [usize; 2] =
    [offset_of!(virtio_rdma_cq_ring, arm_next), offset_of!(virtio_rdma_cq_ring, arm_solicited)];
/// The most CQEs of one CQ that are forged in a turn.
const FORGERIES: u32 = 1024;

/// A CQE on its way to the guest.
#[derive(Clone)]
struct Cqe {
    bytes: [u8; CQE],
    /// Whether `bytes` has the `lap` that the guest is to get; otherwise it gets the right one.
    has_lap: bool,
    /// The distance by which the index jumps behind this CQE.
    jump: u32,
}

impl Cqe {
    fn forged(forgery: &Forgery) -> Self {
        let mut bytes = [0; CQE];
        let len = forgery.bytes.len().min(CQE);
        bytes[..len].copy_from_slice(&forgery.bytes[..len]);
        Self { bytes, has_lap: len > LAP, jump: 0 }
    }
}

/// The guest's ring of a CQ.
struct Ring {
    /// The addresses of its pages.
    addresses: Vec<u64>,
    /// The pages; `None` while they are not in memory.
    pages: Option<Pages>,
    depth: u32,
    /// The index of the next CQE.
    produced: u32,
}

impl Ring {
    /// Makes the ring that a request describes.
    fn new(
        memory: &GuestMemory,
        region: &virtio_rdma_ring_region,
        depth: u32,
    ) -> Result<Self, MemoryError> {
        let len = HEAD as u64 + u64::from(depth) * CQE as u64;
        let at = |page: u64| memory.read_obj(region.pages.wrapping_add(page * 8));
        let addresses: Vec<u64> = (0..len.div_ceil(PAGE)).map(at).collect::<Result<_, _>>()?;
        let pages = Some(resolve(memory, &addresses)?);
        Ok(Self { addresses, pages, depth, produced: 0 })
    }

    fn load(&self, at: usize) -> Option<u32> {
        self.pages.as_ref()?.load_u32(at, Ordering::Acquire).ok()
    }

    fn place(&self, index: u32) -> usize {
        HEAD + (index % self.depth) as usize * CQE
    }

    /// Returns how many CQEs the guest has not taken yet, by its consumer index.
    fn held(&self) -> Option<u32> {
        Some(self.produced.wrapping_sub(self.load(CONSUMER)?))
    }

    fn has_room(&self) -> bool {
        self.held().is_some_and(|held| held < self.depth)
    }

    /// Writes a CQE to the next place.
    fn put(&mut self, cqe: &Cqe) -> Option<()> {
        let mut bytes = cqe.bytes;
        if !cqe.has_lap {
            let lap = (self.produced / self.depth).wrapping_add(1);
            bytes[LAP..LAP + 4].copy_from_slice(&lap.to_le_bytes());
        }
        let words: [u64; CQE / 8] =
            std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|j| bytes[i * 8 + j])));
        self.pages.as_ref()?.publish(self.place(self.produced), &words).ok()?;
        self.produced = self.produced.wrapping_add(1).wrapping_add(cqe.jump);
        Some(())
    }
}

fn resolve(memory: &GuestMemory, addresses: &[u64]) -> Result<Pages, MemoryError> {
    Pages::new(memory, addresses.iter().map(|addr| (*addr, PAGE)))
}

/// A CQ, with a ring of the engine and one of the guest.
struct Cq {
    ring: Ring,
    /// The engine's ring, the number of its slot, and how many CQEs were taken from it.
    inner: Pages,
    slot: u16,
    taken: u32,
    /// The CQEs that the guest's ring has no room for yet.
    waiting: VecDeque<Cqe>,
    forgeries: Vec<Forgery>,
    /// The arming words at the last event.
    armed: [u32; 2],
    vector: u16,
    /// Whether an event is due that had no buffer yet.
    due: bool,
}

impl Cq {
    /// Takes the next CQE of the engine.
    fn next(&mut self) -> Option<[u8; CQE]> {
        let at = HEAD + (self.taken % DEPTH) as usize * CQE;
        let lap = self.inner.load_u32(at + LAP, Ordering::Acquire).ok()?;
        if lap != self.taken / DEPTH + 1 {
            return None;
        }
        let mut bytes = [0; CQE];
        self.inner.read(at, &mut bytes).ok()?;
        self.taken = self.taken.wrapping_add(1);
        self.inner.store_u32(CONSUMER, self.taken, Ordering::Release).ok()?;
        Some(bytes)
    }

    /// Does to a CQE what a rule says, and queues the result.
    fn spoil(&mut self, rule: &Rule, mut bytes: [u8; CQE]) {
        let mut has_lap = false;
        for (offset, with) in &rule.write {
            let skip = usize::try_from(*offset).unwrap_or(CQE);
            for (place, byte) in bytes.iter_mut().skip(skip).zip(with) {
                *place = *byte;
            }
            has_lap |= skip + with.len() > LAP;
        }
        let cqe = Cqe { bytes, has_lap, jump: rule.jump.into() };
        let copies = if rule.keep { 0 } else { 1 + usize::from(rule.twice) };
        self.waiting.extend(std::iter::repeat_n(cqe, copies));
        self.forgeries.extend(rule.then.iter().cloned().map(|mut forgery| {
            if forgery.bytes.is_empty() {
                forgery.bytes = bytes[..LAP].to_vec();
            }
            forgery
        }));
    }

    /// Writes CQEs into the guest's ring as long as there is room. Returns whether there were any.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        let mut forged = 0;
        while self.ring.has_room() {
            let cqe = match (self.waiting.pop_front(), self.forgeries.first_mut()) {
                (Some(cqe), _) => cqe,
                (None, Some(forgery)) if forgery.times == 0 => {
                    self.forgeries.remove(0);
                    continue;
                }
                (None, Some(forgery)) if forged < FORGERIES => {
                    (forged, forgery.times) = (forged + 1, forgery.times - 1);
                    Cqe::forged(forgery)
                }
                _ => break,
            };
            any |= self.ring.put(&cqe).is_some();
        }
        any
    }

    /// Returns whether the guest asked for an event for what was delivered. A CQE does not show whether
    /// it is solicited, so each is taken for a solicited one.
    fn wants_event(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let words = ARM.map(|at| self.ring.load(at));
        let [Some(next), Some(solicited)] = words else { return false };
        std::mem::replace(&mut self.armed, [next, solicited]) != [next, solicited]
    }
}

/// The rings of a guest.
pub struct Rings {
    limits: Limits,
    /// Whether the engine has the guest's own completion rings.
    direct: bool,
    /// The address at which the engine sees the memory of this process.
    base: u64,
    slots: Vec<u16>,
    cqs: BTreeMap<u32, Cq>,
    /// The addresses of the heads of QPs.
    qps: BTreeMap<u32, u64>,
    /// The addresses of the heads of SRQs.
    srqs: BTreeMap<u32, u64>,
}

impl Rings {
    /// Makes a collection without rings. `base` is the address of a [`SLOT`] for each CQ that there can
    /// be.
    pub fn new(limits: Limits, direct: bool, base: u64) -> Self {
        let slots = (0..limits.ring_cq).collect();
        let (qps, srqs) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, direct, base, slots, cqs: BTreeMap::new(), qps, srqs }
    }

    /// Forgets all rings.
    pub fn clear(&mut self) {
        *self = Self::new(self.limits.clone(), self.direct, self.base);
    }

    /// Takes a new memory map.
    pub fn set_memory(&mut self, memory: &GuestMemory) {
        for cq in self.cqs.values_mut() {
            cq.ring.pages = resolve(memory, &cq.ring.addresses).ok();
        }
    }

    /// Makes the engine do a request. Returns how many bytes the reply has.
    pub fn command(
        &mut self,
        engine: &Device,
        memory: &GuestMemory,
        request: &[u8],
        reply: &mut [u8],
    ) -> usize {
        let command = request.first().copied().map(u32::from);
        let result = match command.filter(|_| !self.direct) {
            Some(VIRTIO_RDMA_CMD_CREATE_RING_CQ) => self.create_cq(engine, memory, request, reply),
            Some(VIRTIO_RDMA_CMD_RESIZE_CQ) => self.resize_cq(memory, request, reply),
            _ => None,
        };
        result.unwrap_or_else(|| {
            let written = engine.command(request, reply);
            if reply.first().copied().map(u32::from) == Some(VIRTIO_RDMA_STATUS_OK) {
                self.done(memory, request, &reply[1..written]);
            }
            written
        })
    }

    /// Does CREATE_RING_CQ with a ring of this process. Returns `None` if the request is too short.
    fn create_cq(
        &mut self,
        engine: &Device,
        memory: &GuestMemory,
        request: &[u8],
        reply: &mut [u8],
    ) -> Option<usize> {
        let mut create: virtio_rdma_cmd_create_ring_cq = read(request.get(1..)?)?;
        let ring = match self.ring(memory, &create.region, create.cqe) {
            Ok(ring) => ring,
            Err(status) => return refuse(reply, status),
        };
        let Some(slot) = self.slots.pop() else {
            return refuse(reply, VIRTIO_RDMA_STATUS_NO_RESOURCE);
        };
        let at = self.base + u64::from(slot) * SLOT;
        let pages: Vec<u64> = (0..TABLE / PAGE).map(|page| at + page * PAGE).collect();
        let table: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        memory.write(at, &vec![0; usize::try_from(TABLE).ok()?]).ok()?;
        memory.write(at + TABLE, &table).ok()?;
        let inner = resolve(memory, &pages).ok()?;
        let npages = u32::try_from(pages.len()).ok()?;
        create.region = virtio_rdma_ring_region { pages: at + TABLE, npages, reserved_0c: 0 };
        create.cqe = DEPTH;
        let written = engine.command(&[&request[..1], create.as_bytes()].concat(), reply);
        let cqn = reply.get(1..written).and_then(read);
        let Some(cqn) = cqn.filter(|_| u32::from(reply[0]) == VIRTIO_RDMA_STATUS_OK) else {
            self.slots.push(slot);
            return Some(written);
        };
        let cq = Cq {
            ring,
            inner,
            slot,
            taken: 0,
            waiting: VecDeque::new(),
            forgeries: Vec::new(),
            armed: [0; 2],
            vector: u16::try_from(create.comp_vector).unwrap_or(0),
            due: false,
        };
        self.cqs.insert(cqn, cq);
        Some(written)
    }

    fn ring(
        &self,
        memory: &GuestMemory,
        region: &virtio_rdma_ring_region,
        depth: u32,
    ) -> Result<Ring, u32> {
        if !depth.is_power_of_two() || depth > self.limits.ring_cqe {
            return Err(VIRTIO_RDMA_STATUS_INVAL);
        }
        Ring::new(memory, region, depth).map_err(|_| VIRTIO_RDMA_STATUS_FAULT)
    }

    /// Does RESIZE_CQ, which the engine does not learn of.
    fn resize_cq(
        &mut self,
        memory: &GuestMemory,
        request: &[u8],
        reply: &mut [u8],
    ) -> Option<usize> {
        let resize: virtio_rdma_cmd_resize_cq = read(request.get(1..)?)?;
        let mut ring = match self.ring(memory, &resize.region, resize.cqe) {
            Ok(ring) => ring,
            Err(status) => return refuse(reply, status),
        };
        let Some(cq) = self.cqs.get_mut(&resize.cqn) else {
            return refuse(reply, VIRTIO_RDMA_STATUS_NO_OBJECT);
        };
        let old = &cq.ring;
        let held = old.held().filter(|held| *held <= old.depth.min(ring.depth));
        let Some(held) = held else { return refuse(reply, VIRTIO_RDMA_STATUS_INVAL) };
        let first = old.produced.wrapping_sub(held);
        for index in 0..held {
            let mut bytes = [0; CQE];
            old.pages.as_ref()?.read(old.place(first.wrapping_add(index)), &mut bytes).ok()?;
            ring.put(&Cqe { bytes, has_lap: false, jump: 0 })?;
        }
        for at in ARM {
            ring.pages.as_ref()?.store_u32(at, old.load(at)?, Ordering::Relaxed).ok()?;
        }
        cq.ring = ring;
        let moved = [&[0], held.to_le_bytes().as_slice()].concat();
        reply.get_mut(..moved.len())?.copy_from_slice(&moved);
        Some(moved.len())
    }

    /// Notes what a request that succeeded has changed.
    fn done(&mut self, memory: &GuestMemory, request: &[u8], reply: &[u8]) {
        let body = &request[1..];
        match u32::from(request[0]) {
            VIRTIO_RDMA_CMD_DESTROY_CQ => {
                let cq = read(body).and_then(|cqn: u32| self.cqs.remove(&cqn));
                self.slots.extend(cq.map(|cq| cq.slot));
            }
            VIRTIO_RDMA_CMD_CREATE_RING_QP => {
                let create: Option<virtio_rdma_cmd_create_ring_qp> = read(body);
                let page = create.and_then(|create| first_page(memory, &create.region));
                self.qps.extend(read(reply).zip(page));
            }
            VIRTIO_RDMA_CMD_CREATE_SRQ => {
                let create: Option<virtio_rdma_cmd_create_srq> = read(body);
                let page = create.and_then(|create| first_page(memory, &create.region));
                self.srqs.extend(read(reply).zip(page));
            }
            VIRTIO_RDMA_CMD_RESIZE_SRQ => {
                let Some(resize) = read::<virtio_rdma_cmd_resize_srq>(body) else { return };
                let page = first_page(memory, &resize.region);
                self.srqs.extend(Some(resize.srqn).zip(page));
            }
            VIRTIO_RDMA_CMD_DESTROY_SRQ => {
                let srqn: Option<u32> = read(body);
                srqn.and_then(|srqn| self.srqs.remove(&srqn));
            }
            VIRTIO_RDMA_CMD_DESTROY_QP => {
                let Some(qpn) = read(body) else { return };
                self.qps.remove(&qpn);
                self.forget(qpn);
            }
            VIRTIO_RDMA_CMD_MODIFY_QP => {
                let Some(modify) = read::<abi::virtio_rdma_cmd_modify_qp>(body) else { return };
                let has_state = modify.attr_mask & VIRTIO_RDMA_QP_STATE != 0;
                if has_state && u32::from(modify.attr.qp_state) == VIRTIO_RDMA_QPS_RESET {
                    self.forget(modify.qpn);
                }
            }
            _ => {}
        }
    }

    /// Drops the CQEs of a QP that is destroyed or reset.
    fn forget(&mut self, qpn: u32) {
        for cq in self.cqs.values_mut() {
            cq.waiting.retain(|cqe| cqe.bytes[QP_NUM..QP_NUM + 4] != qpn.to_le_bytes());
        }
    }

    /// Takes the CQEs that the engine has placed, and passes them on as the rules say.
    ///
    /// The engine places the CQE of a receive before that of its send, so rules are applied to receives
    /// first.
    pub fn pass(&mut self, mut rule: impl FnMut(u32) -> Option<Rule>) {
        let mut placed = Vec::new();
        for (cqn, cq) in &mut self.cqs {
            placed.extend(std::iter::from_fn(|| cq.next()).map(|bytes| (*cqn, bytes, None)));
        }
        for receives in [true, false] {
            let of_kind = |bytes: &[u8; CQE]| (bytes[OPCODE] & 0x80 != 0) == receives;
            for (cqn, _, found) in placed.iter_mut().filter(|(_, bytes, _)| of_kind(bytes)) {
                *found = rule(*cqn);
            }
        }
        for (cqn, bytes, rule) in placed {
            let Some(cq) = self.cqs.get_mut(&cqn) else { continue };
            match rule {
                Some(rule) => cq.spoil(&rule, bytes),
                None => cq.waiting.push_back(Cqe { bytes, has_lap: false, jump: 0 }),
            }
        }
        for cq in self.cqs.values_mut() {
            if cq.deliver() {
                cq.due |= cq.wants_event();
            }
        }
    }

    /// Returns the CQs of this vector for which an event is due.
    pub fn due(&mut self, vector: u16) -> impl Iterator<Item = (u32, &mut bool)> {
        let cqs = self.cqs.iter_mut().filter(move |(_, cq)| cq.vector == vector && cq.due);
        cqs.map(|(cqn, cq)| (*cqn, &mut cq.due))
    }

    /// Returns whether a CQ has CQEs that its ring has no room for.
    pub fn is_waiting(&self) -> bool {
        let mut cqs = self.cqs.values();
        cqs.any(|cq| !cq.waiting.is_empty() || cq.forgeries.iter().any(|forgery| forgery.times > 0))
    }

    /// Forges CQEs in each CQ.
    pub fn forge(&mut self, forgery: &Forgery) {
        self.cqs.values_mut().for_each(|cq| cq.forgeries.push(forgery.clone()));
    }

    /// Ends all forgeries.
    pub fn end_forgeries(&mut self) {
        self.cqs.values_mut().for_each(|cq| cq.forgeries.clear());
    }

    /// Writes into the head of each object of a kind.
    pub fn poke(&self, memory: &GuestMemory, object: Object, offset: u64, bytes: &[u8]) {
        let cq_heads = self.cqs.values().filter_map(|cq| cq.ring.addresses.first());
        let heads: Vec<u64> = match object {
            Object::Cq => cq_heads.copied().collect(),
            Object::Qp => self.qps.values().copied().collect(),
            Object::Srq => self.srqs.values().copied().collect(),
        };
        for head in heads {
            if let Err(error) = memory.write(head.wrapping_add(offset % PAGE), bytes) {
                tracing::warn!(%error, "writing into a head");
            }
        }
    }
}

/// Returns the address of the head of a region. The region of an XRC target QP has none.
fn first_page(memory: &GuestMemory, region: &virtio_rdma_ring_region) -> Option<u64> {
    if region.npages == 0 {
        return None;
    }
    memory.read_obj(region.pages).ok()
}

/// Writes the reply to a request that is refused, and returns its length.
fn refuse(reply: &mut [u8], status: u32) -> Option<usize> {
    *reply.first_mut()? = u8::try_from(status).ok()?;
    Some(1)
}

/// Returns the structure at the beginning of these bytes.
fn read<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest may change a page table after the engine has read it, so that the page that is noted is any one.
    #[test]
    fn a_head_may_be_said_to_be_anywhere() {
        let memory = GuestMemory::anonymous(&[(0, PAGE)]).unwrap();
        let mut rings = Rings::new(Limits::default(), true, 0);
        rings.qps.extend([(1, u64::MAX - 8), (2, 0)]);
        rings.poke(&memory, Object::Qp, 64, &[1]);
        assert_eq!(memory.read_obj::<u8>(64), Ok(1));
    }
}
