// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests fast registration and invalidation: each state of a key, and each error.

use abi::*;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::driver::*;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const BIND: u32 = VIRTIO_RDMA_WC_MW_BIND_ERR;
const PROTECTION: u32 = VIRTIO_RDMA_WC_LOC_PROT_ERR;
const OPERATION: u32 = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
const PAGES: [u64; 3] = [DATA + 0x3000, DATA + 0x1000, DATA + 0x8000];
/// The address by which peers name the region, 0x10 bytes into its first page.
const IOVA: u64 = 0x7000_0010;
const LEN: u64 = 0x2800;

/// Does a work request of one guest, and returns its status.
fn post(pair: &mut Pair, which: usize, send: &Send) -> u32 {
    let End { qpn, cqn, .. } = pair.ends[which];
    let guest = if which == 0 { &mut pair.a } else { &mut pair.b };
    guest.post_send(qpn, send);
    pair.settle_in_time();
    let guest = if which == 0 { &mut pair.a } else { &mut pair.b };
    let cqe = guest.poll(cqn).expect("a completion");
    assert_eq!((cqe.wr_id, u32::from(cqe.opcode) < 128), (send.wr_id, true));
    cqe.status.into()
}

/// A region of guest b.
fn region(pair: &mut Pair) -> virtio_rdma_rsp_mr {
    pair.b.create_mr(pair.ends[1].pdn, 4).unwrap()
}

fn register(pair: &mut Pair, key: u32) -> u32 {
    let reg = pair.b.registration(key, ALL, IOVA, LEN, &PAGES);
    post(pair, 1, &Send::reg_mr(1, reg))
}

fn invalidate(pair: &mut Pair, key: u32) -> u32 {
    post(pair, 1, &Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(key))
}

/// Writes from guest a by a key of guest b.
fn write(pair: &mut Pair, key: u32, at: u64, len: u32) -> u32 {
    let local = [sge(DATA, len, pair.ends[0].key)];
    post(pair, 0, &Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(at, key))
}

/// The status of a SEND whose key cannot be invalidated. The receive fails, and the responder sends no
/// answer (IBA 9.9.3.1, class J).
const REFUSED: (u32, u32) = (VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR);

/// Sends from guest a, and makes guest b invalidate a key. Returns the status at both ends.
fn send_with_inv(pair: &mut Pair, key: u32) -> (u32, u32) {
    let [a, b] = pair.ends;
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 64, b.key)]);
    let local = [sge(DATA, 8, a.key)];
    let send = Send::new(4, VIRTIO_RDMA_WR_SEND_WITH_INV, &local).invalidate(key);
    let status = post(pair, 0, &send);
    let cqe = pair.poll_b().unwrap();
    if u32::from(cqe.status) == OK {
        assert_eq!((cqe.wc_flags, cqe.ex), (VIRTIO_RDMA_WC_WITH_INVALIDATE, key));
    }
    (status, cqe.status.into())
}

#[test]
pub fn a_region_gets_pages_and_loses_them() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    let before = pair.b.query(pair.ends[1].qpn).sq_psn;
    for round in 0..3_u32 {
        let key = mr.rkey & !0xff | round;
        let data = pair.a.fill(DATA, LEN as usize, round as u8);
        assert_eq!(register(&mut pair, key), OK);
        assert_eq!(write(&mut pair, key, IOVA, LEN as u32), OK);
        let found = [
            pair.b.bytes(PAGES[0] + 0x10, 0xff0),
            pair.b.bytes(PAGES[1], 0x1000),
            pair.b.bytes(PAGES[2], 0x810),
        ];
        assert_eq!(found.concat(), data);
        assert_eq!(invalidate(&mut pair, key), OK);
        assert_eq!(invalidate(&mut pair, key), OK, "FREE is no error for its owner");
    }
    assert_eq!(pair.b.query(pair.ends[1].qpn).sq_psn, before);
    assert_eq!(write(&mut pair, mr.rkey & !0xff | 2, IOVA, 1), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
}

#[test]
pub fn pages_have_the_size_that_is_asked_for() {
    let mut pair = Pair::new();
    let mr = pair.b.create_mr(pair.ends[1].pdn, 2).unwrap();
    // The region begins within a page of 16 KiB, and ends within another one at a lower address.
    let (pages, len) = ([DATA + 0x8000, DATA], 0x5800);
    let mut reg = pair.b.registration(mr.rkey, ALL, 0x7000_1010, len, &pages);
    reg.page_shift = 14;
    assert_eq!(post(&mut pair, 1, &Send::reg_mr(1, reg)), OK);
    let data = pair.a.fill(DATA, len as usize, 7);
    assert_eq!(write(&mut pair, mr.rkey, 0x7000_1010, len as u32), OK);
    let found = [pair.b.bytes(pages[0] + 0x1010, 0x2ff0), pair.b.bytes(pages[1], 0x2810)];
    assert_eq!(found.concat(), data);
    assert_eq!(write(&mut pair, mr.rkey, 0x7000_1010 + len, 1), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
}

#[test]
pub fn pages_of_other_sizes_fail() {
    let with = |shift, page| {
        let mut pair = Pair::new();
        let mr = region(&mut pair);
        let mut reg = pair.b.registration(mr.rkey, ALL, 0, 0x1000, &[page]);
        reg.page_shift = shift;
        post(&mut pair, 1, &Send::reg_mr(1, reg))
    };
    for shift in [0, 11, 32, 64, 255] {
        assert_eq!(with(shift, DATA), BIND, "{shift}");
    }
    assert_eq!(with(14, DATA), OK);
    assert_eq!(with(14, DATA + 0x1000), PROTECTION, "not aligned to its size");
    assert_eq!(with(31, !0x7fff_ffff), PROTECTION, "it wraps");
}

#[test]
pub fn a_free_region_gives_no_access() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(write(&mut pair, mr.rkey, 0, 1), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
}

#[test]
pub fn an_old_key_gives_no_access() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(register(&mut pair, mr.rkey ^ 1), OK);
    assert_eq!(write(&mut pair, mr.rkey, IOVA, 1), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
}

#[test]
pub fn requests_in_the_wrong_state_or_with_wrong_values_fail() {
    let valid = |pair: &mut Pair, key| assert_eq!(register(pair, key), OK);
    let reg = |change: &dyn Fn(&mut WrReg), first: bool| {
        let mut pair = Pair::new();
        let mr = region(&mut pair);
        if first {
            valid(&mut pair, mr.rkey);
        }
        let mut reg = pair.b.registration(mr.rkey, ALL, IOVA, LEN, &PAGES);
        change(&mut reg);
        let status = post(&mut pair, 1, &Send::reg_mr(1, reg));
        let state = u32::from(pair.b.query(pair.ends[1].qpn).qp_state);
        assert_eq!(state == VIRTIO_RDMA_QPS_ERR, status != OK);
        assert_eq!(pair.b.device.counter(Counter::BadRegistration), u64::from(status != OK));
        status
    };
    assert_eq!(reg(&|_| (), false), OK);
    assert_eq!(reg(&|_| (), true), BIND, "VALID already");
    assert_eq!(reg(&|reg| reg.key ^= 0x100, false), BIND, "no such region");
    assert_eq!(reg(&|reg| reg.length = 0, false), BIND);
    assert_eq!(reg(&|reg| reg.length = u64::MAX, false), BIND);
    assert_eq!(reg(&|reg| reg.npages = 2, false), BIND);
    assert_eq!(reg(&|reg| (reg.npages, reg.length) = (5, 0x4800), false), BIND, "max_num_sg");
    assert_eq!(reg(&|reg| reg.iova = u64::MAX - 0xfef, false), BIND, "it wraps");
    assert_eq!(reg(&|reg| reg.access = VIRTIO_RDMA_ACCESS_REMOTE_WRITE, false), BIND);
    assert_eq!(reg(&|reg| reg.access = 1 << 30, false), BIND);
    assert_eq!(reg(&|reg| reg.pages = 1 << 40, false), PROTECTION, "no list");
    assert_eq!(reg(&|reg| reg.pages += 1, false), PROTECTION, "pages that are not aligned");
}

#[test]
pub fn pages_that_are_not_memory_fail() {
    for page in [1 << 40, !0xfff, DATA + 8] {
        let mut pair = Pair::new();
        let mr = region(&mut pair);
        let reg = pair.b.registration(mr.rkey, ALL, 0x1000, 0x1000, &[page]);
        assert_eq!(post(&mut pair, 1, &Send::reg_mr(1, reg)), PROTECTION);
    }
}

#[test]
pub fn other_keys_are_not_invalidated() {
    let cases: [&dyn Fn(&mut Pair) -> u32; 4] = [
        &|pair| pair.ends[1].key,
        &|pair| region(pair).rkey ^ 0x1,
        &|pair| region(pair).rkey ^ 0x100,
        &|pair| {
            let pdn = pair.b.create_pd();
            pair.b.create_mr(pdn, 1).unwrap().rkey
        },
    ];
    for choose in cases {
        let mut pair = Pair::new();
        let key = choose(&mut pair);
        assert_eq!(invalidate(&mut pair, key), BIND);
        let mut pair = Pair::new();
        let key = choose(&mut pair);
        assert_eq!(send_with_inv(&mut pair, key), REFUSED);
        assert_eq!(u32::from(pair.b.query(pair.ends[1].qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
    }
}

#[test]
pub fn a_region_of_another_pd_is_not_registered() {
    let mut pair = Pair::new();
    let pdn = pair.b.create_pd();
    let mr = pair.b.create_mr(pdn, 4).unwrap();
    assert_eq!(register(&mut pair, mr.rkey), BIND);
}

#[test]
pub fn the_peer_invalidates() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(register(&mut pair, mr.rkey), OK);
    assert_eq!(write(&mut pair, mr.rkey, IOVA, 64), OK);
    assert_eq!(send_with_inv(&mut pair, mr.rkey), (OK, OK));
    assert_eq!(register(&mut pair, mr.rkey), OK, "it was FREE");
    assert_eq!(send_with_inv(&mut pair, mr.rkey), (OK, OK));
    assert_eq!(send_with_inv(&mut pair, mr.rkey), REFUSED, "it is FREE");
}

#[test]
pub fn a_read_invalidates_its_own_side() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(register(&mut pair, mr.rkey), OK);
    let data = pair.a.fill(DATA + 0x20, 64, 5);
    let read = |pair: &Pair| {
        Send::new(5, VIRTIO_RDMA_WR_RDMA_READ_WITH_INV, &[sge(IOVA, 64, mr.lkey)])
            .rdma(DATA + 0x20, pair.ends[0].key)
            .invalidate(mr.rkey)
    };
    let send = read(&pair);
    assert_eq!(post(&mut pair, 1, &send), OK);
    assert_eq!(pair.b.bytes(PAGES[0] + 0x10, 64), data);
    assert_eq!(post(&mut pair, 1, &send), PROTECTION, "it is FREE");
}

#[test]
pub fn work_requests_of_one_queue_are_ordered() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let mr = region(&mut pair);
    let data = pair.a.fill(DATA, 64, 3);
    // One thread does this in one turn, with keys that are used again.
    for round in 0..4 {
        let reg = pair.b.registration(mr.rkey, ALL, IOVA, LEN, &PAGES);
        let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &[sge(IOVA + 64 * round, 64, mr.lkey)]);
        pair.b.post_send(b.qpn, &Send::reg_mr(0, reg));
        pair.b.post_send(b.qpn, &read.rdma(DATA, a.key));
        let inv = Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(mr.rkey);
        pair.b.post_send(b.qpn, &inv.flags(VIRTIO_RDMA_SEND_SIGNALED | VIRTIO_RDMA_SEND_FENCE));
    }
    pair.settle();
    for _ in 0..4 {
        for (wr_id, opcode) in [
            (0, VIRTIO_RDMA_WC_REG_MR),
            (1, VIRTIO_RDMA_WC_RDMA_READ),
            (2, VIRTIO_RDMA_WC_LOCAL_INV),
        ] {
            assert_eq!(brief(pair.poll_b()), Some((wr_id, OK, opcode)));
        }
    }
    assert_eq!(pair.b.bytes(PAGES[0] + 0x10, 256), data.repeat(4));
}

/// A LOCAL_INV without a fence begins when the READ in front of it has completed, whose data then is all there.
#[test]
pub fn an_invalidation_waits_for_a_read() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    for round in 0..8 {
        let mr = region(&mut pair);
        assert_eq!(register(&mut pair, mr.rkey), OK);
        let len = 1 << (3 + round);
        let data = pair.a.fill(DATA, len, round);
        pair.b.fill(PAGES[0], 0x1000, 0);
        let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &[sge(IOVA, len as u32, mr.lkey)]);
        pair.b.post_send(b.qpn, &read.rdma(DATA, a.key));
        let inv = Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(mr.rkey);
        pair.b.post_send(b.qpn, &inv);
        pair.settle_in_time();
        let statuses = [pair.poll_b(), pair.poll_b()].map(|cqe| brief(cqe).map(|it| (it.0, it.1)));
        assert_eq!(statuses, [Some((1, OK)), Some((2, OK))]);
        assert_eq!(pair.b.bytes(PAGES[0] + 0x10, len), data);
    }
}

#[test]
pub fn create_mr_checks_what_it_is_asked() {
    let mut pair = Pair::new();
    let pdn = pair.ends[1].pdn;
    assert_eq!(pair.b.create_mr(99, 1).err(), Some(VIRTIO_RDMA_STATUS_NO_OBJECT));
    assert_eq!(pair.b.create_mr(pdn, 0).err(), Some(VIRTIO_RDMA_STATUS_INVAL));
    assert_eq!(pair.b.create_mr(pdn, 513).err(), Some(VIRTIO_RDMA_STATUS_INVAL));
    let request = virtio_rdma_cmd_create_mr { pdn, access_flags: LOCAL, max_num_sg: 1 };
    let result = pair.b.command::<_, virtio_rdma_rsp_mr>(VIRTIO_RDMA_CMD_CREATE_MR, &request);
    assert_eq!(result.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
    // One of 1024 extents is in use. The extents that regions have reserved are freed with them.
    let mr = pair.b.create_mr(pdn, 512).unwrap();
    assert_eq!(pair.b.create_mr(pdn, 512).err(), Some(VIRTIO_RDMA_STATUS_NO_RESOURCE));
    let destroy = virtio_rdma_cmd_destroy_pd { pdn };
    let busy = pair.b.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy);
    assert_eq!(busy, Err(VIRTIO_RDMA_STATUS_BUSY));
    assert_eq!(pair.b.dereg_mr(mr.mrn), Ok(()));
    assert!(pair.b.create_mr(pdn, 512).is_ok());
}

#[test]
pub fn a_region_that_is_destroyed_gives_no_access() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(register(&mut pair, mr.rkey), OK);
    assert_eq!(pair.b.dereg_mr(mr.mrn), Ok(()));
    assert_eq!(write(&mut pair, mr.rkey, IOVA, 1), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
}

#[test]
pub fn regions_follow_the_memory_map() {
    let mut pair = Pair::new();
    let mr = region(&mut pair);
    assert_eq!(register(&mut pair, mr.rkey), OK);
    pair.b.device.set_memory(&pair.b.memory);
    assert_eq!(write(&mut pair, mr.rkey, IOVA, LEN as u32), OK);
    let (less, _) = pair.b.memory.without(0, u64::MAX);
    pair.b.device.set_memory(&less);
    pair.b.device.set_memory(&pair.b.memory);
    assert_eq!(pair.b.device.status().mrs, 2);
}

#[test]
pub fn without_the_feature_there_is_none() {
    let pair = Pair::new();
    let features = pair.b.device.features() & !(1 << VIRTIO_RDMA_F_FAST_REG);
    pair.b.device.reset();
    pair.b.device.set_driver_features(features & !(1 << VIRTIO_RDMA_F_RINGS));
    let request = [
        &[VIRTIO_RDMA_CMD_CREATE_MR as u8],
        virtio_rdma_cmd_create_mr { pdn: 0, access_flags: 0, max_num_sg: 1 }.as_bytes(),
    ];
    let mut reply = [0; 16];
    assert_eq!(pair.b.device.command(&request.concat(), &mut reply), 1);
    assert_eq!(u32::from(reply[0]), VIRTIO_RDMA_STATUS_UNSUPPORTED);
}

/// A requester that may not invalidate finds that by itself: its peer, which has the feature, hears nothing of it.
#[test]
fn without_a_feature_nothing_is_invalidated() {
    with_rings(|| {
        let mut pair = Pair::new();
        let missing = 1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_MW;
        let features = pair.a.device.features() & !missing;
        pair.a.device.reset();
        pair.a.start_with(closed(features & !(1 << VIRTIO_RDMA_F_VIRTQUEUES)));
        for opcode in [
            VIRTIO_RDMA_WR_LOCAL_INV,
            VIRTIO_RDMA_WR_SEND_WITH_INV,
            VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
        ] {
            let a = End::new(&mut pair.a, VIRTIO_RDMA_QPT_RC);
            let b = End::new(&mut pair.b, VIRTIO_RDMA_QPT_RC);
            pair.a.connect(a.qpn, pair.b.gid, b.qpn);
            pair.b.connect(b.qpn, pair.a.gid, a.qpn);
            pair.ends = [a, b];
            pair.b.post_recv(b.qpn, 9, &[sge(DATA, 64, b.key)]);
            let send = Send::new(1, opcode, &[]).rdma(DATA, b.key).invalidate(b.key);
            assert_eq!(post(&mut pair, 0, &send), OPERATION, "{opcode}");
            assert!(pair.poll_b().is_none(), "{opcode}");
        }
    });
}

/// A responder without both features refuses to invalidate.
#[test]
fn a_responder_without_a_feature_invalidates_nothing() {
    with_rings(|| {
        let mut pair = Pair::new();
        let missing = 1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_MW;
        let features = pair.b.device.features() & !missing;
        pair.b.device.reset();
        pair.b.start_with(closed(features & !(1 << VIRTIO_RDMA_F_VIRTQUEUES)));
        let a = End::new(&mut pair.a, VIRTIO_RDMA_QPT_RC);
        let b = End::new(&mut pair.b, VIRTIO_RDMA_QPT_RC);
        pair.a.connect(a.qpn, gid(2), b.qpn);
        pair.b.connect(b.qpn, gid(1), a.qpn);
        pair.ends = [a, b];
        let invalid = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
        assert_eq!(send_with_inv(&mut pair, b.key), (invalid, invalid));
    });
}

/// A program writes REG_MR into its own ring.
#[test]
fn programs_register_nothing() {
    with_rings(|| {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let mr = region(&mut pair);
        let region = pair.b.take_region();
        let base = Guest::qp_request(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        let mut request = pair.b.qp_ring_request(region, base);
        request.flags = 2;
        let refused: Result<virtio_rdma_rsp_create_qp, u32> =
            pair.b.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
        assert_eq!(refused.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
        request.flags = 0;
        let reply: virtio_rdma_rsp_create_qp =
            pair.b.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request).unwrap();
        pair.b.qp_rings.insert(reply.qpn, QpRings::new(region, [request.sq, request.rq]));
        pair.b.connect(reply.qpn, pair.a.gid, a.qpn);
        let reg = pair.b.registration(mr.rkey, ALL, IOVA, LEN, &PAGES);
        pair.b.post_send(reply.qpn, &Send::reg_mr(1, reg));
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((1, OPERATION, VIRTIO_RDMA_WC_REG_MR)));
        assert_eq!(register(&mut pair, mr.rkey), OK, "it is FREE still");
    });
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Register { region: usize, low: u8 },
    Invalidate { region: usize, low: u8 },
    InvalidateByPeer { region: usize, low: u8 },
    Write { region: usize, low: u8 },
    Remap,
}

fn action() -> impl Strategy<Value = Action> {
    let key = || (0..2_usize, 0..3_u8);
    prop_oneof![
        4 => key().prop_map(|(region, low)| Action::Register { region, low }),
        2 => key().prop_map(|(region, low)| Action::Invalidate { region, low }),
        2 => key().prop_map(|(region, low)| Action::InvalidateByPeer { region, low }),
        4 => key().prop_map(|(region, low)| Action::Write { region, low }),
        1 => Just(Action::Remap),
    ]
}

/// The expected state of a region: the low bits of its key, and whether it is VALID.
#[derive(Clone, Copy)]
struct Model {
    low: u8,
    valid: bool,
}

/// Connects both ends again after an error.
fn recover(pair: &mut Pair) {
    let [a, b] = pair.ends;
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    while pair.poll_a().is_some() || pair.poll_b().is_some() {}
    let (to_a, to_b) = (pair.a.gid, pair.b.gid);
    pair.a.connect(a.qpn, to_b, b.qpn);
    pair.b.connect(b.qpn, to_a, a.qpn);
}

fn states_follow_the_model(actions: &[Action]) {
    let mut pair = Pair::new();
    let regions = [region(&mut pair), region(&mut pair)];
    let mut model = regions.map(|mr| Model { low: mr.rkey as u8, valid: false });
    for action in actions {
        let of = |region: usize, low: u8| regions[region].rkey & !0xff | u32::from(low);
        let (found, expected) = match *action {
            Action::Register { region, low } => {
                let expected = if model[region].valid { BIND } else { OK };
                if expected == OK {
                    model[region] = Model { low, valid: true };
                }
                (register(&mut pair, of(region, low)), expected)
            }
            Action::Invalidate { region, low } => {
                let expected = if model[region].low == low { OK } else { BIND };
                model[region].valid &= expected != OK;
                (invalidate(&mut pair, of(region, low)), expected)
            }
            Action::InvalidateByPeer { region, low } => {
                let may = model[region].valid && model[region].low == low;
                model[region].valid &= !may;
                let expected = if may { OK } else { REFUSED.0 };
                (send_with_inv(&mut pair, of(region, low)).0, expected)
            }
            Action::Write { region, low } => {
                let may = model[region].valid && model[region].low == low;
                let expected = if may { OK } else { VIRTIO_RDMA_WC_REM_ACCESS_ERR };
                (write(&mut pair, of(region, low), IOVA, 64), expected)
            }
            Action::Remap => {
                pair.b.device.set_memory(&pair.b.memory);
                (OK, OK)
            }
        };
        assert_eq!(found, expected, "{action:?}");
        if found != OK {
            recover(&mut pair);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn keys_are_in_the_state_that_the_work_requests_left_them(
        actions in prop::collection::vec(action(), 1..40),
    ) {
        states_follow_the_model(&actions);
    }

    #[test]
    fn the_same_with_rings(actions in prop::collection::vec(action(), 1..40)) {
        with_rings(|| states_follow_the_model(&actions));
    }
}
