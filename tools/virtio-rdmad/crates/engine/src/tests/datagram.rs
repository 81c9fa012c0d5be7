// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests datagrams and the GSI.

use abi::*;
use zerocopy::FromZeros;

use super::driver::*;
use crate::Counter;

pub const QKEY: u32 = 0x1111_2222;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;

/// Brings a UD or GSI QP from RESET to RTS.
pub fn to_rts(guest: &mut Guest, qpn: u32, qkey: u32, gsi: bool) {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = VIRTIO_RDMA_QPS_INIT as u8;
    (attr.port_num, attr.qkey) = (1, qkey);
    let port = if gsi { 0 } else { VIRTIO_RDMA_QP_PORT };
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_PKEY_INDEX | VIRTIO_RDMA_QP_QKEY | port;
    guest.modify(qpn, mask, attr).unwrap();
    guest.set_state(qpn, VIRTIO_RDMA_QPS_RTR).unwrap();
    guest.make_rts(qpn, false).unwrap();
}

/// Makes two guests, each with a QP of this kind in RTS.
pub fn pair(kind: u32, qkey: u32) -> Pair {
    let mut pair = Pair::unconnected(kind);
    let [a, b] = pair.ends;
    let gsi = kind == VIRTIO_RDMA_QPT_GSI;
    to_rts(&mut pair.a, a.qpn, qkey, gsi);
    to_rts(&mut pair.b, b.qpn, qkey, gsi);
    pair
}

#[test]
pub fn a_datagram_arrives_behind_its_header() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, 200, 5);
    let places = [sge(DATA, 30, b.key), sge(DATA + 4096, 300, b.key)];
    pair.b.post_recv(b.qpn, 8, &places);
    let part = [sge(DATA, 200, a.key)];
    pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(gid(2), b.qpn, QKEY, a.pdn));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((7, VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_SEND)));
    let cqe = pair.poll_b().unwrap();
    assert_eq!(brief(Some(cqe)), Some((8, VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_RECV)));
    assert_eq!((cqe.byte_len, cqe.src_qp, cqe.wc_flags), (240, a.qpn, VIRTIO_RDMA_WC_GRH));
    let found = [pair.b.bytes(DATA, 30), pair.b.bytes(DATA + 4096, 210)].concat();
    assert_eq!(found[20], 0x45);
    assert_eq!(found[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert_eq!(found[40..], data);
}

#[test]
pub fn the_gsi_sends_its_own_qkey() {
    let mut pair = pair(VIRTIO_RDMA_QPT_GSI, 0x8001_0000);
    let [a, b] = pair.ends;
    assert_eq!((a.qpn, b.qpn), (1, 1));
    pair.b.post_recv(1, 8, &[sge(DATA, 296, b.key)]);
    let part = [sge(DATA, 256, a.key)];
    pair.a.post_send(1, &Send::new(7, SEND, &part).ud(gid(2), 1, 0x8000_0000, a.pdn));
    pair.settle();
    assert_eq!(pair.poll_b().map(|cqe| cqe.byte_len), Some(296));
}

#[test]
pub fn what_cannot_be_delivered_is_dropped() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    let part = [sge(DATA, 100, a.key)];
    let lost = |pair: &mut Pair, gid, qpn, qkey, counter| {
        let before = pair.a.device.counter(counter);
        pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(gid, qpn, qkey, a.pdn));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_SUCCESS);
        assert!(pair.poll_b().is_none());
        assert_eq!(pair.a.device.counter(counter), before + 1);
    };
    lost(&mut pair, gid(9), b.qpn, QKEY, Counter::DropUnreachable);
    lost(&mut pair, gid(2), 5, QKEY, Counter::DropUnreachable);
    lost(&mut pair, gid(2), u32::MAX, QKEY, Counter::DropUnreachable);
    lost(&mut pair, gid(2), b.qpn, QKEY, Counter::DropNoReceive);
    pair.b.post_recv(b.qpn, 8, &[sge(DATA, 139, b.key)]);
    lost(&mut pair, gid(2), b.qpn, QKEY, Counter::DropRefused);
    let small = [sge(DATA, 99, a.key)];
    pair.a.post_send(a.qpn, &Send::new(7, SEND, &small).ud(gid(2), b.qpn, QKEY, a.pdn));
    pair.settle();
    assert_eq!(pair.poll_b().map(|cqe| (cqe.wr_id, cqe.byte_len)), Some((8, 139)));
}

/// IBA 9.6.1.4.1: a datagram with a wrong Q_Key is dropped. The port of the receiver counts it, and the
/// port of the sender does not.
#[test]
pub fn a_wrong_qkey_is_counted_where_it_arrives() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    pair.b.post_recv(b.qpn, 8, &[sge(DATA, 140, b.key)]);
    let send = Send::new(7, SEND, &[sge(DATA, 100, a.key)]);
    pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, QKEY + 1, a.pdn));
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_SUCCESS);
    assert!(pair.poll_b().is_none());
    let counted = [&pair.a, &pair.b].map(|guest| guest.device.counter(Counter::DropQkey));
    assert_eq!(counted, [0, 1]);
}

#[test]
pub fn errors_stop_the_send_queue_alone() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    let mut fail = |send: Send, status| {
        pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, QKEY, a.pdn));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, status);
        assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_SQE);
        pair.a.post_send(a.qpn, &Send::new(2, SEND, &[]));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_WR_FLUSH_ERR);
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RTS).unwrap();
    };
    fail(Send::new(1, SEND, &[sge(DATA, 4097, a.key)]), VIRTIO_RDMA_WC_LOC_LEN_ERR);
    fail(Send::new(1, SEND, &[sge(DATA, 8, a.key ^ 1)]), VIRTIO_RDMA_WC_LOC_PROT_ERR);
    fail(Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[]), VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
    pair.b.post_recv(b.qpn, 8, &[sge(DATA, 40, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(3, SEND, &[]).ud(gid(2), b.qpn, QKEY, a.pdn));
    pair.settle();
    assert_eq!(brief(pair.poll_b()).unwrap().0, 8);
}

#[test]
pub fn what_was_posted_before_the_qp_ends_is_sent() {
    let end = |pair: &mut Pair, qpn, way| match way {
        0 => pair.a.destroy_qp(qpn),
        1 => pair.a.set_state(qpn, VIRTIO_RDMA_QPS_ERR),
        _ => pair.a.set_state(qpn, VIRTIO_RDMA_QPS_RESET),
    };
    for way in 0..3 {
        let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
        let [a, b] = pair.ends;
        for i in 0..5 {
            pair.b.post_recv(b.qpn, i, &[sge(DATA + 100 * i, 100, b.key)]);
        }
        let part = [sge(DATA, 50, a.key)];
        for i in 0..5 {
            pair.a.post_send(a.qpn, &Send::new(i, SEND, &part).ud(gid(2), b.qpn, QKEY, a.pdn));
        }
        end(&mut pair, a.qpn, way).unwrap();
        pair.settle();
        for i in 0..5 {
            let expected = Some((i, VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_RECV));
            assert_eq!(brief(pair.poll_b()), expected, "way {way}");
        }
    }
}
