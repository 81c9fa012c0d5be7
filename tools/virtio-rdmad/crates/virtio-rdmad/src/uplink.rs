// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The uplink of a network: what carries the packets of its guests to and from other hosts.

pub mod counters;
mod tap_port;
mod tunnel;

use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use roce::Segments;

use crate::uplink_spec::{UplinkSpec, WaySpec};
use counters::{Counters, Event};
use tap_port::TapPort;
use tunnel::Tunnel;

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
    /// Opens an uplink. With `trains` it may give several packets as one train.
    pub fn open(spec: &UplinkSpec, trains: bool) -> Result<Arc<Self>, Error> {
        let way = match &spec.way {
            WaySpec::Tap(name) => Way::Tap(TapPort::open(name, trains)?),
            WaySpec::Tunnel(spec) => Way::Tunnel(Tunnel::open(spec)?),
        };
        let (network, name) = (spec.network.clone(), spec.way.to_string());
        let counters = Counters::new(&name);
        Ok(Arc::new(Self { way, network, name, counters }))
    }

    /// Returns the room that [`Uplink::receive`] needs.
    pub fn room(&self) -> Vec<u8> {
        match &self.way {
            Way::Tap(_) => TapPort::room(),
            Way::Tunnel(_) => Tunnel::room(),
        }
    }

    /// Takes frames that have come, and gives each to `deliver`, with the bytes of a segment if it is a train.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if nothing has come.
    pub fn receive(
        &self,
        room: &mut [u8],
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<(), Error> {
        let counters = &self.counters;
        let deliver = |frame: &[u8], segment| {
            counters.count(Event::RxFrames);
            deliver(frame, segment);
        };
        match &self.way {
            Way::Tap(tap) => tap.receive(room, deliver),
            Way::Tunnel(tunnel) => tunnel.receive(room, counters, deliver),
        }
    }

    /// Sends a frame or a train.
    pub fn send(&self, segments: Segments<'_>) {
        match &self.way {
            Way::Tap(tap) => tap.send(segments, &self.counters),
            Way::Tunnel(tunnel) => tunnel.send(segments, &self.counters),
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
