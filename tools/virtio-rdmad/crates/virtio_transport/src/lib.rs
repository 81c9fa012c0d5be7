// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The common parts of the crates `vfio_user` and `vhost_user`.
//!
//! A VMM connects to a socket and sends messages, some of them with file descriptors. A
//! [`Server`] reads them and sends the replies. A [`Protocol`] knows what each message means, and
//! what the VMM has said so far. It does what the messages ask for with a [`Backend`], which is
//! the virtio device.
//!
//! A change of the guest's memory and a reset may take the backend many turns. Until they are done
//! (until the backend [is settled](Backend::is_settled)) the server sends no reply and reads no
//! other message.
//!
//! A [`Journal`] keeps what the VMM has said, so that another process can go on with the connection.

#![forbid(unsafe_code)]

mod backend;
mod channel;
mod error;
mod fault;
mod journal;
mod server;

pub use backend::{Backend, Deed, QueueSetup};
pub use channel::{Message, MAX_DESCRIPTORS};
pub use error::Error;
pub use fault::Faults;
pub use journal::{Change, ConnectionState, Journal, ResumeError};
pub use server::{Limits, Protocol, Server};
