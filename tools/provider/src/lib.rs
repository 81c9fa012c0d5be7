// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! libibverbs provider for virtio-rdma devices.
//!
//! libibverbs loads this plug-in, hands it each device that its match table
//! names, and calls it through `struct verbs_context_ops`. Objects are made
//! and destroyed through the common uverbs commands. There are two data paths,
//! and the driver says which one a device has:
//!
//! - rings: the program writes its work requests where the device reads them,
//!   and reads its completions where the device writes them;
//! - the kernel posts and polls on the program's behalf: a virtqueue holds
//!   physical addresses, so no program may write one itself.
//!
//! | layer | modules | job |
//! |---|---|---|
//! | C interface | [`bindings`], [`driver`], [`ops`], [`wr_ex`], [`cq_ex`] | registration, entry points |
//! | abstractions | [`object`], [`cmd`], [`wr`], [`ring`], [`lock`], [`atomic`], [`qpn`], [`doorbell`], [`clock`] | C objects, commands, work requests, shared memory |
//! | rings | [`wq`], [`wqe`], [`batch`], [`cq_ring`] | posting and polling, no `unsafe` |
//! | verbs | [`context`], [`pd`], [`td`], [`mr`], [`ah`], [`cq`], [`qp`], [`srq`], [`xrcd`] | what each verb does, no `unsafe` |
#![cfg_attr(not(test), no_std)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the provider is for processors with addresses of 64 bits");

pub mod ah;
pub mod atomic;
pub mod batch;
pub mod bindings;
pub mod clock;
pub mod cmd;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod cq_ring;
pub mod doorbell;
pub mod driver;
pub mod errno;
pub mod lock;
#[cfg(test)]
mod model;
pub mod mr;
mod mw;
pub mod object;
pub mod ops;
#[cfg(all(test, loom))]
mod orders;
pub mod pd;
pub mod qp;
pub mod qpn;
pub mod ring;
pub mod srq;
pub mod td;
#[cfg(test)]
mod uverbs;
pub mod wq;
pub mod wqe;
pub mod wr;
pub mod wr_ex;
pub mod xrcd;

/// Ends the program: unwinding must not reach the C code that called us, and
/// no state is left that could be trusted. Nothing here is known to panic.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort() has no preconditions.
    unsafe { bindings::abort() }
}
