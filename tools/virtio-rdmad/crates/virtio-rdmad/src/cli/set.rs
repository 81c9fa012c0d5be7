// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad set`: changes what a guest of a running process may do.

use std::path::Path;

use serde_json::json;

use super::call::{call_with, CallError, INVALID_PARAMETER};
use super::options::SetOptions;
use crate::control::interface::SET_POLICY;
use crate::spec::PolicyChange;

/// Has the process change the policy of a guest.
pub fn run(options: &SetOptions) -> Result<(), Box<dyn std::error::Error>> {
    Ok(set(&options.running.control, &options.name, &options.policy)?)
}

/// Has the process behind the control socket change the policy of the guest of this name.
fn set(control: &Path, name: &str, change: &PolicyChange) -> Result<(), CallError> {
    let parameters = json!({ "name": name, "policy": change.to_string() });
    call_with(control, SET_POLICY, Some(parameters), &[]).map(|_| ())
}

/// Has the process do the same because its configuration file says so. A process of an earlier version does not
/// distinguish that.
pub fn set_in_file(control: &Path, name: &str, change: &PolicyChange) -> Result<(), CallError> {
    let parameters = json!({ "name": name, "policy": change.to_string(), "in_file": true });
    match call_with(control, SET_POLICY, Some(parameters), &[]) {
        Err(CallError::Refused(_, error, _)) if error == INVALID_PARAMETER => {
            set(control, name, change)
        }
        answer => answer.map(|_| ()),
    }
}
