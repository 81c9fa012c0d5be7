// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The buffers of virtqueues.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use abi::*;
use ring::{Chain, RingError};
use zerocopy::FromBytes;

use super::notes::Notes;
use super::objects::Objects;
use super::rings::note_doorbell;

/// The bytes of an event, and of a doorbell.
const EVENT: usize = size_of::<virtio_rdma_event>();
const DOORBELL: usize = size_of::<virtio_rdma_doorbell>();
const CQE: usize = size_of::<virtio_rdma_cqe>();

/// What a virtqueue is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// Commands.
    Control,
    /// Completion events.
    CompletionEvents,
    /// Doorbells.
    Doorbells,
    /// Events.
    Events,
    /// CQEs, with VIRTIO_RDMA_F_VIRTQUEUES.
    Completions,
    /// Work requests, with VIRTIO_RDMA_F_VIRTQUEUES.
    Work,
}

/// The virtqueues that a driver has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbering {
    has_rings: bool,
    has_events: bool,
    vectors: u16,
    cqs: u16,
    qps: u16,
}

impl Numbering {
    /// Returns the virtqueues with these features and this configuration.
    pub fn new(features: u64, config: &virtio_rdma_config) -> Self {
        let has = |feature: u32| features >> feature & 1 != 0;
        let short = |count: u32| u16::try_from(count.min(8192)).unwrap_or(0);
        let has_rings = has(VIRTIO_RDMA_F_RINGS);
        Self {
            has_rings,
            has_events: has(VIRTIO_RDMA_F_EVENTS),
            vectors: short(config.num_comp_vectors),
            cqs: short(config.max_cq),
            qps: short(config.max_qp),
        }
    }

    /// Returns whether work requests are in rings.
    pub fn has_rings(self) -> bool {
        self.has_rings
    }

    /// Returns how many there are.
    pub fn count(self) -> u16 {
        if self.has_rings {
            return 3 + self.vectors;
        }
        1 + self.cqs + 2 * self.qps + u16::from(self.has_events)
    }

    /// Returns what a virtqueue is for.
    pub fn role(self, index: u16) -> Role {
        let events = if self.has_rings { 2 + self.vectors } else { 1 + self.cqs + 2 * self.qps };
        match index {
            0 => Role::Control,
            _ if index == events => Role::Events,
            _ if self.has_rings && index <= self.vectors => Role::CompletionEvents,
            _ if self.has_rings => Role::Doorbells,
            _ if index <= self.cqs => Role::Completions,
            _ => Role::Work,
        }
    }
}

/// The buffers that a driver keeps available in a queue of events.
#[derive(Clone, Copy, Debug)]
struct Stock {
    count: u64,
    had_some: bool,
    /// Since when there is no buffer, if that was not told.
    empty: Option<Instant>,
    /// Whether the device has used a buffer, so that others are available again.
    is_used: bool,
    /// Whether the driver has notified the device since the device last looked.
    has_kicked: bool,
    /// Since when there are buffers of which the driver has not notified the device, if that was not told.
    unknown: Option<Instant>,
}

impl Stock {
    fn new(empty: Option<Instant>) -> Self {
        let (is_used, has_kicked, unknown) = (false, false, None);
        Self { count: 0, had_some: false, empty, is_used, has_kicked, unknown }
    }
}

/// The buffers of the queues of events.
#[derive(Clone, Debug, Default)]
pub struct Stocks {
    queues: BTreeMap<u16, Stock>,
    /// Whether the transport says of which queue a driver notifies the device.
    sees_kicks: bool,
}

impl Stocks {
    /// Returns those of a driver that has no queues.
    pub fn new(sees_kicks: bool) -> Self {
        Self { queues: BTreeMap::new(), sees_kicks }
    }

    /// Notes that the device runs and has these queues.
    pub fn begin(&mut self, numbering: Numbering) {
        for index in 0..numbering.count() {
            if matches!(numbering.role(index), Role::Events | Role::CompletionEvents) {
                let stock = Stock::new(Some(Instant::now()));
                self.queues.entry(index).or_insert(stock);
            }
        }
    }

    /// Forgets all, because of a reset.
    pub fn clear(&mut self) {
        self.queues.clear();
    }

    fn add(&mut self, notes: &mut Notes, index: u16, role: Role) {
        let stock = self.queues.entry(index).or_insert(Stock::new(None));
        if !std::mem::replace(&mut stock.had_some, true) {
            notes.pass("V-INIT-02");
        } else if role == Role::Events {
            notes.pass("V-EVT-01");
        }
        (stock.count, stock.empty) = (stock.count + 1, None);
        if self.sees_kicks && stock.is_used && role == Role::CompletionEvents {
            if stock.has_kicked {
                notes.pass("V-CQ-23");
            } else {
                stock.unknown.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Notes that the driver notifies the device of buffers.
    pub fn kick(&mut self, notes: &mut Notes, index: u16) {
        let Some(stock) = self.queues.get_mut(&index) else { return };
        stock.has_kicked = true;
        if stock.unknown.take().is_some() {
            notes.pass("V-CQ-23");
        }
    }

    /// Notes that the device has looked at all queues.
    pub fn end_look(&mut self) {
        self.queues.values_mut().for_each(|stock| stock.has_kicked = false);
    }

    /// Notes that the device has used a buffer.
    pub fn take(&mut self, index: u16) {
        let Some(stock) = self.queues.get_mut(&index) else { return };
        (stock.count, stock.is_used) = (stock.count.saturating_sub(1), true);
        if stock.count == 0 {
            stock.empty = Some(Instant::now());
        }
    }

    /// Judges that there are buffers.
    pub fn judge(&mut self, notes: &mut Notes, numbering: Numbering, patience: Duration) {
        for (index, stock) in &mut self.queues {
            if stock.unknown.is_some_and(|since| since.elapsed() >= patience) {
                stock.unknown = None;
                notes.step(format!("buffers of virtqueue {index}"));
                let got = format!("no notification within {} ms", patience.as_millis());
                notes.fail("V-CQ-23", "buffers that are available again", "a notification", &got);
            }
            if stock.empty.is_none_or(|since| since.elapsed() < patience) {
                continue;
            }
            stock.empty = None;
            notes.step(format!("buffers of virtqueue {index}"));
            let got = format!("none for {} ms", patience.as_millis());
            if !stock.had_some {
                notes.fail("V-INIT-02", "buffers for events", "one or more after DRIVER_OK", &got);
            } else if numbering.role(*index) == Role::Events {
                notes.fail("V-EVT-01", "buffers of the event queue", "one or more", &got);
            }
        }
    }
}

/// Judges a chain that the driver makes available.
pub fn judge_chain(
    notes: &mut Notes,
    (index, role): (u16, Role),
    chain: &Chain,
    objects: &mut Objects,
    stocks: &mut Stocks,
) {
    notes.step(format!("buffer of virtqueue {index} ({role:?})"));
    notes.pass("V-RING-05");
    let (readable, writable) = (chain.readable_len(), chain.writable_len());
    let form = |holds: bool, expected: &str| {
        (holds, expected.to_owned(), format!("{readable} to read, {writable} to write"))
    };
    let (holds, expected, got) = match role {
        Role::Control => return,
        Role::CompletionEvents | Role::Events => {
            stocks.add(notes, index, role);
            form((readable, writable) == (0, EVENT), "8 bytes to write")
        }
        Role::Doorbells => {
            let most = VIRTIO_RDMA_MAX_DOORBELLS as usize * DOORBELL;
            let is_whole = readable % DOORBELL == 0 && (DOORBELL..=most).contains(&readable);
            form(is_whole && writable == 0, "8 bytes to read, or a multiple up to 4096")
        }
        Role::Completions => form((readable, writable) == (0, CQE), "40 bytes to write"),
        Role::Work => form(readable > 0 && writable == 0, "a work request to read"),
    };
    let clause = match role {
        Role::Completions => "V-VQ-09",
        _ => "V-RING-03",
    };
    notes.judge(clause, holds, || [format!("buffer of {role:?}"), expected, got]);
    if role == Role::Doorbells && holds {
        judge_doorbells(notes, chain, objects);
    }
}

fn judge_doorbells(notes: &mut Notes, chain: &Chain, objects: &mut Objects) {
    let mut bytes = vec![0; chain.readable_len()];
    if chain.read(&mut bytes).is_err() {
        return;
    }
    for bell in bytes.chunks_exact(DOORBELL) {
        let Ok(virtio_rdma_doorbell { number, queue }) = FromBytes::read_from_bytes(bell) else {
            continue;
        };
        let is_known = queue <= VIRTIO_RDMA_DOORBELL_SRQ;
        notes.judge("V-RING-51", is_known, || {
            ["queue of a doorbell".into(), "0, 1 or 2".into(), queue.to_string()]
        });
        if let Some(ring) = objects.ring(queue, number).filter(|_| is_known) {
            note_doorbell(notes, ring);
        }
    }
}

/// Judges a chain that cannot be followed.
pub fn judge_malformed(notes: &mut Notes, index: u16, error: &RingError) {
    notes.step(format!("buffer of virtqueue {index}"));
    match error {
        RingError::TooLong => {
            notes.fail("V-RING-05", "chain", "8 descriptors at most", &error.to_string());
        }
        _ => notes.fail("V-RING-03", "chain", "one that can be followed", &error.to_string()),
    }
}
