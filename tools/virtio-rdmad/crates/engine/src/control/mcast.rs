// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Multicast groups: who is attached to which (IBA 10.5).

use std::collections::HashMap;
use std::sync::Arc;

use abi::virtio_rdma_cmd_mcast;

use crate::base::sync::lock;
use crate::control::queue::{Control, Status};
use crate::device::Shared;
use crate::qp::state::QpType;
use crate::Gid;

/// The attachments of one device.
#[derive(Default)]
pub(crate) struct Attachments {
    /// How many QPs are attached to each group.
    by_group: HashMap<Gid, u32>,
    total: u32,
}

impl Attachments {
    /// How many QPs are attached to a group.
    fn of(&self, gid: &Gid) -> u32 {
        self.by_group.get(gid).copied().unwrap_or(0)
    }

    fn add(&mut self, gid: Gid) {
        *self.by_group.entry(gid).or_insert(0) += 1;
        self.total += 1;
    }

    fn remove(&mut self, gid: &Gid) {
        if let Some(count) = self.by_group.get_mut(gid) {
            *count -= 1;
            self.total -= 1;
            if *count == 0 {
                self.by_group.remove(gid);
            }
        }
    }
}

/// Whether a GID is that of a multicast group: ff00::/8, or an IPv4 group
/// (224.0.0.0/4) mapped into IPv6.
pub(crate) fn is_multicast(gid: &Gid) -> bool {
    gid[0] == 0xff
        || crate::transport::datagram::ipv4(gid).is_some_and(|address| address[0] >> 4 == 0xe)
}

impl Shared {
    /// Handles ATTACH_MCAST. A QP that is attached already stays so.
    pub(crate) fn attach_mcast(
        self: &Arc<Self>,
        control: &mut Control,
        request: &virtio_rdma_cmd_mcast,
    ) -> Result<(), Status> {
        let gid = request.gid;
        let slot = self.slot_of(request.qpn).ok_or(Status::NoObject)?;
        let qp = self.qps.get(slot).ok_or(Status::NoObject)?;
        let mut responder = lock(&qp.responder);
        let config = responder.config.ok_or(Status::NoObject)?;
        if config.kind != QpType::Ud || !is_multicast(&gid) || request.lid != 0 {
            return Err(Status::Invalid);
        }
        if responder.groups.contains(&gid) {
            return Ok(());
        }
        let (attached, limits) = (&control.attachments, &self.limits);
        let members = attached.of(&gid);
        let groups = u32::try_from(attached.by_group.len()).unwrap_or(u32::MAX);
        if members >= limits.max_mcast_qp_attach
            || attached.total >= limits.max_mcast_attach
            || members == 0 && groups >= limits.max_mcast_grp
        {
            return Err(Status::NoResource);
        }
        control.attachments.add(gid);
        responder.groups.push(gid);
        drop(responder);
        self.fabric.join(gid, self, slot);
        Ok(())
    }

    /// Handles DETACH_MCAST. Nothing that is sent to the group arrives at the QP
    /// after the reply.
    pub(crate) fn detach_mcast(
        self: &Arc<Self>,
        control: &mut Control,
        request: &virtio_rdma_cmd_mcast,
    ) -> Result<(), Status> {
        let gid = request.gid;
        let slot = self.slot_of(request.qpn).ok_or(Status::NoObject)?;
        let qp = self.qps.get(slot).ok_or(Status::NoObject)?;
        let mut responder = lock(&qp.responder);
        let at = responder.groups.iter().position(|group| *group == gid);
        responder.groups.swap_remove(at.ok_or(Status::NoObject)?);
        drop(responder);
        control.attachments.remove(&gid);
        self.fabric.leave(&gid, self, slot);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_from_hosts() {
        let mapped = |address: [u8; 4]| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&address);
            gid
        };
        let mut six = [0; 16];
        (six[0], six[1]) = (0xff, 0x0e);
        assert!(is_multicast(&six));
        assert!(is_multicast(&mapped([224, 0, 0, 1])) && is_multicast(&mapped([239, 255, 1, 2])));
        assert!(!is_multicast(&mapped([223, 0, 0, 1])) && !is_multicast(&mapped([240, 0, 0, 1])));
        six[0] = 0xfe;
        assert!(!is_multicast(&six));
    }
}
