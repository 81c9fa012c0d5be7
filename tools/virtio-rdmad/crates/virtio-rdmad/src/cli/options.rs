// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tracing_subscriber::filter::Targets;

use crate::handover::ask::{self, HandOverOptions};
use crate::handover::supervisor::SupervisorOptions;
use crate::os::cpus::CpuList;
use crate::os::privileges::User;
use crate::os::remover::{self, RemoverOptions};
use crate::spec::{ConfigFile, GuestSpec, Origin, PolicyChange, UplinkSpec};

/// RDMA for virtual machines: the device of virtio-rdma, one process for many guests.
///
/// The virtual machine monitor of each guest connects to a socket of its own. Guests of one network
/// reach each other by RDMA. A message is copied once, from the memory of one guest to the memory of
/// the other.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_long_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    pub command: Option<Command>,

    /// A guest to serve. Give this option once for each guest. With --control there need not be one.
    ///
    /// SPEC is KEY=VALUE[,KEY=VALUE...]:
    ///
    ///   name=NAME          the name of the guest in logs and status (required)
    ///   vfio-user=PATH     socket for QEMU's vfio-user-pci
    ///   vhost-user=PATH    socket for user-mode Linux or Cloud Hypervisor
    ///   mac=MAC            MAC address of the network interface to pair the device with
    ///   network=NAME       network that the guest is in (default: default)
    ///   nic=PATH           socket for the guest's network interface, which has the address mac=
    ///   owner=OWNER        USER, USER:GROUP or :GROUP that has the sockets (default: who makes them)
    ///   mode=MODE          permissions of the sockets, such as 0660 (default: by the umask)
    ///   gid=LIST           addresses that it may use (default: all but those of other guests)
    ///   vlan=LIST          VLANs that its addresses may be in (default: all)
    ///   dscp=LIST          DSCPs that its packets on the uplink may have (default: all)
    ///   pcp=LIST           priorities that these packets may have in VLANs (default: all)
    ///   cnp-dscp=N         DSCP of its notifications of congestion (default: that of the data)
    ///   rings=on|off       its queues may be rings in guest memory (default: on)
    ///   virtqueues=on|off  its queues may be virtqueues (default: on)
    ///   vectors=N          with rings: number of interrupts for completions
    ///   max-qp=N           with virtqueues: number of QPs, with that of the connection manager
    ///   max-cq=N           with virtqueues: number of completion queues
    ///   rate=RATE          bits per second that it may send over the uplink (default: no limit)
    ///   message-rate=N     work requests per second that it may have done (default: no limit)
    ///   qps=N              QPs that it may have (default: all that its device can have)
    ///   cqs=N              completion queues likewise
    ///   srqs=N             shared receive queues likewise
    ///   mrs=N              memory regions likewise
    ///   mws=N              memory windows likewise
    ///   pds=N              protection domains likewise
    ///   groups=N           multicast groups that it may join (default: all that its device can have)
    ///   memory=SIZE        bytes of memory that it may have registered (default: no limit)
    ///
    /// Exactly one of vfio-user and vhost-user is required. Guests of different networks cannot
    /// reach each other.
    ///
    /// To nic= connects QEMU by -netdev stream, with vfio-user, or user-mode Linux by its transport
    /// bess, with vhost-user. The interfaces of a network reach each other and the uplink.
    ///
    /// A guest's memory must be in a memfd, in tmpfs or in hugetlbfs. An access to a file of
    /// another file system, above all FUSE, may never end.
    ///
    /// A gid= list has IP addresses and prefixes with + between them, such as
    /// 10.0.0.1+fd00::/64. The link-local address of mac= need not be on it. An address belongs
    /// to another guest if it is made from that guest's mac=, or if it is on that guest's gid=
    /// list as a single address and not on the list of this one. A vlan= list has numbers and
    /// ranges with + between them, such as none+5+7-9, where none means addresses in no VLAN.
    ///
    /// Lists dscp= and pcp= have numbers and ranges with + between them, such as 26+0-7. A packet for
    /// which the guest asks for another value is sent with the first one of the list.
    ///
    /// A rate= is a number of at least 8K, with K, M or G for thousands, millions or billions, such
    /// as 500M. It counts the headers of packets, and each copy of a packet that a tunnel sends to
    /// several hosts. Messages to guests of this process have no limit.
    ///
    /// A message-rate= counts the work requests of all send queues, also those to guests of this process. It
    /// is a number with K, M or G as well, such as 500K.
    ///
    /// The objects of the guest's kernel count as well, and the QP of its connection manager. A memory= is
    /// a number of bytes, with K, M, G or T for powers of 1024, such as 4G. Memory counts in whole pages,
    /// once for each region.
    ///
    /// A driver that does not use rings uses virtqueues even with rings=on. It needs two
    /// virtqueues for a queue pair, one for a completion queue and two more. With rings there is
    /// a virtqueue for each vector and three more: virtqueues=off makes a device of these alone,
    /// which needs less memory of the guest. vfio-user has up to 1023 virtqueues (default:
    /// max-qp=95, max-cq=64, vectors=8), vhost-user 256, and user-mode Linux uses 64 of these
    /// (default: max-qp=21, max-cq=20, vectors=4).
    #[arg(
        long = "guest",
        value_name = "SPEC",
        required_unless_present_any = ["control", "config"],
        verbatim_doc_comment
    )]
    pub guests: Vec<GuestSpec>,

    /// The way from a network to other hosts. Give this option at most once for each network.
    ///
    /// SPEC is KEY=VALUE[,KEY=VALUE...]:
    ///
    ///   tap=NAME          the tap that carries the packets
    ///   interface=NAME    the network interface that carries the packets, without a bridge
    ///   trains=on|off     tap, interface: the kernel is given many packets at once (default: on)
    ///   vxlan=VNI         the number of the VXLAN tunnel that carries the packets
    ///   local=ADDRESS     vxlan: the IP address of this end (required)
    ///   remote=ADDRESS    vxlan: the IP address of another end (required, once for each)
    ///   port=N            vxlan: the UDP port of all ends (default: 4789)
    ///   carrier=NAME      the interface without whose carrier the guests' ports are down (default: none)
    ///   network=NAME      the network (default: default)
    ///
    /// Exactly one of tap, interface and vxlan is required.
    ///
    /// Messages to an address that no guest of the network has, and datagrams to multicast groups, are
    /// sent as packets of RoCE v2.
    ///
    /// A tap must be there, and belong to the user that starts virtio-rdmad; Documentation/host.md says how
    /// to bring the packets of the guests to it.
    ///
    /// The packets go through packet sockets on an interface=, such as the one that the guests have
    /// macvtaps on. virtio-rdmad needs CAP_NET_RAW to open them, and gives that up afterwards.
    /// Documentation/host.md says how to keep the packets from the guests' kernels. Guests with nic= cannot
    /// use it.
    ///
    /// With trains=off the kernel is given single packets. This is for network cards that spoil the
    /// identifications of IPv4 packets when they take many apart; it needs more processor time.
    ///
    /// A tunnel needs no privilege. Its other ends are processes of virtio-rdmad or vxlan devices of
    /// Linux. Whoever can send packets from the address of another end reaches the guests, so the
    /// network between the ends must be one that you trust.
    #[arg(long = "uplink", value_name = "SPEC", verbatim_doc_comment)]
    pub uplinks: Vec<UplinkSpec>,

    /// File in TOML that has these options, by their names, and a table `[[guest]]` or `[[uplink]]` for each
    /// of those.
    ///
    /// What the command line has besides takes precedence; guests and uplinks are those of both.
    /// virtio-rdmad reads the file when it starts; `virtio-rdmad reload` brings changes to a running one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What the file has.
    #[arg(skip)]
    pub file: ConfigFile,

    /// Socket on which `virtio-rdmad status` and its like find this process, and other clients by Varlink.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Number of threads that serve guests (default: one for two CPUs).
    ///
    /// Without --control there is at most one for each guest. When a VMM connects, the worker that has the
    /// fewest guests begins to serve its guest. Guests move to another worker later if that evens out the load.
    /// On a machine with several NUMA nodes, each worker runs on one of them if there are enough for all nodes, and
    /// guests go to workers of the node on which their memory lies.
    /// A worker whose guests have no work helps others with large messages.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub workers: Option<u16>,

    /// CPUs that the workers are pinned to, such as 2,4-7: the first worker to the first CPU, and so on.
    ///
    /// The NUMA node of a worker is that of its CPU. Without --workers there is one worker for each CPU of the list.
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuList>,

    /// How long a worker polls a guest that has no work, in microseconds, at most.
    ///
    /// The worker polls only as long as work tends to come in that time; then it sleeps. With a longer
    /// time guests get faster answers, and the worker uses more processor time. With 0 it sleeps at once,
    /// and helps no other worker.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub poll_us: u32,

    /// Whether the process gives up the rights that it does not need once its sockets are open.
    ///
    /// Use off on systems that do not let a process do so.
    #[arg(long, value_name = "on|off", value_enum, hide_possible_values = true, default_value_t = Switch::On)]
    pub sandbox: Switch,

    /// User and group of the process once its sockets are open, if root starts it.
    ///
    /// The user must be able to write to the directories of the sockets, because the sockets are removed
    /// in the end.
    #[arg(long, value_name = "UID:GID")]
    pub user: Option<User>,

    /// A feature that guests are not offered: page-sizes or reset-to-rtr. Give this option once for each.
    ///
    /// A version of virtio-rdmad that does not know a feature cannot take over a guest whose driver uses it. Without
    /// the feature it can. This concerns the VMMs that connect to this process.
    ///
    /// page-sizes: the driver lists memory regions in pages larger than 4 KiB. reset-to-rtr: the driver makes a queue
    /// pair ready to receive by one command.
    #[arg(long, value_name = "FEATURE", value_enum, hide_possible_values = true)]
    pub withhold: Vec<Feature>,

    /// Go without the guests that an earlier process has served and of which this one cannot read what is left.
    ///
    /// Their VMMs are disconnected. Without this option virtio-rdmad does not start then, so that the version that
    /// has served them can be started again.
    #[arg(long)]
    pub forget_unreadable: bool,

    /// What to log: error, warn, info, debug or trace, or such levels of crates ("info,engine=debug"). The variable
    /// RUST_LOG takes precedence.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: Targets,
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
  What these guests do:
    virtio-rdmad status --control /run/rdma.sock

SIGTERM and SIGINT end virtio-rdmad and remove its sockets.";

/// The value of an option that is on or off.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl Options {
    /// Returns the CPU to which the worker with this index is pinned, if there is a list of CPUs.
    pub fn pinned(&self, worker: usize) -> Option<u16> {
        self.cpus.as_ref()?.0.get(worker).copied()
    }

    /// Returns who has named a guest.
    pub fn origin_of(&self, guest: &GuestSpec) -> Origin {
        if self.file.guests.iter().any(|other| other.name == guest.name) {
            Origin::File
        } else {
            Origin::CommandLine
        }
    }
}

/// What to do instead of serving guests.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the guests, queue pairs and counters of a running virtio-rdmad.
    Status(StatusOptions),
    /// Print the counters of a running virtio-rdmad as OpenMetrics text.
    Metrics(MetricsOptions),
    /// Print what happens to the guests of a running virtio-rdmad until it ends.
    Watch(WatchOptions),
    /// Print what happens to each message of a guest of a running virtio-rdmad until it ends.
    Trace(TraceOptions),
    /// Write the frames of a guest of a running virtio-rdmad to a file that Wireshark reads.
    ///
    /// They are those that go over the wire, and for messages between guests of one network, which no frame
    /// carries, those that the same messages would be. SIGINT ends it, and the file is whole.
    Capture(CaptureOptions),
    /// Show what the workers and guests of a running virtio-rdmad do, again and again.
    ///
    /// The guests with the most traffic come first. q ends it.
    Top(TopOptions),
    /// Add a guest to a running virtio-rdmad.
    Add(Box<AddOptions>),
    /// Change what a guest of a running virtio-rdmad may do, while it runs.
    Set(SetOptions),
    /// Remove a guest from a running virtio-rdmad.
    Remove(RemoveOptions),
    /// Say what is wrong in a configuration file, with lines and keys.
    ///
    /// All of the file is checked, as virtio-rdmad does when it starts, and nothing is changed. The exit status is
    /// not 0 if there is a mistake.
    Check(CheckOptions),
    /// Have a running virtio-rdmad follow its configuration file.
    ///
    /// Guests that are new in the file are added, those that are gone from it leave with their VMMs, and what
    /// guests may do is changed. What else has changed is printed: it needs a restart. A mistake in the file
    /// changes nothing.
    Reload(ReloadOptions),
    /// Run virtio-rdmad, and run it again when it ends, so that guests keep their devices.
    ///
    /// The sockets of VMMs, and all that virtio-rdmad needs to go on with them, are kept while virtio-rdmad does not
    /// run. systemd does the same for a service with FileDescriptorStoreMax=. SIGHUP restarts virtio-rdmad, for
    /// example after its file was replaced by a newer one. SIGTERM and SIGINT end it for good.
    Supervise(SupervisorOptions),
    /// Have a running virtio-rdmad end, and leave its sockets to the next one. A service manager calls this.
    #[command(name = ask::COMMAND, hide = true)]
    HandOver(HandOverOptions),
    /// Remove sockets when standard input is closed. virtio-rdmad starts this itself.
    #[command(name = remover::COMMAND, hide = true)]
    RemoveSockets(RemoverOptions),
}

/// Which running virtio-rdmad a command is for.
#[derive(Args, Debug)]
pub struct Running {
    /// The control socket that the running virtio-rdmad was given.
    #[arg(long, value_name = "PATH", env = "VIRTIO_RDMAD_CONTROL", default_value = CONTROL)]
    pub control: PathBuf,
}

/// The control socket of the service of the Debian package.
const CONTROL: &str = "/run/virtio-rdmad/control/socket";

/// Options of `virtio-rdmad status`.
#[derive(Args, Debug)]
pub struct StatusOptions {
    #[command(flatten)]
    pub running: Running,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Leave out the queue pairs and shared receive queues, which may be many.
    #[arg(long)]
    pub brief: bool,
}

/// Options of `virtio-rdmad add`.
#[derive(Args, Debug)]
pub struct AddOptions {
    #[command(flatten)]
    pub running: Running,

    /// The guest, as in the option of this name without a command.
    ///
    /// Its sockets are made with the rights of whoever calls this. It can have nic= in a network that has a tunnel,
    /// or in which a guest had nic= when virtio-rdmad started.
    #[arg(long, value_name = "SPEC")]
    pub guest: GuestSpec,
}

/// Options of `virtio-rdmad set`.
#[derive(Args, Debug)]
pub struct SetOptions {
    #[command(flatten)]
    pub running: Running,

    /// The name of the guest.
    pub name: String,

    /// What changes: gid, vlan, dscp, pcp, cnp-dscp, rate, message-rate, qps, cqs, srqs, mrs, mws, pds, groups or
    /// memory, as in --guest. What is not named stays. The value "default" stands for a guest without that key.
    ///
    /// An address that the guest may not use any more is nobody's, as if the guest had removed it, until
    /// the guest may use it again. A limit below what the guest has counts for what it makes from now on.
    #[arg(value_name = "KEY=VALUE[,KEY=VALUE...]")]
    pub policy: PolicyChange,
}

/// Options of `virtio-rdmad reload`.
#[derive(Args, Debug)]
pub struct ReloadOptions {
    #[command(flatten)]
    pub running: Running,

    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}

/// Options of `virtio-rdmad remove`.
#[derive(Args, Debug)]
pub struct RemoveOptions {
    #[command(flatten)]
    pub running: Running,

    /// If the VMM of the guest is connected, remove the guest when the VMM leaves, and let no other one
    /// connect. Otherwise that is an error.
    #[arg(long)]
    pub drain: bool,

    /// The name of the guest.
    pub name: String,
}

/// Options of `virtio-rdmad check`.
#[derive(Args, Debug)]
pub struct CheckOptions {
    /// The configuration file.
    #[arg(value_name = "FILE")]
    pub config: PathBuf,
}

/// Options of `virtio-rdmad watch`.
#[derive(Args, Debug)]
pub struct WatchOptions {
    #[command(flatten)]
    pub running: Running,

    /// Print JSON, an object on each line.
    #[arg(long)]
    pub json: bool,
}

/// Options of `virtio-rdmad trace`.
#[derive(Args, Debug)]
pub struct TraceOptions {
    #[command(flatten)]
    pub running: Running,

    /// The number of a queue pair: print what happens to its messages alone.
    #[arg(long, value_name = "N")]
    pub qpn: Option<u32>,

    /// Print JSON, an object on each line.
    #[arg(long)]
    pub json: bool,

    /// The name of the guest.
    pub guest: String,
}

/// Options of `virtio-rdmad capture`.
#[derive(Args, Debug)]
pub struct CaptureOptions {
    #[command(flatten)]
    pub running: Running,

    /// The name of the guest.
    #[arg(long, value_name = "NAME")]
    pub guest: String,

    /// The number of a queue pair: write its frames alone.
    #[arg(long, value_name = "N")]
    pub qpn: Option<u32>,

    /// Write the first bytes of each frame alone, so many at most.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub snaplen: Option<u32>,

    /// End after so many frames.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// The file, in the format pcapng; - for standard output.
    pub file: PathBuf,
}

/// Options of `virtio-rdmad top`.
#[derive(Args, Debug)]
pub struct TopOptions {
    #[command(flatten)]
    pub running: Running,

    /// Seconds between two views.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,

    /// Print one view, of one interval, and end.
    #[arg(long)]
    pub once: bool,
}

/// Options of `virtio-rdmad metrics`.
#[derive(Args, Debug)]
pub struct MetricsOptions {
    #[command(flatten)]
    pub running: Running,
}

/// A feature that earlier versions of virtio-rdmad do not know.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Feature {
    /// `VIRTIO_RDMA_F_PAGE_SIZES`.
    PageSizes,
    /// `VIRTIO_RDMA_F_RESET_TO_RTR`.
    ResetToRtr,
}

impl Feature {
    /// Returns its bit.
    pub fn bit(self) -> u64 {
        match self {
            Self::PageSizes => 1 << abi::VIRTIO_RDMA_F_PAGE_SIZES,
            Self::ResetToRtr => 1 << abi::VIRTIO_RDMA_F_RESET_TO_RTR,
        }
    }
}

/// Returns the interval between two views, which is given in seconds.
pub fn interval(seconds: &str) -> Result<Duration, String> {
    let seconds: f64 = seconds.parse().map_err(|_| "this is no number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("the interval must be from 0.1 to 3600 seconds".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn the_manual_page_has_all_options() {
        let mut program = Options::command();
        program.build();
        let own = (String::new(), program.render_long_help().to_string());
        let is_shown =
            |command: &&mut clap::Command| command.get_name() != "help" && !command.is_hide_set();
        let help = |command: &mut clap::Command| {
            (command.get_name().to_owned(), command.render_long_help().to_string())
        };
        let commands = program.get_subcommands_mut().filter(is_shown).map(help);
        let page = include_str!("../../../../virtio-rdmad.8");
        testkit::manual::check(page, std::iter::once(own).chain(commands));
    }

    #[test]
    fn intervals_have_bounds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "x", "0", "-1", "0.01", "3601", "nan", "inf", "1e99"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
