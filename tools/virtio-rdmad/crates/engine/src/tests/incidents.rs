// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the process is told that happens to objects of a guest.

use std::sync::{Arc, Mutex};

use abi::*;

use super::driver::*;
use crate::{Incident, Wake};

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
    let (fabric, clock) = fabric();
    let notes = Arc::new(Notes::default());
    let mut a = Guest::with_wake(&fabric, &clock, 1, notes.clone());
    let mut b = Guest::new(&fabric, &clock, 2);
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
    assert_eq!(notes.take(), [Incident::Send { qpn: end.qpn, status }]);
}

/// A QP whose peer asks for what it may not have is told of.
#[test]
fn a_qp_whose_peer_asks_for_too_much() {
    let ([a, mut b], [end, other], notes) = pair();
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, other.key)]);
    b.post_send(other.qpn, &write.rdma(DATA, end.key + 1));
    settle_in_time(&[&a, &b]);
    let event = VIRTIO_RDMA_EVENT_QP_ACCESS_ERR;
    assert_eq!(notes.take(), [Incident::Qp { qpn: end.qpn, event }]);
}
