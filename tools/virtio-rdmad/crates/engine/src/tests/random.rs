// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Compares random sequences of operations with a model of both memories.

use std::collections::VecDeque;

use abi::*;
use proptest::prelude::*;

use super::driver::*;

/// The bytes of each guest's memory that operations use.
const AREA: usize = 8192;

/// A range of the area that is cut into SGEs of at most `piece` bytes.
#[derive(Clone, Debug)]
struct Part {
    at: usize,
    len: usize,
    piece: usize,
}

impl Part {
    fn sges(&self, key: u32) -> Vec<virtio_rdma_sge> {
        let piece = self.piece.max(self.len.div_ceil(16)).max(1);
        (0..self.len)
            .step_by(piece)
            .map(|from| {
                let len = piece.min(self.len - from);
                sge(DATA + (self.at + from) as u64, len as u32, key)
            })
            .collect()
    }
}

#[derive(Clone, Debug)]
enum Action {
    Receive(Part),
    Send(Part),
    Write { part: Part, to: usize, immediate: bool },
    Read { part: Part, from: usize },
    Add { result: usize, word: usize, value: u64 },
    Swap { result: usize, word: usize, compare: Option<u64>, value: u64 },
}

fn part() -> impl Strategy<Value = Part> {
    (0..AREA, 0..AREA, 1..600_usize).prop_map(|(at, len, piece)| Part {
        at,
        len: len.min(AREA - at),
        piece,
    })
}

fn action() -> impl Strategy<Value = Action> {
    let word = || (0..AREA / 8).prop_map(|word| word * 8);
    prop_oneof![
        3 => part().prop_map(Action::Receive),
        3 => part().prop_map(Action::Send),
        2 => (part(), 0..AREA, any::<bool>())
            .prop_map(|(part, to, immediate)| Action::Write { part, to, immediate }),
        2 => (part(), 0..AREA).prop_map(|(part, from)| Action::Read { part, from }),
        1 => (word(), word(), any::<u64>())
            .prop_map(|(result, word, value)| Action::Add { result, word, value }),
        1 => (word(), word(), proptest::option::of(any::<u64>()), any::<u64>())
            .prop_map(|(result, word, compare, value)| {
                Action::Swap { result, word, compare, value }
            }),
    ]
}

/// The model of one guest.
struct Model {
    memory: Vec<u8>,
    receives: VecDeque<(u64, Part)>,
}

impl Model {
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.memory[at..at + 8].try_into().unwrap())
    }

    fn set_word(&mut self, at: usize, value: u64) {
        self.memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

/// A pair of guests, and the expected content of their memories. The guests take turns as the requester.
/// Number 0 is `a`.
struct World {
    pair: Pair,
    models: [Model; 2],
    wr_id: u64,
}

impl World {
    fn new(rings: bool) -> Self {
        let mut pair = None;
        if rings {
            with_rings(|| pair = Some(Pair::new()));
        }
        let pair = pair.unwrap_or_else(Pair::new);
        let model = |guest: &Guest, seed| Model {
            memory: guest.fill(DATA, AREA, seed),
            receives: VecDeque::new(),
        };
        let models = [model(&pair.a, 1), model(&pair.b, 2)];
        Self { pair, models, wr_id: 0 }
    }

    fn guest(&mut self, who: usize) -> &mut Guest {
        if who == 0 {
            &mut self.pair.a
        } else {
            &mut self.pair.b
        }
    }

    fn poll(&mut self, who: usize) -> Option<virtio_rdma_cqe> {
        let cqn = self.pair.ends[who].cqn;
        self.guest(who).poll(cqn)
    }

    /// Posts a send work request, and checks its CQE and that no other CQE comes.
    fn complete(&mut self, who: usize, send: &Send, opcode: u32) {
        let qpn = self.pair.ends[who].qpn;
        let wr_id = send.wr_id;
        self.guest(who).post_send(qpn, send);
        self.pair.settle();
        let found = brief(self.poll(who));
        assert_eq!(found, Some((wr_id, VIRTIO_RDMA_WC_SUCCESS, opcode)));
        assert!(self.poll(who).is_none());
    }

    /// Checks the CQE of the oldest receive of `who`, into which `len` bytes arrived. Returns the range of
    /// the receive.
    fn received(&mut self, who: usize, len: usize, opcode: u32) -> Part {
        let (wr_id, place) = self.models[who].receives.pop_front().unwrap();
        let cqe = self.poll(who);
        assert_eq!(brief(cqe), Some((wr_id, VIRTIO_RDMA_WC_SUCCESS, opcode)));
        assert_eq!(cqe.unwrap().byte_len as usize, len);
        place
    }

    fn apply(&mut self, who: usize, action: Action) {
        let peer = 1 - who;
        let (end, remote) = (self.pair.ends[who], self.pair.ends[peer]);
        self.wr_id += 1;
        let wr_id = self.wr_id;
        let remote_addr = |at: usize| DATA + at as u64;
        match action {
            Action::Receive(part) => {
                if self.models[who].receives.len() < 16 {
                    let sges = part.sges(end.key);
                    self.guest(who).post_recv(end.qpn, wr_id, &sges);
                    self.models[who].receives.push_back((wr_id, part));
                }
            }
            Action::Send(mut part) => {
                let Some((_, place)) = self.models[peer].receives.front() else { return };
                part.len = part.len.min(place.len);
                let send = Send::new(wr_id, VIRTIO_RDMA_WR_SEND, &part.sges(end.key));
                self.complete(who, &send, VIRTIO_RDMA_WC_SEND);
                let place = self.received(peer, part.len, VIRTIO_RDMA_WC_RECV);
                let bytes = self.models[who].memory[part.at..part.at + part.len].to_vec();
                self.models[peer].memory[place.at..place.at + part.len].copy_from_slice(&bytes);
            }
            Action::Write { mut part, to, immediate } => {
                let immediate = immediate && !self.models[peer].receives.is_empty();
                part.len = part.len.min(AREA - to);
                let opcode = if immediate {
                    VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM
                } else {
                    VIRTIO_RDMA_WR_RDMA_WRITE
                };
                let send = Send::new(wr_id, opcode, &part.sges(end.key));
                let send = send.rdma(remote_addr(to), remote.key);
                self.complete(who, &send, VIRTIO_RDMA_WC_RDMA_WRITE);
                if immediate {
                    self.received(peer, part.len, VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM);
                }
                let bytes = self.models[who].memory[part.at..part.at + part.len].to_vec();
                self.models[peer].memory[to..to + part.len].copy_from_slice(&bytes);
            }
            Action::Read { mut part, from } => {
                part.len = part.len.min(AREA - from);
                let send = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_READ, &part.sges(end.key));
                let send = send.rdma(remote_addr(from), remote.key);
                self.complete(who, &send, VIRTIO_RDMA_WC_RDMA_READ);
                let bytes = self.models[peer].memory[from..from + part.len].to_vec();
                self.models[who].memory[part.at..part.at + part.len].copy_from_slice(&bytes);
            }
            Action::Add { result, word, value } => {
                let place = [sge(remote_addr(result), 8, end.key)];
                let send = Send::new(wr_id, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &place);
                let send = send.atomic(remote_addr(word), remote.key, value, 0);
                self.complete(who, &send, VIRTIO_RDMA_WC_FETCH_ADD);
                let before = self.models[peer].word(word);
                self.models[peer].set_word(word, before.wrapping_add(value));
                self.models[who].set_word(result, before);
            }
            Action::Swap { result, word, compare, value } => {
                let before = self.models[peer].word(word);
                // This is often the value that is in memory.
                let compare = compare.unwrap_or(before);
                let place = [sge(remote_addr(result), 8, end.key)];
                let send = Send::new(wr_id, VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, &place);
                let send = send.atomic(remote_addr(word), remote.key, compare, value);
                self.complete(who, &send, VIRTIO_RDMA_WC_COMP_SWAP);
                if before == compare {
                    self.models[peer].set_word(word, value);
                }
                self.models[who].set_word(result, before);
            }
        }
    }

    fn check(&mut self) {
        for who in 0..2 {
            let found = self.guest(who).bytes(DATA, AREA);
            assert!(found == self.models[who].memory, "memory of guest {who}");
            assert!(self.poll(who).is_none());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn both_memories_are_as_the_model_says(
        rings in any::<bool>(),
        actions in prop::collection::vec((0..2_usize, action()), 1..60),
    ) {
        let mut world = World::new(rings);
        for (who, action) in actions {
            world.apply(who, action);
            world.check();
        }
    }
}
