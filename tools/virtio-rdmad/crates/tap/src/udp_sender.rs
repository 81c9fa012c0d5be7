// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A UDP socket that only sends (udp(7), ip(7), ipv6(7)).

use std::io::{Error, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{bind, socket_with, AddressFamily, SocketAddrAny, SocketFlags, SocketType};

use crate::filter;
use crate::packet_socket::{attach, succeeded};

/// The bytes of `struct cmsghdr`, and of it with a number behind it, aligned for the next one.
const CONTROL_HEADER: usize = size_of::<usize>() + 8;
const CONTROL: usize = CONTROL_HEADER + size_of::<usize>();

/// A UDP socket that only sends. It says of each datagram which traffic class it has, and the kernel neither takes a
/// datagram apart nor lets a router do so.
#[derive(Debug)]
pub struct UdpSender {
    socket: OwnedFd,
}

impl UdpSender {
    /// Opens a socket with this address and port. What comes to it is dropped by the kernel.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if the port is in use there, and the other errors of bind(2).
    pub fn open(local: SocketAddr) -> Result<Self, Error> {
        let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        attach(&socket, &filter::nothing())?;
        if local.is_ipv4() {
            sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE)?;
        } else {
            sockopt::set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::PROBE)?;
            forbid_fragments(&socket)?;
        }
        bind(&socket, &local)?;
        Ok(Self { socket })
    }

    /// Sends datagrams of `size` bytes each to an address, of which the last one may have fewer, by one system call.
    /// `traffic_class` is the byte of the IP header: the DSCP, and two bits of congestion notification.
    ///
    /// # Errors
    ///
    /// The error of sendmsg(2): `WouldBlock` while too much waits to be sent, EMSGSIZE for a datagram that is longer
    /// than the route carries. For several datagrams also `InvalidInput`, on some kernels for a `size` that is too
    /// long as well, and EIO, if the kernel cannot take them apart on the way there.
    pub fn send(
        &self,
        to: SocketAddr,
        traffic_class: u8,
        datagrams: &[u8],
        size: u16,
    ) -> Result<(), Error> {
        let mut control = [[0; CONTROL]; 2];
        let class = match to {
            SocketAddr::V4(_) => [libc::IPPROTO_IP, libc::IP_TOS],
            SocketAddr::V6(_) => [libc::IPPROTO_IPV6, libc::IPV6_TCLASS],
        };
        put(&mut control[0], class, &libc::c_int::from(traffic_class).to_ne_bytes());
        put(&mut control[1], [libc::SOL_UDP, libc::UDP_SEGMENT], &size.to_ne_bytes());
        let count = if datagrams.len() > usize::from(size) { 2 } else { 1 };
        self.send_parts(&SocketAddrAny::from(to), datagrams, control[..count].as_flattened())
    }

    /// Sends bytes, with what is said besides.
    fn send_parts(&self, to: &SocketAddrAny, bytes: &[u8], control: &[u8]) -> Result<(), Error> {
        let mut parts = [IoSlice::new(bytes)];
        // SAFETY: Zeros are valid for all members of the structure: integers, and pointers, which may be
        // null.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = to.as_ptr().cast_mut().cast();
        message.msg_namelen = to.addr_len();
        message.msg_iov = parts.as_mut_ptr().cast();
        message.msg_iovlen = parts.len();
        message.msg_control = control.as_ptr().cast_mut().cast();
        message.msg_controllen = control.len();
        // SAFETY: The message names `to`, `parts`, which have the form of iovecs, and `control`, with their lengths.
        // All are borrowed until this function returns, and the kernel only reads them.
        let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, 0) };
        if sent < 0 {
            return Err(Error::last_os_error());
        }
        Ok(())
    }
}

/// Writes `struct cmsghdr`, of this level and type, with a number behind it.
fn put(control: &mut [u8; CONTROL], kind: [libc::c_int; 2], value: &[u8]) {
    let len = CONTROL_HEADER + value.len();
    control[..size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
    let kind = kind.map(libc::c_int::to_ne_bytes);
    control[size_of::<usize>()..CONTROL_HEADER].copy_from_slice(kind.as_flattened());
    control[CONTROL_HEADER..len].copy_from_slice(value);
}

/// Has the kernel refuse a datagram of IPv6 that is longer than the route carries.
fn forbid_fragments(socket: &OwnedFd) -> Result<(), Error> {
    let (on, option) = (1 as libc::c_int, libc::IPV6_DONTFRAG);
    let len = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or(0);
    let (socket, value) = (socket.as_raw_fd(), (&raw const on).cast());
    // SAFETY: The kernel reads an integer of `len` bytes, which `on` is.
    succeeded(unsafe { libc::setsockopt(socket, libc::IPPROTO_IPV6, option, value, len) })
}

impl AsFd for UdpSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::UdpSocket;

    use rustix::event::{poll, PollFd, PollFlags, Timespec};

    use super::*;

    /// Returns whether something has come to a socket.
    fn has_come(socket: &impl AsFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn datagrams_go_together_and_come_one_by_one() {
        for loopback in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(receiver) = UdpSocket::bind(loopback) else {
                eprintln!("skipped: no {loopback}");
                continue;
            };
            let to = receiver.local_addr().unwrap();
            let sender = UdpSender::open(loopback.parse().unwrap()).unwrap();
            let bytes: Vec<u8> = (0..=255).collect();
            sender.send(to, 0xb8, &bytes, 100).unwrap();
            sender.send(to, 0, &bytes[..7], 100).unwrap();
            let mut lengths = Vec::new();
            for expected in [&bytes[..100], &bytes[100..200], &bytes[200..], &bytes[..7]] {
                let mut room = [0; 300];
                let (len, from) = receiver.recv_from(&mut room).unwrap();
                assert_eq!(&room[..len], expected);
                lengths.push(len);
                assert_eq!(from.ip(), to.ip());
            }
            assert_eq!(lengths, [100, 100, 56, 7]);
        }
    }

    /// Receives a datagram, and returns its traffic class.
    fn class_of_next(socket: &UdpSocket) -> u8 {
        let (mut room, mut control) = ([0; 100], [0_u64; 8]);
        let mut parts = [std::io::IoSliceMut::new(&mut room)];
        // SAFETY: Zeros are valid for all members of the structure: integers, and pointers, which may be null.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr().cast();
        message.msg_iovlen = parts.len();
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: The message names `parts` and `control` with its length, which are borrowed for writing.
        let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
        assert!(len > 0);
        let control = control.map(u64::to_ne_bytes);
        control.as_flattened()[CONTROL_HEADER]
    }

    #[test]
    fn each_datagram_has_its_traffic_class() {
        for loopback in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(receiver) = UdpSocket::bind(loopback) else {
                eprintln!("skipped: no {loopback}");
                continue;
            };
            let to = receiver.local_addr().unwrap();
            if to.is_ipv4() {
                sockopt::set_ip_recvtos(&receiver, true).unwrap();
            } else {
                sockopt::set_ipv6_recvtclass(&receiver, true).unwrap();
            }
            let sender = UdpSender::open(loopback.parse().unwrap()).unwrap();
            for class in [0, 0xb8, 0x6a, 0x01] {
                // Two datagrams have it as one has it.
                sender.send(to, class, &[7; 20], 10).unwrap();
                sender.send(to, class, &[7; 20], 20).unwrap();
                for _ in 0..3 {
                    assert_eq!(class_of_next(&receiver), class);
                }
            }
        }
    }

    #[test]
    fn nothing_comes_to_it() {
        let sender = UdpSender::open("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = rustix::net::getsockname(&sender).unwrap();
        let at = SocketAddr::try_from(at).unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        other.send_to(b"answer", at).unwrap();
        // When the second one has come, so would the first one have.
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        other.send_to(b"answer", receiver.local_addr().unwrap()).unwrap();
        receiver.recv_from(&mut [0; 10]).unwrap();
        assert!(!has_come(&sender));
    }

    #[test]
    fn a_port_has_one_socket() {
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let error = UdpSender::open(other.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }
}
