// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The fabric of a network: the public face of [`FabricCore`].

use std::sync::Arc;

use memory::Helpers;

use crate::base::address::Address;
use crate::base::host::{system_random, Clock, SystemClock, Uplink};
use crate::base::port::PortState;
use crate::base::queues::Queue;
use crate::config::DeviceConfig;
use crate::device::Device;
use crate::transport::fabric_core::FabricCore;
use crate::transport::hca::Hca;
use crate::transport::wire::inbox;

/// The parameters of a new fabric.
pub struct FabricConfig {
    /// The name of the network, for logs.
    pub name: String,
    /// The clock of all devices.
    pub clock: Arc<dyn Clock>,
    /// The way to other hosts, if there is one.
    pub uplink: Option<Arc<dyn Uplink>>,
    /// Returns a random number, so that tests have their own.
    pub random: fn() -> u64,
    /// The threads that help each other with large copies, if there are several.
    pub helpers: Option<Arc<Helpers>>,
}

impl Default for FabricConfig {
    fn default() -> Self {
        let (name, clock) = ("default".into(), Arc::new(SystemClock));
        Self { name, clock, uplink: None, random: system_random, helpers: None }
    }
}

/// A fabric: the RDMA devices of the guests of one network, which reach each other by address.
pub struct Fabric {
    name: String,
    core: Arc<FabricCore<Hca>>,
}

impl Fabric {
    /// Returns a fabric without devices.
    pub fn new(config: FabricConfig) -> Arc<Self> {
        let FabricConfig { name, clock, uplink, random, helpers } = config;
        let core = Arc::new(FabricCore::new(clock, uplink, random, helpers));
        Arc::new(Self { name, core })
    }

    /// Returns the network's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the part in which the devices find each other.
    #[cfg(test)]
    pub(crate) fn core(&self) -> &FabricCore<Hca> {
        &self.core
    }

    /// Takes in a frame of RoCE v2 that came over the uplink: a packet, or a train of packets whose
    /// segments have `segment` bytes; 0 stands for a packet. The thread of the guest that it is for looks
    /// into it. Returns whether a guest has the address that it is sent to, and room for it.
    pub fn receive(&self, frame: &[u8], segment: u16) -> bool {
        inbox::receive(&self.core, frame, segment)
    }

    /// Returns whether a frame is a packet of RoCE v2, as far as its headers up to UDP tell, that is sent to
    /// the address of a guest.
    pub fn has_destination(&self, frame: &[u8]) -> bool {
        inbox::has_destination(&self.core, frame)
    }

    /// Returns whether a frame that the guest with this MAC address sent by its own interface may go to devices. A
    /// packet of RoCE v2 may if it comes from an address that is listed for the guest or made from its MAC address:
    /// another one may be that of a peer, for whom the guest must not speak. Any other frame is none for devices.
    pub fn may_send(&self, mac: [u8; 6], frame: &[u8]) -> bool {
        // A tag with the number 0 tells of a priority alone.
        let address = |gid, vlan: Option<u16>| Address { gid, vlan: vlan.filter(|it| *it != 0) };
        roce::source(frame).is_none_or(|(gid, vlan)| self.core.is_of(mac, &address(gid, vlan)))
    }

    /// Says whether the port of each device is active, or down because other hosts are not reached. An event tells each
    /// guest of a change, and of the first call. Before that the ports are active. Messages go in any case. Any thread may
    /// call this.
    pub fn set_port(&self, is_active: bool) {
        let state = if is_active { PortState::Active } else { PortState::Down };
        self.core.set_port_state(state, |hca| hca.make_ready(hca.jobs.number(Queue::Event)));
    }

    /// Adds a guest's device. It leaves when the last handle to it is dropped.
    pub fn add_device(&self, config: DeviceConfig) -> Arc<Device> {
        Arc::new(Device::new(&self.core, config))
    }
}
