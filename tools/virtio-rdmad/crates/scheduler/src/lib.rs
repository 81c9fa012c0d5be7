// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sleep and the wake-up of a thread ([`Waker`]), and its wishes to the kernel's scheduler ([`set_slice`]).

mod waker;

use std::io::Error;
use std::time::Duration;

pub use waker::Waker;

/// Asks the kernel to give the calling thread a processor for `slice` at a time, and soon after it
/// wakes up.
///
/// The thread gets no more of a processor than before. If its slice is shorter than that of the running
/// thread, it takes the processor over when it wakes up. Otherwise it waits until the other's slice
/// ends, for one to three milliseconds. Linux does this since release 6.12 (`PREEMPT_SHORT` of
/// kernel/sched/features.h), for slices of 0.1 to 100 ms; older kernels ignore it. A thread with a
/// policy other than `SCHED_OTHER` and `SCHED_BATCH` keeps what its operator gave it.
///
/// # Errors
///
/// Fails as `sched_getattr()` and `sched_setattr()` do: with `EPERM` where a sandbox forbids them.
pub fn set_slice(slice: Duration) -> Result<(), Error> {
    let mut attr = attributes()?;
    if ![libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&policy(&attr)) {
        return Ok(());
    }
    attr.sched_runtime = slice.as_nanos().try_into().unwrap_or(u64::MAX);
    // SAFETY: `attr` is a whole `sched_attr` whose field `size` is its size; the kernel reads it only.
    let status = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if status == 0 {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}

/// Reads the calling thread's policy and its parameters.
fn attributes() -> Result<libc::sched_attr, Error> {
    // The kernel fills in less where it knows less.
    let mut attr = libc::sched_attr {
        size: 0,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    let size = size_of_val(&attr);
    // SAFETY: `attr` has room for the `size` bytes that the kernel writes at most.
    let status = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if status == 0 {
        Ok(attr)
    } else {
        Err(Error::last_os_error())
    }
}

/// Returns the policy, one of libc's `SCHED_...`.
fn policy(attr: &libc::sched_attr) -> i32 {
    attr.sched_policy.try_into().unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_stays_as_it_was() {
        let before = attributes().unwrap();
        set_slice(Duration::from_micros(200)).unwrap();
        let after = attributes().unwrap();
        assert_eq!(
            (after.sched_policy, after.sched_nice),
            (before.sched_policy, before.sched_nice)
        );
        // Kernels before 6.12 have no slices to tell of.
        assert!(
            [200_000, before.sched_runtime].contains(&after.sched_runtime),
            "{}",
            after.sched_runtime
        );
    }

    #[test]
    fn a_policy_that_has_no_slices_is_kept() {
        let mut idle = attributes().unwrap();
        idle.sched_policy = libc::SCHED_IDLE.try_into().unwrap();
        idle.sched_runtime = 0;
        // SAFETY: `idle` is a whole `sched_attr` whose field `size` is its size; the kernel reads it only.
        assert_eq!(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const idle, 0) }, 0);
        set_slice(Duration::from_micros(200)).unwrap();
        assert_eq!(policy(&attributes().unwrap()), libc::SCHED_IDLE);
    }
}
