// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice of a worker for each guest, so that all workers have about as much to do.
//!
//! A guest gets the worker with the fewest guests when its VMM connects. That is uneven after other guests have gone,
//! and says nothing of what guests do. So the main thread looks once in a [`PERIOD`] while a worker has more than one
//! guest, and moves a guest, or exchanges two:
//!
//! * If a worker has at least two guests more than another one, the first worker gives the other one a guest.
//! * Otherwise, if the worker with the highest load and the one with the lowest can share their loads in a better way,
//!   the first one gives the other one a guest. It gets an idle one back if it would have fewer guests otherwise. The
//!   higher load of the two has to become lower by [`GAIN`].
//!
//! The load of a guest is the part of a processor that its turns with work take, as a mean over the last few seconds.
//! The second rule leaves a guest alone that was moved in the last [`REST`] looks. So no guest goes back and forth:
//! each move by the first rule makes the numbers of guests more even, each move by the second one makes the highest
//! load lower, and a load that changes all the time moves a guest once in ten seconds at most.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::guest::mailbox::{Mailbox, Order};
use crate::guest::Guest;

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// A whole processor, in the unit of loads.
const PROCESSOR: u32 = 1000;

/// The least amount by which the higher of two loads has to become lower.
const GAIN: u32 = PROCESSOR / 5;

/// The weight of the newest load in the mean is 1 in this many.
const WEIGHT: u32 = 4;

/// The number of looks for which a guest that was moved stays where it is.
const REST: u32 = 10;

/// The state of a guest at the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The time that its turns with work had taken.
    work: Duration,
    /// Its mean load.
    load: u32,
    /// The number of looks for which it stays where it is.
    rest: u32,
}

/// A guest, where it is, and its load.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Placed {
    /// Index of the guest.
    guest: u32,
    /// Index of its worker.
    worker: usize,
    load: u32,
    /// Whether it was moved not long ago.
    rests: bool,
}

/// Evens out the load of workers. The main thread has it.
pub struct Balance {
    workers: Arc<[Mailbox]>,
    /// The time of the last look, if there was a guest to move.
    looked: Option<Instant>,
    /// The guests at the last look, by index.
    seen: HashMap<u32, Seen>,
}

impl Balance {
    /// Makes the balance of these workers, which has not looked yet.
    pub fn new(workers: Arc<[Mailbox]>) -> Self {
        Self { workers, looked: None, seen: HashMap::new() }
    }

    /// Looks at the guests, if it is time, and has workers hand guests to others. Returns how long it is until the next
    /// look; `None` if there is nothing to move.
    pub fn turn(&mut self, guests: &[Arc<Guest>], now: Instant) -> Option<Duration> {
        let is_shared = self.workers.iter().any(|worker| worker.guests() > 1);
        if self.workers.len() < 2 || !is_shared {
            self.looked = None;
            return None;
        }
        let passed = self.looked.map(|looked| now.saturating_duration_since(looked));
        if let Some(left) = passed.and_then(|passed| PERIOD.checked_sub(passed)) {
            if !left.is_zero() {
                return Some(left);
            }
        }
        self.looked = Some(now);
        let placed = self.look(guests, passed);
        let there: Vec<_> =
            (0..self.workers.len()).filter(|worker| !self.workers[*worker].is_retired()).collect();
        for Move { guest, from, to } in plan(&there, &placed) {
            // A worker that has just retired has given its guests away.
            let _ = self.workers[from].order(Order::SendAway(guest, to));
            self.seen.entry(guest).or_default().rest = REST;
        }
        Some(PERIOD)
    }

    /// Measures the loads since the last look, if there was one.
    fn look(&mut self, guests: &[Arc<Guest>], passed: Option<Duration>) -> Vec<Placed> {
        let mut before = std::mem::take(&mut self.seen);
        let mut placed = Vec::new();
        for guest in guests {
            let Some(worker) = guest.link.worker() else { continue };
            let work = guest.work();
            let mut seen = before.remove(&guest.index).unwrap_or(Seen { work, ..Seen::default() });
            if let Some(passed) = passed {
                let load = share(work.saturating_sub(seen.work), passed);
                seen.load = (seen.load * (WEIGHT - 1) + load) / WEIGHT;
                seen.rest = seen.rest.saturating_sub(1);
            } else {
                seen.load = 0;
            }
            seen.work = work;
            self.seen.insert(guest.index, seen);
            let (load, rests) = (seen.load, seen.rest != 0);
            placed.push(Placed { guest: guest.index, worker, load, rests });
        }
        placed
    }
}

/// Returns the part of a processor that this work in this time is.
fn share(work: Duration, time: Duration) -> u32 {
    let thousandths = work.as_nanos() * u128::from(PROCESSOR) / time.as_nanos().max(1);
    u32::try_from(thousandths).unwrap_or(PROCESSOR).min(PROCESSOR)
}

/// A guest that goes from one worker to another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Move {
    /// Index of the guest.
    guest: u32,
    /// Index of the worker that has it.
    from: usize,
    /// Index of the other worker.
    to: usize,
}

/// The guests of one worker.
struct Share {
    worker: usize,
    guests: Vec<Placed>,
    load: u32,
}

/// Returns which of the guests that are placed so go from one of these workers to another one.
fn plan(workers: &[usize], placed: &[Placed]) -> Vec<Move> {
    let share = |&worker: &usize| {
        let guests: Vec<_> =
            placed.iter().filter(|guest| guest.worker == worker).copied().collect();
        Share { worker, load: guests.iter().map(|guest| guest.load).sum(), guests }
    };
    let shares: Vec<_> = workers.iter().map(share).collect();
    by_number(&shares).or_else(|| by_load(&shares)).unwrap_or_default()
}

/// Makes numbers of guests more even.
fn by_number(shares: &[Share]) -> Option<Vec<Move>> {
    let size = |share: &&Share| (share.guests.len(), share.load);
    let (from, to) = (shares.iter().max_by_key(size)?, shares.iter().min_by_key(size)?);
    if from.guests.len() < to.guests.len() + 2 {
        return None;
    }
    let higher = |guest: &&Placed| (from.load - guest.load).max(to.load + guest.load);
    let guest = from.guests.iter().min_by_key(|guest| (higher(guest), guest.load))?;
    Some(vec![to_share(guest, to)])
}

/// Makes loads more even, where numbers of guests are even.
fn by_load(shares: &[Share]) -> Option<Vec<Move>> {
    let from = shares.iter().max_by_key(|share| share.load)?;
    let to = shares.iter().min_by_key(|share| (share.load, Reverse(share.guests.len())))?;
    let may_move = |guest: &&Placed| !guest.rests;
    let back = if from.guests.len() > to.guests.len() {
        None
    } else {
        Some(to.guests.iter().filter(may_move).min_by_key(|guest| guest.load)?)
    };
    let returned = back.map_or(0, |guest| guest.load);
    let higher =
        |guest: &&Placed| (from.load - guest.load + returned).max(to.load + guest.load - returned);
    let guest = from.guests.iter().filter(may_move).min_by_key(higher)?;
    if higher(&guest) + GAIN > from.load {
        return None;
    }
    let back = back.map(|back| to_share(back, from));
    Some(std::iter::once(to_share(guest, to)).chain(back).collect())
}

fn to_share(guest: &Placed, to: &Share) -> Move {
    Move { guest: guest.guest, from: guest.worker, to: to.worker }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::events::Events;
    use crate::guest::guests::{Arriving, Guests};

    /// Returns guests with these loads for each worker, numbered from 0 on.
    fn place(loads: &[&[u32]]) -> Vec<Placed> {
        let workers = loads.iter().enumerate();
        let all = workers.flat_map(|(worker, loads)| loads.iter().map(move |load| (worker, *load)));
        let placed = (0..).zip(all).map(|(guest, (worker, load))| Placed {
            guest,
            worker,
            load,
            rests: false,
        });
        placed.collect()
    }

    /// Makes moves until there are no more of them, and returns how many there were.
    fn settle(workers: usize, placed: &mut [Placed]) -> usize {
        let workers: Vec<_> = (0..workers).collect();
        for moves in 0.. {
            let planned = plan(&workers, placed);
            if planned.is_empty() {
                return moves;
            }
            assert!(moves < 2 * placed.len(), "guests are moved back and forth");
            for Move { guest, from, to } in planned {
                let moved = placed.iter_mut().find(|placed| placed.guest == guest).unwrap();
                assert_eq!(moved.worker, from);
                moved.worker = to;
            }
        }
        unreachable!()
    }

    /// Returns the loads of each worker, sorted.
    fn loads(workers: usize, placed: &[Placed]) -> Vec<Vec<u32>> {
        let of = |worker| {
            let mut loads: Vec<_> =
                placed.iter().filter(|placed| placed.worker == worker).map(|p| p.load).collect();
            loads.sort_unstable();
            loads
        };
        (0..workers).map(of).collect()
    }

    #[test]
    fn numbers_of_guests_are_evened_out() {
        let mut placed = place(&[&[0, 0, 0, 0, 0, 0], &[], &[0]]);
        assert_eq!(settle(3, &mut placed), 3);
        let numbers: Vec<_> = loads(3, &placed).iter().map(Vec::len).collect();
        assert_eq!(numbers, [3, 2, 2]);
    }

    #[test]
    fn busy_guests_do_not_share_a_worker_while_another_one_is_idle() {
        type Loads = &'static [&'static [u32]];
        let cases: [(Loads, Loads); 4] = [
            (&[&[500, 500], &[0]], &[&[500], &[0, 500]]),
            (&[&[500, 500], &[0, 0]], &[&[0, 500], &[0, 500]]),
            (&[&[500, 500], &[0, 0, 0]], &[&[0, 500], &[0, 0, 500]]),
            (&[&[500, 500], &[]], &[&[500], &[500]]),
        ];
        for (before, after) in cases {
            let mut placed = place(before);
            settle(2, &mut placed);
            assert_eq!(loads(2, &placed), after, "{before:?}");
        }
    }

    #[test]
    fn what_gains_little_stays() {
        for stays in
            [&[&[300, 400][..], &[600]][..], &[&[190, 190], &[0]], &[&[1000], &[0]], &[&[], &[]]]
        {
            assert_eq!(settle(2, &mut place(stays)), 0, "{stays:?}");
        }
    }

    #[test]
    fn a_guest_that_was_moved_rests() {
        let mut placed = place(&[&[500, 500], &[0]]);
        placed[0].rests = true;
        assert_eq!(plan(&[0, 1], &placed), [Move { guest: 1, from: 0, to: 1 }]);
        placed[1].rests = true;
        assert_eq!(plan(&[0, 1], &placed), []);
    }

    /// Whatever the loads are, moves come to an end, and the numbers of guests are even.
    #[test]
    fn moves_come_to_an_end() {
        let mut state = 1_u32;
        let mut random = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for _ in 0..500 {
            let workers = 1 + random(5) as usize;
            let mut placed: Vec<_> = (0..random(20))
                .map(|guest| Placed {
                    guest,
                    worker: random(5) as usize % workers,
                    load: random(2) * random(PROCESSOR),
                    rests: false,
                })
                .collect();
            settle(workers, &mut placed);
            let loads = loads(workers, &placed);
            let sizes = loads.iter().map(Vec::len);
            assert!(sizes.clone().max().unwrap() <= sizes.min().unwrap() + 1, "{loads:?}");
        }
    }

    /// Two busy guests of one worker are measured, one of them is moved once, and then both stay.
    #[test]
    fn a_busy_guest_leaves_another_one_to_itself() {
        let workers: Arc<[_]> = [(); 2].map(|()| Mailbox::new().unwrap()).into();
        let events = Arc::new(Events::new().unwrap());
        let all = Guests::new(HashMap::new(), HashMap::new(), workers.clone(), events).unwrap();
        let guests = [0, 0, 1].map(|worker| {
            let name = format!("rdmad-balance-{}-{}", std::process::id(), all.all().len());
            let path = std::env::temp_dir().join(&name);
            let guest = all.add(Arriving::at(&path, &name)).unwrap();
            guest.link.set_worker(Some(worker));
            workers[worker].claim();
            guest
        });
        let (mut balance, mut now) = (Balance::new(workers.clone()), Instant::now());
        let mut moved = Vec::new();
        for look in 0..100 {
            assert_eq!(balance.turn(&guests, now), Some(PERIOD));
            assert_eq!(balance.turn(&guests, now + PERIOD / 4), Some(3 * PERIOD / 4));
            for order in workers.iter().flat_map(|worker| worker.take_inbox().orders) {
                let Order::SendAway(guest, to) = order;
                guests[guest as usize].link.set_worker(Some(to));
                moved.push((look, guest, to));
            }
            now += PERIOD;
            guests[..2].iter().for_each(|guest| guest.count_work(PERIOD / 2));
        }
        assert!(matches!(moved[..], [(1.., 0 | 1, 1)]), "{moved:?}");
        workers[0].release();
        assert_eq!(balance.turn(&guests, now), None, "no guest shares a worker");
    }

    #[test]
    fn shares_are_parts_of_a_processor() {
        assert_eq!(share(Duration::from_millis(250), Duration::from_secs(1)), PROCESSOR / 4);
        assert_eq!(share(Duration::from_secs(5), Duration::ZERO), PROCESSOR);
    }
}
