// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fast registration, invalidation, and memory windows.

use abi::*;
use testkit::command::PAGE;
use testkit::{sge, Send, LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::bench::{Bench, End};
use crate::driver::NOWHERE;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    create_mr_is_refused One [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-10" "D-FRMR-11" "D-FRMR-12" "D-FRMR-01";
    free_mr_gives_nothing Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-05" "D-FRMR-04";
    reg_mr_gives_pages Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-14" "D-FRMR-15" "D-FRMR-17";
    local_inv_takes_the_key Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-19" "D-FRMR-23" "D-FRMR-33" "D-WQE-08";
    send_with_inv_takes_the_key Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-21" "D-FRMR-22" "D-CQ-17";
    reg_mr_is_refused Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-25" "D-FRMR-26" "D-FRMR-28" "D-FRMR-34";
    reg_mr_of_bad_memory Ends [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-31" "D-FRMR-27" "D-FRMR-29";
    reg_mr_is_not_for_programs One [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-18";
    management_has_no_sges One [VIRTIO_RDMA_F_FAST_REG]: "D-WQE-19";
    invalidation_by_a_wrong_key One [VIRTIO_RDMA_F_FAST_REG]: "D-FRMR-32";
    opcodes_without_their_feature One []:
        "D-FRMR-02" "D-FRMR-03" "D-MW-03" "D-FLUSH-01" "D-AW-01";
    windows_are_refused One [VIRTIO_RDMA_F_MW]: "D-MW-11" "D-MW-12" "D-MW-14" "D-MW-01" "D-MW-06";
    window_gives_its_range Ends [VIRTIO_RDMA_F_MW]: "D-MW-17" "D-MW-15" "D-MW-19" "D-MW-44";
    windows_are_bound_by_the_rules One [VIRTIO_RDMA_F_MW]:
        "D-MW-31" "D-MW-32" "D-MW-33" "D-MW-34" "D-MW-36" "D-MW-37" "D-MW-41" "D-MW-05" "D-MW-04";
    window_that_is_gone Ends [VIRTIO_RDMA_F_MW]: "D-MW-07" "D-MW-08" "D-CTRL-56";
}

const RC: u32 = VIRTIO_RDMA_QPT_RC;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const BIND_ERR: u32 = VIRTIO_RDMA_WC_MW_BIND_ERR;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const NO_OBJECT: u32 = VIRTIO_RDMA_STATUS_NO_OBJECT;
/// The address by which peers name a fast registration.
const IOVA: u64 = 0x5000_0000;

const CREATE_MR: (&str, u32) = ("CREATE_MR", VIRTIO_RDMA_CMD_CREATE_MR);
const ALLOC_MW: (&str, u32) = ("ALLOC_MW", VIRTIO_RDMA_CMD_ALLOC_MW);
const DEALLOC_MW: (&str, u32) = ("DEALLOC_MW", VIRTIO_RDMA_CMD_DEALLOC_MW);

/// Makes another QP with what an end has, which the driver itself uses.
fn privileged(t: &mut Bench, end: &End) -> Outcome<End> {
    let shape = crate::objects::Shape {
        kind: RC,
        send_cqn: end.cqn,
        recv_cqn: end.cqn,
        signals_all: false,
        inline: 0,
    };
    let (at, mut request) = t.on(end).qp_request(end.pdn, &shape);
    request.flags = VIRTIO_RDMA_QP_PRIVILEGED;
    let qpn = t.on(end).create_qp_of(at, &request)?;
    Ok(End { qpn, ..*end })
}

/// Makes a connection of the driver itself.
fn connection(t: &mut Bench) -> Outcome<(End, End)> {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let (x, y) = (privileged(t, &x)?, privileged(t, &y)?);
    t.connect(&x, &y, RC, crate::bench::Link::default())?;
    t.connect(&y, &x, RC, crate::bench::Link::default())?;
    Ok((x, y))
}

/// Makes an MR for fast registration at the far end.
fn create_mr(t: &mut Bench, y: &End) -> Outcome<virtio_rdma_rsp_mr> {
    let request = virtio_rdma_cmd_create_mr { pdn: y.pdn, access_flags: 0, max_num_sg: 4 };
    let (name, number) = CREATE_MR;
    let mr: virtio_rdma_rsp_mr = t.on(y).command("D-FRMR-04", name, number, &request)?;
    t.on(y).check_keys(&mr)?;
    Ok(mr)
}

/// Returns the REG_MR that gives pages 3 and 1 of the memory of an end to an MR.
fn reg_mr(t: &mut Bench, y: &End, wr_id: u64, key: u32) -> Send {
    let pages = t.on(y).table(&[y.area + 3 * PAGE, y.area + PAGE]);
    let mut reg = WrReg::new_zeroed();
    (reg.key, reg.access, reg.npages) = (key, LOCAL | READ | WRITE, 2);
    (reg.pages, reg.iova, reg.length, reg.page_shift) = (pages, IOVA + 100, 2 * PAGE - 200, 12);
    Send::reg_mr(wr_id, reg)
}

fn create_mr_is_refused(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pdn = a.create_pd()?;
    let most = a.config.max_fast_reg_page_list_len;
    a.journal.holds("D-FRMR-01", "max_fast_reg_page_list_len is not 0", most != 0, most)?;
    let request =
        |pdn, access_flags, max_num_sg| virtio_rdma_cmd_create_mr { pdn, access_flags, max_num_sg };
    for (clause, request, status) in [
        ("D-FRMR-10", request(u32::MAX, 0, 1), NO_OBJECT),
        ("D-FRMR-11", request(pdn, 0, 0), INVALID),
        ("D-FRMR-11", request(pdn, 0, most + 1), INVALID),
        ("D-FRMR-12", request(pdn, LOCAL, 1), INVALID),
    ] {
        a.fails::<_, virtio_rdma_rsp_mr>(clause, CREATE_MR, &request, status)?;
    }
    Ok(())
}

fn free_mr_gives_nothing(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let mr = create_mr(t, &y)?;
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 10).rdma(0, mr.rkey))?;
    t.completes(&x, "D-FRMR-05", 1, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    Ok(())
}

/// Makes an MR VALID, with another low byte in its key. Returns the key.
fn register(t: &mut Bench, y: &End) -> Outcome<u32> {
    let mr = create_mr(t, y)?;
    let key = mr.rkey & !0xff | mr.rkey.wrapping_add(1) & 0xff;
    let send = reg_mr(t, y, 50, key);
    t.post(y, &send)?;
    let cqe = t.succeeds(y, "D-FRMR-14", 50)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_REG_MR)?;
    Ok(key)
}

fn reg_mr_gives_pages(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let key = register(t, &y)?;
    let sent = t.fill(&x, 0, 5000);
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 5000).rdma(IOVA + 100, key))?;
    t.succeeds(&x, "D-FRMR-14", 1)?;
    let first = t.bytes(&y, 3 * PAGE + 100, PAGE as u32 - 100);
    let second = t.bytes(&y, PAGE, 5000 - (PAGE as u32 - 100));
    t.journal.same_bytes("D-FRMR-15", "bytes of both pages", &[first, second].concat(), &sent)?;
    t.journal.pass("D-FRMR-17");
    Ok(())
}

fn local_inv_takes_the_key(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let key = register(t, &y)?;
    for wr_id in [1, 2] {
        // The second one finds an MR that is FREE.
        let send = Send::new(wr_id, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(key);
        t.post(&y, &send)?;
        let clause = if wr_id == 1 { "D-FRMR-19" } else { "D-FRMR-33" };
        t.succeeds(&y, clause, wr_id)?;
    }
    t.post(&x, &x.send(3, RDMA_WRITE, 0, 10).rdma(IOVA + 100, key))?;
    t.completes(&x, "D-FRMR-23", 3, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    t.journal.pass("D-WQE-08");
    Ok(())
}

fn send_with_inv_takes_the_key(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let key = register(t, &y)?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, VIRTIO_RDMA_WR_SEND_WITH_INV, 0, 10).invalidate(key))?;
    t.succeeds(&x, "D-FRMR-21", 2)?;
    let cqe = t.succeeds(&y, "D-FRMR-21", 1)?;
    let has = cqe.wc_flags & VIRTIO_RDMA_WC_WITH_INVALIDATE;
    t.journal.is("D-FRMR-22", "WITH_INVALIDATE", has, VIRTIO_RDMA_WC_WITH_INVALIDATE)?;
    t.journal.is("D-CQ-17", "invalidate_rkey", cqe.ex, key)?;
    t.post(&x, &x.send(3, RDMA_WRITE, 0, 10).rdma(IOVA + 100, key))?;
    t.completes(&x, "D-FRMR-23", 3, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    Ok(())
}

/// A change of what a REG_MR asks for.
type Change = fn(&mut WrReg);

/// Returns a REG_MR with a change.
fn changed(mut send: Send, change: Change) -> Send {
    if let Ok(mut reg) = <WrReg as zerocopy::FromBytes>::read_from_bytes(&send.wr) {
        change(&mut reg);
        send.wr = zerocopy::IntoBytes::as_bytes(&reg).to_vec();
    }
    send
}

fn reg_mr_is_refused(t: &mut Bench) -> Outcome {
    let cases: [(&'static str, Change); 4] = [
        ("D-FRMR-25", |reg| reg.key ^= 0x5500),
        ("D-FRMR-28", |reg| reg.npages = 1),
        ("D-FRMR-28", |reg| reg.length = 0),
        ("D-FRMR-30", |reg| reg.access = WRITE),
    ];
    for (clause, change) in cases {
        let (_, y) = connection(t)?;
        let mr = create_mr(t, &y)?;
        let send = changed(reg_mr(t, &y, 1, mr.rkey), change);
        t.post(&y, &send)?;
        t.completes(&y, clause, 1, BIND_ERR)?;
        t.has_state(&y, "D-FRMR-34", VIRTIO_RDMA_QPS_ERR)?;
    }
    let (_, y) = connection(t)?;
    let key = register(t, &y)?;
    let again = reg_mr(t, &y, 2, key);
    t.post(&y, &again)?;
    t.completes(&y, "D-FRMR-26", 2, BIND_ERR)?;
    Ok(())
}

fn opcodes_without_their_feature(t: &mut Bench) -> Outcome {
    for (clause, opcode) in [
        ("D-FRMR-02", VIRTIO_RDMA_WR_REG_MR),
        ("D-FRMR-03", VIRTIO_RDMA_WR_LOCAL_INV),
        ("D-FRMR-03", VIRTIO_RDMA_WR_SEND_WITH_INV),
        ("D-FRMR-03", VIRTIO_RDMA_WR_RDMA_READ_WITH_INV),
        ("D-MW-03", VIRTIO_RDMA_WR_BIND_MW),
        ("D-FLUSH-01", VIRTIO_RDMA_WR_FLUSH),
        ("D-AW-01", VIRTIO_RDMA_WR_ATOMIC_WRITE),
    ] {
        let (x, y) = connection(t)?;
        t.receive(&y, 1, 0, 100)?;
        t.post(&x, &Send::new(2, opcode, &[]))?;
        t.completes(&x, clause, 2, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    }
    Ok(())
}

fn reg_mr_of_bad_memory(t: &mut Bench) -> Outcome {
    let cases: [(&'static str, u32, Change); 4] = [
        ("D-FRMR-31", VIRTIO_RDMA_WC_LOC_PROT_ERR, |reg| reg.pages = NOWHERE),
        ("D-FRMR-31", VIRTIO_RDMA_WC_LOC_PROT_ERR, |reg| reg.pages += 4),
        ("D-FRMR-27", BIND_ERR, |reg| reg.page_shift = 11),
        ("D-FRMR-29", BIND_ERR, |reg| reg.iova = u64::MAX - PAGE + 101),
    ];
    for (clause, status, change) in cases {
        let (_, y) = connection(t)?;
        let mr = create_mr(t, &y)?;
        let send = changed(reg_mr(t, &y, 1, mr.rkey), change);
        t.post(&y, &send)?;
        t.completes(&y, clause, 1, status)?;
    }
    Ok(())
}

fn reg_mr_is_not_for_programs(t: &mut Bench) -> Outcome {
    let (_, y) = t.connection()?;
    let mr = create_mr(t, &y)?;
    let send = reg_mr(t, &y, 1, mr.rkey);
    t.post(&y, &send)?;
    t.completes(&y, "D-FRMR-18", 1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    Ok(())
}

fn management_has_no_sges(t: &mut Bench) -> Outcome {
    let (_, y) = connection(t)?;
    let key = register(t, &y)?;
    let send = y.send(1, VIRTIO_RDMA_WR_LOCAL_INV, 0, 8).invalidate(key);
    t.post(&y, &send)?;
    t.completes(&y, "D-WQE-19", 1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    Ok(())
}

fn invalidation_by_a_wrong_key(t: &mut Bench) -> Outcome {
    let (_, y) = connection(t)?;
    let key = register(t, &y)?;
    for wrong in [key ^ 1, y.mr.lkey] {
        let (_, other) = connection(t)?;
        // A QP of the same PD.
        let z = privileged(t, &End { qpn: 0, ..y })?;
        t.connect(&z, &other, RC, crate::bench::Link::default())?;
        let send = Send::new(1, VIRTIO_RDMA_WR_LOCAL_INV, &[]).invalidate(wrong);
        t.post(&z, &send)?;
        t.completes(&z, "D-FRMR-32", 1, BIND_ERR)?;
    }
    Ok(())
}

fn windows_are_refused(t: &mut Bench) -> Outcome {
    let a = t.a();
    let most = a.config.max_mw;
    a.journal.holds("D-MW-01", "max_mw is not 0", most != 0, most)?;
    let pdn = a.create_pd()?;
    let request =
        |pdn, kind: u8| virtio_rdma_cmd_alloc_mw { pdn, type_: kind, reserved_05: [0; 3] };
    for (clause, request, status) in [
        ("D-MW-11", request(u32::MAX, 1), NO_OBJECT),
        ("D-MW-12", request(pdn, 0), INVALID),
        ("D-MW-12", request(pdn, 3), INVALID),
    ] {
        a.fails::<_, virtio_rdma_rsp_alloc_mw>(clause, ALLOC_MW, &request, status)?;
    }
    let mw: virtio_rdma_rsp_alloc_mw =
        a.command("D-MW-06", ALLOC_MW.0, ALLOC_MW.1, &request(pdn, 2))?;
    a.command::<_, ()>(
        "D-MW-07",
        DEALLOC_MW.0,
        DEALLOC_MW.1,
        &virtio_rdma_cmd_dealloc_mw { mwn: mw.mwn },
    )?;
    let gone = virtio_rdma_cmd_dealloc_mw { mwn: mw.mwn };
    a.fails::<_, ()>("D-MW-14", DEALLOC_MW, &gone, NO_OBJECT)
}

fn windows_are_bound_by_the_rules(t: &mut Bench) -> Outcome {
    type Change = fn(&mut virtio_rdma_ring_bind_wqe);
    let cases: [(&'static str, Change); 6] = [
        ("D-MW-31", |bind| bind.mw_rkey ^= 0x5500),
        ("D-MW-32", |bind| bind.access = 1 << 30),
        ("D-MW-33", |bind| bind.lkey ^= 1),
        ("D-MW-36", |bind| bind.length = 2 * PAGE),
        ("D-MW-36", |bind| bind.addr -= 1000),
        ("D-MW-37", |bind| bind.length = 0),
    ];
    for (clause, change) in cases {
        let (_, y) = connection(t)?;
        let (_, mut entry, _) = binding(t, &y, LOCAL | 1 << 4)?;
        change(&mut entry);
        t.post(&y, &Send::bind_mw(1, entry))?;
        t.completes(&y, clause, 1, BIND_ERR)?;
        t.has_state(&y, "D-MW-41", VIRTIO_RDMA_QPS_ERR)?;
    }
    let (_, y) = connection(t)?;
    let (_, entry, _) = binding(t, &y, LOCAL)?;
    t.post(&y, &Send::bind_mw(2, entry))?;
    t.completes(&y, "D-MW-34", 2, BIND_ERR)?;
    let (x, y) = connection(t)?;
    let (_, entry, _) = binding(t, &y, LOCAL | 1 << 4)?;
    t.post(&x, &x.send(3, RDMA_WRITE, 0, 10).rdma(y.area + 200, entry.mw_rkey))?;
    t.completes(&x, "D-MW-04", 3, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    let (_, y) = connection(t)?;
    let (_, key, _) = bind(t, &y)?;
    t.post(&y, &Send::new(4, VIRTIO_RDMA_WR_SEND, &[sge(y.area + 200, 10, key)]))?;
    t.completes(&y, "D-MW-05", 4, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    Ok(())
}

/// Makes a window of type 2, an MR with these rights, and the entry that binds the one to the other: 100 bytes, 200
/// bytes into the memory of an end.
fn binding(
    t: &mut Bench,
    y: &End,
    access: u32,
) -> Outcome<(u32, virtio_rdma_ring_bind_wqe, virtio_rdma_rsp_mr)> {
    let request = virtio_rdma_cmd_alloc_mw { pdn: y.pdn, type_: 2, reserved_05: [0; 3] };
    let (name, number) = ALLOC_MW;
    let mw: virtio_rdma_rsp_alloc_mw = t.on(y).command("D-MW-06", name, number, &request)?;
    let mr = t.on(y).reg_mr(y.pdn, y.area, PAGE, access)?;
    let mut entry = virtio_rdma_ring_bind_wqe::new_zeroed();
    (entry.mw_rkey, entry.new_rkey, entry.access) = (mw.rkey, mw.rkey ^ 0x3c, WRITE);
    (entry.addr, entry.length, entry.lkey) = (y.area + 200, 100, mr.lkey);
    Ok((mw.mwn, entry, mr))
}

/// Binds a window of type 2 to 100 bytes, 200 bytes into the memory of an end. Returns the window, its key and the MR.
fn bind(t: &mut Bench, y: &End) -> Outcome<(u32, u32, virtio_rdma_rsp_mr)> {
    let (mwn, entry, mr) = binding(t, y, LOCAL | 1 << 4)?;
    t.post(y, &Send::bind_mw(60, entry))?;
    let cqe = t.succeeds(y, "D-MW-15", 60)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_BIND_MW)?;
    Ok((mwn, entry.new_rkey, mr))
}

fn window_gives_its_range(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let (_, key, _) = bind(t, &y)?;
    let sent = t.fill(&x, 0, 100);
    t.on(&y).write(y.area, &[0x77; 400]);
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 100).rdma(y.area + 200, key))?;
    t.succeeds(&x, "D-MW-17", 1)?;
    let got = t.bytes(&y, 0, 400);
    let expected = [&[0x77; 200][..], &sent, &[0x77; 100]].concat();
    t.journal.same_bytes("D-MW-17", "memory around the window", &got, &expected)?;
    t.post(&x, &x.send(2, RDMA_WRITE, 0, 100).rdma(y.area + 201, key))?;
    t.completes(&x, "D-MW-44", 2, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    let (x, y) = connection(t)?;
    let (_, key, _) = bind(t, &y)?;
    let read = Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &[sge(x.area, 10, x.mr.lkey)]);
    t.post(&x, &read.rdma(y.area + 200, key))?;
    t.completes(&x, "D-MW-19", 3, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    Ok(())
}

fn window_that_is_gone(t: &mut Bench) -> Outcome {
    let (x, y) = connection(t)?;
    let (mwn, key, mr) = bind(t, &y)?;
    let request = virtio_rdma_cmd_dereg_mr { mrn: mr.mrn };
    let name = ("DEREG_MR", VIRTIO_RDMA_CMD_DEREG_MR);
    t.on(&y).fails::<_, ()>("D-CTRL-56", name, &request, VIRTIO_RDMA_STATUS_BUSY)?;
    let gone = virtio_rdma_cmd_dealloc_mw { mwn };
    t.on(&y).command::<_, ()>("D-MW-07", DEALLOC_MW.0, DEALLOC_MW.1, &gone)?;
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 10).rdma(y.area + 200, key))?;
    t.completes(&x, "D-MW-08", 1, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    t.on(&y).dereg_mr(mr.mrn)
}
