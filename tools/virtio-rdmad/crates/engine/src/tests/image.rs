// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving and loading devices: what is refused, and what is left then. That nothing is lost, the schedules show, and
//! all tests with the variable `UPGRADES`.

use std::sync::Arc;
use std::time::Instant;

use abi::*;
use testkit::command::reg_user_mr;

use super::cable::{cable, over_a_cable, Faults};
use super::driver::*;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::qp::inbound::Inbound;
use crate::{
    AddressRights, Device, DeviceConfig, DevicePolicy, Fabric, GidPrefix, Limits, LoadError, Quota,
};

/// Returns a pair of guests in whose network something is under way: a message waits for a receive.
fn busy_pair() -> Pair {
    let mut pair = Pair::new();
    send_and_wait(&pair.ends, &mut pair.a);
    pair.settle();
    post_receive(&mut pair);
    pair
}

/// Sends a message from the first guest of a pair, which finds no receive.
fn send_and_wait([a, _]: &[End; 2], guest: &mut Guest) {
    guest.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, a.key)]));
}

/// Posts the receive that this message waits for.
fn post_receive(pair: &mut Pair) {
    let b = pair.ends[1];
    pair.a.memory.write(DATA, &[7; 100]).unwrap();
    pair.b.memory.write(DATA, &[0; 100]).unwrap();
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 100, b.key)]);
}

/// Returns whether this holds of what the responder of a guest's QP knows of its peer on the wire.
fn inbound(guest: &Guest, qpn: u32, is_so: impl FnOnce(&Inbound) -> bool) -> bool {
    let qp = guest.device.hca().qps.get(Slot::of_number(qpn).unwrap()).unwrap();
    lock(&qp.responder).inbound.as_deref().is_some_and(is_so)
}

/// Checks that a pair goes on with what was under way, once.
fn check_goes_on(pair: &mut Pair) {
    pair.settle_in_time();
    assert_eq!(brief(pair.b.poll(pair.ends[1].cqn)), Some((2, 0, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(brief(pair.a.poll(pair.ends[0].cqn)), Some((1, 0, VIRTIO_RDMA_WC_SEND)));
    assert!(pair.a.poll(pair.ends[0].cqn).is_none() && pair.b.poll(pair.ends[1].cqn).is_none());
    assert_eq!(pair.b.bytes(DATA, 100), [7; 100]);
}

/// Loads an image of the first guest of a pair into a device with another configuration.
fn refusal(pair: &Pair, change: impl FnOnce(&mut DeviceConfig), image: &[u8]) -> LoadError {
    let (fabric, _) = fabric();
    let mut config = pair.a.config();
    change(&mut config);
    let device = fabric.add_device(config);
    let why = pair.a.load(&device, image).unwrap_err();
    check_is_fresh(&device, &fabric);
    why
}

/// Checks that a device has nothing, and no address in its network.
fn check_is_fresh(device: &Device, fabric: &Arc<Fabric>) {
    let status = device.status();
    assert!(!status.started && status.gids.is_empty() && status.qps.is_empty());
    assert_eq!(
        (status.cqs, status.mrs, status.mws, status.pds, status.srqs.len()),
        (0, 0, 0, 0, 0)
    );
    let address = crate::Address { gid: gid(1), vlan: None };
    assert!(!fabric.core().has(&address), "an address is left");
    assert!(status.counters.iter().all(|(_, value)| *value == 0));
}

#[test]
fn devices_go_on_in_another_network() {
    for rings in [false, true] {
        let test = || {
            let mut pair = busy_pair();
            let (fabric, _) = fabric();
            let config = pair.a.device.config_space();
            let commands = pair.a.device.counter(crate::Counter::Commands);
            reload(&mut [&mut pair.a, &mut pair.b], &fabric);
            assert_eq!(pair.a.device.config_space(), config);
            assert_eq!(pair.a.device.counter(crate::Counter::Commands), commands);
            check_goes_on(&mut pair);
        };
        if rings {
            with_rings(test);
        } else {
            test();
        }
    }
}

#[test]
fn a_device_goes_on_whose_image_is_not_used() {
    let mut pair = busy_pair();
    let image = pair.a.device.save();
    assert!(pair.a.device.save() == image);
    check_goes_on(&mut pair);
}

#[test]
fn a_device_that_is_not_started_has_an_image() {
    let (fabric, clock) = fabric();
    let guest = Guest::new(&fabric, &clock, 1);
    let make = || fabric.add_device(DeviceConfig { mac: None, ..guest.config() });
    let (one, other) = (make(), make());
    assert_ne!(one.config_space(), other.config_space(), "both have a random GUID");
    let (image, config) = (one.save(), one.config_space());
    drop(one);
    guest.load(&other, &image).unwrap();
    assert_eq!(other.config_space(), config);
    assert!(!other.status().started);
    assert!(other.save() == image);
}

#[test]
fn an_image_of_another_device_is_refused() {
    let mut pair = with_rings(busy_pair);
    let image = pair.a.device.save();
    assert_eq!(refusal(&pair, |config| config.mac = Some([2; 6]), &image), LoadError::Mac);
    assert_eq!(refusal(&pair, |config| config.mac = None, &image), LoadError::Mac);
    let limits = Limits { max_mr: 63, ..pair.a.setup.limits.clone() };
    let limit = LoadError::Limit { what: "max_mr" };
    assert_eq!(refusal(&pair, |config| config.limits = limits, &image), limit);
    let without = refusal(&pair, |config| config.paths.rings = false, &image);
    assert!(
        matches!(without, LoadError::Features { missing } if missing & 1 << VIRTIO_RDMA_F_RINGS != 0)
    );
    let prefix = GidPrefix::new(gid(9), 128).unwrap();
    let addresses = AddressRights { gids: Some(vec![prefix]), vlans: None };
    let forbidden = refusal(&pair, |config| config.policy.addresses = addresses, &image);
    assert!(matches!(forbidden, LoadError::Address(address) if address.gid == gid(1)));
    // Another limit of the rate is no part of what the guest knows.
    let (fabric, _) = fabric();
    let quota = Quota { wire_rate: Some(1 << 20), mrs: 1, ..Quota::default() };
    let policy = DevicePolicy { quota, ..DevicePolicy::default() };
    let device = fabric.add_device(DeviceConfig { policy, ..pair.a.config() });
    pair.a.load(&device, &image).unwrap();
    drop(device);
    reload(&mut [&mut pair.a, &mut pair.b], &fabric);
    check_goes_on(&mut pair);
}

#[test]
fn a_state_is_that_of_one_device() {
    let pair = busy_pair();
    let image = pair.a.device.save();
    assert_eq!(pair.a.load(&pair.a.device, &image), Err(LoadError::Started));
    // The network of the pair has the device.
    let device = pair.fabric.add_device(pair.a.config());
    assert_eq!(pair.a.load(&device, &image), Err(LoadError::Twin));
    // Another guest has the address.
    let (fabric, clock) = fabric();
    let guest = Guest::new(&fabric, &clock, 1);
    let device = fabric.add_device(pair.a.config());
    assert!(matches!(pair.a.load(&device, &image), Err(LoadError::Address(_))));
    assert!(device.status().pds == 0 && !device.status().started);
    assert_eq!(guest.device.status().gids.len(), 1);
    // Once the address is free, it can be loaded.
    drop(guest);
    pair.a.load(&device, &image).unwrap();
    assert_eq!(device.status().qps, pair.a.device.status().qps);
}

#[test]
fn a_virtqueue_that_is_missing_is_named() {
    let pair = busy_pair();
    let image = pair.a.device.save();
    let (fabric, _) = fabric();
    let device = fabric.add_device(pair.a.config());
    assert_eq!(device.load(&image, &pair.a.memory, []), Err(LoadError::NoQueue { index: 0 }));
    check_is_fresh(&device, &fabric);
    let memory = memory::GuestMemory::anonymous(&[(1 << 40, 0x1000)]).unwrap();
    let (guest, memory_of_guest) = (&pair.a, memory);
    let elsewhere = guest.load_in(&device, &image, &memory_of_guest);
    assert!(matches!(elsewhere, Err(LoadError::Queue { index: 0, .. })));
    check_is_fresh(&device, &fabric);
}

#[test]
fn images_that_are_cut_off_or_altered_are_refused() {
    let pair = with_rings(busy_pair);
    let image = pair.a.device.save();
    let (fabric, _) = fabric();
    let device = fabric.add_device(pair.a.config());
    for len in 0..image.len() {
        assert!(pair.a.load(&device, &image[..len]).is_err(), "{len} bytes");
    }
    for at in 0..image.len() {
        let mut image = image.clone();
        image[at] = !image[at];
        assert!(pair.a.load(&device, &image).is_err(), "byte {at}");
    }
    check_is_fresh(&device, &fabric);
    pair.a.load(&device, &image).unwrap();
}

#[test]
fn a_command_under_way_is_carried_out_once() {
    let (network, clock) = fabric();
    let mut guest = Guest::new(&network, &clock, 1);
    let pdn = guest.create_pd();
    // No page follows the one before, so that the table is long and has many ranges.
    let pages: Vec<u64> = (0..900).map(|page| DATA + page * 0x2000 % (16 << 20)).collect();
    let table = (guest.memory_for(&pages), 900);
    let request = reg_user_mr(pdn, ALL, (DATA, 900 * 0x1000), table);
    let reply = guest.begin_command(VIRTIO_RDMA_CMD_REG_USER_MR, &request);
    let mut turns = 0;
    while guest.used_index(0) == guest.used_so_far(0) {
        guest.device.run(1);
        turns += 1;
        if [1, 3, 6].contains(&turns) {
            let (network, _) = fabric();
            reload(&mut [&mut guest], &network);
        }
        assert!(turns < 1000, "the command never ends");
    }
    assert!(turns > 6, "the command was never under way");
    let (_, len) = guest.used(0).unwrap();
    assert_eq!(len as usize, 1 + size_of::<virtio_rdma_rsp_mr>());
    assert_eq!(guest.bytes(reply, 1), [VIRTIO_RDMA_STATUS_OK as u8]);
    guest.run();
    assert!(guest.used(0).is_none(), "there is a second reply");
    assert_eq!(guest.device.status().mrs, 1);
}

/// A requester that pauses has taken one of its retries, and no upgrade takes another one of them.
fn upgrades_take_no_retry() {
    let mut pair = Pair::new();
    send_and_wait(&pair.ends, &mut pair.a);
    pair.settle();
    for _ in 0..10 {
        upgrade(&[&pair.a, &pair.b]);
        pair.settle();
    }
    post_receive(&mut pair);
    check_goes_on(&mut pair);
}

#[test]
fn upgrades_take_no_retry_on_one_host() {
    upgrades_take_no_retry();
}

#[test]
fn upgrades_take_no_retry_between_two_hosts() {
    over_a_cable(1, Faults::default(), upgrades_take_no_retry);
}

/// What a responder has to answer does not get lost: the requester gets all of it, and no time passes in which it would
/// ask once more.
#[test]
fn answers_that_are_due_are_sent_after_an_upgrade() {
    over_a_cable(1, Faults::default(), || {
        const LEN: usize = 1 << 20;
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let data = pair.b.fill(DATA, LEN, 3);
        let (part, word) = ([sge(DATA, LEN as u32, a.key)], [sge(DATA + (2 << 20), 8, a.key)]);
        let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
        let there = DATA + (2 << 20);
        pair.b.memory.write(there, &7_u64.to_le_bytes()).unwrap();
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, b.key));
        pair.a.post_send(a.qpn, &Send::new(2, add, &word).atomic(there, b.key, 1, 0));
        pair.a.run();
        cable().unwrap().deliver();
        let is_due = || {
            pair.b.device.run(1);
            inbound(&pair.b, b.qpn, |inbound| !inbound.replies.is_empty())
        };
        assert!((0..100).any(|_| is_due()), "an answer is due");
        upgrade(&[&pair.b]);
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((1, 0, VIRTIO_RDMA_WC_RDMA_READ)));
        assert_eq!(brief(pair.poll_a()), Some((2, 0, VIRTIO_RDMA_WC_FETCH_ADD)));
        assert!(pair.a.bytes(DATA, LEN) == data);
        assert_eq!(pair.a.memory.read_obj::<u64>(there), Ok(7));
        assert_eq!(pair.b.memory.read_obj::<u64>(there), Ok(8));
    });
}

/// Packets that are held in front of a gap stay: the one that is missing is all that is sent again.
#[test]
fn packets_that_are_held_are_not_sent_again_after_an_upgrade() {
    over_a_cable(1, Faults::default(), || {
        const LEN: usize = 10 << 10;
        let mut pair = Pair::new();
        let cable = cable().unwrap();
        let [a, b] = pair.ends;
        let data = pair.a.fill(DATA, LEN, 5);
        pair.know_selective();
        let part = [sge(DATA, LEN as u32, a.key)];
        pair.a.post_send(a.qpn, &Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key));
        pair.a.run();
        cable.lose();
        let sent: Vec<_> = std::mem::take(&mut *cable.sent.lock().unwrap());
        sent[1..].iter().for_each(|packet| cable.inject(1, packet));
        cable.deliver();
        pair.b.run();
        assert!(!inbound(&pair.b, b.qpn, |inbound| inbound.held.is_empty()), "packets are held");
        upgrade(&[&pair.b]);
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((1, 0, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert!(pair.b.bytes(DATA, LEN) == data);
        let again = cable.sent.lock().unwrap().clone();
        let psn = |frame: &[u8]| roce::decode(frame).unwrap().headers.bth.psn;
        let requests = again.iter().filter(|frame| {
            let bth = roce::decode(frame).unwrap().headers.bth;
            bth.opcode.operation() == roce::Operation::Write
        });
        let requests: Vec<_> = requests.map(|frame| psn(frame)).collect();
        assert_eq!(requests, [psn(&sent[0])]);
    });
}

/// Who waits for a receive of an SRQ is not saved. The requester asks once more, so the next receive rouses it, and no
/// timer has to.
#[test]
fn who_waits_at_an_srq_is_known_again() {
    with_rings(|| {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        let srqn = pair.b.create_srq(b.pdn);
        let qpn = pair.b.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
        pair.a.connect(a.qpn, pair.b.gid, qpn);
        pair.b.connect(qpn, pair.a.gid, a.qpn);
        send_and_wait(&pair.ends, &mut pair.a);
        pair.settle_and_pause();
        let passed = pair.clock.passed();
        let (fabric, _) = fabric();
        reload(&mut [&mut pair.a, &mut pair.b], &fabric);
        pair.settle();
        pair.a.fill(DATA, 100, 9);
        pair.b.post_srq_recv(srqn, 2, &[sge(DATA, 100, b.key)]);
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((2, 0, VIRTIO_RDMA_WC_RECV)));
        assert_eq!(brief(pair.poll_a()), Some((1, 0, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(pair.b.bytes(DATA, 100), pair.a.bytes(DATA, 100));
        assert_eq!(pair.clock.passed(), passed);
    });
}

/// Measures. The goal is 50 ms for both together in a release build.
#[test]
#[ignore = "it measures: run it in a release build, with --nocapture"]
fn time_of_save_and_load() {
    const QPS: u16 = 1000;
    const MRS: u32 = 10_000;
    with_rings(|| {
        let (network, clock) = fabric();
        let limits = Limits { ring_qp: QPS + 2, max_mr: MRS, max_extents: 1 << 20, ..limits() };
        let sizes = Sizes {
            memory: 64 << 20,
            depth: 16,
            stride: 256,
            sges: 1,
            inline: 0,
            regions: 32 << 20,
            region_len: 0x3000,
            region_count: u64::from(QPS) + 4,
            ..Sizes::default()
        };
        let setup = Setup { limits, sizes, ..Setup::default() };
        let mut guest = Guest::with_setup(&network, &clock, 1, Arc::new(NoWake), setup);
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(64));
        let mut qpns = Vec::new();
        for _ in 0..QPS {
            qpns.push(guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC));
        }
        for pair in qpns.chunks(2) {
            guest.connect(pair[0], guest.gid, pair[1]);
            guest.connect(pair[1], guest.gid, pair[0]);
        }
        for _ in 0..MRS {
            guest.reg_mr(pdn, DATA, 0x4000, ALL);
        }
        let begin = Instant::now();
        let image = guest.device.save();
        let saved = begin.elapsed();
        let (network, _) = fabric();
        let device = network.add_device(guest.config());
        let begin = Instant::now();
        guest.load(&device, &image).unwrap();
        println!("{} bytes, saved in {saved:?}, loaded in {:?}", image.len(), begin.elapsed());
    });
}
