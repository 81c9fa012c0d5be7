// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device of one guest: the face of the engine that a transport to a VMM drives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use abi::VIRTIO_RDMA_EVENT_DEVICE_FATAL;
use memory::GuestMemory;
use ring::{Signal, SplitQueue, MAX_SIZE};

use crate::base::budget::Budget;
use crate::base::counters::Counter;
use crate::base::image::{open, seal, LoadError};
use crate::base::observe::Observer;
use crate::base::queues::{Numbering, Paths, Queue};
use crate::base::sync::lock;
use crate::config::{config_space, features, DeviceConfig, DevicePolicy};
use crate::image::{visit_all, Image, VirtqueueSetup};
use crate::queue::virtqueue::Virtqueue;
use crate::schedule::guest::Guest;
use crate::schedule::scheduler::{Next, Scheduler};
use crate::status::{self, DeviceStatus};
use crate::transport::fabric_core::FabricCore;
use crate::transport::hca::Hca;
use crate::transport::rights::Rights;

/// Entries of the virtqueues that are no QP's or CQ's; of the control queue, the fewest.
const CONTROL_SIZE: u16 = 256;
const EVENT_SIZE: u16 = 256;
const COMPLETION_EVENT_SIZE: u16 = 1024;
const DOORBELL_SIZE: u16 = 1024;

/// The device of one guest: what a transport drives.
///
/// All methods but [`Device::status`], [`Device::summary`], [`Device::set_policy`] and [`Device::set_observer`] are for
/// the one thread that serves the guest.
pub struct Device {
    guest: Guest,
    scheduler: Mutex<Scheduler>,
    started: AtomicBool,
    mac: Option<[u8; 6]>,
    paths: Paths,
    features: u64,
}

impl Device {
    /// Makes the device of a guest in a fabric.
    pub(crate) fn new(fabric: &Arc<FabricCore<Hca>>, config: DeviceConfig) -> Self {
        let DeviceConfig { name, mac, limits, policy, paths, wake } = config;
        let DevicePolicy { addresses, classes, quota } = policy;
        let limits = limits.clamped();
        let node = mac.unwrap_or_else(random_mac);
        let shared = Arc::clone(fabric);
        let hca = Arc::new(Hca::new(name, node, limits, classes, quota, shared, wake));
        fabric.add(&hca, Rights::new(mac, addresses));
        Self {
            scheduler: Mutex::new(Scheduler::new(hca.jobs.count())),
            guest: Guest::new(hca),
            started: AtomicBool::new(false),
            mac,
            paths,
            features: features(mac, paths),
        }
    }

    /// Returns the image of the device, with which [`Self::load`] makes another one go on where this one is: it has the
    /// same state as far as the guest and its peers can tell. No thread runs this device, or another one of its
    /// network, meanwhile. A change of memory, a reset or a freeze that is under way comes to its end first.
    ///
    /// The device may go on afterwards, if the image is not used.
    pub fn save(&self) -> Vec<u8> {
        self.settle();
        // A command that was carried out is not done once more.
        lock(&self.guest.control).reply();
        let is_started = self.started.load(Ordering::Acquire);
        seal(&Image::of(&self.guest, self.mac, is_started))
    }

    /// Takes over the state of the device of which [`Self::save`] has made the image. This device is made with the same
    /// configuration, and is not started. The guest's memory has the content that it had then; `queues` are the
    /// virtqueues that the guest has set up, which may be more than the device had. All devices of a network that were
    /// saved together are loaded before any of them runs.
    ///
    /// If the image is refused, the device is as after a reset, and nothing is left behind.
    pub fn load(
        &self,
        image: &[u8],
        memory: &GuestMemory,
        queues: impl IntoIterator<Item = VirtqueueSetup>,
    ) -> Result<(), LoadError> {
        let (version, mut image): (u32, Image) = open(image)?;
        image.renew(version);
        self.settle();
        if self.started.load(Ordering::Acquire) {
            return Err(LoadError::Started);
        }
        image.check(self.hca(), self.mac, self.features)?;
        let is_started = image.is_started;
        // A reset ends what was made, if something is wrong.
        self.started.store(true, Ordering::Release);
        if let Err(why) = image.load(&self.guest, memory, queues) {
            self.reset();
            self.hca().features.agree(0);
            return Err(why);
        }
        self.started.store(is_started, Ordering::Release);
        visit_all(&self.guest);
        Ok(())
    }

    /// Returns the part of the device that peers reach.
    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.guest.hca
    }

    /// Returns the configuration space.
    pub fn config_space(&self) -> [u8; 256] {
        let hca = self.hca();
        config_space(&hca.limits, self.paths, self.mac, hca.identity.mac())
    }

    /// Returns the device-specific feature bits.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Sets what driver and device agreed on (FEATURES_OK): the device-specific bits
    /// among `features`, all of which were offered. They decide what the
    /// virtqueues are for, so the call comes before the first of them, and changes
    /// nothing afterwards. The bits stay over a reset until the next call.
    pub fn set_driver_features(&self, features: u64) {
        if self.started.load(Ordering::Acquire) {
            return;
        }
        self.hca().features.agree(self.features & features);
    }

    /// Returns how many virtqueues there are, whatever the driver agrees on.
    pub fn queue_count(&self) -> u16 {
        self.hca().limits.queue_count(self.paths)
    }

    /// Returns the largest size of a virtqueue, whatever the driver agrees on; 0 if there
    /// is no such queue.
    pub fn queue_max_size(&self, index: u16) -> u16 {
        let limits = &self.hca().limits;
        let size = |queue| match queue {
            Queue::Control if self.paths.virtqueues => control_size(limits.max_cq),
            Queue::Control => CONTROL_SIZE,
            Queue::Completion(_) => limits.cq_size,
            Queue::Send(_) | Queue::Receive(_) => limits.wq_size,
            Queue::Event => EVENT_SIZE,
            Queue::CompletionEvents(_) => COMPLETION_EVENT_SIZE,
            Queue::Doorbell => DOORBELL_SIZE,
            Queue::Srq(_) | Queue::Wire => 0,
        };
        self.numberings()
            .filter_map(|numbering| numbering.queue(index))
            .map(size)
            .max()
            .unwrap_or(0)
    }

    /// Returns the numberings of virtqueues that the driver may agree on.
    fn numberings(&self) -> impl Iterator<Item = Numbering> + use<'_> {
        Numbering::of(&self.hca().limits, self.paths)
    }

    /// Starts the device (DRIVER_OK): the guest's memory, and for each queue
    /// that the guest set up its ring and its interrupt.
    pub fn start(
        &self,
        memory: &GuestMemory,
        queues: impl IntoIterator<Item = (u16, SplitQueue, Arc<dyn Signal>)>,
    ) {
        if self.started.swap(true, Ordering::AcqRel) {
            self.set_memory(memory);
        } else {
            self.settle();
            self.guest.give_memory(&mut lock(&self.guest.control), memory);
        }
        for (index, ring, signal) in queues {
            self.set_queue(index, ring, signal);
        }
    }

    /// Puts a queue in place, for transports that bring one at a time. Ignored
    /// for an index that does not exist.
    pub fn set_queue(&self, index: u16, ring: SplitQueue, signal: Arc<dyn Signal>) {
        let hca = self.hca();
        let Some(queue) = self.guest.numbering().queue(index) else { return };
        let number = hca.jobs.number(queue);
        self.started.store(true, Ordering::Release);
        lock(&self.scheduler).forget(number);
        self.finish_request(queue);
        self.guest.with_virtqueue(queue, |place| place.set(Some(ring), Some(signal)));
        if let Queue::Receive(slot) = queue {
            lock(&hca.qps.take(slot).responder).notify = true;
        }
        hca.make_ready(number);
    }

    /// Replaces the interrupt of a queue.
    pub fn set_signal(&self, index: u16, signal: Arc<dyn Signal>) {
        if let Some(queue) = self.guest.numbering().queue(index) {
            self.guest.with_virtqueue(queue, |place| place.set_signal(signal));
        }
    }

    /// Takes a queue away and returns the available index to go on from;
    /// `None` if there was none.
    pub fn stop_queue(&self, index: u16) -> Option<u16> {
        let queue = self.guest.numbering().queue(index)?;
        lock(&self.scheduler).forget(self.hca().jobs.number(queue));
        self.finish_request(queue);
        let ring = self.guest.with_virtqueue(queue, Virtqueue::take)??;
        Some(ring.next_avail())
    }

    /// Ends a request that was taken from a queue that goes, if it is the control queue.
    fn finish_request(&self, queue: Queue) {
        if queue == Queue::Control {
            // A peer may be in the middle of a round with a region that ends.
            while !lock(&self.guest.control).hurry_on(self.hca(), &mut Budget::endless()) {
                std::thread::yield_now();
            }
        }
    }

    /// Begins to follow a change of the guest's memory map: rings and memory regions are found again.
    /// A region that is no longer in memory is invalid until a later change brings it back.
    ///
    /// [`Device::run`] goes on with it, and does nothing else before it has come to its end. Once the
    /// device [is settled](Self::is_settled), nothing of the old map is in use. A virtqueue that the new one
    /// does not hold is a malformed one. What was begun before and has not come to its end does so now, however
    /// long that takes.
    pub fn begin_memory(&self, memory: &GuestMemory) {
        self.settle();
        lock(&self.scheduler).begin_memory(memory);
    }

    /// Begins to reset the device (status 0, or the guest has gone): everything that the guest made is
    /// destroyed. As with [`Self::begin_memory`], [`Device::run`] goes on with it; once the device is
    /// settled, no thread touches the guest's memory.
    ///
    /// There is nothing to do for a device that was not started since the last reset, but to end a freeze.
    pub fn begin_reset(&self) {
        self.settle();
        if self.started.swap(false, Ordering::AcqRel) {
            lock(&self.scheduler).begin_reset();
        } else {
            self.hca().thaw();
        }
    }

    /// Begins to freeze the device: once it [is settled](Self::is_settled), no thread reads or writes the guest's
    /// memory, until [`Self::thaw`]. As with [`Self::begin_memory`], [`Device::run`] goes on with it; what was begun
    /// before comes to its end now, and so does a control command under way, which gets its reply.
    ///
    /// A frozen device does nothing but changes: it follows [`Self::begin_memory`] and stays frozen, and a reset ends
    /// the freeze when it has come to its end. Kicks are remembered. The guest's time stands still, so no timer fires.
    /// Packets from other hosts wait in the inbox, and are lost when that is full. Messages of guests of the same
    /// network wait for the thaw, without an error or a retry, and in the middle if they are under way; datagrams are
    /// dropped, as if the guest had no receive. Events that are raised meanwhile wait as well.
    ///
    /// The freeze is not a part of an image: a device that takes over the state of a frozen one runs.
    pub fn begin_freeze(&self) {
        self.settle();
        if !self.is_frozen() {
            self.hca().freeze();
            lock(&self.scheduler).begin_freeze();
        }
    }

    /// Lets the frozen device go on where it is, in the memory that the last change of memory named: each queue is
    /// visited, whatever kicks were lost, and messages that wait for the guest arrive. What was begun before comes to
    /// its end now. Does nothing if the device is not frozen.
    pub fn thaw(&self) {
        self.settle();
        if self.hca().thaw() {
            visit_all(&self.guest);
        }
    }

    /// Returns whether the device is frozen, or [`Self::begin_freeze`] has not come to its end; `false` behind
    /// [`Self::thaw`], and behind the end of a reset.
    pub fn is_frozen(&self) -> bool {
        self.hca().is_frozen()
    }

    /// Returns whether what [`Self::begin_memory`], [`Self::begin_reset`] or [`Self::begin_freeze`] began last has
    /// come to its end.
    pub fn is_settled(&self) -> bool {
        !lock(&self.scheduler).is_changing()
    }

    /// Goes on at once to the end of the changes that were begun, however long that takes.
    pub fn settle(&self) {
        let change = lock(&self.scheduler).take_change();
        if let Some(mut change) = change {
            while !change.run(&self.guest, &mut Budget::endless()) {
                std::thread::yield_now();
            }
        }
    }

    /// Follows a change of the guest's memory map at once, as [`Self::begin_memory`].
    pub fn set_memory(&self, memory: &GuestMemory) {
        self.begin_memory(memory);
        self.settle();
    }

    /// Resets the device at once, as [`Self::begin_reset`].
    pub fn reset(&self) {
        self.begin_reset();
        self.settle();
    }

    /// Returns whether the guest broke its control queue, so that the status of the
    /// device shows DEVICE_NEEDS_RESET.
    pub fn needs_reset(&self) -> bool {
        self.hca().needs_reset()
    }

    /// Makes the device fail, like one whose state was lost: the device shows DEVICE_NEEDS_RESET, and tells the driver
    /// by an event as soon as the event queue is there. This lasts until the next reset.
    pub fn fail(&self) {
        self.hca().set_needs_reset();
        self.hca().raise(VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0);
    }

    /// Returns the index of the event queue, which depends on the features that were agreed on.
    pub fn event_queue(&self) -> Option<u16> {
        let numbering = self.guest.numbering();
        (0..numbering.count()).find(|index| numbering.queue(*index) == Some(Queue::Event))
    }

    /// Notes that a queue has new buffers. Cheap; [`Device::run`] does the work.
    pub fn kick(&self, index: u16) {
        if let Some(queue) = self.guest.numbering().queue(index) {
            self.hca().ready.set(self.hca().jobs.number(queue));
        }
    }

    /// Does what there is to do, `budget` messages or chunks at most, and no more than 0.2 ms of
    /// work: what takes longer goes on with the next call. What [`Device::begin_memory`],
    /// [`Device::begin_reset`] or [`Device::begin_freeze`] began comes first.
    ///
    /// Queues that had work are looked at again by each later call, without
    /// being kicked, until [`Device::arm`].
    pub fn run(&self, budget: u32) -> Next {
        lock(&self.scheduler).run(&self.guest, budget)
    }

    /// Prepares for sleep: asks the guest for kicks of every queue. `true`: work
    /// has come meanwhile, or there are many queues; call [`Device::run`] again. `false`: the thread may
    /// sleep until a kick, a [`Wake`](crate::Wake) or the time that `run` named.
    pub fn arm(&self) -> bool {
        lock(&self.scheduler).arm(&self.guest)
    }

    /// Handles one control request outside of the control queue: the bytes that
    /// the device reads, and room for those that it writes. Returns how many it
    /// wrote; 0 if there was no room for a status. The device is not frozen.
    pub fn command(&self, request: &[u8], reply: &mut [u8]) -> usize {
        lock(&self.scheduler).forget_watches();
        lock(&self.guest.control).command(self.hca(), request, reply)
    }

    /// Changes what the guest may do, while the device runs. Any thread may call it.
    ///
    /// An address of the GID table that the guest may not use any more is nobody's from now on: peers do not find it,
    /// and nothing is sent from it, as if the guest had removed it. The guest has it again, without adding it once
    /// more, as soon as a later policy allows it, unless another guest has it then. An address that another guest has
    /// stays that guest's, whatever this policy says.
    ///
    /// A quota below what the guest uses ends nothing; it counts for what the guest makes from now on. A rate counts at
    /// once, also for what waits, and classes of traffic count at once, also for connections that are there.
    pub fn set_policy(&self, policy: DevicePolicy) {
        let DevicePolicy { addresses, classes, quota } = policy;
        let hca = self.hca();
        hca.fabric.set_rights(hca, addresses);
        hca.review_gids();
        hca.classes.set(classes);
        hca.set_quota(quota);
    }

    /// Returns what the device tells of itself. Any thread may call it; it waits for a control command under way, and
    /// takes the locks of each QP and SRQ.
    pub fn status(&self) -> DeviceStatus {
        let (qps, srqs) = status::entries(self.hca());
        DeviceStatus { qps, srqs, ..self.summary() }
    }

    /// Returns the same without entries for single QPs and SRQs. Any thread may call it; it waits for a control command
    /// under way, and takes no lock of a queue.
    pub fn summary(&self) -> DeviceStatus {
        let started = self.started.load(Ordering::Acquire);
        status::of_guest(&self.guest, started)
    }

    /// Sets the observer of messages, in place of the one before; the observer chooses the QPs. Any thread may call
    /// this; it takes the locks of each QP. Without an observer, messages cost nothing more.
    pub fn set_observer(&self, observer: Option<Arc<dyn Observer>>) {
        self.hca().set_observer(observer);
    }

    /// Returns a counter's value.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.hca().stats.get(counter)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.reset();
    }
}

/// Returns the entries of the control queue of a device that offers virtqueues: two for a notification of each CQ, and
/// for another command (specification, Virtqueues for work: Virtqueues).
fn control_size(max_cq: u16) -> u16 {
    let needed = 2 * (u32::from(max_cq) + 1);
    u16::try_from(needed.next_power_of_two()).map_or(MAX_SIZE, |size| size.max(CONTROL_SIZE))
}

/// Returns a locally administered address, for a device without a network interface.
fn random_mac() -> [u8; 6] {
    let mut mac = [0; 6];
    // Without random numbers all such devices have one GUID, which only
    // management tools look at.
    let _ = getrandom::fill(&mut mac);
    mac[0] = mac[0] & 0xfe | 2;
    mac
}
