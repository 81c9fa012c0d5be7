// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that do RDMA, and their VMMs. Their queues are virtqueues, without rings.
#![allow(dead_code)] // each test uses a part of it

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use abi::*;
use testkit::socket::LIMIT;
use testkit::{gid, sge, Driver, Send, Sizes, Transport, DATA, LOCAL, RING};
pub use testkit::{Pause, Protocol, Vmm};

/// The bytes of a guest's memory, which has nothing but queues and buffers that are used in turn.
const MEMORY: u64 = DATA;
/// The numbers of the QPs that the guest can make.
const QPNS: [u32; 2] = [2, 3];
/// How many CQs a device has, which is what the numbers of its queues depend on.
const MAX_CQ: u16 = 20;
/// The length of a message, which is the room that each has in memory as well.
const MESSAGE: u32 = 3000;

/// A guest and its VMM.
pub struct RdmaGuest {
    driver: Driver<Vmm>,
    lkey: u32,
    pdn: u32,
    cqn: u32,
}

impl RdmaGuest {
    /// Starts the device behind this socket, and makes what is needed for QPs. Guests have different numbers. A
    /// receiver that is not ready is waited for without end.
    fn start(socket: UnixStream, protocol: Protocol, number: u8) -> Self {
        let (vmm, memory) = Vmm::new(socket, protocol, MEMORY);
        let sizes = Sizes { memory: MEMORY, max_cq: MAX_CQ, ..Sizes::default() };
        let mut driver = Driver::over(vmm, memory, sizes, gid(number));
        (driver.retry_cnt, driver.rnr_retry) = (7, 7);
        let queues = QPNS.map(|qpn| [driver.send_queue(qpn), driver.receive_queue(qpn)]);
        driver.set_up(
            1 << VIRTIO_RDMA_F_VIRTQUEUES,
            [0, driver.cq_queue(0)].into_iter().chain(queues.concat()),
        );
        driver.add_gid(0, gid(number), 0).unwrap();
        let pdn = driver.create_pd();
        let lkey = driver.get_dma_mr(pdn, LOCAL).unwrap().lkey;
        let cqn = driver.create_cq(RING);
        driver.kick(driver.cq_queue(cqn));
        Self { driver, lkey, pdn, cqn }
    }

    /// Makes the VMM pause the device. Returns where each queue is to go on.
    pub fn pause(&self, pause: Pause) -> Vec<u16> {
        self.driver.pause(pause)
    }

    /// Makes the VMM let the device go on, which it has paused.
    pub fn resume(&self, pause: Pause, bases: &[u16]) {
        self.driver.resume(pause, bases);
    }

    /// Makes a reliable connection's QP, and returns its number.
    pub fn create_qp(&mut self) -> u32 {
        let qpn = self.driver.create_qp(self.pdn, self.cqn, VIRTIO_RDMA_QPT_RC);
        assert!(QPNS.contains(&qpn));
        qpn
    }

    /// Connects a QP to one of the guest with this number, which may access nothing.
    pub fn connect(&mut self, qpn: u32, peer: u8, peer_qpn: u32) {
        self.driver.connect_with(qpn, 0, gid(peer), peer_qpn);
    }

    /// Asks for the state of the port. The reply comes with an interrupt.
    pub fn query_port(&mut self) {
        let request = virtio_rdma_cmd_query_port { port: 1 };
        let _: virtio_rdma_rsp_query_port =
            self.driver.command(VIRTIO_RDMA_CMD_QUERY_PORT, &request).unwrap();
    }

    /// Returns all bytes of its memory.
    pub fn bytes(&self) -> Vec<u8> {
        self.driver.bytes(0, usize::try_from(MEMORY).unwrap())
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
        let at = self.driver.place(&content(number, seed));
        let send = Send::new(number.into(), opcode, &[sge(at, MESSAGE, self.lkey)]);
        self.driver.post_send(qpn, &send);
    }

    /// Posts a receive with this number. Returns where the message will be.
    pub fn post_receive(&mut self, qpn: u32, number: u32) -> u64 {
        let at = self.driver.place(&[0; MESSAGE as usize]);
        self.driver.post_recv(qpn, number.into(), &[sge(at, MESSAGE, self.lkey)]);
        at
    }

    /// Returns whether the message with this number has arrived there, with this seed.
    pub fn has_message(&self, at: u64, number: u32, seed: u8) -> bool {
        self.driver.bytes(at, MESSAGE as usize) == content(number, seed)
    }

    /// Waits for the next completion. It must be a success. Returns its QP, whether it is of a receive, and the number
    /// of the work request.
    pub fn complete(&mut self) -> (u32, bool, u32) {
        let deadline = Instant::now() + LIMIT;
        let cqe = loop {
            if let Some(cqe) = self.driver.poll(self.cqn) {
                break cqe;
            }
            assert!(Instant::now() < deadline, "a completion is missing");
            std::thread::yield_now();
        };
        self.driver.kick(self.driver.cq_queue(self.cqn));
        assert_eq!(u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS);
        let is_receive = u32::from(cqe.opcode) >= VIRTIO_RDMA_WC_RECV;
        (cqe.qp_num, is_receive, u32::try_from(cqe.wr_id).unwrap())
    }

    /// Returns whether there is no completion that was not taken.
    pub fn is_drained(&self) -> bool {
        let queue = self.driver.cq_queue(self.cqn);
        self.driver.used_so_far(queue) == self.driver.used_index(queue)
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
    pub fn new([one, other]: [(UnixStream, Protocol); 2]) -> Self {
        let start = |(socket, protocol), number| RdmaGuest::start(socket, protocol, number);
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
            guest.driver.socket.shutdown(Shutdown::Both).unwrap();
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

/// Returns the content of the message with this number.
fn content(number: u32, seed: u8) -> Vec<u8> {
    let byte =
        |at: u32| at.wrapping_mul(31).wrapping_add(number).to_le_bytes()[0].wrapping_add(seed);
    (0..MESSAGE).map(byte).collect()
}
