// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages over the socket.

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

use crate::wire::{flags, Header, MAX_FDS, MAX_PAYLOAD};

const HEADER: usize = size_of::<Header>();

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The front end closed its end.
    #[error("the front end closed the connection")]
    Closed,
    /// A payload larger than any message has: the stream is out of step.
    #[error("a message with a payload of {0} bytes")]
    Payload(u32),
    /// A message of another version, or a reply to a request that was never made.
    #[error("a message with flags {0:#x}")]
    Flags(u32),
    /// The front end sends requests and leaves their answers unread.
    #[error("the front end does not read its answers")]
    Stuck,
    /// The socket failed.
    #[error("socket: {0}")]
    Os(#[from] Errno),
}

/// A message of the front end.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// There were more, which did not arrive.
    pub(crate) fds_lost: bool,
    /// There were more, of files that somebody can let others wait for.
    pub(crate) fds_foreign: bool,
}

/// The socket and the message that is being read from it.
///
/// A message is read to its end and no further, so that file descriptors, which arrive with the
/// first bytes of theirs, are never taken for another's.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: UnixStream,
    buffer: Vec<u8>,
    fds: Vec<OwnedFd>,
    fds_lost: bool,
    fds_foreign: bool,
    /// Whether descriptors of every file are taken.
    any_file: bool,
}

impl Channel {
    pub(crate) fn new(socket: UnixStream, any_file: bool) -> Self {
        let buffer = Vec::with_capacity(HEADER + MAX_PAYLOAD);
        let (fds, fds_lost, fds_foreign) = (Vec::new(), false, false);
        Self { socket, buffer, fds, fds_lost, fds_foreign, any_file }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next message, or `None` if none is complete yet. Never waits.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, ChannelError> {
        if !self.fill(HEADER)? {
            return Ok(None);
        }
        let header = self.header()?;
        if !self.fill(HEADER + header.size as usize)? {
            return Ok(None);
        }
        let payload = self.buffer[HEADER..].to_vec();
        self.buffer.clear();
        let fds = std::mem::take(&mut self.fds);
        let fds_lost = std::mem::take(&mut self.fds_lost);
        let fds_foreign = std::mem::take(&mut self.fds_foreign);
        Ok(Some(Message { header, payload, fds, fds_lost, fds_foreign }))
    }

    /// Answers a request.
    pub(crate) fn reply(&self, to: &Header, payload: &[u8]) -> Result<(), ChannelError> {
        let size = u32::try_from(payload.len()).map_err(|_| ChannelError::Payload(u32::MAX))?;
        let header = Header { request: to.request, flags: flags::VERSION | flags::REPLY, size };
        let message = [header.as_bytes(), payload].concat();
        let mut none = SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&message)], &mut none, flags) {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(ChannelError::Stuck),
                Err(Errno::PIPE) => return Err(ChannelError::Closed),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The header of the message in the buffer.
    fn header(&self) -> Result<Header, ChannelError> {
        let bytes = self.buffer.as_slice();
        let (header, _) = Header::read_from_prefix(bytes).map_err(|_| ChannelError::Payload(0))?;
        let version = header.flags & (flags::VERSION_MASK | flags::REPLY);
        if version != flags::VERSION {
            return Err(ChannelError::Flags(header.flags));
        }
        if header.size as usize > MAX_PAYLOAD {
            return Err(ChannelError::Payload(header.size));
        }
        Ok(header)
    }

    /// Reads until the buffer has `size` bytes; `false` if the socket has too few.
    fn fill(&mut self, size: usize) -> Result<bool, ChannelError> {
        while self.buffer.len() < size {
            let have = self.buffer.len();
            self.buffer.resize(size, 0);
            let read = self.read_at(have);
            self.buffer.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Reads into the buffer behind `have`, and file descriptors with it.
    fn read_at(&mut self, have: usize) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let room = if descriptor::may_receive() { space.len() } else { 0 };
        let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
        let mut part = [IoSliceMut::new(&mut self.buffer[have..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut part, &mut control, flags)?;
        self.fds_lost |= received.flags.contains(ReturnFlags::CTRUNC);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                let fds = fds.collect();
                let (fds, foreign) =
                    if self.any_file { (fds, false) } else { descriptor::keep_harmless(fds) };
                self.fds.extend(fds);
                self.fds_foreign |= foreign;
            }
        }
        self.fds_lost |= self.fds.len() > MAX_FDS;
        self.fds.truncate(MAX_FDS);
        Ok(received.bytes)
    }
}
