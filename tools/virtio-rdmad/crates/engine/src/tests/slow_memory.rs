// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of memory that is not there at once: how long it holds others up.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::*;
use memory::GuestRegion;
use testkit::socket::new_memory;

use super::driver::*;
use crate::base::budget::{cost, Budget};
use crate::{Clock, Counter};

/// A clock by which everything takes long: each look finds that so many nanoseconds have passed.
struct SlowClock(Arc<TestClock>, AtomicU64);

impl Clock for SlowClock {
    fn now(&self) -> Instant {
        let now = self.0.now() + Duration::from_nanos(self.1.load(Ordering::Relaxed));
        self.0.advance_to(now);
        now
    }
}

/// Returns two connected guests, by a clock by which the time between two looks is `step` from now on.
fn pair(step: Duration) -> Pair {
    let clock = TestClock::new();
    let slow = Arc::new(SlowClock(clock.clone(), AtomicU64::new(0)));
    let pair = Pair::by_clock(slow.clone(), clock);
    slow.1.store(step.as_nanos().try_into().unwrap(), Ordering::Relaxed);
    pair
}

/// Posts so many WRITEs of a word, and returns how many of these are done behind each call of [`crate::Device::run`].
fn write(pair: &mut Pair, count: u64) -> Vec<u64> {
    let [a, b] = pair.ends;
    let before = pair.a.device.counter(Counter::WriteMessages);
    for wr_id in 0..count {
        let send = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &send.rdma(DATA, b.key));
    }
    let mut done = Vec::new();
    while done.last() != Some(&count) {
        pair.a.device.run(1000);
        done.push(pair.a.device.counter(Counter::WriteMessages) - before);
    }
    done
}

/// Accesses that take long are not made one behind the other while the peer is locked and other guests wait. The first
/// time, they are found out behind the visit, and later each of them ends the round.
#[test]
fn a_slow_access_ends_the_round() {
    let mut pair = pair(Duration::from_millis(5));
    assert_eq!(write(&mut pair, 40), [40]);
    assert_eq!(write(&mut pair, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    let stalls = |guest: &Guest| guest.device.counter(Counter::Stalls);
    assert_eq!((stalls(&pair.a), stalls(&pair.b)), (9, 9));
}

/// A visit that takes long ends without a slow access, too, and so does the round.
#[test]
fn a_visit_ends_by_the_clock() {
    for (step, messages, is_late) in [(50, 128, false), (101, 96, true), (201, 64, true)] {
        let clock = TestClock::new();
        let slow = SlowClock(clock, AtomicU64::new(step * 1000));
        let clock: Arc<dyn Clock> = Arc::new(slow);
        let mut budget = Budget::default();
        budget.stopwatch.begin(&clock);
        let given = budget.begin(u32::MAX, true);
        while !budget.is_over() {
            budget.spend(8);
        }
        assert_eq!(given - budget.left(), messages, "{step} us between two looks");
        assert_eq!(budget.is_round_over(), is_late);
        assert_eq!(budget.stopwatch.take_stall(), None);
    }
}

/// Nothing changes for rounds that are as short as they should be.
#[test]
fn fast_memory_makes_long_rounds() {
    let mut pair = pair(Duration::from_micros(5));
    assert_eq!(write(&mut pair, 60), [60]);
}

/// The pages of a region are found while it is registered, in steps, unless all of them were found before. Those of all
/// memory are not.
#[test]
fn pages_are_found_before_they_are_used() {
    const AT: u64 = 1 << 42;
    const PAGES: u64 = 1024;
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let file = new_memory(PAGES << 12);
    let region = GuestRegion {
        guest_addr: AT,
        len: PAGES << 12,
        fd: file.as_fd(),
        offset: 0,
        writable: true,
    };
    guest.memory = guest.memory.with_region(&region).unwrap();
    guest.device.set_memory(&guest.memory);
    let pdn = guest.create_pd();
    let work = |guest: &Guest| guest.device.counter(Counter::Work);
    let before = work(&guest);
    guest.get_dma_mr(pdn, ALL).unwrap();
    assert!(work(&guest) - before < 10 * cost::TOUCH);
    let before = work(&guest);
    guest.reg_mr(pdn, AT, PAGES << 12, ALL);
    let taken = work(&guest) - before;
    assert!(taken > PAGES * cost::TOUCH, "{taken}");
    let before = work(&guest);
    guest.reg_mr(pdn, AT, PAGES << 12, ALL);
    assert!(work(&guest) - before < taken / 10);
}
