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

    /// Drops the completions of a QP that has none to come. Any context.
    pub(crate) fn purge(&self, qpn: u32) {
        let mut ring = self.ring.lock();
        ring.hold_all(&self.hca);
        ring.drop_held(qpn);
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

    /// Takes the next CQE out of the ring. Those of the wrong length are skipped.
    fn take(&mut self, hca: &Hca) -> Option<Held> {
        while let Some((buffer, written)) = self.lease.get() {
            match self.lease.read(buffer as usize * CQE_SIZE) {
                Ok(cqe) if written as usize >= CQE_SIZE => return Some(Held { buffer, cqe }),
                _ => {
                    hca.stats().bad(Counter::BadCqeLength);
                    self.recycle(buffer);
                }
            }
        }
        None
    }

    /// The next CQE, in order; its buffer is available again.
    fn next(&mut self, hca: &Hca) -> Option<wire::Cqe> {
        let held = match self.held.get(self.polled) {
            Some(held) => {
                self.polled += 1;
                *held
            }
            None => {
                self.held.clear();
                self.polled = 0;
                self.take(hca)?
            }
        };
        self.recycle(held.buffer);
        Some(held.cqe)
    }

    /// Moves all CQEs from the ring to `held`, which has room for as many as there are buffers.
    fn hold_all(&mut self, hca: &Hca) {
        let mut polled = core::mem::take(&mut self.polled);
        self.held.retain(|_| {
            let keep = polled == 0;
            polled = polled.saturating_sub(1);
            keep
        });
        while let Some(held) = self.take(hca) {
            let _ = self.held.push_within_capacity(held);
        }
    }

    /// Drops the CQEs of a QP from `held`.
    fn drop_held(&mut self, qpn: u32) {
        let mut index = 0;
        while let Some(held) = self.held.get(index).copied() {
            if u32::from_le(held.cqe.qp_num) == qpn {
                let _ = self.held.remove(index);
                self.recycle(held.buffer);
            } else {
                index += 1;
            }
        }
        self.lease.kick();
    }

    fn has_completions(&mut self) -> bool {
        self.polled < self.held.len() || self.lease.has_used()
    }
}

/// Destroys a CQ that was only half made.
fn undo(hca: &Arc<Hca>, cqn: u32) {
    let request = bindings::virtio_rdma_cmd_destroy_cq { cqn: cqn.to_le() };
    // There is nothing to do about it, and the first error is the one to tell.
    let _ = hca.execute_destroy::<cmd::DestroyCq>(&request);
}

/// Takes the CQ's queue and fills it with buffers.
fn new_ring(hca: &Arc<Hca>, cqn: u32, attr: &ib::CqInitAttr) -> Result<Ring> {
    let memory = hca.alloc(attr.cqe as usize * CQE_SIZE)?;
    let held = KVec::with_capacity(attr.cqe as usize, GFP_KERNEL)?;
    let lease = hca.lease(hca.config().cq_queue(cqn), memory)?;
    let mut ring = Ring {
        lease,
        held,
        polled: 0,
        armed: 0,
    };
    ring.lease.set_affinity(attr.comp_vector);
    for buffer in 0..attr.cqe {
        ring.recycle(buffer);
    }
    ring.lease.kick();
    Ok(ring)
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

        let request = bindings::virtio_rdma_cmd_create_cq {
            cqe: attr.cqe.to_le(),
        };
        let cqn = u32::from_le(hca.execute::<cmd::CreateCq>(&request)?.cqn);
        let ring = new_ring(hca, cqn, attr).inspect_err(|_| undo(hca, cqn))?;
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
        let request = bindings::virtio_rdma_cmd_destroy_cq {
            cqn: self.cqn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyCq>(&request)
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
        let mut taken = 0;

        while !wcs.is_full() {
            let Some(cqe) = ring.next(hca) else {
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
        self.hca.control().notify(self.cqn, ring.armed);
        report_missed && ring.has_completions()
    }
}
