// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--uplink`: the way from a network to other hosts.

use std::fmt::{Display, Formatter};
use std::net::IpAddr;
use std::str::FromStr;

use network::vxlan::{self, Vni};
use network::{PortSpec, TunnelSpec, WaySpec};
use serde::{Deserialize, Serialize};

use super::form::{self, Spec, SpecError};
use super::guest::default_network;
use super::text::{self, as_text, List, Number, Text};

/// Most other ends of a tunnel. A frame for a group goes to each of them.
const MOST_REMOTES: usize = 64;

/// One `--uplink`, or one `[[uplink]]`.
#[derive(Clone, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct UplinkSpec {
    /// The tap that carries the packets.
    tap: Option<String>,
    /// The network interface that carries the packets.
    interface: Option<String>,
    /// Whether either of these is given trains of packets.
    #[serde(default = "default_trains", deserialize_with = "text::switch")]
    trains: bool,
    /// The number of the tunnel that carries the packets.
    vxlan: Option<Number<u32, 0, 0xff_ffff>>,
    /// The address of this end of the tunnel.
    local: Option<Host>,
    /// The addresses of its other ends.
    remote: Option<List<Host>>,
    /// The UDP port of all its ends.
    port: Option<Number<u16, 1, 65535>>,
    /// The network interface whose carrier the ports of the guests follow.
    pub carrier: Option<String>,
    /// The network whose packets are carried.
    #[serde(default = "default_network")]
    pub network: String,
}

/// Returns whether trains of packets are given to an uplink of which that is not said.
fn default_trains() -> bool {
    true
}

/// The keys of which an uplink must have one.
const ANY_WAY: &str = "tap=NAME, interface=NAME or vxlan=VNI";

impl Spec for UplinkSpec {
    const KEYS: &'static [&'static str] =
        &["tap", "interface", "trains", "vxlan", "local", "remote", "port", "carrier", "network"];

    fn check(&self) -> Result<(), SpecError> {
        self.way().map(|_| ())
    }
}

impl FromStr for UplinkSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::of_map(form::map_of_text(text)?)
    }
}

impl Display for UplinkSpec {
    /// Writes the value of `--uplink`.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str(&form::text_of(Self::KEYS, &self.to_map()))
    }
}

impl UplinkSpec {
    /// Returns what carries the packets.
    ///
    /// # Errors
    ///
    /// That is not said, or the keys do not go together.
    pub fn way(&self) -> Result<WaySpec, SpecError> {
        let two = |one, other| SpecError::new(format!("{one} and {other} exclude each other"));
        let way = match (&self.tap, &self.interface, &self.vxlan) {
            (None, None, None) => return Err(SpecError::missing(ANY_WAY)),
            (Some(_), Some(_), _) => return Err(two("tap", "interface")),
            (Some(_), _, Some(_)) => return Err(two("tap", "vxlan")),
            (_, Some(_), Some(_)) => return Err(two("interface", "vxlan")),
            (_, _, Some(_)) if !self.trains => {
                return Err(SpecError::new("\"trains\" is for tap and interface only"));
            }
            (_, _, Some(vni)) => return self.tunnel(vni.0).map(WaySpec::Tunnel),
            (Some(name), ..) => WaySpec::Tap(self.port_of(name)),
            (_, Some(name), _) => WaySpec::Interface(self.port_of(name)),
        };
        let of_tunnel = [
            ("local", self.local.is_some()),
            ("port", self.port.is_some()),
            ("remote", self.remote.is_some()),
        ];
        match of_tunnel.into_iter().find(|(_, is_there)| *is_there) {
            Some((key, _)) => Err(SpecError::new(format!("\"{key}\" is for vxlan only"))),
            None => Ok(way),
        }
    }

    /// Returns the interface of this name.
    fn port_of(&self, name: &str) -> PortSpec {
        PortSpec { name: name.to_owned(), trains: self.trains }
    }

    fn tunnel(&self, vni: u32) -> Result<TunnelSpec, SpecError> {
        let vni = Vni::try_from(vni).map_err(|error| SpecError::of("vxlan", &error.to_string()))?;
        let local = self.local.ok_or_else(|| SpecError::missing("local=ADDRESS"))?.0;
        let port = self.port.map_or(vxlan::PORT, |port| port.0);
        Ok(TunnelSpec { vni, local, remotes: self.remotes(local)?, port })
    }

    fn remotes(&self, local: IpAddr) -> Result<Vec<IpAddr>, SpecError> {
        let wrong = |reason: String| Err(SpecError::of("remote", &reason));
        let mut remotes = Vec::new();
        for Host(remote) in self.remote.iter().flat_map(|list| &list.0) {
            if remote.is_ipv4() != local.is_ipv4() {
                return wrong(format!(
                    "{remote} and the local address are not of the same version of IP"
                ));
            }
            if *remote == local || remotes.contains(remote) {
                return wrong(format!("{remote} is an end of the tunnel already"));
            }
            remotes.push(*remote);
        }
        match remotes.len() {
            0 => Err(SpecError::missing("remote=ADDRESS")),
            1..=MOST_REMOTES => Ok(remotes),
            _ => wrong(format!("there are more than {MOST_REMOTES}")),
        }
    }
}

/// The address of a host.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Host(IpAddr);

impl Display for Host {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(out)
    }
}

impl Text for Host {
    fn wanted() -> String {
        "the IP address of a host".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let address: IpAddr = text.parse().ok()?;
        (!address.is_unspecified() && !address.is_multicast()).then_some(Self(address))
    }
}

as_text!(Host);

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(spec: &str) -> (String, WaySpec) {
        let uplink: UplinkSpec = spec.parse().unwrap();
        assert_eq!(uplink.to_string().parse(), Ok(uplink.clone()));
        (uplink.network.clone(), uplink.way().unwrap())
    }

    #[test]
    fn ways_are_understood() {
        let (network, way) = parse("network=blue,tap=rdma0");
        let port = |name: &str, trains| PortSpec { name: name.to_owned(), trains };
        assert_eq!((network.as_str(), &way), ("blue", &WaySpec::Tap(port("rdma0", true))));
        assert_eq!(way.to_string(), "tap rdma0");
        let (network, way) = parse("interface=eth0");
        let eth0 = WaySpec::Interface(port("eth0", true));
        assert_eq!((network.as_str(), &way), ("default", &eth0));
        let (_, way) = parse("trains=off,interface=eth0");
        assert_eq!(way, WaySpec::Interface(port("eth0", false)));
        assert_eq!(way.to_string(), "interface eth0");
        assert_eq!(parse("tap=rdma0,trains=off").1, WaySpec::Tap(port("rdma0", false)));
        let (_, way) = parse("vxlan=42,local=192.0.2.1,remote=192.0.2.2,remote=192.0.2.3");
        let remotes = ["192.0.2.2", "192.0.2.3"].map(|text| text.parse().unwrap()).to_vec();
        let (vni, local) = ("42".parse().unwrap(), "192.0.2.1".parse().unwrap());
        assert_eq!(way, WaySpec::Tunnel(TunnelSpec { vni, local, remotes, port: 4789 }));
        assert_eq!(way.to_string(), "VXLAN 42 at 192.0.2.1");
        let carrier = |spec: &str| spec.parse::<UplinkSpec>().unwrap().carrier;
        assert_eq!(carrier("tap=rdma0,carrier=eth0").as_deref(), Some("eth0"));
        assert_eq!(carrier("tap=rdma0"), None);
        let (_, way) = parse("vxlan=0,local=fd00::1,remote=fd00::2,port=8472");
        assert!(matches!(way, WaySpec::Tunnel(TunnelSpec { port: 8472, .. })));
    }

    #[test]
    fn the_text_is_that_of_earlier_versions() {
        let text = "vxlan=42,local=192.0.2.1,remote=192.0.2.2,remote=192.0.2.3,port=1,network=blue";
        assert_eq!(text.parse::<UplinkSpec>().unwrap().to_string(), text);
    }

    #[test]
    fn mistakes_are_named() {
        let error = |spec: &str| spec.parse::<UplinkSpec>().unwrap_err().to_string();
        let ends = "vxlan=1,local=192.0.2.1,remote=192.0.2.2";
        let number = "is not a number of";
        let host = "is not the IP address of a host";
        for (spec, reason) in [
            ("network=a", "tap=NAME, interface=NAME or vxlan=VNI is missing".to_owned()),
            ("tap", "\"tap\" is not KEY=VALUE".to_owned()),
            ("tap=", "\"tap=\" is not KEY=VALUE".to_owned()),
            ("top=a", "unknown key \"top\"; there are tap, interface, trains, vxlan, local, remote, port, carrier, network".to_owned()),
            ("tap=a,tap=b", "\"tap\" is given twice".to_owned()),
            ("vxlan=1,tap=a", "tap and vxlan exclude each other".to_owned()),
            ("vxlan=1,interface=a", "interface and vxlan exclude each other".to_owned()),
            ("interface=a,tap=a", "tap and interface exclude each other".to_owned()),
            ("tap=a,port=1", "\"port\" is for vxlan only".to_owned()),
            ("interface=a,remote=192.0.2.1", "\"remote\" is for vxlan only".to_owned()),
            ("tap=a,trains=no", "trains: \"no\" is not on or off".to_owned()),
            ("vxlan=1,remote=192.0.2.1", "local=ADDRESS is missing".to_owned()),
            ("vxlan=1,local=192.0.2.1", "remote=ADDRESS is missing".to_owned()),
            ("vxlan=16777216,tap=a", format!("vxlan: \"16777216\" {number} 0 to 16777215")),
            ("vxlan=1,port=0", format!("port: \"0\" {number} 1 to 65535")),
            ("vxlan=1,port=65536", format!("port: \"65536\" {number} 1 to 65535")),
            ("vxlan=1,remote=224.0.0.1", format!("remote: \"224.0.0.1\" {host}")),
            ("vxlan=1,remote=host", format!("remote: \"host\" {host}")),
            ("vxlan=1,local=0.0.0.0", format!("local: \"0.0.0.0\" {host}")),
        ] {
            assert_eq!(error(spec), reason);
        }
        let trains = "\"trains\" is for tap and interface only";
        assert_eq!(error(&format!("{ends},trains=off")), trains);
        let version = "remote: fd00::1 and the local address are not of the same version of IP";
        assert_eq!(error(&format!("{ends},remote=fd00::1")), version);
        for again in ["192.0.2.1", "192.0.2.2"] {
            let same = format!("remote: {again} is an end of the tunnel already");
            assert_eq!(error(&format!("{ends},remote={again}")), same);
        }
        let many: Vec<_> = (3..80).map(|host| format!(",remote=192.0.2.{host}")).collect();
        let many = many.concat();
        assert_eq!(error(&format!("{ends}{many}")), "remote: there are more than 64");
    }
}
