// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite judges devices behind sockets of both protocols.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use conform::port::{Attach, VfioUser, VhostUser};
use conform::suite::{all, Finding, Settings, Suite, Verdict};
use engine::{Device, DeviceConfig, DevicePolicy, Fabric, FabricConfig, Limits, Next, Paths, Wake};
use memory::GuestMemory;
use ring::SplitQueue;
use virtio_transport::{Backend, Protocol, QueueSetup, Server};

struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// A device of the network, as its VMM sees it.
struct Member {
    device: Arc<Device>,
    config: [u8; 256],
    kicks: BTreeMap<u16, Arc<OwnedFd>>,
}

impl Member {
    fn new(fabric: &Fabric, number: u8) -> Self {
        let device = fabric.add_device(DeviceConfig {
            name: format!("member {number}"),
            mac: Some([0x52, 0x54, 0, 0, 0, number]),
            limits: Limits::for_64_queues(),
            policy: DevicePolicy::default(),
            paths: Paths::ALL,
            wake: Arc::new(NoWake),
        });
        let config = device.config_space();
        Self { device, config, kicks: BTreeMap::new() }
    }

    /// Does what there is to do. Returns whether there was anything.
    fn work(&mut self) -> bool {
        for (index, kick) in &self.kicks {
            if rustix::io::read(kick, &mut [0; 8]).is_ok() {
                self.device.kick(*index);
            }
        }
        self.device.run(64) == Next::Busy || self.device.arm()
    }
}

impl Backend for Member {
    fn features(&self) -> u64 {
        self.device.features()
    }

    fn accepts(&self, features: u64) -> bool {
        abi::is_agreement(features)
    }

    fn set_features(&mut self, features: u64) {
        self.device.set_driver_features(abi::closed(features));
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.device.queue_count()
    }

    fn queue_max_size(&self, queue: u16) -> u16 {
        self.device.queue_max_size(queue)
    }

    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        let mut rings = Vec::new();
        for QueueSetup { index, layout, base, kick, signal } in queues {
            let ring = SplitQueue::new(memory, layout, base).map_err(|error| error.to_string())?;
            self.kicks.extend(kick.map(|kick| (index, kick)));
            rings.push((index, ring, signal));
        }
        self.device.start(memory, rings);
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        self.device.set_memory(memory);
    }

    fn freeze(&mut self) {
        self.device.begin_freeze();
        self.device.settle();
    }

    fn thaw(&mut self, _: Vec<QueueSetup>) -> Result<(), String> {
        self.device.thaw();
        Ok(())
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn reset(&mut self) {
        self.kicks.clear();
        self.device.reset();
    }
}

/// A device and the socket at which its VMM finds it.
struct Place {
    member: Member,
    listener: UnixListener,
    server: Option<Box<Server<dyn Protocol>>>,
    is_vfio: bool,
}

impl Place {
    /// Does what there is to do. Returns whether there was anything.
    fn work(&mut self) -> bool {
        if let Ok((stream, _)) = self.listener.accept() {
            self.end();
            let id = u16::try_from(abi::VIRTIO_RDMA_DEVICE_ID).unwrap();
            self.server = Some(if self.is_vfio {
                Box::new(vfio_user::serve(stream, id, &self.member).unwrap())
            } else {
                Box::new(vhost_user::serve(stream, &self.member))
            });
        }
        let mut has_more = self.member.work();
        if let Some(server) = &mut self.server {
            if self.member.device.needs_reset() {
                server.needs_reset();
            }
            match server.process(&mut self.member) {
                Ok(more) => has_more |= more,
                Err(_) => self.end(),
            }
        }
        has_more
    }

    fn end(&mut self) {
        self.server = None;
        self.member.reset();
    }
}

/// The thread that has two devices.
struct Devices {
    folder: tempfile::TempDir,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Devices {
    fn new(is_vfio: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let listeners = [1, 2].map(|number| {
            let listener = UnixListener::bind(folder.path().join(format!("{number}"))).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        });
        let end = Arc::clone(&ends);
        let thread = std::thread::spawn(move || serve(listeners, is_vfio, &end));
        Self { folder, ends, thread: Some(thread) }
    }

    fn path(&self, number: u8) -> PathBuf {
        self.folder.path().join(format!("{number}"))
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(listeners: [UnixListener; 2], is_vfio: bool, ends: &AtomicBool) {
    let fabric = Fabric::new(FabricConfig::default());
    let mut places: Vec<Place> = (1..)
        .zip(listeners)
        .map(|(number, listener)| {
            let member = Member::new(&fabric, number);
            Place { member, listener, server: None, is_vfio }
        })
        .collect();
    while !ends.load(Ordering::Relaxed) {
        let has_more: Vec<bool> = places.iter_mut().map(Place::work).collect();
        if !has_more.contains(&true) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Runs the tests of these families, of which none may fail. Returns what they find.
fn judge(devices: Vec<Box<dyn Attach>>, families: &[&str]) -> Vec<Finding> {
    let mut suite = Suite::new(Settings::default(), devices);
    let is_of = |name: &str| families.iter().any(|family| name.starts_with(&format!("{family}.")));
    let runs: Vec<_> = all().into_iter().filter(|run| is_of(&run.name())).collect();
    let findings: Vec<_> = runs.iter().map(|run| suite.run(run)).collect();
    for finding in &findings {
        if let Verdict::Fail(failure) = &finding.verdict {
            panic!("{}: {failure}", finding.name);
        }
    }
    findings
}

const FAMILIES: [&str; 8] = [
    "configuration",
    "control",
    "port",
    "completion",
    "datagram",
    "lost_memory",
    "reset",
    "virtqueues",
];

/// Returns the runs that judge nothing.
fn left_out(findings: &[Finding]) -> Vec<(&str, &str)> {
    let reason = |finding: &Finding| match &finding.verdict {
        Verdict::NotJudged(reason) => Some(reason.clone()),
        _ => None,
    };
    let with = |finding| reason(finding).map(|reason| (finding, reason));
    findings
        .iter()
        .filter_map(with)
        .map(|(finding, reason)| {
            (
                finding.name.as_str(),
                if reason.starts_with("the transport") { "transport" } else { "other" },
            )
        })
        .collect()
}

#[test]
fn devices_behind_vhost_user() {
    let devices = Devices::new(false);
    let attach = |number| Box::new(VhostUser::new(devices.path(number))) as Box<dyn Attach>;
    let findings = judge(vec![attach(1), attach(2)], &FAMILIES);
    for (name, reason) in left_out(&findings) {
        assert_eq!(reason, "transport", "{name}");
    }
}

#[test]
fn devices_behind_vfio_user() {
    let devices = Devices::new(true);
    let attach = |number| Box::new(VfioUser::new(devices.path(number))) as Box<dyn Attach>;
    let findings = judge(vec![attach(1), attach(2)], &FAMILIES);
    for (name, reason) in left_out(&findings) {
        assert_eq!(reason, "transport", "{name}");
    }
}

#[test]
fn socket_of_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let attach = VhostUser::new(folder.path().join("none"));
    let mut suite = Suite::new(Settings::default(), vec![Box::new(attach)]);
    for run in &all()[..2] {
        let verdict = suite.run(run).verdict;
        let Verdict::NotJudged(reason) = verdict else { panic!("{verdict:?}") };
        assert!(reason.starts_with("the device is gone"), "{reason}");
    }
}

#[test]
fn device_that_answers_nonsense() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nonsense");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        use std::io::{Read, Write};
        // A message of another version, one that is too long, and none.
        for answer in [vec![0xff; 64], [1_u32, 5, 1 << 30].map(u32::to_ne_bytes).concat(), vec![]] {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 12]);
            let _ = stream.write_all(&answer);
        }
    });
    for _ in 0..3 {
        let attach = Box::new(VhostUser::new(path.clone()));
        let mut suite = Suite::new(Settings::default(), vec![attach]);
        let verdict = suite.run(&all()[0]).verdict;
        assert!(matches!(verdict, Verdict::NotJudged(_)), "{verdict:?}");
    }
    thread.join().unwrap();
}

/// Answers a front end until it asks for the configuration space, and ends then.
fn die_in_the_middle(listener: &UnixListener) {
    use std::io::{Read, Write};
    let (mut stream, _) = listener.accept().unwrap();
    let mut header = [0; 12];
    while stream.read_exact(&mut header).is_ok() {
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let (request, mut payload) = (word(0), vec![0; word(8) as usize]);
        stream.read_exact(&mut payload).unwrap();
        // Features with VHOST_USER_F_PROTOCOL_FEATURES, and the protocol feature of configuration space.
        let answer: u64 = match request {
            1 => 1 << 32 | 1 << 30 | 1 << abi::VIRTIO_RDMA_F_RINGS,
            15 => 1 << 9,
            24 => return,
            _ => continue,
        };
        let head = [request, 5, 8].map(u32::to_ne_bytes).concat();
        stream.write_all(&[&head[..], &answer.to_ne_bytes()].concat()).unwrap();
    }
}

#[test]
fn device_that_ends_while_a_test_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ends");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || die_in_the_middle(&listener));
    let mut suite = Suite::new(Settings::default(), vec![Box::new(VhostUser::new(path))]);
    let runs = all();
    let verdict = suite.run(&runs[0]).verdict;
    let Verdict::Fail(failure) = verdict else { panic!("{verdict:?}") };
    assert_eq!(failure.clause, runs[0].test.clauses[0]);
    assert!(failure.got.contains("closed the connection"), "{failure}");
    thread.join().unwrap();
    for run in &runs[1..3] {
        let verdict = suite.run(run).verdict;
        let Verdict::NotJudged(reason) = verdict else { panic!("{verdict:?}") };
        assert!(reason.starts_with("the device is gone"), "{reason}");
    }
}
