// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two guests on two hosts, with a cable between the hosts. Both keep to the rules. The fuzzer sends
//! packets to the second one in the name of the first, most of which have valid headers and the right
//! ICRC; it also loses, repeats and reorders the packets between the guests.
//!
//! Each guest has two reliable connections to the other and a UD QP. One connection and the UD QP get
//! what the fuzzer sends. Whatever that is, the following must hold:
//! - Every device comes to rest when it gets no more work, and forgets what waits for an answer.
//! - In the second guest's memory, only the MRs change that peers may write to.
//! - No packet holds bytes of memory that peers may not read.
//! - A work request of the second guest completes at most once.
//! - The other connection still works.

#![no_main]

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

// The header's names are unmistakable, and there are many.
#[allow(clippy::wildcard_imports)]
use abi::*;
use engine::{Counter, Fabric, FabricConfig, Gid, Next, Uplink};
use fuzz::{
    check_second_region, command, connect_qp, create_cq, create_pd, create_qp, has_secret,
    hide_secrets, reg_mr, reg_others, Clock, Guest, Program, GIVEN, OTHER_PD, OWN, READABLE,
    WINDOW,
};
use libfuzzer_sys::fuzz_target;
use roce::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ethernet, ExtendedHeader, ExtendedHeaders, Feth,
    FlowLabel, Headers, Ieth, ImmDt, Ip, Ipv4, Msn, Opcode, Psn, Qpn, Reth, SackEth, Segments,
    Split, Syndrome, Vlan, Xrceth,
};
use testkit::{sge, Memory, Send, ALL};

/// The memory for work requests. Each virtqueue has places of its own, which it uses in turn.
const WORK_REQUESTS: Range<u64> = 0x1_0000..WINDOW.end;
/// The bytes of a place, and the places of a virtqueue, which is full with as many.
const PLACE: u64 = 160;
const PLACES: u64 = 16;
/// The Q_Key of the UD QPs, as [`fuzz::modify`] has it.
const QKEY: u32 = 0x1111;
/// Packets under way between the guests; further ones are lost.
const MOST_UNDER_WAY: usize = 64;
/// Rounds in which two guests and the cable between them must come to rest.
const ROUNDS: usize = 100_000;

/// An end of the cable, which holds what its host sends.
#[derive(Default)]
struct End(Mutex<VecDeque<Vec<u8>>>);

impl End {
    fn with<R>(&self, f: impl FnOnce(&mut VecDeque<Vec<u8>>) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Uplink for End {
    fn send(&self, Segments { frame, segment, .. }: Segments<'_>) -> usize {
        assert!(!has_secret(frame), "memory was sent that nobody may read");
        let mut split = Split::new(frame, segment);
        while let Some(range) = split.next(frame) {
            self.with(|frames| {
                if frames.len() < MOST_UNDER_WAY {
                    frames.push_back(frame[range].to_vec());
                }
            });
        }
        1
    }
}

/// A guest on a host of its own.
struct Host {
    guest: Guest,
    fabric: Arc<Fabric>,
    uplink: Arc<End>,
    pdn: u32,
    cqn: u16,
    /// The QPs: the connection that the fuzzer attacks, the one that it leaves alone, and the UD QP.
    qps: [u32; 3],
    /// The key of the MR with all access first.
    keys: Vec<u32>,
    /// How many work requests were posted to each work queue.
    posted: [u64; 6],
}

const ATTACKED: usize = 0;
const HONEST: usize = 1;
const DATAGRAMS: usize = 2;

impl Host {
    fn new(clock: &Arc<Clock>, number: u8) -> Self {
        let uplink = Arc::new(End::default());
        let fabric = Fabric::new(FabricConfig {
            clock: Arc::clone(clock) as _,
            uplink: Some(Arc::clone(&uplink) as _),
            random: || 0,
            ..FabricConfig::default()
        });
        let mut guest = Guest::new(&fabric, number, false);
        let pdn = create_pd(&guest);
        let cqn = create_cq(&mut guest, 0);
        let keys = vec![reg_mr(&mut guest, pdn, GIVEN, ALL)];
        let kinds = [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UD];
        let qps = kinds.map(|kind| create_qp(&mut guest, pdn, cqn, kind, 0));
        for _ in 0..4 {
            guest.add_event_buffers();
        }
        Self { guest, fabric, uplink, pdn, cqn, qps, keys, posted: [0; 6] }
    }

    /// Connects the QPs to those of another host.
    fn connect(&self, gid: Gid, qps: [u32; 3]) {
        for (at, kind) in
            [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UD].into_iter().enumerate()
        {
            connect_qp(&self.guest, kind, self.qps[at], gid, qps[at]);
        }
    }

    fn query(&self, qp: usize) -> virtio_rdma_qp_attr {
        let request = virtio_rdma_cmd_query_qp { qpn: self.qps[qp], attr_mask: 0 };
        let reply: virtio_rdma_rsp_query_qp =
            command(&self.guest.device, VIRTIO_RDMA_CMD_QUERY_QP, &request).expect("a QP");
        reply.attr
    }

    /// Posts the bytes of a work request. Returns whether there was room.
    fn post_bytes(&mut self, qp: usize, receive: bool, bytes: &[u8]) -> bool {
        let queue = 2 * qp + usize::from(receive);
        let index = 1 + 3 + 2 * (self.qps[qp] as u16 - 1) + u16::from(receive);
        let place = queue as u64 * PLACES + self.posted[queue] % PLACES;
        let at = WORK_REQUESTS.start + place * PLACE;
        let has_room = self.guest.add_readable(index, at, bytes.len() as u32);
        if has_room {
            self.guest.memory.write_bytes(at, bytes);
            self.posted[queue] += 1;
        }
        has_room
    }

    /// Posts a send work request on a place of the MR with all access. Returns whether there was room.
    fn post(&mut self, qp: usize, mut send: Send, at: u64, length: u32) -> bool {
        send.sges = vec![sge(at, length, self.keys[0])];
        self.post_bytes(qp, false, &send.bytes())
    }

    /// Posts a receive on a place of the MR with all access. Returns whether there was room.
    fn receive(&mut self, qp: usize, wr_id: u64, at: u64, length: u32) -> bool {
        let bytes = testkit::receive(wr_id, &[sge(at, length, self.keys[0])]);
        self.post_bytes(qp, true, &bytes)
    }

    /// Takes the completions, and gives all buffers back.
    fn poll(&mut self) -> Vec<virtio_rdma_cqe> {
        let cqes = self.guest.poll(self.cqn);
        for queue in 4..self.guest.queues.len() as u16 {
            self.guest.take_used(queue);
        }
        self.guest.add_event_buffers();
        cqes
    }
}

struct World {
    clock: Arc<Clock>,
    a: Host,
    b: Host,
    wr_id: u64,
    /// The work requests of the second guest that have not completed.
    posted: HashSet<u64>,
    /// A few packets that were sent before.
    before: Vec<Vec<u8>>,
    /// The content of the second guest's memory from the start of [`OWN`] on.
    kept: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(Clock::default());
        let (a, mut b) = (Host::new(&clock, 1), Host::new(&clock, 2));
        hide_secrets(&b.guest, WORK_REQUESTS.start);
        b.keys.extend(reg_others(&mut b.guest, b.pdn));
        a.connect(b.guest.gid, b.qps);
        b.connect(a.guest.gid, a.qps);
        let kept = b.guest.load(OWN.start, (WORK_REQUESTS.start - OWN.start) as usize);
        let (posted, before) = Default::default();
        Self { clock, a, b, wr_id: 0, posted, before, kept }
    }

    /// Returns a place in the MR with all access, with room for 0x800 bytes.
    fn at(program: &mut Program<'_>) -> u64 {
        GIVEN.start + u64::from(program.u8()) * 32
    }

    fn length(program: &mut Program<'_>) -> u32 {
        program.pick(&[0, 1, 8, 100, 255, 256, 257, 512, 1000, 0x700])
    }

    /// Makes one of the guests post a send work request, for the connection or a datagram.
    fn send(&mut self, by_b: bool, program: &mut Program<'_>) {
        self.wr_id += 1;
        let (from, to) = if by_b { (&mut self.b, &self.a) } else { (&mut self.a, &self.b) };
        let (at, remote, length) = (Self::at(program), Self::at(program), Self::length(program));
        let choice = program.u8() % 8;
        let opcodes = [
            VIRTIO_RDMA_WR_SEND,
            VIRTIO_RDMA_WR_RDMA_WRITE,
            VIRTIO_RDMA_WR_RDMA_READ,
            VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
            VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP,
            VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM,
            VIRTIO_RDMA_WR_SEND_WITH_IMM,
        ];
        let rkey = to.keys[0];
        let send = |opcode| Send::new(self.wr_id, opcode, &[]);
        let sent = if choice == 7 {
            let datagram =
                send(VIRTIO_RDMA_WR_SEND).ud(to.guest.gid, to.qps[DATAGRAMS], QKEY, from.pdn);
            from.post(DATAGRAMS, datagram, at, length)
        } else {
            let opcode = opcodes[usize::from(choice)];
            if matches!(choice, 3 | 4) {
                from.post(ATTACKED, send(opcode).atomic(remote & !7, rkey, 1, 2), at, 8)
            } else {
                from.post(ATTACKED, send(opcode).rdma(remote, rkey), at, length)
            }
        };
        if by_b && sent {
            self.posted.insert(self.wr_id);
        }
    }

    fn receive(&mut self, by_b: bool, program: &mut Program<'_>) {
        self.wr_id += 1;
        let host = if by_b { &mut self.b } else { &mut self.a };
        let qp = program.pick(&[ATTACKED, DATAGRAMS]);
        let posted = host.receive(qp, self.wr_id, Self::at(program), Self::length(program));
        if by_b && posted {
            self.posted.insert(self.wr_id);
        }
    }

    /// Returns a PSN that is mostly near the one that the second guest expects, or near those that it
    /// has sent.
    fn psn(&self, answers: bool, program: &mut Program<'_>) -> Psn {
        let attr = self.b.query(ATTACKED);
        let near = Psn::new(if answers { attr.sq_psn } else { attr.rq_psn });
        match program.u8() {
            255 => Psn::new(program.u32()),
            by @ 224.. => near.plus(u32::from(by & 31)),
            by @ 128.. => near.minus(u32::from(by & 31)),
            _ if answers => near.minus(1),
            _ => near,
        }
    }

    /// Returns an address and a key, which mostly belong to the same MR.
    fn place(&self, program: &mut Program<'_>) -> (u64, u32) {
        let starts = [GIVEN, GIVEN, OWN, OTHER_PD, READABLE].map(|range| range.start);
        let keys = [0, 0, 1, 2, 3].map(|at| self.b.keys[at]);
        let (choice, shift) = (program.below(5), program.u8());
        match program.u8() {
            255 => (program.u64(), keys[choice]),
            254 => (starts[choice], program.u32()),
            other @ 240.. => (starts[choice] + u64::from(shift), keys[usize::from(other) % 5]),
            other @ 200.. => (starts[choice] + u64::from(other) * 0x48, keys[choice]),
            _ => (starts[choice] + u64::from(shift) * 8, keys[choice]),
        }
    }

    /// Returns the extended headers that an opcode needs.
    fn extended(
        &self,
        opcode: Opcode,
        payload: usize,
        program: &mut Program<'_>,
    ) -> ExtendedHeaders {
        let mut extended = ExtendedHeaders::default();
        for header in opcode.extended_headers() {
            let (va, rkey) = self.place(program);
            let dma_len = match program.u8() {
                255 => program.u32(),
                other @ 128.. => {
                    [0, 1, 8, 256, 300, 0x1000, 0x4000, 1 << 31][usize::from(other & 7)]
                }
                _ => payload as u32,
            };
            match header {
                ExtendedHeader::Xrceth => {
                    extended.xrceth = Some(Xrceth { srq: Qpn::new(1).expect("a number") });
                }
                ExtendedHeader::Deth => {
                    let qkey = if program.u8() == 255 { program.u32() } else { QKEY };
                    extended.deth = Some(Deth { qkey, source_qp: Self::qpn(self.a.qps[2]) });
                }
                ExtendedHeader::Feth => {
                    extended.feth = Feth::new(program.u8() & 15, program.u8() & 3);
                }
                ExtendedHeader::Reth => extended.reth = Some(Reth { va, rkey, dma_len }),
                ExtendedHeader::AtomicEth => {
                    let (swap_add, compare) = (program.u8().into(), program.u8().into());
                    extended.atomic_eth = Some(AtomicEth { va, rkey, swap_add, compare });
                }
                ExtendedHeader::Aeth => {
                    let syndrome = Syndrome::from_byte(program.u8());
                    extended.aeth = Some(Aeth { syndrome, msn: Msn::new(program.u8().into()) });
                }
                ExtendedHeader::AtomicAckEth => {
                    extended.atomic_ack_eth = Some(AtomicAckEth { original: 7 });
                }
                ExtendedHeader::ImmDt => extended.imm_dt = Some(ImmDt(program.array())),
                ExtendedHeader::Ieth => extended.ieth = Some(Ieth { rkey }),
                ExtendedHeader::SackEth => {
                    let held = [0; 4]
                        .map(|_: u64| u64::from(program.u8()).wrapping_mul(0x0101_8001_0000_0101));
                    extended.sack_eth = Some(SackEth { held });
                }
                ExtendedHeader::CnpReserved => {}
            }
        }
        extended
    }

    fn qpn(number: u32) -> Qpn {
        Qpn::new(number).expect("24 bits")
    }

    /// Returns a packet for the second guest that could come from the first.
    fn forge(&self, program: &mut Program<'_>) -> Option<Vec<u8>> {
        let byte = match program.u8() {
            byte @ 192.. => byte,
            176..188 => 0xd1,
            188..192 => 0xd2,
            byte @ 128.. => 0x64 | byte & 1,
            byte => byte & 31,
        };
        let opcode = Opcode::from_byte(byte)?;
        let payload_len = match program.u8() {
            255 => usize::from(program.u16() % 9000),
            // A first or middle packet has the path's MTU.
            other @ 128.. => [0, 1, 8, 100, 255, 257, 512, 1024][usize::from(other & 7)],
            0..16 => 8,
            _ => 256,
        };
        let payload =
            if opcode.may_carry_payload() { vec![program.u8(); payload_len] } else { vec![] };
        let qp = if byte & 0xe0 == 0x60 { DATAGRAMS } else { ATTACKED };
        let dest_qp = match program.u8() {
            255 => Qpn::new(program.u32() & 0xff_ffff)?,
            other @ 250.. => Self::qpn(u32::from(other & 3) + 1),
            _ => Self::qpn(self.b.qps[qp]),
        };
        if dest_qp.get() == self.b.qps[HONEST] {
            return None;
        }
        let mut bth =
            Bth::new(opcode, dest_qp, self.psn(matches!(byte, 0x0d..=0x12 | 0xd1), program));
        let flags = program.u8();
        bth.ack_request = flags & 1 != 0;
        bth.solicited_event = flags & 2 != 0;
        bth.becn = flags & 4 != 0;
        if flags & 0xf0 == 0xf0 {
            bth.pkey = program.u16();
        }
        let others = program.u8();
        let last = if others == 255 { program.u8() } else { 1 };
        let ip = Ip::V4(Ipv4 {
            traffic_class: others & 3,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, last].into(),
            destination: [10, 0, 0, 2].into(),
        });
        let vlan = (others == 254).then(|| Vlan::new(program.u16()));
        let headers = Headers {
            ethernet: Ethernet {
                destination: [2, 0, 0, 0, 0, 2],
                source: [2, 0, 0, 0, 0, 1],
                vlan,
            },
            ip,
            source_port: roce::source_port(FlowLabel::default(), dest_qp, dest_qp),
            bth,
            extended: self.extended(opcode, payload.len(), program),
        };
        let mut frame = vec![0; payload.len() + 200];
        let len = roce::encode(&headers, &payload, &mut frame).ok()?;
        frame.truncate(len);
        Some(frame)
    }

    /// Gives a packet to the second host, unless it is for the connection that is left alone.
    fn attack(&self, frame: &[u8]) {
        let is_honest =
            |packet: roce::Packet<'_>| packet.headers.bth.dest_qp.get() == self.b.qps[HONEST];
        if !roce::decode(frame).is_ok_and(is_honest) {
            self.b.fabric.receive(frame, 0);
        }
    }

    /// Brings a packet of one of the guests to the other host, whichever of those under way.
    fn carry(&mut self, from_b: bool, place: u8, loses: bool) -> bool {
        let (from, to) = if from_b { (&self.b, &self.a) } else { (&self.a, &self.b) };
        let frame =
            from.uplink.with(|frames| frames.remove(usize::from(place) % frames.len().max(1)));
        let Some(frame) = frame else { return false };
        if !loses {
            to.fabric.receive(&frame, 0);
        }
        if !from_b && self.before.len() < 16 {
            self.before.push(frame);
        }
        true
    }

    /// Takes the second guest's completions. Each of them must belong to a work request that was posted.
    fn poll(&mut self) {
        for cqe in self.b.poll() {
            if cqe.qp_num != self.b.qps[HONEST] {
                assert!(self.posted.remove(&cqe.wr_id), "{} was not posted", { cqe.wr_id });
            }
        }
        self.a.poll();
    }

    fn step(&mut self, operation: u8, program: &mut Program<'_>) {
        match operation % 24 {
            0..=7 => {
                if let Some(frame) = self.forge(program) {
                    self.attack(&frame);
                }
            }
            8 => {
                if let Some(mut frame) = self.forge(program) {
                    program.patch(&mut frame);
                    self.attack(&frame);
                }
            }
            9 => {
                let len = usize::from(program.u8());
                self.attack(program.bytes(len));
            }
            10 => {
                if !self.before.is_empty() {
                    let frame = self.before[program.below(self.before.len())].clone();
                    self.attack(&frame);
                }
            }
            11 | 12 => self.send(true, program),
            13 => self.send(false, program),
            14 | 15 => self.receive(true, program),
            16 => self.receive(false, program),
            17 => drop(self.carry(true, program.u8(), false)),
            18 => drop(self.carry(false, program.u8(), false)),
            19 => drop(self.carry(program.flag(), 0, true)),
            20 => drop(self.b.guest.device.run(program.u8().into())),
            21 => drop(self.a.guest.device.run(program.u8().into())),
            22 => self.clock.advance(Duration::from_micros(1 << (program.u8() & 15))),
            _ => self.poll(),
        }
    }

    /// Lets both guests and the cable come to rest, and time pass until nothing waits for it.
    fn settle(&mut self) {
        for _ in 0..ROUNDS {
            let next = [&self.a, &self.b].map(|host| host.guest.settle());
            self.poll();
            let (mut carried, mut time) = (false, None);
            for from_b in [false, true] {
                while self.carry(from_b, 0, false) {
                    carried = true;
                }
            }
            for next in next {
                if let Next::At(at) = next {
                    time = Some(time.map_or(at, |other: std::time::Instant| other.min(at)));
                }
            }
            match (carried, time) {
                (true, _) => {}
                (false, Some(time)) => self.clock.advance_to(time),
                (false, None) => return,
            }
        }
        panic!("the guests never rest");
    }

    /// Checks the memory of the second guest.
    fn check_memory(&self) {
        let now = self.b.guest.load(OWN.start, self.kept.len());
        assert!(now == self.kept, "memory was written that was not given out");
        check_second_region(&self.b.guest);
        assert_eq!(self.b.guest.memory.written(), None, "the device wrote where it may not");
    }

    /// Checks that the other connection still works: the first guest writes, and the second one sends.
    fn check_honest(&mut self) {
        // All QPs of a guest share its CQ. One that posts more than the CQ has room for ends them itself.
        let has_overrun = |host: &Host| host.guest.device.counter(Counter::CqOverflows) != 0;
        if has_overrun(&self.a) || has_overrun(&self.b) {
            return;
        }
        let (written, sent) = (GIVEN.start, GIVEN.start + 0x1000);
        self.a.guest.memory.write_bytes(written, &[0x5a; 600]);
        self.b.guest.memory.write_bytes(sent, &[0xa5; 600]);
        let write = Send::new(1 << 32, VIRTIO_RDMA_WR_RDMA_WRITE, &[]);
        let write = write.rdma(written, self.b.keys[0]);
        let send = Send::new(1 << 33, VIRTIO_RDMA_WR_SEND, &[]);
        assert!(self.a.receive(HONEST, 1 << 34, sent, 600));
        assert!(self.a.post(HONEST, write, written, 600) && self.b.post(HONEST, send, sent, 600));
        let mut done = Vec::new();
        for _ in 0..ROUNDS {
            let _ = [&self.a, &self.b].map(|host| host.guest.settle());
            let mut is_at_rest = true;
            while self.carry(false, 0, false) || self.carry(true, 0, false) {
                is_at_rest = false;
            }
            if is_at_rest {
                // A packet may have been lost as too many were under way, or a CNP slows its sender down.
                self.clock.advance(Duration::from_micros(100));
            }
            for host in [&mut self.a, &mut self.b] {
                let cqes = host.poll();
                done.extend(cqes.iter().map(|cqe| (cqe.wr_id, cqe.status)));
            }
            if done.len() == 3 {
                break;
            }
        }
        done.sort_unstable();
        let status = VIRTIO_RDMA_WC_SUCCESS as u8;
        assert_eq!(done, [(1 << 32, status), (1 << 33, status), (1 << 34, status)]);
        assert!(self.b.guest.load(written, 600) == [0x5a; 600], "a WRITE arrives");
        assert!(self.a.guest.load(sent, 600) == [0xa5; 600], "a SEND arrives");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let mut world = World::new();
    while let Some(operation) = program.operation() {
        world.step(operation, &mut program);
    }
    world.settle();
    world.check_memory();
    for counter in [Counter::BadSendChain, Counter::BadReceiveChain, Counter::BadEventBuffer] {
        assert_eq!(world.b.guest.device.counter(counter), 0);
    }
    assert!(!world.b.guest.device.needs_reset());
    world.check_honest();
});
