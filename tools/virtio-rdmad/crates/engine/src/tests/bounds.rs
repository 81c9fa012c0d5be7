// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whatever a guest wants done, its turns are short: [`Guest::run`] asserts that of each by the work
//! that the engine counts, in nanoseconds as it estimates them. Here are the guests that want much.

use std::sync::Arc;

use abi::*;
use zerocopy::{FromZeros, IntoBytes};

use super::driver::*;
use crate::{Counter, Limits};

const PAGE: u64 = 0x1000;
/// Objects: to do something for all of them takes longer than a turn.
const MANY: u32 = 2500;

/// A guest with rings that may have many objects.
fn guest() -> Guest {
    let (fabric, clock) = fabric();
    let limits = Limits { gid_table: 4, comp_vectors: VECTORS, ..Limits::default() };
    let (memory, regions) = (160 << 20, 64 << 20);
    let setup = Setup {
        limits,
        memory,
        depth: 16,
        stride: 512,
        regions,
        region_len: 0x5000,
        region_count: (memory - regions) / 0x5000,
        ..Setup::default()
    };
    Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup)
}

/// Writes a table of so many pages at `at`, of which no two follow each other.
fn write_pages(guest: &Guest, at: u64, count: u64) -> virtio_rdma_ring_region {
    let pages: Vec<u64> = (0..count).map(|page| DATA + page % 1000 * 2 * PAGE).collect();
    guest.memory.write(at, pages.as_bytes()).unwrap();
    virtio_rdma_ring_region { pages: at, npages: count as u32, reserved_0c: 0 }
}

/// Rings the doorbells of objects 1 to `count`, as many in a buffer as it holds.
fn ring_all(guest: &mut Guest, count: u32, queue: u32) {
    let bells: Vec<_> = (1..=count).map(|number| virtio_rdma_doorbell { number, queue }).collect();
    for (buffer, bells) in (0..).zip(bells.chunks(64)) {
        let at = (48 << 20) + buffer * 512;
        guest.memory.write(at, bells.as_bytes()).unwrap();
        guest.add(1 + VECTORS, &[(at, bells.as_bytes().len() as u32, false)]);
    }
    guest.run();
    while guest.used(1 + VECTORS).is_some() {}
}

fn state(guest: &mut Guest, qpn: u32) -> u32 {
    guest.query(qpn).qp_state.into()
}

#[test]
fn doorbells_of_many_queues() {
    with_rings(|| {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(2));
        for _ in 0..MANY {
            guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
        }
        for queue in [VIRTIO_RDMA_DOORBELL_RQ, VIRTIO_RDMA_DOORBELL_SQ] {
            ring_all(&mut guest, MANY, queue);
        }
    });
}

#[test]
fn an_srq_that_fails_takes_all_its_qps_along() {
    with_rings(|| {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(2));
        let srqs: Vec<u32> = (0..100).map(|_| guest.create_srq(pdn)).collect();
        let mut qpns = Vec::new();
        for _ in 0..MANY {
            let qpn = guest.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC, srqs[0]).unwrap();
            guest.make_init(qpn, 0);
            qpns.push(qpn);
        }
        let last = *qpns.last().unwrap();
        for srqn in srqs {
            // More than the ring holds.
            guest.memory.write(guest.srq_rings[&srqn].region, &99_u32.to_le_bytes()).unwrap();
            assert_eq!(guest.resize_srq(srqn, 2), Err(VIRTIO_RDMA_STATUS_STATE));
        }
        assert_eq!(state(&mut guest, qpns[0]), VIRTIO_RDMA_QPS_ERR);
        assert_eq!(state(&mut guest, last), VIRTIO_RDMA_QPS_ERR);
        // Each of these found all QPs to fail again, and spent nothing.
        guest.set_state(last, VIRTIO_RDMA_QPS_RESET).unwrap();
        guest.make_init(last, 0);
        let before = guest.device.counter(Counter::Work);
        ring_all(&mut guest, 100, VIRTIO_RDMA_DOORBELL_SRQ);
        assert!(guest.device.counter(Counter::Work) - before < u64::from(MANY) * 100);
        assert_eq!(state(&mut guest, last), VIRTIO_RDMA_QPS_INIT);
    });
}

#[test]
fn a_cq_that_overflows_takes_all_its_qps_along_once() {
    with_rings(|| {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(1));
        let mut qpns = Vec::new();
        for _ in 0..MANY {
            let qpn = guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
            guest.make_init(qpn, 0);
            qpns.push(qpn);
        }
        for wr_id in 0..2 {
            guest.post_recv(qpns[7], wr_id, &[]);
        }
        let last = *qpns.last().unwrap();
        // Both receives are flushed, into a CQ with one place.
        guest.set_state(qpns[7], VIRTIO_RDMA_QPS_ERR).unwrap();
        assert_eq!(guest.device.counter(Counter::CqOverflows), 1);
        assert_eq!(state(&mut guest, last), VIRTIO_RDMA_QPS_ERR);
        let before = guest.device.counter(Counter::Work);
        for _ in 0..20 {
            let request = virtio_rdma_cmd_modify_cq { cqn, cq_count: 4, cq_period: 4 };
            guest.command::<_, ()>(VIRTIO_RDMA_CMD_MODIFY_CQ, &request).unwrap();
        }
        assert!(guest.device.counter(Counter::Work) - before < u64::from(MANY) * 100);
    });
}

#[test]
fn rings_of_many_pages_and_rings_far_from_their_head() {
    with_rings(|| {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(2));
        let base = Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_RC);
        let mut request = guest.qp_ring_request(DATA, base);
        (request.sq.depth, request.rq.depth) = (32768, 32768);
        request.rq.offset = request.sq.offset + 32768 * 512;
        request.region = write_pages(&guest, 48 << 20, 8193);
        let before = guest.device.counter(Counter::Work);
        let reply: virtio_rdma_rsp_create_qp =
            guest.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request).unwrap();
        assert!(guest.device.counter(Counter::Work) - before > TURN);
        guest.destroy_qp(reply.qpn).unwrap();
        // Both rings may begin at a page of their own, and no later.
        let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
        for (at, status) in [(4096, Ok(())), (16384, invalid), (1 << 30, invalid)] {
            let mut request = guest.qp_ring_request(DATA, base);
            (request.sq.depth, request.rq.depth) = (16, 16);
            (request.sq.offset, request.rq.offset) = (4096, 8192 + at);
            request.region.npages = 1 << 20;
            let result = guest
                .command::<_, virtio_rdma_rsp_create_qp>(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
            assert_eq!(result.map(|_| ()), status, "{at}");
        }
        let mut request = guest.srq_request(DATA, pdn);
        (request.ring.offset, request.region.npages) = (1 << 30, 1 << 20);
        let result =
            guest.command::<_, virtio_rdma_rsp_create_srq>(VIRTIO_RDMA_CMD_CREATE_SRQ, &request);
        assert_eq!(result.map(|_| ()), invalid);
    });
}

#[test]
fn a_large_region_comes_and_goes_in_steps() {
    with_rings(|| {
        let mut guest = guest();
        let pdn = guest.create_pd();
        let count = 40_000;
        let region = write_pages(&guest, 48 << 20, count);
        let mut request = virtio_rdma_cmd_reg_user_mr::new_zeroed();
        (request.pdn, request.access_flags, request.length) = (pdn, ALL, count * PAGE);
        (request.pages, request.npages) = (region.pages, region.npages);
        let work = |guest: &Guest| guest.device.counter(Counter::Work);
        let before = work(&guest);
        let mr: virtio_rdma_rsp_mr = guest.command(VIRTIO_RDMA_CMD_REG_USER_MR, &request).unwrap();
        assert!(work(&guest) - before > TURN);
        let mut rereg = virtio_rdma_cmd_rereg_mr::new_zeroed();
        (rereg.mrn, rereg.flags, rereg.mr) = (mr.mrn, VIRTIO_RDMA_REREG_ACCESS, request);
        guest.command::<_, ()>(VIRTIO_RDMA_CMD_REREG_MR, &rereg).unwrap();
        let before = work(&guest);
        guest.dereg_mr(mr.mrn).unwrap();
        assert!(work(&guest) - before > TURN);
        assert_eq!(guest.device.status().mrs, 0);
    });
}

#[test]
fn resizing_a_full_cq_and_a_full_srq() {
    with_rings(|| {
        let mut guest = guest();
        let pdn = guest.create_pd();
        let depth = 16384_u32;
        let region = |at, pages| write_pages(&guest, at, pages);
        let (old, new) = (region(48 << 20, 300), region(49 << 20, 300));
        let (old_srq, new_srq) = (region(50 << 20, 200), region(51 << 20, 200));
        let request = virtio_rdma_cmd_create_ring_cq { region: old, cqe: depth, comp_vector: 0 };
        let cq: virtio_rdma_rsp_create_cq =
            guest.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request).unwrap();
        // As if the device had placed so many.
        guest.memory.write(DATA, &0_u32.wrapping_sub(depth).to_le_bytes()).unwrap();
        let before = guest.device.counter(Counter::Work);
        let request = virtio_rdma_cmd_resize_cq { region: new, cqe: depth, cqn: cq.cqn };
        let reply: virtio_rdma_rsp_resize_cq =
            guest.command(VIRTIO_RDMA_CMD_RESIZE_CQ, &request).unwrap();
        assert_eq!(reply.moved, depth);
        assert!(guest.device.counter(Counter::Work) - before > TURN);

        let shape = virtio_rdma_ring_shape { depth, stride: 32, offset: 256, reserved_0c: 0 };
        let mut request = virtio_rdma_cmd_create_srq::new_zeroed();
        (request.pdn, request.max_sge, request.ring) = (pdn, 1, shape);
        request.region = old_srq;
        let srq: virtio_rdma_rsp_create_srq =
            guest.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request).unwrap();
        guest.memory.write(DATA, &depth.to_le_bytes()).unwrap();
        let mut request = virtio_rdma_cmd_resize_srq::new_zeroed();
        (request.region, request.ring, request.srqn) = (new_srq, shape, srq.srqn);
        let before = guest.device.counter(Counter::Work);
        let reply: virtio_rdma_rsp_resize_srq =
            guest.command(VIRTIO_RDMA_CMD_RESIZE_SRQ, &request).unwrap();
        assert_eq!(reply.moved, depth);
        assert!(guest.device.counter(Counter::Work) - before > TURN);
    });
}
