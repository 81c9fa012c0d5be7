// SPDX-License-Identifier: GPL-2.0

//! Asynchronous events: the event queue, and whom each event is reported to
//! (chapter 9 of the specification).

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
    virtio::Queue,
    wire, //
};
use kernel::prelude::*;

/// Buffers in the event queue, as far as the ring has room.
const BUFFERS: u32 = 64;

const EVENT_SIZE: usize = size_of::<wire::Event>();

/// The queue of events and its buffers.
pub(crate) struct EventQueue {
    queue: Queue,
    events: Buffer,
}

impl EventQueue {
    /// Allocates the buffers. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(queue: Queue, dma: &dma::Device) -> Result<Self> {
        Ok(Self {
            queue,
            events: dma.alloc(BUFFERS as usize * EVENT_SIZE)?,
        })
    }

    /// Makes the buffers available.
    pub(crate) fn start(&mut self) {
        for index in 0..BUFFERS.min(self.queue.size()) {
            self.add(index);
        }
        self.queue.kick();
    }

    /// Gives the queue back. The device must have been reset.
    pub(crate) fn into_queue(self) -> Queue {
        self.queue
    }

    fn add(&mut self, index: u32) {
        // A ring that takes no buffer back is broken, and there are no more events.
        if let Ok(span) = self.events.span(index as usize * EVENT_SIZE, EVENT_SIZE) {
            let _ = self.queue.add_writable(span, index);
        }
    }

    /// The next event, if there is one; its buffer is available again.
    pub(crate) fn next(&mut self, stats: &Stats) -> Option<wire::Event> {
        while let Some((index, written)) = self.queue.get() {
            let event = self.events.read(index as usize * EVENT_SIZE);
            self.add(index);
            self.queue.kick();
            match event {
                Ok(event) if written as usize >= EVENT_SIZE => return Some(event),
                _ => stats.bad(Counter::BadEvent),
            }
        }
        None
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
