// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The objects of the guests of a schedule.

use abi::*;

use super::end::{self, End};
use super::hosts::Hosts;
use super::model::{fresh_area, Model};
use super::plan::{peer, EndPlan, Kind, Owner, Plan, QueuePlan, AREA};
use super::receives::{self, Object, Receives};
use crate::tests::driver::*;

/// The objects that the QPs of a guest share.
#[derive(Clone, Copy)]
struct Common {
    pdn: u32,
    /// The objects that only a guest with rings has.
    shared: Option<Shared>,
}

/// The objects that QPs share if the guest has rings.
#[derive(Clone, Copy)]
struct Shared {
    cqn: u32,
    xrcdn: u32,
}

/// An SRQ, and its PD.
#[derive(Clone, Copy)]
struct Srq {
    srqn: u32,
    pdn: u32,
}

/// All objects.
pub struct Objects {
    common: Vec<Common>,
    /// The SRQs of those queues that are one.
    srqs: Vec<Option<Srq>>,
    /// Each CQ, and its guest.
    pub cqs: Vec<(usize, u32)>,
    pub ends: Vec<End>,
    pub queues: Vec<Receives>,
}

impl Objects {
    /// Makes the objects that a plan names, and connects its QPs.
    pub fn new(plan: &Plan, hosts: &mut Hosts) -> Self {
        let mut cqs = Vec::new();
        let guests = hosts.guests.iter_mut().enumerate();
        let common = guests.map(|(number, guest)| {
            let shared = guest.rings.then(|| {
                let shared =
                    Shared { cqn: guest.create_cq(256), xrcdn: guest.alloc_xrcd().unwrap() };
                cqs.push((number, shared.cqn));
                shared
            });
            Common { pdn: guest.create_pd(), shared }
        });
        let common = common.collect();
        let (srqs, ends, queues) = (Vec::new(), Vec::new(), Vec::new());
        let mut objects = Self { common, srqs, cqs, ends, queues };
        for queue in &plan.queues {
            objects.make_srq(hosts, queue);
        }
        for (number, guest) in plan.guests.iter().enumerate().filter(|(at, one)| one.address != *at)
        {
            let ends = plan.ends.iter().filter(|end| end.guest == guest.address);
            objects.skip_numbers(hosts, number, ends.count());
        }
        for (number, end) in plan.ends.iter().enumerate() {
            objects.make_end(hosts, number, end.clone());
        }
        for end in &objects.ends {
            end.init(&mut hosts.guests[end.plan.guest]);
            if !plan.connects_late(end.number) {
                connect(&objects.ends, end.number, hosts);
            }
        }
        for (number, queue) in plan.queues.iter().enumerate() {
            objects.make_queue(hosts, number, queue);
        }
        objects
    }

    /// Makes QPs that nothing uses, so that none of a guest that takes over an address has the number of one
    /// of the earlier guest: packets that are late would be for it (specification, Queue pairs).
    fn skip_numbers(&mut self, hosts: &mut Hosts, guest: usize, count: usize) {
        let Common { pdn, shared } = self.common[guest];
        let guest = &mut hosts.guests[guest];
        let cqn = shared.map_or_else(|| guest.create_cq(RING), |shared| shared.cqn);
        for _ in 0..count {
            guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC);
        }
    }

    /// Makes an SRQ, which has a PD of its own, if a queue is one.
    fn make_srq(&mut self, hosts: &mut Hosts, plan: &QueuePlan) {
        let guest = &mut hosts.guests[plan.guest];
        let common = self.common[plan.guest];
        let srqn = |guest: &mut Guest, pdn| match (plan.owner, common.shared) {
            (Owner::XrcSrq, Some(Shared { cqn, xrcdn })) => {
                guest.create_xrc_srq(pdn, xrcdn, cqn).unwrap()
            }
            _ => guest.create_srq(pdn),
        };
        self.srqs.push((plan.owner != Owner::Qp).then(|| {
            let pdn = guest.create_pd();
            Srq { srqn: srqn(guest, pdn), pdn }
        }));
    }

    fn make_end(&mut self, hosts: &mut Hosts, number: usize, mut plan: EndPlan) {
        let Common { pdn, shared } = self.common[plan.guest];
        let memory = hosts.allocate(plan.guest, end::MEMORY);
        let guest = &mut hosts.guests[plan.guest];
        // Each direction begins with the same bytes at both ends.
        let bytes = fresh_area(number as u64 / 2);
        guest.memory.write(memory, &bytes).unwrap();
        let cqn = shared.map_or_else(|| guest.create_cq(RING), |shared| shared.cqn);
        if shared.is_none() {
            self.cqs.push((plan.guest, cqn));
        }
        let srqs: Vec<_> = plan.queues.iter().filter_map(|queue| self.srqs[*queue]).collect();
        let (qpn, pds) = match (plan.kind, srqs.first()) {
            (Kind::Rc, None) => (guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC), vec![pdn]),
            (Kind::Rc, Some(srq)) => {
                let qpn = guest.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC, srq.srqn);
                (qpn.unwrap(), vec![pdn])
            }
            (Kind::Initiator, _) => (guest.create_xrc_ini(pdn, cqn).unwrap(), Vec::new()),
            (Kind::Target, _) => {
                let pds = srqs.iter().map(|srq| srq.pdn).collect();
                (guest.create_xrc_tgt(shared.unwrap().xrcdn).unwrap(), pds)
            }
        };
        let access = end::access(guest);
        let area = |pdn| guest.reg_mr(pdn, memory, AREA as u64, access).rkey;
        let area_keys = pds.into_iter().map(area).collect();
        let is_target = plan.kind == Kind::Target;
        let works = std::mem::take(&mut plan.works);
        self.ends.push(End {
            number,
            qpn,
            memory,
            area_keys,
            srqns: srqs.iter().filter(|_| is_target).map(|srq| srq.srqn).collect(),
            key: guest.reg_mr(pdn, memory + end::SENDS, end::MEMORY - end::SENDS, LOCAL).lkey,
            model: Model::new(128 << plan.path_mtu, bytes),
            work_at: works.first().map_or(0, |(pause, _)| *pause),
            works: works.into(),
            plan,
            received: 0,
            is_flushed: false,
            progress: 0,
        });
    }

    /// Makes a queue of receives, and posts what is not late: it is there before a peer can send.
    fn make_queue(&mut self, hosts: &mut Hosts, number: usize, plan: &QueuePlan) {
        let memory = hosts.allocate(plan.guest, receives::MEMORY);
        let guest = &mut hosts.guests[plan.guest];
        let ends = self.ends.iter().filter(|end| end.plan.queues.contains(&number));
        let users: Vec<_> = ends.map(|end| end.qpn).collect();
        let (handle, pdn) = match self.srqs[number] {
            None => (users[0], self.common[plan.guest].pdn),
            Some(srq) => (srq.srqn, srq.pdn),
        };
        let key = guest.reg_mr(pdn, memory, receives::MEMORY, LOCAL).lkey;
        let object = Object { number: handle, users: users.len() };
        let mut queue = Receives::new(number, plan, object, memory, key);
        queue.post(guest, 0).unwrap();
        self.queues.push(queue);
    }
}

/// Connects the QP of an end.
pub fn connect(ends: &[End], end: usize, hosts: &mut Hosts) {
    let (own, other) = (&ends[end], &ends[peer(end)]);
    let dgid = hosts.guests[other.plan.guest].gid;
    own.connect(&mut hosts.guests[own.plan.guest], other, dgid);
}
