// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: the two halves of each, under a lock of its own.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use abi::virtio_rdma_qp_attr;
use zerocopy::FromZeros;

use crate::device::Shared;
use crate::memory::mr::Range;
use crate::qp::state::{QpState, QpType};
use crate::queue::work_queue::WorkQueue;
use crate::queue::wqe::{ReceiveWqe, SendWqe};
use crate::transport::rnr::Pace;
use crate::{Address, Gid};

/// The place of a QP; QP number less one. Its virtqueues stay when the QP goes,
/// its rings go with it.
pub(crate) struct Qp {
    /// Changes only under `responder`'s lock.
    state: AtomicU8,
    /// Locked by the guest's own thread only.
    pub requester: Mutex<Requester>,
    /// Locked by the guest's own thread and by that of a peer.
    pub responder: Mutex<Responder>,
}

impl Default for Qp {
    /// A place without a QP.
    fn default() -> Self {
        Self {
            state: AtomicU8::new(QpState::Reset as u8),
            requester: Mutex::new(Requester::new()),
            responder: Mutex::new(Responder::new()),
        }
    }
}

impl Qp {
    /// The state, at this moment.
    pub fn state(&self) -> QpState {
        QpState::from_abi(self.state.load(Ordering::Acquire)).unwrap_or(QpState::Err)
    }

    /// Changes the state; the responder is borrowed to show that it is locked.
    pub fn set_state(&self, _locked: &mut Responder, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }
}

/// Why the work request under way does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It does.
    No,
    /// The peer has had no receive `since` then; it is asked again at `ask`. The RNR timer ends at
    /// `until`: to ask from then on is one more retry.
    Pause { since: Instant, ask: Instant, until: Instant },
    /// The peer had no receive; it is asked again then, or when it has posted one.
    Receive(Instant),
    /// The peer did not answer; it is asked again then (never, with a timeout
    /// of 0), or when it becomes ready to receive.
    Answer(Option<Instant>),
}

/// Where the other end of a connection was found.
pub(crate) struct Peer {
    /// Its device.
    pub device: Arc<Shared>,
    /// Its place there.
    pub slot: u16,
    /// The fabric's generation when it was found.
    pub generation: u64,
}

/// The device that a connection is with: the one that has the destination GID when the QP becomes
/// ready to receive or, if none has it then, the first one that has it. A GID may move to another
/// guest later; the connections do not move with it.
#[derive(Clone, Default)]
pub(crate) struct Partner(Option<Weak<Shared>>);

impl Partner {
    /// Fixes the device, if there is one.
    pub fn new(device: Option<&Arc<Shared>>) -> Self {
        Self(device.map(Arc::downgrade))
    }

    /// Whether the connection is with this device, which has the destination GID. The first one
    /// that is asked for is, if none was fixed.
    #[inline]
    pub fn is(&mut self, device: &Arc<Shared>) -> bool {
        // What a `Weak` points to is not freed, so that no other device can be in its place.
        let partner = self.0.get_or_insert_with(|| Arc::downgrade(device));
        std::ptr::eq(partner.as_ptr(), Arc::as_ptr(device))
    }
}

/// What a QP was created with.
#[derive(Clone, Copy)]
pub(crate) struct QpConfig {
    /// Transport service.
    pub kind: QpType,
    /// Protection domain; of an XRC target, that of `srq`.
    pub pdn: u32,
    /// XRC domain of an XRC target.
    pub xrcdn: u32,
    /// The place of the SRQ that it receives from; of an XRC target, the one that
    /// the message under way names.
    pub srq: Option<u16>,
    /// Protection domain of receives: the SRQ's, or its own.
    pub recv_pdn: u32,
    /// CQ of the send queue.
    pub send_cq: u16,
    /// CQ of the receive queue; of an XRC target, that of `srq`.
    pub recv_cq: u16,
    /// Whether every send work request makes a CQE.
    pub signal_all: bool,
    /// SGEs of a send work request.
    pub max_send_sge: usize,
    /// SGEs of a receive work request.
    pub max_recv_sge: usize,
    /// Bytes of inline data.
    pub max_inline: usize,
    /// Whether the kernel owns the queues, and not a program: REG_MR names any
    /// page of the guest.
    pub privileged: bool,
    /// Whether what it sends to a multicast group does not come back to it.
    pub block_loopback: bool,
}

impl QpConfig {
    /// Of an XRC target, which has nothing of its own but its domain.
    pub fn xrc_target(xrcdn: u32) -> Self {
        Self {
            kind: QpType::XrcTgt,
            pdn: 0,
            xrcdn,
            srq: None,
            recv_pdn: 0,
            send_cq: 0,
            recv_cq: 0,
            signal_all: false,
            max_send_sge: 0,
            max_recv_sge: 0,
            max_inline: 0,
            privileged: false,
            block_loopback: false,
        }
    }

    /// The protection domain that the QP belongs to.
    pub fn own_pdn(&self) -> Option<u32> {
        (self.kind != QpType::XrcTgt).then_some(self.pdn)
    }

    /// The CQs of the QP's own queues.
    pub fn own_cqs(&self) -> impl Iterator<Item = u16> {
        let send = (self.kind != QpType::XrcTgt).then_some(self.send_cq);
        let receive = (!self.kind.is_xrc()).then_some(self.recv_cq);
        send.into_iter().chain(receive)
    }

    /// The SRQ that CQEs of receives name: an XRC target's.
    pub fn named_srqn(&self) -> u32 {
        match (self.kind, self.srq) {
            (QpType::XrcTgt, Some(srq)) => u32::from(srq) + 1,
            _ => 0,
        }
    }
}

/// The half that sends.
pub(crate) struct Requester {
    /// The send queue.
    pub queue: WorkQueue,
    /// The region of both rings, if the QP has rings.
    pub region: Box<[Range]>,
    /// What the QP was created with; `None`: there is none.
    pub config: Option<QpConfig>,
    /// Attributes, a copy of the responder's but for `sq_psn`.
    pub attr: virtio_rdma_qp_attr,
    /// The source.
    pub source: Address,
    /// Whether `wqe` is under way.
    pub active: bool,
    /// The work request under way.
    pub wqe: SendWqe,
    /// Bytes of it that were copied.
    pub done: u64,
    /// Why it does not go on.
    pub wait: Wait,
    /// How often it is tried again without a receive at the peer.
    pub rnr_left: u8,
    /// Whether the peer is asked again if it has no receive, or has to tell of one.
    pub asks_again: bool,
    /// How long such pauses are.
    pub pace: Pace,
    /// How often it is tried again without an answer.
    pub retry_left: u8,
    /// The other end, where it was last found.
    pub peer: Option<Peer>,
    /// Whom the connection is with.
    pub partner: Partner,
    /// SQ_DRAINED is to be raised.
    pub notify_drained: bool,
}

impl Requester {
    fn new() -> Self {
        Self {
            queue: WorkQueue::default(),
            region: Box::default(),
            config: None,
            attr: virtio_rdma_qp_attr::new_zeroed(),
            source: Address::default(),
            active: false,
            wqe: SendWqe::empty(),
            done: 0,
            wait: Wait::No,
            rnr_left: 0,
            asks_again: true,
            pace: Pace::default(),
            retry_left: 0,
            peer: None,
            partner: Partner::default(),
            notify_drained: false,
        }
    }

    /// Begins with the work request that was just read.
    pub fn begin(&mut self) {
        self.active = true;
        self.wait = Wait::No;
        self.done = 0;
        self.rnr_left = self.attr.rnr_retry;
        self.retry_left = self.attr.retry_cnt;
    }

    /// Forgets the work under way and the peer, as RESET does.
    pub fn reset(&mut self) {
        self.active = false;
        self.wait = Wait::No;
        self.pace = Pace::default();
        self.peer = None;
        self.partner = Partner::default();
        self.notify_drained = false;
        self.attr = virtio_rdma_qp_attr::new_zeroed();
        self.source = Address::default();
        self.wqe = SendWqe::empty();
    }
}

/// The half that receives, and the QP's attributes.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Responder {
    /// The receive queue.
    pub queue: WorkQueue,
    /// What the QP was created with; `None`: there is none.
    pub config: Option<QpConfig>,
    /// Attributes, in the form of QUERY_QP.
    pub attr: virtio_rdma_qp_attr,
    /// The source.
    pub source: Address,
    /// Whom the connection is with.
    pub partner: Partner,
    /// Whether `receive` was taken from the queue, and has no CQE yet.
    pub has_receive: bool,
    /// The receive that a message goes into, or will.
    pub receive: ReceiveWqe,
    /// The requester that waits for a receive: its device and place.
    pub waiter: Option<(Arc<Shared>, u16)>,
    /// Whether a message has come since RTR.
    pub established: bool,
    /// Whether LAST_WQE_REACHED was raised since RESET.
    pub last_wqe: bool,
    /// Whether the driver was asked to kick the receive queue.
    pub notify: bool,
    /// The multicast groups that the QP is attached to, whatever its state.
    pub groups: Vec<Gid>,
}

impl Responder {
    fn new() -> Self {
        Self {
            queue: WorkQueue::default(),
            config: None,
            attr: virtio_rdma_qp_attr::new_zeroed(),
            source: Address::default(),
            partner: Partner::default(),
            has_receive: false,
            receive: ReceiveWqe::empty(),
            waiter: None,
            established: false,
            last_wqe: false,
            notify: true,
            groups: Vec::new(),
        }
    }

    /// Forgets what a connection made, as RESET does; capabilities and
    /// multicast groups stay.
    pub fn reset(&mut self) {
        let cap = self.attr.cap;
        self.attr = virtio_rdma_qp_attr::new_zeroed();
        self.attr.cap = cap;
        self.source = Address::default();
        self.partner = Partner::default();
        self.has_receive = false;
        self.waiter = None;
        self.established = false;
        self.last_wqe = false;
        self.deselect();
    }

    /// An XRC target receives from no SRQ until a message names one.
    pub fn deselect(&mut self) {
        if let Some(config) = self.config.as_mut().filter(|own| own.kind == QpType::XrcTgt) {
            config.srq = None;
        }
    }

    /// Whether the QP `qpn` of type `kind` at the address `from` is this one's peer, and
    /// names it by GID `to` (specification, chapter 8).
    pub fn is_connected_to(&self, kind: QpType, from: &Address, qpn: u32, to: &Gid) -> bool {
        self.config.is_some_and(|config| config.kind == kind.responder())
            && self.attr.dest_qp_num == qpn
            && self.attr.ah_attr.grh.dgid == from.gid
            && self.source == from.beside(*to)
    }
}
