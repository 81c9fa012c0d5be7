// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Features and the configuration space, before the device starts.

use abi::*;

use crate::bench::Bench;
use crate::driver::Driver;
use crate::outcome::{not_judged, Outcome};
use crate::port::F_VERSION_1;
use crate::reply::reserved_of_config;
use crate::test::family;

family! {
    required_bits_are_offered One [] [idle]: "D-FEAT-01";
    rings_are_offered One [] [idle]: "D-FEAT-05";
    bits_of_the_transport One [] [idle]: "D-FEAT-15" "D-FEAT-16";
    no_legacy_interface One [] [idle]: "D-TERM-08";
    no_migration One [] [idle]: "D-INIT-02";
    features_ok_needs_what_a_bit_requires One [] [idle]: "D-FEAT-02";
    features_ok_needs_one_data_path One [] [idle]: "D-FEAT-12";
    missing_requirements_do_not_count One [] [idle]: "D-FEAT-03";
    features_are_repeated One [] [idle]: "D-FEAT-04";
    magic_and_revision One [] [idle]: "D-CFG-04" "D-CFG-05";
    reserved_fields_are_zero One [] [idle]: "D-CFG-01" "D-TERM-03";
    limits_make_sense One [] [idle]:
        "D-CFG-06" "D-CFG-07" "D-CFG-08" "D-CFG-09" "D-CFG-14" "D-RING-02" "D-PORT-17";
    configuration_is_constant One []: "D-CFG-03";
    writes_are_ignored One []: "D-CFG-02";
    control_queue_has_entries One [] [idle]: "D-RING-11" "D-RING-03";
}

/// VIRTIO_F_RING_RESET and VIRTIO_F_SUSPEND.
const F_RING_RESET: u32 = 40;
const F_SUSPEND: u32 = 42;
/// The device-specific bits that the specification lists.
const SPECIFIC: u64 = (1 << 23) - 1;
/// The bytes of the configuration space.
const CONFIG: usize = size_of::<virtio_rdma_config>();

fn required_bits_are_offered(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()? & SPECIFIC;
    let missing = offered & !closed(offered);
    a.journal.zero("D-FEAT-01", "bits that are offered without what they require", missing)
}

fn rings_are_offered(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    let has_rings = offered >> VIRTIO_RDMA_F_RINGS & 1;
    a.journal.is("D-FEAT-05", "VIRTIO_RDMA_F_RINGS", has_rings, 1)
}

fn bits_of_the_transport(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    a.journal.is("D-FEAT-15", "VIRTIO_F_RING_RESET", offered >> F_RING_RESET & 1, 0)?;
    a.journal.is("D-FEAT-16", "VIRTIO_F_SUSPEND", offered >> F_SUSPEND & 1, 0)
}

fn no_legacy_interface(t: &mut Bench) -> Outcome {
    let a = t.a();
    match a.port.is_legacy()? {
        None => not_judged("the transport tells no devices with a legacy interface apart"),
        Some(is_legacy) => a.journal.is("D-TERM-08", "a legacy interface", is_legacy, false),
    }
}

fn no_migration(t: &mut Bench) -> Outcome {
    let a = t.a();
    match a.port.offers_migration()? {
        None => not_judged("the transport has no means of migration"),
        Some(offers) => a.journal.is("D-INIT-02", "means of migration", offers, false),
    }
}

/// Checks that FEATURES_OK does not stand for these bits.
fn is_refused(a: &mut Driver, clause: &'static str, features: u64) -> Outcome {
    let stands = a.negotiate(features | F_VERSION_1)?;
    a.port.reset()?;
    match stands {
        None => not_judged("the transport has no FEATURES_OK"),
        stands => {
            a.journal.is(clause, &format!("FEATURES_OK for {features:#x}"), stands, Some(false))
        }
    }
}

/// Returns an offered bit that requires RINGS.
fn dependent(offered: u64) -> Outcome<u64> {
    let bits = [VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_CQ_RESIZE, VIRTIO_RDMA_F_FLUSH];
    match bits.into_iter().find(|bit| offered >> bit & 1 != 0) {
        Some(bit) => Ok(1 << bit),
        None => not_judged("no bit is offered that requires another one"),
    }
}

fn features_ok_needs_what_a_bit_requires(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    let (virtqueues, rings) = (1 << VIRTIO_RDMA_F_VIRTQUEUES, 1 << VIRTIO_RDMA_F_RINGS);
    if offered >> VIRTIO_RDMA_F_XRC & 1 != 0 {
        is_refused(a, "D-FEAT-02", rings | 1 << VIRTIO_RDMA_F_XRC)?;
    }
    let dependent = dependent(offered)?;
    if offered & virtqueues != 0 {
        return is_refused(a, "D-FEAT-02", virtqueues | dependent);
    }
    is_refused(a, "D-FEAT-02", dependent)
}

fn features_ok_needs_one_data_path(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    is_refused(a, "D-FEAT-12", 0)?;
    let both = 1 << VIRTIO_RDMA_F_VIRTQUEUES | 1 << VIRTIO_RDMA_F_RINGS;
    if offered & both == both {
        return is_refused(a, "D-FEAT-12", both);
    }
    Ok(())
}

fn missing_requirements_do_not_count(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    t.needs(offered >> VIRTIO_RDMA_F_XRC & 1 != 0, "not offered: XRC")?;
    let a = t.a();
    // XRC requires SRQ.
    let features = F_VERSION_1 | 1 << VIRTIO_RDMA_F_RINGS | 1 << VIRTIO_RDMA_F_XRC;
    if a.negotiate(features)?.is_some() {
        return not_judged("the transport has FEATURES_OK");
    }
    a.start()?;
    let name = ("ALLOC_XRCD", VIRTIO_RDMA_CMD_ALLOC_XRCD);
    let unsupported = VIRTIO_RDMA_STATUS_UNSUPPORTED;
    a.fails::<_, virtio_rdma_rsp_alloc_xrcd>("D-FEAT-03", name, &(), unsupported)
}

fn features_are_repeated(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()? & SPECIFIC;
    // The operator may have the device offer less than it implements.
    let missing = offered & !a.config.features;
    a.journal.zero("D-FEAT-04", "offered bits that config.features lacks", missing)
}

fn magic_and_revision(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (magic, revision) = (a.config.magic, a.config.revision);
    a.journal.is("D-CFG-04", "magic", magic, VIRTIO_RDMA_MAGIC)?;
    a.journal.is("D-CFG-05", "revision", revision, VIRTIO_RDMA_REVISION)
}

fn reserved_fields_are_zero(t: &mut Bench) -> Outcome {
    let a = t.a();
    let bytes = a.port.config(CONFIG)?;
    a.journal.is("D-CFG-01", "bytes of the configuration space", bytes.len(), CONFIG)?;
    for range in reserved_of_config() {
        let what = format!("bytes {range:#x?} of the configuration space");
        let zeros = vec![0; range.len()];
        a.journal.same_bytes("D-TERM-03", &what, &bytes[range], &zeros)?;
    }
    Ok(())
}

fn limits_make_sense(t: &mut Bench) -> Outcome {
    let a = t.a();
    let config = a.config;
    let journal = std::rc::Rc::clone(&a.journal);
    journal.is("D-CFG-06", "phys_port_cnt", config.phys_port_cnt, 1)?;
    journal.is("D-CFG-06", "4 KiB in page_size_cap", config.page_size_cap >> 12 & 1, 1)?;
    for (what, limit) in [
        ("ring_max_qp", config.ring_max_qp),
        ("ring_max_qp_wr", config.ring_max_qp_wr),
        ("ring_max_cq", config.ring_max_cq),
        ("ring_max_cqe", config.ring_max_cqe),
        ("max_pd", config.max_pd),
        ("max_mr", config.max_mr),
        ("max_send_sge", config.max_send_sge),
        ("max_recv_sge", config.max_recv_sge),
    ] {
        journal.holds("D-CFG-06", &format!("{what} is not 0"), limit != 0, limit)?;
    }
    for (what, limit) in
        [("ring_max_qp_wr", config.ring_max_qp_wr), ("ring_max_cqe", config.ring_max_cqe)]
    {
        let is_power = limit.is_power_of_two();
        journal.holds("D-CFG-06", &format!("{what} is a power of two"), is_power, limit)?;
    }
    journal.holds("D-RING-02", "num_comp_vectors is not 0", config.num_comp_vectors != 0, 0)?;
    let sge = config.max_send_sge;
    journal.holds("D-CFG-07", "max_send_sge is at most 251", sge <= 251, sge)?;
    let sge = config.max_recv_sge.max(config.max_srq_sge);
    journal.holds("D-CFG-08", "SGEs of receives are at most 255", sge <= 255, sge)?;
    let inline = config.ring_max_inline_data;
    journal.holds("D-CFG-09", "inline data is at most 4016 bytes", inline <= 4016, inline)?;
    journal.is("D-CFG-14", "max_pkeys", config.max_pkeys, 1)?;
    journal.pass("D-PORT-17");
    Ok(())
}

fn configuration_is_constant(t: &mut Bench) -> Outcome {
    let a = t.a();
    let mut before = a.config;
    let pdn = a.create_pd()?;
    a.journal.step(format!("the configuration after PD {pdn} was made"));
    a.read_config()?;
    let mut after = a.config;
    (before.fw_ver, after.fw_ver) = (0, 0);
    let (before, after) = (bytes_of(&before), bytes_of(&after));
    a.journal.same_bytes("D-CFG-03", "configuration space", &after, &before)
}

fn writes_are_ignored(t: &mut Bench) -> Outcome {
    let a = t.a();
    for at in [0, 8, CONFIG - 4] {
        a.journal.step(format!("write of the configuration at {at}"));
        if !a.port.write_config(at, &[0xff; 4])? {
            return not_judged("the transport has no way to write the configuration");
        }
    }
    let (mut before, mut after) = (a.config, a.port.config(CONFIG)?);
    before.fw_ver = 0;
    let fw_ver = std::mem::offset_of!(virtio_rdma_config, fw_ver);
    after[fw_ver..fw_ver + size_of_val(&before.fw_ver)].fill(0);
    let before = bytes_of(&before);
    a.journal.same_bytes("D-CFG-02", "configuration space", &after, &before)
}

fn bytes_of(config: &virtio_rdma_config) -> Vec<u8> {
    use zerocopy::IntoBytes;
    config.as_bytes().to_vec()
}

fn control_queue_has_entries(t: &mut Bench) -> Outcome {
    let a = t.a();
    if let Some(count) = a.port.queue_count()? {
        let needed = 3 + a.vectors();
        let has_all = count >= needed;
        a.journal.holds("D-RING-03", &format!("{needed} virtqueues or more"), has_all, count)?;
    }
    match a.port.queue_max_size(0)? {
        None => not_judged("the transport does not say how large a virtqueue may be"),
        Some(size) => a.journal.holds("D-RING-11", "2 entries or more", size >= 2, size),
    }
}
