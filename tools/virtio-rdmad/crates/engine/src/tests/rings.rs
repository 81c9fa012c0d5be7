// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings in guest memory: what holds for virtqueues, and what is their own.

use abi::*;

use super::driver::*;
use super::{datagram, rc, threads};
use crate::Counter;

/// The tests of the other layout, once more.
macro_rules! again {
    ($($module:ident: $($test:ident)*;)*) => {
        $($(
            #[test]
            fn $test() {
                with_rings($module::$test);
            }
        )*)*
    };
}

again! {
    rc:
        send_arrives_in_the_receive
        write_and_read_move_large_messages
        write_with_immediate_takes_a_receive
        atomics_answer_what_was_there
        only_signaled_work_requests_complete
        loopback_and_a_qp_connected_to_itself
        a_missing_receive_is_waited_for
        rnr_retries_end
        no_answer_ends_in_retry_exceeded
        a_peer_that_becomes_ready_is_found
        a_receive_that_is_too_small_fails_both_ends
        a_receive_with_a_bad_key_fails_both_ends
        a_bad_local_key_fails_the_requester_alone
        a_bad_remote_key_fails_both_ends
        a_qp_without_remote_access_refuses_the_request
        a_remote_range_is_checked_before_the_first_byte
        an_unaligned_atomic_is_an_invalid_request
        malformed_requests_fail_the_requester
        zero_bytes_ask_for_no_key
        err_flushes_what_is_posted_later
        sqd_drains_and_tells
        events_wait_for_buffers_once_each
        a_guest_that_goes_leaves_no_trace
        a_guest_sends_from_its_own_gids_only
        a_third_qp_cannot_speak_to_a_connected_one
        unreliable_connections_lose_what_finds_no_receive;
    datagram:
        a_datagram_arrives_behind_its_header
        the_gsi_sends_its_own_qkey
        what_cannot_be_delivered_is_dropped
        errors_stop_the_send_queue_alone;
    threads:
        two_guests_converse
        a_guest_comes_and_goes_under_traffic;
}

#[test]
fn inline_data_arrives() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let data: Vec<u8> = (0..INLINE).map(|index| (index * 7) as u8).collect();
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, INLINE, b.key)]);
        pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_SEND, &[]).inline(&data));
        let write = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).inline(&data[..99]);
        pair.a.post_send(a.qpn, &write.rdma(DATA + 4096, b.key));
        pair.settle();
        let cqe = pair.poll_b().unwrap();
        assert_eq!((cqe.wr_id, cqe.byte_len), (1, INLINE));
        assert_eq!(brief(pair.poll_a()), Some((2, 0, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(brief(pair.poll_a()), Some((3, 0, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert_eq!(pair.b.bytes(DATA, INLINE as usize), data);
        assert_eq!(pair.b.bytes(DATA + 4096, 99), data[..99]);
        assert_eq!(pair.a.device.counter(Counter::WriteBytes), 99);
    });
}
