// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fast registration: regions that work requests give memory and take it from
//! (specification, chapter 14).
//!
//! A region of CREATE_MR is FREE until REG_MR makes it VALID; LOCAL_INV, and
//! invalidation by the peer, make it FREE again. The upper 24 bits of its key
//! stay, the rest comes with each REG_MR.
//!
//! Work requests of a guest are done by the guest's own thread, control commands
//! too. Only invalidation may come from a peer's: it revokes the region, which
//! waits for copies and for nothing else.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_mr, virtio_rdma_rsp_mr, VIRTIO_RDMA_F_FAST_REG,
    VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_MW_BIND_ERR,
};
use memory::GuestMemory;
use zerocopy::IntoBytes;

use crate::base::counters::Counter;
use crate::base::sync::{read, write};
use crate::config::{page_size, MAX_FAST_REG_PAGES};
use crate::control::queue::{touched, use_pd, Control, MrEntry, Status};
use crate::device::Shared;
use crate::memory::mr::{Attributes, Backing, KeyError, Mr, PageList, Range};
use crate::qp::halves::QpConfig;
use crate::transport::turn::cost;

/// A region for fast registration.
pub(crate) struct FastReg {
    /// Its PD.
    pub pdn: u32,
    /// Most pages of a registration.
    pub max_pages: usize,
    /// Its key: that of the last REG_MR, or the first one.
    pub key: u32,
    /// What it is if it is VALID; `None`: FREE.
    pub valid: Option<Attributes>,
}

/// What REG_MR asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registration {
    /// The new key.
    pub key: u32,
    /// `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// Entries of the page list.
    pub npages: u32,
    /// Address of the page list.
    pub pages: u64,
    /// Address by which work requests name the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Binary logarithm of the bytes of a page.
    pub page_shift: u8,
}

/// Who invalidates a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invalidator {
    /// The owner of the QP.
    Local,
    /// Its peer.
    Remote,
}

/// What a work request says of a key that it invalidates.
#[derive(Clone, Copy)]
pub(crate) struct Invalidation {
    /// The key.
    pub key: u32,
    /// Protection domain of the QP.
    pub pdn: u32,
    /// Place of the QP.
    pub qp: u16,
    /// Who asks for it.
    pub by: Invalidator,
}

impl Invalidation {
    /// Checks what the region or window with the index of the key is: its protection domain, its
    /// key, and whether it is FREE.
    pub fn check(&self, pdn: u32, key: u32, is_free: bool) -> Result<(), KeyError> {
        if pdn != self.pdn {
            return Err(KeyError::Pd);
        }
        // What is FREE already is no error for its owner.
        if key != self.key || is_free && self.by == Invalidator::Remote {
            return Err(KeyError::Key);
        }
        Ok(())
    }
}

impl Shared {
    pub(crate) fn create_mr(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_mr,
    ) -> Result<virtio_rdma_rsp_mr, Status> {
        control.require_pd(request.pdn)?;
        let max_pages = request.max_num_sg as usize;
        if request.access_flags != 0 || !(1..=MAX_FAST_REG_PAGES).contains(&max_pages) {
            return Err(Status::Invalid);
        }
        // What it may come to consist of is set aside now: a work request has nobody to tell.
        if max_pages > self.limits.max_extents.saturating_sub(control.extents) {
            return Err(Status::NoResource);
        }
        let key = self.choose_key(control)?;
        let entry = MrEntry::FastReg { key, pdn: request.pdn, extents: max_pages };
        let mrn = control.insert_mr(entry)?;
        control.extents += max_pages;
        let region = FastReg { pdn: request.pdn, max_pages, key, valid: None };
        write(&self.keys).insert_fast_reg(region);
        use_pd(control, request.pdn);
        Ok(virtio_rdma_rsp_mr { mrn, lkey: key, rkey: key })
    }

    /// Does a REG_MR; the `enum virtio_rdma_wc_status` of its failure. Own thread
    /// only.
    pub(crate) fn reg_mr(&self, config: &QpConfig, request: &Registration) -> Result<(), u32> {
        let refuse = |why: &str, status| {
            self.complain(Counter::BadRegistration, &why);
            Err(status)
        };
        // The addresses of the pages are any of the guest's.
        if !config.privileged {
            return refuse("REG_MR in a QP of a program", VIRTIO_RDMA_WC_LOC_QP_OP_ERR);
        }
        let operation_error = VIRTIO_RDMA_WC_MW_BIND_ERR;
        let keys = read(&self.keys);
        let Some(region) = keys.fast_reg(request.key).filter(|r| r.pdn == config.pdn) else {
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
            || !self.valid_access(request.access)
        {
            return refuse("REG_MR with a value that is not valid", operation_error);
        }
        let memory = keys.memory().clone();
        drop(keys);
        self.charge(2 * cost::PAGE * u64::from(request.npages));
        let Some(pages) = read_page_list(&memory, request, page_size) else {
            return refuse("REG_MR of pages that are none", VIRTIO_RDMA_WC_LOC_PROT_ERR);
        };
        let attributes = Attributes {
            key: request.key,
            pdn: config.pdn,
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
            return refuse("REG_MR of pages that are not memory", VIRTIO_RDMA_WC_LOC_PROT_ERR);
        };
        write(&self.keys).set_valid(attributes, Arc::new(mr.revocable()));
        Ok(())
    }

    /// Whether there are keys that work requests invalidate.
    pub(crate) fn can_invalidate(&self) -> bool {
        self.has(VIRTIO_RDMA_F_FAST_REG) || self.has_mws()
    }

    /// Ends the access that a key gives: no copy by it is under way when this returns.
    /// Any thread; locks of QPs may be held.
    pub(crate) fn invalidate(&self, what: Invalidation) -> Result<(), KeyError> {
        let revoked = write(&self.keys).invalidate(what)?;
        if let Some(mr) = revoked {
            mr.revoke();
        }
        Ok(())
    }
}

/// Reads the page list of a REG_MR, once; `None` if it or a page of it cannot be.
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
        if !is_page || !list.push_range(page, MAX_FAST_REG_PAGES) {
            return None;
        }
    }
    Some(list)
}
