// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of shared receive queues.

use super::message::{Message, exchange};
#[cfg(test)]
use crate::model::kernel::ibv_cmd_post_srq_recv;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};
use core::{ffi::c_int, ptr};

/// Creates an SRQ, fills in `srq`, and writes to `attr.attr` what it really has.
pub fn create(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_srq_init_attr,
    srq: Ref<'_, ibv_srq>,
    ring: virtio_rdma_ureq_create_srq,
) -> Result {
    // SAFETY: `exchange` lends buffers of these lengths, and `cmd` begins with the core's
    // structure.
    exchange(Some(ring), |cmd, len, resp, resp_len| unsafe {
        ibv_cmd_create_srq(pd.as_ptr(), srq.as_ptr(), attr, cmd, len, resp, resp_len)
    })
}

/// Creates an SRQ for XRC, fills in `srq`, and writes to `attr.attr` what it really
/// has.
pub fn create_xrc(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_srq_init_attr_ex,
    srq: Ref<'_, verbs_srq>,
    ring: virtio_rdma_ureq_create_srq,
) -> Result {
    // SAFETY: `exchange` lends buffers of these lengths, and `cmd` begins with the core's
    // structure; the program names a live PD, XRC domain and CQ: ibv_create_srq_ex(3).
    exchange(Some(ring), |cmd, len, resp, resp_len| unsafe {
        ibv_cmd_create_srq_ex(context.as_ptr(), srq.as_ptr(), attr, cmd, len, resp, resp_len)
    })
}

/// Changes the attributes of an SRQ that `mask` names (`IBV_SRQ_*`). With
/// IBV_SRQ_MAX_WR, the SRQ moves to `ring`.
pub fn modify(
    srq: Ref<'_, ibv_srq>,
    attr: &mut ibv_srq_attr,
    mask: c_int,
    ring: Option<virtio_rdma_ureq_create_srq>,
) -> Result {
    let mut cmd = Message::<ibv_modify_srq, virtio_rdma_ureq_create_srq> {
        core: Default::default(),
        driver: ring.unwrap_or_default(),
    };
    let len = cmd.len(ring.is_some());
    // SAFETY: `cmd` has the size given, and begins with the core's structure.
    Errno::check(unsafe {
        ibv_cmd_modify_srq(srq.as_ptr(), attr, mask, (&raw mut cmd).cast(), len)
    })
}

/// Reads the attributes of an SRQ.
pub fn query(srq: Ref<'_, ibv_srq>, attr: &mut ibv_srq_attr) -> Result {
    let mut cmd = ibv_query_srq::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_query_srq(srq.as_ptr(), attr, &mut cmd, size_of_val(&cmd)) })
}

/// Destroys an SRQ.
pub fn destroy(srq: Ref<'_, ibv_srq>) -> Result {
    // SAFETY: `srq` is a live SRQ, whose mutex ibv_cmd_create_srq() made.
    Errno::check(unsafe { ibv_cmd_destroy_srq(srq.as_ptr()) })
}

/// Rings the doorbell of an SRQ, for QPs that wait for a receive: POST_SRQ_RECV without
/// requests.
pub fn ring_doorbell(srq: Ref<'_, ibv_srq>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: `srq` is a live SRQ, and an empty list is valid.
    Errno::check(unsafe { ibv_cmd_post_srq_recv(srq.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    /// An SRQ has the sizes that the kernel answers; the driver is told where its ring is.
    #[test]
    fn srqs() {
        let testbed = Testbed::new();
        let srq = object::<verbs_srq>();
        let mut attr = ibv_srq_init_attr {
            attr: ibv_srq_attr { max_wr: 31, max_sge: 32, srq_limit: 0 },
            ..Default::default()
        };
        testbed.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, 64u32);
        testbed.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, 33u32);
        assert_eq!(create(testbed.pd.as_ref(), &mut attr, srq.as_ref().srq(), SRQ_RING), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE), PD.into());
        assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_SRQ_MAX_WR), 31);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_SRQ_MAX_SGE), 32);
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&SRQ_RING));
        assert_eq!((attr.attr.max_wr, attr.attr.max_sge), (64, 33));

        let mut attr = testbed.srq_init();
        testbed.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 77u32);
        assert_eq!(create_xrc(testbed.context(), &mut attr, srq.as_ref(), SRQ_RING), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE), XRCD.into());
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE), CQ.into());
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&SRQ_RING));
        assert_eq!(srq.as_ref().xrc_number(), Some(77));
    }

    /// The driver is told of a ring only if the SRQ moves to one.
    #[test]
    fn what_an_srq_is_modified_to_and_says() {
        let testbed = Testbed::new();
        let mut attr = ibv_srq_attr { max_wr: 41, max_sge: 0, srq_limit: 42 };
        for ring in [None, Some(SRQ_RING)] {
            let mask = IBV_SRQ_LIMIT as c_int;
            assert_eq!(modify(testbed.srq(), &mut attr, mask, ring), Ok(()));
            let command = testbed.command(Write(IB_USER_VERBS_CMD_MODIFY_SRQ));
            let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
            assert_eq!(driver, ring.as_ref().map(bytes));
            let core: ib_uverbs_modify_srq = command.core();
            assert_eq!((core.srq_handle, core.attr_mask), (SRQ, IBV_SRQ_LIMIT));
            assert_eq!((core.max_wr, core.srq_limit), (41, 42));
        }
        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, [51u32, 52, 53, 0]);
        assert_eq!(query(testbed.srq(), &mut attr), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_QUERY_SRQ));
        assert_eq!(command.core::<ib_uverbs_query_srq>().srq_handle, SRQ);
        assert_eq!((attr.max_wr, attr.max_sge, attr.srq_limit), (51, 52, 53));
    }
}
