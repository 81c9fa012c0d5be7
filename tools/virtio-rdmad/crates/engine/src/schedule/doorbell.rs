// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The doorbell virtqueue: which rings have work that nobody looks at.

use abi::{
    virtio_rdma_doorbell, VIRTIO_RDMA_DOORBELL_RQ, VIRTIO_RDMA_DOORBELL_SQ,
    VIRTIO_RDMA_DOORBELL_SRQ, VIRTIO_RDMA_MAX_DOORBELLS,
};
use memory::prefetch;
use ring::Chain;
use zerocopy::FromBytes;

use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::visit::Visit;
use crate::queue::virtqueue::Virtqueue;
use crate::transport::hca::Hca;

/// Doorbells of one buffer; a longer buffer is bad input, and what is behind them is ignored.
const MOST: usize = VIRTIO_RDMA_MAX_DOORBELLS as usize;
/// Doorbells that are copied at a time.
const PIECE: usize = 64;
const LEN: usize = size_of::<virtio_rdma_doorbell>();

/// Visits the doorbell queue.
pub(super) fn visit(hca: &Hca, queue: &mut Virtqueue, budget: &mut Budget) -> Visit {
    let mut found = false;
    let visit = loop {
        if budget.is_over() {
            break Visit::More;
        }
        match queue.pop() {
            Ok(Some(chain)) => {
                found = true;
                ring_all(hca, &chain, budget);
                queue.give_back(chain.head, 0);
            }
            Ok(None) => break if found { Visit::Done } else { Visit::Empty },
            Err(error) => {
                hca.stats.guest_error(Counter::BadDoorbellChain, error);
                hca.set_needs_reset();
                break Visit::Parked;
            }
        }
    };
    queue.signal_if_needed();
    visit
}

/// Rings the doorbell of an SRQ.
fn ring_srq(hca: &Hca, srqn: u32) {
    match hca.srq_slot_of(srqn) {
        Some(slot) => hca.ready.set(hca.jobs.srq(slot)),
        None => hca.stats.guest_error(Counter::BadDoorbell, "no SRQ has this number"),
    }
}

/// Rings every doorbell of a buffer.
fn ring_all(hca: &Hca, chain: &Chain, budget: &mut Budget) {
    let len = chain.readable_len();
    if len == 0 || len % LEN != 0 || len > MOST * LEN {
        hca.stats.guest_error(
            Counter::BadDoorbell,
            format_args!("a buffer of {len} bytes does not hold doorbells"),
        );
    }
    let end = len.min(MOST * LEN);
    for at in (0..end.max(1)).step_by(PIECE * LEN) {
        budget.spend(0);
        budget.work(ring_piece(hca, chain, at, end - at) * cost::DOORBELL);
    }
}

/// Rings the doorbells from byte `at` of a buffer on, of which `left` bytes are left: those that
/// are copied at a time. Returns how many they were.
fn ring_piece(hca: &Hca, chain: &Chain, at: usize, left: usize) -> u64 {
    let mut bytes = [0; PIECE * LEN];
    let bytes = &mut bytes[..left.min(PIECE * LEN)];
    // The buffer was in memory when it was taken.
    let len = chain.read_at(at, bytes).unwrap_or(0);
    let bells = bytes[..len].chunks_exact(LEN);
    for bell in bells.filter_map(|bell| virtio_rdma_doorbell::read_from_bytes(bell).ok()) {
        hca.stats.add(Counter::Doorbells, 1);
        if bell.queue == VIRTIO_RDMA_DOORBELL_SRQ {
            ring_srq(hca, bell.number);
            continue;
        }
        let slot = hca.slot_of(bell.number);
        match (slot, bell.queue) {
            (Some(slot), VIRTIO_RDMA_DOORBELL_SQ) => {
                // It is visited soon; until then its cache lines can come.
                if let Some(qp) = hca.qps.get(slot) {
                    prefetch(&qp.requester);
                }
                hca.ready.set(hca.jobs.send(slot));
            }
            (Some(slot), VIRTIO_RDMA_DOORBELL_RQ) => hca.ready.set(hca.jobs.receive(slot)),
            (None, _) => hca.stats.guest_error(Counter::BadDoorbell, "no QP has this number"),
            (_, _) => hca.stats.guest_error(Counter::BadDoorbell, "a QP has no such ring"),
        }
    }
    (len / LEN) as u64
}
