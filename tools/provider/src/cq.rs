// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Completion queues (IBA 10.3).
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    causes::{Cause, cause},
    clock, cmd,
    context::ContextPrivate,
    cq_ring::CqRing,
    cq_state::CqState,
    errno::{Errno, Result},
    limits::Sizes,
    lock::Lock,
    log::Refuse,
    object::{Blank, Extended, Object, Owned, Ref},
    owed::Owed,
    pd::Domain,
};
use core::{ffi::c_int, mem::MaybeUninit, slice};

/// Most completions that one command takes off a CQ; bounds the buffer that
/// libibverbs allocates for the kernel's answer.
const POLL_BATCH: usize = 256;

/// A CQ: `struct verbs_cq` and the provider's private data.
pub type Cq = Object<verbs_cq>;

impl Extended for verbs_cq {
    type Private = CqPrivate;
}

/// The private data of a CQ.
pub struct CqPrivate {
    state: Lock<CqState>,
    /// The domain that the ring's memory comes from; the last field, because it must be dropped
    /// last.
    domain: Domain,
}

impl CqPrivate {
    /// Returns the state that the CQ's lock protects.
    pub fn state(&self) -> &Lock<CqState> {
        &self.state
    }

    /// Returns the private data of a CQ that the kernel does not know. Its completions have the
    /// fields that `flags` (`IBV_WC_EX_WITH_*`) names.
    #[cfg(test)]
    pub fn without_kernel(ring: Option<CqRing>, flags: u32) -> Self {
        Self { state: Lock::new(CqState::new(ring, flags)), domain: Domain::NONE }
    }
}

/// The attributes of a CQ.
pub struct Attr<'a> {
    /// Least number of CQEs.
    pub cqe: c_int,
    /// The channel of its completion events.
    pub channel: Option<Ref<'a, ibv_comp_channel>>,
    /// The completion vector.
    pub comp_vector: c_int,
    /// The domain, which says how the CQ is locked and where its memory comes from.
    pub domain: Domain,
}

/// Creates a CQ: ibv_create_cq(3).
///
/// # Errors
///
/// EINVAL for a number of CQEs that no CQ has; ENOMEM; the kernel's.
pub fn create(context: Ref<'_, ibv_context>, attr: Attr<'_>) -> Result<Owned<Cq>> {
    new(context, attr, 0)
}

/// The fields that a program can read of a completion from an extended CQ.
const WC_FLAGS: u32 = IBV_WC_STANDARD_FLAGS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// Creates an extended CQ, whose completions have what `wc_flags` say: ibv_create_cq_ex(3).
///
/// # Errors
///
/// EOPNOTSUPP for flags that no CQ has; otherwise as [`create`].
pub fn create_ex(
    context: Ref<'_, ibv_context>,
    attr: Attr<'_>,
    wc_flags: u64,
) -> Result<Owned<Cq>> {
    let unknown = wc_flags & !u64::from(WC_FLAGS);
    if unknown != 0 {
        let bit = unknown.trailing_zeros();
        let cause = cause!(EOPNOTSUPP, "a CQ with bit %u of wc_flags is wanted", bit);
        return Err(context.refuse(cause));
    }
    new(context, attr, wc_flags as u32)
}

/// Creates a CQ, whose completions have the fields that `flags` (`IBV_WC_EX_WITH_*`) names.
fn new(context: Ref<'_, ibv_context>, attr: Attr<'_>, flags: u32) -> Result<Owned<Cq>> {
    let cq = Blank::<verbs_cq>::new()?;
    let private = context.whole().private();
    let Attr { cqe, channel, comp_vector, domain } = attr;
    let domain = domain.with(private.barriers);
    let state = |ring| Lock::with(CqState::new(ring, flags), domain.threads);
    if private.qp_table.is_none() {
        cmd::cq::create(context, cqe, channel, comp_vector, cq.verbs().cq(), None)?;
        let state = state(None);
        return Ok(cq.finish(CqPrivate { state, domain: domain.without_memory() }));
    }
    let ring = new_ring(&private.sizes, cqe, &domain);
    let (ring, cqe) = ring.map_err(|cause| context.refuse(cause))?;
    cmd::cq::create(context, cqe, channel, comp_vector, cq.verbs().cq(), Some(ring.request()))?;
    let state = state(Some(ring));
    Ok(cq.finish(CqPrivate { state, domain }))
}

/// Takes a completion off an extended CQ, for the program to read. The caller has the CQ's lock,
/// which protects `state`.
///
/// # Errors
///
/// ENOENT if the CQ is empty; EIO if it is empty and the device gone; the kernel's.
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

/// The depth of the smallest ring: as many CQEs as a page holds behind the head. The CQEs beyond
/// those that a program asks for cost nothing, and keep a program that asks for too few from an
/// overflow.
const MIN_CQE: u32 = 32;

/// Allocates a ring of at least `cqe` CQEs. Returns it and its depth.
///
/// # Errors
///
/// EINVAL for a number of CQEs that no ring has; ENOMEM.
fn new_ring(sizes: &Sizes, cqe: c_int, domain: &Domain) -> Result<(CqRing, c_int), Cause> {
    let cannot_be = || cause!(EINVAL, "a CQ of %d CQEs is wanted", cqe as u32);
    let depth = u32::try_from(cqe).ok().filter(|&depth| depth > 0).ok_or_else(cannot_be)?;
    sizes.check_cq(depth)?;
    let ring = CqRing::lent(depth.max(MIN_CQE), domain.barriers, domain.allocator)?;
    let depth = c_int::try_from(ring.depth()).map_err(|_| cannot_be())?;
    Ok((ring, depth))
}

/// Moves a CQ to a ring of another depth: ibv_resize_cq(3). CQEs that were not polled stay, in order.
///
/// # Errors
///
/// EINVAL for fewer CQEs than the CQ holds; otherwise as [`create`].
pub fn resize(cq: Ref<'_, Cq>, cqe: c_int) -> Result {
    let CqPrivate { state, domain } = cq.private();
    let ring = new_ring(&cq.cq().context().private().sizes, cqe, domain);
    let (mut ring, cqe) = ring.map_err(|cause| cq.cq().refuse(cause))?;
    let mut state = state.lock();
    let old = state.ring()?;
    ring.arm_as(old);
    cmd::cq::resize(cq.cq(), cqe, ring.request())?;
    *old = ring;
    Ok(())
}

/// Polls a ring: ibv_poll_cq(3). Fills `entries` from the front, and returns how many.
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

/// Takes completions off a ring. Returns how many.
///
/// # Errors
///
/// EIO if the ring is empty and the device gone.
fn take(
    context: &ContextPrivate,
    ring: &mut CqRing,
    entries: &mut [MaybeUninit<ibv_wc>],
) -> Result<usize> {
    let table = context.qp_table.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    take_with(
        ring,
        move |ring| ring.poll(move |cqe| table.complete(cqe), entries),
        CqRing::is_closed,
    )
}

/// Polls a ring by `poll`. Polls once more if the ring was empty and is closed: its last completion
/// may have come between the first poll and the end of the device.
///
/// # Errors
///
/// EIO if the ring is empty and closed.
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

/// Rings the doorbells that are owed, because an empty CQ may wait for them. Returns `polled`.
///
/// # Errors
///
/// Those of [`Owed::settle`] that will not pass, if nothing was polled.
fn emptied(owed: &Owed, polled: usize) -> Result<usize> {
    match owed.settle() {
        // The next call tries again.
        Ok(()) | Err(Errno::ENOMEM | Errno::EBUSY) => Ok(polled),
        Err(_) if polled != 0 => Ok(polled),
        Err(errno) => Err(errno),
    }
}

/// Arms a CQ whose ring the program has: ibv_req_notify_cq(3). Makes a system call only for a
/// doorbell that is owed.
///
/// # Errors
///
/// The kernel's answer to a doorbell that is owed: without the doorbell the program would sleep for
/// ever.
pub fn req_notify(cq: Ref<'_, Cq>, solicited_only: bool) -> Result {
    cq.private().state.lock().ring()?.arm(solicited_only);
    cq.cq().context().private().owed.settle()
}

/// Polls through the kernel: ibv_poll_cq(3). Fills `entries` from the front, and returns how many.
///
/// The CQ was empty if that is fewer than there is room for. When a command fails, the completions
/// that earlier ones took are not lost: this function returns them, and the next call the error.
///
/// # Errors
///
/// The kernel's.
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

    /// Polls a CQ that holds `held` completions, and whose command number `fail` fails.
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
        let mut sizes = Sizes::from(&Default::default());
        for (asked, got) in [(1, 32), (32, 32), (33, 64), (1 << 16, 1 << 16)] {
            assert_eq!(new_ring(&sizes, asked, &Domain::NONE).map(|(_, depth)| depth), Ok(got));
        }
        for asked in [0, -1, c_int::MIN, c_int::MAX] {
            assert_eq!(
                new_ring(&sizes, asked, &Domain::NONE).err().map(Cause::errno),
                Some(Errno::EINVAL)
            );
        }
        sizes =
            Sizes::from(&virtio_rdma_uresp_alloc_ucontext { max_cqe: 64, ..Default::default() });
        for (asked, is_there) in [(64, true), (65, false), (1 << 24, false)] {
            assert_eq!(new_ring(&sizes, asked, &Domain::NONE).is_ok(), is_there);
        }
        let page = new_ring(&sizes, 1, &Domain::NONE).map(|(ring, _)| ring.request().buf_len);
        assert_eq!(page, Ok(crate::ring::page_size() as u64));
    }

    /// A completion that came between a poll and the end of the device is polled, and the error
    /// comes after the last completion.
    #[test]
    fn the_last_completion_comes_before_the_end() {
        // `late` completions come between the poll and the look whether the ring is closed.
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
