// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration of a device: its parameters, its features, and its configuration space.

use std::sync::Arc;

use abi::{
    virtio_rdma_config, VIRTIO_RDMA_F_ATOMICS, VIRTIO_RDMA_F_ATOMICS_GLOBAL,
    VIRTIO_RDMA_F_ATOMIC_WRITE, VIRTIO_RDMA_F_COUNTERS, VIRTIO_RDMA_F_CQ_MODERATION,
    VIRTIO_RDMA_F_CQ_RESIZE, VIRTIO_RDMA_F_EVENTS, VIRTIO_RDMA_F_FAST_REG, VIRTIO_RDMA_F_FLUSH,
    VIRTIO_RDMA_F_MAC, VIRTIO_RDMA_F_MCAST, VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_PAGE_LEVELS,
    VIRTIO_RDMA_F_PAGE_SIZES, VIRTIO_RDMA_F_REREG_MR, VIRTIO_RDMA_F_RESET_TO_RTR,
    VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_SRQ_RESIZE, VIRTIO_RDMA_F_UC,
    VIRTIO_RDMA_F_VIRTQUEUES, VIRTIO_RDMA_F_VLAN, VIRTIO_RDMA_F_XRC, VIRTIO_RDMA_MAGIC,
    VIRTIO_RDMA_REVISION,
};
use zerocopy::{transmute, FromZeros};

use crate::base::address::guid;
use crate::base::host::Wake;
use crate::base::limits::{Limits, MAX_FAST_REG_PAGES, MAX_SGE};
use crate::base::queues::Paths;
use crate::base::quota::Quota;
use crate::base::traffic_class::TrafficClasses;
use crate::memory::page_list::PAGE_SIZES;
use crate::transport::rights::AddressRights;

/// Vendor and part that the configuration space names: the virtio vendor, and
/// the device ID.
const VENDOR_ID: u32 = 0x1af4;
const VENDOR_PART_ID: u32 = abi::VIRTIO_RDMA_DEVICE_ID;

/// The policy of an administrator for a guest. It may change while the device runs ([`crate::Device::set_policy`]).
#[derive(Clone, Debug, Default)]
pub struct DevicePolicy {
    /// The addresses that the guest may use.
    pub addresses: AddressRights,
    /// The classes of traffic that its packets may be in.
    pub classes: TrafficClasses,
    /// The part of the device's limits that the guest may use.
    pub quota: Quota,
}

/// The parameters of the device of one guest.
pub struct DeviceConfig {
    /// The guest's name, for logs.
    pub name: String,
    /// MAC address of the paired network interface.
    pub mac: Option<[u8; 6]>,
    /// The limits of the device.
    pub limits: Limits,
    /// The policy for the guest, until another one is set.
    pub policy: DevicePolicy,
    /// The data paths that are offered. The features that need one of them go with it.
    pub paths: Paths,
    /// Makes the guest's thread call [`crate::Device::run`].
    pub wake: Arc<dyn Wake>,
}

/// The version of this implementation, as `fw_ver` has it.
const VERSION: u64 = version(env!("CARGO_PKG_VERSION"));

/// Returns the number of a version of three parts.
const fn version(text: &str) -> u64 {
    let (mut whole, mut part, mut at) = (0, 0, 0);
    // A constant function has no `for`.
    while at < text.len() {
        match text.as_bytes()[at] {
            b'.' => (whole, part) = (whole << 16 | part, 0),
            digit @ b'0'..=b'9' => part = part * 10 + (digit - b'0') as u64,
            _ => panic!("a version has three numbers"),
        }
        at += 1;
    }
    whole << 16 | part
}

/// Returns the device-specific feature bits of a device.
pub(crate) fn features(mac: Option<[u8; 6]>, paths: Paths) -> u64 {
    let Paths { rings, virtqueues } = paths;
    1 << VIRTIO_RDMA_F_FAST_REG
        | 1 << VIRTIO_RDMA_F_REREG_MR
        | 1 << VIRTIO_RDMA_F_PAGE_LEVELS
        | 1 << VIRTIO_RDMA_F_PAGE_SIZES
        | 1 << VIRTIO_RDMA_F_RESET_TO_RTR
        | 1 << VIRTIO_RDMA_F_MCAST
        | 1 << VIRTIO_RDMA_F_COUNTERS
        | 1 << VIRTIO_RDMA_F_VLAN
        | 1 << VIRTIO_RDMA_F_UC
        | 1 << VIRTIO_RDMA_F_ATOMICS
        | 1 << VIRTIO_RDMA_F_ATOMICS_GLOBAL
        | u64::from(mac.is_some()) << VIRTIO_RDMA_F_MAC
        | u64::from(virtqueues) << VIRTIO_RDMA_F_VIRTQUEUES
        | u64::from(virtqueues) << VIRTIO_RDMA_F_EVENTS
        | u64::from(rings) << VIRTIO_RDMA_F_RINGS
        | u64::from(rings) << VIRTIO_RDMA_F_SRQ
        | u64::from(rings) << VIRTIO_RDMA_F_XRC
        | u64::from(rings) << VIRTIO_RDMA_F_MW
        | u64::from(rings) << VIRTIO_RDMA_F_FLUSH
        | u64::from(rings) << VIRTIO_RDMA_F_ATOMIC_WRITE
        | u64::from(rings) << VIRTIO_RDMA_F_CQ_MODERATION
        | u64::from(rings) << VIRTIO_RDMA_F_SRQ_RESIZE
        | u64::from(rings) << VIRTIO_RDMA_F_CQ_RESIZE
}

/// Returns the configuration space of a device whose node GUID is made from the MAC address `node`.
pub(crate) fn config_space(
    limits: &Limits,
    paths: Paths,
    mac: Option<[u8; 6]>,
    node: [u8; 6],
) -> [u8; 256] {
    let mut config = virtio_rdma_config::new_zeroed();
    let rd_atomic = u32::from(limits.max_rd_atomic);
    let sge = MAX_SGE as u32;
    config.phys_port_cnt = 1;
    config.magic = VIRTIO_RDMA_MAGIC;
    config.sys_image_guid = u64::from_ne_bytes(guid(node));
    config.vendor_id = VENDOR_ID;
    config.vendor_part_id = VENDOR_PART_ID;
    config.hw_ver = 1;
    config.revision = VIRTIO_RDMA_REVISION;
    config.fw_ver = VERSION;
    config.max_mr_size = limits.max_mr_size;
    config.page_size_cap = PAGE_SIZES;
    config.max_send_sge = sge;
    config.max_recv_sge = sge;
    config.max_sge_rd = sge;
    config.max_mr = limits.max_mr;
    config.max_pd = limits.max_pd;
    config.max_qp_rd_atom = rd_atomic;
    let qps = [(paths.virtqueues, limits.max_qp), (paths.rings, limits.ring_qp)];
    let qps = qps.iter().filter(|(is_offered, _)| *is_offered).map(|(_, qps)| *qps).max();
    config.max_res_rd_atom = rd_atomic * u32::from(qps.unwrap_or(0));
    config.max_qp_init_rd_atom = rd_atomic;
    config.max_mcast_grp = limits.max_mcast_grp;
    config.max_mcast_qp_attach = limits.max_mcast_qp_attach;
    config.max_total_mcast_qp_attach = limits.max_mcast_attach;
    config.max_ah = limits.max_ah;
    config.max_fast_reg_page_list_len = MAX_FAST_REG_PAGES as u32;
    config.max_pkeys = 1;
    config.local_ca_ack_delay = 15;
    config.features = features(mac, paths);
    config.mac = mac.unwrap_or_default();
    if paths.virtqueues {
        config.max_qp = limits.max_qp.into();
        config.max_qp_wr = limits.wq_size.into();
        config.max_cq = limits.max_cq.into();
        config.max_cqe = limits.cq_size.into();
    }
    if paths.rings {
        config.num_comp_vectors = limits.comp_vectors.into();
        config.ring_max_qp = limits.ring_qp.into();
        config.ring_max_cq = limits.ring_cq.into();
        config.ring_max_qp_wr = limits.ring_wr;
        config.ring_max_cqe = limits.ring_cqe;
        config.ring_max_inline_data = limits.inline_data.into();
        config.max_mw = limits.max_mw;
        config.max_srq = limits.max_srq.into();
        config.max_srq_wr = limits.ring_wr;
        config.max_srq_sge = sge;
    }
    transmute!(config)
}
