// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket, on which clients call methods by Varlink (https://varlink.org): JSON, and a NUL byte behind
//! each message. [`interface`] has the methods.

mod client;
pub mod interface;
mod survey;

use std::io::{BufReader, Error};
use std::os::unix::net::UnixStream;

use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use varlink::sansio::protocol::parse_request;
use varlink::{ConnectionHandler, VarlinkService};

use crate::socket::Socket;
use client::Client;
use interface::Daemon;
pub use survey::Surveyed;

/// Most clients at a time. If there are as many, one more takes the place of the one that has neither sent nor read
/// anything for the longest time.
const MAX_CLIENTS: usize = 64;

/// Serves the clients that connect, until the other end of `end` is closed.
pub fn run(socket: &Socket, end: &UnixStream, surveyed: Surveyed) {
    let interfaces: Vec<Box<dyn varlink::Interface + Send + Sync>> =
        vec![Box::new(Daemon::new(surveyed))];
    let (vendor, product) = ("virtio-rdma", env!("CARGO_PKG_NAME"));
    let service = VarlinkService::new(vendor, product, env!("CARGO_PKG_VERSION"), "", interfaces);
    let mut clients = Vec::new();
    loop {
        match wait(socket, end, &clients) {
            Ok(Ready { is_over: true, .. }) => return,
            Ok(ready) => serve(socket, &service, &mut clients, &ready),
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the control socket is served no longer");
                return;
            }
        }
    }
}

/// What there is to do.
struct Ready {
    /// The process ends.
    is_over: bool,
    /// A client has connected.
    has_new: bool,
    /// Clients have sent something, or read something.
    clients: Vec<bool>,
}

/// Waits until there is something to do.
fn wait(socket: &Socket, end: &UnixStream, clients: &[Client]) -> Result<Ready, Errno> {
    let mut fds =
        vec![PollFd::new(end, PollFlags::empty()), PollFd::new(socket.listener(), PollFlags::IN)];
    fds.extend(clients.iter().map(|client| PollFd::new(client, client.interest())));
    poll(&mut fds, None)?;
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    let [is_over, has_new] = [ready.next(), ready.next()].map(|is_ready| is_ready == Some(true));
    Ok(Ready { is_over, has_new, clients: ready.collect() })
}

/// Serves the clients that have sent or read something, and those that have connected.
fn serve(socket: &Socket, service: &VarlinkService, clients: &mut Vec<Client>, ready: &Ready) {
    let mut is_ready = ready.clients.iter();
    clients.retain_mut(|client| {
        if is_ready.next() != Some(&true) {
            return true;
        }
        let served = client.serve(|request, answers| answer(service, request, answers));
        served
            .map_err(|reason| tracing::debug!(%reason, "a client of the control socket leaves"))
            .is_ok()
    });
    if ready.has_new {
        if let Err(error) = accept(socket, clients) {
            tracing::debug!(%error, "control socket");
        }
    }
}

/// Begins to serve a client, if one has connected.
fn accept(socket: &Socket, clients: &mut Vec<Client>) -> Result<(), Error> {
    let Some(stream) = socket.accept()? else { return Ok(()) };
    if clients.len() >= MAX_CLIENTS {
        let idle = clients.iter().enumerate().min_by_key(|(_, client)| client.active);
        if let Some((at, _)) = idle {
            clients.swap_remove(at);
        }
    }
    clients.push(Client::new(stream)?);
    Ok(())
}

/// Adds the answer to a request, which ends with a NUL byte. A client that wants no answer gets none.
fn answer(service: &VarlinkService, request: &[u8], answers: &mut Vec<u8>) -> varlink::Result<()> {
    let text = request.strip_suffix(&[0]).unwrap_or(request);
    let wants_none = parse_request(text)?.oneway == Some(true);
    let mut unwanted = Vec::new();
    let answers = if wants_none { &mut unwanted } else { answers };
    service.handle(&mut BufReader::new(request), answers, None).map(|_| ())
}
