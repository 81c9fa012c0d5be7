// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The GID table.

use std::net::Ipv6Addr;

use abi::{
    virtio_rdma_cmd_add_gid, virtio_rdma_cmd_del_gid, VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP,
    VIRTIO_RDMA_NO_VLAN, VIRTIO_RDMA_PORT,
};

use super::call::Call;
use super::status::Status;
use crate::base::address::{is_multicast, Address};
use crate::base::counters::Counter;
use crate::base::features::Features;
use crate::transport::hca::GidError;

/// The `vlan_id` of a GID that belongs to no VLAN.
const NO_VLAN: u16 = VIRTIO_RDMA_NO_VLAN as u16;
/// Largest number of a VLAN (IEEE 802.1Q, 9.6).
const MAX_VLAN: u16 = 4094;

/// Handles ADD_GID.
pub(super) fn add(call: &mut Call<'_>, request: &virtio_rdma_cmd_add_gid) -> Result<(), Status> {
    let hca = call.hca;
    let known = request.gid_type == VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP;
    let unicast = request.gid != [0; 16] && !is_multicast(&request.gid);
    if !known || !unicast || request.port_num != VIRTIO_RDMA_PORT {
        return Err(Status::Invalid);
    }
    let address = Address { gid: request.gid, vlan: vlan_of(&hca.features, request)? };
    hca.add_gid(request.index.into(), address).map_err(|error| {
        if error == GidError::Forbidden {
            let gid = Ipv6Addr::from(address.gid);
            let counter = Counter::ForeignAddress;
            match address.vlan {
                None => hca.stats.guest_error(counter, format_args!("GID {gid}")),
                Some(vlan) => {
                    hca.stats.guest_error(counter, format_args!("GID {gid} in VLAN {vlan}"));
                }
            }
        }
        status_of(error)
    })
}

/// Returns the status of a command that fails with this error.
fn status_of(error: GidError) -> Status {
    match error {
        GidError::NoEntry => Status::Invalid,
        GidError::Forbidden => Status::Permission,
        GidError::Taken => Status::Exists,
    }
}

/// Returns the VLAN that a GID belongs to.
fn vlan_of(features: &Features, request: &virtio_rdma_cmd_add_gid) -> Result<Option<u16>, Status> {
    match request.vlan_id {
        _ if !features.has_vlans() => Ok(None),
        NO_VLAN => Ok(None),
        vlan if vlan <= MAX_VLAN => Ok(Some(vlan)),
        _ => Err(Status::Invalid),
    }
}

/// Handles DEL_GID.
pub(super) fn del(call: &mut Call<'_>, request: &virtio_rdma_cmd_del_gid) -> Result<(), Status> {
    if request.port != VIRTIO_RDMA_PORT {
        return Err(Status::Invalid);
    }
    call.hca.del_gid(request.index.into()).map_err(status_of)
}
