// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM of a guest: a vhost-user front end, or a vfio-user client. It does what its guest's driver does as well.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use super::super::front_end::try_send;
use super::{Queue, MEMORY, USER};

/// How a VMM reaches the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    VhostUser,
    VfioUser,
}

/// How a vhost-user front end pauses a device.
#[derive(Clone, Copy, Debug)]
pub enum Pause {
    /// It disables each queue, and enables it again. Cloud Hypervisor does that.
    Disable,
    /// It stops each queue, and sets it up again where it was. QEMU does that.
    Stop,
}

/// Commands of vfio-user.
mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_WRITE: u16 = 10;
}
/// The flag of a message that gets no reply.
const NO_REPLY: u32 = 0x10;
/// DATA_EVENTFD and ACTION_TRIGGER of SET_IRQS, and the index of MSI-X.
const EVENTFD: u32 = 0x24;
const MSIX: u32 = 2;
/// Regions of a PCI device.
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
/// Where the notify structure is in BAR 0.
const NOTIFY: u64 = 0x3000;

/// A connection of a VMM.
pub struct Vmm {
    pub socket: UnixStream,
    pub transport: Transport,
}

impl Vmm {
    /// Gives the guest's memory out, which begins at guest address 0.
    pub fn give_memory(&self, memory: &OwnedFd) {
        match self.transport {
            Transport::VhostUser => {
                self.request(2, &[0], &[]);
                self.request(5, &[1, 0, MEMORY, USER, 0], &[memory.as_fd()]);
            }
            Transport::VfioUser => {
                self.ask(command::VERSION, &[0; 4], &[]);
                let map = [32 | 3 << 32, 0, 0, MEMORY];
                self.ask(command::DMA_MAP, &bytes(&map), &[memory.as_fd()]);
            }
        }
    }

    /// Makes the device run these queues, as a driver does that starts it.
    pub fn start(&self, queues: &BTreeMap<u16, Queue>, size: u16) {
        self.give_queues(queues, size);
        if self.transport == Transport::VhostUser {
            return;
        }
        // ACKNOWLEDGE and DRIVER, the features VERSION_1, and FEATURES_OK.
        for (at, width, value) in [(20, 1, 3), (8, 4, 1), (12, 4, 1), (20, 1, 0xb), (16, 2, 0)] {
            self.write_register(at, width, value);
        }
        for (index, queue) in queues {
            self.select_queue(*index);
            self.write_register(24, 2, size.into());
            self.write_register(26, 2, vector(*index).into());
            for (at, address) in [(32, queue.at), (40, queue.at + 0x1000), (48, queue.at + 0x2000)]
            {
                self.write_register(at, 4, address);
                self.write_register(at + 4, 4, 0);
            }
            self.write_register(28, 2, 1);
        }
        // The guest enables memory accesses and bus mastering.
        self.write(CONFIG, 4, &[6, 0]);
        self.write_register(20, 1, 0xf);
    }

    /// Tells the device what a VMM itself has of these queues.
    pub fn give_queues(&self, queues: &BTreeMap<u16, Queue>, size: u16) {
        for (index, queue) in queues {
            match self.transport {
                Transport::VhostUser => self.give_vring(*index, queue, size),
                Transport::VfioUser => self.give_vector(*index, queue),
            }
        }
    }

    /// Pauses the device of a vhost-user front end. Returns where each queue is to go on.
    pub fn pause(&self, queues: &BTreeMap<u16, Queue>, pause: Pause) -> Vec<u16> {
        let stop = |index: &u16| {
            let number = u64::from(*index);
            match pause {
                Pause::Disable => self.request(18, &[number], &[]),
                Pause::Stop => {
                    self.request(11, &[number], &[]);
                    let [.., low, high, _, _] = self.reply();
                    return u16::from_ne_bytes([low, high]);
                }
            }
            0
        };
        let bases = queues.keys().map(stop).collect();
        // The reply to GET_FEATURES says that the device has done what was sent before.
        self.request(1, &[], &[]);
        self.reply();
        bases
    }

    /// Lets a device go on that was paused. Each queue is to go on there.
    pub fn resume(&self, queues: &BTreeMap<u16, Queue>, size: u16, pause: Pause, bases: &[u16]) {
        for ((index, queue), base) in queues.iter().zip(bases) {
            let number = u64::from(*index);
            match pause {
                Pause::Disable => self.request(18, &[number | 1 << 32], &[]),
                Pause::Stop => {
                    self.request(10, &[number | u64::from(*base) << 32], &[]);
                    self.give_vring(*index, queue, size);
                }
            }
        }
    }

    /// Returns a reply of vhost-user that has a payload of 8 bytes.
    fn reply(&self) -> [u8; 20] {
        let mut reply = [0; 20];
        (&self.socket).read_exact(&mut reply).unwrap();
        reply
    }

    /// Hands a queue over. The device knows where it goes on, so the VMM says nothing of that.
    fn give_vring(&self, index: u16, queue: &Queue, size: u16) {
        let (at, number) = (USER + queue.at, u64::from(index));
        self.request(8, &[number | u64::from(size) << 32], &[]);
        self.request(9, &[number, at, at + 0x2000, at + 0x1000, 0], &[]);
        self.request(13, &[number], &[queue.call.as_fd()]);
        self.request(12, &[number], &[queue.kick.as_fd()]);
    }

    /// Gives the device the eventfd of the MSI-X vector of a queue.
    fn give_vector(&self, index: u16, queue: &Queue) {
        let words = [20, EVENTFD, MSIX, vector(index).into(), 1];
        let payload: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
        self.ask(command::SET_IRQS, &payload, &[queue.call.as_fd()]);
    }

    /// Tells the device that buffers are available in a queue.
    pub fn kick(&self, index: u16, queue: &Queue) {
        match self.transport {
            Transport::VhostUser => {
                rustix::io::write(&queue.kick, &1_u64.to_ne_bytes()).unwrap();
            }
            Transport::VfioUser => {
                self.post(BAR0, NOTIFY + 4 * u64::from(index), &index.to_le_bytes());
            }
        }
    }

    /// Selects the queue whose registers the driver sees.
    pub fn select_queue(&self, index: u16) {
        self.write_register(22, 2, index.into());
    }

    fn write_register(&self, at: u64, width: usize, value: u64) {
        self.write(BAR0, at, &value.to_le_bytes()[..width]);
    }

    /// Writes to a region.
    pub fn write(&self, region: u32, at: u64, data: &[u8]) {
        let payload = [access(region, at, data.len()), data.to_vec()].concat();
        self.ask(command::REGION_WRITE, &payload, &[]);
    }

    /// Writes to a region, and waits for no reply.
    pub fn post(&self, region: u32, at: u64, data: &[u8]) {
        let payload = [access(region, at, data.len()), data.to_vec()].concat();
        self.message(command::REGION_WRITE, NO_REPLY, &payload, &[]);
    }

    /// Sends a message of vhost-user. A device that has closed the connection does not take it.
    fn request(&self, request: u32, words: &[u64], fds: &[BorrowedFd<'_>]) {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let size = u32::try_from(payload.len()).unwrap();
        let header = [request, 1, size].map(u32::to_ne_bytes).concat();
        self.send(&[header, payload].concat(), fds);
    }

    /// Sends a message of vfio-user, and returns the payload of the reply; nothing if the device has closed the
    /// connection.
    fn ask(&self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Vec<u8> {
        self.message(command, 0, payload, fds);
        let mut header = [0; 16];
        if (&self.socket).read_exact(&mut header).is_err() {
            return vec![0; 16];
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(8), word(12)), (1, 0), "command {command}");
        let mut reply = vec![0; word(4) as usize - header.len()];
        (&self.socket).read_exact(&mut reply).unwrap();
        reply
    }

    fn message(&self, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let size = u32::try_from(16 + payload.len()).unwrap();
        let mut message = [1, command].map(u16::to_le_bytes).concat();
        message.extend([size, flags, 0].map(u32::to_le_bytes).concat());
        message.extend(payload);
        self.send(&message, fds);
    }

    fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) {
        match try_send(&self.socket, message, fds) {
            Ok(sent) => assert_eq!(sent, message.len()),
            Err(error) => assert!(matches!(error, Errno::PIPE | Errno::CONNRESET), "{error}"),
        }
    }
}

/// Returns the MSI-X vector of a queue. The first one is that of configuration changes.
fn vector(queue: u16) -> u16 {
    queue + 1
}

fn access(region: u32, at: u64, length: usize) -> Vec<u8> {
    let words = [region, u32::try_from(length).unwrap()];
    [&at.to_le_bytes()[..], &words.map(u32::to_le_bytes).concat()].concat()
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
