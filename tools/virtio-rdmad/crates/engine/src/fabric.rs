// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One network: which guest has which address.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};

use crate::base::sync::{read, write};
use crate::device::{Device, Shared};
use crate::{Address, Clock, DeviceConfig, Gid, SystemClock};

/// One network.
pub struct FabricConfig {
    /// Its name, for logs.
    pub name: String,
    /// The time for all devices in it.
    pub clock: Arc<dyn Clock>,
}

impl Default for FabricConfig {
    fn default() -> Self {
        Self { name: "default".into(), clock: Arc::new(SystemClock) }
    }
}

/// Who has an address.
struct Owner {
    device: Weak<Shared>,
    /// In how many entries of its table.
    entries: u32,
}

/// A QP that is attached to a multicast group.
pub(crate) struct Member {
    /// Its device.
    pub device: Weak<Shared>,
    /// Its place there.
    pub slot: u16,
}

/// The QPs of a multicast group. It is replaced as a whole, so that whoever sends
/// to the group holds no lock.
type Group = Arc<[Arc<Member>]>;

/// A network of guests, who reach each other by address.
pub struct Fabric {
    name: String,
    clock: Arc<dyn Clock>,
    owners: RwLock<HashMap<Address, Owner>>,
    /// All devices.
    devices: RwLock<Vec<Weak<Shared>>>,
    /// Changes whenever an owner does, so that what was found can be kept.
    generation: AtomicU64,
    groups: RwLock<HashMap<Gid, Group>>,
}

impl Fabric {
    /// A network without guests.
    pub fn new(config: FabricConfig) -> Arc<Self> {
        Arc::new(Self {
            name: config.name,
            clock: config.clock,
            owners: RwLock::new(HashMap::new()),
            devices: RwLock::new(Vec::new()),
            generation: AtomicU64::new(0),
            groups: RwLock::new(HashMap::new()),
        })
    }

    /// The network's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a guest's device. It leaves when the last handle to it is dropped.
    pub fn add_device(self: &Arc<Self>, config: DeviceConfig) -> Arc<Device> {
        let device = Arc::new(Device::new(Arc::clone(self), config));
        let mut devices = write(&self.devices);
        devices.retain(|device| device.strong_count() != 0);
        devices.push(Arc::downgrade(device.shared()));
        drop(devices);
        device
    }

    /// Whether a device may use an address: its own list has it, and it is not another guest's,
    /// whether that guest uses it at present or not.
    pub(crate) fn may_use(&self, address: &Address, device: &Arc<Shared>) -> bool {
        let is_others = |other: &Weak<Shared>| {
            let other = other.upgrade().filter(|other| !Arc::ptr_eq(other, device));
            other.is_some_and(|other| other.rights.owns(&address.gid))
        };
        device.rights.may_use(address)
            && (device.rights.owns(&address.gid) || !read(&self.devices).iter().any(is_others))
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The device that has an address.
    pub(crate) fn find(&self, address: &Address) -> Option<Arc<Shared>> {
        read(&self.owners).get(address)?.device.upgrade()
    }

    /// Gives an address to one more entry of a device's table; `false` if another
    /// device has it.
    pub(crate) fn claim(&self, address: Address, device: &Arc<Shared>) -> bool {
        let new = || Owner { device: Arc::downgrade(device), entries: 1 };
        match write(&self.owners).entry(address) {
            Entry::Vacant(vacant) => {
                vacant.insert(new());
            }
            Entry::Occupied(mut occupied) => {
                let owner = occupied.get_mut();
                if owner.device.strong_count() == 0 {
                    *owner = new();
                } else if std::ptr::eq(owner.device.as_ptr(), Arc::as_ptr(device)) {
                    owner.entries += 1;
                } else {
                    return false;
                }
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes an address from one entry of a device's table.
    pub(crate) fn release(&self, address: Address, device: &Shared) {
        let mut owners = write(&self.owners);
        if let Entry::Occupied(mut occupied) = owners.entry(address) {
            let owner = occupied.get_mut();
            if !std::ptr::eq(owner.device.as_ptr(), device) {
                return;
            }
            owner.entries -= 1;
            if owner.entries == 0 {
                occupied.remove();
            }
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// The QPs attached to a multicast group, as they were at some moment.
    pub(crate) fn group(&self, gid: &Gid) -> Option<Group> {
        read(&self.groups).get(gid).cloned()
    }

    /// Adds a QP to a group that it is not in.
    pub(crate) fn join(&self, gid: Gid, device: &Arc<Shared>, slot: u16) {
        let member = Arc::new(Member { device: Arc::downgrade(device), slot });
        let mut groups = write(&self.groups);
        let group = groups.entry(gid).or_insert_with(|| Arc::new([]));
        *group = group.iter().cloned().chain([member]).collect();
    }

    /// Takes a QP out of a group.
    pub(crate) fn leave(&self, gid: &Gid, device: &Shared, slot: u16) {
        let mut groups = write(&self.groups);
        let Some(group) = groups.get_mut(gid) else { return };
        let is_it =
            |member: &Member| member.slot == slot && std::ptr::eq(member.device.as_ptr(), device);
        *group = group.iter().filter(|member| !is_it(member)).cloned().collect();
        if group.is_empty() {
            groups.remove(gid);
        }
    }
}
