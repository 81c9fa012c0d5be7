// SPDX-License-Identifier: GPL-2.0

//! The messages of the device, which are brought to the objects that they concern: interrupts,
//! asynchronous events (specification, Events), and the news that the device has failed or
//! was reset.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    config::Role,
    event,
    hca::{
        Hca,
        REPORT, //
    },
    ib::EventType,
    stats::Counter,
    virtio::{
        Interrupt,
        Reset, //
    },
    wire, //
};
use kernel::{
    sync::Arc,
    time::delay::fsleep,
    workqueue::WorkItem, //
};

impl Interrupt for Hca {
    fn interrupt(self: &Arc<Self>, queue: u32) {
        match self.config().role(queue) {
            Role::Control => self.control_interrupt(),
            Role::Events => self.report_soon(),
            Role::CompletionEvents(vector) => vector_interrupt(self, vector as usize),
            Role::Doorbells => self.doorbell_interrupt(),
            Role::Completions(cqn) => {
                // The CQ is not found while it is being destroyed.
                let _ = self.objects().cqs.with(cqn, |cq| cq.notify(cq));
            }
            Role::Sends | Role::Receives => {}
        }
    }
}

/// Calls the handlers of the CQs that the events of a completion vector name. Any context.
fn vector_interrupt(hca: &Arc<Hca>, vector: usize) {
    let Some(events) = hca.completion_events().get(vector) else {
        return;
    };
    let result = event::interrupt(events, hca.stats(), |event: &wire::CompEvent| {
        let cqn = u32::from_le(event.cqn);
        if hca.objects().cqs.with(cqn, |cq| cq.notify(cq)).is_none() {
            hca.stats().count(Counter::StaleEvent);
        }
    });
    if result.is_err() {
        hca.fail("a queue of completion events broke");
    }
}

/// Reports the events that the device has raised. May sleep.
fn report_events(hca: &Arc<Hca>) {
    let result = event::interrupt(hca.events(), hca.stats(), |event| report(hca, event));
    if result.is_err() {
        hca.fail("the event queue broke");
    }
}

/// Hands the buffers of the event queues to the device. May sleep.
pub(crate) fn start_events(hca: &Arc<Hca>) {
    report_events(hca);
    for vector in 0..hca.completion_events().len() {
        vector_interrupt(hca, vector);
    }
}

/// Gives up the queues of a device that was reset, those of its objects too. It has no objects any more, or is
/// out of service: then the consumers of its objects find their work requests flushed. Sleeps.
pub(crate) fn detach(hca: &Arc<Hca>, reset: &Reset<'_>) {
    hca.detach(reset, |park| {
        let objects = hca.objects();
        objects.cqs.for_each(|cq| {
            let _ = cq.revoke().map(&mut *park);
        });
        objects
            .qps
            .for_each(|qp| qp.revoke().into_iter().flatten().for_each(&mut *park));
    });
    if hca.is_broken() {
        close_objects(hca);
    }
}

/// Lets the consumers of the objects of a device that has failed, and was reset, find their work requests flushed, or a
/// ring that is closed. May sleep.
fn close_objects(hca: &Hca) {
    let objects = hca.objects();
    objects.qps.for_each(|qp| qp.close());
    objects.qps.for_each_held(|qp| qp.leave_srq(qp));
    objects.srqs.for_each(|srq| srq.close());
    objects.cqs.for_each(|cq| {
        cq.close();
        cq.wake(cq);
    });
}

/// The object that an event concerns, and the kernel's type of the event.
enum Target {
    /// A CQ.
    Cq(EventType),
    /// A QP.
    Qp(EventType),
    /// An SRQ.
    Srq(EventType),
    /// The port.
    Port(EventType),
}

/// Returns what an event of the device concerns, `enum virtio_rdma_event_type`; `None` for one that is unknown.
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
fn report(hca: &Arc<Hca>, event: &wire::Event) {
    let handle = u32::from_le(event.handle);
    let objects = hca.objects();
    let found = match target(u32::from_le(event.event)) {
        None => {
            hca.stats().bad(Counter::BadEvent);
            return;
        }
        Some(Target::Cq(kind)) => objects.cqs.with(handle, |cq| cq.report_once(kind, cq)),
        Some(Target::Qp(kind)) => objects.qps.with_held(handle, |qp| qp.report_once(kind, qp)),
        Some(Target::Srq(kind)) => objects
            .srqs
            .with(handle, |srq| srq.report_expected(kind, srq)),
        // If the transport cannot ask for a reset, this event says that the device cannot go on.
        Some(Target::Port(EventType::DeviceFatal)) => {
            hca.fail("it says that it has failed");
            Some(())
        }
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

impl WorkItem<REPORT> for Hca {
    type Pointer = Arc<Self>;

    /// Reports the events that are in the event queue: handlers of QPs may sleep.
    fn run(this: Arc<Self>) {
        report_events(&this);
    }
}

impl WorkItem for Hca {
    type Pointer = Arc<Self>;

    /// Takes a device that asks for it (DEVICE_NEEDS_RESET) out of service, reports what happened to the port, and
    /// sends requests for notification that wait. If the device has failed, ends the waiting for commands, and has it
    /// reset; once it was, lets the consumers of armed CQs poll, so that they find their work requests flushed, or a
    /// ring that is closed.
    fn run(this: Arc<Self>) {
        if this.needs_reset() {
            this.fail("it asks for a reset");
        }
        for event in this.take_port_events() {
            this.objects().report_port(event);
        }
        if this.is_broken() {
            this.control().wake_all();
            if this.is_stopped() {
                close_objects(&this);
            }
            // A thread in `detach` has to look at the objects that were published since.
            this.wake_detach();
            if let Some(recovery) = this.take_recovery() {
                recovery.recover();
            }
        } else if this.control().send_unmapped() {
            fsleep(cmd::UNMAPPED);
            this.attend();
        }
    }
}

#[cfg(virtio_rdma_kunit)]
#[kernel::macros::kunit_tests(virtio_rdma_interrupt)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn events_concern_their_objects() {
        use bindings::*;

        let cq = target(virtio_rdma_event_type_VIRTIO_RDMA_EVENT_CQ_ERR);
        assert!(matches!(cq, Some(Target::Cq(EventType::CqErr))));
        let qp = target(virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SQ_DRAINED);
        assert!(matches!(qp, Some(Target::Qp(EventType::SqDrained))));
        let srq = target(virtio_rdma_event_type_VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED);
        assert!(matches!(srq, Some(Target::Srq(EventType::SrqLimitReached))));
        let port = target(virtio_rdma_event_type_VIRTIO_RDMA_EVENT_PORT_ERR);
        assert!(matches!(port, Some(Target::Port(EventType::PortErr))));
        assert!(target(u32::MAX).is_none());
    }
}
