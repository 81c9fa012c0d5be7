// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reports of events that clients get when they watch.

use std::time::{SystemTime, UNIX_EPOCH};

use abi::{
    VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, VIRTIO_RDMA_EVENT_QP_REQ_ERR, VIRTIO_RDMA_WC_LOC_ACCESS_ERR,
    VIRTIO_RDMA_WC_LOC_LEN_ERR, VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_LOC_QP_OP_ERR,
    VIRTIO_RDMA_WC_MW_BIND_ERR, VIRTIO_RDMA_WC_REM_ACCESS_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR,
    VIRTIO_RDMA_WC_REM_OP_ERR, VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR,
    VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_WR_FLUSH_ERR,
};
use engine::{Incident, QpError, RefusedAccess};

use super::report::{EventReport, QpErrorReport, RefusedReport};
use crate::guest::events::{Event, Events, Waiting};

/// Takes the events that wait, for clients.
pub fn take(events: &Events) -> Vec<EventReport> {
    let Waiting { events, lost } = events.take();
    let mut reports: Vec<_> = events.into_iter().map(|event| report(&event)).collect();
    if lost != 0 {
        reports.push(EventReport::of_lost(lost));
    }
    reports
}

fn report((time, guest, event): &(SystemTime, String, Event)) -> EventReport {
    let of =
        |event: &str| EventReport { guest: Some(guest.clone()), ..EventReport::at(*time, event) };
    match event {
        Event::Connected { worker } => EventReport { worker: Some(*worker), ..of("connected") },
        Event::Moved { worker } => EventReport { worker: Some(*worker), ..of("moved") },
        Event::Disconnected { reason } => {
            EventReport { reason: Some(reason.clone()), ..of("disconnected") }
        }
        Event::Started => of("started"),
        Event::Reset => of("reset"),
        Event::Incident(Incident::Cq { cqn }) => EventReport { cqn: Some(*cqn), ..of("cq_error") },
        Event::Incident(Incident::Srq { srqn }) => {
            EventReport { srqn: Some(*srqn), ..of("srq_error") }
        }
        Event::Incident(incident) => of_qp(incident, of("qp_error")),
    }
}

/// Adds what there is to say of the error of a QP.
fn of_qp(incident: &Incident, report: EventReport) -> EventReport {
    let (Incident::Send { qpn, refused, .. }
    | Incident::Receive { qpn, refused, .. }
    | Incident::Qp { qpn, refused, .. }) = incident
    else {
        return report;
    };
    let reason = name_of_error(incident).map(str::to_owned);
    EventReport { qpn: Some(*qpn), reason, refused: refused.map(refused_report), ..report }
}

/// Returns the report of the last error of a QP.
pub fn last_error(QpError { age, incident }: &QpError) -> QpErrorReport {
    let time = SystemTime::now().checked_sub(*age).unwrap_or(UNIX_EPOCH);
    let EventReport { time_usec, reason, refused, .. } =
        of_qp(incident, EventReport::at(time, "qp_error"));
    QpErrorReport { time_usec, reason: reason.unwrap_or_default(), refused }
}

/// Returns the name of the error of a QP: that of a status or of an event, without its prefix.
fn name_of_error(incident: &Incident) -> Option<&'static str> {
    match incident {
        Incident::Send { status, .. } | Incident::Receive { status, .. } => {
            Some(name_of_status(*status))
        }
        Incident::Qp { event, .. } => Some(name_of_event(*event)),
        Incident::Cq { .. } | Incident::Srq { .. } => None,
    }
}

pub fn refused_report(RefusedAccess { key, address, length, why }: RefusedAccess) -> RefusedReport {
    RefusedReport { key, address: format!("{address:#x}"), length, reason: why.name().to_owned() }
}

/// Returns the name of the status of a CQE, as in `enum ibv_wc_status` behind `IBV_WC_`.
pub fn name_of_status(status: u32) -> &'static str {
    match status {
        VIRTIO_RDMA_WC_SUCCESS => "SUCCESS",
        VIRTIO_RDMA_WC_LOC_LEN_ERR => "LOC_LEN_ERR",
        VIRTIO_RDMA_WC_LOC_ACCESS_ERR => "LOC_ACCESS_ERR",
        VIRTIO_RDMA_WC_LOC_QP_OP_ERR => "LOC_QP_OP_ERR",
        VIRTIO_RDMA_WC_LOC_PROT_ERR => "LOC_PROT_ERR",
        VIRTIO_RDMA_WC_WR_FLUSH_ERR => "WR_FLUSH_ERR",
        VIRTIO_RDMA_WC_MW_BIND_ERR => "MW_BIND_ERR",
        VIRTIO_RDMA_WC_REM_INV_REQ_ERR => "REM_INV_REQ_ERR",
        VIRTIO_RDMA_WC_REM_ACCESS_ERR => "REM_ACCESS_ERR",
        VIRTIO_RDMA_WC_REM_OP_ERR => "REM_OP_ERR",
        VIRTIO_RDMA_WC_RETRY_EXC_ERR => "RETRY_EXC_ERR",
        VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR => "RNR_RETRY_EXC_ERR",
        _ => "GENERAL_ERR",
    }
}

/// Returns the name of an event of a QP, as in `enum ibv_event_type` behind `IBV_EVENT_`.
fn name_of_event(event: u32) -> &'static str {
    match event {
        VIRTIO_RDMA_EVENT_QP_REQ_ERR => "QP_REQ_ERR",
        VIRTIO_RDMA_EVENT_QP_ACCESS_ERR => "QP_ACCESS_ERR",
        _ => "QP_FATAL",
    }
}

#[cfg(test)]
mod tests {
    use engine::KeyError;

    use super::*;

    #[test]
    fn clients_are_told_what_has_happened() {
        let events = Events::new().unwrap();
        events.set_watched(true);
        let status = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
        let error = Incident::Send { qpn: 7, status, refused: None };
        events.note("g1", Event::Incident(error));
        events.note("g2", Event::Disconnected { reason: "closed".to_owned() });
        let [one, other] = &take(&events)[..] else { panic!("not two events") };
        assert_eq!((one.event.as_str(), one.guest.as_deref()), ("qp_error", Some("g1")));
        assert_eq!((one.qpn, one.reason.as_deref()), (Some(7), Some("RETRY_EXC_ERR")));
        assert_eq!((other.event.as_str(), other.guest.as_deref()), ("disconnected", Some("g2")));
        let refused = RefusedAccess { key: 5, address: 1 << 63, length: 9, why: KeyError::Pd };
        let event = VIRTIO_RDMA_EVENT_QP_ACCESS_ERR;
        events.note("g1", Event::Incident(Incident::Qp { qpn: 7, event, refused: Some(refused) }));
        let [refused] = &take(&events)[..] else { panic!("not one event") };
        let access = refused.refused.as_ref().unwrap();
        assert_eq!(refused.reason.as_deref(), Some("QP_ACCESS_ERR"));
        assert_eq!((access.key, &*access.address), (5, "0x8000000000000000"));
        assert_eq!((access.length, &*access.reason), (9, "other_pd"));
        for _ in 0..2000 {
            events.note("g", Event::Reset);
        }
        let lost = take(&events).pop().and_then(|last| last.lost);
        assert!(lost.is_some_and(|lost| lost > 0));
    }
}
