// SPDX-License-Identifier: GPL-2.0

//! The device: `struct ib_device`, and its objects by number.

use super::{
    event::{
        new_event,
        Element,
        EventType, //
    },
    object::{
        Cq,
        Object,
        Qp,
        Srq, //
    },
    table::Table,
    udata::no_driver_data,
    wc::StandIns,
    Driver, //
};
use crate::{
    bindings,
    errno,
    net::NetDevice, //
};
use core::{
    fmt::Write,
    ops::Deref,
    ptr, //
};
use kernel::{
    error::{
        from_result,
        to_result, //
    },
    prelude::*,
    static_lock_class,
    str::NullTerminatedFormatter,
    sync::Arc,
    types::Opaque, //
};

/// The only port, counting from 1.
pub(crate) const PORT: u32 = 1;

/// The number of [`Handles::device`] in its table.
pub(super) const DEVICE: u32 = 0;

/// The objects of a device by number, so that the driver finds what an interrupt, a completion or
/// an event names.
pub(crate) struct Handles<D: Driver> {
    /// The completion queues.
    pub(crate) cqs: Table<Cq<D>>,
    /// The queue pairs.
    pub(crate) qps: Table<Qp<D>>,
    /// The shared receive queues.
    pub(crate) srqs: Table<Srq<D>>,
    /// The stand-ins to which completions point that the kernel polls for programs.
    pub(super) stand_ins: StandIns,
    pub(super) device: Table<Device<D>>,
}

impl<D: Driver> Handles<D> {
    /// Makes tables for CQ numbers below `cqs`, QP numbers below `qps` and SRQ numbers below `srqs`. `polls` says
    /// whether the kernel polls CQs for programs. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(cqs: usize, qps: usize, srqs: usize, polls: bool) -> Result<Self> {
        Ok(Self {
            cqs: Table::new(cqs, c"ib::Handles::cqs", static_lock_class!())?,
            qps: Table::new(qps, c"ib::Handles::qps", static_lock_class!())?,
            srqs: Table::new(srqs, c"ib::Handles::srqs", static_lock_class!())?,
            stand_ins: StandIns::new(if polls { qps } else { 0 })?,
            device: Table::new(1, c"ib::Handles::device", static_lock_class!())?,
        })
    }

    /// Reports an asynchronous event of the device's port, if it is registered. Any context.
    pub(crate) fn report_port(&self, event: EventType) {
        self.device.with(DEVICE, |dev| dev.report(event));
    }
}

/// A `struct ib_device` with the driver's data.
///
/// # Invariants
///
/// `raw` is from `ib_alloc_device()`; `data` and `handles` are initialised.
#[repr(C)]
pub(crate) struct Device<D: Driver> {
    raw: Opaque<bindings::ib_device>,
    pub(super) data: Arc<D>,
    pub(super) handles: Arc<Handles<D>>,
}

// SAFETY: The driver only hands the C part to the RDMA core, which locks.
unsafe impl<D: Driver> Send for Device<D> {}
// SAFETY: The driver only hands the C part to the RDMA core, which locks.
unsafe impl<D: Driver> Sync for Device<D> {}

impl<D: Driver> Device<D> {
    /// Returns the C structure.
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.get()
    }

    /// Returns the device whose C structure `raw` is.
    ///
    /// # Safety
    ///
    /// `raw` must be a device of this driver, valid for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: `raw` is at offset 0 of the device, which the caller promises is valid for `'a`.
        unsafe { &*raw.cast::<Self>() }
    }

    /// Returns the driver's data.
    pub(crate) fn data(&self) -> &Arc<D> {
        &self.data
    }

    /// Returns the objects by number. They are the same as long as the device lives.
    pub(super) fn handles(&self) -> &Handles<D> {
        &self.handles
    }

    /// Pairs the port with a network interface; with `None`, ends the pairing. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn set_netdev(&self, netdev: Option<&NetDevice>) -> Result {
        let netdev = netdev.map_or(ptr::null_mut(), NetDevice::as_raw);
        // SAFETY: By the type invariants `raw` is valid. The RDMA core takes a reference.
        to_result(unsafe { bindings::ib_device_set_netdev(self.as_raw(), netdev, PORT) })
    }

    /// Returns the MAC address of an interface that the device may be paired with ([`NetDevice::own_mac`]).
    pub(crate) fn mac_of(&self, netdev: &NetDevice) -> Option<[u8; 6]> {
        // SAFETY: By the type invariants `raw` is valid.
        unsafe { netdev.own_mac(self.as_raw()) }
    }

    /// Calls `f` with the paired network interface, if there is one.
    pub(crate) fn with_netdev<R>(&self, f: impl FnOnce(&NetDevice) -> R) -> Option<R> {
        // SAFETY: By the type invariants `raw` is valid. The result is null or comes with a
        // reference, which this function gives back.
        unsafe {
            let raw = bindings::ib_device_get_netdev(self.as_raw(), PORT);
            let result = f(NetDevice::from_raw(raw)?);
            bindings::virtio_rdma_dev_put(raw);
            Some(result)
        }
    }

    fn report(&self, event: EventType) {
        let event = new_event(self.as_raw(), event, Element::Port(PORT));
        // SAFETY: By the type invariants `raw` is valid. The event is copied.
        unsafe { bindings::ib_dispatch_event(&raw const event) };
    }
}

impl<D: Driver> Deref for Device<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.data
    }
}

/// Initialises a new object with `data`, and lets the driver find it by its number from then on. If that
/// fails, the object is destroyed in the device, as far as the device knows it. May sleep.
///
/// # Safety
///
/// `raw` must be the first member of [`Object::SIZE`] bytes that stay where they are, the driver's data of
/// which is not initialised. [`Table::retire`] must take the object out of `table` before its data is dropped.
///
/// # Errors
///
/// The errors of `data`, which initialises nothing then; `ENOMEM`; `EIO` for a number that is out of range or taken.
pub(super) unsafe fn publish_new<'a, D: Driver, C, T>(
    dev: &Device<D>,
    table: &Table<Object<C, T>>,
    raw: *mut C,
    data: impl PinInit<T, Error>,
    number: fn(&T) -> u32,
    destroy: fn(&T) -> Result,
) -> Result<&'a Object<C, T>>
where
    Object<C, T>: Sync,
{
    // SAFETY: The caller promises that `raw` heads as many bytes, which stay, and whose data is not initialised.
    let object = unsafe { Object::init(raw, data, number)? };
    // SAFETY: The caller promises that `Table::retire` takes the object out before its data is dropped.
    let Err(error) = (unsafe { table.publish(object.handle(), object) }) else {
        dev.data().published();
        return Ok(object);
    };
    if error != ENOMEM {
        dev.data().bad_number();
    }
    // The device may keep the object, but the driver does not keep it.
    let _ = destroy(object);
    // SAFETY: `init` has initialised the data. The object did not get into the table, so the reference above is
    // the only one, and nobody uses it any more.
    unsafe { Object::<C, T>::drop_data(raw) };
    Err(if error == ENOMEM { error } else { EIO })
}

/// Destroys an object that [`publish_new`] has initialised, and drops its data. The driver finds the object by
/// its number until the device has destroyed it. May sleep.
///
/// # Safety
///
/// `raw` must be an object of `table`, which nobody destroys or uses any more, and `udata` must be null or that of
/// the current system call.
///
/// # Errors
///
/// The errors of `destroy` and [`no_driver_data`]; the object then lives on.
pub(super) unsafe fn retire_old<C, T>(
    table: &Table<Object<C, T>>,
    raw: *mut C,
    udata: *mut bindings::ib_udata,
    destroy: fn(&T) -> Result,
) -> Result<c_int>
where
    Object<C, T>: Sync,
{
    // SAFETY: The caller promises that `udata` is null or that of the current system call.
    unsafe { no_driver_data(udata)? };
    // SAFETY: The caller promises that `raw` is an initialised object, which lives until its data is dropped below.
    let object = unsafe { Object::<C, T>::from_raw(raw) };
    table.retire(object.handle(), || destroy(object))?;
    // SAFETY: The object is out of the table, and the caller promises that nobody else uses it.
    unsafe { Object::<C, T>::drop_data(raw) };
    Ok(0)
}

/// The operation `query_device`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_device<D: Driver>(
    dev: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is the core's own, which nobody else has before this
    // returns.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    *attr = Default::default();
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        dev.data().query_device(attr).map(|()| 0)
    })
}

/// The operation `modify_device`: people may describe the node, as rdma-ndd(8) does.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn modify_device(
    dev: *mut bindings::ib_device,
    mask: c_int,
    attr: *mut bindings::ib_device_modify,
) -> c_int {
    if mask != bindings::ib_device_modify_flags_IB_DEVICE_MODIFY_NODE_DESC as c_int {
        return errno::unsupported().to_errno();
    }
    // SAFETY: The core keeps the device until this returns, and `attr` is its own. It reads the description without
    // a lock, as text of at most as many bytes as the field has.
    unsafe {
        let description = (*attr).node_desc;
        (&raw mut (*dev).node_desc).write(description);
    }
    0
}

/// The operation `get_dev_fw_str`: writes the version of the device, as three numbers, or nothing if the device does
/// not tell.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn get_dev_fw_str(dev: *mut bindings::ib_device, text: *mut c_char) {
    const LEN: usize = bindings::IB_FW_VERSION_NAME_MAX as usize;

    // SAFETY: The core keeps the device until this returns, and has asked for its attributes before it registered
    // it. `text` has that many bytes, which the core need not have written yet, and is the core's own.
    let (version, text) = unsafe {
        text.write_bytes(0, LEN);
        (
            (*dev).attrs.fw_ver,
            core::slice::from_raw_parts_mut(text.cast::<u8>(), LEN),
        )
    };
    if let Some(mut text) = NullTerminatedFormatter::new(text) {
        if version != 0 {
            // The numbers have 10, 5 and 5 digits at most.
            let _ = write!(
                text,
                "{}.{}.{}",
                version >> 32,
                version >> 16 & 0xffff,
                version & 0xffff
            );
        }
    }
}
