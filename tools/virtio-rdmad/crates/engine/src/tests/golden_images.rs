// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images that are stored with the sources: whoever changes what images consist of is told to change their version.
//!
//! The file `golden_images.txt` has an image for each of [`NAMES`], in hexadecimal digits. Together they have an object
//! of each kind, and what is under way on the wire. Keys and the numbers of devices are random, so the images are not
//! made once more and compared. They are loaded, and what is saved then is compared.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use abi::*;
use reliability::SendWindow;
use zerocopy::FromZeros;

use super::cable::{cable, over_a_cable, Cable, Faults};
use super::datagram::{to_rts, QKEY};
use super::driver::*;
use crate::base::sync::lock;
use crate::qp::halves::Wait;
use crate::qp::inbound::Inbound;
use crate::queue::wqe::SendWqe;
use crate::transport::hca::Qp;
use crate::{Clock, Device, Gid, Limits};

/// The devices: the one that sends over the wire and the one that receives, both of which have rings, and one with
/// virtqueues.
const NAMES: [&str; 3] = ["requester", "responder", "virtqueues"];

/// The advice if an image is not as it was.
const ADVICE: &str = "what images consist of has changed: raise VERSION in base/image.rs once for a release, and then \
    store new images: cargo test -p engine -- --ignored store_golden_images";

/// The bytes of a message of several packets.
const LONG: usize = 10 << 10;

fn setup() -> Setup {
    let limits = Limits { ring_qp: 9, ..limits() };
    let sizes =
        Sizes { region_count: 20, depth: 16, stride: 256, sges: 8, inline: 64, ..Sizes::default() };
    Setup { limits, sizes, ..Setup::default() }
}

/// The file with the images of this version, and the one with two of version 3.
const IMAGES: &str = "golden_images.txt";
const IMAGES_3: &str = "golden_images_3.txt";

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/tests").join(file)
}

/// Returns the image of this name in a file.
fn stored_in(file: &str, name: &str) -> Vec<u8> {
    let text = std::fs::read_to_string(path(file)).unwrap();
    let lines = text.lines().skip_while(|line| *line != name).skip(1);
    let digits: String = lines.take_while(|line| !line.is_empty()).collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// Returns the images of this version.
fn stored() -> [Vec<u8>; 3] {
    NAMES.map(|name| stored_in(IMAGES, name))
}

/// Makes the guest of the image of this number.
fn guest(number: usize) -> Guest {
    let make = || {
        let (fabric, clock) = fabric();
        Guest::with_setup(&fabric, &clock, number as u8 + 1, Arc::new(NoWake), setup())
    };
    if NAMES[number] == "virtqueues" {
        make()
    } else {
        with_rings(make)
    }
}

/// Loads the image of this number into a new device.
fn load(number: usize, image: &[u8]) -> Arc<Device> {
    let (fabric, _) = fabric();
    let guest = guest(number);
    let device = fabric.add_device(guest.config());
    if let Err(why) = guest.load(&device, image) {
        panic!("{}: {why}: {ADVICE}", NAMES[number]);
    }
    device
}

#[test]
fn images_of_this_version_are_what_they_were() {
    for (number, image) in stored().iter().enumerate() {
        let device = load(number, image);
        assert!(device.save() == *image, "{}: {ADVICE}", NAMES[number]);
    }
}

/// A guest that was saved before its features had bits keeps them.
#[test]
fn images_of_version_3_have_the_features_of_the_base() {
    let anywhere =
        1 << VIRTIO_RDMA_F_UC | 1 << VIRTIO_RDMA_F_ATOMICS | 1 << VIRTIO_RDMA_F_ATOMICS_GLOBAL;
    let with_rings = anywhere | 1 << VIRTIO_RDMA_F_CQ_RESIZE | 1 << VIRTIO_RDMA_F_SRQ_RESIZE;
    let with_virtqueues = anywhere | 1 << VIRTIO_RDMA_F_VIRTQUEUES;
    for (number, expected) in [(0, with_rings), (2, with_virtqueues)] {
        let image = stored_in(IMAGES_3, NAMES[number]);
        let agreed = load(number, &image).hca().features.agreed();
        assert_eq!(agreed & (with_rings | with_virtqueues), expected, "{}", NAMES[number]);
    }
}

/// Loads all images.
fn load_all() -> [Arc<Device>; 3] {
    let images = stored();
    [0, 1, 2].map(|number| load(number, &images[number]))
}

#[test]
fn the_images_have_an_object_of_each_kind() {
    let [requester, responder, virtqueues] = load_all();
    for device in [&requester, &responder] {
        let status = device.status();
        let mut kinds: Vec<_> = status.qps.iter().map(|qp| qp.service).collect();
        kinds.sort_unstable();
        assert_eq!(kinds, ["GSI", "RC", "RC", "RC", "UC", "UD", "XRC_INI", "XRC_TGT"]);
        assert_eq!((status.pds, status.cqs, status.srqs.len()), (2, 2, 2));
        assert_eq!((status.mrs, status.mws, status.gids.len()), (3, 2, 2));
        assert!(any(device, |qp| !lock(&qp.responder).groups.is_empty()), "a multicast group");
    }
    assert!(!lock(&responder.hca().events).save().is_empty(), "an event waits");
    let status = virtqueues.status();
    assert_eq!((status.qps.len(), status.cqs, status.mrs), (2, 1, 1));
}

/// Returns whether a device has such a QP.
fn any(device: &Device, is_such: impl Fn(&Qp) -> bool) -> bool {
    device.hca().qps.iter().any(|(_, qp)| is_such(qp))
}

#[test]
fn the_images_have_what_is_under_way() {
    let [requester, responder, virtqueues] = load_all();
    let window = |is_such: fn(&SendWindow<SendWqe>) -> bool| {
        any(&requester, |qp| lock(&qp.requester).window.as_deref().is_some_and(is_such))
    };
    assert!(
        window(|window| window.awaits_answer() && window.timeout_at.is_some()),
        "packets under way"
    );
    assert!(window(|window| window.rnr_until.is_some()), "a pause, as the peer has no receive");
    let inbound = |device: &Device, is_such: fn(&Inbound) -> bool| {
        any(device, |qp| lock(&qp.responder).inbound.as_deref().is_some_and(is_such))
    };
    assert!(inbound(&requester, |inbound| !inbound.replies.is_empty()), "an answer is due");
    assert!(inbound(&responder, |inbound| !inbound.held.is_empty()), "packets are held");
    assert!(inbound(&responder, |inbound| inbound.assembly.is_some()), "a part of a message");
    assert!(any(&responder, |qp| lock(&qp.responder).has_receive), "its receive");
    assert!(!lock(&responder.hca().inbox).save().is_empty(), "a packet that was not looked at");
    let is_paused = |qp: &Qp| matches!(lock(&qp.requester).wait, Wait::Pause { .. });
    assert!(any(&virtqueues, is_paused), "a pause in a network");
}

#[test]
#[ignore = "it stores new images in the sources, of this version"]
fn store_golden_images() {
    let [requester, responder] = rings();
    let images = [requester, responder, virtqueues()];
    let mut text = String::from(
        "# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause\n\
         # Images of devices: golden_images.rs says what they are for, and makes them.\n",
    );
    for (name, image) in NAMES.iter().zip(images) {
        write!(text, "\n{name}\n").unwrap();
        for line in image.chunks(60) {
            for byte in line {
                write!(text, "{byte:02x}").unwrap();
            }
            text.push('\n');
        }
    }
    std::fs::write(path(IMAGES), text).unwrap();
}

/// The objects of a guest with rings that others name. Both guests have the same numbers.
#[derive(Clone, Copy)]
struct Objects {
    pdn: u32,
    cqn: u32,
    key: u32,
    srqn: u32,
    rc: u32,
    shared: u32,
    uc: u32,
    ud: u32,
    initiator: u32,
    target: u32,
}

/// Makes an object of each kind, and an entry of each table.
fn furnish(guest: &mut Guest, number: u8) -> Objects {
    let (pdn, other) = (guest.create_pd(), guest.create_pd());
    let (cqn, second) = (guest.create_cq(RING), guest.create_cq(8));
    let key = guest.reg_mr(pdn, DATA, 16 << 20, ALL | VIRTIO_RDMA_ACCESS_MW_BIND).lkey;
    let pages = [DATA + 0x3000, DATA + 0x1000, DATA + 0x8000];
    guest.reg_pages(other, DATA + 0x10, 0x2800, ALL, &pages).unwrap();
    let xrcdn = guest.alloc_xrcd().unwrap();
    let srqn = guest.create_srq(pdn);
    guest.create_xrc_srq(pdn, xrcdn, second).unwrap();
    let gsi = guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_GSI);
    let [rc, _, uc, ud] =
        [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UC, VIRTIO_RDMA_QPT_UD]
            .map(|kind| guest.create_qp(pdn, cqn, kind));
    let shared = guest.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
    let initiator = guest.create_xrc_ini(pdn, cqn).unwrap();
    let target = guest.create_xrc_tgt(xrcdn).unwrap();
    guest.add_vlan_gid(1, gid(100 + number), 5).unwrap();
    to_rts(guest, gsi, 0x8001_0000, true);
    to_rts(guest, ud, QKEY, false);
    let mut group = gid(1);
    group[12] = 239;
    guest.mcast(VIRTIO_RDMA_CMD_ATTACH_MCAST, ud, group).unwrap();
    Objects { pdn, cqn, key, srqn, rc, shared, uc, ud, initiator, target }
}

/// Connects the QPs of a guest with those of the other one.
fn connect(guest: &mut Guest, own: &Objects, peer: Gid) {
    guest.connect(own.rc, peer, own.rc);
    guest.connect(own.shared, peer, own.shared);
    guest.make_init(own.uc, ALL);
    guest.make_rtr(own.uc, peer, own.uc, false).unwrap();
    guest.make_rts(own.uc, false).unwrap();
    guest.connect_ini(own.initiator, peer, own.target);
    guest.connect_tgt(own.target, peer, own.initiator);
}

/// Makes a guest give pages to a memory region, and bind a memory window of each type.
fn bind(guest: &mut Guest, own: &Objects) {
    let mr = guest.create_mr(own.pdn, 4).unwrap();
    let pages = [DATA + 0x5000, DATA + 0x2000];
    let reg = guest.registration(mr.lkey, ALL, 0x7000_0010, 0x1800, &pages);
    guest.post_send(own.rc, &Send::reg_mr(1, reg));
    for kind in [VIRTIO_RDMA_MW_TYPE_1, VIRTIO_RDMA_MW_TYPE_2] {
        let key = guest.alloc_mw(own.pdn, kind).unwrap().rkey;
        let mut bind = virtio_rdma_ring_bind_wqe::new_zeroed();
        (bind.mw_rkey, bind.new_rkey) = (key, key & !0xff | (key + 1) & 0xff);
        (bind.addr, bind.length, bind.lkey) = (DATA + 0x700, 0x1200, own.key);
        bind.access = READ | WRITE;
        guest.post_send(own.rc, &Send::bind_mw(2, bind));
    }
}

/// Sends what the device has to send, and returns the packets, none of which arrives.
fn sent(guest: &Guest, cable: &Cable) -> Vec<Vec<u8>> {
    cable.lose();
    cable.sent.lock().unwrap().clear();
    guest.run();
    cable.lose();
    std::mem::take(&mut *cable.sent.lock().unwrap())
}

/// Brings packets to the second guest.
fn bring(guest: &Guest, cable: &Cable, packets: &[Vec<u8>]) {
    for packet in packets {
        cable.inject(1, packet);
    }
    cable.deliver();
    guest.run();
}

/// Returns the images of two guests on two hosts, in the middle of what they do.
fn rings() -> [Vec<u8>; 2] {
    let mut images = [Vec::new(), Vec::new()];
    over_a_cable(1, Faults::default(), || {
        let (cable, clock) = (cable().unwrap(), TestClock::new());
        let mut number = 0;
        let mut guests = cable.fabrics(|| fabric_config(&clock)).map(|fabric| {
            number += 1;
            let make = || Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup());
            let mut guest = with_rings(make);
            let own = furnish(&mut guest, number);
            (guest, own)
        });
        let [(a, own), (b, other)] = &mut guests;
        connect(a, own, b.gid);
        connect(b, other, a.gid);
        bind(a, own);
        bind(b, other);
        let write = |len: usize| {
            let part = [sge(DATA, len as u32, own.key)];
            Send::new(3, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA + (1 << 20), other.key)
        };
        let add = Send::new(4, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &[sge(DATA, 8, own.key)]);
        a.post_send(own.rc, &write(64 << 10));
        a.post_send(own.rc, &add.atomic(DATA, other.key, 1, 0));
        settle(&[a, b]);
        know_selective(a, own.rc);
        know_selective(b, other.rc);
        clock.advance_to(clock.now() + Duration::from_micros(900));
        // The second of these finds no receive.
        b.post_srq_recv(other.srqn, 5, &[sge(DATA, 64, other.key)]);
        b.arm_srq(other.srqn, 1).unwrap();
        b.arm_cq(other.cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
        let send =
            |len: usize| Send::new(6, VIRTIO_RDMA_WR_SEND, &[sge(DATA, len as u32, own.key)]);
        a.post_send(own.shared, &send(64));
        a.post_send(own.shared, &send(64));
        settle(&[a, b]);
        clock.advance_to(clock.now() + Duration::from_micros(7));
        // The last packet is missing.
        b.post_recv(other.uc, 7, &[sge(DATA, LONG as u32, other.key)]);
        a.post_send(own.uc, &send(LONG));
        let packets = sent(a, &cable);
        bring(b, &cable, &packets[..packets.len() - 1]);
        // The first packet is missing, twice.
        a.post_send(own.rc, &write(LONG));
        let packets = sent(a, &cable);
        bring(b, &cable, &packets[1..]);
        cable.deliver();
        assert_eq!(sent(a, &cable).len(), 1);
        clock.advance_to(clock.now() + Duration::from_micros(5));
        // A datagram arrives that is not looked at, and a request whose answer takes several turns.
        a.post_send(own.ud, &send(64).ud(b.gid, other.ud, QKEY, own.pdn));
        a.run();
        let part = [sge(DATA, 1 << 20, other.key)];
        let read = Send::new(8, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, own.key);
        b.post_send(other.rc, &read);
        b.run();
        cable.deliver();
        a.device.run(1);
        images = [a.device.save(), b.device.save()];
    });
    images
}

/// Returns the image of a guest without rings, one of whose messages waits for a receive.
fn virtqueues() -> Vec<u8> {
    let (fabric, clock) = fabric();
    let make = |number| Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup());
    let [mut a, mut b] = [3, 4].map(make);
    let [own, other] = [&mut a, &mut b].map(|guest| End::new(guest, VIRTIO_RDMA_QPT_RC));
    let ud = a.create_qp(own.pdn, own.cqn, VIRTIO_RDMA_QPT_UD);
    to_rts(&mut a, ud, QKEY, false);
    a.connect(own.qpn, b.gid, other.qpn);
    b.connect(other.qpn, a.gid, own.qpn);
    a.post_send(own.qpn, &Send::new(1, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 100, own.key)]));
    settle(&[&a, &b]);
    a.device.save()
}
