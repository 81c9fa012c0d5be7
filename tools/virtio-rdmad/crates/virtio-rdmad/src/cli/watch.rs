// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad watch`: prints what happens to guests while it happens.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::call::Answers;
use super::options::WatchOptions;
use crate::control::interface::MONITOR;
use crate::control::report::{EventReport, RefusedReport};

/// Prints events until the process behind the control socket ends, or nobody reads them any more.
pub fn print(options: &WatchOptions) -> Result<(), Box<dyn std::error::Error>> {
    let mut answers = Answers::ask(&options.running.control, MONITOR, None)?;
    while let Some(event) = answers.next()? {
        let line = if options.json {
            event.to_string()
        } else {
            text(&serde_json::from_value(event)?, SystemTime::now())
        };
        let mut stdout = std::io::stdout();
        if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the line of an event, which begins with its age in seconds if that is not 0.
fn text(report: &EventReport, now: SystemTime) -> String {
    let EventReport {
        time_usec, event, guest, worker, qpn, cqn, srqn, reason, refused, lost, ..
    } = report;
    let age = now.duration_since(UNIX_EPOCH + Duration::from_micros(*time_usec));
    let age = age.map_or(0, |age| age.as_secs());
    let late = if age == 0 { String::new() } else { format!("{age} s ago: ") };
    let guest = guest.as_ref().map(|guest| format!("{guest}: ")).unwrap_or_default();
    let objects = [
        ("worker", worker.map(|worker| worker as u64)),
        ("QP", qpn.map(u64::from)),
        ("CQ", cqn.map(u64::from)),
        ("SRQ", srqn.map(u64::from)),
        ("events", *lost),
    ];
    let objects: String = objects
        .iter()
        .filter_map(|(kind, number)| number.map(|number| format!(", {kind} {number}")))
        .collect();
    let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let refused = refused.as_ref().map(|refused| format!(": {}", access(refused)));
    format!("{late}{guest}{event}{objects}{reason}{}", refused.unwrap_or_default())
}

/// Returns what is said of an access to memory that was refused.
pub fn access(RefusedReport { key, address, length, reason }: &RefusedReport) -> String {
    format!("key {key:#010x}, address {address}, {length} bytes: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines() {
        let error = EventReport {
            guest: Some("g1".to_owned()),
            qpn: Some(5),
            reason: Some("RETRY_EXC_ERR".to_owned()),
            ..EventReport::new("qp_error")
        };
        let now = SystemTime::now();
        assert_eq!(text(&error, now), "g1: qp_error, QP 5: RETRY_EXC_ERR");
        let refused = RefusedReport {
            key: 0x1234,
            address: "0x7f00".to_owned(),
            length: 8,
            reason: "out_of_range".to_owned(),
        };
        let error = EventReport { refused: Some(refused), ..error };
        assert_eq!(
            text(&error, now),
            "g1: qp_error, QP 5: RETRY_EXC_ERR: key 0x00001234, address 0x7f00, 8 bytes: out_of_range"
        );
        let early = EventReport::at(now - Duration::from_secs(7), "watching");
        assert_eq!(text(&early, now + Duration::from_micros(1)), "7 s ago: watching");
    }
}
