// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Extended reliable connections (IBA, annex A14; specification, 13.7).
//!
//! An XRC target has no queues. It receives from whichever SRQ of its domain a
//! message names, and while the message is under way it has what that SRQ has: its
//! PD, its CQ and its work requests.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_qp, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_dealloc_xrcd,
    virtio_rdma_rsp_alloc_xrcd, virtio_rdma_rsp_create_qp,
};
use zerocopy::FromZeros;

use crate::base::counters::Counter;
use crate::control::queue::{Control, Status};
use crate::device::Shared;
use crate::memory::mr_cache::PinSet;
use crate::qp::halves::{QpConfig, Responder};
use crate::qp::state::QpType;
use crate::queue::srq::XrcSrq;
use crate::transport::responder::{Message, Nak};
use crate::transport::turn::Outbox;

impl Shared {
    /// What makes an SRQ with these numbers one for XRC, if its domain and CQ exist.
    /// To a driver that does not know XRC, they are reserved.
    pub(crate) fn xrc_of_srq(
        &self,
        control: &Control,
        xrcdn: u32,
        cqn: u32,
    ) -> Result<Option<XrcSrq>, Status> {
        if xrcdn == 0 || !self.has_xrc() {
            return Ok(None);
        }
        control.require_xrcd(xrcdn)?;
        self.with_cq(cqn, |_| ())?;
        let cq = u16::try_from(cqn).map_err(|_| Status::NoObject)?;
        Ok(Some(XrcSrq { xrcdn, cq }))
    }

    /// Handles CREATE_RING_QP of an XRC target: it belongs to a domain, and has
    /// nothing besides.
    pub(crate) fn create_xrc_target(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_ring_qp,
    ) -> Result<virtio_rdma_rsp_create_qp, Status> {
        if request.base.create_flags != 0 {
            return Err(Status::Unsupported);
        }
        let rings = request.sq.depth != 0 || request.rq.depth != 0 || request.region.npages != 0;
        if rings || request.srqn != 0 || request.flags != 0 {
            return Err(Status::Invalid);
        }
        control.require_xrcd(request.xrcdn)?;
        let slot = self.free_ring_slot(control, QpType::XrcTgt)?;
        let config = QpConfig::xrc_target(request.xrcdn);
        self.occupy(slot, &virtio_rdma_cmd_create_qp::new_zeroed(), config, None);
        self.attach(control, slot, config);
        Ok(virtio_rdma_rsp_create_qp { qpn: u32::from(slot) + 1 })
    }

    /// Does what a chunk asks for of an XRC target, as [`Shared::respond`].
    pub(crate) fn respond_to_xrc(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        waiter: (&Arc<Self>, u16),
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        if !self.select_srq(slot, responder, message.wqe.srqn) {
            self.stats.add(Counter::XrcViolations, 1);
            return Err(self.request_failed(slot, responder));
        }
        let answer = self.respond(slot, responder, message, waiter, pins, outbox);
        // It has a work request of that SRQ, or waits for one.
        let goes_on = responder.has_receive || matches!(answer, Err(Nak::NotReady(_)));
        if !goes_on {
            // Without it, the SRQ's CQ may be gone when its CQEs are placed.
            outbox.place_completions();
            responder.deselect();
        }
        answer
    }

    /// Has an XRC target receive from the SRQ of this number, if that is one of its
    /// domain.
    fn select_srq(&self, slot: u16, responder: &mut Responder, srqn: u32) -> bool {
        let Some(config) = responder.config else { return false };
        let found =
            self.srq_slot_of(srqn).and_then(|srq| Some((srq, self.xrc_srq(srq, config.xrcdn)?)));
        let Some((srq, (pdn, cq))) = found else { return false };
        if config.srq.is_some_and(|before| before != srq) {
            // What an earlier message left undone.
            self.leave_srq(slot, responder);
        }
        responder.config =
            Some(QpConfig { srq: Some(srq), pdn, recv_pdn: pdn, recv_cq: cq, ..config });
        true
    }
}

impl Control {
    /// Handles ALLOC_XRCD.
    pub fn alloc_xrcd(&mut self) -> Result<virtio_rdma_rsp_alloc_xrcd, Status> {
        let index = self.xrcds.insert(0).map_err(|_| Status::NoResource)?;
        Ok(virtio_rdma_rsp_alloc_xrcd { xrcdn: index + 1 })
    }

    /// Handles DEALLOC_XRCD.
    pub fn dealloc_xrcd(&mut self, request: &virtio_rdma_cmd_dealloc_xrcd) -> Result<(), Status> {
        let index = request.xrcdn.wrapping_sub(1);
        match self.xrcds.get(index) {
            None => Err(Status::NoObject),
            Some(0) => {
                self.xrcds.remove(index);
                Ok(())
            }
            Some(_) => Err(Status::Busy),
        }
    }

    /// Fails if there is no such XRC domain.
    fn require_xrcd(&self, xrcdn: u32) -> Result<(), Status> {
        self.xrcds.get(xrcdn.wrapping_sub(1)).map(|_| ()).ok_or(Status::NoObject)
    }

    /// One more object belongs to an XRC domain.
    pub fn use_xrcd(&mut self, xrcdn: u32) {
        if let Some(users) = self.xrcds.get_mut(xrcdn.wrapping_sub(1)) {
            *users += 1;
        }
    }

    /// One less.
    pub fn unuse_xrcd(&mut self, xrcdn: u32) {
        if let Some(users) = self.xrcds.get_mut(xrcdn.wrapping_sub(1)) {
            *users -= 1;
        }
    }
}
