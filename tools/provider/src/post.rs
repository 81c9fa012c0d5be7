// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Posting work requests (IBA 10.8), on rings or through the kernel.
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    causes::{Cause, cause},
    doorbell::{self, Queue},
    errno::Result,
    limits::{Limits, Opcodes, QpType},
    log::Refuse,
    object::Ref,
    qp::{self, Qp},
    ring::Writer,
    srq::Srq,
    wq::Posted,
    wqe,
    wr::{List, PostError, Request},
    wr_kernel,
};

/// Posts sends to a ring: ibv_post_send(3). Makes a system call only if the device sleeps.
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry, or a QP that is not in a
/// state to send; ENOMEM for a full queue. The requests before the one that
/// the error names are posted. EIO or ENODEV, with the list's first request, if the
/// device is gone.
pub fn send(qp: Ref<'_, Qp>, list: List<'_, ibv_send_wr>) -> Result<(), PostError<ibv_send_wr>> {
    let first = list.first();
    let refuse = |errno| Err(PostError { errno, bad_wr: first });
    let private = qp.private();
    let queue = Queue::Send(qp);
    let Some(rings) = private.rings() else { return refuse(queue.refuse(no_queue())) };
    if let Err(cause) = qp::check_can_send(qp) {
        return refuse(queue.refuse(cause));
    }
    let limits = private.limits();
    let encode = |request: &Request<'_, _>, entry: Writer<'_>| wqe::send(limits, request, entry);
    let posted = rings.post_send(list, encode, |cause| queue.refuse(cause));
    let Posted { result, doorbell } = posted;
    if !doorbell {
        return result;
    }
    let rung = doorbell::ring(queue, || rings.send_not_rung());
    result.and(rung.or_else(refuse))
}

/// Posts receives to a ring: ibv_post_recv(3).
///
/// # Errors
///
/// As [`send`].
pub fn recv(qp: Ref<'_, Qp>, list: List<'_, ibv_recv_wr>) -> Result<(), PostError<ibv_recv_wr>> {
    let first = list.first();
    let refuse = |errno| Err(PostError { errno, bad_wr: first });
    let private = qp.private();
    let queue = Queue::Recv(qp);
    let Some(rings) = private.rings() else { return refuse(queue.refuse(no_queue())) };
    if qp.qp().state() == IBV_QPS_RESET {
        return refuse(queue.refuse(cause!(EINVAL, "the QP is in state RESET")));
    }
    let limits = private.limits();
    let encode = |request: &Request<'_, _>, entry: Writer<'_>| wqe::recv(limits, request, entry);
    let posted = rings.post_recv(list, encode, |cause| queue.refuse(cause));
    let Some(Posted { result, doorbell }) = posted else {
        return refuse(queue.refuse(no_queue()));
    };
    if !doorbell {
        return result;
    }
    let rung = doorbell::ring(queue, || rings.recv_not_rung());
    result.and(rung.or_else(refuse))
}

/// Posts receives to an SRQ: ibv_post_srq_recv(3). Makes a system call only if a QP waits for a
/// receive.
///
/// # Errors
///
/// EINVAL for a request that the SRQ cannot carry; ENOMEM for a full queue. The
/// requests before the one that the error names are posted. EIO or ENODEV, with the
/// list's first request, if the device is gone.
pub fn srq_recv(
    srq: Ref<'_, Srq>,
    list: List<'_, ibv_recv_wr>,
) -> Result<(), PostError<ibv_recv_wr>> {
    let first = list.first();
    let (private, queue) = (srq.private(), Queue::Srq(srq));
    let Posted { result, doorbell } = private.post(list, |cause| queue.refuse(cause));
    if !doorbell {
        return result;
    }
    let rung = doorbell::ring(queue, || private.not_rung());
    result.and(rung.map_err(|errno| PostError { errno, bad_wr: first }))
}

fn no_queue() -> Cause {
    cause!(EINVAL, "the QP has no such queue")
}

/// Posts sends through the kernel: ibv_post_send(3).
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry; otherwise what the kernel answers,
/// for example ENOMEM for a full queue. The requests before the one
/// that the error names are posted.
pub fn send_kernel(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_send_wr>,
) -> Result<(), PostError<ibv_send_wr>> {
    let limits = qp.private().limits();
    let refuse = |cause| Queue::Send(qp).refuse(cause);
    let check = |request: &mut Request<'_, _>| check_send(limits, request).map_err(refuse);
    wr_kernel::post(list, check, |first| first.post(qp.qp()))
}

/// Posts receives through the kernel: ibv_post_recv(3).
///
/// # Errors
///
/// As [`send_kernel`].
pub fn recv_kernel(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_recv_wr>,
) -> Result<(), PostError<ibv_recv_wr>> {
    let max_sge = qp.private().limits().max_recv_sge;
    let refuse = |cause| Queue::Recv(qp).refuse(cause);
    let check = |request: &mut Request<'_, _>| request.sges(max_sge).map(|_| ()).map_err(refuse);
    wr_kernel::post(list, check, |first| first.post(qp.qp()))
}

/// The opcodes that the kernel's POST_SEND takes. Another one makes it refuse the whole list, of which the
/// requests before the bad one would be lost.
const OF_POST_SEND: Opcodes = Opcodes::of(&[
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_SEND_WITH_INV,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
]);

/// Checks a send work request for errors that would make libibverbs or the kernel
/// read memory that the program did not pass, or the kernel refuse those before it.
///
/// Inline data would have to be copied while posting, which the kernel's
/// command has no room for: a QP has `max_inline_data` 0. A message without
/// data may carry the flag all the same; it has no meaning then.
fn check_send(limits: &Limits, request: &mut Request<'_, ibv_send_wr>) -> Result<(), Cause> {
    let sges = request.sges(limits.max_send_sge)?;
    let opcode = request.wr().opcode;
    if !limits.opcodes.intersection(OF_POST_SEND).has(opcode) {
        return Err(cause!(EINVAL, "the kernel posts no work requests with opcode %u", opcode));
    }
    if request.wr().send_flags & IBV_SEND_INLINE != 0 {
        if let Some(sge) = sges.iter().find(|sge| sge.length != 0) {
            let text = cause!(EINVAL, "the kernel posts no inline data, here %u bytes", sge.length);
            return Err(text);
        }
        request.wr_mut().send_flags &= !IBV_SEND_INLINE;
    }
    if limits.qp_type == QpType::Ud && request.ah().is_none() {
        return Err(cause!(EINVAL, "a datagram has no address handle"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::{
        cq::{self, Cq},
        cq_ring::CqRing,
        doorbell::TRIES,
        model::{
            device::{Completer, Memory},
            kernel::Kernel,
            objects::{self, Harness, Shared},
        },
        object::Owned,
        qp_table::Registration,
        srq,
        wr::tests::list,
    };
    use std::{ptr, sync::atomic::Ordering::SeqCst};

    const RC: Limits = Limits {
        qp_type: QpType::Rc,
        opcodes: Opcodes::of_type(QpType::Rc),
        max_send_sge: 4,
        max_recv_sge: 2,
        max_inline_data: 0,
    };

    fn request(sge: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
        ibv_send_wr {
            sg_list: sge.as_mut_ptr(),
            num_sge: sge.len() as _,
            send_flags: flags,
            ..Default::default()
        }
    }

    /// Checks a request; answers it as the kernel gets it.
    fn check(limits: &Limits, wr: &mut ibv_send_wr) -> Result<ibv_send_wr> {
        let mut request = list(wr).next().unwrap();
        check_send(limits, &mut request).map(|()| *request.wr()).map_err(Cause::errno)
    }

    #[test]
    fn sge_count_within_the_qp() {
        let mut sge = [ibv_sge { addr: 0, length: 8, lkey: 0 }; 5];
        for count in 0..=4 {
            assert!(check(&RC, &mut request(&mut sge[..count], 0)).is_ok());
        }
        assert_eq!(check(&RC, &mut request(&mut sge, 0)).err(), Some(Errno::EINVAL));
        for num_sge in [-1, i32::MIN, i32::MAX, 1] {
            let mut wr = ibv_send_wr { num_sge, ..Default::default() };
            assert_eq!(check(&RC, &mut wr).err(), Some(Errno::EINVAL));
        }
    }

    #[test]
    fn inline_without_data_only_through_the_kernel() {
        let mut sge = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 2];
        let mut wr = request(&mut sge, IBV_SEND_INLINE | IBV_SEND_SIGNALED);
        assert_eq!(check(&RC, &mut wr).unwrap().send_flags, IBV_SEND_SIGNALED);
        sge[1].length = 1;
        assert_eq!(check(&RC, &mut request(&mut sge, IBV_SEND_INLINE)).err(), Some(Errno::EINVAL));
    }

    #[test]
    fn opcodes_that_the_kernel_takes() {
        let ud = Limits { opcodes: Opcodes::of_type(QpType::Ud), ..RC };
        let passes = |limits: &Limits, opcode| {
            check(limits, &mut ibv_send_wr { opcode, ..Default::default() }).is_ok()
        };
        for opcode in
            [IBV_WR_SEND, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_SEND_WITH_INV]
        {
            assert!(passes(&RC, opcode), "{opcode}");
            assert_eq!(passes(&ud, opcode), opcode == IBV_WR_SEND, "{opcode}");
        }
        for opcode in [IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_FLUSH, 10, 77, u32::MAX] {
            assert!(!passes(&RC, opcode), "{opcode}");
        }
    }

    #[test]
    fn datagram_needs_an_address_handle() {
        let ud = Limits { qp_type: QpType::Ud, ..RC };
        let mut wr = request(&mut [], 0);
        assert_eq!(check(&ud, &mut wr).err(), Some(Errno::EINVAL));
        wr.wr.ud.ah = ptr::dangling_mut::<ibv_ah>();
        assert!(check(&ud, &mut wr).is_ok());
    }

    const DEPTH: u32 = 8;

    /// A QP whose device sleeps, and a kernel that may fail.
    struct Testbed {
        qp: Owned<Qp>,
        harness: Harness,
        kernel: Box<Kernel>,
        context: objects::TestContext,
    }

    impl Testbed {
        fn new() -> Self {
            let context = objects::context();
            let kernel = Box::<Kernel>::default();
            let cq = objects::cq(Some(CqRing::new(DEPTH).unwrap()));
            objects::cq_of(&cq, &context);
            let mut harness = Harness::with_cq(&[], cq);
            let cap = ibv_qp_cap { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..Default::default() };
            let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
            let qp = objects::qp(&mut harness, &attr, 5);
            objects::qp_of(&qp, &context, &kernel);
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
            send(self.qp.as_ref(), list(&mut wr)).map_err(|error| error.errno)
        }

        fn recv(&self) -> Result {
            let mut wr = ibv_recv_wr::default();
            recv(self.qp.as_ref(), list(&mut wr)).map_err(|error| error.errno)
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
            self.context.as_ref().private().owed.any()
        }
    }

    /// The program does not see that the kernel has no memory for a moment.
    #[test]
    fn a_command_is_repeated() {
        let testbed = Testbed::new();
        testbed.sleep();
        testbed.kernel.fail(TRIES - 1, ENOMEM);
        assert_eq!((testbed.send(), testbed.posted()), (Ok(()), (1, 0)));
        assert_eq!((testbed.kernel.take_rung(), testbed.owes()), (1, false));
    }

    /// Posting does not fail for a work request that the device can see.
    #[test]
    fn what_is_published_is_posted() {
        for errno in [ENOMEM, EBUSY, EACCES, EINTR, EINVAL] {
            let testbed = Testbed::new();
            testbed.sleep();
            testbed.kernel.fail(2 * TRIES, errno);
            assert_eq!((testbed.send(), testbed.recv()), (Ok(()), Ok(())));
            assert_eq!((testbed.posted(), testbed.kernel.take_rung()), ((1, 1), 0));
            assert!(testbed.owes());
        }
    }

    #[test]
    fn a_device_that_is_gone_is_an_error() {
        for (errno, answer) in [(EIO, Errno::EIO), (ENODEV, Errno::ENODEV)] {
            let testbed = Testbed::new();
            testbed.sleep();
            testbed.kernel.fail(9, errno);
            assert_eq!((testbed.send(), testbed.recv()), (Err(answer), Err(answer)));
            // The next one asks again.
            assert_eq!((testbed.send(), testbed.owes()), (Err(answer), false));
        }
    }

    #[test]
    fn the_next_post_rings() {
        for post in [Testbed::send, Testbed::recv] {
            let testbed = Testbed::new();
            testbed.sleep();
            testbed.kernel.fail(TRIES, ENOMEM);
            assert_eq!((post(&testbed), testbed.kernel.take_rung()), (Ok(()), 0));
            assert_eq!((post(&testbed), testbed.kernel.take_rung()), (Ok(()), 1));
            assert_eq!((post(&testbed), testbed.kernel.take_rung()), (Ok(()), 0));
        }
    }

    /// A program that waits for a completion polls, or asks for an event before it sleeps.
    #[test]
    fn a_poll_and_a_request_for_an_event_ring() {
        let testbed = Testbed::new();
        for round in 0..2 {
            testbed.sleep();
            testbed.kernel.fail(2 * TRIES, ENOMEM);
            assert_eq!((testbed.send(), testbed.recv()), (Ok(()), Ok(())));
            testbed.kernel.fail(2, ENOMEM);
            if round == 0 {
                assert_eq!((testbed.poll(), testbed.kernel.take_rung()), (Ok(0), 0));
                assert_eq!((testbed.poll(), testbed.kernel.take_rung()), (Ok(0), 2));
                assert_eq!((testbed.poll(), testbed.kernel.take_rung()), (Ok(0), 0));
            } else {
                assert_eq!(cq::req_notify(testbed.cq(), false), Err(Errno::ENOMEM));
                assert_eq!(
                    (cq::req_notify(testbed.cq(), false), testbed.kernel.take_rung()),
                    (Ok(()), 2)
                );
                assert_eq!(
                    (cq::req_notify(testbed.cq(), false), testbed.kernel.take_rung()),
                    (Ok(()), 0)
                );
            }
            assert!(!testbed.owes());
        }
    }

    /// If doorbells will never ring, polling returns the error.
    #[test]
    fn a_poll_says_why_nothing_comes() {
        let testbed = Testbed::new();
        testbed.sleep();
        testbed.kernel.fail(u32::MAX, EACCES);
        assert_eq!(testbed.send(), Ok(()));
        assert_eq!(testbed.poll(), Err(Errno::EACCES));
        testbed.kernel.fail(u32::MAX, EIO);
        assert_eq!(testbed.poll(), Err(Errno::EIO));
        // A completion comes first.
        let context = testbed.context.as_ref();
        let (table, cq) = (context.private().qp_table.as_ref().unwrap(), testbed.cq());
        let _qp = Registration::new(table, 6, cq.private().state(), cq.private().state()).unwrap();
        let cqe = virtio_rdma_ring_cqe { qp_num: 6, ..Default::default() };
        Completer::of(&testbed.harness.cq).complete_posted(table, cqe);
        assert_eq!((testbed.poll(), testbed.poll()), (Ok(1), Err(Errno::EIO)));
        // The list forgets a doorbell if the kernel does not know its object any more.
        testbed.kernel.fail(1, EINVAL);
        assert_eq!((testbed.poll(), testbed.owes()), (Ok(0), false));
    }

    /// A doorbell leaves the list when its object is destroyed, wherever it stands there.
    #[test]
    fn destroyed_queues_owe_nothing() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let mut testbed = Testbed::new();
            let cap = ibv_qp_cap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() };
            let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
            let mut qps = [6, 7, 8].map(|number| {
                let qp = objects::qp(&mut testbed.harness, &attr, number);
                objects::qp_of(&qp, &testbed.context, &testbed.kernel);
                Some(qp)
            });
            let owed = &testbed.context.as_ref().private().owed;
            testbed.kernel.fail(u32::MAX, EACCES);
            for qp in qps.iter().flatten() {
                assert_eq!(doorbell::ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
                assert_eq!(doorbell::ring(Queue::Recv(qp.as_ref()), || {}), Ok(()));
                // Once is enough.
                assert_eq!(doorbell::ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
            }
            for (gone, at) in order.into_iter().enumerate() {
                qps[at] = None;
                testbed.kernel.fail(0, 0);
                testbed.kernel.take_rung();
                let left = 2 - gone as u32;
                assert_eq!((owed.settle(), testbed.kernel.take_rung()), (Ok(()), 2 * left));
                testbed.kernel.fail(u32::MAX, EACCES);
                for qp in qps.iter().flatten() {
                    assert_eq!(doorbell::ring(Queue::Recv(qp.as_ref()), || {}), Ok(()));
                    assert_eq!(doorbell::ring(Queue::Send(qp.as_ref()), || {}), Ok(()));
                }
            }
        }
    }

    #[test]
    fn an_srq_owes_its_doorbell_too() {
        let testbed = Testbed::new();
        let srq = srq::tests::srq(DEPTH);
        objects::srq_of(&srq, &testbed.context, &testbed.kernel);
        let wake = Memory::at(srq.as_ref().private().request().buf_addr);
        wake.word(128).store(1, SeqCst);
        testbed.kernel.fail(TRIES, ENOMEM);
        let mut wr = ibv_recv_wr::default();
        assert!(srq_recv(srq.as_ref(), list(&mut wr)).is_ok());
        assert_eq!(wake.word(0).load(SeqCst), 1);
        assert_eq!(testbed.kernel.take_rung(), 0);
        assert_eq!((testbed.poll(), testbed.kernel.take_rung()), (Ok(0), 1));
        assert!(srq_recv(srq.as_ref(), list(&mut wr)).is_ok());
        assert_eq!(testbed.kernel.take_rung(), 1);
        wake.word(128).store(1, SeqCst);
        testbed.kernel.fail(u32::MAX, EACCES);
        assert!(srq_recv(srq.as_ref(), list(&mut wr)).is_ok());
        assert_eq!(testbed.poll(), Err(Errno::EACCES));
        drop(srq);
        assert_eq!(testbed.poll(), Ok(0));
    }

    /// Threads that post, poll and destroy while doorbells fail: each doorbell is rung in the end.
    #[test]
    fn threads_settle_together() {
        let testbed = Testbed::new();
        let shared = &Shared(&testbed);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(move || {
                    for _ in 0..2000 {
                        assert_eq!(
                            doorbell::ring(Queue::Send(shared.0.qp.as_ref()), || {}),
                            Ok(())
                        );
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
        testbed.kernel.fail(0, 0);
        testbed.kernel.take_rung();
        let owed = testbed.owes();
        assert_eq!((testbed.poll(), testbed.kernel.take_rung()), (Ok(0), u32::from(owed)));
        assert!(!testbed.owes());
    }
}
