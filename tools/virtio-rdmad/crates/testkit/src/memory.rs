// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory, as a driver of a test reads and writes it.

use memory::GuestMemory;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Guest memory. An access beyond it fails the test.
pub trait Memory {
    /// Copies the bytes from `addr` on.
    fn read_bytes(&self, addr: u64, bytes: &mut [u8]);

    /// Writes bytes to `addr`.
    fn write_bytes(&self, addr: u64, bytes: &[u8]);

    /// Returns the value at `addr`.
    fn get<T: FromBytes + IntoBytes>(&self, addr: u64) -> T {
        let mut value = T::new_zeroed();
        self.read_bytes(addr, value.as_mut_bytes());
        value
    }

    /// Writes a value to `addr`.
    fn put<T: IntoBytes + Immutable>(&self, addr: u64, value: &T) {
        self.write_bytes(addr, value.as_bytes());
    }
}

impl Memory for GuestMemory {
    fn read_bytes(&self, addr: u64, bytes: &mut [u8]) {
        self.read(addr, bytes).unwrap();
    }

    fn write_bytes(&self, addr: u64, bytes: &[u8]) {
        self.write(addr, bytes).unwrap();
    }
}
