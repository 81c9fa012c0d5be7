// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory windows (IBA 10.6.7; specification, Memory windows). Work requests bind them.

use abi::{virtio_rdma_cmd_alloc_mw, virtio_rdma_cmd_dealloc_mw, virtio_rdma_rsp_alloc_mw};

use super::call::Call;
use super::objects::MwEntry;
use super::quota;
use super::status::Status;
use crate::base::sync::write;
use crate::memory::mw::{MemoryWindow, MwType};

/// Handles ALLOC_MW.
pub(super) fn alloc(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_alloc_mw,
) -> Result<virtio_rdma_rsp_alloc_mw, Status> {
    let (keys, objects, pdn) = (&call.hca.keys, &mut *call.objects, request.pdn);
    objects.pds.require(pdn)?;
    let kind = MwType::from_abi(request.type_).ok_or(Status::Invalid)?;
    quota::check(objects.mws.len(), call.hca.quota().mws)?;
    let key = objects.choose_key(keys)?;
    let mwn = objects.mws.insert(MwEntry { key, pdn }).map_err(|_| Status::NoResource)?;
    write(keys).windows.insert(MemoryWindow { pdn, kind, key, binding: None });
    objects.pds.enter(pdn);
    Ok(virtio_rdma_rsp_alloc_mw { mwn, rkey: key })
}

/// Handles DEALLOC_MW.
pub(super) fn dealloc(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_dealloc_mw,
) -> Result<(), Status> {
    let objects = &mut *call.objects;
    let MwEntry { key, pdn } = objects.mws.remove(request.mwn).ok_or(Status::NoObject)?;
    let bound = write(&call.hca.keys).remove_window(key);
    if let Some(mr) = bound {
        objects.retire(mr);
    }
    objects.pds.leave(pdn);
    Ok(())
}
