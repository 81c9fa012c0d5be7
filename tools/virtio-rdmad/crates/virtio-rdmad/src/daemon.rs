// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process: its guests, its workers, its signals.

use std::collections::{HashMap, HashSet};
use std::io::Error;
use std::num::{NonZeroU64, NonZeroU8};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blame::Board;
use engine::{Fabric, FabricConfig};
use memory::Helpers;
use network::{Intake, Nic, Switch, Uplink};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use rustix::thread::{sched_setaffinity, set_current_timer_slack, CpuSet};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::cli::options::{self, Options};
use crate::control::{self, Surveyed};
use crate::guest::events::Events;
use crate::guest::guests::{stations, AddError, Arriving, Guests};
use crate::guest::mailbox::Mailbox;
use crate::guest::trace::Traces;
use crate::guest::Guest;
use crate::handover::{self, Connected, Inherited, Kept, Left, Listeners, Manager};
use crate::os::access::Access;
use crate::os::cpus::Nodes;
use crate::os::log;
use crate::os::privileges;
use crate::os::remover::Remover;
use crate::os::sandbox::{self, Filters, SandboxError};
use crate::os::socket::{Kind, Socket};
use crate::spec::{GuestSpec, Origin, SpecError, MAX_GUESTS};
use crate::worker::balance::Balance;
use crate::worker::crew::{Assigned, Crew, NotPrepared};
use crate::worker::{Passing, Resumed, Worker};

/// The time to wait when no connection can be accepted, for example because there are too many descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The time that the process waits for a service manager that does not read, before it says in the log that it is
/// ready.
const MANAGER_READY: Duration = Duration::from_secs(1);

/// The reason why the process cannot start, or why it ends.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A guest cannot be added.
    #[error(transparent)]
    Guest(#[from] AddError),
    /// Two sockets have one path.
    #[error("two sockets at {0}")]
    Path(PathBuf),
    /// The options name a socket of a guest that was added, which they do not name.
    #[error("{path}: is the socket of guest \"{guest}\", which was added: give that guest's name, or another path")]
    Taken {
        /// The path.
        path: PathBuf,
        /// The guest.
        guest: String,
    },
    /// Two uplinks are for one network.
    #[error("two uplinks for network \"{0}\"")]
    Uplink(String),
    /// An uplink is for a network that has no guest.
    #[error("an uplink for network \"{0}\", which has no guest")]
    NoGuest(String),
    /// An uplink is not right.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An uplink cannot be opened.
    #[error("{name}: {error}")]
    Way {
        /// The name of the way by which the uplink carries packets.
        name: String,
        /// The reason.
        error: Error,
    },
    /// There are more workers than CPUs to pin them to.
    #[error("{workers} workers and only {cpus} CPUs to pin them to")]
    Cpus {
        /// The number of workers.
        workers: usize,
        /// The number of CPUs.
        cpus: usize,
    },
    /// A worker cannot start.
    #[error("worker {index}: {error}")]
    Worker {
        /// The index of the worker.
        index: usize,
        /// The reason.
        error: String,
    },
    /// The process cannot be confined.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The process that removes the sockets cannot start.
    #[error("sandbox: the process that removes the sockets: {0} (--sandbox=off goes without)")]
    Remover(Error),
    /// The operating system refused something.
    #[error("{0}")]
    Os(#[from] Error),
}

/// Serves guests until SIGTERM or SIGINT.
pub fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    check(options)?;
    let manager = service_manager().map(Arc::new);
    memory::survive_losses()?;
    raise_descriptor_limit();
    check_signals();
    // Signals are caught from here on, so that no socket stays behind.
    let (signals, is_asked) = signals()?;
    let keeper = manager.clone().filter(|manager| manager.keeps_descriptors());
    let mut inherited = Inherited::default();
    if let Some(keeper) = &keeper {
        inherited = Inherited::take(keeper, options.forget_unreadable)?;
    }
    let mut listeners = std::mem::take(&mut inherited.listeners);
    adopt_sockets(options, &mut inherited, &mut listeners)?;
    let control = control_socket(options, &mut listeners)?;
    let nodes = Nodes::read();
    let workers = mailboxes(options, &nodes)?;
    let helpers = helpers(&workers);
    let mut interfaces = interfaces(options, &mut listeners, &inherited)?;
    let copiers = shares_copies(options, &workers).then_some(&helpers);
    let networks = networks(options, &mut interfaces, copiers, lanes(&workers))?;
    let switches: Vec<_> = networks.values().filter_map(|network| network.switch.clone()).collect();
    let intakes: Vec<_> = networks.values().flat_map(|network| network.intakes.clone()).collect();
    let events = Arc::new(Events::new().map_err(Error::from)?);
    let fabrics = networks.iter().map(|(name, network)| (name.clone(), network.fabric.clone()));
    let of_networks =
        networks.iter().filter_map(|(name, network)| Some((name.clone(), network.switch.clone()?)));
    let guests =
        Guests::new(fabrics.collect(), of_networks.collect(), workers.clone(), events.clone());
    let mut guests = guests.map_err(Error::from)?;
    guests.withhold(options.withhold.iter().fold(0, |bits, feature| bits | feature.bit()));
    if let Some(keeper) = &keeper {
        guests.keep(keeper.clone(), inherited.next);
    }
    let guests = Arc::new(guests);
    let paused = inherited.paused_since();
    let board = inherited.board.take();
    let added = add_guests(options, &guests, inherited, &mut listeners, interfaces.sockets)?;
    listeners.remove_rest();
    if options.sandbox == options::Switch::On || options.user.is_some() {
        privileges::give_up(options.user)?;
    }
    // This is dropped before the guests are. So the files of the sockets are gone before nobody listens.
    let (mut remover, filters) = confine(options, !listeners.is_empty())?.unzip();
    start_helpers(filters.as_ref(), manager.as_deref())?;
    let mut made = make_workers(options, &workers, &guests, &intakes, &helpers, added.resumed)?;
    if let Some(board) = &board {
        blame::mark_aborts()?;
        let words = made
            .iter_mut()
            .enumerate()
            .filter_map(|(at, (worker, _))| Some((worker, board.word(at)?)));
        for (worker, word) in words {
            worker.say_in(word);
        }
    }
    let crew = start(options, &nodes, &workers, made, filters.as_ref())?;
    let settings = options.file.settings();
    let sockets = Sockets { control, guests: guests.clone() };
    let surveyed =
        Surveyed { guests: guests.clone(), workers: workers.clone(), switches, settings };
    let control = sockets.control.clone();
    let (end, control_thread) = start_control(control, surveyed, events, filters.as_ref())?;
    let (switch_end, switch_threads) = start_switches(networks, filters.as_ref())?;
    if let Some(filters) = &filters {
        filters.confine()?;
    }
    // Nothing of what an earlier process has left was changed so far. Nothing can fail from here on.
    let unreadable = crew.load();
    if !options.forget_unreadable {
        unreadable.into_iter().next().map_or(Ok(()), Err)?;
    }
    added.changes.iter().for_each(|change| change());
    board.iter().for_each(Board::clear);
    crew.serve();
    sockets.own(&mut remover);
    if let Some(keeper) = &keeper {
        listeners.forget(keeper);
    }
    tell(manager.as_deref(), "READY=1");
    if let Some(manager) = &manager {
        manager.flush(MANAGER_READY);
    }
    tracing::info!(guests = guests.all().len(), workers = workers.len(), "ready");
    if let Some(since) = paused {
        tracing::info!(milliseconds = since.elapsed().as_millis(), "guests were paused");
    }
    let result = wait(&signals, &guests, Balance::new(workers.clone()));
    tell(manager.as_deref(), "STOPPING=1");
    drop((end, switch_end));
    workers.iter().for_each(Mailbox::stop);
    if let Some(keeper) = keeper.as_ref().filter(|_| is_asked.load(Ordering::SeqCst)) {
        sockets.leave(keeper, &mut remover);
    }
    crew.end(keeper.is_some());
    for thread in control_thread.into_iter().chain(switch_threads) {
        let _ = thread.join();
    }
    if let Some(manager) = manager {
        manager.flush(handover::PATIENCE);
    }
    tracing::info!("ends");
    Ok(result?)
}

/// Allows this process as many descriptors as the system does. A guest takes some for its memory and
/// one for each of its interrupts.
fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(?current, ?maximum, "limit of open descriptors raised"),
        Err(error) => tracing::warn!(%error, ?current, "the limit of open descriptors stays"),
    }
}

/// Warns if an interrupt of a guest can wait for its VMM on this kernel.
fn check_signals() {
    if let Err(error) = descriptor::prepare() {
        tracing::warn!(
            %error,
            "no asynchronous reads (io_setup): a VMM can let the worker of its guest wait"
        );
    }
}

/// Starts the threads that do what a worker must not wait for: one closes descriptors whose file system may make it
/// wait for ever, one unmaps memory, one writes the log, and one sends to the service manager.
fn start_helpers(filters: Option<&Filters>, manager: Option<&Manager>) -> Result<(), DaemonError> {
    let confine = |job: &'static str| {
        let filters = filters.cloned();
        move || {
            if let Some(Err(error)) = filters.map(|filters| filters.confine_worker()) {
                tracing::error!(%error, "the thread that {job} is not confined");
            }
        }
    };
    log::start_writer(confine("writes the log"))?;
    if let Some(manager) = manager {
        manager.start_sender(confine("sends to the service manager"))?;
    }
    descriptor::start_closer(confine("closes descriptors"))?;
    Ok(memory::start_unmapper(confine("unmaps memory"))?)
}

/// Makes the mailboxes of the workers, on the nodes of this machine.
fn mailboxes(options: &Options, nodes: &Nodes) -> Result<Arc<[Mailbox]>, DaemonError> {
    let places = nodes.of_workers(worker_count(options)?, options.cpus.as_ref());
    let mailboxes = places.into_iter().map(Mailbox::new);
    Ok(mailboxes.collect::<Result<_, _>>().map_err(Error::from)?)
}

/// Returns how many workers there are to be.
fn worker_count(options: &Options) -> Result<usize, DaemonError> {
    let cpus = options.cpus.as_ref().map(|cpus| cpus.0.len());
    let wanted = options.workers.map(usize::from).or(cpus).unwrap_or_else(half_of_the_cpus);
    // Guests may come later if there is a control socket.
    let most = if options.control.is_some() { MAX_GUESTS } else { options.guests.len() };
    let workers = wanted.clamp(1, most.max(1));
    match cpus {
        Some(cpus) if workers > cpus => Err(DaemonError::Cpus { workers, cpus }),
        _ => Ok(workers),
    }
}

/// Returns half the number of CPUs. The other half is for the guests, which post and poll there: if a
/// worker polls on the CPU of its guest, the guest has to wait for that. On two CPUs one worker serves
/// two guests faster than two workers do.
fn half_of_the_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() / 2)
}

/// Refuses sockets that have the same path.
fn check(options: &Options) -> Result<(), DaemonError> {
    let mut paths: HashSet<&PathBuf> = options.control.iter().collect();
    match options.guests.iter().flat_map(GuestSpec::sockets).find(|path| !paths.insert(path)) {
        Some(path) => Err(DaemonError::Path(path.clone())),
        None => Ok(()),
    }
}

/// Puts the sockets of guests that were added, and that the options name now, among those of the other guests of the
/// options.
fn adopt_sockets(
    options: &Options,
    inherited: &mut Inherited,
    listeners: &mut Listeners,
) -> Result<(), DaemonError> {
    let named = options.guests.iter().flat_map(GuestSpec::sockets).chain(&options.control);
    let paths: HashSet<&PathBuf> = named.collect();
    for left in inherited.guests.iter_mut().filter(|left| left.origin == Origin::Call) {
        let guest = &left.spec.name;
        let taken = left.spec.sockets().find(|path| paths.contains(path));
        if options.guests.iter().any(|spec| spec.name == *guest) {
            let sockets = left.listener.take().into_iter().chain(left.nic.take());
            sockets.for_each(|socket| listeners.adopt(socket));
        } else if let Some(path) = taken.filter(|_| !left.is_gone()) {
            return Err(DaemonError::Taken { path: path.clone(), guest: guest.clone() });
        }
    }
    Ok(())
}

/// Makes the control socket, if there is to be one.
fn control_socket(
    options: &Options,
    listeners: &mut Listeners,
) -> Result<Option<Arc<Socket>>, Error> {
    let bind = |path| listeners.bind(path, Kind::Stream, &Access::default(), true);
    Ok(options.control.as_deref().map(bind).transpose()?.map(Arc::new))
}

/// Returns a socket that becomes readable when the process is to end, and what is set when it is to leave its sockets
/// to the next one then.
fn signals() -> Result<(UnixStream, Arc<AtomicBool>), Error> {
    let (read, write) = UnixStream::pair()?;
    let is_asked = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(handover::ask::SIGNAL.as_raw(), is_asked.clone())?;
    for signal in [handover::ask::SIGNAL.as_raw(), SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok((read, is_asked))
}

/// The sockets that others connect to.
struct Sockets {
    control: Option<Arc<Socket>>,
    guests: Arc<Guests>,
}

impl Sockets {
    /// Calls `f` with those that are not kept with their guests.
    fn each(&self, f: impl Fn(&Socket)) {
        let mut guests = self.guests.all();
        let stays =
            |guest: &Guest| guest.origin != Origin::Call && !guest.leaves.load(Ordering::Relaxed);
        guests.retain(|guest| stays(guest));
        let nics = guests.iter().filter_map(|guest| guest.nic_socket.as_deref());
        let guests = guests.iter().map(|guest| &guest.socket);
        guests.chain(nics).chain(self.control.as_deref()).for_each(f);
    }

    /// Notes that the files of the sockets are to be removed when the process ends, because it serves now.
    fn own(&self, remover: &mut Option<Remover>) {
        self.each(|socket| socket.set_stays(false));
        set_stay(remover, false);
    }

    /// Leaves them to the next process, with the connections that wait there.
    fn leave(&self, manager: &Manager, remover: &mut Option<Remover>) {
        self.each(|socket| handover::leave(manager, socket));
        set_stay(remover, true);
    }
}

/// Tells the process that removes the files of sockets whether they stay when this one ends.
fn set_stay(remover: &mut Option<Remover>, stay: bool) {
    if let Some(Err(error)) = remover.as_mut().map(|remover| remover.set_stay(stay)) {
        tracing::warn!(%error, "the process that removes the sockets cannot be told");
    }
}

/// A network: the fabric of its RDMA devices, its switch if it has an uplink or network interfaces of guests, and the
/// intakes of an uplink.
struct Network {
    fabric: Arc<Fabric>,
    switch: Option<Arc<Switch>>,
    intakes: Vec<Arc<Intake>>,
}

impl Network {
    fn new(
        name: &str,
        uplink: Option<&Arc<Uplink>>,
        nics: Option<Vec<Nic>>,
        helpers: Option<Arc<Helpers>>,
    ) -> Result<Self, DaemonError> {
        let needed = uplink.is_some() || nics.is_some();
        let switch = Switch::new(uplink.cloned(), nics.unwrap_or_default()).map_err(Error::from)?;
        let switch = needed.then(|| Arc::new(switch));
        let out = switch.clone().map(|switch| switch as Arc<dyn engine::Uplink>);
        let name = name.to_owned();
        let config = FabricConfig { name, uplink: out, helpers, ..FabricConfig::default() };
        let fabric = Fabric::new(config);
        let of_uplink = switch.as_ref().zip(uplink);
        let intakes = of_uplink.map(|(switch, uplink)| Intake::of_lanes(switch, uplink, &fabric));
        let intakes = intakes.transpose().map_err(Error::from)?.unwrap_or_default();
        Ok(Self { fabric, switch, intakes })
    }
}

/// Most lanes of an uplink.
const MOST_LANES: NonZeroU8 = NonZeroU8::new(8).unwrap();

/// Returns how many lanes an uplink is to have: as many as there are workers.
fn lanes(workers: &[Mailbox]) -> NonZeroU8 {
    let lanes = u8::try_from(workers.len()).ok().and_then(NonZeroU8::new);
    lanes.unwrap_or(MOST_LANES).min(MOST_LANES)
}

/// Opens the uplinks, and makes a fabric for each network. The switches of these take the network interfaces.
fn networks(
    options: &Options,
    interfaces: &mut Interfaces,
    helpers: Option<&Arc<Helpers>>,
    lanes: NonZeroU8,
) -> Result<HashMap<String, Network>, DaemonError> {
    let mut uplinks = HashMap::new();
    for spec in &options.uplinks {
        let is_of_network = |guest: &&GuestSpec| guest.network == spec.network;
        let guests: Vec<_> = options.guests.iter().filter(is_of_network).collect();
        let have_nics = guests.iter().any(|guest| guest.nic.is_some());
        let stations = stations(guests.iter().copied());
        let way = spec.way()?;
        let (carrier, stations) = (spec.carrier.as_deref(), stations.as_deref());
        let opened = Uplink::open(&spec.network, &way, carrier, have_nics, stations, lanes);
        let failed = |error| DaemonError::Way { name: way.to_string(), error };
        if uplinks.insert(&spec.network, opened.map_err(failed)?).is_some() {
            return Err(DaemonError::Uplink(spec.network.clone()));
        }
    }
    let mut networks = HashMap::new();
    for GuestSpec { network, .. } in &options.guests {
        if !networks.contains_key(network) {
            let (uplink, nics) = (uplinks.remove(network), interfaces.nics.remove(network));
            let made = Network::new(network, uplink.as_ref(), nics, helpers.cloned())?;
            networks.insert(network.clone(), made);
        }
    }
    match uplinks.into_keys().next() {
        Some(network) => Err(DaemonError::NoGuest(network.clone())),
        None => Ok(networks),
    }
}

/// The network interfaces of the guests that the options have.
#[derive(Default)]
struct Interfaces {
    /// The interfaces, by network.
    nics: HashMap<String, Vec<Nic>>,
    /// The sockets that their VMMs connect to, by guest.
    sockets: HashMap<String, Arc<Socket>>,
}

/// Opens the network interfaces of the guests that the options have.
fn interfaces(
    options: &Options,
    listeners: &mut Listeners,
    inherited: &Inherited,
) -> Result<Interfaces, DaemonError> {
    let mut interfaces = Interfaces::default();
    for spec in &options.guests {
        let (Some(path), Some(mac)) = (&spec.nic, spec.mac()) else { continue };
        let framing = spec.transport().framing();
        let may_stay = inherited.has_access_of(spec);
        let socket = Arc::new(listeners.bind(path, framing.into(), &spec.access(), may_stay)?);
        let nic = Nic::new(&spec.name, mac, framing, socket.clone());
        interfaces.nics.entry(spec.network.clone()).or_default().push(nic);
        interfaces.sockets.insert(spec.name.clone(), socket);
    }
    Ok(interfaces)
}

/// Starts a thread for each switch. The threads end when the stream that this returns is dropped.
fn start_switches(
    networks: HashMap<String, Network>,
    filters: Option<&Filters>,
) -> Result<(UnixStream, Vec<JoinHandle<()>>), DaemonError> {
    let (end, ended) = UnixStream::pair()?;
    let mut threads = Vec::new();
    for Network { fabric, switch, intakes } in networks.into_values() {
        let Some(switch) = switch else { continue };
        let (ended, filters) = (ended.try_clone()?, filters.cloned());
        let serve = move || {
            if let Some(Err(error)) = filters.map(|filters| filters.confine_switch()) {
                tracing::error!(%error, "the switch does not run");
                return;
            }
            network::thread::run(&switch, &fabric, &intakes, &ended);
        };
        threads.push(std::thread::Builder::new().name("switch".to_owned()).spawn(serve)?);
    }
    Ok((end, threads))
}

/// Returns the service manager, if there is one. One that cannot be reached is no reason not to serve.
fn service_manager() -> Option<Manager> {
    let manager = Manager::from_environment();
    let failed = |error: &Error| tracing::warn!(%error, "the service manager cannot be reached");
    let manager = manager.inspect_err(failed).ok().flatten()?;
    if !manager.keeps_descriptors() {
        tracing::warn!(
            "the service manager keeps no descriptors, so the guests lose their devices when this process ends: \
             FDSTORE is not set, which needs systemd 254 or later and FileDescriptorStoreMax="
        );
    }
    Some(manager)
}

/// Tells the service manager something, if there is one.
fn tell(manager: Option<&Manager>, assignment: &str) {
    if let Some(Err(error)) = manager.map(|manager| manager.tell(assignment)) {
        tracing::warn!(%error, assignment, "the service manager cannot be told");
    }
}

/// The guests that were added.
#[derive(Default)]
struct Added {
    /// The guests whose VMMs are connected.
    resumed: Vec<Resumed>,
    /// The changes to the kept state. They forget guests that do not come back and VMMs that are disconnected, and keep
    /// guests as the options name them.
    changes: Vec<Box<dyn Fn()>>,
}

impl Added {
    /// Notes that the VMM of a guest is to be disconnected, if the guest is not to be served.
    fn note_fence(&mut self, guest: &Arc<Guest>, is_fenced: bool) {
        let guest = guest.clone();
        let disconnect = move || {
            if let Some(mut kept) = guest.kept() {
                kept.disconnect();
            }
        };
        self.changes.extend(is_fenced.then(|| Box::new(disconnect) as Box<dyn Fn()>));
    }

    /// Notes that a guest is to be kept as the options name it, if it was added.
    fn note_named(&mut self, guest: &Arc<Guest>, was_added: bool) {
        if !was_added {
            return;
        }
        let guest = guest.clone();
        self.changes.push(Box::new(move || {
            if let Some(mut kept) = guest.kept() {
                kept.renew();
            }
        }));
    }
}

/// Makes the sockets and the devices of the guests that the command line and the configuration file have, and of those
/// that an earlier process has served besides.
fn add_guests(
    options: &Options,
    guests: &Guests,
    mut inherited: Inherited,
    listeners: &mut Listeners,
    mut nic_sockets: HashMap<String, Arc<Socket>>,
) -> Result<Added, DaemonError> {
    let mut added = Added::default();
    let (gone, there) = std::mem::take(&mut inherited.guests).into_iter().partition(Left::is_gone);
    let gone: Vec<_> = gone;
    inherited.guests = there;
    added.changes.extend(gone.iter().map(|left| Box::new(left.kept.ender()) as Box<dyn Fn()>));
    for spec in &options.guests {
        let may_stay = inherited.has_access_of(spec);
        let socket = listeners.bind(spec.path(), Kind::Stream, &spec.access(), may_stay)?;
        let memory = guests.share_anyway();
        let left = inherited.remove(&spec.name);
        let origin = options.origin_of(spec);
        let is_fenced = left.as_ref().is_some_and(|left| left.is_fenced);
        let was_added = left.as_ref().is_some_and(|left| left.origin == Origin::Call);
        let (spec, kept, connected) = go_on(spec, left);
        let (nic, nic_socket) = (None, nic_sockets.remove(&spec.name));
        let arriving = Arriving { spec, socket, nic, nic_socket, memory, kept, origin };
        let guest = guests.add(arriving)?;
        added.note_fence(&guest, is_fenced);
        added.note_named(&guest, was_added);
        added.resumed.extend(connected.map(|connected| (guest, connected)));
    }
    for left in inherited.guests {
        let name = left.spec.name.clone();
        let is_called = left.origin == Origin::Call;
        let (forget, is_fenced) = (left.kept.ender(), left.is_fenced);
        if !is_called && left.connected.is_none() {
            added.changes.push(Box::new(forget));
            continue;
        }
        match add_again(guests, left) {
            Ok((guest, connected)) => {
                added.note_fence(&guest, is_fenced);
                if !is_called {
                    tracing::warn!(
                        guest = name,
                        "neither the command line nor the configuration file has the guest any more: it leaves with its VMM"
                    );
                    guest.leaves.store(true, Ordering::Relaxed);
                }
                added.resumed.extend(connected.map(|connected| (guest, connected)));
            }
            Err(error) => {
                tracing::error!(guest = name, error, "the guest cannot be added again");
                added.changes.push(Box::new(forget));
            }
        }
    }
    Ok(added)
}

/// Returns what a guest of the command line or the configuration file is to be, and what an earlier process has left of
/// it.
fn go_on(spec: &GuestSpec, left: Option<Left>) -> (GuestSpec, Option<Kept>, Option<Connected>) {
    let Some(Left { mut kept, spec: old, origin, connected, .. }) = left else {
        return (spec.clone(), None, None);
    };
    if origin == Origin::Call {
        tracing::info!(
            guest = spec.name,
            socket = %spec.path().display(),
            former_socket = %old.path().display(),
            "the guest was added, and the options name it now: they say what it may do and where its VMM connects"
        );
        kept.set_stays();
    } else if spec == kept.named() {
        // Whoever has changed its policy since then has the last word.
        return (old, Some(kept), connected);
    }
    if connected.is_some() && !spec.is_same_device(&old) {
        tracing::warn!(
            guest = spec.name,
            "its VMM is connected to another kind of device: the guest stays as it was"
        );
        return (old, Some(kept), connected);
    }
    kept.set_named(spec);
    (spec.clone(), Some(kept), connected)
}

/// Adds a guest that an earlier process has served. One that was not added to that process has no socket any more, and
/// no network interface.
fn add_again(guests: &Guests, left: Left) -> Result<(Arc<Guest>, Option<Connected>), String> {
    let Left { kept, mut spec, origin, listener, nic, connected, .. } = left;
    let socket = match listener {
        Some(listener) => Socket::passed(listener, Kind::Stream),
        None if origin == Origin::Call => return Err("its socket was not kept".to_owned()),
        None => Socket::nowhere(),
    };
    let socket = socket.map_err(|error| error.to_string())?;
    let nic = nic.map(|nic| Socket::passed(nic, spec.transport().framing().into()));
    let nic = nic.transpose().map_err(|error| error.to_string())?;
    spec.nic = spec.nic.filter(|_| origin == Origin::Call);
    let guest = guests.add_one_more(spec, socket, nic, Some(kept), origin);
    Ok((guest.map_err(|error| error.to_string())?, connected))
}

/// Starts the process that removes the sockets, and takes the file system away from this one. Sockets that are
/// `inherited` stay until this process serves. Returns that process and the filters for the threads; `None` without a
/// sandbox.
fn confine(options: &Options, inherited: bool) -> Result<Option<(Remover, Filters)>, DaemonError> {
    if options.sandbox == options::Switch::Off {
        return Ok(None);
    }
    let sockets = options.guests.iter().flat_map(GuestSpec::sockets).chain(&options.control);
    let started = Remover::start(sockets.map(PathBuf::as_path)).map_err(DaemonError::Remover);
    let mut remover = started?;
    remover.set_stay(inherited).map_err(DaemonError::Remover)?;
    sandbox::leave_file_system(std::iter::empty())?;
    Ok(Some((remover, Filters::new()?)))
}

/// Returns whether workers help each other: there are several, and they may poll.
fn shares_copies(options: &Options, workers: &[Mailbox]) -> bool {
    workers.len() > 1 && options.poll_us != 0
}

/// Returns the workers as helpers of each other. One that sleeps is called.
fn helpers(workers: &Arc<[Mailbox]>) -> Arc<Helpers> {
    let workers = workers.clone();
    Arc::new(Helpers::new(move || {
        let _ = workers.iter().any(Mailbox::call);
    }))
}

/// Makes the workers, and says which guests each of them is to go on with.
fn make_workers(
    options: &Options,
    workers: &Arc<[Mailbox]>,
    guests: &Arc<Guests>,
    intakes: &[Arc<Intake>],
    helpers: &Arc<Helpers>,
    resumed: Vec<Resumed>,
) -> Result<Vec<Assigned>, DaemonError> {
    let poll = Duration::from_micros(options.poll_us.into());
    let passing: Arc<[_]> = workers.iter().map(|_| Passing::default()).collect();
    let make = |index| {
        let (workers, passing, guests) = (workers.clone(), passing.clone(), guests.clone());
        let helpers = helpers.clone();
        let worker = Worker::new(workers, passing, index, guests, intakes, poll, helpers)?;
        Ok::<_, Errno>((worker, Vec::new()))
    };
    let mut made: Vec<Assigned> =
        (0..workers.len()).map(make).collect::<Result<_, _>>().map_err(Error::from)?;
    for (number, guest) in resumed.into_iter().enumerate() {
        made[number % workers.len()].1.push(guest);
    }
    Ok(made)
}

/// Where a worker runs.
#[derive(Clone)]
enum Place {
    /// On any CPU.
    Anywhere,
    /// On this CPU, as `--cpus` says.
    Cpu(u16),
    /// On the CPUs of a node.
    Node(u32, Vec<u16>),
}

impl Place {
    /// Makes the calling thread run there. Only a CPU that somebody has named has to be there.
    fn take(&self) -> Result<(), String> {
        let set_to = |cpus: &[u16]| {
            let mut set = CpuSet::new();
            for cpu in cpus {
                set.set((*cpu).into());
            }
            sched_setaffinity(None, &set)
        };
        match self {
            Self::Anywhere => {}
            Self::Cpu(cpu) => {
                set_to(&[*cpu]).map_err(|error| format!("pinning to CPU {cpu}: {error}"))?;
            }
            Self::Node(node, cpus) => {
                if let Err(error) = set_to(cpus) {
                    tracing::warn!(node, %error, "this worker does not run on the CPUs of its NUMA node only");
                }
            }
        }
        Ok(())
    }
}

/// Starts the threads of the workers.
fn start(
    options: &Options,
    nodes: &Nodes,
    mailboxes: &[Mailbox],
    workers: Vec<Assigned>,
    filters: Option<&Filters>,
) -> Result<Crew, DaemonError> {
    let place = |(index, mailbox): (usize, &Mailbox)| match (options.pinned(index), mailbox.node) {
        (Some(cpu), _) => Place::Cpu(cpu),
        (None, Some(node)) => Place::Node(node, nodes.cpus(node).to_vec()),
        (None, None) => Place::Anywhere,
    };
    let places: Vec<_> = mailboxes.iter().enumerate().map(place).collect();
    let filters = filters.cloned();
    let prepare = move |index: usize| prepare(&places[index], filters.as_ref());
    let failed = |NotPrepared { index, error }| DaemonError::Worker { index, error };
    Crew::start(workers, prepare).map_err(failed)
}

/// The nanoseconds by which the kernel may wake a worker later than asked. Its default of 50 us would be most of a
/// short RNR timer.
const TIMER_SLACK: u64 = 1000;

/// The slice that a worker asks of the scheduler. Guests wait for the worker, and it mostly sleeps again
/// after less time. With the shortest slice it gets a processor as soon as it is woken.
const SLICE: Duration = Duration::from_micros(100);

/// Prepares the calling thread for being a worker.
fn prepare(place: &Place, filters: Option<&Filters>) -> Result<(), String> {
    set_current_timer_slack(NonZeroU64::new(TIMER_SLACK)).map_err(|error| error.to_string())?;
    place.take()?;
    if let Err(error) = scheduler::set_slice(SLICE) {
        tracing::debug!(%error, "this worker waits for the slices of other threads");
    }
    // The main thread has warned already if this cannot work.
    let _ = descriptor::prepare();
    if let Some(filters) = filters {
        filters.confine_worker().map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Starts the thread of the control socket, if there is such a socket. The thread ends when the stream
/// that this returns is dropped.
fn start_control(
    socket: Option<Arc<Socket>>,
    surveyed: Surveyed,
    events: Arc<Events>,
    filters: Option<&Filters>,
) -> Result<(UnixStream, Option<JoinHandle<()>>), DaemonError> {
    let (end, ended) = UnixStream::pair()?;
    let Some(socket) = socket else { return Ok((end, None)) };
    let filters = filters.cloned();
    let traces = Traces::new(surveyed.guests.clone()).map_err(Error::from)?;
    let serve = move || {
        if let Some(Err(error)) = filters.map(|filters| filters.confine()) {
            tracing::error!(%error, "the control socket is not served");
            return;
        }
        control::run(&socket, &ended, surveyed, &events, traces);
    };
    let thread = std::thread::Builder::new().name("control".to_owned()).spawn(serve)?;
    Ok((end, Some(thread)))
}

/// Gives each VMM that connects to a worker, and evens out what workers have to do, until a signal comes.
fn wait(signals: &UnixStream, guests: &Guests, mut balance: Balance) -> Result<(), Error> {
    let mut pause: Option<Instant> = None;
    loop {
        let paused = pause.map(|until| until.saturating_duration_since(Instant::now()));
        if paused == Some(Duration::ZERO) {
            pause = None;
        }
        guests.sweep();
        let all = guests.all();
        let until_look = balance.turn(&all, Instant::now());
        let mut open: Vec<_> = all.iter().collect();
        open.retain(|guest| pause.is_none() && guest.is_open());
        let mut fds =
            vec![PollFd::new(signals, PollFlags::IN), PollFd::new(guests.changes(), PollFlags::IN)];
        let listeners = open.iter().map(|guest| guest.socket.listener());
        fds.extend(listeners.map(|listener| PollFd::new(listener, PollFlags::IN)));
        let timeout = paused.into_iter().chain(until_look).min();
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return Ok(());
        }
        if ready[1] {
            // The event does not name a guest: the next round looks at all of them.
            let _ = rustix::io::read(guests.changes(), &mut [0; 8]);
        }
        let accepted = open.into_iter().zip(&ready[2..]).filter(|(_, ready)| **ready);
        for (guest, _) in accepted {
            if let Err(error) = guests.accept(guest.index) {
                tracing::warn!(guest = guest.spec.name, %error, "accepting a connection");
                pause = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }
}
