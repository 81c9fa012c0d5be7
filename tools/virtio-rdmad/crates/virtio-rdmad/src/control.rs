// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket: a client sends a line with a request and gets a line of JSON.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Error, Read, Write};
use std::net::Ipv6Addr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use engine::{Address, DeviceStatus, QpStatus, SrqStatus};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::guest::Guest;
use crate::nic::Nic;
use crate::report::{
    GidReport, GuestReport, QpReport, Report, SrqReport, UplinkReport, WorkerReport, STATUS,
};
use crate::socket::Socket;
use crate::switch::Switch;
use crate::times::Reading;
use crate::worker_handle::WorkerHandle;

/// How long a client may take to send its request, and to read the answer.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Most bytes of a request.
const MAX_REQUEST: u64 = 64;

/// What is reported.
pub struct Reported {
    /// The guests, in the order of the command line.
    pub guests: Arc<[Arc<Guest>]>,
    /// The workers, by index.
    pub workers: Arc<[WorkerHandle]>,
    /// The switches.
    pub switches: Vec<Arc<Switch>>,
}

/// Answers the clients that connect, one after the other, until the other end of `end` is closed.
pub fn run(socket: &Socket, end: &UnixStream, reported: &Reported) {
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
        if let Err(error) = answer(socket, reported) {
            tracing::debug!(%error, "control socket");
        }
    }
}

fn answer(socket: &Socket, reported: &Reported) -> Result<(), Error> {
    let Some(mut stream) = socket.accept()? else { return Ok(()) };
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut request = String::new();
    BufReader::new(&stream).take(MAX_REQUEST).read_line(&mut request)?;
    let answer = match request.trim_end() {
        STATUS => serde_json::to_value(report(reported))?,
        _ => json!({ "error": format!("unknown request; there is \"{STATUS}\"") }),
    };
    // In one piece: a formatter that writes to the socket makes a system call for each token.
    stream.write_all(format!("{answer}\n").as_bytes())
}

fn report(Reported { guests, workers, switches }: &Reported) -> Report {
    let mut uplinks: Vec<_> = switches.iter().filter_map(|switch| uplink_report(switch)).collect();
    uplinks.sort_by(|one, other| one.network.cmp(&other.network));
    Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        memory_losses: memory::losses(),
        log_lines_left_out: crate::log::left_out(),
        workers: workers.iter().map(worker_report).collect(),
        guests: guests.iter().map(|guest| guest_report(guest, switches)).collect(),
        uplinks,
    }
}

fn worker_report(worker: &WorkerHandle) -> WorkerReport {
    let Reading { work, poll, wait, sleep, rounds, sleeps, asleep } = worker.times.read();
    WorkerReport {
        guests: worker.guests(),
        asleep,
        work_seconds: work.as_secs_f64(),
        poll_seconds: poll.as_secs_f64(),
        wait_seconds: wait.as_secs_f64(),
        sleep_seconds: sleep.as_secs_f64(),
        rounds,
        sleeps,
    }
}

fn uplink_report(switch: &Switch) -> Option<UplinkReport> {
    let uplink = switch.uplink.as_ref()?;
    Some(UplinkReport {
        network: uplink.network.clone(),
        name: uplink.name.clone(),
        counters: uplink.read_counters(),
    })
}

/// Returns what the network interface of a guest counts; nothing if the switch does not serve it.
fn nic_counters(switches: &[Arc<Switch>], guest: &str) -> BTreeMap<String, u64> {
    let mut nics = switches.iter().flat_map(|switch| &switch.nics);
    nics.find(|nic| nic.guest == guest).map(Nic::counters).unwrap_or_default()
}

fn guest_report(guest: &Guest, switches: &[Arc<Switch>]) -> GuestReport {
    let spec = &guest.spec;
    let DeviceStatus { started, gids, qps, srqs, cqs, mrs, mws, pds, counters, .. } =
        guest.device.status();
    let queues = if guest.rings.load(Ordering::Relaxed) { "rings" } else { "virtqueues" };
    GuestReport {
        name: spec.name.clone(),
        network: spec.network.clone(),
        transport: spec.transport.name().to_owned(),
        socket: spec.path.to_string_lossy().into_owned(),
        mac: spec.mac.map(format_mac),
        connected: guest.link.worker().is_some(),
        worker: guest.link.worker(),
        started,
        queues: started.then(|| queues.to_owned()),
        gids: gids.into_iter().map(gid_report).collect(),
        pds,
        mrs,
        mws,
        cqs,
        qps: qps.iter().map(qp_report).collect(),
        srqs: srqs.iter().map(srq_report).collect(),
        counters: counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        nic: nic_counters(switches, &spec.name),
    }
}

fn gid_report((index, Address { gid, vlan }): (u16, Address)) -> GidReport {
    GidReport { index, gid: format_gid(gid), vlan }
}

fn qp_report(qp: &QpStatus) -> QpReport {
    let QpStatus { qpn, service, state, dest_qpn, dest_gid, sends, receives } = *qp;
    QpReport {
        qpn,
        service: service.to_owned(),
        state: format!("{state:?}").to_uppercase(),
        dest_qpn,
        dest_gid: dest_gid.map(format_gid),
        sends,
        receives,
    }
}

fn srq_report(srq: &SrqStatus) -> SrqReport {
    let SrqStatus { srqn, receives, max_wr, limit, qps, in_error } = *srq;
    SrqReport { srqn, receives, max_wr, limit, qps, in_error }
}

fn format_gid(gid: [u8; 16]) -> String {
    Ipv6Addr::from(gid).to_string()
}

fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
