// SPDX-License-Identifier: GPL-2.0

//! The details that the driver adds to the objects that `rdma resource show` lists.
//!
//! C header: [`include/rdma/restrack.h`](srctree/include/rdma/restrack.h)

use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_result,
        to_result, //
    },
    prelude::*, //
};

/// The netlink message that takes the details of one object.
pub(crate) struct Details<'a> {
    message: NonNull<bindings::sk_buff>,
    _lifetime: PhantomData<&'a mut ()>,
}

impl Details<'_> {
    /// Adds a number.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the message is full.
    pub(crate) fn put(&mut self, name: &'static CStr, value: u32) -> Result {
        // SAFETY: The message is valid, and the name is a C string.
        to_result(unsafe {
            bindings::rdma_nl_put_driver_u32(self.message.as_ptr(), name.as_char_ptr(), value)
        })
    }
}

/// Lets `fill` add the details of an object to a message. If it fails, the message stays as it was.
///
/// # Safety
///
/// `message` must be valid, and used by nobody else meanwhile.
pub(super) unsafe fn nest(
    message: *mut bindings::sk_buff,
    fill: impl FnOnce(&mut Details<'_>) -> Result,
) -> c_int {
    from_result(|| {
        let too_long = Error::from_errno(-(bindings::EMSGSIZE as c_int));
        let mut details = Details {
            message: NonNull::new(message).ok_or(EINVAL)?,
            _lifetime: PhantomData,
        };
        let kind = bindings::rdma_nldev_attr_RDMA_NLDEV_ATTR_DRIVER as c_int;
        // SAFETY: The caller promises that `message` is valid, and nobody else uses it.
        let nest = unsafe { bindings::virtio_rdma_nla_nest_start(message, kind) };
        if nest.is_null() {
            return Err(too_long);
        }
        let result = fill(&mut details);
        // SAFETY: The caller promises that `message` is valid; `nest` began in it and has not ended.
        unsafe {
            if result.is_ok() {
                bindings::virtio_rdma_nla_nest_end(message, nest);
            } else {
                bindings::virtio_rdma_nla_nest_cancel(message, nest);
            }
        }
        result.map(|()| 0)
    })
}
