// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Posting lists of work requests through the kernel.
//!
//! ibv_cmd_post_send() and ibv_cmd_post_recv() marshal a whole list on the stack and
//! believe every count in it. So a list is posted in batches of a few copied,
//! checked requests, whose stack is bounded whatever the program passes.

use crate::{
    bindings::{ibv_qp, ibv_recv_wr, ibv_send_wr},
    errno::{Errno, Result},
    libibverbs::{ibv_cmd_post_recv, ibv_cmd_post_send},
    object::Ref,
    wr::{List, PostError, Request, WorkRequest},
};
use core::{marker::PhantomData, mem::MaybeUninit, ptr};

/// Requests of one command.
const BATCH: usize = 32;

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

    /// Adds a request. Returns whether there is room for another one.
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

    /// Links the copies to a list. Returns the first copy, or null.
    fn link(&mut self) -> *mut W {
        let mut next = ptr::null_mut();
        for copy in self.copies.iter_mut().take(self.len).rev() {
            // SAFETY: the first `len` copies were written by `push`.
            unsafe { copy.assume_init_mut() }.set_next(next);
            next = copy.as_mut_ptr();
        }
        next
    }

    /// Returns the program's request of which `copy` is a copy.
    fn origin(&self, copy: *mut W) -> *mut W {
        let base = self.copies.as_ptr();
        let index = (copy.addr().wrapping_sub(base.addr())) / size_of::<W>();
        // The kernel named another address: no request of this batch was posted.
        self.origins.get(index).copied().unwrap_or(self.origins[0])
    }

    /// Posts the requests that were added, and empties the batch.
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
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn post(self, qp: Ref<'_, ibv_qp>) -> Result<(), PostError<ibv_send_wr>> {
        let mut bad_wr = self.first;
        // SAFETY: the list ends, its counts were checked, and its SGE lists
        // and address handles are the program's.
        let ret = unsafe { ibv_cmd_post_send(qp.as_ptr(), self.first, &mut bad_wr) };
        Errno::check(ret).map_err(|errno| PostError { errno, bad_wr })
    }
}

impl Linked<'_, ibv_recv_wr> {
    /// Posts the list to the receive queue of `qp`.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn post(self, qp: Ref<'_, ibv_qp>) -> Result<(), PostError<ibv_recv_wr>> {
        let mut bad_wr = self.first;
        // SAFETY: the list ends, its counts were checked, and its SGE lists
        // are the program's.
        let ret = unsafe { ibv_cmd_post_recv(qp.as_ptr(), self.first, &mut bad_wr) };
        Errno::check(ret).map_err(|errno| PostError { errno, bad_wr })
    }
}

/// Posts a list: copies each request, has `check` look at the copy, which it may change,
/// and gives the copies to `post`, several at a time.
///
/// # Errors
///
/// The first error of `check` or `post`, with the request that it concerns.
pub fn post<W: WorkRequest>(
    list: List<'_, W>,
    check: impl Fn(&mut Request<'_, W>) -> Result,
    post: impl Fn(Linked<'_, W>) -> Result<(), PostError<W>>,
) -> Result<(), PostError<W>> {
    let mut batch = Batch::new();
    for mut request in list {
        if let Err(errno) = check(&mut request) {
            batch.flush(&post)?;
            return Err(PostError { errno, bad_wr: request.origin() });
        }
        if !batch.push(request.origin(), *request.wr()) {
            batch.flush(&post)?;
        }
    }
    batch.flush(&post)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::ibv_sge;
    use core::ffi::c_int;
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
        fn sg_list(&self) -> *mut ibv_sge {
            ptr::null_mut()
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
        let check = |request: &mut super::Request<'_, Request>| {
            if request.wr().id == invalid { Err(Errno::EINVAL) } else { Ok(()) }
        };
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
            assert_eq!(commands.len(), count.div_ceil(BATCH));
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
