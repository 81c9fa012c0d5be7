// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The image of a queue pair.
//!
//! Three things are not in the image, because the device finds them again. A requester looks its peer up, by the
//! address and the identity of its partner. A requester that waits for a receive asks for it once more when it is
//! visited, and so its peer knows again whom to tell of one. A requester learns once more how long it pauses for a peer
//! without receives.

use std::sync::Arc;
use std::time::Instant;

use abi::virtio_rdma_qp_attr;
use memory::{GuestMemory, Pages};
use reliability::{Expected, HoldQuota, Pace, SavedSendWindow};
use roce::Psn;
use serde::{Deserialize, Serialize};

use super::config::QpConfig;
use super::halves::{Partner, Qp, Requester, RequesterHalf, ResponderHalf, Wait};
use super::inbound::InboundImage;
use super::mtu::{mtu_bytes, packets, psns};
use super::state::QpState;
use crate::base::address::{Address, Gid};
use crate::base::image::{abi_bytes, require, Moment, Wrong};
use crate::base::limits::{Limits, MAX_INLINE, MAX_SGE};
use crate::base::qp_type::QpType;
use crate::base::sync::lock;
use crate::memory::page_list::{check_region, find_pages, Range};
use crate::queue::request::Operation;
use crate::queue::work_queue::WorkQueue;
use crate::queue::wq_ring::{Kind, Sizes, WqRingImage};
use crate::queue::wqe::{receive_entry_len, send_entry_len, ReceiveWqe, SendWqe, WqConfig};

/// The image of a [`Wait`].
#[derive(Serialize, Deserialize)]
enum WaitImage {
    No,
    Pause { since: Moment, ask: Moment, until: Moment },
    Receive(Moment),
    Answer(Option<Moment>),
}

impl WaitImage {
    fn of(wait: Wait, now: Instant) -> Self {
        let moment = |time| Moment::of(time, now);
        match wait {
            Wait::No => Self::No,
            Wait::Pause { since, ask, until } => {
                Self::Pause { since: moment(since), ask: moment(ask), until: moment(until) }
            }
            Wait::Receive(until) => Self::Receive(moment(until)),
            Wait::Answer(until) => Self::Answer(until.map(moment)),
        }
    }

    fn load(self, now: Instant) -> Wait {
        match self {
            Self::No => Wait::No,
            Self::Pause { since, ask, until } => {
                Wait::Pause { since: since.time(now), ask: ask.time(now), until: until.time(now) }
            }
            Self::Receive(until) => Wait::Receive(until.time(now)),
            Self::Answer(until) => Wait::Answer(until.map(|until| until.time(now))),
        }
    }
}

/// The image of the half that sends.
#[derive(Serialize, Deserialize)]
struct RequesterImage {
    config: QpConfig,
    ring: Option<WqRingImage>,
    region: Vec<Range>,
    #[serde(with = "abi_bytes")]
    attr: virtio_rdma_qp_attr,
    source: Address,
    /// The work request under way.
    wqe: Option<SendWqe>,
    done: u64,
    wait: WaitImage,
    rnr_left: u8,
    asks_again: bool,
    retry_left: u8,
    partner: Partner,
    notify_drained: bool,
    window: Option<Box<SavedSendWindow<SendWqe>>>,
}

/// The image of the half that receives.
#[derive(Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // as in the half itself
struct ResponderImage {
    config: QpConfig,
    ring: Option<WqRingImage>,
    #[serde(with = "abi_bytes")]
    attr: virtio_rdma_qp_attr,
    source: Address,
    partner: Partner,
    /// The receive that was taken from the queue, and has no CQE yet.
    receive: Option<ReceiveWqe>,
    established: bool,
    last_wqe: bool,
    notify: bool,
    groups: Vec<Gid>,
    inbound: Option<Box<InboundImage>>,
}

/// The image of a QP. Its virtqueues, if it has some, are those of its place.
#[derive(Serialize, Deserialize)]
pub(crate) struct QpImage {
    state: u8,
    requester: RequesterImage,
    responder: ResponderImage,
}

/// The arguments of loading a QP.
pub(crate) struct Loader<'a> {
    /// The guest's memory.
    pub memory: &'a GuestMemory,
    /// The limits of the guest.
    pub limits: &'a Limits,
    /// The most pages that the rings may have.
    pub room: usize,
    /// Whether queues are rings.
    pub has_rings: bool,
    /// The quota of packets that the connections of the guest hold.
    pub quota: &'a HoldQuota,
    /// The time.
    pub now: Instant,
}

impl<D> Qp<D> {
    /// Returns the image, if there is a QP in this place.
    pub fn save(&self, now: Instant) -> Option<QpImage> {
        let mut requester = lock(&self.requester);
        let requester = save_requester(&mut requester, now)?;
        let mut responder = lock(&self.responder);
        let responder = save_responder(&mut responder, now)?;
        Some(QpImage { state: self.state() as u8, requester, responder })
    }

    /// Makes the QP of an image in this place. The caller enters the QP as a user of its CQs and its SRQ, and as a
    /// member of its groups.
    pub fn load(&self, image: QpImage, with: &Loader<'_>) -> Result<(), Wrong> {
        let QpImage { state, requester, responder } = image;
        let state = QpState::from_abi(state).ok_or("it is in no state")?;
        let config = &requester.config;
        check_config(config, with.limits)?;
        check_config(&responder.config, with.limits)?;
        require(config.wq.kind == responder.config.wq.kind, "its halves have different types")?;
        let has_rings = with.has_rings && config.wq.kind != QpType::XrcTgt;
        let are_rings =
            requester.ring.is_some() == has_rings && responder.ring.is_some() == has_rings;
        require(are_rings, "its queues are no rings, or should be none")?;
        let mut to_requester = lock(&self.requester);
        let mut to_responder = lock(&self.responder);
        require(to_requester.config.is_none(), "there are two of them")?;
        let queues = load_rings(&requester, &responder, with)?;
        if let Some((send, receive)) = queues {
            (to_requester.queue, to_responder.queue) = (send, receive);
        }
        load_requester(&mut to_requester, requester, with)?;
        let current = responder.config;
        load_responder(&mut to_responder, responder, with)?;
        self.configure(&mut to_responder, Some(current));
        self.set_state(&mut to_responder, state);
        Ok(())
    }
}

fn save_requester(requester: &mut Requester, now: Instant) -> Option<RequesterImage> {
    // A SEND that waits at its end, as it invalidates a key that is in use, is sent once more.
    let ends = requester.active && requester.done == requester.wqe.request.total;
    Some(RequesterImage {
        config: requester.config?,
        ring: requester.queue.ring().map(|ring| ring.save()),
        region: requester.region.to_vec(),
        attr: virtio_rdma_qp_attr { sq_psn: requester.sq_psn().get(), ..requester.attr },
        source: requester.source,
        wqe: requester.active.then(|| requester.wqe.to_save()),
        done: if ends { 0 } else { requester.done },
        wait: WaitImage::of(requester.wait, now),
        rnr_left: requester.rnr_left,
        asks_again: requester.asks_again,
        retry_left: requester.retry_left,
        partner: requester.partner,
        notify_drained: requester.notify_drained,
        window: requester.window.as_ref().map(|window| Box::new(window.save(now))),
    })
}

fn save_responder<D>(half: &mut ResponderHalf<D>, now: Instant) -> Option<ResponderImage> {
    let ResponderHalf { inbound, responder } = half;
    let expected = responder.expected;
    Some(ResponderImage {
        config: responder.config?,
        ring: responder.queue.ring().map(|ring| ring.save()),
        attr: virtio_rdma_qp_attr { rq_psn: expected.psn.get(), ..responder.attr },
        source: responder.source,
        partner: responder.partner,
        receive: responder.has_receive.then(|| responder.receive.clone()),
        established: responder.established,
        last_wqe: responder.last_wqe,
        notify: responder.notify,
        groups: responder.groups.clone(),
        inbound: inbound.as_ref().map(|inbound| Box::new(inbound.save(expected, now))),
    })
}

/// Checks the configuration of a QP, as far as it stands alone.
fn check_config(config: &QpConfig, limits: &Limits) -> Result<(), Wrong> {
    let WqConfig { max_send_sge, max_recv_sge, max_inline, .. } = config.wq;
    let fits = max_send_sge.max(max_recv_sge) <= MAX_SGE && max_inline <= MAX_INLINE.into();
    require(fits, "its work requests are too large")?;
    let cqs = limits.max_cq.max(limits.ring_cq);
    require(config.send_cq.max(config.recv_cq) < cqs, "its CQ has a number that no CQ has")
}

/// Returns the rings, if the QP has some.
fn load_rings(
    requester: &RequesterImage,
    responder: &ResponderImage,
    with: &Loader<'_>,
) -> Result<Option<(WorkQueue, WorkQueue)>, Wrong> {
    let (Some(send), Some(receive)) = (&requester.ring, &responder.ring) else {
        require(requester.region.is_empty(), "it has a region, and no rings")?;
        return Ok(None);
    };
    let len = check_region(&requester.region, with.room)?;
    let find = || find_pages(with.memory, &requester.region);
    let pages: Option<Arc<Pages>> = send.has_pages().then(find).transpose()?.map(Arc::new);
    let WqConfig { kind, max_send_sge, max_recv_sge, max_inline } = requester.config.wq;
    let most = with.limits.ring_wr;
    let sizes = |least, entry| Sizes { least, most, entry };
    let send_sizes = sizes(1, send_entry_len(kind, max_send_sge, max_inline));
    let receive_sizes = sizes(0, receive_entry_len(max_recv_sge));
    let send = send.load(Kind::Send, send_sizes, len, pages.as_ref())?;
    let receive = receive.load(Kind::Receive, receive_sizes, len, pages.as_ref())?;
    Ok(Some((WorkQueue::Ring(send), WorkQueue::Ring(receive))))
}

fn load_requester<D>(
    to: &mut RequesterHalf<D>,
    image: RequesterImage,
    with: &Loader<'_>,
) -> Result<(), Wrong> {
    let mtu = image.attr.path_mtu;
    let is_uc = image.config.wq.kind == QpType::Uc;
    if let Some(wqe) = &image.wqe {
        wqe.check()?;
        let total = wqe.request.total;
        require(image.done == 0 || image.done < total, "more is sent than there is")?;
        // On an unreliable connection a part of a message may have left, in whole packets.
        require(!is_uc || image.done % mtu_bytes(mtu) == 0, "a part of a packet is sent")?;
    }
    let count = |wqe: &SendWqe| {
        wqe.check()?;
        let is_local = wqe.request.operation.is_local();
        let is_done = matches!(wqe.request.operation, Operation::RegMr(_));
        require(!is_local || is_done, "a local operation is in no packet")?;
        Ok((psns(&wqe.request, mtu), wqe.request.takes_receive()))
    };
    require(image.window.is_none() || image.config.wq.kind.is_reliable(), "it has a window")?;
    let mut window = image.window.map(|window| window.load(with.now, count)).transpose()?;
    if let Some(window) = window.as_mut().filter(|_| image.attr.rnr_retry == 0) {
        window.expect_credits();
    }
    to.region = image.region.into();
    to.config = Some(image.config);
    to.attr = image.attr;
    to.source = image.source;
    to.active = image.wqe.is_some();
    to.wqe = image.wqe.unwrap_or_else(SendWqe::empty);
    to.done = image.done;
    to.wait = image.wait.load(with.now);
    to.rnr_left = image.rnr_left;
    to.asks_again = image.asks_again;
    to.pace = Pace::default();
    to.retry_left = image.retry_left;
    to.peer = None;
    to.partner = image.partner;
    to.notify_drained = image.notify_drained;
    to.window = window.map(Box::new);
    Ok(())
}

fn load_responder<D>(
    to: &mut ResponderHalf<D>,
    image: ResponderImage,
    with: &Loader<'_>,
) -> Result<(), Wrong> {
    let mtu = image.attr.path_mtu;
    let count = |total| packets(total, mtu);
    let inbound = image.inbound.map(|inbound| inbound.load(with.now, with.quota, count));
    let (expected, inbound) = inbound.transpose()?.unzip();
    to.inbound = inbound.map(Box::new);
    to.attr = image.attr;
    to.expected = expected.unwrap_or_else(|| Expected::new(Psn::new(image.attr.rq_psn)));
    to.source = image.source;
    to.partner = image.partner;
    to.has_receive = image.receive.is_some();
    to.receive = image.receive.unwrap_or_else(ReceiveWqe::empty);
    to.waiter = None;
    to.established = image.established;
    to.last_wqe = image.last_wqe;
    to.notify = image.notify;
    to.groups = image.groups;
    Ok(())
}
