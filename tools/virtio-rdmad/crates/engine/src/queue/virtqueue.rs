// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtqueue together with its interrupt.

use std::sync::Arc;

use memory::GuestMemory;
use ring::{Chain, Layout, Position, RingError, Signal, SplitQueue};
use serde::{Deserialize, Serialize};

/// A virtqueue of the guest, or the place for one that the guest did not set
/// up, which is always empty.
#[derive(Default)]
pub(crate) struct Virtqueue {
    ring: Option<SplitQueue>,
    /// The ring that is no longer in memory.
    lost: Option<Box<Lost>>,
    signal: Option<Arc<dyn Signal>>,
    /// Whether the ring is unusable until it is drained or set up again.
    broken: bool,
}

/// A ring that is no longer in memory. It goes on where it was if its memory comes back before the device needs it.
#[derive(Clone, Copy)]
struct Lost {
    layout: Layout,
    position: Position,
    error: RingError,
}

/// The image of a virtqueue. The place of its ring, and its interrupt, are the transport's.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct VirtqueueImage {
    next_avail: u16,
    next_used: u16,
    signalled: u16,
    broken: bool,
}

impl VirtqueueImage {
    /// Returns the image in which the buffer that was taken last is in the queue again.
    pub fn with_last(self) -> Self {
        Self { next_avail: self.next_avail.wrapping_sub(1), ..self }
    }

    /// Returns how far the device had come.
    pub fn position(&self) -> Position {
        let Self { next_avail, next_used, signalled, .. } = *self;
        Position { next_avail, next_used, signalled }
    }
}

impl Virtqueue {
    /// Returns the image, if there is a ring.
    pub fn save(&self) -> Option<VirtqueueImage> {
        let (_, position) = self.place()?;
        let Position { next_avail, next_used, signalled } = position;
        Some(VirtqueueImage { next_avail, next_used, signalled, broken: self.broken })
    }

    /// Puts a ring in place, at the position of the image.
    pub fn load(&mut self, image: &VirtqueueImage, ring: SplitQueue, signal: Arc<dyn Signal>) {
        self.set(Some(ring), Some(signal));
        self.broken = image.broken;
    }

    /// Puts a ring in place, or takes it away.
    pub fn set(&mut self, ring: Option<SplitQueue>, signal: Option<Arc<dyn Signal>>) {
        (self.ring, self.lost) = (ring, None);
        self.signal = signal;
        self.broken = false;
    }

    /// Replaces the interrupt.
    pub fn set_signal(&mut self, signal: Arc<dyn Signal>) {
        self.signal = Some(signal);
    }

    /// Takes the ring away, for a transport that asks for its indices.
    pub fn take(&mut self) -> Option<SplitQueue> {
        (self.signal, self.lost) = (None, None);
        self.ring.take()
    }

    /// Returns where the ring is, and how far the device has come in it.
    fn place(&self) -> Option<(Layout, Position)> {
        let ring = self.ring.as_ref().map(|ring| (ring.layout(), ring.position()));
        ring.or_else(|| self.lost.as_ref().map(|lost| (lost.layout, lost.position)))
    }

    /// Follows a change of the memory map. A ring that is not in the new one is touched no more, and is malformed for
    /// whoever takes the next chain.
    pub fn set_memory(&mut self, memory: &GuestMemory) -> Result<(), RingError> {
        let Some((layout, position)) = self.place() else { return Ok(()) };
        // A chain is shown to the driver as soon as it is given back, so the position says all.
        let ring = SplitQueue::at(memory, layout, position);
        let error = ring.as_ref().err().copied();
        self.lost = error.map(|error| Box::new(Lost { layout, position, error }));
        self.ring = ring.ok();
        error.map_or(Ok(()), Err)
    }

    /// Returns the descriptors of the ring; 0 if there is no ring.
    pub fn size(&self) -> u16 {
        self.ring.as_ref().map_or(0, SplitQueue::size)
    }

    /// Returns how many chains wait to be taken.
    #[inline]
    pub fn waiting(&self) -> u16 {
        self.ring.as_ref().and_then(|ring| ring.pending().ok()).unwrap_or(0)
    }

    /// Takes the next chain. An error is reported once; from then on the ring
    /// is empty until it is drained.
    pub fn pop(&mut self) -> Result<Option<Chain>, RingError> {
        match &mut self.ring {
            Some(ring) if !self.broken => ring.pop().inspect_err(|_| self.broken = true),
            _ => self.report_loss(),
        }
    }

    /// Reports once that the ring is no longer in memory.
    #[cold]
    fn report_loss(&mut self) -> Result<Option<Chain>, RingError> {
        match &self.lost {
            Some(lost) if !std::mem::replace(&mut self.broken, true) => Err(lost.error),
            _ => Ok(None),
        }
    }

    /// Gives a chain back and shows it to the driver at once.
    pub fn give_back(&mut self, head: u16, written: u32) {
        let Some(ring) = &mut self.ring else { return };
        let result = ring.push(head, written).and_then(|()| ring.publish());
        self.broken |= result.is_err();
    }

    /// Interrupts the guest if the ring says so.
    pub fn signal_if_needed(&mut self) {
        if self.ring.as_mut().is_some_and(|ring| ring.signal_needed() == Ok(true)) {
            self.signal();
        }
    }

    /// Interrupts the guest, unless it suppresses that or has seen everything;
    /// tells whether it did.
    pub fn signal_unless_seen(&self) -> bool {
        let wanted = self.ring.as_ref().is_some_and(|ring| ring.wants_signal() == Ok(true));
        if wanted {
            self.signal();
        }
        wanted
    }

    fn signal(&self) {
        if let Some(signal) = &self.signal {
            signal.signal();
        }
    }

    /// Asks for a kick with the next chain; whether one is there already.
    pub fn enable_notify(&mut self) -> bool {
        match &mut self.ring {
            Some(ring) if !self.broken => ring.enable_notify() != Ok(false),
            _ => false,
        }
    }

    /// Asks for no kicks.
    pub fn disable_notify(&mut self) {
        if let Some(ring) = &mut self.ring {
            // Read-only ring memory: then kicks come, and that is all.
            let _ = ring.disable_notify();
        }
    }

    /// Gives every available chain back unread, as DESTROY and RESET must.
    ///
    /// At most as many as the ring holds, in case the driver goes on adding.
    pub fn drain(&mut self) {
        let Some(ring) = &mut self.ring else {
            self.broken = false;
            return;
        };
        for _ in 0..ring.size() {
            match ring.pop_head() {
                Ok(Some(head)) => {
                    if ring.push(head, 0).is_err() {
                        break;
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
        self.broken = ring.publish().and_then(|_| ring.pending()).is_err();
        // The driver waits for the reply of the command, not for these.
        let _ = ring.signal_needed();
    }
}
