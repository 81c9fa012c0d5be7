// SPDX-License-Identifier: GPL-2.0

//! The doorbell queue. It tells the device that a ring which the device does not
//! poll has new work requests (specification, Rings: Doorbells).
//!
//! When the queue is full, a doorbell is remembered and goes out when the device
//! returns a buffer. Only then are interrupts on.
//!
//! The device is notified without the lock, because that is an exit to the
//! hypervisor, for which the doorbells of all other CPUs would wait with interrupts
//! off. Another thread may give the queue up meanwhile ([`DoorbellQueue::detach`]).
//! It is deleted when no RCU reader can notify the device of it any more.

#![deny(unsafe_code)]

use crate::{
    bindings,
    dma,
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    virtio::{
        Notice,
        Queue, //
    },
    wire, //
};
use kernel::{
    bitmap::BitmapVec,
    prelude::*,
    sync::rcu, //
};

/// The ring of a QP that a doorbell is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ring {
    /// The send ring.
    Send = bindings::virtio_rdma_doorbell_queue_VIRTIO_RDMA_DOORBELL_SQ as isize,
    /// The receive ring.
    Receive = bindings::virtio_rdma_doorbell_queue_VIRTIO_RDMA_DOORBELL_RQ as isize,
}

const DOORBELL_SIZE: usize = size_of::<wire::Doorbell>();

/// Rings of a QP.
const RINGS: usize = 2;

struct Inner {
    queue: Option<Queue>,
    /// Buffers that the device does not have.
    free: KVec<u32>,
    /// Doorbells that found no buffer: bit `RINGS` * QPN + `Ring`, and `srqs` + SRQN.
    pending: BitmapVec,
    /// The first bit of SRQs.
    srqs: usize,
    /// The bit of `pending` at which the search for the next doorbell begins, so that each has its turn.
    next: usize,
    /// Whether doorbells were sent since the device was notified.
    sent: bool,
}

/// The doorbell queue of a device.
#[pin_data]
pub(crate) struct DoorbellQueue {
    #[pin]
    inner: IrqSpinLock<Inner>,
}

impl DoorbellQueue {
    /// Allocates what a device with QP numbers below `qps` and SRQ numbers below `srqs` needs. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(qps: u32, srqs: u32) -> Result<impl PinInit<Self>> {
        let first_srq = qps as usize * RINGS;
        let inner = Inner {
            queue: None,
            free: KVec::new(),
            pending: BitmapVec::new(first_srq + srqs as usize, GFP_KERNEL)?,
            srqs: first_srq,
            next: 0,
            sent: false,
        };
        Ok(pin_init!(Self {
            inner <- new_irq_spinlock!(inner, "virtio_rdma::DoorbellQueue"),
        }))
    }

    /// Starts to use `queue`. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn attach(&self, mut queue: Queue, dma: &dma::Device) -> Result {
        let size = queue.size();
        queue.set_memory(dma.alloc(size as usize * DOORBELL_SIZE)?)?;
        let mut free = KVec::with_capacity(size as usize, GFP_KERNEL)?;
        for buffer in 0..size {
            free.push(buffer, GFP_KERNEL)?;
        }
        queue.disable_interrupt();

        let mut inner = self.inner.lock();
        inner.free = free;
        inner.queue = Some(queue);
        Ok(())
    }

    /// Gives the queue up.
    pub(crate) fn detach(&self) -> Option<Queue> {
        self.inner.lock().queue.take()
    }

    /// Rings the doorbell of a QP: now, or when the device has returned a buffer. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the queue is broken.
    pub(crate) fn ring(&self, qpn: u32, ring: Ring) -> Result {
        self.with_inner(|inner| {
            let bit = qpn as usize * RINGS + ring as usize;
            if bit >= inner.srqs {
                return Err(EINVAL);
            }
            inner.ring(bit)
        })
    }

    /// Rings the doorbell of an SRQ: now, or when the device has returned a buffer. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the queue is broken.
    pub(crate) fn ring_srq(&self, srqn: u32) -> Result {
        self.with_inner(|inner| {
            let bit = inner.srqs + srqn as usize;
            if bit >= inner.pending.len() {
                return Err(EINVAL);
            }
            inner.ring(bit)
        })
    }

    /// Calls `f` with the lock held, and notifies the device of what `f` sent when the lock is free.
    fn with_inner(&self, f: impl FnOnce(&mut Inner) -> Result) -> Result {
        let rcu = rcu::read_lock();
        let mut inner = self.inner.lock();
        let result = f(&mut inner);
        let notice = inner.prepare_kick(&rcu);
        drop(inner);
        if let Some(notice) = notice {
            notice.send();
        }
        result
    }

    /// Forgets the doorbells of a QP that is gone. Any context.
    pub(crate) fn cancel(&self, qpn: u32) {
        let mut inner = self.inner.lock();
        for bit in (qpn as usize * RINGS..).take(RINGS) {
            if bit < inner.srqs {
                inner.pending.clear_bit(bit);
            }
        }
    }

    /// Forgets the doorbells of an SRQ that is gone. Any context.
    pub(crate) fn cancel_srq(&self, srqn: u32) {
        let mut inner = self.inner.lock();
        let bit = inner.srqs + srqn as usize;
        if bit < inner.pending.len() {
            inner.pending.clear_bit(bit);
        }
    }

    /// Sends the doorbells that wait, because the device has returned buffers. Called by the interrupt.
    pub(crate) fn interrupt(&self) {
        // Sending fails only if the queue is broken, and then the next doorbell fails too.
        let _ = self.with_inner(Inner::send_pending);
    }
}

impl Inner {
    /// Sends the doorbell with this number, or remembers it.
    fn ring(&mut self, bit: usize) -> Result {
        self.reclaim();
        if !self.free.is_empty() {
            return self.send(bit);
        }
        self.pending.set_bit(bit);
        self.send_pending()
    }

    /// Returns what the doorbell with this number says.
    fn doorbell(&self, bit: usize) -> wire::Doorbell {
        let (number, queue) = match bit.checked_sub(self.srqs) {
            None => (bit / RINGS, (bit % RINGS) as u32),
            Some(srqn) => (
                srqn,
                bindings::virtio_rdma_doorbell_queue_VIRTIO_RDMA_DOORBELL_SRQ,
            ),
        };
        wire::Doorbell {
            number: (number as u32).to_le(),
            queue: queue.to_le(),
        }
    }

    /// Takes the buffers that the device has returned.
    fn reclaim(&mut self) {
        while let Some((buffer, _)) = self.queue.as_mut().and_then(Queue::get) {
            // The list has room for all buffers.
            let _ = self.free.push_within_capacity(buffer);
        }
    }

    /// Makes the doorbell with this number available to the device. There is a free buffer.
    fn send(&mut self, bit: usize) -> Result {
        let doorbell = self.doorbell(bit);
        let queue = self.queue.as_mut().ok_or(EIO)?;
        let buffer = self.free.pop().ok_or(EIO)?;
        let offset = buffer as usize * DOORBELL_SIZE;

        queue.memory()?.write(offset, &doorbell)?;
        queue.add_readable(offset, DOORBELL_SIZE, buffer)?;
        self.sent = true;
        Ok(())
    }

    /// Returns the notice of the doorbells that were sent, if the device wants it.
    fn prepare_kick<'rcu>(&mut self, rcu: &'rcu rcu::Guard) -> Option<Notice<'rcu>> {
        if !core::mem::take(&mut self.sent) {
            return None;
        }
        self.queue.as_mut()?.prepare_kick(rcu)
    }

    /// Sends the doorbells that wait, as far as there are buffers. The interrupt is on afterwards if doorbells are
    /// left.
    fn send_pending(&mut self) -> Result {
        loop {
            self.reclaim();
            while !self.free.is_empty() {
                let Some(bit) = self.next_pending() else {
                    if let Some(queue) = &mut self.queue {
                        queue.disable_interrupt();
                    }
                    return Ok(());
                };
                self.pending.clear_bit(bit);
                self.next = bit + 1;
                self.send(bit)?;
            }
            // The device may have returned buffers before it could see that interrupts are wanted.
            if !self.queue.as_mut().is_some_and(Queue::has_used) {
                return Ok(());
            }
        }
    }

    /// Returns the next doorbell that waits.
    fn next_pending(&self) -> Option<usize> {
        let next = if self.next < self.pending.len() {
            self.pending.next_bit(self.next)
        } else {
            None
        };
        next.or_else(|| self.pending.next_bit(0))
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_doorbell)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    /// Doorbells of 4 QP numbers and 3 SRQ numbers, without a queue.
    fn inner() -> Result<Inner> {
        Ok(Inner {
            queue: None,
            free: KVec::new(),
            pending: BitmapVec::new(4 * RINGS + 3, GFP_KERNEL)?,
            srqs: 4 * RINGS,
            next: 0,
            sent: false,
        })
    }

    #[test]
    fn bits_name_their_rings() -> Result {
        let inner = inner()?;
        for (bit, number, queue) in [(0, 0, 0), (5, 2, 1), (7, 3, 1), (8, 0, 2), (10, 2, 2)] {
            let doorbell = inner.doorbell(bit);
            assert_eq!(u32::from_le(doorbell.number), number);
            assert_eq!(u32::from_le(doorbell.queue), queue);
        }
        Ok(())
    }

    #[test]
    fn doorbells_take_turns() -> Result {
        let mut inner = inner()?;
        assert_eq!(inner.next_pending(), None);
        for bit in [1, 6, 9] {
            inner.ring(bit)?;
        }
        assert_eq!(inner.next_pending(), Some(1));
        inner.next = 2;
        assert_eq!(inner.next_pending(), Some(6));
        inner.next = 10;
        assert_eq!(inner.next_pending(), Some(1));
        inner.next = 11;
        assert_eq!(inner.next_pending(), Some(1));
        Ok(())
    }
}
