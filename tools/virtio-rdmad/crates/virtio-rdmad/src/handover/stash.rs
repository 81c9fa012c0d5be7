// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! File descriptors that outlive the process.
//!
//! A stash is a pair of connected sockets. Descriptors that were sent into one of them and not received from the other
//! one are in the kernel's hands (unix(7), SCM_RIGHTS), for as long as anybody has the other one open. So whoever keeps
//! the two sockets keeps any number of descriptors, in a known order, and a change of them is a system call or two,
//! which wait for nobody.
//!
//! The descriptors that belong together are a set, which has a number. A set is sent in parts, one for each message.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Most descriptors of a message, SCM_MAX_FD of `linux/socket.h`.
const PART: usize = 253;

/// Room for the descriptors of a message.
const SPACE: usize = rustix::cmsg_space!(ScmRights(PART));

/// The bytes of a message, which come with its descriptors.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Head {
    /// The number of the set.
    set: u64,
    /// The number of this part, from 0 on.
    part: u32,
    /// The number of parts of the set.
    parts: u32,
}

impl Head {
    fn to_bytes(self) -> [u8; 16] {
        let word = self.set.to_le_bytes();
        let (part, parts) = (self.part.to_le_bytes(), self.parts.to_le_bytes());
        std::array::from_fn(|at| match at {
            0..8 => word[at],
            8..12 => part[at - 8],
            _ => parts[at - 12],
        })
    }

    fn from_bytes(bytes: [u8; 16]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let set = u64::from_le_bytes(std::array::from_fn(|byte| bytes[byte]));
        Self { set, part: word(8), parts: word(12) }
    }
}

/// A set of descriptors that were found in a stash.
#[derive(Debug, Default)]
struct Found {
    parts: BTreeMap<u32, Vec<OwnedFd>>,
    /// The number of parts that the set should have.
    wanted: u32,
}

/// A stash, which has a set of descriptors.
#[derive(Debug)]
pub struct Stash {
    /// The end of the connection that messages are sent to.
    near: UnixStream,
    /// The end of the connection where messages wait.
    far: UnixStream,
    /// The number of the last set.
    set: u64,
    /// The number of messages that wait.
    messages: usize,
}

impl Stash {
    /// Makes a stash without descriptors.
    pub fn new() -> Result<Self, std::io::Error> {
        let (near, far) = UnixStream::pair()?;
        Ok(Self { near, far, set: 0, messages: 0 })
    }

    /// Returns the two sockets. Whoever has both of them open keeps the descriptors.
    pub fn sockets(&self) -> [BorrowedFd<'_>; 2] {
        [self.near.as_fd(), self.far.as_fd()]
    }

    /// Puts a set of descriptors here, at least one, and returns its number. The sets from before are here as well
    /// until [`Self::forget`]. After an error a part of it may be here.
    pub fn put(&mut self, descriptors: &[BorrowedFd<'_>]) -> Result<u64, Errno> {
        self.set += 1;
        let parts = descriptors.chunks(PART).len();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        for (part, descriptors) in descriptors.chunks(PART).enumerate() {
            let head = Head { set: self.set, part: count(part), parts: count(parts) };
            self.send(head, descriptors)?;
        }
        Ok(self.set)
    }

    /// Forgets the sets from before the last one.
    pub fn forget(&mut self) -> Result<(), Errno> {
        while self.messages != 0 && self.peek()?.is_some_and(|head| head.set != self.set) {
            self.drop_message()?;
        }
        Ok(())
    }

    /// Takes over the stash that another process has made, which has these two sockets, in any order. Returns it, and
    /// the descriptors of all sets that are complete, by their numbers. The descriptors stay in the stash.
    pub fn inherit(
        sockets: [OwnedFd; 2],
    ) -> Result<(Self, BTreeMap<u64, Vec<OwnedFd>>), std::io::Error> {
        let [one, other] = sockets.map(UnixStream::from);
        let mut stash = Self { near: one, far: other, set: 0, messages: 0 };
        if stash.peek()?.is_none() {
            std::mem::swap(&mut stash.near, &mut stash.far);
        }
        let mut found: BTreeMap<u64, Found> = BTreeMap::new();
        // Each message goes to the end before its first copy goes, so that the stash has it at any time.
        while let Some((head, descriptors)) = stash.receive(RecvFlags::PEEK)? {
            let set = found.entry(head.set).or_default();
            if set.parts.contains_key(&head.part) {
                break;
            }
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            stash.send(head, &borrowed)?;
            stash.drop_message()?;
            set.wanted = head.parts;
            set.parts.insert(head.part, descriptors);
            stash.set = stash.set.max(head.set);
        }
        stash.messages = found.values().map(|set| set.parts.len()).sum();
        let is_whole = |set: &Found| set.parts.len() == set.wanted as usize;
        let whole = found.into_iter().filter(|(_, set)| is_whole(set));
        let sets = whole.map(|(number, set)| (number, set.parts.into_values().flatten().collect()));
        Ok((stash, sets.collect()))
    }

    fn send(&mut self, head: Head, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.near, &[IoSlice::new(&head.to_bytes())], &mut control, flags)?;
        self.messages += 1;
        Ok(())
    }

    /// Returns what the first message says, if there is one.
    fn peek(&self) -> Result<Option<Head>, Errno> {
        let mut bytes = [0; 16];
        let mut none = RecvAncillaryBuffer::default();
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recvmsg(&self.far, &mut [IoSliceMut::new(&mut bytes)], &mut none, flags) {
            Ok(message) if message.bytes == bytes.len() => Ok(Some(Head::from_bytes(bytes))),
            Ok(_) | Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Takes the first message away, and with it the kernel's hold on its descriptors.
    fn drop_message(&mut self) -> Result<(), Errno> {
        let mut bytes = [0; 16];
        let mut none = RecvAncillaryBuffer::default();
        let mut part = [IoSliceMut::new(&mut bytes)];
        recvmsg(&self.far, &mut part, &mut none, RecvFlags::DONTWAIT)?;
        self.messages = self.messages.saturating_sub(1);
        Ok(())
    }

    /// Returns the first message, if there is one.
    fn receive(&self, flags: RecvFlags) -> Result<Option<(Head, Vec<OwnedFd>)>, Errno> {
        let mut bytes = [0; 16];
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut part = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&self.far, &mut part, &mut control, flags) {
            Ok(message) if message.bytes == 16 => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        Ok(Some((Head::from_bytes(bytes), descriptors)))
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{fstat, memfd_create, MemfdFlags};

    use super::*;

    fn file() -> OwnedFd {
        memfd_create("test", MemfdFlags::CLOEXEC).unwrap()
    }

    fn inode(fd: impl AsFd) -> u64 {
        fstat(fd).unwrap().st_ino
    }

    /// Leaves the stash to a successor, which gets the sockets in this order.
    fn leave(stash: Stash, swapped: bool) -> (Stash, BTreeMap<u64, Vec<OwnedFd>>) {
        let mut sockets: [OwnedFd; 2] = [stash.near.into(), stash.far.into()];
        if swapped {
            sockets.reverse();
        }
        Stash::inherit(sockets).unwrap()
    }

    #[test]
    fn a_successor_finds_the_last_set() {
        let files: Vec<OwnedFd> = (0..260).map(|_| file()).collect();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut stash = Stash::new().unwrap();
        assert_eq!(stash.put(&borrowed[..3]), Ok(1));
        assert_eq!(stash.put(&borrowed), Ok(2));
        stash.forget().unwrap();
        for swapped in [false, true] {
            let (next, sets) = leave(stash, swapped);
            assert_eq!(sets.keys().copied().collect::<Vec<_>>(), [2]);
            let inodes: Vec<u64> = sets[&2].iter().map(inode).collect();
            assert_eq!(inodes, files.iter().map(inode).collect::<Vec<_>>());
            stash = next;
        }
        assert_eq!((stash.put(&borrowed[7..8]), stash.messages), (Ok(3), 3));
        stash.forget().unwrap();
        assert_eq!(stash.messages, 1);
    }

    /// A process that dies while it changes the set leaves both.
    #[test]
    fn a_successor_finds_both_sets() {
        let (one, other) = (file(), file());
        let mut stash = Stash::new().unwrap();
        stash.put(&[one.as_fd()]).unwrap();
        stash.put(&[one.as_fd(), other.as_fd()]).unwrap();
        let (mut stash, sets) = leave(stash, false);
        assert_eq!(
            sets.iter().map(|(set, fds)| (*set, fds.len())).collect::<Vec<_>>(),
            [(1, 1), (2, 2)]
        );
        stash.forget().unwrap();
        assert_eq!(leave(stash, true).1.into_keys().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn what_is_forgotten_is_closed() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut stash = Stash::new().unwrap();
        stash.put(&[near.as_fd()]).unwrap();
        drop(near);
        stash.put(&[file().as_fd()]).unwrap();
        far.set_nonblocking(true).unwrap();
        assert_eq!(rustix::io::read(&far, &mut [0; 1]), Err(Errno::AGAIN));
        stash.forget().unwrap();
        assert_eq!(rustix::io::read(&far, &mut [0; 1]), Ok(0));
    }

    #[test]
    fn an_empty_stash_has_no_set() {
        let (stash, sets) = leave(Stash::new().unwrap(), false);
        assert_eq!((sets.len(), stash.set, stash.messages), (0, 0, 0));
    }
}
