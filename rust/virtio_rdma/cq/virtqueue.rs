// SPDX-License-Identifier: GPL-2.0

//! The virtqueue of a CQ (specification, Virtqueues for work).

#![deny(unsafe_code)]

use crate::{
    dma::Buffer,
    hca::{
        Hca,
        Lease, //
    },
    stats::Counter,
    virtio::Queue,
    wire, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

const CQE_SIZE: usize = size_of::<wire::Cqe>();

/// A CQE that was taken out of the ring, and whose buffer is not available again yet.
#[derive(Clone, Copy)]
struct Held {
    buffer: u32,
    cqe: wire::Cqe,
}

/// The buffers of a CQ that is about to be created.
pub(super) struct Buffers {
    depth: u32,
    memory: Buffer,
    held: KVec<Held>,
}

impl Buffers {
    /// Allocates `depth` of them. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(hca: &Hca, depth: u32) -> Result<Self> {
        Ok(Self {
            depth,
            memory: hca.alloc(depth as usize * CQE_SIZE)?,
            held: KVec::with_capacity(depth as usize, GFP_KERNEL)?,
        })
    }
}

/// The virtqueue of a CQ and the buffers in it.
pub(super) struct CompletionQueue {
    lease: Lease,
    /// The number of buffers.
    depth: u32,
    /// CQEs taken out of the ring when a QP was purged, in order.
    held: KVec<Held>,
    /// The number of CQEs in `held` that were polled.
    polled: usize,
}

impl CompletionQueue {
    /// Takes the queue of CQ `cqn` and fills it with `buffers`. May sleep.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no such queue, or an object has it.
    pub(super) fn new(hca: &Arc<Hca>, cqn: u32, buffers: Buffers, vector: u32) -> Result<Self> {
        let Buffers {
            depth,
            memory,
            held,
        } = buffers;
        let lease = hca.lease(hca.config().cq_queue(cqn), memory)?;
        let mut this = Self {
            lease,
            depth,
            held,
            polled: 0,
        };
        this.lease.set_affinity(vector, hca.num_comp_vectors());
        for buffer in 0..depth {
            this.recycle(buffer);
        }
        this.lease.kick();
        Ok(this)
    }

    /// Tells the device about the buffers that are available again.
    pub(super) fn release(&mut self) {
        self.lease.kick();
    }

    /// Takes the virtqueue away, with its index: the device has been reset. Any context.
    pub(super) fn revoke(&mut self) -> Option<(u32, Queue)> {
        self.lease.revoke()
    }

    /// Returns whether the queue does nothing any more.
    pub(super) fn is_broken(&self) -> bool {
        self.lease.is_broken()
    }

    /// Makes a buffer available to the device.
    fn recycle(&mut self, buffer: u32) {
        // It fails only if the queue is broken.
        let _ = self
            .lease
            .add_writable(buffer as usize * CQE_SIZE, CQE_SIZE, buffer);
    }

    /// Takes the next CQE out of the ring. Those of the wrong length are skipped. `budget` bounds how
    /// many buffers are looked at.
    fn take(&mut self, hca: &Hca, budget: &mut u32) -> Option<Held> {
        while let Some(left) = budget.checked_sub(1) {
            *budget = left;
            let (buffer, written) = self.lease.get()?;
            match self.lease.read(buffer as usize * CQE_SIZE) {
                Ok(cqe) if written as usize == CQE_SIZE => return Some(Held { buffer, cqe }),
                _ => {
                    hca.stats().bad(Counter::BadCqeLength);
                    self.recycle(buffer);
                }
            }
        }
        None
    }

    /// Returns the next CQE, in order; its buffer is available again.
    pub(super) fn next(&mut self, hca: &Hca, budget: &mut u32) -> Option<wire::Cqe> {
        let held = match self.held.get(self.polled) {
            Some(held) => {
                self.polled += 1;
                *held
            }
            None => {
                self.held.clear();
                self.polled = 0;
                self.take(hca, budget)?
            }
        };
        self.recycle(held.buffer);
        Some(held.cqe)
    }

    /// Moves all CQEs from the ring to `held`, which has room for as many as there are buffers.
    fn hold_all(&mut self, hca: &Hca) {
        let mut polled = core::mem::take(&mut self.polled);
        self.held.retain(|_| {
            let keep = polled == 0;
            polled = polled.saturating_sub(1);
            keep
        });
        let mut budget = self.depth;
        while let Some(held) = self.take(hca, &mut budget) {
            let _ = self.held.push_within_capacity(held);
        }
    }

    /// Drops the CQEs of a QP that are there, and takes the others out of the ring. To be followed by
    /// [`release`](Self::release).
    pub(super) fn drop_qp(&mut self, hca: &Hca, qpn: u32) {
        self.hold_all(hca);
        let mut held = core::mem::take(&mut self.held);
        held.retain(|held| {
            let keep = u32::from_le(held.cqe.qp_num) != qpn;
            if !keep {
                self.recycle(held.buffer);
            }
            keep
        });
        self.held = held;
    }

    /// Returns whether a CQE is there.
    pub(super) fn has_completions(&mut self) -> bool {
        self.polled < self.held.len() || self.lease.has_used()
    }
}
