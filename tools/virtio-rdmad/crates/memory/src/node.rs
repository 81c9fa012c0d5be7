// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the NUMA node on which memory of a guest lies.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::slice::Slice;

impl Slice {
    /// Returns the NUMA node of the page with the first byte, by move_pages(2), which moves nothing if it is not told
    /// where to. `None` if this process has not accessed the page, or if the kernel does not say: it is built without
    /// NUMA, or a filter of system calls refuses.
    pub fn node(&self) -> Option<u32> {
        let page = self.addr().as_ptr().cast::<c_void>();
        let mut status: c_int = -1;
        // SAFETY: the kernel reads one address and writes one status, and touches nothing at that address.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                1_usize,
                ptr::from_ref(&page),
                ptr::null::<c_int>(),
                ptr::from_mut(&mut status),
                0,
            )
        };
        // A negative status is an error for this page.
        (result == 0).then_some(status).and_then(|node| u32::try_from(node).ok())
    }
}

#[cfg(test)]
mod tests {
    use crate::{GuestMemory, PAGE_SIZE};

    const PAGE: u64 = PAGE_SIZE as u64;

    /// A page has a node once it was accessed. Not every kernel knows nodes, and filters of system calls may refuse.
    #[test]
    fn pages_lie_on_nodes() {
        let memory = GuestMemory::anonymous(&[(0, 64 * PAGE)]).unwrap();
        let page = |number: u64| memory.slice(number * PAGE, 1).unwrap();
        assert_eq!(page(40).node(), None, "nobody has accessed it");
        page(40).write(0, &[1]).unwrap();
        let Some(node) = page(40).node() else {
            println!("skipped: the kernel does not say on which nodes pages lie");
            return;
        };
        let path = format!("/sys/devices/system/node/node{node}");
        let has_sysfs = std::path::Path::new("/sys/devices/system/node").exists();
        assert!(!has_sysfs || std::path::Path::new(&path).exists(), "{path}");
    }
}
