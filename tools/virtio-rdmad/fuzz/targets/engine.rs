// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two guests in one network. The first guest does whatever the fuzzer says. The second guest is its
//! peer and keeps to the rules. Both guests have virtqueues, or both have rings.
//!
//! Whatever the first guest does, the following must hold:
//! - Every device comes to rest when it gets no more work.
//! - The device returns a descriptor once, to the queue that it came from, with no more bytes than its
//!   buffer has room for. A work request of the peer completes once.
//! - In the lower half of a guest's memory, the device writes only where the guest allows it. In
//!   rings, it writes the CQEs and the wake words of a QP.
//! - A CQ of the peer raises at most one event for each time that it is armed.
//! - In the peer's memory, only what the peer gave out changes. The first guest's memory never holds
//!   bytes that the peer did not give out.
//! - After a reset no object is left, and the device does not write to the guest's memory.
//! - The peer still works.

#![no_main]

use std::collections::HashMap;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

// The header's names are unmistakable, and there are many.
#[allow(clippy::wildcard_imports)]
use abi::*;
use engine::{Counter, Fabric, FabricConfig, Next};
use fuzz::{
    check_second_region, connect_qp, create_cq, create_pd, create_qp, has_secret, hide_secrets,
    modify, qp_request, reg_mr, reg_others, set_state, Clock, Guest, Program, DOORBELL_BYTES,
    GIVEN, INLINE, OTHER_PD, OWN, READABLE, REGIONS, RING_BYTES, RING_PAGES, SCRATCH, WINDOW,
};
use libfuzzer_sys::fuzz_target;
use testkit::command::{create_xrc_tgt, resize_srq};
use testkit::{doorbell, receive, sge, Descriptor, Memory, Send, ALL, F_INDIRECT, F_WRITE};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Send opcodes that name a key to register or to invalidate.
const MEMORY_MANAGEMENT: [u32; 5] = [
    VIRTIO_RDMA_WR_REG_MR,
    VIRTIO_RDMA_WR_LOCAL_INV,
    VIRTIO_RDMA_WR_SEND_WITH_INV,
    VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
    VIRTIO_RDMA_WR_BIND_MW,
];

/// The objects that one guest uses to communicate.
#[derive(Clone, Default)]
struct End {
    pdn: u32,
    cqn: u16,
    qpn: u32,
    keys: Vec<u32>,
}

/// The two guests, and what is expected of them.
struct World {
    clock: Arc<Clock>,
    /// The type of the QPs.
    kind: u32,
    a: Guest,
    b: Guest,
    ends: [End; 2],
    /// The peer's sends and receives that have no CQE yet, each with its index in the ring.
    posted: [HashMap<u64, u32>; 2],
    wr_id: u64,
    /// The content of the peer's memory from the start of [`OWN`] on.
    kept: Vec<u8>,
    /// Whether the device may write anywhere in the first guest's memory.
    exposed: bool,
}

impl End {
    /// Creates a PD, a CQ, a QP and the first MR.
    fn new(guest: &mut Guest, kind: u32, range: std::ops::Range<u64>) -> Self {
        let (pdn, cqn) = (create_pd(guest), create_cq(guest, 0));
        let keys = vec![reg_mr(guest, pdn, range, ALL)];
        let qpn = create_qp(guest, pdn, cqn, kind, 1);
        for _ in 0..4 {
            guest.add_event_buffers();
        }
        Self { pdn, cqn, qpn, keys }
    }
}

/// Returns whether a send work request is a REG_MR.
fn may_register(bytes: &[u8], rings: bool) -> bool {
    let at = if rings {
        offset_of!(virtio_rdma_ring_sq_wqe, opcode)
    } else {
        offset_of!(virtio_rdma_sq_wqe, opcode)
    };
    bytes.get(at).is_some_and(|opcode| u32::from(*opcode) == VIRTIO_RDMA_WR_REG_MR)
}

/// Returns whether a request has a list of pages, or names all memory.
fn names_memory(number: u32) -> bool {
    matches!(
        number,
        VIRTIO_RDMA_CMD_GET_DMA_MR
            | VIRTIO_RDMA_CMD_REG_USER_MR
            | VIRTIO_RDMA_CMD_CREATE_RING_CQ
            | VIRTIO_RDMA_CMD_RESIZE_CQ
            | VIRTIO_RDMA_CMD_CREATE_RING_QP
            | VIRTIO_RDMA_CMD_CREATE_SRQ
            | VIRTIO_RDMA_CMD_RESIZE_SRQ
    )
}

impl World {
    fn new(program: &mut Program<'_>) -> Self {
        let first = program.u8();
        let kinds = [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UC, VIRTIO_RDMA_QPT_UD];
        let (kind, rings) = (kinds[usize::from(first % 3)], first & 0x80 != 0);
        let clock = Arc::new(Clock::default());
        let config = FabricConfig {
            clock: Arc::clone(&clock) as _,
            random: || 0,
            ..FabricConfig::default()
        };
        let fabric = Fabric::new(config);
        let (mut a, mut b) = (Guest::new(&fabric, 1, rings), Guest::new(&fabric, 2, rings));
        hide_secrets(&b, WINDOW.end);
        let mut peer = End::new(&mut b, kind, GIVEN);
        peer.keys.extend(reg_others(&mut b, peer.pdn));
        let mut own = End::new(&mut a, kind, WINDOW);
        own.keys.extend(&peer.keys);
        connect_qp(&a, kind, own.qpn, b.gid, peer.qpn);
        connect_qp(&b, kind, peer.qpn, a.gid, own.qpn);
        let kept = b.load(OWN.start, (WINDOW.end - OWN.start) as usize);
        let posted = Default::default();
        let ends = [own, peer];
        Self { clock, kind, a, b, ends, posted, wr_id: 0, kept, exposed: false }
    }

    /// Notes, if `exposed`, that the device may write anywhere in the first guest's memory, and so into
    /// its virtqueues.
    fn expose(&mut self, exposed: bool) {
        if exposed {
            self.exposed = true;
            self.a.queues.iter_mut().for_each(|queue| queue.wild = true);
        }
    }

    /// Returns whether these bytes overlap one of the first guest's virtqueues.
    fn hits_rings(&self, addr: u64, len: u64) -> bool {
        addr < RING_BYTES * self.a.queues.len() as u64 && len != 0
    }

    /// Returns an address in or near memory.
    fn addr(program: &mut Program<'_>) -> u64 {
        let anchors = [
            GIVEN.start,
            GIVEN.end - 8,
            OWN.start,
            OTHER_PD.start,
            READABLE.start,
            READABLE.end,
            WINDOW.end - 16,
            REGIONS[1].0,
            SCRATCH.start,
            0,
            0u64.wrapping_sub(16),
        ];
        program.pick(&anchors).wrapping_add(u64::from(program.u8()))
    }

    /// Returns a length of memory, which may be too large.
    fn length(program: &mut Program<'_>) -> u32 {
        program.pick(&[8, 0, 1, 40, 200, 0x400, 0x1000, 0x4000, 0xc000, 1 << 31, u32::MAX])
    }

    /// Returns an address and a key for the first guest. Mostly both belong to the same MR.
    fn place(&self, program: &mut Program<'_>) -> (u64, u32) {
        let starts = [WINDOW, GIVEN, OWN, OTHER_PD, READABLE].map(|range| range.start);
        let keys = &self.ends[0].keys;
        let (choice, shift) = (program.u8(), program.u8());
        let key = match program.u8() {
            255 => program.u32(),
            other @ 128.. => keys[usize::from(other) % keys.len()],
            _ => keys[usize::from(choice) % keys.len()],
        };
        let start = starts.get(usize::from(choice) % keys.len());
        let addr = start.map_or_else(|| Self::addr(program), |start| start + u64::from(shift));
        (addr, key)
    }

    /// Returns a number that an object may have.
    fn handle(program: &mut Program<'_>) -> u32 {
        match program.u8() {
            255 => program.u32(),
            small => u32::from(small % 6),
        }
    }

    /// Returns the bytes of a control request that is right but for what the program changes.
    fn request(&mut self, program: &mut Program<'_>) -> Vec<u8> {
        let (number, with_srq) = match program.u8() {
            250.. => (VIRTIO_RDMA_CMD_CREATE_RING_QP as u8, true),
            byte @ 248.. => (VIRTIO_RDMA_CMD_ALLOC_XRCD as u8 + byte % 2, false),
            246.. => (VIRTIO_RDMA_CMD_MODIFY_CQ as u8, false),
            byte @ 230.. => (VIRTIO_RDMA_CMD_CREATE_SRQ as u8 + byte % 5, false),
            byte @ 222.. => (VIRTIO_RDMA_CMD_ALLOC_MW as u8 + byte % 2, false),
            byte if byte % 23 < 20 => (byte % 23, false),
            byte => (byte % 23 - 20 + VIRTIO_RDMA_CMD_CREATE_RING_CQ as u8, false),
        };
        let mut bytes = vec![number];
        let handle = Self::handle(program);
        let access = program.pick(&[0xf, 1, 4, 2, 0, 7, 0x1f, u32::MAX]);
        match u32::from(number) {
            VIRTIO_RDMA_CMD_QUERY_PORT => bytes.push(1),
            VIRTIO_RDMA_CMD_CREATE_CQ => bytes.extend(handle.wrapping_mul(8).as_bytes()),
            VIRTIO_RDMA_CMD_GET_DMA_MR => bytes.extend([handle, access].as_bytes()),
            VIRTIO_RDMA_CMD_CREATE_MR => bytes.extend([handle, 0, 2].as_bytes()),
            VIRTIO_RDMA_CMD_ALLOC_MW => {
                bytes.extend([self.ends[0].pdn, u32::from(1 + program.u8() % 3)].as_bytes());
            }
            VIRTIO_RDMA_CMD_REG_USER_MR => bytes.extend(self.mr_request(program, access)),
            VIRTIO_RDMA_CMD_CREATE_QP => {
                let request = qp_request(self.ends[0].pdn, handle as u16, 1 + handle % 4);
                bytes.extend(request.as_bytes());
            }
            VIRTIO_RDMA_CMD_CREATE_RING_CQ => {
                let request = self.a.ring_cq_request(Self::page(program), Self::cqe(program));
                bytes.extend(request.as_bytes());
            }
            VIRTIO_RDMA_CMD_RESIZE_CQ => {
                let page = Self::page(program);
                let request = self.a.resize_request(page, Self::cqe(program), handle);
                bytes.extend(request.as_bytes());
            }
            VIRTIO_RDMA_CMD_CREATE_RING_QP => {
                let kinds = [0, 1, 2, 3, VIRTIO_RDMA_QPT_XRC_INI - 1, VIRTIO_RDMA_QPT_XRC_TGT - 1];
                let kind = 1 + kinds[handle as usize % kinds.len()];
                let base = qp_request(self.ends[0].pdn, handle as u16, kind);
                let mut request = self.a.ring_qp_request(Self::page(program), base);
                if with_srq {
                    request.srqn = handle;
                    request.rq = virtio_rdma_ring_shape::new_zeroed();
                    request.base.max_recv_wr = 0;
                }
                if kind == VIRTIO_RDMA_QPT_XRC_INI {
                    request.rq = virtio_rdma_ring_shape::new_zeroed();
                    (request.srqn, request.base.max_recv_wr) = (0, 0);
                }
                if kind == VIRTIO_RDMA_QPT_XRC_TGT {
                    request = create_xrc_tgt(1);
                }
                bytes.extend(request.as_bytes());
            }
            VIRTIO_RDMA_CMD_CREATE_SRQ => {
                let mut request = self.a.srq_request(Self::page(program), self.ends[0].pdn);
                // Every second SRQ is for XRC, in the first domain.
                (request.xrcdn, request.cqn) = (handle % 2, self.ends[0].cqn.into());
                bytes.extend(request.as_bytes());
            }
            VIRTIO_RDMA_CMD_RESIZE_SRQ => {
                let create = self.a.srq_request(Self::page(program), 0);
                let mut request = resize_srq(handle, create.region, create.ring);
                request.ring.depth = Self::cqe(program);
                bytes.extend(request.as_bytes());
            }
            // The event is held back for up to 3 CQEs, and for at most a microsecond.
            VIRTIO_RDMA_CMD_MODIFY_CQ => {
                bytes.extend([handle, program.u32() & 0x1_0003].as_bytes());
            }
            VIRTIO_RDMA_CMD_MODIFY_QP => bytes.extend(self.modify_request(program, handle)),
            VIRTIO_RDMA_CMD_QUERY_PKEY => bytes.extend([1, 0_u32].as_bytes()),
            VIRTIO_RDMA_CMD_ADD_GID => {
                let gid = program.pick(&[self.a.gid, self.b.gid, [0xfe; 16], [0; 16]]);
                bytes.extend(gid);
                let vlan = if handle % 4 == 3 { 5 } else { VIRTIO_RDMA_NO_VLAN };
                bytes.extend([2, handle ^ vlan << 16, 1].as_bytes());
            }
            VIRTIO_RDMA_CMD_DEL_GID => bytes.extend([handle, 1].as_bytes()),
            _ => bytes.extend([handle, 3 & program.u32(), 0, 0].as_bytes()),
        }
        let right = bytes.clone();
        program.patch(&mut bytes);
        if program.u8() == 255 {
            bytes.truncate(program.u8().into());
        }
        self.expose(match bytes.first().copied().map(u32::from) {
            Some(VIRTIO_RDMA_CMD_GET_DMA_MR) => true,
            Some(number) if names_memory(number) => bytes != right,
            _ => false,
        });
        bytes
    }

    /// Returns a page for rings.
    fn page(program: &mut Program<'_>) -> u64 {
        program.pick(&RING_PAGES)
    }

    /// Returns a number of CQEs, which may be invalid.
    fn cqe(program: &mut Program<'_>) -> u32 {
        program.pick(&[32, 16, 4, 1, 2, 8, 0, 3, 64, 1 << 31])
    }

    /// Returns a request that registers up to 23 pages.
    fn mr_request(&mut self, program: &mut Program<'_>, access: u32) -> Vec<u8> {
        let count = program.below(24);
        let page = |program: &mut Program<'_>| Self::addr(program) & !0xfff;
        let pages: Vec<u64> = (0..count).map(|_| page(program)).collect();
        for page in &pages {
            self.a.memory.open(*page, 0x1000);
        }
        let start = u64::from(program.u8());
        let length = (count as u64 * 0x1000).saturating_sub(start + u64::from(program.u8()));
        let request = virtio_rdma_cmd_reg_user_mr {
            pdn: self.ends[0].pdn,
            access_flags: access,
            start,
            length,
            virt_addr: Self::addr(program),
            pages: self.a.place(pages.as_bytes()),
            npages: count as u32,
            levels: 0,
            page_shift: program.pick(&[12, 13, 16, 21, 31, 0, 11, 32]),
            reserved_2e: [0; 2],
        };
        request.as_bytes().to_vec()
    }

    /// Returns a request that modifies a QP.
    fn modify_request(&self, program: &mut Program<'_>, handle: u32) -> Vec<u8> {
        let qpn = if handle == 0 { self.ends[0].qpn } else { handle };
        let state = u32::from(program.u8() % 8);
        let kind = match program.u8() % 5 {
            0 => self.kind,
            kind => kind.into(),
        };
        // The QP connects mostly to the other guest, and sometimes to itself.
        let (gid, dest) = match program.u8() {
            255 => (self.a.gid, qpn),
            _ => (self.b.gid, self.ends[1].qpn),
        };
        let (mask, mut attr) = modify(kind, state, gid, dest);
        if program.flag() {
            (attr.timeout, attr.rnr_retry) = (program.u8() & 31, program.u8() & 7);
        }
        let other = match program.u8() {
            bit @ ..32 => 1 << bit,
            _ => 0,
        };
        let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask: mask ^ other, attr };
        request.as_bytes().to_vec()
    }

    /// Handles a request of the first guest. It goes through the control queue, or the guest learns the
    /// new key or rings from the reply.
    fn control(&mut self, program: &mut Program<'_>) {
        let bytes = self.request(program);
        let room = u32::from(program.u8()) + 1;
        if program.flag() {
            // The guest may overwrite the tables that the request names before the device reads them.
            self.expose(bytes.first().is_some_and(|number| names_memory((*number).into())));
            self.a.add_request(&bytes, room);
            return;
        }
        let mut reply = vec![0; room as usize];
        let written = self.a.device.command(&bytes, &mut reply);
        assert!((1..=reply.len()).contains(&written));
        let is_mr = matches!(
            bytes.first().copied().map(u32::from),
            Some(
                VIRTIO_RDMA_CMD_GET_DMA_MR
                    | VIRTIO_RDMA_CMD_CREATE_MR
                    | VIRTIO_RDMA_CMD_REG_USER_MR
            )
        );
        if let (true, 0, Ok((mr, _))) =
            (is_mr, reply[0], virtio_rdma_rsp_mr::read_from_prefix(&reply[1..]))
        {
            self.ends[0].keys.push(mr.lkey);
        }
        if let (Some(VIRTIO_RDMA_CMD_ALLOC_MW), 0, Ok((window, _))) = (
            bytes.first().copied().map(u32::from),
            reply[0],
            virtio_rdma_rsp_alloc_mw::read_from_prefix(&reply[1..]),
        ) {
            self.ends[0].keys.push(window.rkey);
        }
        if reply[0] == 0 {
            self.learn(&bytes, &reply[1..]);
        }
    }

    /// Notes the rings that the first guest has after a successful request.
    fn learn(&mut self, request: &[u8], reply: &[u8]) {
        let (number, request) = (u32::from(request[0]), &request[1..]);
        let first_page = |region: virtio_rdma_ring_region| {
            let page: u64 = self.a.memory.map.read_obj(region.pages).ok()?;
            RING_PAGES.contains(&page).then_some(page)
        };
        let first = u32::read_from_prefix(reply).map(|(first, _)| first);
        match (number, first) {
            (VIRTIO_RDMA_CMD_CREATE_RING_CQ, Ok(cqn)) => {
                let cq =
                    virtio_rdma_cmd_create_ring_cq::read_from_prefix(request).expect("whole").0;
                if let Some(page) = first_page(cq.region) {
                    self.a.has_cq_ring(cqn, page, cq.cqe);
                }
            }
            (VIRTIO_RDMA_CMD_RESIZE_CQ, Ok(_)) => {
                let cq = virtio_rdma_cmd_resize_cq::read_from_prefix(request).expect("whole").0;
                if let Some(page) = first_page(cq.region) {
                    self.a.moved_cq_ring(cq.cqn, page, cq.cqe);
                }
            }
            (VIRTIO_RDMA_CMD_CREATE_RING_QP, Ok(qpn)) => {
                let qp =
                    virtio_rdma_cmd_create_ring_qp::read_from_prefix(request).expect("whole").0;
                if let Some(page) = first_page(qp.region) {
                    self.a.has_qp_rings(qpn, page);
                }
            }
            _ => {}
        }
    }

    /// Returns the SGEs of a work request of either guest.
    fn sges(&self, who: usize, program: &mut Program<'_>) -> Vec<virtio_rdma_sge> {
        let choose = |program: &mut Program<'_>| {
            // The peer names only the memory that it gives out.
            let (addr, lkey) = match who {
                0 => self.place(program),
                _ => (Self::addr(program), self.ends[1].keys[0]),
            };
            sge(addr, Self::length(program), lkey)
        };
        (0..program.below(if who == 0 { 6 } else { 4 })).map(|_| choose(program)).collect()
    }

    /// Returns the bytes of a send work request.
    fn send(&self, who: usize, program: &mut Program<'_>) -> Vec<u8> {
        let opcode = match program.u8() {
            255 if who == 0 => program.u32(),
            // The peer does not change its keys.
            small @ 235..=254 if who == 0 => MEMORY_MANAGEMENT[usize::from(small % 5)],
            small => u32::from(small % 7),
        };
        let sges = self.sges(who, program);
        let (remote_addr, rkey) = self.place(program);
        let send = Send::new(self.wr_id, opcode, &sges);
        let mut send = match opcode {
            _ if self.kind == VIRTIO_RDMA_QPT_UD => {
                let gid = if who == 0 { self.b.gid } else { self.a.gid };
                send.ud(gid, self.ends[1 - who].qpn, 0x1111, self.ends[who].pdn)
            }
            VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP | VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => {
                send.atomic(remote_addr, rkey, program.u64(), 7)
            }
            VIRTIO_RDMA_WR_REG_MR => Send::reg_mr(self.wr_id, Self::registration(rkey, program)),
            VIRTIO_RDMA_WR_BIND_MW => Send::bind_mw(self.wr_id, self.binding(rkey, program)),
            _ => send.rdma(remote_addr, rkey),
        };
        let choice = program.u8();
        send.flags |= u32::from(choice & 5);
        if matches!(
            opcode,
            VIRTIO_RDMA_WR_LOCAL_INV | VIRTIO_RDMA_WR_REG_MR | VIRTIO_RDMA_WR_BIND_MW
        ) {
            send.sges.clear();
        }
        if MEMORY_MANAGEMENT.contains(&opcode) {
            send = send.invalidate(rkey);
        }
        let data = [0x5a; INLINE as usize];
        // The peer uses inline data only with opcodes that may carry it.
        let may_carry = who == 0 || opcode < VIRTIO_RDMA_WR_RDMA_READ;
        if self.a.rings && choice >= 0x80 && may_carry {
            let most = data.len() + usize::from(who == 0);
            send.sges.clear();
            send = send.inline(&data[..program.below(most).min(data.len())]);
        }
        self.bytes(&send)
    }

    /// Returns a registration of two pages. The guest may overwrite the list that names them.
    fn registration(key: u32, program: &mut Program<'_>) -> WrReg {
        let pages = program.pick(&[GIVEN.start, OWN.start, u64::MAX]);
        let access = program.pick(&[ALL, 1, 0, u32::MAX]);
        let (iova, length) = (Self::addr(program), program.pick(&[0x2000, 0x1000, 1, 0]));
        let page_shift = program.pick(&[12, 12, 12, 16, 0]);
        let page_size = 1 << page_shift;
        let npages = ((iova % page_size + length).div_ceil(page_size)) as u32;
        WrReg { key, access, npages, pages, iova, length, page_shift, ..WrReg::new_zeroed() }
    }

    /// Returns a binding of a memory window to any memory. The key mostly stays the same, so that the
    /// program knows it.
    fn binding(&self, key: u32, program: &mut Program<'_>) -> virtio_rdma_ring_bind_wqe {
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (key, key ^ u32::from(program.u8() / 240));
        (bind.addr, bind.lkey) = self.place(program);
        bind.length = Self::length(program).into();
        bind.access = program.pick(&[0xe, 0xf, 0x2e, 0x2f, 2, 0, u32::MAX]);
        bind
    }

    /// Returns the bytes of a send work request for a ring or a virtqueue, whichever the guests have.
    fn bytes(&self, send: &Send) -> Vec<u8> {
        if self.a.rings {
            send.entry()
        } else {
            send.bytes()
        }
    }

    /// Returns the bytes of a receive work request.
    fn receive(&self, who: usize, program: &mut Program<'_>) -> Vec<u8> {
        receive(self.wr_id, &self.sges(who, program))
    }

    /// Returns the virtqueue of a work queue of a guest without rings.
    fn work_queue(&self, who: usize, receive: bool) -> u16 {
        1 + 3 + 2 * (self.ends[who].qpn as u16 - 1) + u16::from(receive)
    }

    /// Posts a work request of either guest. The program may change a work request of the first guest.
    fn post(&mut self, who: usize, receive: bool, program: &mut Program<'_>) {
        self.wr_id += 1;
        let mut bytes = if receive { self.receive(who, program) } else { self.send(who, program) };
        if who == 1 {
            self.post_peer(receive, &bytes);
            return;
        }
        program.patch(&mut bytes);
        // The changed work request may register any pages.
        self.expose(!receive && may_register(&bytes, self.a.rings));
        let choice = program.u8();
        if choice == 255 {
            bytes.truncate(program.u8().into());
        }
        let other = match choice {
            254 => Some(program.u8()),
            _ => None,
        };
        if self.a.rings {
            let qpn = other.map_or(self.ends[0].qpn, |number| u32::from(number % 6));
            self.a.post_entry(qpn, receive.into(), &bytes);
            return;
        }
        let own = self.work_queue(0, receive);
        self.a.post(other.map_or(own, |number| 4 + u16::from(number) % 10), &bytes);
    }

    /// Posts a work request of the peer, unless 8 of the same kind are outstanding.
    fn post_peer(&mut self, receive: bool, bytes: &[u8]) {
        let which = usize::from(receive);
        if self.posted[which].len() == 8 {
            return;
        }
        let index = if self.b.rings {
            self.b.post_entry(self.ends[1].qpn, receive.into(), bytes)
        } else {
            self.b.post(self.work_queue(1, receive), bytes).then_some(0)
        };
        if let Some(index) = index {
            self.posted[which].insert(self.wr_id, index);
        }
    }

    /// Writes a word into the head of a ring of the first guest, or bytes anywhere into the ring's page.
    fn write_ring(&mut self, program: &mut Program<'_>) {
        let page = Self::page(program);
        if program.flag() {
            let at = page + u64::from(program.u16() % 0x1000);
            let bytes = program.bytes(64);
            let len = bytes.len().min((page + 0x1000 - at) as usize);
            self.a.memory.write_bytes(at, &bytes[..len]);
            return;
        }
        let at = page + program.pick(&[0, 64, 8, 12, 128, 132]);
        let word: u32 = self.a.memory.get(at);
        let word = match program.u8() {
            255 => program.u32(),
            by @ 128.. => word.wrapping_sub(u32::from(by & 15)),
            by => word.wrapping_add(u32::from(by & 31)),
        };
        self.a.memory.write_bytes(at, word.as_bytes());
    }

    /// Sends doorbells of the first guest, some of which name no QP.
    fn doorbells(&mut self, program: &mut Program<'_>) {
        let mut bells = Vec::new();
        for _ in 0..program.below(10) {
            let (number, queue) = (Self::handle(program), u32::from(program.u8() & 3));
            bells.extend(doorbell(number, queue));
        }
        program.patch(&mut bells);
        bells.truncate(bells.len() - usize::from(program.u8() & 7).min(bells.len()));
        bells.truncate(DOORBELL_BYTES);
        self.a.ring_doorbell(&bells);
    }

    /// Makes a chain of two descriptors of any kind available to the device of the first guest.
    fn chain(&mut self, program: &mut Program<'_>) {
        let queue = u16::try_from(program.below(self.a.queues.len())).expect("a few queues");
        let mut descriptor = || Descriptor {
            addr: Self::addr(program),
            len: Self::length(program),
            flags: u16::from(program.u8() & 7),
            next: u16::from(program.u8() % 40),
        };
        let chain = [descriptor(), descriptor()];
        // An indirect table, a request or an overwritten virtqueue may name any memory.
        let wild = |one: &Descriptor| {
            let hits = one.flags & F_WRITE != 0 && self.hits_rings(one.addr, one.len.into());
            one.flags & F_INDIRECT != 0 || hits
        };
        self.expose(queue == 0 || chain.iter().any(wild));
        self.a.add(queue, &chain, u32::MAX);
    }

    /// Writes bytes anywhere into the first guest's memory. Virtqueues that they hit are no longer
    /// checked.
    fn scribble(&mut self, program: &mut Program<'_>) {
        let at = u64::from(program.u16());
        let bytes = program.bytes(64);
        let len = bytes.len().min((WINDOW.end - at) as usize);
        self.a.memory.write_bytes(at, &bytes[..len]);
        let scratch = at < SCRATCH.end && at + len as u64 > SCRATCH.start;
        self.expose(scratch || self.hits_rings(at, len as u64));
    }

    /// Gives the first guest's device other memory: all of it, one of the regions, or no memory.
    fn remap(&mut self, program: &mut Program<'_>) {
        let all = &self.a.memory.map;
        let (start, len) = program.pick(&[(0, 0), REGIONS[1], REGIONS[0], (0, u64::MAX)]);
        self.a.device.set_memory(&all.without(start, len).0);
    }

    /// Takes the peer's completions. Each of them must belong to a work request that the peer posted.
    fn poll(&mut self) {
        let end = &self.ends[1];
        // Each completion has a work request, a status, an opcode, a QP and an index.
        let cqes: Vec<_> = if self.b.rings {
            let cqes = self.b.poll_ring(end.cqn.into());
            cqes.iter().map(|c| (c.wr_id, c.status, c.opcode, c.qp_num, c.wqe_index)).collect()
        } else {
            let cqes = self.b.poll(end.cqn);
            cqes.iter().map(|c| (c.wr_id, c.status, c.opcode, c.qp_num, 0)).collect()
        };
        for (wr_id, status, opcode, qp_num, index) in cqes {
            let which = usize::from(opcode & 0x80 != 0);
            assert_eq!(self.posted[which].remove(&wr_id), Some(index), "not posted");
            assert_eq!(qp_num, end.qpn);
            assert!(u32::from(status) <= VIRTIO_RDMA_WC_GENERAL_ERR);
        }
        if self.b.rings {
            self.b.take_events_of_cqs();
            self.b.arm_cq(self.ends[1].cqn.into(), self.wr_id % 3 == 0);
        } else {
            for receive in [false, true] {
                self.b.take_used(self.work_queue(1, receive));
            }
        }
        self.b.take_used(self.b.queues.len() as u16 - 1);
        self.b.add_event_buffers();
    }

    /// Brings the peer's QP to RESET and connects it again.
    fn reconnect(&mut self) {
        let (gid, dest, qpn) = (self.a.gid, self.ends[0].qpn, self.ends[1].qpn);
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_state = VIRTIO_RDMA_QPS_RESET as u8;
        set_state(&self.b, qpn, VIRTIO_RDMA_QP_STATE, attr).expect("any state goes to RESET");
        self.b.reset_qp_rings(qpn);
        self.poll();
        self.posted = Default::default();
        connect_qp(&self.b, self.kind, qpn, gid, dest);
    }

    /// Resets the first guest's device. No object may be left, and the guest's memory must not change.
    fn reset(&mut self) {
        let device = Arc::clone(&self.a.device);
        device.reset();
        let status = device.status();
        assert!(!status.started && !device.needs_reset());
        let left = (status.gids.len(), status.qps.len(), status.cqs, status.mrs, status.pds);
        assert_eq!(left, (0, 0, 0, 0, 0), "left behind by a reset");
        let before = self.a.snapshot();
        let rkey = self.ends[0].keys[0];
        let sges = [sge(GIVEN.start, 8, self.ends[1].keys[0])];
        self.wr_id += 1;
        let write = Send::new(self.wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &sges);
        self.post_peer(false, &self.bytes(&write.rdma(WINDOW.start, rkey)));
        self.b.settle();
        device.run(64);
        assert!(before == self.a.snapshot(), "memory written after a reset");
    }

    /// Resets the first guest's device, and sets up new objects.
    fn restart(&mut self) {
        self.reset();
        self.a.start();
        let keys = self.ends[1].keys.clone();
        self.ends[0] = End::new(&mut self.a, self.kind, WINDOW);
        self.ends[0].keys.extend(keys);
        connect_qp(&self.a, self.kind, self.ends[0].qpn, self.b.gid, self.ends[1].qpn);
    }

    /// Takes the buffers that the device gave back to the first guest, and gives it new ones.
    fn refill(&mut self) {
        for queue in 0..self.a.queues.len() {
            self.a.take_used(queue as u16);
        }
        if !self.a.rings {
            self.a.add_cq_buffers(self.ends[0].cqn);
        }
        self.a.add_event_buffers();
    }

    /// Does an operation that only a guest with rings has.
    fn ring_step(&mut self, operation: u8, program: &mut Program<'_>) {
        match operation {
            0 | 1 => self.write_ring(program),
            2 => self.doorbells(program),
            3 => self.a.arm_cq(Self::handle(program), program.flag()),
            _ => drop(self.a.poll_ring(Self::handle(program))),
        }
    }

    /// Does one operation of the program.
    fn step(&mut self, operation: u8, program: &mut Program<'_>) {
        match operation % 29 {
            0..=3 => self.control(program),
            4..=6 => self.post(0, false, program),
            7 | 8 => self.post(0, true, program),
            9 => self.post(1, false, program),
            10 => self.post(1, true, program),
            11 => self.chain(program),
            12 => drop(self.a.device.run(program.u8().into())),
            13 => drop(self.b.device.run(program.u8().into())),
            14 => self.poll(),
            15 => self.refill(),
            16 => {
                let both = [self.a.settle(), self.b.settle()];
                for next in both {
                    if let Next::At(time) = next {
                        self.clock.advance_to(time);
                    }
                }
            }
            17 => self.clock.advance(Duration::from_micros(1 << (program.u8() & 31))),
            18 => self.a.device.kick(program.u8().into()),
            19 => self.scribble(program),
            20 => self.remap(program),
            21 => self.a.restart_queue(program.u8().into()),
            22 => self.reconnect(),
            23 => self.restart(),
            operation if self.a.rings => self.ring_step(operation - 24, program),
            _ => {}
        }
    }

    /// Checks the memory of both guests.
    fn check_memory(&self) {
        let now = self.b.load(OWN.start, self.kept.len());
        assert!(now == self.kept, "memory of the peer that it did not give out was written");
        check_second_region(&self.b);
        assert!(!has_secret(&self.a.snapshot()), "memory of the peer was read");
        assert_eq!(self.b.memory.written(), None, "the peer's device wrote where it may not");
        assert!(
            self.exposed || self.a.memory.written().is_none(),
            "the device wrote where it may not"
        );
    }

    /// Checks that the peer still works: it connects a QP to itself, and writes from one place of its
    /// memory to another.
    fn check_peer(&mut self) {
        assert!(!self.b.device.needs_reset());
        let address = engine::Address { gid: self.b.gid, vlan: None };
        assert_eq!(self.b.device.status().gids, [(0, address)]);
        for counter in [
            Counter::BadSendChain,
            Counter::BadReceiveChain,
            Counter::BadControlChain,
            Counter::BadEventBuffer,
            Counter::BadDoorbell,
            Counter::BadDoorbellChain,
            Counter::LostRings,
        ] {
            assert_eq!(self.b.device.counter(counter), 0);
        }
        let end = self.ends[1].clone();
        let cqn = create_cq(&mut self.b, 2);
        let qpn = create_qp(&mut self.b, end.pdn, cqn, VIRTIO_RDMA_QPT_RC, 3);
        self.kind = VIRTIO_RDMA_QPT_RC;
        connect_qp(&self.b, VIRTIO_RDMA_QPT_RC, qpn, self.b.gid, qpn);
        let sges = [sge(GIVEN.start + 8, 8, end.keys[0])];
        let write = Send::new(99, VIRTIO_RDMA_WR_RDMA_WRITE, &sges);
        self.b.memory.write_bytes(GIVEN.start, &[[1; 8], [2; 8]].concat());
        let bytes = self.bytes(&write.rdma(GIVEN.start, end.keys[0]));
        let brief: Vec<_> = if self.b.rings {
            self.b.post_entry(qpn, 0, &bytes);
            self.b.settle();
            self.b.poll_ring(cqn.into()).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect()
        } else {
            self.b.post(1 + 3 + 2 * (qpn as u16 - 1), &bytes);
            self.b.settle();
            self.b.poll(cqn).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect()
        };
        assert_eq!(brief, [(99, VIRTIO_RDMA_WC_SUCCESS as u8)]);
        assert_eq!(self.b.load(GIVEN.start, 8), [2; 8]);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let mut world = World::new(&mut program);
    while let Some(operation) = program.operation() {
        world.step(operation, &mut program);
    }
    world.a.settle();
    world.b.settle();
    world.poll();
    world.reset();
    world.poll();
    world.check_memory();
    world.check_peer();
});
