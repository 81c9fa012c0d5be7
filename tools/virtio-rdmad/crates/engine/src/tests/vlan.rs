// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests VLANs: a GID can be reached only from its own VLAN.

use abi::*;

use super::cable::{cable, over_a_cable, Faults};
use super::datagram::{pair, to_rts, QKEY};
use super::driver::*;
use crate::{Address, Counter, Gid};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const EXISTS: Result<(), u32> = Err(VIRTIO_RDMA_STATUS_EXISTS);
const GRH: u32 = VIRTIO_RDMA_WC_GRH;
const NONE: u32 = VIRTIO_RDMA_NO_VLAN;

/// Connects a QP that sends from another entry of the GID table.
fn connect(guest: &mut Guest, end: End, from: u8, dgid: Gid, dest: u32) {
    guest.make_init(end.qpn, ALL);
    guest.make_rtr_from(end.qpn, from, dgid, dest, true).unwrap();
    guest.make_rts(end.qpn, true).unwrap();
}

/// Writes 8 bytes from A to B, and returns the status.
fn write(pair: &mut Pair) -> u32 {
    let [a, b] = pair.ends;
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key));
    pair.settle_in_time();
    brief(pair.poll_a()).unwrap().1
}

/// Makes two guests with QPs in RESET. A has gid(11) in VLAN 5, and B has gid(12) in VLANs 5 and 6.
fn tagged() -> Pair {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    pair.a.add_vlan_gid(1, gid(11), 5).unwrap();
    pair.b.add_vlan_gid(1, gid(12), 5).unwrap();
    pair.b.add_vlan_gid(2, gid(12), 6).unwrap();
    pair
}

#[test]
pub fn a_gid_is_somebody_elses_in_another_vlan() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let gids = [(1, gid(2), 5), (2, gid(9), 0), (3, gid(9), 4094)];
    for (index, gid, vlan) in gids {
        pair.a.add_vlan_gid(index, gid, vlan).unwrap();
        assert_eq!(pair.b.add_vlan_gid(index, gid, vlan), EXISTS);
    }
    assert_eq!(pair.a.add_vlan_gid(1, gid(2), NONE), EXISTS);
    pair.b.add_vlan_gid(1, gid(9), NONE).unwrap();
    pair.b.add_vlan_gid(2, gid(9), 1).unwrap();
    for vlan in [4095, 4096, 0xfffe] {
        assert_eq!(pair.a.add_vlan_gid(1, gid(7), vlan), Err(VIRTIO_RDMA_STATUS_INVAL));
    }
    let expected = [(0, gid(1), None), (1, gid(2), Some(5)), (2, gid(9), Some(0))];
    let found = pair.a.device.status().gids;
    let address = |(index, gid, vlan)| (index, Address { gid, vlan });
    assert_eq!(found[..3], expected.map(address));
    // An entry moves from one VLAN to another.
    pair.a.add_vlan_gid(1, gid(2), 7).unwrap();
    pair.b.add_vlan_gid(3, gid(2), 5).unwrap();
    pair.a.device.reset();
    pair.b.add_vlan_gid(3, gid(9), 4094).unwrap();
}

#[test]
pub fn without_the_feature_there_are_no_vlans() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_UD);
    pair.a.device.reset();
    let without = 1 << VIRTIO_RDMA_F_VLAN | u64::from(!pair.a.rings) << VIRTIO_RDMA_F_RINGS;
    pair.a.start_with(pair.a.device.features() & !without);
    assert_eq!(pair.a.add_vlan_gid(1, gid(2), 5), EXISTS);
    pair.a.add_vlan_gid(1, gid(7), 4095).unwrap();
    let address = Address { gid: gid(7), vlan: None };
    assert_eq!(pair.a.device.status().gids[1], (1, address));
}

#[test]
pub fn connections_stay_in_their_vlan() {
    let mut pair = tagged();
    let [a, b] = pair.ends;
    connect(&mut pair.a, a, 1, gid(12), b.qpn);
    connect(&mut pair.b, b, 1, gid(11), a.qpn);
    assert_eq!(write(&mut pair), OK);
    // The GID in use is removed, as when its network interface is removed.
    pair.b.del_gid(1).unwrap();
    assert_eq!(write(&mut pair), VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    let to_itself = |pair: &mut Pair| {
        let own = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
        connect(&mut pair.a, End { qpn: own, ..a }, 1, gid(11), own);
        pair.a.post_send(own, &Send::new(2, RDMA_WRITE, &[]).rdma(DATA, a.key));
        pair.settle_in_time();
        brief(pair.poll_a()).unwrap().1
    };
    assert_eq!(to_itself(&mut pair), OK);
    // B's QP names A from another VLAN. A's QP names a GID that is not in its VLAN.
    for (from_a, from_b, to_b) in [(1, 2, gid(12)), (1, 0, gid(2)), (0, 1, gid(12))] {
        let mut pair = tagged();
        let [a, b] = pair.ends;
        connect(&mut pair.a, a, from_a, to_b, b.qpn);
        let to_a = if from_a == 0 { gid(1) } else { gid(11) };
        connect(&mut pair.b, b, from_b, to_a, a.qpn);
        assert_eq!(write(&mut pair), VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    }
}

#[test]
pub fn datagrams_tell_their_vlan() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    pair.a.add_vlan_gid(1, gid(11), 5).unwrap();
    pair.a.add_vlan_gid(2, gid(11), 0).unwrap();
    pair.b.add_vlan_gid(1, gid(12), 5).unwrap();
    pair.b.add_vlan_gid(2, gid(12), 0).unwrap();
    pair.b.add_vlan_gid(3, gid(13), 6).unwrap();
    let tagged = GRH | VIRTIO_RDMA_WC_WITH_VLAN;
    for (from, to, expected) in [
        (0, gid(2), Some((GRH, 0))),
        (1, gid(12), Some((tagged, 5))),
        (2, gid(12), Some((tagged, 0))),
        (1, gid(2), None),
        (0, gid(12), None),
        (1, gid(13), None),
    ] {
        if expected.is_some() {
            pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
        }
        let lost = pair.a.device.counter(Counter::DropUnreachable);
        let part = [sge(DATA, 8, a.key)];
        let send = Send::new(7, SEND, &part).ud(to, b.qpn, QKEY, a.pdn).from(from);
        pair.a.post_send(a.qpn, &send);
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        let found = pair.poll_b().map(|cqe| (cqe.wc_flags, cqe.vlan_id));
        assert_eq!(found, expected);
        let lost = pair.a.device.counter(Counter::DropUnreachable) - lost;
        assert_eq!(lost, u64::from(expected.is_none()));
    }
}

#[test]
pub fn groups_reach_those_in_the_vlan() {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let [a, b] = pair.ends;
    let mut group = gid(0);
    group[12..].copy_from_slice(&[239, 1, 2, 3]);
    let other = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_UD);
    to_rts(&mut pair.a, other, QKEY, false);
    pair.a.add_vlan_gid(1, gid(11), 5).unwrap();
    pair.a.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, other, group).unwrap();
    pair.b.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, b.qpn, group).unwrap();
    let cast = |pair: &mut Pair, from| {
        pair.a.post_recv(other, 3, &[sge(DATA, 140, a.key)]);
        let part = [sge(DATA, 8, a.key)];
        let all = VIRTIO_RDMA_MCAST_QPN;
        pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(group, all, QKEY, a.pdn).from(from));
        pair.settle();
        let mut at_a = [pair.poll_a().unwrap().wr_id, pair.poll_a().unwrap().wr_id];
        at_a.sort_unstable();
        assert_eq!(at_a, [3, 7]);
        pair.poll_b().map(|cqe| (cqe.wc_flags, cqe.vlan_id))
    };
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
    pair.b.add_vlan_gid(1, gid(12), 6).unwrap();
    assert_eq!(cast(&mut pair, 1), None);
    assert_eq!(cast(&mut pair, 0), Some((GRH, 0)));
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
    pair.b.add_vlan_gid(1, gid(12), 5).unwrap();
    assert_eq!(cast(&mut pair, 1), Some((GRH | VIRTIO_RDMA_WC_WITH_VLAN, 5)));
}

/// A tag with the number 0 tells of a priority alone where no address is in VLAN 0.
#[test]
fn a_tag_without_a_vlan_is_a_priority() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
        let [a, b] = pair.ends;
        let part = [sge(DATA, 8, a.key)];
        let receive = |pair: &mut Pair| {
            pair.settle();
            pair.poll_b().map(|cqe| (cqe.wc_flags, cqe.vlan_id))
        };
        pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
        pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(gid(2), b.qpn, QKEY, a.pdn));
        assert_eq!(receive(&mut pair), Some((GRH, 0)));
        let cable = cable().unwrap();
        let mut frame = cable.sent.lock().unwrap().last().unwrap().clone();
        frame.splice(12..12, [0x81, 0x00, 0x60, 0x00]);
        for (vlan, expected) in [(6, GRH), (0, GRH | VIRTIO_RDMA_WC_WITH_VLAN)] {
            pair.b.add_vlan_gid(1, gid(12), vlan).unwrap();
            pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
            assert!(cable.bring(1, &frame), "a guest takes the frame");
            assert_eq!(receive(&mut pair), Some((expected, 0)));
        }
    });
}
