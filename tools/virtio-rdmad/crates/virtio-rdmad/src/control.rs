// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket: a line of request, a line of JSON in answer.

use std::io::{BufRead, BufReader, Error, Read, Write};
use std::net::Ipv6Addr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use engine::{DeviceStatus, QpStatus};
use serde_json::{json, Map, Value};

use crate::guest::Guest;
use crate::socket::Socket;

/// The only request.
pub const STATUS: &str = "status";

/// How long a client may take over its request and the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest request.
const MAX_REQUEST: u64 = 64;

/// Answers whoever connected.
pub fn answer(socket: &Socket, guests: &[Arc<Guest>]) {
    let result = match socket.accept() {
        Ok(Some(stream)) => converse(stream, guests),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = result {
        tracing::debug!(%error, "control socket");
    }
}

fn converse(mut stream: UnixStream, guests: &[Arc<Guest>]) -> Result<(), Error> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = String::new();
    BufReader::new(&stream).take(MAX_REQUEST).read_line(&mut request)?;
    let answer = match request.trim_end() {
        STATUS => status(guests),
        _ => json!({ "error": format!("unknown request; there is \"{STATUS}\"") }),
    };
    writeln!(stream, "{answer}")
}

fn status(guests: &[Arc<Guest>]) -> Value {
    let guests: Vec<Value> = guests.iter().map(|guest| of_guest(guest)).collect();
    json!({ "version": env!("CARGO_PKG_VERSION"), "guests": guests })
}

fn of_guest(guest: &Guest) -> Value {
    let spec = &guest.spec;
    let DeviceStatus { started, gids, qps, cqs, mrs, pds, counters, .. } = guest.device.status();
    let gids: Vec<Value> = gids
        .into_iter()
        .map(|(index, gid)| json!({ "index": index, "gid": Ipv6Addr::from(gid).to_string() }))
        .collect();
    let qps: Vec<Value> = qps.iter().map(of_qp).collect();
    let counters: Map<String, Value> =
        counters.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({
        "name": spec.name,
        "network": spec.network,
        "transport": spec.transport.name(),
        "socket": spec.path.to_string_lossy(),
        "mac": spec.mac.map(format_mac),
        "connected": guest.connected(),
        "started": started,
        "gids": gids,
        "pds": pds,
        "mrs": mrs,
        "cqs": cqs,
        "qps": qps,
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

fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
