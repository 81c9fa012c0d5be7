// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Congestion between two hosts: packets that come marked, CNPs, and the rates of senders; and the limit
//! of what a guest may send to other hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::*;

use super::cable::{cable, cnp, over_a_cable, Faults};
use super::driver::*;
use super::{datagram, uc, wire};
use crate::{Clock, Counter, DevicePolicy, Quota, TrafficClasses};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const ALL_MARKED: Faults = Faults { mark: 1000, ..Faults::NONE };

/// Goes on until no timer is left, and returns how long that took in virtual time.
fn run(pair: &Pair) -> Duration {
    let start: Instant = pair.clock.now();
    for _ in 0..100_000 {
        match pair.settle() {
            Some(time) => pair.clock.advance_to(time),
            None => return pair.clock.now() - start,
        }
    }
    panic!("the timers never end");
}

/// Writes `len` bytes from A to B, or reads them, and checks them; returns how long it took.
fn transfer(pair: &mut Pair, opcode: u32, len: usize) -> Duration {
    let [a, b] = pair.ends;
    let is_read = opcode == VIRTIO_RDMA_WR_RDMA_READ;
    let data = if is_read { pair.b.fill(DATA, len, 7) } else { pair.a.fill(DATA, len, 7) };
    let part = [sge(DATA, len as u32, a.key)];
    pair.a.post_send(a.qpn, &Send::new(1, opcode, &part).rdma(DATA, b.key));
    let time = run(pair);
    assert_eq!(pair.poll_a().map(|cqe| cqe.status), Some(OK as u8));
    let there = if is_read { &pair.a } else { &pair.b };
    assert!(there.bytes(DATA, len) == data, "the data");
    time
}

/// Every packet is marked, and everything arrives as without marks.
#[test]
fn data_is_right_while_every_packet_is_marked() {
    over_a_cable(1, ALL_MARKED, || {
        let mut pair = Pair::new();
        wire::a_bit_of_everything(&mut pair, 6);
        assert_ne!(pair.a.device.counter(Counter::CnpSent), 0, "for responses");
        assert_ne!(pair.b.device.counter(Counter::CnpSent), 0, "for requests");
    });
}

/// The receiver of a marked packet sends a CNP, at most one in 50 us, and the sender follows each.
#[test]
fn a_marked_packet_leads_to_a_cnp() {
    without_upgrades();
    let cable = over_a_cable(1, ALL_MARKED, || {
        let mut pair = Pair::new();
        let time = transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
        let [of_a, of_b] =
            [&pair.a, &pair.b].map(|guest| move |counter| guest.device.counter(counter));
        assert!(of_b(Counter::EcnMarked) >= 1024, "every packet was marked");
        let most = 1 + time.as_micros() as u64 / 50;
        assert!((2..=most).contains(&of_b(Counter::CnpSent)), "{time:?}");
        assert_eq!(of_a(Counter::CnpHandled), of_b(Counter::CnpSent));
        assert_eq!(of_a(Counter::CnpIgnored), 0);
        assert_eq!(of_b(Counter::CnpHandled), 0, "acknowledgements have no rate");
    });
    let frames = cable.sent.lock().unwrap();
    let cnp = frames.iter().find(|frame| frame[42] == 0x81).expect("a CNP");
    let packet = roce::decode(cnp).unwrap();
    let bth = packet.headers.bth;
    assert!(bth.becn && !bth.fecn && !bth.ack_request && !bth.solicited_event);
    assert_eq!(cnp.len(), 14 + 20 + 8 + 12 + 16 + 4);
    assert_eq!(bth.psn.get(), 0, "IBA A17.9");
}

/// Between two peers that know selective acknowledgements, a CNP names the packet that came marked.
#[test]
fn a_cnp_names_the_packet_that_came_marked() {
    without_upgrades();
    let cable = over_a_cable(1, ALL_MARKED, || {
        let mut pair = Pair::new();
        pair.know_selective();
        for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
            transfer(&mut pair, opcode, 1 << 20);
        }
        assert!(pair.counter(Counter::CnpHandled) > 2);
        assert_eq!(pair.counter(Counter::CnpStray), 0);
    });
    let frames = cable.sent.lock().unwrap();
    let sent: Vec<_> =
        frames.iter().map(|frame| roce::decode(frame).unwrap().headers.bth).collect();
    let cnps: Vec<_> = sent.iter().filter(|bth| bth.opcode == roce::Opcode::CNP).collect();
    for cnp in &cnps {
        let is_marked =
            |other: &roce::Bth| other.psn == cnp.psn && other.opcode != roce::Opcode::CNP;
        assert!(sent.iter().any(is_marked), "{cnp:?}");
    }
    assert!(cnps.iter().any(|cnp| cnp.psn.get() != 0));
}

/// CNPs leave with a DSCP of their own if the policy of their sender has one, and its other packets keep theirs.
#[test]
fn cnps_have_the_dscp_of_the_policy() {
    for cnp_dscp in [Some(48), None] {
        let cable = over_a_cable(1, ALL_MARKED, || {
            let mut pair = Pair::new();
            let classes = TrafficClasses { cnp_dscp, ..TrafficClasses::default() };
            let policy = DevicePolicy { classes, ..DevicePolicy::default() };
            pair.b.device.set_policy(policy);
            transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
        });
        let frames = cable.sent.lock().unwrap();
        let sent = frames.iter().map(|frame| roce::decode(frame).unwrap().headers);
        let to_a: Vec<_> = sent.filter(|headers| headers.ip.source_gid() == gid(2)).collect();
        let dscp = |headers: &roce::Headers| match headers.ip {
            roce::Ip::V4(header) => header.traffic_class >> 2,
            roce::Ip::V6(header) => header.traffic_class >> 2,
        };
        let (cnps, acks): (Vec<_>, Vec<_>) =
            to_a.iter().partition(|headers| headers.bth.opcode == roce::Opcode::CNP);
        assert!(!cnps.is_empty() && !acks.is_empty());
        let data = dscp(acks[0]);
        assert_ne!(data, 48);
        assert!(acks.iter().all(|headers| dscp(headers) == data), "acknowledgements");
        let expected = cnp_dscp.unwrap_or(data);
        assert!(cnps.iter().all(|headers| dscp(headers) == expected), "CNPs: {expected}");
    }
}

/// Brings B so many bytes at once, in copies of one packet of a WRITE of A, and returns how many CNPs B sends.
fn cnps_for_copies(bytes: usize) -> u64 {
    let mut sent = 0;
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 4096);
        let cable = cable().unwrap();
        let is_data = |frame: &&Vec<u8>| frame.len() > 1024;
        let packet = cable.sent.lock().unwrap().iter().find(is_data).cloned().expect("data");
        for _ in 0..bytes / packet.len() {
            assert!(cable.bring(1, &packet), "a guest takes it");
        }
        run(&pair);
        assert_eq!(pair.b.device.counter(Counter::EcnMarked), 0, "no packet was marked");
        sent = pair.b.device.counter(Counter::CnpSent);
    });
    sent
}

/// A device that has more packets before it than it takes in soon tells their sender to send more slowly.
#[test]
fn packets_that_wait_lead_to_a_cnp() {
    assert_eq!(cnps_for_copies(1 << 20), 0, "1 MiB");
    assert_ne!(cnps_for_copies(5 << 19), 0, "2.5 MiB");
}

#[test]
fn a_sender_of_marked_packets_slows_down() {
    without_upgrades();
    for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
        let time = |faults| {
            let mut time = Duration::ZERO;
            over_a_cable(1, faults, || {
                let mut pair = Pair::new();
                // All data of the first READ is sent before a CNP can come.
                transfer(&mut pair, opcode, 1 << 20);
                time = transfer(&mut pair, opcode, 1 << 20);
            });
            time
        };
        assert_eq!(time(Faults::default()), Duration::ZERO, "an unmarked flow is not paced");
        // At 12.5 GB/s this would take 84 us.
        let slow = time(ALL_MARKED);
        assert!(slow > Duration::from_micros(500), "{slow:?}");
        assert_eq!(slow, time(ALL_MARKED), "it is reproducible");
    }
}

/// An unreliable connection follows CNPs as a reliable one does, and loses nothing by that.
#[test]
fn an_unreliable_sender_of_marked_packets_slows_down() {
    without_upgrades();
    for (faults, is_marked) in [(Faults::default(), false), (ALL_MARKED, true)] {
        over_a_cable(1, faults, || {
            let mut pair = uc::connected();
            transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
            let time = transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
            assert_eq!(time > Duration::from_micros(500), is_marked, "{time:?}");
            let told = pair.b.device.counter(Counter::CnpSent);
            assert_eq!((told > 1, pair.a.device.counter(Counter::CnpHandled)), (is_marked, told));
            assert_eq!(pair.a.device.counter(Counter::CnpIgnored), 0);
        });
    }
}

/// A CNP for a QP without a connection, or from another host than its peer, is counted and does nothing.
#[test]
fn a_cnp_of_a_stranger_is_ignored() {
    over_a_cable(1, Faults::default(), || {
        let pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        cable().unwrap().send_cnp(0, pair.ends[0].qpn);
        pair.settle();
        assert_eq!(pair.a.device.counter(Counter::CnpIgnored), 1);
        assert_eq!(pair.a.device.counter(Counter::CnpHandled), 0);
    });
}

/// Puts CNPs under way that nobody has sent, from B to A, which is their peer.
fn forge_cnps(pair: &Pair, psns: &[u32]) {
    for psn in psns {
        let mut frame = vec![0; 128];
        let mut headers = cnp([2, 1], pair.ends[0].qpn);
        headers.bth.psn = roce::Psn::new(*psn);
        let len = roce::encode(&headers, &[], &mut frame).unwrap();
        cable().unwrap().inject(0, &frame[..len]);
    }
}

/// Writes 1 MiB from A to B while forged CNPs come, at least 25 us apart. Returns how long it takes, and how many
/// CNPs A has followed, ignored, and counted as strays.
fn transfer_with_forged_cnps(is_selective: bool, cnps: &[u32]) -> (Duration, [u64; 3]) {
    let mut result = None;
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        if is_selective {
            pair.know_selective();
        }
        transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
        cable().unwrap().set_delay(Duration::from_micros(100), &pair.clock);
        let [a, b] = pair.ends;
        let start = pair.clock.now();
        let part = [sge(DATA, 1 << 20, a.key)];
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key);
        pair.a.post_send(a.qpn, &write);
        let time = loop {
            let next = pair.settle();
            if let Some(cqe) = pair.poll_a() {
                assert_eq!(cqe.status, OK as u8);
                break pair.clock.now() - start;
            }
            forge_cnps(&pair, cnps);
            pair.clock.advance_to(next.expect("the WRITE is under way"));
        };
        let counters = [Counter::CnpHandled, Counter::CnpIgnored, Counter::CnpStray];
        result = Some((time, counters.map(|counter| pair.a.device.counter(counter))));
    });
    result.unwrap()
}

/// A CNP of a peer that knows selective acknowledgements names the packet that came marked. Who does not see the
/// packets of a connection has to guess which are under way. A foreign peer's CNP names nothing.
#[test]
fn a_cnp_that_names_no_packet_is_ignored() {
    let strays = [0, 0x80_0000, 0x7f_ffff, 0xff_0000, 5];
    let (quiet, counts) = transfer_with_forged_cnps(true, &[]);
    assert_eq!(counts, [0, 0, 0]);
    let (time, [handled, ignored, stray]) = transfer_with_forged_cnps(true, &strays);
    assert_eq!((time, handled, ignored), (quiet, 0, 0), "{stray} CNPs");
    assert!(stray >= 5 * strays.len() as u64, "{stray}");
    let (time, [handled, _, stray]) = transfer_with_forged_cnps(false, &[0]);
    assert!(time > quiet && handled != 0 && stray == 0, "{time:?}, {handled}, {stray}");
}

/// No packet of a connection that sends nothing can be marked. So CNPs that are forged before it sends do not slow
/// it down, whatever peer it has.
#[test]
fn a_cnp_for_a_connection_that_sends_nothing_is_ignored() {
    for is_selective in [false, true] {
        over_a_cable(1, Faults::default(), || {
            let mut pair = Pair::new();
            if is_selective {
                pair.know_selective();
            }
            transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
            pair.clock.advance_to(pair.clock.now() + Duration::from_millis(101));
            let psn = pair.a.query(pair.ends[0].qpn).sq_psn;
            for _ in 0..100 {
                forge_cnps(&pair, &[psn - 1]);
                run(&pair);
                pair.clock.advance_to(pair.clock.now() + Duration::from_micros(50));
            }
            assert_eq!(pair.a.device.counter(Counter::CnpHandled), 0);
            assert_eq!(pair.a.device.counter(Counter::CnpIgnored), 100);
            assert_eq!(transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20), Duration::ZERO);
        });
    }
}

/// Makes a pair of type `kind` whose A may send 10 MB per second to other hosts.
fn limited_pair(kind: u32) -> Pair {
    let mut pair = Pair::unconnected(kind);
    let quota = Quota { wire_rate: Some(10_000_000), ..Quota::default() };
    let (fabric, clock) = (Arc::clone(&pair.fabric), Arc::clone(&pair.clock));
    let policy = DevicePolicy { quota, ..DevicePolicy::default() };
    let setup = Setup { policy, ..Setup::default() };
    // The address of the first A is free once that is gone.
    pair.a.device.reset();
    pair.a = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
    pair.ends[0] = End::new(&mut pair.a, kind);
    pair
}

/// Returns whether so many bytes took as long as the limit demands, and not much longer.
fn is_at_limit(time: Duration, bytes: u64) -> bool {
    // Headers are a twelfth of what is sent, and 1 ms may be sent at once.
    let micros = time.as_micros() as u64 + 1000;
    (bytes / 10..bytes / 10 * 12 / 10 + 1000).contains(&micros)
}

#[test]
fn a_guest_keeps_its_limit() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let mut pair = limited_pair(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        pair.a.connect(a.qpn, pair.b.gid, b.qpn);
        pair.b.connect(b.qpn, pair.a.gid, a.qpn);
        let time = transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20);
        assert!(is_at_limit(time, 1 << 20), "{time:?} for a WRITE");
        let time = transfer(&mut pair, VIRTIO_RDMA_WR_RDMA_READ, 1 << 20);
        assert!(time < Duration::from_millis(1), "{time:?}: its peer has no limit");
        // B reads from A, which is what A sends.
        let data = pair.a.fill(DATA, 1 << 20, 3);
        let read = Send::new(2, VIRTIO_RDMA_WR_RDMA_READ, &[sge(DATA, 1 << 20, b.key)]);
        pair.b.post_send(b.qpn, &read.rdma(DATA, a.key));
        let time = run(&pair);
        assert_eq!(pair.poll_b().map(|cqe| cqe.status), Some(OK as u8));
        assert!(pair.b.bytes(DATA, 1 << 20) == data);
        assert!(is_at_limit(time, 1 << 20), "{time:?} for the data of a READ");
        assert_eq!(pair.a.device.counter(Counter::Timeouts), 0);
    });
}

#[test]
fn datagrams_keep_the_limit() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let mut pair = limited_pair(VIRTIO_RDMA_QPT_UD);
        let [a, b] = pair.ends;
        datagram::to_rts(&mut pair.a, a.qpn, datagram::QKEY, false);
        datagram::to_rts(&mut pair.b, b.qpn, datagram::QKEY, false);
        let mut time = Duration::ZERO;
        for number in 0..50 {
            pair.b.post_recv(b.qpn, number, &[sge(DATA, 2000, b.key)]);
            let send = Send::new(number, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 1024, a.key)]);
            pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn));
            time += run(&pair);
            assert_eq!(brief(pair.poll_a()), Some((number, OK, VIRTIO_RDMA_WC_SEND)));
            assert_eq!(brief(pair.poll_b()), Some((number, OK, VIRTIO_RDMA_WC_RECV)));
        }
        assert!(is_at_limit(time, 50 * 1024), "{time:?}");
    });
}

/// Two QPs of a guest that has a limit get half of it each, while both have something to send.
#[test]
fn the_qps_of_a_guest_share_its_limit() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let mut pair = limited_pair(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        let kind = VIRTIO_RDMA_QPT_RC;
        let others = [pair.a.create_qp(a.pdn, a.cqn, kind), pair.b.create_qp(b.pdn, b.cqn, kind)];
        for (at, [of_a, of_b]) in (0..).zip([[a.qpn, b.qpn], others]) {
            pair.a.connect(of_a, pair.b.gid, of_b);
            pair.b.connect(of_b, pair.a.gid, of_a);
            let part = [sge(DATA, 1 << 20, a.key)];
            let write = Send::new(at, VIRTIO_RDMA_WR_RDMA_WRITE, &part);
            pair.a.post_send(of_a, &write.rdma(DATA + (at << 20), b.key));
        }
        pair.settle_for(Duration::from_millis(50));
        let cable = cable().unwrap();
        let frames = cable.sent.lock().unwrap();
        let count = |qpn: u32| {
            let is_its =
                |frame: &&Vec<u8>| frame[47..50] == qpn.to_be_bytes()[1..] && frame[42] < 12;
            frames.iter().filter(is_its).count()
        };
        let counts = [b.qpn, others[1]].map(count);
        assert!(counts[0].abs_diff(counts[1]) <= 16 && counts[0] > 200, "{counts:?}");
    });
}
