// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A command or its answer: the part of the core, then that of the driver.

use crate::errno::{Errno, Result};
use core::ffi::c_int;

/// A command or its answer: the core's part, then the driver's.
#[repr(C)]
#[derive(Default)]
pub(super) struct Message<C, D> {
    pub core: C,
    pub driver: D,
}

impl<C, D> Message<C, D> {
    /// Returns the length in bytes, with or without the driver's part.
    pub fn len(&self, driver: bool) -> usize {
        const { assert!(size_of::<Self>() == size_of::<C>() + size_of::<D>()) };
        if driver { size_of::<Self>() } else { size_of::<C>() }
    }
}

/// Sends a command. `send` gets the command and its length, then room for the answer and its
/// length; both pointers are valid until it returns. The command has the driver's part behind the
/// core's if there is one. The answer has only the core's part.
pub(super) fn exchange<C: Default, D: Default, R: Default>(
    driver: Option<D>,
    send: impl FnOnce(*mut C, usize, *mut R, usize) -> c_int,
) -> Result {
    let has_driver = driver.is_some();
    let mut cmd = Message { core: C::default(), driver: driver.unwrap_or_default() };
    let (len, mut resp) = (cmd.len(has_driver), R::default());
    Errno::check(send((&raw mut cmd).cast(), len, &raw mut resp, size_of::<R>()))
}

/// Sends a command that has only the core's part, as [`exchange`] does.
pub(super) fn exchange_core<C: Default, R: Default>(
    send: impl FnOnce(*mut C, usize, *mut R, usize) -> c_int,
) -> Result {
    exchange(None::<()>, send)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{ibv_create_cq, virtio_rdma_ureq_create_cq};
    use core::mem::offset_of;

    /// The length is that of the core's structure, or of both; the driver's part follows without a
    /// gap.
    #[test]
    fn a_message_is_both_parts() {
        let message = Message::<ibv_create_cq, virtio_rdma_ureq_create_cq>::default();
        let core = size_of::<ibv_create_cq>();
        assert_eq!((message.len(false), message.len(true)), (core, core + 16));
        assert_eq!(offset_of!(Message<ibv_create_cq, virtio_rdma_ureq_create_cq>, driver), core);
    }
}
