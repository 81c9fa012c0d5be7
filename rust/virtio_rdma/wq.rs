// SPDX-License-Identifier: GPL-2.0

//! Work queues: the send and the receive queue of a QP (chapter 6 of the
//! specification).
//!
//! Each work request has a slot: a fixed place in the memory of the queue, and
//! an entry that keeps what the consumer gave. The device gets the number of the
//! slot as its `wr_id`, so what comes back is checked and never trusted.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Lease,
    wire, //
};
use kernel::{
    prelude::*,
    transmute::AsBytes, //
};

const SGE_SIZE: usize = size_of::<wire::Sge>();

/// Bytes of a slot of a send queue.
pub(crate) fn send_slot_size(max_sge: u32) -> usize {
    size_of::<wire::SqWqe>() + max_sge as usize * SGE_SIZE
}

/// Bytes of a slot of a receive queue.
pub(crate) fn recv_slot_size(max_sge: u32) -> usize {
    size_of::<wire::RqWqe>() + max_sge as usize * SGE_SIZE
}

/// What the driver remembers of an outstanding work request.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The consumer's name for it.
    pub(crate) wr_id: u64,
    /// Of a send work request: `enum ib_wr_opcode`.
    pub(crate) opcode: u32,
    /// Of a receive work request: the bytes that there is room for.
    pub(crate) length: u64,
}

/// A work queue: a ring of slots, of which `count` from `tail` on are in use.
pub(crate) struct WorkQueue {
    lease: Lease,
    entries: KVec<Option<Entry>>,
    slot_size: usize,
    max_sge: u32,
    tail: usize,
    count: usize,
    accept: bool,
}

/// The entries of a queue of `depth` slots. May sleep.
///
/// # Errors
///
/// `ENOMEM`.
pub(crate) fn new_entries(depth: u32) -> Result<KVec<Option<Entry>>> {
    Ok(KVec::from_elem(None, depth as usize, GFP_KERNEL)?)
}

impl WorkQueue {
    /// Makes a queue over the memory of `lease`, with a slot for each of `entries`. It accepts
    /// nothing yet.
    pub(crate) fn new(
        lease: Lease,
        entries: KVec<Option<Entry>>,
        max_sge: u32,
        slot_size: usize,
    ) -> Self {
        Self {
            lease,
            entries,
            slot_size,
            max_sge,
            tail: 0,
            count: 0,
            accept: false,
        }
    }

    /// Lets the queue accept work requests, or not.
    pub(crate) fn set_accept(&mut self, accept: bool) {
        self.accept = accept;
    }

    /// Whether a work request with these SGEs can be posted now.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the state of the QP forbids it, or for too many SGEs; `ENOMEM` if the queue is
    /// full.
    pub(crate) fn check(&self, sges: &[bindings::ib_sge]) -> Result {
        if !self.accept || sges.len() > self.max_sge as usize {
            return Err(EINVAL);
        }
        if self.count == self.entries.len() {
            return Err(ENOMEM);
        }
        Ok(())
    }

    /// Whether no work request is outstanding.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The slot of the next work request.
    pub(crate) fn next_slot(&self) -> usize {
        (self.tail + self.count) % self.entries.len()
    }

    /// Posts a work request that [`WorkQueue::check`] found good.
    ///
    /// # Errors
    ///
    /// `EIO` or `ENOSPC` if the device failed.
    pub(crate) fn post<T: AsBytes>(
        &mut self,
        header: &T,
        sges: &[bindings::ib_sge],
        entry: Entry,
    ) -> Result {
        let slot = self.next_slot();
        let base = slot * self.slot_size;
        let mut end = base + size_of::<T>();

        // The device returns descriptors before it completes their work requests, so there is one.
        while self.lease.get().is_some() {}
        self.lease.write(base, header)?;
        for sge in sges {
            let sge = wire::Sge {
                addr: sge.addr.to_le(),
                length: sge.length.to_le(),
                lkey: sge.lkey.to_le(),
            };
            self.lease.write(end, &sge)?;
            end += SGE_SIZE;
        }
        self.lease.add_readable(base, end - base, slot as u32)?;
        self.keep(entry);
        Ok(())
    }

    /// Keeps a work request that the device never sees, to be flushed.
    pub(crate) fn keep(&mut self, entry: Entry) {
        let slot = self.next_slot();
        self.entries[slot] = Some(entry);
        self.count += 1;
    }

    /// Tells the device about new work requests.
    pub(crate) fn kick(&mut self) {
        self.lease.kick();
    }

    /// How many slots `slot` is behind the oldest one; `None` if it is not outstanding.
    fn position(&self, slot: u64) -> Option<usize> {
        let depth = self.entries.len();
        let slot = usize::try_from(slot).ok().filter(|slot| *slot < depth)?;
        let position = (slot + depth - self.tail) % depth;

        (position < self.count && self.entries[slot].is_some()).then_some(position)
    }

    /// Frees the oldest slot.
    fn pop(&mut self) -> Option<Entry> {
        if self.count == 0 {
            return None;
        }
        let entry = self.entries[self.tail].take();
        self.tail = (self.tail + 1) % self.entries.len();
        self.count -= 1;
        entry
    }

    /// Completes a send work request, and with it all that were posted before it. `None` if the slot
    /// is not outstanding.
    pub(crate) fn complete_through(&mut self, slot: u64) -> Option<Entry> {
        let position = self.position(slot)?;
        for _ in 0..position {
            self.pop();
        }
        self.pop()
    }

    /// What the driver remembers of the work request in `slot`. `None` if it is not outstanding.
    pub(crate) fn peek(&self, slot: u64) -> Option<Entry> {
        self.position(slot)?;
        self.entries[slot as usize]
    }

    /// Completes a receive work request, alone. `None` if the slot is not outstanding.
    pub(crate) fn complete_one(&mut self, slot: u64) -> Option<Entry> {
        self.position(slot)?;
        let entry = self.entries[slot as usize].take();
        while self.count != 0 && self.entries[self.tail].is_none() {
            self.pop();
        }
        entry
    }

    /// Takes the oldest outstanding work request, which is to be flushed.
    pub(crate) fn flush(&mut self) -> Option<Entry> {
        while self.count != 0 {
            if let Some(entry) = self.pop() {
                return Some(entry);
            }
        }
        None
    }

    /// Forgets all work requests, after the device did.
    pub(crate) fn reset(&mut self) {
        self.lease.drain();
        while self.pop().is_some() || self.count != 0 {}
    }
}
