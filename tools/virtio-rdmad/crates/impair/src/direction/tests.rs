// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What arrives at the end of the cable.

use roce::{Bth, Ethernet, ExtendedHeaders, FlowLabel, Headers, Ip, Ipv6, Opcode, Psn, Qpn};

use super::*;

/// The byte of the opcode RC SEND Only.
const SEND_ONLY: u8 = 0x04;
const COUNT: u32 = 20_000;

/// Returns a frame with this PSN.
fn packet(psn: u32) -> Vec<u8> {
    let headers = Headers {
        ethernet: Ethernet { destination: [2; 6], source: [4; 6], vlan: None },
        ip: Ip::V6(Ipv6 {
            source: "fd00::1".parse().unwrap(),
            destination: "fd00::2".parse().unwrap(),
            flow_label: FlowLabel::new(0).unwrap(),
            traffic_class: 0,
            hop_limit: 64,
        }),
        source_port: 0xc000,
        bth: Bth::new(Opcode::from_byte(SEND_ONLY).unwrap(), Qpn::new(5).unwrap(), Psn::new(psn)),
        extended: ExtendedHeaders::default(),
    };
    let mut frame = vec![0; 256];
    let len = roce::encode(&headers, &[0x5a; 100], &mut frame).unwrap();
    frame.truncate(len);
    frame
}

/// Sends packets with PSNs from 0 on at one moment. Returns what arrives, at once and later, and what was counted.
fn carry(direction: &mut Direction, count: u32) -> (Vec<Vec<u8>>, Counters) {
    let now = Instant::now();
    let mut arrived = Vec::new();
    for psn in 0..count {
        arrived.extend(direction.take(&packet(psn), now));
    }
    arrived.extend(direction.due(now + Duration::from_secs(60)));
    assert_eq!(direction.next(), None);
    (arrived, direction.change(Faults::default()))
}

fn with(faults: Faults) -> Direction {
    let mut direction = Direction::new(0);
    direction.change(faults);
    direction
}

/// Returns the PSNs of packets, which must all be right.
fn psns(frames: &[Vec<u8>]) -> Vec<u32> {
    frames.iter().map(|frame| roce::decode(frame).unwrap().headers.bth.psn.get()).collect()
}

/// Fails the test unless a count is near a share of all packets.
fn near(count: u64, share: f64) {
    let expected = f64::from(COUNT) * share;
    let found = f64::from(u32::try_from(count).unwrap());
    assert!((found - expected).abs() < expected / 4.0, "{count} of {COUNT} are not {share}");
}

#[test]
fn without_faults_all_packets_pass_as_they_are() {
    let (arrived, counters) = carry(&mut Direction::new(0), 100);
    assert_eq!(arrived, (0..100).map(packet).collect::<Vec<_>>());
    assert_eq!(counters, Counters { packets: 100, ..Counters::default() });
}

#[test]
fn what_is_no_packet_of_roce_passes() {
    let mut direction = with(Faults { loss: 1.0, ..Faults::default() });
    let mut frame = packet(1);
    // The port that the datagram goes to.
    frame[57] ^= 1;
    assert_eq!(direction.take(&frame, Instant::now()), [frame]);
    assert_eq!(direction.change(Faults::default()), Counters { others: 1, ..Counters::default() });
}

#[test]
fn lost_packets_do_not_arrive() {
    let mut direction = with(Faults { seed: 1, loss: 0.05, ..Faults::default() });
    let (arrived, counters) = carry(&mut direction, COUNT);
    near(counters.lost, 0.05);
    assert_eq!(arrived.len() as u64 + counters.lost, u64::from(COUNT));
    assert!(psns(&arrived).is_sorted());
}

#[test]
fn duplicated_packets_arrive_twice() {
    let mut direction = with(Faults { seed: 2, duplicate: 0.05, ..Faults::default() });
    let (arrived, counters) = carry(&mut direction, COUNT);
    near(counters.duplicated, 0.05);
    let mut psns = psns(&arrived);
    assert_eq!(psns.len() as u64, u64::from(COUNT) + counters.duplicated);
    psns.dedup();
    assert_eq!(psns, (0..COUNT).collect::<Vec<_>>());
}

#[test]
fn corrupted_packets_are_wrong() {
    let mut direction = with(Faults { seed: 3, corrupt: 0.05, ..Faults::default() });
    let (arrived, counters) = carry(&mut direction, COUNT);
    near(counters.corrupted, 0.05);
    assert_eq!(arrived.len(), COUNT as usize);
    let other = arrived.iter().zip(0..).filter(|(frame, psn)| **frame != packet(*psn)).count();
    assert_eq!(other as u64, counters.corrupted);
    // ICRC does not cover some bits, such as the hop limit's.
    let right: Vec<_> = arrived.iter().filter_map(|frame| roce::decode(frame).ok()).collect();
    assert!(right.len() < COUNT as usize - other / 2);
    assert!(right.iter().all(|packet| packet.payload == [0x5a; 100]));
}

#[test]
fn reordered_packets_are_passed_by_few() {
    let mut direction = with(Faults { seed: 4, reorder: 0.05, ..Faults::default() });
    let (arrived, counters) = carry(&mut direction, COUNT);
    near(counters.reordered, 0.05);
    let psns = psns(&arrived);
    assert!(!psns.is_sorted());
    for (place, psn) in (0..).zip(&psns) {
        assert!(psn.abs_diff(place) <= 2 * PASSING, "PSN {psn} arrives as number {place}");
    }
    let mut sorted = psns;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..COUNT).collect::<Vec<_>>());
}

#[test]
fn a_reordered_packet_does_not_wait_for_ever() {
    let mut direction = with(Faults { reorder: 1.0, ..Faults::default() });
    let now = Instant::now();
    assert!(direction.take(&packet(1), now).is_empty());
    assert_eq!(direction.next(), Some(now + PASSING_TIME));
    assert_eq!(direction.due(now + PASSING_TIME), [packet(1)]);
}

#[test]
fn delayed_packets_arrive_in_time() {
    let mut direction = with(Faults { seed: 5, delay: 1.0, delay_ms: 20, ..Faults::default() });
    let now = Instant::now();
    for psn in 0..100 {
        assert!(direction.take(&packet(psn), now).is_empty());
    }
    let early = direction.due(now + Duration::from_millis(10)).len();
    assert!((20..80).contains(&early), "{early} of 100 packets arrive within the first half");
    assert_eq!(early + direction.due(now + Duration::from_millis(20)).len(), 100);
}

#[test]
fn marked_packets_are_as_others() {
    let mut direction = with(Faults { seed: 6, mark: 0.05, ..Faults::default() });
    // The traffic class of IPv6, whose sender reacts to congestion.
    let sent = |psn| {
        let mut frame = packet(psn);
        frame[15] |= 2 << 4;
        frame
    };
    let now = Instant::now();
    let arrived: Vec<_> = (0..COUNT).flat_map(|psn| direction.take(&sent(psn), now)).collect();
    let counters = direction.change(Faults::default());
    near(counters.marked, 0.05);
    let other = arrived.iter().zip(0..).filter(|(frame, psn)| **frame != sent(*psn)).count();
    assert_eq!((arrived.len(), other as u64), (COUNT as usize, counters.marked));
    assert_eq!(psns(&arrived), (0..COUNT).collect::<Vec<_>>());
}

#[test]
fn who_does_not_react_to_congestion_gets_no_mark() {
    let (arrived, counters) = carry(&mut with(Faults { mark: 1.0, ..Faults::default() }), 10);
    assert_eq!((arrived, counters.marked), ((0..10).map(packet).collect(), 0));
}

#[test]
fn few_packets_wait() {
    let mut direction = with(Faults { delay: 1.0, delay_ms: 20, ..Faults::default() });
    let now = Instant::now();
    let at_once: usize = (0..COUNT).map(|psn| direction.take(&packet(psn), now).len()).sum();
    assert_eq!(at_once, COUNT as usize - WAITING);
}

#[test]
fn a_seed_decides_all_and_the_directions_differ() {
    let faults = Faults {
        seed: 6,
        loss: 0.1,
        duplicate: 0.1,
        corrupt: 0.1,
        reorder: 0.1,
        ..Faults::default()
    };
    let arrived = |number, seed| {
        let mut direction = Direction::new(number);
        direction.change(Faults { seed, ..faults });
        carry(&mut direction, 200).0
    };
    assert_eq!(arrived(0, 6), arrived(0, 6));
    assert_ne!(arrived(0, 6), arrived(1, 6));
    assert_ne!(arrived(0, 6), arrived(0, 7));
}
