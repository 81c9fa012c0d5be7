// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A front end's side of vhost-user (QEMU docs/interop/vhost-user.rst).

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use ring::Layout;
use rustix::io::Errno;

use crate::socket::{self, longs, words};

// The numbers are written down here once more, apart from the crate `vhost_user`, so that a wrong number there fails a
// test.

/// The bytes of the header of a message.
pub const HEADER: usize = 12;
/// The version of the protocol, in the flags of a header.
pub const VERSION: u32 = 1;
/// The message is a reply.
pub const REPLY: u32 = 1 << 2;
/// The front end wants an answer to a request that has none of its own.
pub const NEED_REPLY: u32 = 1 << 3;

/// The numbers of requests.
#[allow(missing_docs)]
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// Returns the bytes of a request.
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    [&words(&[request, VERSION | flags, payload.len() as u32]), payload].concat()
}

/// Sends a request. A device that has closed the connection does not take it.
pub fn send(socket: &UnixStream, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let message = message(request, 0, payload);
    match socket::send(socket, &message, fds) {
        Ok(sent) => assert_eq!(sent, message.len()),
        Err(error) => assert!(matches!(error, Errno::PIPE | Errno::CONNRESET), "{error}"),
    }
}

/// Takes the payload of the answer to a request; `None` if no answer is there.
pub fn answer(mut socket: &UnixStream, request: u32) -> Option<Vec<u8>> {
    let mut header = [0; HEADER];
    if socket.read(&mut header).unwrap_or(0) == 0 {
        return None;
    }
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("a word"));
    assert_eq!((word(0), word(4)), (request, VERSION | REPLY));
    let mut payload = vec![0; word(8) as usize];
    socket.read_exact(&mut payload).unwrap();
    Some(payload)
}

/// Returns the payload of a request that says one thing of a queue.
pub fn state(queue: u32, value: u32) -> Vec<u8> {
    words(&[queue, value])
}

/// Returns a region of memory: its address, its length, the address where the front end has it, and where it begins in
/// its file.
pub fn region(guest: u64, size: u64, user: u64, offset: u64) -> Vec<u8> {
    longs(&[guest, size, user, offset])
}

/// Returns the payload of SET_MEM_TABLE with one region.
pub fn table(region: &[u8]) -> Vec<u8> {
    [&words(&[1, 0]), region].concat()
}

/// Returns the payload of ADD_MEM_REG and REM_MEM_REG.
pub fn single(region: &[u8]) -> Vec<u8> {
    [&[0; 8], region].concat()
}

/// Sets a queue up, whose addresses the front end has `user` bytes further up. The queue goes on at `base`, or where
/// the device knows.
pub fn set_up_queue(
    socket: &UnixStream,
    queue: u16,
    (layout, base): (&Layout, Option<u16>),
    user: u64,
    [kick, call]: [BorrowedFd<'_>; 2],
) {
    let index = u64::from(queue);
    let [desc, used, avail] =
        [layout.desc, layout.used, layout.avail].map(|address| user + address);
    let size = state(queue.into(), layout.size.into());
    send(socket, request::SET_VRING_NUM, &size, &[]);
    if let Some(base) = base {
        send(socket, request::SET_VRING_BASE, &state(queue.into(), base.into()), &[]);
    }
    send(socket, request::SET_VRING_ADDR, &longs(&[index, desc, used, avail, 0]), &[]);
    send(socket, request::SET_VRING_CALL, &longs(&[index]), &[call.as_fd()]);
    send(socket, request::SET_VRING_KICK, &longs(&[index]), &[kick.as_fd()]);
}
