// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The uplink of a network: the tap that carries the packets of its guests to and from other hosts.

use std::io::{Error, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use engine::Fabric;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use tap::Tap;

/// Bytes of the longest frame: a packet of 4096 bytes of payload and all of its headers fits, and so does
/// any frame of an interface with jumbo frames.
const FRAME: usize = 16 << 10;

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
        Ok(Arc::new(Self { tap, name: name.to_owned(), lost: AtomicU64::new(0) }))
    }

    /// Brings frames to the guests of a network until `end` is closed.
    pub fn run(&self, fabric: &Fabric, end: &UnixStream) {
        let mut frame = vec![0; FRAME];
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
                match self.tap.receive(&mut frame) {
                    Ok(len) => {
                        fabric.receive(&frame[..len]);
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => {
                        return tracing::error!(tap = self.name, %error, "the uplink ends");
                    }
                }
            }
        }
    }
}

impl engine::Uplink for Uplink {
    fn send(&self, frame: &[u8]) {
        if let Err(error) = self.tap.send(frame) {
            if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(tap = self.name, %error, "a packet is lost (further ones are not logged)");
            }
        }
    }
}
