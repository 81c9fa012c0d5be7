// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of memory regions.

use super::message::exchange_core;
use crate::{
    bindings::*,
    causes::cause,
    errno::{Errno, Result},
    libibverbs::*,
    log::Refuse,
    object::Ref,
};
use core::{ffi::c_int, ptr};

/// The memory that an MR covers, as in ibv_reg_mr_iova2(3) and
/// ibv_reg_dmabuf_mr(3).
#[derive(Clone, Copy)]
pub struct MrRange {
    /// Address of the first byte in the program, or its offset in the dma-buf.
    pub start: usize,
    /// Bytes.
    pub length: usize,
    /// Address by which work requests name the first byte.
    pub iova: u64,
    /// `IBV_ACCESS_*`
    pub access: c_int,
}

/// Registers memory and fills in `mr`. The kernel pins and checks it: an
/// address that is not the program's ends in EFAULT.
pub fn register(pd: Ref<'_, ibv_pd>, range: MrRange, mr: Ref<'_, verbs_mr>) -> Result {
    // SAFETY: `exchange_core` lends buffers of these lengths; the function takes the range's
    // address as a number and does not follow it.
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_reg_mr(
            pd.as_ptr(),
            ptr::without_provenance_mut(range.start),
            range.length,
            range.iova,
            range.access,
            mr.as_ptr(),
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

/// Registers memory of the dma-buf behind `fd`, where `range.start` is its
/// offset, and fills in `mr`. The kernel checks both.
pub fn register_dmabuf(
    pd: Ref<'_, ibv_pd>,
    range: MrRange,
    fd: c_int,
    mr: Ref<'_, verbs_mr>,
) -> Result {
    // SAFETY: PD and MR are live; the function fills in the MR. The driver has no part in this
    // command, so its buffer may be null.
    Errno::check(unsafe {
        ibv_cmd_reg_dmabuf_mr(
            pd.as_ptr(),
            range.start as u64,
            range.length,
            range.iova,
            fd,
            range.access,
            mr.as_ptr(),
            ptr::null_mut(),
        )
    })
}

/// Replaces the attributes of an MR that `flags` (`IBV_REREG_MR_*`) name. The MR stays as it was
/// if that fails.
///
/// # Errors
///
/// EINVAL if the flags name a PD, and there is none; the kernel's.
pub fn reregister(
    mr: Ref<'_, verbs_mr>,
    flags: c_int,
    pd: Option<Ref<'_, ibv_pd>>,
    range: MrRange,
) -> Result {
    if flags & IBV_REREG_MR_CHANGE_PD as c_int != 0 && pd.is_none() {
        let mr = mr.mr();
        return Err(mr.refuse(cause!(
            EINVAL,
            "flags 0x%x name a PD, and there is none",
            flags as u32
        )));
    }
    // SAFETY: `exchange_core` lends buffers of these lengths; the function takes the range's
    // address as a number and does not follow it; it reads the PD only if `flags` name one, and the
    // PD is not null then.
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_rereg_mr(
            mr.as_ptr(),
            flags as u32,
            ptr::without_provenance_mut(range.start),
            range.length,
            range.iova,
            range.access,
            pd.map_or(ptr::null_mut(), |pd| pd.as_ptr()),
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

/// Fills in `mr` with the MR that has a handle in the kernel.
pub fn query(pd: Ref<'_, ibv_pd>, mr: Ref<'_, verbs_mr>, handle: u32) -> Result {
    // SAFETY: both are live; the function fills in the MR.
    Errno::check(unsafe { ibv_cmd_query_mr(pd.as_ptr(), mr.as_ptr(), handle) })
}

/// Deregisters an MR.
pub fn deregister(mr: Ref<'_, verbs_mr>) -> Result {
    // SAFETY: `mr` is a live MR.
    Errno::check(unsafe { ibv_cmd_dereg_mr(mr.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    #[test]
    fn mrs() {
        let testbed = Testbed::new();
        let (mr, pd) = (testbed.mr.as_ref(), testbed.pd.as_ref());
        // SAFETY: the MR is live, here and below.
        let handle = || unsafe { (*mr.as_ptr()).ibv_mr.handle };
        // SAFETY: see above.
        let keys = || unsafe { ((*mr.as_ptr()).ibv_mr.lkey, (*mr.as_ptr()).ibv_mr.rkey) };
        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, [77u32, 78, 79]);
        assert_eq!(register(pd, REGION, mr), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_REG_MR));
        assert!(command.is_without_driver());
        let core: ib_uverbs_reg_mr = command.core();
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!((core.pd_handle, core.access_flags), (PD, 5));
        assert_eq!((handle(), keys()), (77, (78, 79)));

        testbed.kernel.answer(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, 5u32);
        testbed.kernel.answer(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, 6u32);
        assert_eq!(register_dmabuf(pd, REGION, 9, mr), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR));
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_OFFSET), 0x1000);
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_LENGTH), 0x2000);
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_IOVA), 0x3000);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_REG_DMABUF_MR_FD), 9);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS), 5);
        assert_eq!(command.handle(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE), PD.into());
        assert!(command.is_without_driver());
        assert_eq!((handle(), keys()), (FIRST_HANDLE, (5, 6)));

        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, [7u32, 8]);
        let flags = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION;
        assert_eq!(reregister(mr, flags as c_int, Some(pd), REGION), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_REREG_MR));
        let core: ib_uverbs_rereg_mr = command.core();
        assert_eq!((core.mr_handle, core.flags, core.pd_handle), (FIRST_HANDLE, flags, PD));
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!((core.access_flags, keys()), (5, (7, 8)));

        testbed.kernel.answer(UVERBS_ATTR_QUERY_MR_RESP_LKEY, 9u32);
        testbed.kernel.answer(UVERBS_ATTR_QUERY_MR_RESP_RKEY, 10u32);
        assert_eq!(query(pd, mr, 55), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR));
        assert_eq!(command.handle(UVERBS_ATTR_QUERY_MR_HANDLE), 55);
        assert_eq!((handle(), keys()), (55, (9, 10)));

        assert_eq!(deregister(mr), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_MR_HANDLE), 55);
    }

    /// The kernel is asked for another PD only where the flags say so, and never without one.
    #[test]
    fn an_mr_changes_its_pd_only_to_one_that_is_there() {
        let testbed = Testbed::new();
        let (mr, change) = (testbed.mr.as_ref(), IBV_REREG_MR_CHANGE_PD as c_int);
        assert_eq!(reregister(mr, change, None, REGION), Err(Errno::EINVAL));
        assert_eq!(testbed.kernel.take().len(), 0);
        let access = IBV_REREG_MR_CHANGE_ACCESS as c_int;
        for pd in [None, Some(testbed.pd.as_ref())] {
            assert_eq!(reregister(mr, access, pd, REGION), Ok(()));
            assert_eq!(testbed.kernel.one().core::<ib_uverbs_rereg_mr>().pd_handle, 0);
        }
    }
}
