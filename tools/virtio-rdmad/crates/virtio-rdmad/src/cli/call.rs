// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls methods of a running process, by Varlink over its control socket.

use std::io::{BufRead, BufReader, Error, ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{json, Value};
use varlink::sansio::protocol::{parse_reply, serialize_request};
use varlink::Request;

use crate::control::interface::STATUS;
use crate::control::report::Report;

/// The reason why a call fails. Each error names the control socket.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The process cannot be reached, or has closed the connection.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Socket(PathBuf, Error),
    /// The process sent bytes that are no answer of Varlink.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Malformed(PathBuf, varlink::Error),
    /// The process answered with an error of this name, and with these parameters.
    #[error("{path}: {name}{parameters}", path = .0.display(), name = .1, parameters = .2)]
    Refused(PathBuf, String, String),
}

/// The error of a method that does not know a parameter, or takes no such value.
const INVALID_PARAMETER: &str = "org.varlink.service.InvalidParameter";

/// Asks what there is to tell of a process, without an entry for each QP and SRQ. A process of an earlier version knows
/// no other answer than that with all entries.
pub fn ask_brief(path: &Path) -> Result<Value, CallError> {
    call_any(path, STATUS, &[json!({ "detail": false }), json!({})], &[])
}

/// Asks the same, and reads the answer.
pub fn ask_summary(path: &Path) -> Result<Report, Box<dyn std::error::Error>> {
    Ok(Report::read(ask_brief(path)?)?)
}

/// Calls a method with these parameters, and passes these descriptors on, two at most. Returns what it answers.
pub fn call_with(
    path: &Path,
    method: &'static str,
    parameters: Option<Value>,
    descriptors: &[BorrowedFd<'_>],
) -> Result<Value, CallError> {
    let answer = Answers::new(path, &Request::create(method, parameters), descriptors)?.next()?;
    answer.ok_or_else(|| CallError::Socket(path.into(), ErrorKind::UnexpectedEof.into()))
}

/// Calls a method with the first of these parameters that the process takes: later ones are those of earlier versions.
pub fn call_any(
    path: &Path,
    method: &'static str,
    parameters: &[Value],
    descriptors: &[BorrowedFd<'_>],
) -> Result<Value, CallError> {
    let mut answer = call_with(path, method, parameters.first().cloned(), descriptors);
    for earlier in parameters.iter().skip(1) {
        match answer {
            Err(CallError::Refused(_, name, _)) if name == INVALID_PARAMETER => {
                answer = call_with(path, method, Some(earlier.clone()), descriptors);
            }
            answer => return answer,
        }
    }
    answer
}

/// The answers to a call.
pub struct Answers {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Answers {
    /// Calls a method that answers more than once, with these parameters.
    pub fn ask(
        path: &Path,
        method: &'static str,
        parameters: Option<Value>,
    ) -> Result<Self, CallError> {
        let request = Request { more: Some(true), ..Request::create(method, parameters) };
        Self::new(path, &request, &[])
    }

    fn new(
        path: &Path,
        request: &Request<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Self, CallError> {
        let failed = |error| CallError::Socket(path.into(), error);
        let malformed = |error| CallError::Malformed(path.into(), error);
        let mut stream = UnixStream::connect(path).map_err(failed)?;
        let request = serialize_request(request).map_err(malformed)?;
        let sent = match descriptors {
            [] => 0,
            descriptors => pass(&stream, &request, descriptors).map_err(failed)?,
        };
        stream.write_all(&request[sent..]).map_err(failed)?;
        Ok(Self { path: path.into(), stream: BufReader::new(stream) })
    }

    /// Returns the connection, by which somebody else may end the answers.
    pub fn stream(&self) -> Result<UnixStream, Error> {
        self.stream.get_ref().try_clone()
    }

    /// Waits for the next answer. `None`: the process has closed the connection.
    pub fn next(&mut self) -> Result<Option<Value>, CallError> {
        let path = &self.path;
        let mut answer = Vec::new();
        let read = self.stream.read_until(0, &mut answer);
        read.map_err(|error| CallError::Socket(path.clone(), error))?;
        let Some(answer) = answer.strip_suffix(&[0]) else { return Ok(None) };
        let reply =
            parse_reply(answer).map_err(|error| CallError::Malformed(path.clone(), error))?;
        let parameters = reply.parameters.unwrap_or(Value::Null);
        let Some(name) = reply.error else { return Ok(Some(parameters)) };
        let parameters = Some(parameters).filter(|value| !value.is_null());
        let parameters = parameters.map(|value| format!(" {value}")).unwrap_or_default();
        Err(CallError::Refused(path.clone(), name.into_owned(), parameters))
    }
}

/// Sends bytes, or the first of them, with descriptors. Returns how many were sent.
fn pass(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty())?)
}
