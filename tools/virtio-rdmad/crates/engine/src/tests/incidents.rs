// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The incidents of a guest's objects that the process is told of.

use std::sync::{Arc, Mutex};

use abi::*;
use zerocopy::FromZeros;

use super::cable::{cable, over_a_cable, Faults};
use super::driver::*;
use crate::{Incident, KeyError, RefusedAccess, Wake};

const RC: u32 = VIRTIO_RDMA_QPT_RC;

/// Keeps what it is told.
#[derive(Default)]
struct Notes(Mutex<Vec<Incident>>);

impl Wake for Notes {
    fn wake(&self) {}

    fn note(&self, incident: Incident) {
        self.0.lock().unwrap().push(incident);
    }
}

impl Notes {
    fn take(&self) -> Vec<Incident> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Makes a guest whose process keeps what it is told, connected with another one; and their ends.
fn pair() -> ([Guest; 2], [End; 2], Arc<Notes>) {
    let (mut fabric, clock) = fabric();
    let mut other = Arc::clone(&fabric);
    if let Some(cable) = cable() {
        [fabric, other] = cable.fabrics(|| fabric_config(&clock));
    }
    let notes = Arc::new(Notes::default());
    let mut a = Guest::with_wake(&fabric, &clock, 1, notes.clone());
    let mut b = Guest::new(&other, &clock, 2);
    let ends = [End::new(&mut a, RC), End::new(&mut b, RC)];
    a.connect(ends[0].qpn, b.gid, ends[1].qpn);
    b.connect(ends[1].qpn, a.gid, ends[0].qpn);
    ([a, b], ends, notes)
}

/// A work request that ends with an error is told of once. What is flushed behind it, and what ends well, is not.
#[test]
fn a_work_request_that_fails() {
    let ([mut a, mut b], [end, other], notes) = pair();
    b.post_recv(other.qpn, 1, &[sge(DATA, 8, other.key)]);
    let good = Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, end.key)]);
    let bad = Send::new(2, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, end.key + 1)]);
    for send in [&good, &bad, &good] {
        a.post_send(end.qpn, send);
    }
    settle_in_time(&[&a, &b]);
    let status = VIRTIO_RDMA_WC_LOC_PROT_ERR;
    let refused = Some(refused(end.key + 1, DATA, 8, KeyError::Key));
    assert_eq!(notes.take(), [Incident::Send { qpn: end.qpn, status, refused }]);
}

fn refused(key: u32, address: u64, length: u64, why: KeyError) -> RefusedAccess {
    RefusedAccess { key, address, length, why }
}

/// Returns a key and an address of a guest by which 64 bytes may not be used, for this reason.
fn bad_memory(guest: &mut Guest, end: &End, why: KeyError) -> (u32, u64) {
    let other = guest.create_pd();
    match why {
        KeyError::Key => (end.key ^ 1, DATA),
        KeyError::Free => (guest.create_mr(end.pdn, 1).unwrap().rkey, DATA),
        KeyError::Pd => (guest.reg_mr(other, DATA, 4096, ALL).rkey, DATA),
        KeyError::Access => (guest.reg_mr(end.pdn, DATA, 4096, 0).rkey, DATA),
        KeyError::Range => (end.key, MEMORY - 63),
        KeyError::QpAccess | KeyError::Qp | KeyError::Memory => unreachable!("another test has it"),
    }
}

const REASONS: [KeyError; 5] =
    [KeyError::Key, KeyError::Free, KeyError::Pd, KeyError::Access, KeyError::Range];

/// What is refused is named where a peer asks for it, where a READ brings it, and where a receive has it.
fn refusals_are_named() {
    for why in REASONS {
        let ([mut a, mut b], [end, other], notes) = pair();
        let (key, address) = bad_memory(&mut a, &end, why);
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, other.key)]);
        b.post_send(other.qpn, &write.rdma(address, key));
        settle_in_time(&[&a, &b]);
        let refused = Some(refused(key, address, 64, why));
        let event = VIRTIO_RDMA_EVENT_QP_ACCESS_ERR;
        assert_eq!(notes.take(), [Incident::Qp { qpn: end.qpn, event, refused }]);

        let ([mut a, b], [end, other], notes) = pair();
        let (key, address) = bad_memory(&mut a, &end, why);
        let sges = [sge(DATA, 8, end.key), sge(address, 64, key)];
        a.post_send(end.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &sges).rdma(DATA, other.key));
        settle_in_time(&[&a, &b]);
        let status = VIRTIO_RDMA_WC_LOC_PROT_ERR;
        let refused = Some(RefusedAccess { key, address, length: 64, why });
        assert_eq!(notes.take(), [Incident::Send { qpn: end.qpn, status, refused }]);

        let ([mut a, mut b], [end, other], notes) = pair();
        let (key, address) = bad_memory(&mut a, &end, why);
        a.post_recv(end.qpn, 1, &[sge(DATA, 8, end.key), sge(address, 64, key)]);
        b.post_send(other.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 72, other.key)]));
        settle_in_time(&[&a, &b]);
        let refused = Some(RefusedAccess { key, address, length: 64, why });
        assert_eq!(notes.take(), [Incident::Receive { qpn: end.qpn, status, refused }]);
    }
}

#[test]
fn refusals_of_the_local_path_are_named() {
    refusals_are_named();
    with_rings(refusals_are_named);
}

#[test]
fn refusals_on_the_wire_are_named() {
    over_a_cable(1, Faults::default(), refusals_are_named);
}

/// A window of type 2 is good for the peer of the QP that has bound it alone.
#[test]
fn a_window_of_another_qp_is_named() {
    with_rings(|| {
        let ([mut a, mut b], [end, other], notes) = pair();
        let binder = a.create_qp(end.pdn, end.cqn, RC);
        a.connect(binder, b.gid, 77);
        let window = a.alloc_mw(end.pdn, VIRTIO_RDMA_MW_TYPE_2).unwrap();
        let region = a.reg_mr(end.pdn, DATA, 4096, ALL | VIRTIO_RDMA_ACCESS_MW_BIND);
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (window.rkey, window.rkey ^ 1);
        (bind.addr, bind.length, bind.lkey, bind.access) = (DATA, 4096, region.lkey, WRITE);
        a.post_send(binder, &Send::bind_mw(1, bind));
        settle_in_time(&[&a, &b]);
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, other.key)]);
        b.post_send(other.qpn, &write.rdma(DATA, bind.new_rkey));
        settle_in_time(&[&a, &b]);
        let refused = Some(refused(bind.new_rkey, DATA, 64, KeyError::Qp));
        let event = VIRTIO_RDMA_EVENT_QP_ACCESS_ERR;
        assert_eq!(notes.take(), [Incident::Qp { qpn: end.qpn, event, refused }]);
    });
}

/// A QP that does not let its peer write says so, whatever the key gives.
#[test]
fn a_qp_that_forbids_writes_is_named() {
    let ([mut a, mut b], [end, other], notes) = pair();
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_access_flags = READ;
    a.modify(end.qpn, VIRTIO_RDMA_QP_ACCESS_FLAGS, attr).unwrap();
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, other.key)]);
    b.post_send(other.qpn, &write.rdma(DATA, end.key));
    settle_in_time(&[&a, &b]);
    let refused = Some(refused(end.key, DATA, 64, KeyError::QpAccess));
    let event = VIRTIO_RDMA_EVENT_QP_REQ_ERR;
    assert_eq!(notes.take(), [Incident::Qp { qpn: end.qpn, event, refused }]);
}

/// A QP whose peer asks for what it may not have is told of.
#[test]
fn a_qp_whose_peer_asks_for_too_much() {
    let ([a, mut b], [end, other], notes) = pair();
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, other.key)]);
    b.post_send(other.qpn, &write.rdma(DATA, end.key + 1));
    settle_in_time(&[&a, &b]);
    let event = VIRTIO_RDMA_EVENT_QP_ACCESS_ERR;
    let refused = Some(refused(end.key + 1, DATA, 8, KeyError::Key));
    assert_eq!(notes.take(), [Incident::Qp { qpn: end.qpn, event, refused }]);
}
