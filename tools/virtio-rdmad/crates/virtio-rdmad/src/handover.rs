// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state that a process leaves to its successor, so that no VMM notices that one process follows another.
//!
//! A VMM gives its device up for good when the socket closes. So the service manager holds, for each guest, what must
//! outlive the process ([`manager`]): the connected socket, the files of the guest's memory, the eventfds, and a file
//! that says what the VMM has said ([`journal`]). The service manager has two descriptors of each guest, between which
//! all others are on their way ([`stash`]). It is systemd, or `virtio-rdmad supervise` ([`supervisor`]).
//!
//! A process that ends in order leaves an image of each device as well ([`engine::Device::save`]), and the device goes
//! on in its successor. What a guest's driver has made ends with a process that crashes: the successor tells the
//! driver that the device needs a reset. It does the same if it cannot read the image.
//!
//! A worker says on a board, which the service manager keeps as well, for which guest it works ([`blame`]). So a
//! process knows for which guest the one before it has aborted. After three aborts in a row for one guest, the VMM of
//! that guest is disconnected, and the other guests go on.
//!
//! A process that is asked to leaves its sockets as well ([`listeners`]), so that whoever connects meanwhile waits.
//!
//! A process may fail before it serves anybody: its options are wrong, or it is a version that cannot read what is
//! there. So it changes nothing of what is kept before all its threads are there and have loaded their guests
//! ([`crate::worker::crew`]). Any number of processes may fail so, and the guests have lost nothing.

pub mod ask;
mod guest;
mod journal;
mod listeners;
mod manager;
mod stash;
pub mod supervisor;

pub use guest::{now, Connected, Inherited, Kept, Left, Said, Unreadable, Work};
pub use listeners::{leave, Listeners};
pub use manager::{Manager, PATIENCE};
