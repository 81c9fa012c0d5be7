// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two threads that answer each other: over a cache line that both poll, and over two eventfds
//! that each sleeps on.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::event::{eventfd as make_eventfd, EventfdFlags};
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::samples::typical;
use crate::Error;

/// Tells the other thread to end.
const END: u64 = u64::MAX;

/// A cache line (and the one that the prefetcher takes along) of its own.
#[repr(align(128))]
struct Line(AtomicU64);

/// Microseconds a round trip: one line, written in turns by two threads on two processors.
pub fn cacheline(time: Duration) -> Result<f64, Error> {
    let (here, there) = two_processors()?;
    let line = Line(AtomicU64::new(0));
    thread::scope(|scope| {
        let other = scope.spawn(|| pin(there).map(|()| answer(&line.0)));
        let mut turn = 0;
        let seconds = pin(here).and_then(|()| {
            typical(time, |count| {
                for _ in 0..count {
                    turn += 2;
                    line.0.store(turn - 1, Ordering::Release);
                    while line.0.load(Ordering::Acquire) != turn {
                        if other.is_finished() {
                            return Err(Error::Thread);
                        }
                    }
                }
                Ok(())
            })
        });
        line.0.store(END, Ordering::Release);
        other.join().map_err(|_| Error::Thread)??;
        Ok(seconds? * 1e6)
    })
}

/// Adds one to each odd number.
fn answer(line: &AtomicU64) {
    loop {
        match line.load(Ordering::Acquire) {
            END => return,
            turn if turn % 2 == 1 => line.store(turn + 1, Ordering::Release),
            _ => {}
        }
    }
}

/// Microseconds a round trip of two blocking eventfds: two hops, each a write and the wake-up of
/// the reader, on another processor as another machine's would be. Where the scheduler places the
/// threads, it may be one processor, which then never sleeps and takes a twentieth of that.
pub fn eventfd(time: Duration) -> Result<f64, Error> {
    let (asker, answerer) = two_processors()?;
    let make = || make_eventfd(0, EventfdFlags::CLOEXEC).map_err(Error::system("eventfd"));
    let (there, back) = (make()?, make()?);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            pin(answerer)?;
            while wait(&there)? < END / 2 {
                signal(&back, 1)?;
            }
            Ok(())
        });
        let seconds = pin(asker).and_then(|()| {
            typical(time, |count| {
                for _ in 0..count {
                    signal(&there, 1)?;
                    wait(&back)?;
                }
                Ok(())
            })
        });
        signal(&there, END / 2)?;
        other.join().map_err(|_| Error::Thread)??;
        Ok(seconds? * 1e6)
    })
}

fn signal(event: &OwnedFd, count: u64) -> Result<(), Error> {
    rustix::io::write(event, &count.to_ne_bytes()).map_err(Error::system("write"))?;
    Ok(())
}

fn wait(event: &OwnedFd) -> Result<u64, Error> {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_err(Error::system("read"))?;
    Ok(u64::from_ne_bytes(count))
}

/// The first two processors that this process may use.
pub fn two_processors() -> Result<(usize, usize), Error> {
    let set = sched_getaffinity(None).map_err(Error::system("sched_getaffinity"))?;
    let mut usable = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    usable.next().zip(usable.next()).ok_or(Error::OneProcessor)
}

/// Has this thread run on this processor only.
pub fn pin(cpu: usize) -> Result<(), Error> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(Error::system("sched_setaffinity"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_end() {
        for result in [cacheline(Duration::ZERO), eventfd(Duration::ZERO)] {
            assert!(match result {
                Ok(time) => time > 0.0,
                Err(error) => matches!(error, Error::OneProcessor),
            });
        }
    }
}
