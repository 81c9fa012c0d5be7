// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--uplink`: the way from a network to other hosts.

use std::fmt::{Display, Formatter};
use std::net::IpAddr;
use std::str::FromStr;

use vxlan::Vni;

/// Most other ends of a tunnel. A frame for a group goes to each of them.
const MOST_REMOTES: usize = 64;

/// One `--uplink`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UplinkSpec {
    /// What carries the packets.
    pub way: WaySpec,
    /// The network whose packets it carries.
    pub network: String,
}

/// What carries the packets of an uplink.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum WaySpec {
    /// The tap of this name.
    Tap(String),
    /// A tunnel.
    Tunnel(TunnelSpec),
}

impl Display for WaySpec {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tap(name) => write!(out, "tap {name}"),
            Self::Tunnel(TunnelSpec { vni, local, .. }) => {
                write!(out, "VXLAN {} at {local}", vni.get())
            }
        }
    }
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

/// What is wrong with an `--uplink`.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum UplinkError {
    /// A part is not KEY=VALUE.
    #[error("\"{0}\" is not KEY=VALUE")]
    NoValue(String),
    /// A key does not exist.
    #[error("unknown key \"{0}\"; there are tap, vxlan, local, remote, port, network")]
    UnknownKey(String),
    /// A key is given twice.
    #[error("\"{0}\" is given twice")]
    Twice(&'static str),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key belongs to a tunnel.
    #[error("\"{0}\" is for vxlan, not for tap")]
    NotForTap(&'static str),
    /// There are a tap and a tunnel.
    #[error("tap and vxlan exclude each other")]
    TwoWays,
    /// A key cannot have this value.
    #[error("{key}: \"{value}\" is not {wanted}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What values the key can have.
        wanted: &'static str,
    },
    /// An address cannot be the other end.
    #[error("remote: {0} and the local address are not of the same version of IP")]
    Versions(IpAddr),
    /// An address is both ends, or twice the other end.
    #[error("remote: {0} is an end of the tunnel already")]
    SameEnd(IpAddr),
    /// There are too many other ends.
    #[error("more than {MOST_REMOTES} remotes")]
    Remotes,
}

/// The values of an `--uplink` as text.
#[derive(Default)]
struct Pairs<'a> {
    tap: Option<&'a str>,
    vxlan: Option<&'a str>,
    local: Option<&'a str>,
    port: Option<&'a str>,
    network: Option<&'a str>,
    remotes: Vec<&'a str>,
}

impl<'a> Pairs<'a> {
    fn parse(spec: &'a str) -> Result<Self, UplinkError> {
        let mut pairs = Self::default();
        for pair in spec.split(',') {
            let no_value = || UplinkError::NoValue(pair.to_owned());
            let (key, value) = pair.split_once('=').ok_or_else(no_value)?;
            if value.is_empty() {
                return Err(no_value());
            }
            let (key, slot) = match key {
                "tap" => ("tap", &mut pairs.tap),
                "vxlan" => ("vxlan", &mut pairs.vxlan),
                "local" => ("local", &mut pairs.local),
                "port" => ("port", &mut pairs.port),
                "network" => ("network", &mut pairs.network),
                "remote" => {
                    pairs.remotes.push(value);
                    continue;
                }
                _ => return Err(UplinkError::UnknownKey(key.to_owned())),
            };
            if slot.replace(value).is_some() {
                return Err(UplinkError::Twice(key));
            }
        }
        Ok(pairs)
    }

    /// Refuses what a tap does not have.
    fn check_tap(&self) -> Result<(), UplinkError> {
        let remote = self.remotes.first().copied();
        for (key, value) in [("local", self.local), ("port", self.port), ("remote", remote)] {
            if value.is_some() {
                return Err(UplinkError::NotForTap(key));
            }
        }
        Ok(())
    }

    fn tunnel(&self, vni: &str) -> Result<TunnelSpec, UplinkError> {
        let wanted = "a number of 0 to 16777215";
        let vni = value("vxlan", vni, wanted)?;
        let local = host("local", self.local.ok_or(UplinkError::Missing("local=ADDRESS"))?)?;
        let wanted = "a port of 1 to 65535";
        let port = match self.port {
            None => vxlan::PORT,
            Some(text) => value::<std::num::NonZeroU16>("port", text, wanted)?.get(),
        };
        Ok(TunnelSpec { vni, local, remotes: self.remotes(local)?, port })
    }

    fn remotes(&self, local: IpAddr) -> Result<Vec<IpAddr>, UplinkError> {
        let mut remotes = Vec::new();
        for text in &self.remotes {
            let remote = host("remote", text)?;
            if remote.is_ipv4() != local.is_ipv4() {
                return Err(UplinkError::Versions(remote));
            }
            if remote == local || remotes.contains(&remote) {
                return Err(UplinkError::SameEnd(remote));
            }
            remotes.push(remote);
        }
        match remotes.len() {
            0 => Err(UplinkError::Missing("remote=ADDRESS")),
            1..=MOST_REMOTES => Ok(remotes),
            _ => Err(UplinkError::Remotes),
        }
    }
}

impl FromStr for UplinkSpec {
    type Err = UplinkError;

    fn from_str(spec: &str) -> Result<Self, UplinkError> {
        let pairs = Pairs::parse(spec)?;
        let way = match (pairs.tap, pairs.vxlan) {
            (Some(tap), None) => {
                pairs.check_tap()?;
                WaySpec::Tap(tap.to_owned())
            }
            (None, Some(vni)) => WaySpec::Tunnel(pairs.tunnel(vni)?),
            (None, None) => return Err(UplinkError::Missing("tap=NAME or vxlan=VNI")),
            (Some(_), Some(_)) => return Err(UplinkError::TwoWays),
        };
        Ok(Self { way, network: pairs.network.unwrap_or("default").to_owned() })
    }
}

/// Reads a value.
fn value<T: FromStr>(
    key: &'static str,
    value: &str,
    wanted: &'static str,
) -> Result<T, UplinkError> {
    let error = |_| UplinkError::Value { key, value: value.to_owned(), wanted };
    value.parse().map_err(error)
}

/// Reads the address of a host.
fn host(key: &'static str, text: &str) -> Result<IpAddr, UplinkError> {
    let wanted = "the IP address of a host";
    let address: IpAddr = value(key, text, wanted)?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(UplinkError::Value { key, value: text.to_owned(), wanted });
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(spec: &str) -> Result<UplinkSpec, UplinkError> {
        spec.parse()
    }

    #[test]
    fn a_tap_is_understood() {
        let spec = parse("network=blue,tap=rdma0").unwrap();
        assert_eq!(spec, UplinkSpec { way: WaySpec::Tap("rdma0".into()), network: "blue".into() });
        assert_eq!(spec.way.to_string(), "tap rdma0");
        assert_eq!(parse("tap=a").unwrap().network, "default");
    }

    #[test]
    fn a_tunnel_is_understood() {
        let spec = parse("vxlan=42,local=192.0.2.1,remote=192.0.2.2,remote=192.0.2.3").unwrap();
        let remotes = ["192.0.2.2", "192.0.2.3"].map(|text| text.parse().unwrap()).to_vec();
        let (vni, local) = ("42".parse().unwrap(), "192.0.2.1".parse().unwrap());
        assert_eq!(spec.way, WaySpec::Tunnel(TunnelSpec { vni, local, remotes, port: 4789 }));
        assert_eq!(spec.way.to_string(), "VXLAN 42 at 192.0.2.1");
        let spec = parse("vxlan=0,local=fd00::1,remote=fd00::2,port=8472").unwrap();
        assert!(matches!(spec.way, WaySpec::Tunnel(TunnelSpec { port: 8472, .. })));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |spec: &str| parse(spec).unwrap_err();
        assert_eq!(error("network=a"), UplinkError::Missing("tap=NAME or vxlan=VNI"));
        assert_eq!(error("tap"), UplinkError::NoValue("tap".into()));
        assert_eq!(error("tap="), UplinkError::NoValue("tap=".into()));
        assert_eq!(error("top=a"), UplinkError::UnknownKey("top".into()));
        assert_eq!(error("tap=a,tap=b"), UplinkError::Twice("tap"));
        assert_eq!(error("tap=a,vxlan=1"), UplinkError::TwoWays);
        assert_eq!(error("tap=a,port=1"), UplinkError::NotForTap("port"));
        assert_eq!(error("tap=a,remote=192.0.2.1"), UplinkError::NotForTap("remote"));
        assert_eq!(error("vxlan=1,remote=192.0.2.1"), UplinkError::Missing("local=ADDRESS"));
        assert_eq!(error("vxlan=1,local=192.0.2.1"), UplinkError::Missing("remote=ADDRESS"));
        let ends = "vxlan=1,local=192.0.2.1,remote=192.0.2.2";
        for (spec, key) in [
            ("vxlan=16777216,local=192.0.2.1,remote=192.0.2.2".to_owned(), "vxlan"),
            (format!("{ends},port=0"), "port"),
            (format!("{ends},port=65536"), "port"),
            (format!("{ends},remote=224.0.0.1"), "remote"),
            (format!("{ends},remote=host"), "remote"),
            ("vxlan=1,local=0.0.0.0,remote=192.0.2.2".to_owned(), "local"),
        ] {
            let error = error(&spec);
            assert!(matches!(error, UplinkError::Value { key: of, .. } if of == key), "{spec}");
        }
        let version = error(&format!("{ends},remote=fd00::1"));
        assert_eq!(version, UplinkError::Versions("fd00::1".parse().unwrap()));
        for again in ["192.0.2.1", "192.0.2.2"] {
            let same = error(&format!("{ends},remote={again}"));
            assert_eq!(same, UplinkError::SameEnd(again.parse().unwrap()));
        }
        let many =
            (3..80).map(|host| format!(",remote=192.0.2.{host}")).collect::<Vec<_>>().concat();
        assert_eq!(error(&format!("{ends}{many}")), UplinkError::Remotes);
    }
}
