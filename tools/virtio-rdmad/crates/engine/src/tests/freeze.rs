// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests devices that are frozen: nothing touches the guest's memory, and nothing is lost.

use std::sync::Arc;
use std::time::Duration;

use abi::*;
use memory::GuestMemory;
use zerocopy::FromZeros;

use super::cable::{over_a_cable, Faults};
use super::datagram::{to_rts, QKEY};
use super::driver::*;
use crate::{Counter, Next};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const RETRIES: u32 = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const RDMA_READ: u32 = VIRTIO_RDMA_WR_RDMA_READ;
const ADD: u32 = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const UC: u32 = VIRTIO_RDMA_QPT_UC;

/// More time than all retries of a QP of these tests take.
const LONG: Duration = Duration::from_secs(3600);
/// The address of the memory that the other guest names, and of receives.
const PLACE: u64 = DATA + (4 << 20);
/// The bytes of a message of many chunks.
const MANY: usize = 2 << 20;

/// Runs a test with virtqueues and with rings. An upgrade would end a freeze.
fn with_both(test: impl Fn()) {
    without_upgrades();
    test();
    with_rings(test);
}

/// Makes a guest carry out some chunks of a message of [`MANY`] bytes.
fn run_some(guest: &Guest) {
    for _ in 0..4 {
        guest.device.run(1);
    }
}

/// Freezes a guest, and returns its memory as it is then.
fn freeze(guest: &Guest) -> Vec<u8> {
    guest.freeze();
    guest.all_bytes()
}

/// Lets much time pass, and checks that the frozen guest B has nothing done to it.
fn check_is_untouched(pair: &Pair, before: &[u8]) {
    check_is_untouched_for(pair, before, LONG);
    assert_eq!(pair.b.device.run(64), Next::Idle);
    assert!(!pair.b.device.arm());
}

/// Does what [`check_is_untouched`] does, for a time in which a peer may ask again and again.
fn check_is_untouched_for(pair: &Pair, before: &[u8], time: Duration) {
    pair.settle_for(time);
    assert!(pair.b.all_bytes() == before, "the memory of a frozen guest has changed");
}

/// Connects the QPs of a pair that was made for this type.
fn connected(kind: u32) -> Pair {
    let mut pair = Pair::unconnected(kind);
    let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
    for (guest, end, gid, peer) in [(&mut pair.a, a, gids[1], b), (&mut pair.b, b, gids[0], a)] {
        guest.make_init(end.qpn, ALL);
        guest.make_rtr(end.qpn, gid, peer.qpn, kind == RC).unwrap();
        guest.make_rts(end.qpn, kind == RC).unwrap();
    }
    pair
}

/// Returns a work request of A.
fn request(pair: &Pair, wr_id: u64, opcode: u32, len: usize) -> Send {
    let [a, b] = pair.ends;
    let send = Send::new(wr_id, opcode, &[sge(DATA, len as u32, a.key)]);
    match opcode {
        ADD => send.atomic(PLACE, b.key, 5, 0),
        _ => send.rdma(PLACE, b.key),
    }
}

/// Posts a work request of A.
fn post(pair: &mut Pair, wr_id: u64, opcode: u32, len: usize) {
    let send = request(pair, wr_id, opcode, len);
    pair.a.post_send(pair.ends[0].qpn, &send);
}

fn post_recv(pair: &mut Pair, wr_id: u64, len: usize) {
    let b = pair.ends[1];
    pair.b.post_recv(b.qpn, wr_id, &[sge(PLACE, len as u32, b.key)]);
}

/// Takes the CQE of a work request of A, which has this status.
fn sent(pair: &mut Pair, wr_id: u64, status: u32) {
    let cqe = brief(pair.poll_a()).map(|(wr_id, status, _)| (wr_id, status));
    assert_eq!(cqe, Some((wr_id, status)));
}

/// Takes the CQE of a receive of B.
fn received(pair: &mut Pair, wr_id: u64) {
    assert_eq!(brief(pair.poll_b()), Some((wr_id, OK, VIRTIO_RDMA_WC_RECV)));
}

/// Makes A carry out each operation in the memory of B. `begin` begins with it, `change` is done before it arrives, and
/// it arrives behind that.
fn each_operation(
    kind: u32,
    len: usize,
    begin: impl Fn(&mut Pair),
    change: impl Fn(&mut Pair, &[u8]),
) {
    let answered = if kind == RC { [RDMA_READ, ADD].as_slice() } else { &[] };
    for opcode in [SEND, RDMA_WRITE].iter().chain(answered) {
        if *opcode == ADD && len > 8 {
            continue;
        }
        let mut pair = connected(kind);
        let len = if *opcode == ADD { 8 } else { len };
        let data = pair.a.fill(DATA, len, 3);
        let theirs = pair.b.fill(PLACE, len, 90);
        post_recv(&mut pair, 9, len);
        pair.settle();
        post(&mut pair, 1, *opcode, len);
        begin(&mut pair);
        let before = freeze(&pair.b);
        check_is_untouched(&pair, &before);
        assert!(pair.poll_a().is_none(), "operation {opcode} ends on a frozen guest");
        change(&mut pair, &before);
        pair.b.device.thaw();
        assert!(!pair.b.device.is_frozen());
        pair.settle();
        sent(&mut pair, 1, OK);
        if *opcode == SEND {
            received(&mut pair, 9);
        }
        let (own, found) = (pair.a.bytes(DATA, len), pair.b.bytes(PLACE, len));
        match *opcode {
            RDMA_READ => assert!(own == theirs && found == theirs),
            ADD => {
                let word = u64::from_le_bytes(theirs.clone().try_into().unwrap());
                assert!(own == theirs && found == word.wrapping_add(5).to_le_bytes());
            }
            _ => assert!(found == data && own == data),
        }
        assert_eq!(pair.counter(Counter::Timeouts) + pair.counter(Counter::RnrNaks), 0);
    }
}

/// Messages to a frozen guest wait, for longer than all retries, and arrive when it goes on.
#[test]
pub fn messages_wait_for_a_frozen_guest() {
    with_both(|| {
        each_operation(RC, 3000, |_| (), |_, _| ());
        each_operation(RC, 8, |_| (), |_, _| ());
        each_operation(UC, 3000, |_| (), |_, _| ());
    });
}

/// A guest that is frozen goes on in a copy of its memory. The memory of before stays as it was.
#[test]
pub fn a_frozen_guest_goes_on_in_a_copy_of_its_memory() {
    with_both(|| {
        for kind in [RC, UC] {
            each_operation(kind, 8, |_| (), check_moves);
        }
    });
}

/// Moves the frozen guest B to a copy of its memory, and spoils the memory of before: nobody may read it.
fn check_moves(pair: &mut Pair, before: &[u8]) {
    let old = pair.b.move_memory();
    assert!(pair.b.device.is_frozen());
    check_is_untouched(pair, before);
    let mut bytes = vec![0; pair.b.sizes.memory as usize];
    old.read(0, &mut bytes).unwrap();
    assert!(bytes == before[..bytes.len()], "the memory of before has changed");
    old.write(0, &vec![0xee; bytes.len()]).unwrap();
    OLD.with_borrow_mut(|all| all.push(old));
}

thread_local! {
    /// The memory that guests have left.
    static OLD: std::cell::RefCell<Vec<GuestMemory>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Checks that nothing was written to the memory that guests have left, and forgets it.
fn check_what_was_left() {
    for old in OLD.take() {
        let mut bytes = vec![0; 32 << 20];
        old.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0xee), "a guest's old memory was written");
    }
}

/// A message of many chunks stops between two of them, and goes on in the memory that the guest has then.
#[test]
pub fn a_long_message_stops_in_the_middle() {
    with_both(|| {
        let begin = |pair: &mut Pair| {
            run_some(&pair.a);
            assert!(pair.poll_a().is_none(), "the message is short");
        };
        for kind in [RC, UC] {
            each_operation(kind, MANY, begin, |_, _| ());
            each_operation(kind, MANY, begin, check_moves);
            check_what_was_left();
        }
    });
}

/// A guest that moves again and again misses nothing, and each copy that it leaves stays as it is.
#[test]
pub fn traffic_goes_on_from_copy_to_copy() {
    with_both(|| {
        let mut pair = connected(RC);
        for round in 0..4_u8 {
            let data = pair.a.fill(DATA, 5000, round);
            post_recv(&mut pair, 9, 5000);
            let before = freeze(&pair.b);
            post(&mut pair, 1, SEND, 5000);
            post(&mut pair, 2, RDMA_WRITE, 100);
            check_moves(&mut pair, &before);
            pair.b.device.thaw();
            pair.settle();
            sent(&mut pair, 1, OK);
            sent(&mut pair, 2, OK);
            received(&mut pair, 9);
            assert!(pair.b.bytes(PLACE, 5000) == data);
            // The guest's own requests go on as well.
            let [a, b] = pair.ends;
            let theirs = pair.b.fill(DATA, 700, round.wrapping_add(100));
            let write = Send::new(3, RDMA_WRITE, &[sge(DATA, 700, b.key)]).rdma(PLACE, a.key);
            pair.b.post_send(b.qpn, &write);
            pair.settle();
            assert_eq!(brief(pair.poll_b()).map(|cqe| (cqe.0, cqe.1)), Some((3, OK)));
            assert!(pair.a.bytes(PLACE, 700) == theirs);
            check_what_was_left();
        }
    });
}

/// What the guest posts while its device is frozen is done afterwards, and so is what was under way: the frozen guest
/// is the requester here.
#[test]
pub fn requests_of_a_frozen_guest_go_on_afterwards() {
    with_both(|| {
        let mut pair = connected(RC);
        let [a, b] = pair.ends;
        let data = pair.b.fill(DATA, MANY, 7);
        let write = |wr_id| {
            Send::new(wr_id, RDMA_WRITE, &[sge(DATA, MANY as u32, b.key)]).rdma(PLACE, a.key)
        };
        pair.b.post_send(b.qpn, &write(1));
        run_some(&pair.b);
        pair.b.freeze();
        let theirs = pair.a.all_bytes();
        pair.b.post_send(b.qpn, &write(2));
        let before = pair.b.all_bytes();
        check_is_untouched(&pair, &before);
        assert!(pair.a.all_bytes() == theirs && pair.poll_b().is_none());
        pair.b.device.thaw();
        pair.settle();
        for wr_id in [1, 2] {
            assert_eq!(brief(pair.poll_b()).map(|cqe| (cqe.0, cqe.1)), Some((wr_id, OK)));
        }
        assert!(pair.a.bytes(PLACE, MANY) == data);
    });
}

/// The time of a freeze counts for no RNR timer: a requester that waits for a receive has its retries afterwards, and
/// is told of the receive.
#[test]
pub fn a_freeze_takes_no_rnr_retries() {
    with_both(|| {
        let mut pair = Pair::unconnected(RC);
        (pair.a.rnr_retry, pair.b.rnr_retry) = (1, 1);
        let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
        pair.a.connect(a.qpn, gids[1], b.qpn);
        pair.b.connect(b.qpn, gids[0], a.qpn);
        let data = pair.a.fill(DATA, 100, 4);
        post(&mut pair, 1, SEND, 100);
        pair.settle();
        for _ in 0..3 {
            let before = freeze(&pair.b);
            check_is_untouched(&pair, &before);
            pair.b.device.thaw();
            pair.settle();
            assert!(pair.poll_a().is_none());
        }
        post_recv(&mut pair, 9, 100);
        pair.settle_and_pause();
        sent(&mut pair, 1, OK);
        received(&mut pair, 9);
        assert!(pair.b.bytes(PLACE, 100) == data);
    });
}

/// A guest that is frozen before its QP is ready to receive is waited for.
#[test]
pub fn a_freeze_before_rtr_takes_no_retries() {
    with_both(|| {
        let mut pair = Pair::unconnected(RC);
        let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
        pair.a.connect(a.qpn, gids[1], b.qpn);
        post(&mut pair, 1, RDMA_WRITE, 100);
        pair.settle();
        let before = freeze(&pair.b);
        check_is_untouched_for(&pair, &before, Duration::from_secs(10));
        pair.b.device.thaw();
        pair.settle();
        pair.b.connect(b.qpn, gids[0], a.qpn);
        pair.settle();
        sent(&mut pair, 1, OK);
    });
}

/// The timers of a frozen guest stand still. A requester that waits for an answer has its retries afterwards, and the
/// time that was left before.
#[test]
pub fn the_time_of_a_frozen_guest_stands_still() {
    without_upgrades();
    let mut pair = Pair::unconnected(RC);
    let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
    pair.b.connect(b.qpn, gids[0], a.qpn);
    // A is not ready to receive.
    let write = Send::new(1, RDMA_WRITE, &[sge(DATA, 64, b.key)]).rdma(PLACE, a.key);
    let data = pair.b.fill(DATA, 64, 5);
    pair.b.post_send(b.qpn, &write);
    let end = pair.settle().unwrap();
    let left = end - crate::Clock::now(&*pair.clock);
    for _ in 0..20 {
        let before = freeze(&pair.b);
        check_is_untouched(&pair, &before);
        pair.b.device.thaw();
        let end = pair.settle().unwrap();
        assert_eq!(end - crate::Clock::now(&*pair.clock), left);
    }
    assert_eq!(pair.b.device.counter(Counter::Timeouts), 1);
    pair.a.connect(a.qpn, gids[1], b.qpn);
    pair.settle();
    assert_eq!(brief(pair.poll_b()).map(|cqe| (cqe.0, cqe.1)), Some((1, OK)));
    assert!(pair.a.bytes(PLACE, 64) == data);
}

/// A requester on the wire whose guest is frozen for long sends on afterwards: no retry is over. What comes from other
/// hosts meanwhile waits in the inbox.
#[test]
pub fn windows_outlive_a_freeze() {
    without_upgrades();
    for lost in [false, true] {
        over_a_cable(0, Faults::default(), || {
            let mut pair = connected(RC);
            let data = pair.b.fill(DATA, 9000, 8);
            let [a, b] = pair.ends;
            let write = Send::new(1, RDMA_WRITE, &[sge(DATA, 9000, b.key)]).rdma(PLACE, a.key);
            pair.b.post_send(b.qpn, &write);
            pair.b.run();
            let cable = super::cable::cable().unwrap();
            if lost {
                cable.lose();
            }
            let before = freeze(&pair.b);
            check_is_untouched(&pair, &before);
            assert_eq!(pair.a.bytes(PLACE, 9000) == data, !lost);
            pair.b.device.thaw();
            pair.settle_in_time();
            assert_eq!(brief(pair.poll_b()).map(|cqe| (cqe.0, cqe.1)), Some((1, OK)));
            assert!(pair.a.bytes(PLACE, 9000) == data);
        });
    }
}

/// A peer does with its QP what it wants while its message waits for a frozen guest: no command waits.
#[test]
pub fn a_peer_ends_while_it_waits() {
    with_both(|| {
        for way in 0..5 {
            let mut pair = connected(RC);
            let [a, b] = pair.ends;
            let before = freeze(&pair.b);
            post(&mut pair, 1, RDMA_WRITE, 100);
            check_is_untouched(&pair, &before);
            match way {
                0 => pair.a.destroy_qp(a.qpn).unwrap(),
                1 => pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap(),
                2 => {
                    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
                    sent(&mut pair, 1, VIRTIO_RDMA_WC_WR_FLUSH_ERR);
                }
                3 => {
                    pair.a.device.begin_reset();
                    pair.a.end_change();
                    pair.a.start();
                }
                _ => {
                    let device = pair.fabric.add_device(crate::DeviceConfig {
                        name: "guest3".into(),
                        mac: None,
                        ..pair.a.config()
                    });
                    pair.a.device = device;
                }
            }
            check_is_untouched(&pair, &before);
            pair.b.device.thaw();
            pair.b.run();
            let state = u32::from(pair.b.query(b.qpn).qp_state);
            assert_eq!(state, VIRTIO_RDMA_QPS_RTS);
            assert_eq!(pair.b.bytes(PLACE, 100), [0; 100]);
        }
    });
}

/// A reset ends the freeze without touching memory. A peer that waits runs out of retries, as with any guest that is
/// reset, and so it does if the device is removed.
#[test]
pub fn a_frozen_guest_is_reset_or_removed() {
    with_both(|| {
        for is_removed in [false, true] {
            let mut pair = connected(RC);
            let before = freeze(&pair.b);
            post(&mut pair, 1, RDMA_WRITE, 100);
            check_is_untouched(&pair, &before);
            if is_removed {
                let device = pair.fabric.add_device(crate::DeviceConfig {
                    name: "guest3".into(),
                    mac: None,
                    ..pair.b.config()
                });
                drop(std::mem::replace(&mut pair.b.device, device));
            } else {
                pair.b.device.begin_reset();
                pair.b.end_change();
            }
            assert!(!pair.b.device.is_frozen());
            pair.settle_in_time();
            sent(&mut pair, 1, RETRIES);
            assert!(pair.b.all_bytes() == before, "a reset touches memory");
        }
    });
}

/// A device that was not started is frozen and let go on, or reset.
#[test]
pub fn an_idle_device_is_frozen() {
    let (fabric, clock) = fabric();
    let guest = Guest::new(&fabric, &clock, 1);
    guest.device.reset();
    for is_reset in [false, true] {
        guest.freeze();
        if is_reset {
            guest.device.reset();
        } else {
            guest.device.thaw();
        }
        assert!(!guest.device.is_frozen() && guest.device.is_settled());
    }
    guest.device.thaw();
    assert!(!guest.device.is_frozen());
}

/// Datagrams to a frozen guest are dropped, so that its sender goes on with those for others.
#[test]
pub fn datagrams_to_a_frozen_guest_are_dropped() {
    with_both(|| {
        let mut pair = super::datagram::pair(VIRTIO_RDMA_QPT_UD, QKEY);
        let mut c = Guest::new(&pair.fabric, &pair.clock, 3);
        let (a, end) = (pair.ends[0], End::new(&mut c, VIRTIO_RDMA_QPT_UD));
        to_rts(&mut c, end.qpn, QKEY, false);
        let mut group = gid(0);
        group[12..].copy_from_slice(&[239, 1, 2, 3]);
        let b = pair.ends[1];
        pair.b.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, b.qpn, group).unwrap();
        c.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, end.qpn, group).unwrap();
        post_recv(&mut pair, 9, 500);
        for wr_id in [7, 8] {
            c.post_recv(end.qpn, wr_id, &[sge(PLACE, 500, end.key)]);
        }
        let before = freeze(&pair.b);
        let data = pair.a.fill(DATA, 100, 6);
        let all = VIRTIO_RDMA_MCAST_QPN;
        for (wr_id, gid, qpn) in [(1, gid(2), b.qpn), (2, gid(3), end.qpn), (3, group, all)] {
            let part = [sge(DATA, 100, a.key)];
            pair.a.post_send(a.qpn, &Send::new(wr_id, SEND, &part).ud(gid, qpn, QKEY, a.pdn));
        }
        settle(&[&pair.a, &pair.b, &c]);
        check_is_untouched(&pair, &before);
        for wr_id in [1, 2, 3] {
            sent(&mut pair, wr_id, OK);
        }
        for wr_id in [7, 8] {
            assert_eq!(brief(c.poll(end.cqn)), Some((wr_id, OK, VIRTIO_RDMA_WC_RECV)));
        }
        assert_eq!(c.bytes(PLACE + 40, 100), data);
        assert_eq!(pair.a.device.counter(Counter::DropNoReceive), 2);
        pair.b.device.thaw();
        pair.settle();
        assert!(pair.poll_b().is_none());
        let part = [sge(DATA, 100, a.key)];
        pair.a.post_send(a.qpn, &Send::new(4, SEND, &part).ud(gid(2), b.qpn, QKEY, a.pdn));
        pair.settle();
        sent(&mut pair, 4, OK);
        received(&mut pair, 9);
        assert_eq!(pair.b.bytes(PLACE + 40, 100), data);
    });
}

/// Messages for an SRQ wait, of RC and of XRC, also in the middle, and also of a guest that had no receive before.
#[test]
pub fn messages_for_srqs_wait() {
    without_upgrades();
    with_rings(|| {
        for is_xrc in [false, true] {
            for has_receive in [false, true] {
                let mut pair = Pair::unconnected(RC);
                (pair.a.rnr_retry, pair.b.rnr_retry) = (7, 7);
                let (qpn, srqn) = connect_to_srq(&mut pair, is_xrc);
                let [a, b] = pair.ends;
                let data = pair.a.fill(DATA, MANY, 1);
                let part = [sge(DATA, MANY as u32, a.key)];
                let place = [sge(PLACE, MANY as u32, b.key)];
                if has_receive {
                    pair.b.post_srq_recv(srqn, 9, &place);
                }
                let send = Send::new(1, SEND, &part);
                let send = if is_xrc { send.srqn(srqn) } else { send };
                pair.a.post_send(qpn, &send);
                run_some(&pair.a);
                let before = freeze(&pair.b);
                check_is_untouched(&pair, &before);
                assert!(pair.poll_a().is_none());
                check_moves(&mut pair, &before);
                pair.b.device.thaw();
                pair.settle_and_pause();
                if !has_receive {
                    assert!(pair.poll_a().is_none());
                    pair.b.post_srq_recv(srqn, 9, &place);
                    pair.settle_and_pause();
                }
                sent(&mut pair, 1, OK);
                received(&mut pair, 9);
                assert!(pair.b.bytes(PLACE, MANY) == data);
                check_what_was_left();
            }
        }
    });
}

/// Connects a QP of A to one of B that receives from an SRQ. Returns the number of A's QP, and of the SRQ.
fn connect_to_srq(pair: &mut Pair, is_xrc: bool) -> (u32, u32) {
    let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
    if !is_xrc {
        let srqn = pair.b.create_srq(b.pdn);
        let from = pair.a.create_qp(a.pdn, a.cqn, RC);
        let to = pair.b.create_srq_qp(b.pdn, b.cqn, RC, srqn).unwrap();
        pair.a.connect(from, gids[1], to);
        pair.b.connect(to, gids[0], from);
        return (from, srqn);
    }
    let xrcdn = pair.b.alloc_xrcd().unwrap();
    let srqn = pair.b.create_xrc_srq(b.pdn, xrcdn, b.cqn).unwrap();
    let from = pair.a.create_xrc_ini(a.pdn, a.cqn).unwrap();
    let to = pair.b.create_xrc_tgt(xrcdn).unwrap();
    pair.a.connect_ini(from, gids[1], to);
    pair.b.connect_tgt(to, gids[0], from);
    (from, srqn)
}

/// Events of a frozen guest, and the status that anybody asks for, touch no memory. The events come afterwards.
#[test]
pub fn events_wait_for_the_thaw() {
    with_both(|| {
        let mut pair = connected(RC);
        post_recv(&mut pair, 9, 100);
        while pair.b.poll_event().is_some() {}
        let waiting = |pair: &Pair| {
            let status = pair.b.device.status();
            status.qps.iter().map(|qp| qp.receives).sum::<u16>()
        };
        assert_eq!(waiting(&pair), 1);
        let before = freeze(&pair.b);
        assert_eq!(waiting(&pair), 0);
        pair.b.device.fail();
        check_is_untouched(&pair, &before);
        pair.b.device.thaw();
        pair.settle();
        assert_eq!(pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0)));
        assert_eq!(waiting(&pair), 1);
    });
}

/// A peer that has placed CQEs tells of them at the end of its round, without the lock under which it placed them. If
/// the guest is frozen then, it is told afterwards.
#[test]
pub fn cqes_are_announced_after_the_thaw() {
    without_upgrades();
    with_rings(|| {
        let mut pair = connected(RC);
        let cqn = pair.ends[1].cqn;
        pair.b.arm_cq(cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
        let mut cqe = virtio_rdma_ring_cqe::new_zeroed();
        cqe.wr_id = 9;
        let hca = Arc::clone(pair.b.device.hca());
        hca.complete(cqn as u16, [(&cqe, false)].into_iter());
        let before = freeze(&pair.b);
        hca.announce(cqn as u16);
        check_is_untouched(&pair, &before);
        assert_eq!(pair.b.cq_signals(cqn), 0);
        pair.b.device.thaw();
        pair.settle();
        assert_eq!(pair.b.cq_signals(cqn), 1);
        assert_eq!(pair.b.poll(cqn).map(|cqe| cqe.wr_id), Some(9));
    });
}

/// A guest whose rings are not in the memory that it gets while it is frozen fails when it goes on, and its peer does
/// not wait for ever.
#[test]
pub fn rings_that_are_lost_in_a_freeze_end_their_qps() {
    without_upgrades();
    with_rings(|| {
        let mut pair = connected(RC);
        while pair.b.poll_event().is_some() {}
        let before = freeze(&pair.b);
        post(&mut pair, 1, RDMA_WRITE, 100);
        check_is_untouched(&pair, &before);
        let less = GuestMemory::anonymous(&[(0, pair.b.sizes.regions)]).unwrap();
        less.write(0, &before[..pair.b.sizes.regions as usize]).unwrap();
        pair.b.device.begin_memory(&less);
        pair.b.end_change();
        pair.b.device.thaw();
        pair.settle_in_time();
        sent(&mut pair, 1, RETRIES);
    });
}

/// A command that comes while a device is frozen is carried out afterwards.
#[test]
pub fn commands_wait_for_the_thaw() {
    with_both(|| {
        let mut pair = connected(RC);
        pair.b.freeze();
        let reply = pair.b.begin_command(VIRTIO_RDMA_CMD_CREATE_PD, &());
        pair.b.memory.write(reply, &[0xff]).unwrap();
        let before = pair.b.all_bytes();
        check_is_untouched(&pair, &before);
        check_moves(&mut pair, &before);
        pair.b.device.thaw();
        pair.settle();
        assert_eq!(pair.b.bytes(reply, 1), [0]);
    });
}

/// An image of a frozen device is one of a device that runs: what waited for the guest arrives in the successor.
#[test]
pub fn the_successor_of_a_frozen_device_runs() {
    with_both(|| {
        let mut pair = connected(RC);
        let data = pair.a.fill(DATA, MANY, 2);
        post_recv(&mut pair, 9, MANY);
        post(&mut pair, 1, SEND, MANY);
        run_some(&pair.a);
        let before = freeze(&pair.b);
        check_is_untouched(&pair, &before);
        let fabric = crate::Fabric::new(fabric_config(&pair.clock));
        reload(&mut [&mut pair.a, &mut pair.b], &fabric);
        assert!(!pair.b.device.is_frozen());
        pair.settle();
        sent(&mut pair, 1, OK);
        received(&mut pair, 9);
        assert!(pair.b.bytes(PLACE, MANY) == data);
    });
}

/// A freeze that has not come to its end is taken back, and a second one changes nothing.
#[test]
pub fn a_freeze_is_taken_back() {
    with_both(|| {
        let mut pair = connected(RC);
        for _ in 0..3 {
            pair.b.device.begin_freeze();
            pair.b.device.thaw();
            assert!(pair.b.device.is_settled() && !pair.b.device.is_frozen());
            pair.b.freeze();
            pair.b.freeze();
            pair.b.device.thaw();
            post(&mut pair, 1, RDMA_WRITE, 100);
            pair.settle();
            sent(&mut pair, 1, OK);
        }
    });
}
