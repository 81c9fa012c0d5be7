// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The local path: how a message reaches a QP of the same daemon, whose memory is copied to directly.

use std::sync::{Arc, MutexGuard};

use super::hca::{Hca, Peer, RequesterHalf, Responder, ResponderHalf};
use super::message::Nak;
use super::responder::Arrival;
use super::xrc;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::qp::halves::Requester;

/// Sets the HCA and the place of the other end, to `None` unless an HCA with the destination GID is in
/// this network.
#[inline]
pub(crate) fn find_peer(hca: &Arc<Hca>, half: &mut RequesterHalf) {
    let generation = hca.fabric.generation();
    if half.peer.as_ref().is_none_or(|peer| peer.generation != generation) {
        find_peer_again(hca, half, generation);
    }
}

/// Follows a change of addresses: mostly those of others.
#[cold]
fn find_peer_again(hca: &Arc<Hca>, half: &mut RequesterHalf, generation: u64) {
    match &mut half.peer {
        Some(peer) if peer.is_there() => peer.generation = generation,
        _ => half.peer = look_up_peer(hca, half, generation),
    }
}

fn look_up_peer(hca: &Arc<Hca>, requester: &mut Requester, generation: u64) -> Option<Peer> {
    let attr = &requester.attr;
    // A device sends from no GID but its own.
    let (own, own_tenure) = hca.fabric.find_owner(&requester.source)?;
    if !Arc::ptr_eq(&own, hca) {
        return None;
    }
    let target = requester.source.beside(attr.ah_attr.grh.dgid);
    let (device, tenure) = hca.fabric.find_owner(&target)?;
    if !requester.partner.is(device.identity.id()) {
        return None;
    }
    let slot = device.slot_of(attr.dest_qp_num)?;
    Some(Peer { device, slot, generation, tenures: [own_tenure, tenure] })
}

/// The reason why a message does not get to the responder of the other end.
pub(crate) enum NoResponder {
    /// There is no QP that is ready to receive, is connected to the requester's, and expects its message.
    Absent,
    /// The guest of the other end is frozen. Its thread has the requester visited when it is not any more, or when
    /// the connection ends.
    Frozen,
}

/// Locks the responder of the other end, if it is ready to receive, is connected to the QP in place `slot`,
/// of this type, and expects its message.
#[inline(always)]
pub(crate) fn lock_responder<'a>(
    hca: &Arc<Hca>,
    slot: Slot,
    kind: QpType,
    requester: &Requester,
    peer: &'a Peer,
) -> Result<MutexGuard<'a, ResponderHalf>, NoResponder> {
    let remote = peer.device.qps.get(peer.slot).ok_or(NoResponder::Absent)?;
    let mut responder = lock(&remote.responder);
    let dgid = &requester.attr.ah_attr.grh.dgid;
    if !remote.state().receives() || !responder.is_connected_to(kind, &requester.source, slot, dgid)
    {
        return Err(NoResponder::Absent);
    }
    if !responder.partner.is(hca.identity.id()) {
        return Err(NoResponder::Absent);
    }
    if peer.device.is_frozen() {
        responder.waiter = Some((Arc::clone(hca), slot));
        return Err(NoResponder::Frozen);
    }
    if !expects(&mut responder, requester, kind) {
        return Err(NoResponder::Absent);
    }
    Ok(responder)
}

/// Returns whether the message under way is the one that the responder expects, by its PSN. On a
/// reliable connection any other gets nowhere, however often it is retried (IBA 9.7.4.1). On an
/// unreliable one the first packet of a message sets what is expected (IBA 9.8.2.2).
///
/// Both sides count the packets of a message when all of it is done, so that each message behind it
/// is expected as well.
#[inline]
fn expects(responder: &mut Responder, requester: &Requester, kind: QpType) -> bool {
    let psn = requester.sq_psn();
    if responder.expected.psn == psn {
        return true;
    }
    if kind != QpType::Uc || requester.done != 0 {
        return false;
    }
    responder.expected.psn = psn;
    true
}

/// Makes the responder carry out a chunk of a message that a QP of type `kind` sends. `waiter` is the HCA and the place
/// of that QP, should it have to wait for a receive.
#[inline(always)]
pub(crate) fn deliver(
    arrival: &mut Arrival<'_, '_>,
    kind: QpType,
    waiter: (&Arc<Hca>, Slot),
) -> Result<(), Nak> {
    match kind {
        QpType::XrcIni => xrc::respond(arrival, waiter),
        _ => arrival.respond(Some(waiter)),
    }
}
