// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A service manager for virtio-rdmad alone, where there is no systemd.
//!
//! It starts virtio-rdmad, keeps the descriptors that virtio-rdmad hands over, and starts virtio-rdmad again when that
//! ends: at once if it was asked to, and otherwise after a pause, which grows when virtio-rdmad ends again and again.
//! It speaks the protocols of systemd that [`super::manager`] names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Error, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use command_fds::{CommandFdExt, FdMapping};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    bind, recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
};
use rustix::process::{kill_process, Pid, Signal};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use super::ask;

/// The first of the descriptors that a process gets, SD_LISTEN_FDS_START of sd_listen_fds(3).
const FIRST: i32 = 3;

/// Most descriptors that are kept.
const MOST: usize = 8192;

/// Most descriptors and bytes of a message.
const MOST_OF_MESSAGE: usize = 16;
const MESSAGE: usize = 4096;

/// The pause before virtio-rdmad is started again when it has ended without being asked to, and the longest one. A
/// pause is twice the one before, unless virtio-rdmad was ready for ten times that.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The time that virtio-rdmad may take to end before it is killed.
const END: Duration = Duration::from_secs(60);

/// Starts the program whose pid it has itself, as sd_listen_fds(3) demands.
const SCRIPT: &str = "export LISTEN_PID=$$; exec \"$@\"";

/// Options of `virtio-rdmad supervise`.
#[derive(Args, Debug)]
pub struct SupervisorOptions {
    /// The program to start (default: the file of this one).
    #[arg(long, value_name = "PATH")]
    pub program: Option<OsString>,

    /// The options of the virtio-rdmad that is started.
    #[arg(required = true, last = true, value_name = "OPTION")]
    pub options: Vec<OsString>,
}

/// The reason why the supervisor ends.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// virtio-rdmad has ended before it was ready the first time.
    #[error("virtio-rdmad does not start: {0}")]
    NeverReady(ExitStatus),
    /// virtio-rdmad has failed to end when it was asked to.
    #[error("virtio-rdmad has ended: {0}")]
    Failed(ExitStatus),
    /// The operating system refused something.
    #[error("{0}")]
    Os(#[from] Error),
}

/// Runs virtio-rdmad until SIGTERM or SIGINT. SIGHUP restarts it.
pub fn run(options: &SupervisorOptions) -> Result<(), Box<dyn std::error::Error>> {
    let signals = Signals::new()?;
    let mut supervisor = Supervisor::new(options)?;
    supervisor.start()?;
    while supervisor.child.is_some() || !supervisor.ends {
        supervisor.wait(&signals)?;
    }
    Ok(())
}

/// Sockets that become readable when a signal comes.
struct Signals {
    end: UnixStream,
    restart: UnixStream,
    child: UnixStream,
}

impl Signals {
    fn new() -> Result<Self, Error> {
        let of = |signals: &[i32]| {
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            for signal in signals {
                signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
            }
            Ok::<_, Error>(read)
        };
        Ok(Self { end: of(&[SIGTERM, SIGINT])?, restart: of(&[SIGHUP])?, child: of(&[SIGCHLD])? })
    }

    /// Returns whether the signals of a socket have come since the last call.
    fn take(socket: &UnixStream) -> bool {
        matches!(rustix::io::read(socket, &mut [0; 64]), Ok(1..))
    }
}

/// A message of a process, with what came with it.
struct Message {
    sender: Option<Pid>,
    text: String,
    descriptors: Vec<OwnedFd>,
}

impl Message {
    /// Returns the value of a key.
    fn get(&self, key: &str) -> Option<&str> {
        self.text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }
}

struct Supervisor<'a> {
    options: &'a SupervisorOptions,
    /// The path of what is started. It is that of the file which this process was started from, and not its
    /// /proc/self/exe: a file that takes the place of that one is what starts next.
    program: OsString,
    /// The socket to which virtio-rdmad sends its messages, and the name of the socket.
    socket: UnixDatagram,
    address: String,
    kept: BTreeMap<String, Vec<OwnedFd>>,
    child: Option<Child>,
    /// Whether virtio-rdmad was ever ready, and since when this one is.
    was_ready: bool,
    ready: Option<Instant>,
    /// The time at which virtio-rdmad is killed, if it was asked to end.
    kill_at: Option<Instant>,
    /// The time at which virtio-rdmad is started again.
    start_at: Option<Instant>,
    pause: Duration,
    /// Whether the supervisor ends with virtio-rdmad.
    ends: bool,
}

impl<'a> Supervisor<'a> {
    fn new(options: &'a SupervisorOptions) -> Result<Self, Error> {
        let socket = UnixDatagram::unbound()?;
        // Without a name of its own the socket gets an abstract one that is free (unix(7), "Autobind feature").
        bind(&socket, &SocketAddrUnix::new_unnamed())?;
        let address = socket.local_addr()?;
        let name = address.as_abstract_name().ok_or(Error::other("a socket without a name"))?;
        let address = format!("@{}", String::from_utf8_lossy(name));
        // Everybody can send to the socket; only what virtio-rdmad sends is heard.
        set_socket_passcred(&socket, true)?;
        let program = match &options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()?.into_os_string(),
        };
        Ok(Self {
            options,
            program,
            socket,
            address,
            kept: BTreeMap::new(),
            child: None,
            was_ready: false,
            ready: None,
            kill_at: None,
            start_at: None,
            pause: PAUSE,
            ends: false,
        })
    }

    /// Starts virtio-rdmad. If the system does not let it now, for lack of descriptors or processes, it is started
    /// later, as if it had ended.
    fn start(&mut self) -> Result<(), SupervisorError> {
        self.start_at = None;
        match self.spawn() {
            Ok(child) => {
                self.child = Some(child);
                (self.ready, self.kill_at) = (None, None);
            }
            Err(error) if self.was_ready => {
                eprintln!("virtio-rdmad supervise: virtio-rdmad does not start: {error}");
                self.start_later(false);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Notes when virtio-rdmad is started again.
    fn start_later(&mut self, was_asked: bool) {
        let now = Instant::now();
        if was_asked || self.ready.take().is_some_and(|since| now - since > 10 * self.pause) {
            self.pause = PAUSE;
        }
        let pause = if was_asked { Duration::ZERO } else { self.pause };
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.start_at = Some(now + pause);
    }

    /// Makes the process of virtio-rdmad, with the descriptors that were kept.
    fn spawn(&self) -> Result<Child, Error> {
        let mut command = Command::new("/bin/sh");
        command.arg0("virtio-rdmad").args(["-c", SCRIPT, "sh"]).arg(&self.program);
        command.args(&self.options.options);
        command.env("NOTIFY_SOCKET", &self.address).env("FDSTORE", MOST.to_string());
        let mut names = Vec::new();
        let mut mappings = Vec::new();
        for (name, descriptor) in
            self.kept.iter().flat_map(|(name, all)| all.iter().map(move |one| (name, one)))
        {
            let child_fd = FIRST + i32::try_from(names.len()).unwrap_or(i32::MAX - FIRST);
            mappings.push(FdMapping { parent_fd: descriptor.try_clone()?, child_fd });
            names.push(name.as_str());
        }
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.fd_mappings(mappings).map_err(Error::other)?;
        command.spawn()
    }

    /// Waits for something to do, and does it.
    fn wait(&mut self, signals: &Signals) -> Result<(), Box<dyn std::error::Error>> {
        let fds = [
            self.socket.as_fd(),
            signals.end.as_fd(),
            signals.restart.as_fd(),
            signals.child.as_fd(),
        ];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let deadline = [self.kill_at, self.start_at].into_iter().flatten().min();
        let left = deadline.map(|time| time.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if Signals::take(&signals.end) {
            self.ends = true;
            self.stop(Signal::TERM);
        }
        if Signals::take(&signals.restart) {
            self.hand_over();
            self.stop(Signal::TERM);
        }
        self.read_messages()?;
        if Signals::take(&signals.child) {
            self.notice_end()?;
        }
        let now = Instant::now();
        if self.kill_at.is_some_and(|time| time <= now) {
            self.stop(Signal::KILL);
        }
        if self.start_at.is_some_and(|time| time <= now) && !self.ends {
            self.start()?;
        }
        Ok(())
    }

    /// Asks virtio-rdmad to leave its sockets to what starts next, if that takes them over. What a `--program` starts
    /// is not known before, and the program may do more than that.
    fn hand_over(&self) {
        let Some(child) = self.child.as_ref().filter(|_| self.options.program.is_none()) else {
            return;
        };
        let mut command = Command::new(&self.program);
        command.args([ask::COMMAND, &child.id().to_string()]).stderr(Stdio::null());
        // If this fails, the next process makes new sockets.
        let _ = command.status();
    }

    /// Asks virtio-rdmad to end.
    fn stop(&mut self, signal: Signal) {
        let Some(child) = &self.child else { return };
        // If it has ended, nobody has taken its status yet, so no other process has its number.
        let _ = kill_process(Pid::from_child(child), signal);
        self.kill_at = Some(Instant::now() + END);
    }

    /// Starts virtio-rdmad again if it has ended.
    fn notice_end(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let status = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
        let Some(status) = status else { return Ok(()) };
        // The process may have sent messages before it ended.
        self.read_messages()?;
        self.child = None;
        if self.ends {
            return if status.success() {
                Ok(())
            } else {
                Err(SupervisorError::Failed(status).into())
            };
        }
        if !self.was_ready {
            return Err(SupervisorError::NeverReady(status).into());
        }
        eprintln!("virtio-rdmad supervise: virtio-rdmad has ended: {status}; it starts again");
        let was_asked = self.kill_at.take().is_some();
        self.start_later(was_asked);
        Ok(())
    }

    /// Does what virtio-rdmad wants.
    fn read_messages(&mut self) -> Result<(), Error> {
        while let Some(message) = self.receive()? {
            let child = self.child.as_ref().map(Pid::from_child);
            if message.sender.is_some() && message.sender == child {
                self.take(message);
            }
        }
        Ok(())
    }

    fn take(&mut self, message: Message) {
        if message.get("READY") == Some("1") {
            self.was_ready = true;
            self.ready = Some(Instant::now());
        }
        let Some(name) = message.get("FDNAME").filter(|name| !name.contains(':')) else { return };
        if message.get("FDSTOREREMOVE").is_some() {
            self.kept.remove(name);
        } else if message.get("FDSTORE").is_some() {
            let count: usize = self.kept.values().map(Vec::len).sum();
            if count + message.descriptors.len() > MOST {
                eprintln!(
                    "virtio-rdmad supervise: there are {MOST} descriptors, which is the most"
                );
                return;
            }
            self.kept.entry(name.to_owned()).or_default().extend(message.descriptors);
        }
    }

    /// Returns the next message, if there is one.
    fn receive(&self) -> Result<Option<Message>, Error> {
        let mut bytes = [0; MESSAGE];
        let mut space = [MaybeUninit::uninit();
            rustix::cmsg_space!(ScmRights(MOST_OF_MESSAGE), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut part = [IoSliceMut::new(&mut bytes)];
        let length = match recvmsg(&self.socket, &mut part, &mut control, flags) {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let (mut sender, mut descriptors) = (None, Vec::new());
        for message in control.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(rights) => descriptors.extend(rights),
                RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials.pid),
                _ => {}
            }
        }
        let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
        Ok(Some(Message { sender, text, descriptors }))
    }
}
