// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Asking a peer that polls, over what may lose messages.
//!
//! Nothing here looks at the clock between two polls: in a guest that is a system call, too.

use std::io::{self, ErrorKind};

use crate::Error;

/// How often a receiver polls for a message that does not come: tenths of a second. No message takes
/// as long as that.
pub const POLLS: u32 = 200_000;
/// How often a message is sent until it counts as unanswered.
const TRIES: u32 = 20;

/// Sends a message, and polls until its answer is there. A message or an answer that seems to be lost
/// is sent again. `answered` says whether what came is the answer, and fails with `WouldBlock` if
/// nothing came.
pub fn ask(
    mut send: impl FnMut() -> io::Result<()>,
    mut answered: impl FnMut() -> io::Result<bool>,
) -> Result<(), Error> {
    for _ in 0..TRIES {
        send().map_err(Error::system("send"))?;
        while let Some(answer) = poll(&mut answered).map_err(Error::system("receive"))? {
            if answer {
                return Ok(());
            }
        }
    }
    Err(Error::Silent)
}

/// Calls `receive` until it does not fail with `WouldBlock`. Returns `None` if it does so for too long.
pub fn poll<T>(mut receive: impl FnMut() -> io::Result<T>) -> io::Result<Option<T>> {
    for _ in 0..POLLS {
        match receive() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => return result.map(Some),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_again_for_what_is_lost_and_passes_over_what_is_late() {
        let times = std::cell::Cell::new(0);
        let mut came = [Ok(false), Err(ErrorKind::WouldBlock.into()), Ok(true)].into_iter();
        let request = || {
            times.set(times.get() + 1);
            Ok(())
        };
        let answered = || match times.get() {
            1 => Err(ErrorKind::WouldBlock.into()),
            _ => came.next().unwrap_or_else(|| Err(ErrorKind::Other.into())),
        };
        assert!(ask(request, answered).is_ok());
        assert_eq!(times.get(), 2);
    }

    #[test]
    fn gives_up() {
        let silent = ask(|| Ok(()), || Err(ErrorKind::WouldBlock.into()));
        assert!(matches!(silent, Err(Error::Silent)));
        let broken = ask(|| Ok(()), || Err(ErrorKind::ConnectionRefused.into()));
        assert!(matches!(broken, Err(Error::System("receive", _))));
    }
}
