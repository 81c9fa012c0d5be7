// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An uplink over an interface of the kernel: a tap, which the administrator has put on a bridge, or a
//! packet socket on an interface that is there anyway.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use roce::{Segments, Split};
use tap::{PacketSocket, Tap, TrainShape};

use super::buffers::{self, Direction};
use super::counters::{Counters, UplinkCounter};
use super::room::Room;
use super::spec::PortSpec;
use crate::forwarding::Mac;

/// Bytes of the longest frame, which is a train of packets.
const FRAME: usize = 64 << 10;
/// Room for the header that the kernel puts in front of a frame.
const HEADER: usize = 64;
/// About the most bytes of frames that are taken at once.
const BYTES: usize = 128 << 10;

/// A port of this process in the kernel's network.
#[derive(Debug)]
pub struct Port {
    interface: Interface,
    /// Whether trains are wanted.
    trains: bool,
    /// Whether the kernel is given trains: they are wanted, and it takes them apart.
    gives_trains: AtomicBool,
}

/// The interface by which the process has the port.
#[derive(Debug)]
enum Interface {
    Tap(Tap),
    Socket(PacketSocket),
}

impl Port {
    /// Opens a tap. With `whole`, trains that come stay whole if this kernel can leave them so, and trains are sent.
    pub fn tap(spec: &PortSpec, whole: bool) -> Result<Self, Error> {
        let (tap, trains) = (Tap::open(&spec.name, whole)?, spec.trains && whole);
        if trains && !tap.takes_trains() {
            log_single_packets(&spec.name);
        }
        let gives_trains = (trains && tap.takes_trains()).into();
        Ok(Self { interface: Interface::Tap(tap), trains, gives_trains })
    }

    /// Opens a packet socket for these stations, as [`PacketSocket::open`]. `uplink` is its name in the log.
    pub fn socket(spec: &PortSpec, uplink: &str, stations: Option<&[Mac]>) -> Result<Self, Error> {
        let PortSpec { name, trains } = spec;
        let socket = PacketSocket::open(name, stations)?;
        buffers::enlarge([&socket], Direction::In, uplink);
        buffers::enlarge([&socket], Direction::Out, uplink);
        // Whether a kernel takes trains is known when it refuses the first one.
        let gives_trains = (*trains).into();
        Ok(Self { interface: Interface::Socket(socket), trains: *trains, gives_trains })
    }

    /// Replaces the stations of a packet socket, as [`PacketSocket::set_stations`]. A tap has none.
    pub fn set_stations(&self, stations: Option<&[Mac]>) -> Result<(), Error> {
        match &self.interface {
            Interface::Tap(_) => Ok(()),
            Interface::Socket(socket) => socket.set_stations(stations),
        }
    }

    /// Returns the room that [`Port::receive`] needs.
    pub fn room(&self) -> Vec<u8> {
        match &self.interface {
            Interface::Tap(_) => vec![0; HEADER + FRAME],
            Interface::Socket(_) => PacketSocket::room(),
        }
    }

    /// Takes frames that have come, one of a tap or several of a packet socket, and gives each to `deliver`, with the
    /// bytes of a segment if it is a train. Returns whether more may wait.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::receive`] and [`PacketSocket::receive`], but not those that concern one frame only,
    /// which are counted.
    pub fn receive(
        &self,
        room: &mut Room,
        counters: &Counters,
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<bool, Error> {
        let received = match &self.interface {
            Interface::Tap(tap) => {
                let received = tap.receive(&mut room.bytes);
                received.map(|(frame, segment)| deliver(frame, segment)).map(|()| true)
            }
            Interface::Socket(socket) => receive(socket, room, deliver),
        };
        match received {
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                counters.report(UplinkCounter::RxError, "a frame is lost that no header describes");
                Ok(true)
            }
            received => received,
        }
    }

    /// Sends a frame, or counts it as lost.
    pub fn send(&self, segments: Segments<'_>, counters: &Counters) {
        let Segments { frame, segment, udp } = segments;
        if segment != 0 && self.gives_trains.load(Ordering::Relaxed) {
            match self.give(frame, Some(TrainShape { segment, udp })) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    self.refuse_trains(counters);
                }
                sent => return count(sent, counters),
            }
        }
        let mut split = Split::new(frame, segment);
        while let Some(packet) = split.next(frame) {
            count(self.give(&frame[packet], None), counters);
        }
    }

    /// Goes on with the interface of the same name, if that is another one than before. Returns whether it is.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::follow`] and [`PacketSocket::follow`].
    pub fn follow(&self) -> Result<bool, Error> {
        match &self.interface {
            Interface::Tap(tap) => {
                let is_new = tap.follow()?;
                if is_new {
                    let gives_trains = self.trains && tap.takes_trains();
                    self.gives_trains.store(gives_trains, Ordering::Relaxed);
                }
                Ok(is_new)
            }
            Interface::Socket(socket) => socket.follow(),
        }
    }

    fn give(&self, frame: &[u8], train: Option<TrainShape>) -> Result<(), Error> {
        match &self.interface {
            Interface::Tap(tap) => tap.send(frame, train),
            Interface::Socket(socket) => socket.send(frame, train),
        }
    }

    /// Sends packets one by one from now on.
    fn refuse_trains(&self, counters: &Counters) {
        if self.gives_trains.swap(false, Ordering::Relaxed) {
            log_single_packets(counters.uplink());
        }
    }

    /// Counts the frames that have come and were lost since the last call.
    pub fn count_losses(&self, counters: &Counters) {
        if let Interface::Socket(socket) = &self.interface {
            counters.add(UplinkCounter::RxLost, socket.take_losses().unwrap_or(0).into());
        }
    }
}

/// Takes frames of a socket. The next call takes so many that they are about [`BYTES`] if they are as long as these.
fn receive(
    socket: &PacketSocket,
    room: &mut Room,
    mut deliver: impl FnMut(&[u8], u16),
) -> Result<bool, Error> {
    let (mut frames, mut bytes) = (0, 0);
    let is_full = socket.receive(&mut room.bytes, room.frames, |frame, segment| {
        (frames, bytes) = (frames + 1, bytes + frame.len());
        deliver(frame, segment);
    })?;
    room.frames = (BYTES * frames / bytes.max(1)).max(1);
    Ok(is_full)
}

fn log_single_packets(uplink: &str) {
    tracing::info!(uplink, "this kernel takes packets one by one (Linux 6.2 takes trains)");
}

fn count(sent: Result<(), Error>, counters: &Counters) {
    match sent {
        Ok(()) => _ = counters.count(UplinkCounter::TxFrames),
        Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
            counters
                .report(UplinkCounter::TxTooLong, "a packet is longer than the interface carries");
        }
        Err(error) => {
            counters.report(UplinkCounter::TxLost, format_args!("a packet is lost: {error}"));
        }
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.interface {
            Interface::Tap(tap) => tap.as_fd(),
            Interface::Socket(socket) => socket.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests;
