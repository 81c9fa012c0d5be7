// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user front end that posts control requests.
#![allow(dead_code)] // each test uses a part of it

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// The bound on each wait. A test takes seconds.
pub const LIMIT: Duration = Duration::from_secs(300);

/// The address where the front end says that it has the memory, and the offsets of the control queue.
const USER: u64 = 0x10_0000;
const MEMORY: u64 = 0x1_0000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x4000;
/// How many control requests the ring has, of two descriptors each.
pub const REQUESTS: u16 = 128;
const CREATE_PD: u8 = 4;
/// The guest address of the first region besides the memory at 0, and the distance of such regions.
const ALIASES: u64 = 1 << 32;
const ALIAS: u64 = 2 * MEMORY;

/// A front end that posts control requests.
pub struct FrontEnd {
    socket: UnixStream,
    memory: OwnedFd,
    kick: OwnedFd,
    call: OwnedFd,
}

impl FrontEnd {
    /// Hands over memory and the control queue, in which `posted` requests are available.
    pub fn start(socket: UnixStream, posted: u16) -> Self {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, MEMORY).unwrap();
        let this = Self { socket, memory, kick: new_eventfd(), call: new_eventfd() };
        for request in 0..REQUESTS {
            this.write_request(request, 0);
        }
        this.post(posted);
        let state = |value: u32| [0, value].map(u32::to_ne_bytes).concat();
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>();
        this.send(5, &words(&[1, 0, MEMORY, USER, 0]), &[this.memory.as_fd()]);
        this.send(8, &state(256), &[]);
        this.send(10, &state(0), &[]);
        this.send(9, &words(&[0, USER + DESC, USER + USED, USER + AVAIL, 0]), &[]);
        this.send(13, &words(&[0]), &[this.call.as_fd()]);
        this.send(12, &words(&[0]), &[this.kick.as_fd()]);
        this
    }

    /// Resets the device, and hands over memory and the control queue as [`Self::start`] does.
    pub fn start_again(self, posted: u16) -> Self {
        self.send(34, &[], &[]);
        Self::start(self.socket, posted)
    }

    /// Begins again as [`Self::start`] does, with the control queue only disabled, which is what user-mode Linux does
    /// when its driver resets the device.
    pub fn start_on_new_rings(self, posted: u16) -> Self {
        self.send(18, &[0; 8], &[]);
        Self::start(self.socket, posted)
    }

    /// Ends the VMM. A process that another test is about to start has its socket open as well for a moment.
    pub fn end(self) {
        self.socket.shutdown(Shutdown::Both).unwrap();
    }

    /// Makes requests available, up to this number in all.
    pub fn post(&self, posted: u16) {
        self.write(AVAIL + 2, &posted.to_le_bytes());
    }

    /// Notifies the device of available requests.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Gives the memory out `count` times more, each time as one more region (ADD_MEM_REG). The requests are in the
    /// last ones of these, so that the device answers only where it has them.
    pub fn add_regions(&self, count: u64) {
        for alias in (0..count).map(|index| ALIASES + index * ALIAS) {
            let words = [0, alias, MEMORY, USER + alias, 0];
            let payload: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
            self.send(37, &payload, &[self.memory.as_fd()]);
        }
        for request in 0..REQUESTS {
            let index = count - 1 - u64::from(request) % count;
            self.write_request(request, ALIASES + index * ALIAS);
        }
    }

    /// Asks for the status of the device (GET_STATUS). The answer is read by [`FrontEnd::status`].
    pub fn ask_status(&self) {
        self.send(40, &[], &[]);
    }

    /// Returns the device status that was asked for.
    pub fn status(&self) -> u64 {
        let mut answer = [0; 20];
        assert_eq!(rustix::io::read(&self.socket, &mut answer), Ok(20));
        u64::from_ne_bytes(answer[12..].try_into().unwrap())
    }

    /// Takes the memory away.
    pub fn truncate(&self) {
        rustix::fs::ftruncate(&self.memory, 0).unwrap();
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
        let reply = |number: u16| {
            let mut reply = [0; 5];
            let at = BUFFERS + u64::from(number) * 16 + 8;
            rustix::io::pread(&self.memory, &mut reply, at).unwrap();
            reply
        };
        (0..REQUESTS).map(reply).collect()
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        rustix::io::pwrite(&self.memory, bytes, at).unwrap();
    }

    /// Writes CREATE_PD, and room for its reply. The device finds both in the region at this guest address.
    fn write_request(&self, number: u16, region: u64) {
        let buffer = BUFFERS + u64::from(number) * 16;
        let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
            let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
            [&addr[..], &len, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
        };
        let head = 2 * number;
        let at = region + buffer;
        let chain = [descriptor(at, 1, 1, head + 1), descriptor(at + 8, 5, 2, 0)].concat();
        self.write(DESC + u64::from(head) * 16, &chain);
        self.write(buffer, &[CREATE_PD]);
        self.write(AVAIL + 4 + u64::from(number) * 2, &head.to_le_bytes());
    }

    /// Returns how many requests were answered.
    pub fn answered(&self) -> u16 {
        let mut index = [0; 2];
        rustix::io::pread(&self.memory, &mut index, USED + 2).unwrap();
        u16::from_le_bytes(index)
    }

    fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let size = u32::try_from(payload.len()).unwrap();
        let header = [request, 1, size].map(u32::to_ne_bytes).concat();
        let message = [header.as_slice(), payload].concat();
        send(&self.socket, &message, fds);
    }
}

/// Sends bytes with descriptors, if there are any.
pub fn send(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    assert_eq!(try_send(socket, bytes, descriptors), Ok(bytes.len()));
}

/// Sends bytes with descriptors, if there are any, or returns why the socket does not take them.
pub fn try_send(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// Makes an eventfd that does not block.
pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}
