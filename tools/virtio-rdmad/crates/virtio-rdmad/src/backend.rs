// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's [`Device`] as its transport sees it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use engine::Device;
use memory::{GuestMemory, Policy};
use ring::{Layout, SplitQueue};

use crate::guest::Guest;
use crate::poller::{Poller, Source};

/// Joins device, transport and poller of one connection.
pub struct Backend {
    guest: Arc<Guest>,
    device: Arc<Device>,
    poller: Arc<Poller>,
    config: [u8; 256],
    /// What is watched for kicks, with vhost-user.
    kicks: Vec<OwnedFd>,
    started: bool,
}

impl Backend {
    /// For a connection that begins.
    pub fn new(guest: &Arc<Guest>, poller: &Arc<Poller>) -> Self {
        let (guest, device, poller) = (guest.clone(), guest.device.clone(), poller.clone());
        let config = device.config_space();
        Self { guest, device, poller, config, kicks: Vec::new(), started: false }
    }

    /// Takes the features that the driver agreed on.
    fn set_features(&self, features: u64) {
        let rings = features & 1 << abi::VIRTIO_RDMA_F_RINGS != 0;
        self.guest.rings.store(rings, Ordering::Relaxed);
        self.device.set_driver_features(features);
    }

    /// Begins the end of the device's life. Guest memory is not touched any more when the device is
    /// settled.
    pub fn reset(&mut self) {
        for kick in self.kicks.drain(..) {
            self.poller.remove(&kick);
        }
        self.device.begin_reset();
        if std::mem::take(&mut self.started) {
            tracing::info!("the device is reset");
        }
    }

    fn mark_started(&mut self) {
        if !std::mem::replace(&mut self.started, true) {
            tracing::info!("the driver starts the device");
        }
    }
}

impl Drop for Backend {
    /// Where a connection ends in order, the reset has come to its end before.
    fn drop(&mut self) {
        self.reset();
        self.device.settle();
    }
}

impl vhost_user::Backend for Backend {
    fn memory_policy(&self) -> Policy {
        self.guest.memory
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn set_features(&mut self, features: u64) {
        Backend::set_features(self, features);
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.device.queue_count()
    }

    fn start_queue(&mut self, queue: u16, setup: vhost_user::QueueSetup) -> Result<(), String> {
        let vhost_user::QueueSetup { memory, layout, base, kick, signal } = setup;
        check_memory(&memory)?;
        let ring = SplitQueue::new(&memory, layout, base).map_err(|error| error.to_string())?;
        let watched = self.poller.add(kick.as_fd(), Source::Kick(self.guest.index, queue));
        watched.map_err(|error| format!("its kick cannot be waited for: {error}"))?;
        self.kicks.push(kick);
        if !self.started {
            self.device.start(&memory, []);
        }
        self.mark_started();
        self.device.set_queue(queue, ring, Arc::new(VhostUserSignal(signal)));
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.device.begin_memory(memory);
    }

    fn is_settled(&self) -> bool {
        self.device.is_settled()
    }

    fn reset(&mut self) {
        Backend::reset(self);
    }
}

impl vfio_user::Backend for Backend {
    fn memory_policy(&self) -> Policy {
        self.guest.memory
    }

    fn features(&self) -> u64 {
        self.device.features()
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

    fn start(&mut self, setup: vfio_user::Setup) -> Result<(), String> {
        let vfio_user::Setup { features, memory, queues } = setup;
        check_memory(&memory)?;
        self.set_features(features);
        let mut started: Vec<(u16, SplitQueue, Arc<dyn engine::Signal>)> = Vec::new();
        for (index, queue) in (0..).zip(queues) {
            let Some(vfio_user::QueueSetup { size, desc, avail, used, signal }) = queue else {
                continue;
            };
            let layout = Layout { size, desc, avail, used, event_idx: false };
            let ring = SplitQueue::new(&memory, layout, 0);
            let ring = ring.map_err(|error| format!("queue {index}: {error}"))?;
            started.push((index, ring, Arc::new(VfioUserSignal(signal))));
        }
        self.device.start(&memory, started);
        self.mark_started();
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.device.begin_memory(memory);
    }

    fn is_settled(&self) -> bool {
        self.device.is_settled()
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn reset(&mut self) {
        Backend::reset(self);
    }
}

/// Refuses memory of which the guest sees something else than the device.
fn check_memory(memory: &GuestMemory) -> Result<(), String> {
    if memory.is_damaged() {
        return Err("memory of the guest was lost, and has not been mapped again since".to_owned());
    }
    Ok(())
}

struct VhostUserSignal(Arc<vhost_user::Signal>);

impl engine::Signal for VhostUserSignal {
    fn signal(&self) {
        self.0.signal();
    }
}

struct VfioUserSignal(Arc<vfio_user::Signal>);

impl engine::Signal for VfioUserSignal {
    fn signal(&self) {
        self.0.signal();
    }
}
