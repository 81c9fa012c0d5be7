// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A QP between several threads of a program and the device.

use crate::{
    bindings::*,
    cq_ring::CqRing,
    errno::Errno,
    model::{
        device::{Completer, Memory, poll},
        objects::{self, Harness, Shared, qp, set_state},
    },
    object::Ref,
    post,
    qp::Qp,
    qp_table::{QpTable, Registration},
    ring::Ring,
    wr::{List, tests::list},
};
use std::{
    collections::BTreeSet,
    env, ptr,
    sync::{Mutex, atomic::*},
    thread,
};

const SENDERS: u64 = 3;
const DEPTH: u32 = 16;

/// Returns how many rounds a test has, TIMES as many if the environment has that variable.
fn rounds() -> u64 {
    let times = env::var("TIMES").map_or(1, |times| times.parse().expect("a number"));
    20_000 * times
}

/// Returns whether a request asks for a completion.
fn signaled(wr_id: u64) -> bool {
    wr_id.is_multiple_of(3)
}

/// Posts a request as soon as there is room.
fn send(qp: Ref<'_, Qp>, wr_id: u64) {
    let send_flags = if signaled(wr_id) { IBV_SEND_SIGNALED } else { 0 };
    let mut wr = ibv_send_wr { wr_id, opcode: IBV_WR_SEND, send_flags, ..Default::default() };
    while let Err(error) = post::send(qp, list(&mut wr)) {
        assert_eq!((error.errno, error.bad_wr), (Errno::ENOMEM, &raw mut wr));
        thread::yield_now();
    }
}

/// Carries out the work requests: completes those that ask for it, and the last of
/// each batch, because a queue of unsignalled requests would stay full otherwise.
fn device(memory: Memory, ring: Ring, mut cq: Completer, count: u64) {
    let mut done = 0u32;
    while u64::from(done) < count {
        let producer = memory.word(0).load(Ordering::Acquire);
        assert!(producer.wrapping_sub(done) <= DEPTH);
        for index in done..producer {
            let wr_id: u64 = memory.read(ring, index, 0);
            if signaled(wr_id) || index + 1 == producer {
                let cqe = virtio_rdma_ring_cqe {
                    wr_id,
                    qp_num: 5,
                    wqe_index: index,
                    ..Default::default()
                };
                while !cq.complete(cqe) {
                    thread::yield_now();
                }
            }
        }
        done = producer;
        thread::yield_now();
    }
}

#[test]
fn threads_share_a_qp() {
    let each = rounds();
    let cq = CqRing::new(DEPTH).unwrap();
    let completer = Completer::new(&cq);
    let mut harness = Harness::with_cq(&[], objects::cq(Some(cq)));
    let cap = ibv_qp_cap { max_send_wr: DEPTH, ..Default::default() };
    let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
    let qp = qp(&mut harness, &attr, 5);
    let request = qp.as_ref().private().request();
    let memory = Memory::at(request.buf_addr);
    let ring = Ring::new(size_of::<virtio_rdma_qp_ring>(), DEPTH, 48).unwrap();
    assert_eq!((ring.offset(), ring.stride() as u32), (request.sq_offset, request.sq_stride));

    let seen = Mutex::new(BTreeSet::new());
    let table = &harness.table;
    let cq = harness.cq.as_ref().private().state();
    let shared = &Shared(qp.as_ref());
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let last = stop.load(Ordering::Acquire);
                    let polled = poll(cq.lock().ring().unwrap(), table, 5);
                    for wc in &polled {
                        assert!(seen.lock().unwrap().insert(wc.wr_id), "twice");
                    }
                    if last && polled.is_empty() {
                        break;
                    }
                    thread::yield_now();
                }
            });
        }
        let device = scope.spawn(move || device(memory, ring, completer, SENDERS * each));
        for sender in 0..SENDERS {
            scope.spawn(move || {
                (sender * each..(sender + 1) * each).for_each(|wr_id| send(shared.0, wr_id));
            });
        }
        device.join().unwrap();
        stop.store(true, Ordering::Release);
    });
    let seen = seen.into_inner().unwrap();
    assert!((0..SENDERS * each).filter(|&id| signaled(id)).all(|id| seen.contains(&id)));
}

/// A device whose ring of CQEs moves while it completes.
struct Moving(Mutex<(Completer, u32)>);

impl Moving {
    /// Completes the next work request of QP 9, which nobody destroys.
    fn complete_next(&self, table: &QpTable) -> bool {
        let mut device = self.0.lock().unwrap();
        let (completer, index) = &mut *device;
        let cqe = virtio_rdma_ring_cqe {
            wr_id: u64::from(*index),
            qp_num: 9,
            wqe_index: *index,
            ..Default::default()
        };
        table.get(9).unwrap().send().post(index.wrapping_add(1));
        let placed = completer.complete(cqe);
        *index += u32::from(placed);
        placed
    }
}

/// Polling finds each completion of a QP once and in order while the CQ is resized. It finds no
/// completion of a QP that was destroyed, though another QP has its number.
#[test]
fn destroy_and_resize_beside_poll() {
    let count = rounds() as u32;
    let ring = CqRing::new(32).unwrap();
    let moving = Moving(Mutex::new((Completer::new(&ring), 0)));
    let harness = Harness::with_cq(&[9], objects::cq(Some(ring)));
    let table = &*harness.table;
    let shared = &Shared(harness.cq.as_ref());
    let lock = harness.cq.as_ref().private().state();
    // Incarnations of QP 7 that are gone, and the end.
    let (gone, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let incarnation = gone.load(Ordering::Relaxed) + 1;
                let cq = shared.0.private().state();
                let qp = Registration::new(table, 7, cq, cq).unwrap();
                for wqe_index in 0..3 {
                    let wr_id = incarnation;
                    let qp_num = 7;
                    let cqe =
                        virtio_rdma_ring_cqe { wr_id, qp_num, wqe_index, ..Default::default() };
                    qp.progress().send().post(wqe_index + 1);
                    moving.0.lock().unwrap().0.complete(cqe);
                }
                drop(qp);
                gone.store(incarnation, Ordering::Release);
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            let mut depth = 32;
            while !stop.load(Ordering::Acquire) {
                depth = 96 - depth;
                let mut new = CqRing::new(depth).unwrap();
                let mut state = lock.lock();
                let old = state.ring().unwrap();
                let mut device = moving.0.lock().unwrap();
                let mut completer = Completer::new(&new);
                if device.0.move_to(&mut completer) {
                    device.0 = completer;
                    new.arm_as(old);
                    *old = new;
                }
                drop((state, device));
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            while moving.0.lock().unwrap().1 != count {
                if !moving.complete_next(table) {
                    thread::yield_now();
                }
            }
        });
        let mut expected = 0;
        while expected < u64::from(count) {
            let before = gone.load(Ordering::Acquire);
            for wc in poll(lock.lock().ring().unwrap(), table, 5) {
                match wc.qp_num {
                    9 => {
                        assert_eq!(wc.wr_id, expected);
                        expected += 1;
                    }
                    _ => assert!(wc.wr_id > before, "of a QP that is destroyed"),
                }
            }
            thread::yield_now();
        }
        stop.store(true, Ordering::Release);
    });
    assert_eq!(harness.progress(9).0, count);
}

#[test]
fn post_in_a_state_that_cannot() {
    let mut harness = Harness::new(&[]);
    let cap = ibv_qp_cap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() };
    let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_UC, cap, ..Default::default() };
    let qp = qp(&mut harness, &attr, 5);
    let mut send = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
    let mut recv = ibv_recv_wr::default();
    for state in IBV_QPS_RESET..=IBV_QPS_RTR {
        set_state(&qp, state);
        let error = post::send(qp.as_ref(), list(&mut send)).unwrap_err();
        assert_eq!((error.errno, error.bad_wr), (Errno::EINVAL, &raw mut send));
        let posted = post::recv(qp.as_ref(), list(&mut recv));
        assert_eq!(posted.is_ok(), state == IBV_QPS_INIT);
    }
    // SAFETY: no request is a valid list.
    assert!(post::send(qp.as_ref(), unsafe { List::new(ptr::null_mut()) }).is_err());
}
