// SPDX-License-Identifier: GPL-2.0

//! Asynchronous events: `struct ib_event`.

use super::c_enum::c_enum;
use crate::bindings;
use kernel::prelude::*;

c_enum! {
    /// The type of an event, `enum ib_event_type`, as far as devices of this abstraction report it.
    EventType {
        /// A CQ is in error, because it overflowed for example.
        CqErr = ib_event_type_IB_EVENT_CQ_ERR,
        /// A QP is in error, and no completion says why.
        QpFatal = ib_event_type_IB_EVENT_QP_FATAL,
        /// A request that a QP received was malformed.
        QpReqErr = ib_event_type_IB_EVENT_QP_REQ_ERR,
        /// A request that a QP received was not allowed to access memory.
        QpAccessErr = ib_event_type_IB_EVENT_QP_ACCESS_ERR,
        /// A QP that is ready to receive got its first message.
        CommEst = ib_event_type_IB_EVENT_COMM_EST,
        /// No send of a QP in SQD is under way any more.
        SqDrained = ib_event_type_IB_EVENT_SQ_DRAINED,
        /// A QP in error takes no further work request of its SRQ.
        QpLastWqeReached = ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED,
        /// An SRQ is in error.
        SrqErr = ib_event_type_IB_EVENT_SRQ_ERR,
        /// Fewer work requests wait in an SRQ than its limit.
        SrqLimitReached = ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED,
        /// The port is up.
        PortActive = ib_event_type_IB_EVENT_PORT_ACTIVE,
        /// The port is down.
        PortErr = ib_event_type_IB_EVENT_PORT_ERR,
        /// The device has failed.
        DeviceFatal = ib_event_type_IB_EVENT_DEVICE_FATAL,
    }
}

/// The object that an event concerns.
pub(super) enum Element {
    /// A CQ, QP or SRQ.
    Object(*mut c_void),
    /// A port.
    Port(u32),
}

/// Returns an event of `device`.
pub(super) fn new_event(
    device: *mut bindings::ib_device,
    event: EventType,
    element: Element,
) -> bindings::ib_event {
    let mut new = bindings::ib_event {
        device,
        event: event.into(),
        ..Default::default()
    };
    let slot = &raw mut new.element;
    // SAFETY: The members of the union are pointers to objects, and the number of a port.
    unsafe {
        match element {
            Element::Object(object) => slot.cast::<*mut c_void>().write(object),
            Element::Port(port) => slot.cast::<u32>().write(port),
        }
    }
    new
}

/// Reports an event of an object to its handler, if it has one.
///
/// # Safety
///
/// `object` must be a CQ, QP or SRQ of `device`, of the kind that `event` is of, and `handler` and `context` must
/// be those that its consumer has set.
pub(super) unsafe fn report<C>(
    device: *mut bindings::ib_device,
    object: *mut C,
    event: EventType,
    handler: Option<unsafe extern "C" fn(*mut bindings::ib_event, *mut c_void)>,
    context: *mut c_void,
) {
    let mut event = new_event(device, event, Element::Object(object.cast()));
    if let Some(handler) = handler {
        // SAFETY: The caller promises that the handler is for events of this object, with this context.
        unsafe { handler(&raw mut event, context) };
    }
}
