// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad add` and `remove`: a guest comes to a running process, or leaves it.

use std::os::fd::AsFd;
use std::path::Path;

use serde_json::json;

use super::call::{call_any, call_with};
use super::options::{AddOptions, RemoveOptions};
use crate::control::interface::{RemoveReply, ADD_GUEST, REMOVE_GUEST};
use crate::os::socket::{remove_socket, Kind, Socket};
use crate::spec::{GuestSpec, Spec};

/// Makes the sockets of a guest, with the rights of the caller, and adds the guest to the process.
pub fn add(options: &AddOptions) -> Result<(), Box<dyn std::error::Error>> {
    add_to(&options.running.control, &options.guest, false)
}

/// Makes the sockets of a guest, and adds the guest to the process behind the control socket. The configuration file of
/// the process may have the guest.
pub fn add_to(
    control: &Path,
    guest: &GuestSpec,
    is_in_file: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let access = guest.access();
    let mut sockets = vec![Socket::bind(guest.path(), Kind::Stream, &access)?];
    if let Some(path) = &guest.nic {
        sockets.push(Socket::bind(path, guest.transport().framing().into(), &access)?);
    }
    let listeners: Vec<_> = sockets.iter().map(|socket| socket.listener().as_fd()).collect();
    let parameters = [
        json!({ "guest": guest.to_map(), "in_file": is_in_file }),
        json!({ "spec": guest.to_string(), "in_file": is_in_file }),
    ];
    call_any(control, ADD_GUEST, &parameters, &listeners)?;
    sockets.iter_mut().for_each(Socket::keep_file);
    Ok(())
}

/// Removes a guest from the process, and removes the sockets of the guest.
pub fn remove(options: &RemoveOptions) -> Result<(), Box<dyn std::error::Error>> {
    let RemoveOptions { running, drain, name } = options;
    if !remove_from(&running.control, name, *drain)? {
        println!("{name} is removed when its VMM leaves");
    }
    Ok(())
}

/// Removes a guest from the process behind the control socket. Returns whether the guest is gone already.
pub fn remove_from(
    control: &Path,
    name: &str,
    drain: bool,
) -> Result<bool, Box<dyn std::error::Error>> {
    let parameters = json!({ "name": name, "drain": drain });
    let answer = call_with(control, REMOVE_GUEST, Some(parameters), &[])?;
    let RemoveReply { socket, nic, removed } = serde_json::from_value(answer)?;
    // Nobody listens there any more, or will when the VMM has left. The caller may have more rights than the process,
    // which a guest may have taken over: what it names is removed only if it is a socket.
    for socket in std::iter::once(socket).chain(nic) {
        if let Err(error) = remove_socket(Path::new(&socket)) {
            eprintln!("virtio-rdmad: {socket}: {error}");
        }
    }
    Ok(removed)
}
