// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The part of a device's limits that an administrator lets one guest use.

/// The amounts that a guest may use at a time. A quota may change while the device runs, and the guest is not told of
/// it: the configuration space names the limits of the device ([`super::limits::Limits`]), and the smaller of the two
/// values counts.
///
/// A quota is asked when something new is made. What a guest has already stays, even if it is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// QPs, the GSI's among them.
    pub qps: u32,
    /// CQs.
    pub cqs: u32,
    /// SRQs.
    pub srqs: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub mws: u32,
    /// Protection domains.
    pub pds: u32,
    /// Multicast groups that QPs are attached to. A group counts once, however many QPs are.
    pub groups: u32,
    /// Bytes of memory that regions cover, in whole pages of 4 KiB. Memory counts once for each region that covers it.
    /// A region for fast registration counts with the most pages that it can have, and a region of all memory
    /// (GET_DMA_MR) does not count.
    pub memory: u64,
    /// Bytes that the guest may send to other hosts per second; `None`: as many as it can.
    pub wire_rate: Option<u64>,
    /// Send work requests that the guest may have carried out per second, wherever they go; `None`: as many as it can.
    pub message_rate: Option<u64>,
}

impl Default for Quota {
    /// Returns the quota of a guest that may use all that its device can have.
    fn default() -> Self {
        Self {
            qps: u32::MAX,
            cqs: u32::MAX,
            srqs: u32::MAX,
            mrs: u32::MAX,
            mws: u32::MAX,
            pds: u32::MAX,
            groups: u32::MAX,
            memory: u64::MAX,
            wire_rate: None,
            message_rate: None,
        }
    }
}
