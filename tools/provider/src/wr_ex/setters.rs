// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Entry points that set the rest of a work request: its data, and where a message goes.

use super::current::with;
use crate::{
    ah::Ah,
    bindings::*,
    causes::{Cause, cause},
    errno::Result,
    object::Ref,
};
use core::{ffi::c_void, slice};

pub(super) unsafe extern "C" fn wr_set_ud_addr(
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
            None => builder.fail(cause!(EINVAL, "a datagram has no address handle")),
        });
    }
}

pub(super) unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_remote_srqn(remote_srqn)) };
}

pub(super) unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_sges(&[ibv_sge { addr, length, lkey }])) };
}

pub(super) unsafe extern "C" fn wr_set_sge_list(
    qp: *mut ibv_qp_ex,
    num_sge: usize,
    sg_list: *const ibv_sge,
) {
    // SAFETY: the program's list has as many elements, or is null.
    let sges = unsafe { list(sg_list, num_sge) };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        with(qp, |builder| match sges {
            Ok(sges) => builder.set_sges(sges),
            Err(cause) => builder.fail(cause),
        });
    }
}

pub(super) unsafe extern "C" fn wr_set_inline_data(
    qp: *mut ibv_qp_ex,
    addr: *mut c_void,
    length: usize,
) {
    let buffer = ibv_data_buf { addr, length };
    // SAFETY: the list has one buffer, and the program lends its bytes.
    unsafe { wr_set_inline_data_list(qp, 1, &buffer) };
}

pub(super) unsafe extern "C" fn wr_set_inline_data_list(
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
            Err(cause) => builder.fail(cause),
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
unsafe fn list<'a, T>(first: *const T, len: usize) -> Result<&'a [T], Cause> {
    if len == 0 {
        return Ok(&[]);
    }
    if first.is_null() || len > isize::MAX as usize / size_of::<T>() {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        return Err(cause!(EINVAL, "a list of %u elements is not in memory", len));
    }
    // SAFETY: the pointer is not null, so the elements are there.
    Ok(unsafe { slice::from_raw_parts(first, len) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::wr_ex::testbed::*;
    use std::ptr;

    /// SGEs of a list or alone stand behind the header in the order of the list.
    #[test]
    fn sges_behind_the_header() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let header = size_of::<virtio_rdma_ring_sq_wqe>();
        let list = [sge(10), sge(20)];
        for len in 0..=2 {
            let index = testbed.told();
            let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
                testbed.set(1, 0);
                call!(testbed, wr_rdma_write, 1, 2);
                call!(testbed, wr_set_sge_list, len, list.as_ptr());
            });
            assert_eq!((usize::from(wqe.num_sge), wqe.inline_len), (len, 0));
            for (place, sge) in list[..len].iter().enumerate() {
                let got: virtio_rdma_sge = testbed.read(index, header + 16 * place);
                assert_eq!((got.addr, got.length, got.lkey), (sge.addr, sge.length, sge.lkey));
            }
        }
        let index = testbed.told();
        let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
            testbed.set(1, 0);
            call!(testbed, wr_send);
            call!(testbed, wr_set_sge, 7, 8 << 40, 9);
        });
        let got: virtio_rdma_sge = testbed.read(index, header);
        assert_eq!(wqe.num_sge, 1);
        assert_eq!((got.addr, got.length, got.lkey), (8 << 40, 9, 7));
        // A list of none may be nowhere.
        let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
            testbed.set(1, 0);
            call!(testbed, wr_send);
            call!(testbed, wr_set_sge_list, 0, ptr::null());
        });
        assert_eq!(wqe.num_sge, 0);
    }

    /// Inline data are copied when the setter is called: the program may use its memory at once.
    /// Buffers follow each other without a gap, and one without bytes may be nowhere.
    #[test]
    fn inline_data_behind_the_header() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let header = size_of::<virtio_rdma_ring_sq_wqe>();
        for len in [0, 1, 7, 16, 40] {
            let mut data: Vec<u8> = (1..=len as u8).collect();
            let index = testbed.told();
            let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
                testbed.set(1, IBV_SEND_SIGNALED);
                call!(testbed, wr_send);
                call!(testbed, wr_set_inline_data, data.as_mut_ptr().cast(), len);
                data.fill(0xff);
            });
            assert_eq!((wqe.num_sge, usize::from(wqe.inline_len)), (0, len));
            let flags = u32::from(wqe.send_flags);
            assert_eq!(flags, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
            let got = testbed.memory().bytes(testbed.ring, index, header, len);
            assert_eq!(got, (1..=len as u8).collect::<Vec<_>>());
        }
        let none = ibv_data_buf { addr: ptr::null_mut(), length: 0 };
        let (first, second) = ([1u8, 2, 3], [4u8; 37]);
        let list = [buffer(&first), none, buffer(&second)];
        let index = testbed.told();
        let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
            testbed.set(1, 0);
            call!(testbed, wr_rdma_write_imm, 1, 2, 3);
            call!(testbed, wr_set_inline_data_list, 3, list.as_ptr());
        });
        assert_eq!(wqe.inline_len, 40);
        let got = testbed.memory().bytes(testbed.ring, index, header, 40);
        assert_eq!(got, [&first[..], &second[..]].concat());
    }

    /// The setters of a work request may be called in any order, and each counts for the work
    /// request that was begun last.
    #[test]
    fn setters_in_any_order() {
        let testbed = Testbed::new(IBV_QPT_UD);
        let handle = address(9);
        let ah: *mut ibv_ah = handle.as_ref().as_ptr().cast();
        for address_first in [false, true] {
            let index = testbed.told();
            let wqe: virtio_rdma_ring_ud_wqe = testbed.posted(|| {
                testbed.set(1, 0);
                call!(testbed, wr_send_imm, 4);
                if address_first {
                    call!(testbed, wr_set_ud_addr, ah, 22, 33);
                }
                call!(testbed, wr_set_sge, 7, 8, 9);
                if !address_first {
                    call!(testbed, wr_set_ud_addr, ah, 22, 33);
                }
            });
            assert_eq!((wqe.remote_qpn, wqe.remote_qkey, wqe.av.dmac), (22, 33, [9; 6]));
            assert_eq!((wqe.num_sge, u32::from(wqe.opcode)), (1, IBV_WR_SEND_WITH_IMM));
            let got: virtio_rdma_sge = testbed.read(index, size_of_val(&wqe));
            assert_eq!((got.addr, got.length, got.lkey), (8, 9, 7));
        }

        let testbed = Testbed::new(IBV_QPT_XRC_SEND);
        for number_first in [false, true] {
            let index = testbed.told();
            let data = [6u8; 16];
            let wqe: virtio_rdma_ring_xrc_wqe = testbed.posted(|| {
                testbed.set(1, 0);
                call!(testbed, wr_send);
                if number_first {
                    call!(testbed, wr_set_xrc_srqn, 44);
                }
                call!(testbed, wr_set_inline_data, data.as_ptr().cast_mut().cast(), 16);
                if !number_first {
                    call!(testbed, wr_set_xrc_srqn, 44);
                }
            });
            assert_eq!((wqe.remote_srqn, wqe.base.inline_len), (44, 16));
            assert_eq!(testbed.memory().bytes(testbed.ring, index, size_of_val(&wqe), 16), data);
        }
    }

    /// A null pointer with a length, and a length that no memory can hold, are an error and not an
    /// empty list.
    #[test]
    fn lists_that_cannot_be() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let (list, data) = ([sge(1)], [1u8; 8]);
        let buffers = [buffer(&data)];
        for (len, sges, bufs) in [
            (1, ptr::null(), ptr::null()),
            (usize::MAX, ptr::null(), ptr::null()),
            (usize::MAX, list.as_ptr(), buffers.as_ptr()),
            (usize::MAX / 2, list.as_ptr(), buffers.as_ptr()),
        ] {
            testbed.refused(|| call!(testbed, wr_set_sge_list, len, sges), Errno::EINVAL);
            testbed.refused(|| call!(testbed, wr_set_inline_data_list, len, bufs), Errno::EINVAL);
        }
    }
}
