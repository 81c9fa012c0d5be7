// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The objects that only control commands change, and their part of the guest's limits.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use memory::GuestMemory;
use serde::{Deserialize, Serialize};

use super::status::Status;
use crate::base::address::Gid;
use crate::base::budget::{cost, Budget};
use crate::base::by_key::ByKey;
use crate::base::image::{require, LoadError, Wrong};
use crate::base::limits::Limits;
use crate::base::slab::{Slab, SlabImage};
use crate::base::slot::Slot;
use crate::base::sync::read;
use crate::base::table::{Numbers, NumbersImage};
use crate::memory::fast_reg::FastReg;
use crate::memory::key_table::KeyTable;
use crate::memory::mr::{Attributes, Mr};
use crate::memory::mw::MemoryWindow;
use crate::memory::page_list::PAGE_SIZE;

/// A memory region as its guest knows it.
pub(crate) enum MrEntry {
    /// A region of GET_DMA_MR or REG_USER_MR.
    Fixed {
        /// The attributes of the region.
        attributes: Attributes,
        /// `None` while its memory is not in the guest's map.
        live: Option<Arc<Mr>>,
    },
    /// A region of CREATE_MR; the rest is in the table of keys.
    FastReg {
        /// A key with its upper 24 bits.
        key: u32,
        /// Its protection domain.
        pdn: u32,
        /// Extents that are set aside.
        extents: usize,
    },
}

impl MrEntry {
    /// Returns how many bytes of memory it counts for ([`Quota::memory`](crate::Quota)).
    pub fn registered(&self) -> u64 {
        match self {
            Self::Fixed { attributes, .. } => attributes.covered(),
            Self::FastReg { extents, .. } => *extents as u64 * PAGE_SIZE,
        }
    }
}

/// A window as control commands know it.
pub(crate) struct MwEntry {
    /// A key with the upper 24 bits of the window's.
    pub key: u32,
    /// Its PD.
    pub pdn: u32,
}

/// The attachments of one device to multicast groups.
#[derive(Default)]
pub(crate) struct Attachments {
    /// The number of QPs that are attached to each group.
    by_group: HashMap<Gid, u32>,
    total: u32,
}

impl Attachments {
    /// Returns how many groups there are.
    pub fn groups(&self) -> usize {
        self.by_group.len()
    }

    /// Returns whether a QP is attached to a group.
    pub fn has(&self, gid: &Gid) -> bool {
        self.by_group.contains_key(gid)
    }

    /// Returns whether the limits allow one more QP to be attached to a group.
    pub fn has_room(&self, gid: &Gid, limits: &Limits) -> bool {
        let members = self.by_group.get(gid).copied().unwrap_or(0);
        let groups = u32::try_from(self.by_group.len()).unwrap_or(u32::MAX);
        members < limits.max_mcast_qp_attach
            && self.total < limits.max_mcast_attach
            && (members != 0 || groups < limits.max_mcast_grp)
    }

    /// Notes that one more QP is attached to a group.
    pub fn add(&mut self, gid: Gid) {
        *self.by_group.entry(gid).or_insert(0) += 1;
        self.total += 1;
    }

    /// Notes that one QP less is attached to a group.
    pub fn remove(&mut self, gid: &Gid) {
        if let Some(count) = self.by_group.get_mut(gid) {
            *count -= 1;
            self.total -= 1;
            if *count == 0 {
                self.by_group.remove(gid);
            }
        }
    }
}

/// Objects to which others belong: PDs and XRC domains.
pub(crate) struct Domains(Slab<u32>);

impl Domains {
    /// Makes a domain, and returns its index.
    pub fn create(&mut self) -> Result<u32, Status> {
        self.0.insert(0).map_err(|_| Status::NoResource)
    }

    /// Ends a domain that no object belongs to.
    pub fn destroy(&mut self, index: u32) -> Result<(), Status> {
        match self.0.get(index) {
            None => Err(Status::NoObject),
            Some(0) => {
                self.0.remove(index);
                Ok(())
            }
            Some(_) => Err(Status::Busy),
        }
    }

    /// Fails if there is no such domain.
    pub fn require(&self, index: u32) -> Result<(), Status> {
        self.0.get(index).map(|_| ()).ok_or(Status::NoObject)
    }

    /// Returns how many domains there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Notes that one more object belongs to a domain.
    pub fn enter(&mut self, index: u32) {
        if let Some(users) = self.0.get_mut(index) {
            *users += 1;
        }
    }

    /// Notes that one object less belongs to a domain.
    pub fn leave(&mut self, index: u32) {
        if let Some(users) = self.0.get_mut(index) {
            *users -= 1;
        }
    }
}

/// The objects that only control commands change. Only the guest's own thread uses them.
pub(crate) struct Objects {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// PDs by number.
    pub pds: Domains,
    /// Regions by number.
    pub mrs: Slab<MrEntry>,
    /// XRC domains by number less one.
    pub xrcds: Domains,
    /// Memory windows by number.
    pub mws: Slab<MwEntry>,
    /// Upper 24 bits of the keys of regions that are not in memory.
    invalid_keys: ByKey<()>,
    /// Regions and windows that nobody can find any more, and that a peer uses to the end of its round.
    leaving: Vec<Arc<Mr>>,
    /// Regions that nobody uses any more, whose tables are yet to be freed.
    dead: Vec<Arc<Mr>>,
    /// Extents of all regions, and pages of rings.
    pub extents: usize,
    /// Bytes of memory that regions cover, as a quota counts them.
    pub registered: u64,
    /// The number of QPs.
    pub qps: u32,
    /// The number of CQs.
    pub cqs: u32,
    /// The number of SRQs.
    pub srqs: u32,
    /// The place at which the search for a free QP on virtqueues begins. It moves on, so that a number is not used
    /// again soon.
    pub next_slot: u16,
    /// Numbers of CQs with rings.
    pub ring_cqs: Numbers,
    /// Places of QPs with rings, without the GSI's.
    pub ring_slots: Numbers<Slot>,
    /// Places of SRQs.
    pub srq_slots: Numbers<Slot>,
    /// Attachments to multicast groups.
    pub attachments: Attachments,
}

/// The image of an MR.
#[derive(Serialize, Deserialize)]
enum MrImage {
    /// One with memory, and whether that was found.
    Fixed(Attributes, bool),
    /// One for fast registration, and whether it has memory.
    FastReg(FastReg, bool),
}

/// The image of all objects. It does not say how many objects belong to each domain, because they are counted again.
#[derive(Serialize, Deserialize)]
pub(crate) struct ObjectsImage {
    pds: SlabImage<()>,
    xrcds: SlabImage<()>,
    mrs: SlabImage<MrImage>,
    mws: SlabImage<(MemoryWindow, bool)>,
    next_slot: u16,
    ring_cqs: NumbersImage,
    ring_slots: NumbersImage,
    srq_slots: NumbersImage,
}

/// The numbers of the objects on rings.
#[derive(Default)]
pub(crate) struct InUse {
    /// The numbers of CQs.
    pub cqs: Vec<u16>,
    /// The places of QPs.
    pub qps: Vec<Slot>,
    /// The places of SRQs.
    pub srqs: Vec<Slot>,
}

impl Objects {
    /// Returns the image of the objects.
    pub fn save(&self, keys: &KeyTable) -> ObjectsImage {
        let mr = |mr: &MrEntry| match mr {
            MrEntry::Fixed { attributes, live } => {
                Some(MrImage::Fixed(attributes.clone(), live.is_some()))
            }
            MrEntry::FastReg { key, .. } => {
                keys.save_fast_reg(*key).map(|(region, found)| MrImage::FastReg(region, found))
            }
        };
        ObjectsImage {
            pds: self.pds.0.save(|_| Some(())),
            xrcds: self.xrcds.0.save(|_| Some(())),
            mrs: self.mrs.save(mr),
            mws: self.mws.save(|mw| keys.save_window(mw.key)),
            next_slot: self.next_slot,
            ring_cqs: self.ring_cqs.save(),
            ring_slots: self.ring_slots.save(),
            srq_slots: self.srq_slots.save(),
        }
    }

    /// Loads the image of the objects, of which those with the numbers `used` are on rings. The memory is there
    /// already, and what rings take of the extents is counted.
    pub fn load(
        &mut self,
        image: ObjectsImage,
        keys: &mut KeyTable,
        limits: &Limits,
        used: InUse,
    ) -> Result<(), LoadError> {
        let named = |object| move |(number, why)| LoadError::Object { object, number, why };
        self.pds.0 = image.pds.load(limits.max_pd, |()| Ok(0)).map_err(named("PD"))?;
        self.xrcds.0 = image.xrcds.load(limits.max_xrcd, |()| Ok(0)).map_err(named("XRCD"))?;
        let mrs = image.mrs.load(limits.max_mr, |mr| self.load_mr(mr, keys, limits));
        self.mrs = mrs.map_err(named("MR"))?;
        let window = |(window, has_memory): (MemoryWindow, bool)| {
            require(!self.invalid_keys.contains(window.key >> 8), "another one has its key")?;
            keys.load_window(window, has_memory)?;
            self.enter_pd(window.pdn)?;
            Ok(MwEntry { key: window.key, pdn: window.pdn })
        };
        self.mws = image.mws.load(limits.max_mw, window).map_err(named("MW"))?;
        let slots = 1..=limits.max_qp;
        let next_slot = Some(image.next_slot).filter(|slot| slots.contains(slot));
        self.next_slot = next_slot
            .ok_or_else(|| LoadError::of("QP", image.next_slot)("its place is out of range"))?;
        let numbers = |object| move |why| LoadError::of(object, 0_u16)(why);
        self.ring_cqs.load(image.ring_cqs, used.cqs).map_err(numbers("CQ"))?;
        self.ring_slots.load(image.ring_slots, used.qps).map_err(numbers("QP"))?;
        self.srq_slots.load(image.srq_slots, used.srqs).map_err(numbers("SRQ"))
    }

    fn load_mr(
        &mut self,
        image: MrImage,
        keys: &mut KeyTable,
        limits: &Limits,
    ) -> Result<MrEntry, Wrong> {
        let entry = match image {
            MrImage::Fixed(attributes, is_live) => {
                let key = attributes.key;
                attributes.check(limits.max_mr_size)?;
                keys.check_new(key)?;
                require(!self.invalid_keys.contains(key >> 8), "another one has its key")?;
                let mr =
                    is_live.then(|| Mr::new(&self.memory, attributes.clone(), self.room(limits)));
                let live = mr.transpose().map_err(|_| "it is not in memory")?.map(Arc::new);
                self.set_valid_key(key, is_live);
                if let Some(mr) = &live {
                    self.extents += mr.extents();
                    keys.insert(Arc::clone(mr));
                }
                self.enter_pd(attributes.pdn)?;
                MrEntry::Fixed { attributes, live }
            }
            MrImage::FastReg(region, has_memory) => {
                let FastReg { key, pdn, max_pages, .. } = region;
                require(!self.invalid_keys.contains(key >> 8), "another one has its key")?;
                require(max_pages <= self.room(limits), "it is beyond the limit of extents")?;
                keys.load_fast_reg(region, has_memory, limits.max_mr_size)?;
                self.extents += max_pages;
                self.enter_pd(pdn)?;
                MrEntry::FastReg { key, pdn, extents: max_pages }
            }
        };
        self.registered += entry.registered();
        Ok(entry)
    }

    /// Notes that one more object that was saved belongs to a PD.
    pub fn enter_pd(&mut self, pdn: u32) -> Result<(), Wrong> {
        self.pds.require(pdn).map_err(|_| "its PD does not exist")?;
        self.pds.enter(pdn);
        Ok(())
    }

    /// Notes that one more object that was saved belongs to an XRC domain, whose numbers begin at 1.
    pub fn enter_xrcd(&mut self, xrcdn: u32) -> Result<(), Wrong> {
        let index = xrcdn.wrapping_sub(1);
        self.xrcds.require(index).map_err(|_| "its XRC domain does not exist")?;
        self.xrcds.enter(index);
        Ok(())
    }

    /// Returns the objects of a guest that has made none. QPNs begin at a number that `random` chooses: a peer that has
    /// not noticed yet that another guest is there takes a QPN that it knows for one of its connections (IBA 12.4.1).
    pub fn new(limits: &Limits, random: u64) -> Self {
        // Place 0 is the GSI's.
        let begin = |end: u16| 1 + (random % u64::from(end.max(2) - 1)) as u16;
        Self {
            memory: GuestMemory::default(),
            pds: Domains(Slab::new(limits.max_pd)),
            mrs: Slab::new(limits.max_mr),
            xrcds: Domains(Slab::new(limits.max_xrcd)),
            mws: Slab::new(limits.max_mw),
            invalid_keys: ByKey::default(),
            leaving: Vec::new(),
            dead: Vec::new(),
            extents: 0,
            registered: 0,
            qps: 0,
            cqs: 0,
            srqs: 0,
            next_slot: begin(limits.max_qp),
            ring_cqs: Numbers::new(0, limits.ring_cq),
            ring_slots: Numbers::beginning_at(begin(limits.ring_qp), 1, limits.ring_qp),
            srq_slots: Numbers::new(0, limits.max_srq),
            attachments: Attachments::default(),
        }
    }

    /// Returns how many extents and pages of rings the limits still allow.
    pub fn room(&self, limits: &Limits) -> usize {
        limits.max_extents.saturating_sub(self.extents)
    }

    /// Returns a key for a new region or window.
    pub fn choose_key(&self, keys: &RwLock<KeyTable>) -> Result<u32, Status> {
        let taken = |key: u32| self.invalid_keys.contains(key >> 8);
        read(keys).choose_key(taken).ok_or(Status::Error)
    }

    /// Notes whether the region with this key is in memory.
    pub fn set_valid_key(&mut self, key: u32, is_valid: bool) {
        if is_valid {
            self.invalid_keys.remove(key >> 8);
        } else {
            self.invalid_keys.insert(key >> 8, ());
        }
    }

    /// Gives a region its number.
    pub fn insert_mr(&mut self, entry: MrEntry) -> Result<u32, Status> {
        let registered = entry.registered();
        let mrn = self.mrs.insert(entry).map_err(|_| Status::NoResource)?;
        self.registered += registered;
        Ok(mrn)
    }

    /// Puts a region of GET_DMA_MR or REG_USER_MR in the place of the one before, which it returns. With `None`, the
    /// region is not in memory.
    pub fn set_live(&mut self, mrn: u32, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        match self.mrs.get_mut(mrn) {
            Some(MrEntry::Fixed { live, .. }) => std::mem::replace(live, mr),
            _ => mr,
        }
    }

    /// Begins to end all use of a region that nobody finds any more. It has ended when [`Self::is_let_go`] says so.
    pub fn retire(&mut self, mr: Arc<Mr>) {
        if mr.begin_to_retire() {
            self.free_later(mr);
        } else {
            self.leaving.push(mr);
        }
    }

    /// Returns whether nobody uses a region any more that was retired. A peer that does comes to the end of its round
    /// first, which leaves no time for anything else in this one.
    pub fn is_let_go(&mut self, budget: &mut Budget) -> bool {
        while let Some(mr) = self.leaving.pop() {
            if !mr.begin_to_retire() {
                self.leaving.push(mr);
                budget.work(cost::WAIT);
                return false;
            }
            self.free_later(mr);
        }
        true
    }

    /// Waits until [`Self::is_let_go`].
    pub fn wait_for_peers(&mut self) {
        while let Some(mr) = self.leaving.pop() {
            mr.retire();
            self.free_later(mr);
        }
    }

    /// Leaves the extents of a region that nobody uses any more to [`Self::free_dead`].
    fn free_later(&mut self, mr: Arc<Mr>) {
        if mr.extents() != 0 {
            self.dead.push(mr);
        }
    }

    /// Leaves the rest of a region that ended elsewhere, or was never made, to [`Self::free_dead`].
    pub fn bury(&mut self, remains: Mr) {
        self.dead.push(Arc::new(remains));
    }

    /// Frees the extents of regions that have ended, until the budget is exhausted. Returns whether none is left.
    pub fn free_dead(&mut self, budget: &mut Budget) -> bool {
        while let Some(mr) = self.dead.pop() {
            // A peer that held it lets go of it at the end of its round.
            let mut mr = match Arc::try_unwrap(mr) {
                Ok(mr) => mr,
                Err(mr) => {
                    self.dead.push(mr);
                    return false;
                }
            };
            loop {
                if budget.is_over() {
                    self.dead.push(Arc::new(mr));
                    return false;
                }
                let freed = mr.shed();
                if freed == 0 {
                    break;
                }
                budget.work(freed * cost::FREE);
            }
        }
        true
    }
}
