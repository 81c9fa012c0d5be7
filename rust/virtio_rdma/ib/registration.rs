// SPDX-License-Identifier: GPL-2.0

//! The allocation of a device and its registration with the RDMA core.

use super::{
    device::{
        Device,
        Handles,
        DEVICE,
        PORT, //
    },
    ops,
    Driver, //
};
use crate::{
    bindings,
    dma, //
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
    new_mutex,
    prelude::*,
    str::CString,
    sync::{
        aref::ARef,
        Arc,
        Mutex, //
    }, //
};

/// An allocated device, with owners that keep it from being freed.
#[pin_data(PinnedDrop)]
pub(crate) struct UnregisteredDevice<D: Driver> {
    dev: NonNull<Device<D>>,
    /// The device in sysfs below which this one stands. The RDMA core names it in messages, also when the device is not
    /// registered any more.
    _parent: ARef<device::Device>,
    /// The namespace that the device is allocated in. Once the device is registered, the core moves it out of a
    /// namespace that ends; before that, this keeps the namespace.
    #[pin]
    namespace: Mutex<Option<Namespace>>,
}

// SAFETY: It is a reference to a `Device`.
unsafe impl<D: Driver> Send for UnregisteredDevice<D> {}
// SAFETY: It is a reference to a `Device`.
unsafe impl<D: Driver> Sync for UnregisteredDevice<D> {}

/// A network namespace, which does not end as long as this exists.
pub(crate) struct Namespace(NonNull<bindings::net>);

// SAFETY: A reference to a namespace may be given back by any thread.
unsafe impl Send for Namespace {}

impl Namespace {
    /// Returns the namespace of a device that is registered; the initial one, to which the device moves, if that
    /// namespace ends.
    pub(crate) fn of<D: Driver>(dev: &Device<D>) -> Self {
        // SAFETY: By the type invariants the device is valid. The RDMA core moves a registered device out of a
        // namespace before that is freed. The result is not null.
        unsafe {
            Self(NonNull::new_unchecked(bindings::virtio_rdma_get_net(
                dev.as_raw(),
            )))
        }
    }

    /// Returns this namespace, or else the initial one, which lives for ever.
    fn or_initial(this: Option<&Self>) -> *mut bindings::net {
        this.map_or(&raw mut bindings::init_net, |this| this.0.as_ptr())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // SAFETY: This has a reference to the namespace, and gives it back once.
        unsafe { bindings::virtio_rdma_put_net(self.0.as_ptr()) };
    }
}

/// The attributes that a device is registered with.
pub(crate) struct Config<'a> {
    /// The network namespace in which the device is, if namespaces are in exclusive mode; `None` for the initial one.
    pub(crate) namespace: Option<Namespace>,
    /// The device in sysfs below which this one stands.
    pub(crate) parent: &'a ARef<device::Device>,
    /// The GUID of the node, in network order.
    pub(crate) node_guid: [u8; 8],
    /// Number of completion vectors.
    pub(crate) num_comp_vectors: u32,
    /// Whether the device answers performance management.
    pub(crate) has_pma: bool,
}

impl<D: Driver> UnregisteredDevice<D> {
    /// Allocates a device, whose objects will be in `handles`. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or what [`Driver::query_device`] says.
    pub(crate) fn new(
        data: Arc<D>,
        handles: Arc<Handles<D>>,
        config: Config<'_>,
    ) -> Result<Arc<Self>> {
        let mut ops = KBox::new(ops::table::<D>(), GFP_KERNEL)?;
        // SAFETY: The function has no requirements.
        ops.owner = unsafe { bindings::virtio_rdma_this_module() };
        ops.set_uverbs_robust_udata(1);
        if !config.has_pma {
            // Without this operation the core shows no counters of the port.
            ops.process_mad = None;
        }

        let namespace = Namespace::or_initial(config.namespace.as_ref());
        // SAFETY: The size covers `struct ib_device`. The namespace is valid, and stays until the device is registered
        // or freed, because the result keeps `config.namespace` for so long.
        let raw = unsafe { bindings::_ib_alloc_device(size_of::<Device<D>>(), namespace) };
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
            (*raw).driver_def = D::UAPI.as_ptr();
            (*(&raw mut (*raw).__bindgen_anon_1).cast::<bindings::device>()).parent =
                dma::device_as_raw(config.parent);
        }
        Arc::pin_init(
            pin_init!(Self {
                dev,
                _parent: config.parent.clone(),
                namespace <- new_mutex!(config.namespace),
            }),
            GFP_KERNEL,
        )
    }
}

impl<D: Driver> UnregisteredDevice<D> {
    /// Returns the name that the device had last. The device must not be registered any more. May sleep.
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
        unsafe { self.dev.as_ref() }
    }
}

#[pinned_drop]
impl<D: Driver> PinnedDrop for UnregisteredDevice<D> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The device is not registered (any more), so no operation uses `data` or `handles`, and
        // this is its last user.
        unsafe {
            ptr::drop_in_place(&raw mut (*self.dev.as_ptr()).data);
            ptr::drop_in_place(&raw mut (*self.dev.as_ptr()).handles);
            bindings::ib_dealloc_device(self.dev.as_ptr().cast());
        }
    }
}

/// The registration of a device. Dropping it unregisters the device and destroys all objects: nothing calls
/// the driver afterwards.
pub(crate) struct Registration<D: Driver>(Arc<UnregisteredDevice<D>>);

impl<D: Driver> Registration<D> {
    /// Registers a device, by this name, which it had before, or else the next one of [`Driver::NAME`]. May sleep.
    ///
    /// # Errors
    ///
    /// What the RDMA core says: `ENFILE` for a name that another device has.
    pub(crate) fn new(
        dev: Arc<UnregisteredDevice<D>>,
        dma: &dma::Device,
        name: Option<&CStr>,
    ) -> Result<Self> {
        // The core takes a name with this sign for a format.
        let name = name.filter(|name| !name.to_bytes().contains(&b'%'));
        // udev gives a new device a name (`rdma_rename` of rdma-core), but leaves one alone that userspace has named.
        let named_by = match name {
            Some(_) => bindings::rdma_nl_name_assign_type_RDMA_NAME_ASSIGN_TYPE_USER,
            None => bindings::rdma_nl_name_assign_type_RDMA_NAME_ASSIGN_TYPE_UNKNOWN,
        };
        // SAFETY: The device is allocated and filled in, and not registered, so nobody else uses its members. `dma` is
        // bound as long as this registration exists, because the driver drops the registration before it gives up the
        // device that `dma` belongs to.
        to_result(unsafe {
            (*dev.as_raw()).name_assign_type = named_by;
            bindings::ib_register_device(
                dev.as_raw(),
                name.unwrap_or(D::NAME).as_char_ptr(),
                dma.as_raw(),
            )
        })
        .inspect_err(|_| {
            // If the RDMA core has added GIDs already, it leaves it to work items to take them back, which use the device
            // (`ib_cache_setup_one()` of Linux 7.2.12).
            // SAFETY: The workqueue lives as long as the RDMA core, on which this module depends.
            unsafe { bindings::virtio_rdma_flush_ib_wq() };
        })?;
        *dev.namespace.lock() = None;
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
