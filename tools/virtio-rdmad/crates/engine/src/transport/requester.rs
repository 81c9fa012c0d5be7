// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requester: takes work requests from send queues and carries them out.
//!
//! A QP does one work request at a time, from its first byte to its CQE, so
//! they complete in order, and a READ is complete before what is fenced behind
//! it starts.

use std::sync::Arc;
use std::time::Duration;

use abi::{
    VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_EVENT_QP_FATAL, VIRTIO_RDMA_EVENT_SQ_DRAINED,
    VIRTIO_RDMA_F_FAST_REG, VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_LOC_QP_OP_ERR,
    VIRTIO_RDMA_WC_MW_BIND_ERR, VIRTIO_RDMA_WC_RETRY_EXC_ERR, VIRTIO_RDMA_WC_SUCCESS,
    VIRTIO_RDMA_WC_WR_FLUSH_ERR,
};
use zerocopy::FromZeros;

use crate::base::counters::Counter;
use crate::base::sync::lock;
use crate::device::Shared;
use crate::memory::fast_reg::{Invalidation, Invalidator};
use crate::memory::mr::{Claim, Data, Mappings, View};
use crate::memory::mr_cache::PinSet;
use crate::qp::halves::{Peer, Qp, QpConfig, Requester, Responder, Wait};
use crate::qp::state::{QpState, QpType};
use crate::queue::cq::Cqe;
use crate::queue::work_queue::{Flushed, Popped};
use crate::queue::wqe::{Operation, SendWqe};
use crate::transport::responder::{packets, Message, Nak, PSN_MASK};
use crate::transport::turn::{Outbox, Traffic, Turn};
use crate::CHUNK;

/// What visiting a queue found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// Nothing to do; worth looking again soon.
    Empty,
    /// Something was done, and nothing is left.
    Done,
    /// Something is left.
    More,
    /// Nothing is to be done until somebody says so.
    Parked,
}

/// What a step of the work request under way led to.
pub(crate) enum Step {
    /// Something was done, and something may follow.
    Partial,
    /// It ends with this `enum virtio_rdma_wc_status`.
    End(u32),
    /// It waits.
    Wait,
    /// There is none under way any more, and this was found behind it.
    Next(Popped),
}

/// The time for an answer: 4.096 us * 2^`timeout`; `None` for ever.
fn answer_delay(timeout: u8) -> Option<Duration> {
    let exponent = u32::from(timeout & 31);
    (exponent != 0).then(|| Duration::from_nanos(4096 << exponent))
}

impl Shared {
    /// Goes on with a send queue until the turn is over. Own thread only.
    pub(crate) fn service_send(self: &Arc<Self>, slot: u16, turn: &mut Turn) -> Visit {
        let Some(qp) = self.qps.get(slot) else { return Visit::Parked };
        let mut requester = lock(&qp.requester);
        let Some(config) = requester.config else { return Visit::Parked };
        let config = &config;
        let visit = self.send(slot, qp, &mut requester, config, turn);
        turn.outbox.place_completions();
        requester.queue.signal_if_needed();
        turn.taken = requester.queue.taken();
        visit
    }

    /// The turn itself: what there is to do by the state of the QP, again and again.
    fn send(
        self: &Arc<Self>,
        slot: u16,
        qp: &Qp,
        requester: &mut Requester,
        config: &QpConfig,
        turn: &mut Turn,
    ) -> Visit {
        let before = turn.left();
        loop {
            if turn.is_over() {
                return Visit::More;
            }
            match qp.state() {
                QpState::Rts => {}
                QpState::Sqd if requester.active => {}
                QpState::Sqd => {
                    self.drained(slot, requester);
                    return Visit::Parked;
                }
                QpState::Err | QpState::Sqe => {
                    return self.flush_send(slot, requester, config, turn)
                }
                QpState::Reset | QpState::Init | QpState::Rtr => return Visit::Parked,
            }
            let step = if requester.active {
                self.step(slot, qp, requester, config, turn)
            } else {
                Step::Next(requester.queue.pop_send(&mut requester.wqe, config))
            };
            match step {
                Step::Partial => {}
                Step::End(status) => {
                    self.finish(slot, requester, config, status, &mut turn.outbox);
                }
                Step::Wait => return Visit::Parked,
                Step::Next(popped) => {
                    let found = self.begin(slot, requester, config, popped, turn);
                    if !found && qp.state() == QpState::Rts {
                        return if turn.left() == before { Visit::Empty } else { Visit::Done };
                    }
                }
            }
        }
    }

    /// Gives the send queue of a QP a turn before a command ends it (chapter 8 of the
    /// specification). Programs that post without waiting for completions, and are done, take what
    /// they posted for sent: other devices have sent it by the time a command reaches them.
    pub(crate) fn last_turn(self: &Arc<Self>, slot: u16) {
        let Some(qp) = self.qps.get(slot) else { return };
        if qp.state() != QpState::Rts || lock(&qp.requester).active {
            return;
        }
        let mut turn = Turn::default();
        turn.begin(u32::MAX, true);
        self.service_send(slot, &mut turn);
        turn.end();
        self.charge(turn.finish(self));
    }

    /// Begins with what came next in the send queue; `false` if that was nothing, or ended at once
    /// (then the state has changed).
    fn begin(
        self: &Arc<Self>,
        slot: u16,
        requester: &mut Requester,
        config: &QpConfig,
        popped: Popped,
        turn: &mut Turn,
    ) -> bool {
        let malformed = match popped {
            Ok(Some(Ok(()))) => {
                requester.begin();
                return true;
            }
            Ok(Some(Err(malformed))) => malformed,
            Ok(None) => return false,
            Err(error) => {
                self.complain(Counter::BadSendChain, &error);
                self.raise(VIRTIO_RDMA_EVENT_QP_FATAL, u32::from(slot) + 1);
                self.fail_requester(slot, QpState::Err);
                return false;
            }
        };
        turn.spend(0);
        self.complain(Counter::BadSendRequest, &malformed.why);
        requester.wqe = SendWqe::empty();
        requester.wqe.index = malformed.index;
        requester.wqe.wr_id = malformed.wr_id;
        requester.wqe.wc_opcode = malformed.wc_opcode;
        self.finish(slot, requester, config, malformed.status, &mut turn.outbox);
        false
    }

    /// Goes on with the work request under way, and with those behind it as long as the peer does
    /// what they ask for.
    fn step(
        self: &Arc<Self>,
        slot: u16,
        qp: &Qp,
        requester: &mut Requester,
        config: &QpConfig,
        turn: &mut Turn,
    ) -> Step {
        if !config.kind.is_connected() {
            turn.spend(requester.wqe.total);
            return Step::End(self.send_datagram(slot, requester, config, turn));
        }
        if !self.offers(requester.wqe.operation) {
            turn.spend(0);
            return Step::End(VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        }
        if requester.wqe.operation.is_local() {
            turn.spend(0);
            let status = self.manage_memory(slot, &requester.wqe, config);
            turn.work(self.take_charge());
            return Step::End(status);
        }
        let mut local = Mappings::new();
        let len = match self.next_chunk(requester, config, turn, &mut local) {
            Ok(len) => len,
            Err(status) => return Step::End(status),
        };
        self.find_peer(requester);
        // Its responder is locked for longer than the requester can be borrowed.
        let peer = requester.peer.take();
        let step = match &peer {
            Some(peer) => self.exchange(slot, qp, requester, config, peer, &mut local, len, turn),
            None => Err(None),
        };
        requester.peer = peer;
        match step {
            Ok(step) => step,
            Err(Some(nak)) if config.kind == QpType::Uc => self.drop_unreliable(nak),
            Err(None | Some(Nak::Silence)) => self.no_answer(slot, requester, config),
            Err(Some(Nak::Restart)) => {
                requester.done = 0;
                Step::Partial
            }
            Err(Some(Nak::NotReady(timer))) => self.not_ready(slot, requester, timer),
            Err(Some(Nak::Failed(status))) => Step::End(status),
        }
    }

    /// Checks and pins the local side of the next chunk of the work request under way; how long it
    /// is, or the status that the work request ends with.
    #[inline]
    fn next_chunk(
        &self,
        requester: &Requester,
        config: &QpConfig,
        turn: &mut Turn,
        local: &mut Mappings,
    ) -> Result<u64, u32> {
        let len = (requester.wqe.total - requester.done).min(CHUNK);
        turn.spend(len);
        self.map_local(requester, config, len, &mut turn.local, local)?;
        Ok(len)
    }

    /// Does a work request that concerns no peer; its `enum virtio_rdma_wc_status`.
    fn manage_memory(&self, slot: u16, wqe: &SendWqe, config: &QpConfig) -> u32 {
        match &wqe.operation {
            Operation::RegMr(request) if self.has(VIRTIO_RDMA_F_FAST_REG) => {
                self.reg_mr(config, request).err().unwrap_or(VIRTIO_RDMA_WC_SUCCESS)
            }
            Operation::BindMw(bind) if self.has_mws() => match self.bind_mw(slot, config, bind) {
                Ok(()) => VIRTIO_RDMA_WC_SUCCESS,
                Err(()) => VIRTIO_RDMA_WC_MW_BIND_ERR,
            },
            Operation::LocalInv => self.invalidate_local(slot, wqe, config),
            _ => VIRTIO_RDMA_WC_LOC_QP_OP_ERR,
        }
    }

    /// Invalidates the key that a work request names for this side, if it does.
    fn invalidate_local(&self, slot: u16, wqe: &SendWqe, config: &QpConfig) -> u32 {
        let Some(key) = wqe.invalidate else { return VIRTIO_RDMA_WC_SUCCESS };
        if !self.can_invalidate() {
            return VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
        }
        let (pdn, by) = (config.pdn, Invalidator::Local);
        match self.invalidate(Invalidation { key, pdn, qp: slot, by }) {
            Ok(()) => VIRTIO_RDMA_WC_SUCCESS,
            Err(why) => {
                self.complain(
                    Counter::BadRegistration,
                    &format_args!("a local invalidation ended in {why:?}"),
                );
                VIRTIO_RDMA_WC_MW_BIND_ERR
            }
        }
    }

    /// Checks and pins the local side of a chunk; with the first chunk, all of
    /// it is checked.
    fn map_local(
        &self,
        requester: &Requester,
        config: &QpConfig,
        len: u64,
        pins: &mut PinSet,
        local: &mut Mappings,
    ) -> Result<(), u32> {
        let wqe = &requester.wqe;
        let fetches = matches!(wqe.operation, Operation::Read | Operation::Atomic(_));
        let is_answered = fetches || wqe.operation == Operation::AtomicWrite;
        if is_answered && requester.attr.max_rd_atomic == 0 {
            return Err(VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        }
        if wqe.is_inline {
            return Ok(());
        }
        let access = if fetches { VIRTIO_RDMA_ACCESS_LOCAL_WRITE } else { 0 };
        let claim = Claim::local(config.pdn, access);
        pins.begin(self);
        let mut map = |bytes| {
            pins.map_sges(&self.keys, wqe.sges.as_slice(), claim, bytes, local)
                .map_err(|_| VIRTIO_RDMA_WC_LOC_PROT_ERR)
        };
        if requester.done == 0 && len < wqe.total {
            map(0..wqe.total)?;
        }
        map(requester.done..requester.done + len)
    }

    /// Sets the device and place of the other end: none unless a device with the destination GID is
    /// in this fabric.
    #[inline]
    fn find_peer(self: &Arc<Self>, requester: &mut Requester) {
        let generation = self.fabric.generation();
        if requester.peer.as_ref().is_none_or(|peer| peer.generation != generation) {
            requester.peer = self.look_up_peer(requester, generation);
        }
    }

    fn look_up_peer(self: &Arc<Self>, requester: &mut Requester, generation: u64) -> Option<Peer> {
        let attr = &requester.attr;
        // A device sends from no GID but its own.
        if !self.fabric.find(&requester.source).is_some_and(|own| Arc::ptr_eq(&own, self)) {
            return None;
        }
        let device = self.fabric.find(&requester.source.beside(attr.ah_attr.grh.dgid))?;
        if !requester.partner.is(&device) {
            return None;
        }
        let slot = device.slot_of(attr.dest_qp_num)?;
        Some(Peer { device, slot, generation })
    }

    /// Has the other end do a chunk, and what follows it in the queue, with its responder locked
    /// once for all of it: locking is what small messages would spend most of their time with. `Err`
    /// has the NAK that ended that; none if there is no other end, or it is not connected to this
    /// QP or not ready to receive.
    #[allow(clippy::too_many_arguments)] // both ends of a connection
    fn exchange(
        self: &Arc<Self>,
        slot: u16,
        qp: &Qp,
        requester: &mut Requester,
        config: &QpConfig,
        peer: &Peer,
        local: &mut Mappings,
        mut len: u64,
        turn: &mut Turn,
    ) -> Result<Step, Option<Nak>> {
        let remote = peer.device.qps.get(peer.slot).ok_or(None)?;
        let mut responder = lock(&remote.responder);
        let dgid = &requester.attr.ah_attr.grh.dgid;
        let own = u32::from(slot) + 1;
        if !remote.state().receives()
            || !responder.is_connected_to(config.kind, &requester.source, own, dgid)
        {
            return Err(None);
        }
        if !responder.partner.is(self) || !expects(&mut responder, requester, config.kind) {
            return Err(None);
        }
        let end = loop {
            requester.asks_again = self.asks_again(requester);
            let to = &mut responder;
            if let Err(nak) = self.ask(slot, requester, config, peer, to, local, len, turn) {
                break Err(Some(nak));
            }
            if let Some(step) = self.advance(slot, requester, config, peer, len, turn) {
                break Ok(step);
            }
            if turn.is_over() || qp.state() != QpState::Rts {
                break Ok(Step::Partial);
            }
            if !requester.active {
                match requester.queue.pop_send(&mut requester.wqe, config) {
                    Ok(Some(Ok(()))) => requester.begin(),
                    // What becomes of that may lock this QP's responder, which may be this one.
                    popped => break Ok(Step::Next(popped)),
                }
                let operation = requester.wqe.operation;
                if operation.is_local() || !self.offers(operation) {
                    break Ok(Step::Partial);
                }
            }
            len = match self.next_chunk(requester, config, turn, local) {
                Ok(len) => len,
                Err(status) => break Ok(Step::End(status)),
            };
        };
        turn.outbox.place_completions();
        end
    }

    /// Has the responder of the other end, which is locked, do a chunk.
    #[allow(clippy::too_many_arguments)] // both ends of a connection
    #[inline(always)]
    fn ask(
        self: &Arc<Self>,
        slot: u16,
        requester: &Requester,
        config: &QpConfig,
        peer: &Peer,
        responder: &mut Responder,
        mappings: &Mappings,
        len: u64,
        turn: &mut Turn,
    ) -> Result<(), Nak> {
        let Turn { local: pins, remote, outbox, .. } = turn;
        let wqe = &requester.wqe;
        let local = if wqe.is_inline {
            Data::Inline(&wqe.inline)
        } else {
            Data::Mapped(View { pins, mappings })
        };
        let (done, asks_again) = (requester.done, requester.asks_again);
        let path_mtu = requester.attr.path_mtu;
        let message = Message { wqe, done, len, local, path_mtu, asks_again };
        let (device, waiter) = (&peer.device, (self, slot));
        match config.kind {
            QpType::XrcIni => {
                device.respond_to_xrc(peer.slot, responder, &message, waiter, remote, outbox)
            }
            _ => device.respond(peer.slot, responder, &message, waiter, remote, outbox),
        }
    }

    /// The other end did a chunk of `len`; what follows if not more of the same.
    #[inline]
    fn advance(
        self: &Arc<Self>,
        slot: u16,
        requester: &mut Requester,
        config: &QpConfig,
        peer: &Peer,
        len: u64,
        turn: &mut Turn,
    ) -> Option<Step> {
        requester.done += len;
        requester.retry_left = requester.attr.retry_cnt;
        requester.rnr_left = requester.attr.rnr_retry;
        self.stop_waiting(slot, requester);
        if requester.done < requester.wqe.total {
            return None;
        }
        requester.pace.count();
        turn.outbox.carry(&peer.device, traffic(requester).mirrored());
        let status = match requester.wqe.operation {
            Operation::Read => self.invalidate_local(slot, &requester.wqe, config),
            _ => VIRTIO_RDMA_WC_SUCCESS,
        };
        if status != VIRTIO_RDMA_WC_SUCCESS {
            return Some(Step::End(status));
        }
        self.finish(slot, requester, config, status, &mut turn.outbox);
        None
    }

    /// The peer did not take a message of an unreliable connection. Nobody tells
    /// the sender (IBA 9.8.2.2): it completes with success.
    fn drop_unreliable(&self, nak: Nak) -> Step {
        let counter = match nak {
            Nak::NotReady(_) => Some(Counter::DropNoReceive),
            // The responder was reset in the middle of it.
            Nak::Restart => Some(Counter::DropUnreachable),
            // Counted where it was refused.
            Nak::Failed(_) | Nak::Silence => None,
        };
        if let Some(counter) = counter {
            self.stats.add(counter, 1);
        }
        Step::End(VIRTIO_RDMA_WC_SUCCESS)
    }

    /// The peer is gone, or not there yet: try again later, as often as the
    /// QP's attributes say.
    fn no_answer(&self, slot: u16, requester: &mut Requester, config: &QpConfig) -> Step {
        if config.kind == QpType::Uc {
            self.stats.add(Counter::DropUnreachable, 1);
            return Step::End(VIRTIO_RDMA_WC_SUCCESS);
        }
        if let Wait::Answer(deadline) = requester.wait {
            let now = self.clock().now();
            match deadline {
                // Asked again before its time, by a sign that was none.
                None => return Step::Wait,
                Some(deadline) if now < deadline => return Step::Wait,
                Some(_) if requester.retry_left == 0 => {
                    return Step::End(VIRTIO_RDMA_WC_RETRY_EXC_ERR);
                }
                Some(_) => requester.retry_left -= 1,
            }
        }
        self.stats.add(Counter::Timeouts, 1);
        let deadline = answer_delay(requester.attr.timeout).map(|delay| self.clock().now() + delay);
        requester.wait = Wait::Answer(deadline);
        self.set_timer(slot, deadline);
        Step::Wait
    }

    fn stop_waiting(&self, slot: u16, requester: &mut Requester) {
        if requester.wait != Wait::No {
            requester.wait = Wait::No;
            self.set_timer(slot, None);
        }
    }

    /// Ends the work request under way (or one that was malformed): its CQE, and
    /// what an error does to the QP.
    fn finish(
        self: &Arc<Self>,
        slot: u16,
        requester: &mut Requester,
        config: &QpConfig,
        status: u32,
        outbox: &mut Outbox,
    ) {
        requester.active = false;
        self.stop_waiting(slot, requester);
        let wqe = &requester.wqe;
        let done = Flushed { wr_id: wqe.wr_id, wc_opcode: wqe.wc_opcode, index: wqe.index };
        if status != VIRTIO_RDMA_WC_SUCCESS {
            let next = if config.kind.is_reliable() { QpState::Err } else { QpState::Sqe };
            self.fail_requester(slot, next);
            self.complete_send(slot, config, done, status, 0, outbox);
            return;
        }
        if !wqe.operation.is_local() {
            let count = packets(wqe.total, requester.attr.path_mtu);
            requester.attr.sq_psn = requester.attr.sq_psn.wrapping_add(count) & PSN_MASK;
            if config.kind.is_connected() {
                outbox.carry_own(traffic(requester));
            }
        }
        count_send(config, wqe, outbox);
        if config.signal_all || wqe.signaled {
            self.complete_send(slot, config, done, status, wqe.total, outbox);
        }
    }

    fn complete_send(
        self: &Arc<Self>,
        slot: u16,
        config: &QpConfig,
        done: Flushed,
        status: u32,
        len: u64,
        outbox: &mut Outbox,
    ) {
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = done.wr_id;
        cqe.status = status as u8;
        cqe.opcode = done.wc_opcode;
        cqe.wqe_index = done.index;
        cqe.byte_len = u32::try_from(len).unwrap_or(u32::MAX);
        cqe.qp_num = u32::from(slot) + 1;
        self.count_error(status);
        outbox.complete_send(self, config.send_cq, cqe);
    }

    /// Moves the QP into ERR or SQE after an error of its own. The responder of
    /// a peer must not be locked.
    fn fail_requester(&self, slot: u16, next: QpState) {
        let qp = self.qps.take(slot);
        let mut responder = lock(&qp.responder);
        if qp.state() != QpState::Err {
            qp.set_state(&mut responder, next);
        }
        drop(responder);
        self.make_hot(self.jobs.receive(slot));
    }

    /// Completes posted sends with WR_FLUSH_ERR.
    fn flush_send(
        self: &Arc<Self>,
        slot: u16,
        requester: &mut Requester,
        config: &QpConfig,
        turn: &mut Turn,
    ) -> Visit {
        let status = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
        let mut found = false;
        if requester.active {
            found = true;
            requester.active = false;
            self.stop_waiting(slot, requester);
            let wqe = &requester.wqe;
            let flushed = Flushed { wr_id: wqe.wr_id, wc_opcode: wqe.wc_opcode, index: wqe.index };
            self.complete_send(slot, config, flushed, status, 0, &mut turn.outbox);
        }
        loop {
            if turn.is_over() {
                return Visit::More;
            }
            match requester.queue.pop_flushed_send() {
                Ok(Some(flushed)) => {
                    found = true;
                    turn.spend(0);
                    self.complete_send(slot, config, flushed, status, 0, &mut turn.outbox);
                }
                Ok(None) => return if found { Visit::Done } else { Visit::Empty },
                Err(error) => {
                    self.complain(Counter::BadSendChain, &error);
                    self.raise(VIRTIO_RDMA_EVENT_QP_FATAL, u32::from(slot) + 1);
                    self.fail_requester(slot, QpState::Err);
                    return Visit::Parked;
                }
            }
        }
    }

    /// The send queue has drained in SQD.
    fn drained(&self, slot: u16, requester: &mut Requester) {
        if requester.notify_drained {
            requester.notify_drained = false;
            self.raise(VIRTIO_RDMA_EVENT_SQ_DRAINED, u32::from(slot) + 1);
        }
    }
}

/// Whether the message under way is the one that the responder expects, by its PSN. On a reliable
/// connection any other gets nowhere, however often it is retried (IBA 9.7.4.1). On an unreliable one
/// the first packet of a message sets what is expected (IBA 9.8.2.2).
///
/// Both sides count the packets of a message when all of it is done, so that each message behind it
/// is expected as well.
#[inline]
fn expects(responder: &mut Responder, requester: &Requester, kind: QpType) -> bool {
    let psn = requester.attr.sq_psn;
    if responder.attr.rq_psn == psn {
        return true;
    }
    if kind != QpType::Uc || requester.done != 0 {
        return false;
    }
    responder.attr.rq_psn = psn;
    true
}

/// What the work request under way sends and receives when it succeeds.
#[inline(always)]
fn traffic(requester: &Requester) -> Traffic {
    let total = requester.wqe.total;
    let packets = packets(total, requester.attr.path_mtu);
    match requester.wqe.operation {
        Operation::Send | Operation::Write | Operation::AtomicWrite | Operation::Flush(_) => {
            Traffic::sent(total, packets)
        }
        Operation::Read | Operation::Atomic(_) => Traffic {
            xmit_packets: 1,
            rcv_bytes: total,
            rcv_packets: packets.into(),
            ..Traffic::default()
        },
        Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => Traffic::default(),
    }
}

/// Counts a message that was sent.
fn count_send(config: &QpConfig, wqe: &SendWqe, outbox: &mut Outbox) {
    let (messages, bytes) = match wqe.operation {
        _ if !config.kind.is_connected() => (Counter::DatagramMessages, Counter::DatagramBytes),
        Operation::Send => (Counter::SendMessages, Counter::SendBytes),
        Operation::Write | Operation::AtomicWrite => (Counter::WriteMessages, Counter::WriteBytes),
        Operation::Read => (Counter::ReadMessages, Counter::ReadBytes),
        Operation::Atomic(_) => return outbox.count(Counter::AtomicMessages, 1),
        Operation::Flush(_) => return outbox.count(Counter::FlushMessages, 1),
        Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => return,
    };
    outbox.count(messages, 1);
    outbox.count(bytes, wqe.total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_those_of_iba() {
        assert_eq!(answer_delay(0), None);
        assert_eq!(answer_delay(14), Some(Duration::from_nanos(67_108_864)));
    }
}
