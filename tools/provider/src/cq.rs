// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Completion queues (IBA 10.3).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc, verbs_cq},
    cmd,
    cq_ring::CqRing,
    errno::{Errno, Result},
    lock::Lock,
    object::{Blank, Cq, Owned, Ref},
};
use core::{ffi::c_int, mem::MaybeUninit};

/// Most completions that one command takes off a CQ; bounds the buffer that
/// libibverbs allocates for the kernel's answer.
const POLL_BATCH: usize = 256;

/// What the provider adds to a CQ.
pub struct Private {
    /// The ring, if the program has it.
    pub ring: Option<Lock<CqRing>>,
}

/// ibv_create_cq(3).
///
/// # Errors
///
/// EINVAL for a number of CQEs that no CQ has; ENOMEM; the kernel's.
pub fn create(
    context: Ref<'_, ibv_context>,
    cqe: c_int,
    channel: Option<Ref<'_, ibv_comp_channel>>,
    comp_vector: c_int,
) -> Result<Owned<Cq>> {
    let cq = Blank::<verbs_cq, Private>::new()?;
    if context.whole().private().numbers.is_none() {
        cmd::create_cq(context, cqe, channel, comp_vector, cq.verbs().cq(), None)?;
        return Ok(cq.finish(Private { ring: None }));
    }
    let (ring, cqe) = new_ring(cqe)?;
    cmd::create_cq(context, cqe, channel, comp_vector, cq.verbs().cq(), Some(ring.request()))?;
    Ok(cq.finish(Private { ring: Some(Lock::new(ring)) }))
}

/// CQEs that a page holds behind the head, and so what the smallest ring has:
/// more cost nothing, and a program that counts its completions too sparsely
/// has no overflow.
const MIN_CQE: u32 = 32;

/// A ring of at least `cqe` CQEs, and how many it has.
fn new_ring(cqe: c_int) -> Result<(CqRing, c_int)> {
    let depth = u32::try_from(cqe).ok().filter(|&depth| depth > 0).ok_or(Errno::EINVAL)?;
    let ring = CqRing::new(depth.max(MIN_CQE))?;
    let depth = c_int::try_from(ring.depth()).map_err(|_| Errno::EINVAL)?;
    Ok((ring, depth))
}

/// ibv_resize_cq(3). CQEs that were not polled stay, in order.
///
/// # Errors
///
/// EINVAL for fewer CQEs than the CQ holds, and as [`create`].
pub fn resize(cq: Ref<'_, Cq>, cqe: c_int) -> Result {
    let lock = cq.private().ring.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    let (mut ring, cqe) = new_ring(cqe)?;
    let mut old = lock.lock();
    ring.arm_as(&old);
    cmd::resize_cq(cq.cq(), cqe, ring.request())?;
    *old = ring;
    Ok(())
}

/// ibv_poll_cq(3) on a ring: fills `entries` from the front; answers how many.
///
/// # Errors
///
/// EIO if the CQ is empty and the device gone.
pub fn poll(cq: Ref<'_, Cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    let ring = cq.private().ring.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    let numbers = cq.cq().context().private().numbers.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    let mut ring = ring.lock();
    match ring.poll(numbers, entries) {
        0 if ring.is_closed() => Err(Errno::EIO),
        polled => Ok(polled),
    }
}

/// ibv_req_notify_cq(3) on a ring; no system call.
pub fn req_notify(cq: Ref<'_, Cq>, solicited_only: bool) -> Result {
    let ring = cq.private().ring.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    ring.lock().arm(solicited_only);
    Ok(())
}

/// Drops the CQEs of a QP that is destroyed or reset from its CQs.
pub fn purge(send_cq: Ref<'_, Cq>, recv_cq: Ref<'_, Cq>, number: u32) {
    let same = send_cq.as_ptr() == recv_cq.as_ptr();
    for cq in [send_cq, recv_cq].into_iter().take(if same { 1 } else { 2 }) {
        if let Some(ring) = &cq.private().ring {
            ring.lock().purge(number);
        }
    }
}

/// ibv_poll_cq(3) through the kernel: fills `entries` from the front; answers
/// how many.
///
/// Fewer than there is room for means that the CQ was empty. Completions that
/// an earlier command took are not lost when a later one fails: they are
/// answered, and the error comes back with the next call.
pub fn poll_kernel(cq: Ref<'_, ibv_cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    poll_batches(entries, |batch| cmd::poll_cq(cq, batch))
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
            assert_eq!(new_ring(asked).map(|(_, depth)| depth), Ok(got));
        }
        for asked in [0, -1, c_int::MIN, c_int::MAX] {
            assert_eq!(new_ring(asked).err(), Some(Errno::EINVAL));
        }
        let page = new_ring(1).map(|(ring, _)| ring.request().buf_len);
        assert_eq!(page, Ok(4096));
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
