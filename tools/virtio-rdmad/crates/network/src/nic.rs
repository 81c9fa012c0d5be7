// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's network interface: the socket over which its VMM exchanges Ethernet frames with the
//! switch of the guest's network.
//!
//! The guest chooses what its VMM sends and how slowly it reads. So nothing here waits for a VMM, and
//! what waits for one has a bound.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{Error, IoSlice};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::{retry_on_intr, Errno};
use rustix::net::{recv, send, sendmsg, RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::forwarding::stream::{self, BadLength, Reader, Rest};
use crate::forwarding::Mac;

/// Most bytes that wait for a VMM that does not read.
const MOST_PENDING: usize = 1 << 20;
/// Frames to groups, and to all stations, that a guest may send in a second, and at once.
const FLOODS_A_SECOND: u32 = 10_000;
const FLOODS_AT_ONCE: u32 = 1_000;

/// The method by which frames are told apart.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Framing {
    /// A stream, in which the length of each frame stands in front of it: QEMU's `-netdev stream`.
    Stream,
    /// Packets, each with one frame: the transport `bess` of user-mode Linux (the kernel's
    /// `arch/um/drivers/vector_user.c`).
    Packets,
}

/// The socket on which VMMs connect to an interface.
pub trait Listener: Debug + Send + Sync {
    /// Returns the descriptor that is readable when a VMM may wait to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_>;

    /// Accepts a VMM, if one waits. This does not wait for one.
    ///
    /// # Errors
    ///
    /// The errors of accept(2).
    fn accept(&self) -> Result<Option<UnixStream>, Error>;
}

engine::counted! {
    /// Something that an interface counts.
    pub enum NicCounter {
        /// A frame was sent to the guest.
        TxFrames = "tx_frames",
        /// A frame was not sent to the guest: its VMM is not there, or does not read.
        TxLost = "tx_lost",
        /// A frame came from the guest.
        RxFrames = "rx_frames",
        /// A frame was dropped: its source is not the guest's MAC address.
        RxSpoofed = "rx_spoofed",
        /// A packet of RoCE v2 was dropped: its source is no address of the guest.
        RxForged = "rx_forged",
        /// A frame was dropped: it has no Ethernet header, or is too long.
        RxMalformed = "rx_malformed",
        /// A frame was dropped: the guest sends too many to groups.
        RxStorm = "rx_storm",
        /// A frame was dropped: no station of the network has its destination.
        RxUnknown = "rx_unknown",
        /// A connection was ended: what came was no frame.
        BadLength = "bad_length",
    }
}

/// The reason why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The VMM has closed it.
    #[error("closed")]
    Closed,
    /// The bytes that came are no frame.
    #[error(transparent)]
    Length(#[from] BadLength),
    /// The kernel reports an error.
    #[error("{0}")]
    Os(#[from] Errno),
}

/// A guest's network interface.
#[derive(Debug)]
pub struct Nic {
    /// The name of the guest.
    pub guest: String,
    /// The MAC address of the interface.
    pub mac: Mac,
    framing: Framing,
    /// The socket on which the VMM connects.
    pub listener: Arc<dyn Listener>,
    outgoing: Mutex<Option<Outgoing>>,
    counters: [AtomicU64; NicCounter::COUNT],
}

/// A connection, as whoever sends sees it.
#[derive(Debug)]
struct Outgoing {
    stream: Arc<UnixStream>,
    /// The bytes of a stream that the kernel has not taken yet.
    pending: Rest,
}

impl Nic {
    /// Makes the interface of a guest, whose VMM connects here, by a socket of the framing's kind.
    pub fn new(guest: &str, mac: Mac, framing: Framing, listener: Arc<dyn Listener>) -> Self {
        Self {
            guest: guest.to_owned(),
            mac,
            framing,
            listener,
            outgoing: Mutex::new(None),
            counters: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Counts an event, and logs the first of its kind if that is a fault.
    pub fn count(&self, event: NicCounter) {
        let is_first = self.counters[event as usize].fetch_add(1, Ordering::Relaxed) == 0;
        let is_fault = !matches!(event, NicCounter::TxFrames | NicCounter::RxFrames);
        if is_first && is_fault {
            let (guest, kind) = (&self.guest, event.name());
            tracing::warn!(guest, kind, "network interface (further ones are only counted)");
        }
    }

    /// Returns the counters by name.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let value = |event: NicCounter| self.counters[event as usize].load(Ordering::Relaxed);
        NicCounter::ALL.iter().map(|event| (event.name().to_owned(), value(*event))).collect()
    }

    /// Begins to send over a connection. Returns what receives from it.
    pub fn connect(&self, stream: UnixStream) -> Incoming {
        let stream = Arc::new(stream);
        let outgoing = Outgoing { stream: Arc::clone(&stream), pending: Rest::default() };
        *self.outgoing() = Some(outgoing);
        Incoming::new(stream, self.framing)
    }

    /// Sends over the connection no more.
    pub fn disconnect(&self) {
        *self.outgoing() = None;
    }

    /// Returns whether a VMM is connected.
    #[cfg(test)]
    pub fn is_connected(&self) -> bool {
        self.outgoing().is_some()
    }

    /// Sends a frame to the guest, or counts it as lost. Any thread.
    pub fn send(&self, frame: &[u8]) {
        let mut outgoing = self.outgoing();
        let sent = outgoing.as_mut().is_some_and(|outgoing| match self.framing {
            Framing::Stream => outgoing.send_in_stream(frame),
            Framing::Packets => outgoing.send_packet(frame),
        });
        drop(outgoing);
        self.count(if sent { NicCounter::TxFrames } else { NicCounter::TxLost });
    }

    /// Sends what waits, as the VMM reads again.
    pub fn flush(&self) {
        if let Some(outgoing) = self.outgoing().as_mut() {
            outgoing.flush();
        }
    }

    fn outgoing(&self) -> MutexGuard<'_, Option<Outgoing>> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The flags of send(2): no thread waits for a VMM, and no signal comes if the VMM has gone.
const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

impl Outgoing {
    /// Sends a frame. Returns `false` if the VMM does not read.
    fn send_packet(&self, frame: &[u8]) -> bool {
        retry_on_intr(|| send(&self.stream, frame, SEND)).is_ok()
    }

    /// Sends a frame, or as much of it as the kernel takes; the rest waits. Returns `false` if too much
    /// waits already, or if the connection has ended.
    fn send_in_stream(&mut self, frame: &[u8]) -> bool {
        let Some(length) = stream::length(frame) else { return false };
        if !self.pending.has_room(frame.len(), MOST_PENDING) {
            return false;
        }
        let mut taken = 0;
        if self.pending.is_empty() {
            let parts = [IoSlice::new(&length), IoSlice::new(frame)];
            let mut none = SendAncillaryBuffer::default();
            let sent = retry_on_intr(|| sendmsg(&self.stream, &parts, &mut none, SEND));
            taken = match sent {
                Ok(taken) => taken,
                Err(Errno::AGAIN) => 0,
                Err(_) => return false,
            };
        }
        self.pending.add(length, frame, taken);
        true
    }

    fn flush(&mut self) {
        let stream = &self.stream;
        self.pending.flush(|rest| retry_on_intr(|| send(stream, rest, SEND)).ok());
    }
}

/// A connection, as the switch's thread sees it, which receives from it.
#[derive(Debug)]
pub struct Incoming {
    stream: Arc<UnixStream>,
    framing: Framing,
    reader: Reader,
}

impl Incoming {
    fn new(stream: Arc<UnixStream>, framing: Framing) -> Self {
        Self { stream, framing, reader: Reader::default() }
    }

    /// Takes a frame; `None` if there is no whole frame yet.
    ///
    /// # Errors
    ///
    /// The connection has ended or has to end.
    pub fn take(&mut self) -> Result<Option<&mut [u8]>, Ended> {
        let range = match self.framing {
            Framing::Stream => self.take_from_stream()?,
            Framing::Packets => self.receive()?.map(|len| 0..len),
        };
        Ok(range.map(|range| self.reader.frame(range)))
    }

    fn take_from_stream(&mut self) -> Result<Option<Range<usize>>, Ended> {
        loop {
            if let Some(frame) = self.reader.take()? {
                return Ok(Some(frame));
            }
            let Some(count) = self.receive()? else { return Ok(None) };
            self.reader.add(count);
        }
    }

    /// Receives into the room of the reader; `None` if nothing has come.
    fn receive(&mut self) -> Result<Option<usize>, Ended> {
        let room = self.reader.room();
        match retry_on_intr(|| recv(&self.stream, &mut *room, RecvFlags::DONTWAIT)) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(Ended::Closed),
            Ok((count, _)) => Ok(Some(count)),
            Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Returns whether a frame has an Ethernet header, and is not longer than a frame can be.
pub fn is_well_formed(frame: &[u8]) -> bool {
    stream::is_possible(frame.len())
}

/// The number of frames to groups that a guest may send at present.
#[derive(Debug)]
pub struct Allowance {
    left: u32,
    /// The time up to which `left` was renewed.
    at: Instant,
}

impl Allowance {
    /// Returns the allowance of a guest that has sent nothing yet.
    pub fn new(now: Instant) -> Self {
        Self { left: FLOODS_AT_ONCE, at: now }
    }

    /// Takes one frame off. Returns whether the guest may send it.
    pub fn take(&mut self, now: Instant) -> bool {
        let each = Duration::from_secs(1) / FLOODS_A_SECOND;
        let passed = now.saturating_duration_since(self.at).as_nanos() / each.as_nanos();
        let renewed = u32::try_from(passed).unwrap_or(u32::MAX);
        if self.left.saturating_add(renewed) >= FLOODS_AT_ONCE {
            (self.left, self.at) = (FLOODS_AT_ONCE, now);
        } else {
            self.left += renewed;
            self.at += each * renewed;
        }
        self.left = match self.left.checked_sub(1) {
            Some(left) => left,
            None => return false,
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floods_have_a_bound() {
        let now = Instant::now();
        let mut floods = Allowance::new(now);
        assert_eq!((0..5000).filter(|_| floods.take(now)).count(), FLOODS_AT_ONCE as usize);
        let later = now + Duration::from_millis(10);
        assert_eq!((0..5000).filter(|_| floods.take(later)).count(), 100);
        let later = now + Duration::from_secs(9);
        assert_eq!((0..5000).filter(|_| floods.take(later)).count(), FLOODS_AT_ONCE as usize);
    }

    #[test]
    fn each_event_has_a_counter_of_its_own() {
        for (index, event) in NicCounter::ALL.iter().enumerate() {
            assert_eq!(*event as usize, index);
        }
    }
}
