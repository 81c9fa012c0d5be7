// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The packets that messages of the local path would be, for observers that want to see frames.
//!
//! A chunk that was copied is shown as the packets of the requester that carry it or ask for it, and as what the
//! responder would answer. PSNs, addresses and payload are those that the wire would have.

use std::sync::Arc;

use roce::{
    Aeth, AtomicAckEth, Credits, ExtendedHeaders, Headers, Opcode, Operation as Op, Position, Psn,
    Syndrome,
};

use super::path::Path;
use super::requester::{opcode, position};
use super::responder::syndrome;
use super::service;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::memory::copy::{self, Data};
use crate::qp::halves::Requester;
use crate::qp::mtu::{mtu_bytes, packets};
use crate::queue::request::Operation;
use crate::transport::hca::{Hca, Responder};
use crate::transport::message::Nak;
use crate::transport::observe;

/// A chunk of the message under way of a requester, and both ends of its connection.
pub(crate) struct Chunk<'a> {
    /// The requester's end.
    pub from: (&'a Arc<Hca>, Slot),
    /// The responder's end.
    pub to: (&'a Arc<Hca>, Slot),
    /// The type of the requester's QP.
    pub kind: QpType,
    /// The requester, before the chunk counts.
    pub requester: &'a Requester,
    /// The data of the chunk, at the requester.
    pub data: Data<'a>,
    /// Bytes of the chunk.
    pub len: u64,
}

impl Chunk<'_> {
    /// Shows a chunk that the responder has carried out, or the refusal.
    pub fn show(&self, responder: &mut Responder, refused: Option<Nak>) {
        let Some(shown) = self.show_requests() else { return };
        match refused {
            None => self.show_answers(responder, &shown),
            Some(nak) => {
                let nak = syndrome(nak).filter(|_| self.kind.is_reliable());
                if let Some(syndrome) = nak {
                    self.acknowledge(responder, self.psn(shown.first), syndrome);
                }
            }
        }
    }

    /// Returns the PSN of the packet with this number in its message.
    fn psn(&self, index: u32) -> Psn {
        self.requester.sq_psn().plus(index)
    }

    /// Shows the packets of the requester.
    fn show_requests(&self) -> Option<Shown> {
        let Requester { wqe, attr, source, done, .. } = self.requester;
        let request = &wqe.request;
        let mtu = mtu_bytes(attr.path_mtu);
        let count = packets(request.total, attr.path_mtu);
        let first = u32::try_from(done / mtu).ok()?;
        let shown = Shown { first, packets: packets(self.len, attr.path_mtu), count };
        let (hca, slot) = self.from;
        let path = Path::new(hca, slot, attr, source)?.with_mac(self.to.0.identity.mac());
        let service = service(self.kind);
        if !matches!(request.operation, Operation::Send | Operation::Write) {
            if *done == 0 {
                let (opcode, extended) = opcode(service, request, Position::Only, 0)?;
                let mut headers = path.headers(opcode, self.psn(0), extended);
                headers.bth.ack_request = true;
                let is_write = request.operation == Operation::AtomicWrite;
                self.emit(true, &headers, &if is_write { self.bytes() } else { Vec::new() });
            }
            return Some(shown);
        }
        let bytes = self.bytes();
        let mut left = bytes.as_slice();
        for index in first..first + shown.packets {
            let (opcode, extended) =
                opcode(service, request, position(index, count), u64::from(index) * mtu)?;
            let mut headers = path.headers(opcode, self.psn(index), extended);
            let is_last = index + 1 == count;
            headers.bth.solicited_event = request.solicited && is_last;
            headers.bth.ack_request = is_last && self.kind.is_reliable();
            let (payload, rest) = left.split_at(left.len().min(mtu as usize));
            self.emit(true, &headers, payload);
            left = rest;
        }
        Some(shown)
    }

    /// Shows the answers of the responder.
    fn show_answers(&self, responder: &mut Responder, shown: &Shown) {
        let request = &self.requester.wqe.request;
        let is_last = self.requester.done + self.len == request.total;
        if is_last {
            // Nobody else counts the messages of the local path.
            responder.expected.msn = responder.expected.msn.next();
        }
        match request.operation {
            Operation::Send | Operation::Write if is_last && self.kind.is_reliable() => {
                let psn = self.psn(shown.count - 1);
                self.acknowledge(responder, psn, Syndrome::Ack(Credits::UNLIMITED));
            }
            Operation::Read => self.show_data(responder, shown),
            Operation::Atomic(_) => {
                let bytes = self.bytes().try_into().unwrap_or_default();
                let original = u64::from_ne_bytes(bytes);
                let extended = ExtendedHeaders {
                    aeth: Some(ack(responder)),
                    atomic_ack_eth: Some(AtomicAckEth { original }),
                    ..Default::default()
                };
                let opcode = self.answer(Op::AtomicAcknowledge, Position::Only);
                self.respond(responder, opcode, self.psn(0), extended, &[]);
            }
            Operation::AtomicWrite | Operation::Flush(_) => {
                let extended = ExtendedHeaders { aeth: Some(ack(responder)), ..Default::default() };
                let opcode = self.answer(Op::ReadResponse, Position::Only);
                self.respond(responder, opcode, self.psn(0), extended, &[]);
            }
            _ => {}
        }
    }

    /// Shows the data of a READ.
    fn show_data(&self, responder: &Responder, shown: &Shown) {
        let mtu = mtu_bytes(self.requester.attr.path_mtu) as usize;
        let bytes = self.bytes();
        let mut left = bytes.as_slice();
        for index in shown.first..shown.first + shown.packets {
            let position = position(index, shown.count);
            let aeth = (position != Position::Middle).then(|| ack(responder));
            let extended = ExtendedHeaders { aeth, ..Default::default() };
            let (payload, rest) = left.split_at(left.len().min(mtu));
            let opcode = self.answer(Op::ReadResponse, position);
            self.respond(responder, opcode, self.psn(index), extended, payload);
            left = rest;
        }
    }

    /// Shows an acknowledgement.
    fn acknowledge(&self, responder: &Responder, psn: Psn, syndrome: Syndrome) {
        let aeth = Some(Aeth { syndrome, msn: responder.expected.msn });
        let extended = ExtendedHeaders { aeth, ..Default::default() };
        let opcode = self.answer(Op::Acknowledge, Position::Only);
        self.respond(responder, opcode, psn, extended, &[]);
    }

    /// Returns the opcode of an answer.
    fn answer(&self, operation: Op, position: Position) -> Option<Opcode> {
        Opcode::new(service(self.kind), operation, position)
    }

    /// Shows a packet of the responder.
    fn respond(
        &self,
        responder: &Responder,
        opcode: Option<Opcode>,
        psn: Psn,
        extended: ExtendedHeaders,
        payload: &[u8],
    ) {
        let (hca, slot) = self.to;
        let path = Path::new(hca, slot, &responder.attr, &responder.source);
        let (Some(path), Some(opcode)) = (path, opcode) else { return };
        let path = path.with_mac(self.from.0.identity.mac());
        self.emit(false, &path.headers(opcode, psn, extended), payload);
    }

    /// Shows a packet to both ends.
    fn emit(&self, is_request: bool, headers: &Headers, payload: &[u8]) {
        let ends = [(self.from, is_request), (self.to, !is_request)];
        for ((hca, slot), leaves) in ends {
            observe::frame(hca, slot, leaves, headers, payload);
        }
    }

    /// Returns the data of the chunk; nothing if it cannot be read.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        let read = match self.data {
            Data::Mapped(view) => copy::read(view, &mut bytes).is_ok(),
            Data::Inline(data) if data.len() == bytes.len() => {
                bytes.copy_from_slice(data);
                true
            }
            Data::Inline(_) => false,
        };
        if read {
            bytes
        } else {
            Vec::new()
        }
    }
}

/// The packets of a chunk, and their place in the message.
struct Shown {
    /// The number of the first one.
    first: u32,
    /// The number of packets of the chunk.
    packets: u32,
    /// The number of packets of the message.
    count: u32,
}

fn ack(responder: &Responder) -> Aeth {
    Aeth { syndrome: Syndrome::Ack(Credits::UNLIMITED), msn: responder.expected.msn }
}
