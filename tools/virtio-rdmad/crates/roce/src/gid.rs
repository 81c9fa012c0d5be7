// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! GIDs, and the IP addresses that they are.

use std::net::{IpAddr, Ipv6Addr};

/// A 16-byte global identifier, in network byte order. A GID of RoCE v2 is an IPv6 address, or an IPv4
/// address mapped into IPv6 (IBA A17; RFC 4291, 2.5.5.2).
pub type Gid = [u8; 16];

/// Returns the GID of an address.
pub fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Returns the address of a GID: the IPv4 address if one is mapped into it.
pub fn ip_of(gid: &Gid) -> IpAddr {
    let address = Ipv6Addr::from(*gid);
    match address.to_ipv4_mapped() {
        Some(address) => IpAddr::V4(address),
        None => IpAddr::V6(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_is_mapped() {
        let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
        assert_eq!(gid_of(IpAddr::from([192, 0, 2, 1])), gid);
        assert_eq!(ip_of(&gid), IpAddr::from([192, 0, 2, 1]));
    }

    #[test]
    fn ipv6_is_itself() {
        for address in ["fe80::5054:ff:fe12:3456", "::1", "::192.0.2.1"] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(ip_of(&gid_of(address)), address);
        }
    }
}
