// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interrupts: MSI-X vectors and INTx, each an eventfd of the client.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde::{Deserialize, Serialize};

/// The number for "no vector", VIRTIO 1.3, 4.1.5.1.2.
pub(crate) const NO_VECTOR: u16 = 0xffff;

/// Bits of the ISR register, VIRTIO 1.3, 4.1.4.5.
const ISR_QUEUE: u8 = 1 << 0;
const ISR_CONFIG: u8 = 1 << 1;

/// The interrupts that have an eventfd, the mask of INTx, and the ISR register.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SavedInterrupts {
    msix: Vec<bool>,
    intx: bool,
    intx_masked: bool,
    isr: u8,
}

#[derive(Debug, Default)]
struct Eventfds {
    /// Empty while the guest has MSI-X disabled.
    msix: Vec<Option<Arc<OwnedFd>>>,
    intx: Option<Arc<OwnedFd>>,
    intx_masked: bool,
}

/// The device's interrupt lines, shared by the queues.
#[derive(Debug, Default)]
pub(crate) struct Interrupts {
    eventfds: RwLock<Eventfds>,
    isr: AtomicU8,
}

impl SavedInterrupts {
    /// Returns how many eventfds there are.
    pub(crate) fn descriptors(&self) -> usize {
        self.msix.iter().filter(|is_there| **is_there).count() + usize::from(self.intx)
    }

    /// Returns how many MSI-X vectors were named.
    pub(crate) fn vectors(&self) -> usize {
        self.msix.len()
    }
}

impl Interrupts {
    /// Sets the eventfds of `count` vectors from `start` on; takes them away if `fds` has none.
    pub(crate) fn set_msix(&self, start: usize, count: usize, fds: Vec<OwnedFd>) {
        let mut eventfds = self.write();
        let end = start + count;
        if eventfds.msix.len() < end {
            eventfds.msix.resize_with(end, || None);
        }
        let mut fds = fds.into_iter().map(Arc::new);
        for vector in &mut eventfds.msix[start..end] {
            *vector = fds.next();
        }
    }

    /// Forgets all vectors: the guest disabled MSI-X.
    pub(crate) fn clear_msix(&self) {
        self.write().msix.clear();
    }

    pub(crate) fn set_intx(&self, fd: Option<OwnedFd>) {
        let mut eventfds = self.write();
        eventfds.intx = fd.map(Arc::new);
        eventfds.intx_masked = false;
    }

    /// Masks or unmasks INTx. An interrupt that is pending is signalled when INTx is unmasked.
    pub(crate) fn mask_intx(&self, masked: bool) {
        self.write().intx_masked = masked;
        if !masked && self.isr.load(Ordering::Acquire) != 0 {
            self.signal_intx();
        }
    }

    /// Signals a vector because the client asks for it.
    pub(crate) fn trigger(&self, vector: usize) {
        if let Some(Some(fd)) = self.read().msix.get(vector) {
            signal(fd);
        }
    }

    /// Returns which interrupts have eventfds, and adds these to `descriptors`: those of MSI-X first.
    pub(crate) fn save(&self, descriptors: &mut Vec<Arc<OwnedFd>>) -> SavedInterrupts {
        let eventfds = self.read();
        descriptors.extend(eventfds.msix.iter().flatten().chain(&eventfds.intx).cloned());
        SavedInterrupts {
            msix: eventfds.msix.iter().map(Option::is_some).collect(),
            intx: eventfds.intx.is_some(),
            intx_masked: eventfds.intx_masked,
            isr: self.isr.load(Ordering::Acquire),
        }
    }

    /// Takes the eventfds that [`Self::save`] has named, in the same order.
    pub(crate) fn load(
        &self,
        saved: &SavedInterrupts,
        descriptors: &mut impl Iterator<Item = Arc<OwnedFd>>,
    ) {
        let mut take = |is_there: &bool| is_there.then(|| descriptors.next()).flatten();
        let mut eventfds = self.write();
        eventfds.msix = saved.msix.iter().map(&mut take).collect();
        eventfds.intx = take(&saved.intx);
        eventfds.intx_masked = saved.intx_masked;
        self.isr.store(saved.isr, Ordering::Release);
    }

    /// Reads and clears the ISR register.
    pub(crate) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    fn interrupt(&self, vector: u16, cause: u8) {
        let eventfds = self.read();
        if eventfds.msix.is_empty() {
            drop(eventfds);
            self.isr.fetch_or(cause, Ordering::AcqRel);
            self.signal_intx();
        } else if let Some(Some(fd)) = eventfds.msix.get(usize::from(vector)) {
            signal(fd);
        }
    }

    fn signal_intx(&self) {
        let eventfds = self.read();
        if let (Some(fd), false) = (&eventfds.intx, eventfds.intx_masked) {
            signal(fd);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Eventfds> {
        self.eventfds.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Eventfds> {
        self.eventfds.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds to an eventfd. Never waits for the client, whatever the client does to the eventfd.
fn signal(fd: &OwnedFd) {
    if let Err(error) = descriptor::signal(fd) {
        tracing::debug!(%error, "eventfd of an interrupt");
    }
}

/// The interrupt of one queue, or of configuration changes.
#[derive(Debug)]
pub(crate) struct Vector {
    interrupts: Arc<Interrupts>,
    /// The MSI-X vector that the driver chose, or [`NO_VECTOR`].
    number: AtomicU16,
    cause: u8,
}

impl Vector {
    pub(crate) fn of_queue(interrupts: &Arc<Interrupts>) -> Self {
        Self { interrupts: interrupts.clone(), number: NO_VECTOR.into(), cause: ISR_QUEUE }
    }

    pub(crate) fn of_config(interrupts: &Arc<Interrupts>) -> Self {
        Self { interrupts: interrupts.clone(), number: NO_VECTOR.into(), cause: ISR_CONFIG }
    }

    pub(crate) fn get(&self) -> u16 {
        self.number.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, vector: u16) {
        self.number.store(vector, Ordering::Release);
    }
}

impl ring::Signal for Vector {
    fn signal(&self) {
        self.interrupts.interrupt(self.get(), self.cause);
    }
}
