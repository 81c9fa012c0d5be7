// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages over a socket, with file descriptors.

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

use crate::Error;

/// Most file descriptors that a message of any protocol may have.
pub const MAX_DESCRIPTORS: usize = 16;

/// A message of the VMM.
#[derive(Debug)]
pub struct Message {
    /// The message, header included.
    pub bytes: Vec<u8>,
    /// The file descriptors that came with it.
    pub fds: Vec<OwnedFd>,
    /// Whether there were more descriptors, which did not arrive: the message had more than it may
    /// have, or this process has as many open as it may.
    pub fds_lost: bool,
    /// Whether there were more descriptors, of files that somebody can let others wait for.
    pub fds_foreign: bool,
}

/// File descriptors that one read brought.
#[derive(Debug)]
struct Descriptors {
    /// The end of that read, as a position in the buffer.
    end: usize,
    fds: Vec<OwnedFd>,
    /// Whether descriptors were lost, as in [`Message::fds_lost`].
    lost: bool,
    /// Whether there were descriptors of foreign files, as in [`Message::fds_foreign`].
    foreign: bool,
}

/// The socket, and what was read ahead from it.
///
/// What is read stays in the socket (MSG_PEEK) until it was handled, so that another process finds it there if this one
/// is killed meanwhile. The beginning of a message is the exception: it is taken out of the socket, so that the next
/// read gets the rest.
///
/// One read gets several small messages, above all kicks, which QEMU posts. The kernel ends such a
/// read behind the bytes that were sent with file descriptors (`unix_stream_read_generic()` in
/// net/unix/af_unix.c). So the descriptors of a read belong to the message that has the read's last
/// byte.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: UnixStream,
    buffer: Box<[u8]>,
    /// The start and the end of the unread bytes in the buffer.
    start: usize,
    end: usize,
    /// The bytes in front of this position of the buffer were taken out of the socket.
    taken: usize,
    /// The descriptors of unread messages, in the order of the reads. There are two such messages at
    /// most: one that the buffer had the beginning of before it was filled, and the last one.
    descriptors: VecDeque<Descriptors>,
    /// Most descriptors of a message.
    max_fds: usize,
    /// Whether the last read ended in front of what the socket may have had behind it.
    was_cut: bool,
}

impl Channel {
    /// Reads messages of up to `max_message` bytes and `max_fds` descriptors from a socket.
    pub(crate) fn new(socket: UnixStream, max_message: usize, max_fds: usize) -> Self {
        let buffer = vec![0; 2 * max_message].into_boxed_slice();
        let descriptors = VecDeque::new();
        let (start, end, taken, was_cut) = Default::default();
        Self { socket, buffer, start, end, taken, descriptors, max_fds, was_cut }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the next message, or `None` if none is complete yet. Never waits.
    ///
    /// `length` finds the length of the message that begins with some bytes, which is at least that
    /// of its header; `None` as long as it cannot tell.
    pub(crate) fn receive(
        &mut self,
        length: impl Fn(&[u8]) -> Result<Option<usize>, Error>,
    ) -> Result<Option<Message>, Error> {
        loop {
            if let Some(message) = self.received(&length)? {
                return Ok(Some(message));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Returns the next message of those that were read from the socket, as [`Self::receive`].
    pub(crate) fn received(
        &mut self,
        length: impl Fn(&[u8]) -> Result<Option<usize>, Error>,
    ) -> Result<Option<Message>, Error> {
        let unread = &self.buffer[self.start..self.end];
        let Some(length) = length(unread)? else { return Ok(None) };
        // The rest of a message must fit behind its beginning.
        if length > self.buffer.len() / 2 {
            return Err(Error::Length(length));
        }
        let Some(bytes) = unread.get(..length) else { return Ok(None) };
        let bytes = bytes.to_vec();
        Ok(Some(self.take(bytes)))
    }

    /// Returns whether the socket may have had more than the last read got, because the buffer was full or the read
    /// ended behind descriptors.
    pub(crate) fn was_cut(&self) -> bool {
        self.was_cut
    }

    /// Returns whether a part of a message was taken out of the socket.
    pub(crate) fn is_within_message(&self) -> bool {
        self.taken > self.start
    }

    /// Takes the messages out of the socket that [`Self::receive`] has returned, as all of them were handled.
    pub(crate) fn confirm(&mut self) -> Result<(), Error> {
        self.take_to(self.start)
    }

    /// Takes everything that was read out of the socket, because the connection is over: the VMM finds its end then,
    /// and not that it was reset.
    pub(crate) fn discard(&mut self) {
        // It is over in any case.
        let _ = self.take_to(self.end);
    }

    /// Takes what is in front of this position of the buffer out of the socket, if that was not done. Its descriptors
    /// were received with the read that left it there.
    fn take_to(&mut self, end: usize) -> Result<(), Error> {
        while self.taken < end {
            let mut no_fds = RecvAncillaryBuffer::default();
            let mut part = [IoSliceMut::new(&mut self.buffer[self.taken..end])];
            match recvmsg(&self.socket, &mut part, &mut no_fds, RecvFlags::DONTWAIT) {
                Ok(message) if message.bytes == 0 => return Err(Error::Closed),
                Ok(message) => self.taken += message.bytes,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Sends a whole message. Never waits: a VMM has one message under way, or a few, and reads
    /// each reply.
    pub(crate) fn send(&self, message: &[u8]) -> Result<(), Error> {
        let mut no_fds = SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(message)], &mut no_fds, flags) {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(Error::Stuck),
                Err(Errno::PIPE) => return Err(Error::Closed),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes a complete message, of these bytes, out of the buffer, with its descriptors.
    fn take(&mut self, bytes: Vec<u8>) -> Message {
        self.start += bytes.len();
        let mut message = Message { bytes, fds: Vec::new(), fds_lost: false, fds_foreign: false };
        while self.descriptors.front().is_some_and(|read| read.end <= self.start) {
            let Some(read) = self.descriptors.pop_front() else { break };
            message.fds.extend(read.fds);
            message.fds_lost |= read.lost;
            message.fds_foreign |= read.foreign;
        }
        message.fds_lost |= message.fds.len() > self.max_fds;
        message.fds.truncate(self.max_fds);
        message
    }

    /// Reads what the socket has behind what is in the buffer; returns `false` if it has nothing.
    fn fill(&mut self) -> Result<bool, Error> {
        self.take_to(self.end)?;
        self.compact();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let room = if descriptor::may_receive() { space.len() } else { 0 };
        let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
        let mut part = [IoSliceMut::new(&mut self.buffer[self.end..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
        self.was_cut = false;
        let (read, lost) = match recvmsg(&self.socket, &mut part, &mut control, flags) {
            Ok(message) => (message.bytes, message.flags.contains(ReturnFlags::CTRUNC)),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        if read == 0 {
            return Err(Error::Closed);
        }
        self.end += read;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        self.was_cut = self.end == self.buffer.len() || lost || !fds.is_empty();
        self.keep(fds, lost);
        Ok(true)
    }

    /// Keeps the descriptors of a read, as many as its messages may have. `lost`: some did not
    /// arrive.
    fn keep(&mut self, fds: Vec<OwnedFd>, lost: bool) {
        let (mut fds, foreign) = descriptor::keep_harmless(fds);
        let waiting: usize = self.descriptors.iter().map(|read| read.fds.len()).sum();
        let room = (2 * self.max_fds).saturating_sub(waiting);
        let lost = lost || fds.len() > room;
        fds.truncate(room);
        if lost || foreign || !fds.is_empty() {
            self.descriptors.push_back(Descriptors { end: self.end, fds, lost, foreign });
        }
    }

    /// Makes room behind what is unread, which is less than one message.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        for read in &mut self.descriptors {
            read.end -= self.start;
        }
        self.end -= self.start;
        self.taken -= self.start;
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{memfd_create, MemfdFlags};
    use rustix::net::SendAncillaryMessage;

    use super::*;

    /// A message begins with its length, a byte, which counts itself.
    fn length(bytes: &[u8]) -> Result<Option<usize>, Error> {
        match bytes.first() {
            Some(0) => Err(Error::Length(0)),
            first => Ok(first.map(|length| usize::from(*length))),
        }
    }

    /// A channel for messages of up to 8 bytes and 2 descriptors, and the other end.
    fn channel() -> (Channel, UnixStream) {
        let (socket, other) = UnixStream::pair().unwrap();
        (Channel::new(socket, 8, 2), other)
    }

    fn send(socket: &UnixStream, bytes: &[u8], fds: usize) {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let fds = vec![fd.as_fd(); fds];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    /// Length, number of descriptors, and whether some were lost, of all messages that have come.
    fn received(channel: &mut Channel) -> Vec<(usize, usize, bool)> {
        let next = || channel.receive(length).unwrap();
        let of = |message: Message| (message.bytes.len(), message.fds.len(), message.fds_lost);
        std::iter::from_fn(next).map(of).collect()
    }

    #[test]
    fn descriptors_come_with_their_message() {
        let (mut channel, other) = channel();
        send(&other, &[2, 0], 0);
        send(&other, &[3, 0, 0], 1);
        send(&other, &[1, 1], 0);
        send(&other, &[2, 0], 2);
        assert_eq!(
            received(&mut channel),
            [(2, 0, false), (3, 1, false), (1, 0, false), (1, 0, false), (2, 2, false)]
        );
    }

    #[test]
    fn descriptors_of_pieces_belong_together() {
        let (mut channel, other) = channel();
        send(&other, &[5, 0], 1);
        assert_eq!(received(&mut channel), []);
        send(&other, &[0], 1);
        assert_eq!(received(&mut channel), []);
        // The rest of the message, and the beginning of the next, which has descriptors too.
        send(&other, &[0, 0], 0);
        send(&other, &[4, 0], 2);
        assert_eq!(received(&mut channel), [(5, 2, false)]);
        send(&other, &[0, 0], 0);
        assert_eq!(received(&mut channel), [(4, 2, false)]);
    }

    #[test]
    fn a_message_has_no_more_descriptors_than_it_may() {
        let (mut channel, other) = channel();
        send(&other, &[2, 0], 3);
        send(&other, &[2, 0], 1);
        assert_eq!(received(&mut channel), [(2, 2, true), (2, 1, false)]);
        for _ in 0..7 {
            send(&other, &[8], 1);
            assert_eq!(received(&mut channel), []);
        }
        send(&other, &[8], 1);
        assert_eq!(received(&mut channel), [(8, 2, true)]);
    }

    #[test]
    fn a_stream_ends_or_gets_out_of_step() {
        let (mut channel, other) = channel();
        send(&other, &[9], 0);
        assert!(matches!(channel.receive(length), Err(Error::Length(9))));
        let (mut channel, other) = self::channel();
        send(&other, &[1, 2], 0);
        drop(other);
        assert!(channel.receive(length).unwrap().is_some());
        assert!(channel.receive(length).unwrap_err().is_closed());
    }

    /// Another process that has the socket finds the messages there that this one has not confirmed, with their
    /// descriptors.
    #[test]
    fn messages_stay_in_the_socket_until_they_are_confirmed() {
        let (mut channel, other) = channel();
        let mut successor = Channel::new(channel.socket.try_clone().unwrap(), 8, 2);
        send(&other, &[2, 0], 0);
        send(&other, &[3, 0, 0], 2);
        send(&other, &[1], 0);
        let mut next = || channel.receive(length).unwrap().unwrap().bytes.len();
        assert_eq!((next(), next()), (2, 3));
        assert_eq!(received(&mut successor), [(2, 0, false), (3, 2, false), (1, 0, false)]);
        send(&other, &[2, 1], 0);
        assert_eq!(received(&mut successor), [(2, 0, false)]);
    }

    #[test]
    fn a_message_that_is_confirmed_is_gone() {
        let (mut channel, other) = channel();
        let mut successor = Channel::new(channel.socket.try_clone().unwrap(), 8, 2);
        send(&other, &[2, 0], 0);
        send(&other, &[3, 0, 0], 2);
        assert_eq!(channel.receive(length).unwrap().unwrap().bytes.len(), 2);
        channel.confirm().unwrap();
        assert_eq!(received(&mut successor), [(3, 2, false)]);
    }
}
