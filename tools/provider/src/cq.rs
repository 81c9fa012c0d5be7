// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Completion queues (IBA 10.3).
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    clock, cmd, context,
    cq_ring::CqRing,
    cq_state::CqState,
    errno::{Errno, Result},
    lock::Lock,
    object::{Blank, Extended, Object, Owned, Ref},
    owed::Owed,
    pd::Domain,
};
use core::{ffi::c_int, mem::MaybeUninit, slice};

/// Most completions that one command takes off a CQ; bounds the buffer that
/// libibverbs allocates for the kernel's answer.
const POLL_BATCH: usize = 256;

/// A CQ: `struct verbs_cq` and the provider's part.
pub type Cq = Object<verbs_cq>;

impl Extended for verbs_cq {
    type Private = Private;
}

/// What the provider adds to a CQ.
pub struct Private {
    state: Lock<CqState>,
    /// Where the ring's memory comes from; the last field, because it must be dropped last.
    domain: Domain,
}

impl Private {
    /// Returns what the CQ's lock protects.
    pub fn state(&self) -> &Lock<CqState> {
        &self.state
    }

    /// A CQ that the kernel does not know, for completions with what `flags` says.
    #[cfg(test)]
    pub fn without_kernel(ring: Option<CqRing>, flags: u32) -> Self {
        Self { state: Lock::new(CqState::new(ring, flags)), domain: Domain::NONE }
    }
}

/// The attributes of a CQ.
pub struct Attr<'a> {
    /// Least number of CQEs.
    pub cqe: c_int,
    /// Where its completion events go.
    pub channel: Option<Ref<'a, ibv_comp_channel>>,
    /// The completion vector.
    pub comp_vector: c_int,
    /// How it is locked and where its memory comes from.
    pub domain: Domain,
}

/// ibv_create_cq(3).
///
/// # Errors
///
/// EINVAL for a number of CQEs that no CQ has; ENOMEM; the kernel's.
pub fn create(context: Ref<'_, ibv_context>, attr: Attr<'_>) -> Result<Owned<Cq>> {
    new(context, attr, 0)
}

/// What an extended CQ can tell of a completion.
const WC_FLAGS: u32 = IBV_WC_STANDARD_FLAGS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// ibv_create_cq_ex(3), for completions with what `wc_flags` says.
///
/// # Errors
///
/// EOPNOTSUPP for what no CQ can tell; as [`create`].
pub fn create_ex(
    context: Ref<'_, ibv_context>,
    attr: Attr<'_>,
    wc_flags: u64,
) -> Result<Owned<Cq>> {
    let flags = u32::try_from(wc_flags).map_err(|_| Errno::EOPNOTSUPP)?;
    if flags & !WC_FLAGS != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    new(context, attr, flags)
}

fn new(context: Ref<'_, ibv_context>, attr: Attr<'_>, flags: u32) -> Result<Owned<Cq>> {
    let cq = Blank::<verbs_cq>::new()?;
    let Attr { cqe, channel, comp_vector, domain } = attr;
    let state = |ring| Lock::with(CqState::new(ring, flags), domain.threads);
    if context.whole().private().qp_table.is_none() {
        cmd::cq::create(context, cqe, channel, comp_vector, cq.verbs().cq(), None)?;
        let state = state(None);
        return Ok(cq.finish(Private { state, domain: domain.without_memory() }));
    }
    let (ring, cqe) = new_ring(cqe, &domain)?;
    cmd::cq::create(context, cqe, channel, comp_vector, cq.verbs().cq(), Some(ring.request()))?;
    let state = state(Some(ring));
    Ok(cq.finish(Private { state, domain }))
}

/// Takes a completion off an extended CQ, for the program to read. The caller has the CQ's lock.
///
/// # Errors
///
/// ENOENT if there is none; EIO if there will be none any more; the kernel's.
pub fn next(cq: Ref<'_, Cq>, state: &mut CqState) -> Result {
    let CqState { ring, poll } = state;
    let entry = slice::from_mut(&mut poll.wc);
    let polled = match ring {
        Some(ring) => {
            let context = cq.cq().context().private();
            let polled = take(context, ring, entry)?;
            if polled == 0 { emptied(&context.owed, 0)? } else { polled }
        }
        None => poll_kernel(cq.cq(), entry)?,
    };
    if polled == 0 {
        return Err(Errno::ENOENT);
    }
    if poll.flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0 {
        poll.device_time = clock::device();
    }
    if poll.flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK != 0 {
        poll.wallclock = clock::wallclock();
    }
    Ok(())
}

/// CQEs that a page holds behind the head, and so what the smallest ring has:
/// more cost nothing, and a program that counts its completions too sparsely
/// has no overflow.
const MIN_CQE: u32 = 32;

/// A ring of at least `cqe` CQEs, and how many it has.
fn new_ring(cqe: c_int, domain: &Domain) -> Result<(CqRing, c_int)> {
    let depth = u32::try_from(cqe).ok().filter(|&depth| depth > 0).ok_or(Errno::EINVAL)?;
    let ring = CqRing::lent(depth.max(MIN_CQE), domain.allocator)?;
    let depth = c_int::try_from(ring.depth()).map_err(|_| Errno::EINVAL)?;
    Ok((ring, depth))
}

/// ibv_resize_cq(3). CQEs that were not polled stay, in order.
///
/// # Errors
///
/// EINVAL for fewer CQEs than the CQ holds, and as [`create`].
pub fn resize(cq: Ref<'_, Cq>, cqe: c_int) -> Result {
    let Private { state, domain } = cq.private();
    let (mut ring, cqe) = new_ring(cqe, domain)?;
    let mut state = state.lock();
    let old = state.ring()?;
    ring.arm_as(old);
    cmd::cq::resize(cq.cq(), cqe, ring.request())?;
    *old = ring;
    Ok(())
}

/// ibv_poll_cq(3) on a ring: fills `entries` from the front; answers how many.
///
/// # Errors
///
/// EIO if the CQ is empty and the device gone; EACCES if it is empty because the
/// kernel rings no doorbell for a program that changed its credentials.
pub fn poll(cq: Ref<'_, Cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    let context = cq.cq().context().private();
    let polled = take(context, cq.private().state.lock().ring()?, entries)?;
    if polled == entries.len() { Ok(polled) } else { emptied(&context.owed, polled) }
}

/// Takes completions off a ring; answers how many.
///
/// # Errors
///
/// EIO if there are none, and the device is gone.
fn take(
    context: &context::Private,
    ring: &mut CqRing,
    entries: &mut [MaybeUninit<ibv_wc>],
) -> Result<usize> {
    let table = context.qp_table.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    take_with(ring, |ring| ring.poll(|cqe| table.complete(cqe), entries), CqRing::is_closed)
}

/// Polls a ring by `poll`, and a ring that is closed once more: its last completion may have come after
/// the first poll and before the end.
pub(crate) fn take_with<R>(
    ring: &mut R,
    mut poll: impl FnMut(&mut R) -> usize,
    is_closed: impl FnOnce(&R) -> bool,
) -> Result<usize> {
    match poll(ring) {
        0 if is_closed(ring) => match poll(ring) {
            0 => Err(Errno::EIO),
            polled => Ok(polled),
        },
        polled => Ok(polled),
    }
}

/// Rings the doorbells that are owed, as a CQ that is empty may wait for them.
fn emptied(owed: &Owed, polled: usize) -> Result<usize> {
    match owed.settle() {
        // These pass.
        Ok(()) | Err(Errno::ENOMEM | Errno::EBUSY) => Ok(polled),
        Err(_) if polled != 0 => Ok(polled),
        Err(errno) => Err(errno),
    }
}

/// ibv_req_notify_cq(3) on a ring; a system call only for a doorbell that is owed.
///
/// # Errors
///
/// What the kernel answers to a doorbell that is owed: the program would sleep for ever.
pub fn req_notify(cq: Ref<'_, Cq>, solicited_only: bool) -> Result {
    cq.private().state.lock().ring()?.arm(solicited_only);
    cq.cq().context().private().owed.settle()
}

/// ibv_poll_cq(3) through the kernel: fills `entries` from the front; answers
/// how many.
///
/// Fewer than there is room for means that the CQ was empty. Completions that
/// an earlier command took are not lost when a later one fails: they are
/// answered, and the error comes back with the next call.
pub fn poll_kernel(cq: Ref<'_, ibv_cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    poll_batches(entries, |batch| cmd::cq::poll(cq, batch))
}

fn poll_batches<T>(
    entries: &mut [T],
    mut poll: impl FnMut(&mut [T]) -> Result<usize>,
) -> Result<usize> {
    let mut total = 0;
    for batch in entries.chunks_mut(POLL_BATCH) {
        let polled = match poll(batch) {
            Err(error) if total == 0 => return Err(error),
            Err(_) => break,
            Ok(polled) => polled,
        };
        total += polled;
        if polled < batch.len() {
            break;
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::Cell, mem};

    /// Polls a CQ that holds `held` completions and fails at the n-th command.
    fn run(room: usize, mut held: usize, fail: usize) -> (Result<usize>, Vec<usize>) {
        let mut asked = Vec::new();
        let result = poll_batches(&mut vec![0u8; room], |batch| {
            asked.push(batch.len());
            if asked.len() == fail {
                return Err(Errno::ENOMEM);
            }
            let polled = held.min(batch.len());
            held -= polled;
            Ok(polled)
        });
        (result, asked)
    }

    #[test]
    fn depth_of_a_ring() {
        for (asked, got) in [(1, 32), (32, 32), (33, 64), (1 << 16, 1 << 16)] {
            assert_eq!(new_ring(asked, &Domain::NONE).map(|(_, depth)| depth), Ok(got));
        }
        for asked in [0, -1, c_int::MIN, c_int::MAX] {
            assert_eq!(new_ring(asked, &Domain::NONE).err(), Some(Errno::EINVAL));
        }
        let page = new_ring(1, &Domain::NONE).map(|(ring, _)| ring.request().buf_len);
        assert_eq!(page, Ok(crate::ring::page_size() as u64));
    }

    /// A completion that came between a poll and the end of the device is polled, and no error
    /// is answered before all have been.
    #[test]
    fn the_last_completion_comes_before_the_end() {
        // What comes between the poll and the look whether the ring is closed.
        let take = |held: usize, late: usize, closed: bool| {
            let mut ring = held;
            let come = Cell::new(0);
            let poll = |ring: &mut usize| mem::take(ring) + come.take();
            let is_closed = |_: &usize| {
                come.set(late);
                closed
            };
            take_with(&mut ring, poll, is_closed)
        };
        assert_eq!(take(2, 0, true), Ok(2));
        assert_eq!(take(0, 1, true), Ok(1));
        assert_eq!(take(0, 0, true), Err(Errno::EIO));
        assert_eq!((take(0, 1, false), take(0, 0, false)), (Ok(0), Ok(0)));
    }

    #[test]
    fn poll_stops_when_empty() {
        assert_eq!(run(0, 5, 0), (Ok(0), vec![]));
        assert_eq!(run(16, 0, 0), (Ok(0), vec![16]));
        assert_eq!(run(1000, 300, 0), (Ok(300), vec![256, 256]));
        assert_eq!(run(512, 512, 0), (Ok(512), vec![256, 256]));
        assert_eq!(run(600, 9999, 0), (Ok(600), vec![256, 256, 88]));
    }

    #[test]
    fn poll_error_loses_no_completion() {
        assert_eq!(run(16, 5, 1), (Err(Errno::ENOMEM), vec![16]));
        assert_eq!(run(600, 600, 2), (Ok(256), vec![256, 256]));
    }
}
