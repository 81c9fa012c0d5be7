// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket, on which clients call methods by Varlink (<https://varlink.org>): JSON, and a NUL byte behind
//! each message. [`interface`] has the methods.

mod client;
pub mod interface;
pub mod report;
mod seen;
mod survey;
mod told;

use std::io::{BufReader, Error};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use serde::Serialize;
use varlink::sansio::protocol::{parse_request, serialize_reply};
use varlink::{ConnectionHandler, Reply, VarlinkService};

use crate::guest::events::{Events, Waiting};
use crate::guest::trace::{Traced, Traces};
use crate::os::socket::Socket;
use client::{Client, Ended};
use interface::{Besides, Daemon};
use report::{EventReport, FrameReport, SeenReport};
pub use survey::Surveyed;

/// Most clients at a time. If there are as many, one more takes the place of the one that has neither sent nor read
/// anything for the longest time.
const MAX_CLIENTS: usize = 64;

/// Serves the clients that connect, until the other end of `end` is closed.
pub fn run(socket: &Socket, end: &UnixStream, surveyed: Surveyed, events: &Events, traces: Traces) {
    let besides = Arc::new(Besides::default());
    let daemon = Daemon::new(surveyed, besides.clone());
    let (vendor, product, version) =
        ("virtio-rdma", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"));
    let service = VarlinkService::new(vendor, product, version, "", vec![Box::new(daemon)]);
    let clients = Vec::new();
    let mut server = Server { socket, service, besides, events, traces, clients };
    loop {
        match server.wait(end) {
            Ok(Ready { is_over: true, .. }) => return,
            Ok(ready) => server.serve(&ready),
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the control socket is served no longer");
                return;
            }
        }
    }
}

/// The work that there is to do.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
struct Ready {
    /// The process ends.
    is_over: bool,
    /// A client has connected.
    has_new: bool,
    /// Something has happened to a guest.
    has_events: bool,
    /// Something has happened to a message of a guest that is traced.
    has_seen: bool,
    /// Clients have sent something, or read something.
    clients: Vec<bool>,
}

/// The server of the control socket.
struct Server<'a> {
    socket: &'a Socket,
    service: VarlinkService,
    /// The descriptors that come with a call, and the wishes of its client.
    besides: Arc<Besides>,
    events: &'a Events,
    traces: Traces,
    clients: Vec<Client>,
}

impl Server<'_> {
    /// Waits until there is something to do.
    fn wait(&self, end: &UnixStream) -> Result<Ready, Errno> {
        let mut fds = vec![
            PollFd::new(end, PollFlags::empty()),
            PollFd::new(self.socket.listener(), PollFlags::IN),
            PollFd::new(self.events, PollFlags::IN),
            PollFd::new(&*self.traces.seen, PollFlags::IN),
        ];
        fds.extend(self.clients.iter().map(|client| PollFd::new(client, client.interest())));
        poll(&mut fds, None)?;
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (is_over, has_new, has_events, has_seen) = (ready[0], ready[1], ready[2], ready[3]);
        Ok(Ready { is_over, has_new, has_events, has_seen, clients: ready[4..].to_vec() })
    }

    /// Serves the clients that have sent or read something, and those that have connected, and tells of events.
    fn serve(&mut self, ready: &Ready) {
        let mut is_ready = ready.clients.iter();
        let (service, besides, events) = (&self.service, &*self.besides, self.events);
        let (traces, mut traced) = (&mut self.traces, traced_by(&self.clients));
        self.clients.retain_mut(|client| {
            if is_ready.next() != Some(&true) {
                return true;
            }
            let mut latest = None;
            let served = client.serve(|request, descriptors, answers| {
                let own = || besides.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::swap(descriptors, &mut own());
                let answered = answer(service, request, answers);
                std::mem::swap(descriptors, &mut own());
                if besides.watches.load(Ordering::Relaxed) {
                    // Whatever happens from when the client reads its first answer on, it is told of.
                    events.set_watched(true);
                }
                let mut new = besides.traced.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(new) = new.take() {
                    // The same holds for what it traces.
                    traced.push(new.clone());
                    traces.follow(&traced);
                    latest = Some(new);
                }
                answered
            });
            client.watches |= besides.watches.swap(false, Ordering::Relaxed);
            client.traced = latest.or(client.traced.take());
            stays(served)
        });
        if ready.has_events {
            self.tell(&told::take(self.events));
        }
        if ready.has_seen {
            self.tell_seen();
        }
        if ready.has_new {
            if let Err(error) = accept(self.socket, &mut self.clients) {
                tracing::debug!(%error, "control socket");
            }
        }
        let is_watched = self.clients.iter().any(|client| client.watches);
        self.events.set_watched(is_watched);
        self.traces.follow(&traced_by(&self.clients));
    }

    /// Tells the clients that trace a guest what was seen of its messages.
    fn tell_seen(&mut self) {
        let Waiting { events, lost } = self.traces.seen.take();
        self.clients.retain_mut(|client| {
            let Some(traced) = &client.traced else { return true };
            let snaplen = traced.snaplen;
            let of_lost = |lost| match snaplen {
                Some(_) => of_report(&FrameReport::of_lost(lost)),
                None => of_report(&SeenReport::of_lost(lost)),
            };
            let own = events.iter().filter(|(_, guest, seen)| traced.covers(guest, seen));
            let answer = |(time, guest, what): &(_, String, _)| match snaplen {
                Some(snaplen) => of_report(&seen::frame_report(*time, what, snaplen)),
                None => of_report(&seen::report(*time, guest, what)),
            };
            let mut answers: Vec<_> = own.map(answer).collect();
            answers.extend((lost != 0).then(|| of_lost(lost)));
            stays(client.tell(&answers, of_lost).map_err(Ended::Os))
        });
    }

    /// Tells the clients that watch what has happened.
    fn tell(&mut self, events: &[EventReport]) {
        let events: Vec<_> = events.iter().map(of_report).collect();
        let lost = |lost| of_report(&EventReport::of_lost(lost));
        self.clients.retain_mut(|client| {
            !client.watches || stays(client.tell(&events, lost).map_err(Ended::Os))
        });
    }
}

/// Returns whether a client stays.
fn stays(served: Result<(), Ended>) -> bool {
    served
        .map_err(|reason| tracing::debug!(%reason, "a client of the control socket leaves"))
        .is_ok()
}

/// Returns what clients trace.
fn traced_by(clients: &[Client]) -> Vec<Traced> {
    clients.iter().filter_map(|client| client.traced.clone()).collect()
}

/// Returns the answer that tells of an event, which others follow.
fn of_report(report: &impl Serialize) -> Vec<u8> {
    let parameters = serde_json::to_value(report).ok();
    let reply = Reply { continues: Some(true), ..Reply::parameters(parameters) };
    serialize_reply(&reply).unwrap_or_default()
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
