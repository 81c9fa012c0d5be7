// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A tap: a network interface of the kernel whose frames a process reads and writes (the kernel's
//! Documentation/networking/tuntap.rst).

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// An interface of this type that was opened.
#[derive(Debug)]
pub struct Tap {
    file: File,
}

impl Tap {
    /// Opens the tap of this name. The administrator has made it, for the user of this process:
    /// `ip tuntap add NAME mode tap user USER`; then this needs no privilege.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a name that no interface can have, `PermissionDenied` if the tap is another
    /// user's or does not exist, `ResourceBusy` if another process has it open.
    pub fn open(name: &str) -> Result<Self, Error> {
        // SAFETY: All members of the structure are integers, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let room = request.ifr_name.len();
        if name.is_empty() || name.len() >= room || name.contains(['\0', '/']) {
            return Err(ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        // SAFETY: The request is a whole `ifreq`, which TUNSETIFF reads and writes.
        let status = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if status < 0 {
            return Err(Error::last_os_error());
        }
        Ok(Self { file })
    }

    /// Takes a frame that the kernel sends over the interface, and returns its bytes. A frame that is
    /// longer than `frame` is cut off.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no frame; what read(2) says if the interface is down or gone.
    pub fn receive(&self, frame: &mut [u8]) -> Result<usize, Error> {
        (&self.file).read(frame)
    }

    /// Gives the kernel a frame that comes over the interface.
    ///
    /// # Errors
    ///
    /// What write(2) says: `EIO` while the interface is down.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        (&self.file).write(frame).map(|_| ())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_names_are_refused() {
        for name in ["", "a name that is too long", "a/b", "a\0b"] {
            assert_eq!(Tap::open(name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name:?}");
        }
    }
}
