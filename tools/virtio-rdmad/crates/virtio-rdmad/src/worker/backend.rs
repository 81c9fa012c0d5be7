// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's [`Device`], as its transport sees it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use engine::Device;
use memory::{GuestMemory, Share};
use ring::{Layout, SplitQueue};
use virtio_transport::{Backend, QueueSetup};

use super::poller::{Poller, Source};
use crate::guest::events::Event;
use crate::guest::Guest;

/// Joins the device, the transport and the poller of one connection.
pub struct GuestBackend {
    guest: Arc<Guest>,
    device: Arc<Device>,
    poller: Arc<Poller>,
    config: [u8; 256],
    /// The descriptors that the poller watches for kicks, and their queues; the transport brings the kicks of other
    /// queues.
    kicks: Vec<(u16, Arc<OwnedFd>)>,
    started: bool,
    /// The layout of the first virtqueue, as far as the driver has set it up.
    first: Option<Layout>,
}

impl GuestBackend {
    /// Makes the backend of a connection that begins.
    pub fn new(guest: &Arc<Guest>, poller: &Arc<Poller>) -> Self {
        let (guest, device, poller) = (guest.clone(), guest.device.clone(), poller.clone());
        let config = device.config_space();
        Self { guest, device, poller, config, kicks: Vec::new(), started: false, first: None }
    }

    /// Goes on with a device that another process has served, on which these queues run.
    pub fn go_on(&mut self, features: u64, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.set_features(features);
        self.started = !queues.is_empty();
        queues.into_iter().try_for_each(|queue| self.watch(queue.index, queue.kick))
    }

    /// Notes the NUMA node of the guest's memory: that of the available ring of the first virtqueue, which the driver
    /// writes. Reads a byte of it, because the kernel tells the node of a page only to a process that has accessed it.
    pub fn locate(&mut self, memory: &GuestMemory, queue: u16, layout: &Layout) {
        if queue != 0 {
            return;
        }
        self.first = Some(*layout);
        // The memory of a frozen device is not read. What it goes on in may lie elsewhere.
        let ring = memory.slice(layout.avail, 1).ok().filter(|_| !self.device.is_frozen());
        let ring = ring.filter(|ring| ring.read(0, &mut [0]).is_ok());
        self.guest.set_node(ring.and_then(|ring| ring.node()));
    }

    /// Returns whether the driver has started the device, and nobody has reset it since.
    pub fn is_started(&self) -> bool {
        self.started
    }

    /// Adds the kick of a queue to the poller, if the kick is a descriptor.
    fn watch(&mut self, queue: u16, kick: Option<Arc<OwnedFd>>) -> Result<(), String> {
        let Some(kick) = kick else { return Ok(()) };
        let watched = self.poller.add(kick.as_fd(), Source::Kick(self.guest.index, queue));
        watched
            .map_err(|error| format!("queue {queue}: its kick cannot be waited for: {error}"))?;
        self.kicks.push((queue, kick));
        Ok(())
    }

    /// Removes all kicks from the poller, for good.
    fn forget_kicks(&mut self) {
        self.detach();
        self.kicks.clear();
    }

    /// Removes all kicks from the poller until [`Self::attach`].
    pub fn detach(&self) {
        for (_, kick) in &self.kicks {
            self.poller.remove(kick);
        }
    }

    /// Adds all kicks to this poller, which also reports those that came meanwhile.
    pub fn attach(&mut self, poller: &Arc<Poller>) -> Result<(), String> {
        self.poller = poller.clone();
        let kicks = std::mem::take(&mut self.kicks);
        kicks.into_iter().try_for_each(|(queue, kick)| self.watch(queue, Some(kick)))
    }
}

impl Drop for GuestBackend {
    /// Resets the device. If the connection has ended in order, the reset was done before.
    fn drop(&mut self) {
        self.reset();
        self.device.settle();
    }
}

impl Backend for GuestBackend {
    fn memory_share(&self) -> Share {
        self.guest.memory.clone()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn offered(&self) -> u64 {
        self.features() & !self.guest.withheld
    }

    fn accepts(&self, features: u64) -> bool {
        abi::is_agreement(features)
    }

    fn set_features(&mut self, features: u64) {
        let features = abi::closed(features);
        self.device.settle();
        let rings = features & 1 << abi::VIRTIO_RDMA_F_RINGS != 0;
        self.guest.rings.store(rings, Ordering::Relaxed);
        self.device.set_driver_features(features);
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.device.queue_count()
    }

    fn queue_max_size(&self, queue: u16) -> u16 {
        self.device.queue_max_size(queue)
    }

    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        if memory.is_damaged() {
            return Err("memory of the guest was lost, and was not mapped again since".to_owned());
        }
        let mut ready = Vec::with_capacity(queues.len());
        for QueueSetup { index, layout, base, kick, signal } in queues {
            let ring = SplitQueue::new(memory, layout, base);
            let ring = ring.map_err(|error| format!("queue {index}: {error}"))?;
            self.watch(index, kick)?;
            self.locate(memory, index, &layout);
            ready.push((index, ring, signal));
        }
        if !std::mem::replace(&mut self.started, true) {
            self.device.start(memory, []);
            tracing::info!("the driver starts the device");
            self.guest.link.tell(Event::Started);
        }
        for (index, ring, signal) in ready {
            self.device.set_queue(index, ring, signal);
        }
        Ok(())
    }

    fn fail(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.started = true;
        self.device.start(memory, []);
        self.device.fail();
        let events = self.device.event_queue();
        let Some(queue) = queues.into_iter().find(|queue| Some(queue.index) == events) else {
            return Ok(());
        };
        let ring = SplitQueue::new(memory, queue.layout, queue.base);
        let ring = ring.map_err(|error| format!("queue {}: {error}", queue.index))?;
        self.watch(queue.index, queue.kick)?;
        self.device.set_queue(queue.index, ring, queue.signal);
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.device.begin_memory(memory);
        if let Some(layout) = self.first {
            self.locate(memory, 0, &layout);
        }
    }

    fn freeze(&mut self) {
        self.forget_kicks();
        self.device.begin_freeze();
        tracing::info!("the VMM pauses the device");
    }

    fn thaw(&mut self, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.forget_kicks();
        queues.into_iter().try_for_each(|queue| self.watch(queue.index, queue.kick))?;
        self.device.thaw();
        tracing::info!("the VMM lets the device go on");
        Ok(())
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn reset(&mut self) {
        self.forget_kicks();
        self.device.begin_reset();
        self.first = None;
        if std::mem::take(&mut self.started) {
            tracing::info!("the device is reset");
            self.guest.link.tell(Event::Reset);
        }
    }

    fn is_settled(&self) -> bool {
        self.device.is_settled()
    }
}
