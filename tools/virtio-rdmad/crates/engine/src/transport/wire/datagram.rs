// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Datagrams on the wire.

use std::sync::Arc;

use abi::WrUd;
use roce::{
    Deth, ExtendedHeaders, Headers, ImmDt, Opcode, Operation, Packet, Position, Psn, Qpn, Service,
    Vlan,
};

use super::check::{check_receives, check_type};
use super::outbox::Outbox;
use super::path::Path;
use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::memory::copy::{self, Data};
use crate::transport::datagram::{count_drop, Datagram, MTU};
use crate::transport::fabric_core::Member;
use crate::transport::hca::Hca;
use crate::transport::observe;
use crate::transport::round::Round;

/// Sends a datagram in a packet. Fails if its payload cannot be read. A packet that cannot be sent is lost. `observed`
/// is the place of its QP, if the QP is observed.
pub(crate) fn send(
    hca: &Hca,
    outbox: &mut Outbox,
    datagram: &Datagram<'_>,
    source: &Address,
    to: &WrUd,
    psn: Psn,
    observed: Option<Slot>,
) -> Result<(), ()> {
    let Some(headers) = headers(hca, datagram, source, to, psn) else {
        hca.stats.add(Counter::DropUnreachable, 1);
        return Ok(());
    };
    outbox.send(hca, &headers, observed, datagram.total as usize, |place| fill(datagram, place))
}

/// A datagram of the local path, and the other fields that its packet would have.
pub(crate) struct Shown<'a> {
    /// The HCA that sends it.
    pub hca: &'a Hca,
    /// The datagram.
    pub datagram: &'a Datagram<'a>,
    /// The address that it is from.
    pub source: &'a Address,
    /// The destination.
    pub to: &'a WrUd,
    /// Its PSN.
    pub psn: Psn,
}

impl Shown<'_> {
    /// Shows the packet that the datagram would be to the observer of a QP that sends or gets it, if there is one.
    /// `peer` is the HCA that gets a datagram to a single address.
    #[cold]
    pub fn show(&self, (hca, slot): (&Hca, Slot), leaves: bool, peer: Option<&Hca>) {
        let Self { datagram, source, to, psn, .. } = self;
        let Some(mut headers) = headers(self.hca, datagram, source, to, *psn) else { return };
        if let Some(peer) = peer {
            headers.ethernet.destination = peer.identity.mac();
        }
        let mut payload = vec![0; datagram.total as usize];
        if fill(datagram, &mut payload).is_ok() {
            observe::frame(hca, slot, leaves, &headers, &payload);
        }
    }
}

/// Returns the headers of the packet that is a datagram; `None` if there is no such packet.
fn headers(
    hca: &Hca,
    datagram: &Datagram<'_>,
    source: &Address,
    to: &WrUd,
    psn: Psn,
) -> Option<Headers> {
    let source_qp = datagram.src_qpn;
    let operation = match datagram.immediate {
        Some(_) => Operation::SendWithImmediate,
        None => Operation::Send,
    };
    let path = Path::of_datagram(hca, source_qp, to.remote_qpn, &to.av, source)?;
    let opcode = Opcode::new(Service::Ud, operation, Position::Only)?;
    let extended = ExtendedHeaders {
        deth: Some(Deth { qkey: datagram.qkey, source_qp }),
        imm_dt: datagram.immediate.map(|word| ImmDt(word.to_ne_bytes())),
        ..ExtendedHeaders::default()
    };
    let mut headers = path.headers(opcode, psn, extended);
    headers.bth.solicited_event = datagram.solicited;
    Some(headers)
}

/// Writes the payload of a datagram. Fails if it cannot be read.
fn fill(datagram: &Datagram<'_>, place: &mut [u8]) -> Result<(), ()> {
    match datagram.payload {
        Data::Mapped(view) => copy::read(view, place).map_err(|_| ()),
        Data::Inline(bytes) => {
            place.copy_from_slice(bytes.get(..place.len()).ok_or(())?);
            Ok(())
        }
    }
}

/// Gives a datagram to the QP in a place. Returns the counter of the reason if the datagram is dropped.
pub(crate) fn arrive(
    hca: &Arc<Hca>,
    slot: Slot,
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<(), Counter> {
    check_qp(hca, slot, packet)?;
    let Round { remote, batch, .. } = round;
    match datagram(packet)?.arrive(hca, slot, remote, batch) {
        // A wrong Q_Key was counted where it was found.
        Ok(_) | Err(Counter::DropQkey) => Ok(()),
        Err(dropped) => Err(dropped),
    }
}

/// Gives a datagram to each QP of the guest that is attached to its multicast group, or counts the reason for which a
/// QP does not get it. Returns the counter of the reason if no QP may get it.
pub(crate) fn arrive_at_group(
    hca: &Arc<Hca>,
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<(), Counter> {
    let headers = &packet.headers;
    let datagram = datagram(packet)?;
    if headers.bth.dest_qp != Qpn::MULTICAST {
        return Err(Counter::DropNoQp);
    }
    // Members in the network of the sender have it already: a switch may send it back there.
    let source = Address { gid: headers.ip.source_gid(), vlan: datagram.vlan };
    if hca.fabric.has(&source) {
        return Err(Counter::DropEcho);
    }
    let group = hca.fabric.group(&datagram.dgid);
    let is_own = |member: &&Arc<Member<Hca>>| member.device.as_ptr() == Arc::as_ptr(hca);
    for member in group.iter().flat_map(|group| group.iter()).filter(is_own) {
        let Round { remote, batch, budget, .. } = round;
        budget.spend(datagram.total);
        match datagram.arrive(hca, member.slot, remote, batch) {
            Ok(_) => {
                hca.stats.add(Counter::MulticastRcvPackets, 1);
            }
            Err(dropped) => count_drop(hca, dropped),
        }
    }
    Ok(())
}

/// Returns the datagram of a packet, or the counter of the reason for which the packet is dropped.
fn datagram<'a>(packet: &Packet<'a>) -> Result<Datagram<'a>, Counter> {
    if packet.payload.len() as u64 > MTU {
        return Err(Counter::DropTooLong);
    }
    let headers = &packet.headers;
    let deth = headers.extended.deth.ok_or(Counter::DropService)?;
    Ok(Datagram {
        dgid: headers.ip.destination_gid(),
        vlan: headers.ethernet.vlan_id(),
        src_qpn: deth.source_qp,
        qkey: deth.qkey,
        sl: headers.ethernet.vlan.map_or(0, Vlan::priority),
        grh: packet.grh(),
        immediate: headers.extended.imm_dt.map(|immediate| u32::from_ne_bytes(immediate.0)),
        solicited: headers.bth.solicited_event,
        total: packet.payload.len() as u64,
        payload: Data::Inline(packet.payload),
    })
}

/// Checks that there is a QP that takes datagrams, for one that has come.
fn check_qp(hca: &Hca, slot: Slot, packet: &Packet<'_>) -> Result<(), Counter> {
    let qp = hca.qps.get(slot).ok_or(Counter::DropNoQp)?;
    let responder = lock(&qp.responder);
    check_type(responder.config, &[QpType::Ud, QpType::Gsi])?;
    if responder.observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    check_receives(qp.state())
}
