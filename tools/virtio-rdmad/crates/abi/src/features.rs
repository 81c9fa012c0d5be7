// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rules for feature bits: which bits require others, and what driver and device may agree on.

use crate::bindings::{
    VIRTIO_RDMA_F_ATOMICS_GLOBAL, VIRTIO_RDMA_F_ATOMIC_WRITE, VIRTIO_RDMA_F_CQ_MODERATION,
    VIRTIO_RDMA_F_CQ_RESIZE, VIRTIO_RDMA_F_EVENTS, VIRTIO_RDMA_F_FLUSH, VIRTIO_RDMA_F_MW,
    VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_SRQ_RESIZE, VIRTIO_RDMA_F_VIRTQUEUES,
    VIRTIO_RDMA_F_XRC, VIRTIO_RDMA_REQUIRES_ATOMICS_GLOBAL, VIRTIO_RDMA_REQUIRES_ATOMIC_WRITE,
    VIRTIO_RDMA_REQUIRES_CQ_MODERATION, VIRTIO_RDMA_REQUIRES_CQ_RESIZE,
    VIRTIO_RDMA_REQUIRES_EVENTS, VIRTIO_RDMA_REQUIRES_FLUSH, VIRTIO_RDMA_REQUIRES_MW,
    VIRTIO_RDMA_REQUIRES_SRQ, VIRTIO_RDMA_REQUIRES_SRQ_RESIZE, VIRTIO_RDMA_REQUIRES_XRC,
};

/// Feature bits, each with those that it requires. What they require in turn comes before them.
const REQUIREMENTS: [(u32, u64); 10] = [
    (VIRTIO_RDMA_F_EVENTS, VIRTIO_RDMA_REQUIRES_EVENTS as u64),
    (VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_REQUIRES_SRQ as u64),
    (VIRTIO_RDMA_F_MW, VIRTIO_RDMA_REQUIRES_MW as u64),
    (VIRTIO_RDMA_F_FLUSH, VIRTIO_RDMA_REQUIRES_FLUSH as u64),
    (VIRTIO_RDMA_F_ATOMIC_WRITE, VIRTIO_RDMA_REQUIRES_ATOMIC_WRITE as u64),
    (VIRTIO_RDMA_F_XRC, VIRTIO_RDMA_REQUIRES_XRC as u64),
    (VIRTIO_RDMA_F_CQ_MODERATION, VIRTIO_RDMA_REQUIRES_CQ_MODERATION as u64),
    (VIRTIO_RDMA_F_SRQ_RESIZE, VIRTIO_RDMA_REQUIRES_SRQ_RESIZE as u64),
    (VIRTIO_RDMA_F_CQ_RESIZE, VIRTIO_RDMA_REQUIRES_CQ_RESIZE as u64),
    (VIRTIO_RDMA_F_ATOMICS_GLOBAL, VIRTIO_RDMA_REQUIRES_ATOMICS_GLOBAL as u64),
];

/// Returns feature bits without those that require one which is not there.
#[must_use]
pub fn closed(mut bits: u64) -> u64 {
    for (bit, required) in REQUIREMENTS {
        if bits & required != required {
            bits &= !(1 << bit);
        }
    }
    bits
}

/// Returns whether driver and device may agree on these feature bits, the transport's among them: nothing that is
/// required is missing, and there is one data path.
#[must_use]
pub fn is_agreement(bits: u64) -> bool {
    let paths = bits & (1 << VIRTIO_RDMA_F_RINGS | 1 << VIRTIO_RDMA_F_VIRTQUEUES);
    closed(bits) == bits && paths.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use crate::bindings::VIRTIO_RDMA_F_UC;

    use super::*;

    const RINGS: u64 = 1 << VIRTIO_RDMA_F_RINGS;
    const VIRTQUEUES: u64 = 1 << VIRTIO_RDMA_F_VIRTQUEUES;

    #[test]
    fn bits_go_with_what_they_require() {
        assert_eq!(closed(0), 0);
        let with_srqs = RINGS | 1 << VIRTIO_RDMA_F_SRQ | 1 << VIRTIO_RDMA_F_XRC;
        assert_eq!(closed(with_srqs), with_srqs);
        assert_eq!(closed(with_srqs & !RINGS), 0, "XRC requires SRQ, and SRQ requires RINGS");
        let without = !VIRTQUEUES;
        assert_eq!(closed(without), without & !(1 << VIRTIO_RDMA_F_EVENTS));
    }

    #[test]
    fn an_agreement_has_one_data_path() {
        assert!(is_agreement(RINGS) && is_agreement(VIRTQUEUES | 1 << 32));
        for bits in
            [0, 1 << VIRTIO_RDMA_F_UC, RINGS | VIRTQUEUES, VIRTQUEUES | 1 << VIRTIO_RDMA_F_MW]
        {
            assert!(!is_agreement(bits), "{bits:#x}");
        }
    }

    #[test]
    fn each_requirement_of_the_header_is_here() {
        let header = include_str!("../../../../../include/uapi/linux/virtio_rdma.h");
        let found = header.matches("#define VIRTIO_RDMA_REQUIRES_").count();
        assert_eq!(found, REQUIREMENTS.len());
    }
}
