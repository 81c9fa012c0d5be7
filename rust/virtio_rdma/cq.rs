// SPDX-License-Identifier: GPL-2.0

//! Completion queues (specification, Completion queues).

#![deny(unsafe_code)]

mod virtqueue;

use crate::{
    bindings,
    cmd::{
        self,
        Command, //
    },
    hca::Hca,
    ib::{
        self,
        EventType, //
    },
    region::Region,
    ring::{
        self,
        CompletionRing, //
    },
    stats::Counter,
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    trace::refuse,
    virtio,
    wire::{
        self,
        Completion, //
    },
};
use core::mem::offset_of;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// The source of completions.
enum Queue {
    /// A virtqueue.
    Virtqueue(virtqueue::CompletionQueue),
    /// A ring of the kernel.
    Ring(CompletionRing),
    /// A ring of a program, which polls and arms it itself.
    Program,
}

/// The number of events that the program that polls a CQ has asked for and not got yet.
///
/// The core keeps events until the program reads them, however many there are, so the device may raise
/// no more than were asked for. A program counts its arming words up by one each time.
#[derive(Default)]
struct Asked {
    /// The arming words, as they were seen last.
    words: [u32; 2],
    /// Events that may still come.
    left: u32,
}

impl Asked {
    /// Takes back one request for an event. Returns whether there was one.
    fn take(&mut self, region: &Region) -> bool {
        let offsets = [
            offset_of!(wire::CqRing, arm_next),
            offset_of!(wire::CqRing, arm_solicited),
        ];
        for (seen, offset) in self.words.iter_mut().zip(offsets) {
            let word = region.ask_program(offset);
            let more = word.wrapping_sub(core::mem::replace(seen, word));
            self.left = self.left.saturating_add(more);
        }
        let is_asked = self.left != 0;
        self.left = self.left.saturating_sub(1);
        is_asked
    }
}

/// The part of a CQ that its lock protects.
struct State {
    queue: Queue,
    /// The memory of the ring, if it is one.
    region: Option<Region>,
    /// The notifications that the consumer asked for and has not got, `VIRTIO_RDMA_NOTIFY_*`.
    armed: u32,
    /// The events that a program that polls asked for.
    asked: Asked,
    /// Whether the consumer knows that the CQ is in error.
    reported: bool,
}

/// A completion queue.
#[pin_data]
pub(crate) struct Cq {
    hca: Arc<Hca>,
    cqn: u32,
    cqe: u32,
    #[pin]
    state: IrqSpinLock<State>,
    /// Held while the CQ is resized.
    #[pin]
    resizing: Mutex<()>,
}

impl Cq {
    /// Calls the completion handler if the consumer has armed the CQ, which it has to do again for the next call.
    /// `this` is this CQ. Any context.
    pub(crate) fn notify(&self, this: &ib::Cq<Hca>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let armed = match (&state.queue, &state.region) {
            (Queue::Program, Some(region)) => state.asked.take(region),
            _ => core::mem::take(&mut state.armed) != 0,
        };
        drop(guard);
        if armed {
            this.complete();
        }
    }

    /// Calls the completion handler of a CQ that is polled by a program, or armed: the device has
    /// failed. `this` is this CQ. Any context.
    pub(crate) fn wake(&self, this: &ib::Cq<Hca>) {
        let mut state = self.state.lock();
        let armed = core::mem::take(&mut state.armed) != 0 || matches!(state.queue, Queue::Program);
        drop(state);
        if armed {
            this.complete();
        }
    }

    /// Tells the program that polls the CQ that no more completions come. Any context.
    pub(crate) fn close(&self) {
        if let Some(region) = &self.state.lock().region {
            region.tell_program(offset_of!(wire::CqRing, closed), 1);
        }
    }

    /// Takes the virtqueue away, with its index, if the CQ has one: the device has been reset. Any context.
    pub(crate) fn revoke(&self) -> Option<(u32, virtio::Queue)> {
        match &mut self.state.lock().queue {
            Queue::Virtqueue(queue) => queue.revoke(),
            Queue::Ring(_) | Queue::Program => None,
        }
    }

    /// Reports that the CQ is in error, once. `this` is this CQ. Any context.
    pub(crate) fn report_once(&self, event: EventType, this: &ib::Cq<Hca>) {
        let reported = core::mem::replace(&mut self.state.lock().reported, true);
        if !reported {
            this.report(event);
        }
    }

    /// Drops the completions of a QP, and so completes its receives of an SRQ, if it has one. The device adds no
    /// completions of the QP any more. `this` is this CQ. Any context.
    pub(crate) fn purge(&self, qpn: u32, srqn: Option<u32>, this: &ib::Cq<Hca>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let is_due = match &mut state.queue {
            Queue::Virtqueue(queue) => {
                queue.drop_qp(&self.hca, qpn);
                // The completions that stay are no longer in the ring, and their interrupt may find
                // the ring empty.
                let is_due = queue.has_completions() && core::mem::take(&mut state.armed) != 0;
                state.taken(&self.hca, self.cqn);
                is_due
            }
            Queue::Ring(ring) => {
                ring.drop_qp(qpn, |cqe| self.complete_srq(srqn, &Completion::from(cqe)));
                false
            }
            Queue::Program => false,
        };
        drop(guard);
        if is_due {
            this.complete();
        }
    }

    /// Completes the receive of SRQ `srqn` that `completion` is of, if it is of one.
    fn complete_srq(&self, srqn: Option<u32>, completion: &Completion) {
        if let Some(srqn) = srqn.filter(|_| completion.is_recv()) {
            let srqs = &self.hca.objects().srqs;
            // A tag that names no work request needs no completion.
            let _ = srqs.with(srqn, |srq| srq.complete(completion.tag, 0));
        }
    }

    /// Returns whether a work request that completes here is outstanding. Any context.
    fn has_outstanding(&self) -> bool {
        let mut any = false;
        let qps = &self.hca.objects().qps;
        qps.for_each(|qp| any |= qp.has_outstanding(self.cqn));
        any
    }

    /// Completes the work request of the QP that a CQE names. `None` if the CQE makes no sense.
    fn dispatch(&self, completion: &Completion, wcs: &mut ib::Wcs<'_>) -> Option<()> {
        let hca = &self.hca;
        let found = hca.objects().qps.with(completion.qpn, |qp| {
            let wc = qp.complete(self.cqn, completion)?;
            if wc.status != bindings::ib_wc_status_IB_WC_SUCCESS {
                hca.stats().count(Counter::CompletionErrors);
            }
            wcs.push(qp, &wc);
            Some(())
        });
        if found.is_none() {
            hca.stats().bad(Counter::BadCqeQp);
        }
        found.flatten()
    }
}

impl State {
    /// Takes the next CQE. `budget` bounds how many places are looked at, because the device may fill
    /// those that are free again as fast as they are emptied.
    fn next(&mut self, hca: &Hca, budget: &mut u32) -> Option<Completion> {
        match &mut self.queue {
            Queue::Virtqueue(queue) => queue.next(hca, budget).map(|cqe| Completion::from(&cqe)),
            Queue::Ring(ring) => {
                *budget = budget.checked_sub(1)?;
                ring.next().map(|cqe| Completion::from(&cqe))
            }
            Queue::Program => None,
        }
    }

    /// Tells the device that there is room again, after CQEs were taken.
    fn taken(&mut self, hca: &Arc<Hca>, cqn: u32) {
        match &mut self.queue {
            Queue::Virtqueue(queue) => {
                queue.release();
                // The interrupt of one of these completions may be under way. `vring_interrupt()`
                // drops it if the ring is empty, but the device takes the CQ for disarmed, so the
                // CQ is armed again.
                if self.armed != 0 {
                    hca.notify(cqn, self.armed);
                }
            }
            Queue::Ring(ring) => ring.release(),
            Queue::Program => {}
        }
    }

    fn is_broken(&self) -> bool {
        matches!(&self.queue, Queue::Virtqueue(queue) if queue.is_broken())
    }
}

/// The parts of a new CQ.
struct Parts {
    cqn: u32,
    cqe: u32,
    queue: Queue,
    region: Option<Region>,
}

fn new_virtqueue(hca: &Arc<Hca>, attr: &ib::CqInitAttr<'_>) -> Result<Parts> {
    attr.udata.as_ref().map_or(Ok(()), ib::Udata::no_request)?;
    let request = bindings::virtio_rdma_cmd_create_cq {
        cqe: attr.cqe.to_le(),
    };
    let buffers = virtqueue::Buffers::new(hca, attr.cqe)?;
    let cqn = u32::from_le(hca.execute::<cmd::CreateCq>(&request)?.cqn);
    let queue = virtqueue::CompletionQueue::new(hca, cqn, buffers, attr.comp_vector)?;
    Ok(Parts {
        cqn,
        cqe: attr.cqe,
        queue: Queue::Virtqueue(queue),
        region: None,
    })
}

/// Sends CREATE_RING_CQ.
fn create_ring(
    hca: &Arc<Hca>,
    region: Region,
    cqe: u32,
    comp_vector: u32,
) -> Result<(u32, Region)> {
    let table = region.page_table()?;
    let request = bindings::virtio_rdma_cmd_create_ring_cq {
        region: table.to_wire(),
        cqe: cqe.to_le(),
        comp_vector: comp_vector
            .checked_rem(hca.num_comp_vectors())
            .ok_or(EINVAL)?
            .to_le(),
    };
    let (reply, region) = region.give::<cmd::CreateRingCq>(table, &request)?;
    Ok((u32::from_le(reply.cqn), region))
}

fn new_ring(hca: &Arc<Hca>, attr: &ib::CqInitAttr<'_>) -> Result<Parts> {
    // The result is at most `max_cqe`, which is a power of two.
    let cqe = attr.cqe.next_power_of_two();
    let pages = Arc::new(hca.alloc_pages(ring::cq_len(cqe))?, GFP_KERNEL)?;
    let ring = CompletionRing::new(pages.clone(), cqe)?;
    let region = Region::of_kernel(hca, pages);
    let (cqn, region) = create_ring(hca, region, cqe, attr.comp_vector)?;
    Ok(Parts {
        cqn,
        cqe,
        queue: Queue::Ring(ring),
        region: Some(region),
    })
}

/// Returns the bytes that the ring of a program's CQ of `cqe` entries needs.
///
/// # Errors
///
/// `EINVAL` for a number of entries that is no power of two.
fn program_ring_len(cqe: u32) -> Result<usize> {
    if !cqe.is_power_of_two() {
        let reason = c"a CQ of a number of CQEs that is no power of two";
        return Err(refuse(EINVAL, reason, cqe.into(), 0));
    }
    Ok(ring::cq_len(cqe))
}

/// Pins the ring that a program gives a CQ of `cqe` entries.
///
/// # Errors
///
/// Those of [`program_ring_len`]; `EINVAL` for a buffer that is not made of whole pages or too small; those of
/// [`Region::pin`].
fn pin_ring(dev: &ib::Device<Hca>, cqe: u32, udata: &ib::Udata<'_>) -> Result<Region> {
    let asked: bindings::virtio_rdma_ureq_create_cq = udata.request()?;
    let needed = program_ring_len(cqe)? as u64;
    if !ring::is_region(asked.buf_addr, asked.buf_len) || asked.buf_len < needed {
        let reason = c"a ring of a CQ that is too small or not made of whole pages";
        return Err(refuse(EINVAL, reason, asked.buf_len, needed));
    }
    Region::pin(
        dev,
        asked.buf_addr,
        asked.buf_len,
        bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
    )
}

fn new_program_ring(
    dev: &ib::Device<Hca>,
    attr: &ib::CqInitAttr<'_>,
    udata: &ib::Udata<'_>,
) -> Result<Parts> {
    let needed = program_ring_len(attr.cqe)?;
    let region = match Region::named(dev, udata, ib::BufferOf::Cq, needed)? {
        Some((region, _)) => {
            let asked: bindings::virtio_rdma_ureq_create_cq = udata.optional_request()?;
            if asked.buf_addr != 0 || asked.buf_len != 0 {
                let reason = c"a ring of a CQ that is named twice";
                return Err(refuse(EINVAL, reason, asked.buf_addr, asked.buf_len));
            }
            region
        }
        None => pin_ring(dev, attr.cqe, udata)?,
    };
    let (cqn, region) = create_ring(dev.data(), region, attr.cqe, attr.comp_vector)?;
    Ok(Parts {
        cqn,
        cqe: attr.cqe,
        queue: Queue::Program,
        region: Some(region),
    })
}

impl ib::CompletionQueue<Hca> for Cq {
    fn create(
        dev: &ib::Device<Hca>,
        attr: &ib::CqInitAttr<'_>,
    ) -> Result<impl PinInit<Self, Error>> {
        let hca = dev.data().clone();
        if attr.flags != 0 {
            let error = crate::errno::unsupported();
            return Err(refuse(error, c"flags of a CQ", attr.flags.into(), 0));
        }
        if attr.cqe == 0 || attr.cqe > hca.max_cqe() {
            let limit = hca.max_cqe().into();
            return Err(refuse(EINVAL, c"CQEs of a CQ", attr.cqe.into(), limit));
        }
        let parts = match &attr.udata {
            _ if hca.config().rings.is_none() => new_virtqueue(&hca, attr),
            None => new_ring(&hca, attr),
            Some(udata) => new_program_ring(dev, attr, udata),
        };
        let Parts {
            cqn,
            cqe,
            queue,
            region,
        } = parts.map_err(|error| hca.create_error(attr.udata.is_none(), error))?;
        let state = State {
            queue,
            region,
            armed: 0,
            asked: Asked::default(),
            reported: false,
        };

        Ok(try_pin_init!(Self {
            hca,
            cqn,
            cqe,
            state <- new_irq_spinlock!(state, "virtio_rdma::Cq"),
            resizing <- new_mutex!(()),
        }? Error))
    }

    fn destroy(&self) -> Result {
        self.hca.control().cancel_notify(self.cqn);
        self.hca.leave(self.hca.config().cq_queue(self.cqn));
        let request = bindings::virtio_rdma_cmd_destroy_cq {
            cqn: self.cqn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyCq>(&request);
        // The CQ may be destroyed without a request of the program: its device may be taken away.
        self.close();
        Ok(())
    }

    fn number(&self) -> u32 {
        self.cqn
    }

    fn cqe(&self) -> u32 {
        self.cqe
    }

    fn moderate(&self, count: u16, period: u16) -> Result {
        if !self.hca.config().cq_moderation {
            return Err(crate::errno::unsupported());
        }
        let request = bindings::virtio_rdma_cmd_modify_cq {
            cqn: self.cqn.to_le(),
            cq_count: count.to_le(),
            cq_period: period.to_le(),
        };
        self.hca.execute::<cmd::ModifyCq>(&request).map(|_| ())
    }

    fn resize(&self, dev: &ib::Device<Hca>, cqe: u32, udata: &ib::Udata<'_>) -> Result {
        let _resizing = self.resizing.lock();
        if !self.hca.config().cq_resize || !matches!(self.state.lock().queue, Queue::Program) {
            return Err(crate::errno::unsupported());
        }
        if cqe > self.hca.max_cqe() {
            let limit = self.hca.max_cqe().into();
            return Err(refuse(EINVAL, c"CQEs of a CQ", cqe.into(), limit));
        }
        let new = pin_ring(dev, cqe, udata)?;
        let table = new.page_table()?;
        let request = bindings::virtio_rdma_cmd_resize_cq {
            region: table.to_wire(),
            cqe: cqe.to_le(),
            cqn: self.cqn.to_le(),
        };
        let (reply, new) = new.give::<cmd::ResizeCq>(table, &request)?;
        if u32::from_le(reply.moved) > cqe {
            self.hca
                .stats()
                .bad_reply(Counter::BadReplyValue, cmd::ResizeCq::NAME);
            self.hca.fail("it moved more CQEs than there is room for");
            return Err(EIO);
        }
        // The old ring is dropped without the lock, because dropping it may sleep.
        let old = self.state.lock().region.replace(new);
        drop(old);
        if self.hca.is_broken() {
            // Hca::run() may have closed the old ring.
            self.close();
        }
        udata.respond(&bindings::virtio_rdma_uresp_resize_cq {
            moved: u32::from_le(reply.moved),
            reserved_04: 0,
        })
    }

    fn poll(&self, wcs: &mut ib::Wcs<'_>) -> Result {
        let hca = &self.hca;
        let mut state = self.state.lock();
        let mut budget = self.cqe;
        let mut taken = 0;

        if matches!(state.queue, Queue::Program) {
            return Err(crate::errno::unsupported());
        }
        while !wcs.is_full() {
            let Some(completion) = state.next(hca, &mut budget) else {
                break;
            };
            taken += 1;
            self.dispatch(&completion, wcs);
        }
        if taken != 0 {
            hca.stats().add(Counter::Completions, taken);
            state.taken(hca, self.cqn);
        }
        if wcs.is_full() {
            return Ok(());
        }
        if state.is_broken() {
            hca.fail("a completion queue broke");
        }
        // The device may write to the memory of the work requests until it is stopped.
        if hca.is_broken() && hca.is_stopped() {
            hca.objects().qps.for_each(|qp| qp.flush(self.cqn, wcs, qp));
        }
        Ok(())
    }

    fn details(&self, details: &mut ib::Details<'_>) -> Result {
        let state = self.state.lock();
        let is_ring = state.region.is_some();
        drop(state);
        details.put(c"cqn", self.cqn)?;
        details.put(c"rings", u32::from(is_ring))
    }

    fn req_notify(&self, solicited: bool, report_missed: bool) -> bool {
        let flags = if solicited {
            bindings::VIRTIO_RDMA_NOTIFY_SOLICITED
        } else {
            bindings::VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION
        };
        let mut state = self.state.lock();
        state.armed |= flags;
        if !self.hca.is_broken() {
            let armed = state.armed;
            return match &mut state.queue {
                Queue::Virtqueue(queue) => {
                    self.hca.notify(self.cqn, armed);
                    report_missed && queue.has_completions()
                }
                Queue::Ring(ring) => {
                    ring.arm(solicited);
                    report_missed && ring.has_completions()
                }
                Queue::Program => false,
            };
        }
        drop(state);
        let waiting = self.has_outstanding();
        if waiting {
            self.hca.attend();
        }
        report_missed && waiting
    }
}
