// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! XRC domains. Their numbers begin at 1; number 0 means no domain.

use abi::{virtio_rdma_cmd_dealloc_xrcd, virtio_rdma_rsp_alloc_xrcd};

use super::call::Call;
use super::objects::Objects;
use super::status::Status;

/// Handles ALLOC_XRCD.
pub(super) fn alloc(call: &mut Call<'_>, (): &()) -> Result<virtio_rdma_rsp_alloc_xrcd, Status> {
    Ok(virtio_rdma_rsp_alloc_xrcd { xrcdn: call.objects.xrcds.create()? + 1 })
}

/// Handles DEALLOC_XRCD.
pub(super) fn dealloc(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_dealloc_xrcd,
) -> Result<(), Status> {
    call.objects.xrcds.destroy(request.xrcdn.wrapping_sub(1))
}

/// Fails if there is no XRC domain of this number.
pub(super) fn require(objects: &Objects, xrcdn: u32) -> Result<(), Status> {
    objects.xrcds.require(xrcdn.wrapping_sub(1))
}

/// Notes that one more object belongs to an XRC domain.
pub(super) fn enter(objects: &mut Objects, xrcdn: u32) {
    objects.xrcds.enter(xrcdn.wrapping_sub(1));
}

/// Notes that one object less belongs to an XRC domain.
pub(super) fn leave(objects: &mut Objects, xrcdn: u32) {
    objects.xrcds.leave(xrcdn.wrapping_sub(1));
}
