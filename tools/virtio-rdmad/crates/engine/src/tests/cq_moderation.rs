// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests completion events that are held back.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use abi::*;
use zerocopy::FromZeros;

use super::driver::*;
use crate::queue::cq::Cqe;
use crate::transport::batch::CompletionBatch;
use crate::Next;

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const NEXT: u32 = VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION;
const SOLICITED: u32 = VIRTIO_RDMA_NOTIFY_SOLICITED;
const PERIOD: u16 = 1000;
const AFTERWARDS: Duration = Duration::from_millis(1);

/// Makes a connected pair. The CQ of B is armed, and holds its event back until it has 4 completions.
fn moderated() -> Pair {
    let mut pair = Pair::new();
    let b = pair.ends[1];
    pair.b.modify_cq(b.cqn, 4, PERIOD).unwrap();
    pair.b.arm_cq(b.cqn, NEXT).unwrap();
    pair
}

/// Sends messages from A to B, and polls the CQ of B. Returns the number of events that B has got so far.
fn send(pair: &mut Pair, count: u32, flags: u32) -> u32 {
    let [a, b] = pair.ends;
    for _ in 0..count {
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.a.post_send(a.qpn, &Send::new(1, SEND, &[]).flags(flags));
    }
    pair.settle();
    for _ in 0..count {
        assert_eq!(brief(pair.poll_b()).unwrap().1, VIRTIO_RDMA_WC_SUCCESS);
    }
    pair.b.cq_signals(b.cqn)
}

#[test]
fn an_event_comes_with_the_last_of_so_many() {
    with_rings(|| {
        let mut pair = moderated();
        let b = pair.ends[1];
        assert_eq!(send(&mut pair, 1, 0), 0);
        assert_eq!(send(&mut pair, 2, 0), 0);
        assert_eq!(send(&mut pair, 1, 0), 1);
        // The CQ is not armed for another event.
        assert_eq!(send(&mut pair, 9, 0), 1);
        pair.settle_in_time();
        assert_eq!(pair.b.cq_signals(b.cqn), 1);
        // Completions from before the CQ was armed do not count. Many at once count.
        pair.b.arm_cq(b.cqn, NEXT).unwrap();
        assert_eq!(send(&mut pair, 3, 0), 1);
        assert_eq!(send(&mut pair, 7, 0), 2);
        pair.b.arm_cq(b.cqn, NEXT).unwrap();
        assert_eq!(send(&mut pair, 4, 0), 3);
        pair.settle_in_time();
        assert_eq!(pair.b.cq_signals(b.cqn), 3);
    });
}

#[test]
fn an_event_comes_after_a_while() {
    with_rings(|| {
        let mut pair = moderated();
        let b = pair.ends[1];
        let begin = pair.clock.passed();
        assert_eq!(send(&mut pair, 1, 0), 0);
        let time = pair.settle().expect("a timer");
        pair.clock.advance_to(time.checked_sub(Duration::from_micros(1)).unwrap());
        // The period begins with the first completion, not with the last one.
        assert_eq!(send(&mut pair, 2, 0), 0);
        assert_eq!(pair.settle(), Some(time));
        pair.clock.advance_to(time);
        assert_eq!(pair.settle(), None);
        assert_eq!(pair.clock.passed(), begin + AFTERWARDS);
        assert_eq!(pair.b.cq_signals(b.cqn), 1);
        pair.b.arm_cq(b.cqn, NEXT).unwrap();
        assert_eq!(send(&mut pair, 1, 0), 1);
        pair.settle_in_time();
        assert_eq!(pair.b.cq_signals(b.cqn), 2);
    });
}

#[test]
fn a_peer_wakes_the_thread_that_waits() {
    with_rings(|| {
        let mut pair = moderated();
        let [a, b] = pair.ends;
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.settle();
        pair.a.post_send(a.qpn, &Send::new(1, SEND, &[]));
        pair.a.run();
        assert!(matches!(pair.b.run(), Next::At(_)));
    });
}

#[test]
fn solicited_events_are_held_back_too() {
    with_rings(|| {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        pair.b.modify_cq(b.cqn, 4, PERIOD).unwrap();
        pair.b.arm_cq(b.cqn, SOLICITED).unwrap();
        assert_eq!(send(&mut pair, 9, 0), 0);
        assert_eq!(pair.settle(), None);
        assert_eq!(send(&mut pair, 1, VIRTIO_RDMA_SEND_SOLICITED), 0);
        assert_eq!(send(&mut pair, 2, 0), 0);
        assert_eq!(send(&mut pair, 1, 0), 1);
    });
}

#[test]
fn either_limit_of_0_ends_it() {
    with_rings(|| {
        for (count, period) in [(0, PERIOD), (4, 0), (0, 0), (1, PERIOD), (2, PERIOD)] {
            let mut pair = moderated();
            let b = pair.ends[1];
            assert_eq!(send(&mut pair, 2, 0), 0);
            pair.b.modify_cq(b.cqn, count, period).unwrap();
            assert_eq!(pair.settle(), None);
            assert_eq!(pair.b.cq_signals(b.cqn), 1);
            if count < 2 || period == 0 {
                pair.b.arm_cq(b.cqn, NEXT).unwrap();
                assert_eq!(send(&mut pair, 1, 0), 2);
            }
        }
        let mut pair = moderated();
        let b = pair.ends[1];
        pair.b.modify_cq(b.cqn, u16::MAX, u16::MAX).unwrap();
        assert_eq!(send(&mut pair, 1, 0), 0);
        // The period of the event that is held back changes as well.
        pair.b.modify_cq(b.cqn, 9, PERIOD).unwrap();
        let time = pair.settle().expect("a timer");
        pair.clock.advance_to(time);
        pair.settle();
        assert_eq!(pair.clock.passed(), AFTERWARDS);
        assert_eq!(pair.b.cq_signals(b.cqn), 1);
    });
}

#[test]
fn another_ring_holds_the_same_event_back() {
    with_rings(|| {
        let mut pair = moderated();
        let b = pair.ends[1];
        assert_eq!(send(&mut pair, 2, 0), 0);
        pair.b.resize_cq(b.cqn, 256).unwrap();
        assert_eq!(send(&mut pair, 1, 0), 0);
        assert_eq!(send(&mut pair, 1, 0), 1);
    });
}

#[test]
fn what_is_held_back_ends_with_its_cq() {
    with_rings(|| {
        let mut pair = moderated();
        let b = pair.ends[1];
        assert_eq!(send(&mut pair, 1, 0), 0);
        pair.b.destroy_qp(b.qpn).unwrap();
        pair.b.destroy_cq(b.cqn).unwrap();
        assert_eq!(pair.settle(), None);
        let mut pair = moderated();
        assert_eq!(send(&mut pair, 1, 0), 0);
        pair.b.device.reset();
        assert_eq!(pair.settle(), None);
    });
}

#[test]
fn what_has_no_moderation() {
    let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
    let unsupported = Err(VIRTIO_RDMA_STATUS_UNSUPPORTED);
    let mut pair = Pair::new();
    let b = pair.ends[1];
    assert_eq!(pair.b.modify_cq(b.cqn, 4, PERIOD), unsupported);
    with_rings(|| {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        for cqn in [b.cqn + 1, 4000, 1 << 16, u32::MAX] {
            assert_eq!(pair.b.modify_cq(cqn, 4, PERIOD), none);
        }
        pair.b.device.reset();
        let features = pair.b.device.features() & !(1 << VIRTIO_RDMA_F_CQ_MODERATION);
        pair.b.start_with(features);
        let cqn = pair.b.create_cq(8);
        assert_eq!(pair.b.modify_cq(cqn, 4, PERIOD), unsupported);
    });
}

/// A panic in the turn of a guest ends its round. Its peers are told of what was placed before.
#[test]
fn a_round_that_panics_tells_of_its_completions() {
    with_rings(|| {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        pair.b.arm_cq(b.cqn, NEXT).unwrap();
        pair.settle();
        let before = pair.b.cq_signals(b.cqn);
        let hca = Arc::clone(pair.b.device.hca());
        let cq = u16::try_from(b.cqn).unwrap();
        let turn = AssertUnwindSafe(|| {
            let mut batch = CompletionBatch::default();
            batch.complete_receive(&hca, cq, Cqe::new_zeroed(), false);
            batch.place_completions();
            panic!("in the turn of a guest");
        });
        assert!(catch_unwind(turn).is_err());
        assert_eq!(pair.b.cq_signals(b.cqn), before + 1);
    });
}

#[test]
fn errors_of_a_cq_are_not_held_back() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.b.modify_cq(b.cqn, u16::MAX, u16::MAX).unwrap();
        pair.b.arm_cq(b.cqn, NEXT).unwrap();
        for _ in 0..=RING {
            pair.b.post_recv(b.qpn, 1, &[]);
            pair.a.post_send(a.qpn, &Send::new(1, SEND, &[]));
            pair.settle();
            pair.poll_a().unwrap();
        }
        let events: Vec<_> = std::iter::from_fn(|| pair.b.poll_event()).collect();
        assert!(events.contains(&(VIRTIO_RDMA_EVENT_CQ_ERR, b.cqn)), "{events:?}");
        assert!(events.contains(&(VIRTIO_RDMA_EVENT_QP_FATAL, b.qpn)), "{events:?}");
    });
}
