// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a test works with: the members of a network, and the ends of connections between them.

use std::rc::Rc;
use std::time::Duration;

use abi::*;
use rand::RngExt as _;
use rand_xorshift::XorShiftRng;
use testkit::command::{self, Gid, PAGE};
use testkit::{sge, Send, LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::driver::Driver;
use crate::journal::Journal;
use crate::objects::Shape;
use crate::outcome::{not_judged, Outcome};

/// The bytes of the memory of an end.
pub const AREA: u64 = 256 << 10;
/// The number of entries of the CQ of an end.
pub const CQ_DEPTH: u32 = 64;
/// The Q_Key of datagrams.
pub const QKEY: u32 = 0x1234;
/// How long nothing happens where nothing may happen.
pub const QUIET: Duration = Duration::from_millis(50);
/// The `timeout` of connections: 4.096 us * 2^14 are 67 ms.
pub const TIMEOUT: u8 = 14;

/// A change that makes a good request a bad one.
pub type Change<T> = Box<dyn Fn(&mut T)>;

/// The members of a network.
pub struct Bench {
    /// The members.
    pub members: Vec<Driver>,
    /// The notes of the test.
    pub journal: Rc<Journal>,
    /// Random numbers of this test.
    pub random: XorShiftRng,
    /// The member that has the far end of connections.
    pub far: usize,
}

/// How a connection is made.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// What the peer may do.
    pub access: u32,
    /// The path MTU (`enum ib_mtu`).
    pub path_mtu: u8,
    /// The PSNs that are sent and expected first.
    pub sq_psn: u32,
    /// See `sq_psn`.
    pub rq_psn: u32,
    /// The retry counts.
    pub retry_cnt: u8,
    /// See `retry_cnt`.
    pub rnr_retry: u8,
    /// The RNR timer.
    pub min_rnr_timer: u8,
    /// How many READs and atomics are under way.
    pub rd_atomic: u8,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            access: READ | WRITE | LOCAL,
            path_mtu: 3,
            sq_psn: 0,
            rq_psn: 0,
            retry_cnt: 1,
            rnr_retry: 1,
            min_rnr_timer: 1,
            rd_atomic: 1,
        }
    }
}

/// A QP with its CQ and its memory.
#[derive(Clone, Copy)]
pub struct End {
    /// The member that has it.
    pub member: usize,
    /// The PD.
    pub pdn: u32,
    /// The CQ.
    pub cqn: u32,
    /// The QP.
    pub qpn: u32,
    /// The MR over its memory.
    pub mr: virtio_rdma_rsp_mr,
    /// The address of its memory.
    pub area: u64,
}

impl End {
    /// Names a piece of its memory for its own work requests.
    pub fn sge(&self, offset: u64, len: u32) -> virtio_rdma_sge {
        sge(self.area + offset, len, self.mr.lkey)
    }

    /// Returns a send of a piece of its memory.
    pub fn send(&self, wr_id: u64, opcode: u32, offset: u64, len: u32) -> Send {
        Send::new(wr_id, opcode, &[self.sge(offset, len)])
    }

    /// Returns a READ or WRITE that names the same piece of memory of both ends.
    pub fn rdma(&self, peer: &End, wr_id: u64, opcode: u32, offset: u64, len: u32) -> Send {
        self.send(wr_id, opcode, offset, len).rdma(peer.area + offset, peer.mr.rkey)
    }
}

impl Bench {
    /// Returns the first member.
    pub fn a(&mut self) -> &mut Driver {
        &mut self.members[0]
    }

    /// Returns the driver of the member that has this end.
    pub fn on(&mut self, end: &End) -> &mut Driver {
        &mut self.members[end.member]
    }

    /// Returns a random number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.random.random_range(0..bound)
    }

    /// Makes a PD, an MR over new memory, and a CQ.
    fn base(&mut self, member: usize, access: u32) -> Outcome<End> {
        let driver = &mut self.members[member];
        let pdn = driver.create_pd()?;
        // Pages around the memory belong to nobody.
        let area = driver.allocate(AREA + 2 * PAGE, PAGE) + PAGE;
        driver.freeze(area - PAGE, PAGE as usize, "D-MR-15");
        driver.freeze(area + AREA, PAGE as usize, "D-MR-15");
        let mr = driver.reg_mr(pdn, area, AREA, access)?;
        let cqn = driver.create_cq(CQ_DEPTH)?;
        Ok(End { member, pdn, cqn, qpn: 0, mr, area })
    }

    /// Makes a QP with all that it needs. Each send says whether it makes a CQE.
    pub fn end(&mut self, member: usize, kind: u32) -> Outcome<End> {
        self.end_with(member, kind, 0)
    }

    /// Does what `end` does, with room for so many bytes of inline data.
    pub fn end_with(&mut self, member: usize, kind: u32, inline: u32) -> Outcome<End> {
        let has_atomics = self.members[member].has(VIRTIO_RDMA_F_ATOMICS);
        let atomic = if has_atomics { VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC } else { 0 };
        let end = self.base(member, READ | WRITE | LOCAL | atomic)?;
        self.add_qp(&end, kind, inline)
    }

    /// Makes another QP with the PD, the CQ and the memory of an end.
    pub fn add_qp(&mut self, end: &End, kind: u32, inline: u32) -> Outcome<End> {
        let cqn = end.cqn;
        let shape = Shape { kind, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline };
        let qpn = self.on(end).create_qp(end.pdn, &shape)?;
        Ok(End { qpn, ..*end })
    }

    /// Makes an RC connection between the first member and the far one.
    pub fn connection(&mut self) -> Outcome<(End, End)> {
        self.connection_of(VIRTIO_RDMA_QPT_RC, Link::default())
    }

    /// Makes a connection.
    pub fn connection_of(&mut self, kind: u32, link: Link) -> Outcome<(End, End)> {
        let far = self.far;
        let (x, y) = (self.end(0, kind)?, self.end(far, kind)?);
        self.connect(&x, &y, kind, link)?;
        let back = Link { sq_psn: link.rq_psn, rq_psn: link.sq_psn, ..link };
        self.connect(&y, &x, kind, back)?;
        Ok((x, y))
    }

    /// Connects a QP that is in RESET to a peer.
    pub fn connect(&mut self, x: &End, y: &End, kind: u32, link: Link) -> Outcome {
        let (dgid, qpn) = (self.members[y.member].gid, y.qpn);
        self.make_init(x, kind, link.access)?;
        self.make_rtr(x, kind, (dgid, qpn), link)?;
        self.make_rts(x, kind, link)
    }

    /// Takes a QP from RESET to INIT.
    pub fn make_init(&mut self, x: &End, kind: u32, access: u32) -> Outcome {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.port_num) = (VIRTIO_RDMA_QPS_INIT as u8, 1);
        (attr.qp_access_flags, attr.qkey) = (access, QKEY);
        let mut mask = command::attr_mask(kind, VIRTIO_RDMA_QPS_INIT);
        if kind == VIRTIO_RDMA_QPT_GSI {
            attr.qkey = 0x8001_0000;
            mask &= !VIRTIO_RDMA_QP_PORT;
        }
        self.on(x).modify(x.qpn, "D-QP-40", mask, attr)
    }

    /// Returns the attributes with which a QP goes to RTR, and their mask.
    pub fn of_rtr(kind: u32, (dgid, dest): (Gid, u32), link: Link) -> (u32, virtio_rdma_qp_attr) {
        let mut attr = command::attributes(VIRTIO_RDMA_QPS_RTR, dgid, dest);
        (attr.path_mtu, attr.rq_psn) = (link.path_mtu, link.rq_psn);
        (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (link.rd_atomic, link.min_rnr_timer);
        // A device that sends packets wants an address that is not a group's.
        attr.ah_attr.dmac = [2, 0, 0, 0, 0, 1];
        (command::attr_mask(kind, VIRTIO_RDMA_QPS_RTR), attr)
    }

    /// Takes a QP from INIT to RTR.
    pub fn make_rtr(&mut self, x: &End, kind: u32, to: (Gid, u32), link: Link) -> Outcome {
        let (mask, attr) = Self::of_rtr(kind, to, link);
        self.on(x).modify(x.qpn, "D-QP-40", mask, attr)
    }

    /// Returns the attributes with which a QP goes to RTS, and their mask.
    pub fn of_rts(kind: u32, link: Link) -> (u32, virtio_rdma_qp_attr) {
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.sq_psn) = (VIRTIO_RDMA_QPS_RTS as u8, link.sq_psn);
        (attr.timeout, attr.retry_cnt) = (TIMEOUT, link.retry_cnt);
        (attr.max_rd_atomic, attr.rnr_retry) = (link.rd_atomic, link.rnr_retry);
        (command::attr_mask(kind, VIRTIO_RDMA_QPS_RTS), attr)
    }

    /// Takes a QP from RTR to RTS.
    pub fn make_rts(&mut self, x: &End, kind: u32, link: Link) -> Outcome {
        let (mask, attr) = Self::of_rts(kind, link);
        self.on(x).modify(x.qpn, "D-QP-40", mask, attr)
    }

    /// Makes QPs for datagrams of the first member and of the far one, which are in RTS.
    pub fn datagrams(&mut self) -> Outcome<(End, End)> {
        let far = self.far;
        let (x, y) = (self.end(0, VIRTIO_RDMA_QPT_UD)?, self.end(far, VIRTIO_RDMA_QPT_UD)?);
        for end in [&x, &y] {
            self.make_ready(end, VIRTIO_RDMA_QPT_UD)?;
        }
        Ok((x, y))
    }

    /// Takes a QP for datagrams to RTS.
    pub fn make_ready(&mut self, x: &End, kind: u32) -> Outcome {
        self.make_init(x, kind, 0)?;
        self.on(x).set_state(x.qpn, VIRTIO_RDMA_QPS_RTR)?;
        self.make_rts(x, kind, Link::default())
    }

    /// Returns a datagram.
    pub fn datagram(&self, x: &End, y: &End, wr_id: u64, offset: u64, len: u32) -> Send {
        let dgid = self.members[y.member].gid;
        let send = x.send(wr_id, VIRTIO_RDMA_WR_SEND, offset, len);
        send.ud(dgid, y.qpn, QKEY, x.pdn).at_mac([2, 0, 0, 0, 0, 1])
    }

    /// Posts a send.
    pub fn post(&mut self, x: &End, send: &Send) -> Outcome {
        self.on(x).post_send(x.qpn, send)
    }

    /// Posts a receive into a piece of the memory of an end.
    pub fn receive(&mut self, x: &End, wr_id: u64, offset: u64, len: u32) -> Outcome {
        let sges = [x.sge(offset, len)];
        self.on(x).post_recv(x.qpn, wr_id, &sges)
    }

    /// Writes random bytes to the memory of an end, and returns them.
    pub fn fill(&mut self, x: &End, offset: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.random.fill(&mut bytes[..]);
        self.on(x).write(x.area + offset, &bytes);
        bytes
    }

    /// Returns bytes of the memory of an end.
    pub fn bytes(&mut self, x: &End, offset: u64, len: u32) -> Vec<u8> {
        self.on(x).bytes(x.area + offset, len as usize)
    }

    /// Waits for the next CQE of an end, which must be this one by the clause.
    pub fn completes(
        &mut self,
        x: &End,
        clause: &'static str,
        wr_id: u64,
        status: u32,
    ) -> Outcome<virtio_rdma_ring_cqe> {
        self.on(x).completes(x.cqn, clause, wr_id, status)
    }

    /// Waits for the next CQE of an end, which must be this success.
    pub fn succeeds(
        &mut self,
        x: &End,
        clause: &'static str,
        wr_id: u64,
    ) -> Outcome<virtio_rdma_ring_cqe> {
        self.completes(x, clause, wr_id, VIRTIO_RDMA_WC_SUCCESS)
    }

    /// Checks for a while that an end gets no CQE.
    pub fn is_quiet(&mut self, x: &End, clause: &'static str, what: &str) -> Outcome {
        let (cqn, until) = (x.cqn, std::time::Instant::now() + QUIET);
        let cqe = self.on(x).wait_until(until, |driver| driver.poll(cqn))?;
        let got = cqe.map(|cqe| (cqe.wr_id, cqe.status));
        self.journal.holds(clause, what, got.is_none(), got)
    }

    /// Judges a clause by the state of a QP.
    pub fn has_state(&mut self, x: &End, clause: &'static str, state: u32) -> Outcome {
        let attr = self.on(x).query_qp(x.qpn)?;
        self.journal.is(clause, "state of the QP", u32::from(attr.qp_state), state)
    }

    /// Waits until a QP has a state, to which the device takes it.
    pub fn comes_to(&mut self, x: &End, clause: &'static str, state: u32) -> Outcome {
        let qpn = x.qpn;
        self.journal.about(clause);
        self.on(x).wait(&format!("state {state} of the QP"), |driver| {
            let attr = driver.query_qp(qpn)?;
            Ok((u32::from(attr.qp_state) == state).then_some(()))
        })?;
        self.journal.pass(clause);
        Ok(())
    }

    /// Goes on only if the device has what the test needs.
    pub fn needs(&self, holds: bool, why: &str) -> Outcome {
        if holds {
            Ok(())
        } else {
            not_judged(why)
        }
    }
}
