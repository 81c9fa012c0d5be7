// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The checks of a packet that need no PSN (IBA 9.6.1): its partition, its addresses and its QP.

use roce::{Headers, Malformed, DEFAULT_PKEY};

use crate::base::address::{Address, Gid};
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::qp::config::QpConfig;
use crate::qp::halves::Partner;
use crate::qp::state::QpState;
use crate::transport::hca::{Hca, Responder};

/// The bits of a P_Key that say which partition it is. The other bit says whether the sender is a full
/// member (IBA 10.9.1.1).
const PARTITION: u16 = 0x7fff;

/// Returns the counter for a frame that is no packet.
pub(super) fn counter_of(malformed: Malformed) -> Counter {
    match malformed {
        Malformed::EthernetCutOff
        | Malformed::IpCutOff
        | Malformed::IpLength
        | Malformed::UdpCutOff
        | Malformed::UdpLength
        | Malformed::BthCutOff
        | Malformed::ExtendedHeaderCutOff
        | Malformed::PadCount => Counter::BadPacketLength,
        Malformed::Icrc => Counter::BadIcrc,
        _ => Counter::BadPacket,
    }
}

/// Checks that a packet is in the port's only partition (IBA 10.9.3).
pub(super) fn check_partition(headers: &Headers) -> Result<(), Counter> {
    if headers.bth.pkey & PARTITION == DEFAULT_PKEY & PARTITION {
        Ok(())
    } else {
        Err(Counter::DropPkey)
    }
}

/// Returns the address that a packet says that it comes from.
pub(super) fn source(headers: &Headers) -> Address {
    Address { gid: headers.ip.source_gid(), vlan: headers.ethernet.vlan_id() }
}

/// Checks that a packet does not pretend to come from a guest of this network, whose packets to another
/// guest never come over the wire.
pub(super) fn check_source(hca: &Hca, source: &Address) -> Result<(), Counter> {
    if hca.fabric.has(source) {
        return Err(Counter::DropSpoofed);
    }
    Ok(())
}

/// Checks that there is a QP, and that it has one of these types. Returns its configuration.
pub(super) fn check_type(config: Option<QpConfig>, kinds: &[QpType]) -> Result<QpConfig, Counter> {
    let config = config.ok_or(Counter::DropNoQp)?;
    if kinds.contains(&config.wq.kind) {
        Ok(config)
    } else {
        Err(Counter::DropService)
    }
}

/// Checks that a QP takes requests and datagrams in this state.
pub(super) fn check_receives(state: QpState) -> Result<(), Counter> {
    if state.receives() {
        Ok(())
    } else {
        Err(Counter::DropState)
    }
}

/// Checks that a packet is one that a responder of this type takes. A connection with a guest of this network
/// takes none, whoever has the address of that guest now (specification, Queue pairs).
pub(super) fn check_responder(
    responder: &Responder,
    state: QpState,
    kind: QpType,
    headers: &Headers,
) -> Result<(), Counter> {
    check_type(responder.config, &[kind])?;
    check_receives(state)?;
    if matches!(responder.partner, Partner::Device(_)) {
        return Err(Counter::DropNotPeer);
    }
    check_peer(headers, &responder.source, &responder.attr.ah_attr.grh.dgid)
}

/// Checks that a packet comes from the peer of a connection, which has the address `dgid`, and is sent to
/// the address that the connection has here (IBA 9.6.1.2).
pub(super) fn check_peer(headers: &Headers, source: &Address, dgid: &Gid) -> Result<(), Counter> {
    let to = Address { gid: headers.ip.destination_gid(), vlan: headers.ethernet.vlan_id() };
    if headers.ip.source_gid() == *dgid && to == *source {
        Ok(())
    } else {
        Err(Counter::DropNotPeer)
    }
}
