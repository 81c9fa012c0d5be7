// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives up the rights of root once the sockets are open.

use std::str::FromStr;

use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{
    clear_ambient_capability_set, set_capabilities, set_thread_gid, set_thread_groups,
    set_thread_uid, CapabilitySet, CapabilitySets,
};

/// A user and a group, by their numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct User {
    uid: u32,
    gid: u32,
}

/// The error of a value of `--user` that is not UID:GID.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("\"{0}\" is not UID:GID, two numbers other than 0")]
pub struct UserError(String);

impl FromStr for User {
    type Err = UserError;

    fn from_str(text: &str) -> Result<Self, UserError> {
        let number = |text: &str| text.parse().ok().filter(|id| !matches!(*id, 0 | u32::MAX));
        let parse = || {
            let (uid, gid) = text.split_once(':')?;
            Some(Self { uid: number(uid)?, gid: number(gid)? })
        };
        parse().ok_or_else(|| UserError(text.to_owned()))
    }
}

/// The reason why the process cannot give up its rights.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// The process cannot change its user and group.
    #[error("--user: {call}: {errno}")]
    User {
        /// The system call.
        call: &'static str,
        /// The error of that call.
        errno: Errno,
    },
    /// The process cannot drop its capabilities.
    #[error("capset: {0}")]
    Capabilities(Errno),
}

/// Gives the calling thread this user and group, if there is one, and takes all capabilities from it.
/// Threads that it starts from now on inherit that; the process must not have other threads yet.
pub fn give_up(user: Option<User>) -> Result<(), PrivilegeError> {
    if let Some(User { uid, gid }) = user {
        let failed = |call| move |errno| PrivilegeError::User { call, errno };
        set_thread_groups(&[]).map_err(failed("setgroups"))?;
        set_thread_gid(Gid::from_raw(gid)).map_err(failed("setgid"))?;
        set_thread_uid(Uid::from_raw(uid)).map_err(failed("setuid"))?;
    }
    // A kernel without ambient capabilities has none to clear.
    let _ = clear_ambient_capability_set();
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(PrivilegeError::Capabilities)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_numbers() {
        assert_eq!("1000:100".parse(), Ok(User { uid: 1000, gid: 100 }));
        for text in ["", "1000", "root:root", "0:1", "1:0", "1:2:3", "-1:1", "4294967295:1"] {
            assert_eq!(text.parse::<User>(), Err(UserError(text.to_owned())), "{text}");
        }
    }
}
