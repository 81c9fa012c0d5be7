// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client's side of vfio-user (QEMU docs/interop/vfio-user.rst), whose device is a virtio PCI device.

use std::io::Read;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use crate::socket::{self, longs, words};

/// The bytes of the header of a message.
pub const HEADER: usize = 16;
/// The bits of a header's flags that say of which type the message is.
pub const TYPE: u32 = 0xf;
/// The client wants no reply.
pub const NO_REPLY: u32 = 1 << 4;
/// The type of a reply, and the flag of one that says why a command failed.
const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;
/// The ID of all messages of a client that awaits each reply.
const ID: u16 = 7;

/// The numbers of commands.
#[allow(missing_docs)]
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
}
/// The region of BAR 0.
pub const BAR0: u32 = 0;
/// The region of PCI configuration space.
pub const CONFIG: u32 = 7;
/// The offset in BAR 0 of the register by which queue 0 is kicked. Those of the next queues follow, 4 bytes apart.
pub const NOTIFY: u64 = 0x3000;
/// DATA_EVENTFD and ACTION_TRIGGER of SET_IRQS: interrupts come by eventfds from now on.
pub const EVENTFD: u32 = 0x24;
/// The index of the MSI-X interrupts.
pub const MSIX: u32 = 2;

/// Returns the bytes of a command.
pub fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let head = [id, command].map(u16::to_ne_bytes).concat();
    let size = (HEADER + payload.len()) as u32;
    [&head, &words(&[size, flags, 0])[..], payload].concat()
}

/// Sends a command. A device that has closed the connection does not take it.
pub fn send(socket: &UnixStream, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let message = message(ID, command, flags, payload);
    match socket::send(socket, &message, fds) {
        Ok(sent) => assert_eq!(sent, message.len()),
        Err(error) => assert!(matches!(error, Errno::PIPE | Errno::CONNRESET), "{error}"),
    }
}

/// Takes the payload of the reply to a command, or the errno that it failed with; `None` if the connection is closed.
pub fn reply(mut socket: &UnixStream, command: u16) -> Option<Result<Vec<u8>, u32>> {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header).ok()?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("a word"));
    assert_eq!(header[..4], [ID, command].map(u16::to_ne_bytes).concat());
    assert_eq!(word(8) & TYPE, REPLY, "a reply");
    let mut payload = vec![0; word(4) as usize - HEADER];
    socket.read_exact(&mut payload).unwrap();
    Some(if word(8) & ERROR == 0 { Ok(payload) } else { Err(word(12)) })
}

/// Returns the payload of an access to a region.
pub fn access(region: u32, offset: u64, count: u32, data: &[u8]) -> Vec<u8> {
    [&longs(&[offset]), &words(&[region, count])[..], data].concat()
}

/// Returns the payload of DMA_MAP, for memory that begins at `offset` of its file.
pub fn dma_map(address: u64, size: u64, offset: u64) -> Vec<u8> {
    [words(&[32, 3]), longs(&[offset, address, size])].concat()
}

/// Returns the payload of DMA_UNMAP.
pub fn dma_unmap(address: u64, size: u64) -> Vec<u8> {
    [words(&[24, 0]), longs(&[address, size])].concat()
}

/// Returns the payload of SET_IRQS: flags, index, first vector and number of vectors.
pub fn set_irqs(what: [u32; 4]) -> Vec<u8> {
    [words(&[20]), words(&what)].concat()
}
