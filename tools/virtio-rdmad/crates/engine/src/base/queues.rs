// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The queues that a device looks after, and how they are numbered.

use super::limits::Limits;
use super::slot::Slot;

/// A queue that the device visits: a virtqueue or, with rings, a queue in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Control.
    Control,
    /// Asynchronous events.
    Event,
    /// Doorbells of rings.
    Doorbell,
    /// Frames that came over the wire, which are in no queue of the guest.
    Wire,
    /// Completion events of this vector.
    CompletionEvents(u16),
    /// The CQ of this number.
    Completion(u16),
    /// Send queue of the QP in this place.
    Send(Slot),
    /// Receive queue of the QP in this place.
    Receive(Slot),
    /// The SRQ in this place.
    Srq(Slot),
}

/// The numbering of virtqueues, which depends on the features agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbering {
    /// Control, N completion, M pairs, event (specification, Virtqueues for work: Virtqueues).
    Virtqueues {
        /// N.
        cqs: u16,
        /// M.
        qps: u16,
    },
    /// Control, V completion events, doorbells, event (specification, Rings: Virtqueues).
    Rings {
        /// V.
        vectors: u16,
    },
}

/// The data paths that a driver is offered: what its work and completion queues may be. It has one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Rings in guest memory (VIRTIO_RDMA_F_RINGS).
    pub rings: bool,
    /// Virtqueues (VIRTIO_RDMA_F_VIRTQUEUES).
    pub virtqueues: bool,
}

impl Paths {
    /// Both data paths.
    pub const ALL: Self = Self { rings: true, virtqueues: true };
}

impl Limits {
    /// Returns how many virtqueues a device with these limits has, whichever of these data paths the driver agrees on.
    pub fn queue_count(&self, paths: Paths) -> u16 {
        Numbering::of(self, paths).map(Numbering::count).max().unwrap_or(0)
    }
}

impl Numbering {
    /// Returns the numbering for these limits.
    pub fn new(limits: &Limits, rings: bool) -> Self {
        if rings {
            Self::Rings { vectors: limits.comp_vectors }
        } else {
            Self::Virtqueues { cqs: limits.max_cq, qps: limits.max_qp }
        }
    }

    /// Returns the numberings that a driver may agree on, with these limits.
    pub fn of(limits: &Limits, paths: Paths) -> impl Iterator<Item = Self> + use<'_> {
        let numberings = [(paths.virtqueues, false), (paths.rings, true)];
        let offered = numberings.into_iter().filter(|(is_offered, _)| *is_offered);
        offered.map(|(_, rings)| Self::new(limits, rings))
    }

    /// Returns how many virtqueues there are.
    pub fn count(self) -> u16 {
        match self {
            Self::Virtqueues { cqs, qps } => 2 + cqs + 2 * qps,
            Self::Rings { vectors } => 3 + vectors,
        }
    }

    /// Returns the queue behind the virtqueue of this index.
    pub fn queue(self, index: u16) -> Option<Queue> {
        if index == 0 {
            return Some(Queue::Control);
        }
        if index >= self.count() {
            return None;
        }
        if index == self.count() - 1 {
            return Some(Queue::Event);
        }
        Some(match self {
            Self::Virtqueues { cqs, .. } if index <= cqs => Queue::Completion(index - 1),
            Self::Virtqueues { cqs, .. } => {
                let pair = index - 1 - cqs;
                if pair % 2 == 0 {
                    Queue::Send(Slot::from(pair / 2))
                } else {
                    Queue::Receive(Slot::from(pair / 2))
                }
            }
            Self::Rings { vectors } if index <= vectors => Queue::CompletionEvents(index - 1),
            Self::Rings { .. } => Queue::Doorbell,
        })
    }
}

/// A number for each [`Queue`], the same in both numberings.
#[derive(Clone, Copy)]
pub(crate) struct Jobs {
    vectors: u16,
    cqs: u16,
    qps: u16,
    srqs: u16,
}

impl Jobs {
    /// Returns the numbering for these limits.
    pub fn new(limits: &Limits) -> Self {
        Self {
            vectors: limits.comp_vectors,
            cqs: limits.max_cq.max(limits.ring_cq),
            qps: limits.max_qp.max(limits.ring_qp),
            srqs: limits.max_srq,
        }
    }

    /// Returns how many numbers there are.
    pub fn count(self) -> u16 {
        self.srq(self.srqs.into())
    }

    /// The frames that came over the wire.
    pub const WIRE: u16 = 3;

    /// Returns the CQ of this number.
    pub fn completion(self, cq: u16) -> u16 {
        4 + self.vectors + cq
    }

    /// Returns the send queue of the QP in a place.
    pub fn send(self, slot: Slot) -> u16 {
        self.completion(self.cqs) + 2 * u16::from(slot)
    }

    /// Returns the receive queue of the QP in a place.
    pub fn receive(self, slot: Slot) -> u16 {
        self.send(slot) + 1
    }

    /// Returns the SRQ in a place.
    pub fn srq(self, slot: Slot) -> u16 {
        self.send(self.qps.into()) + u16::from(slot)
    }

    /// Returns the number of a queue.
    pub fn number(self, queue: Queue) -> u16 {
        match queue {
            Queue::Control => 0,
            Queue::Event => 1,
            Queue::Doorbell => 2,
            Queue::Wire => Self::WIRE,
            Queue::CompletionEvents(vector) => 4 + vector,
            Queue::Completion(cq) => self.completion(cq),
            Queue::Send(slot) => self.send(slot),
            Queue::Receive(slot) => self.receive(slot),
            Queue::Srq(slot) => self.srq(slot),
        }
    }

    /// Returns the queue of a number.
    pub fn queue(self, number: u16) -> Option<Queue> {
        Some(match number {
            0 => Queue::Control,
            1 => Queue::Event,
            2 => Queue::Doorbell,
            Self::WIRE => Queue::Wire,
            _ if number < self.completion(0) => Queue::CompletionEvents(number - 4),
            _ if number < self.send(Slot::from(0)) => {
                Queue::Completion(number - self.completion(0))
            }
            _ if number >= self.count() => return None,
            _ if number >= self.srq(Slot::from(0)) => {
                Queue::Srq(Slot::from(number - self.srq(Slot::from(0))))
            }
            _ => {
                let pair = number - self.send(Slot::from(0));
                if pair % 2 == 0 {
                    Queue::Send(Slot::from(pair / 2))
                } else {
                    Queue::Receive(Slot::from(pair / 2))
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::limits::MAX_VECTORS;

    fn queues(numbering: Numbering) -> Vec<Queue> {
        assert_eq!(numbering.queue(numbering.count()), None);
        (0..numbering.count()).map(|i| numbering.queue(i).unwrap()).collect()
    }

    #[test]
    fn numberings_name_each_queue_once() {
        assert_eq!(
            queues(Numbering::Virtqueues { cqs: 3, qps: 2 }),
            [
                Queue::Control,
                Queue::Completion(0),
                Queue::Completion(1),
                Queue::Completion(2),
                Queue::Send(Slot::from(0)),
                Queue::Receive(Slot::from(0)),
                Queue::Send(Slot::from(1)),
                Queue::Receive(Slot::from(1)),
                Queue::Event
            ]
        );
        assert_eq!(
            queues(Numbering::Rings { vectors: 2 }),
            [
                Queue::Control,
                Queue::CompletionEvents(0),
                Queue::CompletionEvents(1),
                Queue::Doorbell,
                Queue::Event
            ]
        );
    }

    #[test]
    fn every_queue_has_a_number_of_its_own() {
        let limits = Limits { comp_vectors: MAX_VECTORS, ..Limits::default() };
        let jobs = Jobs::new(&limits);
        for number in 0..jobs.count() {
            assert_eq!(jobs.number(jobs.queue(number).unwrap()), number);
        }
        assert_eq!(jobs.queue(jobs.count()), None);
        assert_eq!(jobs.queue(jobs.count() - 1), Some(Queue::Srq(Slot::from(8191))));
    }

    #[test]
    fn limits_fit_the_transports() {
        for (limits, queues) in [(Limits::default(), 256), (Limits::for_64_queues(), 64)] {
            assert_eq!(Numbering::new(&limits, false).count(), queues);
            assert!(Numbering::new(&limits, true).count() <= queues);
        }
    }
}
