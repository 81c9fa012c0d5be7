// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A send queue, for the tests of what posts to it.

use crate::{
    bindings::*,
    model::{
        device::Memory,
        objects::{self, Harness},
    },
    object::Owned,
    qp::Qp,
    ring::Ring,
    wqe,
};
use std::sync::atomic::Ordering::Acquire;

/// The number of work requests that the send queue holds.
pub const DEPTH: u32 = 4;

/// The number of the QP.
const NUMBER: u32 = 5;

/// A QP in RTS, and what the device sees of its send queue.
pub struct SendQueue {
    pub qp: Owned<Qp>,
    pub ring: Ring,
    harness: Harness,
}

impl SendQueue {
    /// Returns the send queue of a new QP.
    pub fn new(qp_type: ibv_qp_type) -> Self {
        let cap = ibv_qp_cap {
            max_send_wr: DEPTH,
            max_send_sge: 2,
            max_inline_data: 40,
            ..Default::default()
        };
        let attr = ibv_qp_init_attr_ex { qp_type, cap, ..Default::default() };
        let mut harness = Harness::new(&[]);
        let qp = objects::qp(&mut harness, &attr, NUMBER);
        let stride = wqe::send_header(qp_type.into()) + 40;
        let ring = Ring::new(size_of::<virtio_rdma_qp_ring>(), DEPTH, stride).unwrap();
        Self { qp, ring, harness }
    }

    /// Returns the memory of the rings of the QP.
    pub fn memory(&self) -> Memory {
        Memory::at(self.qp.as_ref().private().request().buf_addr)
    }

    /// Returns how many work requests the device was told of.
    pub fn told(&self) -> u32 {
        self.memory().word(0).load(Acquire)
    }

    /// Returns what the device reads at an offset of an entry.
    pub fn read<T: Copy>(&self, index: u32, offset: usize) -> T {
        self.memory().read(self.ring, index, offset)
    }

    /// Sets how many work requests are done.
    pub fn set_done(&self, done: u32) {
        self.harness.table.get(NUMBER).unwrap().send().set_done(done);
    }
}
