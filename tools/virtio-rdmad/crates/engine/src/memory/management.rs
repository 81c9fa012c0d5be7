// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work requests that change keys: fast registration, the binding of windows, and invalidation (IBA, base memory
//! management extensions).
//!
//! Registrations and bindings come from the guest's own thread, as control commands do. Only
//! invalidation may come from a peer's: it revokes the region, for which no lock of the guest's objects
//! is needed.

use std::sync::{Arc, RwLock};

use memory::GuestMemory;
use zerocopy::IntoBytes;

use super::access;
use super::fast_reg::{Invalidation, Registration};
use super::key_table::KeyTable;
use super::mr::{Attributes, Backing, Mr};
use super::mw::Bind;
use super::page_list::{page_size, touched, PageList, Range};
use crate::base::budget::{cost, Budget};
use crate::base::features::Features;
use crate::base::limits::MAX_FAST_REG_PAGES;
use crate::base::refused::KeyError;
use crate::base::slot::Slot;
use crate::base::sync::{read, write};
use crate::base::wc_status::WcStatus;

/// The refusal of a registration or a binding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    /// The reason, for the log.
    pub why: &'static str,
    /// Status of the work request.
    pub status: WcStatus,
}

/// The QP whose work request asks for something.
#[derive(Clone, Copy)]
pub(crate) struct Asker {
    /// Its place.
    pub slot: Slot,
    /// Its protection domain.
    pub pdn: u32,
    /// Whether the kernel owns it, so that it may name any page of the guest.
    pub privileged: bool,
}

/// Does a REG_MR.
pub(crate) fn reg_mr(
    table: &RwLock<KeyTable>,
    features: &Features,
    asker: Asker,
    request: &Registration,
    budget: &mut Budget,
) -> Result<(), Refusal> {
    let refuse = |why, status| Err(Refusal { why, status });
    // The addresses of the pages are any of the guest's.
    if !asker.privileged {
        return refuse("REG_MR in a QP of a program", WcStatus::LocalQpOperation);
    }
    let operation_error = WcStatus::MwBind;
    let keys = read(table);
    let Some(region) = keys.fast_reg(request.key).filter(|r| r.pdn == asker.pdn) else {
        return refuse("REG_MR of a key that its PD does not have", operation_error);
    };
    if region.valid.is_some() {
        return refuse("REG_MR of a region that is VALID", operation_error);
    }
    let Some(page_size) = page_size(request.page_shift) else {
        return refuse("REG_MR of pages of a size that there is not", operation_error);
    };
    let (offset, max_pages) = (request.iova % page_size, region.max_pages);
    if touched(request.iova, request.length, page_size) != request.npages.into()
        || request.npages as usize > max_pages
        || request.iova.checked_add(request.length).is_none()
        || !access::is_valid(features, request.access)
    {
        return refuse("REG_MR with a value that is not valid", operation_error);
    }
    let memory = keys.memory().clone();
    drop(keys);
    budget.work(2 * cost::PAGE * u64::from(request.npages));
    let Some(pages) = read_page_list(&memory, request, page_size) else {
        return refuse("REG_MR of pages that are none", WcStatus::LocalProtection);
    };
    let attributes = Attributes {
        key: request.key,
        pdn: asker.pdn,
        access: request.access,
        iova: request.iova,
        length: request.length,
        backing: Backing::Ranges(pages.cut(
            offset,
            request.length,
            u64::from(request.npages) * page_size,
        )),
    };
    let Ok(mr) = Mr::new(&memory, attributes.clone(), max_pages) else {
        return refuse("REG_MR of pages that are not memory", WcStatus::LocalProtection);
    };
    write(table).set_valid(attributes, Arc::new(mr.revocable()));
    Ok(())
}

/// Reads the page list of a REG_MR, once; `None` if it cannot be read, or if an entry is no page.
fn read_page_list(
    memory: &GuestMemory,
    request: &Registration,
    page_size: u64,
) -> Option<PageList> {
    if request.pages % size_of::<u64>() as u64 != 0 {
        return None;
    }
    let mut table = [0_u64; MAX_FAST_REG_PAGES];
    let table = table.get_mut(..request.npages as usize)?;
    memory.read(request.pages, table.as_mut_bytes()).ok()?;
    let mut list = PageList::default();
    for addr in &*table {
        let is_page = addr % page_size == 0 && addr.checked_add(page_size).is_some();
        let page = Range { addr: *addr, len: page_size };
        if !is_page || !list.push(page, MAX_FAST_REG_PAGES) {
            return None;
        }
    }
    Some(list)
}

/// Carries out a BIND_MW, unless a copy by the former binding of the window is under way. Then the function returns the
/// memory of that binding, as [`invalidate`].
pub(crate) fn bind_mw(
    table: &RwLock<KeyTable>,
    features: &Features,
    asker: Asker,
    bind: &Bind,
) -> Result<Option<Arc<Mr>>, Refusal> {
    write(table)
        .bind(asker.slot, asker.pdn, features.has_flush(), bind)
        .map_err(|why| Refusal { why, status: WcStatus::MwBind })
}

/// Ends the access that a key gives. Returns the region or window instead if a copy by the key is under way. Then the
/// caller calls this again: in a later turn, or when [`Mr::revoke`] has waited for the copy. No other copy begins
/// meanwhile. Any thread may call this; locks of QPs may be held.
pub(crate) fn invalidate(
    table: &RwLock<KeyTable>,
    what: Invalidation,
) -> Result<Option<Arc<Mr>>, KeyError> {
    write(table).invalidate(what)
}

/// Makes a few windows FREE that are bound to the QP in place `slot`, which is to end. Returns how
/// many they were; 0 if no window is left.
pub(crate) fn release_windows(table: &RwLock<KeyTable>, slot: Slot) -> u64 {
    let (count, revoked) = write(table).release_windows(slot);
    for mr in revoked {
        mr.revoke();
    }
    count as u64
}
