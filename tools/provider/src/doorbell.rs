// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Doorbells: the commands by which a program wakes the device (specification, Rings: Doorbells).
//!
//! A command is repeated while the kernel has no memory for it. If that does not help, the
//! doorbell is owed ([`crate::owed`]).

use crate::{
    bindings,
    context::Context,
    errno::{Errno, Result},
    log::{Refuse, Subject},
    object::Ref,
    owed::{Doorbell, VerbsQueue},
    qp::Qp,
    srq::Srq,
};

/// Commands before a doorbell is owed. The kernel has memory for a command of a few bytes as long
/// as it does not kill the program.
pub(crate) const TRIES: u32 = 64;

/// The queue that a doorbell is for.
#[derive(Clone, Copy)]
pub enum Queue<'a> {
    /// The send queue of a QP.
    Send(Ref<'a, Qp>),
    /// The receive queue of a QP.
    Recv(Ref<'a, Qp>),
    /// An SRQ.
    Srq(Ref<'a, Srq>),
}

impl<'a> Queue<'a> {
    /// Returns the queue as the command names it.
    fn verbs(self) -> VerbsQueue<'a> {
        match self {
            Self::Send(qp) => VerbsQueue::Send(qp.qp()),
            Self::Recv(qp) => VerbsQueue::Recv(qp.qp()),
            Self::Srq(srq) => VerbsQueue::Srq(srq.srq()),
        }
    }

    /// Returns the part of the object that remembers that its doorbell is owed.
    fn doorbell(self) -> Option<&'a Doorbell> {
        match self {
            Self::Send(qp) => qp.private().rings().map(|rings| rings.send_doorbell()),
            Self::Recv(qp) => qp.private().rings().map(|rings| rings.recv_doorbell()),
            Self::Srq(srq) => Some(srq.private().doorbell()),
        }
    }

    fn context(self) -> Ref<'a, Context> {
        match self {
            Self::Send(qp) | Self::Recv(qp) => qp.qp().context(),
            Self::Srq(srq) => srq.srq().context(),
        }
    }
}

impl<'a> Refuse<'a> for Queue<'a> {
    fn subject(self) -> Subject<'a> {
        match self {
            Self::Send(qp) => Subject { kind: c"send queue of QP", ..qp.subject() },
            Self::Recv(qp) => Subject { kind: c"receive queue of QP", ..qp.subject() },
            Self::Srq(srq) => srq.srq().subject(),
        }
    }
}

/// Returns whether an error means that the device is gone, and work requests with it.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::ENODEV)
}

/// Rings the doorbell of a queue, in which the device can see the work requests already. If that
/// fails, calls `not_rung`, which has the next post ask for the doorbell again.
///
/// # Errors
///
/// EIO or ENODEV if the device is gone. Any other failure is no error of the work requests: the
/// doorbell is owed then.
pub fn ring(queue: Queue<'_>, not_rung: impl FnOnce()) -> Result {
    let mut result = queue.verbs().ring();
    for _ in 1..TRIES {
        if result != Err(Errno::ENOMEM) {
            break;
        }
        // SAFETY: sched_yield() has no preconditions.
        unsafe { bindings::sched_yield() };
        result = queue.verbs().ring();
    }
    let Err(errno) = result else { return Ok(()) };
    not_rung();
    if is_gone(errno) {
        return Err(errno);
    }
    if let Some(doorbell) = queue.doorbell() {
        // SAFETY: doorbell and context are those of the object that has the queue.
        unsafe { queue.context().private().owed.add(doorbell, queue.verbs()) };
    }
    Ok(())
}
