// SPDX-License-Identifier: GPL-2.0

//! Memory regions.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::Hca,
    ib,
    region::{
        PageList,
        PageTable,
        Region, //
    },
    trace::refuse,
    wire::Registration, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};

/// The access flags that an MR may have. Optional flags that the device does not know are dropped.
const ACCESS: u32 = bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_READ
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;

/// The access flag that an MR may have where there are memory windows.
const MW_BIND: u32 = bindings::VIRTIO_RDMA_ACCESS_MW_BIND;

/// The access flag by which the memory of a program is named by offsets. It is the driver's: to the
/// device, such an MR has the IOVA 0.
const ZERO_BASED: u32 = bindings::VIRTIO_RDMA_ACCESS_ZERO_BASED;

/// The access flags that an MR may have where there is FLUSH. The core keeps those from a device
/// that lacks the capability.
const FLUSH: u32 =
    bindings::VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL | bindings::VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;

/// Flags that only permit or hint at something: without them, consumers see no difference.
const OPTIONAL: u32 = bindings::ib_access_flags_IB_ACCESS_OPTIONAL
    | bindings::VIRTIO_RDMA_ACCESS_RELAXED_ORDERING
    | bindings::VIRTIO_RDMA_ACCESS_HUGETLB;

/// The flags for which the core pins pages to be written to, `ib_access_writable()`.
const WRITABLE: u32 = bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC
    | bindings::VIRTIO_RDMA_ACCESS_MW_BIND;

/// The number of low bits of a key that the consumer chooses.
const KEY_BITS: u32 = 8;

/// A memory region.
pub(crate) struct Mr {
    hca: Arc<Hca>,
    mrn: u32,
    lkey: u32,
    rkey: u32,
    user: Option<Pin<KBox<Mutex<User>>>>,
    /// The binary logarithm of the size of a page of what a program registered, to be shown without the lock.
    page_shift: Atomic<u32>,
    fast: Option<FastReg>,
}

/// The memory that an MR of a program covers: memory of its own, or of a dma-buf.
struct User {
    memory: ib::UserMemory,
    region: Region,
}

/// The pages of a region for fast registration.
struct FastReg {
    list: PageList,
    max_pages: u32,
    /// The number of pages that are set. The consumer of the region maps it in one thread at a time.
    num_pages: Atomic<u32>,
    /// The binary logarithm of the size of a page.
    page_shift: Atomic<u32>,
}

impl Mr {
    fn new(hca: &Arc<Hca>, reply: &bindings::virtio_rdma_rsp_mr) -> Self {
        Self {
            hca: hca.clone(),
            mrn: u32::from_le(reply.mrn),
            lkey: u32::from_le(reply.lkey),
            rkey: u32::from_le(reply.rkey),
            user: None,
            page_shift: Atomic::new(bindings::VIRTIO_RDMA_PAGE_SHIFT),
            fast: None,
        }
    }

    /// Registers memory whose pages are listed.
    ///
    /// # Errors
    ///
    /// The errors of [`user_request`] and [`Region::give`], `ENOMEM`.
    fn register(
        pd: &ib::Pd<Hca>,
        memory: &ib::UserMemory,
        region: Region,
        table: PageTable,
    ) -> Result<Self> {
        let request = user_request(pd, memory, Some((&region, &table)))?;
        // The memory of the lock is allocated first, so that nothing fails once the device has the MR.
        let place = KBox::new_uninit(GFP_KERNEL)?;
        let (reply, region) = region.give::<cmd::RegUserMr>(table, &request)?;
        let page_shift = Atomic::new(region.page_shift().into());
        let user = User {
            memory: *memory,
            region,
        };
        Ok(Self {
            page_shift,
            user: Some(place.write_pin_init(new_mutex!(user))?),
            ..Self::new(pd.hca(), &reply)
        })
    }

    /// Returns whether memory windows may be bound to it. May sleep.
    fn allows_windows(&self) -> bool {
        let user = self.user.as_ref();
        user.is_some_and(|user| user.lock().memory.access & MW_BIND != 0)
    }

    /// Returns what a REG_MR of this region carries. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a region that is not for fast registration, a key of another one, or more bytes
    /// than were mapped; `EOPNOTSUPP` for access flags that the driver does not know.
    pub(crate) fn registration(&self, wr: &ib::FastReg<'_, Hca>) -> Result<Registration> {
        let fast = self.fast.as_ref().ok_or(EINVAL)?;
        let page_shift = fast.page_shift.load(Relaxed);
        let page_size = 1 << page_shift;
        let offset = wr.iova % page_size;
        let npages = wr.length.saturating_add(offset).div_ceil(page_size);
        if wr.key >> KEY_BITS != self.rkey >> KEY_BITS
            || wr.length == 0
            || npages > u64::from(fast.num_pages.load(Relaxed))
        {
            let reason = c"a fast registration of more pages than were mapped, or by another key";
            let limit = fast.num_pages.load(Relaxed).into();
            return Err(refuse(EINVAL, reason, npages, limit));
        }
        Ok(Registration {
            mrn: self.mrn,
            key: wr.key,
            access: check_access(&self.hca, wr.access)?,
            npages: npages as u32,
            pages: fast.list.addr(),
            iova: wr.iova,
            length: wr.length,
            page_shift: page_shift as u8,
        })
    }
}

/// Returns the flags that the device gets.
///
/// # Errors
///
/// `EOPNOTSUPP` for a flag that is neither known nor optional.
fn check_access(hca: &Hca, access: u32) -> Result<u32> {
    let config = hca.config();
    let mut known = ACCESS;
    if config.max_mw != 0 {
        known |= MW_BIND;
    }
    if config.flush {
        known |= FLUSH;
    }
    if access & !(known | OPTIONAL) != 0 {
        let (error, limit) = (crate::errno::unsupported(), (known | OPTIONAL).into());
        return Err(refuse(
            error,
            c"access flags of an MR",
            access.into(),
            limit,
        ));
    }
    Ok(access & known)
}

/// Calls `pin` to get hold of memory, and lists its pages.
///
/// # Errors
///
/// `EINVAL` for a length beyond the limits; those of `pin`.
fn take(
    hca: &Hca,
    memory: &ib::UserMemory,
    pin: impl FnOnce() -> Result<Region>,
) -> Result<(Region, PageTable)> {
    let limit = hca.config().max_mr_size;
    if memory.length == 0 || memory.length > limit {
        return Err(refuse(EINVAL, c"length of an MR", memory.length, limit));
    }
    let region = pin()?;
    let table = if hca.config().page_levels {
        region.page_table_with_levels()?
    } else {
        region.page_table()?
    };
    Ok((region, table))
}

/// Pins memory of the current process, and lists its pages. Memory of no bytes has no pages.
///
/// # Errors
///
/// The errors of [`take`] and [`Region::pin`].
fn pin(dev: &ib::Device<Hca>, memory: &ib::UserMemory) -> Result<(Region, PageTable)> {
    if memory.length == 0 {
        return Ok((Region::empty(dev.data()), PageTable::empty(dev.data())));
    }
    take(dev.data(), memory, || Region::pin_for_mr(dev, memory))
}

/// Returns the address by which work requests name the first byte.
fn iova(memory: &ib::UserMemory) -> u64 {
    if memory.access & ZERO_BASED != 0 {
        0
    } else {
        memory.virt_addr
    }
}

/// Returns what REG_USER_MR and REREG_MR say of memory.
///
/// # Errors
///
/// The errors of [`check_access`].
fn user_request(
    pd: &ib::Pd<Hca>,
    memory: &ib::UserMemory,
    pages: Option<(&Region, &PageTable)>,
) -> Result<bindings::virtio_rdma_cmd_reg_user_mr> {
    let table = pages.map(|(_, table)| table);
    let page_shift = pages.map_or(0, |(region, _)| region.page_shift());
    let sizes = pd.hca().config().mr_page_sizes;
    Ok(bindings::virtio_rdma_cmd_reg_user_mr {
        pdn: pd.number().to_le(),
        access_flags: check_access(pd.hca(), memory.access & !ZERO_BASED)?.to_le(),
        start: memory.start.to_le(),
        length: memory.length.to_le(),
        virt_addr: iova(memory).to_le(),
        pages: table.map_or(0, PageTable::addr).to_le(),
        npages: table.map_or(0, PageTable::npages).to_le(),
        levels: table.map_or(0, PageTable::levels),
        page_shift: sizes.map_or(0, |_| page_shift),
        reserved_2e: [0; 2],
    })
}

impl ib::MemoryRegion<Hca> for Mr {
    fn get_dma(pd: &ib::Pd<Hca>, access: u32) -> Result<Self> {
        let request = bindings::virtio_rdma_cmd_get_dma_mr {
            pdn: pd.number().to_le(),
            access_flags: check_access(pd.hca(), access)?.to_le(),
        };
        let reply = pd.hca().execute::<cmd::GetDmaMr>(&request)?;

        Ok(Self::new(pd.hca(), &reply))
    }

    fn reg_user(dev: &ib::Device<Hca>, pd: &ib::Pd<Hca>, memory: &ib::UserMemory) -> Result<Self> {
        let (region, table) = pin(dev, memory)?;
        Self::register(pd, memory, region, table)
    }

    fn reg_dma_buf(
        dev: &ib::Device<Hca>,
        pd: &ib::Pd<Hca>,
        fd: c_int,
        memory: &ib::UserMemory,
    ) -> Result<Self> {
        let attach = || Region::attach(dev, fd, memory);
        let (region, table) = take(dev.data(), memory, attach)?;
        // The pages are counted from the IOVA. `start` is an offset in the dma-buf.
        let memory = ib::UserMemory {
            start: memory.virt_addr,
            ..*memory
        };
        Self::register(pd, &memory, region, table)
    }

    fn rereg_user(
        &self,
        dev: &ib::Device<Hca>,
        flags: u32,
        pd: &ib::Pd<Hca>,
        memory: &ib::UserMemory,
    ) -> Result {
        if !self.hca.config().rereg_mr {
            let error = crate::errno::unsupported();
            return Err(refuse(error, c"rereg_mr of a device without it", 0, 0));
        }
        let mut user = self.user.as_ref().ok_or(EINVAL)?.lock();
        if user.region.is_dma_buf() {
            let error = crate::errno::unsupported();
            return Err(refuse(error, c"rereg_mr of a dma-buf", 0, 0));
        }
        let mut flags = flags;
        let mut after = user.memory;
        if flags & bindings::VIRTIO_RDMA_REREG_TRANS != 0 {
            after = ib::UserMemory {
                access: after.access,
                ..*memory
            };
        }
        if flags & bindings::VIRTIO_RDMA_REREG_ACCESS != 0 {
            after.access = memory.access;
            // Pages that were pinned only for reads may be replaced when they are written to.
            let written = after.access & WRITABLE != 0 && user.memory.access & WRITABLE == 0;
            if written || iova(&after) != iova(&user.memory) {
                flags |= bindings::VIRTIO_RDMA_REREG_TRANS;
            }
        }
        let mut request = bindings::virtio_rdma_cmd_rereg_mr {
            mrn: self.mrn.to_le(),
            flags: flags.to_le(),
            mr: user_request(pd, &after, None)?,
        };
        if flags & bindings::VIRTIO_RDMA_REREG_TRANS == 0 {
            self.hca.execute::<cmd::ReregMr>(&request)?;
        } else {
            let (region, table) = pin(dev, &after)?;
            request.mr = user_request(pd, &after, Some((&region, &table)))?;
            let (_, region) = region.give::<cmd::ReregMr>(table, &request)?;
            self.page_shift.store(region.page_shift().into(), Relaxed);
            user.region = region;
        }
        user.memory = after;
        Ok(())
    }

    fn alloc(pd: &ib::Pd<Hca>, max_pages: u32) -> Result<Self> {
        let limit = pd.hca().config().fast_reg;
        let limit = limit.ok_or(crate::errno::unsupported())?;
        if !(1..=limit).contains(&max_pages) {
            let reason = c"pages of an MR for fast registration";
            return Err(refuse(EINVAL, reason, max_pages.into(), limit.into()));
        }
        let list = PageList::new(pd.hca(), max_pages as usize)?;
        let request = bindings::virtio_rdma_cmd_create_mr {
            pdn: pd.number().to_le(),
            access_flags: 0,
            max_num_sg: max_pages.to_le(),
        };
        let reply = pd.hca().execute::<cmd::CreateMr>(&request)?;

        let fast = FastReg {
            list,
            max_pages,
            num_pages: Atomic::new(0),
            page_shift: Atomic::new(bindings::VIRTIO_RDMA_PAGE_SHIFT),
        };
        Ok(Self {
            fast: Some(fast),
            ..Self::new(pd.hca(), &reply)
        })
    }

    fn begin_pages(&self, page_size: u32) -> Result {
        let fast = self.fast.as_ref().ok_or(EINVAL)?;
        let sizes = self.hca.config().page_size_cap;
        if !page_size.is_power_of_two() || sizes & u64::from(page_size) == 0 {
            let reason = c"a page size of an MR that the device does not have";
            return Err(refuse(EINVAL, reason, page_size.into(), sizes));
        }
        fast.page_shift.store(page_size.trailing_zeros(), Relaxed);
        fast.num_pages.store(0, Relaxed);
        Ok(())
    }

    fn add_page(&self, addr: u64) -> Result {
        let fast = self.fast.as_ref().ok_or(EINVAL)?;
        let count = fast.num_pages.load(Relaxed);
        if count == fast.max_pages {
            return Err(ENOMEM);
        }
        fast.list.set(count as usize, addr)?;
        fast.num_pages.store(count + 1, Relaxed);
        Ok(())
    }

    fn dereg(&self, pd: &ib::Pd<Hca>) -> Result {
        let request = bindings::virtio_rdma_cmd_dereg_mr {
            mrn: self.mrn.to_le(),
        };
        if !self.allows_windows() {
            self.hca.execute_destroy::<cmd::DeregMr>(&request);
            return Ok(());
        }
        // After EBUSY the core tries again when windows are gone, so it must get that error only where there is a
        // window.
        let windows = pd.windows().lock();
        match self.hca.execute::<cmd::DeregMr>(&request) {
            Err(error) if error == EBUSY && *windows != 0 => Err(error),
            result => {
                self.hca.destroyed::<cmd::DeregMr>(result);
                Ok(())
            }
        }
    }

    fn keys(&self) -> (u32, u32) {
        (self.lkey, self.rkey)
    }

    fn details(&self, details: &mut ib::Details<'_>) -> Result {
        details.put(c"mrn", self.mrn)?;
        if self.user.is_some() {
            details.put(c"page_shift", self.page_shift.load(Relaxed))?;
        }
        Ok(())
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_mr)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn zero_based_memory_begins_at_0() {
        let memory = ib::UserMemory {
            start: 0x5000,
            length: 0x100,
            virt_addr: 0x5000,
            access: bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
        };
        assert_eq!(iova(&memory), 0x5000);
        let zero_based = ib::UserMemory {
            access: memory.access | ZERO_BASED,
            ..memory
        };
        assert_eq!(iova(&zero_based), 0);
    }

    #[test]
    fn flags_of_access_are_the_kernels() {
        for (device, kernel) in [
            (
                bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
                bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE,
            ),
            (
                bindings::VIRTIO_RDMA_ACCESS_REMOTE_WRITE,
                bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE,
            ),
            (
                bindings::VIRTIO_RDMA_ACCESS_REMOTE_READ,
                bindings::ib_access_flags_IB_ACCESS_REMOTE_READ,
            ),
            (
                bindings::VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC,
                bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC,
            ),
            (
                bindings::VIRTIO_RDMA_ACCESS_MW_BIND,
                bindings::ib_access_flags_IB_ACCESS_MW_BIND,
            ),
            (
                bindings::VIRTIO_RDMA_ACCESS_ZERO_BASED,
                bindings::ib_access_flags_IB_ZERO_BASED,
            ),
        ] {
            assert_eq!(device, kernel);
        }
    }
}
