// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages that nobody acknowledges, over a bad network: unreliable connections and datagrams (IBA 9.8).
//!
//! * Each work request completes once, with success, in order.
//! * A message arrives whole or not at all, as often as the network has brought it, at most. Without lateness
//!   and repetition messages arrive in order, and without any fault all of them do.
//! * A datagram is lost if its receiver is frozen, and so is a message from another host. On an unreliable connection
//!   within a host, the sender waits.
//! * Of an RDMA WRITE that is lost, some packets may be in memory, and nothing else is.

use abi::*;

use super::dice::Dice;
use super::draw::{faults, freezes, guest};
use super::freezes::Freezes;
use super::hosts::Hosts;
use super::model::Verdict;
use super::network::{Faults, Links};
use super::plan::{AREA, DEPTH};
use crate::tests::datagram::{self, QKEY};
use crate::tests::driver::*;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
/// The bytes of the area that one RDMA WRITE may write.
const PLACE: usize = AREA / DEPTH;
/// The addresses of the data that is sent, behind the memory that RDMA WRITEs write, and of receives.
const SENDS: u64 = DATA + AREA as u64;
const RECEIVES: u64 = SENDS + (DEPTH * AREA) as u64;
/// The bytes of all of it.
const MEMORY: u64 = RECEIVES + (DEPTH * AREA) as u64 - DATA;
/// The bytes in front of the payload of a received datagram.
const GRH: usize = 40;

/// A message; its immediate data is its number.
struct Message {
    data: Vec<u8>,
    is_write: bool,
    /// The time at which it is posted.
    time: u64,
}

/// The kind of a schedule.
#[derive(Clone, Copy, Default)]
pub struct Kind {
    /// Datagrams, or else messages of an unreliable connection.
    pub is_datagrams: bool,
    pub has_upgrades: bool,
    /// The devices are frozen now and then. They may be on one host.
    pub has_freezes: bool,
}

/// A sender, its receiver, and what has arrived.
struct Stream {
    is_datagrams: bool,
    /// Whether a message may be lost although the network has no fault.
    is_lossy: bool,
    mtu: usize,
    faults: Faults,
    messages: Vec<Message>,
    hosts: Hosts,
    freezes: Freezes,
    dice: Dice,
    tells: bool,
    ends: [End; 2],
    posted: usize,
    completed: usize,
    /// The number of arrivals of each message, and the message that arrived last.
    arrived: Vec<usize>,
    last: Option<usize>,
    received: usize,
}

/// Runs a schedule.
pub fn run(seed: u64, kind: Kind, tells: bool) -> Verdict {
    let Kind { is_datagrams, has_upgrades, has_freezes } = kind;
    let dice = &mut Dice::new(seed);
    let mut faults = faults(dice);
    if dice.happens(50) {
        faults = Faults { latency: 1000, tick: 1, ..Faults::default() };
    }
    let path_mtu = 1 + dice.below(5) as u8;
    let mtu = 128 << path_mtu;
    let mut time = 0;
    let messages = (0..dice.below(DEPTH as u64 + 1))
        .map(|_| {
            let is_write = !is_datagrams && dice.happens(500);
            let most = if is_write { PLACE } else { (6 * mtu).min(4096) };
            let len = dice.below(most as u64 + 1) as usize;
            time += dice.below(2 * faults.latency);
            Message { data: dice.bytes(len), is_write, time }
        })
        .collect::<Vec<_>>();
    let mut guests = [guest(dice, 0), guest(dice, 1)];
    let mut dice = Dice::new(seed ^ 0x6672_6565);
    if has_freezes {
        for guest in &mut guests {
            guest.freezes = freezes(&mut dice);
        }
        if dice.happens(300) {
            guests[1].host = guests[0].host;
            faults = Faults { latency: faults.latency, ..Faults::default() };
        }
    }
    let is_near = guests[1].host == guests[0].host;
    let is_lossy = !guests[1].freezes.is_empty() && (is_datagrams || !is_near);
    let freezes = Freezes::new(&guests);
    let mut hosts = Hosts::new(seed, &guests, &Links::new(2, || faults.clone()), tells);
    let kind = if is_datagrams { VIRTIO_RDMA_QPT_UD } else { VIRTIO_RDMA_QPT_UC };
    let ends = [0, 1].map(|side| {
        let guest = &mut hosts.guests[side];
        let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
        let mr = guest.reg_mr(pdn, DATA, MEMORY, ALL);
        End { pdn, cqn, qpn: guest.create_qp(pdn, cqn, kind), key: mr.lkey, mrn: mr.mrn }
    });
    for side in 0..2 {
        let (guest, qpn) = (&mut hosts.guests[side], ends[side].qpn);
        if is_datagrams {
            datagram::to_rts(guest, qpn, QKEY, false);
        } else {
            guest.path_mtu = path_mtu;
            (guest.sq_psn, guest.rq_psn) = (0xff_fffa, 0xff_fffa);
            guest.make_init(qpn, ALL);
            guest.make_rtr(qpn, gid(2 - side as u8), ends[1 - side].qpn, false).unwrap();
            guest.make_rts(qpn, false).unwrap();
        }
    }
    if has_upgrades {
        hosts.upgrade(seed);
    }
    let arrived = vec![0; messages.len()];
    let (posted, completed, last, received) = (0, 0, None, 0);
    let mut stream = Stream {
        is_datagrams,
        is_lossy,
        mtu,
        faults,
        messages,
        hosts,
        freezes,
        dice,
        tells,
        ends,
        posted,
        completed,
        arrived,
        last,
        received,
    };
    (0..DEPTH).for_each(|number| stream.post_receive(number));
    let result = stream.run();
    result.map_err(|why| format!("{} ns: {why}", stream.hosts.now()))
}

impl Stream {
    fn run(&mut self) -> Verdict {
        for _ in 0..100_000 {
            self.freezes.pass(&mut self.hosts, &mut self.dice, self.tells)?;
            let timer = self.hosts.settle();
            while let Some(cqe) = self.poll(0) {
                let expected = Some((self.completed as u64, OK));
                if brief(Some(cqe)).map(|(wr_id, status, _)| (wr_id, status)) != expected {
                    return Err(format!("{:?} completes, not {expected:?}", brief(Some(cqe))));
                }
                self.completed += 1;
            }
            while let Some(cqe) = self.poll(1) {
                self.arrive(&cqe)?;
            }
            if self.post() {
                continue;
            }
            let next = self.messages.get(self.posted).map(|message| message.time);
            if !self.hosts.pass(next.into_iter().chain(timer).chain(self.freezes.next())) {
                return self.end();
            }
        }
        Err("the schedule never ends".into())
    }

    /// Returns the next CQE of a guest, unless it is frozen.
    fn poll(&mut self, side: usize) -> Option<virtio_rdma_cqe> {
        if self.freezes.has(side) {
            return None;
        }
        self.hosts.guests[side].poll(self.ends[side].cqn)
    }

    /// Posts the messages that are due, unless the guest is frozen; whether there were some.
    fn post(&mut self) -> bool {
        if self.freezes.has(0) {
            return false;
        }
        let (now, [from, to], first) = (self.hosts.now(), self.ends, self.posted);
        while let Some(message) = self.messages.get(self.posted).filter(|next| next.time <= now) {
            let (number, len) = (self.posted, message.data.len());
            let at = SENDS + (number * AREA) as u64;
            let guest = &mut self.hosts.guests[0];
            guest.memory.write(at, &message.data).unwrap();
            let part = [sge(at, len as u32, from.key)];
            let opcode = if message.is_write {
                VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM
            } else {
                VIRTIO_RDMA_WR_SEND_WITH_IMM
            };
            let send = Send::new(number as u64, opcode, &part).imm(number as u32);
            let send = if self.is_datagrams {
                send.ud(gid(2), to.qpn, QKEY, from.pdn)
            } else {
                send.rdma(DATA + (number * PLACE) as u64, to.key)
            };
            guest.post_send(from.qpn, &send);
            self.posted += 1;
        }
        self.posted != first
    }

    fn post_receive(&mut self, number: usize) {
        let at = RECEIVES + (number % DEPTH * AREA) as u64;
        let part = [sge(at, AREA as u32, self.ends[1].key)];
        self.hosts.guests[1].post_recv(self.ends[1].qpn, number as u64, &part);
    }

    /// Judges a message that has arrived.
    fn arrive(&mut self, cqe: &virtio_rdma_cqe) -> Verdict {
        let (status, number) = (u32::from(cqe.status), cqe.ex as usize);
        if (status, cqe.wr_id) != (OK, self.received as u64) {
            return Err(format!(
                "receive {} ends with {status}, {} is next",
                cqe.wr_id, self.received
            ));
        }
        let place = RECEIVES + (self.received % DEPTH * AREA) as u64;
        self.received += 1;
        self.post_receive(self.received + DEPTH - 1);
        let guest = &self.hosts.guests[1];
        let Some(message) = self.messages[..self.posted].get(number) else {
            return Err(format!("message {number} was not sent"));
        };
        let (at, header) = match (message.is_write, self.is_datagrams) {
            (true, _) => (DATA + (number * PLACE) as u64, 0),
            (false, false) => (place, 0),
            (false, true) => (place + GRH as u64, GRH),
        };
        let len = message.data.len();
        if cqe.byte_len as usize != len + header || guest.bytes(at, len) != message.data {
            return Err(format!(
                "message {number} of {len} bytes is wrong, or of {}",
                cqe.byte_len
            ));
        }
        if self.is_datagrams && cqe.src_qp != self.ends[0].qpn {
            return Err(format!("message {number} comes from QP {}", cqe.src_qp));
        }
        self.arrived[number] += 1;
        let Faults { repeat, delay, .. } = self.faults;
        if self.arrived[number] > 1 + usize::from(repeat != 0) {
            return Err(format!("message {number} arrives {} times", self.arrived[number]));
        }
        if repeat + delay == 0 && self.last >= Some(number) {
            return Err(format!("message {number} arrives behind {:?}", self.last));
        }
        self.last = Some(number);
        Ok(())
    }

    /// Judges what is left when nothing happens any more.
    fn end(&self) -> Verdict {
        if self.completed != self.messages.len() {
            return Err(format!("message {} never completes", self.completed));
        }
        let Faults { loss, repeat, delay, corrupt, outage, .. } = self.faults;
        let has_faults = loss + repeat + delay + corrupt != 0 || outage.is_some();
        let is_good = !has_faults && !self.is_lossy;
        if let Some(lost) = self.arrived.iter().position(|times| is_good && *times != 1) {
            return Err(format!("message {lost} arrives {} times", self.arrived[lost]));
        }
        for (number, message) in self.messages.iter().enumerate().filter(|(_, one)| one.is_write) {
            let found = self.hosts.guests[1].bytes(DATA + (number * PLACE) as u64, PLACE);
            let (place, rest) = found.split_at(message.data.len());
            let mut packets = place.chunks(self.mtu).zip(message.data.chunks(self.mtu));
            let is_packet =
                |found: &[u8], sent: &[u8]| found == sent || found.iter().all(|byte| *byte == 0);
            if !packets.all(|(found, sent)| is_packet(found, sent)) {
                return Err(format!("message {number} has a packet that was not sent"));
            }
            if rest.iter().any(|byte| *byte != 0) {
                return Err(format!("bytes behind message {number} were written"));
            }
        }
        Ok(())
    }
}
