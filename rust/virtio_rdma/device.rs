// SPDX-License-Identifier: GPL-2.0

//! The verbs of the device: its attributes, and the type that implements each kind of object.

#![deny(unsafe_code)]

use crate::{
    ah::Ah,
    bindings,
    config::{
        Atomics,
        Config, //
    },
    cq::Cq,
    hca::Hca,
    ib,
    mr::Mr,
    mw::Mw,
    pd::Pd,
    pma,
    port,
    qp::Qp,
    srq::Srq,
    stats,
    ucontext::{
        self,
        Ucontext, //
    },
    xrcd::Xrcd, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The capabilities of each device.
const CAP_FLAGS: u64 = (bindings::ib_device_cap_flags_IB_DEVICE_BAD_PKEY_CNTR
    | bindings::ib_device_cap_flags_IB_DEVICE_BAD_QKEY_CNTR
    | bindings::ib_device_cap_flags_IB_DEVICE_SYS_IMAGE_GUID
    | bindings::ib_device_cap_flags_IB_DEVICE_RC_RNR_NAK_GEN) as u64;

/// The capability that goes with VIRTIO_RDMA_F_SRQ_RESIZE.
const SRQ_CAP_FLAGS: u64 = bindings::ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE as u64;

/// The capability that goes with VIRTIO_RDMA_F_XRC.
const XRC_CAP_FLAGS: u64 = bindings::ib_device_cap_flags_IB_DEVICE_XRC as u64;

/// The capability that goes with VIRTIO_RDMA_F_FAST_REG.
const FAST_REG_CAP_FLAGS: u64 = bindings::ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS as u64;

/// The capabilities that go with VIRTIO_RDMA_F_MW.
const MW_CAP_FLAGS: u64 = (bindings::ib_device_cap_flags_IB_DEVICE_MEM_WINDOW
    | bindings::ib_device_cap_flags_IB_DEVICE_MEM_WINDOW_TYPE_2B) as u64;

/// The capability that goes with VIRTIO_RDMA_F_FLUSH.
const FLUSH_CAP_FLAGS: u64 = bindings::ib_device_cap_flags_IB_DEVICE_FLUSH_GLOBAL as u64;

/// The capability that goes with VIRTIO_RDMA_F_ATOMIC_WRITE.
const ATOMIC_WRITE_CAP_FLAGS: u64 = bindings::ib_device_cap_flags_IB_DEVICE_ATOMIC_WRITE as u64;

/// The capability that goes with VIRTIO_RDMA_F_MCAST: a QP need not get its own datagrams. The kernel does not name it.
const MCAST_CAP_FLAGS: u64 = 1 << 22;

/// Returns the capabilities of a device, which follow from the features that are agreed on.
fn capabilities(config: &Config) -> u64 {
    [
        (config.fast_reg.is_some(), FAST_REG_CAP_FLAGS),
        (config.srq_resize, SRQ_CAP_FLAGS),
        (config.xrc, XRC_CAP_FLAGS),
        (config.max_mw != 0, MW_CAP_FLAGS),
        (config.flush, FLUSH_CAP_FLAGS),
        (config.atomic_write, ATOMIC_WRITE_CAP_FLAGS),
        (config.mcast.is_some(), MCAST_CAP_FLAGS),
    ]
    .iter()
    .filter(|(has_it, _)| *has_it)
    .fold(CAP_FLAGS, |all, (_, flags)| all | flags)
}

/// Returns a limit in the type that the attributes of the kernel have: `u32` since Linux 7.3, `int` before. It is no
/// more than an `int` holds, because consumers still use that type.
fn limit<T: TryFrom<u32> + Default>(value: u32) -> T {
    T::try_from(value.min(c_int::MAX as u32)).unwrap_or_default()
}

impl ib::Driver for Hca {
    type Ucontext = Ucontext;
    type Pd = Pd;
    type Cq = Cq;
    type Qp = Qp;
    type Srq = Srq;
    type Xrcd = Xrcd;
    type Ah = Ah;
    type Mr = Mr;
    type Mw = Mw;

    const NAME: &'static CStr = c"virtio_rdma%d";
    const UVERBS_ABI_VERSION: u32 = bindings::VIRTIO_RDMA_UVERBS_ABI_VERSION;
    const UAPI: ib::UapiDefinitions = ucontext::UAPI;
    const STATS: &'static [ib::StatDesc] = stats::DESCRIPTIONS;

    fn bad_number(self: &Arc<Self>) {
        Hca::bad_number(self);
    }

    fn published(self: &Arc<Self>) {
        // Hca::run() may have looked at all objects before this one was there.
        if self.is_broken() {
            self.attend();
        }
    }

    fn query_device(self: &Arc<Self>, attr: &mut bindings::ib_device_attr) -> Result {
        let config = self.config();

        attr.sys_image_guid = u64::from_ne_bytes(config.sys_image_guid);
        attr.vendor_id = config.vendor_id;
        attr.vendor_part_id = config.vendor_part_id;
        attr.hw_ver = config.hw_ver;
        attr.fw_ver = config.fw_ver;
        attr.max_mr_size = config.max_mr_size;
        attr.page_size_cap = config.page_size_cap;
        attr.max_qp = limit(config.max_qp);
        attr.max_qp_wr = limit(self.max_qp_wr());
        attr.device_cap_flags = capabilities(config);
        if let Some(pages) = config.fast_reg {
            attr.max_fast_reg_page_list_len = pages;
        }
        attr.max_send_sge = limit(config.max_send_sge);
        attr.max_recv_sge = limit(config.max_recv_sge);
        // The core divides by it, and targets ask for as many SGEs in any work request.
        attr.max_sge_rd = limit(
            config
                .max_sge_rd
                .min(config.max_send_sge)
                .min(config.max_recv_sge)
                .max(1),
        );
        attr.max_cq = limit(config.max_cq);
        attr.max_cqe = limit(self.max_cqe());
        attr.max_srq = limit(config.max_srq);
        if config.max_srq != 0 {
            attr.max_srq_wr = limit(config.max_srq_wr);
            attr.max_srq_sge = limit(config.max_srq_sge);
        }
        attr.max_mr = limit(config.max_mr);
        attr.max_mw = limit(config.max_mw);
        attr.max_pd = limit(config.max_pd);
        attr.max_qp_rd_atom = limit(config.max_qp_rd_atom);
        attr.max_res_rd_atom = limit(config.max_res_rd_atom);
        attr.max_qp_init_rd_atom = limit(config.max_qp_init_rd_atom);
        attr.atomic_cap = match config.atomics {
            Atomics::None => bindings::ib_atomic_cap_IB_ATOMIC_NONE,
            Atomics::Device => bindings::ib_atomic_cap_IB_ATOMIC_HCA,
            Atomics::Global => bindings::ib_atomic_cap_IB_ATOMIC_GLOB,
        };
        if let Some(mcast) = &config.mcast {
            attr.max_mcast_grp = limit(mcast.max_grp);
            attr.max_mcast_qp_attach = limit(mcast.max_qp_attach);
            attr.max_total_mcast_qp_attach = limit(mcast.max_total_qp_attach);
        }
        if config.cq_moderation {
            attr.cq_caps.max_cq_moderation_count = u16::MAX;
            attr.cq_caps.max_cq_moderation_period = u16::MAX;
        }
        // The driver keeps address handles itself, and their number is limited by memory alone.
        attr.max_ah = limit(u32::MAX);
        attr.max_pkeys = config.max_pkeys;
        attr.local_ca_ack_delay = config.local_ca_ack_delay;
        Ok(())
    }

    fn query_port(dev: &ib::Device<Self>, port: u32, attr: &mut bindings::ib_port_attr) -> Result {
        port::query(dev, port, attr)
    }

    fn port_immutable(
        dev: &ib::Device<Self>,
        port: u32,
        attr: &mut bindings::ib_port_immutable,
    ) -> Result {
        port::immutable(dev, port, attr)
    }

    fn query_pkey(dev: &ib::Device<Self>, port: u32, index: u16) -> Result<u16> {
        port::pkey(dev.data(), port, index)
    }

    fn add_gid(dev: &ib::Device<Self>, gid: &ib::GidAttr<'_>) -> Result {
        port::add_gid(dev.data(), gid)
    }

    fn del_gid(dev: &ib::Device<Self>, gid: &ib::GidAttr<'_>) -> Result {
        port::del_gid(dev.data(), gid)
    }

    fn perf_mad(dev: &ib::Device<Self>, request: &ib::PerfMad, reply: &mut ib::PerfMad) -> Result {
        pma::answer(dev.data(), request, reply)
    }

    fn stat(&self, index: usize) -> u64 {
        self.stats().value(index)
    }
}
