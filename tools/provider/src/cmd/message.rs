// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A command or its answer: the part of the core, then that of the driver.

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
