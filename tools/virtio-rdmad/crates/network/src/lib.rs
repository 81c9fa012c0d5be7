// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The networks that guests are in: what carries their Ethernet frames to each other and to other hosts.
//!
//! The floors, from the bottom to the top; a file imports only what stands below it:
//!
//! * [`forwarding`], [`vxlan`]: MAC addresses and tunnels, each on its own
//! * [`nic`]: the network interface of a guest, whose VMM exchanges frames over a socket
//! * [`uplink`]: what carries the packets of a network to and from other hosts
//! * [`switch`]: what forwards frames between these and the devices of the guests
//! * [`intake`]: what comes over a lane of the uplink, for whichever thread takes it in
//! * [`thread`]: the thread of a switch
//!
//! A network has one [`Switch`] with a thread of its own. The devices of its guests send through it
//! ([`engine::Uplink`]), and what comes over the uplink is taken in by that thread or by a worker ([`Intake`]).

#![forbid(unsafe_code)]

pub mod forwarding;
pub mod intake;
pub mod nic;
pub mod switch;
pub mod thread;
pub mod uplink;
pub mod vxlan;

pub use forwarding::Mac;
pub use intake::{Budget, Found, Intake};
pub use nic::{Framing, Listener, Nic};
pub use switch::Switch;
pub use uplink::{PortSpec, TunnelSpec, Uplink, WaySpec};
