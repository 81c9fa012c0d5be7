// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The responder on the wire: carries out the packets of requests, and answers them (IBA 9.7.4, 9.7.5).

use std::sync::Arc;

use abi::VIRTIO_RDMA_ACCESS_REMOTE_READ;
use reliability::{Expected, Held, Hold, Verdict};
use roce::{
    Aeth, AtomicAckEth, Bth, Credits, ExtendedHeaders, NakCode, Opcode, Operation as Op, Packet,
    Position, Psn, RnrTimer, SackEth, Service, Syndrome,
};

use super::check::check_responder;
use super::path::{Path, OVERHEAD};
use super::requester::position;
use super::{congestion, service};
use crate::base::counters::Counter;
use crate::base::limits::MAX_MSG_SIZE;
use crate::base::qp_type::QpType;
use crate::base::refused::{KeyError, RefusedAccess};
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{self, Atomic, Data, View};
use crate::memory::flush::Flush;
use crate::memory::mr::Claim;
use crate::qp::answered::ReadReply;
use crate::qp::inbound::{Assembly, Inbound, Reply, Waiting};
use crate::qp::mtu::{mtu_bytes, packets};
use crate::queue::request::{Operation, Request};
use crate::transport::hca::{Hca, Responder, ResponderHalf};
use crate::transport::message::{Message, Nak};
use crate::transport::observe;
use crate::transport::receive::Receiver;
use crate::transport::responder::Arrival;
use crate::transport::round::Round;
use crate::transport::xrc;

/// An acknowledgement, as a responder without credits gives it.
const ACK: Syndrome = Syndrome::Ack(Credits::UNLIMITED);

/// The result of a request that was expected.
pub(super) struct Done {
    /// PSNs that it takes.
    pub packets: u32,
    /// Whether it ends its message.
    pub ends: bool,
    /// The reply, besides an acknowledgement that was asked for.
    reply: Option<Reply>,
}

/// Handles a packet of a request for a QP of this type. Returns the counter of the reason if the packet is dropped.
pub(crate) fn arrive(
    hca: &Arc<Hca>,
    slot: Slot,
    kind: QpType,
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<(), Counter> {
    let qp = hca.qps.get(slot).ok_or(Counter::DropNoQp)?;
    let mut half = lock(&qp.responder);
    check_responder(&half, qp.state(), kind, &packet.headers)?;
    if half.observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    if half.inbound.as_ref().is_some_and(|inbound| inbound.is_full()) {
        return Err(Counter::DropAnswersFull);
    }
    let ResponderHalf { inbound, responder } = &mut *half;
    let inbound = inbound.get_or_insert_default();
    congestion::look(
        hca,
        slot,
        &responder.attr,
        &responder.source,
        &mut inbound.flow,
        inbound.is_selective,
        packet,
        round,
    );
    follow(hca, slot, responder, inbound, packet, round);
    // The replies leave after the visit of the inbox, so that one acknowledgement is of all packets that came together.
    // A QP that has failed is not visited for that.
    let is_left = !qp.state().receives() && pump(hca, slot, &mut half, round);
    let expected = half.expected.psn;
    let has_more = half.inbound.as_ref().is_some_and(|inbound| {
        let has_held = inbound.held.has(expected);
        !inbound.replies.is_empty() || has_held || inbound.naks.is_late()
    });
    round.batch.place_completions();
    if is_left || has_more {
        hca.make_ready(hca.jobs.receive(slot));
    }
    Ok(())
}

/// Handles an offer of a requester, which knows selective acknowledgements. The offer answers one of this responder, or
/// asks for one. A requester that asks gets an answer and is not believed, because it need not know what was offered.
/// Returns the counter of the reason if the packet is dropped.
pub(crate) fn offered(hca: &Arc<Hca>, slot: Slot, packet: &Packet<'_>) -> Result<(), Counter> {
    let qp = hca.qps.get(slot).ok_or(Counter::DropNoQp)?;
    let mut half = lock(&qp.responder);
    let kind = check_kind(&half)?;
    check_responder(&half, qp.state(), kind, &packet.headers)?;
    if half.observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    let Bth { psn, ack_request, .. } = packet.headers.bth;
    let expected = half.expected.psn;
    let inbound = half.inbound.get_or_insert_default();
    if !ack_request {
        return if inbound.offered(psn) { Ok(()) } else { Err(Counter::UnexpectedAnswers) };
    }
    if psn.is_after(expected) || !inbound.may_repeat(expected, psn) {
        return Err(Counter::DropPsn);
    }
    if inbound.is_full() {
        return Err(Counter::DropAnswersFull);
    }
    inbound.answer_offer(psn);
    hca.make_ready(hca.jobs.receive(slot));
    Ok(())
}

/// Returns the type of a QP whose peer may know selective acknowledgements.
fn check_kind(responder: &Responder) -> Result<QpType, Counter> {
    let kind = responder.config.ok_or(Counter::DropNoQp)?.wq.kind;
    let is_such = matches!(kind, QpType::Rc | QpType::XrcTgt);
    is_such.then_some(kind).ok_or(Counter::DropService)
}

/// Judges the PSN of a request, carries the request out if it is expected, and notes the replies.
fn follow(
    hca: &Arc<Hca>,
    slot: Slot,
    responder: &mut Responder,
    inbound: &mut Inbound,
    packet: &Packet<'_>,
    round: &mut Round,
) {
    let bth = &packet.headers.bth;
    let acknowledge = |psn, syndrome| Reply::Acknowledge { psn, syndrome };
    let expected = responder.expected.psn;
    match responder.expected.judge(bth.psn) {
        Verdict::Ahead { nak } => {
            hca.stats.add(Counter::OutOfSequence, 1);
            // One that was told to send everything again does that.
            if nak && inbound.is_selective && hold(hca, inbound, expected, packet) {
                inbound.reply(Reply::Selective { psn: expected });
            } else if nak && inbound.naks.ask(hca.clock().now(), is_far(expected, bth.psn)) {
                tell_missing(&mut responder.expected, inbound);
            }
        }
        Verdict::Duplicate => {
            let counter = repeat(responder, inbound, packet);
            hca.stats.add(counter.err().unwrap_or(Counter::DuplicateRequests), 1);
        }
        Verdict::Beyond => {
            hca.stats.add(Counter::DropPsn, 1);
        }
        Verdict::Next => match execute(hca, slot, responder, inbound, packet, round) {
            Ok(done) => {
                responder.partner.uses_wire();
                responder.expected.done(done.packets, done.ends);
                inbound.done(responder.expected.psn);
                if let Some(reply) = done.reply {
                    inbound.reply(reply);
                } else if bth.ack_request {
                    inbound.reply(acknowledge(bth.psn, ACK));
                }
            }
            Err(nak) => {
                if responder.observed {
                    observe::refused(hca, slot, responder, nak);
                }
                if matches!(nak, Nak::NotReady(_)) {
                    hca.stats.add(Counter::RnrNaks, 1);
                }
                responder.expected.tell();
                // The requester sends all of them again.
                inbound.held.clear();
                if let Some(syndrome) = syndrome(nak) {
                    inbound.reply(acknowledge(bth.psn, syndrome));
                }
            }
        },
    }
}

/// Returns whether a PSN is so far ahead of the expected one that most of those in front of it would be lost.
fn is_far(expected: Psn, psn: Psn) -> bool {
    psn.distance_from(expected).unsigned_abs() >= SackEth::PACKETS
}

/// Tells the requester to send everything again from the expected packet on.
fn tell_missing(expected: &mut Expected, inbound: &mut Inbound) {
    expected.tell();
    let syndrome = Syndrome::Nak(NakCode::PsnSequenceError);
    inbound.reply(Reply::Acknowledge { psn: expected.psn, syndrome });
    inbound.offer(expected.psn);
}

/// Holds a packet that came before the expected one. Returns whether it is held.
fn hold(hca: &Hca, inbound: &mut Inbound, expected: Psn, packet: &Packet<'_>) -> bool {
    match inbound.held.hold(expected, &packet.headers, packet.payload, &hca.hold_quota) {
        Hold::Held => {
            hca.stats.add(Counter::Held, 1);
            true
        }
        Hold::Duplicate => true,
        Hold::NoRoom => {
            hca.stats.add(Counter::DropHoldFull, 1);
            false
        }
    }
}

/// Carries out requests whose packets were held and are expected now, until the budget is exhausted. Returns whether
/// some of them are left.
fn follow_held(
    hca: &Arc<Hca>,
    slot: Slot,
    responder: &mut Responder,
    inbound: &mut Inbound,
    round: &mut Round,
) -> bool {
    if inbound.held.is_empty() {
        return false;
    }
    let mut is_left = false;
    let receives = || hca.qps.get(slot).is_some_and(|qp| qp.state().receives());
    while receives() && inbound.held.has(responder.expected.psn) {
        is_left = round.budget.is_over() || inbound.is_full();
        if is_left {
            break;
        }
        let Some(held) = inbound.held.take(responder.expected.psn) else { break };
        round.budget.spend(held.payload.len() as u64);
        let packet = Packet::kept(held.headers, &held.payload);
        follow(hca, slot, responder, inbound, &packet, round);
        let psn = responder.expected.psn;
        if !inbound.held.has(psn) && !responder.expected.is_told() {
            inbound.held.forget_before(psn);
            inbound.reply(if inbound.held.is_empty() {
                Reply::Acknowledge { psn: psn.minus(1), syndrome: ACK }
            } else {
                Reply::Selective { psn }
            });
        }
    }
    is_left
}

/// Returns the syndrome for a requester that is refused; `None` if it gets no answer.
pub(super) fn syndrome(nak: Nak) -> Option<Syndrome> {
    Some(match nak {
        Nak::NotReady(timer) => Syndrome::RnrNak(RnrTimer::new(timer & 31)?),
        Nak::Silence | Nak::Unreachable | Nak::Again => return None,
        Nak::Failed(WcStatus::RemoteAccess) => Syndrome::Nak(NakCode::RemoteAccessError),
        Nak::Failed(WcStatus::RemoteInvalidRequest) | Nak::Restart => {
            Syndrome::Nak(NakCode::InvalidRequest)
        }
        Nak::Failed(_) => Syndrome::Nak(NakCode::RemoteOperationalError),
    })
}

/// Answers a request that came before (IBA 9.7.5.1.5). Its effect does not happen once more. Returns the counter of the
/// reason if the packet is dropped because it repeats nothing: anybody can send such a packet.
fn repeat(
    responder: &Responder,
    inbound: &mut Inbound,
    packet: &Packet<'_>,
) -> Result<(), Counter> {
    let Bth { opcode, psn, .. } = packet.headers.bth;
    match opcode.operation() {
        Op::ReadRequest => {
            let may_read = responder.attr.qp_access_flags & VIRTIO_RDMA_ACCESS_REMOTE_READ != 0;
            let reth = packet.headers.extended.reth.as_ref().filter(|_| may_read);
            let path_mtu = responder.attr.path_mtu;
            let part = reth.and_then(|reth| {
                let count = packets(reth.dma_len.into(), path_mtu);
                inbound.answered.read(psn, reth, count, mtu_bytes(path_mtu))
            });
            inbound.read_again(part.ok_or(Counter::DropUnknownDuplicate)?);
        }
        Op::CompareSwap | Op::FetchAdd => {
            let original = inbound.answered.atomic(psn).ok_or(Counter::DropUnknownDuplicate)?;
            inbound.repeat(psn, Reply::Atomic { psn, original });
        }
        // What follows has the PSN of no READ and no atomic, whose requester would take the answer for theirs.
        _ if inbound.answered.has(psn) => return Err(Counter::DropUnknownDuplicate),
        _ if !inbound.may_repeat(responder.expected.psn, psn) => return Err(Counter::DropPsn),
        Op::AtomicWrite | Op::Flush => {
            inbound.repeat(psn, Reply::Read(ReadReply::empty(psn)));
        }
        _ => {
            // All requests that have come are acknowledged (IBA C9-105), but not what is behind a READ or an atomic: in
            // place of its answer the acknowledgement says that the answer was lost, and rxe takes it for the answer.
            let end = inbound.answered.first_behind(psn).unwrap_or(responder.expected.psn);
            let psn = end.minus(1);
            if !inbound.acknowledges(psn) {
                inbound.reply(Reply::Acknowledge { psn, syndrome: ACK });
            }
        }
    }
    Ok(())
}

/// Carries out a request that is expected.
pub(super) fn execute(
    hca: &Arc<Hca>,
    slot: Slot,
    responder: &mut Responder,
    inbound: &mut Inbound,
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<Done, Nak> {
    let path_mtu = responder.attr.path_mtu;
    let most_answers = responder.attr.max_dest_rd_atomic;
    let Round { remote: cache, batch, .. } = round;
    let to = Receiver { hca, slot, responder, batch };
    let psn = packet.headers.bth.psn;
    let assembled = assemble(inbound.assembly, packet, mtu_bytes(path_mtu));
    let (request, done) = match &assembled {
        Some(Assembly { request, done }) => (*request, *done),
        None => (Request::EMPTY, 0),
    };
    let len = packet.payload.len() as u64;
    let message = Message {
        request: &request,
        done,
        len,
        psns: 0,
        local: Data::Inline(packet.payload),
        path_mtu,
        asks_again: true,
    };
    let mut arrival = Arrival { to, message: &message, cache };
    if assembled.is_none() {
        return Err(arrival.request_failed());
    }
    let is_answered = matches!(request.operation, Operation::Read | Operation::Atomic(_));
    if is_answered && inbound.answers() >= usize::from(most_answers) {
        return Err(arrival.request_failed());
    }
    match request.operation {
        Operation::Read => {
            let pdn = by_service(&mut arrival, |arrival| {
                arrival.begin_read()?;
                arrival.to.responder.config.map(|config| config.pdn).ok_or(Nak::Unreachable)
            })?;
            let Request { remote_addr, rkey, total, .. } = request;
            let packets = packets(total, path_mtu);
            let end = psn.plus(packets);
            let reply = ReadReply { psn, pdn, remote_addr, rkey, total, sent: 0, end };
            inbound.answered.keep_read(reply, most_answers);
            Ok(Done { packets, ends: true, reply: Some(Reply::Read(reply)) })
        }
        Operation::Atomic(atomic) => {
            let original = by_service(&mut arrival, |arrival| arrival.do_atomic(atomic))?;
            inbound.answered.keep_atomic(psn, original, most_answers);
            Ok(Done { packets: 1, ends: true, reply: Some(Reply::Atomic { psn, original }) })
        }
        Operation::AtomicWrite | Operation::Flush(_) => {
            by_service(&mut arrival, |arrival| arrival.respond(None))?;
            let reply = Reply::Read(ReadReply::empty(psn));
            Ok(Done { packets: 1, ends: true, reply: Some(reply) })
        }
        _ => {
            by_service(&mut arrival, |arrival| arrival.respond(None))?;
            let ends = message.is_last();
            inbound.assembly = (!ends).then_some(Assembly { request, done: done + len });
            Ok(Done { packets: 1, ends, reply: None })
        }
    }
}

/// Calls `act` with a chunk. An XRC target has the PD, the CQ and the work requests of the chunk's SRQ meanwhile.
fn by_service<'a, 'm, T>(
    arrival: &mut Arrival<'a, 'm>,
    act: impl FnOnce(&mut Arrival<'a, 'm>) -> Result<T, Nak>,
) -> Result<T, Nak> {
    match arrival.to.responder.config {
        Some(config) if config.wq.kind == QpType::XrcTgt => xrc::with_srq(arrival, act),
        _ => act(arrival),
    }
}

/// Returns the number of the SRQ that a packet is for; 0 if its service names none.
fn srqn(packet: &Packet<'_>) -> u32 {
    packet.headers.extended.xrceth.map_or(0, |xrceth| xrceth.srq.get())
}

/// Returns the message that a packet belongs to, and how much of it came before; `None` if the packet does
/// not belong there, or has a wrong length (IBA 9.7.4.1.2, 9.7.4.1.6).
fn assemble(before: Option<Assembly>, packet: &Packet<'_>, mtu: u64) -> Option<Assembly> {
    let headers = &packet.headers;
    let (opcode, extended) = (headers.bth.opcode, &headers.extended);
    let len = packet.payload.len() as u64;
    let is_first = matches!(opcode.position(), Position::First | Position::Only);
    let is_last = matches!(opcode.position(), Position::Last | Position::Only);
    if before.is_some() == is_first || len > mtu || !is_last && len != mtu {
        return None;
    }
    let operation = operation(opcode.operation(), extended)?;
    let srqn = srqn(packet);
    let Assembly { mut request, done } = match before {
        None => Assembly { request: Request { operation, srqn, ..Request::EMPTY }, done: 0 },
        Some(before) if before.request.operation == operation && before.request.srqn == srqn => {
            before
        }
        Some(_) => return None,
    };
    if let Some(reth) = &extended.reth {
        // The range of a FLUSH is no message.
        if reth.dma_len > MAX_MSG_SIZE && !matches!(operation, Operation::Flush(_)) {
            return None;
        }
        request.remote_addr = reth.va;
        request.rkey = reth.rkey;
        request.total = reth.dma_len.into();
    }
    if let Some(atomic) = &extended.atomic_eth {
        (request.remote_addr, request.rkey, request.total) = (atomic.va, atomic.rkey, 8);
    }
    request.immediate = extended.imm_dt.map(|immediate| u32::from_ne_bytes(immediate.0));
    request.invalidate = extended.ieth.map(|ieth| ieth.rkey);
    request.solicited = headers.bth.solicited_event;
    match operation {
        // Its length is known with its last packet, and that is not empty.
        Operation::Send => request.total = done + len + u64::from(!is_last),
        Operation::Write if is_last && done + len != request.total => return None,
        Operation::Write if !is_last && done + len >= request.total => return None,
        Operation::AtomicWrite if len != 8 || request.total != 8 => return None,
        Operation::Flush(_) => request.total = 0,
        _ => {}
    }
    (is_first || !is_last || len != 0).then_some(Assembly { request, done })
}

/// Returns the operation of a request.
fn operation(operation: Op, extended: &ExtendedHeaders) -> Option<Operation> {
    Some(match operation {
        Op::Send | Op::SendWithImmediate | Op::SendWithInvalidate => Operation::Send,
        Op::Write | Op::WriteWithImmediate => Operation::Write,
        Op::ReadRequest => Operation::Read,
        Op::CompareSwap => {
            let atomic = extended.atomic_eth?;
            Operation::Atomic(Atomic::CompareSwap {
                compare: atomic.compare,
                swap: atomic.swap_add,
            })
        }
        Op::FetchAdd => Operation::Atomic(Atomic::FetchAdd(extended.atomic_eth?.swap_add)),
        Op::AtomicWrite => Operation::AtomicWrite,
        Op::Flush => {
            let (feth, reth) = (extended.feth?, extended.reth?);
            let is_range = feth.selectivity() == roce::Feth::RANGE;
            Operation::Flush(Flush::from_wire(
                feth.placement(),
                is_range.then(|| reth.dma_len.into()),
            )?)
        }
        Op::ReadResponse
        | Op::Acknowledge
        | Op::AtomicAcknowledge
        | Op::SelectiveAcknowledge
        | Op::SelectiveOffer
        | Op::Cnp => return None,
    })
}

/// Sends the replies that are due, until the budget is exhausted. Returns whether some are left.
pub(crate) fn pump(
    hca: &Arc<Hca>,
    slot: Slot,
    half: &mut ResponderHalf,
    round: &mut Round,
) -> bool {
    let ResponderHalf { inbound: Some(inbound), responder } = half else { return false };
    let Some(config) = responder.config else { return false };
    let holds = follow_held(hca, slot, responder, inbound, round);
    let now = hca.clock().now();
    let held_until = inbound.held.until(responder.expected.psn, now);
    let is_over = held_until.is_some_and(|until| until <= now);
    if is_over {
        hca.stats.add(Counter::DropHoldLate, inbound.held.len() as u64);
        inbound.held.clear();
    }
    // A requester that believes that what was dropped is held sends it again when it is told so.
    if inbound.naks.is_due(now) || is_over {
        tell_missing(&mut responder.expected, inbound);
    }
    let service = service(config.wq.kind);
    let path = Path::new(hca, slot, &responder.attr, &responder.source);
    let path = path.map(|path| path.observed_if(responder.observed, slot));
    let mtu = mtu_bytes(responder.attr.path_mtu);
    let held_until = held_until.filter(|_| !is_over);
    let mut next = [inbound.naks.next(), held_until].into_iter().flatten().min();
    let is_left = path.is_some_and(|path| loop {
        let Some(Waiting { reply, is_repeated }) = inbound.replies.front_mut() else {
            break false;
        };
        if round.budget.is_over() {
            break true;
        }
        match reply {
            Reply::Read(read) => {
                let bytes = read.next_len(mtu) + OVERHEAD;
                if let Some(until) = inbound.flow.wait(now, bytes, &hca.rate_limit) {
                    next = Some(next.map_or(until, |next| next.min(until)));
                    break false;
                }
                inbound.flow.sent(now, bytes, *is_repeated);
                if !inbound.flow.forms_trains() {
                    round.outbox.flush(hca);
                }
                match send_data(hca, slot, &path, read, responder, round) {
                    Ok(true) => {}
                    Ok(false) => continue,
                    Err(_) if *is_repeated => {
                        hca.stats.add(Counter::DropRepeatedAnswer, 1);
                    }
                    Err(why) => {
                        let ReadReply { rkey: key, remote_addr: address, total: length, .. } =
                            *read;
                        let refused = RefusedAccess { key, address, length, why };
                        fail(hca, slot, responder, refused, round);
                        let syndrome = Syndrome::Nak(NakCode::RemoteAccessError);
                        let psn = read.next();
                        *reply = Reply::Acknowledge { psn, syndrome };
                        continue;
                    }
                }
            }
            reply => {
                let reply = *reply;
                answer(hca, &path, service, reply, &responder.expected, &inbound.held, round);
            }
        }
        inbound.replies.pop_front();
    });
    if next.is_some() {
        lock(&hca.timers).set(hca.jobs.receive(slot), next);
    }
    is_left || holds
}

/// Fails a QP whose peer asks to read memory that it may not read.
fn fail(
    hca: &Arc<Hca>,
    slot: Slot,
    responder: &mut Responder,
    refused: RefusedAccess,
    round: &mut Round,
) {
    let Round { batch, .. } = round;
    let mut receiver = Receiver { hca, slot, responder, batch };
    receiver.fail(abi::VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, Some(refused));
    if receiver.responder.observed {
        observe::refused(hca, slot, receiver.responder, Nak::Failed(WcStatus::RemoteAccess));
    }
}

/// Sends an answer without payload.
fn answer(
    hca: &Hca,
    path: &Path,
    service: Service,
    reply: Reply,
    expected: &Expected,
    held: &Held,
    round: &mut Round,
) {
    let with = |syndrome| {
        let aeth = Some(Aeth { syndrome, msn: expected.msn });
        ExtendedHeaders { aeth, ..Default::default() }
    };
    let acknowledge = Opcode::new(service, Op::Acknowledge, Position::Only);
    let selective = Some(Opcode::SELECTIVE_ACKNOWLEDGE);
    let (opcode, psn, extended) = match reply {
        Reply::Acknowledge { psn, syndrome } => (acknowledge, psn, with(syndrome)),
        // The missing packet may have come since.
        Reply::Selective { psn } if psn == expected.psn && held.sack(psn).count() != 0 => {
            hca.stats.add(Counter::SelectiveAcksSent, 1);
            let sack_eth = Some(held.sack(psn));
            (selective, psn, ExtendedHeaders { sack_eth, ..with(ACK) })
        }
        Reply::Selective { psn } => (acknowledge, psn.minus(1), with(ACK)),
        Reply::Offer { psn, asks } => {
            let syndrome = if asks { Syndrome::Nak(NakCode::PsnSequenceError) } else { ACK };
            let sack_eth = Some(SackEth::default());
            (selective, psn, ExtendedHeaders { sack_eth, ..with(syndrome) })
        }
        Reply::Atomic { psn, original } => {
            let atomic_ack_eth = Some(AtomicAckEth { original });
            let opcode = Opcode::new(service, Op::AtomicAcknowledge, Position::Only);
            (opcode, psn, ExtendedHeaders { atomic_ack_eth, ..with(ACK) })
        }
        Reply::Read(_) => return,
    };
    let Some(opcode) = opcode else { return };
    congestion::charge(hca);
    let headers = path.headers(opcode, psn, extended);
    let _ = round.outbox.send(hca, &headers, path.observed, 0, |_| Ok::<(), ()>(()));
}

/// Sends a packet of the data of a READ; whether it was the last. Fails if the memory is not there any more.
fn send_data(
    hca: &Arc<Hca>,
    slot: Slot,
    path: &Path,
    read: &mut ReadReply,
    responder: &Responder,
    round: &mut Round,
) -> Result<bool, KeyError> {
    let mtu = mtu_bytes(responder.attr.path_mtu);
    let count = packets(read.total, responder.attr.path_mtu);
    let position = position(read.sent, count);
    let skip = u64::from(read.sent) * mtu;
    let len = read.next_len(mtu);
    let config = responder.config.ok_or(KeyError::Pd)?;
    let opcode = Opcode::new(service(config.wq.kind), Op::ReadResponse, position);
    let opcode = opcode.ok_or(KeyError::Memory)?;
    let aeth = Aeth { syndrome: ACK, msn: responder.expected.msn };
    let aeth = (position != Position::Middle).then_some(aeth);
    let extended = ExtendedHeaders { aeth, ..Default::default() };
    let headers = path.headers(opcode, read.next(), extended);
    round.budget.spend(len);
    let Round { outbox, remote: cache, .. } = round;
    cache.begin(&**hca);
    let sent = outbox.send(hca, &headers, path.observed, len as usize, |place| {
        if place.is_empty() {
            return Ok(());
        }
        let access = VIRTIO_RDMA_ACCESS_REMOTE_READ;
        let claim = Claim { pdn: read.pdn, access, qp: Some(slot) };
        let addr = read.remote_addr.wrapping_add(skip);
        let mapping = cache.map(&hca.keys, read.rkey, claim, addr, len)?;
        copy::read(View { cache, mappings: std::slice::from_ref(&mapping) }, place)
            .map_err(|_| KeyError::Memory)
    });
    sent?;
    read.sent += 1;
    Ok(read.sent == count)
}
