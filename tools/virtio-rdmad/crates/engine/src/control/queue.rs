// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue: takes requests, has them prepared and carried out, and replies.

use std::sync::Arc;

use ring::Chain;

use super::call::Call;
use super::objects::Objects;
use super::prepare::{Prepared, MOVED};
use super::status::Status;
use super::{cq, qp, srq, table};
use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::base::sync::read;
use crate::base::visit::Visit;
use crate::memory::management::release_windows;
use crate::queue::virtqueue::{Virtqueue, VirtqueueImage};
use crate::transport::hca::Hca;
use crate::transport::srq::abandon;

/// Bytes of a request that are looked at; no command has more.
const MAX_REQUEST: usize = 512;
/// Bytes of the longest reply.
const MAX_REPLY: usize = 256;

/// A request that was taken from the control queue.
struct Request {
    chain: Chain,
    bytes: [u8; MAX_REQUEST],
    length: usize,
    /// The preparation of the command, which may take more than one visit.
    prepared: Prepared,
}

/// The reply to a request that was carried out. It waits for peers that are in the middle of a round with a region that
/// the command has ended.
struct Reply {
    chain: Chain,
    bytes: [u8; MAX_REPLY],
    length: usize,
}

/// The control queue, and the objects that its commands change.
pub(crate) struct Control {
    /// The virtqueue.
    pub queue: Virtqueue,
    /// The request with which the next visit goes on.
    request: Option<Request>,
    /// The reply that is sent before another request is taken.
    reply: Option<Reply>,
    /// The objects that only commands change.
    pub objects: Objects,
}

impl Control {
    /// Returns the control queue of a guest that made no object.
    pub fn new(hca: &Hca) -> Self {
        let objects = Objects::new(&hca.limits, hca.fabric.random());
        Self { queue: Virtqueue::default(), request: None, reply: None, objects }
    }

    /// Visits the control queue.
    pub fn visit(&mut self, hca: &Arc<Hca>, budget: &mut Budget) -> Visit {
        let mut found = false;
        loop {
            if budget.is_over() || !self.objects.free_dead(budget) {
                return Visit::More;
            }
            if self.request.is_none() && self.reply.is_none() {
                match self.queue.pop() {
                    Ok(Some(chain)) => {
                        budget.spend(0);
                        self.request = Some(self.read_request(hca, chain));
                    }
                    Ok(None) => return if found { Visit::Done } else { Visit::Empty },
                    Err(error) => {
                        hca.stats.guest_error(Counter::BadControlChain, error);
                        hca.set_needs_reset();
                        return Visit::Parked;
                    }
                }
            }
            found = true;
            if !self.go_on(hca, budget) {
                return Visit::More;
            }
        }
    }

    /// Returns the image of the queue, if there is one. A request that is under way is in the queue again: whatever was
    /// prepared for it can be prepared once more, and nothing of it was carried out.
    pub fn save_queue(&self) -> Option<VirtqueueImage> {
        let image = self.queue.save()?;
        Some(if self.request.is_some() { image.with_last() } else { image })
    }

    /// Goes on with the request that is under way, if there is one, until the budget is exhausted;
    /// whether it has come to its end.
    pub fn go_on(&mut self, hca: &Arc<Hca>, budget: &mut Budget) -> bool {
        if let Some(mut request) = self.request.take() {
            if !prepare(hca, &self.objects, &mut request.prepared, budget) {
                self.request = Some(request);
                return false;
            }
            self.answer(hca, request, budget);
        }
        if !self.objects.is_let_go(budget) {
            return false;
        }
        self.reply();
        true
    }

    /// Sends the reply to a request that was carried out, if there is one.
    pub fn reply(&mut self) {
        let Some(Reply { chain, bytes, length }) = self.reply.take() else { return };
        let written = chain.write(&bytes[..length]).unwrap_or(0);
        self.queue.give_back(chain.head, written);
        self.queue.signal_if_needed();
    }

    /// Does the work of [`Self::go_on`] for a thread that waits for the end of the request.
    pub fn hurry_on(&mut self, hca: &Arc<Hca>, budget: &mut Budget) -> bool {
        if let Some(request) = &mut self.request {
            request.prepared.hurry();
        }
        self.go_on(hca, budget)
    }

    /// Drops the request that is under way, if there is one, until the budget is exhausted; whether it
    /// is gone.
    pub fn drop_request(&mut self, budget: &mut Budget) -> bool {
        let is_gone = self.request.as_mut().is_none_or(|request| request.prepared.shed(budget));
        if is_gone {
            (self.request, self.reply) = (None, None);
        }
        is_gone
    }

    /// Copies a request, and begins with its long part.
    fn read_request(&self, hca: &Hca, chain: Chain) -> Request {
        let mut bytes = [0; MAX_REQUEST];
        let length = chain.read(&mut bytes).unwrap_or(0);
        // A request without room for a status is not carried out.
        let prepared = match chain.writable_len() {
            0 => Prepared::Nothing,
            _ => begin(hca, &self.objects, &bytes[..length]),
        };
        Request { chain, bytes, length, prepared }
    }

    /// Carries out a request that was prepared, and leaves its reply.
    fn answer(&mut self, hca: &Arc<Hca>, request: Request, budget: &mut Budget) {
        let Request { chain, bytes, length, prepared } = request;
        let mut reply = [0; MAX_REPLY];
        let room = chain.writable_len().min(reply.len());
        let call = Call { hca, objects: &mut self.objects, prepared, budget };
        let written = carry_out(call, &bytes[..length], &mut reply[..room]);
        self.reply = Some(Reply { chain, bytes: reply, length: written });
    }

    /// Handles a request that did not come by the control queue, at once, and returns how many bytes
    /// of `reply` it wrote.
    pub fn command(&mut self, hca: &Arc<Hca>, request: &[u8], reply: &mut [u8]) -> usize {
        let objects = &mut self.objects;
        let mut prepared = begin(hca, objects, request);
        prepared.hurry();
        let budget = &mut Budget::endless();
        prepare(hca, objects, &mut prepared, budget);
        let written = carry_out(Call { hca, objects, prepared, budget }, request, reply);
        self.objects.wait_for_peers();
        written
    }
}

/// Begins with the long part of a request.
fn begin(hca: &Hca, objects: &Objects, request: &[u8]) -> Prepared {
    let prepared = request.split_first().and_then(|(opcode, body)| {
        let command = table::find((*opcode).into())?;
        (command.is_offered)(&hca.features).then_some(())?;
        (command.prepare)(hca, objects, body)
    });
    prepared.unwrap_or_default()
}

/// Carries out one request, and returns how many bytes of `reply` it wrote.
fn carry_out(mut call: Call<'_>, request: &[u8], reply: &mut [u8]) -> usize {
    let stats = &call.hca.stats;
    stats.add(Counter::Commands, 1);
    let Some((status, reply)) = reply.split_first_mut() else {
        stats.guest_error(Counter::CommandNoStatus, "a request without room for a status");
        return 0;
    };
    let (opcode, body) = match request.split_first() {
        Some((opcode, body)) => (Some(*opcode), body),
        None => (None, request),
    };
    let command = opcode.map(|opcode| table::find(opcode.into()));
    let result = match command {
        None => Err(Status::Length),
        Some(Some(command)) if (command.is_offered)(&call.hca.features) => {
            (command.handle)(&mut call, body, reply)
        }
        Some(_) => Err(Status::Unsupported),
    };
    if let Some(remains) = std::mem::take(&mut call.prepared).into_remains() {
        call.objects.bury(remains);
    }
    match result {
        Ok(length) => {
            *status = abi::VIRTIO_RDMA_STATUS_OK as u8;
            1 + length
        }
        Err(error) => {
            stats.guest_error(
                error.counter(),
                format_args!("control command {opcode:?} ended in {error:?}"),
            );
            *status = error as u8;
            1
        }
    }
}

/// Goes on with the long part of a command until the budget is exhausted; whether it has come to an
/// end.
fn prepare(
    hca: &Arc<Hca>,
    objects: &Objects,
    prepared: &mut Prepared,
    budget: &mut Budget,
) -> bool {
    let memory = &objects.memory;
    let result = match prepared {
        Prepared::Nothing | Prepared::Failed(_) => Ok(true),
        Prepared::Memory(region) => Ok(region.run(memory, budget)),
        Prepared::Rings(rings) => Ok(rings.run(memory, budget)),
        Prepared::CqRing(_, rings) | Prepared::SrqRing(_, rings) => {
            if !rings.run(memory, budget) {
                return false;
            }
            *prepared = begin_move(hca, std::mem::take(prepared)).unwrap_or_else(Prepared::Failed);
            return prepare(hca, objects, prepared, budget);
        }
        Prepared::MovingCq(cqn, moving) => {
            move_entries(budget, || cq::move_some(hca, *cqn, moving))
        }
        Prepared::MovingSrq(slot, moving) => {
            move_entries(budget, || srq::move_some(hca, *slot, moving))
        }
        Prepared::SrqEnd(srq, next) => Ok(abandon_srq(hca, *srq, next, budget)),
        Prepared::QpEnd(slot) => Ok(free_windows(hca, *slot, budget)),
    };
    result.unwrap_or_else(|why| {
        *prepared = Prepared::Failed(why);
        true
    })
}

/// Begins to move a CQ or an SRQ to the ring whose pages were found.
fn begin_move(hca: &Hca, prepared: Prepared) -> Result<Prepared, Status> {
    match prepared {
        Prepared::CqRing(request, rings) => {
            let (pages, ranges) = rings.finish()?;
            cq::begin_move(hca, &request, pages, ranges)
        }
        Prepared::SrqRing(request, rings) => {
            let (pages, ranges) = rings.finish()?;
            srq::begin_move(hca, &request, pages, ranges)
        }
        other => Ok(other),
    }
}

/// Moves entries of a ring until the budget is exhausted or there are no more for now; whether that is
/// so.
fn move_entries(
    budget: &mut Budget,
    mut step: impl FnMut() -> Result<u32, Status>,
) -> Result<bool, Status> {
    while !budget.is_over() {
        let moved = step()?;
        budget.work(u64::from(moved) * cost::ENTRY);
        if moved < MOVED {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Parts QPs from an SRQ that ends, from the place `next` on, until the budget is exhausted; whether no
/// QP is left.
fn abandon_srq(hca: &Hca, srq: Slot, next: &mut u16, budget: &mut Budget) -> bool {
    while *next < hca.qps.len() {
        if budget.is_over() {
            return false;
        }
        let exists = abandon(hca, srq, Slot::from(*next));
        budget.work(if exists { cost::OBJECT } else { cost::LOOK });
        *next += 1;
    }
    true
}

/// Frees the windows of a QP that ends, but for the last few, until the budget is exhausted; whether
/// only those are left.
fn free_windows(hca: &Arc<Hca>, slot: Slot, budget: &mut Budget) -> bool {
    let has_many = || read(&hca.keys).has_many_windows(slot);
    if has_many() {
        budget.work(qp::part(hca, slot));
    }
    while has_many() {
        if budget.is_over() {
            return false;
        }
        budget.work(release_windows(&hca.keys, slot) * cost::OBJECT);
    }
    true
}
