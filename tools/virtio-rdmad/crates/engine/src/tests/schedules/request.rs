// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work requests, as the driver posts them.

use abi::*;
use zerocopy::{FromZeros, IntoBytes};

use super::model::Posted;
use super::plan::{Flaw, Op, AREA};
use crate::tests::driver::*;

/// Returns SGEs of at most so many bytes each, and not more than 8.
pub fn pieces(at: u64, len: usize, piece: usize, key: u32) -> Vec<virtio_rdma_sge> {
    let piece = piece.max(len.div_ceil(8)).max(1);
    let cut = |from| sge(at + from as u64, piece.min(len - from) as u32, key);
    (0..len).step_by(piece).map(cut).collect()
}

/// The memory and the SRQ of the peer that a work request names.
#[derive(Clone, Copy)]
pub struct Remote {
    /// The address of the peer's area.
    pub area: u64,
    /// The key of that.
    pub rkey: u32,
    /// The SRQ of a target of XRC.
    pub srqn: Option<u32>,
}

/// Returns the work request that was posted.
pub fn request(wr_id: u64, posted: &Posted, at: u64, key: u32, remote: Remote) -> Send {
    let work = &posted.work;
    let len = work.op.len();
    let key = if work.flaw == Some(Flaw::LocalKey) { key ^ 0x0100_0000 } else { key };
    let sges = pieces(at, len, work.piece, key);
    let Remote { area, rkey, srqn } = remote;
    let rkey = if work.flaw == Some(Flaw::RemoteKey) { rkey ^ 0x0100_0000 } else { rkey };
    let shift = match work.flaw {
        Some(Flaw::RemoteRange) => AREA as u64,
        Some(Flaw::Unaligned) => 4,
        _ => 0,
    };
    let remote_at = |at: usize| area + at as u64 + shift;
    let send = |opcode| Send::new(wr_id, opcode, &sges);
    let mut send = match work.op {
        Op::Send { imm: None, .. } => send(VIRTIO_RDMA_WR_SEND),
        Op::Send { imm: Some(imm), .. } => send(VIRTIO_RDMA_WR_SEND_WITH_IMM).imm(imm),
        Op::Write { at, imm: None, .. } => {
            send(VIRTIO_RDMA_WR_RDMA_WRITE).rdma(remote_at(at), rkey)
        }
        Op::Write { at, imm: Some(imm), .. } => {
            send(VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM).imm(imm).rdma(remote_at(at), rkey)
        }
        Op::Read { at, .. } => send(VIRTIO_RDMA_WR_RDMA_READ).rdma(remote_at(at), rkey),
        Op::Add { at, value } => {
            send(VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD).atomic(remote_at(at), rkey, value, 0)
        }
        Op::Swap { at, value, .. } => {
            let compare = posted.compare;
            send(VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP).atomic(remote_at(at), rkey, compare, value)
        }
        Op::Store { at } => send(VIRTIO_RDMA_WR_ATOMIC_WRITE).rdma(remote_at(at), rkey),
        Op::Flush { at, len } => {
            let mut entry = virtio_rdma_ring_flush_wqe::new_zeroed();
            (entry.type_, entry.rkey) = (VIRTIO_RDMA_FLUSH_GLOBAL as u8, rkey);
            (entry.remote_addr, entry.length) = (remote_at(at), len as u64);
            Send { wr: entry.as_bytes().to_vec(), ..send(VIRTIO_RDMA_WR_FLUSH) }
        }
    };
    let signaled = if work.is_signaled { VIRTIO_RDMA_SEND_SIGNALED } else { 0 };
    let fenced = if work.is_fenced { VIRTIO_RDMA_SEND_FENCE } else { 0 };
    send = send.flags(signaled | fenced);
    send.srqn = if work.flaw == Some(Flaw::OtherSrq) { srqn.map(|srqn| srqn + 100) } else { srqn };
    if work.is_inline {
        send = send.inline(&posted.data);
        send.sges.clear();
    }
    send
}
