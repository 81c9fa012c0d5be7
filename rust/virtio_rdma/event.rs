// SPDX-License-Identifier: GPL-2.0

//! Event queues: virtqueues that the device writes events to (specification, Events, and
//! Completion queues: Arming).

#![deny(unsafe_code)]

use crate::{
    dma,
    ib::EventType,
    stats::{
        Counter,
        Stats, //
    },
    sync::IrqSpinLock,
    virtio::Queue, //
};
use core::marker::PhantomData;
use kernel::{
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

/// Buffers in an event queue, as far as the ring has room.
const BUFFERS: u32 = 64;

/// A queue of events of one kind, and its buffers.
///
/// The buffers of events that were taken go back together ([`EventQueue::refill`]), so that a device which always
/// has one more event cannot keep the thread that takes them.
pub(crate) struct EventQueue<E> {
    queue: Queue,
    /// Buffers that the device does not have.
    free: KVec<u32>,
    _event: PhantomData<fn() -> E>,
}

impl<E: FromBytes + AsBytes + Zeroable> EventQueue<E> {
    const SIZE: usize = size_of::<E>();

    /// Allocates the buffers. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(mut queue: Queue, dma: &dma::Device) -> Result<Self> {
        let count = BUFFERS.min(queue.size());
        let mut free = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for index in 0..count {
            free.push(index, GFP_KERNEL)?;
        }
        queue.set_memory(dma.alloc(count as usize * Self::SIZE)?)?;
        Ok(Self {
            queue,
            free,
            _event: PhantomData,
        })
    }

    /// Makes all buffers available that the device does not have. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the queue is broken: there will be no more events.
    pub(crate) fn refill(&mut self) -> Result {
        while let Some(index) = self.free.pop() {
            self.queue
                .add_writable(index as usize * Self::SIZE, Self::SIZE, index)?;
        }
        self.queue.kick();
        if self.queue.is_broken() {
            return Err(EIO);
        }
        Ok(())
    }

    /// Lets the interrupt go to a part of the CPUs, of `parts`. May sleep.
    pub(crate) fn set_affinity(&mut self, part: u32, parts: u32) {
        self.queue.set_affinity(part, parts);
    }

    /// Gives the queue back.
    pub(crate) fn into_queue(self) -> Queue {
        self.queue
    }

    /// Returns the next event, if there is one; its buffer waits for [`EventQueue::refill`]. Any context.
    pub(crate) fn next(&mut self, stats: &Stats) -> Option<E> {
        while let Some((index, written)) = self.queue.get() {
            // The list has room for all buffers.
            let _ = self.free.push_within_capacity(index);
            let memory = self.queue.memory().ok()?;
            match memory.read(index as usize * Self::SIZE) {
                Ok(event) if written as usize == Self::SIZE => return Some(event),
                _ => stats.bad(Counter::BadEvent),
            }
        }
        None
    }
}

/// An event queue with its lock; `None` before the device has its queues, and after it lost them.
pub(crate) type Locked<E> = IrqSpinLock<Option<EventQueue<E>>>;

/// Calls `handle`, without the lock, with each event that is there, and then makes the buffers available again. So
/// there are no more events than buffers; later ones bring an interrupt of their own. Any context in which `handle`
/// may be called.
///
/// # Errors
///
/// `EIO` if the queue is broken: there will be no more events.
pub(crate) fn interrupt<E: FromBytes + AsBytes + Zeroable>(
    queue: &Locked<E>,
    stats: &Stats,
    mut handle: impl FnMut(&E),
) -> Result {
    loop {
        let mut guard = queue.lock();
        let Some(events) = &mut *guard else {
            return Ok(());
        };
        let Some(event) = events.next(stats) else {
            return events.refill();
        };
        drop(guard);
        handle(&event);
    }
}

/// Events of the port that are to be reported, in the order in which they came: the last one about its state, and that
/// the device has failed.
#[derive(Default)]
pub(crate) struct PortEvents([Option<EventType>; 2]);

impl PortEvents {
    /// Adds an event. It takes the place of one about the same thing, so that no event is reported that is not true any
    /// more.
    pub(crate) fn add(&mut self, event: EventType) {
        let is_failure = |event| event == EventType::DeviceFatal;
        let others = self
            .0
            .map(|old| old.filter(|old| is_failure(*old) != is_failure(event)));
        self.0 = [others[0].or(others[1]), Some(event)];
    }
}

impl IntoIterator for PortEvents {
    type Item = EventType;
    type IntoIter = core::iter::Flatten<core::array::IntoIter<Option<EventType>, 2>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().flatten()
    }
}

#[cfg(virtio_rdma_kunit)]
#[kernel::macros::kunit_tests(virtio_rdma_event)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    /// Returns whether events that come together are reported like this.
    fn reports(events: &[EventType], reported: &[EventType]) -> bool {
        let mut port = PortEvents::default();
        events.iter().for_each(|event| port.add(*event));
        port.into_iter().eq(reported.iter().copied())
    }

    #[test]
    fn the_last_state_of_the_port_is_reported() {
        use EventType::{PortActive, PortErr};

        assert!(reports(&[], &[]));
        assert!(reports(&[PortActive], &[PortActive]));
        assert!(reports(&[PortErr, PortErr], &[PortErr]));
        assert!(reports(&[PortErr, PortActive], &[PortActive]));
        assert!(reports(&[PortActive, PortErr], &[PortErr]));
        assert!(reports(&[PortActive, PortErr, PortActive], &[PortActive]));
    }

    #[test]
    fn events_of_the_port_are_reported_in_their_order() {
        use EventType::{DeviceFatal, PortActive, PortErr};

        assert!(reports(&[PortErr, DeviceFatal], &[PortErr, DeviceFatal]));
        assert!(reports(&[DeviceFatal, PortErr], &[DeviceFatal, PortErr]));
        assert!(reports(
            &[PortErr, DeviceFatal, PortActive],
            &[DeviceFatal, PortActive]
        ));
        assert!(reports(&[DeviceFatal, DeviceFatal], &[DeviceFatal]));
    }
}
