// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--guest`: a guest, as whoever names it says what it is.

use std::path::PathBuf;
use std::str::FromStr;

use engine::{DevicePolicy, Limits};
use network::Framing;
use serde::{Deserialize, Serialize};

use super::key_values::{number, KeyValues, ListError};
use super::{access, keys, policy};
use crate::os::access::Access;

/// Most guests of a process.
pub const MAX_GUESTS: usize = 1024;

/// Who has named a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
pub enum Origin {
    /// The command line.
    CommandLine,
    /// The configuration file.
    File,
    /// A client of the control socket.
    Call,
}

impl Origin {
    /// Returns the name, as clients of the control socket know it.
    pub fn name(self) -> &'static str {
        match self {
            Self::CommandLine => "options",
            Self::File => "file",
            Self::Call => "call",
        }
    }
}

/// The protocol by which a guest's VMM attaches the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// vfio-user.
    VfioUser,
    /// vhost-user.
    VhostUser,
}

impl Transport {
    /// Returns the name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::VfioUser => "vfio-user",
            Self::VhostUser => "vhost-user",
        }
    }

    /// Returns how a VMM with this transport gives the frames of the guest's network interface.
    pub fn framing(self) -> Framing {
        match self {
            Self::VfioUser => Framing::Stream,
            Self::VhostUser => Framing::Packets,
        }
    }

    /// Returns how many virtqueues the transport can have.
    fn max_queues(self) -> u16 {
        match self {
            Self::VfioUser => vfio_user::MAX_QUEUES,
            Self::VhostUser => vhost_user::MAX_QUEUES,
        }
    }

    /// Returns the limits of a guest unless the command line has others.
    fn limits(self) -> Limits {
        match self {
            Self::VfioUser => Limits::default(),
            Self::VhostUser => Limits::for_64_queues(),
        }
    }
}

/// One `--guest`.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// The value of the option.
    pub text: String,
    /// The name of the guest in logs and status.
    pub name: String,
    /// The protocol of its VMM.
    pub transport: Transport,
    /// The path of the socket.
    pub path: PathBuf,
    /// MAC address of the paired network interface.
    pub mac: Option<[u8; 6]>,
    /// The network it is in.
    pub network: String,
    /// The path of the socket of its network interface, which has the MAC address above.
    pub nic: Option<PathBuf>,
    /// Who may connect to these sockets.
    pub access: Access,
    /// What its device can have.
    pub limits: Limits,
    /// What it may do, which may change while it is there.
    pub policy: DevicePolicy,
    /// Whether it is offered rings.
    pub rings: bool,
}

impl GuestSpec {
    /// Returns whether a VMM that is connected to the guest finds the same device as with another specification.
    pub fn is_same_device(&self, other: &Self) -> bool {
        (self.transport, self.mac, self.rings, &self.limits)
            == (other.transport, other.mac, other.rings, &other.limits)
    }

    /// Returns whether the guest is the same as by another specification, but for its policy.
    pub fn is_same_but_policy(&self, other: &Self) -> bool {
        let rest = |spec: &Self| {
            (spec.path.clone(), spec.network.clone(), spec.nic.clone(), spec.access.clone())
        };
        self.is_same_device(other) && rest(self) == rest(other)
    }

    /// Returns whether this text names the guest, with its keys in any order.
    pub fn is_named(&self, text: &str) -> bool {
        let sorted = |text| {
            let list = KeyValues::read(text, keys::GUEST, &[]);
            list.map(|list| {
                let mut pairs = list.pairs().to_vec();
                pairs.sort_unstable();
                pairs
            })
        };
        sorted(text).is_ok_and(|pairs| sorted(&self.text) == Ok(pairs))
    }

    /// Returns the paths of its sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.path).chain(&self.nic)
    }
}

/// What is wrong with a `--guest`.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// The list of keys and values is not right.
    #[error(transparent)]
    List(#[from] ListError),
    /// There are both transports.
    #[error("vfio-user and vhost-user exclude each other")]
    TwoTransports,
    /// The guest needs more virtqueues than the transport can have.
    #[error(
        "max-qp={qps} and max-cq={cqs} need {queues} virtqueues; {transport} has at most {most}"
    )]
    Queues {
        /// How many QPs the guest is to have.
        qps: u16,
        /// How many CQs the guest is to have.
        cqs: u16,
        /// How many virtqueues these need.
        queues: u32,
        /// The transport.
        transport: &'static str,
        /// How many virtqueues it can have.
        most: u16,
    },
    /// There are more completion vectors than a guest can have.
    #[error("vectors={0}: at most {MAX_VECTORS} are possible")]
    Vectors(u16),
}

/// Most completion vectors of a guest. More vectors than the guest has CPUs are of no use.
const MAX_VECTORS: u16 = 64;

impl FromStr for GuestSpec {
    type Err = SpecError;

    fn from_str(spec: &str) -> Result<Self, SpecError> {
        let list = KeyValues::read(spec, keys::GUEST, &[])?;
        let (transport, path) = transport_of(&list)?;
        let (mac, nic) = (list.get("mac").map(mac).transpose()?, list.get("nic"));
        if nic.is_some() && mac.is_none() {
            return Err(ListError::Missing("mac=MAC, which nic= needs,").into());
        }
        Ok(Self {
            text: spec.to_owned(),
            name: list.get("name").ok_or(ListError::Missing("name=NAME"))?.to_owned(),
            transport,
            path,
            mac,
            network: list.get("network").unwrap_or("default").to_owned(),
            nic: nic.map(PathBuf::from),
            access: access::read(&list)?,
            limits: limits_of(&list, transport)?,
            policy: policy::read(&list)?,
            rings: switch(&list, "rings", true)?,
        })
    }
}

/// Returns the transport of a guest, and the path of its socket.
fn transport_of(list: &KeyValues<'_>) -> Result<(Transport, PathBuf), SpecError> {
    match (list.get("vfio-user"), list.get("vhost-user")) {
        (Some(path), None) => Ok((Transport::VfioUser, path.into())),
        (None, Some(path)) => Ok((Transport::VhostUser, path.into())),
        (None, None) => Err(ListError::Missing("vfio-user=PATH or vhost-user=PATH").into()),
        (Some(_), Some(_)) => Err(SpecError::TwoTransports),
    }
}

/// Returns the limits of a guest. Its virtqueues must be no more than the transport can have.
fn limits_of(list: &KeyValues<'_>, transport: Transport) -> Result<Limits, SpecError> {
    let mut limits = transport.limits();
    limits.max_qp = number(list, "max-qp")?.unwrap_or(limits.max_qp);
    limits.max_cq = number(list, "max-cq")?.unwrap_or(limits.max_cq);
    limits.comp_vectors = number(list, "vectors")?.unwrap_or(limits.comp_vectors);
    if limits.comp_vectors > MAX_VECTORS {
        return Err(SpecError::Vectors(limits.comp_vectors));
    }
    // The control and the event queue, one for each CQ and two for each QP.
    let queues = 2 + u32::from(limits.max_cq) + 2 * u32::from(limits.max_qp);
    let most = transport.max_queues();
    if queues > most.into() {
        let (qps, cqs) = (limits.max_qp, limits.max_cq);
        let transport = transport.name();
        return Err(SpecError::Queues { qps, cqs, queues, transport, most });
    }
    Ok(limits)
}

fn switch(list: &KeyValues<'_>, key: &'static str, default: bool) -> Result<bool, ListError> {
    match list.get(key) {
        None => Ok(default),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(value) => Err(ListError::value(key, value, "on or off")),
    }
}

/// Reads a unicast MAC address in the usual notation.
fn mac(value: &str) -> Result<[u8; 6], ListError> {
    let error = || {
        let wanted = "a unicast MAC address such as 52:54:00:12:34:01";
        ListError::value("mac", value, wanted)
    };
    let digits = |part: &str| match part.len() {
        1 | 2 if !part.starts_with('+') => u8::from_str_radix(part, 16).map_err(|_| error()),
        _ => Err(error()),
    };
    let bytes = value.split(':').map(digits).collect::<Result<Vec<u8>, _>>()?;
    let mac = <[u8; 6]>::try_from(bytes).map_err(|_| error())?;
    if mac[0] & 1 != 0 || mac == [0; 6] {
        return Err(error());
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(spec: &str) -> SpecError {
        spec.parse::<GuestSpec>().unwrap_err()
    }

    #[test]
    fn a_guest_is_understood() {
        let spec = "name=g1,vhost-user=/a/b,mac=52:54:0:12:34:ff,network=blue,max-qp=3,max-cq=4";
        let guest: GuestSpec = spec.parse().unwrap();
        assert_eq!((guest.name.as_str(), guest.network.as_str()), ("g1", "blue"));
        assert_eq!((guest.transport, guest.path), (Transport::VhostUser, "/a/b".into()));
        assert_eq!(guest.mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0xff]));
        assert_eq!((guest.limits.max_qp, guest.limits.max_cq), (3, 4));
        assert!(guest.rings);
        let guest: GuestSpec = "name=g,vfio-user=s,rings=off,vectors=64".parse().unwrap();
        assert_eq!((guest.rings, guest.limits.comp_vectors), (false, 64));
        assert_eq!((guest.mac, guest.network.as_str()), (None, "default"));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(error("vfio-user=a"), SpecError::List(ListError::Missing("name=NAME")));
        assert!(matches!(error("name=a"), SpecError::List(ListError::Missing(_))));
        assert_eq!(error("name"), SpecError::List(ListError::NoValue("name".into())));
        assert_eq!(error("name="), SpecError::List(ListError::NoValue("name=".into())));
        assert_eq!(error("name=a,name=b,vfio-user=c"), SpecError::List(ListError::Twice("name")));
        assert!(matches!(
            error("name=a,vfio-user=b,nic=c"),
            SpecError::List(ListError::Missing(_))
        ));
        assert_eq!(
            error("nome=a"),
            SpecError::List(ListError::UnknownKey { key: "nome".into(), known: keys::GUEST })
        );
        assert_eq!(error("name=a,vfio-user=b,vhost-user=c"), SpecError::TwoTransports);
        for value in ["1:2:3:4:5", "01:00:00:00:00:00", "0:0:0:0:0:0", "2:2:3:4:5:+6", "x"] {
            let spec = format!("name=a,vfio-user=b,mac={value}");
            assert!(
                matches!(error(&spec), SpecError::List(ListError::Value { key: "mac", .. })),
                "{value}"
            );
        }
        let rings = error("name=a,vfio-user=b,rings=yes");
        assert!(matches!(
            rings,
            SpecError::List(ListError::Value { key: "rings", wanted: "on or off", .. })
        ));
        assert_eq!(error("name=a,vfio-user=b,vectors=65"), SpecError::Vectors(65));
        for value in ["0", "-1", "65536", "many"] {
            let spec = format!("name=a,vfio-user=b,max-qp={value}");
            assert!(
                matches!(error(&spec), SpecError::List(ListError::Value { key: "max-qp", .. })),
                "{value}"
            );
        }
        let queues = error("name=a,vhost-user=b,max-qp=120,max-cq=20");
        assert!(matches!(queues, SpecError::Queues { queues: 262, most: 256, .. }));
    }
}
