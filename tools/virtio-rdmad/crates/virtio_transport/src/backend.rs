// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtio device behind a connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::{GuestMemory, Share};
use ring::{Layout, Signal};

/// A virtqueue that the driver has set up and enabled.
pub struct QueueSetup {
    /// The number of the queue.
    pub index: u16,
    /// The layout of the queue, in guest addresses.
    pub layout: Layout,
    /// The available index that the device begins at.
    pub base: u16,
    /// Becomes readable when the driver has made buffers available. The VMM and the guest
    /// write to this eventfd: watch it edge-triggered and never read it. `None` where the VMM
    /// sends kicks as messages; the server then calls [`Backend::kick`].
    pub kick: Option<Arc<OwnedFd>>,
    /// Interrupts the guest.
    pub signal: Arc<dyn Signal>,
}

/// Something that a driver does and that its transport handles by itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Deed {
    /// It reads bytes of the device-specific configuration space.
    ReadConfig {
        /// The first byte.
        offset: usize,
        /// The number of bytes.
        len: usize,
    },
    /// It reads the device status.
    ReadStatus(u8),
    /// It writes the device status.
    WriteStatus {
        /// The status that it writes, which need not be the one that the device then has.
        status: u8,
        /// The feature bits that it has accepted so far, those of the transport among them.
        features: u64,
    },
    /// It enables a queue.
    EnableQueue(u16),
    /// Its VMM resets the device.
    Reset,
}

/// A virtio device, as its transport sees it. Nothing here may wait for a guest or a VMM.
pub trait Backend {
    /// Returns the device-specific feature bits that the device has; the transport adds its own.
    fn features(&self) -> u64;

    /// Returns those of [`Self::features`] that a driver is offered. A driver to which another process has offered the
    /// others may use them.
    fn offered(&self) -> u64 {
        self.features()
    }

    /// Returns whether the driver may accept these of the bits that it is offered, those of the transport among them.
    /// With vhost-user a device cannot tell: it has to do without the bits that make no sense.
    fn accepts(&self, features: u64) -> bool {
        let _ = features;
        true
    }

    /// Returns the device status that a driver reads which finds this one. It is another one only where a device of
    /// tests misbehaves, and only where the driver reads the status from the device.
    fn shown_status(&self, status: u8) -> u8 {
        status
    }

    /// Takes the feature bits that the driver has agreed on, before the first queue starts. A reset that is not done
    /// comes to its end before.
    fn set_features(&mut self, features: u64);

    /// Learns what the driver does at the transport, as far as the protocol has it: with vhost-user, the VMM reads the
    /// configuration space for the driver and enables all queues, and need not pass the status on.
    fn note(&mut self, deed: Deed) {
        let _ = deed;
    }

    /// Returns the device-specific configuration space.
    fn config(&self) -> &[u8];

    /// Returns the number of virtqueues, which is at most the `MAX_QUEUES` of the transport.
    fn queue_count(&self) -> u16;

    /// Returns the largest ring size of a queue, a power of two. With vhost-user the VMM does
    /// not ask for it.
    fn queue_max_size(&self, queue: u16) -> u16;

    /// Returns the share that the guest has of the regions of memory that the process can map.
    fn memory_share(&self) -> Share {
        Share::default()
    }

    /// Starts queues. The first call begins the device's life, which lasts until the reset. With
    /// vfio-user it has all queues that the driver enabled, perhaps none; with vhost-user each call
    /// has one.
    ///
    /// On an error the text says why the device cannot serve these queues; no queue of the call has
    /// started then.
    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String>;

    /// Takes the guest's new memory map. The device does not touch what the old map had and the new
    /// one lacks any more once the backend [is settled](Self::is_settled). The server calls this
    /// for a device that has started.
    fn set_memory(&mut self, memory: &GuestMemory);

    /// Makes a device fail that another process served, and whose state ended with that process: the driver is told, as
    /// far as the device can do that by itself, that it must reset the device. `queues` are those that run, as in
    /// [`Self::start`]; the device goes on where the used ring ends, and touches no other memory. The reset comes as
    /// that of a device that has started.
    ///
    /// The server calls this where the protocol has no way to tell the driver.
    fn fail(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        let _ = (memory, queues);
        Ok(())
    }

    /// Pauses the device, which has started, because its VMM has stopped it. Once the backend [is
    /// settled](Self::is_settled), the device does not touch guest memory until [`Self::thaw`]. It keeps all that the
    /// driver made, and its peers wait. A change of memory, and a reset, may come meanwhile.
    ///
    /// Only called if the protocol pauses devices ([`Protocol::is_paused`](crate::Protocol::is_paused)). A front end
    /// that has no message for a reset pauses the device and frees the memory of its queues, so a device that goes on
    /// here writes to memory that has another owner.
    fn freeze(&mut self);

    /// Lets the paused device go on. `queues` are all that have started since the reset, and their kicks may be others
    /// than before.
    ///
    /// On an error the text says why the device stays paused.
    fn thaw(&mut self, queues: Vec<QueueSetup>) -> Result<(), String>;

    /// Learns from a message that the driver has made buffers available in a queue that runs.
    fn kick(&mut self, queue: u16);

    /// Resets the device, which has started. The device does not touch guest memory any more, and
    /// no queue runs, once the backend [is settled](Self::is_settled).
    fn reset(&mut self);

    /// Returns whether the last [`Self::set_memory`], [`Self::freeze`] or [`Self::reset`] is done. Until then the VMM
    /// gets no reply, and the server calls nothing else but [`Self::start`] for the message that has reset the device.
    fn is_settled(&self) -> bool {
        true
    }
}
