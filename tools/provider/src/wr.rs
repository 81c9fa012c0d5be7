// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The program's lists of work requests.
//!
//! ibv_cmd_post_send() and its sibling marshal a whole list on the stack and
//! believe every count in it. So a list is posted in batches of a few copied,
//! checked requests, whose stack is bounded whatever the program passes.

use crate::{
    bindings::{self, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge},
    errno::{Errno, Result},
    object::Ref,
};
use core::{ffi::c_int, marker::PhantomData, mem::MaybeUninit, ptr};

/// Requests of one command.
const BATCH: usize = 32;

/// A send or a receive work request.
pub trait WorkRequest: Copy {
    /// The next request of the list, or null.
    fn next(&self) -> *mut Self;
    /// Links the request to the next one.
    fn set_next(&mut self, next: *mut Self);
    /// Length of the SGE list as the program gave it.
    fn num_sge(&self) -> c_int;
    /// Whether there is an SGE list.
    fn has_sg_list(&self) -> bool;
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
            fn has_sg_list(&self) -> bool {
                !self.sg_list.is_null()
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

impl<W: WorkRequest> Iterator for List<'_, W> {
    /// Where the program has the request, and a copy.
    type Item = (*mut W, W);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next.is_null() {
            return None;
        }
        let origin = self.next;
        // SAFETY: by the contract of `new`, a pointer in the list that is not
        // null points to a request.
        let wr = unsafe { origin.read() };
        self.next = wr.next();
        Some((origin, wr))
    }
}

/// Whether a request carries no data at all.
///
/// `wr` comes from a [`List`], and its `num_sge` was found valid.
pub fn is_empty(wr: &ibv_send_wr) -> bool {
    (0..usize::try_from(wr.num_sge).unwrap_or(0)).all(|i| {
        // SAFETY: the SGE list has `num_sge` entries: ibv_post_send(3).
        let sge: ibv_sge = unsafe { wr.sg_list.add(i).read() };
        sge.length == 0
    })
}

/// Whether a request on a UD QP names an address handle.
pub fn has_ah(wr: &ibv_send_wr) -> bool {
    // SAFETY: every byte pattern is a valid pointer to compare with null.
    !unsafe { wr.wr.ud.ah }.is_null()
}

/// Why a list was not posted to its end.
#[derive(Debug, PartialEq, Eq)]
pub struct PostError<W> {
    /// The reason.
    pub errno: Errno,
    /// The first request that was not posted, in the program's list.
    pub bad_wr: *mut W,
}

/// A few requests, copied and linked, on their way to the kernel.
pub struct Batch<W> {
    copies: [MaybeUninit<W>; BATCH],
    origins: [*mut W; BATCH],
    len: usize,
}

impl<W: WorkRequest> Batch<W> {
    fn new() -> Self {
        Self { copies: [MaybeUninit::uninit(); BATCH], origins: [ptr::null_mut(); BATCH], len: 0 }
    }

    /// Adds a request. Answers whether there is room for another.
    fn push(&mut self, origin: *mut W, wr: W) -> bool {
        if let (Some(copy), Some(slot)) =
            (self.copies.get_mut(self.len), self.origins.get_mut(self.len))
        {
            copy.write(wr);
            *slot = origin;
            self.len += 1;
        }
        self.len < BATCH
    }

    /// Links the copies to a list; its first one, or null.
    fn link(&mut self) -> *mut W {
        let mut next = ptr::null_mut();
        for copy in self.copies.iter_mut().take(self.len).rev() {
            // SAFETY: the first `len` copies were written by `push`.
            unsafe { copy.assume_init_mut() }.set_next(next);
            next = copy.as_mut_ptr();
        }
        next
    }

    /// The program's request behind one of the copies.
    fn origin(&self, copy: *mut W) -> *mut W {
        let base = self.copies.as_ptr();
        let index = (copy.addr().wrapping_sub(base.addr())) / size_of::<W>();
        // The kernel named none of ours: nothing of this batch is posted.
        self.origins.get(index).copied().unwrap_or(self.origins[0])
    }

    /// Posts what was pushed and starts anew.
    fn flush(
        &mut self,
        post: &impl Fn(Linked<'_, W>) -> Result<(), PostError<W>>,
    ) -> Result<(), PostError<W>> {
        if self.len == 0 {
            return Ok(());
        }
        let first = self.link();
        post(Linked { first, lifetime: PhantomData })
            .map_err(|error| PostError { bad_wr: self.origin(error.bad_wr), ..error })?;
        self.len = 0;
        Ok(())
    }
}

/// A linked list of checked copies.
pub struct Linked<'a, W> {
    first: *mut W,
    lifetime: PhantomData<&'a Batch<W>>,
}

impl Linked<'_, ibv_send_wr> {
    /// Posts the list to the send queue of `qp`.
    pub fn post(self, qp: Ref<'_, ibv_qp>) -> Result<(), PostError<ibv_send_wr>> {
        let mut bad_wr = self.first;
        // SAFETY: the list ends, its counts were checked, and its SGE lists
        // and address handles are the program's.
        let ret = unsafe { bindings::ibv_cmd_post_send(qp.as_ptr(), self.first, &mut bad_wr) };
        Errno::check(ret).map_err(|errno| PostError { errno, bad_wr })
    }
}

impl Linked<'_, ibv_recv_wr> {
    /// Posts the list to the receive queue of `qp`.
    pub fn post(self, qp: Ref<'_, ibv_qp>) -> Result<(), PostError<ibv_recv_wr>> {
        let mut bad_wr = self.first;
        // SAFETY: the list ends, its counts were checked, and its SGE lists
        // are the program's.
        let ret = unsafe { bindings::ibv_cmd_post_recv(qp.as_ptr(), self.first, &mut bad_wr) };
        Errno::check(ret).map_err(|errno| PostError { errno, bad_wr })
    }
}

/// Posts a list: each request is copied, put through `check`, which may change
/// the copy, and given to `post` together with others.
///
/// # Errors
///
/// The first error of `check` or `post`, with the request that it concerns.
pub fn post<W: WorkRequest>(
    list: List<'_, W>,
    check: impl Fn(&mut W) -> Result,
    post: impl Fn(Linked<'_, W>) -> Result<(), PostError<W>>,
) -> Result<(), PostError<W>> {
    let mut batch = Batch::new();
    for (origin, mut wr) in list {
        if let Err(errno) = check(&mut wr) {
            batch.flush(&post)?;
            return Err(PostError { errno, bad_wr: origin });
        }
        if !batch.push(origin, wr) {
            batch.flush(&post)?;
        }
    }
    batch.flush(&post)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[derive(Clone, Copy)]
    struct Request {
        next: *mut Request,
        id: usize,
    }

    impl WorkRequest for Request {
        fn next(&self) -> *mut Self {
            self.next
        }
        fn set_next(&mut self, next: *mut Self) {
            self.next = next;
        }
        fn num_sge(&self) -> c_int {
            0
        }
        fn has_sg_list(&self) -> bool {
            false
        }
    }

    /// Posts requests 0..count, of which `invalid` does not pass the check
    /// and `refused` is one that the kernel does not take. Answers the
    /// commands as lists of IDs, and the error with the request's ID.
    fn run(
        count: usize,
        invalid: usize,
        refused: usize,
    ) -> (Vec<Vec<usize>>, Option<(Errno, usize)>) {
        let mut requests: Vec<Request> =
            (0..count).map(|id| Request { next: ptr::null_mut(), id }).collect();
        let base = requests.as_mut_ptr();
        for id in 1..count {
            // SAFETY: both indices are within the vector.
            unsafe { (*base.add(id - 1)).next = base.add(id) };
        }
        let commands = RefCell::new(Vec::new());
        let kernel = |list: Linked<'_, Request>| {
            let mut taken = Vec::new();
            let mut next = list.first;
            let mut result = Ok(());
            while !next.is_null() {
                // SAFETY: `next` is in the list of copies.
                let wr = unsafe { next.read() };
                if wr.id == refused {
                    result = Err(PostError { errno: Errno::ENOMEM, bad_wr: next });
                    break;
                }
                taken.push(wr.id);
                next = wr.next;
            }
            commands.borrow_mut().push(taken);
            result
        };
        let check = |wr: &mut Request| if wr.id == invalid { Err(Errno::EINVAL) } else { Ok(()) };
        let first = if count == 0 { ptr::null_mut() } else { base };
        // SAFETY: the list is valid and outlives the call.
        let result = post(unsafe { List::new(first) }, check, kernel);
        // SAFETY: the error names a request of the program's list.
        let error = result.err().map(|error| (error.errno, unsafe { (*error.bad_wr).id }));
        (commands.into_inner(), error)
    }

    const NONE: usize = usize::MAX;

    #[test]
    fn list_is_posted_once_and_in_order() {
        for count in [0, 1, 2, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH, 1000] {
            let (commands, error) = run(count, NONE, NONE);
            assert_eq!(error, None);
            assert!(commands.iter().all(|command| (1..=BATCH).contains(&command.len())));
            assert_eq!(commands.concat(), (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn invalid_request_stops_behind_its_predecessors() {
        for invalid in [0, 1, BATCH - 1, BATCH, BATCH + 1, 99] {
            let (commands, error) = run(100, invalid, NONE);
            assert_eq!(error, Some((Errno::EINVAL, invalid)));
            assert_eq!(commands.concat(), (0..invalid).collect::<Vec<_>>());
        }
    }

    #[test]
    fn refused_request_is_named_in_the_program_s_list() {
        for refused in [0, 1, BATCH - 1, BATCH, BATCH + 1, 99] {
            let (commands, error) = run(100, NONE, refused);
            assert_eq!(error, Some((Errno::ENOMEM, refused)));
            assert_eq!(commands.concat(), (0..refused).collect::<Vec<_>>());
        }
    }

    #[test]
    fn earlier_error_comes_first() {
        assert_eq!(run(10, 7, 3).1, Some((Errno::ENOMEM, 3)));
        assert_eq!(run(10, 3, 7).1, Some((Errno::EINVAL, 3)));
    }
}
