// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Judges a virtio-rdma device, or the driver of one, by the clauses of the specification.
//!
//! [`observer`] judges drivers. The rest judges devices: the suite is the VMM and the driver of the device. It believes nothing that the device says:
//! each wait ends, and each length and each reserved byte is checked. From the bottom:
//!
//! * `outcome` and `journal`: how a test ends, and what it has judged
//! * `port`: the ways to attach to a device
//! * `queue`, `reply`, `objects`, `driver` and `verbs`: a driver, with what it checks in every test
//! * `bench`: the members of a network, and the ends of connections
//! * `test`: what a test is
//! * `clauses`: the tests, in a file for each family of clauses
//! * `suite` and `report`: how the tests run, and what is told of them

#![forbid(unsafe_code)]
// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]
// The header's names are unmistakable, and there are many.
#![allow(clippy::wildcard_imports)]
// The values that are judged are passed as they are, whatever their size.
#![allow(clippy::needless_pass_by_value)]
// The ends of connections have the names of points.
#![allow(clippy::many_single_char_names)]
// Memory is that of the suite itself, and large enough.
#![allow(clippy::missing_panics_doc)]

pub mod bench;
mod clauses;
pub mod driver;
pub mod journal;
pub mod objects;
pub mod observer;
pub mod outcome;
pub mod port;
mod queue;
mod reply;
pub mod report;
pub mod suite;
pub mod test;
mod verbs;
