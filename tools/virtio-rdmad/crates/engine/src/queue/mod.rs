// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work queues, completion queues and events, on virtqueues and on rings.

pub(crate) mod cq;
pub(crate) mod cq_ring;
pub(crate) mod entry;
pub(crate) mod event;
pub(crate) mod inbox;
pub(crate) mod opcode;
pub(crate) mod request;
pub(crate) mod srq;
pub(crate) mod users;
pub(crate) mod virtqueue;
pub(crate) mod waiters;
pub(crate) mod work_queue;
pub(crate) mod wq_ring;
pub(crate) mod wqe;
