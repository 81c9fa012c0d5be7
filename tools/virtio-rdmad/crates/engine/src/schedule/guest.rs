// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All that one guest has, as the thread sees it that serves the guest.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use memory::GuestMemory;

use super::doorbell;
use crate::base::queues::{Numbering, Queue};
use crate::base::sync::{lock, write};
use crate::base::visit::Visit;
use crate::control::queue::Control;
use crate::queue::virtqueue::Virtqueue;
use crate::queue::wq_ring::Watch;
use crate::transport::failure::fail_users_of_cq;
use crate::transport::hca::Hca;
use crate::transport::round::Round;
use crate::transport::wire::inbox;
use crate::transport::{receive_queue, requester, srq};

/// One guest: its HCA, which peers reach, and the queues that only its own thread uses.
pub(crate) struct Guest {
    /// The HCA.
    pub hca: Arc<Hca>,
    /// The control queue, and the objects that only its commands change.
    pub control: Mutex<Control>,
    /// The doorbell virtqueue.
    pub doorbells: Mutex<Virtqueue>,
}

impl Guest {
    /// Returns a guest with this HCA, and no object.
    pub fn new(hca: Arc<Hca>) -> Self {
        let control = Mutex::new(Control::new(&hca));
        Self { hca, control, doorbells: Mutex::new(Virtqueue::default()) }
    }

    /// Returns the numbering of virtqueues that was agreed on.
    pub fn numbering(&self) -> Numbering {
        Numbering::new(&self.hca.limits, self.hca.features.has_rings())
    }

    /// Gives the guest other memory. The objects of the guest follow one by one.
    pub fn give_memory(&self, control: &mut Control, memory: &GuestMemory) {
        control.objects.memory = memory.clone();
        write(&self.hca.keys).set_memory(memory);
    }

    /// Visits a queue, and does its work until the budget is exhausted.
    pub fn visit(&self, queue: Queue, round: &mut Round) -> Visit {
        let hca = &self.hca;
        let parked_unless = |more| if more { Visit::More } else { Visit::Parked };
        match queue {
            Queue::Control => lock(&self.control).visit(hca, &mut round.budget),
            Queue::Completion(cq) => {
                let more = fail_users_of_cq(hca, cq, &mut round.budget);
                // CQEs that came right before the guest was frozen may be unannounced.
                hca.announce(cq);
                hca.release_event(cq);
                parked_unless(more)
            }
            Queue::Send(slot) => requester::visit(hca, slot, round),
            Queue::Receive(slot) => parked_unless(receive_queue::visit(hca, slot, round)),
            Queue::Srq(slot) => parked_unless(srq::visit(hca, slot, &mut round.budget)),
            Queue::Event => {
                hca.follow_port();
                lock(&hca.events).visit(&hca.stats, &mut round.budget)
            }
            Queue::CompletionEvents(vector) => {
                match hca.completion_events.get(usize::from(vector)) {
                    Some(events) => lock(events).visit(&hca.stats, &mut round.budget),
                    None => Visit::Parked,
                }
            }
            Queue::Wire => parked_unless(inbox::visit(hca, round)),
            Queue::Doorbell => doorbell::visit(hca, &mut lock(&self.doorbells), &mut round.budget),
        }
    }

    /// Notes that the thread stood still for this long while it visited a queue. That may be for the memory of the
    /// guest, or for that of the peer of a QP.
    #[cold]
    pub fn stalled(&self, queue: Queue, time: Duration) {
        let peer = match queue {
            Queue::Send(slot) => {
                let qp = self.hca.qps.get(slot);
                qp.and_then(|qp| lock(&qp.requester).peer.as_ref().map(|peer| peer.device.clone()))
            }
            _ => None,
        };
        let peer = peer.filter(|peer| !Arc::ptr_eq(peer, &self.hca));
        self.hca.stats.stalled(time, peer.as_ref().map(|peer| &peer.stats));
    }

    /// Calls `f` with the virtqueue of a queue; `None` if the queue is no virtqueue.
    pub fn with_virtqueue<R>(
        &self,
        queue: Queue,
        f: impl FnOnce(&mut Virtqueue) -> R,
    ) -> Option<R> {
        let hca = &self.hca;
        Some(match queue {
            Queue::Control => f(&mut lock(&self.control).queue),
            Queue::Completion(cq) => f(lock(hca.cqs.take(cq)).virtqueue()?),
            Queue::Send(slot) => f(lock(&hca.qps.take(slot).requester).queue.virtqueue()?),
            Queue::Receive(slot) => f(lock(&hca.qps.take(slot).responder).queue.virtqueue()?),
            Queue::Event => f(&mut lock(&hca.events).queue),
            Queue::CompletionEvents(vector) => {
                f(&mut lock(hca.completion_events.get(usize::from(vector))?).queue)
            }
            Queue::Doorbell => f(&mut lock(&self.doorbells)),
            Queue::Srq(_) | Queue::Wire => return None,
        })
    }

    /// Asks to be told of the next work in a queue that is busy-polled; whether
    /// there is some already.
    pub fn enable_notify(&self, queue: Queue) -> bool {
        match queue {
            Queue::Send(slot) => {
                let Some(qp) = self.hca.qps.get(slot) else { return false };
                lock(&qp.requester).queue.enable_notify()
            }
            queue => self.with_virtqueue(queue, Virtqueue::enable_notify).unwrap_or(false),
        }
    }

    /// Asks not to be told, as the queue is busy-polled.
    pub fn disable_notify(&self, queue: Queue) {
        match queue {
            Queue::Send(slot) => {
                if let Some(qp) = self.hca.qps.get(slot) {
                    lock(&qp.requester).queue.disable_notify();
                }
            }
            queue => {
                self.with_virtqueue(queue, Virtqueue::disable_notify);
            }
        }
    }

    /// Returns a watch of a send ring; `None` of any other queue.
    pub fn watch(&self, queue: Queue) -> Option<Watch> {
        let Queue::Send(slot) = queue else { return None };
        lock(&self.hca.qps.get(slot)?.requester).queue.watch()
    }
}
