// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drivers in front of the observer: one that keeps all clauses, and those with a planted defect, each of which fails
//! the clauses that it breaks and no other.

// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use abi::*;
use conform::bench::{Bench, End, Link};
use conform::driver::{Driver, MEMORY};
use conform::journal::Journal;
use conform::objects::Shape;
use conform::observer::provoke::{self, Provoker, Times};
use conform::observer::{observe, DriverReport};
use conform::outcome::Outcome;
use conform::port::{
    Attach, Memory, VfioUser, VhostUser, F_ACCESS_PLATFORM, F_ORDER_PLATFORM, F_VERSION_1,
};
use conform::report::Mark;
use hostile::{Settings, Socket};
use rand::SeedableRng as _;
use ring::Layout;
use testkit::command::{self, pages_of, PAGE};
use testkit::{Descriptor, Memory as _, Send, F_NEXT, F_WRITE, LOCAL, READ, WRITE};
use zerocopy::{FromZeros, IntoBytes};

const RC: u32 = VIRTIO_RDMA_QPT_RC;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
/// How long the observer waits for a doorbell, or for a buffer of events.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time after which the observer has looked at everything.
const LOOKED: Duration = Duration::from_millis(250);
/// The features of a driver with which most clauses can be judged.
const FEATURES: u64 = F_VERSION_1
    | 1 << VIRTIO_RDMA_F_RINGS
    | 1 << VIRTIO_RDMA_F_SRQ
    | 1 << VIRTIO_RDMA_F_SRQ_RESIZE
    | 1 << VIRTIO_RDMA_F_CQ_RESIZE
    | 1 << VIRTIO_RDMA_F_PAGE_SIZES;

/// An observer that waits for a driver.
struct Observed {
    folder: tempfile::TempDir,
    is_vfio: bool,
    thread: JoinHandle<DriverReport>,
}

impl Observed {
    fn new(is_vfio: bool, without: u64) -> Self {
        Self::with(is_vfio, without, None)
    }

    fn with(is_vfio: bool, without: u64, provoker: Option<Provoker>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device");
        let socket = if is_vfio { Socket::VfioUser(path) } else { Socket::VhostUser(path) };
        let offer = Settings { direct: true, without, ..Settings::new(is_vfio, None) };
        let end = hostile::End { at_disconnect: true, at: None };
        let thread = std::thread::spawn(move || {
            observe(&socket, offer, end, PATIENCE, provoker).expect("a report")
        });
        Self { folder, is_vfio, thread }
    }

    /// Returns a driver that has not begun.
    fn bench(&self) -> Bench {
        let path = self.folder.path().join("device");
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let memory = Rc::new(Memory::new(MEMORY));
        let attach: Box<dyn Attach> = if self.is_vfio {
            Box::new(VfioUser::new(path))
        } else {
            Box::new(VhostUser::new(path))
        };
        let port = attach.attach(&memory).expect("a device");
        let (time, silence) = (Duration::from_secs(60), Duration::from_secs(30));
        let journal = Rc::new(Journal::new("V-INIT-01", time, silence));
        let mut driver = Driver::new(port, memory, Rc::clone(&journal), command::gid(1));
        driver.wanted = FEATURES | if self.is_vfio { F_ACCESS_PLATFORM } else { 0 };
        let random = rand_xorshift::XorShiftRng::seed_from_u64(1);
        Bench { members: vec![driver], journal, random, far: 0 }
    }

    fn report(self) -> DriverReport {
        self.thread.join().expect("the observer ends")
    }
}

/// Starts the device as the text says.
fn begin(t: &mut Bench) -> Outcome {
    begin_with(t.a(), |features| features)
}

fn begin_with(a: &mut Driver, accept: fn(u64) -> u64) -> Outcome {
    a.read_config()?;
    let features = accept(a.wanted);
    if a.negotiate(features)? == Some(false) {
        return Ok(());
    }
    a.read_config()?;
    a.start()?;
    a.add_own_gid()
}

/// Runs a driver in front of the observer, and returns what is told of it.
fn judge(
    is_vfio: bool,
    without: u64,
    run: impl FnOnce(&mut Bench) -> Outcome,
) -> (DriverReport, Outcome) {
    judge_with(is_vfio, without, None, run)
}

fn judge_with(
    is_vfio: bool,
    without: u64,
    provoker: Option<Provoker>,
    run: impl FnOnce(&mut Bench) -> Outcome,
) -> (DriverReport, Outcome) {
    let observed = Observed::with(is_vfio, without, provoker);
    let mut bench = observed.bench();
    let result = run(&mut bench);
    let paused = bench.a().pause(LOOKED);
    drop(bench);
    (observed.report(), result.and(paused))
}

// A driver that keeps all clauses.

fn resize_cq(t: &mut Bench, cqn: u32, depth: u32) -> Outcome {
    let (at, new) = t.a().cq_request(depth);
    let request = virtio_rdma_cmd_resize_cq { region: new.region, cqe: depth, cqn };
    let (name, number) = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let _: virtio_rdma_rsp_resize_cq = t.a().command("D-CQ-51", name, number, &request)?;
    t.a().move_cq(cqn, at, depth);
    Ok(())
}

fn resize_srq(t: &mut Bench, srqn: u32, depth: u32) -> Outcome<u64> {
    let (at, new) = t.a().srq_request(0, depth);
    let request = command::resize_srq(srqn, new.region, new.ring);
    let (name, number) = ("RESIZE_SRQ", VIRTIO_RDMA_CMD_RESIZE_SRQ);
    let reply: virtio_rdma_rsp_resize_srq = t.a().command("D-SRQ-10", name, number, &request)?;
    t.a().move_srq(srqn, (at, request.ring), reply.moved);
    Ok(at)
}

fn messages(t: &mut Bench, x: &End, y: &End, count: u64) -> Outcome {
    for wr_id in 0..count {
        t.receive(y, wr_id, 0x8000, 0x100)?;
        t.post(x, &x.send(wr_id, SEND, 0, 0x80))?;
        t.succeeds(x, "D-WQE-06", wr_id)?;
        t.succeeds(y, "D-WQE-06", wr_id)?;
        if wr_id % 8 == 0 {
            t.a().pause(Duration::from_millis(20))?;
        }
    }
    Ok(())
}

fn with_an_srq(t: &mut Bench) -> Outcome {
    let (x, mut y) = (t.end(0, RC)?, t.end(0, RC)?);
    let srqn = t.a().create_srq(y.pdn, 8)?;
    let cqn = y.cqn;
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    y.qpn = t.a().create_srq_qp(y.pdn, &shape, srqn)?;
    t.connect(&x, &y, RC, Link::default())?;
    t.connect(&y, &x, RC, Link::default())?;
    for round in 0..3 {
        for wr_id in 0..6 {
            let sges = [y.sge(0x8000, 0x100)];
            t.a().post_srq_recv(srqn, wr_id, &sges)?;
        }
        for wr_id in 0..6 {
            t.post(&x, &x.send(wr_id, SEND, 0, 0x80))?;
            t.succeeds(&x, "D-WQE-06", wr_id)?;
            t.succeeds(&y, "D-WQE-06", wr_id)?;
        }
        if round == 1 {
            resize_srq(t, srqn, 16)?;
        }
    }
    Ok(())
}

/// Resets a QP that was used, and uses it once more.
fn again(t: &mut Bench, x: &End, y: &End) -> Outcome {
    for end in [x, y] {
        t.a().reset_qp(end.qpn)?;
        t.a().pause(LOOKED)?;
    }
    t.connect(x, y, RC, Link::default())?;
    t.connect(y, x, RC, Link::default())?;
    messages(t, x, y, 20)
}

/// Asks for an event, and takes it.
fn drained(t: &mut Bench, x: &End) -> Outcome {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    (attr.qp_state, attr.en_sqd_async_notify) = (VIRTIO_RDMA_QPS_SQD as u8, 1);
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY;
    t.a().modify(x.qpn, "D-QP-40", mask, attr)?;
    Ok(())
}

fn good(t: &mut Bench) -> Outcome {
    begin(t)?;
    let (x, y) = t.connection()?;
    messages(t, &x, &y, 40)?;
    resize_cq(t, x.cqn, 16)?;
    messages(t, &x, &y, 40)?;
    again(t, &x, &y)?;
    with_an_srq(t)?;
    let gsi = t.end(0, VIRTIO_RDMA_QPT_GSI)?;
    t.make_ready(&gsi, VIRTIO_RDMA_QPT_GSI)?;
    drained(t, &x)?;
    t.a().await_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, x.qpn, "SQ_DRAINED")?;
    t.a().destroy_qp(x.qpn)?;
    t.a().destroy_cq(x.cqn)?;
    t.a().dereg_mr(x.mr.mrn)?;
    t.a().pause(PATIENCE + LOOKED)?;
    t.a().port.reset()?;
    t.a().forget();
    begin(t)
}

/// The clauses that a driver of the base with these options shows.
const SHOWN: &[&str] = &[
    "V-TERM-03",
    "V-TERM-05",
    "V-TERM-07",
    "V-FEAT-01",
    "V-FEAT-04",
    "V-FEAT-05",
    "V-FEAT-06",
    "V-CFG-13",
    "V-INIT-02",
    "V-MR-01",
    "V-MR-02",
    "V-MR-03",
    "V-MR-04",
    "V-MR-05",
    "V-PORT-01",
    "V-RING-02",
    "V-RING-03",
    "V-RING-05",
    "V-RING-06",
    "V-RING-10",
    "V-RING-11",
    "V-RING-12",
    "V-RING-13",
    "V-RING-14",
    "V-RING-15",
    "V-RING-16",
    "V-RING-17",
    "V-RING-19",
    "V-RING-40",
    "V-RING-41",
    "V-RING-42",
    "V-RING-50",
    "V-RING-51",
    "V-WQE-01",
    "V-WQE-05",
    "V-CQ-02",
    "V-CQ-31",
    "V-CQ-32",
    "V-QP-01",
    "V-QP-02",
    "V-GSI-01",
    "V-EVT-01",
    "V-SRQ-05",
    "V-SRQ-10",
    "V-SRQ-11",
];

fn is_good(is_vfio: bool, more: &[&str]) {
    let (report, result) = judge(is_vfio, 0, good);
    let mut text = Vec::new();
    report.write(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    result.unwrap_or_else(|stop| panic!("{stop:?}\n{text}"));
    assert!(report.with(Mark::Fail).is_empty(), "{text}");
    let shown: Vec<&str> = SHOWN.iter().chain(more).copied().collect();
    let mut missing = shown.clone();
    missing.retain(|clause| report.mark(clause) != Mark::Pass);
    assert!(missing.is_empty(), "not judged: {missing:?}\n{text}");
    assert_eq!(report.with(Mark::Pass).len(), shown.len(), "{text}");
    let value = report.json();
    assert_eq!(value["clauses"]["V-RING-02"]["result"], "pass");
    assert_eq!(value["clauses"]["V-CTRL-01"]["result"], "not judged");
}

#[test]
fn good_driver_over_vhost_user() {
    is_good(false, &[]);
}

#[test]
fn good_driver_over_vfio_user() {
    is_good(true, &["V-CFG-01", "V-INIT-01", "V-RST-01"]);
}

#[test]
fn driver_of_the_base_alone() {
    let without = !(1 << VIRTIO_RDMA_F_RINGS);
    let (report, result) = judge(false, without, |t| {
        t.a().wanted = F_VERSION_1 | 1 << VIRTIO_RDMA_F_RINGS;
        begin(t)?;
        let (x, y) = t.connection()?;
        messages(t, &x, &y, 1)
    });
    assert!(result.is_ok(), "{result:?}");
    assert!(report.with(Mark::Fail).is_empty());
    assert_eq!(report.mark("V-FEAT-02"), Mark::Pass);
}

#[test]
fn drivers_that_need_more_than_the_base() {
    let base = !(1 << VIRTIO_RDMA_F_RINGS);
    let (report, _) = judge(true, base, comes);
    assert_eq!(report.with(Mark::Fail), ["V-FEAT-02"]);
    // A driver that was not given the time has not refused the device, and neither has one that has another device.
    let (report, _) = judge(true, base, |t| t.a().read_config());
    assert_eq!(report.with(Mark::Fail), [""; 0]);
    let (report, _) = judge(true, 0, comes);
    assert_eq!(report.with(Mark::Fail), [""; 0]);
    let (report, _) = judge(true, 1 << VIRTIO_RDMA_F_VIRTQUEUES, |t| {
        let bits = F_VERSION_1 | F_ACCESS_PLATFORM | 1 << VIRTIO_RDMA_F_VIRTQUEUES;
        t.a().negotiate(bits).map(|_| ())
    });
    assert_eq!(report.with(Mark::Fail), ["V-FEAT-06"]);
}

#[test]
fn nobody_and_nonsense() {
    let (report, _) = judge(true, 0, |_| Ok(()));
    assert!(report.with(Mark::Pass).is_empty() && !report.has_failed());
    // A front end that says something else ends the run, and breaks no clause.
    let observed = Observed::new(false, 0);
    let path = observed.folder.path().join("device");
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    std::io::Write::write_all(&mut stream, &[0xff; 64]).unwrap();
    assert!(!observed.report().has_failed());
}

// Drivers with a planted defect.

/// A defect: its name, the clauses that it breaks, and the driver that has it.
type Planted = (&'static str, &'static [&'static str], fn(&mut Bench) -> Outcome);

/// Runs drivers with a defect.
fn fail(is_vfio: bool, planted: &[Planted]) {
    for (name, clauses, run) in planted {
        let (report, _) = judge(is_vfio, 0, run);
        let mut text = Vec::new();
        report.write(&mut text).unwrap();
        let failures: Vec<_> = report.with(Mark::Fail);
        let told = || String::from_utf8_lossy(&text).into_owned();
        assert_eq!(failures, *clauses, "{name}\n{}", told());
        for clause in failures {
            let failure = &report.of(clause).unwrap().failures[0];
            let is_told = [&failure.expected, &failure.got, &failure.step].map(String::is_empty);
            assert_eq!(is_told, [false; 3], "{name}: {failure}");
        }
    }
}

fn request_of(
    t: &mut Bench,
    number: u32,
    request: &(impl IntoBytes + zerocopy::Immutable),
) -> Outcome {
    t.a().request(&command::encode(number, request), 256).map(|_| ())
}

/// Sends a request for a QP that is changed. `pages` are those of the region.
fn create_qp(t: &mut Bench, change: fn(&mut virtio_rdma_cmd_create_ring_qp)) -> Outcome {
    begin(t)?;
    let pdn = t.a().create_pd()?;
    let cqn = t.a().create_cq(16)?;
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    let (_, mut request) = t.a().qp_request(pdn, &shape);
    let pages = 300;
    (_, request.region) = t.a().region(pages * PAGE);
    change(&mut request);
    request_of(t, VIRTIO_RDMA_CMD_CREATE_RING_QP, &request)
}

/// Sends a request for a CQ that is changed.
fn create_cq(
    t: &mut Bench,
    change: fn(&mut Driver, u64, &mut virtio_rdma_cmd_create_ring_cq),
) -> Outcome {
    begin(t)?;
    let (at, mut request) = t.a().cq_request(16);
    change(t.a(), at, &mut request);
    request_of(t, VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request)
}

/// Sends a request for an MR that is changed.
fn reg_mr(t: &mut Bench, change: fn(&mut Driver, &mut virtio_rdma_cmd_reg_user_mr)) -> Outcome {
    begin(t)?;
    let pdn = t.a().create_pd()?;
    let at = t.a().allocate(4 * PAGE, PAGE);
    let mut request = t.a().mr_request(pdn, at, 4 * PAGE, LOCAL | READ | WRITE);
    change(t.a(), &mut request);
    request_of(t, VIRTIO_RDMA_CMD_REG_USER_MR, &request)
}

/// Makes a chain of these descriptors available, which may have the flags of a chain.
fn chain(t: &mut Bench, index: u16, flags: &[(u32, u16)]) -> Outcome {
    begin(t)?;
    let a = t.a();
    let at = a.allocate(PAGE, PAGE);
    let last = flags.len() - 1;
    let of = |(place, (len, flag)): (usize, &(u32, u16))| Descriptor {
        addr: at,
        len: *len,
        flags: flag | if place < last { F_NEXT } else { 0 },
        next: 0,
    };
    let descriptors: Vec<_> = flags.iter().enumerate().map(of).collect();
    let memory = a.memory.map.clone();
    a.queues.get_mut(&index).unwrap().add_raw(&memory, &descriptors);
    a.port.kick(index)
}

/// Posts an entry that is changed to a QP in RTS.
fn post(t: &mut Bench, change: fn(&mut Vec<u8>)) -> Outcome {
    begin(t)?;
    let (x, _) = t.connection()?;
    let mut entry = x.send(1, SEND, 0, 16).entry();
    change(&mut entry);
    t.a().write_entry(x.qpn, VIRTIO_RDMA_DOORBELL_SQ, (1, true), &entry);
    t.a().ring_if_asleep(x.qpn, VIRTIO_RDMA_DOORBELL_SQ)?;
    t.a().ring_doorbell(x.qpn, VIRTIO_RDMA_DOORBELL_SQ)
}

/// Writes a word of the region of a QP that is used, or of its CQ. The driver has sent and received messages before.
fn word(t: &mut Bench, of_cq: bool, at: u64, value: fn(u32) -> u32) -> Outcome {
    begin(t)?;
    let (x, y) = t.connection()?;
    messages(t, &x, &y, 4)?;
    t.a().pause(LOOKED)?;
    let a = t.a();
    let region = if of_cq { a.cqs[&x.cqn].ring.region } else { a.qps[&y.qpn].rings.region };
    let before: u32 = a.memory.map.get(region + at);
    a.memory.map.put(region + at, &value(before));
    Ok(())
}

/// Takes a QP from INIT to a state, and posts a send.
fn send_in_init(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, RC)?;
    t.make_init(&x, RC, READ)?;
    t.post(&x, &x.send(1, SEND, 0, 16))
}

fn receive_in_reset(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, RC)?;
    t.receive(&x, 1, 0, 16)
}

/// Leads a QP that was used back to RESET without 0 in its producers.
fn reset_only(t: &mut Bench) -> Outcome<End> {
    begin(t)?;
    let (x, y) = t.connection()?;
    messages(t, &x, &y, 3)?;
    t.a().pause(LOOKED)?;
    t.a().set_state(y.qpn, VIRTIO_RDMA_QPS_RESET)?;
    Ok(y)
}

fn more_receives_than_asked_for(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, RC)?;
    let cqn = x.cqn;
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    let (at, mut request) = t.a().qp_request(x.pdn, &shape);
    request.base.max_recv_wr = 4;
    let qpn = t.a().create_qp_of(at, &request)?;
    let y = End { qpn, ..x };
    t.make_init(&y, RC, READ)?;
    for wr_id in 0..5 {
        t.receive(&y, wr_id, 0, 16)?;
    }
    Ok(())
}

fn no_doorbell(t: &mut Bench) -> Outcome {
    begin(t)?;
    let (x, y) = t.connection()?;
    messages(t, &x, &y, 1)?;
    t.a().pause(LOOKED)?;
    let entry = x.send(9, SEND, 0, 16).entry();
    t.a().write_entry(x.qpn, VIRTIO_RDMA_DOORBELL_SQ, (9, true), &entry);
    t.a().pause(PATIENCE + LOOKED)
}

fn srq_that_is_too_full(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, RC)?;
    let srqn = t.a().create_srq(x.pdn, 4)?;
    for wr_id in 0..5 {
        t.a().post_srq_recv(srqn, wr_id, &[x.sge(0, 16)])?;
    }
    Ok(())
}

fn srq_that_begins_again(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, RC)?;
    let srqn = t.a().create_srq(x.pdn, 4)?;
    for wr_id in 0..3 {
        t.a().post_srq_recv(srqn, wr_id, &[x.sge(0, 16)])?;
    }
    let at = resize_srq(t, srqn, 8)?;
    t.a().memory.map.put(at, &1_u32);
    Ok(())
}

fn gsi_of_another_qkey(t: &mut Bench) -> Outcome {
    begin(t)?;
    let x = t.end(0, VIRTIO_RDMA_QPT_GSI)?;
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    (attr.qp_state, attr.port_num, attr.qkey) = (VIRTIO_RDMA_QPS_INIT as u8, 1, 0x1234);
    let mask = command::attr_mask(VIRTIO_RDMA_QPT_GSI, VIRTIO_RDMA_QPS_INIT);
    request_of(
        t,
        VIRTIO_RDMA_CMD_MODIFY_QP,
        &virtio_rdma_cmd_modify_qp { qpn: x.qpn, attr_mask: mask, attr },
    )
}

fn events_are_kept(t: &mut Bench) -> Outcome {
    t.a().event_buffers = 1;
    begin(t)?;
    let (x, _) = t.connection()?;
    drained(t, &x)?;
    let events = t.a().event_queue();
    t.a().pause(Duration::from_millis(50))?;
    t.a().take(events, "D-RING-04")?;
    t.a().pause(PATIENCE + LOOKED)
}

/// Returns virtqueues of a driver that has read the configuration.
fn layouts(a: &mut Driver) -> BTreeMap<u16, Layout> {
    let mut layouts = BTreeMap::new();
    for index in 0..3 + a.vectors() {
        let [desc, avail, used] =
            [64 * 16, 6 + 64 * 2, 6 + 64 * 8].map(|len| a.allocate(len, PAGE));
        layouts.insert(index, Layout { size: 64, desc, avail, used, event_idx: false });
    }
    layouts
}

/// Starts with virtqueues that are changed. `bells` is that of doorbells.
fn start_with(t: &mut Bench, change: fn(&mut BTreeMap<u16, Layout>, u16)) -> Outcome {
    let a = t.a();
    a.read_config()?;
    let wanted = a.wanted;
    a.negotiate(wanted)?;
    a.read_config()?;
    let mut layouts = layouts(a);
    change(&mut layouts, a.doorbells());
    a.port.start(&a.memory.map, &layouts)?;
    for index in (1..=a.vectors()).chain([a.event_queue()]) {
        let at = a.allocate(8, 8);
        let mut queue = testkit::Virtqueue::new(layouts[&index]);
        queue.add(&a.memory.map, 0, &[(at, 8, true)]);
        a.port.kick(index)?;
    }
    a.pause(LOOKED)
}

/// Begins with other features. Where the device has no say in them, it starts.
fn accept(t: &mut Bench, change: fn(u64) -> u64) -> Outcome {
    let a = t.a();
    a.read_config()?;
    let features = change(a.wanted);
    if a.negotiate(features)?.is_some() {
        return Ok(());
    }
    let layouts = layouts(a);
    a.port.start(&a.memory.map, &layouts)
}

const SETUP: &[Planted] = &[
    ("a bit without the one that it requires", &["V-FEAT-01"], |t| {
        accept(t, |features| {
            (features | 1 << VIRTIO_RDMA_F_XRC)
                & !(1 << VIRTIO_RDMA_F_SRQ | 1 << VIRTIO_RDMA_F_SRQ_RESIZE)
        })
    }),
    ("two data paths", &["V-FEAT-05"], |t| {
        accept(t, |features| features | 1 << VIRTIO_RDMA_F_VIRTQUEUES)
    }),
    ("no data path", &["V-FEAT-04"], |t| {
        accept(t, |features| features & (F_VERSION_1 | F_ACCESS_PLATFORM))
    }),
    ("a legacy driver", &["V-TERM-07"], |t| accept(t, |features| features & !F_VERSION_1)),
    ("a virtqueue that is not set up", &["V-RING-02"], |t| {
        start_with(t, |layouts, bells| layouts.retain(|index, _| *index != bells))
    }),
    ("a control queue of one entry", &["V-RING-06"], |t| {
        start_with(t, |layouts, _| layouts.values_mut().take(1).for_each(|layout| layout.size = 1))
    }),
    ("no buffers for events", &["V-INIT-02"], |t| {
        t.a().event_buffers = 0;
        begin(t)?;
        t.a().pause(PATIENCE + LOOKED)
    }),
    ("buffers for events that are not added again", &["V-EVT-01"], events_are_kept),
];

/// Takes a completion event, and makes its buffer available again.
fn takes_a_completion_event(t: &mut Bench, kicks: bool) -> Outcome {
    begin(t)?;
    let (x, y) = t.connection()?;
    t.a().arm(x.cqn, false);
    messages(t, &x, &y, 1)?;
    let queue = t.a().vectors();
    let returned = t.a().wait("a completion event", |a| a.take(queue, "D-RING-04"))?;
    let a = t.a();
    let memory = a.memory.map.clone();
    a.queues.get_mut(&queue).unwrap().add(&memory, &returned.buffers);
    if kicks {
        a.port.kick(queue)?;
    }
    a.pause(PATIENCE + LOOKED)
}

#[test]
fn notifications_of_completion_events() {
    let (report, _) = judge(true, 0, |t| takes_a_completion_event(t, true));
    assert_eq!((report.with(Mark::Fail), report.mark("V-CQ-23")), (vec![], Mark::Pass));
    let (report, _) = judge(false, 0, |t| takes_a_completion_event(t, false));
    assert_eq!((report.with(Mark::Fail), report.mark("V-CQ-23")), (vec![], Mark::NotJudged));
}

/// What only a transport shows that has the registers of the device.
const REGISTERS: &[Planted] = &[
    ("no notification of buffers", &["V-CQ-23"], |t| takes_a_completion_event(t, false)),
    ("another field before magic and revision", &["V-CFG-01"], |t| {
        t.a().port.config(4)?;
        begin(t)
    }),
    ("virtqueues before the configuration", &["V-INIT-01"], |t| {
        let a = t.a();
        a.read_config()?;
        let wanted = a.wanted;
        a.negotiate(wanted)?;
        a.start()
    }),
];

const BUFFERS: &[Planted] = &[
    ("an event buffer of 4 bytes", &["V-RING-03"], |t| {
        begin(t)?;
        let events = t.a().event_queue();
        t.a().take_events()?;
        chain_again(t, events, &[(4, F_WRITE)])
    }),
    ("a request behind its reply", &["V-RING-03"], |t| chain(t, 0, &[(8, F_WRITE), (1, 0)])),
    ("a chain of 9 descriptors", &["V-RING-05"], |t| {
        let mut chain_of = vec![(1, 0); 8];
        chain_of.push((16, F_WRITE));
        chain(t, 0, &chain_of)
    }),
    ("a request that is too short", &["V-RING-03"], |t| {
        begin(t)?;
        t.a().request(&[VIRTIO_RDMA_CMD_QUERY_QP as u8, 0], 256).map(|_| ())
    }),
    ("no room for the reply", &["V-RING-03"], |t| {
        begin(t)?;
        t.a().request(&[VIRTIO_RDMA_CMD_CREATE_PD as u8], 1).map(|_| ())
    }),
    ("one and a half doorbells", &["V-RING-03"], |t| {
        begin(t)?;
        t.a().ring_doorbells(&[0; 12])
    }),
    ("a doorbell of no queue", &["V-RING-51"], |t| {
        begin(t)?;
        t.a().ring_doorbell(1, 7)
    }),
    ("a command that is not listed", &["V-TERM-05"], |t| {
        begin(t)?;
        t.a().request(&[99, 0, 0, 0, 0], 256).map(|_| ())
    }),
];

/// Makes a chain available in a queue of events, from which one buffer is taken out first.
fn chain_again(t: &mut Bench, index: u16, flags: &[(u32, u16)]) -> Outcome {
    let (x, _) = t.connection()?;
    drained(t, &x)?;
    t.a().pause(Duration::from_millis(50))?;
    t.a().take(index, "D-RING-04")?;
    let at = t.a().allocate(64, 64);
    let buffers: Vec<_> = flags.iter().map(|(len, flag)| (at, *len, flag & F_WRITE != 0)).collect();
    t.a().add(index, &buffers)
}

const COMMANDS: &[Planted] = &[
    ("a reserved byte in CREATE_RING_QP", &["V-TERM-03"], |t| {
        create_qp(t, |it| it.reserved[5] = 0x5a00)
    }),
    ("a reserved byte of a region", &["V-TERM-03"], |t| {
        create_cq(t, |_, _, it| it.region.reserved_0c = 1)
    }),
    ("a reserved byte of an address vector", &["V-TERM-03"], |t| {
        begin(t)?;
        let x = t.end(0, RC)?;
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.port_num) = (VIRTIO_RDMA_QPS_INIT as u8, 1);
        attr.ah_attr.reserved_22[3] = 1;
        let attr_mask = command::attr_mask(RC, VIRTIO_RDMA_QPS_INIT);
        request_of(
            t,
            VIRTIO_RDMA_CMD_MODIFY_QP,
            &virtio_rdma_cmd_modify_qp { qpn: x.qpn, attr_mask, attr },
        )
    }),
    ("an access flag that is not listed", &["V-TERM-05"], |t| {
        reg_mr(t, |_, it| it.access_flags |= 1 << 30)
    }),
    ("a flag of a QP that is not listed", &["V-TERM-05"], |t| create_qp(t, |it| it.flags = 4)),
    ("more inline data than any device has", &["V-CFG-13"], |t| {
        create_qp(t, |it| it.base.max_inline_data = 5000)
    }),
    ("a page table that is not aligned", &["V-MR-01"], |t| reg_mr(t, |_, it| it.pages += 4)),
    ("a page too many", &["V-MR-02"], |t| reg_mr(t, |_, it| it.npages += 1)),
    ("a page that is not aligned", &["V-MR-03"], |t| {
        reg_mr(t, |a, it| {
            let pages: Vec<u64> =
                pages_of(it.start, it.length).iter().map(|page| page + 8).collect();
            it.pages = a.table(&pages);
        })
    }),
    ("a size of pages that the device does not have", &["V-MR-04"], |t| {
        reg_mr(t, |_, it| it.page_shift = 11)
    }),
    ("an entry of the GID table that cannot be", &["V-PORT-01"], |t| {
        begin(t)?;
        request_of(t, VIRTIO_RDMA_CMD_ADD_GID, &command::add_gid(256, command::gid(9)))
    }),
    ("another Q_Key of the GSI", &["V-GSI-01"], gsi_of_another_qkey),
    ("an SRQ without its feature", &["V-SRQ-01"], |t| {
        t.a().wanted &= !(1 << VIRTIO_RDMA_F_SRQ | 1 << VIRTIO_RDMA_F_SRQ_RESIZE);
        create_qp(t, |it| it.srqn = 1)
    }),
];

const REGIONS: &[Planted] = &[
    ("a depth that is no power of two", &["V-RING-10"], |t| create_cq(t, |_, _, it| it.cqe = 12)),
    ("a ring with fewer entries than asked for", &["V-RING-10"], |t| {
        create_qp(t, |it| it.sq.depth = 8)
    }),
    ("a stride that is no power of two", &["V-RING-11"], |t| create_qp(t, |it| it.sq.stride = 96)),
    ("a stride without room for the SGEs", &["V-RING-12"], |t| {
        create_qp(t, |it| it.sq.stride = 64)
    }),
    ("an offset between two strides", &["V-RING-13"], |t| create_qp(t, |it| it.rq.offset += 32)),
    ("an offset within the head", &["V-RING-13"], |t| {
        create_qp(t, |it| (it.rq.stride, it.rq.offset) = (128, 128))
    }),
    ("a ring far from its head", &["V-RING-14"], |t| create_qp(t, |it| it.rq.offset = 1 << 20)),
    ("rings that overlap", &["V-RING-15"], |t| create_qp(t, |it| it.rq.offset = it.sq.offset)),
    ("too few pages", &["V-RING-16"], |t| create_qp(t, |it| it.region.npages = 1)),
    ("a page that is not aligned", &["V-RING-16"], |t| {
        create_cq(t, |a, at, it| it.region.pages = a.table(&[at + 64]))
    }),
    ("a region that is not zero", &["V-RING-17"], |t| {
        create_cq(t, |a, at, _| a.write(at + 300, &[1]))
    }),
    ("a vector that does not exist", &["V-RING-19"], |t| {
        create_cq(t, |_, _, it| it.comp_vector += 1)
    }),
];

const RINGS: &[Planted] = &[
    ("a producer that jumps", &["V-RING-40"], |t| word(t, false, 64, |at| at + 17)),
    ("a producer that moves back", &["V-RING-40"], |t| word(t, false, 64, |at| at - 1)),
    ("more receives than the QP has", &["V-WQE-05"], more_receives_than_asked_for),
    ("a consumer that is ahead of the device", &["V-CQ-02"], |t| word(t, true, 0, |at| at + 1)),
    ("a consumer that moves back", &["V-CQ-02"], |t| word(t, true, 0, |at| at - 1)),
    ("no doorbell", &["V-RING-50"], no_doorbell),
    ("a send in INIT", &["V-QP-01"], send_in_init),
    ("a receive in RESET", &["V-QP-02"], receive_in_reset),
    ("a producer that RESET does not set back", &["V-RING-41"], |t| {
        let y = reset_only(t)?;
        t.make_init(&y, RC, READ)
    }),
    ("a receive between RESET and 0", &["V-RING-42"], |t| {
        let y = reset_only(t)?;
        t.receive(&y, 77, 0, 16)?;
        t.a().pause(LOOKED)?;
        let memory = t.a().memory.map.clone();
        t.a().qps.get_mut(&y.qpn).unwrap().rings.restart(&memory);
        Ok(())
    }),
    ("a reserved byte of an entry", &["V-TERM-03"], |t| post(t, |entry| entry[18] = 1)),
    ("an opcode that is not listed", &["V-TERM-05"], |t| post(t, |entry| entry[8] = 77)),
    ("a flag of a send that is not listed", &["V-TERM-05"], |t| post(t, |entry| entry[11] |= 0x80)),
    ("an entry longer than its place", &["V-WQE-01"], |t| post(t, |entry| entry[9] = 20)),
    ("a page list that is not aligned", &["V-FRMR-02"], |t| {
        post(t, |entry| {
            let reg = WrReg { npages: 1, pages: 0x2004, page_shift: 12, ..WrReg::new_zeroed() };
            *entry = Send::reg_mr(1, reg).entry();
        })
    }),
    ("an SRQ that is too full", &["V-SRQ-05"], srq_that_is_too_full),
    ("an SRQ that begins again after it was resized", &["V-SRQ-11"], srq_that_begins_again),
];

#[test]
fn setup_with_a_defect() {
    fail(false, SETUP);
}

#[test]
fn setup_with_a_defect_over_vfio_user() {
    fail(true, SETUP);
    fail(true, REGISTERS);
}

#[test]
fn buffers_with_a_defect() {
    fail(false, BUFFERS);
}

#[test]
fn commands_with_a_defect() {
    fail(false, COMMANDS);
}

#[test]
fn regions_with_a_defect() {
    fail(false, REGIONS);
}

#[test]
fn rings_with_a_defect() {
    fail(false, RINGS);
}

// Provocations.

/// A time that no test takes.
const EVER: Duration = Duration::from_secs(3600);
/// The times for a driver that does what the clauses say. It is provoked when it has sent the commands of
/// [`begin_and_connect`]. What it must do soon may come as late as a busy machine makes it.
const GOOD: Times = Times {
    commands: 15,
    settled: Duration::ZERO,
    watched: Duration::from_millis(1500),
    on_its_way: EVER,
    silence: [Duration::from_millis(1500), Duration::from_secs(3), EVER],
    slack: Duration::from_millis(25),
    haste: 20,
};
/// The times for a driver that does not. What it does too soon is too soon, however busy the machine is.
const BAD: Times = Times {
    watched: EVER,
    on_its_way: Duration::from_millis(1500),
    silence: [EVER; 3],
    haste: 4,
    ..GOOD
};
/// The times for a driver that waits as V-FAIL-05 says, and not as V-FAIL-06 does.
const HASTY: Times = Times { silence: [GOOD.silence[0], EVER, EVER], ..BAD };
/// The time after which a driver that must go on has done so.
const WATCHED: Duration = Duration::from_millis(1800);

/// Runs a driver that is provoked, and returns what is told of it.
fn provoke(
    name: &str,
    times: Times,
    is_vfio: bool,
    run: impl FnOnce(&mut Bench) -> Outcome,
) -> (DriverReport, &'static [&'static str]) {
    let (report, _) = judge_with(is_vfio, 0, Provoker::new(name, times), run);
    let what = provoke::ALL.iter().find(|what| what.name == name).unwrap();
    (report, what.clauses)
}

/// Runs a driver that is provoked. Returns the clauses that it breaks, and those of the provocation that it keeps.
fn provoked(
    name: &str,
    is_vfio: bool,
    run: impl FnOnce(&mut Bench) -> Outcome,
) -> (Vec<&'static str>, Vec<&'static str>) {
    let (report, clauses) = provoke(name, GOOD, is_vfio, run);
    let is_kept = |clause: &&&str| report.mark(clause) == Mark::Pass;
    (report.with(Mark::Fail), clauses.iter().filter(is_kept).copied().collect())
}

/// Begins, and sends so many commands that the driver is provoked before the next one.
fn begin_and_connect(t: &mut Bench) -> Outcome {
    begin(t)?;
    t.connection().map(|_| ())
}

/// Begins, and sends the command before which the driver is provoked.
fn begin_and_wait(t: &mut Bench) -> Outcome {
    begin_and_connect(t)?;
    t.a().create_pd().map(|_| ())
}

/// Returns whether a provocation is by a configuration that no device may have.
fn is_config(name: &str) -> bool {
    name.starts_with("config-") && name != "config-other-maker"
}

#[test]
fn configurations_that_are_refused() {
    let configurations = provoke::ALL.iter().filter(|what| is_config(what.name));
    for (what, is_vfio) in configurations.zip([true, false].into_iter().cycle()) {
        let refuses = provoked(what.name, is_vfio, |t| t.a().read_config());
        assert_eq!(refuses, (vec![], what.clauses.to_vec()), "{}", what.name);
        // Nobody can set up the virtqueues of a device that has too many.
        let has_queues = what.name != "config-many-queues";
        let starts = provoked(what.name, true, |t| {
            let a = t.a();
            a.read_config()?;
            let wanted = a.wanted;
            a.negotiate(wanted)?;
            a.read_config()?;
            let layouts = if has_queues { layouts(a) } else { BTreeMap::new() };
            a.port.start(&a.memory.map, &layouts)
        });
        let more = if has_queues { vec![] } else { vec!["V-RING-02"] };
        assert_eq!(starts, ([more, what.clauses.to_vec()].concat(), vec![]), "{}", what.name);
    }
    // A driver that has not looked at the device has not refused it.
    assert_eq!(provoked("config-magic", true, |_| Ok(())), (vec![], vec![]));
}

/// A provocation, a driver that does what its clauses say, and one that does not. Of the other one, the clauses that it
/// breaks, and those with a SHOULD that it does not keep.
#[derive(Clone, Copy)]
struct Pair {
    name: &'static str,
    is_vfio: bool,
    good: Run,
    bad: Run,
    /// The times for the one, and for the other.
    times: [Times; 2],
    breaks: &'static [&'static str],
    misses: &'static [&'static str],
}

type Run = fn(&mut Bench) -> Outcome;

const fn pair(name: &'static str, good: Run, bad: Run, breaks: &'static [&'static str]) -> Pair {
    Pair { name, is_vfio: true, good, bad, times: [GOOD, BAD], breaks, misses: &[] }
}

/// Begins, waits until the provocation is over, and goes on.
fn goes_on(t: &mut Bench) -> Outcome {
    begin_and_wait(t)?;
    t.a().pause(WATCHED)?;
    // The suite's driver takes no event that is not listed. It adds the buffer again.
    let _ = t.a().take_events();
    t.a().create_pd().map(|_| ())
}

fn resets(t: &mut Bench) -> Outcome {
    begin_and_wait(t)?;
    t.a().port.reset()
}

/// Begins, makes the device work, and waits for the CQEs.
fn works(t: &mut Bench) -> Outcome {
    let offered = t.a().port.offered()?;
    t.a().wanted |= offered & F_ORDER_PLATFORM;
    begin(t)?;
    let (x, y) = t.connection()?;
    messages(t, &x, &y, 1)
}

/// Comes, and does not start the device.
fn comes(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.read_config()?;
    let wanted = a.wanted;
    a.negotiate(wanted)?;
    a.pause(PATIENCE + LOOKED)
}

fn starts_nevertheless(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.read_config()?;
    let wanted = a.wanted;
    a.negotiate(wanted)?;
    a.start()
}

/// Sends a request for which the device is provoked. The suite's driver may not like the reply.
fn sends(t: &mut Bench, number: u32) -> Outcome<u64> {
    begin_and_connect(t)?;
    t.a().send_request(&[number as u8], 16)
}

fn sends_and_resets(t: &mut Bench, time: Duration) -> Outcome {
    sends(t, VIRTIO_RDMA_CMD_CREATE_PD)?;
    t.a().pause(time)?;
    t.a().port.reset()
}

fn waits_for_the_reply(t: &mut Bench) -> Outcome {
    sends(t, VIRTIO_RDMA_CMD_CREATE_PD)?;
    t.a().await_reply()?;
    t.a().pause(WATCHED)?;
    t.a().create_pd().map(|_| ())
}

/// Waits until the device asks for a reset, waits so long, and begins again.
fn returns_after(t: &mut Bench, time: Duration) -> Outcome {
    t.a().wait("DEVICE_NEEDS_RESET", |a| Ok(a.port.needs_reset()?.filter(|asks| *asks)))?;
    t.a().pause(time)?;
    t.a().port.reset()?;
    t.a().forget();
    begin(t)
}

fn returns_each_time(t: &mut Bench, times: [u64; 4]) -> Outcome {
    begin_and_wait(t)?;
    times.into_iter().try_for_each(|time| returns_after(t, Duration::from_millis(time)))
}

fn fails(t: &mut Bench) -> Outcome {
    begin_and_wait(t)?;
    t.a().await_event(VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0, "DEVICE_FATAL")
}

fn creates_a_cq(t: &mut Bench) -> Outcome<u32> {
    begin_and_connect(t)?;
    let (_, request) = t.a().cq_request(16);
    let request = command::encode(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request);
    Ok(number_of(&t.a().request(&request, 256)?))
}

/// Returns the number that a reply begins with, behind its status.
fn number_of(reply: &[u8]) -> u32 {
    u32::from_le_bytes(reply[1..5].try_into().unwrap())
}

/// All provocations but those by a configuration that no device may have.
const PROVOKED: &[Pair] = &[
    pair("config-other-maker", works, comes, &["V-CFG-16"]),
    pair("order-platform", works, comes, &["V-FEAT-09"]),
    pair("features-refused", comes, starts_nevertheless, &["V-INIT-01"]),
    pair("event-unknown", goes_on, resets, &["V-EVT-02"]),
    pair("event-of-no-object", goes_on, resets, &["V-EVT-03"]),
    pair("completion-of-no-cq", goes_on, resets, &["V-CQ-24"]),
    Pair {
        misses: &["V-EVT-04"],
        ..pair(
            "event-of-the-port",
            |t| {
                begin_and_wait(t)?;
                t.a().await_event(VIRTIO_RDMA_EVENT_PORT_ACTIVE, 1, "PORT_ACTIVE")?;
                let request = virtio_rdma_cmd_query_port { port: 1 };
                request_of(t, VIRTIO_RDMA_CMD_QUERY_PORT, &request)
            },
            goes_on,
            &[],
        )
    },
    pair("device-fatal", resets, goes_on, &["V-EVT-05"]),
    Pair {
        misses: &["V-FAIL-02"],
        times: [Times { silence: BAD.silence, ..GOOD }, Times { silence: GOOD.silence, ..BAD }],
        ..pair(
            "needs-reset",
            |t| {
                begin_and_wait(t)?;
                returns_after(t, Duration::ZERO)
            },
            |t| {
                goes_on(t)?;
                t.a().pause(GOOD.silence[1] + LOOKED)
            },
            &[],
        )
    },
    Pair {
        misses: &["V-FAIL-03"],
        ..pair(
            "needs-reset-again",
            |t| returns_each_time(t, [0, 100, 1000, 3000]),
            |t| returns_each_time(t, [0, 1000, 300, 0]),
            &[],
        )
    },
    pair(
        "reset-late",
        |t| {
            fails(t)?;
            t.a().port.reset()?;
            t.a().forget();
            begin(t)
        },
        |t| {
            fails(t)?;
            t.a().port.begin_reset()?;
            t.a().forget();
            begin(t)
        },
        &["V-RST-01"],
    ),
    pair(
        "reply-status",
        |t| {
            sends(t, VIRTIO_RDMA_CMD_CREATE_PD)?;
            t.a().await_reply()?;
            t.a().pause(WATCHED)?;
            t.a().create_pd().map(|_| ())
        },
        |t| {
            let at = sends(t, VIRTIO_RDMA_CMD_CREATE_PD)?;
            t.a().await_reply()?;
            let pdn = number_of(&t.a().bytes(at, 5));
            request_of(t, VIRTIO_RDMA_CMD_DESTROY_PD, &virtio_rdma_cmd_destroy_pd { pdn })
        },
        &["V-CTRL-01"],
    ),
    pair(
        "reply-number",
        |t| {
            creates_a_cq(t)?;
            t.a().pause(WATCHED)?;
            t.a().create_pd().map(|_| ())
        },
        |t| {
            let cqn = creates_a_cq(t)?;
            request_of(t, VIRTIO_RDMA_CMD_DESTROY_CQ, &virtio_rdma_cmd_destroy_cq { cqn })
        },
        &["V-CTRL-03"],
    ),
    pair("reply-late", waits_for_the_reply, |t| sends_and_resets(t, LOOKED), &["V-FAIL-05"]),
    Pair {
        misses: &["V-FAIL-06"],
        times: [GOOD, HASTY],
        ..pair(
            "reply-very-late",
            waits_for_the_reply,
            |t| sends_and_resets(t, HASTY.silence[0] + LOOKED),
            &[],
        )
    },
    pair(
        "no-reply",
        |t| sends_and_resets(t, GOOD.silence[1] + LOOKED),
        |t| sends_and_resets(t, LOOKED),
        &["V-FAIL-05"],
    ),
];

/// Returns all that is told of a driver.
fn told(report: &DriverReport) -> String {
    let mut text = Vec::new();
    report.write(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

fn judge_pair(pair: &Pair) {
    let (report, clauses) = provoke(pair.name, pair.times[0], pair.is_vfio, pair.good);
    assert_eq!(report.with(Mark::Fail), [""; 0], "{}: {}", pair.name, told(&report));
    for clause in clauses {
        assert_eq!(report.mark(clause), Mark::Pass, "{}: {clause} {}", pair.name, told(&report));
    }
    let (report, clauses) = provoke(pair.name, pair.times[1], pair.is_vfio, pair.bad);
    assert_eq!(report.with(Mark::Fail), pair.breaks, "{}: {}", pair.name, told(&report));
    let misses = |clause: &&&str| report.missed(clause).is_some();
    let missed: Vec<_> = clauses.iter().filter(misses).copied().collect();
    assert_eq!(missed, pair.misses, "{}: {}", pair.name, told(&report));
    for clause in pair.misses {
        assert_eq!(report.mark(clause), Mark::NotJudged, "{}", pair.name);
        let reason = &report.json()["clauses"][clause]["reason"];
        assert!(reason.as_str().unwrap().starts_with("SHOULD"), "{reason}");
    }
}

#[test]
fn each_provocation_tells_drivers_apart() {
    let names = provoke::ALL.iter().map(|what| what.name).filter(|name| !is_config(name));
    assert_eq!(names.collect::<Vec<_>>(), PROVOKED.iter().map(|it| it.name).collect::<Vec<_>>());
    judge_pairs(PROVOKED.iter().copied());
}

/// Judges drivers side by side, because all of them wait for most of the time.
fn judge_pairs(pairs: impl Iterator<Item = Pair>) {
    let judge = |pair: Pair| (pair.name, std::thread::spawn(move || judge_pair(&pair)));
    let judges: Vec<_> = pairs.map(judge).collect();
    for (name, judge) in judges {
        assert!(judge.join().is_ok(), "{name}");
    }
}

#[test]
fn over_vhost_user_no_status_is_read() {
    let of_events = PROVOKED.iter().filter(|pair| pair.name.starts_with("event-"));
    judge_pairs(of_events.map(|pair| Pair { is_vfio: false, ..*pair }));
    let (report, _) = provoke("needs-reset", BAD, false, goes_on);
    assert_eq!(report.missed("V-FAIL-02"), None);
}

#[test]
fn a_reset_that_never_comes() {
    let times = Times { silence: [GOOD.slack; 3], ..GOOD };
    let (report, _) = judge_with(false, 0, Provoker::new("no-reply", times), |t| {
        sends(t, VIRTIO_RDMA_CMD_CREATE_PD)?;
        t.a().pause(LOOKED)
    });
    assert_eq!(report.with(Mark::Fail), ["V-FAIL-08"]);
}

#[test]
fn other_answers() {
    let (hurries, _) = provoke("reply-very-late", BAD, true, |t| sends_and_resets(t, LOOKED));
    assert_eq!(hurries.with(Mark::Fail), ["V-FAIL-05"]);
    let (waits_less, _) =
        provoke("no-reply", HASTY, true, |t| sends_and_resets(t, HASTY.silence[0] + LOOKED));
    assert_eq!(waits_less.with(Mark::Fail), [""; 0]);
    assert_eq!(waits_less.mark("V-FAIL-08"), Mark::Pass);
    assert!(waits_less.missed("V-FAIL-06").unwrap().expected.contains("60 seconds"));
    // A driver that gives up because of a number that cannot be does not use it.
    let resets = provoked("reply-number", true, |t| {
        creates_a_cq(t)?;
        t.a().port.reset()
    });
    assert_eq!(resets, (vec![], vec!["V-CTRL-03"]));
    // Whether it treats a status as ERR does not show then.
    let resets = provoked("reply-status", true, |t| {
        sends_and_resets(t, LOOKED)?;
        t.a().forget();
        begin_and_wait(t)
    });
    assert_eq!(resets, (vec![], vec![]));
}
