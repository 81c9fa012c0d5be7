// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The outbox of a guest: packets that its thread has made in a round, and that leave together.
//!
//! Packets of one connection, which follow each other and are equally long, leave as a train: by one
//! system call. The packets of a guest leave in the order in which they were made.

use roce::{Headers, Train};

use crate::transport::hca::Hca;

/// Packets that have not left. The memory is there from the first packet on.
#[derive(Default)]
pub(crate) struct Outbox(Option<Box<Train>>);

impl Outbox {
    /// Adds a packet with a payload of `len` bytes, which `fill` writes; returns what that returns. A
    /// packet that cannot be made, or whose payload cannot be read, is not sent.
    pub fn send<E>(
        &mut self,
        hca: &Hca,
        headers: &Headers,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.0.as_ref().is_some_and(|train| !train.takes(headers, len)) {
            self.flush(hca);
        }
        match self.0.get_or_insert_default().push(headers, len, fill) {
            Ok(filled) => filled,
            Err(error) => {
                debug_assert!(false, "{error}");
                Ok(())
            }
        }
    }

    /// Sends what has not left.
    pub fn flush(&mut self, hca: &Hca) {
        let Some(train) = &mut self.0 else { return };
        train.take(|segments| {
            if let Some(uplink) = hca.network.uplink() {
                uplink.send(segments);
            }
        });
    }
}
