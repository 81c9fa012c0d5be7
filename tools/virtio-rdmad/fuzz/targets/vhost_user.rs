// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user front end that sends what the fuzzer says: requests with wrong details, or plain bytes.
//!
//! The following must hold:
//! - The answers belong to the requests, and come in the same order.
//! - A queue is started once until the device is reset, with the memory that the front end has shared
//!   by then.
//! - No file descriptor is left open.

#![no_main]

use std::collections::VecDeque;

use fuzz::{Conversation, Peer, Program};
use libfuzzer_sys::fuzz_target;
use memory::GuestMemory;
use ring::SplitQueue;
use testkit::socket::{longs, words};
#[allow(clippy::wildcard_imports)]
use testkit::vhost_user::request::*;
use testkit::vhost_user::{message, HEADER, NEED_REPLY, REPLY, VERSION};
use vhost_user::VhostUser;
use virtio_transport::{Backend, QueueSetup, Server};

const QUEUES: u16 = 4;
/// The address at which the front end says that it maps the guest's memory.
const USER: u64 = 0x7000_0000_0000;
/// All feature bits that are offered.
const FEATURES: u64 = 3 | 1 << 30 | 1 << 32;
/// All protocol feature bits that are offered.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15 | 1 << 16;

/// A virtio device that checks the order in which its functions are called.
#[derive(Default)]
struct Device {
    rings: [Option<(SplitQueue, QueueSetup)>; QUEUES as usize],
    is_frozen: bool,
}

impl Backend for Device {
    /// The server accepts only features that were offered, and this device has one layout of queues.
    fn set_features(&mut self, _: u64) {}

    fn features(&self) -> u64 {
        3
    }

    fn config(&self) -> &[u8] {
        &[0xc5; 256]
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn queue_max_size(&self, _: u16) -> u16 {
        ring::MAX_SIZE
    }

    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        for queue in queues {
            let place = &mut self.rings[usize::from(queue.index)];
            assert!(place.is_none(), "started twice");
            let ring = SplitQueue::new(memory, queue.layout, queue.base);
            *place = Some((ring.map_err(|error| error.to_string())?, queue));
        }
        Ok(())
    }

    fn kick(&mut self, queue: u16) {
        panic!("queue {queue} has a descriptor for kicks");
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        assert!(self.rings.iter().any(Option::is_some), "memory for a device without queues");
        for (ring, _) in self.rings.iter_mut().flatten() {
            let _ = ring.set_memory(memory);
            if self.is_frozen {
                continue;
            }
            if let Ok(Some(chain)) = ring.pop() {
                let _ = ring.push(chain.head, 0);
                let _ = ring.publish();
            }
        }
    }

    fn reset(&mut self) {
        assert!(self.rings.iter().any(Option::is_some), "reset of a device that does not run");
        *self = Self::default();
    }

    fn freeze(&mut self) {
        assert!(self.rings.iter().any(Option::is_some), "a pause of a device that does not run");
        assert!(!std::mem::replace(&mut self.is_frozen, true), "paused twice");
    }

    fn thaw(&mut self, _: Vec<QueueSetup>) -> Result<(), String> {
        assert!(std::mem::take(&mut self.is_frozen), "the device was not paused");
        Ok(())
    }
}

/// The server, the device behind it, and the peer.
struct World {
    peer: Peer,
    server: Server<VhostUser>,
    device: Device,
    /// The requests that the server may answer.
    asked: VecDeque<u32>,
}

impl World {
    /// Sends a request with its payload, and mostly with the file descriptors that belong to it.
    fn send(&mut self, request: u32, flags: u32, payload: &[u8], program: &mut Program<'_>) {
        let message = message(request, flags, payload);
        let fds = match program.u8() {
            255 => self.peer.fds(program),
            _ => match request {
                SET_MEM_TABLE | ADD_MEM_REG => vec![self.peer.memory()],
                SET_VRING_KICK | SET_VRING_CALL | SET_BACKEND_REQ_FD => vec![self.peer.event()],
                _ => Vec::new(),
            },
        };
        if self.peer.send(&message, &fds) {
            self.asked.push_back(request);
        }
    }

    /// Sends a request that is right but for what the program changes.
    fn request(&mut self, program: &mut Program<'_>) {
        let number = match program.u8() {
            255 => program.u32(),
            small => u32::from(small % 42),
        };
        let queue = u32::from(program.u8() % 5);
        let mut payload = payload(number, queue, program);
        program.patch(&mut payload);
        if program.u8() == 255 {
            payload.truncate(program.u8().into());
        }
        let flags = program.pick(&[0, NEED_REPLY, NEED_REPLY, 2, 4]);
        self.send(number, flags, &payload, program);
    }

    /// Sends the requests of a front end up to a queue that runs.
    fn drive(&mut self, program: &mut Program<'_>) {
        let queue = u32::from(program.u8() % 4);
        for number in [
            SET_FEATURES,
            SET_PROTOCOL_FEATURES,
            ADD_MEM_REG,
            SET_VRING_NUM,
            SET_VRING_BASE,
            SET_VRING_ADDR,
            SET_VRING_CALL,
            SET_VRING_KICK,
            SET_VRING_ENABLE,
        ] {
            let payload = payload(number, queue, &mut Program::new(&[]));
            self.send(number, NEED_REPLY, &payload, program);
        }
    }
}

impl Conversation for World {
    fn new() -> Self {
        let (peer, socket) = Peer::new();
        let device = Device::default();
        let server = vhost_user::serve(socket, &device);
        Self { peer, server, device, asked: VecDeque::new() }
    }

    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn messages(&mut self, program: &mut Program<'_>) {
        while let Some(operation) = program.operation() {
            match operation % 8 {
                0..=4 => self.request(program),
                5 => self.drive(program),
                _ if !self.process(false) => return,
                _ => {}
            }
        }
        self.process(false);
    }

    fn process(&mut self, plain: bool) -> bool {
        let going = fuzz::serve(&mut self.server, &mut self.device);
        let received = self.peer.received();
        while let Some(header) = received.get(..HEADER) {
            let word =
                |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
            let (request, size) = (word(0), word(8) as usize);
            assert_eq!(word(4), VERSION | REPLY, "no reply");
            assert!(received.len() >= HEADER + size, "half a reply");
            if !plain {
                assert!(self.asked.iter().any(|asked| *asked == request), "not asked");
                // Requests before this one got no answer.
                while self.asked.pop_front() != Some(request) {}
            }
            received.drain(..HEADER + size);
        }
        if going && !plain {
            let unanswered = |request: &u32| matches!(*request, GET_FEATURES | GET_QUEUE_NUM);
            assert!(!self.asked.iter().any(unanswered), "not answered");
        }
        self.asked.clear();
        going
    }
}

/// Returns the payload of a request.
fn payload(number: u32, queue: u32, program: &mut Program<'_>) -> Vec<u8> {
    let page = |program: &mut Program<'_>| u64::from(program.u8() & 15) << 12;
    match number {
        SET_FEATURES => longs(&[program.pick(&[FEATURES, FEATURES & !(1 << 30), u64::MAX])]),
        SET_PROTOCOL_FEATURES => longs(&[program.pick(&[PROTOCOL_FEATURES, 1, 0])]),
        SET_MEM_TABLE => {
            let region = [page(program), 0x1_0000, USER + page(program), page(program)];
            [words(&[program.pick(&[1, 2, 0, 9]), 0]), longs(&region), longs(&region)].concat()
        }
        ADD_MEM_REG | REM_MEM_REG => {
            let size = program.pick(&[0x1_0000, 0x1000, 0, u64::MAX]);
            longs(&[0, page(program), size, USER + page(program), page(program)])
        }
        SET_VRING_NUM => words(&[queue, program.pick(&[16, 1, 256, 0, 3, 0x8000, 0x1_0000])]),
        SET_VRING_BASE => words(&[queue, program.pick(&[0, 1, 0xffff, 0x1_0000])]),
        SET_VRING_ENABLE => words(&[queue, program.pick(&[1, 0, 2])]),
        SET_VRING_ADDR => {
            let (desc, used, avail) = (page(program), 0x1000 + page(program), page(program));
            [words(&[queue, 0]), longs(&[USER + desc, USER + used, USER + 0x2000 + avail, 0])]
                .concat()
        }
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
            longs(&[u64::from(queue) | program.pick(&[0, 0x100, 0x200])])
        }
        GET_CONFIG => {
            let (offset, size) = (program.pick(&[0, 200, 256]), program.pick(&[256, 8, 56, 0]));
            [words(&[offset, size, 0]), vec![0; size as usize]].concat()
        }
        SET_STATUS => longs(&[program.pick(&[0, 1, 15])]),
        GET_VRING_BASE => words(&[queue, 0]),
        GET_FEATURES | GET_PROTOCOL_FEATURES | GET_QUEUE_NUM | GET_MAX_MEM_SLOTS | GET_STATUS => {
            Vec::new()
        }
        _ => program.bytes(16).to_vec(),
    }
}

// Signals keep descriptors open until the thread ends. These are opened before descriptors are counted.
fuzz_target!(init: descriptor::prepare().unwrap(), |bytes: &[u8]| fuzz::connect::<World>(bytes));
