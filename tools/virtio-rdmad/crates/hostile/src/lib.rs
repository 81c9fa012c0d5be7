// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio-rdma device that tests drivers.
//!
//! It is a device like that of `virtio-rdmad`, for one guest that talks to itself. It misbehaves as it is told to, and
//! lets a [`Watch`] see all that the driver does. From the bottom:
//!
//! * `rule`: the orders by which it misbehaves
//! * `events`: what it waits for
//! * `watch`: who sees what the driver does
//! * `proxy` and `rings`: what stands between the guest and the engine
//! * `device`: the device
//! * `options`: values of command lines
//! * `process`: the sockets at which the device is served

#![forbid(unsafe_code)]

mod device;
mod events;
mod options;
mod process;
mod proxy;
mod rings;
mod rule;
mod watch;

pub use device::{Hostile, Settings};
pub use options::{bits, parse_mac, Mac};
pub use process::{End, Process, Socket};
pub use rule::Order;
pub use watch::{Blind, Watch};
