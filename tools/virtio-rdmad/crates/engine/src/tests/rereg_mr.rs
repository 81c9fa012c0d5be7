// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what REREG_MR replaces, and that it replaces nothing when it fails.

use std::sync::Arc;

use abi::*;
use testkit::command::reg_user_mr;
use zerocopy::FromZeros;

use super::driver::*;
use crate::Limits;

const TRANS: u32 = VIRTIO_RDMA_REREG_TRANS;
const PD: u32 = VIRTIO_RDMA_REREG_PD;
const ACCESS: u32 = VIRTIO_RDMA_REREG_ACCESS;
const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const REFUSED: u32 = VIRTIO_RDMA_WC_REM_ACCESS_ERR;

/// The arguments of a REREG_MR of guest b.
struct Rereg {
    mrn: u32,
    flags: u32,
    pdn: u32,
    access: u32,
    pages: Vec<u64>,
}

impl Rereg {
    fn ask(&self, guest: &mut Guest) -> Result<(), u32> {
        let mut request = virtio_rdma_cmd_rereg_mr::new_zeroed();
        (request.mrn, request.flags) = (self.mrn, self.flags);
        let npages = self.pages.len() as u32;
        let (memory, table) = ((0, 0x1000 * u64::from(npages)), guest.memory_for(&self.pages));
        request.mr = reg_user_mr(self.pdn, self.access, memory, (table, npages));
        request.mr.virt_addr = 0x10_0000;
        guest.command(VIRTIO_RDMA_CMD_REREG_MR, &request)
    }
}

/// Writes 64 bytes from guest a by a key of guest b.
fn write(pair: &mut Pair, key: u32, at: u64) -> u32 {
    let a = pair.ends[0];
    let send = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, a.key)]).rdma(at, key);
    pair.a.post_send(a.qpn, &send);
    pair.settle();
    pair.poll_a().unwrap().status.into()
}

/// A region of two pages of guest b, and what changes nothing of it.
fn region(pair: &mut Pair) -> (virtio_rdma_rsp_mr, Rereg) {
    let pdn = pair.ends[1].pdn;
    let mr = pair.b.reg_mr(pdn, DATA, 0x2000, ALL);
    let pages = vec![DATA + 0x9000, DATA + 0x5000, DATA + 0x6000];
    (mr, Rereg { mrn: mr.mrn, flags: TRANS, pdn, access: ALL, pages })
}

#[test]
pub fn another_translation_takes_the_place_of_the_first() {
    let mut pair = Pair::new();
    let (mr, rereg) = region(&mut pair);
    assert_eq!(write(&mut pair, mr.rkey, DATA), OK);
    rereg.ask(&mut pair.b).unwrap();
    let data = pair.a.fill(DATA, 64, 7);
    assert_eq!(write(&mut pair, mr.rkey, 0x10_1000), OK);
    assert_eq!(pair.b.bytes(DATA + 0x5000, 64), data);
    assert_eq!(write(&mut pair, mr.rkey, DATA), REFUSED, "the old name is gone");
}

#[test]
pub fn access_and_pd_are_replaced_alone() {
    let mut pair = Pair::new();
    let (mr, rereg) = region(&mut pair);
    Rereg { flags: ACCESS, access: LOCAL | READ, ..rereg }.ask(&mut pair.b).unwrap();
    assert_eq!(write(&mut pair, mr.rkey, DATA), REFUSED);
    let mut pair = Pair::new();
    let (mr, rereg) = region(&mut pair);
    let (before, after) = (rereg.pdn, pair.b.create_pd());
    let rereg = Rereg { flags: PD, pdn: after, ..rereg };
    rereg.ask(&mut pair.b).unwrap();
    let destroy = virtio_rdma_cmd_destroy_pd { pdn: after };
    let busy = pair.b.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy);
    assert_eq!(busy, Err(VIRTIO_RDMA_STATUS_BUSY));
    let back = Rereg { flags: PD, pdn: before, pages: Vec::new(), ..rereg };
    back.ask(&mut pair.b).unwrap();
    assert_eq!(write(&mut pair, mr.rkey, DATA), OK, "it is back");
    Rereg { flags: PD | ACCESS | TRANS, pdn: after, ..region(&mut pair).1 }
        .ask(&mut pair.b)
        .unwrap();
    rereg.ask(&mut pair.b).unwrap();
    assert_eq!(write(&mut pair, mr.rkey, DATA), REFUSED, "another PD");
}

#[test]
pub fn a_refusal_leaves_the_region_as_it_was() {
    let mut pair = Pair::new();
    let (mr, rereg) = region(&mut pair);
    let (pages, pdn, mrn) = (rereg.pages.clone(), rereg.pdn, rereg.mrn);
    let mut refused = |status, change: &dyn Fn(&mut Rereg)| {
        let mut rereg = Rereg { mrn, flags: TRANS, pdn, access: ALL, pages: pages.clone() };
        change(&mut rereg);
        assert_eq!(rereg.ask(&mut pair.b), Err(status));
        assert_eq!(write(&mut pair, mr.rkey, DATA), OK);
    };
    refused(VIRTIO_RDMA_STATUS_NO_OBJECT, &|rereg| rereg.mrn = 99);
    refused(VIRTIO_RDMA_STATUS_INVAL, &|rereg| rereg.flags = 0);
    refused(VIRTIO_RDMA_STATUS_INVAL, &|rereg| rereg.flags = 8);
    refused(VIRTIO_RDMA_STATUS_NO_OBJECT, &|rereg| (rereg.flags, rereg.pdn) = (PD, 99));
    refused(VIRTIO_RDMA_STATUS_INVAL, &|rereg| (rereg.flags, rereg.access) = (ACCESS, WRITE));
    refused(VIRTIO_RDMA_STATUS_INVAL, &|rereg| rereg.pages[1] += 1);
    refused(VIRTIO_RDMA_STATUS_FAULT, &|rereg| rereg.pages[1] = 1 << 40);
    let dma = pair.b.get_dma_mr(pdn, ALL).unwrap();
    let fast = pair.b.create_mr(pdn, 4).unwrap();
    for mrn in [dma.mrn, fast.mrn] {
        let rereg = Rereg { mrn, flags: TRANS, pdn, access: ALL, pages: pages.clone() };
        assert_eq!(rereg.ask(&mut pair.b), Err(VIRTIO_RDMA_STATUS_INVAL));
    }
}

/// A new translation of no bytes takes all access away.
#[test]
fn another_translation_may_have_no_bytes() {
    let mut pair = Pair::new();
    let (mr, rereg) = region(&mut pair);
    Rereg { flags: TRANS, pages: Vec::new(), ..rereg }.ask(&mut pair.b).unwrap();
    assert_eq!(write(&mut pair, mr.rkey, DATA), REFUSED);
}

/// The device keeps the pages that it has if it has no room for others.
#[test]
fn pages_for_which_there_is_no_room_are_refused() {
    let (fabric, clock) = fabric();
    let limits = Limits { max_extents: 8, ..limits() };
    let setup = Setup { limits, ..Setup::default() };
    let mut guest = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
    let pdn = guest.create_pd();
    let mr = guest.reg_mr(pdn, DATA, 0x1000, ALL);
    // No page follows the one before.
    let pages = |count: u64| (0..count).map(|page| DATA + 0x2000 * page).collect();
    let rereg = |count| Rereg { mrn: mr.mrn, flags: TRANS, pdn, access: ALL, pages: pages(count) };
    assert_eq!(rereg(9).ask(&mut guest), Err(VIRTIO_RDMA_STATUS_NO_RESOURCE));
    assert_eq!(rereg(7).ask(&mut guest), Ok(()));
}
