// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The changes between two reports, as lines of text.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::report::{GuestReport, Report, WorkerReport};

/// Counters of work requests that a guest has completed as the requester.
const MESSAGES: [&str; 6] = [
    "send_messages",
    "write_messages",
    "read_messages",
    "atomic_messages",
    "flush_messages",
    "datagram_messages",
];
/// The bytes of one MiB.
const MIB: f64 = 1_048_576.0;

/// The work of a guest in each second.
struct Rates<'a> {
    guest: &'a GuestReport,
    messages: f64,
    /// Bytes sent.
    sent: f64,
    /// Bytes received.
    received: f64,
    errors: f64,
}

/// Returns lines for the workers and for the guests, of which those with the most traffic come first.
pub fn lines(before: &Report, now: &Report, time: Duration) -> Vec<String> {
    let seconds = time.as_secs_f64().max(f64::MIN_POSITIVE);
    let connected = now.guests.iter().filter(|guest| guest.connected).count();
    let head = format!(
        "virtio-rdmad {}: {} guests, {connected} connected; {seconds:.1} s",
        now.version,
        now.guests.len()
    );
    let workers = now.workers.iter().enumerate().map(|(index, worker)| {
        let none = WorkerReport::default();
        worker_line(index, before.workers.get(index).unwrap_or(&none), worker, seconds)
    });
    let mut guests: Vec<_> = now.guests.iter().map(|guest| rates(before, guest, seconds)).collect();
    guests.sort_by(|one, other| {
        let key = |rates: &Rates<'_>| (rates.sent + rates.received, rates.messages);
        let (one_key, other_key) = (key(one), key(other));
        let order = other_key.0.total_cmp(&one_key.0);
        let order = order.then(other_key.1.total_cmp(&one_key.1));
        order.then_with(|| one.guest.name.cmp(&other.guest.name))
    });
    let mut lines = vec![head, String::new()];
    lines.push("WORKER GUESTS  WORK%  POLL%  WAIT% SLEEP%   ROUNDS/S".to_owned());
    lines.extend(workers);
    lines.push(String::new());
    lines.push("WORKER    QPS    MRS      MSG/S  TX MiB/S  RX MiB/S    ERR/S GUEST".to_owned());
    lines.extend(guests.iter().map(guest_line));
    lines
}

fn worker_line(index: usize, before: &WorkerReport, now: &WorkerReport, seconds: f64) -> String {
    let parts = |worker: &WorkerReport| {
        let WorkerReport { work_seconds, poll_seconds, wait_seconds, sleep_seconds, .. } = *worker;
        [work_seconds, poll_seconds, wait_seconds, sleep_seconds]
    };
    let (now_parts, before_parts) = (parts(now), parts(before));
    let spent: Vec<f64> =
        now_parts.iter().zip(before_parts).map(|(now, before)| (now - before).max(0.0)).collect();
    let all = spent.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let shares = spent.iter().map(|part| format!(" {:6.1}", 100.0 * part / all));
    let shares = shares.collect::<Vec<_>>().concat();
    let rounds = difference(now.rounds, before.rounds) / seconds;
    format!("{index:>6} {:>6}{shares} {rounds:>10.0}", now.guests)
}

/// Returns what a guest has done since an earlier report: nothing, if that does not have the guest.
fn rates<'a>(before: &Report, guest: &'a GuestReport, seconds: f64) -> Rates<'a> {
    let then = before.guests.iter().find(|then| then.name == guest.name);
    let sum = |is_counted: &dyn Fn(&str) -> bool| {
        then.map_or(0.0, |then| {
            let total = |counters: &BTreeMap<String, u64>| -> u64 {
                counters.iter().filter(|(name, _)| is_counted(name)).map(|(_, value)| value).sum()
            };
            difference(total(&guest.counters), total(&then.counters)) / seconds
        })
    };
    Rates {
        guest,
        messages: sum(&|name| MESSAGES.contains(&name)),
        sent: sum(&|name| name == "xmit_bytes"),
        received: sum(&|name| name == "rcv_bytes"),
        errors: sum(&|name| name.ends_with("_errors") || name.ends_with("_violations")),
    }
}

fn guest_line(rates: &Rates<'_>) -> String {
    let Rates { guest, messages, sent, received, errors } = rates;
    let worker = guest.worker.map_or("-".to_owned(), |worker| worker.to_string());
    let (sent, received) = (sent / MIB, received / MIB);
    // A name must not control the terminal.
    let name = guest.name.replace(char::is_control, "?");
    format!(
        "{worker:>6} {:>6} {:>6} {messages:>10.0} {sent:>9.1} {received:>9.1} {errors:>8.1} {name}",
        guest.qp_count(),
        guest.mrs
    )
}

/// Returns by how much a counter has grown. It is less than before if there is another process.
#[allow(clippy::cast_precision_loss)] // the result is printed with a few digits
fn difference(now: u64, before: u64) -> f64 {
    now.saturating_sub(before) as f64
}

#[cfg(test)]
mod tests {
    use serde_json::{json, Value};

    use super::*;

    fn report(rounds: u64, work: f64, guests: &[(&str, Value)]) -> Report {
        let guests: Vec<_> = guests
            .iter()
            .map(|(name, counters)| {
                json!({ "name": name, "connected": true, "worker": 0, "mrs": 3, "qp_counts": [{ "count": 2 }],
                        "counters": counters })
            })
            .collect();
        let worker = json!({ "guests": 2, "work_seconds": work, "sleep_seconds": 10.0 - work,
                             "rounds": rounds });
        let report = json!({ "version": "1.2", "workers": [worker], "guests": guests });
        serde_json::from_value(report).unwrap()
    }

    #[test]
    fn differences_are_shown_by_traffic() {
        let none = json!({});
        let before = report(
            100,
            1.0,
            &[("idle", json!({ "xmit_bytes": 5_000_000 })), ("busy\x1b", none.clone())],
        );
        let mut now = report(
            300,
            3.0,
            &[
                ("new", json!({ "xmit_bytes": 7_000_000 })),
                ("idle", json!({ "xmit_bytes": 4 })),
                (
                    "busy\x1b",
                    json!({ "xmit_bytes": 4 << 20, "rcv_bytes": 1 << 20, "send_messages": 6,
                            "read_messages": 4, "receive_messages": 9, "timeouts": 9,
                            "retry_exceeded_errors": 1, "access_violations": 2 }),
                ),
            ],
        );
        now.workers[0].sleep_seconds = 15.0;
        let expected = "\
virtio-rdmad 1.2: 3 guests, 3 connected; 2.0 s

WORKER GUESTS  WORK%  POLL%  WAIT% SLEEP%   ROUNDS/S
     0      2   25.0    0.0    0.0   75.0        100

WORKER    QPS    MRS      MSG/S  TX MiB/S  RX MiB/S    ERR/S GUEST
     0      2      3          5       2.0       0.5      1.5 busy?
     0      2      3          0       0.0       0.0      0.0 idle
     0      2      3          0       0.0       0.0      0.0 new";
        assert_eq!(lines(&before, &now, Duration::from_secs(2)).join("\n"), expected);
    }
}
