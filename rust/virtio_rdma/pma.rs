// SPDX-License-Identifier: GPL-2.0

//! Performance management: the counters of the port as IBA 16.1 lays them out, which sysfs shows. MADs from QPs, also
//! those of `perfquery` on this host, get none ([`crate::ib`]).

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::Hca,
    ib,
    port::PORT, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Attributes (IBA 16.1.3, table 242).
const CLASS_PORT_INFO: u16 = 0x0001;
const PORT_COUNTERS: u16 = 0x0012;
const PORT_COUNTERS_EXT: u16 = 0x001d;

/// ClassPortInfo.CapabilityMask: there are counters of 64 bits.
const CAP_EXT_WIDTH: u16 = 1 << 9;

/// PortSelect for all ports; the device has one port.
const ALL_PORTS: u8 = 0xff;

/// The version of MADs and of this class.
const VERSION: u8 = 1;

/// Bytes of a word in which PMA counts data.
const WORD: u64 = 4;

/// Answers a Get.
///
/// # Errors
///
/// `EOPNOTSUPP` for an attribute or a port that does not exist; what the device says.
pub(crate) fn answer(hca: &Arc<Hca>, request: &ib::PerfMad, reply: &mut ib::PerfMad) -> Result {
    let attribute = request.attribute();
    if attribute == CLASS_PORT_INFO {
        reply.put(0, [VERSION]);
        reply.put(1, [VERSION]);
        reply.put(2, CAP_EXT_WIDTH.to_be_bytes());
        return Ok(());
    }
    let port = request.port_select();
    if u32::from(port) != PORT && port != ALL_PORTS {
        return Err(crate::errno::unsupported());
    }
    let fill = match attribute {
        PORT_COUNTERS => port_counters,
        PORT_COUNTERS_EXT => port_counters_ext,
        _ => return Err(crate::errno::unsupported()),
    };
    let counters = query(hca)?;
    reply.put(1, [port]);
    fill(&counters, reply);
    Ok(())
}

/// Asks the device for the counters, in the order of the CPU.
fn query(hca: &Arc<Hca>) -> Result<bindings::virtio_rdma_rsp_query_counters> {
    let request = bindings::virtio_rdma_cmd_query_counters { port: PORT.to_le() };
    let reply = hca.execute::<cmd::QueryCounters>(&request)?;
    Ok(bindings::virtio_rdma_rsp_query_counters {
        xmit_data: u64::from_le(reply.xmit_data),
        rcv_data: u64::from_le(reply.rcv_data),
        xmit_packets: u64::from_le(reply.xmit_packets),
        rcv_packets: u64::from_le(reply.rcv_packets),
        multicast_xmit_packets: u64::from_le(reply.multicast_xmit_packets),
        multicast_rcv_packets: u64::from_le(reply.multicast_rcv_packets),
        xmit_discards: u64::from_le(reply.xmit_discards),
        reserved: [0; 9],
    })
}

/// Returns a counter of 32 bits, which stops at its end.
fn narrow(value: u64) -> [u8; 4] {
    u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes()
}

/// Writes PortCounters (IBA 16.1.3.5, table 247).
fn port_counters(from: &bindings::virtio_rdma_rsp_query_counters, to: &mut ib::PerfMad) {
    let discards = u16::try_from(from.xmit_discards).unwrap_or(u16::MAX);
    to.put(14, discards.to_be_bytes());
    to.put(24, narrow(from.xmit_data / WORD));
    to.put(28, narrow(from.rcv_data / WORD));
    to.put(32, narrow(from.xmit_packets));
    to.put(36, narrow(from.rcv_packets));
}

/// Writes PortCountersExtended (IBA 16.1.4.11, table 260).
fn port_counters_ext(from: &bindings::virtio_rdma_rsp_query_counters, to: &mut ib::PerfMad) {
    let unicast = |all: u64, multicast: u64| all.saturating_sub(multicast);
    let (sent, received) = (from.xmit_packets, from.rcv_packets);
    let (sent_to_group, from_group) = (from.multicast_xmit_packets, from.multicast_rcv_packets);
    for (offset, value) in [
        (8, from.xmit_data / WORD),
        (16, from.rcv_data / WORD),
        (24, sent),
        (32, received),
        (40, unicast(sent, sent_to_group)),
        (48, unicast(received, from_group)),
        (56, sent_to_group),
        (64, from_group),
    ] {
        to.put(offset, value.to_be_bytes());
    }
}
