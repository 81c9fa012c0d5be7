// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages over TCP, to compare with: sent and taken by plain write(2) and read(2).
//!
//! A connection begins with eight bytes from the client, the size of a message (little-endian), the
//! top bit set where each is to be echoed. Without echo the server counts bytes to the end of the
//! stream and answers with the count.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::samples::typical;
use crate::Error;

/// Where the server listens; next to perftest's port.
const PORT: u16 = 18516;
const ECHO: u64 = 1 << 63;
/// The most that a client may ask the server to hold.
const LARGEST: u64 = 1 << 30;

/// Serves clients until the process is ended.
pub fn serve() -> Result<f64, Error> {
    let listener =
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).map_err(Error::system("bind"))?;
    println!("listening");
    loop {
        let (stream, _) = listener.accept().map_err(Error::system("accept"))?;
        // What goes wrong with one connection, its client tells.
        thread::spawn(move || serve_one(stream));
    }
}

fn serve_one(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut header = [0; 8];
    stream.read_exact(&mut header)?;
    let header = u64::from_le_bytes(header);
    let size = header & !ECHO;
    if size == 0 || size > LARGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut buffer = vec![0; usize::try_from(size).unwrap_or(1)];
    if header & ECHO != 0 {
        loop {
            stream.read_exact(&mut buffer)?;
            stream.write_all(&buffer)?;
        }
    }
    let mut total = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return stream.write_all(&u64::to_le_bytes(total)),
            count => total += count as u64,
        }
    }
}

fn connect(peer: IpAddr, header: u64) -> Result<TcpStream, Error> {
    let mut stream = TcpStream::connect((peer, PORT)).map_err(Error::system("connect"))?;
    stream.set_nodelay(true).map_err(Error::system("TCP_NODELAY"))?;
    stream.write_all(&header.to_le_bytes()).map_err(Error::system("write"))?;
    Ok(stream)
}

/// MiB a second of messages of `size` bytes, each one write(2), until the last has arrived.
pub fn bandwidth(peer: IpAddr, size: usize, time: Duration) -> Result<f64, Error> {
    let start = Instant::now();
    send_while(peer, size, |_| start.elapsed() < time)
}

/// The same for so many messages.
pub fn bandwidth_of(peer: IpAddr, size: usize, count: u64) -> Result<f64, Error> {
    send_while(peer, size, |sent| sent < count)
}

/// Sends messages while there are to be more than were sent so far.
fn send_while(peer: IpAddr, size: usize, more: impl Fn(u64) -> bool) -> Result<f64, Error> {
    let mut stream = connect(peer, size as u64)?;
    let message = vec![0x5a; size];
    let mut count = 0;
    let start = Instant::now();
    while more(count) {
        stream.write_all(&message).map_err(Error::system("write"))?;
        count += 1;
    }
    let sent = count * size as u64;
    stream.shutdown(Shutdown::Write).map_err(Error::system("shutdown"))?;
    let mut arrived = [0; 8];
    stream.read_exact(&mut arrived).map_err(Error::system("read"))?;
    let seconds = start.elapsed().as_secs_f64();
    match u64::from_le_bytes(arrived) {
        arrived if arrived == sent => Ok(sent as f64 / seconds / f64::from(1 << 20)),
        arrived => Err(Error::Peer(arrived, sent)),
    }
}

/// Microseconds one way: half of what a message of `size` bytes and its echo take.
pub fn latency(peer: IpAddr, size: usize, time: Duration) -> Result<f64, Error> {
    let mut stream = connect(peer, size as u64 | ECHO)?;
    let mut message = vec![0x5a; size];
    let seconds = typical(time, |count| {
        for _ in 0..count {
            stream.write_all(&message)?;
            stream.read_exact(&mut message)?;
        }
        Ok(())
    })
    .map_err(Error::system::<io::Error>("echo"))?;
    Ok(seconds * 1e6 / 2.0)
}
