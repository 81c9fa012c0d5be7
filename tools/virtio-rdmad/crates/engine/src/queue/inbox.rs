// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The inbox of a guest: frames that came over the wire, and that its thread has not looked into.

use std::collections::VecDeque;

/// Bytes that it holds. What comes when it is full is lost, as in any network.
const MOST_BYTES: usize = 4 << 20;

/// Frames, oldest first.
#[derive(Default)]
pub(crate) struct Inbox {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Inbox {
    /// Adds a frame; `false` if there is no room.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        if self.bytes + frame.len() > MOST_BYTES {
            return false;
        }
        self.bytes += frame.len();
        self.frames.push_back(frame.into());
        true
    }

    /// Takes the oldest frame.
    pub fn pop(&mut self) -> Option<Box<[u8]>> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
