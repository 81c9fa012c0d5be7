// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Completion queues (IBA 10.3).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc, verbs_cq},
    cmd,
    errno::Result,
    object::{Owned, Ref},
};
use core::{ffi::c_int, mem::MaybeUninit};

/// Most completions that one command takes off a CQ; bounds the buffer that
/// libibverbs allocates for the kernel's answer.
const POLL_BATCH: usize = 256;

/// ibv_create_cq(3).
pub fn create(
    context: Ref<'_, ibv_context>,
    cqe: c_int,
    channel: Option<Ref<'_, ibv_comp_channel>>,
    comp_vector: c_int,
) -> Result<Owned<verbs_cq>> {
    let cq = Owned::zeroed()?;
    cmd::create_cq(context, cqe, channel, comp_vector, cq.as_ref().cq())?;
    Ok(cq)
}

/// ibv_poll_cq(3): fills `entries` from the front; answers how many.
///
/// Fewer than there is room for means that the CQ was empty. Completions that
/// an earlier command took are not lost when a later one fails: they are
/// answered, and the error comes back with the next call.
pub fn poll(cq: Ref<'_, ibv_cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
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
    use crate::errno::Errno;

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
