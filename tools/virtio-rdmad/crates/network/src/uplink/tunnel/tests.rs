// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tunnels between loopback addresses, of which each process has its own.

use std::io::ErrorKind;
use std::net::Ipv4Addr;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::*;
use crate::uplink::namespace::{self, run};

/// The MAC address of a station.
fn mac(station: u8) -> Mac {
    [0x52, 0x54, 0, 0, 0, station]
}

/// Returns the address of an end of a tunnel, which no other test uses.
fn address(test: u8, end: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, high, low, test << 4 | end))
}

/// An end of a tunnel, and what it counts.
struct End {
    tunnel: Tunnel,
    counters: Counters,
}

impl End {
    fn open(vni: &str, local: IpAddr, remotes: &[IpAddr]) -> Self {
        let (vni, remotes) = (vni.parse().unwrap(), remotes.to_vec());
        let spec = TunnelSpec { vni, local, remotes, port: vxlan::PORT };
        Self { tunnel: Tunnel::open(&spec).unwrap(), counters: Counters::new("tunnel") }
    }

    /// Sends a frame. Returns to how many ends it went.
    fn send(&self, frame: &mut [u8]) -> usize {
        self.tunnel.send(Segments { frame, segment: 0, udp: 0 }, true, &self.counters)
    }

    /// Takes what has come; frames one behind the other, and nothing if all of it was dropped.
    fn take(&self) -> Vec<Vec<u8>> {
        let (mut room, mut frames) = (Tunnel::room(), Vec::new());
        loop {
            let deliver = |frame: &[u8], _| frames.push(frame.to_vec());
            match self.tunnel.receive(&mut room, &self.counters, deliver) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return frames,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits for packets and takes what has come.
    fn wait(&self) -> Vec<Vec<u8>> {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.tunnel, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "no packet comes");
        self.take()
    }

    /// Waits for so many frames.
    fn wait_for(&self, count: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.extend(self.wait());
        }
        frames
    }

    fn count(&self, name: &str) -> u64 {
        self.counters.read()[name]
    }
}

/// Returns a frame from one station to another one.
fn frame(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from[..], &[0x88, 0xb5], payload].concat()
}

#[test]
fn what_is_unknown_goes_to_all_and_what_is_known_to_one() {
    let at = [1, 2, 3].map(|end| address(1, end));
    let [a, b, c] = [0, 1, 2].map(|own| {
        let others: Vec<_> = at.into_iter().filter(|other| *other != at[own]).collect();
        End::open("7", at[own], &others)
    });
    let mut first = frame(mac(2), mac(1), b"to whom?");
    assert_eq!(a.send(&mut first), 2);
    assert_eq!((b.wait(), c.wait()), (vec![first.clone()], vec![first]));
    assert_eq!((a.count("tx_frames"), a.count("tx_flooded")), (2, 1));

    // Both know now where the first station is, and all know where the second one is.
    let mut answer = frame(mac(1), mac(2), b"to me");
    b.send(&mut answer);
    assert_eq!(a.wait(), [answer]);
    let mut second = frame(mac(2), mac(1), b"to you");
    assert_eq!(a.send(&mut second), 1);
    assert_eq!(b.wait(), [second]);
    assert_eq!((b.count("tx_flooded"), a.count("tx_flooded")), (0, 1));

    // What is for a group goes to all. It is the first that comes at the third end since then.
    let mut group = frame([0xff; 6], mac(1), b"to all");
    assert_eq!(a.send(&mut group), 2);
    assert_eq!((b.wait(), c.wait()), (vec![group.clone()], vec![group]));
}

#[test]
fn a_train_goes_as_packets() {
    let at = [1, 2].map(|end| address(2, end));
    let (a, b) = (End::open("7", at[0], &at[1..]), End::open("7", at[1], &at[..1]));
    // An IPv6 packet with UDP, whose payload is 63 segments of 1000 bytes, the last one of 500.
    let mut train = frame(mac(2), mac(1), &[]);
    train.truncate(12);
    train.extend([0x86, 0xdd, 0x60, 0x20, 0, 0, 0, 0, 17, 64]);
    train.extend([0xfd; 32]);
    train.extend([0x12, 0xb7, 0x12, 0xb7, 0, 0, 0, 0]);
    train.extend((0..62_500_u32).map(|at| u8::try_from(at / 1000).unwrap()));
    let mut expected = Vec::new();
    let (mut copy, mut split) = (train.clone(), Split::new(&train, 1000));
    while let Some(packet) = split.next(&mut copy) {
        expected.push(copy[packet].to_vec());
    }
    assert_eq!((expected.len(), expected[1].len()), (63, 62 + 1000));
    a.tunnel.send(Segments { frame: &mut train, segment: 1000, udp: 54 }, true, &a.counters);
    assert_eq!(a.count("tx_frames"), 63, "{:?}", a.counters.read());
    assert_eq!(b.wait_for(63), expected);
}

/// Returns a frame with a UDP datagram from a port.
fn udp(source_port: u16) -> Vec<u8> {
    let mut packet = frame(mac(2), mac(1), &[0x60, 0, 0, 0, 0, 12, 17, 64]);
    packet[12..14].copy_from_slice(&[0x86, 0xdd]);
    packet.extend([0xfd; 32]);
    packet.extend(source_port.to_be_bytes());
    packet.extend([0x12, 0xb7, 0, 12, 0, 0, 1, 2, 3, 4]);
    packet
}

#[test]
fn each_flow_has_one_port_and_all_have_many() {
    let at = [1, 2].map(|end| address(3, end));
    let a = End::open("7", at[0], &at[1..]);
    let b = UdpSocket::bind((at[1], vxlan::PORT)).unwrap();
    let ports = || {
        let port_of = |flow: u16| {
            let mut packet = udp(0xc000 + flow);
            assert_eq!(a.send(&mut packet), 1);
            let mut room = [0; 200];
            let (len, from) = b.recv_from(&mut room).unwrap();
            assert_eq!((&room[8..len], from.ip()), (&packet[..], at[0]));
            from.port()
        };
        (0..400).map(port_of).collect::<Vec<_>>()
    };
    let first = ports();
    let different: std::collections::BTreeSet<_> = first.iter().copied().collect();
    assert_eq!(different.len(), SENDERS, "{different:?}");
    assert!(different.iter().all(|port| *port >= FIRST_PORT), "{different:?}");
    assert_eq!(ports(), first);
}

/// Another process may have the first ports.
#[test]
fn ports_that_others_have_are_left_to_them() {
    let at = [1, 2].map(|end| address(9, end));
    let other = UdpSocket::bind((at[0], FIRST_PORT + 3)).unwrap();
    let (a, b) = (End::open("7", at[0], &at[1..]), End::open("7", at[1], &at[..1]));
    for flow in 0..400 {
        let mut packet = udp(flow);
        a.send(&mut packet);
        assert_eq!(b.wait(), [packet]);
    }
    // What comes to a port that frames are sent from is for nobody.
    let to = SocketAddr::new(at[0], FIRST_PORT);
    other.send_to(&[0; 100], to).unwrap();
    b.send(&mut udp(1));
    assert_eq!(a.wait().len(), 1);
    assert_eq!(a.count("rx_malformed"), 0);
}

#[test]
fn what_does_not_belong_to_the_network_is_dropped_and_counted() {
    let at = [1, 2, 3].map(|end| address(4, end));
    let (a, b) = (End::open("7", at[0], &at[1..2]), End::open("8", at[1], &at[..1]));
    let stranger = UdpSocket::bind((at[2], 0)).unwrap();
    let friend = UdpSocket::bind((at[1], 0)).unwrap();
    let to_a = SocketAddr::new(at[0], vxlan::PORT);
    let mut good = vxlan::header("7".parse().unwrap()).to_vec();
    good.extend(frame(mac(2), mac(1), b"good"));

    stranger.send_to(&good, to_a).unwrap();
    assert!(a.wait().is_empty());
    b.send(&mut frame(mac(2), mac(1), b"of network 8"));
    assert!(a.wait().is_empty());
    friend.send_to(&good[..20], to_a).unwrap();
    assert!(a.wait().is_empty());
    friend.send_to(&[], to_a).unwrap();
    assert!(a.wait().is_empty());
    let mut from_group = good.clone();
    from_group[8 + 6] |= 1;
    friend.send_to(&from_group, to_a).unwrap();
    assert!(a.wait().is_empty());
    assert_eq!((a.count("rx_stranger"), a.count("rx_other_vni")), (1, 1));
    assert_eq!((a.count("rx_malformed"), a.count("rx_group_source")), (1, 1));

    // The port that it is sent from does not matter (RFC 7348, section 5).
    friend.send_to(&good, to_a).unwrap();
    assert_eq!(a.wait(), [&good[8..]]);
}

#[test]
fn what_is_too_long_is_dropped_and_counted() {
    let at = [1, 2].map(|end| address(5, end));
    let (a, b) = (End::open("7", at[0], &at[1..]), End::open("7", at[1], &at[..1]));
    a.tunnel.remotes[0].most.store(1450, Ordering::Relaxed);
    a.send(&mut frame(mac(2), mac(1), &[0; 1429]));
    assert_eq!((a.count("tx_too_long"), a.count("tx_frames")), (1, 0));
    a.send(&mut frame(mac(2), mac(1), &[0; 1428]));
    assert_eq!(a.count("tx_frames"), 1);
    assert_eq!(b.wait()[0].len(), 1442);
}

/// A route that carries less than before does not lose packets without a trace, and one that carries more is used.
#[test]
fn the_length_that_a_route_carries_is_followed() {
    namespace::in_namespace(
        "uplink::tunnel::tests::the_length_that_a_route_carries_is_followed",
        || {
            run("ip link add near type veth peer name far");
            run("ip addr add 192.0.2.1/24 dev near");
            run("ip addr add fd00::1/64 dev near nodad");
            run("ip link set far up");
            run("ip link set near up");
            for (local, remote, headers) in
                [("192.0.2.1", "192.0.2.2", 28), ("fd00::1", "fd00::2", 48)]
            {
                run("ip link set near mtu 1500");
                let [local, remote] = [local, remote].map(|text| text.parse().unwrap());
                let a = End::open("7", local, &[remote]);
                let longest = |mtu: usize| mtu - headers - vxlan::HEADER;
                let send =
                    |mtu: usize| a.send(&mut frame(mac(2), mac(1), &vec![0; longest(mtu) - 14]));
                let counts = || ["tx_frames", "tx_too_long", "tx_lost"].map(|name| a.count(name));
                send(1500);
                assert_eq!(counts(), [1, 0, 0]);
                send(1501);
                assert_eq!(counts(), [1, 1, 0]);
                run("ip link set near mtu 1400");
                send(1500);
                assert_eq!(counts(), [1, 2, 0], "the kernel says so");
                let mut train = udp(1);
                train.resize(62 + 3 * 1360, 7);
                a.tunnel.send(
                    Segments { frame: &mut train, segment: 1360, udp: 54 },
                    true,
                    &a.counters,
                );
                assert_eq!((counts()[0], counts()[2]), (1, 0));
                assert!(a.tunnel.remotes[0].takes_trains.load(Ordering::Relaxed), "it is too long");
                a.tunnel.look_after("default", "tunnel");
                let before = counts()[1];
                send(1401);
                send(1400);
                assert_eq!(counts(), [2, before + 1, 0]);
                run("ip link set near mtu 9000");
                a.tunnel.look_after("default", "tunnel");
                send(9000);
                send(9001);
                assert_eq!(counts(), [3, before + 2, 0]);
            }
        },
    );
}

#[test]
fn the_packet_around_has_the_class_of_a_device_and_the_marks_of_all() {
    let mut packet = udp(1);
    for (class, of_interface) in [(0xb8, 0), (0xb9, 1), (0x6a, 2), (0xff, 3), (0, 0)] {
        packet[14..16].copy_from_slice(&[0x60 | class >> 4, class << 4]);
        assert_eq!([true, false].map(|of| outer_class(&packet, of)), [class, of_interface]);
    }
    assert_eq!(outer_class(&frame(mac(2), mac(1), &[0xff; 60]), true), 0);
}

#[test]
fn a_mark_of_congestion_goes_through() {
    let at = [1, 2].map(|end| address(6, end));
    let (a, b) = (End::open("7", at[0], &at[1..]), End::open("7", at[1], &at[..1]));
    for (inner, outer, expected) in
        [(2, Ecn::Ect0, 2), (2, Ecn::Ce, 3), (3, Ecn::Ce, 3), (0, Ecn::NotEct, 0)]
    {
        let mut marked = frame(mac(2), mac(1), &[0x60, inner << 4]);
        marked[12..14].copy_from_slice(&[0x86, 0xdd]);
        marked.extend([0; 40]);
        let mut datagram = vxlan::header(a.tunnel.vni).to_vec();
        datagram.extend(&marked);
        let remote = &a.tunnel.remotes[0];
        let (size, bytes) = (datagram.len(), &datagram[..]);
        let outgoing = Outgoing { flow: 0, class: outer.bits(), size, bytes };
        a.tunnel.send_to(remote, outgoing, &a.counters);
        let frames = b.wait();
        assert_eq!(frames[0][15] >> 4, expected, "{inner} in {outer:?}");
    }
    // The sender gives the mark of the frame to the packet around it.
    let mut marked = frame(mac(2), mac(1), &[0x60, 3 << 4]);
    marked[12..14].copy_from_slice(&[0x86, 0xdd]);
    marked.extend([0; 40]);
    a.send(&mut marked);
    let (mut room, mut metas) = (vec![0; BUFFER], [RecvMeta::default()]);
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    poll(&mut [PollFd::new(&b.tunnel, PollFlags::IN)], Some(&limit)).unwrap();
    let mut buffers = [IoSliceMut::new(&mut room)];
    b.tunnel.state.recv((&b.tunnel.socket).into(), &mut buffers, &mut metas).unwrap();
    assert_eq!(metas[0].ecn, Some(EcnCodepoint::Ce));
}
