// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests that a thread that gives memory up does not wait until the kernel has unmapped it.

use std::fs::read_to_string;
use std::os::fd::AsFd;
use std::sync::mpsc::channel;

use memory::{start_unmapper, GuestMemory, GuestRegion};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

const NAME: &str = "memory that is given up";

fn is_mapped() -> bool {
    read_to_string("/proc/self/maps").unwrap().contains(NAME)
}

#[test]
fn another_thread_unmaps() {
    let (go, begin) = channel();
    start_unmapper(move || begin.recv().unwrap()).unwrap();
    let fd = memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 0x4000).unwrap();
    let region =
        GuestRegion { guest_addr: 0, len: 0x4000, fd: fd.as_fd(), offset: 0, writable: true };
    drop(GuestMemory::default().with_region(&region).unwrap());
    assert!(is_mapped(), "the thread has not begun yet");
    go.send(()).unwrap();
    while is_mapped() {
        std::thread::yield_now();
    }
}
