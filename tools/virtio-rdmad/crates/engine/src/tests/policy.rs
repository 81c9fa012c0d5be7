// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests changes of what a guest may do, while its device runs.

use std::sync::atomic::Ordering;
use std::time::Duration;

use abi::*;

use super::cable::{cable, over_a_cable, Faults};
use super::datagram;
use super::driver::*;
use crate::{
    AddressRights, AllowedValues, Clock, Counter, DevicePolicy, Gid, GidPrefix, Quota,
    TrafficClasses, VlanList,
};

const NO_ROOM: u32 = VIRTIO_RDMA_STATUS_NO_RESOURCE;
const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;

/// Returns a policy with this quota.
fn with_quota(quota: Quota) -> DevicePolicy {
    DevicePolicy { quota, ..DevicePolicy::default() }
}

/// Returns a policy that allows these addresses, in no VLAN.
fn with_gids(numbers: &[u8]) -> DevicePolicy {
    let prefix = |number: &u8| GidPrefix::new(gid(*number), 128).unwrap();
    let gids = Some(numbers.iter().map(prefix).collect());
    let vlans = Some(VlanList { untagged: true, ranges: Vec::new() });
    DevicePolicy { addresses: AddressRights { gids, vlans }, ..DevicePolicy::default() }
}

/// Makes one object of each kind. Returns which kinds were refused for want of room.
fn refused_kinds(guest: &mut Guest, rings: bool, pdn: u32, cqn: u32) -> Vec<&'static str> {
    let mut refused = Vec::new();
    let mut note = |kind, error: Option<u32>| match error {
        None => {}
        Some(NO_ROOM) => refused.push(kind),
        Some(other) => panic!("{kind}: status {other}"),
    };
    let pd: Result<virtio_rdma_rsp_create_pd, u32> = guest.command(VIRTIO_RDMA_CMD_CREATE_PD, &());
    note("pd", pd.err());
    let request = Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_RC);
    note("qp", guest.try_create_qp(request).err());
    note("mr", guest.create_mr(pdn, 1).err());
    if rings {
        note("mw", guest.alloc_mw(pdn, VIRTIO_RDMA_MW_TYPE_1).err());
        let region = guest.take_region();
        let request = guest.cq_ring_request(region, 16);
        let cq: Result<virtio_rdma_rsp_create_cq, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request);
        note("cq", cq.err());
        let region = guest.take_region();
        let request = guest.srq_request(region, pdn);
        let srq: Result<virtio_rdma_rsp_create_srq, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request);
        note("srq", srq.err());
    } else {
        let request = virtio_rdma_cmd_create_cq { cqe: 4 };
        let cq: Result<virtio_rdma_rsp_create_cq, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_CQ, &request);
        note("cq", cq.err());
    }
    refused
}

/// A quota counts for new objects of its own kind alone, and what there is goes on to work.
#[test]
fn a_quota_below_what_is_used_refuses_new_objects_alone() {
    for rings in [false, true] {
        let test = || {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            let one = Quota { qps: 1, cqs: 1, srqs: 1, mrs: 1, mws: 1, pds: 1, ..Quota::default() };
            assert_eq!(refused_kinds(&mut pair.a, rings, a.pdn, a.cqn), Vec::<&str>::new());
            let used = pair.a.device.status();
            pair.a.device.set_policy(with_quota(one));
            let kinds: &[_] = if rings {
                &["pd", "qp", "mr", "mw", "cq", "srq"]
            } else {
                &["pd", "qp", "mr", "cq"]
            };
            assert_eq!(refused_kinds(&mut pair.a, rings, a.pdn, a.cqn), kinds);
            let left = pair.a.device.status();
            assert_eq!((left.pds, left.qps.len(), left.mrs), (used.pds, used.qps.len(), used.mrs));
            assert_eq!(left.quota, one);
            // What was there before works.
            let data = pair.a.fill(DATA, 100, 7);
            let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 100, a.key)]);
            pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
            pair.settle();
            assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
            assert_eq!(pair.b.bytes(DATA, 100), data);
            // There is room again when objects go, and with the next policy.
            let request = Guest::qp_request(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
            pair.a.device.set_policy(with_quota(Quota { qps: 3, ..one }));
            let other = pair.a.try_create_qp(request);
            assert_eq!(pair.a.try_create_qp(request), Err(NO_ROOM));
            pair.a.destroy_qp(other.unwrap()).unwrap();
            assert!(pair.a.try_create_qp(request).is_ok());
        };
        if rings {
            with_rings(test);
        } else {
            test();
        }
    }
}

/// Memory counts in whole pages, once for each region, until the region goes. A region of all memory does not count.
#[test]
fn memory_is_counted_by_region() {
    let mut pair = Pair::new();
    let pdn = pair.ends[0].pdn;
    let guest = &mut pair.a;
    let registered = |guest: &Guest| guest.device.status().memory;
    let before = registered(guest);
    let mr = guest.reg_mr(pdn, DATA + 4095, 2, ALL);
    assert_eq!(registered(guest) - before, 2 * 4096);
    let fast = guest.create_mr(pdn, 8).unwrap();
    assert_eq!(registered(guest) - before, 10 * 4096);
    let quota = Quota { memory: before + 11 * 4096, ..Quota::default() };
    guest.device.set_policy(with_quota(quota));
    assert_eq!(guest.create_mr(pdn, 2).map(|_| ()), Err(NO_ROOM));
    let last = guest.reg_mr(pdn, DATA, 4096, ALL);
    assert_eq!(guest.create_mr(pdn, 1).map(|_| ()), Err(NO_ROOM));
    let all = guest.get_dma_mr(pdn, ALL).unwrap();
    guest.dereg_mr(all.mrn).unwrap();
    for mr in [mr, fast, last] {
        guest.dereg_mr(mr.mrn).unwrap();
    }
    assert_eq!(registered(guest), before);
    guest.create_mr(pdn, 11).unwrap();
}

/// Posts a WRITE of guest `a` to guest `b`, and returns how it ends for `a`, once all time-outs are over.
fn write(pair: &mut Pair, wr_id: u64) -> Option<(u64, u32, u32)> {
    let [a, b] = pair.ends;
    let write = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 100, a.key)]);
    pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
    pair.settle_in_time();
    brief(pair.poll_a())
}

/// A guest that may not use its address any more sends nothing from it, and its peer does not find it, as if the guest
/// had removed the address. Others are not concerned.
#[test]
fn an_address_that_is_taken_away_is_nobodys() {
    let failed = Some((2, VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_RDMA_WRITE));
    for loses in 1..=2 {
        let mut pair = Pair::new();
        assert_eq!(write(&mut pair, 1), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        let device = if loses == 1 { &pair.a.device } else { &pair.b.device };
        device.set_policy(with_gids(&[50]));
        assert!(device.status().gids.is_empty());
        assert_eq!(write(&mut pair, 2), failed, "guest {loses} has no address");
        let other = if loses == 1 { &mut pair.b } else { &mut pair.a };
        assert_eq!(other.device.status().gids.len(), 1);
        assert_eq!(other.add_gid(1, gid(loses), 0), Ok(()), "the address is free");
    }
}

/// A guest has an address again that it may use again, in the same entry of its table. Its connections go on.
#[test]
fn an_address_comes_back() {
    let mut pair = Pair::new();
    assert_eq!(write(&mut pair, 1), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    let before = pair.a.device.status().gids;
    pair.a.device.set_policy(with_gids(&[50]));
    // An image has it, and so has the device that is made of it.
    let mut config = pair.a.config();
    config.policy = with_gids(&[50]);
    let (other, _) = fabric();
    let device = other.add_device(config);
    pair.a.load(&device, &pair.a.device.save()).unwrap();
    assert!(device.status().gids.is_empty());
    for device in [&pair.a.device, &device] {
        device.set_policy(with_gids(&[1, 50]));
        assert_eq!(device.status().gids, before);
    }
    assert_eq!(write(&mut pair, 2), Some((2, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    // Meanwhile another guest may have taken it; it keeps it.
    pair.a.device.set_policy(with_gids(&[50]));
    assert_eq!(pair.b.add_gid(1, gid(1), 0), Ok(()));
    pair.a.device.set_policy(DevicePolicy::default());
    assert!(pair.a.device.status().gids.is_empty());
    assert_eq!(pair.b.del_gid(1), Ok(()));
    pair.a.device.set_policy(DevicePolicy::default());
    assert_eq!(pair.a.device.status().gids, before);
    assert_eq!(pair.a.del_gid(0), Ok(()));
    assert_eq!(pair.b.add_gid(1, gid(1), 0), Ok(()), "nothing of it is left");
}

/// Over the wire, packets of a guest that has lost its address are not sent, and those for it reach nobody.
#[test]
fn an_address_that_is_taken_away_is_silent_on_the_wire() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        assert_eq!(write(&mut pair, 1), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        pair.a.device.set_policy(with_gids(&[50]));
        let failed = Some((2, VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_RDMA_WRITE));
        assert_eq!(write(&mut pair, 2), failed);
    });
}

/// The DSCP and the priority that guests ask for in this module, in a traffic class and a service level.
const ASKED: (u8, u8) = (48 << 2, 6);

/// Takes the packets that were sent, and returns the sender, the DSCP and the priority of each of them.
fn classes_on_the_wire() -> Vec<(Gid, u8, u8)> {
    let sent = std::mem::take(&mut *cable().unwrap().sent.lock().unwrap());
    let class = |frame: &Vec<u8>| {
        let headers = roce::decode(frame).unwrap().headers;
        let traffic_class = match headers.ip {
            roce::Ip::V4(header) => header.traffic_class,
            roce::Ip::V6(header) => header.traffic_class,
        };
        let priority = headers.ethernet.vlan.map_or(0, roce::Vlan::priority);
        (headers.ip.source_gid(), traffic_class >> 2, priority)
    };
    sent.iter().map(class).collect()
}

/// What a guest asks for and may not have leaves in the first class that it may have: requests, answers and datagrams.
/// A change counts for connections that are there, and what another guest may do does not.
#[test]
fn packets_leave_in_the_classes_that_are_allowed() {
    let allowed = |dscp: &[u8], pcp: &[u8]| {
        let [dscp, pcp] = [dscp, pcp].map(|values| AllowedValues::new(values).unwrap());
        let classes = TrafficClasses { dscp, pcp, cnp_dscp: None };
        DevicePolicy { classes, ..DevicePolicy::default() }
    };
    let policies = [
        (DevicePolicy::default(), (48, 6)),
        (allowed(&[26, 0], &[3, 0]), (26, 3)),
        (allowed(&[0, 48], &[1, 6]), (48, 6)),
        (DevicePolicy::default(), (48, 6)),
    ];
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        pair.a.add_vlan_gid(1, gid(11), 5).unwrap();
        pair.b.add_vlan_gid(1, gid(12), 5).unwrap();
        let ends = [(&mut pair.a, a, gid(12), b), (&mut pair.b, b, gid(11), a)];
        for (guest, end, dgid, other) in ends {
            guest.class = ASKED;
            guest.make_init(end.qpn, ALL);
            guest.make_rtr_from(end.qpn, 1, dgid, other.qpn, true).unwrap();
            guest.make_rts(end.qpn, true).unwrap();
        }
        let datagrams = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_UD);
        datagram::to_rts(&mut pair.a, datagrams, datagram::QKEY, false);
        for (policy, (dscp, pcp)) in policies {
            for restricted in 0..2 {
                let guests = [&pair.a, &pair.b];
                guests[restricted].device.set_policy(policy.clone());
                guests[1 - restricted].device.set_policy(DevicePolicy::default());
                for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
                    let send = Send::new(1, opcode, &[sge(DATA, 3000, a.key)]);
                    pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
                    pair.settle_in_time();
                    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
                }
                let send = Send::new(2, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]);
                let send = send.ud(gid(12), b.qpn, datagram::QKEY, a.pdn).from(1).in_class(ASKED);
                pair.a.post_send(datagrams, &send);
                pair.settle();
                assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
                let sent = classes_on_the_wire();
                for from in [gid(11), gid(12)] {
                    let is_restricted =
                        from == gid(11) && restricted == 0 || from == gid(12) && restricted == 1;
                    let expected = if is_restricted { (dscp, pcp) } else { (48, 6) };
                    let own = sent.iter().filter(|(source, ..)| *source == from);
                    let found: Vec<_> = own.map(|(_, dscp, pcp)| (*dscp, *pcp)).collect();
                    assert!(!found.is_empty() && found.iter().all(|class| *class == expected));
                }
            }
        }
    });
}

/// Nothing that is for one peer goes to the MAC address of a group: each station of the network would get it.
#[test]
fn what_is_for_one_peer_is_sent_to_one_station() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        for dmac in [[0xff; 6], [0x33, 0x33, 0, 0, 0, 1]] {
            let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
            let [a, b] = pair.ends;
            pair.a.dmac = dmac;
            pair.a.connect(a.qpn, pair.b.gid, b.qpn);
            pair.b.connect(b.qpn, pair.a.gid, a.qpn);
            let failed = (1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_RDMA_WRITE);
            assert_eq!(write(&mut pair, 1), Some(failed));
            let datagrams = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_UD);
            datagram::to_rts(&mut pair.a, datagrams, datagram::QKEY, false);
            let send = Send::new(2, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]);
            let send = send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn).at_mac(dmac);
            pair.a.post_send(datagrams, &send);
            pair.settle();
            assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_SEND)));
            assert_eq!(pair.a.device.counter(Counter::DropUnreachable), 1);
        }
        assert!(cable().unwrap().sent.lock().unwrap().is_empty());
    });
}

/// A rate that changes counts at once, also for what waits because of the one before. Nothing is lost.
#[test]
fn a_rate_changes_under_traffic() {
    const LEN: u32 = 1 << 20;
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let rate = |wire_rate| with_quota(Quota { wire_rate, ..Quota::default() });
        let data = pair.a.fill(DATA, LEN as usize, 3);
        let start = pair.clock.now();
        // At this rate it would take more than 1,000 s.
        pair.a.device.set_policy(rate(Some(1000)));
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, LEN, a.key)]);
        pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
        pair.settle_for(Duration::from_secs(10));
        assert!(pair.poll_a().is_none());
        pair.a.device.set_policy(rate(Some(10_000_000)));
        pair.settle_for(Duration::from_millis(50));
        assert!(pair.poll_a().is_none(), "1 MiB takes 100 ms");
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert!(pair.b.bytes(DATA, LEN as usize) == data);
        assert!(pair.clock.now() < start + Duration::from_secs(11));
        // The limit goes while a message waits.
        pair.a.device.set_policy(rate(Some(1000)));
        let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, LEN, a.key)]);
        pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
        pair.settle();
        pair.a.device.set_policy(rate(None));
        pair.settle_for(Duration::from_millis(10));
        assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    });
}

/// A datagram that leaves the host several times, as one to a group does in a tunnel, takes the rate as often.
#[test]
fn copies_on_the_wire_take_the_rate() {
    const COUNT: u64 = 100;
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        for copies in [1, 64] {
            cable().unwrap().copies.store(copies, Ordering::Relaxed);
            let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, datagram::QKEY);
            let a = pair.ends[0];
            let wire_rate = Some(1_000_000);
            pair.a.device.set_policy(with_quota(Quota { wire_rate, ..Quota::default() }));
            let mut group = gid(0);
            group[12..].copy_from_slice(&[239, 1, 2, 3]);
            let start = pair.clock.now();
            for number in 0..COUNT {
                let send = Send::new(number, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 900, a.key)]);
                let send = send.ud(group, VIRTIO_RDMA_MCAST_QPN, datagram::QKEY, a.pdn);
                pair.a.post_send(a.qpn, &send);
                pair.settle_in_time();
                assert_eq!(brief(pair.poll_a()), Some((number, OK, VIRTIO_RDMA_WC_SEND)));
            }
            // A copy is of 960 to 1,000 bytes, and the burst and the last one are not waited for.
            let millis = (pair.clock.now() - start).as_millis() as u64;
            let most = COUNT * copies as u64;
            assert!((most * 94 / 100..most).contains(&millis), "{copies} copies: {millis} ms");
        }
    });
}

/// Returns a policy with which a guest may have so many work requests done per second.
fn with_messages(message_rate: Option<u64>) -> DevicePolicy {
    with_quota(Quota { message_rate, ..Quota::default() })
}

/// Posts so many SENDs of guest `a`, each with other bytes, and the receives for them.
fn post_sends(pair: &mut Pair, [a, b]: [u32; 2], count: u64) {
    let [end_a, end_b] = pair.ends;
    for number in 0..count {
        let at = DATA + number * 64;
        pair.b.post_recv(b, number, &[sge(at, 64, end_b.key)]);
        let send = Send::new(number, VIRTIO_RDMA_WR_SEND, &[sge(at, 64, end_a.key)]);
        pair.a.post_send(a, &send);
    }
}

/// A guest with a limit has its work requests done one after the other, in the network and over the wire. Those that
/// wait are done later, in their order, and its peer has no limit.
#[test]
fn work_requests_wait_for_their_turn() {
    const COUNT: u64 = 12;
    without_upgrades();
    let test = || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.a.device.set_policy(with_messages(Some(100)));
        let data = pair.a.fill(DATA, COUNT as usize * 64, 5);
        post_sends(&mut pair, [a.qpn, b.qpn], COUNT);
        // The bucket has less than one; each further one takes 10 ms.
        pair.settle_for(Duration::from_millis(55));
        let mut done = 0;
        while let Some(cqe) = pair.poll_b() {
            assert_eq!(cqe.wr_id, done);
            done += 1;
        }
        assert!((6..=7).contains(&done), "{done}");
        // The peer of a guest with a limit has none.
        for number in 0..COUNT {
            let at = DATA + (1 << 16) + number * 64;
            let write = Send::new(number, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(at, 64, b.key)]);
            pair.b.post_send(b.qpn, &write.rdma(at, a.key));
            pair.settle_for(Duration::from_micros(50));
            assert_eq!(brief(pair.poll_b()), Some((number, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        }
        pair.settle_for(Duration::from_millis(70));
        while let Some(cqe) = pair.poll_b() {
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (done, OK));
            done += 1;
        }
        assert_eq!(done, COUNT);
        assert!(pair.b.bytes(DATA, COUNT as usize * 64) == data);
        for number in 0..COUNT {
            assert_eq!(brief(pair.poll_a()), Some((number, OK, VIRTIO_RDMA_WC_SEND)));
        }
        assert_eq!(pair.counter(Counter::Timeouts), 0);
    };
    test();
    with_rings(test);
    over_a_cable(1, Faults::default(), test);
}

/// The QPs of a guest share its limit, whatever each of them has posted.
#[test]
fn qps_share_the_limit_of_work_requests() {
    without_upgrades();
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let kind = VIRTIO_RDMA_QPT_RC;
    let others = [pair.a.create_qp(a.pdn, a.cqn, kind), pair.b.create_qp(b.pdn, b.cqn, kind)];
    pair.a.connect(others[0], pair.b.gid, others[1]);
    pair.b.connect(others[1], pair.a.gid, others[0]);
    pair.a.device.set_policy(with_messages(Some(1000)));
    post_sends(&mut pair, [a.qpn, b.qpn], 12);
    post_sends(&mut pair, others, 8);
    pair.settle_for(Duration::from_millis(10));
    let mut done = [0; 2];
    while let Some(cqe) = pair.poll_b() {
        done[usize::from(cqe.qp_num == others[1])] += 1;
    }
    // The first one had the full bucket alone, of 2.
    assert_eq!(done, [7, 5]);
    pair.settle_for(Duration::from_millis(20));
    while let Some(cqe) = pair.poll_b() {
        done[usize::from(cqe.qp_num == others[1])] += 1;
    }
    assert_eq!(done, [12, 8]);
}

/// Datagrams and unreliable connections have the same limit. A limit that goes, or changes, counts for what waits.
#[test]
fn a_limit_of_work_requests_changes_under_traffic() {
    without_upgrades();
    let test = || {
        for kind in [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UD] {
            let mut pair = Pair::unconnected(kind);
            let [a, b] = pair.ends;
            if kind == VIRTIO_RDMA_QPT_UD {
                datagram::to_rts(&mut pair.a, a.qpn, datagram::QKEY, false);
                datagram::to_rts(&mut pair.b, b.qpn, datagram::QKEY, false);
            } else {
                pair.a.connect(a.qpn, pair.b.gid, b.qpn);
                pair.b.connect(b.qpn, pair.a.gid, a.qpn);
            }
            let mut number = 0;
            for (before, after) in [(1, None), (1, Some(1000))] {
                pair.a.device.set_policy(with_messages(Some(before)));
                for _ in 0..5 {
                    pair.b.post_recv(b.qpn, number, &[sge(DATA, 200, b.key)]);
                    let send = Send::new(number, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]);
                    pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn));
                    number += 1;
                }
                pair.settle_for(Duration::from_millis(900));
                let first = number - 5;
                assert_eq!(pair.poll_b().map(|cqe| cqe.wr_id), Some(first));
                assert!(pair.poll_b().is_none(), "one in a second");
                pair.a.device.set_policy(with_messages(after));
                pair.settle_for(Duration::from_millis(10));
                for next in first + 1..number {
                    assert_eq!(pair.poll_b().map(|cqe| cqe.wr_id), Some(next));
                }
                while pair.poll_a().is_some() {}
            }
        }
    };
    test();
    over_a_cable(1, Faults::default(), test);
}

/// A work request that waits for the limit is flushed as any other when its QP ends.
#[test]
fn what_waits_for_the_limit_is_flushed() {
    without_upgrades();
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.device.set_policy(with_messages(Some(1)));
    post_sends(&mut pair, [a.qpn, b.qpn], 3);
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((0, OK, VIRTIO_RDMA_WC_SEND)));
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.settle();
    for number in 1..3 {
        let flushed = (number, VIRTIO_RDMA_WC_WR_FLUSH_ERR, VIRTIO_RDMA_WC_SEND);
        assert_eq!(brief(pair.poll_a()), Some(flushed));
    }
}
