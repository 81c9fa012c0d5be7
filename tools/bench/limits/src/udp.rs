// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Datagrams over UDP, to compare with: two programs that poll their sockets send one back and forth.
//!
//! The first byte of a datagram is the number of the round trip that it belongs to.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use crate::polling::{ask, poll};
use crate::samples::typical;
use crate::Error;

/// Where the server listens; next to TCP's port.
const PORT: u16 = 18517;
/// The bytes of the largest datagram over IPv4.
const LARGEST: usize = 65507;

/// Serves clients until the process is ended.
pub fn serve() -> Result<f64, Error> {
    let socket = bind(IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT)?;
    println!("listening");
    Err(Error::System("echo", echo(&socket)))
}

/// Sends each datagram back to where it came from. It polls while datagrams come, and sleeps until the
/// first of a client does. Returns the error that ends this.
fn echo(socket: &UdpSocket) -> io::Error {
    let mut room = vec![0; LARGEST];
    let mut one = || {
        let (len, peer) = socket.recv_from(&mut room)?;
        socket.send_to(&room[..len], peer)
    };
    let mut session = || {
        socket.set_nonblocking(false)?;
        one()?;
        socket.set_nonblocking(true)?;
        while poll(&mut one)?.is_some() {}
        Ok(())
    };
    loop {
        if let Err(error) = session() {
            return error;
        }
    }
}

/// Microseconds there and back: what a datagram of `size` bytes and its echo typically take.
pub fn round_trip(peer: IpAddr, size: usize, time: Duration) -> Result<f64, Error> {
    round_trip_to(SocketAddr::new(peer, PORT), size, time)
}

fn round_trip_to(peer: SocketAddr, size: usize, time: Duration) -> Result<f64, Error> {
    if size > LARGEST {
        return Err(Error::Usage);
    }
    let socket = bind(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)?;
    socket.connect(peer).map_err(Error::system("connect"))?;
    socket.set_nonblocking(true).map_err(Error::system("O_NONBLOCK"))?;
    let (mut message, mut room) = (vec![0x5a_u8; size], vec![0; size]);
    let seconds = typical(time, |count| {
        for _ in 0..count {
            message[0] = message[0].wrapping_add(1);
            ask(
                || socket.send(&message).map(|_| ()),
                || Ok(socket.recv(&mut room)? == size && room == message),
            )?;
        }
        Ok::<_, Error>(())
    })?;
    Ok(seconds * 1e6)
}

fn bind(address: IpAddr, port: u16) -> Result<UdpSocket, Error> {
    UdpSocket::bind((address, port)).map_err(Error::system("bind"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back() -> Result<(), Box<dyn std::error::Error>> {
        let server = bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?;
        let address = server.local_addr()?;
        std::thread::spawn(move || echo(&server));
        for size in [1, 2, 1000] {
            assert!(round_trip_to(address, size, Duration::ZERO)? > 0.0, "{size}");
        }
        assert!(matches!(round_trip_to(address, 1 << 20, Duration::ZERO), Err(Error::Usage)));
        Ok(())
    }
}
