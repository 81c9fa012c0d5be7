// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--uplink`: the way from a network to other hosts.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::str::FromStr;

use network::{vxlan, TunnelSpec, WaySpec};

use super::key_values::{self, KeyValues, ListError};

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

/// What is wrong with an `--uplink`.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum UplinkError {
    /// The list of keys and values is not right.
    #[error(transparent)]
    List(#[from] ListError),
    /// A key belongs to a tunnel.
    #[error("\"{0}\" is for vxlan only")]
    NotATunnel(&'static str),
    /// There are two ways.
    #[error("{0} and {1} exclude each other")]
    TwoWays(&'static str, &'static str),
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

/// The keys of an `--uplink`.
pub const KEYS: &[&str] = &["tap", "interface", "vxlan", "local", "remote", "port", "network"];
/// Those of them that may be there more than once.
pub const REPEATABLE: &[&str] = &["remote"];

/// Those of them that say what carries the packets, one of which must be there, and that of a tunnel.
const WAYS: [&str; 3] = ["tap", "interface", TUNNEL];
const ANY_WAY: &str = "tap=NAME, interface=NAME or vxlan=VNI";
const TUNNEL: &str = "vxlan";

impl FromStr for UplinkSpec {
    type Err = UplinkError;

    fn from_str(spec: &str) -> Result<Self, UplinkError> {
        let list = KeyValues::read(spec, KEYS, REPEATABLE)?;
        let mut ways = WAYS.iter().filter_map(|way| Some((*way, list.get(way)?)));
        let (key, name) = ways.next().ok_or(ListError::Missing(ANY_WAY))?;
        if let Some((other, _)) = ways.next() {
            return Err(UplinkError::TwoWays(key, other));
        }
        if key != TUNNEL {
            check_no_tunnel(&list)?;
        }
        let way = match key {
            TUNNEL => WaySpec::Tunnel(tunnel(&list, name)?),
            "tap" => WaySpec::Tap(name.to_owned()),
            _ => WaySpec::Interface(name.to_owned()),
        };
        Ok(Self { way, network: list.get("network").unwrap_or("default").to_owned() })
    }
}

/// Refuses what only a tunnel has.
fn check_no_tunnel(list: &KeyValues<'_>) -> Result<(), UplinkError> {
    match ["local", "port", "remote"].into_iter().find(|key| list.get(key).is_some()) {
        Some(key) => Err(UplinkError::NotATunnel(key)),
        None => Ok(()),
    }
}

fn tunnel(list: &KeyValues<'_>, vni: &str) -> Result<TunnelSpec, UplinkError> {
    let vni = key_values::parse(TUNNEL, vni, "a number of 0 to 16777215")?;
    let local = list.get("local").ok_or(ListError::Missing("local=ADDRESS"))?;
    let local = host("local", local)?;
    let port = list.parse("port", "a port of 1 to 65535")?.map_or(vxlan::PORT, NonZeroU16::get);
    Ok(TunnelSpec { vni, local, remotes: remotes(list, local)?, port })
}

fn remotes(list: &KeyValues<'_>, local: IpAddr) -> Result<Vec<IpAddr>, UplinkError> {
    let mut remotes = Vec::new();
    for text in list.all("remote") {
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
        0 => Err(ListError::Missing("remote=ADDRESS").into()),
        1..=MOST_REMOTES => Ok(remotes),
        _ => Err(UplinkError::Remotes),
    }
}

/// Reads the address of a host.
fn host(key: &'static str, text: &str) -> Result<IpAddr, ListError> {
    let wanted = "the IP address of a host";
    let address: IpAddr = key_values::parse(key, text, wanted)?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(ListError::value(key, text, wanted));
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
    fn an_interface_is_understood() {
        let spec = parse("interface=eth0").unwrap();
        assert_eq!(spec.way, WaySpec::Interface("eth0".into()));
        assert_eq!(spec.way.to_string(), "interface eth0");
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
        assert_eq!(error("network=a"), UplinkError::List(ListError::Missing(ANY_WAY)));
        assert_eq!(error("tap"), UplinkError::List(ListError::NoValue("tap".into())));
        assert_eq!(error("tap="), UplinkError::List(ListError::NoValue("tap=".into())));
        assert_eq!(
            error("top=a"),
            UplinkError::List(ListError::UnknownKey { key: "top".into(), known: KEYS })
        );
        assert_eq!(error("tap=a,tap=b"), UplinkError::List(ListError::Twice("tap")));
        assert_eq!(error("vxlan=1,tap=a"), UplinkError::TwoWays("tap", "vxlan"));
        assert_eq!(error("interface=a,tap=a"), UplinkError::TwoWays("tap", "interface"));
        assert_eq!(error("tap=a,port=1"), UplinkError::NotATunnel("port"));
        assert_eq!(error("interface=a,remote=192.0.2.1"), UplinkError::NotATunnel("remote"));
        assert_eq!(
            error("vxlan=1,remote=192.0.2.1"),
            UplinkError::List(ListError::Missing("local=ADDRESS"))
        );
        assert_eq!(
            error("vxlan=1,local=192.0.2.1"),
            UplinkError::List(ListError::Missing("remote=ADDRESS"))
        );
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
            assert!(
                matches!(error, UplinkError::List(ListError::Value { key: of, .. }) if of == key),
                "{spec}"
            );
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
