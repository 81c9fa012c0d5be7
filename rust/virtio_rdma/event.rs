// SPDX-License-Identifier: GPL-2.0

//! Event queues, and the asynchronous events: whom each is reported to (chapter
//! 9 of the specification).

#![deny(unsafe_code)]

use crate::{
    bindings,
    dma::{
        self,
        Buffer, //
    },
    hca::Hca,
    stats::{
        Counter,
        Stats, //
    },
    sync::IrqSpinLock,
    virtio::Queue,
    wire, //
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
/// The buffers of events that were taken go back together ([`EventQueue::recycle`]), so that a
/// device which has always one more event cannot hold up whoever takes them.
pub(crate) struct EventQueue<E> {
    queue: Queue,
    events: Buffer,
    taken: KVec<u32>,
    _event: PhantomData<fn() -> E>,
}

impl<E: FromBytes + AsBytes + Zeroable> EventQueue<E> {
    const SIZE: usize = size_of::<E>();

    /// Allocates the buffers. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(queue: Queue, dma: &dma::Device) -> Result<Self> {
        Ok(Self {
            queue,
            events: dma.alloc(BUFFERS as usize * Self::SIZE)?,
            taken: KVec::with_capacity(BUFFERS as usize, GFP_KERNEL)?,
            _event: PhantomData,
        })
    }

    /// Makes the buffers available.
    pub(crate) fn start(&mut self) {
        for index in 0..BUFFERS.min(self.queue.size()) {
            self.add(index);
        }
        self.queue.kick();
    }

    /// Lets the interrupt go to `cpu`.
    pub(crate) fn set_affinity(&mut self, cpu: u32) {
        self.queue.set_affinity(cpu);
    }

    /// Gives the queue back. The device must have been reset.
    pub(crate) fn into_queue(self) -> Queue {
        self.queue
    }

    fn add(&mut self, index: u32) {
        // A ring that takes no buffer back is broken, and there are no more events.
        if let Ok(span) = self.events.span(index as usize * Self::SIZE, Self::SIZE) {
            let _ = self.queue.add_writable(span, index);
        }
    }

    /// The next event, if there is one; those that are too short are skipped.
    pub(crate) fn next(&mut self, stats: &Stats) -> Option<E> {
        while let Some((index, written)) = self.queue.get() {
            let _ = self.taken.push_within_capacity(index);
            match self.events.read(index as usize * Self::SIZE) {
                Ok(event) if written as usize >= Self::SIZE => return Some(event),
                _ => stats.bad(Counter::BadEvent),
            }
        }
        None
    }

    /// Makes the buffers of all events that were taken available again.
    pub(crate) fn recycle(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        while let Some(index) = self.taken.pop() {
            self.add(index);
        }
        self.queue.kick();
    }
}

/// An event queue with its lock; empty before there are queues, and after.
pub(crate) type Locked<E> = IrqSpinLock<Option<EventQueue<E>>>;

/// Takes all events that are there, and gives each to `handle`, without the lock. Called by the
/// interrupt.
pub(crate) fn interrupt<E: FromBytes + AsBytes + Zeroable>(
    queue: &Locked<E>,
    stats: &Stats,
    mut handle: impl FnMut(&E),
) {
    loop {
        let mut guard = queue.lock();
        let Some(events) = &mut *guard else {
            return;
        };
        let Some(event) = events.next(stats) else {
            events.recycle();
            return;
        };
        drop(guard);
        handle(&event);
    }
}

/// Whom an event concerns, and what the kernel calls it.
enum Target {
    Cq(u32),
    Qp(u32),
    Port(u32),
}

fn target(event: u32) -> Option<Target> {
    Some(match event {
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_CQ_ERR => {
            Target::Cq(bindings::ib_event_type_IB_EVENT_CQ_ERR)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_FATAL => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_QP_FATAL)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_REQ_ERR => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_QP_REQ_ERR)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_ACCESS_ERR => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_QP_ACCESS_ERR)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_COMM_EST => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_COMM_EST)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SQ_DRAINED => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_SQ_DRAINED)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED => {
            Target::Qp(bindings::ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_PORT_ACTIVE => {
            Target::Port(bindings::ib_event_type_IB_EVENT_PORT_ACTIVE)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_PORT_ERR => {
            Target::Port(bindings::ib_event_type_IB_EVENT_PORT_ERR)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_DEVICE_FATAL => {
            Target::Port(bindings::ib_event_type_IB_EVENT_DEVICE_FATAL)
        }
        _ => return None,
    })
}

/// Reports an event to the object that it names. Any context.
pub(crate) fn report(hca: &Hca, event: &wire::Event) {
    let handle = u32::from_le(event.handle);
    let found = match target(u32::from_le(event.event)) {
        None => {
            hca.stats().bad(Counter::BadEvent);
            return;
        }
        Some(Target::Cq(kind)) => hca.objects().cqs.with(handle, |cq| cq.report(kind)),
        Some(Target::Qp(kind)) => hca.objects().qps.with(handle, |qp| qp.report(kind)),
        Some(Target::Port(kind)) => {
            hca.objects().report_port(kind);
            Some(())
        }
    };
    hca.stats().count(match found {
        Some(()) => Counter::Events,
        None => Counter::StaleEvent,
    });
}
