// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! libibverbs' commands to the kernel (`ibv_cmd_*`, rdma-core
//! libibverbs/cmd*.c), as safe functions: a module for each kind of object.
//!
//! Each is one call of ioctl(2) or write(2) on the context's file, keeps no
//! state of its own and may run in any number of threads. Each returns the
//! kernel's error number. The commands that destroy a CQ, QP or SRQ return only after the
//! program has acknowledged every event of the object.

pub mod ah;
pub mod context;
pub mod cq;
mod message;
pub mod mr;
pub mod mw;
pub mod pd;
pub mod qp;
pub mod srq;
pub mod xrcd;

#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;
