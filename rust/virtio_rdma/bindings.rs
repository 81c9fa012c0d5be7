// SPDX-License-Identifier: GPL-2.0

//! Generated bindings to what the `kernel` crate's own bindings leave out.
//!
//! Everything that both know is the kernel crate's: the glob import below is
//! shadowed only by what `bindgen` found in the virtio and RDMA headers, so a
//! `struct device` here is the same type as there.

#![allow(
    clippy::all,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    improper_ctypes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]
#![allow(clippy::as_underscore)]
#![allow(clippy::cast_lossless)]
#![allow(clippy::ptr_as_ptr)]
#![allow(clippy::ref_as_ptr)]
#![allow(clippy::undocumented_unsafe_blocks)]
#![cfg_attr(not(CONFIG_RUSTC_HAS_UNNECESSARY_TRANSMUTES), allow(unknown_lints))]
#![allow(unnecessary_transmutes)]

pub use kernel::bindings::*;
use kernel::ffi;
use pin_init::{MaybeZeroable, Zeroable};

type __kernel_size_t = usize;
type __kernel_ssize_t = isize;
type __kernel_ptrdiff_t = isize;

// SAFETY: `__BindgenBitfieldUnit<Storage>` is a newtype around `Storage`.
unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

include!(env!("VIRTIO_RDMA_BINDINGS"));
