// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues (specification, Shared receive queues).

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd::{
        self,
        Command, //
    },
    hca::Hca,
    ib::{
        self,
        EventType,
        SrqType, //
    },
    region::Region,
    ring::{
        self,
        Shape,
        WorkRing, //
    },
    stats::Counter,
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    trace::refuse,
    wire,
    wq::{
        self,
        Entry, //
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

/// The ring of an SRQ that the kernel posts to.
///
/// Receives complete in any order. So the device gets a tag as the `wr_id` of each receive, which names its
/// entry until the receive is completed. There are as many tags as places in the ring, and the device empties
/// a place before it completes the receive that was there, so a free tag means a free place.
struct Queue {
    ring: WorkRing,
    /// The entry of each tag.
    entries: KVec<Option<Entry>>,
    /// Tags that name no entry.
    free: KVec<u32>,
}

impl Queue {
    /// Makes an empty queue of `depth` places. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    fn new(ring: WorkRing, depth: u32) -> Result<Self> {
        let mut free = KVec::with_capacity(depth as usize, GFP_KERNEL)?;
        for tag in (0..depth).rev() {
            free.push(tag, GFP_KERNEL)?;
        }
        Ok(Self {
            ring,
            entries: wq::new_entries(depth)?,
            free,
        })
    }

    /// Posts a receive work request. The device does not see it yet.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full, `EINVAL` if the entry has no room for the SGEs.
    fn post(&mut self, wr: &ib::RecvWr<'_>) -> Result {
        let sges = wr.sges();
        let tag = *self.free.last().ok_or(ENOMEM)?;
        wq::write_recv(&mut self.ring, tag.into(), sges)?;
        self.ring.advance();
        self.free.pop();
        self.entries[tag as usize] = Some(Entry {
            wr_id: wr.wr_id(),
            opcode: ib::WcOpcode::Recv,
            length: sges.iter().map(|sge| u64::from(sge.length)).sum(),
        });
        Ok(())
    }

    /// Completes the work request with this tag, which `bytes` were placed into.
    ///
    /// # Errors
    ///
    /// What is wrong with the CQE that says so.
    fn complete(&mut self, tag: u64, bytes: u64) -> Result<Entry, Counter> {
        let place = usize::try_from(tag)
            .ok()
            .and_then(|tag| self.entries.get_mut(tag))
            .ok_or(Counter::BadCqeWrId)?;
        let entry = place.ok_or(Counter::BadCqeWrId)?;
        if bytes > entry.length {
            return Err(Counter::BadCqeByteLen);
        }
        *place = None;
        // The list has room for all tags.
        let _ = self.free.push_within_capacity(tag as u32);
        Ok(entry)
    }
}

/// The events that the device may still raise. The core keeps the events of a program until the
/// program reads them, so the driver passes on no more than the program can expect.
#[derive(Default)]
struct Expected {
    /// The limit was set, and not reached since.
    limit: bool,
    /// The SRQ is in error, and its consumer knows.
    error: bool,
}

/// A shared receive queue.
#[pin_data]
pub(crate) struct Srq {
    hca: Arc<Hca>,
    srqn: u32,
    max_sge: u32,
    /// `None` if a program posts.
    #[pin]
    queue: IrqSpinLock<Option<Queue>>,
    #[pin]
    region: IrqSpinLock<Region>,
    #[pin]
    expected: IrqSpinLock<Expected>,
    /// The work requests that the ring holds. Held while the limit is set, or the ring replaced.
    #[pin]
    max_wr: Mutex<u32>,
}

impl Srq {
    /// Completes the work request with this tag. Any context.
    ///
    /// # Errors
    ///
    /// What is wrong with the CQE that says so.
    pub(crate) fn complete(&self, tag: u64, bytes: u64) -> Result<Entry, Counter> {
        let mut guard = self.queue.lock();
        let Some(queue) = &mut *guard else {
            return Err(Counter::BadCqeWrId);
        };
        queue.complete(tag, bytes)
    }

    /// Reports an event that the device raised, if there may be one: SRQ_LIMIT_REACHED once a limit,
    /// SRQ_ERR once. `this` is this SRQ. Any context.
    pub(crate) fn report_expected(&self, event: EventType, this: &ib::Srq<Hca>) {
        let mut expected = self.expected.lock();
        let is_expected = if event == EventType::SrqLimitReached {
            core::mem::take(&mut expected.limit)
        } else {
            !core::mem::replace(&mut expected.error, true)
        };
        drop(expected);
        if is_expected {
            this.report(event);
        }
    }

    /// Lets the program that posts ring the doorbell with its next work request, so that it learns that the device
    /// has failed. Any context.
    pub(crate) fn close(&self) {
        let region = self.region.lock();
        region.tell_program(offset_of!(wire::SrqRing, wake), 1);
    }
}

/// Sends CREATE_SRQ.
fn create(
    hca: &Arc<Hca>,
    attr: &ib::SrqInitAttr<'_, Hca>,
    region: Region,
    shape: Shape,
) -> Result<(u32, Region)> {
    let table = region.page_table()?;
    let mut request = bindings::virtio_rdma_cmd_create_srq {
        region: table.to_wire(),
        ring: shape.to_wire(),
        pdn: attr.pd.number().to_le(),
        max_sge: attr.max_sge.to_le(),
        ..bindings::virtio_rdma_cmd_create_srq::zeroed()
    };
    if let Some((xrcd, cq)) = attr.xrc {
        request.xrcdn = xrcd.number().to_le();
        request.cqn = ib::CompletionQueue::number(&**cq).to_le();
    }
    let (reply, region) = region.give::<cmd::CreateSrq>(table, &request)?;
    let srqn = u32::from_le(reply.srqn);
    if srqn == 0 {
        hca.bad_number();
        return Err(EIO);
    }
    Ok((srqn, region))
}

/// The parts of a new SRQ.
struct Parts {
    srqn: u32,
    max_wr: u32,
    queue: Option<Queue>,
    region: Region,
}

/// Creates an SRQ with a ring of the kernel.
fn new_ring(hca: &Arc<Hca>, attr: &ib::SrqInitAttr<'_, Hca>) -> Result<Parts> {
    // The result is at most `max_srq_wr`, which is a power of two.
    let max_wr = attr.max_wr.next_power_of_two();
    let shape = Shape::of_srq(max_wr, attr.max_sge);
    let pages = Arc::new(hca.alloc_pages(shape.end() as usize)?, GFP_KERNEL)?;
    let queue = Queue::new(WorkRing::shared(pages.clone(), shape), max_wr)?;
    let region = Region::of_kernel(hca, pages);
    let (srqn, region) = create(hca, attr, region, shape)?;
    Ok(Parts {
        srqn,
        max_wr,
        queue: Some(queue),
        region,
    })
}

/// Pins the ring that a program gives an SRQ for at least `max_wr` work requests of `max_sge` SGEs.
///
/// # Errors
///
/// `EINVAL` for a ring that is smaller than that or does not lie within the buffer, or a buffer that is
/// not made of whole pages; `EOPNOTSUPP` for a reserved field that is not zero; those of [`Region::pin`].
fn pin_ring(
    dev: &ib::Device<Hca>,
    max_wr: u32,
    max_sge: u32,
    udata: &ib::Udata<'_>,
) -> Result<(Region, Shape)> {
    let asked: bindings::virtio_rdma_ureq_create_srq = udata.request()?;
    if asked.reserved_1c != 0 {
        return Err(crate::errno::unsupported());
    }
    let shape = Shape::of_program_srq(&asked, max_sge)?;
    let limit = dev.data().config().max_srq_wr;
    if !(max_wr..=limit).contains(&shape.depth) {
        let reason = c"a ring of an SRQ that is too small or too large";
        return Err(refuse(EINVAL, reason, shape.depth.into(), limit.into()));
    }
    if !ring::is_region(asked.buf_addr, asked.buf_len) {
        let reason = c"a ring of an SRQ that is not made of whole pages";
        return Err(refuse(EINVAL, reason, asked.buf_addr, asked.buf_len));
    }
    let region = Region::pin(
        dev,
        asked.buf_addr,
        asked.buf_len,
        bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
    )?;
    Ok((region, shape))
}

/// Creates an SRQ with a ring of a program.
///
/// # Errors
///
/// The errors of [`pin_ring`]; what the device says.
fn new_program_ring(
    dev: &ib::Device<Hca>,
    attr: &ib::SrqInitAttr<'_, Hca>,
    udata: &ib::Udata<'_>,
) -> Result<Parts> {
    let (region, shape) = pin_ring(dev, attr.max_wr, attr.max_sge, udata)?;
    let (srqn, region) = create(dev.data(), attr, region, shape)?;
    Ok(Parts {
        srqn,
        max_wr: shape.depth,
        queue: None,
        region,
    })
}

impl ib::SharedReceiveQueue<Hca> for Srq {
    fn create(
        dev: &ib::Device<Hca>,
        attr: &ib::SrqInitAttr<'_, Hca>,
    ) -> Result<impl PinInit<Self, Error>> {
        let hca = dev.data().clone();
        let config = hca.config();
        let is_known = match attr.srq_type {
            SrqType::Basic => true,
            // The kernel's work requests have no member for the SRQ of the peer.
            SrqType::Xrc => config.xrc && attr.udata.is_some(),
        };
        if config.max_srq == 0 || !is_known {
            let (error, srq_type) = (crate::errno::unsupported(), attr.srq_type as u64);
            let reason = c"an SRQ of a type that the device does not have";
            return Err(refuse(error, reason, srq_type, 0));
        }
        if attr.max_wr == 0 || attr.max_wr > config.max_srq_wr {
            let limit = config.max_srq_wr.into();
            return Err(refuse(
                EINVAL,
                c"max_wr of an SRQ",
                attr.max_wr.into(),
                limit,
            ));
        }
        if attr.max_sge > config.max_srq_sge {
            let limit = config.max_srq_sge.into();
            return Err(refuse(
                EINVAL,
                c"max_sge of an SRQ",
                attr.max_sge.into(),
                limit,
            ));
        }
        let parts = match &attr.udata {
            None => new_ring(&hca, attr)?,
            Some(udata) => new_program_ring(dev, attr, udata)?,
        };
        let Parts {
            srqn,
            max_wr,
            queue,
            region,
        } = parts;
        let max_sge = attr.max_sge;

        Ok(try_pin_init!(Self {
            hca,
            srqn,
            max_sge,
            queue <- new_irq_spinlock!(queue, "virtio_rdma::Srq"),
            region <- new_irq_spinlock!(region, "virtio_rdma::Srq::region"),
            expected <- new_irq_spinlock!(Expected::default(), "virtio_rdma::Srq::expected"),
            max_wr <- new_mutex!(max_wr),
        }? Error))
    }

    fn arm(&self, limit: u32) -> Result {
        let max_wr = self.max_wr.lock();
        if limit > *max_wr {
            let max_wr = (*max_wr).into();
            return Err(refuse(EINVAL, c"srq_limit of an SRQ", limit.into(), max_wr));
        }
        let request = bindings::virtio_rdma_cmd_modify_srq {
            srqn: self.srqn.to_le(),
            srq_limit: limit.to_le(),
        };
        // The event may come before the reply.
        let before = core::mem::replace(&mut self.expected.lock().limit, limit != 0);
        self.hca
            .execute::<cmd::ModifySrq>(&request)
            .inspect_err(|_| self.expected.lock().limit = before)?;
        Ok(())
    }

    fn resize(&self, dev: &ib::Device<Hca>, max_wr: u32, udata: &ib::Udata<'_>) -> Result {
        if !self.hca.config().srq_resize || self.queue.lock().is_some() {
            return Err(crate::errno::unsupported());
        }
        let mut size = self.max_wr.lock();
        let (region, shape) = pin_ring(dev, max_wr.max(1), self.max_sge, udata)?;
        let table = region.page_table()?;
        let request = bindings::virtio_rdma_cmd_resize_srq {
            region: table.to_wire(),
            ring: shape.to_wire(),
            srqn: self.srqn.to_le(),
            reserved_24: 0,
        };
        let (reply, region) = region.give::<cmd::ResizeSrq>(table, &request)?;
        if u32::from_le(reply.moved) > shape.depth {
            self.hca
                .stats()
                .bad_reply(Counter::BadReplyValue, cmd::ResizeSrq::NAME);
            self.hca
                .fail("it moved more work requests than there is room for");
            return Err(EIO);
        }
        *size = shape.depth;
        // The old ring is dropped without the lock, because dropping it may sleep.
        let old = core::mem::replace(&mut *self.region.lock(), region);
        drop(old);
        if self.hca.is_broken() {
            // Hca::run() may have closed the old ring.
            self.close();
        }
        Ok(())
    }

    fn query(&self, attr: &mut bindings::ib_srq_attr) -> Result {
        let max_wr = self.max_wr.lock();
        let request = bindings::virtio_rdma_cmd_query_srq {
            srqn: self.srqn.to_le(),
        };
        let reply = self.hca.execute::<cmd::QuerySrq>(&request)?;
        let limit = u32::from_le(reply.srq_limit);
        if limit > *max_wr {
            self.hca
                .stats()
                .bad_reply(Counter::BadReplyValue, cmd::QuerySrq::NAME);
            return Err(EIO);
        }
        *attr = bindings::ib_srq_attr {
            max_wr: *max_wr,
            max_sge: self.max_sge,
            srq_limit: limit,
        };
        Ok(())
    }

    fn destroy(&self) -> Result {
        let request = bindings::virtio_rdma_cmd_destroy_srq {
            srqn: self.srqn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroySrq>(&request);
        self.hca.cancel_srq_doorbell(self.srqn);
        // The SRQ may be destroyed without a request of the program: its device may be taken away.
        self.close();
        Ok(())
    }

    fn number(&self) -> u32 {
        self.srqn
    }

    fn sizes(&self) -> (u32, u32) {
        (*self.max_wr.lock(), self.max_sge)
    }

    fn details(&self, details: &mut ib::Details<'_>) -> Result {
        details.put(c"srqn", self.srqn)
    }

    fn post_recv(&self, wrs: &mut ib::RecvWrs<'_>) -> Result {
        let mut guard = self.queue.lock();
        let Some(queue) = &mut *guard else {
            return Err(crate::errno::unsupported());
        };
        let mut count = 0;
        let result = wrs.try_for_each(|wr| {
            if wr.sges().len() > self.max_sge as usize {
                let (number, limit) = (wr.sges().len() as u64, self.max_sge.into());
                return Err(refuse(EINVAL, c"SGEs of a work request", number, limit));
            }
            queue.post(&wr)?;
            count += 1;
            Ok(())
        });
        if count != 0 {
            self.hca.stats().add(Counter::RecvsPosted, count);
            // The head of a region is within its memory.
            if queue.ring.publish().unwrap_or(false) && !self.hca.is_broken() {
                // Nobody who posts waits for the doorbell.
                drop(guard);
                self.hca.ring_srq_doorbell(self.srqn);
            }
        }
        result
    }

    fn ring_doorbell(&self) -> Result {
        if self.hca.is_broken() {
            return Err(EIO);
        }
        self.hca.ring_srq_doorbell(self.srqn);
        Ok(())
    }
}
