// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Asynchronous events, and completion events.

use std::collections::{HashSet, VecDeque};

use abi::{virtio_rdma_comp_event, virtio_rdma_event};
use zerocopy::IntoBytes;

use super::virtqueue::Virtqueue;
use crate::base::budget::{cost, Budget};
use crate::base::counters::{Counter, Stats};
use crate::base::image::{require, Wrong};
use crate::base::visit::Visit;

/// An event as the driver's buffer holds it; all are of 8 bytes.
pub(crate) type Event = [u32; 2];

const _: () = assert!(size_of::<Event>() == size_of::<virtio_rdma_event>());
const _: () = assert!(size_of::<Event>() == size_of::<virtio_rdma_comp_event>());

/// Returns a `virtio_rdma_event`: an `enum virtio_rdma_event_type` and its object.
pub(crate) fn asynchronous(event: u32, handle: u32) -> Event {
    [event, handle]
}

/// Returns a `virtio_rdma_comp_event`.
pub(crate) fn completion(cqn: u32) -> Event {
    [cqn, 0]
}

/// Most events that are written at a time.
const MOST: u32 = 64;

/// A virtqueue of events, and the events for which the driver has posted no
/// buffer.
///
/// Each kind of event of one object waits once, so there are never more than
/// the objects of the device allow.
#[derive(Default)]
pub(crate) struct Events {
    /// The virtqueue.
    pub queue: Virtqueue,
    waiting: VecDeque<Event>,
    known: HashSet<Event>,
}

impl Events {
    /// Returns the events that wait for buffers.
    pub fn save(&self) -> Vec<Event> {
        self.waiting.iter().copied().collect()
    }

    /// Takes over events that wait for buffers, `most` at most.
    pub fn load(&mut self, waiting: Vec<Event>, most: usize) -> Result<(), Wrong> {
        require(waiting.len() <= most, "too many events wait")?;
        self.known = waiting.iter().copied().collect();
        require(self.known.len() == waiting.len(), "an event waits twice")?;
        self.waiting = waiting.into();
        Ok(())
    }

    /// Raises an event, which waits to be delivered.
    pub fn raise(&mut self, event: Event) {
        if self.known.insert(event) {
            self.waiting.push_back(event);
        }
    }

    /// Takes an event back, if it waits to be delivered.
    pub fn withdraw(&mut self, event: Event) {
        if self.known.remove(&event) {
            self.waiting.retain(|waiting| *waiting != event);
        }
    }

    /// Writes waiting events into the buffers that are there, [`MOST`] at a time; how many buffers it
    /// took. Where it took them all, there may be more.
    pub fn deliver(&mut self, stats: &Stats) -> u32 {
        let mut taken = 0;
        while taken < MOST {
            let Some(&event) = self.waiting.front() else { break };
            let chain = match self.queue.pop() {
                Ok(Some(chain)) => chain,
                Ok(None) => break,
                Err(error) => {
                    stats.guest_error(Counter::BadEventBuffer, error);
                    break;
                }
            };
            taken += 1;
            let bytes = event.as_bytes();
            let fits = chain.writable_len() >= bytes.len();
            let written = if fits { chain.write(bytes).unwrap_or(0) } else { 0 };
            self.queue.give_back(chain.head, written);
            if written == 0 {
                stats.guest_error(Counter::BadEventBuffer, "an event buffer is too small");
                continue;
            }
            self.waiting.pop_front();
            self.known.remove(&event);
        }
        self.queue.signal_if_needed();
        taken
    }

    /// Visits the queue: delivers events, as [`Self::deliver`].
    pub fn visit(&mut self, stats: &Stats, budget: &mut Budget) -> Visit {
        let taken = self.deliver(stats);
        budget.work(u64::from(taken) * cost::EVENT);
        if taken == MOST {
            Visit::More
        } else {
            Visit::Parked
        }
    }
}
