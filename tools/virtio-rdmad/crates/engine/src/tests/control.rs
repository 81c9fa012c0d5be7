// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests control commands, and the status of each error.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::sync::Arc;

use abi::*;
use memory::{GuestMemory, GuestRegion};
use testkit::command::{add_gid, attr_mask, attributes, reg_user_mr};
use testkit::socket::new_memory;
use zerocopy::{FromBytes, IntoBytes};

use super::driver::*;
use crate::{Counter, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Limits, Paths};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;

fn guest() -> Guest {
    let (fabric, clock) = fabric();
    Guest::new(&fabric, &clock, 1)
}

thread_local! {
    /// The number that fabrics with random numbers draw.
    static RANDOM: Cell<u64> = const { Cell::new(0) };
}

/// Makes all QPs that a guest can have, and returns their numbers in this order.
fn all_qpns(guest: &mut Guest) -> Vec<u32> {
    let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
    let request = Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_RC);
    std::iter::from_fn(|| guest.try_create_qp(request).ok()).collect()
}

/// A peer that has missed the end of a guest takes its first connection for one that it has already if the QPN is the
/// same. So QPNs begin at another one whenever a device starts, new or after a reset.
#[test]
fn qpns_begin_at_random() {
    without_upgrades();
    let test = || {
        let clock = TestClock::new();
        let fabric = Fabric::new(FabricConfig { random: || RANDOM.get(), ..fabric_config(&clock) });
        for random in [0, 1, 4, u64::MAX] {
            let first = 2 + (random % 5) as u32;
            let expected: Vec<_> = (first..=6).chain(2..first).collect();
            RANDOM.set(random);
            let mut guest = Guest::new(&fabric, &clock, 1);
            assert_eq!(all_qpns(&mut guest), expected);
            RANDOM.set(random % 5 + 1);
            guest.device.reset();
            guest.start();
            assert_ne!(all_qpns(&mut guest)[0], first);
        }
    };
    test();
    with_rings(test);
}

/// Numbers of the machine's own.
#[test]
fn qpns_of_two_devices_are_not_the_same() {
    let limits = Limits { ring_qp: 16_384, ..limits() };
    let first = |_| {
        with_rings(|| {
            let clock = TestClock::new();
            let clock_of_fabric = Arc::clone(&clock) as _;
            let fabric =
                Fabric::new(FabricConfig { clock: clock_of_fabric, ..FabricConfig::default() });
            let setup = Setup { limits: limits.clone(), ..Setup::default() };
            let mut guest = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
            let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
            guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC)
        })
    };
    let qpns: std::collections::HashSet<_> = (0..4).map(first).collect();
    assert!(qpns.len() > 1, "{qpns:?}");
}

#[test]
fn configuration_space_names_the_limits() {
    let guest = guest();
    let config = virtio_rdma_config::read_from_bytes(&guest.device.config_space()).unwrap();
    assert_eq!((&config.magic.to_le_bytes(), config.revision), (b"rdma", 1));
    assert_eq!((config.phys_port_cnt, config.max_qp, config.max_cq), (1, 6, 4));
    assert_eq!(config.features, guest.device.features());
    assert_eq!(config.mac, [0x52, 0x54, 0, 0, 0, 1]);
    assert_eq!(config.sys_image_guid.to_ne_bytes(), [0x50, 0x54, 0, 0xff, 0xfe, 0, 0, 1]);
    assert_eq!(guest.device.queue_count(), 1 + 4 + 12 + 1);
    assert_eq!(guest.device.queue_max_size(18), 0);
}

/// Specification, Virtqueues for work: two descriptors for a notification of each CQ, and for another command.
#[test]
fn the_control_queue_has_room_for_every_notification() {
    for max_cq in [1, 127, 128, 240] {
        let (fabric, _) = fabric();
        let device = fabric.add_device(DeviceConfig {
            name: "guest".into(),
            mac: None,
            limits: Limits { max_cq, ..limits() },
            paths: Paths { rings: false, virtqueues: true },
            policy: DevicePolicy::default(),
            wake: Arc::new(NoWake),
        });
        let size = device.queue_max_size(0);
        assert!(size.is_power_of_two() && size >= 2 * (max_cq + 1), "{max_cq} CQs, {size} entries");
    }
}

#[test]
fn lengths_are_checked_before_anything_is_done() {
    let mut guest = guest();
    let length = VIRTIO_RDMA_STATUS_LENGTH as u8;
    let create_pd = VIRTIO_RDMA_CMD_CREATE_PD as u8;
    for _ in 0..10 {
        assert_eq!(guest.request(&[create_pd], 4).0, length);
    }
    assert_eq!(guest.device.status().pds, 0);
    assert_eq!(guest.request(&[VIRTIO_RDMA_CMD_QUERY_PORT as u8], 200).0, length);
    assert_eq!(guest.request(&[VIRTIO_RDMA_CMD_MAP_MR_SG as u8], 200).0, 6);
    assert_eq!(guest.request(&[200], 1).0, VIRTIO_RDMA_STATUS_UNSUPPORTED as u8);
    // The device ignores surplus bytes, and gives a chain without room for a status back.
    assert_eq!(guest.request(&[create_pd, 1, 2, 3], 300).0, 0);
    guest.memory.write(DATA, &[create_pd]).unwrap();
    guest.add(0, &[(DATA, 1, false)]);
    guest.run();
    assert_eq!(guest.used(0).map(|used| used.1), Some(0));
    assert_eq!(guest.device.counter(Counter::CommandNoStatus), 1);
}

#[test]
fn objects_in_use_are_busy() {
    let mut guest = guest();
    let pdn = guest.create_pd();
    let cqn = guest.create_cq(4);
    let destroy_pd = virtio_rdma_cmd_destroy_pd { pdn };
    let destroy_cq = virtio_rdma_cmd_destroy_cq { cqn };
    let busy = Err(VIRTIO_RDMA_STATUS_BUSY);
    let qpn = guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy_pd), busy);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_CQ, &destroy_cq), busy);
    let destroy_qp = virtio_rdma_cmd_destroy_qp { qpn };
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_QP, &destroy_qp), Ok(()));
    let gone = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_QP, &destroy_qp), gone);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_CQ, &destroy_cq), Ok(()));
    assert_eq!(guest.used_index(1 + cqn as u16), 4, "its buffers came back");
    let mr = guest.reg_mr(pdn, DATA, 100, ALL);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy_pd), busy);
    assert_eq!(guest.dereg_mr(mr.mrn), Ok(()));
    assert_eq!(guest.dereg_mr(mr.mrn), gone);
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy_pd), Ok(()));
    assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &destroy_pd), gone);
}

#[test]
fn each_kind_of_object_ends_somewhere() {
    let mut guest = guest();
    let full = VIRTIO_RDMA_STATUS_NO_RESOURCE;
    let pdn = guest.create_pd();
    (0..3).for_each(|_| assert!(guest.create_pd() < 4));
    let more = guest.command::<_, virtio_rdma_rsp_create_pd>(VIRTIO_RDMA_CMD_CREATE_PD, &());
    assert_eq!(more.err(), Some(full));
    let cqn = guest.create_cq(0);
    (0..3).for_each(|_| assert!(guest.create_cq(0) < 4));
    let request = virtio_rdma_cmd_create_cq { cqe: 1 };
    let more = guest.command::<_, virtio_rdma_rsp_create_cq>(VIRTIO_RDMA_CMD_CREATE_CQ, &request);
    assert_eq!(more.err(), Some(full));
    for _ in 0..5 {
        assert!((2..=6).contains(&guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC)));
    }
    let create = |guest: &mut Guest, kind| {
        let request = Guest::qp_request(pdn, cqn, kind);
        let command = VIRTIO_RDMA_CMD_CREATE_QP;
        guest.command::<_, virtio_rdma_rsp_create_qp>(command, &request).map(|reply| reply.qpn)
    };
    assert_eq!(create(&mut guest, VIRTIO_RDMA_QPT_UD), Err(full));
    assert_eq!(create(&mut guest, VIRTIO_RDMA_QPT_GSI), Ok(VIRTIO_RDMA_GSI_QPN));
    assert_eq!(create(&mut guest, VIRTIO_RDMA_QPT_GSI), Err(VIRTIO_RDMA_STATUS_BUSY));
    for _ in 0..64 {
        guest.reg_mr(pdn, DATA, 1, ALL);
    }
    assert_eq!(guest.reg_pages(pdn, DATA, 1, ALL, &[DATA]).err(), Some(full));
}

#[test]
fn capabilities_have_limits() {
    let mut guest = guest();
    let pdn = guest.create_pd();
    let cqn = guest.create_cq(0);
    let mut refuse = |change: &dyn Fn(&mut virtio_rdma_cmd_create_qp), status| {
        let mut request = Guest::qp_request(pdn, cqn, VIRTIO_RDMA_QPT_RC);
        change(&mut request);
        let command = VIRTIO_RDMA_CMD_CREATE_QP;
        let result = guest.command::<_, virtio_rdma_rsp_create_qp>(command, &request);
        assert_eq!(result.err(), Some(status));
    };
    let invalid = VIRTIO_RDMA_STATUS_INVAL;
    refuse(&|request| request.max_send_wr = 0, invalid);
    refuse(&|request| request.max_send_wr = 65, invalid);
    refuse(&|request| request.max_recv_wr = u32::MAX, invalid);
    refuse(&|request| request.max_send_sge = 17, invalid);
    refuse(&|request| request.max_recv_sge = 17, invalid);
    refuse(&|request| request.sq_sig_type = 2, invalid);
    refuse(&|request| request.max_inline_data = 1, VIRTIO_RDMA_STATUS_UNSUPPORTED);
    refuse(&|request| request.qp_type = 9, VIRTIO_RDMA_STATUS_UNSUPPORTED);
    refuse(&|request| request.pdn = 3, VIRTIO_RDMA_STATUS_NO_OBJECT);
    refuse(&|request| request.send_cqn = 3, VIRTIO_RDMA_STATUS_NO_OBJECT);
    refuse(&|request| request.recv_cqn = u32::MAX, VIRTIO_RDMA_STATUS_NO_OBJECT);
}

#[test]
fn page_tables_are_checked() {
    let mut guest = guest();
    let pdn = guest.create_pd();
    let invalid = Some(VIRTIO_RDMA_STATUS_INVAL);
    let fault = Some(VIRTIO_RDMA_STATUS_FAULT);
    let pages = [DATA, DATA + 0x1000];
    assert_eq!(guest.reg_pages(pdn, DATA, 0x1001, ALL, &pages).err(), None);
    assert_eq!(guest.reg_pages(pdn, DATA + 0xfff, 2, ALL, &pages).err(), None);
    assert_eq!(guest.reg_pages(pdn, DATA, 0x1000, ALL, &pages).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 0, ALL, &[]).err(), None);
    assert_eq!(guest.reg_pages(pdn, DATA, 0, ALL, &pages).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 3 << 30, ALL, &pages).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, u64::MAX - 1, 2, ALL, &pages[..1]).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 9, ALL, &[DATA + 8]).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 9, WRITE, &[DATA]).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 9, ALL | 1 << 30, &[DATA]).err(), invalid);
    assert_eq!(guest.reg_pages(pdn, DATA, 9, ALL, &[1 << 40]).err(), fault);
    assert_eq!(guest.reg_pages(pdn, DATA, 9, ALL, &[u64::MAX - 0xfff]).err(), fault);
    assert_eq!(guest.reg_pages(3, DATA, 9, ALL, &[DATA]).err(), Some(3));
    let end = 32 << 20;
    for (pages, status) in
        [(u64::MAX - 7, fault), (1 << 40, fault), (end, fault), (end - 4, invalid), (1, invalid)]
    {
        let request = reg_user_mr(pdn, 0, (0, 0x1000), (pages, 1));
        let command = VIRTIO_RDMA_CMD_REG_USER_MR;
        assert_eq!(guest.command::<_, virtio_rdma_rsp_mr>(command, &request).err(), status);
    }
    // Each page is a piece of its own. Two such regions have more pieces than the device keeps.
    let pages: Vec<u64> = (0..600).map(|page| page * 0x2000).collect();
    assert_eq!(guest.reg_pages(pdn, 0, 600 << 12, ALL, &pages).err(), None);
    let full = Some(VIRTIO_RDMA_STATUS_NO_RESOURCE);
    assert_eq!(guest.reg_pages(pdn, 0, 600 << 12, ALL, &pages).err(), full);
}

#[test]
fn transitions_and_attributes_are_checked() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    let guest = &mut pair.a;
    let state = Err(VIRTIO_RDMA_STATUS_STATE);
    let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
    assert_eq!(guest.make_rts(a.qpn, true), state);
    assert_eq!(guest.set_state(a.qpn, VIRTIO_RDMA_QPS_INIT), invalid);
    assert_eq!(guest.set_state(a.qpn, 99), invalid);
    assert_eq!(guest.set_state(6, VIRTIO_RDMA_QPS_ERR), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    assert_eq!(guest.set_state(0, VIRTIO_RDMA_QPS_ERR), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    guest.make_init(a.qpn, ALL);
    guest.del_gid(0).unwrap();
    assert_eq!(guest.make_rtr(a.qpn, gid(2), b.qpn, true), invalid, "no source GID");
    assert_eq!(u32::from(guest.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_INIT);
    guest.add_gid(0, gid(1), 0).unwrap();
    guest.make_rtr(a.qpn, gid(2), b.qpn, true).unwrap();
    guest.make_rts(a.qpn, true).unwrap();
    let attr = guest.query(a.qpn);
    assert_eq!((attr.timeout, attr.retry_cnt, attr.min_rnr_timer), (14, 3, 12));
    assert_eq!((attr.dest_qp_num, attr.ah_attr.grh.dgid), (b.qpn, gid(2)));
    assert_eq!((attr.cap.max_send_wr, attr.cap.max_recv_sge), (16, 16));
}

/// What a driver writes to reserved bytes does not come back, so that a later version can give them a meaning.
#[test]
fn reserved_bytes_of_a_qp_are_zeros() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    let guest = &mut pair.a;
    guest.make_init(a.qpn, ALL);
    let mut attr = attributes(VIRTIO_RDMA_QPS_RTR, gid(2), b.qpn);
    (attr.path_mtu, attr.reserved_27) = (3, 0xff);
    let hints = virtio_rdma_ah_attr { sl: 5, static_rate: 2, dmac: [6; 6], ..attr.ah_attr };
    attr.ah_attr = virtio_rdma_ah_attr { reserved_22: [0xff; 6], ..hints };
    attr.ah_attr.grh.reserved_17 = 0xff;
    attr.alt_ah_attr = attr.ah_attr;
    guest.modify(a.qpn, attr_mask(VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPS_RTR), attr).unwrap();
    let found = guest.query(a.qpn);
    assert_eq!(found.ah_attr.as_bytes(), hints.as_bytes());
    assert_eq!(found.reserved_27, 0);
    assert_eq!(found.alt_ah_attr.as_bytes(), [0; size_of::<virtio_rdma_ah_attr>()]);
}

#[test]
fn a_gid_has_one_guest() {
    let (fabric, clock) = fabric();
    let mut a = Guest::new(&fabric, &clock, 1);
    let mut b = Guest::new(&fabric, &clock, 2);
    let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
    assert_eq!(b.add_gid(1, gid(1), 0), Err(VIRTIO_RDMA_STATUS_EXISTS));
    assert_eq!(a.add_gid(1, gid(1), 0), Ok(()), "a second entry of its own");
    assert_eq!(a.del_gid(0), Ok(()));
    assert_eq!(a.del_gid(0), Ok(()));
    assert_eq!(b.add_gid(1, gid(1), 0), Err(VIRTIO_RDMA_STATUS_EXISTS));
    assert_eq!(a.add_gid(1, gid(7), 0), Ok(()), "in place of the other");
    assert_eq!(b.add_gid(1, gid(1), 0), Ok(()));
    assert_eq!(a.add_gid(4, gid(9), 0), invalid);
    assert_eq!(a.add_gid(0, [0; 16], 0), invalid);
    assert_eq!(a.add_gid(0, [0xff; 16], 0), invalid);
    assert_eq!(a.add_gid(0, gid(9), 1), invalid);
    assert_eq!(a.del_gid(4), invalid);
    drop(b);
    assert_eq!(a.add_gid(0, gid(1), 0), Ok(()));
}

/// A network has no packets of RoCE v1.
#[test]
fn a_gid_of_roce_v1_is_refused() {
    let mut guest = guest();
    for gid_type in [VIRTIO_RDMA_GID_TYPE_IB, VIRTIO_RDMA_GID_TYPE_ROCE, 3, u32::MAX] {
        let request = virtio_rdma_cmd_add_gid { gid_type, ..add_gid(1, gid(9)) };
        let result = guest.command::<_, ()>(VIRTIO_RDMA_CMD_ADD_GID, &request);
        assert_eq!(result, Err(VIRTIO_RDMA_STATUS_INVAL), "type {gid_type}");
    }
    assert_eq!(guest.device.status().gids.len(), 1);
}

/// Two devices of one virtual machine are two members of their network, although the same memory is behind them. Each
/// of them reaches it by addresses of its own.
#[test]
fn two_devices_of_one_memory_are_two_members() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let file = new_memory(2 * MEMORY);
    let half = |guest_addr, offset| GuestRegion {
        guest_addr,
        len: MEMORY,
        fd: file.as_fd(),
        offset,
        writable: true,
    };
    for (guest, own, other) in [(&mut pair.a, 0, MEMORY), (&mut pair.b, MEMORY, 0)] {
        let memory = GuestMemory::default().with_region(&half(0, own)).unwrap();
        guest.move_to(memory.with_region(&half(MEMORY, other)).unwrap());
    }
    let data = pair.a.fill(DATA, 64, 5);
    assert_eq!(pair.b.bytes(MEMORY + DATA, 64), data);
    assert_eq!(pair.b.add_gid(1, pair.a.gid, 0), Err(VIRTIO_RDMA_STATUS_EXISTS));
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 64, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 64, a.key)]));
    pair.settle();
    let success = VIRTIO_RDMA_WC_SUCCESS;
    assert_eq!(brief(pair.poll_a()), Some((1, success, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((2, success, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(pair.b.bytes(DATA, 64), data);
}

#[test]
fn regions_follow_the_map_of_memory() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let mr = pair.a.reg_mr(a.pdn, EXTRA.0, 0x1000, ALL);
    let part = [sge(EXTRA.0, 8, mr.lkey)];
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key);
    let memory = pair.a.memory.clone();
    let (less, _) = memory.without(EXTRA.0, EXTRA.1);
    pair.a.device.set_memory(&less);
    pair.a.device.set_memory(&memory);
    pair.a.post_send(a.qpn, &write);
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_SUCCESS);
    assert_eq!(pair.a.dereg_mr(mr.mrn), Ok(()));
    pair.a.post_send(a.qpn, &write);
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_LOC_PROT_ERR);
}

/// The rings of virtqueues that the front end takes away are no memory of the guest: the device leaves them alone, and
/// treats the queues as malformed.
#[test]
fn virtqueues_that_are_no_longer_in_memory_are_broken() {
    let mut guest = with_rings(guest);
    let memory = guest.memory.clone();
    let nothing = GuestMemory::anonymous(&[(1 << 40, 4096)]).unwrap();
    guest.device.set_memory(&nothing);
    assert!(!guest.device.needs_reset());
    guest.device.run(64);
    assert!(guest.device.needs_reset());
    let broken = [Counter::BadControlChain, Counter::BadDoorbellChain];
    assert_eq!(broken.map(|counter| guest.device.counter(counter)), [1, 1]);
    // Nobody serves the queue when its memory comes back.
    let used = guest.used_index(0);
    guest.begin_command(VIRTIO_RDMA_CMD_CREATE_PD, &());
    guest.run();
    guest.device.set_memory(&memory);
    guest.run();
    assert_eq!(guest.used_index(0), used);
}

/// A VMM may change the memory of a device in steps while it is paused.
#[test]
fn virtqueues_that_are_away_while_the_device_is_paused_go_on() {
    let mut guest = with_rings(guest);
    let memory = guest.memory.clone();
    guest.freeze();
    let image = guest.device.save();
    guest.device.set_memory(&GuestMemory::anonymous(&[(1 << 40, 4096)]).unwrap());
    guest.device.set_memory(&memory);
    assert!(guest.device.save() == image);
    guest.device.thaw();
    guest.create_pd();
    assert!(!guest.device.needs_reset());
}

#[test]
fn the_dma_region_is_all_of_memory() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let mr = pair.a.get_dma_mr(a.pdn, LOCAL).unwrap();
    let data = pair.a.fill(DATA, 300, 4);
    let part = [sge(DATA, 300, mr.lkey)];
    let write = |addr| Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[addr]).rdma(DATA, b.key);
    pair.a.post_send(a.qpn, &write(part[0]));
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_SUCCESS);
    assert_eq!(pair.b.bytes(DATA, 300), data);
    pair.a.post_send(a.qpn, &write(sge((32 << 20) - 1, 2, mr.lkey)));
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_LOC_PROT_ERR);
}

/// Returns the state of the port, and its physical state.
fn port_state(guest: &mut Guest) -> (u8, u8) {
    let port = virtio_rdma_cmd_query_port { port: 1 };
    let reply: virtio_rdma_rsp_query_port =
        guest.command(VIRTIO_RDMA_CMD_QUERY_PORT, &port).unwrap();
    (reply.state, reply.phys_state)
}

#[test]
fn the_state_of_the_port_is_told() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let (up, down) =
        (Some((VIRTIO_RDMA_EVENT_PORT_ACTIVE, 1)), Some((VIRTIO_RDMA_EVENT_PORT_ERR, 1)));
    for _ in 0..8 {
        guest.add_event_buffer();
    }
    guest.run();
    assert_eq!((guest.poll_event(), port_state(&mut guest)), (None, (4, 5)));
    for (is_active, event, state) in
        [(false, down, (1, 3)), (true, up, (4, 5)), (false, down, (1, 3))]
    {
        fabric.set_port(is_active);
        guest.run();
        assert_eq!((guest.poll_event(), port_state(&mut guest)), (event, state));
        fabric.set_port(is_active);
        guest.run();
        assert_eq!(guest.poll_event(), None);
    }
    // Another guest comes, whose driver sees the state when it starts.
    assert_eq!(port_state(&mut Guest::new(&fabric, &clock, 2)), (1, 3));
    // The device goes on in another process, which says the state once more.
    reload(&mut [&mut guest], &fabric);
    guest.run();
    assert_eq!((guest.poll_event(), port_state(&mut guest)), (down, (1, 3)));
}

/// What is not true any more is not told behind what is.
#[test]
fn the_last_state_of_the_port_is_told_last() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let mut is_active = false;
    let mut turn = |guest: &Guest| {
        fabric.set_port(is_active);
        guest.run();
        is_active = !is_active;
    };
    // There is no buffer.
    (0..5).for_each(|_| turn(&guest));
    assert_eq!(guest.poll_event(), None);
    for _ in 0..5 {
        guest.add_event_buffer();
    }
    guest.run();
    assert_eq!(guest.poll_event(), Some((VIRTIO_RDMA_EVENT_PORT_ERR, 1)));
    assert_eq!((guest.poll_event(), port_state(&mut guest)), (None, (1, 3)));
}

#[test]
fn port_and_pkey() {
    let mut guest = guest();
    let port = virtio_rdma_cmd_query_port { port: 1 };
    let reply: virtio_rdma_rsp_query_port =
        guest.command(VIRTIO_RDMA_CMD_QUERY_PORT, &port).unwrap();
    assert_eq!((reply.gid_tbl_len, reply.pkey_tbl_len, reply.max_msg_sz), (4, 1, 1 << 31));
    let invalid = Some(VIRTIO_RDMA_STATUS_INVAL);
    let port = virtio_rdma_cmd_query_port { port: 2 };
    let reply = guest.command::<_, virtio_rdma_rsp_query_port>(1, &port);
    assert_eq!(reply.err(), invalid);
    let pkey = |index| virtio_rdma_cmd_query_pkey { port: 1, index, reserved_06: 0 };
    let command = VIRTIO_RDMA_CMD_QUERY_PKEY;
    let reply = guest.command::<_, virtio_rdma_rsp_query_pkey>(command, &pkey(0));
    assert_eq!(reply.unwrap().pkey, 0xffff);
    let reply = guest.command::<_, virtio_rdma_rsp_query_pkey>(command, &pkey(1));
    assert_eq!(reply.err(), invalid);
}

/// What a driver can see of a device stays when the device fails.
#[test]
fn what_was_visible_stays_when_the_device_fails() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).rdma(DATA, b.key));
    pair.settle();
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.fabric.set_port(false);
    pair.a.run();
    pair.a.device.fail();
    pair.a.run();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_PORT_ERR, 1)));
    assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0)));
}

/// Only the keys of an MR whose memory is away give no access.
#[test]
fn other_keys_give_access_while_the_memory_of_one_is_away() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let mr = pair.b.reg_mr(b.pdn, EXTRA.0, 0x1000, ALL);
    let (less, _) = pair.b.memory.without(EXTRA.0, EXTRA.1);
    pair.b.device.set_memory(&less);
    let part = [sge(DATA, 8, a.key)];
    let data = pair.a.fill(DATA, 8, 5);
    let mut write = |at, key| {
        let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(at, key);
        pair.a.post_send(a.qpn, &write);
        pair.settle();
        brief(pair.poll_a()).unwrap().1
    };
    assert_eq!(write(DATA, b.key), OK);
    assert_eq!(write(EXTRA.0, mr.rkey), VIRTIO_RDMA_WC_REM_ACCESS_ERR);
    assert_eq!(pair.b.bytes(DATA, 8), data);
}

/// The region of all memory has what the front end gives later, too.
#[test]
fn the_dma_region_has_memory_that_comes_later() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let all = pair.a.memory.clone();
    let (less, _) = all.without(EXTRA.0, EXTRA.1);
    pair.a.device.set_memory(&less);
    let mr = pair.a.get_dma_mr(a.pdn, LOCAL).unwrap();
    pair.a.device.set_memory(&all);
    let data = pair.a.fill(EXTRA.0, 64, 7);
    let part = [sge(EXTRA.0, 64, mr.lkey)];
    pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
    pair.settle();
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    assert_eq!(pair.b.bytes(DATA, 64), data);
}

/// A device without the data path of virtqueues has no limits of its objects.
#[test]
fn a_device_without_virtqueues_has_no_limits_of_theirs() {
    let (fabric, _) = fabric();
    let device = fabric.add_device(DeviceConfig {
        name: "guest".into(),
        mac: None,
        limits: limits(),
        paths: Paths { rings: true, virtqueues: false },
        policy: DevicePolicy::default(),
        wake: Arc::new(NoWake),
    });
    assert_eq!(device.features() >> VIRTIO_RDMA_F_VIRTQUEUES & 1, 0);
    let config = virtio_rdma_config::read_from_bytes(&device.config_space()).unwrap();
    assert_eq!((config.max_qp, config.max_qp_wr, config.max_cq, config.max_cqe), (0, 0, 0, 0));
}

/// Memory that the device may only read is no place for rings, nor for an MR to which the device writes.
#[test]
fn memory_that_may_only_be_read_is_no_memory_for_what_is_written() {
    with_rings(|| {
        let mut guest = guest();
        let file = new_memory(EXTRA.1);
        let (guest_addr, len) = EXTRA;
        let fd = file.as_fd();
        let region = GuestRegion { guest_addr, len, fd, offset: 0, writable: false };
        let (less, _) = guest.memory.without(guest_addr, len);
        guest.device.set_memory(&less.with_region(&region).unwrap());
        let (end, own) = (End::new(&mut guest, VIRTIO_RDMA_QPT_RC), guest.gid);
        guest.connect(end.qpn, own, end.qpn);
        let (at, pages, fault) = (EXTRA.0, [EXTRA.0], Some(VIRTIO_RDMA_STATUS_FAULT));
        assert_eq!(guest.reg_pages(end.pdn, at, 8, LOCAL, &pages).err(), fault);
        assert_eq!(guest.reg_pages(end.pdn, at, 8, READ, &pages).err(), None);
        let mr = guest.create_mr(end.pdn, 1).unwrap();
        let reg = guest.registration(mr.lkey, ALL, at, 8, &pages);
        guest.post_send(end.qpn, &Send::reg_mr(1, reg));
        guest.run();
        let status = guest.poll(end.cqn).map(|cqe| u32::from(cqe.status));
        assert_eq!(status, Some(VIRTIO_RDMA_WC_LOC_PROT_ERR));
        let request = guest.cq_ring_request(at, 16);
        let reply: Result<virtio_rdma_rsp_create_cq, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request);
        assert_eq!(reply.err(), fault);
    });
}
