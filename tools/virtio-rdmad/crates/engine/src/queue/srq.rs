// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shared receive queues (IBA 10.2.9; specification, 13.6).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use abi::{virtio_rdma_qp_ring, virtio_rdma_srq_ring};
use memory::{GuestMemory, Pages};
use serde::{Deserialize, Serialize};

use super::users::{Failing, Users};
use super::wq_ring::{self, Kind, MovingWq, Shape, Sizes, WqRing, WqRingError};
use super::wqe::{receive_entry_len, Popped, ReceiveWqe};
use crate::base::image::{require, Wrong};
use crate::base::limits::{Limits, MAX_SGE};
use crate::memory::page_list::{check_region, find_pages, Range};

// `Shape::check` keeps entries out of the head of either kind of region.
const _: () = assert!(size_of::<virtio_rdma_srq_ring>() == size_of::<virtio_rdma_qp_ring>());

/// Why an SRQ gives no more work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SrqError {
    /// Its producer went wrong, or its ring is not in memory.
    #[error(transparent)]
    Ring(#[from] WqRingError),
    /// The SRQ is in error already.
    #[error("the SRQ is in error")]
    InError,
}

/// What an SRQ for XRC has besides.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct XrcSrq {
    /// Its domain.
    pub xrcdn: u32,
    /// The CQ of its completions.
    pub cq: u16,
}

/// An SRQ.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Srq {
    config: SrqConfig,
    max_wr: u32,
    ring: WqRing,
    region: Box<[Range]>,
    /// SRQ_LIMIT_REACHED is due when fewer work requests than this wait; 0: never.
    limit: u32,
    /// No work request is taken any more.
    in_error: bool,
    /// DESTROY_SRQ is under way: no target receives from here any more.
    ends: bool,
    /// QPs that receive from here.
    pub users: Users,
    /// The owner was asked for a doorbell.
    asleep: bool,
    /// Places of the QPs that wait for a work request.
    waiting: BTreeSet<u16>,
    /// Places of those that waited, and are to look again.
    roused: BTreeSet<u16>,
    /// Work requests that QPs took and did not complete before they were reset or
    /// destroyed. They are taken first, so there are never more than QPs.
    returned: VecDeque<ReceiveWqe>,
}

/// The ring that an SRQ moves to.
pub(crate) struct MovingSrq {
    region: Box<[Range]>,
    ring: MovingWq,
}

impl MovingSrq {
    /// Returns what the region of the new ring is made of.
    pub fn region(&self) -> &[Range] {
        &self.region
    }
}

/// What an SRQ is created with.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SrqConfig {
    /// Its protection domain.
    pub pdn: u32,
    /// What makes it one for XRC.
    pub xrc: Option<XrcSrq>,
    /// SGEs of a work request.
    pub max_sge: usize,
}

/// The state of an SRQ. The QPs that wait for a work request are not in it: a requester that waits asks its peer once
/// more after loading, and so the QP of that peer waits again.
#[derive(Serialize, Deserialize)]
pub(crate) struct Saved {
    config: SrqConfig,
    max_wr: u32,
    ring: wq_ring::Saved,
    region: Vec<Range>,
    limit: u32,
    in_error: bool,
    ends: bool,
    failing: Failing,
    asleep: bool,
    returned: Vec<ReceiveWqe>,
}

impl Saved {
    /// Returns the SRQ, whose region has `room` pages at most, and which `qps` QPs may use.
    pub fn load(
        self,
        memory: &GuestMemory,
        limits: &Limits,
        room: usize,
        qps: u16,
    ) -> Result<Srq, Wrong> {
        let Self { config, max_wr, ring, region, limit, in_error, ends, .. } = self;
        require(config.max_sge <= MAX_SGE, "its work requests have too many SGEs")?;
        require(limit <= max_wr && max_wr <= limits.ring_wr, "its limit is beyond its size")?;
        require(self.returned.len() <= qps.into(), "too many work requests were given back")?;
        let len = check_region(&region, room)?;
        let pages = ring.has_pages().then(|| find_pages(memory, &region)).transpose()?;
        let entry = receive_entry_len(config.max_sge);
        let sizes = Sizes { least: 1, most: limits.ring_wr, entry };
        let ring = ring.load(Kind::Shared, sizes, len, pages.map(Arc::new).as_ref())?;
        Ok(Srq {
            config,
            max_wr,
            ring,
            region: region.into(),
            limit,
            in_error,
            ends,
            users: Users::load(self.failing),
            asleep: self.asleep,
            waiting: BTreeSet::new(),
            roused: BTreeSet::new(),
            returned: self.returned.into(),
        })
    }
}

impl Srq {
    /// Returns the state. Those that use the SRQ are not in it.
    pub fn save(&self) -> Saved {
        Saved {
            config: self.config,
            max_wr: self.max_wr,
            ring: self.ring.save(),
            region: self.region.to_vec(),
            limit: self.limit,
            in_error: self.in_error,
            ends: self.ends,
            failing: self.users.save(),
            asleep: self.asleep,
            returned: self.returned.iter().cloned().collect(),
        }
    }

    /// Makes an SRQ whose ring has this shape, in a region of these pages.
    pub fn new(config: SrqConfig, pages: Pages, region: Box<[Range]>, shape: Shape) -> Self {
        Self {
            config,
            max_wr: shape.depth,
            ring: WqRing::new(Arc::new(pages), shape, Kind::Shared),
            region,
            limit: 0,
            in_error: false,
            ends: false,
            users: Users::default(),
            asleep: false,
            waiting: BTreeSet::new(),
            roused: BTreeSet::new(),
            returned: VecDeque::new(),
        }
    }

    /// Takes the next work request into `wqe`, for the QP in place `slot`. If there
    /// is none and the QP `waits`, its owner is asked for a doorbell, which
    /// rouses the QP.
    pub fn take(
        &mut self,
        slot: u16,
        waits: bool,
        wqe: &mut ReceiveWqe,
    ) -> Result<Popped, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        if let Some(returned) = self.returned.pop_front() {
            *wqe = returned;
            self.stop_waiting(slot);
            return Ok(Popped::Taken);
        }
        // The owner is asked once, whatever the index does meanwhile.
        let mut asked = false;
        loop {
            if let Some((index, entry)) = self.ring.pop()? {
                let read = wqe.read_entry(index, entry, self.config.max_sge);
                self.ring.publish_consumer();
                self.stop_waiting(slot);
                return Ok(read.into());
            }
            if asked || !waits {
                return Ok(Popped::Empty);
            }
            asked = true;
            self.asleep = true;
            self.waiting.insert(slot);
            if !self.ring.sleep() {
                return Ok(Popped::Empty);
            }
        }
    }

    /// Notes that the QP in place `slot` waits no longer. The owner is asked for doorbells as long as
    /// another QP waits, because a work request that it posts without one would wake nobody.
    fn stop_waiting(&mut self, slot: u16) {
        self.waiting.remove(&slot);
        if self.asleep && self.waiting.is_empty() {
            self.asleep = false;
            self.ring.wake_up();
        }
    }

    /// Has the QPs that wait look again, each once; they wait again if they must. Returns `false`, and
    /// does nothing, while others that waited before are yet to look.
    pub fn rouse(&mut self) -> bool {
        let is_free = self.roused.is_empty();
        if is_free {
            std::mem::swap(&mut self.waiting, &mut self.roused);
        }
        is_free
    }

    /// Returns the next QP that is to look again.
    pub fn next_roused(&mut self) -> Option<u16> {
        self.roused.pop_first()
    }

    /// Begins to move to another ring, in a region that was found; `None` if the work requests that
    /// wait, or the limit, do not fit there.
    pub fn begin_resize(
        &mut self,
        pages: Pages,
        region: Box<[Range]>,
        shape: Shape,
    ) -> Result<Option<MovingSrq>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        if self.limit > shape.depth {
            return Ok(None);
        }
        let ring = self.ring.begin_move(pages, shape, receive_entry_len(self.config.max_sge))?;
        Ok(ring.map(|ring| MovingSrq { region, ring }))
    }

    /// Moves up to `most` work requests to the other ring, and returns how many; `None` if they do
    /// not fit there, or one of the two rings is not in memory.
    pub fn move_some(&self, moving: &mut MovingSrq, most: u32) -> Option<u32> {
        self.ring.move_some(&mut moving.ring, most)
    }

    /// Goes on in the other ring, which has this shape, and returns how many work requests were
    /// moved. `None`, and nothing is changed, if they do not fit there.
    pub fn end_resize(&mut self, moving: MovingSrq, shape: Shape) -> Result<Option<u32>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        let MovingSrq { region, ring } = moving;
        let moved = self.ring.end_move(ring)?;
        if moved.is_some() {
            (self.max_wr, self.region) = (shape.depth, region);
        }
        Ok(moved)
    }

    /// Asks the owner for a doorbell in the new ring, if it was asked in the old one; whether there
    /// is a work request already.
    pub fn sleep_again(&mut self) -> bool {
        self.asleep && self.ring.sleep()
    }

    /// Follows a change of the memory map; `None`: the ring is not in memory.
    pub fn set_pages(&mut self, pages: Option<Arc<Pages>>) {
        self.ring.set_pages(pages);
    }

    /// Returns what the SRQ was created with.
    pub fn config(&self) -> &SrqConfig {
        &self.config
    }

    /// Returns what its region is made of.
    pub fn region(&self) -> &[Range] {
        &self.region
    }

    /// Returns how many work requests it holds at most.
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Returns below how many work requests SRQ_LIMIT_REACHED is due; 0: never.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns whether the SRQ is in error.
    pub fn is_in_error(&self) -> bool {
        self.in_error
    }

    /// Sets the limit; whether SRQ_LIMIT_REACHED is due at once.
    pub fn set_limit(&mut self, limit: u32) -> bool {
        self.limit = limit;
        self.take_limit_reached()
    }

    /// Begins the end of the SRQ, if it is one for XRC that no QP uses; whether it is. From then on
    /// no target finds it.
    pub fn begin_end(&mut self) -> bool {
        self.ends = self.config.xrc.is_some() && self.users.is_empty();
        self.ends
    }

    /// Returns PD and CQ, if this is an SRQ for XRC of this domain.
    pub fn of_domain(&self, xrcdn: u32) -> Option<(u32, u16)> {
        let xrc = self.config.xrc.filter(|xrc| xrc.xrcdn == xrcdn && !self.ends)?;
        Some((self.config.pdn, xrc.cq))
    }

    /// Puts the SRQ into error, and its users behind it; whether it was not in error before.
    pub fn fail(&mut self) -> bool {
        let first = !std::mem::replace(&mut self.in_error, true);
        if first {
            self.users.fail();
        }
        first
    }

    /// Notes that the QP in place `slot` takes no more work requests: it waits no longer, and another QP takes
    /// what it left unfinished. Returns whether one waits for that.
    pub fn leave(&mut self, slot: u16, unfinished: Option<ReceiveWqe>) -> bool {
        self.returned.extend(unfinished);
        self.stop_waiting(slot);
        !self.returned.is_empty() && !self.waiting.is_empty()
    }

    /// Returns how many work requests wait to be taken.
    pub fn left(&self) -> u32 {
        self.ring.waiting().saturating_add(self.returned.len() as u32)
    }

    /// Returns whether SRQ_LIMIT_REACHED is due; it is so once.
    pub fn take_limit_reached(&mut self) -> bool {
        let reached = self.limit != 0 && self.left() < self.limit;
        if reached {
            self.limit = 0;
        }
        reached
    }
}
