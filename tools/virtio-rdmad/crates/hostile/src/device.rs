// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: the engine behind proxies, and the rules by which these spoil what passes.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use engine::{Device, DeviceConfig, Fabric, FabricConfig, Limits, Next};
use memory::{GuestMemory, Region};
use ring::{Chain, Layout};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::io::Errno;

use crate::events::{Events, Source};
use crate::proxy::{Proxy, STRIDE};
use crate::rule::{Config, Forgery, Order, Role, Rule};

/// Where the engine sees its rings: beyond all memory of any guest.
const SHADOW: u64 = 1 << 56;
/// Work requests that the engine does before the rest of the process has its turn.
const BUDGET: u32 = 64;
/// Buffers of one queue that are filled out of nothing in a turn.
const FORGERIES: u32 = 1024;

/// There is one thread, which looks after every message anyway.
struct NoWake;

impl engine::Wake for NoWake {
    fn wake(&self) {}
}

/// A queue and what is still to be forged in it.
struct Place {
    proxy: Proxy,
    forgeries: Vec<Forgery>,
}

/// The device.
pub struct Hostile {
    engine: Arc<Device>,
    limits: Limits,
    config: [u8; 256],
    /// File behind the engine's rings.
    shadow: OwnedFd,
    events: Arc<Events>,
    /// The guest's memory and the engine's rings, from the first queue's start to the reset.
    memory: Option<GuestMemory>,
    places: BTreeMap<u16, Place>,
    kicks: Vec<OwnedFd>,
    rules: Vec<Rule>,
    hits: u64,
    needs_reset: bool,
}

impl Hostile {
    /// A device that behaves.
    pub fn new(limits: Limits, mac: Option<[u8; 6]>, events: Arc<Events>) -> Result<Self, Errno> {
        let fabric = Fabric::new(FabricConfig::default());
        let name = "hostile".to_owned();
        let wake = Arc::new(NoWake);
        let limits_of_engine = limits.clone();
        let config = DeviceConfig { name, mac, limits: limits_of_engine, rings: false, wake };
        let engine = fabric.add_device(config);
        let shadow = memfd_create("rings", MemfdFlags::CLOEXEC)?;
        ftruncate(&shadow, STRIDE * u64::from(engine.queue_count()))?;
        Ok(Self {
            config: engine.config_space(),
            engine,
            limits,
            shadow,
            events,
            memory: None,
            places: BTreeMap::new(),
            kicks: Vec::new(),
            rules: Vec::new(),
            hits: 0,
            needs_reset: false,
        })
    }

    /// How often a rule has held.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Whether the transport is to ask for a reset, once.
    pub fn take_needs_reset(&mut self) -> bool {
        std::mem::take(&mut self.needs_reset)
    }

    /// Obeys.
    pub fn obey(&mut self, order: Order) {
        match order {
            Order::Rule(rule) => self.rules.push(rule),
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
            Order::Config(Config::Fill(byte)) => self.config.fill(byte),
            Order::Config(Config::Honest) => self.config = self.engine.config_space(),
            Order::Config(Config::Patch(offset, bytes)) => {
                let skip = usize::try_from(offset).unwrap_or(usize::MAX);
                for (place, byte) in self.config.iter_mut().skip(skip).zip(bytes) {
                    *place = byte;
                }
            }
            Order::NeedsReset => self.needs_reset = true,
            Order::Honest => {
                self.rules.clear();
                self.places.values_mut().for_each(|place| place.forgeries.clear());
                self.config = self.engine.config_space();
            }
        }
    }

    fn role(limits: &Limits, index: u16) -> Role {
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
        let limits = &self.limits;
        let places = self.places.iter_mut();
        places.filter(move |(i, _)| Self::role(limits, **i) == role).map(|(_, place)| place)
    }

    /// Moves buffers in and out once; whether there may be more to move, and what the engine waits
    /// for.
    ///
    /// Commands come in before the work requests that were posted before them, and go out after
    /// the buffers that they make the device return.
    pub fn turn(&mut self) -> (bool, Next) {
        let mut moved = false;
        for (index, place) in &mut self.places {
            match place.proxy.forward() {
                Ok(true) => {
                    self.engine.kick(*index);
                    moved = true;
                }
                Ok(false) => {}
                Err(error) => tracing::debug!(index, %error, "taking buffers"),
            }
        }
        let next = self.engine.run(BUDGET);
        let mut places = std::mem::take(&mut self.places);
        for (index, place) in places.iter_mut().rev() {
            match self.give_back(Self::role(&self.limits, *index), place) {
                Ok(gave) => moved |= gave,
                Err(error) => tracing::warn!(index, %error, "giving buffers back"),
            }
        }
        self.places = places;
        (moved || next == Next::Busy, next)
    }

    fn give_back(&mut self, role: Role, place: &mut Place) -> Result<bool, memory::MemoryError> {
        let mut moved = false;
        while let Some((chain, written)) = place.proxy.next_used()? {
            moved = true;
            match self.rule_for(role, &chain) {
                Some(rule) => self.spoil(&rule, place, &chain, written)?,
                None => place.proxy.push(chain.head.into(), written)?,
            }
        }
        let forged = Self::forge(place)?;
        if forged {
            place.proxy.interrupt();
        }
        place.proxy.pass_interrupt();
        Ok(moved || forged)
    }

    /// The rule that holds for a buffer, which is then used up by one.
    fn rule_for(&mut self, role: Role, chain: &Chain) -> Option<Rule> {
        let mut command = [0];
        let read = chain.read(&mut command);
        let holds = |rule: &&mut Rule| {
            let this = rule.command.is_none_or(|wanted| read == Ok(1) && command[0] == wanted);
            rule.role == role && rule.times > 0 && this
        };
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
            let mut content = vec![0; buffer.len as usize];
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
            place.proxy.push(id, rule.used.unwrap_or(written))?;
        }
        if rule.jump != 0 {
            place.proxy.jump(rule.jump)?;
        }
        Ok(())
    }

    /// Fills buffers out of nothing, as far as there are any; whether there were.
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
        let region = Region {
            guest_addr: SHADOW,
            len: STRIDE * u64::from(self.engine.queue_count()),
            fd: self.shadow.as_fd(),
            offset: 0,
            writable: true,
        };
        memory.with_region(&region).map_err(|error| error.to_string())
    }

    fn add_queue(
        &mut self,
        index: u16,
        layout: Layout,
        base: u16,
        signal: Arc<dyn engine::Signal>,
    ) -> Result<(), String> {
        let memory = self.memory.as_ref().ok_or("no memory")?;
        let shadow = SHADOW + STRIDE * u64::from(index);
        let (proxy, ring, wanted) = Proxy::new(memory, layout, base, shadow, signal)
            .map_err(|error| format!("queue {index}: {error}"))?;
        self.places.insert(index, Place { proxy, forgeries: Vec::new() });
        self.engine.set_queue(index, ring, wanted);
        Ok(())
    }

    fn begin(&mut self, memory: &GuestMemory) -> Result<(), String> {
        let memory = self.with_shadow(memory)?;
        self.engine.start(&memory, []);
        self.memory = Some(memory);
        Ok(())
    }

    /// Ends what the guest began.
    pub fn end(&mut self) {
        for kick in self.kicks.drain(..) {
            self.events.remove(&kick);
        }
        self.places.clear();
        self.engine.reset();
        self.memory = None;
    }

    /// The rings do not move while a guest runs; what else changes, the engine follows.
    fn follow(&mut self, memory: &GuestMemory) {
        match self.with_shadow(memory) {
            Ok(memory) => {
                self.engine.set_memory(&memory);
                self.memory = Some(memory);
            }
            Err(error) => tracing::warn!(error, "a change of memory"),
        }
    }
}

struct VhostUserSignal(Arc<vhost_user::Signal>);

impl engine::Signal for VhostUserSignal {
    fn signal(&self) {
        self.0.signal();
    }
}

impl vhost_user::Backend for Hostile {
    fn set_features(&mut self, features: u64) {
        self.engine.set_driver_features(features);
    }

    fn features(&self) -> u64 {
        self.engine.features()
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.engine.queue_count()
    }

    fn start_queue(&mut self, queue: u16, setup: vhost_user::QueueSetup) -> Result<(), String> {
        let vhost_user::QueueSetup { memory, layout, base, kick, signal } = setup;
        if self.memory.is_none() {
            self.begin(&memory)?;
        }
        self.events.add(&kick, Source::Kick).map_err(|errno| errno.to_string())?;
        self.kicks.push(kick);
        self.add_queue(queue, layout, base, Arc::new(VhostUserSignal(signal)))
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.follow(memory);
    }

    fn reset(&mut self) {
        self.end();
    }
}

struct VfioUserSignal(Arc<vfio_user::Signal>);

impl engine::Signal for VfioUserSignal {
    fn signal(&self) {
        self.0.signal();
    }
}

impl vfio_user::Backend for Hostile {
    fn features(&self) -> u64 {
        self.engine.features()
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

    fn start(&mut self, setup: vfio_user::Setup) -> Result<(), String> {
        let vfio_user::Setup { memory, queues, .. } = setup;
        self.begin(&memory)?;
        for (index, queue) in (0..).zip(queues) {
            let Some(vfio_user::QueueSetup { size, desc, avail, used, signal }) = queue else {
                continue;
            };
            let layout = Layout { size, desc, avail, used, event_idx: false };
            self.add_queue(index, layout, 0, Arc::new(VfioUserSignal(signal)))?;
        }
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.follow(memory);
    }

    /// Every queue is looked at in each turn.
    fn kick(&mut self, _queue: u16) {}

    fn reset(&mut self) {
        self.end();
    }
}
