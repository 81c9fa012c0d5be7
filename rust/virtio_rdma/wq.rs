// SPDX-License-Identifier: GPL-2.0

//! Work queues: the send and the receive queue of a QP (specification, Work
//! requests, Rings, and Virtqueues for work).
//!
//! Each work request has a slot: a fixed place in the memory of the queue, and
//! an entry that keeps what the consumer gave. The device gets the number of the
//! slot, or the index in the ring, as its `wr_id`, so what comes back is checked
//! and never trusted.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Lease,
    ib,
    ring::WorkRing,
    trace::refuse,
    virtio,
    wire::{
        self,
        RingHeader,
        SendRequest, //
    },
};
use kernel::{
    prelude::*,
    transmute::AsBytes, //
};

const SGE_SIZE: usize = size_of::<wire::Sge>();

/// Returns the bytes of a slot of a send queue.
pub(crate) fn send_slot_size(max_sge: u32) -> usize {
    size_of::<wire::SqWqe>() + max_sge as usize * SGE_SIZE
}

/// Returns the bytes of a slot of a receive queue.
pub(crate) fn recv_slot_size(max_sge: u32) -> usize {
    size_of::<wire::RqWqe>() + max_sge as usize * SGE_SIZE
}

/// The record of an outstanding work request in the driver.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The `wr_id` of the consumer.
    pub(crate) wr_id: u64,
    /// The operation, as its completion names it.
    pub(crate) opcode: ib::WcOpcode,
    /// The bytes that a receive work request has room for; 0 for a send.
    pub(crate) length: u64,
}

/// The local side of a work request.
pub(crate) enum Payload<'a> {
    /// Memory that the device reads or writes.
    Sges(&'a [bindings::ib_sge]),
    /// Data that the work request carries itself, in a ring.
    Inline(ib::InlineData<'a>),
}

impl Payload<'_> {
    /// Returns how many SGEs the device gets.
    pub(crate) fn num_sge(&self) -> usize {
        match self {
            Self::Sges(sges) => sges.len(),
            Self::Inline(_) => 0,
        }
    }

    /// Returns how many bytes the work request carries itself.
    pub(crate) fn inline_len(&self) -> u64 {
        match self {
            Self::Sges(_) => 0,
            Self::Inline(data) => data.len(),
        }
    }
}

/// The way of work requests to the device.
pub(crate) enum Transport {
    /// Through a virtqueue.
    Virtqueue(Lease),
    /// Through a ring of the kernel.
    Ring(WorkRing),
    /// Through a ring of a program. The kernel does not post to it.
    Program,
}

impl Transport {
    /// Copies `value` to `offset` of the next slot, which begins at `base` of a virtqueue's memory.
    fn write<T: AsBytes>(&mut self, base: usize, offset: usize, value: &T) -> Result {
        match self {
            Self::Virtqueue(lease) => lease.write(base + offset, value),
            Self::Ring(ring) => ring.write(offset, value),
            Self::Program => Err(EINVAL),
        }
    }

    /// Copies the local side of a work request to `offset` of the next slot, a multiple of 8. Returns where it ends.
    fn write_payload(
        &mut self,
        base: usize,
        mut offset: usize,
        payload: &Payload<'_>,
    ) -> Result<usize> {
        match payload {
            Payload::Sges(sges) => {
                for sge in *sges {
                    self.write(base, offset, &sge_to_wire(sge))?;
                    offset += SGE_SIZE;
                }
            }
            Payload::Inline(data) => {
                let mut bytes = data.bytes().fuse();
                while let Some(first) = bytes.next() {
                    let mut word = [first, 0, 0, 0, 0, 0, 0, 0];
                    for (place, byte) in word.iter_mut().skip(1).zip(&mut bytes) {
                        *place = byte;
                    }
                    self.write(base, offset, &u64::from_ne_bytes(word))?;
                    offset += size_of::<u64>();
                }
            }
        }
        Ok(offset)
    }
}

/// A work queue: a ring of slots. `count` slots are in use, from `tail` on.
pub(crate) struct WorkQueue {
    transport: Transport,
    entries: KVec<Option<Entry>>,
    slot_size: usize,
    max_sge: u32,
    tail: usize,
    count: usize,
    accept: bool,
}

/// Returns the entries of a queue of `depth` slots. May sleep.
///
/// # Errors
///
/// `ENOMEM`.
pub(crate) fn new_entries(depth: u32) -> Result<KVec<Option<Entry>>> {
    Ok(KVec::from_elem(None, depth as usize, GFP_KERNEL)?)
}

/// Writes a receive work request to the next entry of a ring; `name` comes back in its CQE.
///
/// # Errors
///
/// `EINVAL` if the entry has no room for the SGEs.
pub(crate) fn write_recv(ring: &mut WorkRing, name: u64, sges: &[bindings::ib_sge]) -> Result {
    let mut end = size_of::<wire::RqWqe>();
    ring.write(0, &recv_header(name, sges))?;
    for sge in sges {
        ring.write(end, &sge_to_wire(sge))?;
        end += SGE_SIZE;
    }
    Ok(())
}

fn recv_header(name: u64, sges: &[bindings::ib_sge]) -> wire::RqWqe {
    wire::RqWqe {
        num_sge: (sges.len() as u32).to_le(),
        reserved_04: 0,
        wr_id: name.to_le(),
    }
}

fn sge_to_wire(sge: &bindings::ib_sge) -> wire::Sge {
    wire::Sge {
        addr: sge.addr.to_le(),
        length: sge.length.to_le(),
        lkey: sge.lkey.to_le(),
    }
}

impl WorkQueue {
    /// Makes a queue with a slot of `slot_size` bytes for each of `entries`, which are as many as the
    /// ring is deep. It accepts nothing yet.
    pub(crate) fn new(
        transport: Transport,
        entries: KVec<Option<Entry>>,
        max_sge: u32,
        slot_size: usize,
    ) -> Self {
        Self {
            transport,
            entries,
            slot_size,
            max_sge,
            tail: 0,
            count: 0,
            accept: false,
        }
    }

    /// Makes a queue that the kernel does not post to: a program does, or there is no such queue.
    pub(crate) fn of_program() -> Self {
        Self {
            transport: Transport::Program,
            entries: KVec::new(),
            slot_size: 0,
            max_sge: 0,
            tail: 0,
            count: 0,
            accept: false,
        }
    }

    /// Takes the virtqueue away, with its index, if the queue is one: the device has been reset. Any
    /// context.
    pub(crate) fn revoke(&mut self) -> Option<(u32, virtio::Queue)> {
        match &mut self.transport {
            Transport::Virtqueue(lease) => lease.revoke(),
            Transport::Ring(_) | Transport::Program => None,
        }
    }

    /// Lets the queue accept work requests, or not.
    pub(crate) fn set_accept(&mut self, accept: bool) {
        self.accept = accept;
    }

    /// Returns whether a work request with these SGEs can be posted now.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if a program owns the queue; `EINVAL` if the state of the QP forbids it, or for
    /// too many SGEs; `ENOMEM` if the queue is full.
    pub(crate) fn check(&self, sges: &[bindings::ib_sge]) -> Result {
        if matches!(self.transport, Transport::Program) {
            let reason = c"a work request to a queue that its program posts to";
            return Err(refuse(crate::errno::unsupported(), reason, 0, 0));
        }
        if !self.accept {
            let reason = c"a work request in a state of the QP that has none";
            return Err(refuse(EINVAL, reason, 0, 0));
        }
        if sges.len() > self.max_sge as usize {
            let (number, limit) = (sges.len() as u64, self.max_sge.into());
            return Err(refuse(EINVAL, c"SGEs of a work request", number, limit));
        }
        if self.count == self.entries.len() {
            let count = self.count as u64;
            return Err(refuse(
                ENOMEM,
                c"a work request to a full queue",
                count,
                count,
            ));
        }
        Ok(())
    }

    /// Returns whether no work request is outstanding.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the slot of the next work request. There is at least one slot.
    fn next_slot(&self) -> usize {
        self.slot(self.count)
    }

    /// Returns the slot that is `position` behind the oldest one, which is no more than there are slots.
    fn slot(&self, position: usize) -> usize {
        let depth = self.entries.len();
        let slot = self.tail + position;
        // A remainder would need a division, which could panic.
        if slot < depth {
            slot
        } else {
            slot - depth
        }
    }

    /// Returns the name by which the device knows the next work request.
    fn next_name(&self) -> u64 {
        match &self.transport {
            Transport::Ring(ring) => u64::from(ring.producer()),
            _ => self.next_slot() as u64,
        }
    }

    /// Posts a send work request that [`WorkQueue::check`] found good.
    ///
    /// # Errors
    ///
    /// `EIO` or `ENOSPC` if the device failed.
    pub(crate) fn post_send(
        &mut self,
        request: &SendRequest,
        payload: &Payload<'_>,
        entry: Entry,
    ) -> Result {
        let name = self.next_name();
        if let Transport::Ring(_) = self.transport {
            match request.to_ring(payload.num_sge(), payload.inline_len(), name) {
                RingHeader::Connected(header) => self.post(&header, payload, entry),
                RingHeader::Datagram(header) => self.post(&header, payload, entry),
                RingHeader::Registration(header) => self.post(&header, payload, entry),
            }
        } else {
            let header = request.to_virtqueue(payload.num_sge(), name);
            self.post(&header, payload, entry)
        }
    }

    /// Posts a receive work request that [`WorkQueue::check`] found good.
    ///
    /// # Errors
    ///
    /// `EIO` or `ENOSPC` if the device failed.
    pub(crate) fn post_recv(&mut self, sges: &[bindings::ib_sge], entry: Entry) -> Result {
        let header = recv_header(self.next_name(), sges);
        self.post(&header, &Payload::Sges(sges), entry)
    }

    fn post<T: AsBytes>(&mut self, header: &T, payload: &Payload<'_>, entry: Entry) -> Result {
        let slot = self.next_slot();
        let base = slot * self.slot_size;

        self.transport.write(base, 0, header)?;
        let end = self
            .transport
            .write_payload(base, size_of::<T>(), payload)?;
        match &mut self.transport {
            Transport::Virtqueue(lease) => {
                // The device returns descriptors before it completes their work requests, so a
                // descriptor is free.
                while lease.get().is_some() {}
                lease.add_readable(base, end, slot as u32)?;
            }
            Transport::Ring(ring) => ring.advance(),
            Transport::Program => return Err(EINVAL),
        }
        self.record(entry);
        Ok(())
    }

    /// Keeps a work request that the device never sees, until it is flushed.
    pub(crate) fn keep(&mut self, entry: Entry) {
        if let Transport::Ring(ring) = &mut self.transport {
            ring.advance();
        }
        self.record(entry);
    }

    fn record(&mut self, entry: Entry) {
        let slot = self.next_slot();
        self.entries[slot] = Some(entry);
        self.count += 1;
    }

    /// Makes new work requests visible to the device. True if it wants a doorbell besides.
    pub(crate) fn publish(&mut self) -> bool {
        match &mut self.transport {
            Transport::Virtqueue(lease) => {
                lease.kick();
                false
            }
            // It never fails, because the head of a region is within its memory.
            Transport::Ring(ring) => ring.publish().unwrap_or(false),
            Transport::Program => false,
        }
    }

    /// Returns how many slots the work request with this name is behind the oldest one, and its slot;
    /// `None` if it is not outstanding.
    fn position(&self, name: u64) -> Option<(usize, usize)> {
        let depth = self.entries.len();
        let position = match &self.transport {
            Transport::Virtqueue(_) => {
                let slot = usize::try_from(name).ok().filter(|slot| *slot < depth)?;
                if slot < self.tail {
                    slot + depth - self.tail
                } else {
                    slot - self.tail
                }
            }
            Transport::Ring(ring) => {
                let oldest = ring.producer().wrapping_sub(self.count as u32);
                u32::try_from(name).ok()?.wrapping_sub(oldest) as usize
            }
            Transport::Program => return None,
        };
        if position >= self.count {
            return None;
        }
        let slot = self.slot(position);
        self.entries[slot].is_some().then_some((position, slot))
    }

    /// Frees the oldest slot.
    fn pop(&mut self) -> Option<Entry> {
        if self.count == 0 {
            return None;
        }
        let entry = self.entries[self.tail].take();
        self.tail = self.slot(1);
        self.count -= 1;
        entry
    }

    /// Completes a send work request, and with it all that were posted before it. `None` if it is
    /// not outstanding.
    pub(crate) fn complete_through(&mut self, name: u64) -> Option<Entry> {
        let (position, _) = self.position(name)?;
        for _ in 0..position {
            self.pop();
        }
        self.pop()
    }

    /// Returns what the driver remembers of a work request. `None` if it is not outstanding.
    pub(crate) fn peek(&self, name: u64) -> Option<Entry> {
        let (_, slot) = self.position(name)?;
        self.entries[slot]
    }

    /// Completes a receive work request, alone. `None` if it is not outstanding.
    pub(crate) fn complete_one(&mut self, name: u64) -> Option<Entry> {
        let (_, slot) = self.position(name)?;
        let entry = self.entries[slot].take();
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
        match &mut self.transport {
            Transport::Virtqueue(lease) => lease.drain(),
            Transport::Ring(ring) => {
                // It never fails, because the head of a region is within its memory.
                let _ = ring.reset();
            }
            Transport::Program => {}
        }
        while self.pop().is_some() || self.count != 0 {}
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_wq)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    /// Makes a queue without memory; only its slots are used.
    fn queue(depth: u32) -> Result<WorkQueue> {
        let mut queue = WorkQueue::of_program();
        queue.entries = new_entries(depth)?;
        Ok(queue)
    }

    fn entry(wr_id: u64) -> Entry {
        Entry {
            wr_id,
            opcode: ib::WcOpcode::Send,
            length: 0,
        }
    }

    #[test]
    fn slots_are_reused_in_order() -> Result {
        let mut queue = queue(4)?;
        for round in 0..10 {
            for wr_id in 3 * round..3 * round + 3 {
                queue.keep(entry(wr_id));
            }
            assert!(!queue.is_empty());
            for wr_id in 3 * round..3 * round + 3 {
                assert_eq!(queue.flush().map(|entry| entry.wr_id), Some(wr_id));
            }
            assert!(queue.is_empty());
        }
        assert!(queue.flush().is_none());
        Ok(())
    }

    #[test]
    fn slots_wrap() -> Result {
        let mut queue = queue(3)?;
        queue.keep(entry(1));
        queue.keep(entry(2));
        queue.pop();
        queue.pop();
        assert_eq!(queue.next_slot(), 2);
        queue.keep(entry(3));
        assert_eq!(queue.next_slot(), 0);
        queue.keep(entry(4));
        assert_eq!(queue.slot(0), 2);
        assert_eq!(queue.slot(1), 0);
        Ok(())
    }

    #[test]
    fn reset_forgets_all() -> Result {
        let mut queue = queue(8)?;
        for wr_id in 0..8 {
            queue.keep(entry(wr_id));
        }
        queue.reset();
        assert!(queue.is_empty());
        assert!(queue.flush().is_none());
        Ok(())
    }

    #[test]
    fn programs_post_themselves() {
        let queue = WorkQueue::of_program();
        assert_eq!(queue.check(&[]), Err(crate::errno::unsupported()));
    }

    #[test]
    fn payload_counts() {
        let sges = [bindings::ib_sge::default(); 3];
        let payload = Payload::Sges(&sges);
        assert_eq!(payload.num_sge(), 3);
        assert_eq!(payload.inline_len(), 0);
        assert_eq!(send_slot_size(2), 88 + 2 * 16);
        assert_eq!(recv_slot_size(2), 16 + 2 * 16);
    }
}
