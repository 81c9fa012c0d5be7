// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An uplink over VXLAN (RFC 7348): frames go to other hosts in UDP datagrams, which the kernel routes.
//!
//! The other ends are daemons of this kind or the kernel's own vxlan devices (the kernel's
//! Documentation/networking/vxlan.rst). The command line names them all. The tunnel learns which of them
//! has which MAC address. A frame for an address that it does not know, or for a group, goes to all of
//! them (head-end replication); no frame goes from one of them to another one.

use std::cell::RefCell;
use std::io::{Error, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSocketState};
use roce::{Segments, Split};
use rustix::net::sockopt;

use super::buffers::{self, Direction};
use super::counters::{Counters, UplinkCounter};
use super::spec::TunnelSpec;
use crate::forwarding::{self, Learnt, Mac, Table, AGEING_TIME};
use crate::vxlan::congestion::{self, Ecn};
use crate::vxlan::{self, Vni};

/// Most MAC addresses that the tunnel knows the places of.
const STATIONS: usize = 4096;
/// Buffers for datagrams that come, and the bytes of each. The kernel puts datagrams of one flow behind
/// one another into a buffer.
const BUFFERS: usize = 8;
const BUFFER: usize = 64 << 10;
/// Most bytes and most datagrams that the kernel takes at once (the kernel's `udp_send_skb()`, and
/// `UDP_MAX_SEGMENTS` before Linux 6.9).
const MOST_BYTES: usize = 65_000;
const MOST_DATAGRAMS: usize = 64;

thread_local! {
    /// Datagrams that are being made.
    static DATAGRAMS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The end of a tunnel.
#[derive(Debug)]
pub struct Tunnel {
    socket: UdpSocket,
    state: UdpSocketState,
    vni: Vni,
    remotes: Vec<Remote>,
    /// The remote of each address, as an index of `remotes`.
    stations: Mutex<Table<usize>>,
}

/// Another end of the tunnel.
#[derive(Debug)]
struct Remote {
    address: SocketAddr,
    /// Bytes of the longest datagram that the route to it carries.
    most: usize,
}

impl Tunnel {
    /// Opens the end of a tunnel.
    pub fn open(spec: &TunnelSpec) -> Result<Self, Error> {
        let socket = UdpSocket::bind((spec.local, spec.port))?;
        let state = UdpSocketState::new((&socket).into())?;
        buffers::enlarge(&socket, Direction::In, &spec.to_string());
        let remote = |ip: &IpAddr| {
            let address = SocketAddr::new(*ip, spec.port);
            Ok(Remote { address, most: longest_datagram(spec.local, address)? })
        };
        let remotes = spec.remotes.iter().map(remote).collect::<Result<_, Error>>()?;
        let stations = Mutex::new(Table::new(STATIONS, AGEING_TIME));
        Ok(Self { socket, state, vni: spec.vni, remotes, stations })
    }

    /// Returns the room that [`Tunnel::receive`] needs.
    pub fn room() -> Vec<u8> {
        vec![0; BUFFERS * BUFFER]
    }

    /// Takes frames that have come, and gives each to `deliver`.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if nothing has come.
    pub fn receive(
        &self,
        room: &mut [u8],
        counters: &Counters,
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<(), Error> {
        let mut metas = [RecvMeta::default(); BUFFERS];
        let mut buffers: Vec<_> = room.chunks_mut(BUFFER).map(IoSliceMut::new).collect();
        let count = match self.state.recv((&self.socket).into(), &mut buffers, &mut metas) {
            Ok(count) => count,
            Err(error) if is_of_a_sent_datagram(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        for (buffer, meta) in buffers.iter_mut().zip(&metas[..count]) {
            let len = meta.len.min(buffer.len());
            for packet in buffer[..len].chunks_mut(meta.stride.max(1)) {
                if let Some(frame) = self.arrive(packet, meta, now, counters) {
                    deliver(frame, 0);
                }
            }
        }
        Ok(())
    }

    /// Returns the frame in a packet that came; `None` if the packet was dropped.
    fn arrive<'a>(
        &self,
        packet: &'a mut [u8],
        meta: &RecvMeta,
        now: Instant,
        counters: &Counters,
    ) -> Option<&'a mut [u8]> {
        let source = meta.addr.ip();
        let Some(remote) = self.remotes.iter().position(|remote| remote.address.ip() == source)
        else {
            counters.report(
                UplinkCounter::RxStranger,
                format_args!("a packet from {source}, which is not a remote"),
            );
            return None;
        };
        let (vni, frame) = match vxlan::decode(packet) {
            Ok(decoded) => decoded,
            Err(malformed) => {
                counters
                    .report(UplinkCounter::RxMalformed, format_args!("{malformed} from {source}"));
                return None;
            }
        };
        if vni != self.vni {
            counters.report(
                UplinkCounter::RxOtherVni,
                format_args!("a packet of network {} from {source}", vni.get()),
            );
            return None;
        }
        let (_, station) = forwarding::addresses(frame)?;
        let learnt = self.stations().learn(station, remote, now);
        match learnt {
            Learnt::Yes => {}
            Learnt::Full => {
                counters.report(
                    UplinkCounter::TableFull,
                    format_args!("more than {STATIONS} MAC addresses behind the tunnel"),
                );
            }
            Learnt::Group => {
                counters.count(UplinkCounter::RxGroupSource);
                return None;
            }
        }
        if congestion::leave(frame, outer_mark(meta.ecn)).is_err() {
            counters.count(UplinkCounter::RxCongested);
            return None;
        }
        Some(frame)
    }

    /// Sends a frame, or counts it as lost. Returns to how many other ends it went.
    pub fn send(&self, segments: Segments<'_>, counters: &Counters) -> usize {
        let Some((destination, _)) = forwarding::addresses(segments.frame) else { return 0 };
        let ecn = codepoint(congestion::of(segments.frame));
        DATAGRAMS.with_borrow_mut(|datagrams| {
            datagrams.clear();
            let size = self.wrap(segments, datagrams);
            if let Some(remote) = self.find(destination) {
                self.send_to(remote, datagrams, size, ecn, counters);
                return 1;
            }
            counters.count(UplinkCounter::TxFlooded);
            for remote in &self.remotes {
                self.send_to(remote, datagrams, size, ecn, counters);
            }
            self.remotes.len()
        })
    }

    /// Writes the packets of a frame or a train behind one another. Returns the bytes of each of them; the
    /// last one may have fewer.
    fn wrap(&self, segments: Segments<'_>, datagrams: &mut Vec<u8>) -> usize {
        let Segments { frame, segment, .. } = segments;
        let header = vxlan::header(self.vni);
        let (mut split, mut size) = (Split::new(frame, segment), 0);
        while let Some(packet) = split.next(frame) {
            datagrams.extend_from_slice(&header);
            datagrams.extend_from_slice(&frame[packet]);
            if size == 0 {
                size = datagrams.len();
            }
        }
        size
    }

    /// Returns the remote that has an address, if it is known.
    fn find(&self, mac: Mac) -> Option<&Remote> {
        if forwarding::is_group(mac) {
            return None;
        }
        self.remotes.get(self.stations().find(mac, Instant::now())?)
    }

    /// Sends datagrams of `size` bytes each, of which the last one may have fewer, to a remote.
    fn send_to(
        &self,
        remote: &Remote,
        datagrams: &[u8],
        size: usize,
        ecn: Option<EcnCodepoint>,
        counters: &Counters,
    ) {
        if size > remote.most {
            let Remote { address, most } = remote;
            return counters.report(
                UplinkCounter::TxTooLong,
                format_args!(
                    "a packet of {size} bytes to {}: its route carries {most}",
                    address.ip()
                ),
            );
        }
        let together = (MOST_BYTES / size.max(1)).clamp(1, self.most_together());
        for contents in datagrams.chunks(size * together) {
            let datagrams = || contents.chunks(size);
            let transmit = Transmit {
                destination: remote.address,
                ecn,
                contents,
                segment_size: Some(size),
                src_ip: None,
            };
            match self.state.try_send((&self.socket).into(), &transmit) {
                Ok(()) => datagrams().for_each(|_| _ = counters.count(UplinkCounter::TxFrames)),
                Err(error) => datagrams().for_each(|_| {
                    let ip = remote.address.ip();
                    counters
                        .report(UplinkCounter::TxLost, format_args!("a packet to {ip}: {error}"));
                }),
            }
        }
    }

    /// Returns how many datagrams the kernel takes at once. One, if its network card takes no more.
    fn most_together(&self) -> usize {
        self.state.max_gso_segments().clamp(1, MOST_DATAGRAMS)
    }

    fn stations(&self) -> std::sync::MutexGuard<'_, Table<usize>> {
        self.stations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Tunnel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the bytes of the longest datagram that the route to an address carries at present.
fn longest_datagram(local: IpAddr, remote: SocketAddr) -> Result<usize, Error> {
    let socket = UdpSocket::bind((local, 0))?;
    socket.connect(remote)?;
    let (mtu, headers) = match local {
        IpAddr::V4(_) => (sockopt::ip_mtu(&socket)?, 20 + 8),
        IpAddr::V6(_) => (sockopt::ipv6_mtu(&socket)?, 40 + 8),
    };
    Ok((mtu as usize).min(MOST_BYTES).saturating_sub(headers))
}

/// Returns whether an error tells of a datagram that was sent before: nobody listens there, or no route
/// leads there.
fn is_of_a_sent_datagram(error: &Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EMSGSIZE)
    )
}

fn codepoint(ecn: Ecn) -> Option<EcnCodepoint> {
    match ecn {
        Ecn::NotEct => None,
        Ecn::Ect0 => Some(EcnCodepoint::Ect0),
        Ecn::Ect1 => Some(EcnCodepoint::Ect1),
        Ecn::Ce => Some(EcnCodepoint::Ce),
    }
}

fn outer_mark(ecn: Option<EcnCodepoint>) -> Ecn {
    match ecn {
        None => Ecn::NotEct,
        Some(EcnCodepoint::Ect0) => Ecn::Ect0,
        Some(EcnCodepoint::Ect1) => Ecn::Ect1,
        Some(EcnCodepoint::Ce) => Ecn::Ce,
    }
}

#[cfg(test)]
mod tests;
