// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Objects for tests, made without a kernel.

use crate::{
    bindings::*,
    context::{Context, ContextPrivate},
    cq::{Cq, CqPrivate},
    cq_ex,
    cq_ring::CqRing,
    libibverbs::layout::CONTEXT_HEAD,
    model::{kernel::Kernel, opened},
    object::{Blank, Owned, Ref, Zeroable},
    qp::{Qp, QpPrivate},
    qp_table::{QpTable, Registration},
    srq::Srq,
};
use std::{mem::MaybeUninit, ptr};

/// A context with what libibverbs has in front of it.
#[repr(C)]
struct Whole {
    head: [usize; CONTEXT_HEAD / size_of::<usize>()],
    context: MaybeUninit<Context>,
}

// SAFETY: the structure consists of integers, and of memory that need not be initialised.
unsafe impl Zeroable for Whole {}

/// A context that only the provider knows.
pub struct TestContext(Owned<Whole>);

impl TestContext {
    /// Borrows the context.
    pub fn as_ref(&self) -> Ref<'_, Context> {
        // SAFETY: context() has completed the context.
        unsafe { self.0.as_ref().project(|whole| (&raw mut (*whole).context).cast()) }
    }
}

impl Drop for TestContext {
    fn drop(&mut self) {
        // SAFETY: the context is complete, and nobody uses it any more.
        unsafe { self.as_ref().finish() };
    }
}

/// Returns a context whose objects have rings.
pub fn context() -> TestContext {
    let description = virtio_rdma_uresp_alloc_ucontext {
        data_path: VIRTIO_RDMA_UDATA_PATH_RINGS,
        ..Default::default()
    };
    let whole = Owned::<Whole>::zeroed().unwrap();
    // A device lives as long as the test.
    let device = opened::device(opened::library()).into_raw();
    let at = whole.as_ref().as_ptr();
    let context = TestContext(whole);
    let verbs = context.as_ref().verbs().as_ptr();
    // SAFETY: nobody else uses the context, of which the part of libibverbs is zeroed.
    unsafe {
        // The last word in front of a context says how long the whole one is.
        *(*at).head.last_mut().unwrap() = CONTEXT_HEAD + size_of::<ibv_context>();
        (*verbs).device = device.cast();
        context.as_ref().complete(ContextPrivate::new(description).unwrap());
    }
    context
}

/// Puts a CQ into a context.
pub fn cq_of(cq: &Owned<Cq>, context: &TestContext) {
    // SAFETY: both are live, and nobody else uses the CQ.
    unsafe { (*cq.as_ref().cq().as_ptr()).context = context.as_ref().verbs().as_ptr() };
}

/// Puts a memory window into a context.
pub fn mw_of(mw: &Owned<ibv_mw>, context: &TestContext) {
    // SAFETY: both are live, and nobody else uses the window.
    unsafe { (*mw.as_ref().as_ptr()).context = context.as_ref().verbs().as_ptr() };
}

/// Puts a QP into a context, with a kernel behind it.
pub fn qp_of(qp: &Owned<Qp>, context: &TestContext, kernel: &Kernel) {
    let at = qp.as_ref().qp().as_ptr();
    // SAFETY: all are live, and nobody else uses the QP.
    unsafe {
        (*at).context = context.as_ref().verbs().as_ptr();
        (*at).qp_context = ptr::from_ref(kernel).cast_mut().cast();
    }
}

/// Puts an SRQ into a context, with a kernel behind it.
pub fn srq_of(srq: &Owned<Srq>, context: &TestContext, kernel: &Kernel) {
    let at = srq.as_ref().srq().as_ptr();
    // SAFETY: all are live, and nobody else uses the SRQ.
    unsafe {
        (*at).context = context.as_ref().verbs().as_ptr();
        (*at).srq_context = ptr::from_ref(kernel).cast_mut().cast();
    }
}

/// QPs of a context, and a CQ that they complete to, without a kernel.
pub struct Harness {
    pub registrations: Vec<Registration>,
    pub table: Box<QpTable>,
    pub cq: Owned<Cq>,
    context: TestContext,
}

impl Harness {
    /// Returns QPs with these numbers.
    pub fn new(numbers: &[u32]) -> Self {
        Self::with_cq(numbers, cq(None))
    }

    /// Returns QPs with these numbers that complete to a CQ.
    pub fn with_cq(numbers: &[u32], cq: Owned<Cq>) -> Self {
        let table = Box::new(QpTable::new().unwrap());
        let state = cq.as_ref().private().state();
        let register = |&number| Registration::new(&table, number, state, state);
        let registrations = numbers.iter().map(register).collect::<Result<_, _>>().unwrap();
        Self { registrations, table, cq, context: context() }
    }

    /// Returns how many sends and receives of a QP are done.
    pub fn progress(&self, number: u32) -> (u32, u32) {
        let progress = self.table.get(number).unwrap();
        (progress.send().done(), progress.recv().done())
    }
}

/// Returns a CQ that the kernel does not know.
pub fn cq(ring: Option<CqRing>) -> Owned<Cq> {
    let blank = Blank::<verbs_cq>::new().unwrap();
    blank.finish(CqPrivate::without_kernel(ring, 0))
}

/// Returns an extended CQ of a context, which the kernel does not know.
pub fn cq_ex(ring: CqRing, flags: u32, context: &TestContext) -> Owned<Cq> {
    let blank = Blank::<verbs_cq>::new().unwrap();
    let cq = blank.finish(CqPrivate::without_kernel(Some(ring), flags));
    cq_of(&cq, context);
    // SAFETY: the CQ is extended, and nobody else has it.
    unsafe { cq_ex::install(cq.as_ref()) };
    cq
}

/// Returns a QP of a harness in RTS, with a number and capabilities.
pub fn qp(harness: &mut Harness, attr: &ibv_qp_init_attr_ex, number: u32) -> Owned<Qp> {
    let cq = harness.cq.as_ref().private().state();
    let registration = Registration::new(&harness.table, number, cq, cq).unwrap();
    let qp = Blank::<verbs_qp>::new().unwrap();
    let qp = qp.finish(QpPrivate::without_kernel(attr, registration));
    // SAFETY: nobody else uses the QP.
    unsafe { (*qp.as_ref().qp().as_ptr()).context = harness.context.as_ref().verbs().as_ptr() };
    set_state(&qp, IBV_QPS_RTS);
    qp
}

/// Moves a QP to another state.
pub fn set_state(qp: &Owned<Qp>, state: ibv_qp_state) {
    // SAFETY: the object is the caller's alone.
    unsafe { (*qp.as_ref().qp().as_ptr()).state = state };
}

/// An object that the threads of a test share.
pub struct Shared<T>(pub T);

// SAFETY: programs may call verbs from any thread.
unsafe impl<T> Sync for Shared<T> {}
