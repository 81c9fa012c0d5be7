// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user front end that posts control requests.
#![allow(dead_code)] // each test uses a part of it

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use abi::VIRTIO_RDMA_CMD_CREATE_PD;
use ring::Layout;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use testkit::command::encode;
pub use testkit::socket::LIMIT;
use testkit::socket::{new_eventfd, new_memory};
use testkit::vhost_user::{answer, region, request, send, set_up_queue, single, state, table};
use testkit::{Descriptor, Memory, Virtqueue};

/// The address where the front end says that it has the memory, and the control queue in it.
const USER: u64 = 0x10_0000;
const MEMORY: u64 = 0x1_0000;
const LAYOUT: Layout =
    Layout { size: 2 * REQUESTS, desc: 0, avail: 0x2000, used: 0x3000, event_idx: false };
const BUFFERS: u64 = 0x4000;
/// How many control requests the ring has, of two descriptors each.
pub const REQUESTS: u16 = 128;
/// The guest address of the memory of the event queue, the queue, and its only buffer.
const EVENTS: u64 = 1 << 40;
const EVENT_LAYOUT: Layout = Layout {
    size: 2,
    desc: EVENTS,
    avail: EVENTS + 0x1000,
    used: EVENTS + 0x2000,
    event_idx: false,
};
const EVENT_BUFFER: u64 = EVENTS + 0x3000;
/// The guest address of the first region besides the memory at 0, and the distance of such regions.
const ALIASES: u64 = 1 << 32;
const ALIAS: u64 = 2 * MEMORY;

/// A front end that posts control requests.
pub struct FrontEnd {
    socket: UnixStream,
    memory: File,
    queue: Virtqueue,
    kick: OwnedFd,
    call: OwnedFd,
}

/// The file of guest memory, which may get lost, so the test does not map it.
struct File(OwnedFd);

impl Memory for File {
    fn read_bytes(&self, addr: u64, bytes: &mut [u8]) {
        assert_eq!(rustix::io::pread(&self.0, &mut *bytes, addr), Ok(bytes.len()));
    }

    fn write_bytes(&self, addr: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, bytes, addr), Ok(bytes.len()));
    }
}

/// The memory of the event queue.
pub struct EventMemory(File);

impl Memory for EventMemory {
    fn read_bytes(&self, addr: u64, bytes: &mut [u8]) {
        self.0.read_bytes(addr - EVENTS, bytes);
    }

    fn write_bytes(&self, addr: u64, bytes: &[u8]) {
        self.0.write_bytes(addr - EVENTS, bytes);
    }
}

impl EventMemory {
    /// Returns the event that has come: its type and its handle.
    pub fn event(&self) -> Option<[u32; 2]> {
        (Virtqueue::new(EVENT_LAYOUT).used_index(self) != 0).then(|| self.get(EVENT_BUFFER))
    }
}

impl FrontEnd {
    /// Hands over memory and the control queue, in which `posted` requests are available.
    pub fn start(socket: UnixStream, posted: u16) -> Self {
        let (memory, queue) = (File(new_memory(MEMORY)), Virtqueue::new(LAYOUT));
        let this = Self { socket, memory, queue, kick: new_eventfd(), call: new_eventfd() };
        for request in 0..REQUESTS {
            this.write_request(request, 0);
        }
        this.post(posted);
        let memory = table(&region(0, MEMORY, USER, 0));
        send(&this.socket, request::SET_MEM_TABLE, &memory, &[this.memory.0.as_fd()]);
        let signals = [this.kick.as_fd(), this.call.as_fd()];
        set_up_queue(&this.socket, 0, (&LAYOUT, Some(0)), USER, signals);
        this
    }

    /// Resets the device, and hands over memory and the control queue as [`Self::start`] does.
    pub fn start_again(self, posted: u16) -> Self {
        send(&self.socket, request::RESET_DEVICE, &[], &[]);
        Self::start(self.socket, posted)
    }

    /// Begins again as [`Self::start`] does, with the control queue only disabled, which is what user-mode Linux does
    /// when its driver resets the device.
    pub fn start_on_new_rings(self, posted: u16) -> Self {
        send(&self.socket, request::SET_VRING_ENABLE, &state(0, 0), &[]);
        Self::start(self.socket, posted)
    }

    /// Ends the VMM. A process that another test is about to start has its socket open as well for a moment.
    pub fn end(self) {
        self.socket.shutdown(Shutdown::Both).unwrap();
    }

    /// Makes requests available, up to this number in all.
    pub fn post(&self, posted: u16) {
        self.memory.put(LAYOUT.avail + 2, &posted);
    }

    /// Notifies the device of available requests.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Gives the memory out `count` times more, each time as one more region (ADD_MEM_REG). The requests are in the
    /// last ones of these, so that the device answers only where it has them.
    pub fn add_regions(&self, count: u64) {
        for alias in (0..count).map(|index| ALIASES + index * ALIAS) {
            let region = single(&region(alias, MEMORY, USER + alias, 0));
            send(&self.socket, request::ADD_MEM_REG, &region, &[self.memory.0.as_fd()]);
        }
        for request in 0..REQUESTS {
            let index = count - 1 - u64::from(request) % count;
            self.write_request(request, ALIASES + index * ALIAS);
        }
    }

    /// Makes the request with this number a malformed one.
    pub fn spoil(&self, number: u16) {
        let head = 2 * number;
        Descriptor::new((1 << 45, 1, false), None).write(&self.memory, LAYOUT.desc, head);
    }

    /// Sets up the event queue, which has this number, in memory of its own. Returns the memory.
    pub fn add_events(&self, queue: u16) -> EventMemory {
        let memory = EventMemory(File(new_memory(MEMORY)));
        Virtqueue::new(EVENT_LAYOUT).add(&memory, 0, &[(EVENT_BUFFER, 8, true)]);
        let region = single(&region(EVENTS, MEMORY, USER + EVENTS, 0));
        send(&self.socket, request::ADD_MEM_REG, &region, &[memory.0 .0.as_fd()]);
        let signals = [self.kick.as_fd(), self.call.as_fd()];
        set_up_queue(&self.socket, queue, (&EVENT_LAYOUT, Some(0)), USER, signals);
        memory
    }

    /// Asks for the status of the device (GET_STATUS). The answer is read by [`FrontEnd::status`].
    pub fn ask_status(&self) {
        send(&self.socket, request::GET_STATUS, &[], &[]);
    }

    /// Returns the device status that was asked for.
    pub fn status(&self) -> u64 {
        let status = answer(&self.socket, request::GET_STATUS).expect("an answer");
        u64::from_ne_bytes(status.try_into().unwrap())
    }

    /// Takes the memory away.
    pub fn truncate(&self) {
        rustix::fs::ftruncate(&self.memory.0, 0).unwrap();
    }

    /// Waits until this many requests are answered.
    pub fn wait(&self, answers: u16) {
        let limit = Timespec::try_from(LIMIT).unwrap();
        while self.answered() < answers {
            let ready = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "{} of {answers} answers", self.answered());
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
    }

    /// Returns the replies of all requests: the status and the number of the PD, which is little-endian.
    pub fn replies(&self) -> Vec<[u8; 5]> {
        (0..REQUESTS).map(|number| self.memory.get(buffer(number) + 8)).collect()
    }

    /// Writes CREATE_PD, and room for its reply. The device finds both in the region at this guest address.
    fn write_request(&self, number: u16, region: u64) {
        let (head, at) = (2 * number, region + buffer(number));
        Descriptor::new((at, 1, false), Some(head + 1)).write(&self.memory, LAYOUT.desc, head);
        Descriptor::new((at + 8, 5, true), None).write(&self.memory, LAYOUT.desc, head + 1);
        self.memory.write_bytes(buffer(number), &encode(VIRTIO_RDMA_CMD_CREATE_PD, &()));
        self.memory.put(LAYOUT.avail + 4 + u64::from(number) * 2, &head);
    }

    /// Returns how many requests were answered.
    pub fn answered(&self) -> u16 {
        self.queue.used_index(&self.memory)
    }
}

/// Returns the place of a request in the file of memory.
fn buffer(number: u16) -> u64 {
    BUFFERS + u64::from(number) * 16
}
