// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A survey of the guests, the workers and the uplinks of the process.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use engine::{Address, DeviceStatus, Limits, QpCount, QpPath, QpState, QpStatus, Quota, SrqStatus};
use network::Switch;

use super::report::{
    BucketReport, GidReport, GuestReport, HistogramReport, LimitsReport, QpCountReport, QpReport,
    Report, SrqReport, UplinkReport, WorkerReport,
};
use super::told;
use crate::guest::guests::Guests;
use crate::guest::histogram;
use crate::guest::mailbox::Mailbox;
use crate::guest::times::Reading;
use crate::guest::Guest;
use crate::spec::{Spec, MAX_GUESTS};

/// The parts of the process that are told of.
pub struct Surveyed {
    /// The guests.
    pub guests: Arc<Guests>,
    /// The workers, by index.
    pub workers: Arc<[Mailbox]>,
    /// The switches.
    pub switches: Vec<Arc<Switch>>,
    /// The settings of the configuration file when the process started, without the guests.
    pub settings: BTreeMap<String, String>,
}

/// Returns what is to be told of the parts of the process. With `detail`, each QP and SRQ has an entry.
pub fn survey(Surveyed { guests, workers, switches, settings }: &Surveyed, detail: bool) -> Report {
    let mut uplinks: Vec<_> = switches.iter().filter_map(|switch| uplink_report(switch)).collect();
    uplinks.sort_by(|one, other| one.network.cmp(&other.network));
    Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        memory_losses: memory::losses(),
        log_lines_left_out: crate::os::log::left_out(),
        max_guests: MAX_GUESTS as u64,
        settings: settings.clone(),
        workers: workers.iter().map(worker_report).collect(),
        guests: guests.all().iter().map(|guest| guest_report(guest, switches, detail)).collect(),
        uplinks,
    }
}

fn worker_report(worker: &Mailbox) -> WorkerReport {
    let Reading { work, poll, wait, sleep, rounds, sleeps, asleep, worked_rounds, turns } =
        worker.times.read();
    WorkerReport {
        guests: worker.guests(),
        node: worker.node,
        asleep,
        work_seconds: work.as_secs_f64(),
        poll_seconds: poll.as_secs_f64(),
        wait_seconds: wait.as_secs_f64(),
        sleep_seconds: sleep.as_secs_f64(),
        rounds,
        sleeps,
        worked_rounds: histogram_report(&worked_rounds),
        turns: histogram_report(&turns),
    }
}

fn histogram_report(histogram::Reading { sum, buckets }: &histogram::Reading) -> HistogramReport {
    let buckets = buckets.iter().map(|(bound, count)| BucketReport {
        up_to_seconds: bound.map(|bound| bound.as_secs_f64()),
        count: *count,
    });
    HistogramReport { sum_seconds: sum.as_secs_f64(), buckets: buckets.collect() }
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
    let mut nics = switches.iter().flat_map(|switch| switch.nics());
    nics.find(|nic| nic.guest == guest).map(|nic| nic.counters()).unwrap_or_default()
}

fn guest_report(guest: &Guest, switches: &[Arc<Switch>], detail: bool) -> GuestReport {
    let spec = &guest.spec;
    let status = if detail { guest.device.status() } else { guest.device.summary() };
    let DeviceStatus { started, limits, quota, gids, qp_counts, qps, srqs, counters, .. } = status;
    let rings = guest.rings.load(Ordering::Relaxed);
    let queues = if rings { "rings" } else { "virtqueues" };
    GuestReport {
        name: spec.name.clone(),
        network: spec.network.clone(),
        transport: spec.transport().name().to_owned(),
        socket: spec.path().to_string_lossy().into_owned(),
        spec: guest.current().to_map().into(),
        named: guest.named().to_map().into(),
        origin: guest.origin.name().to_owned(),
        mac: spec.mac.map(|mac| mac.to_string()),
        connected: guest.link.worker().is_some(),
        refused_vmms: guest.seat.refused(),
        leaving: guest.leaves.load(Ordering::Relaxed),
        worker: guest.link.worker(),
        node: guest.node(),
        started,
        queues: started.then(|| queues.to_owned()),
        gids: gids.into_iter().map(gid_report).collect(),
        pds: status.pds,
        mrs: status.mrs,
        memory: status.memory,
        mws: status.mws,
        cqs: status.cqs,
        qp_counts: qp_counts.iter().map(qp_count_report).collect(),
        srq_count: status.srq_count,
        groups: status.groups,
        qps: qps.iter().map(qp_report).collect(),
        srqs: srqs.iter().map(srq_report).collect(),
        limits: limits_report(&limits, &quota, rings),
        work_seconds: guest.work().as_secs_f64(),
        counters: counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        nic: nic_counters(switches, &spec.name),
    }
}

/// Returns how much a guest may have, which depends on what its queues are.
fn limits_report(limits: &Limits, quota: &Quota, rings: bool) -> LimitsReport {
    let (qps, cqs) =
        if rings { (limits.ring_qp, limits.ring_cq) } else { (limits.max_qp, limits.max_cq) };
    LimitsReport {
        qps: quota.qps.min(qps.into()).into(),
        cqs: quota.cqs.min(cqs.into()).into(),
        srqs: quota.srqs.min(limits.max_srq.into()).into(),
        mrs: quota.mrs.min(limits.max_mr).into(),
        mws: if rings { quota.mws.min(limits.max_mw).into() } else { 0 },
        pds: quota.pds.min(limits.max_pd).into(),
        groups: quota.groups.min(limits.max_mcast_grp).into(),
        memory: Some(quota.memory).filter(|memory| *memory != u64::MAX),
    }
}

fn gid_report((index, Address { gid, vlan }): (u16, Address)) -> GidReport {
    GidReport { index, gid: format_gid(gid), vlan }
}

fn qp_count_report(of: &QpCount) -> QpCountReport {
    let QpCount { service, state, count } = *of;
    QpCountReport { service: service.to_owned(), state: name_of(state), count }
}

/// Returns the name of a state, as the field has it.
fn name_of(state: QpState) -> String {
    format!("{state:?}").to_uppercase()
}

fn qp_report(qp: &QpStatus) -> QpReport {
    let QpStatus { qpn, service, state, dest_qpn, dest_gid, sends, receives, .. } = *qp;
    let connection = qp.connection.as_ref();
    QpReport {
        qpn,
        service: service.to_owned(),
        state: name_of(state),
        dest_qpn,
        dest_gid: dest_gid.map(format_gid),
        sends,
        receives,
        path: connection.and_then(|connection| name_of_path(connection.path)).map(str::to_owned),
        sq_psn: connection.map(|connection| connection.sq_psn),
        sq_una: connection.map(|connection| connection.sq_una),
        rq_psn: connection.map(|connection| connection.rq_psn),
        retries_left: connection.map(|connection| connection.retries_left),
        rnr_retries_left: connection.map(|connection| connection.rnr_retries_left),
        last_error: qp.last_error.as_ref().map(told::last_error),
    }
}

fn name_of_path(path: QpPath) -> Option<&'static str> {
    match path {
        QpPath::Local => Some("local"),
        QpPath::Wire => Some("wire"),
        QpPath::Unknown => None,
    }
}

fn srq_report(srq: &SrqStatus) -> SrqReport {
    let SrqStatus { srqn, receives, max_wr, limit, qps, in_error } = *srq;
    SrqReport { srqn, receives, max_wr, limit, qps, in_error }
}

fn format_gid(gid: [u8; 16]) -> String {
    Ipv6Addr::from(gid).to_string()
}
