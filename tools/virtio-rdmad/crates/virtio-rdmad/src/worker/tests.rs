// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rounds of one worker, and the turns that each of its guests gets.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::guest::events::Events;
use crate::guest::guests::Arriving;
use crate::guest::histogram;

#[path = "../../tests/front_end/mod.rs"]
mod front_end;

#[path = "../../tests/rdma/mod.rs"]
mod rdma;

use front_end::{FrontEnd, REQUESTS};
use rdma::{Pair, Protocol};

/// Workers and guests that they may serve.
struct Bench {
    worker: Worker,
    /// The second worker, if there is one.
    other: Option<Worker>,
    guests: Arc<[Arc<Guest>]>,
    _directory: Directory,
}

impl Bench {
    /// Makes a worker and so many guests.
    fn new(test: &str, count: u32) -> Self {
        Self::with_workers(test, count, 1)
    }

    /// Makes two workers and so many guests.
    fn with_two(test: &str, count: u32) -> Self {
        Self::with_workers(test, count, 2)
    }

    fn with_workers(test: &str, count: u32, workers: usize) -> Self {
        let directory = std::env::temp_dir().join(format!("rdmad-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let workers: Arc<[Mailbox]> = (0..workers).map(|_| Mailbox::new(None).unwrap()).collect();
        let events = Arc::new(Events::new().unwrap());
        let all =
            Arc::new(Guests::new(HashMap::new(), HashMap::new(), workers.clone(), events).unwrap());
        let add = |index: u32| {
            let path = directory.join(index.to_string());
            all.add(Arriving::at(&path, &format!("g{index}"))).unwrap()
        };
        let guests: Arc<[_]> = (0..count).map(add).collect();
        let passing: Arc<[_]> = workers.iter().map(|_| Passing::default()).collect();
        let helpers = Arc::new(Helpers::new(|| {}));
        let make = |index| {
            let (workers, passing, helpers) = (workers.clone(), passing.clone(), helpers.clone());
            Worker::new(workers, passing, index, all.clone(), &[], Duration::ZERO, helpers).unwrap()
        };
        let (worker, other) = (make(0), (workers.len() > 1).then(|| make(1)));
        Self { worker, other, guests, _directory: Directory(directory) }
    }

    /// Connects a VMM to a guest.
    fn connect(&self, guest: usize) -> UnixStream {
        let (front_end, back_end) = UnixStream::pair().unwrap();
        front_end.set_nonblocking(true).unwrap();
        self.guests[guest].link.set_worker(Some(0));
        let connected = Connected { stream: back_end, said: None };
        assert!(self.worker.mailbox().serve(self.guests[guest].index, connected).is_ok());
        front_end
    }

    /// Makes rounds until there is nothing to do. This must not take for ever.
    fn settle(&mut self) {
        self.worker.settle();
    }
}

impl Worker {
    /// Returns how many guests the worker serves.
    fn guests(&self) -> usize {
        self.mailbox().guests()
    }

    fn is_idle(&self) -> bool {
        self.connections.iter().all(|connection| connection.state == State::Armed(None))
    }

    fn naps(&self) -> bool {
        self.connections.iter().all(|connection| connection.rest == Rest::Nap)
    }

    /// Takes the events that there are.
    fn look(&mut self) {
        let events = self.poller.wait(Some(Duration::ZERO)).unwrap();
        self.dispatch(&events);
    }

    /// Makes rounds until there is nothing to do. This must not take for ever.
    fn settle(&mut self) {
        self.make_rounds(Self::is_idle);
    }

    /// Makes rounds until the worker sleeps or naps. This must not take for ever.
    fn rest(&mut self) {
        self.make_rounds(|worker| worker.is_idle() || worker.naps());
    }

    fn make_rounds(&mut self, is_over: impl Fn(&Self) -> bool) {
        for _ in 0..100_000 {
            self.round().unwrap();
            if is_over(self) {
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

/// A worker that sleeps is called, helps with a copy, and sleeps again, also if other threads have wanted its processor
/// before. On a busy machine it sleeps at once when it is called, for a number of times.
#[test]
fn a_worker_that_is_called_helps() {
    let Bench { mut worker, .. } = Bench::new("help", 0);
    worker.poll = Duration::from_secs(10);
    worker.contention.yielded(Duration::from_secs(1));
    let (mailboxes, helpers) = (worker.mailboxes.clone(), worker.helpers.clone());
    let mailbox = &mailboxes[0];
    assert!(!mailbox.call(), "it does not sleep");
    std::thread::scope(|scope| {
        scope.spawn(|| worker.run());
        let this = std::thread::current().id();
        let helped = AtomicU32::new(0);
        let copy = |_| {
            if std::thread::current().id() == this {
                std::thread::yield_now();
            } else {
                helped.fetch_add(1, Ordering::SeqCst);
            }
        };
        while helped.load(Ordering::SeqCst) == 0 {
            mailbox.call();
            helpers.share(100, &copy);
        }
        while helpers.are_there() || !mailbox.times.is_asleep() {
            std::thread::yield_now();
        }
        mailbox.stop();
    });
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
    bench.guests[1].link.wake();
    bench.worker.sleep().unwrap();
    bench.guests[1].device.kick(0);
    bench.settle();
    assert_eq!((one.answered(), two.answered()), (2, 2));
}

/// Where other threads want the processor, the worker sleeps; but soon it finds the work of a guest that posts a batch
/// at a time without a kick. When the guest has no work any more, it has to kick again.
#[test]
fn batches_need_no_kick_on_a_contended_processor() {
    const BATCH: u16 = 8;
    const WORK: Duration = Duration::from_millis(1);
    let mut bench = Bench::new("naps", 1);
    bench.worker.poll = Duration::from_millis(500);
    let guest = FrontEnd::start(bench.connect(0), 0);
    bench.worker.contention.yielded(Duration::from_secs(1));
    bench.worker.rest();
    bench.guests[0].rings.store(true, Ordering::Relaxed);
    let mut posted = 0;
    let mut post = || {
        posted += BATCH;
        guest.post(posted);
        posted
    };
    while !bench.worker.naps() {
        let posted = post();
        guest.kick();
        bench.worker.sleep().unwrap();
        // The requests of this machine may take less time than is worth a nap.
        bench.worker.connections[0].worked(WORK, Instant::now());
        bench.worker.rest();
        assert_eq!(guest.answered(), posted);
    }
    for _ in 0..4 {
        let posted = post();
        assert!(bench.worker.naps());
        bench.worker.sleep().unwrap();
        bench.worker.connections[0].worked(WORK, Instant::now());
        bench.worker.rest();
        assert_eq!(guest.answered(), posted);
    }
    while bench.worker.naps() {
        bench.worker.sleep().unwrap();
        bench.worker.rest();
    }
    assert!(bench.worker.is_idle());
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
    assert_eq!(bench.worker.guests(), 1);
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
    let read = |bench: &Bench| bench.worker.mailbox().times.read();
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
        bench.guests[1].link.wake();
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
    let events = lost.add_events(bench.guests[0].device.event_queue().unwrap());
    bench.settle();
    assert_eq!(events.event(), None);
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
    // No front end asks for the status, so the driver gets an event.
    assert_eq!(events.event(), Some([abi::VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0]));
    // A driver that goes on regardless has no objects: what peers write to it would fill memory of this process.
    let pds = [0, 1].map(|guest| bench.guests[guest].device.status().pds);
    assert_eq!(pds, [0, 2]);
    let lost = lost.start_again(1);
    bench.worker.sleep().unwrap();
    bench.settle();
    lost.ask_status();
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!((lost.answered(), lost.status()), (1, 0));
}

/// No front end asks for the status, in which the device says that its control queue is broken.
#[test]
fn a_malformed_request_is_told_by_an_event() {
    let mut bench = Bench::new("malformed", 1);
    let guest = FrontEnd::start(bench.connect(0), 1);
    let events = guest.add_events(bench.guests[0].device.event_queue().unwrap());
    bench.settle();
    guest.spoil(1);
    guest.post(2);
    guest.kick();
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!(guest.answered(), 1);
    assert_eq!(events.event(), Some([abi::VIRTIO_RDMA_EVENT_DEVICE_FATAL, 0]));
    let guest = guest.start_again(1);
    bench.worker.sleep().unwrap();
    bench.settle();
    assert_eq!(guest.answered(), 1);
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
    let times = worker.mailbox().times.read();
    assert_eq!(times.poll, 3 * look);
    assert_eq!(times.work, work);
    assert!(work + times.poll + times.wait >= 20 * look);
    assert_eq!(worker.idle_rounds, 0);
    // Polling cannot have taken longer than the time that passed.
    (worker.idle_rounds, worker.idle_round) = (ROUNDS, Duration::from_secs(1));
    assert_eq!(worker.count_work().ran, Duration::ZERO);
}

/// Makes the worker of a guest hand the guest to the other worker.
fn send_away(worker: &Worker, guest: &Guest) {
    let to = 1 - worker.index;
    assert!(worker.mailbox().order(Order::SendAway(guest.index, to)).is_ok());
}

/// The way in which a worker learns that there is work for a guest.
#[derive(Clone, Copy, Debug)]
enum Told {
    /// The guest kicks.
    Kick,
    /// Another thread wakes the guest's worker.
    Wake,
    /// Another thread wakes the worker that it still takes for the guest's.
    LateWake,
}

/// Whatever comes for a guest, on the way from one worker to another one, reaches it there.
#[test]
fn nothing_for_a_guest_that_is_moved_is_lost() {
    let mut bench = Bench::with_two("moved", 2);
    let stays = FrontEnd::start(bench.connect(0), 1);
    let moves = FrontEnd::start(bench.connect(1), 1);
    bench.settle();
    let guest = bench.guests[1].clone();
    let mut other = bench.other.take().unwrap();
    let [mut one, mut two] = [&mut bench.worker, &mut other];
    let mut posted = 1;
    let ways = [Told::Kick, Told::Wake, Told::LateWake];
    for (told, at) in ways.into_iter().flat_map(|told| (0..4).map(move |step| (told, step))) {
        posted += 1;
        let come = |step: u32, one: &Worker| {
            if step != at {
                return;
            }
            moves.post(posted);
            if !matches!(told, Told::Kick) {
                guest.device.kick(0);
            }
            match told {
                Told::Kick => moves.kick(),
                Told::Wake => guest.link.wake(),
                Told::LateWake => assert!(one.mailbox().want(guest.index)),
            }
        };
        come(0, one);
        send_away(one, &guest);
        one.take_requests();
        assert_eq!(guest.link.worker(), Some(two.index));
        come(1, one);
        two.take_requests();
        come(2, one);
        two.settle();
        // What the poller tells of for the first time.
        two.look();
        two.settle();
        come(3, one);
        one.settle();
        two.look();
        two.settle();
        assert_eq!(moves.answered(), posted, "{told:?} at step {at}");
        assert_eq!(two.connections.len(), two.guests());
        std::mem::swap(&mut one, &mut two);
    }
    assert_eq!((one.guests(), two.guests(), stays.answered()), (2, 0, 1));
}

/// Stops workers when it is dropped, also by a test that fails.
struct Stop<'a>(&'a [Mailbox]);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(Mailbox::stop);
    }
}

/// A guest is handed back and forth while it has work, by workers that run in threads of their own.
#[test]
fn a_guest_goes_on_while_it_is_moved() {
    let mut bench = Bench::with_two("traffic", 3);
    let guests = bench.guests.clone();
    let mut front_ends: Vec<_> = (0..3).map(|at| FrontEnd::start(bench.connect(at), 0)).collect();
    let mut other = bench.other.take().unwrap();
    let workers = bench.worker.mailboxes.clone();
    std::thread::scope(|scope| {
        let _end = Stop(&workers);
        scope.spawn(|| bench.worker.run());
        scope.spawn(|| other.run());
        for round in 0..20 {
            for posted in 1..=REQUESTS {
                for front_end in &front_ends {
                    front_end.post(posted);
                    front_end.kick();
                }
                let moves = &guests[usize::from(posted) % 3];
                let from = moves.link.worker().unwrap();
                let to = 1 - from;
                assert!(workers[from].order(Order::SendAway(moves.index, to)).is_ok());
                while moves.link.worker() != Some(to) {
                    std::thread::yield_now();
                }
                for front_end in &front_ends {
                    front_end.wait(posted);
                }
            }
            for replies in front_ends.iter().map(FrontEnd::replies) {
                // Each request made a PD of its own.
                let pds: HashSet<_> = replies.iter().map(|reply| reply[1..].to_vec()).collect();
                assert!(replies.iter().all(|reply| reply[0] == 0), "round {round}");
                assert_eq!(pds.len(), usize::from(REQUESTS));
            }
            front_ends = front_ends.into_iter().map(|front_end| front_end.start_again(0)).collect();
        }
    });
    assert!(guests.iter().all(|guest| guest.work() > Duration::ZERO));
}

/// Messages between two guests are under way while these are handed back and forth. Each comes once, in order.
#[test]
fn messages_go_on_while_guests_are_moved() {
    let mut bench = Bench::with_two("messages-moved", 2);
    let guests = bench.guests.clone();
    let mut other = bench.other.take().unwrap();
    let workers = bench.worker.mailboxes.clone();
    let sockets = [0, 1].map(|guest| bench.connect(guest));
    std::thread::scope(|scope| {
        let _end = Stop(&workers);
        scope.spawn(|| bench.worker.run());
        scope.spawn(|| other.run());
        let move_one = |guest: &Guest| {
            let from = guest.link.worker().unwrap();
            assert!(workers[from].order(Order::SendAway(guest.index, 1 - from)).is_ok());
            while guest.link.worker() == Some(from) {
                std::thread::yield_now();
            }
        };
        let mut pair = Pair::new(sockets.map(|socket| (socket, Protocol::VhostUser)));
        for round in 0..200 {
            move_one(&guests[round % 2]);
            pair.send();
            move_one(&guests[round / 2 % 2]);
            pair.receive();
        }
    });
}

/// A process that ends leaves guests to the next one that are on their way from one worker to another one.
#[test]
fn a_guest_on_its_way_is_there_at_the_end() {
    let mut bench = Bench::with_two("end", 1);
    let _moves = FrontEnd::start(bench.connect(0), 1);
    bench.settle();
    let mut other = bench.other.take().unwrap();
    send_away(&bench.worker, &bench.guests[0]);
    bench.worker.take_requests();
    // It is not sent back any more.
    send_away(&other, &bench.guests[0]);
    assert!(bench.worker.finish().is_empty());
    assert_eq!(other.finish().iter().flatten().count(), 1);
}

#[test]
fn the_guests_of_a_worker_that_retires_go_to_another_one() {
    let mut bench = Bench::with_two("retires", 2);
    let one = FrontEnd::start(bench.connect(0), 1);
    bench.settle();
    // This one has not arrived yet.
    let two = FrontEnd::start(bench.connect(1), 1);
    let mut other = bench.other.take().unwrap();
    bench.worker.retire(Errno::BADF);
    assert_eq!((bench.worker.guests(), other.guests()), (0, 2));
    one.post(2);
    one.kick();
    other.settle();
    other.look();
    other.settle();
    assert_eq!((one.answered(), two.answered()), (2, 1));
    // A guest cannot go to it any more.
    send_away(&other, &bench.guests[0]);
    other.take_requests();
    one.post(3);
    one.kick();
    other.look();
    other.settle();
    assert_eq!(one.answered(), 3);
    // If no other worker is left, they are disconnected.
    other.retire(Errno::BADF);
    assert_eq!(bench.guests.iter().filter_map(|guest| guest.link.worker()).count(), 0);
    assert_eq!((bench.worker.guests(), other.guests()), (0, 0));
}
