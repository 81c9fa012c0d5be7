// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--guest`: a guest, as whoever names it says what it is.

use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use engine::{Limits, Paths};
use network::Framing;
use serde::{Deserialize, Serialize};

use super::form::{self, Spec, SpecError};
use super::text::{self, Count, List, Number, Range, Scaled};
use super::values::{Bits, Bytes, Mac, Mode, Owner, Prefix, Requests, Vlans};
use crate::os::access::Access;

/// Most guests of a process.
pub const MAX_GUESTS: usize = 1024;

/// The origin of a guest, which has named it.
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

/// One `--guest`, or one `[[guest]]`. [`Spec::of_map`] and `parse` return only what is right.
#[derive(Clone, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSpec {
    /// The name of the guest in logs and status.
    #[serde(default)]
    pub name: String,
    /// The path of the socket, if its VMM uses vfio-user.
    vfio_user: Option<PathBuf>,
    /// The path of the socket, if its VMM uses vhost-user.
    vhost_user: Option<PathBuf>,
    /// The MAC address of the paired network interface.
    pub mac: Option<Mac>,
    /// The network that it is in.
    #[serde(default = "default_network")]
    pub network: String,
    /// The path of the socket of its network interface, which has the MAC address above.
    pub nic: Option<PathBuf>,
    /// The owner of these sockets.
    owner: Option<Owner>,
    /// The permissions of these sockets.
    mode: Option<Mode>,
    /// Whether it is offered rings.
    #[serde(default = "is_on", deserialize_with = "text::switch")]
    rings: bool,
    /// Whether it is offered virtqueues for work and completions.
    #[serde(default = "is_on", deserialize_with = "text::switch")]
    virtqueues: bool,
    /// The number of interrupts for completions, with rings.
    vectors: Option<Count<u16>>,
    /// The number of QPs with virtqueues.
    max_qp: Option<Count<u16>>,
    /// The number of CQs with virtqueues.
    max_cq: Option<Count<u16>>,
    /// The addresses that it may use. This field and those behind it are its policy.
    pub(super) gid: Option<List<Prefix>>,
    /// The VLANs that its addresses may be in.
    pub(super) vlan: Option<List<Vlans>>,
    /// The DSCPs that its packets may have.
    pub(super) dscp: Option<List<Range<63>>>,
    /// The priorities that its packets may have.
    pub(super) pcp: Option<List<Range<7>>>,
    /// The DSCP of its notifications of congestion.
    pub(super) cnp_dscp: Option<Number<u32, 0, 63>>,
    /// Bits per second that it may send over the uplink.
    pub(super) rate: Option<Scaled<Bits>>,
    /// Work requests per second that it may have done.
    pub(super) message_rate: Option<Scaled<Requests>>,
    /// QPs that it may have.
    pub(super) qps: Option<Count<u32>>,
    /// CQs that it may have.
    pub(super) cqs: Option<Count<u32>>,
    /// SRQs that it may have.
    pub(super) srqs: Option<Count<u32>>,
    /// MRs that it may have.
    pub(super) mrs: Option<Count<u32>>,
    /// Memory windows that it may have.
    pub(super) mws: Option<Count<u32>>,
    /// PDs that it may have.
    pub(super) pds: Option<Count<u32>>,
    /// Multicast groups that it may join.
    pub(super) groups: Option<Number<u32, 0, { u32::MAX }>>,
    /// Bytes of memory that it may have registered.
    pub(super) memory: Option<Scaled<Bytes>>,
}

/// Returns the network of a guest or an uplink that names none.
pub(super) fn default_network() -> String {
    "default".to_owned()
}

/// Returns whether a data path is offered to a guest of which that is not said.
fn is_on() -> bool {
    true
}

/// The keys of which a guest must have one.
const ANY_SOCKET: &str = "vfio-user=PATH or vhost-user=PATH";

impl Spec for GuestSpec {
    const KEYS: &'static [&'static str] = &[
        "name",
        "vfio_user",
        "vhost_user",
        "mac",
        "network",
        "nic",
        "owner",
        "mode",
        "rings",
        "virtqueues",
        "vectors",
        "max_qp",
        "max_cq",
        "gid",
        "vlan",
        "dscp",
        "pcp",
        "cnp_dscp",
        "rate",
        "message_rate",
        "qps",
        "cqs",
        "srqs",
        "mrs",
        "mws",
        "pds",
        "groups",
        "memory",
    ];

    fn check(&self) -> Result<(), SpecError> {
        match (&self.vfio_user, &self.vhost_user) {
            (None, None) => return Err(SpecError::missing(ANY_SOCKET)),
            (Some(_), Some(_)) => {
                return Err(SpecError::new("vfio-user and vhost-user exclude each other"));
            }
            _ => {}
        }
        if self.nic.is_some() && self.mac.is_none() {
            return Err(SpecError::missing("mac=MAC, which nic= needs,"));
        }
        if self.name.is_empty() {
            return Err(SpecError::missing("name=NAME"));
        }
        self.check_paths()?;
        self.check_queues()
    }
}

impl FromStr for GuestSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::of_map(form::map_of_text(text)?)
    }
}

impl Display for GuestSpec {
    /// Writes the value of `--guest`.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str(&form::text_of(Self::KEYS, &self.to_map()))
    }
}

impl GuestSpec {
    /// Returns the protocol of its VMM.
    pub fn transport(&self) -> Transport {
        match self.vfio_user {
            Some(_) => Transport::VfioUser,
            None => Transport::VhostUser,
        }
    }

    /// Returns the path of the socket that its VMM connects to.
    pub fn path(&self) -> &Path {
        let path = self.vfio_user.as_ref().or(self.vhost_user.as_ref());
        path.map_or(Path::new(""), PathBuf::as_path)
    }

    /// Returns the paths of its sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &PathBuf> {
        self.vfio_user.iter().chain(&self.vhost_user).chain(&self.nic)
    }

    /// Returns the MAC address of the paired network interface.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.mac.map(|mac| mac.0)
    }

    /// Returns who may connect to its sockets.
    pub fn access(&self) -> Access {
        let Owner { user, group } = self.owner.clone().unwrap_or_default();
        Access { user, group, mode: self.mode.map(|mode| mode.0) }
    }

    /// Returns the data paths that it is offered.
    pub fn paths(&self) -> Paths {
        Paths { rings: self.rings, virtqueues: self.virtqueues }
    }

    /// Returns what its device can have.
    pub fn limits(&self) -> Limits {
        let limits = self.transport().limits();
        Limits {
            max_qp: self.max_qp.map_or(limits.max_qp, |qps| qps.0),
            max_cq: self.max_cq.map_or(limits.max_cq, |cqs| cqs.0),
            comp_vectors: self.vectors.map_or(limits.comp_vectors, |vectors| vectors.0),
            ..limits
        }
    }

    /// Checks that a data path is offered.
    fn check_paths(&self) -> Result<(), SpecError> {
        if self.rings || self.virtqueues {
            return Ok(());
        }
        Err(SpecError::new("rings=off and virtqueues=off exclude each other"))
    }

    /// Checks that there are no more virtqueues than the transport can have.
    fn check_queues(&self) -> Result<(), SpecError> {
        let Limits { max_qp, max_cq, comp_vectors, .. } = self.limits();
        if comp_vectors > MAX_VECTORS {
            let reason = format!("{comp_vectors} are too many: at most {MAX_VECTORS} are possible");
            return Err(SpecError::of("vectors", &reason));
        }
        if !self.virtqueues {
            return Ok(());
        }
        // The control and the event queue, one for each CQ and two for each QP.
        let queues = 2 + u32::from(max_cq) + 2 * u32::from(max_qp);
        let (transport, most) = (self.transport().name(), self.transport().max_queues());
        if queues > most.into() {
            return Err(SpecError::new(format!(
                "max-qp={max_qp} and max-cq={max_cq} need {queues} virtqueues; {transport} has at most {most}"
            )));
        }
        Ok(())
    }

    /// Returns whether a VMM that is connected to the guest finds the same device as with another specification.
    pub fn is_same_device(&self, other: &Self) -> bool {
        let device = |of: &Self| (of.transport(), of.mac, of.paths(), of.limits());
        device(self) == device(other)
    }
}

/// Most completion vectors of a guest. More vectors than the guest has CPUs are of no use.
const MAX_VECTORS: u16 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &str) -> GuestSpec {
        spec.parse().unwrap()
    }

    fn error(spec: &str) -> String {
        spec.parse::<GuestSpec>().unwrap_err().to_string()
    }

    #[test]
    fn a_guest_is_understood() {
        let guest =
            read("name=g1,vhost-user=/a/b,mac=52:54:0:12:34:ff,network=blue,max-qp=3,max-cq=4");
        assert_eq!((guest.name.as_str(), guest.network.as_str()), ("g1", "blue"));
        assert_eq!((guest.transport(), guest.path()), (Transport::VhostUser, Path::new("/a/b")));
        assert_eq!(guest.mac(), Some([0x52, 0x54, 0, 0x12, 0x34, 0xff]));
        assert_eq!((guest.limits().max_qp, guest.limits().max_cq), (3, 4));
        assert_eq!(guest.paths(), Paths::ALL);
        let guest = read("name=g,vfio-user=s,rings=off,vectors=64");
        assert_eq!(
            (guest.paths(), guest.limits().comp_vectors),
            (Paths { rings: false, virtqueues: true }, 64)
        );
        // The queues of virtqueues count only where these are offered.
        let guest = read("name=g,vhost-user=s,virtqueues=off,max-qp=1000");
        assert_eq!(guest.paths(), Paths { rings: true, virtqueues: false });
        assert_eq!((guest.mac(), guest.network.as_str()), (None, "default"));
    }

    #[test]
    fn access_is_understood() {
        let access = |keys: &str| read(&format!("name=a,vfio-user=b,{keys}")).access();
        let expected = |user: Option<&str>, group: Option<&str>, mode: Option<u32>| Access {
            user: user.map(str::to_owned),
            group: group.map(str::to_owned),
            mode,
        };
        assert_eq!(
            access("owner=vm1:kvm,mode=0660"),
            expected(Some("vm1"), Some("kvm"), Some(0o660))
        );
        assert_eq!(access("owner=64055"), expected(Some("64055"), None, None));
        assert_eq!(access("owner=:kvm"), expected(None, Some("kvm"), None));
        assert_eq!(access("mode=600"), expected(None, None, Some(0o600)));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(error("vfio-user=a"), "name=NAME is missing");
        assert_eq!(error("name=a"), "vfio-user=PATH or vhost-user=PATH is missing");
        assert_eq!(error("name=a,vfio-user=b,nic=c"), "mac=MAC, which nic= needs, is missing");
        let two = "vfio-user and vhost-user exclude each other";
        assert_eq!(error("name=a,vfio-user=b,vhost-user=c"), two);
        for (key, wanted, values) in [
            (
                "mac",
                "a unicast MAC address such as 52:54:00:12:34:01",
                &["1:2:3:4:5", "01:00:00:00:00:00", "0:0:0:0:0:0", "2:2:3:4:5:+6", "x"][..],
            ),
            ("rings", "on or off", &["yes"]),
            ("virtqueues", "on or off", &["yes"]),
            ("max-qp", "a number of at least 1", &["0", "-1", "65536", "many"]),
            ("owner", "USER, USER:GROUP or :GROUP", &["a:", ":", "a:b:c"]),
            ("mode", "octal permissions such as 0660", &["0o660", "888", "1000", "+660", "rw"]),
        ] {
            for value in values {
                let error = error(&format!("name=a,vfio-user=b,{key}={value}"));
                assert_eq!(error, format!("{key}: \"{value}\" is not {wanted}"));
            }
        }
        let vectors = error("name=a,vfio-user=b,vectors=65");
        assert_eq!(vectors, "vectors: 65 are too many: at most 64 are possible");
        let queues = error("name=a,vhost-user=b,max-qp=120,max-cq=20");
        assert!(queues.contains("need 262 virtqueues; vhost-user has at most 256"), "{queues}");
    }

    /// A text of an earlier version, and of whoever writes it by hand, is the same guest as its shortest form.
    #[test]
    fn equal_guests_have_one_text() {
        let long = "rings=on,rate=1000M,network=default,vfio-user=/a,name=g,gid=10.0.0.1/32+fd00::/8,mode=600";
        let guest = read(long);
        let short = "name=g,vfio-user=/a,mode=0600,gid=10.0.0.1+fd00::/8,rate=1G";
        assert_eq!(guest.to_string(), short);
        assert_eq!(read(short), guest);
    }
}
