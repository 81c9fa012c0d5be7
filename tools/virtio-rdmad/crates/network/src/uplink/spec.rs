// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The specification of the way that is to carry the packets of a network.

use std::fmt::{Display, Formatter};
use std::net::IpAddr;

use crate::vxlan::Vni;

/// The way that carries the packets of an uplink.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum WaySpec {
    /// A tap.
    Tap(PortSpec),
    /// A packet socket on a network interface.
    Interface(PortSpec),
    /// A tunnel.
    Tunnel(TunnelSpec),
}

impl Display for WaySpec {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tap(port) => write!(out, "tap {}", port.name),
            Self::Interface(port) => write!(out, "interface {}", port.name),
            Self::Tunnel(tunnel) => tunnel.fmt(out),
        }
    }
}

/// An interface of the kernel.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortSpec {
    /// Its name.
    pub name: String,
    /// Whether the kernel is given trains, if it takes them apart; else it is given packets one by one.
    pub trains: bool,
}

/// A VXLAN tunnel.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TunnelSpec {
    /// The network's number.
    pub vni: Vni,
    /// The address of this end.
    pub local: IpAddr,
    /// The addresses of the other ends: at least one.
    pub remotes: Vec<IpAddr>,
    /// The UDP port of all ends.
    pub port: u16,
}

impl Display for TunnelSpec {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "VXLAN {} at {}", self.vni.get(), self.local)
    }
}
