// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is to do, and how that ends: files in the guest's directory, which the machine and the guest see. Signals
//! for the guest's command come over a serial line.

use std::io;
use std::path::{Path, PathBuf};

use serde::{de::DeserializeOwned, Deserialize, Serialize};

use crate::error::Error;

/// The name of the file with the [`Job`].
const JOB: &str = "job.json";
/// The name of the file with the [`End`].
const END: &str = "end.json";

/// What a guest is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// The command and its arguments. Without one, the guest waits for a signal.
    pub command: Vec<String>,
    /// The working directory.
    pub directory: PathBuf,
    /// Whether the working directory is that of the machine, and can be written to.
    pub is_shared: bool,
    /// The environment.
    pub environment: Vec<(String, String)>,
    /// The names of the guests, from guest 1 on, and their addresses.
    pub hosts: Vec<(String, String)>,
    /// The number of the guest.
    pub number: u8,
    /// The rate of the processors' clock in MHz, as the machine's kernel writes it.
    pub clock: Option<String>,
    /// Modules for the kernel, and their parameters behind a space.
    pub modules: Vec<String>,
    /// The size of the user's terminal, if the command has one.
    pub terminal: Option<Size>,
}

/// The size of a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// How it ended.
#[derive(Debug, Serialize, Deserialize)]
pub enum End {
    /// The command exited with this status.
    Exited(u8),
    /// A signal ended the command.
    Killed(u8),
    /// The command was not run, or the guest cannot say how it ended.
    Failed(String),
}

/// A signal for the command of a guest. With SIGWINCH, its terminal has this size first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tell {
    /// The number of the signal.
    pub signal: u8,
    /// The size of the terminal.
    pub size: Size,
}

impl Tell {
    /// The number of bytes on the serial line.
    pub const LEN: usize = 5;

    /// Returns the bytes on the serial line.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let ([a, b], [c, d]) = (self.size.rows.to_le_bytes(), self.size.columns.to_le_bytes());
        [self.signal, a, b, c, d]
    }

    /// Returns what these bytes on the serial line say.
    pub fn from_bytes([signal, a, b, c, d]: [u8; Self::LEN]) -> Self {
        let size = Size { rows: u16::from_le_bytes([a, b]), columns: u16::from_le_bytes([c, d]) };
        Self { signal, size }
    }
}

impl Job {
    /// Leaves the job for a guest in its directory.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        write(self, &directory.join(JOB))
    }

    /// Takes the job from the guest's directory.
    pub fn read(directory: &Path) -> Result<Self, Error> {
        read(&directory.join(JOB))
    }
}

impl End {
    /// Leaves it in the guest's directory.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        write(self, &directory.join(END))
    }

    /// Takes it from the guest's directory; `None` if the guest has left none.
    pub fn read(directory: &Path) -> Result<Option<Self>, Error> {
        let path = directory.join(END);
        if path.try_exists()? {
            read(&path).map(Some)
        } else {
            Ok(None)
        }
    }
}

fn write(value: &impl Serialize, path: &Path) -> Result<(), Error> {
    Ok(std::fs::write(path, serde_json::to_vec(value)?)?)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let text = std::fs::read(path).map_err(|error| with_path(path, &error))?;
    serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn with_path(path: &Path, error: &io::Error) -> Error {
    format!("{}: {error}", path.display()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_comes_as_it_was_sent() {
        let tell = Tell { signal: 28, size: Size { rows: 0x1234, columns: 0x5678 } };
        assert_eq!(Tell::from_bytes(tell.to_bytes()), tell);
    }
}
