// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that do RDMA, and their VMMs. Their queues are virtqueues, without rings.
#![allow(dead_code)] // each test uses a part of it

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use abi::*;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::front_end::{new_eventfd, LIMIT};

mod vmm;

use vmm::Vmm;
pub use vmm::{Pause, Transport};

/// The address where the VMM says that it has the memory, and the number of bytes.
const USER: u64 = 0x10_0000;
const MEMORY: u64 = 0x40_0000;
/// Where the rings of queues begin, and how far apart they are.
const RINGS: u64 = 0x1000;
const RING: u64 = 0x3000;
/// Where buffers of requests and of CQEs are.
const BUFFERS: u64 = 0x10_0000;
/// The descriptors of a queue, and how many chains it can have at a time.
const SIZE: u16 = 64;
const CHAINS: u16 = SIZE / 2;
/// The numbers of the QPs that the guest can make.
const QPNS: [u32; 2] = [2, 3];
/// How many CQs a device has, which is what the numbers of its queues depend on.
const MAX_CQ: u16 = 20;
/// The length of a message, which is the room that each has in memory as well.
const MESSAGE: u32 = 3000;

/// A queue, as the guest and its VMM have it.
pub struct Queue {
    /// Where its descriptors are.
    at: u64,
    next: u16,
    seen: u16,
    kick: OwnedFd,
    call: OwnedFd,
}

/// A guest and its VMM.
pub struct RdmaGuest {
    pub vmm: Vmm,
    memory: OwnedFd,
    queues: BTreeMap<u16, Queue>,
    /// Where the next buffer is.
    free: u64,
    lkey: u32,
    pdn: u32,
}

impl RdmaGuest {
    /// Starts the device behind this socket, and makes what is needed for QPs. Guests have different numbers.
    fn start(socket: UnixStream, transport: Transport, number: u8) -> Self {
        let mut this = Self {
            vmm: Vmm { socket, transport },
            memory: new_memory(),
            queues: BTreeMap::new(),
            free: BUFFERS,
            lkey: 0,
            pdn: 0,
        };
        this.vmm.give_memory(&this.memory);
        for queue in [0, 1].into_iter().chain(QPNS.into_iter().flat_map(send_and_receive)) {
            this.add_queue(queue);
        }
        this.vmm.start(&this.queues, SIZE);
        let request = virtio_rdma_cmd_add_gid {
            gid: gid(number),
            gid_type: VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP,
            index: 0,
            vlan_id: u16::try_from(VIRTIO_RDMA_NO_VLAN).unwrap(),
            port_num: 1,
        };
        this.command::<_, ()>(VIRTIO_RDMA_CMD_ADD_GID, &request);
        let pd: virtio_rdma_rsp_create_pd = this.command(VIRTIO_RDMA_CMD_CREATE_PD, &());
        let access = VIRTIO_RDMA_ACCESS_LOCAL_WRITE;
        let request = virtio_rdma_cmd_get_dma_mr { pdn: pd.pdn, access_flags: access };
        let mr: virtio_rdma_rsp_mr = this.command(VIRTIO_RDMA_CMD_GET_DMA_MR, &request);
        (this.pdn, this.lkey) = (pd.pdn, mr.lkey);
        let request = virtio_rdma_cmd_create_cq { cqe: CHAINS.into() };
        let cq: virtio_rdma_rsp_create_cq = this.command(VIRTIO_RDMA_CMD_CREATE_CQ, &request);
        assert_eq!(cq.cqn, 0);
        for chain in 0..CHAINS {
            this.add(1, &[(cqe_at(chain), 64, true)]);
        }
        this
    }

    /// Makes the VMM pause the device. Returns where each queue is to go on.
    pub fn pause(&self, pause: Pause) -> Vec<u16> {
        self.vmm.pause(&self.queues, pause)
    }

    /// Makes the VMM let the device go on, which it has paused.
    pub fn resume(&self, pause: Pause, bases: &[u16]) {
        self.vmm.resume(&self.queues, SIZE, pause, bases);
    }

    /// Makes a reliable connection's QP, and returns its number.
    pub fn create_qp(&mut self) -> u32 {
        let mut request = virtio_rdma_cmd_create_qp::new_zeroed();
        request.pdn = self.pdn;
        request.qp_type = byte(VIRTIO_RDMA_QPT_RC);
        (request.max_send_wr, request.max_recv_wr) = (16, 16);
        (request.max_send_sge, request.max_recv_sge) = (1, 1);
        let reply: virtio_rdma_rsp_create_qp = self.command(VIRTIO_RDMA_CMD_CREATE_QP, &request);
        assert!(QPNS.contains(&reply.qpn));
        reply.qpn
    }

    /// Connects a QP to one of the guest with this number. A receiver that is not ready is waited for without end.
    pub fn connect(&mut self, qpn: u32, peer: u8, peer_qpn: u32) {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.port_num = 1;
        (attr.path_mtu, attr.dest_qp_num) = (3, peer_qpn);
        (attr.ah_attr.grh.dgid, attr.ah_attr.port_num) = (gid(peer), 1);
        attr.ah_attr.ah_flags = byte(VIRTIO_RDMA_AH_GRH);
        (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (1, 12);
        (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic) = (14, 7, 7, 1);
        let init = VIRTIO_RDMA_QP_PKEY_INDEX | VIRTIO_RDMA_QP_PORT | VIRTIO_RDMA_QP_ACCESS_FLAGS;
        let rtr = VIRTIO_RDMA_QP_AV
            | VIRTIO_RDMA_QP_PATH_MTU
            | VIRTIO_RDMA_QP_DEST_QPN
            | VIRTIO_RDMA_QP_RQ_PSN
            | VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC
            | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
        let rts = VIRTIO_RDMA_QP_TIMEOUT
            | VIRTIO_RDMA_QP_RETRY_CNT
            | VIRTIO_RDMA_QP_RNR_RETRY
            | VIRTIO_RDMA_QP_SQ_PSN
            | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
        let states =
            [(VIRTIO_RDMA_QPS_INIT, init), (VIRTIO_RDMA_QPS_RTR, rtr), (VIRTIO_RDMA_QPS_RTS, rts)];
        for (state, mask) in states {
            attr.qp_state = byte(state);
            let attr_mask = mask | VIRTIO_RDMA_QP_STATE;
            let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask, attr };
            self.command::<_, ()>(VIRTIO_RDMA_CMD_MODIFY_QP, &request);
        }
    }

    /// Asks for the state of the port. The reply comes with an interrupt.
    pub fn query_port(&mut self) {
        let reply = self.ask_port();
        self.hear_port(reply);
    }

    /// Asks for the state of the port, and does not wait. Returns where the reply will be.
    pub fn ask_port(&mut self) -> u64 {
        self.ask(VIRTIO_RDMA_CMD_QUERY_PORT, &virtio_rdma_cmd_query_port { port: 1 })
    }

    /// Waits for the state of the port, which was asked for.
    pub fn hear_port(&mut self, reply: u64) {
        let _: virtio_rdma_rsp_query_port = self.hear(VIRTIO_RDMA_CMD_QUERY_PORT, reply);
    }

    /// Returns the file of its memory.
    pub fn memory(&self) -> OwnedFd {
        self.memory.try_clone().unwrap()
    }

    /// Posts a message with this number, whose content depends on `seed` too.
    pub fn post_send(&mut self, qpn: u32, number: u32, seed: u8) {
        self.post_message(qpn, number, seed, VIRTIO_RDMA_WR_SEND);
    }

    /// Posts a WRITE of such a message to where the peer allows nobody to write.
    pub fn post_write(&mut self, qpn: u32, number: u32) {
        self.post_message(qpn, number, 0, VIRTIO_RDMA_WR_RDMA_WRITE);
    }

    fn post_message(&mut self, qpn: u32, number: u32, seed: u8, opcode: u32) {
        let at = self.allocate(MESSAGE);
        self.write(at, &content(number, seed));
        let mut wqe = virtio_rdma_sq_wqe::new_zeroed();
        (wqe.num_sge, wqe.opcode, wqe.wr_id) = (1, opcode, number.into());
        wqe.send_flags = VIRTIO_RDMA_SEND_SIGNALED;
        let sge = virtio_rdma_sge { addr: at, length: MESSAGE, lkey: self.lkey };
        self.post(send_and_receive(qpn)[0], &[wqe.as_bytes(), sge.as_bytes()].concat());
    }

    /// Posts a receive with this number. Returns where the message will be.
    pub fn post_receive(&mut self, qpn: u32, number: u32) -> u64 {
        let at = self.allocate(MESSAGE);
        self.write(at, &[0; MESSAGE as usize]);
        let wqe = virtio_rdma_rq_wqe { num_sge: 1, reserved_04: 0, wr_id: number.into() };
        let sge = virtio_rdma_sge { addr: at, length: MESSAGE, lkey: self.lkey };
        self.post(send_and_receive(qpn)[1], &[wqe.as_bytes(), sge.as_bytes()].concat());
        at
    }

    /// Returns whether the message with this number has arrived there, with this seed.
    pub fn has_message(&self, at: u64, number: u32, seed: u8) -> bool {
        let mut bytes = vec![0; MESSAGE as usize];
        rustix::io::pread(&self.memory, &mut bytes, at).unwrap();
        bytes == content(number, seed)
    }

    /// Waits for the next completion. It must be a success. Returns its QP, whether it is of a receive, and the number
    /// of the work request.
    pub fn complete(&mut self) -> (u32, bool, u32) {
        let deadline = Instant::now() + LIMIT;
        let chain = loop {
            if let Some(chain) = self.used(1) {
                break chain;
            }
            assert!(Instant::now() < deadline, "a completion is missing");
            std::thread::yield_now();
        };
        let mut cqe = virtio_rdma_cqe::new_zeroed();
        rustix::io::pread(&self.memory, cqe.as_mut_bytes(), cqe_at(chain)).unwrap();
        self.add(1, &[(cqe_at(chain), 64, true)]);
        assert_eq!(u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS);
        let is_receive = u32::from(cqe.opcode) >= VIRTIO_RDMA_WC_RECV;
        (cqe.qp_num, is_receive, u32::try_from(cqe.wr_id).unwrap())
    }

    /// Returns whether there is no completion that was not taken.
    pub fn is_drained(&self) -> bool {
        self.queues[&1].seen == self.used_index(1)
    }

    /// Sends a command and waits, for the interrupt, until it has succeeded.
    fn command<Q: IntoBytes + Immutable, R: FromBytes>(&mut self, command: u32, request: &Q) -> R {
        let reply = self.ask(command, request);
        self.hear(command, reply)
    }

    /// Sends a command. Returns where the reply will be.
    fn ask<Q: IntoBytes + Immutable>(&mut self, command: u32, request: &Q) -> u64 {
        let request = [&[byte(command)], request.as_bytes()].concat();
        let (from, to) = (self.allocate(512), self.allocate(512));
        self.write(from, &request);
        let length = u32::try_from(request.len()).unwrap();
        self.add(0, &[(from, length, false), (to, 512, true)]);
        to
    }

    /// Waits, for the interrupt, until a command has succeeded, whose reply is there.
    fn hear<R: FromBytes>(&mut self, command: u32, at: u64) -> R {
        let limit = Timespec::try_from(LIMIT).unwrap();
        while self.used(0).is_none() {
            let call = &self.queues[&0].call;
            let ready = poll(&mut [PollFd::new(call, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "no reply to command {command}");
            let _ = rustix::io::read(call, &mut [0; 8]);
        }
        let mut reply = vec![0; 1 + size_of::<R>()];
        rustix::io::pread(&self.memory, &mut reply, at).unwrap();
        assert_eq!(u32::from(reply[0]), VIRTIO_RDMA_STATUS_OK, "command {command}");
        R::read_from_bytes(&reply[1..]).unwrap()
    }

    /// Returns the address of a buffer of this length, which stays for as long as the buffers of the next megabytes.
    fn allocate(&mut self, length: u32) -> u64 {
        let length = u64::from(length).next_multiple_of(64);
        if self.free + length > MEMORY {
            self.free = BUFFERS;
        }
        self.free += length;
        self.free - length
    }

    fn post(&mut self, queue: u16, bytes: &[u8]) {
        let at = self.allocate(512);
        self.write(at, bytes);
        self.add(queue, &[(at, u32::try_from(bytes.len()).unwrap(), false)]);
        // The buffers of work requests come back at once.
        while self.used(queue).is_some() {}
    }

    /// Makes a chain of at most two buffers available, and kicks.
    fn add(&mut self, queue: u16, buffers: &[(u64, u32, bool)]) {
        let Queue { at, next, .. } = self.queues[&queue];
        let head = 2 * (next % CHAINS);
        for (index, (addr, len, writes)) in (head..).zip(buffers) {
            let is_last = usize::from(index - head) + 1 == buffers.len();
            let flags = u16::from(!is_last) | u16::from(*writes) << 1;
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes()];
            let bytes = [&bytes.concat()[..], &(index + 1).to_le_bytes()].concat();
            self.write(at + u64::from(index) * 16, &bytes);
        }
        self.write(at + 0x1000 + 4 + u64::from(next % SIZE) * 2, &head.to_le_bytes());
        self.write(at + 0x1000 + 2, &next.wrapping_add(1).to_le_bytes());
        let place = self.queues.get_mut(&queue).unwrap();
        place.next = next.wrapping_add(1);
        self.vmm.kick(queue, place);
    }

    /// Takes a chain that the device has used, and returns its number.
    fn used(&mut self, queue: u16) -> Option<u16> {
        let index = self.used_index(queue);
        let place = self.queues.get_mut(&queue).unwrap();
        if place.seen == index {
            return None;
        }
        let at = place.at + 0x2000 + 4 + u64::from(place.seen % SIZE) * 8;
        place.seen = place.seen.wrapping_add(1);
        let mut head = [0; 2];
        rustix::io::pread(&self.memory, &mut head, at).unwrap();
        Some(u16::from_le_bytes(head) / 2)
    }

    fn used_index(&self, queue: u16) -> u16 {
        let mut index = [0; 2];
        rustix::io::pread(&self.memory, &mut index, self.queues[&queue].at + 0x2002).unwrap();
        u16::from_le_bytes(index)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.memory, bytes, at), Ok(bytes.len()));
    }

    fn add_queue(&mut self, index: u16) {
        let at = RINGS + self.queues.len() as u64 * RING;
        let (kick, call) = (new_eventfd(), new_eventfd());
        self.queues.insert(index, Queue { at, next: 0, seen: 0, kick, call });
    }
}

/// Two guests, the first with number 1 and the other one with number 2, and two connections between them.
pub struct Pair {
    pub guests: [RdmaGuest; 2],
    /// The numbers of the QPs of each connection.
    pub connections: Vec<[u32; 2]>,
    /// How many messages each connection has carried in each direction.
    count: u32,
}

/// How many messages are under way in each direction of a connection.
const MESSAGES: u32 = 4;

impl Pair {
    /// Starts the devices behind these sockets, and makes the connections.
    pub fn new([one, other]: [(UnixStream, Transport); 2]) -> Self {
        let start = |(socket, transport), number| RdmaGuest::start(socket, transport, number);
        let (mut one, mut other) = (start(one, 1), start(other, 2));
        let connections = (0..2).map(|_| {
            let qps = [one.create_qp(), other.create_qp()];
            one.connect(qps[0], 2, qps[1]);
            other.connect(qps[1], 1, qps[0]);
            qps
        });
        let connections = connections.collect();
        Self { guests: [one, other], connections, count: 0 }
    }

    /// Ends the VMMs. A process that another test is about to start has their sockets open as well for a moment.
    pub fn end(self) {
        for guest in self.guests {
            guest.vmm.socket.shutdown(Shutdown::Both).unwrap();
        }
    }

    /// Sends messages in both directions of all connections. No receives are posted, so the messages wait.
    pub fn send(&mut self) {
        for number in self.count..self.count + MESSAGES {
            for qps in &self.connections {
                for (seed, (guest, qpn)) in (0..).zip(self.guests.iter_mut().zip(qps)) {
                    guest.post_send(*qpn, number, seed);
                }
            }
        }
    }

    /// Receives the messages that were sent. Each comes once, in order, and with its content.
    pub fn receive(&mut self) {
        let places = self.post_receives();
        self.complete(places);
    }

    /// Posts receives for the messages that were sent, or are sent now. Returns their guests, addresses and numbers.
    pub fn post_receives(&mut self) -> Vec<(usize, u64, u32)> {
        let numbers = self.count..self.count + MESSAGES;
        let mut places = Vec::new();
        for (at, guest) in self.guests.iter_mut().enumerate() {
            for qps in &self.connections {
                let post = |number| (at, guest.post_receive(qps[at], number), number);
                places.extend(numbers.clone().map(post));
            }
        }
        places
    }

    /// Waits until the messages have arrived at these places. Each comes once, in order, and with its content.
    pub fn complete(&mut self, places: Vec<(usize, u64, u32)>) {
        let mut due = Vec::new();
        for (at, qpn) in self.connections.iter().flat_map(|qps| qps.iter().enumerate()) {
            due.extend([false, true].map(|receive| (at, *qpn, receive, self.count)));
        }
        for (at, guest) in self.guests.iter_mut().enumerate() {
            for _ in 0..2 * MESSAGES as usize * self.connections.len() {
                let (qpn, is_receive, number) = guest.complete();
                let is_it = |due: &&mut (usize, u32, bool, u32)| {
                    (due.0, due.1, due.2) == (at, qpn, is_receive)
                };
                let next = due.iter_mut().find(is_it).unwrap();
                assert_eq!(next.3, number, "guest {at}, QP {qpn}, receive: {is_receive}");
                next.3 += 1;
            }
            assert!(guest.is_drained());
        }
        for (at, place, number) in places {
            let seed = u8::try_from(1 - at).unwrap();
            assert!(self.guests[at].has_message(place, number, seed), "message {number}");
        }
        self.count += MESSAGES;
    }
}

/// Returns all bytes of a guest's memory.
pub fn bytes_of(memory: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(MEMORY).unwrap()];
    assert_eq!(rustix::io::pread(memory, &mut bytes, 0), Ok(bytes.len()));
    bytes
}

fn new_memory() -> OwnedFd {
    let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, MEMORY).unwrap();
    memory
}

fn byte(value: u32) -> u8 {
    u8::try_from(value).unwrap()
}

/// Returns the GID of the guest with this number.
fn gid(number: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 0, 0, number]);
    gid
}

/// Returns the numbers of the send queue and of the receive queue of a QP.
fn send_and_receive(qpn: u32) -> [u16; 2] {
    let send = 1 + MAX_CQ + 2 * (u16::try_from(qpn).unwrap() - 1);
    [send, send + 1]
}

/// Returns the address of the CQE of a chain.
fn cqe_at(chain: u16) -> u64 {
    BUFFERS - 0x1_0000 + u64::from(chain) * 64
}

/// Returns the content of the message with this number.
fn content(number: u32, seed: u8) -> Vec<u8> {
    let byte =
        |at: u32| at.wrapping_mul(31).wrapping_add(number).to_le_bytes()[0].wrapping_add(seed);
    (0..MESSAGE).map(byte).collect()
}
