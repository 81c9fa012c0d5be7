// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of address handles.

use super::answer::{created, destroyed};
use crate::{
    ah::{self, Ah},
    bindings::*,
    cmd,
    object::Ref,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(ah::create(pd, attr))
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the AH is live, and the first member of an object that `create_ah` made.
    unsafe { destroyed(ah.cast::<Ah>(), |ah| cmd::ah::destroy(ah.verbs())) }
}
