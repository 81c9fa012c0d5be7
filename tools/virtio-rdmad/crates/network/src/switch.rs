// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The switch of a network: it forwards Ethernet frames between the guests' network interfaces, the
//! guests' devices and the uplink.
//!
//! It knows the MAC addresses of the interfaces from the specs of guests, and so learns nothing: a frame for
//! one of them goes there, a frame for a group to all, and any other frame to the uplink. A packet of
//! RoCE v2 goes to the device of the guest that has its destination address, and not to an interface. No
//! frame goes back to where it came from.
//!
//! Any thread may forward a frame. The thread of the switch ([`crate::thread`]) takes what comes from the interfaces.
//! Workers send from their own threads what the devices send.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use engine::Fabric;
use roce::{Segments, Split};
use rustix::io::Errno;
use scheduler::Waker;

use crate::forwarding;
use crate::nic::{self, Allowance, Nic, NicCounter};
use crate::uplink::{Uplink, UplinkCounter};

/// The interfaces of guests, by index. One that has gone leaves its index to another one.
pub(crate) type Nics = Vec<Option<Arc<Nic>>>;

/// The switch of a network.
#[derive(Debug)]
pub struct Switch {
    /// The way to other hosts, if there is one.
    pub uplink: Option<Arc<Uplink>>,
    nics: RwLock<Nics>,
    /// Whether there is an interface. Most packets need not know more.
    has_nics: AtomicBool,
    /// Tells the thread that interfaces have come or gone.
    pub(crate) changes: Waker,
}

/// The origin of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Origin {
    /// The device of a guest.
    Device,
    Uplink,
    /// The interface of a guest, by its index.
    Nic(usize),
}

impl Switch {
    /// Makes a switch with these interfaces.
    pub fn new(uplink: Option<Arc<Uplink>>, nics: Vec<Nic>) -> Result<Self, Errno> {
        let has_nics = AtomicBool::new(!nics.is_empty());
        let nics = RwLock::new(nics.into_iter().map(|nic| Some(Arc::new(nic))).collect());
        Ok(Self { uplink, nics, has_nics, changes: Waker::new()? })
    }

    /// Returns the interfaces, locked. Any thread may call this, and keeps the lock for a moment alone.
    pub(crate) fn slots(&self) -> RwLockReadGuard<'_, Nics> {
        self.nics.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the interfaces. Any thread may call this.
    pub fn nics(&self) -> Vec<Arc<Nic>> {
        self.slots().iter().flatten().cloned().collect()
    }

    fn has_nics(&self) -> bool {
        self.has_nics.load(Ordering::Relaxed)
    }

    /// Changes the interfaces, and has the thread follow.
    fn change_nics(&self, change: impl FnOnce(&mut Nics)) {
        let mut nics = self.nics.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut nics);
        self.has_nics.store(nics.iter().any(Option::is_some), Ordering::Relaxed);
        drop(nics);
        self.changes.wake();
    }

    /// Returns whether it can forward what interfaces send and are sent.
    pub fn takes_nics(&self) -> bool {
        self.uplink.as_ref().is_none_or(|uplink| uplink.takes_nics)
    }

    /// Adds an interface. Any thread may call this.
    pub fn add_nic(&self, nic: Nic) {
        let nic = Some(Arc::new(nic));
        self.change_nics(|nics| match nics.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = nic,
            None => nics.push(nic),
        });
    }

    /// Removes the interface of a guest, if it has one. Any thread may call this.
    pub fn remove_nic(&self, guest: &str) {
        self.change_nics(|nics| {
            for place in nics {
                place.take_if(|nic| nic.guest == guest);
            }
        });
    }

    /// Gives a frame to the interfaces that it is for. Returns whether it is for one of them alone.
    fn give_to_nics(&self, frame: &[u8], origin: Origin) -> bool {
        let Some((destination, source)) = forwarding::addresses(frame) else { return true };
        if !self.has_nics() {
            return false;
        }
        let slots = self.slots();
        let mut nics =
            slots.iter().enumerate().filter_map(|(index, nic)| Some((index, nic.as_ref()?)));
        if forwarding::is_group(destination) {
            for (index, nic) in nics {
                if origin != Origin::Nic(index) && nic.mac != source {
                    nic.send(frame);
                }
            }
            return false;
        }
        let nic = nics.find(|(_, nic)| nic.mac == destination);
        if let Some((_, nic)) = nic.filter(|(index, _)| origin != Origin::Nic(*index)) {
            nic.send(frame);
        }
        nic.is_some()
    }

    /// Takes a frame that came over the uplink. Any thread may call this.
    pub fn take_from_uplink(&self, uplink: &Uplink, fabric: &Fabric, frame: &[u8], segment: u16) {
        let Some((destination, source)) = forwarding::addresses(frame) else { return };
        if self.has_nics() && self.slots().iter().flatten().any(|nic| nic.mac == source) {
            return uplink
                .counters
                .report(UplinkCounter::RxOwnSource, "a frame of a guest of ours");
        }
        let is_for_group = forwarding::is_group(destination);
        let is_taken = fabric.receive(frame, segment);
        if !is_for_group && (is_taken || fabric.has_destination(frame)) {
            return;
        }
        let is_for_one = self.give_to_nics(frame, Origin::Uplink);
        let is_heard = is_for_group && (is_taken || self.has_nics());
        if !is_for_one && !is_heard {
            uplink.counters.count(UplinkCounter::RxUnclaimed);
        }
    }

    /// Takes a frame that came from an interface.
    pub(crate) fn take_from_nic(
        &self,
        nic: &Nic,
        index: usize,
        fabric: &Fabric,
        frame: &mut [u8],
        floods: &mut Allowance,
    ) {
        let addresses = forwarding::addresses(frame).filter(|_| nic::is_well_formed(frame));
        let Some((destination, source)) = addresses else {
            return nic.count(NicCounter::RxMalformed);
        };
        if source != nic.mac {
            return nic.count(NicCounter::RxSpoofed);
        }
        if forwarding::is_group(destination) && !floods.take(Instant::now()) {
            return nic.count(NicCounter::RxStorm);
        }
        let is_for_group = forwarding::is_group(destination);
        let is_for_device = !is_for_group && fabric.has_destination(frame);
        if (is_for_device || is_for_group) && !fabric.may_send(nic.mac, frame) {
            return nic.count(NicCounter::RxForged);
        }
        nic.count(NicCounter::RxFrames);
        let is_taken = fabric.receive(frame, 0);
        if !is_for_group && (is_taken || is_for_device) {
            return;
        }
        if self.give_to_nics(frame, Origin::Nic(index)) {
            return;
        }
        match &self.uplink {
            // Which classes of traffic a guest may have is said for its device alone.
            Some(uplink) => _ = uplink.send(Segments { frame, segment: 0, udp: 0 }, false),
            None if forwarding::is_group(destination) => {}
            None => nic.count(NicCounter::RxUnknown),
        }
    }
}

impl engine::Uplink for Switch {
    fn send(&self, segments: Segments<'_>) -> usize {
        if self.has_nics() {
            // The frame is taken apart in a copy, because the uplink may want it as a whole.
            let mut frame = segments.frame.to_vec();
            let (mut split, mut is_for_one) = (Split::new(&frame, segments.segment), false);
            while let Some(packet) = split.next(&mut frame) {
                is_for_one = self.give_to_nics(&frame[packet], Origin::Device);
            }
            if is_for_one {
                return 0;
            }
        }
        self.uplink.as_ref().map_or(0, |uplink| uplink.send(segments, true))
    }
}
