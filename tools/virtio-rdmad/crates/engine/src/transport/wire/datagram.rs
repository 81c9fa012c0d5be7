// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Datagrams on the wire.

use std::sync::Arc;

use abi::WrUd;
use roce::{
    Deth, ExtendedHeaders, ImmDt, Opcode, Operation, Packet, Position, Psn, Qpn, Service, Vlan,
};

use super::path::{self, Path};
use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::memory::copy::{self, Data};
use crate::transport::datagram::Datagram;
use crate::transport::hca::Hca;
use crate::transport::round::Round;

/// Sends a datagram in a packet. Fails if its payload cannot be read. What cannot be sent is lost.
pub(crate) fn send(
    hca: &Hca,
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
    path::send(hca, &headers, datagram.total as usize, |place| match datagram.payload {
        Data::Mapped(view) => copy::read(view, place).map_err(|_| ()),
        Data::Inline(bytes) => {
            place.copy_from_slice(bytes.get(..place.len()).ok_or(())?);
            Ok(())
        }
    })
}

/// Gives a datagram to the QP in a place, or counts why it is dropped.
pub(crate) fn arrive(hca: &Arc<Hca>, slot: u16, packet: &Packet<'_>, round: &mut Round) {
    let headers = &packet.headers;
    let Some(deth) = headers.extended.deth else { return };
    let datagram = Datagram {
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
    };
    let Round { remote, batch, .. } = round;
    match datagram.arrive(hca, slot, remote, batch) {
        // A wrong Q_Key was counted where it was found.
        Ok(()) | Err(Counter::DropQkey) => {}
        Err(dropped) => {
            hca.stats.add(dropped, 1);
        }
    }
}
