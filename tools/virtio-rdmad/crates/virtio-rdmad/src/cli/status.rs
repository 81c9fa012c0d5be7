// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad status`: prints what a running process reports.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write;

use super::call::{ask_brief, call_with};
use super::options::StatusOptions;
use crate::control::interface::STATUS;
use crate::control::report::{
    GidReport, GuestReport, QpReport, Report, SrqReport, UplinkReport, WorkerReport,
};

/// Asks the process behind the control socket and prints its answer.
pub fn print(options: &StatusOptions) -> Result<(), Box<dyn std::error::Error>> {
    let answer = if options.brief {
        ask_brief(&options.running.control)?
    } else {
        call_with(&options.running.control, STATUS, None, &[])?
    };
    // JSON is passed on as it came, because a newer process may report more than this program knows.
    let text = if options.json {
        serde_json::to_string_pretty(&answer)? + "\n"
    } else {
        text(&Report::read(answer)?)
    };
    // Whoever reads the output may stop before its end.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn text(report: &Report) -> String {
    let workers: String = report.workers.iter().enumerate().map(worker).collect();
    let guests = report.guests.iter().map(guest);
    let uplinks = report.uplinks.iter().map(uplink);
    std::iter::once(workers).chain(guests).chain(uplinks).collect::<Vec<_>>().join("\n")
}

fn uplink(UplinkReport { network, name, counters }: &UplinkReport) -> String {
    format!("uplink of network {network}: {name}\n") + &text_of_counters("", counters)
}

/// Returns the lines of the counters that are not zero, with a prefix for their names.
fn text_of_counters(prefix: &str, counters: &BTreeMap<String, u64>) -> String {
    let counters = counters.iter().filter(|(_, value)| **value != 0);
    counters.map(|(name, value)| format!("  {prefix}{name} {value}\n")).collect::<Vec<_>>().concat()
}

fn worker((index, worker): (usize, &WorkerReport)) -> String {
    let WorkerReport { guests, work_seconds, poll_seconds, wait_seconds, sleep_seconds, .. } =
        *worker;
    let parts = [work_seconds, poll_seconds, wait_seconds, sleep_seconds];
    let all = parts.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let [work, poll, wait, sleep] = parts.map(|part| 100.0 * part / all);
    format!(
        "worker {index}: {guests} guests, works {work:.1} %, polls {poll:.1} %, \
         waits for a processor {wait:.1} %, sleeps {sleep:.1} %; it has {:.1} % of a processor\n",
        work + poll
    )
}

/// Counters of the messages that programs of a guest post.
const POSTED: [&str; 4] = ["send_messages", "write_messages", "read_messages", "atomic_messages"];

/// Returns the line that says how many doorbells the messages of a guest cost. Where the worker finds the next message
/// before it gives its processor up, there are few.
fn doorbells(counters: &BTreeMap<String, u64>) -> String {
    let count = |name: &str| counters.get(name).copied().unwrap_or(0);
    let (bells, messages) = (count("doorbells"), POSTED.into_iter().map(count).sum::<u64>());
    if bells == 0 || messages == 0 {
        return String::new();
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let each = bells as f64 / messages as f64;
    format!("  {each:.3} doorbells a message\n")
}

fn guest(guest: &GuestReport) -> String {
    let state = match (guest.connected, guest.started) {
        (true, true) => format!("running on {}", or_dash(guest.queues.as_ref())),
        (true, false) => "connected, no driver".to_owned(),
        (false, _) => "not connected".to_owned(),
    };
    let GuestReport { name, transport, socket, network, pds, mrs, mws, cqs, .. } = guest;
    let refused = match guest.refused_vmms {
        0 => String::new(),
        count => format!("  {count} VMMs refused\n"),
    };
    let (worker, mac) = (or_dash(guest.worker), or_dash(guest.mac.as_ref()));
    let (qps, srqs) = (guest.qp_count(), guest.srq_count);
    let head = format!(
        "{name}: {state}, worker {worker}, {transport} {socket}, network {network}, MAC {mac}\n"
    );
    let objects = format!("  {pds} PDs, {mrs} MRs, {mws} MWs, {cqs} CQs, {qps} QPs, {srqs} SRQs\n");
    [head, refused]
        .into_iter()
        .chain(guest.gids.iter().map(gid))
        .chain([objects])
        .chain(guest.qps.iter().map(qp))
        .chain(guest.srqs.iter().map(srq))
        .chain([
            doorbells(&guest.counters),
            text_of_counters("", &guest.counters),
            text_of_counters("nic_", &guest.nic),
        ])
        .collect()
}

fn gid(GidReport { index, gid, vlan }: &GidReport) -> String {
    let vlan = vlan.map(|vlan| format!(" VLAN {vlan}")).unwrap_or_default();
    format!("  GID {index} {gid}{vlan}\n")
}

fn qp(qp: &QpReport) -> String {
    let QpReport { qpn, service, state, dest_gid, sends, receives, .. } = qp;
    let peer = qp.dest_qpn.map(|peer| format!(" peer QP {peer} at {}", or_dash(dest_gid.as_ref())));
    let peer = peer.unwrap_or_default();
    format!("  QP {qpn:<5} {service:<4} {state:<5}{peer} sends {sends} receives {receives}\n")
}

fn srq(srq: &SrqReport) -> String {
    let SrqReport { srqn, receives, max_wr, limit, qps, in_error } = srq;
    let state = if *in_error { " in error" } else { "" };
    format!("  SRQ {srqn:<4} receives {receives} of {max_wr} limit {limit} QPs {qps}{state}\n")
}

/// Returns a value as text, or a dash if there is no value.
fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
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
            "mac": null, "connected": true, "refused_vmms": 2, "started": true,
            "queues": "rings", "pds": 1, "mrs": 2, "cqs": 3,
            "mws": 1, "qp_counts": [{ "count": 2 }], "srq_count": 2, "gids": [{ "index": 0, "gid": "fe80::1", "vlan": null },
                                { "index": 1, "gid": "fe80::1", "vlan": 5 }],
            "qps": [{ "qpn": 2, "type": "RC", "state": "RTS", "dest_qpn": 7, "dest_gid": "fe80::2",
                      "sends": 0, "receives": 100 },
                    { "qpn": 1, "type": "GSI", "state": "RTS", "dest_qpn": null, "dest_gid": null,
                      "sends": 0, "receives": 512 }],
            "srqs": [{ "srqn": 1, "receives": 9, "max_wr": 64, "limit": 4, "qps": 2, "in_error": false },
                     { "srqn": 2, "receives": 0, "max_wr": 8, "limit": 0, "qps": 0, "in_error": true }],
            "counters": { "send_messages": 5, "write_messages": 3, "doorbells": 2, "timeouts": 0 },
            "nic": { "rx_frames": 3, "tx_lost": 0 },
        }], "uplinks": [{ "network": "default", "name": "tap rdma0",
                          "counters": { "tx_frames": 7, "tx_lost": 0 } }]});
        let expected = "\
worker 0: 1 guests, works 12.5 %, polls 25.0 %, waits for a processor 12.5 %, sleeps 50.0 %; it has 37.5 % of a processor

g1: running on rings, worker 0, vfio-user /s, network default, MAC -
  2 VMMs refused
  GID 0 fe80::1
  GID 1 fe80::1 VLAN 5
  1 PDs, 2 MRs, 1 MWs, 3 CQs, 2 QPs, 2 SRQs
  QP 2     RC   RTS   peer QP 7 at fe80::2 sends 0 receives 100
  QP 1     GSI  RTS   sends 0 receives 512
  SRQ 1    receives 9 of 64 limit 4 QPs 2
  SRQ 2    receives 0 of 8 limit 0 QPs 0 in error
  0.250 doorbells a message
  doorbells 2
  send_messages 5
  write_messages 3
  nic_rx_frames 3

uplink of network default: tap rdma0
  tx_frames 7
";
        assert_eq!(text(&serde_json::from_value(answer).unwrap()), expected);
    }
}
