// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An adapter with one RC QP.

use std::time::{Duration, Instant};

use roce::{Ecn, ExtendedHeaders, Headers, Opcode, Operation, Psn, Qpn, Service};

use super::requester::{Requester, Work};
use super::responder::Responder;
use crate::tests::cable::headers;

/// The path MTU, in bytes.
pub const MTU: usize = 1024;
/// The key of the adapter's memory.
pub const RKEY: u32 = 0x77;
/// The number of the adapter's QP.
pub const QPN: u32 = 0x12_3456;
/// The number of the adapter's host, as in [`crate::tests::driver::gid`].
pub const HOST: u8 = 2;
/// The time between two CNPs of an adapter (`min_time_between_cnps`).
const CNP_INTERVAL: Duration = Duration::from_micros(4);

/// The habits in which adapters differ from the device.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // each is a habit of its own
pub struct Habits {
    /// The rate of the line, in bytes per second.
    pub line_rate: u64,
    /// The responder tells how many receives there are (IBA 9.7.7.2).
    pub gives_credits: bool,
    /// The requester sends no SEND without a credit.
    pub obeys_credits: bool,
    /// The time after which a requester sends again what was not answered (adaptive retransmission); `None`: the time
    /// that the consumer has set.
    pub repeats_after: Option<Duration>,
    /// The requester completes messages by the number of messages that the responder has done (MSN), and not by PSNs.
    pub retires_by_msn: bool,
    /// The requester cuts WRITEs into messages of one packet, so that switches may send each another way.
    pub writes_only: bool,
    /// All packets have the bit by which switches tell packets of adaptive routing, and all other reserved bits.
    pub sets_reserved_bits: bool,
    /// The responder keeps of a READ only what is behind the beginning of the part that was asked for last, as rxe
    /// does.
    pub forgets_parts: bool,
}

impl Default for Habits {
    /// An adapter with a line of 100 Gbit/s that does nothing special.
    fn default() -> Self {
        Self {
            line_rate: 12_500_000_000,
            gives_credits: false,
            obeys_credits: false,
            repeats_after: None,
            retires_by_msn: false,
            writes_only: false,
            sets_reserved_bits: false,
            forgets_parts: false,
        }
    }
}

/// An adapter.
pub struct Nic {
    habits: Habits,
    /// The number of the QP of the guest.
    peer: u32,
    pub requester: Requester,
    pub responder: Responder,
    cnp_at: Option<Instant>,
    /// The time at which the line is free of answers.
    free_at: Option<Instant>,
    pub cnps_sent: u64,
}

impl Nic {
    /// Makes an adapter whose QP is connected to a QP of the guest. The first packet in both directions has this PSN.
    pub fn new(habits: Habits, peer: u32, rkey: u32, psn: Psn) -> Self {
        let requester = Requester::new(habits, rkey, psn);
        let responder = Responder::new(habits, psn);
        let (cnp_at, free_at) = (None, None);
        Self { habits, peer, requester, responder, cnp_at, free_at, cnps_sent: 0 }
    }

    pub fn post(&mut self, work: Work) -> u64 {
        self.requester.post(work)
    }

    /// Takes a frame that has arrived. Returns the frame of a CNP, if one is due.
    pub fn take(&mut self, frame: &[u8], now: Instant) -> Option<Vec<u8>> {
        let packet = roce::decode(frame).unwrap();
        let Headers { bth, ip, .. } = &packet.headers;
        assert_eq!(bth.dest_qp.get(), QPN);
        match bth.opcode.service() {
            Service::Cnp => self.requester.slow_down(now),
            Service::Rc => {
                let is_answer = matches!(
                    bth.opcode.operation(),
                    Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::ReadResponse
                );
                if is_answer {
                    self.requester.answer(&packet, now);
                } else {
                    self.responder.take(&packet);
                }
            }
            _ => self.responder.unknown += 1,
        }
        let is_due = ip.ecn() == Ecn::Ce && self.cnp_at.is_none_or(|at| at <= now);
        is_due.then(|| {
            self.cnp_at = Some(now + CNP_INTERVAL);
            self.cnps_sent += 1;
            let mut cnp = self.headers(Opcode::CNP, Psn::new(0), ExtendedHeaders::default());
            cnp.bth.becn = true;
            self.frame(&cnp, &[])
        })
    }

    /// Returns the next frame that the adapter sends at the time `now`: an answer, or a packet of a request.
    pub fn poll(&mut self, now: Instant) -> Option<Vec<u8>> {
        if self.free_at.is_some_and(|at| at > now) {
            return None;
        }
        if let Some((opcode, psn, extended, payload)) = self.responder.answers.pop_front() {
            let nanos = (payload.len() as u64 + 82) * 1_000_000_000 / self.habits.line_rate;
            self.free_at = Some(now + Duration::from_nanos(nanos));
            return Some(self.frame(&self.headers(opcode, psn, extended), &payload));
        }
        let (opcode, psn, ack_request, extended, payload) = self.requester.poll(now)?;
        let mut headers = self.headers(opcode, psn, extended);
        headers.bth.ack_request = ack_request;
        Some(self.frame(&headers, &payload))
    }

    /// Returns when the adapter wants to be asked again.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let answer = (!self.responder.answers.is_empty()).then(|| self.free_at.unwrap_or(now));
        let request = self.requester.next(now).map(|at| at.max(self.free_at.unwrap_or(at)));
        [answer, request].into_iter().flatten().min()
    }

    fn headers(&self, opcode: Opcode, psn: Psn, extended: ExtendedHeaders) -> Headers {
        let mut headers = headers([HOST, 1], opcode, self.peer);
        headers.bth.psn = psn;
        headers.extended = extended;
        headers
    }

    fn frame(&self, headers: &Headers, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; payload.len() + 200];
        let len = roce::encode(headers, payload, &mut frame).unwrap();
        frame.truncate(len);
        if self.habits.sets_reserved_bits {
            set_reserved_bits(&mut frame);
        }
        frame
    }
}

/// Returns a frame whose opcode is one that IBA reserves or leaves to manufacturers.
pub fn with_opcode(mut frame: Vec<u8>, opcode: u8) -> Vec<u8> {
    frame[BTH] = opcode;
    seal(&mut frame);
    frame
}

/// Where the BTH of a frame of IPv4 without a tag begins.
const BTH: usize = 14 + 20 + 8;

/// Sets all bits of the BTH that are reserved (IBA 9.2).
fn set_reserved_bits(frame: &mut [u8]) {
    frame[BTH + 4] |= 0x3f;
    frame[BTH + 8] |= 0x7f;
    seal(frame);
}

/// Makes the ICRC right.
fn seal(frame: &mut [u8]) {
    let end = frame.len() - 4;
    let icrc = roce::icrc(&frame[14..end]).unwrap();
    frame[end..].copy_from_slice(&icrc);
}

/// Returns the number of the QP of an adapter.
pub fn qpn() -> u32 {
    Qpn::new(QPN).unwrap().get()
}
