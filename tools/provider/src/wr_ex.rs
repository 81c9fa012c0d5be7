// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct ibv_qp_ex` (rdma-core libibverbs/verbs.h), by
//! which a program makes work requests: ibv_wr_post(3).
//!
//! As in [`crate::ops`], the program's contract vouches for the pointers. It also
//! says that all but ibv_wr_start() come from the thread that called
//! ibv_wr_start() last, and before its ibv_wr_complete() or ibv_wr_abort().

use crate::{
    batch::Batch,
    bindings::*,
    errno::{Errno, code},
    object::{Ah, Qp, Ref},
    wqe::{Body, Flush},
    wr::{Atomic, Rdma, named_bind},
};
use core::{
    ffi::{c_int, c_void},
    slice,
};

/// The operands of a work request that has none.
type Operands = ibv_send_wr__bindgen_ty_2;

/// The builders: what a program asks for at creation, and what it may post then.
const BUILDERS: [(u32, ibv_wr_opcode); 12] = [
    (IBV_QP_EX_WITH_SEND, IBV_WR_SEND),
    (IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM),
    (IBV_QP_EX_WITH_RDMA_WRITE, IBV_WR_RDMA_WRITE),
    (IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM),
    (IBV_QP_EX_WITH_RDMA_READ, IBV_WR_RDMA_READ),
    (IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP),
    (IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD),
    (IBV_QP_EX_WITH_LOCAL_INV, IBV_WR_LOCAL_INV),
    (IBV_QP_EX_WITH_BIND_MW, IBV_WR_BIND_MW),
    (IBV_QP_EX_WITH_SEND_WITH_INV, IBV_WR_SEND_WITH_INV),
    (IBV_QP_EX_WITH_FLUSH, IBV_WR_FLUSH),
    (IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_WR_ATOMIC_WRITE),
];

/// The `IBV_QP_EX_WITH_*` of the builders whose opcodes, as bits, a QP has.
pub fn builders(opcodes: u32) -> u64 {
    BUILDERS
        .iter()
        .filter(|(_, opcode)| opcodes & (1 << opcode) != 0)
        .fold(0, |flags, (flag, _)| flags | u64::from(*flag))
}

/// Makes a QP one that takes work requests by calls.
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

/// The batch that the calling thread makes, if the QP has rings.
///
/// # Safety
///
/// See the head of this file.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> Option<Batch<'a>> {
    // SAFETY: the QP is the first member of what `create_qp_ex` made.
    let qp: Ref<'a, Qp> = unsafe { Ref::new(qp.cast()) };
    let rings = qp.private().rings()?;
    // SAFETY: this thread called ibv_wr_start(), which kept the guard.
    let state = unsafe { rings.send().state().kept() };
    Some(Batch::new(qp, rings, state))
}

/// Does something with the batch that the calling thread makes.
///
/// # Safety
///
/// See the head of this file.
unsafe fn with(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut Batch<'_>)) {
    // SAFETY: by the contract of this function.
    if let Some(mut batch) = unsafe { batch(qp) } {
        act(&mut batch);
        batch.keep();
    }
}

/// Begins a work request; `ex` is immediate data or a key to invalidate.
///
/// # Safety
///
/// See the head of this file.
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
    // SAFETY: by the contract of this function.
    unsafe { with(qp, |batch| batch.begin(wr)) };
}

/// No remote side.
fn nothing() -> Operands {
    rdma(0, 0)
}

/// The remote side of an RDMA operation.
fn rdma(rkey: u32, remote_addr: u64) -> Operands {
    Operands { rdma: Rdma { remote_addr, rkey } }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the QP is the first member of what `create_qp_ex` made.
    let qp: Ref<'_, Qp> = unsafe { Ref::new(qp.cast()) };
    if let Some(rings) = qp.private().rings() {
        let mut batch = Batch::new(qp, rings, rings.send().state().lock());
        batch.start();
        batch.keep();
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: see the head of this file.
    code(unsafe { batch(qp) }.map_or(Err(Errno::EOPNOTSUPP), Batch::complete))
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: see the head of this file.
    if let Some(batch) = unsafe { batch(qp) } {
        batch.abort();
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_SEND, 0, nothing()) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: __be32) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_SEND_WITH_IMM, imm_data, nothing()) };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_RDMA_WRITE, 0, rdma(rkey, remote_addr)) };
}

unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: __be32,
) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_RDMA_WRITE_WITH_IMM, imm_data, rdma(rkey, remote_addr)) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: see the head of this file.
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
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_ATOMIC_CMP_AND_SWP, 0, Operands { atomic }) };
}

unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add: u64,
) {
    let atomic = Atomic { remote_addr, compare_add: add, swap: 0, rkey };
    // SAFETY: see the head of this file.
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
    // SAFETY: see the head of this file.
    unsafe {
        begin(qp, IBV_WR_ATOMIC_WRITE, 0, rdma(rkey, remote_addr));
        with(qp, |batch| batch.set_body(Ok(Body::Word(word))));
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
    // SAFETY: see the head of this file.
    unsafe {
        begin(qp, IBV_WR_FLUSH, 0, nothing());
        with(qp, |batch| batch.set_body(Ok(Body::Flush(flush))));
    }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_LOCAL_INV, invalidate_rkey, nothing()) };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_SEND_WITH_INV, invalidate_rkey, nothing()) };
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    bind_info: *const ibv_mw_bind_info,
) {
    // SAFETY: see the head of this file.
    unsafe { begin(qp, IBV_WR_BIND_MW, 0, nothing()) };
    // SAFETY: the program names a live window and MR, and lends the structure.
    let bind = unsafe { named_bind(mw, rkey, &*bind_info) };
    // SAFETY: see the head of this file.
    unsafe { with(qp, |batch| batch.set_body(bind.map(Body::Bind))) };
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: the program names a live AH, which is this provider's.
    let av = (!ah.is_null()).then(|| unsafe { Ref::<'_, Ah>::new(ah.cast()) }.private().av);
    // SAFETY: see the head of this file.
    unsafe {
        with(qp, |batch| match av {
            Some(av) => batch.set_address(av, remote_qpn, remote_qkey),
            None => batch.fail(Errno::EINVAL),
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: see the head of this file.
    unsafe { with(qp, |batch| batch.set_remote_srqn(remote_srqn)) };
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: see the head of this file.
    unsafe { with(qp, |batch| batch.set_sges(&[ibv_sge { addr, length, lkey }])) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge) {
    // SAFETY: the program's list has as many elements.
    let sges = unsafe { list(sg_list, num_sge) };
    // SAFETY: see the head of this file.
    unsafe { with(qp, |batch| batch.set_sges(sges)) };
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr, length };
    // SAFETY: as for the list of this one buffer.
    unsafe { wr_set_inline_data_list(qp, 1, &buffer) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    buf_list: *const ibv_data_buf,
) {
    // SAFETY: the program's list has as many elements.
    let buffers = unsafe { list(buf_list, num_buf) };
    let len = buffers.iter().fold(0usize, |len, buffer| len.saturating_add(buffer.length));
    // SAFETY: see the head of this file; the program's buffers are its to read.
    unsafe {
        with(qp, |batch| {
            batch.set_inline(len, |entry| {
                buffers
                    .iter()
                    .filter(|buffer| buffer.length != 0)
                    .try_for_each(|buffer| entry.put_bytes(buffer.addr.cast(), buffer.length))
            });
        });
    }
}

/// The program's array of `len` elements at `first`, which may be null if there
/// are none.
///
/// # Safety
///
/// There are as many, and they stay as they are for `'a`.
unsafe fn list<'a, T>(first: *const T, len: usize) -> &'a [T] {
    if first.is_null() || len > isize::MAX as usize / size_of::<T>() {
        return &[];
    }
    // SAFETY: by the contract of this function.
    unsafe { slice::from_raw_parts(first, len) }
}
