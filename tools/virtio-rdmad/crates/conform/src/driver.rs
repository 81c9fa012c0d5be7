// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of a device that believes nothing that the device says, and checks all of it.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use abi::*;
use ring::Layout;
use testkit::command::{self, Gid, PAGE};
use testkit::{Buffer, Memory as _};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::journal::Journal;
use crate::objects::{Cq, Qp, Srq};
use crate::outcome::{not_judged, Outcome};
use crate::port::{Memory, Port, SPARE};
use crate::queue::{Queue, Returned};
use crate::reply::{status_name, Reply};

/// The bytes of a guest's memory.
pub const MEMORY: u64 = 32 << 20;
/// An address of memory at which nothing is.
pub const NOWHERE: u64 = 1 << 45;
/// The address of the first thing in memory.
const FIRST: u64 = 0x1_0000;
/// The most entries of a virtqueue that are used.
const ENTRIES: u16 = 64;
/// The most virtqueues that are set up.
const MOST_QUEUES: u32 = 1024;
/// The control queue.
const CONTROL: u16 = 0;
/// The bytes that are written by nobody, behind buffers that the device writes to.
const GUARD: u64 = 64;
/// The content of memory that the device has not written.
pub const FILL: u8 = 0xa5;
/// The numbers of events.
const EVENTS: [u32; 12] = [0, 1, 2, 3, 4, 5, 8, 9, 10, 14, 15, 16];
/// How long a command should take.
const SLOW: Duration = Duration::from_secs(1);
/// The time between two looks at what is waited for, where no interrupt comes.
const LOOK: Duration = Duration::from_millis(2);

/// A driver.
pub struct Driver {
    /// The device.
    pub port: Box<dyn Port>,
    /// The guest's memory.
    pub memory: Rc<Memory>,
    /// The notes of the test.
    pub journal: Rc<Journal>,
    /// The configuration of the device.
    pub config: virtio_rdma_config,
    /// The features with which the test is to run.
    pub wanted: u64,
    /// The features that were accepted.
    pub features: u64,
    /// The most buffers that the event queue has at the start.
    pub event_buffers: usize,
    /// The GID of the device, in entry 0 of its table.
    pub gid: Gid,
    /// The CQs.
    pub cqs: BTreeMap<u32, Cq>,
    /// The QPs.
    pub qps: BTreeMap<u32, Qp>,
    /// The SRQs.
    pub srqs: BTreeMap<u32, Srq>,
    /// The virtqueues.
    pub queues: BTreeMap<u16, Queue>,
    /// The events that have come and were not looked at: type and handle.
    pub events: Vec<(u32, u32)>,
    /// The completion events that have come and were not looked at: vector and CQ.
    pub completion_events: Vec<(u16, u32)>,
    /// The next address that is not used.
    heap: u64,
    /// Memory that must not change, with its content.
    frozen: Vec<(u64, Vec<u8>, &'static str)>,
}

impl Driver {
    /// Returns the driver of a device that was reset, which has not started.
    pub fn new(port: Box<dyn Port>, memory: Rc<Memory>, journal: Rc<Journal>, gid: Gid) -> Self {
        Self {
            port,
            memory,
            journal,
            config: virtio_rdma_config::new_zeroed(),
            wanted: 0,
            features: 0,
            event_buffers: usize::MAX,
            gid,
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            srqs: BTreeMap::new(),
            queues: BTreeMap::new(),
            events: Vec::new(),
            completion_events: Vec::new(),
            heap: FIRST,
            frozen: Vec::new(),
        }
    }

    /// Clears all memory, after a reset.
    pub fn clear_memory(&mut self) {
        let zeros = vec![0; 1 << 20];
        for at in (0..MEMORY).step_by(zeros.len()) {
            self.memory.map.write_bytes(at, &zeros);
        }
    }

    /// Forgets all objects, after a reset. Memory is as it was, and is not used again.
    pub fn forget(&mut self) {
        self.cqs.clear();
        self.qps.clear();
        self.srqs.clear();
        self.queues.clear();
        self.events.clear();
        self.completion_events.clear();
        self.frozen.clear();
    }

    /// Reads the configuration.
    pub fn read_config(&mut self) -> Outcome {
        let bytes = self.port.config(size_of::<virtio_rdma_config>())?;
        if let Ok(config) = virtio_rdma_config::read_from_bytes(&bytes) {
            self.config = config;
        }
        Ok(())
    }

    /// Accepts these features, and does not start yet. Returns whether FEATURES_OK stands.
    pub fn negotiate(&mut self, features: u64) -> Outcome<Option<bool>> {
        self.journal.step("FEATURES_OK");
        self.features = features;
        self.port.negotiate(features)
    }

    /// Starts the device with the features of the test, and adds its GID.
    pub fn begin(&mut self) -> Outcome {
        let wanted = self.wanted;
        if self.negotiate(wanted)? == Some(false) {
            let expected = format!("it stands for {wanted:#x}");
            let got = "it is cleared".into();
            return Err(self.journal.failure("D-FEAT-06", "FEATURES_OK", expected, got));
        }
        self.start()?;
        self.add_own_gid()
    }

    /// Sets all virtqueues up, starts the device, and makes buffers for events available.
    pub fn start(&mut self) -> Outcome {
        self.journal.step("virtqueues");
        let vectors = self.vectors();
        if vectors == 0 || vectors > 1024 {
            let got = vectors.to_string();
            return Err(self.journal.failure(
                "D-RING-02",
                "num_comp_vectors",
                "1 or more".into(),
                got,
            ));
        }
        self.set_up(3 + vectors)?;
        self.fill_event_queues()
    }

    /// Sets up the virtqueues of a driver that has agreed on VIRTIO_RDMA_F_VIRTQUEUES and not on events, and starts the
    /// device.
    pub fn start_virtqueues(&mut self) -> Outcome {
        self.journal.step("virtqueues");
        let count = self.config.max_cq.saturating_add(self.config.max_qp.saturating_mul(2));
        if count == 0 || count > MOST_QUEUES {
            return not_judged("the suite sets up 1024 virtqueues at most");
        }
        self.set_up(1 + count as u16)
    }

    /// Sets so many virtqueues up, and starts the device.
    fn set_up(&mut self, count: u16) -> Outcome {
        let mut layouts = BTreeMap::new();
        for index in 0..count {
            let most = self.port.queue_max_size(index)?.unwrap_or(ENTRIES);
            if most == 0 {
                let what = format!("size of virtqueue {index}");
                return Err(self.journal.failure("D-RING-03", &what, "not 0".into(), "0".into()));
            }
            let layout = self.layout(most.min(ENTRIES));
            layouts.insert(index, layout);
        }
        self.queues =
            layouts.iter().map(|(index, layout)| (*index, Queue::new(*index, *layout))).collect();
        self.journal.step("DRIVER_OK");
        self.port.start(&self.memory.map, &layouts)
    }

    /// Adds the GID of the device as entry 0.
    pub fn add_own_gid(&mut self) -> Outcome {
        let request = command::add_gid(0, self.gid);
        match self.try_command::<_, ()>("ADD_GID", VIRTIO_RDMA_CMD_ADD_GID, &request)? {
            Ok(()) => Ok(()),
            Err(status @ (VIRTIO_RDMA_STATUS_PERM | VIRTIO_RDMA_STATUS_EXISTS)) => {
                let gid = std::net::Ipv6Addr::from(self.gid);
                let status = status_name(status);
                not_judged(format!("the device may not use GID {gid} ({status}); see --gid"))
            }
            Err(status) => Err(self.refused("D-CTRL-30", "ADD_GID", status)),
        }
    }

    fn layout(&mut self, size: u16) -> Layout {
        let size = if size.is_power_of_two() { size } else { size.next_power_of_two() / 2 };
        let bytes = u64::from(size);
        let desc = self.allocate(16 * bytes, PAGE);
        let avail = self.allocate(6 + 2 * bytes, PAGE);
        let used = self.allocate(6 + 8 * bytes, PAGE);
        Layout { size, desc, avail, used, event_idx: false }
    }

    /// Returns the number of completion event vectors.
    pub fn vectors(&self) -> u16 {
        u16::try_from(self.config.num_comp_vectors).unwrap_or(u16::MAX)
    }

    /// Returns the virtqueue of doorbells.
    pub fn doorbells(&self) -> u16 {
        1 + self.vectors()
    }

    /// Returns the virtqueue of events.
    pub fn event_queue(&self) -> u16 {
        2 + self.vectors()
    }

    /// Returns whether a feature was agreed on.
    pub fn has(&self, feature: u32) -> bool {
        self.features >> feature & 1 != 0
    }

    // Memory.

    /// Returns the address of memory that nothing else uses, and that is full of zeros.
    pub fn allocate(&mut self, len: u64, align: u64) -> u64 {
        let at = self.heap.next_multiple_of(align);
        self.heap = at + len;
        assert!(self.heap <= self.spare(), "a test needs less memory");
        at
    }

    /// Returns the address of the memory that the device can lose, which ends with all memory.
    pub fn spare(&self) -> u64 {
        MEMORY - SPARE
    }

    /// Takes that memory away from the device, or gives it back.
    pub fn set_spare(&mut self, is_there: bool) -> Outcome {
        self.journal.step(format!("memory of the guest is there: {is_there}"));
        let memory = Rc::clone(&self.memory);
        if self.port.set_spare(&memory, is_there)? {
            return Ok(());
        }
        not_judged("the transport cannot take memory away")
    }

    /// Puts bytes where the device may read them, and returns the address.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        let at = self.allocate(bytes.len() as u64, 64);
        self.memory.map.write_bytes(at, bytes);
        at
    }

    /// Returns bytes of memory.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.map.read_bytes(at, &mut bytes);
        bytes
    }

    /// Writes bytes to memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.map.write_bytes(at, bytes);
    }

    /// Checks to the end of the test that nobody writes to this memory from now on.
    pub fn freeze(&mut self, at: u64, len: usize, clause: &'static str) {
        let bytes = self.bytes(at, len);
        self.frozen.push((at, bytes, clause));
    }

    /// Lets this memory change again.
    pub fn unfreeze(&mut self, at: u64, len: usize) {
        let end = at + len as u64;
        self.frozen.retain(|(other, bytes, _)| *other >= end || other + bytes.len() as u64 <= at);
    }

    /// Writes other bytes to memory that is the owner's again, and checks to the end of the test that they stay.
    pub fn poison(&mut self, at: u64, len: usize, clause: &'static str) {
        self.write(at, &vec![0x5a; len]);
        self.freeze(at, len, clause);
    }

    /// Checks the memory that must not change.
    pub fn check_frozen(&self) -> Outcome {
        for (at, bytes, clause) in &self.frozen {
            let what = format!("memory at {at:#x} that the device may not write");
            self.journal.same_bytes(clause, &what, &self.bytes(*at, bytes.len()), bytes)?;
        }
        Ok(())
    }

    // Waiting.

    /// Waits until something is there, to the end of the time that the test has.
    pub fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Self) -> Outcome<Option<T>>,
    ) -> Outcome<T> {
        let deadline = self.journal.deadline();
        if let Some(value) = self.wait_until(deadline, &mut look)? {
            return Ok(value);
        }
        let (clause, expected) = (self.journal.clause(), "this to come".into());
        Err(self.journal.failure(clause, what, expected, "nothing".into()))
    }

    /// Waits until something is there, or until a time.
    pub fn wait_until<T>(
        &mut self,
        deadline: Instant,
        mut look: impl FnMut(&mut Self) -> Outcome<Option<T>>,
    ) -> Outcome<Option<T>> {
        loop {
            if let Some(value) = look(self)? {
                return Ok(Some(value));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.port.rest(LOOK)?;
        }
    }

    /// Lets the device work for this time.
    pub fn pause(&mut self, time: Duration) -> Outcome {
        self.wait_until(Instant::now() + time, |_| Ok(None::<()>)).map(|_| ())
    }

    // Virtqueues.

    /// Makes a chain available, and kicks the device.
    pub fn add(&mut self, queue: u16, buffers: &[Buffer]) -> Outcome {
        let memory = &self.memory.map;
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.add(memory, buffers);
        }
        self.port.kick(queue)
    }

    /// Takes the next chain that the device has returned.
    pub fn take(&mut self, queue: u16, clause: &'static str) -> Outcome<Option<Returned>> {
        let Some(queue) = self.queues.get_mut(&queue) else { return Ok(None) };
        queue.take(&self.memory.map, &self.journal, clause)
    }

    fn fill_event_queues(&mut self) -> Outcome {
        let events = self.event_queue();
        for queue in (1..=self.vectors()).chain([events]) {
            let most = if queue == events { self.event_buffers } else { usize::MAX };
            while self.queues[&queue].has_room(1) && self.queues[&queue].outstanding() < most {
                self.add_event_buffer(queue, 8)?;
            }
        }
        Ok(())
    }

    /// Makes a buffer of an event queue available.
    pub fn add_event_buffer(&mut self, queue: u16, len: u32) -> Outcome {
        let at = self.place(&vec![FILL; len as usize + 16]);
        self.add(queue, &[(at, len, true)])
    }

    /// Takes the next buffer of an event queue, checks it, and makes another one available in its place.
    fn take_event(&mut self, queue: u16) -> Outcome<Option<[u32; 2]>> {
        let Some(returned) = self.take(queue, "D-RING-04")? else { return Ok(None) };
        let (at, len, _) = returned.buffers[0];
        self.journal.is("D-RING-04", "used length of an event", returned.written, 8)?;
        let rest = self.bytes(at + 8, len as usize + 8);
        self.journal.same_bytes(
            "D-RING-04",
            "bytes behind an event",
            &rest,
            &vec![FILL; rest.len()],
        )?;
        let event: [u32; 2] = self.memory.map.get(at);
        self.write(at, &vec![FILL; len as usize]);
        self.add(queue, &[(at, len, true)])?;
        Ok(Some(event))
    }

    /// Takes the events that have come.
    pub fn take_events(&mut self) -> Outcome {
        while let Some([event, handle]) = self.take_event(self.event_queue())? {
            let is_known = EVENTS.contains(&event);
            self.journal.holds("D-TERM-06", "an event that is listed", is_known, event)?;
            self.events.push((event, handle));
        }
        for vector in 0..self.vectors() {
            while let Some([cqn, reserved]) = self.take_event(1 + vector)? {
                self.journal.zero("D-TERM-03", "reserved_04 of a completion event", reserved)?;
                self.completion_events.push((vector, cqn));
            }
        }
        Ok(())
    }

    /// Waits for an event, and takes it out of those that have come.
    pub fn await_event(&mut self, event: u32, handle: u32, what: &str) -> Outcome {
        self.wait(what, |this| {
            this.take_events()?;
            let at = this.events.iter().position(|it| *it == (event, handle));
            Ok(at.map(|at| this.events.remove(at)))
        })
        .map(|_| ())?;
        self.journal.pass(self.journal.clause());
        Ok(())
    }

    /// Returns whether an event has come so far.
    pub fn has_event(&mut self, event: u32, handle: u32) -> Outcome<bool> {
        self.take_events()?;
        Ok(self.events.contains(&(event, handle)))
    }

    /// Waits for a completion event of a CQ, and returns its vector.
    pub fn await_completion_event(&mut self, cqn: u32, what: &str) -> Outcome<u16> {
        self.wait(what, |this| {
            this.take_events()?;
            let at = this.completion_events.iter().position(|it| it.1 == cqn);
            Ok(at.map(|at| this.completion_events.remove(at).0))
        })
    }

    // Commands.

    /// Sends the bytes of a request as one buffer, with room for a reply of so many bytes. Returns the address of the
    /// reply.
    pub fn send_request(&mut self, request: &[u8], room: usize) -> Outcome<u64> {
        let at = self.place(request);
        let reply = self.allocate(room as u64 + GUARD, 64);
        self.write(reply, &vec![FILL; room + GUARD as usize]);
        let mut buffers = vec![(at, request.len() as u32, false)];
        if room > 0 {
            buffers.push((reply, room as u32, true));
        }
        self.add(CONTROL, &buffers)?;
        Ok(reply)
    }

    /// Waits for the next reply.
    pub fn await_reply(&mut self) -> Outcome<Returned> {
        let (begin, silence) = (Instant::now(), self.journal.silence());
        let reply = self.wait_until(begin + silence, |this| this.take(CONTROL, "D-CTRL-03"))?;
        let took = begin.elapsed();
        self.journal.extend(took);
        if took > SLOW {
            self.journal.remark(format!("a reply takes {} ms", took.as_millis()));
        }
        let Some(reply) = reply else {
            let expected = format!("a reply within {} seconds", silence.as_secs());
            return Err(self.journal.failure("D-FAIL-08", "reply", expected, "nothing".into()));
        };
        self.journal.pass("D-FAIL-08");
        Ok(reply)
    }

    /// Sends a request, and returns the bytes of its reply. Nothing may be written behind them.
    pub fn request(&mut self, request: &[u8], room: usize) -> Outcome<Vec<u8>> {
        let at = self.send_request(request, room)?;
        let reply = self.await_reply()?;
        self.check_reply(at, room, reply.written)
    }

    /// Returns the bytes of a reply. Nothing may be written behind them.
    pub fn check_reply(&mut self, at: u64, room: usize, written: u32) -> Outcome<Vec<u8>> {
        let all = self.bytes(at, room + GUARD as usize);
        let (reply, rest) = all.split_at((written as usize).min(room));
        self.journal.same_bytes(
            "D-CTRL-08",
            "bytes behind a reply",
            rest,
            &vec![FILL; rest.len()],
        )?;
        Ok(reply.to_vec())
    }

    /// Sends a command. Returns the reply, or the status if it is another than OK.
    pub fn try_command<Q: IntoBytes + Immutable, R: Reply>(
        &mut self,
        name: &str,
        number: u32,
        request: &Q,
    ) -> Outcome<Result<R, u32>> {
        self.journal.step(name);
        let room = 1 + size_of::<R>() + 16;
        let reply = self.request(&command::encode(number, request), room)?;
        let status = reply.first().copied().map_or(u32::MAX, u32::from);
        if status > VIRTIO_RDMA_STATUS_EXISTS && !reply.is_empty() {
            let (what, got) = (format!("status of {name}"), status.to_string());
            let expected = "one that the specification lists".into();
            return Err(self.journal.failure("D-TERM-06", &what, expected, got));
        }
        if status != VIRTIO_RDMA_STATUS_OK {
            let what = format!("used length of {name} that fails with {}", status_name(status));
            self.journal.is("D-CTRL-03", &what, reply.len(), 1)?;
            return Ok(Err(status));
        }
        let what = format!("used length of {name}");
        self.journal.is("D-CTRL-03", &what, reply.len(), 1 + size_of::<R>())?;
        for range in R::reserved() {
            let what = format!("reserved bytes {range:?} in the reply of {name}");
            let bytes = &reply[1..][range.start..range.end];
            self.journal.same_bytes("D-TERM-03", &what, bytes, &vec![0; bytes.len()])?;
        }
        match R::read_from_bytes(&reply[1..]) {
            Ok(reply) => Ok(Ok(reply)),
            Err(_) => Ok(Err(u32::MAX)),
        }
    }

    /// Sends a command that must succeed, by this clause.
    pub fn command<Q: IntoBytes + Immutable, R: Reply>(
        &mut self,
        clause: &'static str,
        name: &str,
        number: u32,
        request: &Q,
    ) -> Outcome<R> {
        match self.try_command(name, number, request)? {
            Ok(reply) => {
                self.journal.pass(clause);
                Ok(reply)
            }
            Err(status) => Err(self.refused(clause, name, status)),
        }
    }

    /// Returns that a command was refused that must succeed.
    pub fn refused(&self, clause: &str, name: &str, status: u32) -> crate::outcome::Stop {
        if status == VIRTIO_RDMA_STATUS_NO_RESOURCE || status == VIRTIO_RDMA_STATUS_ERR {
            return crate::outcome::Stop::NotJudged(format!("{name}: {}", status_name(status)));
        }
        self.journal.failure(clause, &format!("status of {name}"), "OK".into(), status_name(status))
    }

    /// Judges a clause by the status of a command that must fail. ERR is always allowed.
    pub fn fails<Q: IntoBytes + Immutable, R: Reply>(
        &mut self,
        clause: &'static str,
        (name, number): (&str, u32),
        request: &Q,
        expected: u32,
    ) -> Outcome {
        let status = match self.try_command::<Q, R>(name, number, request)? {
            Ok(_) => VIRTIO_RDMA_STATUS_OK,
            Err(status) => status,
        };
        if status == VIRTIO_RDMA_STATUS_ERR {
            self.journal
                .remark(format!("{name} answers ERR in place of {}", status_name(expected)));
            return Ok(());
        }
        self.journal.is(
            clause,
            &format!("status of {name}"),
            status_name(status),
            status_name(expected),
        )
    }

    // The end of a test.

    /// Checks what holds at the end of each test.
    pub fn finish(&mut self) -> Outcome {
        self.journal.step("end of the test");
        self.take_events()?;
        let cqns: Vec<u32> = self.cqs.keys().copied().collect();
        for cqn in cqns {
            while self.poll(cqn)?.is_some() {}
        }
        self.check_frozen()
    }
}
