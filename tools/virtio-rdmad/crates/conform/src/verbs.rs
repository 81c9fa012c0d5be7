// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PDs, MRs, CQs, QPs and SRQs: how a driver makes and uses them, and what it checks meanwhile.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::rc::Rc;
use std::time::{Duration, Instant};

use abi::*;
use testkit::command::{self, PAGE};
use testkit::{
    receive as receive_entry, CqRing, Memory as _, QpRings, Send, SrqRing, CQE, CQ_HEAD, WAKE,
};
use zerocopy::FromZeros;

use crate::driver::{Driver, FILL};
use crate::objects::{Cq, Posted, Qp, Shape, Srq, DEPTH, SGES, STRIDE};
use crate::outcome::Outcome;
use crate::queue::Queue;
use crate::reply::wc_name;

/// How long the device may take to return a buffer of doorbells.
const DOORBELLS: Duration = Duration::from_secs(30);

impl Driver {
    /// Creates a PD.
    pub fn create_pd(&mut self) -> Outcome<u32> {
        let reply: virtio_rdma_rsp_create_pd =
            self.command("D-CTRL-22", "CREATE_PD", VIRTIO_RDMA_CMD_CREATE_PD, &())?;
        Ok(reply.pdn)
    }

    /// Returns a region of zeros for rings, with its page table.
    pub fn region(&mut self, len: u64) -> (u64, virtio_rdma_ring_region) {
        let region = self.allocate(len.next_multiple_of(PAGE), PAGE);
        let pages = command::pages_of(region, len);
        let table = self.table(&pages);
        (region, command::region(table, pages.len() as u32))
    }

    /// Writes a page table, and returns its address.
    pub fn table(&mut self, pages: &[u64]) -> u64 {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.place(&bytes)
    }

    /// Returns the request for a CQ, and the address of its region.
    pub fn cq_request(&mut self, depth: u32) -> (u64, virtio_rdma_cmd_create_ring_cq) {
        let (at, region) = self.region(CQ_HEAD + CQE * u64::from(depth));
        let comp_vector = u32::from(self.vectors() - 1);
        (at, virtio_rdma_cmd_create_ring_cq { region, cqe: depth, comp_vector })
    }

    /// Creates a CQ.
    pub fn create_cq(&mut self, depth: u32) -> Outcome<u32> {
        let depth = depth.min(self.config.ring_max_cqe);
        let (at, request) = self.cq_request(depth);
        let (name, number) = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
        let reply: virtio_rdma_rsp_create_cq = self.command("D-CTRL-32", name, number, &request)?;
        let cqn = reply.cqn;
        let is_free = cqn < self.config.ring_max_cq && !self.cqs.contains_key(&cqn);
        self.journal.holds("D-RING-07", "number of a new CQ", is_free, cqn)?;
        self.note_cq(cqn, at, depth);
        Ok(cqn)
    }

    /// Notes a CQ that a test has created by a request of its own.
    pub fn note_cq(&mut self, cqn: u32, at: u64, depth: u32) {
        let ring = CqRing::new(at, depth, 0);
        self.cqs.insert(cqn, Cq { ring, timestamp: 0, kept: VecDeque::new() });
    }

    /// Notes that a CQ goes on in another ring. Returns the address of the one before.
    pub fn move_cq(&mut self, cqn: u32, at: u64, depth: u32) -> u64 {
        self.cqs.get_mut(&cqn).map_or(0, |cq| cq.ring.moved(at, depth))
    }

    /// Destroys a CQ.
    pub fn destroy_cq(&mut self, cqn: u32) -> Outcome {
        let request = virtio_rdma_cmd_destroy_cq { cqn };
        let () = self.command("D-CTRL-21", "DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ, &request)?;
        if let Some(cq) = self.cqs.remove(&cqn) {
            let len = (CQ_HEAD + CQE * u64::from(cq.ring.depth)) as usize;
            self.freeze(cq.ring.region, len, "D-RING-36");
        }
        Ok(())
    }

    /// Asks for an event at the next CQE, or at the next solicited one.
    pub fn arm(&mut self, cqn: u32, is_solicited: bool) {
        let memory = &self.memory.map;
        if let Some(cq) = self.cqs.get_mut(&cqn) {
            cq.ring.arm(memory, is_solicited);
        }
    }

    /// Takes the next CQE out of a CQ, and checks it.
    pub fn poll(&mut self, cqn: u32) -> Outcome<Option<virtio_rdma_ring_cqe>> {
        let Some(cqe) = self.poll_held(cqn)? else { return Ok(None) };
        self.release(cqn);
        Ok(Some(cqe))
    }

    /// Gives the places of CQEs that were taken back.
    pub fn release(&mut self, cqn: u32) {
        if let Some(cq) = self.cqs.get(&cqn) {
            cq.ring.release(&self.memory.map);
        }
    }

    /// Takes the next CQE, and keeps its place.
    pub fn poll_held(&mut self, cqn: u32) -> Outcome<Option<virtio_rdma_ring_cqe>> {
        let memory = &self.memory.map;
        let Some(cq) = self.cqs.get_mut(&cqn) else { return Ok(None) };
        let Some(cqe) = cq.kept.pop_front().or_else(|| cq.ring.take(memory)) else {
            return self.check_lap(cqn).map(|()| None);
        };
        self.check_cqe(cqn, &cqe)?;
        Ok(Some(cqe))
    }

    /// Checks that a place without a CQE has the lap of the CQE before.
    fn check_lap(&self, cqn: u32) -> Outcome {
        let ring = &self.cqs[&cqn].ring;
        let at = ring.region + CQ_HEAD + u64::from(ring.consumer % ring.depth) * CQE;
        let lap: u32 = self.memory.map.get(at + offset_of!(virtio_rdma_ring_cqe, lap) as u64);
        let before = ring.consumer / ring.depth;
        if lap != before && lap != before.wrapping_add(1) {
            let got = lap.to_string();
            let expected = format!("{before} or {}", before + 1);
            return Err(self.journal.failure("D-CQ-02", "lap of the next CQE", expected, got));
        }
        Ok(())
    }

    /// Checks a CQE against what was posted.
    fn check_cqe(&mut self, cqn: u32, cqe: &virtio_rdma_ring_cqe) -> Outcome {
        let journal = Rc::clone(&self.journal);
        journal.zero("D-TERM-03", "reserved_38 of a CQE", cqe.reserved_38)?;
        let is_known = u32::from(cqe.status) <= VIRTIO_RDMA_WC_GENERAL_ERR;
        journal.holds("D-TERM-06", "a status of a CQE that is listed", is_known, cqe.status)?;
        if [3, 7].contains(&cqe.status) || cqe.status > 13 {
            journal.remark(format!("a CQE has status {} (D-WQE-69)", cqe.status));
        }
        if let Some(cq) = self.cqs.get_mut(&cqn) {
            let goes_on = cqe.timestamp == 0 || cqe.timestamp >= cq.timestamp;
            journal.holds("D-CQ-23", "timestamp goes on", goes_on, cqe.timestamp)?;
            cq.timestamp = cq.timestamp.max(cqe.timestamp);
        }
        let Some(qp) = self.qps.get_mut(&cqe.qp_num) else {
            let got = cqe.qp_num.to_string();
            return Err(journal.failure("D-CQ-10", "qp_num of a CQE", "a QP".into(), got));
        };
        let is_receive = cqe.opcode & 0x80 != 0;
        let index = cqe.wqe_index;
        // A target receives from the SRQ that the message names.
        let is_target = qp.kind == VIRTIO_RDMA_QPT_XRC_TGT;
        let srqn = if is_target { cqe.srqn } else { qp.srqn };
        if is_target {
            let is_known = self.srqs.contains_key(&srqn);
            journal.holds("D-XRC-34", "srqn of a CQE of a target", is_known, srqn)?;
        }
        let queue = match self.srqs.get_mut(&srqn) {
            Some(srq) if is_receive => &mut srq.posted,
            _ => &mut qp.posted[usize::from(is_receive)],
        };
        let Some(at) = queue.iter().position(|posted| posted.index == index) else {
            let expected = format!("one of {queue:?}");
            return Err(journal.failure(
                "D-CQ-03",
                "wqe_index of a CQE",
                expected,
                index.to_string(),
            ));
        };
        // QPs of one SRQ complete their receives in any order.
        let is_shared = is_receive && srqn != 0;
        let before: Vec<Posted> = if is_shared {
            queue.remove(at).into_iter().collect()
        } else {
            queue.drain(..=at).collect()
        };
        let at = before.len() - 1;
        let posted = before[at];
        let all_quiet = !is_receive && before[..at].iter().all(|posted| !posted.signalled);
        let in_order = at == 0 || all_quiet;
        journal.holds("D-WQE-06", "CQEs come in order, one each", in_order, index)?;
        journal.is("D-CQ-10", "wr_id of a CQE", cqe.wr_id, posted.wr_id)?;
        let is_due =
            is_receive || posted.signalled || u32::from(cqe.status) != VIRTIO_RDMA_WC_SUCCESS;
        journal.holds(
            "D-WQE-66",
            "an unsignalled send that succeeds has no CQE",
            is_due,
            cqe.wr_id,
        )?;
        if u32::from(cqe.status) == VIRTIO_RDMA_WC_SUCCESS {
            journal.zero("D-CQ-20", "pkey_index of a CQE", cqe.pkey_index)?;
            if !is_target {
                journal.zero("D-CQ-24", "srqn of a CQE", cqe.srqn)?;
            }
        }
        Ok(())
    }

    /// Waits for the next CQE.
    pub fn next(&mut self, cqn: u32) -> Outcome<virtio_rdma_ring_cqe> {
        self.wait("CQE", |this| this.poll(cqn))
    }

    /// Waits for the next CQE, which must have this `wr_id` and this status by the clause.
    pub fn completes(
        &mut self,
        cqn: u32,
        clause: &'static str,
        wr_id: u64,
        status: u32,
    ) -> Outcome<virtio_rdma_ring_cqe> {
        self.journal.about(clause);
        let cqe = self.next(cqn)?;
        let what = format!("CQE of work request {wr_id}");
        let got = (cqe.wr_id, wc_name(cqe.status.into()));
        self.journal.is(clause, &what, got, (wr_id, wc_name(status)))?;
        Ok(cqe)
    }

    /// Returns the request for a QP with rings, and the address of its region.
    pub fn qp_request(&mut self, pdn: u32, shape: &Shape) -> (u64, virtio_rdma_cmd_create_ring_qp) {
        let mut base = command::create_qp(pdn, shape.send_cqn, shape.kind, SGES);
        base.recv_cqn = shape.recv_cqn;
        let signal =
            if shape.signals_all { VIRTIO_RDMA_SIGNAL_ALL_WR } else { VIRTIO_RDMA_SIGNAL_REQ_WR };
        base.sq_sig_type = signal as u8;
        (base.max_send_wr, base.max_recv_wr) = (DEPTH, DEPTH);
        (base.max_send_sge, base.max_recv_sge) =
            (SGES.min(self.config.max_send_sge), SGES.min(self.config.max_recv_sge));
        base.max_inline_data = shape.inline;
        let stride = (80 + shape.inline).next_power_of_two().max(STRIDE);
        let first = stride.max(256);
        let len = u64::from(first + 2 * stride * DEPTH);
        let (at, region) = self.region(len);
        let shapes = [first, first + stride * DEPTH].map(|at| command::shape(DEPTH, stride, at));
        let mut request = command::create_ring_qp(base, region, shapes);
        request.flags = 0;
        (at, request)
    }

    /// Creates a QP.
    pub fn create_qp(&mut self, pdn: u32, shape: &Shape) -> Outcome<u32> {
        let (at, request) = self.qp_request(pdn, shape);
        self.create_qp_of(at, &request)
    }

    /// Creates a QP by a request whose region is at this address.
    pub fn create_qp_of(
        &mut self,
        at: u64,
        request: &virtio_rdma_cmd_create_ring_qp,
    ) -> Outcome<u32> {
        let (name, number) = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
        let reply: virtio_rdma_rsp_create_qp = self.command("D-CTRL-33", name, number, request)?;
        let qpn = reply.qpn;
        let kind = u32::from(request.base.qp_type);
        let is_free = (1..=self.config.ring_max_qp).contains(&qpn) && !self.qps.contains_key(&qpn);
        self.journal.holds("D-RING-05", "number of a new QP", is_free, qpn)?;
        let is_gsi = kind == VIRTIO_RDMA_QPT_GSI;
        self.journal.is("D-RING-06", "the GSI has the number 1", qpn == 1, is_gsi)?;
        let rings = QpRings::new(at, [request.sq, request.rq]);
        let signals_all = u32::from(request.base.sq_sig_type) == VIRTIO_RDMA_SIGNAL_ALL_WR;
        self.qps.insert(
            qpn,
            Qp { rings, kind, signals_all, srqn: request.srqn, posted: Default::default() },
        );
        Ok(qpn)
    }

    /// Destroys a QP.
    pub fn destroy_qp(&mut self, qpn: u32) -> Outcome {
        let request = virtio_rdma_cmd_destroy_qp { qpn };
        let () = self.command("D-CTRL-28", "DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP, &request)?;
        if let Some(qp) = self.qps.remove(&qpn) {
            self.freeze(qp.rings.region, 256, "D-RING-35");
            self.drop_cqes(qpn);
        }
        Ok(())
    }

    /// Drops the CQEs of a QP, whose number another one may have from now on.
    fn drop_cqes(&mut self, qpn: u32) {
        let memory = &self.memory.map;
        for cq in self.cqs.values_mut() {
            while let Some(cqe) = cq.ring.take(memory) {
                cq.kept.push_back(cqe);
            }
            cq.kept.retain(|cqe| cqe.qp_num != qpn);
            cq.ring.release(memory);
        }
    }

    /// Takes a QP to RESET, and makes its rings begin again.
    pub fn reset_qp(&mut self, qpn: u32) -> Outcome {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RESET as u8;
        self.modify(qpn, "D-QP-40", VIRTIO_RDMA_QP_STATE, attr)?;
        self.drop_cqes(qpn);
        let memory = &self.memory.map;
        if let Some(qp) = self.qps.get_mut(&qpn) {
            for wake in WAKE {
                let word: u32 = memory.get(qp.rings.region + wake);
                self.journal.zero("D-RING-62", "wake word of a QP in RESET", word)?;
            }
            qp.rings.restart(memory);
            qp.posted = Default::default();
        }
        Ok(())
    }

    /// Changes the attributes of a QP that the mask names.
    pub fn modify(
        &mut self,
        qpn: u32,
        clause: &'static str,
        attr_mask: u32,
        attr: virtio_rdma_qp_attr,
    ) -> Outcome {
        let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask, attr };
        let name = format!("MODIFY_QP (mask {attr_mask:#x}, state {})", attr.qp_state);
        self.command(clause, &name, VIRTIO_RDMA_CMD_MODIFY_QP, &request)
    }

    /// Judges a clause by the status of a MODIFY_QP that must fail.
    pub fn modify_fails(
        &mut self,
        qpn: u32,
        clause: &'static str,
        (attr_mask, attr): (u32, virtio_rdma_qp_attr),
        status: u32,
    ) -> Outcome {
        let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask, attr };
        let name = format!("MODIFY_QP (mask {attr_mask:#x}, state {})", attr.qp_state);
        self.fails::<_, ()>(clause, (&name, VIRTIO_RDMA_CMD_MODIFY_QP), &request, status)
    }

    /// Takes a QP to a state that needs no other attribute.
    pub fn set_state(&mut self, qpn: u32, state: u32) -> Outcome {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = state as u8;
        self.modify(qpn, "D-QP-40", VIRTIO_RDMA_QP_STATE, attr)
    }

    /// Returns the attributes of a QP.
    pub fn query_qp(&mut self, qpn: u32) -> Outcome<virtio_rdma_qp_attr> {
        let request = virtio_rdma_cmd_query_qp { qpn, attr_mask: 0 };
        let reply: virtio_rdma_rsp_query_qp =
            self.command("D-CTRL-27", "QUERY_QP", VIRTIO_RDMA_CMD_QUERY_QP, &request)?;
        Ok(reply.attr)
    }

    /// Registers `[at, at + len)` of memory, which peers name by the same address.
    pub fn reg_mr(
        &mut self,
        pdn: u32,
        at: u64,
        len: u64,
        access: u32,
    ) -> Outcome<virtio_rdma_rsp_mr> {
        let request = self.mr_request(pdn, at, len, access);
        let mr: virtio_rdma_rsp_mr =
            self.command("D-CTRL-25", "REG_USER_MR", VIRTIO_RDMA_CMD_REG_USER_MR, &request)?;
        self.check_keys(&mr)?;
        Ok(mr)
    }

    /// Returns the request for an MR.
    pub fn mr_request(
        &mut self,
        pdn: u32,
        at: u64,
        len: u64,
        access: u32,
    ) -> virtio_rdma_cmd_reg_user_mr {
        let pages = command::pages_of(at, len);
        let table = (self.table(&pages), pages.len() as u32);
        command::reg_user_mr(pdn, access, (at, len), table)
    }

    /// Checks the keys of a new MR.
    pub fn check_keys(&mut self, mr: &virtio_rdma_rsp_mr) -> Outcome {
        self.journal.is("D-MR-03", "rkey of an MR", mr.rkey, mr.lkey)?;
        self.journal.holds("D-MR-02", "upper bits of a key are not 0", mr.lkey >> 8 != 0, mr.lkey)
    }

    /// Deregisters an MR.
    pub fn dereg_mr(&mut self, mrn: u32) -> Outcome {
        let request = virtio_rdma_cmd_dereg_mr { mrn };
        self.command("D-CTRL-26", "DEREG_MR", VIRTIO_RDMA_CMD_DEREG_MR, &request)
    }

    // Posting.

    /// Writes an entry to a ring of a QP, and its index, without a doorbell.
    pub fn write_entry(
        &mut self,
        qpn: u32,
        queue: u32,
        (wr_id, signalled): (u64, bool),
        entry: &[u8],
    ) {
        let memory = &self.memory.map;
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let stride = qp.rings.shapes[queue as usize].stride as usize;
        // What was there before says nothing.
        let mut place = vec![FILL; stride];
        place[..entry.len()].copy_from_slice(entry);
        let index = qp.rings.write(memory, queue, &place);
        let signalled = signalled || qp.signals_all;
        qp.posted[queue as usize].push_back(Posted { index, wr_id, signalled });
    }

    /// Posts a send.
    pub fn post_send(&mut self, qpn: u32, send: &Send) -> Outcome {
        self.journal.step(format!("post send {} with opcode {}", send.wr_id, send.opcode));
        let signalled = send.flags & VIRTIO_RDMA_SEND_SIGNALED != 0;
        let queue = VIRTIO_RDMA_DOORBELL_SQ;
        self.write_entry(qpn, queue, (send.wr_id, signalled), &send.entry());
        self.ring_if_asleep(qpn, queue)
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, qpn: u32, wr_id: u64, sges: &[virtio_rdma_sge]) -> Outcome {
        self.journal.step(format!("post receive {wr_id}"));
        let queue = VIRTIO_RDMA_DOORBELL_RQ;
        self.write_entry(qpn, queue, (wr_id, true), &receive_entry(wr_id, sges));
        self.ring_if_asleep(qpn, queue)
    }

    /// Rings the doorbell if the device asks for it.
    pub fn ring_if_asleep(&mut self, qpn: u32, queue: u32) -> Outcome {
        let Some(qp) = self.qps.get(&qpn) else { return Ok(()) };
        if qp.rings.must_ring(&self.memory.map, queue) {
            self.ring_doorbell(qpn, queue)?;
        }
        Ok(())
    }

    /// Rings a doorbell.
    pub fn ring_doorbell(&mut self, number: u32, queue: u32) -> Outcome {
        self.ring_doorbells(&testkit::doorbell(number, queue))
    }

    /// Makes a buffer of doorbells available.
    pub fn ring_doorbells(&mut self, bytes: &[u8]) -> Outcome {
        let bells = self.doorbells();
        self.take_doorbells()?;
        if !self.queues[&bells].has_room(1) {
            self.await_doorbells(|queue| queue.has_room(1))?;
        }
        let at = self.place(bytes);
        self.add(bells, &[(at, bytes.len() as u32, false)])
    }

    /// Waits until the device has returned buffers of doorbells, for which it has 30 seconds.
    pub fn await_doorbells(&mut self, is_done: fn(&Queue) -> bool) -> Outcome {
        let (bells, begin) = (self.doorbells(), Instant::now());
        let done = self.wait_until(begin + DOORBELLS, |this| {
            this.take_doorbells()?;
            Ok(is_done(&this.queues[&bells]).then_some(()))
        })?;
        let took = begin.elapsed();
        self.journal.extend(took);
        self.journal.holds("D-RING-85", "doorbells come back", done.is_some(), took)
    }

    /// Takes the buffers back that the device has returned.
    pub fn take_doorbells(&mut self) -> Outcome {
        while let Some(returned) = self.take(self.doorbells(), "D-RING-04")? {
            self.journal.is("D-RING-04", "used length of doorbells", returned.written, 0)?;
        }
        Ok(())
    }

    // SRQs.

    /// Returns the request for an SRQ, and the address of its region.
    pub fn srq_request(&mut self, pdn: u32, depth: u32) -> (u64, virtio_rdma_cmd_create_srq) {
        let first = STRIDE.max(256);
        let (at, region) = self.region(u64::from(first + STRIDE * depth));
        let mut request = command::create_srq(pdn, region, command::shape(depth, STRIDE, first));
        request.max_sge = SGES.min(self.config.max_srq_sge);
        (at, request)
    }

    /// Creates an SRQ.
    pub fn create_srq(&mut self, pdn: u32, depth: u32) -> Outcome<u32> {
        let (at, request) = self.srq_request(pdn, depth);
        self.create_srq_of(at, &request)
    }

    /// Creates an SRQ by a request whose region is at this address.
    pub fn create_srq_of(&mut self, at: u64, request: &virtio_rdma_cmd_create_srq) -> Outcome<u32> {
        let (name, number) = ("CREATE_SRQ", VIRTIO_RDMA_CMD_CREATE_SRQ);
        let reply: virtio_rdma_rsp_create_srq = self.command("D-SRQ-06", name, number, request)?;
        let srqn = reply.srqn;
        let is_free = (1..=self.config.max_srq).contains(&srqn) && !self.srqs.contains_key(&srqn);
        self.journal.holds("D-SRQ-02", "number of a new SRQ", is_free, srqn)?;
        let ring = SrqRing { region: at, shape: request.ring, producer: 0 };
        self.srqs.insert(srqn, Srq { ring, posted: VecDeque::new() });
        Ok(srqn)
    }

    /// Notes that an SRQ goes on in another ring, into which so many work requests were moved. Returns the address of
    /// the one before.
    pub fn move_srq(&mut self, srqn: u32, new: (u64, virtio_rdma_ring_shape), moved: u32) -> u64 {
        let Some(srq) = self.srqs.get_mut(&srqn) else { return 0 };
        let (region, shape) = new;
        let old = std::mem::replace(&mut srq.ring, SrqRing { region, shape, producer: moved });
        (0..).zip(&mut srq.posted).for_each(|(index, posted)| posted.index = index);
        old.region
    }

    /// Creates a QP that receives from an SRQ.
    pub fn create_srq_qp(&mut self, pdn: u32, shape: &Shape, srqn: u32) -> Outcome<u32> {
        let (at, mut request) = self.qp_request(pdn, shape);
        request.rq = FromZeros::new_zeroed();
        (request.base.max_recv_wr, request.srqn) = (0, srqn);
        self.create_qp_of(at, &request)
    }

    /// Posts a receive to an SRQ.
    pub fn post_srq_recv(&mut self, srqn: u32, wr_id: u64, sges: &[virtio_rdma_sge]) -> Outcome {
        self.journal.step(format!("post receive {wr_id} to an SRQ"));
        let memory = &self.memory.map;
        let Some(srq) = self.srqs.get_mut(&srqn) else { return Ok(()) };
        let index = srq.ring.producer;
        srq.ring.write(memory, &receive_entry(wr_id, sges));
        srq.posted.push_back(Posted { index, wr_id, signalled: true });
        if srq.ring.must_ring(memory) {
            self.ring_doorbell(srqn, VIRTIO_RDMA_DOORBELL_SRQ)?;
        }
        Ok(())
    }
}
