// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The carrier of a network interface (netdevice(7)).

use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};

use crate::packet_socket::succeeded;
use crate::{any_socket, request_for};

/// Tells whether a network interface has a carrier.
#[derive(Debug)]
pub struct Carrier {
    /// A socket by which the kernel is asked.
    socket: OwnedFd,
    /// The name of the interface.
    name: String,
}

impl Carrier {
    /// Begins to look at the interface of this name. This needs no privilege.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a name that no interface can have, ENODEV if there is no such interface.
    pub fn open(name: &str) -> Result<Self, Error> {
        let this = Self { socket: any_socket()?, name: name.to_owned() };
        this.flags()?;
        Ok(this)
    }

    /// Returns whether the interface is there, is up and has a carrier. Any thread may call this.
    pub fn is_up(&self) -> bool {
        self.flags().is_ok_and(|flags| flags & libc::IFF_RUNNING != 0)
    }

    /// Returns the flags of the interface (`IFF_…`).
    fn flags(&self) -> Result<libc::c_int, Error> {
        let mut request = request_for(&self.name).ok_or(ErrorKind::InvalidInput)?;
        let socket = self.socket.as_raw_fd();
        // SAFETY: The request is a whole `ifreq`, which SIOCGIFFLAGS reads and writes.
        succeeded(unsafe { libc::ioctl(socket, libc::SIOCGIFFLAGS, &raw mut request) })?;
        // SAFETY: SIOCGIFFLAGS writes the flags, and all bytes of the union were set before.
        Ok(unsafe { request.ifr_ifru.ifru_flags }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_a_carrier() {
        assert!(Carrier::open("lo").unwrap().is_up());
    }

    #[test]
    fn there_is_an_interface() {
        for name in ["", "a name that is too long", "a/b"] {
            assert_eq!(
                Carrier::open(name).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{name:?}"
            );
        }
        let error = Carrier::open("nobody").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
