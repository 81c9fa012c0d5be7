// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Datagrams on the wire.

use std::sync::Arc;

use abi::WrUd;
use roce::{
    Deth, ExtendedHeaders, ImmDt, Opcode, Operation, Packet, Position, Psn, Qpn, Service, Vlan,
};

use super::outbox::Outbox;
use super::path::Path;
use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::memory::copy::{self, Data};
use crate::transport::datagram::{count_drop, Datagram};
use crate::transport::hca::Hca;
use crate::transport::network::Member;
use crate::transport::round::Round;

/// Sends a datagram in a packet. Fails if its payload cannot be read. What cannot be sent is lost.
pub(crate) fn send(
    hca: &Hca,
    outbox: &mut Outbox,
    datagram: &Datagram<'_>,
    source: &Address,
    to: &WrUd,
    psn: u32,
) -> Result<(), ()> {
    let (qpn, dest_qpn) = (datagram.src_qpn, to.remote_qpn);
    let operation = match datagram.immediate {
        Some(_) => Operation::SendWithImmediate,
        None => Operation::Send,
    };
    let path = Path::of_datagram(hca, qpn, dest_qpn, &to.av, source);
    let opcode = Opcode::new(Service::Ud, operation, Position::Only);
    let (Some(path), Some(opcode), Some(source_qp)) = (path, opcode, Qpn::new(qpn)) else {
        hca.stats.add(Counter::DropUnreachable, 1);
        return Ok(());
    };
    let extended = ExtendedHeaders {
        deth: Some(Deth { qkey: datagram.qkey, source_qp }),
        imm_dt: datagram.immediate.map(|word| ImmDt(word.to_ne_bytes())),
        ..ExtendedHeaders::default()
    };
    let mut headers = path.headers(opcode, Psn::new(psn), extended);
    headers.bth.solicited_event = datagram.solicited;
    outbox.send(hca, &headers, datagram.total as usize, |place| match datagram.payload {
        Data::Mapped(view) => copy::read(view, place).map_err(|_| ()),
        Data::Inline(bytes) => {
            place.copy_from_slice(bytes.get(..place.len()).ok_or(())?);
            Ok(())
        }
    })
}

/// Gives a datagram to the QP in a place, or counts why it is dropped.
pub(crate) fn arrive(hca: &Arc<Hca>, slot: u16, packet: &Packet<'_>, round: &mut Round) {
    let Some(datagram) = datagram(packet) else { return };
    let Round { remote, batch, .. } = round;
    if let Err(dropped) = datagram.arrive(hca, slot, remote, batch) {
        count_drop(hca, dropped);
    }
}

/// Gives a datagram to each QP of the guest that is attached to its multicast group, or counts why it is
/// dropped.
pub(crate) fn arrive_at_group(hca: &Arc<Hca>, packet: &Packet<'_>, round: &mut Round) {
    let headers = &packet.headers;
    let of_group = datagram(packet).filter(|_| headers.bth.dest_qp == Qpn::MULTICAST);
    let Some(datagram) = of_group else {
        hca.stats.add(Counter::DropUnreachable, 1);
        return;
    };
    // Members in the network of the sender have it already: a switch may send it back there.
    let source = Address { gid: headers.ip.source_gid(), vlan: datagram.vlan };
    if hca.network.find(&source).is_some() {
        hca.stats.add(Counter::DropEcho, 1);
        return;
    }
    let group = hca.network.group(&datagram.dgid);
    let is_own = |member: &&Arc<Member<Hca>>| member.device.as_ptr() == Arc::as_ptr(hca);
    for member in group.iter().flat_map(|group| group.iter()).filter(is_own) {
        let Round { remote, batch, budget, .. } = round;
        budget.spend(datagram.total);
        match datagram.arrive(hca, member.slot, remote, batch) {
            Ok(()) => {
                hca.stats.add(Counter::MulticastRcvPackets, 1);
            }
            Err(dropped) => count_drop(hca, dropped),
        }
    }
}

/// Returns the datagram that a packet is; `None` if it is of another service.
fn datagram<'a>(packet: &Packet<'a>) -> Option<Datagram<'a>> {
    let headers = &packet.headers;
    let deth = headers.extended.deth?;
    Some(Datagram {
        dgid: headers.ip.destination_gid(),
        vlan: headers.ethernet.vlan.map(Vlan::id).filter(|id| *id != 0),
        src_qpn: deth.source_qp.get(),
        qkey: deth.qkey,
        sl: headers.ethernet.vlan.map_or(0, Vlan::priority),
        grh: packet.grh(),
        immediate: headers.extended.imm_dt.map(|immediate| u32::from_ne_bytes(immediate.0)),
        solicited: headers.bth.solicited_event,
        total: packet.payload.len() as u64,
        payload: Data::Inline(packet.payload),
    })
}
