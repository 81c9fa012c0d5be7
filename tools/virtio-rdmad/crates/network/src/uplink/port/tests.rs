// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packet sockets at both ends of a pair of veth, and taps.

use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::sockopt;

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
        let (spec, stations) = (spec(name, trains), [station]);
        let port = Port::sockets(&spec, name, Some(&stations), NonZeroU8::MIN).unwrap();
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
        let ready =
            poll(&mut [PollFd::from_borrowed_fd(self.port.fd(0), PollFlags::IN)], Some(&limit))
                .unwrap();
        assert_eq!(ready, 1, "no frame comes");
        let mut came = None;
        let deliver = |frame: &[u8], segment| came = Some((frame.len(), segment));
        self.port.receive(0, &mut room(&self.port, 1), &self.counters, deliver).unwrap();
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
        let packets = [(HEADERS + 1000, 0), (HEADERS + 1000, 0), (HEADERS + 500, 0)];
        let came = || (0..3).map(|_| far.wait()).collect::<Vec<_>>();
        assert_eq!(came(), packets);
        assert_eq!((near.count("tx_frames"), near.count("tx_lost")), (3, 0));
        let (spec, lanes) = (spec("near", false), NonZeroU8::new(3).unwrap());
        let lanes = Port::sockets(&spec, "near", Some(&[NEAR]), lanes).unwrap();
        for sender in 0..3 {
            let mut frame = packet(2500);
            frame[11] = sender;
            let segments = Segments { frame: &mut frame, segment: 1000, udp: UDP };
            lanes.send(segments, &near.counters);
            assert_eq!(came(), packets, "lane {sender}");
        }
    });
}

/// A tap is given single packets then, also when it was made again, and trains that come stay whole.
#[test]
fn a_tap_without_trains_is_given_packets() {
    in_namespace("a_tap_without_trains_is_given_packets", || {
        let make = || run("ip tuntap add name tap0 mode tap");
        make();
        let open = |trains| Port::tap(&spec("tap0", trains), true, NonZeroU8::MIN);
        let counters = Counters::new("tap0");
        let sent = |port: &Port| {
            let (mut frame, before) = (packet(2500), counters.read()["tx_frames"]);
            port.send(Segments { frame: &mut frame, segment: 1000, udp: UDP }, &counters);
            counters.read()["tx_frames"] - before
        };
        let port = open(true).unwrap();
        run("ip link set tap0 up");
        let Lane::Tap(tap) = &port.lanes[0] else { panic!("this is a tap") };
        let kernel_takes_trains = tap.takes_trains();
        assert_eq!(sent(&port), if kernel_takes_trains { 1 } else { 3 });
        drop(port);
        let port = open(false).unwrap();
        let Lane::Tap(tap) = &port.lanes[0] else { panic!("this is a tap") };
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
            let is_full = far.port.receive(0, &mut room, &far.counters, note).unwrap();
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
            poll(&mut [PollFd::from_borrowed_fd(near.port.fd(0), PollFlags::IN)], Some(&soon))
                .unwrap()
                == 1
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
            let pause = Duration::from_millis(10);
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
        let port = Port::tap(&spec("tap0", true), true, NonZeroU8::MIN).unwrap();
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
        let ready =
            poll(&mut [PollFd::from_borrowed_fd(port.fd(0), PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "no frame comes");
        let mut came = 0;
        port.receive(0, &mut room(&port, 1), &counters, |frame, _| came = frame.len()).unwrap();
        assert!(came > 14, "{came} bytes");
    });
}

/// Takes all frames that have come over a lane, and returns the bytes at these places of each.
fn take<const COUNT: usize>(port: &Port, lane: usize, places: [usize; COUNT]) -> Vec<[u8; COUNT]> {
    let (mut room, mut came) = (room(port, usize::MAX), Vec::new());
    let counters = Counters::new("taken");
    let mut note =
        |frame: &[u8], _| came.push(places.map(|at| frame.get(at).copied().unwrap_or_default()));
    while port.receive(lane, &mut room, &counters, &mut note).is_ok() {}
    came
}

/// What comes for a station comes over its lane, in its order, also over an interface that was made again.
#[test]
fn each_station_has_a_lane() {
    in_namespace("each_station_has_a_lane", || {
        let stations: Vec<Mac> = (1..=5).map(|last| [0x52, 0x54, 0, 0, 1, last]).collect();
        let lanes = NonZeroU8::new(3).unwrap();
        // The kernel gives a frame to the socket that was opened first behind all others.
        let spec = spec("far", true);
        let last = Port::sockets(&spec, "far", None, NonZeroU8::MIN).unwrap();
        let far = Port::sockets(&spec, "far", Some(&stations), lanes).unwrap();
        // Each has the room for packets that wait that one socket would have.
        let only = PacketSocket::open("near", Share::ALL, Some(&[])).unwrap();
        buffers::enlarge([&only], Direction::In, "near");
        let room_of = |socket| sockopt::socket_recv_buffer_size(socket).unwrap();
        assert!((0..3).all(|lane| room_of(far.fd(lane)) == room_of(only.as_fd())));
        let mut near = End::open("near", NEAR);
        for round in 0..2 {
            for number in 0..20 {
                for to in stations.iter().chain([&[0xff; 6]]) {
                    let mut frame = packet(100);
                    frame[..6].copy_from_slice(to);
                    frame[HEADERS] = number;
                    let segments = Segments { frame: &mut frame, segment: 0, udp: 0 };
                    near.port.send(segments, &near.counters);
                }
            }
            let mut came = 0;
            while came < 120 {
                came += take(&last, 0, []).len();
            }
            for lane in 0..3 {
                let came = take(&far, lane, [5, HEADERS]);
                let own = |to: &Mac| far.lane_of(*to) == lane;
                for to in stations.iter().chain([&[0xff; 6]]).filter(|to| own(to)) {
                    let numbers = came.iter().filter(|it| it[0] == to[5]).map(|it| it[1]);
                    assert!(numbers.eq(0..20), "round {round}, lane {lane}, {to:x?}");
                }
                let others = came.iter().filter(|it| !own(&[0, 0, 0, 0, 0, it[0]]));
                assert_eq!(others.count(), 0, "round {round}, lane {lane}");
            }
            if round == 0 {
                run("ip link del far");
                assert!(follow(&far).is_err());
                run("ip link add near type veth peer name far");
                run("ip link set far up");
                run("ip link set near up");
                // The one that is bound first is behind all others again.
                assert_eq!((follow(&last), follow(&far)), (Ok(true), Ok(true)));
                assert_eq!(follow(&far), Ok(false));
                near = End::open("near", NEAR);
            }
        }
    });
}

/// A tap that was made for it has several queues. The packets of a flow come over one of them, in their order. A tap
/// that is made again without them goes on with one.
#[test]
fn a_tap_has_queues_if_it_was_made_for_it() {
    in_namespace("a_tap_has_queues_if_it_was_made_for_it", || {
        let make = |kind: &str| {
            run(&format!("ip tuntap add name tap0 mode tap{kind}"));
            run("ip link set tap0 up");
        };
        let open = |lanes| Port::tap(&spec("tap0", true), true, NonZeroU8::new(lanes).unwrap());
        make("");
        assert_eq!(open(4).unwrap().lanes(), 1);
        run("ip link del tap0");
        make(" multi_queue");
        assert_eq!(open(1).unwrap().lanes(), 1);
        let port = open(4).unwrap();
        assert_eq!((port.lanes(), port.attached()), (4, 4));
        for lanes in [1, 4] {
            let error = open(lanes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{lanes} queues more: {error}");
        }
        // What the kernel sends over the tap comes to the port, as soon as the kernel's own thread has noticed that
        // there is one.
        let kernel = End::open("tap0", NEAR);
        let send = |flow, number| {
            let mut frame = packet(100);
            (frame[usize::from(UDP) + 1], frame[HEADERS]) = (flow, number);
            kernel.port.send(Segments { frame: &mut frame, segment: 0, udp: 0 }, &kernel.counters);
        };
        let comes = |flow| {
            send(flow, 0);
            let mut came = (0..4).flat_map(|lane| take(&port, lane, [usize::from(UDP) + 1]));
            came.any(|[other]| other == flow)
        };
        let soon = || std::thread::sleep(Duration::from_millis(10));
        assert!(
            (0..6000).any(|_| comes(0xff) || {
                soon();
                false
            }),
            "no frame comes"
        );
        for number in 0..20 {
            (0..16).for_each(|flow| send(flow, number));
        }
        let mut lanes_of_flows = vec![Vec::new(); 16];
        for lane in 0..4 {
            // The kernel sends packets of its own as well.
            let came = take(&port, lane, [0, usize::from(UDP) + 1, HEADERS]);
            let of_flow = |flow: u8| came.iter().filter(move |it| it[..2] == [FAR[0], flow]);
            for flow in 0..16 {
                let numbers: Vec<_> = of_flow(flow).map(|it| it[2]).collect();
                if !numbers.is_empty() {
                    assert!(numbers.iter().copied().eq(0..20), "flow {flow}: {numbers:?}");
                    lanes_of_flows[usize::from(flow)].push(lane);
                }
            }
        }
        assert!(lanes_of_flows.iter().all(|lanes| lanes.len() == 1), "{lanes_of_flows:?}");
        assert!(lanes_of_flows.iter().any(|lanes| *lanes != lanes_of_flows[0]));
        run("ip link del tap0");
        make("");
        assert_eq!((follow(&port), follow(&port)), (Ok(true), Ok(false)));
        let counters = Counters::new("tap0");
        for sender in 0..8 {
            let mut frame = packet(100);
            frame[11] = sender;
            port.send(Segments { frame: &mut frame, segment: 0, udp: 0 }, &counters);
        }
        assert_eq!((counters.read()["tx_frames"], port.attached()), (8, 1));
        run("ip link del tap0");
        make(" multi_queue");
        assert_eq!((follow(&port), port.attached()), (Ok(true), 4));
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
