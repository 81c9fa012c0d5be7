// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The uplink of a network: what carries the packets of its guests to and from other hosts.

pub mod counters;
mod tap_port;
mod tunnel;

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use engine::Fabric;
use roce::Segments;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;

use crate::uplink_spec::{UplinkSpec, WaySpec};
use counters::{Counters, Event};
use tap_port::TapPort;
use tunnel::Tunnel;

/// How often an uplink gives what it has before it looks at whether the process ends.
const BURST: usize = 64;

/// The uplink of a network.
#[derive(Debug)]
pub struct Uplink {
    way: Way,
    /// The name of the network.
    pub network: String,
    /// What carries the packets, for logs and reports.
    pub name: String,
    /// What it counts.
    pub counters: Counters,
}

/// What carries the packets.
#[derive(Debug)]
enum Way {
    Tap(TapPort),
    Tunnel(Tunnel),
}

impl Uplink {
    /// Opens an uplink.
    pub fn open(spec: &UplinkSpec) -> Result<Arc<Self>, Error> {
        let way = match &spec.way {
            WaySpec::Tap(name) => Way::Tap(TapPort::open(name)?),
            WaySpec::Tunnel(spec) => Way::Tunnel(Tunnel::open(spec)?),
        };
        let (network, name) = (spec.network.clone(), spec.way.to_string());
        let counters = Counters::new(&name);
        Ok(Arc::new(Self { way, network, name, counters }))
    }

    /// Brings frames to the guests of a network until `end` is closed.
    pub fn run(&self, fabric: &Fabric, end: &UnixStream) {
        let mut room = match &self.way {
            Way::Tap(_) => TapPort::room(),
            Way::Tunnel(_) => Tunnel::room(),
        };
        let uplink = &self.name;
        loop {
            let mut fds = [PollFd::new(self, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(uplink, %error, "the uplink ends"),
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            for _ in 0..BURST {
                match self.receive(&mut room, fabric) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return tracing::error!(uplink, %error, "the uplink ends"),
                }
            }
        }
    }

    /// Takes frames that have come, and brings them to the guests.
    fn receive(&self, room: &mut [u8], fabric: &Fabric) -> Result<(), Error> {
        let counters = &self.counters;
        let deliver = |frame: &[u8], segment| {
            counters.count(Event::RxFrames);
            if !fabric.receive(frame, segment) {
                counters.count(Event::RxUnclaimed);
            }
        };
        match &self.way {
            Way::Tap(tap) => tap.receive(room, deliver),
            Way::Tunnel(tunnel) => tunnel.receive(room, counters, deliver),
        }
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.way {
            Way::Tap(tap) => tap.as_fd(),
            Way::Tunnel(tunnel) => tunnel.as_fd(),
        }
    }
}

impl engine::Uplink for Uplink {
    fn send(&self, segments: Segments<'_>) {
        match &self.way {
            Way::Tap(tap) => tap.send(segments, &self.counters),
            Way::Tunnel(tunnel) => tunnel.send(segments, &self.counters),
        }
    }
}
