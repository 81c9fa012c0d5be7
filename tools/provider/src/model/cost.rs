// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Measures what posting and polling cost, in a release build:
//! `cargo test --release -- --ignored --nocapture cost`.

use crate::{
    bindings::*,
    cq_ring::CqRing,
    model::{
        device::Completer,
        objects::{Harness, context, cq, cq_ex, qp},
        opened,
    },
    object::Ref,
    post,
    qp::Qp,
    qp_table::{QueueProgress, Registration},
    wr::List,
    wr_ex,
};
use std::{hint::black_box, mem::MaybeUninit, time::Instant};

const ROUNDS: u32 = 2_000;
const DEPTH: u32 = 128;

fn attr() -> ibv_qp_init_attr_ex {
    let cap = ibv_qp_cap {
        max_send_wr: DEPTH,
        max_recv_wr: DEPTH,
        max_send_sge: 4,
        max_recv_sge: 1,
        max_inline_data: 64,
    };
    ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() }
}

/// Returns the median of the rounds, in nanoseconds for one of `DEPTH` requests.
fn each(mut rounds: Vec<u128>) -> f64 {
    rounds.sort_unstable();
    rounds[rounds.len() / 2] as f64 / f64::from(DEPTH)
}

/// Posts a request again and again. Returns the nanoseconds that one takes.
fn post(qp: Ref<'_, Qp>, send: &QueueProgress, wr: &mut ibv_send_wr) -> f64 {
    let round = |_| {
        let start = Instant::now();
        for _ in 0..DEPTH {
            // SAFETY: one valid request.
            let list = unsafe { List::new(black_box(&raw mut *wr)) };
            assert!(post::send(qp, list).is_ok());
        }
        let spent = start.elapsed().as_nanos();
        send.set_done(send.done().wrapping_add(DEPTH));
        spent
    };
    each((0..ROUNDS).map(round).collect())
}

#[test]
#[ignore = "a measurement"]
fn cost_of_post_send() {
    let mut harness = Harness::new(&[]);
    let qp = qp(&mut harness, &attr(), 5);
    let send = harness.table.get(5).unwrap().send();
    let data = [7u8; 64];
    let addr = data.as_ptr().expose_provenance() as u64;
    for (name, flags, length) in [
        ("1 SGE", IBV_SEND_SIGNALED, 64),
        ("inline, 2 bytes", IBV_SEND_SIGNALED | IBV_SEND_INLINE, 2),
        ("inline, 64 bytes", IBV_SEND_SIGNALED | IBV_SEND_INLINE, 64),
    ] {
        let mut sge = ibv_sge { addr, length, lkey: 1 };
        let mut wr = ibv_send_wr {
            opcode: IBV_WR_RDMA_WRITE,
            send_flags: flags,
            sg_list: &raw mut sge,
            num_sge: 1,
            ..Default::default()
        };
        println!("post_send, {name}: {:.1} ns", post(qp.as_ref(), send, &mut wr));
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_wr() {
    let mut harness = Harness::new(&[]);
    let qp = qp(&mut harness, &attr(), 5);
    // SAFETY: the QP has rings, and nobody else has it.
    unsafe { wr_ex::install(qp.as_ref(), opened::library()) };
    let send = harness.table.get(5).unwrap().send();
    let data = [7u8; 64];
    let ex = qp.as_ref().as_ptr().cast::<ibv_qp_ex>();
    for batch in [1, 16] {
        for inline in [false, true] {
            let round = |_| {
                let start = Instant::now();
                for _ in 0..DEPTH / batch {
                    // SAFETY: calls as ibv_wr_post(3) has them.
                    unsafe {
                        let ex = black_box(ex);
                        (*ex).wr_start.unwrap()(ex);
                        for wr_id in 0..batch {
                            ((*ex).wr_id, (*ex).wr_flags) = (wr_id.into(), IBV_SEND_SIGNALED);
                            (*ex).wr_rdma_write.unwrap()(ex, 1, 2);
                            if inline {
                                let at = data.as_ptr().cast_mut().cast();
                                (*ex).wr_set_inline_data.unwrap()(ex, at, 64);
                            } else {
                                (*ex).wr_set_sge.unwrap()(ex, 1, 2, 64);
                            }
                        }
                        assert_eq!((*ex).wr_complete.unwrap()(ex), 0);
                    }
                }
                let spent = start.elapsed().as_nanos();
                send.set_done(send.done().wrapping_add(DEPTH));
                spent
            };
            let each = each((0..ROUNDS).map(round).collect());
            println!("ibv_wr, {batch} at a time, inline {inline}: {each:.1} ns");
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_extended_poll() {
    let context = context();
    let cq = cq_ex(CqRing::new(DEPTH).unwrap(), 0, &context);
    let table = context.as_ref().private().qp_table.as_ref().unwrap();
    let state = cq.as_ref().private().state();
    let _registration = Registration::new(table, 5, state, state).unwrap();
    let mut device = Completer::of(&cq);
    let ex = cq.as_ref().as_ptr().cast::<ibv_cq_ex>();
    for batch in [1, 16] {
        let round = |_| {
            for _ in 0..DEPTH {
                let wqe_index = device.producer;
                let cqe = virtio_rdma_ring_cqe { qp_num: 5, wqe_index, ..Default::default() };
                assert!(device.complete_posted(table, cqe));
            }
            let start = Instant::now();
            for _ in 0..DEPTH / batch {
                let mut attr = ibv_poll_cq_attr::default();
                // SAFETY: calls as ibv_create_cq_ex(3) has them.
                unsafe {
                    let ex = black_box(ex);
                    assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), 0);
                    for _ in 1..batch {
                        assert_eq!((*ex).next_poll.unwrap()(ex), 0);
                    }
                    (*ex).end_poll.unwrap()(ex);
                }
            }
            start.elapsed().as_nanos()
        };
        let each = each((0..ROUNDS).map(round).collect());
        println!("extended poll, {batch} at a time: {each:.1} ns");
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_poll_cq() {
    let harness = Harness::new(&[5]);
    let cq = cq(Some(CqRing::new(DEPTH).unwrap()));
    let (table, lock) = (&*harness.table, cq.as_ref().private().state());
    let mut device = Completer::of(&cq);
    for batch in [1, 16] {
        let mut entries = [MaybeUninit::<ibv_wc>::uninit(); 16];
        let round = |_| {
            for _ in 0..DEPTH {
                let wqe_index = device.producer;
                let cqe = virtio_rdma_ring_cqe { qp_num: 5, wqe_index, ..Default::default() };
                assert!(device.complete_posted(&harness.table, cqe));
            }
            let start = Instant::now();
            let mut polled = 0;
            while polled < DEPTH as usize {
                let entries = black_box(&mut entries[..batch]);
                polled += lock.lock().ring().unwrap().poll(move |cqe| table.complete(cqe), entries);
            }
            start.elapsed().as_nanos()
        };
        let each = each((0..ROUNDS).map(round).collect());
        println!("poll_cq, {batch} at a time: {each:.1} ns");
    }
}
