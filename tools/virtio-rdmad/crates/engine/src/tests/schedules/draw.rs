// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Draws a schedule by its number.

use super::dice::Dice;
use super::network::{Faults, Links};
use super::plan::*;

impl Plan {
    /// Returns the schedule of this number.
    pub fn new(seed: u64) -> Self {
        let dice = &mut Dice::new(seed);
        let guests = dice.pick(&[2, 2, 2, 3, 4, 5]);
        let links = Links::new(guests, || faults(dice));
        let connections = match guests {
            2 => dice.pick(&[1, 1, 1, 2, 3]),
            _ => guests - 1 + dice.below(3) as usize,
        };
        let mut ends = Vec::new();
        for _ in 0..connections {
            let one = dice.below(guests as u64) as usize;
            let other = (one + 1 + dice.below(guests as u64 - 1) as usize) % guests;
            ends.extend(connection(dice, links.between(one, other), [one, other]));
        }
        let queues = queues(dice, &mut ends);
        Self { guests, links, ends, queues }
    }
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
fn connection(dice: &mut Dice, faults: &Faults, guests: [usize; 2]) -> [EndPlan; 2] {
    let path_mtu = 1 + dice.below(5) as u8;
    let is_busy = dice.happens(500);
    guests.map(|guest| end(dice, faults, guest, path_mtu, is_busy))
}

fn end(dice: &mut Dice, faults: &Faults, guest: usize, path_mtu: u8, is_busy: bool) -> EndPlan {
    // Most of the times for an answer are longer than a packet and its answer take.
    let least = 64 - (2 * faults.longest() / 4096).leading_zeros() as u8 + 1;
    let timeout = if dice.happens(100) { 1 } else { least + dice.below(3) as u8 };
    let pause = if is_busy { 1 } else { faults.latency * 3 };
    EndPlan {
        guest,
        path_mtu,
        psn: dice.pick(&[0, 7, 0x7f_fff0, 0x80_0000, 0xff_fff0, 0xff_ffff]),
        max_rd_atomic: dice.pick(&[1, 1, 2, 4, 16]),
        retry_cnt: dice.pick(&[1, 3, 7, 7]),
        rnr_retry: dice.pick(&[7, 7, 7, 1, 3]),
        timeout,
        rnr_timer: dice.pick(&[1, 5, 12]),
        works: works(dice, 128 << path_mtu, pause),
        queue: 0,
    }
}

/// Returns what an end posts, each less than `pause` nanoseconds after the one before.
fn works(dice: &mut Dice, mtu: usize, pause: u64) -> Vec<(u64, Work)> {
    let most = if dice.happens(100) { 100 } else { 25 };
    let count = dice.below(most);
    let flaw_after = dice.happens(250).then(|| dice.below(count + 1));
    let kinds = kinds(dice);
    let draw = |number| {
        let pause = dice.below(pause);
        let mut work = work(dice, mtu, &kinds);
        if flaw_after == Some(number) {
            work.flaw = flaw(dice, work);
        }
        work.is_signaled |= number + 1 == count;
        (pause, work)
    };
    (0..count).map(draw).collect()
}

/// Returns how often each kind of operation is posted.
fn kinds(dice: &mut Dice) -> [u64; 9] {
    let favourite = dice.below(18);
    std::array::from_fn(|kind| if kind as u64 == favourite { 20 } else { 1 + dice.below(3) })
}

fn work(dice: &mut Dice, mtu: usize, kinds: &[u64; 9]) -> Work {
    let mut at = dice.below(kinds.iter().sum());
    let kind = kinds.iter().position(|share| {
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
        (Flaw::Unaligned | Flaw::ShortReceive | Flaw::ReceiveKey, _) => false,
    };
    fits.then_some(flaw)
}

/// Gives each end a queue of receives, and returns these.
fn queues(dice: &mut Dice, ends: &mut [EndPlan]) -> Vec<QueuePlan> {
    let mut queues = Vec::new();
    for number in 0..ends.len() {
        let receives = receives(dice, &ends[peer(number)].works);
        ends[number].queue = queues.len();
        queues.push(QueuePlan { guest: ends[number].guest, receives });
    }
    queues
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
