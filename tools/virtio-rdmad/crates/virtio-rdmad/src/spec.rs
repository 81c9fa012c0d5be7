// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guests, uplinks and configuration files that options, files and calls describe.
//!
//! [`form`] has the forms in which a guest or an uplink is written, [`text`] and [`values`] the types of their values.

mod change;
pub mod file;
pub mod form;
mod guest;
mod policy;
mod text;
pub mod uplink;
mod values;

pub use change::{PolicyChange, PolicyError};
pub use file::ConfigFile;
pub use form::{Spec, SpecError};
pub use guest::{GuestSpec, Origin, Transport, MAX_GUESTS};
pub use uplink::UplinkSpec;
