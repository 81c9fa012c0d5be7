// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests guest memory in files with small pages, in files with huge pages, and in files that shrink.

use std::os::fd::{AsFd, OwnedFd};

use memory::{GuestMemory, GuestRegion, Loss};
use rustix::fs::{fallocate, ftruncate, memfd_create, FallocateFlags, MemfdFlags};

const HUGE: u64 = 2 << 20;

fn memfd(len: u64) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}

/// Returns a file of huge pages. If this machine has none, prints the reason and returns `None`.
fn huge(pages: u64) -> Option<OwnedFd> {
    let made = || {
        let fd = memfd_create(
            "guest",
            MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        )?;
        ftruncate(&fd, pages * HUGE)?;
        fallocate(&fd, FallocateFlags::empty(), 0, pages * HUGE)?;
        Ok(fd)
    };
    let made: Result<OwnedFd, rustix::io::Errno> = made();
    made.inspect_err(|error| eprintln!("skipped: {pages} huge pages of 2 MiB: {error}")).ok()
}

fn region(fd: &OwnedFd, guest_addr: u64, len: u64, offset: u64) -> GuestRegion<'_> {
    GuestRegion { guest_addr, len, fd: fd.as_fd(), offset, writable: true }
}

fn map(fd: &OwnedFd, len: u64) -> GuestMemory {
    GuestMemory::default().with_region(&region(fd, 0, len, 0)).unwrap()
}

/// Returns what `/proc/self/smaps` says of the mapping at the beginning of `memory`.
fn smaps(memory: &GuestMemory, what: &str) -> String {
    let addr = format!("{:?}", memory.slice(0, 1).unwrap());
    let addr = addr.split("addr: 0x").nth(1).unwrap().split(',').next().unwrap().to_owned();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{addr}-")));
    lines.find_map(|line| line.strip_prefix(what)).unwrap().trim().to_owned()
}

/// Returns the `VmFlags` of the mapping at the beginning of `memory`.
fn vm_flags(memory: &GuestMemory) -> String {
    smaps(memory, "VmFlags: ")
}

#[test]
fn core_dumps_leave_guest_memory_out() {
    let flags = vm_flags(&map(&memfd(0x4000), 0x4000));
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    let Some(fd) = huge(1) else { return };
    let flags = vm_flags(&map(&fd, HUGE));
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
}

/// Pages that were touched are there, and are not touched once more where that is known of all around them.
#[test]
fn pages_that_are_touched_are_there() {
    const LEN: usize = (4 << 20) + 0x3000;
    let fd = memfd(LEN as u64);
    rustix::io::pwrite(&fd, &vec![1; LEN], 0).unwrap();
    let memory = map(&fd, LEN as u64);
    let touch = |start: usize, len: usize, most: usize| {
        let slice = memory.slice(start as u64, len as u64).unwrap();
        let (mut at, mut pages) = (0, 0);
        while at < len {
            let (done, touched) = slice.touch(at, most).unwrap();
            assert!(done > 0 && touched <= most);
            (at, pages) = (at + done, pages + touched);
        }
        assert_eq!(at, len);
        assert!(slice.touch(len, most).is_err());
        pages
    };
    assert_eq!(smaps(&memory, "Rss:"), "0 kB");
    assert_eq!(touch(0xfff, 2, 1), 2);
    assert_eq!(touch(0x1001, (2 << 20) - 0x1001, 16), 511);
    assert_eq!(touch(0, LEN, 16), 2 * 512 + 3);
    assert_eq!(smaps(&memory, "Rss:"), format!("{} kB", LEN >> 10));
    assert_eq!(touch(0x123, LEN - 0x123, 16), 3, "the last block is no whole one");
    // Memory without a file, and huge pages.
    assert_eq!(
        GuestMemory::anonymous(&[(0, 0x1000)]).unwrap().slice(0, 2).unwrap().touch(0, 1),
        Ok((2, 0))
    );
    if let Some(fd) = huge(1) {
        assert_eq!(map(&fd, HUGE).slice(0, 2).unwrap().touch(1, 1), Ok((1, 0)));
    }
}

/// QEMU leaves holes in the memory of a PC, so that regions begin and end within a huge page.
#[test]
fn regions_of_huge_pages_begin_anywhere() {
    let Some(fd) = huge(2) else { return };
    let parts =
        [(0, 0xa_0000), (0xc_0000, 0x4_0000), (0x10_0000, HUGE), (HUGE + 0x10_0000, 0xf_f000)];
    let mut memory = GuestMemory::default();
    for (addr, len) in parts {
        memory = memory.with_region(&region(&fd, addr, len, addr)).unwrap();
    }
    for (addr, len) in parts {
        memory.write(addr, &addr.to_ne_bytes()).unwrap();
        memory.write(addr + len - 8, &(addr + 1).to_ne_bytes()).unwrap();
    }
    assert!(memory.read(0xa_0000, &mut [0]).is_err(), "the hole is no memory");
    let whole = map(&fd, 2 * HUGE);
    for (addr, len) in parts {
        assert_eq!(whole.read_obj::<u64>(addr), Ok(addr));
        assert_eq!(whole.read_obj::<u64>(addr + len - 8), Ok(addr + 1));
    }
    let (rest, removed) = memory.without(0, 0xa_0000);
    assert_eq!((rest.ranges().count(), removed), (3, 1));
}

#[test]
fn huge_pages_that_were_truncated_read_as_zeros() {
    memory::survive_losses().unwrap();
    let Some(fd) = huge(2) else { return };
    let memory = map(&fd, 2 * HUGE);
    memory.write(HUGE - 1, &[1; 0x2000]).unwrap();
    ftruncate(&fd, HUGE).unwrap();
    let mut bytes = [7; 2];
    memory.read(HUGE + 0x5000, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0]);
    memory.read(HUGE - 2, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 1], "what the file has is left alone");
    memory.write(2 * HUGE - 2, &[2; 2]).unwrap();
    let loss = Loss { region: 0, offset: HUGE, len: HUGE, poisoned: false };
    assert_eq!(memory.take_losses(), [loss]);
}

/// A page that is lost, for example because it is poisoned, takes no other page with it.
#[test]
fn only_the_page_that_is_lost_is_replaced() {
    memory::survive_losses().unwrap();
    let fd = memfd(0x4000);
    let memory = map(&fd, 0x4000);
    memory.write(0x3000, &[3; 16]).unwrap();
    // Three pages are lost while the file is short, but only one of them is read meanwhile.
    ftruncate(&fd, 0x1000).unwrap();
    memory.read(0x1000, &mut [0; 16]).unwrap();
    ftruncate(&fd, 0x4000).unwrap();
    rustix::io::pwrite(&fd, &[4; 16], 0x3000).unwrap();
    let mut bytes = [0; 16];
    memory.read(0x3000, &mut bytes).unwrap();
    assert_eq!(bytes, [4; 16]);
    let loss = Loss { region: 0, offset: 0x1000, len: 0x1000, poisoned: false };
    assert_eq!(memory.take_losses(), [loss]);
    assert_eq!(memory.take_losses(), []);
    assert!(memory.is_damaged() && !map(&fd, 0x4000).is_damaged());
}

/// The kernel lets a process have some 65,530 mappings. A front end cannot use them up by losing
/// every second page.
#[test]
fn memory_that_is_lost_for_good_does_not_go_page_by_page() {
    memory::survive_losses().unwrap();
    let (pages, fd) = (256, memfd(256 << 12));
    let memory = map(&fd, pages << 12);
    memory.write(0, &vec![1; 256 << 12]).unwrap();
    ftruncate(&fd, 0).unwrap();
    let before = memory::losses();
    for page in (1..pages).step_by(2) {
        assert_eq!(memory.read_obj::<u64>(page << 12), Ok(0));
    }
    // Other tests of this process lose memory, too, but less of it.
    assert!(memory::losses() - before < 32);
    // Bytes that were written before may be gone, but bytes that are written now stay.
    memory.write(0, &vec![2; 256 << 12]).unwrap();
    assert_eq!(memory.read_obj::<u64>((pages << 12) - 8), Ok(0x0202_0202_0202_0202));
    drop(memory);
    ftruncate(&fd, pages << 12).unwrap();
    assert_eq!(
        map(&fd, pages << 12).read_obj::<u64>(0x1000),
        Ok(0),
        "a new mapping shows the file"
    );
}
