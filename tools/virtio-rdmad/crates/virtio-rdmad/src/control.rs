// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket: a line of request, a line of JSON in answer.

use std::io::{BufRead, BufReader, Error, Read, Write};
use std::net::Ipv6Addr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use engine::{Address, DeviceStatus, QpStatus, SrqStatus};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::{json, Map, Value};

use crate::guest::Guest;
use crate::socket::Socket;
use crate::times::Reading;
use crate::worker_handle::WorkerHandle;

/// The only request.
pub const STATUS: &str = "status";

/// How long a client may take over its request and the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest request.
const MAX_REQUEST: u64 = 64;

/// Answers who connects, one after the other, until the other end of `end` is closed.
pub fn run(socket: &Socket, end: &UnixStream, guests: &[Arc<Guest>], workers: &[WorkerHandle]) {
    loop {
        let mut fds =
            [PollFd::new(end, PollFlags::empty()), PollFd::new(socket.listener(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => {
                tracing::error!(%error, "the control socket is served no longer");
                return;
            }
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        if let Err(error) = answer(socket, guests, workers) {
            tracing::debug!(%error, "control socket");
        }
    }
}

fn answer(socket: &Socket, guests: &[Arc<Guest>], workers: &[WorkerHandle]) -> Result<(), Error> {
    let Some(mut stream) = socket.accept()? else { return Ok(()) };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = String::new();
    BufReader::new(&stream).take(MAX_REQUEST).read_line(&mut request)?;
    let answer = match request.trim_end() {
        STATUS => status(guests, workers),
        _ => json!({ "error": format!("unknown request; there is \"{STATUS}\"") }),
    };
    // In one piece: to print it to the socket takes a system call a token.
    stream.write_all(format!("{answer}\n").as_bytes())
}

fn status(guests: &[Arc<Guest>], workers: &[WorkerHandle]) -> Value {
    let guests: Vec<Value> = guests.iter().map(|guest| of_guest(guest)).collect();
    let workers: Vec<Value> = workers.iter().map(of_worker).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "memory_losses": memory::losses(),
        "log_lines_left_out": crate::log::left_out(),
        "workers": workers,
        "guests": guests,
    })
}

fn of_worker(worker: &WorkerHandle) -> Value {
    let Reading { work, poll, wait, sleep, rounds, sleeps, asleep } = worker.times.read();
    json!({
        "guests": worker.guests(),
        "asleep": asleep,
        "work_seconds": work.as_secs_f64(),
        "poll_seconds": poll.as_secs_f64(),
        "wait_seconds": wait.as_secs_f64(),
        "sleep_seconds": sleep.as_secs_f64(),
        "rounds": rounds,
        "sleeps": sleeps,
    })
}

fn of_guest(guest: &Guest) -> Value {
    let spec = &guest.spec;
    let DeviceStatus { started, gids, qps, srqs, cqs, mrs, mws, pds, counters, .. } =
        guest.device.status();
    let gids: Vec<Value> = gids
        .into_iter()
        .map(|(index, Address { gid, vlan })| {
            json!({ "index": index, "gid": Ipv6Addr::from(gid).to_string(), "vlan": vlan })
        })
        .collect();
    let qps: Vec<Value> = qps.iter().map(of_qp).collect();
    let srqs: Vec<Value> = srqs.iter().map(of_srq).collect();
    let counters: Map<String, Value> =
        counters.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({
        "name": spec.name,
        "network": spec.network,
        "transport": spec.transport.name(),
        "socket": spec.path.to_string_lossy(),
        "mac": spec.mac.map(format_mac),
        "connected": guest.link.worker().is_some(),
        "worker": guest.link.worker(),
        "started": started,
        "queues": started.then(|| if guest.rings.load(Ordering::Relaxed) { "rings" } else { "virtqueues" }),
        "gids": gids,
        "pds": pds,
        "mrs": mrs,
        "mws": mws,
        "cqs": cqs,
        "qps": qps,
        "srqs": srqs,
        "counters": counters,
    })
}

fn of_qp(qp: &QpStatus) -> Value {
    json!({
        "qpn": qp.qpn,
        "type": qp.service,
        "state": format!("{:?}", qp.state).to_uppercase(),
        "dest_qpn": qp.dest_qpn,
        "dest_gid": qp.dest_gid.map(|gid| Ipv6Addr::from(gid).to_string()),
        "sends": qp.sends,
        "receives": qp.receives,
    })
}

fn of_srq(srq: &SrqStatus) -> Value {
    json!({
        "srqn": srq.srqn,
        "receives": srq.receives,
        "max_wr": srq.max_wr,
        "limit": srq.limit,
        "qps": srq.qps,
        "in_error": srq.in_error,
    })
}

fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
