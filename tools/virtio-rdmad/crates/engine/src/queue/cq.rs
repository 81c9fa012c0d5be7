// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Completion queues.

use std::time::Instant;

use abi::{
    virtio_rdma_cqe, virtio_rdma_ring_cqe, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION,
    VIRTIO_RDMA_NOTIFY_SOLICITED,
};
use memory::{GuestMemory, Pages};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::cq_ring::{CqRing, CqRingImage, Due, NotPlaced};
use super::users::{Failing, Users};
use super::virtqueue::Virtqueue;
use crate::base::counters::{Counter, Stats};
use crate::base::host::Clock;
use crate::base::image::{require, Wrong};
use crate::base::limits::Limits;
use crate::base::wc_status::WcStatus;

/// A completion, in the form that says most.
pub(crate) type Cqe = virtio_rdma_ring_cqe;

/// Returns the part of a completion that a virtqueue carries.
fn short(cqe: &Cqe) -> virtio_rdma_cqe {
    virtio_rdma_cqe {
        wr_id: cqe.wr_id,
        status: cqe.status,
        opcode: cqe.opcode,
        vlan_id: cqe.vlan_id,
        vendor_err: cqe.vendor_err,
        byte_len: cqe.byte_len,
        ex: cqe.ex,
        qp_num: cqe.qp_num,
        src_qp: cqe.src_qp,
        wc_flags: cqe.wc_flags,
        pkey_index: cqe.pkey_index,
        sl: cqe.sl,
        port_num: cqe.port_num,
    }
}

/// The queue of the completions of a CQ.
pub(crate) enum CqQueue {
    /// A virtqueue, or the place for one. It stays when the CQ goes.
    Virtqueue(Virtqueue),
    /// A ring in guest memory.
    Ring(Box<CqRing>),
}

impl Default for CqQueue {
    fn default() -> Self {
        Self::Virtqueue(Virtqueue::default())
    }
}

/// The completions that a CQ signals, in order of width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Armed {
    /// The CQ signals nothing.
    #[default]
    No,
    /// The CQ signals solicited completions and errors.
    Solicited,
    /// The CQ signals every completion.
    Next,
}

/// A completion could not be placed; the CQ is in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow;

/// A CQ, or the place for one.
#[derive(Default)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Cq {
    queue: CqQueue,
    live: bool,
    error: bool,
    armed: Armed,
    /// A CQE was placed since the last signal.
    placed: bool,
    /// A CQE that is solicited, or an error, was placed since then.
    placed_solicited: bool,
    /// QPs and SRQs that complete here.
    pub users: Users,
}

/// The image of a CQ.
#[derive(Serialize, Deserialize)]
pub(crate) struct CqImage {
    ring: Option<CqRingImage>,
    error: bool,
    armed: Armed,
    placed: bool,
    placed_solicited: bool,
    failing: Failing,
}

impl CqImage {
    /// Returns whether the CQ is on a ring.
    pub fn is_ring(&self) -> bool {
        self.ring.is_some()
    }
}

impl Cq {
    /// Returns the image, if there is a CQ in this place.
    pub fn save(&self, now: Instant) -> Option<CqImage> {
        let &Self { error, armed, placed, placed_solicited, .. } = self;
        let ring = match &self.queue {
            CqQueue::Virtqueue(_) => None,
            CqQueue::Ring(ring) => Some(ring.save(now)),
        };
        let failing = self.users.save();
        self.live.then_some(CqImage { ring, error, armed, placed, placed_solicited, failing })
    }

    /// Makes the CQ of an image in this place, whose ring has `room` pages at most. Those that use it are not in the
    /// image.
    pub fn load(
        &mut self,
        image: CqImage,
        memory: &GuestMemory,
        limits: &Limits,
        room: usize,
        now: Instant,
    ) -> Result<(), Wrong> {
        let CqImage { ring, error, armed, placed, placed_solicited, failing } = image;
        require(!self.live, "there are two of them")?;
        if let Some(ring) = ring {
            self.queue = CqQueue::Ring(Box::new(ring.load(memory, limits, room, now)?));
        }
        self.users = Users::load(failing);
        (self.live, self.error, self.armed) = (true, error, armed);
        (self.placed, self.placed_solicited) = (placed, placed_solicited);
        Ok(())
    }

    /// Returns the virtqueue, unless the CQ is a ring.
    pub fn virtqueue(&mut self) -> Option<&mut Virtqueue> {
        match &mut self.queue {
            CqQueue::Virtqueue(queue) => Some(queue),
            CqQueue::Ring(_) => None,
        }
    }

    /// Returns the ring, unless the CQ is a virtqueue.
    pub fn ring(&mut self) -> Option<&mut CqRing> {
        match &mut self.queue {
            CqQueue::Virtqueue(_) => None,
            CqQueue::Ring(ring) => Some(ring),
        }
    }

    /// Returns the descriptors of the virtqueue; 0 if the CQ has no virtqueue.
    pub fn size(&self) -> u16 {
        match &self.queue {
            CqQueue::Virtqueue(queue) => queue.size(),
            CqQueue::Ring(_) => 0,
        }
    }

    /// Makes a CQ in this place, on its virtqueue or on a ring.
    pub fn create(&mut self, ring: Option<CqRing>) {
        self.live = true;
        self.error = false;
        self.armed = Armed::No;
        self.placed = false;
        self.placed_solicited = false;
        self.users = Users::default();
        if let Some(ring) = ring {
            self.queue = CqQueue::Ring(Box::new(ring));
        }
        if let CqQueue::Virtqueue(queue) = &mut self.queue {
            // Buffers that the driver adds are found when they are needed.
            queue.disable_notify();
        }
    }

    /// Ends the CQ: gives its buffers back, and touches its ring no more.
    pub fn destroy(&mut self) {
        self.live = false;
        match &mut self.queue {
            CqQueue::Virtqueue(queue) => queue.drain(),
            CqQueue::Ring(_) => self.queue = CqQueue::default(),
        }
    }

    /// Follows a change of the memory map with the ring, if there is one, whose pages are `None` if
    /// they are not in memory; `Err` if the CQ has failed by that.
    pub fn set_pages(&mut self, pages: Option<Pages>) -> Result<(), Overflow> {
        let CqQueue::Ring(ring) = &mut self.queue else { return Ok(()) };
        let in_memory = pages.is_some();
        ring.set_pages(pages);
        if in_memory || self.error {
            return Ok(());
        }
        self.fail();
        Err(Overflow)
    }

    /// Returns whether there is a CQ in this place.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// Returns whether the CQ is in error.
    pub fn is_in_error(&self) -> bool {
        self.error
    }

    /// Puts the CQ into error, and all that use it behind it.
    fn fail(&mut self) {
        self.error = true;
        self.users.fail();
    }

    /// Places a CQE. A virtqueue signals if it is armed for it; a ring waits for
    /// `take_event`. An error is returned once; later CQEs of a CQ in error are
    /// dropped.
    #[inline]
    pub fn complete(&mut self, cqe: &Cqe, solicited: bool, stats: &Stats) -> Result<(), Overflow> {
        if !self.live || self.error {
            return Ok(());
        }
        let wakes = solicited || cqe.status != WcStatus::Success.to_abi();
        let result = match &mut self.queue {
            CqQueue::Ring(ring) => ring.place(cqe, wakes).map_err(|why| match why {
                NotPlaced::Overflow => (Counter::CqOverflows, OVERFLOW.into()),
                NotPlaced::Lost => {
                    (Counter::LostRings, "a completion ring is not in memory".into())
                }
            }),
            CqQueue::Virtqueue(queue) => place(queue, &short(cqe)),
        };
        if let Err((counter, detail)) = result {
            self.fail();
            stats.guest_error(counter, detail);
            return Err(Overflow);
        }
        if let CqQueue::Virtqueue(_) = self.queue {
            self.signal_if_armed(wakes);
        }
        Ok(())
    }

    fn signal_if_armed(&mut self, wakes: bool) {
        self.placed = true;
        self.placed_solicited |= wakes;
        let due = match self.armed {
            Armed::No => false,
            Armed::Solicited => wakes,
            Armed::Next => true,
        };
        if due && self.signal() {
            self.armed = Armed::No;
        }
    }

    /// Returns whether the ring's owner wants an event for the CQEs that were placed since this was last
    /// asked.
    pub fn take_event(&mut self, clock: &dyn Clock) -> Due {
        self.ring().map_or(Due::No, |ring| ring.take_event(clock))
    }

    /// Returns whether the event that is held back is due.
    pub fn take_held(&mut self, now: Instant) -> Due {
        self.ring().map_or(Due::No, |ring| ring.take_held(now))
    }

    /// Signals the virtqueue. Returns whether it did: the driver may suppress interrupts, or say that it has taken all
    /// completions.
    fn signal(&mut self) -> bool {
        let CqQueue::Virtqueue(queue) = &self.queue else { return false };
        let signalled = queue.signal_unless_seen();
        if signalled {
            self.placed = false;
            self.placed_solicited = false;
        }
        signalled
    }

    /// Arms the CQ, as REQ_NOTIFY_CQ with valid flags asks, and signals at once if a CQE
    /// of the asked kind was placed since it last did.
    ///
    /// This signal leaves the CQ armed: the driver may have taken all these
    /// CQEs, and then its virtio core drops the interrupt.
    pub fn arm(&mut self, flags: u32) {
        let next = flags & VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION != 0;
        let asked = if next { Armed::Next } else { Armed::Solicited };
        self.armed = self.armed.max(asked);
        let placed = if next { self.placed } else { self.placed_solicited };
        if placed {
            self.signal();
        }
    }
}

/// Puts a CQE into the next buffer of a virtqueue.
fn place(queue: &mut Virtqueue, cqe: &virtio_rdma_cqe) -> Result<(), (Counter, String)> {
    let chain = match queue.pop() {
        Ok(Some(chain)) => chain,
        Ok(None) => return Err((Counter::CqOverflows, OVERFLOW.into())),
        Err(error) => return Err((Counter::BadCompletionBuffer, error.to_string())),
    };
    let bytes = cqe.as_bytes();
    let fits = chain.writable_len() >= bytes.len();
    let written = if fits { chain.write(bytes).unwrap_or(0) } else { 0 };
    queue.give_back(chain.head, written);
    if written == 0 {
        return Err((Counter::BadCompletionBuffer, "a completion buffer is too small".into()));
    }
    Ok(())
}

const OVERFLOW: &str = "a completion queue overflowed";

/// Returns whether REQ_NOTIFY_CQ takes these flags: one kind, or both.
pub(crate) fn valid_notify_flags(flags: u32) -> bool {
    let known = VIRTIO_RDMA_NOTIFY_SOLICITED | VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION;
    flags != 0 && flags & !known == 0
}
