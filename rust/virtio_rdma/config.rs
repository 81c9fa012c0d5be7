// SPDX-License-Identifier: GPL-2.0

//! The configuration space: read once, checked, and kept as the limits of the
//! device (chapter 4 of the specification).

#![deny(unsafe_code)]

use crate::{
    bindings,
    virtio, //
};
use core::mem::offset_of;
use kernel::{
    device,
    prelude::*, //
};

/// The most SGEs of a work request that the driver lays out buffers for.
const MAX_SGE: u32 = 32;

/// The most queues that virtio can number.
const MAX_QUEUES: u64 = u16::MAX as u64 + 1;

/// The limits and attributes of a device, all of them checked.
pub(crate) struct Config {
    /// GUID of the system image, in network order.
    pub(crate) sys_image_guid: [u8; 8],
    /// IEEE OUI of the vendor.
    pub(crate) vendor_id: u32,
    /// The vendor's part number.
    pub(crate) vendor_part_id: u32,
    /// Version of the device.
    pub(crate) hw_ver: u32,
    /// Largest MR, in bytes.
    pub(crate) max_mr_size: u64,
    /// Page sizes, bit n for 2^n bytes.
    pub(crate) page_size_cap: u64,
    /// Number of QPs.
    pub(crate) max_qp: u32,
    /// Work requests of one queue; clamped to the rings when these are known.
    pub(crate) max_qp_wr: u32,
    /// `VIRTIO_RDMA_CAP_*`.
    pub(crate) device_cap_flags: u64,
    /// SGEs of a send work request.
    pub(crate) max_send_sge: u32,
    /// SGEs of a receive work request.
    pub(crate) max_recv_sge: u32,
    /// SGEs of an RDMA READ.
    pub(crate) max_sge_rd: u32,
    /// Number of CQs.
    pub(crate) max_cq: u32,
    /// Entries of a CQ; clamped to the rings when these are known.
    pub(crate) max_cqe: u32,
    /// Number of MRs.
    pub(crate) max_mr: u32,
    /// Number of PDs.
    pub(crate) max_pd: u32,
    /// READs and atomics that a QP serves.
    pub(crate) max_qp_rd_atom: u32,
    /// READs and atomics that the device serves.
    pub(crate) max_res_rd_atom: u32,
    /// READs and atomics that a QP has under way.
    pub(crate) max_qp_init_rd_atom: u32,
    /// `enum ib_atomic_cap`.
    pub(crate) atomic_cap: u8,
    /// Number of AHs.
    pub(crate) max_ah: u32,
    /// Entries of the P_Key table.
    pub(crate) max_pkeys: u16,
    /// Local CA ACK Delay.
    pub(crate) local_ca_ack_delay: u8,
    /// MAC address of the paired network interface.
    pub(crate) mac: Option<[u8; 6]>,
    /// Whether there is an event queue.
    pub(crate) has_events: bool,
}

/// Reads a field of the configuration in one access of its width.
macro_rules! field {
    ($dev:expr, $name:ident: $type:ty) => {
        <$type>::from_le_bytes($dev.config(offset_of!(bindings::virtio_rdma_config, $name)))
    };
}

impl Config {
    /// Reads and checks the configuration of a device. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a configuration that cannot work; the log says why.
    pub(crate) fn read(dev: &virtio::Device<device::Core<'_>>) -> Result<Self> {
        Self::check_port(dev)?;
        let config = Self {
            sys_image_guid: dev.config(offset_of!(bindings::virtio_rdma_config, sys_image_guid)),
            vendor_id: field!(dev, vendor_id: u32),
            vendor_part_id: field!(dev, vendor_part_id: u32),
            hw_ver: field!(dev, hw_ver: u32),
            max_mr_size: field!(dev, max_mr_size: u64),
            page_size_cap: field!(dev, page_size_cap: u64),
            max_qp: field!(dev, max_qp: u32),
            max_qp_wr: field!(dev, max_qp_wr: u32),
            device_cap_flags: field!(dev, device_cap_flags: u64),
            max_send_sge: field!(dev, max_send_sge: u32).min(MAX_SGE),
            max_recv_sge: field!(dev, max_recv_sge: u32).min(MAX_SGE),
            max_sge_rd: field!(dev, max_sge_rd: u32),
            max_cq: field!(dev, max_cq: u32),
            max_cqe: field!(dev, max_cqe: u32),
            max_mr: field!(dev, max_mr: u32),
            max_pd: field!(dev, max_pd: u32),
            max_qp_rd_atom: field!(dev, max_qp_rd_atom: u32),
            max_res_rd_atom: field!(dev, max_res_rd_atom: u32),
            max_qp_init_rd_atom: field!(dev, max_qp_init_rd_atom: u32),
            atomic_cap: field!(dev, atomic_cap: u8),
            max_ah: field!(dev, max_ah: u32),
            max_pkeys: field!(dev, max_pkeys: u16),
            local_ca_ack_delay: field!(dev, local_ca_ack_delay: u8),
            mac: dev
                .has_feature(bindings::VIRTIO_RDMA_F_MAC)
                .then(|| Self::read_mac(dev)),
            has_events: dev.has_feature(bindings::VIRTIO_RDMA_F_EVENTS),
        };
        config.check(dev)?;
        Ok(config)
    }

    fn read_mac(dev: &virtio::Device<device::Core<'_>>) -> [u8; 6] {
        let offset = offset_of!(bindings::virtio_rdma_config, mac);
        let mut mac = [0; 6];
        for (i, byte) in mac.iter_mut().enumerate() {
            [*byte] = dev.config(offset + i);
        }
        mac
    }

    fn check_port(dev: &virtio::Device<device::Core<'_>>) -> Result {
        let ports = field!(dev, phys_port_cnt: u32);
        if ports != 1 {
            dev_err!(dev.as_ref(), "the device has {} ports, not 1\n", ports);
            return Err(EINVAL);
        }
        Ok(())
    }

    fn check(&self, dev: &virtio::Device<device::Core<'_>>) -> Result {
        for (name, value) in [
            ("max_qp", self.max_qp),
            ("max_cq", self.max_cq),
            ("max_pd", self.max_pd),
            ("max_mr", self.max_mr),
            ("max_qp_wr", self.max_qp_wr),
            ("max_cqe", self.max_cqe),
            ("max_send_sge", self.max_send_sge),
            ("max_recv_sge", self.max_recv_sge),
        ] {
            if value == 0 {
                dev_err!(dev.as_ref(), "the device's configuration has {} 0\n", name);
                return Err(EINVAL);
            }
        }
        if self.page_size_cap & 1 << bindings::VIRTIO_RDMA_PAGE_SHIFT == 0 {
            dev_err!(dev.as_ref(), "the device has no pages of 4 KiB\n");
            return Err(EINVAL);
        }
        if self.queues() > MAX_QUEUES {
            dev_err!(
                dev.as_ref(),
                "{} CQs and {} QPs need more virtqueues than there can be\n",
                self.max_cq,
                self.max_qp
            );
            return Err(EINVAL);
        }
        Ok(())
    }

    /// The number of virtqueues, chapter 2 of the specification.
    pub(crate) fn queues(&self) -> u64 {
        1 + u64::from(self.max_cq) + 2 * u64::from(self.max_qp) + u64::from(self.has_events)
    }

    /// The virtqueue of CQ `cqn`; `None` if there is no such CQ.
    pub(crate) fn cq_queue(&self, cqn: u32) -> Option<u32> {
        (cqn < self.max_cq).then(|| 1 + cqn)
    }

    /// The virtqueue of the send queue of QP `qpn`, which that of its receive queue follows;
    /// `None` if there is no such QP.
    pub(crate) fn sq_queue(&self, qpn: u32) -> Option<u32> {
        (1..=self.max_qp)
            .contains(&qpn)
            .then(|| 1 + self.max_cq + 2 * (qpn - 1))
    }

    /// The event queue, if there is one.
    pub(crate) fn event_queue(&self) -> Option<u32> {
        self.has_events.then(|| 1 + self.max_cq + 2 * self.max_qp)
    }
}
