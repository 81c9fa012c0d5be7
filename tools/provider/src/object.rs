// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The C objects that libibverbs and a provider share.
//!
//! The provider allocates an object, libibverbs and the program hold pointers
//! to it, and the provider frees it when its verb of destruction succeeds. In
//! between threads use it at the same time, and libibverbs writes to it under
//! its own mutexes, so no Rust reference to its part of an object is ever made.
//! What the provider adds to an object stands behind that part, is complete
//! before the object is handed out, and changes only by its own locks and
//! atomics from then on.

use crate::{
    ah, bindings, context, cq,
    errno::{Errno, Result},
    pd, qp, srq, td,
};
use core::{
    marker::PhantomData,
    mem::{ManuallyDrop, offset_of},
    ptr::NonNull,
    sync::atomic::{
        AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

/// A C object that lives for at least `'a`.
pub struct Ref<'a, T> {
    object: NonNull<T>,
    lifetime: PhantomData<&'a ()>,
}

impl<T> Clone for Ref<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ref<'_, T> {}

impl<'a, T> Ref<'a, T> {
    /// Takes a pointer that C code passed in.
    ///
    /// # Safety
    ///
    /// `object` points to a live, initialised `T` for all of `'a`.
    pub unsafe fn new(object: *mut T) -> Self {
        Self {
            // SAFETY: a pointer to a live object is not null.
            object: unsafe { NonNull::new_unchecked(object) },
            lifetime: PhantomData,
        }
    }

    /// The same, for a pointer that may be null.
    ///
    /// # Safety
    ///
    /// As [`Self::new`] if it is not.
    pub unsafe fn optional(object: *mut T) -> Option<Self> {
        // SAFETY: by the contract of this function.
        (!object.is_null()).then(|| unsafe { Self::new(object) })
    }

    /// The object's address.
    pub fn as_ptr(self) -> *mut T {
        self.object.as_ptr()
    }

    /// The field of type `U` that `project` gives the address of.
    ///
    /// # Safety
    ///
    /// `project` returns the address of an initialised field of its argument.
    pub unsafe fn project<U>(self, project: impl FnOnce(*mut T) -> *mut U) -> Ref<'a, U> {
        // SAFETY: a field lives as long as its object.
        unsafe { Ref::new(project(self.as_ptr())) }
    }
}

/// A type of C object for which all bytes zero is a valid value.
///
/// # Safety
///
/// All bytes zero are a valid value of the type.
pub unsafe trait Zeroable {}

/// A C object, and what the provider adds to it.
#[repr(C)]
pub struct Object<V, P> {
    /// What libibverbs knows; first, because it hands out its address.
    verbs: V,
    /// The provider's own.
    private: P,
}

/// A context: `struct verbs_context` and the provider's part.
pub type Context = Object<bindings::verbs_context, context::Private>;
/// A PD: `struct ibv_pd` and the provider's part.
pub type Pd = Object<bindings::ibv_pd, pd::Private>;
/// A thread domain: `struct ibv_td` and the provider's part.
pub type Td = Object<bindings::ibv_td, td::Private>;
/// A CQ: `struct verbs_cq` and the provider's part.
pub type Cq = Object<bindings::verbs_cq, cq::Private>;
/// A QP: `struct verbs_qp` and the provider's part.
pub type Qp = Object<bindings::verbs_qp, qp::Private>;
/// An SRQ: `struct verbs_srq` and the provider's part.
pub type Srq = Object<bindings::verbs_srq, srq::Private>;
/// An AH: `struct ibv_ah` and the provider's part.
pub type Ah = Object<bindings::ibv_ah, ah::Private>;

/// Counts what keeps an object, which is not destroyed before it is given up.
///
/// The count has memory of its own, which the last of the object and its users frees:
/// ibv_unimport_pd(3) frees a PD whatever uses it.
pub struct Users(Hold);

impl Users {
    /// No users.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        let count = Owned::<AtomicU32>::zeroed()?.into_raw();
        // SAFETY: a pointer from into_raw() is not null.
        let count = Hold(unsafe { NonNull::new_unchecked(count) });
        count.count().store(1, Relaxed);
        Ok(Self(count))
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.0.count().load(Acquire) != 1
    }
}

/// Keeps an object: its verb that destroys answers EBUSY until this is dropped.
pub struct Hold(NonNull<AtomicU32>);

impl Hold {
    /// Keeps the object whose users these are.
    pub fn new(users: &Users) -> Self {
        users.0.count().fetch_add(1, Relaxed);
        Self(users.0.0)
    }

    fn count(&self) -> &AtomicU32 {
        // SAFETY: the count is freed with the last of those that share it.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.count().fetch_sub(1, AcqRel) == 1 {
            // SAFETY: the count came from `Owned`, and nobody shares it any more.
            drop(unsafe { Owned::from_raw(self.0.as_ptr()) });
        }
    }
}

// SAFETY: a counter that is atomic.
unsafe impl Send for Hold {}
// SAFETY: as above.
unsafe impl Sync for Hold {}
// SAFETY: zero is a valid atomic.
unsafe impl Zeroable for AtomicU32 {}

/// A C object on the heap that the provider owns.
pub struct Owned<T>(NonNull<T>);

impl<T> Owned<T> {
    /// Takes back what [`Self::into_raw`] gave away.
    ///
    /// # Safety
    ///
    /// `object` came from [`Self::into_raw`] for this type, or from malloc()
    /// holding a `T`, and nobody uses it after this value is dropped.
    pub unsafe fn from_raw(object: *mut T) -> Self {
        // SAFETY: a pointer from into_raw() is not null.
        Self(unsafe { NonNull::new_unchecked(object) })
    }

    /// Gives the object away; the memory is freed by [`Self::from_raw`] alone.
    pub fn into_raw(self) -> *mut T {
        ManuallyDrop::new(self).0.as_ptr()
    }

    /// Borrows the object.
    pub fn as_ref(&self) -> Ref<'_, T> {
        // SAFETY: the object is live until `self` is dropped.
        unsafe { Ref::new(self.0.as_ptr()) }
    }
}

impl<T: Zeroable> Owned<T> {
    /// Allocates a zeroed object.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn zeroed() -> Result<Self> {
        allocate().map(Self)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the object came from malloc() and is owned by `self` alone.
        unsafe {
            self.0.drop_in_place();
            free(self.0);
        }
    }
}

/// An object in the making: its C part is there, the provider's is not.
pub struct Blank<V, P>(NonNull<Object<V, P>>);

impl<V: Zeroable, P> Blank<V, P> {
    /// Allocates an object whose C part is zeroed.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        allocate().map(Self)
    }
}

impl<V, P> Blank<V, P> {
    /// Takes an object that libibverbs allocated and initialised.
    ///
    /// # Safety
    ///
    /// `object` came from malloc(), has room for the whole object, and is the
    /// caller's alone.
    pub unsafe fn from_raw(object: *mut V) -> Self {
        const { assert!(align_of::<Object<V, P>>() <= MALLOC_ALIGN) };
        // SAFETY: by the contract of this function.
        Self(unsafe { NonNull::new_unchecked(object.cast()) })
    }

    /// What libibverbs knows of the object.
    pub fn verbs(&self) -> Ref<'_, V> {
        // SAFETY: the C part is initialised, and lives as long as `self`.
        unsafe { Ref::new(&raw mut (*self.0.as_ptr()).verbs) }
    }

    /// Completes the object.
    pub fn finish(self, private: P) -> Owned<Object<V, P>> {
        let object = ManuallyDrop::new(self).0;
        // SAFETY: the memory is there, and nobody else uses it yet.
        unsafe { (&raw mut (*object.as_ptr()).private).write(private) };
        Owned(object)
    }
}

impl<V, P> Drop for Blank<V, P> {
    fn drop(&mut self) {
        // SAFETY: the object came from malloc(), is owned by `self` alone, and
        // its C part is plain data.
        unsafe { free(self.0) };
    }
}

/// What any memory of malloc() is aligned to.
const MALLOC_ALIGN: usize = 16;

/// Allocates zeroed memory for a `T`.
fn allocate<T>() -> Result<NonNull<T>> {
    let (align, len) = const { (align_of::<T>(), size_of::<T>()) };
    const { assert!(size_of::<T>() != 0) };
    if align <= MALLOC_ALIGN {
        // SAFETY: calloc() has no preconditions.
        let object = unsafe { bindings::calloc(1, len as _) };
        return NonNull::new(object.cast()).ok_or(Errno::ENOMEM);
    }
    // SAFETY: the alignment is a power of two that divides the length.
    let object = unsafe { bindings::aligned_alloc(align as _, len as _) };
    let object = NonNull::new(object.cast::<T>()).ok_or(Errno::ENOMEM)?;
    // SAFETY: the memory has room for a `T`.
    unsafe { object.write_bytes(0, 1) };
    Ok(object)
}

/// Frees memory of [`allocate`] or malloc().
///
/// # Safety
///
/// Nobody uses it any more.
#[cfg(not(test))]
unsafe fn free<T>(object: NonNull<T>) {
    // SAFETY: by the contract of this function.
    unsafe { bindings::free(object.as_ptr().cast()) };
}

#[cfg(test)]
use crate::model::freed::free;

// SAFETY: plain C structures of integers, pointers and pthread types, which
// libibverbs itself allocates zeroed.
unsafe impl Zeroable for bindings::verbs_device {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_pd {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_td {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_ah {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_mr {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_mw {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_cq {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_qp {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_srq {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_xrcd {}

impl<'a, V, P> Ref<'a, Object<V, P>> {
    /// What libibverbs knows of the object.
    pub fn verbs(self) -> Ref<'a, V> {
        // SAFETY: the field is initialised.
        unsafe { self.project(|object| &raw mut (*object).verbs) }
    }
}

impl<'a, V, P: Sync> Ref<'a, Object<V, P>> {
    /// What the provider added to the object.
    pub fn private(self) -> &'a P {
        // SAFETY: the field is initialised, and not written to since the
        // object was handed out.
        unsafe { &(*self.as_ptr()).private }
    }
}

impl<'a> Ref<'a, Context> {
    /// The context as libibverbs hands it out.
    pub fn context(self) -> Ref<'a, bindings::ibv_context> {
        // SAFETY: the field is initialised.
        unsafe { self.verbs().project(|context| &raw mut (*context).context) }
    }
}

impl<'a> Ref<'a, bindings::verbs_cq> {
    /// The CQ as libibverbs hands it out.
    pub fn cq(self) -> Ref<'a, bindings::ibv_cq> {
        // SAFETY: every variant of the union begins with the CQ.
        unsafe { self.project(|cq| cq.cast()) }
    }
}

impl<'a> Ref<'a, Cq> {
    /// The CQ as libibverbs hands it out.
    pub fn cq(self) -> Ref<'a, bindings::ibv_cq> {
        self.verbs().cq()
    }
}

impl<'a> Ref<'a, bindings::verbs_qp> {
    /// The QP as libibverbs hands it out.
    pub fn qp(self) -> Ref<'a, bindings::ibv_qp> {
        // SAFETY: every variant of the union begins with the QP.
        unsafe { self.project(|qp| qp.cast()) }
    }
}

impl<'a> Ref<'a, Qp> {
    /// The QP as libibverbs hands it out.
    pub fn qp(self) -> Ref<'a, bindings::ibv_qp> {
        self.verbs().qp()
    }
}

impl<'a> Ref<'a, bindings::verbs_srq> {
    /// The SRQ as libibverbs hands it out.
    pub fn srq(self) -> Ref<'a, bindings::ibv_srq> {
        // SAFETY: the field is initialised.
        unsafe { self.project(|srq| &raw mut (*srq).srq) }
    }
}

impl Ref<'_, bindings::verbs_srq> {
    /// The number by which messages name the SRQ, if it is for XRC.
    pub fn xrc_number(self) -> Option<u32> {
        // SAFETY: the fields are initialised, and constant from then on.
        unsafe {
            let kind = (&raw const (*self.as_ptr()).srq_type).read();
            let number = (&raw const (*self.as_ptr()).srq_num).read();
            (kind == bindings::IBV_SRQT_XRC).then_some(number)
        }
    }

    /// Gives an SRQ that nobody uses yet what libibverbs gives those of
    /// ibv_create_srq(3).
    pub fn set_attributes(self, attr: &bindings::ibv_srq_init_attr_ex) {
        // SAFETY: it is live, and nobody else uses it.
        unsafe {
            (*self.as_ptr()).srq.pd = attr.pd;
            (*self.as_ptr()).srq.srq_context = attr.srq_context;
        }
    }
}

impl<'a> Ref<'a, Srq> {
    /// The SRQ as libibverbs hands it out.
    pub fn srq(self) -> Ref<'a, bindings::ibv_srq> {
        self.verbs().srq()
    }
}

impl<'a> Ref<'a, bindings::ibv_qp> {
    /// The QP's state, as the program last set it.
    pub fn state(self) -> bindings::ibv_qp_state {
        // SAFETY: the field is initialised; libibverbs writes it when the
        // program changes the state, and then the program does not post.
        unsafe { (&raw const (*self.as_ptr()).state).read_volatile() }
    }

    /// The QP's number.
    pub fn number(self) -> u32 {
        // SAFETY: the field is initialised, and constant from then on.
        unsafe { (&raw const (*self.as_ptr()).qp_num).read() }
    }
}

impl Ref<'_, bindings::ibv_mr> {
    /// The MR's lkey.
    pub fn lkey(self) -> u32 {
        // SAFETY: the field is initialised, and constant from then on.
        unsafe { (&raw const (*self.as_ptr()).lkey).read() }
    }
}

impl Ref<'_, bindings::ibv_mw> {
    /// The window's key, as the program last set it.
    pub fn rkey(self) -> u32 {
        // SAFETY: the field is initialised; who binds a window excludes others.
        unsafe { (&raw const (*self.as_ptr()).rkey).read() }
    }

    /// Sets the window's key.
    pub fn set_rkey(self, rkey: u32) {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.as_ptr()).rkey).write(rkey) };
    }
}

impl<'a> Ref<'a, bindings::ibv_pd> {
    /// The whole PD.
    pub fn whole(self) -> Ref<'a, Pd> {
        // SAFETY: PDs of this provider are the first members of whole ones.
        unsafe { Ref::new(self.as_ptr().cast()) }
    }

    /// Gives a PD that nobody uses yet its context and handle.
    pub fn import(self, context: Ref<'_, bindings::ibv_context>, handle: u32) {
        // SAFETY: it is live, and nobody else uses it.
        unsafe {
            (*self.as_ptr()).context = context.as_ptr();
            (*self.as_ptr()).handle = handle;
        }
    }

    /// Makes a PD that nobody uses yet another name of one.
    pub fn alias(self, of: Ref<'_, bindings::ibv_pd>) {
        // SAFETY: both are live, and nobody else uses this one.
        unsafe {
            (*self.as_ptr()).context = (*of.as_ptr()).context;
            (*self.as_ptr()).handle = (*of.as_ptr()).handle;
        }
    }

    /// The context that the PD is part of.
    pub fn context(self) -> Ref<'a, Context> {
        // SAFETY: a PD of this provider has a context of this provider, which
        // the program closes after it deallocated the PD.
        unsafe { context_of((&raw const (*self.as_ptr()).context).read()) }
    }
}

impl<'a> Ref<'a, bindings::ibv_cq> {
    /// The context that the CQ is part of.
    pub fn context(self) -> Ref<'a, Context> {
        // SAFETY: as for a PD.
        unsafe { context_of((&raw const (*self.as_ptr()).context).read()) }
    }
}

impl<'a> Ref<'a, bindings::ibv_qp> {
    /// The context that the QP is part of.
    pub fn context(self) -> Ref<'a, Context> {
        // SAFETY: as for a PD.
        unsafe { context_of((&raw const (*self.as_ptr()).context).read()) }
    }
}

impl<'a> Ref<'a, bindings::ibv_srq> {
    /// The context that the SRQ is part of.
    pub fn context(self) -> Ref<'a, Context> {
        // SAFETY: as for a PD.
        unsafe { context_of((&raw const (*self.as_ptr()).context).read()) }
    }
}

impl<'a> Ref<'a, bindings::ibv_context> {
    /// The whole context.
    pub fn whole(self) -> Ref<'a, Context> {
        // SAFETY: libibverbs passes contexts of this provider.
        unsafe { context_of(self.as_ptr()) }
    }
}

/// The whole context around what libibverbs hands out.
///
/// # Safety
///
/// `context` is part of a context that this provider opened and that lives for
/// all of `'a`.
unsafe fn context_of<'a>(context: *mut bindings::ibv_context) -> Ref<'a, Context> {
    // SAFETY: by the contract of this function.
    unsafe {
        Ref::new(context.byte_sub(offset_of!(bindings::verbs_context, context)).cast::<Context>())
    }
}

/// The CQs that a new QP completes to, or `None` if one is missing. One that
/// receives nothing has its send queue's twice.
pub fn cqs(attr: &bindings::ibv_qp_init_attr_ex) -> Option<(Ref<'_, Cq>, Ref<'_, Cq>)> {
    let recv_cq = match attr.qp_type {
        bindings::IBV_QPT_XRC_SEND => attr.send_cq,
        _ => attr.recv_cq,
    };
    if attr.send_cq.is_null() || recv_cq.is_null() {
        return None;
    }
    // SAFETY: the program passes live CQs, which are this provider's.
    Some(unsafe { (Ref::new(attr.send_cq.cast()), Ref::new(recv_cq.cast())) })
}

/// The PD and the CQ of an SRQ for XRC, or `None` if one is missing, or the
/// domain.
pub fn of_xrc_srq(
    attr: &bindings::ibv_srq_init_attr_ex,
) -> Option<(Ref<'_, bindings::ibv_pd>, Ref<'_, Cq>)> {
    const MASK: u32 = bindings::IBV_SRQ_INIT_ATTR_PD
        | bindings::IBV_SRQ_INIT_ATTR_XRCD
        | bindings::IBV_SRQ_INIT_ATTR_CQ;
    if attr.comp_mask & MASK != MASK || attr.xrcd.is_null() {
        return None;
    }
    // SAFETY: the program passes live objects, which are this provider's.
    unsafe { Ref::optional(attr.pd).zip(Ref::optional(attr.cq.cast())) }
}

/// The attributes of a device that a program asked for, of which an older one
/// has only the first.
pub struct Attributes<'a> {
    attr: *mut bindings::ibv_device_attr_ex,
    size: usize,
    lifetime: PhantomData<&'a mut ()>,
}

impl Attributes<'_> {
    /// Takes the `size` bytes at `attr`.
    ///
    /// # Safety
    ///
    /// They are the caller's to write for the lifetime of this value.
    pub unsafe fn new(attr: *mut bindings::ibv_device_attr_ex, size: usize) -> Self {
        Self { attr, size, lifetime: PhantomData }
    }

    /// Sets a clock's mask and frequency in kHz, if the program knows of them.
    pub fn set_clock(&mut self, mask: u64, khz: u64) {
        const MASK: usize = offset_of!(bindings::ibv_device_attr_ex, completion_timestamp_mask);
        const CLOCK: usize = offset_of!(bindings::ibv_device_attr_ex, hca_core_clock);
        for (offset, value) in [(MASK, mask), (CLOCK, khz)] {
            if offset + size_of::<u64>() <= self.size {
                // SAFETY: the field is within the caller's bytes.
                unsafe { self.attr.byte_add(offset).cast::<u64>().write_unaligned(value) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;
    use bindings::*;
    use std::{cell::Cell, ptr, rc::Rc, slice, thread};

    /// What a provider adds, and counts how often it is dropped.
    struct Dropped(Rc<Cell<u32>>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    type Tested = Object<ibv_pd, Dropped>;

    fn tested(count: &Rc<Cell<u32>>) -> Owned<Tested> {
        Blank::<ibv_pd, Dropped>::new().unwrap().finish(Dropped(count.clone()))
    }

    /// libibverbs finds its part where the object begins, and the provider's part behind it.
    #[test]
    fn libibverbs_part_comes_first() {
        let count = Rc::default();
        let object = tested(&count);
        let at = object.as_ref().as_ptr();
        assert_eq!(object.as_ref().verbs().as_ptr().addr(), at.addr());
        assert_eq!(offset_of!(Tested, verbs), 0);
        assert!(offset_of!(Tested, private) >= size_of::<ibv_pd>());
    }

    /// An object that was given away is dropped once, when it was taken back, and no sooner; its
    /// memory is freed with it.
    #[test]
    fn an_object_is_dropped_once() {
        let count = Rc::default();
        drop(tested(&count));
        assert_eq!(count.get(), 1);
        let raw = tested(&count).into_raw();
        assert_eq!(count.get(), 1);
        // SAFETY: it came from into_raw().
        let object = unsafe { Owned::from_raw(raw) };
        assert_eq!((object.as_ref().as_ptr(), count.get()), (raw, 1));
        drop(object);
        assert_eq!(count.get(), 2);
    }

    /// An object that was not finished has no part of the provider's to drop.
    #[test]
    fn a_blank_drops_nothing() {
        let blank = Blank::<ibv_pd, Dropped>::new().unwrap();
        // SAFETY: the part is there.
        let bytes = unsafe {
            slice::from_raw_parts(blank.verbs().as_ptr().cast::<u8>(), size_of::<ibv_pd>())
        };
        assert!(bytes.iter().all(|&byte| byte == 0));
        drop(blank);
        // What libibverbs allocated is taken with what stands there.
        // SAFETY: calloc() has no preconditions, and the memory has room.
        let blank = unsafe {
            let raw: *mut ibv_pd = calloc(1, size_of::<Tested>() as _).cast();
            (*raw).handle = 77;
            Blank::<ibv_pd, Dropped>::from_raw(raw)
        };
        let count = Rc::default();
        let object = blank.finish(Dropped(Rc::clone(&count)));
        // SAFETY: the object is live.
        assert_eq!(unsafe { (*object.as_ref().verbs().as_ptr()).handle }, 77);
        drop(object);
        assert_eq!(count.get(), 1);
    }

    /// Memory is zeroed and aligned as the type wants it, also where malloc() does not do that.
    #[test]
    fn memory_is_zeroed_and_aligned() {
        #[repr(C, align(256))]
        struct Wide([u8; 512]);
        #[repr(C, align(16))]
        struct Narrow([u8; 48]);
        // SAFETY: bytes.
        unsafe impl Zeroable for Wide {}
        // SAFETY: as above.
        unsafe impl Zeroable for Narrow {}
        fn check<T: Zeroable>() {
            // Several, as the first may be zeroed and aligned by chance.
            let mut all: Vec<Owned<T>> = vec![];
            for _ in 0..16 {
                let object = Owned::<T>::zeroed().unwrap();
                let at = object.as_ref().as_ptr();
                assert!(at.is_aligned());
                // SAFETY: the object is live, and this thread's alone.
                unsafe {
                    let bytes = slice::from_raw_parts(at.cast::<u8>(), size_of::<T>());
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    at.write_bytes(0xa5, 1);
                }
                if all.len() < 8 {
                    all.push(object);
                } else {
                    let raw = object.into_raw();
                    // SAFETY: the memory came from malloc(), and nobody uses it any more.
                    unsafe { bindings::free(raw.cast()) };
                }
            }
        }
        check::<Wide>();
        check::<Narrow>();
    }

    /// An object is busy as long as somebody has it, whoever lets go last.
    #[test]
    fn holds_are_counted() {
        let users = Users::new().unwrap();
        assert!(!users.any());
        let mut holds: Vec<Hold> = (0..3).map(|_| Hold::new(&users)).collect();
        for left in (0..3).rev() {
            assert!(users.any());
            drop(holds.remove(left / 2));
        }
        assert!(!users.any());
        // The count is there for those who stay when the object is gone.
        let (first, second) = (Hold::new(&users), Hold::new(&users));
        drop(users);
        assert_eq!(second.count().load(Relaxed), 2);
        drop(first);
        assert_eq!(second.count().load(Relaxed), 1);
        drop(second);
        assert!(model::freed::is_intact());
    }

    /// Threads that take and give back an object at the same time leave it free, and its count is
    /// freed once.
    #[test]
    fn holds_of_many_threads() {
        let users = Users::new().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let hold = Hold::new(&users);
                        assert!(users.any());
                        drop(hold);
                    }
                });
            }
        });
        assert!(!users.any());
        for _ in 0..100 {
            let users = Users::new().unwrap();
            let hold = Hold::new(&users);
            thread::scope(|scope| {
                scope.spawn(move || drop(hold));
                scope.spawn(move || drop(users));
            });
        }
    }

    /// A program's pointers to objects lead to the whole ones, and those to their context.
    #[test]
    fn whole_objects() {
        let context = model::context();
        let at = context.as_ref().context();
        assert_eq!(at.whole().as_ptr(), context.as_ref().as_ptr());
        assert_ne!(at.as_ptr().addr(), context.as_ref().as_ptr().addr());
        let pd = crate::pd::import(at, 7).unwrap();
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

    /// Both CQs of a QP must be there; an XRC initiator, which receives nothing, has one.
    #[test]
    fn cqs_of_a_qp() {
        let (send, recv) = (model::cq(None), model::cq(None));
        let [send_cq, recv_cq] = [&send, &recv].map(|cq| cq.as_ref().cq().as_ptr());
        let none = ptr::null_mut();
        let found = |qp_type, send_cq, recv_cq| {
            let attr = ibv_qp_init_attr_ex { qp_type, send_cq, recv_cq, ..Default::default() };
            cqs(&attr).map(|(send, recv)| (send.cq().as_ptr(), recv.cq().as_ptr()))
        };
        for qp_type in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
            assert_eq!(found(qp_type, send_cq, recv_cq), Some((send_cq, recv_cq)));
            assert_eq!(found(qp_type, none, recv_cq), None);
            assert_eq!(found(qp_type, send_cq, none), None);
        }
        assert_eq!(found(IBV_QPT_XRC_SEND, send_cq, none), Some((send_cq, send_cq)));
        assert_eq!(found(IBV_QPT_XRC_SEND, send_cq, recv_cq), Some((send_cq, send_cq)));
        assert_eq!(found(IBV_QPT_XRC_SEND, none, recv_cq), None);
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

    /// What a program has no room for is not written, to the byte.
    #[test]
    fn attributes_end_where_the_program_says() {
        const MASK: usize = offset_of!(ibv_device_attr_ex, completion_timestamp_mask);
        const CLOCK: usize = offset_of!(ibv_device_attr_ex, hca_core_clock);
        for (size, mask, clock) in [
            (MASK, 0, 0),
            (MASK + 7, 0, 0),
            (MASK + 8, 3, 0),
            (CLOCK + 7, 3, 0),
            (CLOCK + 8, 3, 4),
            (size_of::<ibv_device_attr_ex>(), 3, 4),
        ] {
            let mut attr = ibv_device_attr_ex::default();
            // SAFETY: the attributes are at least as long.
            unsafe { Attributes::new(&mut attr, size) }.set_clock(3, 4);
            assert_eq!((attr.completion_timestamp_mask, attr.hca_core_clock), (mask, clock));
        }
    }
}
