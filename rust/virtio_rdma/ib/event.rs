// SPDX-License-Identifier: GPL-2.0

//! Asynchronous events: `struct ib_event`.

use crate::bindings;
use kernel::prelude::*;

/// What an event concerns.
pub(super) enum Element {
    /// A CQ, QP or SRQ.
    Object(*mut c_void),
    /// A port.
    Port(u32),
}

/// An event of `device`.
pub(super) fn new_event(
    device: *mut bindings::ib_device,
    event: bindings::ib_event_type,
    element: Element,
) -> bindings::ib_event {
    let mut new = bindings::ib_event {
        device,
        event,
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
