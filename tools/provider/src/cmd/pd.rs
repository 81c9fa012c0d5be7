// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of protection domains.

use super::message::exchange_core;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};

/// Allocates a PD and fills in `pd`.
pub fn alloc(context: Ref<'_, ibv_context>, pd: Ref<'_, ibv_pd>) -> Result {
    // SAFETY: `exchange_core` lends buffers of these lengths.
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_alloc_pd(context.as_ptr(), pd.as_ptr(), cmd, len, resp, resp_len)
    })
}

/// Deallocates a PD.
pub fn dealloc(pd: Ref<'_, ibv_pd>) -> Result {
    // SAFETY: `pd` is a live PD.
    Errno::check(unsafe { ibv_cmd_dealloc_pd(pd.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    #[test]
    fn pds() {
        let testbed = Testbed::new();
        let pd = object::<ibv_pd>();
        assert_eq!(alloc(testbed.context(), pd.as_ref()), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_ALLOC_PD));
        assert!(command.is_without_driver());
        let at = pd.as_ref().as_ptr();
        // SAFETY: the PD is live.
        let (handle, context) = unsafe { ((*at).handle, (*at).context) };
        assert_eq!((handle, context), (FIRST_HANDLE, testbed.opened.verbs()));
        assert_eq!(dealloc(testbed.pd.as_ref()), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_PD_HANDLE), PD.into());
    }
}
