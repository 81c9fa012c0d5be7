// SPDX-License-Identifier: GPL-2.0

//! Memory regions: `struct ib_mr`.

use super::{
    device::Device,
    object::{
        Mr,
        Pd, //
    },
    restrack::{
        self,
        Details, //
    },
    udata::no_driver_data,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::{
        from_err_ptr,
        from_result, //
    },
    prelude::*, //
};

/// Memory that is to be registered for a program.
#[derive(Clone, Copy)]
pub(crate) struct UserMemory {
    /// Address of the first byte in the program, or its offset in the dma-buf.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) length: u64,
    /// Address by which work requests name the first byte.
    pub(crate) virt_addr: u64,
    /// `enum ib_access_flags`.
    pub(crate) access: u32,
}

/// A memory region.
pub(crate) trait MemoryRegion<D: Driver>: Sized + Send + Sync {
    /// Creates an MR over all memory. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn get_dma(pd: &Pd<D>, access: u32) -> Result<Self>;

    /// Registers memory of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL`, `ENOMEM`, `EFAULT`, or what the device says.
    fn reg_user(dev: &Device<D>, pd: &Pd<D>, memory: &UserMemory) -> Result<Self>;

    /// Registers memory of the dma-buf behind a descriptor of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// `EBADF`, `EINVAL`, `ENOMEM`, what the exporter says, or what the device says: `EFAULT` for memory
    /// that it cannot reach.
    fn reg_dma_buf(dev: &Device<D>, pd: &Pd<D>, fd: c_int, memory: &UserMemory) -> Result<Self>;

    /// Replaces what `flags` name (`enum ib_mr_rereg_flags`) of an MR of a program, which stays as it
    /// was if that fails. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot do that, and for an MR of a dma-buf; as
    /// [`MemoryRegion::reg_user`].
    fn rereg_user(&self, dev: &Device<D>, flags: u32, pd: &Pd<D>, memory: &UserMemory) -> Result;

    /// Creates an MR for fast registration of at most `max_pages` pages, of whatever size its consumer
    /// maps them. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no such MRs, `EINVAL`, `ENOMEM`, or what the device says.
    fn alloc(pd: &Pd<D>, max_pages: u32) -> Result<Self>;

    /// Forgets the pages of an MR for fast registration; those that follow have `page_size` bytes.
    /// Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the MR is not for fast registration, or if the device has no pages of that size.
    fn begin_pages(&self, page_size: u32) -> Result;

    /// Adds the page at `addr`, a multiple of its size. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the MR is not for fast registration, `ENOMEM` if it has as many pages as it can have.
    fn add_page(&self, addr: u64) -> Result;

    /// Destroys the MR, which is in `pd`, in the device. May sleep. It is dropped afterwards, unless
    /// this fails.
    ///
    /// # Errors
    ///
    /// `EBUSY` if a memory window is bound to it, or what else the device says; the object then
    /// lives on.
    fn dereg(&self, pd: &Pd<D>) -> Result;

    /// Returns the local and the remote key.
    fn keys(&self) -> (u32, u32);

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

/// The operation `get_dma_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn get_dma_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    access: c_int,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object, and a ULP uses no PD
    // that it destroys, so the PD stays until this returns.
    let pd = unsafe { Pd::<D>::from_raw(pd) };
    new_mr::<D>(|| D::Mr::get_dma(pd, access as u32))
}

/// The operation `reg_user_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn reg_user_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object, and a ULP uses no PD
    // that it destroys, so the PD stays until this returns. Its device is registered as long as it
    // has objects.
    let (dev, pd) = unsafe { (Device::<D>::from_raw((*pd).device), Pd::<D>::from_raw(pd)) };
    if !dmah.is_null() {
        return crate::errno::unsupported().to_ptr();
    }
    let memory = UserMemory {
        start,
        length,
        virt_addr,
        access: access as u32,
    };
    new_mr::<D>(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        D::Mr::reg_user(dev, pd, &memory)
    })
}

/// The operation `reg_user_mr_dmabuf`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn reg_user_mr_dmabuf<D: Driver>(
    pd: *mut bindings::ib_pd,
    offset: u64,
    length: u64,
    virt_addr: u64,
    fd: c_int,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object, and a ULP uses no PD
    // that it destroys, so the PD stays until this returns. Its device is registered as long as it
    // has objects.
    let (dev, pd) = unsafe { (Device::<D>::from_raw((*pd).device), Pd::<D>::from_raw(pd)) };
    if !dmah.is_null() {
        return crate::errno::unsupported().to_ptr();
    }
    let memory = UserMemory {
        start: offset,
        length,
        virt_addr,
        access: access as u32,
    };
    let raw = new_mr::<D>(|| {
        // SAFETY: `driver_udata` is the first member of `attrs`, those of the system call that the
        // core is in until this returns.
        unsafe { no_driver_data(attrs.cast())? };
        D::Mr::reg_dma_buf(dev, pd, fd, &memory)
    });
    // The core sets these members of other MRs itself.
    if let Ok(mr) = from_err_ptr(raw) {
        // SAFETY: The MR is valid, and nobody else knows of it.
        unsafe {
            (*mr).iova = virt_addr;
            (*mr).length = length;
        }
    }
    raw
}

/// The operation `rereg_user_mr`. The core excludes other operations on the MR.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn rereg_user_mr<D: Driver>(
    raw: *mut bindings::ib_mr,
    flags: c_int,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    pd: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    // SAFETY: `raw` is from `new_mr`, and its user object is locked for writing. `pd` is one that
    // `alloc_pd` made, which the core keeps until this returns. Its device is registered as long as
    // it has objects.
    let (dev, mr, pd) = unsafe {
        (
            Device::<D>::from_raw((*raw).device),
            Mr::<D>::from_raw(raw),
            Pd::<D>::from_raw(pd),
        )
    };
    let memory = UserMemory {
        start,
        length,
        virt_addr,
        access: access as u32,
    };
    // SAFETY: `udata` is null, or that of the system call that the core is in until this returns.
    let unused = unsafe { no_driver_data(udata) };
    match unused.and_then(|()| mr.rereg_user(dev, flags as u32, pd, &memory)) {
        // A null pointer says that the MR and its keys stay the same.
        Ok(()) => core::ptr::null_mut(),
        Err(error) => error.to_ptr(),
    }
}

/// The operation `alloc_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(crate) unsafe fn alloc_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    mr_type: bindings::ib_mr_type,
    max_num_sg: u32,
) -> *mut bindings::ib_mr {
    if mr_type != bindings::ib_mr_type_IB_MR_TYPE_MEM_REG {
        return EINVAL.to_ptr();
    }
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object, and a ULP uses no PD
    // that it destroys, so the PD stays until this returns.
    let pd = unsafe { Pd::<D>::from_raw(pd) };
    new_mr::<D>(|| D::Mr::alloc(pd, max_num_sg))
}

/// The operation `map_mr_sg`. Any context.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn map_mr_sg<D: Driver>(
    raw: *mut bindings::ib_mr,
    sg: *mut bindings::scatterlist,
    nents: c_int,
    offset: *mut c_uint,
) -> c_int {
    from_result(|| {
        // SAFETY: `raw` is from `new_mr`, and its owner, a ULP, does nothing else with it until
        // this returns.
        let (mr, page_size) = unsafe { (Mr::<D>::from_raw(raw), (*raw).page_size) };
        mr.begin_pages(page_size)?;
        // SAFETY: `raw` is valid, as above, `sg` is the caller's list of `nents` entries, and
        // `set_page` is called for this MR alone.
        Ok(unsafe { bindings::ib_sg_to_pages(raw, sg, nents, offset, Some(set_page::<D>)) })
    })
}

/// Adds a page to an MR, for `map_mr_sg`.
///
/// # Safety
///
/// Only `ib_sg_to_pages()` may call it, for an MR of this driver.
unsafe extern "C" fn set_page<D: Driver>(raw: *mut bindings::ib_mr, addr: u64) -> c_int {
    // SAFETY: The caller promises that `raw` is an MR of this driver.
    let mr = unsafe { Mr::<D>::from_raw(raw) };
    from_result(|| mr.add_page(addr).map(|()| 0))
}

/// Allocates an MR, which `dereg_mr` frees.
fn new_mr<D: Driver>(create: impl FnOnce() -> Result<D::Mr>) -> *mut bindings::ib_mr {
    // The memory is allocated first, so that nothing fails once the device has the MR.
    let mr = KBox::<Mr<D>>::new_uninit(GFP_KERNEL)
        .map_err(Error::from)
        .and_then(|memory| Ok(KBox::write(memory, Mr::<D>::new(create()?))));
    match mr {
        Ok(mr) => {
            let (lkey, rkey) = mr.keys();
            let raw = mr.as_raw();
            // SAFETY: The MR is valid, and nobody else knows of it.
            unsafe {
                (*raw).lkey = lkey;
                (*raw).rkey = rkey;
            }
            KBox::into_raw(mr);
            raw
        }
        Err(error) => error.to_ptr(),
    }
}

/// The operation `dereg_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn dereg_mr<D: Driver>(
    raw: *mut bindings::ib_mr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is from `new_mr`, and the core deregisters it once: it stays until it is
        // freed below. The core has set its PD, and counts the MR as a user of it.
        let (mr, pd) = unsafe { (Mr::<D>::from_raw(raw), Pd::<D>::from_raw((*raw).pd)) };
        mr.dereg(pd)?;
        // SAFETY: `new_mr` made `raw` of a `KBox`, and nobody uses the MR any more.
        drop(unsafe { KBox::from_raw(raw.cast::<Mr<D>>()) });
        Ok(0)
    })
}

/// The operation `fill_res_mr_entry`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn fill_res_mr_entry<D: Driver>(
    message: *mut bindings::sk_buff,
    raw: *mut bindings::ib_mr,
) -> c_int {
    // SAFETY: The core calls with an MR of this driver that it keeps until this returns, and with a message
    // that nobody else uses.
    unsafe { restrack::nest(message, |details| Mr::<D>::from_raw(raw).details(details)) }
}
