// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Multicast groups: which QPs are attached to which group (IBA 10.5).

use abi::virtio_rdma_cmd_mcast;

use super::call::Call;
use super::quota;
use super::status::Status;
use crate::base::address::is_multicast;
use crate::base::qp_type::QpType;
use crate::base::sync::lock;

/// Handles ATTACH_MCAST. A QP that is attached already stays so.
pub(super) fn attach(call: &mut Call<'_>, request: &virtio_rdma_cmd_mcast) -> Result<(), Status> {
    let (hca, gid) = (call.hca, request.gid);
    let slot = hca.slot_of(request.qpn).ok_or(Status::NoObject)?;
    let qp = hca.qps.get(slot).ok_or(Status::NoObject)?;
    let mut responder = lock(&qp.responder);
    let config = responder.config.ok_or(Status::NoObject)?;
    if config.wq.kind != QpType::Ud || !is_multicast(&gid) || request.lid != 0 {
        return Err(Status::Invalid);
    }
    if responder.groups.contains(&gid) {
        return Ok(());
    }
    let attachments = &call.objects.attachments;
    if !attachments.has_room(&gid, &hca.limits) {
        return Err(Status::NoResource);
    }
    if !attachments.has(&gid) {
        quota::check(attachments.groups(), hca.quota().groups)?;
    }
    call.objects.attachments.add(gid);
    responder.groups.push(gid);
    drop(responder);
    hca.fabric.join(gid, hca, slot);
    Ok(())
}

/// Handles DETACH_MCAST. Nothing that is sent to the group arrives at the QP
/// after the reply.
pub(super) fn detach(call: &mut Call<'_>, request: &virtio_rdma_cmd_mcast) -> Result<(), Status> {
    let (hca, gid) = (call.hca, request.gid);
    let slot = hca.slot_of(request.qpn).ok_or(Status::NoObject)?;
    let qp = hca.qps.get(slot).ok_or(Status::NoObject)?;
    let mut responder = lock(&qp.responder);
    let at = responder.groups.iter().position(|group| *group == gid);
    responder.groups.swap_remove(at.ok_or(Status::NoObject)?);
    drop(responder);
    call.objects.attachments.remove(&gid);
    hca.fabric.leave(&gid, hca, slot);
    Ok(())
}
