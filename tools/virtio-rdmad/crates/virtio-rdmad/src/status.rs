// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad status`: what a running process tells of its guests.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::control::STATUS;
use crate::options::StatusOptions;

/// Asks the process behind the control socket and prints its answer.
pub fn print(options: &StatusOptions) -> Result<(), Box<dyn std::error::Error>> {
    let path = options.control.display();
    let mut stream =
        UnixStream::connect(&options.control).map_err(|error| format!("{path}: {error}"))?;
    writeln!(stream, "{STATUS}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let answer: Value =
        serde_json::from_str(&answer).map_err(|error| format!("{path}: {error}"))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(error.into());
    }
    let text =
        if options.json { serde_json::to_string_pretty(&answer)? + "\n" } else { text(&answer) };
    // Nobody may read to the end.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn text(answer: &Value) -> String {
    let workers = answer["workers"].as_array().into_iter().flatten();
    let workers: String = workers.enumerate().map(|(index, value)| worker(index, value)).collect();
    let guests = answer["guests"].as_array().into_iter().flatten();
    std::iter::once(workers).chain(guests.map(guest)).collect::<Vec<_>>().join("\n")
}

fn worker(index: usize, worker: &Value) -> String {
    let seconds = |key: &str| worker[key].as_f64().unwrap_or(0.0);
    let parts = ["work_seconds", "poll_seconds", "wait_seconds", "sleep_seconds"].map(seconds);
    let all = parts.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let [work, poll, wait, sleep] = parts.map(|part| 100.0 * part / all);
    let guests = plain(&worker["guests"]);
    format!(
        "worker {index}: {guests} guests, works {work:.1} %, polls {poll:.1} %, \
         waits for a processor {wait:.1} %, sleeps {sleep:.1} %\n"
    )
}

fn guest(guest: &Value) -> String {
    let mut text = String::new();
    let state = match (guest["connected"].as_bool(), guest["started"].as_bool()) {
        (Some(true), Some(true)) => format!("running on {}", plain(&guest["queues"])),
        (Some(true), _) => "connected, no driver".to_owned(),
        _ => "not connected".to_owned(),
    };
    let field = |key: &str| plain(&guest[key]);
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}: {state}, worker {}, {} {}, network {}, MAC {}",
        field("name"),
        field("worker"),
        field("transport"),
        field("socket"),
        field("network"),
        field("mac"),
    );
    for gid in guest["gids"].as_array().into_iter().flatten() {
        let _ = write!(text, "  GID {} {}", plain(&gid["index"]), plain(&gid["gid"]));
        if !gid["vlan"].is_null() {
            let _ = write!(text, " VLAN {}", plain(&gid["vlan"]));
        }
        text.push('\n');
    }
    let qps = guest["qps"].as_array().map_or(&[][..], Vec::as_slice);
    let srqs = guest["srqs"].as_array().map_or(&[][..], Vec::as_slice);
    let _ = writeln!(
        text,
        "  {} PDs, {} MRs, {} MWs, {} CQs, {} QPs, {} SRQs",
        field("pds"),
        field("mrs"),
        field("mws"),
        field("cqs"),
        qps.len(),
        srqs.len()
    );
    for qp in qps {
        let field = |key: &str| plain(&qp[key]);
        let _ = write!(text, "  QP {:<5} {:<4} {:<5}", field("qpn"), field("type"), field("state"));
        if !qp["dest_qpn"].is_null() {
            let _ = write!(text, " peer QP {} at {}", field("dest_qpn"), field("dest_gid"));
        }
        let _ = writeln!(text, " sends {} receives {}", field("sends"), field("receives"));
    }
    for srq in srqs {
        let field = |key: &str| plain(&srq[key]);
        let state = if srq["in_error"] == true { " in error" } else { "" };
        let _ = writeln!(
            text,
            "  SRQ {:<4} receives {} of {} limit {} QPs {}{state}",
            field("srqn"),
            field("receives"),
            field("max_wr"),
            field("limit"),
            field("qps"),
        );
    }
    for (name, value) in guest["counters"].as_object().into_iter().flatten() {
        if value.as_u64() != Some(0) {
            let _ = writeln!(text, "  {name} {value}");
        }
    }
    text
}

/// A value without quotes, a dash for none.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_shows_what_matters() {
        let answer = json!({ "workers": [{ "guests": 1, "work_seconds": 1.0, "poll_seconds": 2.0,
            "wait_seconds": 1.0, "sleep_seconds": 4.0 }], "guests": [{
            "name": "g1", "worker": 0, "network": "default", "transport": "vfio-user", "socket": "/s",
            "mac": null, "connected": true, "started": true, "queues": "rings", "pds": 1, "mrs": 2, "cqs": 3,
            "mws": 1, "gids": [{ "index": 0, "gid": "fe80::1", "vlan": null },
                                { "index": 1, "gid": "fe80::1", "vlan": 5 }],
            "qps": [{ "qpn": 2, "type": "RC", "state": "RTS", "dest_qpn": 7, "dest_gid": "fe80::2",
                      "sends": 0, "receives": 100 },
                    { "qpn": 1, "type": "GSI", "state": "RTS", "dest_qpn": null, "dest_gid": null,
                      "sends": 0, "receives": 512 }],
            "srqs": [{ "srqn": 1, "receives": 9, "max_wr": 64, "limit": 4, "qps": 2, "in_error": false },
                     { "srqn": 2, "receives": 0, "max_wr": 8, "limit": 0, "qps": 0, "in_error": true }],
            "counters": { "send_messages": 5, "timeouts": 0 },
        }]});
        let expected = "\
worker 0: 1 guests, works 12.5 %, polls 25.0 %, waits for a processor 12.5 %, sleeps 50.0 %

g1: running on rings, worker 0, vfio-user /s, network default, MAC -
  GID 0 fe80::1
  GID 1 fe80::1 VLAN 5
  1 PDs, 2 MRs, 1 MWs, 3 CQs, 2 QPs, 2 SRQs
  QP 2     RC   RTS   peer QP 7 at fe80::2 sends 0 receives 100
  QP 1     GSI  RTS   sends 0 receives 512
  SRQ 1    receives 9 of 64 limit 4 QPs 2
  SRQ 2    receives 0 of 8 limit 0 QPs 0 in error
  send_messages 5
";
        assert_eq!(text(&answer), expected);
    }
}
