// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct ibv_qp_ex` (rdma-core libibverbs/verbs.h), by
//! which a program makes work requests: ibv_wr_post(3).
//!
//! As in [`crate::ops`], the program's contract vouches for the pointers. It also
//! says that a program calls all functions but ibv_wr_start() in the thread that called
//! ibv_wr_start() last, and before that thread's ibv_wr_complete() or ibv_wr_abort().

use crate::{
    ah::Ah,
    bindings::*,
    errno::{Errno, Result, code},
    object::Ref,
    qp::Qp,
    wqe::{Body, Flush},
    wr::{Atomic, Rdma, named_bind},
    wr_builder::WrBuilder,
};
use core::{
    ffi::{c_int, c_void},
    slice,
};

/// The operands of a work request: the remote side, and those of an atomic.
type Operands = ibv_send_wr__bindgen_ty_2;

/// Installs the functions by which a program makes work requests on a QP.
///
/// # Safety
///
/// `qp` is a QP with rings that nobody else uses yet.
pub unsafe fn install(qp: Ref<'_, Qp>) {
    let verbs = qp.verbs().as_ptr();
    // SAFETY: the QP is the caller's alone; its union holds a `struct
    // ibv_qp_ex`, which begins with the QP.
    unsafe {
        (*verbs).comp_mask |= VERBS_QP_EX;
        let ex = verbs.cast::<ibv_qp_ex>();
        (*ex).wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
        (*ex).wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
        (*ex).wr_atomic_write = Some(wr_atomic_write);
        (*ex).wr_bind_mw = Some(wr_bind_mw);
        (*ex).wr_flush = Some(wr_flush);
        (*ex).wr_local_inv = Some(wr_local_inv);
        (*ex).wr_rdma_read = Some(wr_rdma_read);
        (*ex).wr_rdma_write = Some(wr_rdma_write);
        (*ex).wr_rdma_write_imm = Some(wr_rdma_write_imm);
        (*ex).wr_send = Some(wr_send);
        (*ex).wr_send_imm = Some(wr_send_imm);
        (*ex).wr_send_inv = Some(wr_send_inv);
        (*ex).wr_set_ud_addr = Some(wr_set_ud_addr);
        (*ex).wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
        (*ex).wr_set_inline_data = Some(wr_set_inline_data);
        (*ex).wr_set_inline_data_list = Some(wr_set_inline_data_list);
        (*ex).wr_set_sge = Some(wr_set_sge);
        (*ex).wr_set_sge_list = Some(wr_set_sge_list);
        (*ex).wr_start = Some(wr_start);
        (*ex).wr_complete = Some(wr_complete);
        (*ex).wr_abort = Some(wr_abort);
    }
}

/// Returns the builder of the calling thread, if the QP has rings.
///
/// # Safety
///
/// The QP is live and one of [`install`]; the calling thread called ibv_wr_start() on it, and since
/// then neither ibv_wr_complete() nor ibv_wr_abort().
unsafe fn builder<'a>(qp: *mut ibv_qp_ex) -> Option<WrBuilder<'a>> {
    // SAFETY: the QP is the first member of an object that `create_qp_ex` made.
    let qp: Ref<'a, Qp> = unsafe { Ref::new(qp.cast()) };
    let rings = qp.private().rings()?;
    // SAFETY: this thread called ibv_wr_start(), which kept the guard.
    let state = unsafe { rings.send().state().kept() };
    Some(WrBuilder::new(qp, rings, state))
}

/// Calls `act` with the builder of the calling thread.
///
/// # Safety
///
/// As [`builder`].
unsafe fn with(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut WrBuilder<'_>)) {
    // SAFETY: this thread called ibv_wr_start().
    if let Some(mut builder) = unsafe { builder(qp) } {
        act(&mut builder);
        builder.keep();
    }
}

/// Begins a work request; `ex` is immediate data or a key to invalidate.
///
/// # Safety
///
/// As [`builder`].
unsafe fn begin(qp: *mut ibv_qp_ex, opcode: ibv_wr_opcode, ex: u32, wr: Operands) {
    // SAFETY: the program has set both, and does not write to them now.
    let (wr_id, send_flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let wr = ibv_send_wr {
        wr_id,
        opcode,
        send_flags,
        __bindgen_anon_1: ibv_send_wr__bindgen_ty_1 { imm_data: ex },
        wr,
        ..Default::default()
    };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.begin(wr)) };
}

/// Returns the operands of a work request that has none.
fn nothing() -> Operands {
    rdma(0, 0)
}

/// Returns the operands of an RDMA operation.
fn rdma(rkey: u32, remote_addr: u64) -> Operands {
    Operands { rdma: Rdma { remote_addr, rkey } }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the QP is the first member of an object that `create_qp_ex` made.
    let qp: Ref<'_, Qp> = unsafe { Ref::new(qp.cast()) };
    if let Some(rings) = qp.private().rings() {
        let mut builder = WrBuilder::new(qp, rings, rings.send().state().lock());
        builder.start();
        builder.keep();
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: this thread called ibv_wr_start().
    code(unsafe { builder(qp) }.map_or(Err(Errno::EOPNOTSUPP), WrBuilder::complete))
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread called ibv_wr_start().
    if let Some(builder) = unsafe { builder(qp) } {
        builder.abort();
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND, 0, nothing()) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: __be32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND_WITH_IMM, imm_data, nothing()) };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_WRITE, 0, rdma(rkey, remote_addr)) };
}

unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: __be32,
) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_WRITE_WITH_IMM, imm_data, rdma(rkey, remote_addr)) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_READ, 0, rdma(rkey, remote_addr)) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    let atomic = Atomic { remote_addr, compare_add: compare, swap, rkey };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_ATOMIC_CMP_AND_SWP, 0, Operands { atomic }) };
}

unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add: u64,
) {
    let atomic = Atomic { remote_addr, compare_add: add, swap: 0, rkey };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, Operands { atomic }) };
}

unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    atomic_wr: *const c_void,
) {
    // SAFETY: the program lends 8 bytes.
    let word = unsafe { atomic_wr.cast::<[u8; 8]>().read_unaligned() };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        begin(qp, IBV_WR_ATOMIC_WRITE, 0, rdma(rkey, remote_addr));
        with(qp, |builder| builder.set_body(|| Ok(Body::Word(word))));
    }
}

unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let remote = Rdma { remote_addr, rkey };
    let flush = Flush { remote, length: length as u64, placement, level };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        begin(qp, IBV_WR_FLUSH, 0, nothing());
        with(qp, |builder| builder.set_body(|| Ok(Body::Flush(flush))));
    }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_LOCAL_INV, invalidate_rkey, nothing()) };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND_WITH_INV, invalidate_rkey, nothing()) };
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    bind_info: *const ibv_mw_bind_info,
) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_BIND_MW, 0, nothing()) };
    // The closure does not run after an error: the window keeps its key then.
    // SAFETY: the program names a live window and MR, and lends the structure.
    let bind = || unsafe { named_bind(mw, rkey, &*bind_info) }.map(Body::Bind);
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_body(bind)) };
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: the program names a live AH, which is this provider's.
    let av = (!ah.is_null()).then(|| unsafe { Ref::<'_, Ah>::new(ah.cast()) }.private().av);
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        with(qp, |builder| match av {
            Some(av) => builder.set_address(av, remote_qpn, remote_qkey),
            None => builder.fail(Errno::EINVAL),
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_remote_srqn(remote_srqn)) };
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_sges(&[ibv_sge { addr, length, lkey }])) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge) {
    // SAFETY: the program's list has as many elements, or is null.
    let sges = unsafe { list(sg_list, num_sge) };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        with(qp, |builder| match sges {
            Ok(sges) => builder.set_sges(sges),
            Err(errno) => builder.fail(errno),
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr, length };
    // SAFETY: the list has one buffer, and the program lends its bytes.
    unsafe { wr_set_inline_data_list(qp, 1, &buffer) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    buf_list: *const ibv_data_buf,
) {
    // SAFETY: the program's list has as many elements, or is null.
    let buffers = unsafe { list(buf_list, num_buf) };
    // SAFETY: this thread called ibv_wr_start(); the program may read its buffers.
    unsafe {
        with(qp, |builder| match buffers {
            Ok(buffers) => builder.set_inline(total(buffers), |entry| {
                buffers
                    .iter()
                    .filter(|buffer| buffer.length != 0)
                    .try_for_each(|buffer| entry.put_bytes(buffer.addr.cast(), buffer.length))
            }),
            Err(errno) => builder.fail(errno),
        });
    }
}

/// Returns how many bytes the buffers have together.
fn total(buffers: &[ibv_data_buf]) -> usize {
    buffers.iter().fold(0, |len: usize, buffer| len.saturating_add(buffer.length))
}

/// Returns the program's array of `len` elements at `first`, which may be null if `len` is 0.
///
/// # Errors
///
/// EINVAL for elements at a null pointer, or for more than memory can hold.
///
/// # Safety
///
/// Unless `first` is null, it points to `len` elements, which stay as they are for `'a`.
unsafe fn list<'a, T>(first: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if first.is_null() || len > isize::MAX as usize / size_of::<T>() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the pointer is not null, so the elements are there.
    Ok(unsafe { slice::from_raw_parts(first, len) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ah,
        model::{
            device::Memory,
            kernel::Kernel,
            objects::{self, Harness},
        },
        object::{Blank, Owned},
        ring::Ring,
    };
    use core::{
        mem::offset_of,
        sync::atomic::Ordering::{Acquire, SeqCst},
    };
    use std::ptr;

    const DEPTH: u32 = 4;
    const NUMBER: u32 = 5;

    /// A QP in RTS to which a program posts by calls, and what the device sees of its ring.
    struct Bench {
        qp: Owned<Qp>,
        ring: Ring,
        harness: Harness,
    }

    /// Calls an entry point of a QP.
    macro_rules! call {
        ($bench:expr, $call:ident $(, $argument:expr)*) => {{
            let at = $bench.ex();
            // SAFETY: calls and arguments are as ibv_wr_post(3) has them.
            unsafe { ((*at).$call.expect(stringify!($call)))(at $(, $argument)*) }
        }};
    }

    impl Bench {
        fn new(qp_type: ibv_qp_type) -> Self {
            let cap = ibv_qp_cap {
                max_send_wr: DEPTH,
                max_send_sge: 2,
                max_inline_data: 40,
                ..Default::default()
            };
            let attr = ibv_qp_init_attr_ex { qp_type, cap, ..Default::default() };
            let mut harness = Harness::new(&[]);
            let qp = objects::qp(&mut harness, &attr, NUMBER);
            // SAFETY: the QP has rings, and nobody else has it.
            unsafe { install(qp.as_ref()) };
            let stride = crate::wqe::send_header(qp_type.into()) + 40;
            let ring = Ring::new(size_of::<virtio_rdma_qp_ring>(), DEPTH, stride).unwrap();
            Self { qp, ring, harness }
        }

        fn ex(&self) -> *mut ibv_qp_ex {
            self.qp.as_ref().as_ptr().cast()
        }

        /// Sets the `wr_id` and the flags of the next work request.
        fn set(&self, wr_id: u64, flags: u32) {
            // SAFETY: the QP is live, and its program this thread.
            unsafe { ((*self.ex()).wr_id, (*self.ex()).wr_flags) = (wr_id, flags) };
        }

        fn start(&self) {
            call!(self, wr_start);
        }

        fn complete(&self) -> c_int {
            call!(self, wr_complete)
        }

        fn send(&self, wr_id: u64) {
            self.set(wr_id, IBV_SEND_SIGNALED);
            call!(self, wr_send);
        }

        /// Returns whether another thread can post.
        fn is_open(&self) -> bool {
            !self.qp.as_ref().private().rings().unwrap().send().state().is_taken()
        }

        fn memory(&self) -> Memory {
            Memory::at(self.qp.as_ref().private().request().buf_addr)
        }

        /// Returns how many work requests the device was told of.
        fn told(&self) -> u32 {
            self.memory().word(0).load(Acquire)
        }

        fn read<T: Copy>(&self, index: u32, offset: usize) -> T {
            self.memory().read(self.ring, index, offset)
        }

        /// Posts the one work request that `make` makes. Returns it as the device sees it.
        fn posted<T: Copy>(&self, make: impl FnOnce()) -> T {
            let index = self.told();
            self.start();
            make();
            assert_eq!(self.complete(), 0);
            assert_eq!(self.told(), index + 1);
            self.harness.table.get(NUMBER).unwrap().send().set_done(index + 1);
            self.read(index, 0)
        }

        /// Checks that the calls of `make` fail after a valid work request: nothing is posted, the
        /// QP is free, and the next work request is posted.
        fn refused(&self, make: impl FnOnce(), errno: Errno) {
            let index = self.told();
            self.start();
            self.send(1);
            make();
            assert_eq!((self.complete(), self.told()), (errno.get(), index));
            assert!(self.is_open());
            let next: virtio_rdma_ring_sq_wqe = self.posted(|| self.send(8));
            assert_eq!((next.wr_id, next.num_sge, next.inline_len), (8, 0, 0));
        }
    }

    const FLAGS: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;

    /// Each builder makes the work request that its name says, with the program's `wr_id`, flags
    /// and operands, each in its place.
    #[test]
    fn each_builder() {
        type Build = fn(&Bench);
        type Expected = (ibv_wr_opcode, u32, u32, u64, u64, u64);
        let bench = Bench::new(IBV_QPT_RC);
        let (rkey, remote) = (0x1111_2222, 0x3333_4444_5555_6666);
        let builders: [(Build, Expected); 10] = [
            (|b| call!(b, wr_send), (IBV_WR_SEND, 0, 0, 0, 0, 0)),
            (
                |b| call!(b, wr_send_imm, 0x0102_0304),
                (IBV_WR_SEND_WITH_IMM, 0x0102_0304, 0, 0, 0, 0),
            ),
            (
                |b| call!(b, wr_send_inv, 0x0a0b_0c0d),
                (IBV_WR_SEND_WITH_INV, 0x0a0b_0c0d, 0, 0, 0, 0),
            ),
            (|b| call!(b, wr_local_inv, 0x0a0b_0c0d), (IBV_WR_LOCAL_INV, 0x0a0b_0c0d, 0, 0, 0, 0)),
            (
                |b| call!(b, wr_rdma_write, 0x1111_2222, 0x3333_4444_5555_6666),
                (IBV_WR_RDMA_WRITE, 0, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_rdma_write_imm, 0x1111_2222, 0x3333_4444_5555_6666, 7),
                (IBV_WR_RDMA_WRITE_WITH_IMM, 7, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_rdma_read, 0x1111_2222, 0x3333_4444_5555_6666),
                (IBV_WR_RDMA_READ, 0, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_atomic_cmp_swp, 0x1111_2222, 0x3333_4444_5555_6666, 8, 9),
                (IBV_WR_ATOMIC_CMP_AND_SWP, 0, rkey, remote, 8, 9),
            ),
            (
                |b| call!(b, wr_atomic_fetch_add, 0x1111_2222, 0x3333_4444_5555_6666, 8),
                (IBV_WR_ATOMIC_FETCH_AND_ADD, 0, rkey, remote, 8, 0),
            ),
            (
                |b| {
                    // At an odd address, as the program may have it anywhere.
                    let word = [0, 1, 2, 3, 4, 5, 6, 7, 8u8];
                    let at = word[1..].as_ptr().cast();
                    call!(b, wr_atomic_write, 0x1111_2222, 0x3333_4444_5555_6666, at);
                },
                (IBV_WR_ATOMIC_WRITE, 0, rkey, remote, 0x0807_0605_0403_0201, 0),
            ),
        ];
        for (wr_id, (build, expected)) in (1 << 40..).zip(builders) {
            let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
                bench.set(wr_id, FLAGS);
                build(&bench);
            });
            // SAFETY: both are integers of one size.
            let ex = unsafe { wqe.ex.imm_data };
            let operands = (wqe.rkey, wqe.remote_addr, wqe.compare_add, wqe.swap);
            let (opcode, expected_ex, rkey, remote, compare_add, swap) = expected;
            assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (wr_id, opcode));
            assert_eq!((ex, u32::from(wqe.send_flags)), (expected_ex, FLAGS), "{opcode}");
            assert_eq!(operands, (rkey, remote, compare_add, swap), "{opcode}");
            assert_eq!((wqe.num_sge, wqe.inline_len), (0, 0));
        }
    }

    #[test]
    fn flushes() {
        let bench = Bench::new(IBV_QPT_RC);
        let wqe: virtio_rdma_ring_flush_wqe = bench.posted(|| {
            bench.set(1 << 40, FLAGS);
            call!(bench, wr_flush, 2, 3 << 40, 4 << 40, 5, 1);
        });
        assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (1 << 40, IBV_WR_FLUSH));
        assert_eq!((wqe.rkey, wqe.remote_addr, wqe.length), (2, 3 << 40, 4 << 40));
        assert_eq!((wqe.type_, wqe.level, u32::from(wqe.send_flags)), (5, 1, FLAGS));
    }

    fn sge(addr: u64) -> ibv_sge {
        ibv_sge { addr, length: addr as u32 + 1, lkey: addr as u32 + 2 }
    }

    /// SGEs of a list or alone stand behind the header in the order of the list.
    #[test]
    fn sges_behind_the_header() {
        let bench = Bench::new(IBV_QPT_RC);
        let header = size_of::<virtio_rdma_ring_sq_wqe>();
        let list = [sge(10), sge(20)];
        for len in 0..=2 {
            let index = bench.told();
            let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
                bench.set(1, 0);
                call!(bench, wr_rdma_write, 1, 2);
                call!(bench, wr_set_sge_list, len, list.as_ptr());
            });
            assert_eq!((usize::from(wqe.num_sge), wqe.inline_len), (len, 0));
            for (place, sge) in list[..len].iter().enumerate() {
                let got: virtio_rdma_sge = bench.read(index, header + 16 * place);
                assert_eq!((got.addr, got.length, got.lkey), (sge.addr, sge.length, sge.lkey));
            }
        }
        let index = bench.told();
        let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
            bench.set(1, 0);
            call!(bench, wr_send);
            call!(bench, wr_set_sge, 7, 8 << 40, 9);
        });
        let got: virtio_rdma_sge = bench.read(index, header);
        assert_eq!(wqe.num_sge, 1);
        assert_eq!((got.addr, got.length, got.lkey), (8 << 40, 9, 7));
        // A list of none may be nowhere.
        let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
            bench.set(1, 0);
            call!(bench, wr_send);
            call!(bench, wr_set_sge_list, 0, ptr::null());
        });
        assert_eq!(wqe.num_sge, 0);
    }

    fn buffer(data: &[u8]) -> ibv_data_buf {
        ibv_data_buf { addr: data.as_ptr().cast_mut().cast(), length: data.len() }
    }

    /// Inline data are copied when the setter is called: the program may use its memory at once.
    /// Buffers follow each other without a gap, and one without bytes may be nowhere.
    #[test]
    fn inline_data_behind_the_header() {
        let bench = Bench::new(IBV_QPT_RC);
        let header = size_of::<virtio_rdma_ring_sq_wqe>();
        for len in [0, 1, 7, 16, 40] {
            let mut data: Vec<u8> = (1..=len as u8).collect();
            let index = bench.told();
            let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
                bench.set(1, IBV_SEND_SIGNALED);
                call!(bench, wr_send);
                call!(bench, wr_set_inline_data, data.as_mut_ptr().cast(), len);
                data.fill(0xff);
            });
            assert_eq!((wqe.num_sge, usize::from(wqe.inline_len)), (0, len));
            let flags = u32::from(wqe.send_flags);
            assert_eq!(flags, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
            let got = bench.memory().bytes(bench.ring, index, header, len);
            assert_eq!(got, (1..=len as u8).collect::<Vec<_>>());
        }
        let none = ibv_data_buf { addr: ptr::null_mut(), length: 0 };
        let (first, second) = ([1u8, 2, 3], [4u8; 37]);
        let list = [buffer(&first), none, buffer(&second)];
        let index = bench.told();
        let wqe: virtio_rdma_ring_sq_wqe = bench.posted(|| {
            bench.set(1, 0);
            call!(bench, wr_rdma_write_imm, 1, 2, 3);
            call!(bench, wr_set_inline_data_list, 3, list.as_ptr());
        });
        assert_eq!(wqe.inline_len, 40);
        let got = bench.memory().bytes(bench.ring, index, header, 40);
        assert_eq!(got, [&first[..], &second[..]].concat());
    }

    /// Returns an AH with an address vector.
    fn address(n: u8) -> Owned<Ah> {
        let av = virtio_rdma_av { dmac: [n; 6], ..Default::default() };
        Blank::<ibv_ah>::new().unwrap().finish(ah::Private { av })
    }

    /// The setters of a work request may be called in any order, and each counts for the work
    /// request that was begun last.
    #[test]
    fn setters_in_any_order() {
        let bench = Bench::new(IBV_QPT_UD);
        let handle = address(9);
        let ah: *mut ibv_ah = handle.as_ref().as_ptr().cast();
        for address_first in [false, true] {
            let index = bench.told();
            let wqe: virtio_rdma_ring_ud_wqe = bench.posted(|| {
                bench.set(1, 0);
                call!(bench, wr_send_imm, 4);
                if address_first {
                    call!(bench, wr_set_ud_addr, ah, 22, 33);
                }
                call!(bench, wr_set_sge, 7, 8, 9);
                if !address_first {
                    call!(bench, wr_set_ud_addr, ah, 22, 33);
                }
            });
            assert_eq!((wqe.remote_qpn, wqe.remote_qkey, wqe.av.dmac), (22, 33, [9; 6]));
            assert_eq!((wqe.num_sge, u32::from(wqe.opcode)), (1, IBV_WR_SEND_WITH_IMM));
            let got: virtio_rdma_sge = bench.read(index, size_of_val(&wqe));
            assert_eq!((got.addr, got.length, got.lkey), (8, 9, 7));
        }

        let bench = Bench::new(IBV_QPT_XRC_SEND);
        for number_first in [false, true] {
            let index = bench.told();
            let data = [6u8; 16];
            let wqe: virtio_rdma_ring_xrc_wqe = bench.posted(|| {
                bench.set(1, 0);
                call!(bench, wr_send);
                if number_first {
                    call!(bench, wr_set_xrc_srqn, 44);
                }
                call!(bench, wr_set_inline_data, data.as_ptr().cast_mut().cast(), 16);
                if !number_first {
                    call!(bench, wr_set_xrc_srqn, 44);
                }
            });
            assert_eq!((wqe.remote_srqn, wqe.base.inline_len), (44, 16));
            assert_eq!(bench.memory().bytes(bench.ring, index, size_of_val(&wqe), 16), data);
        }
    }

    /// Each work request has its own `wr_id`, flags and data. The device is told of all of them at
    /// the end; until then no other thread has the send queue.
    #[test]
    fn a_batch() {
        let bench = Bench::new(IBV_QPT_RC);
        bench.start();
        for n in 0..u64::from(DEPTH) {
            bench.set(n, if n % 2 == 0 { 0 } else { IBV_SEND_SIGNALED });
            call!(bench, wr_rdma_write, n as u32, n + 1);
            call!(bench, wr_set_sge, n as u32 + 2, n + 3, n as u32 + 4);
            assert!(!bench.is_open());
        }
        assert_eq!(bench.told(), 0);
        assert_eq!(bench.complete(), 0);
        assert!(bench.is_open());
        assert_eq!(bench.told(), DEPTH);
        for n in 0..DEPTH {
            let wqe: virtio_rdma_ring_sq_wqe = bench.read(n, 0);
            assert_eq!((wqe.wr_id, wqe.rkey, wqe.remote_addr), (n.into(), n, u64::from(n) + 1));
            assert_eq!(u32::from(wqe.send_flags), n % 2 * IBV_SEND_SIGNALED);
            let got: virtio_rdma_sge = bench.read(n, size_of_val(&wqe));
            assert_eq!((got.lkey, got.addr, got.length), (n + 2, u64::from(n) + 3, n + 4));
        }
    }

    /// ibv_wr_complete(3) returns the error of a call that failed, and no work request is posted.
    #[test]
    fn errors_come_at_the_end() {
        let bench = Bench::new(IBV_QPT_RC);
        let einval = Errno::EINVAL;
        let list = [sge(1), sge(2), sge(3)];
        let data = [0u8; 41];
        let at: *mut c_void = data.as_ptr().cast_mut().cast();
        bench.refused(|| call!(bench, wr_set_sge_list, 3, list.as_ptr()), einval);
        bench.refused(|| call!(bench, wr_set_inline_data, at, 41), einval);
        let buffers = [buffer(&data[..21]), buffer(&data[..20])];
        bench.refused(|| call!(bench, wr_set_inline_data_list, 2, buffers.as_ptr()), einval);
        let twice = || {
            call!(bench, wr_set_sge, 1, 2, 3);
            call!(bench, wr_set_inline_data, at, 1);
        };
        bench.refused(twice, einval);
        let flags = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            call!(bench, wr_send);
        };
        bench.refused(flags, einval);
        bench.refused(|| call!(bench, wr_set_ud_addr, ptr::null_mut(), 1, 2), einval);
        bench.refused(|| (0..DEPTH.into()).for_each(|id| bench.send(id)), Errno::ENOMEM);
        let read = || {
            call!(bench, wr_rdma_read, 1, 2);
            call!(bench, wr_set_inline_data, at, 8);
        };
        bench.refused(read, einval);
        let invalidate = || {
            call!(bench, wr_flush, 1, 2, 3, 1, 0);
            call!(bench, wr_set_sge, 1, 2, 3);
        };
        bench.refused(invalidate, einval);
        // The first error counts.
        let both = || {
            (0..DEPTH.into()).for_each(|id| bench.send(id));
            call!(bench, wr_set_sge_list, 3, list.as_ptr());
        };
        bench.refused(both, Errno::ENOMEM);
    }

    /// A null pointer with a length, and a length that no memory can hold, are an error and not an
    /// empty list.
    #[test]
    fn lists_that_cannot_be() {
        let bench = Bench::new(IBV_QPT_RC);
        let (list, data) = ([sge(1)], [1u8; 8]);
        let buffers = [buffer(&data)];
        for (len, sges, bufs) in [
            (1, ptr::null(), ptr::null()),
            (usize::MAX, ptr::null(), ptr::null()),
            (usize::MAX, list.as_ptr(), buffers.as_ptr()),
            (usize::MAX / 2, list.as_ptr(), buffers.as_ptr()),
        ] {
            bench.refused(|| call!(bench, wr_set_sge_list, len, sges), Errno::EINVAL);
            bench.refused(|| call!(bench, wr_set_inline_data_list, len, bufs), Errno::EINVAL);
        }
    }

    /// A setter, or a builder of another type of QP, does not make a work request.
    #[test]
    fn calls_out_of_place() {
        let bench = Bench::new(IBV_QPT_RC);
        let data = [0u8; 8];
        type Call<'a> = &'a dyn Fn();
        let calls: [Call<'_>; 5] = [
            &|| call!(bench, wr_set_sge, 1, 2, 3),
            &|| call!(bench, wr_set_sge_list, 0, ptr::null()),
            &|| call!(bench, wr_set_inline_data, data.as_ptr().cast_mut().cast(), 8),
            &|| call!(bench, wr_set_xrc_srqn, 1),
            &|| call!(bench, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2),
        ];
        for call in calls {
            bench.start();
            call();
            assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        }
        let datagrams = Bench::new(IBV_QPT_UD);
        datagrams.start();
        call!(datagrams, wr_rdma_read, 1, 2);
        assert_eq!((datagrams.complete(), datagrams.told()), (EINVAL as c_int, 0));
        // Each datagram needs its own destination, and each message of XRC its own SRQ.
        for qp_type in [IBV_QPT_UD, IBV_QPT_XRC_SEND] {
            let bench = Bench::new(qp_type);
            bench.start();
            for set in [true, false] {
                bench.send(1);
                if set && qp_type == IBV_QPT_UD {
                    call!(bench, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2);
                } else if set {
                    call!(bench, wr_set_xrc_srqn, 1);
                }
            }
            assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        }
    }

    /// No work request is posted after ibv_wr_abort(3), after an error or without one, and the send
    /// queue is free.
    #[test]
    fn abort() {
        let bench = Bench::new(IBV_QPT_RC);
        let list = [sge(1); 3];
        for with_error in [false, true] {
            bench.start();
            (0..DEPTH.into()).for_each(|id| bench.send(id));
            if with_error {
                call!(bench, wr_set_sge_list, 3, list.as_ptr());
            }
            assert!(!bench.is_open());
            call!(bench, wr_abort);
            assert!(bench.is_open());
            assert_eq!(bench.told(), 0);
        }
        bench.start();
        (10..10 + u64::from(DEPTH)).for_each(|id| bench.send(id));
        assert_eq!((bench.complete(), bench.told()), (0, DEPTH));
        let ids: Vec<u64> = (0..DEPTH).map(|index| bench.read(index, 0)).collect();
        assert_eq!(ids, [10, 11, 12, 13]);
        // A work request that was begun does not end up in the next batch.
        bench.harness.table.get(NUMBER).unwrap().send().set_done(DEPTH);
        bench.start();
        bench.send(20);
        call!(bench, wr_set_sge, 1, 2, 3);
        call!(bench, wr_abort);
        bench.start();
        assert_eq!((bench.complete(), bench.told()), (0, DEPTH));
    }

    /// A QP that is not in a state to send refuses all work requests at the end.
    #[test]
    fn a_state_that_cannot_send() {
        let bench = Bench::new(IBV_QPT_RC);
        bench.start();
        bench.send(1);
        objects::set_state(&bench.qp, IBV_QPS_INIT);
        assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        objects::set_state(&bench.qp, IBV_QPS_RTS);
        assert!(bench.is_open());
        assert_eq!(bench.posted::<u64>(|| bench.send(2)), 2);
    }

    /// ibv_wr_complete(3) rings the doorbell of a device that sleeps once. Work requests that are
    /// refused or aborted do not ring it.
    #[test]
    fn one_doorbell_for_a_batch() {
        let context = objects::context();
        let kernel = Box::<Kernel>::default();
        let bench = Bench::new(IBV_QPT_RC);
        objects::qp_of(&bench.qp, &context, &kernel);
        let memory = bench.memory();
        let asleep = || memory.word(offset_of!(virtio_rdma_qp_ring, sq_wake));
        asleep().store(1, SeqCst);
        bench.start();
        (0..2).for_each(|id| bench.send(id));
        call!(bench, wr_abort);
        let csum = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            call!(bench, wr_send);
        };
        bench.start();
        csum();
        assert_eq!((bench.complete(), kernel.take_rung()), (EINVAL as c_int, 0));
        bench.start();
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 0));
        bench.start();
        (0..2).for_each(|id| bench.send(id));
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 1));
        bench.start();
        bench.send(3);
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 0));
        // A device that is gone.
        asleep().store(1, SeqCst);
        kernel.fail(1, EIO);
        bench.start();
        bench.send(4);
        assert_eq!(bench.complete(), EIO as c_int);
        assert!(bench.is_open());
    }

    /// A window and the MR that it is bound to.
    fn window(rkey: u32) -> (Owned<ibv_mw>, Owned<verbs_mr>) {
        let (mw, mr) = (Owned::<ibv_mw>::zeroed().unwrap(), Owned::<verbs_mr>::zeroed().unwrap());
        mw.as_ref().set_rkey(rkey);
        // SAFETY: the MR is live.
        unsafe { (*mr.as_ref().as_ptr()).ibv_mr.lkey = 0x77 };
        (mw, mr)
    }

    /// A binding names its window by the key that it has, the MR by its lkey, and the window has
    /// the new key from then on.
    #[test]
    fn windows_are_bound() {
        let bench = Bench::new(IBV_QPT_RC);
        let (mw, mr) = window(0x5ff);
        let info = ibv_mw_bind_info {
            mr: mr.as_ref().as_ptr().cast(),
            addr: 8 << 40,
            length: 9 << 40,
            mw_access_flags: IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED,
        };
        let wqe: virtio_rdma_ring_bind_wqe = bench.posted(|| {
            bench.set(1 << 40, IBV_SEND_SIGNALED);
            call!(bench, wr_bind_mw, mw.as_ref().as_ptr(), 0xabcd_ef12, &info);
        });
        assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (1 << 40, IBV_WR_BIND_MW));
        assert_eq!((wqe.mw_rkey, wqe.new_rkey, wqe.lkey), (0x5ff, 0x512, 0x77));
        assert_eq!((wqe.addr, wqe.length, wqe.access), (8 << 40, 9 << 40, info.mw_access_flags));
        assert_eq!(mw.as_ref().rkey(), 0x512);
        let none = ptr::null_mut();
        bench.refused(|| call!(bench, wr_bind_mw, none, 1, &info), Errno::EINVAL);
        let nowhere = ibv_mw_bind_info { mr: ptr::null_mut(), ..info };
        let mw = mw.as_ref();
        bench.refused(|| call!(bench, wr_bind_mw, mw.as_ptr(), 1, &nowhere), Errno::EINVAL);
        assert_eq!(mw.rkey(), 0x512);
    }

    /// A call that comes behind an error has no effect, and so a window keeps its key: no work
    /// request will change it.
    #[test]
    fn a_window_that_is_not_bound_keeps_its_key() {
        let bench = Bench::new(IBV_QPT_RC);
        let (mw, mr) = window(0x5ff);
        let info =
            ibv_mw_bind_info { mr: mr.as_ref().as_ptr().cast(), length: 8, ..Default::default() };
        let bind = || call!(bench, wr_bind_mw, mw.as_ref().as_ptr(), 1, &info);
        let behind_an_error = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            call!(bench, wr_send);
            bind();
        };
        bench.refused(behind_an_error, Errno::EINVAL);
        assert_eq!(mw.as_ref().rkey(), 0x5ff);
        // Its own flags, a queue that is full, or one that binds nothing.
        let flags = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            bind();
        };
        bench.refused(flags, Errno::EINVAL);
        let full = || {
            (1..DEPTH.into()).for_each(|id| bench.send(id));
            bind();
        };
        bench.refused(full, Errno::ENOMEM);
        assert_eq!(mw.as_ref().rkey(), 0x5ff);
        let datagrams = Bench::new(IBV_QPT_UD);
        datagrams.start();
        call!(datagrams, wr_bind_mw, mw.as_ref().as_ptr(), 1, &info);
        assert_eq!((datagrams.complete(), mw.as_ref().rkey()), (EINVAL as c_int, 0x5ff));
    }
}
