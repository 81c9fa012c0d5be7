// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Replies of commands, and their reserved bytes.

use std::mem::offset_of;
use std::ops::Range;

use abi::*;
use zerocopy::FromBytes;

/// A reply of a command.
pub trait Reply: FromBytes {
    /// Returns the reserved bytes.
    fn reserved() -> Vec<Range<usize>> {
        Vec::new()
    }
}

impl Reply for () {}
impl Reply for virtio_rdma_rsp_create_cq {}
impl Reply for virtio_rdma_rsp_create_pd {}
impl Reply for virtio_rdma_rsp_mr {}
impl Reply for virtio_rdma_rsp_alloc_mw {}
impl Reply for virtio_rdma_rsp_create_qp {}
impl Reply for virtio_rdma_rsp_query_pkey {}
impl Reply for virtio_rdma_rsp_resize_cq {}
impl Reply for virtio_rdma_rsp_create_srq {}
impl Reply for virtio_rdma_rsp_resize_srq {}
impl Reply for virtio_rdma_rsp_alloc_xrcd {}

impl Reply for virtio_rdma_rsp_query_port {
    fn reserved() -> Vec<Range<usize>> {
        let one = [
            offset_of!(Self, reserved_03),
            offset_of!(Self, reserved_1f),
            offset_of!(Self, reserved_23),
        ];
        let rest = offset_of!(Self, reserved)..size_of::<Self>();
        one.into_iter().map(|at| at..at + 1).chain([rest]).collect()
    }
}

impl Reply for virtio_rdma_rsp_query_qp {
    fn reserved() -> Vec<Range<usize>> {
        let attr = offset_of!(Self, attr);
        let ahs = [
            offset_of!(virtio_rdma_qp_attr, ah_attr),
            offset_of!(virtio_rdma_qp_attr, alt_ah_attr),
        ];
        let tail = offset_of!(virtio_rdma_ah_attr, reserved_22);
        let route = offset_of!(virtio_rdma_ah_attr, grh)
            + offset_of!(virtio_rdma_global_route, reserved_17);
        let one = attr + offset_of!(virtio_rdma_qp_attr, reserved_27);
        let of_ah = |ah: usize| {
            [attr + ah + route..attr + ah + route + 1, attr + ah + tail..attr + ah + tail + 6]
        };
        std::iter::once(one..one + 1).chain(ahs.into_iter().flat_map(of_ah)).collect()
    }
}

impl Reply for virtio_rdma_rsp_query_counters {
    fn reserved() -> Vec<Range<usize>> {
        std::iter::once(offset_of!(Self, reserved)..size_of::<Self>()).collect()
    }
}

impl Reply for virtio_rdma_rsp_query_srq {
    fn reserved() -> Vec<Range<usize>> {
        std::iter::once(offset_of!(Self, reserved_0c)..size_of::<Self>()).collect()
    }
}

/// Returns the reserved bytes of the configuration space.
pub fn reserved_of_config() -> Vec<Range<usize>> {
    type C = virtio_rdma_config;
    vec![
        offset_of!(C, reserved_38)..offset_of!(C, max_send_sge),
        offset_of!(C, reserved_68)..offset_of!(C, max_mw),
        offset_of!(C, reserved_84)..offset_of!(C, max_pkeys),
        offset_of!(C, reserved_8b)..offset_of!(C, features),
        offset_of!(C, reserved_9e)..offset_of!(C, num_comp_vectors),
        offset_of!(C, reserved_c4)..offset_of!(C, fw_ver),
        offset_of!(C, reserved_d0)..size_of::<C>(),
    ]
}

/// Returns the name of a status.
pub fn status_name(status: u32) -> String {
    const NAMES: [&str; 12] = [
        "OK",
        "ERR",
        "INVAL",
        "NO_OBJECT",
        "NO_RESOURCE",
        "BUSY",
        "UNSUPPORTED",
        "PERM",
        "FAULT",
        "LENGTH",
        "STATE",
        "EXISTS",
    ];
    let name = NAMES.get(status as usize);
    name.map_or_else(|| format!("status {status}"), |name| (*name).to_owned())
}

/// Returns the name of the status of a CQE.
pub fn wc_name(status: u32) -> String {
    const NAMES: [&str; 14] = [
        "SUCCESS",
        "LOC_LEN_ERR",
        "LOC_QP_OP_ERR",
        "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "MW_BIND_ERR",
        "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
        "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR",
    ];
    let name = NAMES.get(status as usize);
    name.map_or_else(|| format!("status {status}"), |name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_numbers() {
        assert_eq!(status_name(VIRTIO_RDMA_STATUS_EXISTS), "EXISTS");
        assert_eq!(status_name(VIRTIO_RDMA_STATUS_LENGTH), "LENGTH");
        assert_eq!(wc_name(VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR), "RNR_RETRY_EXC_ERR");
        assert_eq!(wc_name(VIRTIO_RDMA_WC_WR_FLUSH_ERR), "WR_FLUSH_ERR");
    }
}
