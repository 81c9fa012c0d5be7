// SPDX-License-Identifier: GPL-2.0

//! The device below the objects: its limits, its queues, its commands, and what
//! happens when it fails. What it tells the objects is in [`crate::interrupt`].

#![deny(unsafe_code)]

use crate::{
    cmd::{
        Command,
        ControlQueue,
        Failed, //
    },
    config::{
        Config,
        Role, //
    },
    dma::{
        self,
        Buffer,
        Pages, //
    },
    doorbell::{
        self,
        DoorbellQueue, //
    },
    event::{
        self,
        EventQueue,
        PortEvents, //
    },
    ib::{
        self,
        EventType, //
    },
    memory::{
        ListCache,
        Quarantine, //
    },
    reclaim,
    stats::{
        Counter,
        Stats, //
    },
    sync::{
        new_irq_spinlock,
        Completion,
        IrqSpinLock, //
    },
    virtio::{
        Queue,
        Reset,
        Status, //
    },
    wire, //
};
use core::time::Duration;
use kernel::{
    device, fmt, new_condvar, new_mutex, new_work,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc,
        CondVar,
        Mutex,
        SetOnce, //
    },
    transmute::{
        AsBytes,
        FromBytes, //
    },
    workqueue::Work,
};

/// The place of a virtqueue.
enum Place {
    /// The queue is not for objects.
    Fixed,
    /// No object has the queue.
    Parked(Queue),
    /// An object has the queue, by a [`Lease`].
    Lent {
        /// The object is being destroyed.
        leaving: bool,
    },
}

impl Place {
    /// Takes the queue for an object, unless another object has it.
    fn lend(&mut self) -> Option<Queue> {
        match core::mem::replace(self, Place::Lent { leaving: false }) {
            Place::Parked(queue) => Some(queue),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// An object that takes a device that has failed into service again.
pub(crate) trait Recover: Send + Sync {
    /// Called when the device has failed. May sleep, but must not wait for the device's work items.
    fn recover(self: Arc<Self>);

    /// Called when the last consumer in the kernel has let go of the device ([`Hca::is_unused`]). May sleep, but
    /// must not wait for the device's work items.
    fn released(self: Arc<Self>);
}

/// The PDs, and the consumers in the kernel.
struct Consumers {
    /// All PDs.
    pds: u32,
    /// The PDs in which consumers in the kernel have had QPs.
    with_qps: u32,
    /// The object that is told when `with_qps` becomes 0.
    waiter: Option<Arc<dyn Recover>>,
}

/// Takes a virtqueue of an object back, with its index.
pub(crate) type Park<'a> = dyn FnMut((u32, Queue)) + 'a;

/// The properties that are known only when the device has its queues.
struct Attached {
    dma: dma::Device,
    max_qp_wr: u32,
    max_cqe: u32,
}

/// A virtio RDMA device.
#[pin_data]
pub(crate) struct Hca {
    dev: ARef<device::Device>,
    config: Config,
    stats: Stats,
    handles: Arc<ib::Handles<Hca>>,
    broken: Atomic<bool>,
    /// Completed when a device that has failed was reset, or is given up: it touches no memory of consumers any more.
    #[pin]
    stopped: Completion,
    attached: SetOnce<Attached>,
    #[pin]
    control: ControlQueue,
    #[pin]
    doorbells: DoorbellQueue,
    #[pin]
    events: event::Locked<wire::Event>,
    /// The queue of each completion vector.
    completion_events: KVec<Pin<KBox<event::Locked<wire::CompEvent>>>>,
    /// The place of each virtqueue, if objects use virtqueues.
    #[pin]
    queues: Mutex<KVec<Place>>,
    /// A queue has come back to `queues`.
    #[pin]
    returned: CondVar,
    #[pin]
    status: Mutex<Option<Status>>,
    /// Events of the port that are to be reported, a bit for each `enum ib_event_type`.
    #[pin]
    port_events: IrqSpinLock<PortEvents>,
    #[pin]
    quarantine: Quarantine,
    #[pin]
    lists: ListCache,
    /// The object that is told once that the device has failed.
    #[pin]
    recovery: IrqSpinLock<Option<Arc<dyn Recover>>>,
    #[pin]
    consumers: Mutex<Consumers>,
    /// Completed when there is no PD any more.
    #[pin]
    no_pds: Completion,
    #[pin]
    wake: Work<Hca>,
    #[pin]
    report: Work<Hca, REPORT>,
}

/// The ID of the work item that reports the events in the event queue.
pub(crate) const REPORT: u64 = 1;

#[allow(unsafe_code)]
mod work {
    use super::Hca;

    kernel::impl_has_work! {
        impl HasWork<Self> for Hca { self.wake }
        impl HasWork<Self, 1> for Hca { self.report }
    }
}

impl Hca {
    /// Makes the device, still without queues. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(dev: ARef<device::Device>, config: Config) -> Result<Arc<Self>> {
        let handles = Arc::new(
            ib::Handles::new(
                config.max_cq as usize,
                config.max_qp as usize + 1,
                config.max_srq as usize + 1,
                config.rings.is_none(),
            )?,
            GFP_KERNEL,
        )?;
        let rings = config.rings.is_some();
        let control = ControlQueue::new(dev.clone(), if rings { 0 } else { config.max_cq })?;
        let doorbells = if rings {
            DoorbellQueue::new(config.max_qp + 1, config.max_srq + 1)?
        } else {
            DoorbellQueue::new(0, 0)?
        };
        let mut completion_events = KVec::new();
        for _ in 0..config.rings.unwrap_or(0) {
            completion_events.push(
                KBox::pin_init(
                    new_irq_spinlock!(None, "virtio_rdma::completion_events"),
                    GFP_KERNEL,
                )?,
                GFP_KERNEL,
            )?;
        }
        let stats = Stats::new(dev.clone())?;
        let lists = ListCache::new()?;

        Arc::pin_init(
            try_pin_init!(Self {
                dev,
                config,
                stats,
                handles,
                broken: Atomic::new(false),
                stopped <- Completion::new(),
                attached: SetOnce::new(),
                control <- control,
                doorbells <- doorbells,
                completion_events,
                events <- new_irq_spinlock!(None, "virtio_rdma::events"),
                queues <- new_mutex!(KVec::new()),
                returned <- new_condvar!(),
                status <- new_mutex!(None),
                port_events <- new_irq_spinlock!(PortEvents::default(), "virtio_rdma::port_events"),
                quarantine <- Quarantine::new(),
                lists <- lists,
                recovery <- new_irq_spinlock!(None, "virtio_rdma::recovery"),
                consumers <- new_mutex!(Consumers { pds: 0, with_qps: 0, waiter: None }),
                no_pds <- Completion::new(),
                wake <- new_work!("virtio_rdma::wake"),
                report <- new_work!("virtio_rdma::report"),
            }? Error),
            GFP_KERNEL,
        )
    }

    /// Takes over the queues, in the order of the specification. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are too few, or if the control queue is too small; `ENOMEM`.
    pub(crate) fn attach(&self, queues: KVec<Queue>, dma: dma::Device) -> Result {
        let config = &self.config;
        let mut attached = Attached {
            max_qp_wr: config.max_qp_wr,
            max_cqe: config.max_cqe,
            dma: dma.clone(),
        };
        *self.status.lock() = queues.first().map(Queue::status);
        for (index, queue) in queues.into_iter().enumerate() {
            let mut place = Place::Fixed;
            match config.role(index as u32) {
                Role::Control => self.control.attach(queue)?,
                Role::Events => *self.events.lock() = Some(EventQueue::new(queue, &dma)?),
                Role::Doorbells => self.doorbells.attach(queue, &dma)?,
                Role::CompletionEvents(vector) => self.attach_vector(vector, queue, &dma)?,
                Role::Completions(_) => {
                    attached.max_cqe = attached.max_cqe.min(queue.size());
                    place = Place::Parked(queue);
                }
                Role::Sends | Role::Receives => {
                    attached.max_qp_wr = attached.max_qp_wr.min(queue.size());
                    place = Place::Parked(queue);
                }
            }
            if config.rings.is_none() {
                self.queues.lock().push(place, GFP_KERNEL)?;
            }
        }
        self.attached.populate(attached);
        Ok(())
    }

    /// Takes over the queue of a completion vector. The vectors are spread over the CPUs.
    fn attach_vector(&self, vector: u32, queue: Queue, dma: &dma::Device) -> Result {
        let mut events = EventQueue::new(queue, dma)?;
        events.set_affinity(vector, self.num_comp_vectors());
        let place = self.completion_events.get(vector as usize).ok_or(EINVAL)?;
        *place.lock() = Some(events);
        Ok(())
    }

    /// Gives the queues up, and all memory that the device could touch. `revoke` takes the virtqueues of
    /// objects away, and hands each with its index to the function that it gets; it may be called several
    /// times. Sleeps.
    ///
    /// What a device may touch that could not be reset is never freed, but for the rings of virtqueues, which are the
    /// virtio core's.
    pub(crate) fn detach(self: &Arc<Self>, reset: &Reset<'_>, revoke: impl FnMut(&mut Park<'_>)) {
        if reset.is_done() {
            self.quarantine.end();
        } else if !self.is_stopped() {
            dev_err!(
                self.dev,
                "the device is not there, so it cannot be reset: memory that it may touch is never freed\n"
            );
            core::mem::forget(self.clone());
        }
        self.stopped.complete_all();
        let mut queues = self.take_queues(revoke);
        let status = self.status.lock().take();
        drop(status);
        let events = self.events.lock().take();

        if let Some(mut queue) = self.control.detach() {
            queue.detach_all(reset);
        }
        if let Some(mut queue) = self.doorbells.detach() {
            queue.detach_all(reset);
        }
        if let Some(mut queue) = events.map(EventQueue::into_queue) {
            queue.detach_all(reset);
        }
        for place in &self.completion_events {
            let events = place.lock().take();
            if let Some(mut queue) = events.map(EventQueue::into_queue) {
                queue.detach_all(reset);
            }
        }
        for place in &mut queues {
            if let Place::Parked(queue) = place {
                queue.detach_all(reset);
            }
        }
        self.lists.end();
        crate::sync::flush_work(&self.report);
        crate::sync::flush_work(&self.wake);
    }

    /// Takes the virtqueues of objects, also from those that have one. Waits for a thread that is about to
    /// publish an object with a virtqueue, or to drop it. Sleeps.
    fn take_queues(&self, mut revoke: impl FnMut(&mut Park<'_>)) -> KVec<Place> {
        let mut queues = self.queues.lock();
        loop {
            revoke(&mut |(index, queue)| {
                if let Some(place) = queues.get_mut(index as usize) {
                    *place = Place::Parked(queue);
                }
            });
            if !queues
                .iter()
                .any(|place| matches!(place, Place::Lent { .. }))
            {
                return core::mem::take(&mut *queues);
            }
            self.returned.wait(&mut queues);
        }
    }

    /// Lets a thread in [`Hca::detach`] look at the objects once more. May sleep.
    pub(crate) fn wake_detach(&self) {
        // That thread holds this lock, except while it waits.
        let _queues = self.queues.lock();
        self.returned.notify_all();
    }

    /// Returns the limits.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the counters.
    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns the objects by number.
    pub(crate) fn objects(&self) -> &Arc<ib::Handles<Hca>> {
        &self.handles
    }

    /// Returns the control queue.
    pub(crate) fn control(&self) -> &ControlQueue {
        &self.control
    }

    /// Returns the event queue.
    pub(crate) fn events(&self) -> &event::Locked<wire::Event> {
        &self.events
    }

    /// Returns the queues of completion events, by completion vector.
    pub(crate) fn completion_events(&self) -> &[Pin<KBox<event::Locked<wire::CompEvent>>>] {
        &self.completion_events
    }

    /// Returns whether the device asks for a reset (DEVICE_NEEDS_RESET). May sleep.
    pub(crate) fn needs_reset(&self) -> bool {
        self.status.lock().as_ref().is_some_and(Status::needs_reset)
    }

    /// Takes the events of the port that are to be reported. Any context.
    pub(crate) fn take_port_events(&self) -> PortEvents {
        core::mem::take(&mut *self.port_events.lock())
    }

    /// Takes the replies to commands. Called by the interrupt.
    pub(crate) fn control_interrupt(self: &Arc<Self>) {
        if self.control.interrupt(&self.stats).is_err() {
            self.fail("the control queue broke");
        }
        self.attend_unmapped();
    }

    /// Schedules the requests for notification whose memory could not be mapped. Any context.
    fn attend_unmapped(self: &Arc<Self>) {
        if self.control.has_unmapped() {
            self.attend();
        }
    }

    /// Asks the device to signal CQ `cqn`, with `VIRTIO_RDMA_NOTIFY_*`. Any context.
    pub(crate) fn notify(self: &Arc<Self>, cqn: u32, flags: u32) {
        if self.control.notify(cqn, flags) {
            self.attend();
        }
    }

    /// Sends the doorbells that wait for a buffer. Called by the interrupt.
    pub(crate) fn doorbell_interrupt(&self) {
        self.doorbells.interrupt();
    }

    /// Reports the events that are in the event queue, soon. Any context.
    pub(crate) fn report_soon(self: &Arc<Self>) {
        // If the work item is queued already, it has not looked at the queue yet.
        let _ = reclaim::queue().enqueue::<_, REPORT>(self.clone());
    }

    /// Returns how many work requests a queue can hold at most.
    pub(crate) fn max_qp_wr(&self) -> u32 {
        self.attached
            .as_ref()
            .map_or(0, |attached| attached.max_qp_wr)
    }

    /// Returns how many entries a CQ can have at most.
    pub(crate) fn max_cqe(&self) -> u32 {
        self.attached
            .as_ref()
            .map_or(0, |attached| attached.max_cqe)
    }

    /// Returns the number of completion vectors: with virtqueues, one a CPU, as far as there are CQs.
    pub(crate) fn num_comp_vectors(&self) -> u32 {
        self.config
            .rings
            .unwrap_or_else(|| crate::sync::num_online_cpus().min(self.config.max_cq))
    }

    /// Allocates memory that the device can reach. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn alloc(&self, len: usize) -> Result<Buffer> {
        self.attached.as_ref().ok_or(ENODEV)?.dma.alloc(len)
    }

    /// Takes a page for the page table of a command. A page that an earlier command used is neither allocated
    /// nor zeroed, and still holds that command's entries. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn take_list(&self) -> Result<Buffer> {
        self.lists
            .take()
            .map_or_else(|| self.alloc(dma::PAGE_SIZE), Ok)
    }

    /// Returns the pages for page tables of commands to come.
    pub(crate) fn lists(&self) -> &ListCache {
        &self.lists
    }

    /// Returns the memory that the device may still touch although nobody uses it.
    pub(crate) fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    /// Allocates memory that the device knows as a list of pages. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn alloc_pages(&self, len: usize) -> Result<Pages> {
        Pages::new(&self.attached.as_ref().ok_or(ENODEV)?.dma, len)
    }

    /// Rings the doorbell of a QP. Any context.
    pub(crate) fn ring_doorbell(self: &Arc<Self>, qpn: u32, ring: doorbell::Ring) {
        self.stats.count(Counter::Doorbells);
        if self.doorbells.ring(qpn, ring).is_err() {
            self.fail("the doorbell queue broke");
        }
    }

    /// Rings the doorbell of an SRQ. Any context.
    pub(crate) fn ring_srq_doorbell(self: &Arc<Self>, srqn: u32) {
        self.stats.count(Counter::Doorbells);
        if self.doorbells.ring_srq(srqn).is_err() {
            self.fail("the doorbell queue broke");
        }
    }

    /// Forgets the doorbells of an SRQ that is gone. Any context.
    pub(crate) fn cancel_srq_doorbell(&self, srqn: u32) {
        self.doorbells.cancel_srq(srqn);
    }

    /// Forgets the doorbells of a QP that is gone. Any context.
    pub(crate) fn cancel_doorbell(&self, qpn: u32) {
        self.doorbells.cancel(qpn);
    }

    /// Takes the device out of service, because it gave a new object a number that is out of range or taken: it may
    /// take the memory of one object for that of another. Any context.
    pub(crate) fn bad_number(self: &Arc<Self>) {
        self.stats.bad(Counter::BadHandle);
        self.fail("it gives objects wrong numbers");
    }

    /// Returns whether the device has failed.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }

    /// Returns whether the device touches no memory of consumers any more: it was reset, or is given up. Until then,
    /// the work requests of a device that has failed are not flushed.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.is_complete()
    }

    /// Notes that the device was reset, or is given up, and has work requests flushed soon. Any context.
    pub(crate) fn stopped(self: &Arc<Self>) {
        self.stopped.complete_all();
        self.attend();
    }

    /// Waits until a device that has failed has been reset: what an object lent to it is its owner's again. Returns at
    /// once if the device works. Sleeps, uninterruptibly.
    pub(crate) fn wait_if_broken(&self) {
        if self.is_broken() {
            self.stopped.wait();
        }
    }

    /// Takes the device out of service: it does not do what the specification says. Outstanding
    /// commands fail; outstanding work requests are flushed once the device has been reset. Any context.
    pub(crate) fn fail(self: &Arc<Self>, why: impl fmt::Display) {
        if self.broken.xchg(true, Full) {
            return;
        }
        dev_err!(self.dev, "the device has failed: {}\n", why);
        self.end();
    }

    /// Takes the device out of service as [`Hca::fail`] does, because the machine is about to sleep. Any
    /// context.
    pub(crate) fn retire(self: &Arc<Self>) {
        if !self.broken.xchg(true, Full) {
            self.end();
        }
    }

    /// Tells the users of the device that it is broken.
    fn end(self: &Arc<Self>) {
        self.control.fail();
        self.report_port(EventType::DeviceFatal);
    }

    /// Tells `recovery` once that the device has failed: when it fails, or soon if it has failed already. Any context.
    pub(crate) fn on_failure(self: &Arc<Self>, recovery: Arc<dyn Recover>) {
        *self.recovery.lock() = Some(recovery);
        self.attend();
    }

    /// Takes who is to be told that the device has failed; `None` if that was done. Any context.
    pub(crate) fn take_recovery(&self) -> Option<Arc<dyn Recover>> {
        self.recovery.lock().take()
    }

    /// Counts a new PD. May sleep.
    pub(crate) fn pd_came(&self) {
        self.consumers.lock().pds += 1;
    }

    /// Follows the destruction of a PD. May sleep.
    pub(crate) fn pd_left(&self) {
        let mut consumers = self.consumers.lock();
        consumers.pds -= 1;
        if consumers.pds == 0 {
            self.no_pds.complete();
        }
    }

    /// Waits until all PDs are destroyed, and the RDMA core has forgotten them; false if `timeout` passed first.
    /// Nobody may create a PD any more. Sleeps, uninterruptibly.
    ///
    /// A consumer in the kernel should have destroyed its PD when it has returned from the `remove` operation of its
    /// `struct ib_client`. RDS does it in a work item (`rds_ib_dev_free()` of Linux 7.2.12).
    #[must_use]
    pub(crate) fn wait_for_pds(&self, timeout: Duration) -> bool {
        let consumers = self.consumers.lock();
        if consumers.pds == 0 {
            return true;
        }
        self.no_pds.reinit();
        drop(consumers);
        let destroyed = self.no_pds.wait_timeout(timeout);
        if destroyed {
            // The RDMA core forgets a PD after it has called the driver (ib_dealloc_pd_user()).
            crate::sync::wait_for_tasks();
        }
        destroyed
    }

    /// Counts a PD in which a consumer in the kernel creates a QP. May sleep.
    pub(crate) fn consumer_came(&self) {
        self.consumers.lock().with_qps += 1;
    }

    /// Follows the destruction of a PD that [`Hca::consumer_came`] has counted. May sleep.
    pub(crate) fn consumer_left(&self) {
        let mut consumers = self.consumers.lock();
        consumers.with_qps -= 1;
        if consumers.with_qps != 0 {
            return;
        }
        let waiter = consumers.waiter.take();
        drop(consumers);
        if let Some(waiter) = waiter {
            waiter.released();
        }
    }

    /// Returns whether the consumers in the kernel have no PDs any more. If they have, `waiter` is told once, when
    /// the last of these PDs goes. May sleep.
    pub(crate) fn is_unused(&self, waiter: Arc<dyn Recover>) -> bool {
        let mut consumers = self.consumers.lock();
        if consumers.with_qps != 0 {
            consumers.waiter = Some(waiter);
        }
        consumers.with_qps == 0
    }

    /// Takes who waits for the consumers in the kernel; `None` if nobody does. May sleep.
    pub(crate) fn take_waiter(&self) -> Option<Arc<dyn Recover>> {
        self.consumers.lock().waiter.take()
    }

    /// Reports an event of the port, soon; until then, [`PortEvents`] has it. Any context.
    pub(crate) fn report_port(self: &Arc<Self>, event: EventType) {
        self.port_events.lock().add(event);
        self.attend();
    }

    /// Schedules work for what happened to the device: looks at its status, reports events of the port, sends requests
    /// for notification that wait, and lets the consumers of armed CQs poll if it has failed. Any context.
    pub(crate) fn attend(self: &Arc<Self>) {
        // If the work item is queued already, it has not run yet.
        let _ = reclaim::queue().enqueue::<_, 0>(self.clone());
    }

    /// Executes a command. Sleeps.
    ///
    /// # Errors
    ///
    /// The error behind the status of the reply, or `EIO`.
    pub(crate) fn execute<C: Command>(self: &Arc<Self>, request: &C::Request) -> Result<C::Reply> {
        let result = self.control.execute::<C>(&self.stats, request, |failed| {
            self.command_failed(C::NAME, &failed);
        });
        // The caller may have taken requests for notification that the device returned, and sent others.
        self.attend_unmapped();
        result
    }

    /// Returns the error for a consumer whose object cannot be created.
    ///
    /// It is `ENETDOWN` for a consumer in the kernel if the device has failed: NFS then tries to connect again, as it
    /// does while a network is down, and after `EIO` it has programs fail that use its files
    /// (`call_connect_status()`). Any context.
    pub(crate) fn create_error(&self, in_kernel: bool, error: Error) -> Error {
        if in_kernel && self.is_broken() {
            crate::errno::network_down()
        } else {
            error
        }
    }

    /// Takes the device out of service, because the command with this name has no reply. Any context.
    #[cold]
    fn command_failed(self: &Arc<Self>, name: &str, failed: &Failed) {
        match failed {
            Failed::Broken => self.fail(fmt!("the control queue broke in {name}")),
            Failed::Silent => self.fail(fmt!("{name} has no reply")),
            Failed::Reset => self.fail(fmt!("it was reset during {name}, and not by the driver")),
            Failed::Untold => self.fail(fmt!("the reply to {name} came without an interrupt")),
        }
    }

    /// Executes a command that destroys an object. Sleeps.
    ///
    /// It cannot fail, because the RDMA core cannot keep an object whose user is gone. A device that
    /// does not know the object has no more to destroy; one that refuses is taken out of service,
    /// which keeps from use what it may still touch until it has been reset. This returns when the device does not
    /// touch what the object lent to it.
    pub(crate) fn execute_destroy<C: Command>(self: &Arc<Self>, request: &C::Request) {
        self.destroyed::<C>(self.execute::<C>(request));
    }

    /// Takes the result of a command that destroys an object, as [`Hca::execute_destroy`] does. Sleeps.
    pub(crate) fn destroyed<C: Command>(self: &Arc<Self>, result: Result<C::Reply>) {
        match result {
            Err(error) if error != ENOENT => self.not_destroyed(C::NAME, error),
            _ => {}
        }
        self.wait_if_broken();
    }

    /// Takes the device out of service, because the command with this name did not destroy an object. Any context.
    #[cold]
    fn not_destroyed(self: &Arc<Self>, name: &str, error: Error) {
        self.fail(fmt!(
            "it does not destroy an object: {name} failed with {error:?}"
        ));
    }

    /// Tells that the object that has this queue is about to be destroyed. From the reply on, the
    /// device may give its number to another. May sleep.
    pub(crate) fn leave(&self, index: Option<u32>) {
        let mut queues = self.queues.lock();
        let place = index.and_then(|index| queues.get_mut(index as usize));
        if let Some(Place::Lent { leaving }) = place {
            *leaving = true;
        }
    }

    /// Takes a queue that no object has, or waits for it if its object is being destroyed.
    fn take_queue(&self, index: u32) -> Option<Queue> {
        let mut queues = self.queues.lock();
        loop {
            let place = queues.get_mut(index as usize)?;
            if !matches!(place, Place::Lent { leaving: true }) {
                return place.lend();
            }
            self.returned.wait(&mut queues);
        }
    }

    /// Takes the queue with this index for an object of the device, with `memory` for its
    /// buffers. May sleep.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no such queue or an object has it: the device gave a number that it must
    /// not.
    pub(crate) fn lease(self: &Arc<Self>, index: Option<u32>, memory: Buffer) -> Result<Lease> {
        let queue = index.and_then(|index| Some((index, self.take_queue(index)?)));
        let (index, queue) = queue.ok_or_else(|| self.bad_handle())?;
        let mut lease = Lease {
            hca: self.clone(),
            index,
            queue: Some(queue),
        };
        // The queue holds buffers of an earlier object only if the device has failed.
        lease.queue()?.set_memory(memory)?;
        Ok(lease)
    }

    /// Counts a number that the device must not give to a new object. Returns the error of the caller. The object is
    /// not destroyed, because its number may be that of another one.
    pub(crate) fn bad_handle(&self) -> Error {
        self.stats.bad(Counter::BadHandle);
        EIO
    }
}

/// A virtqueue that an object uses, with the memory of the buffers in it. It goes back when this is
/// dropped.
pub(crate) struct Lease {
    hca: Arc<Hca>,
    index: u32,
    queue: Option<Queue>,
}

impl Lease {
    fn queue(&mut self) -> Result<&mut Queue> {
        self.queue.as_mut().ok_or(EIO)
    }

    /// Takes the virtqueue away, with its index: the device has been reset. Any context.
    pub(crate) fn revoke(&mut self) -> Option<(u32, Queue)> {
        Some((self.index, self.queue.take()?))
    }

    /// Returns whether the queue does nothing any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.queue.as_ref().is_none_or(Queue::is_broken)
    }

    /// Lets the interrupt go to a part of the CPUs, of `parts`. May sleep.
    pub(crate) fn set_affinity(&mut self, part: u32, parts: u32) {
        if let Some(queue) = self.queue.as_mut() {
            queue.set_affinity(part, parts);
        }
    }

    /// Makes `len` bytes at `offset` of the memory available for the device to read. Any context.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOSPC`.
    pub(crate) fn add_readable(&mut self, offset: usize, len: usize, token: u32) -> Result {
        self.queue()?.add_readable(offset, len, token)
    }

    /// Makes `len` bytes at `offset` of the memory available for the device to write. Any context.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOSPC`.
    pub(crate) fn add_writable(&mut self, offset: usize, len: usize, token: u32) -> Result {
        self.queue()?.add_writable(offset, len, token)
    }

    /// Takes the next buffer that the device has used: its token and the bytes written.
    pub(crate) fn get(&mut self) -> Option<(u32, u32)> {
        self.queue.as_mut()?.get()
    }

    /// Returns whether the device has used a buffer that was not taken yet.
    pub(crate) fn has_used(&mut self) -> bool {
        // The ring of a broken queue may say anything.
        !self.is_broken() && self.queue.as_mut().is_some_and(Queue::has_used)
    }

    /// Tells the device about new buffers.
    pub(crate) fn kick(&mut self) {
        if let Some(queue) = self.queue.as_mut() {
            queue.kick();
        }
    }

    /// Copies `value` to `offset` of the memory.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the end.
    pub(crate) fn write<T: AsBytes>(&mut self, offset: usize, value: &T) -> Result {
        self.queue()?.memory()?.write(offset, value)
    }

    /// Copies a value out of `offset` of the memory.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the end.
    pub(crate) fn read<T: FromBytes + AsBytes + Zeroable>(&self, offset: usize) -> Result<T> {
        self.queue.as_ref().ok_or(EIO)?.memory()?.read(offset)
    }

    /// Takes all buffers that the device has used. After a command that makes it return them all,
    /// the queue is empty then, or the device has failed.
    pub(crate) fn drain(&mut self) {
        while self.get().is_some() {}
        if self
            .queue
            .as_ref()
            .is_some_and(|queue| queue.in_ring() != 0)
        {
            self.hca
                .fail("it keeps buffers of an object that was destroyed or reset");
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.drain();
        // A device that has failed may still touch the memory.
        if let Some(queue) = self.queue.as_mut().filter(|_| !self.hca.is_broken()) {
            queue.free_memory();
        }
        let mut queues = self.hca.queues.lock();
        let place = queues.get_mut(self.index as usize);
        if let (Some(place), Some(queue)) = (place, self.queue.take()) {
            *place = Place::Parked(queue);
        }
        drop(queues);
        self.hca.returned.notify_all();
    }
}
