// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The core of a fabric: which device has which address, which QPs are attached to which multicast group, and the
//! clock, the uplink and the random numbers of all its devices.
//!
//! A device `D` is a handle and nothing more here.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};

use memory::Helpers;

use super::rights::{AddressRights, Rights};
use crate::base::address::{Address, Gid};
use crate::base::host::{Clock, Uplink};
use crate::base::port::PortState;
use crate::base::slot::Slot;
use crate::base::sync::{read, write};
use crate::base::tenure::Tenure;

/// The device that has an address.
struct Owner<D> {
    device: Weak<D>,
    /// The number of entries of its GID table that have the address.
    entries: u32,
    /// Ends when the device has the address no longer.
    tenure: Tenure,
}

/// A QP that is attached to a multicast group.
pub(crate) struct Member<D> {
    /// The device of the QP.
    pub device: Weak<D>,
    /// The place of the QP in the device.
    pub slot: Slot,
    /// The number of the membership among all that ever were; later ones have higher numbers.
    pub number: u64,
}

/// The QPs of a multicast group by their number as members. It is replaced as a whole, so that whoever sends
/// to the group holds no lock.
type Group<D> = Arc<[Arc<Member<D>>]>;

/// The core of a fabric. Any thread may use it; its locks are leaves.
pub(crate) struct FabricCore<D> {
    clock: Arc<dyn Clock>,
    /// The way to other hosts, if there is one.
    uplink: Option<Arc<dyn Uplink>>,
    random: fn() -> u64,
    /// The threads that help each other with large copies, if there are several.
    helpers: Option<Arc<Helpers>>,
    /// All devices, and the addresses that each may use.
    devices: RwLock<Vec<(Weak<D>, Rights)>>,
    owners: RwLock<HashMap<Address, Owner<D>>>,
    /// A number that changes whenever an address changes hands. As long as it does not change, a device has the
    /// addresses by which it was found.
    generation: AtomicU64,
    groups: RwLock<HashMap<Gid, Group<D>>>,
    /// The number of members that groups ever had.
    members: AtomicU64,
    /// The state of the port of each device; `None` as long as nobody has said it.
    port: RwLock<Option<PortState>>,
    /// The number of look-ups of devices.
    #[cfg(test)]
    pub look_ups: AtomicU64,
}

impl<D> FabricCore<D> {
    /// Returns the core of a fabric without devices.
    pub fn new(
        clock: Arc<dyn Clock>,
        uplink: Option<Arc<dyn Uplink>>,
        random: fn() -> u64,
        helpers: Option<Arc<Helpers>>,
    ) -> Self {
        Self {
            clock,
            uplink,
            random,
            helpers,
            devices: RwLock::new(Vec::new()),
            owners: RwLock::new(HashMap::new()),
            generation: AtomicU64::new(0),
            groups: RwLock::new(HashMap::new()),
            members: AtomicU64::new(0),
            port: RwLock::new(None),
            #[cfg(test)]
            look_ups: AtomicU64::new(0),
        }
    }

    /// Returns the clock of all devices.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Returns the threads that help each other with large copies, if there are several.
    pub fn helpers(&self) -> Option<&Arc<Helpers>> {
        self.helpers.as_ref()
    }

    /// Returns a random number.
    pub fn random(&self) -> u64 {
        (self.random)()
    }

    /// Returns the way to other hosts, if there is one.
    #[inline]
    pub fn uplink(&self) -> Option<&Arc<dyn Uplink>> {
        self.uplink.as_ref()
    }

    /// Returns the state of the port of each device, if anybody has said it.
    pub fn port_state(&self) -> Option<PortState> {
        *read(&self.port)
    }

    /// Says which state the port of each device has, and calls `tell` with each device if that is a change.
    pub fn set_port_state(&self, state: PortState, tell: impl FnMut(Arc<D>)) {
        let before = write(&self.port).replace(state);
        if before != Some(state) {
            let devices: Vec<_> =
                read(&self.devices).iter().filter_map(|(device, _)| device.upgrade()).collect();
            devices.into_iter().for_each(tell);
        }
    }

    /// Returns a number that changes whenever an address changes hands.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Changes which addresses a device may use.
    pub fn set_rights(&self, device: &Arc<D>, listed: AddressRights) {
        let is_it = |other: &Weak<D>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(device));
        let mut devices = write(&self.devices);
        if let Some((_, rights)) = devices.iter_mut().find(|(other, _)| is_it(other)) {
            rights.set_listed(listed);
        }
    }

    /// Adds a device. It leaves when the last handle to it is dropped.
    pub fn add(&self, device: &Arc<D>, rights: Rights) {
        let mut devices = write(&self.devices);
        devices.retain(|(device, _)| device.strong_count() != 0);
        devices.push((Arc::downgrade(device), rights));
    }

    /// Returns whether a device has the right to use an address that it has used before, whoever else has it.
    pub fn may_keep(&self, address: &Address, device: &Arc<D>) -> bool {
        let is_it = |other: &Weak<D>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(device));
        let devices = read(&self.devices);
        devices.iter().any(|(other, rights)| is_it(other) && rights.may_use(address))
    }

    /// Returns whether `is_it` is true of one of the devices.
    pub fn any(&self, is_it: impl Fn(&D) -> bool) -> bool {
        let devices = read(&self.devices);
        devices.iter().filter_map(|(device, _)| device.upgrade()).any(|device| is_it(&device))
    }

    /// Returns whether a device may use an address: its own list has it, and it is not another guest's,
    /// whether that guest uses it at present or not.
    pub fn may_use(&self, address: &Address, device: &Arc<D>) -> bool {
        let devices = read(&self.devices);
        let is_it = |other: &Weak<D>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(device));
        let Some((_, rights)) = devices.iter().find(|(other, _)| is_it(other)) else {
            return false;
        };
        let is_others = |(other, rights): &(Weak<D>, Rights)| {
            !is_it(other) && other.strong_count() != 0 && rights.owns(&address.gid)
        };
        rights.may_use(address) && (rights.owns(&address.gid) || !devices.iter().any(is_others))
    }

    /// Returns whether an address is named as one of the guest with this MAC address, whether its device uses it at
    /// present or not.
    pub fn is_of(&self, mac: [u8; 6], address: &Address) -> bool {
        let devices = read(&self.devices);
        devices
            .iter()
            .any(|(device, rights)| device.strong_count() != 0 && rights.name(mac, address))
    }

    /// Returns the device that has an address.
    pub fn find(&self, address: &Address) -> Option<Arc<D>> {
        self.find_owner(address).map(|(device, _)| device)
    }

    /// Returns the device that has an address, and for how long.
    pub fn find_owner(&self, address: &Address) -> Option<(Arc<D>, Tenure)> {
        #[cfg(test)]
        self.look_ups.fetch_add(1, Ordering::Relaxed);
        let owners = read(&self.owners);
        let owner = owners.get(address)?;
        Some((owner.device.upgrade()?, owner.tenure.clone()))
    }

    /// Returns whether any device has an address.
    pub fn has(&self, address: &Address) -> bool {
        read(&self.owners).get(address).is_some_and(|owner| owner.device.strong_count() != 0)
    }

    /// Returns whether this device has an address.
    pub fn is_owner(&self, address: &Address, device: &D) -> bool {
        let owners = read(&self.owners);
        owners.get(address).is_some_and(|owner| std::ptr::eq(owner.device.as_ptr(), device))
    }

    /// Gives an address to one more entry of a device's table; `false` if another
    /// device has it.
    pub fn claim(&self, address: Address, device: &Arc<D>) -> bool {
        let new =
            || Owner { device: Arc::downgrade(device), entries: 1, tenure: Tenure::default() };
        match write(&self.owners).entry(address) {
            Entry::Vacant(vacant) => {
                vacant.insert(new());
            }
            Entry::Occupied(mut occupied) => {
                let owner = occupied.get_mut();
                if owner.device.strong_count() == 0 {
                    std::mem::replace(owner, new()).tenure.end();
                } else if std::ptr::eq(owner.device.as_ptr(), Arc::as_ptr(device)) {
                    owner.entries += 1;
                    return true;
                } else {
                    return false;
                }
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes an address from one entry of a device's table.
    pub fn release(&self, address: Address, device: &D) {
        let mut owners = write(&self.owners);
        if let Entry::Occupied(mut occupied) = owners.entry(address) {
            let owner = occupied.get_mut();
            if !std::ptr::eq(owner.device.as_ptr(), device) {
                return;
            }
            owner.entries -= 1;
            if owner.entries == 0 {
                occupied.remove().tenure.end();
                self.generation.fetch_add(1, Ordering::Release);
            }
        }
    }

    /// Returns the QPs attached to a multicast group, as they were at some moment.
    pub fn group(&self, gid: &Gid) -> Option<Group<D>> {
        read(&self.groups).get(gid).cloned()
    }

    /// Adds a QP to a group that it is not in.
    pub fn join(&self, gid: Gid, device: &Arc<D>, slot: Slot) {
        let mut groups = write(&self.groups);
        let number = self.members.fetch_add(1, Ordering::Relaxed);
        let member = Arc::new(Member { device: Arc::downgrade(device), slot, number });
        let group = groups.entry(gid).or_insert_with(|| Arc::new([]));
        *group = group.iter().cloned().chain([member]).collect();
    }

    /// Takes a QP out of a group.
    pub fn leave(&self, gid: &Gid, device: &D, slot: Slot) {
        let mut groups = write(&self.groups);
        let Some(group) = groups.get_mut(gid) else { return };
        let is_it = |member: &Member<D>| {
            member.slot == slot && std::ptr::eq(member.device.as_ptr(), device)
        };
        *group = group.iter().filter(|member| !is_it(member)).cloned().collect();
        if group.is_empty() {
            groups.remove(gid);
        }
    }
}
