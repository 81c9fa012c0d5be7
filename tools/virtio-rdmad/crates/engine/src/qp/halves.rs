// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: two halves, each under a lock of its own.
//!
//! `D` is the device that the other end belongs to, of which this floor knows nothing.

use std::mem::offset_of;
use std::ops::{Deref, DerefMut, Range as Span};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use abi::virtio_rdma_qp_attr;
use reliability::{Expected, Flow, Pace, SendWindow};
use roce::Psn;
use serde::{Deserialize, Serialize};
use zerocopy::FromZeros;

use super::admission::Admission;
use super::config::QpConfig;
use super::inbound::Inbound;
use super::state::QpState;
use crate::base::address::{Address, Gid};
use crate::base::host::Incident;
use crate::base::identity::DeviceId;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::tenure::Tenure;
use crate::memory::page_list::Range;
use crate::queue::work_queue::WorkQueue;
use crate::queue::wqe::{ReceiveWqe, SendWqe};

/// The type of a place without a QP.
const NO_QP: u8 = u8::MAX;

/// The place of a QP; QP number less one. Its virtqueues stay when the QP goes,
/// its rings go with it.
///
/// A thread of a peer writes the responder while the guest's own writes the requester, so the two have no cache line in
/// common, nor two lines that a processor fetches as a pair. The state is read by those who lock the responder.
#[repr(C, align(128))]
pub(crate) struct Qp<D> {
    /// Changes only under `responder`'s lock.
    state: AtomicU8,
    /// The place of its type in [`QpType::ALL`], or [`NO_QP`]. Changes only under `responder`'s lock.
    kind: AtomicU8,
    /// Locked by the guest's own thread and by that of a peer.
    pub responder: Mutex<ResponderHalf<D>>,
    /// Locked by the guest's own thread, and for a moment by one that asks for the status.
    pub requester: Apart<Mutex<RequesterHalf<D>>>,
}

/// A value that has cache lines of its own.
#[repr(align(128))]
pub(crate) struct Apart<T>(T);

impl<T> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

const _: () = {
    assert!(align_of::<Qp<()>>() == 128 && offset_of!(Qp<()>, requester) % 128 == 0);
    assert!(offset_of!(Qp<()>, state) < 64 && offset_of!(Qp<()>, responder) < 64);
    // Documentation/host.md says so.
    assert!(size_of::<Qp<()>>() <= 2048);
};

impl<D> Default for Qp<D> {
    /// Returns a place without a QP.
    fn default() -> Self {
        Self {
            state: AtomicU8::new(QpState::Reset as u8),
            kind: AtomicU8::new(NO_QP),
            responder: Mutex::new(ResponderHalf { inbound: None, responder: Responder::new() }),
            requester: Apart(Mutex::new(RequesterHalf { peer: None, requester: Requester::new() })),
        }
    }
}

impl<D> Qp<D> {
    /// Returns the state at this moment.
    pub fn state(&self) -> QpState {
        QpState::from_abi(self.state.load(Ordering::Acquire)).unwrap_or(QpState::Err)
    }

    /// Changes the state; the responder is borrowed to show that it is locked.
    pub fn set_state(&self, _locked: &mut Responder<D>, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Returns the type at this moment; `None` if there is no QP.
    pub fn kind(&self) -> Option<QpType> {
        QpType::ALL.get(usize::from(self.kind.load(Ordering::Relaxed))).copied()
    }

    /// Changes the configuration of the QP; with `None`, there is no QP any more. The responder is the locked one.
    pub fn configure(&self, locked: &mut Responder<D>, config: Option<QpConfig>) {
        let kind = config.map_or(NO_QP, |config| config.wq.kind as u8);
        self.kind.store(kind, Ordering::Relaxed);
        locked.config = config;
    }
}

/// The incident that has ended a half of a QP, and its time.
pub(crate) type Failure = (Instant, Incident);

/// The reason why the work request under way does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Nothing keeps it from going on.
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

/// The other end of a connection, as it was found.
pub(crate) struct Peer<D> {
    /// Its device.
    pub device: Arc<D>,
    /// Its place there.
    pub slot: Slot,
    /// The network's generation when it was found, or last seen to be there still.
    pub generation: u64,
    /// The tenures of the addresses of both ends. A tenure lasts as long as its end has the address.
    pub tenures: [Tenure; 2],
}

impl<D> Peer<D> {
    /// Returns whether both ends still have the addresses by which the peer was found.
    pub fn is_there(&self) -> bool {
        self.tenures.iter().all(Tenure::lasts)
    }
}

/// The other end of a connection. It is the device that has the destination GID when the QP becomes ready to
/// receive or, if no device of this network has it then, the first one that has it when a message comes or goes.
/// A GID may move to another guest later; the connections do not move with it.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Partner {
    /// No message has come or gone yet.
    Unknown,
    /// The connection is with this device of this network.
    Device(DeviceId),
    /// The connection is with a device on another host.
    Remote,
}

impl Partner {
    /// Returns a partner that is this device, if there is one.
    pub fn new(device: Option<DeviceId>) -> Self {
        device.map_or(Self::Unknown, Self::Device)
    }

    /// Notes that a message goes over the wire, or has come over it.
    #[inline]
    pub fn uses_wire(&mut self) {
        if matches!(self, Self::Unknown) {
            *self = Self::Remote;
        }
    }

    /// Returns whether the connection is with this device, which has the destination GID. If the connection
    /// has no other end yet, it is with this one from now on.
    #[inline]
    pub fn is(&mut self, device: DeviceId) -> bool {
        if matches!(self, Self::Unknown) {
            *self = Self::Device(device);
        }
        matches!(self, Self::Device(own) if *own == device)
    }
}

/// The half that sends: the requester, and beside it the other end, whose responder stays locked while the requester
/// changes.
pub(crate) struct RequesterHalf<D> {
    /// The other end, where it was last found.
    pub peer: Option<Peer<D>>,
    /// The requester.
    pub requester: Requester,
}

impl<D> RequesterHalf<D> {
    /// Forgets the work under way and the peer, as RESET does.
    pub fn reset(&mut self) {
        self.peer = None;
        self.requester.reset();
    }
}

impl<D> Deref for RequesterHalf<D> {
    type Target = Requester;

    fn deref(&self) -> &Requester {
        &self.requester
    }
}

impl<D> DerefMut for RequesterHalf<D> {
    fn deref_mut(&mut self) -> &mut Requester {
        &mut self.requester
    }
}

/// The send queue of a QP, and the work requests under way.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Requester {
    /// The send queue.
    pub queue: WorkQueue,
    /// The region of both rings, if the QP has rings.
    pub region: Box<[Range]>,
    /// The configuration of the QP; `None` if there is no QP.
    pub config: Option<QpConfig>,
    /// Attributes, a copy of the responder's but for `sq_psn`: the first PSN of the next message as long as there is no
    /// window ([`Self::sq_psn`]).
    pub attr: virtio_rdma_qp_attr,
    /// The source.
    pub source: Address,
    /// Whether `wqe` is under way.
    pub active: bool,
    /// Whether the QP is observed.
    pub observed: bool,
    /// The work request under way.
    pub wqe: SendWqe,
    /// Whether the limit of the guest lets it pass.
    pub admission: Admission,
    /// Bytes of it that were copied.
    pub done: u64,
    /// The members of the multicast group that a datagram under way is yet to reach, by number; `None` before the
    /// first. An image does not have them: the datagram begins again.
    pub members: Option<Span<u64>>,
    /// The reason why the work request does not go on.
    pub wait: Wait,
    /// The number of retries that are left while the peer has no receive.
    pub rnr_left: u8,
    /// Whether the peer is asked again if it has no receive, or has to tell of one.
    pub asks_again: bool,
    /// The length of the pauses before these retries.
    pub pace: Pace,
    /// The number of retries that are left without an answer.
    pub retry_left: u8,
    /// The other end of the connection.
    pub partner: Partner,
    /// SQ_DRAINED is to be raised.
    pub notify_drained: bool,
    /// The messages under way on the wire, if the peer is reached over the wire.
    pub window: Option<Box<SendWindow<SendWqe>>>,
    /// The rate of packets that nobody acknowledges, if it sends some over the wire.
    pub flow: Option<Box<Flow>>,
    /// The last error since RESET.
    pub failure: Option<Box<Failure>>,
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
            observed: false,
            wqe: SendWqe::empty(),
            admission: Admission::default(),
            done: 0,
            members: None,
            wait: Wait::No,
            rnr_left: 0,
            asks_again: true,
            pace: Pace::default(),
            retry_left: 0,
            partner: Partner::Unknown,
            notify_drained: false,
            window: None,
            flow: None,
            failure: None,
        }
    }

    /// Returns the first PSN of the next message.
    pub fn sq_psn(&self) -> Psn {
        match &self.window {
            Some(window) => window.next_psn(),
            None => Psn::new(self.attr.sq_psn),
        }
    }

    /// Counts the PSNs of the work request under way, which was done without a window, and whose message is so many
    /// packets.
    #[inline(always)]
    pub fn count_psns(&mut self, packets: u32) {
        if !self.wqe.request.operation.is_local() {
            self.attr.sq_psn = self.sq_psn().plus(packets).get();
        }
    }

    /// Returns whether a work request is under way.
    pub fn is_sending(&self) -> bool {
        self.active || self.window.as_ref().is_some_and(|window| !window.is_empty())
    }

    /// Begins with the work request that was just read.
    pub fn begin(&mut self) {
        self.active = true;
        self.admission = Admission::default();
        self.wait = Wait::No;
        self.done = 0;
        self.members = None;
        self.rnr_left = self.attr.rnr_retry;
        self.retry_left = self.attr.retry_cnt;
    }

    fn reset(&mut self) {
        self.active = false;
        self.wait = Wait::No;
        self.pace = Pace::default();
        self.partner = Partner::Unknown;
        self.notify_drained = false;
        self.window = None;
        self.flow = None;
        self.failure = None;
        self.attr = virtio_rdma_qp_attr::new_zeroed();
        self.source = Address::default();
        self.wqe = SendWqe::empty();
    }
}

/// The half that receives: the responder and, beside it, the state of a peer on another host, whose packets are
/// messages to the responder.
pub(crate) struct ResponderHalf<D> {
    /// The state of a peer that is reached over the wire.
    pub inbound: Option<Box<Inbound>>,
    /// The responder.
    pub responder: Responder<D>,
}

impl<D> ResponderHalf<D> {
    /// Forgets the state of the connection, as RESET does; capabilities and multicast groups stay.
    pub fn reset(&mut self) {
        self.inbound = None;
        self.responder.reset();
    }
}

impl<D> Deref for ResponderHalf<D> {
    type Target = Responder<D>;

    fn deref(&self) -> &Responder<D> {
        &self.responder
    }
}

impl<D> DerefMut for ResponderHalf<D> {
    fn deref_mut(&mut self) -> &mut Responder<D> {
        &mut self.responder
    }
}

/// The queue that receives, the message that arrives, and the QP's attributes.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Responder<D> {
    /// The receive queue.
    pub queue: WorkQueue,
    /// The configuration of the QP; `None` if there is no QP. [`Qp::configure`] changes it.
    pub config: Option<QpConfig>,
    /// Attributes, in the form of QUERY_QP, but for `rq_psn`, which `expected` has.
    pub attr: virtio_rdma_qp_attr,
    /// The PSN that is expected next.
    pub expected: Expected,
    /// The source.
    pub source: Address,
    /// The other end of the connection.
    pub partner: Partner,
    /// Whether `receive` was taken from the queue, and has no CQE yet.
    pub has_receive: bool,
    /// Whether the QP is observed.
    pub observed: bool,
    /// The receive that a message goes into, or will.
    pub receive: ReceiveWqe,
    /// The requester that waits, for a receive or until this device is not frozen any more: its device and place.
    pub waiter: Option<(Arc<D>, Slot)>,
    /// Whether a message has come since RTR.
    pub established: bool,
    /// Whether LAST_WQE_REACHED was raised since RESET.
    pub last_wqe: bool,
    /// Whether the driver was asked to kick the receive queue.
    pub notify: bool,
    /// The multicast groups that the QP is attached to, whatever its state.
    pub groups: Vec<Gid>,
    /// The last error since RESET.
    pub failure: Option<Box<Failure>>,
}

impl<D> Responder<D> {
    fn new() -> Self {
        Self {
            queue: WorkQueue::default(),
            config: None,
            attr: virtio_rdma_qp_attr::new_zeroed(),
            expected: Expected::default(),
            source: Address::default(),
            partner: Partner::Unknown,
            has_receive: false,
            observed: false,
            receive: ReceiveWqe::empty(),
            waiter: None,
            established: false,
            last_wqe: false,
            notify: true,
            groups: Vec::new(),
            failure: None,
        }
    }

    fn reset(&mut self) {
        let cap = self.attr.cap;
        self.attr = virtio_rdma_qp_attr::new_zeroed();
        self.attr.cap = cap;
        self.expected = Expected::default();
        self.source = Address::default();
        self.partner = Partner::Unknown;
        self.has_receive = false;
        self.waiter = None;
        self.established = false;
        self.last_wqe = false;
        self.failure = None;
        self.deselect();
    }

    /// Takes the SRQ away from an XRC target, until a message names one.
    pub fn deselect(&mut self) {
        if let Some(config) = self.config.as_mut().filter(|own| own.wq.kind == QpType::XrcTgt) {
            config.srq = None;
        }
    }

    /// Returns whether the QP in place `slot` of its device, of type `kind` and at the address `from`, is this one's
    /// peer, and names it by GID `to` (specification, Queue pairs: Connections).
    pub fn is_connected_to(&self, kind: QpType, from: &Address, slot: Slot, to: &Gid) -> bool {
        self.config.is_some_and(|config| config.wq.kind == kind.responder())
            && self.attr.dest_qp_num == slot.number()
            && self.attr.ah_attr.grh.dgid == from.gid
            && self.source == from.beside(*to)
    }
}
