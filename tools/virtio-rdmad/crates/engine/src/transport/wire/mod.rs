// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The wire: how a message reaches a QP of another host, in packets of RoCE v2.
//!
//! A QP is on the wire if no guest of this network had the address of its peer when it was connected, and none
//! has it when the QP sends first, and there is an uplink. It stays on its path until it is connected again. A
//! datagram for a multicast group goes over the wire besides to the members in this network.
//!
//! What work requests ask for and do is the same as on the [local path](super::local): packets are chunks
//! of a [message](super::message::Message), and the [responder](super::responder) does what they ask for.
//! Here are the packets, their sequence numbers, and what becomes of them when some are lost.

mod check;
mod congestion;
pub(crate) mod datagram;
pub(crate) mod inbox;
pub(crate) mod mirror;
pub(crate) mod outbox;
mod path;
pub(crate) mod requester;
pub(crate) mod responder;
mod unreliable;

use roce::Service;

use super::hca::Hca;
use crate::base::address::{ipv4, is_multicast, Address, Gid};
use crate::base::qp_type::QpType;

/// Returns the transport service of the packets of a QP.
fn service(kind: QpType) -> Service {
    match kind {
        QpType::Rc => Service::Rc,
        QpType::Uc => Service::Uc,
        QpType::Ud | QpType::Gsi => Service::Ud,
        QpType::XrcIni | QpType::XrcTgt => Service::Xrc,
    }
}

/// Returns whether messages from an address of an HCA to another address go over the wire: no guest of this
/// network has that, and there is an uplink.
#[inline]
pub(crate) fn is_away(hca: &Hca, source: &Address, dgid: &Gid) -> bool {
    hca.fabric.uplink().is_some() && is_elsewhere(hca, source, dgid)
}

fn is_elsewhere(hca: &Hca, source: &Address, dgid: &Gid) -> bool {
    !is_multicast(dgid) && may_send(hca, source, dgid) && !hca.fabric.has(&source.beside(*dgid))
}

/// Returns whether datagrams from an address of an HCA to a multicast group go over the wire, besides to the
/// members in this network: there is an uplink.
pub(crate) fn is_group_away(hca: &Hca, source: &Address, group: &Gid) -> bool {
    hca.fabric.uplink().is_some() && may_send(hca, source, group)
}

/// Returns whether an HCA may send packets with these addresses. An HCA sends from no GID but its own, and
/// both addresses of a packet are of one family.
fn may_send(hca: &Hca, source: &Address, dgid: &Gid) -> bool {
    hca.fabric.is_owner(source, hca) && ipv4(dgid).is_some() == ipv4(&source.gid).is_some()
}
