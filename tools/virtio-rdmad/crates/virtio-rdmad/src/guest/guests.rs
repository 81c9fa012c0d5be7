// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guests of the process, which come and go.
//!
//! A guest has an index while it is there, by which the threads name it. A guest without a VMM may leave, and another
//! one gets its index then.

use std::collections::{HashMap, HashSet};
use std::io::Error;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use engine::{DeviceConfig, Fabric, FabricConfig};
use memory::{Pool, Share, ALL_REGIONS, GUARANTEED};
use network::{Mac, Nic, Switch};
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;
use rustix::process::{getrlimit, Resource};

use super::events::Events;
use super::mailbox::{least, Mailbox};
use super::{Guest, Link, NO_NODE};
use crate::handover::{Connected, Kept, Manager};
use crate::os::socket::Socket;
use crate::spec::{GuestSpec, Origin, PolicyChange, SpecError, MAX_GUESTS};

/// Descriptors that a guest may need besides those of its queues and its memory: for the sockets of its VMM and of its
/// network interface, each of which is kept for a later process as well, and for what keeps them.
const DESCRIPTORS: u64 = 16;

/// Descriptors that guests leave to the process itself: to workers, uplinks and clients of the control socket.
const RESERVED: u64 = 512;

/// The time for which a client that has added a guest waits for a service manager that does not read.
const MANAGER_READS: Duration = Duration::from_secs(1);

/// The reason why a guest cannot come.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AddError {
    /// Another guest has its name.
    #[error("two guests have the name \"{0}\"")]
    Name(String),
    /// Another guest of its network has its MAC address.
    #[error("two guests of network \"{0}\" have the same MAC address")]
    Mac(String),
    /// There are as many guests as there can be.
    #[error("there are {MAX_GUESTS} guests, which is the most")]
    TooMany,
    /// Too few regions of memory are left that the process can map.
    #[error(
        "a guest needs {GUARANTEED} regions of memory, and the process can map {left} more of {total}"
    )]
    Memory {
        /// The number of regions that are left.
        left: usize,
        /// The number of regions that all guests together can have.
        total: usize,
    },
    /// The other guests may have all descriptors that the process can have.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// Its network is one that no guest can come to later, for this reason.
    #[error("network \"{network}\": {reason}")]
    Network {
        /// The network.
        network: String,
        /// The reason.
        reason: &'static str,
    },
}

/// The guests may have all descriptors that the process can have.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the guest may need {needed} descriptors, and the process can have {left} more")]
pub struct TooFewDescriptors {
    /// The number of descriptors that the guest may need.
    pub needed: u64,
    /// The number of descriptors that no guest has yet.
    pub left: u64,
}

/// The reason why a guest cannot leave.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RemoveError {
    /// There is no guest of this name.
    #[error("no guest has the name \"{0}\"")]
    Unknown(String),
    /// Its VMM is connected.
    #[error("the VMM of guest \"{0}\" is connected")]
    Connected(String),
}

/// The reason why the policy of a guest cannot change.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum SetError {
    /// There is no guest of this name.
    #[error("no guest has the name \"{0}\"")]
    Unknown(String),
    /// The guest would not be right any more.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The guests.
pub struct Guests {
    slots: RwLock<Vec<Option<Arc<Guest>>>>,
    /// The networks that are there for as long as the process, by name.
    fixed: HashMap<String, Arc<Fabric>>,
    /// The other networks that have guests.
    others: Mutex<HashMap<String, Arc<Fabric>>>,
    /// The switches, by network.
    switches: HashMap<String, Arc<Switch>>,
    /// Locked by whoever tells an uplink which guests there are.
    telling: Mutex<()>,
    mailboxes: Arc<[Mailbox]>,
    events: Arc<Events>,
    /// An eventfd, written to when a guest has come or gone, or is served no longer.
    changes: OwnedFd,
    keeper: Option<Keeper>,
    /// The number of descriptors that all guests may have, those of their memory among them.
    descriptors: u64,
    /// The regions of memory that all guests may have.
    regions: Arc<Pool>,
    /// The feature bits that no guest is offered.
    withheld: u64,
}

/// Keeps guests for a later process.
struct Keeper {
    manager: Arc<Manager>,
    /// The number of the next guest.
    next: AtomicU64,
}

/// A guest that comes.
pub struct Arriving {
    /// The specification of the guest.
    pub spec: GuestSpec,
    /// The socket to which the VMM connects.
    pub socket: Socket,
    /// Its network interface, which its switch does not have yet.
    pub nic: Option<Nic>,
    /// The socket to which the VMM connects for a network interface, if the guest has one.
    pub nic_socket: Option<Arc<Socket>>,
    /// The share that it has of the regions of memory that the process can map.
    pub memory: Share,
    /// The state that an earlier process has left of the guest.
    pub kept: Option<Kept>,
    /// The origin that has named the guest.
    pub origin: Origin,
}

#[cfg(test)]
impl Arriving {
    /// Returns a guest of the command line whose VMM connects to this path, for tests.
    pub fn at(path: &std::path::Path, name: &str) -> Self {
        Self {
            spec: format!("name={name},vhost-user={}", path.display()).parse().unwrap(),
            socket: Socket::bind(
                path,
                crate::os::socket::Kind::Stream,
                &crate::os::access::Access::default(),
            )
            .unwrap(),
            nic: None,
            nic_socket: None,
            memory: Share::default(),
            kept: None,
            origin: Origin::CommandLine,
        }
    }
}

impl Guests {
    /// Makes a process without guests, whose workers serve those that come. These networks stay, and have these
    /// switches.
    pub fn new(
        fixed: HashMap<String, Arc<Fabric>>,
        switches: HashMap<String, Arc<Switch>>,
        mailboxes: Arc<[Mailbox]>,
        events: Arc<Events>,
    ) -> Result<Self, Errno> {
        let changes = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (slots, others, telling, keeper) = Default::default();
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let descriptors = limit.saturating_sub(RESERVED);
        Ok(Self {
            slots,
            fixed,
            others,
            switches,
            telling,
            mailboxes,
            events,
            changes,
            keeper,
            descriptors,
            regions: pool_for(descriptors),
            withheld: 0,
        })
    }

    /// Does not offer these feature bits to the guests that come.
    pub fn withhold(&mut self, features: u64) {
        self.withheld = features;
    }

    /// Makes the service manager keep the guests that come, for a later process. Numbers below `next` are in use.
    pub fn keep(&mut self, manager: Arc<Manager>, next: u64) {
        self.keeper = Some(Keeper { manager, next: next.into() });
    }

    /// Waits until the service manager has been told of all guests that are to be kept, but not long. Returns whether
    /// it has.
    pub fn are_kept(&self) -> bool {
        self.keeper.as_ref().is_none_or(|keeper| keeper.manager.flush(MANAGER_READS))
    }

    /// Returns an eventfd that is readable when a guest has come or gone, or is served no longer. The main thread
    /// waits for it.
    pub fn changes(&self) -> &OwnedFd {
        &self.changes
    }

    /// Returns the guests that are there, in the order of their indices.
    pub fn all(&self) -> Vec<Arc<Guest>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().flatten().cloned().collect()
    }

    /// Returns the guest with this index.
    pub fn get(&self, index: u32) -> Option<Arc<Guest>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(index as usize)?.clone()
    }

    /// Returns the share that a guest which the process must have gets of the regions of memory.
    pub fn share_anyway(&self) -> Share {
        self.regions.share_anyway()
    }

    /// Adds a guest while the process runs, or one that was added to an earlier process, which has left this of it. Its
    /// VMM connects to this socket, and to the other one for a network interface (`nic=`). A guest of an earlier
    /// process is not refused because the process has too many regions of memory or descriptors.
    pub fn add_one_more(
        &self,
        spec: GuestSpec,
        socket: Socket,
        nic: Option<Socket>,
        kept: Option<Kept>,
        origin: Origin,
    ) -> Result<Arc<Guest>, AddError> {
        let nic_socket = nic.map(Arc::new);
        let nic = self.make_nic(&spec, nic_socket.as_ref())?;
        let memory = if kept.is_some() { self.share_anyway() } else { self.share_of_new(&spec)? };
        let guest = self.add(Arriving { spec, socket, nic, nic_socket, memory, kept, origin })?;
        let GuestSpec { name, network, .. } = &guest.spec;
        if let Err(error) = self.tell_uplink(network) {
            tracing::error!(guest = name, %error, "its uplink carries no packets to it");
            // A VMM may have connected meanwhile.
            let _ = self.remove(name, true);
            let reason = "its uplink can carry no packets to one more guest";
            return Err(AddError::Network { network: network.clone(), reason });
        }
        Ok(guest)
    }

    /// Returns the share that a new guest gets of the regions of memory, if there are descriptors for it as well.
    fn share_of_new(&self, spec: &GuestSpec) -> Result<Share, AddError> {
        self.check_descriptors(descriptors_of(spec))?;
        let refused =
            || AddError::Memory { left: self.regions.left(), total: self.regions.total() };
        self.regions.share().ok_or_else(refused)
    }

    /// Checks that there are so many descriptors more, however many the guests need yet.
    fn check_descriptors(&self, needed: u64) -> Result<(), TooFewDescriptors> {
        let of_guests: u64 = self.all().iter().map(|guest| descriptors_of(&guest.spec)).sum();
        let used = of_guests + self.regions.total() as u64;
        let left = self.descriptors.saturating_sub(used);
        if needed > left {
            return Err(TooFewDescriptors { needed, left });
        }
        Ok(())
    }

    /// Makes the network interface of a guest, if it is to have one, whose VMM connects to this socket.
    fn make_nic(
        &self,
        spec: &GuestSpec,
        socket: Option<&Arc<Socket>>,
    ) -> Result<Option<Nic>, AddError> {
        let refuse = |reason| AddError::Network { network: spec.network.clone(), reason };
        let (Some(_), Some(mac)) = (&spec.nic, spec.mac()) else { return Ok(None) };
        let socket = socket.ok_or_else(|| refuse("the socket of its interface is not there"))?;
        let switch = self.switches.get(&spec.network).ok_or_else(|| {
            refuse("it has no switch for nic=: no guest had nic= when the process started")
        })?;
        if !switch.takes_nics() {
            return Err(refuse("its uplink was opened without guests that have nic="));
        }
        Ok(Some(Nic::new(&spec.name, mac, spec.transport().framing(), socket.clone())))
    }

    /// Tells the uplink of a network, if it has one, which guests there are.
    fn tell_uplink(&self, network: &str) -> Result<(), Error> {
        let switch = self.switches.get(network);
        let Some(uplink) = switch.and_then(|switch| switch.uplink.as_ref()) else { return Ok(()) };
        // Nobody else tells it of other guests meanwhile. Workers do not wait for the kernel's interfaces here.
        let _told = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let guests = self.all();
        let specs = guests.iter().map(|guest| &guest.spec);
        let stations = stations(specs.filter(|spec| spec.network == network));
        uplink.set_stations(stations.as_deref())
    }

    /// Takes guests that have gone out of their networks.
    fn disconnect<'a>(&self, gone: impl Iterator<Item = &'a Arc<Guest>>) {
        for guest in gone {
            if let Some(switch) = self.switches.get(&guest.spec.network) {
                switch.remove_nic(&guest.spec.name);
            }
            if let Err(error) = self.tell_uplink(&guest.spec.network) {
                tracing::warn!(guest = guest.spec.name, %error, "its uplink carries packets to it");
            }
        }
    }

    /// Adds a guest.
    pub fn add(&self, mut arriving: Arriving) -> Result<Arc<Guest>, AddError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let spec = &arriving.spec;
        check(spec, slots.iter().flatten())?;
        let at = slots.iter().position(Option::is_none).unwrap_or(slots.len());
        if at >= MAX_GUESTS {
            return Err(AddError::TooMany);
        }
        let index = u32::try_from(at).map_err(|_| AddError::TooMany)?;
        let fabric = self.fabric(&spec.network, slots.iter().flatten());
        let kept = self.kept(&mut arriving);
        let nic = arriving.nic.take();
        let guest = Arc::new(self.make(&fabric, index, arriving, kept));
        if at == slots.len() {
            slots.push(None);
        }
        slots[at] = Some(guest.clone());
        drop(slots);
        if let Some((switch, nic)) = self.switches.get(&guest.spec.network).zip(nic) {
            switch.add_nic(nic);
        }
        self.note_change();
        Ok(guest)
    }

    fn make(&self, fabric: &Fabric, index: u32, arriving: Arriving, kept: Option<Kept>) -> Guest {
        let Arriving { spec, socket, nic_socket, memory, origin, .. } = arriving;
        let (name, mailboxes) = (spec.name.clone(), self.mailboxes.clone());
        mailboxes.iter().for_each(|mailbox| mailbox.cover(index));
        let link = Arc::new(Link::new(mailboxes, index, name.clone(), self.events.clone()));
        let device = fabric.add_device(DeviceConfig {
            name,
            mac: spec.mac(),
            limits: spec.limits(),
            policy: spec.policy(),
            paths: spec.paths(),
            wake: link.clone(),
        });
        let (rings, work, seat) = Default::default();
        let leaves = kept.as_ref().is_some_and(Kept::leaves).into();
        let named = kept.as_ref().map_or(&spec, Kept::named).clone().into();
        let kept = kept.map(Mutex::new);
        let current = Mutex::new(spec.clone());
        Guest {
            spec,
            current,
            named,
            origin,
            index,
            device,
            withheld: self.withheld,
            link,
            rings,
            work,
            node: NO_NODE.into(),
            memory,
            socket,
            nic_socket,
            seat,
            leaves,
            kept,
        }
    }

    /// Returns the state of a guest that is kept for a later process: that of an earlier process, or a new one.
    fn kept(&self, arriving: &mut Arriving) -> Option<Kept> {
        let Keeper { manager, next } = self.keeper.as_ref()?;
        if let Some(mut kept) = arriving.kept.take() {
            kept.go_on(&arriving.spec, arriving.origin);
            return Some(kept);
        }
        // A later process makes the sockets of its command line and its file itself.
        let is_called = arriving.origin == Origin::Call;
        let sockets = std::iter::once(&arriving.socket).chain(arriving.nic_socket.as_deref());
        let copy = |socket: &Socket| socket.listener().try_clone().map(OwnedFd::from);
        let listeners: Result<Vec<_>, _> = sockets.filter(|_| is_called).map(copy).collect();
        let number = next.fetch_add(1, Ordering::Relaxed);
        Kept::new(manager, number, &arriving.spec, arriving.origin, listeners.ok()?)
    }

    /// Returns the fabric of a network, which may be a new one. Those that none of these guests is in go.
    fn fabric<'a>(
        &self,
        network: &str,
        guests: impl Iterator<Item = &'a Arc<Guest>>,
    ) -> Arc<Fabric> {
        if let Some(fabric) = self.fixed.get(network) {
            return fabric.clone();
        }
        let used: HashSet<&str> = guests.map(|guest| guest.spec.network.as_str()).collect();
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|name, _| used.contains(name.as_str()));
        let make =
            || Fabric::new(FabricConfig { name: network.to_owned(), ..FabricConfig::default() });
        others.entry(network.to_owned()).or_insert_with(make).clone()
    }

    /// Removes the guest of this name, which is an error while its VMM is connected. With `drain` it leaves when its
    /// VMM does, and no other VMM can connect before that. Returns the guest.
    pub fn remove(&self, name: &str, drain: bool) -> Result<Arc<Guest>, RemoveError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let found = slots.iter_mut().find_map(|slot| {
            let guest = slot.clone().filter(|guest| guest.spec.name == name)?;
            Some((slot, guest))
        });
        let Some((slot, guest)) = found else {
            return Err(RemoveError::Unknown(name.to_owned()));
        };
        if guest.link.worker().is_none() {
            *slot = None;
            guest.end();
        } else if drain {
            guest.leave_with_vmm();
        } else {
            return Err(RemoveError::Connected(name.to_owned()));
        }
        drop(slots);
        if guest.link.worker().is_none() {
            self.disconnect(std::iter::once(&guest));
        }
        self.note_change();
        Ok(guest)
    }

    /// Changes the policy of the guest of this name while the process runs; with `in_file` because the configuration
    /// file of the process says so. Returns the present specification.
    pub fn set_policy(
        &self,
        name: &str,
        change: &PolicyChange,
        in_file: bool,
    ) -> Result<GuestSpec, SetError> {
        let guest = self.all().into_iter().find(|guest| guest.spec.name == name);
        let guest = guest.ok_or_else(|| SetError::Unknown(name.to_owned()))?;
        Ok(guest.set_policy(change, in_file && guest.origin == Origin::File)?)
    }

    /// Removes the guests that were to leave with their VMMs, which are gone now. The main thread calls this.
    pub fn sweep(&self) {
        let has_left = |guest: &Arc<Guest>| {
            guest.leaves.load(Ordering::Relaxed) && guest.link.worker().is_none()
        };
        if !self.all().iter().any(has_left) {
            return;
        }
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> =
            slots.iter_mut().filter_map(|slot| slot.take_if(|guest| has_left(guest))).collect();
        drop(slots);
        for guest in &gone {
            guest.end();
            tracing::info!(guest = guest.spec.name, "removed");
        }
        self.disconnect(gone.iter());
    }

    /// Accepts the VMM of the guest with this index, if one waits, and gives the guest to the worker that has the
    /// fewest guests. A VMM that comes while the guest has another one is disconnected. The main thread calls this.
    pub fn accept(&self, index: u32) -> Result<(), Error> {
        // A guest does not leave meanwhile.
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(guest)) = slots.get(index as usize) else { return Ok(()) };
        if guest.link.worker().is_some() {
            return refuse_another(guest);
        }
        if guest.leaves.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Some(stream) = guest.socket.accept()? else { return Ok(()) };
        if guest.is_fenced() {
            let name = &guest.spec.name;
            tracing::warn!(
                guest = name,
                "a VMM is refused: processes have aborted while they served the guest"
            );
            return Ok(());
        }
        let Some(worker) = least(&self.mailboxes) else { return Ok(()) };
        guest.seat.take(&stream)?;
        guest.link.set_worker(Some(worker));
        let connected = Connected { stream, said: None };
        let served = self.mailboxes[worker].serve(index, connected);
        if served.is_err() {
            // The worker has just retired. The VMM is disconnected, and may connect again.
            guest.seat.leave();
            guest.link.set_worker(None);
        }
        Ok(())
    }

    /// Makes the main thread look at the guests. Any thread may call this.
    pub fn note_change(&self) {
        // If the counter is full, the main thread has not seen an earlier event yet, and will look.
        let _ = rustix::io::write(&self.changes, &1_u64.to_ne_bytes());
    }
}

/// Returns the MAC addresses of guests; `None` if one of them has an address that is not known.
pub fn stations<'a>(guests: impl Iterator<Item = &'a GuestSpec>) -> Option<Vec<Mac>> {
    guests.map(GuestSpec::mac).collect()
}

/// Disconnects a VMM that has connected to a guest that has its VMM, unless that one has ended.
fn refuse_another(guest: &Guest) -> Result<(), Error> {
    if guest.seat.awaits() || guest.socket.accept()?.is_none() {
        return Ok(());
    }
    if guest.seat.refuse() {
        let name = &guest.spec.name;
        tracing::warn!(
            guest = name,
            "another VMM is refused: the guest has its VMM (further ones are only counted)"
        );
    }
    Ok(())
}

/// Returns how many descriptors a guest may need besides those of its memory: two for each of its queues, and some
/// more.
fn descriptors_of(spec: &GuestSpec) -> u64 {
    let queues: u64 = spec.limits().queue_count(spec.paths()).into();
    2 * queues + DESCRIPTORS
}

/// Returns the regions of memory of all guests of a process that may have so many descriptors. A region takes one
/// descriptor, and at least half of the descriptors are for something else.
fn pool_for(descriptors: u64) -> Arc<Pool> {
    Pool::new(usize::try_from(descriptors / 2).unwrap_or(ALL_REGIONS))
}

/// Checks that a guest has neither the name nor the MAC address of another one.
fn check<'a>(
    spec: &GuestSpec,
    others: impl Iterator<Item = &'a Arc<Guest>>,
) -> Result<(), AddError> {
    for other in others.map(|guest| &guest.spec) {
        if other.name == spec.name {
            return Err(AddError::Name(spec.name.clone()));
        }
        if other.network == spec.network && other.mac().is_some() && other.mac() == spec.mac() {
            return Err(AddError::Mac(spec.network.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::os::socket::Kind;

    /// Makes a process that may have so many descriptors for guests.
    fn guests_with(descriptors: u64) -> Guests {
        Guests { descriptors, regions: pool_for(descriptors), ..guests() }
    }

    fn guests() -> Guests {
        let workers = Arc::new([Mailbox::new(None).unwrap()]);
        let events = Arc::new(Events::new().unwrap());
        Guests::new(HashMap::new(), HashMap::new(), workers, events).unwrap()
    }

    /// Makes a socket, as one that comes with a call.
    fn socket() -> Socket {
        let directory = std::env::temp_dir().join(format!("rdmad-guests-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("{:?}", std::thread::current().id()));
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        Socket::passed(listener.into(), Kind::Stream).unwrap()
    }

    /// Adds a guest, as a client of the control socket does.
    fn add(guests: &Guests, keys: &str) -> Result<Arc<Guest>, AddError> {
        let spec = format!("vhost-user=/s,{keys}").parse().unwrap();
        guests.add_one_more(spec, socket(), None, None, Origin::Call)
    }

    #[test]
    fn guests_differ() {
        let guests = guests();
        add(&guests, "name=a,mac=52:54:00:00:00:01").unwrap();
        let refused = |keys| add(&guests, keys).err().unwrap();
        assert_eq!(refused("name=a"), AddError::Name("a".to_owned()));
        let mac = refused("name=b,mac=52:54:00:00:00:01");
        assert_eq!(mac, AddError::Mac("default".to_owned()));
        add(&guests, "name=b,network=other,mac=52:54:00:00:00:01").unwrap();
        let other = refused("name=c,mac=52:54:00:00:00:03,network=other,nic=/n");
        assert!(matches!(other, AddError::Network { network, .. } if network == "other"));
        assert_eq!(guests.all().len(), 2);
    }

    #[test]
    fn a_guest_that_has_left_leaves_its_index() {
        let guests = guests();
        for name in ["a", "b", "c"] {
            add(&guests, &format!("name={name},network={name}")).unwrap();
        }
        let gone = guests.remove("b", false).unwrap();
        assert_eq!(gone.index, 1);
        assert_eq!(guests.remove("b", true).err(), Some(RemoveError::Unknown("b".to_owned())));
        assert!(guests.get(1).is_none());
        assert_eq!(add(&guests, "name=d").unwrap().index, 1);
        assert!(!guests.others.lock().unwrap().contains_key("b"), "its network is gone, too");
    }

    #[test]
    fn a_guest_leaves_with_its_vmm() {
        let guests = guests();
        let guest = add(&guests, "name=a").unwrap();
        guest.link.set_worker(Some(0));
        assert_eq!(guests.remove("a", false).err(), Some(RemoveError::Connected("a".to_owned())));
        guests.remove("a", true).unwrap();
        guests.sweep();
        assert_eq!(guests.all().len(), 1);
        guest.link.set_worker(None);
        guests.sweep();
        assert!(guests.all().is_empty());
    }

    #[test]
    fn policies_change_one_key_at_a_time() {
        let guests = guests();
        let guest = add(&guests, "name=a,rate=1G,qps=9").unwrap();
        let set = |name, change: &str| guests.set_policy(name, &change.parse().unwrap(), false);
        let spec = set("a", "qps=7,pds=3").unwrap();
        assert_eq!(spec.to_string(), "name=a,vhost-user=/s,rate=1G,qps=7,pds=3");
        let spec = set("a", "rate=default").unwrap();
        assert_eq!(spec.to_string(), "name=a,vhost-user=/s,qps=7,pds=3");
        let quota = guest.device.status().quota;
        assert_eq!((quota.qps, quota.pds, quota.wire_rate), (7, 3, None));
        assert_eq!(guest.current(), spec);
        assert_eq!(set("b", "qps=7"), Err(SetError::Unknown("b".to_owned())));
    }

    #[test]
    fn a_guest_too_many_is_refused() {
        let guests = guests_with(1 << 20);
        let refused = (0..=MAX_GUESTS).find_map(|at| add(&guests, &format!("name=g{at}")).err());
        assert_eq!(refused, Some(AddError::TooMany));
    }

    /// Guests that come one by one, as many as a host may have, fit into what the service may open.
    #[test]
    fn hundreds_of_guests_fit() {
        let guests = guests_with(524_288 - RESERVED);
        for at in 0..300 {
            let added = add(&guests, &format!("name=g{at}")).map(|_| ());
            assert_eq!(added, Ok(()), "guest {at}");
        }
        assert_eq!(guests.regions.left(), ALL_REGIONS - 300 * GUARANTEED);
    }

    #[test]
    fn guests_have_as_many_regions_as_there_are() {
        let regions = Pool::new(2 * GUARANTEED - 1);
        let guests = Guests { regions, ..guests_with(1 << 20) };
        add(&guests, "name=a").unwrap();
        let (left, total) = (GUARANTEED - 1, 2 * GUARANTEED - 1);
        let refused = add(&guests, "name=b").err().unwrap();
        assert_eq!(refused, AddError::Memory { left, total });
        guests.remove("a", false).unwrap();
        add(&guests, "name=b").unwrap();
    }

    #[test]
    fn guests_have_as_many_descriptors_as_there_are() {
        let mut guests = guests_with(1 << 20);
        let first = add(&guests, "name=a").unwrap();
        let of_memory = guests.regions.total() as u64;
        guests.descriptors = of_memory + 2 * descriptors_of(&first.spec) - 1;
        drop(first);
        let refused = add(&guests, "name=b").err().unwrap();
        let AddError::Descriptors(too_few) = refused else { panic!("{refused}") };
        assert_eq!(too_few.needed, too_few.left + 1);
        add(&guests, "name=c,rings=off,max-qp=2,max-cq=2").unwrap();
        guests.remove("a", false).unwrap();
        add(&guests, "name=b").unwrap();
    }
}
