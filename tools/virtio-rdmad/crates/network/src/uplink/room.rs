// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The room into which the frames of an uplink are taken.

/// Room for frames that come.
#[derive(Debug)]
pub struct Room {
    pub(super) bytes: Vec<u8>,
    /// The most frames that are taken at once, so that trains are not too many bytes.
    pub(super) frames: usize,
}
