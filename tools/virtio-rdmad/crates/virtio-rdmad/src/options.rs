// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::{AddressRights, GidPrefix, Limits, VlanList};
use rustix::thread::CpuSet;

use crate::privileges::User;
use crate::remover;

/// RDMA for virtual machines: the device of virtio-rdma, one process for many guests.
///
/// Each guest's virtual machine monitor connects to a socket of its own. Guests of one network
/// reach each other by RDMA; what one sends is copied once, from the memory of the one guest to the
/// memory of the other.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_long_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    pub command: Option<Command>,

    /// A guest to serve; once for each.
    ///
    /// SPEC is KEY=VALUE[,KEY=VALUE...]:
    ///
    ///   name=NAME         what logs and status call it (needed)
    ///   vfio-user=PATH    socket for QEMU's vfio-user-pci
    ///   vhost-user=PATH   socket for user-mode Linux or Cloud Hypervisor
    ///   mac=MAC           MAC address of the guest's network interface that RDMA goes with
    ///   network=NAME      guests of different networks cannot reach each other (default: default)
    ///   gid=LIST          addresses that the guest may use (default: all that are not another guest's)
    ///   vlan=LIST         VLANs that its addresses may be in (default: all)
    ///   rings=on|off      work and completion queues are rings in guest memory (default: on)
    ///   vectors=N         interrupts that completions are spread over, with rings
    ///   max-qp=N          queue pairs, the one of the connection manager included, without rings
    ///   max-cq=N          completion queues, without rings
    ///   any-file=on|off   take memory in files of any file system (default: off)
    ///
    /// A guest's memory must be in a memfd, in tmpfs or in hugetlbfs, because accesses to files of
    /// other file systems, FUSE above all, can hang; any-file=on is for a monitor that is trusted not
    /// to.
    ///
    /// A gid= list is of IP addresses and prefixes with + between them, such as 10.0.0.1+fd00::/64; the
    /// link-local address of mac= need not be on it. What is made from another guest's mac=, or is on
    /// the gid= list of others as a single address, and not on this one's, is another guest's. A vlan=
    /// list is of numbers and ranges, such as none+5+7-9, where none stands for addresses in no VLAN.
    ///
    /// Exactly one of vfio-user and vhost-user is needed. A driver that does not know rings uses
    /// virtqueues even if they are on. Then a queue pair takes two virtqueues and a completion queue
    /// one; two more are always there. With rings there are vectors and three. vfio-user carries
    /// 1023 virtqueues (default: max-qp=95, max-cq=64, vectors=8), vhost-user 256, user-mode Linux
    /// 64 of them (default: max-qp=21, max-cq=20, vectors=4).
    #[arg(long = "guest", value_name = "SPEC", required = true, verbatim_doc_comment)]
    pub guests: Vec<GuestSpec>,

    /// Socket on which `virtio-rdmad status` finds this process.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Threads that serve guests; at most one a guest (default: one for two CPUs).
    ///
    /// A guest is served by the worker that has the fewest when its monitor connects.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub workers: Option<u16>,

    /// CPUs that the workers are pinned to, in their order, such as 2,4-7.
    ///
    /// Without --workers there is one worker a CPU listed.
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuList>,

    /// How long a worker looks for work of a guest in vain, in microseconds, at most.
    ///
    /// It looks that long only as long as work tends to come in that time, and then sleeps. Longer
    /// answers faster and costs processor time; 0 sleeps at once.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub poll_us: u32,

    /// Whether the process gives up what it does not need once its sockets are open.
    ///
    /// Off is for systems that do not let it.
    #[arg(long, value_name = "on|off", value_enum, hide_possible_values = true, default_value_t = Switch::On)]
    pub sandbox: Switch,

    /// User and group that the process belongs to once its sockets are open, if it is started as root.
    ///
    /// The user must be able to write to the sockets' directories for the sockets to be removed in
    /// the end.
    #[arg(long, value_name = "UID:GID")]
    pub user: Option<User>,

    /// What to log: error, warn, info, debug or trace; or what RUST_LOG takes, and which wins.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,
}

const EXAMPLES: &str = "\
Examples:
  Two guests of QEMU:
    virtio-rdmad --control /run/rdma.sock \\
        --guest name=g1,vfio-user=/run/g1.sock,mac=52:54:00:12:34:01 \\
        --guest name=g2,vfio-user=/run/g2.sock,mac=52:54:00:12:34:02
    qemu-system-x86_64 -machine q35,memory-backend=m \\
        -object memory-backend-memfd,id=m,size=1G,share=on \\
        -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/run/g1.sock\"}}' ...
  What they do:
    virtio-rdmad status --control /run/rdma.sock

SIGTERM and SIGINT end it and remove its sockets.";

/// On or off.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// CPUs, in the order given, none twice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CpuList(pub Vec<u16>);

/// What is wrong with a list of CPUs.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum CpuListError {
    /// Neither a number nor a range.
    #[error("\"{0}\" is no CPU and no range of CPUs such as 4-7")]
    Entry(String),
    /// A CPU that came twice.
    #[error("CPU {0} is listed twice")]
    Twice(u16),
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(list: &str) -> Result<Self, CpuListError> {
        let mut cpus = Vec::new();
        for entry in list.split(',') {
            let error = || CpuListError::Entry(entry.to_owned());
            let number = |digits: &str| match digits.parse::<u16>() {
                Ok(cpu) if usize::from(cpu) < CpuSet::MAX_CPU => Ok(cpu),
                _ => Err(error()),
            };
            let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(error());
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(CpuListError::Twice(cpu));
                }
                cpus.push(cpu);
            }
        }
        Ok(Self(cpus))
    }
}

/// What to do instead of serving guests.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the guests, queue pairs and counters of a running virtio-rdmad.
    Status(StatusOptions),
    /// Remove sockets when the standard input ends: what virtio-rdmad starts for itself.
    #[command(name = remover::COMMAND, hide = true)]
    RemoveSockets(RemoverOptions),
}

/// Options of `virtio-rdmad status`.
#[derive(Args, Debug)]
pub struct StatusOptions {
    /// The control socket that the running virtio-rdmad was given.
    #[arg(long, value_name = "PATH")]
    pub control: PathBuf,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of the process that removes the sockets.
#[derive(Args, Debug)]
pub struct RemoverOptions {
    /// Where the sockets are.
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// How a guest's monitor attaches the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// vfio-user.
    VfioUser,
    /// vhost-user.
    VhostUser,
}

impl Transport {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::VfioUser => "vfio-user",
            Self::VhostUser => "vhost-user",
        }
    }

    /// Virtqueues that it carries.
    fn max_queues(self) -> u16 {
        match self {
            Self::VfioUser => vfio_user::MAX_QUEUES,
            Self::VhostUser => vhost_user::MAX_QUEUES,
        }
    }

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
    /// What logs and status call it.
    pub name: String,
    /// How it attaches.
    pub transport: Transport,
    /// Where it attaches.
    pub path: PathBuf,
    /// MAC address of the paired network interface.
    pub mac: Option<[u8; 6]>,
    /// The network it is in.
    pub network: String,
    /// The addresses that it may use.
    pub addresses: AddressRights,
    /// What it may use.
    pub limits: Limits,
    /// Whether it is offered rings.
    pub rings: bool,
    /// Whether its memory may be in files of any file system.
    pub any_file: bool,
}

/// What is wrong with a `--guest`.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// Not KEY=VALUE.
    #[error("\"{0}\" is not KEY=VALUE")]
    NoValue(String),
    /// A key that does not exist.
    #[error(
        "unknown key \"{0}\"; there are name, vfio-user, vhost-user, mac, network, gid, vlan, rings, \
         vectors, max-qp, max-cq, any-file"
    )]
    UnknownKey(String),
    /// A key that came twice.
    #[error("\"{0}\" is given twice")]
    Twice(&'static str),
    /// A key that is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Both transports.
    #[error("vfio-user and vhost-user exclude each other")]
    TwoTransports,
    /// A value that its key cannot have.
    #[error("{key}: \"{value}\" is not {wanted}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would be one.
        wanted: &'static str,
    },
    /// More virtqueues than the transport carries.
    #[error("max-qp={qps} and max-cq={cqs} need {queues} virtqueues; {transport} carries {most}")]
    Queues {
        /// QPs asked for.
        qps: u16,
        /// CQs asked for.
        cqs: u16,
        /// Virtqueues these need.
        queues: u32,
        /// The transport.
        transport: &'static str,
        /// Virtqueues it carries.
        most: u16,
    },
    /// More completion vectors than there can be.
    #[error("vectors={0}: at most {MAX_VECTORS} are possible")]
    Vectors(u16),
}

/// Most completion vectors of a guest; more than a guest has CPUs to spread them over help nobody.
const MAX_VECTORS: u16 = 64;

/// The values of a `--guest` as they stand there.
#[derive(Default)]
struct Pairs<'a> {
    name: Option<&'a str>,
    vfio_user: Option<&'a str>,
    vhost_user: Option<&'a str>,
    mac: Option<&'a str>,
    network: Option<&'a str>,
    gid: Option<&'a str>,
    vlan: Option<&'a str>,
    rings: Option<&'a str>,
    vectors: Option<&'a str>,
    max_qp: Option<&'a str>,
    max_cq: Option<&'a str>,
    any_file: Option<&'a str>,
}

impl<'a> Pairs<'a> {
    fn parse(spec: &'a str) -> Result<Self, SpecError> {
        let mut pairs = Self::default();
        for pair in spec.split(',') {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| SpecError::NoValue(pair.to_owned()))?;
            let (key, slot) = match key {
                "name" => ("name", &mut pairs.name),
                "vfio-user" => ("vfio-user", &mut pairs.vfio_user),
                "vhost-user" => ("vhost-user", &mut pairs.vhost_user),
                "mac" => ("mac", &mut pairs.mac),
                "network" => ("network", &mut pairs.network),
                "gid" => ("gid", &mut pairs.gid),
                "vlan" => ("vlan", &mut pairs.vlan),
                "rings" => ("rings", &mut pairs.rings),
                "vectors" => ("vectors", &mut pairs.vectors),
                "max-qp" => ("max-qp", &mut pairs.max_qp),
                "max-cq" => ("max-cq", &mut pairs.max_cq),
                "any-file" => ("any-file", &mut pairs.any_file),
                _ => return Err(SpecError::UnknownKey(key.to_owned())),
            };
            if value.is_empty() {
                return Err(SpecError::NoValue(pair.to_owned()));
            }
            if slot.replace(value).is_some() {
                return Err(SpecError::Twice(key));
            }
        }
        Ok(pairs)
    }

    fn transport(&self) -> Result<(Transport, PathBuf), SpecError> {
        match (self.vfio_user, self.vhost_user) {
            (Some(path), None) => Ok((Transport::VfioUser, path.into())),
            (None, Some(path)) => Ok((Transport::VhostUser, path.into())),
            (None, None) => Err(SpecError::Missing("vfio-user=PATH or vhost-user=PATH")),
            (Some(_), Some(_)) => Err(SpecError::TwoTransports),
        }
    }

    fn limits(&self, transport: Transport) -> Result<Limits, SpecError> {
        let mut limits = transport.limits();
        limits.max_qp = number("max-qp", self.max_qp, limits.max_qp)?;
        limits.max_cq = number("max-cq", self.max_cq, limits.max_cq)?;
        limits.comp_vectors = number("vectors", self.vectors, limits.comp_vectors)?;
        if limits.comp_vectors > MAX_VECTORS {
            return Err(SpecError::Vectors(limits.comp_vectors));
        }
        // Control and events, one a CQ, two a QP.
        let queues = 2 + u32::from(limits.max_cq) + 2 * u32::from(limits.max_qp);
        let most = transport.max_queues();
        if queues > most.into() {
            let (qps, cqs) = (limits.max_qp, limits.max_cq);
            let transport = transport.name();
            return Err(SpecError::Queues { qps, cqs, queues, transport, most });
        }
        Ok(limits)
    }
}

impl FromStr for GuestSpec {
    type Err = SpecError;

    fn from_str(spec: &str) -> Result<Self, SpecError> {
        let pairs = Pairs::parse(spec)?;
        let (transport, path) = pairs.transport()?;
        Ok(Self {
            name: pairs.name.ok_or(SpecError::Missing("name=NAME"))?.to_owned(),
            transport,
            path,
            mac: pairs.mac.map(mac).transpose()?,
            network: pairs.network.unwrap_or("default").to_owned(),
            addresses: AddressRights {
                gids: pairs.gid.map(gid_list).transpose()?,
                vlans: pairs.vlan.map(vlan_list).transpose()?,
            },
            limits: pairs.limits(transport)?,
            rings: switch("rings", pairs.rings, true)?,
            any_file: switch("any-file", pairs.any_file, false)?,
        })
    }
}

fn number(key: &'static str, value: Option<&str>, default: u16) -> Result<u16, SpecError> {
    let Some(value) = value else { return Ok(default) };
    let wanted = "a number of at least 1";
    match value.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(SpecError::Value { key, value: value.to_owned(), wanted }),
    }
}

fn switch(key: &'static str, value: Option<&str>, default: bool) -> Result<bool, SpecError> {
    match value {
        None => Ok(default),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(value) => Err(SpecError::Value { key, value: value.to_owned(), wanted: "on or off" }),
    }
}

/// IP addresses and prefixes with `+` between them, as GIDs: an IPv4 address as the IPv6 address that
/// it is mapped to (RFC 4291, section 2.5.5.2).
fn gid_list(list: &str) -> Result<Vec<GidPrefix>, SpecError> {
    list.split('+').map(gid_prefix).collect()
}

fn gid_prefix(text: &str) -> Result<GidPrefix, SpecError> {
    let error = || {
        let wanted = "an IP address or a prefix such as 10.0.0.0/24";
        SpecError::Value { key: "gid", value: text.to_owned(), wanted }
    };
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(length.parse::<u32>().map_err(|_| error())?)),
        None => (text, None),
    };
    let (gid, bits, mapped) = match address.parse::<IpAddr>().map_err(|_| error())? {
        IpAddr::V4(address) => (address.to_ipv6_mapped(), 32, 96),
        IpAddr::V6(address) => (address, 128, 0),
    };
    let length = length.unwrap_or(bits);
    if length > bits {
        return Err(error());
    }
    GidPrefix::new(gid.octets(), mapped + length).ok_or_else(error)
}

/// The largest VLAN ID (IEEE 802.1Q).
const MAX_VLAN: u16 = 4094;

/// Numbers and ranges of VLANs, and `none`, with `+` between them.
fn vlan_list(list: &str) -> Result<VlanList, SpecError> {
    let mut vlans = VlanList::default();
    for entry in list.split('+') {
        let error = || {
            let wanted = "none, a VLAN of 0 to 4094 or a range of these such as 7-9";
            SpecError::Value { key: "vlan", value: entry.to_owned(), wanted }
        };
        if entry == "none" {
            vlans.untagged = true;
            continue;
        }
        let number = |digits: &str| digits.parse::<u16>().map_err(|_| error());
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last > MAX_VLAN {
            return Err(error());
        }
        vlans.ranges.push(first..=last);
    }
    Ok(vlans)
}

/// A unicast MAC address in the usual notation.
fn mac(value: &str) -> Result<[u8; 6], SpecError> {
    let error = || {
        let wanted = "a unicast MAC address such as 52:54:00:12:34:01";
        SpecError::Value { key: "mac", value: value.to_owned(), wanted }
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
    use clap::CommandFactory;

    use super::*;

    fn error(spec: &str) -> SpecError {
        spec.parse::<GuestSpec>().unwrap_err()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn a_guest_is_understood() {
        let spec = "name=g1,vhost-user=/a/b,mac=52:54:0:12:34:ff,network=blue,max-qp=3,max-cq=4";
        let guest: GuestSpec = spec.parse().unwrap();
        assert_eq!((guest.name.as_str(), guest.network.as_str()), ("g1", "blue"));
        assert_eq!((guest.transport, guest.path), (Transport::VhostUser, "/a/b".into()));
        assert_eq!(guest.mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0xff]));
        assert_eq!((guest.limits.max_qp, guest.limits.max_cq), (3, 4));
        assert!(guest.rings && !guest.any_file);
        let guest: GuestSpec =
            "name=g,vfio-user=s,rings=off,vectors=64,any-file=on".parse().unwrap();
        assert!(guest.any_file);
        assert_eq!((guest.rings, guest.limits.comp_vectors), (false, 64));
        assert_eq!((guest.mac, guest.network.as_str()), (None, "default"));
    }

    #[test]
    fn addresses_are_listed() {
        let parse = |keys: &str| format!("name=a,vfio-user=b{keys}").parse::<GuestSpec>();
        let rights = parse("").unwrap().addresses;
        assert_eq!((rights.gids, rights.vlans), (None, None));
        let rights = parse(",gid=10.0.0.1+10.1.0.0/16+fd00::/8+fd00::1,vlan=none+5+7-9").unwrap();
        let prefix = |first: &[u8], last: &[u8], bits| {
            let mut gid = [0; 16];
            gid[..first.len()].copy_from_slice(first);
            gid[16 - last.len()..].copy_from_slice(last);
            GidPrefix::new(gid, bits).unwrap()
        };
        let gids = vec![
            prefix(&[], &[0xff, 0xff, 10, 0, 0, 1], 128),
            prefix(&[], &[0xff, 0xff, 10, 1, 0, 0], 112),
            prefix(&[0xfd], &[], 8),
            prefix(&[0xfd], &[1], 128),
        ];
        assert_eq!(rights.addresses.gids, Some(gids));
        let vlans = VlanList { untagged: true, ranges: vec![5..=5, 7..=9] };
        assert_eq!(rights.addresses.vlans, Some(vlans));
        for list in ["10.0.0", "10.0.0.1/33", "fd00::/129", "fd00::/x", "10.0.0.1+", "10.0.0.0/-1"]
        {
            let error = parse(&format!(",gid={list}")).unwrap_err();
            assert!(matches!(error, SpecError::Value { key: "gid", .. }), "{list}");
        }
        for list in ["4095", "9-7", "5+", "any", "-1", "1-"] {
            let error = parse(&format!(",vlan={list}")).unwrap_err();
            assert!(matches!(error, SpecError::Value { key: "vlan", .. }), "{list}");
        }
    }

    #[test]
    fn cpus_are_listed() {
        let list = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(list("3"), Ok(vec![3]));
        assert_eq!(list("3,0-2,1000"), Ok(vec![3, 0, 1, 2, 1000]));
        assert_eq!(list("0-2,1"), Err(CpuListError::Twice(1)));
        for text in ["", "1,", "a", "-1", "1-", "2-1", "1-2-3", "1024", "70000"] {
            assert!(matches!(list(text), Err(CpuListError::Entry(_))), "{text}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(error("vfio-user=a"), SpecError::Missing("name=NAME"));
        assert!(matches!(error("name=a"), SpecError::Missing(_)));
        assert_eq!(error("name"), SpecError::NoValue("name".into()));
        assert_eq!(error("name="), SpecError::NoValue("name=".into()));
        assert_eq!(error("name=a,name=b,vfio-user=c"), SpecError::Twice("name"));
        assert_eq!(error("nome=a"), SpecError::UnknownKey("nome".into()));
        assert_eq!(error("name=a,vfio-user=b,vhost-user=c"), SpecError::TwoTransports);
        for value in ["1:2:3:4:5", "01:00:00:00:00:00", "0:0:0:0:0:0", "2:2:3:4:5:+6", "x"] {
            let spec = format!("name=a,vfio-user=b,mac={value}");
            assert!(matches!(error(&spec), SpecError::Value { key: "mac", .. }), "{value}");
        }
        let rings = error("name=a,vfio-user=b,rings=yes");
        assert!(matches!(rings, SpecError::Value { key: "rings", wanted: "on or off", .. }));
        assert_eq!(error("name=a,vfio-user=b,vectors=65"), SpecError::Vectors(65));
        for value in ["0", "-1", "65536", "many"] {
            let spec = format!("name=a,vfio-user=b,max-qp={value}");
            assert!(matches!(error(&spec), SpecError::Value { key: "max-qp", .. }), "{value}");
        }
        let queues = error("name=a,vhost-user=b,max-qp=120,max-cq=20");
        assert!(matches!(queues, SpecError::Queues { queues: 262, most: 256, .. }));
    }
}
