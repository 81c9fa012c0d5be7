// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls methods of a running process, by Varlink over its control socket.

use std::io::{BufRead, BufReader, Error, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;
use varlink::sansio::protocol::{parse_reply, serialize_request};
use varlink::Request;

/// Why a call fails. Each names the control socket.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The process cannot be reached, or has closed the connection.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Socket(PathBuf, Error),
    /// What it sent is no answer of Varlink.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Malformed(PathBuf, varlink::Error),
    /// It answered with an error of this name, and with these parameters.
    #[error("{path}: {name}{parameters}", path = .0.display(), name = .1, parameters = .2)]
    Refused(PathBuf, String, String),
}

/// Calls a method that has no parameters. Returns what it answers.
pub fn call(path: &Path, method: &'static str) -> Result<Value, CallError> {
    let answer = exchange(path, method).map_err(|error| CallError::Socket(path.into(), error))?;
    let malformed = |error| CallError::Malformed(path.into(), error);
    let reply = parse_reply(answer.strip_suffix(&[0]).unwrap_or(&answer)).map_err(malformed)?;
    let parameters = reply.parameters.unwrap_or(Value::Null);
    match reply.error {
        None => Ok(parameters),
        Some(name) => {
            let parameters = Some(parameters).filter(|value| !value.is_null());
            let parameters = parameters.map(|value| format!(" {value}")).unwrap_or_default();
            Err(CallError::Refused(path.into(), name.into_owned(), parameters))
        }
    }
}

/// Sends a call, and returns the bytes of the answer.
fn exchange(path: &Path, method: &'static str) -> Result<Vec<u8>, Error> {
    let mut stream = UnixStream::connect(path)?;
    let request = serialize_request(&Request::create(method, None)).map_err(Error::other)?;
    stream.write_all(&request)?;
    let mut answer = Vec::new();
    BufReader::new(stream).read_until(0, &mut answer)?;
    if answer.last() != Some(&0) {
        return Err(Error::new(ErrorKind::UnexpectedEof, "the connection was closed"));
    }
    Ok(answer)
}
