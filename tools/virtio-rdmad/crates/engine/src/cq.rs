// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Completion queues.

use abi::{
    virtio_rdma_cqe, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION, VIRTIO_RDMA_NOTIFY_SOLICITED,
    VIRTIO_RDMA_WC_SUCCESS,
};
use zerocopy::IntoBytes;

use crate::ring_queue::RingQueue;
use crate::stats::{Counter, Stats};

/// What a CQ signals, in order of width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Armed {
    /// Nothing.
    #[default]
    No,
    /// Solicited completions and errors.
    Solicited,
    /// Every completion.
    Next,
}

/// A completion could not be placed; the CQ is in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow;

/// A CQ, or the place for one.
#[derive(Default)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Cq {
    /// The virtqueue. It stays when the CQ goes.
    pub ring: RingQueue,
    live: bool,
    error: bool,
    armed: Armed,
    /// A CQE was placed since the last signal.
    placed: bool,
    /// One that is solicited, or an error.
    placed_solicited: bool,
    /// Send and receive queues of QPs that complete here.
    users: u32,
}

impl Cq {
    /// Makes a CQ in this place.
    pub fn create(&mut self) {
        self.live = true;
        self.error = false;
        self.armed = Armed::No;
        self.placed = false;
        self.placed_solicited = false;
        self.users = 0;
        // Buffers that the driver adds are found when they are needed.
        self.ring.disable_notify();
    }

    /// Ends the CQ and gives its buffers back.
    pub fn destroy(&mut self) {
        self.live = false;
        self.ring.drain();
    }

    /// Whether there is a CQ in this place.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// Whether it overflowed.
    pub fn is_error(&self) -> bool {
        self.error
    }

    /// How many queues of QPs complete here.
    pub fn users(&self) -> u32 {
        self.users
    }

    /// One more.
    pub fn attach(&mut self) {
        self.users += 1;
    }

    /// One less.
    pub fn detach(&mut self) {
        self.users = self.users.saturating_sub(1);
    }

    /// Places a CQE, and signals if the CQ is armed for it. An error is
    /// returned once; later CQEs of a CQ in error are dropped.
    pub fn complete(
        &mut self,
        cqe: &virtio_rdma_cqe,
        solicited: bool,
        name: &str,
        stats: &Stats,
    ) -> Result<(), Overflow> {
        if !self.live || self.error {
            return Ok(());
        }
        if let Err(why) = self.place(cqe) {
            self.error = true;
            stats.complain(name, why.0, why.1);
            return Err(Overflow);
        }
        let wakes = solicited || u32::from(cqe.status) != VIRTIO_RDMA_WC_SUCCESS;
        self.placed = true;
        self.placed_solicited |= wakes;
        let due = match self.armed {
            Armed::No => false,
            Armed::Solicited => wakes,
            Armed::Next => true,
        };
        if due && self.signal() {
            self.armed = Armed::No;
        }
        Ok(())
    }

    fn place(&mut self, cqe: &virtio_rdma_cqe) -> Result<(), (Counter, String)> {
        let chain = match self.ring.pop() {
            Ok(Some(chain)) => chain,
            Ok(None) => return Err((Counter::CqOverflows, "a completion queue overflowed".into())),
            Err(error) => return Err((Counter::BadCompletionBuffer, error.to_string())),
        };
        let bytes = cqe.as_bytes();
        let fits = chain.writable_len() >= bytes.len();
        let written = if fits { chain.write(bytes).unwrap_or(0) } else { 0 };
        self.ring.give_back(chain.head, written);
        if written == 0 {
            return Err((Counter::BadCompletionBuffer, "a completion buffer is too small".into()));
        }
        Ok(())
    }

    /// Signals; tells whether it did, which it does not if the driver
    /// suppresses interrupts, or says that it has taken everything.
    fn signal(&mut self) -> bool {
        let signalled = self.ring.signal_unless_seen();
        if signalled {
            self.placed = false;
            self.placed_solicited = false;
        }
        signalled
    }

    /// REQ_NOTIFY_CQ with valid flags: arms the CQ, and signals at once if a CQE
    /// of the asked kind was placed since it last did.
    ///
    /// This signal leaves the CQ armed: the driver may have taken all these
    /// CQEs, and then its virtio core drops the interrupt.
    pub fn arm(&mut self, flags: u32) {
        let next = flags & VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION != 0;
        let asked = if next { Armed::Next } else { Armed::Solicited };
        self.armed = self.armed.max(asked);
        let placed = if next { self.placed } else { self.placed_solicited };
        if placed {
            self.signal();
        }
    }
}

/// Whether REQ_NOTIFY_CQ takes these flags: one kind, or both.
pub(crate) fn valid_notify_flags(flags: u32) -> bool {
    let known = VIRTIO_RDMA_NOTIFY_SOLICITED | VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION;
    flags != 0 && flags & !known == 0
}
