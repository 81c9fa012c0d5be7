// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work requests, copied out of guest memory and checked.

use std::mem::size_of;

use abi::{
    virtio_rdma_rq_wqe, virtio_rdma_sge, virtio_rdma_sq_wqe, WrAtomic, WrRdma, WrUd,
    VIRTIO_RDMA_SEND_FENCE, VIRTIO_RDMA_SEND_SIGNALED, VIRTIO_RDMA_SEND_SOLICITED,
    VIRTIO_RDMA_WC_COMP_SWAP, VIRTIO_RDMA_WC_FETCH_ADD, VIRTIO_RDMA_WC_LOC_LEN_ERR,
    VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_RDMA_READ, VIRTIO_RDMA_WC_RDMA_WRITE,
    VIRTIO_RDMA_WC_SEND, VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
    VIRTIO_RDMA_WR_RDMA_READ, VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM,
    VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_SEND_WITH_IMM,
};
use memory::MemoryError;
use ring::Chain;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::config::{MAX_MSG_SIZE, MAX_SGE};
use crate::mr::Atomic;
use crate::state::QpType;

const SGES: usize = MAX_SGE * size_of::<virtio_rdma_sge>();
const SEND_HEADER: usize = size_of::<virtio_rdma_sq_wqe>();
const RECEIVE_HEADER: usize = size_of::<virtio_rdma_rq_wqe>();

/// Send flags that mean something here. FENCE asks for what always holds:
/// work requests of a queue are done one after the other.
const KNOWN_FLAGS: u32 =
    VIRTIO_RDMA_SEND_FENCE | VIRTIO_RDMA_SEND_SIGNALED | VIRTIO_RDMA_SEND_SOLICITED;

/// SGEs of a work request.
#[derive(Clone)]
pub(crate) struct SgeList {
    sges: [virtio_rdma_sge; MAX_SGE],
    count: usize,
}

impl SgeList {
    const EMPTY: Self =
        Self { sges: [virtio_rdma_sge { addr: 0, length: 0, lkey: 0 }; MAX_SGE], count: 0 };

    /// The SGEs.
    pub fn as_slice(&self) -> &[virtio_rdma_sge] {
        self.sges.get(..self.count).unwrap_or_default()
    }

    /// Bytes that they name in all.
    pub fn total(&self) -> u64 {
        self.as_slice().iter().map(|sge| u64::from(sge.length)).sum()
    }

    /// Takes the list from the bytes behind a header.
    fn parse(bytes: &[u8], count: usize) -> Self {
        let mut list = Self { count, ..Self::EMPTY };
        let wanted = list.sges[..count].as_mut_bytes();
        wanted.copy_from_slice(&bytes[..wanted.len()]);
        list
    }
}

/// What a send work request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// A message to a receive, or a datagram.
    Send,
    /// A write, which takes a receive if it has immediate data.
    Write,
    /// A read.
    Read,
    /// An atomic operation.
    Atomic(Atomic),
}

/// A send work request.
#[derive(Clone)]
pub(crate) struct SendWqe {
    /// Comes back in the CQE.
    pub wr_id: u64,
    /// `enum virtio_rdma_wc_opcode` of its CQE.
    pub wc_opcode: u8,
    /// What it asks for.
    pub operation: Operation,
    /// Whether its success makes a CQE in a queue that does not signal all.
    pub signaled: bool,
    /// Whether it asks for a solicited event.
    pub solicited: bool,
    /// Immediate data, in the order of the wire.
    pub immediate: Option<u32>,
    /// The local side.
    pub sges: SgeList,
    /// Bytes of the local side.
    pub total: u64,
    /// The remote side of WRITE, READ and atomics.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
    /// The destination of a datagram.
    pub ud: WrUd,
}

/// A work request that is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// Its `wr_id`, 0 if it is too short to have one.
    pub wr_id: u64,
    /// `enum virtio_rdma_wc_opcode` for its CQE.
    pub wc_opcode: u8,
    /// `enum virtio_rdma_wc_status` for its CQE.
    pub status: u32,
    /// What is wrong, for the log.
    pub why: &'static str,
}

/// `enum virtio_rdma_wc_opcode` for an `enum virtio_rdma_wr_opcode`.
fn wc_opcode(opcode: u32) -> u8 {
    (match opcode {
        VIRTIO_RDMA_WR_RDMA_WRITE | VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM => VIRTIO_RDMA_WC_RDMA_WRITE,
        VIRTIO_RDMA_WR_RDMA_READ => VIRTIO_RDMA_WC_RDMA_READ,
        VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP => VIRTIO_RDMA_WC_COMP_SWAP,
        VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => VIRTIO_RDMA_WC_FETCH_ADD,
        _ => VIRTIO_RDMA_WC_SEND,
    }) as u8
}

/// Whether QPs of a type do an `enum virtio_rdma_wr_opcode` (IBA 9.4, table 38).
fn allows(kind: QpType, opcode: u32) -> bool {
    let send = matches!(opcode, VIRTIO_RDMA_WR_SEND | VIRTIO_RDMA_WR_SEND_WITH_IMM);
    let write = matches!(opcode, VIRTIO_RDMA_WR_RDMA_WRITE | VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM);
    let read = matches!(
        opcode,
        VIRTIO_RDMA_WR_RDMA_READ
            | VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP
            | VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD
    );
    match kind {
        QpType::Rc => send || write || read,
        QpType::Uc => send || write,
        QpType::Ud | QpType::Gsi => send,
    }
}

impl SendWqe {
    /// Nothing.
    pub fn empty() -> Self {
        Self {
            wr_id: 0,
            wc_opcode: 0,
            operation: Operation::Send,
            signaled: false,
            solicited: false,
            immediate: None,
            sges: SgeList::EMPTY,
            total: 0,
            remote_addr: 0,
            rkey: 0,
            ud: WrUd::new_zeroed(),
        }
    }

    /// Copies a work request out of its chain, once, and checks what does not
    /// depend on anything but the QP's type and its limit of SGEs.
    pub fn read(
        chain: &Chain,
        kind: QpType,
        max_sge: usize,
    ) -> Result<Result<Self, Malformed>, MemoryError> {
        let mut bytes = [0; SEND_HEADER + SGES];
        let count = chain.read(&mut bytes)?;
        Ok(Self::parse(&bytes[..count], kind, max_sge))
    }

    /// The same for bytes that were copied.
    pub fn parse(bytes: &[u8], kind: QpType, max_sge: usize) -> Result<Self, Malformed> {
        let Ok((header, rest)) = virtio_rdma_sq_wqe::read_from_prefix(bytes) else {
            let why = "a send work request is shorter than its header";
            let status = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
            return Err(Malformed { wr_id: 0, wc_opcode: 0, status, why });
        };
        let opcode = header.opcode;
        let wc_opcode = wc_opcode(opcode);
        let refuse = |status, why| Err(Malformed { wr_id: header.wr_id, wc_opcode, status, why });
        let operation_error = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
        if !allows(kind, opcode) {
            return refuse(operation_error, "a send opcode that the QP does not do");
        }
        if header.send_flags & !KNOWN_FLAGS != 0 {
            return refuse(operation_error, "an unknown send flag");
        }
        let count = header.num_sge as usize;
        if count > max_sge.min(MAX_SGE) {
            return refuse(operation_error, "more SGEs than the QP's limit");
        }
        if rest.len() < count * size_of::<virtio_rdma_sge>() {
            return refuse(operation_error, "a send work request is shorter than its SGEs");
        }
        let sges = SgeList::parse(rest, count);
        let total = sges.total();
        if total > MAX_MSG_SIZE.into() {
            return refuse(VIRTIO_RDMA_WC_LOC_LEN_ERR, "a message longer than the largest");
        }
        let mut wqe = Self {
            wr_id: header.wr_id,
            wc_opcode,
            signaled: header.send_flags & VIRTIO_RDMA_SEND_SIGNALED != 0,
            solicited: header.send_flags & VIRTIO_RDMA_SEND_SOLICITED != 0,
            sges,
            total,
            ..Self::empty()
        };
        if matches!(opcode, VIRTIO_RDMA_WR_SEND_WITH_IMM | VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM) {
            wqe.immediate = Some(header.ex);
        }
        if !wqe.set_remote(opcode, header.wr.as_bytes()) {
            return refuse(VIRTIO_RDMA_WC_LOC_LEN_ERR, "an atomic on other than 8 bytes");
        }
        Ok(wqe)
    }

    /// Fills in what the opcode takes from `wr`; `false` for an atomic whose
    /// local side is not 8 bytes.
    fn set_remote(&mut self, opcode: u32, wr: &[u8]) -> bool {
        match opcode {
            VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP | VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = prefix::<WrAtomic>(wr);
                let operation = if opcode == VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP {
                    Atomic::CompareSwap { compare: atomic.compare_add, swap: atomic.swap }
                } else {
                    Atomic::FetchAdd(atomic.compare_add)
                };
                self.operation = Operation::Atomic(operation);
                (self.remote_addr, self.rkey) = (atomic.remote_addr, atomic.rkey);
                return self.total == 8;
            }
            VIRTIO_RDMA_WR_SEND | VIRTIO_RDMA_WR_SEND_WITH_IMM => {
                self.operation = Operation::Send;
                self.ud = prefix::<WrUd>(wr);
            }
            _ => {
                let rdma = prefix::<WrRdma>(wr);
                let read = opcode == VIRTIO_RDMA_WR_RDMA_READ;
                self.operation = if read { Operation::Read } else { Operation::Write };
                (self.remote_addr, self.rkey) = (rdma.remote_addr, rdma.rkey);
            }
        }
        true
    }

    /// Whether the responder takes a receive for it.
    pub fn takes_receive(&self) -> bool {
        self.operation == Operation::Send || self.immediate.is_some()
    }
}

/// A structure at the beginning of `bytes`, which are as many.
fn prefix<T: FromBytes>(bytes: &[u8]) -> T {
    T::read_from_prefix(bytes).map_or_else(|_| T::new_zeroed(), |(value, _)| value)
}

/// `wr_id` and `enum virtio_rdma_wc_opcode` of a send work request that is
/// flushed, whatever else is in it.
pub(crate) fn flushed_send(chain: &Chain) -> (u64, u8) {
    let mut bytes = [0; SEND_HEADER];
    let whole = chain.read(&mut bytes).is_ok_and(|count| count == bytes.len());
    let header = if whole { prefix(&bytes) } else { virtio_rdma_sq_wqe::new_zeroed() };
    (header.wr_id, wc_opcode(header.opcode))
}

/// A receive work request.
#[derive(Clone)]
pub(crate) struct ReceiveWqe {
    /// Comes back in the CQE.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: SgeList,
}

impl ReceiveWqe {
    /// Copies a work request out of its chain, once, and checks its form; of a
    /// malformed one gives the `wr_id`, and what is wrong.
    pub fn read(
        chain: &Chain,
        max_sge: usize,
    ) -> Result<Result<Self, (u64, &'static str)>, MemoryError> {
        let mut bytes = [0; RECEIVE_HEADER + SGES];
        let count = chain.read(&mut bytes)?;
        Ok(Self::parse(&bytes[..count], max_sge))
    }

    /// The same for bytes that were copied.
    pub fn parse(bytes: &[u8], max_sge: usize) -> Result<Self, (u64, &'static str)> {
        let Ok((header, rest)) = virtio_rdma_rq_wqe::read_from_prefix(bytes) else {
            return Err((0, "a receive work request is shorter than its header"));
        };
        let count = header.num_sge as usize;
        if count > max_sge.min(MAX_SGE) {
            return Err((header.wr_id, "more SGEs than the QP's limit"));
        }
        if rest.len() < count * size_of::<virtio_rdma_sge>() {
            return Err((header.wr_id, "a receive work request is shorter than its SGEs"));
        }
        Ok(Self { wr_id: header.wr_id, sges: SgeList::parse(rest, count) })
    }
}

/// `wr_id` of a receive work request that is flushed.
pub(crate) fn flushed_receive(chain: &Chain) -> u64 {
    let mut bytes = [0; RECEIVE_HEADER];
    let whole = chain.read(&mut bytes).is_ok_and(|count| count == bytes.len());
    if whole {
        prefix::<virtio_rdma_rq_wqe>(&bytes).wr_id
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(num_sge: u32, opcode: u32, flags: u32, sges: &[virtio_rdma_sge]) -> Vec<u8> {
        let mut header = virtio_rdma_sq_wqe::new_zeroed();
        (header.num_sge, header.opcode, header.send_flags) = (num_sge, opcode, flags);
        header.wr_id = 77;
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(sges.as_bytes());
        bytes
    }

    fn status(bytes: &[u8], kind: QpType) -> Option<u32> {
        SendWqe::parse(bytes, kind, 4).map(|_| ()).map_err(|e| e.status).err()
    }

    #[test]
    fn malformed_requests_are_told_apart() {
        let sge = |length| virtio_rdma_sge { addr: 0, length, lkey: 0 };
        let rc = QpType::Rc;
        let operation = Some(VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        let length = Some(VIRTIO_RDMA_WC_LOC_LEN_ERR);
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
        let malformed = SendWqe::parse(&bytes(9, send, 0, &[]), rc, 4).err().unwrap();
        assert_eq!(malformed.wr_id, 77);
    }
}
