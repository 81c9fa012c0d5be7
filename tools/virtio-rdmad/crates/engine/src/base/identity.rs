// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Identities of devices.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The number of a device. No two devices have the same one, of this host or of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceId(u64);

impl DeviceId {
    /// Returns a number that no device has.
    fn new() -> Self {
        /// Numbers of a process without random numbers.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(getrandom::u64().unwrap_or_else(|_| NEXT.fetch_add(1, Ordering::Relaxed)))
    }
}

/// The identity of a device, which distinguishes it from others for as long as its state lives, also over an upgrade of
/// the process. It changes only while the device is not started. Any thread may read it.
pub(crate) struct Identity {
    id: AtomicU64,
    mac: AtomicU64,
}

impl Identity {
    /// Returns the identity of a new device with this MAC address.
    pub fn new(mac: [u8; 6]) -> Self {
        let identity = Self { id: AtomicU64::new(0), mac: AtomicU64::new(0) };
        identity.set(DeviceId::new(), mac);
        identity
    }

    /// Returns the number of the device.
    #[inline]
    pub fn id(&self) -> DeviceId {
        DeviceId(self.id.load(Ordering::Relaxed))
    }

    /// Returns the MAC address that its GUID is made from, and that its packets come from.
    pub fn mac(&self) -> [u8; 6] {
        let [_, _, mac @ ..] = self.mac.load(Ordering::Relaxed).to_be_bytes();
        mac
    }

    /// Makes it that of another device, whose state this one takes over.
    pub fn set(&self, DeviceId(id): DeviceId, mac: [u8; 6]) {
        let mut bytes = [0; 8];
        bytes[2..].copy_from_slice(&mac);
        self.id.store(id, Ordering::Relaxed);
        self.mac.store(u64::from_be_bytes(bytes), Ordering::Relaxed);
    }
}
