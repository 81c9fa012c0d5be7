// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An end of a connection: what it posts, and what it gets.

use std::collections::VecDeque;

use abi::*;
use zerocopy::FromZeros;

use super::dice::Dice;
use super::model::{Model, Verdict};
use super::plan::{EndPlan, Kind, Op, Work, AREA, DEPTH};
use super::receives::{UNTOUCHED, USED_AGAIN};
use super::request::{request, Remote};
use crate::tests::driver::*;
use crate::Gid;

/// The bytes of guest memory that an end uses: its area, and what it sends.
pub const MEMORY: u64 = SENDS + (DEPTH * AREA) as u64;
/// The offset of the data that an end sends, in its memory.
pub const SENDS: u64 = AREA as u64;

/// One end of a connection.
pub struct End {
    pub number: usize,
    pub qpn: u32,
    /// The address of its memory.
    pub memory: u64,
    /// The key of its area for what is for each of its queues. A target has what the SRQ has.
    pub area_keys: Vec<u32>,
    /// The numbers of the SRQs of a target.
    pub srqns: Vec<u32>,
    /// The key of what it sends.
    pub key: u32,
    pub plan: EndPlan,
    /// The model of its sends, as its peer sees them.
    pub model: Model,
    /// The work requests that are yet to be posted, each with the pause in nanoseconds after the previous one.
    pub works: VecDeque<(u64, Work)>,
    pub work_at: u64,
    /// Receives that have completed.
    pub received: usize,
    /// Whether receives were flushed.
    pub is_flushed: bool,
    /// The time at which the last CQE of its send queue was taken.
    pub progress: u64,
}

/// Returns the access rights of the areas and QPs of a guest.
pub fn access(guest: &Guest) -> u32 {
    if guest.rings {
        ALL | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL
    } else {
        ALL
    }
}

impl End {
    /// Brings the QP to INIT, where receives can be posted.
    pub fn init(&self, guest: &mut Guest) {
        let access = if self.plan.kind == Kind::Initiator { 0 } else { access(guest) };
        guest.make_init(self.qpn, access);
    }

    /// Brings the QP to RTS, connected to that of another end, whose guest has this address.
    pub fn connect(&self, guest: &mut Guest, other: &Self, dgid: Gid) {
        let (plan, peer) = (&self.plan, &other.plan);
        let (sends, receives) = (plan.kind != Kind::Target, plan.kind != Kind::Initiator);
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RTR as u8;
        (attr.path_mtu, attr.rq_psn, attr.dest_qp_num) = (plan.path_mtu, peer.psn, other.qpn);
        (attr.ah_attr.grh.dgid, attr.ah_attr.grh.hop_limit) = (dgid, 64);
        (attr.ah_attr.ah_flags, attr.ah_attr.port_num) = (VIRTIO_RDMA_AH_GRH as u8, 1);
        let mut mask = VIRTIO_RDMA_QP_STATE
            | VIRTIO_RDMA_QP_AV
            | VIRTIO_RDMA_QP_PATH_MTU
            | VIRTIO_RDMA_QP_DEST_QPN
            | VIRTIO_RDMA_QP_RQ_PSN;
        if receives {
            (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (peer.max_rd_atomic, plan.rnr_timer);
            mask |= VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
        }
        guest.modify(self.qpn, mask, attr).unwrap();
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RTS as u8;
        (attr.sq_psn, attr.timeout) = (plan.psn, plan.timeout);
        let mut mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_SQ_PSN | VIRTIO_RDMA_QP_TIMEOUT;
        if sends {
            (attr.retry_cnt, attr.rnr_retry) = (plan.retry_cnt, plan.rnr_retry);
            attr.max_rd_atomic = plan.max_rd_atomic;
            mask |= VIRTIO_RDMA_QP_RETRY_CNT
                | VIRTIO_RDMA_QP_RNR_RETRY
                | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
        }
        guest.modify(self.qpn, mask, attr).unwrap();
    }

    /// Returns what a work request of the peer names that is for one of the queues.
    fn as_remote(&self, queue: usize) -> Remote {
        let (area, rkey) = (self.memory, self.area_keys[queue]);
        Remote { area, rkey, srqn: self.srqns.get(queue).copied() }
    }

    /// Returns when something can be posted, if that can be told.
    pub fn next_post(&self) -> Option<u64> {
        self.works.front().filter(|_| self.has_room()).map(|_| self.work_at)
    }

    fn has_room(&self) -> bool {
        self.model.posted.len() - self.model.next < DEPTH
    }

    /// Returns where the local memory of a work request is.
    fn send_at(&self, index: usize) -> u64 {
        self.memory + SENDS + (index % DEPTH * AREA) as u64
    }

    /// Posts what is due, on the area of another end. Returns whether something was.
    pub fn post(
        &mut self,
        guest: &mut Guest,
        now: u64,
        other: &Self,
        dice: &mut Dice,
        tells: bool,
    ) -> bool {
        let first = self.model.posted.len();
        while self.work_at <= now && self.has_room() {
            let Some((_, mut work)) = self.works.pop_front() else { break };
            let index = self.model.posted.len();
            // A queue full of what is not signaled would stay full.
            work.is_signaled |= index + 1 - self.model.next == DEPTH;
            let at = self.send_at(index);
            let sends = matches!(work.op, Op::Send { .. } | Op::Write { .. } | Op::Store { .. });
            let data = if sends { dice.bytes(work.op.len()) } else { Vec::new() };
            let local = if sends { data.clone() } else { vec![UNTOUCHED; work.op.len()] };
            guest.memory.write(at, &local).unwrap();
            if tells {
                println!("{now} end {} posts {index}: {work:?}", self.number);
            }
            let wr_id = (self.number << 16 | index) as u64;
            let remote = other.as_remote(work.queue);
            let send = request(wr_id, self.model.post(work, data), at, self.key, remote);
            guest.post_send(self.qpn, &send);
            self.work_at = now + self.works.front().map_or(0, |(pause, _)| *pause);
        }
        self.model.posted.len() != first
    }

    /// Judges what a work request has brought.
    pub fn check_result(&self, guest: &Guest, index: usize) -> Verdict {
        let op = self.model.posted[index].work.op;
        let found = guest.bytes(self.send_at(index), op.len());
        match op {
            Op::Read { .. } => self.model.check_read(index, &found),
            Op::Add { .. } | Op::Swap { .. } => {
                let word = u64::from_le_bytes(found.try_into().unwrap());
                self.model.check_atomic(index, word)
            }
            _ => Ok(()),
        }
    }

    /// Uses the memory of a work request again that is done.
    pub fn poison(&self, guest: &Guest, index: usize) {
        let len = self.model.posted[index].work.op.len();
        guest.memory.write(self.send_at(index), &vec![USED_AGAIN; len]).unwrap();
    }
}
