// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of queue pairs.

use super::message::{exchange, exchange_core};
#[cfg(test)]
use crate::model::kernel::{ibv_cmd_post_recv, ibv_cmd_post_send};
use crate::{
    bindings::*,
    causes::{Cause, cause},
    errno::{Errno, Result},
    libibverbs::*,
    log::Refuse,
    object::Ref,
};
use core::{ffi::c_int, ptr};

/// Creates a QP in `pd`, which `attr` names too, fills in `qp`, and writes to
/// `attr.cap` what it really has. With `rings`, the program has its rings.
pub fn create(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_qp_init_attr_ex,
    qp: Ref<'_, verbs_qp>,
    rings: Option<virtio_rdma_ureq_create_qp>,
) -> Result {
    // SAFETY: `exchange` lends buffers of these lengths, and `cmd` begins with the core's
    // structure; the program names live CQs in `attr`: ibv_create_qp(3).
    exchange(rings, |cmd, len, resp, resp_len| unsafe {
        ibv_cmd_create_qp_ex2(
            pd.context().verbs().as_ptr(),
            qp.as_ptr(),
            attr,
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

fn no_xrcd() -> Cause {
    cause!(EINVAL, "an XRC target without an XRC domain is wanted")
}

/// Creates an XRC target, a QP without rings, and fills in `qp`.
///
/// # Errors
///
/// EINVAL without an XRC domain; the kernel's.
pub fn create_xrc_target(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_init_attr_ex,
    qp: Ref<'_, verbs_qp>,
) -> Result {
    if attr.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || attr.xrcd.is_null() {
        return Err(context.refuse(no_xrcd()));
    }
    // SAFETY: `exchange_core` lends buffers of these lengths; the program names a live XRC domain,
    // which is not null: ibv_create_qp_ex(3).
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_create_qp_ex(context.as_ptr(), qp.as_ptr(), attr, cmd, len, resp, resp_len)
    })
}

/// Opens the XRC target that has a number in an XRC domain, and fills in `qp`.
///
/// # Errors
///
/// EINVAL without an XRC domain; the kernel's.
pub fn open(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_open_attr,
    qp: Ref<'_, verbs_qp>,
) -> Result {
    if attr.comp_mask & IBV_QP_OPEN_ATTR_XRCD == 0 || attr.xrcd.is_null() {
        return Err(context.refuse(no_xrcd()));
    }
    // SAFETY: `exchange_core` lends buffers of these lengths, and `qp` has room for all of a
    // `struct verbs_qp`; the program names a live XRC domain, which is not null: ibv_open_qp(3).
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_open_qp(
            context.as_ptr(),
            qp.as_ptr(),
            size_of::<verbs_qp>() as c_int,
            attr,
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

/// Changes the attributes of a QP that `mask` names (`IBV_QP_*`).
pub fn modify(qp: Ref<'_, ibv_qp>, attr: &mut ibv_qp_attr, mask: c_int) -> Result {
    let mut cmd = ibv_modify_qp::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_modify_qp(qp.as_ptr(), attr, mask, &mut cmd, size_of_val(&cmd)) })
}

/// Reads the attributes of a QP.
pub fn query(
    qp: Ref<'_, ibv_qp>,
    attr: &mut ibv_qp_attr,
    mask: c_int,
    init: &mut ibv_qp_init_attr,
) -> Result {
    let mut cmd = ibv_query_qp::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe {
        ibv_cmd_query_qp(qp.as_ptr(), attr, mask, init, &mut cmd, size_of_val(&cmd))
    })
}

/// Attaches a QP to a multicast group.
pub fn attach_mcast(qp: Ref<'_, ibv_qp>, gid: &ibv_gid, lid: u16) -> Result {
    // SAFETY: the QP and the GID are valid.
    Errno::check(unsafe { ibv_cmd_attach_mcast(qp.as_ptr(), gid, lid) })
}

/// Detaches a QP from a multicast group.
pub fn detach_mcast(qp: Ref<'_, ibv_qp>, gid: &ibv_gid, lid: u16) -> Result {
    // SAFETY: the QP and the GID are valid.
    Errno::check(unsafe { ibv_cmd_detach_mcast(qp.as_ptr(), gid, lid) })
}

/// Destroys a QP.
pub fn destroy(qp: Ref<'_, ibv_qp>) -> Result {
    // SAFETY: `qp` is a live QP, whose mutex ibv_cmd_create_qp() made.
    Errno::check(unsafe { ibv_cmd_destroy_qp(qp.as_ptr()) })
}

/// Rings the doorbell of the send queue of a QP: POST_SEND without requests.
pub fn ring_send_doorbell(qp: Ref<'_, ibv_qp>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: `qp` is a live QP, and an empty list is valid.
    Errno::check(unsafe { ibv_cmd_post_send(qp.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

/// Rings the doorbell of the receive queue of a QP: POST_RECV without requests.
pub fn ring_recv_doorbell(qp: Ref<'_, ibv_qp>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: `qp` is a live QP, and an empty list is valid.
    Errno::check(unsafe { ibv_cmd_post_recv(qp.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    /// A QP has the number and the capabilities that the kernel answers. The driver is told where the
    /// rings are, if there are rings.
    #[test]
    fn qps() {
        let testbed = Testbed::new();
        for rings in [None, Some(QP_RINGS)] {
            let mut attr = testbed.init(IBV_QPT_RC);
            let qp = object::<verbs_qp>();
            testbed.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 99u32);
            testbed.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_CAP, [10u32, 20, 30, 40, 50]);
            assert_eq!(create(testbed.pd.as_ref(), &mut attr, qp.as_ref(), rings), Ok(()));
            let command = testbed.command(Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE));
            let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
            assert_eq!(driver, rings.as_ref().map(bytes));
            assert!(!command.room.contains_key(&UVERBS_ATTR_UHW_OUT));
            for (attr, handle) in [
                (UVERBS_ATTR_CREATE_QP_PD_HANDLE, PD),
                (UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, CQ),
                (UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, CQ),
                (UVERBS_ATTR_CREATE_QP_SRQ_HANDLE, SRQ),
            ] {
                assert_eq!(command.handle(attr), handle.into());
            }
            assert_eq!(command.input::<[u32; 5]>(UVERBS_ATTR_CREATE_QP_CAP), [1, 2, 3, 4, 5]);
            assert_eq!(qp.as_ref().qp().number(), 99);
            let cap = attr.cap;
            assert_eq!((cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge), (10, 20, 30));
            assert_eq!((cap.max_recv_sge, cap.max_inline_data), (40, 50));
        }
    }

    /// An XRC target is created in an XRC domain only, and the command has no rings.
    #[test]
    fn xrc_targets() {
        let testbed = Testbed::new();
        let (context, qp) = (testbed.context(), object::<verbs_qp>());
        let mut attr = testbed.init(IBV_QPT_XRC_RECV);
        attr.xrcd = testbed.xrcd();
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        attr.comp_mask = IBV_QP_INIT_ATTR_XRCD;
        attr.xrcd = ptr::null_mut();
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        assert_eq!(testbed.kernel.take().len(), 0);
        attr.xrcd = testbed.xrcd();
        testbed.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 98u32);
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_QP_XRCD_HANDLE), XRCD.into());
        assert!(command.is_without_driver());
        assert_eq!(qp.as_ref().qp().number(), 98);

        let mut attr = ibv_qp_open_attr {
            comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE,
            qp_num: 97,
            xrcd: testbed.xrcd(),
            qp_type: IBV_QPT_XRC_RECV,
            ..Default::default()
        };
        assert_eq!(open(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        attr.comp_mask |= IBV_QP_OPEN_ATTR_XRCD;
        attr.xrcd = ptr::null_mut();
        assert_eq!(open(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        assert_eq!(testbed.kernel.take().len(), 0);
        attr.xrcd = testbed.xrcd();
        assert_eq!(open(context, &mut attr, qp.as_ref()), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_OPEN_QP));
        let core: ib_uverbs_open_qp = command.core();
        assert_eq!((core.pd_handle, core.qpn), (XRCD, 97));
        assert_eq!(u32::from(core.qp_type), IBV_QPT_XRC_RECV);
    }

    #[test]
    fn what_a_qp_is_modified_to_and_says() {
        let testbed = Testbed::new();
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 3,
            port_num: 1,
            qp_access_flags: 7,
            ..Default::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(modify(testbed.qp(), &mut attr, mask as c_int), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_MODIFY_QP));
        assert!(command.is_without_driver());
        let core: ib_uverbs_modify_qp = command.core();
        assert_eq!((core.qp_handle, core.attr_mask), (QP, mask));
        assert_eq!((u32::from(core.qp_state), core.pkey_index), (IBV_QPS_INIT, 3));
        assert_eq!((core.port_num, core.qp_access_flags), (1, 7));

        let mut init = ibv_qp_init_attr::default();
        testbed.kernel.answer(
            UVERBS_ATTR_CORE_OUT,
            ib_uverbs_query_qp_resp {
                qp_state: IBV_QPS_RTS as u8,
                dest_qp_num: 44,
                max_send_wr: 45,
                ..Default::default()
            },
        );
        assert_eq!(query(testbed.qp(), &mut attr, mask as c_int, &mut init), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_QUERY_QP));
        let core: ib_uverbs_query_qp = command.core();
        assert_eq!((core.qp_handle, core.attr_mask), (QP, mask));
        assert_eq!((attr.qp_state, attr.dest_qp_num, attr.cap.max_send_wr), (IBV_QPS_RTS, 44, 45));
        assert_eq!(init.cap.max_send_wr, 45);
    }

    #[test]
    fn multicast_groups() {
        type Verb = fn(Ref<'_, ibv_qp>, &ibv_gid, u16) -> Result;
        let testbed = Testbed::new();
        let gid = ibv_gid { raw: core::array::from_fn(|i| i as u8) };
        for (verb, number) in [
            (attach_mcast as Verb, IB_USER_VERBS_CMD_ATTACH_MCAST),
            (detach_mcast as Verb, IB_USER_VERBS_CMD_DETACH_MCAST),
        ] {
            assert_eq!(verb(testbed.qp(), &gid, 0xc123), Ok(()));
            let command = testbed.command(Write(number));
            // Both commands have this structure.
            let core: ib_uverbs_attach_mcast = command.core();
            assert_eq!((core.qp_handle, core.mlid), (QP, 0xc123));
            assert_eq!(core.gid, core::array::from_fn(|i| i as u8));
        }
    }
}
