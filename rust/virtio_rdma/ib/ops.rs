// SPDX-License-Identifier: GPL-2.0

//! The table of the operations that the RDMA core calls.
//!
//! The RDMA core alone calls these functions, by the table of a device that is
//! registered ([`super::registration::Registration`]), and so with objects of this
//! driver. An object that is made is zeroed memory of the core's, of the size in
//! the table, in which the core has set its own members; one that exists has gone
//! through the function that makes it, and goes through the one that ends
//! it once.

use super::{
    ah,
    cq,
    device,
    mad,
    mr,
    mw,
    object::{
        Ah,
        Cq,
        Mw,
        Pd,
        Qp,
        Srq,
        Ucontext,
        Xrcd, //
    },
    pd,
    port,
    qp,
    srq,
    stats,
    ucontext,
    xrcd,
    Driver, //
};
use crate::bindings;

/// Defines the functions of a driver that C calls for the operations which take an enum of C. Bindgen makes an
/// integer of the enum, so that a kernel with CONFIG_CFI sees another type than that by which the core calls: the
/// table has functions of C (rust/helpers/helpers.c), and those call these.
macro_rules! operations_with_enums {
    ($driver:ty) => {
        /// Does what [`ib::req_notify_cq`] does.
        ///
        /// # Safety
        ///
        /// Only `virtio_rdma_req_notify_cq()` may call it, for the RDMA core.
        #[no_mangle]
        unsafe extern "C" fn virtio_rdma_rust_req_notify_cq(
            cq: *mut $crate::bindings::ib_cq,
            flags: u32,
        ) -> ::kernel::ffi::c_int {
            // SAFETY: The caller passes on what the RDMA core called it with.
            unsafe { $crate::ib::req_notify_cq::<$driver>(cq, flags) }
        }

        /// Does what [`ib::modify_srq`] does.
        ///
        /// # Safety
        ///
        /// Only `virtio_rdma_modify_srq()` may call it, for the RDMA core.
        #[no_mangle]
        unsafe extern "C" fn virtio_rdma_rust_modify_srq(
            srq: *mut $crate::bindings::ib_srq,
            attr: *mut $crate::bindings::ib_srq_attr,
            mask: u32,
            udata: *mut $crate::bindings::ib_udata,
        ) -> ::kernel::ffi::c_int {
            // SAFETY: The caller passes on what the RDMA core called it with.
            unsafe { $crate::ib::modify_srq::<$driver>(srq, attr, mask, udata) }
        }

        /// Does what [`ib::alloc_mr`] does.
        ///
        /// # Safety
        ///
        /// Only `virtio_rdma_alloc_mr()` may call it, for the RDMA core.
        #[no_mangle]
        unsafe extern "C" fn virtio_rdma_rust_alloc_mr(
            pd: *mut $crate::bindings::ib_pd,
            mr_type: u32,
            max_num_sg: u32,
        ) -> *mut $crate::bindings::ib_mr {
            // SAFETY: The caller passes on what the RDMA core called it with.
            unsafe { $crate::ib::alloc_mr::<$driver>(pd, mr_type, max_num_sg) }
        }
    };
}
pub(crate) use operations_with_enums;

/// Returns the commands of uverbs by which the kernel posts and polls for a program.
pub(super) fn uverbs_cmd_mask() -> u64 {
    [
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SEND,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_RECV,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SRQ_RECV,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POLL_CQ,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_REQ_NOTIFY_CQ,
    ]
    .iter()
    .fold(0, |mask, command| mask | 1 << command)
}

/// Returns the table of operations of a driver.
pub(super) fn table<D: Driver>() -> bindings::ib_device_ops {
    bindings::ib_device_ops {
        driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
        uverbs_abi_ver: D::UVERBS_ABI_VERSION,
        post_send: Some(qp::post_send::<D>),
        post_recv: Some(qp::post_recv::<D>),
        poll_cq: Some(cq::poll_cq::<D>),
        req_notify_cq: Some(bindings::virtio_rdma_req_notify_cq),
        query_device: Some(device::query_device::<D>),
        modify_device: Some(device::modify_device),
        get_dev_fw_str: Some(device::get_dev_fw_str),
        query_port: Some(port::query_port::<D>),
        query_port_speed: Some(port::query_port_speed::<D>),
        get_port_immutable: Some(port::get_port_immutable::<D>),
        get_link_layer: Some(bindings::virtio_rdma_get_link_layer),
        add_gid: Some(port::add_gid::<D>),
        del_gid: Some(port::del_gid::<D>),
        query_pkey: Some(port::query_pkey::<D>),
        alloc_ucontext: Some(ucontext::alloc_ucontext::<D>),
        dealloc_ucontext: Some(ucontext::dealloc_ucontext::<D>),
        query_ucontext: Some(ucontext::query_ucontext::<D>),
        disassociate_ucontext: Some(ucontext::disassociate_ucontext),
        alloc_pd: Some(pd::alloc_pd::<D>),
        dealloc_pd: Some(pd::dealloc_pd::<D>),
        create_ah: Some(ah::create_ah::<D>),
        create_user_ah: Some(ah::create_ah::<D>),
        query_ah: Some(ah::query_ah::<D>),
        destroy_ah: Some(ah::destroy_ah::<D>),
        create_qp: Some(qp::create_qp::<D>),
        modify_qp: Some(qp::modify_qp::<D>),
        query_qp: Some(qp::query_qp::<D>),
        destroy_qp: Some(qp::destroy_qp::<D>),
        create_srq: Some(srq::create_srq::<D>),
        modify_srq: Some(bindings::virtio_rdma_modify_srq),
        query_srq: Some(srq::query_srq::<D>),
        destroy_srq: Some(srq::destroy_srq::<D>),
        post_srq_recv: Some(srq::post_srq_recv::<D>),
        alloc_xrcd: Some(xrcd::alloc_xrcd::<D>),
        dealloc_xrcd: Some(xrcd::dealloc_xrcd::<D>),
        create_cq: Some(cq::create_cq::<D>),
        create_user_cq: Some(cq::create_cq::<D>),
        destroy_cq: Some(cq::destroy_cq::<D>),
        modify_cq: Some(cq::modify_cq::<D>),
        resize_user_cq: Some(cq::resize_user_cq::<D>),
        get_dma_mr: Some(mr::get_dma_mr::<D>),
        reg_user_mr: Some(mr::reg_user_mr::<D>),
        reg_user_mr_dmabuf: Some(mr::reg_user_mr_dmabuf::<D>),
        rereg_user_mr: Some(mr::rereg_user_mr::<D>),
        alloc_mr: Some(bindings::virtio_rdma_alloc_mr),
        map_mr_sg: Some(mr::map_mr_sg::<D>),
        dereg_mr: Some(mr::dereg_mr::<D>),
        alloc_mw: Some(mw::alloc_mw::<D>),
        dealloc_mw: Some(mw::dealloc_mw::<D>),
        attach_mcast: Some(qp::attach_mcast::<D>),
        detach_mcast: Some(qp::detach_mcast::<D>),
        process_mad: Some(mad::process_mad::<D>),
        fill_res_cq_entry: Some(cq::fill_res_cq_entry::<D>),
        fill_res_mr_entry: Some(mr::fill_res_mr_entry::<D>),
        fill_res_qp_entry: Some(qp::fill_res_qp_entry::<D>),
        fill_res_srq_entry: Some(srq::fill_res_srq_entry::<D>),
        alloc_hw_port_stats: Some(stats::alloc_hw_port_stats::<D>),
        get_hw_stats: Some(stats::get_hw_stats::<D>),
        size_ib_ah: Ah::<D>::SIZE,
        size_ib_cq: Cq::<D>::SIZE,
        size_ib_mw: Mw::<D>::SIZE,
        size_ib_pd: Pd::<D>::SIZE,
        size_ib_qp: Qp::<D>::SIZE,
        size_ib_srq: Srq::<D>::SIZE,
        size_ib_ucontext: Ucontext::<D>::SIZE,
        size_ib_xrcd: Xrcd::<D>::SIZE,
        ..Default::default()
    }
}
