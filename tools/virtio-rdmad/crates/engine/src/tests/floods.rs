// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Floods of packets for one guest, bad ones and good ones: they cost another guest of the same host nothing, and
//! the first one keeps a bounded number of them.

use std::sync::Arc;

use abi::*;
use roce::{Operation, Psn, Qpn, Reth};

use super::bad_packets::Forged;
use super::cable::{cable, cnp, over_a_cable, Cable, Faults};
use super::datagram;
use super::driver::*;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
/// The fabrics of guests A and B, as the cable counts.
const A: usize = 0;
const B: usize = 1;
/// Packets of a flood that come in each round.
const PACKETS: usize = 5000;
/// Receives that a flooded guest has posted.
const RECEIVES: u64 = 32;
/// Packets that a guest sends in a round at most: one visit of the inbox with as many answers, and one of the
/// responder.
const MOST_ANSWERS: usize = 512;

/// Two guests with a connection, of which the second one is flooded in the name of the first. It stands by itself
/// at the other end of the cable, and nobody runs it during the flood: what comes back is lost.
struct Flood {
    from: Guest,
    /// The objects of the first guest.
    end: End,
    /// The connection's QP, and what the second guest has.
    to: End,
    cable: Arc<Cable>,
}

impl Flood {
    /// Makes the first guest, and connects it with guest B.
    fn new(pair: &mut Pair) -> Self {
        let cable = cable().unwrap();
        let mut from = Guest::new(&cable.fabric(A), &pair.clock, 4);
        let end = End::new(&mut from, VIRTIO_RDMA_QPT_RC);
        let b = pair.ends[1];
        let qpn = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        pair.b.connect(qpn, from.gid, end.qpn);
        from.connect(end.qpn, pair.b.gid, qpn);
        Self { from, end, to: End { qpn, ..b }, cable }
    }

    /// Makes the first guest carry out a work request. Returns the last packet of an operation.
    fn sent(&mut self, pair: &Pair, send: &Send, operation: Operation) -> Forged {
        self.from.post_send(self.end.qpn, send);
        settle(&[&self.from, &pair.b]);
        assert_eq!(brief(self.from.poll(self.end.cqn)).map(|(_, status, _)| status), Some(OK));
        Forged::from_sent(&self.cable, operation)
    }

    /// Returns a SEND that was done.
    fn send(&mut self, pair: &mut Pair) -> Forged {
        pair.b.post_recv(self.to.qpn, 5, &[sge(DATA, 100, self.to.key)]);
        let send = Send::new(4, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, self.end.key)]);
        let forged = self.sent(pair, &send, Operation::Send);
        assert_eq!(brief(pair.poll_b()), Some((5, OK, VIRTIO_RDMA_WC_RECV)));
        forged
    }

    /// Returns a READ of 64 KiB that was done.
    fn read(&mut self, pair: &mut Pair) -> Forged {
        let part = [sge(DATA, 1 << 16, self.end.key)];
        let read = Send::new(4, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, self.to.key);
        self.sent(pair, &read, Operation::ReadRequest)
    }
}

/// Returns the packets of a round.
type Packets<'a> = &'a dyn Fn(&mut Pair, &mut Flood) -> Vec<Vec<u8>>;

/// Returns in how many rounds guest C, which is on the host of guest B, gets a message of 64 KiB from A. Before each
/// round the wire brings `packets` to guest B, which have to be counted by `counter`.
fn rounds_of_another_guest(packets: Packets<'_>, counter: Option<Counter>) -> u32 {
    let mut rounds = 0;
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let mut flood = Flood::new(&mut pair);
        let frames = packets(&mut pair, &mut flood);
        let cable = cable().unwrap();
        let mut third = Guest::new(&cable.fabric(B), &pair.clock, 3);
        let end = End::new(&mut third, VIRTIO_RDMA_QPT_RC);
        let a = pair.ends[0];
        let qpn = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
        pair.a.connect(qpn, third.gid, end.qpn);
        third.connect(end.qpn, pair.a.gid, qpn);
        let data = pair.a.fill(DATA, 65536, 9);
        let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 65536, a.key)]);
        pair.a.post_send(qpn, &send.rdma(DATA, end.key));
        let before = counter.map(|counter| pair.b.device.counter(counter));
        let mut done = None;
        while done.is_none() {
            rounds += 1;
            assert!(rounds < 1000, "no progress");
            for frame in &frames {
                cable.inject(B, frame);
            }
            cable.deliver();
            round_of_flooded_guest(&pair.b, &cable);
            // One thread serves B and C. Both have one call in each round.
            third.device.run(64);
            pair.a.device.run(64);
            done = pair.poll_a();
        }
        assert_eq!(brief(done), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert!(third.bytes(DATA, 65536) == data);
        let after = counter.map(|counter| pair.b.device.counter(counter));
        assert!(counter.is_none() || after > before, "{counter:?}: {after:?}");
    });
    rounds
}

/// Runs a guest once, and checks that this is as short as any call, and that it sends a bounded number of packets.
fn round_of_flooded_guest(guest: &Guest, cable: &Cable) {
    let sent = || cable.sent.lock().unwrap().len();
    let (work, packets) = (guest.device.counter(Counter::Work), sent());
    guest.device.run(64);
    assert!(guest.device.counter(Counter::Work) - work <= TURN, "a turn");
    assert!(sent() - packets <= MOST_ANSWERS, "{} answers", sent() - packets);
}

/// Checks that a flood takes no round from another guest.
fn delays_nobody(name: &str, packets: Packets<'_>, counter: Counter) {
    let quiet = rounds_of_another_guest(&|_, _| Vec::new(), None);
    assert_eq!(rounds_of_another_guest(packets, Some(counter)), quiet, "{name}");
}

/// Returns a flood of one packet, changed.
fn changed(forged: &Forged, change: impl Fn(&mut Forged)) -> Vec<Vec<u8>> {
    let mut forged = forged.clone();
    change(&mut forged);
    vec![forged.frame(); PACKETS]
}

/// Returns a flood of packets whose PSNs follow each other.
fn numbered(forged: &Forged, first: Psn) -> Vec<Vec<u8>> {
    let mut forged = forged.clone();
    let packet = |number: usize| {
        forged.headers.bth.psn = first.plus(number as u32);
        forged.frame()
    };
    (0..PACKETS).map(packet).collect()
}

#[test]
fn a_flood_of_bad_packets_delays_no_other_guest() {
    let spoilt: Packets<'_> = &|pair, flood| {
        let mut frame = flood.send(pair).frame();
        *frame.last_mut().unwrap() ^= 1;
        vec![frame; PACKETS]
    };
    let ahead: Packets<'_> = &|pair, flood| {
        changed(&flood.send(pair), |it| it.headers.bth.psn = it.headers.bth.psn.plus(9))
    };
    let unknown: Packets<'_> = &|pair, flood| {
        changed(&flood.send(pair), |it| it.headers.bth.dest_qp = Qpn::new(0xab_cdef).unwrap())
    };
    delays_nobody("spoilt", spoilt, Counter::BadIcrc);
    delays_nobody("ahead", ahead, Counter::OutOfSequence);
    delays_nobody("unknown", unknown, Counter::DropNoQp);
}

/// A peer repeats requests that were done, and sends new ones faster than they can be done.
#[test]
fn a_flood_of_requests_delays_no_other_guest() {
    let repeated: Packets<'_> = &|pair, flood| changed(&flood.send(pair), |_| {});
    let new: Packets<'_> = &|pair, flood| {
        let send = flood.send(pair);
        for number in 0..RECEIVES {
            pair.b.post_recv(flood.to.qpn, number, &[sge(DATA, 1000, flood.to.key)]);
        }
        numbered(&send, send.headers.bth.psn.plus(1))
    };
    let without_receive: Packets<'_> = &|pair, flood| {
        changed(&flood.send(pair), |it| it.headers.bth.psn = it.headers.bth.psn.plus(1))
    };
    delays_nobody("repeated", repeated, Counter::DuplicateRequests);
    delays_nobody("new", new, Counter::ReceiveMessages);
    delays_nobody("without a receive", without_receive, Counter::RnrNaks);
}

/// A request of a few bytes asks for much data, the same as those before, parts of it, or other data.
#[test]
fn a_flood_of_reads_delays_no_other_guest() {
    let same: Packets<'_> = &|pair, flood| changed(&flood.read(pair), |_| {});
    let others: Packets<'_> = &|pair, flood| {
        let read = flood.read(pair);
        let reth = read.headers.extended.reth.unwrap();
        let part = |index: u32| {
            let mut part = read.clone();
            part.headers.bth.psn = read.headers.bth.psn.plus(index);
            let va = reth.va + u64::from(index) * 1024;
            part.headers.extended.reth =
                Some(Reth { va, dma_len: reth.dma_len - index * 1024, ..reth });
            part.frame()
        };
        (0..PACKETS as u32).map(|number| part(number % 64)).collect()
    };
    let unknown: Packets<'_> = &|pair, flood| {
        let read = flood.read(pair);
        numbered(&read, read.headers.bth.psn.minus(1 << 22))
    };
    delays_nobody("same", same, Counter::DuplicateRequests);
    delays_nobody("others", others, Counter::DuplicateRequests);
    delays_nobody("unknown", unknown, Counter::DropUnknownDuplicate);
}

#[test]
fn a_flood_of_datagrams_delays_no_other_guest() {
    let datagrams: Packets<'_> = &|pair, flood| {
        let (end, to) = (flood.end, flood.to);
        let kind = VIRTIO_RDMA_QPT_UD;
        let qpns =
            [flood.from.create_qp(end.pdn, end.cqn, kind), pair.b.create_qp(to.pdn, to.cqn, kind)];
        datagram::to_rts(&mut flood.from, qpns[0], datagram::QKEY, false);
        datagram::to_rts(&mut pair.b, qpns[1], datagram::QKEY, false);
        for number in 0..RECEIVES {
            pair.b.post_recv(qpns[1], number, &[sge(DATA, 1000, to.key)]);
        }
        let send = Send::new(7, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, end.key)]);
        let send = send.ud(pair.b.gid, qpns[1], datagram::QKEY, end.pdn);
        flood.end.qpn = qpns[0];
        changed(&flood.sent(pair, &send, Operation::Send), |_| {})
    };
    delays_nobody("datagrams", datagrams, Counter::DropNoReceive);
}

#[test]
fn a_flood_of_cnps_delays_no_other_guest() {
    let to_flooded = |flood: &Flood, psn: Psn| {
        let mut headers = cnp([4, 2], flood.to.qpn);
        headers.bth.psn = psn;
        Forged { headers, payload: Vec::new() }
    };
    let good: Packets<'_> = &|pair, flood| {
        let last = flood.read(pair).headers.bth.psn.plus(63);
        changed(&to_flooded(flood, last), |_| {})
    };
    let stray: Packets<'_> = &|pair, flood| {
        flood.read(pair);
        know_selective(&pair.b, flood.to.qpn);
        changed(&to_flooded(flood, Psn::new(0x80_0000)), |_| {})
    };
    delays_nobody("good", good, Counter::CnpHandled);
    delays_nobody("stray", stray, Counter::CnpStray);
}
