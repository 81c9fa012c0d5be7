// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A packet socket: it takes frames that come over an interface, and sends frames over it (packet(7), the
//! kernel's `net/packet/af_packet.c`).
//!
//! A train that comes is one frame, as long as the kernel has not taken it apart, as from a peer on a pair
//! of veth. What comes from a network card is a packet, because the kernel merges packets of UDP for a
//! packet socket only if it merges them for everybody (`rx-udp-gro-forwarding` of ethtool).
//!
//! # Several frames by a system call
//! One system call takes up to 16 frames (recvmmsg(2)), and finds out whether more wait. Measured on a pair of veth, by
//! turns, in Linux 6.18 (`speed_of_receiving` in `tests/packet_socket.rs`), with a copy of each frame as the inbox of a
//! guest makes it: a packet of 100 bytes takes 1,000 ns with a system call of its own (recvmsg(2)), and 0.73 of that
//! with 4 to a call, 0.66 with 8 and 0.63 with 16. For 1,100 bytes these are 1,050 ns, 0.77, 0.71 and 0.69. A train of
//! 60,000 bytes takes 4.6 us in any case. To find that no frame waits takes 550 ns instead of 460.
//!
//! # Why there is no ring
//! The kernel can also write frames into memory that it shares with the process (PACKET_RX_RING), with
//! the same headers of VIRTIO. Measured on a pair of veth, by turns, in Linux 6.18: a block of
//! TPACKET_V3 is handed over when it is full or after a millisecond, so a single packet came after 580 us
//! instead of 22 us. The receiver of TPACKET_V2 used 1.9 to 2.9 us of processor time for a packet of 100
//! bytes, with a slot for a whole train or for a packet, and one system call for each packet used 1.2 to
//! 1.4 us. For a train of 60,000 bytes TPACKET_V2 used 3.1 to 4.9 us, and the system call 4.9 to 5.0 us.
//!
//! # Shares
//! Several threads take frames in at the same time from several sockets, each of which has a [`Share`] of the frames.
//! The kernel runs the programs of all of them for each frame that comes over the interface, which is about 0.1 us of
//! its time for each: with 2, 4 and 8 sockets, to send a frame over a pair of veth takes 1.0, 1.1 and 1.3 times as long
//! as with one (`speed_of_shares` in `tests/packet_socket.rs`).
//!
//! The kernel can also spread frames over a group of sockets by one program (PACKET_FANOUT). But a socket in a group
//! cannot be bound once more (`packet_do_bind()` returns EINVAL), which has to happen when an interface is made again.
//! Whoever opens another socket for that needs CAP_NET_RAW, which is given up by then. And the places of the sockets in
//! the group change when the interface goes down and comes up (`__fanout_unlink()`).
//!
//! # Why it is no AF_XDP socket
//! An AF_XDP socket shares memory with the kernel, too. A program of eBPF on the interface chooses the frames that the
//! kernel puts there, before the kernel makes packets of its own of them (Documentation/networking/af_xdp.rst). This is
//! what it would take:
//!
//! * A socket for each queue of the interface, because a socket belongs to one queue, and the card chooses the queue.
//! * A program that tells packets of RoCE v2 to guests from all others, with a map of the sockets and one of the
//!   stations. To load and to attach it takes CAP_BPF and CAP_NET_ADMIN (capabilities(7)), where a packet socket takes
//!   CAP_NET_RAW. The daemon changes the stations while it serves guests, so the sandbox would have to allow bpf(2).
//! * An interface that nobody else wants such a program on, or a program that calls others, as that of libxdp.
//! * Memory in pieces of a page at most. A frame that is longer than a piece is in several (XDP_USE_SG, Linux 6.6), and
//!   drivers limit the MTU if the program does not say that it can deal with that.
//! * New sockets, with the capabilities, for an interface that is made again: the kernel takes a socket away from an
//!   interface that is removed, and such a socket cannot be bound once more (`xsk_notifier()` in `net/xdp/xsk.c`).
//!
//! There are no trains: the program sees packets before the kernel merges them, and what is sent is not taken apart.
//!
//! It was measured over a pair of veth (Linux 6.18, two processors, one thread that sends 16 or 64 frames and then takes
//! them in, copying each once; an AF_XDP socket in its mode with copies beside recvmmsg(2) of 16 frames). To take in a
//! frame of 100 bytes costs the thread 33 to 73 ns instead of 540 to 710, and one of 1,100 bytes 48 to 98 instead of 620
//! to 710: there is no system call. All processor time of a frame, with what it takes to send it, is 0.79 to 0.95 of that
//! with a packet socket for 100 bytes (2.5 to 3.2 us), and 0.80 to 1.05 for 1,100 bytes (2.7 to 3.1 us): the work moves
//! to whoever sends, or to the kernel's thread. veth copies a packet that a socket has sent, for the program
//! (`veth_convert_skb_to_xdp_buff()` in `drivers/net/veth.c`), and the kernel copies it once more into the memory of the
//! socket (`__xsk_rcv()`).
//!
//! For messages it is a loss. A train of 60,000 bytes costs the thread 4.6 us, which is as much as 57 frames of
//! 1,100 bytes cost it by an AF_XDP socket, but the kernel brings 57 packets then, where a train is one. A program
//! at one end takes segmentation offload away from the other end (`veth_xdp_set()`), so the kernel takes each train
//! apart there. A card whose driver has a mode without copies is another matter, which nobody has measured here.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::net::{netdevice, socket_with, sockopt, AddressFamily, SocketFlags, SocketType};

use crate::filter;
use crate::header::{self, TrainShape};
use crate::share::Share;

/// The constants of the kernel's `include/uapi/linux/if_packet.h` that libc lacks.
const PACKET_ADD_MEMBERSHIP: libc::c_int = 1;
const PACKET_DROP_MEMBERSHIP: libc::c_int = 2;
const PACKET_STATISTICS: libc::c_int = 6;
const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const MR_PROMISC: u16 = 1;
const MR_ALLMULTI: u16 = 2;
const MR_UNICAST: u16 = 3;
const VLAN_VALID: u32 = 1 << 4;
const VLAN_TPID_VALID: u32 = 1 << 6;

/// The index of no interface.
const NONE: i32 = -1;

/// The type of the tag of a VLAN, if the kernel does not say (IEEE 802.1Q).
const VLAN_TPID: u16 = 0x8100;
/// The bytes of such a tag, and of the addresses in front of it.
const TAG: usize = 4;
const ADDRESSES: usize = 12;
/// The bytes of `struct cmsghdr`, and of it with `struct tpacket_auxdata` behind it, which is aligned.
const CONTROL_HEADER: usize = size_of::<usize>() + 8;
const CONTROL: usize = CONTROL_HEADER + 24;

/// Most frames that one system call takes.
const BATCH: usize = 16;
/// The bytes of a slot: room for the longest train, which is a packet of IP with the headers in front of it. Slots
/// begin at different places of the pages, because the beginnings of all frames would share a few lines of the caches.
const SLOT: usize = (64 << 10) + 27 * 64;

/// A packet socket on an interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: File,
    /// The name of the interface.
    name: String,
    /// Its index, as long as it is there.
    interface: AtomicI32,
    /// The share of the frames that the socket gets.
    share: Share,
    /// The addresses to which the interface takes frames.
    members: Mutex<BTreeSet<Member>>,
}

/// Addresses that an interface takes frames to: the kind of membership, and an address for MR_UNICAST.
type Member = (u16, [u8; 6]);

impl PacketSocket {
    /// Opens a socket that gets the packets of RoCE v2 in a share that come over the interface of this name: those to
    /// `stations` and to groups, or those to all if it is `None`. The interface then takes frames to these
    /// addresses, as far as its driver filters addresses. This needs CAP_NET_RAW, and nothing that the
    /// socket does later needs it.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` without CAP_NET_RAW, the error of `SIOCGIFINDEX` if there is no such interface,
    /// `InvalidInput` if it has no Ethernet header.
    pub fn open(name: &str, share: Share, stations: Option<&[[u8; 6]]>) -> Result<Self, Error> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        // Without a protocol it gets nothing until it is bound.
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        let this = Self {
            socket: File::from(socket),
            name: name.to_owned(),
            interface: NONE.into(),
            share,
            members: Mutex::default(),
        };
        for option in [PACKET_VNET_HDR, PACKET_AUXDATA, PACKET_IGNORE_OUTGOING] {
            this.set(option, &1_i32.to_ne_bytes())?;
        }
        // It gets nothing yet that is for others.
        attach(&this.socket, &filter::program(share, Some(&[])))?;
        this.follow()?;
        this.set_stations(stations)?;
        Ok(this)
    }

    /// Binds the socket to the interface of its name, if that is another one than before: it was removed and made
    /// again. Returns whether that was so. This needs no capability. Any thread may call it at any time.
    ///
    /// # Errors
    ///
    /// `ENODEV` while there is no such interface, and those of [`Self::open`]. A later call tries it once more.
    pub fn follow(&self) -> Result<bool, Error> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.interface.load(Ordering::Relaxed);
        let is_there = |index| netdevice::index_to_name_inlined(&self.socket, index).is_ok();
        if u32::try_from(before).is_ok_and(is_there) {
            return Ok(false);
        }
        let index = netdevice::name_to_index(&self.socket, &self.name)?;
        let index = i32::try_from(index).map_err(|_| ErrorKind::InvalidInput)?;
        self.interface.store(NONE, Ordering::Relaxed);
        for member in &*members {
            // One that is gone has no members.
            let _ = self.change(PACKET_DROP_MEMBERSHIP, before, *member);
        }
        // The error that tells of the end of the one before would be that of a frame.
        let _ = sockopt::socket_error(&self.socket);
        self.bind(index)?;
        let joined = members
            .iter()
            .try_for_each(|member| self.change(PACKET_ADD_MEMBERSHIP, index, *member));
        if joined.is_err() {
            // The kernel counts how often each was joined, and a later call joins all.
            members
                .iter()
                .for_each(|member| drop(self.change(PACKET_DROP_MEMBERSHIP, index, *member)));
        }
        joined?;
        self.interface.store(index, Ordering::Relaxed);
        Ok(true)
    }

    /// Replaces the stations, as [`Self::open`] has them. Frames to stations that stay go on to come. This needs no
    /// capability. Any thread may call it at any time.
    ///
    /// # Errors
    ///
    /// The error of setsockopt(2), for example that the program for so many stations is longer than
    /// `net.core.optmem_max` allows. The stations are those from before then.
    pub fn set_stations(&self, stations: Option<&[[u8; 6]]>) -> Result<(), Error> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let in_share = |stations: &[[u8; 6]]| {
            stations.iter().copied().filter(|mac| self.share.has(*mac)).collect::<Vec<_>>()
        };
        let stations = stations.map(in_share);
        let stations = stations.as_deref();
        let (wanted, interface) = (members_for(stations), self.interface.load(Ordering::Relaxed));
        let new: Vec<_> = wanted.difference(&members).copied().collect();
        let joined = new
            .iter()
            .try_for_each(|member| self.change(PACKET_ADD_MEMBERSHIP, interface, *member));
        let changed =
            joined.and_then(|()| attach(&self.socket, &filter::program(self.share, stations)));
        let gone =
            if changed.is_ok() { members.difference(&wanted).copied().collect() } else { new };
        for member in gone {
            // An address that was not joined cannot be left.
            let _ = self.change(PACKET_DROP_MEMBERSHIP, interface, member);
        }
        changed.map(|()| *members = wanted)
    }

    /// The most frames that one call of [`Self::receive`] takes.
    pub const BATCH: usize = BATCH;

    /// Returns the room that [`Self::receive`] needs for as many frames as it takes.
    pub fn room() -> Vec<u8> {
        vec![0; BATCH * SLOT]
    }

    /// Takes frames by one system call, at most `most` and [`Self::BATCH`], and as many as there is [room](Self::room)
    /// for. Gives each to `deliver`, in the order in which they came: its bytes, with the tag of its VLAN, and the
    /// bytes of a segment if it is a train, else 0. In a room that is too short for one frame, 4 bytes are for a tag,
    /// and a frame that does not fit behind them is cut off.
    ///
    /// Returns whether it took as many as it could. If not, no more waited, or an error is behind the frames.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no frame; `InvalidInput` if the kernel has dropped a frame that the header
    /// cannot describe, such as a train before Linux 6.2; what recvmsg(2) says if the interface is down or
    /// gone. The next call returns an error that is behind frames.
    pub fn receive(
        &self,
        room: &mut [u8],
        most: usize,
        mut deliver: impl FnMut(&[u8], u16),
    ) -> Result<bool, Error> {
        let mut said = [Said::default(); BATCH];
        let said = &mut said[..most.min(BATCH)];
        let count = self.receive_slots(room, said)?;
        for (slot, said) in room.chunks_mut(SLOT).zip(&said[..count]) {
            deliver(said.frame(slot), header::segment(said.header));
        }
        Ok(count == said.len())
    }

    /// Sends a frame over the interface. The kernel, or the interface, takes a train apart (Linux 6.2).
    ///
    /// # Errors
    ///
    /// The error of write(2): `InvalidInput` for a train on an older kernel, `WouldBlock` while too much
    /// waits to be sent, `NetworkDown` while the interface is down, EMSGSIZE for a packet that is longer
    /// than it carries.
    pub fn send(&self, frame: &[u8], train: Option<TrainShape>) -> Result<(), Error> {
        let header = header::encode(train);
        (&self.socket).write_vectored(&[IoSlice::new(&header), IoSlice::new(frame)]).map(|_| ())
    }

    /// Returns how many frames were lost since the last call, because too many waited to be read.
    ///
    /// # Errors
    ///
    /// The error of getsockopt(2).
    pub fn take_losses(&self) -> Result<u32, Error> {
        // `struct tpacket_stats`: how many frames have come, and how many of them were dropped.
        let mut statistics = [0_u32; 2];
        let mut len = libc::socklen_t::try_from(size_of_val(&statistics)).unwrap_or(0);
        // SAFETY: The kernel writes at most `len` bytes, all that `statistics` has, and `len` itself.
        let status = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut len,
            )
        };
        succeeded(status)?;
        Ok(statistics[1])
    }

    /// Receives frames into the slots of `room`, behind the place of a tag, and what is said of each. Returns how many
    /// came.
    fn receive_slots(&self, room: &mut [u8], said: &mut [Said]) -> Result<usize, Error> {
        let mut parts: [_; BATCH] =
            std::array::from_fn(|_| [IoSliceMut::new(&mut []), IoSliceMut::new(&mut [])]);
        // SAFETY: Zeros are valid for all members of the structures: integers, and pointers, which may be null.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let mut slots = 0;
        let places = room.chunks_mut(SLOT).zip(said.iter_mut());
        for ((slot, said), (parts, message)) in places.zip(parts.iter_mut().zip(&mut messages)) {
            let frame = slot.get_mut(TAG..).unwrap_or_default();
            *parts = [IoSliceMut::new(&mut said.header), IoSliceMut::new(frame)];
            let message = &mut message.msg_hdr;
            message.msg_iov = parts.as_mut_ptr().cast();
            message.msg_iovlen = parts.len();
            message.msg_control = said.control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&said.control);
            slots += 1;
        }
        let (socket, timeout) = (self.socket.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: The first `slots` messages name `parts`, which have the form of iovecs, and a `control` with its
        // length. All of these are borrowed for writing until this function returns.
        let count = unsafe { libc::recvmmsg(socket, messages.as_mut_ptr(), slots, 0, timeout) };
        let count = usize::try_from(count).map_err(|_| Error::last_os_error())?;
        for (said, message) in said.iter_mut().zip(&messages[..count]) {
            (said.len, said.control_len) =
                (message.msg_len as usize, message.msg_hdr.msg_controllen);
        }
        Ok(count)
    }

    /// Begins to receive from the interface of this index.
    fn bind(&self, interface: i32) -> Result<(), Error> {
        // SAFETY: Zeros are valid for all members of the structure, which are integers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut len = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or(0);
        address.sll_family = libc::c_ushort::try_from(libc::AF_PACKET).unwrap_or(0);
        // All protocols: those that are asked for one by one come behind a macvtap or a bridge of the
        // interface, which take all.
        address.sll_protocol = u16::try_from(libc::ETH_P_ALL).unwrap_or(0).to_be();
        address.sll_ifindex = interface;
        let socket = self.socket.as_raw_fd();
        // SAFETY: The address is a whole `sockaddr_ll` of `len` bytes, which the kernel reads.
        succeeded(unsafe { libc::bind(socket, (&raw const address).cast(), len) })?;
        // SAFETY: The kernel writes at most `len` bytes, all that `address` has, and `len` itself.
        succeeded(unsafe { libc::getsockname(socket, (&raw mut address).cast(), &raw mut len) })?;
        if address.sll_hatype != libc::ARPHRD_ETHER {
            return Err(ErrorKind::InvalidInput.into());
        }
        Ok(())
    }

    /// Makes the interface of this index take frames to more addresses, or to fewer.
    fn change(
        &self,
        option: libc::c_int,
        interface: i32,
        (kind, mac): Member,
    ) -> Result<(), Error> {
        // `struct packet_mreq`.
        let mut request = [0; 16];
        request[..4].copy_from_slice(&interface.to_ne_bytes());
        request[4..6].copy_from_slice(&kind.to_ne_bytes());
        request[6..8].copy_from_slice(&6_u16.to_ne_bytes());
        request[8..14].copy_from_slice(&mac);
        self.set(option, &request)
    }

    /// Sets an option of packet sockets.
    fn set(&self, option: libc::c_int, value: &[u8]) -> Result<(), Error> {
        let len = libc::socklen_t::try_from(value.len()).unwrap_or(0);
        let (socket, value) = (self.socket.as_raw_fd(), value.as_ptr().cast());
        // SAFETY: The kernel reads at most the `len` bytes of `value`.
        succeeded(unsafe { libc::setsockopt(socket, libc::SOL_PACKET, option, value, len) })
    }
}

/// Returns the addresses that an interface takes frames to for these stations: theirs, or all, and those of groups.
fn members_for(stations: Option<&[[u8; 6]]>) -> BTreeSet<Member> {
    let mut members = BTreeSet::from([(MR_ALLMULTI, [0; 6])]);
    match stations {
        None => members.extend([(MR_PROMISC, [0; 6])]),
        Some(stations) => members.extend(stations.iter().map(|mac| (MR_UNICAST, *mac))),
    }
    members
}

/// What the kernel says of a frame that came.
#[derive(Clone, Copy, Default)]
struct Said {
    /// The bytes of the frame and its header.
    len: usize,
    header: [u8; header::LEN],
    /// What is said besides, and the bytes of that.
    control: [u64; CONTROL / 8],
    control_len: usize,
}

impl Said {
    /// Returns the frame in a slot, with the tag of its VLAN.
    fn frame<'a>(&self, slot: &'a mut [u8]) -> &'a [u8] {
        let len = self.len.saturating_sub(header::LEN);
        let control = self.control.map(u64::to_ne_bytes);
        let control = control.as_flattened();
        let start = match tag(&control[..self.control_len.min(CONTROL)]) {
            Some(tag) if len >= ADDRESSES => {
                slot.copy_within(TAG..TAG + ADDRESSES, 0);
                slot[ADDRESSES..ADDRESSES + TAG].copy_from_slice(&tag);
                0
            }
            _ => TAG,
        };
        slot.get(start..TAG + len).unwrap_or_default()
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Limits the frames that a socket receives to those that a program of classic BPF lets pass. A socket has room for one
/// program.
pub fn attach(socket: &impl AsFd, program: &[libc::sock_filter]) -> Result<(), Error> {
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    let size = libc::socklen_t::try_from(size_of_val(&program)).unwrap_or(0);
    let (socket, value) = (socket.as_fd().as_raw_fd(), &raw const program);
    // SAFETY: The kernel reads a whole `sock_fprog` and the `len` instructions at its pointer, which are
    // borrowed, and writes to neither.
    let status = unsafe {
        libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, value.cast(), size)
    };
    succeeded(status)
}

/// Returns the tag that the kernel took out of a frame, by what it says besides (`struct
/// tpacket_auxdata`); `None` if the frame had none.
fn tag(control: &[u8]) -> Option<[u8; TAG]> {
    // It is all that was asked for, so nothing else is in front of it.
    let kind = [libc::SOL_PACKET, PACKET_AUXDATA].map(i32::to_ne_bytes);
    let (header, data) = control.split_at_checked(CONTROL_HEADER)?;
    if header[size_of::<usize>()..] != *kind.as_flattened() {
        return None;
    }
    let word = |at: usize| Some(u16::from_ne_bytes(*data.get(at..)?.first_chunk()?));
    let status = u32::from_ne_bytes(*data.first_chunk()?);
    if status & VLAN_VALID == 0 {
        return None;
    }
    let tpid = if status & VLAN_TPID_VALID == 0 { VLAN_TPID } else { word(18)? };
    let [[a, b], [c, d]] = [tpid, word(16)?].map(u16::to_be_bytes);
    Some([a, b, c, d])
}

/// Returns the error of the system call that has returned a negative status.
pub fn succeeded(status: libc::c_int) -> Result<(), Error> {
    if status < 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}
