// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Address handles (IBA 11.2.2).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_ah, ibv_ah_attr, ibv_pd, virtio_rdma_av},
    cmd,
    errno::Result,
    object::{Blank, Extended, Object, Owned, Ref},
};

/// An AH: `struct ibv_ah` and the provider's private data.
pub type Ah = Object<ibv_ah>;

impl Extended for ibv_ah {
    type Private = AhPrivate;
}

/// The private data of an AH.
pub struct AhPrivate {
    /// The address vector, for work requests in rings; zero if the kernel
    /// posts, because the kernel then keeps it.
    pub av: virtio_rdma_av,
}

/// Creates an address handle: ibv_create_ah(3). The kernel makes the address vector, and resolves the
/// destination's MAC address from its GID.
///
/// # Errors
///
/// ENOMEM; the kernel's.
pub fn create(pd: Ref<'_, ibv_pd>, attr: &mut ibv_ah_attr) -> Result<Owned<Ah>> {
    let ah = Blank::<ibv_ah>::new()?;
    let av = cmd::ah::create(pd, attr, ah.verbs())?;
    Ok(ah.finish(AhPrivate { av }))
}
