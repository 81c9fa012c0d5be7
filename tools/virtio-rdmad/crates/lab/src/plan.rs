// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is, before it runs: its names, its addresses and its place on the machine.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// The plan of a guest.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number of the guest, from 1 on.
    pub number: u8,
    /// Its directory on the machine.
    pub directory: PathBuf,
    /// The MAC address of its network interface.
    pub mac: String,
    /// The address of its network interface.
    pub address: String,
}

impl Plan {
    /// Plans a guest, and makes its directory.
    pub fn new(number: u8, parent: &Path) -> Result<Self, Error> {
        let directory = parent.join(format!("guest{number}"));
        std::fs::create_dir(&directory)?;
        let (mac, address) = (format!("52:54:00:fd:00:{number:02x}"), format!("10.77.0.{number}"));
        Ok(Self { number, directory, mac, address })
    }

    /// Returns the name of the guest.
    pub fn name(&self) -> String {
        format!("guest{}", self.number)
    }

    /// Returns the socket of its RDMA device.
    pub fn rdma_socket(&self) -> PathBuf {
        self.socket("rdma")
    }

    /// Returns the socket of its network interface.
    pub fn nic_socket(&self) -> PathBuf {
        self.socket("nic")
    }

    /// Returns the path of a socket in its directory.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.sock"))
    }
}
