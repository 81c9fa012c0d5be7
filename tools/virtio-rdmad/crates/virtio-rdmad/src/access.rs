// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Who may connect to the sockets of a guest: the owner and the permissions of their files.

use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::unistd::{Group, User};
use rustix::fs::{chownat, fchmod, AtFlags, Mode, CWD};
use rustix::net::{bind, SocketAddrUnix};
use rustix::process::{umask, Gid, Uid};

use crate::key_values::{KeyValues, ListError};

/// The owner and the permissions of the sockets of a guest. Those of whoever makes the sockets are the default.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Access {
    /// A user, by name or number.
    user: Option<String>,
    /// A group, likewise.
    group: Option<String>,
    /// Permission bits, whatever the umask.
    mode: Option<u32>,
}

impl Access {
    /// Reads `owner=` and `mode=` of a guest. Whether the user and the group exist shows when a socket is made, in a
    /// process that may look.
    ///
    /// # Errors
    ///
    /// A key has a value that it cannot have.
    pub fn read(list: &KeyValues<'_>) -> Result<Self, ListError> {
        let (user, group) = list.get("owner").map_or(Ok((None, None)), owner)?;
        Ok(Self { user, group, mode: list.get("mode").map(mode).transpose()? })
    }

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
                // The file of a socket gets the permissions of the socket without the bits of the umask (unix_bind_bsd()
                // of the kernel).
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

fn owner(value: &str) -> Result<(Option<String>, Option<String>), ListError> {
    let (user, group) = match value.split_once(':') {
        None => (value, None),
        Some((user, group)) => (user, Some(group)),
    };
    if group.is_some_and(|group| group.is_empty() || group.contains(':')) {
        return Err(ListError::value("owner", value, "USER, USER:GROUP or :GROUP"));
    }
    let user = Some(user).filter(|user| !user.is_empty());
    Ok((user.map(str::to_owned), group.map(str::to_owned)))
}

fn mode(value: &str) -> Result<u32, ListError> {
    let bits = Some(value).filter(|value| !value.starts_with('+'));
    bits.and_then(|bits| u32::from_str_radix(bits, 8).ok())
        .filter(|bits| *bits <= 0o777)
        .ok_or_else(|| ListError::value("mode", value, "octal permissions such as 0660"))
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

    fn read(list: &str) -> Result<Access, ListError> {
        Access::read(&KeyValues::read(list, &["owner", "mode"], &[]).unwrap())
    }

    fn access(user: Option<&str>, group: Option<&str>, mode: Option<u32>) -> Access {
        Access { user: user.map(str::to_owned), group: group.map(str::to_owned), mode }
    }

    #[test]
    fn access_is_understood() {
        assert_eq!(
            read("owner=vm1:kvm,mode=0660"),
            Ok(access(Some("vm1"), Some("kvm"), Some(0o660)))
        );
        assert_eq!(read("owner=64055"), Ok(access(Some("64055"), None, None)));
        assert_eq!(read("owner=:kvm"), Ok(access(None, Some("kvm"), None)));
        assert_eq!(read("mode=600"), Ok(access(None, None, Some(0o600))));
        for value in ["a:", ":", "a:b:c"] {
            let error = read(&format!("owner={value}")).unwrap_err();
            assert!(matches!(error, ListError::Value { key: "owner", .. }), "{value}");
        }
        for value in ["0o660", "888", "1000", "+660", "rw"] {
            let error = read(&format!("mode={value}")).unwrap_err();
            assert!(matches!(error, ListError::Value { key: "mode", .. }), "{value}");
        }
    }

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
