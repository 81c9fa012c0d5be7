// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Thread domains (ibv_alloc_td(3)), whose objects one thread at a time uses.
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_context, ibv_td},
    causes::cause,
    errno::Result,
    log::Refuse,
    object::{Blank, Extended, Object, Owned, Ref},
    users::Users,
};

/// A thread domain: `struct ibv_td` and the provider's private data.
pub type Td = Object<ibv_td>;

impl Extended for ibv_td {
    type Private = TdPrivate;
}

/// The private data of a thread domain.
pub struct TdPrivate {
    /// The parent domains that use the thread domain.
    pub users: Users,
}

/// Allocates a thread domain: ibv_alloc_td(3). The kernel does not know it.
///
/// # Errors
///
/// ENOMEM.
pub fn alloc(context: Ref<'_, ibv_context>) -> Result<Owned<Td>> {
    let td = Blank::<ibv_td>::new()?;
    td.verbs().join(context);
    Ok(td.finish(TdPrivate { users: Users::new()? }))
}

/// Deallocates a thread domain: ibv_dealloc_td(3).
///
/// # Errors
///
/// EBUSY if a parent domain uses it.
pub fn dealloc(td: Ref<'_, Td>) -> Result {
    if td.private().users.any() {
        return Err(td.refuse(cause!(EBUSY, "a parent domain uses it")));
    }
    Ok(())
}
