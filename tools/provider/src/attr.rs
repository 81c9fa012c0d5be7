// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The structures by which a program passes attributes, and the objects that they name.

use crate::{
    bindings::*,
    object::{Object, Ref},
};
use core::{marker::PhantomData, mem::offset_of};

type CqRef<'a> = Ref<'a, Object<verbs_cq>>;

/// Returns the send CQ and the receive CQ of a new QP, or `None` if one is missing. An XRC
/// initiator receives nothing: its send CQ stands for both.
pub fn cqs(attr: &ibv_qp_init_attr_ex) -> Option<(CqRef<'_>, CqRef<'_>)> {
    let recv_cq = match attr.qp_type {
        IBV_QPT_XRC_SEND => attr.send_cq,
        _ => attr.recv_cq,
    };
    if attr.send_cq.is_null() || recv_cq.is_null() {
        return None;
    }
    // SAFETY: neither pointer is null, and the program passes live CQs, which this provider made.
    Some(unsafe { (Ref::new(attr.send_cq.cast()), Ref::new(recv_cq.cast())) })
}

/// Returns the PD and the CQ of a new SRQ for XRC, or `None` if one of them or the XRC domain is
/// missing.
pub fn pd_and_cq(attr: &ibv_srq_init_attr_ex) -> Option<(Ref<'_, ibv_pd>, CqRef<'_>)> {
    const MASK: u32 = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    if attr.comp_mask & MASK != MASK || attr.xrcd.is_null() {
        return None;
    }
    // SAFETY: the mask says that both fields are set; the program passes live objects, which this
    // provider made.
    unsafe { Ref::optional(attr.pd).zip(Ref::optional(attr.cq.cast())) }
}

/// The attributes of a device that a program asked for. A program that was built for an older
/// release has only the first fields of the structure.
pub struct DeviceAttr<'a> {
    attr: *mut ibv_device_attr_ex,
    /// Bytes that the program has.
    size: usize,
    lifetime: PhantomData<&'a mut ()>,
}

impl DeviceAttr<'_> {
    /// Takes the `size` bytes at `attr`.
    ///
    /// # Safety
    ///
    /// They are the caller's to write for the lifetime of this value.
    pub unsafe fn new(attr: *mut ibv_device_attr_ex, size: usize) -> Self {
        Self { attr, size, lifetime: PhantomData }
    }

    /// Sets the version of the firmware, three numbers. Leaves it empty if the device does not tell.
    pub fn set_firmware(&mut self, version: u64) {
        const TEXT: usize = offset_of!(ibv_device_attr, fw_ver);
        const { assert!(TEXT == 0 && offset_of!(ibv_device_attr_ex, orig_attr) == 0) };
        let len = size_of_val(&ibv_device_attr::default().fw_ver);
        if version == 0 || self.size < len {
            return;
        }
        let [major, minor, patch] = [32, 16, 0].map(|shift| (version >> shift) as u32);
        let (minor, patch) = (minor & 0xffff, patch & 0xffff);
        // SAFETY: the text is the first field, and within the caller's bytes; the format takes three numbers.
        unsafe { snprintf(self.attr.cast(), len as _, c"%u.%u.%u".as_ptr(), major, minor, patch) };
    }

    /// Sets a clock's mask and its frequency in kHz, each if the program has the field.
    pub fn set_clock(&mut self, mask: u64, khz: u64) {
        const MASK: usize = offset_of!(ibv_device_attr_ex, completion_timestamp_mask);
        const CLOCK: usize = offset_of!(ibv_device_attr_ex, hca_core_clock);
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
    use crate::model::objects;
    use std::{ffi::CStr, ptr};

    /// Both CQs of a QP must be there; an XRC initiator, which receives nothing, has one.
    #[test]
    fn cqs_of_a_qp() {
        let (send, recv) = (objects::cq(None), objects::cq(None));
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

    /// The version is three numbers, or no text if the device does not tell.
    #[test]
    fn version_of_the_firmware() {
        let text_in = |version, size| {
            let mut attr = ibv_device_attr_ex::default();
            // SAFETY: the attributes are at least as long.
            unsafe { DeviceAttr::new(&mut attr, size) }.set_firmware(version);
            // SAFETY: the text ends within the field.
            unsafe { CStr::from_ptr(attr.orig_attr.fw_ver.as_ptr()) }.to_owned()
        };
        let text = |version| text_in(version, size_of::<ibv_device_attr_ex>());
        assert_eq!(text(0).as_c_str(), c"");
        for (size, text) in [(0, c""), (63, c""), (64, c"0.0.1")] {
            assert_eq!(text_in(1, size).as_c_str(), text);
        }
        assert_eq!(text(1 << 32 | 2 << 16 | 3).as_c_str(), c"1.2.3");
        assert_eq!(text(u64::MAX).as_c_str(), c"4294967295.65535.65535");
    }

    /// An attribute is written only if the program has room for all of its bytes.
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
            unsafe { DeviceAttr::new(&mut attr, size) }.set_clock(3, 4);
            assert_eq!((attr.completion_timestamp_mask, attr.hca_core_clock), (mask, clock));
        }
    }
}
