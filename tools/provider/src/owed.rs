// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The doorbells that a context owes to the device.
//!
//! A work request is posted when the device can see it, which is before its doorbell. A doorbell
//! that fails changes nothing about that: a program that received an error would post the request a
//! second time. So the doorbell is **owed**: the next post to the same queue rings it, or the next
//! poll that empties a CQ of the context, or the next request for an event, whichever comes first.

use crate::{
    bindings::{ibv_qp, ibv_srq},
    cmd,
    errno::{Errno, Result},
    lock::Lock,
    object::Ref,
};
use core::{
    cell::Cell,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicBool, AtomicPtr,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// A queue whose doorbell a command rings, named by its object of libibverbs.
/// [`crate::doorbell::Queue`] names it by the provider's object.
#[derive(Clone, Copy)]
pub enum VerbsQueue<'a> {
    /// The send queue of a QP.
    Send(Ref<'a, ibv_qp>),
    /// The receive queue of a QP.
    Recv(Ref<'a, ibv_qp>),
    /// An SRQ.
    Srq(Ref<'a, ibv_srq>),
}

impl VerbsQueue<'_> {
    /// Rings the doorbell.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn ring(self) -> Result {
        match self {
            Self::Send(qp) => cmd::qp::ring_send_doorbell(qp),
            Self::Recv(qp) => cmd::qp::ring_recv_doorbell(qp),
            Self::Srq(srq) => cmd::srq::ring_doorbell(srq),
        }
    }

    /// Returns the same queue with another lifetime.
    ///
    /// # Safety
    ///
    /// The object is live for all of `'b`.
    unsafe fn with_lifetime<'b>(self) -> VerbsQueue<'b> {
        // SAFETY: the caller says that the object lives as long.
        unsafe {
            match self {
                Self::Send(qp) => VerbsQueue::Send(Ref::new(qp.as_ptr())),
                Self::Recv(qp) => VerbsQueue::Recv(Ref::new(qp.as_ptr())),
                Self::Srq(srq) => VerbsQueue::Srq(Ref::new(srq.as_ptr())),
            }
        }
    }
}

/// The part of a QP or SRQ that remembers that a doorbell is owed.
#[derive(Default)]
pub struct Doorbell {
    /// The list that the doorbell was put into, if it ever was.
    list: AtomicPtr<Owed>,
    /// The queue, while the doorbell is in the list; under the list's lock. It is live as long as
    /// this doorbell.
    queue: Cell<Option<VerbsQueue<'static>>>,
    /// The next doorbell of the list; under the list's lock.
    next: Cell<Option<NonNull<Doorbell>>>,
}

// SAFETY: the cells are used under the list's lock alone.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

/// The first doorbell of a list.
struct First(Option<NonNull<Doorbell>>);

// SAFETY: any thread may use the doorbell that it points to, under the lock that protects this.
unsafe impl Send for First {}

/// The doorbells that a context owes to the device.
pub struct Owed {
    /// Whether there may be doorbells in the list.
    any: AtomicBool,
    first: Lock<First>,
}

impl Default for Owed {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), first: Lock::new(First(None)) }
    }
}

impl Owed {
    /// Rings the doorbells that are owed. Costs one load if there are none.
    ///
    /// # Errors
    ///
    /// EIO if the device is gone; otherwise what the kernel answers to a doorbell that is still
    /// owed: ENOMEM, or EACCES for a program that changed its credentials.
    #[inline]
    pub fn settle(&self) -> Result {
        if self.any.load(Relaxed) { self.ring_all() } else { Ok(()) }
    }

    #[cold]
    fn ring_all(&self) -> Result {
        let mut first = self.first.lock();
        let mut at = first.0.take();
        let mut result = Ok(());
        while let Some(doorbell) = at {
            // SAFETY: a doorbell in the list is live: it leaves under the lock before it is freed.
            let doorbell: &Doorbell = unsafe { doorbell.as_ref() };
            at = doorbell.next.take();
            let Some(queue) = doorbell.queue.get() else { continue };
            match queue.ring() {
                Err(errno) if errno != Errno::EINVAL => {
                    // The first error counts.
                    result = result.and(Err(errno));
                    doorbell.next.set(first.0);
                    first.0 = Some(doorbell.into());
                }
                // The doorbell rang, or the kernel has no such object any more, because another
                // thread is destroying it.
                _ => doorbell.queue.set(None),
            }
        }
        self.any.store(first.0.is_some(), Relaxed);
        result
    }

    /// Remembers the doorbell of a queue.
    ///
    /// # Safety
    ///
    /// The doorbell is a part of the object that has the queue, and the object is one of the
    /// context that has this list.
    pub unsafe fn add(&self, doorbell: &Doorbell, queue: VerbsQueue<'_>) {
        // SAFETY: the doorbell is a part of the object, and leaves the list before the object is
        // freed, so the queue is live as long as the list has it.
        let queue = unsafe { queue.with_lifetime() };
        let mut first = self.first.lock();
        if doorbell.queue.replace(Some(queue)).is_none() {
            doorbell.next.set(first.0);
            first.0 = Some(doorbell.into());
        }
        doorbell.list.store(ptr::from_ref(self).cast_mut(), Release);
        self.any.store(true, Relaxed);
    }

    /// Forgets a doorbell.
    fn remove(&self, doorbell: &Doorbell) {
        let mut first = self.first.lock();
        if doorbell.queue.take().is_none() {
            return;
        }
        let mut at = &mut first.0;
        loop {
            match at {
                Some(other) if ptr::eq(other.as_ptr(), doorbell) => {
                    break *at = doorbell.next.take();
                }
                // SAFETY: the doorbells of the list are live, and their links are used under the
                // lock, which this thread has.
                Some(other) => at = unsafe { &mut *other.as_ref().next.as_ptr() },
                None => break,
            }
        }
    }

    /// Returns whether there may be doorbells in the list.
    #[cfg(test)]
    pub fn any(&self) -> bool {
        self.any.load(Relaxed)
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // SAFETY: the list is part of the context of this doorbell's object, which the program
        // closes last.
        if let Some(list) = unsafe { self.list.load(Acquire).as_ref() } {
            list.remove(self);
        }
    }
}
