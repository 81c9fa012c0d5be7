// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Protection domains.

use abi::{virtio_rdma_cmd_destroy_pd, virtio_rdma_rsp_create_pd};

use super::call::Call;
use super::quota;
use super::status::Status;

/// Handles CREATE_PD.
pub(super) fn create(call: &mut Call<'_>, (): &()) -> Result<virtio_rdma_rsp_create_pd, Status> {
    quota::check(call.objects.pds.len(), call.hca.quota().pds)?;
    Ok(virtio_rdma_rsp_create_pd { pdn: call.objects.pds.create()? })
}

/// Handles DESTROY_PD.
pub(super) fn destroy(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_destroy_pd,
) -> Result<(), Status> {
    call.objects.pds.destroy(request.pdn)
}
