// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The uplink of a network: what carries the packets of its guests to and from other hosts.

mod adapters;
mod buffers;
pub mod counters;
#[cfg(test)]
pub(crate) mod namespace;
mod port;
mod room;
mod spec;
mod tunnel;

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::num::NonZeroU8;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use roce::Segments;
use tap::Carrier;

use crate::forwarding::Mac;
use counters::Counters;
pub use counters::UplinkCounter;
use port::Port;
pub use room::Room;
pub use spec::{PortSpec, TunnelSpec, WaySpec};
use tunnel::Tunnel;

/// The uplink of a network.
#[derive(Debug)]
pub struct Uplink {
    way: Way,
    /// The name of the network.
    pub network: String,
    /// The name of the way that carries the packets, for logs and reports.
    pub name: String,
    /// Whether it carries what network interfaces of guests send and are sent: a tap must not give whole trains of
    /// packets to them, and a packet socket has packets of RoCE v2 alone.
    pub takes_nics: bool,
    /// The counters of the uplink.
    pub counters: Counters,
    /// Whether what carries the packets is gone.
    is_gone: AtomicBool,
    /// The carrier that the ports of the guests follow, if there is one.
    carrier: Option<Carrier>,
    /// Whether that was there when somebody looked last.
    had_carrier: AtomicBool,
}

/// The way that carries the packets.
#[derive(Debug)]
enum Way {
    Port(Port),
    Tunnel(Tunnel),
}

impl Uplink {
    /// Opens the uplink of the network of this name, with so many lanes if it can have them. The ports of its guests
    /// follow the interface `carrier`, if there is to be one. `have_nics` says whether guests of it have network
    /// interfaces, and `stations` are the MAC addresses of its guests; `None`: one of them has an address that is not
    /// known.
    ///
    /// # Errors
    ///
    /// The way of the packets is not there, belongs to another process, or cannot carry them to network interfaces; or
    /// there is no interface `carrier`.
    pub fn open(
        network: &str,
        way: &WaySpec,
        carrier: Option<&str>,
        have_nics: bool,
        stations: Option<&[Mac]>,
        lanes: NonZeroU8,
    ) -> Result<Arc<Self>, Error> {
        let takes_nics = match way {
            WaySpec::Tap(_) => have_nics,
            WaySpec::Interface(_) => false,
            WaySpec::Tunnel(_) => true,
        };
        let name = way.to_string();
        let opened = match way {
            // A train of packets that are not of RoCE v2 is of no use to an interface.
            WaySpec::Tap(spec) => Way::Port(Port::tap(spec, !have_nics, lanes)?),
            WaySpec::Interface(_) if have_nics => {
                let reason = "guests that have nic= need a tap or a tunnel";
                return Err(Error::new(ErrorKind::InvalidInput, reason));
            }
            WaySpec::Interface(spec) => Way::Port(Port::sockets(spec, &name, stations, lanes)?),
            WaySpec::Tunnel(spec) => Way::Tunnel(Tunnel::open(spec)?),
        };
        adapters::warn(Path::new(adapters::SYSFS), network, way);
        let (way, counters) = (opened, Counters::new(&name));
        let carrier = carrier.map(Carrier::open).transpose()?;
        let (network, is_gone, had_carrier) = (network.to_owned(), false.into(), true.into());
        Ok(Arc::new(Self {
            way,
            network,
            name,
            takes_nics,
            counters,
            is_gone,
            carrier,
            had_carrier,
        }))
    }

    /// Sets the MAC addresses of the guests to which the uplink carries packets, as in [`Self::open`]. Any thread may
    /// call this.
    ///
    /// # Errors
    ///
    /// The errors of [`tap::PacketSocket::set_stations`]. On an error the uplink goes on to carry packets to the guests
    /// that it carried them to before, as far as they are among the new ones.
    pub fn set_stations(&self, stations: Option<&[Mac]>) -> Result<(), Error> {
        match &self.way {
            Way::Port(port) => port.set_stations(stations),
            Way::Tunnel(_) => Ok(()),
        }
    }

    /// Returns the number of lanes. Threads can take in what comes over different lanes at the same time.
    pub fn lanes(&self) -> usize {
        match &self.way {
            Way::Port(port) => port.lanes(),
            Way::Tunnel(_) => 1,
        }
    }

    /// Returns the lane of a guest with this MAC address, over which its packets come as far as the uplink can choose.
    pub fn lane_of(&self, mac: Mac) -> usize {
        match &self.way {
            Way::Port(port) => port.lane_of(mac),
            Way::Tunnel(_) => 0,
        }
    }

    /// Returns the room that [`Uplink::receive`] needs.
    pub fn room(&self) -> Room {
        let bytes = match &self.way {
            Way::Port(port) => port.room(),
            Way::Tunnel(_) => Tunnel::room(),
        };
        Room { bytes, frames: usize::MAX }
    }

    /// Takes frames that have come over a lane, and gives each to `deliver`, with the bytes of a segment if it is a
    /// train. Returns whether more may wait. If not, the caller can do other work before the next call.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if nothing has come.
    pub fn receive(
        &self,
        lane: usize,
        room: &mut Room,
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<bool, Error> {
        let counters = &self.counters;
        let deliver = |frame: &[u8], segment| {
            counters.count(UplinkCounter::RxFrames);
            deliver(frame, segment);
        };
        match &self.way {
            Way::Port(port) => port.receive(lane, room, counters, deliver),
            Way::Tunnel(tunnel) => {
                tunnel.receive(&mut room.bytes, counters, deliver).map(|()| true)
            }
        }
    }

    /// Sends a frame or a train. `inherits` says whether a tunnel sends it in the class of traffic (DSCP) that it has.
    /// Returns how many times it has left the host.
    pub fn send(&self, segments: Segments<'_>, inherits: bool) -> usize {
        match &self.way {
            Way::Port(port) => {
                port.send(segments, &self.counters);
                1
            }
            Way::Tunnel(tunnel) => tunnel.send(segments, inherits, &self.counters),
        }
    }

    /// Returns whether something can come over a lane: the interface was there when somebody looked last, and the lane
    /// belongs to it.
    pub fn has_lane(&self, lane: usize) -> bool {
        let has_lane = match &self.way {
            Way::Port(port) => lane < port.attached(),
            Way::Tunnel(_) => true,
        };
        has_lane && !self.is_gone.load(Ordering::Relaxed)
    }

    /// Looks after what carries the packets: looks up the routes of a tunnel, or goes on with an interface that was
    /// removed and made again, and returns whether it was. Whoever waits for what comes has to begin once more then. One
    /// thread calls this now and then.
    pub fn look_after(&self) -> bool {
        let (network, uplink) = (&self.network, &self.name);
        let port = match &self.way {
            Way::Port(port) => port,
            Way::Tunnel(tunnel) => {
                tunnel.look_after(network, uplink);
                return false;
            }
        };
        match port.follow() {
            Ok(is_new) => {
                if self.is_gone.swap(false, Ordering::Relaxed) || is_new {
                    let (queues, wanted) = (port.attached(), port.lanes());
                    tracing::info!(
                        network,
                        uplink,
                        queues,
                        wanted,
                        "the interface of the uplink is there again"
                    );
                }
                is_new
            }
            Err(error) => {
                if !self.is_gone.swap(true, Ordering::Relaxed) {
                    tracing::warn!(network, uplink, %error, "the interface of the uplink is gone");
                }
                false
            }
        }
    }

    /// Returns whether the interface that the ports of the guests follow has a carrier; `None` if they follow no
    /// interface. One thread calls this now and then.
    pub fn has_carrier(&self) -> Option<bool> {
        let has_carrier = self.carrier.as_ref()?.is_up();
        if self.had_carrier.swap(has_carrier, Ordering::Relaxed) != has_carrier {
            let (network, uplink) = (&self.network, &self.name);
            if has_carrier {
                tracing::info!(
                    network,
                    uplink,
                    "there is a carrier again: the ports of the guests are up"
                );
            } else {
                tracing::warn!(
                    network,
                    uplink,
                    "there is no carrier: the ports of the guests are down"
                );
            }
        }
        Some(has_carrier)
    }

    /// Returns the counters by name.
    pub fn read_counters(&self) -> BTreeMap<String, u64> {
        if let Way::Port(port) = &self.way {
            port.count_losses(&self.counters);
        }
        self.counters.read()
    }

    /// Returns the descriptor that becomes readable when something comes over a lane.
    pub fn fd(&self, lane: usize) -> BorrowedFd<'_> {
        match &self.way {
            Way::Port(port) => port.fd(lane),
            Way::Tunnel(tunnel) => tunnel.as_fd(),
        }
    }
}
