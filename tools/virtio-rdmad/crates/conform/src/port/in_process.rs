// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device of this project, in the process of the suite.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{
    Device, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Limits, Next, Paths, Signal, Wake,
};
use memory::GuestMemory;
use ring::{Layout, SplitQueue};

use super::attached::{Attach, Memory, Port, F_VERSION_1};
use crate::outcome::{gone, Outcome};

/// The number of messages that a device may do in a turn.
const BUDGET: u32 = 64;
/// The longest time to sleep while no device has anything to do.
const NAP: Duration = Duration::from_micros(200);

/// A defect that is planted in a device. It changes what the device has written before the suite sees it.
pub trait Defect {
    /// Spoils what is in memory. The device of the guest with this number has worked.
    fn spoil(&mut self, number: u8, memory: &GuestMemory, queues: &BTreeMap<u16, Layout>);

    /// Spoils the requests that the device of the guest with this number finds when it works.
    fn mislead(&mut self, _number: u8, _memory: &GuestMemory, _queues: &BTreeMap<u16, Layout>) {}

    /// Spoils the device of the guest with this number, which has started.
    fn started(&mut self, _number: u8, _device: &Device) {}

    /// Returns whether devices go on in memory that they have lost.
    fn keeps_memory(&self) -> bool {
        false
    }
}

/// Wakes nobody: the thread of the suite looks for work.
struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// Counts interrupts.
#[derive(Default)]
struct Count(AtomicU64);

impl Signal for Count {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A device of the network, and what its guest has set up.
struct Member {
    number: u8,
    device: Arc<Device>,
    memory: GuestMemory,
    queues: BTreeMap<u16, Layout>,
}

/// The devices of a network, which work while the suite waits for one of them.
pub struct Network {
    fabric: Arc<Fabric>,
    members: RefCell<Vec<Member>>,
    defect: RefCell<Option<Box<dyn Defect>>>,
    /// The features that the devices have and do not offer.
    without: u64,
}

impl Network {
    /// Returns a network without devices.
    pub fn new() -> Rc<Self> {
        Self::with(0, None)
    }

    /// Returns a network whose devices lack features and have a defect.
    pub fn with(without: u64, defect: Option<Box<dyn Defect>>) -> Rc<Self> {
        let fabric = Fabric::new(FabricConfig::default());
        let (members, defect) = (RefCell::default(), RefCell::new(defect));
        Rc::new(Self { fabric, members, defect, without })
    }

    /// Lets each device work until it has nothing more to do now. Returns the time of the first timer.
    fn work(&self) -> Option<Instant> {
        let members = self.members.borrow();
        let next: Vec<Next> = members.iter().map(|member| self.turn(member)).collect();
        if next.contains(&Next::Busy) {
            return Some(Instant::now());
        }
        next.iter()
            .filter_map(|next| if let Next::At(time) = next { Some(*time) } else { None })
            .min()
    }

    /// Lets a device work. One that has nothing to do waits for a kick then.
    fn turn(&self, member: &Member) -> Next {
        if let Some(defect) = self.defect.borrow_mut().as_mut() {
            defect.mislead(member.number, &member.memory, &member.queues);
        }
        let mut next = member.device.run(BUDGET);
        if next != Next::Busy && member.device.arm() {
            next = Next::Busy;
        }
        if let Some(defect) = self.defect.borrow_mut().as_mut() {
            defect.spoil(member.number, &member.memory, &member.queues);
        }
        next
    }
}

/// A device in a network of this process.
pub struct InProcess {
    network: Rc<Network>,
    number: u8,
}

impl InProcess {
    /// Returns the device with this number.
    pub fn new(network: &Rc<Network>, number: u8) -> Self {
        Self { network: Rc::clone(network), number }
    }
}

impl Attach for InProcess {
    fn attach(&self, guest: &Memory) -> Outcome<Box<dyn Port>> {
        let Self { network, number } = self;
        let (number, network) = (*number, Rc::clone(network));
        network.members.borrow_mut().retain(|member| member.number != number);
        let device = network.fabric.add_device(DeviceConfig {
            name: format!("member {number}"),
            mac: Some([0x52, 0x54, 0, 0, 0, number]),
            limits: Limits::for_64_queues(),
            policy: DevicePolicy::default(),
            paths: Paths::ALL,
            wake: Arc::new(NoWake),
        });
        let (memory, queues) = (guest.map.clone(), BTreeMap::new());
        let member = Member { number, device: Arc::clone(&device), memory, queues };
        network.members.borrow_mut().push(member);
        Ok(Box::new(Attached { network, number, device, accepted: 0, signals: BTreeMap::new() }))
    }

    fn name(&self) -> String {
        format!("device {} in this process", self.number)
    }
}

/// The suite's hold on a device.
struct Attached {
    network: Rc<Network>,
    number: u8,
    device: Arc<Device>,
    accepted: u64,
    signals: BTreeMap<u16, Arc<Count>>,
}

impl Port for Attached {
    fn offered(&mut self) -> Outcome<u64> {
        Ok(self.device.features() & !self.network.without | F_VERSION_1)
    }

    fn is_legacy(&mut self) -> Outcome<Option<bool>> {
        Ok(None)
    }

    fn offers_migration(&mut self) -> Outcome<Option<bool>> {
        Ok(None)
    }

    fn queue_count(&mut self) -> Outcome<Option<u16>> {
        Ok(Some(self.device.queue_count()))
    }

    fn queue_max_size(&mut self, queue: u16) -> Outcome<Option<u16>> {
        Ok(Some(self.device.queue_max_size(queue)))
    }

    fn config(&mut self, len: usize) -> Outcome<Vec<u8>> {
        let config = self.device.config_space();
        Ok(config[..len.min(config.len())].to_vec())
    }

    fn write_config(&mut self, _: usize, _: &[u8]) -> Outcome<bool> {
        Ok(false)
    }

    /// A transport decides whether FEATURES_OK stands; this one has the rule of the others.
    fn negotiate(&mut self, features: u64) -> Outcome<Option<bool>> {
        let offered = self.offered()?;
        self.accepted = features;
        Ok(Some(features & !offered == 0 && abi::is_agreement(features)))
    }

    fn start(&mut self, memory: &GuestMemory, queues: &BTreeMap<u16, Layout>) -> Outcome {
        self.device.set_driver_features(self.accepted);
        self.signals = queues.keys().map(|index| (*index, Arc::default())).collect();
        let mut rings = Vec::new();
        for (index, layout) in queues {
            let ring = SplitQueue::new(memory, *layout, 0).map_err(gone)?;
            rings.push((*index, ring, Arc::clone(&self.signals[index]) as Arc<dyn Signal>));
        }
        let mut members = self.network.members.borrow_mut();
        if let Some(member) = members.iter_mut().find(|member| member.number == self.number) {
            member.queues.clone_from(queues);
        }
        self.device.start(memory, rings);
        drop(members);
        if let Some(defect) = self.network.defect.borrow_mut().as_mut() {
            defect.started(self.number, &self.device);
        }
        Ok(())
    }

    fn kick(&mut self, queue: u16) -> Outcome {
        self.device.kick(queue);
        Ok(())
    }

    fn rest(&mut self, at_most: Duration) -> Outcome {
        let nap = NAP.min(at_most);
        let wait = match self.network.work() {
            Some(time) => time.saturating_duration_since(Instant::now()).min(nap),
            None => nap,
        };
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        Ok(())
    }

    fn interrupts(&mut self, queue: u16) -> u64 {
        self.signals.get(&queue).map_or(0, |count| count.0.load(Ordering::Relaxed))
    }

    fn reset(&mut self) -> Outcome {
        self.device.reset();
        let mut members = self.network.members.borrow_mut();
        if let Some(member) = members.iter_mut().find(|member| member.number == self.number) {
            member.queues.clear();
        }
        Ok(())
    }

    fn set_spare(&mut self, guest: &Memory, is_there: bool) -> Outcome<bool> {
        let keeps = self.network.defect.borrow().as_ref().is_some_and(|it| it.keeps_memory());
        if is_there {
            self.device.set_memory(&guest.map);
        } else if !keeps {
            self.device.set_memory(&guest.without_spare());
        }
        Ok(true)
    }

    fn needs_reset(&mut self) -> Outcome<Option<bool>> {
        Ok(Some(self.device.needs_reset()))
    }
}
