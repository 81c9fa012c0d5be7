// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests memory windows: the access that they give, each state of their keys, and each error.

use abi::*;
use proptest::prelude::*;
use zerocopy::FromZeros;

use super::driver::*;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const BIND: u32 = VIRTIO_RDMA_WC_MW_BIND_ERR;
const OPERATION: u32 = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
const REFUSED: u32 = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
/// The status of a SEND whose key cannot be invalidated. The responder does not answer (IBA 9.9.3.1,
/// class J).
const NOT_INVALIDATED: u32 = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
const ONE: u32 = VIRTIO_RDMA_MW_TYPE_1;
const TWO: u32 = VIRTIO_RDMA_MW_TYPE_2;
const ZERO_BASED: u32 = VIRTIO_RDMA_ACCESS_ZERO_BASED;
const MW_BIND: u32 = VIRTIO_RDMA_ACCESS_MW_BIND;
/// The pages of a region of guest b to which windows are bound. They are not contiguous, and the region
/// begins in the middle of the first one.
const PAGES: [u64; 3] = [DATA + 0x43000, DATA + 0x41000, DATA + 0x48000];
const START: u64 = DATA + 0x40000 + 0x800;
const LEN: u64 = 0x2000;

/// Two guests with rings. Guest b has a region, and a window of each type.
struct Bench {
    pair: Pair,
    mr: virtio_rdma_rsp_mr,
    windows: [virtio_rdma_rsp_alloc_mw; 2],
    /// The keys of the windows that b asked for last.
    keys: [u32; 2],
}

impl Bench {
    fn new() -> Self {
        Self::with(ALL | MW_BIND)
    }

    fn with(access: u32) -> Self {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        let mr = pair.b.reg_pages(b.pdn, START, LEN, access, &PAGES).unwrap();
        let windows = [ONE, TWO].map(|kind| pair.b.alloc_mw(b.pdn, kind).unwrap());
        Self { pair, mr, windows, keys: windows.map(|window| window.rkey) }
    }

    /// Returns the work request that binds a window of a type to the whole region under the next key.
    fn bind(&self, kind: u32) -> virtio_rdma_ring_bind_wqe {
        let key = self.keys[kind as usize - 1];
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (key, key & !0xff | (key + 1) & 0xff);
        (bind.addr, bind.length, bind.lkey) = (START, LEN, self.mr.lkey);
        bind.access = READ | WRITE | ATOMIC;
        bind
    }

    /// Binds a window with changes to the work request, and notes the key. Returns the status.
    fn bound(&mut self, kind: u32, change: impl FnOnce(&mut virtio_rdma_ring_bind_wqe)) -> u32 {
        let mut bind = self.bind(kind);
        change(&mut bind);
        let status = self.post(1, &Send::bind_mw(1, bind));
        if status == OK {
            self.keys[kind as usize - 1] = bind.new_rkey;
        }
        status
    }

    fn guest(&mut self, which: usize) -> (&mut Guest, End) {
        let end = self.pair.ends[which];
        (if which == 0 { &mut self.pair.a } else { &mut self.pair.b }, end)
    }

    /// Does a work request of one guest, and returns its status.
    fn post(&mut self, which: usize, send: &Send) -> u32 {
        let qpn = self.pair.ends[which].qpn;
        self.post_to(which, qpn, send)
    }

    fn post_to(&mut self, which: usize, qpn: u32, send: &Send) -> u32 {
        self.guest(which).0.post_send(qpn, send);
        self.pair.settle_in_time();
        let (guest, end) = self.guest(which);
        let cqe = guest.poll(end.cqn).expect("a completion");
        assert_eq!((cqe.wr_id, u32::from(cqe.opcode) < 128), (send.wr_id, true));
        cqe.status.into()
    }

    /// Writes from guest a by a key of guest b.
    fn write(&mut self, key: u32, at: u64, len: u32) -> u32 {
        let local = [sge(DATA, len, self.pair.ends[0].key)];
        self.post(0, &Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(at, key))
    }

    fn invalidate(&mut self, key: u32) -> u32 {
        self.post(1, &Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(key))
    }

    /// Sends from guest a, and makes guest b invalidate a key.
    fn send_with_inv(&mut self, key: u32) -> u32 {
        let [a, b] = self.pair.ends;
        self.pair.b.post_recv(b.qpn, 9, &[sge(DATA, 64, b.key)]);
        let local = [sge(DATA, 8, a.key)];
        let send = Send::new(4, VIRTIO_RDMA_WR_SEND_WITH_INV, &local).invalidate(key);
        let status = self.post(0, &send);
        let cqe = self.pair.poll_b().unwrap();
        let expected = if status == OK { OK } else { VIRTIO_RDMA_WC_REM_INV_REQ_ERR };
        assert_eq!(u32::from(cqe.status), expected);
        if status == OK {
            assert_eq!((cqe.wc_flags, cqe.ex), (VIRTIO_RDMA_WC_WITH_INVALIDATE, key));
        }
        status
    }

    /// Makes another pair of QPs. Returns the number of the QP of a, and that of b.
    fn other_qps(&mut self) -> (u32, u32) {
        let [a, b] = self.pair.ends;
        let from = self.pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
        let to = self.pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
        let (gid_a, gid_b) = (self.pair.a.gid, self.pair.b.gid);
        self.pair.a.connect(from, gid_b, to);
        self.pair.b.connect(to, gid_a, from);
        (from, to)
    }

    /// Connects both ends again after an error.
    fn recover(&mut self) {
        for which in 0..2 {
            let peer = self.pair.ends[1 - which].qpn;
            let (guest, end) = self.guest(which);
            guest.set_state(end.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
            while guest.poll(end.cqn).is_some() {}
            let gid = gid(2 - which as u8);
            guest.connect(end.qpn, gid, peer);
        }
    }

    /// Returns the bytes of the region, in their order in the region.
    fn found(&self) -> Vec<u8> {
        let b = &self.pair.b;
        let parts =
            [b.bytes(PAGES[0] + 0x800, 0x800), b.bytes(PAGES[1], 0x1000), b.bytes(PAGES[2], 0x800)];
        parts.concat()
    }
}

#[test]
fn a_window_is_a_part_of_its_region() {
    with_rings(|| {
        for kind in [ONE, TWO] {
            let mut bench = Bench::new();
            let data = bench.pair.a.fill(DATA, 0x1200, 7);
            let part = |bind: &mut virtio_rdma_ring_bind_wqe| {
                (bind.addr, bind.length) = (START + 0x700, 0x1200);
            };
            let before = bench.pair.b.query(bench.pair.ends[1].qpn).sq_psn;
            assert_eq!(bench.bound(kind, part), OK);
            assert_eq!(bench.pair.b.query(bench.pair.ends[1].qpn).sq_psn, before);
            let key = bench.keys[kind as usize - 1];
            assert_eq!(bench.write(key, START + 0x700, 0x1200), OK);
            assert_eq!(bench.found()[0x700..0x1900], data);
            let local = [sge(DATA + 0x8000, 0x1200, bench.pair.ends[0].key)];
            let read = Send::new(5, VIRTIO_RDMA_WR_RDMA_READ, &local).rdma(START + 0x700, key);
            assert_eq!(bench.post(0, &read), OK);
            assert_eq!(bench.pair.a.bytes(DATA + 0x8000, 0x1200), data);
            let word = [sge(DATA + 0x8000, 8, bench.pair.ends[0].key)];
            let add = Send::new(6, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &word);
            assert_eq!(bench.post(0, &add.atomic(START + 0x700, key, 1, 0)), OK);
            for (at, len) in [(0x6ff, 1), (0x1900, 1), (0x700, 0x1201), (0, 8)] {
                assert_eq!(bench.write(key, START + at, len), REFUSED, "{at:#x} {len:#x}");
                bench.recover();
            }
        }
    });
}

#[test]
fn a_zero_based_window_counts_from_its_beginning() {
    with_rings(|| {
        let mut bench = Bench::new();
        let data = bench.pair.a.fill(DATA, 0x40, 9);
        let part = |bind: &mut virtio_rdma_ring_bind_wqe| {
            (bind.addr, bind.length) = (START + 0x7e0, 0x40);
            bind.access |= ZERO_BASED;
        };
        assert_eq!(bench.bound(TWO, part), OK);
        let key = bench.keys[1];
        assert_eq!(bench.write(key, 0, 0x40), OK);
        assert_eq!(bench.found()[0x7e0..0x820], data);
        assert_eq!(bench.write(key, 1, 0x40), REFUSED);
        bench.recover();
        assert_eq!(bench.write(key, START + 0x7e0, 1), REFUSED);
    });
}

#[test]
fn a_window_gives_no_more_than_its_access() {
    with_rings(|| {
        for access in [0, READ, WRITE, ATOMIC, LOCAL, LOCAL | READ] {
            let mut bench = Bench::new();
            assert_eq!(bench.bound(TWO, |bind| bind.access = access), OK);
            let key = bench.keys[1];
            let local = [sge(DATA, 8, bench.pair.ends[0].key)];
            for (right, send) in [
                (READ, Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &local).rdma(START, key)),
                (WRITE, Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(START, key)),
                (
                    ATOMIC,
                    Send::new(3, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &local)
                        .atomic(START, key, 1, 0),
                ),
            ] {
                let expected = if access & right == 0 { REFUSED } else { OK };
                assert_eq!(bench.post(0, &send), expected, "{access} {right}");
                bench.recover();
            }
        }
    });
}

/// Peers can use the key of a window, and its owner cannot.
#[test]
fn a_window_is_no_local_memory() {
    with_rings(|| {
        let mut bench = Bench::new();
        let key = bench.pair.ends[0].key;
        for kind in [ONE, TWO] {
            assert_eq!(bench.bound(kind, |bind| bind.access = LOCAL | READ | WRITE), OK);
            let own = [sge(START, 8, bench.keys[kind as usize - 1])];
            for opcode in [VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_READ] {
                let status = bench.post(1, &Send::new(1, opcode, &own).rdma(DATA, key));
                assert_eq!(status, VIRTIO_RDMA_WC_LOC_PROT_ERR);
                bench.recover();
            }
        }
    });
}

#[test]
fn a_window_that_is_not_bound_gives_no_access() {
    with_rings(|| {
        let mut bench = Bench::new();
        for key in bench.keys {
            assert_eq!(bench.write(key, START, 8), REFUSED);
            bench.recover();
        }
    });
}

#[test]
fn type_1_is_bound_anew_and_unbound() {
    with_rings(|| {
        let mut bench = Bench::new();
        for round in 0..3 {
            let old = bench.keys[0];
            assert_eq!(bench.bound(ONE, |bind| bind.addr += round * 8 + 8), BIND, "beyond");
            bench.recover();
            assert_eq!(bench.bound(ONE, |bind| (bind.addr, bind.length) = (START, 8)), OK);
            let key = bench.keys[0];
            assert_eq!(bench.write(key, START, 8), OK);
            assert_eq!(bench.write(old, START, 8), REFUSED);
            bench.recover();
        }
        let unbind = |bind: &mut virtio_rdma_ring_bind_wqe| {
            (bind.length, bind.lkey, bind.access) = (0, 77, 0);
        };
        let old = bench.keys[0];
        assert_eq!(bench.bound(ONE, unbind), OK);
        for key in [old, bench.keys[0]] {
            assert_eq!(bench.write(key, START, 8), REFUSED);
            bench.recover();
        }
        assert_eq!(bench.bound(ONE, unbind), OK, "there is nothing to take it from");
        assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()));
    });
}

#[test]
fn type_1_is_for_every_qp_of_its_pd() {
    with_rings(|| {
        let mut bench = Bench::new();
        let (from, _) = bench.other_qps();
        assert_eq!(bench.bound(ONE, |_| ()), OK);
        let local = [sge(DATA, 8, bench.pair.ends[0].key)];
        let send = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(START, bench.keys[0]);
        assert_eq!(bench.post_to(0, from, &send), OK);
        assert_eq!(bench.post(0, &send), OK);
    });
}

#[test]
fn type_2_is_for_the_qp_that_bound_it() {
    with_rings(|| {
        let mut bench = Bench::new();
        let (from, to) = bench.other_qps();
        let bind = bench.bind(TWO);
        assert_eq!(bench.post_to(1, to, &Send::bind_mw(1, bind)), OK);
        bench.keys[1] = bind.new_rkey;
        let local = [sge(DATA, 8, bench.pair.ends[0].key)];
        let send = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(START, bench.keys[1]);
        assert_eq!(bench.post(0, &send), REFUSED);
        bench.recover();
        assert_eq!(bench.invalidate(bench.keys[1]), BIND, "by another QP");
        bench.recover();
        assert_eq!(bench.send_with_inv(bench.keys[1]), NOT_INVALIDATED, "at another QP");
        bench.recover();
        assert_eq!(bench.post_to(0, from, &send), OK);
        let inv = Send::new(2, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(bench.keys[1]);
        assert_eq!(bench.post_to(1, to, &inv), OK);
        assert_eq!(bench.post_to(0, from, &send), REFUSED);
    });
}

#[test]
fn type_2_is_bound_when_it_is_free() {
    with_rings(|| {
        let mut bench = Bench::new();
        for round in 0..4 {
            assert_eq!(bench.bound(TWO, |_| ()), OK);
            let key = bench.keys[1];
            assert_eq!(bench.write(key, START, 8), OK);
            assert_eq!(bench.bound(TWO, |_| ()), BIND, "it is bound");
            bench.recover();
            assert_eq!(bench.write(key, START, 8), OK, "it was left as it was");
            if round % 2 == 0 {
                assert_eq!(bench.invalidate(key), OK);
                assert_eq!(bench.invalidate(key), OK, "FREE is no error for its owner");
            } else {
                assert_eq!(bench.send_with_inv(key), OK);
                assert_eq!(bench.send_with_inv(key), NOT_INVALIDATED, "it is FREE");
                bench.recover();
            }
            assert_eq!(bench.write(key, START, 8), REFUSED);
            bench.recover();
        }
    });
}

#[test]
fn type_1_is_not_invalidated() {
    with_rings(|| {
        let mut bench = Bench::new();
        assert_eq!(bench.bound(ONE, |_| ()), OK);
        let key = bench.keys[0];
        assert_eq!(bench.invalidate(key), BIND);
        bench.recover();
        assert_eq!(bench.send_with_inv(key), NOT_INVALIDATED);
        bench.recover();
        assert_eq!(bench.write(key, START, 8), OK);
    });
}

/// IBA 10.6.7.2.3: the consumer chooses the low 8 bits of a new key. The other bits stay those of the
/// window, whatever the consumer asks for.
#[test]
fn the_upper_bits_of_a_key_stay() {
    with_rings(|| {
        for kind in [ONE, TWO] {
            let mut bench = Bench::new();
            let old = bench.keys[kind as usize - 1];
            let low = (old + 7) & 0xff;
            assert_eq!(bench.bound(kind, |bind| bind.new_rkey = 0xabcd_ef00 | low), OK);
            assert_eq!(bench.write(old & !0xff | low, START, 8), OK);
            assert_eq!(bench.write(0xabcd_ef00 | low, START, 8), REFUSED);
        }
    });
}

#[test]
fn what_cannot_be_bound() {
    with_rings(|| {
        let refuse = |kind: u32, what: &str, change: &dyn Fn(&mut virtio_rdma_ring_bind_wqe)| {
            let mut bench = Bench::new();
            assert_eq!(bench.bound(kind, change), BIND, "type {kind}: {what}");
            let state = bench.pair.b.query(bench.pair.ends[1].qpn).qp_state;
            assert_eq!(u32::from(state), VIRTIO_RDMA_QPS_ERR);
            assert_eq!(bench.pair.b.device.counter(Counter::BadRegistration), 1);
            assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()), "nothing is bound");
        };
        for kind in [ONE, TWO] {
            refuse(kind, "no such window", &|bind| {
                bind.mw_rkey ^= 0x100;
                bind.new_rkey ^= 0x100;
            });
            refuse(kind, "no such region", &|bind| bind.lkey ^= 0x100);
            refuse(kind, "another key of the region", &|bind| bind.lkey ^= 1);
            refuse(kind, "a window for a region", &|bind| bind.lkey = bind.mw_rkey);
            refuse(kind, "an unknown flag", &|bind| bind.access |= 1 << 30);
            refuse(kind, "on demand", &|bind| bind.access |= VIRTIO_RDMA_ACCESS_ON_DEMAND);
            refuse(kind, "before the region", &|bind| bind.addr -= 1);
            refuse(kind, "behind the region", &|bind| bind.length += 1);
            refuse(kind, "it wraps", &|bind| bind.length = u64::MAX);
            refuse(kind, "it wraps", &|bind| bind.addr = u64::MAX);
        }
        refuse(ONE, "zero-based", &|bind| bind.access |= ZERO_BASED);
        refuse(TWO, "no bytes", &|bind| bind.length = 0);
    });
}

#[test]
fn what_a_region_does_not_allow() {
    with_rings(|| {
        for (rights, access, expected) in [
            (ALL, READ, BIND),
            (MW_BIND, READ, OK),
            (MW_BIND, WRITE, BIND),
            (MW_BIND, ATOMIC, BIND),
            (MW_BIND | READ, READ | WRITE, BIND),
            (MW_BIND | LOCAL, READ | WRITE | ATOMIC, OK),
        ] {
            for kind in [ONE, TWO] {
                let mut bench = Bench::with(rights);
                assert_eq!(bench.bound(kind, |bind| bind.access = access), expected);
            }
        }
    });
}

#[test]
fn regions_of_other_kinds_and_pds_have_no_windows() {
    with_rings(|| {
        let mut bench = Bench::new();
        let b = bench.pair.ends[1];
        let access = ALL | MW_BIND;
        let dma = bench.pair.b.get_dma_mr(b.pdn, access).unwrap();
        let fast = bench.pair.b.create_mr(b.pdn, 4).unwrap();
        let reg = bench.pair.b.registration(fast.rkey, access, START, LEN, &PAGES);
        assert_eq!(bench.post(1, &Send::reg_mr(1, reg)), OK);
        let pdn = bench.pair.b.create_pd();
        let other = bench.pair.b.reg_pages(pdn, START, LEN, access, &PAGES).unwrap();
        for kind in [ONE, TWO] {
            for key in [dma.lkey, fast.lkey, other.lkey] {
                assert_eq!(bench.bound(kind, |bind| bind.lkey = key), BIND);
                bench.recover();
            }
        }
        // The window is in another PD than the QP.
        for kind in [ONE, TWO] {
            let window = bench.pair.b.alloc_mw(pdn, kind).unwrap();
            let keys = |bind: &mut virtio_rdma_ring_bind_wqe| {
                (bind.mw_rkey, bind.new_rkey, bind.lkey) = (window.rkey, window.rkey, other.lkey);
            };
            assert_eq!(bench.bound(kind, keys), BIND);
            bench.recover();
        }
    });
}

#[test]
fn a_region_with_windows_stays() {
    with_rings(|| {
        for kind in [ONE, TWO] {
            let mut bench = Bench::new();
            let pdn = bench.pair.ends[1].pdn;
            assert_eq!(bench.bound(kind, |_| ()), OK);
            let mut rereg = virtio_rdma_cmd_rereg_mr::new_zeroed();
            (rereg.mrn, rereg.flags) = (bench.mr.mrn, VIRTIO_RDMA_REREG_ACCESS);
            rereg.mr.access_flags = ALL;
            let busy = Err(VIRTIO_RDMA_STATUS_BUSY);
            let again = bench.pair.b.command(VIRTIO_RDMA_CMD_REREG_MR, &rereg);
            assert_eq!(again, busy);
            assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), busy);
            assert_eq!(bench.write(bench.keys[kind as usize - 1], START, 8), OK);
            let mwn = bench.windows[kind as usize - 1].mwn;
            assert_eq!(bench.pair.b.dealloc_mw(mwn), Ok(()));
            assert_eq!(bench.write(bench.keys[kind as usize - 1], START, 8), REFUSED);
            assert_eq!(bench.pair.b.command(VIRTIO_RDMA_CMD_REREG_MR, &rereg), Ok(()));
            assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()));
            let destroy = virtio_rdma_cmd_destroy_pd { pdn };
            let result = bench.pair.b.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy);
            assert_eq!(result, busy);
        }
    });
}

#[test]
fn a_qp_takes_its_windows_along() {
    with_rings(|| {
        let mut bench = Bench::new();
        let (from, to) = bench.other_qps();
        let bind = bench.bind(TWO);
        assert_eq!(bench.post_to(1, to, &Send::bind_mw(1, bind)), OK);
        bench.keys[1] = bind.new_rkey;
        assert_eq!(bench.pair.b.destroy_qp(to), Ok(()));
        assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()), "it is FREE");
        // The next QP with this number does not have its windows.
        for _ in 0..6 {
            let b = bench.pair.ends[1];
            let qpn = bench.pair.b.create_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC);
            if qpn != to {
                assert_eq!(bench.pair.b.destroy_qp(qpn), Ok(()));
                continue;
            }
            let gid = bench.pair.a.gid;
            bench.pair.b.connect(qpn, gid, from);
            let local = [sge(DATA, 8, bench.pair.ends[0].key)];
            let send = Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(START, bench.keys[1]);
            assert_eq!(bench.post_to(0, from, &send), REFUSED);
            return;
        }
        panic!("the number does not come again");
    });
}

#[test]
fn work_requests_of_one_queue_are_ordered() {
    with_rings(|| {
        let mut bench = Bench::new();
        let [a, b] = bench.pair.ends;
        let (fence, signaled) = (VIRTIO_RDMA_SEND_FENCE, VIRTIO_RDMA_SEND_SIGNALED);
        for _ in 0..4 {
            let bind = bench.bind(TWO);
            bench.keys[1] = bind.new_rkey;
            // The key is bound before the message that tells it to the peer.
            let tell = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 4, b.key)]);
            let inv = Send::new(3, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(bind.new_rkey);
            bench.pair.b.post_send(b.qpn, &Send::bind_mw(1, bind));
            bench.pair.b.post_send(b.qpn, &tell.rdma(DATA, a.key));
            bench.pair.b.post_send(b.qpn, &inv.flags(signaled | fence));
        }
        bench.pair.settle();
        for _ in 0..4 {
            for (wr_id, opcode) in [
                (1, VIRTIO_RDMA_WC_BIND_MW),
                (2, VIRTIO_RDMA_WC_RDMA_WRITE),
                (3, VIRTIO_RDMA_WC_LOCAL_INV),
            ] {
                assert_eq!(brief(bench.pair.poll_b()), Some((wr_id, OK, opcode)));
            }
        }
    });
}

#[test]
fn windows_follow_the_memory_map() {
    with_rings(|| {
        let mut bench = Bench::new();
        let pages = [EXTRA.0 + 0x1000, PAGES[1], EXTRA.0];
        let (pdn, access) = (bench.pair.ends[1].pdn, ALL | MW_BIND);
        bench.mr = bench.pair.b.reg_pages(pdn, START, LEN, access, &pages).unwrap();
        assert_eq!([ONE, TWO].map(|kind| bench.bound(kind, |_| ())), [OK; 2]);
        let memory = bench.pair.b.memory.clone();
        bench.pair.b.device.set_memory(&memory);
        for key in bench.keys {
            assert_eq!(bench.write(key, START, LEN as u32), OK);
        }
        // The region is not in memory for a while, but the windows stay bound to it.
        let (less, _) = memory.without(EXTRA.0, EXTRA.1);
        bench.pair.b.device.set_memory(&less);
        for key in bench.keys {
            assert_eq!(bench.write(key, START, 8), REFUSED);
            bench.recover();
        }
        assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Err(VIRTIO_RDMA_STATUS_BUSY));
        bench.pair.b.device.set_memory(&memory);
        for key in bench.keys {
            assert_eq!(bench.write(key, START, LEN as u32), OK);
        }
        assert_eq!(bench.invalidate(bench.keys[1]), OK);
        assert_eq!(bench.pair.b.dealloc_mw(bench.windows[0].mwn), Ok(()));
        assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()));
    });
}

#[test]
fn a_reset_takes_windows_along() {
    with_rings(|| {
        let mut bench = Bench::new();
        assert_eq!([ONE, TWO].map(|kind| bench.bound(kind, |_| ())), [OK; 2]);
        bench.pair.b.device.reset();
        assert_eq!(bench.pair.b.device.status().mws, 0);
        bench.pair.b.start();
        assert_eq!(bench.pair.b.dealloc_mw(0), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    });
}

#[test]
fn commands_check_what_they_are_asked() {
    with_rings(|| {
        let mut bench = Bench::new();
        let pdn = bench.pair.ends[1].pdn;
        let b = &mut bench.pair.b;
        assert_eq!(b.alloc_mw(99, ONE).err(), Some(VIRTIO_RDMA_STATUS_NO_OBJECT));
        for kind in [0, 3, 255] {
            assert_eq!(b.alloc_mw(pdn, kind).err(), Some(VIRTIO_RDMA_STATUS_INVAL));
        }
        let more: Vec<_> = (2..8).map(|_| b.alloc_mw(pdn, TWO).unwrap()).collect();
        assert_eq!(b.alloc_mw(pdn, TWO).err(), Some(VIRTIO_RDMA_STATUS_NO_RESOURCE));
        assert_eq!(b.device.status().mws, 8);
        assert_eq!(b.dealloc_mw(more[3].mwn), Ok(()));
        assert_eq!(b.dealloc_mw(more[3].mwn), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
        assert!(b.alloc_mw(pdn, ONE).is_ok());
    });
}

#[test]
fn without_the_feature_there_are_none() {
    for without in [VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_RINGS] {
        with_rings(|| {
            let mut bench = Bench::new();
            let features = bench.pair.b.device.features() & !(1 << without);
            bench.pair.b.device.reset();
            if without == VIRTIO_RDMA_F_RINGS {
                bench.pair.b.rings = false;
            }
            bench.pair.b.start_with(features);
            let pdn = bench.pair.b.create_pd();
            let unsupported = Some(VIRTIO_RDMA_STATUS_UNSUPPORTED);
            assert_eq!(bench.pair.b.alloc_mw(pdn, ONE).err(), unsupported);
            assert_eq!(bench.pair.b.dealloc_mw(0).err(), unsupported);
            let end = End::new(&mut bench.pair.b, VIRTIO_RDMA_QPT_RC);
            let gid = bench.pair.a.gid;
            bench.pair.b.connect(end.qpn, gid, bench.pair.ends[0].qpn);
            bench.pair.ends[1] = end;
            let bind = virtio_rdma_ring_bind_wqe::new_zeroed();
            assert_eq!(bench.post(1, &Send::bind_mw(1, bind)), OPERATION);
        });
    }
}

/// Windows are invalidated by a driver that has no fast registration.
#[test]
fn windows_are_invalidated_without_fast_registration() {
    with_rings(|| {
        let mut bench = Bench::new();
        let bits = 1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_VIRTQUEUES;
        for which in [0, 1] {
            let (guest, _) = bench.guest(which);
            let features = closed(guest.device.features() & !bits);
            guest.device.reset();
            guest.start_with(features);
            bench.pair.ends[which] = End::new(bench.guest(which).0, VIRTIO_RDMA_QPT_RC);
        }
        let [a, b] = bench.pair.ends;
        bench.pair.a.connect(a.qpn, gid(2), b.qpn);
        bench.pair.b.connect(b.qpn, gid(1), a.qpn);
        let guest = &mut bench.pair.b;
        bench.mr = guest.reg_pages(b.pdn, START, LEN, ALL | MW_BIND, &PAGES).unwrap();
        bench.windows = [ONE, TWO].map(|kind| guest.alloc_mw(b.pdn, kind).unwrap());
        bench.keys = bench.windows.map(|window| window.rkey);
        for peer in [false, true] {
            assert_eq!(bench.bound(TWO, |_| ()), OK);
            let key = bench.keys[1];
            assert_eq!(bench.write(key, START, 8), OK);
            let status = if peer { bench.send_with_inv(key) } else { bench.invalidate(key) };
            assert_eq!(status, OK);
        }
        assert_eq!(bench.write(bench.keys[1], START, 8), REFUSED);
    });
}

#[test]
fn a_bind_has_no_data() {
    with_rings(|| {
        let mut bench = Bench::new();
        let key = bench.pair.ends[1].key;
        let bind = bench.bind(TWO);
        let mut send = Send::bind_mw(1, bind);
        send.sges = vec![sge(DATA, 8, key)];
        assert_eq!(bench.post(1, &send), OPERATION);
        bench.recover();
        let flags = VIRTIO_RDMA_SEND_SIGNALED | VIRTIO_RDMA_SEND_INLINE;
        assert_eq!(bench.post(1, &Send::bind_mw(1, bind).flags(flags)), OPERATION);
        assert_eq!(bench.pair.b.dereg_mr(bench.mr.mrn), Ok(()));
    });
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Bind { kind: u32, low: u8, length: u64, other: bool },
    Invalidate { kind: u32, low: u8, by_peer: bool },
    Write { kind: u32, low: u8 },
    Renew { kind: u32 },
    Dereg,
    Remap,
}

fn action() -> impl Strategy<Value = Action> {
    let key = || (1..3_u32, 0..3_u8);
    prop_oneof![
        6 => (key(), 0..3_u64, any::<bool>()).prop_map(|((kind, low), length, other)| {
            Action::Bind { kind, low, length: length * 8, other }
        }),
        3 => (key(), any::<bool>())
            .prop_map(|((kind, low), by_peer)| Action::Invalidate { kind, low, by_peer }),
        4 => key().prop_map(|(kind, low)| Action::Write { kind, low }),
        1 => (1..3_u32).prop_map(|kind| Action::Renew { kind }),
        1 => Just(Action::Dereg),
        1 => Just(Action::Remap),
    ]
}

/// The expected state of a window: the low bits of its key, and its bytes.
#[derive(Clone, Copy)]
struct Model {
    low: u8,
    bound: u64,
}

/// Does random work requests and commands. After `Dereg` removes the region, it makes a new one.
fn states_follow_the_model(actions: &[Action]) {
    let mut bench = Bench::new();
    let mut model = bench.windows.map(|window| Model { low: window.rkey as u8, bound: 0 });
    for action in actions {
        let of = |bench: &Bench, kind: u32, low: u8| {
            bench.windows[kind as usize - 1].rkey & !0xff | u32::from(low)
        };
        let (found, expected) = match *action {
            Action::Bind { kind, low, length, other } => {
                let window = &mut model[kind as usize - 1];
                let mut bind = bench.bind(kind);
                // The low bits of the previous key do not matter.
                let window_key = of(&bench, kind, low.wrapping_mul(77));
                bind.mw_rkey = if other { window_key ^ 0x100 } else { window_key };
                (bind.new_rkey, bind.length) = (of(&bench, kind, low), length);
                let may = !other && (kind == ONE || window.bound == 0 && length != 0);
                if may {
                    *window = Model { low, bound: length };
                }
                (bench.post(1, &Send::bind_mw(1, bind)), if may { OK } else { BIND })
            }
            Action::Invalidate { kind, low, by_peer } => {
                let window = &mut model[kind as usize - 1];
                let key = of(&bench, kind, low);
                let may = kind == TWO && window.low == low && (window.bound != 0 || !by_peer);
                if may {
                    window.bound = 0;
                }
                if by_peer {
                    (bench.send_with_inv(key), if may { OK } else { NOT_INVALIDATED })
                } else {
                    (bench.invalidate(key), if may { OK } else { BIND })
                }
            }
            Action::Write { kind, low } => {
                let window = model[kind as usize - 1];
                let may = window.low == low && window.bound >= 8;
                let key = of(&bench, kind, low);
                (bench.write(key, START, 8), if may { OK } else { REFUSED })
            }
            Action::Renew { kind } => {
                let place = kind as usize - 1;
                bench.pair.b.dealloc_mw(bench.windows[place].mwn).unwrap();
                let window = bench.pair.b.alloc_mw(bench.pair.ends[1].pdn, kind).unwrap();
                bench.windows[place] = window;
                model[place] = Model { low: window.rkey as u8, bound: 0 };
                (OK, OK)
            }
            Action::Dereg => {
                let busy = model.iter().any(|window| window.bound != 0);
                let result = bench.pair.b.dereg_mr(bench.mr.mrn);
                assert_eq!(result.is_err(), busy);
                if !busy {
                    let (pdn, access) = (bench.pair.ends[1].pdn, ALL | MW_BIND);
                    bench.mr = bench.pair.b.reg_pages(pdn, START, LEN, access, &PAGES).unwrap();
                }
                (OK, OK)
            }
            Action::Remap => {
                bench.pair.b.device.set_memory(&bench.pair.b.memory);
                (OK, OK)
            }
        };
        assert_eq!(found, expected, "{action:?}");
        if found != OK {
            bench.recover();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn keys_are_in_the_state_that_the_work_requests_left_them(
        actions in prop::collection::vec(action(), 1..60),
    ) {
        with_rings(|| states_follow_the_model(&actions));
    }
}
