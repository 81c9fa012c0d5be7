// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The habits of adapters, one by one: what comes of each.

use std::sync::atomic::Ordering;

use roce::{NakCode, Operation};
use zerocopy::FromZeros;

use super::link::Faults;
use super::nic::with_opcode;
use super::*;

/// The longest time for the repair of a loss: less than a tenth of the time for an answer.
const SOON: Duration = Duration::from_millis(6);

fn faults(loss: u64, mark: u64) -> Faults {
    Faults { loss, mark, spread: Duration::ZERO }
}

/// Returns the benches of all habits.
fn every_habit() -> Vec<(&'static str, Habits)> {
    let plain = Habits::default();
    let early = Some(Duration::from_micros(60));
    vec![
        ("none", plain),
        ("credits", Habits { gives_credits: true, obeys_credits: true, ..plain }),
        ("adaptive retransmission", Habits { repeats_after: early, ..plain }),
        ("MSN", Habits { retires_by_msn: true, ..plain }),
        ("WRITE ONLY", Habits { writes_only: true, ..plain }),
        ("reserved bits", Habits { sets_reserved_bits: true, ..plain }),
        ("forgotten parts of READs", Habits { forgets_parts: true, ..plain }),
        (
            "all",
            Habits {
                gives_credits: true,
                obeys_credits: true,
                repeats_after: early,
                retires_by_msn: false,
                writes_only: true,
                sets_reserved_bits: true,
                ..plain
            },
        ),
    ]
}

#[test]
fn everything_arrives_whatever_the_habits() {
    for (name, habits) in every_habit() {
        for (loss, mark) in [(0, 0), (20, 0), (0, 300), (20, 300)] {
            println!("{name}, {loss} lost, {mark} marked");
            let mut bench = Bench::new(habits);
            bench.link.set_faults(faults(loss, mark));
            everything(&mut bench);
            assert_eq!(bench.nic.requester.failed, None);
        }
    }
}

/// Packets of adaptive routing overtake each other. The device is told by no agreement that they may, and goes on as
/// IBA says.
#[test]
fn packets_that_overtake_each_other_are_repaired() {
    for (name, habits) in every_habit() {
        println!("{name}");
        let mut bench = Bench::new(habits);
        let spread = Duration::from_micros(3);
        bench.link.set_faults(Faults { spread, ..Faults::default() });
        everything(&mut bench);
    }
}

#[test]
fn a_packet_of_an_unknown_opcode_has_no_effect() {
    let mut bench = Bench::new(Habits::default());
    everything(&mut bench);
    bench.nic.post(Work::Write { at: DATA, data: vec![1; 64] });
    let frame = bench.nic.poll(bench.clock.now()).unwrap();
    // Reserved operations of RC, reserved services, and those of manufacturers.
    let opcodes = [0x18, 0x1f, 0x40, 0x7f, 0xc0, 0xd3, 0xff];
    for (number, opcode) in (1..).zip(opcodes) {
        bench.fabric.receive(&with_opcode(frame.clone(), opcode), 0);
        bench.guest.run();
        assert_eq!(bench.counter(Counter::BadPacket), number, "opcode {opcode:#x}");
    }
    bench.link.send(To::Guest, &frame);
    bench.run_until(|bench| bench.nic.requester.is_idle());
    assert_eq!(bench.guest.bytes(DATA, 64), [1; 64]);
}

/// A program that never retries for want of a receive relies on credits: no SEND leaves without one, as long as the peer
/// tells of its receives.
#[test]
fn credits_are_obeyed() {
    let habits = Habits { gives_credits: true, ..Habits::default() };
    let mut bench = Bench::with(habits, |guest| guest.rnr_retry = 0);
    bench.nic.responder.post_receives(4, 3000);
    bench.settle();
    let sent = bench.guest.fill(DATA, 2500, 3);
    for wr_id in 0..30 {
        bench.post(wr_id, VIRTIO_RDMA_WR_SEND, 2500, 0);
    }
    for wr_id in 0..30 {
        let (cqe, _) = bench.completion();
        assert_eq!(cqe, (wr_id, OK, VIRTIO_RDMA_WC_SEND));
        bench.nic.responder.post_receives(1, 3000);
    }
    assert_eq!(bench.nic.responder.rnr_naks, 0);
    assert!(bench.nic.responder.received.iter().all(|(data, _)| *data == sent));
}

/// READs between SENDs acknowledge them as well, and tell of receives. Most acknowledgements of SENDs are lost, and
/// receives are posted late.
#[test]
fn credits_are_obeyed_whatever_acknowledges() {
    let habits = Habits { gives_credits: true, ..Habits::default() };
    let mut bench = Bench::with(habits, |guest| guest.rnr_retry = 0);
    let (mut last, mut count) = (None, 0);
    bench.link.lose(move |to, headers| {
        let bth = &headers.bth;
        let is_first = to == To::Guest
            && bth.opcode.operation() == Operation::Acknowledge
            && last.replace(bth.psn) != Some(bth.psn);
        count += u32::from(is_first);
        is_first && count % 3 != 0
    });
    bench.nic.responder.post_receives(2, 3000);
    let sent = bench.guest.fill(DATA, 2500, 3);
    bench.nic.responder.memory[..8].copy_from_slice(&sent[..8]);
    let (mut posted, mut done) = (0, 0);
    while done < 60 {
        while posted < 60 && posted - done < 16 {
            let (opcode, len) = [(VIRTIO_RDMA_WR_SEND, 2500), (VIRTIO_RDMA_WR_RDMA_READ, 8)]
                [usize::from(posted % 3 == 2)];
            bench.post(posted, opcode, len, 0);
            posted += 1;
        }
        bench.run_for(Duration::from_micros(100));
        while let Some((wr_id, status, _)) = bench.poll() {
            assert_eq!((wr_id, status), (done, OK));
            done += 1;
        }
        bench.nic.responder.post_receives(1, 3000);
    }
    assert_eq!(bench.nic.responder.rnr_naks, 0);
    assert!(bench.nic.responder.received.iter().all(|(data, _)| *data == sent));
}

/// A peer that has no receive for long is asked, and sent no message. It may have lost what it tells, or be gone.
#[test]
fn a_peer_without_receives_is_asked_for_them() {
    let habits = Habits { gives_credits: true, ..Habits::default() };
    for is_gone in [false, true] {
        let mut bench = Bench::with(habits, |guest| (guest.rnr_retry, guest.retry_cnt) = (0, 1));
        bench.nic.responder.post_receives(1, 3000);
        bench.settle();
        (1..=2).for_each(|wr_id| bench.post(wr_id, VIRTIO_RDMA_WR_SEND, 2500, 0));
        assert_eq!(bench.completion().0, (1, OK, VIRTIO_RDMA_WC_SEND));
        if is_gone {
            bench.link.lose(|_, _| true);
            let (cqe, time) = bench.completion();
            assert_eq!((cqe.0, cqe.1), (2, VIRTIO_RDMA_WC_RETRY_EXC_ERR));
            assert!(time < Duration::from_millis(400), "{time:?}");
            continue;
        }
        let before = bench.link.count(To::Adapter, |_| true);
        bench.run_for(Duration::from_millis(500));
        assert_eq!((bench.nic.responder.rnr_naks, bench.poll()), (0, None));
        let asked = bench.link.count(To::Adapter, |_| true) - before;
        assert!((8..20).contains(&asked), "{asked} questions");
        bench.link.lose_one(|to, _| to == To::Guest);
        bench.nic.responder.post_receives(1, 3000);
        let (cqe, time) = bench.completion();
        assert_eq!((cqe.0, cqe.1, bench.nic.responder.rnr_naks), (2, OK, 0));
        assert!(time < Duration::from_millis(100), "{time:?}");
    }
}

/// Of two messages the peer has no receive for the first one, and then none for the second. The first one is done,
/// whatever happens to the second.
#[test]
fn what_a_second_rnr_nak_acknowledges_is_done() {
    let mut bench = Bench::with(Habits::default(), |guest| guest.retry_cnt = 1);
    (1..=2).for_each(|wr_id| bench.post(wr_id, VIRTIO_RDMA_WR_SEND, 64, 0));
    bench.run_for(Duration::from_micros(50));
    assert_eq!(bench.nic.responder.rnr_naks, 1, "the guest pauses");
    let nak = roce::Syndrome::RnrNak(roce::RnrTimer::new(12).unwrap());
    bench.nic.responder.syndrome(Psn::new(FIRST + 1), nak);
    bench.link.lose(|to, _| to == To::Adapter);
    assert_eq!(bench.completion().0, (1, OK, VIRTIO_RDMA_WC_SEND));
    let (second, _) = bench.completion();
    assert_eq!((second.0, second.1), (2, VIRTIO_RDMA_WC_RETRY_EXC_ERR));
}

/// A QP whose send queue drains still repairs losses, and gives up as one in RTS does.
#[test]
fn losses_are_repaired_while_a_queue_drains() {
    for is_gone in [false, true] {
        let mut bench = Bench::with(Habits::default(), |guest| guest.retry_cnt = 1);
        let mut count = 0;
        bench.link.lose(move |to, _| {
            count += u32::from(to == To::Adapter);
            to == To::Adapter && (is_gone || count == 2)
        });
        let sent = bench.guest.fill(DATA, 2000, 7);
        bench.post(1, VIRTIO_RDMA_WR_RDMA_WRITE, 2000, 0);
        bench.step();
        bench.guest.set_state(bench.end.qpn, VIRTIO_RDMA_QPS_SQD).unwrap();
        let (cqe, time) = bench.completion();
        if is_gone {
            assert_eq!((cqe.0, cqe.1), (1, VIRTIO_RDMA_WC_RETRY_EXC_ERR));
        } else {
            assert_eq!((cqe.0, cqe.1), (1, OK));
            assert!(time < SOON + Duration::from_millis(10), "{time:?}");
            assert!(bench.nic.responder.memory[..2000] == sent);
        }
    }
}

/// The data of a READ may come slowly. The peer is not asked for each packet that it has on the way.
#[test]
fn a_response_that_comes_slowly_is_not_asked_for_again() {
    let mut bench = Bench::new(Habits { line_rate: 1_000_000, ..Habits::default() });
    let len = 256 << 10;
    bench.post(1, VIRTIO_RDMA_WR_RDMA_READ, len, 0);
    let (cqe, _) = bench.completion();
    assert_eq!((cqe.0, cqe.1), (1, OK));
    let again = bench.nic.responder.duplicates;
    assert!(again <= 8, "{again} requests besides the one");
}

/// Writes, reads or adds, loses the first packet for which a function says so, and returns how long it takes.
fn with_a_loss(
    habits: Habits,
    opcode: u32,
    len: usize,
    is_it: impl FnMut(To, &roce::Headers) -> bool + std::marker::Send + 'static,
) -> Duration {
    let mut bench = Bench::new(habits);
    // The device has measured how long answers take.
    for _ in 0..20 {
        bench.post(0, VIRTIO_RDMA_WR_RDMA_WRITE, 2000, 0);
        assert_eq!(bench.completion().0 .1, OK);
    }
    bench.nic.responder.post_receives(1, len);
    let data = bench.guest.fill(DATA, len, 9);
    bench.nic.responder.memory[..len].copy_from_slice(&data);
    bench.link.lose_one(is_it);
    bench.post(1, opcode, len, 0);
    let (cqe, time) = bench.completion();
    assert_eq!((cqe.0, cqe.1), (1, OK));
    assert!(bench.guest.bytes(DATA, len) == data);
    assert!(bench.nic.responder.memory[..len] == data);
    time
}

/// The loss of what is last shows by nothing but silence. It is repaired long before the time for an answer is over,
/// which is 67 ms here.
#[test]
fn the_loss_of_the_last_packet_is_repaired_soon() {
    let plain = Habits::default();
    let of = |wanted: Operation| {
        move |to: To, headers: &roce::Headers| {
            to == To::Adapter
                && headers.bth.opcode.operation() == wanted
                && (headers.bth.ack_request || wanted == Operation::Acknowledge)
        }
    };
    let answer =
        |to: To, headers: &roce::Headers| to == To::Guest && headers.extended.aeth.is_some();
    for (name, opcode, len, operation) in [
        ("a WRITE of a packet", VIRTIO_RDMA_WR_RDMA_WRITE, 64, Operation::Write),
        ("the end of a WRITE", VIRTIO_RDMA_WR_RDMA_WRITE, 5000, Operation::Write),
        ("a SEND of a packet", VIRTIO_RDMA_WR_SEND, 64, Operation::Send),
        ("the end of a SEND", VIRTIO_RDMA_WR_SEND, 5000, Operation::Send),
        ("the request of a READ", VIRTIO_RDMA_WR_RDMA_READ, 64, Operation::ReadRequest),
        ("the request of a long READ", VIRTIO_RDMA_WR_RDMA_READ, 5000, Operation::ReadRequest),
    ] {
        let time = with_a_loss(plain, opcode, len, of(operation));
        println!("{name}: {time:?}");
        assert!(time < SOON, "{name}: {time:?}");
    }
    for (name, opcode, len) in [
        ("the acknowledgement of a WRITE", VIRTIO_RDMA_WR_RDMA_WRITE, 5000),
        ("the answer to a READ of a packet", VIRTIO_RDMA_WR_RDMA_READ, 64),
        ("the beginning of the answer to a READ", VIRTIO_RDMA_WR_RDMA_READ, 5000),
    ] {
        let time = with_a_loss(plain, opcode, len, answer);
        println!("{name}: {time:?}");
        assert!(time < SOON, "{name}: {time:?}");
    }
    let last = |to: To, headers: &roce::Headers| {
        to == To::Guest && headers.bth.opcode.position() == roce::Position::Last
    };
    let time = with_a_loss(plain, VIRTIO_RDMA_WR_RDMA_READ, 5000, last);
    println!("the end of the answer to a READ: {time:?}");
    assert!(time < SOON, "the end of the answer to a READ: {time:?}");
}

/// An adapter tells of a gap once. If that is lost, too, the next packets tell it nothing new.
#[test]
fn the_loss_of_a_nak_is_repaired_soon() {
    let mut bench = Bench::new(Habits::default());
    for _ in 0..20 {
        bench.post(0, VIRTIO_RDMA_WR_RDMA_WRITE, 2000, 0);
        assert_eq!(bench.completion().0 .1, OK);
    }
    let (mut packet, mut nak) = (false, false);
    bench.link.lose(move |to, headers| {
        let is_nak = headers
            .extended
            .aeth
            .is_some_and(|aeth| aeth.syndrome == roce::Syndrome::Nak(NakCode::PsnSequenceError));
        let is_first = headers.bth.opcode.position() == roce::Position::First;
        match to {
            To::Adapter if is_first => !std::mem::replace(&mut packet, true),
            To::Guest if is_nak => !std::mem::replace(&mut nak, true),
            _ => false,
        }
    });
    let sent = bench.guest.fill(DATA, 5000, 4);
    bench.post(1, VIRTIO_RDMA_WR_RDMA_WRITE, 5000, 0);
    let (cqe, time) = bench.completion();
    assert_eq!((cqe.0, cqe.1), (1, OK));
    assert!(bench.nic.responder.memory[..5000] == sent);
    assert!(time < SOON, "{time:?}");
}

/// A peer that is only slow is asked with single packets, whose number grows with the logarithm of the time.
#[test]
fn a_slow_peer_is_not_sent_everything_again() {
    let mut bench = Bench::new(Habits::default());
    let count = |bench: &Bench| bench.link.count(To::Adapter, |_| true);
    for _ in 0..20 {
        bench.post(0, VIRTIO_RDMA_WR_RDMA_WRITE, 2000, 0);
        bench.completion();
    }
    let before = count(&bench);
    // Everything arrives, and no answer before the time for one is nearly over.
    let until = bench.clock.now() + Duration::from_millis(60);
    let clock = Arc::clone(&bench.clock);
    bench.link.lose(move |to, _| to == To::Guest && clock.now() < until);
    bench.guest.fill(DATA, 10_000, 1);
    bench.post(1, VIRTIO_RDMA_WR_RDMA_WRITE, 10_000, 0);
    let (cqe, time) = bench.completion();
    assert_eq!((cqe.0, cqe.1), (1, OK));
    assert!(time < Duration::from_millis(140), "{time:?}");
    let sent = count(&bench) - before;
    assert!(sent <= 10 + 10 + 8, "{sent} packets for a WRITE of 10");
}

/// A responder may forget what is in front of the part of a READ that was asked for last. So nothing is asked for while
/// something in front of it is missing.
#[test]
fn no_part_of_a_read_is_forgotten() {
    let mut bench = Bench::new(Habits { forgets_parts: true, ..Habits::default() });
    bench.link.set_faults(faults(2, 0));
    // Bursts are lost, which are the ends of some responses, and of some parts that are asked for again.
    let (clock, start) = (Arc::clone(&bench.clock), bench.clock.now());
    bench.link.lose(move |to, headers| {
        let is_response = headers.bth.opcode.operation() == Operation::ReadResponse;
        to == To::Guest && is_response && (clock.now() - start).as_micros() % 300 < 12
    });
    let len = 1 << 20;
    let sent = bench.guest.fill(DATA, len, 5);
    bench.nic.responder.memory[..len].copy_from_slice(&sent);
    for wr_id in 0..64 {
        bench.guest.fill(DATA, len, 0);
        bench.post(wr_id, VIRTIO_RDMA_WR_RDMA_READ, len, 0);
        let (cqe, _) = bench.completion();
        assert_eq!(cqe, (wr_id, OK, VIRTIO_RDMA_WC_RDMA_READ));
        assert!(bench.guest.bytes(DATA, len) == sent, "READ {wr_id}");
        assert_eq!(bench.nic.responder.forgotten, 0, "READ {wr_id}");
    }
}

/// A NAK names a request. What is in front of it has not failed, and does not end with its status.
#[test]
fn a_nak_of_a_later_request_is_not_that_of_the_oldest() {
    refuse_behind_a_lost_answer(Bench::with(Habits::default(), |guest| guest.retry_cnt = 1));
}

/// A consumer that wants to wait for ever is told, too: the peer answers nothing any more.
#[test]
fn a_nak_of_a_later_request_ends_a_connection_without_a_time_for_an_answer() {
    let mut bench = Bench::new(Habits::default());
    bench.guest.set_state(bench.end.qpn, VIRTIO_RDMA_QPS_SQD).unwrap();
    let attr = virtio_rdma_qp_attr {
        qp_state: VIRTIO_RDMA_QPS_SQD as u8,
        ..virtio_rdma_qp_attr::new_zeroed()
    };
    bench.guest.modify(bench.end.qpn, VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_TIMEOUT, attr).unwrap();
    bench.guest.set_state(bench.end.qpn, VIRTIO_RDMA_QPS_RTS).unwrap();
    refuse_behind_a_lost_answer(bench);
}

/// Loses the answer to a READ, and has the WRITE behind it refused.
fn refuse_behind_a_lost_answer(mut bench: Bench) {
    bench.link.lose_one(|to, headers| {
        to == To::Guest && headers.bth.opcode.operation() == Operation::ReadResponse
    });
    bench.post(1, VIRTIO_RDMA_WR_RDMA_READ, 64, 0);
    let part = [sge(DATA, 64, bench.end.key)];
    let bad = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(0, nic::RKEY + 1);
    bench.guest.post_send(bench.end.qpn, &bad);
    let (first, _) = bench.completion();
    assert_eq!((first.0, first.1), (1, VIRTIO_RDMA_WC_RETRY_EXC_ERR));
    let (second, _) = bench.completion();
    assert_eq!((second.0, second.1), (2, VIRTIO_RDMA_WC_WR_FLUSH_ERR));
    assert!(bench.nic.responder.has_failed);
}

#[test]
fn a_nak_of_the_oldest_request_ends_it() {
    let mut bench = Bench::new(Habits::default());
    bench.post(1, VIRTIO_RDMA_WR_RDMA_WRITE, 64, 0);
    let part = [sge(DATA, 64, bench.end.key)];
    let bad = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(0, nic::RKEY + 1);
    bench.guest.post_send(bench.end.qpn, &bad);
    assert_eq!(bench.completion().0, (1, OK, VIRTIO_RDMA_WC_RDMA_WRITE));
    let (second, _) = bench.completion();
    assert_eq!((second.0, second.1), (2, VIRTIO_RDMA_WC_REM_ACCESS_ERR));
}

/// An adapter is refused by the request that it made wrong.
#[test]
fn an_adapter_is_told_of_a_wrong_key() {
    let mut bench = Bench::new(Habits::default());
    bench.nic.post(Work::Read { at: 1 << 50, len: 64 });
    bench.run_until(|bench| bench.nic.requester.failed.is_some());
    assert_eq!(bench.nic.requester.failed, Some(NakCode::RemoteAccessError));
}

/// CNPs of an adapter may come 4 us apart. A connection follows them as DCQCN says, and is not stopped by them.
#[test]
fn many_cnps_do_not_stop_a_connection() {
    let mut bench = Bench::new(Habits::default());
    bench.link.set_faults(faults(0, 1000));
    let sent = bench.guest.fill(DATA, 1 << 20, 1);
    bench.post(1, VIRTIO_RDMA_WR_RDMA_WRITE, 1 << 20, 0);
    let (cqe, time) = bench.completion();
    assert_eq!((cqe.0, cqe.1), (1, OK));
    assert!(bench.nic.responder.memory[..1 << 20] == sent);
    let (handled, ignored) =
        (bench.counter(Counter::CnpHandled), bench.counter(Counter::CnpIgnored));
    println!("{time:?}, {} CNPs, {handled} handled, {ignored} ignored", bench.nic.cnps_sent);
    assert!(bench.nic.cnps_sent > 20 && handled > 2);
    // The least rate of DCQCN is 6.4 Mbit/s.
    assert!(time < Duration::from_millis(1500), "{time:?}");
}

/// Has an adapter write so many MiB at the rate of its line to a guest whose device looks into its inbox every so
/// often. Returns the part of what it sent that was not in vain, in thousandths.
fn overrun(interval: Duration, mebibytes: usize) -> u64 {
    let mut bench = Bench::new(Habits::default());
    bench.interval = Some(interval);
    for number in 0..mebibytes {
        bench.nic.post(Work::Write { at: DATA, data: data(1 << 20, number) });
    }
    let time = bench.run_until(|bench| bench.nic.requester.is_idle());
    assert!(bench.guest.bytes(DATA, 1 << 20) == data(1 << 20, mebibytes - 1));
    let (sent, needed) = (bench.nic.requester.sent, mebibytes as u64 * 1024);
    let (dropped, cnps) = (bench.counter(Counter::DropInboxFull), bench.nic.requester.cnps);
    println!("{interval:?}: {time:?}, {sent} packets for {needed}, {dropped} dropped, {cnps} CNPs");
    needed * 1000 / sent
}

/// Moves 8 MiB between a guest and an adapter, and loses the packet of this number. Returns how many frames the guest's
/// host has sent.
fn frames_of(opcode: u32, lost: u32) -> u64 {
    let (mut bench, mut packets) = (Bench::new(Habits::default()), 0);
    bench.link.lose(move |to, headers| {
        let carries = [Operation::Write, Operation::ReadResponse];
        packets +=
            u32::from(to == To::Adapter && carries.contains(&headers.bth.opcode.operation()));
        to == To::Adapter && packets == lost
    });
    for number in 0..8 {
        if opcode == VIRTIO_RDMA_WR_RDMA_WRITE {
            bench.post(number, opcode, 1 << 20, 0);
            assert_eq!(bench.completion().0, (number, OK, VIRTIO_RDMA_WC_RDMA_WRITE));
        } else {
            bench.nic.post(Work::Read { at: DATA, len: 1 << 20 });
            bench.run_until(|bench| bench.nic.requester.is_idle());
        }
    }
    let frames = bench.link.of_host.load(Ordering::Relaxed);
    println!(
        "{opcode}, {lost}: {frames} frames, {} packets",
        bench.link.count(To::Adapter, |_| true)
    );
    frames
}

/// A loss has an adapter sent all packets again that were under way behind the lost one, or the rest of a READ. They
/// arrive then, so they are no sign of trains that are spoilt, and new packets leave in trains still.
#[test]
fn one_loss_in_a_long_flow_to_a_go_back_n_peer_keeps_trains() {
    for (opcode, most) in [(VIRTIO_RDMA_WR_RDMA_WRITE, 300), (VIRTIO_RDMA_WR_RDMA_READ, 1200)] {
        let [without, with] = [0, 1100].map(|lost| frames_of(opcode, lost));
        assert!(with <= without + most, "opcode {opcode}: {with} frames, {without} without loss");
    }
}

/// An adapter that sends faster than the device takes is told to send more slowly before much is lost.
#[test]
fn an_adapter_that_sends_too_fast_is_slowed_down() {
    for micros in [200, 500] {
        let useful = overrun(Duration::from_micros(micros), 64);
        assert!(useful >= 800, "{micros} us: {useful} thousandths");
    }
}
/// Returns how long it takes to move 16 MiB in messages of 64 KiB at 1 GB/s, four of them at a time.
fn time_of(habits: Habits, loss: u64, what: &str) -> Duration {
    let mut bench = Bench::new(Habits { line_rate: 1_000_000_000, ..habits });
    bench.link.set_faults(faults(loss, 0));
    let (len, count) = (64 << 10, 256);
    let sent = bench.guest.fill(DATA, len, 5);
    bench.nic.responder.memory[..len].copy_from_slice(&sent);
    let (mut posted, mut done) = (0, 0);
    let start = bench.clock.now();
    while done < count {
        while posted < count && posted - done < 4 {
            match what {
                "WRITE" => bench.post(posted, VIRTIO_RDMA_WR_RDMA_WRITE, len, 0),
                "READ" => bench.post(posted, VIRTIO_RDMA_WR_RDMA_READ, len, 0),
                "WRITE of the adapter" => {
                    bench.nic.post(Work::Write { at: DATA, data: sent.clone() });
                }
                _ => {
                    bench.nic.post(Work::Read { at: DATA, len });
                }
            }
            posted += 1;
        }
        if what.ends_with("adapter") {
            bench.run_until(|bench| !bench.nic.requester.done.is_empty());
            for (_, data) in bench.nic.requester.done.drain(..) {
                assert!(data.is_empty() || data == sent);
                done += 1;
            }
        } else {
            let (cqe, _) = bench.completion();
            assert_eq!(cqe.1, OK);
            done += 1;
        }
    }
    assert!(bench.guest.bytes(DATA, len) == sent && bench.nic.responder.memory[..len] == sent);
    bench.clock.now() - start
}

/// A link that loses one packet in a hundred carries most of what one without losses carries. An adapter that goes back N
/// asks for all that it has not got of four READs behind each gap, so its READs have less.
#[test]
fn goodput_over_a_link_with_losses() {
    let habits = Habits { repeats_after: Some(Duration::from_millis(1)), ..Habits::default() };
    for (what, least) in
        [("WRITE", 70), ("READ", 65), ("WRITE of the adapter", 65), ("READ of the adapter", 20)]
    {
        let [without, with] = [0, 10].map(|loss| time_of(habits, loss, what));
        let part = without.as_micros() * 100 / with.as_micros();
        println!("{what}: {part} % at 1 % loss: {without:?}, {with:?}");
        assert!(part >= least, "{what}: {part} %");
    }
}

/// An adapter has more long READs to do than it may have under way, and goes back to the one whose answer has a gap: it
/// asks for that one and for all behind it again. Each answer is sent once more, and not once for each time that it was
/// asked for.
#[test]
fn a_gap_in_an_answer_does_not_multiply_answers() {
    let mut bench = Bench::new(Habits::default());
    bench
        .link
        .lose_one(|to, headers| to == To::Adapter && headers.bth.psn == Psn::new(FIRST).plus(100));
    let (reads, len) = (8, 1 << 20);
    let sent = bench.guest.fill(DATA, len, 5);
    for _ in 0..reads {
        bench.nic.post(Work::Read { at: DATA, len });
    }
    bench.settle();
    let done: Vec<_> = bench.nic.requester.done.drain(..).collect();
    assert_eq!(done.len(), reads);
    assert!(done.iter().all(|(_, data)| *data == sent));
    let answers = bench.link.count(To::Adapter, |_| true);
    let under_way = requester::MOST_ANSWERS * len / nic::MTU;
    let once = reads * len / nic::MTU;
    assert!((once..once + under_way).contains(&answers), "{answers} packets of answers");
}
