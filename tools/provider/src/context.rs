// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Contexts: a program's view of a device.
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    clock, cmd,
    errno::{Errno, Result},
    object::{Attributes, Ref},
    qpn::Numbers,
};

/// What the provider adds to a context.
pub struct Private {
    /// The QP numbers in use, if the program owns the rings of its QPs and
    /// CQs; otherwise the kernel posts and polls.
    pub numbers: Option<Numbers>,
}

/// Opens a context in the kernel.
///
/// # Errors
///
/// The kernel's; ENOMEM; EPROTONOSUPPORT when the driver wants programs to post
/// and poll in a way that this provider does not know.
pub fn open(context: Ref<'_, verbs_context>) -> Result<Private> {
    Private::new(cmd::get_context(context)?)
}

/// ibv_import_device(3): a context that another program opened. The QPs and CQs
/// of each are its own, so that neither knows of the other's.
///
/// # Errors
///
/// As [`open`].
pub fn import(context: Ref<'_, verbs_context>) -> Result<Private> {
    Private::new(cmd::query_context(context)?)
}

impl Private {
    /// What a context of which the kernel says this has.
    fn new(description: virtio_rdma_uresp_alloc_ucontext) -> Result<Self> {
        let numbers = match description.data_path {
            VIRTIO_RDMA_UDATA_PATH_KERNEL => None,
            VIRTIO_RDMA_UDATA_PATH_RINGS => Some(Numbers::new()?),
            _ => return Err(Errno::EPROTONOSUPPORT),
        };
        Ok(Self { numbers })
    }
}

/// ibv_query_device_ex(3): what the kernel does not know, the clock of the time
/// stamps that polling takes.
pub fn set_clock(attributes: &mut Attributes<'_>) {
    attributes.set_clock(u64::MAX, clock::KHZ);
}

/// ibv_query_rt_values_ex(3). The raw clock's ticks stand in `tv_nsec`, as other
/// providers have it.
///
/// # Errors
///
/// EINVAL for an unknown value.
pub fn query_rt_values(values: &mut ibv_values_ex) -> Result {
    if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return Err(Errno::EINVAL);
    }
    if values.comp_mask != 0 {
        values.raw_clock = timespec { tv_sec: 0, tv_nsec: clock::device() as _ };
    }
    Ok(())
}
