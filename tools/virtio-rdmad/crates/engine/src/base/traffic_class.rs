// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The classes of traffic that the packets of a guest may have. By the class, switches and routers choose the queue in
//! which a packet waits, and decide whether the packet is dropped or the sender is paused.
//!
//! The guest's kernel names a class for each connection and each datagram, and the administrator says which of them the
//! guest may have. A packet of another class is sent as well, in the first one that is allowed: a port that does not
//! trust its station marks packets so (RFC 2475, 2.3.3).

use std::sync::atomic::{AtomicU64, AtomicU8, Ordering};

/// Bits of a DSCP, which is the wider of the two fields.
const BITS: u32 = 6;

/// The number, which is no DSCP, that stands for the DSCP of the data.
const OF_DATA: u8 = u8::MAX;

/// The values that a field of a packet may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedValues {
    /// A bit for each value.
    allowed: u64,
    /// The value that stands for each value that is not allowed.
    first: u8,
}

impl Default for AllowedValues {
    /// Returns all values.
    fn default() -> Self {
        Self { allowed: u64::MAX, first: 0 }
    }
}

impl AllowedValues {
    /// Returns these values, of which the first one stands for all others; `None` if there is none, or one is more than
    /// 63.
    pub fn new(values: &[u8]) -> Option<Self> {
        let is_in_range = |value: &u8| *value >> BITS == 0;
        let first = *values.first().filter(|_| values.iter().all(is_in_range))?;
        let allowed = values.iter().fold(0, |allowed, value| allowed | 1 << value);
        Some(Self { allowed, first })
    }
}

/// The classes that an administrator allows the packets of a guest, on their way to other hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficClasses {
    /// The DSCP in the IP header (RFC 2474).
    pub dscp: AllowedValues,
    /// The priority in the tag of a VLAN (IEEE 802.1Q).
    pub pcp: AllowedValues,
    /// The DSCP of notifications of congestion (CNPs), whatever values `dscp` allows; `None`: that of the data that
    /// they are about. It is less than 64.
    pub cnp_dscp: Option<u8>,
}

/// The values that a field may have at present. Any thread may change them.
struct Field {
    allowed: AtomicU64,
    first: AtomicU8,
}

impl Field {
    fn new(values: AllowedValues) -> Self {
        Self { allowed: values.allowed.into(), first: values.first.into() }
    }

    /// Changes the values. A thread that sees the new values also sees the value that stands for others.
    fn set(&self, values: AllowedValues) {
        self.first.store(values.first, Ordering::Relaxed);
        self.allowed.store(values.allowed, Ordering::Release);
    }

    /// Returns a value that is allowed for one that the guest asks for.
    fn allow(&self, value: u8) -> u8 {
        if self.allowed.load(Ordering::Acquire) >> value & 1 != 0 {
            value
        } else {
            self.first.load(Ordering::Relaxed)
        }
    }
}

/// The classes that the packets of a guest may be in at present.
pub(crate) struct CurrentClasses {
    dscp: Field,
    pcp: Field,
    /// The DSCP of CNPs, or [`OF_DATA`].
    cnp_dscp: AtomicU8,
}

impl CurrentClasses {
    pub fn new(classes: TrafficClasses) -> Self {
        let TrafficClasses { dscp, pcp, cnp_dscp } = classes;
        let cnp_dscp = cnp_dscp.unwrap_or(OF_DATA).into();
        Self { dscp: Field::new(dscp), pcp: Field::new(pcp), cnp_dscp }
    }

    /// Changes the classes. Any thread may call this.
    pub fn set(&self, classes: TrafficClasses) {
        self.dscp.set(classes.dscp);
        self.pcp.set(classes.pcp);
        self.cnp_dscp.store(classes.cnp_dscp.unwrap_or(OF_DATA), Ordering::Relaxed);
    }

    /// Returns the DSCP of a packet for which the guest asks for this one, of 6 bits.
    pub fn dscp(&self, asked: u8) -> u8 {
        self.dscp.allow(asked)
    }

    /// Returns the priority of a frame for which the guest asks for this one, of 3 bits.
    pub fn pcp(&self, asked: u8) -> u8 {
        self.pcp.allow(asked)
    }

    /// Returns the DSCP of a CNP about data with the DSCP `of_data`.
    pub fn cnp_dscp(&self, of_data: u8) -> u8 {
        match self.cnp_dscp.load(Ordering::Relaxed) {
            OF_DATA => of_data,
            dscp => dscp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_stands_for_those_that_are_not_allowed() {
        let values = |values: &[u8]| AllowedValues::new(values).unwrap();
        let current = CurrentClasses::new(TrafficClasses::default());
        assert_eq!([0, 26, 63].map(|value| current.dscp(value)), [0, 26, 63]);
        assert_eq!(current.cnp_dscp(26), 26);
        let (dscp, pcp, cnp_dscp) = (values(&[26, 0, 63]), values(&[3]), Some(48));
        current.set(TrafficClasses { dscp, pcp, cnp_dscp });
        assert_eq!(current.cnp_dscp(26), 48);
        assert_eq!([0, 1, 26, 48, 63].map(|value| current.dscp(value)), [0, 26, 26, 26, 63]);
        assert_eq!([0, 3, 7].map(|value| current.pcp(value)), [3, 3, 3]);
        assert_eq!((AllowedValues::new(&[]), AllowedValues::new(&[1, 64])), (None, None));
    }
}
