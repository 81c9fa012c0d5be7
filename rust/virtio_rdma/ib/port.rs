// SPDX-License-Identifier: GPL-2.0

//! The port: its attributes, its P_Keys and its GIDs.

use super::{
    device::Device,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::{
        from_result,
        to_result, //
    },
    prelude::*, //
};

/// A GID and where it belongs: `struct ib_gid_attr`.
pub(crate) struct GidAttr<'a>(&'a bindings::ib_gid_attr);

impl<'a> GidAttr<'a> {
    pub(super) fn new(raw: &'a bindings::ib_gid_attr) -> Self {
        Self(raw)
    }

    /// Returns the GID, in network order.
    pub(crate) fn gid(&self) -> [u8; 16] {
        gid_bytes(&self.0.gid)
    }

    /// Returns a value of `enum ib_gid_type`.
    pub(crate) fn gid_type(&self) -> u32 {
        self.0.gid_type
    }

    /// Returns the index in the GID table.
    pub(crate) fn index(&self) -> u16 {
        self.0.index
    }

    /// Returns the port.
    pub(crate) fn port(&self) -> u32 {
        self.0.port_num
    }

    /// Returns the number of the VLAN that the network interface of the GID is in; `None` if it is in no VLAN.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is no interface.
    pub(crate) fn vlan_id(&self) -> Result<Option<u16>> {
        let mut vlan_id = NO_VLAN;
        // SAFETY: The attributes are those of an entry of the core's table, which keeps the
        // interface. `vlan_id` is valid for writes, and the function ignores a null pointer.
        to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(self.0, &mut vlan_id, core::ptr::null_mut())
        })?;
        Ok((vlan_id != NO_VLAN).then_some(vlan_id))
    }
}

/// The number by which the core says that there is no VLAN.
const NO_VLAN: u16 = u16::MAX;

/// Returns the bytes of a GID, in network order.
pub(super) fn gid_bytes(gid: &bindings::ib_gid) -> [u8; 16] {
    // SAFETY: All members of the union are 16 bytes without padding.
    unsafe { *core::ptr::from_ref(gid).cast::<[u8; 16]>() }
}

/// The operation `query_port`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_port<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    attr: *mut bindings::ib_port_attr,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is the core's own, and zeroed.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    from_result(|| D::query_port(dev, port, attr).map(|()| 0))
}

/// The operation `query_port_speed`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_port_speed<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns.
    let dev = unsafe { Device::<D>::from_raw(dev) };
    from_result(|| {
        let mut attr = bindings::ib_port_attr::default();
        D::query_port(dev, port, &mut attr)?;
        // SAFETY: `speed` is the core's own, and valid for writes.
        unsafe { speed.write(port_speed(&mut attr)?) };
        Ok(0)
    })
}

/// Returns the speed of a port with these attributes, in units of 100 Mb/s; 0 if it is down.
fn port_speed(attr: &mut bindings::ib_port_attr) -> Result<u64> {
    if attr.state != bindings::ib_port_state_IB_PORT_ACTIVE {
        return Ok(0);
    }
    let mut info = bindings::ib_port_speed_info::default();
    // SAFETY: Both structures are valid. The function fails for speeds and widths that it does not know.
    to_result(unsafe { bindings::ib_port_attr_to_speed_info(attr, &mut info) })?;
    Ok(u64::try_from(info.rate)?)
}

/// The operation `get_port_immutable`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn get_port_immutable<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    attr: *mut bindings::ib_port_immutable,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is that of the port, which nobody reads before the
    // device is registered.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    from_result(|| D::port_immutable(dev, port, attr).map(|()| 0))
}

/// The operation `query_pkey`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_pkey<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `pkey` is the caller's, and valid for writes.
    let (dev, pkey) = unsafe { (Device::<D>::from_raw(dev), &mut *pkey) };
    from_result(|| {
        *pkey = D::query_pkey(dev, port, index)?;
        Ok(0)
    })
}

/// The operation `add_gid`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn add_gid<D: Driver>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    // SAFETY: The core's GID table calls with an entry of its own, which it keeps until this
    // returns, and which names the registered device that has the table.
    let (dev, attr) = unsafe { (Device::<D>::from_raw((*attr).device), &*attr) };
    from_result(|| D::add_gid(dev, &GidAttr::new(attr)).map(|()| 0))
}

/// The operation `del_gid`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn del_gid<D: Driver>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    // SAFETY: The core's GID table calls with an entry of its own, which it keeps until this
    // returns, and which names the registered device that has the table.
    let (dev, attr) = unsafe { (Device::<D>::from_raw((*attr).device), &*attr) };
    from_result(|| D::del_gid(dev, &GidAttr::new(attr)).map(|()| 0))
}
