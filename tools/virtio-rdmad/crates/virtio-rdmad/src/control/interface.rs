// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface of the control socket: its methods, as its description has them.

use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use serde_json::Value;
use varlink::{Call, CallTrait, Interface, Reply};

use super::survey::{survey, Surveyed};
use crate::report::EventReport;

/// The interface.
pub const NAME: &str = "org.virtio-rdma.Daemon";
/// Its description, which the socket gives to whoever asks.
const DESCRIPTION: &str = include_str!("org.virtio-rdma.Daemon.varlink");

/// The method that tells of all guests, workers and uplinks.
pub const STATUS: &str = "org.virtio-rdma.Daemon.Status";

/// The method that tells of what happens, while it happens.
pub const MONITOR: &str = "org.virtio-rdma.Daemon.Monitor";

/// The error of a method that answers more than once, called by a client that wants one answer.
const EXPECTED_MORE: &str = "org.varlink.service.ExpectedMore";

/// What answers calls of the interface.
pub struct Daemon {
    surveyed: Surveyed,
    /// Set when a client wants to be told of events.
    watches: Arc<AtomicBool>,
}

impl Daemon {
    /// Makes the interface of a process that has these parts. It sets `watches` when a client wants to be told of
    /// events.
    pub fn new(surveyed: Surveyed, watches: Arc<AtomicBool>) -> Self {
        Self { surveyed, watches }
    }

    fn monitor(&self, call: &mut Call<'_>) -> varlink::Result<()> {
        if !call.wants_more() {
            return call.reply_struct(Reply::error(EXPECTED_MORE, None));
        }
        self.watches.store(true, Ordering::Relaxed);
        call.set_continues(true);
        call.reply_struct(Reply::parameters(
            serde_json::to_value(EventReport::new("watching")).ok(),
        ))
    }

    fn status(&self, call: &mut Call<'_>) -> varlink::Result<()> {
        let report = serde_json::to_value(survey(&self.surveyed));
        call.reply_struct(Reply::parameters(report.ok()))
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
        let (method, parameters) = (request.method.to_string(), request.parameters.clone());
        if let Some(name) = first_parameter(parameters.as_ref()) {
            return call.reply_invalid_parameter(name);
        }
        match method.as_str() {
            STATUS => self.status(call),
            MONITOR => self.monitor(call),
            _ => call.reply_method_not_found(method),
        }
    }

    fn call_upgraded(&self, _: &mut Call<'_>, _: &mut dyn BufRead) -> varlink::Result<Vec<u8>> {
        Ok(Vec::new())
    }
}

/// Returns the name of a parameter of a call, if it has one.
fn first_parameter(parameters: Option<&Value>) -> Option<String> {
    match parameters {
        None | Some(Value::Null) => None,
        Some(Value::Object(parameters)) => parameters.keys().next().cloned(),
        Some(_) => Some("parameters".to_owned()),
    }
}
