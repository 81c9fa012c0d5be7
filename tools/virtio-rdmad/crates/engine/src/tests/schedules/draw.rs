// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Draws a schedule by its number.

use super::dice::Dice;
use super::network::{Faults, Links};
use super::plan::*;

impl Plan {
    /// Returns the schedule of this number.
    pub fn new(seed: u64) -> Self {
        let dice = &mut Dice::new(seed);
        let count = dice.pick(&[2, 2, 2, 3, 4, 5]);
        let mut guests: Vec<_> = (0..count).map(|number| guest(dice, number)).collect();
        let links = Links::new(count, || faults(dice));
        for number in 1..count {
            if dice.happens(150) {
                guests[number].host = guests[dice.below(number as u64) as usize].host;
            }
        }
        let connections = match count {
            2 => dice.pick(&[1, 1, 1, 2, 3]),
            _ => count - 1 + dice.below(3) as usize,
        };
        let mut ends = Vec::new();
        for _ in 0..connections {
            let one = dice.below(count as u64) as usize;
            let other = (one + 1 + dice.below(count as u64 - 1) as usize) % count;
            ends.extend(connection(dice, links.between(one, other), &guests, [one, other]));
        }
        if dice.happens(150) {
            flap(dice, &mut guests);
        }
        if dice.happens(100) {
            ends.extend(take_over(dice, &links, &mut guests));
        }
        let queues = queues(dice, &guests, &mut ends);
        Self { guests, links, ends, queues }
    }

    /// Freezes devices now and then, if all guests keep their addresses.
    pub fn with_freezes(mut self, seed: u64) -> Self {
        let dice = &mut Dice::new(seed ^ 0x6672_6565);
        if self.guests.iter().any(|guest| !guest.absences.is_empty()) {
            return self;
        }
        for guest in &mut self.guests {
            guest.freezes = freezes(dice);
        }
        self
    }
}

/// Returns the guest of this number, on a host of its own.
pub fn guest(dice: &mut Dice, number: usize) -> GuestPlan {
    let has_rings = !dice.happens(200);
    let (absences, freezes) = (Vec::new(), Vec::new());
    GuestPlan { host: number, address: number, absences, freezes, has_rings }
}

/// Returns when a device is frozen, if it is.
pub fn freezes(dice: &mut Dice) -> Vec<Freeze> {
    let mut time = 0;
    let count = dice.pick(&[0, 0, 1, 1, 3]);
    let one = |_| {
        let from = time + 1 + dice.below(200_000);
        let most = dice.pick(&[10_000, 1_000_000, 50_000_000, 5_000_000_000]);
        time = from + 1 + dice.below(most);
        Freeze { from, until: time, is_moved: dice.happens(700) }
    };
    (0..count).map(one).collect()
}

/// Takes the addresses of some guests away for a while.
fn flap(dice: &mut Dice, guests: &mut [GuestPlan]) {
    for guest in guests {
        if dice.happens(500) {
            let from = 1 + dice.below(500_000);
            let most = dice.pick(&[10_000, 1_000_000, 50_000_000]);
            guest.absences.push((from, from + 1 + dice.below(most)));
        }
    }
}

/// Makes another guest, on any host, take over the address of a guest for ever. Returns the ends of its connection with
/// a third one.
fn take_over(dice: &mut Dice, links: &Links, guests: &mut Vec<GuestPlan>) -> [EndPlan; 2] {
    let count = guests.len() as u64;
    let (number, old) = (guests.len(), dice.below(count) as usize);
    let third = (old + 1 + dice.below(count - 1) as usize) % guests.len();
    let time = 1 + dice.below(500_000);
    guests[old].absences = vec![(time, u64::MAX)];
    guests[third].absences.clear();
    let host = guests[dice.below(count) as usize].host;
    guests.push(GuestPlan { host, address: old, absences: vec![(0, time)], ..guest(dice, number) });
    let mut ends = connection(dice, links.between(old, third), guests, [third, number]);
    for (pause, _) in ends.iter_mut().filter_map(|end| end.works.first_mut()) {
        *pause += time;
    }
    ends
}

/// Returns what goes wrong in the network of a schedule.
pub fn faults(dice: &mut Dice) -> Faults {
    let often = |dice: &mut Dice| dice.pick(&[0, 0, 1, 10, 50, 150]);
    let latency = dice.pick(&[1_000, 5_000, 50_000]);
    let begin = dice.below(400_000);
    Faults {
        loss: often(dice),
        repeat: often(dice),
        delay: often(dice),
        corrupt: dice.pick(&[0, 0, 0, 1, 20]),
        mark: dice.pick(&[0, 0, 0, 0, 10, 200]),
        latency,
        lateness: latency * dice.pick(&[1, 4, 30]),
        tick: dice.pick(&[1, 500, 2_000, 20_000]),
        keeps_trains: dice.happens(200),
        outage: dice.happens(100).then(|| (begin, begin + dice.below(20_000_000))),
    }
}

/// Returns the two ends of a connection between two guests, which have no receives yet.
fn connection(
    dice: &mut Dice,
    faults: &Faults,
    all: &[GuestPlan],
    guests: [usize; 2],
) -> [EndPlan; 2] {
    let path_mtu = 1 + dice.below(5) as u8;
    let pause = if dice.happens(500) { 1 } else { faults.latency * 3 };
    let have_rings = guests.iter().all(|guest| all[*guest].has_rings);
    let is_xrc = have_rings && dice.happens(250);
    let kinds = if is_xrc { [Kind::Initiator, Kind::Target] } else { [Kind::Rc, Kind::Rc] };
    let often = how_often(dice, have_rings && !is_xrc);
    [0, 1].map(|side| {
        let mut works = works(dice, &often, 128 << path_mtu, pause);
        if kinds[side] == Kind::Target {
            works.clear();
        }
        for (_, work) in &mut works {
            work.is_inline &= all[guests[side]].has_rings;
        }
        EndPlan { kind: kinds[side], works, ..end(dice, faults, guests[side], path_mtu) }
    })
}

/// Returns an end of RC that posts nothing.
fn end(dice: &mut Dice, faults: &Faults, guest: usize, path_mtu: u8) -> EndPlan {
    // Most of the times for an answer are longer than a packet and its answer take.
    let least = 64 - (2 * faults.longest() / 4096).leading_zeros() as u8 + 1;
    let timeout = if dice.happens(100) { 1 } else { least + dice.below(3) as u8 };
    EndPlan {
        kind: Kind::Rc,
        guest,
        path_mtu,
        psn: dice.pick(&[0, 7, 0x7f_fff0, 0x80_0000, 0xff_fff0, 0xff_ffff]),
        max_rd_atomic: dice.pick(&[1, 1, 2, 4, 16]),
        retry_cnt: dice.pick(&[1, 3, 7, 7]),
        rnr_retry: dice.pick(&[7, 7, 7, 1, 3]),
        timeout,
        rnr_timer: dice.pick(&[1, 5, 12]),
        works: Vec::new(),
        queues: Vec::new(),
    }
}

/// Returns what an end posts, each less than `pause` nanoseconds after the one before.
fn works(dice: &mut Dice, often: &[u64; 9], mtu: usize, pause: u64) -> Vec<(u64, Work)> {
    let most = if dice.happens(100) { 100 } else { 25 };
    let count = dice.below(most);
    let flaw_after = dice.happens(250).then(|| dice.below(count + 1));
    let draw = |number| {
        let pause = dice.below(pause);
        let mut work = work(dice, mtu, often);
        if flaw_after == Some(number) {
            work.flaw = flaw(dice, work);
        }
        work.is_signaled |= number + 1 == count;
        (pause, work)
    };
    (0..count).map(draw).collect()
}

/// Returns how often each kind of operation is posted. XRC and guests without rings have no FLUSH and no
/// ATOMIC WRITE.
fn how_often(dice: &mut Dice, has_all: bool) -> [u64; 9] {
    let favourite = dice.below(18);
    let mut often =
        std::array::from_fn(|kind| if kind as u64 == favourite { 20 } else { 1 + dice.below(3) });
    if !has_all {
        often[7..].fill(0);
    }
    often
}

fn work(dice: &mut Dice, mtu: usize, often: &[u64; 9]) -> Work {
    let mut at = dice.below(often.iter().sum());
    let kind = often.iter().position(|share| {
        let is_it = at < *share;
        at = at.wrapping_sub(*share);
        is_it
    });
    let len = length(dice, mtu);
    let at = dice.below((AREA - len) as u64 + 1) as usize;
    let word = dice.below(AREA as u64 / 8) as usize * 8;
    let value = dice.next();
    let imm = Some(value as u32);
    let op = match kind.unwrap_or(0) {
        0 => Op::Send { len, imm: None },
        1 => Op::Send { len, imm },
        2 => Op::Write { at, len, imm: None },
        3 => Op::Write { at, len, imm },
        4 => Op::Read { at, len },
        5 => Op::Add { at: word, value },
        6 => Op::Swap { at: word, matches: dice.happens(600), value },
        7 => Op::Store { at: word },
        _ => Op::Flush { at, len },
    };
    Work {
        op,
        is_signaled: dice.happens(700),
        is_fenced: dice.happens(150),
        is_inline: op.len() <= 64 && dice.happens(300) && !op.is_answered(),
        piece: dice.pick(&[64, 1000, AREA]),
        queue: 0,
        flaw: None,
    }
}

fn length(dice: &mut Dice, mtu: usize) -> usize {
    let len = match dice.below(8) {
        0 => 0,
        1 => mtu,
        2 => mtu * (1 + dice.below(6) as usize),
        3 | 4 => dice.below(6 * mtu as u64) as usize,
        _ => 1 + dice.below(mtu as u64) as usize,
    };
    len.min(AREA)
}

/// Returns something that may be wrong with a work request.
fn flaw(dice: &mut Dice, work: Work) -> Option<Flaw> {
    let flaw = dice.pick(&[
        Flaw::RemoteKey,
        Flaw::RemoteRange,
        Flaw::Unaligned,
        Flaw::LocalKey,
        Flaw::ShortReceive,
        Flaw::ReceiveKey,
    ]);
    let is_empty = work.op.len() == 0;
    let has_flush = matches!(work.op, Op::Flush { len: 1.., .. });
    let fits = match (flaw, work.op) {
        (Flaw::RemoteKey | Flaw::RemoteRange, Op::Send { .. }) => false,
        (Flaw::RemoteKey | Flaw::RemoteRange, _) => !is_empty || has_flush,
        (Flaw::Unaligned, Op::Add { .. } | Op::Swap { .. } | Op::Store { .. }) => true,
        (Flaw::LocalKey, _) => !is_empty && !work.is_inline,
        (Flaw::ShortReceive | Flaw::ReceiveKey, Op::Send { .. }) => !is_empty,
        (_, _) => false,
    };
    fits.then_some(flaw)
}

/// Gives the ends queues of receives, and returns these. All RC QPs of some guests have one SRQ.
fn queues(dice: &mut Dice, guests: &[GuestPlan], ends: &mut [EndPlan]) -> Vec<QueuePlan> {
    let mut queues = Vec::new();
    for (guest, plan) in guests.iter().enumerate() {
        let own = |kind| {
            let is_its = |end: &EndPlan| (end.guest, end.kind) == (guest, kind);
            (0..ends.len()).filter(|end| is_its(&ends[*end])).collect::<Vec<_>>()
        };
        let (qps, targets) = (own(Kind::Rc), own(Kind::Target));
        let count = if targets.is_empty() { 0 } else { dice.pick(&[1, 2, 3]) };
        queues.extend(shared(dice, guest, Owner::XrcSrq, queues.len(), count, &targets, ends));
        if plan.has_rings && dice.happens(300) {
            queues.extend(shared(dice, guest, Owner::Srq, queues.len(), 1, &qps, ends));
            continue;
        }
        for end in qps {
            let receives = receives(dice, &ends[peer(end)].works);
            ends[end].queues.push(queues.len());
            queues.push(QueuePlan { guest, owner: Owner::Qp, receives });
        }
    }
    queues
}

/// Returns so many SRQs, from which these ends receive. They have a few receives more than the peers need.
/// Which message takes which receive is not known, so nothing is wrong with any.
fn shared(
    dice: &mut Dice,
    guest: usize,
    owner: Owner,
    first: usize,
    count: usize,
    users: &[usize],
    ends: &mut [EndPlan],
) -> Vec<QueuePlan> {
    let mut takers: Vec<_> = (0..count).map(|_| dice.below(4)).collect();
    for user in users {
        ends[*user].queues = (first..first + count).collect();
        for (_, work) in &mut ends[peer(*user)].works {
            work.queue = dice.below(count as u64) as usize;
            takers[work.queue] += u64::from(work.op.takes_receive());
            work.flaw = match work.flaw {
                Some(_) if owner == Owner::XrcSrq && dice.happens(300) => Some(Flaw::OtherSrq),
                Some(Flaw::ShortReceive | Flaw::ReceiveKey) => None,
                flaw => flaw,
            };
        }
    }
    let queue = |count| {
        let is_late = dice.happens(300);
        let mut pause = || if is_late { dice.below(100_000) } else { 0 };
        let place = Place { len: AREA, has_key: true };
        QueuePlan { guest, owner, receives: (0..count).map(|_| (pause(), place)).collect() }
    };
    takers.into_iter().map(queue).collect()
}

/// Returns the receives for what the peer sends: a few more than it needs.
fn receives(dice: &mut Dice, works: &[(u64, Work)]) -> Vec<(u64, Place)> {
    let is_late = dice.happens(300);
    let takers = works.iter().map(|(_, work)| work).filter(|work| work.op.takes_receive());
    let mut receives: Vec<_> = takers
        .map(|work| {
            let pause = if is_late { dice.below(300_000) } else { 0 };
            let len = match work.flaw {
                Some(Flaw::ShortReceive) => dice.below(work.op.len() as u64) as usize,
                _ if dice.happens(300) => AREA,
                _ => work.op.len(),
            };
            (pause, Place { len, has_key: work.flaw != Some(Flaw::ReceiveKey) })
        })
        .collect();
    let more = dice.below(4);
    receives.extend((0..more).map(|_| (0, Place { len: AREA, has_key: true })));
    receives
}
