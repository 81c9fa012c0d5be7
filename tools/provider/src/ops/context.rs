// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of contexts, the device and its port.

use crate::{
    attr::DeviceAttr, bindings::*, cmd, context, errno::code, libibverbs::library, object::Ref,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: libibverbs passes a context that `driver` completed, and nobody uses it any more.
    unsafe {
        Ref::<'_, ibv_context>::new(context).whole().finish();
        library(context).free_context(context);
    }
}

pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and the program lends `attr_size` bytes at `attr`.
    code(unsafe {
        cmd::context::query_device(Ref::new(context), input, attr, attr_size)
            .map(|version| context::complete(&mut DeviceAttr::new(attr, attr_size), version))
    })
}

pub(super) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and the program lends the structure.
    let (context, values) = unsafe { (Ref::new(context), &mut *values) };
    code(context::query_rt_values(context, values))
}

pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and attributes as it knows them.
    code(unsafe { cmd::context::query_port(Ref::new(context), port_num, port_attr) })
}

/// The verb that releases of rdma-core have from 62 on.
///
/// # Safety
///
/// The context is live, and `speed` the caller's to write.
pub unsafe extern "C" fn query_port_speed(
    context: *mut ibv_context,
    port_num: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and the program lends the number.
    let (context, speed) = unsafe { (Ref::new(context), &mut *speed) };
    code(cmd::context::query_port_speed(context, port_num, speed))
}

#[cfg(test)]
mod tests {
    use crate::ops::testbed::*;

    /// The attributes of a device are written as far as the program has room, with the
    /// clock of the time stamps.
    #[test]
    fn attributes_of_the_device() {
        let p = Program::new();
        let clock = offset_of!(ibv_device_attr_ex, hca_core_clock);
        for (size, has_clock) in [(clock, false), (clock + 8, true)] {
            let mut attr = ibv_device_attr_ex { hca_core_clock: 1, ..Default::default() };
            let input = ptr::null();
            p.kernel.answer(UVERBS_ATTR_CORE_OUT, [0u64; 22]);
            assert_eq!(call!(COMMON.query_device_ex(p.context, input, &mut attr, size)), 0);
            assert_eq!(attr.completion_timestamp_mask, u64::MAX);
            assert_eq!(attr.hca_core_clock, if has_clock { crate::clock::KHZ } else { 1 });
        }
        let mut attr = ibv_device_attr_ex::default();
        p.kernel.fail(EPERM);
        let error =
            call!(COMMON.query_device_ex(p.context, ptr::null(), &mut attr, size_of_val(&attr)));
        assert_eq!((error, attr.completion_timestamp_mask), (EPERM as c_int, 0));
        let mut values = ibv_values_ex { comp_mask: 1, ..Default::default() };
        assert_eq!(call!(COMMON.query_rt_values(p.context, &mut values)), 0);
        assert_ne!(values.raw_clock.tv_nsec, 0);
        // A value that the device does not have.
        p.kernel.take();
        values.comp_mask = 1 << 1;
        assert_eq!(call!(COMMON.query_rt_values(p.context, &mut values)), EINVAL as c_int);
        assert_eq!(p.kernel.names(), []);
    }
}
