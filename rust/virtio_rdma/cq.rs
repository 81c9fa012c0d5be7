// SPDX-License-Identifier: GPL-2.0

//! Completion queues (chapter 7 of the specification).

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::{
        Hca,
        Lease, //
    },
    ib,
    stats::Counter,
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    wire, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

const CQE_SIZE: usize = size_of::<wire::Cqe>();

/// A CQE that was taken out of the ring, and whose buffer is not available again yet.
#[derive(Clone, Copy)]
struct Held {
    buffer: u32,
    cqe: wire::Cqe,
}

/// What the lock of a CQ protects.
struct Ring {
    lease: Lease,
    /// CQEs taken out of the ring when a QP was purged, in order.
    held: KVec<Held>,
    /// How many of `held` were polled.
    polled: usize,
    /// What the consumer asked to be notified of and was not yet, `VIRTIO_RDMA_NOTIFY_*`.
    armed: u32,
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
    ring: IrqSpinLock<Ring>,
}

impl Cq {
    /// Whether the consumer wants to hear of completions. That holds once. Any context.
    pub(crate) fn take_armed(&self) -> bool {
        core::mem::take(&mut self.ring.lock().armed) != 0
    }

    /// Reports an event, which a CQ has one of: that it is in error. `this` is this CQ. Any context.
    pub(crate) fn report_once(&self, event: bindings::ib_event_type, this: &ib::Cq<Hca>) {
        let reported = core::mem::replace(&mut self.ring.lock().reported, true);
        if !reported {
            this.report(event);
        }
    }

    /// Drops the completions of a QP that has none to come. Any context.
    pub(crate) fn purge(&self, qpn: u32) {
        let mut ring = self.ring.lock();
        ring.hold_all(&self.hca, self.cqe);
        ring.drop_held(qpn);
    }

    /// Whether a work request that completes here is outstanding. Any context.
    fn has_outstanding(&self) -> bool {
        let mut any = false;
        let qps = &self.hca.objects().qps;
        qps.for_each(|qp| any |= qp.has_outstanding(self.cqn));
        any
    }

    /// Tells what a CQE says to the QP that it names. `None` if it makes no sense.
    fn dispatch(&self, cqe: &wire::Cqe, wcs: &mut ib::Wcs<'_>) -> Option<()> {
        let hca = &self.hca;
        let qpn = u32::from_le(cqe.qp_num);
        let found = hca.objects().qps.with(qpn, |qp| {
            let wc = qp.complete(self.cqn, cqe)?;
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

impl Ring {
    /// Makes a buffer available to the device.
    fn recycle(&mut self, buffer: u32) {
        // It fails only if the queue is broken.
        let _ = self
            .lease
            .add_writable(buffer as usize * CQE_SIZE, CQE_SIZE, buffer);
    }

    /// Takes the next CQE out of the ring. Those of the wrong length are skipped. `budget` bounds how
    /// many buffers are looked at, because the device may fill those that are made available again
    /// as fast as they are emptied.
    fn take(&mut self, hca: &Hca, budget: &mut u32) -> Option<Held> {
        while let Some(left) = budget.checked_sub(1) {
            *budget = left;
            let (buffer, written) = self.lease.get()?;
            match self.lease.read(buffer as usize * CQE_SIZE) {
                Ok(cqe) if written as usize == CQE_SIZE => return Some(Held { buffer, cqe }),
                _ => {
                    hca.stats().bad(Counter::BadCqeLength);
                    self.recycle(buffer);
                }
            }
        }
        None
    }

    /// The next CQE, in order; its buffer is available again.
    fn next(&mut self, hca: &Hca, budget: &mut u32) -> Option<wire::Cqe> {
        let held = match self.held.get(self.polled) {
            Some(held) => {
                self.polled += 1;
                *held
            }
            None => {
                self.held.clear();
                self.polled = 0;
                self.take(hca, budget)?
            }
        };
        self.recycle(held.buffer);
        Some(held.cqe)
    }

    /// Moves all CQEs from the ring to `held`, which has room for as many as there are buffers.
    fn hold_all(&mut self, hca: &Hca, mut buffers: u32) {
        let mut polled = core::mem::take(&mut self.polled);
        self.held.retain(|_| {
            let keep = polled == 0;
            polled = polled.saturating_sub(1);
            keep
        });
        while let Some(held) = self.take(hca, &mut buffers) {
            let _ = self.held.push_within_capacity(held);
        }
    }

    /// Drops the CQEs of a QP from `held`.
    fn drop_held(&mut self, qpn: u32) {
        let mut held = core::mem::take(&mut self.held);
        held.retain(|held| {
            let keep = u32::from_le(held.cqe.qp_num) != qpn;
            if !keep {
                self.recycle(held.buffer);
            }
            keep
        });
        self.held = held;
        self.lease.kick();
    }

    fn has_completions(&mut self) -> bool {
        self.polled < self.held.len() || self.lease.has_used()
    }
}

/// Creates a CQ in the device, takes its queue and fills that with buffers.
fn new_ring(hca: &Arc<Hca>, attr: &ib::CqInitAttr) -> Result<(u32, Ring)> {
    let memory = hca.alloc(attr.cqe as usize * CQE_SIZE)?;
    let held = KVec::with_capacity(attr.cqe as usize, GFP_KERNEL)?;
    let request = bindings::virtio_rdma_cmd_create_cq {
        cqe: attr.cqe.to_le(),
    };
    let cqn = u32::from_le(hca.execute::<cmd::CreateCq>(&request)?.cqn);
    let lease = hca.lease(hca.config().cq_queue(cqn), memory)?;
    let mut ring = Ring {
        lease,
        held,
        polled: 0,
        armed: 0,
        reported: false,
    };
    ring.lease.set_affinity(attr.comp_vector);
    for buffer in 0..attr.cqe {
        ring.recycle(buffer);
    }
    ring.lease.kick();
    Ok((cqn, ring))
}

impl ib::CompletionQueue<Hca> for Cq {
    fn create(dev: &ib::Device<Hca>, attr: &ib::CqInitAttr) -> Result<impl PinInit<Self, Error>> {
        let hca = dev.data();
        if attr.flags != 0 {
            return Err(crate::errno::unsupported());
        }
        if attr.cqe == 0 || attr.cqe > hca.max_cqe() {
            return Err(EINVAL);
        }

        let (cqn, ring) = new_ring(hca, attr)?;
        let hca = hca.clone();
        let cqe = attr.cqe;

        Ok(try_pin_init!(Self {
            hca,
            cqn,
            cqe,
            ring <- new_irq_spinlock!(ring, "virtio_rdma::Cq"),
        }? Error))
    }

    fn destroy(&self) -> Result {
        self.hca.control().cancel_notify(self.cqn);
        self.hca.leave(self.hca.config().cq_queue(self.cqn));
        let request = bindings::virtio_rdma_cmd_destroy_cq {
            cqn: self.cqn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyCq>(&request);
        Ok(())
    }

    fn number(&self) -> u32 {
        self.cqn
    }

    fn cqe(&self) -> u32 {
        self.cqe
    }

    fn poll(&self, wcs: &mut ib::Wcs<'_>) {
        let hca = &self.hca;
        let mut ring = self.ring.lock();
        let mut budget = self.cqe;
        let mut taken = 0;

        while !wcs.is_full() {
            let Some(cqe) = ring.next(hca, &mut budget) else {
                break;
            };
            taken += 1;
            self.dispatch(&cqe, wcs);
        }
        if taken != 0 {
            hca.stats().add(Counter::Completions, taken);
            ring.lease.kick();
            // The interrupt of one of these may be under way, and `vring_interrupt()` drops it if it
            // finds the ring empty, while the device takes the CQ for disarmed: arm it again.
            if ring.armed != 0 {
                hca.control().notify(self.cqn, ring.armed);
            }
        }
        if wcs.is_full() {
            return;
        }
        if ring.lease.is_broken() {
            hca.fail("a completion queue broke");
        }
        if hca.is_broken() {
            hca.objects().qps.for_each(|qp| qp.flush(self.cqn, wcs, qp));
        }
    }

    fn req_notify(&self, solicited: bool, report_missed: bool) -> bool {
        let flags = if solicited {
            bindings::VIRTIO_RDMA_NOTIFY_SOLICITED
        } else {
            bindings::VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION
        };
        let mut ring = self.ring.lock();
        ring.armed |= flags;
        if !self.hca.is_broken() {
            self.hca.control().notify(self.cqn, ring.armed);
            return report_missed && ring.has_completions();
        }
        drop(ring);
        let waiting = self.has_outstanding();
        if waiting {
            self.hca.wake_pollers();
        }
        report_missed && waiting
    }
}
