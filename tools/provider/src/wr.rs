// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The program's work requests, and its lists of them.

use crate::{
    ah::Ah,
    bindings::{self, ibv_recv_wr, ibv_send_wr, ibv_sge},
    causes::{Cause, cause},
    errno::{Errno, Result},
    mw::Bind,
    object::Ref,
    ring::Writer,
};
use core::{ffi::c_int, marker::PhantomData, ptr, slice};

/// A send or a receive work request.
pub trait WorkRequest: Copy {
    /// Returns the next request of the list, or null.
    fn next(&self) -> *mut Self;
    /// Links the request to the next one.
    fn set_next(&mut self, next: *mut Self);
    /// Returns the length of the SGE list as the program gave it.
    fn num_sge(&self) -> c_int;
    /// Returns the SGE list as the program gave it.
    fn sg_list(&self) -> *mut ibv_sge;
}

macro_rules! work_request {
    ($type:ty) => {
        impl WorkRequest for $type {
            fn next(&self) -> *mut Self {
                self.next
            }
            fn set_next(&mut self, next: *mut Self) {
                self.next = next;
            }
            fn num_sge(&self) -> c_int {
                self.num_sge
            }
            fn sg_list(&self) -> *mut ibv_sge {
                self.sg_list
            }
        }
    };
}
work_request!(ibv_send_wr);
work_request!(ibv_recv_wr);

/// The program's list of work requests.
pub struct List<'a, W> {
    next: *mut W,
    lifetime: PhantomData<&'a W>,
}

impl<W> List<'_, W> {
    /// Takes the list that a program posts.
    ///
    /// # Safety
    ///
    /// `first` is null or points to a request as ibv_post_send(3) describes
    /// it, and so does each request's `next`; all stay as they are for the
    /// lifetime of the list.
    pub unsafe fn new(first: *mut W) -> Self {
        Self { next: first, lifetime: PhantomData }
    }
}

impl<W> List<'_, W> {
    /// Returns the first request, or null.
    pub fn first(&self) -> *mut W {
        self.next
    }
}

impl<'a, W: WorkRequest> Iterator for List<'a, W> {
    type Item = Request<'a, W>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next.is_null() {
            return None;
        }
        let origin = self.next;
        // SAFETY: a pointer in the list that is not null points to a request, which stays as it is.
        let wr = unsafe { origin.read() };
        self.next = wr.next();
        Some(Request { origin, wr, lifetime: PhantomData })
    }
}

/// A copy of a request of the program's list. It points to memory of the program, which stays as
/// it is for `'a`.
pub struct Request<'a, W> {
    origin: *mut W,
    wr: W,
    lifetime: PhantomData<&'a W>,
}

/// The remote side of RDMA operations.
pub type Rdma = bindings::ibv_send_wr__bindgen_ty_2__bindgen_ty_1;
/// The remote side and the operands of atomics.
pub type Atomic = bindings::ibv_send_wr__bindgen_ty_2__bindgen_ty_2;
/// The destination of a datagram.
pub type Datagram = bindings::ibv_send_wr__bindgen_ty_2__bindgen_ty_3;

impl<'a, W: WorkRequest> Request<'a, W> {
    /// Returns the address of the program's request.
    pub fn origin(&self) -> *mut W {
        self.origin
    }

    /// Returns the copy.
    pub fn wr(&self) -> &W {
        &self.wr
    }

    /// Returns the copy, to change it.
    pub fn wr_mut(&mut self) -> &mut W {
        &mut self.wr
    }

    /// Returns the SGE list.
    ///
    /// # Errors
    ///
    /// EINVAL if it has more than `max` entries, or if it has a length but its pointer is null.
    #[inline]
    pub fn sges(&self, max: u32) -> Result<&'a [ibv_sge], Cause> {
        let len = self.wr.num_sge();
        if len == 0 {
            return Ok(&[]);
        }
        if len < 0 || len.unsigned_abs() > max {
            let text =
                cause!(EINVAL, "a work request has %d SGEs, and the most is %u", len as u32, max);
            return Err(text);
        }
        if self.wr.sg_list().is_null() {
            return Err(cause!(EINVAL, "a work request has %d SGEs at a null pointer", len as u32));
        }
        // SAFETY: the pointer is not null, and the list has `num_sge` entries: ibv_post_send(3).
        Ok(unsafe { slice::from_raw_parts(self.wr.sg_list(), len.unsigned_abs() as usize) })
    }
}

/// A send work request that is not in a list: it points neither to another request nor to SGEs.
pub struct Single(Request<'static, ibv_send_wr>);

// SAFETY: the pointers of the request are null, and nobody follows those of its unions.
unsafe impl Send for Single {}

impl Single {
    /// Takes the opcode, the flags and the remote side of a request.
    pub fn new(wr: ibv_send_wr) -> Self {
        let wr = ibv_send_wr { next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0, ..wr };
        Self(Request { origin: ptr::null_mut(), wr, lifetime: PhantomData })
    }

    /// Returns the request.
    pub fn request(&self) -> &Request<'_, ibv_send_wr> {
        &self.0
    }

    /// Adds flags.
    pub fn add_flags(&mut self, flags: u32) {
        self.0.wr.send_flags |= flags;
    }

    /// Sets the QP that a datagram is for.
    pub fn set_destination(&mut self, remote_qpn: u32, remote_qkey: u32) {
        self.0.wr.wr.ud = Datagram { ah: ptr::null_mut(), remote_qpn, remote_qkey };
    }
}

impl<'a> Request<'a, ibv_send_wr> {
    /// Returns the remote side of an RDMA operation.
    pub fn rdma(&self) -> Rdma {
        // SAFETY: the variant consists of integers, for which all bytes are valid.
        unsafe { self.wr.wr.rdma }
    }

    /// Returns the remote side and the operands of an atomic.
    pub fn atomic(&self) -> Atomic {
        // SAFETY: the variant consists of integers, for which all bytes are valid.
        unsafe { self.wr.wr.atomic }
    }

    /// Returns the destination of a datagram.
    pub fn ud(&self) -> Datagram {
        // SAFETY: the variant consists of integers and a pointer, for which all bytes are valid.
        unsafe { self.wr.wr.ud }
    }

    /// Returns the SRQ at the remote side, for a request on an XRC initiator.
    pub fn remote_srqn(&self) -> u32 {
        // SAFETY: the variant is an integer.
        unsafe { self.wr.qp_type.xrc.remote_srqn }
    }

    /// Returns the immediate data, in network byte order.
    pub fn imm_data(&self) -> u32 {
        // SAFETY: the variant is an integer.
        unsafe { self.wr.__bindgen_anon_1.imm_data }
    }

    /// Returns the key to invalidate.
    pub fn invalidate_rkey(&self) -> u32 {
        // SAFETY: the variant is an integer.
        unsafe { self.wr.__bindgen_anon_1.invalidate_rkey }
    }

    /// Returns what a request binds a window to, and gives the window its next key.
    ///
    /// # Errors
    ///
    /// EINVAL without a window, or for bytes without an MR.
    pub fn bind(&self) -> Result<Bind, Cause> {
        // SAFETY: a request with this opcode has this variant: ibv_post_send(3).
        let bind = unsafe { self.wr.__bindgen_anon_2.bind_mw };
        // SAFETY: the program names a live window and a live MR, or null.
        unsafe { named_bind(bind.mw, bind.rkey, &bind.bind_info) }
    }

    /// Returns the address handle of a request on a UD QP, or `None` if it is null.
    pub fn ah(&self) -> Option<Ref<'a, Ah>> {
        let ah = self.ud().ah;
        // SAFETY: the pointer is not null, and the program names a live AH, which this provider
        // made: ibv_post_send(3).
        (!ah.is_null()).then(|| unsafe { Ref::new(ah.cast()) })
    }

    /// Copies the data that the SGEs of this request name to an entry.
    ///
    /// # Errors
    ///
    /// EINVAL if it does not fit, or as [`Self::sges`].
    #[inline]
    pub fn put_inline(&self, max_sge: u32, entry: &mut Writer<'_>) -> Result<(), Cause> {
        self.sges(max_sge)?.iter().filter(|sge| sge.length != 0).try_for_each(|sge| {
            let from = ptr::with_exposed_provenance(sge.addr as usize);
            // SAFETY: with IBV_SEND_INLINE, the program's SGEs name memory of
            // its own that it may read: ibv_post_send(3).
            unsafe { entry.put_bytes(from, sge.length as usize) }
        })
    }
}

/// Returns the binding of the window at `mw`, and gives the window its next key: programs read the
/// key there after they posted the request, whatever upper bits they asked for.
///
/// # Errors
///
/// EINVAL without a window, or for bytes without an MR.
///
/// # Safety
///
/// `mw` and `info.mr` each point to a live object, or are null.
pub unsafe fn named_bind(
    mw: *mut bindings::ibv_mw,
    new_rkey: u32,
    info: &bindings::ibv_mw_bind_info,
) -> Result<Bind, Cause> {
    // SAFETY: each pointer is null, or that of a live object.
    let (mw, mr) = unsafe { (Ref::optional(mw), Ref::optional(info.mr)) };
    let mw = mw.ok_or_else(|| cause!(EINVAL, "a work request binds no memory window"))?;
    if mr.is_none() && info.length != 0 {
        return Err(cause!(EINVAL, "a work request binds MW 0x%x without an MR", mw.rkey()));
    }
    let bind = Bind::new(mw, new_rkey, mr, info);
    mw.set_rkey(bind.new_rkey);
    Ok(bind)
}

/// The error of a list that was not posted to its end.
#[derive(Debug, PartialEq, Eq)]
pub struct PostError<W> {
    /// The reason.
    pub errno: Errno,
    /// The first request that was not posted, in the program's list.
    pub bad_wr: *mut W,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the list that begins with a request.
    pub fn list<W: WorkRequest>(first: &mut W) -> List<'_, W> {
        // SAFETY: the tests' requests are as ibv_post_send(3) describes them.
        unsafe { List::new(first) }
    }
}
