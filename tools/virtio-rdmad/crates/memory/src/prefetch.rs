// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loads memory into the processor's cache before it is needed.

/// The bytes of a cache line, where it matters for speed.
const CACHE_LINE: usize = 64;

/// Asks the processor for all cache lines of a value of this process. The lines come at the same
/// time, while the processor does other things; reads, one after the other, would wait for each.
#[inline]
pub fn prefetch<T>(value: &T) {
    lines(std::ptr::from_ref(value).cast(), size_of::<T>());
}

/// Asks the processor for the cache lines of the first of `len` bytes at `addr`, and of every 64th
/// byte behind it. Nothing is accessed, so any address will do.
#[inline]
pub(crate) fn lines(addr: *const u8, len: usize) {
    // This takes a few instructions less than an iterator by steps, which each message would spend.
    let mut offset = 0;
    while offset < len {
        line(addr.wrapping_add(offset));
        offset += CACHE_LINE;
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn line(addr: *const u8) {
    use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
    // SAFETY: every x86-64 processor has the instruction, which changes nothing and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(addr.cast()) };
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn line(addr: *const u8) {
    // SAFETY: every such processor has the instruction, which changes nothing and never faults.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{addr}]",
            addr = in(reg) addr,
            options(nostack, readonly, preserves_flags)
        );
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
fn line(_addr: *const u8) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_will_do() {
        prefetch(&[1_u8; 300]);
        prefetch(&());
        lines(std::ptr::null(), 128);
        lines(usize::MAX as *const u8, 128);
    }
}
