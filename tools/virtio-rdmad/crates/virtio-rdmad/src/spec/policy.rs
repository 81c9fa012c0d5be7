// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The policy of a guest: the keys that may change while the guest is there.

use engine::{AddressRights, AllowedValues, DevicePolicy, Quota, TrafficClasses, VlanList};

use super::form::{self, Spec};
use super::guest::GuestSpec;
use super::text::{List, Range};
use super::values::{Prefix, Vlans};

/// The number of keys of a guest that are about its device. The keys behind them are its policy.
const OF_DEVICE: usize = 13;

/// The keys of the policy.
pub const KEYS: &[&str] = GuestSpec::KEYS.split_at(OF_DEVICE).1;

fn vlans(list: &List<Vlans>) -> VlanList {
    let mut vlans = VlanList::default();
    for each in &list.0 {
        match each {
            Vlans::Untagged => vlans.untagged = true,
            Vlans::Tagged(Range { first, last }) => vlans.ranges.push(*first..=*last),
        }
    }
    vlans
}

/// Returns the values of a list; all values are allowed without one.
fn values<const MOST: u16>(list: Option<&List<Range<MOST>>>) -> AllowedValues {
    let ranges = list.into_iter().flat_map(|list| &list.0);
    let values = ranges.flat_map(|range| range.first..=range.last);
    let values: Vec<_> = values.filter_map(|value| u8::try_from(value).ok()).collect();
    AllowedValues::new(&values).unwrap_or_default()
}

impl GuestSpec {
    /// Returns what the guest may do.
    pub fn policy(&self) -> DevicePolicy {
        let gids = |list: &List<Prefix>| list.0.iter().filter_map(Prefix::gids).collect();
        DevicePolicy {
            addresses: AddressRights {
                gids: self.gid.as_ref().map(gids),
                vlans: self.vlan.as_ref().map(vlans),
            },
            classes: TrafficClasses {
                dscp: values(self.dscp.as_ref()),
                pcp: values(self.pcp.as_ref()),
                cnp_dscp: self.cnp_dscp.and_then(|dscp| u8::try_from(dscp.0).ok()),
            },
            quota: self.quota(),
        }
    }

    /// Returns the keys, as in a text, that are not as in another specification and do not belong to the policy.
    pub fn fixed_differences(&self, other: &Self) -> Vec<String> {
        let (own, others) = (self.to_map(), other.to_map());
        let differs = |key: &&&str| !KEYS.contains(key) && own.get(**key) != others.get(**key);
        Self::KEYS.iter().filter(differs).map(|key| form::in_text(key)).collect()
    }

    fn quota(&self) -> Quota {
        let all = Quota::default();
        Quota {
            qps: self.qps.map_or(all.qps, |qps| qps.0),
            cqs: self.cqs.map_or(all.cqs, |cqs| cqs.0),
            srqs: self.srqs.map_or(all.srqs, |srqs| srqs.0),
            mrs: self.mrs.map_or(all.mrs, |mrs| mrs.0),
            mws: self.mws.map_or(all.mws, |mws| mws.0),
            pds: self.pds.map_or(all.pds, |pds| pds.0),
            groups: self.groups.map_or(all.groups, |groups| groups.0),
            memory: self.memory.map_or(all.memory, |memory| memory.0),
            // The engine counts bytes.
            wire_rate: self.rate.map(|rate| rate.0 / 8),
            message_rate: self.message_rate.map(|rate| rate.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::GidPrefix;

    use super::super::SpecError;
    use super::*;

    fn parse(keys: &str) -> Result<DevicePolicy, SpecError> {
        let spec = format!("name=a,vfio-user=b,{keys}").parse::<GuestSpec>();
        spec.map(|guest| guest.policy())
    }

    /// Checks that a key can have none of these values.
    fn check_refused(key: &str, values: &[&str]) {
        for value in values {
            let error = parse(&format!("{key}={value}")).unwrap_err();
            assert!(
                error.key == key && error.to_string().contains("\" is not "),
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
        let values = |values: &[u8]| AllowedValues::new(values).unwrap();
        assert_eq!(
            classes("dscp=26+0+8-10,pcp=3"),
            TrafficClasses { dscp: values(&[26, 0, 8, 9, 10]), pcp: values(&[3]), cnp_dscp: None }
        );
        assert_eq!(
            classes("pcp=0-7"),
            TrafficClasses { pcp: values(&[0, 1, 2, 3, 4, 5, 6, 7]), ..TrafficClasses::default() }
        );
        assert_eq!(classes("cnp-dscp=48").cnp_dscp, Some(48));
        assert_ne!(classes("dscp=0+26"), classes("dscp=26+0"));
        check_refused("dscp", &["64", "9-7", "5+", "any", "-1", "1-", "60-64", "af41"]);
        check_refused("pcp", &["8", "0-8", "3+", "none"]);
        check_refused("cnp-dscp", &["64", "-1", "48+0", "cs6"]);
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
