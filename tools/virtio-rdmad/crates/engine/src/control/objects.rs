// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The objects that only control commands change, and what they take of the guest's limits.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use memory::GuestMemory;

use super::status::Status;
use crate::base::address::Gid;
use crate::base::budget::{cost, Budget};
use crate::base::by_key::ByKey;
use crate::base::limits::Limits;
use crate::base::slab::Slab;
use crate::base::sync::read;
use crate::base::table::Numbers;
use crate::memory::key_table::KeyTable;
use crate::memory::mr::{Attributes, Mr};

/// A memory region as its guest knows it.
pub(crate) enum MrEntry {
    /// A region of GET_DMA_MR or REG_USER_MR.
    Fixed {
        /// What it is.
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
    /// How many QPs are attached to each group.
    by_group: HashMap<Gid, u32>,
    total: u32,
}

impl Attachments {
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

/// What only control commands change. The guest's own thread alone uses it.
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
    /// Regions that nobody can find any more, whose tables are yet to be freed.
    dead: Vec<Arc<Mr>>,
    /// Extents of all regions, and pages of rings.
    pub extents: usize,
    /// Where the search for a free QP on virtqueues begins, so that numbers come
    /// back late.
    pub next_slot: u16,
    /// Numbers of CQs with rings.
    pub ring_cqs: Numbers,
    /// Places of QPs with rings, without the GSI's.
    pub ring_slots: Numbers,
    /// Places of SRQs.
    pub srq_slots: Numbers,
    /// Attachments to multicast groups.
    pub attachments: Attachments,
}

impl Objects {
    /// Returns what a guest has that made no object.
    pub fn new(limits: &Limits) -> Self {
        Self {
            memory: GuestMemory::default(),
            pds: Domains(Slab::new(limits.max_pd)),
            mrs: Slab::new(limits.max_mr),
            xrcds: Domains(Slab::new(limits.max_xrcd)),
            mws: Slab::new(limits.max_mw),
            invalid_keys: ByKey::default(),
            dead: Vec::new(),
            extents: 0,
            next_slot: 1,
            ring_cqs: Numbers::new(0, limits.ring_cq),
            ring_slots: Numbers::new(1, limits.ring_qp),
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
        self.mrs.insert(entry).map_err(|_| Status::NoResource)
    }

    /// Puts a region of GET_DMA_MR or REG_USER_MR in the place of the one before, which it returns;
    /// `None`: the region is not in memory.
    pub fn set_live(&mut self, mrn: u32, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        match self.mrs.get_mut(mrn) {
            Some(MrEntry::Fixed { live, .. }) => std::mem::replace(live, mr),
            _ => mr,
        }
    }

    /// Ends all use of a region that nobody finds any more; what it takes is freed by
    /// [`Self::free_dead`]. Where a peer has to end its round first, that takes the whole budget.
    pub fn retire(&mut self, mr: Arc<Mr>, budget: &mut Budget) {
        if mr.retire() {
            budget.work(cost::WAIT);
        }
        if mr.extents() != 0 {
            self.dead.push(mr);
        }
    }

    /// Frees what regions that are gone take, until the budget is exhausted; whether nothing is left.
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
            while mr.extents() != 0 {
                if budget.is_over() {
                    self.dead.push(Arc::new(mr));
                    return false;
                }
                budget.work(mr.shed() * cost::FREE);
            }
        }
        true
    }
}
