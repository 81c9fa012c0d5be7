// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The cost of a network that loses, repeats and reorders packets: the number of packets that are sent besides those
//! that a message needs.

use std::sync::Arc;
use std::time::Duration;

use abi::*;
use roce::{Operation, Psn};

use super::cable::{cable, over_a_cable, Faults};
use super::driver::*;
use super::wire::a_bit_of_everything;
use crate::{Clock, Counter, DevicePolicy, Quota};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const MIB: usize = 1 << 20;
const COUNT: u64 = 4;

/// The faults of a network, and the most packets that are sent for 1 MiB with them, besides 1024 packets with data.
const COSTS: [(Faults, u64); 3] = [
    (Faults { loss: 10, ..Faults::NONE }, 120),
    (Faults { reorder: 20, ..Faults::NONE }, 140),
    (Faults { loss: 10, repeat: 20, reorder: 20, ..Faults::NONE }, 180),
];

/// Sends, writes or reads 1 MiB four times, checks the data, and returns how many packets were sent for each.
fn packets(opcode: u32, seed: u64, faults: Faults) -> u64 {
    let cable = over_a_cable(seed, faults, || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let place = |number: u64| DATA + (number << 20);
        for number in 0..COUNT {
            if opcode == VIRTIO_RDMA_WR_RDMA_READ {
                pair.b.fill(place(number), MIB, number as u8);
            } else {
                pair.a.fill(place(number), MIB, number as u8);
            }
            pair.b.post_recv(b.qpn, number, &[sge(place(number), MIB as u32, b.key)]);
            let part = [sge(place(number), MIB as u32, a.key)];
            let send = Send::new(number, opcode, &part);
            let is_send = opcode == VIRTIO_RDMA_WR_SEND;
            let send = if is_send { send } else { send.rdma(place(number), b.key) };
            pair.a.post_send(a.qpn, &send);
        }
        pair.settle_in_time();
        for number in 0..COUNT {
            let cqe = pair.poll_a().map(|cqe| (cqe.wr_id, u32::from(cqe.status)));
            assert_eq!(cqe, Some((number, OK)), "seed {seed}");
            let [here, there] = [&pair.a, &pair.b].map(|guest| guest.bytes(place(number), MIB));
            assert!(here == there, "seed {seed}: the data of message {number}");
        }
    });
    let sent = cable.sent.lock().unwrap().len() as u64;
    sent / COUNT
}

/// Each packet of a response that is lost is asked for alone, of any peer. At a path MTU of 1024 a READ of
/// 1 MiB has 1024 packets and a request.
#[test]
fn a_read_asks_for_what_is_missing() {
    assert_eq!(packets(VIRTIO_RDMA_WR_RDMA_READ, 1, Faults::default()), 1025);
    for (faults, most) in COSTS {
        for seed in 0..4 {
            for foreign in [false, true] {
                let faults = Faults { foreign, ..faults };
                let packets = packets(VIRTIO_RDMA_WR_RDMA_READ, seed, faults) - 1024;
                assert!(packets <= most, "seed {seed}: {packets} more for a READ, above {most}");
            }
        }
    }
}

/// Each packet of a SEND or WRITE that is lost is sent again alone, if the peer knows selective
/// acknowledgements.
#[test]
fn what_is_lost_is_sent_again_alone() {
    for opcode in [VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_RDMA_WRITE] {
        for (faults, most) in COSTS {
            for seed in 0..4 {
                let data = packets(opcode, seed, faults) - 1024;
                assert!(data <= most, "seed {seed}: {data} packets more, above {most}");
            }
        }
    }
    let (loss, _) = COSTS[0];
    let again = packets(VIRTIO_RDMA_WR_RDMA_WRITE, 0, Faults { foreign: true, ..loss }) - 1024;
    assert!(again > 1000, "go-back-N sends {again} packets more");
}

/// A network with all faults has no other effect than one without, whether or not the peers know selective
/// acknowledgements.
#[test]
fn effects_are_the_same_with_and_without_selective_acknowledgements() {
    for foreign in [false, true] {
        let (mut sent, mut held) = (0, 0);
        for seed in 100..120 {
            let faults = Faults { loss: 30, repeat: 30, reorder: 50, foreign, ..Faults::default() };
            over_a_cable(seed, faults, || {
                let mut pair = Pair::new();
                a_bit_of_everything(&mut pair, 6);
                sent += pair.counter(Counter::SelectiveAcksSent);
                held += pair.counter(Counter::Held);
            });
        }
        assert_eq!((sent == 0, held == 0), (foreign, foreign), "{sent} sent, {held} held");
    }
}

/// Returns the packets in which A reads 1 MiB of B, adds to a word, writes, and reads 1 MiB more, all of which was
/// done; and the PSN of the first answer, and that behind the last.
fn requests_that_were_done(pair: &mut Pair) -> (Vec<Vec<u8>>, Psn, Psn) {
    let [a, b] = pair.ends;
    let (part, word) = ([sge(DATA, MIB as u32, a.key)], [sge(DATA, 8, a.key)]);
    let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, b.key);
    let add = Send::new(2, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &word).atomic(DATA, b.key, 1, 0);
    let write = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &word).rdma(DATA, b.key);
    for request in [&read, &add, &write, &read] {
        pair.a.post_send(a.qpn, request);
    }
    pair.settle();
    for wr_id in [1, 2, 3, 1] {
        assert_eq!(pair.poll_a().map(|cqe| (cqe.wr_id, u32::from(cqe.status))), Some((wr_id, OK)));
    }
    let sent = cable().unwrap().sent.lock().unwrap().clone();
    let requests: Vec<_> = sent.into_iter().filter(|frame| answer(frame).is_none()).collect();
    assert_eq!(requests.len(), 4);
    let first = roce::decode(&requests[0]).unwrap().headers.bth.psn;
    (requests, first, first.plus(1024 + 1 + 1 + 1024))
}

/// Returns the PSN of a packet that answers requests, and whether it acknowledges all up to that.
fn answer(frame: &[u8]) -> Option<(Psn, bool)> {
    let bth = roce::decode(frame).unwrap().headers.bth;
    match bth.opcode.operation() {
        Operation::Acknowledge => Some((bth.psn, true)),
        Operation::ReadResponse | Operation::AtomicAcknowledge => Some((bth.psn, false)),
        _ => None,
    }
}

/// A peer that takes answers in their order alone asks for all of them again from a lost one on. Whatever still
/// waits to be sent then, it gets the answers in the order in which it has asked, and needs no time-out. No
/// acknowledgement overtakes an answer in front of it, which would tell that the answer is lost once more.
#[test]
fn answers_follow_the_order_of_the_last_requests() {
    for sent_before in [1, 1000, 1023, 1024, 1025, 1026, 1100, 2000] {
        over_a_cable(1, Faults::default(), || {
            let mut pair = Pair::new();
            let (requests, mut expected, end) = requests_that_were_done(&mut pair);
            let cable = cable().unwrap();
            let answers = || -> Vec<_> {
                cable.sent.lock().unwrap().iter().filter_map(|frame| answer(frame)).collect()
            };
            let ask = || {
                for request in &requests {
                    cable.inject(1, request);
                }
                cable.deliver();
            };
            let before = answers().len();
            ask();
            while answers().len() < before + sent_before {
                pair.b.device.run(1);
            }
            let lost = answers().len();
            ask();
            pair.settle();
            let again = answers().split_off(lost);
            let write = end.minus(1024 + 1);
            for (psn, is_acknowledgement) in &again {
                assert!(!is_acknowledgement || !psn.is_after(expected), "{psn:?}, {expected:?}");
                // The data of the READ behind the WRITE acknowledges the WRITE.
                let is_next = *psn == expected || expected == write && *psn == write.plus(1);
                expected = if is_next { psn.plus(1) } else { expected };
            }
            assert_eq!(expected, end, "{sent_before} answers had been sent");
            let count = again.len();
            assert!(
                count <= before + 1024,
                "{sent_before} of {before} had been sent, and {count} were sent again"
            );
        });
    }
}

/// Makes two connected guests on two hosts, each of which may send 100 MB per second to the other.
fn limited_pair() -> Pair {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let clock = Arc::clone(&pair.clock);
    let make = |number: u8| {
        let fabric = cable().unwrap().fabric(usize::from(number) - 1);
        let quota = Quota { wire_rate: Some(100_000_000), ..Quota::default() };
        let policy = DevicePolicy { quota, ..DevicePolicy::default() };
        let setup = Setup { policy, ..Setup::default() };
        Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup)
    };
    // The addresses of the first guests are free once these are gone.
    pair.a.device.reset();
    pair.b.device.reset();
    (pair.a, pair.b) = (make(1), make(2));
    let kind = VIRTIO_RDMA_QPT_RC;
    pair.ends = [End::new(&mut pair.a, kind), End::new(&mut pair.b, kind)];
    let [a, b] = pair.ends;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.b.connect(b.qpn, pair.a.gid, a.qpn);
    pair
}

/// Moves 4 MiB in messages of `len` bytes, of which as many are under way as make 1 MiB, or two, over a cable with
/// a delay. Returns how long it takes in virtual time.
fn time_of(opcode: u32, len: u64, delay: Duration, faults: Faults) -> Duration {
    let mut time = Duration::ZERO;
    over_a_cable(1, faults, || {
        let mut pair = limited_pair();
        cable().unwrap().set_delay(delay, &pair.clock);
        if !faults.foreign {
            pair.know_selective();
        }
        let [a, b] = pair.ends;
        let (count, depth) = ((4 << 20) / len, ((1 << 20) / len).clamp(2, 16));
        let start = pair.clock.now();
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < depth {
                let place = DATA + posted % depth * len;
                let is_send = opcode == VIRTIO_RDMA_WR_SEND;
                if is_send {
                    pair.b.post_recv(b.qpn, posted, &[sge(place, len as u32, b.key)]);
                }
                let send = Send::new(posted, opcode, &[sge(place, len as u32, a.key)]);
                pair.a.post_send(a.qpn, &if is_send { send } else { send.rdma(place, b.key) });
                posted += 1;
            }
            let next = pair.settle();
            let before = done;
            while let Some(cqe) = pair.poll_a() {
                assert_eq!((cqe.wr_id, u32::from(cqe.status)), (done, OK));
                done += 1;
            }
            while pair.poll_b().is_some() {}
            if done == before {
                pair.clock.advance_to(next.expect("a timer"));
            }
        }
        time = pair.clock.now() - start;
    });
    time
}

/// Goodput at 1 % loss is at least 0.8 of that without loss, with a delay of up to 1 ms each way. The longest delay
/// costs some of it: a packet that is lost is acknowledged after two round trips, in which 360 packets could be sent,
/// and a window has 256. READs of 64 KiB are bound by `max_rd_atomic` before that: those behind a lost packet make no
/// room. The peers know selective acknowledgements from the beginning on, as after a first loss.
#[test]
fn a_loss_costs_little_time() {
    without_upgrades();
    let loss = Faults { loss: 10, ..Faults::default() };
    for (name, opcode) in [
        ("WRITE", VIRTIO_RDMA_WR_RDMA_WRITE),
        ("READ", VIRTIO_RDMA_WR_RDMA_READ),
        ("SEND", VIRTIO_RDMA_WR_SEND),
    ] {
        for (len, micros) in [0, 50, 1000].iter().flat_map(|us| [(64 << 10, *us), (1 << 20, *us)]) {
            let [without, with, plain] =
                [Faults::default(), loss, Faults { foreign: true, ..loss }].map(|faults| {
                    time_of(opcode, len, Duration::from_micros(micros), faults).as_secs_f64()
                });
            let (ratio, plain) = (without / with, without / plain);
            let case = format!("{name} of {len} bytes with a delay of {micros} us: {ratio:.2}");
            println!("{case}, {plain:.2} with go-back-N; {:.0} MB/s without loss", 4.19 / without);
            let waits = opcode == VIRTIO_RDMA_WR_RDMA_READ && (len, micros) == (64 << 10, 1000);
            assert!(ratio >= if waits { 0.7 } else { 0.8 }, "{case}");
        }
    }
}

/// Writes and reads 1 MiB in turn, four times each, over a cable with a delay of 0.5 ms each way, and checks the data.
/// Returns how long it takes in virtual time.
fn time_of_long_windows(seed: u64, faults: Faults) -> Duration {
    let mut time = Duration::ZERO;
    over_a_cable(seed, faults, || {
        let mut pair = Pair::new();
        cable().unwrap().set_delay(Duration::from_micros(500), &pair.clock);
        let [a, b] = pair.ends;
        let place = |number: u64| DATA + (number << 20);
        let start = pair.clock.now();
        for number in 0..2 * COUNT {
            let is_read = number % 2 == 1;
            let (from, opcode) = if is_read {
                (&pair.b, VIRTIO_RDMA_WR_RDMA_READ)
            } else {
                (&pair.a, VIRTIO_RDMA_WR_RDMA_WRITE)
            };
            from.fill(place(number), MIB, number as u8);
            let part = [sge(place(number), MIB as u32, a.key)];
            pair.a.post_send(a.qpn, &Send::new(number, opcode, &part).rdma(place(number), b.key));
        }
        let mut done = 0;
        while done < 2 * COUNT {
            let next = pair.settle();
            let before = done;
            while let Some(cqe) = pair.poll_a() {
                assert_eq!((cqe.wr_id, u32::from(cqe.status)), (done, OK), "seed {seed}");
                done += 1;
            }
            if done == before {
                pair.clock.advance_to(next.expect("a timer"));
            }
        }
        time = pair.clock.now() - start;
        for number in 0..2 * COUNT {
            let [here, there] = [&pair.a, &pair.b].map(|guest| guest.bytes(place(number), MIB));
            assert!(here == there, "seed {seed}: the data of message {number}");
        }
    });
    time
}

/// Where nothing is lost, a window of more packets than a peer holds carries 1 MiB in a round trip of 1 ms, of which one
/// of 256 packets carries a quarter. Where packets are lost, all data arrives.
#[test]
fn windows_are_longer_than_what_a_peer_holds() {
    without_upgrades();
    let time = time_of_long_windows(1, Faults::default());
    assert!(time < Duration::from_millis(16), "{time:?}");
    for seed in 0..6 {
        for foreign in [false, true] {
            let faults = Faults { loss: 1, reorder: 1, foreign, ..Faults::default() };
            println!("seed {seed}, foreign {foreign}: {:?}", time_of_long_windows(seed, faults));
        }
    }
}
