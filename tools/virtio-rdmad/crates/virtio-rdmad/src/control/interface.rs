// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface of the control socket: its methods, as its description has them.

use std::io::BufRead;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};
use varlink::{Call, CallTrait, Interface, Reply};

use super::survey::{survey, Surveyed};
use crate::guests::{AddError, RemoveError};
use crate::options::GuestSpec;
use crate::report::EventReport;
use crate::socket::Socket;

/// The interface.
pub const NAME: &str = "org.virtio-rdma.Daemon";
/// Its description, which the socket gives to whoever asks.
const DESCRIPTION: &str = include_str!("org.virtio-rdma.Daemon.varlink");

/// The method that tells of all guests, workers and uplinks.
pub const STATUS: &str = "org.virtio-rdma.Daemon.Status";

/// The method that tells of what happens, while it happens.
pub const MONITOR: &str = "org.virtio-rdma.Daemon.Monitor";

/// The method that adds a guest.
pub const ADD_GUEST: &str = "org.virtio-rdma.Daemon.AddGuest";

/// The method that removes a guest.
pub const REMOVE_GUEST: &str = "org.virtio-rdma.Daemon.RemoveGuest";

/// The error of a method that answers more than once, called by a client that wants one answer.
const EXPECTED_MORE: &str = "org.varlink.service.ExpectedMore";

/// The parameters of [`ADD_GUEST`].
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AddGuest {
    /// What the guest is, as in `--guest`.
    pub spec: String,
}

/// The parameters of [`REMOVE_GUEST`].
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveGuest {
    /// The name of the guest.
    pub name: String,
    /// Whether to wait for its VMM to leave.
    #[serde(default)]
    pub drain: bool,
}

/// What [`REMOVE_GUEST`] answers.
#[derive(Debug, Deserialize, Serialize)]
pub struct Removed {
    /// The path of the socket.
    pub socket: String,
    /// Whether the guest is gone already.
    pub removed: bool,
}

/// A method that has no parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// What a call has from its client and for it, besides parameters.
#[derive(Debug, Default)]
pub struct Besides {
    /// The descriptors that have come with it.
    pub descriptors: Mutex<Vec<OwnedFd>>,
    /// Set when the client wants to be told of events.
    pub watches: AtomicBool,
}

/// What answers calls of the interface.
pub struct Daemon {
    surveyed: Surveyed,
    besides: Arc<Besides>,
}

impl Daemon {
    /// Makes the interface of a process that has these parts.
    pub fn new(surveyed: Surveyed, besides: Arc<Besides>) -> Self {
        Self { surveyed, besides }
    }

    fn status(&self) -> Reply {
        parameters(&survey(&self.surveyed))
    }

    /// Adds a guest, whose listening socket has come with the call.
    fn add_guest(&self, AddGuest { spec }: AddGuest) -> Result<Reply, Refused> {
        let invalid = |reason: &dyn ToString| refused("InvalidSpec", "reason", &reason.to_string());
        let spec: GuestSpec = spec.parse().map_err(|error| invalid(&error))?;
        if !spec.path.is_absolute() {
            // Whoever removes the socket may do so from another directory.
            return Err(invalid(&"the path of the socket is relative"));
        }
        let mut descriptors =
            self.besides.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        let no_socket = |reason: &str| refused("InvalidSocket", "reason", reason);
        let (Some(descriptor), None) = (descriptors.pop(), descriptors.pop()) else {
            return Err(no_socket("a listening socket must come with the call, and nothing else"));
        };
        let socket = Socket::passed(descriptor).map_err(|error| no_socket(&error.to_string()))?;
        let name = spec.name.clone();
        match self.surveyed.guests.add_one_more(spec, socket) {
            Ok(_) => {
                tracing::info!(guest = name, "added");
                Ok(Reply::parameters(Some(json!({}))))
            }
            Err(AddError::Name(name)) => Err(refused("NameTaken", "name", &name)),
            Err(AddError::Mac(network)) => Err(refused("AddressTaken", "network", &network)),
            Err(error @ (AddError::TooMany | AddError::Memory)) => {
                Err(refused("TooManyGuests", "reason", &error.to_string()))
            }
            Err(error @ AddError::Network { .. }) => {
                Err(refused("NotSupported", "reason", &error.to_string()))
            }
        }
    }

    fn remove_guest(&self, RemoveGuest { name, drain }: RemoveGuest) -> Result<Reply, Refused> {
        match self.surveyed.guests.remove(&name, drain) {
            Ok(guest) => {
                let removed = guest.link.worker().is_none();
                tracing::info!(guest = name, removed, "to leave");
                let socket = guest.spec.path.to_string_lossy().into_owned();
                Ok(parameters(&Removed { socket, removed }))
            }
            Err(RemoveError::Unknown(name)) => Err(refused("UnknownGuest", "name", &name)),
            Err(RemoveError::Connected(name)) => Err(refused("GuestConnected", "name", &name)),
        }
    }

    fn monitor(&self, call: &mut Call<'_>) -> varlink::Result<()> {
        if !call.wants_more() {
            return call.reply_struct(Reply::error(EXPECTED_MORE, None));
        }
        self.besides.watches.store(true, Ordering::Relaxed);
        call.set_continues(true);
        call.reply_struct(parameters(&EventReport::new("watching")))
    }
}

/// Why a method refuses a call.
enum Refused {
    /// One of the parameters is not one of the method, or not of its type.
    Parameter(String),
    /// For an error of the interface.
    Error(Reply),
}

/// Returns an error of the interface, which has one parameter.
fn refused(error: &str, parameter: &str, value: &str) -> Refused {
    let parameters = json!({ parameter: value });
    Refused::Error(Reply::error(format!("{NAME}.{error}"), Some(parameters)))
}

/// Returns an answer with these parameters.
fn parameters(of: &impl Serialize) -> Reply {
    Reply::parameters(serde_json::to_value(of).ok())
}

/// Reads the parameters of a call.
fn read<P: DeserializeOwned>(parameters: Option<Value>) -> Result<P, Refused> {
    let parameters = parameters.filter(|value| !value.is_null()).unwrap_or_else(|| json!({}));
    serde_json::from_value(parameters).map_err(|error| Refused::Parameter(error.to_string()))
}

impl Interface for Daemon {
    fn get_description(&self) -> &'static str {
        DESCRIPTION
    }

    fn get_name(&self) -> &'static str {
        NAME
    }

    fn call(&self, call: &mut Call<'_>) -> varlink::Result<()> {
        let Some(request) = call.get_request() else { return Ok(()) };
        let (method, parameters) = (request.method.to_string(), request.parameters.clone());
        let answer = match method.as_str() {
            STATUS => read(parameters).map(|Nothing {}| self.status()),
            ADD_GUEST => read(parameters).and_then(|parameters| self.add_guest(parameters)),
            REMOVE_GUEST => read(parameters).and_then(|parameters| self.remove_guest(parameters)),
            MONITOR => match read(parameters) {
                Ok(Nothing {}) => return self.monitor(call),
                Err(refused) => Err(refused),
            },
            _ => return call.reply_method_not_found(method),
        };
        match answer {
            Ok(reply) | Err(Refused::Error(reply)) => call.reply_struct(reply),
            Err(Refused::Parameter(parameter)) => call.reply_invalid_parameter(parameter),
        }
    }

    fn call_upgraded(&self, _: &mut Call<'_>, _: &mut dyn BufRead) -> varlink::Result<Vec<u8>> {
        Ok(Vec::new())
    }
}
