// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reliable connections between two hosts: what holds on the local path holds on the wire, also where the
//! network loses, repeats, reorders and spoils packets.

use abi::*;

use super::cable::{over_a_cable, Faults};
use super::driver::*;
use super::{datagram, rc};
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;

/// Runs tests of the local path between two hosts.
macro_rules! on_the_wire {
    ($($module:ident::$test:ident,)*) => {$(
        #[test]
        fn $test() {
            let cable = over_a_cable(1, Faults::default(), $module::$test);
            assert_ne!(cable.sent.lock().unwrap().len(), 0, "packets");
        }
    )*};
}

on_the_wire! {
    rc::send_arrives_in_the_receive,
    rc::write_and_read_move_large_messages,
    rc::write_with_immediate_takes_a_receive,
    rc::atomics_answer_what_was_there,
    rc::only_signaled_work_requests_complete,
    rc::rnr_retries_end,
    rc::no_answer_ends_in_retry_exceeded,
    rc::a_receive_that_is_too_small_fails_both_ends,
    rc::a_receive_with_a_bad_key_fails_both_ends,
    rc::a_bad_remote_key_fails_both_ends,
    rc::a_write_with_immediate_and_a_bad_key_fails_its_receive,
    rc::a_write_with_immediate_waits_for_a_receive_before_its_key_is_checked,
    rc::no_bytes_need_no_key,
    rc::a_region_of_no_bytes_gives_access_to_none,
    rc::a_qp_without_remote_access_refuses_the_request,
    rc::a_remote_range_is_checked_before_the_first_byte,
    rc::an_unaligned_atomic_is_an_invalid_request,
    rc::zero_bytes_ask_for_no_key,
    rc::reset_discards_and_the_queues_go_on,
    rc::arming_signals_once_and_misses_nothing,
    rc::events_wait_for_buffers_once_each,
    rc::a_guest_that_goes_leaves_no_trace,
    rc::a_sign_before_the_deadline_is_no_retry,
    datagram::a_datagram_arrives_behind_its_header,
    datagram::the_gsi_sends_its_own_qkey,
}

/// Sends a few messages of each kind, and checks the data of both ends.
fn a_bit_of_everything(pair: &mut Pair, messages: u64) {
    let [a, b] = pair.ends;
    let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
    let word = DATA + (3 << 20);
    pair.b.memory.write(word, &0_u64.to_le_bytes()).unwrap();
    for number in 0..messages {
        let len = (number * 977 % 9000) as usize;
        let data = pair.a.fill(DATA, len, number as u8);
        let part = [sge(DATA, len as u32, a.key)];
        let (there, back) = (DATA + (1 << 20), DATA + (2 << 20));
        pair.b.post_recv(b.qpn, number, &[sge(there + 0x1_0000, 9000, b.key)]);
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &part));
        let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(there, b.key);
        pair.a.post_send(a.qpn, &write);
        let place = [sge(back, len as u32, a.key)];
        pair.a.post_send(a.qpn, &Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &place).rdma(there, b.key));
        let result = [sge(back + 0x1_0000, 8, a.key)];
        pair.a.post_send(a.qpn, &Send::new(4, add, &result).atomic(word, b.key, 1, 0));
        pair.settle_in_time();
        for (wr_id, opcode) in [
            (1, VIRTIO_RDMA_WC_SEND),
            (2, VIRTIO_RDMA_WC_RDMA_WRITE),
            (3, VIRTIO_RDMA_WC_RDMA_READ),
            (4, VIRTIO_RDMA_WC_FETCH_ADD),
        ] {
            assert_eq!(brief(pair.poll_a()), Some((wr_id, OK, opcode)), "message {number}");
        }
        let cqe = pair.poll_b().unwrap();
        assert_eq!(brief(Some(cqe)), Some((number, OK, VIRTIO_RDMA_WC_RECV)));
        assert_eq!(cqe.byte_len as usize, len);
        assert!(pair.poll_a().is_none() && pair.poll_b().is_none());
        for (guest, at) in [(&pair.b, there + 0x1_0000), (&pair.b, there), (&pair.a, back)] {
            assert!(guest.bytes(at, len) == data, "message {number}");
        }
        assert_eq!(pair.a.memory.read_obj::<u64>(back + 0x1_0000).unwrap(), number);
    }
    assert_eq!(pair.b.memory.read_obj::<u64>(word).unwrap(), messages, "each atomic is done once");
}

#[test]
fn datagrams_pass() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = datagram::pair(VIRTIO_RDMA_QPT_UD, datagram::QKEY);
        let [a, b] = pair.ends;
        for number in 0..20_u64 {
            let len = (number * 211 % 4097) as usize;
            let data = pair.a.fill(DATA, len, number as u8);
            pair.b.post_recv(b.qpn, number, &[sge(DATA, 5000, b.key)]);
            let part = [sge(DATA, len as u32, a.key)];
            let send = Send::new(1, VIRTIO_RDMA_WR_SEND, &part);
            pair.a.post_send(a.qpn, &send.ud(gid(2), b.qpn, datagram::QKEY, a.pdn));
            pair.settle();
            assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
            let cqe = pair.poll_b().unwrap();
            assert_eq!((cqe.wr_id, cqe.byte_len as usize, cqe.src_qp), (number, len + 40, a.qpn));
            assert!(pair.b.bytes(DATA + 40, len) == data, "datagram {number}");
        }
    });
}

fn with_faults(faults: Faults, seeds: u64) {
    for seed in 0..seeds {
        let run = std::panic::catch_unwind(|| {
            over_a_cable(seed, faults, || {
                let mut pair = Pair::new();
                a_bit_of_everything(&mut pair, 6);
            });
        });
        assert!(run.is_ok(), "seed {seed}");
    }
}

#[test]
fn every_operation_passes() {
    with_faults(Faults::default(), 1);
}

#[test]
fn what_is_lost_is_sent_again() {
    with_faults(Faults { loss: 20, ..Faults::default() }, 30);
}

#[test]
fn what_is_repeated_has_its_effect_once() {
    with_faults(Faults { repeat: 100, ..Faults::default() }, 30);
}

#[test]
fn what_is_reordered_arrives_in_order() {
    with_faults(Faults { reorder: 50, ..Faults::default() }, 30);
}

#[test]
fn what_is_spoilt_is_dropped_and_counted() {
    with_faults(Faults { corrupt: 20, ..Faults::default() }, 30);
    over_a_cable(7, Faults { corrupt: 100, ..Faults::default() }, || {
        let mut pair = Pair::new();
        a_bit_of_everything(&mut pair, 6);
        assert_ne!(pair.b.device.counter(Counter::BadPacket), 0);
    });
}
