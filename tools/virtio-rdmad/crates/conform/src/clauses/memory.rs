// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory regions: keys, access flags and page tables.

use abi::*;
use testkit::command::{self, PAGE};
use testkit::{sge, ALL, LOCAL, READ, WRITE};

use crate::bench::{Bench, Change};
use crate::driver::NOWHERE;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    keys_differ One []: "D-MR-01" "D-MR-02" "D-MR-03" "D-MR-05";
    wrong_low_bits_give_nothing One []: "D-MR-04" "D-WQE-41";
    unknown_access_flags One []: "D-MR-06" "D-MR-07";
    remote_writes_need_local_ones One []: "D-MR-08";
    hints_are_accepted One []: "D-MR-09" "D-MR-10";
    owner_reads_always One []: "D-MR-11";
    pages_are_in_the_order_of_the_table One []: "D-MR-12" "D-MR-15";
    levels_and_sizes_are_ignored One []: "D-MR-16" "D-MR-19";
    entries_beyond_npages_are_ignored One []: "D-MR-20" "D-MR-22";
    refused_regions One []: "D-CTRL-48" "D-CTRL-49" "D-CTRL-50" "D-CTRL-53" "D-CTRL-54";
    dereg_mr_ends_access One []: "D-CTRL-26" "D-CTRL-55";
    dma_mr_is_all_memory One []: "D-CTRL-24" "D-MR-41" "D-MR-43";
    atomic_needs_local One [VIRTIO_RDMA_F_ATOMICS]: "D-MR-08";
    lists_of_pages One [VIRTIO_RDMA_F_PAGE_LEVELS]: "D-MR-17" "D-CTRL-51";
    page_sizes One [VIRTIO_RDMA_F_PAGE_SIZES]: "D-MR-13" "D-CTRL-52";
}

const REG_USER_MR: (&str, u32) = ("REG_USER_MR", VIRTIO_RDMA_CMD_REG_USER_MR);

fn keys_differ(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    let mut keys = Vec::new();
    for _ in 0..32 {
        keys.push(a.reg_mr(pdn, at, PAGE, LOCAL)?.lkey);
    }
    let mut upper: Vec<u32> = keys.iter().map(|key| key >> 8).collect();
    upper.sort_unstable();
    upper.dedup();
    a.journal.is("D-MR-01", "keys with other upper 24 bits", upper.len(), keys.len())?;
    // That no key follows from another one cannot be seen, but what counts up can.
    let step = keys[1].wrapping_sub(keys[0]);
    let counts = keys.windows(2).all(|two| two[1].wrapping_sub(two[0]) == step);
    a.journal.holds("D-MR-05", "keys do not count up", !counts, &keys[..4])?;
    let low = keys.iter().all(|key| key & 0xff == keys[0] & 0xff);
    a.journal.holds("D-MR-05", "the low 8 bits of keys are random, too", !low, &keys[..4])
}

fn wrong_low_bits_give_nothing(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 64)?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, 64);
    send.sges[0].lkey ^= 1;
    t.post(&x, &send)?;
    t.completes(&x, "D-MR-04", 2, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    t.journal.pass("D-WQE-41");
    Ok(())
}

fn unknown_access_flags(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    let known = 0x1f | 1 << 7 | 1 << 20 | 1 << 8 | 1 << 9;
    for bit in (0..32).map(|bit| 1_u32 << bit).filter(|bit| bit & known == 0) {
        let request = a.mr_request(pdn, at, PAGE, LOCAL | bit);
        a.fails::<_, virtio_rdma_rsp_mr>(
            "D-MR-06",
            REG_USER_MR,
            &request,
            VIRTIO_RDMA_STATUS_INVAL,
        )?;
    }
    let request = a.mr_request(pdn, at, PAGE, LOCAL | 1 << 8);
    a.fails::<_, virtio_rdma_rsp_mr>("D-MR-07", REG_USER_MR, &request, VIRTIO_RDMA_STATUS_INVAL)?;
    let request = virtio_rdma_cmd_get_dma_mr { pdn, access_flags: 1 << 5 };
    let name = ("GET_DMA_MR", VIRTIO_RDMA_CMD_GET_DMA_MR);
    a.fails::<_, virtio_rdma_rsp_mr>("D-MR-06", name, &request, VIRTIO_RDMA_STATUS_INVAL)
}

fn remote_writes_need_local_ones(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    for access in [WRITE, WRITE | READ] {
        let request = a.mr_request(pdn, at, PAGE, access);
        a.fails::<_, virtio_rdma_rsp_mr>(
            "D-MR-08",
            REG_USER_MR,
            &request,
            VIRTIO_RDMA_STATUS_INVAL,
        )?;
    }
    a.reg_mr(pdn, at, PAGE, READ)?;
    Ok(())
}

fn atomic_needs_local(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    let request = a.mr_request(pdn, at, PAGE, VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC);
    a.fails::<_, virtio_rdma_rsp_mr>("D-MR-08", REG_USER_MR, &request, VIRTIO_RDMA_STATUS_INVAL)
}

fn hints_are_accepted(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    for (clause, hint) in [("D-MR-09", 1 << 4), ("D-MR-10", 1 << 7), ("D-MR-10", 1 << 20)] {
        let request = a.mr_request(pdn, at, PAGE, LOCAL | hint);
        let (name, number) = REG_USER_MR;
        let _: virtio_rdma_rsp_mr = a.command(clause, name, number, &request)?;
    }
    Ok(())
}

fn owner_reads_always(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let sent = t.fill(&x, 0, 100);
    let mr = t.on(&x).reg_mr(x.pdn, x.area, PAGE, 0)?;
    t.receive(&y, 1, 4096, 100)?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, 100);
    send.sges[0].lkey = mr.lkey;
    t.post(&x, &send)?;
    t.succeeds(&x, "D-MR-11", 2)?;
    let got = t.bytes(&y, 4096, 100);
    t.journal.same_bytes("D-MR-11", "message", &got, &sent)
}

/// Sends 3 pages of an MR whose pages are in another order in memory, and checks what arrives.
fn is_shuffled(
    t: &mut Bench,
    clause: &'static str,
    change: fn(&mut virtio_rdma_cmd_reg_user_mr),
) -> Outcome {
    let (x, y) = t.connection()?;
    let a = t.on(&x);
    // The MR begins 1000 bytes into its first page, and ends 96 bytes into its third.
    let pages: Vec<u64> = [2, 0, 3].map(|page| x.area + page * PAGE).to_vec();
    let len = 3096 + PAGE + 96;
    // The entry behind the last one is no address at all.
    let table = a.table(&[&pages[..], &[u64::MAX]].concat());
    let iova = 0x7000_0000_0000 + 1000;
    let mut request = command::reg_user_mr(x.pdn, LOCAL, (iova, len), (table, 3));
    change(&mut request);
    let (name, number) = REG_USER_MR;
    let mr: virtio_rdma_rsp_mr = a.command(clause, name, number, &request)?;
    // The device has done with the table.
    a.write(table, &[0xff; 32]);
    t.fill(&x, 0, 5 * PAGE as u32);
    let part = |t: &mut Bench, page: u64, from: u64, to: u64| {
        t.bytes(&x, page * PAGE + from, (to - from) as u32)
    };
    let expected = [part(t, 2, 1000, PAGE), part(t, 0, 0, PAGE), part(t, 3, 0, 96)].concat();
    let far = sge(y.area + 0x1_0000, len as u32, y.mr.lkey);
    t.on(&y).post_recv(y.qpn, 1, &[far])?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, len as u32);
    send.sges[0] = sge(iova, len as u32, mr.lkey);
    t.post(&x, &send)?;
    t.succeeds(&x, clause, 2)?;
    let got = t.bytes(&y, 0x1_0000, len as u32);
    t.journal.same_bytes(clause, "bytes of the MR", &got, &expected)
}

fn pages_are_in_the_order_of_the_table(t: &mut Bench) -> Outcome {
    is_shuffled(t, "D-MR-12", |_| {})
}

fn levels_and_sizes_are_ignored(t: &mut Bench) -> Outcome {
    is_shuffled(t, "D-MR-16", |request| {
        request.page_shift = 30;
        request.levels = 7;
    })?;
    t.journal.pass("D-MR-19");
    Ok(())
}

fn entries_beyond_npages_are_ignored(t: &mut Bench) -> Outcome {
    is_shuffled(t, "D-MR-20", |_| {})?;
    t.journal.pass("D-MR-22");
    Ok(())
}

fn refused_regions(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(2 * PAGE, PAGE));
    let most = a.config.max_mr_size;
    let tables = [a.table(&[at, at + 8]), a.table(&[at, NOWHERE])];
    let (invalid, fault) = (VIRTIO_RDMA_STATUS_INVAL, VIRTIO_RDMA_STATUS_FAULT);
    let cases: Vec<(&'static str, u32, Change<virtio_rdma_cmd_reg_user_mr>)> = vec![
        ("D-CTRL-49", invalid, Box::new(|it| it.npages = 1)),
        ("D-CTRL-49", invalid, Box::new(|it| it.npages = 3)),
        ("D-CTRL-49", invalid, Box::new(|it| it.length = 0)),
        ("D-CTRL-49", invalid, Box::new(|it| it.length += PAGE)),
        ("D-CTRL-49", invalid, Box::new(|it| it.start += 1)),
        ("D-CTRL-50", invalid, Box::new(|it| it.pages += 4)),
        ("D-CTRL-50", invalid, Box::new(move |it| it.pages = tables[0])),
        ("D-CTRL-53", invalid, Box::new(|it| it.virt_addr = u64::MAX - PAGE)),
        ("D-CTRL-54", fault, Box::new(|it| it.pages = NOWHERE)),
        ("D-CTRL-54", fault, Box::new(move |it| it.pages = tables[1])),
    ];
    for (clause, status, change) in cases {
        let mut request = a.mr_request(pdn, at, 2 * PAGE, LOCAL);
        change(&mut request);
        a.fails::<_, virtio_rdma_rsp_mr>(clause, REG_USER_MR, &request, status)?;
    }
    if let Ok(pages) = u32::try_from((most / PAGE).saturating_add(1)) {
        let mut request = a.mr_request(pdn, at, 2 * PAGE, LOCAL);
        (request.length, request.npages) = (u64::from(pages) * PAGE, pages);
        a.fails::<_, virtio_rdma_rsp_mr>("D-CTRL-48", REG_USER_MR, &request, invalid)?;
    }
    Ok(())
}

fn dereg_mr_ends_access(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let mr = t.on(&x).reg_mr(x.pdn, x.area, PAGE, LOCAL)?;
    t.on(&x).dereg_mr(mr.mrn)?;
    let request = virtio_rdma_cmd_dereg_mr { mrn: mr.mrn };
    let name = ("DEREG_MR", VIRTIO_RDMA_CMD_DEREG_MR);
    t.on(&x).fails::<_, ()>("D-CTRL-55", name, &request, VIRTIO_RDMA_STATUS_NO_OBJECT)?;
    t.receive(&y, 1, 4096, 64)?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, 64);
    send.sges[0].lkey = mr.lkey;
    t.post(&x, &send)?;
    t.completes(&x, "D-CTRL-26", 2, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    Ok(())
}

fn dma_mr_is_all_memory(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let request = virtio_rdma_cmd_get_dma_mr { pdn: x.pdn, access_flags: LOCAL };
    let (name, number) = ("GET_DMA_MR", VIRTIO_RDMA_CMD_GET_DMA_MR);
    let mr: virtio_rdma_rsp_mr = t.on(&x).command("D-CTRL-24", name, number, &request)?;
    t.on(&x).check_keys(&mr)?;
    let sent = t.fill(&x, 0, 3000);
    t.receive(&y, 1, 0x8000, 3000)?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, 3000);
    send.sges[0].lkey = mr.lkey;
    t.post(&x, &send)?;
    t.succeeds(&x, "D-MR-41", 2)?;
    let got = t.bytes(&y, 0x8000, 3000);
    t.journal.same_bytes("D-CTRL-24", "message", &got, &sent)?;
    t.succeeds(&y, "D-MR-41", 1)?;
    t.receive(&y, 3, 0x8000, 3000)?;
    let mut send = x.send(4, VIRTIO_RDMA_WR_SEND, 0, 3000);
    send.sges[0] = sge(NOWHERE, 100, mr.lkey);
    t.post(&x, &send)?;
    t.completes(&x, "D-MR-43", 4, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    Ok(())
}

fn lists_of_pages(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let a = t.on(&x);
    // 600 pages, most of them the same one, in two pages of entries.
    let mut pages = vec![x.area; 600];
    (pages[511], pages[512]) = (x.area + PAGE, x.area + 2 * PAGE);
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    let table = a.allocate(2 * PAGE, PAGE);
    a.write(table, &bytes);
    let list = a.table(&[table, table + PAGE]);
    let iova = 0x1000_0000;
    let mut request = command::reg_user_mr(x.pdn, LOCAL, (iova, 600 * PAGE), (list, 600));
    request.levels = 1;
    let (name, number) = REG_USER_MR;
    let mr: virtio_rdma_rsp_mr = a.command("D-MR-17", name, number, &request)?;
    request.levels = 4;
    a.fails::<_, virtio_rdma_rsp_mr>("D-CTRL-51", REG_USER_MR, &request, VIRTIO_RDMA_STATUS_INVAL)?;
    let sent = t.fill(&x, PAGE, 2 * PAGE as u32);
    t.receive(&y, 1, 0x8000, 2 * PAGE as u32)?;
    let mut send = x.send(2, VIRTIO_RDMA_WR_SEND, 0, 1);
    send.sges[0] = sge(iova + 511 * PAGE, 2 * PAGE as u32, mr.lkey);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-MR-17", 2)?;
    let got = t.bytes(&y, 0x8000, 2 * PAGE as u32);
    t.journal.same_bytes("D-MR-17", "pages 511 and 512", &got, &sent)
}

fn page_sizes(t: &mut Bench) -> Outcome {
    let a = t.a();
    let sizes = a.config.page_size_cap;
    let large = (13_u8..22).find(|shift| sizes >> shift & 1 != 0);
    t.needs(large.is_some(), "no page size from 8 KiB to 2 MiB")?;
    let shift = large.unwrap_or(21);
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(1 << shift, 1 << shift));
    let table = a.table(&[at]);
    let mut request =
        command::reg_user_mr(pdn, ALL & !testkit::ATOMIC, (at + 100, PAGE), (table, 1));
    request.page_shift = shift;
    let (name, number) = REG_USER_MR;
    let _: virtio_rdma_rsp_mr = a.command("D-MR-13", name, number, &request)?;
    let none = (12_u8..64).find(|shift| sizes >> shift & 1 == 0).unwrap_or(11);
    for wrong in [0, 11, none] {
        request.page_shift = wrong;
        a.fails::<_, virtio_rdma_rsp_mr>(
            "D-CTRL-52",
            REG_USER_MR,
            &request,
            VIRTIO_RDMA_STATUS_INVAL,
        )?;
    }
    Ok(())
}
