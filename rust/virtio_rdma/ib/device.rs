// SPDX-License-Identifier: GPL-2.0

//! The device: `struct ib_device`, its allocation and its registration.

use super::{
    object::{
        new_event,
        Element, //
    },
    ops,
    wr::StandIns,
    Cq,
    Driver,
    Qp,
    Srq,
    Table, //
};
use crate::{
    bindings,
    dma,
    net::NetDevice, //
};
use core::{
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    device,
    error::to_result,
    prelude::*,
    static_lock_class,
    str::CString,
    sync::Arc,
    types::Opaque, //
};

/// The only port, counting from 1.
pub(crate) const PORT: u32 = 1;

/// The number of [`Handles::device`] in its table.
const DEVICE: u32 = 0;

/// The objects of a device by number, so that the driver finds what an interrupt, a completion or
/// an event names.
pub(crate) struct Handles<D: Driver> {
    /// The completion queues.
    pub(crate) cqs: Table<Cq<D>>,
    /// The queue pairs.
    pub(crate) qps: Table<Qp<D>>,
    /// The shared receive queues.
    pub(crate) srqs: Table<Srq<D>>,
    /// What completions of programs point to.
    pub(super) stand_ins: StandIns,
    device: Table<Device<D>>,
}

impl<D: Driver> Handles<D> {
    /// Makes tables for CQ numbers below `cqs`, QP numbers below `qps` and SRQ numbers below `srqs`.
    /// Whether the kernel polls CQs for programs is up to `polls`. May sleep.
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
    pub(crate) fn report_port(&self, event: bindings::ib_event_type) {
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
    data: Arc<D>,
    handles: Arc<Handles<D>>,
}

// SAFETY: The C part is handed to the RDMA core, which locks.
unsafe impl<D: Driver> Send for Device<D> {}
// SAFETY: As above.
unsafe impl<D: Driver> Sync for Device<D> {}

impl<D: Driver> Device<D> {
    /// The C structure.
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.get()
    }

    /// # Safety
    ///
    /// `raw` must be a device of this driver, valid for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: `raw` is at offset 0, and the rest follows from the safety requirements.
        unsafe { &*raw.cast::<Self>() }
    }

    /// The driver's data.
    pub(crate) fn data(&self) -> &Arc<D> {
        &self.data
    }

    /// The objects by number; the same ones as long as the device lives.
    pub(super) fn handles(&self) -> &Handles<D> {
        &self.handles
    }

    /// Pairs the port with a network interface, or with none. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn set_netdev(&self, netdev: Option<&NetDevice>) -> Result {
        let netdev = netdev.map_or(ptr::null_mut(), NetDevice::as_raw);
        // SAFETY: By the type invariants `raw` is valid. The RDMA core takes a reference.
        to_result(unsafe { bindings::ib_device_set_netdev(self.as_raw(), netdev, PORT) })
    }

    /// Calls `f` with the paired network interface, if there is one.
    pub(crate) fn with_netdev<R>(&self, f: impl FnOnce(&NetDevice) -> R) -> Option<R> {
        // SAFETY: By the type invariants `raw` is valid. The result is null or comes with a
        // reference, which is ours to give back.
        unsafe {
            let raw = bindings::ib_device_get_netdev(self.as_raw(), PORT);
            let result = f(NetDevice::from_raw(raw)?);
            bindings::virtio_rdma_dev_put(raw);
            Some(result)
        }
    }

    fn report(&self, event: bindings::ib_event_type) {
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

/// An allocated device, with owners that keep it from being freed.
pub(crate) struct UnregisteredDevice<D: Driver>(NonNull<Device<D>>);

// SAFETY: It is a reference to a `Device`.
unsafe impl<D: Driver> Send for UnregisteredDevice<D> {}
// SAFETY: As above.
unsafe impl<D: Driver> Sync for UnregisteredDevice<D> {}

/// What a device is made of.
pub(crate) struct Config<'a> {
    /// The device in sysfs below which this one stands.
    pub(crate) parent: &'a device::Device,
    /// The GUID of the node, in network order.
    pub(crate) node_guid: [u8; 8],
    /// Number of completion vectors.
    pub(crate) num_comp_vectors: u32,
    /// Whether the device answers performance management.
    pub(crate) has_pma: bool,
}

impl<D: Driver> UnregisteredDevice<D> {
    /// Allocates a device, the objects of which will be in `handles`. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or what [`Driver::query_device`] says.
    pub(crate) fn new(
        data: Arc<D>,
        handles: Arc<Handles<D>>,
        config: &Config<'_>,
    ) -> Result<Arc<Self>> {
        let mut ops = KBox::new(ops::table::<D>(), GFP_KERNEL)?;
        // SAFETY: There are no requirements.
        ops.owner = unsafe { bindings::virtio_rdma_this_module() };
        ops.set_uverbs_robust_udata(1);
        if !config.has_pma {
            // The core then shows no counters of the port.
            ops.process_mad = None;
        }

        // SAFETY: `init_net` lives for ever, and the size covers `struct ib_device`.
        let raw = unsafe {
            bindings::_ib_alloc_device(size_of::<Device<D>>(), &raw mut bindings::init_net)
        };
        let dev = NonNull::new(raw.cast::<Device<D>>()).ok_or(ENOMEM)?;

        // SAFETY: `dev` is valid, its Rust members not yet initialised, and nobody else knows of it. The
        // operations are copied. All members of the anonymous union begin with the `struct device`.
        unsafe {
            (&raw mut (*dev.as_ptr()).data).write(data);
            (&raw mut (*dev.as_ptr()).handles).write(handles);
            bindings::ib_set_device_ops(raw, &raw const *ops);
            (*raw).node_type = bindings::RDMA_NODE_IB_CA as u8;
            (*raw).phys_port_cnt = PORT;
            (*raw).node_guid = u64::from_ne_bytes(config.node_guid);
            (*raw).num_comp_vectors = config.num_comp_vectors as c_int;
            (*raw).uverbs_cmd_mask |= ops::uverbs_cmd_mask();
            (*raw).driver_def = bindings::virtio_rdma_uapi_definitions();
            (*(&raw mut (*raw).__bindgen_anon_1).cast::<bindings::device>()).parent =
                dma::device_as_raw(config.parent);
        }
        Ok(Arc::new(Self(dev), GFP_KERNEL)?)
    }
}

impl<D: Driver> UnregisteredDevice<D> {
    /// The name that it was registered by, or that it was given since. It is not registered any more. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn name(&self) -> Result<CString> {
        // SAFETY: By the type invariants the device is valid; its name ends with a zero, and does not
        // change, because the core does not know the device any more.
        let name = unsafe { CStr::from_char_ptr((&raw const (*self.as_raw()).name).cast()) };
        Ok(CString::try_from(name)?)
    }
}

impl<D: Driver> Deref for UnregisteredDevice<D> {
    type Target = Device<D>;

    fn deref(&self) -> &Device<D> {
        // SAFETY: The device is valid until `drop`.
        unsafe { self.0.as_ref() }
    }
}

impl<D: Driver> Drop for UnregisteredDevice<D> {
    fn drop(&mut self) {
        // SAFETY: The device is not registered (any more), so no operation uses `data` or `handles`, and
        // this is its last user.
        unsafe {
            ptr::drop_in_place(&raw mut (*self.0.as_ptr()).data);
            ptr::drop_in_place(&raw mut (*self.0.as_ptr()).handles);
            bindings::ib_dealloc_device(self.0.as_ptr().cast());
        }
    }
}

/// The registration of a device. Dropping it unregisters, and destroys all objects: nothing calls
/// the driver afterwards.
pub(crate) struct Registration<D: Driver>(Arc<UnregisteredDevice<D>>);

impl<D: Driver> Registration<D> {
    /// Registers a device, by this name or else the next one of [`Driver::NAME`]. May sleep.
    ///
    /// # Errors
    ///
    /// What the RDMA core says: `ENFILE` for a name that another device has.
    pub(crate) fn new(
        dev: Arc<UnregisteredDevice<D>>,
        dma: &dma::Device,
        name: Option<&CStr>,
    ) -> Result<Self> {
        // To the core, a name with this sign is the format of one.
        let name = name.filter(|name| !name.to_bytes().contains(&b'%'));
        // SAFETY: The device is valid and complete. `dma` is bound as long as this registration
        // exists, by the contract of `dma::Device::new`.
        to_result(unsafe {
            bindings::ib_register_device(
                dev.as_raw(),
                name.unwrap_or(D::NAME).as_char_ptr(),
                dma.as_raw(),
            )
        })?;
        let this = Self(dev);
        // SAFETY: `drop` takes it out.
        unsafe { this.0.handles().device.publish(DEVICE, &this.0)? };
        Ok(this)
    }
}

impl<D: Driver> Drop for Registration<D> {
    fn drop(&mut self) {
        self.0.handles().device.unpublish(DEVICE);
        // SAFETY: The device is registered.
        unsafe { bindings::ib_unregister_device(self.0.as_raw()) };
    }
}
