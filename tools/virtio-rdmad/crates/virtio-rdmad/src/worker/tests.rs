// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rounds of one worker, and the turns that each of its guests gets.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::*;
use crate::events::Events;
use crate::guest::Origin;
use crate::guests::Arriving;
use crate::histogram;
use crate::socket::{Kind, Socket};

#[path = "../../tests/front_end/mod.rs"]
mod front_end;

use front_end::{FrontEnd, REQUESTS};

/// One worker and guests that it may serve.
struct Bench {
    worker: Worker,
    guests: Arc<[Arc<Guest>]>,
    _directory: Directory,
}

impl Bench {
    fn new(test: &str, count: u32) -> Self {
        let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let workers: Arc<[WorkerHandle]> = Arc::new([WorkerHandle::new().unwrap()]);
        let events = Arc::new(Events::new().unwrap());
        let all =
            Arc::new(Guests::new(HashMap::new(), HashSet::new(), workers.clone(), events).unwrap());
        let add = |index: u32| {
            let path = directory.join(index.to_string());
            let spec = format!("name=g{index},vhost-user={}", path.display()).parse().unwrap();
            let socket = Socket::bind(&path, Kind::Stream).unwrap();
            let memory = memory::Policy::default();
            all.add(Arriving { spec, socket, memory, kept: None, origin: Origin::CommandLine })
                .unwrap()
        };
        let guests: Arc<[_]> = (0..count).map(add).collect();
        let worker = Worker::new(workers, 0, all.clone(), &[], Duration::ZERO).unwrap();
        Self { worker, guests, _directory: Directory(directory) }
    }

    /// Connects a VMM to a guest.
    fn connect(&self, guest: usize) -> UnixStream {
        let (front_end, back_end) = UnixStream::pair().unwrap();
        front_end.set_nonblocking(true).unwrap();
        self.guests[guest].link.set_worker(Some(0));
        self.worker
            .handle()
            .serve(self.guests[guest].index, Connected { stream: back_end, said: None });
        front_end
    }

    fn is_idle(&self) -> bool {
        let armed = |connection: &Connection| connection.state == State::Armed(None);
        self.worker.connections.iter().all(armed)
    }

    /// Makes rounds until there is nothing to do. This must not take for ever.
    fn settle(&mut self) {
        for _ in 0..1000 {
            self.worker.round().unwrap();
            if self.is_idle() {
                return;
            }
        }
        panic!("a guest without work is looked at for ever");
    }
}

/// The directory of the sockets, which goes after them.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
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
    // A kick gives a turn to the guest that kicked, and to no other.
    one.post(2);
    two.post(2);
    one.kick();
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!((one.answered(), two.answered()), (2, 1));
    // So does another thread that wants it.
    engine::Wake::wake(&*bench.guests[1].link);
    bench.worker.sleep().unwrap();
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
    assert_eq!(bench.worker.handle().guests(), 1);
    // A panic in a guest's turn ends its connection too.
    let gone = bench.worker.guard::<()>(0, |_| panic!("for the test"));
    assert!(gone.is_none());
    assert_eq!(served(&bench), [false; 3]);
    let again = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    assert_eq!(again.answered(), 1);
}

/// The turns in a round make up its time, and rounds without work are not timed.
#[test]
fn rounds_with_work_are_timed() {
    let mut bench = Bench::new("timed", 2);
    let _guests = [0, 1].map(|guest| FrontEnd::start(bench.connect(guest), REQUESTS));
    bench.settle();
    let read = |bench: &Bench| bench.worker.handle().times.read();
    let count = |histogram: &histogram::Reading| -> u64 {
        histogram.buckets.iter().map(|(_, count)| count).sum()
    };
    let times = read(&bench);
    assert_eq!(times.turns.sum, times.worked_rounds.sum);
    let (turns, rounds) = (count(&times.turns), count(&times.worked_rounds));
    assert!(turns > rounds && rounds > 0, "{turns} turns in {rounds} rounds");
    (0..100).for_each(|_| bench.worker.round().unwrap());
    let later = read(&bench);
    assert_eq!((later.turns, later.worked_rounds), (times.turns, times.worked_rounds));
    assert!(later.rounds > times.rounds);
}

/// The device of a guest that disconnects is reset over many turns.
#[test]
fn a_guest_that_goes_leaves_others_their_turn() {
    let mut bench = Bench::new("goes", 2);
    let gone = FrontEnd::start(bench.connect(0), 1);
    let other = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    let device = bench.guests[0].device.clone();
    // GET_DMA_MR in the PD that there is.
    let mut request = [0; 9];
    request[0] = u8::try_from(abi::VIRTIO_RDMA_CMD_GET_DMA_MR).unwrap();
    for _ in 0..10_000 {
        let mut reply = [0; 16];
        assert_eq!((device.command(&request, &mut reply), reply[0]), (13, 0));
    }
    drop(gone);
    bench.worker.sleep().unwrap();
    let mut rounds = 0;
    while bench.guests[0].link.worker().is_some() {
        rounds += 1;
        other.post(1 + rounds);
        engine::Wake::wake(&*bench.guests[1].link);
        bench.guests[1].device.kick(0);
        bench.worker.round().unwrap();
        assert_eq!(other.answered(), 1 + rounds);
    }
    assert!((10..100).contains(&rounds), "{rounds} rounds");
    assert_eq!(device.status().mrs, 0);
    // Its VMM may connect again.
    let again = FrontEnd::start(bench.connect(0), 1);
    bench.settle();
    assert_eq!(again.answered(), 1);
}

#[test]
fn a_guest_that_loses_its_memory_takes_nobody_along() {
    memory::survive_losses().unwrap();
    let mut bench = Bench::new("truncated", 2);
    let lost = FrontEnd::start(bench.connect(0), 1);
    let other = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    lost.truncate();
    other.post(2);
    lost.kick();
    other.kick();
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!(other.answered(), 2);
    assert_ne!(memory::losses(), 0);
    // Only the guest that it happened to has to be reset.
    lost.ask_status();
    other.ask_status();
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!((lost.status(), other.status()), (0x40, 0));
}

#[test]
fn looks_in_vain_before_work_are_no_work() {
    let mut bench = Bench::new("vain", 1);
    let worker = &mut bench.worker;
    // This is so short that the thread runs for longer whenever it runs.
    let look = Duration::from_micros(1);
    worker.clock.wake();
    let start = Instant::now();
    while start.elapsed() < 20 * look {
        std::hint::spin_loop();
    }
    // The first round was timed, and one after each ROUNDS.
    (worker.idle_rounds, worker.idle_round) = (ROUNDS + 4, look);
    let work = worker.count_work().ran;
    let times = worker.handle().times.read();
    assert_eq!(times.poll, 3 * look);
    assert_eq!(times.work, work);
    assert!(work + times.poll + times.wait >= 20 * look);
    assert_eq!(worker.idle_rounds, 0);
    // Polling cannot have taken longer than the time that passed.
    (worker.idle_rounds, worker.idle_round) = (ROUNDS, Duration::from_secs(1));
    assert_eq!(worker.count_work().ran, Duration::ZERO);
}
