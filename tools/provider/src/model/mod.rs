// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The models that the tests have in place of a device, a kernel and a program.

mod cost;
pub mod device;
pub mod freed;
pub mod kernel;
pub mod log;
pub mod objects;
pub mod opened;
pub mod send_queue;
mod traffic;
pub mod uverbs;
