// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that turns are short, however much work a guest causes. [`Guest::run`] asserts this for each turn
//! by the work that the engine counts, in estimated nanoseconds.

use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::Duration;

use abi::*;
use memory::GuestMemory;
use testkit::command::{create_srq, encode, reg_user_mr, region, resize_srq, shape};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::driver::*;
use crate::base::slot::Slot;
use crate::base::sync::read;
use crate::memory::key_table::KeyTable;
use crate::memory::mr::Mr;
use crate::{Counter, Device, DevicePolicy, Limits, Next, Quota};

const PAGE: u64 = 0x1000;
/// A number of objects that is so large that work for all of them takes longer than a turn.
const MANY: u32 = 2500;

/// Makes a guest with rings that may have many objects.
fn guest() -> Guest {
    let (fabric, clock) = fabric();
    let limits = Limits { gid_table: 4, comp_vectors: VECTORS, ..Limits::default() };
    let (memory, regions) = (160 << 20, 64 << 20);
    let sizes = Sizes {
        memory,
        depth: 16,
        stride: 512,
        regions,
        region_len: 0x5000,
        region_count: (memory - regions) / 0x5000,
        ..Sizes::default()
    };
    let setup = Setup { limits, sizes, ..Setup::default() };
    Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup)
}

/// Writes a table of `count` pages at `at`. No two pages are contiguous.
fn write_pages(guest: &Guest, at: u64, count: u64) -> virtio_rdma_ring_region {
    let pages: Vec<u64> = (0..count).map(|page| DATA + page % 1000 * 2 * PAGE).collect();
    guest.memory.write(at, pages.as_bytes()).unwrap();
    region(at, count as u32)
}

/// Returns a request for an MR of `count` pages, whose table [`write_pages`] writes.
fn region_request(guest: &Guest, pdn: u32, count: u64) -> virtio_rdma_cmd_reg_user_mr {
    let table = write_pages(guest, 48 << 20, count);
    reg_user_mr(pdn, ALL, (0, count * PAGE), (table.pages, table.npages))
}

/// Rings the doorbells of objects 1 to `count`, with as many in a buffer as it holds.
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
            // The ring holds fewer entries than this.
            guest.memory.write(guest.srq_rings[&srqn].region, &99_u32.to_le_bytes()).unwrap();
            assert_eq!(guest.resize_srq(srqn, 2), Err(VIRTIO_RDMA_STATUS_STATE));
        }
        assert_eq!(state(&mut guest, qpns[0]), VIRTIO_RDMA_QPS_ERR);
        assert_eq!(state(&mut guest, last), VIRTIO_RDMA_QPS_ERR);
        // These doorbells do not make the device fail all QPs again.
        let before = guest.device.counter(Counter::Work);
        ring_all(&mut guest, 100, VIRTIO_RDMA_DOORBELL_SRQ);
        assert!(guest.device.counter(Counter::Work) - before < u64::from(MANY) * 100);
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
        // Two receives are flushed into a CQ that has room for one CQE.
        guest.set_state(qpns[7], VIRTIO_RDMA_QPS_ERR).unwrap();
        assert_eq!(guest.device.counter(Counter::CqOverflows), 1);
        assert_eq!(state(&mut guest, last), VIRTIO_RDMA_QPS_ERR);
        let before = guest.device.counter(Counter::Work);
        for _ in 0..20 {
            guest.modify_cq(cqn, 4, 4).unwrap();
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
        // Each ring may begin at a new page, but not later.
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
        let request = region_request(&guest, pdn, count);
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
        // With this consumer index the ring looks full.
        guest.memory.write(DATA, &0_u32.wrapping_sub(depth).to_le_bytes()).unwrap();
        let before = guest.device.counter(Counter::Work);
        let request = virtio_rdma_cmd_resize_cq { region: new, cqe: depth, cqn: cq.cqn };
        let reply: virtio_rdma_rsp_resize_cq =
            guest.command(VIRTIO_RDMA_CMD_RESIZE_CQ, &request).unwrap();
        assert_eq!(reply.moved, depth);
        assert!(guest.device.counter(Counter::Work) - before > TURN);

        let shape = shape(depth, 32, 256);
        let request = virtio_rdma_cmd_create_srq { max_sge: 1, ..create_srq(pdn, old_srq, shape) };
        let srq: virtio_rdma_rsp_create_srq =
            guest.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request).unwrap();
        guest.memory.write(DATA, &depth.to_le_bytes()).unwrap();
        let request = resize_srq(srq.srqn, new_srq, shape);
        let before = guest.device.counter(Counter::Work);
        let reply: virtio_rdma_rsp_resize_srq =
            guest.command(VIRTIO_RDMA_CMD_RESIZE_SRQ, &request).unwrap();
        assert_eq!(reply.moved, depth);
        assert!(guest.device.counter(Counter::Work) - before > TURN);
    });
}

/// A guest with many objects, for commands that concern all of them.
struct Much {
    guest: Guest,
    pdn: u32,
    /// The numbers of two QPs that are connected to each other.
    qpns: [u32; 2],
    cqn: u32,
    /// The key of a region at [`DATA`].
    data: u32,
    /// The keys of a region in memory that can be taken away, of a window on it, and of a region for fast
    /// registration in the same memory.
    extra: [u32; 3],
}

impl Much {
    fn new() -> Self {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(16));
        let qps: Vec<u32> =
            (0..MANY).map(|_| guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC)).collect();
        for _ in 0..MANY / 4 {
            guest.create_cq(2);
            guest.create_srq(pdn);
        }
        for _ in 0..MANY {
            guest.reg_mr(pdn, EXTRA.0, 0x1000, ALL);
        }
        let request = region_request(&guest, pdn, 40_000);
        guest.command::<_, virtio_rdma_rsp_mr>(VIRTIO_RDMA_CMD_REG_USER_MR, &request).unwrap();
        let data = guest.reg_mr(pdn, DATA, 0x4000, ALL).lkey;
        let gid = guest.gid;
        let qpns = [qps[0], qps[1]];
        guest.connect(qpns[0], gid, qpns[1]);
        guest.connect(qpns[1], gid, qpns[0]);
        let mut this = Self { guest, pdn, qpns, cqn, data, extra: [0; 3] };
        let access = ALL | VIRTIO_RDMA_ACCESS_MW_BIND;
        this.extra[0] = this.guest.reg_mr(pdn, EXTRA.0, 0x1000, access).lkey;
        for _ in 0..MANY {
            this.extra[1] = this.bind_window(VIRTIO_RDMA_MW_TYPE_1);
        }
        this.extra[2] = this.guest.create_mr(pdn, 1).unwrap().rkey;
        let registration = this.guest.registration(this.extra[2], ALL, EXTRA.0, 0x1000, &[EXTRA.0]);
        assert_eq!(this.post(&Send::reg_mr(1, registration)), VIRTIO_RDMA_WC_SUCCESS);
        this
    }

    fn bind_window(&mut self, kind: u32) -> u32 {
        let window = self.guest.alloc_mw(self.pdn, kind).unwrap();
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (window.rkey, window.rkey);
        (bind.addr, bind.length, bind.lkey) = (EXTRA.0, 0x1000, self.extra[0]);
        bind.access = WRITE;
        assert_eq!(self.post(&Send::bind_mw(1, bind)), VIRTIO_RDMA_WC_SUCCESS);
        window.rkey
    }

    fn post(&mut self, send: &Send) -> u32 {
        self.guest.post_send(self.qpns[0], send);
        self.guest.run();
        self.guest.poll_ring(self.cqn).unwrap().status.into()
    }

    /// Writes by each of the keys in `extra`, and returns the statuses.
    fn write_extra(&mut self) -> [u32; 3] {
        self.extra.map(|key| {
            let part = [sge(DATA, 64, self.data)];
            let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(EXTRA.0, key);
            let status = self.post(&send);
            if status != VIRTIO_RDMA_WC_SUCCESS {
                let gid = self.guest.gid;
                for (from, to) in [(0, 1), (1, 0)] {
                    self.guest.set_state(self.qpns[from], VIRTIO_RDMA_QPS_RESET).unwrap();
                    self.guest.connect(self.qpns[from], gid, self.qpns[to]);
                }
            }
            status
        })
    }

    /// Runs the device until it has done what was begun. This must take longer than a turn.
    fn follow(&self) {
        let work = || self.guest.device.counter(Counter::Work);
        let before = work();
        assert!(!self.guest.device.is_settled());
        self.guest.run();
        assert!(self.guest.device.is_settled());
        let took = work() - before;
        assert!(took > 2 * TURN, "all took {took} ns");
    }
}

#[test]
fn a_change_of_memory_is_followed_in_steps() {
    with_rings(|| {
        let mut much = Much::new();
        let all = much.guest.memory.clone();
        let (ok, refused) = (VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_REM_ACCESS_ERR);
        let (less, _) = all.without(EXTRA.0, EXTRA.1);
        for (memory, status) in [(&less, refused), (&all, ok)] {
            much.guest.device.begin_memory(memory);
            much.follow();
            assert_eq!(much.write_extra(), [status; 3]);
        }
        // Without any memory all rings are lost, and the objects that use them fail.
        much.guest.device.begin_memory(&GuestMemory::default());
        much.follow();
        // QPs in RESET do not fail.
        let rings = u64::from(2 + 1 + 2 * (MANY / 4));
        assert_eq!(much.guest.device.counter(Counter::LostRings), rings);
    });
}

#[test]
fn a_reset_goes_in_steps() {
    with_rings(|| {
        let mut much = Much::new();
        let group = [0xff; 16];
        let (pdn, cqn) = (much.pdn, much.cqn);
        let qpn = much.guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_UD);
        much.guest.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, qpn, group).unwrap();
        much.guest.device.begin_reset();
        much.follow();
        let status = much.guest.device.status();
        let left = (status.gids.len(), status.qps.len(), status.srqs.len(), status.cqs);
        assert_eq!((left, status.mrs, status.mws, status.pds), ((0, 0, 0, 0), 0, 0, 0));
        assert!(!status.started);
        // Another reset finds nothing to do.
        much.guest.device.begin_reset();
        assert!(much.guest.device.is_settled());
        much.guest.start();
        let pdn = much.guest.create_pd();
        much.guest.reg_mr(pdn, DATA, 0x4000, ALL);
        assert_eq!(much.guest.device.status().mrs, 1);
    });
}

#[test]
fn a_qp_with_many_windows_goes_in_steps() {
    with_rings(|| {
        let mut much = Much::new();
        for _ in 0..MANY {
            much.bind_window(VIRTIO_RDMA_MW_TYPE_2);
        }
        let work = |much: &Much| much.guest.device.counter(Counter::Work);
        let before = work(&much);
        much.guest.destroy_qp(much.qpns[0]).unwrap();
        assert!(work(&much) - before > u64::from(MANY) * 100);
        assert_eq!(much.guest.device.status().mws, 2 * MANY as usize);
    });
}

/// Makes a DESTROY_QP available for the QP that the windows are bound to, with `room` bytes for the
/// reply. Returns the address of the reply.
fn add_destroy_qp(much: &mut Much, room: u32) -> u64 {
    let (at, reply) = (47 << 20, (47 << 20) + PAGE);
    let request = virtio_rdma_cmd_destroy_qp { qpn: much.qpns[0] };
    let bytes = encode(VIRTIO_RDMA_CMD_DESTROY_QP, &request);
    much.guest.memory.write(at, &bytes).unwrap();
    much.guest.memory.write(reply, &[0xff]).unwrap();
    let reply_buffer = (reply, room, true);
    let buffers = [(at, bytes.len() as u32, false), reply_buffer];
    much.guest.add(0, &buffers[..if room == 0 { 1 } else { 2 }]);
    reply
}

/// For its peers, a QP that is being destroyed does not exist any more. It sends no NAK for windows that
/// are freed already.
#[test]
fn a_qp_that_ends_is_gone_before_its_windows_are() {
    with_rings(|| {
        let mut much = Much::new();
        let keys: Vec<u32> = (0..MANY).map(|_| much.bind_window(VIRTIO_RDMA_MW_TYPE_2)).collect();
        let reply = add_destroy_qp(&mut much, 1);
        much.guest.device.run(1);
        assert_eq!(much.guest.bytes(reply, 1), [0xff], "it takes several turns");
        // This window is freed first.
        let key = *keys.iter().min().unwrap();
        let local = [sge(DATA, 8, much.data)];
        let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(EXTRA.0, key);
        much.guest.post_send(much.qpns[1], &write);
        settle_in_time(&[&much.guest]);
        assert_eq!(much.guest.bytes(reply, 1), [VIRTIO_RDMA_STATUS_OK as u8]);
        let status = much.guest.poll_ring(much.cqn).unwrap().status;
        assert_eq!(u32::from(status), VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    });
}

/// A request without room for a status is not carried out, not even in part.
#[test]
fn a_request_without_room_for_a_status_changes_nothing() {
    with_rings(|| {
        let mut much = Much::new();
        let keys: Vec<u32> = (0..MANY).map(|_| much.bind_window(VIRTIO_RDMA_MW_TYPE_2)).collect();
        add_destroy_qp(&mut much, 0);
        much.guest.run();
        assert!(much.guest.used(0).is_some());
        let local = [sge(DATA, 8, much.data)];
        for key in [keys.iter().min(), keys.iter().max()].into_iter().flatten() {
            let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(EXTRA.0, *key);
            much.guest.post_send(much.qpns[1], &write);
            much.guest.run();
            let status = much.guest.poll_ring(much.cqn).unwrap().status;
            assert_eq!(u32::from(status), VIRTIO_RDMA_WC_SUCCESS);
        }
    });
}

#[test]
fn an_srq_for_xrc_goes_in_steps() {
    with_rings(|| {
        let mut guest = guest();
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(2));
        let xrcdn = guest.alloc_xrcd().unwrap();
        let srqns = [(); 2].map(|()| guest.create_xrc_srq(pdn, xrcdn, cqn).unwrap());
        for _ in 0..MANY {
            guest.create_xrc_tgt(xrcdn).unwrap();
        }
        for srqn in srqns {
            let before = guest.device.counter(Counter::Work);
            guest.destroy_srq(srqn).unwrap();
            assert!(guest.device.counter(Counter::Work) - before > TURN);
        }
        assert_eq!(guest.destroy_srq(srqns[0]), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    });
}

/// Begins a REG_USER_MR of many pages, and leaves it unfinished. Returns the address of the status.
fn begin_region(guest: &mut Guest, pdn: u32, count: u64) -> u64 {
    let bytes = encode(VIRTIO_RDMA_CMD_REG_USER_MR, &region_request(guest, pdn, count));
    let (at, reply) = (47 << 20, (47 << 20) + PAGE);
    guest.memory.write(at, &bytes).unwrap();
    guest.memory.write(reply, &[0xff]).unwrap();
    guest.add(0, &[(at, bytes.len() as u32, false), (reply, 64, true)]);
    // These turns read the table and find half of the pages.
    for _ in 0..2 * count * 50 / 3 / 64_000 {
        guest.device.run(256);
    }
    assert_eq!(guest.bytes(reply, 1), [0xff]);
    reply
}

#[test]
fn a_region_that_is_half_there_follows_or_goes_in_steps() {
    with_rings(|| {
        let mut guest = guest();
        let pdn = guest.create_pd();
        let reply = begin_region(&mut guest, pdn, 60_000);
        guest.device.begin_memory(&guest.memory);
        guest.device.run(64);
        assert!(!guest.device.is_settled());
        guest.run();
        assert_eq!(guest.bytes(reply, 1), [VIRTIO_RDMA_STATUS_OK as u8]);
        assert_eq!(guest.device.status().mrs, 1);
        let reply = begin_region(&mut guest, pdn, 60_000);
        guest.device.begin_reset();
        let before = guest.device.counter(Counter::Work);
        guest.run();
        assert!(guest.device.counter(Counter::Work) - before > TURN);
        assert_eq!((guest.bytes(reply, 1), guest.device.status().mrs), (vec![0xff], 0));
    });
}

#[test]
fn a_region_whose_last_page_is_none_goes_in_steps() {
    with_rings(|| {
        let mut guest = guest();
        let pdn = guest.create_pd();
        let count = 40_000;
        let request = region_request(&guest, pdn, count);
        guest.memory.write((48 << 20) + (count - 1) * 8, &(1_u64 << 50).to_le_bytes()).unwrap();
        let found = |guest: &Guest| guest.device.counter(Counter::Work);
        let before = found(&guest);
        let result = guest.command::<_, virtio_rdma_rsp_mr>(VIRTIO_RDMA_CMD_REG_USER_MR, &request);
        assert_eq!(result.err(), Some(VIRTIO_RDMA_STATUS_FAULT));
        // The device read the table, found its pages, and freed those that it had found.
        assert!(found(&guest) - before > count * (4 + 50 + 10));
    });
}

/// What is known of the pages of a region that is refused, or is not in memory, takes as long to free as that of any
/// other.
#[test]
fn a_region_that_is_none_is_freed_in_steps() {
    with_rings(|| {
        let mut guest = guest();
        let all = guest.memory.clone();
        let pdn = guest.create_pd();
        let count = 40_000;
        let mut request = region_request(&guest, pdn + 1, count);
        let work = |guest: &Guest| guest.device.counter(Counter::Work);
        let (read, find, free) = (count * 4, count * 50, count * 10);
        let refuse = |guest: &mut Guest, request: &_, why, least| {
            let before = work(guest);
            let result =
                guest.command::<_, virtio_rdma_rsp_mr>(VIRTIO_RDMA_CMD_REG_USER_MR, request);
            assert_eq!(result.err(), Some(why));
            assert!(work(guest) - before > least * 9 / 10, "{why}");
        };
        // Without a PD, beyond the quota, with a last page that is none, or whose address is malformed.
        refuse(&mut guest, &request, VIRTIO_RDMA_STATUS_NO_OBJECT, read + find + 2 * free);
        request.pdn = pdn;
        let quota = Quota { memory: PAGE, ..Quota::default() };
        guest.device.set_policy(DevicePolicy { quota, ..DevicePolicy::default() });
        refuse(&mut guest, &request, VIRTIO_RDMA_STATUS_NO_RESOURCE, read + find + 2 * free);
        guest.device.set_policy(DevicePolicy::default());
        let last = (48 << 20) + (count - 1) * 8;
        guest.memory.write(last, &(1_u64 << 50).to_le_bytes()).unwrap();
        refuse(&mut guest, &request, VIRTIO_RDMA_STATUS_FAULT, read + find + 2 * free);
        guest.memory.write(last, &1_u64.to_le_bytes()).unwrap();
        refuse(&mut guest, &request, VIRTIO_RDMA_STATUS_INVAL, read + free);
        // One that has lost its memory ends, gets other memory, or is reset.
        let (less, _) = all.without(DATA, PAGE);
        let lose = |guest: &mut Guest| {
            guest.device.set_memory(&all);
            let request = region_request(guest, pdn, count);
            let mr: virtio_rdma_rsp_mr =
                guest.command(VIRTIO_RDMA_CMD_REG_USER_MR, &request).unwrap();
            guest.device.set_memory(&less);
            (mr.mrn, work(guest))
        };
        let (mrn, before) = lose(&mut guest);
        guest.dereg_mr(mrn).unwrap();
        assert!(work(&guest) - before > free);
        let (mrn, before) = lose(&mut guest);
        let mut rereg = virtio_rdma_cmd_rereg_mr::new_zeroed();
        (rereg.mrn, rereg.flags) = (mrn, VIRTIO_RDMA_REREG_TRANS);
        rereg.mr.page_shift = PAGE_SHIFT;
        guest.command::<_, ()>(VIRTIO_RDMA_CMD_REREG_MR, &rereg).unwrap();
        assert!(work(&guest) - before > free);
        guest.dereg_mr(mrn).unwrap();
        let reset = |guest: &mut Guest, before| {
            guest.device.begin_reset();
            guest.run();
            work(guest) - before
        };
        let (_, before) = lose(&mut guest);
        let with_region = reset(&mut guest, before);
        guest.device.set_memory(&all);
        let before = work(&guest);
        assert!(with_region - reset(&mut guest, before) > free);
    });
}

/// Runs the device until it has done what `begin` begins, while a peer is in the middle of a copy by
/// `key`. The device must wait for the end of the copy, and no other copy can begin.
fn follow_beside_copy(device: &Arc<Device>, key: u32, begin: impl FnOnce(&Device)) {
    let keys = &device.hca().keys;
    let Ok(pin) = read(keys).pin(key) else { panic!("the region is not in memory") };
    begin(device);
    let thread = thread::spawn({
        let device = Arc::clone(device);
        move || {
            while !device.is_settled() {
                device.run(64);
            }
        }
    });
    while read(keys).pin(key).is_ok() {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(20));
    assert!(!thread.is_finished(), "the memory is given away under a copy");
    drop(pin);
    thread.join().unwrap();
}

/// Begins a command, which waits for a copy by `key` in turns. Another copy by it begins only if `goes_on`.
fn wait_for_copy<Q>(guest: &mut Guest, key: u32, goes_on: bool, command: u32, request: &Q)
where
    Q: IntoBytes + Immutable,
{
    let hca = Arc::clone(guest.device.hca());
    let Ok(pin) = read(&hca.keys).pin(key) else { panic!("the region is not in memory") };
    guest.begin_command(command, request);
    for _ in 0..10 {
        assert_eq!(guest.device.run(64), Next::Busy);
    }
    assert!(guest.used(0).is_none(), "the command ends under a copy");
    assert_eq!(read(&hca.keys).pin(key).is_ok(), goes_on);
    drop(pin);
    guest.run();
    assert!(guest.used(0).is_some());
}

/// A guest's thread does not stand while a peer is in the middle of a round with a region or window that ends, or
/// becomes another.
#[test]
fn the_end_of_a_region_waits_in_turns() {
    with_rings(|| {
        let mut pair = Pair::new();
        let (b, guest) = (pair.ends[1], &mut pair.b);
        let fast = guest.create_mr(b.pdn, 1).unwrap();
        let registration = guest.registration(fast.rkey, ALL, DATA, 0x1000, &[DATA]);
        guest.post_send(b.qpn, &Send::reg_mr(1, registration));
        let region = guest.reg_mr(b.pdn, DATA, 0x1000, ALL | VIRTIO_RDMA_ACCESS_MW_BIND);
        let window = guest.alloc_mw(b.pdn, VIRTIO_RDMA_MW_TYPE_1).unwrap();
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (window.rkey, window.rkey);
        (bind.addr, bind.length, bind.lkey, bind.access) = (DATA, 0x1000, region.lkey, WRITE);
        guest.post_send(b.qpn, &Send::bind_mw(2, bind));
        guest.run();
        let mut rereg = virtio_rdma_cmd_rereg_mr::new_zeroed();
        (rereg.mrn, rereg.flags) = (b.mrn, VIRTIO_RDMA_REREG_ACCESS);
        rereg.mr.access_flags = LOCAL;
        wait_for_copy(guest, b.key, true, VIRTIO_RDMA_CMD_REREG_MR, &rereg);
        for (mrn, key) in [(b.mrn, b.key), (fast.mrn, fast.rkey)] {
            let request = virtio_rdma_cmd_dereg_mr { mrn };
            wait_for_copy(guest, key, false, VIRTIO_RDMA_CMD_DEREG_MR, &request);
        }
        let request = virtio_rdma_cmd_dealloc_mw { mwn: window.mwn };
        wait_for_copy(guest, window.rkey, false, VIRTIO_RDMA_CMD_DEALLOC_MW, &request);
    });
}

/// A change of memory and a reset wait in turns for a peer that is in the middle of a round.
#[test]
fn changes_of_all_wait_for_a_copy_in_turns() {
    with_rings(|| {
        for begin in
            [|device: &Device| device.begin_memory(&GuestMemory::default()), Device::begin_reset]
        {
            let pair = Pair::new();
            let (device, key) = (&pair.b.device, pair.ends[1].key);
            let Ok(pin) = read(&device.hca().keys).pin(key) else { panic!("it is not in memory") };
            begin(device);
            for _ in 0..10 {
                assert_eq!(device.run(64), Next::Busy);
            }
            assert!(!device.is_settled() && read(&device.hca().keys).pin(key).is_err());
            drop(pin);
            pair.b.run();
            assert!(device.is_settled());
        }
    });
}

/// Begins a change while another thread has the lock of an object, for which the change waits in turns.
fn wait_for_lock<T>(guest: &Guest, mutex: &Mutex<T>, begin: impl FnOnce(&Device)) {
    let device = &guest.device;
    let guard = mutex.lock().unwrap();
    begin(device);
    for _ in 0..10 {
        assert_eq!(device.run(64), Next::Busy);
    }
    assert!(!device.is_settled());
    drop(guard);
    guest.end_change();
}

/// A change of memory, a reset and a freeze wait in turns for a thread that is in an access to memory with the lock
/// of an object.
#[test]
fn changes_of_all_wait_for_locks_in_turns() {
    with_rings(|| {
        let remap = |device: &Device, memory: &GuestMemory| device.begin_memory(memory);
        let reset = |device: &Device, _: &GuestMemory| device.begin_reset();
        let freeze = |device: &Device, _: &GuestMemory| device.begin_freeze();
        for begin in [remap, reset, freeze] {
            let mut pair = Pair::new();
            pair.b.create_srq(pair.ends[1].pdn);
            let (guest, hca, end) = (&pair.b, pair.b.device.hca(), pair.ends[1]);
            let begin = |device: &Device| begin(device, &guest.memory);
            let qp = hca.qps.get(hca.slot_of(end.qpn).unwrap()).unwrap();
            wait_for_lock(guest, &qp.responder, begin);
        }
        for begin in [remap, reset, freeze] {
            let pair = Pair::new();
            let cqn = u16::try_from(pair.ends[1].cqn).unwrap();
            let begin = |device: &Device| begin(device, &pair.b.memory);
            wait_for_lock(&pair.b, pair.b.device.hca().cqs.get(cqn).unwrap(), begin);
        }
        for begin in [remap, reset] {
            let mut pair = Pair::new();
            let srqn = u16::try_from(pair.b.create_srq(pair.ends[1].pdn)).unwrap();
            let begin = |device: &Device| begin(device, &pair.b.memory);
            wait_for_lock(
                &pair.b,
                pair.b.device.hca().srqs.get(Slot::from(srqn - 1)).unwrap(),
                begin,
            );
        }
        for begin in [reset, freeze] {
            let pair = Pair::new();
            let hca = pair.b.device.hca();
            let begin = |device: &Device| begin(device, &pair.b.memory);
            wait_for_lock(&pair.b, &hca.events, begin);
            let pair = Pair::new();
            let hca = pair.b.device.hca();
            wait_for_lock(&pair.b, &hca.completion_events[0], begin);
        }
    });
}

/// Returns a region whose key is to be invalidated, while a copy by it is under way.
fn copy_by(guest: &Guest, key: u32) -> Arc<Mr> {
    let mr = read(&guest.device.hca().keys).resolved(key >> 8).cloned().unwrap();
    assert!(mr.enter());
    mr
}

/// Ends the copy that [`copy_by`] has begun, and lets go of the region, for which a reset waits.
fn end_copy(mr: Arc<Mr>) {
    mr.leave();
    drop(mr);
}

/// Runs a guest that has to wait for a copy by a key in turns. No other copy by it begins meanwhile.
fn wait_to_revoke(guest: &Guest, keys: &RwLock<KeyTable>, key: u32) {
    for _ in 0..10 {
        assert_eq!(guest.device.run(64), Next::Busy);
    }
    assert!(read(keys).pin(key).is_err(), "another copy begins");
}

fn fast_region(pair: &mut Pair) -> u32 {
    let (end, guest) = (pair.ends[1], &mut pair.b);
    let mr = guest.create_mr(end.pdn, 1).unwrap();
    let registration = guest.registration(mr.rkey, ALL, DATA, 0x1000, &[DATA]);
    guest.post_send(end.qpn, &Send::reg_mr(1, registration));
    guest.run();
    assert_eq!(u32::from(pair.poll_b().unwrap().status), VIRTIO_RDMA_WC_SUCCESS);
    mr.rkey
}

/// A guest's thread does not stand while a peer copies by a key that a work request invalidates. The work request and
/// those behind it wait.
#[test]
fn an_invalidation_waits_in_turns() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let key = fast_region(&mut pair);
        let mr = copy_by(&pair.b, key);
        let invalidate = Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(key);
        let write = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, b.key)]);
        pair.b.post_send(b.qpn, &invalidate);
        pair.b.post_send(b.qpn, &write.rdma(DATA, a.key));
        wait_to_revoke(&pair.b, &pair.b.device.hca().keys, key);
        assert!(pair.poll_b().is_none());
        end_copy(mr);
        pair.settle();
        for wr_id in [2, 3] {
            let cqe = pair.poll_b().unwrap();
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (wr_id, VIRTIO_RDMA_WC_SUCCESS));
        }
    });
}

/// A READ that invalidates a key waits when its data is there, and is not done once more.
#[test]
fn a_read_that_invalidates_waits_in_turns() {
    without_upgrades();
    with_rings(|| {
        for (len, is_saved) in [(0, false), (64, false), (64, true), (300 << 10_usize, false)] {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            let key = fast_region(&mut pair);
            let mr = copy_by(&pair.b, key);
            let data = pair.a.fill(DATA, len, 5);
            let local = [sge(DATA, len as u32, b.key)];
            let fetch = |wr_id, opcode| Send::new(wr_id, opcode, &local).rdma(DATA, a.key);
            let read = fetch(2, VIRTIO_RDMA_WR_RDMA_READ_WITH_INV).invalidate(key);
            pair.b.post_send(b.qpn, &read);
            pair.b.post_send(b.qpn, &fetch(3, VIRTIO_RDMA_WR_RDMA_READ));
            wait_to_revoke(&pair.b, &pair.b.device.hca().keys, key);
            assert!(pair.poll_b().is_none());
            assert_eq!(pair.b.bytes(DATA, len), data);
            end_copy(mr);
            if is_saved {
                upgrade(&[&pair.a, &pair.b]);
            }
            pair.settle();
            let told = if is_saved { 0 } else { len as u32 };
            for (wr_id, byte_len) in [(2, told), (3, len as u32)] {
                let cqe = pair.poll_b().unwrap();
                assert_eq!((cqe.wr_id, cqe.byte_len), (wr_id, byte_len));
                assert_eq!(u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS);
                assert_eq!(u32::from(cqe.opcode), VIRTIO_RDMA_WC_RDMA_READ);
            }
            assert_eq!(pair.b.device.counter(Counter::ReadMessages), 2);
            assert_eq!(pair.b.device.counter(Counter::ReadBytes), 2 * len as u64);
        }
    });
}

/// A window of type 1 is bound to something else while a peer copies by it.
#[test]
fn the_binding_of_a_window_waits_in_turns() {
    with_rings(|| {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        let access = ALL | VIRTIO_RDMA_ACCESS_MW_BIND;
        let region = pair.b.reg_mr(b.pdn, DATA, 0x1000, access).lkey;
        let window = pair.b.alloc_mw(b.pdn, VIRTIO_RDMA_MW_TYPE_1).unwrap().rkey;
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey, bind.lkey) = (window, window, region);
        (bind.addr, bind.length, bind.access) = (DATA, 0x1000, WRITE);
        pair.b.post_send(b.qpn, &Send::bind_mw(1, bind));
        pair.settle();
        assert_eq!(pair.poll_b().unwrap().wr_id, 1);
        let mr = copy_by(&pair.b, window);
        bind.new_rkey ^= 1;
        pair.b.post_send(b.qpn, &Send::bind_mw(2, bind));
        wait_to_revoke(&pair.b, &pair.b.device.hca().keys, window);
        assert!(pair.poll_b().is_none());
        end_copy(mr);
        pair.settle();
        let cqe = pair.poll_b().unwrap();
        assert_eq!((cqe.wr_id, u32::from(cqe.status)), (2, VIRTIO_RDMA_WC_SUCCESS));
        assert!(read(&pair.b.device.hca().keys).pin(window ^ 1).is_ok());
    });
}

/// A SEND that invalidates a key by which somebody copies waits at its sender. It keeps nobody else from the receiver,
/// and its data is copied once.
#[test]
fn a_send_that_invalidates_waits_in_turns() {
    without_upgrades();
    let large = 300 << 10_usize;
    let cases = [
        (0, false, false),
        (64, false, false),
        (64, true, false),
        (64, true, true),
        (large, false, false),
        (large, false, true),
    ];
    with_rings(|| {
        for (len, is_inline, is_saved) in cases {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            let key = fast_region(&mut pair);
            let mr = copy_by(&pair.b, key);
            let data = pair.a.fill(DATA, len, 5);
            pair.b.post_recv(b.qpn, 2, &[sge(DATA, len as u32, b.key)]);
            pair.b.run();
            let mut send =
                Send::new(3, VIRTIO_RDMA_WR_SEND_WITH_INV, &[sge(DATA, len as u32, a.key)]);
            if is_inline {
                send.sges.clear();
                send = send.inline(&data);
            }
            pair.a.post_send(a.qpn, &send.invalidate(key));
            let hca = Arc::clone(pair.b.device.hca());
            wait_to_revoke(&pair.a, &hca.keys, key);
            let qp = hca.qps.get(hca.slot_of(b.qpn).unwrap()).unwrap();
            assert!(qp.responder.try_lock().is_ok());
            assert!(pair.poll_a().is_none() && pair.poll_b().is_none());
            assert_eq!(pair.b.bytes(DATA, len), data);
            pair.b.memory.write(DATA, &vec![0; len]).unwrap();
            end_copy(mr);
            // A device that is saved at this moment sends the message once more.
            let expected = if is_saved { data } else { vec![0; len] };
            if is_saved {
                upgrade(&[&pair.a, &pair.b]);
            }
            pair.settle();
            let (sent, received) = (pair.poll_a().unwrap(), pair.poll_b().unwrap());
            let ok = VIRTIO_RDMA_WC_SUCCESS;
            assert_eq!((u32::from(sent.status), u32::from(received.status)), (ok, ok));
            assert_eq!((received.wr_id, received.byte_len), (2, len as u32));
            assert_eq!(received.ex, key);
            assert_eq!(pair.b.bytes(DATA, len), expected);
        }
    });
}

/// A device is saved between a command and its reply. The command is not done once more.
#[test]
fn a_reply_that_waits_is_sent_before_the_device_is_saved() {
    let mut pair = Pair::new();
    let end = pair.ends[1];
    let Ok(pin) = read(&pair.b.device.hca().keys).pin(end.key) else { panic!("no region") };
    let request = virtio_rdma_cmd_dereg_mr { mrn: end.mrn };
    pair.b.begin_command(VIRTIO_RDMA_CMD_DEREG_MR, &request);
    pair.b.device.run(64);
    drop(pin);
    assert!(pair.b.used(0).is_none());
    pair.b.device.save();
    assert!(pair.b.used(0).is_some());
}

/// A guest's thread does not stand while a peer sends to a QP whose receive queue it visits.
#[test]
fn a_receive_queue_waits_in_turns() {
    with_rings(|| {
        let pair = Pair::new();
        let hca = Arc::clone(pair.b.device.hca());
        let slot = hca.slot_of(pair.ends[1].qpn).unwrap();
        let responder = hca.qps.get(slot).unwrap().responder.lock().unwrap();
        hca.ready.set(hca.jobs.receive(slot));
        for _ in 0..10 {
            assert_eq!(pair.b.device.run(64), Next::Busy);
        }
        drop(responder);
        pair.b.run();
    });
}

#[test]
fn memory_is_not_given_away_under_a_copy() {
    with_rings(|| {
        let much = Much::new();
        let all = much.guest.memory.clone();
        let (less, _) = all.without(EXTRA.0, EXTRA.1);
        let device = &much.guest.device;
        for key in much.extra {
            follow_beside_copy(device, key, |device| device.begin_memory(&less));
            device.set_memory(&all);
        }
        follow_beside_copy(device, much.extra[2], Device::begin_reset);
        for which in [0, 1] {
            let much = Much::new();
            follow_beside_copy(&much.guest.device, much.extra[which], Device::begin_reset);
        }
    });
}
