// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices with a planted defect: each fails the clause that it breaks.

// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::rc::Rc;
use std::time::Duration;

use abi::*;
use conform::port::{Defect, InProcess, Network};
use conform::suite::{all, Settings, Suite, Verdict};
use engine::Device;
use memory::GuestMemory;
use ring::Layout;
use testkit::{Memory as _, CQE, CQ_HEAD};

/// A reply that the device has just made.
struct Reply {
    /// The request.
    request: Vec<u8>,
    /// The address of the reply.
    at: u64,
    /// The address of the used length.
    length: u64,
    /// The address of the used index.
    index: u64,
}

impl Reply {
    fn is(&self, command: u32) -> bool {
        self.request.first() == Some(&(command as u8))
    }
}

/// Watches what a device does, so that a defect can spoil it.
#[derive(Default)]
struct Watch {
    seen: u16,
    /// The first pages of the regions of CQs, and how many CQEs they have.
    cqs: BTreeMap<u64, u64>,
    /// The memory of MRs: addresses and lengths.
    mrs: Vec<(u64, u64)>,
    /// The request that has filled entry 0 of the GID table.
    gid: Option<Vec<u8>>,
    /// The number of requests that the device has found.
    found: u16,
}

impl Watch {
    /// Returns the next reply of the control queue.
    fn next(&mut self, memory: &GuestMemory, control: &Layout) -> Option<Reply> {
        let index = control.used + 2;
        if memory.get::<u16>(index) == self.seen {
            return None;
        }
        let entry = control.used + 4 + u64::from(self.seen % control.size) * 8;
        let head: u32 = memory.get(entry);
        self.seen = self.seen.wrapping_add(1);
        let descriptor = |at: u32| -> (u64, u32, u16) {
            let place = control.desc + u64::from(at) * 16;
            (memory.get(place), memory.get(place + 8), memory.get(place + 14))
        };
        let (address, len, next) = descriptor(head);
        let mut request = vec![0; len as usize];
        memory.read_bytes(address, &mut request);
        let (reply, _, _) = descriptor(next.into());
        let reply = Reply { request, at: reply, length: entry + 4, index };
        self.note(memory, &reply);
        Some(reply)
    }

    /// Returns the address of the next request that the device has not found yet.
    fn next_request(&mut self, memory: &GuestMemory, control: &Layout) -> Option<u64> {
        if memory.get::<u16>(control.avail + 2) == self.found {
            return None;
        }
        let head: u16 = memory.get(control.avail + 4 + u64::from(self.found % control.size) * 2);
        self.found = self.found.wrapping_add(1);
        Some(memory.get(control.desc + u64::from(head) * 16))
    }

    /// Notes the objects that a command has made.
    fn note(&mut self, memory: &GuestMemory, reply: &Reply) {
        let word = |at: usize| u64::from_le_bytes(reply.request[at..at + 8].try_into().unwrap());
        if memory.get::<u8>(reply.at) != 0 {
            return;
        }
        if reply.is(VIRTIO_RDMA_CMD_ADD_GID) {
            self.gid = Some(reply.request.clone());
        }
        if reply.is(VIRTIO_RDMA_CMD_DEL_GID) {
            self.gid = None;
        }
        if reply.is(VIRTIO_RDMA_CMD_CREATE_RING_CQ) {
            self.cqs.insert(memory.get(word(1)), 0);
        }
        if reply.is(VIRTIO_RDMA_CMD_REG_USER_MR) {
            let at = |field| word(1 + field);
            let start = at(offset_of!(virtio_rdma_cmd_reg_user_mr, start));
            self.mrs.push((start, at(offset_of!(virtio_rdma_cmd_reg_user_mr, length))));
        }
    }

    /// Returns the address of the next new CQE. CQs have 64 places.
    fn next_cqe(&mut self, memory: &GuestMemory) -> Option<u64> {
        for (region, count) in &mut self.cqs {
            let at = region + CQ_HEAD + *count % 64 * CQE;
            let lap: u32 = memory.get(at + offset_of!(virtio_rdma_ring_cqe, lap) as u64);
            if u64::from(lap) == *count / 64 + 1 {
                *count += 1;
                return Some(at);
            }
        }
        None
    }
}

/// What a defect does with each request, each reply and each CQE, whenever the device has worked, and when it starts.
struct Planted {
    watch: Watch,
    request: fn(&GuestMemory, u64),
    start: fn(&Watch, &Device),
    /// Whether the device goes on in memory that it has lost.
    keeps_memory: bool,
    reply: fn(&GuestMemory, &Reply),
    cqe: fn(&GuestMemory, u64),
    turn: fn(&mut Turn, &GuestMemory),
    state: Turn,
}

/// What a defect knows of the turns of the device.
#[derive(Default)]
struct Turn {
    /// The memory of MRs.
    mrs: Vec<(u64, u64)>,
    /// Whether a CQE has come in this turn.
    has_cqe: bool,
    /// Whether one has come in the turn before.
    had_cqe: bool,
    /// The content that memory is to have in the next turn.
    later: Vec<(u64, Vec<u8>)>,
    /// The virtqueues.
    queues: BTreeMap<u16, Layout>,
}

impl Default for Planted {
    fn default() -> Self {
        let (watch, state) = (Watch::default(), Turn::default());
        Self {
            watch,
            request: |_, _| {},
            start: |_, _| {},
            keeps_memory: false,
            reply: |_, _| {},
            cqe: |_, _| {},
            turn: |_, _| {},
            state,
        }
    }
}

impl Defect for Planted {
    fn spoil(&mut self, number: u8, memory: &GuestMemory, queues: &BTreeMap<u16, Layout>) {
        let Some(control) = queues.get(&0) else { return };
        if number != 1 {
            return;
        }
        while let Some(reply) = self.watch.next(memory, control) {
            (self.reply)(memory, &reply);
        }
        self.state.had_cqe = std::mem::take(&mut self.state.has_cqe);
        while let Some(at) = self.watch.next_cqe(memory) {
            self.state.has_cqe = true;
            (self.cqe)(memory, at);
        }
        self.state.mrs.clone_from(&self.watch.mrs);
        self.state.queues.clone_from(queues);
        (self.turn)(&mut self.state, memory);
    }

    fn mislead(&mut self, number: u8, memory: &GuestMemory, queues: &BTreeMap<u16, Layout>) {
        let Some(control) = queues.get(&0) else { return };
        if number != 1 {
            return;
        }
        while let Some(at) = self.watch.next_request(memory, control) {
            (self.request)(memory, at);
        }
    }

    fn started(&mut self, number: u8, device: &Device) {
        if number == 1 {
            (self.start)(&self.watch, device);
            // The virtqueues begin again.
            (self.watch.seen, self.watch.found) = (0, 0);
            self.watch.cqs.clear();
        }
    }

    fn keeps_memory(&self) -> bool {
        self.keeps_memory
    }
}

/// Checks that a device fails a test by a clause.
fn fails(network: &Rc<Network>, name: &str, clause: &str) {
    let settings = Settings {
        timeout: Duration::from_secs(3),
        silence: Duration::from_secs(1),
        ..Settings::default()
    };
    let run = all().into_iter().find(|run| run.name() == name).expect("a test");
    let count = 1 + u8::from(run.on_two);
    let devices = (1..=count).map(|number| Box::new(InProcess::new(network, number)) as _);
    let mut suite = Suite::new(settings, devices.collect());
    let finding = suite.run(&run);
    let Verdict::Fail(failure) = &finding.verdict else {
        panic!("{name}: {:?}", finding.verdict);
    };
    assert_eq!(failure.clause, clause, "{failure}");
    // The clauses that the test came to before are kept.
    assert!(!finding.passed.contains(&clause) || failure.clause == clause);
}

/// Checks that a planted defect fails a test by a clause.
fn planted(defect: Planted, name: &str, clause: &str) {
    fails(&Network::with(0, Some(Box::new(defect))), name, clause);
}

/// Adds a number to a byte.
fn add(memory: &GuestMemory, at: u64, number: u8) {
    let byte: u8 = memory.get(at);
    memory.put(at, &byte.wrapping_add(number));
}

#[test]
fn used_length_that_is_too_long() {
    let reply = |memory: &GuestMemory, reply: &Reply| add(memory, reply.length, 1);
    planted(Planted { reply, ..Planted::default() }, "control.pds", "D-CTRL-03");
}

#[test]
fn used_length_beyond_the_room() {
    let reply = |memory: &GuestMemory, reply: &Reply| memory.put(reply.length, &u32::MAX);
    planted(Planted { reply, ..Planted::default() }, "control.pds", "D-CTRL-03");
}

#[test]
fn status_of_another_number() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if memory.get::<u8>(reply.at) == VIRTIO_RDMA_STATUS_LENGTH as u8 {
            memory.put(reply.at, &(VIRTIO_RDMA_STATUS_INVAL as u8));
        }
    };
    planted(
        Planted { reply, ..Planted::default() },
        "control.short_request_gets_length",
        "D-CTRL-04",
    );
}

#[test]
fn status_that_does_not_exist() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if memory.get::<u8>(reply.at) == VIRTIO_RDMA_STATUS_BUSY as u8 {
            memory.put(reply.at, &99_u8);
        }
    };
    planted(Planted { reply, ..Planted::default() }, "control.cqs_are_busy", "D-TERM-06");
}

#[test]
fn reserved_bytes_of_a_reply() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if reply.is(VIRTIO_RDMA_CMD_QUERY_PORT) {
            let at = offset_of!(virtio_rdma_rsp_query_port, reserved_1f) as u64;
            memory.put(reply.at + 1 + at, &1_u8);
        }
    };
    planted(Planted { reply, ..Planted::default() }, "port.attributes_of_the_port", "D-TERM-03");
}

#[test]
fn bytes_behind_a_reply() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        let length: u32 = memory.get(reply.length);
        memory.put(reply.at + u64::from(length), &0_u8);
    };
    planted(Planted { reply, ..Planted::default() }, "control.pds", "D-CTRL-08");
}

#[test]
fn reply_that_does_not_come() {
    let turn = |turn: &mut Turn, memory: &GuestMemory| {
        if let Some(control) = turn.queues.get(&0) {
            memory.put(control.used + 2, &0_u16);
        }
    };
    planted(Planted { turn, ..Planted::default() }, "control.pds", "D-FAIL-08");
}

#[test]
fn used_entry_of_nothing() {
    let reply = |memory: &GuestMemory, reply: &Reply| memory.put(reply.length - 4, &0x1_2345_u32);
    planted(Planted { reply, ..Planted::default() }, "control.pds", "D-CTRL-03");
}

#[test]
fn used_index_that_jumps() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        let index: u16 = memory.get(reply.index);
        memory.put(reply.index, &index.wrapping_add(0x4000));
    };
    planted(Planted { reply, ..Planted::default() }, "control.pds", "D-CTRL-03");
}

#[test]
fn keys_of_an_mr_that_differ() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if reply.is(VIRTIO_RDMA_CMD_REG_USER_MR) {
            add(memory, reply.at + 1 + offset_of!(virtio_rdma_rsp_mr, rkey) as u64, 1);
        }
    };
    planted(Planted { reply, ..Planted::default() }, "memory.keys_differ", "D-MR-03");
}

#[test]
fn qp_that_is_not_in_reset() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if reply.is(VIRTIO_RDMA_CMD_QUERY_QP) {
            add(memory, reply.at + 1, 1);
        }
    };
    planted(Planted { reply, ..Planted::default() }, "control.qps_are_made_in_reset", "D-CTRL-33");
}

#[test]
fn number_that_is_given_twice() {
    let reply = |memory: &GuestMemory, reply: &Reply| {
        if reply.is(VIRTIO_RDMA_CMD_CREATE_RING_CQ) {
            memory.put(reply.at + 1, &0_u32);
        }
    };
    planted(Planted { reply, ..Planted::default() }, "control.cqs_are_busy", "D-RING-07");
}

/// Has each CQE of a device spoiled, and checks a test by which that is found.
fn spoiled(cqe: fn(&GuestMemory, u64), clause: &str) {
    planted(Planted { cqe, ..Planted::default() }, "connection.send_arrives.loopback", clause);
}

#[test]
fn fields_of_a_cqe() {
    type C = virtio_rdma_ring_cqe;
    spoiled(|memory, at| add(memory, at + offset_of!(C, wr_id) as u64, 1), "D-CQ-10");
    spoiled(|memory, at| add(memory, at + offset_of!(C, qp_num) as u64, 100), "D-CQ-10");
    spoiled(|memory, at| add(memory, at + offset_of!(C, wqe_index) as u64, 1), "D-CQ-03");
    spoiled(|memory, at| add(memory, at + offset_of!(C, reserved_38) as u64, 1), "D-TERM-03");
    spoiled(|memory, at| add(memory, at + offset_of!(C, lap) as u64, 7), "D-CQ-02");
    spoiled(|memory, at| add(memory, at + offset_of!(C, pkey_index) as u64, 1), "D-CQ-20");
    spoiled(|memory, at| add(memory, at + offset_of!(C, srqn) as u64, 1), "D-CQ-24");
}

#[test]
fn opcode_of_a_cqe() {
    let cqe = |memory: &GuestMemory, at: u64| {
        let opcode = at + offset_of!(virtio_rdma_ring_cqe, opcode) as u64;
        if memory.get::<u8>(opcode) == VIRTIO_RDMA_WC_RDMA_WRITE as u8 {
            memory.put(opcode, &(VIRTIO_RDMA_WC_SEND as u8));
        }
    };
    planted(Planted { cqe, ..Planted::default() }, "connection.write_arrives.loopback", "D-WQE-31");
}

#[test]
fn cqe_before_its_data() {
    let turn = |turn: &mut Turn, memory: &GuestMemory| {
        for (at, bytes) in turn.later.drain(..) {
            memory.write_bytes(at, &bytes);
        }
        if !turn.has_cqe {
            return;
        }
        for (at, len) in &turn.mrs {
            let mut bytes = vec![0; *len as usize];
            memory.read_bytes(*at, &mut bytes);
            memory.write_bytes(*at, &vec![0xee; bytes.len()]);
            turn.later.push((*at, bytes));
        }
    };
    planted(Planted { turn, ..Planted::default() }, "connection.read_fetches.loopback", "D-CQ-22");
}

#[test]
fn memory_that_changes_after_its_cqe() {
    let turn = |turn: &mut Turn, memory: &GuestMemory| {
        if turn.had_cqe {
            for (at, _) in &turn.mrs {
                memory.put(at + 0x100, &0x99_u8);
            }
        }
    };
    planted(
        Planted { turn, ..Planted::default() },
        "work_request.memory_is_the_owners_again.loopback",
        "D-WQE-71",
    );
}

#[test]
fn memory_beyond_an_mr() {
    let turn = |turn: &mut Turn, memory: &GuestMemory| {
        if turn.has_cqe {
            for (at, len) in &turn.mrs {
                memory.put(at + len, &0x99_u8);
            }
        }
    };
    planted(Planted { turn, ..Planted::default() }, "connection.send_arrives.loopback", "D-MR-15");
}

#[test]
fn bits_that_are_missing() {
    let without = |bit: u32| Network::with(1 << bit, None);
    let required = "configuration.required_bits_are_offered";
    fails(&without(VIRTIO_RDMA_F_SRQ), required, "D-FEAT-01");
    fails(&without(VIRTIO_RDMA_F_RINGS), "configuration.rings_are_offered", "D-FEAT-05");
    let limits = "virtqueues.limits_of_no_virtqueues";
    fails(&without(VIRTIO_RDMA_F_VIRTQUEUES), limits, "D-VQ-04");
}

#[test]
fn options_that_are_not_offered_are_not_judged() {
    let network = Network::with(1 << VIRTIO_RDMA_F_UC, None);
    let mut suite = Suite::new(Settings::default(), vec![Box::new(InProcess::new(&network, 1))]);
    let name = "options.uc_carries_messages.loopback";
    let run = all().into_iter().find(|run| run.name() == name).unwrap();
    let reason = format!("not offered: feature bit {VIRTIO_RDMA_F_UC}");
    assert_eq!(suite.run(&run).verdict, Verdict::NotJudged(reason));
}

/// The offset of a field of the attributes in a MODIFY_QP.
macro_rules! attribute {
    ($field:ident) => {
        1 + (offset_of!(virtio_rdma_cmd_modify_qp, attr) + offset_of!(virtio_rdma_qp_attr, $field))
            as u64
    };
}

/// Writes a byte of a request, if it is of this command.
fn in_each(memory: &GuestMemory, at: u64, command: u32, field: u64, byte: u8) {
    if u32::from(memory.get::<u8>(at)) == command {
        memory.put(at + field, &byte);
    }
}

/// Writes a byte of a request, if it is a MODIFY_QP.
fn modify(memory: &GuestMemory, at: u64, field: u64, byte: u8) {
    in_each(memory, at, VIRTIO_RDMA_CMD_MODIFY_QP, field, byte);
}

#[test]
fn gids_that_outlive_a_reset() {
    let start = |watch: &Watch, device: &Device| {
        if let Some(gid) = &watch.gid {
            assert_eq!(device.command(gid, &mut [0; 16]), 1);
        }
    };
    let name = "reset.reset_clears_the_gid_table";
    planted(Planted { start, ..Planted::default() }, name, "D-RST-02");
}

/// Has attributes of QPs set to what the device likes, and checks a test by which that is found.
fn misled(request: fn(&GuestMemory, u64), name: &str, clause: &str) {
    planted(Planted { request, ..Planted::default() }, name, clause);
}

#[test]
fn retries_that_are_not_those_of_the_qp() {
    let name = "connection.no_answer_is_tried_again.loopback";
    misled(|memory, at| modify(memory, at, attribute!(retry_cnt), 0), name, "D-RC-11");
    misled(|memory, at| modify(memory, at, attribute!(retry_cnt), 7), name, "D-RC-11");
    let name = "connection.missing_receive_is_tried_again.loopback";
    misled(|memory, at| modify(memory, at, attribute!(rnr_retry), 0), name, "D-RC-15");
    misled(|memory, at| modify(memory, at, attribute!(min_rnr_timer), 1), name, "D-RC-15");
    misled(|memory, at| modify(memory, at, attribute!(min_rnr_timer), 31), name, "D-RC-20");
    let name = "connection.missing_receive_without_a_retry.loopback";
    misled(|memory, at| modify(memory, at, attribute!(rnr_retry), 1), name, "D-RC-15");
}

#[test]
fn gids_that_stay() {
    let request = |memory: &GuestMemory, at: u64| {
        let index = 1 + offset_of!(virtio_rdma_cmd_del_gid, index) as u64;
        in_each(memory, at, VIRTIO_RDMA_CMD_DEL_GID, index, 1);
    };
    misled(request, "port.nothing_is_sent_from_a_deleted_gid.two", "D-PORT-11");
}

#[test]
fn hop_limit_of_its_own() {
    let turn = |turn: &mut Turn, memory: &GuestMemory| {
        for (at, _) in turn.mrs.iter().filter(|_| turn.has_cqe) {
            // The header of IPv6 is in front of the payload.
            memory.put(at + 0x1000 + 7, &64_u8);
        }
    };
    let name = "datagram.header_of_ipv6.loopback";
    planted(Planted { turn, ..Planted::default() }, name, "D-UD-06");
}

#[test]
fn memory_that_is_kept() {
    let fails = |name: &str, clause: &str| {
        planted(Planted { keeps_memory: true, ..Planted::default() }, name, clause);
    };
    fails("lost_memory.keys_of_an_mr_that_is_away.loopback", "D-MR-37");
    fails("lost_memory.local_keys_of_an_mr_that_is_away", "D-MR-37");
    fails("lost_memory.a_qp_whose_rings_are_away_fails.loopback", "D-RING-40");
    fails("lost_memory.a_cq_whose_ring_is_away_fails", "D-RING-41");
    fails("lost_memory.an_srq_whose_ring_is_away_fails", "D-RING-42");
}

#[test]
fn srq_of_a_target() {
    let cqe = |memory: &GuestMemory, at: u64| {
        add(memory, at + offset_of!(virtio_rdma_ring_cqe, srqn) as u64, 1);
    };
    let name = "xrc.messages_name_their_srq.loopback";
    // The CQE of the send has no SRQ.
    planted(Planted { cqe, ..Planted::default() }, name, "D-CQ-24");
    let receives = |memory: &GuestMemory, at: u64| {
        let opcode: u8 = memory.get(at + offset_of!(virtio_rdma_ring_cqe, opcode) as u64);
        if opcode & 0x80 != 0 {
            add(memory, at + offset_of!(virtio_rdma_ring_cqe, srqn) as u64, 100);
        }
    };
    planted(Planted { cqe: receives, ..Planted::default() }, name, "D-XRC-34");
}
