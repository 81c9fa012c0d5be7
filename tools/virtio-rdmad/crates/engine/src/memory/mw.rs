// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory windows (IBA 10.6.7; specification, chapter 14.2).
//!
//! A window is a key for a part of a region, with access rights of its own, which
//! work requests give it and take from it. One that is bound is in the table of keys
//! as a region is, over the same memory, and is found there by peers alone.
//!
//! As with fast registration, work requests and control commands are done by the
//! guest's own thread; only invalidation may come from a peer's.

use std::collections::BTreeSet;
use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_alloc_mw, virtio_rdma_cmd_dealloc_mw, virtio_rdma_ring_bind_wqe,
    virtio_rdma_rsp_alloc_mw, VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
    VIRTIO_RDMA_ACCESS_MW_BIND, VIRTIO_RDMA_ACCESS_RELAXED_ORDERING,
    VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC, VIRTIO_RDMA_ACCESS_REMOTE_READ,
    VIRTIO_RDMA_ACCESS_REMOTE_WRITE, VIRTIO_RDMA_ACCESS_ZERO_BASED, VIRTIO_RDMA_MW_TYPE_1,
    VIRTIO_RDMA_MW_TYPE_2,
};

use crate::base::by_key::ByKey;
use crate::base::counters::Counter;
use crate::base::sync::{read, write};
use crate::control::queue::{unuse_pd, use_pd, Control, Status};
use crate::device::Shared;
use crate::memory::fast_reg::Invalidation;
use crate::memory::mr::{KeyError, KeyTable, Mr};
use crate::qp::halves::QpConfig;

/// Access to a window that changes memory, which its region must allow its owner.
const CHANGES: u32 = VIRTIO_RDMA_ACCESS_REMOTE_WRITE | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;

/// Access that a window gives.
const ACCESS: u32 = CHANGES | VIRTIO_RDMA_ACCESS_REMOTE_READ;

/// Flags that a BIND_MW may have besides: what they mean concerns the owner, who has
/// no use for the key.
const WITHOUT_MEANING: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | VIRTIO_RDMA_ACCESS_MW_BIND
    | VIRTIO_RDMA_ACCESS_RELAXED_ORDERING;

/// Windows of a QP that are freed at a time when it goes.
const FEW: usize = 64;

/// The bits of a key that are the consumer's (IBA 10.6.7.2.3).
const KEY_BITS: u32 = 0xff;

/// The types of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MwType {
    /// Bound anew at any time, and used through every QP of its PD.
    One,
    /// Bound when it is FREE, and used through the QP that bound it (2B).
    Two,
}

impl MwType {
    fn from_abi(number: u8) -> Option<Self> {
        match number.into() {
            VIRTIO_RDMA_MW_TYPE_1 => Some(Self::One),
            VIRTIO_RDMA_MW_TYPE_2 => Some(Self::Two),
            _ => None,
        }
    }
}

/// Who may use a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Everybody: that of a region.
    Everybody,
    /// The peers of all QPs: that of a window of type 1.
    Peers,
    /// The peer of the QP in this place: that of a window of type 2B.
    PeerOf(u16),
}

impl Reach {
    /// Whether the owner is one of them (`None`), or the peer of the QP in a place.
    #[inline]
    pub fn includes(self, peer_of: Option<u16>) -> bool {
        match self {
            Self::Everybody => true,
            Self::Peers => peer_of.is_some(),
            Self::PeerOf(qp) => peer_of == Some(qp),
        }
    }
}

/// The part of a region that a window is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Of its first byte in the region.
    pub offset: u64,
    /// Address by which peers name that.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// `VIRTIO_RDMA_ACCESS_REMOTE_*`, `VIRTIO_RDMA_ACCESS_FLUSH_*`.
    pub access: u32,
    /// Who may use the key.
    pub reach: Reach,
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    /// The key of the region.
    pub region: u32,
    /// Which part of it.
    pub part: Part,
}

impl Binding {
    /// The place of the QP that a window of type 2B belongs to.
    fn qp(&self) -> Option<u16> {
        match self.part.reach {
            Reach::PeerOf(qp) => Some(qp),
            Reach::Everybody | Reach::Peers => None,
        }
    }
}

/// What BIND_MW asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bind {
    /// The window's key, of which the low 8 bits do not count: who posted a BIND_MW
    /// that failed may have them wrong.
    pub key: u32,
    /// Its key from now on: the low 8 bits are what was asked for, the others those of `key`.
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
    /// Of a ring.
    pub fn from_entry(entry: &virtio_rdma_ring_bind_wqe) -> Self {
        let virtio_rdma_ring_bind_wqe { access, mw_rkey, new_rkey, addr, length, lkey, .. } =
            *entry;
        let new_key = mw_rkey & !KEY_BITS | new_rkey & KEY_BITS;
        Self { key: mw_rkey, new_key, access, addr, length, lkey }
    }
}

/// A window.
struct Window {
    /// Its PD.
    pdn: u32,
    /// Its type.
    kind: MwType,
    /// Its key: that of the last BIND_MW, or the first one.
    key: u32,
    /// `None`: it is FREE.
    binding: Option<Binding>,
}

/// The windows of one device.
#[derive(Default)]
pub(crate) struct Windows {
    /// By the upper 24 bits of the key, of which each window has its own.
    all: ByKey<Window>,
    /// Upper 24 bits of the keys of a region, and of a window that is bound to it.
    by_region: BTreeSet<(u32, u32)>,
    /// The place of a QP, and upper 24 bits of the key of a window that is bound to
    /// it.
    by_qp: BTreeSet<(u16, u32)>,
}

impl Windows {
    /// Whether a window has a key with these upper 24 bits.
    pub fn has(&self, key: u32) -> bool {
        self.all.contains(key >> 8)
    }

    /// Whether no other window should get this key, as [`ByKey::is_crowded`].
    pub fn is_crowded(&self, key: u32) -> bool {
        self.all.is_crowded(key >> 8)
    }

    /// Whether a window is bound to the region with this key.
    pub fn any_on(&self, region: u32) -> bool {
        let index = region >> 8;
        self.by_region.range((index, 0)..=(index, u32::MAX)).next().is_some()
    }

    /// Makes a window FREE, which is one.
    fn release(&mut self, index: u32) {
        let Some(window) = self.all.get_mut(index) else { return };
        let Some(binding) = window.binding.take() else { return };
        self.by_region.remove(&(binding.region >> 8, index));
        if let Some(qp) = binding.qp() {
            self.by_qp.remove(&(qp, index));
        }
    }

    /// Gives a window its new key, and binds it if that is asked for.
    fn assign(&mut self, key: u32, binding: Option<Binding>) {
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

    /// Makes the window with a key FREE.
    pub fn invalidate(&mut self, what: Invalidation) -> Result<(), KeyError> {
        let index = what.key >> 8;
        let window = self.all.get(index).ok_or(KeyError::Key)?;
        what.check(window.pdn, window.key, window.binding.is_none())?;
        let is_others = window.binding.is_some_and(|binding| binding.qp() != Some(what.qp));
        if window.kind == MwType::One || is_others {
            return Err(KeyError::Access);
        }
        self.release(index);
        Ok(())
    }

    /// Upper 24 bits of the keys of those that are bound to a QP.
    fn of_qp(&self, qp: u16) -> impl Iterator<Item = u32> + '_ {
        self.by_qp.range((qp, 0)..=(qp, u32::MAX)).map(|(_, index)| *index)
    }
}

impl KeyTable {
    /// Checks what BIND_MW in the QP in place `slot` asks for: what the window comes
    /// to be bound to, if to anything, or what is wrong.
    fn check_bind(
        &self,
        slot: u16,
        pdn: u32,
        flush: bool,
        bind: &Bind,
    ) -> Result<Option<(Binding, &Arc<Mr>)>, &'static str> {
        let window = self.windows.all.get(bind.key >> 8);
        let Some(window) = window.filter(|window| window.pdn == pdn) else {
            return Err("BIND_MW of a key that its PD does not have");
        };
        let access =
            bind.access & if flush { ACCESS | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL } else { ACCESS };
        let zero_based = bind.access & VIRTIO_RDMA_ACCESS_ZERO_BASED != 0;
        if bind.access & !(access | WITHOUT_MEANING | VIRTIO_RDMA_ACCESS_ZERO_BASED) != 0
            || zero_based && window.kind == MwType::One
        {
            return Err("BIND_MW with access flags that the window cannot have");
        }
        if window.kind == MwType::Two && window.binding.is_some() {
            return Err("BIND_MW of a window of type 2 that is not FREE");
        }
        if bind.length == 0 {
            return match window.kind {
                MwType::One => Ok(None),
                MwType::Two => Err("BIND_MW of no bytes to a window of type 2"),
            };
        }
        let Some(region) = self.fixed(bind.lkey).filter(|mr| mr.attributes().pdn == pdn) else {
            return Err("BIND_MW to a region that its PD does not have");
        };
        let rights = region.attributes().access;
        let owner_writes = rights & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0;
        if rights & VIRTIO_RDMA_ACCESS_MW_BIND == 0 || bind.access & CHANGES != 0 && !owner_writes {
            return Err("BIND_MW to a region that does not allow it");
        }
        let Some(offset) = region.offset(bind.addr, bind.length) else {
            return Err("BIND_MW beyond the region");
        };
        let reach = match window.kind {
            MwType::One => Reach::Peers,
            MwType::Two => Reach::PeerOf(slot),
        };
        let iova = if zero_based { 0 } else { bind.addr };
        let part = Part { offset, iova, length: bind.length, access, reach };
        Ok(Some((Binding { region: bind.lkey, part }, region)))
    }

    /// Does what BIND_MW asks for; returns what the window was before, which is to be
    /// revoked.
    fn bind(
        &mut self,
        slot: u16,
        pdn: u32,
        flush: bool,
        bind: &Bind,
    ) -> Result<Option<Arc<Mr>>, &'static str> {
        let window = self.check_bind(slot, pdn, flush, bind)?;
        let mapped = window.map(|(binding, region)| {
            (binding, Arc::new(region.window(bind.new_key, &binding.part)))
        });
        self.windows.assign(bind.new_key, mapped.as_ref().map(|(binding, _)| *binding));
        Ok(match mapped {
            Some((_, window)) => self.insert(window),
            None => self.remove(bind.new_key),
        })
    }

    /// Follows with a window after its region has followed a change of the memory map: with the one
    /// that comes first of those from `from` on, which are bound to `region`, both the upper 24 bits of
    /// a key. Returns those of the window and what it was before, which is to be retired.
    pub fn remap_window(&mut self, region: u32, from: u32) -> Option<(u32, Option<Arc<Mr>>)> {
        let (_, index) =
            *self.windows.by_region.range((region, from)..=(region, u32::MAX)).next()?;
        let window = self.windows.all.get(index)?;
        let (key, binding) = (window.key, window.binding?);
        let before = self.remove(key);
        if let Some(mr) = self.resolved(region) {
            let bound = Arc::new(mr.window(key, &binding.part));
            self.insert(bound);
        }
        Some((index, before))
    }

    /// Takes a window out; returns what is to be revoked.
    pub fn remove_window(&mut self, key: u32) -> Option<Arc<Mr>> {
        let index = key >> 8;
        self.windows.release(index);
        self.windows.all.remove(index)?;
        self.remove(key)
    }

    /// Makes [`FEW`] windows of a QP FREE, or all if there are no more; returns how many, and what is
    /// to be revoked.
    fn release_windows(&mut self, qp: u16) -> (usize, Vec<Arc<Mr>>) {
        let indices: Vec<u32> = self.windows.of_qp(qp).take(FEW).collect();
        let revoked = indices.iter().filter_map(|index| {
            self.windows.release(*index);
            self.remove(index << 8)
        });
        let revoked = revoked.collect();
        (indices.len(), revoked)
    }
}

/// A window as control commands know it.
pub(crate) struct MwEntry {
    /// A key with its upper 24 bits.
    key: u32,
    /// Its PD.
    pdn: u32,
}

impl MwEntry {
    /// A key with the upper 24 bits of the window's.
    pub fn key(&self) -> u32 {
        self.key
    }
}

impl Shared {
    pub(crate) fn alloc_mw(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_alloc_mw,
    ) -> Result<virtio_rdma_rsp_alloc_mw, Status> {
        let pdn = request.pdn;
        control.require_pd(pdn)?;
        let kind = MwType::from_abi(request.type_).ok_or(Status::Invalid)?;
        let key = self.choose_key(control)?;
        let mwn = control.mws.insert(MwEntry { key, pdn }).map_err(|_| Status::NoResource)?;
        let window = Window { pdn, kind, key, binding: None };
        write(&self.keys).windows.all.insert(key >> 8, window);
        use_pd(control, pdn);
        Ok(virtio_rdma_rsp_alloc_mw { mwn, rkey: key })
    }

    pub(crate) fn dealloc_mw(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_dealloc_mw,
    ) -> Result<(), Status> {
        let MwEntry { key, pdn } = control.mws.remove(request.mwn).ok_or(Status::NoObject)?;
        let revoked = write(&self.keys).remove_window(key);
        if let Some(mr) = revoked {
            mr.revoke();
        }
        unuse_pd(control, pdn);
        Ok(())
    }

    /// Whether a window is bound to the region with this key.
    pub(crate) fn is_windowed(&self, key: u32) -> bool {
        read(&self.keys).windows.any_on(key)
    }

    /// Does a BIND_MW in the QP in place `slot`; whether it could be done. No access
    /// by what the window was before is under way when this returns. Own thread
    /// only.
    pub(crate) fn bind_mw(&self, slot: u16, config: &QpConfig, bind: &Bind) -> Result<(), ()> {
        let revoked = write(&self.keys)
            .bind(slot, config.pdn, self.has_flush(), bind)
            .map_err(|why| self.complain(Counter::BadRegistration, &why))?;
        if let Some(mr) = revoked {
            mr.revoke();
        }
        Ok(())
    }

    /// Makes [`FEW`] windows of a QP that goes FREE, or all if there are no more; how many.
    pub(crate) fn release_windows(&self, slot: u16) -> u64 {
        let (count, revoked) = write(&self.keys).release_windows(slot);
        for mr in revoked {
            mr.revoke();
        }
        count as u64
    }

    /// Whether more than [`FEW`] windows are bound to a QP.
    pub(crate) fn has_many_windows(&self, slot: u16) -> bool {
        read(&self.keys).windows.of_qp(slot).nth(FEW).is_some()
    }
}
