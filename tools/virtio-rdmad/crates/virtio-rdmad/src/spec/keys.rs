// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The keys of a `--guest`.

/// How many of [`GUEST`] are about the guest's device. Those behind them are about its policy.
const OF_DEVICE: usize = 12;

/// All keys.
pub const GUEST: &[&str] = &[
    "name",
    "vfio-user",
    "vhost-user",
    "mac",
    "network",
    "nic",
    "owner",
    "mode",
    "rings",
    "vectors",
    "max-qp",
    "max-cq",
    "gid",
    "vlan",
    "dscp",
    "pcp",
    "rate",
    "message-rate",
    "qps",
    "cqs",
    "srqs",
    "mrs",
    "mws",
    "pds",
    "groups",
    "memory",
];

/// Those about its device.
pub const DEVICE: &[&str] = GUEST.split_at(OF_DEVICE).0;

/// Those about its policy.
pub const POLICY: &[&str] = GUEST.split_at(OF_DEVICE).1;
