// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tells a process which thread of the one before it has aborted, and what that thread did then.
//!
//! A board is a file in memory that outlives the process, with a word for each thread. A thread writes there on whose
//! behalf it works. If it aborts, which Rust does when memory cannot be allocated, when a stack overflows and at a
//! panic in a panic, the handler of SIGABRT marks the word. A process that is killed from outside marks nothing.

use std::cell::Cell;
use std::io::Error;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{fstat, ftruncate, memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{mmap, MapFlags, ProtFlags};

/// The number of words of a board.
pub const WORDS: usize = 1024;

/// Marks the word of a thread that has aborted. A subject is less than this.
const ABORTED: u64 = 1 << 63;

/// A word, which shares no cache line with another one.
#[repr(align(64))]
struct Place(AtomicU64);

/// Bytes of the file.
const LEN: usize = WORDS * size_of::<Place>();

thread_local! {
    /// The word of this thread. It needs no initialisation and no destructor, so that a signal handler can read it.
    static MINE: Cell<Option<&'static AtomicU64>> = const { Cell::new(None) };
}

/// The words of all threads, in a file in memory.
pub struct Board {
    file: OwnedFd,
    places: &'static [Place],
}

impl Board {
    /// Makes a board on which nobody has written.
    pub fn new() -> Result<Self, Errno> {
        let file = memfd_create("virtio-rdmad board", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, LEN as u64)?;
        Self::inherit(file)
    }

    /// Takes over the board of another process. A file that is no board is an error.
    pub fn inherit(file: OwnedFd) -> Result<Self, Errno> {
        if fstat(&file)?.st_size.unsigned_abs() != LEN as u64 {
            return Err(Errno::INVAL);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address at which nothing is mapped.
        let mapped = unsafe { mmap(null_mut(), LEN, protection, MapFlags::SHARED, &file, 0) }?;
        let first = NonNull::new(mapped.cast::<Place>()).ok_or(Errno::FAULT)?;
        // SAFETY: the mapping has room for WORDS places, begins at a page, and is never unmapped. All of its values are
        // valid for atomics, through which alone it is accessed.
        let places = unsafe { std::slice::from_raw_parts(first.as_ptr(), WORDS) };
        Ok(Self { file, places })
    }

    /// Returns the file, which is to outlive the process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns what the threads worked for that have aborted.
    pub fn aborted(&self) -> Vec<u64> {
        let words = self.places.iter().map(|place| place.0.load(Ordering::Relaxed));
        words.filter(|word| word & ABORTED != 0).map(|word| word & !ABORTED).collect()
    }

    /// Clears all words.
    pub fn clear(&self) {
        self.places.iter().for_each(|place| place.0.store(0, Ordering::Relaxed));
    }

    /// Returns the word with this index, if there is one.
    pub fn word(&self, index: usize) -> Option<Word> {
        self.places.get(index).map(|place| Word(&place.0))
    }
}

/// The word of a thread.
#[derive(Clone, Copy)]
pub struct Word(&'static AtomicU64);

impl Word {
    /// Makes this the word of the calling thread.
    pub fn adopt(self) {
        MINE.set(Some(self.0));
    }

    /// Notes that the thread works for this subject from now on, or for nobody with 0.
    #[inline]
    pub fn set(self, subject: u64) {
        self.0.store(subject & !ABORTED, Ordering::Relaxed);
    }
}

/// Marks the word of the thread that aborts from now on. Call this once in a process.
pub fn mark_aborts() -> Result<(), Error> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let place = action.as_mut_ptr();
    let handler: extern "C" fn(i32) = handle;
    // SAFETY: `place` is valid for writes; all zeros is a sigaction with an empty mask.
    unsafe { (*place).sa_sigaction = handler as usize };
    // The second SIGABRT ends the process.
    // SAFETY: `place` is valid for writes.
    unsafe { (*place).sa_flags = libc::SA_ONSTACK | libc::SA_RESETHAND };
    // SAFETY: `action` is a whole sigaction, and `handle` does only what a handler may: a read of a thread-local
    // variable that needs no initialisation, an atomic, and a system call.
    match unsafe { libc::sigaction(libc::SIGABRT, place, null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// The handler of SIGABRT.
extern "C" fn handle(signal: i32) {
    if let Some(word) = MINE.get() {
        word.fetch_or(ABORTED, Ordering::Relaxed);
    }
    // SAFETY: raise() may be called in a handler. The signal comes when this handler returns.
    unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_finds_what_was_written() {
        let board = Board::new().unwrap();
        board.word(3).unwrap().set(7);
        board.word(4).unwrap().set(8);
        board.word(4).unwrap().0.fetch_or(ABORTED, Ordering::Relaxed);
        assert!(board.word(WORDS).is_none());
        let next = Board::inherit(board.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(next.aborted(), [8]);
        next.clear();
        assert!(board.aborted().is_empty());
    }

    #[test]
    fn another_file_is_no_board() {
        let file = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(Board::inherit(file).err(), Some(Errno::INVAL));
    }
}
