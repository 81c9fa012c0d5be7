// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad trace`: prints what happens to the messages of a guest while it happens.

use std::io::Write;

use serde_json::json;

use super::call::Answers;
use super::options::TraceOptions;
use super::watch::access;
use crate::control::interface::TRACE;
use crate::control::report::SeenReport;

/// Prints what happens until the process behind the control socket ends, or nobody reads any more.
pub fn print(options: &TraceOptions) -> Result<(), Box<dyn std::error::Error>> {
    let parameters = json!({ "guest": options.guest, "qpn": options.qpn });
    let mut answers = Answers::ask(&options.running.control, TRACE, Some(parameters))?;
    while let Some(seen) = answers.next()? {
        let line =
            if options.json { seen.to_string() } else { text(&serde_json::from_value(seen)?) };
        let mut stdout = std::io::stdout();
        if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the line of a report, which begins with the time of day in UTC.
fn text(report: &SeenReport) -> String {
    let (seconds, nanos) = (report.time_nsec / 1_000_000_000, report.time_nsec % 1_000_000_000);
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    let time = format!("{hours:02}:{minutes:02}:{:02}.{nanos:09}", seconds % 60);
    let subject = [
        Some(time),
        report.guest.clone(),
        report.qpn.map(|qpn| format!("QP {qpn}")),
        report.psn.map(|psn| format!("PSN {psn}")),
    ];
    let details = [
        report.opcode.clone(),
        report.wr_id.as_ref().map(|wr_id| format!("wr_id {wr_id}")),
        report.offset.map(|offset| format!("offset {offset}")),
        report.length.map(|length| format!("{length} bytes")),
        report.status.clone(),
        report.reason.clone(),
        report.retries_left.map(|left| format!("{left} retries left")),
        report.refused.as_ref().map(access),
        report.lost.map(|lost| format!("{lost} lines")),
    ];
    let (subject, details) = (joined(subject, " "), joined(details, ", "));
    format!("{subject}: {} {details}", report.event).trim_end().to_owned()
}

/// Returns the parts that are there, with a separator between them.
fn joined<const N: usize>(parts: [Option<String>; N], separator: &str) -> String {
    parts.into_iter().flatten().collect::<Vec<_>>().join(separator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_lines() {
        let report = SeenReport {
            time_nsec: 86_400_000_000_000 + 3_723_000_000_004,
            event: "posted".to_owned(),
            guest: Some("g1".to_owned()),
            qpn: Some(17),
            psn: Some(5),
            opcode: Some("SEND".to_owned()),
            wr_id: Some("0x9".to_owned()),
            length: Some(64),
            ..SeenReport::default()
        };
        let line = "01:02:03.000000004 g1 QP 17 PSN 5: posted SEND, wr_id 0x9, 64 bytes";
        assert_eq!(text(&report), line);
        let lost = SeenReport { event: "lost".to_owned(), lost: Some(3), ..SeenReport::default() };
        assert_eq!(text(&lost), "00:00:00.000000000: lost 3 lines");
    }
}
