// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The status of a work request that has ended.

use super::counters::{Counter, Stats};

/// The statuses of `enum virtio_rdma_wc_status` with which the device completes work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum WcStatus {
    Success = abi::VIRTIO_RDMA_WC_SUCCESS as u8,
    LocalLength = abi::VIRTIO_RDMA_WC_LOC_LEN_ERR as u8,
    LocalQpOperation = abi::VIRTIO_RDMA_WC_LOC_QP_OP_ERR as u8,
    LocalProtection = abi::VIRTIO_RDMA_WC_LOC_PROT_ERR as u8,
    Flushed = abi::VIRTIO_RDMA_WC_WR_FLUSH_ERR as u8,
    MwBind = abi::VIRTIO_RDMA_WC_MW_BIND_ERR as u8,
    LocalAccess = abi::VIRTIO_RDMA_WC_LOC_ACCESS_ERR as u8,
    RemoteInvalidRequest = abi::VIRTIO_RDMA_WC_REM_INV_REQ_ERR as u8,
    RemoteAccess = abi::VIRTIO_RDMA_WC_REM_ACCESS_ERR as u8,
    RemoteOperation = abi::VIRTIO_RDMA_WC_REM_OP_ERR as u8,
    RetryExceeded = abi::VIRTIO_RDMA_WC_RETRY_EXC_ERR as u8,
    RnrRetryExceeded = abi::VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR as u8,
    General = abi::VIRTIO_RDMA_WC_GENERAL_ERR as u8,
}

impl WcStatus {
    /// Returns the number of the status in a CQE.
    #[inline]
    pub fn to_abi(self) -> u8 {
        self as u8
    }

    /// Counts a CQE with this status, if the status is an error.
    pub fn count(self, stats: &Stats) {
        let counter = match self {
            Self::LocalLength => Counter::LocalLength,
            Self::LocalQpOperation => Counter::LocalQpOperation,
            Self::LocalProtection => Counter::LocalProtection,
            Self::LocalAccess => Counter::LocalAccess,
            Self::Flushed => Counter::Flushed,
            Self::MwBind => Counter::MemoryManagement,
            Self::RemoteInvalidRequest => Counter::RemoteInvalidRequest,
            Self::RemoteAccess => Counter::RemoteAccess,
            Self::RemoteOperation => Counter::RemoteOperation,
            Self::RetryExceeded => Counter::RetryExceeded,
            Self::RnrRetryExceeded => Counter::RnrRetryExceeded,
            Self::Success | Self::General => return,
        };
        stats.add(counter, 1);
    }
}
