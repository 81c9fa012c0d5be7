// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The doorbell virtqueue: which rings have work that nobody looks at.

use abi::{
    virtio_rdma_doorbell, VIRTIO_RDMA_DOORBELL_RQ, VIRTIO_RDMA_DOORBELL_SQ,
    VIRTIO_RDMA_DOORBELL_SRQ, VIRTIO_RDMA_MAX_DOORBELLS,
};
use memory::prefetch;
use ring::Chain;
use zerocopy::FromBytes;

use crate::base::counters::Counter;
use crate::base::sync::lock;
use crate::device::Shared;
use crate::transport::requester::Visit;
use crate::transport::turn::{cost, Turn};

/// Doorbells of one buffer; a longer buffer is bad input, and what is behind them is ignored.
const MOST: usize = VIRTIO_RDMA_MAX_DOORBELLS as usize;
/// Doorbells that are copied at a time.
const PIECE: usize = 64;
const LEN: usize = size_of::<virtio_rdma_doorbell>();

impl Shared {
    /// Serves the doorbell queue.
    pub(crate) fn service_doorbells(&self, turn: &mut Turn) -> Visit {
        let mut queue = lock(&self.doorbells);
        let mut found = false;
        let visit = loop {
            if turn.is_over() {
                break Visit::More;
            }
            match queue.pop() {
                Ok(Some(chain)) => {
                    found = true;
                    self.ring_all(&chain, turn);
                    queue.give_back(chain.head, 0);
                }
                Ok(None) => break if found { Visit::Done } else { Visit::Empty },
                Err(error) => {
                    self.complain(Counter::BadDoorbellChain, &error);
                    self.set_needs_reset();
                    break Visit::Parked;
                }
            }
        };
        queue.signal_if_needed();
        visit
    }

    /// Rings the doorbell of an SRQ.
    fn ring_srq(&self, srqn: u32) {
        match self.srq_slot_of(srqn) {
            Some(slot) => self.hot.set(self.jobs.srq(slot)),
            None => self.complain(Counter::BadDoorbell, &"no SRQ has this number"),
        }
    }

    /// Rings every doorbell of a buffer.
    fn ring_all(&self, chain: &Chain, turn: &mut Turn) {
        let len = chain.readable_len();
        if len == 0 || len % LEN != 0 || len > MOST * LEN {
            self.complain(
                Counter::BadDoorbell,
                &format_args!("a buffer of {len} bytes does not hold doorbells"),
            );
        }
        let end = len.min(MOST * LEN);
        for at in (0..end.max(1)).step_by(PIECE * LEN) {
            turn.spend(0);
            turn.work(self.ring_piece(chain, at, end - at) * cost::DOORBELL);
        }
    }

    /// Rings the doorbells from byte `at` of a buffer on, of which `left` bytes are left: those that
    /// are copied at a time. The result is how many there were.
    fn ring_piece(&self, chain: &Chain, at: usize, left: usize) -> u64 {
        let mut bytes = [0; PIECE * LEN];
        let bytes = &mut bytes[..left.min(PIECE * LEN)];
        // The buffer was in memory when it was taken.
        let len = chain.read_at(at, bytes).unwrap_or(0);
        let bells = bytes[..len].chunks_exact(LEN);
        for bell in bells.filter_map(|bell| virtio_rdma_doorbell::read_from_bytes(bell).ok()) {
            self.stats.add(Counter::Doorbells, 1);
            if bell.queue == VIRTIO_RDMA_DOORBELL_SRQ {
                self.ring_srq(bell.number);
                continue;
            }
            let slot = self.slot_of(bell.number);
            match (slot, bell.queue) {
                (Some(slot), VIRTIO_RDMA_DOORBELL_SQ) => {
                    // It is visited soon; until then its cache lines can come.
                    if let Some(qp) = self.qps.get(slot) {
                        prefetch(&qp.requester);
                    }
                    self.hot.set(self.jobs.send(slot));
                }
                (Some(slot), VIRTIO_RDMA_DOORBELL_RQ) => self.hot.set(self.jobs.receive(slot)),
                (None, _) => self.complain(Counter::BadDoorbell, &"no QP has this number"),
                (_, _) => self.complain(Counter::BadDoorbell, &"a QP has no such ring"),
            }
        }
        (len / LEN) as u64
    }
}
