// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Asynchronous events.

use std::collections::{HashSet, VecDeque};

use abi::virtio_rdma_event;
use zerocopy::IntoBytes;

use crate::ring_queue::RingQueue;
use crate::stats::{Counter, Stats};

/// The event queue, and the events for which the driver has posted no buffer.
///
/// Each kind of event of one object waits once, so there are never more than
/// the objects of the device allow.
#[derive(Default)]
pub(crate) struct Events {
    /// The virtqueue.
    pub ring: RingQueue,
    waiting: VecDeque<(u32, u32)>,
    known: HashSet<(u32, u32)>,
}

impl Events {
    /// Raises an event (`enum virtio_rdma_event_type`) of an object.
    pub fn raise(&mut self, event: u32, handle: u32, name: &str, stats: &Stats) {
        stats.add(Counter::Events, 1);
        if self.known.insert((event, handle)) {
            self.waiting.push_back((event, handle));
        }
        self.deliver(name, stats);
    }

    /// Writes waiting events into the buffers that are there: as many as the ring holds, in case the
    /// driver goes on adding, which brings another kick.
    pub fn deliver(&mut self, name: &str, stats: &Stats) {
        for _ in 0..self.ring.size() {
            let Some(&(event, handle)) = self.waiting.front() else { break };
            let chain = match self.ring.pop() {
                Ok(Some(chain)) => chain,
                Ok(None) => break,
                Err(error) => {
                    stats.complain(name, Counter::BadEventBuffer, error);
                    break;
                }
            };
            let bytes = virtio_rdma_event { event, handle };
            let fits = chain.writable_len() >= bytes.as_bytes().len();
            let written = if fits { chain.write(bytes.as_bytes()).unwrap_or(0) } else { 0 };
            self.ring.give_back(chain.head, written);
            if written == 0 {
                stats.complain(name, Counter::BadEventBuffer, "an event buffer is too small");
                continue;
            }
            self.waiting.pop_front();
            self.known.remove(&(event, handle));
        }
        self.ring.signal_if_needed();
    }

    /// Forgets what waits.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.known.clear();
    }
}
