// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! libibverbs provider for virtio-rdma devices.
//!
//! libibverbs loads this plug-in, hands it each device that its match table
//! names, and calls it through `struct verbs_context_ops`. The plug-in links no libibverbs:
//! [`libibverbs`] finds the copies in the process, of whichever release. Objects are created
//! and destroyed through the common uverbs commands. There are two data paths,
//! and the driver says which one a device has:
//!
//! - rings: the program writes its work requests where the device reads them,
//!   and reads its completions where the device writes them;
//! - the kernel posts and polls on the program's behalf: a virtqueue holds
//!   physical addresses, so no program may write one itself.
//!
//! Rings of a device behind a bus need the platform's barriers for devices: [`barriers`].
//!
//! The modules stand on floors, here the top one first. A module imports only modules of the
//! floors below its own, and those that stand before it in its row.
//!
//! | floor | modules | job |
//! |---|---|---|
//! | C interface | [`cq_ex`], [`wr_ex`], [`ops`], [`driver`] | registration, entry points |
//! | posting | [`doorbell`], [`post`], [`wr_builder`] | from a work request to the device |
//! | objects with rings | [`context`], [`cq`], [`srq`], [`qp`] | what their verbs do |
//! | rings | [`cq_ring`], [`cq_state`], [`qp_table`], [`wr`], [`wr_kernel`], [`wqe`], [`wq`] | work requests and completions |
//! | other objects | [`ah`], [`mr`], [`mw`], [`td`], [`pd`], [`xrcd`] | what their verbs do |
//! | commands | [`cmd`], [`owed`] | what the kernel does |
//! | libibverbs | [`libibverbs`], [`users`], [`fields`], [`attr`], [`log`] | its copies in the process, its objects, attributes and log |
//! | base | [`bindings`], [`atomic`], [`errno`], [`causes`], [`object`], [`clock`], [`limits`], [`lock`], [`barriers`], [`ring`] | headers, C objects, locks, shared memory |
//!
//! `unsafe` is in the C interface, on the lowest three floors, and in [`doorbell`], [`qp_table`],
//! [`wr`] and [`wr_kernel`]; the other modules forbid it.
#![cfg_attr(not(test), no_std)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the provider is for processors with addresses of 64 bits");

pub mod ah;
pub mod atomic;
pub mod attr;
pub mod barriers;
pub mod bindings;
pub mod causes;
pub mod clock;
pub mod cmd;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod cq_ring;
pub mod cq_state;
pub mod doorbell;
pub mod driver;
pub mod errno;
pub mod fields;
pub mod libibverbs;
pub mod limits;
pub mod lock;
pub mod log;
#[cfg(test)]
mod model;
pub mod mr;
pub mod mw;
pub mod object;
pub mod ops;
#[cfg(all(test, loom))]
mod orders;
pub mod owed;
pub mod pd;
pub mod post;
pub mod qp;
pub mod qp_table;
pub mod ring;
pub mod srq;
pub mod td;
pub mod users;
pub mod wq;
pub mod wqe;
pub mod wr;
pub mod wr_builder;
pub mod wr_ex;
pub mod wr_kernel;
pub mod xrcd;

/// Ends the program: unwinding must not reach the C code that called us, and
/// no state is left that could be trusted. Nothing here is known to panic.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort() has no preconditions.
    unsafe { bindings::abort() }
}
