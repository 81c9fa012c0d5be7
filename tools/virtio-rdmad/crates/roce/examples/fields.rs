// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads frames, one in hexadecimal on each line of standard input, and prints a line of JSON for each:
//! what the frame says, and the frame that is made of that again; or the counter of the cause for which
//! the frame is refused. The host suite compares this with scapy (`test_roce.py`).

use std::error::Error;
use std::io::{stdin, stdout, Write};

use roce::{decode, encode, icrc, icrc_with_identification, ip_of, Headers, Ip, Packet};
use serde_json::{json, Value};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"))
}

fn bytes(hex: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}

fn ip(header: &Ip) -> Value {
    match header {
        Ip::V4(header) => json!({
            "version": 4,
            "traffic_class": header.traffic_class,
            "identification": header.identification,
            "dont_fragment": header.dont_fragment,
            "hop_limit": header.hop_limit,
        }),
        Ip::V6(header) => json!({
            "version": 6,
            "traffic_class": header.traffic_class,
            "flow_label": header.flow_label.get(),
            "hop_limit": header.hop_limit,
        }),
    }
}

fn extended(headers: &Headers) -> Value {
    let headers = &headers.extended;
    let mut fields = json!({});
    if let Some(header) = headers.xrceth {
        fields["xrceth"] = json!({ "srq": header.srq.get() });
    }
    if let Some(header) = headers.deth {
        fields["deth"] = json!({ "qkey": header.qkey, "source_qp": header.source_qp.get() });
    }
    if let Some(header) = headers.feth {
        let (placement, selectivity) = (header.placement(), header.selectivity());
        fields["feth"] = json!({ "placement": placement, "selectivity": selectivity });
    }
    if let Some(header) = headers.reth {
        fields["reth"] = json!({ "va": header.va, "rkey": header.rkey, "dma_len": header.dma_len });
    }
    if let Some(header) = headers.atomic_eth {
        fields["atomic_eth"] = json!({
            "va": header.va,
            "rkey": header.rkey,
            "swap_add": header.swap_add,
            "compare": header.compare,
        });
    }
    if let Some(header) = headers.aeth {
        let (syndrome, msn) = (header.syndrome.byte(), header.msn.get());
        fields["aeth"] = json!({ "syndrome": syndrome, "msn": msn });
    }
    if let Some(header) = headers.atomic_ack_eth {
        fields["atomic_ack_eth"] = json!({ "orig": header.original });
    }
    if let Some(header) = headers.imm_dt {
        fields["imm_dt"] = json!({ "data": u32::from_be_bytes(header.0) });
    }
    if let Some(header) = headers.ieth {
        fields["ieth"] = json!({ "rkey": header.rkey });
    }
    if let Some(header) = headers.sack_eth {
        let [first, second, third, fourth] = header.held;
        fields["sack_eth"] =
            json!({ "first": first, "second": second, "third": third, "fourth": fourth });
    }
    fields
}

/// Returns what a packet says, the frame that is made of it again, and the ICRC that it has with the
/// next identification.
fn fields(packet: &Packet<'_>) -> Result<Value, Box<dyn Error>> {
    let headers = &packet.headers;
    let (ethernet, bth) = (&headers.ethernet, &headers.bth);
    let mut again = vec![0; packet.payload.len() + 200];
    let len = encode(headers, packet.payload, &mut again)?;
    let again = &again[..len];
    let covered = &again[if ethernet.vlan.is_some() { 18 } else { 14 }..len - 4];
    let next = match headers.ip {
        Ip::V4(header) => icrc_with_identification(covered, header.identification.wrapping_add(1)),
        Ip::V6(_) => icrc(covered),
    };
    Ok(json!({
        "destination": hex(&ethernet.destination),
        "source": hex(&ethernet.source),
        "vlan": ethernet.vlan.map(|vlan| (vlan.priority(), vlan.id())),
        "source_ip": ip_of(&headers.ip.source_gid()).to_string(),
        "destination_ip": ip_of(&headers.ip.destination_gid()).to_string(),
        "ip": ip(&headers.ip),
        "source_port": headers.source_port,
        "bth": {
            "opcode": bth.opcode.byte(),
            "solicited": bth.solicited_event,
            "migreq": bth.migrated,
            "pkey": bth.pkey,
            "fecn": bth.fecn,
            "becn": bth.becn,
            "dqpn": bth.dest_qp.get(),
            "ackreq": bth.ack_request,
            "psn": bth.psn.get(),
        },
        "extended": extended(headers),
        "payload": hex(packet.payload),
        "again": hex(again),
        "icrc_of_next": hex(&next.ok_or("no ICRC")?),
    }))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = stdout().lock();
    for line in stdin().lines() {
        let frame = bytes(&line?)?;
        let said = match decode(&frame) {
            Ok(packet) => fields(&packet)?,
            Err(cause) => json!({ "malformed": cause.counter() }),
        };
        writeln!(out, "{said}")?;
    }
    Ok(())
}
