// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requester: takes work requests from send queues and carries them out.
//!
//! A QP does one work request at a time, from its first byte to its CQE, so
//! they complete in order, and a READ is complete before what is fenced behind
//! it starts.

use std::sync::Arc;

use abi::{VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_EVENT_SQ_DRAINED};
use reliability::MOST_PACKETS_OF_MESSAGE;

use super::failure::fatal;
use super::hca::{Hca, Peer, RequesterHalf, Responder};
use super::local::{deliver, find_peer, lock_responder, NoResponder};
use super::message::{Message, Nak};
use super::observe;
use super::receive::Receiver;
use super::responder::{offers, Arrival};
use super::rnr::{self, Retry};
use super::round::Round;
use super::sender::{answer_delay, traffic, Progress, Sender};
use super::ud_requester;
use super::wire::is_away;
use super::wire::mirror::Chunk;
use super::wire::requester::post;
use crate::base::budget::CHUNK;
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::base::visit::Visit;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{Data, View};
use crate::memory::management::{bind_mw, reg_mr, Asker};
use crate::memory::mr::Claim;
use crate::memory::mr_cache::{Mappings, MrCache};
use crate::qp::config::QpConfig;
use crate::qp::halves::{Partner, Requester, Wait};
use crate::qp::mtu::packets;
use crate::qp::state::QpState;
use crate::queue::request::Operation;
use crate::queue::work_queue::WorkQueueError;
use crate::queue::wqe::{Popped, SendWqe};

/// The longest time that a requester may wait for an answer, in multiples of its timeout (IBA 9.7.6.1.3).
const LONGEST_ANSWER: u32 = 4;

/// Returns whether the peer's QP is there and was not made ready to receive yet. A place without a QP is in RESET too.
fn is_yet_to_receive(half: &RequesterHalf) -> bool {
    let Some(peer) = &half.peer else { return false };
    let remote = peer.device.qps.get(peer.slot).filter(|remote| remote.kind().is_some());
    remote.is_some_and(|remote| matches!(remote.state(), QpState::Reset | QpState::Init))
}

/// Visits the send queue of the QP in place `slot`, until the budget is exhausted. Own thread only.
pub(crate) fn visit(hca: &Arc<Hca>, slot: Slot, round: &mut Round) -> Visit {
    let Some(qp) = hca.qps.get(slot) else { return Visit::Parked };
    let mut requester = lock(&qp.requester);
    let Some(config) = requester.config else { return Visit::Parked };
    let observed = requester.observed;
    let visit = Sender { hca, slot, qp, config: &config, observed }.visit(&mut requester, round);
    round.batch.place_completions();
    requester.queue.signal_if_needed();
    round.taken = requester.queue.taken();
    visit
}

/// Visits the send queue of a QP before a command ends it (specification, Queue pairs: States), and
/// returns what that has cost, in nanoseconds. Programs that post without waiting for completions, and
/// are done, take what they posted for sent: other devices have sent it by the time a command reaches
/// them.
pub(crate) fn last_visit(hca: &Arc<Hca>, slot: Slot) -> u64 {
    let Some(qp) = hca.qps.get(slot) else { return 0 };
    if qp.state() != QpState::Rts || lock(&qp.requester).active {
        return 0;
    }
    let mut round = Round::default();
    round.budget.stopwatch.begin(hca.fabric.clock());
    round.begin(u32::MAX, true);
    visit(hca, slot, &mut round);
    round.end();
    round.finish(hca)
}

impl Sender<'_> {
    /// Does the work that there is, on the wire as well.
    #[inline]
    fn visit(&self, requester: &mut RequesterHalf, round: &mut Round) -> Visit {
        if requester.window.is_none() {
            let visit = self.send(requester, round);
            if requester.window.is_none() {
                return visit;
            }
        } else if matches!(self.qp.state(), QpState::Rts | QpState::Sqd) {
            self.expire(requester, round);
        }
        let visit = self.send(requester, round);
        if matches!(self.qp.state(), QpState::Rts | QpState::Sqd) && self.pump(requester, round) {
            return Visit::More;
        }
        visit
    }

    /// Carries out work requests, step by step, as far as the state of the QP allows.
    fn send(&self, requester: &mut RequesterHalf, round: &mut Round) -> Visit {
        let before = round.budget.left();
        loop {
            if round.budget.is_over() {
                return Visit::More;
            }
            match self.qp.state() {
                QpState::Rts => {}
                QpState::Sqd if requester.active => {}
                QpState::Sqd
                    if requester.window.as_ref().is_some_and(|window| !window.is_empty()) =>
                {
                    return Visit::Parked;
                }
                QpState::Sqd => {
                    self.drained(requester);
                    return Visit::Parked;
                }
                QpState::Err | QpState::Sqe => return self.flush(requester, round),
                QpState::Reset | QpState::Init | QpState::Rtr => return Visit::Parked,
            }
            let progress = if requester.active {
                self.step(requester, round)
            } else {
                let Requester { queue, wqe, .. } = &mut requester.requester;
                Progress::Next(queue.pop_send(wqe, &self.config.wq))
            };
            match progress {
                Progress::Partial => {}
                Progress::End(status) => self.finish(requester, status, &mut round.batch),
                Progress::Wait => return Visit::Parked,
                Progress::Again => return Visit::More,
                Progress::Next(popped) => {
                    let found = self.begin(requester, popped, round);
                    if !found && self.qp.state() == QpState::Rts {
                        let is_empty = round.budget.left() == before;
                        return if is_empty { Visit::Empty } else { Visit::Done };
                    }
                }
            }
        }
    }

    /// Begins with the next work request of the send queue. Returns `false` if there is none, or if it ended at once
    /// (then the state has changed).
    fn begin(
        &self,
        requester: &mut Requester,
        popped: Result<Popped, WorkQueueError>,
        round: &mut Round,
    ) -> bool {
        let malformed = match popped {
            Ok(Popped::Taken) => {
                self.start(requester);
                return true;
            }
            Ok(Popped::Malformed(malformed)) => malformed,
            Ok(Popped::Empty) => return false,
            Err(error) => {
                self.hca.stats.guest_error(Counter::BadSendChain, error);
                self.fail(requester, fatal(self.slot));
                return false;
            }
        };
        round.budget.spend(0);
        self.hca.stats.guest_error(Counter::BadSendRequest, malformed.why);
        self.stop_waiting(requester);
        self.end_malformed(requester, malformed, &mut round.batch);
        false
    }

    /// Begins with the work request that was just read.
    #[inline]
    fn start(&self, requester: &mut Requester) {
        requester.begin();
        if self.observed {
            observe::posted(self.hca, self.slot, requester);
        }
    }

    /// Goes on with the work request under way, and with those behind it as long as the peer does
    /// what they ask for.
    fn step(&self, half: &mut RequesterHalf, round: &mut Round) -> Progress {
        let requester = &mut half.requester;
        if self.hca.message_limit.rate().is_some() && self.holds_message(requester) {
            return Progress::Wait;
        }
        if !self.config.wq.kind.is_connected() {
            return self.step_datagram(requester, round);
        }
        let (features, request) = (&self.hca.features, &requester.wqe.request);
        let invalidates = request.invalidate.is_some();
        if !offers(features, request.operation) || invalidates && !features.has_invalidation() {
            round.budget.spend(0);
            return Progress::End(WcStatus::LocalQpOperation);
        }
        if requester.wqe.request.operation.is_local() {
            return self.step_locally(requester, round);
        }
        if half.window.is_some() || self.is_away(half) {
            return self.step_on_wire(half, round);
        }
        let mut local = Mappings::new();
        let len = match self.next_chunk(half, round, &mut local) {
            Ok(len) => len,
            Err(status) => return Progress::End(status),
        };
        find_peer(self.hca, half);
        let RequesterHalf { peer, requester } = half;
        let progress = match peer {
            Some(peer) => self.exchange(requester, peer, &mut local, len, round),
            None => Err(Nak::Unreachable),
        };
        match progress {
            Ok(progress) => progress,
            Err(nak) if self.config.wq.kind == QpType::Uc => self.drop_unreliable(nak),
            Err(Nak::Unreachable | Nak::Silence) => self.no_answer(half),
            Err(Nak::Restart) => {
                requester.done = 0;
                Progress::Partial
            }
            Err(Nak::Again) => {
                // The data is there. Only the end of the message is asked for again.
                requester.done = requester.wqe.request.total;
                self.stop_waiting(requester);
                Progress::Again
            }
            Err(Nak::NotReady(timer)) => match rnr::not_ready(self.hca, self.slot, half, timer) {
                Retry::Later => Progress::Wait,
                Retry::Exceeded => Progress::End(WcStatus::RnrRetryExceeded),
            },
            Err(Nak::Failed(status)) => Progress::End(status),
        }
    }

    /// Does the work request under way, which concerns the memory of this side alone. Behind work requests on the wire
    /// it waits until they are done, because they may still need the memory. A REG_MR is done at once, because its
    /// region is in no use before, and completes behind them: consumers post one in front of each message.
    fn step_locally(&self, requester: &mut Requester, round: &mut Round) -> Progress {
        let window = requester.window.as_ref().filter(|window| !window.is_empty());
        if let Some(window) = window {
            let is_registration = matches!(requester.wqe.request.operation, Operation::RegMr(_));
            let may_go = is_registration && !requester.wqe.is_fenced && window.has_room(0);
            if !may_go || !self.registers(&requester.wqe, round) {
                return Progress::Wait;
            }
            post(requester);
            return Progress::Partial;
        }
        round.budget.spend(0);
        let status = self.manage_memory(&requester.wqe, round);
        status.map_or(Progress::Again, Progress::End)
    }

    /// Does a REG_MR. Returns `false` if it is refused: then it waits, and ends with its error when it is the oldest.
    fn registers(&self, wqe: &SendWqe, round: &mut Round) -> bool {
        let Operation::RegMr(request) = &wqe.request.operation else { return false };
        let Hca { keys, features, .. } = &**self.hca;
        let &QpConfig { pdn, privileged, .. } = self.config;
        let asker = Asker { slot: self.slot, pdn, privileged };
        round.budget.spend(0);
        features.has_fast_reg() && reg_mr(keys, features, asker, request, &mut round.budget).is_ok()
    }

    /// Sends the datagram under way, or goes on with it: one to a large group takes several steps.
    fn step_datagram(&self, requester: &mut Requester, round: &mut Round) -> Progress {
        if requester.members.is_none() {
            if self.hca.rate_limit.rate().is_some() && self.holds_datagram(requester) {
                return Progress::Wait;
            }
            round.budget.spend(requester.wqe.request.total);
        }
        match ud_requester::send(self.hca, self.slot, requester, self.config, round) {
            Ok(status) => Progress::End(status),
            Err(left) => {
                requester.members = Some(left);
                Progress::Partial
            }
        }
    }

    /// Returns whether the peer is reached over the wire. A peer that was found in this network is not, even
    /// if it has no address at present.
    #[inline]
    fn is_away(&self, half: &RequesterHalf) -> bool {
        let generation = self.hca.fabric.generation();
        if half.peer.as_ref().is_some_and(|peer| peer.generation == generation) {
            return false;
        }
        match half.partner {
            Partner::Device(_) => false,
            Partner::Remote => true,
            Partner::Unknown => is_away(self.hca, &half.source, &half.attr.ah_attr.grh.dgid),
        }
    }

    /// Checks the local side of the work request under way, and puts it among those that are sent in
    /// packets.
    #[cold]
    fn step_on_wire(&self, requester: &mut Requester, round: &mut Round) -> Progress {
        requester.partner.uses_wire();
        if self.config.wq.kind == QpType::Uc {
            return self.send_packets(requester, round);
        }
        round.budget.spend(0);
        requester.done = 0;
        if let Err(status) = self.check_on_wire(requester, round) {
            if requester.window.as_ref().is_some_and(|window| !window.is_empty()) {
                // Work requests in front of it complete first.
                return Progress::Wait;
            }
            return Progress::End(status);
        }
        if post(requester) {
            Progress::Partial
        } else {
            Progress::Wait
        }
    }

    /// Checks a work request before it is sent in packets: how many they are, and the local side. Fails
    /// with the status that the work request ends with.
    fn check_on_wire(&self, requester: &Requester, round: &mut Round) -> Result<(), WcStatus> {
        let total = requester.wqe.request.total;
        if packets(total, requester.attr.path_mtu) > MOST_PACKETS_OF_MESSAGE {
            return Err(WcStatus::LocalLength);
        }
        self.map_local(requester, total, &mut round.local, &mut Mappings::new())
    }

    /// Checks the local side of the next chunk of the work request under way, and holds its regions;
    /// returns how long the chunk is, or the status that the work request ends with.
    #[inline]
    fn next_chunk(
        &self,
        requester: &Requester,
        round: &mut Round,
        local: &mut Mappings,
    ) -> Result<u64, WcStatus> {
        let left = requester.wqe.request.total - requester.done;
        let mut len = left.min(CHUNK);
        if len == CHUNK {
            round.local.copy_alone(round.budget.is_wary());
            len = left.min(round.budget.chunk(round.local.has_helpers()));
        }
        round.budget.spend(len);
        self.map_local(requester, len, &mut round.local, local)?;
        Ok(len)
    }

    /// Carries out a work request that concerns no peer, and returns its status; `None` while a copy by the key that it
    /// ends is under way.
    fn manage_memory(&self, wqe: &SendWqe, round: &mut Round) -> Option<WcStatus> {
        let Hca { keys, features, stats, .. } = &**self.hca;
        let &QpConfig { pdn, privileged, .. } = self.config;
        let asker = Asker { slot: self.slot, pdn, privileged };
        let done = match &wqe.request.operation {
            Operation::RegMr(request) if features.has_fast_reg() => {
                reg_mr(keys, features, asker, request, &mut round.budget)
            }
            Operation::BindMw(bind) if features.has_mws() => {
                let in_use = bind_mw(keys, features, asker, bind);
                if matches!(in_use, Ok(Some(_))) {
                    return None;
                }
                in_use.map(|_| ())
            }
            Operation::LocalInv => return self.invalidate_local(wqe).ok(),
            _ => return Some(WcStatus::LocalQpOperation),
        };
        Some(match done {
            Ok(()) => WcStatus::Success,
            Err(refusal) => {
                stats.guest_error(Counter::BadRegistration, refusal.why);
                refusal.status
            }
        })
    }

    /// Checks the local side of a chunk and holds its regions; with the first chunk, all of
    /// the message is checked.
    #[inline]
    pub(super) fn map_local(
        &self,
        requester: &Requester,
        len: u64,
        cache: &mut MrCache,
        local: &mut Mappings,
    ) -> Result<(), WcStatus> {
        let wqe = &requester.wqe;
        let fetches = matches!(wqe.request.operation, Operation::Read | Operation::Atomic(_));
        let is_answered = fetches || matches!(wqe.request.operation, Operation::AtomicWrite);
        if is_answered && requester.attr.max_rd_atomic == 0 {
            return Err(WcStatus::LocalQpOperation);
        }
        if wqe.is_inline {
            return Ok(());
        }
        let access = if fetches { VIRTIO_RDMA_ACCESS_LOCAL_WRITE } else { 0 };
        let claim = Claim::local(self.config.pdn, access);
        cache.begin(&**self.hca);
        let mut map = |bytes| {
            cache
                .map_sges(&self.hca.keys, wqe.sges.as_slice(), claim, bytes, local)
                .map_err(|_| WcStatus::LocalProtection)
        };
        let total = wqe.request.total;
        if len == total {
            return map(0..total);
        }
        if requester.done == 0 {
            map(0..total)?;
        }
        map(requester.done..requester.done + len)
    }

    /// Makes the other end carry out a chunk of `len` bytes, and the work requests behind it in the queue, with its
    /// responder locked once for all of them: small messages would otherwise spend most of their time on the lock.
    /// Returns the NAK that ended the exchange, if one did.
    fn exchange(
        &self,
        requester: &mut Requester,
        peer: &Peer,
        local: &mut Mappings,
        mut len: u64,
        round: &mut Round,
    ) -> Result<Progress, Nak> {
        let kind = self.config.wq.kind;
        let is_limited = self.hca.message_limit.rate().is_some();
        let mut responder = match lock_responder(self.hca, self.slot, kind, requester, peer) {
            Ok(responder) => responder,
            Err(NoResponder::Absent) => return Err(Nak::Unreachable),
            Err(NoResponder::Frozen) => return Ok(self.park(requester)),
        };
        let end = loop {
            requester.asks_again = rnr::asks_again(self.hca, requester);
            // The PSNs of a message are counted with its last chunk.
            let is_last = requester.done + len == requester.wqe.request.total;
            let psns = if is_last {
                packets(requester.wqe.request.total, requester.attr.path_mtu)
            } else {
                0
            };
            if let Err(nak) = self.ask(requester, peer, &mut responder, local, (len, psns), round) {
                let is_seen = self.observed || responder.observed;
                if is_seen && !self.only_polls(requester, nak) {
                    self.observe_nak(requester, peer, &responder, nak);
                    self.show(requester, peer, &mut responder, (&*local, len), Some(nak), round);
                }
                break Err(nak);
            }
            if self.observed {
                observe::copied(self.hca, self.slot, requester, len);
            }
            if responder.observed {
                observe::copied(&peer.device, peer.slot, requester, len);
            }
            if self.observed || responder.observed {
                self.show(requester, peer, &mut responder, (&*local, len), None, round);
            }
            if let Some(progress) = self.advance(requester, peer, (len, psns), round) {
                break Ok(progress);
            }
            if round.budget.is_over() || self.qp.state() != QpState::Rts {
                break Ok(Progress::Partial);
            }
            if !requester.active {
                match requester.queue.pop_send(&mut requester.wqe, &self.config.wq) {
                    Ok(Popped::Taken) => self.start(requester),
                    // The next step may lock this QP's responder, which may be the responder that is locked here.
                    popped => break Ok(Progress::Next(popped)),
                }
                let operation = requester.wqe.request.operation;
                if is_limited || operation.is_local() || !offers(&self.hca.features, operation) {
                    break Ok(Progress::Partial);
                }
            }
            len = match self.next_chunk(requester, round, local) {
                Ok(len) => len,
                Err(status) => break Ok(Progress::End(status)),
            };
        };
        round.batch.place_completions();
        end
    }

    /// Returns whether the requester has asked for a receive before its RNR timer ends, as it would not on the wire.
    fn only_polls(&self, requester: &Requester, nak: Nak) -> bool {
        let (Wait::Pause { until, .. } | Wait::Receive(until)) = requester.wait else {
            return false;
        };
        matches!(nak, Nak::NotReady(_)) && self.hca.clock().now() < until
    }

    /// Reports the refusal of a chunk to the observers of both ends.
    #[cold]
    fn observe_nak(&self, requester: &Requester, peer: &Peer, responder: &Responder, nak: Nak) {
        if self.observed {
            observe::nak(self.hca, self.slot, requester.sq_psn(), nak);
        }
        if responder.observed && self.config.wq.kind.is_reliable() {
            observe::refused(&peer.device, peer.slot, responder, nak);
        }
    }

    /// Shows the packets that a chunk would be to observers who want to see frames. The chunk is done, or is refused.
    #[cold]
    fn show(
        &self,
        requester: &Requester,
        peer: &Peer,
        responder: &mut Responder,
        (mappings, len): (&Mappings, u64),
        refused: Option<Nak>,
        round: &Round,
    ) {
        let (from, to) = ((self.hca, self.slot), (&peer.device, peer.slot));
        if ![from, to].iter().any(|(hca, slot)| hca.wants_frames(*slot)) {
            return;
        }
        let data = chunk_data(requester, &round.local, mappings);
        let kind = self.config.wq.kind;
        Chunk { from, to, kind, requester, data, len }.show(responder, refused);
    }

    /// Makes the responder of the other end, which is locked, carry out a chunk of `len` bytes. `psns` are those of the
    /// message, if the chunk is its last.
    #[inline(always)]
    fn ask(
        &self,
        requester: &Requester,
        peer: &Peer,
        responder: &mut Responder,
        mappings: &Mappings,
        (len, psns): (u64, u32),
        round: &mut Round,
    ) -> Result<(), Nak> {
        let Round { local: cache, remote, batch, .. } = round;
        let wqe = &requester.wqe;
        let local = chunk_data(requester, cache, mappings);
        let (done, asks_again) = (requester.done, requester.asks_again);
        let path_mtu = requester.attr.path_mtu;
        let request = &wqe.request;
        let message = Message { request, done, len, psns, local, path_mtu, asks_again };
        let to = Receiver { hca: &peer.device, slot: peer.slot, responder, batch };
        let mut arrival = Arrival { to, message: &message, cache: remote };
        deliver(&mut arrival, self.config.wq.kind, (self.hca, self.slot))
    }

    /// Goes on after the other end has carried out a chunk of `len` bytes; `psns` are those of the message, if the chunk
    /// is its last. Returns `None` if the next chunk, or the next work request, may follow at once.
    #[inline]
    fn advance(
        &self,
        requester: &mut Requester,
        peer: &Peer,
        (len, psns): (u64, u32),
        round: &mut Round,
    ) -> Option<Progress> {
        requester.done += len;
        requester.retry_left = requester.attr.retry_cnt;
        requester.rnr_left = requester.attr.rnr_retry;
        self.stop_waiting(requester);
        if requester.done < requester.wqe.request.total {
            return None;
        }
        requester.pace.count();
        round.batch.carry(&peer.device, traffic(&requester.wqe, psns).mirrored());
        if matches!(requester.wqe.request.operation, Operation::Read) {
            match self.invalidate_local(&requester.wqe) {
                Ok(WcStatus::Success) => {}
                Ok(status) => return Some(Progress::End(status)),
                Err(_) => return Some(self.leave_invalidation(requester, &mut round.batch)),
            }
        }
        self.succeed(requester, psns, &mut round.batch);
        None
    }

    /// Makes the work request under way wait for a guest that is frozen, for as long as that takes. It has all of its
    /// retries afterwards, as if its last chunk had just been answered.
    #[cold]
    fn park(&self, requester: &mut Requester) -> Progress {
        self.stop_waiting(requester);
        requester.retry_left = requester.attr.retry_cnt;
        requester.rnr_left = requester.attr.rnr_retry;
        Progress::Wait
    }

    /// Drops a message of an unreliable connection that the peer did not take. Nobody tells
    /// the sender (IBA 9.8.2.2): it completes with success.
    fn drop_unreliable(&self, nak: Nak) -> Progress {
        if let Some(counter) = nak.drop_counter() {
            self.hca.stats.add(counter, 1);
        }
        Progress::End(WcStatus::Success)
    }

    /// Waits for a peer that is gone, or not there yet, and tries again later, as often as the
    /// QP's attributes say. A guest that is frozen cannot make its QP ready, so its time does not count.
    ///
    /// Programs make a QP ready to send before they know that its peer is ready to receive. A requester waits for such
    /// a peer for the longest time that IBA allows, and looks for it as often as else.
    fn no_answer(&self, half: &mut RequesterHalf) -> Progress {
        let hca = self.hca;
        let now = hca.clock().now();
        let delay = answer_delay(half.attr.timeout);
        if let Wait::Answer(deadline) = half.wait {
            match deadline {
                // Something had the queue visited before its time.
                None => return Progress::Wait,
                Some(deadline) if now < deadline => {
                    let next = delay.map_or(deadline, |delay| deadline.min(now + delay));
                    hca.set_timer(self.slot, Some(next));
                    return Progress::Wait;
                }
                Some(_) if half.peer.as_ref().is_some_and(|peer| peer.device.is_frozen()) => {}
                Some(_) if half.retry_left == 0 => {
                    return Progress::End(WcStatus::RetryExceeded);
                }
                Some(_) => half.retry_left -= 1,
            }
        }
        hca.stats.add(Counter::Timeouts, 1);
        if self.observed {
            observe::retried(hca, self.slot, half.sq_psn(), "no answer", Some(half.retry_left));
        }
        let times = if is_yet_to_receive(half) { LONGEST_ANSWER } else { 1 };
        half.wait = Wait::Answer(delay.map(|delay| now + delay * times));
        hca.set_timer(self.slot, delay.map(|delay| now + delay));
        Progress::Wait
    }

    /// Completes posted sends with WR_FLUSH_ERR.
    fn flush(&self, requester: &mut Requester, round: &mut Round) -> Visit {
        let status = WcStatus::Flushed;
        let mut found = false;
        while let Some(wqe) = requester.window.as_mut().and_then(|window| window.pop()) {
            found = true;
            round.budget.spend(0);
            self.complete(wqe.ended(), status, 0, &mut round.batch);
        }
        if requester.active {
            found = true;
            requester.active = false;
            self.stop_waiting(requester);
            self.complete(requester.wqe.ended(), status, 0, &mut round.batch);
        }
        loop {
            if round.budget.is_over() {
                return Visit::More;
            }
            match requester.queue.pop_flushed_send() {
                Ok(Some(flushed)) => {
                    found = true;
                    round.budget.spend(0);
                    self.complete(flushed, status, 0, &mut round.batch);
                }
                Ok(None) => return if found { Visit::Done } else { Visit::Empty },
                Err(error) => {
                    self.hca.stats.guest_error(Counter::BadSendChain, error);
                    self.fail(requester, fatal(self.slot));
                    return Visit::Parked;
                }
            }
        }
    }

    /// Tells the owner that the send queue has drained in SQD, if it asked for that.
    fn drained(&self, requester: &mut Requester) {
        if requester.notify_drained {
            requester.notify_drained = false;
            self.hca.raise(VIRTIO_RDMA_EVENT_SQ_DRAINED, self.slot.number());
        }
    }
}

/// Returns the data of the next chunk of the work request under way.
#[inline(always)]
fn chunk_data<'a>(
    requester: &'a Requester,
    cache: &'a MrCache,
    mappings: &'a Mappings,
) -> Data<'a> {
    let wqe = &requester.wqe;
    if wqe.is_inline {
        // Nothing is left of a message whose end is asked for again.
        let done = usize::try_from(requester.done).unwrap_or(usize::MAX);
        Data::Inline(wqe.inline.get(done..).unwrap_or_default())
    } else {
        Data::Mapped(View { cache, mappings })
    }
}
