// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The doorbell virtqueue: which rings have work that nobody looks at.

use abi::{
    virtio_rdma_doorbell, VIRTIO_RDMA_DOORBELL_RQ, VIRTIO_RDMA_DOORBELL_SQ,
    VIRTIO_RDMA_DOORBELL_SRQ,
};
use memory::prefetch;
use ring::Chain;
use zerocopy::FromBytes;

use crate::device::Shared;
use crate::requester::Visit;
use crate::stats::Counter;
use crate::sync::lock;
use crate::turn::Turn;

/// Doorbells of one buffer that are looked at; a longer buffer is bad input.
const MOST: usize = 64;
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
                    turn.spend(0);
                    self.ring_all(&chain);
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
    fn ring_all(&self, chain: &Chain) {
        let mut bytes = [0; MOST * LEN];
        let len = chain.read(&mut bytes).unwrap_or(0);
        if len == 0 || len % LEN != 0 || chain.readable_len() > bytes.len() {
            self.complain(Counter::BadDoorbell, &"a buffer that does not hold doorbells");
        }
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
    }
}
