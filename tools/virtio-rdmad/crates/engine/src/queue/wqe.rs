// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work requests, copied out of guest memory and checked.

use std::mem::size_of;

use abi::{
    virtio_rdma_ring_reg_wqe, virtio_rdma_ring_sq_wqe, virtio_rdma_ring_ud_wqe,
    virtio_rdma_ring_xrc_wqe, virtio_rdma_rq_wqe, virtio_rdma_sge, virtio_rdma_sq_wqe, WrAtomic,
    WrRdma, WrReg, WrUd, VIRTIO_RDMA_SEND_FENCE, VIRTIO_RDMA_SEND_INLINE,
    VIRTIO_RDMA_SEND_SIGNALED, VIRTIO_RDMA_SEND_SOLICITED, VIRTIO_RDMA_WC_RECV,
    VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
    VIRTIO_RDMA_WR_ATOMIC_WRITE, VIRTIO_RDMA_WR_BIND_MW, VIRTIO_RDMA_WR_FLUSH,
    VIRTIO_RDMA_WR_LOCAL_INV, VIRTIO_RDMA_WR_RDMA_READ, VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
    VIRTIO_RDMA_WR_REG_MR, VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_SEND_WITH_IMM,
    VIRTIO_RDMA_WR_SEND_WITH_INV,
};
use ring::Chain;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::entry::Entry;
use super::opcode::Opcode;
use super::request::{Operation, Request};
use crate::base::image::{abi_bytes, require, Wrong};
use crate::base::limits::{MAX_INLINE, MAX_MSG_SIZE, MAX_SGE};
use crate::base::qp_type::QpType;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::Atomic;
use crate::memory::fast_reg::Registration;
use crate::memory::flush::Flush;
use crate::memory::mw::Bind;

const SGES: usize = MAX_SGE * size_of::<virtio_rdma_sge>();
const SEND_HEADER: usize = size_of::<virtio_rdma_sq_wqe>();
const RECEIVE_HEADER: usize = size_of::<virtio_rdma_rq_wqe>();
const RING_HEADER: usize = size_of::<virtio_rdma_ring_sq_wqe>();
const RING_XRC_HEADER: usize = size_of::<virtio_rdma_ring_xrc_wqe>();
const RING_UD_HEADER: usize = size_of::<virtio_rdma_ring_ud_wqe>();

/// The reason why SGEs are refused.
const NO_SGES: &str = "SGEs that cannot be read";
/// The reason why an opcode is refused.
const FOREIGN_OPCODE: &str = "a send opcode that the QP does not do";

/// Send flags that mean something here.
const KNOWN_FLAGS: u32 =
    VIRTIO_RDMA_SEND_FENCE | VIRTIO_RDMA_SEND_SIGNALED | VIRTIO_RDMA_SEND_SOLICITED;

/// Returns the bytes of the header of an entry of a send ring; a datagram's is the longest.
fn ring_header_len(kind: QpType) -> usize {
    match kind {
        QpType::Rc | QpType::Uc => RING_HEADER,
        QpType::XrcIni | QpType::XrcTgt => RING_XRC_HEADER,
        QpType::Ud | QpType::Gsi => RING_UD_HEADER,
    }
}

/// Returns the bytes of an entry of a send ring with this many SGEs, or bytes of inline data.
pub(crate) fn send_entry_len(kind: QpType, max_sge: usize, max_inline: usize) -> usize {
    ring_header_len(kind) + max_inline.max(max_sge * size_of::<virtio_rdma_sge>())
}

/// Returns the bytes of an entry of a receive ring with this many SGEs.
pub(crate) const fn receive_entry_len(max_sge: usize) -> usize {
    RECEIVE_HEADER + max_sge * size_of::<virtio_rdma_sge>()
}

/// The configuration of the queues of a QP.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct WqConfig {
    /// Transport service.
    pub kind: QpType,
    /// SGEs of a send work request.
    pub max_send_sge: usize,
    /// SGEs of a receive work request.
    pub max_recv_sge: usize,
    /// Bytes of inline data.
    pub max_inline: usize,
}

/// SGEs of a work request.
#[derive(Clone)]
pub(crate) struct SgeList {
    sges: [virtio_rdma_sge; MAX_SGE],
    count: usize,
}

impl Serialize for SgeList {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self.as_slice().as_bytes())
    }
}

impl<'de> Deserialize<'de> for SgeList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        let count = bytes.len() / size_of::<virtio_rdma_sge>();
        if bytes.len() % size_of::<virtio_rdma_sge>() != 0 || count > MAX_SGE {
            return Err(serde::de::Error::invalid_length(bytes.len(), &"the bytes of SGEs"));
        }
        let mut list = Self { count, ..Self::EMPTY };
        list.sges[..count].as_mut_bytes().copy_from_slice(bytes);
        Ok(list)
    }
}

impl SgeList {
    const EMPTY: Self =
        Self { sges: [virtio_rdma_sge { addr: 0, length: 0, lkey: 0 }; MAX_SGE], count: 0 };

    /// Returns the SGEs.
    pub fn as_slice(&self) -> &[virtio_rdma_sge] {
        self.sges.get(..self.count).unwrap_or_default()
    }

    /// Takes `count` SGEs, which `read` copies; `false` if it fails. The other SGEs do not change.
    #[inline]
    fn take(&mut self, count: usize, read: impl FnOnce(&mut [u8]) -> bool) -> bool {
        self.count = count;
        // Most lists have one SGE, whose length is known here, so that it is copied without a call.
        match (count, &mut self.sges) {
            (1, [sge, ..]) => read(sge.as_mut_bytes()),
            (count, sges) => read(sges.get_mut(..count).unwrap_or_default().as_mut_bytes()),
        }
    }

    /// Returns how many bytes they name in all.
    pub fn total(&self) -> u64 {
        self.as_slice().iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// A send work request.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct SendWqe {
    /// Index in its ring; 0 from a virtqueue.
    pub index: u32,
    /// Comes back in the CQE.
    pub wr_id: u64,
    /// `enum virtio_rdma_wc_opcode` of its CQE.
    pub wc_opcode: u8,
    /// The request.
    pub request: Request,
    /// Whether its success makes a CQE in a queue that does not signal all.
    pub signaled: bool,
    /// Whether it waits for the READs and atomics in front of it. On the local path that always holds:
    /// work requests of a queue are done one after the other.
    pub is_fenced: bool,
    /// The local side, unless the data is inline.
    pub sges: SgeList,
    /// Whether the data is inline.
    pub is_inline: bool,
    /// Inline data.
    pub inline: Vec<u8>,
    /// The destination of a datagram.
    #[serde(with = "abi_bytes")]
    pub ud: WrUd,
}

/// A malformed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// The fields of its CQE; all are 0 if the work request is too short to have a header.
    pub ended: Ended,
    /// Status of its CQE.
    pub status: WcStatus,
    /// The reason, for the log.
    pub why: &'static str,
}

impl Malformed {
    /// Returns a malformed work request without a reason.
    #[inline(always)]
    fn new(ended: Ended) -> Self {
        Self { ended, status: WcStatus::LocalQpOperation, why: "" }
    }

    /// Returns the malformed work request with its reason.
    #[inline]
    fn because(self, why: &'static str) -> Self {
        Self { why, ..self }
    }

    /// Returns the malformed work request with its reason, which concerns its length.
    fn because_of_length(self, why: &'static str) -> Self {
        Self { why, status: WcStatus::LocalLength, ..self }
    }
}

/// The result of taking a work request from a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Popped {
    /// No work request is there.
    Empty,
    /// A work request was taken.
    Taken,
    /// A malformed work request was taken.
    Malformed(Malformed),
}

impl From<Result<(), Malformed>> for Popped {
    #[inline]
    fn from(read: Result<(), Malformed>) -> Self {
        match read {
            Ok(()) => Self::Taken,
            Err(malformed) => Self::Malformed(malformed),
        }
    }
}

impl SendWqe {
    /// Checks a work request that was saved, and is under way: that it has as much data as it says.
    pub fn check(&self) -> Result<(), Wrong> {
        let Request { operation, total, immediate, invalidate, .. } = self.request;
        let tells = matches!(operation, Operation::Send | Operation::Write);
        require(immediate.is_none() || tells, "a work request may have no immediate data")?;
        let ends = matches!(operation, Operation::Send | Operation::Read | Operation::LocalInv);
        let names_one = invalidate.is_none() || ends && immediate.is_none();
        require(names_one, "a work request may name no key to invalidate")?;
        let data = if self.is_inline { self.inline.len() as u64 } else { self.sges.total() };
        require(self.inline.len() <= MAX_INLINE.into(), "a work request has too much inline data")?;
        require(total <= MAX_MSG_SIZE.into(), "a work request is too long")?;
        require(total == data, "a work request has another length than its data")?;
        require(total == 0 || !operation.has_no_data(), "a work request may have no data")?;
        require(total == 8 || !operation.is_of_a_word(), "an atomic is of other than 8 bytes")
    }

    /// Returns the part of a work request under way that an image has. Of a READ that waits at its end for the
    /// invalidation of a key, only the invalidation is left, and the completion reports no bytes.
    pub fn to_save(&self) -> Self {
        let mut left = self.clone();
        if left.request.operation == Operation::LocalInv {
            (left.request.total, left.sges) = (0, SgeList::EMPTY);
        }
        left
    }

    /// Returns the fields of its CQE, besides the status.
    #[inline(always)]
    pub fn ended(&self) -> Ended {
        Ended { wr_id: self.wr_id, wc_opcode: self.wc_opcode, index: self.index }
    }

    /// Returns a work request that asks for nothing.
    pub fn empty() -> Self {
        Self {
            index: 0,
            wr_id: 0,
            wc_opcode: 0,
            request: Request::EMPTY,
            signaled: false,
            is_fenced: false,
            sges: SgeList::EMPTY,
            is_inline: false,
            inline: Vec::new(),
            ud: WrUd::new_zeroed(),
        }
    }

    /// Copies a work request out of its chain, once, in the place of the one before, and makes the checks that need
    /// nothing but the QP.
    pub fn read(&mut self, chain: &Chain, config: &WqConfig) -> Result<(), Malformed> {
        let mut bytes = [0; SEND_HEADER + SGES];
        let no_header = Malformed::new(Ended::default());
        let unreadable = |_| no_header.because("a send work request that cannot be read");
        let count = chain.read(&mut bytes).map_err(unreadable)?;
        self.read_bytes(&bytes[..count], config)
    }

    /// Takes a work request from the bytes of a chain, as [`Self::read`].
    fn read_bytes(&mut self, bytes: &[u8], config: &WqConfig) -> Result<(), Malformed> {
        let Ok((header, sges)) = virtio_rdma_sq_wqe::read_from_prefix(bytes) else {
            let no_header = Malformed::new(Ended::default());
            return Err(no_header.because("a send work request is shorter than its header"));
        };
        if Opcode::find(header.opcode).is_of_rings {
            return Err(
                Malformed::new(Ended::send(0, header.wr_id, header.opcode)).because(FOREIGN_OPCODE)
            );
        }
        self.parse(0, &entry_of(&header, config.kind), |to| copy(sges, to), config)
    }

    /// Copies a work request out of its ring, once, in the place of the one before, and makes the checks that need
    /// nothing but the QP.
    #[inline]
    pub fn read_entry(
        &mut self,
        index: u32,
        entry: Entry<'_>,
        config: &WqConfig,
    ) -> Result<(), Malformed> {
        let mut header = [0; RING_UD_HEADER];
        let len = ring_header_len(config.kind);
        // The entry has room for it, checked at creation. The length of the most frequent header is known here, so that
        // it is copied without a call.
        let read = match len {
            RING_HEADER => entry.read(0, &mut header[..RING_HEADER]),
            len => entry.read(0, &mut header[..len]),
        };
        if read.is_err() {
            let why = "a send work request that cannot be read";
            return Err(Malformed::new(Ended::of_entry(index, &header)).because(why));
        }
        self.parse(index, &header, |to| entry.read(len, to).is_ok(), config)
    }

    /// Takes a work request from its header, and its SGEs or inline data, which `read` copies.
    #[inline(always)]
    fn parse(
        &mut self,
        index: u32,
        header: &[u8; RING_UD_HEADER],
        read: impl FnOnce(&mut [u8]) -> bool,
        config: &WqConfig,
    ) -> Result<(), Malformed> {
        let common: virtio_rdma_ring_sq_wqe = prefix(header);
        let opcode = Opcode::find(common.opcode.into());
        let flags = u32::from(common.send_flags);
        let ended = Ended { wr_id: common.wr_id, wc_opcode: opcode.wc, index };
        let malformed = Malformed::new(ended);
        (self.index, self.wr_id, self.wc_opcode) = (index, ended.wr_id, ended.wc_opcode);
        if !opcode.is_done_by(config.kind) {
            return Err(malformed.because(FOREIGN_OPCODE));
        }
        if flags & !(KNOWN_FLAGS | VIRTIO_RDMA_SEND_INLINE) != 0 {
            return Err(malformed.because("an unknown send flag"));
        }
        self.is_inline = flags & VIRTIO_RDMA_SEND_INLINE != 0;
        self.signaled = flags & VIRTIO_RDMA_SEND_SIGNALED != 0;
        self.is_fenced = flags & VIRTIO_RDMA_SEND_FENCE != 0;
        self.request.solicited = flags & VIRTIO_RDMA_SEND_SOLICITED != 0;
        self.request.immediate = opcode.has_immediate.then_some(common.ex);
        self.request.invalidate = opcode.invalidates.then_some(common.ex);
        self.take_data(&common, opcode, read, config, malformed)?;
        (self.request.remote_addr, self.request.rkey) = (common.remote_addr, common.rkey);
        self.request.operation = operation(header, &common)
            .ok_or_else(|| malformed.because("a FLUSH of an unknown kind or length"))?;
        let count = common.num_sge;
        if matches!(self.request.operation, Operation::AtomicWrite) && count == 0 {
            // The data to write is in the header.
            self.inline.clear();
            self.inline.extend_from_slice(common.compare_add.as_bytes());
            (self.is_inline, self.request.total) = (true, 8);
        }
        if self.request.operation.has_no_data() && (count != 0 || self.is_inline) {
            return Err(malformed.because("data where there may be none"));
        }
        if self.request.operation.is_of_a_word() && self.request.total != 8 {
            return Err(malformed.because_of_length("an atomic on other than 8 bytes"));
        }
        match config.kind {
            QpType::Rc | QpType::Uc | QpType::XrcTgt => {}
            QpType::XrcIni => {
                self.request.srqn = prefix::<virtio_rdma_ring_xrc_wqe>(header).remote_srqn;
            }
            QpType::Ud | QpType::Gsi => {
                let ud: virtio_rdma_ring_ud_wqe = prefix(header);
                let (remote_qpn, remote_qkey) = (ud.remote_qpn, ud.remote_qkey);
                self.ud = WrUd { remote_qpn, remote_qkey, av: ud.av };
            }
        }
        Ok(())
    }

    /// Takes the SGEs or the inline data.
    #[inline(always)]
    fn take_data(
        &mut self,
        common: &virtio_rdma_ring_sq_wqe,
        opcode: &Opcode,
        read: impl FnOnce(&mut [u8]) -> bool,
        config: &WqConfig,
        malformed: Malformed,
    ) -> Result<(), Malformed> {
        let count = usize::from(common.num_sge);
        if self.is_inline {
            let bytes = usize::from(common.inline_len);
            if count != 0 {
                return Err(malformed.because("inline data and SGEs"));
            }
            if !opcode.may_be_inline || bytes > config.max_inline {
                return Err(malformed.because("inline data where there may be none"));
            }
            self.inline.resize(bytes, 0);
            if !read(&mut self.inline) {
                return Err(malformed.because("inline data that cannot be read"));
            }
            self.request.total = bytes as u64;
            return Ok(());
        }
        if count > config.max_send_sge.min(MAX_SGE) {
            return Err(malformed.because("more SGEs than the QP's limit"));
        }
        if !self.sges.take(count, read) {
            return Err(malformed.because(NO_SGES));
        }
        self.request.total = self.sges.total();
        if self.request.total > MAX_MSG_SIZE.into() {
            return Err(malformed.because_of_length("a message longer than the largest"));
        }
        Ok(())
    }
}

/// Returns the operation of an entry whose opcode the QP does; `None` for a FLUSH of an unknown kind or length.
#[inline(always)]
fn operation(header: &[u8; RING_UD_HEADER], common: &virtio_rdma_ring_sq_wqe) -> Option<Operation> {
    let (compare, swap) = (common.compare_add, common.swap);
    Some(match common.opcode.into() {
        VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP => {
            Operation::Atomic(Atomic::CompareSwap { compare, swap })
        }
        VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => Operation::Atomic(Atomic::FetchAdd(compare)),
        VIRTIO_RDMA_WR_RDMA_READ | VIRTIO_RDMA_WR_RDMA_READ_WITH_INV => Operation::Read,
        VIRTIO_RDMA_WR_SEND | VIRTIO_RDMA_WR_SEND_WITH_IMM | VIRTIO_RDMA_WR_SEND_WITH_INV => {
            Operation::Send
        }
        VIRTIO_RDMA_WR_REG_MR => Operation::RegMr(Registration::from_entry(&prefix(header))),
        VIRTIO_RDMA_WR_LOCAL_INV => Operation::LocalInv,
        VIRTIO_RDMA_WR_BIND_MW => Operation::BindMw(Bind::from_entry(&prefix(header))),
        VIRTIO_RDMA_WR_ATOMIC_WRITE => Operation::AtomicWrite,
        VIRTIO_RDMA_WR_FLUSH => Operation::Flush(Flush::from_entry(&prefix(header))?),
        _ => Operation::Write,
    })
}

/// Returns the header that a work request of a virtqueue has in a ring. A number for which a ring has too few bits
/// becomes the largest one, which is refused there as well.
fn entry_of(wqe: &virtio_rdma_sq_wqe, kind: QpType) -> [u8; RING_UD_HEADER] {
    let is_known = wqe.send_flags & !KNOWN_FLAGS == 0;
    let mut entry = [0; RING_UD_HEADER];
    let common = virtio_rdma_ring_sq_wqe {
        wr_id: wqe.wr_id,
        opcode: u8::try_from(wqe.opcode).unwrap_or(u8::MAX),
        num_sge: u8::try_from(wqe.num_sge).unwrap_or(u8::MAX),
        send_flags: if is_known { wqe.send_flags as u16 } else { u16::MAX },
        ex: wqe.ex,
        ..FromZeros::new_zeroed()
    };
    fill(&mut entry, &common);
    let wr = wqe.wr.as_bytes();
    match wqe.opcode {
        _ if matches!(kind, QpType::Ud | QpType::Gsi) => {
            let WrUd { remote_qpn, remote_qkey, av } = prefix(wr);
            let common = prefix(&entry);
            fill(&mut entry, &virtio_rdma_ring_ud_wqe { remote_qpn, remote_qkey, av, ..common });
        }
        VIRTIO_RDMA_WR_REG_MR => {
            let WrReg { access, npages, page_shift, key, iova, pages, length, .. } = prefix(wr);
            let npages = u16::try_from(npages).unwrap_or(u16::MAX);
            let common: virtio_rdma_ring_reg_wqe = prefix(&entry);
            let reg = virtio_rdma_ring_reg_wqe {
                access,
                npages,
                page_shift,
                key,
                iova,
                pages,
                length,
                ..common
            };
            fill(&mut entry, &reg);
        }
        VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP | VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => {
            let WrAtomic { remote_addr, compare_add, swap, rkey, .. } = prefix(wr);
            let atomic = virtio_rdma_ring_sq_wqe { remote_addr, rkey, compare_add, swap, ..common };
            fill(&mut entry, &atomic);
        }
        _ => {
            let WrRdma { remote_addr, rkey, .. } = prefix(wr);
            fill(&mut entry, &virtio_rdma_ring_sq_wqe { remote_addr, rkey, ..common });
        }
    }
    entry
}

/// Writes a structure to the beginning of an entry.
fn fill(entry: &mut [u8; RING_UD_HEADER], header: &(impl IntoBytes + Immutable)) {
    let header = header.as_bytes();
    entry[..header.len()].copy_from_slice(header);
}

/// Copies as many bytes as `to` has from the beginning of others; `false` if there are fewer.
fn copy(from: &[u8], to: &mut [u8]) -> bool {
    from.get(..to.len()).map(|from| to.copy_from_slice(from)).is_some()
}

/// Returns a structure at the beginning of `bytes`, which must be as long.
fn prefix<T: FromBytes>(bytes: &[u8]) -> T {
    T::read_from_prefix(bytes).map_or_else(|_| T::new_zeroed(), |(value, _)| value)
}

/// The fields of the CQE of a work request that ends without success, besides the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ended {
    /// `wr_id` of the work request.
    pub wr_id: u64,
    /// `enum virtio_rdma_wc_opcode`.
    pub wc_opcode: u8,
    /// Index in the ring; 0 in a virtqueue.
    pub index: u32,
}

impl Ended {
    #[inline(always)]
    fn send(index: u32, wr_id: u64, opcode: u32) -> Self {
        Self { wr_id, wc_opcode: Opcode::find(opcode).wc, index }
    }

    fn receive(index: u32, wr_id: u64) -> Self {
        Self { wr_id, wc_opcode: VIRTIO_RDMA_WC_RECV as u8, index }
    }

    fn of_entry(index: u32, header: &[u8]) -> Self {
        let header: virtio_rdma_ring_sq_wqe = prefix(header);
        Self::send(index, header.wr_id, header.opcode.into())
    }

    /// Returns the fields of the CQE of a flushed send work request in a chain, whatever else is in the chain.
    pub fn flushed_send(chain: &Chain) -> Self {
        let mut bytes = [0; SEND_HEADER];
        let whole = chain.read(&mut bytes).is_ok_and(|count| count == bytes.len());
        let header = if whole { prefix(&bytes) } else { virtio_rdma_sq_wqe::new_zeroed() };
        Self::send(0, header.wr_id, header.opcode)
    }

    /// Returns the fields of the CQE of a flushed send work request in a ring.
    pub fn flushed_send_entry(index: u32, entry: Entry<'_>) -> Self {
        let mut bytes = [0; RING_HEADER];
        // An entry that cannot be read counts as zeros.
        let _ = entry.read(0, &mut bytes);
        Self::of_entry(index, &bytes)
    }

    /// Returns the fields of the CQE of a flushed receive work request in a chain, whatever else is in the chain.
    pub fn flushed_receive(chain: &Chain) -> Self {
        let mut bytes = [0; RECEIVE_HEADER];
        let whole = chain.read(&mut bytes).is_ok_and(|count| count == bytes.len());
        let wr_id = if whole { prefix::<virtio_rdma_rq_wqe>(&bytes).wr_id } else { 0 };
        Self::receive(0, wr_id)
    }

    /// Returns the fields of the CQE of a flushed receive work request in a ring.
    pub fn flushed_receive_entry(index: u32, entry: Entry<'_>) -> Self {
        let mut bytes = [0; RECEIVE_HEADER];
        // Memory that cannot be read counts as zeros.
        let _ = entry.read(0, &mut bytes);
        Self::receive(index, prefix::<virtio_rdma_rq_wqe>(&bytes).wr_id)
    }
}

/// A receive work request.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct ReceiveWqe {
    /// Index in its ring; 0 from a virtqueue.
    pub index: u32,
    /// Comes back in the CQE.
    pub wr_id: u64,
    /// The memory for the message.
    pub sges: SgeList,
}

impl ReceiveWqe {
    /// Returns a work request without SGEs.
    pub fn empty() -> Self {
        Self { index: 0, wr_id: 0, sges: SgeList::EMPTY }
    }

    /// Returns the fields of its CQE, if it fails.
    pub fn ended(&self) -> Ended {
        Ended::receive(self.index, self.wr_id)
    }

    /// Copies a work request out of its chain, once, in place of the one before, and checks its form.
    pub fn read(&mut self, chain: &Chain, max_sge: usize) -> Result<(), Malformed> {
        let mut bytes = [0; RECEIVE_HEADER + SGES];
        let malformed = Malformed::new(Ended::receive(0, 0));
        let unreadable = |_| malformed.because("a receive work request that cannot be read");
        let count = chain.read(&mut bytes).map_err(unreadable)?;
        let Ok((header, sges)) = virtio_rdma_rq_wqe::read_from_prefix(&bytes[..count]) else {
            return Err(malformed.because("a receive work request is shorter than its header"));
        };
        self.parse(0, &header, |to| copy(sges, to), max_sge)
    }

    /// Copies a work request out of its ring, in place of the one before, and checks its form.
    #[inline]
    pub fn read_entry(
        &mut self,
        index: u32,
        entry: Entry<'_>,
        max_sge: usize,
    ) -> Result<(), Malformed> {
        let mut header = virtio_rdma_rq_wqe::new_zeroed();
        if entry.read(0, header.as_mut_bytes()).is_err() {
            let malformed = Malformed::new(Ended::receive(index, header.wr_id));
            return Err(malformed.because("a receive work request that cannot be read"));
        }
        self.parse(index, &header, |to| entry.read(RECEIVE_HEADER, to).is_ok(), max_sge)
    }

    /// Takes a work request from its header, and its SGEs, which `read` copies.
    #[inline(always)]
    fn parse(
        &mut self,
        index: u32,
        header: &virtio_rdma_rq_wqe,
        read: impl FnOnce(&mut [u8]) -> bool,
        max_sge: usize,
    ) -> Result<(), Malformed> {
        let malformed = Malformed::new(Ended::receive(index, header.wr_id));
        let count = header.num_sge as usize;
        if count > max_sge.min(MAX_SGE) {
            return Err(malformed.because("more SGEs than the QP's limit"));
        }
        (self.index, self.wr_id) = (index, header.wr_id);
        if !self.sges.take(count, read) {
            return Err(malformed.because(NO_SGES));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use abi::{VIRTIO_RDMA_WC_BIND_MW, VIRTIO_RDMA_WR_RDMA_WRITE};

    use super::*;

    fn bytes(num_sge: u32, opcode: u32, flags: u32, sges: &[virtio_rdma_sge]) -> Vec<u8> {
        let mut header = virtio_rdma_sq_wqe::new_zeroed();
        (header.num_sge, header.opcode, header.send_flags) = (num_sge, opcode, flags);
        header.wr_id = 77;
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(sges.as_bytes());
        bytes
    }

    fn parse(bytes: &[u8], kind: QpType) -> Result<(), Malformed> {
        let config = WqConfig { kind, max_send_sge: 4, max_recv_sge: 4, max_inline: 0 };
        SendWqe::empty().read_bytes(bytes, &config)
    }

    fn status(bytes: &[u8], kind: QpType) -> Option<WcStatus> {
        parse(bytes, kind).err().map(|malformed| malformed.status)
    }

    #[test]
    fn malformed_requests_are_told_apart() {
        let sge = |length| virtio_rdma_sge { addr: 0, length, lkey: 0 };
        let rc = QpType::Rc;
        let operation = Some(WcStatus::LocalQpOperation);
        let length = Some(WcStatus::LocalLength);
        let send = VIRTIO_RDMA_WR_SEND;
        assert_eq!(status(&bytes(1, send, 0, &[sge(1)]), rc), None);
        assert_eq!(status(&bytes(1, send, 0, &[]), rc), operation);
        assert_eq!(status(&bytes(0, send, 0, &[])[1..], rc), operation);
        assert_eq!(status(&bytes(5, send, 0, &[sge(1); 5]), rc), operation);
        assert_eq!(status(&bytes(u32::MAX, send, 0, &[sge(1); 5]), rc), operation);
        assert_eq!(status(&bytes(0, send, 8, &[]), rc), operation);
        assert_eq!(status(&bytes(0, 0x55, 0, &[]), rc), operation);
        assert_eq!(status(&bytes(0, VIRTIO_RDMA_WR_RDMA_READ, 0, &[]), QpType::Uc), operation);
        assert_eq!(status(&bytes(0, VIRTIO_RDMA_WR_RDMA_WRITE, 0, &[]), QpType::Ud), operation);
        assert_eq!(status(&bytes(2, send, 0, &[sge(1 << 31), sge(1)]), rc), length);
        let atomic = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
        assert_eq!(status(&bytes(1, atomic, 0, &[sge(4)]), rc), length);
        assert_eq!(status(&bytes(2, atomic, 0, &[sge(4), sge(4)]), rc), None);
        // Rings have fewer bits for these numbers.
        assert_eq!(status(&bytes(0x101, send, 0, &[sge(1)]), rc), operation);
        assert_eq!(status(&bytes(1, 0x100 | send, 0, &[sge(1)]), rc), operation);
        assert_eq!(status(&bytes(1, send, 0x1_0000, &[sge(1)]), rc), operation);
        let malformed = parse(&bytes(9, send, 0, &[]), rc).err().unwrap();
        assert_eq!(malformed.ended.wr_id, 77);
        let malformed = parse(&bytes(0, VIRTIO_RDMA_WR_BIND_MW, 0, &[]), rc).err().unwrap();
        assert_eq!(u32::from(malformed.ended.wc_opcode), VIRTIO_RDMA_WC_BIND_MW);
    }
}
