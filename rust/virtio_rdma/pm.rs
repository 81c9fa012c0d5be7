// SPDX-License-Identifier: GPL-2.0

//! The RDMA device of a bound virtio device, from probe to removal, and what
//! becomes of it when the machine sleeps or is hibernated.
//!
//! The virtio core resets a device that wakes up, so all objects of the RDMA
//! device are lost, as they are with adapters of hardware: their drivers
//! unregister the RDMA device when the machine goes to sleep. Here it goes when
//! the machine has woken up:
//!
//! * [`Service::retire`], while tasks are frozen, takes the device out of
//!   service, as one that failed: work requests are flushed, programs are told
//!   that their rings are closed, commands fail. So nobody waits for it, either
//!   before the machine sleeps or afterwards.
//! * [`Service::renew`], with tasks still frozen, has a device that works.
//! * [`Service::run`], when tasks run again, unregisters the old RDMA device and
//!   registers a new one by the same name.
//!
//! Unregistering waits for tasks, for example those of a file system on a remote
//! block device, so that it cannot happen while tasks are frozen. By then,
//! consumers in the kernel that recover from errors have given up what they had
//! on the old device: NVMe over Fabrics deletes a host's controller if its RDMA
//! device is removed while it is connected, and connects again otherwise.

#![deny(unsafe_code)]

use crate::{
    dma,
    hca::Hca,
    ib,
    interrupt,
    net,
    port,
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    virtio::Reset, //
};
use core::time::Duration;
use kernel::{
    device, new_mutex, new_work,
    prelude::*,
    sync::{
        aref::ARef,
        Arc,
        Mutex, //
    },
    workqueue::{
        self,
        Work,
        WorkItem, //
    },
};

/// How long consumers in the kernel have to give up a device that was retired. They need milliseconds,
/// except those that keep a PD until the device is unregistered.
const RECOVERY: Duration = Duration::from_secs(5);

/// An RDMA device that is registered, and paired with a network interface.
struct Active {
    ibdev: Arc<ib::UnregisteredDevice<Hca>>,
    // Members are dropped in the order of their declaration: first the pairing, so that nobody pairs a device that is
    // not registered any more, then the registration.
    _notifier: Pin<KBox<net::Notifier<port::Pairing>>>,
    _registration: ib::Registration<Hca>,
}

impl Active {
    /// Registers the RDMA device of a virtio device that is ready, by this name if there is one and no other
    /// device has it. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or what the device or the RDMA core says.
    fn new(
        transport: &ARef<device::Device>,
        hca: &Arc<Hca>,
        dma: &dma::Device,
        name: Option<&CStr>,
    ) -> Result<Self> {
        let config = ib::Config {
            parent: transport,
            node_guid: hca.config().sys_image_guid,
            num_comp_vectors: hca.num_comp_vectors(),
            has_pma: hca.config().has_counters,
        };
        let ibdev = ib::UnregisteredDevice::new(hca.clone(), hca.objects().clone(), &config)?;
        let pairing = port::Pairing::new(ibdev.clone(), transport.clone());
        // The notifier looks at the interfaces that exist: the RDMA core needs to know the paired one before the device
        // is registered.
        let notifier = KBox::pin_init(net::Notifier::new(pairing), GFP_KERNEL)?;
        let register = |name| ib::Registration::new(ibdev.clone(), dma, name);
        let registration = match register(name) {
            // The device may have been in another network namespace before, where the name was free.
            Err(error) if error == ENFILE && name.is_some() => register(None)?,
            result => result?,
        };
        Ok(Self {
            ibdev,
            _notifier: notifier,
            _registration: registration,
        })
    }

    /// Unregisters the device, which destroys all of its objects. Sleeps.
    fn end(self) -> Arc<ib::UnregisteredDevice<Hca>> {
        self.ibdev.clone()
    }
}

/// The parts that are replaced when the machine sleeps.
struct State {
    /// The RDMA device: that of the current device, or of the one before, which was retired.
    active: Option<Active>,
    /// The device whose RDMA device is to be registered.
    renewed: Option<(Arc<Hca>, dma::Device)>,
}

/// The RDMA device of a bound virtio device.
#[pin_data]
pub(crate) struct Service {
    transport: ARef<device::Device>,
    /// The device: another one whenever the machine has slept.
    #[pin]
    hca: IrqSpinLock<Arc<Hca>>,
    #[pin]
    state: Mutex<State>,
    #[pin]
    work: Work<Service>,
}

#[allow(unsafe_code)]
mod work {
    use super::Service;

    kernel::impl_has_work! {
        impl HasWork<Self> for Service { self.work }
    }
}

impl Service {
    /// Registers the RDMA device of `transport`, a virtio device. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Active::new`].
    pub(crate) fn new(
        transport: ARef<device::Device>,
        hca: Arc<Hca>,
        dma: &dma::Device,
    ) -> Result<Arc<Self>> {
        let active = Active::new(&transport, &hca, dma, None)?;
        let state = State {
            active: Some(active),
            renewed: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                transport,
                hca <- new_irq_spinlock!(hca, "virtio_rdma::Service::hca"),
                state <- new_mutex!(state),
                work <- new_work!("virtio_rdma::Service::work"),
            }),
            GFP_KERNEL,
        )
    }

    /// Looks at the status of the device, soon. Any context.
    pub(crate) fn config_changed(&self) {
        self.hca.lock().attend();
    }

    /// Takes the device out of service because the machine is about to sleep, resets it, and gives up its
    /// queues. Its RDMA device stays, with all objects, but they do not work any more. Sleeps.
    pub(crate) fn retire<'a>(&self, reset: impl FnOnce() -> Reset<'a>) {
        let hca = self.hca.lock().clone();
        hca.retire();
        interrupt::detach(&hca, &reset());
        // A device that was not registered yet is never registered.
        self.state.lock().renewed = None;
    }

    /// Puts a device that is ready in the place of the one that was retired. Tasks use it when they are
    /// thawed, shortly after. May sleep.
    pub(crate) fn renew(self: &Arc<Self>, hca: Arc<Hca>, dma: dma::Device) {
        let retired = core::mem::replace(&mut *self.hca.lock(), hca.clone());
        drop(retired);
        self.state.lock().renewed = Some((hca, dma));
        // If the work item is queued already, as it may be after a hibernation, it has not looked
        // yet.
        let _ = workqueue::system_freezable().enqueue::<_, 0>(self.clone());
    }

    /// Ends the RDMA device with all objects, resets the device, and gives up its queues. Sleeps.
    pub(crate) fn end<'a>(self: &Arc<Self>, reset: impl FnOnce() -> Reset<'a>) {
        crate::sync::cancel_work(self, |this| &this.work);
        let mut state = self.state.lock();
        let active = state.active.take();
        state.renewed = None;
        drop(state);
        // The memory that the device may touch until it is reset is freed with the RDMA device, so `_ibdev` is kept
        // until the end.
        let _ibdev = active.map(Active::end);
        let hca = self.hca.lock().clone();
        interrupt::detach(&hca, &reset());
    }
}

impl WorkItem for Service {
    type Pointer = Arc<Self>;

    /// Unregisters the RDMA device from before the machine slept, and registers the new one.
    fn run(this: Arc<Self>) {
        let mut state = this.state.lock();
        let Some((hca, dma)) = state.renewed.take() else {
            return;
        };
        let name = state.active.take().and_then(|active| {
            active.ibdev.wait_unused(RECOVERY);
            let retired = active.end();
            retired.name().ok()
        });
        match Active::new(&this.transport, &hca, &dma, name.as_deref()) {
            Ok(active) => state.active = Some(active),
            Err(error) => dev_err!(
                this.transport,
                "cannot register the RDMA device again: {:?}\n",
                error
            ),
        }
    }
}
