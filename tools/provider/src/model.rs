// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A device for tests: the other side of the rings, as the specification has
//! it, in as few lines as it takes.

use crate::{
    bindings::*,
    context, cq,
    cq_ring::CqRing,
    object::{Blank, Context, Cq, Owned, Qp, Srq},
    qp,
    qpn::{Numbers, Registration},
    ring::{Region, Ring},
    uverbs,
};
use std::{
    mem::{MaybeUninit, offset_of},
    ptr, slice,
    sync::atomic::*,
};

/// The commands that the tests give to a kernel, which is none.
pub mod kernel {
    use super::*;
    use core::ffi::{c_int, c_void};

    /// The kernel behind a QP or SRQ, which has it as its context of the program's.
    #[derive(Default)]
    pub struct Kernel {
        /// Doorbells that reached the device.
        pub rung: AtomicU32,
        /// Commands that fail from now on.
        pub failures: AtomicU32,
        /// Why they do.
        pub errno: AtomicI32,
    }

    impl Kernel {
        /// Has the next `count` commands fail.
        pub fn fail(&self, count: u32, errno: u32) {
            self.errno.store(errno as i32, Ordering::Relaxed);
            self.failures.store(count, Ordering::Relaxed);
        }

        /// Doorbells since the last call.
        pub fn take_rung(&self) -> u32 {
            self.rung.swap(0, Ordering::Relaxed)
        }

        /// What stands for a command of the object that has this context.
        unsafe fn ring(context: *mut c_void) -> c_int {
            // SAFETY: the tests put a kernel there that lives longer, or nothing.
            let Some(kernel) = (unsafe { context.cast::<Self>().as_ref() }) else { return 0 };
            let less = |failures: u32| failures.checked_sub(1);
            if kernel.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
                return kernel.errno.load(Ordering::Relaxed);
            }
            kernel.rung.fetch_add(1, Ordering::Relaxed);
            0
        }
    }

    /// As the function of libibverbs.
    pub unsafe fn ibv_cmd_post_send(
        qp: *mut ibv_qp,
        wr: *mut ibv_send_wr,
        bad_wr: *mut *mut ibv_send_wr,
    ) -> c_int {
        if uverbs::is_there() {
            // SAFETY: by the contract of this function.
            return unsafe { crate::bindings::ibv_cmd_post_send(qp, wr, bad_wr) };
        }
        // SAFETY: the tests pass live QPs.
        unsafe { Kernel::ring((*qp).qp_context) }
    }

    /// As the function of libibverbs.
    pub unsafe fn ibv_cmd_post_recv(
        qp: *mut ibv_qp,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> c_int {
        if uverbs::is_there() {
            // SAFETY: by the contract of this function.
            return unsafe { crate::bindings::ibv_cmd_post_recv(qp, wr, bad_wr) };
        }
        // SAFETY: the tests pass live QPs.
        unsafe { Kernel::ring((*qp).qp_context) }
    }

    /// As the function of libibverbs.
    pub unsafe fn ibv_cmd_post_srq_recv(
        srq: *mut ibv_srq,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> c_int {
        if uverbs::is_there() {
            // SAFETY: by the contract of this function.
            return unsafe { crate::bindings::ibv_cmd_post_srq_recv(srq, wr, bad_wr) };
        }
        // SAFETY: the tests pass live SRQs.
        unsafe { Kernel::ring((*srq).srq_context) }
    }
}

/// Finds writes to memory that was freed.
pub mod freed {
    use std::{cell::RefCell, ptr::NonNull, slice};

    const FILL: u8 = 0xa5;

    /// What a thread freed.
    #[derive(Default)]
    struct Freed(Vec<(NonNull<u8>, usize)>);

    thread_local! {
        static FREED: RefCell<Freed> = RefCell::default();
    }

    /// Keeps an object that was freed until its thread ends, and fails if it was written to.
    ///
    /// # Safety
    ///
    /// It is from malloc(), and nobody uses it any more.
    pub unsafe fn free<T>(object: NonNull<T>) {
        // SAFETY: the memory is there, and nobody uses it.
        unsafe { object.cast::<u8>().write_bytes(FILL, size_of::<T>()) };
        FREED.with_borrow_mut(|freed| freed.0.push((object.cast(), size_of::<T>())));
    }

    impl Freed {
        fn is_intact(&self) -> bool {
            self.0.iter().all(|&(at, len)| {
                // SAFETY: the memory is this value's.
                unsafe { slice::from_raw_parts(at.as_ptr(), len) }.iter().all(|&byte| byte == FILL)
            })
        }
    }

    /// Whether nothing was written to what this thread freed.
    pub fn is_intact() -> bool {
        FREED.with_borrow(Freed::is_intact)
    }

    impl Drop for Freed {
        fn drop(&mut self) {
            if !self.is_intact() {
                // The test has ended: there is no other way to fail.
                eprintln!("memory was written to after it was freed");
                std::process::abort();
            }
            for (at, _) in self.0.drain(..) {
                // SAFETY: it came from malloc().
                unsafe { crate::bindings::free(at.as_ptr().cast()) };
            }
        }
    }
}

/// A context whose objects have rings.
pub fn context() -> Owned<Context> {
    let description = virtio_rdma_uresp_alloc_ucontext {
        data_path: VIRTIO_RDMA_UDATA_PATH_RINGS,
        ..Default::default()
    };
    let context = Blank::<verbs_context, context::Private>::new().unwrap();
    context.finish(context::Private::new(description).unwrap())
}

// SAFETY: integers, pointers and a mutex, as libibverbs allocates it.
unsafe impl crate::object::Zeroable for verbs_context {}

/// Makes a CQ one of a context.
pub fn cq_of(cq: &Owned<Cq>, context: &Owned<Context>) {
    // SAFETY: both are live, and nobody else uses the CQ.
    unsafe { (*cq.as_ref().cq().as_ptr()).context = context.as_ref().context().as_ptr() };
}

/// Makes a QP one of a context and a kernel.
pub fn qp_of(qp: &Owned<Qp>, context: &Owned<Context>, kernel: &kernel::Kernel) {
    let at = qp.as_ref().qp().as_ptr();
    // SAFETY: all are live, and nobody else uses the QP.
    unsafe {
        (*at).context = context.as_ref().context().as_ptr();
        (*at).qp_context = ptr::from_ref(kernel).cast_mut().cast();
    }
}

/// As [`qp_of`].
pub fn srq_of(srq: &Owned<Srq>, context: &Owned<Context>, kernel: &kernel::Kernel) {
    let at = srq.as_ref().srq().as_ptr();
    // SAFETY: all are live, and nobody else uses the SRQ.
    unsafe {
        (*at).context = context.as_ref().context().as_ptr();
        (*at).srq_context = ptr::from_ref(kernel).cast_mut().cast();
    }
}

/// QPs of a context, and a CQ that they complete to, without a kernel.
pub struct Harness {
    pub registrations: Vec<Registration>,
    pub numbers: Box<Numbers>,
    pub cq: Owned<Cq>,
}

impl Harness {
    /// QPs with these numbers.
    pub fn new(numbers: &[u32]) -> Self {
        Self::with_cq(numbers, cq(None))
    }

    /// QPs with these numbers that complete to a CQ.
    pub fn with_cq(numbers: &[u32], cq: Owned<Cq>) -> Self {
        let table = Box::new(Numbers::new().unwrap());
        let register = |&number| Registration::new(&table, number, cq.as_ref(), cq.as_ref());
        let registrations = numbers.iter().map(register).collect::<Result<_, _>>().unwrap();
        Self { registrations, numbers: table, cq }
    }

    /// Send and receive requests of a QP that are done.
    pub fn progress(&self, number: u32) -> (u32, u32) {
        let progress = self.numbers.get(number).unwrap();
        (progress.send().done(), progress.recv().done())
    }
}

/// A CQ that the kernel does not know.
pub fn cq(ring: Option<CqRing>) -> Owned<Cq> {
    let blank = Blank::<verbs_cq, cq::Private>::new().unwrap();
    blank.finish(cq::Private::without_kernel(ring, 0))
}

/// The same, extended, of a context.
pub fn cq_ex(ring: CqRing, flags: u32, context: &Owned<Context>) -> Owned<Cq> {
    let blank = Blank::<verbs_cq, cq::Private>::new().unwrap();
    let cq = blank.finish(cq::Private::without_kernel(Some(ring), flags));
    cq_of(&cq, context);
    // SAFETY: the CQ is extended, and nobody else has it.
    unsafe { crate::cq_ex::install(cq.as_ref()) };
    cq
}

/// A QP of a harness with the number and caps given, in RTS.
pub fn qp(harness: &mut Harness, attr: &ibv_qp_init_attr_ex, number: u32) -> Owned<Qp> {
    let cq = harness.cq.as_ref();
    let registration = Registration::new(&harness.numbers, number, cq, cq).unwrap();
    let qp = Blank::<verbs_qp, qp::Private>::new().unwrap();
    let qp = qp.finish(qp::Private::without_kernel(attr, registration));
    set_state(&qp, IBV_QPS_RTS);
    qp
}

/// Moves a QP to another state.
pub fn set_state(qp: &Owned<Qp>, state: ibv_qp_state) {
    // SAFETY: the object is the caller's alone.
    unsafe { (*qp.as_ref().qp().as_ptr()).state = state };
}

/// Polls a ring for at most `room` completions.
pub fn poll(ring: &mut CqRing, numbers: &Numbers, room: usize) -> Vec<ibv_wc> {
    let mut entries = vec![MaybeUninit::uninit(); room];
    let polled = ring.poll(numbers, &mut entries);
    // SAFETY: the first `polled` entries were written.
    entries.iter().take(polled).map(|wc| unsafe { wc.assume_init() }).collect()
}

/// Immediate data or key of a completion.
pub fn ex(wc: &ibv_wc) -> u32 {
    // SAFETY: both are integers.
    unsafe { wc.__bindgen_anon_1.imm_data }
}

/// The other side of a region.
#[derive(Clone, Copy)]
pub struct Memory(*mut u8);

// SAFETY: the device is another thread, if not another process.
unsafe impl Send for Memory {}

impl Memory {
    /// The memory of a region, as the device maps it.
    pub fn new(region: &Region) -> Self {
        Self::at(region.addr())
    }

    /// The memory of a region of which the driver was told this address.
    pub fn at(addr: u64) -> Self {
        Self(ptr::with_exposed_provenance_mut(addr as usize))
    }

    /// A word of the head or of an entry.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the tests name words of live regions.
        unsafe { AtomicU32::from_ptr(self.0.add(offset).cast()) }
    }

    /// Copies a structure out of an entry.
    pub fn read<T: Copy>(&self, ring: Ring, index: u32, offset: usize) -> T {
        let at = self.entry(ring, index) + offset;
        // SAFETY: the tests name entries of live regions.
        unsafe { self.0.add(at).cast::<T>().read_unaligned() }
    }

    /// Copies bytes out of an entry.
    pub fn bytes(&self, ring: Ring, index: u32, offset: usize, len: usize) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts(self.0.add(self.entry(ring, index) + offset), len).to_vec() }
    }

    fn entry(&self, ring: Ring, index: u32) -> usize {
        ring.offset() as usize + (index % ring.depth()) as usize * ring.stride()
    }
}

/// The device's side of a CQ.
pub struct Completer {
    memory: Memory,
    depth: u32,
    /// CQEs that were written.
    pub producer: u32,
    /// The numbers at the last event.
    armed: (u32, u32),
}

impl Completer {
    /// The other side of a ring.
    pub fn new(ring: &CqRing) -> Self {
        let request = ring.request();
        let memory = Memory::at(request.buf_addr);
        Self { memory, depth: ring.depth(), producer: 0, armed: (0, 0) }
    }

    /// The other side of the ring of a CQ.
    pub fn of(cq: &Owned<Cq>) -> Self {
        Self::new(cq.as_ref().private().state().lock().ring().unwrap())
    }

    /// Writes a CQE, if there is room; answers whether there was.
    pub fn complete(&mut self, cqe: virtio_rdma_ring_cqe) -> bool {
        let consumer = self.memory.word(offset_of!(virtio_rdma_cq_ring, consumer));
        if self.producer.wrapping_sub(consumer.load(Ordering::Acquire)) >= self.depth {
            return false;
        }
        let offset = 128 + (self.producer % self.depth) as usize * 64;
        let lap = offset_of!(virtio_rdma_ring_cqe, lap);
        // SAFETY: the entry is in the region, and the device's to write; its
        // last word is written last.
        unsafe { ptr::copy((&raw const cqe).cast(), self.memory.0.add(offset), lap) };
        self.memory
            .word(offset + lap)
            .store((self.producer / self.depth).wrapping_add(1), Ordering::Release);
        self.producer = self.producer.wrapping_add(1);
        true
    }

    /// The same for a work request that was never posted, as if it were.
    pub fn complete_posted(&mut self, numbers: &Numbers, cqe: virtio_rdma_ring_cqe) -> bool {
        if let Some(progress) = numbers.get(cqe.qp_num) {
            progress.expect(&cqe);
        }
        self.complete(cqe)
    }

    /// Whether the CQEs since the last call raise an event.
    pub fn event(&mut self, solicited: bool) -> bool {
        fence(Ordering::SeqCst);
        let next = self.memory.word(offset_of!(virtio_rdma_cq_ring, arm_next));
        let arm = self.memory.word(offset_of!(virtio_rdma_cq_ring, arm_solicited));
        let now = (next.load(Ordering::Relaxed), arm.load(Ordering::Relaxed));
        let event = now.0 != self.armed.0 || (solicited && now.1 != self.armed.1);
        if event {
            self.armed = now;
        }
        event
    }

    /// The driver says that the device is gone.
    pub fn close(&self) {
        self.memory.word(offset_of!(virtio_rdma_cq_ring, closed)).store(1, Ordering::Relaxed);
    }

    /// Moves what the program has not taken to another ring, if it fits there: RESIZE_CQ.
    pub fn move_to(&self, new: &mut Self) -> bool {
        let consumer = self.consumer();
        let held = self.producer.wrapping_sub(consumer);
        for index in 0..held.min(new.depth) {
            let offset = 128 + (consumer.wrapping_add(index) % self.depth) as usize * 64;
            // SAFETY: the entry is in the region, and this side wrote it.
            let cqe = unsafe { self.memory.0.add(offset).cast::<virtio_rdma_ring_cqe>().read() };
            assert!(new.complete(cqe));
        }
        held <= new.depth
    }

    /// What the program says that it took.
    pub fn consumer(&self) -> u32 {
        self.memory.word(offset_of!(virtio_rdma_cq_ring, consumer)).load(Ordering::Acquire)
    }
}

/// Keeps this thread on the n-th of the processors that it may use, if there are as many.
pub fn pin(n: usize) {
    unsafe extern "C" {
        fn sched_getaffinity(pid: i32, size: usize, mask: *mut [u64; 16]) -> i32;
        fn sched_setaffinity(pid: i32, size: usize, mask: *const [u64; 16]) -> i32;
    }
    let mut mask = [0u64; 16];
    // SAFETY: the mask has as many bytes.
    unsafe { sched_getaffinity(0, size_of_val(&mask), &mut mask) };
    let mut cpus = (0..1024usize).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 != 0);
    if let Some(cpu) = cpus.nth(n) {
        let mut one = [0u64; 16];
        one[cpu / 64] = 1 << (cpu % 64);
        // SAFETY: as above.
        unsafe { sched_setaffinity(0, size_of_val(&one), &one) };
    }
}

/// What posting and polling cost, in a release build:
/// `cargo test --release -- --ignored --nocapture cost`.
mod cost {
    use super::*;
    use crate::{object::Ref, qpn::Side, wr::List};
    use std::{hint::black_box, time::Instant};

    const ROUNDS: u32 = 2_000;
    const DEPTH: u32 = 128;

    fn attr() -> ibv_qp_init_attr_ex {
        let cap = ibv_qp_cap {
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_send_sge: 4,
            max_recv_sge: 1,
            max_inline_data: 64,
        };
        ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() }
    }

    /// The median of the rounds, in nanoseconds of one of `DEPTH`.
    fn each(mut rounds: Vec<u128>) -> f64 {
        rounds.sort_unstable();
        rounds[rounds.len() / 2] as f64 / f64::from(DEPTH)
    }

    /// Posts a request again and again; nanoseconds of each.
    fn post(qp: Ref<'_, Qp>, send: &Side, wr: &mut ibv_send_wr) -> f64 {
        let round = |_| {
            let start = Instant::now();
            for _ in 0..DEPTH {
                // SAFETY: one valid request.
                let list = unsafe { List::new(black_box(&raw mut *wr)) };
                assert!(qp::post_send(qp, list).is_ok());
            }
            let spent = start.elapsed().as_nanos();
            send.set_done(send.done().wrapping_add(DEPTH));
            spent
        };
        each((0..ROUNDS).map(round).collect())
    }

    #[test]
    #[ignore = "a measurement"]
    fn cost_of_post_send() {
        let mut harness = Harness::new(&[]);
        let qp = qp(&mut harness, &attr(), 5);
        let send = harness.numbers.get(5).unwrap().send();
        let data = [7u8; 64];
        let addr = data.as_ptr().expose_provenance() as u64;
        for (name, flags, length) in [
            ("1 SGE", IBV_SEND_SIGNALED, 64),
            ("inline, 2 bytes", IBV_SEND_SIGNALED | IBV_SEND_INLINE, 2),
            ("inline, 64 bytes", IBV_SEND_SIGNALED | IBV_SEND_INLINE, 64),
        ] {
            let mut sge = ibv_sge { addr, length, lkey: 1 };
            let mut wr = ibv_send_wr {
                opcode: IBV_WR_RDMA_WRITE,
                send_flags: flags,
                sg_list: &raw mut sge,
                num_sge: 1,
                ..Default::default()
            };
            println!("post_send, {name}: {:.1} ns", post(qp.as_ref(), send, &mut wr));
        }
    }

    #[test]
    #[ignore = "a measurement"]
    fn cost_of_wr() {
        let mut harness = Harness::new(&[]);
        let qp = qp(&mut harness, &attr(), 5);
        // SAFETY: the QP has rings, and nobody else has it.
        unsafe { crate::wr_ex::install(qp.as_ref()) };
        let send = harness.numbers.get(5).unwrap().send();
        let data = [7u8; 64];
        let ex = qp.as_ref().as_ptr().cast::<ibv_qp_ex>();
        for batch in [1, 16] {
            for inline in [false, true] {
                let round = |_| {
                    let start = Instant::now();
                    for _ in 0..DEPTH / batch {
                        // SAFETY: calls as ibv_wr_post(3) has them.
                        unsafe {
                            let ex = black_box(ex);
                            (*ex).wr_start.unwrap()(ex);
                            for wr_id in 0..batch {
                                ((*ex).wr_id, (*ex).wr_flags) = (wr_id.into(), IBV_SEND_SIGNALED);
                                (*ex).wr_rdma_write.unwrap()(ex, 1, 2);
                                if inline {
                                    let at = data.as_ptr().cast_mut().cast();
                                    (*ex).wr_set_inline_data.unwrap()(ex, at, 64);
                                } else {
                                    (*ex).wr_set_sge.unwrap()(ex, 1, 2, 64);
                                }
                            }
                            assert_eq!((*ex).wr_complete.unwrap()(ex), 0);
                        }
                    }
                    let spent = start.elapsed().as_nanos();
                    send.set_done(send.done().wrapping_add(DEPTH));
                    spent
                };
                let each = each((0..ROUNDS).map(round).collect());
                println!("ibv_wr, {batch} at a time, inline {inline}: {each:.1} ns");
            }
        }
    }

    #[test]
    #[ignore = "a measurement"]
    fn cost_of_extended_poll() {
        let context = context();
        let cq = cq_ex(CqRing::new(DEPTH).unwrap(), 0, &context);
        let numbers = context.as_ref().private().numbers.as_ref().unwrap();
        let _registration = Registration::new(numbers, 5, cq.as_ref(), cq.as_ref()).unwrap();
        let mut device = Completer::of(&cq);
        let ex = cq.as_ref().as_ptr().cast::<ibv_cq_ex>();
        for batch in [1, 16] {
            let round = |_| {
                for _ in 0..DEPTH {
                    let wqe_index = device.producer;
                    let cqe = virtio_rdma_ring_cqe { qp_num: 5, wqe_index, ..Default::default() };
                    assert!(device.complete_posted(numbers, cqe));
                }
                let start = Instant::now();
                for _ in 0..DEPTH / batch {
                    let mut attr = ibv_poll_cq_attr::default();
                    // SAFETY: calls as ibv_create_cq_ex(3) has them.
                    unsafe {
                        let ex = black_box(ex);
                        assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), 0);
                        for _ in 1..batch {
                            assert_eq!((*ex).next_poll.unwrap()(ex), 0);
                        }
                        (*ex).end_poll.unwrap()(ex);
                    }
                }
                start.elapsed().as_nanos()
            };
            let each = each((0..ROUNDS).map(round).collect());
            println!("extended poll, {batch} at a time: {each:.1} ns");
        }
    }

    #[test]
    #[ignore = "a measurement"]
    fn cost_of_poll_cq() {
        let harness = Harness::new(&[5]);
        let cq = cq(Some(CqRing::new(DEPTH).unwrap()));
        let lock = cq.as_ref().private().state();
        let mut device = Completer::of(&cq);
        for batch in [1, 16] {
            let mut entries = [MaybeUninit::<ibv_wc>::uninit(); 16];
            let round = |_| {
                for _ in 0..DEPTH {
                    let wqe_index = device.producer;
                    let cqe = virtio_rdma_ring_cqe { qp_num: 5, wqe_index, ..Default::default() };
                    assert!(device.complete_posted(&harness.numbers, cqe));
                }
                let start = Instant::now();
                let mut polled = 0;
                while polled < DEPTH as usize {
                    let entries = black_box(&mut entries[..batch]);
                    polled += lock.lock().ring().unwrap().poll(&harness.numbers, entries);
                }
                start.elapsed().as_nanos()
            };
            let each = each((0..ROUNDS).map(round).collect());
            println!("poll_cq, {batch} at a time: {each:.1} ns");
        }
    }
}

/// A QP between several threads of a program and the device.
mod traffic {
    use super::*;
    use crate::{
        errno::Errno,
        object::Ref,
        wr::{List, tests::list},
    };
    use std::{collections::BTreeSet, env, sync::Mutex, thread};

    /// Many threads use an object.
    struct Shared<'a, T>(Ref<'a, T>);

    // SAFETY: verbs may be called from any thread.
    unsafe impl<T> Sync for Shared<'_, T> {}

    const SENDERS: u64 = 3;
    const DEPTH: u32 = 16;

    /// Rounds of a test, TIMES as many if the environment has that.
    fn rounds() -> u64 {
        let times = env::var("TIMES").map_or(1, |times| times.parse().expect("a number"));
        20_000 * times
    }

    /// Whether a request asks for a completion.
    fn signaled(wr_id: u64) -> bool {
        wr_id.is_multiple_of(3)
    }

    /// Posts a request as soon as there is room.
    fn post(qp: Ref<'_, Qp>, wr_id: u64) {
        let send_flags = if signaled(wr_id) { IBV_SEND_SIGNALED } else { 0 };
        let mut wr = ibv_send_wr { wr_id, opcode: IBV_WR_SEND, send_flags, ..Default::default() };
        while let Err(error) = qp::post_send(qp, list(&mut wr)) {
            assert_eq!((error.errno, error.bad_wr), (Errno::ENOMEM, &raw mut wr));
            thread::yield_now();
        }
    }

    /// Carries out what is posted: completes what asks for it, and the last of
    /// each batch, without which a queue of unsignalled requests stays full.
    fn device(memory: Memory, ring: Ring, mut cq: Completer, count: u64) {
        let mut done = 0u32;
        while u64::from(done) < count {
            let producer = memory.word(0).load(Ordering::Acquire);
            assert!(producer.wrapping_sub(done) <= DEPTH);
            for index in done..producer {
                let wr_id: u64 = memory.read(ring, index, 0);
                if signaled(wr_id) || index + 1 == producer {
                    let cqe = virtio_rdma_ring_cqe {
                        wr_id,
                        qp_num: 5,
                        wqe_index: index,
                        ..Default::default()
                    };
                    while !cq.complete(cqe) {
                        thread::yield_now();
                    }
                }
            }
            done = producer;
            thread::yield_now();
        }
    }

    #[test]
    fn threads_share_a_qp() {
        let each = rounds();
        let cq = CqRing::new(DEPTH).unwrap();
        let completer = Completer::new(&cq);
        let mut harness = Harness::with_cq(&[], self::cq(Some(cq)));
        let cap = ibv_qp_cap { max_send_wr: DEPTH, ..Default::default() };
        let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_RC, cap, ..Default::default() };
        let qp = qp(&mut harness, &attr, 5);
        let request = qp.as_ref().private().request();
        let memory = Memory::at(request.buf_addr);
        let ring = Ring::new(size_of::<virtio_rdma_qp_ring>(), DEPTH, 48).unwrap();
        assert_eq!((ring.offset(), ring.stride() as u32), (request.sq_offset, request.sq_stride));

        let seen = Mutex::new(BTreeSet::new());
        let numbers = &harness.numbers;
        let cq = harness.cq.as_ref().private().state();
        let shared = &Shared(qp.as_ref());
        let stop = &AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    loop {
                        let last = stop.load(Ordering::Acquire);
                        let polled = poll(cq.lock().ring().unwrap(), numbers, 5);
                        for wc in &polled {
                            assert!(seen.lock().unwrap().insert(wc.wr_id), "twice");
                        }
                        if last && polled.is_empty() {
                            break;
                        }
                        thread::yield_now();
                    }
                });
            }
            let device = scope.spawn(move || device(memory, ring, completer, SENDERS * each));
            for sender in 0..SENDERS {
                scope.spawn(move || {
                    (sender * each..(sender + 1) * each).for_each(|wr_id| post(shared.0, wr_id));
                });
            }
            device.join().unwrap();
            stop.store(true, Ordering::Release);
        });
        let seen = seen.into_inner().unwrap();
        assert!((0..SENDERS * each).filter(|&id| signaled(id)).all(|id| seen.contains(&id)));
    }

    /// A device whose ring of CQEs moves while it completes.
    struct Moving(Mutex<(Completer, u32)>);

    impl Moving {
        /// Completes the next work request of QP 9, which nobody destroys.
        fn complete_next(&self, numbers: &Numbers) -> bool {
            let mut device = self.0.lock().unwrap();
            let (completer, index) = &mut *device;
            let cqe = virtio_rdma_ring_cqe {
                wr_id: u64::from(*index),
                qp_num: 9,
                wqe_index: *index,
                ..Default::default()
            };
            numbers.get(9).unwrap().send().post(index.wrapping_add(1));
            let placed = completer.complete(cqe);
            *index += u32::from(placed);
            placed
        }
    }

    /// Polling finds each completion of a QP once and in order, and none of a QP that is
    /// destroyed, whose number another one has by then, while the CQ is resized.
    #[test]
    fn destroy_and_resize_beside_poll() {
        let count = rounds() as u32;
        let ring = CqRing::new(32).unwrap();
        let moving = Moving(Mutex::new((Completer::new(&ring), 0)));
        let harness = Harness::with_cq(&[9], cq(Some(ring)));
        let numbers = &*harness.numbers;
        let shared = &Shared(harness.cq.as_ref());
        let lock = harness.cq.as_ref().private().state();
        // Incarnations of QP 7 that are gone, and the end.
        let (gone, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let incarnation = gone.load(Ordering::Relaxed) + 1;
                    let cq = shared.0;
                    let qp = Registration::new(numbers, 7, cq, cq).unwrap();
                    for wqe_index in 0..3 {
                        let wr_id = incarnation;
                        let qp_num = 7;
                        let cqe =
                            virtio_rdma_ring_cqe { wr_id, qp_num, wqe_index, ..Default::default() };
                        qp.progress().send().post(wqe_index + 1);
                        moving.0.lock().unwrap().0.complete(cqe);
                    }
                    drop(qp);
                    gone.store(incarnation, Ordering::Release);
                    thread::yield_now();
                }
            });
            scope.spawn(|| {
                let mut depth = 32;
                while !stop.load(Ordering::Acquire) {
                    depth = 96 - depth;
                    let mut new = CqRing::new(depth).unwrap();
                    let mut state = lock.lock();
                    let old = state.ring().unwrap();
                    let mut device = moving.0.lock().unwrap();
                    let mut completer = Completer::new(&new);
                    if device.0.move_to(&mut completer) {
                        device.0 = completer;
                        new.arm_as(old);
                        *old = new;
                    }
                    drop((state, device));
                    thread::yield_now();
                }
            });
            scope.spawn(|| {
                while moving.0.lock().unwrap().1 != count {
                    if !moving.complete_next(numbers) {
                        thread::yield_now();
                    }
                }
            });
            let mut expected = 0;
            while expected < u64::from(count) {
                let before = gone.load(Ordering::Acquire);
                for wc in poll(lock.lock().ring().unwrap(), numbers, 5) {
                    match wc.qp_num {
                        9 => {
                            assert_eq!(wc.wr_id, expected);
                            expected += 1;
                        }
                        _ => assert!(wc.wr_id > before, "of a QP that is destroyed"),
                    }
                }
                thread::yield_now();
            }
            stop.store(true, Ordering::Release);
        });
        assert_eq!(harness.progress(9).0, count);
    }

    #[test]
    fn post_in_a_state_that_cannot() {
        let mut harness = Harness::new(&[]);
        let cap = ibv_qp_cap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() };
        let attr = ibv_qp_init_attr_ex { qp_type: IBV_QPT_UC, cap, ..Default::default() };
        let qp = qp(&mut harness, &attr, 5);
        let mut send = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
        let mut recv = ibv_recv_wr::default();
        for state in IBV_QPS_RESET..=IBV_QPS_RTR {
            set_state(&qp, state);
            let error = qp::post_send(qp.as_ref(), list(&mut send)).unwrap_err();
            assert_eq!((error.errno, error.bad_wr), (Errno::EINVAL, &raw mut send));
            let posted = qp::post_recv(qp.as_ref(), list(&mut recv));
            assert_eq!(posted.is_ok(), state == IBV_QPS_INIT);
        }
        // SAFETY: no request is a valid list.
        assert!(qp::post_send(qp.as_ref(), unsafe { List::new(ptr::null_mut()) }).is_err());
    }
}
