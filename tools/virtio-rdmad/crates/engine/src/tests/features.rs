// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what a driver has that declines a feature: nothing of the feature, and all else.

use abi::*;

use super::driver::*;

const UNSUPPORTED: u32 = VIRTIO_RDMA_STATUS_UNSUPPORTED;

/// Starts a guest again, whose driver declines a feature.
fn restart_without(guest: &mut Guest, feature: u32) {
    let features = guest.device.features() & !(1 << feature);
    guest.device.reset();
    guest.start_with(features);
}

/// Makes a guest whose driver declines a feature.
fn guest_without(feature: u32) -> Guest {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    restart_without(&mut guest, feature);
    guest
}

#[test]
fn without_uc_its_type_of_qps_is_unsupported() {
    with_rings(|| {
        let mut guest = guest_without(VIRTIO_RDMA_F_UC);
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
        assert_eq!(
            guest.try_create_qp(Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_UC)),
            Err(UNSUPPORTED)
        );
        guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
    });
}

#[test]
fn without_their_features_no_queue_is_resized() {
    with_rings(|| {
        let mut guest = guest_without(VIRTIO_RDMA_F_CQ_RESIZE);
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
        assert_eq!(guest.resize_cq(cqn, 2 * u32::from(RING)), Err(UNSUPPORTED));
        let srqn = guest.create_srq(pdn);
        guest.resize_srq(srqn, 16).unwrap();

        let mut guest = guest_without(VIRTIO_RDMA_F_SRQ_RESIZE);
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
        guest.resize_cq(cqn, 2 * u32::from(RING)).unwrap();
        let srqn = guest.create_srq(pdn);
        assert_eq!(guest.resize_srq(srqn, 16), Err(UNSUPPORTED));
    });
}

/// A requester without atomics may not ask for them, and a responder without them refuses.
fn without_atomics(which: usize, expected: u32) {
    let mut pair = Pair::new();
    let guest = if which == 0 { &mut pair.a } else { &mut pair.b };
    let rings = u64::from(!guest.rings) << VIRTIO_RDMA_F_RINGS;
    let features = guest.device.features() & !(1 << VIRTIO_RDMA_F_ATOMICS) & !rings;
    guest.device.reset();
    guest.start_with(features);
    pair.ends[which] = End::new(guest, VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    pair.a.connect(a.qpn, gid(2), b.qpn);
    pair.b.connect(b.qpn, gid(1), a.qpn);
    let word = [sge(DATA, 8, a.key)];
    let add = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &word).atomic(DATA, b.key, 1, 0);
    pair.a.post_send(a.qpn, &add);
    pair.settle();
    assert_eq!(pair.poll_a().map(|cqe| u32::from(cqe.status)), Some(expected));
}

#[test]
fn without_atomics_there_are_none() {
    for which in 0..2 {
        let expected =
            if which == 0 { VIRTIO_RDMA_WC_LOC_QP_OP_ERR } else { VIRTIO_RDMA_WC_REM_INV_REQ_ERR };
        without_atomics(which, expected);
        with_rings(|| without_atomics(which, expected));
    }
}
