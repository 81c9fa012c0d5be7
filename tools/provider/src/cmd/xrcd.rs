// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of extended connection domains.

use super::message::exchange_core;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};
use core::ffi::c_int;

/// Opens an extended connection domain and fills in `xrcd`.
pub fn open(
    context: Ref<'_, ibv_context>,
    xrcd: Ref<'_, verbs_xrcd>,
    attr: &mut ibv_xrcd_init_attr,
) -> Result {
    // SAFETY: `exchange_core` lends buffers of these lengths, and `xrcd` has room for all of a
    // `struct verbs_xrcd`.
    exchange_core(|cmd, len, resp, resp_len| unsafe {
        ibv_cmd_open_xrcd(
            context.as_ptr(),
            xrcd.as_ptr(),
            size_of::<verbs_xrcd>() as c_int,
            attr,
            cmd,
            len,
            resp,
            resp_len,
        )
    })
}

/// Closes an extended connection domain.
pub fn close(xrcd: Ref<'_, verbs_xrcd>) -> Result {
    // SAFETY: `xrcd` is a live domain.
    Errno::check(unsafe { ibv_cmd_close_xrcd(xrcd.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    #[test]
    fn xrc_domains() {
        let testbed = Testbed::new();
        let xrcd = object::<verbs_xrcd>();
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: 9,
            oflags: 10,
        };
        assert_eq!(open(testbed.context(), xrcd.as_ref(), &mut attr), Ok(()));
        let command = testbed.command(Write(IB_USER_VERBS_CMD_OPEN_XRCD));
        let core: ib_uverbs_open_xrcd = command.core();
        assert_eq!((core.fd, core.oflags), (9, 10));
        assert_eq!(close(xrcd.as_ref()), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_XRCD_HANDLE), FIRST_HANDLE.into());
    }
}
