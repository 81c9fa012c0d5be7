// SPDX-License-Identifier: GPL-2.0

//! Management datagrams that the device answers itself: performance management, by which the core
//! reads the counters of a port (IBA 16.1).

use super::{
    device::Device,
    Driver, //
};
use crate::bindings;
use kernel::prelude::*;

/// Bytes in front of the data of a performance management MAD: the header of all MADs, and 40 that
/// are reserved.
const DATA: usize = offset_of_data();

const fn offset_of_data() -> usize {
    core::mem::offset_of!(bindings::ib_mad, data) + 40
}

/// A MAD of performance management.
#[repr(transparent)]
pub(crate) struct PerfMad(bindings::ib_mad);

impl PerfMad {
    /// Wraps a MAD.
    ///
    /// # Safety
    ///
    /// `raw` must be a MAD that is valid, and written by nobody else, for `'a`.
    unsafe fn from_raw<'a>(raw: *const bindings::ib_mad) -> &'a Self {
        // SAFETY: The caller promises that `raw` is valid for `'a`; the type is a transparent wrapper.
        unsafe { &*raw.cast::<Self>() }
    }

    /// Returns the attribute.
    pub(crate) fn attribute(&self) -> u16 {
        u16::from_be(self.0.mad_hdr.attr_id)
    }

    /// Returns the port that the request selects.
    pub(crate) fn port_select(&self) -> u8 {
        self.bytes().get(DATA + 1).copied().unwrap_or(0)
    }

    fn is_get(&self) -> bool {
        u32::from(self.0.mad_hdr.method) == bindings::IB_MGMT_METHOD_GET
    }

    fn bytes(&self) -> &[u8; size_of::<bindings::ib_mad>()] {
        // SAFETY: The structure is packed integers and arrays of them.
        unsafe { &*(&raw const self.0).cast() }
    }

    /// Writes to the data.
    pub(crate) fn put<const N: usize>(&mut self, offset: usize, value: [u8; N]) {
        // SAFETY: The structure has packed integers and arrays of them. Any bytes are valid for these.
        let bytes: &mut [u8; size_of::<bindings::ib_mad>()] =
            unsafe { &mut *(&raw mut self.0).cast() };
        if let Some(place) = bytes.get_mut(DATA + offset..DATA + offset + N) {
            place.copy_from_slice(&value);
        }
    }

    /// Makes this the answer to `request`, without data.
    fn answer_to(&mut self, request: &Self) {
        self.0 = bindings::ib_mad {
            mad_hdr: request.0.mad_hdr,
            ..Default::default()
        };
        self.0.mad_hdr.method = bindings::IB_MGMT_METHOD_GET_RESP as u8;
        self.0.mad_hdr.status = 0;
    }

    fn refuse(&mut self) {
        let status = bindings::IB_MGMT_MAD_STATUS_UNSUPPORTED_METHOD_ATTRIB as u16;
        self.0.mad_hdr.status = status.to_be();
    }
}

/// The operation `process_mad`: answers performance management that this host asks for, as sysfs does, and leaves the
/// rest to the agents. A MAD from the network has a work completion.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn process_mad<D: Driver>(
    dev: *mut bindings::ib_device,
    _flags: c_int,
    port: u32,
    wc: *const bindings::ib_wc,
    _grh: *const bindings::ib_grh,
    request: *const bindings::ib_mad,
    reply: *mut bindings::ib_mad,
    _reply_size: *mut usize,
    _pkey_index: *mut u16,
) -> c_int {
    // SAFETY: The core calls with a device of this driver and two MADs of its own, which do not
    // overlap; the reply is written by this function alone.
    let (dev, request, reply) = unsafe {
        (
            Device::<D>::from_raw(dev),
            PerfMad::from_raw(request),
            &mut *reply.cast::<PerfMad>(),
        )
    };
    let success = bindings::ib_mad_result_IB_MAD_RESULT_SUCCESS;
    if port != super::device::PORT {
        return bindings::ib_mad_result_IB_MAD_RESULT_FAILURE as c_int;
    }
    let is_perf = u32::from(request.0.mad_hdr.mgmt_class) == bindings::IB_MGMT_CLASS_PERF_MGMT;
    if !wc.is_null() || !is_perf || !request.is_get() {
        return success as c_int;
    }
    reply.answer_to(request);
    match D::perf_mad(dev, request, reply) {
        Ok(()) => {}
        Err(error) if error == crate::errno::unsupported() => reply.refuse(),
        // The core gets no answer.
        Err(_) => return bindings::ib_mad_result_IB_MAD_RESULT_FAILURE as c_int,
    }
    (success | bindings::ib_mad_result_IB_MAD_RESULT_REPLY) as c_int
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ib_mad)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_data_behind_the_header() {
        let mut request = PerfMad(bindings::ib_mad::default());
        request.0.mad_hdr.attr_id = 0x12u16.to_be();
        request.put(1, [3]);
        assert_eq!(request.attribute(), 0x12);
        assert_eq!(request.port_select(), 3);

        let mut reply = PerfMad(bindings::ib_mad::default());
        reply.answer_to(&request);
        assert_eq!(reply.attribute(), 0x12);
        assert_eq!(reply.port_select(), 0);
        reply.put(24, 0x0102_0304u32.to_be_bytes());
        assert_eq!(DATA, 64);
        assert_eq!(reply.bytes()[64 + 24..64 + 28], [1, 2, 3, 4]);
        // What does not fit is not written.
        reply.put(190, [0xff; 4]);
        assert_eq!(reply.bytes()[254..], [0, 0]);
    }
}
