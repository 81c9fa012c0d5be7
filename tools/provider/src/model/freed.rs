// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Finds writes to memory that was freed.

use std::{cell::RefCell, ptr::NonNull, slice};

const FILL: u8 = 0xa5;

/// The memory that a thread freed.
#[derive(Default)]
struct Freed(Vec<(NonNull<u8>, usize)>);

thread_local! {
    static FREED: RefCell<Freed> = RefCell::default();
}

/// Keeps an object that was freed until its thread ends, and fails if it was written to.
///
/// # Safety
///
/// It is from malloc(), and nobody uses it any more.
pub unsafe fn free<T>(object: NonNull<T>) {
    // SAFETY: the memory is there, and nobody uses it.
    unsafe { object.cast::<u8>().write_bytes(FILL, size_of::<T>()) };
    FREED.with_borrow_mut(|freed| freed.0.push((object.cast(), size_of::<T>())));
}

impl Freed {
    fn is_intact(&self) -> bool {
        self.0.iter().all(|&(at, len)| {
            // SAFETY: the memory is this value's.
            unsafe { slice::from_raw_parts(at.as_ptr(), len) }.iter().all(|&byte| byte == FILL)
        })
    }
}

/// Returns whether the memory that this thread freed was not written to.
pub fn is_intact() -> bool {
    FREED.with_borrow(Freed::is_intact)
}

/// Returns how many objects this thread freed.
pub fn count() -> usize {
    FREED.with_borrow(|freed| freed.0.len())
}

impl Drop for Freed {
    fn drop(&mut self) {
        if !self.is_intact() {
            // The test has ended: there is no other way to fail.
            eprintln!("memory was written to after it was freed");
            std::process::abort();
        }
        for (at, _) in self.0.drain(..) {
            // SAFETY: it came from malloc().
            unsafe { crate::bindings::free(at.as_ptr().cast()) };
        }
    }
}
