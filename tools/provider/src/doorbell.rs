// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Doorbells: the commands by which a program wakes the device (specification, 13.3).
//!
//! A work request is posted when the device can see it, which is before its doorbell. A doorbell
//! that fails changes nothing about that: a program that heard an error would post the request a
//! second time. So the command is repeated while the kernel has no memory for it. If that does not
//! help, the doorbell is **owed**: the next post to the same queue rings it, or the next poll that
//! empties a CQ of the context, or the next request for an event, whichever comes first.

use crate::{
    bindings, cmd,
    errno::{Errno, Result},
    lock::Lock,
    object::{Context, Qp, Ref, Srq},
};
use core::{
    cell::Cell,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicBool, AtomicPtr,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// Commands before a doorbell is owed. The kernel has memory for a command of a few bytes as long
/// as it does not kill the program.
const TRIES: u32 = 64;

/// The queue that a doorbell is for.
#[derive(Clone, Copy)]
pub enum Queue<'a> {
    /// The send queue of a QP.
    Send(Ref<'a, Qp>),
    /// The receive queue of a QP.
    Receive(Ref<'a, Qp>),
    /// An SRQ.
    Shared(Ref<'a, Srq>),
}

impl<'a> Queue<'a> {
    /// Sends the command.
    fn command(self) -> Result {
        match self {
            Self::Send(qp) => cmd::ring_send_doorbell(qp.qp()),
            Self::Receive(qp) => cmd::ring_recv_doorbell(qp.qp()),
            Self::Shared(srq) => cmd::ring_srq_doorbell(srq.srq()),
        }
    }

    /// The part of the object that remembers that its doorbell is owed.
    fn doorbell(self) -> Option<&'a Doorbell> {
        match self {
            Self::Send(qp) => qp.private().rings().map(|rings| rings.send_doorbell()),
            Self::Receive(qp) => qp.private().rings().map(|rings| rings.recv_doorbell()),
            Self::Shared(srq) => Some(srq.private().doorbell()),
        }
    }

    fn context(self) -> Ref<'a, Context> {
        match self {
            Self::Send(qp) | Self::Receive(qp) => qp.qp().context(),
            Self::Shared(srq) => srq.srq().context(),
        }
    }

    /// The same queue without its lifetime.
    fn raw(self) -> Raw {
        match self {
            Self::Send(qp) => Raw::Send(qp.as_ptr()),
            Self::Receive(qp) => Raw::Receive(qp.as_ptr()),
            Self::Shared(srq) => Raw::Shared(srq.as_ptr()),
        }
    }
}

/// A [`Queue`] of a list, which the object leaves before it is freed.
#[derive(Clone, Copy)]
enum Raw {
    Send(*mut Qp),
    Receive(*mut Qp),
    Shared(*mut Srq),
}

impl Raw {
    /// The queue.
    ///
    /// # Safety
    ///
    /// The object is live for all of `'a`.
    unsafe fn queue<'a>(self) -> Queue<'a> {
        // SAFETY: by the contract of this function.
        unsafe {
            match self {
                Self::Send(qp) => Queue::Send(Ref::new(qp)),
                Self::Receive(qp) => Queue::Receive(Ref::new(qp)),
                Self::Shared(srq) => Queue::Shared(Ref::new(srq)),
            }
        }
    }
}

/// The part of a QP or SRQ that remembers that its doorbell is owed.
#[derive(Default)]
pub struct Doorbell {
    /// The list that it was put into, if it ever was.
    list: AtomicPtr<Owed>,
    /// What is owed, while it is in the list; under the list's lock.
    queue: Cell<Option<Raw>>,
    /// The next one of the list; under the list's lock.
    next: Cell<Option<NonNull<Doorbell>>>,
}

// SAFETY: the cells are used under the list's lock alone.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

/// The first doorbell of a list.
struct First(Option<NonNull<Doorbell>>);

// SAFETY: what it points to may be used by any thread.
unsafe impl Send for First {}

/// The doorbells that a context owes to the device.
pub struct Owed {
    /// Whether there may be any.
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
            let Some(raw) = doorbell.queue.get() else { continue };
            // SAFETY: as above, and it is part of its object.
            let answer = unsafe { raw.queue() }.command();
            match answer {
                Err(errno) if errno != Errno::EINVAL => {
                    // The first error counts.
                    result = result.and(Err(errno));
                    doorbell.next.set(first.0);
                    first.0 = Some(doorbell.into());
                }
                // Rung, or the kernel has no such object any more: it is on its way out.
                _ => doorbell.queue.set(None),
            }
        }
        self.any.store(first.0.is_some(), Relaxed);
        result
    }

    /// Remembers a doorbell.
    fn add(&self, doorbell: &Doorbell, raw: Raw) {
        let mut first = self.first.lock();
        if doorbell.queue.replace(Some(raw)).is_none() {
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
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // SAFETY: the list is part of the context, which the program closes last.
        if let Some(list) = unsafe { self.list.load(Acquire).as_ref() } {
            list.remove(self);
        }
    }
}

/// Whether an error means that the device is gone, and work requests with it.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::ENODEV)
}

/// Rings the doorbell of a queue, in which the device can see the work requests already. If that
/// fails, `not_rung` has the next post ask for it again.
///
/// # Errors
///
/// EIO or ENODEV if the device is gone. Any other failure is no error of the work requests: the
/// doorbell is owed then.
pub fn ring(queue: Queue<'_>, not_rung: impl FnOnce()) -> Result {
    let mut result = queue.command();
    for _ in 1..TRIES {
        if result != Err(Errno::ENOMEM) {
            break;
        }
        // SAFETY: sched_yield() has no preconditions.
        unsafe { bindings::sched_yield() };
        result = queue.command();
    }
    let Err(errno) = result else { return Ok(()) };
    not_rung();
    if is_gone(errno) {
        return Err(errno);
    }
    if let Some(doorbell) = queue.doorbell() {
        queue.context().private().owed.add(doorbell, queue.raw());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bindings::*,
        cq,
        cq_ring::CqRing,
        model::{self, Harness, Memory, kernel::Kernel},
        object::{Cq, Owned},
        qp, srq,
        wr::tests::list,
    };
    use std::sync::atomic::Ordering::SeqCst;

    const DEPTH: u32 = 8;

    /// A QP whose device sleeps, and a kernel that may fail.
    struct Bench {
        qp: Owned<Qp>,
        harness: Harness,
        kernel: Box<Kernel>,
        context: Owned<Context>,
    }

    impl Bench {
        fn new() -> Self {
            let context = model::context();
            let kernel = Box::<Kernel>::default();
            let cq = model::cq(Some(CqRing::new(DEPTH).unwrap()));
            model::cq_of(&cq, &context);
            let mut harness = Harness::with_cq(&[], cq);
            let cap = ibv_qp_cap { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..Default::default() };
            let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
            let qp = model::qp(&mut harness, &attr, 5);
            model::qp_of(&qp, &context, &kernel);
            Self { qp, harness, kernel, context }
        }

        fn memory(&self) -> Memory {
            Memory::at(self.qp.as_ref().private().request().buf_addr)
        }

        /// The device goes to sleep.
        fn sleep(&self) {
            self.memory().word(128).store(1, SeqCst);
            self.memory().word(132).store(1, SeqCst);
        }

        fn send(&self) -> Result {
            let mut wr = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
            qp::post_send(self.qp.as_ref(), list(&mut wr)).map_err(|error| error.errno)
        }

        fn recv(&self) -> Result {
            let mut wr = ibv_recv_wr::default();
            qp::post_recv(self.qp.as_ref(), list(&mut wr)).map_err(|error| error.errno)
        }

        /// Work requests that the device sees.
        fn posted(&self) -> (u32, u32) {
            (self.memory().word(0).load(SeqCst), self.memory().word(64).load(SeqCst))
        }

        fn cq(&self) -> Ref<'_, Cq> {
            self.harness.cq.as_ref()
        }

        fn poll(&self) -> Result<usize> {
            cq::poll(self.cq(), &mut [const { core::mem::MaybeUninit::uninit() }; 4])
        }

        fn owes(&self) -> bool {
            self.context.as_ref().private().owed.any.load(Relaxed)
        }
    }

    /// Memory that the kernel lacks for a moment is not the program's concern.
    #[test]
    fn a_command_is_repeated() {
        let bench = Bench::new();
        bench.sleep();
        bench.kernel.fail(TRIES - 1, ENOMEM);
        assert_eq!((bench.send(), bench.posted()), (Ok(()), (1, 0)));
        assert_eq!((bench.kernel.take_rung(), bench.owes()), (1, false));
    }

    /// A work request that the device can see is never one that was not posted.
    #[test]
    fn what_is_published_is_posted() {
        for errno in [ENOMEM, EBUSY, EACCES, EINTR, EINVAL] {
            let bench = Bench::new();
            bench.sleep();
            bench.kernel.fail(2 * TRIES, errno);
            assert_eq!((bench.send(), bench.recv()), (Ok(()), Ok(())));
            assert_eq!((bench.posted(), bench.kernel.take_rung()), ((1, 1), 0));
            assert!(bench.owes());
        }
    }

    #[test]
    fn a_device_that_is_gone_is_an_error() {
        for (errno, answer) in [(EIO, Errno::EIO), (ENODEV, Errno::ENODEV)] {
            let bench = Bench::new();
            bench.sleep();
            bench.kernel.fail(9, errno);
            assert_eq!((bench.send(), bench.recv()), (Err(answer), Err(answer)));
            // The next one asks again.
            assert_eq!((bench.send(), bench.owes()), (Err(answer), false));
        }
    }

    #[test]
    fn the_next_post_rings() {
        let bench = Bench::new();
        bench.sleep();
        bench.kernel.fail(TRIES, ENOMEM);
        assert_eq!((bench.send(), bench.kernel.take_rung()), (Ok(()), 0));
        assert_eq!((bench.send(), bench.kernel.take_rung()), (Ok(()), 1));
        assert_eq!((bench.send(), bench.kernel.take_rung()), (Ok(()), 0));
    }

    /// A program that waits for a completion polls, or asks for an event before it sleeps.
    #[test]
    fn a_poll_and_a_request_for_an_event_ring() {
        let bench = Bench::new();
        for round in 0..2 {
            bench.sleep();
            bench.kernel.fail(2 * TRIES, ENOMEM);
            assert_eq!((bench.send(), bench.recv()), (Ok(()), Ok(())));
            bench.kernel.fail(2, ENOMEM);
            if round == 0 {
                assert_eq!((bench.poll(), bench.kernel.take_rung()), (Ok(0), 0));
                assert_eq!((bench.poll(), bench.kernel.take_rung()), (Ok(0), 2));
                assert_eq!((bench.poll(), bench.kernel.take_rung()), (Ok(0), 0));
            } else {
                assert_eq!(cq::req_notify(bench.cq(), false), Err(Errno::ENOMEM));
                assert_eq!(
                    (cq::req_notify(bench.cq(), false), bench.kernel.take_rung()),
                    (Ok(()), 2)
                );
                assert_eq!(
                    (cq::req_notify(bench.cq(), false), bench.kernel.take_rung()),
                    (Ok(()), 0)
                );
            }
            assert!(!bench.owes());
        }
    }

    /// A program whose doorbells will never ring hears of it where it waits.
    #[test]
    fn a_poll_says_why_nothing_comes() {
        let bench = Bench::new();
        bench.sleep();
        bench.kernel.fail(u32::MAX, EACCES);
        assert_eq!(bench.send(), Ok(()));
        assert_eq!(bench.poll(), Err(Errno::EACCES));
        bench.kernel.fail(u32::MAX, EIO);
        assert_eq!(bench.poll(), Err(Errno::EIO));
        // An object that the kernel does not know any more owes nothing.
        bench.kernel.fail(1, EINVAL);
        assert_eq!((bench.poll(), bench.owes()), (Ok(0), false));
    }

    /// What is destroyed leaves the list, wherever it stands there.
    #[test]
    fn destroyed_queues_owe_nothing() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let mut bench = Bench::new();
            let cap = ibv_qp_cap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() };
            let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
            let mut qps = [6, 7, 8].map(|number| {
                let qp = model::qp(&mut bench.harness, &attr, number);
                model::qp_of(&qp, &bench.context, &bench.kernel);
                Some(qp)
            });
            let owed = &bench.context.as_ref().private().owed;
            bench.kernel.fail(u32::MAX, EACCES);
            for qp in qps.iter().flatten() {
                assert_eq!(ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
                assert_eq!(ring(Queue::Receive(qp.as_ref()), || {}), Ok(()));
                // Once is enough.
                assert_eq!(ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
            }
            for (gone, at) in order.into_iter().enumerate() {
                qps[at] = None;
                bench.kernel.fail(0, 0);
                bench.kernel.take_rung();
                let left = 2 - gone as u32;
                assert_eq!((owed.settle(), bench.kernel.take_rung()), (Ok(()), 2 * left));
                bench.kernel.fail(u32::MAX, EACCES);
                for qp in qps.iter().flatten() {
                    assert_eq!(ring(Queue::Receive(qp.as_ref()), || {}), Ok(()));
                    assert_eq!(ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
                }
            }
        }
    }

    #[test]
    fn an_srq_owes_its_doorbell_too() {
        let bench = Bench::new();
        let srq = srq::tests::srq(DEPTH);
        model::srq_of(&srq, &bench.context, &bench.kernel);
        let wake = Memory::at(srq.as_ref().private().request().buf_addr);
        wake.word(128).store(1, SeqCst);
        bench.kernel.fail(TRIES, ENOMEM);
        let mut wr = ibv_recv_wr::default();
        assert!(srq::post_recv(srq.as_ref(), list(&mut wr)).is_ok());
        assert_eq!(wake.word(0).load(SeqCst), 1);
        assert_eq!(bench.kernel.take_rung(), 0);
        assert_eq!((bench.poll(), bench.kernel.take_rung()), (Ok(0), 1));
        assert!(srq::post_recv(srq.as_ref(), list(&mut wr)).is_ok());
        assert_eq!(bench.kernel.take_rung(), 1);
    }

    /// Threads that post, poll and destroy while doorbells fail: each doorbell is rung in the end.
    #[test]
    fn threads_settle_together() {
        struct Shared<'a>(&'a Bench);
        // SAFETY: verbs may be called from any thread.
        unsafe impl Sync for Shared<'_> {}
        let bench = Bench::new();
        let shared = &Shared(&bench);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(move || {
                    for _ in 0..2000 {
                        assert_eq!(ring(Queue::Send(shared.0.qp.as_ref()), || {}), Ok(()));
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..2000 {
                    shared.0.kernel.fail(3, EBUSY);
                    assert_eq!(shared.0.poll(), Ok(0));
                }
            });
        });
        bench.kernel.fail(0, 0);
        bench.kernel.take_rung();
        let owed = bench.owes();
        assert_eq!((bench.poll(), bench.kernel.take_rung()), (Ok(0), u32::from(owed)));
        assert!(!bench.owes());
    }
}
