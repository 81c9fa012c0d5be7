// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An uplink over VXLAN (RFC 7348): frames go to other hosts in UDP datagrams, which the kernel routes.
//!
//! The other ends are daemons of this kind or the kernel's own vxlan devices (the kernel's
//! Documentation/networking/vxlan.rst). The command line names them all. The tunnel learns which of them
//! has which MAC address. A frame for an address that it does not know, or for a group, goes to all of
//! them (head-end replication); no frame goes from one of them to another one.

use std::cell::RefCell;
use std::io::{Error, ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use quinn_udp::{EcnCodepoint, RecvMeta, UdpSocketState};
use roce::{Segments, Split};
use rustix::net::{connect, sockopt};
use tap::UdpSender;

use super::buffers::{self, Direction};
use super::counters::{Counters, UplinkCounter};
use super::spec::TunnelSpec;
use crate::forwarding::{self, Learnt, Mac, Table, AGEING_TIME};
use crate::vxlan::congestion::{self, Ecn};
use crate::vxlan::{self, inner, Vni};

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
/// The number of ports that frames are sent from. Each flow has one of them, so that flows have different paths, members
/// of a link aggregation and receive queues, and the frames of one flow keep their order.
const SENDERS: usize = 16;
/// The first port that frames are sent from (RFC 7348, section 5).
const FIRST_PORT: u16 = 49152;

thread_local! {
    /// Datagrams that are being made.
    static DATAGRAMS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The end of a tunnel.
#[derive(Debug)]
pub struct Tunnel {
    /// The socket to which packets come, and which sends nothing.
    socket: UdpSocket,
    state: UdpSocketState,
    /// The sockets that send.
    senders: Vec<UdpSender>,
    /// A socket by which routes are looked up. It sends nothing.
    router: UdpSender,
    vni: Vni,
    remotes: Vec<Remote>,
    /// The remote of each address, as an index of `remotes`.
    stations: Mutex<Table<usize>>,
}

/// Another end of the tunnel.
#[derive(Debug)]
struct Remote {
    address: SocketAddr,
    /// Bytes of the longest datagram that the route to it carries, when somebody looked last.
    most: AtomicUsize,
    /// Whether the kernel takes several datagrams to it at once.
    takes_trains: AtomicBool,
}

/// Datagrams of one flow.
#[derive(Clone, Copy, Debug)]
struct Outgoing<'a> {
    /// The number of the flow.
    flow: u64,
    /// The traffic class of the packets around the frames.
    class: u8,
    /// The bytes of each datagram but the last, which may have fewer.
    size: usize,
    /// The datagrams, one behind the other.
    bytes: &'a [u8],
}

impl Tunnel {
    /// Opens the end of a tunnel.
    pub fn open(spec: &TunnelSpec) -> Result<Self, Error> {
        let socket = UdpSocket::bind((spec.local, spec.port))?;
        let state = UdpSocketState::new((&socket).into())?;
        let senders = senders(spec.local)?;
        buffers::enlarge([&socket], Direction::In, &spec.to_string());
        buffers::enlarge(&senders, Direction::Out, &spec.to_string());
        let router = UdpSender::open((spec.local, 0).into())?;
        let remote = |ip: &IpAddr| {
            let address = SocketAddr::new(*ip, spec.port);
            let most = longest_datagram(&router, address)?.into();
            Ok(Remote { address, most, takes_trains: true.into() })
        };
        let remotes = spec.remotes.iter().map(remote).collect::<Result<_, Error>>()?;
        let stations = Mutex::new(Table::new(STATIONS, AGEING_TIME));
        Ok(Self { socket, state, senders, router, vni: spec.vni, remotes, stations })
    }

    /// Looks up once more what the routes to the remotes carry. One thread calls this now and then. It needs no
    /// capability.
    pub fn look_after(&self, network: &str, uplink: &str) {
        for Remote { address, most, .. } in &self.remotes {
            // While there is no route, nothing is sent there.
            let Ok(bytes) = longest_datagram(&self.router, *address) else { continue };
            let before = most.swap(bytes, Ordering::Relaxed);
            if before != bytes {
                let remote = address.ip();
                tracing::info!(
                    network,
                    uplink,
                    %remote,
                    before,
                    bytes,
                    "the route carries longer or shorter packets than before"
                );
            }
        }
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
        let count = self.state.recv((&self.socket).into(), &mut buffers, &mut metas)?;
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

    /// Sends a frame, or counts it as lost. The packet around it has its marks of congestion (RFC 6040), and with
    /// `inherits` also its DSCP, else 0. Returns to how many other ends it went.
    pub fn send(&self, segments: Segments<'_>, inherits: bool, counters: &Counters) -> usize {
        let Some((destination, _)) = forwarding::addresses(segments.frame) else { return 0 };
        let (flow, class) = (inner::flow(segments.frame), outer_class(segments.frame, inherits));
        DATAGRAMS.with_borrow_mut(|datagrams| {
            datagrams.clear();
            let size = self.wrap(segments, datagrams);
            let outgoing = Outgoing { flow, class, size, bytes: datagrams };
            if let Some(remote) = self.find(destination) {
                self.send_to(remote, outgoing, counters);
                return 1;
            }
            counters.count(UplinkCounter::TxFlooded);
            for remote in &self.remotes {
                self.send_to(remote, outgoing, counters);
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

    /// Sends datagrams to a remote.
    fn send_to(&self, remote: &Remote, outgoing: Outgoing<'_>, counters: &Counters) {
        let Outgoing { flow, class, size, bytes } = outgoing;
        let (Remote { address, takes_trains, .. }, ip) = (remote, remote.address.ip());
        let most = remote.most.load(Ordering::Relaxed);
        let Some(segment) = u16::try_from(size).ok().filter(|_| (1..=most).contains(&size)) else {
            return counters.report(
                UplinkCounter::TxTooLong,
                format_args!("a packet of {size} bytes to {ip}: its route carries {most}"),
            );
        };
        let index = usize::try_from(flow % self.senders.len() as u64).unwrap_or(0);
        let sender = &self.senders[index];
        let send = |part: &[u8]| sender.send(*address, class, part, segment);
        let together = if takes_trains.load(Ordering::Relaxed) { MOST_DATAGRAMS } else { 1 };
        for part in bytes.chunks(size * (MOST_BYTES / size).clamp(1, together)) {
            match send(part) {
                Err(error) if part.len() > size && is_of_a_train(&error) => {
                    let sent =
                        part.chunks(size).map(|datagram| count(&send(datagram), 1, ip, counters));
                    // Otherwise there is another reason than that they were together.
                    if sent.filter(|is_sent| *is_sent).count() > 0
                        && takes_trains.swap(false, Ordering::Relaxed)
                    {
                        let uplink = counters.uplink();
                        tracing::info!(uplink, remote = %ip, %error, "packets go there one by one");
                    }
                }
                sent => _ = count(&sent, part.len().div_ceil(size), ip, counters),
            }
        }
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

/// Returns the bytes of the longest datagram that the route to an address carries at present. The socket is connected
/// for this: the kernel looks up the route then.
fn longest_datagram(router: &UdpSender, remote: SocketAddr) -> Result<usize, Error> {
    connect(router, &remote)?;
    let (mtu, headers) = match remote {
        SocketAddr::V4(_) => (sockopt::ip_mtu(router)?, 20 + 8),
        SocketAddr::V6(_) => (sockopt::ipv6_mtu(router)?, 40 + 8),
    };
    Ok((mtu as usize).min(MOST_BYTES).saturating_sub(headers))
}

/// Opens the sockets that send, at the first ports that nobody has.
fn senders(local: IpAddr) -> Result<Vec<UdpSender>, Error> {
    let mut senders = Vec::new();
    for port in FIRST_PORT..=u16::MAX {
        match UdpSender::open((local, port).into()) {
            Ok(sender) => senders.push(sender),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
        if senders.len() == SENDERS {
            return Ok(senders);
        }
    }
    Err(ErrorKind::AddrInUse.into())
}

/// Returns whether an error may be one of several datagrams that are sent together.
fn is_of_a_train(error: &Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIO))
}

/// Counts datagrams to an address. Returns whether they were sent.
fn count(sent: &Result<(), Error>, datagrams: usize, to: IpAddr, counters: &Counters) -> bool {
    for _ in 0..datagrams {
        match sent {
            Ok(()) => _ = counters.count(UplinkCounter::TxFrames),
            Err(error) => {
                // The route has changed since somebody looked last.
                let is_too_long = error.raw_os_error() == Some(libc::EMSGSIZE);
                let event =
                    if is_too_long { UplinkCounter::TxTooLong } else { UplinkCounter::TxLost };
                counters.report(event, format_args!("a packet to {to}: {error}"));
            }
        }
    }
    sent.is_ok()
}

/// Returns the traffic class of the packet around a frame.
fn outer_class(frame: &[u8], inherits: bool) -> u8 {
    if inherits {
        inner::traffic_class(frame)
    } else {
        congestion::of(frame).bits()
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
