// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A network that loses packets, between the hosts of the guests. Each guest has a device of its own then, with a tunnel
//! (VXLAN, RFC 7348) to all others. The datagrams of the tunnels come to this process, which passes them on.
//!
//! All addresses are this machine's own, in 127.0.0.0/8. A device takes packets from the addresses of its tunnel only, so
//! it sees each peer under an address of the cable.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};

use rand::{RngExt, SeedableRng};
use rand_xorshift::XorShiftRng;
use rustix::event::{poll, PollFd, PollFlags};

use crate::error::Error;

/// The UDP port of tunnels.
const PORT: u16 = 4789;
/// Bytes of the longest datagram.
const DATAGRAM: usize = 64 << 10;
/// Datagrams that are read from one socket before the others have their turn.
const BURST: usize = 64;

/// The addresses of a cable: those that begin with 127 and this byte.
#[derive(Clone, Copy, Debug)]
pub struct Addresses(u8);

impl Addresses {
    /// Returns the address of the host of a guest.
    pub fn host(self, guest: u8) -> Ipv4Addr {
        self.peer(guest, guest)
    }

    /// Returns the address under which the host of a guest sees that of another one.
    pub fn peer(self, guest: u8, peer: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, self.0, guest, peer)
    }
}

/// A way from the host of a guest to that of another one.
#[derive(Debug)]
struct Way {
    guest: u8,
    peer: u8,
    /// The end to which the first host sends.
    socket: UdpSocket,
}

/// Lays a cable between the hosts of so many guests, which loses `loss` percent of all packets. It is there until this
/// process ends.
pub fn lay(count: u8, loss: f64) -> Result<Addresses, Error> {
    let mut last = None;
    // Another lab may have some of these addresses.
    for block in 1..u8::MAX {
        match bind(Addresses(block), count) {
            Ok(ways) => {
                std::thread::spawn(move || carry(Addresses(block), &ways, loss / 100.0));
                return Ok(Addresses(block));
            }
            Err(error) => last = Some(error),
        }
    }
    let why = last.map_or(String::new(), |error| error.to_string());
    Err(format!("no addresses for a network that loses packets: {why}").into())
}

fn bind(addresses: Addresses, count: u8) -> std::io::Result<Vec<Way>> {
    let pairs = (1..=count).flat_map(|guest| (1..=count).map(move |peer| (guest, peer)));
    let pairs = pairs.filter(|(guest, peer)| guest != peer);
    pairs
        .map(|(guest, peer)| {
            let socket = UdpSocket::bind((addresses.peer(guest, peer), PORT))?;
            socket.set_nonblocking(true)?;
            Ok(Way { guest, peer, socket })
        })
        .collect()
}

/// Passes datagrams on for ever.
fn carry(addresses: Addresses, ways: &[Way], loss: f64) {
    let mut dice = XorShiftRng::seed_from_u64(1);
    let mut datagram = vec![0; DATAGRAM];
    loop {
        let mut sockets: Vec<_> =
            ways.iter().map(|way| PollFd::new(&way.socket, PollFlags::IN)).collect();
        if poll(&mut sockets, None).is_err() {
            continue;
        }
        for way in ways {
            let back = ways.iter().find(|back| (back.guest, back.peer) == (way.peer, way.guest));
            for _ in 0..BURST {
                match way.socket.recv(&mut datagram) {
                    Ok(_) if dice.random_bool(loss) => {}
                    Ok(length) => {
                        let to = (addresses.host(way.peer), PORT);
                        // What the other host has no room for is lost, as in any network.
                        _ = back.map(|back| back.socket.send_to(&datagram[..length], to));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // The other host is not there yet, or not any more.
                    Err(_) => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_cable_brings_what_it_does_not_lose() {
        let addresses = lay(2, 20.0).unwrap();
        let [a, b] = [1, 2].map(|guest| UdpSocket::bind((addresses.host(guest), PORT)).unwrap());
        b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut came = 0;
        for number in 0..200_u32 {
            a.send_to(&number.to_be_bytes(), (addresses.peer(1, 2), PORT)).unwrap();
        }
        // It loses nothing twice in a row for ever, so the last word comes.
        let mut word = [0; 4];
        while came == 0 || word != [9; 4] {
            if came != 0 {
                a.send_to(&[9; 4], (addresses.peer(1, 2), PORT)).unwrap();
            }
            let (_, from) = b.recv_from(&mut word).unwrap();
            assert_eq!(
                from.ip(),
                addresses.peer(2, 1),
                "the host sees its peer under this address"
            );
            came += u32::from(word != [9; 4]);
        }
        assert!((120..190).contains(&came), "{came} of 200 came");
    }
}
