// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of the port.

/// The state of the port, `enum ib_port_state`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum PortState {
    /// Other hosts are not reached.
    Down = 1,
    /// Other hosts are reached.
    Active = 4,
}
