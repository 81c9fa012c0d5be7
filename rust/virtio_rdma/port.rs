// SPDX-License-Identifier: GPL-2.0

//! The port: its attributes, its GIDs and P_Keys, and the network interface
//! that it is paired with.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd::{
        self,
        Command, //
    },
    hca::Hca,
    ib,
    net::{
        self,
        NetDevice, //
    },
    stats::Counter,
    wire, //
};
use kernel::{
    device,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
};

/// The only port, counting from 1.
pub(crate) const PORT: u32 = bindings::VIRTIO_RDMA_PORT;

/// Asks the device for the attributes of a port. Values that make no sense are counted here, and corrected where
/// they are used.
fn query_device(hca: &Arc<Hca>, port: u32) -> Result<wire::PortAttr> {
    let request = bindings::virtio_rdma_cmd_query_port {
        port: u8::try_from(port)?,
    };
    let reply = hca.execute::<cmd::QueryPort>(&request)?;
    let mtus = bindings::ib_mtu_IB_MTU_256..=bindings::ib_mtu_IB_MTU_4096;
    if !mtus.contains(&u32::from(reply.max_mtu))
        || reply.gid_tbl_len == 0
        || reply.pkey_tbl_len == 0
    {
        hca.stats()
            .bad_reply(Counter::BadReplyValue, cmd::QueryPort::NAME);
    }
    Ok(reply)
}

/// Returns the MTU that both the device and the network interface have room for.
fn active_mtu(device: u8, netdev: Option<u32>) -> u32 {
    let device = u32::from(device).clamp(bindings::ib_mtu_IB_MTU_256, bindings::ib_mtu_IB_MTU_4096);
    netdev.map_or(device, |mtu| mtu.clamp(bindings::ib_mtu_IB_MTU_256, device))
}

/// Fills in the attributes of a port. The state is that of the network interface, unless the device
/// is down itself.
pub(crate) fn query(dev: &ib::Device<Hca>, port: u32, attr: &mut bindings::ib_port_attr) -> Result {
    let reply = query_device(dev.data(), port)?;
    let active = bindings::ib_port_state_IB_PORT_ACTIVE;
    let netdev = dev.with_netdev(|netdev| (netdev.port_state(), netdev.port_mtu()));
    let netdev_state = netdev.map_or(bindings::ib_port_state_IB_PORT_DOWN, |(state, _)| state);
    let up = u32::from(reply.state) == active && netdev_state == active;

    attr.state = if up {
        active
    } else {
        bindings::ib_port_state_IB_PORT_DOWN
    };
    attr.phys_state = if up {
        bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_LINK_UP as u8
    } else {
        bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_DISABLED as u8
    };
    attr.max_mtu = active_mtu(reply.max_mtu, None);
    attr.active_mtu = active_mtu(reply.max_mtu, netdev.map(|(_, mtu)| mtu));
    attr.phys_mtu = u32::from_le(reply.phys_mtu);
    attr.gid_tbl_len = gid_table_len(&reply);
    attr.set_ip_gids(1);
    attr.port_cap_flags = u32::from_le(reply.port_cap_flags) & bindings::VIRTIO_RDMA_PORT_CM_SUP;
    attr.max_msg_sz = u32::from_le(reply.max_msg_sz);
    attr.bad_pkey_cntr = u32::from_le(reply.bad_pkey_cntr);
    attr.qkey_viol_cntr = u32::from_le(reply.qkey_viol_cntr);
    attr.pkey_tbl_len = pkey_table_len(&reply);
    attr.active_width = reply.active_width;
    attr.active_speed = u16::from_le(reply.active_speed);
    attr.max_vl_num = 1;
    Ok(())
}

/// The most entries of a GID table: an index in an address vector has 8 bits.
const MAX_GIDS: u32 = 256;

fn gid_table_len(reply: &wire::PortAttr) -> c_int {
    u32::from_le(reply.gid_tbl_len).clamp(1, MAX_GIDS) as c_int
}

/// The most entries of a P_Key table. RoCE needs one, and the core reads them all, each by a
/// command, whenever something of the port changes.
const MAX_PKEYS: u16 = 128;

fn pkey_table_len(reply: &wire::PortAttr) -> u16 {
    u16::from_le(reply.pkey_tbl_len).clamp(1, MAX_PKEYS)
}

/// Fills in what never changes of a port.
pub(crate) fn immutable(
    dev: &ib::Device<Hca>,
    port: u32,
    attr: &mut bindings::ib_port_immutable,
) -> Result {
    let reply = query_device(dev.data(), port)?;

    attr.gid_tbl_len = gid_table_len(&reply);
    attr.pkey_tbl_len = c_int::from(pkey_table_len(&reply));
    attr.core_cap_flags = bindings::RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP
        | bindings::RDMA_CORE_CAP_IB_MAD
        | bindings::RDMA_CORE_CAP_IB_CM
        | bindings::RDMA_CORE_CAP_AF_IB
        | bindings::RDMA_CORE_CAP_ETH_AH;
    attr.max_mad_size = bindings::IB_MGMT_MAD_SIZE;
    Ok(())
}

/// Returns an entry of the P_Key table.
pub(crate) fn pkey(hca: &Arc<Hca>, port: u32, index: u16) -> Result<u16> {
    let request = bindings::virtio_rdma_cmd_query_pkey {
        port: port.to_le(),
        index: index.to_le(),
        reserved_06: 0,
    };
    Ok(u16::from_le(hca.execute::<cmd::QueryPkey>(&request)?.pkey))
}

/// Returns the number of the VLAN that a GID belongs to, as the device gets it.
fn vlan_of(hca: &Hca, gid: &ib::GidAttr<'_>) -> Result<u16> {
    if !hca.config().vlan {
        return Ok(0);
    }
    Ok(gid
        .vlan_id()?
        .unwrap_or(bindings::VIRTIO_RDMA_NO_VLAN as u16))
}

/// Tells the device a GID.
pub(crate) fn add_gid(hca: &Arc<Hca>, gid: &ib::GidAttr<'_>) -> Result {
    let request = bindings::virtio_rdma_cmd_add_gid {
        gid: gid.gid(),
        gid_type: gid.gid_type().to_le(),
        index: gid.index().to_le(),
        vlan_id: vlan_of(hca, gid)?.to_le(),
        port_num: gid.port().to_le(),
    };
    hca.execute::<cmd::AddGid>(&request).map(|_| ())
}

/// Takes a GID away from the device.
pub(crate) fn del_gid(hca: &Arc<Hca>, gid: &ib::GidAttr<'_>) -> Result {
    let request = bindings::virtio_rdma_cmd_del_gid {
        index: gid.index().to_le(),
        reserved_02: 0,
        port: gid.port().to_le(),
    };
    hca.execute::<cmd::DelGid>(&request).map(|_| ())
}

/// Pairs the port with a network interface: the one with the MAC address that the device names, or
/// else one in the same PCI slot.
pub(crate) struct Pairing {
    dev: Arc<ib::UnregisteredDevice<Hca>>,
    transport: ARef<device::Device>,
    /// The address of the paired interface's structure, which identifies it; 0 while the port is not paired.
    paired: Atomic<usize>,
}

impl Pairing {
    /// Makes the pairing of `dev`; `transport` is the virtio device.
    pub(crate) fn new(
        dev: Arc<ib::UnregisteredDevice<Hca>>,
        transport: ARef<device::Device>,
    ) -> Self {
        Self {
            dev,
            transport,
            paired: Atomic::new(0),
        }
    }

    fn matches(&self, netdev: &NetDevice) -> bool {
        let Some(mac) = self.dev.mac_of(netdev) else {
            return false;
        };
        match self.dev.config().mac {
            Some(wanted) => mac == wanted,
            None => netdev.is_pci_sibling(&self.transport),
        }
    }

    fn pair(&self, netdev: Option<&NetDevice>) {
        match self.dev.set_netdev(netdev) {
            Ok(()) => self
                .paired
                .store(netdev.map_or(0, |netdev| netdev.as_raw().addr()), Relaxed),
            Err(error) => dev_err!(
                self.transport,
                "cannot pair with a network interface: {:?}\n",
                error
            ),
        }
    }
}

impl net::Listener for Pairing {
    fn netdev_event(&self, event: net::Event, netdev: &NetDevice) {
        let paired = self.paired.load(Relaxed);
        let this = netdev.as_raw().addr();

        match event {
            net::Event::Present if paired == 0 && self.matches(netdev) => self.pair(Some(netdev)),
            net::Event::Gone if paired == this => self.pair(None),
            _ => {}
        }
    }
}
