// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory windows (IBA 10.6.7; specification, Memory windows).
//!
//! A window is a key for a part of a region, with access rights of its own, which
//! work requests give it and take from it. One that is bound is in the table of keys
//! as a region is, over the same memory, and is found there by peers alone.
//!
//! As with fast registration, work requests and control commands are done by the
//! guest's own thread; only invalidation may come from a peer's.

use std::collections::BTreeSet;

use abi::{virtio_rdma_ring_bind_wqe, VIRTIO_RDMA_MW_TYPE_1, VIRTIO_RDMA_MW_TYPE_2};
use serde::{Deserialize, Serialize};

use super::fast_reg::Invalidation;
use super::mr::{Part, Reach};
use crate::base::by_key::ByKey;
use crate::base::refused::KeyError;
use crate::base::slot::Slot;

/// The bits of a key that are the consumer's (IBA 10.6.7.2.3).
const KEY_BITS: u32 = 0xff;

/// The types of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MwType {
    /// A window that can be bound at any time, and is used through every QP of its PD.
    One,
    /// A window that can be bound when it is FREE, and is used through the QP that bound it (2B).
    Two,
}

impl MwType {
    /// Returns the type of this number.
    pub fn from_abi(number: u8) -> Option<Self> {
        match number.into() {
            VIRTIO_RDMA_MW_TYPE_1 => Some(Self::One),
            VIRTIO_RDMA_MW_TYPE_2 => Some(Self::Two),
            _ => None,
        }
    }
}

/// The memory that a window is bound to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Binding {
    /// The key of the region.
    pub region: u32,
    /// The part of the region.
    pub part: Part,
}

impl Binding {
    /// Returns the place of the QP that a window of type 2B belongs to.
    fn qp(&self) -> Option<Slot> {
        match self.part.reach {
            Reach::PeerOf(qp) => Some(qp),
            Reach::Everybody | Reach::Peers => None,
        }
    }
}

/// The request of a BIND_MW.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bind {
    /// The window's key. Its low 8 bits do not count: a consumer may have them wrong after a BIND_MW
    /// that failed.
    pub key: u32,
    /// The new key of the window: the low 8 bits are those of the request, the others those of `key`.
    pub new_key: u32,
    /// `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// Address of the first byte in the region.
    pub addr: u64,
    /// Bytes; 0 takes the window from its region.
    pub length: u64,
    /// The region's key.
    pub lkey: u32,
}

impl Bind {
    /// Reads the request from an entry of a ring.
    pub fn from_entry(entry: &virtio_rdma_ring_bind_wqe) -> Self {
        let virtio_rdma_ring_bind_wqe { access, mw_rkey, new_rkey, addr, length, lkey, .. } =
            *entry;
        let new_key = mw_rkey & !KEY_BITS | new_rkey & KEY_BITS;
        Self { key: mw_rkey, new_key, access, addr, length, lkey }
    }
}

/// A memory window.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct MemoryWindow {
    /// Its PD.
    pub pdn: u32,
    /// Its type.
    pub kind: MwType,
    /// The key of the last BIND_MW; the first key of the window if there was no BIND_MW yet.
    pub key: u32,
    /// The memory that the window is bound to; `None` if the window is FREE.
    pub binding: Option<Binding>,
}

/// The memory windows of one device.
#[derive(Default)]
pub(crate) struct MemoryWindows {
    /// The windows by the upper 24 bits of their keys. No two windows have the same upper 24 bits.
    all: ByKey<MemoryWindow>,
    /// Upper 24 bits of the keys of a region, and of a window that is bound to it.
    by_region: BTreeSet<(u32, u32)>,
    /// The place of a QP, and upper 24 bits of the key of a window that is bound to
    /// it.
    by_qp: BTreeSet<(Slot, u32)>,
}

impl MemoryWindows {
    /// Returns whether a window has a key with these upper 24 bits.
    pub fn has(&self, key: u32) -> bool {
        self.all.contains(key >> 8)
    }

    /// Returns whether no other window should get this key, as [`ByKey::is_crowded`].
    pub fn is_crowded(&self, key: u32) -> bool {
        self.all.is_crowded(key >> 8)
    }

    /// Returns whether a window is bound to the region with this key.
    pub fn any_on(&self, region: u32) -> bool {
        let index = region >> 8;
        self.by_region.range((index, 0)..=(index, u32::MAX)).next().is_some()
    }

    /// Returns the window with these upper 24 bits of its key.
    pub fn get(&self, index: u32) -> Option<&MemoryWindow> {
        self.all.get(index)
    }

    /// Adds a window.
    pub fn insert(&mut self, window: MemoryWindow) {
        self.all.insert(window.key >> 8, window);
    }

    /// Takes the window with these upper 24 bits of its key out, which is FREE.
    pub fn remove(&mut self, index: u32) -> Option<MemoryWindow> {
        self.all.remove(index)
    }

    /// Returns the first window from `from` on that is bound to `region`, both the upper 24 bits of a
    /// key.
    pub fn first_on(&self, region: u32, from: u32) -> Option<u32> {
        self.by_region.range((region, from)..=(region, u32::MAX)).next().map(|(_, index)| *index)
    }

    /// Makes a window FREE, if it exists.
    pub fn release(&mut self, index: u32) {
        let Some(window) = self.all.get_mut(index) else { return };
        let Some(binding) = window.binding.take() else { return };
        self.by_region.remove(&(binding.region >> 8, index));
        if let Some(qp) = binding.qp() {
            self.by_qp.remove(&(qp, index));
        }
    }

    /// Gives a window its new key, and binds it if that is asked for.
    pub fn assign(&mut self, key: u32, binding: Option<Binding>) {
        let index = key >> 8;
        self.release(index);
        let Some(window) = self.all.get_mut(index) else { return };
        window.key = key;
        window.binding = binding;
        let Some(binding) = binding else { return };
        self.by_region.insert((binding.region >> 8, index));
        if let Some(qp) = binding.qp() {
            self.by_qp.insert((qp, index));
        }
    }

    /// Checks whether the window with a key may be made FREE.
    pub fn check_invalidation(&self, what: Invalidation) -> Result<(), KeyError> {
        let window = self.all.get(what.key >> 8).ok_or(KeyError::Key)?;
        what.check(window.pdn, window.key, window.binding.is_none())?;
        let is_others = window.binding.is_some_and(|binding| binding.qp() != Some(what.qp));
        match window.kind {
            MwType::One => Err(KeyError::Access),
            MwType::Two if is_others => Err(KeyError::Qp),
            MwType::Two => Ok(()),
        }
    }

    /// Returns the upper 24 bits of the keys of the windows that are bound to a QP.
    pub fn of_qp(&self, qp: Slot) -> impl Iterator<Item = u32> + '_ {
        self.by_qp.range((qp, 0)..=(qp, u32::MAX)).map(|(_, index)| *index)
    }
}
