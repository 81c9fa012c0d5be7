// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packets that a guest must not take, or must not send: each has its counter, has no effect, and keeps
//! nobody from going on.

use std::sync::Arc;
use std::time::Duration;

use abi::*;
use roce::{Headers, Ip, Opcode, Operation, Position, Psn, Qpn, Reth, Service, Vlan};

use super::cable::{cable, headers, over_a_cable, Cable, Faults};
use super::datagram;
use super::driver::*;
use crate::{Clock, Counter};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
/// The fabrics of guests A and B, as the cable counts.
const A: usize = 0;
const B: usize = 1;

/// A packet that a test changes before it is sent.
#[derive(Clone)]
pub struct Forged {
    pub headers: Headers,
    pub payload: Vec<u8>,
}

impl Forged {
    /// Takes the last packet that was sent of this operation.
    pub fn from_sent(cable: &Cable, operation: Operation) -> Self {
        let sent = cable.sent.lock().unwrap();
        let packets = sent.iter().rev().map(|frame| roce::decode(frame).unwrap());
        let of = |packet: &roce::Packet<'_>| packet.headers.bth.opcode.operation() == operation;
        let packet = packets.into_iter().find(of).expect("such a packet");
        Self { headers: packet.headers, payload: packet.payload.to_vec() }
    }

    /// Returns the frame, with the right lengths and the right ICRC.
    pub fn frame(&self) -> Vec<u8> {
        let mut frame = vec![0; self.payload.len() + 200];
        let len = roce::encode(&self.headers, &self.payload, &mut frame).unwrap();
        frame.truncate(len);
        frame
    }
}

/// Returns the counters of packets, and what each of them is.
fn counters(guest: &Guest) -> Vec<(Counter, u64)> {
    let of_packets = [
        Counter::BadPacket,
        Counter::BadPacketLength,
        Counter::BadIcrc,
        Counter::DropPkey,
        Counter::DropQkey,
        Counter::DropSpoofed,
        Counter::DropNoQp,
        Counter::DropService,
        Counter::DropState,
        Counter::DropNotPeer,
        Counter::DropTooLong,
        Counter::DropInboxFull,
        Counter::DropUnreachable,
        Counter::DuplicateRequests,
        Counter::OutOfSequence,
        Counter::DropUnknownDuplicate,
        Counter::DropRepeatedAnswer,
        Counter::DropPsn,
        Counter::DropAnswersFull,
        Counter::UnexpectedAnswers,
    ];
    of_packets.map(|counter| (counter, guest.device.counter(counter))).to_vec()
}

/// Sends a frame to guest B, and checks that it is counted once, by this counter and no other, and that B
/// completes nothing.
fn is_counted(pair: &mut Pair, frame: &[u8], counter: Counter) {
    let cable = cable().unwrap();
    let before = counters(&pair.b);
    cable.inject(B, frame);
    pair.settle();
    for ((which, before), (_, now)) in before.into_iter().zip(counters(&pair.b)) {
        assert_eq!(now - before, u64::from(which == counter), "{which:?}, not {counter:?}");
    }
    assert!(pair.poll_b().is_none(), "{counter:?}");
}

/// Sends 100 bytes from A to B, and checks that they arrive.
fn exchange(pair: &mut Pair) {
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, 100, 3);
    pair.b.post_recv(b.qpn, 5, &[sge(DATA, 100, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(4, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, a.key)]));
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()), Some((4, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((5, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(pair.b.bytes(DATA, 100), data);
}

/// Runs a test with two connected guests on two hosts that have exchanged a message, and checks that they
/// can exchange another one afterwards.
fn connected(test: impl FnOnce(&mut Pair, &Arc<Cable>)) {
    connected_over(Faults::default(), test);
}

fn connected_over(faults: Faults, test: impl FnOnce(&mut Pair, &Arc<Cable>)) {
    over_a_cable(1, faults, || {
        let mut pair = Pair::new();
        exchange(&mut pair);
        test(&mut pair, &cable().unwrap());
        exchange(&mut pair);
    });
}

fn set_source(headers: &mut Headers, number: u8) {
    if let Ip::V4(ip) = &mut headers.ip {
        ip.source = [10, 0, 0, number].into();
    }
}

#[test]
fn each_kind_of_bad_packet_has_its_counter() {
    connected(|pair, cable| {
        let unconnected = pair.b.create_qp(pair.ends[1].pdn, pair.ends[1].cqn, VIRTIO_RDMA_QPT_RC);
        let send = Forged::from_sent(cable, Operation::Send);
        let good = send.frame();
        let mut refused = |change: &dyn Fn(&mut Forged), counter| {
            let mut forged = send.clone();
            // The packet would be the next one of the connection.
            forged.headers.bth.psn = forged.headers.bth.psn.plus(1);
            change(&mut forged);
            is_counted(pair, &forged.frame(), counter);
        };
        refused(&|it| it.headers.bth.pkey = 0x8001, Counter::DropPkey);
        refused(&|it| set_source(&mut it.headers, 9), Counter::DropNotPeer);
        refused(&|it| set_source(&mut it.headers, 2), Counter::DropSpoofed);
        for number in [0, 6, 7, 0xff_ffff] {
            let qpn = Qpn::new(number).unwrap();
            refused(&|it| it.headers.bth.dest_qp = qpn, Counter::DropNoQp);
        }
        let state = Qpn::new(unconnected).unwrap();
        refused(&|it| it.headers.bth.dest_qp = state, Counter::DropState);
        let uc = Opcode::new(Service::Uc, Operation::Send, Position::Only).unwrap();
        refused(&|it| it.headers.bth.opcode = uc, Counter::DropService);
        refused(&|it| it.headers.bth.psn = it.headers.bth.psn.plus(1), Counter::OutOfSequence);
        refused(&|it| it.headers.bth.psn = it.headers.bth.psn.minus(1), Counter::DuplicateRequests);
        let mut bytes = good.clone();
        *bytes.last_mut().unwrap() ^= 1;
        is_counted(pair, &bytes, Counter::BadIcrc);
        // The version of the BTH is in the byte behind the opcode.
        let bth = 14 + 20 + 8;
        let mut bytes = good;
        bytes[bth + 1] |= 1;
        is_counted(pair, &bytes, Counter::BadPacket);
        let short = Forged { payload: Vec::new(), ..send };
        let mut bytes = short.frame();
        // A WRITE, whose RETH is not there.
        bytes[bth] = 0x0a;
        is_counted(pair, &bytes, Counter::BadPacketLength);
    });
}

/// Returns how many packets the port says that it has dropped for their P_Key.
fn bad_pkeys(guest: &mut Guest) -> u32 {
    let request = virtio_rdma_cmd_query_port { port: 1 };
    let reply: virtio_rdma_rsp_query_port =
        guest.command(VIRTIO_RDMA_CMD_QUERY_PORT, &request).unwrap();
    reply.bad_pkey_cntr
}

#[test]
fn packets_of_other_partitions_are_counted() {
    connected(|pair, cable| {
        let mut forged = Forged::from_sent(cable, Operation::Send);
        forged.headers.bth.psn = forged.headers.bth.psn.plus(1);
        forged.headers.bth.pkey = 0x8001;
        for count in 1..=3 {
            is_counted(pair, &forged.frame(), Counter::DropPkey);
            assert_eq!(bad_pkeys(&mut pair.b), count);
        }
        // The number stays at its largest value.
        for more in [u32::MAX - 3, 1] {
            pair.b.device.hca().stats.add(Counter::DropPkey, more.into());
            assert_eq!(bad_pkeys(&mut pair.b), u32::MAX);
        }
    });
}

#[test]
fn a_limited_member_of_the_partition_is_heard() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        exchange(&mut pair);
        let cable = cable().unwrap();
        let mut send = Forged::from_sent(&cable, Operation::Send);
        send.headers.bth.psn = send.headers.bth.psn.plus(1);
        send.headers.bth.pkey = 0x7fff;
        let b = pair.ends[1];
        pair.b.post_recv(b.qpn, 6, &[sge(DATA, 100, b.key)]);
        cable.inject(B, &send.frame());
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((6, OK, VIRTIO_RDMA_WC_RECV)));
    });
}

/// A guest has the same GID in two VLANs. What comes by one of them is not for a connection in the other.
#[test]
fn a_connection_is_in_its_vlan_alone() {
    connected(|pair, cable| {
        pair.b.add_vlan_gid(1, gid(2), 5).unwrap();
        let mut send = Forged::from_sent(cable, Operation::Send);
        send.headers.bth.psn = send.headers.bth.psn.plus(1);
        send.headers.ethernet.vlan = Some(Vlan::new(5));
        is_counted(pair, &send.frame(), Counter::DropNotPeer);
    });
}

/// Two guests of a host are connected. A packet from the wire that names one of them as its source does
/// not reach the other.
#[test]
fn nobody_on_the_wire_speaks_for_a_guest_of_this_network() {
    connected(|pair, cable| {
        let send = Forged::from_sent(cable, Operation::Send);
        let mut third = Guest::new(&cable.fabric(B), &pair.clock, 3);
        let end = End::new(&mut third, VIRTIO_RDMA_QPT_RC);
        let b = pair.ends[1];
        let qpn = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        pair.b.connect(qpn, third.gid, end.qpn);
        third.connect(end.qpn, pair.b.gid, qpn);
        pair.b.post_recv(qpn, 9, &[sge(DATA, 100, b.key)]);
        let mut forged = send.clone();
        forged.headers.bth.dest_qp = Qpn::new(qpn).unwrap();
        forged.headers.bth.psn = Psn::new(0);
        set_source(&mut forged.headers, 3);
        is_counted(pair, &forged.frame(), Counter::DropSpoofed);
        // The guest itself is heard.
        third.post_send(end.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 50, end.key)]));
        settle(&[&third, &pair.b]);
        assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    });
}

/// A guest sends nothing from an address that it has no more, neither on a connection that it made while
/// it had the address, nor a datagram.
#[test]
fn nothing_is_sent_from_an_address_that_is_gone() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        exchange(&mut pair);
        let a = pair.ends[0];
        pair.a.del_gid(0).unwrap();
        let sent = cable().unwrap().sent.lock().unwrap().len();
        pair.a.post_send(a.qpn, &Send::new(7, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 10, a.key)]));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
        assert_eq!(cable().unwrap().sent.lock().unwrap().len(), sent);
        assert_ne!(pair.a.device.counter(Counter::DropNotOwn), 0);
    });
    over_a_cable(1, Faults::default(), || {
        let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, datagram::QKEY);
        let [a, b] = pair.ends;
        pair.a.del_gid(0).unwrap();
        let send = Send::new(7, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 10, a.key)]);
        pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        assert_eq!(cable().unwrap().sent.lock().unwrap().len(), 0);
    });
}

#[test]
fn bad_datagrams_have_their_counters() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, datagram::QKEY);
        let [a, b] = pair.ends;
        let send = Send::new(7, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 10, a.key)]);
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, 8000, b.key)]);
        pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn));
        pair.settle();
        assert_eq!(brief(pair.poll_b()).unwrap().0, 1);
        let good = Forged::from_sent(&cable().unwrap(), Operation::Send);
        let connection = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        let idle = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_UD);
        let mut refused = |change: &dyn Fn(&mut Forged), counter| {
            let mut forged = good.clone();
            change(&mut forged);
            is_counted(&mut pair, &forged.frame(), counter);
        };
        let to = |qpn| move |it: &mut Forged| it.headers.bth.dest_qp = Qpn::new(qpn).unwrap();
        refused(&to(6), Counter::DropNoQp);
        refused(&to(connection), Counter::DropService);
        refused(&to(idle), Counter::DropState);
        refused(&|it| it.payload = vec![1; 4100], Counter::DropTooLong);
        refused(&|it| it.headers.bth.pkey = 0, Counter::DropPkey);
        refused(&|it| set_source(&mut it.headers, 2), Counter::DropSpoofed);
        refused(&|it| it.headers.extended.deth.as_mut().unwrap().qkey = 1, Counter::DropQkey);
    });
}

/// Returns how many packets of an operation were sent.
fn count(cable: &Cable, operation: Operation) -> usize {
    let sent = cable.sent.lock().unwrap();
    let of =
        |frame: &&Vec<u8>| roce::decode(frame).unwrap().headers.bth.opcode.operation() == operation;
    sent.iter().filter(of).count()
}

/// Makes A read so many bytes of B. Returns the packet that asked for them.
fn read(pair: &mut Pair, cable: &Cable, len: u32) -> Forged {
    let [a, b] = pair.ends;
    let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &[sge(DATA, len, a.key)]);
    pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    Forged::from_sent(cable, Operation::ReadRequest)
}

/// A READ that came before is answered again only if the QP still lets its peer read (IBA 9.7.5.1.5 asks
/// for the checks of a new request).
#[test]
fn a_duplicate_gives_no_right_to_read() {
    connected(|pair, cable| {
        let request = read(pair, cable, 100);
        let before = count(cable, Operation::ReadResponse);
        cable.inject(B, &request.frame());
        pair.settle();
        assert_eq!(count(cable, Operation::ReadResponse), before + 1, "it is answered again");
        let mut attr = pair.b.query(pair.ends[1].qpn);
        attr.qp_access_flags = WRITE;
        pair.b.modify(pair.ends[1].qpn, VIRTIO_RDMA_QP_ACCESS_FLAGS, attr).unwrap();
        cable.inject(B, &request.frame());
        pair.settle();
        assert_eq!(count(cable, Operation::ReadResponse), before + 1, "it is not answered");
    });
}

/// A READ is answered again if there was one like it. Anybody can send one with a PSN that is behind the expected one,
/// which is half of all PSNs.
#[test]
fn a_read_that_repeats_nothing_is_dropped() {
    let psn_back =
        |back| move |it: &mut Forged| it.headers.bth.psn = it.headers.bth.psn.minus(back);
    let reth = |change: fn(&mut Reth)| {
        move |it: &mut Forged| change(it.headers.extended.reth.as_mut().unwrap())
    };
    connected(|pair, cable| {
        let read = read(pair, cable, 100);
        let mut dropped = |change: &dyn Fn(&mut Forged)| {
            let mut forged = read.clone();
            change(&mut forged);
            is_counted(pair, &forged.frame(), Counter::DropUnknownDuplicate);
        };
        dropped(&reth(|reth| reth.rkey = 0));
        dropped(&reth(|reth| reth.va += 4));
        dropped(&reth(|reth| reth.va = u64::MAX));
        dropped(&reth(|reth| reth.dma_len += 1));
        dropped(&reth(|reth| reth.dma_len = 1 << 31));
        for back in [1, 1 << 22, (1 << 23) - 2] {
            dropped(&psn_back(back));
            dropped(&|it| {
                psn_back(back)(it);
                reth(|reth| (reth.rkey, reth.dma_len) = (0, 1 << 30))(it);
            });
        }
        // Nothing that is no READ has the PSN of one.
        let send = Opcode::new(Service::Rc, Operation::Send, Position::Only).unwrap();
        dropped(&|it| {
            it.headers.bth.opcode = send;
            it.headers.extended.reth = None;
        });
        let write = Opcode::new(Service::Rc, Operation::AtomicWrite, Position::Only).unwrap();
        dropped(&|it| {
            it.headers.bth.opcode = write;
            it.payload = vec![0; 8];
        });
        let add = Opcode::new(Service::Rc, Operation::FetchAdd, Position::Only).unwrap();
        dropped(&|it| {
            it.headers.bth.opcode = add;
            it.headers.extended.reth = None;
            it.headers.extended.atomic_eth = Some(roce::AtomicEth::default());
        });
    });
}

/// A READ that a peer repeats while the first answer is under way may come when the peer has what it wants, and its
/// memory is gone: NVMe over Fabrics invalidates a region with the completion.
#[test]
fn a_repeated_read_of_memory_that_is_gone_is_dropped() {
    connected(|pair, cable| {
        let b = pair.ends[1];
        let mr = pair.b.reg_mr(b.pdn, DATA, 4096, READ);
        let mut send = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &[sge(DATA, 100, pair.ends[0].key)]);
        send = send.rdma(DATA, mr.rkey);
        pair.a.post_send(pair.ends[0].qpn, &send);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        let read = Forged::from_sent(cable, Operation::ReadRequest);
        pair.b.dereg_mr(mr.mrn).unwrap();
        let before = count(cable, Operation::ReadResponse);
        cable.inject(B, &read.frame());
        pair.settle_in_time();
        assert_eq!(pair.b.device.counter(Counter::DropRepeatedAnswer), 1);
        assert_eq!(count(cable, Operation::ReadResponse), before);
        assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
    });
}

/// Returns how many NAKs for missing packets were sent.
fn naks(cable: &Cable) -> usize {
    let sent = cable.sent.lock().unwrap();
    let is_nak = |frame: &&Vec<u8>| {
        let headers = roce::decode(frame).unwrap().headers;
        let missing = roce::Syndrome::Nak(roce::NakCode::PsnSequenceError);
        headers.bth.opcode.operation() == Operation::Acknowledge
            && headers.extended.aeth.is_some_and(|aeth| aeth.syndrome == missing)
    };
    sent.iter().filter(is_nak).count()
}

/// Each NAK has a requester send again what is under way. So packets with a PSN that is guessed lead to few of them,
/// and to none if the connection goes on.
#[test]
fn packets_that_are_ahead_lead_to_few_naks() {
    without_upgrades();
    connected_over(Faults { foreign: true, ..Faults::default() }, |pair, cable| {
        let begin = pair.clock.now();
        for _ in 0..200 {
            for (ahead, counter) in [
                (2, Counter::OutOfSequence),
                (300, Counter::OutOfSequence),
                (1 << 16, Counter::OutOfSequence),
                (1 << 16 | 1, Counter::DropPsn),
                (1 << 22, Counter::DropPsn),
            ] {
                let mut send = Forged::from_sent(cable, Operation::Send);
                send.headers.bth.psn = send.headers.bth.psn.plus(ahead + 1);
                is_counted(pair, &send.frame(), counter);
            }
            exchange(pair);
        }
        // One in a millisecond, and one in 32 messages that come in their turn.
        let most = 16 + (pair.clock.now() - begin).as_millis() as usize + 201_usize.div_ceil(32);
        assert!((1..=most).contains(&naks(cable)), "{} NAKs of {most}", naks(cable));
        // One that nothing follows is late.
        let before = naks(cable);
        let mut send = Forged::from_sent(cable, Operation::Send);
        send.headers.bth.psn = send.headers.bth.psn.plus(300);
        is_counted(pair, &send.frame(), Counter::OutOfSequence);
        assert_eq!(naks(cable), before);
        pair.settle_in_time();
        assert_eq!(naks(cable), before + 1);
    });
}

/// The acknowledgement of a WRITE that came before is of that WRITE and not of what came after it: that may be
/// an atomic, whose result a peer would take for lost, or, as rxe does, for there.
#[test]
fn a_repeated_write_acknowledges_no_atomic() {
    connected(|pair, cable| {
        let [a, b] = pair.ends;
        let sges = [sge(DATA, 8, a.key)];
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &sges).rdma(DATA, b.key);
        pair.a.post_send(a.qpn, &write);
        let add = Send::new(2, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &sges);
        pair.a.post_send(a.qpn, &add.atomic(DATA, b.key, 1, 0));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        let write = Forged::from_sent(cable, Operation::Write);
        cable.inject(B, &write.frame());
        pair.settle();
        let answer = Forged::from_sent(cable, Operation::Acknowledge);
        assert_eq!(answer.headers.bth.psn, write.headers.bth.psn);
    });
}

/// The data of a READ acknowledges a WRITE in front of it that is repeated as well. An acknowledgement of its own would
/// come in the middle of the data that was sent before: rxe takes it for the end of that data, and fails.
#[test]
fn a_write_that_is_repeated_with_a_read_is_acknowledged_by_its_data() {
    const LEN: u32 = 1 << 20;
    connected(|pair, cable| {
        let [a, b] = pair.ends;
        let [write, read] = [8, LEN].map(|len| [sge(DATA, len, a.key)]);
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &write).rdma(DATA, b.key);
        let read = Send::new(2, VIRTIO_RDMA_WR_RDMA_READ, &read).rdma(DATA, b.key);
        pair.a.post_send(a.qpn, &write);
        pair.a.post_send(a.qpn, &read);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        let write = Forged::from_sent(cable, Operation::Write).frame();
        let read = Forged::from_sent(cable, Operation::ReadRequest).frame();
        let packets = count(cable, Operation::ReadResponse);
        let acknowledgements = count(cable, Operation::Acknowledge);
        // Both come together, and when some of the data was sent.
        for begins in [false, true] {
            let before = count(cable, Operation::ReadResponse);
            if begins {
                cable.bring(B, &read);
                while count(cable, Operation::ReadResponse) == before {
                    pair.b.device.run(1);
                }
            }
            let begun = count(cable, Operation::ReadResponse) - before;
            assert_eq!(begins, begun != 0);
            assert!(begun < packets, "{begun} of {packets}");
            cable.bring(B, &write);
            cable.bring(B, &read);
            pair.settle();
            let sent = count(cable, Operation::ReadResponse) - before;
            assert!((begun + packets..2 * packets).contains(&sent), "{begun}, {sent} of {packets}");
            assert_eq!(count(cable, Operation::Acknowledge), acknowledgements);
        }
    });
}

/// A peer repeats requests faster than they can be answered. What waits has a bound.
#[test]
fn answers_that_wait_have_a_bound() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let cable = cable().unwrap();
        let mut request = read(&mut pair, &cable, 1 << 20);
        let reth = request.headers.extended.reth.unwrap();
        for number in 0..1000 {
            let dma_len = reth.dma_len - number * 1024;
            request.headers.extended.reth = Some(Reth { dma_len, ..reth });
            cable.inject(B, &request.frame());
            cable.deliver();
            // The guest takes the request and sends one packet of the first answer.
            pair.b.device.run(1);
            pair.b.device.run(1);
        }
        let dropped = pair.b.device.counter(Counter::DropAnswersFull);
        assert!((400..600).contains(&dropped), "{dropped} dropped");
        for (guest, qpn) in [(&mut pair.a, pair.ends[0].qpn), (&mut pair.b, pair.ends[1].qpn)] {
            guest.set_state(qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        }
        let [a, b] = pair.ends;
        pair.a.connect(a.qpn, pair.b.gid, b.qpn);
        pair.b.connect(b.qpn, pair.a.gid, a.qpn);
        exchange(&mut pair);
    });
}

/// A NAK for a request that was answered long ago ends nothing, and what nobody asked for is dropped.
#[test]
fn an_answer_that_is_too_late_does_nothing() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        exchange(&mut pair);
        let [a, b] = pair.ends;
        let cable = cable().unwrap();
        let mut answer = Forged::from_sent(&cable, Operation::Acknowledge);
        let send = Send::new(4, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, a.key)]);
        pair.a.post_send(a.qpn, &send);
        // The send is under way, and waits for a receive.
        pair.settle();
        let before = pair.a.device.counter(Counter::UnexpectedAnswers);
        let syndromes = [
            roce::Syndrome::Nak(roce::NakCode::RemoteAccessError),
            roce::Syndrome::Nak(roce::NakCode::PsnSequenceError),
            roce::Syndrome::Ack(roce::Credits::UNLIMITED),
        ];
        for syndrome in syndromes {
            answer.headers.extended.aeth.as_mut().unwrap().syndrome = syndrome;
            for psn in [0, 7, 0x80_0000, 0xff_ffff] {
                answer.headers.bth.psn = Psn::new(psn);
                cable.inject(A, &answer.frame());
            }
        }
        pair.settle();
        assert_eq!(pair.a.device.counter(Counter::UnexpectedAnswers), before + 12);
        pair.b.post_recv(b.qpn, 5, &[sge(DATA, 100, b.key)]);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()), Some((4, OK, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(brief(pair.poll_b()), Some((5, OK, VIRTIO_RDMA_WC_RECV)));
    });
}

/// What a guest does not look into in time is dropped, and the memory that it takes has a bound.
#[test]
fn an_inbox_that_is_full_drops_packets() {
    connected(|pair, cable| {
        let mut send = Forged::from_sent(cable, Operation::Send);
        send.headers.bth.dest_qp = Qpn::new(0xab_cdef).unwrap();
        send.payload = vec![0; 4096];
        let (frame, fabric) = (send.frame(), cable.fabric(B));
        let flood = |frame: &[u8]| (0..2000).filter(|_| fabric.receive(frame, 0)).count();
        let taken = flood(&frame);
        assert_eq!(taken, (3 << 20) / frame.len(), "a quarter is left for others");
        send.headers.ip = headers([77, 2], Opcode::CNP, 1).ip;
        let others = flood(&send.frame());
        let left = (4 << 20) - taken * frame.len();
        assert_eq!(others, left * 3 / 4 / frame.len());
        let count = |counter| pair.b.device.counter(counter) as usize;
        assert_eq!(count(Counter::DropInboxFull), 4000 - taken - others);
        pair.settle();
        assert_eq!(count(Counter::DropNoQp), taken + others);
        assert_eq!(flood(&frame), taken, "it is empty again");
    });
}

/// A peer that answers without ever doing the oldest request does not keep the requester waiting for
/// ever: only progress renews the retries (IBA 9.7.6.1.3).
#[test]
fn only_progress_renews_the_retries() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let cable = cable().unwrap();
        let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        // The second PSN is taken by a packet that A does not know of, so that B takes A's atomic for a
        // duplicate that it has forgotten. It answers the READ behind it.
        let mut write = Forged::from_sent(&cable, Operation::Write);
        write.headers.bth.psn = write.headers.bth.psn.plus(1);
        cable.inject(B, &write.frame());
        let (add, result) = (VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, [sge(DATA, 8, a.key)]);
        pair.settle();
        pair.a.post_send(a.qpn, &Send::new(2, add, &result).atomic(DATA, b.key, 1, 0));
        let send = Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &result);
        pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
        pair.settle_in_time();
        let expected = (2, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
        assert_eq!(brief(pair.poll_a()).map(|(id, status, _)| (id, status)), Some(expected));
    });
}

/// A peer that says all the time that it misses the oldest packet has the requester try again as often as
/// any, and not for ever.
#[test]
fn a_peer_that_misses_everything_ends_the_connection() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        exchange(&mut pair);
        let [a, b] = pair.ends;
        let cable = cable().unwrap();
        let mut answer = Forged::from_sent(&cable, Operation::Acknowledge);
        answer.headers.bth.psn = answer.headers.bth.psn.plus(1);
        let missing = roce::Syndrome::Nak(roce::NakCode::PsnSequenceError);
        answer.headers.extended.aeth.as_mut().unwrap().syndrome = missing;
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        pair.a.post_send(a.qpn, &Send::new(9, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
        let mut done = None;
        for _ in 0..100 {
            cable.inject(A, &answer.frame());
            pair.settle();
            // Several come before the time for an answer is over, which is 67 ms.
            pair.clock.advance_to(pair.clock.now() + Duration::from_millis(20));
            done = done.or(pair.poll_a());
        }
        assert_eq!(brief(done).unwrap().1, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    });
}

/// Sends B a packet in A's name, which a test makes from a WRITE of 8 bytes that would be the next one, and checks that
/// B refuses it with this NAK and keeps its memory as it is.
fn is_refused(forge: impl FnOnce(&mut Pair, &mut Forged), nak: roce::NakCode) {
    // ATOMIC WRITE wants rings.
    let test = || {
        let mut pair = Pair::new();
        let cable = cable().unwrap();
        let [a, b] = pair.ends;
        let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        let mut forged = Forged::from_sent(&cable, Operation::Write);
        forged.headers.bth.psn = forged.headers.bth.psn.plus(1);
        forged.payload.fill(0xee);
        forge(&mut pair, &mut forged);
        let what = format!("{:?}, {} bytes", forged.headers, forged.payload.len());
        let before = pair.b.bytes(DATA, 0x8000);
        cable.inject(B, &forged.frame());
        pair.settle();
        let answer = Forged::from_sent(&cable, Operation::Acknowledge).headers;
        assert_eq!(answer.bth.psn, forged.headers.bth.psn, "{what}");
        let syndrome = answer.extended.aeth.map(|aeth| aeth.syndrome);
        assert_eq!(syndrome, Some(roce::Syndrome::Nak(nak)), "{what}");
        assert!(pair.b.bytes(DATA, 0x8000) == before, "{what}");
    };
    with_rings(|| over_a_cable(1, Faults::default(), test));
}

/// Makes a packet one of another operation of RC.
fn set_operation(forged: &mut Forged, operation: Operation, position: Position) {
    forged.headers.bth.opcode = Opcode::new(Service::Rc, operation, position).unwrap();
    if matches!(operation, Operation::CompareSwap | Operation::FetchAdd) {
        let Reth { va, rkey, .. } = forged.headers.extended.reth.take().unwrap();
        let atomic = roce::AtomicEth { va, rkey, swap_add: 1, compare: 0 };
        forged.headers.extended.atomic_eth = Some(atomic);
    }
    if matches!(operation, Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd) {
        forged.payload.clear();
    }
}

/// The 8 bytes of an ATOMIC WRITE are in its packet, and its RETH says so (IBA oA19-28). Memory that is not in the
/// packet is not written.
#[test]
fn an_atomic_write_has_eight_bytes() {
    let lengths = [0, 1, 4, 5, 7, 9, 12, 1024].map(|len| (len, 8));
    let said = [0, 4, 9, 12, 1 << 31, u32::MAX].map(|dma_len| (8, dma_len));
    for (len, dma_len) in lengths.into_iter().chain(said).chain([(0, 0), (4, 4), (12, 12)]) {
        let forge = |_: &mut Pair, it: &mut Forged| {
            set_operation(it, Operation::AtomicWrite, Position::Only);
            it.payload = vec![0xee; len];
            it.headers.extended.reth.as_mut().unwrap().dma_len = dma_len;
        };
        is_refused(forge, roce::NakCode::InvalidRequest);
    }
    for at in [1, 4, 7] {
        let forge = |_: &mut Pair, it: &mut Forged| {
            set_operation(it, Operation::AtomicWrite, Position::Only);
            it.headers.extended.reth.as_mut().unwrap().va += at;
        };
        is_refused(forge, roce::NakCode::InvalidRequest);
    }
}

/// A WRITE is as long as its RETH says. The pad makes up for no byte.
#[test]
fn a_write_is_as_long_as_it_says() {
    for (len, dma_len) in [
        (0, 8),
        (5, 8),
        (7, 8),
        (9, 8),
        (12, 8),
        (8, 0),
        (8, 7),
        (8, 9),
        (8, 1 << 31),
        (8, u32::MAX),
    ] {
        let forge = |_: &mut Pair, it: &mut Forged| {
            it.payload = vec![0xee; len];
            it.headers.extended.reth.as_mut().unwrap().dma_len = dma_len;
        };
        is_refused(forge, roce::NakCode::InvalidRequest);
    }
}

/// A pad count that the packet has no room for, and opcodes that there are not, are dropped.
#[test]
fn pads_and_opcodes_that_there_are_not_are_dropped() {
    connected(|pair, cable| {
        let bth = 14 + 20 + 8;
        let read = read(pair, cable, 8);
        for pad in 1..4 {
            let mut frame = read.frame();
            frame[bth + 1] |= pad << 4;
            is_counted(pair, &frame, Counter::BadPacketLength);
        }
        for opcode in [0x15, 0x18, 0x1b, 0x1e, 0x1f, 0x3f, 0x40, 0x60, 0x80, 0x9f, 0xb5, 0xbf, 0xff]
        {
            let mut frame = read.frame();
            frame[bth] = opcode;
            is_counted(pair, &frame, Counter::BadPacket);
        }
    });
}

/// Requests whose addresses go on behind the last one that there is are refused, and do not go on at the first one, nor
/// in the first bytes of a region whose addresses end there.
#[test]
fn addresses_end_with_the_last_one() {
    use {Operation as O, Position as P};

    const LEN: u64 = 0x2000;
    const BASE: u64 = 0_u64.wrapping_sub(LEN);
    let high = |pair: &mut Pair| {
        let pages = [DATA + 0x1000, DATA + 0x3000];
        pair.b.reg_pages(pair.ends[1].pdn, BASE, LEN - 1, ALL, &pages).unwrap().rkey
    };
    for (operation, position, back, dma_len) in [
        (O::Write, P::Only, 8, 8),
        (O::Write, P::Only, 1, 8),
        (O::Write, P::First, 1, 0x2000),
        (O::Write, P::First, LEN, 0x4000),
        (O::Write, P::First, LEN, 1 << 31),
        (O::ReadRequest, P::Only, 8, 8),
        (O::ReadRequest, P::Only, 1, 1),
        (O::ReadRequest, P::Only, 1, 0x2000),
        (O::ReadRequest, P::Only, LEN, 0x4000),
        (O::ReadRequest, P::Only, LEN, 1 << 31),
        (O::AtomicWrite, P::Only, 8, 8),
        (O::FetchAdd, P::Only, 8, 8),
        (O::CompareSwap, P::Only, 8, 8),
    ] {
        // The region's own key, and that of all of B's memory.
        for is_high in [true, false] {
            let forge = |pair: &mut Pair, it: &mut Forged| {
                let rkey = if is_high { high(pair) } else { pair.ends[1].key };
                it.headers.extended.reth =
                    Some(Reth { va: 0_u64.wrapping_sub(back), rkey, dma_len });
                if position == P::First {
                    it.payload = vec![0xee; 1024];
                }
                set_operation(it, operation, position);
            };
            is_refused(forge, roce::NakCode::RemoteAccessError);
        }
    }
    // What lies within is there.
    connected(|pair, cable| {
        let rkey = high(pair);
        let [a, b] = pair.ends;
        let data = pair.a.fill(DATA, 8, 7);
        let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &send.rdma(0_u64.wrapping_sub(9), rkey));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        assert_eq!(pair.b.bytes(DATA + 0x3ff7, 8), data);
        assert_ne!(count(cable, Operation::Write), 0);
        let refused =
            |pair: &mut Pair, len| pair.b.reg_pages(b.pdn, BASE, len, ALL, &[DATA, DATA]).err();
        assert_eq!(refused(pair, LEN), Some(VIRTIO_RDMA_STATUS_INVAL));
    });
}
