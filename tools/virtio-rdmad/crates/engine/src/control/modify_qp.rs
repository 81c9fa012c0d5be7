// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! MODIFY_QP and QUERY_QP.

use abi::{
    virtio_rdma_ah_attr, virtio_rdma_cmd_modify_qp, virtio_rdma_cmd_query_qp,
    virtio_rdma_global_route, virtio_rdma_qp_attr, virtio_rdma_rsp_query_qp,
    VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT, VIRTIO_RDMA_AH_GRH,
    VIRTIO_RDMA_PORT, VIRTIO_RDMA_QP_ACCESS_FLAGS, VIRTIO_RDMA_QP_ALT_PATH, VIRTIO_RDMA_QP_AV,
    VIRTIO_RDMA_QP_CAP, VIRTIO_RDMA_QP_CUR_STATE, VIRTIO_RDMA_QP_DEST_QPN,
    VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY, VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC,
    VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC, VIRTIO_RDMA_QP_MIN_RNR_TIMER, VIRTIO_RDMA_QP_PATH_MIG_STATE,
    VIRTIO_RDMA_QP_PATH_MTU, VIRTIO_RDMA_QP_PKEY_INDEX, VIRTIO_RDMA_QP_PORT, VIRTIO_RDMA_QP_QKEY,
    VIRTIO_RDMA_QP_RATE_LIMIT, VIRTIO_RDMA_QP_RETRY_CNT, VIRTIO_RDMA_QP_RNR_RETRY,
    VIRTIO_RDMA_QP_RQ_PSN, VIRTIO_RDMA_QP_SQ_PSN, VIRTIO_RDMA_QP_STATE, VIRTIO_RDMA_QP_TIMEOUT,
};
use roce::Psn;

use super::call::Call;
use super::status::Status;
use crate::base::address::Address;
use crate::base::sync::lock;
use crate::memory::access::KNOWN_ACCESS;
use crate::qp::config::QpConfig;
use crate::qp::halves::{Partner, Requester};
use crate::qp::state::{check, QpState, Refused};
use crate::transport::failure::{fail_responder, fatal};
use crate::transport::hca::{Hca, Responder};
use crate::transport::{requester, srq};

/// Largest QP number.
const MAX_QPN: u32 = 0xff_ffff;

/// The attributes that MODIFY_QP changes, apart from the state.
struct Change {
    attr: virtio_rdma_qp_attr,
    source: Address,
}

/// Returns whether a request moves a QP to RESET or ERR.
fn ends(request: &virtio_rdma_cmd_modify_qp) -> bool {
    let to = QpState::from_abi(request.attr.qp_state);
    request.attr_mask & VIRTIO_RDMA_QP_STATE != 0
        && matches!(to, Some(QpState::Reset | QpState::Err))
}

/// Handles MODIFY_QP: all attributes or none.
pub(super) fn modify(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_modify_qp,
) -> Result<(), Status> {
    let hca = call.hca;
    let slot = hca.slot_of(request.qpn).ok_or(Status::NoObject)?;
    let qp = hca.qps.get(slot).ok_or(Status::NoObject)?;
    if ends(request) {
        call.budget.work(requester::last_visit(hca, slot));
    }
    let mut requester = lock(&qp.requester);
    let mut responder = lock(&qp.responder);
    let config = responder.config.ok_or(Status::NoObject)?;
    let (mask, attr) = (request.attr_mask, &request.attr);
    let from = qp.state();
    if mask & VIRTIO_RDMA_QP_CUR_STATE != 0 {
        let current = QpState::from_abi(attr.cur_qp_state).ok_or(Status::Invalid)?;
        if current != from {
            return Err(Status::State);
        }
    }
    let to = match mask & VIRTIO_RDMA_QP_STATE {
        0 => from,
        _ => QpState::from_abi(attr.qp_state).ok_or(Status::Invalid)?,
    };
    let at_once = hca.features.has_reset_to_rtr();
    check(from, to, config.wq.kind, mask, at_once).map_err(|why| match why {
        Refused::Transition => Status::State,
        Refused::Attributes => Status::Invalid,
    })?;
    let change = change(hca, &requester, &responder, mask, attr)?;
    if (from, to) != (QpState::Sqd, QpState::Sqd) {
        requester.notify_drained = to == QpState::Sqd
            && mask & VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY != 0
            && attr.en_sqd_async_notify != 0;
    }
    if mask & (VIRTIO_RDMA_QP_AV | VIRTIO_RDMA_QP_DEST_QPN) != 0 {
        requester.peer = None;
    }
    if config.wq.kind.is_connected() && mask & VIRTIO_RDMA_QP_AV != 0 {
        let dgid = change.attr.ah_attr.grh.dgid;
        let other = hca.fabric.find(&change.source.beside(dgid));
        let partner = Partner::new(other.map(|device| device.identity.id()));
        requester.partner = partner;
        responder.partner = partner;
    }
    responder.attr = change.attr;
    responder.expected.psn = Psn::new(change.attr.rq_psn);
    responder.source = change.source;
    requester.attr = change.attr;
    requester.source = change.source;
    qp.set_state(&mut responder, to);
    if from == QpState::Reset && to != from && has_lost_queues(hca, &mut requester, config) {
        fail_responder(hca, slot, &mut responder, fatal(slot));
        return Ok(());
    }
    match to {
        QpState::Reset => {
            hca.set_timer(slot, None);
            requester.reset();
            requester.queue.drain();
            srq::leave(hca, slot, &mut responder);
            responder.rouse();
            responder.reset();
            responder.queue.drain();
        }
        QpState::Err => {
            hca.make_ready(hca.jobs.send(slot));
            hca.make_ready(hca.jobs.receive(slot));
        }
        QpState::Rts | QpState::Sqd | QpState::Sqe => {
            hca.make_ready(hca.jobs.send(slot));
        }
        QpState::Rtr => {
            responder.established = false;
            drop(responder);
            drop(requester);
            invite(hca, config.wq.kind.is_connected(), &change);
        }
        QpState::Init => {}
    }
    Ok(())
}

/// Returns whether the rings of a QP were lost, or a CQ or the SRQ of it failed. A QP in RESET does not fail with them.
fn has_lost_queues(hca: &Hca, requester: &mut Requester, config: QpConfig) -> bool {
    let rings_lost = requester.queue.ring().is_some_and(|ring| ring.is_lost());
    rings_lost
        || config.own_cqs().any(|cq| lock(hca.cqs.take(cq)).is_in_error())
        || config.srq.is_some_and(|srq| hca.with_srq(srq, |srq| srq.is_in_error()) == Some(true))
}

/// Makes the peer of a QP that became ready to receive try again, because the peer may have waited for that.
fn invite(hca: &Hca, is_connected: bool, change: &Change) {
    if !is_connected {
        return;
    }
    let Change { attr, source } = change;
    let Some(device) = hca.fabric.find(&source.beside(attr.ah_attr.grh.dgid)) else { return };
    if let Some(slot) = device.slot_of(attr.dest_qp_num) {
        device.make_ready(device.jobs.send(slot));
    }
}

/// Checks each attribute that the mask names, and applies them to a copy.
fn change(
    hca: &Hca,
    requester: &Requester,
    responder: &Responder,
    mask: u32,
    new: &virtio_rdma_qp_attr,
) -> Result<Change, Status> {
    let mut attr = responder.attr;
    let mut source = responder.source;
    // PSNs go on unless the mask names them.
    (attr.sq_psn, attr.rq_psn) = psns(requester, responder);
    let has = |bit| mask & bit != 0;
    let rd_atomic = hca.limits.max_rd_atomic;
    let not_here = VIRTIO_RDMA_QP_CAP | VIRTIO_RDMA_QP_ALT_PATH | VIRTIO_RDMA_QP_RATE_LIMIT;
    let invalid = has(not_here)
        || has(VIRTIO_RDMA_QP_PORT) && u32::from(new.port_num) != VIRTIO_RDMA_PORT
        || has(VIRTIO_RDMA_QP_PKEY_INDEX) && new.pkey_index != 0
        || has(VIRTIO_RDMA_QP_ACCESS_FLAGS) && new.qp_access_flags & !qp_access(hca) != 0
        || has(VIRTIO_RDMA_QP_PATH_MTU) && !(1..=5).contains(&new.path_mtu)
        || has(VIRTIO_RDMA_QP_TIMEOUT) && new.timeout > 31
        || has(VIRTIO_RDMA_QP_RETRY_CNT) && new.retry_cnt > 7
        || has(VIRTIO_RDMA_QP_RNR_RETRY) && new.rnr_retry > 7
        || has(VIRTIO_RDMA_QP_MIN_RNR_TIMER) && new.min_rnr_timer > 31
        || has(VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC) && new.max_rd_atomic > rd_atomic
        || has(VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC) && new.max_dest_rd_atomic > rd_atomic
        || has(VIRTIO_RDMA_QP_DEST_QPN) && new.dest_qp_num > MAX_QPN
        // The only path migration state of a QP without alternate path.
        || has(VIRTIO_RDMA_QP_PATH_MIG_STATE) && new.path_mig_state != 0;
    if invalid {
        return Err(Status::Invalid);
    }
    if has(VIRTIO_RDMA_QP_AV) {
        source = check_av(hca, &new.ah_attr)?;
        attr.ah_attr = without_reserved(&new.ah_attr);
    }
    let set8 = |bit, to: &mut u8, value| {
        if has(bit) {
            *to = value;
        }
    };
    set8(VIRTIO_RDMA_QP_PORT, &mut attr.port_num, new.port_num);
    set8(VIRTIO_RDMA_QP_PATH_MTU, &mut attr.path_mtu, new.path_mtu);
    set8(VIRTIO_RDMA_QP_TIMEOUT, &mut attr.timeout, new.timeout);
    set8(VIRTIO_RDMA_QP_RETRY_CNT, &mut attr.retry_cnt, new.retry_cnt);
    set8(VIRTIO_RDMA_QP_RNR_RETRY, &mut attr.rnr_retry, new.rnr_retry);
    set8(VIRTIO_RDMA_QP_MIN_RNR_TIMER, &mut attr.min_rnr_timer, new.min_rnr_timer);
    set8(VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC, &mut attr.max_rd_atomic, new.max_rd_atomic);
    set8(VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC, &mut attr.max_dest_rd_atomic, new.max_dest_rd_atomic);
    let set32 = |bit, to: &mut u32, value| {
        if has(bit) {
            *to = value;
        }
    };
    set32(VIRTIO_RDMA_QP_QKEY, &mut attr.qkey, new.qkey);
    set32(VIRTIO_RDMA_QP_ACCESS_FLAGS, &mut attr.qp_access_flags, new.qp_access_flags);
    set32(VIRTIO_RDMA_QP_DEST_QPN, &mut attr.dest_qp_num, new.dest_qp_num);
    set32(VIRTIO_RDMA_QP_RQ_PSN, &mut attr.rq_psn, Psn::new(new.rq_psn).get());
    set32(VIRTIO_RDMA_QP_SQ_PSN, &mut attr.sq_psn, Psn::new(new.sq_psn).get());
    Ok(Change { attr, source })
}

/// Returns an address vector whose reserved bytes are 0.
fn without_reserved(av: &virtio_rdma_ah_attr) -> virtio_rdma_ah_attr {
    let grh = virtio_rdma_global_route { reserved_17: 0, ..av.grh };
    virtio_rdma_ah_attr { grh, reserved_22: [0; 6], ..*av }
}

/// Returns the PSN that a QP sends next, and the one that it expects.
fn psns(requester: &Requester, responder: &Responder) -> (u32, u32) {
    (requester.sq_psn().get(), responder.expected.psn.get())
}

/// Returns the access flags that a QP may have. It may let its peer ask for persistence, which no
/// region gives.
fn qp_access(hca: &Hca) -> u32 {
    let flush = VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL | VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;
    KNOWN_ACCESS | if hca.features.has_flush() { flush } else { 0 }
}

/// Returns the source of an address vector, if that is valid.
fn check_av(hca: &Hca, av: &virtio_rdma_ah_attr) -> Result<Address, Status> {
    let with_grh = u32::from(av.ah_flags) & VIRTIO_RDMA_AH_GRH != 0;
    if !with_grh || u32::from(av.port_num) != VIRTIO_RDMA_PORT {
        return Err(Status::Invalid);
    }
    hca.gid(av.grh.sgid_index.into()).ok_or(Status::Invalid)
}

/// Handles QUERY_QP.
pub(super) fn query(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_query_qp,
) -> Result<virtio_rdma_rsp_query_qp, Status> {
    let hca = call.hca;
    let slot = hca.slot_of(request.qpn).ok_or(Status::NoObject)?;
    let qp = hca.qps.get(slot).ok_or(Status::NoObject)?;
    let requester = lock(&qp.requester);
    let responder = lock(&qp.responder);
    responder.config.ok_or(Status::NoObject)?;
    let state = qp.state();
    let mut attr = responder.attr;
    attr.qp_state = state as u8;
    attr.cur_qp_state = state as u8;
    (attr.sq_psn, attr.rq_psn) = psns(&requester, &responder);
    attr.sq_draining = u8::from(state == QpState::Sqd && requester.is_sending());
    attr.en_sqd_async_notify = u8::from(state == QpState::Sqd && requester.notify_drained);
    Ok(virtio_rdma_rsp_query_qp { attr })
}
