// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses: GIDs, and the VLANs that they belong to.

use serde::{Deserialize, Serialize};

/// A 16-byte global identifier, in network byte order.
pub type Gid = [u8; 16];

/// The address of a device. The same GID may be another guest's in another VLAN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// The GID.
    pub gid: Gid,
    /// The VLAN that the address belongs to (IEEE 802.1Q), if it belongs to one.
    pub vlan: Option<u16>,
}

impl Address {
    /// Returns the address of a GID in the same VLAN.
    pub(crate) fn beside(self, gid: Gid) -> Self {
        Self { gid, ..self }
    }
}

/// Returns the IPv4 address that a GID holds.
pub(crate) fn ipv4(gid: &Gid) -> Option<[u8; 4]> {
    let prefix = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let address = gid.strip_prefix(&prefix)?;
    address.try_into().ok()
}

/// Returns whether a GID is that of a multicast group: ff00::/8, or an IPv4 group
/// (224.0.0.0/4) mapped into IPv6.
pub(crate) fn is_multicast(gid: &Gid) -> bool {
    gid[0] == 0xff || ipv4(gid).is_some_and(|address| address[0] >> 4 == 0xe)
}

/// Returns the EUI-64 of a MAC address, from which RoCE forms a GUID.
pub(crate) fn guid(mac: [u8; 6]) -> [u8; 8] {
    let [oui @ .., m3, m4, m5] = mac;
    [oui[0] ^ 2, oui[1], oui[2], 0xff, 0xfe, m3, m4, m5]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_from_hosts() {
        let mapped = |address: [u8; 4]| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&address);
            gid
        };
        let mut six = [0; 16];
        (six[0], six[1]) = (0xff, 0x0e);
        assert!(is_multicast(&six));
        assert!(is_multicast(&mapped([224, 0, 0, 1])) && is_multicast(&mapped([239, 255, 1, 2])));
        assert!(!is_multicast(&mapped([223, 0, 0, 1])) && !is_multicast(&mapped([240, 0, 0, 1])));
        six[0] = 0xfe;
        assert!(!is_multicast(&six));
    }

    #[test]
    fn guid_is_the_eui64_of_the_mac() {
        assert_eq!(
            guid([0x52, 0x54, 0, 0x12, 0x34, 1]),
            [0x50, 0x54, 0, 0xff, 0xfe, 0x12, 0x34, 1]
        );
    }
}
