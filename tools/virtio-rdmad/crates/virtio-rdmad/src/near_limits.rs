// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Resources of which little is left: those that a guest, or the process, uses nearly all of.

use std::collections::HashSet;

use crate::report::{EventReport, GuestReport, Report};

/// The share of its limit, in percent, from which on a resource is near it.
const NEAR: u64 = 90;
/// The share below which it is near no longer. As this is less, a resource that goes up and down a little is told of
/// once.
const FAR: u64 = 80;

/// Something of which there can be so many.
struct Resource<'a> {
    /// The guest that uses it; `None` for the process.
    guest: Option<&'a str>,
    name: &'static str,
    used: u64,
    limit: u64,
}

/// The resources that are near their limits, as far as a client was told.
#[derive(Debug, Default)]
pub struct NearLimits {
    /// A guest, or `None`, and a resource.
    near: HashSet<(Option<String>, &'static str)>,
}

impl NearLimits {
    /// Returns events for the resources that have come near their limits since the last report, or have gone away from
    /// them.
    pub fn compare(&mut self, report: &Report) -> Vec<EventReport> {
        let resources: Vec<_> = resources(report).collect();
        // A guest that is gone uses nothing.
        let is_there = |name: &str| report.guests.iter().any(|guest| guest.name == name);
        self.near.retain(|(guest, _)| guest.as_deref().is_none_or(is_there));
        resources.iter().filter_map(|resource| self.change(resource)).collect()
    }

    /// Returns the event of a resource, if there is one.
    fn change(&mut self, resource: &Resource<'_>) -> Option<EventReport> {
        let Resource { guest, name, used, limit } = *resource;
        let key = (guest.map(str::to_owned), name);
        let (share, all) = (used.saturating_mul(100), |percent| limit.saturating_mul(percent));
        let event = if self.near.contains(&key) {
            if share >= all(FAR) {
                return None;
            }
            self.near.remove(&key);
            "limit_far"
        } else {
            if share < all(NEAR) || used == 0 {
                return None;
            }
            self.near.insert(key);
            "limit_near"
        };
        Some(EventReport {
            guest: guest.map(str::to_owned),
            resource: Some(name.to_owned()),
            used: Some(used),
            limit: Some(limit),
            ..EventReport::new(event)
        })
    }
}

/// Returns the resources of the process and of all guests.
fn resources(report: &Report) -> impl Iterator<Item = Resource<'_>> {
    let (used, limit) = (report.guests.len() as u64, report.max_guests);
    let guests = Resource { guest: None, name: "guests", used, limit };
    std::iter::once(guests).chain(report.guests.iter().flat_map(of_guest))
}

fn of_guest(guest: &GuestReport) -> impl Iterator<Item = Resource<'_>> {
    let limits = &guest.limits;
    let uses = [
        ("qps", guest.qps.len(), limits.qps),
        ("cqs", guest.cqs, limits.cqs),
        ("srqs", guest.srqs.len(), limits.srqs),
        ("mrs", guest.mrs, limits.mrs),
        ("mws", guest.mws, limits.mws),
        ("pds", guest.pds, limits.pds),
    ];
    let objects = uses.into_iter().map(|(resource, used, limit)| (resource, used as u64, limit));
    let memory = limits.memory.map(|limit| ("memory", guest.memory, limit));
    let guest = Some(guest.name.as_str());
    objects.chain(memory).map(move |(name, used, limit)| Resource { guest, name, used, limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::LimitsReport;

    fn report(guests: &[(&str, usize)]) -> Report {
        let guest = |(name, mrs): &(&str, usize)| GuestReport {
            name: (*name).to_owned(),
            mrs: *mrs,
            limits: LimitsReport { mrs: 1000, ..LimitsReport::default() },
            ..GuestReport::default()
        };
        Report { max_guests: 10, guests: guests.iter().map(guest).collect(), ..Report::default() }
    }

    fn events(near: &mut NearLimits, guests: &[(&str, usize)]) -> Vec<(String, String, u64)> {
        let events = near.compare(&report(guests)).into_iter();
        events.map(|event| (event.event, event.resource.unwrap(), event.used.unwrap())).collect()
    }

    fn one(event: &str, resource: &str, used: u64) -> Vec<(String, String, u64)> {
        vec![(event.to_owned(), resource.to_owned(), used)]
    }

    #[test]
    fn a_resource_that_goes_up_and_down_is_told_of_once() {
        let mut near = NearLimits::default();
        assert_eq!(events(&mut near, &[("a", 899)]), []);
        assert_eq!(events(&mut near, &[("a", 900)]), one("limit_near", "mrs", 900));
        for used in [1000, 899, 800, 950] {
            assert_eq!(events(&mut near, &[("a", used)]), []);
        }
        assert_eq!(events(&mut near, &[("a", 799)]), one("limit_far", "mrs", 799));
        assert_eq!(events(&mut near, &[("a", 899)]), []);
        assert_eq!(events(&mut near, &[("a", 950)]), one("limit_near", "mrs", 950));
    }

    /// A guest of the same name is another one.
    #[test]
    fn a_guest_that_is_gone_is_near_nothing() {
        let mut near = NearLimits::default();
        assert_eq!(events(&mut near, &[("a", 900)]), one("limit_near", "mrs", 900));
        assert_eq!(events(&mut near, &[]), []);
        assert_eq!(events(&mut near, &[("a", 900)]), one("limit_near", "mrs", 900));
    }

    #[test]
    fn guests_are_limited_too() {
        let mut near = NearLimits::default();
        assert_eq!(events(&mut near, &[("g", 0); 8]), []);
        assert_eq!(events(&mut near, &[("g", 0); 9]), one("limit_near", "guests", 9));
        assert_eq!(events(&mut near, &[("g", 0); 7]), one("limit_far", "guests", 7));
    }
}
