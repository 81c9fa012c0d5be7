// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report of a running process on its control socket, as JSON.
//!
//! The process writes these structures and `virtio-rdmad status` reads them. The names of the fields
//! are the keys that other programs know. A field that a process of another version does not report
//! has its default.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The answer to the method Status.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Report {
    /// The version of the process.
    pub version: String,
    /// The number of times that memory of a guest was lost.
    pub memory_losses: u64,
    /// The number of lines about guests that the log left out.
    pub log_lines_left_out: u64,
    /// The most guests that there can be.
    pub max_guests: u64,
    /// The settings of the configuration file when the process started, without the guests: values by the names of
    /// options, and the uplink of a network by "uplink" and the name of the network.
    pub settings: BTreeMap<String, String>,
    /// The workers, by index.
    pub workers: Vec<WorkerReport>,
    /// The guests, in the order of the command line.
    pub guests: Vec<GuestReport>,
    /// The uplinks, in the order of the names of their networks.
    pub uplinks: Vec<UplinkReport>,
}

/// The uplink of a network.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct UplinkReport {
    /// The name of the network.
    pub network: String,
    /// The name of the way that carries the packets, such as "tap rdma0" or "VXLAN 42 at 192.0.2.1".
    pub name: String,
    /// The counters by name.
    pub counters: BTreeMap<String, u64>,
}

/// A worker. Times are those since the process started.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct WorkerReport {
    /// The number of guests that it serves.
    pub guests: usize,
    /// The NUMA node on whose CPUs it runs, if there are several nodes.
    pub node: Option<u32>,
    /// Whether it sleeps now.
    pub asleep: bool,
    /// Time in turns that had work.
    pub work_seconds: f64,
    /// Time in which it polled without finding work.
    pub poll_seconds: f64,
    /// Time in which it was ready to run and other threads had the processor.
    pub wait_seconds: f64,
    /// Time in which it slept.
    pub sleep_seconds: f64,
    /// The number of rounds that it has made.
    pub rounds: u64,
    /// The number of times that it has gone to sleep.
    pub sleeps: u64,
    /// The durations of rounds with work.
    pub worked_rounds: HistogramReport,
    /// The durations of turns of guests with work.
    pub turns: HistogramReport,
}

/// A histogram of durations.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct HistogramReport {
    /// The sum of all times.
    pub sum_seconds: f64,
    /// The buckets, in the order of their bounds.
    pub buckets: Vec<BucketReport>,
}

/// A bucket of a histogram.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct BucketReport {
    /// The longest duration that is in it. The last bucket has no limit.
    pub up_to_seconds: Option<f64>,
    /// The number of durations that are in it, and in no bucket before.
    pub count: u64,
}

/// A guest.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct GuestReport {
    /// Its name.
    pub name: String,
    /// The network that it is in.
    pub network: String,
    /// The transport by which its VMM attaches the device: "vfio-user" or "vhost-user".
    pub transport: String,
    /// The path of the socket that its VMM connects to.
    pub socket: String,
    /// The guest as it is now: a [`crate::spec::GuestSpec`], which an earlier version writes as a text.
    pub spec: Value,
    /// The guest as its origin has named it, in the same form; null if the process does not report that.
    pub named: Value,
    /// The origin that has named it: "options", "file" or "call".
    pub origin: String,
    /// The MAC address of its network interface, if the command line has it.
    pub mac: Option<String>,
    /// Whether its VMM is connected.
    pub connected: bool,
    /// The number of VMMs that were refused, because the guest had one.
    pub refused_vmms: u64,
    /// Whether it leaves when its VMM does.
    pub leaving: bool,
    /// The index of the worker that serves it.
    pub worker: Option<usize>,
    /// The NUMA node of its memory, if that is known.
    pub node: Option<u32>,
    /// Whether its driver has started the device.
    pub started: bool,
    /// "rings" or "virtqueues" once the device has started.
    pub queues: Option<String>,
    /// Its GIDs.
    pub gids: Vec<GidReport>,
    /// The number of PDs that it has.
    pub pds: usize,
    /// The number of MRs that it has.
    pub mrs: usize,
    /// Bytes of memory that they cover.
    pub memory: u64,
    /// The number of memory windows that it has.
    pub mws: usize,
    /// The number of CQs that it has.
    pub cqs: usize,
    /// The numbers of QPs by type and state.
    pub qp_counts: Vec<QpCountReport>,
    /// The number of SRQs that it has.
    pub srq_count: usize,
    /// The number of multicast groups that it has joined.
    pub groups: usize,
    /// Its QPs, if the call wants them.
    pub qps: Vec<QpReport>,
    /// Its SRQs likewise.
    pub srqs: Vec<SrqReport>,
    /// The limits of these objects.
    pub limits: LimitsReport,
    /// Processor time of its worker in its turns, in seconds.
    pub work_seconds: f64,
    /// The counters by name.
    pub counters: BTreeMap<String, u64>,
    /// The counters of its network interface by name; empty if the process does not serve one.
    pub nic: BTreeMap<String, u64>,
}

/// The limits of a guest. Each of them is the smaller one of the limit of its device and that of its policy.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct LimitsReport {
    /// QPs, those of the connection manager among them.
    pub qps: u64,
    /// CQs.
    pub cqs: u64,
    /// SRQs.
    pub srqs: u64,
    /// MRs.
    pub mrs: u64,
    /// Memory windows.
    pub mws: u64,
    /// PDs.
    pub pds: u64,
    /// Multicast groups.
    pub groups: u64,
    /// Bytes of memory that MRs cover, if that has a limit.
    pub memory: Option<u64>,
}

/// An entry of a guest's GID table.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct GidReport {
    /// The index of the entry.
    pub index: u16,
    /// The GID, written as an IPv6 address.
    pub gid: String,
    /// The VLAN that the GID is in.
    pub vlan: Option<u16>,
}

/// The number of QPs of a type in a state.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct QpCountReport {
    /// The type, as that of a QP.
    #[serde(rename = "type")]
    pub service: String,
    /// The state, as that of a QP.
    pub state: String,
    /// The number of these QPs.
    pub count: usize,
}

/// A QP.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct QpReport {
    /// The QP number.
    pub qpn: u32,
    /// The type: "RC", "UC", "UD", "GSI", "XRC_INI" or "XRC_TGT".
    #[serde(rename = "type")]
    pub service: String,
    /// The state: "RESET", "INIT", "RTR" and so on.
    pub state: String,
    /// The QP number of the peer, if it has one.
    pub dest_qpn: Option<u32>,
    /// The GID of the peer, if it has one.
    pub dest_gid: Option<String>,
    /// The number of send work requests that the device has yet to take.
    pub sends: u16,
    /// The number of receive work requests that the device has yet to take.
    pub receives: u16,
    /// The path of messages to the peer, if it has one and the path is known: "local" or "wire".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The PSN of the packet that is sent next, if the QP has a peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sq_psn: Option<u32>,
    /// The PSN of the oldest packet that is not acknowledged; that of the next one if all are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sq_una: Option<u32>,
    /// The PSN that is expected of the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rq_psn: Option<u32>,
    /// The number of retries that the QP has left without an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retries_left: Option<u8>,
    /// The number of retries that the QP has left without a receive at the peer; 7 means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnr_retries_left: Option<u8>,
    /// The last error since RESET.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<QpErrorReport>,
}

/// The last error of a QP.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct QpErrorReport {
    /// The time of the error, in microseconds since 1970.
    pub time_usec: u64,
    /// The name of the error: that of a status or an event of libibverbs, without its prefix.
    pub reason: String,
    /// The access to memory that was refused, if that is the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedReport>,
}

/// An access to memory that was refused.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct RefusedReport {
    /// The key that the memory was named by.
    pub key: u32,
    /// The address of the first byte, in hexadecimal digits behind "0x".
    pub address: String,
    /// The number of bytes.
    pub length: u64,
    /// The reason: "unknown_key", "invalidated", "other_pd", "no_right", "qp_forbids", "other_qp", "out_of_range" or
    /// "no_memory".
    pub reason: String,
}

/// Something that has happened.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct EventReport {
    /// The time of the event, in microseconds since 1970.
    pub time_usec: u64,
    /// The kind of the event: "watching" when events begin to be told of, "connected", "moved", "disconnected",
    /// "qp_error", "cq_error", "srq_error", "started" and "reset" for the device, or "lost" where events were not told
    /// of.
    pub event: String,
    /// The guest that it has happened to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// The worker that serves the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<usize>,
    /// The QP number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qpn: Option<u32>,
    /// The CQ number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cqn: Option<u32>,
    /// The SRQ number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub srqn: Option<u32>,
    /// The reason, or the name of the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The access to memory that was refused, if that is the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedReport>,
    /// The number of events that were not told of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

impl Report {
    /// Reads a report. A process of an earlier version does not count QPs and SRQs.
    pub fn read(value: Value) -> Result<Self, serde_json::Error> {
        let mut report: Self = serde_json::from_value(value)?;
        report.guests.iter_mut().for_each(GuestReport::count);
        Ok(report)
    }
}

impl GuestReport {
    /// Counts the QPs and SRQs that have entries, unless the process has counted them.
    fn count(&mut self) {
        if !self.qp_counts.is_empty() || self.srq_count != 0 {
            return;
        }
        self.srq_count = self.srqs.len();
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for qp in &self.qps {
            *counts.entry((&qp.service, &qp.state)).or_default() += 1;
        }
        let report = |((service, state), count): ((&str, &str), usize)| QpCountReport {
            service: service.to_owned(),
            state: state.to_owned(),
            count,
        };
        self.qp_counts = counts.into_iter().map(report).collect();
    }

    /// Returns how many QPs the guest has.
    pub fn qp_count(&self) -> usize {
        self.qp_counts.iter().map(|of| of.count).sum()
    }
}

impl EventReport {
    /// Makes the report of an event of this kind, which happens now and concerns nobody.
    pub fn new(event: &str) -> Self {
        Self::at(SystemTime::now(), event)
    }

    /// Makes the report of an event of this kind and time, which concerns nobody.
    pub fn at(time: SystemTime, event: &str) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_usec = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        Self { time_usec, event: event.to_owned(), ..Self::default() }
    }

    /// Makes the report of events that were not told of.
    pub fn of_lost(count: u64) -> Self {
        Self { lost: Some(count), ..Self::new("lost") }
    }
}

/// Something that has happened to a message of a guest that is traced.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct SeenReport {
    /// The time of the event, in nanoseconds since 1970.
    pub time_nsec: u64,
    /// The kind of the event: "tracing" when events begin to be told of, "posted", "copied", "refused", "nak",
    /// "send_completed", "receive_completed", "retried", "packet_out", "packet_in", or "lost" where events were not
    /// told of.
    pub event: String,
    /// The guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// The QP number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qpn: Option<u32>,
    /// The PSN of the packet, or of the first packet of the message or of the chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psn: Option<u32>,
    /// The operation of a work request or of a packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opcode: Option<String>,
    /// The `wr_id` of the work request, in hexadecimal digits behind "0x".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wr_id: Option<String>,
    /// The number of bytes of the message that are in front of the chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The number of bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// The status of a CQE, as libibverbs names it, without its prefix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The number of retries that the requester has left after that, if they have a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retries_left: Option<u8>,
    /// The access to memory that was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedReport>,
    /// The number of events that were not told of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// A frame of a message of a guest.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct FrameReport {
    /// The time of the event, in nanoseconds since 1970.
    pub time_nsec: u64,
    /// The kind of the event: "capturing" when frames begin to be told of, "frame", or "lost" where frames were not
    /// told of.
    pub event: String,
    /// The QP number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qpn: Option<u32>,
    /// Whether the frame leaves the guest.
    pub leaves: bool,
    /// The number of bytes of the frame.
    pub length: u32,
    /// The first bytes of the frame, by two hexadecimal digits each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frame: Option<String>,
    /// The number of frames that were not told of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// An SRQ.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct SrqReport {
    /// The SRQ number.
    pub srqn: u32,
    /// The number of work requests that the device has yet to take.
    pub receives: u32,
    /// The most work requests that it can hold.
    pub max_wr: u32,
    /// The number of work requests below which it raises an event; 0: it raises no event.
    pub limit: u32,
    /// The number of QPs that receive from it.
    pub qps: u32,
    /// Whether it is in error.
    pub in_error: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_earlier_version_has_not_counted_is_counted() {
        let qp = |service, state| json!({ "type": service, "state": state });
        let qps = [qp("RC", "RTS"), qp("GSI", "RTS"), qp("RC", "RTS"), qp("RC", "ERR")];
        let earlier = json!({ "guests": [{ "name": "g", "qps": qps, "srqs": [{ "srqn": 1 }] }] });
        let report = Report::read(earlier).unwrap();
        let guest = &report.guests[0];
        let counts = guest.qp_counts.iter().map(|of| (&*of.service, &*of.state, of.count));
        assert!(counts.eq([("GSI", "RTS", 1), ("RC", "ERR", 1), ("RC", "RTS", 2)]));
        assert_eq!((guest.qp_count(), guest.srq_count), (4, 1));
        let counted =
            json!({ "guests": [{ "qp_counts": [{ "type": "UD", "state": "RTS", "count": 3 }] }] });
        assert_eq!(Report::read(counted).unwrap().guests[0].qp_count(), 3);
    }
}
