// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An uplink over a tap, which the administrator has put on a bridge.

use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd};

use roce::{Segments, Split};
use tap::{Tap, Train};

use super::counters::{Counters, Event};

/// Bytes of the longest frame, which is a train of packets.
const FRAME: usize = 64 << 10;
/// Room for the header that the kernel puts in front of a frame.
const HEADER: usize = 64;

/// A tap.
#[derive(Debug)]
pub struct TapPort {
    tap: Tap,
}

impl TapPort {
    /// Opens a tap, with trains if they are wanted and this kernel has them.
    pub fn open(name: &str, trains: bool) -> Result<Self, Error> {
        let tap = Tap::open(name, trains)?;
        if trains && !tap.takes_trains() {
            tracing::info!(
                tap = name,
                "this kernel takes packets one by one (Linux 6.2 takes trains)"
            );
        }
        Ok(Self { tap })
    }

    /// Returns the room that [`TapPort::receive`] needs.
    pub fn room() -> Vec<u8> {
        vec![0; HEADER + FRAME]
    }

    /// Takes a frame that has come, and gives it to `deliver`, with the bytes of a segment if it is a train.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::receive`].
    pub fn receive(
        &self,
        room: &mut [u8],
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<(), Error> {
        let (frame, segment) = self.tap.receive(room)?;
        deliver(frame, segment);
        Ok(())
    }

    /// Sends a frame, or counts it as lost.
    pub fn send(&self, segments: Segments<'_>, counters: &Counters) {
        let Segments { frame, segment, udp } = segments;
        if segment == 0 || self.tap.takes_trains() {
            let train = (segment != 0).then_some(Train { segment, udp });
            return self.give(frame, train, counters);
        }
        let mut split = Split::new(frame, segment);
        while let Some(packet) = split.next(frame) {
            self.give(&frame[packet], None, counters);
        }
    }

    fn give(&self, frame: &[u8], train: Option<Train>, counters: &Counters) {
        match self.tap.send(frame, train) {
            Ok(()) => _ = counters.count(Event::TxFrames),
            Err(error) => {
                counters.report(Event::TxLost, format_args!("a packet is lost: {error}"));
            }
        }
    }
}

impl AsFd for TapPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }
}
