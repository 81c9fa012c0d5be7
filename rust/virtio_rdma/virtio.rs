// SPDX-License-Identifier: GPL-2.0

//! Abstractions for virtio drivers.
//!
//! C headers: [`include/linux/virtio.h`](srctree/include/linux/virtio.h),
//! [`include/linux/virtio_config.h`](srctree/include/linux/virtio_config.h)

use crate::{
    bindings,
    dma::{
        self,
        Buffer,
        Span, //
    },
};
use core::{
    marker::PhantomData,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    container_of, device,
    device_id::RawDeviceId,
    driver,
    error::{
        from_result,
        to_result, //
    },
    new_mutex,
    prelude::*,
    sync::{
        aref::ARef,
        rcu,
        Arc,
        ArcBorrow,
        Mutex, //
    },
    types::Opaque,
};

/// An adapter for the registration of virtio drivers.
pub(crate) struct Adapter<T: Driver>(T);

// SAFETY:
// - `bindings::virtio_driver` is a C type declared as `repr(C)`.
// - `T::Data` is the type of the driver's device private data.
// - `struct virtio_driver` embeds a `struct device_driver` at `DEVICE_DRIVER_OFFSET`.
unsafe impl<T: Driver> driver::DriverLayout for Adapter<T> {
    type DriverType = bindings::virtio_driver;
    type DriverData<'bound> = T::Data;
    const DEVICE_DRIVER_OFFSET: usize = core::mem::offset_of!(Self::DriverType, driver);
}

// SAFETY: A call to `unregister` is valid after `register` was successful.
unsafe impl<T: Driver> driver::RegistrationOps for Adapter<T> {
    unsafe fn register(
        vdrv: &Opaque<Self::DriverType>,
        name: &'static CStr,
        module: &'static ThisModule,
    ) -> Result {
        // SAFETY: It is safe to set the fields of `struct virtio_driver` on initialization.
        unsafe {
            (*vdrv.get()).driver.name = name.as_char_ptr();
            (*vdrv.get()).id_table = T::ID_TABLE.as_ptr();
            (*vdrv.get()).feature_table = T::FEATURES.as_ptr();
            (*vdrv.get()).feature_table_size = T::FEATURES.len() as c_uint;
            (*vdrv.get()).validate = Some(Self::validate_callback);
            (*vdrv.get()).probe = Some(Self::probe_callback);
            (*vdrv.get()).remove = Some(Self::remove_callback);
            (*vdrv.get()).config_changed = Some(Self::config_changed_callback);
            (*vdrv.get()).freeze = Some(Self::freeze_callback);
            (*vdrv.get()).restore = Some(Self::restore_callback);
            (*vdrv.get()).shutdown = Some(Self::shutdown_callback);
            (*vdrv.get()).reset_prepare = Some(Self::reset_prepare_callback);
            (*vdrv.get()).reset_done = Some(Self::reset_done_callback);
        }

        // SAFETY: `vdrv` is a valid `struct virtio_driver` until `unregister`.
        to_result(unsafe { bindings::__register_virtio_driver(vdrv.get(), module.as_ptr()) })
    }

    unsafe fn unregister(vdrv: &Opaque<Self::DriverType>) {
        // SAFETY: `vdrv` was registered.
        unsafe { bindings::unregister_virtio_driver(vdrv.get()) }
    }
}

impl<T: Driver> Adapter<T> {
    extern "C" fn validate_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: The virtio core calls with a valid device.
        let dev = unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };

        from_result(|| dev.clean(T::validate).map(|()| 0))
    }

    extern "C" fn probe_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: The virtio core calls with a valid device.
        let dev = unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };

        from_result(|| {
            let data = T::probe(dev);

            dev.as_ref()
                .set_drvdata(data)
                .inspect_err(|_| dev.wait_no_queues())?;
            Ok(0)
        })
    }

    extern "C" fn remove_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: The virtio core calls with a valid device.
        let dev = unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };

        // SAFETY: `remove_callback` comes only after a successful `probe_callback`, which stored a
        // `Pin<KBox<T::Data>>`.
        let data = unsafe { dev.as_ref().drvdata_borrow::<T::Data>() };

        T::unbind(dev, data);
        dev.wait_no_queues();
    }
}

impl<T: Driver> Adapter<T> {
    extern "C" fn config_changed_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: The virtio core calls with a valid device, and only while it is bound: the data
        // was stored by `probe_callback`, after which the core enables these calls, and stays until
        // the end of `remove_callback`, before which the core disables these calls.
        let data = unsafe {
            let dev = &*vdev.cast::<Device<device::CoreInternal<'_>>>();
            dev.as_ref().drvdata_borrow::<T::Data>()
        };

        T::config_changed(data);
    }
}

impl<T: Driver> Adapter<T> {
    extern "C" fn freeze_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: The virtio core calls with a valid device, which is bound: `probe_callback` stored
        // the data. Nobody unbinds it meanwhile: tasks are frozen, and the transport's device, which
        // would be removed with it, is locked.
        let (dev, data) = unsafe {
            let dev = &*vdev.cast::<Device<device::CoreInternal<'_>>>();
            (dev, dev.as_ref().drvdata_borrow::<T::Data>())
        };

        from_result(|| {
            T::freeze(dev, data)?;
            dev.wait_no_queues();
            Ok(0)
        })
    }

    extern "C" fn restore_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: The virtio core calls with a valid device, which is bound: `probe_callback` stored the data.
        // Nobody unbinds it meanwhile: tasks are frozen, and the transport's device is locked.
        let (dev, data) = unsafe {
            let dev = &*vdev.cast::<Device<device::CoreInternal<'_>>>();
            (dev, dev.as_ref().drvdata_borrow::<T::Data>())
        };

        from_result(|| T::restore(dev, data).map(|()| 0))
    }

    extern "C" fn shutdown_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: The virtio core calls with a valid device that is bound, and has its lock: `probe_callback` stored the
        // data.
        let (dev, data) = unsafe {
            let dev = &*vdev.cast::<Device<device::CoreInternal<'_>>>();
            (dev, dev.as_ref().drvdata_borrow::<T::Data>())
        };

        T::shutdown(dev, data);
    }
}

impl<T: Driver> Adapter<T> {
    extern "C" fn reset_prepare_callback(vdev: *mut bindings::virtio_device) -> c_int {
        let prepare = |dev: &Device<device::Core<'_>>, data: Pin<&T::Data>| {
            T::reset_prepare(dev, data)?;
            dev.wait_no_queues();
            Ok(0)
        };
        // SAFETY: The virtio core calls with a valid device, which this driver has.
        from_result(|| match unsafe { Self::with_lock(vdev, prepare) } {
            Holder::Unchanged(result) => result,
            Holder::Another | Holder::Nobody => Err(ENODEV),
        })
    }

    extern "C" fn reset_done_callback(vdev: *mut bindings::virtio_device) -> c_int {
        let done = |dev: &Device<device::Core<'_>>, data: Pin<&T::Data>| T::reset_done(dev, data);
        // A driver that was unbound meanwhile has nothing to take into service again. With an error the core gives the
        // device up (FAILED); without one, it would make a device ready that nobody has. It does either without the
        // lock (`virtio_device_restore_priv()`), so that a driver that binds at that moment may find any of its status
        // bits changed.
        // SAFETY: The virtio core calls with a valid device, which this driver has.
        match unsafe { Self::with_lock(vdev, done) } {
            Holder::Unchanged(()) | Holder::Another => 0,
            Holder::Nobody => ENODEV.to_errno(),
        }
    }

    /// Calls `f` with a device and its data, with the lock of the device, which the virtio core does not take around
    /// the reset of a function, unless the device was taken from the driver before the lock was got. Sleeps.
    ///
    /// # Safety
    ///
    /// `vdev` must be valid, and this must be its driver when the virtio core calls. The core does not keep the
    /// driver's module in memory meanwhile (`virtio_device_reset_prepare()`).
    unsafe fn with_lock<R>(
        vdev: *mut bindings::virtio_device,
        f: impl FnOnce(&Device<device::Core<'_>>, Pin<&T::Data>) -> R,
    ) -> Holder<R> {
        // SAFETY: The caller promises that the device is valid.
        let (raw, driver) = unsafe { (&raw mut (*vdev).dev, (*vdev).dev.driver) };

        // SAFETY: The device is valid, and whoever binds or unbinds it waits for its lock. If its driver is that of
        // before, it is bound, so `probe_callback` stored the data.
        unsafe {
            bindings::virtio_rdma_device_lock(raw);
            let result = if (*raw).driver.is_null() {
                Holder::Nobody
            } else if (*raw).driver == driver {
                let dev = &*vdev.cast::<Device<device::CoreInternal<'_>>>();
                Holder::Unchanged(f(dev, dev.as_ref().drvdata_borrow::<T::Data>()))
            } else {
                Holder::Another
            };
            bindings::virtio_rdma_device_unlock(raw);
            result
        }
    }
}

/// The driver that has a device when the lock of the device was got.
enum Holder<R> {
    /// The one that had it before, and what it did.
    Unchanged(R),
    /// One that was bound meanwhile.
    Another,
    /// No driver.
    Nobody,
}

/// An entry of the table of devices that a driver serves.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceId(bindings::virtio_device_id);

impl DeviceId {
    /// Returns the device with this virtio device ID, of any vendor.
    pub(crate) const fn new(device: u32) -> Self {
        Self(bindings::virtio_device_id {
            device,
            vendor: bindings::VIRTIO_DEV_ANY_ID,
        })
    }
}

// SAFETY: `DeviceId` is a `#[repr(transparent)]` wrapper of `struct virtio_device_id`.
unsafe impl RawDeviceId for DeviceId {
    type RawType = bindings::virtio_device_id;
}

/// The table of devices that a driver serves.
pub(crate) type IdTable = &'static dyn kernel::device_id::IdTable<DeviceId, ()>;

/// A virtio driver.
pub(crate) trait Driver {
    /// The driver's data of a bound device.
    type Data: Send + Sync + 'static;

    /// The devices served.
    const ID_TABLE: IdTable;

    /// The device-specific feature bits that the driver understands.
    const FEATURES: &'static [c_uint];

    /// Looks at the configuration and the features before they are agreed on.
    ///
    /// # Errors
    ///
    /// Any; the device is then not bound.
    fn validate(dev: &Device<device::Core<'_>>) -> Result;

    /// Binds to a device.
    fn probe(dev: &Device<device::Core<'_>>) -> impl PinInit<Self::Data, Error>;

    /// Called when something about the device changed: its configuration, or its [`Status`]. Interrupts are off, or it
    /// is a hard interrupt.
    fn config_changed(data: Pin<&Self::Data>);

    /// Gives the device up before the machine sleeps or is hibernated: it must have been reset, and
    /// have no queues, when this returns. Tasks are frozen. [`Driver::restore`] or
    /// [`Driver::unbind`] follows; after the snapshot of a hibernation, the one and then this again.
    ///
    /// # Errors
    ///
    /// Any; the machine then stays awake.
    fn freeze(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>) -> Result;

    /// Takes the device into service again after [`Driver::freeze`]: it was reset, and the features
    /// were agreed on. Tasks are still frozen.
    ///
    /// # Errors
    ///
    /// Any; the device then stays out of service.
    fn restore(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>) -> Result;

    /// Stops the device because the machine halts, restarts or starts another kernel: [`Device::shut_down`]. Has the lock
    /// of the device. Nothing follows.
    fn shutdown(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>);

    /// Gives the device up before its function is reset, as an administrator asks for or after an error of the bus: it
    /// must have been reset, and have no queues, when this returns. [`Driver::reset_done`] or [`Driver::unbind`]
    /// follows. Has the lock of the device.
    ///
    /// # Errors
    ///
    /// Any; the function is then reset beneath the driver.
    fn reset_prepare(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>) -> Result;

    /// Takes the device into service again after its function was reset: the features were agreed on. An error here would
    /// have the virtio core withhold [`Driver::config_changed`] from then on. Has the lock of the device.
    fn reset_done(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>);

    /// Unbinds from a device, which must have been reset when this returns. `data` is dropped
    /// afterwards.
    fn unbind(dev: &Device<device::Core<'_>>, data: Pin<&Self::Data>);
}

/// A `struct virtio_device`.
///
/// # Invariants
///
/// A reference to a [`Device`] is one to a valid `struct virtio_device`.
#[repr(transparent)]
pub(crate) struct Device<Ctx: device::DeviceContext = device::Normal>(
    Opaque<bindings::virtio_device>,
    PhantomData<Ctx>,
);

// SAFETY: `Device` is a transparent wrapper that does not depend on its generic argument.
kernel::impl_device_context_deref!(unsafe { Device });

impl<Ctx: device::DeviceContext> AsRef<device::Device<Ctx>> for Device<Ctx> {
    fn as_ref(&self) -> &device::Device<Ctx> {
        // SAFETY: By the type invariant the embedded `struct device` is valid.
        unsafe { device::Device::from_raw(&raw mut (*self.as_raw()).dev) }
    }
}

impl<Ctx: device::DeviceContext> Device<Ctx> {
    fn as_raw(&self) -> *mut bindings::virtio_device {
        self.0.get()
    }

    /// Returns whether the feature bit was agreed on.
    ///
    /// A device-specific bit must be in [`Driver::FEATURES`].
    pub(crate) fn has_feature(&self, bit: c_uint) -> bool {
        // SAFETY: By the type invariant the device is valid.
        unsafe { bindings::virtio_rdma_has_feature(self.as_raw(), bit) }
    }
}

/// Calls `f` with a virtio device as the callbacks of its driver get it, with the lock of the device. Returns `None`
/// if somebody else has the lock, or if no driver is bound.
///
/// Nobody waits for the lock here: a driver that is unbound has it, and may wait for the thread that calls this.
pub(crate) fn try_with_device<R>(
    dev: &device::Device,
    f: impl FnOnce(&Device<device::Core<'_>>) -> R,
) -> Option<R> {
    let raw = dma::device_as_raw(dev);
    // SAFETY: The reference says that the device is valid.
    if unsafe { !bindings::is_virtio_device(raw) || !bindings::virtio_rdma_device_trylock(raw) } {
        return None;
    }
    // SAFETY: `trylock` was successful, so the lock is held here, and nobody binds or unbinds the device. It is a
    // virtio device, whose `struct device` is the member `dev`.
    unsafe {
        let vdev = container_of!(raw, bindings::virtio_device, dev);
        let is_bound = !(*raw).driver.is_null();
        let result = is_bound.then(|| f(&*vdev.cast::<Device<device::Core<'_>>>()));
        bindings::virtio_rdma_device_unlock(raw);
        result
    }
}

/// A device that whoever has its lock lends to other threads, for as long as a function of the lender runs.
#[pin_data]
pub(crate) struct Lent {
    #[pin]
    device: Mutex<Option<RawDevice>>,
}

/// A pointer to a device that is valid as long as it is in [`Lent`].
struct RawDevice(*const Device<device::Core<'static>>);

// SAFETY: A device may be used from any thread; the mutex around this serialises.
unsafe impl Send for RawDevice {}

impl Lent {
    /// Makes one without a device.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            device <- new_mutex!(None, "virtio_rdma::Lent"),
        })
    }

    /// Lends the device while `f` runs. Returns when `f` has ended and nobody uses the device any more. Sleeps.
    pub(crate) fn lend<R>(&self, dev: &Device<device::Core<'_>>, f: impl FnOnce() -> R) -> R {
        *self.device.lock() = Some(RawDevice(ptr::from_ref(dev).cast()));
        let result = f();
        *self.device.lock() = None;
        result
    }

    /// Calls `f` with the device, if it is lent. May sleep.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Device<device::Core<'_>>) -> R) -> Option<R> {
        let device = self.device.lock();
        // SAFETY: The device is valid: `lend` has a reference to it, and takes the pointer back with the lock before
        // it returns. The lender has the lock of the device.
        device.as_ref().map(|raw| f(unsafe { &*raw.0 }))
    }
}

impl Device<device::Core<'_>> {
    /// Declines a feature of the transport. For [`Driver::validate`].
    pub(crate) fn clear_feature(&self, bit: c_uint) {
        // SAFETY: By the type invariant the device is valid; it is in probing, so nobody else
        // changes its features.
        unsafe { bindings::virtio_rdma_clear_feature(self.as_raw(), bit) }
    }

    /// Reads `N` bytes of the configuration space in one access, as a field of that width: 1, 2, 4 or
    /// 8, others do not compile.
    ///
    /// May sleep.
    pub(crate) fn config<const N: usize>(&self, offset: usize) -> [u8; N] {
        const { assert!(matches!(N, 1 | 2 | 4 | 8)) };
        let mut value = [0; N];

        // SAFETY: By the type invariant the device is valid, and each transport has `get`. It
        // writes `N` bytes to `value`. All transports know this width; some call BUG() for other
        // widths.
        unsafe {
            if let Some(get) = (*(*self.as_raw()).config).get {
                get(
                    self.as_raw(),
                    offset as c_uint,
                    value.as_mut_ptr().cast(),
                    N as c_uint,
                );
            }
        }
        value
    }

    /// Sets up the queues of the device, all at once: the virtio core has no later.
    ///
    /// `handler` gets the interrupts of the queues that want them, until the last [`Queue`] is
    /// gone. May sleep.
    ///
    /// # Errors
    ///
    /// `EBUSY` while the queues of an earlier call exist, `ENOMEM`, or whatever the transport says;
    /// `ENOENT` usually means that it has fewer queues.
    pub(crate) fn find_queues<H: Interrupt>(
        &self,
        specs: &[QueueSpec],
        handler: Arc<H>,
    ) -> Result<KVec<Queue>> {
        // SAFETY: By the type invariant the device is valid.
        if unsafe { bindings::virtio_rdma_has_queues(self.as_raw()) } {
            return Err(EBUSY);
        }
        let mut infos = KVec::with_capacity(specs.len(), GFP_KERNEL)?;
        for spec in specs {
            infos.push(
                bindings::virtqueue_info {
                    name: spec.name.as_char_ptr(),
                    callback: spec.interrupt.then_some(interrupt_callback::<H>),
                    ctx: false,
                },
                GFP_KERNEL,
            )?;
        }
        let mut raw = KVec::from_elem(ptr::null_mut(), specs.len(), GFP_KERNEL)?;
        let mut queues = KVec::with_capacity(specs.len(), GFP_KERNEL)?;
        let found = Arc::new(
            Found {
                vdev: self.as_raw(),
                present: false,
                release: release_handler::<H>,
            },
            GFP_KERNEL,
        )?;
        let mut found = Arc::into_unique_or_drop(found).ok_or(ENOMEM)?;

        // SAFETY: By the type invariant the device is valid; `priv` belongs to the driver, and
        // nobody reads it before there are queues.
        unsafe { (*self.as_raw()).priv_ = Arc::into_raw(handler).cast_mut().cast() };

        // SAFETY: `raw` and `infos` have `specs.len()` elements, and the names are static.
        to_result(unsafe {
            bindings::virtio_rdma_find_vqs(
                self.as_raw(),
                specs.len() as c_uint,
                raw.as_mut_ptr(),
                infos.as_mut_ptr(),
            )
        })?;
        found.as_mut().get_mut().present = true;

        let found = Arc::from(found);
        for vq in &raw {
            queues.push(
                Queue {
                    vq: NonNull::new(*vq).ok_or(ENODEV)?,
                    memory: None,
                    exchanges: KVec::new(),
                    in_ring: 0,
                    found: found.clone(),
                },
                GFP_KERNEL,
            )?;
        }
        Ok(queues)
    }

    /// Returns whether the device is there. One that is not, or whose VMM does not answer, reads as ones. May sleep.
    pub(crate) fn is_present(&self) -> bool {
        self.status() != u8::MAX.into()
    }

    /// Agrees with a device that was reset on the device-specific features of before, and on those of the transport
    /// that `validate` leaves, as the virtio core does before [`Driver::probe`]. Waits until the last [`Queue`] of
    /// before is gone. Sleeps.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the device refuses the features; what `validate` or the transport says.
    pub(crate) fn negotiate(&self, validate: impl FnOnce(&Self) -> Result) -> Result {
        self.write_features(validate)?;
        self.add_status(bindings::VIRTIO_CONFIG_S_FEATURES_OK);
        if self.status() & bindings::VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            return Err(ENODEV);
        }
        Ok(())
    }

    /// Tells a device that was reset the features that the driver wants, as [`Device::negotiate`].
    fn write_features(&self, validate: impl FnOnce(&Self) -> Result) -> Result {
        self.wait_no_queues();
        self.add_status(bindings::VIRTIO_CONFIG_S_ACKNOWLEDGE);
        self.add_status(bindings::VIRTIO_CONFIG_S_DRIVER);
        self.accept_transport();
        validate(self)?;
        // SAFETY: By the type invariant the device is valid, and each transport has `finalize_features`.
        unsafe {
            if let Some(finalize_features) = (*(*self.as_raw()).config).finalize_features {
                to_result(finalize_features(self.as_raw()))?;
            }
        }
        Ok(())
    }

    /// Accepts the transport's features that the device offers, but VIRTIO_F_ADMIN_VQ. Transports keep features of
    /// their own among these, and take them out of the accepted ones when they tell the device. If they tell it once
    /// more, such a feature would be declined: that of virtio-uml says whether it can stop queues.
    fn accept_transport(&self) {
        // SAFETY: By the type invariant the device is valid.
        let offered = unsafe { bindings::virtio_rdma_offered_features(self.as_raw()) };
        for bit in bindings::VIRTIO_TRANSPORT_F_START..bindings::VIRTIO_TRANSPORT_F_END {
            if offered & 1 << bit != 0 && bit != bindings::VIRTIO_F_ADMIN_VQ {
                // SAFETY: By the type invariant the device is valid; it is out of service, so nobody else changes its
                // features.
                unsafe { bindings::virtio_rdma_set_feature(self.as_raw(), bit) };
            }
        }
    }

    /// Does what `validate` does. Resets a device before that which a probe or a reset of the PCI function left in use,
    /// and tells it the features afterwards: a device whose driver gave up (FAILED) must be reset before it is
    /// initialised once more (VIRTIO 1.3, 2.1.1), and the virtio core does not do that. Sleeps.
    ///
    /// Declines VIRTIO_F_ADMIN_VQ before that, as [`Device::write_features`] does: the reset of a PCI device looks at its
    /// administration virtqueue, which does not exist while there are no queues (`vp_modern_avq_cleanup()`).
    ///
    /// # Errors
    ///
    /// `ENODEV` if the device is not there; what `validate` or the transport says.
    fn clean(&self, validate: impl FnOnce(&Self) -> Result) -> Result {
        let used = bindings::VIRTIO_CONFIG_S_FAILED | bindings::VIRTIO_CONFIG_S_DRIVER_OK;
        self.clear_feature(bindings::VIRTIO_F_ADMIN_VQ);
        if self.status() & used == 0 {
            // The virtio core has told the device the features already, and does so once more if `validate` changes
            // them.
            self.accept_transport();
            return validate(self);
        }
        if !self.reset().is_done() {
            return Err(ENODEV);
        }
        self.write_features(validate)
    }

    fn add_status(&self, bits: c_uint) {
        // SAFETY: By the type invariant the device is valid.
        unsafe { bindings::virtio_add_status(self.as_raw(), bits) };
    }

    fn status(&self) -> u32 {
        // SAFETY: By the type invariant the device is valid, and each transport has `get_status`.
        unsafe { bindings::virtio_rdma_get_status(self.as_raw()) }.into()
    }

    /// Waits until the last [`Queue`] is gone. The last one deletes the queues, so the device must outlive
    /// it. Sleeps.
    fn wait_no_queues(&self) {
        // SAFETY: By the type invariant the device is valid.
        unsafe { bindings::virtio_rdma_wait_no_queues(self.as_raw()) }
    }

    /// Tells the device that it may begin (DRIVER_OK).
    pub(crate) fn ready(&self) {
        // SAFETY: By the type invariant the device is valid.
        unsafe { bindings::virtio_rdma_device_ready(self.as_raw()) }
    }

    /// Resets the device: it touches no memory of the driver afterwards, until it is made ready once
    /// more. A device that is not there ([`Device::is_present`]) is not reset, because some transports wait
    /// without end for a status of 0 (`vp_reset()`); its queues break, and [`Reset::is_done`] tells. May sleep.
    pub(crate) fn reset(&self) -> Reset<'_> {
        let is_done = self.is_present();
        // SAFETY: By the type invariant the device is valid.
        unsafe {
            if is_done {
                bindings::virtio_reset_device(self.as_raw());
            } else {
                bindings::virtio_break_device(self.as_raw());
            }
        }
        Reset {
            vdev: self.as_raw(),
            is_done,
            _device: PhantomData,
        }
    }

    /// Stops a device because the machine halts or restarts, as the virtio core does for drivers that do not stop it
    /// themselves, unless it is not there. May sleep.
    pub(crate) fn shut_down(&self) {
        if self.is_present() {
            // SAFETY: By the type invariant the device is valid.
            unsafe { bindings::virtio_device_shutdown(self.as_raw()) };
        }
    }

    /// Returns the device in sysfs below which the RDMA device stands: the PCI function, or else the virtio device.
    pub(crate) fn rdma_parent(&self) -> ARef<device::Device> {
        // SAFETY: By the type invariant the device is valid. A driver is bound to it, so it has not been removed from
        // its bus, and holds a reference to its parent.
        unsafe {
            let dev = bindings::virtio_rdma_parent_of(&raw mut (*self.as_raw()).dev);
            ARef::from(device::Device::<device::Normal>::from_raw(dev))
        }
    }

    /// Returns the device whose DMA operations give the addresses that the queues use.
    ///
    /// Where `queue` does not use the DMA API (VIRTIO_F_ACCESS_PLATFORM was not agreed on), this is the transport's
    /// own device. Its DMA addresses are physical then, and it reaches all of memory. `behind_bus` is that of
    /// [`dma::Device::new`].
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is no such device; `EOPNOTSUPP` if an IOMMU translates the transport's device while
    /// the virtio device expects physical addresses; `EIO` if the kernel cannot do DMA to all of them.
    pub(crate) fn dma_device(&self, queue: &Queue, behind_bus: bool) -> Result<dma::Device> {
        // SAFETY: By the type invariants queue and device are valid; a device holds a reference to
        // its parent.
        let dev = unsafe {
            let of_queue = bindings::virtqueue_dma_dev(queue.vq.as_ptr());
            if of_queue.is_null() {
                let parent = (*self.as_raw()).dev.parent;
                if parent.is_null() {
                    return Err(ENODEV);
                }
                if bindings::virtio_rdma_iommu_mapped(parent) {
                    return Err(crate::errno::unsupported());
                }
                // Not every transport sets the mask: virtio_uml leaves its device with 32 bits.
                to_result(bindings::dma_set_mask_and_coherent(parent, u64::MAX))?;
                parent
            } else {
                of_queue
            }
        };

        // SAFETY: `dev` is valid, as above. It is bound as long as this virtio device is, and the
        // buffers are allocated by verbs, which end in `Driver::unbind`.
        Ok(unsafe {
            let dev = device::Device::<device::Normal>::from_raw(dev);
            dma::Device::new(ARef::from(dev), behind_bus)
        })
    }
}

/// The properties that a driver wants of a queue.
pub(crate) struct QueueSpec {
    /// The name, for interrupts in /proc/interrupts.
    pub(crate) name: &'static CStr,
    /// Whether the device's interrupts of this queue are wanted.
    pub(crate) interrupt: bool,
}

/// Receives the interrupts of queues.
pub(crate) trait Interrupt: Send + Sync + 'static {
    /// Called when the device has used buffers of the queue with this index, with interrupts off or from a hard
    /// interrupt.
    fn interrupt(self: &Arc<Self>, queue: u32);
}

extern "C" fn interrupt_callback<H: Interrupt>(vq: *mut bindings::virtqueue) {
    // SAFETY: The virtio core calls with a valid queue of a valid device. `priv` is an `Arc<H>` from
    // before the queues were made until after they are deleted.
    let (handler, index) = unsafe {
        let raw = (*(*vq).vdev).priv_.cast::<H>();
        (ArcBorrow::from_raw(raw), (*vq).index)
    };

    H::interrupt(&handler.into(), index);
}

/// Drops the reference to the handler of interrupts.
///
/// # Safety
///
/// `ptr` must be from `Arc::<H>::into_raw`, and not be used afterwards.
unsafe fn release_handler<H>(ptr: *const c_void) {
    // SAFETY: The caller promises that `ptr` is from `Arc::into_raw` and not used afterwards.
    drop(unsafe { Arc::from_raw(ptr.cast::<H>()) });
}

/// The queues of a device, which are deleted together.
struct Found {
    vdev: *mut bindings::virtio_device,
    present: bool,
    release: unsafe fn(*const c_void),
}

// SAFETY: Queues may be deleted from any thread.
unsafe impl Send for Found {}
// SAFETY: No operation is possible through a shared reference.
unsafe impl Sync for Found {}

impl Drop for Found {
    fn drop(&mut self) {
        // SAFETY: The device is valid: `wait_no_queues` keeps it bound until `virtio_rdma_no_queues` is called. Once
        // the queues are deleted, no callback runs, so nobody else looks at `priv`.
        unsafe {
            if self.present {
                bindings::virtio_rdma_del_vqs(self.vdev);
            }
            let handler = (*self.vdev).priv_;
            if !handler.is_null() {
                (self.release)(handler);
            }
            bindings::virtio_rdma_no_queues(self.vdev);
        }
    }
}

/// A device that was reset. It has no buffers any more, unless it has been made ready since, or was not there.
///
/// # Invariants
///
/// `vdev` is valid for `'a`.
pub(crate) struct Reset<'a> {
    vdev: *mut bindings::virtio_device,
    is_done: bool,
    _device: PhantomData<&'a bindings::virtio_device>,
}

impl Reset<'_> {
    /// Returns whether the device was reset: false if it was not there, and may still touch what it was given.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Returns whether this is the device of `queue`, was reset, and has not been made ready since. May sleep.
    fn is_of(&self, queue: &Queue) -> bool {
        // SAFETY: By the type invariants the queue and the device are valid, and each transport has
        // `get_status`.
        unsafe {
            self.is_done
                && (*queue.as_raw()).vdev == self.vdev
                && u32::from(bindings::virtio_rdma_get_status(self.vdev))
                    & bindings::VIRTIO_CONFIG_S_DRIVER_OK
                    == 0
        }
    }
}

/// The status of a device, as long as this exists: it counts as one of the queues.
pub(crate) struct Status(Arc<Found>);

impl Status {
    /// Returns whether the device has failed and wants a reset (DEVICE_NEEDS_RESET). May sleep: to virtio-ccw this is
    /// a command of the channel.
    pub(crate) fn needs_reset(&self) -> bool {
        self.get() & bindings::VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// Returns whether a device that was made ready has been reset since. Only a reset clears ACKNOWLEDGE and DRIVER_OK.
    /// One of them may be set again: the first by the virtio core behind a reset of the PCI function, and the second by
    /// a probe that knows of no reset. May sleep.
    pub(crate) fn is_reset(&self) -> bool {
        let ready = bindings::VIRTIO_CONFIG_S_ACKNOWLEDGE | bindings::VIRTIO_CONFIG_S_DRIVER_OK;
        self.get() & ready != ready
    }

    fn get(&self) -> u32 {
        // SAFETY: The device is valid as long as there are queues, and each transport has `get_status`.
        unsafe { bindings::virtio_rdma_get_status(self.0.vdev) }.into()
    }
}

/// A virtqueue with the memory that its buffers lie in, with one owner at a time.
///
/// Each buffer is named by a token, which comes back when the device has used it. The core of
/// virtio checks the token that the device names, and marks the queue as broken if no such buffer was added.
///
/// # Invariants
///
/// - `vq` is valid as long as `found` exists, and no other [`Queue`] has it.
/// - As long as `in_ring` is not 0, `memory` stays what it is, and the exchanges that are `added` are
///   neither moved nor looked into: the device has buffers in them.
pub(crate) struct Queue {
    vq: NonNull<bindings::virtqueue>,
    memory: Option<Buffer>,
    /// The exchange of each token.
    exchanges: KVec<Exchange>,
    /// Buffers that were added and have not come back.
    in_ring: u32,
    found: Arc<Found>,
}

// SAFETY: A virtqueue may be used from any thread; `&mut self` serialises.
unsafe impl Send for Queue {}
// SAFETY: Functions that take `&self` only read fields that do not change, and `broken`.
unsafe impl Sync for Queue {}

/// No allocation, no sleeping: without indirect descriptors, adding a buffer allocates nothing.
const ATOMIC: bindings::gfp_t = 0;

impl Queue {
    fn as_raw(&self) -> *mut bindings::virtqueue {
        self.vq.as_ptr()
    }

    /// Returns the number of descriptors.
    pub(crate) fn size(&self) -> u32 {
        // SAFETY: By the type invariants `vq` is valid.
        unsafe { bindings::virtqueue_get_vring_size(self.as_raw()) }
    }

    /// Returns whether the device or the transport failed, so that the queue does nothing any more.
    pub(crate) fn is_broken(&self) -> bool {
        // SAFETY: By the type invariants `vq` is valid.
        unsafe { bindings::virtqueue_is_broken(self.as_raw()) }
    }

    /// Returns the status of the device that has this queue.
    pub(crate) fn status(&self) -> Status {
        Status(self.found.clone())
    }

    /// Lets the interrupt of this queue go to a part of the CPUs, of `parts`, where the transport can. May sleep.
    pub(crate) fn set_affinity(&mut self, part: u32, parts: u32) {
        // SAFETY: By the type invariants `vq` is valid. The affinity is a hint, so the result does
        // not matter.
        unsafe { bindings::virtio_rdma_set_affinity(self.as_raw(), part, parts) };
    }

    /// Gives the queue the memory that its buffers lie in, in place of what it had.
    ///
    /// # Errors
    ///
    /// `EBUSY` while buffers are added.
    pub(crate) fn set_memory(&mut self, memory: Buffer) -> Result {
        if self.in_ring != 0 {
            return Err(EBUSY);
        }
        self.memory = Some(memory);
        Ok(())
    }

    /// Returns the memory that the buffers lie in.
    ///
    /// # Errors
    ///
    /// `EIO` if the queue has no memory.
    pub(crate) fn memory(&self) -> Result<&Buffer> {
        self.memory.as_ref().ok_or(EIO)
    }

    /// Frees that memory, unless buffers are added: then it stays until the queue goes. May sleep.
    pub(crate) fn free_memory(&mut self) {
        if self.in_ring == 0 {
            self.memory = None;
        }
    }

    /// Gives the queue its exchanges, those of the tokens from 0.
    ///
    /// # Errors
    ///
    /// `EBUSY` while buffers are added.
    pub(crate) fn set_exchanges(&mut self, exchanges: KVec<Exchange>) -> Result {
        if self.in_ring != 0 {
            return Err(EBUSY);
        }
        self.exchanges = exchanges;
        Ok(())
    }

    /// Returns the exchange of a token.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such exchange, `EBUSY` while the device has it.
    pub(crate) fn exchange(&mut self, token: u32) -> Result<&mut Exchange> {
        let exchange = self.exchanges.get_mut(token as usize).ok_or(EINVAL)?;
        if exchange.added {
            return Err(EBUSY);
        }
        Ok(exchange)
    }

    /// Adds `len` bytes at `offset` of the memory for the device to read. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the end of the memory, `ENOSPC` if the ring is full, `EIO` if it is broken or
    /// there is no memory.
    pub(crate) fn add_readable(&mut self, offset: usize, len: usize, token: u32) -> Result {
        let mut sg = sg_of(self.memory()?.span(offset, len)?);
        // SAFETY: By the type invariants `vq` is valid; `sg` is one entry with a DMA address, of
        // memory that by the type invariants stays until the buffer comes back.
        to_result(unsafe {
            bindings::virtqueue_add_outbuf_premapped(
                self.as_raw(),
                &raw mut sg,
                1,
                token_to_ptr(token),
                ATOMIC,
            )
        })?;
        self.in_ring += 1;
        Ok(())
    }

    /// Adds `len` bytes at `offset` of the memory for the device to write. Any context.
    ///
    /// # Errors
    ///
    /// The errors of [`Queue::add_readable`].
    pub(crate) fn add_writable(&mut self, offset: usize, len: usize, token: u32) -> Result {
        let mut sg = sg_of(self.memory()?.span(offset, len)?);
        // SAFETY: By the type invariants `vq` is valid; `sg` is one entry with a DMA address, of
        // memory that by the type invariants stays until the buffer comes back.
        to_result(unsafe {
            bindings::virtqueue_add_inbuf_premapped(
                self.as_raw(),
                &raw mut sg,
                1,
                token_to_ptr(token),
                ptr::null_mut(),
                ATOMIC,
            )
        })?;
        self.in_ring += 1;
        Ok(())
    }

    /// Adds the exchange of a token: a request that the device reads and a reply that it writes. Any
    /// context.
    ///
    /// # Errors
    ///
    /// The errors of [`Queue::exchange`]; `ENOSPC` if the ring has no two descriptors left, `EIO` if it is broken,
    /// `ENOMEM` if the memory cannot be mapped.
    pub(crate) fn add_exchange(&mut self, token: u32) -> Result {
        let mut request = bindings::scatterlist::default();
        let mut reply = bindings::scatterlist::default();
        let mut sgs = [&raw mut request, &raw mut reply];
        let exchange = self.exchange(token)?;

        // SAFETY: `bytes` are two areas of `Exchange::SIZE` bytes of kmalloc() memory.
        unsafe {
            let base = exchange.bytes.as_mut_ptr();
            bindings::sg_init_one(sgs[0], base.cast(), exchange.request_len);
            bindings::sg_init_one(
                sgs[1],
                base.add(Exchange::SIZE).cast(),
                Exchange::SIZE as c_uint,
            );
        }

        // SAFETY: By the type invariants `vq` is valid; `sgs` are one readable and one writable
        // entry, of memory that by the type invariants stays until the exchange comes back.
        to_result(unsafe {
            bindings::virtqueue_add_sgs(
                self.as_raw(),
                sgs.as_mut_ptr(),
                1,
                1,
                token_to_ptr(token),
                ATOMIC,
            )
        })?;
        self.exchange(token)?.added = true;
        self.in_ring += 1;
        Ok(())
    }

    /// Takes the next used buffer: its token and how many bytes the device says it wrote.
    pub(crate) fn get(&mut self) -> Option<(u32, u32)> {
        let mut len = 0;
        // SAFETY: By the type invariants `vq` is valid.
        let token = unsafe { bindings::virtqueue_get_buf(self.as_raw(), &raw mut len) };
        if token.is_null() {
            return None;
        }
        let token = ptr_to_token(token);
        self.in_ring -= 1;
        if let Some(exchange) = self.exchanges.get_mut(token as usize) {
            exchange.added = false;
        }
        Some((token, len))
    }

    /// Returns the number of buffers that were added and have not come back.
    pub(crate) fn in_ring(&self) -> u32 {
        self.in_ring
    }

    /// Returns whether the device has used a buffer that was not taken yet. Interrupts are on afterwards.
    pub(crate) fn has_used(&mut self) -> bool {
        // SAFETY: By the type invariants `vq` is valid.
        unsafe { !bindings::virtqueue_enable_cb(self.as_raw()) }
    }

    /// Tells the device that interrupts are not wanted; some may come nevertheless.
    pub(crate) fn disable_interrupt(&mut self) {
        // SAFETY: By the type invariants `vq` is valid.
        unsafe { bindings::virtqueue_disable_cb(self.as_raw()) };
    }

    /// Returns the notice of added buffers, if the device wants it. It is sent without the queue, so that nobody
    /// waits for the queue until the hypervisor has taken it.
    pub(crate) fn prepare_kick<'rcu>(&mut self, _rcu: &'rcu rcu::Guard) -> Option<Notice<'rcu>> {
        // SAFETY: By the type invariants `vq` is valid.
        let wanted = unsafe { bindings::virtqueue_kick_prepare(self.as_raw()) };
        // INVARIANT: `vq` is valid now. `Found` is dropped when this queue is gone, and waits for a grace period
        // before it deletes the virtqueue.
        wanted.then_some(Notice {
            vq: self.vq,
            _rcu: PhantomData,
        })
    }

    /// Tells the device about added buffers, if it wants to know.
    pub(crate) fn kick(&mut self) {
        // SAFETY: By the type invariants `vq` is valid. If the transport fails, it breaks the
        // queue, and the next call sees that.
        unsafe { bindings::virtqueue_kick(self.as_raw()) };
    }

    /// Takes back all buffers that the device had when it was reset. Those of a device that is another
    /// one, or is ready again, are its own: then nothing happens. May sleep.
    pub(crate) fn detach_all(&mut self, reset: &Reset<'_>) {
        if !reset.is_of(self) {
            return;
        }
        // SAFETY: By the type invariants `vq` is valid.
        while unsafe { !bindings::virtqueue_detach_unused_buf(self.as_raw()).is_null() } {}
        self.in_ring = 0;
        for exchange in &mut self.exchanges {
            exchange.added = false;
        }
    }
}

/// A notice for the device that buffers were added to a queue. It may be sent when somebody else has the queue, or
/// nobody.
///
/// # Invariants
///
/// `vq` is valid for `'rcu`.
pub(crate) struct Notice<'rcu> {
    vq: NonNull<bindings::virtqueue>,
    _rcu: PhantomData<&'rcu rcu::Guard>,
}

impl Notice<'_> {
    /// Sends the notice. Any context.
    pub(crate) fn send(self) {
        // SAFETY: By the type invariants `vq` is valid, and a virtqueue may be notified beside anything else that
        // is done with it. If the transport fails, it breaks the queue, and whoever adds the next buffer sees that.
        unsafe { bindings::virtqueue_notify(self.vq.as_ptr()) };
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.in_ring != 0 {
            // The memory is leaked: if it were freed, the device could write to it when it has
            // another owner.
            core::mem::forget(self.memory.take());
            core::mem::forget(core::mem::take(&mut self.exchanges));
        }
    }
}

fn sg_of(span: Span) -> bindings::scatterlist {
    let mut sg = bindings::scatterlist::default();
    // SAFETY: `sg` is valid for writes.
    unsafe { bindings::virtio_rdma_sg_init_dma(&raw mut sg, span.addr, span.len) };
    sg
}

/// Returns a token as virtio keeps it: a pointer that is never followed, and not null.
fn token_to_ptr(token: u32) -> *mut c_void {
    ptr::without_provenance_mut(token as usize + 1)
}

fn ptr_to_token(ptr: *mut c_void) -> u32 {
    (ptr.addr() - 1) as u32
}

/// The memory of one request and its reply.
///
/// While it is added to its queue the device owns it, and only [`Queue::get`] gives it back.
pub(crate) struct Exchange {
    bytes: KVec<u8>,
    request_len: c_uint,
    added: bool,
}

impl Exchange {
    /// The most bytes of a request, and of a reply.
    pub(crate) const SIZE: usize = 256;

    /// Allocates the memory. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            bytes: KVec::from_elem(0, 2 * Self::SIZE, GFP_KERNEL)?,
            request_len: 0,
            added: false,
        })
    }

    /// Writes a request: a code and what follows it. The reply's area is cleared.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if it is too long.
    pub(crate) fn set_request(&mut self, code: u8, body: &[u8]) -> Result {
        let len = body.len() + 1;
        if len > Self::SIZE {
            return Err(EMSGSIZE);
        }
        let (request, reply) = self.bytes.split_at_mut(Self::SIZE);
        request[0] = code;
        request[1..len].copy_from_slice(body);
        reply.fill(0);
        self.request_len = len as c_uint;
        Ok(())
    }

    /// Copies the reply out: its code, and `body.len()` bytes that follow.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if `body` is longer than a reply can be.
    pub(crate) fn reply(&self, body: &mut [u8]) -> Result<u8> {
        let reply = &self.bytes[Self::SIZE..];
        body.copy_from_slice(reply.get(1..=body.len()).ok_or(EMSGSIZE)?);
        Ok(reply[0])
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_virtio)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for token in [0, 1, 255, u32::MAX] {
            assert!(!token_to_ptr(token).is_null());
            assert_eq!(ptr_to_token(token_to_ptr(token)), token);
        }
    }

    #[test]
    fn exchanges_hold_request_and_reply() -> Result {
        let mut exchange = Exchange::new()?;
        exchange.set_request(7, &[1, 2, 3])?;
        assert_eq!(exchange.bytes[..5], [7, 1, 2, 3, 0]);
        assert_eq!(exchange.request_len, 4);
        exchange.bytes[Exchange::SIZE..Exchange::SIZE + 3].copy_from_slice(&[9, 8, 7]);
        let mut body = [0; 2];
        assert_eq!(exchange.reply(&mut body)?, 9);
        assert_eq!(body, [8, 7]);
        // A new request clears the reply of the previous one.
        exchange.set_request(8, &[])?;
        assert_eq!(exchange.reply(&mut body)?, 0);
        assert_eq!(body, [0, 0]);
        let long = [0; Exchange::SIZE];
        assert_eq!(exchange.set_request(1, &long), Err(EMSGSIZE));
        assert!(exchange.set_request(1, &long[1..]).is_ok());
        Ok(())
    }

    #[test]
    fn all_cpus_belong_to_a_part_of_about_the_same_size() {
        // SAFETY: The function has no requirements.
        let part =
            |cpu, cpus, parts| unsafe { bindings::virtio_rdma_part_of_cpu(cpu, cpus, parts) };
        for (cpus, parts) in [(64, 8), (10, 3), (2, 8), (1, 8), (4, 4), (7, 0)] {
            let used = parts.clamp(1, cpus);
            let size = |of| {
                (0..cpus)
                    .filter(|cpu| part(*cpu, cpus, parts) == of)
                    .count() as u32
            };
            let sizes = cpus / used..=cpus.div_ceil(used);
            assert!((0..used).all(|of| sizes.contains(&size(of))));
        }
    }
}
