// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What whoever starts, configures or calls the process says: guests, uplinks, and the file that has both.

mod access;
mod change;
pub mod file;
mod guest;
pub mod key_values;
pub mod keys;
mod policy;
pub mod uplink;

pub use change::{PolicyChange, PolicyError, DEFAULT};
pub use file::ConfigFile;
pub use guest::{GuestSpec, Origin, SpecError, Transport, MAX_GUESTS};
pub use key_values::KeyValues;
pub use uplink::UplinkSpec;
