// SPDX-License-Identifier: GPL-2.0

//! Synchronisation that the `kernel` crate does not have: a spinlock that keeps
//! interrupts off, and a completion that can be waited for with a timeout.
//!
//! `kernel::sync::SpinLock` leaves interrupts on, and `SpinLockIrq` is not there
//! before Linux 7.3. `kernel::sync::Completion` can be waited for without a timeout
//! alone, and completes for ever, while a slot of the control queue waits for one
//! reply after the other and must give up a device that does not send it.
//!
//! Verbs such as `post_send` and `poll_cq` may be called from any context
//! (`Documentation/infiniband/core_locking.rst`), and virtqueue callbacks come
//! from hard interrupts, so what they share needs interrupts off.

use crate::bindings;
use core::time::Duration;
use kernel::{
    container_of,
    prelude::*,
    sync::{
        lock::{
            Backend,
            Guard,
            Lock, //
        },
        Arc, //
    },
    types::Opaque,
    workqueue::{
        DelayedWork,
        HasDelayedWork,
        HasWork,
        Work,
        WorkItem, //
    },
};

/// A spinlock that is held with interrupts off.
///
/// Guards of several are to be dropped in the reverse order: each restores the interrupts as they
/// were when it was made. One that goes too early switches them on while another lock is held, and an
/// interrupt that takes that lock waits for ever on the same processor. It does not let two have the
/// data. All guards here are locals, which go in the reverse order unless something drops or moves
/// them, and lockdep reports a lock of interrupts that is held with interrupts on.
pub(crate) type IrqSpinLock<T> = Lock<T, IrqSpinLockBackend>;

/// The guard of an [`IrqSpinLock`].
pub(crate) type IrqGuard<'a, T> = Guard<'a, T, IrqSpinLockBackend>;

/// `spin_lock_irqsave()` and `spin_unlock_irqrestore()`.
pub(crate) struct IrqSpinLockBackend;

// SAFETY: The underlying `spinlock_t` ensures mutual exclusion, and `relock` is the default.
unsafe impl Backend for IrqSpinLockBackend {
    type State = bindings::spinlock_t;
    type GuardState = c_ulong;

    unsafe fn init(ptr: *mut Self::State, name: *const c_char, key: *mut bindings::lock_class_key) {
        // SAFETY: The caller guarantees that `ptr` is valid for writes and that `name` and `key`
        // stay valid.
        unsafe { bindings::__spin_lock_init(ptr, name, key) }
    }

    #[inline]
    unsafe fn lock(ptr: *mut Self::State) -> Self::GuardState {
        // SAFETY: The caller guarantees that the lock is initialised.
        unsafe { bindings::virtio_rdma_spin_lock_irqsave(ptr) }
    }

    #[inline]
    unsafe fn try_lock(ptr: *mut Self::State) -> Option<Self::GuardState> {
        let mut flags = 0;
        // SAFETY: The caller guarantees that the lock is initialised; `flags` is valid for writes.
        unsafe { bindings::virtio_rdma_spin_trylock_irqsave(ptr, &raw mut flags) }.then_some(flags)
    }

    #[inline]
    unsafe fn unlock(ptr: *mut Self::State, flags: &Self::GuardState) {
        // SAFETY: The caller guarantees that it holds the lock, and `flags` comes from `lock`.
        unsafe { bindings::virtio_rdma_spin_unlock_irqrestore(ptr, *flags) }
    }

    #[inline]
    unsafe fn assert_is_held(ptr: *mut Self::State) {
        // SAFETY: The caller guarantees that the lock is initialised.
        unsafe { bindings::virtio_rdma_lockdep_assert_held(ptr) }
    }
}

/// Creates the initialiser of an [`IrqSpinLock`]; each place of use is a lock class.
macro_rules! new_irq_spinlock {
    ($inner:expr, $name:literal) => {
        $crate::sync::IrqSpinLock::new(
            $inner,
            ::kernel::c_str!($name),
            ::kernel::static_lock_class!(),
        )
    };
}
pub(crate) use new_irq_spinlock;

/// A `struct completion`, for one waiter at a time unless [`Completion::complete_all`] completes it.
#[pin_data]
pub(crate) struct Completion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: A `struct completion` may be used from any thread.
unsafe impl Send for Completion {}
// SAFETY: All functions of `struct completion` used here do their own locking.
unsafe impl Sync for Completion {}

impl Completion {
    /// Creates a completion that is not complete.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot| {
                // SAFETY: `slot` is valid for writes.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Makes the completion incomplete again. Nobody may wait for it meanwhile.
    pub(crate) fn reinit(&self) {
        // SAFETY: `inner` is initialised.
        unsafe { bindings::virtio_rdma_reinit_completion(self.inner.get()) }
    }

    /// Wakes the waiter, or lets the next wait return at once. Any context.
    pub(crate) fn complete(&self) {
        // SAFETY: `inner` is initialised.
        unsafe { bindings::complete(self.inner.get()) }
    }

    /// Wakes all waiters, and lets each later wait return at once. Any context.
    pub(crate) fn complete_all(&self) {
        // SAFETY: `inner` is initialised.
        unsafe { bindings::complete_all(self.inner.get()) }
    }

    /// Returns whether [`Self::complete_all`] was called: what its caller did before is visible then. Any context.
    pub(crate) fn is_complete(&self) -> bool {
        // SAFETY: `inner` is initialised.
        unsafe { bindings::completion_done(self.inner.get()) }
    }

    /// Waits until the completion is complete. Sleeps, uninterruptibly.
    pub(crate) fn wait(&self) {
        // SAFETY: `inner` is initialised.
        unsafe { bindings::wait_for_completion(self.inner.get()) }
    }

    /// Waits until the completion is complete; false if `timeout` passed first. Sleeps,
    /// uninterruptibly.
    #[must_use]
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: `inner` is initialised.
        unsafe {
            bindings::wait_for_completion_timeout(
                self.inner.get(),
                bindings::__msecs_to_jiffies(milliseconds),
            ) != 0
        }
    }
}

/// Waits until each task that is in the kernel has slept, or has left the kernel: a function that was about to return
/// without sleeping has returned. A kernel without `CONFIG_TASKS_RCU` does not wait for a task that was preempted.
/// Sleeps.
pub(crate) fn wait_for_tasks() {
    // SAFETY: The function may sleep, and has no other requirements.
    unsafe { bindings::virtio_rdma_synchronize_rcu_tasks() }
}

/// Waits until a work item that was enqueued has run. Sleeps.
pub(crate) fn flush_work<T: WorkItem<ID> + ?Sized, const ID: u64>(work: &Work<T, ID>) {
    // SAFETY: The reference says that the work item is valid and initialised.
    unsafe { bindings::flush_work(Work::raw_get(work)) };
}

/// Takes a work item off its queue, or waits until it has run. Sleeps.
pub(crate) fn cancel_work<T, const ID: u64>(item: &Arc<T>, work: fn(&T) -> &Work<T, ID>)
where
    T: WorkItem<ID, Pointer = Arc<T>> + HasWork<T, ID>,
{
    // SAFETY: The reference says that the work item is valid and initialised.
    if unsafe { bindings::cancel_work_sync(Work::raw_get(work(item))) } {
        // SAFETY: The work item was on a queue, which had the reference from `Arc::into_raw` when the item was
        // enqueued. The item does not run any more, so nobody else gives that reference back.
        drop(unsafe { Arc::from_raw(Arc::as_ptr(item)) });
    }
}

/// Does for a delayed work item what [`cancel_work`] does. Sleeps.
pub(crate) fn cancel_delayed_work<T, const ID: u64>(
    item: &Arc<T>,
    work: fn(&T) -> &DelayedWork<T, ID>,
) where
    T: WorkItem<ID, Pointer = Arc<T>> + HasDelayedWork<T, ID>,
{
    // SAFETY: The reference says that the work item is valid and initialised. It is the member `work` of a
    // `struct delayed_work`.
    let cancelled = unsafe {
        let work = Work::raw_get(DelayedWork::raw_as_work(work(item)));
        bindings::cancel_delayed_work_sync(container_of!(work, bindings::delayed_work, work))
    };
    if cancelled {
        // SAFETY: As in `cancel_work`: the timer or the queue had the reference.
        drop(unsafe { Arc::from_raw(Arc::as_ptr(item)) });
    }
}

/// Keeps this module in memory for ever; false if it is being unloaded already. Any context.
#[must_use]
pub(crate) fn keep_module() -> bool {
    // SAFETY: The function has no requirements: the module is there while its code runs.
    unsafe { bindings::virtio_rdma_module_get() }
}

/// Returns whether the machine is about to halt, to restart or to start another kernel. Any context.
///
/// The state changes before devices are shut down, each under its lock: who has the lock of a device, and gets false
/// here, is done before that device is shut down.
pub(crate) fn is_shutting_down() -> bool {
    // SAFETY: The variable is valid, and nobody has a reference to it.
    let state = unsafe { (&raw const bindings::system_state).read_volatile() };
    state > bindings::system_states_SYSTEM_RUNNING
}

/// Returns the number of CPUs that are online.
pub(crate) fn num_online_cpus() -> u32 {
    // SAFETY: The function has no requirements.
    unsafe { bindings::virtio_rdma_num_online_cpus() }
}

/// Returns whether the scheduler wants this processor for another thread than the current.
pub(crate) fn needs_processor() -> bool {
    // SAFETY: The function has no requirements.
    unsafe { bindings::virtio_rdma_need_resched() }
}
