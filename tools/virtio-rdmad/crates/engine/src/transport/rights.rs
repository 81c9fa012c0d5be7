// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The addresses that a guest may add to its GID table.
//!
//! A network adapter's port sees frames, and the switch behind it decides which source addresses it
//! lets pass. Here the GID table is what a guest sends and receives by, so that the decision is made
//! when an entry is added.

use std::ops::RangeInclusive;

use crate::base::address::{guid, Address, Gid};

/// GIDs that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidPrefix {
    gid: Gid,
    /// Bits of `gid` that count, at most 128.
    bits: u32,
}

impl GidPrefix {
    /// Returns the GIDs whose first `bits` are those of `gid`; `None` for more than 128 bits.
    pub fn new(gid: Gid, bits: u32) -> Option<Self> {
        (bits <= 128).then_some(Self { gid, bits })
    }

    fn contains(&self, gid: &Gid) -> bool {
        let difference = u128::from_be_bytes(self.gid) ^ u128::from_be_bytes(*gid);
        difference.leading_zeros() >= self.bits
    }

    /// Returns whether it is a single GID.
    fn is_single(&self) -> bool {
        self.bits == 128
    }
}

/// The VLANs that a guest's addresses may be in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VlanList {
    /// Whether addresses may be in no VLAN.
    pub untagged: bool,
    /// Numbers of VLANs.
    pub ranges: Vec<RangeInclusive<u16>>,
}

impl VlanList {
    fn contains(&self, vlan: Option<u16>) -> bool {
        match vlan {
            None => self.untagged,
            Some(vlan) => self.ranges.iter().any(|range| range.contains(&vlan)),
        }
    }
}

/// The addresses that a guest may use, as its administrator says.
#[derive(Clone, Debug, Default)]
pub struct AddressRights {
    /// GIDs; `None`: all that are not another guest's. The link-local GID of the guest's own MAC
    /// address need not be among them.
    pub gids: Option<Vec<GidPrefix>>,
    /// VLANs; `None`: all.
    pub vlans: Option<VlanList>,
}

/// The addresses that a guest may use.
#[derive(Debug)]
pub(crate) struct Rights {
    /// The interface identifier of the guest's MAC address (RFC 4291, appendix A).
    interface: Option<[u8; 8]>,
    listed: AddressRights,
}

/// The link-local prefix, of 64 bits (RFC 4291, section 2.5.6).
const LINK_LOCAL: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];

impl Rights {
    /// Returns the rights of a guest with this MAC address.
    pub fn new(mac: Option<[u8; 6]>, listed: AddressRights) -> Self {
        Self { interface: mac.map(guid), listed }
    }

    /// Changes the addresses that the administrator has listed.
    pub fn set_listed(&mut self, listed: AddressRights) {
        self.listed = listed;
    }

    /// Returns whether a GID is made from the guest's MAC address.
    fn is_made_from_mac(&self, gid: &Gid) -> bool {
        self.interface.is_some_and(|interface| gid.ends_with(&interface))
    }

    /// Returns whether the guest's own list lets it use an address.
    pub fn may_use(&self, address: &Address) -> bool {
        let gid = &address.gid;
        let is_own = gid.starts_with(&LINK_LOCAL) && self.is_made_from_mac(gid);
        let listed = |gids: &Vec<GidPrefix>| gids.iter().any(|prefix| prefix.contains(gid));
        (is_own || self.listed.gids.as_ref().is_none_or(listed))
            && self.listed.vlans.as_ref().is_none_or(|vlans| vlans.contains(address.vlan))
    }

    /// Returns whether these are the rights of the guest with this MAC address, and they name an address as the
    /// guest's: its list has it, or it is made from the MAC address.
    pub fn name(&self, mac: [u8; 6], address: &Address) -> bool {
        self.interface == Some(guid(mac))
            && self.may_use(address)
            && (self.listed.gids.is_some() || self.owns(&address.gid))
    }

    /// Returns whether a GID is this guest's and nobody else's, present or not: it is made from the guest's
    /// MAC address, or listed for the guest by itself.
    pub fn owns(&self, gid: &Gid) -> bool {
        let is_listed = |prefix: &GidPrefix| prefix.is_single() && prefix.contains(gid);
        self.is_made_from_mac(gid)
            || self.listed.gids.as_ref().is_some_and(|gids| gids.iter().any(is_listed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_contain_what_begins_with_them() {
        let gid = |last| [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        let prefix = |bits| GidPrefix::new(gid(0x40), bits).unwrap();
        assert!(prefix(0).contains(&[0x12; 16]));
        assert!(prefix(122).contains(&gid(0x7f)) && !prefix(122).contains(&gid(0x80)));
        assert!(prefix(128).contains(&gid(0x40)) && !prefix(128).contains(&gid(0x41)));
        assert_eq!(GidPrefix::new(gid(0), 129), None);
    }

    #[test]
    fn vlans_are_listed() {
        let list = VlanList { untagged: false, ranges: vec![5..=5, 7..=9] };
        assert!(list.contains(Some(5)) && list.contains(Some(9)));
        assert!(!list.contains(None) && !list.contains(Some(6)));
        assert!(VlanList { untagged: true, ranges: Vec::new() }.contains(None));
    }
}
