// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A UDP datagram back and forth between two taps of one bridge, each polled by a thread: what the kernel
//! takes at least for a packet that goes over taps and a bridge. It goes to the port of RoCE v2.
//!
//! The first byte of a datagram is the number of the round trip that it belongs to.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tap::PacketTap;

use crate::pingpong::{pin, two_processors};
use crate::polling::{ask, poll};
use crate::samples::typical;
use crate::Error;

/// The UDP port of RoCE v2: what directs its packets to a tap directs these datagrams, too.
const PORT: u16 = 4791;
/// The bytes of the headers of Ethernet, of IPv4, and of UDP.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const HEADERS: usize = ETHERNET + IPV4 + UDP;
/// The largest frame that a tap with an MTU of 1500 bytes takes.
const LARGEST: usize = ETHERNET + 1500;

/// Microseconds there and back between the taps of these names: what a datagram of `size` bytes and its
/// answer typically take.
pub fn round_trip(names: [&str; 2], size: usize, time: Duration) -> Result<f64, Error> {
    if HEADERS + size > LARGEST {
        return Err(Error::Usage);
    }
    let (here, there) = two_processors()?;
    let one = End::open(names[0], 1, 2, size)?;
    let other = End::open(names[1], 2, 1, size)?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let answerer = scope.spawn(|| pin(there).and_then(|()| other.answer(&over)));
        let seconds = pin(here).and_then(|()| one.round_trips(time));
        over.store(true, Ordering::Relaxed);
        answerer.join().map_err(|_| Error::Thread)??;
        Ok(seconds? * 1e6)
    })
}

/// A tap, what is sent from there, and what comes there.
struct End {
    tap: PacketTap,
    sent: Vec<u8>,
    expected: Vec<u8>,
}

impl End {
    /// Opens a tap. `own` and `peer` are the numbers of both ends.
    fn open(name: &str, own: u8, peer: u8, size: usize) -> Result<Self, Error> {
        let tap = PacketTap::open(name).map_err(Error::system("opening a tap"))?;
        Ok(Self { tap, sent: frame(own, peer, size), expected: frame(peer, own, size) })
    }

    /// Sends the datagram of the round trip of this number.
    fn send(&self, turn: u8) -> io::Result<()> {
        let mut frame = [0; LARGEST];
        let frame = &mut frame[..self.sent.len()];
        frame.copy_from_slice(&self.sent);
        frame[HEADERS] = turn;
        self.tap.send(frame)
    }

    /// Takes a frame. Returns the number of its round trip if it is a datagram of the other end.
    fn receive(&self) -> io::Result<Option<u8>> {
        let mut room = [0; LARGEST];
        let frame = self.tap.receive(&mut room)?;
        Ok(turn_of(frame, &self.expected))
    }

    /// Returns the seconds that a round trip typically takes.
    fn round_trips(&self, time: Duration) -> Result<f64, Error> {
        let mut turn = 0_u8;
        typical(time, |count| {
            for _ in 0..count {
                turn = turn.wrapping_add(1);
                ask(|| self.send(turn), || Ok(self.receive()? == Some(turn)))?;
            }
            Ok(())
        })
    }

    /// Answers each datagram until it is over.
    fn answer(&self, over: &AtomicBool) -> Result<(), Error> {
        while !over.load(Ordering::Relaxed) {
            let came = poll(|| match self.receive() {
                Err(_) if over.load(Ordering::Relaxed) => Ok(None),
                result => result,
            });
            if let Some(Some(turn)) = came.map_err(Error::system("receive"))? {
                self.send(turn).map_err(Error::system("send"))?;
            }
        }
        Ok(())
    }
}

/// Returns the number of the round trip of a frame, if all else of it is as expected.
fn turn_of(frame: &[u8], expected: &[u8]) -> Option<u8> {
    let (headers, datagram) = frame.split_at_checked(HEADERS)?;
    let (wanted, rest) = expected.split_at_checked(HEADERS)?;
    let (turn, data) = datagram.split_first()?;
    (headers == wanted && data == &rest[1..]).then_some(*turn)
}

/// Returns the frame of a datagram of `size` bytes between two ends (RFC 791, RFC 768). It has no
/// checksum of UDP. Its addresses are the locally administered ones, and those for documentation
/// (RFC 5737), that end with the numbers of the ends.
fn frame(from: u8, to: u8, size: usize) -> Vec<u8> {
    // A frame is at most LARGEST bytes long.
    let length = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes();
    let mut frame = Vec::with_capacity(HEADERS + size);
    for end in [to, from] {
        frame.extend([0x02, 0, 0, 0, 0, end]);
    }
    frame.extend([0x08, 0x00]);
    let mut header = [0; IPV4];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&length(IPV4 + UDP + size));
    header[8..10].copy_from_slice(&[64, 17]);
    header[12..16].copy_from_slice(&[192, 0, 2, from]);
    header[16..20].copy_from_slice(&[192, 0, 2, to]);
    let checksum = checksum(&header);
    header[10..12].copy_from_slice(&checksum);
    frame.extend(header);
    for port in [PORT, PORT] {
        frame.extend(port.to_be_bytes());
    }
    frame.extend(length(UDP + size));
    frame.extend([0, 0]);
    frame.resize(HEADERS + size, 0x5a);
    frame
}

/// Returns the checksum of an IPv4 header whose own checksum is 0 (RFC 1071).
fn checksum(header: &[u8; IPV4]) -> [u8; 2] {
    let words =
        header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    // Ten words carry no more than 9 out of 16 bits, and adding them does so once more.
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    let [_, _, high, low] = (!folded).to_be_bytes();
    [high, low]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_of_two_bytes() {
        let frame = frame(1, 2, 2);
        assert_eq!(frame.len(), 44);
        assert_eq!(frame[..14], [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
        assert_eq!(frame[16..18], [0, 30]);
        assert_eq!(frame[38..42], [0, 10, 0, 0]);
        // With its checksum, a header sums up to all ones, whose complement is 0.
        let header: [u8; IPV4] = frame[14..34].try_into().unwrap_or_default();
        assert_eq!(checksum(&header), [0, 0]);
    }

    #[test]
    fn only_the_peers_frames_count() {
        let expected = frame(2, 1, 2);
        let mut came = expected.clone();
        came[HEADERS] = 7;
        assert_eq!(turn_of(&came, &expected), Some(7));
        assert_eq!(turn_of(&frame(1, 2, 2), &expected), None);
        assert_eq!(turn_of(&frame(2, 1, 3), &expected), None);
        assert_eq!(turn_of(&came[..HEADERS], &expected), None);
        assert_eq!(turn_of(&[], &expected), None);
    }
}
