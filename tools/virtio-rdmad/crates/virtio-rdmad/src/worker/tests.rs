// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rounds of one worker, and what each of its guests gets of them.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use engine::{DeviceConfig, Fabric, FabricConfig};
use rustix::event::{eventfd, EventfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::guest::Link;
use crate::socket::Socket;

/// Where a front end says that it has the memory, and where the control queue is in it.
const USER: u64 = 0x10_0000;
const MEMORY: u64 = 0x1_0000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x4000;
/// Control requests that its ring holds, of two descriptors each.
const REQUESTS: u16 = 128;
const CREATE_PD: u8 = 4;

/// A front end that posts control requests.
struct FrontEnd {
    socket: UnixStream,
    memory: OwnedFd,
    kick: OwnedFd,
}

impl FrontEnd {
    /// Hands over memory and the control queue, with `posted` requests in it.
    fn start(socket: UnixStream, posted: u16) -> Self {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, MEMORY).unwrap();
        let this = Self { socket, memory, kick: new_eventfd() };
        for request in 0..REQUESTS {
            this.write_request(request);
        }
        this.write(AVAIL + 2, &posted.to_le_bytes());
        let call = new_eventfd();
        let state = |value: u32| [0, value].map(u32::to_ne_bytes).concat();
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>();
        this.send(5, &words(&[1, 0, MEMORY, USER, 0]), &[this.memory.as_fd()]);
        this.send(8, &state(256), &[]);
        this.send(10, &state(0), &[]);
        this.send(9, &words(&[0, USER + DESC, USER + USED, USER + AVAIL, 0]), &[]);
        this.send(13, &words(&[0]), &[call.as_fd()]);
        this.send(12, &words(&[0]), &[this.kick.as_fd()]);
        this
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        rustix::io::pwrite(&self.memory, bytes, at).unwrap();
    }

    /// CREATE_PD, and room for its reply.
    fn write_request(&self, number: u16) {
        let buffer = BUFFERS + u64::from(number) * 16;
        let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
            let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
            [&addr[..], &len, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
        };
        let head = 2 * number;
        let chain = [descriptor(buffer, 1, 1, head + 1), descriptor(buffer + 8, 5, 2, 0)].concat();
        self.write(DESC + u64::from(head) * 16, &chain);
        self.write(buffer, &[CREATE_PD]);
        self.write(AVAIL + 4 + u64::from(number) * 2, &head.to_le_bytes());
    }

    /// Requests that were answered.
    fn answered(&self) -> u16 {
        let mut index = [0; 2];
        rustix::io::pread(&self.memory, &mut index, USED + 2).unwrap();
        u16::from_le_bytes(index)
    }

    fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let size = u32::try_from(payload.len()).unwrap();
        let header = [request, 1, size].map(u32::to_ne_bytes).concat();
        let message = [header.as_slice(), payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let parts = [IoSlice::new(&message)];
        assert_eq!(
            sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL),
            Ok(message.len())
        );
    }
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// One worker and guests that it may serve.
struct Bench {
    worker: Worker,
    guests: Vec<Arc<Guest>>,
    directory: PathBuf,
}

impl Bench {
    fn new(test: &str, count: u32) -> Self {
        let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let workers: Arc<[Shared]> = Arc::new([Shared::new(count as usize).unwrap()]);
        let fabric = Fabric::new(FabricConfig::default());
        let guest = |index: u32| {
            let path = directory.join(index.to_string());
            let spec: crate::options::GuestSpec =
                format!("name=g{index},vhost-user={}", path.display()).parse().unwrap();
            let link = Arc::new(Link::new(workers.clone(), index));
            let device = fabric.add_device(DeviceConfig {
                name: spec.name.clone(),
                mac: None,
                limits: spec.limits.clone(),
                rings: spec.rings,
                wake: link.clone(),
            });
            let (rings, socket) = (AtomicBool::new(false), Socket::bind(&path).unwrap());
            Arc::new(Guest { spec, index, device, link, rings, socket })
        };
        let guests = (0..count).map(guest).collect();
        let worker = Worker::new(workers, 0, Duration::ZERO, Arc::new(new_eventfd())).unwrap();
        Self { worker, guests, directory }
    }

    /// Connects a monitor to a guest.
    fn connect(&self, guest: usize) -> UnixStream {
        let (front_end, back_end) = UnixStream::pair().unwrap();
        front_end.set_nonblocking(true).unwrap();
        self.guests[guest].link.set_worker(Some(0));
        self.worker.shared().serve(self.guests[guest].clone(), back_end);
        front_end
    }

    fn is_parked(&self) -> bool {
        let parked = |connection: &Connection| connection.state == State::Parked(None);
        self.worker.connections.iter().all(parked)
    }

    /// Goes round until there is nothing to do, which must come to pass.
    fn settle(&mut self) {
        for _ in 0..1000 {
            self.worker.round().unwrap();
            if self.is_parked() {
                return;
            }
        }
        panic!("a guest without work is looked at for ever");
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.worker.connections.clear();
        drop(self.worker.shared().arrivals());
        self.guests.clear();
        let _ = std::fs::remove_dir(&self.directory);
    }
}

#[test]
fn a_flood_of_requests_leaves_others_their_turn() {
    let mut bench = Bench::new("flood", 2);
    let flood = FrontEnd::start(bench.connect(0), REQUESTS);
    let other = FrontEnd::start(bench.connect(1), 1);
    bench.worker.round().unwrap();
    assert_eq!(other.answered(), 1);
    assert!((1..REQUESTS / 2).contains(&flood.answered()), "{}", flood.answered());
    bench.settle();
    assert_eq!(flood.answered(), REQUESTS);
}

#[test]
fn a_flood_of_messages_leaves_others_their_turn() {
    let mut bench = Bench::new("messages", 2);
    let (mut flood, mut other) = (bench.connect(0), bench.connect(1));
    let request = [1_u32, 1, 0].map(u32::to_ne_bytes).concat();
    flood.write_all(&request.repeat(1000)).unwrap();
    other.write_all(&request).unwrap();
    bench.worker.round().unwrap();
    let answers = |socket: &mut UnixStream| socket.read(&mut vec![0; 1 << 16]).unwrap() / 20;
    assert_eq!(answers(&mut other), 1);
    assert!((1..=256).contains(&answers(&mut flood)));
}

#[test]
fn who_has_nothing_to_do_gets_no_turn() {
    let mut bench = Bench::new("idle", 3);
    let one = FrontEnd::start(bench.connect(0), 1);
    let two = FrontEnd::start(bench.connect(1), 1);
    let _unused = bench.connect(2);
    bench.settle();
    assert_eq!((one.answered(), two.answered()), (1, 1));
    // A kick gives a turn to the guest that kicked, and not to the others.
    one.write(AVAIL + 2, &2_u16.to_le_bytes());
    two.write(AVAIL + 2, &2_u16.to_le_bytes());
    rustix::io::write(&one.kick, &1_u64.to_ne_bytes()).unwrap();
    bench.worker.rest().unwrap();
    bench.settle();
    assert_eq!((one.answered(), two.answered()), (2, 1));
    // So does another thread's wish.
    engine::Wake::wake(&*bench.guests[1].link);
    bench.worker.rest().unwrap();
    bench.guests[1].device.kick(0);
    bench.settle();
    assert_eq!((one.answered(), two.answered()), (2, 2));
}

#[test]
fn a_guest_that_fails_takes_nobody_along() {
    let mut bench = Bench::new("fails", 3);
    let mut bad = bench.connect(0);
    let other = FrontEnd::start(bench.connect(1), 1);
    let gone = bench.connect(2);
    bad.write_all(&[0xff; 64]).unwrap();
    drop(gone);
    bench.settle();
    assert_eq!(other.answered(), 1);
    let served =
        |bench: &Bench| bench.guests.iter().map(|g| g.link.worker().is_some()).collect::<Vec<_>>();
    assert_eq!(served(&bench), [false, true, false]);
    assert_eq!(bench.worker.shared().guests(), 1);
    // A panic in a guest's turn ends its connection too.
    let gone = bench.worker.guard::<()>(0, |_| panic!("for the test"));
    assert!(gone.is_none());
    assert_eq!(served(&bench), [false; 3]);
    let again = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    assert_eq!(again.answered(), 1);
}

#[test]
fn a_guest_that_loses_its_memory_takes_nobody_along() {
    memory::survive_truncation().unwrap();
    let mut bench = Bench::new("truncated", 2);
    let lost = FrontEnd::start(bench.connect(0), 1);
    let other = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    rustix::fs::ftruncate(&lost.memory, 0).unwrap();
    other.write(AVAIL + 2, &2_u16.to_le_bytes());
    for front_end in [&lost, &other] {
        rustix::io::write(&front_end.kick, &1_u64.to_ne_bytes()).unwrap();
    }
    bench.worker.rest().unwrap();
    bench.settle();
    assert_eq!(other.answered(), 2);
    assert_ne!(memory::truncations(), 0);
}
