// SPDX-License-Identifier: GPL-2.0

//! Address handles: `struct ib_ah`, and the addresses of RoCE.

use super::{
    object::{
        Ah,
        Pd, //
    },
    port::gid_bytes,
    udata::Udata,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*, //
};

/// An address: `struct rdma_ah_attr` of RoCE.
pub(crate) struct AhAttr<'a>(&'a bindings::rdma_ah_attr);

impl<'a> AhAttr<'a> {
    /// Wraps an address; `None` if it is not one of RoCE, or has no GRH.
    pub(crate) fn new(raw: &'a bindings::rdma_ah_attr) -> Option<Self> {
        let roce = raw.type_ == bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        let grh = u32::from(raw.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;

        (roce && grh).then_some(Self(raw))
    }

    /// Returns the plain members.
    pub(crate) fn raw(&self) -> &bindings::rdma_ah_attr {
        self.0
    }

    /// Returns the destination GID, in network order.
    pub(crate) fn dgid(&self) -> [u8; 16] {
        gid_bytes(&self.0.grh.dgid)
    }

    /// Returns the destination MAC address.
    pub(crate) fn dmac(&self) -> [u8; 6] {
        // SAFETY: The type of the address says which member of the union is in use; its only
        // member is the MAC address.
        unsafe { *(&raw const self.0.__bindgen_anon_1).cast::<[u8; 6]>() }
    }

    /// Writes an address of RoCE with a GRH to `attr`.
    pub(crate) fn write(attr: &mut bindings::rdma_ah_attr, dgid: [u8; 16], dmac: [u8; 6]) {
        attr.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        attr.ah_flags = bindings::ib_ah_flags_IB_AH_GRH as u8;
        // SAFETY: Both unions are at least as long as what is written, and have room for any bytes.
        unsafe {
            (&raw mut attr.grh.dgid).cast::<[u8; 16]>().write(dgid);
            (&raw mut attr.__bindgen_anon_1)
                .cast::<[u8; 6]>()
                .write(dmac);
        }
    }
}

/// An address handle. Its functions come from any context.
pub(crate) trait AddressHandle<D: Driver>: Sized + Send + Sync {
    /// Creates the address handle. With the way back to a program, it may sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an address that RoCE cannot have, `EFAULT`.
    fn create(pd: &Pd<D>, attr: &AhAttr<'_>, udata: Option<&Udata<'_>>) -> Result<Self>;

    /// Reads the address back.
    fn query(&self, attr: &mut bindings::rdma_ah_attr);
}

/// The operation `create_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn create_ah<D: Driver>(
    raw: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the PD of the new object to one that `alloc_pd` made and that it
    // keeps, as it keeps the attributes, until this returns. `udata` is null, or that of the system
    // call that the core is in until this returns.
    let (pd, attr, udata) = unsafe {
        (
            Pd::<D>::from_raw((*raw).pd),
            &*(*attr).ah_attr,
            Udata::from_raw(udata),
        )
    };
    from_result(|| {
        udata.as_ref().map_or(Ok(()), Udata::no_request)?;
        let data = D::Ah::create(pd, &AhAttr::new(attr).ok_or(EINVAL)?, udata.as_ref())?;
        // SAFETY: The core allocated `size_ib_ah` bytes, which are not initialised yet.
        unsafe { Ah::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `query_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_ah<D: Driver>(
    raw: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_attr,
) -> c_int {
    // SAFETY: `raw` is an AH that `create_ah` made and its owner keeps until this returns. `attr`
    // is the core's own, which nobody else has before this returns.
    let (ah, attr) = unsafe { (Ah::<D>::from_raw(raw), &mut *attr) };
    *attr = Default::default();
    ah.query(attr);
    0
}

/// The operation `destroy_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn destroy_ah<D: Driver>(
    raw: *mut bindings::ib_ah,
    _flags: u32,
) -> c_int {
    // SAFETY: `raw` is an AH that `create_ah` made, which its owner no longer uses, and which the
    // core frees next. Work requests have copies of what is in it.
    unsafe { Ah::<D>::drop_data(raw) };
    0
}
