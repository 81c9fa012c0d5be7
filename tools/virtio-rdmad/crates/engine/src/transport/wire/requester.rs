// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requester on the wire: makes packets of work requests, and handles the answers (IBA 9.7.5).

use std::sync::Arc;
use std::time::{Duration, Instant};

use reliability::{Kind, Response, SendWindow};
use roce::{
    AtomicEth, Bth, ExtendedHeaders, Feth, Ieth, ImmDt, NakCode, Opcode, Operation as Op, Packet,
    Position, Psn, Qpn, Reth, RnrTimer, Service, Syndrome, Xrceth,
};
use zerocopy::IntoBytes;

use super::check::{check_peer, check_type};
use super::path::{Path, OVERHEAD};
use super::{congestion, service};
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{self, Atomic, View};
use crate::memory::mr::Claim;
use crate::memory::mr_cache::{Mappings, MrCache};
use crate::qp::halves::Requester;
use crate::qp::mtu::{mtu_bytes, packets, psns};
use crate::qp::state::QpState;
use crate::queue::request::{Operation, Request};
use crate::queue::wqe::SendWqe;
use crate::transport::hca::Hca;
use crate::transport::observe;
use crate::transport::round::Round;
use crate::transport::sender::{answer_delay, Sender};

/// Puts the work request under way into the window; `false` if there is no room.
pub(crate) fn post(requester: &mut Requester) -> bool {
    let psn = requester.sq_psn();
    let relies_on_credits = requester.attr.rnr_retry == 0;
    let window = requester.window.get_or_insert_with(|| {
        let mut window = Box::new(SendWindow::new(psn));
        if relies_on_credits {
            window.expect_credits();
        }
        window
    });
    let count = psns(&requester.wqe.request, requester.attr.path_mtu);
    if !window.has_room(count) {
        return false;
    }
    let wqe = std::mem::replace(&mut requester.wqe, SendWqe::empty());
    let request = &wqe.request;
    let has_response = matches!(
        request.operation,
        Operation::Read | Operation::Atomic(_) | Operation::AtomicWrite | Operation::Flush(_)
    );
    let takes_receive = request.takes_receive();
    let kind = Kind { has_response, is_fenced: wqe.is_fenced, takes_receive };
    window.push(wqe, count, kind);
    requester.active = false;
    true
}

/// Returns the opcode of a packet of a service, and the headers behind its BTH; `None` if no packet can say
/// what the request asks for.
pub(super) fn opcode(
    service: Service,
    request: &Request,
    position: Position,
    skip: u64,
) -> Option<(Opcode, ExtendedHeaders)> {
    let is_first = matches!(position, Position::First | Position::Only);
    let is_last = matches!(position, Position::Last | Position::Only);
    // The header of XRC has 24 bits for the number of an SRQ (IBA A14). A longer number is that of no SRQ, and
    // neither is the one that stands for it: the peer refuses the request, as the local path does.
    let srq = Qpn::new(request.srqn).unwrap_or(Qpn::MULTICAST);
    let xrceth = (service == Service::Xrc).then_some(Xrceth { srq });
    let mut extended = ExtendedHeaders { xrceth, ..ExtendedHeaders::default() };
    let immediate = request.immediate.filter(|_| is_last);
    let invalidate = request.invalidate.filter(|_| is_last && request.operation == Operation::Send);
    let operation = match request.operation {
        Operation::Send if invalidate.is_some() => Op::SendWithInvalidate,
        Operation::Send if immediate.is_some() => Op::SendWithImmediate,
        Operation::Send => Op::Send,
        Operation::Write if immediate.is_some() => Op::WriteWithImmediate,
        Operation::Write => Op::Write,
        Operation::Read => Op::ReadRequest,
        Operation::Atomic(Atomic::CompareSwap { .. }) => Op::CompareSwap,
        Operation::Atomic(Atomic::FetchAdd(_)) => Op::FetchAdd,
        Operation::AtomicWrite => Op::AtomicWrite,
        Operation::Flush(_) => Op::Flush,
        Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => return None,
    };
    let rkey = request.rkey;
    match request.operation {
        Operation::Write | Operation::Read | Operation::AtomicWrite if is_first => {
            let va = request.remote_addr.wrapping_add(skip);
            let dma_len = u32::try_from(request.total - skip).ok()?;
            extended.reth = Some(Reth { va, rkey, dma_len });
        }
        Operation::Atomic(atomic) => {
            let (swap_add, compare) = match atomic {
                Atomic::CompareSwap { compare, swap } => (swap, compare),
                Atomic::FetchAdd(add) => (add, 0),
            };
            extended.atomic_eth =
                Some(AtomicEth { va: request.remote_addr, rkey, swap_add, compare });
        }
        Operation::Flush(flush) => {
            let dma_len = u32::try_from(flush.length.unwrap_or(0)).ok()?;
            let level = if flush.length.is_some() { Feth::RANGE } else { Feth::MR };
            extended.feth = Some(Feth::new(flush.placement(), level)?);
            extended.reth = Some(Reth { va: request.remote_addr, rkey, dma_len });
        }
        _ => {}
    }
    extended.imm_dt = immediate.map(|word| ImmDt(word.to_ne_bytes()));
    extended.ieth = invalidate.map(|rkey| Ieth { rkey });
    Some((Opcode::new(service, operation, position)?, extended))
}

/// Returns the position of a packet in its message.
pub(super) fn position(index: u32, count: u32) -> Position {
    match (index == 0, index + 1 == count) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    }
}

impl Sender<'_> {
    /// Sends the packets that are due, until the budget is exhausted. Returns whether some are left. A work request
    /// that no packet can carry ends with an error.
    pub(crate) fn pump(&self, requester: &mut Requester, round: &mut Round) -> bool {
        let hca = self.hca;
        let Requester { window: Some(window), attr, source, .. } = requester else { return false };
        let now = hca.clock().now();
        if window.rnr_until.is_some_and(|until| now < until) {
            self.set_deadline(requester);
            return false;
        }
        window.rnr_until = None;
        let mut question = None;
        if window.credit_at.is_some_and(|at| at <= now) {
            if attr.rnr_retry == 0 {
                question = window.ask_for_credit();
            } else {
                window.lend_credit();
            }
        }
        let path = Path::new(hca, self.slot, attr, source);
        let Some(path) = path.map(|path| path.observed_if(self.observed, self.slot)) else {
            self.fail_front(requester, WcStatus::LocalQpOperation, round);
            return false;
        };
        let (service, mtu) = (service(self.config.wq.kind), mtu_bytes(attr.path_mtu));
        if let Some(psn) = question {
            ask_for_credit(hca, &path, service, psn, round);
        }
        window.paced_until = None;
        window.set_mtu(mtu);
        if window.flow.is_idle(now) {
            window.restart_cwnd();
        }
        let (mut failure, mut is_left, mut is_asking) = (None, false, false);
        let observed = self.observed.then_some(self.slot);
        while let Some(due) = window.poll_transmit(attr.max_rd_atomic) {
            if round.budget.is_over() {
                is_left = true;
                break;
            }
            let Some((wqe, flow)) = window.message(&due) else { break };
            let request = &wqe.request;
            let is_whole = matches!(request.operation, Operation::Send | Operation::Write);
            let skip = u64::from(due.index) * mtu;
            let carries = is_whole || request.operation == Operation::AtomicWrite;
            let len = if carries { (request.total - skip).min(mtu) } else { 0 };
            let count = packets(request.total, attr.path_mtu);
            let position = if is_whole { position(due.index, count) } else { Position::Only };
            let Some((opcode, mut extended)) = opcode(service, request, position, skip) else {
                // The peer would refuse it.
                failure = Some(WcStatus::RemoteInvalidRequest);
                break;
            };
            if let (Operation::Read, Some(reth)) = (request.operation, &mut extended.reth) {
                let asked_for = (u64::from(due.count) * mtu).min(reth.dma_len.into());
                reth.dma_len = u32::try_from(asked_for).unwrap_or(reth.dma_len);
            }
            let bytes = len + OVERHEAD;
            if let Some(until) = flow.wait(now, bytes, &hca.rate_limit) {
                // The time for an answer begins with the last packet that may be sent.
                window.paced_until = Some(until);
                (window.timeout_at, window.probe_at) = (None, None);
                break;
            }
            let mut headers = path.headers(opcode, due.psn, extended);
            headers.bth.ack_request = due.ack_request;
            headers.bth.solicited_event =
                request.solicited && matches!(position, Position::Last | Position::Only);
            round.budget.spend(len);
            let Round { outbox, local, .. } = round;
            if !flow.forms_trains() {
                outbox.flush(hca);
            }
            let sent = outbox.send(hca, &headers, observed, len as usize, |place| {
                self.gather(wqe, skip, place, local)
            });
            if sent.is_err() {
                failure = Some(WcStatus::LocalProtection);
                break;
            }
            flow.sent(now, bytes, due.is_lost);
            if due.is_retransmit {
                hca.stats.add(Counter::PacketsResent, 1);
                is_asking |= request.operation == Operation::Read;
            } else if due.ack_request {
                window.probe.sent(due.psn, now);
            }
            window.transmitted();
        }
        // Gaps of a READ are asked for all at once of a peer that knows selective acknowledgements.
        if is_asking {
            window.ask_for_sack();
        }
        if let Some(psn) = window.poll_sack_question() {
            offer(hca, &path, psn, true, round);
        }
        if let Some(status) = failure {
            self.fail_front(requester, status, round);
        }
        self.set_deadline(requester);
        is_left
    }

    /// Reads the payload of a packet from the memory of its work request.
    pub(super) fn gather(
        &self,
        wqe: &SendWqe,
        skip: u64,
        place: &mut [u8],
        cache: &mut MrCache,
    ) -> Result<(), ()> {
        if wqe.is_inline {
            let from = usize::try_from(skip).map_err(|_| ())?;
            place.copy_from_slice(wqe.inline.get(from..from + place.len()).ok_or(())?);
            return Ok(());
        }
        let claim = Claim::local(self.config.pdn, 0);
        let mut mappings = Mappings::new();
        let bytes = skip..skip + place.len() as u64;
        cache.begin(&**self.hca);
        cache
            .map_sges(&self.hca.keys, wqe.sges.as_slice(), claim, bytes, &mut mappings)
            .map_err(|_| ())?;
        copy::read(View { cache, mappings: &mappings }, place).map_err(|_| ())
    }

    /// Writes the payload of a packet of a response to the memory of its work request.
    fn scatter(&self, wqe: &SendWqe, skip: u64, bytes: &[u8], round: &mut Round) -> Result<(), ()> {
        let claim = Claim::local(self.config.pdn, abi::VIRTIO_RDMA_ACCESS_LOCAL_WRITE);
        let mut mappings = Mappings::new();
        let (cache, range) = (&mut round.local, skip..skip + bytes.len() as u64);
        cache.begin(&**self.hca);
        cache
            .map_sges(&self.hca.keys, wqe.sges.as_slice(), claim, range, &mut mappings)
            .map_err(|_| ())?;
        copy::write(View { cache, mappings: &mappings }, bytes).map_err(|_| ())
    }

    /// Sets when the queue is visited again without an answer.
    fn set_deadline(&self, requester: &mut Requester) {
        let Some(window) = &mut requester.window else { return };
        if !matches!(self.qp.state(), QpState::Rts | QpState::Sqd) {
            return;
        }
        if !window.awaits_answer() || window.rnr_until.is_some() {
            // No answer is due; the peer that asked for the pause has answered.
            (window.timeout_at, window.probe_at) = (None, None);
        } else if window.timeout_at.is_none() && window.paced_until.is_none() {
            let now = self.hca.clock().now();
            window.timeout_at = answer_delay(requester.attr.timeout).map(|delay| now + delay);
            window.probe_at = Some(now + window.probe_delay());
        }
        // A consumer that wants to wait for ever gets no packet that it did not ask for.
        let is_early = |at: &Instant| window.timeout_at.is_some_and(|end| *at < end);
        window.probe_at = window.probe_at.filter(is_early);
        window.credit_at = window.lacks_credit().then(|| {
            window.credit_at.unwrap_or_else(|| self.hca.clock().now() + window.credit_delay())
        });
        let answer = window.probe_at.or(window.timeout_at).or(window.credit_at);
        let own = window.rnr_until.max(window.paced_until).or(answer);
        let turn = requester.active.then(|| requester.admission.until()).flatten();
        self.hca.set_timer(self.slot, own.into_iter().chain(turn).min());
    }

    /// Begins to send all packets again if the time for an answer is over. Returns `false` if no retry is left.
    pub(crate) fn expire(&self, requester: &mut Requester, round: &mut Round) -> bool {
        let Some(window) = &mut requester.window else { return true };
        let now = self.hca.clock().now();
        if window.timeout_at.is_none_or(|deadline| deadline > now) {
            if window.probe_at.is_some_and(|at| at <= now) {
                self.hca.stats.add(Counter::Probes, 1);
                window.handle_probe_timeout();
                window.probe_at = Some(now + window.probe_delay());
            }
            return true;
        }
        window.timeout_at = None;
        self.hca.stats.add(Counter::Timeouts, 1);
        if requester.retry_left == 0 {
            self.fail_front(requester, WcStatus::RetryExceeded, round);
            return false;
        }
        requester.retry_left -= 1;
        if self.observed {
            let (psn, left) = (window.snd_una(), Some(requester.retry_left));
            observe::retried(self.hca, self.slot, psn, "no answer", left);
        }
        window.handle_timeout();
        true
    }

    /// Ends the oldest work request with an error, and the QP with it.
    fn fail_front(&self, requester: &mut Requester, status: WcStatus, round: &mut Round) {
        let Some(window) = &mut requester.window else { return };
        (window.rnr_until, window.paced_until) = (None, None);
        (window.timeout_at, window.probe_at) = (None, None);
        self.hca.set_timer(self.slot, None);
        if let Some(wqe) = window.pop() {
            self.finish_on_wire(requester, &wqe, status, &mut round.batch);
        }
    }

    /// Completes work requests that are done.
    fn complete_done(&self, requester: &mut Requester, round: &mut Round) {
        while let Some(wqe) = requester.window.as_mut().and_then(|window| window.poll_completed()) {
            let status = match wqe.request.operation {
                Operation::Read => self.invalidate_now(&wqe),
                _ => WcStatus::Success,
            };
            self.finish_on_wire(requester, &wqe, status, &mut round.batch);
        }
    }

    /// Follows a packet that answers a request.
    fn answer(&self, requester: &mut Requester, packet: &Packet<'_>, round: &mut Round) {
        let Requester { window: Some(window), attr, .. } = requester else { return };
        let psn = packet.headers.bth.psn;
        let mtu = mtu_bytes(attr.path_mtu);
        let mut failure = None;
        match packet.headers.bth.opcode.operation() {
            Op::Acknowledge => {
                let Some(aeth) = packet.headers.extended.aeth else { return };
                match aeth.syndrome {
                    Syndrome::Ack(credits) => {
                        window.handle_credits(psn, credits.messages());
                        window.handle_ack(psn);
                    }
                    Syndrome::RnrNak(timer) => return self.not_ready(requester, psn, timer, round),
                    Syndrome::Nak(code) => {
                        if self.observed {
                            observe::nak_code(self.hca, self.slot, psn, code);
                        }
                        window.handle_ack(psn.minus(1));
                        // A request in front of the refused one may be done, and its answer lost. It has not failed, and
                        // is repeated.
                        let is_oldest = window.is_of_oldest_incomplete(psn);
                        // The peer may answer nothing any more, which ends the oldest one when the time for an answer is
                        // over. Without such a time it ends at once.
                        failure = match nak_status(code) {
                            Some(_) if !is_oldest && attr.timeout != 0 => None,
                            Some(_) if !is_oldest => Some(WcStatus::RetryExceeded),
                            status => status,
                        };
                        window.handle_nak();
                    }
                    Syndrome::Reserved(_) => {}
                }
            }
            Op::SelectiveAcknowledge => {
                let Some(sack) = packet.headers.extended.sack_eth else { return };
                if sack.count() == 0 {
                    return self.offered(requester, packet, round);
                }
                self.hca.stats.add(Counter::SelectiveAcksReceived, 1);
                window.handle_sack(psn, sack);
                window.measure_held(self.hca.clock().now());
            }
            operation => {
                let aeth = packet.headers.extended.aeth.as_ref();
                if let Some(Syndrome::Ack(credits)) = aeth.map(|aeth| aeth.syndrome) {
                    window.handle_credits(psn, credits.messages());
                }
                match window.handle_response(psn, is_end(packet)) {
                    Response::Missing(wqe, index) => {
                        match self.take_response(wqe, index, mtu, operation, packet, round) {
                            Ok(()) => window.accept_response(psn),
                            Err(status) if window.is_of_oldest(psn) => failure = Some(status),
                            // It comes again when its work request is the oldest, which then fails.
                            Err(_) => {}
                        }
                    }
                    Response::Unexpected => {
                        self.hca.stats.add(Counter::UnexpectedAnswers, 1);
                    }
                }
            }
        }
        // Only progress renews the retries: a peer that answers and does nothing must not be asked for ever.
        if window.take_progress() {
            window.handle_progress(self.hca.clock().now());
            requester.retry_left = attr.retry_cnt;
            requester.rnr_left = attr.rnr_retry;
        }
        self.complete_done(requester, round);
        if let Some(status) = failure {
            self.fail_front(requester, status, round);
        }
        self.set_deadline(requester);
    }

    /// Follows a responder that knows selective acknowledgements. If it asks, it is told that this requester does, too.
    fn offered(&self, requester: &mut Requester, packet: &Packet<'_>, round: &mut Round) {
        let Requester { window: Some(window), attr, source, .. } = requester else { return };
        window.handle_sack_offer();
        let aeth = packet.headers.extended.aeth.as_ref();
        let asks = aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Nak(_)));
        if let Some(path) = Path::new(self.hca, self.slot, attr, source).filter(|_| asks) {
            let path = path.observed_if(self.observed, self.slot);
            offer(self.hca, &path, packet.headers.bth.psn, false, round);
        }
        self.set_deadline(requester);
    }

    /// Takes the data of a response; the status of the work request if it is wrong.
    fn take_response(
        &self,
        wqe: &SendWqe,
        index: u32,
        mtu: u64,
        operation: Op,
        packet: &Packet<'_>,
        round: &mut Round,
    ) -> Result<(), WcStatus> {
        let write = |skip, bytes: &[u8], round: &mut Round| {
            self.scatter(wqe, skip, bytes, round).map_err(|()| WcStatus::LocalProtection)
        };
        match (wqe.request.operation, operation) {
            (Operation::Read, Op::ReadResponse) => {
                let skip = u64::from(index) * mtu;
                if packet.payload.len() as u64 != (wqe.request.total - skip).min(mtu) {
                    return Err(WcStatus::LocalLength);
                }
                write(skip, packet.payload, round)
            }
            (Operation::Atomic(_), Op::AtomicAcknowledge) => {
                let Some(result) = packet.headers.extended.atomic_ack_eth else {
                    return Err(WcStatus::General);
                };
                write(0, result.original.as_bytes(), round)
            }
            (Operation::AtomicWrite | Operation::Flush(_), Op::ReadResponse) => Ok(()),
            _ => Err(WcStatus::General),
        }
    }

    /// Waits for the RNR timer, as the peer has no receive for the packet of this PSN.
    fn not_ready(&self, requester: &mut Requester, psn: Psn, timer: RnrTimer, round: &mut Round) {
        let Requester { window: Some(window), attr, .. } = requester else { return };
        window.handle_ack(psn.minus(1));
        if window.take_progress() {
            requester.retry_left = attr.retry_cnt;
            requester.rnr_left = attr.rnr_retry;
        }
        window.handle_rnr_nak();
        let now = self.hca.clock().now();
        let has_paused = window.rnr_until.is_some_and(|until| now < until);
        if !has_paused {
            window.rnr_until = Some(now + timer.delay().max(Duration::from_nanos(1)));
            (window.timeout_at, window.probe_at) = (None, None);
        }
        // The peer has done what is in front, and the response to that is lost: this is one more try for the
        // response, and no try for a receive.
        let is_response_lost = window.snd_una() != psn;
        self.complete_done(requester, round);
        if has_paused {
            return;
        }
        self.hca.stats.add(Counter::RnrWaits, 1);
        let (left, status) = if is_response_lost {
            (&mut requester.retry_left, WcStatus::RetryExceeded)
        } else {
            (&mut requester.rnr_left, WcStatus::RnrRetryExceeded)
        };
        if is_response_lost || requester.attr.rnr_retry != 7 {
            match left.checked_sub(1) {
                Some(less) => {
                    *left = less;
                    self.observe_retry(psn, is_response_lost, Some(less));
                }
                None => self.fail_front(requester, status, round),
            }
        } else {
            self.observe_retry(psn, false, None);
        }
        self.set_deadline(requester);
    }

    /// Tells the observer of a try that an RNR NAK has led to.
    fn observe_retry(&self, psn: Psn, is_response_lost: bool, left: Option<u8>) {
        if self.observed {
            let reason = if is_response_lost { "no answer" } else { "no receive" };
            observe::retried(self.hca, self.slot, psn, reason, left);
        }
    }
}

/// Tells a responder that this requester knows selective acknowledgements, and asks it whether it does.
fn offer(hca: &Hca, path: &Path, psn: Psn, asks: bool, round: &mut Round) {
    congestion::charge(hca);
    let mut headers = path.headers(Opcode::SELECTIVE_OFFER, psn, ExtendedHeaders::default());
    headers.bth.ack_request = asks;
    let _ = round.outbox.send(hca, &headers, path.observed, 0, |_| Ok::<(), ()>(()));
}

/// Asks a responder how many receives it has, by a WRITE of no bytes with the PSN of a packet that it has received: it
/// acknowledges a duplicate with its credits (IBA C9-105).
fn ask_for_credit(hca: &Hca, path: &Path, service: Service, psn: Psn, round: &mut Round) {
    let request = Request { operation: Operation::Write, ..Request::EMPTY };
    let Some((opcode, extended)) = opcode(service, &request, Position::Only, 0) else { return };
    congestion::charge(hca);
    hca.stats.add(Counter::Probes, 1);
    let mut headers = path.headers(opcode, psn, extended);
    headers.bth.ack_request = true;
    let _ = round.outbox.send(hca, &headers, path.observed, 0, |_| Ok::<(), ()>(()));
}

/// Returns whether a packet answers a request under way, or tells of receives behind those that were done.
fn is_expected(window: &SendWindow<SendWqe>, packet: &Packet<'_>) -> bool {
    let Bth { psn, opcode, .. } = packet.headers.bth;
    let tells_credits = || match packet.headers.extended.aeth.map(|aeth| aeth.syndrome) {
        Some(Syndrome::Ack(credits)) => credits.messages().is_some(),
        _ => false,
    };
    let is_update = opcode.operation() == Op::Acknowledge && window.is_credit_update(psn);
    window.is_in_flight(psn) || is_update && tells_credits()
}

/// Returns whether a packet of a response is the last one of what was requested.
fn is_end(packet: &Packet<'_>) -> bool {
    matches!(packet.headers.bth.opcode.position(), Position::Last | Position::Only)
}

/// Returns the status of a work request that was refused; `None` if its packets are
/// sent again.
fn nak_status(code: NakCode) -> Option<WcStatus> {
    match code {
        NakCode::PsnSequenceError => None,
        NakCode::InvalidRequest | NakCode::InvalidRdRequest => Some(WcStatus::RemoteInvalidRequest),
        NakCode::RemoteAccessError => Some(WcStatus::RemoteAccess),
        NakCode::RemoteOperationalError => Some(WcStatus::RemoteOperation),
    }
}

/// Handles a packet that answers a request of a QP of one of these types. Returns the counter of the reason if the
/// packet is dropped.
pub(crate) fn arrive(
    hca: &Arc<Hca>,
    slot: Slot,
    kinds: &[QpType],
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<(), Counter> {
    let qp = hca.qps.get(slot).ok_or(Counter::DropNoQp)?;
    let mut requester = lock(&qp.requester);
    let config = check_type(requester.config, kinds)?;
    if !matches!(qp.state(), QpState::Rts | QpState::Sqd) {
        return Err(Counter::DropState);
    }
    check_peer(&packet.headers, &requester.source, &requester.attr.ah_attr.grh.dgid)?;
    let observed = requester.observed;
    if observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    let Requester { window, attr, source, .. } = &mut requester.requester;
    if !window.as_ref().is_some_and(|window| is_expected(window, packet)) {
        return Err(Counter::UnexpectedAnswers);
    }
    if let Some(window) = window {
        let is_named = window.is_selective;
        congestion::look(hca, slot, attr, source, &mut window.flow, is_named, packet, round);
    }
    Sender { hca, slot, qp, config: &config, observed }.answer(&mut requester, packet, round);
    round.batch.place_completions();
    // More may be sent now.
    hca.make_ready(hca.jobs.send(slot));
    Ok(())
}
