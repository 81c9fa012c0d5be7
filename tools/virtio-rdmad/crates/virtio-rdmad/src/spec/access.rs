// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `owner=` and `mode=` of a guest.

use super::key_values::{KeyValues, ListError};
use crate::os::access::Access;

/// Reads who may connect to the sockets of a guest. Whether the user and the group exist shows when a socket is made, in a
/// process that may look.
///
/// # Errors
///
/// A key has a value that it cannot have.
pub fn read(list: &KeyValues<'_>) -> Result<Access, ListError> {
    let (user, group) = list.get("owner").map_or(Ok((None, None)), owner)?;
    Ok(Access { user, group, mode: list.get("mode").map(mode).transpose()? })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &str) -> Result<Access, ListError> {
        super::read(&KeyValues::read(list, &["owner", "mode"], &[]).unwrap())
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
}
