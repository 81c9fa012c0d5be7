// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Send and receive queues, wherever they are.

use std::fmt::{self, Display};

use ring::RingError;

use super::virtqueue::Virtqueue;
use super::wq_ring::{Backlog, Watch, WqRing, WqRingError};
use super::wqe::{Ended, Popped, ReceiveWqe, SendWqe, WqConfig};

/// The reason for which a queue is unusable until it is drained.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WorkQueueError {
    /// A chain of the virtqueue that cannot be followed.
    Chain(RingError),
    /// A ring whose producer went wrong, or that is not in memory.
    Ring(WqRingError),
}

impl From<RingError> for WorkQueueError {
    fn from(error: RingError) -> Self {
        Self::Chain(error)
    }
}

impl From<WqRingError> for WorkQueueError {
    fn from(error: WqRingError) -> Self {
        Self::Ring(error)
    }
}

impl Display for WorkQueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chain(error) => error.fmt(f),
            Self::Ring(error) => error.fmt(f),
        }
    }
}

/// A send or receive queue of a QP: where its work requests come from.
///
/// A work request is copied out once and then belongs to the engine.
pub(crate) enum WorkQueue {
    /// A virtqueue, or the place for one.
    Virtqueue(Virtqueue),
    /// A ring in guest memory.
    Ring(WqRing),
}

impl Default for WorkQueue {
    fn default() -> Self {
        Self::Virtqueue(Virtqueue::default())
    }
}

impl WorkQueue {
    /// Returns the virtqueue, unless this is a ring.
    pub fn virtqueue(&mut self) -> Option<&mut Virtqueue> {
        match self {
            Self::Virtqueue(queue) => Some(queue),
            Self::Ring(_) => None,
        }
    }

    /// Returns the ring, unless this is a virtqueue.
    pub fn ring(&mut self) -> Option<&mut WqRing> {
        match self {
            Self::Virtqueue(_) => None,
            Self::Ring(ring) => Some(ring),
        }
    }

    /// Returns the descriptors of the virtqueue; 0 if there is no virtqueue.
    pub fn size(&self) -> u16 {
        match self {
            Self::Virtqueue(queue) => queue.size(),
            Self::Ring(_) => 0,
        }
    }

    /// Returns how far a ring was emptied; `None` for a virtqueue.
    pub fn taken(&self) -> Option<u32> {
        match self {
            Self::Virtqueue(_) => None,
            Self::Ring(ring) => Some(ring.taken()),
        }
    }

    /// Returns a watch of a ring; `None` for a virtqueue.
    pub fn watch(&self) -> Option<Watch> {
        match self {
            Self::Virtqueue(_) => None,
            Self::Ring(ring) => ring.watch(),
        }
    }

    /// Takes the next send work request into `wqe`.
    #[inline]
    pub fn pop_send(
        &mut self,
        wqe: &mut SendWqe,
        config: &WqConfig,
    ) -> Result<Popped, WorkQueueError> {
        match self {
            Self::Ring(ring) => {
                let Some((index, entry)) = ring.pop()? else { return Ok(Popped::Empty) };
                Ok(wqe.read_entry(index, entry, config).into())
            }
            Self::Virtqueue(queue) => {
                let Some(chain) = queue.pop()? else { return Ok(Popped::Empty) };
                let read = wqe.read(&chain, config);
                queue.give_back(chain.head, 0);
                Ok(read.into())
            }
        }
    }

    /// Takes the next receive work request into `wqe`.
    #[inline]
    pub fn pop_receive(
        &mut self,
        wqe: &mut ReceiveWqe,
        max_sge: usize,
    ) -> Result<Popped, WorkQueueError> {
        match self {
            Self::Ring(ring) => {
                let Some((index, entry)) = ring.pop()? else { return Ok(Popped::Empty) };
                Ok(wqe.read_entry(index, entry, max_sge).into())
            }
            Self::Virtqueue(queue) => {
                let Some(chain) = queue.pop()? else { return Ok(Popped::Empty) };
                let read = wqe.read(&chain, max_sge);
                queue.give_back(chain.head, 0);
                queue.signal_if_needed();
                Ok(read.into())
            }
        }
    }

    /// Takes the next send work request to be flushed, whatever is in it.
    pub fn pop_flushed_send(&mut self) -> Result<Option<Ended>, WorkQueueError> {
        Ok(match self {
            Self::Ring(ring) => {
                ring.pop()?.map(|(index, entry)| Ended::flushed_send_entry(index, entry))
            }
            Self::Virtqueue(queue) => queue.pop()?.map(|chain| {
                queue.give_back(chain.head, 0);
                Ended::flushed_send(&chain)
            }),
        })
    }

    /// Takes the next receive work request to be flushed, whatever is in it.
    pub fn pop_flushed_receive(&mut self) -> Result<Option<Ended>, WorkQueueError> {
        Ok(match self {
            Self::Ring(ring) => {
                ring.pop()?.map(|(index, entry)| Ended::flushed_receive_entry(index, entry))
            }
            Self::Virtqueue(queue) => queue.pop()?.map(|chain| {
                queue.give_back(chain.head, 0);
                Ended::flushed_receive(&chain)
            }),
        })
    }

    /// Returns how many work requests wait to be taken.
    #[inline]
    pub fn waiting(&self) -> u16 {
        match self {
            Self::Virtqueue(queue) => queue.waiting(),
            Self::Ring(ring) => u16::try_from(ring.waiting()).unwrap_or(u16::MAX),
        }
    }

    /// Returns the backlog of work requests that wait. Those of a virtqueue are counted now.
    pub fn backlog(&self) -> Backlog {
        match self {
            Self::Virtqueue(queue) => Backlog::known(queue.waiting().into()),
            Self::Ring(ring) => ring.backlog(),
        }
    }

    /// Interrupts the guest if its virtqueue says so; rings have no interrupt.
    pub fn signal_if_needed(&mut self) {
        if let Self::Virtqueue(queue) = self {
            queue.signal_if_needed();
        }
    }

    /// Asks to be told of the next work request; returns whether one is there already.
    pub fn enable_notify(&mut self) -> bool {
        match self {
            Self::Virtqueue(queue) => queue.enable_notify(),
            Self::Ring(ring) => ring.sleep(),
        }
    }

    /// Asks not to be told, because this side looks by itself.
    pub fn disable_notify(&mut self) {
        match self {
            Self::Virtqueue(queue) => queue.disable_notify(),
            Self::Ring(ring) => ring.wake_up(),
        }
    }

    /// Forgets the work requests that are posted, as DESTROY and RESET do.
    pub fn drain(&mut self) {
        match self {
            Self::Virtqueue(queue) => queue.drain(),
            Self::Ring(ring) => ring.reset(),
        }
    }

    /// Takes a ring away; a virtqueue stays when the QP goes.
    pub fn remove_ring(&mut self) {
        if let Self::Ring(_) = self {
            *self = Self::default();
        }
    }
}
