// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The sizes and numbers of packets of a message, by the MTU of its path.

use crate::queue::request::{Operation, Request};

/// Returns the bytes of an `enum ib_mtu` as a power of two; those of 4096 bytes for one that is not
/// set.
fn mtu_log2(mtu: u8) -> u32 {
    if (1..=5).contains(&mtu) {
        7 + u32::from(mtu)
    } else {
        12
    }
}

/// Returns the bytes of an `enum ib_mtu`, as [`packets`] counts with them.
#[inline]
pub(crate) fn mtu_bytes(mtu: u8) -> u64 {
    1 << mtu_log2(mtu)
}

/// Returns how many packets a message of `len` bytes would be.
#[inline]
pub(crate) fn packets(len: u64, mtu: u8) -> u32 {
    // Shifts and masks take less time than a division, and each message asks several times.
    let log2 = mtu_log2(mtu);
    let last = u64::from(len & ((1 << log2) - 1) != 0);
    u32::try_from((len >> log2) + last).map_or(u32::MAX, |packets| packets.max(1))
}

/// Returns how many PSNs a work request has that waits for acknowledgements. A REG_MR is done when it begins to wait, and
/// waits for the work requests in front of it alone.
#[inline]
pub(crate) fn psns(request: &Request, mtu: u8) -> u32 {
    match request.operation {
        Operation::RegMr(_) => 0,
        _ => packets(request.total, mtu),
    }
}
