// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests which addresses a guest may add to its GID table.

use std::sync::Arc;

use abi::*;

use super::cable;
use super::driver::*;
use crate::{AddressRights, Counter, DevicePolicy, Gid, GidPrefix, VlanList};

const REFUSED: Result<(), u32> = Err(VIRTIO_RDMA_STATUS_PERM);
const EXISTS: Result<(), u32> = Err(VIRTIO_RDMA_STATUS_EXISTS);

/// The GID that guest `number` makes of its MAC address (RFC 4291, appendix A) in fe80::/64, or in
/// another prefix that begins with these bytes.
fn own(number: u8, prefix: [u8; 2]) -> Gid {
    let [p0, p1] = prefix;
    [p0, p1, 0, 0, 0, 0, 0, 0, 0x50, 0x54, 0, 0xff, 0xfe, 0, 0, number]
}

const LINK_LOCAL: [u8; 2] = [0xfe, 0x80];
const GLOBAL: [u8; 2] = [0x20, 0x01];

/// Makes guests 1, 2 and so on, with these rights.
fn guests<const N: usize>(rights: [AddressRights; N]) -> [Guest; N] {
    let (fabric, clock) = fabric();
    let mut number = 0;
    rights.map(|addresses| {
        number += 1;
        let policy = DevicePolicy { addresses, ..DevicePolicy::default() };
        let setup = Setup { policy, ..Setup::default() };
        let wake = Arc::new(NoWake);
        Guest::with_setup(&fabric, &clock, number, wake, setup)
    })
}

fn listed(gids: &[(Gid, u32)]) -> AddressRights {
    let gids = gids.iter().map(|(gid, bits)| GidPrefix::new(*gid, *bits).unwrap()).collect();
    AddressRights { gids: Some(gids), vlans: None }
}

/// An address that is made from a guest's MAC address belongs to that guest in every prefix and VLAN, even
/// if the guest does not use it.
#[test]
pub fn nobody_takes_what_is_made_from_anothers_mac() {
    let [mut a, mut b] = guests([AddressRights::default(), AddressRights::default()]);
    for prefix in [LINK_LOCAL, GLOBAL] {
        assert_eq!(b.add_gid(1, own(1, prefix), 0), REFUSED);
        assert_eq!(b.add_vlan_gid(1, own(1, prefix), 5), REFUSED);
        assert_eq!(a.add_gid(1, own(1, prefix), 0), Ok(()));
        assert_eq!(a.add_vlan_gid(2, own(1, prefix), 5), Ok(()));
    }
    assert_eq!(b.device.counter(Counter::ForeignAddress), 4);
    assert_eq!(b.add_gid(1, own(9, LINK_LOCAL), 0), Ok(()), "nobody's MAC address");
}

/// Without lists, any other address belongs to the guest that has it, until that guest removes it.
#[test]
pub fn other_addresses_move() {
    let [mut a, mut b] = guests([AddressRights::default(), AddressRights::default()]);
    assert_eq!(a.add_gid(1, gid(50), 0), Ok(()));
    assert_eq!(b.add_gid(1, gid(50), 0), EXISTS);
    assert_eq!(a.del_gid(1), Ok(()));
    assert_eq!(b.add_gid(1, gid(50), 0), Ok(()));
}

/// A guest with a list may use the addresses on it, and its own link-local GID.
#[test]
pub fn a_list_is_all_that_a_guest_may_use() {
    let [mut a, mut b] = guests([listed(&[(gid(0), 120)]), AddressRights::default()]);
    assert_eq!(a.add_gid(1, gid(50), 0), Ok(()));
    assert_eq!(a.add_gid(2, own(1, LINK_LOCAL), 0), Ok(()));
    let mut outside = gid(50);
    outside[14] = 1;
    assert_eq!(a.add_gid(3, outside, 0), REFUSED);
    assert_eq!(a.add_gid(3, own(1, GLOBAL), 0), REFUSED);
    // Guests share a prefix.
    assert_eq!(b.add_gid(1, gid(51), 0), Ok(()));
}

/// An address that a list names by itself belongs to the guests that have it on their lists.
#[test]
pub fn a_single_address_is_kept_for_its_guests() {
    let none = AddressRights::default();
    let rights = [listed(&[(gid(1), 128), (gid(50), 128)]), none, listed(&[(gid(0), 120)])];
    let [mut a, mut b, mut c] = guests(rights);
    assert_eq!(b.add_gid(1, gid(50), 0), REFUSED);
    assert_eq!(c.add_gid(1, gid(50), 0), REFUSED, "a prefix is weaker");
    assert_eq!(a.add_gid(1, gid(50), 0), Ok(()));
    let both = || listed(&[(gid(0), 120), (gid(60), 128)]);
    let [mut a, mut b] = guests([both(), both()]);
    assert_eq!(a.add_gid(1, gid(60), 0), Ok(()));
    assert_eq!(b.add_gid(1, gid(60), 0), EXISTS);
    assert_eq!(a.del_gid(1), Ok(()));
    assert_eq!(b.add_gid(1, gid(60), 0), Ok(()));
}

/// A guest with a list of VLANs may use addresses in these VLANs alone.
#[test]
pub fn vlans_are_listed() {
    let vlans = |untagged| {
        let vlans = Some(VlanList { untagged, ranges: vec![5..=5, 7..=9] });
        AddressRights { gids: None, vlans }
    };
    let [mut a] = guests([vlans(true)]);
    for vlan in [5, 7, 9] {
        assert_eq!(a.add_vlan_gid(1, gid(50), vlan), Ok(()));
    }
    for vlan in [0, 6, 10, 4094] {
        assert_eq!(a.add_vlan_gid(1, gid(50), vlan), REFUSED);
    }
    assert_eq!(a.add_gid(2, gid(51), 0), Ok(()));
    let (fabric, clock) = fabric();
    let policy = DevicePolicy { addresses: vlans(false), ..DevicePolicy::default() };
    let setup = Setup { policy, adds_gid: false, ..Setup::default() };
    let mut guest = Guest::with_setup(&fabric, &clock, 1, Arc::new(NoWake), setup);
    assert_eq!(guest.add_gid(0, gid(1), 0), REFUSED);
    assert_eq!(guest.add_vlan_gid(0, own(1, LINK_LOCAL), 6), REFUSED);
    assert_eq!(guest.add_vlan_gid(0, own(1, LINK_LOCAL), 7), Ok(()));
}

/// Returns a packet of RoCE v2 whose IPv4 header says that it comes from 10.0.0.`from`, or one whose IPv6 header has
/// this GID.
fn packet(from: [u8; 2], gid: Option<Gid>) -> Vec<u8> {
    let send = roce::Opcode::new(roce::Service::Rc, roce::Operation::Send, roce::Position::Only);
    let mut headers = cable::headers(from, send.unwrap(), 5);
    if let Some(gid) = gid {
        headers.ip = roce::Ip::V6(roce::Ipv6 {
            traffic_class: 0,
            flow_label: roce::FlowLabel::default(),
            hop_limit: 64,
            source: gid.into(),
            destination: own(2, LINK_LOCAL).into(),
        });
    }
    let mut frame = vec![0; 256];
    let len = roce::encode(&headers, &[7; 8], &mut frame).unwrap();
    frame.truncate(len);
    frame
}

/// What a guest sends by its own interface may go to devices if its source is an address of the guest: no guest
/// speaks for a peer of its neighbours.
#[test]
pub fn an_interface_speaks_for_its_guest_alone() {
    let (fabric, clock) = fabric();
    let guest = |number, addresses| {
        let policy = DevicePolicy { addresses, ..DevicePolicy::default() };
        let setup = Setup { policy, ..Setup::default() };
        Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup)
    };
    let mac = |number| [0x52, 0x54, 0, 0, 0, number];
    let _guests =
        [guest(1, AddressRights::default()), guest(2, listed(&[(gid(2), 128), (gid(60), 126)]))];

    // Nothing is listed for guest 1: only what is made from its MAC address is known to be its own.
    for prefix in [LINK_LOCAL, GLOBAL] {
        assert!(fabric.may_send(mac(1), &packet([1, 2], Some(own(1, prefix)))));
        assert!(!fabric.may_send(mac(1), &packet([1, 2], Some(own(2, prefix)))), "its neighbour's");
        assert!(!fabric.may_send(mac(1), &packet([1, 2], Some(own(9, prefix)))), "a stranger's");
    }
    assert!(!fabric.may_send(mac(1), &packet([9, 2], None)), "a peer's");
    // Guest 2 has a list.
    assert!(fabric.may_send(mac(2), &packet([61, 1], None)));
    assert!(!fabric.may_send(mac(2), &packet([64, 1], None)), "beyond its list");
    assert!(fabric.may_send(mac(2), &packet([1, 1], Some(own(2, LINK_LOCAL)))));
    assert!(!fabric.may_send(mac(9), &packet([61, 1], None)), "no guest's interface");
    // What is no packet of RoCE v2 is no matter of devices.
    assert!(fabric.may_send(mac(1), &[0; 60]));
}
