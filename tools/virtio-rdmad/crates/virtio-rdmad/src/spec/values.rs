// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The types of values that only guests have.

use std::fmt::{Display, Formatter};
use std::net::IpAddr;

use engine::GidPrefix;

use super::text::{as_text, Range, Text, Unit};

/// A unicast MAC address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mac(pub [u8; 6]);

impl Display for Mac {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0.map(|byte| format!("{byte:02x}")).join(":"))
    }
}

impl Text for Mac {
    fn wanted() -> String {
        "a unicast MAC address such as 52:54:00:12:34:01".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let byte = |part: &str| match part.len() {
            1 | 2 if !part.starts_with('+') => u8::from_str_radix(part, 16).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let mac = <[u8; 6]>::try_from(bytes?).ok()?;
        (mac[0] & 1 == 0 && mac != [0; 6]).then_some(Self(mac))
    }
}

/// The owner of sockets. Whether the user and the group exist shows when a socket is made, in a process that may look.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Owner {
    /// The user, by name or number.
    pub user: Option<String>,
    /// The group, likewise.
    pub group: Option<String>,
}

impl Display for Owner {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.user.as_deref().unwrap_or_default())?;
        self.group.as_ref().map_or(Ok(()), |group| write!(out, ":{group}"))
    }
}

impl Text for Owner {
    fn wanted() -> String {
        "USER, USER:GROUP or :GROUP".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let (user, group) = match text.split_once(':') {
            None => (text, None),
            Some((user, group)) => (user, Some(group)),
        };
        let is_wrong = group.is_some_and(|group| group.is_empty() || group.contains(':'));
        let user = Some(user).filter(|user| !user.is_empty());
        let owner = Self { user: user.map(str::to_owned), group: group.map(str::to_owned) };
        (!is_wrong).then_some(owner)
    }
}

/// Permissions of sockets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mode(pub u32);

impl Display for Mode {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:04o}", self.0)
    }
}

impl Text for Mode {
    fn wanted() -> String {
        "octal permissions such as 0660".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let bits = u32::from_str_radix(Some(text).filter(|text| !text.starts_with('+'))?, 8);
        bits.ok().filter(|bits| *bits <= 0o777).map(Self)
    }
}

as_text!(Mac, Owner, Mode);

/// Bits per second on the uplink.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bits;

impl Unit for Bits {
    const NAME: &'static str = "bits per second";
    const LEAST: u64 = 8_000;
    const LETTERS: &'static str = "KMG";
    const BASE: u64 = 1000;
}

/// Work requests per second.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Requests;

impl Unit for Requests {
    const NAME: &'static str = "work requests per second";
    const LEAST: u64 = 1;
    const LETTERS: &'static str = "KMG";
    const BASE: u64 = 1000;
}

/// Bytes of memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bytes;

impl Unit for Bytes {
    const NAME: &'static str = "bytes";
    const LEAST: u64 = 4096;
    const LETTERS: &'static str = "KMGT";
    const BASE: u64 = 1024;
}

/// An IP address, or the first bits of one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prefix {
    address: IpAddr,
    /// The number of bits that count.
    bits: u32,
}

/// Returns how many bits an address has.
fn bits_of(address: IpAddr) -> u32 {
    if address.is_ipv4() {
        32
    } else {
        128
    }
}

impl Display for Prefix {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { address, bits } = self;
        if *bits == bits_of(*address) {
            address.fmt(out)
        } else {
            write!(out, "{address}/{bits}")
        }
    }
}

impl Text for Prefix {
    fn wanted() -> String {
        "an IP address or a prefix such as 10.0.0.0/24".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok()?)),
            None => (text, None),
        };
        let address = address.parse().ok()?;
        let bits = bits.unwrap_or(bits_of(address));
        (bits <= bits_of(address)).then_some(Self { address, bits })
    }
}

impl Prefix {
    /// Returns the GIDs. An IPv4 address becomes the IPv6 address that it is mapped to (RFC 4291, section 2.5.5.2).
    pub fn gids(&self) -> Option<GidPrefix> {
        let address = match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        GidPrefix::new(address.octets(), 128 - bits_of(self.address) + self.bits)
    }
}

/// The largest VLAN ID (IEEE 802.1Q).
const MAX_VLAN: u16 = 4094;

/// VLANs that addresses may be in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Vlans {
    /// No VLAN.
    Untagged,
    /// VLANs of these numbers.
    Tagged(Range<MAX_VLAN>),
}

/// The text of [`Vlans::Untagged`].
const UNTAGGED: &str = "none";

impl Display for Vlans {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Untagged => out.write_str(UNTAGGED),
            Self::Tagged(range) => range.fmt(out),
        }
    }
}

impl Text for Vlans {
    fn wanted() -> String {
        format!("{UNTAGGED} or {}", Range::<MAX_VLAN>::wanted())
    }

    fn read(text: &str) -> Option<Self> {
        if text == UNTAGGED {
            return Some(Self::Untagged);
        }
        Range::read(text).map(Self::Tagged)
    }
}
