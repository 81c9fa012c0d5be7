// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device that watches its driver, and judges it by the clauses for drivers.
//!
//! The device is the one of the crate `hostile`, without orders. The observer stands between its transport and the
//! engine. It sees each buffer before the engine does, and looks at the rings before and after the engine works. It
//! changes nothing. Of a request, the engine and the observer have the same copy; of what is in rings and in page
//! tables, each has its own. From the bottom:
//!
//! * `clauses` and `requests`: the clauses that are judged, and the commands that there are
//! * `notes`: what was judged
//! * `objects`: what is known of the objects of the driver
//! * `entries` and `rings`: what rings in memory show of their owner
//! * `control`, `buffers` and `setup`: requests, the buffers of virtqueues, and what comes before them
//! * [`provoke`]: what the device does wrong, if it is told to
//! * `report`: what is told of a driver

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use abi::*;
use hostile::{End, Order, Process, Settings, Socket, Watch};
use memory::GuestMemory;
use ring::{Chain, Layout, RingError};
use virtio_transport::Deed;
use zerocopy::{FromBytes, FromZeros};

mod buffers;
mod clauses;
mod control;
mod entries;
mod notes;
mod objects;
pub mod provoke;
mod report;
mod requests;
mod rings;
mod setup;
#[cfg(test)]
mod tests;

use buffers::{Numbering, Stocks};
use control::{Agreement, Kept, Look};
use notes::Notes;
use objects::Objects;
use provoke::Provoker;
use requests::Command;
use setup::Setup;

pub use report::DriverReport;

use crate::port::F_ORDER_PLATFORM;

/// How long a driver may take for what it must do at once: a doorbell, or a buffer for events.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Watches a driver.
pub struct Observer {
    notes: Notes,
    setup: Setup,
    agreement: Agreement,
    numbering: Numbering,
    layouts: BTreeMap<u16, Layout>,
    objects: Objects,
    stocks: Stocks,
    commands: BTreeMap<u32, Command>,
    /// The number of commands since the device has started.
    count: u64,
    /// The head of the chain of the request that is looked at.
    head: u16,
    /// What is to stay as it is until the driver has the reply, by the heads of the chains.
    kept: BTreeMap<u16, Vec<Kept>>,
    patience: Duration,
    provoker: Option<Provoker>,
}

impl Observer {
    /// Returns an observer of a driver that finds a device that offers these feature bits.
    pub fn new(
        is_vfio: bool,
        offered: u64,
        patience: Duration,
        mut provoker: Option<Provoker>,
    ) -> Self {
        if is_vfio {
            provoker.iter_mut().for_each(Provoker::set_sees_status);
        }
        let config = virtio_rdma_config::new_zeroed();
        let commands = requests::all().into_iter().map(|command| (command.number, command));
        Self {
            notes: Notes::default(),
            setup: Setup::new(is_vfio, offered),
            agreement: Agreement { features: 0, config, patience },
            numbering: Numbering::default(),
            layouts: BTreeMap::new(),
            objects: Objects::default(),
            stocks: Stocks::new(is_vfio),
            commands: commands.collect(),
            count: 0,
            head: 0,
            kept: BTreeMap::new(),
            patience,
            provoker,
        }
    }

    /// Lets the provoker look.
    fn provoke(&mut self, look: impl FnOnce(&mut Provoker, &mut Notes)) {
        if let Some(provoker) = &mut self.provoker {
            look(provoker, &mut self.notes);
        }
    }

    /// Returns what is told of the driver at the end.
    pub fn report(&mut self) -> DriverReport {
        let is_in_vain = self.setup.is_in_vain(self.patience);
        self.setup.finish(&mut self.notes, self.patience);
        self.provoke(|provoker, notes| provoker.finish(notes, is_in_vain));
        DriverReport::new(&self.notes)
    }

    /// Notes that the device runs.
    fn begin(&mut self) {
        self.setup.note_start();
        self.provoke(Provoker::note_start);
        let numbering = self.numbering;
        if numbering.count() > 1 {
            let started = self.layouts.keys().copied();
            let (notes, has_rings) = (&mut self.notes, numbering.has_rings());
            self.setup.all_queues(notes, numbering.count(), started, has_rings);
            self.stocks.begin(numbering);
        }
    }

    /// Judges what holds for a driver whose work requests complete.
    fn note_work(&mut self) {
        if self.objects.cqs.values().all(|cq| cq.produced == 0) {
            return;
        }
        self.provoke(Provoker::note_work);
        let accepted = self.agreement.features;
        if self.setup.has_base_alone() {
            self.notes.pass("V-FEAT-02");
        }
        if accepted & F_ORDER_PLATFORM != 0 && self.agreement.has(VIRTIO_RDMA_F_RINGS) {
            self.notes.pass("V-FEAT-09");
        }
    }

    /// Returns the memory of the queues of an object that ends, which must stay until the reply.
    fn keep_queues(&self, memory: &GuestMemory, number: u32, body: &[u8]) -> Vec<Kept> {
        if self.numbering.has_rings() {
            return Vec::new();
        }
        let queues = control::queues_that_end(&self.agreement.config, number, body);
        let layouts = queues.iter().filter_map(|index| self.layouts.get(index));
        layouts.filter_map(|layout| control::keep_available(memory, layout.avail)).collect()
    }
}

impl Watch for Observer {
    fn note(&mut self, deed: Deed) {
        self.provoke(|provoker, notes| provoker.note_deed(notes, deed));
        self.setup.note(&mut self.notes, deed);
    }

    fn agree(&mut self, features: u64, config: &[u8; 256]) {
        self.setup.agree(&mut self.notes, features);
        self.agreement.features = closed(features);
        if let Ok(config) = virtio_rdma_config::read_from_bytes(config) {
            self.agreement.config = config;
        }
        self.numbering = Numbering::new(self.agreement.features, &self.agreement.config);
    }

    fn start(&mut self, _: &GuestMemory, index: u16, layout: &Layout) {
        self.layouts.insert(index, *layout);
        if index == 0 {
            self.notes.step("the control queue");
            self.notes.judge("V-RING-06", layout.size >= 2, || {
                let got = layout.size.to_string();
                ["entries of the control queue".into(), "2 or more".into(), got]
            });
        }
    }

    fn kick(&mut self, index: u16) {
        self.stocks.kick(&mut self.notes, index);
    }

    fn available(&mut self, index: u16, chain: &Chain) {
        self.begin();
        self.head = chain.head;
        let place = (index, self.numbering.role(index));
        let Self { notes, objects, stocks, .. } = self;
        buffers::judge_chain(notes, place, chain, objects, stocks);
    }

    fn malformed(&mut self, index: u16, error: &RingError) {
        buffers::judge_malformed(&mut self.notes, index, error);
    }

    fn request(&mut self, memory: &GuestMemory, request: &[u8], room: usize) {
        self.count += 1;
        let number = request.first().copied().map_or(0, u32::from);
        let body = request.get(1..).unwrap_or_default();
        self.provoke(|provoker, notes| provoker.note_command(notes, number, body));
        let Some(command) = self.commands.get(&number) else {
            self.notes.step(format!("command {}", self.count));
            let expected = "one that is listed";
            return self.notes.fail(
                "V-TERM-05",
                "number of a command",
                expected,
                &number.to_string(),
            );
        };
        self.notes.step(format!("command {}, {}", self.count, command.name));
        self.notes.pass("V-TERM-05");
        let Self { notes, objects, agreement, .. } = self;
        let mut look = Look { notes, memory, objects, agreement };
        let mut kept = look.request(command, request, room);
        kept.extend(self.keep_queues(memory, number, body));
        if !kept.is_empty() {
            self.kept.insert(self.head, kept);
        }
    }

    fn reply(&mut self, memory: &GuestMemory, request: &[u8], reply: &[u8]) {
        rings::count_cqes(memory, &mut self.objects);
        let Some((number, body)) = request.split_first() else { return };
        if self.provoker.as_mut().is_some_and(|provoker| provoker.spoils((*number).into(), reply)) {
            return;
        }
        control::note_reply(memory, &mut self.objects, (*number).into(), body, reply);
    }

    fn returned(&mut self, memory: &GuestMemory, index: u16, chain: &Chain) {
        if index != 0 {
            return self.stocks.take(index);
        }
        for kept in self.kept.remove(&chain.head).into_iter().flatten() {
            self.notes.step(format!("command {}, or one before it", self.count));
            kept.judge(&mut self.notes, memory);
        }
    }

    fn before(&mut self, memory: &GuestMemory) {
        if self.setup.is_running() {
            self.begin();
        }
        let Self { notes, objects, agreement, patience, .. } = self;
        let has_early = agreement.has(VIRTIO_RDMA_F_RESET_TO_RTR);
        rings::look_before(notes, memory, objects, has_early, *patience);
        self.stocks.judge(&mut self.notes, self.numbering, self.patience);
        self.note_work();
        self.provoke(Provoker::look);
    }

    fn after(&mut self, memory: &GuestMemory) {
        rings::look_after(memory, &mut self.objects);
        self.stocks.end_look();
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        let is_gone = |page: &&u64| !memory.contains(**page, testkit::PAGE);
        self.notes.step("a change of memory");
        let gone = self.objects.mrs.iter().find_map(|(mrn, pages)| {
            pages.iter().find(is_gone).map(|page| format!("no memory at {page:#x}, of MR {mrn}"))
        });
        if let Some(got) = gone {
            let expected = "DEREG_MR before the memory goes";
            self.notes.miss("V-MR-08", "pages of an MR", expected, &got);
        } else if !self.objects.mrs.is_empty() {
            self.notes.pass("V-MR-08");
        }
        if self.objects.regions().next().is_none() {
            return;
        }
        let mut regions = self.objects.regions();
        let gone = regions.find_map(|region| region.pages.iter().find(is_gone).copied());
        drop(regions);
        self.notes.judge("V-RING-18", gone.is_none(), || {
            let got = format!("no memory at {:#x}", gone.unwrap_or(0));
            ["pages of a region that is in use".into(), "memory".into(), got]
        });
    }

    fn stop(&mut self) {
        self.provoke(Provoker::note_reset);
    }

    fn leave(&mut self) {
        self.provoke(|provoker, _| provoker.note_leave());
    }

    fn orders(&mut self) -> Vec<Order> {
        let count = self.count;
        self.provoker.as_mut().map_or(Vec::new(), |provoker| provoker.due(count))
    }

    fn reset(&mut self) {
        self.provoke(Provoker::note_reset);
        self.notes.step("reset");
        self.setup.reset();
        self.layouts.clear();
        self.kept.clear();
        self.stocks.clear();
        self.objects = Objects::default();
        self.count = 0;
    }
}

/// Serves a device to a driver until the end, and judges the driver.
pub fn observe(
    socket: &Socket,
    mut settings: Settings,
    end: End,
    patience: Duration,
    provoker: Option<Provoker>,
) -> Result<DriverReport, Box<dyn std::error::Error>> {
    settings.with |= provoker.as_ref().map_or(0, Provoker::offers);
    let offered = settings.offered();
    let observer = Observer::new(socket.is_vfio(), offered, patience, provoker);
    let observer = Rc::new(RefCell::new(observer));
    let mut process = Process::new(socket, None, settings, observer.clone())?;
    process.run(end)?;
    drop(process);
    let report = observer.borrow_mut().report();
    Ok(report)
}
