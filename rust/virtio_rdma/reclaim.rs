// SPDX-License-Identifier: GPL-2.0

//! The means by which a device that has failed comes back while memory is short.
//!
//! The dirty pages that are to be written back may lie behind the device: its
//! consumers have file systems on NVMe over Fabrics or iSER. So the work items that
//! end in a reset of the device have threads in reserve ([`Queues`]), and nothing that
//! takes the device into service again waits for such pages to be written ([`NoIo`]).
//!
//! C headers: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h),
//! [`include/linux/sched/mm.h`](srctree/include/linux/sched/mm.h)

use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    sync::SetOnce,
    types::NotThreadSafe,
    workqueue, //
};

/// The workqueues of the module, while there are any.
static QUEUES: SetOnce<Raw> = SetOnce::new();

/// The workqueues: one that runs always, and one that stands still while tasks are frozen.
struct Raw {
    always: NonNull<bindings::workqueue_struct>,
    freezable: NonNull<bindings::workqueue_struct>,
}

// SAFETY: A workqueue may be used from any thread.
unsafe impl Send for Raw {}
// SAFETY: A workqueue does its own locking.
unsafe impl Sync for Raw {}

/// The workqueues of the module, each of which has a thread in reserve (`WQ_MEM_RECLAIM`). A work item on them must not
/// flush one of a workqueue that has none, as those of the RDMA core.
pub(crate) struct Queues(());

impl Queues {
    /// Makes the workqueues, once. For the module's initialisation. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EBUSY` if they are there already.
    pub(crate) fn new() -> Result<Self> {
        if QUEUES.as_ref().is_some() {
            return Err(EBUSY);
        }
        let always = alloc(c"virtio_rdma", false)?;
        let freezable = alloc(c"virtio_rdma_recovery", true).inspect_err(|_| {
            // SAFETY: The workqueue is valid, and has no work items.
            unsafe { bindings::destroy_workqueue(always.as_ptr()) };
        })?;
        QUEUES.populate(Raw { always, freezable });
        Ok(Self(()))
    }
}

/// Makes a workqueue.
fn alloc(name: &'static CStr, freezable: bool) -> Result<NonNull<bindings::workqueue_struct>> {
    // SAFETY: The name is a string that ends with a NUL.
    let raw = unsafe { bindings::virtio_rdma_alloc_workqueue(name.as_char_ptr(), freezable) };
    NonNull::new(raw).ok_or(ENOMEM)
}

impl Drop for Queues {
    /// Waits for the work items, and frees the workqueues.
    fn drop(&mut self) {
        if let Some(raw) = QUEUES.as_ref() {
            // SAFETY: The workqueues are valid. The module's end drops this when there is no device any more, so
            // nobody enqueues anything.
            unsafe {
                bindings::destroy_workqueue(raw.freezable.as_ptr());
                bindings::destroy_workqueue(raw.always.as_ptr());
            }
        }
    }
}

/// Returns the workqueue that runs always. Any context.
pub(crate) fn queue() -> &'static workqueue::Queue {
    match QUEUES.as_ref() {
        // SAFETY: The workqueue is valid until the end of the module, behind its last device.
        Some(raw) => unsafe { workqueue::Queue::from_raw(raw.always.as_ptr()) },
        None => workqueue::system_long(),
    }
}

/// Returns the workqueue that stands still while tasks are frozen. Any context.
pub(crate) fn freezable_queue() -> &'static workqueue::Queue {
    match QUEUES.as_ref() {
        // SAFETY: As in `queue`.
        Some(raw) => unsafe { workqueue::Queue::from_raw(raw.freezable.as_ptr()) },
        None => workqueue::system_freezable(),
    }
}

/// While this exists, what its thread allocates does not wait for input or output (`memalloc_noio_save()`).
pub(crate) struct NoIo {
    flags: c_uint,
    _thread: NotThreadSafe,
}

impl NoIo {
    /// Begins such a section. Sections nest.
    pub(crate) fn new() -> Self {
        Self {
            // SAFETY: `drop` restores the flags, in the same thread.
            flags: unsafe { bindings::virtio_rdma_memalloc_noio_save() },
            _thread: NotThreadSafe,
        }
    }
}

impl Drop for NoIo {
    fn drop(&mut self) {
        // SAFETY: The flags are those that this thread had.
        unsafe { bindings::virtio_rdma_memalloc_noio_restore(self.flags) };
    }
}
