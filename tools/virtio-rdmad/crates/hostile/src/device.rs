// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: the engine, and between it and the guest the proxies that spoil what passes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::{virtio_rdma_config, VIRTIO_RDMA_F_RINGS};
use engine::{Device, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Limits, Next, Paths};
use memory::{GuestMemory, GuestRegion};
use ring::{Chain, RingError};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::io::Errno;
use virtio_transport::{Backend, Deed, QueueSetup};

use crate::events::{Events, Source};
use crate::proxy::{Proxy, STRIDE};
use crate::rings::{Rings, SLOT};
use crate::rule::{Config, Forgery, Order, Role, Rule};
use crate::watch::Watch;

/// The guest address at which the engine sees its rings. No guest has memory there.
const SHADOW: u64 = 1 << 56;
/// The number of work requests that the engine does before the rest of the process has its turn.
const BUDGET: u32 = 64;
/// The time to wait for a guest that has no room in a ring. The guest does not say when it has room again.
const PATIENCE: Duration = Duration::from_millis(1);
/// The most buffers of one queue that are forged in a turn.
const FORGERIES: u32 = 1024;
/// The most bytes of a request or a reply that are looked at. No structure is longer.
const LONGEST: usize = 4096;

/// The status of a device that runs: ACKNOWLEDGE, DRIVER, DRIVER_OK and FEATURES_OK.
const RUNNING: u8 = 0xf;

/// Wakes nobody: there is one thread, which looks for work after every message anyway.
struct NoWake;

impl engine::Wake for NoWake {
    fn wake(&self) {}
}

/// A queue, and what is still to be forged in it.
struct Place {
    index: u16,
    proxy: Proxy,
    /// Whether the driver has made a chain available that cannot be followed.
    is_broken: bool,
    forgeries: Vec<Forgery>,
    held: Vec<Held>,
}

/// Until when a buffer is held.
enum Until {
    /// So many other buffers are given back first.
    Buffers(u32),
    /// It is this time.
    Time(Instant),
}

/// A buffer that is given back later.
struct Held {
    until: Until,
    /// The head of its chain.
    id: u32,
    /// The number of bytes that were written to it.
    written: u32,
}

impl Place {
    /// Tells the watch of a chain that cannot be followed, once.
    fn note_error(&mut self, watch: &mut dyn Watch, index: u16, error: &RingError) {
        tracing::debug!(index, %error, "taking buffers");
        if !std::mem::replace(&mut self.is_broken, true) {
            watch.malformed(index, error);
        }
    }

    /// Gives a buffer back, and then the buffers that waited for it.
    fn push(&mut self, id: u32, written: u32) -> Result<(), memory::MemoryError> {
        self.proxy.push(id, written)?;
        for held in &mut self.held {
            if let Until::Buffers(count) = &mut held.until {
                *count -= 1;
            }
        }
        self.push_due().map(|_| ())
    }

    /// Gives the buffers back that have waited long enough. Returns whether there were any.
    fn push_due(&mut self) -> Result<bool, memory::MemoryError> {
        let now = Instant::now();
        let is_due = |held: &Held| match held.until {
            Until::Buffers(count) => count == 0,
            Until::Time(time) => time <= now,
        };
        let all = std::mem::take(&mut self.held);
        let (due, held): (Vec<_>, Vec<_>) = all.into_iter().partition(is_due);
        self.held = held;
        for held in &due {
            self.proxy.push(held.id, held.written)?;
        }
        Ok(!due.is_empty())
    }
}

/// What a device is made with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The limits.
    pub limits: Limits,
    /// The MAC address of the guest's network interface.
    pub mac: Option<[u8; 6]>,
    /// Whether the device offers rings.
    pub rings: bool,
    /// Whether completions in rings go to the guest as they are: no rule applies to them then.
    pub direct: bool,
    /// The feature bits that it offers too, and does nothing about.
    pub with: u64,
    /// The feature bits that it does not offer.
    pub without: u64,
}

impl Settings {
    /// Returns the settings of a device that offers all that it has.
    pub fn new(is_vfio: bool, mac: Option<[u8; 6]>) -> Self {
        let limits = if is_vfio { Limits::default() } else { Limits::for_64_queues() };
        let small = Limits { ring_qp: 95, ring_cq: 64, max_srq: 64, ring_wr: 1024, ..limits };
        let limits = Limits { ring_cqe: 4096, ..small };
        Self { limits, mac, rings: true, direct: false, with: 0, without: 0 }
    }

    /// Returns the feature bits that the device offers, without those of the transport.
    pub fn offered(&self) -> u64 {
        let Self { limits, mac, rings, with, without, .. } = self;
        let fabric = Fabric::new(FabricConfig { random: || 0, ..FabricConfig::default() });
        (engine_of(&fabric, limits.clone(), *mac, *rings).features() | with) & !without
    }
}

/// The device.
pub struct Hostile {
    watch: Rc<RefCell<dyn Watch>>,
    engine: Arc<Device>,
    /// The device-specific feature bits that are offered.
    features: u64,
    /// Whether completions in rings go to the guest as they are.
    direct: bool,
    limits: Limits,
    config: [u8; 256],
    /// The rings of objects, if VIRTIO_RDMA_F_RINGS was negotiated.
    rings: Option<Rings>,
    /// The file behind the engine's rings.
    shadow: OwnedFd,
    events: Arc<Events>,
    /// The guest's memory and the engine's rings, from the first queue's start to the reset.
    memory: Option<GuestMemory>,
    places: BTreeMap<u16, Place>,
    /// The requests that the engine takes from the control queue itself, by the heads of their chains.
    requests: BTreeMap<u16, Vec<u8>>,
    kicks: Vec<Arc<OwnedFd>>,
    /// Whether the front end has stopped queues: the guest's memory may not be touched.
    is_frozen: bool,
    rules: Vec<Rule>,
    hits: u64,
    /// The number of times that the device is still to ask for a reset.
    resets: u64,
    needs_reset: bool,
    /// The feature bits without which FEATURES_OK does not stand.
    required: u64,
    /// How late the device shows that the next reset is complete.
    late_reset: Option<Duration>,
    /// When the device shows that the reset is complete, if that is late.
    shows_reset: Option<Instant>,
}

impl Hostile {
    /// Makes a device that behaves.
    pub(crate) fn new(
        settings: Settings,
        watch: Rc<RefCell<dyn Watch>>,
        events: Arc<Events>,
    ) -> Result<Self, Errno> {
        let Settings { limits, mac, rings, direct, with, without } = settings;
        let fabric = Fabric::new(FabricConfig { random: || 0, ..FabricConfig::default() });
        let engine = engine_of(&fabric, limits.clone(), mac, rings);
        let shadow = memfd_create("rings", MemfdFlags::CLOEXEC)?;
        ftruncate(&shadow, shadow_len(&engine, &limits))?;
        let features = (engine.features() | with) & !without;
        Ok(Self {
            watch,
            config: config_space(&engine, features),
            features,
            direct,
            engine,
            limits,
            rings: None,
            shadow,
            events,
            memory: None,
            places: BTreeMap::new(),
            requests: BTreeMap::new(),
            kicks: Vec::new(),
            is_frozen: false,
            rules: Vec::new(),
            hits: 0,
            resets: 0,
            needs_reset: false,
            required: 0,
            late_reset: None,
            shows_reset: None,
        })
    }

    /// Returns how often a rule was applied.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Returns once whether the transport is to ask for a reset.
    pub fn take_needs_reset(&mut self) -> bool {
        std::mem::take(&mut self.needs_reset)
    }

    /// Makes the transport ask for a reset, as long as that was ordered.
    fn ask_for_reset(&mut self) {
        if self.resets > 0 {
            self.resets -= 1;
            self.needs_reset = true;
        }
    }

    /// Does what the watch orders.
    pub fn obey_watch(&mut self) {
        let orders = self.watch.borrow_mut().orders();
        for order in orders {
            self.obey(order);
        }
    }

    /// Tells the watch that the VMM has gone.
    pub fn leave(&mut self) {
        self.watch.borrow_mut().leave();
    }

    /// Does what an order says.
    pub fn obey(&mut self, order: Order) {
        match order {
            Order::Rule(rule) => self.rules.push(rule),
            Order::Forge(Role::Cq, forgery) if self.rings.is_some() => {
                self.rings.iter_mut().for_each(|rings| rings.forge(&forgery));
            }
            Order::Forge(role, forgery) => {
                for place in self.with_role(role) {
                    place.forgeries.push(forgery.clone());
                }
            }
            Order::Interrupt(role, times) => {
                for place in self.with_role(role) {
                    (0..times).for_each(|_| place.proxy.interrupt());
                }
            }
            Order::Poke(object, offset, bytes) => {
                if let (Some(rings), Some(memory), false) =
                    (&self.rings, &self.memory, self.is_frozen)
                {
                    rings.poke(memory, object, offset, &bytes);
                }
            }
            Order::Config(Config::Fill(byte)) => self.config.fill(byte),
            Order::Config(Config::Honest) => {
                self.config = config_space(&self.engine, self.features);
            }
            Order::Config(Config::Patch(offset, bytes)) => {
                let skip = usize::try_from(offset).unwrap_or(usize::MAX);
                for (place, byte) in self.config.iter_mut().skip(skip).zip(bytes) {
                    *place = byte;
                }
            }
            Order::NeedsReset(times) => {
                self.resets = times;
                self.ask_for_reset();
            }
            Order::Require(bit) => self.required |= 1 << bit,
            Order::LateReset(time) => self.late_reset = Some(Duration::from_millis(time)),
            Order::Honest => {
                (self.resets, self.required, self.late_reset) = (0, 0, None);
                self.rules.clear();
                self.places.values_mut().for_each(|place| place.forgeries.clear());
                self.rings.iter_mut().for_each(Rings::end_forgeries);
                self.config = config_space(&self.engine, self.features);
            }
        }
    }

    fn role(limits: &Limits, rings: bool, index: u16) -> Role {
        if rings {
            let vectors = limits.comp_vectors;
            return match index {
                0 => Role::Control,
                _ if index <= vectors => Role::CompletionEvent,
                _ if index == 1 + vectors => Role::Doorbell,
                _ => Role::Event,
            };
        }
        let first_sq = 1 + limits.max_cq;
        match index {
            0 => Role::Control,
            _ if index < first_sq => Role::Cq,
            _ if index == first_sq + 2 * limits.max_qp => Role::Event,
            _ if (index - first_sq) % 2 == 0 => Role::Sq,
            _ => Role::Rq,
        }
    }

    fn with_role(&mut self, role: Role) -> impl Iterator<Item = &mut Place> {
        let (limits, rings) = (&self.limits, self.rings.is_some());
        let places = self.places.iter_mut();
        places.filter(move |(i, _)| Self::role(limits, rings, **i) == role).map(|(_, place)| place)
    }

    /// Moves buffers in and out once. Returns whether there may be more to move, and what the engine
    /// waits for.
    ///
    /// Commands come in before the work requests that were posted before them, and their replies go out
    /// after the buffers that the commands make the device return.
    pub fn turn(&mut self) -> (bool, Next) {
        if self.is_frozen {
            return (false, Next::Idle);
        }
        self.look(|watch, memory| watch.before(memory));
        let result = self.work();
        self.look(|watch, memory| watch.after(memory));
        result
    }

    /// Does what [`Self::turn`] says, between the two looks of the watch.
    fn work(&mut self) -> (bool, Next) {
        let answers = self.commands();
        let mut moved = !answers.is_empty();
        // The commands of a guest with rings are done already.
        let first = usize::from(self.rings.is_some());
        moved |= self.forward(first);
        let next = self.engine.run(BUDGET);
        let waiting = self.pass_rings();
        moved |= self.give_all_back(&answers);
        if moved || next == Next::Busy || self.engine.arm() {
            return (true, next);
        }
        let soon = Instant::now() + PATIENCE;
        match next {
            Next::At(time) if waiting => (false, Next::At(time.min(soon))),
            _ if waiting => (false, Next::At(soon)),
            _ => (false, next),
        }
    }

    /// Lets the watch look at memory.
    fn look(&self, look: impl FnOnce(&mut dyn Watch, &GuestMemory)) {
        if let Some(memory) = &self.memory {
            look(&mut *self.watch.borrow_mut(), memory);
        }
    }

    /// Passes on what the driver made available in all queues from this one on. Returns whether that was anything.
    fn forward(&mut self, first: usize) -> bool {
        let Some(memory) = &self.memory else { return false };
        let (watch, mut any) = (&mut *self.watch.borrow_mut(), false);
        for (index, place) in self.places.iter_mut().skip(first) {
            let moved = place.proxy.forward(|chain| {
                watch.available(*index, chain);
                if *index == 0 {
                    let request = bytes_of(chain);
                    watch.request(memory, &request, chain.writable_len());
                    self.requests.insert(chain.head, request);
                }
            });
            match moved {
                Ok(true) => {
                    self.engine.kick(*index);
                    any = true;
                }
                Ok(false) => {}
                Err(error) => place.note_error(watch, *index, &error),
            }
        }
        any
    }

    /// Gives back what the engine has used, and the replies of commands. Returns whether there was
    /// anything.
    fn give_all_back(&mut self, answers: &[(Chain, u32)]) -> bool {
        let mut moved = false;
        let mut places = std::mem::take(&mut self.places);
        for (index, place) in places.iter_mut().rev() {
            let role = Self::role(&self.limits, self.rings.is_some(), *index);
            let done = match role {
                Role::Control => self.answer(place, answers),
                Role::CompletionEvent => self.tell(*index - 1, place),
                _ => Ok(false),
            };
            match done.and_then(|done| Ok(done | self.give_back(role, place)?)) {
                Ok(gave) => moved |= gave,
                Err(error) => tracing::warn!(index, %error, "giving buffers back"),
            }
        }
        self.places = places;
        moved
    }

    /// Does the commands of a guest with rings. The replies go back later.
    fn commands(&mut self) -> Vec<(Chain, u32)> {
        let mut answers = Vec::new();
        let (Some(rings), Some(memory), Some(place)) =
            (&mut self.rings, &self.memory, self.places.get_mut(&0))
        else {
            return answers;
        };
        loop {
            let watch = &mut *self.watch.borrow_mut();
            let chain = match place.proxy.take() {
                Ok(Some(chain)) => chain,
                Ok(None) => return answers,
                Err(error) => {
                    place.note_error(watch, 0, &error);
                    return answers;
                }
            };
            watch.available(0, &chain);
            let request = bytes_of(&chain);
            let mut reply = vec![0; chain.writable_len().min(LONGEST)];
            watch.request(memory, &request, chain.writable_len());
            let written = rings.command(&self.engine, memory, &request, &mut reply);
            watch.reply(memory, &request, &reply[..written]);
            let written = chain.write(&reply[..written]).unwrap_or(0);
            answers.push((chain, written));
        }
    }

    /// Passes CQEs on to rings. Returns whether some have to wait.
    fn pass_rings(&mut self) -> bool {
        let Some(mut rings) = self.rings.take() else { return false };
        rings.pass(|cqn| {
            self.rule_for(Role::Cq, |rule| rule.cqn.is_none_or(|wanted| wanted == cqn))
        });
        let waiting = rings.is_waiting();
        self.rings = Some(rings);
        waiting
    }

    /// Gives the replies of commands back.
    fn answer(
        &mut self,
        place: &mut Place,
        answers: &[(Chain, u32)],
    ) -> Result<bool, memory::MemoryError> {
        for (chain, written) in answers {
            self.give(Role::Control, place, chain, *written)?;
        }
        if !answers.is_empty() {
            place.proxy.interrupt();
        }
        Ok(!answers.is_empty())
    }

    /// Tells the guest of completions in rings, as long as there are buffers.
    fn tell(&mut self, vector: u16, place: &mut Place) -> Result<bool, memory::MemoryError> {
        let Some(mut rings) = self.rings.take() else { return Ok(false) };
        let mut told = Vec::new();
        for (cqn, due) in rings.due(vector) {
            let Some(chain) = place.proxy.steal()? else { break };
            let event = [cqn.to_le_bytes(), [0; 4]].concat();
            told.push((chain.write(&event)?, chain));
            *due = false;
        }
        self.rings = Some(rings);
        for (written, chain) in &told {
            self.give(Role::CompletionEvent, place, chain, *written)?;
        }
        if !told.is_empty() {
            place.proxy.interrupt();
        }
        Ok(!told.is_empty())
    }

    /// Gives one buffer back, as the rules say.
    fn give(
        &mut self,
        role: Role,
        place: &mut Place,
        chain: &Chain,
        written: u32,
    ) -> Result<(), memory::MemoryError> {
        self.show_returned(role, place.index, chain, written);
        let mut command = [0];
        let read = chain.read(&mut command);
        let is_it = |wanted| read == Ok(1) && command[0] == wanted;
        match self.rule_for(role, |rule| rule.command.is_none_or(is_it)) {
            Some(rule) => match until(&rule) {
                Some(until) => {
                    place.held.push(Held { until, id: chain.head.into(), written });
                    Ok(())
                }
                None => self.spoil(&rule, place, chain, written),
            },
            None => place.push(chain.head.into(), written),
        }
    }

    /// Lets the watch see a buffer that is given back, and with it the reply to a request that the engine has taken.
    fn show_returned(&mut self, role: Role, index: u16, chain: &Chain, written: u32) {
        let Some(memory) = &self.memory else { return };
        let watch = &mut *self.watch.borrow_mut();
        let request = if role == Role::Control { self.requests.remove(&chain.head) } else { None };
        if let Some(request) = request {
            let mut reply = vec![0; (written as usize).min(LONGEST)];
            let read = chain.writable().first().map(|buffer| {
                reply.truncate(buffer.len as usize);
                memory.read(buffer.addr, &mut reply)
            });
            if read == Some(Ok(())) {
                watch.reply(memory, &request, &reply);
            }
        }
        watch.returned(memory, index, chain);
    }

    fn give_back(&mut self, role: Role, place: &mut Place) -> Result<bool, memory::MemoryError> {
        let mut moved = false;
        while let Some((chain, written)) = place.proxy.next_used()? {
            moved = true;
            self.give(role, place, &chain, written)?;
        }
        let more = place.push_due()? | Self::forge(place)?;
        if more {
            place.proxy.interrupt();
        }
        place.proxy.pass_interrupt();
        Ok(moved || more)
    }

    /// Returns the rule for a buffer, or for a CQE in a ring, and counts that as one use of it.
    fn rule_for(&mut self, role: Role, here: impl Fn(&Rule) -> bool) -> Option<Rule> {
        let holds = |rule: &&mut Rule| rule.role == role && rule.times > 0 && here(rule);
        let rule = self.rules.iter_mut().find(holds)?;
        rule.times -= 1;
        self.hits += 1;
        Some(rule.clone())
    }

    fn spoil(
        &self,
        rule: &Rule,
        place: &mut Place,
        chain: &Chain,
        written: u32,
    ) -> Result<(), memory::MemoryError> {
        let buffer = chain.writable().first();
        if let (Some(memory), Some(buffer)) = (&self.memory, buffer) {
            for (offset, bytes) in &rule.write {
                memory.write(buffer.addr + offset, bytes)?;
            }
            let mut content = vec![0; (buffer.len as usize).min(LONGEST)];
            memory.read(buffer.addr, &mut content)?;
            place.forgeries.extend(rule.then.iter().cloned().map(|mut forgery| {
                if forgery.bytes.is_empty() {
                    forgery.bytes.clone_from(&content);
                }
                forgery
            }));
        }
        let entries = if rule.keep { 0 } else { 1 + usize::from(rule.twice) };
        for _ in 0..entries {
            let id = rule.id.unwrap_or(chain.head.into());
            place.push(id, rule.used.unwrap_or(written))?;
        }
        if rule.jump != 0 {
            place.proxy.jump(rule.jump)?;
        }
        Ok(())
    }

    /// Forges buffers, as long as there are any. Returns whether there were some.
    fn forge(place: &mut Place) -> Result<bool, memory::MemoryError> {
        let mut done = 0;
        while let Some(forgery) = place.forgeries.first_mut() {
            if forgery.times == 0 {
                place.forgeries.remove(0);
                continue;
            }
            if done == FORGERIES {
                break;
            }
            let Some(chain) = place.proxy.steal()? else { break };
            chain.write(&forgery.bytes)?;
            place.proxy.push(chain.head.into(), forgery.used)?;
            forgery.times -= 1;
            done += 1;
        }
        Ok(done > 0)
    }

    fn with_shadow(&self, memory: &GuestMemory) -> Result<GuestMemory, String> {
        let region = GuestRegion {
            guest_addr: SHADOW,
            len: shadow_len(&self.engine, &self.limits),
            fd: self.shadow.as_fd(),
            offset: 0,
            writable: true,
        };
        memory.with_region(&region).map_err(|error| error.to_string())
    }

    fn watch(&mut self, kick: Option<Arc<OwnedFd>>) -> Result<(), String> {
        if let Some(kick) = kick {
            self.events.add(&kick, Source::Kick).map_err(|errno| errno.to_string())?;
            self.kicks.push(kick);
        }
        Ok(())
    }

    fn forget_kicks(&mut self) {
        for kick in self.kicks.drain(..) {
            self.events.remove(&kick);
        }
    }

    fn add_queue(&mut self, queue: QueueSetup) -> Result<(), String> {
        let QueueSetup { index, layout, base, kick, signal } = queue;
        self.watch(kick)?;
        let memory = self.memory.as_ref().ok_or("no memory")?;
        let shadow = SHADOW + STRIDE * u64::from(index);
        let (proxy, ring, wanted) = Proxy::new(memory, layout, base, shadow, signal)
            .map_err(|error| format!("queue {index}: {error}"))?;
        self.watch.borrow_mut().start(memory, index, &layout);
        let (forgeries, held) = (Vec::new(), Vec::new());
        self.places.insert(index, Place { index, proxy, is_broken: false, forgeries, held });
        self.engine.set_queue(index, ring, wanted);
        Ok(())
    }
}

/// Returns until when a rule holds a buffer.
fn until(rule: &Rule) -> Option<Until> {
    let time = rule.late.map(|late| Until::Time(Instant::now() + Duration::from_millis(late)));
    time.or((rule.hold != 0).then_some(Until::Buffers(rule.hold)))
}

/// Makes the engine's device.
fn engine_of(fabric: &Fabric, limits: Limits, mac: Option<[u8; 6]>, rings: bool) -> Arc<Device> {
    let name = "hostile".to_owned();
    let wake = Arc::new(NoWake);
    let policy = DevicePolicy::default();
    let paths = Paths { rings, virtqueues: true };
    fabric.add_device(DeviceConfig { name, mac, limits, policy, paths, wake })
}

/// Returns the device-readable bytes of a chain.
fn bytes_of(chain: &Chain) -> Vec<u8> {
    let mut bytes = vec![0; chain.readable_len().min(LONGEST)];
    let read = chain.read(&mut bytes).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

/// Returns the configuration space of an honest device that offers these feature bits.
fn config_space(engine: &Device, features: u64) -> [u8; 256] {
    let mut config = engine.config_space();
    let at = offset_of!(virtio_rdma_config, features);
    config[at..at + 8].copy_from_slice(&features.to_le_bytes());
    config
}

/// Returns the bytes of the engine's virtqueues.
fn queues_len(engine: &Device) -> u64 {
    STRIDE * u64::from(engine.queue_count())
}

/// Returns the bytes of the memory that the engine has and the guest does not.
fn shadow_len(engine: &Device, limits: &Limits) -> u64 {
    queues_len(engine) + SLOT * u64::from(limits.ring_cq)
}

impl Backend for Hostile {
    fn features(&self) -> u64 {
        self.features
    }

    fn accepts(&self, features: u64) -> bool {
        abi::is_agreement(features) && features & self.required == self.required
    }

    /// Shows the status of a device that runs where a reset is to seem late.
    fn shown_status(&self, status: u8) -> u8 {
        let is_late = self.shows_reset.is_some_and(|time| Instant::now() < time);
        if status == 0 && is_late {
            RUNNING
        } else {
            status
        }
    }

    fn note(&mut self, deed: Deed) {
        self.watch.borrow_mut().note(deed);
    }

    /// With vhost-user a driver may have accepted a bit without those that it requires.
    fn set_features(&mut self, features: u64) {
        self.watch.borrow_mut().agree(features, &self.config);
        let features = abi::closed(features);
        self.engine.set_driver_features(features);
        let base = SHADOW + queues_len(&self.engine);
        let rings = features & self.features & 1 << VIRTIO_RDMA_F_RINGS != 0;
        self.rings = rings.then(|| Rings::new(self.limits.clone(), self.direct, base));
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.engine.queue_count()
    }

    fn queue_max_size(&self, queue: u16) -> u16 {
        self.engine.queue_max_size(queue)
    }

    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        if self.memory.is_none() {
            let memory = self.with_shadow(memory)?;
            self.engine.start(&memory, []);
            self.memory = Some(memory);
            self.ask_for_reset();
        }
        queues.into_iter().try_for_each(|queue| self.add_queue(queue))
    }

    /// The engine takes the new map. The rings must not move while a guest runs.
    fn set_memory(&mut self, memory: &GuestMemory) {
        match self.with_shadow(memory) {
            Ok(memory) => {
                self.engine.set_memory(&memory);
                self.rings.iter_mut().for_each(|rings| rings.set_memory(&memory));
                self.watch.borrow_mut().set_memory(&memory);
                self.memory = Some(memory);
            }
            Err(error) => tracing::warn!(error, "a change of memory"),
        }
    }

    /// Does nothing but tell the watch, because each turn looks at every queue.
    fn kick(&mut self, queue: u16) {
        self.watch.borrow_mut().kick(queue);
    }

    /// User-mode Linux has no message for a reset: it stops the queues, and gives their memory to others.
    fn freeze(&mut self) {
        self.forget_kicks();
        self.watch.borrow_mut().stop();
        self.is_frozen = true;
    }

    fn thaw(&mut self, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.forget_kicks();
        queues.into_iter().try_for_each(|queue| self.watch(queue.kick))?;
        self.is_frozen = false;
        Ok(())
    }

    fn reset(&mut self) {
        self.shows_reset = self.late_reset.take().map(|late| Instant::now() + late);
        self.forget_kicks();
        self.is_frozen = false;
        self.places.clear();
        self.requests.clear();
        self.rings.iter_mut().for_each(Rings::clear);
        self.watch.borrow_mut().reset();
        self.engine.reset();
        self.memory = None;
    }
}

#[cfg(test)]
mod tests {
    use ring::{Layout, Signal};
    use testkit::socket::new_memory;
    use testkit::Virtqueue;

    use super::*;

    struct Silent;

    impl Signal for Silent {
        fn signal(&self) {}
    }

    /// A device with memory, of which the driver has one queue.
    struct Stand {
        device: Hostile,
        memory: GuestMemory,
        layout: Layout,
        control: Virtqueue,
    }

    fn setup(layout: Layout) -> Vec<QueueSetup> {
        let signal = Arc::new(Silent);
        vec![QueueSetup { index: 0, layout, base: 0, kick: None, signal }]
    }

    fn stand() -> Stand {
        let fd = new_memory(0x10000);
        let region =
            GuestRegion { guest_addr: 0, len: 0x10000, fd: fd.as_fd(), offset: 0, writable: true };
        let memory = GuestMemory::default().with_region(&region).unwrap();
        let layout = Layout { size: 8, desc: 0, avail: 0x1000, used: 0x2000, event_idx: false };
        let events = Arc::new(Events::new().unwrap());
        let watch = Rc::new(RefCell::new(crate::Blind));
        let mut device = Hostile::new(Settings::new(false, None), watch, events).unwrap();
        device.set_features(0);
        device.start(&memory, setup(layout)).unwrap();
        Stand { device, memory, layout, control: Virtqueue::new(layout) }
    }

    /// A device whose front end has stopped a queue neither takes the driver's buffers nor writes to the used ring.
    #[test]
    fn a_paused_device_leaves_the_guests_memory_alone() {
        let Stand { mut device, memory, layout, mut control } = stand();
        device.freeze();
        control.add(&memory, 0, &[(0x3000, 8, false), (0x4000, 8, true)]);
        assert_eq!(device.turn(), (false, Next::Idle));
        assert_eq!(control.used_index(&memory), 0);

        device.thaw(setup(layout)).unwrap();
        while device.turn().0 {}
        assert_eq!(control.used_index(&memory), 1);
    }

    #[test]
    fn a_late_reply_comes_behind_others() {
        let Stand { mut device, memory, mut control, .. } = stand();
        device.obey(Order::parse(r#"{"on": "control", "late": 3600000}"#).unwrap());
        device.obey(Order::parse(r#"{"on": "control", "late": 1}"#).unwrap());
        for head in [0, 2, 4] {
            control.add(&memory, head, &[(0x3000, 8, false), (0x4000, 8, true)]);
        }
        while control.used_index(&memory) < 2 {
            device.turn();
        }
        let mut heads = [0; 2].map(|_| control.take(&memory).unwrap().0);
        heads.sort_unstable();
        assert_eq!(heads, [2, 4]);
    }

    #[test]
    fn a_reset_shows_late_and_features_are_refused() {
        let Stand { mut device, .. } = stand();
        let rings = 1 << 32 | 1 << VIRTIO_RDMA_F_RINGS;
        assert!(device.accepts(rings));
        device.obey(Order::parse(r#"{"require": 36}"#).unwrap());
        assert!(!device.accepts(rings) && device.accepts(rings | 1 << 36));
        device.obey(Order::parse(r#"{"late_reset": 3600000}"#).unwrap());
        assert_eq!(device.shown_status(0), 0);
        device.reset();
        assert_eq!((device.shown_status(0), device.shown_status(3)), (RUNNING, 3));
        device.reset();
        assert_eq!(device.shown_status(0), 0);
    }
}
