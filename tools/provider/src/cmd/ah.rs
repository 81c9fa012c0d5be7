// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of address handles.

use super::message::Message;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};
use core::mem;

/// Creates an address handle in the kernel and fills in `ah`. Returns its
/// address vector, or zeros if the driver keeps it.
pub fn create(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_ah_attr,
    ah: Ref<'_, ibv_ah>,
) -> Result<virtio_rdma_av> {
    let mut resp = Message::<ib_uverbs_create_ah_resp, virtio_rdma_uresp_create_ah>::default();
    // SAFETY: the buffer has the size given, and begins with the core's
    // structure.
    Errno::check(unsafe {
        ibv_cmd_create_ah(pd.as_ptr(), ah.as_ptr(), attr, (&raw mut resp).cast(), resp.len(true))
    })?;
    // SAFETY: an address vector consists of integers.
    Ok(unsafe {
        mem::transmute::<[u8; size_of::<virtio_rdma_av>()], virtio_rdma_av>(resp.driver.av)
    })
}

/// Destroys an address handle.
pub fn destroy(ah: Ref<'_, ibv_ah>) -> Result {
    // SAFETY: `ah` is a live AH.
    Errno::check(unsafe { ibv_cmd_destroy_ah(ah.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::testbed::*;

    /// The address vector of an AH is what the driver answers, byte by byte.
    #[test]
    fn ahs() {
        let testbed = Testbed::new();
        let av: [u8; size_of::<virtio_rdma_av>()] = core::array::from_fn(|i| i as u8 + 1);
        let mut attr = ibv_ah_attr { dlid: 3, sl: 4, port_num: 1, ..Default::default() };
        testbed
            .kernel
            .answer(UVERBS_ATTR_UHW_OUT, virtio_rdma_uresp_create_ah { av, ..Default::default() });
        let got = create(testbed.pd.as_ref(), &mut attr, testbed.ah.as_ref()).unwrap();
        assert_eq!(bytes(&got), av);
        let command = testbed.command(Write(IB_USER_VERBS_CMD_CREATE_AH));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of::<virtio_rdma_uresp_create_ah>());
        assert!(!command.input.contains_key(&UVERBS_ATTR_UHW_IN));
        // A driver that keeps the vector does not write to the answer.
        let got = create(testbed.pd.as_ref(), &mut attr, testbed.ah.as_ref()).unwrap();
        assert_eq!(bytes(&got), [0; size_of::<virtio_rdma_av>()]);
        assert_eq!(testbed.kernel.take().len(), 1);
        assert_eq!(destroy(testbed.ah.as_ref()), Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_AH_HANDLE), u64::from(FIRST_HANDLE) + 1);
    }
}
