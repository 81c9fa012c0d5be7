// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packets that arrive: the guest that each of them is for, and the QP.

use std::sync::Arc;

use roce::{Malformed, Opcode, Operation, Packet, Service};

use super::check::{check_partition, check_source, counter_of, source};
use super::{congestion, datagram, requester, responder, unreliable};
use crate::base::address::{is_multicast, Address, Gid};
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::queues::Jobs;
use crate::base::sync::lock;
use crate::transport::fabric_core::FabricCore;
use crate::transport::hca::Hca;
use crate::transport::round::Round;

/// Takes in a frame, as [`crate::Fabric::receive`]. Any thread.
pub(crate) fn receive(fabric: &FabricCore<Hca>, frame: &[u8], segment: u16) -> bool {
    let Some((gid, vlan)) = roce::destination(frame) else { return false };
    if is_multicast(&gid) {
        return receive_for_group(fabric, &gid, vlan, frame, segment);
    }
    find(fabric, gid, vlan, frame).is_some_and(|hca| put(&hca, frame, segment))
}

/// Returns the guest that a frame is for. A tag with the number 0 may tell of VLAN 0, or of a priority alone:
/// the guest with the frame's MAC address that has no address in VLAN 0 gets what is for its address in no VLAN.
fn find(fabric: &FabricCore<Hca>, gid: Gid, vlan: Option<u16>, frame: &[u8]) -> Option<Arc<Hca>> {
    let tagged = fabric.find(&Address { gid, vlan });
    if vlan != Some(0) {
        return tagged;
    }
    let untagged = fabric.find(&Address { gid, vlan: None });
    match untagged {
        Some(hca) if frame.starts_with(&hca.identity.mac()) && !hca.is_in_vlan(vlan) => Some(hca),
        untagged => tagged.or(untagged),
    }
}

/// Returns whether a guest has the address that a frame is sent to, as [`crate::Fabric::has_destination`].
pub(crate) fn has_destination(fabric: &FabricCore<Hca>, frame: &[u8]) -> bool {
    roce::destination(frame).is_some_and(|(gid, vlan)| find(fabric, gid, vlan, frame).is_some())
}

/// Puts a frame into the inbox of each guest in its VLAN that has a QP in this multicast group. Returns whether
/// one of them has room for it.
fn receive_for_group(
    fabric: &FabricCore<Hca>,
    group: &Gid,
    vlan: Option<u16>,
    frame: &[u8],
    segment: u16,
) -> bool {
    let Some(members) = fabric.group(group) else { return false };
    let mut guests: Vec<Arc<Hca>> = Vec::new();
    for hca in members.iter().filter_map(|member| member.device.upgrade()) {
        if !guests.iter().any(|guest| Arc::ptr_eq(guest, &hca))
            && (vlan == Some(0) || hca.is_in_vlan(vlan))
        {
            guests.push(hca);
        }
    }
    guests.iter().filter(|hca| put(hca, frame, segment)).count() != 0
}

/// Puts a frame into the inbox of a guest. Returns whether there is room for it.
fn put(hca: &Hca, frame: &[u8], segment: u16) -> bool {
    let (source, _) = roce::source(frame).unwrap_or_default();
    let has_room = lock(&hca.inbox).push(&source, frame, segment);
    if has_room {
        hca.make_ready(Jobs::WIRE);
    } else {
        hca.stats.add(Counter::DropInboxFull, 1);
    }
    has_room
}

/// Looks into frames until the budget is exhausted; whether some are left. Own thread only.
pub(crate) fn visit(hca: &Arc<Hca>, round: &mut Round) -> bool {
    let mut heap = lock(&hca.inbox).take();
    let mut peer = None;
    round.is_crowded = heap.is_crowded;
    while !round.budget.is_over() {
        let Some(frame) = heap.pop() else { break };
        round.budget.spend(frame.len() as u64);
        match decode(hca, frame) {
            Ok(packet) => {
                if let Err(counter) = arrive(hca, &packet, &mut peer, round) {
                    hca.stats.add(counter, 1);
                }
            }
            Err(malformed) => hca.stats.guest_error(counter_of(malformed), malformed),
        }
    }
    round.is_crowded = false;
    lock(&hca.inbox).put_back(heap)
}

/// Reads a frame. A tag with the number 0 says nothing to a guest that has no address in VLAN 0, as in Linux
/// (`vlan_do_receive()`).
#[inline]
fn decode<'a>(hca: &Hca, frame: &'a [u8]) -> Result<Packet<'a>, Malformed> {
    let mut packet = roce::decode(frame)?;
    let ethernet = &mut packet.headers.ethernet;
    if ethernet.vlan_id() == Some(0) && !hca.is_in_vlan(Some(0)) {
        ethernet.vlan = None;
    }
    Ok(packet)
}

/// Gives a packet to its QP, or to the QPs of its multicast group. Returns the counter of the reason if the packet is
/// dropped. `peer` is a source that passed [`check_source`] in this visit, which looks it up under a lock.
fn arrive(
    hca: &Arc<Hca>,
    packet: &Packet<'_>,
    peer: &mut Option<Address>,
    round: &mut Round,
) -> Result<(), Counter> {
    let bth = &packet.headers.bth;
    check_partition(&packet.headers)?;
    if is_multicast(&packet.headers.ip.destination_gid()) {
        return datagram::arrive_at_group(hca, packet, round);
    }
    let source = source(&packet.headers);
    if *peer != Some(source) {
        check_source(hca, &source)?;
        *peer = Some(source);
    }
    let slot = hca.slot_of(bth.dest_qp.get()).ok_or(Counter::DropNoQp)?;
    let is_answer = matches!(
        bth.opcode.operation(),
        Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::ReadResponse
    );
    match bth.opcode.service() {
        Service::Rc if is_answer => requester::arrive(hca, slot, &[QpType::Rc], packet, round),
        Service::Xrc if is_answer => requester::arrive(hca, slot, &[QpType::XrcIni], packet, round),
        Service::Manufacturer if bth.opcode == Opcode::SELECTIVE_OFFER => {
            responder::offered(hca, slot, packet)
        }
        Service::Manufacturer => {
            requester::arrive(hca, slot, &[QpType::Rc, QpType::XrcIni], packet, round)
        }
        Service::Rc => responder::arrive(hca, slot, QpType::Rc, packet, round),
        Service::Xrc => responder::arrive(hca, slot, QpType::XrcTgt, packet, round),
        Service::Uc => unreliable::arrive(hca, slot, packet, round),
        Service::Ud => datagram::arrive(hca, slot, packet, round),
        Service::Cnp => {
            congestion::arrive(hca, slot, packet);
            Ok(())
        }
    }
}
