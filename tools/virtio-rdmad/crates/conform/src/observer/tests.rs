// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a driver does between a request and its reply, and what it does with VIRTIO_RDMA_F_VIRTQUEUES.

use ring::SplitQueue;
use testkit::command::{self, PAGE};
use testkit::{Buffer, Memory as _, Virtqueue, CQE, CQ_HEAD};
use zerocopy::{Immutable, IntoBytes};

use super::*;
use crate::port::F_VERSION_1;
use crate::report::Mark;

/// The places of the control queue, of a request, and of what requests name.
const QUEUE: u64 = 0x1000;
const REQUEST: u64 = 0x4000;
const TABLE: u64 = 0x5000;
const REGION: u64 = 0x1_0000;
const RINGS: u64 = F_VERSION_1 | 1 << VIRTIO_RDMA_F_RINGS | 1 << VIRTIO_RDMA_F_SRQ;
const VIRTQUEUES: u64 = F_VERSION_1 | 1 << VIRTIO_RDMA_F_VIRTQUEUES;

/// An observer, and a driver that shows it what it does.
struct Stand {
    memory: GuestMemory,
    observer: Observer,
    driver: Virtqueue,
    device: SplitQueue,
}

impl Stand {
    fn new(features: u64) -> Self {
        let memory = GuestMemory::anonymous(&[(0, 1 << 20)]).unwrap();
        let mut observer = Observer::new(false, u64::MAX, PATIENCE, None);
        let mut config = virtio_rdma_config::new_zeroed();
        config.page_size_cap = PAGE;
        (config.num_comp_vectors, config.ring_max_cqe) = (1, 64);
        (config.ring_max_qp_wr, config.max_srq_wr) = (64, 64);
        (config.max_cq, config.max_qp) = (2, 2);
        let mut bytes = [0; 256];
        bytes.copy_from_slice(config.as_bytes());
        observer.agree(features, &bytes);
        let layout = Layout {
            size: 16,
            desc: QUEUE,
            avail: QUEUE + PAGE,
            used: QUEUE + 2 * PAGE,
            event_idx: false,
        };
        observer.start(&memory, 0, &layout);
        let device = SplitQueue::new(&memory, layout, 0).unwrap();
        Self { memory, observer, driver: Virtqueue::new(layout), device }
    }

    /// Sets all other virtqueues up, at a place of which only the available index counts.
    fn start_all(&mut self) {
        for index in 1..self.observer.numbering.count() {
            let avail = 0x8_0000 + u64::from(index) * PAGE;
            let layout = Layout { size: 16, avail, ..Layout::default() };
            self.observer.start(&self.memory, index, &layout);
        }
    }

    fn chain(&mut self, buffers: &[Buffer]) -> Chain {
        let head = self.driver.next % 8 * 2;
        self.driver.add(&self.memory, head, buffers);
        self.device.pop().unwrap().unwrap()
    }

    /// Sends a request. The driver does something before it has the reply.
    fn command(
        &mut self,
        number: u32,
        request: &(impl IntoBytes + Immutable),
        reply: &[u8],
        meanwhile: impl FnOnce(&GuestMemory),
    ) {
        let bytes = command::encode(number, request);
        self.memory.write_bytes(REQUEST, &bytes);
        let len = u32::try_from(bytes.len()).unwrap();
        let chain = self.chain(&[(REQUEST, len, false), (REQUEST + 0x800, 0x400, true)]);
        self.observer.before(&self.memory);
        self.observer.available(0, &chain);
        self.observer.request(&self.memory, &bytes, 0x400);
        self.observer.reply(&self.memory, &bytes, reply);
        meanwhile(&self.memory);
        self.observer.returned(&self.memory, 0, &chain);
    }

    /// Returns a region whose rings have so many bytes, at a place that is not used yet.
    fn region(&self, place: u64, bytes: u64) -> virtio_rdma_ring_region {
        let pages = command::pages_of(REGION + place, bytes);
        let table = TABLE + place / 16;
        for (at, page) in (0..).zip(&pages) {
            self.memory.put(table + at * 8, page);
        }
        command::region(table, u32::try_from(pages.len()).unwrap())
    }

    fn failed(&mut self) -> Vec<&'static str> {
        self.observer.report().with(Mark::Fail)
    }
}

/// A driver that does something before it has the last reply.
type Run = fn(&mut Stand, &dyn Fn(&GuestMemory));

fn nothing(_: &GuestMemory) {}

/// Runs a driver that does nothing before the reply, and one that writes a word to memory, which fails the clause.
fn judge(run: Run, word: u64, clause: &'static str) {
    let mut good = Stand::new(RINGS);
    good.start_all();
    run(&mut good, &nothing);
    assert_eq!(good.failed(), [""; 0], "{clause}");
    assert_eq!(good.observer.report().mark(clause), Mark::Pass, "{clause}");
    let mut bad = Stand::new(RINGS);
    bad.start_all();
    run(&mut bad, &|memory| memory.put(word, &(memory.get::<u32>(word) ^ 3)));
    assert_eq!(bad.failed(), [clause]);
}

fn registers(stand: &mut Stand, meanwhile: &dyn Fn(&GuestMemory)) {
    stand.region(0, 2 * PAGE);
    let mr = command::reg_user_mr(0, 1, (REGION, 2 * PAGE), (TABLE, 2));
    stand.command(VIRTIO_RDMA_CMD_REG_USER_MR, &mr, &[0; 13], meanwhile);
}

fn resizes_a_cq(stand: &mut Stand, meanwhile: &dyn Fn(&GuestMemory)) {
    let region = stand.region(0, CQ_HEAD + 16 * CQE);
    let create = virtio_rdma_cmd_create_ring_cq { region, cqe: 16, comp_vector: 0 };
    stand.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &create, &[0; 5], nothing);
    let region = stand.region(4 * PAGE, CQ_HEAD + 16 * CQE);
    let resize = virtio_rdma_cmd_resize_cq { region, cqe: 16, cqn: 0 };
    stand.command(VIRTIO_RDMA_CMD_RESIZE_CQ, &resize, &[0; 5], meanwhile);
}

fn resizes_an_srq(stand: &mut Stand, meanwhile: &dyn Fn(&GuestMemory)) {
    let shape = command::shape(16, 128, 256);
    let create = command::create_srq(0, stand.region(0, 256 + 16 * 128), shape);
    stand.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &create, &[0, 1, 0, 0, 0], nothing);
    let resize = command::resize_srq(1, stand.region(4 * PAGE, 256 + 16 * 128), shape);
    stand.command(VIRTIO_RDMA_CMD_RESIZE_SRQ, &resize, &[0; 5], meanwhile);
}

fn modify(state: u32) -> virtio_rdma_cmd_modify_qp {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = u8::try_from(state).unwrap();
    virtio_rdma_cmd_modify_qp { qpn: 2, attr_mask: VIRTIO_RDMA_QP_STATE, attr }
}

fn resets_a_qp(stand: &mut Stand, meanwhile: &dyn Fn(&GuestMemory)) {
    let region = stand.region(0, 256 + 32 * 256);
    let shapes = [command::shape(16, 256, 256), command::shape(16, 256, 256 + 16 * 256)];
    let base = command::create_qp(0, 0, VIRTIO_RDMA_QPT_RC, 4);
    let create = command::create_ring_qp(base, region, shapes);
    stand.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &create, &[0, 2, 0, 0, 0], nothing);
    stand.command(VIRTIO_RDMA_CMD_MODIFY_QP, &modify(VIRTIO_RDMA_QPS_INIT), &[0], nothing);
    stand.memory.put(REGION + 64, &3_u32);
    stand.command(VIRTIO_RDMA_CMD_MODIFY_QP, &modify(VIRTIO_RDMA_QPS_RESET), &[0], meanwhile);
    stand.memory.put(REGION + 64, &0_u32);
    stand.command(VIRTIO_RDMA_CMD_MODIFY_QP, &modify(VIRTIO_RDMA_QPS_INIT), &[0], nothing);
}

#[test]
fn what_must_stay_until_the_reply() {
    judge(registers, TABLE + 8, "V-MR-05");
    judge(resizes_a_cq, REGION, "V-CQ-31");
    judge(resizes_a_cq, REGION + 64, "V-CQ-32");
    judge(resizes_an_srq, REGION, "V-SRQ-10");
    judge(resets_a_qp, REGION + 64, "V-RING-41");
}

#[test]
fn regions_of_rings_and_memory() {
    // Two rings of a program are in one page.
    let mut stand = Stand::new(RINGS);
    stand.start_all();
    let region = stand.region(0, CQ_HEAD + 16 * CQE);
    let create = virtio_rdma_cmd_create_ring_cq { region, cqe: 16, comp_vector: 0 };
    stand.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &create, &[0; 5], nothing);
    stand.memory.put(REGION + 64, &1_u32);
    stand.command(VIRTIO_RDMA_CMD_CREATE_RING_CQ, &create, &[0, 1, 0, 0, 0], nothing);
    assert_eq!(stand.failed(), [""; 0]);
    // The memory of the guest changes, with the rings in it, and without.
    stand.observer.set_memory(&stand.memory);
    assert_eq!(stand.observer.report().mark("V-RING-18"), Mark::Pass);
    stand.observer.set_memory(&GuestMemory::anonymous(&[(0, REGION)]).unwrap());
    assert_eq!(stand.failed(), ["V-RING-18"]);
}

#[test]
fn memory_of_mrs_goes() {
    let less = GuestMemory::anonymous(&[(0, REGION)]).unwrap();
    let mut keeps = Stand::new(RINGS);
    keeps.start_all();
    registers(&mut keeps, &nothing);
    keeps.observer.set_memory(&keeps.memory);
    assert_eq!(keeps.observer.report().mark("V-MR-08"), Mark::Pass);
    keeps.observer.set_memory(&less);
    // V-MR-08 is a SHOULD.
    let report = keeps.observer.report();
    assert_eq!((report.with(Mark::Fail), report.mark("V-MR-08")), (vec![], Mark::NotJudged));
    assert!(report.missed("V-MR-08").unwrap().got.contains("of MR 0"));

    let mut ends = Stand::new(RINGS);
    ends.start_all();
    registers(&mut ends, &nothing);
    let dereg = virtio_rdma_cmd_dereg_mr { mrn: 0 };
    ends.command(VIRTIO_RDMA_CMD_DEREG_MR, &dereg, &[0], nothing);
    ends.observer.set_memory(&less);
    assert_eq!(ends.observer.report().missed("V-MR-08"), None);
}

#[test]
fn drivers_with_virtqueues_for_work() {
    let destroy = virtio_rdma_cmd_destroy_cq { cqn: 1 };
    let end = |stand: &mut Stand, meanwhile: &dyn Fn(&GuestMemory)| {
        stand.command(VIRTIO_RDMA_CMD_DESTROY_CQ, &destroy, &[0], meanwhile);
    };
    let mut good = Stand::new(VIRTQUEUES);
    good.start_all();
    let chain = good.chain(&[(REGION, 40, true)]);
    good.observer.available(2, &chain);
    end(&mut good, &nothing);
    assert_eq!(good.failed(), [""; 0]);
    for clause in ["V-VQ-01", "V-VQ-05", "V-VQ-08", "V-VQ-09"] {
        assert_eq!(good.observer.report().mark(clause), Mark::Pass, "{clause}");
    }

    let mut one_queue = Stand::new(VIRTQUEUES);
    end(&mut one_queue, &nothing);
    assert_eq!(one_queue.failed(), ["V-VQ-05"]);
    let mut adds_a_buffer = Stand::new(VIRTQUEUES);
    adds_a_buffer.start_all();
    let index = 0x8_0000 + 2 * PAGE + 2;
    end(&mut adds_a_buffer, &|memory| memory.put(index, &1_u16));
    assert_eq!(adds_a_buffer.failed(), ["V-VQ-08"]);
    let mut short = Stand::new(VIRTQUEUES);
    short.start_all();
    let chain = short.chain(&[(REGION, 32, true)]);
    short.observer.available(2, &chain);
    assert_eq!(short.failed(), ["V-VQ-09"]);
    assert_eq!(Stand::new(VIRTQUEUES | 1 << 29).failed(), ["V-VQ-01"]);
}

#[test]
fn features_that_were_not_offered() {
    let bytes = [0; 256];
    let agreed = |offered, features| {
        let mut observer = Observer::new(false, offered, PATIENCE, None);
        observer.agree(features, &bytes);
        observer.report()
    };
    let rings = 1 << VIRTIO_RDMA_F_RINGS;
    assert_eq!(agreed(rings, VIRTQUEUES).with(Mark::Fail), ["V-FEAT-06"]);
    assert_eq!(agreed(rings, RINGS).mark("V-FEAT-06"), Mark::Pass);
    assert_eq!(agreed(u64::MAX, VIRTQUEUES).mark("V-FEAT-06"), Mark::NotJudged);
    assert_eq!(agreed(rings, VIRTQUEUES).mark("V-VQ-01"), Mark::NotJudged);
}

/// Returns the clauses that a driver breaks that does this at a transport that shows all of it.
fn at_the_transport(deeds: &[Deed]) -> Vec<&'static str> {
    let mut observer = Observer::new(true, u64::MAX, PATIENCE, None);
    for deed in deeds {
        observer.note(*deed);
    }
    observer.report().with(Mark::Fail)
}

#[test]
fn order_of_the_beginning() {
    let status = |status| Deed::WriteStatus { status, features: RINGS };
    let [all, magic, revision] =
        [(0, 256), (4, 4), (28, 4)].map(|(offset, len)| Deed::ReadConfig { offset, len });
    let good = [status(0), Deed::ReadStatus(0), status(3), magic, revision, all, status(11), all];
    assert_eq!(at_the_transport(&good), [""; 0]);
    let with = |more: &[Deed]| at_the_transport(&[&good[..], more].concat());
    assert_eq!(with(&[Deed::EnableQueue(0), status(15)]), [""; 0]);
    assert_eq!(at_the_transport(&[status(3), Deed::EnableQueue(0)]), ["V-INIT-01"]);
    assert_eq!(at_the_transport(&[status(3), status(7)]), ["V-INIT-01"]);
    assert_eq!(with(&[Deed::EnableQueue(0), status(15), Deed::EnableQueue(1)]), ["V-RING-02"]);
    assert_eq!(with(&[status(0), status(3)]), ["V-RST-01"]);
    assert_eq!(with(&[status(0), Deed::ReadStatus(15), status(3)]), ["V-RST-01"]);
    // The device has not let FEATURES_OK stand.
    assert_eq!(with(&[Deed::ReadStatus(3), all, Deed::EnableQueue(0)]), ["V-INIT-01"]);
    assert_eq!(with(&[Deed::ReadStatus(3), status(15)]), ["V-INIT-01"]);
    let phys_port_cnt = Deed::ReadConfig { offset: 0, len: 4 };
    assert_eq!(at_the_transport(&[magic, phys_port_cnt, revision]), ["V-CFG-01"]);
}
