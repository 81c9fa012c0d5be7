// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mappings of guest memory in the process, and the guests that have them.
//!
//! The kernel limits the mappings of a process, so all guests share one [`Pool`]. A guest can always have
//! [`GUARANTEED`] mappings. The other mappings go to the guests that ask first, up to [`MAX_REGIONS`] for each guest.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::sigbus::MAX_MAPPINGS;

/// Most regions of all guests together. This is half of the mappings that a process can have: the rest is for the
/// process itself, for mappings that the handler of SIGBUS splits, and for what an earlier process has had.
pub const ALL_REGIONS: usize = MAX_MAPPINGS / 2;
/// Most regions of one guest.
pub const MAX_REGIONS: usize = 1024;
/// The number of regions that a guest can have, whatever other guests have. A VMM without hot-plugged memory has fewer.
pub const GUARANTEED: usize = 16;

/// The regions that all guests of a process can have.
#[derive(Debug)]
pub struct Pool {
    total: usize,
    /// The number of regions that are taken: those that guests are guaranteed, and those that guests have beyond these.
    taken: AtomicUsize,
}

impl Pool {
    /// Makes a pool of `total` regions, but not more than [`ALL_REGIONS`].
    #[must_use]
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total: total.min(ALL_REGIONS), taken: AtomicUsize::new(0) })
    }

    /// Returns the number of regions that all guests together can have.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of regions that are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.total.saturating_sub(self.taken.load(Ordering::Relaxed))
    }

    /// Reserves the regions that one more guest is guaranteed. Returns `None` if fewer are left.
    #[must_use]
    pub fn share(self: &Arc<Self>) -> Option<Share> {
        self.take(GUARANTEED).then(|| Share::new(self.clone()))
    }

    /// Reserves the regions that a guest is guaranteed, even if fewer are left, because the process has the guest
    /// anyway: its configuration names it, or an earlier process has served it.
    #[must_use]
    pub fn share_anyway(self: &Arc<Self>) -> Share {
        self.taken.fetch_add(GUARANTEED, Ordering::Relaxed);
        Share::new(self.clone())
    }

    /// Takes so many regions. Returns whether they were left.
    fn take(&self, count: usize) -> bool {
        let add = |taken: usize| taken.checked_add(count).filter(|taken| *taken <= self.total);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give(&self, count: usize) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
    }
}

/// The regions of one guest. Clones are of the same guest. The guaranteed regions go back to the pool with the last
/// clone.
#[derive(Clone, Debug)]
pub struct Share(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: Arc<Pool>,
    /// The number of regions that the guest has.
    used: Mutex<usize>,
}

/// The reason why a guest cannot have one more region.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ShareError {
    /// The guest has as many as one guest can have.
    #[error("the guest has {MAX_REGIONS} regions, which is the limit")]
    Guest,
    /// The guest has its guaranteed regions, and other guests have the rest.
    #[error("the guest has {used} regions, and all guests together have the {total} that the process can have")]
    Pool {
        /// The number of regions that the guest has.
        used: usize,
        /// The number of regions that all guests can have.
        total: usize,
    },
}

impl Share {
    fn new(pool: Arc<Pool>) -> Self {
        Self(Arc::new(Inner { pool, used: Mutex::new(0) }))
    }

    /// Returns the number of regions that the guest has.
    #[must_use]
    pub fn used(&self) -> usize {
        *self.0.used()
    }

    /// Takes one more region for the guest.
    pub(crate) fn take(&self) -> Result<Place, ShareError> {
        let mut used = self.0.used();
        if *used >= MAX_REGIONS {
            return Err(ShareError::Guest);
        }
        if *used >= GUARANTEED && !self.0.pool.take(1) {
            return Err(ShareError::Pool { used: *used, total: self.0.pool.total });
        }
        *used += 1;
        Ok(Place(self.clone()))
    }

    /// Takes one more region that the guest has had in an earlier process, even if none is left.
    pub(crate) fn take_again(&self) -> Place {
        let mut used = self.0.used();
        if *used >= GUARANTEED {
            self.0.pool.taken.fetch_add(1, Ordering::Relaxed);
        }
        *used += 1;
        Place(self.clone())
    }
}

impl Default for Share {
    /// Returns the share of a guest that has a pool for itself.
    fn default() -> Self {
        Pool::new(ALL_REGIONS).share_anyway()
    }
}

impl Inner {
    fn used(&self) -> MutexGuard<'_, usize> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pool.give(GUARANTEED);
    }
}

/// One region that a guest has. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Place(Share);

impl Drop for Place {
    fn drop(&mut self) {
        let mut used = self.0 .0.used();
        *used -= 1;
        if *used >= GUARANTEED {
            self.0 .0.pool.give(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(share: &Share, count: usize) -> Vec<Place> {
        (0..count).map(|_| share.take().unwrap()).collect()
    }

    #[test]
    fn a_guest_always_has_what_is_guaranteed() {
        let pool = Pool::new(3 * GUARANTEED + 5);
        let [a, b, c] = [(); 3].map(|()| pool.share().unwrap());
        assert!(pool.share().is_none(), "a fourth guest has no share");
        let many = take(&a, GUARANTEED + 5);
        let refused = ShareError::Pool { used: GUARANTEED + 5, total: 3 * GUARANTEED + 5 };
        assert_eq!(a.take().err(), Some(refused));
        let kept = [take(&b, GUARANTEED), take(&c, GUARANTEED)];
        assert!(b.take().is_err());
        drop(many);
        assert_eq!((a.used(), b.used(), pool.left()), (0, GUARANTEED, 5));
        drop(take(&b, 5));
        drop((a, kept));
        assert_eq!(pool.left(), GUARANTEED + 5);
    }

    #[test]
    fn one_guest_does_not_have_everything() {
        let pool = Pool::new(ALL_REGIONS);
        let guest = pool.share().unwrap();
        let _all = take(&guest, MAX_REGIONS);
        assert_eq!(guest.take().err(), Some(ShareError::Guest));
        assert_eq!(pool.left(), ALL_REGIONS - MAX_REGIONS);
    }

    /// A guest has again all regions that it had in an earlier process, although other guests have come meanwhile.
    #[test]
    fn what_an_earlier_process_had_is_never_refused() {
        let pool = Pool::new(GUARANTEED);
        let _other = pool.share().unwrap();
        let guest = pool.share_anyway();
        let again: Vec<_> = (0..=MAX_REGIONS).map(|_| guest.take_again()).collect();
        assert_eq!((guest.used(), pool.left()), (MAX_REGIONS + 1, 0));
        assert_eq!(guest.take().err(), Some(ShareError::Guest));
        drop((again, guest));
        assert_eq!((pool.left(), pool.share().is_some()), (0, false));
    }
}
