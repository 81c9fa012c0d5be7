// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad set`: changes what a guest of a running process may do.

use std::path::Path;

use serde_json::json;

use super::call::{call_any, CallError};
use super::options::SetOptions;
use crate::control::interface::SET_POLICY;
use crate::spec::PolicyChange;

/// Changes the policy of a guest of the process.
pub fn run(options: &SetOptions) -> Result<(), Box<dyn std::error::Error>> {
    Ok(set(&options.running.control, &options.name, &options.policy, false)?)
}

/// Changes the policy of the guest of this name in the process behind the control socket, maybe because the
/// configuration file of the process says so. A process of an earlier version takes a text, or does not distinguish the
/// reason.
pub fn set(
    control: &Path,
    name: &str,
    change: &PolicyChange,
    is_in_file: bool,
) -> Result<(), CallError> {
    let text = change.to_string();
    let parameters = [
        json!({ "name": name, "policy": change.to_value(), "in_file": is_in_file }),
        json!({ "name": name, "policy": text, "in_file": is_in_file }),
        json!({ "name": name, "policy": text }),
    ];
    call_any(control, SET_POLICY, &parameters, &[]).map(|_| ())
}
