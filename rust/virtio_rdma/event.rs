// SPDX-License-Identifier: GPL-2.0

//! Event queues, and the asynchronous events: whom each is reported to (chapter
//! 9 of the specification).

#![deny(unsafe_code)]

use crate::{
    bindings,
    dma,
    hca::Hca,
    ib::EventType,
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
    sync::Arc,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

/// Buffers in an event queue, as far as the ring has room.
const BUFFERS: u32 = 64;

/// A queue of events of one kind, and its buffers.
///
/// The buffers of events that were taken go back together ([`EventQueue::refill`]), so that a
/// device which has always one more event cannot hold up whoever takes them.
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

    /// Lets the interrupt go to `cpu`.
    pub(crate) fn set_affinity(&mut self, cpu: u32) {
        self.queue.set_affinity(cpu);
    }

    /// Gives the queue back.
    pub(crate) fn into_queue(self) -> Queue {
        self.queue
    }

    /// The next event, if there is one; its buffer waits for [`EventQueue::refill`]. Any context.
    pub(crate) fn next(&mut self, stats: &Stats) -> Option<E> {
        while let Some((index, written)) = self.queue.get() {
            // The capacity is that of all buffers, so there is room.
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

/// An event queue with its lock; empty before there are queues, and after.
pub(crate) type Locked<E> = IrqSpinLock<Option<EventQueue<E>>>;

/// Gives each event that is there to `handle`, without the lock, at most as many as there are buffers:
/// these are available again only afterwards, when new events bring an interrupt of their own. The
/// context is what `handle` needs.
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

/// Whom an event concerns, and what the kernel calls it.
enum Target {
    Cq(EventType),
    Qp(EventType),
    Srq(EventType),
    Port(EventType),
}

fn target(event: u32) -> Option<Target> {
    Some(match event {
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_CQ_ERR => Target::Cq(EventType::CqErr),
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_FATAL => {
            Target::Qp(EventType::QpFatal)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_REQ_ERR => {
            Target::Qp(EventType::QpReqErr)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_ACCESS_ERR => {
            Target::Qp(EventType::QpAccessErr)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_COMM_EST => {
            Target::Qp(EventType::CommEst)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SQ_DRAINED => {
            Target::Qp(EventType::SqDrained)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED => {
            Target::Qp(EventType::QpLastWqeReached)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SRQ_ERR => {
            Target::Srq(EventType::SrqErr)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED => {
            Target::Srq(EventType::SrqLimitReached)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_PORT_ACTIVE => {
            Target::Port(EventType::PortActive)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_PORT_ERR => {
            Target::Port(EventType::PortErr)
        }
        bindings::virtio_rdma_event_type_VIRTIO_RDMA_EVENT_DEVICE_FATAL => {
            Target::Port(EventType::DeviceFatal)
        }
        _ => return None,
    })
}

/// Reports an event to the object that it names, which may leave it at the first of a kind. May sleep.
pub(crate) fn report(hca: &Arc<Hca>, event: &wire::Event) {
    let handle = u32::from_le(event.handle);
    let found = match target(u32::from_le(event.event)) {
        None => {
            hca.stats().bad(Counter::BadEvent);
            return;
        }
        Some(Target::Cq(kind)) => hca
            .objects()
            .cqs
            .with(handle, |cq| cq.report_once(kind, cq)),
        Some(Target::Qp(kind)) => hca
            .objects()
            .qps
            .with_held(handle, |qp| qp.report_once(kind, qp)),
        Some(Target::Srq(kind)) => hca
            .objects()
            .srqs
            .with(handle, |srq| srq.report_expected(kind, srq)),
        Some(Target::Port(kind)) => {
            hca.report_port(kind);
            Some(())
        }
    };
    hca.stats().count(match found {
        Some(()) => Counter::Events,
        None => Counter::StaleEvent,
    });
}
