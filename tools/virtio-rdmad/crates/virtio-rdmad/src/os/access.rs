// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The right to connect to the sockets of a guest: the owner and the permissions of their files.

use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::unistd::{Group, User};
use rustix::fs::{chownat, fchmod, AtFlags, Mode, CWD};
use rustix::net::{bind, SocketAddrUnix};
use rustix::process::{umask, Gid, Uid};

/// The owner and the permissions of the sockets of a guest. Those of whoever makes the sockets are the default.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Access {
    /// A user, by name or number.
    pub user: Option<String>,
    /// A group, likewise.
    pub group: Option<String>,
    /// Permission bits, whatever the umask.
    pub mode: Option<u32>,
}

impl Access {
    /// Makes the file of a socket that does not listen yet, so that nobody connects before the file has its owner. With
    /// `mode=`, no other thread may make files meanwhile, because they would have the permissions of this one.
    ///
    /// # Errors
    ///
    /// There is no such user or group; the process may not give files to them; what else the system calls say.
    pub fn bind(&self, socket: &OwnedFd, path: &Path) -> Result<(), Error> {
        let user = self.user.as_deref().map(uid).transpose()?;
        let group = self.group.as_deref().map(gid).transpose()?;
        let address = SocketAddrUnix::new(path)?;
        match self.mode {
            None => bind(socket, &address)?,
            Some(mode) => {
                // The file of a socket gets the permissions of the socket without the bits of the umask
                // (unix_bind_bsd() of the kernel).
                fchmod(socket, Mode::from_raw_mode(mode))?;
                let before = umask(Mode::empty());
                let bound = bind(socket, &address);
                umask(before);
                bound?;
            }
        }
        if user.is_none() && group.is_none() {
            return Ok(());
        }
        chownat(CWD, path, user, group, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| {
            let _ = std::fs::remove_file(path);
            Error::new(Error::from(errno).kind(), format!("owner=: {errno}"))
        })
    }
}

/// Returns the number of a user, who may be named by it.
fn uid(user: &str) -> Result<Uid, Error> {
    match number(user) {
        Some(number) => Ok(Uid::from_raw(number)),
        None => User::from_name(user)?
            .map(|user| Uid::from_raw(user.uid.as_raw()))
            .ok_or_else(|| unknown("user", user)),
    }
}

/// Returns the number of a group, which may be named by it.
fn gid(group: &str) -> Result<Gid, Error> {
    match number(group) {
        Some(number) => Ok(Gid::from_raw(number)),
        None => Group::from_name(group)?
            .map(|group| Gid::from_raw(group.gid.as_raw()))
            .ok_or_else(|| unknown("group", group)),
    }
}

/// Reads a number. The largest one stands for nobody (chown(2)).
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn unknown(kind: &str, name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("owner=: there is no {kind} {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_have_numbers() {
        assert_eq!((uid("root").unwrap(), gid("root").unwrap()), (Uid::ROOT, Gid::ROOT));
        assert_eq!(uid("64055").unwrap(), Uid::from_raw(64055));
        for (error, text) in [
            (uid("no-such-user").unwrap_err(), "owner=: there is no user no-such-user"),
            (gid("4294967295").unwrap_err(), "owner=: there is no group 4294967295"),
        ] {
            assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::NotFound, text));
        }
    }
}
