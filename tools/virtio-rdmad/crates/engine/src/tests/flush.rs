// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests FLUSH and ATOMIC_WRITE: the access that they need, and each error.

use abi::*;
use testkit::command::{attr_mask, attributes};
use zerocopy::{FromZeros, IntoBytes};

use super::cable::{over_a_cable, Faults};
use super::driver::*;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const OPERATION: u32 = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
const REFUSED: u32 = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
const INVALID: u32 = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
const GLOBAL: u32 = VIRTIO_RDMA_FLUSH_GLOBAL;
const PERSISTENT: u32 = VIRTIO_RDMA_FLUSH_PERSISTENT;
const FLUSHABLE: u32 = VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
const GRANTS: u32 = FLUSHABLE | VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;

/// Does a work request of guest a, and returns its status and opcode.
fn post(pair: &mut Pair, send: &Send) -> (u32, u32) {
    let a = pair.ends[0];
    pair.a.post_send(a.qpn, send);
    pair.settle();
    let cqe = pair.a.poll(a.cqn).expect("a completion");
    (cqe.status.into(), cqe.opcode.into())
}

/// Makes a pair with rings. The QP of b gives its peer this access.
fn pair(access: u32) -> Pair {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    let gid = pair.a.gid;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.b.make_init(b.qpn, access);
    pair.b.make_rtr(b.qpn, gid, a.qpn, true).unwrap();
    pair.b.make_rts(b.qpn, true).unwrap();
    pair
}

fn flush(key: u32, change: impl FnOnce(&mut virtio_rdma_ring_flush_wqe)) -> Send {
    let mut entry = virtio_rdma_ring_flush_wqe::new_zeroed();
    (entry.type_, entry.rkey) = (GLOBAL as u8, key);
    (entry.remote_addr, entry.length) = (DATA, 0x2000);
    change(&mut entry);
    Send { wr: entry.as_bytes().to_vec(), ..Send::new(1, VIRTIO_RDMA_WR_FLUSH, &[]) }
}

fn flushed(grants: u32, rights: u32, change: impl FnOnce(&mut virtio_rdma_ring_flush_wqe)) -> u32 {
    let mut pair = pair(ALL | grants);
    let mr = pair.b.reg_mr(pair.ends[1].pdn, DATA, 0x2000, rights);
    let (status, opcode) = post(&mut pair, &flush(mr.rkey, change));
    assert_eq!(opcode, VIRTIO_RDMA_WC_FLUSH);
    assert_eq!(pair.a.device.counter(Counter::FlushMessages), u64::from(status == OK));
    status
}

#[test]
fn what_a_flush_needs() {
    with_rings(|| {
        assert_eq!(flushed(GRANTS, FLUSHABLE, |_| ()), OK);
        assert_eq!(flushed(FLUSHABLE, FLUSHABLE, |_| ()), OK);
        assert_eq!(flushed(0, FLUSHABLE, |_| ()), INVALID, "the QP does not let it");
        assert_eq!(flushed(GRANTS, ALL, |_| ()), REFUSED, "the region does not let it");
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.type_ = PERSISTENT as u8), REFUSED);
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.type_ |= PERSISTENT as u8), REFUSED);
        assert_eq!(flushed(FLUSHABLE, FLUSHABLE, |f| f.type_ = PERSISTENT as u8), INVALID);
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.rkey ^= 1), REFUSED);
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.length += 1), REFUSED, "beyond the region");
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.remote_addr -= 1), REFUSED);
        assert_eq!(flushed(GRANTS, FLUSHABLE, |f| f.length = 0), OK);
        let all = |f: &mut virtio_rdma_ring_flush_wqe| {
            (f.level, f.remote_addr, f.length) = (VIRTIO_RDMA_FLUSH_MR as u8, 7, u64::MAX);
        };
        assert_eq!(flushed(GRANTS, FLUSHABLE, all), OK);
        assert_eq!(flushed(GRANTS, ALL, all), REFUSED);
        for (placement, level) in [(0, 0), (4, 0), (255, 0), (1, 2), (1, 255)] {
            let odd = |f: &mut virtio_rdma_ring_flush_wqe| (f.type_, f.level) = (placement, level);
            assert_eq!(flushed(GRANTS, FLUSHABLE, odd), OPERATION);
        }
    });
}

/// A packet has 32 bits for the length of the range. The same work request ends in the same way if no packet is sent.
#[test]
fn a_range_is_shorter_than_4_gib() {
    let test = || {
        with_rings(|| {
            for (length, status) in [
                (u32::MAX.into(), REFUSED),
                (1 << 32, OPERATION),
                (1 << 32 | 8, OPERATION),
                (u64::MAX, OPERATION),
            ] {
                assert_eq!(
                    flushed(GRANTS, FLUSHABLE, |f| f.length = length),
                    status,
                    "{length:#x}"
                );
            }
        });
    };
    test();
    over_a_cable(1, Faults::default(), test);
}

#[test]
fn no_region_is_persistent() {
    with_rings(|| {
        let mut pair = pair(ALL);
        let pages = [DATA];
        let pdn = pair.b.create_pd();
        let result = pair.b.reg_pages(pdn, DATA, 8, GRANTS, &pages);
        assert_eq!(result.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
    });
}

#[test]
fn a_word_is_written() {
    with_rings(|| {
        let mut pair = pair(ALL);
        let [a, b] = pair.ends;
        let write = |at, key| {
            Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &[]).atomic(at, key, 0x1122_3344_5566_7788, 0)
        };
        let done = (OK, VIRTIO_RDMA_WC_ATOMIC_WRITE);
        assert_eq!(post(&mut pair, &write(DATA + 8, b.key)), done);
        assert_eq!(pair.b.memory.read_obj::<u64>(DATA + 8), Ok(0x1122_3344_5566_7788));
        let data = pair.a.fill(DATA, 8, 3);
        let local = [sge(DATA, 3, a.key), sge(DATA + 3, 5, a.key)];
        let send = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &local).rdma(DATA + 16, b.key);
        assert_eq!(post(&mut pair, &send), done);
        assert_eq!(pair.b.bytes(DATA + 16, 8), data);
        let send = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &[]).rdma(DATA + 24, b.key);
        let refused = (OPERATION, VIRTIO_RDMA_WC_ATOMIC_WRITE);
        assert_eq!(post(&mut pair, &send.inline(&data)), refused, "it has a place of its own");
    });
}

#[test]
fn what_an_atomic_write_needs() {
    with_rings(|| {
        let status = |access: u32, at: u64, len: u32, rights: u32| {
            let mut pair = pair(access);
            let a = pair.ends[0];
            let mr = pair.b.reg_mr(pair.ends[1].pdn, DATA, 64, rights);
            let local = [sge(DATA, len, a.key)];
            let send = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &local).rdma(at, mr.rkey);
            let (status, _) = post(&mut pair, &send);
            assert_eq!(pair.b.bytes(DATA, 64), [0; 64]);
            status
        };
        assert_eq!(status(ALL, DATA, 8, ALL), OK);
        assert_eq!(status(ALL, DATA, 4, ALL), VIRTIO_RDMA_WC_LOC_LEN_ERR);
        assert_eq!(status(ALL, DATA, 16, ALL), VIRTIO_RDMA_WC_LOC_LEN_ERR);
        assert_eq!(status(ALL, DATA + 4, 8, ALL), INVALID, "not aligned");
        assert_eq!(status(ALL, DATA + 64, 8, ALL), REFUSED);
        assert_eq!(status(ALL, DATA, 8, READ), REFUSED);
        assert_eq!(status(READ, DATA, 8, ALL), INVALID);
    });
}

/// It counts among the READs and atomics that both ends allow.
#[test]
fn an_atomic_write_needs_a_depth_of_both_ends() {
    with_rings(|| {
        let cases = [((1, 1), OK), ((0, 1), OPERATION), ((1, 0), INVALID)];
        for ((requester, responder), expected) in cases {
            let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
            let [a, b] = pair.ends;
            for (guest, own, (dgid, peer)) in
                [(&mut pair.a, a.qpn, (gid(2), b.qpn)), (&mut pair.b, b.qpn, (gid(1), a.qpn))]
            {
                guest.make_init(own, ALL);
                let mut attr = attributes(VIRTIO_RDMA_QPS_RTR, dgid, peer);
                (attr.path_mtu, attr.min_rnr_timer) = (3, 12);
                attr.max_dest_rd_atomic = responder;
                let mask = attr_mask(VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPS_RTR);
                guest.modify(own, mask, attr).unwrap();
                let mut attr = virtio_rdma_qp_attr::new_zeroed();
                (attr.qp_state, attr.timeout) = (VIRTIO_RDMA_QPS_RTS as u8, 14);
                attr.max_rd_atomic = requester;
                let mask = attr_mask(VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPS_RTS);
                guest.modify(own, mask, attr).unwrap();
            }
            let word = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &[]).atomic(DATA, b.key, 1, 0);
            let depths = (requester, responder);
            assert_eq!(post(&mut pair, &word).0, expected, "{depths:?}");
        }
    });
}

#[test]
fn without_the_features_there_are_none() {
    for which in 0..2 {
        with_rings(|| {
            let mut pair = pair(ALL | GRANTS);
            let guest = if which == 0 { &mut pair.a } else { &mut pair.b };
            let bits = 1 << VIRTIO_RDMA_F_FLUSH | 1 << VIRTIO_RDMA_F_ATOMIC_WRITE;
            let features = guest.device.features() & !bits;
            guest.device.reset();
            guest.start_with(features);
            let pdn = guest.create_pd();
            let result = guest.reg_pages(pdn, DATA, 8, FLUSHABLE, &[DATA]);
            assert_eq!(result.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
            let end = End::new(guest, VIRTIO_RDMA_QPT_RC);
            pair.ends[which] = end;
            let expected = if which == 0 { OPERATION } else { INVALID };
            let key = pair.ends[1].key;
            let word = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_WRITE, &[]).atomic(DATA, key, 1, 0);
            for send in [word, flush(key, |_| ())] {
                for index in 0..2 {
                    let peer = (gid(2 - index as u8), pair.ends[1 - index].qpn);
                    let guest = if index == 0 { &mut pair.a } else { &mut pair.b };
                    let end = pair.ends[index];
                    guest.set_state(end.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
                    while guest.poll(end.cqn).is_some() {}
                    guest.connect(end.qpn, peer.0, peer.1);
                }
                assert_eq!(post(&mut pair, &send).0, expected);
            }
        });
    }
}
