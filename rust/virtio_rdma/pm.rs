// SPDX-License-Identifier: GPL-2.0

//! The RDMA device of a bound virtio device, from probe to removal, and what
//! becomes of it when the machine sleeps or is hibernated, and when the device
//! fails.
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
//! * The work item [`REGISTER`], when tasks run again, unregisters the old RDMA
//!   device and registers a new one by the same name.
//!
//! A device that has failed goes the same way, while tasks run: its work requests
//! were flushed when it failed ([`Hca::fail`]), and the work item [`RECOVER`] resets
//! it, agrees with it on the features of before, and renews it. It does so whatever
//! the device did wrong: if it asks for a reset (DEVICE_NEEDS_RESET), a reset is what
//! it wants; a device that did not reply, or that broke the rules, may have been
//! stopped or replaced by its host, which nobody tells the driver. If that does not
//! help, the next attempt is later ([`crate::backoff`]), and there is always a next
//! one.
//!
//! [`RECOVER`] cannot meet others that reset the device or take it away:
//!
//! * Who unbinds the device holds its lock and waits for the work item, which
//!   therefore only tries to get the lock.
//! * The machine sleeps only once the work queue is frozen.
//! * The machine halts or restarts under the lock, and the work item does nothing
//!   from then on.
//! * The work item does nothing while the device's function is being reset.
//!
//! An administrator, or an error of the bus, can have the device's function reset. The
//! virtio core tells the driver before and afterwards, which does what it does for a
//! sleep ([`Service::pause`], [`Service::resume`]), while tasks run.
//!
//! All of this happens without waiting for input or output when memory is short, as the
//! dirty pages may lie behind the device ([`crate::reclaim`]). The work items that unregister
//! are on a workqueue of the kernel, because the RDMA core flushes others of those.
//!
//! Unregistering waits for tasks, for example those of a file system on a remote
//! block device, so that it cannot happen while tasks are frozen. It comes after
//! the consumers in the kernel have given up what they had on the old device, or
//! have had `release_timeout` seconds for that: NVMe over Fabrics deletes a host's
//! controller if its RDMA device is removed before, and connects again otherwise.
//! No work item waits meanwhile. The last consumer that lets go of the old device
//! enqueues [`REGISTER`], and the work item [`EXPIRE`] runs when the time is over.

#![deny(unsafe_code)]

use crate::{
    backoff::Backoff,
    dma,
    hca::{
        Hca,
        Recover, //
    },
    ib,
    interrupt,
    kernel_release,
    net,
    port,
    reclaim,
    startup::{
        start,
        validate,
        Core, //
    },
    sync::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    virtio, //
};
use core::time::Duration;
use kernel::{
    device, new_mutex, new_work,
    prelude::*,
    str::CString,
    sync::{
        aref::ARef,
        Arc,
        Mutex, //
    },
    time::{
        self,
        Instant,
        Monotonic, //
    },
    workqueue::{
        self,
        new_delayed_work,
        DelayedWork,
        Work,
        WorkItem, //
    },
};

/// The time that a consumer in the kernel may take to destroy its PD after the RDMA device was
/// unregistered. A consumer that does it in a work item needs milliseconds.
const LATE: Duration = Duration::from_secs(10);

/// The time in milliseconds that a work item waits that did not get the lock of the device.
const LOCKED: time::Msecs = 100;

/// The longest time of a reset of the device's function, in milliseconds. The PCI core waits for up
/// to 60 s for a function to answer (`PCIE_RESET_READY_POLL_MS`).
const PAUSE: time::Msecs = 70_000;

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
    /// device has it, in this network namespace or else the initial one. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or what the device or the RDMA core says.
    fn new(
        service: &Service,
        hca: &Arc<Hca>,
        dma: &dma::Device,
        name: Option<&CStr>,
        namespace: Option<ib::Namespace>,
    ) -> Result<Self> {
        let config = ib::Config {
            namespace,
            parent: &service.parent,
            node_guid: hca.config().sys_image_guid,
            num_comp_vectors: hca.num_comp_vectors(),
            has_pma: hca.config().has_counters,
        };
        let ibdev = ib::UnregisteredDevice::new(hca.clone(), hca.objects().clone(), config)?;
        let pairing = port::Pairing::new(ibdev.clone(), service.transport.clone());
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

    /// Unregisters the device, which destroys all of its objects. Sleeps, for as long as a consumer in the kernel has a PD
    /// if the module is being unloaded: to destroy it, the consumer calls this module.
    fn end(self, transport: &device::Device) -> Arc<ib::UnregisteredDevice<Hca>> {
        let ibdev = self.ibdev.clone();
        drop(self);
        while !ibdev.wait_for_pds(LATE) {
            if crate::sync::keep_module() {
                dev_err!(
                    transport,
                    "a consumer in the kernel has a PD of an RDMA device that is gone, whose memory is never freed\n"
                );
                core::mem::forget(ibdev.clone());
                break;
            }
            dev_err!(
                transport,
                "a consumer in the kernel has a PD of an RDMA device that is gone, and the module waits for it\n"
            );
        }
        ibdev
    }
}

/// The parts that are replaced when the device was reset.
struct State {
    /// The RDMA device: that of the current device, or of the one before, which was retired.
    active: Option<Active>,
    /// The name of the RDMA device before, while there is no [`State::active`].
    name: Option<CString>,
    /// The time since which consumers in the kernel can let go of [`State::active`], which was
    /// retired: tasks run.
    waits_since: Option<Instant<Monotonic>>,
    /// The device whose RDMA device is to be registered.
    renewed: Option<(Arc<Hca>, dma::Device)>,
}

impl State {
    /// Returns how much longer consumers in the kernel may take to let go of the RDMA device that was retired, in
    /// milliseconds. The first call begins their time.
    fn left(&mut self) -> time::Msecs {
        let since = self.waits_since.get_or_insert_with(Instant::now);
        let left = i64::from(release_timeout()) * 1000 - since.elapsed().as_millis();
        time::Msecs::try_from(left.max(0)).unwrap_or(time::Msecs::MAX)
    }
}

/// The RDMA device of a bound virtio device.
#[pin_data]
pub(crate) struct Service {
    transport: ARef<device::Device>,
    /// The device in sysfs below which the RDMA device stands.
    parent: ARef<device::Device>,
    /// The device: another one whenever it was reset.
    #[pin]
    hca: IrqSpinLock<Arc<Hca>>,
    #[pin]
    state: Mutex<State>,
    #[pin]
    recovery: IrqSpinLock<Recovery>,
    /// The device while it is bound or unbound, so that the work item [`RECOVER`] can reset it meanwhile: consumers
    /// wait for that if it fails.
    #[pin]
    lent: virtio::Lent,
    #[pin]
    register: Work<Service, REGISTER>,
    #[pin]
    recover: DelayedWork<Service, RECOVER>,
    #[pin]
    expire: DelayedWork<Service, EXPIRE>,
}

/// The state of the resets of a device that has failed.
struct Recovery {
    backoff: Backoff,
    /// The device is being unbound, and is not taken into service again.
    ended: bool,
    /// The device was unbound: it is not reset any more.
    finished: bool,
    /// The time since which the device's function is being reset, and nobody else touches it.
    paused: Option<Instant<Monotonic>>,
}

/// The ID of the work item that registers the RDMA device of a device that was reset.
const REGISTER: u64 = 0;

/// The ID of the work item that takes a device that has failed into service again.
const RECOVER: u64 = 1;

/// The ID of the work item that does what [`REGISTER`] does, when consumers in the kernel have had their time.
const EXPIRE: u64 = 2;

#[allow(unsafe_code)]
mod work {
    use super::Service;

    kernel::impl_has_work! {
        impl HasWork<Self, 0> for Service { self.register }
    }

    kernel::workqueue::impl_has_delayed_work! {
        impl HasDelayedWork<Self, 1> for Service { self.recover }
    }

    kernel::workqueue::impl_has_delayed_work! {
        impl HasDelayedWork<Self, 2> for Service { self.expire }
    }
}

impl Service {
    /// Registers the RDMA device of `dev`. Sleeps.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; the errors of [`Active::new`]. The device has been reset then.
    pub(crate) fn new(dev: &Core<'_>, hca: Arc<Hca>, dma: &dma::Device) -> Result<Arc<Self>> {
        let this = Self::unregistered(dev, hca.clone())
            .inspect_err(|_| interrupt::detach(&hca, &dev.reset()))?;
        hca.on_failure(this.clone());
        this.lent
            .lend(dev, || Active::new(&this, &hca, dma, None, None))
            .map(|active| this.state.lock().active = Some(active))
            .inspect_err(|_| this.end(dev))?;
        this.recovery.lock().backoff.works();
        Ok(this)
    }

    /// Makes the service of a device whose RDMA device is not registered yet. May sleep.
    fn unregistered(dev: &Core<'_>, hca: Arc<Hca>) -> Result<Arc<Self>> {
        let transport: &device::Device = dev.as_ref();
        let state = State {
            active: None,
            name: None,
            waits_since: None,
            renewed: None,
        };
        let recovery = Recovery {
            backoff: Backoff::new(),
            ended: false,
            finished: false,
            paused: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                transport: ARef::from(transport),
                parent: dev.rdma_parent(),
                hca <- new_irq_spinlock!(hca, "virtio_rdma::Service::hca"),
                state <- new_mutex!(state),
                recovery <- new_irq_spinlock!(recovery, "virtio_rdma::Service::recovery"),
                lent <- virtio::Lent::new(),
                register <- new_work!("virtio_rdma::Service::register"),
                recover <- new_delayed_work!("virtio_rdma::Service::recover"),
                expire <- new_delayed_work!("virtio_rdma::Service::expire"),
            }),
            GFP_KERNEL,
        )
    }

    /// Looks at the status of the device, soon. Any context.
    pub(crate) fn config_changed(&self) {
        self.hca.lock().attend();
    }

    /// Takes the device out of service, resets it, and gives up its queues, because the machine is about to sleep
    /// or the device has failed. Its RDMA device stays, with all objects, but they do not work any more. Sleeps.
    pub(crate) fn retire(&self, dev: &Core<'_>) {
        let hca = self.hca.lock().clone();
        // Nobody has to be told of this failure.
        drop(hca.take_recovery());
        hca.retire();
        interrupt::detach(&hca, &dev.reset());
        // A device that was not registered yet is never registered.
        self.state.lock().renewed = None;
    }

    /// Puts a device that is ready in the place of the one that was retired. Tasks use it shortly after, when they
    /// are thawed if the machine has slept. May sleep.
    pub(crate) fn renew(self: &Arc<Self>, hca: Arc<Hca>, dma: dma::Device) {
        let retired = core::mem::replace(&mut *self.hca.lock(), hca.clone());
        drop(retired);
        self.state.lock().renewed = Some((hca.clone(), dma));
        // What the device said of itself before this went to the one that was retired.
        hca.on_failure(self.clone());
        // If the work item is queued already, as it may be after a hibernation, it has not looked
        // yet.
        let _ = workqueue::system_freezable().enqueue::<_, REGISTER>(self.clone());
    }

    /// Stops the device because the machine halts or restarts. Whoever still uses it finds that it has failed, of which
    /// the log need not tell, and waits for nothing. May sleep.
    pub(crate) fn shut_down(&self, dev: &Core<'_>) {
        self.recovery.lock().ended = true;
        let hca = self.hca.lock().clone();
        // Nobody has to be told of this failure.
        drop(hca.take_recovery());
        hca.retire();
        dev.shut_down();
        hca.stopped();
    }

    /// Takes the device out of service because its function is about to be reset. [`Service::resume`] follows, unless the
    /// virtio core cannot agree on the features; then the work item [`RECOVER`] tries, after a while. Sleeps.
    pub(crate) fn pause(self: &Arc<Self>, dev: &Core<'_>) {
        self.recovery.lock().paused = Some(Instant::now());
        self.retire(dev);
        self.recover_after(&self.recovery.lock(), PAUSE);
    }

    /// Takes the device into service again after its function was reset and the features were agreed on. Sleeps.
    pub(crate) fn resume(self: &Arc<Self>, dev: &Core<'_>) {
        if self.recovery.lock().paused.take().is_none() {
            // The driver was bound to the device meanwhile.
            let hca = self.hca.lock().clone();
            hca.fail("its function was reset");
            return;
        }
        match start(dev) {
            Ok((hca, dma)) => self.renew(hca, dma),
            Err(error) => {
                dev_err!(
                    self.transport,
                    "cannot take the device into service after a reset of its function: {:?}\n",
                    error
                );
                self.recover_later();
            }
        }
    }

    /// Takes the device into service again when tasks are thawed, unless [`Service::renew`] does it before. Any
    /// context.
    pub(crate) fn recover_thawed(self: &Arc<Self>) {
        self.recover_after(&self.recovery.lock(), 0);
    }

    /// Takes a device that has failed into service again after so many milliseconds, unless it is being unbound.
    fn recover_after(self: &Arc<Self>, recovery: &Recovery, delay: time::Msecs) {
        if !recovery.ended && recovers() {
            // If the work item is queued already, it has not looked yet.
            let _ = reclaim::freezable_queue()
                .enqueue_delayed::<_, RECOVER>(self.clone(), time::msecs_to_jiffies(delay));
        }
    }

    /// Takes a device that has failed, and was reset, into service again, after a while if it was tried before. Any
    /// context.
    fn recover_later(self: &Arc<Self>) {
        let mut recovery = self.recovery.lock();
        if recovery.ended || !recovers() {
            return;
        }
        let seconds = recovery.backoff.attempt();
        dev_warn!(
            self.transport,
            "takes the device that has failed into service again in {} s\n",
            seconds
        );
        self.recover_after(&recovery, seconds * 1000);
    }

    /// Returns whether the device's function is being reset, which takes less than [`PAUSE`].
    fn is_paused(&self) -> bool {
        let mut recovery = self.recovery.lock();
        let paused = recovery.paused;
        recovery.paused = paused.filter(|since| since.elapsed().as_millis() < PAUSE.into());
        recovery.paused.is_some()
    }

    /// Resets the device if it has failed and was not reset since; returns whether it did. Sleeps.
    fn stop(&self, dev: &Core<'_>) -> bool {
        let hca = self.hca.lock().clone();
        if !hca.is_broken() || hca.is_stopped() {
            return false;
        }
        dev_warn!(self.transport, "resets the device that has failed\n");
        self.retire(dev);
        true
    }

    /// Resets the device if it has failed, and takes it into service again later, or now if it was reset before.
    /// Sleeps.
    ///
    /// # Errors
    ///
    /// `ENODEV` for a device that is not there any more; the errors of [`start`] and
    /// [`virtio::Device::negotiate`].
    fn restart(self: &Arc<Self>, dev: &Core<'_>) -> Result {
        if self.stop(dev) {
            self.recover_later();
            return Ok(());
        }
        if self.is_paused() {
            self.recover_after(&self.recovery.lock(), PAUSE);
            return Ok(());
        }
        let has_failed = self.hca.lock().is_broken();
        if !has_failed || !recovers() || crate::sync::is_shutting_down() {
            return Ok(());
        }
        // An attempt before may have left it half negotiated.
        if !dev.reset().is_done() {
            return Err(ENODEV);
        }
        dev.negotiate(validate)?;
        let (hca, dma) = start(dev)?;
        self.renew(hca, dma);
        Ok(())
    }

    /// Unregisters the RDMA device from before the reset, and registers the new one, unless consumers in the
    /// kernel have yet to let go of the former. Sleeps.
    fn register(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let Some((hca, dma)) = state.renewed.take() else {
            return;
        };
        let left = state.left();
        if let Some(active) = &state.active {
            if left != 0 && !active.ibdev.is_unused(self.clone()) {
                state.renewed = Some((hca, dma));
                // If the work item is queued already, it comes earlier, and looks at the time again.
                let _ = workqueue::system_freezable()
                    .enqueue_delayed::<_, EXPIRE>(self.clone(), time::msecs_to_jiffies(left));
                return;
            }
        }
        // Consumers that still have a PD are told that the device is removed.
        let mut namespace = None;
        if let Some(active) = state.active.take() {
            namespace = Some(ib::Namespace::of(&active.ibdev));
            state.name = active.end(&self.transport).name().ok();
        }
        state.waits_since = None;
        let name = state.name.as_deref();
        match Active::new(self, &hca, &dma, name, namespace) {
            Ok(active) => {
                state.active = Some(active);
                self.recovery.lock().backoff.works();
                dev_info!(self.transport, "the device is in service again\n");
            }
            Err(error) => hca.fail(fmt!("it cannot be registered again: {error:?}")),
        }
    }

    /// Ends the RDMA device with all objects, resets the device, and gives up its queues. Sleeps.
    ///
    /// A device that has failed is reset first, by this thread or, if it fails meanwhile, by the work item
    /// [`RECOVER`]: consumers get back what they had lent to it, and wait for that.
    pub(crate) fn end(self: &Arc<Self>, dev: &Core<'_>) {
        self.recovery.lock().ended = true;
        // These two enqueue each other. Neither does while there is nothing to register.
        self.state.lock().renewed = None;
        crate::sync::cancel_work(self, |this| &this.register);
        crate::sync::cancel_delayed_work(self, |this| &this.expire);
        let active = self.state.lock().active.take();
        if let Some(active) = &active {
            drop(active.ibdev.take_waiter());
        }
        // The memory that the device may touch until it is reset is freed with the RDMA device, so `_ibdev` is kept
        // until the end.
        let _ibdev = self.lent.lend(dev, || {
            if !dev.is_present() {
                // Nobody waits for the replies to commands then.
                let hca = self.hca.lock().clone();
                hca.fail("it is not there");
            }
            self.lent.with(|dev| self.stop(dev));
            active.map(|active| active.end(&self.transport))
        });
        self.recovery.lock().finished = true;
        crate::sync::cancel_delayed_work(self, |this| &this.recover);
        let hca = self.hca.lock().clone();
        interrupt::detach(&hca, &dev.reset());
        // The device and this own each other.
        drop(hca.take_recovery());
    }
}

/// Returns how many seconds consumers in the kernel have to let go of a device that was retired.
///
/// They need milliseconds, or some seconds if a MAD of theirs has to time out, with these exceptions:
///
/// * An NVMe host that was connecting ignores errors (`nvme_change_ctrl_state()`), and waits for its commands to time
///   out: 60 s for those to the admin queue, 30 s for others.
/// * SRP keeps a PD until the device is unregistered. It gives its commands up 15 s after it lost a connection
///   (`fast_io_fail_tmo`); Linux 7.2.12 crashes if the device is removed between the two, in which case
///   `srp_remove_target()` gives them up after `scsi_remove_host()` has freed their tags.
fn release_timeout() -> u32 {
    kernel_release::parameter(crate::module_parameters::release_timeout.value())
}

/// Returns whether devices that have failed are taken into service again.
fn recovers() -> bool {
    let recover: u8 = kernel_release::parameter(crate::module_parameters::recover.value());
    recover != 0
}

impl Recover for Service {
    /// Queues the reset of the device at once: its consumers wait for that reset.
    fn recover(self: Arc<Self>) {
        let recovery = self.recovery.lock();
        if !recovery.finished {
            // If the work item is queued already, it has not looked yet.
            let _ = reclaim::freezable_queue().enqueue_delayed::<_, RECOVER>(self.clone(), 0);
        }
    }

    fn released(self: Arc<Self>) {
        let recovery = self.recovery.lock();
        if !recovery.ended {
            // If the work item is queued already, it has not looked yet.
            let _ = workqueue::system_freezable().enqueue::<_, REGISTER>(self.clone());
        }
    }
}

impl WorkItem<REGISTER> for Service {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let _no_io = reclaim::NoIo::new();
        this.register();
    }
}

impl WorkItem<EXPIRE> for Service {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let _no_io = reclaim::NoIo::new();
        this.register();
    }
}

impl WorkItem<RECOVER> for Service {
    type Pointer = Arc<Self>;

    /// Resets the device, if it has failed, and takes it into service again.
    fn run(this: Arc<Self>) {
        let _no_io = reclaim::NoIo::new();
        this.lent.with(|dev| this.stop(dev));
        match virtio::try_with_device(&this.transport, |dev| this.restart(dev)) {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                dev_err!(
                    this.transport,
                    "cannot take the device into service again: {:?}\n",
                    error
                );
                this.recover_later();
            }
            None => this.recover_after(&this.recovery.lock(), LOCKED),
        }
    }
}
