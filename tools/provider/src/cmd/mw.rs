// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of memory windows.

use super::message::exchange_core;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};

/// Allocates a memory window and fills in `mw`.
pub fn alloc(pd: Ref<'_, ibv_pd>, mw_type: ibv_mw_type, mw: Ref<'_, ibv_mw>) -> Result {
    // SAFETY: `exchange_core` lends buffers of these lengths.
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_alloc_mw(pd.as_ptr(), mw_type, mw.as_ptr(), cmd, len, resp, resp_len)
    })
}

/// Deallocates a memory window.
pub fn dealloc(mw: Ref<'_, ibv_mw>) -> Result {
    // SAFETY: `mw` is a live window.
    Errno::check(unsafe { ibv_cmd_dealloc_mw(mw.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    #[test]
    fn windows() {
        let testbed = Testbed::new();
        let mw = testbed.mw.as_ref();
        for mw_type in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
            testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, [21u32, 22]);
            assert_eq!(alloc(testbed.pd.as_ref(), mw_type, mw), Ok(()));
            let command = testbed.command(Write(IB_USER_VERBS_CMD_ALLOC_MW));
            let core: ib_uverbs_alloc_mw = command.core();
            assert_eq!((core.pd_handle, u32::from(core.mw_type)), (PD, mw_type));
            // SAFETY: the window is live.
            let handle = unsafe { (*mw.as_ptr()).handle };
            assert_eq!((handle, mw.rkey()), (21, 22));
        }
        assert_eq!(dealloc(mw), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_MW_HANDLE), 21);
    }
}
