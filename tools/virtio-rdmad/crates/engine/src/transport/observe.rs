// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reports to an observer, one for each point of the way of a message.
//!
//! A half of a QP has a flag that says whether the QP is observed. The flag lies beside what each message needs of the
//! half, and is all that a message reads for this. These functions are called only if the flag is set.

use roce::{Headers, NakCode, Psn};

use super::hca::{Hca, Responder};
use super::message::Nak;
use crate::base::host::Incident;
use crate::base::observe::Observation;
use crate::base::refused::RefusedAccess;
use crate::base::slot::Slot;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::Atomic;
use crate::qp::halves::Requester;
use crate::qp::mtu::mtu_bytes;
use crate::queue::cq::Cqe;
use crate::queue::request::{Operation, Request};

/// More bytes than the headers of a packet have, with its pad and its ICRC.
const MOST_HEADERS: usize = 256;

/// Tells that the device has taken the work request under way.
#[cold]
pub(crate) fn posted(hca: &Hca, slot: Slot, requester: &Requester) {
    let wqe = &requester.wqe;
    let what = Observation::Posted {
        opcode: opcode(&wqe.request),
        wr_id: wqe.wr_id,
        length: wqe.request.total,
    };
    let psn = requester.config.filter(|config| config.wq.kind.is_connected());
    hca.observe(slot, psn.map(|_| requester.sq_psn()), what);
}

/// Tells the end of a requester, or that of its peer, that a chunk of the message under way was copied.
#[cold]
pub(crate) fn copied(hca: &Hca, slot: Slot, requester: &Requester, length: u64) {
    let offset = requester.done;
    let packets = offset / mtu_bytes(requester.attr.path_mtu);
    let psn = requester.sq_psn().plus(u32::try_from(packets).unwrap_or_default());
    hca.observe(slot, Some(psn), Observation::Copied { offset, length });
}

/// Tells one end of a datagram that it was copied.
#[cold]
pub(crate) fn copied_datagram(hca: &Hca, slot: Slot, length: u64) {
    hca.observe(slot, None, Observation::Copied { offset: 0, length });
}

/// Reports the refusal of a request to the observer of the responder.
#[cold]
pub(crate) fn refused(hca: &Hca, slot: Slot, responder: &Responder, nak: Nak) {
    let failure = responder.failure.as_ref().map(|failure| failure.1);
    let refused = match failure {
        Some(Incident::Qp { refused, .. } | Incident::Receive { refused, .. }) => refused,
        _ => None,
    };
    let is_its = matches!(nak, Nak::Failed(_) | Nak::Silence);
    let psn = Some(responder.expected.psn);
    refused_access(hca, slot, psn, reason(nak), refused.filter(|_| is_its));
}

/// Reports the refusal of an access to memory to the observer of the responder.
#[cold]
pub(crate) fn refused_access(
    hca: &Hca,
    slot: Slot,
    psn: Option<Psn>,
    reason: &'static str,
    refused: Option<RefusedAccess>,
) {
    hca.observe(slot, psn, Observation::Refused { reason, refused });
}

/// Reports the refusal by the other end to the observer of the requester.
#[cold]
pub(crate) fn nak(hca: &Hca, slot: Slot, psn: Psn, nak: Nak) {
    hca.observe(slot, Some(psn), Observation::Nak { reason: reason(nak) });
}

/// Reports a NAK that has come to the observer of the requester.
#[cold]
pub(crate) fn nak_code(hca: &Hca, slot: Slot, psn: Psn, code: NakCode) {
    let reason = match code {
        NakCode::PsnSequenceError => "PSN_SEQUENCE_ERROR",
        NakCode::InvalidRequest | NakCode::InvalidRdRequest => "INVALID_REQUEST",
        NakCode::RemoteAccessError => "REMOTE_ACCESS_ERROR",
        NakCode::RemoteOperationalError => "REMOTE_OPERATIONAL_ERROR",
    };
    hca.observe(slot, Some(psn), Observation::Nak { reason });
}

/// Tells that a CQE is written.
#[cold]
pub(crate) fn completed(hca: &Hca, slot: Slot, cqe: &Cqe, is_receive: bool) {
    let Cqe { wr_id, status, byte_len: length, .. } = *cqe;
    let what = Observation::Completed { wr_id, is_receive, status: status.into(), length };
    hca.observe(slot, None, what);
}

/// Tells that the requester tries again from a PSN on.
#[cold]
pub(crate) fn retried(hca: &Hca, slot: Slot, psn: Psn, reason: &'static str, left: Option<u8>) {
    hca.observe(slot, Some(psn), Observation::Retried { reason, left });
}

/// Tells of a packet that leaves or has come, and shows its frame.
#[cold]
pub(crate) fn packet(hca: &Hca, slot: Slot, leaves: bool, headers: &Headers, payload: &[u8]) {
    let length = payload.len();
    let bth = &headers.bth;
    let opcode = match headers.extended.aeth {
        Some(aeth) => format!("{:?} {:?}", bth.opcode.operation(), aeth.syndrome),
        None => format!("{:?} {:?}", bth.opcode.operation(), bth.opcode.position()),
    };
    let what = Observation::Packet { leaves, opcode, length: length as u64 };
    hca.observe(slot, Some(bth.psn), what);
    frame(hca, slot, leaves, headers, payload);
}

/// Shows a frame that leaves or has come, or would, if somebody wants to see it.
#[cold]
pub(crate) fn frame(hca: &Hca, slot: Slot, leaves: bool, headers: &Headers, payload: &[u8]) {
    if !hca.wants_frames(slot) {
        return;
    }
    let mut frame = vec![0; payload.len() + MOST_HEADERS];
    if let Ok(len) = roce::encode(headers, payload, &mut frame) {
        frame.truncate(len);
        hca.observe(slot, Some(headers.bth.psn), Observation::Frame { leaves, frame });
    }
}

/// Returns the name of the operation of a work request.
fn opcode(request: &Request) -> &'static str {
    match request.operation {
        Operation::Send if request.invalidate.is_some() => "SEND_WITH_INV",
        Operation::Send if request.immediate.is_some() => "SEND_WITH_IMM",
        Operation::Send => "SEND",
        Operation::Write if request.immediate.is_some() => "RDMA_WRITE_WITH_IMM",
        Operation::Write => "RDMA_WRITE",
        Operation::Read => "RDMA_READ",
        Operation::Atomic(Atomic::CompareSwap { .. }) => "ATOMIC_CMP_AND_SWP",
        Operation::Atomic(Atomic::FetchAdd(_)) => "ATOMIC_FETCH_AND_ADD",
        Operation::AtomicWrite => "ATOMIC_WRITE",
        Operation::Flush(_) => "FLUSH",
        Operation::RegMr(_) => "REG_MR",
        Operation::LocalInv => "LOCAL_INV",
        Operation::BindMw(_) => "BIND_MW",
    }
}

fn reason(nak: Nak) -> &'static str {
    match nak {
        Nak::NotReady(_) => "RNR",
        Nak::Restart => "RESTART",
        Nak::Again => "KEY_IN_USE",
        Nak::Silence => "NO_ANSWER",
        Nak::Unreachable => "UNREACHABLE",
        Nak::Failed(WcStatus::RemoteAccess) => "REMOTE_ACCESS_ERROR",
        Nak::Failed(WcStatus::RemoteInvalidRequest) => "INVALID_REQUEST",
        Nak::Failed(WcStatus::RemoteOperation) => "REMOTE_OPERATIONAL_ERROR",
        Nak::Failed(_) => "LOCAL_ERROR",
    }
}
