// SPDX-License-Identifier: GPL-2.0

//! Memory that the device can reach, and what becomes of it when nobody uses it any more.
//!
//! A device that has failed may still touch memory that it was given, so such
//! memory waits in the [`Quarantine`] until the device has been reset. Pages of
//! page tables are needed by most commands: the [`ListCache`] keeps some of them.

#![deny(unsafe_code)]

use crate::{
    dma::{
        Buffer,
        Pages,
        PAGE_SIZE, //
    },
    umem::Umem, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// Memory that the device can reach.
pub(crate) enum Memory {
    /// Memory of a program.
    Program(Umem),
    /// Memory behind a dma-buf.
    DmaBuf(Umem),
    /// Memory of the kernel.
    Kernel(Arc<Pages>),
    /// A list of pages.
    List(#[expect(dead_code, reason = "only kept")] Buffer),
    /// A page table.
    Table(#[expect(dead_code, reason = "only kept")] KVVec<Buffer>),
}

/// Memory that the device may still touch although nobody uses it: the device has failed, or its reply made
/// no sense.
#[pin_data]
pub(crate) struct Quarantine {
    /// `None` once the device has been reset, and touches nothing any more.
    #[pin]
    kept: Mutex<Option<KVec<Memory>>>,
}

impl Quarantine {
    /// Makes an empty quarantine, of a device that has not been reset yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            kept <- new_mutex!(Some(KVec::new())),
        })
    }

    /// Keeps memory until the device has been reset. May sleep.
    pub(crate) fn keep(&self, memory: Memory) {
        let mut guard = self.kept.lock();
        let Some(kept) = &mut *guard else {
            // The lock is not held while the memory is freed.
            drop(guard);
            drop(memory);
            return;
        };
        if kept.reserve(1, GFP_KERNEL).is_err() {
            // The memory is leaked: if it were freed, the device could write to it when it has
            // another owner.
            core::mem::forget(memory);
            return;
        }
        let _ = kept.push_within_capacity(memory);
    }

    /// Frees what was kept, because the device has been reset. May sleep.
    pub(crate) fn end(&self) {
        let kept = self.kept.lock().take();
        // The lock is not held while the memory is freed.
        drop(kept);
    }
}

/// The most pages that a [`ListCache`] keeps: those of a registration of 64 MiB, with a list of lists.
const MAX_LISTS: usize = 33;

/// Pages for page tables of commands to come.
#[pin_data]
pub(crate) struct ListCache {
    /// At most [`MAX_LISTS`]; `None` once the queues of the device were given up.
    #[pin]
    lists: Mutex<Option<KVec<Buffer>>>,
}

impl ListCache {
    /// Makes an empty cache. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<impl PinInit<Self>> {
        let lists = KVec::with_capacity(MAX_LISTS, GFP_KERNEL)?;
        Ok(pin_init!(Self {
            lists <- new_mutex!(Some(lists)),
        }))
    }

    /// Takes a page, if there is one. It still holds the entries of the command that used it last. May sleep.
    pub(crate) fn take(&self) -> Option<Buffer> {
        (*self.lists.lock()).as_mut()?.pop()
    }

    /// Takes a block that the device no longer touches, and keeps it for the next command if it is a page. May
    /// sleep.
    pub(crate) fn put(&self, list: Buffer) {
        let is_page = list.words().1 * size_of::<u64>() == PAGE_SIZE;
        let mut lists = self.lists.lock();
        let rest = match &mut *lists {
            Some(lists) if is_page => lists.push_within_capacity(list).err().map(|error| error.0),
            _ => Some(list),
        };
        // The lock is not held while the list is freed.
        drop(lists);
        drop(rest);
    }

    /// Frees the pages, and keeps no others from now on. May sleep.
    pub(crate) fn end(&self) {
        let lists = self.lists.lock().take();
        // The lock is not held while the lists are freed.
        drop(lists);
    }
}
