// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad capture`: writes the frames of a guest's messages to a file that Wireshark reads.

mod pcapng;

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::call::Answers;
use super::options::CaptureOptions;
use crate::control::interface::CAPTURE;
use crate::control::report::FrameReport;
use pcapng::{Frame, Writer};

/// Writes frames until there are as many as wanted, a signal comes, or the process behind the control socket ends.
pub fn run(options: &CaptureOptions) -> Result<(), Box<dyn std::error::Error>> {
    let CaptureOptions { running, guest, qpn, snaplen, count, file } = options;
    let parameters = json!({ "guest": guest, "qpn": qpn, "snaplen": snaplen });
    let mut answers = Answers::ask(&running.control, CAPTURE, Some(parameters))?;
    let Some(_) = answers.next()? else { return Ok(()) };
    end_by_signal(answers.stream()?)?;
    let out: Box<dyn Write> = if file.as_os_str() == "-" {
        Box::new(std::io::stdout())
    } else {
        Box::new(File::create(file)?)
    };
    let mut writer = Writer::new(out, guest, snaplen.unwrap_or(0))?;
    eprintln!("virtio-rdmad: captures the frames of {guest}");
    let mut dropped = 0;
    while count.is_none_or(|count| writer.count < count) {
        let Some(answer) = answers.next()? else { break };
        let report: FrameReport = serde_json::from_value(answer)?;
        dropped += report.lost.unwrap_or(0);
        let Some(bytes) = report.frame.as_deref().and_then(bytes_of) else { continue };
        let FrameReport { time_nsec: time, leaves, length, .. } = report;
        writer.add(&Frame { time, leaves, length, bytes: &bytes })?;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let count = writer.count;
    writer.end(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), dropped)?;
    eprintln!("virtio-rdmad: {count} frames, and {dropped} that came faster than they were read");
    Ok(())
}

/// Ends the answers when a signal comes that ends the program.
fn end_by_signal(answers: UnixStream) -> Result<(), std::io::Error> {
    let (mut read, write) = UnixStream::pair()?;
    for signal in [SIGINT, SIGTERM] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    std::thread::spawn(move || {
        let _ = read.read(&mut [0]);
        let _ = answers.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// Returns bytes of their hexadecimal digits; `None` if these are none.
fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
