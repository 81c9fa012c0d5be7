// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests page tables: those with levels, those of regions of many GiB, and those with errors.

use std::sync::Arc;

use abi::*;
use memory::GuestMemory;
use testkit::command::{encode, reg_user_mr};
use zerocopy::{FromZeros, IntoBytes};

use super::driver::*;
use crate::{Limits, Next};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const FAULT: u32 = VIRTIO_RDMA_STATUS_FAULT;
/// The address of page tables.
const TABLES: u64 = 24 << 20;
const PAGE: u64 = 0x1000;
const GIB: u64 = 1 << 30;
/// The address by which peers name the first byte.
const IOVA: u64 = 0x7000_0000_0000;

/// Writes a page table with `levels` levels of lists above it. Returns the address of the highest list.
fn write_table(memory: &GuestMemory, at: u64, levels: u8, pages: &[u64]) -> u64 {
    let mut at = at;
    let mut entries = pages.to_vec();
    for _ in 0..levels {
        let mut lists = Vec::new();
        for list in entries.chunks(512) {
            memory.write(at, list.as_bytes()).unwrap();
            lists.push(at);
            at += PAGE;
        }
        entries = lists;
    }
    memory.write(at, entries.as_bytes()).unwrap();
    at
}

/// Returns a request for this number of whole pages.
fn request(pdn: u32, pages: u64, levels: u8, npages: u64) -> virtio_rdma_cmd_reg_user_mr {
    let request = reg_user_mr(pdn, ALL, (0, npages * PAGE), (pages, npages as u32));
    virtio_rdma_cmd_reg_user_mr { virt_addr: IOVA, levels, ..request }
}

fn register(
    guest: &mut Guest,
    request: &virtio_rdma_cmd_reg_user_mr,
) -> Result<virtio_rdma_rsp_mr, u32> {
    guest.command(VIRTIO_RDMA_CMD_REG_USER_MR, request)
}

/// Makes a pair in which guest b has this much memory.
fn pair(memory: u64) -> Pair {
    let (fabric, clock) = fabric();
    let mut a = Guest::new(&fabric, &clock, 1);
    let limits = Limits { max_extents: 4096, ..limits() };
    let sizes = Sizes { memory, ..Sizes::default() };
    let setup = Setup { limits, sizes, ..Setup::default() };
    let mut b = Guest::with_setup(&fabric, &clock, 2, Arc::new(NoWake), setup);
    let kind = VIRTIO_RDMA_QPT_RC;
    let ends = [End::new(&mut a, kind), End::new(&mut b, kind)];
    a.connect(ends[0].qpn, b.gid, ends[1].qpn);
    b.connect(ends[1].qpn, a.gid, ends[0].qpn);
    Pair { clock, fabric, a, b, ends }
}

/// Guest a writes or reads 64 bytes.
fn access(pair: &mut Pair, opcode: u32, key: u32, offset: u64) -> u32 {
    let a = pair.ends[0];
    let send = Send::new(3, opcode, &[sge(DATA, 64, a.key)]).rdma(IOVA + offset, key);
    pair.a.post_send(a.qpn, &send);
    pair.settle();
    pair.poll_a().unwrap().status.into()
}

#[test]
fn a_table_with_levels_says_what_a_flat_one_says() {
    for levels in 0..=VIRTIO_RDMA_MAX_PAGE_LEVELS as u8 {
        let mut pair = pair(32 << 20);
        // No two pages are contiguous.
        let pages: Vec<u64> = (0..600).rev().map(|page| DATA + page * 2 * PAGE).collect();
        let table = write_table(&pair.b.memory, TABLES, levels, &pages);
        let request = request(pair.ends[1].pdn, table, levels, 600);
        let mr = register(&mut pair.b, &request).unwrap();
        for (seed, page) in [(1, 0), (2, 511), (3, 512), (4, 599)] {
            let data = pair.a.fill(DATA, 64, seed);
            let offset = page as u64 * PAGE + 100;
            assert_eq!(access(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, mr.rkey, offset), OK);
            assert_eq!(pair.b.bytes(pages[page] + 100, 64), data, "{levels} levels, page {page}");
        }
        let mut rereg = virtio_rdma_cmd_rereg_mr::new_zeroed();
        (rereg.mrn, rereg.flags, rereg.mr) = (mr.mrn, VIRTIO_RDMA_REREG_TRANS, request);
        (rereg.mr.length, rereg.mr.npages) = (513 * PAGE, 513);
        pair.b.command::<_, ()>(VIRTIO_RDMA_CMD_REREG_MR, &rereg).unwrap();
        let end = 512 * PAGE + 4000;
        assert_eq!(access(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, mr.rkey, end), OK);
        assert_ne!(access(&mut pair, VIRTIO_RDMA_WR_RDMA_WRITE, mr.rkey, 513 * PAGE), OK);
    }
}

#[test]
fn regions_of_many_gib() {
    let mut pair = pair(7 * GIB);
    let first = GIB;
    let mut pages: Vec<u64> = (0..5 * GIB / PAGE).map(|page| first + page * PAGE).collect();
    let (swapped, other) = ((9 * GIB / 2 / PAGE) as usize, pages.len() - 1);
    pages.swap(swapped, other);
    for levels in [0, 1, 2, 3] {
        let table = write_table(&pair.b.memory, 64 << 20, levels, &pages);
        let request = request(pair.ends[1].pdn, table, levels, pages.len() as u64);
        let mr = register(&mut pair.b, &request).unwrap();
        let write = VIRTIO_RDMA_WR_RDMA_WRITE;
        for page in [0, (4 * GIB / PAGE) as usize, swapped - 1, swapped, swapped + 1, other] {
            let data = pair.a.fill(DATA, 64, page as u8);
            assert_eq!(access(&mut pair, write, mr.rkey, page as u64 * PAGE), OK);
            assert_eq!(pair.b.bytes(pages[page], 64), data);
        }
        let data = pair.b.fill(pages[swapped] + 8, 64, 77);
        let offset = swapped as u64 * PAGE + 8;
        assert_eq!(access(&mut pair, VIRTIO_RDMA_WR_RDMA_READ, mr.rkey, offset), OK);
        assert_eq!(pair.a.bytes(DATA, 64), data);
        pair.b.dereg_mr(mr.mrn).unwrap();
    }
}

#[test]
fn tables_that_cannot_be() {
    let mut pair = pair(32 << 20);
    let (pdn, guest) = (pair.ends[1].pdn, &mut pair.b);
    let mut refused = |table, levels, npages, status| {
        let request = request(pdn, table, levels, npages);
        let result = register(guest, &request).map(|mr| mr.mrn);
        assert_eq!(result, Err(status), "{npages} pages, {levels} levels, {table:#x}");
    };
    let end = 32 << 20;
    refused(TABLES, 4, 1, INVALID);
    refused(TABLES, u8::MAX, 1, INVALID);
    for levels in 1..=3 {
        refused(end, levels, 1, FAULT);
        refused(u64::MAX - 7, levels, 1, FAULT);
    }
    // The entries are not aligned. The device finds this before it reads them.
    for levels in 0..=3 {
        refused(TABLES + 4, levels, 1, INVALID);
        refused(end + 1, levels, 1, INVALID);
    }
    // The second entry of the highest list is outside of memory.
    refused(end - 8, 1, 513, FAULT);
    // More than the device registers; and as many pages as 32 bits count none of.
    refused(TABLES, 3, (1 << 28) + 1, INVALID);
    refused(TABLES, 3, 1 << 32, INVALID);
    refused(TABLES, 3, (1 << 32) + 1, INVALID);
}

#[test]
fn entries_that_cannot_be() {
    let mut pair = pair(32 << 20);
    let (pdn, guest) = (pair.ends[1].pdn, &mut pair.b);
    let pages: Vec<u64> = (0..600).map(|page| DATA + page * PAGE).collect();
    for (levels, entry, status) in [
        (1, DATA + 8, INVALID),
        (1, 1 << 40, FAULT),
        (1, u64::MAX - 0xfff, FAULT),
        (2, DATA + 0x800, INVALID),
        (2, 1 << 40, FAULT),
        (3, u64::MAX, INVALID),
        (3, !0xfff, FAULT),
    ] {
        // A page of the region, and the list that names it.
        let mut spoilt = pages.clone();
        spoilt[555] = entry;
        let table = write_table(&guest.memory, TABLES, levels, &spoilt);
        let result = register(guest, &request(pdn, table, levels, 600)).map(|mr| mr.mrn);
        assert_eq!(result, Err(status));
        let table = write_table(&guest.memory, TABLES, levels, &pages);
        guest.memory.write(TABLES + 2 * PAGE + 8, entry.as_bytes()).unwrap();
        let result = register(guest, &request(pdn, table, levels, 600)).map(|mr| mr.mrn);
        assert_eq!(result, Err(status));
    }
    // One page of entries gives more pieces than the device keeps.
    let list: Vec<u64> = (0..512).rev().map(|page| DATA + page * PAGE).collect();
    guest.memory.write(TABLES, list.as_bytes()).unwrap();
    for (at, below) in [(1, 0), (2, 1), (3, 2)] {
        let lists = [TABLES + below * PAGE; 512];
        guest.memory.write(TABLES + at * PAGE, lists.as_bytes()).unwrap();
    }
    let result = register(guest, &request(pdn, TABLES + 3 * PAGE, 3, 1 << 28));
    assert_eq!(result.map(|mr| mr.mrn), Err(VIRTIO_RDMA_STATUS_NO_RESOURCE));
}

#[test]
fn levels_are_reserved_without_the_bit() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    guest.device.reset();
    let bits = 1 << VIRTIO_RDMA_F_RINGS | 1 << VIRTIO_RDMA_F_PAGE_LEVELS;
    guest.start_with(guest.device.features() & !bits);
    let pdn = guest.create_pd();
    let table = write_table(&guest.memory, TABLES, 0, &[DATA, DATA + PAGE]);
    for levels in [0, 3, 4, u8::MAX] {
        register(&mut guest, &request(pdn, table, levels, 2)).unwrap();
    }
}

/// Returns a request for bytes of pages of 2^`shift` bytes, the first at `offset` in the first page.
fn request_of(
    pdn: u32,
    pages: u64,
    shift: u8,
    offset: u64,
    length: u64,
) -> virtio_rdma_cmd_reg_user_mr {
    let mut request = request(pdn, pages, 0, (offset + length).div_ceil(1 << shift));
    (request.page_shift, request.start, request.length) = (shift, IOVA + offset, length);
    request
}

#[test]
fn larger_pages() {
    // Bytes of a page, the first byte in the first page, and the bytes after the last one in the last page.
    for (shift, first, after) in
        [(13, 0, 0), (16, 5, 1), (16, 0xffff, 0x8000), (21, 0x1000, 7), (22, 0, 0x3f_ffff)]
    {
        let mut pair = pair(GIB);
        let (size, pdn) = (1_u64 << shift, pair.ends[1].pdn);
        // No two pages are contiguous, and the order is not that of the addresses.
        let pages: Vec<u64> = (0..9).rev().map(|page| (64 << 20) + page * 2 * size).collect();
        let table = write_table(&pair.b.memory, TABLES, 0, &pages);
        let length = 9 * size - first - after;
        let request = request_of(pdn, table, shift, first, length);
        let mr = register(&mut pair.b, &request).unwrap();
        let write = VIRTIO_RDMA_WR_RDMA_WRITE;
        // The first bytes, bytes on both sides of a border, and the last ones.
        for (seed, offset) in [(1, 0), (2, 3 * size - first - 32), (3, length - 64)] {
            let data = pair.a.fill(DATA, 64, seed);
            assert_eq!(access(&mut pair, write, mr.rkey, offset), OK);
            let found: Vec<u8> = (offset + first..offset + first + 64)
                .flat_map(|at| pair.b.bytes(pages[(at / size) as usize] + at % size, 1))
                .collect();
            assert_eq!(found, data, "pages of {size:#x} bytes, offset {offset:#x}");
        }
        assert_ne!(access(&mut pair, write, mr.rkey, length - 63), OK);
    }
}

#[test]
fn a_larger_page_need_not_be_all_memory() {
    let mut pair = pair(32 << 20);
    let (pdn, guest) = (pair.ends[1].pdn, &mut pair.b);
    let table = write_table(&guest.memory, TABLES, 0, &[0]);
    // A page of 64 MiB: the first half of it is memory of the guest.
    let mut request = request_of(pdn, table, 26, 8 << 20, 24 << 20);
    register(guest, &request).unwrap();
    request.length += 1;
    assert_eq!(register(guest, &request).map(|mr| mr.mrn), Err(FAULT));
}

#[test]
fn larger_pages_that_cannot_be() {
    let mut pair = pair(32 << 20);
    let (pdn, guest) = (pair.ends[1].pdn, &mut pair.b);
    let mut refused = |shift: u8, pages: u64, npages: u32, entry: u64, status| {
        let table = write_table(&guest.memory, TABLES, 0, &[entry; 8]);
        let mut request = request_of(pdn, table, 12, 0, 0x1000);
        (request.page_shift, request.npages, request.length) = (shift, npages, pages << 12);
        let result = register(guest, &request).map(|mr| mr.mrn);
        assert_eq!(result, Err(status), "2^{shift}: {npages} pages for {pages}, at {entry:#x}");
    };
    for shift in [0, 1, 11, 32, 63, 64, 128, u8::MAX] {
        refused(shift, 1, 1, 0, INVALID);
    }
    // As many pages as there are of 4 KiB, one too few and one too many.
    refused(16, 32, 32, 0, INVALID);
    refused(16, 32, 1, 0, INVALID);
    refused(16, 32, 3, 0, INVALID);
    // Addresses of pages of another size, and some that the size takes beyond the last address.
    refused(16, 1, 1, 0x1000, INVALID);
    refused(31, 1, 1, 1 << 30, INVALID);
    refused(16, 1, 1, !0xffff, FAULT);
    refused(31, 1, 1, !0x7fff_ffff, FAULT);
    refused(31, 1, 1, 1 << 31, FAULT);
}

#[test]
fn page_sizes_are_reserved_without_the_bit() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    guest.device.reset();
    let bits = 1 << VIRTIO_RDMA_F_RINGS | 1 << VIRTIO_RDMA_F_PAGE_SIZES;
    guest.start_with(guest.device.features() & !bits);
    let pdn = guest.create_pd();
    let table = write_table(&guest.memory, TABLES, 0, &[DATA, DATA + PAGE]);
    for shift in [0, 11, 12, 16, u8::MAX] {
        let request =
            virtio_rdma_cmd_reg_user_mr { page_shift: shift, ..request(pdn, table, 0, 2) };
        register(&mut guest, &request).unwrap();
    }
}

/// Makes a request available for a region of 1 GiB, whose table takes many turns to read.
fn begin_long(pair: &mut Pair) {
    let npages = GIB / PAGE;
    let pages: Vec<u64> = (0..npages).map(|page| GIB + page * PAGE).collect();
    let table = write_table(&pair.b.memory, 64 << 20, 2, &pages);
    let request = request(pair.ends[1].pdn, table, 2, npages);
    let bytes = encode(VIRTIO_RDMA_CMD_REG_USER_MR, &request);
    pair.b.memory.write(TABLES, &bytes).unwrap();
    pair.b.add(0, &[(TABLES, bytes.len() as u32, false), (TABLES + PAGE, 64, true)]);
}

#[test]
fn a_long_table_does_not_hold_up_others() {
    let mut pair = pair(3 * GIB);
    let b = pair.ends[1];
    begin_long(&mut pair);
    let replies = pair.b.used_index(0);
    assert_eq!(pair.b.device.run(64), Next::Busy);
    let send = Send::new(7, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, b.key)])
        .rdma(DATA, pair.ends[0].key);
    pair.b.post_send(b.qpn, &send);
    while pair.b.used_index(1 + b.cqn as u16) == 0 {
        assert_eq!(pair.b.device.run(64), Next::Busy);
    }
    assert_eq!(pair.b.used_index(0), replies, "the table is still being read");
    pair.b.run();
    assert_eq!(pair.b.used_index(0), replies + 1);
    assert_eq!(pair.b.bytes(TABLES + PAGE, 1), [VIRTIO_RDMA_STATUS_OK as u8]);
}

#[test]
fn a_budget_of_one_is_enough() {
    let mut pair = pair(3 * GIB);
    begin_long(&mut pair);
    let replies = pair.b.used_index(0);
    for _ in 0..2 * GIB / PAGE / 512 {
        pair.b.device.run(1);
    }
    assert_eq!(pair.b.used_index(0), replies + 1);
}

#[test]
fn a_request_under_way_ends_before_its_memory_or_queue_goes() {
    for stop in [false, true] {
        let mut pair = pair(3 * GIB);
        begin_long(&mut pair);
        let replies = pair.b.used_index(0);
        pair.b.device.run(64);
        assert_eq!(pair.b.used_index(0), replies);
        if stop {
            pair.b.device.stop_queue(0);
        } else {
            let memory = pair.b.memory.clone();
            pair.b.device.set_memory(&memory);
        }
        assert_eq!(pair.b.used_index(0), replies + 1);
        assert_eq!(pair.b.bytes(TABLES + PAGE, 1), [VIRTIO_RDMA_STATUS_OK as u8]);
        assert_eq!(pair.b.device.status().mrs, 2);
    }
}

#[test]
fn a_reset_ends_a_request_under_way() {
    let mut pair = pair(3 * GIB);
    begin_long(&mut pair);
    pair.b.device.run(64);
    pair.b.device.reset();
    pair.b.start();
    let pdn = pair.b.create_pd();
    pair.b.reg_mr(pdn, DATA, 0x2000, ALL);
    assert_eq!(pair.b.device.status().mrs, 1);
}
