// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The verbs of the virtio-rdma device.
//!
//! A [`Fabric`] is the RDMA part of one network; a [`Device`] is the RDMA device of one guest in it. The engine does no
//! I/O and starts no thread: a transport gives it guest memory and rings, and calls [`Device::run`] from the one thread
//! that serves the guest. Messages between two guests of a fabric are one copy from the memory of the one to the memory
//! of the other, made by the requester's thread.
//!
//! # Floors
//! Each folder imports only folders below it, and no files import each other in a
//! circle (`tools/test/floors` checks both). From the bottom:
//!
//! * `base`: addresses, limits and quotas, tables, counters, and how a queue gets its next visit: ready set,
//!   timers, budget
//! * `memory`: regions and windows, their keys, the MR cache, copying
//! * `queue`: work requests, rings and virtqueues, completion queues, SRQs, events
//! * `qp`: states, attributes and the two halves of queue pairs
//! * `transport`: how a message reaches its QP: requester, responder, datagrams, XRC, RNR
//! * `control`: the control queue and its table of commands, with a file for each object
//! * `schedule`: which queue a guest's thread visits next: a round, busy polling, reset, freeze
//! * [`Device`], [`Fabric`] and what they are made with: the face of the engine
//!
//! Send windows, retransmission and congestion control are in the crate [`reliability`], below all of these.
//!
//! # Concurrency
//! What only the guest's own thread touches is locked all the same, but never
//! contended: the scheduler, the control queue and the requester half of
//! each QP. What a peer's thread touches is under short locks of its own: the
//! responder half of a QP, a CQ, an SRQ, the event queue, the table of keys.
//! The order is: scheduler, control queue, requester half, responder half (one
//! at a time, of any device), then the leaves, never two at once. The
//! use of a memory region is pinned by a count for one call of [`Device::run`] at
//! most, which is bounded in messages and bytes, and not while the control queue
//! is visited or a change of memory or a reset goes on, so these wait for a bounded
//! time, and never for themselves.
//!
//! A thread that is not the guest's own touches the guest's memory with one of these locks held, and looks behind the
//! lock whether the guest is frozen.
//!
//! # Hostile guests
//! What a guest wrote is copied once, then checked. Nothing that a guest, or a peer, writes makes
//! the engine panic, loop or grow beyond [`Limits`]; each kind of bad input is
//! counted, and logged the first time.

#![forbid(unsafe_code)]
// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]
// Requests are passed alike, whatever their size.
#![allow(clippy::trivially_copy_pass_by_ref)]
// On the path of each message a small structure that is returned through memory, and moved on from
// there in wider words, makes the processor wait for the stores: up to 10 ns of a message's 100.
#![allow(clippy::inline_always)]

mod base;
mod config;
mod control;
mod device;
mod fabric;
mod image;
mod memory;
mod qp;
mod queue;
mod schedule;
mod status;
mod transport;

#[cfg(all(test, loom))]
mod orders;
#[cfg(all(test, not(loom)))]
mod tests;

pub use base::address::{Address, Gid};
pub use base::budget::CHUNK;
pub use base::counters::Counter;
pub use base::host::{Clock, Incident, SystemClock, Uplink, Wake};
pub use base::image::LoadError;
pub use base::limits::Limits;
pub use base::observe::{Observation, Observer, Seen};
pub use base::queues::Paths;
pub use base::quota::Quota;
pub use base::refused::{KeyError, RefusedAccess};
pub use base::traffic_class::{AllowedValues, TrafficClasses};
pub use config::{DeviceConfig, DevicePolicy};
pub use device::Device;
pub use fabric::{Fabric, FabricConfig};
pub use image::VirtqueueSetup;
pub use qp::state::QpState;
pub use ring::Signal;
pub use schedule::scheduler::Next;
pub use status::{ConnectionStatus, DeviceStatus, QpCount, QpError, QpPath, QpStatus, SrqStatus};
pub use transport::rights::{AddressRights, GidPrefix, VlanList};
