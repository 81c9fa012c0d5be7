// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice of a worker for each guest, so that all workers have about as much to do.
//!
//! A guest gets the worker with the fewest guests when its VMM connects. That is uneven after other guests have gone,
//! and says nothing of what guests do, or where their memory lies. So the main thread looks once in a [`PERIOD`] while a
//! worker has more than one guest, or a guest while workers belong to NUMA nodes, and moves guests:
//!
//! 1. If the memory of a guest lies on the node of another worker, the guest goes there.
//! 2. If no guest does, and a worker has at least two guests more than another one, the first worker gives the other one
//!    a guest that does not leave its node.
//! 3. Otherwise, if a worker can share its load in a better way with another one, the first one gives the other one a
//!    guest; the worker with the highest load comes first. It gets an idle one back if it would have fewer guests
//!    otherwise. The higher load of the two has to become lower by [`GAIN`]. A guest that leaves its node counts for one
//!    and a half.
//!
//! A worker gets no guest by the first two rules if it would have more to do than the other one had, and more than
//! [`LITTLE`]. The load of a guest is the part of a processor that its turns with work take, as a mean over the last two
//! seconds. The first and the third rule leave a guest alone that was moved in the last [`REST`] looks, so a guest whose
//! load or node changes all the time moves once in ten seconds at most. Otherwise moves come to an end: the first rule
//! brings guests to their nodes, the second one makes the numbers of guests more even, the third one makes the highest
//! load lower, and no rule undoes what another one does.
//!
//! Which guests talk to each other does not matter: the worker of the guest that has posted a message carries it
//! (Documentation/benchmark.md, One message).

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::guest::mailbox::{Mailbox, Order};
use crate::guest::Guest;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(250);

/// A whole processor, in the unit of loads.
const PROCESSOR: u32 = 1000;

/// The least amount by which the higher of two loads has to become lower.
const GAIN: u32 = PROCESSOR / 5;

/// The load up to which a worker gets guests, however little others have to do. A worker with so much load gives away no
/// guest by its load.
const LITTLE: u32 = GAIN;

/// The weight of the newest load in the mean is 1 in this many.
const WEIGHT: u32 = 8;

/// The number of looks for which a guest that was moved stays where it is.
const REST: u32 = 40;

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
    /// The node of its memory, if a worker belongs to that.
    home: Option<u32>,
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
        let may_stay = |worker: &Mailbox| worker.guests() <= usize::from(worker.node.is_none());
        if self.workers.len() < 2 || self.workers.iter().all(may_stay) {
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
        let places: Vec<_> = self
            .workers
            .iter()
            .enumerate()
            .filter(|(_, worker)| !worker.is_retired())
            .map(|(index, worker)| (index, worker.node))
            .collect();
        for Move { guest, from, to } in plan(&places, placed) {
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
        let is_there = |node: &u32| {
            self.workers.iter().any(|worker| worker.node == Some(*node) && !worker.is_retired())
        };
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
            let home = guest.node().filter(is_there);
            placed.push(Placed { guest: guest.index, worker, home, load, rests });
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
    /// The node of the worker.
    node: Option<u32>,
    guests: Vec<Placed>,
    load: u32,
}

impl Share {
    /// Returns whether the memory of a guest lies near this worker, as far as workers can be near.
    fn is_near(&self, guest: &Placed) -> bool {
        guest.home.is_none_or(|home| self.node == Some(home))
    }

    /// Returns the load of a guest of this worker if another one serves it.
    fn load_at(&self, guest: &Placed, other: &Self) -> u32 {
        if self.is_near(guest) && !other.is_near(guest) {
            guest.load * 3 / 2
        } else {
            guest.load
        }
    }
}

/// Returns which of the guests that are placed so go from one of these workers, which belong to these nodes, to another
/// one.
fn plan(workers: &[(usize, Option<u32>)], placed: Vec<Placed>) -> Vec<Move> {
    let share = |&(worker, node): &_| Share { worker, node, guests: Vec::new(), load: 0 };
    let mut shares: Vec<_> = workers.iter().map(share).collect();
    for guest in placed {
        if let Some(share) = shares.iter_mut().find(|share| share.worker == guest.worker) {
            share.load += guest.load;
            share.guests.push(guest);
        }
    }
    let home = by_node(&shares);
    if !home.is_empty() {
        return home;
    }
    by_number(&shares).or_else(|| by_load(&shares)).unwrap_or_default()
}

/// Returns whether a worker may have this load with a guest, for another reason than loads, if the worker that has the
/// guest has the other load.
fn has_room(load: u32, present: u32) -> bool {
    load <= present.max(LITTLE)
}

/// Brings guests to the nodes of their memory.
fn by_node(shares: &[Share]) -> Vec<Move> {
    let mut loads: Vec<_> = shares.iter().map(|share| (share.load, share.guests.len())).collect();
    let mut moves = Vec::new();
    for (at, from) in shares.iter().enumerate() {
        for guest in from.guests.iter().filter(|guest| !from.is_near(guest) && !guest.rests) {
            let near = (0..shares.len()).filter(|to| shares[*to].is_near(guest));
            let Some(to) = near.min_by_key(|to| loads[*to]) else { continue };
            if !has_room(loads[to].0 + guest.load, loads[at].0) {
                continue;
            }
            loads[at] = (loads[at].0 - guest.load, loads[at].1 - 1);
            loads[to] = (loads[to].0 + guest.load, loads[to].1 + 1);
            moves.push(to_share(guest, &shares[to]));
        }
    }
    moves
}

/// Makes numbers of guests more even.
fn by_number(shares: &[Share]) -> Option<Vec<Move>> {
    let mut order: Vec<_> = shares.iter().collect();
    order.sort_by_key(|share| Reverse((share.guests.len(), share.load)));
    order.iter().find_map(|from| {
        let tos = order.iter().rev();
        let mut tos = tos.take_while(|to| from.guests.len() >= to.guests.len() + 2);
        tos.find_map(|to| {
            let higher = |guest: &&Placed| (from.load - guest.load).max(to.load + guest.load);
            let may_go = |guest: &&Placed| {
                (to.is_near(guest) || !from.is_near(guest))
                    && has_room(to.load + guest.load, from.load)
            };
            let guests = from.guests.iter().filter(may_go);
            let guest = guests.min_by_key(|guest| (higher(guest), guest.load))?;
            Some(vec![to_share(guest, to)])
        })
    })
}

/// Makes loads more even, where numbers of guests are even.
fn by_load(shares: &[Share]) -> Option<Vec<Move>> {
    let mut order: Vec<_> = shares.iter().filter(|share| share.load >= GAIN).collect();
    order.sort_by_key(|share| Reverse(share.load));
    order.iter().find_map(|from| {
        let tos = shares.iter().filter(|to| to.load < from.load);
        let ways = tos.filter_map(|to| share_load(from, to));
        let (higher, moves) = ways.min_by_key(|(higher, moves)| (*higher, moves.len()))?;
        (higher + GAIN <= from.load).then_some(moves)
    })
}

/// Returns how two workers share their loads best, and the higher load of the two then.
fn share_load(from: &Share, to: &Share) -> Option<(u32, Vec<Move>)> {
    let may_move = |guest: &&Placed| !guest.rests;
    let back = if from.guests.len() > to.guests.len() {
        None
    } else {
        Some(to.guests.iter().filter(may_move).min_by_key(|guest| guest.load)?)
    };
    let returned = back.map_or(0, |guest| guest.load);
    let gained = back.map_or(0, |guest| to.load_at(guest, from));
    let higher = |guest: &&Placed| {
        let other = to.load + from.load_at(guest, to) - returned;
        (from.load - guest.load + gained).max(other)
    };
    let guest = from.guests.iter().filter(may_move).min_by_key(higher)?;
    let back = back.map(|back| to_share(back, from));
    Some((higher(&guest), std::iter::once(to_share(guest, to)).chain(back).collect()))
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
            home: None,
            load,
            rests: false,
        });
        placed.collect()
    }

    /// Returns workers on these nodes.
    fn on_nodes(nodes: &[Option<u32>]) -> Vec<(usize, Option<u32>)> {
        nodes.iter().copied().enumerate().collect()
    }

    /// Makes moves until there are no more of them, and returns how many looks had some. No worker belongs to a node.
    fn settle(workers: usize, placed: &mut [Placed]) -> usize {
        settle_on(&on_nodes(&vec![None; workers]), placed)
    }

    /// Does what [`settle`] does with these workers.
    fn settle_on(workers: &[(usize, Option<u32>)], placed: &mut [Placed]) -> usize {
        for moves in 0.. {
            let planned = plan(workers, placed.to_vec());
            if planned.is_empty() {
                return moves;
            }
            assert!(moves < 3 * placed.len(), "guests are moved back and forth");
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
        let workers = on_nodes(&[None, None]);
        placed[0].rests = true;
        assert_eq!(plan(&workers, placed.clone()), [Move { guest: 1, from: 0, to: 1 }]);
        placed[1].rests = true;
        assert_eq!(plan(&workers, placed.clone()), []);
    }

    /// Makes moves on workers of nodes 0, 1 and 1, and returns the worker of each guest.
    fn places(loads: &[&[u32]], homes: &[Option<u32>]) -> Vec<usize> {
        let mut placed = place(loads);
        assert_eq!(placed.len(), homes.len());
        placed.iter_mut().zip(homes).for_each(|(placed, home)| placed.home = *home);
        settle_on(&on_nodes(&[Some(0), Some(1), Some(1)]), &mut placed);
        placed.iter().map(|placed| placed.worker).collect()
    }

    #[test]
    fn guests_go_to_the_node_of_their_memory() {
        let [zero, one] = [Some(0), Some(1)];
        assert_eq!(places(&[&[0, 0], &[0], &[]], &[one, one, zero]), [2, 1, 0]);
        assert_eq!(places(&[&[10], &[190], &[900]], &[one, one, one]), [1, 1, 2]);
        assert_eq!(places(&[&[300], &[190], &[900]], &[one, one, one]), [0, 1, 2], "it has more");
        assert_eq!(places(&[&[0, 0], &[], &[]], &[zero, zero]), [0, 0], "others have no guest");
    }

    #[test]
    fn a_guest_without_a_node_goes_anywhere() {
        assert_eq!(places(&[&[500, 500], &[], &[]], &[None, None]), [2, 0]);
        assert_eq!(places(&[&[0, 0, 0], &[0], &[0]], &[None; 5])[3..], [1, 2]);
    }

    /// A guest that would count for less on another node, at one and a half times its load, leaves its own.
    #[test]
    fn a_busy_guest_leaves_a_busy_node() {
        let one = Some(1);
        assert_eq!(places(&[&[], &[500, 500], &[1000]], &[one; 3]), [0, 1, 2]);
        assert_eq!(places(&[&[], &[500, 400], &[1000]], &[one; 3]), [1, 0, 2]);
        assert_eq!(
            places(&[&[900], &[500, 500], &[900]], &[Some(0), one, one, one])[1..],
            [1, 1, 2]
        );
        assert_eq!(places(&[&[], &[300, 300], &[600]], &[one; 3]), [1, 1, 2], "that gains little");
        assert_eq!(places(&[&[500], &[0], &[800]], &[one; 3]), [1, 1, 2], "and comes back");
    }

    /// Whatever the loads and the nodes are, moves come to an end. A guest that is not on its node then has no room there,
    /// and numbers of guests are uneven only where guests have no room, or would leave their nodes.
    #[test]
    fn moves_come_to_an_end() {
        let mut state = 1_u32;
        let mut random = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for _ in 0..2000 {
            let workers = 1 + random(5) as usize;
            let nodes: Vec<_> = (0..workers).map(|_| (workers != 3).then(|| random(3))).collect();
            let mut placed: Vec<_> = (0..random(20))
                .map(|guest| Placed {
                    guest,
                    worker: random(5) as usize % workers,
                    home: Some(Some(random(3))).filter(|home| nodes.contains(home)).flatten(),
                    load: random(2) * random(PROCESSOR),
                    rests: false,
                })
                .collect();
            settle_on(&on_nodes(&nodes), &mut placed);
            let loads = loads(workers, &placed);
            let load = |worker: usize| loads[worker].iter().sum::<u32>();
            for guest in &placed {
                let (here, at) = (guest.worker, |worker: &usize| guest.home == nodes[*worker]);
                let is_near = guest.home.is_none() || at(&here);
                for other in (0..workers).filter(|worker| *worker != here) {
                    let would_have = load(other) + guest.load;
                    let has_room = has_room(would_have, load(here));
                    assert!(is_near || !at(&other) || !has_room, "{placed:?}");
                    let may_go = guest.home.is_none() || at(&other) || !is_near;
                    let is_even = loads[here].len() < loads[other].len() + 2;
                    assert!(is_even || !may_go || !has_room, "{placed:?}");
                }
            }
        }
    }

    /// Two busy guests of one worker are measured, one of them is moved once, and then both stay.
    #[test]
    fn a_busy_guest_leaves_another_one_to_itself() {
        let workers: Arc<[_]> = [(); 2].map(|()| Mailbox::new(None).unwrap()).into();
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
