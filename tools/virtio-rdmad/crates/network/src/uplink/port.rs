// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An uplink over an interface of the kernel: a tap, which the administrator has put on a bridge, or packet
//! sockets on an interface that is there anyway.
//!
//! It has lanes, so that several threads can take frames in at the same time: each lane is a packet socket or a queue
//! of a tap. All that comes for one MAC address comes over the lane of that address if the lanes are packet sockets.
//! The kernel chooses the queue of a tap by the flow: by a hash, until this process sends a packet of the flow, and then
//! the queue of that packet, until nothing was sent for 3 s (`TUN_FLOW_EXPIRE` of the kernel's drivers/net/tun.c). Where
//! that changes, packets of a connection may overtake each other; otherwise they come over one lane, in their order.

use std::io::{Error, ErrorKind};
use std::num::NonZeroU8;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use roce::{Segments, Split};
use tap::{PacketSocket, Share, Tap, TrainShape};

use super::buffers::{self, Direction};
use super::counters::{Counters, UplinkCounter};
use super::room::Room;
use super::spec::PortSpec;
use crate::forwarding::{self, Mac};

/// Bytes of the longest frame, which is a train of packets.
const FRAME: usize = 64 << 10;
/// Room for the header that the kernel puts in front of a frame.
const HEADER: usize = 64;
/// About the most bytes of frames that are taken at once.
const BYTES: usize = 128 << 10;
/// Most packet sockets: each costs the kernel time for each frame that comes over the interface.
const MOST_SOCKETS: NonZeroU8 = NonZeroU8::new(4).unwrap();

/// A port of this process in the kernel's network.
#[derive(Debug)]
pub struct Port {
    /// The lanes, at least one.
    lanes: Vec<Lane>,
    /// The number of lanes, from the first one on, that belong to the interface: a tap that is made again may have
    /// fewer queues than before.
    attached: AtomicUsize,
    /// Whether trains are wanted.
    trains: bool,
    /// Whether the kernel is given trains: they are wanted, and it takes them apart.
    gives_trains: AtomicBool,
}

/// A lane of a port.
#[derive(Debug)]
enum Lane {
    Tap(Tap),
    Socket(PacketSocket),
}

impl Port {
    /// Opens a tap, with so many lanes if it was made with `multi_queue`. With `whole`, trains that come stay whole if
    /// this kernel can leave them so, and trains are sent.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::open`]; `ResourceBusy` if another process has queues of the tap.
    pub fn tap(spec: &PortSpec, whole: bool, lanes: NonZeroU8) -> Result<Self, Error> {
        let (tap, trains) = (Tap::open(&spec.name, whole)?, spec.trains && whole);
        let gives_trains = trains && tap.takes_trains();
        if trains && !gives_trains {
            log_single_packets(&spec.name);
        }
        let others = open_others(&tap, lanes, &spec.name);
        // The kernel gives what comes to all queues, whoever has them.
        if tap.queues()?.is_some_and(|queues| queues > others.len() + 1) {
            return Err(ErrorKind::ResourceBusy.into());
        }
        let lanes = [tap].into_iter().chain(others).map(Lane::Tap).collect();
        Ok(Self::new(lanes, trains, gives_trains))
    }

    /// Opens packet sockets for these stations, as [`PacketSocket::open`]: one for each lane, and [`MOST_SOCKETS`] at
    /// most. `uplink` is the name of the port in the log.
    pub fn sockets(
        spec: &PortSpec,
        uplink: &str,
        stations: Option<&[Mac]>,
        lanes: NonZeroU8,
    ) -> Result<Self, Error> {
        let PortSpec { name, trains } = spec;
        let open = |share| PacketSocket::open(name, share, stations);
        let sockets = Share::divide(lanes.min(MOST_SOCKETS)).map(open);
        let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
        buffers::enlarge(&sockets, Direction::In, uplink);
        buffers::enlarge(&sockets, Direction::Out, uplink);
        let lanes = sockets.into_iter().map(Lane::Socket).collect();
        // Whether a kernel takes trains is known when it refuses the first one.
        Ok(Self::new(lanes, *trains, *trains))
    }

    fn new(lanes: Vec<Lane>, trains: bool, gives_trains: bool) -> Self {
        Self { attached: lanes.len().into(), lanes, trains, gives_trains: gives_trains.into() }
    }

    /// Returns the number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Returns the number of lanes, from the first one on, over which something can come.
    pub fn attached(&self) -> usize {
        self.attached.load(Ordering::Relaxed)
    }

    /// Returns the lane of a station: what comes for it comes over that lane, as far as this port can choose.
    pub fn lane_of(&self, mac: Mac) -> usize {
        share_of(mac, self.lanes.len())
    }

    /// Replaces the stations of packet sockets, as [`PacketSocket::set_stations`]. A tap has none. After an error some
    /// lanes may have the new stations.
    pub fn set_stations(&self, stations: Option<&[Mac]>) -> Result<(), Error> {
        self.lanes.iter().try_for_each(|lane| match lane {
            Lane::Tap(_) => Ok(()),
            Lane::Socket(socket) => socket.set_stations(stations),
        })
    }

    /// Returns the room that [`Port::receive`] needs.
    pub fn room(&self) -> Vec<u8> {
        match &self.lanes[0] {
            Lane::Tap(_) => vec![0; HEADER + FRAME],
            Lane::Socket(_) => PacketSocket::room(),
        }
    }

    /// Takes frames that have come over a lane, one of a tap or several of a packet socket, and gives each to
    /// `deliver`, with the bytes of a segment if it is a train. Returns whether more may wait.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::receive`] and [`PacketSocket::receive`], but not those that concern one frame only,
    /// which are counted.
    pub fn receive(
        &self,
        lane: usize,
        room: &mut Room,
        counters: &Counters,
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<bool, Error> {
        let received = match &self.lanes[lane] {
            Lane::Tap(tap) => {
                let received = tap.receive(&mut room.bytes);
                received.map(|(frame, segment)| deliver(frame, segment)).map(|()| true)
            }
            Lane::Socket(socket) => receive(socket, room, deliver),
        };
        match received {
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                counters.report(UplinkCounter::RxError, "a frame is lost that no header describes");
                Ok(true)
            }
            received => received,
        }
    }

    /// Sends a frame by the lane of its sender, or counts it as lost.
    pub fn send(&self, segments: Segments<'_>, counters: &Counters) {
        let Segments { frame, segment, udp } = segments;
        let (_, sender) = forwarding::addresses(frame).unwrap_or_default();
        let lane = &self.lanes[share_of(sender, self.attached())];
        if segment != 0 && self.gives_trains.load(Ordering::Relaxed) {
            match lane.give(frame, Some(TrainShape { segment, udp })) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    self.refuse_trains(counters);
                }
                sent => return count(sent, counters),
            }
        }
        let mut split = Split::new(frame, segment);
        while let Some(packet) = split.next(frame) {
            count(lane.give(&frame[packet], None), counters);
        }
    }

    /// Goes on with the interface of the same name, if that is another one than before. Returns whether it is.
    ///
    /// # Errors
    ///
    /// Those of [`Tap::follow`] and [`PacketSocket::follow`].
    pub fn follow(&self) -> Result<bool, Error> {
        let (mut is_new, mut attached) = (false, 0);
        for lane in &self.lanes {
            match lane.follow() {
                Ok(is_another) => is_new |= is_another,
                // Mostly the tap was made again without `multi_queue`. The next look tries it again.
                Err(_) if attached != 0 && matches!(lane, Lane::Tap(_)) => break,
                Err(error) => return Err(error),
            }
            attached += 1;
        }
        self.attached.store(attached, Ordering::Relaxed);
        if let (true, Lane::Tap(tap)) = (is_new, &self.lanes[0]) {
            let gives_trains = self.trains && tap.takes_trains();
            self.gives_trains.store(gives_trains, Ordering::Relaxed);
        }
        Ok(is_new)
    }

    /// Sends packets one by one from now on.
    fn refuse_trains(&self, counters: &Counters) {
        if self.gives_trains.swap(false, Ordering::Relaxed) {
            log_single_packets(counters.uplink());
        }
    }

    /// Counts the frames that have come and were lost since the last call.
    pub fn count_losses(&self, counters: &Counters) {
        for lane in &self.lanes {
            if let Lane::Socket(socket) = lane {
                counters.add(UplinkCounter::RxLost, socket.take_losses().unwrap_or(0).into());
            }
        }
    }

    /// Returns the descriptor that becomes readable when something comes over a lane.
    pub fn fd(&self, lane: usize) -> BorrowedFd<'_> {
        match &self.lanes[lane] {
            Lane::Tap(tap) => tap.as_fd(),
            Lane::Socket(socket) => socket.as_fd(),
        }
    }
}

impl Lane {
    fn follow(&self) -> Result<bool, Error> {
        match self {
            Self::Tap(tap) => tap.follow(),
            Self::Socket(socket) => socket.follow(),
        }
    }

    fn give(&self, frame: &[u8], train: Option<TrainShape>) -> Result<(), Error> {
        match self {
            Self::Tap(tap) => tap.send(frame, train),
            Self::Socket(socket) => socket.send(frame, train),
        }
    }
}

/// Opens the other queues of a tap for so many lanes, as far as it has them.
fn open_others(tap: &Tap, lanes: NonZeroU8, uplink: &str) -> Vec<Tap> {
    let mut others = Vec::new();
    while others.len() + 1 < lanes.get().into() {
        match tap.open_another() {
            Ok(other) => others.push(other),
            // It was made without `multi_queue`.
            Err(error) if error.kind() == ErrorKind::InvalidInput => break,
            Err(error) => {
                let queues = others.len() + 1;
                tracing::warn!(uplink, queues, %error, "the tap has fewer queues than workers");
                break;
            }
        }
    }
    others
}

/// Returns the index of the share that an address is in, of so many.
fn share_of(mac: Mac, shares: usize) -> usize {
    let shares = u8::try_from(shares).ok().and_then(NonZeroU8::new);
    shares.map_or(0, |shares| Share::index_of(mac, shares))
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

#[cfg(test)]
mod tests;
