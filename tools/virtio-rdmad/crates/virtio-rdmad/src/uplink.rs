// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The uplink of a network: the tap that carries the packets of its guests to and from other hosts.

use std::io::{Error, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use engine::Fabric;
use roce::{Segments, Split};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use tap::{Tap, Train};

/// Bytes of the longest frame, which is a train of packets.
const FRAME: usize = 64 << 10;
/// Room for the header that the kernel puts in front of a frame.
const HEADER: usize = 64;

/// Frames that are read before the next look at whether the process ends.
const BURST: usize = 64;

/// The tap of a network.
#[derive(Debug)]
pub struct Uplink {
    tap: Tap,
    /// The name of the tap, for logs.
    name: String,
    /// Frames that the kernel did not take.
    lost: AtomicU64,
}

impl Uplink {
    /// Opens a tap.
    pub fn open(name: &str) -> Result<Arc<Self>, Error> {
        let tap = Tap::open(name)?;
        if !tap.takes_trains() {
            tracing::info!(
                tap = name,
                "this kernel takes packets one by one (Linux 6.2 takes trains)"
            );
        }
        Ok(Arc::new(Self { tap, name: name.to_owned(), lost: AtomicU64::new(0) }))
    }

    /// Brings frames to the guests of a network until `end` is closed.
    pub fn run(&self, fabric: &Fabric, end: &UnixStream) {
        let mut room = vec![0; HEADER + FRAME];
        loop {
            let mut fds = [PollFd::new(&self.tap, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(tap = self.name, %error, "the uplink ends"),
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            for _ in 0..BURST {
                match self.tap.receive(&mut room) {
                    Ok((frame, segment)) => {
                        fabric.receive(frame, segment);
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => {
                        return tracing::error!(tap = self.name, %error, "the uplink ends");
                    }
                }
            }
        }
    }

    /// Gives the kernel a frame, or counts it as lost.
    fn give(&self, frame: &[u8], train: Option<Train>) {
        if let Err(error) = self.tap.send(frame, train) {
            if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(tap = self.name, %error, "a packet is lost (further ones are not logged)");
            }
        }
    }
}

impl engine::Uplink for Uplink {
    fn send(&self, Segments { frame, segment, udp }: Segments<'_>) {
        if segment == 0 || self.tap.takes_trains() {
            return self.give(frame, (segment != 0).then_some(Train { segment, udp }));
        }
        let mut split = Split::new(frame, segment);
        while let Some(packet) = split.next(frame) {
            self.give(&frame[packet], None);
        }
    }
}
