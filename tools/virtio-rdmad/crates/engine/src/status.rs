// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The status of a device: a snapshot of its objects, limits and counters.

use std::sync::Mutex;
use std::time::Duration;

use roce::Psn;

use crate::base::address::{Address, Gid};
use crate::base::counters::Counter;
use crate::base::host::Incident;
use crate::base::limits::Limits;
use crate::base::qp_type::QpType;
use crate::base::quota::Quota;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::qp::halves::{Failure, Partner, Requester};
use crate::qp::state::QpState;
use crate::queue::srq::Srq;
use crate::queue::work_queue::WorkQueue;
use crate::queue::wq_ring::Backlog;
use crate::schedule::guest::Guest;
use crate::transport::hca::{Hca, Qp, Responder};
use crate::transport::wire::is_away;

/// The status of a QP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpStatus {
    /// Its number.
    pub qpn: u32,
    /// "RC", "UC", "UD", "GSI", "XRC_INI" or "XRC_TGT".
    pub service: &'static str,
    /// Its state.
    pub state: QpState,
    /// The peer's number, if connected.
    pub dest_qpn: Option<u32>,
    /// The peer's GID, if connected.
    pub dest_gid: Option<Gid>,
    /// Send work requests that the device has yet to take; 0 while the device is frozen.
    pub sends: u16,
    /// Receive work requests likewise.
    pub receives: u16,
    /// The status of the connection, if connected.
    pub connection: Option<ConnectionStatus>,
    /// The last error since RESET. An image of the device does not have it.
    pub last_error: Option<QpError>,
}

/// The path of the messages of a connection to its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpPath {
    /// Messages are copied to a guest of the same network.
    Local,
    /// Messages are sent in packets.
    Wire,
    /// No guest of the network has had the address of the other end, and no packet has come from there.
    Unknown,
}

/// The status of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionStatus {
    /// The path of messages to the other end.
    pub path: QpPath,
    /// The PSN of the packet that is sent next.
    pub sq_psn: u32,
    /// The PSN of the oldest packet that is not acknowledged; that of the next one if all are.
    pub sq_una: u32,
    /// The PSN that is expected.
    pub rq_psn: u32,
    /// The number of retries that the requester has left without an answer.
    pub retries_left: u8,
    /// The number of retries that the requester has left without a receive at the other end; 7 means no limit.
    pub rnr_retries_left: u8,
}

/// An error of a QP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpError {
    /// The time since the error. The time for which the device was frozen does not count.
    pub age: Duration,
    /// The incident.
    pub incident: Incident,
}

/// The number of QPs of a type in a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpCount {
    /// The type, as in [`QpStatus::service`].
    pub service: &'static str,
    /// The state.
    pub state: QpState,
    /// The number of these QPs; not 0.
    pub count: usize,
}

/// The status of an SRQ.
#[derive(Clone, Debug)]
pub struct SrqStatus {
    /// Its number.
    pub srqn: u32,
    /// Work requests that the device has yet to take; 0 while the device is frozen.
    pub receives: u32,
    /// The most that it holds.
    pub max_wr: u32,
    /// SRQ_LIMIT_REACHED is due below this; 0: not armed.
    pub limit: u32,
    /// QPs that receive from it.
    pub qps: u32,
    /// Whether its owner broke it.
    pub in_error: bool,
}

/// The status of a device.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// The guest's name.
    pub name: String,
    /// Whether the guest's driver has started the device.
    pub started: bool,
    /// The limits of the device.
    pub limits: Limits,
    /// The part of the limits that the guest may use.
    pub quota: Quota,
    /// GIDs by index.
    pub gids: Vec<(u16, Address)>,
    /// The numbers of QPs by type and state.
    pub qp_counts: Vec<QpCount>,
    /// The number of live SRQs.
    pub srq_count: usize,
    /// Live QPs, if they are told of.
    pub qps: Vec<QpStatus>,
    /// Live SRQs likewise.
    pub srqs: Vec<SrqStatus>,
    /// The number of live CQs.
    pub cqs: usize,
    /// The number of live MRs.
    pub mrs: usize,
    /// Bytes of memory that they cover, as a quota counts them.
    pub memory: u64,
    /// The number of live memory windows.
    pub mws: usize,
    /// The number of live PDs.
    pub pds: usize,
    /// The number of multicast groups that QPs are attached to.
    pub groups: usize,
    /// Every counter's name and value.
    pub counters: Vec<(&'static str, u64)>,
}

/// Returns what there is to tell of a guest's device without its single QPs and SRQs. Waits for a control command under
/// way.
pub(crate) fn of_guest(guest: &Guest, started: bool) -> DeviceStatus {
    let hca = &guest.hca;
    let gids = hca.gids();
    let control = lock(&guest.control);
    let objects = &control.objects;
    let (mrs, mws, pds) = (objects.mrs.len(), objects.mws.len(), objects.pds.len());
    let (cqs, srq_count) = (objects.cqs as usize, objects.srqs as usize);
    let (memory, groups) = (objects.registered, objects.attachments.groups());
    drop(control);
    DeviceStatus {
        name: hca.stats.name().into(),
        started,
        limits: hca.limits.clone(),
        quota: hca.quota(),
        gids,
        qp_counts: count_qps(hca),
        srq_count,
        qps: Vec::new(),
        srqs: Vec::new(),
        cqs,
        mrs,
        memory,
        mws,
        pds,
        groups,
        counters: Counter::ALL.iter().map(|c| (c.name(), hca.stats.get(*c))).collect(),
    }
}

/// Counts the QPs of each type and state.
fn count_qps(hca: &Hca) -> Vec<QpCount> {
    let mut counts = [[0; QpState::ALL.len()]; QpType::ALL.len()];
    for (_, qp) in hca.qps.iter() {
        if let Some(kind) = qp.kind() {
            counts[kind as usize][qp.state() as usize] += 1;
        }
    }
    let of_kind = |(kind, counts): (&QpType, [usize; QpState::ALL.len()])| {
        let service = kind.name();
        let states = QpState::ALL.iter().zip(counts);
        states.map(move |(state, count)| QpCount { service, state: *state, count })
    };
    let counts = QpType::ALL.iter().zip(counts).flat_map(of_kind);
    counts.filter(|of| of.count != 0).collect()
}

/// Returns what there is to tell of each QP and SRQ of a guest.
pub(crate) fn entries(hca: &Hca) -> (Vec<QpStatus>, Vec<SrqStatus>) {
    // A freeze waits for this, as memory is read below without the lock of what is told of.
    let _reading = lock(&hca.status);
    let qps = hca.qps.iter().filter_map(|(slot, qp)| of_qp(hca, slot, qp));
    let srqs = hca.srqs.iter().filter_map(|(slot, srq)| of_srq(hca, slot, srq));
    (qps.collect(), srqs.collect())
}

fn of_srq(hca: &Hca, slot: Slot, place: &Mutex<Option<Srq>>) -> Option<SrqStatus> {
    let place = lock(place);
    let srq = place.as_ref()?;
    let backlog = if hca.is_frozen() { Backlog::known(0) } else { srq.backlog() };
    let mut status = SrqStatus {
        srqn: slot.number(),
        receives: 0,
        max_wr: srq.max_wr(),
        limit: srq.limit(),
        qps: u32::try_from(srq.users.len()).unwrap_or(u32::MAX),
        in_error: srq.is_in_error(),
    };
    drop(place);
    status.receives = backlog.count();
    Some(status)
}

fn of_qp(hca: &Hca, slot: Slot, qp: &Qp) -> Option<QpStatus> {
    // Rings are in the guest's memory. An access to it may take long, so there is none while a lock of the QP is held.
    let backlog =
        |queue: &WorkQueue| if hca.is_frozen() { Backlog::known(0) } else { queue.backlog() };
    let count = |backlog: &Backlog| u16::try_from(backlog.count()).unwrap_or(u16::MAX);
    let requester = lock(&qp.requester);
    let sends = backlog(&requester.queue);
    let sending = Sending::of(&requester);
    drop(requester);
    let responder = lock(&qp.responder);
    let kind = responder.config?.wq.kind;
    let state = qp.state();
    let peer = kind.is_connected() && !matches!(state, QpState::Reset | QpState::Init);
    let receives = backlog(&responder.queue);
    let mut status = QpStatus {
        qpn: slot.number(),
        service: kind.name(),
        state,
        dest_qpn: peer.then_some(responder.attr.dest_qp_num),
        dest_gid: peer.then_some(responder.attr.ah_attr.grh.dgid),
        sends: 0,
        receives: 0,
        connection: peer.then(|| sending.connection(&responder)),
        last_error: last_error(hca, [&sending.failure, &responder.failure]),
    };
    let partners = [sending.partner, responder.partner];
    let (source, dgid) = (responder.source, responder.attr.ah_attr.grh.dgid);
    drop(responder);
    if let Some(connection) = &mut status.connection {
        connection.path = path(hca, partners, &source, &dgid);
    }
    (status.sends, status.receives) = (count(&sends), count(&receives));
    Some(status)
}

/// The part of the status of a QP that the requester knows.
struct Sending {
    psns: [u32; 2],
    retries_left: u8,
    rnr_retries_left: u8,
    partner: Partner,
    failure: Option<Box<Failure>>,
}

impl Sending {
    fn of(requester: &Requester) -> Self {
        let psns = match &requester.window {
            Some(window) => [window.snd_nxt(), window.snd_una()],
            None => [requester.sq_psn(); 2],
        };
        // Each work request begins with all retries.
        let (retries_left, rnr_retries_left) = if requester.is_sending() {
            (requester.retry_left, requester.rnr_left)
        } else {
            (requester.attr.retry_cnt, requester.attr.rnr_retry)
        };
        Self {
            psns: psns.map(Psn::get),
            retries_left,
            rnr_retries_left,
            partner: requester.partner,
            failure: requester.failure.clone(),
        }
    }

    fn connection(&self, responder: &Responder) -> ConnectionStatus {
        let [sq_psn, sq_una] = self.psns;
        ConnectionStatus {
            path: QpPath::Unknown,
            sq_psn,
            sq_una,
            rq_psn: responder.expected.psn.get(),
            retries_left: self.retries_left,
            rnr_retries_left: self.rnr_retries_left,
        }
    }
}

/// Returns how messages get to the other end of a connection between two addresses. Its halves have found that out by
/// themselves.
fn path(hca: &Hca, partners: [Partner; 2], source: &Address, dgid: &Gid) -> QpPath {
    let known = partners.iter().find_map(|partner| match partner {
        Partner::Unknown => None,
        Partner::Device(_) => Some(QpPath::Local),
        Partner::Remote => Some(QpPath::Wire),
    });
    let is_away = || is_away(hca, source, dgid);
    known.unwrap_or_else(|| if is_away() { QpPath::Wire } else { QpPath::Unknown })
}

/// Returns the later one of the errors of two halves.
fn last_error(hca: &Hca, failures: [&Option<Box<Failure>>; 2]) -> Option<QpError> {
    let last = failures.into_iter().flatten().max_by_key(|failure| failure.0)?;
    let (time, incident) = **last;
    Some(QpError { age: hca.clock().now().saturating_duration_since(time), incident })
}
