// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client of the control socket, with the bytes that it has sent, and those that it has yet to read.
//!
//! Nothing here waits for a client. A client that sends half of a request, or does not read its answers, costs
//! the memory of these at most.

use std::io::{Error, ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use descriptor::keep_harmless;
use rustix::event::PollFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::guest::trace::Traced;

/// Most bytes of a request.
const MAX_REQUEST: usize = 64 << 10;
/// Most descriptors that come with the requests of a client that have no answer yet.
const MAX_DESCRIPTORS: usize = 4;
/// Bytes of answers that a client has yet to read, from which on it gets no more.
const MAX_UNREAD: usize = 1 << 20;

/// The reason why the connection of a client ends.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The client has closed it.
    #[error("closed")]
    Closed,
    /// A request is too long.
    #[error("a request of more than {MAX_REQUEST} bytes")]
    TooLong,
    /// The client has sent bytes that are no request.
    #[error("no request of Varlink: {0}")]
    Malformed(#[from] varlink::Error),
    /// The operating system refused something.
    #[error(transparent)]
    Os(#[from] Error),
}

/// A client.
pub struct Client {
    stream: UnixStream,
    /// Whether it may send more.
    is_open: bool,
    /// The bytes that have come and belong to no request that was answered.
    input: Vec<u8>,
    /// Descriptors that have come with that.
    descriptors: Vec<OwnedFd>,
    /// Answers, the first `sent` bytes of which were sent.
    output: Vec<u8>,
    sent: usize,
    /// The time at which it last sent or read something.
    pub active: Instant,
    /// Whether it is told of events.
    pub watches: bool,
    /// The QPs that it traces.
    pub traced: Option<Traced>,
    /// Events that it was not told of, as it did not read the earlier ones.
    lost: u64,
}

impl Client {
    /// Begins to serve a client that has connected.
    pub fn new(stream: UnixStream) -> Result<Self, Error> {
        // The standard library makes an ioctl of it, which the sandbox does not allow.
        rustix::fs::fcntl_setfl(&stream, OFlags::RDWR | OFlags::NONBLOCK)?;
        let (input, descriptors, output) = Default::default();
        Ok(Self {
            stream,
            is_open: true,
            input,
            descriptors,
            output,
            sent: 0,
            active: Instant::now(),
            watches: false,
            traced: None,
            lost: 0,
        })
    }

    /// Returns how many bytes the client has yet to read.
    fn unread(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Returns what of the socket is waited for.
    pub fn interest(&self) -> PollFlags {
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, self.is_open && self.unread() < MAX_UNREAD);
        interest.set(PollFlags::OUT, self.unread() != 0);
        interest
    }

    /// Tells the client of events, each of which is an answer, if it reads what it is told. `lost` makes the answer
    /// that tells how many events it was not told of.
    pub fn tell(&mut self, events: &[Vec<u8>], lost: impl Fn(u64) -> Vec<u8>) -> Result<(), Error> {
        if self.unread() >= MAX_UNREAD {
            self.lost += events.len() as u64;
            return Ok(());
        }
        if self.lost != 0 {
            self.output.extend(lost(std::mem::take(&mut self.lost)));
        }
        self.output.extend(events.concat());
        self.send()
    }

    /// Takes what has come, has `answer` add the answers to its requests, and sends what the client reads. `answer`
    /// may take descriptors that have come with requests. Those that it leaves when all requests have their answers
    /// are closed.
    pub fn serve(
        &mut self,
        mut answer: impl FnMut(&[u8], &mut Vec<OwnedFd>, &mut Vec<u8>) -> varlink::Result<()>,
    ) -> Result<(), Ended> {
        self.receive()?;
        loop {
            self.answer(&mut answer)?;
            self.send()?;
            // If the client has read all of that, the next request is answered now: nothing else may come.
            if self.unread() >= MAX_UNREAD || !self.input.contains(&0) {
                break;
            }
        }
        if self.input.is_empty() {
            self.descriptors.clear();
        }
        if self.input.len() > MAX_REQUEST && !self.input.contains(&0) {
            return Err(Ended::TooLong);
        }
        if self.is_open || self.unread() != 0 {
            Ok(())
        } else {
            Err(Ended::Closed)
        }
    }

    /// Answers the requests that have come, until the client has much to read.
    fn answer(
        &mut self,
        answer: &mut impl FnMut(&[u8], &mut Vec<OwnedFd>, &mut Vec<u8>) -> varlink::Result<()>,
    ) -> Result<(), Ended> {
        let mut taken = 0;
        while self.unread() < MAX_UNREAD {
            let Some(len) = self.input[taken..].iter().position(|byte| *byte == 0) else { break };
            let request = &self.input[taken..=taken + len];
            answer(request, &mut self.descriptors, &mut self.output)?;
            taken += len + 1;
        }
        self.input.drain(..taken);
        Ok(())
    }

    /// Takes what has come, a request that is too long at most.
    fn receive(&mut self) -> Result<(), Error> {
        let mut room = [0; 4096];
        while self.is_open && self.input.len() <= MAX_REQUEST {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut room)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let len = match recvmsg(&self.stream, &mut part, &mut control, flags) {
                Ok(message) => message.bytes,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            self.is_open = len != 0;
            self.input.extend_from_slice(&room[..len]);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.descriptors.extend(keep_harmless(descriptors.collect()).0);
                }
            }
            self.descriptors.truncate(MAX_DESCRIPTORS);
            self.active = Instant::now();
        }
        Ok(())
    }

    /// Sends as much as the client reads.
    fn send(&mut self) -> Result<(), Error> {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            self.active = Instant::now();
        }
        (self.output, self.sent) = (Vec::new(), 0);
        Ok(())
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Answers each request with itself.
    #[allow(clippy::unnecessary_wraps)] // as the service's function
    fn echo(request: &[u8], _: &mut Vec<OwnedFd>, answers: &mut Vec<u8>) -> varlink::Result<()> {
        answers.extend_from_slice(request);
        Ok(())
    }

    fn pair() -> (UnixStream, Client) {
        let (other, stream) = UnixStream::pair().unwrap();
        (other, Client::new(stream).unwrap())
    }

    #[test]
    fn requests_come_in_any_pieces() {
        let (mut other, mut client) = pair();
        for piece in [&b"on"[..], b"e\0tw", b"o\0three\0", b"fo"] {
            other.write_all(piece).unwrap();
            client.serve(echo).unwrap();
        }
        let mut answers = [0; 14];
        other.read_exact(&mut answers).unwrap();
        assert_eq!(&answers, b"one\0two\0three\0");
        assert_eq!(client.interest(), PollFlags::IN);
        drop(other);
        assert!(matches!(client.serve(echo), Err(Ended::Closed)));
    }

    #[test]
    fn a_request_that_never_ends_is_too_long() {
        let (mut other, mut client) = pair();
        other.set_nonblocking(true).unwrap();
        let ended = loop {
            let _ = other.write(&[b'x'; 4096]);
            if let Err(ended) = client.serve(echo) {
                break ended;
            }
        };
        assert!(matches!(ended, Ended::TooLong), "{ended}");
    }

    #[test]
    fn many_requests_may_come_together() {
        const COUNT: usize = 1000;
        let (mut other, mut client) = pair();
        // The answers to these are more than a client has to read at a time, and the kernel takes some of them.
        let large = |_: &[u8], _: &mut Vec<OwnedFd>, answers: &mut Vec<u8>| {
            answers.resize(answers.len() + MAX_UNREAD / 16, b'y');
            Ok(())
        };
        let requests = [&[b'1'; 1023][..], b"\0"].concat().repeat(COUNT);
        let writer = std::thread::spawn(move || {
            let mut reader = other.try_clone().unwrap();
            let answers = (COUNT * MAX_UNREAD / 16) as u64;
            let reads =
                std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
            other.write_all(&requests).unwrap();
            other.shutdown(std::net::Shutdown::Write).unwrap();
            (reads, answers)
        });
        // It has all its answers although it says no more.
        let ended = loop {
            let mut fds = [rustix::event::PollFd::new(&client, client.interest())];
            rustix::event::poll(&mut fds, None).unwrap();
            if let Err(ended) = client.serve(large) {
                break ended;
            }
        };
        assert!(matches!(ended, Ended::Closed), "{ended}");
        drop(client);
        let (reads, answers) = writer.join().unwrap();
        assert_eq!(reads.join().unwrap().unwrap(), answers);
    }

    #[test]
    fn a_client_that_does_not_read_gets_no_more() {
        let (mut other, mut client) = pair();
        let large = |_: &[u8], _: &mut Vec<OwnedFd>, answers: &mut Vec<u8>| {
            answers.resize(answers.len() + MAX_UNREAD, b'y');
            Ok(())
        };
        other.write_all(b"1\x002\x003\0").unwrap();
        client.serve(large).unwrap();
        let unread = client.output.len() - client.sent;
        assert!(unread <= 2 * MAX_UNREAD, "{unread}");
        assert!(client.interest().contains(PollFlags::OUT));
        // It reads now, gets all of them, and stays connected.
        let reader = std::thread::spawn(move || {
            let mut room = vec![0; 3 * MAX_UNREAD];
            other.read_exact(&mut room).unwrap();
            (room, other)
        });
        while !reader.is_finished() {
            client.serve(large).unwrap();
            std::thread::yield_now();
        }
        let (room, _other) = reader.join().unwrap();
        assert!(room.iter().all(|byte| *byte == b'y'));
    }
}
