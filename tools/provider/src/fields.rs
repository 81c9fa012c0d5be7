// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The fields of libibverbs' objects that the provider reads and writes.

use crate::{
    bindings::*,
    object::{Object, Ref},
};

impl<'a> Ref<'a, ibv_context> {
    /// Returns the whole context, of which this is the first member.
    pub fn whole(self) -> Ref<'a, Object<ibv_context>> {
        // SAFETY: libibverbs calls this provider only with contexts that the provider opened, which
        // are whole ones.
        unsafe { Ref::new(self.as_ptr().cast()) }
    }
}

/// Defines `context()` for objects that point to their context.
macro_rules! in_context {
    ($($type:ty),*) => {
        $(
            impl<'a> Ref<'a, $type> {
                /// Returns the context that the object is part of.
                pub fn context(self) -> Ref<'a, Object<ibv_context>> {
                    // SAFETY: the pointer is initialised, and constant from then on.
                    let context = unsafe { (&raw const (*self.as_ptr()).context).read() };
                    // SAFETY: the program closes the context after it destroyed the object.
                    unsafe { Ref::<'a, ibv_context>::new(context) }.whole()
                }
            }
        )*
    };
}
in_context!(ibv_pd, ibv_cq, ibv_qp, ibv_srq);

impl<'a> Ref<'a, ibv_pd> {
    /// Returns the whole PD, of which this is the first member.
    pub fn whole(self) -> Ref<'a, Object<ibv_pd>> {
        // SAFETY: libibverbs and the program pass PDs that this provider made, all of which are
        // whole ones.
        unsafe { Ref::new(self.as_ptr().cast()) }
    }

    /// Gives a PD that nobody uses yet its context and handle.
    pub fn import(self, context: Ref<'_, ibv_context>, handle: u32) {
        // SAFETY: the PD is live, and nobody else uses it.
        unsafe {
            (*self.as_ptr()).context = context.as_ptr();
            (*self.as_ptr()).handle = handle;
        }
    }

    /// Gives a PD that nobody uses yet the context and the handle of the PD `of`.
    pub fn alias(self, of: Ref<'_, ibv_pd>) {
        // SAFETY: both are live, and nobody else uses this one.
        unsafe {
            (*self.as_ptr()).context = (*of.as_ptr()).context;
            (*self.as_ptr()).handle = (*of.as_ptr()).handle;
        }
    }
}

impl Ref<'_, ibv_td> {
    /// Gives a thread domain that nobody uses yet its context.
    pub fn join(self, context: Ref<'_, ibv_context>) {
        // SAFETY: the domain is live, and nobody else uses it.
        unsafe { (*self.as_ptr()).context = context.as_ptr() };
    }
}

impl<'a> Ref<'a, verbs_mr> {
    /// Returns the MR as libibverbs hands it out.
    pub fn mr(self) -> Ref<'a, ibv_mr> {
        // SAFETY: the field is initialised.
        unsafe { self.project(|mr| &raw mut (*mr).ibv_mr) }
    }
}

impl Ref<'_, ibv_mr> {
    /// Returns the MR's lkey.
    pub fn lkey(self) -> u32 {
        // SAFETY: the field is initialised, and constant from then on.
        unsafe { (&raw const (*self.as_ptr()).lkey).read() }
    }
}

impl Ref<'_, ibv_mw> {
    /// Returns the window's key, as the program last set it.
    pub fn rkey(self) -> u32 {
        // SAFETY: the field is initialised; a program binds a window in one thread at a time.
        unsafe { (&raw const (*self.as_ptr()).rkey).read() }
    }

    /// Sets the window's key.
    pub fn set_rkey(self, rkey: u32) {
        // SAFETY: the window is live; a program binds a window in one thread at a time.
        unsafe { (&raw mut (*self.as_ptr()).rkey).write(rkey) };
    }
}

impl<'a> Ref<'a, verbs_cq> {
    /// Returns the CQ as libibverbs hands it out.
    pub fn cq(self) -> Ref<'a, ibv_cq> {
        // SAFETY: every variant of the union begins with the CQ.
        unsafe { self.project(|cq| cq.cast()) }
    }
}

impl<'a> Ref<'a, Object<verbs_cq>> {
    /// Returns the CQ as libibverbs hands it out.
    pub fn cq(self) -> Ref<'a, ibv_cq> {
        self.verbs().cq()
    }
}

impl<'a> Ref<'a, verbs_qp> {
    /// Returns the QP as libibverbs hands it out.
    pub fn qp(self) -> Ref<'a, ibv_qp> {
        // SAFETY: every variant of the union begins with the QP.
        unsafe { self.project(|qp| qp.cast()) }
    }
}

impl<'a> Ref<'a, Object<verbs_qp>> {
    /// Returns the QP as libibverbs hands it out.
    pub fn qp(self) -> Ref<'a, ibv_qp> {
        self.verbs().qp()
    }
}

impl Ref<'_, ibv_qp> {
    /// Returns the QP's state, as the program last set it.
    pub fn state(self) -> ibv_qp_state {
        // SAFETY: the field is initialised; libibverbs writes it when the
        // program changes the state, and then the program does not post.
        unsafe { (&raw const (*self.as_ptr()).state).read_volatile() }
    }

    /// Returns the QP's number.
    pub fn number(self) -> u32 {
        // SAFETY: the field is initialised, and constant from then on.
        unsafe { (&raw const (*self.as_ptr()).qp_num).read() }
    }
}

impl<'a> Ref<'a, verbs_srq> {
    /// Returns the SRQ as libibverbs hands it out.
    pub fn srq(self) -> Ref<'a, ibv_srq> {
        // SAFETY: the field is initialised.
        unsafe { self.project(|srq| &raw mut (*srq).srq) }
    }

    /// Returns the number by which messages name an SRQ for XRC, and `None` for other SRQs.
    pub fn xrc_number(self) -> Option<u32> {
        // SAFETY: the fields are initialised, and constant from then on.
        unsafe {
            let kind = (&raw const (*self.as_ptr()).srq_type).read();
            let number = (&raw const (*self.as_ptr()).srq_num).read();
            (kind == IBV_SRQT_XRC).then_some(number)
        }
    }

    /// Gives an SRQ that nobody uses yet the fields that libibverbs sets itself for
    /// ibv_create_srq(3).
    pub fn set_attributes(self, attr: &ibv_srq_init_attr_ex) {
        // SAFETY: the SRQ is live, and nobody else uses it.
        unsafe {
            (*self.as_ptr()).srq.pd = attr.pd;
            (*self.as_ptr()).srq.srq_context = attr.srq_context;
        }
    }
}

impl<'a> Ref<'a, Object<verbs_srq>> {
    /// Returns the SRQ as libibverbs hands it out.
    pub fn srq(self) -> Ref<'a, ibv_srq> {
        self.verbs().srq()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::objects, object::Owned, pd};
    use std::ptr;

    /// A program's pointers to objects lead to the whole ones, and those to their context.
    #[test]
    fn whole_objects() {
        let context = objects::context();
        let at = context.as_ref().verbs();
        assert_eq!(at.whole().as_ptr(), context.as_ref().as_ptr());
        assert_eq!(at.as_ptr().addr(), context.as_ref().as_ptr().addr());
        let pd = pd::import(at, 7).unwrap();
        let verbs = pd.as_ref().verbs();
        assert_eq!(verbs.whole().as_ptr(), pd.as_ref().as_ptr());
        assert_eq!(verbs.context().as_ptr(), context.as_ref().as_ptr());
        // SAFETY: the PD is live.
        assert_eq!(unsafe { (*verbs.as_ptr()).handle }, 7);
        let alias = Owned::<ibv_pd>::zeroed().unwrap();
        alias.as_ref().alias(verbs);
        // SAFETY: as above.
        assert_eq!(unsafe { (*alias.as_ref().as_ptr()).handle }, 7);
        assert_eq!(alias.as_ref().context().as_ptr(), context.as_ref().as_ptr());
        let (cq, qp) = (Owned::<verbs_cq>::zeroed().unwrap(), Owned::<verbs_qp>::zeroed().unwrap());
        let srq = Owned::<verbs_srq>::zeroed().unwrap();
        // SAFETY: the objects are live.
        unsafe {
            (*cq.as_ref().cq().as_ptr()).context = at.as_ptr();
            (*qp.as_ref().qp().as_ptr()).context = at.as_ptr();
            (*srq.as_ref().srq().as_ptr()).context = at.as_ptr();
        }
        let expected = context.as_ref().as_ptr();
        assert_eq!(cq.as_ref().cq().context().as_ptr(), expected);
        assert_eq!(qp.as_ref().qp().context().as_ptr(), expected);
        assert_eq!(srq.as_ref().srq().context().as_ptr(), expected);
        // SAFETY: the pointer is null, or that of a live object.
        unsafe {
            assert!(Ref::<'_, ibv_pd>::optional(ptr::null_mut()).is_none());
            let there = Ref::optional(verbs.as_ptr()).unwrap();
            assert_eq!(there.as_ptr(), verbs.as_ptr());
        }
    }

    /// An SRQ has a number if it is for XRC, and only then.
    #[test]
    fn numbers_of_srqs() {
        let srq = Owned::<verbs_srq>::zeroed().unwrap();
        for (srq_type, number) in
            [(IBV_SRQT_BASIC, None), (IBV_SRQT_XRC, Some(9)), (IBV_SRQT_TM, None)]
        {
            // SAFETY: the SRQ is live.
            unsafe {
                (*srq.as_ref().as_ptr()).srq_type = srq_type;
                (*srq.as_ref().as_ptr()).srq_num = 9;
            }
            assert_eq!(srq.as_ref().xrc_number(), number);
        }
    }
}
