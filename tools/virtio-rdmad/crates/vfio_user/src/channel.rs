// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages over the socket.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendFlags,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{header_flags, Header, MAX_FDS, MAX_MESSAGE};

const HEADER: usize = size_of::<Header>();

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The client closed its end.
    #[error("the client closed the connection")]
    Closed,
    /// A message of less than its header or more than is accepted: the stream is out of step.
    #[error("a message of {0} bytes")]
    MessageSize(usize),
    /// More file descriptors than a message may have.
    #[error("more than {MAX_FDS} file descriptors with a message")]
    Descriptors,
    /// The client sends commands and leaves their replies unread.
    #[error("the client does not read its replies")]
    Stuck,
    /// The socket failed.
    #[error("socket: {0}")]
    Os(#[from] Errno),
}

/// A message of the client.
#[derive(Debug)]
pub struct Message {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// There were more, which did not arrive.
    pub fds_lost: bool,
    /// There were more, of files that somebody can let others wait for.
    pub fds_foreign: bool,
}

/// File descriptors that one read brought.
#[derive(Debug)]
struct Descriptors {
    /// The end of that read, as a position in the buffer.
    end: usize,
    fds: Vec<OwnedFd>,
    /// As in [`Message`].
    lost: bool,
    foreign: bool,
}

/// The socket and what was read ahead from it.
///
/// Several small messages, posted kicks above all, are read at once. The kernel ends such a read
/// behind the message that carries file descriptors, which is how these find their message.
#[derive(Debug)]
pub struct Channel {
    socket: UnixStream,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    fds: VecDeque<Descriptors>,
    /// Whether descriptors of every file are taken.
    any_file: bool,
}

impl Channel {
    pub fn new(socket: UnixStream, any_file: bool) -> Self {
        let buffer = vec![0; 2 * MAX_MESSAGE].into_boxed_slice();
        Self { socket, buffer, start: 0, end: 0, fds: VecDeque::new(), any_file }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next message, or `None` if none is complete yet. Never waits.
    pub fn receive(&mut self) -> Result<Option<Message>, ChannelError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Sends a reply.
    pub fn reply(&mut self, to: &Header, payload: &[u8]) -> Result<(), ChannelError> {
        self.send(to, header_flags::REPLY, 0, payload)
    }

    /// Sends the reply of a command that failed.
    pub fn reply_error(&mut self, to: &Header, errno: u32) -> Result<(), ChannelError> {
        self.send(to, header_flags::REPLY | header_flags::ERROR, errno, &[])
    }

    /// Never waits: a client has one command under way, or a few, and reads each reply.
    fn send(&self, to: &Header, flags: u32, error: u32, body: &[u8]) -> Result<(), ChannelError> {
        let size = HEADER + body.len();
        let header = Header {
            id: to.id,
            command: to.command,
            size: u32::try_from(size).map_err(|_| ChannelError::MessageSize(size))?.into(),
            flags: flags.into(),
            error: error.into(),
        };
        let message = [header.as_bytes(), body].concat();
        let mut none = SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&message)], &mut none, flags) {
                Ok(sent) if sent == size => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(ChannelError::Stuck),
                Err(Errno::PIPE) => return Err(ChannelError::Closed),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes a complete message out of the buffer.
    fn take(&mut self) -> Result<Option<Message>, ChannelError> {
        let bytes = &self.buffer[self.start..self.end];
        let Ok((header, rest)) = Header::read_from_prefix(bytes) else {
            return Ok(None);
        };
        let size = header.size.get() as usize;
        if !(HEADER..=MAX_MESSAGE).contains(&size) {
            return Err(ChannelError::MessageSize(size));
        }
        let Some(payload) = rest.get(..size - HEADER) else {
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.start += size;
        let (mut fds, mut fds_lost, mut fds_foreign) = (Vec::new(), false, false);
        while self.fds.front().is_some_and(|read| read.end <= self.start) {
            let Some(read) = self.fds.pop_front() else { break };
            fds.extend(read.fds);
            fds_lost |= read.lost;
            fds_foreign |= read.foreign;
        }
        Ok(Some(Message { header, payload, fds, fds_lost, fds_foreign }))
    }

    /// Reads what the socket has; `false` if that is nothing.
    fn fill(&mut self) -> Result<bool, ChannelError> {
        self.compact();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let room = if descriptor::may_receive() { space.len() } else { 0 };
        let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
        let mut part = [IoSliceMut::new(&mut self.buffer[self.end..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let (read, lost) = match recvmsg(&self.socket, &mut part, &mut control, flags) {
            Ok(message) => (message.bytes, message.flags.contains(ReturnFlags::CTRUNC)),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        if read == 0 {
            return Err(ChannelError::Closed);
        }
        self.end += read;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let (fds, foreign) =
            if self.any_file { (fds, false) } else { descriptor::keep_harmless(fds) };
        let waiting: usize = self.fds.iter().map(|read| read.fds.len()).sum();
        if waiting + fds.len() > MAX_FDS {
            return Err(ChannelError::Descriptors);
        }
        if lost || foreign || !fds.is_empty() {
            self.fds.push_back(Descriptors { end: self.end, fds, lost, foreign });
        }
        Ok(true)
    }

    /// Makes room behind what is unread, which is less than one message.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        for read in &mut self.fds {
            read.end -= self.start;
        }
        self.end -= self.start;
        self.start = 0;
    }
}
