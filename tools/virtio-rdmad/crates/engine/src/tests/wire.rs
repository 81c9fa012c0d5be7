// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections and datagrams between two hosts: what holds on the local path holds on the wire. Reliable
//! connections hold it also where the network loses, repeats, reorders and spoils packets.

use std::time::Duration;

use abi::*;

use super::cable::{cable, over_a_cable, Faults};
use super::driver::*;
use super::{connection, datagram, fast_reg, mcast, rc, uc, xrc};
use crate::{Clock, Counter, Gid};

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
    rc::a_write_with_immediate_does_not_look_at_the_memory_of_its_receive,
    rc::the_rights_of_a_qp_are_checked_before_there_is_a_receive,
    rc::an_atomic_of_a_word_that_is_unaligned_in_memory_is_an_invalid_request,
    rc::no_bytes_need_no_key,
    rc::a_region_of_no_bytes_gives_access_to_none,
    rc::a_qp_without_remote_access_refuses_the_request,
    rc::a_remote_range_is_checked_before_the_first_byte,
    rc::an_unaligned_atomic_is_an_invalid_request,
    rc::zero_bytes_ask_for_no_key,
    rc::memory_is_the_owners_again_with_its_flush,
    rc::reset_discards_and_the_queues_go_on,
    rc::sqd_drains_and_tells,
    rc::a_change_in_sqd_keeps_the_promise,
    rc::a_qp_that_leaves_sqd_early_tells_nothing,
    rc::an_error_in_sqd_ends_its_promise,
    rc::arming_signals_once_and_misses_nothing,
    rc::events_wait_for_buffers_once_each,
    rc::a_guest_that_goes_leaves_no_trace,
    rc::a_sign_before_the_deadline_is_no_retry,
    connection::a_psn_that_is_ahead_is_not_executed,
    datagram::a_datagram_arrives_behind_its_header,
    datagram::the_gsi_sends_its_own_qkey,
    mcast::a_datagram_reaches_every_member,
    mcast::loopback_is_blocked_if_asked,
    uc::every_operation_arrives,
    uc::what_finds_no_receive_is_lost,
    uc::what_the_responder_refuses_is_lost,
    uc::a_write_with_a_bad_key_is_lost,
    uc::a_bad_receive_fails_the_receiver_alone,
    uc::errors_of_the_sender_stop_its_queue_alone,
    xrc::messages_go_to_the_srq_that_they_name,
    xrc::keys_are_those_of_the_srqs_pd,
    xrc::an_srq_outside_of_the_domain_ends_the_connection,
    xrc::a_receive_that_is_too_short_ends_the_connection,
    xrc::an_srq_whose_cq_overflows_is_in_error,
    xrc::ends_of_other_types_do_not_answer,
    xrc::an_initiator_needs_its_header,
    xrc::receives_say_what_they_are,
    xrc::a_reset_device_forgets_its_domains,
    xrc::many_initiators_share_one_srq,
    fast_reg::an_invalidation_waits_for_a_read,
}

/// Sends a few messages of each kind, and checks the data of both ends.
pub fn a_bit_of_everything(pair: &mut Pair, messages: u64) {
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

/// The pages of the regions that are registered below.
const PAGES: [u64; 1] = [DATA];
/// The address by which these regions are named.
const IOVA: u64 = 0x7000_0000;

/// Posts a registration of a region of A with this key, and a SEND of its memory.
fn register_and_send(pair: &mut Pair, wr_id: u64, key: u32) {
    let [a, b] = pair.ends;
    pair.b.post_recv(b.qpn, wr_id, &[sge(DATA + (wr_id << 12), 100, b.key)]);
    let reg = pair.a.registration(key, ALL, IOVA, 0x1000, &PAGES);
    pair.a.post_send(a.qpn, &Send::reg_mr(wr_id, reg));
    let part = [sge(IOVA, 100, key)];
    pair.a.post_send(a.qpn, &Send::new(wr_id + 100, VIRTIO_RDMA_WR_SEND, &part));
}

/// Consumers post a REG_MR in front of each message. It does not wait until the messages in front of it are
/// acknowledged, and completes behind them.
#[test]
fn registrations_do_not_wait_for_acknowledgements() {
    for upgrades in [false, true] {
        over_a_cable(1, Faults::default(), || {
            let mut pair = Pair::new();
            let [a, _] = pair.ends;
            let delay = Duration::from_micros(100);
            cable().unwrap().set_delay(delay, &pair.clock);
            let data = pair.a.fill(DATA, 100, 7);
            let start = pair.clock.now();
            for wr_id in 1..=16 {
                let key = pair.a.create_mr(a.pdn, 4).unwrap().lkey;
                register_and_send(&mut pair, wr_id, key);
            }
            pair.a.run();
            if upgrades {
                upgrade(&[&pair.a, &pair.b]);
            }
            pair.settle_in_time();
            let time = pair.clock.now().saturating_duration_since(start);
            assert_eq!(time, 2 * delay, "one round trip for all");
            for wr_id in 1..=16 {
                assert_eq!(brief(pair.poll_a()), Some((wr_id, OK, VIRTIO_RDMA_WC_REG_MR)));
                assert_eq!(brief(pair.poll_a()), Some((wr_id + 100, OK, VIRTIO_RDMA_WC_SEND)));
                assert_eq!(brief(pair.poll_b()), Some((wr_id, OK, VIRTIO_RDMA_WC_RECV)));
                assert!(pair.b.bytes(DATA + (wr_id << 12), 100) == data, "message {wr_id}");
            }
        });
    }
}

/// A REG_MR that is refused ends behind the messages in front of it, which are done.
#[test]
fn a_registration_that_is_refused_ends_in_its_turn() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let [a, _] = pair.ends;
        cable().unwrap().set_delay(Duration::from_micros(100), &pair.clock);
        pair.a.fill(DATA, 100, 7);
        let key = pair.a.create_mr(a.pdn, 4).unwrap().lkey;
        register_and_send(&mut pair, 1, key);
        // The region is registered already.
        register_and_send(&mut pair, 2, key);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_REG_MR)));
        assert_eq!(brief(pair.poll_a()), Some((101, OK, VIRTIO_RDMA_WC_SEND)));
        let refused = pair.poll_a().unwrap();
        assert_eq!((refused.wr_id, refused.status), (2, VIRTIO_RDMA_WC_MW_BIND_ERR as u8));
        let flushed = pair.poll_a().unwrap();
        assert_eq!((flushed.wr_id, flushed.status), (102, VIRTIO_RDMA_WC_WR_FLUSH_ERR as u8));
        assert_eq!(pair.a.device.counter(Counter::BadRegistration), 1, "it is counted once");
    });
}

/// A network card may number the packets of a train in its own way, so that the ICRC of all but the first is wrong. A
/// connection does not crawl then, by a packet in each round trip: its packets soon leave alone.
#[test]
fn trains_that_are_spoilt_end() {
    for foreign in [false, true] {
        let faults = Faults { spoils_trains: true, foreign, ..Faults::default() };
        let cable = over_a_cable(1, faults, || {
            let mut pair = Pair::new();
            let [a, b] = pair.ends;
            for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
                let (from, to) = match opcode {
                    VIRTIO_RDMA_WR_RDMA_READ => (&pair.b, &pair.a),
                    _ => (&pair.a, &pair.b),
                };
                let data = from.fill(DATA, 1 << 20, opcode as u8);
                to.fill(DATA, 1 << 20, 0);
                let part = [sge(DATA, 1 << 20, a.key)];
                pair.a.post_send(a.qpn, &Send::new(1, opcode, &part).rdma(DATA, b.key));
                let cqe = loop {
                    let next = pair.settle();
                    if let Some(cqe) = pair.poll_a() {
                        break cqe;
                    }
                    pair.clock.advance_to(next.expect("it is under way"));
                };
                assert_eq!(u32::from(cqe.status), OK);
                for guest in [&pair.a, &pair.b] {
                    assert!(guest.bytes(DATA, 1 << 20) == data);
                }
            }
            let time = pair.clock.passed();
            println!("foreign: {foreign}, {time:?}");
            assert!(time < Duration::from_millis(500), "{time:?}");
        });
        let sent = cable.sent.lock().unwrap().len();
        println!("{sent} packets for 2048");
        assert!(sent < 2 * 2048, "{sent} packets for 2048");
    }
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

/// Connects A and B between entries 1 of their GID tables, has A write to B, and returns the packets.
fn write_between(gids: [Gid; 2], vlan: Option<u16>) -> Vec<Vec<u8>> {
    let cable = over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        let vlan = vlan.map_or(VIRTIO_RDMA_NO_VLAN, u32::from);
        pair.a.add_vlan_gid(1, gids[0], vlan).unwrap();
        pair.b.add_vlan_gid(1, gids[1], vlan).unwrap();
        let ends = [(&mut pair.a, a, gids[1], b), (&mut pair.b, b, gids[0], a)];
        for (guest, end, dgid, other) in ends {
            guest.make_init(end.qpn, ALL);
            guest.make_rtr_from(end.qpn, 1, dgid, other.qpn, true).unwrap();
            guest.make_rts(end.qpn, true).unwrap();
        }
        let data = pair.a.fill(DATA, 5000, 7);
        let send = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 5000, a.key)]);
        pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        assert!(pair.b.bytes(DATA, 5000) == data);
    });
    let sent = cable.sent.lock().unwrap().clone();
    assert_ne!(sent.len(), 0);
    sent
}

#[test]
fn a_connection_in_a_vlan_has_tagged_packets() {
    for vlan in [5, 0] {
        for frame in write_between([gid(11), gid(12)], Some(vlan)) {
            let tag = roce::decode(&frame).unwrap().headers.ethernet.vlan.unwrap();
            assert_eq!(tag.id(), vlan);
        }
    }
}

#[test]
fn a_connection_over_ipv6_passes() {
    let gids = [1, 2].map(|last| {
        let mut gid = [0; 16];
        (gid[0], gid[15]) = (0xfd, last);
        gid
    });
    for vlan in [None, Some(4094)] {
        for frame in write_between(gids, vlan) {
            let headers = roce::decode(&frame).unwrap().headers;
            assert!(matches!(headers.ip, roce::Ip::V6(_)));
            assert_eq!(headers.ethernet.vlan_id(), vlan);
        }
    }
}

/// IBA 9.7.5.1.5: a request whose PSN is a little behind the expected one is a duplicate, which is not executed. All
/// that has come is acknowledged, so the requester reports success if it has sent as much. An ATOMIC WRITE has an
/// answer of its own. A READ needs an answer that nobody has.
#[test]
fn a_psn_behind_is_a_duplicate() {
    let vain = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    let test = || {
        for (sent, expected, tells, stores) in [
            (5, 6, OK, OK),
            (0xff_ffff, 0, OK, OK),
            (4, 6, vain, OK),
            (0xff_0000, 0, vain, OK),
            (0xfe_ffff, 0, vain, vain),
            (0x80_0000, 0, vain, vain),
        ] {
            for (opcode, status) in [
                (VIRTIO_RDMA_WR_SEND, tells),
                (VIRTIO_RDMA_WR_RDMA_WRITE, tells),
                (VIRTIO_RDMA_WR_ATOMIC_WRITE, stores),
                (VIRTIO_RDMA_WR_RDMA_READ, vain),
            ] {
                let found = connection::unexpected(opcode, sent, expected);
                assert_eq!(found, status, "opcode {opcode}, {sent:#x} for {expected:#x}");
            }
        }
    };
    over_a_cable(1, Faults::default(), || with_rings(test));
}

/// PSNs of one message are less than half of all PSNs apart, or their order could not be told.
#[test]
fn a_message_of_too_many_packets_is_refused() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        (pair.a.path_mtu, pair.b.path_mtu) = (1, 1);
        let ends = [(&mut pair.a, a, gid(2), b), (&mut pair.b, b, gid(1), a)];
        for (guest, end, dgid, other) in ends {
            guest.make_init(end.qpn, ALL);
            guest.make_rtr_from(end.qpn, 0, dgid, other.qpn, true).unwrap();
            guest.make_rts(end.qpn, true).unwrap();
        }
        let part = [sge(DATA, 1 << 31, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_LOC_LEN_ERR);
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
        assert_ne!(pair.b.device.counter(Counter::BadIcrc), 0);
    });
}

/// Sends `count` messages of several packets over an unreliable connection. Returns the numbers of those that
/// arrive, each of which has the data that was sent.
fn unreliable_messages(count: u32) -> (Pair, Vec<u32>) {
    let mut pair = uc::connected();
    let [a, b] = pair.ends;
    let mut data = Vec::new();
    for number in 0..count {
        let len = 100 + number as usize * 977 % 9000;
        let place = u64::from(number) * 0x4000;
        pair.b.post_recv(b.qpn, number.into(), &[sge(DATA + place, 0x4000, b.key)]);
        data.push(pair.a.fill(DATA + place, len, number as u8));
        let part = [sge(DATA + place, len as u32, a.key)];
        let send = Send::new(number.into(), VIRTIO_RDMA_WR_SEND_WITH_IMM, &part).imm(number);
        pair.a.post_send(a.qpn, &send);
    }
    pair.settle();
    for number in 0..count {
        assert_eq!(brief(pair.poll_a()), Some((number.into(), OK, VIRTIO_RDMA_WC_SEND)));
    }
    let mut arrived = Vec::new();
    while let Some(cqe) = pair.poll_b() {
        let sent = &data[cqe.ex as usize];
        assert_eq!((u32::from(cqe.status), cqe.byte_len as usize), (OK, sent.len()));
        assert!(pair.b.bytes(DATA + cqe.wr_id * 0x4000, sent.len()) == *sent, "{}", cqe.ex);
        arrived.push(cqe.ex);
    }
    (pair, arrived)
}

#[test]
fn unreliable_messages_arrive_whole_or_not_at_all() {
    let mut lost = 0;
    for seed in 0..30 {
        over_a_cable(seed, Faults { loss: 50, ..Faults::default() }, || {
            let (pair, arrived) = unreliable_messages(12);
            assert!(arrived.is_sorted(), "seed {seed}: {arrived:?}");
            lost += pair.counter(Counter::MessageCutOff);
        });
        let faults = Faults { repeat: 50, reorder: 50, corrupt: 20, ..Faults::default() };
        over_a_cable(seed, faults, || {
            unreliable_messages(12);
        });
    }
    assert_ne!(lost, 0, "messages cut off");
    over_a_cable(1, Faults::default(), || {
        let (pair, arrived) = unreliable_messages(12);
        assert_eq!(arrived, (0..12).collect::<Vec<_>>());
        assert_eq!(pair.counter(Counter::MessageCutOff), 0);
    });
}

/// Sends two messages of three packets over an unreliable connection, of which these packets arrive in this
/// order. Returns the messages that arrive, how many were cut off, and how many packets had no message.
fn arrivals(packets: &[usize]) -> (Vec<u64>, u64, u64) {
    let mut result = None;
    over_a_cable(1, Faults { loss: 1000, ..Faults::default() }, || {
        let mut pair = uc::connected();
        let [a, b] = pair.ends;
        let part = [sge(DATA, 3000, a.key)];
        for number in 0..2 {
            pair.b.post_recv(b.qpn, number, &[sge(DATA, 3000, b.key)]);
            let send = Send::new(number, VIRTIO_RDMA_WR_SEND_WITH_IMM, &part).imm(number as u32);
            pair.a.post_send(a.qpn, &send);
        }
        pair.settle();
        let cable = cable().unwrap();
        let sent = cable.sent.lock().unwrap().clone();
        assert_eq!(sent.len(), 6);
        for packet in packets {
            assert!(cable.bring(1, &sent[*packet]));
        }
        pair.settle();
        let arrived = std::iter::from_fn(|| pair.poll_b()).map(|cqe| cqe.ex.into()).collect();
        let counted = [Counter::MessageCutOff, Counter::DropNoMessage];
        let [cut_off, stray] = counted.map(|counter| pair.b.device.counter(counter));
        result = Some((arrived, cut_off, stray));
    });
    result.unwrap()
}

/// IBA 9.8.2.2: a gap drops the message that it is in, and the next first packet begins a message.
#[test]
fn a_gap_ends_an_unreliable_message() {
    assert_eq!(arrivals(&[0, 1, 2, 3, 4, 5]), (vec![0, 1], 0, 0));
    assert_eq!(arrivals(&[0, 2, 3, 4, 5]), (vec![1], 1, 1));
    assert_eq!(arrivals(&[0, 1, 3, 4, 5]), (vec![1], 1, 0));
    assert_eq!(arrivals(&[1, 2, 3, 4, 5]), (vec![1], 0, 2));
    assert_eq!(arrivals(&[0, 1, 4, 5]), (vec![], 1, 2));
    assert_eq!(arrivals(&[0, 1, 1, 2, 3, 4, 5]), (vec![1], 1, 2));
    assert_eq!(arrivals(&[0, 1, 0, 1, 2]), (vec![0], 1, 0));
}

/// What is posted before a QP ends is sent, as on the local path.
#[test]
fn unreliable_messages_leave_before_their_qp_ends() {
    const COUNT: u64 = 30;
    let cable = over_a_cable(1, Faults::default(), || {
        let mut pair = uc::connected();
        let [a, b] = pair.ends;
        for number in 0..COUNT {
            pair.b.post_recv(b.qpn, number, &[sge(DATA, 3000, b.key)]);
            let part = [sge(DATA, 3000, a.key)];
            pair.a.post_send(a.qpn, &Send::new(number, VIRTIO_RDMA_WR_SEND, &part));
        }
        pair.a.destroy_qp(a.qpn).unwrap();
        pair.settle();
        let arrived: Vec<_> = std::iter::from_fn(|| pair.poll_b()).map(|cqe| cqe.wr_id).collect();
        assert_eq!(arrived, (0..COUNT).collect::<Vec<_>>());
    });
    assert_eq!(cable.sent.lock().unwrap().len() as u64, 3 * COUNT);
}

/// Requests that the network repeats take nothing of what the peer may have under way: they are answered once
/// more, and the next request is done.
#[test]
fn repeated_requests_take_no_resources() {
    let word = DATA + 0x1000;
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let place = [sge(DATA, 8, a.key)];
        let requests = [
            Send::new(1, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &place).atomic(word, b.key, 1, 0),
            Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &place).rdma(word, b.key),
        ];
        for (number, request) in requests.iter().cycle().take(6).enumerate() {
            let cable = cable().unwrap();
            let sent = cable.sent.lock().unwrap().clone();
            let earlier = sent.iter().filter(|frame| {
                let packet = roce::decode(frame).unwrap();
                matches!(
                    packet.headers.bth.opcode.operation(),
                    roce::Operation::FetchAdd | roce::Operation::ReadRequest
                )
            });
            // As many as the peer may have under way (`make_rtr`), and more.
            earlier.cycle().take(5 * number.min(1)).for_each(|frame| cable.inject(1, frame));
            pair.a.post_send(a.qpn, request);
            pair.settle();
            assert_eq!(brief(pair.poll_a()).map(|(_, status, _)| status), Some(OK), "{number}");
        }
        assert_eq!(pair.b.memory.read_obj::<u64>(word), Ok(3), "each atomic is done once");
    });
}

/// Returns connected guests, of which A tries so often where B has no receive.
fn with_rnr_retry(rnr_retry: u8) -> Pair {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.a.rnr_retry = rnr_retry;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.b.connect(b.qpn, pair.a.gid, a.qpn);
    pair
}

/// The time for an answer does not run while a requester waits for its peer's RNR timer, which may be the
/// longer one: the peer has answered.
#[test]
fn an_rnr_timer_takes_no_retries() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = with_rnr_retry(7);
        let [a, b] = pair.ends;
        // 655 ms; the time for an answer is 67 ms (`make_rts`).
        let attr = virtio_rdma_qp_attr { min_rnr_timer: 0, ..pair.b.query(b.qpn) };
        pair.b.modify(b.qpn, VIRTIO_RDMA_QP_MIN_RNR_TIMER, attr).unwrap();
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a.key)]));
        pair.settle_for(Duration::from_secs(10));
        assert_eq!(brief(pair.poll_a()), None, "the peer has no receive yet");
        assert_eq!(pair.a.device.counter(Counter::Timeouts), 0);
        pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
        pair.settle_for(Duration::from_secs(1));
        assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    });
}

/// An RNR NAK also tells that the requests before its own were done. A READ among them whose response is lost
/// is asked for again, and it is not the one that has no receive.
#[test]
fn a_read_before_an_rnr_nak_is_asked_for_again() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = with_rnr_retry(0);
        let [a, b] = pair.ends;
        let data = pair.b.fill(DATA, 8, 3);
        let place = [sge(DATA + 0x1000, 8, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &place).rdma(DATA, b.key));
        pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_SEND, &place));
        pair.a.run();
        let cable = cable().unwrap();
        assert!(cable.deliver());
        pair.b.run();
        cable.lose();
        let nak = cable.sent.lock().unwrap().last().unwrap().clone();
        cable.inject(0, &nak);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_READ)));
        assert_eq!(pair.a.bytes(DATA + 0x1000, 8), data);
        let failed = (2, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR, VIRTIO_RDMA_WC_SEND);
        assert_eq!(brief(pair.poll_a()), Some(failed));
    });
}

/// An RNR NAK for a later request is progress, and the retries begin again, also where the acknowledgement of the
/// one before is lost.
#[test]
fn progress_that_an_rnr_nak_tells_of_renews_the_retries() {
    over_a_cable(1, Faults::default(), || {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        pair.a.rnr_retry = 1;
        let (gid_a, gid_b) = (pair.a.gid, pair.b.gid);
        pair.a.connect(a.qpn, gid_b, b.qpn);
        pair.b.connect(b.qpn, gid_a, a.qpn);
        let place = [sge(DATA, 8, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &place));
        pair.a.post_send(a.qpn, &Send::new(2, VIRTIO_RDMA_WR_SEND, &place));
        let pause = pair.settle().expect("an RNR timer");
        pair.b.post_recv(b.qpn, 1, &[sge(DATA, 8, b.key)]);
        pair.clock.advance_to(pause);
        pair.a.run();
        let cable = cable().unwrap();
        assert!(cable.deliver());
        pair.b.run();
        cable.lose();
        let nak = cable.sent.lock().unwrap().last().unwrap().clone();
        cable.inject(0, &nak);
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(brief(pair.poll_a()), None, "one retry is left");
        pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
        pair.settle_in_time();
        assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_SEND)));
    });
}
