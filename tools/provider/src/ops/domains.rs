// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of protection, thread, parent and XRC domains.

use super::answer::{created, destroyed};
use crate::{
    bindings::*,
    causes::cause,
    cmd,
    lock::Threads,
    log::Refuse,
    object::Ref,
    pd::{self, Pd},
    ring::Allocator,
    td::{self, Td},
    xrcd,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: libibverbs passes a live context.
    created(pd::alloc(unsafe { Ref::new(context) }))
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the PD is live, and the first member of an object that `alloc_pd` or
    // `alloc_parent_domain` made.
    unsafe { destroyed(pd.cast::<Pd>(), pd::dealloc) }
}

pub(super) unsafe extern "C" fn import_pd(
    context: *mut ibv_context,
    pd_handle: u32,
) -> *mut ibv_pd {
    // SAFETY: libibverbs passes a live context.
    created(pd::import(unsafe { Ref::new(context) }, pd_handle))
}

/// Frees the program's PD. The PD in the kernel belongs to the program that created it.
pub(super) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: the PD is live, and the first member of an object that `import_pd` made.
    unsafe { destroyed(pd.cast::<Pd>(), |_| Ok(())) };
}

pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, mask) = unsafe { (Ref::new(context), (*attr).comp_mask) };
    if mask != 0 {
        let cause = cause!(EINVAL, "a thread domain with the attributes 0x%x is wanted", mask);
        return created::<Td, _>(Err(context.refuse(cause)));
    }
    created(td::alloc(context))
}

pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: the thread domain is live, and the first member of an object that `alloc_td` made.
    unsafe { destroyed(td.cast::<Td>(), td::dealloc) }
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC, which not every
    // release has, and which asks for nothing of a device that needs no such memory.
    const UNPROTECTED: u32 = 1 << 2;
    const MASK: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
        | UNPROTECTED;
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &*attr) };
    let unknown = attr.comp_mask & !MASK;
    if unknown != 0 {
        let cause = cause!(EINVAL, "a parent domain with the attributes 0x%x is wanted", unknown);
        return created::<Pd, _>(Err(context.refuse(cause)));
    }
    if attr.pd.is_null() {
        let cause = cause!(EINVAL, "a parent domain without a PD is wanted");
        return created::<Pd, _>(Err(context.refuse(cause)));
    }
    // SAFETY: the program passes a live PD, and a live thread domain or none. It uses the objects
    // of a thread domain in one thread at a time: ibv_alloc_td(3).
    let (pd, td) = unsafe {
        let td = Ref::<Td>::optional(attr.td.cast()).map(|td| (td, Threads::one()));
        (Ref::new(attr.pd.cast()), td)
    };
    // SAFETY: the functions are as ibv_alloc_parent_domain(3) describes them, and each object that
    // uses the allocator keeps the domain.
    created(pd::alloc_parent(pd, td, |domain| unsafe { Allocator::new(attr, domain.as_ptr()) }))
}

pub(super) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(xrcd::open(context, attr))
}

pub(super) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the XRC domain is live, and the first member of an object that `open_xrcd` made.
    unsafe { destroyed(xrcd.cast::<verbs_xrcd>(), cmd::xrcd::close) }
}

#[cfg(test)]
mod tests {
    use crate::{cq::Cq, ops::testbed::*};
    use std::{cell::Cell, vec};

    fn parent_attr(pd: *mut ibv_pd) -> ibv_parent_domain_init_attr {
        ibv_parent_domain_init_attr { pd, ..Default::default() }
    }

    /// Attributes that no domain has, or that are missing, end in an error, and no command is sent.
    #[test]
    fn attributes_that_cannot_be() {
        let p = Program::new();
        let td = |comp_mask| {
            refusal(call!(COMMON.alloc_td(p.context, &mut ibv_td_init_attr { comp_mask })))
        };
        assert_eq!(td(1), Some(Errno::EINVAL));

        let parent = |attr: &mut _| refusal(call!(COMMON.alloc_parent_domain(p.context, attr)));
        assert_eq!(parent(&mut parent_attr(ptr::null_mut())), Some(Errno::EINVAL));
        let mut attr = ibv_parent_domain_init_attr { comp_mask: 1 << 3, ..parent_attr(p.pd) };
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));
        attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));
        attr.alloc = Some(Lender::alloc);
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));
        assert_eq!(p.kernel.names(), []);
    }

    /// The memory functions of a program.
    #[derive(Default)]
    struct Lender {
        /// The next answer to an allocation: memory, or another value.
        next: Cell<*mut c_void>,
        /// The last allocation: its size, its resource, and the domain.
        lent: Cell<Option<(usize, u64, *mut ibv_pd)>>,
        /// The last memory that came back, and its resource.
        back: Cell<Option<(*mut c_void, u64)>>,
    }

    impl Lender {
        unsafe extern "C" fn alloc(
            pd: *mut ibv_pd,
            context: *mut c_void,
            size: usize,
            alignment: usize,
            resource: u64,
        ) -> *mut c_void {
            // SAFETY: the tests' context is a lender that lives longer.
            let lender = unsafe { &*context.cast::<Self>() };
            assert_eq!((alignment, size % alignment), (crate::ring::page_size(), 0));
            lender.lent.set(Some((size, resource, pd)));
            lender.next.get()
        }

        unsafe extern "C" fn free(
            _: *mut ibv_pd,
            context: *mut c_void,
            at: *mut c_void,
            resource: u64,
        ) {
            // SAFETY: as above.
            let lender = unsafe { &*context.cast::<Self>() };
            assert_eq!(lender.back.replace(Some((at, resource))), None);
        }

        /// Returns a parent domain with these memory functions.
        fn domain(&self, p: &Program) -> *mut ibv_pd {
            let mut attr = ibv_parent_domain_init_attr {
                alloc: Some(Self::alloc),
                free: Some(Self::free),
                pd_context: ptr::from_ref(self).cast_mut().cast(),
                comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
                    | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
                ..parent_attr(p.pd)
            };
            let domain = call!(COMMON.alloc_parent_domain(p.context, &mut attr));
            assert!(!domain.is_null());
            domain
        }
    }

    /// A page of the program's memory, as large as any machine has.
    #[derive(Clone, Copy)]
    #[repr(align(65536))]
    struct Page([u8; 65536]);

    /// Returns memory of the program, filled with a byte.
    fn pages(byte: u8) -> Box<[Page]> {
        vec![Page([byte; 65536]); 4].into()
    }

    /// The rings of a QP, a CQ and an SRQ of a parent domain are in memory of its functions. The
    /// memory is zeroed, and given back when the object is destroyed; until then the
    /// domain is busy. The kernel sees the PD in place of the domain.
    #[test]
    fn memory_of_a_parent_domain() {
        let p = Program::new();
        let lender = Lender::default();
        let domain = lender.domain(&p);
        assert_eq!(p.kernel.names(), []);
        // SAFETY: both are live.
        unsafe { assert_eq!(((*domain).handle, (*domain).context), ((*p.pd).handle, p.context)) };
        assert_eq!(call!(COMMON.dealloc_pd(p.pd)), EBUSY as c_int);
        type Create = fn(&Program, *mut ibv_pd) -> *mut c_void;
        type End = fn(*mut c_void) -> c_int;
        let kinds: [(u64, Create, End); 3] = [
            (
                1,
                |p, pd| call!(COMMON.create_qp(pd, &mut p.init())).cast(),
                |qp| call!(COMMON.destroy_qp(qp.cast())),
            ),
            (
                2,
                |p, parent_domain| {
                    let comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
                    let mut attr = ibv_cq_init_attr_ex { comp_mask, parent_domain, ..p.cq_attr() };
                    call!(COMMON.create_cq_ex(p.context, &mut attr)).cast()
                },
                |cq| call!(COMMON.destroy_cq(cq.cast())),
            ),
            (
                3,
                |_, pd| call!(RINGS.create_srq(pd, &mut srq_attr())).cast(),
                |srq| call!(RINGS.destroy_srq(srq.cast())),
            ),
        ];
        for (resource, create, end) in kinds {
            let mut pages = pages(0xa5);
            let at: *mut c_void = pages.as_mut_ptr().cast();
            lender.next.set(at);
            let object = create(&p, domain);
            assert!(!object.is_null());
            let (size, for_what, asked) = lender.lent.take().unwrap();
            assert_eq!((for_what, asked), (resource, domain));
            assert!(pages.iter().flat_map(|page| page.0).take(size).all(|byte| byte == 0));
            // The driver is told of this memory.
            let told: [u64; 2] = p.kernel.one().input[&UVERBS_ATTR_UHW_IN][..16]
                .as_chunks::<8>()
                .0
                .iter()
                .map(|word| u64::from_ne_bytes(*word))
                .collect::<Vec<_>>()
                .try_into()
                .unwrap();
            assert_eq!(told, [at.expose_provenance() as u64, size as u64]);
            assert_eq!(call!(COMMON.dealloc_pd(domain)), EBUSY as c_int);
            p.kernel.fail(EIO);
            assert_eq!((end(object), lender.back.get()), (EIO as c_int, None));
            assert_eq!((end(object), lender.back.take()), (0, Some((at, resource))));

            // Memory that does not begin at a page is given back; NULL is an error.
            let odd = at.wrapping_byte_add(64);
            lender.next.set(odd);
            assert_eq!(refusal(create(&p, domain)), Some(Errno::EINVAL));
            assert_eq!(lender.back.take(), Some((odd, resource)));
            lender.next.set(ptr::null_mut());
            assert_eq!(refusal(create(&p, domain)), Some(Errno::ENOMEM));
            // Memory of an object that the kernel refuses is given back as well.
            lender.next.set(at);
            p.kernel.fail(EPERM);
            assert_eq!(refusal(create(&p, domain)).map(Errno::get), Some(EPERM as c_int));
            assert_eq!(lender.back.take(), Some((at, resource)));
            // IBV_ALLOCATOR_USE_DEFAULT: the provider allocates the memory.
            lender.next.set(ptr::without_provenance_mut(usize::MAX));
            let object = create(&p, domain);
            assert!(!object.is_null());
            assert_eq!((end(object), lender.back.get()), (0, None));
            p.kernel.take();
        }
        assert_eq!((call!(COMMON.dealloc_pd(domain)), p.kernel.names()), (0, vec![]));
    }

    /// A CQ that moves allocates its next ring before it frees the old one.
    #[test]
    fn a_cq_of_a_parent_domain_moves() {
        let p = Program::new();
        let lender = Lender::default();
        let parent_domain = lender.domain(&p);
        let mut pages = [pages(0), pages(0)];
        let [old, new]: [*mut c_void; 2] = pages.each_mut().map(|pages| pages.as_mut_ptr().cast());
        let comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
        let mut attr = ibv_cq_init_attr_ex { comp_mask, parent_domain, ..p.cq_attr() };
        lender.next.set(old);
        let cq: *mut ibv_cq = call!(COMMON.create_cq_ex(p.context, &mut attr)).cast();
        lender.next.set(new);
        // The memory of the new ring is given back if the kernel does not move the CQ.
        p.kernel.fail(EINVAL);
        assert_eq!(call!(RINGS.resize_cq(cq, 8)), EINVAL as c_int);
        assert_eq!(lender.back.take(), Some((new, 2)));
        assert_eq!(call!(RINGS.resize_cq(cq, 8)), 0);
        assert_eq!(lender.back.take(), Some((old, 2)));
        assert_eq!(call!(COMMON.destroy_cq(cq)), 0);
        assert_eq!(lender.back.take(), Some((new, 2)));
        assert_eq!(call!(COMMON.dealloc_pd(parent_domain)), 0);
    }

    /// Objects of a thread domain do not take their locks. The domain is busy while a parent
    /// domain uses it.
    #[test]
    fn threads_of_a_thread_domain() {
        let p = Program::new();
        let td = call!(COMMON.alloc_td(p.context, &mut ibv_td_init_attr::default()));
        for with_td in [false, true] {
            let mut attr = parent_attr(p.pd);
            attr.td = if with_td { td } else { ptr::null_mut() };
            // A flag that this device ignores.
            attr.comp_mask = 1 << 2;
            let domain = call!(COMMON.alloc_parent_domain(p.context, &mut attr));
            let qp = call!(COMMON.create_qp(domain, &mut p.init()));
            // SAFETY: the objects are live, here and below.
            let whole: Ref<'_, Qp> = unsafe { Ref::new(qp.cast()) };
            let state = whole.private().rings().unwrap().send().state();
            let guard = state.lock();
            assert_eq!(state.is_taken(), !with_td);
            drop(guard);
            for one in [false, true] {
                let mut attr = ibv_cq_init_attr_ex {
                    comp_mask: IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS,
                    flags: if one { IBV_CREATE_CQ_ATTR_SINGLE_THREADED } else { 0 },
                    parent_domain: domain,
                    ..p.cq_attr()
                };
                let cq = call!(COMMON.create_cq_ex(p.context, &mut attr));
                // SAFETY: see above.
                let whole: Ref<'_, Cq> = unsafe { Ref::new(cq.cast()) };
                let state = whole.private().state();
                let guard = state.lock();
                assert_eq!(state.is_taken(), !(with_td || one));
                drop(guard);
                assert_eq!(call!(COMMON.destroy_cq(cq.cast())), 0);
            }
            assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
            let busy = if with_td { EBUSY as c_int } else { 0 };
            if with_td {
                assert_eq!(call!(COMMON.dealloc_td(td)), busy);
            }
            assert_eq!(call!(COMMON.dealloc_pd(domain)), 0);
        }
        assert_eq!(call!(COMMON.dealloc_td(td)), 0);
    }
}
