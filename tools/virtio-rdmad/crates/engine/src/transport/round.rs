// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state that the visits of a round share.

use super::batch::CompletionBatch;
use super::hca::Hca;
use super::wire::outbox::Outbox;
use crate::base::budget::{Budget, BURST_BYTES};
use crate::memory::mr_cache::MrCache;

/// A round of visits to the queues of one guest. Only its memory and its stopwatch outlive one call of
/// [`crate::Device::run`].
#[derive(Default)]
pub(crate) struct Round {
    /// The budget of the visit.
    pub budget: Budget,
    /// Bytes since guests were told of completions.
    untold: u64,
    /// The index up to which the ring of the visited queue was emptied, if the queue has a ring.
    pub taken: Option<u32>,
    /// Regions of the HCA that is served.
    pub local: MrCache,
    /// Regions of its peer.
    pub remote: MrCache,
    /// The completion batch.
    pub batch: CompletionBatch,
    /// Packets that leave at the end of the round.
    pub outbox: Outbox,
    /// Whether the packets that are looked into have come into a crowded inbox.
    pub is_crowded: bool,
}

impl Round {
    /// Returns the first round of an HCA.
    pub fn new(hca: &Hca) -> Box<Self> {
        Box::new(Self { local: MrCache::with_helpers(hca.fabric.helpers()), ..Self::default() })
    }

    /// Makes a round that has come to its end one that has not begun.
    pub fn renew(&mut self) {
        self.budget.renew();
        self.untold = 0;
    }

    /// Begins a visit, as [`Budget::begin`].
    pub fn begin(&mut self, most: u32, alone: bool) -> u32 {
        self.taken = None;
        self.budget.begin(most, alone)
    }

    /// Ends a visit. Completions are told with those of the next, unless they have
    /// waited for many bytes.
    pub fn end(&mut self) {
        self.untold += self.budget.end();
        if self.untold >= BURST_BYTES {
            self.untold = 0;
            self.batch.announce();
        }
    }

    /// Ends the use of all regions.
    pub fn release(&mut self) {
        self.local.release();
        self.remote.release();
    }

    /// Ends the round: no region is in use any more, packets leave, and guests are told of completions. Returns the
    /// cost of the round, in nanoseconds.
    pub fn finish(&mut self, hca: &Hca) -> u64 {
        self.release();
        self.outbox.flush(hca);
        self.batch.announce();
        self.batch.settle(&hca.stats);
        self.budget.spent()
    }
}
