// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory regions.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_mr, virtio_rdma_cmd_dereg_mr, virtio_rdma_cmd_get_dma_mr,
    virtio_rdma_cmd_reg_user_mr, virtio_rdma_cmd_rereg_mr, virtio_rdma_rsp_mr,
    VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_REREG_ACCESS, VIRTIO_RDMA_REREG_PD,
    VIRTIO_RDMA_REREG_TRANS,
};

use super::call::Call;
use super::objects::{MrEntry, Objects};
use super::prepare::{self, Prepared, PreparedMemory};
use super::quota;
use super::status::Status;
use crate::base::limits::MAX_FAST_REG_PAGES;
use crate::base::sync::{read, write};
use crate::memory::access;
use crate::memory::fast_reg::FastReg;
use crate::memory::mr::{Attributes, Backing, Map, Mr};
use crate::transport::hca::Hca;

/// The parts of an MR that REREG_MR may replace.
const REREG: u32 = VIRTIO_RDMA_REREG_TRANS | VIRTIO_RDMA_REREG_PD | VIRTIO_RDMA_REREG_ACCESS;

/// Handles GET_DMA_MR.
pub(super) fn get_dma(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_get_dma_mr,
) -> Result<virtio_rdma_rsp_mr, Status> {
    call.objects.pds.require(request.pdn)?;
    if !access::is_valid(&call.hca.features, request.access_flags) {
        return Err(Status::Invalid);
    }
    let attributes = Attributes {
        key: 0,
        pdn: request.pdn,
        access: request.access_flags,
        iova: 0,
        length: u64::MAX,
        backing: Backing::Dma,
    };
    let map = Map::Dma(call.objects.memory.clone());
    register(call, attributes, map)
}

/// Prepares REG_USER_MR: reads its page table and finds its memory.
pub(super) fn prepare_reg_user(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_reg_user_mr,
) -> Option<Prepared> {
    prepare::memory(hca, objects, request).map(Prepared::Memory).ok()
}

/// Handles REG_USER_MR.
pub(super) fn reg_user(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_reg_user_mr,
) -> Result<virtio_rdma_rsp_mr, Status> {
    call.objects.pds.require(request.pdn)?;
    if !access::is_valid(&call.hca.features, request.access_flags) {
        return Err(Status::Invalid);
    }
    prepare::memory(call.hca, call.objects, request)?;
    if !call.objects.mrs.has_room() {
        return Err(Status::NoResource);
    }
    let (backing, map) = take_memory(call)?;
    let attributes = Attributes {
        key: 0,
        pdn: request.pdn,
        access: request.access_flags,
        iova: request.virt_addr,
        length: request.length,
        backing,
    };
    register(call, attributes, map)
}

/// Returns the memory that was found for the command.
fn take_memory(call: &mut Call<'_>) -> Result<(Backing, Map), Status> {
    match std::mem::take(&mut call.prepared) {
        Prepared::Memory(found) => found.finish(&call.objects.memory),
        _ => Err(Status::Error),
    }
}

/// Returns the key of a new region, if the limits and the quota have room for it.
fn key_for(hca: &Hca, objects: &Objects, attributes: &Attributes) -> Result<u32, Status> {
    if !objects.mrs.has_room() {
        return Err(Status::NoResource);
    }
    quota::check(objects.mrs.len(), hca.quota().mrs)?;
    quota::check_memory(hca, objects, attributes.covered(), 0)?;
    objects.choose_key(&hca.keys)
}

/// Gives a region its key and number.
fn register(
    call: &mut Call<'_>,
    mut attributes: Attributes,
    map: Map,
) -> Result<virtio_rdma_rsp_mr, Status> {
    let (keys, objects) = (&call.hca.keys, &mut *call.objects);
    let key = match key_for(call.hca, objects, &attributes) {
        Ok(key) => key,
        Err(why) => {
            objects.bury(Mr::remains(attributes.backing, map));
            return Err(why);
        }
    };
    attributes.key = key;
    let pdn = attributes.pdn;
    let mr = Arc::new(Mr::resolved(attributes.clone(), map));
    let entry = MrEntry::Fixed { attributes, live: Some(Arc::clone(&mr)) };
    let mrn = objects.insert_mr(entry)?;
    objects.extents += mr.extents();
    write(keys).insert(mr);
    objects.pds.enter(pdn);
    Ok(virtio_rdma_rsp_mr { mrn, lkey: key, rkey: key })
}

/// Prepares REREG_MR: finds other pages, or the same for other access.
pub(super) fn prepare_rereg(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_rereg_mr,
) -> Option<Prepared> {
    let MrEntry::Fixed { attributes, live } = objects.mrs.get(request.mrn)? else { return None };
    let changes = |flag| request.flags & flag != 0;
    let access =
        if changes(VIRTIO_RDMA_REREG_ACCESS) { request.mr.access_flags } else { attributes.access };
    let old_extents = live.as_ref().map_or(0, |mr| mr.extents());
    let room = hca.limits.max_extents.saturating_sub(objects.extents - old_extents);
    let memory = if changes(VIRTIO_RDMA_REREG_TRANS) {
        prepare::memory(hca, objects, &request.mr).ok()?
    } else {
        PreparedMemory::of_backing(attributes.backing.clone(), room)
    };
    let write = access & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0;
    Some(Prepared::Memory(memory.for_access(write, room)))
}

/// Handles REREG_MR: replaces attributes of a region. The old ones stay if it fails.
pub(super) fn rereg(call: &mut Call<'_>, request: &virtio_rdma_cmd_rereg_mr) -> Result<(), Status> {
    let virtio_rdma_cmd_rereg_mr { mrn, flags, mr: new } = request;
    let hca = call.hca;
    let entry = call.objects.mrs.get(*mrn).ok_or(Status::NoObject)?;
    let MrEntry::Fixed { attributes, live } = entry else { return Err(Status::Invalid) };
    if matches!(attributes.backing, Backing::Dma) || *flags == 0 || flags & !REREG != 0 {
        return Err(Status::Invalid);
    }
    if read(&hca.keys).windows.any_on(attributes.key) {
        return Err(Status::Busy);
    }
    let (mut after, old_pdn) = (attributes.clone(), attributes.pdn);
    let old_extents = live.as_ref().map_or(0, |mr| mr.extents());
    if flags & VIRTIO_RDMA_REREG_PD != 0 {
        call.objects.pds.require(new.pdn)?;
        after.pdn = new.pdn;
    }
    if flags & VIRTIO_RDMA_REREG_ACCESS != 0 {
        if !access::is_valid(&hca.features, new.access_flags) {
            return Err(Status::Invalid);
        }
        after.access = new.access_flags;
    }
    if flags & VIRTIO_RDMA_REREG_TRANS != 0 {
        prepare::memory(hca, call.objects, new)?;
        (after.iova, after.length) = (new.virt_addr, new.length);
    }
    let before = attributes.covered();
    let (backing, map) = take_memory(call)?;
    after.backing = backing;
    let covered = after.covered();
    if let Err(why) = quota::check_memory(hca, call.objects, covered, before) {
        call.objects.bury(Mr::remains(after.backing, map));
        return Err(why);
    }
    let mr = Arc::new(Mr::resolved(after.clone(), map));
    let (key, new_pdn) = (after.key, after.pdn);
    let entry = MrEntry::Fixed { attributes: after, live: Some(Arc::clone(&mr)) };
    let objects = &mut *call.objects;
    let Some(place) = objects.mrs.get_mut(*mrn) else { return Err(Status::NoObject) };
    let replaced = std::mem::replace(place, entry);
    objects.extents = objects.extents - old_extents + mr.extents();
    objects.registered = objects.registered - before + covered;
    objects.set_valid_key(key, true);
    write(&hca.keys).insert(mr);
    match replaced {
        MrEntry::Fixed { live: Some(mr), .. } => objects.retire(mr),
        MrEntry::Fixed { attributes, live: None } => {
            objects.bury(Mr::remains(attributes.backing, Map::NOWHERE));
        }
        MrEntry::FastReg { .. } => {}
    }
    objects.pds.leave(old_pdn);
    objects.pds.enter(new_pdn);
    Ok(())
}

/// Handles CREATE_MR: makes a region for fast registration.
pub(super) fn create(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_mr,
) -> Result<virtio_rdma_rsp_mr, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    objects.pds.require(request.pdn)?;
    let max_pages = request.max_num_sg as usize;
    if request.access_flags != 0 || !(1..=MAX_FAST_REG_PAGES).contains(&max_pages) {
        return Err(Status::Invalid);
    }
    // The extents that a registration may need are set aside now: a work request could not report that they are
    // missing.
    if max_pages > objects.room(&hca.limits) {
        return Err(Status::NoResource);
    }
    quota::check(objects.mrs.len(), hca.quota().mrs)?;
    let key = objects.choose_key(&hca.keys)?;
    let entry = MrEntry::FastReg { key, pdn: request.pdn, extents: max_pages };
    quota::check_memory(hca, objects, entry.registered(), 0)?;
    let mrn = objects.insert_mr(entry)?;
    objects.extents += max_pages;
    let region = FastReg { pdn: request.pdn, max_pages, key, valid: None };
    write(&hca.keys).insert_fast_reg(region);
    objects.pds.enter(request.pdn);
    Ok(virtio_rdma_rsp_mr { mrn, lkey: key, rkey: key })
}

/// Handles DEREG_MR.
pub(super) fn dereg(call: &mut Call<'_>, request: &virtio_rdma_cmd_dereg_mr) -> Result<(), Status> {
    let (keys, objects) = (&call.hca.keys, &mut *call.objects);
    if let Some(MrEntry::Fixed { attributes, .. }) = objects.mrs.get(request.mrn) {
        if read(keys).windows.any_on(attributes.key) {
            return Err(Status::Busy);
        }
    }
    let entry = objects.mrs.remove(request.mrn).ok_or(Status::NoObject)?;
    objects.registered -= entry.registered();
    let (pdn, live) = match entry {
        MrEntry::Fixed { attributes, live } => {
            write(keys).remove(attributes.key);
            objects.set_valid_key(attributes.key, true);
            objects.extents -= live.as_ref().map_or(0, |mr| mr.extents());
            if live.is_none() {
                objects.bury(Mr::remains(attributes.backing, Map::NOWHERE));
            }
            (attributes.pdn, live)
        }
        MrEntry::FastReg { key, pdn, extents } => {
            objects.extents -= extents;
            (pdn, write(keys).remove_fast_reg(key))
        }
    };
    if let Some(mr) = live {
        objects.retire(mr);
    }
    objects.pds.leave(pdn);
    Ok(())
}

/// Puts a region where its memory is now, or nowhere, and begins to end the use of the region of before.
pub(crate) fn replace(hca: &Hca, objects: &mut Objects, mrn: u32, map: Option<Map>) {
    let Some(MrEntry::Fixed { attributes, live }) = objects.mrs.get(mrn) else { return };
    let (key, held) = (attributes.key, live.as_ref().map_or(0, |mr| mr.extents()));
    let mr = map.map(|map| Arc::new(Mr::resolved(attributes.clone(), map)));
    objects.extents = objects.extents - held + mr.as_ref().map_or(0, |mr| mr.extents());
    objects.set_valid_key(key, mr.is_some());
    let mut keys = write(&hca.keys);
    match &mr {
        Some(mr) => keys.insert(Arc::clone(mr)),
        None => keys.remove(key),
    };
    drop(keys);
    if let Some(before) = objects.set_live(mrn, mr) {
        objects.retire(before);
    }
}
