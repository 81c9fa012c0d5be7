// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The port, and the GIDs of the device.

use abi::*;
use testkit::command::{self, Gid};

use crate::bench::{Bench, End, Link};
use crate::driver::Driver;
use crate::outcome::{not_judged, Outcome};
use crate::test::family;

family! {
    attributes_of_the_port One []: "D-PORT-01" "D-PORT-02" "D-PORT-05" "D-PORT-17" "D-TERM-03";
    other_ports One []: "D-CTRL-41" "D-CTRL-60" "D-CTRL-66";
    refused_gids One []: "D-CTRL-61" "D-CTRL-62" "D-CTRL-63" "D-CTRL-66" "D-PORT-06";
    empty_entries_are_cleared One []: "D-CTRL-31";
    an_entry_is_replaced One []: "D-CTRL-30" "D-PORT-10" "D-QP-81";
    a_gid_in_several_entries One []: "D-PORT-07" "D-PORT-08";
    a_qp_keeps_its_address Ends []: "D-PORT-09";
    a_deleted_gid_is_nobodys Ends []: "D-PORT-11" "D-PORT-13";
    nothing_is_sent_from_a_deleted_gid Ends []: "D-PORT-11" "D-PORT-13";
    an_address_that_moves_is_sent_nothing Two []: "D-QP-93" "D-QP-90";
    an_address_that_moves_is_not_answered Two []: "D-QP-92";
    a_gid_has_one_owner Two []: "D-CTRL-65" "D-TERM-30";
}

const QUERY_PORT: (&str, u32) = ("QUERY_PORT", VIRTIO_RDMA_CMD_QUERY_PORT);
const ADD_GID: (&str, u32) = ("ADD_GID", VIRTIO_RDMA_CMD_ADD_GID);
const DEL_GID: (&str, u32) = ("DEL_GID", VIRTIO_RDMA_CMD_DEL_GID);
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;

/// Returns the attributes of the port.
pub fn query_port(a: &mut Driver) -> Outcome<virtio_rdma_rsp_query_port> {
    let (name, number) = QUERY_PORT;
    a.command("D-FEAT-06", name, number, &virtio_rdma_cmd_query_port { port: 1 })
}

/// Adds a GID.
pub fn add_gid(a: &mut Driver, index: u16, gid: Gid) -> Outcome {
    let (name, number) = ADD_GID;
    a.command("D-CTRL-30", name, number, &command::add_gid(index, gid))
}

/// Deletes a GID.
pub fn del_gid(a: &mut Driver, index: u16) -> Outcome {
    let (name, number) = DEL_GID;
    let request = virtio_rdma_cmd_del_gid { index, reserved_02: 0, port: 1 };
    a.command("D-CTRL-31", name, number, &request)
}

fn attributes_of_the_port(t: &mut Bench) -> Outcome {
    let a = t.a();
    let port = query_port(a)?;
    let journal = std::rc::Rc::clone(&a.journal);
    let among = |what: &str, value: u32, values: &[u32]| {
        journal.holds("D-PORT-01", what, values.contains(&value), value)
    };
    among("state", port.state.into(), &[1, 2, 3, 4])?;
    among("max_mtu", port.max_mtu.into(), &[1, 2, 3, 4, 5])?;
    among("active_mtu", port.active_mtu.into(), &[1, 2, 3, 4, 5])?;
    let mtu = 128 << port.active_mtu.min(5);
    journal.is("D-PORT-01", "phys_mtu", port.phys_mtu, mtu)?;
    among("active_width", port.active_width.into(), &[1, 2, 4, 8, 16])?;
    among("active_speed", port.active_speed.into(), &[1, 2, 4, 8, 16, 32, 64, 128, 256])?;
    among("phys_state", port.phys_state.into(), &[1, 2, 3, 4, 5, 6, 7])?;
    let has_cm = port.port_cap_flags & 1 << 16 != 0;
    journal.holds("D-PORT-01", "CM_SUP", has_cm, port.port_cap_flags)?;
    journal.holds("D-PORT-02", "max_msg_sz", port.max_msg_sz <= 1 << 31, port.max_msg_sz)?;
    let entries = port.gid_tbl_len;
    journal.holds("D-PORT-05", "gid_tbl_len is 1 to 256", (1..=256).contains(&entries), entries)?;
    journal.is("D-PORT-17", "pkey_tbl_len", port.pkey_tbl_len, 1)
}

fn other_ports(t: &mut Bench) -> Outcome {
    let a = t.a();
    for port in [0, 2, 255] {
        let request = virtio_rdma_cmd_query_port { port: port as u8 };
        a.fails::<_, virtio_rdma_rsp_query_port>("D-CTRL-41", QUERY_PORT, &request, INVALID)?;
        let request = virtio_rdma_cmd_add_gid { port_num: port, ..command::add_gid(0, a.gid) };
        a.fails::<_, ()>("D-CTRL-60", ADD_GID, &request, INVALID)?;
        let request = virtio_rdma_cmd_del_gid { index: 0, reserved_02: 0, port };
        a.fails::<_, ()>("D-CTRL-66", DEL_GID, &request, INVALID)?;
    }
    Ok(())
}

fn refused_gids(t: &mut Bench) -> Outcome {
    let a = t.a();
    let entries = query_port(a)?.gid_tbl_len as u16;
    for index in [entries, u16::MAX] {
        let request = command::add_gid(index, a.gid);
        a.fails::<_, ()>("D-CTRL-61", ADD_GID, &request, INVALID)?;
        let request = virtio_rdma_cmd_del_gid { index, reserved_02: 0, port: 1 };
        a.fails::<_, ()>("D-CTRL-66", DEL_GID, &request, INVALID)?;
    }
    let mut of_group = [0; 16];
    (of_group[0], of_group[1], of_group[15]) = (0xff, 0x0e, 1);
    for gid in [[0; 16], of_group, gid_of_ipv4([224, 0, 0, 5])] {
        a.fails::<_, ()>("D-CTRL-62", ADD_GID, &command::add_gid(0, gid), INVALID)?;
    }
    for gid_type in [0, 1, 3, u32::MAX] {
        let request = virtio_rdma_cmd_add_gid { gid_type, ..command::add_gid(0, a.gid) };
        a.fails::<_, ()>("D-CTRL-63", ADD_GID, &request, INVALID)?;
    }
    a.journal.pass("D-PORT-06");
    Ok(())
}

/// Returns the GID of an IPv4 address.
fn gid_of_ipv4(address: [u8; 4]) -> Gid {
    let mut gid = testkit::gid(0);
    gid[12..].copy_from_slice(&address);
    gid
}

fn empty_entries_are_cleared(t: &mut Bench) -> Outcome {
    let a = t.a();
    del_gid(a, 0)?;
    del_gid(a, 0)?;
    a.add_own_gid()
}

fn an_entry_is_replaced(t: &mut Bench) -> Outcome {
    let x = t.end(0, VIRTIO_RDMA_QPT_RC)?;
    t.make_init(&x, VIRTIO_RDMA_QPT_RC, 0)?;
    // The entry is set over itself, and while a QP uses it.
    t.a().add_own_gid()?;
    let gid = t.a().gid;
    t.make_rtr(&x, VIRTIO_RDMA_QPT_RC, (gid, x.qpn), Link::default())?;
    t.a().add_own_gid()?;
    del_gid(t.a(), 0)?;
    t.journal.pass("D-PORT-10");
    t.journal.pass("D-CTRL-30");
    let y = t.end(0, VIRTIO_RDMA_QPT_RC)?;
    t.make_init(&y, VIRTIO_RDMA_QPT_RC, 0)?;
    let to = Bench::of_rtr(VIRTIO_RDMA_QPT_RC, (gid, x.qpn), Link::default());
    t.a().modify_fails(y.qpn, "D-QP-81", to, INVALID)
}

fn a_gid_in_several_entries(t: &mut Bench) -> Outcome {
    let gid = t.a().gid;
    let entries = query_port(t.a())?.gid_tbl_len;
    t.needs(entries >= 2, "the GID table has one entry")?;
    add_gid(t.a(), 1, gid)?;
    t.journal.pass("D-PORT-07");
    del_gid(t.a(), 0)?;
    // Entry 1 still holds it, so datagrams to it arrive.
    let (x, y) = t.datagrams()?;
    t.receive(&y, 1, 0, 1000)?;
    let send = t.datagram(&x, &y, 2, 4096, 50).from(1);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-PORT-08", 2)?;
    t.succeeds(&y, "D-PORT-08", 1)?;
    Ok(())
}

fn a_qp_keeps_its_address(t: &mut Bench) -> Outcome {
    let entries = query_port(t.a())?.gid_tbl_len;
    t.needs(entries >= 2, "the GID table has one entry")?;
    let (x, y) = t.connection()?;
    let gid = t.a().gid;
    add_gid(t.a(), 1, gid)?;
    del_gid(t.a(), 0)?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, VIRTIO_RDMA_WR_SEND, 0x8000, 100))?;
    t.succeeds(&x, "D-PORT-09", 2)?;
    t.succeeds(&y, "D-PORT-09", 1)?;
    Ok(())
}

fn a_deleted_gid_is_nobodys(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    del_gid(t.on(&y), 0)?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, VIRTIO_RDMA_WR_SEND, 0x8000, 100))?;
    t.completes(&x, "D-PORT-13", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&y, "D-PORT-11", "no message arrives")
}

fn nothing_is_sent_from_a_deleted_gid(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 100)?;
    del_gid(t.on(&x), 0)?;
    t.post(&x, &x.send(2, VIRTIO_RDMA_WR_SEND, 0x8000, 100))?;
    t.completes(&x, "D-PORT-11", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.journal.pass("D-PORT-13");
    t.is_quiet(&y, "D-PORT-11", "no message arrives")
}

/// Connects a QP with an address of the second device, and moves the address to the first one. Returns the QP, and one
/// that has the address and the number of its peer now, and is connected to it.
fn move_address(t: &mut Bench) -> Outcome<(End, End)> {
    let entries = query_port(t.a())?.gid_tbl_len;
    t.needs(entries >= 2, "the GID table has one entry")?;
    let (x, z) = (t.end(0, RC)?, t.end(0, RC)?);
    let (own, gid) = (t.members[0].gid, t.members[1].gid);
    connect_from(t, &x, 0, (gid, z.qpn))?;
    del_gid(&mut t.members[1], 0)?;
    let request = command::add_gid(1, gid);
    match t.a().try_command::<_, ()>(ADD_GID.0, ADD_GID.1, &request)? {
        Ok(()) => {}
        Err(VIRTIO_RDMA_STATUS_PERM) => return not_judged("the device may not use the address"),
        Err(status) => return Err(t.a().refused("D-CTRL-30", "ADD_GID of a free GID", status)),
    }
    connect_from(t, &z, 1, (own, x.qpn))?;
    Ok((x, z))
}

/// Connects a QP of the first device that is in RESET, and has this entry of the GID table.
fn connect_from(t: &mut Bench, end: &End, entry: u8, to: (Gid, u32)) -> Outcome {
    let link = Link::default();
    t.make_init(end, RC, link.access)?;
    let (mask, mut attr) = Bench::of_rtr(RC, to, link);
    attr.ah_attr.grh.sgid_index = entry;
    t.a().modify(end.qpn, "D-QP-40", mask, attr)?;
    t.make_rts(end, RC, link)
}

fn an_address_that_moves_is_sent_nothing(t: &mut Bench) -> Outcome {
    let (x, z) = move_address(t)?;
    t.receive(&z, 1, 0, 100)?;
    t.post(&x, &x.send(3, SEND, 0x8000, 100))?;
    t.completes(&x, "D-QP-93", 3, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&z, "D-QP-93", "what has the address now gets nothing")?;
    // MODIFY_QP connects it with what has the address then.
    let (own, gid) = (t.members[0].gid, t.members[1].gid);
    for end in [&x, &z] {
        t.a().reset_qp(end.qpn)?;
    }
    connect_from(t, &x, 0, (gid, z.qpn))?;
    connect_from(t, &z, 1, (own, x.qpn))?;
    t.receive(&z, 4, 0, 100)?;
    t.post(&x, &x.send(5, SEND, 0x8000, 100))?;
    t.succeeds(&x, "D-QP-90", 5)?;
    t.succeeds(&z, "D-QP-90", 4)?;
    Ok(())
}

fn an_address_that_moves_is_not_answered(t: &mut Bench) -> Outcome {
    let (x, z) = move_address(t)?;
    t.receive(&x, 1, 0, 100)?;
    t.post(&z, &z.send(2, SEND, 0x8000, 100))?;
    t.completes(&z, "D-QP-92", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&x, "D-QP-92", "no receive is taken")
}

fn a_gid_has_one_owner(t: &mut Bench) -> Outcome {
    let gids = [t.members[0].gid, t.members[1].gid];
    for (member, gid) in [(0, gids[1]), (1, gids[0])] {
        let request = command::add_gid(0, gid);
        let exists = VIRTIO_RDMA_STATUS_EXISTS;
        t.members[member].fails::<_, ()>("D-CTRL-65", ADD_GID, &request, exists)?;
    }
    del_gid(&mut t.members[1], 0)?;
    let request = command::add_gid(0, gids[1]);
    match t.members[0].try_command::<_, ()>(ADD_GID.0, ADD_GID.1, &request)? {
        Ok(()) | Err(VIRTIO_RDMA_STATUS_PERM) => {}
        Err(status) => return Err(t.a().refused("D-CTRL-30", "ADD_GID of a free GID", status)),
    }
    t.journal.pass("D-TERM-30");
    Ok(())
}
