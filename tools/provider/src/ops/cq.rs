// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of completion queues.

use super::answer::{created, destroyed};
use crate::{
    bindings::*,
    causes::cause,
    cmd,
    cq::{self, Cq},
    cq_ex,
    errno::{Result, code},
    lock::Threads,
    log::Refuse,
    object::Ref,
    pd::Domain,
};
use core::{ffi::c_int, mem::MaybeUninit, slice};

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: libibverbs passes a live context; the channel is live, or null.
    let (context, channel) = unsafe { (Ref::new(context), Ref::optional(channel)) };
    created(cq::create(context, cq::Attr { cqe, channel, comp_vector, domain: Domain::NONE }))
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &*attr) };
    // SAFETY: the attributes are valid.
    let result = unsafe { cq_domain(context, attr) }.and_then(|domain| {
        let attr_of_cq = cq::Attr {
            cqe: c_int::try_from(attr.cqe).map_err(|_| {
                context.refuse(cause!(EINVAL, "a CQ of %u CQEs is wanted", attr.cqe))
            })?,
            // SAFETY: the channel of valid attributes is live, or null.
            channel: unsafe { Ref::optional(attr.channel) },
            comp_vector: c_int::try_from(attr.comp_vector).map_err(|_| {
                context.refuse(cause!(EINVAL, "a CQ of vector %u is wanted", attr.comp_vector))
            })?,
            domain,
        };
        cq::create_ex(context, attr_of_cq, attr.wc_flags)
    });
    // SAFETY: the CQ is an extended one, and nobody else has it yet.
    created(result.inspect(|cq| unsafe { cq_ex::install(cq.as_ref()) }))
}

/// Returns how an extended CQ is locked and where its memory comes from.
///
/// # Errors
///
/// EOPNOTSUPP for attributes that no CQ has; EINVAL for a PD that is not a parent
/// domain.
///
/// # Safety
///
/// The attributes are valid: the parent domain is one that this provider made and that is live,
/// or null.
unsafe fn cq_domain(context: Ref<'_, ibv_context>, attr: &ibv_cq_init_attr_ex) -> Result<Domain> {
    const MASK: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    let unknown = attr.comp_mask & !MASK;
    if unknown != 0 {
        let cause = cause!(EOPNOTSUPP, "a CQ with the unknown attributes 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    let mut domain = Domain::NONE;
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        let no_pd = || context.refuse(cause!(EINVAL, "a CQ lacks its parent domain"));
        // SAFETY: the parent domain of valid attributes is live, or null.
        let pd = unsafe { Ref::<ibv_pd>::optional(attr.parent_domain) }.ok_or_else(no_pd)?;
        domain = Domain::of_parent(pd.whole())?;
    }
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    let unknown = flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    if unknown != 0 {
        let cause = cause!(EOPNOTSUPP, "a CQ with the unknown flags 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    if flags != 0 {
        // SAFETY: the program sets the flag if it uses the CQ in one thread at a time.
        domain.threads = unsafe { Threads::one() };
    }
    Ok(domain)
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    unsafe { destroyed(cq.cast::<Cq>(), |cq| cmd::cq::destroy(cq.cq())) }
}

pub(super) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: the program passes a live CQ and valid attributes.
    code(unsafe { cmd::cq::modify(Ref::new(cq), &mut *attr) })
}

pub(super) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    code(cq::resize(unsafe { Ref::new(cq.cast()) }, cqe))
}

/// Polls a CQ by `poll`, and returns what ibv_poll_cq(3) answers.
///
/// # Safety
///
/// The CQ is live. The caller lends an array of `num_entries` entries at `wc`.
#[inline]
unsafe fn polled(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
    poll: impl FnOnce(&mut [MaybeUninit<ibv_wc>]) -> Result<usize>,
) -> c_int {
    let result = match usize::try_from(num_entries) {
        Err(_) => {
            // SAFETY: the CQ is live.
            let cq = unsafe { Ref::new(cq) };
            Err(cq.refuse(cause!(EINVAL, "%d completions are asked for", num_entries as u32)))
        }
        Ok(0) => Ok(0),
        // SAFETY: the caller lends as many entries.
        Ok(room) => poll(unsafe { slice::from_raw_parts_mut(wc.cast(), room) }),
    };
    match result {
        Ok(polled) => polled as c_int,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

pub(super) unsafe extern "C" fn poll_cq(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made; the program
    // lends the array.
    unsafe { polled(cq, num_entries, wc, |entries| cq::poll(Ref::new(cq.cast()), entries)) }
}

pub(super) unsafe extern "C" fn poll_cq_kernel(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    // SAFETY: the program passes a live CQ, and lends the array.
    unsafe { polled(cq, num_entries, wc, |entries| cq::poll_kernel(Ref::new(cq), entries)) }
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    code(cq::req_notify(unsafe { Ref::new(cq.cast()) }, solicited_only != 0))
}

pub(super) unsafe extern "C" fn req_notify_cq_kernel(
    cq: *mut ibv_cq,
    solicited_only: c_int,
) -> c_int {
    // SAFETY: the program passes a live CQ.
    code(cmd::cq::req_notify(unsafe { Ref::new(cq) }, solicited_only != 0))
}

#[cfg(test)]
mod tests {
    use crate::ops::testbed::*;

    /// Attributes that no CQ has, or that are missing, end in an error, and no command is sent.
    #[test]
    fn attributes_that_cannot_be() {
        let p = Program::new();
        let cq = |attr: ibv_cq_init_attr_ex| {
            refusal(call!(COMMON.create_cq_ex(p.context, &mut { attr })))
        };
        let flags = IBV_CQ_INIT_ATTR_MASK_FLAGS;
        let with_pd = IBV_CQ_INIT_ATTR_MASK_PD;
        let good = p.cq_attr();
        for (attr, errno) in [
            (ibv_cq_init_attr_ex { comp_mask: 1 << 2, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_cq_init_attr_ex {
                    comp_mask: flags,
                    flags: IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (ibv_cq_init_attr_ex { comp_mask: with_pd, ..good }, Errno::EINVAL),
            // A PD that is not a parent domain.
            (
                ibv_cq_init_attr_ex { comp_mask: with_pd, parent_domain: p.pd, ..good },
                Errno::EINVAL,
            ),
            (ibv_cq_init_attr_ex { cqe: u32::MAX, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { cqe: 0, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { comp_vector: u32::MAX, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { wc_flags: 1 << 32, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_cq_init_attr_ex { wc_flags: IBV_WC_EX_WITH_TM_INFO.into(), ..good },
                Errno::EOPNOTSUPP,
            ),
        ] {
            assert_eq!(cq(attr), Some(errno));
        }
        let none = ptr::null_mut();
        for cqe in [0, -1, c_int::MAX] {
            let cq = call!(COMMON.create_cq(p.context, cqe, none, 0));
            assert_eq!(refusal(cq), Some(Errno::EINVAL));
        }
        for entries in [-1, c_int::MIN] {
            assert_eq!(call!(RINGS.poll_cq(p.cq, entries, ptr::null_mut())), -1);
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        assert_eq!(call!(RINGS.poll_cq(p.cq, 0, ptr::null_mut())), 0);
        assert_eq!(p.kernel.names(), []);
    }
}
