// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A tap whose frames are single packets, as a network cable carries them.

use std::fs::File;
use std::io::{Error, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::{attach, open, set_offload};

/// A tap whose frames are single packets. The kernel takes trains apart and completes checksums before
/// it sends frames over the interface.
#[derive(Debug)]
pub struct PacketTap {
    file: File,
}

impl PacketTap {
    /// Opens the tap of this name. The user of this process must own it, as for
    /// [`Tap::open`](crate::Tap::open).
    ///
    /// # Errors
    ///
    /// The errors of [`Tap::open`](crate::Tap::open).
    pub fn open(name: &str) -> Result<Self, Error> {
        let file = open(name)?;
        attach(&file, name, 0)?;
        // A tap keeps what another process has set.
        set_offload(&file, 0)?;
        Ok(Self { file })
    }

    /// Takes a frame that the kernel sends over the interface, and returns its bytes. A frame that does not
    /// fit into `room` is cut off.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no frame; what read(2) says if the interface is down or gone.
    pub fn receive<'a>(&self, room: &'a mut [u8]) -> Result<&'a mut [u8], Error> {
        let len = (&self.file).read(room)?;
        Ok(&mut room[..len])
    }

    /// Gives the kernel a frame that comes over the interface.
    ///
    /// # Errors
    ///
    /// The error of write(2): `EIO` while the interface is down.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        (&self.file).write(frame).map(|_| ())
    }
}

impl AsFd for PacketTap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
