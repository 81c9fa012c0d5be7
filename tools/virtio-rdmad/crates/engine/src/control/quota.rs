// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The objects that a guest may make by its quota.

use super::objects::Objects;
use super::status::Status;
use crate::transport::hca::Hca;

/// Fails if a guest that has so many objects of a kind may have no more of them.
pub(super) fn check(used: usize, most: u32) -> Result<(), Status> {
    if used < most as usize {
        Ok(())
    } else {
        Err(Status::NoResource)
    }
}

/// Fails if regions of a guest may not cover so many bytes more, once they cover `freed` bytes less.
pub(super) fn check_memory(
    hca: &Hca,
    objects: &Objects,
    more: u64,
    freed: u64,
) -> Result<(), Status> {
    let used = objects.registered - freed;
    if more <= freed || used.saturating_add(more) <= hca.quota().memory {
        Ok(())
    } else {
        Err(Status::NoResource)
    }
}
