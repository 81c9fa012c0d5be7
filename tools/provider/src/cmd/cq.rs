// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of completion queues.

use super::message::{Message, exchange};
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};
use core::{ffi::c_int, mem::MaybeUninit, ptr};

/// Creates a CQ of at least `cqe` entries and fills in `cq`. Its completion
/// events go to `channel`, if there is one. With `ring`, the program has the
/// CQE ring, and `cqe` is its depth.
pub fn create(
    context: Ref<'_, ibv_context>,
    cqe: c_int,
    channel: Option<Ref<'_, ibv_comp_channel>>,
    comp_vector: c_int,
    cq: Ref<'_, ibv_cq>,
    ring: Option<virtio_rdma_ureq_create_cq>,
) -> Result {
    // SAFETY: `exchange` lends buffers of these lengths, and `cmd` begins with the core's
    // structure; the channel may be null.
    exchange(ring, |cmd, len, resp, resp_len| unsafe {
        ibv_cmd_create_cq(
            context.as_ptr(),
            cqe,
            channel.map_or(ptr::null_mut(), Ref::as_ptr),
            comp_vector,
            cq.as_ptr(),
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

/// Changes the attributes of a CQ that `attr` names.
pub fn modify(cq: Ref<'_, ibv_cq>, attr: &mut ibv_modify_cq_attr) -> Result {
    let mut cmd = ibv_modify_cq::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_modify_cq(cq.as_ptr(), attr, &mut cmd, size_of_val(&cmd)) })
}

/// Moves a CQ to another ring of `cqe` entries, and sets `cqe` of `cq`.
pub fn resize(cq: Ref<'_, ibv_cq>, cqe: c_int, ring: virtio_rdma_ureq_create_cq) -> Result {
    let mut cmd = Message::<ibv_resize_cq, virtio_rdma_ureq_create_cq> {
        core: Default::default(),
        driver: ring,
    };
    let mut resp = Message::<ib_uverbs_resize_cq_resp, virtio_rdma_uresp_resize_cq>::default();
    // SAFETY: the buffers have the sizes given, and begin with the core's
    // structures.
    Errno::check(unsafe {
        ibv_cmd_resize_cq(
            cq.as_ptr(),
            cqe,
            (&raw mut cmd).cast(),
            cmd.len(true),
            (&raw mut resp).cast(),
            resp.len(true),
        )
    })
}

/// Takes completions off a CQ, to the front of `entries`. Returns how many.
///
/// The length of `entries` decides how much memory libibverbs allocates.
pub fn poll(cq: Ref<'_, ibv_cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    let room = c_int::try_from(entries.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the CQ is live, and the function writes at most `room` entries.
    let polled = unsafe { ibv_cmd_poll_cq(cq.as_ptr(), room, entries.as_mut_ptr().cast()) };
    usize::try_from(polled).map_err(|_| Errno::last())
}

/// Arms a CQ: one event for the next completion, or the next solicited one.
pub fn req_notify(cq: Ref<'_, ibv_cq>, solicited_only: bool) -> Result {
    // SAFETY: `cq` is a live CQ.
    Errno::check(unsafe { ibv_cmd_req_notify_cq(cq.as_ptr(), solicited_only.into()) })
}

/// Destroys a CQ.
pub fn destroy(cq: Ref<'_, ibv_cq>) -> Result {
    // SAFETY: `cq` is a live CQ, whose mutex ibv_create_cq() made.
    Errno::check(unsafe { ibv_cmd_destroy_cq(cq.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cmd::testbed::*, model::device};

    /// The driver is told where the ring is, if there is one.
    #[test]
    fn cqs() {
        let testbed = Testbed::new();
        let mut channel = ibv_comp_channel { context: testbed.opened.verbs(), fd: 33, refcnt: 0 };
        for ring in [None, Some(CQ_RING)] {
            for with_channel in [false, true] {
                // SAFETY: the channel is live.
                let channel = with_channel.then(|| unsafe { Ref::new(&raw mut channel) });
                let cq = object::<verbs_cq>();
                assert_eq!(
                    create(testbed.context(), 64, channel, 2, cq.as_ref().cq(), ring),
                    Ok(())
                );
                let command = testbed.command(Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE));
                assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_CQ_CQE), 64);
                assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR), 2);
                let fd = command.input.get(&UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL);
                assert_eq!(fd.map(|fd| fd[0]), with_channel.then_some(33));
                let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
                assert_eq!(driver, ring.as_ref().map(bytes));
                assert!(!command.room.contains_key(&UVERBS_ATTR_UHW_OUT));
                // SAFETY: the CQ is live.
                assert_eq!(unsafe { (*cq.as_ref().cq().as_ptr()).cqe }, 64);
            }
        }
    }

    /// A CQ that moved has as many CQEs as the kernel answers.
    #[test]
    fn a_cq_moves() {
        let testbed = Testbed::new();
        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, 256u32);
        assert_eq!(resize(testbed.cq(), 128, CQ_RING), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_RESIZE_CQ));
        let core: ib_uverbs_resize_cq = command.core();
        assert_eq!((core.cq_handle, core.cqe), (CQ, 128));
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&CQ_RING));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of::<virtio_rdma_uresp_resize_cq>());
        // SAFETY: the CQ is live.
        assert_eq!(unsafe { (*testbed.cq().as_ptr()).cqe }, 256);
    }

    /// The kernel's answer, with three completions.
    #[repr(C)]
    struct Completions {
        count: u32,
        reserved: u32,
        wc: [ib_uverbs_wc; 3],
    }

    /// The completions of the kernel reach the program, field by field, and no entry behind them
    /// is written.
    #[test]
    fn the_kernel_polls() {
        let testbed = Testbed::new();
        let wc = |n: u32| ib_uverbs_wc {
            wr_id: n.into(),
            status: n + 1,
            opcode: n + 2,
            vendor_err: n + 3,
            byte_len: n + 4,
            ex: ib_uverbs_wc__bindgen_ty_1 { imm_data: n + 5 },
            qp_num: n + 6,
            src_qp: n + 7,
            wc_flags: n + 8,
            pkey_index: n as u16 + 9,
            slid: n as u16 + 10,
            sl: n as u8 + 11,
            dlid_path_bits: n as u8 + 12,
            ..Default::default()
        };
        let answer = Completions { count: 2, reserved: 0, wc: [wc(20), wc(40), wc(60)] };
        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, answer);
        let mut entries = [const { MaybeUninit::zeroed() }; 5];
        assert_eq!(poll(testbed.cq(), &mut entries), Ok(2));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_POLL_CQ));
        let core: ib_uverbs_poll_cq = command.core();
        assert_eq!((core.cq_handle, core.ne), (CQ, 5));
        let room = size_of::<ib_uverbs_poll_cq_resp>() + 5 * size_of::<ib_uverbs_wc>();
        assert_eq!(command.room[&UVERBS_ATTR_CORE_OUT], room);
        for (entry, n) in entries.iter().zip([20u32, 40]) {
            // SAFETY: each entry is zero, or was written.
            let wc: &ibv_wc = unsafe { entry.assume_init_ref() };
            assert_eq!((wc.wr_id, wc.status, wc.opcode), (n.into(), n + 1, n + 2));
            assert_eq!((wc.vendor_err, wc.byte_len), (n + 3, n + 4));
            assert_eq!((device::ex(wc), wc.qp_num, wc.src_qp), (n + 5, n + 6, n + 7));
            assert_eq!((wc.wc_flags, u32::from(wc.pkey_index)), (n + 8, n + 9));
            assert_eq!((u32::from(wc.slid), u32::from(wc.sl)), (n + 10, n + 11));
            assert_eq!(u32::from(wc.dlid_path_bits), n + 12);
        }
        for entry in &entries[2..] {
            // SAFETY: zero is a valid entry.
            assert_eq!(unsafe { entry.assume_init_ref() }.wr_id, 0);
        }
        for errno in [EIO, ENOMEM, EINTR] {
            testbed.kernel.fail(errno);
            let error = poll(testbed.cq(), &mut entries).unwrap_err();
            assert_eq!(error.get(), errno as c_int);
        }
    }

    #[test]
    fn arming_and_moderation() {
        let testbed = Testbed::new();
        for solicited_only in [false, true] {
            assert_eq!(req_notify(testbed.cq(), solicited_only), Ok(()));
            let command = testbed.command(Write(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ));
            let core: ib_uverbs_req_notify_cq = command.core();
            assert_eq!((core.cq_handle, core.solicited_only), (CQ, solicited_only.into()));
        }
        let moderate = ibv_moderate_cq { cq_count: 8, cq_period: 9 };
        let mut attr = ibv_modify_cq_attr { attr_mask: IBV_CQ_ATTR_MODERATE, moderate };
        assert_eq!(modify(testbed.cq(), &mut attr), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_EX_CMD_MODIFY_CQ | EXTENDED));
        let core: ib_uverbs_ex_modify_cq = command.core();
        assert_eq!((core.cq_handle, core.attr_mask), (CQ, IBV_CQ_ATTR_MODERATE));
        assert_eq!((core.attr.cq_count, core.attr.cq_period), (8, 9));
    }
}
