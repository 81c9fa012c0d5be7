// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest may do: the keys of a `--guest` that may change while the guest is there.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use engine::{
    AddressRights, AllowedValues, DevicePolicy, GidPrefix, Quota, TrafficClasses, VlanList,
};

use super::key_values::{number, KeyValues, ListError};

/// Reads the policy of a guest.
///
/// # Errors
///
/// A key has a value that it cannot have.
pub fn read(list: &KeyValues<'_>) -> Result<DevicePolicy, ListError> {
    let addresses = AddressRights {
        gids: list.get("gid").map(gid_list).transpose()?,
        vlans: list.get("vlan").map(vlan_list).transpose()?,
    };
    Ok(DevicePolicy { addresses, classes: classes(list)?, quota: quota(list)? })
}

fn classes(list: &KeyValues<'_>) -> Result<TrafficClasses, ListError> {
    let dscp = "a DSCP of 0 to 63 or a range of these such as 8-15";
    let pcp = "a priority of 0 to 7 or a range of these such as 0-3";
    Ok(TrafficClasses { dscp: values(list, "dscp", 63, dscp)?, pcp: values(list, "pcp", 7, pcp)? })
}

fn quota(list: &KeyValues<'_>) -> Result<Quota, ListError> {
    let all = Quota::default();
    Ok(Quota {
        qps: number(list, "qps")?.unwrap_or(all.qps),
        cqs: number(list, "cqs")?.unwrap_or(all.cqs),
        srqs: number(list, "srqs")?.unwrap_or(all.srqs),
        mrs: number(list, "mrs")?.unwrap_or(all.mrs),
        mws: number(list, "mws")?.unwrap_or(all.mws),
        pds: number(list, "pds")?.unwrap_or(all.pds),
        groups: list.get("groups").map(groups).transpose()?.unwrap_or(all.groups),
        memory: list.get("memory").map(memory).transpose()?.unwrap_or(all.memory),
        wire_rate: list.get("rate").map(rate).transpose()?,
        message_rate: list.get("message-rate").map(message_rate).transpose()?,
    })
}

/// Reads a number that may have a unit, one of these letters, each of which is `base` times as much as the one before.
fn with_unit(text: &str, units: &str, base: u64) -> Option<u64> {
    let unit = text.chars().last().and_then(|last| units.find(last));
    let (digits, power) = match unit {
        Some(at) => (&text[..text.len() - 1], u32::try_from(at).ok()? + 1),
        None => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(base.checked_pow(power)?)
}

/// Reads a number of bits per second, such as 10G, and returns it as bytes per second.
fn rate(value: &str) -> Result<u64, ListError> {
    let wanted = "a number of bits per second of at least 8K, such as 500M or 10G";
    match with_unit(value, "KMG", 1000) {
        Some(bits) if bits >= 8_000 => Ok(bits / 8),
        _ => Err(ListError::value("rate", value, wanted)),
    }
}

/// Reads a number of work requests per second, such as 500K.
fn message_rate(value: &str) -> Result<u64, ListError> {
    let wanted = "a number of work requests per second of at least 1, such as 500K or 2M";
    match with_unit(value, "KMG", 1000) {
        Some(rate) if rate >= 1 => Ok(rate),
        _ => Err(ListError::value("message-rate", value, wanted)),
    }
}

/// Reads a number of bytes, such as 4G.
fn memory(value: &str) -> Result<u64, ListError> {
    let wanted = "a number of bytes of at least 4K, such as 512M or 4G";
    match with_unit(value, "KMGT", 1024) {
        Some(bytes) if bytes >= 4096 => Ok(bytes),
        _ => Err(ListError::value("memory", value, wanted)),
    }
}

/// Reads a number of multicast groups. A guest needs none of them, so 0 is such a number.
fn groups(value: &str) -> Result<u32, ListError> {
    let error =
        || ListError::value("groups", value, "a number of multicast groups, such as 0 or 16");
    Some(value)
        .filter(|value| !value.starts_with('+'))
        .ok_or_else(error)?
        .parse()
        .map_err(|_| error())
}

/// Reads IP addresses and prefixes with `+` between them, and returns them as GIDs. An IPv4 address
/// becomes the IPv6 address that it is mapped to (RFC 4291, section 2.5.5.2).
fn gid_list(list: &str) -> Result<Vec<GidPrefix>, ListError> {
    list.split('+').map(gid_prefix).collect()
}

fn gid_prefix(text: &str) -> Result<GidPrefix, ListError> {
    let error = || {
        let wanted = "an IP address or a prefix such as 10.0.0.0/24";
        ListError::value("gid", text, wanted)
    };
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(length.parse::<u32>().map_err(|_| error())?)),
        None => (text, None),
    };
    let (gid, bits, mapped) = match address.parse::<IpAddr>().map_err(|_| error())? {
        IpAddr::V4(address) => (address.to_ipv6_mapped(), 32, 96),
        IpAddr::V6(address) => (address, 128, 0),
    };
    let length = length.unwrap_or(bits);
    if length > bits {
        return Err(error());
    }
    GidPrefix::new(gid.octets(), mapped + length).ok_or_else(error)
}

/// Reads the numbers and ranges of a key, each of at most `most`, with `+` between them. All values are allowed if the
/// key is not there.
fn values(
    list: &KeyValues<'_>,
    key: &'static str,
    most: u8,
    wanted: &'static str,
) -> Result<AllowedValues, ListError> {
    let Some(text) = list.get(key) else { return Ok(AllowedValues::default()) };
    let mut values = Vec::new();
    for entry in text.split('+') {
        let range = range(entry).filter(|range| *range.end() <= most.into());
        let range = range.ok_or_else(|| ListError::value(key, entry, wanted))?;
        values.extend(range.filter_map(|value| u8::try_from(value).ok()));
    }
    AllowedValues::new(&values).ok_or_else(|| ListError::value(key, text, wanted))
}

/// Reads a number, or a range of numbers.
fn range(entry: &str) -> Option<RangeInclusive<u16>> {
    let number = |digits: &str| digits.parse::<u16>().ok();
    let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some(first..=last)
}

/// The largest VLAN ID (IEEE 802.1Q).
const MAX_VLAN: u16 = 4094;

/// Reads numbers and ranges of VLANs, and `none`, with `+` between them.
fn vlan_list(list: &str) -> Result<VlanList, ListError> {
    let mut vlans = VlanList::default();
    for entry in list.split('+') {
        if entry == "none" {
            vlans.untagged = true;
            continue;
        }
        let wanted = "none, a VLAN of 0 to 4094 or a range of these such as 7-9";
        let range = range(entry).filter(|range| *range.end() <= MAX_VLAN);
        vlans.ranges.push(range.ok_or_else(|| ListError::value("vlan", entry, wanted))?);
    }
    Ok(vlans)
}

#[cfg(test)]
mod tests {
    use super::super::{GuestSpec, SpecError};
    use super::*;

    fn parse(keys: &str) -> Result<DevicePolicy, SpecError> {
        let spec = format!("name=a,vfio-user=b,{keys}").parse::<GuestSpec>();
        spec.map(|guest| guest.policy)
    }

    /// Checks that a key can have none of these values.
    fn check_refused(key: &'static str, values: &[&str]) {
        for value in values {
            let error = parse(&format!("{key}={value}")).unwrap_err();
            assert!(
                matches!(error, SpecError::List(ListError::Value { key: of, .. }) if of == key),
                "{key}={value}: {error}"
            );
        }
    }

    #[test]
    fn addresses_are_listed() {
        let rights = parse("rings=on").unwrap().addresses;
        assert_eq!((rights.gids, rights.vlans), (None, None));
        let rights = parse("gid=10.0.0.1+10.1.0.0/16+fd00::/8+fd00::1,vlan=none+5+7-9").unwrap();
        let prefix = |first: &[u8], last: &[u8], bits| {
            let mut gid = [0; 16];
            gid[..first.len()].copy_from_slice(first);
            gid[16 - last.len()..].copy_from_slice(last);
            GidPrefix::new(gid, bits).unwrap()
        };
        let gids = vec![
            prefix(&[], &[0xff, 0xff, 10, 0, 0, 1], 128),
            prefix(&[], &[0xff, 0xff, 10, 1, 0, 0], 112),
            prefix(&[0xfd], &[], 8),
            prefix(&[0xfd], &[1], 128),
        ];
        assert_eq!(rights.addresses.gids, Some(gids));
        let vlans = VlanList { untagged: true, ranges: vec![5..=5, 7..=9] };
        assert_eq!(rights.addresses.vlans, Some(vlans));
        let wrong = ["10.0.0", "10.0.0.1/33", "fd00::/129", "fd00::/x", "10.0.0.1+", "10.0.0.0/-1"];
        check_refused("gid", &wrong);
        check_refused("vlan", &["4095", "9-7", "5+", "any", "-1", "1-"]);
    }

    #[test]
    fn classes_are_listed_with_the_first_for_all_others() {
        let classes = |keys: &str| parse(keys).unwrap().classes;
        assert_eq!(classes("rings=on"), TrafficClasses::default());
        let all = AllowedValues::default();
        let values = |values: &[u8]| AllowedValues::new(values).unwrap();
        assert_eq!(
            classes("dscp=26+0+8-10,pcp=3"),
            TrafficClasses { dscp: values(&[26, 0, 8, 9, 10]), pcp: values(&[3]) }
        );
        assert_eq!(
            classes("pcp=0-7"),
            TrafficClasses { dscp: all, pcp: values(&[0, 1, 2, 3, 4, 5, 6, 7]) }
        );
        assert_ne!(classes("dscp=0+26"), classes("dscp=26+0"));
        check_refused("dscp", &["64", "9-7", "5+", "any", "-1", "1-", "60-64", "af41"]);
        check_refused("pcp", &["8", "0-8", "3+", "none"]);
    }

    #[test]
    fn a_guest_may_have_no_group() {
        let groups = |value: &str| parse(&format!("groups={value}")).unwrap().quota.groups;
        assert_eq!([groups("0"), groups("16")], [0, 16]);
        check_refused("groups", &["-1", "+1", "4294967296", "none"]);
    }

    #[test]
    fn a_rate_is_in_bits_per_second() {
        let rate = |value: &str| parse(&format!("rate={value}")).unwrap().quota.wire_rate;
        assert_eq!(rate("10G"), Some(1_250_000_000));
        assert_eq!(rate("500M"), Some(62_500_000));
        assert_eq!(rate("8K"), Some(1000));
        assert_eq!(rate("80000"), Some(10_000));
        let wrong = ["0", "7K", "-1", "1.5G", "G", "10g", "10Gbit", "99999999999G", "1T", "é"];
        check_refused("rate", &wrong);
    }

    #[test]
    fn a_message_rate_is_in_work_requests_per_second() {
        let rate =
            |value: &str| parse(&format!("message-rate={value}")).unwrap().quota.message_rate;
        assert_eq!(
            [rate("1"), rate("500K"), rate("2M")],
            [Some(1), Some(500_000), Some(2_000_000)]
        );
        check_refused("message-rate", &["0", "-1", "1.5M", "K", "99999999999G"]);
    }

    #[test]
    fn objects_and_memory_are_limited() {
        let quota = parse("qps=1,cqs=2,srqs=3,mrs=4,mws=5,pds=6,memory=4G").unwrap().quota;
        let Quota { qps, cqs, srqs, mrs, mws, pds, memory, wire_rate, message_rate, .. } = quota;
        assert_eq!([qps, cqs, srqs, mrs, mws, pds], [1, 2, 3, 4, 5, 6]);
        assert_eq!((memory, wire_rate, message_rate), (4 << 30, None, None));
        assert_eq!(parse("rings=on").unwrap().quota, Quota::default());
        for key in ["qps", "cqs", "srqs", "mrs", "mws", "pds"] {
            check_refused(key, &["0", "-1", "4294967296", "many"]);
        }
        check_refused("memory", &["0", "4095", "1.5G", "T", "99999999999T"]);
    }
}
