// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what a device tells of itself.

use std::sync::mpsc::channel;
use std::time::Duration;

use abi::*;

use super::driver::*;
use crate::base::sync::lock;
use crate::{DeviceStatus, QpCount, QpState};

/// How long a thread has to answer that waits for nobody.
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

/// A thread that counts what waits in rings reads the memory of a guest without the lock of a QP. No memory is given
/// away meanwhile.
/// Has the device do what `begin` begins, which does not end while a thread reads memory for the status.
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
