// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packet sockets at both ends of a pair of veth, and taps.

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::*;
use crate::uplink::namespace::{self, run};

const NEAR: Mac = [0x52, 0x54, 0, 0, 0, 1];
const FAR: Mac = [0x52, 0x54, 0, 0, 0, 2];

/// Makes the test of this name run `inside` a namespace with the pair.
fn in_namespace(test: &str, inside: impl FnOnce()) {
    namespace::in_namespace(&format!("uplink::port::tests::{test}"), || {
        run("ip link add near type veth peer name far");
        // The one that comes up last can send at once.
        run("ip link set far up");
        run("ip link set near up");
        inside();
    });
}

/// Returns room in which a port takes so many frames at once.
fn room(port: &Port, frames: usize) -> Room {
    Room { bytes: port.room(), frames }
}

/// An end of the pair.
struct End {
    port: Port,
    counters: Counters,
}

impl End {
    fn open(name: &str, station: Mac) -> Self {
        Self::with_trains(name, station, true)
    }

    fn with_trains(name: &str, station: Mac, trains: bool) -> Self {
        let port = Port::socket(&spec(name, trains), name, Some(&[station])).unwrap();
        Self { port, counters: Counters::new(name) }
    }

    /// Sends a packet, or a train if there is a segment, whose UDP header is said to be at `udp`.
    fn send(&self, payload: usize, segment: u16, udp: u16) {
        let mut frame = packet(payload);
        self.port.send(Segments { frame: &mut frame, segment, udp }, &self.counters);
    }

    /// Waits for a frame. Returns its length, and the bytes of a segment.
    fn wait(&self) -> (usize, u16) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.port, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "no frame comes");
        let mut came = None;
        let deliver = |frame: &[u8], segment| came = Some((frame.len(), segment));
        self.port.receive(&mut room(&self.port, 1), &self.counters, deliver).unwrap();
        came.unwrap()
    }

    fn count(&self, name: &str) -> u64 {
        self.counters.read()[name]
    }
}

fn spec(name: &str, trains: bool) -> PortSpec {
    PortSpec { name: name.to_owned(), trains }
}

/// The bytes of the headers of [`packet`], and where its UDP header is.
const HEADERS: usize = 62;
const UDP: u16 = 54;

/// Returns a packet of IPv6 to UDP port 4791.
fn packet(payload: usize) -> Vec<u8> {
    let [high, low] = u16::try_from(8 + payload).unwrap().to_be_bytes();
    let mut frame = [&FAR[..], &NEAR, &[0x86, 0xdd, 0x60, 0, 0, 0, high, low, 17, 64]].concat();
    frame.extend([0xfd; 32]);
    frame.extend([0xc0, 1, 0x12, 0xb7, high, low, 0, 0]);
    frame.resize(HEADERS + payload, 7);
    frame
}

#[test]
fn trains_go_as_they_are_until_the_kernel_refuses_one() {
    in_namespace("trains_go_as_they_are_until_the_kernel_refuses_one", || {
        let (near, far) = (End::open("near", NEAR), End::open("far", FAR));
        near.send(2500, 1000, UDP);
        assert_eq!(far.wait(), (HEADERS + 2500, 1000));
        assert_eq!(near.count("tx_frames"), 1);
        // Linux refuses a header that says this, as it refuses every train before 6.2.
        for udp in [60_000, UDP] {
            near.send(2500, 1000, udp);
            let came: Vec<_> = (0..3).map(|_| far.wait()).collect();
            assert_eq!(came, [(HEADERS + 1000, 0), (HEADERS + 1000, 0), (HEADERS + 500, 0)]);
        }
        assert_eq!((near.count("tx_frames"), near.count("tx_lost")), (7, 0));
    });
}

/// Segmentation by a network card may spoil the identifications of IPv4, so an administrator can do without trains.
#[test]
fn no_train_goes_where_none_is_wanted() {
    in_namespace("no_train_goes_where_none_is_wanted", || {
        let (near, far) = (End::with_trains("near", NEAR, false), End::open("far", FAR));
        near.send(2500, 1000, UDP);
        let came: Vec<_> = (0..3).map(|_| far.wait()).collect();
        assert_eq!(came, [(HEADERS + 1000, 0), (HEADERS + 1000, 0), (HEADERS + 500, 0)]);
        assert_eq!((near.count("tx_frames"), near.count("tx_lost")), (3, 0));
    });
}

/// A tap is given single packets then, also when it was made again, and trains that come stay whole.
#[test]
fn a_tap_without_trains_is_given_packets() {
    in_namespace("a_tap_without_trains_is_given_packets", || {
        let make = || run("ip tuntap add name tap0 mode tap");
        make();
        let open = |trains| Port::tap(&spec("tap0", trains), true);
        let counters = Counters::new("tap0");
        let sent = |port: &Port| {
            let (mut frame, before) = (packet(2500), counters.read()["tx_frames"]);
            port.send(Segments { frame: &mut frame, segment: 1000, udp: UDP }, &counters);
            counters.read()["tx_frames"] - before
        };
        let port = match open(true) {
            Ok(port) => port,
            Err(error) => return eprintln!("skipped: this process may have no tap: {error}"),
        };
        run("ip link set tap0 up");
        let Interface::Tap(tap) = &port.interface else { panic!("this is a tap") };
        let kernel_takes_trains = tap.takes_trains();
        assert_eq!(sent(&port), if kernel_takes_trains { 1 } else { 3 });
        drop(port);
        let port = open(false).unwrap();
        let Interface::Tap(tap) = &port.interface else { panic!("this is a tap") };
        assert_eq!(tap.takes_trains(), kernel_takes_trains, "those that come");
        assert_eq!(sent(&port), 3);
        run("ip link del tap0");
        make();
        run("ip link set tap0 up");
        assert_eq!(follow(&port), Ok(true));
        assert_eq!(sent(&port), 3);
    });
}

/// Many small frames are taken at once, and not so many trains.
#[test]
fn the_bytes_that_are_taken_at_once_have_a_bound() {
    in_namespace("the_bytes_that_are_taken_at_once_have_a_bound", || {
        // The kernel gives a frame to the socket that was opened first behind all others.
        let last = End::open("far", FAR);
        let (near, far) = (End::open("near", NEAR), End::open("far", FAR));
        let mut room = room(&far.port, usize::MAX);
        let mut take = || {
            let mut came = Vec::new();
            let note = |frame: &[u8], _| came.push(frame.len() - HEADERS);
            let is_full = far.port.receive(&mut room, &far.counters, note).unwrap();
            (came, is_full)
        };
        let send = |payload, count| {
            for _ in 0..count {
                near.send(payload, 1000, UDP);
                last.wait();
            }
        };
        send(60_000, 20);
        send(1000, 30);
        assert_eq!(take(), (vec![60_000; 16], true));
        assert_eq!(take(), (vec![60_000; 2], true));
        assert_eq!(take(), (vec![60_000; 2], true));
        assert_eq!(take(), (vec![1000; 2], true));
        assert_eq!(take(), (vec![1000; 16], true));
        assert_eq!(take(), (vec![1000; 12], false));
    });
}

/// Makes a port follow its interface.
fn follow(port: &Port) -> Result<bool, ErrorKind> {
    port.follow().map_err(|error| error.kind())
}

/// An interface that is removed, as for a new version of its driver, and made again is the uplink once more.
#[test]
fn an_interface_that_is_made_again_is_followed() {
    in_namespace("an_interface_that_is_made_again_is_followed", || {
        let near = End::open("near", NEAR);
        assert_eq!(follow(&near.port), Ok(false));
        run("ip link del near");
        near.send(1000, 0, 0);
        assert_eq!(near.count("tx_lost"), 1);
        assert!(follow(&near.port).is_err());
        assert_eq!(follow(&near.port), follow(&near.port), "it is tried again");
        run("ip link add near type veth peer name far");
        run("ip link set far up");
        run("ip link set near up");
        near.send(1000, 0, 0);
        assert_eq!(near.count("tx_lost"), 2);
        assert_eq!((follow(&near.port), follow(&near.port)), (Ok(true), Ok(false)));
        let far = End::open("far", FAR);
        near.send(1000, 0, 0);
        assert_eq!(far.wait(), (HEADERS + 1000, 0));
        let mut back = packet(500);
        back[..12].copy_from_slice(&[NEAR, FAR].concat());
        // The kernel drops what the end that came up first sends before its own thread has noticed that the other is
        // up.
        let soon = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let comes = (0..600).any(|_| {
            far.port.send(Segments { frame: &mut back, segment: 0, udp: 0 }, &far.counters);
            poll(&mut [PollFd::new(&near.port, PollFlags::IN)], Some(&soon)).unwrap() == 1
        });
        assert!(comes, "no frame comes back");
        assert_eq!(near.wait(), (HEADERS + 500, 0));
    });
}

/// The ports of guests follow the carrier of an interface, also of one that is removed and made again.
#[test]
fn a_carrier_comes_and_goes() {
    in_namespace("a_carrier_comes_and_goes", || {
        let carrier = tap::Carrier::open("near").unwrap();
        // The kernel notes by a thread of its own that there is a carrier.
        let becomes = |is_up: bool| {
            let pause = std::time::Duration::from_millis(10);
            let is_so = (0..6000).any(|_| {
                std::thread::sleep(pause);
                carrier.is_up() == is_up
            });
            assert!(is_so, "it is not {is_up}");
        };
        becomes(true);
        run("ip link set far down");
        becomes(false);
        run("ip link set far up");
        becomes(true);
        run("ip link set near down");
        becomes(false);
        run("ip link del near");
        becomes(false);
        run("ip link add near type veth peer name far");
        becomes(false);
        run("ip link set far up");
        run("ip link set near up");
        becomes(true);
    });
}

#[test]
fn a_tap_that_is_made_again_is_followed() {
    in_namespace("a_tap_that_is_made_again_is_followed", || {
        let make = || run("ip tuntap add name tap0 mode tap");
        make();
        let port = match Port::tap(&spec("tap0", true), true) {
            Ok(port) => port,
            Err(error) => return eprintln!("skipped: this process may have no tap: {error}"),
        };
        let counters = Counters::new("tap0");
        let send = || {
            let mut frame = packet(100);
            port.send(Segments { frame: &mut frame, segment: 0, udp: 0 }, &counters);
            counters.read()["tx_frames"]
        };
        run("ip link set tap0 up");
        assert_eq!((send(), follow(&port)), (1, Ok(false)));
        run("ip link del tap0");
        assert_eq!(send(), 1, "it is lost");
        make();
        assert_eq!((follow(&port), follow(&port)), (Ok(true), Ok(false)));
        run("ip link set tap0 up");
        assert_eq!(send(), 2);
        // What the kernel sends by itself over a new interface comes to the process.
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&port, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "no frame comes");
        let mut came = 0;
        port.receive(&mut room(&port, 1), &counters, |frame, _| came = frame.len()).unwrap();
        assert!(came > 14, "{came} bytes");
    });
}

#[test]
fn what_is_not_sent_and_what_is_lost_is_counted() {
    in_namespace("what_is_not_sent_and_what_is_lost_is_counted", || {
        let (near, far) = (End::open("near", NEAR), End::open("far", FAR));
        near.send(1452, 0, 0);
        assert_eq!(far.wait(), (HEADERS + 1452, 0));
        near.send(1453, 0, 0);
        assert_eq!(near.count("tx_too_long"), 1);
        for _ in 0..30_000 {
            near.send(1000, 0, 0);
        }
        assert_eq!((near.count("tx_frames"), far.count("rx_lost")), (30_001, 0));
        far.port.count_losses(&far.counters);
        let lost = far.count("rx_lost");
        assert!((1..30_000).contains(&lost), "{lost}");
        run("ip link set near down");
        near.send(1000, 0, 0);
        assert_eq!(near.count("tx_lost"), 1);
    });
}
