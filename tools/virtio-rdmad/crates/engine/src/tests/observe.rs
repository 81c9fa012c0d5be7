// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The observations of messages, at each point of their way.

use std::sync::{Arc, Mutex};

use abi::*;
use memory::Helpers;

use super::cable::{over_a_cable, Faults};
use super::datagram::{self, QKEY};
use super::driver::*;
use super::shared::pair_with;
use crate::{KeyError, Observation, Observer, RefusedAccess, Seen, CHUNK};

/// Keeps what it is told of one QP, or of all.
#[derive(Default)]
struct Diary {
    qpn: Option<u32>,
    seen: Mutex<Vec<Seen>>,
}

impl Observer for Diary {
    fn wants(&self, qpn: u32) -> bool {
        self.qpn.is_none_or(|own| own == qpn)
    }

    fn observe(&self, seen: Seen) {
        self.seen.lock().unwrap().push(seen);
    }
}

impl Diary {
    /// Begins to observe a guest.
    fn of(guest: &Guest, qpn: Option<u32>) -> Arc<Self> {
        let diary = Arc::new(Self { qpn, ..Self::default() });
        guest.device.set_observer(Some(diary.clone()));
        diary
    }

    /// Takes what was seen, with PSNs as distances from this one.
    fn take(&self, first: u32) -> Vec<(Option<u32>, Observation)> {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        seen.into_iter().map(|seen| (seen.psn.map(|psn| psn - first), seen.what)).collect()
    }
}

/// Two guests that are observed, and the PSNs that they begin with.
struct Observed {
    pair: Pair,
    diaries: [Arc<Diary>; 2],
}

impl Observed {
    fn new() -> Self {
        let pair = Pair::new();
        let diaries = [&pair.a, &pair.b].map(|guest| Diary::of(guest, None));
        Self { pair, diaries }
    }

    /// Makes guest A send, and returns the observations at both ends.
    fn send(&mut self, send: &Send) -> [Vec<(Option<u32>, Observation)>; 2] {
        let Self { pair, diaries } = self;
        let psn = psn(&pair.a, pair.ends[0].qpn);
        pair.a.post_send(pair.ends[0].qpn, send);
        settle_in_time(&[&pair.a, &pair.b]);
        [0, 1].map(|end| diaries[end].take(psn))
    }
}

fn psn(guest: &Guest, qpn: u32) -> u32 {
    let qps = guest.device.status().qps;
    qps.into_iter().find(|qp| qp.qpn == qpn).unwrap().connection.unwrap().sq_psn
}

fn completed(wr_id: u64, is_receive: bool, status: u32, length: u32) -> (Option<u32>, Observation) {
    (None, Observation::Completed { wr_id, is_receive, status, length })
}

fn packet(psn: u32, leaves: bool, opcode: &str, length: u64) -> (Option<u32>, Observation) {
    (Some(psn), Observation::Packet { leaves, opcode: opcode.to_owned(), length })
}

/// A SEND on the local path is posted, copied in chunks, and completed at both ends.
#[test]
fn a_send_is_seen_from_post_to_completion() {
    let mut observed = Observed::new();
    let [a, b] = observed.pair.ends;
    let length = CHUNK + 1000;
    let bytes = u32::try_from(length).unwrap();
    observed.pair.b.post_recv(b.qpn, 7, &[sge(DATA, bytes, b.key)]);
    let [at_a, at_b] =
        observed.send(&Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, bytes, a.key)]));
    let copied = [
        (Some(0), Observation::Copied { offset: 0, length: CHUNK }),
        (Some(bytes / 1024), Observation::Copied { offset: CHUNK, length: 1000 }),
    ];
    let posted = Observation::Posted { opcode: "SEND", wr_id: 5, length };
    let mut expected = vec![(Some(0), posted)];
    expected.extend(copied.clone());
    expected.push(completed(5, false, VIRTIO_RDMA_WC_SUCCESS, bytes));
    assert_eq!(at_a, expected);
    // The receive is completed before the chunk is told of.
    let [first, last] = copied;
    let received = completed(7, true, VIRTIO_RDMA_WC_SUCCESS, bytes);
    assert_eq!(at_b, [first, received, last]);
}

/// A WRITE by a wrong key is refused: the responder's end is told why, the requester's what the peer says.
fn a_refusal(on_the_wire: bool) {
    let mut observed = Observed::new();
    let [a, b] = observed.pair.ends;
    let write = Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
    let [at_a, at_b] = observed.send(&write.rdma(DATA, b.key ^ 1));
    let reason = "REMOTE_ACCESS_ERROR";
    let why = KeyError::Key;
    let refused = Some(RefusedAccess { key: b.key ^ 1, address: DATA, length: 8, why });
    assert!(at_b.contains(&(Some(0), Observation::Refused { reason, refused })), "{at_b:?}");
    assert!(at_a.contains(&(Some(0), Observation::Nak { reason })), "{at_a:?}");
    let status = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    assert_eq!(at_a.last(), Some(&completed(5, false, status, 0)));
    let packets = at_a.iter().filter(|(_, what)| matches!(what, Observation::Packet { .. }));
    assert_eq!(packets.count() != 0, on_the_wire);
}

#[test]
fn a_refusal_is_seen_with_its_reason() {
    a_refusal(false);
    with_rings(|| a_refusal(false));
    over_a_cable(1, Faults::default(), || a_refusal(true));
}

/// Each packet is seen where it leaves and where it comes in.
#[test]
fn packets_are_seen_at_both_ends() {
    over_a_cable(1, Faults::default(), || {
        let mut observed = Observed::new();
        let [a, b] = observed.pair.ends;
        observed.pair.b.post_recv(b.qpn, 7, &[sge(DATA, 2000, b.key)]);
        let [at_a, at_b] =
            observed.send(&Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 2000, a.key)]));
        let ends = |seen: &[(Option<u32>, Observation)]| {
            let packets = seen.iter().filter_map(|(psn, what)| match what {
                Observation::Packet { leaves, opcode, length } => {
                    let kind = opcode.split(' ').next().unwrap_or_default();
                    Some((psn.unwrap(), *leaves, kind.to_owned(), *length))
                }
                _ => None,
            });
            packets.collect::<Vec<_>>()
        };
        let of = |leaves: bool| {
            [
                (0, leaves, "Send".to_owned(), 1024),
                (1, leaves, "Send".to_owned(), 976),
                (1, !leaves, "Acknowledge".to_owned(), 0),
            ]
        };
        assert_eq!(ends(&at_a), of(true));
        assert_eq!(ends(&at_b), of(false));
        assert!(at_a.contains(&packet(0, true, "Send First", 1024)), "{at_a:?}");
        assert!(at_b.contains(&packet(1, false, "Send Last", 976)), "{at_b:?}");
    });
}

/// A requester whose peer has no receive tries again as often as its attributes say, and is seen to do so.
fn retries() {
    let mut observed = Observed::new();
    let [a, _] = observed.pair.ends;
    let [at_a, at_b] = observed.send(&Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
    let left = at_a.iter().filter_map(|(psn, what)| match what {
        Observation::Retried { reason: "no receive", left } => {
            assert_eq!(*psn, Some(0));
            *left
        }
        _ => None,
    });
    assert_eq!(left.collect::<Vec<_>>(), [2, 1, 0]);
    // Once at first, and once for each retry, however often the requester of the local path asks between them.
    let refused = (Some(0), Observation::Refused { reason: "RNR", refused: None });
    assert_eq!(at_b.iter().filter(|seen| **seen == refused).count(), 4, "{at_b:?}");
    let status = VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR;
    assert_eq!(at_a.last(), Some(&completed(5, false, status, 0)));
}

#[test]
fn retries_without_a_receive_are_seen() {
    without_upgrades();
    retries();
    over_a_cable(1, Faults::default(), retries);
}

/// A requester whose peer is gone is seen to try again.
fn retries_without_an_answer() {
    let mut observed = Observed::new();
    let [a, b] = observed.pair.ends;
    observed.pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    let [at_a, _] = observed.send(&Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
    let left = at_a.iter().filter_map(|(_, what)| match what {
        Observation::Retried { reason: "no answer", left } => *left,
        _ => None,
    });
    let left: Vec<_> = left.collect();
    assert!(left.ends_with(&[2, 1, 0]), "{left:?}");
}

#[test]
fn retries_without_an_answer_are_seen() {
    without_upgrades();
    retries_without_an_answer();
    over_a_cable(1, Faults::default(), retries_without_an_answer);
}

/// Only the QP that is wanted is seen, also if it is made later, and nothing when nobody observes any more.
#[test]
fn other_qps_are_not_seen() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let diary = Diary::of(&pair.a, Some(a.qpn + 1));
    let write = Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
    let write = write.rdma(DATA, b.key);
    pair.a.post_send(a.qpn, &write);
    settle_in_time(&[&pair.a, &pair.b]);
    assert_eq!(diary.take(0), []);
    let other = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
    assert_eq!(other, a.qpn + 1);
    let peer = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
    pair.a.connect(other, pair.b.gid, peer);
    pair.b.connect(peer, pair.a.gid, other);
    pair.a.post_send(other, &write);
    settle_in_time(&[&pair.a, &pair.b]);
    assert_eq!(diary.take(0).len(), 3);
    pair.a.device.set_observer(None);
    pair.a.post_send(other, &write);
    settle_in_time(&[&pair.a, &pair.b]);
    assert_eq!(diary.take(0), []);
}

/// A datagram is seen at both ends.
#[test]
fn datagrams_are_seen() {
    let test = |copies: bool| {
        let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, QKEY);
        let [a, b] = pair.ends;
        let diaries = [&pair.a, &pair.b].map(|guest| Diary::of(guest, None));
        pair.b.post_recv(b.qpn, 7, &[sge(DATA, 4096, b.key)]);
        let send = Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]);
        pair.a.post_send(a.qpn, &send.ud(pair.b.gid, b.qpn, QKEY, a.pdn));
        settle_in_time(&[&pair.a, &pair.b]);
        let [at_a, at_b] = diaries.map(|diary| diary.take(0));
        let copied = (None, Observation::Copied { offset: 0, length: 64 });
        assert_eq!(at_a.contains(&copied), copies, "{at_a:?}");
        assert!(at_b.contains(&copied), "{at_b:?}");
        assert_eq!(at_a.last(), Some(&completed(5, false, VIRTIO_RDMA_WC_SUCCESS, 64)));
        assert_eq!(at_b.last(), Some(&completed(7, true, VIRTIO_RDMA_WC_SUCCESS, 104)));
    };
    test(true);
    over_a_cable(1, Faults::default(), || test(false));
}

/// Keeps the frames that it is shown.
#[derive(Default)]
struct Frames(Mutex<Vec<(bool, Vec<u8>)>>);

impl Observer for Frames {
    fn wants(&self, _: u32) -> bool {
        true
    }

    fn wants_frames(&self, _: u32) -> bool {
        true
    }

    fn observe(&self, seen: Seen) {
        if let Observation::Frame { leaves, frame } = seen.what {
            self.0.lock().unwrap().push((leaves, frame));
        }
    }
}

/// A packet, as far as the tests look at it: whether it leaves, its opcode, PSN, AETH and payload.
type Shown = (bool, roce::Operation, roce::Position, u32, Option<roce::Syndrome>, Vec<u8>);

impl Frames {
    fn of(guest: &Guest) -> Arc<Self> {
        let frames = Arc::new(Self::default());
        guest.device.set_observer(Some(frames.clone()));
        frames
    }

    /// Takes the frames, each of which must be right, and name these guests.
    fn take(&self, own: u8, other: u8) -> Vec<Shown> {
        let frames = std::mem::take(&mut *self.0.lock().unwrap());
        let shown = frames.iter().map(|(leaves, frame)| {
            let packet = roce::decode(frame).unwrap();
            let headers = &packet.headers;
            let (from, to) = if *leaves { (own, other) } else { (other, own) };
            assert_eq!(headers.ip.source_gid(), gid(from));
            assert_eq!(headers.ip.destination_gid(), gid(to));
            let bth = headers.bth;
            let syndrome = headers.extended.aeth.map(|aeth| aeth.syndrome);
            let (operation, position) = (bth.opcode.operation(), bth.opcode.position());
            (*leaves, operation, position, bth.psn.get(), syndrome, packet.payload.to_vec())
        });
        shown.collect()
    }
}

/// Does the same on the local path and on the wire, and returns what the guests are shown.
fn frames_of(act: impl Fn(&mut Pair)) -> [Vec<Shown>; 2] {
    let run = || {
        let mut pair = Pair::new();
        let frames = [&pair.a, &pair.b].map(Frames::of);
        act(&mut pair);
        settle_in_time(&[&pair.a, &pair.b]);
        [frames[0].take(1, 2), frames[1].take(2, 1)]
    };
    let local = run();
    let mut wire = None;
    over_a_cable(1, Faults::default(), || wire = Some(run()));
    // The wire has more than one order, and one acknowledgement for several packets.
    let sorted = |mut frames: Vec<Shown>| {
        frames.sort_by_key(|(leaves, _, _, psn, syndrome, _)| (*leaves, *psn, syndrome.is_some()));
        frames
    };
    let (local, wire) = (local.map(sorted), wire.unwrap().map(sorted));
    assert_eq!(local, wire);
    local
}

/// Frames of the local path are those that the wire has for the same messages, at both ends.
#[test]
fn frames_of_both_paths_are_the_same() {
    let [at_a, at_b] = frames_of(|pair| {
        let [a, b] = pair.ends;
        pair.a.fill(DATA, 3000, 3);
        pair.b.fill(DATA + 8192, 3000, 5);
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, 3000, b.key)]);
        let data = [sge(DATA, 3000, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &data));
        settle_in_time(&[&pair.a, &pair.b]);
        let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &data);
        pair.a.post_send(a.qpn, &write.rdma(DATA + 4096, b.key));
        settle_in_time(&[&pair.a, &pair.b]);
        let read = Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &data).rdma(DATA + 8192, b.key);
        pair.a.post_send(a.qpn, &read);
        settle_in_time(&[&pair.a, &pair.b]);
        let word = [sge(DATA, 8, a.key)];
        let add = Send::new(4, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &word);
        pair.a.post_send(a.qpn, &add.atomic(DATA + 8192, b.key, 1, 0));
        settle_in_time(&[&pair.a, &pair.b]);
        // It is refused.
        pair.a.post_send(a.qpn, &Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &word).rdma(DATA, 1));
    });
    // 3 packets and an acknowledgement, twice; a request and 3 responses; a request and a response; and a NAK.
    assert_eq!(at_a.len(), 4 + 4 + 4 + 2 + 2);
    let flipped = |(leaves, operation, position, psn, syndrome, bytes): Shown| {
        (!leaves, operation, position, psn, syndrome, bytes)
    };
    let mut others: Vec<_> = at_b.into_iter().map(flipped).collect();
    others.sort_by_key(|(leaves, _, _, psn, syndrome, _)| (*leaves, *psn, syndrome.is_some()));
    assert_eq!(at_a, others);
    let nak = roce::Syndrome::Nak(roce::NakCode::RemoteAccessError);
    assert!(at_a.iter().any(|frame| frame.4 == Some(nak)));
}

/// Frames of a message whose copy is shared, in larger chunks, are those that it has otherwise, in the same order.
#[test]
fn frames_of_shared_copies_are_the_same() {
    let helpers = Arc::new(Helpers::new(|| {}));
    let run = || {
        let mut pair = pair_with(&helpers);
        let [a, b] = pair.ends;
        let frames = [&pair.a, &pair.b].map(Frames::of);
        let length = 8 * CHUNK as u32 + 4321;
        pair.a.fill(DATA, length as usize, 3);
        for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
            let send = Send::new(1, opcode, &[sge(DATA, length, a.key)]);
            pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
            settle_in_time(&[&pair.a, &pair.b]);
            assert_eq!(pair.poll_a().map(|cqe| cqe.status), Some(0));
        }
        [frames[0].take(1, 2), frames[1].take(2, 1)]
    };
    let alone = run();
    let _helper = helpers.join();
    assert!(run() == alone);
    assert!(alone.iter().all(|frames| frames.len() > 2 * 8 * CHUNK as usize / 1024));
}

/// A datagram of the local path is shown to both ends as the packet that it would be.
#[test]
fn datagrams_of_both_paths_are_the_same() {
    let run = || {
        let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, QKEY);
        let [a, b] = pair.ends;
        let frames = [&pair.a, &pair.b].map(Frames::of);
        pair.a.fill(DATA, 64, 3);
        pair.b.post_recv(b.qpn, 7, &[sge(DATA, 4096, b.key)]);
        let send = Send::new(5, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]);
        pair.a.post_send(a.qpn, &send.ud(pair.b.gid, b.qpn, QKEY, a.pdn));
        settle_in_time(&[&pair.a, &pair.b]);
        [frames[0].take(1, 2), frames[1].take(2, 1)]
    };
    let local = run();
    over_a_cable(1, Faults::default(), || assert_eq!(local, run()));
    assert_eq!([local[0].len(), local[1].len()], [1, 1]);
    assert_eq!(local[0][0].5.len(), 64);
}
