// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests multicast groups, and the counters of the port.

use std::sync::Arc;

use abi::*;

use super::cable::{cable, over_a_cable, Faults};
use super::datagram::{pair, to_rts, QKEY};
use super::driver::*;
use crate::{Counter, DevicePolicy, Gid, Limits, Quota};

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const ATTACH: u32 = VIRTIO_RDMA_CMD_ATTACH_MCAST;
const DETACH: u32 = VIRTIO_RDMA_CMD_DETACH_MCAST;
const ALL_QPS: u32 = VIRTIO_RDMA_MCAST_QPN;

/// An IPv4 group.
fn group(number: u8) -> Gid {
    let mut gid = gid(0);
    gid[12..].copy_from_slice(&[239, 1, 2, number]);
    gid
}

/// An IPv6 group.
fn group6(number: u8) -> Gid {
    let mut gid = [0; 16];
    (gid[0], gid[1], gid[15]) = (0xff, 0x0e, number);
    gid
}

/// The entry of A's GID table that has an IPv6 address.
const IPV6: u16 = 1;

/// Makes two guests with a QP each. A has an IPv4 and an IPv6 address.
fn ud() -> Pair {
    let mut pair = pair(VIRTIO_RDMA_QPT_UD, QKEY);
    let mut gid6 = [0xfd; 16];
    gid6[15] = 1;
    pair.a.add_gid(IPV6, gid6, 0).unwrap();
    pair
}

/// Sends 100 bytes from A to a group.
fn cast(pair: &mut Pair, to: Gid, qpn: u32, qkey: u32) {
    let a = pair.ends[0];
    let part = [sge(DATA, 100, a.key)];
    let from = if to[0] == 0xff { IPV6 as u8 } else { 0 };
    pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(to, qpn, qkey, a.pdn).from(from));
    pair.settle();
}

fn sent(pair: &mut Pair) {
    let cqe = brief(pair.poll_a());
    assert_eq!(cqe, Some((7, VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_SEND)));
}

#[test]
pub fn a_datagram_reaches_every_member() {
    for to in [group(1), group6(1)] {
        let mut pair = ud();
        let [a, b] = pair.ends;
        let second = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_UD);
        to_rts(&mut pair.b, second, QKEY, false);
        let data = pair.a.fill(DATA, 100, 4);
        let place = DATA + 0x10000;
        pair.a.post_recv(a.qpn, 1, &[sge(place, 140, a.key)]);
        pair.b.post_recv(b.qpn, 2, &[sge(place, 140, b.key)]);
        pair.b.post_recv(second, 3, &[sge(place + 4096, 140, b.key)]);
        pair.a.mcast(ATTACH, a.qpn, to).unwrap();
        for qpn in [b.qpn, second, second] {
            pair.b.mcast(ATTACH, qpn, to).unwrap();
        }
        cast(&mut pair, to, ALL_QPS, QKEY);
        let mut at_a = [pair.poll_a().unwrap(), pair.poll_a().unwrap()];
        at_a.sort_by_key(|cqe| cqe.wr_id);
        assert_eq!(at_a.map(|cqe| (cqe.wr_id, cqe.byte_len)), [(1, 140), (7, 100)]);
        let at_b = [pair.poll_b().unwrap(), pair.poll_b().unwrap()];
        assert_eq!(at_b.map(|cqe| (cqe.wr_id, cqe.src_qp)), [(2, a.qpn), (3, a.qpn)]);
        assert!(pair.poll_b().is_none());
        for at in [place, place + 4096] {
            let found = pair.b.bytes(at, 140);
            let dgid = if to[0] == 0 { &found[36..40] } else { &found[24..40] };
            assert_eq!(dgid, &to[16 - dgid.len()..]);
            assert_eq!(found[40..], data);
        }
        // The same again, after one QP has left the group.
        pair.b.mcast(DETACH, b.qpn, to).unwrap();
        pair.b.post_recv(b.qpn, 2, &[sge(place, 140, b.key)]);
        pair.b.post_recv(second, 3, &[sge(place + 4096, 140, b.key)]);
        cast(&mut pair, to, ALL_QPS, QKEY);
        assert_eq!(pair.poll_b().map(|cqe| cqe.wr_id), Some(3));
        assert!(pair.poll_b().is_none());
    }
}

/// A datagram to a group of any size takes no more of a turn than other messages do.
#[test]
fn a_datagram_to_a_large_group_takes_turns() {
    const QPS: u16 = 32;
    let (fabric, clock) = fabric();
    let limits = Limits {
        ring_qp: QPS + 3,
        max_mcast_qp_attach: QPS.into(),
        max_mcast_attach: QPS.into(),
        ..limits()
    };
    let sizes = Sizes { region_count: u64::from(QPS) + 4, ..Sizes::default() };
    let setup = Setup { limits, sizes, ..Setup::default() };
    let guest =
        |number| Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup.clone());
    let mut sender = with_rings(|| guest(1));
    let end = End::new(&mut sender, VIRTIO_RDMA_QPT_UD);
    to_rts(&mut sender, end.qpn, QKEY, false);
    let mut members: Vec<(Guest, End, u32)> = (2..6)
        .map(|number| {
            let mut guest = with_rings(|| guest(number));
            let end = End::new(&mut guest, VIRTIO_RDMA_QPT_UD);
            let mut first = None;
            for _ in 0..QPS {
                let qpn = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_UD);
                to_rts(&mut guest, qpn, QKEY, false);
                guest.post_recv(qpn, qpn.into(), &[sge(DATA, 140, end.key)]);
                guest.mcast(ATTACH, qpn, group(1)).unwrap();
                first.get_or_insert(qpn);
            }
            (guest, end, first.unwrap())
        })
        .collect();
    let arrived = |members: &[(Guest, End, u32)]| -> u64 {
        let counters = members.iter().map(|(guest, ..)| &guest.device);
        counters.map(|device| device.counter(Counter::MulticastRcvPackets)).sum()
    };
    let part = [sge(DATA, 100, end.key)];
    let send = Send::new(7, SEND, &part).ud(group(1), ALL_QPS, QKEY, end.pdn);
    sender.post_send(end.qpn, &send);
    let mut before = 0;
    while sender.poll(end.cqn).is_none() {
        sender.device.run(64);
        let after = arrived(&members);
        assert!((1..=64).contains(&(after - before)), "{} arrivals in a turn", after - before);
        if before == 0 {
            // One that has it leaves, and joins again: that moves no other one.
            let (guest, _, qpn) = &mut members[0];
            guest.mcast(DETACH, *qpn, group(1)).unwrap();
            guest.mcast(ATTACH, *qpn, group(1)).unwrap();
        }
        before = after;
    }
    for (guest, end, first) in &mut members {
        let mut got: Vec<u64> =
            std::iter::from_fn(|| guest.poll(end.cqn)).map(|cqe| cqe.wr_id).collect();
        got.sort_unstable();
        let all = (0..QPS).map(|at| u64::from(*first) + u64::from(at));
        assert_eq!(got, all.collect::<Vec<_>>());
    }
}

#[test]
pub fn members_take_their_qkey_only() {
    let mut pair = ud();
    let b = pair.ends[1];
    pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
    let mut lost = |to, qpn, qkey, counter| {
        let before = pair.a.device.counter(counter);
        cast(&mut pair, to, qpn, qkey);
        sent(&mut pair);
        assert!(pair.poll_b().is_none());
        assert_eq!(pair.a.device.counter(counter), before + 1);
    };
    lost(group(2), ALL_QPS, QKEY, Counter::DropUnreachable);
    lost(group6(1), ALL_QPS, QKEY, Counter::DropUnreachable);
    lost(group(1), b.qpn, QKEY, Counter::DropUnreachable);
    lost(gid(2), ALL_QPS, QKEY, Counter::DropUnreachable);
    cast(&mut pair, group(1), ALL_QPS, QKEY + 1);
    sent(&mut pair);
    assert!(pair.poll_b().is_none());
    let counted = [&pair.a, &pair.b].map(|guest| guest.device.counter(Counter::DropQkey));
    assert_eq!(counted, [0, 1]);
    cast(&mut pair, group(1), ALL_QPS, QKEY);
    assert_eq!(pair.poll_b().map(|cqe| cqe.wr_id), Some(2));
}

#[test]
pub fn loopback_is_blocked_if_asked() {
    let mut pair = ud();
    let [a, b] = pair.ends;
    let mut request = Guest::qp_request(a.pdn, a.cqn, VIRTIO_RDMA_QPT_UD);
    request.create_flags = VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK as u8;
    let blocking = pair.a.try_create_qp(request).unwrap();
    to_rts(&mut pair.a, blocking, QKEY, false);
    for qpn in [blocking, a.qpn] {
        pair.a.mcast(ATTACH, qpn, group(1)).unwrap();
        pair.a.post_recv(qpn, qpn.into(), &[sge(DATA, 140, a.key)]);
    }
    // This QP of another guest has the same number.
    pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
    let send = Send::new(70, SEND, &[sge(DATA, 8, a.key)]).ud(group(1), ALL_QPS, QKEY, a.pdn);
    pair.a.post_send(blocking, &send);
    pair.settle();
    let mut at_a = [pair.poll_a().unwrap().wr_id, pair.poll_a().unwrap().wr_id];
    at_a.sort_unstable();
    assert_eq!(at_a, [a.qpn.into(), 70]);
    assert!(pair.poll_a().is_none());
    assert_eq!(pair.poll_b().map(|cqe| cqe.wr_id), Some(2));
    request.qp_type = VIRTIO_RDMA_QPT_RC as u8;
    assert_eq!(pair.a.try_create_qp(request), Err(VIRTIO_RDMA_STATUS_UNSUPPORTED));
    request.create_flags = 1;
    assert_eq!(pair.a.try_create_qp(request), Err(VIRTIO_RDMA_STATUS_UNSUPPORTED));
}

/// A quota counts groups and not QPs. Groups that a guest has joined stay.
#[test]
pub fn a_quota_of_groups_refuses_further_ones() {
    let mut pair = ud();
    let [a, _] = pair.ends;
    let full = Err(VIRTIO_RDMA_STATUS_NO_RESOURCE);
    let second = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_UD);
    pair.a.mcast(ATTACH, a.qpn, group(1)).unwrap();
    pair.a.mcast(ATTACH, a.qpn, group(2)).unwrap();
    let set = |pair: &Pair, groups| {
        let quota = Quota { groups, ..Quota::default() };
        pair.a.device.set_policy(DevicePolicy { quota, ..DevicePolicy::default() });
    };
    set(&pair, 1);
    assert_eq!(pair.a.device.status().groups, 2);
    assert_eq!(pair.a.mcast(ATTACH, a.qpn, group(3)), full);
    pair.a.mcast(ATTACH, second, group(1)).unwrap();
    pair.a.mcast(DETACH, a.qpn, group(2)).unwrap();
    assert_eq!(pair.a.mcast(ATTACH, a.qpn, group(2)), full);
    set(&pair, 2);
    pair.a.mcast(ATTACH, a.qpn, group(2)).unwrap();
    set(&pair, 0);
    for (qpn, number) in [(a.qpn, 1), (second, 1), (a.qpn, 2)] {
        pair.a.mcast(DETACH, qpn, group(number)).unwrap();
    }
    assert_eq!(pair.a.mcast(ATTACH, a.qpn, group(1)), full);
    assert_eq!(pair.a.device.status().groups, 0);
}

#[test]
pub fn limits_and_errors() {
    let mut pair = ud();
    let a = pair.ends[0];
    let (pdn, cqn) = (a.pdn, a.cqn);
    let rc = pair.a.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
    let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
    let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
    let full = Err(VIRTIO_RDMA_STATUS_NO_RESOURCE);
    assert_eq!(pair.a.mcast(ATTACH, rc, group(1)), invalid);
    assert_eq!(pair.a.mcast(ATTACH, a.qpn, gid(2)), invalid);
    let request = virtio_rdma_cmd_mcast { gid: group(1), qpn: a.qpn, lid: 1, reserved_16: 0 };
    assert_eq!(pair.a.command::<_, ()>(ATTACH, &request), invalid);
    for qpn in [0, rc + 1, 4000, u32::MAX] {
        assert_eq!(pair.a.mcast(ATTACH, qpn, group(1)), none);
        assert_eq!(pair.a.mcast(DETACH, qpn, group(1)), none);
    }
    assert_eq!(pair.a.mcast(DETACH, a.qpn, group(1)), none);
    // A group takes 2 QPs. The device has 3 groups, and 5 attachments in all.
    let (c, d) = (
        pair.a.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_UD),
        pair.a.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_UD),
    );
    for (qpn, number) in [(a.qpn, 1), (c, 1), (a.qpn, 2), (a.qpn, 3)] {
        pair.a.mcast(ATTACH, qpn, group(number)).unwrap();
    }
    assert_eq!(pair.a.mcast(ATTACH, d, group(1)), full);
    assert_eq!(pair.a.mcast(ATTACH, d, group(4)), full);
    pair.a.mcast(ATTACH, d, group(2)).unwrap();
    assert_eq!(pair.a.mcast(ATTACH, d, group(3)), full);
    // A QP cannot be destroyed while it is attached, not even in RESET.
    assert_eq!(pair.a.destroy_qp(d), Err(VIRTIO_RDMA_STATUS_BUSY));
    pair.a.set_state(d, VIRTIO_RDMA_QPS_RESET).unwrap();
    assert_eq!(pair.a.destroy_qp(d), Err(VIRTIO_RDMA_STATUS_BUSY));
    pair.a.mcast(DETACH, d, group(2)).unwrap();
    pair.a.destroy_qp(d).unwrap();
    pair.a.mcast(ATTACH, c, group(3)).unwrap();
    // The commands do not exist without the feature.
    pair.a.device.reset();
    let bit = |feature: u32| 1_u64 << feature;
    let less = pair.a.device.features() & !bit(VIRTIO_RDMA_F_MCAST) & !bit(VIRTIO_RDMA_F_COUNTERS);
    pair.a.device.set_driver_features(less);
    let mut reply = [0xff; 200];
    for (command, len) in [(ATTACH, 24), (DETACH, 24), (VIRTIO_RDMA_CMD_QUERY_COUNTERS, 4)] {
        let mut request = vec![0; 1 + len];
        request[0] = command as u8;
        assert_eq!(pair.a.device.command(&request, &mut reply), 1);
        assert_eq!(u32::from(reply[0]), VIRTIO_RDMA_STATUS_UNSUPPORTED);
    }
}

#[test]
pub fn a_member_that_goes_is_forgotten() {
    let mut pair = ud();
    let b = pair.ends[1];
    pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
    pair.b.device.reset();
    assert!(pair.fabric.core().group(&group(1)).is_none());
    cast(&mut pair, group(1), ALL_QPS, QKEY);
    sent(&mut pair);
    assert_eq!(pair.a.device.counter(Counter::DropUnreachable), 1);
}

#[test]
pub fn ports_count_what_they_carry() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 5000, a.key)];
    let write = VIRTIO_RDMA_WR_RDMA_WRITE;
    pair.a.post_send(a.qpn, &Send::new(1, write, &part).rdma(DATA, b.key));
    let read = VIRTIO_RDMA_WR_RDMA_READ;
    pair.a.post_send(a.qpn, &Send::new(2, read, &part[..]).rdma(DATA, b.key));
    pair.settle();
    let counters = |guest: &mut Guest| {
        let reply = guest.query_counters().unwrap();
        (reply.xmit_data, reply.xmit_packets, reply.rcv_data, reply.rcv_packets)
    };
    // With a path MTU of 1024 there are 5 packets, and one that requests the READ.
    assert_eq!(counters(&mut pair.a), (5000, 6, 5000, 5));
    assert_eq!(counters(&mut pair.b), (5000, 5, 5000, 6));
    let mut pair = ud();
    let b = pair.ends[1];
    pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
    cast(&mut pair, group(1), ALL_QPS, QKEY);
    assert_eq!(counters(&mut pair.a), (100, 1, 0, 0));
    assert_eq!(counters(&mut pair.b), (0, 0, 100, 1));
    assert_eq!(pair.a.query_counters().unwrap().multicast_xmit_packets, 1);
    assert_eq!(pair.b.query_counters().unwrap().multicast_rcv_packets, 1);
    let wrong = virtio_rdma_cmd_query_counters { port: 2 };
    let reply: Result<virtio_rdma_rsp_query_counters, _> =
        pair.a.command(VIRTIO_RDMA_CMD_QUERY_COUNTERS, &wrong);
    assert_eq!(reply.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
}

/// What is sent counts, whether or not it arrives.
#[test]
pub fn ports_count_what_reaches_nobody() {
    let mut pair = ud();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 100, a.key)];
    let nowhere = [(gid(9), b.qpn, QKEY), (gid(2), 99, QKEY), (gid(2), b.qpn, QKEY + 1)];
    for (count, (to, qpn, qkey)) in (1..).zip(nowhere) {
        pair.a.post_send(a.qpn, &Send::new(7, SEND, &part).ud(to, qpn, qkey, a.pdn));
        pair.settle();
        sent(&mut pair);
        let counters = pair.a.query_counters().unwrap();
        assert_eq!((counters.xmit_packets, counters.xmit_data), (count, 100 * count));
    }
}

#[test]
pub fn copies_that_nobody_takes_are_paid_for() {
    let mut pair = ud();
    let b = pair.ends[1];
    let cost = |pair: &mut Pair| {
        let before = pair.a.device.counter(Counter::Work);
        cast(pair, group(1), ALL_QPS, QKEY);
        sent(pair);
        pair.a.device.counter(Counter::Work) - before
    };
    let alone = cost(&mut pair);
    let second = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_UD);
    to_rts(&mut pair.b, second, QKEY, false);
    for qpn in [b.qpn, second] {
        pair.b.mcast(ATTACH, qpn, group(1)).unwrap();
    }
    // No member has a receive.
    assert!(cost(&mut pair) >= alone + 2 * crate::base::budget::cost::MESSAGE);
    assert_eq!(pair.a.device.counter(Counter::DropNoReceive), 2);
}

/// Returns the frames that were sent over the cable since the last call.
fn frames() -> Vec<Vec<u8>> {
    std::mem::take(&mut *cable().unwrap().sent.lock().unwrap())
}

/// One packet leaves the host, however many members there are. It has the MAC address of the group.
#[test]
fn a_group_gets_one_packet() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = ud();
        let [a, b] = pair.ends;
        for (to, mac) in [
            (group(1), [0x01, 0x00, 0x5e, 0x01, 0x02, 0x01]),
            (group6(1), [0x33, 0x33, 0x00, 0x00, 0x00, 0x01]),
        ] {
            pair.a.mcast(ATTACH, a.qpn, to).unwrap();
            pair.b.mcast(ATTACH, b.qpn, to).unwrap();
            cast(&mut pair, to, ALL_QPS, QKEY);
            sent(&mut pair);
            let frames = frames();
            assert_eq!(frames.len(), 1);
            let headers = roce::decode(&frames[0]).unwrap().headers;
            assert_eq!((headers.ethernet.destination, headers.bth.dest_qp.get()), (mac, ALL_QPS));
            assert_eq!(headers.ip.destination_gid(), to);
            assert_eq!(pair.a.device.counter(Counter::DropUnreachable), 0);
        }
        // A packet for one QP has no group, and both of its addresses are of one family.
        cast(&mut pair, group(1), b.qpn, QKEY);
        let part = [sge(DATA, 100, a.key)];
        let mixed = Send::new(7, SEND, &part).ud(group6(1), ALL_QPS, QKEY, a.pdn);
        pair.a.post_send(a.qpn, &mixed);
        pair.settle();
        assert_eq!(frames().len(), 0);
        assert_eq!(pair.a.device.counter(Counter::DropUnreachable), 1);
    });
}

/// A switch brings a packet back to the host that has sent it. The members there have it already.
#[test]
fn an_echo_is_dropped() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = ud();
        let a = pair.ends[0];
        pair.a.mcast(ATTACH, a.qpn, group(1)).unwrap();
        for wr_id in 1..3 {
            pair.a.post_recv(a.qpn, wr_id, &[sge(DATA + 4096, 140, a.key)]);
        }
        cast(&mut pair, group(1), ALL_QPS, QKEY);
        let mut found = [pair.poll_a().unwrap().wr_id, pair.poll_a().unwrap().wr_id];
        found.sort_unstable();
        assert_eq!(found, [1, 7]);
        for frame in frames() {
            assert!(cable().unwrap().bring(0, &frame));
        }
        pair.settle();
        assert!(pair.poll_a().is_none());
        assert_eq!(pair.a.device.counter(Counter::DropEcho), 1);
    });
}

/// Each guest with members gets a packet once, and each member a copy. Guests without members, and those that are
/// not in its VLAN, get none.
#[test]
fn a_packet_reaches_the_members_of_all_guests() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = ud();
        let [a, b] = pair.ends;
        let mut third = Guest::new(&cable().unwrap().fabric(1), &pair.clock, 3);
        let c = End::new(&mut third, VIRTIO_RDMA_QPT_UD);
        to_rts(&mut third, c.qpn, QKEY, false);
        pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
        let copies = |pair: &mut Pair, third: &mut Guest, from| {
            pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
            third.post_recv(c.qpn, 3, &[sge(DATA, 140, c.key)]);
            let part = [sge(DATA, 100, a.key)];
            let send = Send::new(7, SEND, &part).ud(group(1), ALL_QPS, QKEY, a.pdn);
            pair.a.post_send(a.qpn, &send.from(from));
            settle(&[&pair.a, &pair.b, third]);
            [pair.poll_b().is_some(), third.poll(c.cqn).is_some()]
        };
        assert_eq!(copies(&mut pair, &mut third, 0), [true, false]);
        third.mcast(ATTACH, c.qpn, group(1)).unwrap();
        assert_eq!(copies(&mut pair, &mut third, 0), [true, true]);
        pair.a.add_vlan_gid(2, gid(11), 5).unwrap();
        assert_eq!(copies(&mut pair, &mut third, 2), [false, false]);
        third.add_vlan_gid(1, gid(13), 5).unwrap();
        assert_eq!(copies(&mut pair, &mut third, 2), [false, true]);
        assert_eq!(third.device.counter(Counter::MulticastRcvPackets), 2);
    });
}

/// What is wrong with a packet for a group is counted where it arrives.
#[test]
fn packets_that_no_member_takes_are_dropped() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = ud();
        let b = pair.ends[1];
        let counters = [Counter::DropQkey, Counter::DropNoReceive, Counter::DropNoQp];
        let counted = |pair: &Pair| counters.map(|counter| pair.b.device.counter(counter));
        cast(&mut pair, group(1), ALL_QPS, QKEY);
        assert!(!cable().unwrap().bring(1, &frames()[0]), "no guest has a member");
        pair.b.mcast(ATTACH, b.qpn, group(1)).unwrap();
        cast(&mut pair, group(1), ALL_QPS, QKEY + 1);
        assert_eq!(counted(&pair), [1, 0, 0]);
        cast(&mut pair, group(1), ALL_QPS, QKEY);
        assert_eq!(counted(&pair), [1, 1, 0]);
        // The packet is for one QP of a group.
        let frame = frames().pop().unwrap();
        let packet = roce::decode(&frame).unwrap();
        let mut headers = packet.headers;
        headers.bth.dest_qp = roce::Qpn::new(b.qpn).unwrap();
        let mut changed = vec![0; frame.len()];
        roce::encode(&headers, packet.payload, &mut changed).unwrap();
        pair.b.post_recv(b.qpn, 2, &[sge(DATA, 140, b.key)]);
        assert!(cable().unwrap().bring(1, &changed));
        pair.settle();
        assert_eq!(counted(&pair), [1, 1, 1]);
        assert!(pair.poll_b().is_none());
    });
}
