// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface of the control socket: its methods, as its description has them.

use std::io::BufRead;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};
use varlink::{Call, CallTrait, Interface, Reply};

use super::report::{EventReport, FrameReport, SeenReport};
use super::survey::{survey, Surveyed};
use crate::guest::guests::{AddError, RemoveError, SetError};
use crate::guest::trace::Traced;
use crate::os::socket::{Kind, Socket};
use crate::spec::{GuestSpec, Origin, PolicyChange, PolicyError, Spec};

/// The interface.
pub const NAME: &str = "org.virtio-rdma.Daemon";
/// The description of the interface, which the socket gives to each client that asks.
const DESCRIPTION: &str = include_str!("org.virtio-rdma.Daemon.varlink");

/// The method that tells of all guests, workers and uplinks.
pub const STATUS: &str = "org.virtio-rdma.Daemon.Status";

/// The method that tells of what happens, while it happens.
pub const MONITOR: &str = "org.virtio-rdma.Daemon.Monitor";

/// The method that tells of what happens to the messages of a guest, while it happens.
pub const TRACE: &str = "org.virtio-rdma.Daemon.Trace";

/// The method that tells of the frames of a guest.
pub const CAPTURE: &str = "org.virtio-rdma.Daemon.Capture";

/// The method that adds a guest.
pub const ADD_GUEST: &str = "org.virtio-rdma.Daemon.AddGuest";

/// The method that removes a guest.
pub const REMOVE_GUEST: &str = "org.virtio-rdma.Daemon.RemoveGuest";

/// The method that changes what a guest may do.
pub const SET_POLICY: &str = "org.virtio-rdma.Daemon.SetPolicy";

/// The error of a method that answers more than once, called by a client that wants one answer.
const EXPECTED_MORE: &str = "org.varlink.service.ExpectedMore";

/// The answer of [`REMOVE_GUEST`].
#[derive(Debug, Deserialize, Serialize)]
pub struct RemoveReply {
    /// The path of the socket.
    pub socket: String,
    /// The path of the socket of its network interface, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<String>,
    /// Whether the guest is gone already.
    pub removed: bool,
}

/// The parts of a call besides its parameters, from its client and for it.
#[derive(Debug, Default)]
pub struct Besides {
    /// The descriptors that have come with it.
    pub descriptors: Mutex<Vec<OwnedFd>>,
    /// Set when the client wants to be told of events.
    pub watches: AtomicBool,
    /// The QPs that the client wants to trace from now on.
    pub traced: Mutex<Option<Traced>>,
}

/// The interface, which answers calls.
pub struct Daemon {
    surveyed: Surveyed,
    besides: Arc<Besides>,
}

impl Daemon {
    /// Makes the interface of a process that has these parts.
    pub fn new(surveyed: Surveyed, besides: Arc<Besides>) -> Self {
        Self { surveyed, besides }
    }

    fn status(&self, detail: bool) -> Reply {
        parameters(&survey(&self.surveyed, detail))
    }

    /// Adds a guest, whose listening socket has come with the call.
    fn add_guest(&self, spec: Value, origin: Origin) -> Result<Reply, Refused> {
        let invalid = |reason: &dyn ToString| refused("InvalidSpec", "reason", &reason.to_string());
        let spec = GuestSpec::of_value(spec).map_err(|error| invalid(&error))?;
        if spec.sockets().any(|path| path.is_relative()) {
            // Whoever removes the socket may do so from another directory.
            return Err(invalid(&"the path of the socket is relative"));
        }
        let nic = spec.nic.as_ref().map(|_| spec.transport().framing().into());
        let kinds: Vec<_> = std::iter::once(Kind::Stream).chain(nic).collect();
        let mut sockets = self.sockets(&kinds)?.into_iter();
        let Some(socket) = sockets.next() else { return Err(no_socket(NO_SOCKETS)) };
        let name = spec.name.clone();
        match self.surveyed.guests.add_one_more(spec, socket, sockets.next(), None, origin) {
            Ok(_) => {
                tracing::info!(guest = name, "added");
                if !self.surveyed.guests.are_kept() {
                    tracing::warn!(
                        guest = name,
                        "the service manager does not read: a later process may not have the guest"
                    );
                }
                Ok(Reply::parameters(Some(json!({}))))
            }
            Err(AddError::Name(name)) => Err(refused("NameTaken", "name", &name)),
            Err(AddError::Mac(network)) => Err(refused("AddressTaken", "network", &network)),
            Err(
                error
                @ (AddError::TooMany | AddError::Memory { .. } | AddError::Descriptors { .. }),
            ) => Err(refused("TooManyGuests", "reason", &error.to_string())),
            Err(error @ AddError::Network { .. }) => {
                Err(refused("NotSupported", "reason", &error.to_string()))
            }
        }
    }

    fn set_policy(&self, name: &str, policy: Value, in_file: bool) -> Result<Reply, Refused> {
        let change = PolicyChange::of_value(policy).map_err(|error| refused_policy(&error))?;
        match self.surveyed.guests.set_policy(name, &change, in_file) {
            Ok(spec) => {
                tracing::info!(guest = name, policy = %change, "its policy has changed");
                Ok(Reply::parameters(Some(json!({ "spec": spec.to_map() }))))
            }
            Err(SetError::Unknown(name)) => Err(refused("UnknownGuest", "name", &name)),
            Err(SetError::Spec(error)) => Err(refused_policy(&error.into())),
        }
    }

    fn remove_guest(&self, name: &str, drain: bool) -> Result<Reply, Refused> {
        match self.surveyed.guests.remove(name, drain) {
            Ok(guest) => {
                let removed = guest.link.worker().is_none();
                tracing::info!(guest = name, removed, "to leave");
                let text = |path: &Path| path.to_string_lossy().into_owned();
                let (socket, nic) = (text(guest.spec.path()), guest.spec.nic.as_deref().map(text));
                Ok(parameters(&RemoveReply { socket, nic, removed }))
            }
            Err(RemoveError::Unknown(name)) => Err(refused("UnknownGuest", "name", &name)),
            Err(RemoveError::Connected(name)) => Err(refused("GuestConnected", "name", &name)),
        }
    }

    /// Takes the listening sockets that have come with the call, which must be of these kinds.
    fn sockets(&self, kinds: &[Kind]) -> Result<Vec<Socket>, Refused> {
        let mut descriptors =
            self.besides.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        let descriptors = std::mem::take(&mut *descriptors);
        if descriptors.len() != kinds.len() {
            return Err(no_socket(NO_SOCKETS));
        }
        let take = |(descriptor, kind): (OwnedFd, &Kind)| Socket::passed(descriptor, *kind);
        let sockets: Result<_, _> = descriptors.into_iter().zip(kinds).map(take).collect();
        sockets.map_err(|error| no_socket(&error.to_string()))
    }

    fn monitor(&self, call: &mut Call<'_>) -> varlink::Result<()> {
        if !call.wants_more() {
            return call.reply_struct(Reply::error(EXPECTED_MORE, None));
        }
        self.besides.watches.store(true, Ordering::Relaxed);
        call.set_continues(true);
        call.reply_struct(parameters(&EventReport::new("watching")))
    }

    fn trace(&self, call: &mut Call<'_>, traced: Traced) -> varlink::Result<()> {
        if !call.wants_more() {
            return call.reply_struct(Reply::error(EXPECTED_MORE, None));
        }
        if !self.surveyed.guests.all().iter().any(|guest| guest.spec.name == traced.guest) {
            let parameters = json!({ "name": traced.guest });
            let error = format!("{NAME}.UnknownGuest");
            return call.reply_struct(Reply::error(error, Some(parameters)));
        }
        let now = SystemTime::now();
        let first = match traced.snaplen {
            Some(_) => parameters(&FrameReport::at(now, "capturing")),
            None => parameters(&SeenReport::at(now, "tracing")),
        };
        *self.besides.traced.lock().unwrap_or_else(PoisonError::into_inner) = Some(traced);
        call.set_continues(true);
        call.reply_struct(first)
    }
}

/// The reason why a method refuses a call.
enum Refused {
    /// The parameter of this name is missing, is not of its type, or is not one of the method.
    Parameter(String),
    /// The interface has an error for the reason, which is the answer.
    Error(Reply),
}

/// Returns an error of the interface, which has one parameter.
fn refused(error: &str, parameter: &str, value: &str) -> Refused {
    let parameters = json!({ parameter: value });
    Refused::Error(Reply::error(format!("{NAME}.{error}"), Some(parameters)))
}

/// The reason in the error of a call whose sockets are not there.
const NO_SOCKETS: &str =
    "the listening socket must come with the call, with nic= that of the interface behind it, and nothing else";

/// Returns the error of a call whose sockets are not right.
fn no_socket(reason: &str) -> Refused {
    refused("InvalidSocket", "reason", reason)
}

/// Returns the error of a policy that a guest cannot have.
fn refused_policy(error: &PolicyError) -> Refused {
    let reason = error.to_string();
    let key = match error {
        PolicyError::Fixed(key) => return refused("NotChangeable", "key", key),
        PolicyError::Spec(error) => &error.key,
    };
    let parameters = json!({ "key": key, "reason": reason });
    Refused::Error(Reply::error(format!("{NAME}.InvalidPolicy"), Some(parameters)))
}

/// Returns an answer with these parameters.
fn parameters(of: &impl Serialize) -> Reply {
    Reply::parameters(serde_json::to_value(of).ok())
}

/// The parameters of a call that were not taken yet.
struct Parameters(Map<String, Value>);

impl Parameters {
    /// Takes a text.
    fn text(&mut self, name: &str) -> Result<String, Refused> {
        match self.0.remove(name) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(Refused::Parameter(name.to_owned())),
        }
    }

    /// Takes an object, or the text that earlier versions have in its place: the parameter of the first of these names
    /// that is there.
    fn object(&mut self, names: &[&str]) -> Result<Value, Refused> {
        let name = names.iter().find(|name| self.0.contains_key(**name)).unwrap_or(&names[0]);
        let value = self.0.remove(*name).filter(|value| value.is_object() || value.is_string());
        value.ok_or_else(|| Refused::Parameter((*name).to_owned()))
    }

    /// Takes a flag, which is this if it is not there.
    fn flag(&mut self, name: &str, otherwise: bool) -> Result<bool, Refused> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(otherwise),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(Refused::Parameter(name.to_owned())),
        }
    }

    /// Takes a number, if it is there.
    fn number(&mut self, name: &str) -> Result<Option<u32>, Refused> {
        let refused = || Refused::Parameter(name.to_owned());
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
                number.map(Some).ok_or_else(refused)
            }
        }
    }

    /// Refuses a parameter that the method does not have.
    fn end(self) -> Result<(), Refused> {
        self.0.into_iter().next().map_or(Ok(()), |(name, _)| Err(Refused::Parameter(name)))
    }
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
        let method = request.method.to_string();
        let mut parameters = match request.parameters.clone() {
            None | Some(Value::Null) => Parameters(Map::new()),
            Some(Value::Object(parameters)) => Parameters(parameters),
            Some(_) => return call.reply_invalid_parameter("parameters".to_owned()),
        };
        let answer = match method.as_str() {
            STATUS => parameters.flag("detail", true).and_then(|detail| {
                parameters.end()?;
                Ok(self.status(detail))
            }),
            ADD_GUEST => parameters.object(&["guest", "spec"]).and_then(|spec| {
                let is_in_file = parameters.flag("in_file", false)?;
                parameters.end()?;
                self.add_guest(spec, if is_in_file { Origin::File } else { Origin::Call })
            }),
            SET_POLICY => parameters.text("name").and_then(|name| {
                let policy = parameters.object(&["policy"])?;
                let is_in_file = parameters.flag("in_file", false)?;
                parameters.end()?;
                self.set_policy(&name, policy, is_in_file)
            }),
            REMOVE_GUEST => parameters.text("name").and_then(|name| {
                let drain = parameters.flag("drain", false)?;
                parameters.end()?;
                self.remove_guest(&name, drain)
            }),
            MONITOR => match parameters.end() {
                Ok(()) => return self.monitor(call),
                Err(refused) => Err(refused),
            },
            TRACE | CAPTURE => {
                let traced = parameters.text("guest").and_then(|guest| {
                    let qpn = parameters.number("qpn")?;
                    let snaplen = if method == CAPTURE {
                        Some(parameters.number("snaplen")?.unwrap_or(0))
                    } else {
                        None
                    };
                    parameters.end()?;
                    Ok(Traced { guest, qpn, snaplen })
                });
                match traced {
                    Ok(traced) => return self.trace(call, traced),
                    Err(refused) => Err(refused),
                }
            }
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
