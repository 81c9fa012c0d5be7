// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What rings in memory show of their owner.
//!
//! The device writes CQEs and looks at producers only while it works, in the thread of the observer. So at a look
//! before it works, the CQEs that the observer has counted are all that there are, and what the owner writes is judged
//! by them.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use abi::*;
use memory::GuestMemory;
use testkit::{CQE, CQ_HEAD};
use zerocopy::FromZeros;
use zerocopy::IntoBytes;

use super::entries;
use super::notes::Notes;
use super::objects::{Cq, Objects, Region, Ring};

/// The most entries of a ring that are looked at at a time.
const ENTRIES: u32 = 64;

/// What a look at a ring is told of it.
struct Place<'a> {
    memory: &'a GuestMemory,
    region: &'a Region,
    name: String,
    /// The type of the QP; `None` for an SRQ.
    kind: Option<u32>,
    /// Whether it is a receive ring, or that of an SRQ.
    is_receive: bool,
    /// The clause by which nothing may be posted now, if nothing may.
    closed: Option<&'static str>,
}

/// Returns how far an index is behind another one.
fn ahead(index: u32, of: u32) -> u32 {
    index.wrapping_sub(of)
}

/// Counts the CQEs that the device has written, and notes which work requests are complete.
pub fn count_cqes(memory: &GuestMemory, objects: &mut Objects) {
    let Objects { qps, cqs, .. } = objects;
    for (cqn, cq) in cqs {
        for _ in 0..cq.depth {
            let Some(cqe) = next_cqe(memory, cq) else { break };
            let Some(qp) = qps.get_mut(&cqe.qp_num) else { continue };
            let queue = usize::from(cqe.opcode & 0x80 != 0);
            let Some(ring) = qp.rings[queue].as_mut().filter(|_| qp.cqns[queue] == *cqn) else {
                continue;
            };
            let done = cqe.wqe_index.wrapping_add(1);
            let is_next = ring.completed.is_none_or(|before| {
                (1..=ring.shape.depth.max(ENTRIES)).contains(&ahead(done, before))
            });
            // A CQE that the owner has spoilt says nothing.
            ring.completed = if is_next { Some(done) } else { None };
        }
        if let Some(produced) = lost_sight(memory, cq) {
            cq.produced = produced;
            let of_cq = qps.values_mut().filter(|qp| qp.cqns.contains(cqn));
            of_cq.flat_map(|qp| qp.rings.iter_mut().flatten()).for_each(|it| it.completed = None);
        }
    }
}

fn place_of(cq: &Cq, index: u32) -> u64 {
    CQ_HEAD + u64::from(index % cq.depth) * CQE
}

fn lap(memory: &GuestMemory, cq: &Cq, index: u32) -> Option<u32> {
    let at = place_of(cq, index) + offset_of!(virtio_rdma_ring_cqe, lap) as u64;
    cq.region.word(memory, at)
}

fn next_cqe(memory: &GuestMemory, cq: &mut Cq) -> Option<virtio_rdma_ring_cqe> {
    let index = cq.produced;
    if lap(memory, cq, index)? != (index / cq.depth).wrapping_add(1) {
        return None;
    }
    let mut cqe = virtio_rdma_ring_cqe::new_zeroed();
    cq.region.read(memory, place_of(cq, index), cqe.as_mut_bytes())?;
    cq.produced = index.wrapping_add(1);
    Some(cqe)
}

/// Returns how many CQEs there are, if the device has written over some before they were counted.
fn lost_sight(memory: &GuestMemory, cq: &Cq) -> Option<u32> {
    let now = (cq.produced / cq.depth).wrapping_add(1);
    if lap(memory, cq, cq.produced)? != now.wrapping_add(1) {
        return None;
    }
    let first = now.wrapping_mul(cq.depth);
    let newer = (0..cq.depth).rev().find(|at| lap(memory, cq, *at) == Some(now.wrapping_add(1)))?;
    Some(first.wrapping_add(newer).wrapping_add(1))
}

/// Looks at all rings before the device works.
pub fn look_before(
    notes: &mut Notes,
    memory: &GuestMemory,
    objects: &mut Objects,
    has_early_receives: bool,
    patience: Duration,
) {
    count_cqes(memory, objects);
    objects.cqs.iter_mut().for_each(|(cqn, cq)| look_at_cq(notes, memory, *cqn, cq));
    let numbers: Vec<u32> = objects.qps.keys().copied().collect();
    for qpn in numbers {
        look_at_qp(notes, memory, objects, qpn, has_early_receives, patience);
    }
    for (srqn, srq) in &mut objects.srqs {
        let at = offset_of!(virtio_rdma_srq_ring, consumer) as u64;
        let name = format!("ring of SRQ {srqn}");
        let place =
            Place { memory, region: &srq.region, name, kind: None, is_receive: true, closed: None };
        srq.ring.completed = srq.region.word(memory, at);
        look_at_ring(notes, &place, &mut srq.ring, patience);
    }
}

/// Looks at the rings of a QP.
pub fn look_at_qp(
    notes: &mut Notes,
    memory: &GuestMemory,
    objects: &mut Objects,
    qpn: u32,
    has_early_receives: bool,
    patience: Duration,
) {
    let Some(qp) = objects.qps.get_mut(&qpn) else { return };
    let (state, region) = (qp.state, &qp.region);
    for (queue, ring) in qp.rings.iter_mut().enumerate() {
        let Some(ring) = ring else { continue };
        let is_receive = queue == 1;
        let closed = match state {
            VIRTIO_RDMA_QPS_RESET if is_receive => (!has_early_receives).then_some("V-QP-02"),
            _ if is_receive => None,
            VIRTIO_RDMA_QPS_RESET | VIRTIO_RDMA_QPS_INIT | VIRTIO_RDMA_QPS_RTR => Some("V-QP-01"),
            _ => None,
        };
        let name = format!("{} ring of QP {qpn}", if is_receive { "receive" } else { "send" });
        let kind = Some(qp.kind);
        let place = Place { memory, region, name, kind, is_receive, closed };
        look_at_ring(notes, &place, ring, patience);
    }
}

fn look_at_cq(notes: &mut Notes, memory: &GuestMemory, cqn: u32, cq: &mut Cq) {
    let at = offset_of!(virtio_rdma_cq_ring, consumer) as u64;
    let Some(consumer) = cq.region.word(memory, at) else { return };
    if consumer == cq.consumer {
        return;
    }
    notes.step(format!("polling CQ {cqn}"));
    let (before, held) = (cq.consumer, ahead(cq.produced, cq.consumer));
    notes.judge("V-CQ-02", ahead(consumer, before) <= held, || {
        let expected =
            format!("from {before}, where it was, to {}, the number of CQEs", cq.produced);
        ["consumer of a CQ".into(), expected, consumer.to_string()]
    });
    cq.consumer = consumer;
}

fn look_at_ring(notes: &mut Notes, place: &Place<'_>, ring: &mut Ring, patience: Duration) {
    expect_doorbell(notes, place, ring);
    let Some(producer) = place.region.word(place.memory, ring.producer) else { return };
    if ring.is_to_restart {
        return look_at_restart(notes, place, ring, producer);
    }
    if producer == ring.seen {
        return;
    }
    notes.step(format!("posting to the {}", place.name));
    if judge_move(notes, ring, producer, place.kind.is_none()) {
        if let Some(clause) = place.closed {
            let expected = "no work request in this state of the QP";
            notes.fail(clause, "producer of a ring", expected, &producer.to_string());
        } else if place.kind.is_some() {
            notes.pass(if place.is_receive { "V-QP-02" } else { "V-QP-01" });
        }
        judge_entries(notes, place, ring, producer);
        if ring.asleep.is_some_and(|asleep| asleep != producer) {
            ring.due.get_or_insert_with(|| Instant::now() + patience);
        }
    }
    ring.seen = producer;
}

/// Looks at a ring whose owner is to write 0 to the producer.
fn look_at_restart(notes: &mut Notes, place: &Place<'_>, ring: &mut Ring, producer: u32) {
    if producer == 0 {
        if ring.seen != 0 {
            notes.pass("V-RING-42");
        }
        (ring.is_to_restart, ring.seen, ring.completed) = (false, 0, Some(0));
    } else if producer != ring.seen {
        notes.step(format!("RESET, and the {}", place.name));
        let expected = format!("{}, as it was at MODIFY_QP, or 0", ring.seen);
        notes.fail("V-RING-42", "producer of a ring", &expected, &producer.to_string());
        ring.seen = producer;
    }
}

/// Judges how a producer has moved. Returns whether it did not jump.
fn judge_move(notes: &mut Notes, ring: &mut Ring, producer: u32, is_srq: bool) -> bool {
    let Some(completed) = ring.completed else { return true };
    let (outstanding, before) = (ahead(producer, completed), ahead(ring.seen, completed));
    let depth = ring.shape.depth;
    let most = if is_srq { u32::MAX } else { depth };
    let moves_on = before > depth || outstanding >= before;
    let holds = outstanding <= most && moves_on;
    let clause = if std::mem::take(&mut ring.is_resumed) { "V-SRQ-11" } else { "V-RING-40" };
    notes.judge(clause, holds, || {
        let from = if before > depth { completed } else { ring.seen };
        let to = completed.wrapping_add(depth);
        let expected = format!("from {from}, where it was, to {to}, where the ring is full");
        ["producer of a ring".into(), expected, producer.to_string()]
    });
    if !holds {
        ring.completed = None;
        return false;
    }
    let (clause, most) = if is_srq { ("V-SRQ-05", depth) } else { ("V-WQE-05", ring.most) };
    notes.judge(clause, outstanding <= most, || {
        let expected = format!("at most {most}, because {completed} are complete");
        ["work requests that are outstanding".into(), expected, outstanding.to_string()]
    });
    outstanding <= most
}

/// Judges the entries that were posted since the last look and that are outstanding.
fn judge_entries(notes: &mut Notes, place: &Place<'_>, ring: &Ring, producer: u32) {
    let Some(completed) = ring.completed else { return };
    let new = ahead(producer, ring.seen).min(ahead(producer, completed));
    let stride = ring.shape.stride;
    for back in (1..=new.min(ENTRIES)).rev() {
        let index = producer.wrapping_sub(back);
        let at =
            u64::from(ring.shape.offset) + u64::from(index % ring.shape.depth) * u64::from(stride);
        let mut entry = vec![0; entries::looked_at(stride)];
        if place.region.read(place.memory, at, &mut entry).is_none() {
            return;
        }
        notes.step(format!("entry {index} of the {}", place.name));
        match place.kind.filter(|_| !place.is_receive) {
            Some(kind) => entries::judge_send(notes, place.memory, kind, stride, &entry),
            None => entries::judge_receive(notes, stride, &entry),
        }
    }
}

/// Judges that a doorbell has come in time.
fn expect_doorbell(notes: &mut Notes, place: &Place<'_>, ring: &mut Ring) {
    if ring.due.is_some_and(|due| due <= Instant::now()) {
        notes.step(format!("posting to the {}", place.name));
        let what = format!("doorbell for the {}", place.name);
        let got = format!("none, and the producer is {}", ring.seen);
        notes.fail("V-RING-50", &what, "one, because the wake word was not 0", &got);
        ring.due = None;
    }
}

/// Looks at the wake words after the device has worked.
pub fn look_after(memory: &GuestMemory, objects: &mut Objects) {
    let of_qps = objects.qps.values_mut().flat_map(|qp| {
        let region = &qp.region;
        qp.rings.iter_mut().flatten().map(move |ring| (region, ring))
    });
    let of_srqs = objects.srqs.values_mut().map(|srq| (&srq.region, &mut srq.ring));
    for (region, ring) in of_qps.chain(of_srqs) {
        let is_asleep = region.word(memory, ring.wake).is_some_and(|wake| wake != 0);
        ring.asleep = if is_asleep { region.word(memory, ring.producer) } else { None };
    }
}

/// Notes that a doorbell has come for a ring.
pub fn note_doorbell(notes: &mut Notes, ring: &mut Ring) {
    ring.asleep = None;
    if ring.due.take().is_some() {
        notes.pass("V-RING-50");
    }
}
