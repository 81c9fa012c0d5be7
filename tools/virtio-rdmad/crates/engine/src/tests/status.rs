// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what a device tells of itself.

use std::sync::mpsc::channel;
use std::time::Duration;

use abi::*;

use super::cable::{over_a_cable, Faults};
use super::driver::*;
use crate::base::sync::lock;
use crate::{Clock, DeviceStatus, Incident, KeyError, QpCount, QpPath, QpState, QpStatus};

/// The time in which a thread that waits for nobody has to answer.
const AT_ONCE: Duration = Duration::from_secs(60);

/// Returns the summary of a guest's device while each lock of its QPs, SRQs and CQs is held.
fn summary(guest: &Guest) -> DeviceStatus {
    let hca = guest.device.hca();
    let requesters: Vec<_> = hca.qps.iter().map(|(_, qp)| lock(&qp.requester)).collect();
    let responders: Vec<_> = hca.qps.iter().map(|(_, qp)| lock(&qp.responder)).collect();
    let srqs: Vec<_> = hca.srqs.iter().map(|(_, srq)| lock(srq)).collect();
    let cqs: Vec<_> = hca.cqs.iter().map(|(_, cq)| lock(cq)).collect();
    let (done, is_done) = channel();
    let summary = std::thread::scope(|scope| {
        scope.spawn(move || drop(done.send(guest.device.summary())));
        let summary = is_done.recv_timeout(AT_ONCE);
        drop((requesters, responders, srqs, cqs));
        summary
    });
    summary.expect("it waits for no lock of a queue")
}

/// Checks that the summary has no entry of a QP or an SRQ, and the numbers of the entries that the status has.
fn check(guest: &Guest) -> DeviceStatus {
    let (all, brief) = (guest.device.status(), summary(guest));
    assert!(brief.qps.is_empty() && brief.srqs.is_empty());
    assert_eq!((brief.srq_count, &brief.qp_counts), (all.srqs.len(), &all.qp_counts));
    let hca = guest.device.hca();
    let live_cqs = hca.cqs.iter().filter(|(_, cq)| lock(cq).is_live()).count();
    assert_eq!((brief.cqs, brief.pds, brief.mrs), (live_cqs, all.pds, all.mrs));
    for QpCount { service, state, count } in &brief.qp_counts {
        let qps = all.qps.iter().filter(|qp| qp.service == *service && qp.state == *state);
        assert_eq!(qps.count(), *count, "{service} in {state:?}");
    }
    assert_eq!(brief.qp_counts.iter().map(|of| of.count).sum::<usize>(), all.qps.len());
    brief
}

#[test]
fn a_summary_counts_what_the_status_lists() {
    let test = |rings: bool| {
        let mut pair = Pair::new();
        let a = pair.ends[0];
        let before = check(&pair.a).qp_counts;
        let kinds =
            [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UD, VIRTIO_RDMA_QPT_UC, VIRTIO_RDMA_QPT_UC];
        let qps = kinds.map(|kind| pair.a.create_qp(a.pdn, a.cqn, kind));
        pair.a.make_init(qps[0], 0);
        pair.a.make_init(qps[2], 0);
        pair.a.set_state(qps[0], VIRTIO_RDMA_QPS_ERR).unwrap();
        let srqn = rings.then(|| pair.a.create_srq(a.pdn));
        let of = |status: &DeviceStatus, service, state| {
            let found =
                status.qp_counts.iter().find(|of| of.service == service && of.state == state);
            found.map_or(0, |of| of.count)
        };
        let now = check(&pair.a);
        let counts = [
            of(&now, "UD", QpState::Reset),
            of(&now, "UC", QpState::Init),
            of(&now, "UC", QpState::Reset),
            of(&now, "RC", QpState::Err),
        ];
        assert_eq!(counts, [1; 4]);
        assert_eq!(now.srq_count, usize::from(rings));
        // A device that is loaded has the same.
        let (fabric, _) = fabric();
        let device = fabric.add_device(pair.a.config());
        pair.a.load(&device, &pair.a.device.save()).unwrap();
        assert_eq!(device.summary().qp_counts, now.qp_counts);
        assert_eq!((device.summary().cqs, device.summary().srq_count), (now.cqs, now.srq_count));
        for qpn in qps {
            pair.a.destroy_qp(qpn).unwrap();
        }
        if let Some(srqn) = srqn {
            pair.a.destroy_srq(srqn).unwrap();
        }
        assert_eq!(check(&pair.a).qp_counts, before);
        pair.a.device.reset();
        let none = check(&pair.a);
        assert!(none.qp_counts.is_empty() && none.cqs == 0);
    };
    test(false);
    with_rings(|| test(true));
}

/// Makes the device carry out the operation that `begin` begins, which does not end while a thread reads memory for the
/// status. Such a thread counts the work requests that wait in rings without the lock of a QP, so no memory is given
/// away meanwhile.
fn waits_for_the_status(begin: impl FnOnce(&Guest)) -> Pair {
    let pair = Pair::new();
    let device = &pair.b.device;
    let reading = device.hca().status.lock().unwrap();
    begin(&pair.b);
    for _ in 0..100 {
        device.run(64);
    }
    assert!(!device.is_settled());
    drop(reading);
    for _ in 0..10 {
        device.run(64);
    }
    assert!(device.is_settled());
    pair
}

#[test]
fn a_freeze_waits_for_the_status() {
    let pair = waits_for_the_status(|guest| guest.device.begin_freeze());
    pair.b.device.thaw();
}

#[test]
fn changes_of_memory_and_resets_wait_for_the_status() {
    waits_for_the_status(|guest| guest.device.begin_memory(&guest.memory));
    waits_for_the_status(|guest| guest.device.begin_reset());
}

fn of_qp(guest: &Guest, qpn: u32) -> QpStatus {
    guest.device.status().qps.into_iter().find(|qp| qp.qpn == qpn).unwrap()
}

/// The status of a QP has where its connection is, and what ended it.
fn follows_a_connection(path: QpPath) {
    // An image does not have the last error.
    without_upgrades();
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let idle = of_qp(&pair.a, a.qpn).connection.unwrap();
    pair.b.post_recv(b.qpn, 1, &[sge(DATA, 3000, b.key)]);
    // Three packets of 1024 bytes.
    pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 3000, a.key)]));
    settle_in_time(&[&pair.a, &pair.b]);
    let [from, to] = [of_qp(&pair.a, a.qpn), of_qp(&pair.b, b.qpn)];
    let (sent, received) = (from.connection.unwrap(), to.connection.unwrap());
    assert_eq!([sent.path, received.path], [path; 2]);
    assert_eq!([sent.sq_psn, sent.sq_una], [idle.sq_psn + 3; 2]);
    assert_eq!((received.rq_psn, received.sq_psn), (sent.sq_psn, sent.rq_psn));
    assert_eq!((sent.retries_left, sent.rnr_retries_left), (3, 3));
    assert!(from.last_error.is_none() && to.last_error.is_none());

    let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
    pair.a.post_send(a.qpn, &write.rdma(DATA, b.key ^ 1));
    settle_in_time(&[&pair.a, &pair.b]);
    pair.clock.advance_to(pair.clock.now() + Duration::from_secs(5));
    let [from, to] = [of_qp(&pair.a, a.qpn), of_qp(&pair.b, b.qpn)];
    let (from, to) = (from.last_error.unwrap(), to.last_error.unwrap());
    let status = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    assert_eq!(from.incident, Incident::Send { qpn: a.qpn, status, refused: None });
    let Incident::Qp { refused: Some(refused), .. } = to.incident else { panic!("{to:?}") };
    assert_eq!((refused.key, refused.why), (b.key ^ 1, KeyError::Key));
    assert!(to.age >= Duration::from_secs(5) && to.age < Duration::from_secs(6), "{to:?}");
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    assert_eq!(of_qp(&pair.a, a.qpn).last_error, None);
}

#[test]
fn a_connection_of_the_local_path_is_followed() {
    follows_a_connection(QpPath::Local);
    with_rings(|| follows_a_connection(QpPath::Local));
}

#[test]
fn a_connection_on_the_wire_is_followed() {
    over_a_cable(1, Faults::default(), || follows_a_connection(QpPath::Wire));
}

/// A requester that gets no answer has fewer retries, and has not sent what is behind the message under way.
#[test]
fn retries_that_are_left_are_told() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        let before = of_qp(&pair.a, a.qpn).connection.unwrap();
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
        let after = loop {
            let next = settle(&[&pair.a, &pair.b]).unwrap();
            let after = of_qp(&pair.a, a.qpn).connection.unwrap();
            if after.retries_left != before.retries_left {
                break after;
            }
            pair.clock.advance_to(next);
        };
        assert_eq!((after.sq_una, after.sq_psn), (before.sq_una, before.sq_psn + 1));
        assert_eq!((before.retries_left, after.retries_left), (3, 2));
    });
}
