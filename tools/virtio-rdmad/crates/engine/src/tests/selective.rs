// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The agreement of two peers on selective acknowledgements, and connections with peers that do not know them.

use std::sync::Arc;
use std::time::Duration;

use abi::*;
use roce::{Opcode, Operation, Position, Psn, SackEth, Service, Syndrome};

use super::bad_packets::Forged;
use super::cable::{cable, headers, over_a_cable, Cable, Faults};
use super::driver::*;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::{Clock, Counter};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
/// Ten packets.
const LEN: usize = 10 << 10;

/// Writes ten packets from A to B, the first of which is lost, and checks that they are there before any timer is over.
/// Returns the packets that were sent after that one.
fn write_with_a_loss(pair: &mut Pair, cable: &Arc<Cable>) -> Vec<Vec<u8>> {
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, LEN, 5);
    pair.b.fill(DATA, LEN, 6);
    let part = [sge(DATA, LEN as u32, a.key)];
    pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
    let before = cable.sent.lock().unwrap().len();
    pair.a.run();
    cable.lose();
    let sent = cable.sent.lock().unwrap()[before..].to_vec();
    assert_eq!(sent.len(), 10);
    sent[1..].iter().for_each(|frame| cable.inject(1, frame));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    assert!(pair.b.bytes(DATA, LEN) == data);
    let all = cable.sent.lock().unwrap();
    all[before + 1..].to_vec()
}

/// Returns how many of some packets are of this opcode.
fn count(frames: &[Vec<u8>], opcode: Opcode) -> usize {
    frames.iter().filter(|frame| roce::decode(frame).unwrap().headers.bth.opcode == opcode).count()
}

/// Returns how many of some packets are requests.
fn requests(frames: &[Vec<u8>]) -> usize {
    let operation = |frame: &Vec<u8>| roce::decode(frame).unwrap().headers.bth.opcode.operation();
    frames.iter().filter(|frame| operation(frame) == Operation::Write).count()
}

fn naks(frames: &[Vec<u8>]) -> usize {
    let is_nak = |frame: &&Vec<u8>| {
        let headers = roce::decode(frame).unwrap().headers;
        let aeth = headers.extended.aeth.map(|aeth| aeth.syndrome);
        headers.bth.opcode.operation() == Operation::Acknowledge
            && matches!(aeth, Some(Syndrome::Nak(roce::NakCode::PsnSequenceError)))
    };
    frames.iter().filter(is_nak).count()
}

/// The first loss is repaired as with any peer, and from then on what is lost is sent again alone.
#[test]
fn both_ends_learn_it_at_the_first_loss() {
    over_a_cable(1, Faults::default(), || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        let first = write_with_a_loss(&mut pair, &cable);
        assert_eq!((naks(&first), requests(&first)), (1, 9 + 10));
        assert_eq!(count(&first, Opcode::SELECTIVE_ACKNOWLEDGE), 1, "the offer");
        assert_eq!(count(&first, Opcode::SELECTIVE_OFFER), 1, "its answer");
        for _ in 0..3 {
            let next = write_with_a_loss(&mut pair, &cable);
            assert_eq!((naks(&next), requests(&next)), (0, 9 + 1));
            assert!(count(&next, Opcode::SELECTIVE_ACKNOWLEDGE) >= 1);
            assert_eq!(count(&next, Opcode::SELECTIVE_OFFER), 0);
        }
    });
}

/// An adapter whose packets are routed adaptively is no peer that knows selective acknowledgements: each loss is told
/// by a NAK at once, and it is not offered for ever.
#[test]
fn an_adapter_with_adaptive_routing_gets_naks() {
    // A connection that was loaded from an image offers it as often once more.
    without_upgrades();
    let faults = Faults { foreign: true, ..Faults::default() };
    let cable = over_a_cable(1, faults, || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        for _ in 0..40 {
            let sent = write_with_a_loss(&mut pair, &cable);
            assert_eq!((naks(&sent), requests(&sent)), (1, 9 + 10));
            pair.settle_for(Duration::from_millis(2));
        }
        assert_eq!(pair.counter(Counter::SelectiveAcksSent), 0);
        assert_eq!(pair.counter(Counter::Held), 0);
    });
    let sent = cable.sent.lock().unwrap();
    assert_eq!(count(&sent, Opcode::SELECTIVE_ACKNOWLEDGE), 16);
}

/// The reserved bits of the BTH are not ours.
#[test]
fn no_packet_has_a_reserved_bit() {
    let faults = Faults { loss: 30, reorder: 30, mark: 100, ..Faults::default() };
    let cable = over_a_cable(1, faults, || {
        super::wire::a_bit_of_everything(&mut Pair::new(), 6);
    });
    for frame in &*cable.sent.lock().unwrap() {
        assert_eq!((frame[46] & 0x3f, frame[50] & 0x7f), (0, 0), "{frame:?}");
    }
}

/// A connection whose peer never sends what is missing holds packets for a while, and then nobody's room is taken. A
/// peer that comes back later sends all of them again.
#[test]
fn what_is_never_completed_is_dropped() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        write_with_a_loss(&mut pair, &cable);
        assert!(is_believed(&pair));
        let [a, b] = pair.ends;
        let data = pair.a.fill(DATA, LEN, 9);
        let part = [sge(DATA, LEN as u32, a.key)];
        pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
        let before = cable.sent.lock().unwrap().len();
        pair.a.run();
        cable.lose();
        let sent = cable.sent.lock().unwrap()[before..].to_vec();
        let held = pair.b.device.counter(Counter::Held);
        sent[1..].iter().for_each(|frame| cable.inject(1, frame));
        // Its peer is away.
        let rest = |time| {
            settle(&[&pair.b]);
            cable.lose();
            pair.clock.advance_to(pair.clock.now() + time);
            settle(&[&pair.b]);
        };
        rest(Duration::from_millis(900));
        assert_eq!(pair.b.device.counter(Counter::Held) - held, 9);
        assert_eq!(pair.b.device.counter(Counter::DropHoldLate), 0);
        cable.lose();
        rest(Duration::from_millis(200));
        assert_eq!(pair.b.device.counter(Counter::DropHoldLate), 9);
        // It is back, and learns what has become of its packets.
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert!(pair.b.bytes(DATA, LEN) == data);
    });
}

/// A peer leaves as much room for what comes too early to other peers as it takes, however many connections it has.
#[test]
fn a_peer_leaves_room_to_others() {
    without_upgrades();
    over_a_cable(1, Faults::default(), || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        let end = pair.ends[1];
        let mut flood = |peer: u8| {
            let qpn = pair.b.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
            pair.b.connect(qpn, gid(peer), 7);
            know_selective(&pair.b, qpn);
            let before = pair.b.device.counter(Counter::Held);
            let send = Opcode::new(Service::Rc, Operation::Send, Position::Only).unwrap();
            let mut headers = headers([peer, 2], send, qpn);
            let expected = Psn::new(pair.b.query(qpn).rq_psn);
            for ahead in 1..256 {
                headers.bth.psn = expected.plus(ahead);
                cable.bring(1, &Forged { headers, payload: vec![0; 4096] }.frame());
            }
            settle(&[&pair.b]);
            pair.b.device.counter(Counter::Held) - before
        };
        assert_eq!(flood(3), 255);
        let others = flood(3) + flood(3);
        assert!((200..230).contains(&others), "{others}");
        assert!(flood(4) >= 230);
    });
}

/// Returns whether the responder of B takes its peer for one that knows selective acknowledgements.
fn is_believed(pair: &Pair) -> bool {
    let qp = pair.b.device.hca().qps.get(Slot::of_number(pair.ends[1].qpn).unwrap()).unwrap();
    let responder = lock(&qp.responder);
    responder.inbound.as_ref().is_some_and(|inbound| inbound.is_selective)
}

/// A responder believes a requester that names the PSN which it was offered. So nobody makes a connection depend on
/// selective acknowledgements who does not see its packets.
#[test]
fn a_forged_offer_is_not_believed() {
    let faults = Faults { foreign: true, ..Faults::default() };
    over_a_cable(1, faults, || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        write_with_a_loss(&mut pair, &cable);
        let psn = Forged::from_sent(&cable, Operation::Write).headers.bth.psn;
        let offer = |psn: Psn, asks: bool| {
            let mut headers = headers([1, 2], Opcode::SELECTIVE_OFFER, pair.ends[1].qpn);
            (headers.bth.psn, headers.bth.ack_request) = (psn, asks);
            Forged { headers, payload: Vec::new() }.frame()
        };
        for (asks, counter) in [(false, Counter::UnexpectedAnswers), (true, Counter::DropPsn)] {
            for far in [2, 1 << 22, (1 << 23) + 5] {
                let before = pair.b.device.counter(counter);
                cable.inject(1, &offer(psn.plus(far), asks));
                pair.settle();
                assert_eq!(pair.b.device.counter(counter), before + 1, "{far} ahead");
            }
        }
        let before = cable.sent.lock().unwrap().len();
        cable.inject(1, &offer(psn, true));
        pair.settle();
        let sent = cable.sent.lock().unwrap()[before..].to_vec();
        assert_eq!(count(&sent, Opcode::SELECTIVE_ACKNOWLEDGE), 1, "it is answered");
        let sack = roce::decode(&sent[0]).unwrap().headers.extended.sack_eth;
        assert_eq!(sack, Some(SackEth::default()));
        assert!(!is_believed(&pair));
    });
    over_a_cable(1, Faults::default(), || {
        let (mut pair, cable) = (Pair::new(), cable().unwrap());
        write_with_a_loss(&mut pair, &cable);
        assert!(is_believed(&pair));
    });
}
