// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process as others see it: sockets, connections that come and go, status, signals.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::process::{kill_process, kill_process_group, prlimit, Pid, Resource, Rlimit, Signal};
use rustix::pty::{ioctl_tiocgptpeer, openpt, unlockpt, OpenptFlags};
use rustix::termios::{tcgetattr, tcsetwinsize, Winsize};
use serde_json::{json, Value};

mod front_end;
mod rdma;

use front_end::{FrontEnd, LIMIT, REQUESTS};
use rdma::{Pair, Pause, Protocol};

const BINARY: &str = env!("CARGO_BIN_EXE_virtio-rdmad");

/// How soon a VMM is disconnected that is not to be served.
const REFUSAL: Duration = Duration::from_secs(20);

/// Kills a group of processes that is still there after a time. So each wait for these processes ends:
/// for their end, for what they write, and for answers over their sockets.
struct Watchdog {
    _is_needed: Sender<()>,
}

impl Watchdog {
    /// Begins to watch the group that a process is the first of, until the watchdog is dropped.
    fn new(child: &Child, limit: Duration) -> Self {
        let (is_needed, needed) = channel();
        let group = Pid::from_child(child);
        std::thread::spawn(move || {
            if needed.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("after {limit:?} a process is still there, and is killed");
                let _ = kill_process_group(group, Signal::KILL);
            }
        });
        Self { _is_needed: is_needed }
    }
}

/// Runs a command, and returns what it writes.
fn output(command: &mut Command) -> Output {
    let piped = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = piped.spawn().unwrap();
    let _watchdog = Watchdog::new(&child, LIMIT);
    child.wait_with_output().unwrap()
}

/// Makes the directory of a test, which is removed when its process ends.
fn directory_of(test: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

struct Daemon {
    _watchdog: Watchdog,
    child: Child,
    stderr: BufReader<ChildStderr>,
    directory: PathBuf,
}

impl Daemon {
    /// Starts a process with a guest of each transport and waits until it is ready.
    fn start(test: &str) -> Self {
        Self::start_with(
            test,
            &[],
            &["name=a,mac=52:54:00:00:00:01,vhost-user", "name=b,vfio-user"],
        )
    }

    /// Starts a process with these options and guests. A guest is given up to the `=` before its socket,
    /// whose file has the guest's name.
    fn start_with(test: &str, options: &[&str], guests: &[&str]) -> Self {
        Self::run(Command::new(BINARY), test, options, guests)
    }

    /// Starts a process that is started again when it ends. See [`Self::start_with`].
    fn supervised(test: &str, guests: &[&str]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(["supervise", "--"]);
        Self::run(command, test, &[], guests)
    }

    fn run(mut command: Command, test: &str, options: &[&str], guests: &[&str]) -> Self {
        let directory = directory_of(test);
        command.arg("--control").arg(directory.join("control")).args(options);
        for guest in guests {
            let (name, _) = guest.strip_prefix("name=").unwrap().split_once(',').unwrap();
            let path = directory.join(name).display().to_string();
            command.args(["--guest", &format!("{guest}={path}")]);
        }
        let mut child =
            command.env_remove("RUST_LOG").process_group(0).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut daemon = Self { _watchdog: Watchdog::new(&child, LIMIT), child, stderr, directory };
        daemon.wait_for("ready");
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Reads the log up to a line that contains `text`.
    fn wait_for(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(self.stderr.read_line(&mut line).unwrap(), 0, "no \"{text}\" in the log");
        }
    }

    fn status(&self) -> Value {
        let control = self.path("control");
        let output =
            output(Command::new(BINARY).args(["status", "--json", "--control"]).arg(&control));
        assert!(output.status.success());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the rounds and sleeps of every worker, and whether all workers sleep now.
    fn counts(&self) -> (Vec<[Value; 2]>, bool) {
        let status = self.status();
        let workers = status["workers"].as_array().unwrap();
        let counts = workers.iter().map(|worker| ["rounds", "sleeps"].map(|k| worker[k].clone()));
        (counts.collect(), workers.iter().all(|worker| worker["asleep"] == true))
    }

    /// Returns the process that serves guests, whose parent this one is.
    fn server(&self) -> Pid {
        let pid = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        Pid::from_raw(children.split_whitespace().next().unwrap().parse().unwrap()).unwrap()
    }

    /// Kills the process that serves guests, whose parent this one is, and waits until another one is ready.
    fn crash(&mut self) {
        kill_process(self.server(), Signal::KILL).unwrap();
        self.wait_for("ready");
    }

    /// Restarts the process that serves guests, whose parent this one is, and waits until it is ready.
    fn restart(&mut self) {
        self.ask_to_restart();
        self.wait_for("ready");
    }

    /// Asks the parent of the process that serves guests to restart it.
    fn ask_to_restart(&self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }

    /// Ends the process by SIGTERM. No file may be left.
    fn end(mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
        assert_eq!(std::fs::read_dir(&self.directory).unwrap().count(), 0);
        std::fs::remove_dir(&self.directory).unwrap();
    }
}

impl Drop for Daemon {
    /// Ends the process after a failed test.
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Sends a vhost-user request.
fn send_vhost_user(socket: &mut UnixStream, request: u32, payload: &[u8]) {
    let size = u32::try_from(payload.len()).unwrap();
    socket.write_all(&[request, 1, size].map(u32::to_ne_bytes).concat()).unwrap();
    socket.write_all(payload).unwrap();
}

/// Sends a vhost-user request and returns the payload of its answer.
fn vhost_user(socket: &mut UnixStream, request: u32, payload: &[u8]) -> Vec<u8> {
    send_vhost_user(socket, request, payload);
    receive_vhost_user(socket)
}

/// Returns the payload of the next vhost-user answer.
fn receive_vhost_user(socket: &mut UnixStream) -> Vec<u8> {
    let mut header = [0; 12];
    socket.read_exact(&mut header).unwrap();
    let size = u32::from_ne_bytes(header[8..].try_into().unwrap());
    let mut answer = vec![0; size as usize];
    socket.read_exact(&mut answer).unwrap();
    answer
}

fn connect(path: &Path) -> UnixStream {
    UnixStream::connect(path).unwrap()
}

#[test]
fn a_front_end_finds_the_device() {
    let daemon = Daemon::start("config");
    let mut socket = connect(&daemon.path("a"));
    let features = u64::from_ne_bytes(vhost_user(&mut socket, 1, &[]).try_into().unwrap());
    assert_eq!(features & 3, 3, "events and MAC");
    let queues = u64::from_ne_bytes(vhost_user(&mut socket, 17, &[]).try_into().unwrap());
    assert_eq!(queues, 64);
    let request = [&[0_u32, 256, 0].map(u32::to_ne_bytes).concat()[..], &[0; 256]].concat();
    let config = vhost_user(&mut socket, 24, &request);
    assert_eq!(config.len(), 12 + 256);
    assert_eq!(config[12..20], *b"\x01\0\0\0rdma", "one port, and the magic");

    let status = daemon.status();
    let guest = &status["guests"][0];
    assert_eq!((guest["name"].as_str(), guest["connected"].as_bool()), (Some("a"), Some(true)));
    assert_eq!(
        (guest["started"].as_bool(), guest["mac"].as_str()),
        (Some(false), Some("52:54:00:00:00:01"))
    );
    assert_eq!(status["guests"][1]["connected"].as_bool(), Some(false));
    daemon.end();
}

#[test]
fn a_feature_is_withheld() {
    let offered = |daemon: &Daemon| {
        let mut socket = connect(&daemon.path("a"));
        u64::from_ne_bytes(vhost_user(&mut socket, 1, &[]).try_into().unwrap())
    };
    let withheld = ["--withhold", "page-sizes", "--withhold", "reset-to-rtr"];
    let [all, rest] = [("offered", &[][..]), ("withheld", &withheld[..])]
        .map(|(test, options)| offered(&Daemon::start_with(test, options, &["name=a,vhost-user"])));
    assert_eq!(all & !rest, 3 << 15, "VIRTIO_RDMA_F_PAGE_SIZES and VIRTIO_RDMA_F_RESET_TO_RTR");
    assert_eq!(rest & !all, 0);
}

#[test]
fn connections_come_and_go() {
    let mut daemon = Daemon::start("again");
    for _ in 0..3 {
        let mut socket = connect(&daemon.path("a"));
        vhost_user(&mut socket, 1, &[]);
        drop(socket);
        daemon.wait_for("disconnected");
    }
    for (name, bytes) in [("a", [0xff; 64]), ("b", [0xff; 64]), ("b", [0; 64])] {
        let mut socket = connect(&daemon.path(name));
        socket.write_all(&bytes).unwrap();
        assert_eq!(socket.read(&mut [0; 16]).unwrap_or(0), 0, "the connection ends");
        daemon.wait_for("disconnected");
    }
    let mut socket = connect(&daemon.path("a"));
    vhost_user(&mut socket, 1, &[]);
    daemon.end();
}

/// Calls a method on a connection to the control socket. Returns the answer.
fn call(socket: &mut UnixStream, method: &str, parameters: &Value) -> Value {
    let request = json!({ "method": method, "parameters": parameters });
    socket.write_all(format!("{request}\0").as_bytes()).unwrap();
    let mut answer = Vec::new();
    BufReader::new(&*socket).read_until(0, &mut answer).unwrap();
    serde_json::from_slice(answer.strip_suffix(&[0]).unwrap()).unwrap()
}

#[test]
fn the_control_socket_describes_itself() {
    let daemon = Daemon::start("varlink");
    let mut socket = connect(&daemon.path("control"));
    let none = json!({});
    let info = call(&mut socket, "org.varlink.service.GetInfo", &none);
    assert_eq!(info["parameters"]["product"], "virtio-rdmad");
    let interfaces = info["parameters"]["interfaces"].as_array().unwrap();
    assert!(interfaces.contains(&"org.virtio-rdma.Daemon".into()), "{interfaces:?}");
    let of = json!({ "interface": "org.virtio-rdma.Daemon" });
    let answer = call(&mut socket, "org.varlink.service.GetInterfaceDescription", &of);
    let description = answer["parameters"]["description"].as_str().unwrap();
    // What is reported is described. Members of all types have names that are told apart by their values here.
    let report = daemon.status();
    for object in [&report, &report["guests"][0], &report["workers"][0]] {
        for key in object.as_object().unwrap().keys() {
            assert!(description.contains(&format!("  {key}: ")), "{key} is not described");
        }
    }
    daemon.end();
}

#[test]
fn the_control_socket_refuses_nonsense() {
    let daemon = Daemon::start("control");
    let mut socket = connect(&daemon.path("control"));
    let (none, some) = (json!({}), json!({ "when": "now" }));
    for (method, parameters, error) in [
        ("org.virtio-rdma.Daemon.Reboot", &none, "MethodNotFound"),
        ("org.virtio-rdma.Other.Status", &none, "InterfaceNotFound"),
        ("Status", &none, "InterfaceNotFound"),
        ("org.virtio-rdma.Daemon.Status", &some, "InvalidParameter"),
    ] {
        let answer = call(&mut socket, method, parameters);
        assert_eq!(answer["error"], format!("org.varlink.service.{error}"), "{method}: {answer}");
    }
    for (method, parameters, name) in [
        ("Status", json!({ "when": "now" }), "when"),
        ("AddGuest", json!({}), "guest"),
        ("AddGuest", json!({ "guest": 7 }), "guest"),
        ("AddGuest", json!({ "guest": {}, "spec": "name=x" }), "spec"),
        ("Status", json!({ "detail": 1 }), "detail"),
        ("RemoveGuest", json!({ "name": 7 }), "name"),
        ("RemoveGuest", json!({ "name": "a", "drain": "yes" }), "drain"),
        ("RemoveGuest", json!({ "name": "a", "now": true }), "now"),
        ("SetPolicy", json!({ "name": "a" }), "policy"),
        ("SetPolicy", json!({ "policy": "qps=9" }), "name"),
        ("SetPolicy", json!({ "name": "a", "policy": "qps=9", "x": 1 }), "x"),
        ("AddGuest", json!({ "spec": "name=x", "in_file": 1 }), "in_file"),
    ] {
        let answer = call(&mut socket, &format!("org.virtio-rdma.Daemon.{method}"), &parameters);
        assert_eq!(answer["parameters"]["parameter"], name, "{method}: {answer}");
    }
    assert_eq!(daemon.status()["guests"][0]["name"], "a", "it was not removed");
    // No socket comes with the call.
    let parameters = json!({ "spec": "name=x,vhost-user=/x" });
    let answer = call(&mut socket, "org.virtio-rdma.Daemon.AddGuest", &parameters);
    assert_eq!(answer["error"], "org.virtio-rdma.Daemon.InvalidSocket", "{answer}");
    // A call that wants no answer gets none.
    socket.write_all(b"{\"method\":\"org.virtio-rdma.Daemon.Status\",\"oneway\":true}\0").unwrap();
    let answer = call(&mut socket, "org.virtio-rdma.Daemon.Reboot", &none);
    assert!(answer["error"].is_string(), "{answer}");
    for nonsense in [
        &b"status\n\0"[..],
        b"\0",
        b"{\0",
        b"[]\0",
        b"{\"method\":7}\0",
        b"\xff\0",
        &b"{".repeat(100_000),
    ] {
        let mut socket = connect(&daemon.path("control"));
        // The daemon may close the connection before all of it is written.
        let _ = socket.write_all(nonsense);
        assert_eq!(socket.read(&mut [0; 16]).unwrap_or(0), 0, "the connection ends");
    }
    daemon.end();
}

#[test]
fn clients_of_the_control_socket_do_not_wait_for_each_other() {
    let daemon = Daemon::start("clients");
    // These say nothing, begin a request, or read no answer.
    let silent: Vec<_> = (0..80).map(|_| connect(&daemon.path("control"))).collect();
    let mut half = connect(&daemon.path("control"));
    half.write_all(b"{").unwrap();
    let deaf = connect(&daemon.path("control"));
    deaf.set_nonblocking(true).unwrap();
    let request = b"{\"method\":\"org.virtio-rdma.Daemon.Status\"}\0".repeat(100);
    while (&deaf).write(&request).is_ok() {
        assert!(daemon.status()["guests"].is_array());
    }
    assert!(daemon.status()["guests"].is_array());
    drop((silent, half, deaf));
    daemon.end();
}

#[test]
fn whoever_watches_is_told_of_what_happens() {
    let daemon = Daemon::start("watch");
    // A client that wants one answer is told that there may be more.
    let mut socket = connect(&daemon.path("control"));
    let answer = call(&mut socket, "org.virtio-rdma.Daemon.Monitor", &json!({}));
    assert_eq!(answer["error"], "org.varlink.service.ExpectedMore");
    // One that does not read keeps the others from nothing.
    let mut deaf = connect(&daemon.path("control"));
    let monitor = b"{\"method\":\"org.virtio-rdma.Daemon.Monitor\",\"more\":true}\0";
    deaf.write_all(monitor).unwrap();
    let mut watch = Command::new(BINARY);
    watch.args(["watch", "--json", "--control"]).arg(daemon.path("control"));
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = move || {
        let line = lines.next()?.unwrap();
        Some(serde_json::from_str::<Value>(&line).unwrap())
    };
    assert_eq!(next().unwrap()["event"], "watching");
    for _ in 0..100 {
        let front_end = connect(&daemon.path("a"));
        let connected = next().unwrap();
        assert_eq!((&connected["event"], &connected["guest"]), (&"connected".into(), &"a".into()));
        drop(front_end);
        let gone = next().unwrap();
        assert_eq!((&gone["event"], &gone["guest"]), (&"disconnected".into(), &"a".into()));
        assert!(gone["reason"].is_string(), "{gone}");
    }
    daemon.end();
    assert!(next().is_none(), "it ends with the daemon");
    assert!(watch.wait().unwrap().success());
}

#[test]
fn whoever_watches_is_told_of_drivers() {
    let daemon = Daemon::start("drivers");
    let mut watch = Command::new(BINARY);
    watch.args(["watch", "--control"]).arg(daemon.path("control"));
    let mut watch = watch.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
    let _watchdog = Watchdog::new(&watch, LIMIT);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = move || lines.next().map(Result::unwrap);
    assert!(next().unwrap().ends_with("watching"));
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let front_end = front_end.start_again(2);
    front_end.wait(2);
    drop(front_end);
    for event in ["connected, worker 0", "started", "reset", "started", "reset", "disconnected"] {
        let line = next().unwrap();
        assert!(line.contains(&format!("a: {event}")), "{line}, not {event}");
    }
    let limits = &daemon.status()["guests"][0]["limits"];
    assert!(limits["qps"].as_u64().unwrap() > 1 && limits["pds"].as_u64().unwrap() > 1, "{limits}");
    daemon.end();
    assert_eq!(next(), None);
    assert!(watch.wait().unwrap().success());
}

/// Runs a command for the control socket. Returns whether it worked, and what it said of errors.
fn run(daemon: &Daemon, words: &[&str]) -> (bool, String) {
    let mut command = Command::new(BINARY);
    let output = output(command.args(words).arg("--control").arg(daemon.path("control")));
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

/// Waits until a guest is there or not.
fn wait_for_guest(daemon: &Daemon, name: &str, is_there: bool) {
    let is_it = |guest: &Value| guest["name"] == name;
    while daemon.status()["guests"].as_array().unwrap().iter().any(is_it) != is_there {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn guests_come_and_go() {
    let daemon = Daemon::start("come");
    let path = daemon.path("c");
    let spec = format!("name=c,network=late,mac=52:54:00:00:00:07,vhost-user={}", path.display());
    for round in 0..3 {
        assert_eq!(run(&daemon, &["add", "--guest", &spec]), (true, String::new()), "{round}");
        let mut vmm = connect(&path);
        vhost_user(&mut vmm, 1, &[]);
        let (worked, error) = run(&daemon, &["add", "--guest", &spec]);
        assert!(!worked && error.contains("another process listens there"), "{error}");
        let (worked, error) = run(&daemon, &["remove", "c"]);
        assert!(!worked && error.contains("GuestConnected"), "{error}");
        assert_eq!(run(&daemon, &["remove", "--drain", "c"]), (true, String::new()));
        assert!(!path.exists());
        // The VMM goes on, until it leaves.
        vhost_user(&mut vmm, 1, &[]);
        wait_for_guest(&daemon, "c", true);
        drop(vmm);
        wait_for_guest(&daemon, "c", false);
    }
    // The guests of the command line can leave as well.
    assert_eq!(run(&daemon, &["remove", "a"]), (true, String::new()));
    wait_for_guest(&daemon, "a", false);
    let (worked, error) = run(&daemon, &["remove", "a"]);
    assert!(!worked && error.contains("UnknownGuest"), "{error}");
    daemon.end();
}

/// Returns what runs the program in a network namespace with a pair of veth, of which `near` is up, behind these
/// commands; `None` if this process may make no namespace.
fn in_namespace(commands: &str) -> Option<Command> {
    if !Command::new("unshare").args(["--net", "true"]).status().unwrap().success() {
        eprintln!("skipped: this process may not make a network namespace");
        return None;
    }
    let pair = "ip link add near type veth peer name far && ip link set near up";
    let script = format!("{pair} && {commands} && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", &script, "sh", BINARY]);
    Some(command)
}

/// The process looks after what an uplink depends on when it is confined.
#[test]
fn an_uplink_is_looked_after_in_the_sandbox() {
    let address = "ip address add 192.0.2.1/24 dev near && ip link set far up";
    let Some(command) = in_namespace(address) else { return };
    let uplink = "vxlan=5,local=192.0.2.1,remote=192.0.2.2,carrier=near";
    let guests = ["name=a,mac=52:54:00:00:00:01,vhost-user"];
    let mut daemon = Daemon::run(command, "look", &["--uplink", uplink], &guests);
    let pid = daemon.child.id().to_string();
    let set = |words: &str| {
        let mut command = Command::new("nsenter");
        command.args(["--target", &pid, "--net", "ip", "link", "set"]).args(words.split(' '));
        assert!(command.status().unwrap().success(), "{words}");
    };
    set("near mtu 1400");
    daemon.wait_for("the route carries longer or shorter packets");
    set("far down");
    daemon.wait_for("there is no carrier");
    set("far up");
    daemon.wait_for("there is a carrier again");
    daemon.end();
}

/// Guests come to a network whose uplink is an interface, and leave it.
#[test]
fn guests_come_to_a_network_on_an_interface() {
    let Some(command) = in_namespace("true") else { return };
    let guests = ["name=a,mac=52:54:00:00:00:01,vhost-user"];
    let daemon = Daemon::run(command, "interface", &["--uplink", "interface=near"], &guests);
    for mac in ["mac=52:54:00:00:00:02,", "", "mac=52:54:00:00:00:03,"] {
        let spec = format!("name=b,{mac}vhost-user={}", daemon.path("b").display());
        assert_eq!(run(&daemon, &["add", "--guest", &spec]), (true, String::new()));
        FrontEnd::start(connect(&daemon.path("b")), 1).wait(1);
        assert_eq!(run(&daemon, &["remove", "--drain", "b"]), (true, String::new()));
        wait_for_guest(&daemon, "b", false);
    }
    daemon.end();
}

/// The policy of a guest changes while its driver runs, which is refused more objects at once. What it has stays.
#[test]
fn policies_change_while_guests_run() {
    let daemon = Daemon::start_with("set", &[], &["name=a,qps=100,vhost-user"]);
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 4);
    front_end.wait(4);
    let guest = |daemon: &Daemon| daemon.status()["guests"][0].clone();
    let set = |policy: &str| run(&daemon, &["set", "a", policy]);
    let before = guest(&daemon);
    assert_eq!((before["pds"].as_u64(), before["limits"]["memory"].as_u64()), (Some(4), None));
    let done = (true, String::new());
    assert_eq!(set("pds=3,memory=1G,gid=10.0.0.1+fd00::/64,qps=default"), done);
    front_end.post(8);
    front_end.kick();
    front_end.wait(8);
    let after = guest(&daemon);
    assert_eq!(after["pds"], 4, "no PD has come, and none has gone");
    assert_eq!(after["counters"]["command_no_resource"], 4);
    assert_eq!(
        (&after["limits"]["pds"], &after["limits"]["memory"]),
        (&3.into(), &(1 << 30).into())
    );
    let path = daemon.path("a").display().to_string();
    let spec = json!({ "name": "a", "vhost_user": path, "pds": 3, "memory": "1G",
        "gid": ["10.0.0.1", "fd00::/64"] });
    assert_eq!((&after["spec"], after["origin"].as_str()), (&spec, Some("options")));
    let named = json!({ "name": "a", "vhost_user": path, "qps": 100 });
    assert_eq!(after["named"], named);
    assert_eq!(set("pds=100"), done);
    front_end.post(9);
    front_end.kick();
    front_end.wait(9);
    assert_eq!(guest(&daemon)["pds"], 5);
    drop(front_end);
    daemon.end();
}

#[test]
fn policies_that_are_wrong_are_refused() {
    let daemon = Daemon::start("setting");
    let method = "org.virtio-rdma.Daemon.SetPolicy";
    let mut socket = connect(&daemon.path("control"));
    let before = daemon.status()["guests"][0]["spec"].clone();
    for (name, policy, error, parameter, value) in [
        ("a", json!({ "qps": 1, "rings": null }), "NotChangeable", "key", "rings"),
        ("a", json!({ "qps": 1, "message_rate": "0" }), "InvalidPolicy", "key", "message-rate"),
        ("a", json!({ "speed": 1 }), "InvalidPolicy", "key", "speed"),
        ("c", json!({}), "UnknownGuest", "name", "c"),
        // Earlier versions know texts.
        ("c", "qps=1".into(), "UnknownGuest", "name", "c"),
        ("a", "qps=1,rings=off".into(), "NotChangeable", "key", "rings"),
        ("a", "qps=1,pds=0".into(), "InvalidPolicy", "key", "pds"),
        ("a", "qps=1,speed=1".into(), "InvalidPolicy", "key", "speed"),
        ("a", "qps=1,qps=2".into(), "InvalidPolicy", "key", "qps"),
        ("a", "".into(), "InvalidPolicy", "key", ""),
    ] {
        let parameters = json!({ "name": name, "policy": policy });
        let answer = call(&mut socket, method, &parameters);
        assert_eq!(answer["error"], format!("org.virtio-rdma.Daemon.{error}"), "{answer}");
        assert_eq!(answer["parameters"][parameter], value, "{answer}");
    }
    assert_eq!(daemon.status()["guests"][0]["spec"], before);
    for policy in [json!({ "qps": 7, "pds": null }), "qps=7,pds=default".into()] {
        let parameters = json!({ "name": "a", "policy": policy });
        let answer = call(&mut socket, method, &parameters);
        assert_eq!(answer["parameters"]["spec"]["qps"], 7, "{answer}");
    }
    // The client sees such a mistake before it asks.
    let (worked, error) = run(&daemon, &["set", "a", "mac=52:54:00:00:00:09"]);
    assert!(!worked && error.contains("mac cannot be changed while the guest is there"), "{error}");
    daemon.end();
}

/// The completion of the shell has the options, commands and keys of --help, and no other.
#[test]
fn the_completion_has_what_the_help_has() {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let mut check = Command::new(tools.join("deb/check-completion"));
    let output = output(check.arg(BINARY).arg(tools.join("virtio-rdmad/completion.bash")));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Commands find the control socket by the variable, and at the place of the service without it.
#[test]
fn commands_find_the_control_socket() {
    let daemon = Daemon::start("usual");
    let status = |environment: Option<PathBuf>| {
        let mut command = Command::new(BINARY);
        command.args(["status", "--brief"]).env_remove("VIRTIO_RDMAD_CONTROL");
        command.envs(environment.map(|path| ("VIRTIO_RDMAD_CONTROL", path)));
        let output = output(&mut command);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let (worked, said, _) = status(Some(daemon.path("control")));
    assert!(worked && said.contains("\na: not connected"), "{said}");
    let (worked, _, error) = status(Some(daemon.path("nothing")));
    let path = daemon.path("nothing").display().to_string();
    assert!(!worked && error.starts_with(&format!("virtio-rdmad: {path}: ")), "{error}");
    // The service of the package may run on this machine.
    let (worked, _, error) = status(None);
    let is_named = error.starts_with("virtio-rdmad: /run/virtio-rdmad/control/socket: ");
    assert!(worked || is_named, "{error}");
    daemon.end();
}

#[test]
fn a_level_of_the_log_that_does_not_exist_is_refused() {
    for (level, known) in [("engine=debug,warn", true), ("engine=loud", false)] {
        let output = output(Command::new(BINARY).args(["--log", level]));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            error.contains(&format!("invalid value '{level}' for '--log")),
            !known,
            "{error}"
        );
        assert!(!output.status.success(), "there is no guest");
    }
}

#[test]
fn a_configuration_file_is_checked() {
    let check = |file: &ConfigFile| {
        let output = output(Command::new(BINARY).arg("check").arg(&file.0));
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let good = ConfigFile::new("check", "workers = 1\n[[guest]]\nname = 'a'\nvfio-user = '/a'\n");
    let path = good.0.display();
    let said = format!("{path}: no mistakes; guests: 1, uplinks: 0\n");
    assert_eq!(check(&good), (Some(0), said, String::new()));
    good.write(
        "workers = 0\n[[guest]]\nname = 'a'\nvfio-user = '/a'\ngid = ['10.0.0']\nnome = 1\n",
    );
    let (status, said, error) = check(&good);
    assert_eq!((status, said.as_str()), (Some(1), ""));
    let lines: Vec<_> = error.lines().collect();
    let gid =
        format!("{path}:5: gid: \"10.0.0\" is not an IP address or a prefix such as 10.0.0.0/24");
    assert_eq!(lines.len(), 4, "{error}");
    assert!(
        lines[0].starts_with(&format!("{path}:1: invalid value '0' for '--workers")),
        "{error}"
    );
    assert_eq!(lines[1], gid);
    assert!(
        lines[2].starts_with(&format!("{path}:6: unknown key \"nome\"; there are name, ")),
        "{error}"
    );
    assert_eq!(lines[3], format!("virtio-rdmad: {path}: mistakes: 3"));
}

#[test]
fn a_process_starts_without_a_guest() {
    let daemon = Daemon::start_with("empty", &["--workers", "2"], &[]);
    assert_eq!(daemon.status()["guests"], json!([]));
    let sockets: Vec<_> = ["c", "d", "e"]
        .map(|name| {
            let path = daemon.path(name);
            let spec = format!("name={name},vhost-user={}", path.display());
            assert_eq!(run(&daemon, &["add", "--guest", &spec]), (true, String::new()));
            let mut vmm = connect(&path);
            vhost_user(&mut vmm, 1, &[]);
            vmm
        })
        .into();
    let status = daemon.status();
    let workers = status["workers"].as_array().unwrap().iter();
    let mut guests: Vec<_> = workers.map(|worker| worker["guests"].as_u64().unwrap()).collect();
    guests.sort_unstable();
    assert_eq!(guests, [1, 2]);
    for name in ["c", "d", "e"] {
        assert_eq!(run(&daemon, &["remove", "--drain", name]), (true, String::new()));
    }
    drop(sockets);
    daemon.end();
}

#[test]
fn guests_that_cannot_come_are_refused() {
    let daemon = Daemon::start("refuse");
    let spec = |keys: &str| format!("{keys},vhost-user={}", daemon.path("c").display());
    let with_nic = format!("name=c,mac=52:54:00:00:00:09,nic={}", daemon.path("n").display());
    for (keys, error) in [
        ("name=a", "NameTaken"),
        ("name=c,mac=52:54:00:00:00:01", "AddressTaken"),
        (&with_nic, "NotSupported"),
    ] {
        let (worked, said) = run(&daemon, &["add", "--guest", &spec(keys)]);
        assert!(!worked && said.contains(error), "{keys}: {said}");
        let is_there = daemon.path("c").exists() || daemon.path("n").exists();
        assert!(!is_there, "the sockets of a guest that was refused");
    }
    let mut socket = connect(&daemon.path("control"));
    let method = "org.virtio-rdma.Daemon.AddGuest";
    for (parameters, error) in [
        (json!({}), "org.varlink.service.InvalidParameter"),
        (json!({ "spec": "name=c" }), "org.virtio-rdma.Daemon.InvalidSpec"),
        (json!({ "guest": { "name": "c" } }), "org.virtio-rdma.Daemon.InvalidSpec"),
        (
            json!({ "guest": { "name": "c", "vhost_user": "c" } }),
            "org.virtio-rdma.Daemon.InvalidSpec",
        ),
        (
            json!({ "guest": { "name": "c", "vhost_user": "/c", "qps": "many" } }),
            "org.virtio-rdma.Daemon.InvalidSpec",
        ),
        (json!({ "spec": "name=c,vhost-user=c" }), "org.virtio-rdma.Daemon.InvalidSpec"),
        (json!({ "spec": spec("name=c") }), "org.virtio-rdma.Daemon.InvalidSocket"),
    ] {
        let answer = call(&mut socket, method, &parameters);
        assert_eq!(answer["error"], error, "{parameters}: {answer}");
    }
    // These are descriptors, and no listening sockets.
    let (one, other) = UnixStream::pair().unwrap();
    for descriptor in [one.as_fd(), std::io::stdin().as_fd()] {
        let request = json!({ "method": method, "parameters": { "spec": spec("name=c") } });
        let bytes = format!("{request}\0").into_bytes();
        assert_eq!(testkit::socket::send(&socket, &bytes, &[descriptor]), Ok(bytes.len()));
        let mut answer = Vec::new();
        BufReader::new(&socket).read_until(0, &mut answer).unwrap();
        assert!(String::from_utf8_lossy(&answer).contains("InvalidSocket"), "{answer:?}");
    }
    drop((one, other));
    daemon.end();
}

/// A call that wants no detail gets the numbers of QPs without their entries, and `metrics` has the same numbers.
#[test]
fn qps_are_counted_without_an_entry_for_each() {
    let daemon = Daemon::start_with("count", &[], &two_guests(Protocol::VhostUser));
    let pair = pair(&daemon, Protocol::VhostUser);
    let mut socket = connect(&daemon.path("control"));
    let mut guest = |parameters: &Value| {
        let answer = call(&mut socket, "org.virtio-rdma.Daemon.Status", parameters);
        answer["parameters"]["guests"][0].clone()
    };
    let [all, none, brief] = [json!({ "detail": true }), json!({}), json!({ "detail": false })]
        .map(|parameters| guest(&parameters));
    assert_eq!(all["qps"], none["qps"]);
    assert_eq!((&brief["qps"], &brief["srqs"]), (&json!([]), &json!([])));
    assert_eq!((&brief["qp_counts"], &brief["cqs"]), (&all["qp_counts"], &all["cqs"]));
    let mut counts = BTreeMap::<(&str, &str), u64>::new();
    for qp in all["qps"].as_array().unwrap() {
        let key = ["type", "state"].map(|key| qp[key].as_str().unwrap());
        *counts.entry(key.into()).or_default() += 1;
    }
    assert!(!counts.is_empty());
    assert_eq!(brief["qp_counts"].as_array().unwrap().len(), counts.len());
    let mut command = Command::new(BINARY);
    let output = output(command.args(["metrics", "--control"]).arg(daemon.path("control")));
    let text = String::from_utf8(output.stdout).unwrap();
    for ((kind, state), count) in counts {
        let of = json!({ "type": kind, "state": state, "count": count });
        assert!(brief["qp_counts"].as_array().unwrap().contains(&of), "{of} is not in {brief}");
        let labels =
            format!("{{guest=\"a\",network=\"default\",type=\"{kind}\",state=\"{state}\"}}");
        let line = format!("virtio_rdma_guest_qps{labels} {count}\n");
        assert!(text.contains(&line), "{line} is not in:\n{text}");
    }
    let mut command = Command::new(BINARY);
    command.args(["status", "--json", "--brief", "--control"]).arg(daemon.path("control"));
    let status: Value = serde_json::from_slice(&self::output(&mut command).stdout).unwrap();
    assert_eq!(status["guests"][0]["qps"], json!([]));
    drop(pair);
    daemon.end();
}

/// A guest that has work has processor time, and one whose VMM is not there has none.
#[test]
fn the_processor_time_of_a_guest_is_counted() {
    let daemon = Daemon::start("work");
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let work = |at: usize| daemon.status()["guests"][at]["work_seconds"].as_f64().unwrap();
    // The time of a turn is counted behind it.
    while work(0) == 0.0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(work(1) == 0.0);
    drop(front_end);
    daemon.end();
}

#[test]
fn metrics_are_printed() {
    let daemon = Daemon::start("metrics");
    let control = daemon.path("control");
    let output = output(Command::new(BINARY).args(["metrics", "--control"]).arg(&control));
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("virtio_rdma_guest_connected{guest=\"a\",network=\"default\"} 0\n"),
        "{text}"
    );
    assert!(text.ends_with("# EOF\n"), "{text}");
    daemon.end();
}

/// Whatever the dashboard for Grafana queries is printed, for a process with an uplink and a guest of each transport.
#[test]
fn the_dashboard_queries_metrics_that_are_printed() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let at = |end: u8| format!("127.{high}.{low}.{end}");
    let uplink = format!("vxlan=5,local={},remote={}", at(9), at(10));
    let guests = ["name=a,vhost-user", "name=b,vfio-user"];
    let daemon = Daemon::start_with("dashboard", &["--uplink", &uplink], &guests);
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let mut command = Command::new(BINARY);
    let output = output(command.args(["metrics", "--control"]).arg(daemon.path("control")));
    let text = String::from_utf8(output.stdout).unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let names: HashSet<String> = types
        .flat_map(|(name, kind)| {
            let suffixes: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            suffixes.iter().map(move |suffix| format!("{name}{suffix}"))
        })
        .collect();
    let dashboard: Value =
        serde_json::from_str(include_str!("../../../examples/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries = targets.map(|target| target["expr"].as_str().unwrap());
    let rules = include_str!("../../../examples/alerts.yml");
    assert!(rules.matches("virtio_rdma_").count() > 4);
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let queried: Vec<&str> = queries
        .chain(std::iter::once(rules))
        .flat_map(|query| query.split(|c| !is_part(c)))
        .filter(|word| word.starts_with("virtio_rdma_"))
        .collect();
    assert!(queried.len() >= panels.len(), "{queried:?}");
    for name in queried {
        assert!(names.contains(name), "{name} is not in:\n{text}");
    }
    drop(front_end);
    daemon.end();
}

#[test]
fn top_prints_plain_lines_where_there_is_no_terminal() {
    let daemon = Daemon::start("top");
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let mut command = Command::new(BINARY);
    command.args(["top", "--once", "--interval", "0.1", "--control"]).arg(daemon.path("control"));
    let output = output(&mut command);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("virtio-rdmad") && text.contains(": 2 guests, 1 connected; "),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
    let last: Vec<_> =
        text.lines().rev().take(2).filter_map(|l| l.split(' ').next_back()).collect();
    assert_eq!(last, ["b", "a"], "{text}");
    drop(front_end);
    daemon.end();
}

/// However a user ends `top`, the terminal is as it was before.
#[test]
fn top_leaves_the_terminal_as_it_was() {
    let daemon = Daemon::start("terminal");
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    unlockpt(&keyboard).unwrap();
    let terminal = ioctl_tiocgptpeer(&keyboard, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    let size = Winsize { ws_row: 7, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).unwrap();
    let mut keyboard = File::from(keyboard);
    let modes = || tcgetattr(&terminal).unwrap().local_modes;
    let before = modes();
    for end in [Some(b'q'), Some(3), None] {
        let mut command = Command::new(BINARY);
        command.args(["top", "--interval", "0.1", "--control"]).arg(daemon.path("control"));
        let end_of = || Stdio::from(terminal.try_clone().unwrap());
        let mut child = command.process_group(0).stdin(end_of()).stdout(end_of()).spawn().unwrap();
        let _watchdog = Watchdog::new(&child, LIMIT);
        let mut shown = Vec::new();
        let mut read_up_to = |mut keyboard: &File, text: &str| {
            while !String::from_utf8_lossy(&shown).contains(text) {
                let limit = Timespec::try_from(LIMIT).unwrap();
                let mut fds = [PollFd::new(&keyboard, PollFlags::IN)];
                assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{text:?} is not shown");
                let mut room = [0; 4096];
                let len = keyboard.read(&mut room).unwrap();
                shown.extend_from_slice(&room[..len]);
            }
            String::from_utf8(std::mem::take(&mut shown)).unwrap()
        };
        let frame = read_up_to(&keyboard, "\x1b[J");
        assert!(frame.starts_with("\x1b[?1049h"), "{frame:?}");
        // There is no room for the second guest, nor for the last columns.
        assert!(frame.contains("... 2 more") && !frame.contains("ERR/S"), "{frame:?}");
        assert_ne!(modes(), before);
        match end {
            Some(key) => keyboard.write_all(&[key]).unwrap(),
            None => kill_process(Pid::from_child(&child), Signal::TERM).unwrap(),
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(modes(), before);
        let rest = read_up_to(&keyboard, "\x1b[?1049l");
        assert!(rest.ends_with("\x1b[?25h\x1b[?1049l"), "{rest:?}");
    }
    daemon.end();
}

#[test]
fn two_processes_do_not_share_a_socket() {
    let daemon = Daemon::start("busy");
    let spec = format!("name=a,vhost-user={}", daemon.path("a").display());
    let output = output(Command::new(BINARY).args(["--guest", &spec]));
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another process listens there"));
    assert!(daemon.path("a").exists());
    daemon.end();
}

/// Starts a process with eight guests and connects to each.
fn eight(test: &str, options: &[&str]) -> (Daemon, Vec<UnixStream>) {
    let guests: Vec<String> = (0..8).map(|guest| format!("name={guest},vhost-user")).collect();
    let guests: Vec<&str> = guests.iter().map(String::as_str).collect();
    let daemon = Daemon::start_with(test, options, &guests);
    let connect = |guest: i32| {
        let mut socket = connect(&daemon.path(&guest.to_string()));
        vhost_user(&mut socket, 1, &[]);
        socket
    };
    let sockets = (0..8).map(connect).collect();
    (daemon, sockets)
}

#[test]
fn guests_are_served_in_the_sandbox() {
    let daemon = Daemon::start("served");
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let guest = &daemon.status()["guests"][0];
    assert_eq!((&guest["started"], &guest["queues"]), (&true.into(), &"virtqueues".into()));
    assert_eq!((&guest["worker"], &guest["pds"]), (&0.into(), &1.into()));
    front_end.post(2);
    front_end.kick();
    front_end.wait(2);
    front_end.truncate();
    front_end.kick();
    // Other guests do not notice, also those of the same worker.
    let mut other = connect(&daemon.path("b"));
    other.write_all(&[0xff; 64]).unwrap();
    assert_eq!(other.read(&mut [0; 16]).unwrap_or(0), 0, "the connection ends");
    drop(front_end);
    let again = FrontEnd::start(connect(&daemon.path("a")), 1);
    again.wait(1);
    daemon.end();
}

/// Returns how many guests each worker serves.
fn guests_of_workers(daemon: &Daemon) -> Vec<u64> {
    let status = daemon.status();
    let workers = status["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker["guests"].as_u64().unwrap()).collect()
}

#[test]
fn guests_are_spread_over_workers() {
    let (mut daemon, mut sockets) = eight("spread", &["--workers", "3"]);
    assert_eq!(guests_of_workers(&daemon), [3, 3, 2]);
    let status = daemon.status();
    let workers = status["guests"].as_array().unwrap().iter();
    assert_eq!(workers.filter(|guest| guest["worker"] == 1).count(), 3);
    // The next guest that connects goes to a worker that guests have left.
    for _ in 0..2 {
        drop(sockets.remove(0));
        daemon.wait_for("disconnected");
    }
    assert_eq!(guests_of_workers(&daemon), [2, 2, 2]);
    assert_eq!(daemon.status()["guests"][0]["connected"], false);
    daemon.end();
}

/// Guests of a worker go to another one whose guests have gone.
#[test]
fn workers_share_the_guests_that_are_left() {
    let (mut daemon, sockets) = eight("share", &["--workers", "2"]);
    let mut watch = Command::new(BINARY);
    watch.args(["watch", "--control"]).arg(daemon.path("control"));
    let mut watch = watch.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
    let _watchdog = Watchdog::new(&watch, LIMIT);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().ends_with("watching"));
    let (mut stay, go): (Vec<_>, Vec<_>) =
        (0..).zip(sockets).partition(|(guest, _)| guest % 2 == 0);
    drop(go);
    for _ in 0..2 {
        daemon.wait_for("moved");
        assert!(lines.any(|line| line.contains(": moved, worker 1")));
    }
    assert_eq!(guests_of_workers(&daemon), [2, 2]);
    for (_, socket) in &mut stay {
        assert_eq!(vhost_user(socket, 1, &[]).len(), 8);
    }
    daemon.end();
    assert!(watch.wait().unwrap().success());
}

#[test]
fn idle_workers_do_nothing() {
    let (daemon, _sockets) = eight("idle", &["--workers", "2", "--poll-us", "1000"]);
    // All workers sleep, and are not just about to look once more.
    let mut before = daemon.counts();
    loop {
        let now = daemon.counts();
        if now.1 && now == before {
            break;
        }
        before = now;
    }
    for _ in 0..20 {
        assert_eq!(daemon.counts(), before);
    }
    daemon.end();
}

#[test]
fn workers_are_pinned() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    // The order differs from that of the kernel.
    let list: Vec<String> = cpus.iter().rev().take(8).map(usize::to_string).collect();
    let (daemon, _sockets) = eight("pinned", &["--cpus", &list.join(",")]);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap();
    let mut pinned: Vec<(String, String)> = Vec::new();
    for task in tasks {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.trim().to_owned()
        };
        if field("Name:").starts_with("worker") {
            pinned.push((field("Name:"), field("Cpus_allowed_list:")));
        }
    }
    pinned.sort();
    let expected: Vec<_> =
        list.into_iter().enumerate().map(|(index, cpu)| (format!("worker {index}"), cpu)).collect();
    assert_eq!(pinned, expected);
    daemon.end();
}

/// Returns a CPU of each NUMA node that has CPUs which this process may use, by the node's number.
fn nodes() -> BTreeMap<u64, usize> {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let node_of = |cpu| {
        let directory = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}")).ok()?;
        let mut names = directory.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let node = names.find_map(|name| name.strip_prefix("node")?.parse().ok())?;
        Some((node, cpu))
    };
    cpus.filter_map(node_of).collect()
}

/// A guest is served on the NUMA node on which its memory lies. A machine with one node has no choice.
#[test]
fn guests_are_served_on_their_nodes() {
    let nodes = nodes();
    let workers = nodes.len().max(2);
    // There are no more workers than guests, if guests cannot come.
    let names: Vec<_> =
        ('a'..='z').take(workers).map(|name| format!("name={name},vhost-user")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let daemon = Daemon::start_with("nodes", &["--workers", &workers.to_string()], &names);
    // The first guest gets the first worker, which is on the first node. Its memory is on the last one.
    let mut cpus = nodes.values().rev().cycle();
    let front_ends = ["a", "b"].map(|name| {
        if let Some(cpu) = cpus.next() {
            let mut set = rustix::thread::CpuSet::new();
            set.set(*cpu);
            rustix::thread::sched_setaffinity(None, &set).unwrap();
        }
        let front_end = FrontEnd::start(connect(&daemon.path(name)), 1);
        front_end.wait(1);
        front_end
    });
    let is_near = |status: &Value, guest: usize| {
        let guest = &status["guests"][guest];
        let Some(worker) = guest["worker"].as_u64() else { return false };
        let node = &status["workers"][usize::try_from(worker).unwrap()]["node"];
        // A memory policy may have put the memory on a node without a worker, and a filter may refuse to tell.
        let is_known = guest["node"].as_u64().is_some_and(|node| nodes.contains_key(&node));
        if nodes.len() < 2 {
            node.is_null()
        } else {
            !is_known || *node == guest["node"]
        }
    };
    let end = Instant::now() + LIMIT;
    loop {
        let status = daemon.status();
        if (0..2).all(|guest| is_near(&status, guest)) {
            break;
        }
        assert!(Instant::now() < end, "{status}");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(front_ends);
    daemon.end();
}

#[test]
fn workers_need_a_cpu_each() {
    let guests = ["--guest", "name=a,vhost-user=/a", "--guest", "name=b,vhost-user=/b"];
    let output = output(Command::new(BINARY).args(guests).args(["--workers", "2", "--cpus", "0"]));
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("only 1 CPUs"));
}

/// A process that root starts has another user once its sockets are open.
#[test]
fn it_gives_root_up() {
    let is_root = rustix::process::geteuid().is_root();
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
    let users: u64 =
        map.lines().filter_map(|l| l.split_whitespace().last()?.parse::<u64>().ok()).sum();
    if !is_root || users < 2000 {
        eprintln!("skipped: this is not root, or of a user namespace of {users} users");
        return;
    }
    let daemon = Daemon::start_with("root", &["--user", "1234:1235"], &["name=a,vhost-user"]);
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        assert!(status.contains("Uid:\t1234\t1234\t1234\t1234"), "{status}");
        assert!(status.contains("Gid:\t1235\t1235\t1235\t1235"), "{status}");
        assert!(status.contains("Groups:\t \n"), "{status}");
    }
    let directory = daemon.directory.clone();
    drop(daemon);
    std::fs::remove_dir_all(directory).unwrap();
}

/// No wait of these tests is without a bound.
#[test]
fn a_process_that_hangs_is_killed() {
    let mut command = Command::new("sleep");
    let mut child = command.arg("infinity").process_group(0).spawn().unwrap();
    let _watchdog = Watchdog::new(&child, Duration::ZERO);
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
}

/// Another process, which serves no guest, removes the sockets.
#[test]
fn sockets_go_with_a_process_that_is_killed() {
    let mut daemon = Daemon::start("killed");
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    // The log ends when the last process that writes it has.
    daemon.stderr.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(std::fs::read_dir(&daemon.directory).unwrap().count(), 0);
    std::fs::remove_dir(&daemon.directory).unwrap();
}

/// A service manager and a terminal send signals to all processes.
#[test]
fn signals_to_all_processes_leave_no_socket() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut daemon = Daemon::start("group");
        let group = Pid::from_child(&daemon.child);
        kill_process_group(group, signal).unwrap();
        assert!(daemon.child.wait().unwrap().success());
        assert_eq!(std::fs::read_dir(&daemon.directory).unwrap().count(), 0);
        std::fs::remove_dir(&daemon.directory).unwrap();
    }
}

#[test]
fn it_also_runs_without_a_sandbox() {
    let (daemon, mut sockets) = eight("open", &["--sandbox", "off"]);
    vhost_user(&mut sockets[7], 1, &[]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    assert!(status.contains("Seccomp:\t0"));
    daemon.end();
    let (daemon, _sockets) = eight("closed", &[]);
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap() {
        let path = task.unwrap().path().join("status");
        // The sockets exist before the threads have confined themselves.
        while !std::fs::read_to_string(&path).unwrap().contains("Seccomp:\t2") {
            std::thread::yield_now();
        }
        let status = std::fs::read_to_string(&path).unwrap();
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert!(status.contains(&format!("{set}:\t0000000000000000")), "{status}");
        }
    }
    daemon.end();
}

/// Starts a process with a guest whose network interface is connected, and with a tunnel.
fn with_interface(test: &str, sandbox: &str, end: u8, other: u8) -> (Daemon, UnixStream) {
    let [.., high, low] = std::process::id().to_be_bytes();
    let at = |end: u8| format!("127.{high}.{low}.{end}");
    let uplink = format!("vxlan=5,local={},remote={}", at(end), at(other));
    let test = format!("{test}-{end}");
    let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
    let nic = directory.join("nic");
    let guest = format!("name=g,mac=52:54:00:00:00:{end:02x},nic={},vfio-user", nic.display());
    let options = ["--sandbox", sandbox, "--uplink", &uplink];
    let mut daemon = Daemon::start_with(&test, &options, &[&guest]);
    let stream = connect(&nic);
    daemon.wait_for("network interface connected");
    (daemon, stream)
}

#[test]
fn frames_go_from_one_process_to_another() {
    for sandbox in ["off", "on"] {
        let (one, mut first) = with_interface(&format!("tunnel-{sandbox}"), sandbox, 1, 2);
        let (two, mut second) = with_interface(&format!("tunnel-{sandbox}"), sandbox, 2, 1);
        let mac = |end: u8| [0x52, 0x54, 0, 0, 0, end];
        for (to, from, is_back) in
            [([0xff; 6], mac(1), false), (mac(1), mac(2), true), (mac(2), mac(1), false)]
        {
            let frame = [&to[..], &from, &[0x88, 0xb5], &[7; 1000]].concat();
            let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
            let (sender, receiver) =
                if is_back { (&mut second, &mut first) } else { (&mut first, &mut second) };
            sender.write_all(&[&length[..], &frame].concat()).unwrap();
            let mut came = vec![0; 4 + frame.len()];
            receiver.read_exact(&mut came).unwrap();
            assert!(came[..4] == length && came[4..] == frame, "to {to:x?}");
        }
        let status = one.status();
        let (uplink, nic) = (&status["uplinks"][0]["counters"], &status["guests"][0]["nic"]);
        assert_eq!([&uplink["tx_frames"], &uplink["tx_flooded"], &uplink["rx_frames"]], [2, 1, 1]);
        assert_eq!([&nic["rx_frames"], &nic["tx_frames"], &nic["tx_lost"]], [2, 1, 0]);
        one.end();
        two.end();
    }
}

/// Sends a frame from one network interface to another one.
fn send_frame((from, mut sender): (u8, &UnixStream), (to, mut receiver): (u8, &UnixStream)) {
    let mac = |guest: u8| [0x52, 0x54, 0, 0, 0, guest];
    let frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5], &[from; 100]].concat();
    let framed = [&u32::try_from(frame.len()).unwrap().to_be_bytes()[..], &frame].concat();
    sender.write_all(&framed).unwrap();
    let mut came = vec![0; framed.len()];
    receiver.read_exact(&mut came).unwrap();
    assert_eq!(came, framed);
}

/// A guest that is added has a network interface, also after a restart, until it is removed.
#[test]
fn added_guests_have_network_interfaces() {
    let nic = std::env::temp_dir().join(format!("rdmad-nic-{}", std::process::id()));
    let first = format!("name=a,mac=52:54:00:00:00:01,nic={},vfio-user", nic.display());
    let mut daemon = Daemon::supervised("nics", &[&first]);
    let added = daemon.path("n");
    let spec = format!(
        "name=b,mac=52:54:00:00:00:02,nic={},vfio-user={}",
        added.display(),
        daemon.path("b").display()
    );
    for round in 0..3 {
        assert_eq!(run(&daemon, &["add", "--guest", &spec]), (true, String::new()));
        for restart in [false, true] {
            if restart {
                daemon.restart();
            }
            let (one, mut other) = (connect(&nic), connect(&added));
            for _ in 0..2 {
                daemon.wait_for("network interface connected");
            }
            send_frame((1, &one), (2, &other));
            send_frame((2, &other), (1, &one));
            let status = daemon.status();
            let guests = status["guests"].as_array().unwrap();
            let b = guests.iter().find(|guest| guest["name"] == "b").unwrap();
            assert_eq!(b["nic"]["rx_frames"], 1, "round {round}: {b}");
            if restart {
                assert_eq!(run(&daemon, &["remove", "b"]), (true, String::new()));
                assert_eq!(other.read(&mut [0; 1]).unwrap_or(0), 0, "its connection ends");
            }
            drop((one, other));
        }
        assert!(!added.exists() && !daemon.path("b").exists());
    }
    daemon.end();
}

/// DEVICE_NEEDS_RESET.
const NEEDS_RESET: u64 = 0x40;

fn needs_reset(front_end: &FrontEnd) -> bool {
    front_end.ask_status();
    front_end.status() & NEEDS_RESET != 0
}

/// The VMM of a process that is killed does not notice that there is another one. It learns that the device needs a
/// reset, and the device works after it.
#[test]
fn a_connection_outlives_the_process() {
    let mut daemon = Daemon::supervised("crash", &["name=a,vhost-user", "name=b,vhost-user"]);
    let (mut one, other) = (connect(&daemon.path("a")), connect(&daemon.path("b")));
    vhost_user(&mut one, 1, &[]);
    let mut front_end = FrontEnd::start(other, 1);
    front_end.wait(1);
    for round in 0..6 {
        daemon.crash();
        assert!(needs_reset(&front_end), "round {round}");
        front_end = front_end.start_again(2);
        front_end.wait(2);
        assert!(!needs_reset(&front_end), "round {round}");
        let features = u64::from_ne_bytes(vhost_user(&mut one, 1, &[]).try_into().unwrap());
        assert_eq!(features & 3, 1, "events, and no MAC");
    }
    let status = daemon.status();
    assert_eq!(status["guests"][1]["connected"].as_bool(), Some(true));
    // A VMM that leaves is not kept.
    drop(front_end);
    daemon.wait_for("disconnected");
    daemon.crash();
    let status = daemon.status();
    let connected = [0, 1].map(|guest| status["guests"][guest]["connected"].as_bool());
    assert_eq!(connected, [Some(true), Some(false)]);
    FrontEnd::start(connect(&daemon.path("b")), 1).wait(1);
    daemon.end();
}

/// Hundreds of guests that were added one by one fit into a process, one of them with many regions of memory, and the
/// next process has all of them and all of their memory.
#[test]
fn hundreds_of_guests_outlive_a_restart() {
    const GUESTS: u64 = 300;
    let mut daemon = Daemon::supervised("hundreds", &["name=a,vhost-user"]);
    let mut front_ends = Vec::new();
    for index in 0..GUESTS {
        let path = daemon.path(&format!("g{index}"));
        let guest =
            format!("name=g{index},rings=off,max-qp=1,max-cq=1,vhost-user={}", path.display());
        assert_eq!(run(&daemon, &["add", "--guest", &guest]), (true, String::new()), "{index}");
        front_ends.push(FrontEnd::start(connect(&path), 1));
        front_ends.last().unwrap().wait(1);
    }
    // Regions beyond those that each guest is guaranteed, for a guest that the next process does not add first.
    front_ends[10].add_regions(200);
    let mut posted = 1;
    for _ in 0..2 {
        posted += 40;
        for front_end in &front_ends {
            front_end.post(posted);
            front_end.kick();
            front_end.wait(posted);
        }
        daemon.restart();
    }
    let number = |reply: &[u8; 5]| u32::from_le_bytes(reply[1..].try_into().unwrap());
    for (index, front_end) in front_ends.iter().enumerate() {
        assert!(!needs_reset(front_end), "{index}");
        front_end.post(REQUESTS);
        front_end.kick();
        front_end.wait(REQUESTS);
        let replies = front_end.replies();
        assert!(replies.iter().all(|reply| reply[0] == 0), "{index}: {replies:?}");
        let numbers: HashSet<u32> = replies.iter().map(number).collect();
        assert_eq!(
            numbers.len(),
            usize::from(REQUESTS),
            "{index}: each PD has a number of its own"
        );
    }
    let status = daemon.status();
    let guests = status["guests"].as_array().unwrap();
    let whole = guests.iter().filter(|guest| guest["pds"] == u64::from(REQUESTS));
    assert_eq!(whole.count() as u64, GUESTS);
    drop(front_ends);
    for index in 0..GUESTS {
        std::fs::remove_file(daemon.path(&format!("g{index}"))).unwrap();
    }
    daemon.end();
}

/// The device of a process that ends in order goes on in the next one.
#[test]
fn a_device_outlives_a_restart() {
    let mut daemon = Daemon::supervised("restart", &["name=a,vhost-user", "name=b,vhost-user"]);
    let mut idle = connect(&daemon.path("a"));
    vhost_user(&mut idle, 1, &[]);
    let mut front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    let pds = |daemon: &Daemon| daemon.status()["guests"][1]["pds"].as_u64().unwrap();
    for round in 1..20 {
        // The device looks for what nobody has told it of.
        front_end.post(round + 1);
        daemon.restart();
        front_end.wait(round + 1);
        assert_eq!(pds(&daemon), u64::from(round) + 1, "what the guest has made is there");
        assert!(!needs_reset(&front_end), "round {round}");
        let features = u64::from_ne_bytes(vhost_user(&mut idle, 1, &[]).try_into().unwrap());
        assert_eq!(features & 3, 1, "events, and no MAC");
    }
    // A crash behind it uses no old image.
    daemon.crash();
    assert!(needs_reset(&front_end));
    front_end = front_end.start_again(1);
    front_end.wait(1);
    daemon.restart();
    front_end.post(2);
    front_end.kick();
    front_end.wait(2);
    assert_eq!(pds(&daemon), 2);
    daemon.end();
}

/// A guest that is to leave with its VMM does so in a later process, too, whichever way the one before has ended.
#[test]
fn a_guest_that_is_to_leave_does_so_in_a_later_process() {
    let mut daemon = Daemon::supervised(
        "leaves",
        &["name=a,vhost-user", "name=b,vhost-user", "name=c,vhost-user"],
    );
    let ends: [fn(&mut Daemon); 2] = [Daemon::restart, Daemon::crash];
    for (name, end) in ["a", "b"].into_iter().zip(ends) {
        let front_end = FrontEnd::start(connect(&daemon.path(name)), 1);
        front_end.wait(1);
        assert_eq!(run(&daemon, &["remove", "--drain", name]), (true, String::new()));
        end(&mut daemon);
        drop(front_end);
        daemon.wait_for("removed");
        let guests = daemon.status()["guests"].as_array().unwrap().clone();
        assert!(guests.iter().all(|guest| guest["name"] != name), "{name} is there");
    }
    FrontEnd::start(connect(&daemon.path("c")), 1).wait(1);
    daemon.end();
}

/// A VMM that ends while no process serves it is noticed by the next one.
#[test]
fn a_connection_that_ended_meanwhile_is_dropped() {
    let mut daemon = Daemon::supervised("gone", &["name=a,vhost-user"]);
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    kill_process(Pid::from_child(&daemon.child), Signal::STOP).unwrap();
    kill_process(daemon.server(), Signal::KILL).unwrap();
    drop(front_end);
    kill_process(Pid::from_child(&daemon.child), Signal::CONT).unwrap();
    daemon.wait_for("disconnected");
    FrontEnd::start(connect(&daemon.path("a")), 1).wait(1);
    daemon.end();
}

/// Returns the names of the guests of a process.
fn names(daemon: &Daemon) -> Vec<String> {
    let status = daemon.status();
    let guests = status["guests"].as_array().unwrap();
    guests.iter().map(|guest| guest["name"].as_str().unwrap().to_owned()).collect()
}

/// A guest that was added to a process is there in the next one. One that was removed is not.
#[test]
fn added_guests_outlive_the_process() {
    let mut daemon = Daemon::supervised("added", &["name=a,vhost-user"]);
    let control = daemon.path("control");
    for name in ["b", "c"] {
        let guest = format!("name={name},vhost-user={}", daemon.path(name).display());
        let mut add = Command::new(BINARY);
        add.args(["add", "--control"]).arg(&control).args(["--guest", &guest]);
        assert!(output(&mut add).status.success());
    }
    let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    let remove =
        |name| output(Command::new(BINARY).args(["remove", "--control"]).arg(&control).arg(name));
    assert!(remove("c").status.success());
    daemon.crash();
    assert_eq!(names(&daemon), ["a", "b"]);
    assert!(needs_reset(&front_end));
    drop(front_end);
    daemon.wait_for("disconnected");
    daemon.restart();
    FrontEnd::start(connect(&daemon.path("b")), 1).wait(1);
    daemon.wait_for("disconnected");
    assert!(remove("b").status.success());
    daemon.end();
}

/// Makes the service manager of a process read nothing until [`go_on`], and leaves no room for one more message to it.
fn stall_manager(daemon: &Daemon) {
    kill_process(Pid::from_child(&daemon.child), Signal::STOP).unwrap();
    let path = format!("/proc/{}/environ", daemon.server().as_raw_nonzero());
    let environment = std::fs::read(path).unwrap();
    let mut variables = environment.split(|byte| *byte == 0);
    let name = variables.find_map(|text| text.strip_prefix(b"NOTIFY_SOCKET=@")).unwrap();
    let address = SocketAddr::from_abstract_name(name).unwrap();
    // Each socket has a bound of its own for what it has sent.
    let fill = || {
        let socket = UnixDatagram::unbound().unwrap();
        socket.set_nonblocking(true).unwrap();
        (0..u32::MAX).find(|_| socket.send_to_addr(b"x", &address).is_err())
    };
    while fill() != Some(0) {}
}

/// A guest that was removed does not come back if the service manager has not read that yet when the process is killed.
/// Whoever adds a guest that the service manager has not read of finds that in the log.
#[test]
fn guests_do_not_come_back_although_the_service_manager_does_not_read() {
    let mut daemon = Daemon::supervised("deaf", &["name=a,vhost-user", "name=b,vhost-user"]);
    add(&daemon, "c", "");
    stall_manager(&daemon);
    for name in ["c", "b"] {
        assert_eq!(run(&daemon, &["remove", name]), (true, String::new()));
    }
    kill_process(daemon.server(), Signal::KILL).unwrap();
    go_on(&daemon);
    daemon.wait_for("ready");
    // The command line names guest b.
    assert_eq!(names(&daemon), ["a", "b"]);
    assert_eq!(daemon.status()["guests"][1]["leaving"], false);
    FrontEnd::start(connect(&daemon.path("b")), 1).wait(1);
    stall_manager(&daemon);
    add(&daemon, "d", "");
    daemon.wait_for("the service manager does not read: a later process may not have the guest");
    go_on(&daemon);
    assert_eq!(run(&daemon, &["remove", "d"]), (true, String::new()));
    daemon.end();
}

/// What a supervisor starts in the place of virtio-rdmad: it fails, or starts virtio-rdmad with more options, as files
/// say.
struct Program {
    test: &'static str,
    directory: PathBuf,
}

impl Program {
    fn new(test: &'static str) -> Self {
        let directory = directory_of(test);
        let (program, more) = (directory.join("program"), directory.join("more"));
        let (fail, more) = (directory.join("fail").display().to_string(), more.display());
        let script =
            format!("#!/bin/sh\n[ ! -e {fail} ] || exit 3\nexec {BINARY} \"$@\" $(cat {more})\n");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let this = Self { test, directory };
        this.add("");
        this
    }

    /// Starts a process with these guests that is started again when it ends. See [`Daemon::start_with`].
    fn supervise(&self, guests: &[&str]) -> Daemon {
        let mut command = Command::new(BINARY);
        command.args(["supervise", "--program"]).arg(self.directory.join("program")).arg("--");
        Daemon::run(command, self.test, &[], guests)
    }

    /// Gives these options to the next process as well.
    fn add(&self, options: &str) {
        let (new, more) = (self.directory.join("new"), self.directory.join("more"));
        std::fs::write(&new, options).unwrap();
        std::fs::rename(new, more).unwrap();
    }

    /// Makes processes end before they are virtio-rdmad, or not any more.
    fn fail(&self, fails: bool) {
        let path = self.directory.join("fail");
        if fails {
            std::fs::write(path, "").unwrap();
        } else {
            std::fs::remove_file(path).unwrap();
        }
    }

    /// Removes its files.
    fn remove(&self) {
        for name in ["program", "more"] {
            std::fs::remove_file(self.directory.join(name)).unwrap();
        }
    }
}

/// Processes that cannot start, however many there are, cost nobody anything: guests of the command line and guests
/// that were added go on where they were, and their objects are there.
#[test]
fn processes_that_fail_cost_nobody_anything() {
    let program = Program::new("fails");
    let mut daemon = program.supervise(&["name=a,vhost-user"]);
    let added = format!("name=b,vhost-user={}", daemon.path("b").display());
    assert_eq!(run(&daemon, &["add", "--guest", &added]), (true, String::new()));
    let front_ends = ["a", "b"].map(|name| FrontEnd::start(connect(&daemon.path(name)), 1));
    for front_end in &front_ends {
        front_end.wait(1);
    }
    let mut posted = 1;
    // They fail when a socket is made, and when the threads of the workers start, which is the last thing that can
    // fail.
    let reasons = [
        ("--guest name=x,vhost-user=/nowhere/x", "/nowhere/x: No such file"),
        ("--cpus 1023", "worker 0: pinning to CPU 1023"),
    ];
    for (options, error) in reasons {
        program.add(options);
        daemon.ask_to_restart();
        (0..10).for_each(|_| daemon.wait_for(error));
        program.add("");
        daemon.wait_for("ready");
        posted += 1;
        for front_end in &front_ends {
            assert!(!needs_reset(front_end), "{options}");
            front_end.post(posted);
            front_end.kick();
            front_end.wait(posted);
        }
        let status = daemon.status();
        let pds = [0, 1].map(|guest| status["guests"][guest]["pds"].as_u64());
        assert_eq!(pds, [Some(posted.into()); 2], "{options}");
    }
    drop(front_ends);
    std::fs::remove_file(daemon.path("b")).unwrap();
    program.remove();
    daemon.end();
}

/// Returns the journals of the guests of a process, which are files in memory.
fn journals(daemon: &Daemon) -> Vec<File> {
    let directory = format!("/proc/{}/fd", daemon.server().as_raw_nonzero());
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_journal = |path: &PathBuf| {
        let name = std::fs::read_link(path).unwrap_or_default();
        name.to_str().is_some_and(|name| name.contains("virtio-rdmad journal"))
    };
    let open = |path| File::options().read(true).write(true).open(path).unwrap();
    paths.filter(is_journal).map(open).collect()
}

/// A process does not start if another version has written what is left of a guest, and leaves it for that one.
#[test]
fn what_cannot_be_read_stays() {
    let program = Program::new("unreadable");
    let mut daemon = program.supervise(&["name=a,vhost-user", "name=b,vhost-user"]);
    let front_ends = ["a", "b"].map(|name| FrontEnd::start(connect(&daemon.path(name)), 1));
    for front_end in &front_ends {
        front_end.wait(1);
    }
    let journals = journals(&daemon);
    let journal = &journals[0];
    program.fail(true);
    daemon.ask_to_restart();
    daemon.wait_for("exit status: 3");
    let places = [8, (1 << 20) + 8];
    let version = places.map(|place| {
        let mut version = [0; 4];
        journal.read_exact_at(&mut version, place).unwrap();
        journal.write_all_at(&99_u32.to_le_bytes(), place).unwrap();
        version
    });
    program.fail(false);
    for _ in 0..2 {
        daemon.wait_for("the journal has version 99, and this process reads version");
    }
    program.fail(true);
    // A process that has started already may still say it.
    for (place, version) in places.into_iter().zip(version) {
        journal.write_all_at(&version, place).unwrap();
    }
    program.fail(false);
    daemon.wait_for("ready");
    for front_end in &front_ends {
        assert!(!needs_reset(front_end));
        front_end.post(2);
        front_end.kick();
        front_end.wait(2);
    }
    // Whoever does not want to go back does without the guest.
    program.fail(true);
    daemon.ask_to_restart();
    daemon.wait_for("exit status: 3");
    for place in places {
        journal.write_all_at(&99_u32.to_le_bytes(), place).unwrap();
    }
    program.add("--forget-unreadable");
    program.fail(false);
    daemon.wait_for("what the last process has left is forgotten");
    daemon.wait_for("ready");
    let status = daemon.status();
    let connected = [0, 1].map(|guest| status["guests"][guest]["connected"] == true);
    assert_eq!(connected.iter().filter(|connected| **connected).count(), 1);
    drop(front_ends);
    program.remove();
    daemon.end();
}

/// The beginning of a record in a journal, in front of what the VMM has said: the guest, as it is and as it was named,
/// who has named it, whether it leaves, and whether its sockets are there.
type Record = (String, String, u32, bool, bool, Option<Vec<u8>>);

/// Changes what the VMM of a guest has said, in the newest record of that guest's journal.
fn forge(journals: &[File], name: &str, change: impl Fn(&[u8]) -> Vec<u8>) {
    const HEAD: usize = 36;
    const SLOT: u64 = 1 << 20;
    let newest = |journal: &File| {
        let heads = [0, 1].map(|slot| {
            let mut head = [0; HEAD];
            journal.read_exact_at(&mut head, slot * SLOT).unwrap();
            (u64::from_le_bytes(head[16..24].try_into().unwrap()), slot, head)
        });
        heads.into_iter().max().unwrap()
    };
    let mut forged = 0;
    for journal in journals {
        let (_, slot, mut head) = newest(journal);
        let mut record = vec![0; u32::from_le_bytes(head[12..16].try_into().unwrap()) as usize];
        journal.read_exact_at(&mut record, slot * SLOT + HEAD as u64).unwrap();
        let (mut decoded, rest): (Record, _) = postcard::take_from_bytes(&record).unwrap();
        if !decoded.0.contains(&format!("name={name},")) {
            continue;
        }
        decoded.5 = Some(change(&decoded.5.unwrap()));
        let record = [&postcard::to_stdvec(&decoded).unwrap()[..], rest].concat();
        head[12..16].copy_from_slice(&u32::try_from(record.len()).unwrap().to_le_bytes());
        head[HEAD - 4..].fill(0);
        let checksum = crc32fast::hash(&[&head[..], &record].concat());
        head[HEAD - 4..].copy_from_slice(&checksum.to_le_bytes());
        journal.write_all_at(&[&head[..], &record].concat(), slot * SLOT).unwrap();
        forged += 1;
    }
    assert_eq!(forged, 1, "one journal of guest {name}");
}

/// A feature bit that no version of the device has.
const UNKNOWN: u64 = 1 << 49;

/// Makes the driver agree to one more feature, or one less, in what its VMM has said.
fn toggle_feature(protocol: Protocol, said: &[u8]) -> Vec<u8> {
    match protocol {
        Protocol::VhostUser => {
            let (features, rest): (u64, _) = postcard::take_from_bytes(said).unwrap();
            [&postcard::to_stdvec(&(features ^ UNKNOWN)).unwrap()[..], rest].concat()
        }
        Protocol::VfioUser => {
            type Said = (bool, bool, Vec<u8>, u32, u64, u64);
            let (mut said, rest): (Said, _) = postcard::take_from_bytes(said).unwrap();
            (said.4, said.5) = (said.4 ^ UNKNOWN, said.5 ^ UNKNOWN);
            [&postcard::to_stdvec(&said).unwrap()[..], rest].concat()
        }
    }
}

/// A process does not start if a driver has agreed to a feature that this version does not have. The version that has
/// offered it goes on, and nobody has lost anything, also if that version had crashed.
#[test]
fn a_feature_that_is_not_there_any_more_keeps_a_process_from_starting() {
    let refused = "a: what the last process has left cannot be read: the driver has agreed to the feature bits \
                   0x2000000000000, which this version does not have. Nothing of it has changed";
    for protocol in PROTOCOLS {
        let program = Program::new("features");
        let mut daemon = program.supervise(&two_guests(protocol));
        let mut pair = pair(&daemon, protocol);
        let journals = journals(&daemon);
        let toggle = || forge(&journals, "a", |said| toggle_feature(protocol, said));
        for ends in [Signal::HUP, Signal::KILL] {
            pair.send();
            program.fail(true);
            match ends {
                Signal::HUP => daemon.ask_to_restart(),
                _ => kill_process(daemon.server(), ends).unwrap(),
            }
            daemon.wait_for("exit status: 3");
            toggle();
            program.fail(false);
            (0..2).for_each(|_| daemon.wait_for(refused));
            program.fail(true);
            daemon.wait_for("exit status: 3");
            toggle();
            program.fail(false);
            daemon.wait_for("ready");
            if ends == Signal::HUP {
                pair.receive();
            }
            let status = daemon.status();
            let connected = [0, 1].map(|guest| status["guests"][guest]["connected"] == true);
            assert_eq!(connected, [true; 2], "{protocol:?}");
        }
        // Whoever does not want to go back does without the device, or with a reset if the VMM can ask the driver for
        // it.
        program.fail(true);
        kill_process(daemon.server(), Signal::KILL).unwrap();
        daemon.wait_for("exit status: 3");
        toggle();
        program.add("--forget-unreadable");
        program.fail(false);
        daemon.wait_for("ready");
        let status = daemon.status();
        let connected = [0, 1].map(|guest| status["guests"][guest]["connected"] == true);
        assert_eq!(connected, [protocol == Protocol::VfioUser, true]);
        program.remove();
        daemon.end();
    }
}

/// A guest that the command line does not have any more stays until its VMM leaves. One without a VMM is gone.
#[test]
fn a_guest_that_is_not_named_any_more_leaves_with_its_vmm() {
    let program = Program::new("unnamed");
    let directory = program.directory.display().to_string();
    program.add(&format!(
        "--guest name=b,vhost-user={directory}/b --guest name=c,vhost-user={directory}/c"
    ));
    let mut daemon = program.supervise(&["name=a,vhost-user"]);
    let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    program.add("");
    for posted in 2..4 {
        daemon.restart();
        assert_eq!(names(&daemon), ["a", "b"]);
        assert!(!needs_reset(&front_end));
        front_end.post(posted);
        front_end.kick();
        front_end.wait(posted);
    }
    // It stays if it is named again.
    program.add(&format!("--guest name=b,vhost-user={directory}/b"));
    daemon.restart();
    assert!(!needs_reset(&front_end));
    assert_eq!(daemon.status()["guests"][1]["leaving"], false);
    program.add("");
    daemon.restart();
    drop(front_end);
    daemon.wait_for("removed");
    assert_eq!(names(&daemon), ["a"]);
    program.remove();
    daemon.end();
}

/// Nobody reads the log, and guests do not notice: they come, are served, and go on after a restart.
#[test]
fn guests_do_not_wait_for_the_log() {
    let mut daemon = Daemon::supervised("stalled", &["name=a,vhost-user", "name=b,vhost-user"]);
    let path = format!("/proc/{}/fd/2", daemon.server().as_raw_nonzero());
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
    let mut log = File::options().write(true).custom_flags(flags).open(path).unwrap();
    while log.write(&[b'\n'; 4096]).is_ok() {}
    while log.write(b"\n").is_ok() {}
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    for name in ["b"].repeat(20) {
        let other = FrontEnd::start(connect(&daemon.path(name)), 1);
        other.wait(1);
        other.end();
    }
    front_end.post(2);
    front_end.kick();
    front_end.wait(2);
    daemon.wait_for("name=\"b\"");
    daemon.restart();
    assert!(!needs_reset(&front_end));
    drop(front_end);
    daemon.end();
}

/// Takes memory from the process that serves guests until it aborts, by requests of a guest.
fn abort(daemon: &Daemon, front_end: &FrontEnd) {
    let server = daemon.server();
    let nothing = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(server), Resource::Data, nothing).unwrap();
    let stat = format!("/proc/{}/stat", server.as_raw_nonzero());
    let has_ended = || {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    };
    let mut posted = front_end.answered();
    while !has_ended() {
        if front_end.answered() == posted {
            posted = posted.wrapping_add(REQUESTS);
            front_end.post(posted);
            front_end.kick();
        }
        std::thread::yield_now();
    }
}

/// A guest for which one process after the other aborts is not served any more, and the other guest goes on. A process
/// that is killed from outside is nobody's fault.
#[test]
fn a_guest_that_ends_processes_is_not_served_for_ever() {
    let mut daemon = Daemon::supervised("poison", &["name=a,vhost-user", "name=b,vhost-user"]);
    let mut bad = FrontEnd::start(connect(&daemon.path("a")), 1);
    let mut other = connect(&daemon.path("b"));
    vhost_user(&mut other, 1, &[]);
    bad.wait(1);
    for _ in 0..4 {
        daemon.crash();
    }
    for aborts in 1..=3 {
        bad = bad.start_again(1);
        bad.wait(1);
        abort(&daemon, &bad);
        daemon.wait_for(&format!(
            "a process has aborted while it served the guest guest=\"a\" aborts={aborts}"
        ));
        daemon.wait_for("ready");
        assert_eq!(daemon.status()["guests"][0]["connected"], aborts < 3, "{aborts} aborts");
        vhost_user(&mut other, 1, &[]);
    }
    assert_eq!(connect(&daemon.path("a")).read(&mut [0; 1]).unwrap(), 0, "it is refused");
    daemon.restart();
    assert_eq!(
        connect(&daemon.path("a")).read(&mut [0; 1]).unwrap(),
        0,
        "it is refused after a restart, too"
    );
    vhost_user(&mut other, 1, &[]);
    daemon.end();
}

/// A supervisor starts what lies at its path now, and not the file that it was started from.
#[test]
fn a_supervisor_starts_a_file_that_took_the_place_of_its_own() {
    let test = "replaced";
    let directory = directory_of(test);
    let (program, new) = (directory.join("virtio-rdmad"), directory.join("new"));
    std::fs::copy(BINARY, &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["supervise", "--"]);
    let mut daemon = Daemon::run(command, test, &[], &["name=a,vhost-user"]);
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    std::fs::copy(BINARY, &new).unwrap();
    std::fs::rename(&new, &program).unwrap();
    daemon.restart();
    assert!(!needs_reset(&front_end));
    let running = std::fs::read_link(format!("/proc/{}/exe", daemon.server().as_raw_nonzero()));
    assert_eq!(running.unwrap(), program);
    drop(front_end);
    std::fs::remove_file(program).unwrap();
    daemon.end();
}

/// A guest that was added is gone for good if the next process cannot add it again: a guest of the command line has its
/// MAC address now. Its VMM is disconnected, and it does not come back when the address is free.
#[test]
fn an_added_guest_that_cannot_be_added_again_is_forgotten() {
    let program = Program::new("forgotten");
    let mut daemon = program.supervise(&["name=a,vhost-user"]);

    let mac = "mac=52:54:00:00:00:0b";
    let path = daemon.path("b");
    let spec = format!("name=b,{mac},vhost-user={}", path.display());
    assert_eq!(run(&daemon, &["add", "--guest", &spec]), (true, String::new()));
    let mut vmm = connect(&path);
    vhost_user(&mut vmm, 1, &[]);
    let other = format!("--guest name=c,{mac},vhost-user={}", daemon.path("c").display());
    program.add(&other);
    daemon.ask_to_restart();
    daemon.wait_for("the guest cannot be added again");
    daemon.wait_for("ready");
    assert_eq!(names(&daemon), ["a", "c"]);
    program.add("");
    daemon.restart();
    assert_eq!(names(&daemon), ["a"]);
    assert_eq!(vmm.read(&mut [0; 1]).unwrap(), 0, "the VMM is disconnected");
    // A process removes the sockets that it has made.
    std::fs::remove_file(path).unwrap();
    program.remove();
    daemon.end();
}

/// A policy that was set is there in the next process, whoever has named the guest.
#[test]
fn policies_outlive_the_process() {
    let mut daemon = Daemon::supervised("policy", &["name=a,pds=9,vhost-user"]);
    let added = format!("name=b,pds=9,vhost-user={}", daemon.path("b").display());
    assert_eq!(run(&daemon, &["add", "--guest", &added]), (true, String::new()));
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);
    let limits = |daemon: &Daemon| {
        let status = daemon.status();
        [0, 1].map(|guest| status["guests"][guest]["limits"]["pds"].as_u64().unwrap())
    };
    assert_eq!(limits(&daemon), [9, 9]);
    for (round, pds) in [(1, "1"), (2, "2")] {
        for name in ["a", "b"] {
            let change = format!("pds={pds}");
            assert_eq!(run(&daemon, &["set", name, &change]), (true, String::new()));
        }
        daemon.restart();
        assert_eq!(limits(&daemon), [round, round]);
        front_end.post(u16::try_from(round).unwrap() + 1);
        front_end.kick();
        front_end.wait(u16::try_from(round).unwrap() + 1);
        assert_eq!(daemon.status()["guests"][0]["pds"].as_u64(), Some(round), "the device obeys");
    }
    daemon.crash();
    assert_eq!(limits(&daemon), [2, 2]);
    assert_eq!(run(&daemon, &["remove", "b"]), (true, String::new()));
    drop(front_end);
    daemon.end();
}

/// A configuration file, which goes with this.
struct ConfigFile(PathBuf);

impl ConfigFile {
    fn new(test: &str, text: &str) -> Self {
        let name = format!("rdmad-{test}-{}.toml", std::process::id());
        let this = Self(std::env::temp_dir().join(name));
        this.write(text);
        this
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
}

impl Drop for ConfigFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns each guest of a process: its name, who has named it, and how many PDs it may have.
fn guests(daemon: &Daemon) -> Vec<String> {
    let status = daemon.status();
    let guests = status["guests"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut guests: Vec<_> = guests
        .map(|guest| {
            format!(
                "{} {} {}",
                text(&guest["name"]),
                text(&guest["origin"]),
                guest["limits"]["pds"]
            )
        })
        .collect();
    guests.sort_unstable();
    guests
}

/// The guests of a configuration file are served. After a change of the file, they come, leave and change, and those
/// that stay notice nothing. The next process does as the file says.
#[test]
fn a_process_follows_its_configuration_file() {
    let test = "reload";
    let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
    let guest = |name: &str, more: &str| {
        let path = directory.join(name).display().to_string();
        format!("[[guest]]\nname = '{name}'\nvhost-user = '{path}'\n{more}\n")
    };
    let old = guest("a", "pds = 9") + &guest("b", "");
    let file = ConfigFile::new(test, &("workers = 1\n".to_owned() + &old));
    let path = file.0.to_str().unwrap();
    let mut command = Command::new(BINARY);
    command.args(["supervise", "--"]);
    let mut daemon = Daemon::run(command, test, &["--config", path], &["name=o,vhost-user"]);
    assert_eq!(guests(&daemon), ["a file 9", "b file 65536", "o options 65536"]);
    let front_end = FrontEnd::start(connect(&daemon.path("a")), 1);
    front_end.wait(1);

    let reload = |daemon: &Daemon| {
        let mut reload = Command::new(BINARY);
        reload.args(["reload", "--config", path, "--control"]).arg(daemon.path("control"));
        let output = output(&mut reload);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    assert_eq!(reload(&daemon), (true, String::new(), String::new()));
    // With a mistake in it, nothing of it is done.
    let new = guest("a", "pds = 2") + &guest("c", "pds = 3");
    file.write(&(new.clone() + "speed = 1"));
    let (worked, _, error) = reload(&daemon);
    assert!(!worked && error.contains(".toml:9: unknown key \"speed\""), "{error}");
    assert_eq!(guests(&daemon), ["a file 9", "b file 65536", "o options 65536"]);
    file.write(&("workers = 2\n".to_owned() + &new));
    let (worked, said, error) = reload(&daemon);
    assert_eq!((worked, error), (true, String::new()));
    let said: Vec<_> = said.lines().collect();
    let needs_restart = "needs a restart: workers: \"2\", was \"1\"";
    assert_eq!(said, ["b: removed", "a: pds=2", "c: added", needs_restart]);
    let now = ["a file 2", "c file 3", "o options 65536"];
    assert_eq!(guests(&daemon), now);
    assert!(!daemon.path("b").exists());
    let other = FrontEnd::start(connect(&daemon.path("c")), 1);
    other.wait(1);
    front_end.post(2);
    front_end.kick();
    front_end.wait(2);

    daemon.restart();
    assert_eq!(guests(&daemon), now);
    assert_eq!(daemon.status()["workers"].as_array().unwrap().len(), 2);
    for front_end in [&front_end, &other] {
        assert!(!needs_reset(front_end));
        front_end.post(3);
        front_end.kick();
        front_end.wait(3);
    }
    let (worked, said, _) = reload(&daemon);
    assert!(worked && said.is_empty(), "{said}");
    // What was set stays, until the file says something else than when the process started.
    assert_eq!(run(&daemon, &["set", "a", "pds=5"]), (true, String::new()));
    for _ in 0..2 {
        daemon.restart();
        assert_eq!(guests(&daemon)[0], "a file 5");
        let (worked, said, _) = reload(&daemon);
        assert!(worked && said.is_empty(), "{said}");
        assert_eq!(guests(&daemon)[0], "a file 5");
    }
    // A reload changes what has changed in the file, and that alone.
    file.write(&("workers = 2\n".to_owned() + &guest("a", "pds = 2") + &guest("c", "pds = 4")));
    assert_eq!(reload(&daemon), (true, "c: pds=4\n".to_owned(), String::new()));
    assert_eq!(run(&daemon, &["set", "c", "pds=7"]), (true, String::new()));
    for _ in 0..2 {
        assert_eq!(guests(&daemon), ["a file 5", "c file 7", "o options 65536"]);
        assert_eq!(reload(&daemon), (true, String::new(), String::new()));
        daemon.restart();
    }
    file.write(&("workers = 2\n".to_owned() + &guest("a", "mrs = 3") + &guest("c", "pds = 4")));
    assert_eq!(reload(&daemon), (true, "a: mrs=3,pds=default\n".to_owned(), String::new()));
    assert_eq!(guests(&daemon), ["a file 65536", "c file 7", "o options 65536"]);
    file.write(&("workers = 2\n".to_owned() + &guest("a", "pds = 6") + &guest("c", "pds = 3")));
    daemon.restart();
    assert_eq!(guests(&daemon)[0], "a file 6");
    // A guest whose VMM is connected leaves with that.
    file.write(&("workers = 2\n".to_owned() + &guest("a", "pds = 6")));
    let (worked, said, _) = reload(&daemon);
    assert_eq!((worked, &*said), (true, "c: is removed when its VMM leaves\n"));
    assert!(!daemon.path("c").exists());
    let (worked, said, _) = reload(&daemon);
    assert!(worked && said.is_empty(), "{said}");
    drop(other);
    wait_for_guest(&daemon, "c", false);
    drop(front_end);
    daemon.end();
}

/// Starts a process that has a guest of the command line and a configuration file without guests, as `supervise` or
/// this program starts it.
fn with_file(test: &str, program: Option<&Program>) -> (Daemon, ConfigFile) {
    let file = ConfigFile::new(test, "");
    let mut command = Command::new(BINARY);
    command.arg("supervise");
    if let Some(program) = program {
        command.arg("--program").arg(program.directory.join("program"));
    }
    let path = file.0.to_str().unwrap();
    command.arg("--");
    (Daemon::run(command, test, &["--config", path], &["name=o,vhost-user"]), file)
}

/// Makes a process follow its configuration file. Returns whether that worked, and all that was said.
fn reload(daemon: &Daemon, file: &ConfigFile) -> (bool, String) {
    let mut command = Command::new(BINARY);
    command.args(["reload", "--control"]).arg(daemon.path("control"));
    let output = output(command.arg("--config").arg(&file.0));
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// Returns the table of a guest in a configuration file.
fn table(daemon: &Daemon, name: &str, socket: &str, more: &str) -> String {
    let path = daemon.path(socket).display().to_string();
    format!("[[guest]]\nname = '{name}'\nvhost-user = '{path}'\n{more}\n")
}

/// Adds a guest to a running process.
fn add(daemon: &Daemon, name: &str, more: &str) {
    let guest = format!("name={name},{more}vhost-user={}", daemon.path(name).display());
    assert_eq!(run(daemon, &["add", "--guest", &guest]), (true, String::new()));
}

/// A guest that was added, and that the configuration file names later, goes on where it was and is the file's from
/// then on.
#[test]
fn an_added_guest_goes_over_to_the_configuration_file() {
    let (mut daemon, file) = with_file("named-later", None);
    for name in ["b", "c"] {
        add(&daemon, name, "pds=9,");
    }
    assert_eq!(run(&daemon, &["set", "b", "pds=8"]), (true, String::new()));
    let before = sockets(&daemon);
    let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    let b = table(&daemon, "b", "b", "pds = 9");
    file.write(&(b.clone() + &table(&daemon, "c", "c", "pds = 3")));
    let (worked, said) = reload(&daemon, &file);
    let needs = ["b", "c"]
        .map(|name| format!("needs a restart: guest {name}, which is not of the file (call)\n"));
    assert!(worked && said == needs.concat(), "{said}");
    assert_eq!(guests(&daemon), ["b call 8", "c call 9", "o options 65536"]);

    // The socket of the third process is that of the first one.
    for posted in 2..4 {
        daemon.restart();
        assert_eq!(guests(&daemon), ["b file 9", "c file 3", "o options 65536"]);
        assert_eq!(sockets(&daemon), before);
        assert!(!needs_reset(&front_end));
        front_end.post(posted);
        front_end.kick();
        front_end.wait(posted);
    }
    assert_eq!(run(&daemon, &["set", "c", "pds=4"]), (true, String::new()));
    daemon.crash();
    assert_eq!(guests(&daemon), ["b file 9", "c file 4", "o options 65536"]);
    assert!(needs_reset(&front_end));
    front_end.start_again(1).wait(1);
    daemon.wait_for("disconnected");
    for name in ["b", "c"] {
        FrontEnd::start(connect(&daemon.path(name)), 1).wait(1);
        daemon.wait_for("disconnected");
    }
    assert_eq!(reload(&daemon, &file), (true, String::new()));
    file.write(&b);
    assert_eq!(reload(&daemon, &file), (true, "c: removed\n".to_owned()));
    file.write("");
    daemon.restart();
    assert_eq!(names(&daemon), ["o"]);
    daemon.end();
}

/// A guest that was added keeps its VMM where the configuration file gives it another path or MAC address.
#[test]
fn an_added_guest_that_the_file_changes_keeps_its_vmm() {
    let (mut daemon, file) = with_file("changed-later", None);
    add(&daemon, "b", "mac=52:54:00:00:00:0b,");
    let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    file.write(&table(&daemon, "b", "moved", "mac = '52:54:00:00:00:0c'"));
    daemon.ask_to_restart();
    daemon.wait_for("the guest was added, and the options name it now");
    daemon.wait_for("its VMM is connected to another kind of device: the guest stays as it was");
    daemon.wait_for("ready");
    assert!(!needs_reset(&front_end));
    front_end.post(2);
    front_end.kick();
    front_end.wait(2);
    assert_eq!(daemon.status()["guests"][1]["mac"], "52:54:00:00:00:0b");
    drop(front_end);
    daemon.wait_for("disconnected");
    daemon.restart();
    assert_eq!(daemon.status()["guests"][1]["mac"], "52:54:00:00:00:0c");
    FrontEnd::start(connect(&daemon.path("moved")), 1).wait(1);
    // Nobody listens at the path that `add` has made.
    assert!(UnixStream::connect(daemon.path("b")).is_err());
    std::fs::remove_file(daemon.path("b")).unwrap();
    daemon.wait_for("disconnected");
    daemon.end();
}

/// Processes that cannot start because of what the file says of a guest that was added, or for another reason, cost
/// that guest nothing: it is there as before when the file is.
#[test]
fn a_file_that_is_wrong_costs_an_added_guest_nothing() {
    let program = Program::new("wrong-later");
    let (mut daemon, file) = with_file("wrong-later", Some(&program));
    add(&daemon, "b", "");
    let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
    front_end.wait(1);
    let before = sockets(&daemon).remove(0);
    let [x, b, moved] = [("x", "b"), ("b", "b"), ("b", "moved")]
        .map(|(name, socket)| table(&daemon, name, socket, ""));
    let taken = "/b: is the socket of guest \"b\", which was added";
    let pinned = "worker 0: pinning to CPU 1023";
    file.write(&x);
    let (worked, said) = reload(&daemon, &file);
    assert!(!worked && said.contains("another process listens there"), "{said}");
    let mistakes = [(&x, "", taken), (&b, "--cpus 1023", pinned), (&moved, "--cpus 1023", pinned)];
    for (posted, (text, options, error)) in (2..).zip(mistakes) {
        file.write(text);
        program.add(options);
        daemon.ask_to_restart();
        (0..3).for_each(|_| daemon.wait_for(error));
        program.fail(true);
        daemon.wait_for("exit status: 3");
        file.write("");
        program.add("");
        program.fail(false);
        daemon.wait_for("ready");
        assert_eq!(guests(&daemon), ["b call 65536", "o options 65536"]);
        assert_eq!(sockets(&daemon)[0], before);
        assert!(!needs_reset(&front_end));
        front_end.post(posted);
        front_end.kick();
        front_end.wait(posted);
    }
    drop(front_end);
    daemon.wait_for("disconnected");
    FrontEnd::start(connect(&daemon.path("b")), 1).wait(1);
    daemon.wait_for("disconnected");
    assert_eq!(run(&daemon, &["remove", "b"]), (true, String::new()));
    // A process that fails leaves the files of its own sockets if it has taken over others.
    std::fs::remove_file(daemon.path("moved")).unwrap();
    program.remove();
    daemon.end();
}

#[test]
fn a_process_does_not_start_with_a_wrong_file() {
    let start = |text: &str, options: &[&str]| {
        let file = ConfigFile::new("wrong", text);
        let output = output(Command::new(BINARY).arg("--config").arg(&file.0).args(options));
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(start("log = 'info'\n[[gast]]\n", &[]).contains(".toml:2: unknown key \"gast\""));
    assert!(start("log = 'info'\n", &[]).contains("there is neither a guest nor control"));
    let cpus = start("control = '/nowhere/c'\nworkers = 2\n", &["--cpus", "0"]);
    assert!(cpus.contains("/nowhere/c") || cpus.contains("2 workers and only 1 CPUs"), "{cpus}");
    let missing = output(Command::new(BINARY).args(["--config", "/nowhere/file"]));
    assert!(String::from_utf8(missing.stderr).unwrap().contains("/nowhere/file: No such file"));
}

/// virtio-rdmad that cannot start is not started again and again.
#[test]
fn a_process_that_cannot_start_ends_its_supervisor() {
    let mut command = Command::new(BINARY);
    command.args(["supervise", "--", "--guest", "name=a,vhost-user=/nowhere/a"]);
    let output = output(&mut command);
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("virtio-rdmad does not start"), "{stderr}");
}

/// How guest a is attached.
const PROTOCOLS: [Protocol; 2] = [Protocol::VhostUser, Protocol::VfioUser];

/// Returns the guests a and b. The VMM of the first one uses this protocol, that of the other one vhost-user.
fn two_guests(protocol: Protocol) -> [&'static str; 2] {
    let guest = match protocol {
        Protocol::VhostUser => "name=a,vhost-user",
        Protocol::VfioUser => "name=a,max-cq=20,vfio-user",
    };
    [guest, "name=b,vhost-user"]
}

/// Connects to guests a and b, which have two connections to each other.
fn pair(daemon: &Daemon, protocol: Protocol) -> Pair {
    let guests = [("a", protocol), ("b", Protocol::VhostUser)];
    Pair::new(guests.map(|(name, protocol)| (connect(&daemon.path(name)), protocol)))
}

/// A client that traces a guest.
struct Trace {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    _watchdog: Watchdog,
}

impl Trace {
    fn of(daemon: &Daemon, guest: &str, qpn: u32) -> Self {
        let mut command = Command::new(BINARY);
        command.args(["trace", "--json", "--control"]).arg(daemon.path("control"));
        command.args(["--qpn", &qpn.to_string(), guest]).process_group(0).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut trace = Self { _watchdog: Watchdog::new(&process, LIMIT), process, lines };
        assert_eq!(trace.next()["event"], "tracing");
        trace
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    /// Returns the next line with this event.
    fn find(&mut self, event: &str) -> Value {
        loop {
            let line = self.next();
            assert_ne!(line["event"], "lost");
            if line["event"] == event {
                return line;
            }
        }
    }
}

/// A SEND that waits for a receive and a WRITE that is refused are followed at both ends; those of another QP are not.
#[test]
fn one_message_is_followed() {
    let daemon = Daemon::start_with("trace", &[], &two_guests(Protocol::VfioUser));
    let mut socket = connect(&daemon.path("control"));
    let nobody = serde_json::json!({ "guest": "a" });
    let answer = call(&mut socket, "org.virtio-rdma.Daemon.Trace", &nobody);
    assert_eq!(answer["error"], "org.varlink.service.ExpectedMore");
    let (_, unknown) = run(&daemon, &["trace", "x"]);
    assert!(unknown.contains("UnknownGuest"), "{unknown}");
    let mut pair = pair(&daemon, Protocol::VfioUser);
    let [[a, b], [other, _]] = pair.connections[..] else { panic!("not two connections") };
    let (mut at_a, mut at_b) = (Trace::of(&daemon, "a", a), Trace::of(&daemon, "b", b));

    pair.guests[0].post_send(other, 1, 0);
    pair.guests[0].post_send(a, 7, 0);
    let posted = at_a.next();
    assert_eq!((&posted["event"], &posted["opcode"]), (&"posted".into(), &"SEND".into()));
    assert_eq!((&posted["wr_id"], &posted["length"]), (&"0x7".into(), &3000.into()));
    assert_eq!((&posted["guest"], &posted["qpn"]), (&"a".into(), &a.into()));
    let retried = at_a.find("retried");
    assert_eq!((&retried["reason"], &retried["psn"]), (&"no receive".into(), &posted["psn"]));
    assert_eq!(at_b.find("refused")["reason"], "RNR");
    pair.guests[1].post_receive(b, 9);
    let copied = at_a.find("copied");
    assert_eq!((&copied["offset"], &copied["length"]), (&0.into(), &3000.into()));
    let completed = at_a.find("send_completed");
    assert_eq!((&completed["wr_id"], &completed["status"]), (&"0x7".into(), &"SUCCESS".into()));
    assert_eq!(at_b.find("receive_completed")["wr_id"], "0x9");

    pair.guests[0].post_write(a, 8);
    assert_eq!(at_a.find("posted")["opcode"], "RDMA_WRITE");
    assert_eq!(at_a.find("nak")["reason"], "INVALID_REQUEST");
    assert_eq!(at_a.find("send_completed")["status"], "REM_INV_REQ_ERR");
    let refused = at_b.find("refused");
    assert_eq!(refused["refused"]["reason"], "qp_forbids", "{refused}");
    assert_eq!((&refused["refused"]["length"], &refused["qpn"]), (&3000.into(), &b.into()));
    let status = daemon.status();
    let qps = status["guests"][1]["qps"].as_array().unwrap();
    let error = &qps.iter().find(|qp| qp["qpn"] == b).unwrap()["last_error"];
    assert_eq!((&error["reason"], &error["refused"]), (&"QP_REQ_ERR".into(), &refused["refused"]));
    pair.end();
    daemon.end();
    for mut trace in [at_a, at_b] {
        assert!(trace.process.wait().unwrap().success());
    }
}

/// Returns the frames in a file of pcapng, each with its direction (1: in, 2: out) and the length that it had, and how
/// many are missing.
fn frames_of(file: &Path) -> (Vec<(u32, u32, Vec<u8>)>, u64) {
    let bytes = std::fs::read(file).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut at, mut frames, mut missing) = (0, Vec::new(), None);
    while at < bytes.len() {
        let length = word(at + 4) as usize;
        match word(at) {
            6 => {
                let (captured, whole) = (word(at + 20) as usize, word(at + 24));
                let frame = bytes[at + 28..at + 28 + captured].to_vec();
                let options = at + 28 + captured.next_multiple_of(4);
                assert_eq!(word(options), 4 << 16 | 2, "epb_flags");
                frames.push((word(options + 4), whole, frame));
            }
            5 => missing = Some(u64::from(word(at + length - 16))),
            _ => {}
        }
        at += length;
    }
    (frames, missing.expect("the file is whole"))
}

/// What the local path carries is captured at both ends as packets, until as many have come as are wanted, or a signal.
#[test]
fn frames_of_the_local_path_are_captured() {
    let daemon = Daemon::start_with("capture", &[], &two_guests(Protocol::VfioUser));
    let mut pair = pair(&daemon, Protocol::VfioUser);
    let [[a, b], _] = pair.connections[..] else { panic!("not two connections") };
    let start = |guest: &str, options: &[&str]| {
        let file = daemon.path(guest).with_extension("pcapng");
        let mut command = Command::new(BINARY);
        command.args(["capture", "--guest", guest, "--control"]).arg(daemon.path("control"));
        let mut capture = command.args(options).arg(&file).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(capture.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("captures the frames"), "{line}");
        (capture, file)
    };
    // 3 packets of a message and their acknowledgement.
    let (mut at_a, of_a) = start("a", &["--count", "4"]);
    let (mut at_b, of_b) = start("b", &["--qpn", &b.to_string(), "--snaplen", "60"]);
    let begin = std::fs::metadata(&of_b).unwrap().len();
    pair.guests[1].post_receive(b, 9);
    pair.guests[0].post_send(a, 7, 3);
    assert!(at_a.wait().unwrap().success());
    let (sent, missing) = frames_of(&of_a);
    assert_eq!((sent.len(), missing), (4, 0));
    for (direction, length, frame) in &sent {
        let packet = roce::decode(frame).unwrap();
        let is_answer = packet.headers.bth.opcode.operation() == roce::Operation::Acknowledge;
        assert_eq!((*direction, *length as usize), (if is_answer { 1 } else { 2 }, frame.len()));
    }
    let payload = sent.iter().map(|(_, _, frame)| roce::decode(frame).unwrap().payload.to_vec());
    assert_eq!(payload.map(|payload| payload.len()).collect::<Vec<_>>(), [1024, 1024, 952, 0]);
    let pid = Pid::from_child(&at_b);
    // Each frame is a block of its own length and 44 bytes.
    while std::fs::metadata(&of_b).unwrap().len() < begin + 4 * (60 + 44) {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(pid, Signal::INT).unwrap();
    assert!(at_b.wait().unwrap().success());
    let (received, missing) = frames_of(&of_b);
    assert_eq!((received.len(), missing), (4, 0));
    for ((_, length, frame), (_, whole, of_sender)) in received.iter().zip(&sent) {
        assert_eq!((length, frame.as_slice()), (whole, &of_sender[..60]));
    }
    for file in [of_a, of_b] {
        std::fs::remove_file(file).unwrap();
    }
    pair.end();
    daemon.end();
}

/// Messages that are under way between two guests when the daemon restarts arrive, each once and in order.
#[test]
fn messages_under_way_outlive_a_restart() {
    for protocol in PROTOCOLS {
        let mut daemon = Daemon::supervised("under-way", &two_guests(protocol));
        let mut pair = pair(&daemon, protocol);
        for _ in 0..2 {
            pair.send();
            daemon.restart();
            pair.receive();
        }
        daemon.end();
    }
}

/// Connects to a guest that has its VMM, and is disconnected before it says anything.
fn connect_in_vain(daemon: &Daemon, name: &str) {
    let mut second = connect(&daemon.path(name));
    second.set_read_timeout(Some(REFUSAL)).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "the connection ends");
}

/// A guest has one VMM. Another one that connects meanwhile is disconnected at once, and the first one notices nothing.
#[test]
fn a_second_vmm_is_refused() {
    for protocol in PROTOCOLS {
        let mut daemon = Daemon::supervised("second", &two_guests(protocol));
        let mut pair = pair(&daemon, protocol);
        for restarted in [false, true] {
            for refused in 1..4 {
                pair.send();
                connect_in_vain(&daemon, "a");
                pair.receive();
                let guest = &daemon.status()["guests"][0];
                assert_eq!(
                    (&guest["connected"], &guest["refused_vmms"]),
                    (&true.into(), &refused.into())
                );
            }
            // Of many lines of a kind there is one.
            daemon.wait_for("another VMM is refused");
            let mut command = Command::new(BINARY);
            let output = output(command.args(["metrics", "--control"]).arg(daemon.path("control")));
            let metrics = String::from_utf8(output.stdout).unwrap();
            let line = "virtio_rdma_guest_refused_vmms_total{guest=\"a\",network=\"default\"} 3\n";
            assert!(metrics.contains(line), "{metrics}");
            if !restarted {
                daemon.restart();
            }
        }
        daemon.end();
    }
}

/// A VMM that ends, and one that connects in its place before the process has noticed that: the latter is served.
#[test]
fn a_vmm_that_is_started_again_is_served() {
    for protocol in PROTOCOLS {
        let daemon = Daemon::supervised("again-at-once", &two_guests(protocol));
        for _ in 0..20 {
            let vmms = pair(&daemon, protocol);
            kill_process(daemon.server(), Signal::STOP).unwrap();
            vmms.end();
            let sockets = ["a", "b"].map(|name| connect(&daemon.path(name)));
            kill_process(daemon.server(), Signal::CONT).unwrap();
            let [one, other] = sockets;
            let mut vmms = Pair::new([(one, protocol), (other, Protocol::VhostUser)]);
            vmms.send();
            vmms.receive();
            vmms.end();
        }
        assert_eq!(daemon.status()["guests"][0]["refused_vmms"], 0);
        daemon.end();
    }
}

/// Makes the process that serves guests end and leave its sockets, and lets no other one start.
fn hand_over(daemon: &Daemon) {
    let server = daemon.server().as_raw_nonzero().to_string();
    kill_process(Pid::from_child(&daemon.child), Signal::STOP).unwrap();
    assert!(output(Command::new(BINARY).args(["hand-over", &server])).status.success());
    let has_ended = || {
        let status = std::fs::read_to_string(format!("/proc/{server}/stat")).unwrap();
        status.contains(") Z ")
    };
    while !has_ended() {
        std::thread::yield_now();
    }
}

/// Makes the supervisor start another process.
fn go_on(daemon: &Daemon) {
    kill_process(Pid::from_child(&daemon.child), Signal::CONT).unwrap();
}

/// Returns the inodes of the sockets of a process, by name.
fn sockets(daemon: &Daemon) -> Vec<(String, u64)> {
    let entries = std::fs::read_dir(&daemon.directory).unwrap().map(Result::unwrap);
    let entries = entries.filter(|entry| entry.file_type().unwrap().is_socket());
    let mut sockets: Vec<_> =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.ino())).collect();
    sockets.sort();
    sockets
}

/// A restart leaves all sockets as they are. Whoever connects while no process runs waits, and is served then: the
/// first VMM of a guest, one that takes the place of another one, and clients of the control socket.
#[test]
fn sockets_outlive_a_restart() {
    for sandbox in ["on", "off"] {
        let mut command = Command::new(BINARY);
        command.args(["supervise", "--"]);
        let guests = ["name=a,vhost-user", "name=b,vhost-user", "name=c,vfio-user"];
        let options = ["--sandbox", sandbox];
        let mut daemon = Daemon::run(command, "sockets", &options, &guests);
        let before = sockets(&daemon);
        assert_eq!(before.len(), 4);
        daemon.restart();
        assert_eq!(sockets(&daemon), before);

        let front_end = FrontEnd::start(connect(&daemon.path("b")), 1);
        front_end.wait(1);
        hand_over(&daemon);
        assert_eq!(sockets(&daemon), before);
        front_end.end();
        let waiting = ["a", "b"].map(|name| connect(&daemon.path(name)));
        let added = format!("name=d,vhost-user={}", daemon.path("d").display());
        std::thread::scope(|scope| {
            let add = scope.spawn(|| run(&daemon, &["add", "--guest", &added]));
            while !daemon.path("d").exists() {
                std::thread::yield_now();
            }
            go_on(&daemon);
            assert_eq!(add.join().unwrap(), (true, String::new()));
        });
        for socket in waiting {
            FrontEnd::start(socket, 1).wait(1);
        }
        daemon.wait_for("ready");
        assert_eq!(names(&daemon), ["a", "b", "c", "d"]);
        assert_eq!(run(&daemon, &["remove", "d"]), (true, String::new()));
        daemon.restart();
        assert_eq!(sockets(&daemon), before);
        // A process that is killed leaves none.
        daemon.crash();
        FrontEnd::start(connect(&daemon.path("a")), 1).wait(1);
        // Without a sandbox, the socket of a guest whose VMM is connected stays.
        daemon.wait_for("disconnected");
        daemon.end();
    }
}

/// Processes that cannot start lose nobody who waits.
#[test]
fn whoever_connects_waits_for_a_process_that_starts() {
    let program = Program::new("waits");
    let mut daemon = program.supervise(&["name=a,vhost-user"]);
    program.add("--cpus 1023");
    hand_over(&daemon);
    let socket = connect(&daemon.path("a"));
    go_on(&daemon);
    (0..3).for_each(|_| daemon.wait_for("worker 0: pinning to CPU 1023"));
    program.add("");
    daemon.wait_for("ready");
    FrontEnd::start(socket, 1).wait(1);
    program.remove();
    daemon.end();
}

/// After a restart, guests are where the configuration file has them, and the sockets are gone that it does not have.
#[test]
fn sockets_follow_the_configuration_file() {
    let test = "paths";
    let directory = directory_of(test);
    let guest = |name: &str, socket: &str, more: &str| {
        let path = directory.join(socket).display().to_string();
        format!("[[guest]]\nname = '{name}'\nvhost-user = '{path}'\n{more}\n")
    };
    let file =
        ConfigFile::new(test, &(guest("a", "a", "") + &guest("b", "b", "") + &guest("c", "c", "")));
    let mut command = Command::new(BINARY);
    command.args(["supervise", "--"]);
    let path = file.0.to_str().unwrap();
    let mut daemon = Daemon::run(command, test, &["--config", path], &[]);
    let before = sockets(&daemon);
    file.write(&(guest("a", "moved", "") + &guest("c", "c", "mode = '600'")));
    hand_over(&daemon);
    go_on(&daemon);
    daemon.wait_for("ready");
    let after = sockets(&daemon);
    assert_eq!(
        after.iter().map(|(name, _)| &**name).collect::<Vec<_>>(),
        ["c", "control", "moved"]
    );
    assert_eq!(after[1], before[3], "the control socket");
    for (name, mode) in [("moved", None), ("c", Some(0o600))] {
        let is = daemon.path(name).metadata().unwrap().permissions().mode() & 0o777;
        assert!(mode.is_none_or(|mode| is == mode), "{is:o}");
        FrontEnd::start(connect(&daemon.path(name)), 1).wait(1);
    }
    daemon.end();
}

/// Returns how many PDs, MRs, CQs and QPs a guest has made.
fn objects(daemon: &Daemon, guest: usize) -> [u64; 4] {
    let guest = &daemon.status()["guests"][guest];
    let [pds, mrs, cqs] = ["pds", "mrs", "cqs"].map(|what| guest[what].as_u64().unwrap());
    [pds, mrs, cqs, guest["qps"].as_array().unwrap().len() as u64]
}

/// A guest whose VMM pauses it keeps all that it has made, and loses no message, also over a restart of the daemon.
/// Nothing touches its memory meanwhile, and its peer sees no error.
#[test]
fn a_paused_guest_loses_nothing() {
    let mut daemon = Daemon::supervised("paused", &two_guests(Protocol::VhostUser));
    let mut pair = pair(&daemon, Protocol::VhostUser);
    let made = objects(&daemon, 1);
    assert_eq!(made, [1, 1, 1, 2]);
    for (pause, restarts) in
        [(Pause::Disable, false), (Pause::Stop, false), (Pause::Disable, true), (Pause::Stop, true)]
    {
        let bases = pair.guests[1].pause(pause);
        pair.send();
        let places = pair.post_receives();
        let before = pair.guests[1].bytes();
        if restarts {
            daemon.restart();
        }
        // The daemon serves the peer.
        pair.guests[0].query_port();
        assert!(pair.guests[1].bytes() == before, "{pause:?}, restart: {restarts}");
        assert_eq!(objects(&daemon, 1), made, "{pause:?}, restart: {restarts}");
        pair.guests[1].resume(pause, &bases);
        pair.complete(places);
        assert_eq!(objects(&daemon, 1), made, "{pause:?}, restart: {restarts}");
    }
    daemon.end();
}

/// A driver that begins again with new rings finds an empty device, although its front end only disables the old rings.
#[test]
fn new_rings_reset_the_device() {
    let mut daemon = Daemon::supervised("new-rings", &["name=a,vhost-user"]);
    let mut front_end = FrontEnd::start(connect(&daemon.path("a")), 3);
    front_end.wait(3);
    for restarts in [false, true] {
        assert_eq!(objects(&daemon, 0)[0], 3);
        front_end = front_end.start_on_new_rings(3);
        front_end.wait(3);
        if restarts {
            daemon.restart();
        }
    }
    assert_eq!(objects(&daemon, 0)[0], 3);
    daemon.end();
}
