// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM of a guest whose device is in another process. It does what its guest's driver does as well.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use memory::{GuestMemory, GuestRegion};
use ring::Layout;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::driver::Transport;
use crate::socket::{longs, new_eventfd, new_memory, LIMIT};
use crate::vfio_user::{self, command, BAR0, CONFIG, EVENTFD, MSIX, NOTIFY, NO_REPLY};
use crate::vhost_user::{self, request};
use crate::virtqueue::Virtqueue;

/// The address at which the VMM has the memory, as it says.
const USER: u64 = 0x10_0000;
/// The driver's part of VIRTIO_F_VERSION_1, in the upper half of the features.
const VERSION_1: u32 = 1;

/// The registers of a virtio PCI device (VIRTIO 1.3, section 4.1.4.3).
mod register {
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const CONFIG_VECTOR: u64 = 16;
    pub const STATUS: u64 = 20;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_DESC: u64 = 32;
    pub const QUEUE_DRIVER: u64 = 40;
    pub const QUEUE_DEVICE: u64 = 48;
}

/// The protocol by which a VMM reaches the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protocol {
    /// The VMM is a front end of vhost-user.
    VhostUser,
    /// The VMM is a client of vfio-user.
    VfioUser,
}

/// The way in which a vhost-user front end pauses a device.
#[derive(Clone, Copy, Debug)]
pub enum Pause {
    /// It disables each queue, and enables it again. Cloud Hypervisor does that.
    Disable,
    /// It stops each queue, and sets it up again where it was. QEMU does that.
    Stop,
}

/// A queue of the device, with its eventfds, as the VMM has it.
struct VmmQueue {
    layout: Layout,
    kick: OwnedFd,
    call: OwnedFd,
}

/// A VMM and its connection.
pub struct Vmm {
    /// The connection.
    pub socket: UnixStream,
    protocol: Protocol,
    /// The file of the guest's memory, which begins at guest address 0, and its bytes.
    file: OwnedFd,
    bytes: u64,
    queues: BTreeMap<u16, VmmQueue>,
}

impl Transport for Vmm {
    fn start(&mut self, features: u64, _: &GuestMemory, virtqueues: &BTreeMap<u16, Virtqueue>) {
        let queue = |(index, virtqueue): (&u16, &Virtqueue)| {
            let (layout, kick, call) = (virtqueue.layout, new_eventfd(), new_eventfd());
            (*index, VmmQueue { layout, kick, call })
        };
        self.queues = virtqueues.iter().map(queue).collect();
        match self.protocol {
            Protocol::VhostUser => self.start_by_vhost_user(features),
            Protocol::VfioUser => self.start_by_vfio_user(features),
        }
    }

    fn kick(&self, virtqueue: u16) {
        match self.protocol {
            Protocol::VhostUser => {
                let kick = &self.queues[&virtqueue].kick;
                rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
            }
            Protocol::VfioUser => {
                let at = NOTIFY + 4 * u64::from(virtqueue);
                let kick = vfio_user::access(BAR0, at, 2, &virtqueue.to_le_bytes());
                let write = command::REGION_WRITE;
                vfio_user::send(&self.socket, write, NO_REPLY, &kick, &[]);
            }
        }
    }

    /// Waits for the interrupt.
    fn wait(&self, virtqueue: u16, is_used: &dyn Fn() -> bool) {
        let limit = Timespec::try_from(LIMIT).unwrap();
        let call = &self.queues[&virtqueue].call;
        while !is_used() {
            let ready = poll(&mut [PollFd::new(call, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "nothing comes back in virtqueue {virtqueue}");
            let _ = rustix::io::read(call, &mut [0; 8]);
        }
    }
}

impl Vmm {
    /// Makes a VMM with so much memory, whose device is behind this socket. Returns the memory as well.
    pub fn new(socket: UnixStream, protocol: Protocol, bytes: u64) -> (Self, GuestMemory) {
        let file = new_memory(bytes);
        let region =
            GuestRegion { guest_addr: 0, len: bytes, fd: file.as_fd(), offset: 0, writable: true };
        let memory = GuestMemory::default().with_region(&region).unwrap();
        (Self { socket, protocol, file, bytes, queues: BTreeMap::new() }, memory)
    }

    fn start_by_vhost_user(&self, features: u64) {
        let table = vhost_user::table(&vhost_user::region(0, self.bytes, USER, 0));
        let memory = [self.file.as_fd()];
        vhost_user::send(&self.socket, request::SET_FEATURES, &longs(&[features]), &[]);
        vhost_user::send(&self.socket, request::SET_MEM_TABLE, &table, &memory);
        for (index, queue) in &self.queues {
            self.give_vring(*index, queue, None);
        }
    }

    fn give_vring(&self, index: u16, queue: &VmmQueue, base: Option<u16>) {
        let signals = [queue.kick.as_fd(), queue.call.as_fd()];
        vhost_user::set_up_queue(&self.socket, index, (&queue.layout, base), USER, signals);
    }

    fn start_by_vfio_user(&self, features: u64) {
        let map = vfio_user::dma_map(0, self.bytes, 0);
        self.ask(command::VERSION, &[0; 4], &[]);
        self.ask(command::DMA_MAP, &map, &[self.file.as_fd()]);
        for (index, queue) in &self.queues {
            let irqs = vfio_user::set_irqs([EVENTFD, MSIX, vector(*index).into(), 1]);
            self.ask(command::SET_IRQS, &irqs, &[queue.call.as_fd()]);
        }
        // ACKNOWLEDGE and DRIVER, the features, and FEATURES_OK.
        self.write_register(register::STATUS, &[3]);
        let (low, high) = (features as u32, (features >> 32) as u32 | VERSION_1);
        for (half, word) in [(0_u32, low), (1, high)] {
            self.write_register(register::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
            self.write_register(register::DRIVER_FEATURE, &word.to_le_bytes());
        }
        self.write_register(register::STATUS, &[0xb]);
        self.write_register(register::CONFIG_VECTOR, &[0, 0]);
        for (index, queue) in &self.queues {
            self.write_register(register::QUEUE_SELECT, &index.to_le_bytes());
            self.write_register(register::QUEUE_SIZE, &queue.layout.size.to_le_bytes());
            self.write_register(register::QUEUE_VECTOR, &vector(*index).to_le_bytes());
            for (at, address) in [
                (register::QUEUE_DESC, queue.layout.desc),
                (register::QUEUE_DRIVER, queue.layout.avail),
                (register::QUEUE_DEVICE, queue.layout.used),
            ] {
                let halves = address.to_le_bytes();
                self.write_register(at, &halves[..4]);
                self.write_register(at + 4, &halves[4..]);
            }
            self.write_register(register::QUEUE_ENABLE, &[1, 0]);
        }
        // The guest enables memory accesses and bus mastering.
        self.write(CONFIG, 4, &[6, 0]);
        self.write_register(register::STATUS, &[0xf]);
    }

    /// Pauses the device of a vhost-user front end. Returns where each queue is to go on.
    pub fn pause(&self, pause: Pause) -> Vec<u16> {
        let stop = |index: &u16| {
            let number = u32::from(*index);
            match pause {
                Pause::Disable => {
                    let disable = vhost_user::state(number, 0);
                    vhost_user::send(&self.socket, request::SET_VRING_ENABLE, &disable, &[]);
                    0
                }
                Pause::Stop => {
                    let get = request::GET_VRING_BASE;
                    let answer = self.ask_vhost_user(get, &vhost_user::state(number, 0));
                    u16::from_ne_bytes([answer[4], answer[5]])
                }
            }
        };
        let bases = self.queues.keys().map(stop).collect();
        // The answer says that the device has done what was sent before.
        self.ask_vhost_user(request::GET_FEATURES, &[]);
        bases
    }

    /// Lets a device go on that was paused. Each queue is to go on there.
    pub fn resume(&self, pause: Pause, bases: &[u16]) {
        for ((index, queue), base) in self.queues.iter().zip(bases) {
            match pause {
                Pause::Disable => {
                    let enable = vhost_user::state((*index).into(), 1);
                    vhost_user::send(&self.socket, request::SET_VRING_ENABLE, &enable, &[]);
                }
                Pause::Stop => self.give_vring(*index, queue, Some(*base)),
            }
        }
    }

    fn ask_vhost_user(&self, number: u32, payload: &[u8]) -> Vec<u8> {
        vhost_user::send(&self.socket, number, payload, &[]);
        vhost_user::answer(&self.socket, number).expect("an answer")
    }

    fn write_register(&self, at: u64, data: &[u8]) {
        self.write(BAR0, at, data);
    }

    /// Writes to a region.
    fn write(&self, region: u32, at: u64, data: &[u8]) {
        let access = vfio_user::access(region, at, data.len() as u32, data);
        self.ask(command::REGION_WRITE, &access, &[]);
    }

    /// Sends a message of vfio-user, which must succeed unless the device has closed the connection.
    fn ask(&self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        vfio_user::send(&self.socket, command, 0, payload, fds);
        if let Some(reply) = vfio_user::reply(&self.socket, command) {
            assert!(reply.is_ok(), "command {command}: {reply:?}");
        }
    }
}

/// Returns the MSI-X vector of a queue. The first one is that of configuration changes.
fn vector(queue: u16) -> u16 {
    queue + 1
}
