// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests rings in guest memory: what they have in common with virtqueues, and what only rings have.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use abi::*;
use memory::GuestMemory;
use testkit::CqRing;
use zerocopy::IntoBytes;

use super::driver::*;
use super::hostile::Random;
use super::{datagram, fast_reg, hostile, mcast, rc, threads, uc, vlan};
use crate::{Counter, Limits, Next};

/// Runs the tests of virtqueues once more, with rings.
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
        a_write_with_immediate_does_not_look_at_the_memory_of_its_receive
        the_rights_of_a_qp_are_checked_before_there_is_a_receive
        an_atomic_of_a_word_that_is_unaligned_in_memory_is_an_invalid_request
        a_peer_that_becomes_ready_is_found
        reset_leads_to_rtr_at_once
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
        memory_is_the_owners_again_with_its_flush
        sqd_drains_and_tells
        a_change_in_sqd_keeps_the_promise
        a_qp_that_leaves_sqd_early_tells_nothing
        an_error_in_sqd_ends_its_promise
        events_wait_for_buffers_once_each
        a_cq_that_overflows_fails_its_qps
        a_guest_that_goes_leaves_no_trace
        a_guest_sends_from_its_own_gids_only
        a_third_qp_cannot_speak_to_a_connected_one;
    fast_reg:
        a_region_gets_pages_and_loses_them
        a_free_region_gives_no_access
        requests_in_the_wrong_state_or_with_wrong_values_fail
        other_keys_are_not_invalidated
        the_peer_invalidates
        a_read_invalidates_its_own_side
        work_requests_of_one_queue_are_ordered
        an_invalidation_waits_for_a_read
        regions_follow_the_memory_map;
    uc:
        every_operation_arrives
        what_finds_no_receive_is_lost
        what_the_responder_refuses_is_lost
        a_message_cut_off_is_lost
        errors_of_the_sender_stop_its_queue_alone;
    datagram:
        a_datagram_arrives_behind_its_header
        the_gsi_sends_its_own_qkey
        what_cannot_be_delivered_is_dropped
        errors_stop_the_send_queue_alone;
    hostile:
        random_commands_are_answered;
    mcast:
        a_datagram_reaches_every_member
        members_take_their_qkey_only
        loopback_is_blocked_if_asked
        limits_and_errors
        a_member_that_goes_is_forgotten
        ports_count_what_they_carry;
    threads:
        two_guests_converse
        a_guest_comes_and_goes_under_traffic;
    vlan:
        a_gid_is_somebody_elses_in_another_vlan
        without_the_feature_there_are_no_vlans
        connections_stay_in_their_vlan
        datagrams_tell_their_vlan
        groups_reach_those_in_the_vlan;
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

#[test]
fn inline_data_is_checked() {
    with_rings(|| {
        let data = [1; INLINE as usize + 1];
        let write = Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &[]);
        let with_sge = Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, 0)]);
        let read = Send::new(5, VIRTIO_RDMA_WR_RDMA_READ, &[]);
        for send in [write.inline(&data), with_sge.inline(&data[..8]), read.inline(&data[..8])] {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
            pair.settle();
            assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        }
    });
}

#[test]
fn receives_that_come_in_the_pause_are_taken_at_its_end() {
    without_upgrades();
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        for wr_id in 0..4 {
            pair.a.post_send(a.qpn, &Send::new(wr_id, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
        }
        assert!(pair.settle().is_some());
        for wr_id in 0..4 {
            pair.b.post_recv(b.qpn, wr_id, &[sge(DATA, 8, b.key)]);
            // The device has not asked to be told of it.
            assert!(pair.settle().is_some());
        }
        assert!(pair.poll_b().is_none());
        assert!(pair.settle_and_pause().is_none());
        for wr_id in 0..4 {
            assert_eq!(brief(pair.poll_b()), Some((wr_id, 0, VIRTIO_RDMA_WC_RECV)));
            assert_eq!(brief(pair.poll_a()), Some((wr_id, 0, VIRTIO_RDMA_WC_SEND)));
        }
        assert_eq!(pair.b.device.counter(Counter::RnrNaks), 1);
    });
}

#[test]
fn a_backlog_asks_late_to_be_told_of_receives() {
    without_upgrades();
    with_rings(|| {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        pair.a.rnr_retry = 7;
        pair.a.connect(a.qpn, pair.b.gid, b.qpn);
        pair.b.connect(b.qpn, pair.a.gid, a.qpn);
        for wr_id in 0..3 {
            pair.a.post_send(a.qpn, &Send::new(wr_id, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
        }
        // At first the requester polls, although nothing came for several RNR timers.
        pair.settle_for(ASKED / 2);
        pair.b.post_recv(b.qpn, 0, &[sge(DATA, 8, b.key)]);
        pair.settle();
        assert!(pair.poll_b().is_none());
        pair.settle_for(RNR_TIMER);
        assert_eq!(brief(pair.poll_b()), Some((0, 0, VIRTIO_RDMA_WC_RECV)));
        // Later it has asked, and is told of the next receive.
        pair.settle_for(ASKED);
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, 8, b.key)]);
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((1, 0, VIRTIO_RDMA_WC_RECV)));
        // If no message is behind it, the last one pauses once.
        pair.settle_for(PAUSE);
        pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((2, 0, VIRTIO_RDMA_WC_RECV)));
    });
}

#[test]
fn every_cqe_names_its_entry() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        // The indices go round the rings three times.
        for index in 0..3 * u32::from(RING) {
            pair.b.post_recv(b.qpn, 1, &[sge(DATA, 8, b.key)]);
            let send = Send::new(2, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]);
            pair.a.post_send(a.qpn, &send);
            pair.settle();
            assert_eq!(pair.a.poll_ring(a.cqn).unwrap().wqe_index, index);
            assert_eq!(pair.b.poll_ring(b.cqn).unwrap().wqe_index, index);
        }
        // CQEs with an error have an index, too.
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_SEND, &[]));
        pair.settle();
        for cqe in [pair.a.poll_ring(a.cqn), pair.b.poll_ring(b.cqn)] {
            let cqe = cqe.unwrap();
            assert_eq!(u32::from(cqe.status), VIRTIO_RDMA_WC_WR_FLUSH_ERR);
            assert_eq!(cqe.wqe_index, 3 * u32::from(RING));
        }
    });
}

#[test]
fn reset_begins_the_rings_anew() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        for round in 0..20 {
            for wr_id in 0..3 {
                let send = Send::new(wr_id, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]);
                pair.a.post_send(a.qpn, &send);
                pair.a.post_recv(a.qpn, wr_id, &[]);
            }
            pair.settle();
            pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
            assert!(pair.poll_a().is_none());
            // B has had one message in each round, and was not reset.
            pair.a.sq_psn = round;
            pair.a.connect(a.qpn, gid(2), b.qpn);
            pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
            let send = Send::new(4, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]);
            pair.a.post_send(a.qpn, &send);
            pair.settle();
            assert_eq!(pair.a.poll_ring(a.cqn).map(|cqe| (cqe.wr_id, cqe.wqe_index)), Some((4, 0)));
            assert_eq!(brief(pair.poll_b()).unwrap().0, 9);
        }
    });
}

/// Posts writes without a doorbell if the device polls. All of them must complete.
fn write_and_complete(pair: &mut Pair, qpn: u32, count: u64) {
    let [a, b] = pair.ends;
    for wr_id in 0..count {
        let part = [sge(DATA, 8, a.key)];
        let write = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key);
        pair.a.post_send(qpn, &write);
    }
    pair.settle();
    for wr_id in 0..count {
        assert_eq!(brief(pair.poll_a()).map(|cqe| (cqe.0, cqe.1)), Some((wr_id, 0)));
    }
}

#[test]
fn a_polled_ring_is_found_after_reset() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.a.awake = true;
        for _ in 0..20 {
            // The producer index becomes the same as in the last round.
            write_and_complete(&mut pair, a.qpn, 3);
            pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
            // B expects the next PSN.
            pair.a.sq_psn += 3;
            pair.a.connect(a.qpn, gid(2), b.qpn);
        }
    });
}

#[test]
fn a_polled_ring_is_found_in_another_place() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.a.awake = true;
        let mut qpn = a.qpn;
        for _ in 0..20 {
            write_and_complete(&mut pair, qpn, 3);
            pair.a.destroy_qp(qpn).unwrap();
            qpn = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
            pair.a.connect(qpn, gid(2), b.qpn);
            pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
            pair.b.connect(b.qpn, gid(1), qpn);
        }
    });
}

#[test]
fn a_polled_ring_is_found_after_a_change_of_memory() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, _] = pair.ends;
        pair.a.awake = true;
        for _ in 0..4 {
            write_and_complete(&mut pair, a.qpn, 3);
            pair.a.move_memory();
        }
    });
}

#[test]
fn one_event_disarms() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let message = |pair: &mut Pair, flags, expected| {
            pair.b.post_recv(b.qpn, 1, &[]);
            pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[]).flags(flags));
            pair.settle();
            pair.poll_b().unwrap();
            assert_eq!(pair.b.cq_signals(b.cqn), expected);
        };
        message(&mut pair, VIRTIO_RDMA_SEND_SOLICITED, 0);
        pair.b.arm_cq(b.cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
        message(&mut pair, 0, 1);
        message(&mut pair, 0, 1);
        pair.b.arm_cq(b.cqn, VIRTIO_RDMA_NOTIFY_SOLICITED).unwrap();
        message(&mut pair, 0, 1);
        message(&mut pair, VIRTIO_RDMA_SEND_SOLICITED, 2);
        message(&mut pair, VIRTIO_RDMA_SEND_SOLICITED, 2);
        pair.b.arm_cq(b.cqn, VIRTIO_RDMA_NOTIFY_SOLICITED).unwrap();
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        pair.settle();
        assert_eq!(pair.b.cq_signals(b.cqn), 3, "an error is always solicited");
    });
}

#[test]
fn a_ring_that_sleeps_wants_a_doorbell() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.settle();
        let bells = |pair: &Pair| pair.a.device.counter(Counter::Doorbells);
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).rdma(DATA, b.key);
        pair.a.post_send(a.qpn, &write);
        assert_eq!(pair.a.device.run(64), Next::Busy);
        assert_eq!(bells(&pair), 1);
        // The device polls for a while.
        pair.a.post_send(a.qpn, &write);
        pair.a.device.run(64);
        assert!(pair.poll_a().is_some() && pair.poll_a().is_some());
        assert_eq!(bells(&pair), 1);
        for (number, queue) in [(0, 0), (99, 0), (u32::MAX, 1), (a.qpn, 2)] {
            pair.a.ring_doorbell(number, queue);
        }
        pair.settle();
        assert_eq!(pair.a.device.counter(Counter::BadDoorbell), 4);
    });
}

/// The address of doorbells.
const BELLS: u64 = 24 << 20;

/// Specification, Rings: Virtqueues: a buffer holds up to 512 doorbells.
#[test]
fn a_buffer_holds_many_doorbells() {
    with_rings(|| {
        for count in [1, 64, 65, 512] {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            pair.settle();
            let write = Send::new(7, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).rdma(DATA, b.key);
            pair.a.write_entry(a.qpn, VIRTIO_RDMA_DOORBELL_SQ, &write.entry());
            let bell = |queue| virtio_rdma_doorbell { number: a.qpn, queue };
            let mut bells = vec![bell(VIRTIO_RDMA_DOORBELL_RQ); count - 1];
            bells.push(bell(VIRTIO_RDMA_DOORBELL_SQ));
            // The doorbells are in two descriptors. The first one ends within a doorbell.
            pair.a.memory.write(BELLS, bells.as_bytes()).unwrap();
            let rest = 8 * count as u32 - 4;
            pair.a.add(1 + VECTORS, &[(BELLS, 4, false), (BELLS + 4, rest, false)]);
            pair.settle();
            let done = pair.poll_a().map(|cqe| cqe.wr_id);
            assert_eq!(done, Some(7), "{count} doorbells");
            assert_eq!(pair.a.device.counter(Counter::Doorbells), count as u64);
            assert_eq!(pair.a.device.counter(Counter::BadDoorbell), 0);
        }
    });
}

/// Specification, Rings: Doorbells: the device ignores the part of a buffer that is too long, and a doorbell that is
/// not complete. It handles the other doorbells.
#[test]
fn a_buffer_that_holds_no_doorbells_is_counted() {
    with_rings(|| {
        for (bytes, bells) in [(4, 0), (12, 1), (513 * 8, 512), (513 * 8 + 4, 512)] {
            let mut pair = Pair::new();
            let [a, _] = pair.ends;
            pair.settle();
            let bell = virtio_rdma_doorbell { number: a.qpn, queue: VIRTIO_RDMA_DOORBELL_SQ };
            let mut buffer = vec![bell; 514].as_bytes().to_vec();
            buffer.truncate(bytes);
            pair.a.post(1 + VECTORS, &buffer);
            pair.settle();
            assert_eq!(pair.a.device.counter(Counter::Doorbells), bells, "{bytes} bytes");
            assert_eq!(pair.a.device.counter(Counter::BadDoorbell), 1, "{bytes} bytes");
        }
    });
}

#[test]
fn resizing_under_traffic_loses_nothing() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let write = |wr_id| Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).rdma(DATA, b.key);
        let (mut posted, mut taken) = (0, 0);
        for round in 0..60 {
            for _ in 0..7 {
                pair.a.post_send(a.qpn, &write(posted));
                posted += 1;
            }
            // Some of the writes complete before the CQ is resized, and the others after it.
            pair.a.device.run(3);
            let depth = [128, 64, 256][round % 3];
            let moved = pair.a.resize_cq(a.cqn, depth).unwrap();
            assert!(u64::from(moved) <= posted - taken);
            pair.settle();
            while posted - taken > round as u64 % 5 {
                assert_eq!(brief(pair.poll_a()).unwrap(), (taken, 0, VIRTIO_RDMA_WC_RDMA_WRITE));
                taken += 1;
            }
        }
        // What does not fit stays where it is.
        for _ in 0..8 {
            pair.a.post_send(a.qpn, &write(posted));
            posted += 1;
        }
        pair.settle();
        assert_eq!(pair.a.resize_cq(a.cqn, 4), Err(VIRTIO_RDMA_STATUS_INVAL));
        while taken < posted {
            assert_eq!(brief(pair.poll_a()).unwrap().0, taken);
            taken += 1;
        }
    });
}

#[test]
fn rings_that_leave_memory_fail_their_objects() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let memory = pair.a.memory.clone();
        let other = GuestMemory::anonymous(&[(1 << 40, 4096)]).unwrap();
        pair.a.device.set_memory(&other);
        pair.a.device.set_memory(&memory);
        pair.settle();
        assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_CQ_ERR, a.cqn)));
        assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, a.qpn)));
        assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
        assert_eq!(pair.a.device.counter(Counter::LostRings), 2);
        // New objects work.
        assert_eq!(pair.a.destroy_qp(a.qpn), Ok(()));
        assert_eq!(pair.a.destroy_cq(a.cqn), Ok(()));
        let cqn = pair.a.create_cq(8);
        let qpn = pair.a.create_qp(a.pdn, cqn, VIRTIO_RDMA_QPT_RC);
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        pair.b.connect(b.qpn, gid(1), qpn);
        pair.a.connect(qpn, gid(2), b.qpn);
        let part = [sge(DATA, 8, a.key)];
        pair.a.post_send(qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
        pair.settle();
        assert_eq!(pair.a.poll(cqn).map(|cqe| cqe.status), Some(0));
    });
}

#[test]
fn a_producer_that_runs_away_fails_its_qp() {
    with_rings(|| {
        for (at, counter) in [(0, Counter::BadSendChain), (64, Counter::BadReceiveChain)] {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            let region = pair.b.qp_rings[&b.qpn].region;
            pair.b.memory.write(region + at, &(u32::from(RING) + 1).to_le_bytes()).unwrap();
            pair.b.ring_doorbell(b.qpn, VIRTIO_RDMA_DOORBELL_SQ);
            pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[]));
            pair.settle_in_time();
            assert_eq!(pair.b.device.counter(counter), 1);
            assert_eq!(pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, b.qpn)));
            assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
            for (guest, end, dgid, dest) in
                [(&mut pair.a, a, gid(2), b.qpn), (&mut pair.b, b, gid(1), a.qpn)]
            {
                guest.set_state(end.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
                while guest.poll(end.cqn).is_some() {}
                guest.connect(end.qpn, dgid, dest);
            }
            pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[]));
            pair.settle();
            assert_eq!(brief(pair.poll_a()), Some((2, 0, VIRTIO_RDMA_WC_RDMA_WRITE)));
        }
    });
}

#[test]
fn requests_for_rings_are_checked() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let mut guest = Guest::new(&fabric, &clock, 1);
        let invalid = VIRTIO_RDMA_STATUS_INVAL;
        let region = guest.sizes.regions;
        let cq = guest.cq_ring_request(region, 64);
        let mut create_cq = |change: &dyn Fn(&mut virtio_rdma_cmd_create_ring_cq)| {
            let mut request = cq;
            change(&mut request);
            let command = VIRTIO_RDMA_CMD_CREATE_RING_CQ;
            guest.command::<_, virtio_rdma_rsp_create_cq>(command, &request).err()
        };
        assert_eq!(create_cq(&|r| r.cqe = 0), Some(invalid));
        assert_eq!(create_cq(&|r| r.cqe = 48), Some(invalid));
        assert_eq!(create_cq(&|r| r.cqe = 1 << 31), Some(invalid));
        assert_eq!(create_cq(&|r| r.comp_vector = VECTORS.into()), Some(invalid));
        assert_eq!(create_cq(&|r| r.comp_vector = u32::MAX), Some(invalid));
        assert_eq!(create_cq(&|r| r.region.npages = 1), Some(invalid));
        assert_eq!(create_cq(&|r| r.region.pages = 1 << 40), Some(VIRTIO_RDMA_STATUS_FAULT));
        assert_eq!(create_cq(&|r| r.region.pages += 4), Some(invalid));
        assert_eq!(create_cq(&|r| r.region.npages = u32::MAX), None);

        let pdn = guest.create_pd();
        let base = Guest::qp_request(pdn, 0, VIRTIO_RDMA_QPT_RC);
        let qp = guest.qp_ring_request(region + 0x10000, base);
        let no_memory = guest.describe(1 << 41);
        let mut create_qp = |change: &dyn Fn(&mut virtio_rdma_cmd_create_ring_qp)| {
            let mut request = qp;
            change(&mut request);
            let command = VIRTIO_RDMA_CMD_CREATE_RING_QP;
            guest.command::<_, virtio_rdma_rsp_create_qp>(command, &request).err()
        };
        let no_object = Some(VIRTIO_RDMA_STATUS_NO_OBJECT);
        assert_eq!(create_qp(&|r| r.base.pdn = 7), no_object);
        assert_eq!(create_qp(&|r| r.base.recv_cqn = 1), no_object);
        assert_eq!(create_qp(&|r| r.base.max_send_wr = 0), Some(invalid));
        assert_eq!(create_qp(&|r| r.base.max_send_wr = 65), Some(invalid));
        assert_eq!(create_qp(&|r| r.base.max_inline_data = INLINE + 1), Some(invalid));
        assert_eq!(create_qp(&|r| r.sq.depth = 0), Some(invalid));
        assert_eq!(create_qp(&|r| r.sq.stride = 256), Some(invalid));
        assert_eq!(create_qp(&|r| r.rq.stride = 256), Some(invalid));
        assert_eq!(create_qp(&|r| r.rq.offset = 0), Some(invalid));
        assert_eq!(create_qp(&|r| r.rq.offset = 1 << 20), Some(invalid));
        assert_eq!(create_qp(&|r| r.region.npages = 8), Some(invalid));
        assert_eq!(create_qp(&|r| r.base.qp_type = 8), Some(VIRTIO_RDMA_STATUS_UNSUPPORTED));
        assert_eq!(create_qp(&|r| r.region = no_memory), Some(VIRTIO_RDMA_STATUS_FAULT));
        assert_eq!(create_qp(&|r| (r.rq.depth, r.base.max_recv_wr) = (0, 0)), None);
        assert_eq!(create_qp(&|r| r.base.qp_type = VIRTIO_RDMA_QPT_GSI as u8), None);
        let busy = Some(VIRTIO_RDMA_STATUS_BUSY);
        assert_eq!(create_qp(&|r| r.base.qp_type = VIRTIO_RDMA_QPT_GSI as u8), busy);
        for command in
            [VIRTIO_RDMA_CMD_CREATE_CQ, VIRTIO_RDMA_CMD_CREATE_QP, VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ]
        {
            let mut request = vec![command as u8];
            request.resize(200, 0);
            let status = u32::from(guest.request(&request, 64).0);
            assert_eq!(status, VIRTIO_RDMA_STATUS_UNSUPPORTED);
        }
    });
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    for command in
        [VIRTIO_RDMA_CMD_CREATE_RING_CQ, VIRTIO_RDMA_CMD_RESIZE_CQ, VIRTIO_RDMA_CMD_CREATE_RING_QP]
    {
        let mut request = vec![command as u8];
        request.resize(300, 0);
        assert_eq!(u32::from(guest.request(&request, 64).0), VIRTIO_RDMA_STATUS_UNSUPPORTED);
    }
}

#[test]
fn numbers_come_back_late() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let mut guest = Guest::new(&fabric, &clock, 1);
        let end = End::new(&mut guest, VIRTIO_RDMA_QPT_RC);
        let mut numbers = Vec::new();
        for _ in 0..8 {
            let qpn = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
            guest.destroy_qp(qpn).unwrap();
            numbers.push(qpn);
        }
        assert_eq!(numbers, [3, 4, 5, 6, 3, 4, 5, 6]);
    });
}

/// Writes a random word into a region, mostly into its head.
fn scribble(guest: &Guest, random: &mut Random, region: u64) {
    let at = match random.below(3) {
        0 => random.below(16) * 4,
        1 => random.below(64) * 4,
        _ => random.below(guest.sizes.region_len / 4) * 4,
    };
    let word = match random.below(3) {
        0 => random.next() as u32,
        1 => random.below(70) as u32,
        _ => random.below(0x300) as u32,
    };
    guest.memory.write(region + at, &word.to_le_bytes()).unwrap();
}

#[test]
fn hostile_rings_harm_their_own_qp_alone() {
    with_rings(|| {
        for seed in 1..=12 {
            let mut random = Random::new(seed * 0x9e37_79b9);
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            // Another program of the same guest has its own QP and CQ.
            let cqn = pair.a.create_cq(RING);
            let qpn = pair.a.create_qp(a.pdn, cqn, VIRTIO_RDMA_QPT_RC);
            pair.a.connect(qpn, gid(2), b.qpn);
            let good_cq = pair.a.create_cq(RING);
            let good = pair.a.create_qp(a.pdn, good_cq, VIRTIO_RDMA_QPT_RC);
            let peer_cq = pair.b.create_cq(RING);
            let peer = pair.b.create_qp(b.pdn, peer_cq, VIRTIO_RDMA_QPT_RC);
            pair.a.connect(good, gid(2), peer);
            pair.b.connect(peer, gid(1), good);
            let regions = [pair.a.qp_rings[&a.qpn].region, pair.a.cq_rings[&a.cqn].region];
            for round in 0..300_u32 {
                for _ in 0..random.below(6) {
                    let region = regions[random.below(2) as usize];
                    scribble(&pair.a, &mut random, region);
                }
                let number = if random.below(2) == 0 { a.qpn } else { random.next() as u32 };
                pair.a.ring_doorbell(number, random.below(3) as u32);
                let data = pair.a.fill(DATA + 0x8000, 64, round as u8);
                let place = DATA + (4 << 20);
                pair.b.post_recv(peer, round.into(), &[sge(place, 64, b.key)]);
                let part = [sge(DATA + 0x8000, 64, a.key)];
                pair.a.post_send(good, &Send::new(round.into(), VIRTIO_RDMA_WR_SEND, &part));
                pair.settle_in_time();
                let found = brief(pair.a.poll(good_cq));
                assert_eq!(found, Some((round.into(), 0, VIRTIO_RDMA_WC_SEND)));
                let found = brief(pair.b.poll(peer_cq));
                assert_eq!(found, Some((round.into(), 0, VIRTIO_RDMA_WC_RECV)));
                assert_eq!(pair.b.bytes(place, 64), data);
                assert!(pair.a.poll(good_cq).is_none() && pair.b.poll(peer_cq).is_none());
                if random.below(8) == 0 {
                    let states = [VIRTIO_RDMA_QPS_RESET, VIRTIO_RDMA_QPS_ERR];
                    let _ = pair.a.set_state(a.qpn, states[random.below(2) as usize]);
                    let state = |pair: &mut Pair| u32::from(pair.a.query(a.qpn).qp_state);
                    if state(&mut pair) == VIRTIO_RDMA_QPS_RESET {
                        pair.a.make_init(a.qpn, ALL);
                    }
                    // It goes into ERR with INIT if its CQ has failed.
                    if state(&mut pair) == VIRTIO_RDMA_QPS_INIT {
                        pair.a.make_rtr(a.qpn, gid(2), b.qpn, true).unwrap();
                        pair.a.make_rts(a.qpn, true).unwrap();
                    }
                }
            }
        }
    });
}

#[test]
fn a_large_message_holds_nobody_up() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let cqn = pair.a.create_cq(RING);
        let qpn = pair.a.create_qp(a.pdn, cqn, VIRTIO_RDMA_QPT_RC);
        let peer = pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        pair.a.connect(qpn, gid(2), peer);
        pair.b.connect(peer, gid(1), qpn);
        pair.settle();
        let large = [sge(DATA, 16 << 20, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &large).rdma(DATA, b.key));
        let small = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 2, a.key)]);
        pair.a.device.run(4);
        for _ in 0..8 {
            pair.a.post_send(qpn, &small.clone().rdma(DATA, b.key));
            // Each queue has a turn, for some chunks of the large write and for the small one.
            for _ in 0..3 {
                pair.a.device.run(4);
            }
            assert_eq!(pair.a.poll(cqn).map(|cqe| cqe.wr_id), Some(2));
        }
        assert!(pair.poll_a().is_none(), "the large one is still under way");
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().0, 1);
    });
}

/// When a sender sees that a SEND is complete, the receiver must find the completion of its receive.
#[test]
fn a_send_is_complete_after_its_receive() {
    const BATCH: u64 = 4;
    let mut made = None;
    with_rings(|| made = Some(Pair::new()));
    let Pair { mut a, mut b, ends: [x, y], .. } = made.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (device, stopped) = (Arc::clone(&a.device), Arc::clone(&stop));
    let worker = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            device.run(64);
        }
    });
    let write = Send::new(BATCH, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, x.key)]);
    let write = write.rdma(DATA, y.key);
    for _ in 0..2000 {
        for wr_id in 0..BATCH {
            b.post_recv(y.qpn, wr_id, &[]);
        }
        for wr_id in 0..BATCH {
            // The first CQE of a turn is that of a write, which has no receive.
            a.post_send(x.qpn, &write);
            a.post_send(x.qpn, &Send::new(wr_id, VIRTIO_RDMA_WR_SEND, &[]));
        }
        let mut left = 2 * BATCH;
        while left > 0 {
            let Some(cqe) = a.poll(x.cqn) else { continue };
            assert_eq!(u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS);
            left -= 1;
            if cqe.wr_id != BATCH {
                assert_eq!(b.poll(y.cqn).map(|received| received.wr_id), Some(cqe.wr_id));
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    worker.join().unwrap();
}

#[test]
fn a_region_is_replaced_while_a_peer_writes_cqes() {
    let mut made = None;
    with_rings(|| made = Some(Pair::new()));
    let Pair { mut a, mut b, ends: [x, y], .. } = made.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    // The receiver resizes its CQ and polls it, while the sender's thread writes CQEs into it.
    let receiver = std::thread::spawn(move || {
        let mut next = 0;
        for round in 0..200 {
            for _ in 0..8 {
                b.post_recv(y.qpn, next, &[]);
                next += 1;
            }
            b.resize_cq(y.cqn, [64, 128][round % 2]).unwrap();
            let mut wanted = next - 8;
            while wanted < next {
                b.device.run(64);
                b.device.arm();
                if let Some(cqe) = b.poll(y.cqn) {
                    assert_eq!((cqe.wr_id, cqe.status), (wanted, 0));
                    wanted += 1;
                }
            }
        }
        stopped.store(true, Ordering::Release);
        b
    });
    let clock = Arc::clone(&a.clock);
    while !stop.load(Ordering::Acquire) && !receiver.is_finished() {
        a.post_send(x.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[]));
        while a.poll(x.cqn).is_none() && !stop.load(Ordering::Acquire) {
            let next = a.device.run(64);
            if let (Next::At(time), false) = (next, clock.end_pause(next)) {
                // The clock stops before the RNR timer expires, however slow the receiver is.
                let before = time.checked_sub(PAUSE + Duration::from_nanos(1)).unwrap();
                clock.advance_to(before);
            }
            if receiver.is_finished() {
                break;
            }
        }
    }
    receiver.join().unwrap();
}

#[test]
fn sixteen_thousand_qps() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let limits = Limits { gid_table: 4, comp_vectors: VECTORS, ..Limits::default() };
        let count = u32::from(limits.ring_qp) - 1;
        let sizes = Sizes {
            memory: 256 << 20,
            depth: 16,
            stride: 64,
            sges: 1,
            inline: 0,
            regions: 64 << 20,
            region_len: 0x1000,
            region_count: 2 * u64::from(count) + 1,
            ..Sizes::default()
        };
        let setup = Setup { limits, sizes, ..Setup::default() };
        let mut guest = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
        let pdn = guest.create_pd();
        let key = guest.reg_mr(pdn, DATA, 1 << 20, ALL).lkey;
        let own = guest.gid;
        let mut pairs = Vec::new();
        for _ in 0..count {
            let cqn = guest.create_cq(4);
            let qpn = guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
            guest.connect(qpn, own, qpn);
            pairs.push((qpn, cqn));
        }
        guest.run();
        // The device does not poll queues that are idle.
        assert_eq!(guest.device.run(64), Next::Idle);
        let part = [sge(DATA, 8, key)];
        for (qpn, _) in &pairs {
            guest.post_send(*qpn, &Send::new(7, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, key));
            guest.device.run(64);
        }
        guest.run();
        for (qpn, cqn) in pairs {
            let cqe = guest.poll(cqn).unwrap();
            assert_eq!((cqe.wr_id, cqe.status, cqe.qp_num), (7, 0, qpn));
            guest.destroy_qp(qpn).unwrap();
            guest.destroy_cq(cqn).unwrap();
        }
    });
}

#[test]
fn a_receive_ring_that_goes_wrong_in_err_names_its_qp() {
    with_rings(|| {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        while pair.b.poll_event().is_some() {}
        let producer = pair.b.qp_rings[&b.qpn].region + 64;
        pair.b.memory.write(producer, &99_u32.to_le_bytes()).unwrap();
        pair.b.ring_doorbell(b.qpn, VIRTIO_RDMA_DOORBELL_RQ);
        pair.b.run();
        assert_eq!(pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, b.qpn)));
    });
}

#[test]
fn rings_for_which_there_is_no_room_are_refused() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let limits = Limits { max_extents: 8, ..limits() };
        let setup = Setup { limits, ..Setup::default() };
        let mut guest = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
        let request = Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_RC);
        assert_eq!(guest.try_create_qp(request), Err(VIRTIO_RDMA_STATUS_NO_RESOURCE));
        guest.create_cq(RING);
    });
}

/// Completion events wait for buffers, one for each CQ at most.
#[test]
fn completion_events_wait_for_buffers_once_each() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let vector = pair.b.cq_rings[&b.cqn].vector;
        for _ in 0..RING + 3 {
            pair.b.arm_cq(b.cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
            pair.b.post_recv(b.qpn, 1, &[]);
            pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[]));
            pair.settle();
            assert!(pair.poll_a().is_some() && pair.poll_b().is_some());
        }
        assert_eq!(pair.b.used_index(1 + vector), RING);
        assert_eq!(pair.b.cq_signals(b.cqn), RING.into());
        pair.settle();
        assert_eq!(pair.b.cq_signals(b.cqn), u32::from(RING) + 1);
    });
}

/// Makes a CQ whose ring lies in memory that a test can take away.
fn cq_in_extra_memory(guest: &mut Guest) -> u32 {
    let request = guest.cq_ring_request(EXTRA.0, 16);
    let reply: virtio_rdma_rsp_create_cq =
        guest.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request).unwrap();
    guest.cq_rings.insert(reply.cqn, CqRing::new(EXTRA.0, 16, 1));
    reply.cqn
}

#[test]
fn a_cq_is_not_moved_out_of_memory_that_is_away() {
    with_rings(|| {
        let mut pair = Pair::new();
        let cqn = cq_in_extra_memory(&mut pair.a);
        let (less, _) = pair.a.memory.without(EXTRA.0, EXTRA.1);
        pair.a.device.set_memory(&less);
        pair.settle();
        assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_CQ_ERR, cqn)));
        assert_eq!(pair.a.resize_cq(cqn, 64), Err(VIRTIO_RDMA_STATUS_INVAL));
        assert_eq!(pair.a.resize_cq(3, 64), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    });
}

/// The event that tells of an error says nothing of memory: the reply to the command does that.
#[test]
fn memory_is_the_owners_with_the_reply_behind_a_fatal_event() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let len = 1 << 20;
        pair.a.fill(DATA, len, 1);
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, len as u32, b.key)]);
        pair.a
            .post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_SEND, &[sge(DATA, len as u32, a.key)]));
        while pair.b.bytes(DATA, 1) == [0] {
            pair.a.device.run(1);
        }
        let producer = pair.b.qp_rings[&b.qpn].region;
        pair.b.memory.write(producer, &999_u32.to_le_bytes()).unwrap();
        pair.b.ring_doorbell(b.qpn, VIRTIO_RDMA_DOORBELL_SQ);
        pair.b.run();
        let events: Vec<_> = std::iter::from_fn(|| pair.b.poll_event()).collect();
        assert!(events.contains(&(VIRTIO_RDMA_EVENT_QP_FATAL, b.qpn)), "{events:?}");
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        let mine = pair.b.fill(DATA, len, 99);
        pair.settle_in_time();
        assert!(pair.b.bytes(DATA, len) == mine);
    });
}
