// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens to guests. Clients of the control socket that watch are told.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use abi::{
    VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, VIRTIO_RDMA_EVENT_QP_REQ_ERR, VIRTIO_RDMA_WC_LOC_LEN_ERR,
    VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_MW_BIND_ERR,
    VIRTIO_RDMA_WC_REM_ACCESS_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, VIRTIO_RDMA_WC_REM_OP_ERR,
    VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR, VIRTIO_RDMA_WC_WR_FLUSH_ERR,
};
use engine::Incident;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

use crate::report::EventReport;

/// Most events that wait to be told. Others are counted.
const MAX_WAITING: usize = 1024;

/// What has happened to a guest.
#[derive(Clone, Debug)]
pub enum Event {
    /// Its VMM has connected, and this worker serves it.
    Connected { worker: usize },
    /// Another worker than before, this one, serves it.
    Moved { worker: usize },
    /// Its VMM is connected no longer, for this reason.
    Disconnected { reason: String },
    /// Its driver has started the device.
    Started,
    /// Its driver has reset the device, or its VMM has.
    Reset,
    /// Something has happened to an object of it.
    Incident(Incident),
}

/// The events that clients are yet to be told of. They are kept only while a client watches.
#[derive(Debug)]
pub struct Events {
    is_watched: AtomicBool,
    waiting: Mutex<Waiting>,
    /// Readable while events wait.
    ready: OwnedFd,
}

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<(SystemTime, String, Event)>,
    /// How many events found no room.
    lost: u64,
}

impl Events {
    /// Makes a place for events, which no client watches yet.
    pub fn new() -> Result<Self, Errno> {
        let ready = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { is_watched: AtomicBool::new(false), waiting: Mutex::default(), ready })
    }

    /// Notes whether a client watches.
    pub fn set_watched(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }

    /// Notes what has happened to a guest of this name. Any thread may call this; it does not wait.
    pub fn note(&self, guest: &str, event: Event) {
        if !self.is_watched.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.events.len() >= MAX_WAITING {
            waiting.lost += 1;
            return;
        }
        waiting.events.push_back((SystemTime::now(), guest.to_owned(), event));
        if waiting.events.len() == 1 {
            let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the events that wait.
    pub fn take(&self) -> Vec<EventReport> {
        let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        let Waiting { events, lost } =
            std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        let mut reports: Vec<_> = events.into_iter().map(|event| report(&event)).collect();
        if lost != 0 {
            reports.push(EventReport::of_lost(lost));
        }
        reports
    }
}

impl AsFd for Events {
    /// Returns a descriptor that is readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
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
        Event::Incident(Incident::Send { qpn, status }) => {
            let reason = Some(name_of_status(*status).to_owned());
            EventReport { qpn: Some(*qpn), reason, ..of("qp_error") }
        }
        Event::Incident(Incident::Qp { qpn, event }) => {
            let reason = Some(name_of_event(*event).to_owned());
            EventReport { qpn: Some(*qpn), reason, ..of("qp_error") }
        }
        Event::Incident(Incident::Cq { cqn }) => EventReport { cqn: Some(*cqn), ..of("cq_error") },
        Event::Incident(Incident::Srq { srqn }) => {
            EventReport { srqn: Some(*srqn), ..of("srq_error") }
        }
    }
}

/// Returns the name of the status of a CQE, as in `enum ibv_wc_status` behind `IBV_WC_`.
fn name_of_status(status: u32) -> &'static str {
    match status {
        VIRTIO_RDMA_WC_LOC_LEN_ERR => "LOC_LEN_ERR",
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
    use super::*;

    #[test]
    fn events_wait_while_somebody_watches() {
        let events = Events::new().unwrap();
        let error = Incident::Send { qpn: 7, status: VIRTIO_RDMA_WC_RETRY_EXC_ERR };
        events.note("g1", Event::Incident(error));
        assert!(events.take().is_empty());
        events.set_watched(true);
        events.note("g1", Event::Incident(error));
        events.note("g2", Event::Disconnected { reason: "closed".to_owned() });
        let [one, other] = &events.take()[..] else { panic!("not two events") };
        assert_eq!((one.event.as_str(), one.guest.as_deref()), ("qp_error", Some("g1")));
        assert_eq!((one.qpn, one.reason.as_deref()), (Some(7), Some("RETRY_EXC_ERR")));
        assert_eq!((other.event.as_str(), other.guest.as_deref()), ("disconnected", Some("g2")));
        assert!(events.take().is_empty());
    }

    #[test]
    fn events_that_find_no_room_are_counted() {
        let events = Events::new().unwrap();
        events.set_watched(true);
        for cqn in (0..).take(MAX_WAITING + 5) {
            events.note("g", Event::Incident(Incident::Cq { cqn }));
        }
        let reports = events.take();
        assert_eq!(reports.len(), MAX_WAITING + 1);
        assert_eq!(reports[MAX_WAITING].lost, Some(5));
        events.note("g", Event::Connected { worker: 0 });
        assert_eq!(events.take().len(), 1);
    }
}
