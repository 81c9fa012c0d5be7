// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory regions and windows, their keys, and copies between them.

pub(crate) mod access;
pub(crate) mod copy;
mod cursor;
pub(crate) mod fast_reg;
pub(crate) mod flush;
pub(crate) mod key_table;
pub(crate) mod management;
pub(crate) mod mr;
pub(crate) mod mr_cache;
pub(crate) mod mw;
pub(crate) mod page_list;
pub(crate) mod page_table;
pub(crate) mod parts;
mod sharing;
