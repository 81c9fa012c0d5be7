// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The log of libibverbs (`VERBS_LOG_LEVEL`, `VERBS_LOG_FILE`), which says why the provider refuses a verb.

use crate::{
    bindings::*,
    causes::Cause,
    errno::Errno,
    libibverbs::library,
    object::{Object, Ref},
};
use core::ffi::CStr;

/// An object as the log names it.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The context that the object belongs to.
    pub context: Ref<'a, ibv_context>,
    /// The kind of the object.
    pub kind: &'static CStr,
    /// The number of the object among those of its kind.
    pub number: u32,
}

impl Subject<'_> {
    /// Writes a cause to the log. libibverbs formats the text only if its level asks for it.
    #[cold]
    #[inline(never)]
    pub fn say(self, cause: Cause) {
        let context = self.context.as_ptr();
        // SAFETY: the context is live; libibverbs sets its device before it hands it out.
        unsafe { library(context).log(context, self.kind, self.number, cause) };
    }
}

/// An object of which a verb can be refused.
pub trait Refuse<'a>: Copy {
    /// Returns the object as the log names it.
    fn subject(self) -> Subject<'a>;

    /// Logs the reason for which a verb is refused. Returns the error for the program.
    #[cold]
    fn refuse(self, cause: Cause) -> Errno {
        self.subject().say(cause);
        cause.errno()
    }
}

/// A context has the number of the file that the program opened.
impl<'a> Refuse<'a> for Ref<'a, ibv_context> {
    fn subject(self) -> Subject<'a> {
        // SAFETY: the field is initialised, and constant from then on.
        let file = unsafe { (&raw const (*self.as_ptr()).cmd_fd).read() };
        Subject { context: self, kind: c"context", number: file as u32 }
    }
}

/// The kernel does not know a thread domain, which has the number of its context.
impl<'a> Refuse<'a> for Ref<'a, Object<ibv_td>> {
    fn subject(self) -> Subject<'a> {
        // SAFETY: the field is initialised, and constant from then on; the program closes the context after
        // it destroyed the domain.
        let context = unsafe { Ref::new((&raw const (*self.verbs().as_ptr()).context).read()) };
        Subject { kind: c"thread domain of context", ..context.subject() }
    }
}

/// Implements [`Refuse`] for objects that have a handle in the kernel.
macro_rules! by_handle {
    ($($type:ty, $kind:literal);* $(;)?) => {
        $(
            impl<'a> Refuse<'a> for Ref<'a, $type> {
                fn subject(self) -> Subject<'a> {
                    let at = self.as_ptr();
                    // SAFETY: the fields are initialised, and constant from then on; the program closes the
                    // context after it destroyed the object.
                    unsafe {
                        let context = Ref::new((&raw const (*at).context).read());
                        Subject { context, kind: $kind, number: (&raw const (*at).handle).read() }
                    }
                }
            }
        )*
    };
}
by_handle!(ibv_pd, c"PD"; ibv_mr, c"MR"; ibv_mw, c"MW"; ibv_cq, c"CQ"; ibv_srq, c"SRQ"; ibv_qp, c"QP");

/// A QP has the number that is known outside of the program.
impl<'a> Refuse<'a> for Ref<'a, Object<verbs_qp>> {
    fn subject(self) -> Subject<'a> {
        Subject { number: self.qp().number(), ..self.qp().subject() }
    }
}
