// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packet sockets at both ends of a pair of veth, in a network namespace that each test has for itself.

use std::fmt::Display;
use std::io::{Error, ErrorKind};
use std::num::NonZeroU8;
use std::process::Command;
use std::time::Instant;

use roce::Split;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::thread::{unshare_unsafe, UnshareFlags};
use tap::{PacketSocket, Share, TrainShape};

const NEAR: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const FAR: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
const MTU: &str = "1500";
/// The bytes of a segment, and of the headers of a packet of IPv4 without the tag of a VLAN.
const SEGMENT: u16 = 1000;
const HEADERS: usize = 42;

/// Runs a program of the system.
fn run(words: &str) {
    let mut words = words.split_whitespace();
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success());
}

/// Runs `test` in a network namespace that has a pair of veth, `near` and `far`. Does not run it if this process may
/// not make one.
fn in_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = || {
            // SAFETY: The thread has another network namespace then. It shares all else with the other
            // threads as before, above all its descriptors.
            if unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.is_err() {
                return eprintln!("skipped: this process may not make a network namespace");
            }
            run("ip link add near type veth peer name far");
            // The one that comes up last can send at once. The other one drops what it sends until the
            // kernel's worker has seen that it has a carrier now.
            for name in ["far", "near"] {
                run(&format!("ip link set {name} mtu {MTU} up"));
            }
            test();
        };
        scope.spawn(thread).join().unwrap();
    });
}

/// Opens a socket that has room for all frames of a test.
fn open(name: &str, station: [u8; 6]) -> PacketSocket {
    const ROOM: usize = 4 << 20;
    let socket = PacketSocket::open(name, Share::ALL, Some(&[station])).unwrap();
    if sockopt::set_socket_recv_buffer_size_force(&socket, ROOM).is_err() {
        sockopt::set_socket_recv_buffer_size(&socket, ROOM).unwrap();
    }
    socket
}

/// Returns both ends. The one sends as the station `NEAR`, the other as `FAR`.
fn ends() -> (PacketSocket, PacketSocket) {
    (open("near", NEAR), open("far", FAR))
}

/// A frame that came, and the bytes of a segment.
type Came = (Vec<u8>, u16);

/// Takes frames by one call.
fn receive(socket: &PacketSocket, room: &mut [u8], most: usize) -> Result<Vec<Came>, Error> {
    let mut came = Vec::new();
    let is_full =
        socket.receive(room, most, |frame, segment| came.push((frame.to_vec(), segment)))?;
    assert_eq!(is_full, came.len() == most.min(PacketSocket::BATCH));
    Ok(came)
}

/// Waits for a frame.
fn wait(socket: &PacketSocket) -> Came {
    let mut room = PacketSocket::room();
    loop {
        match receive(socket, &mut room, 1) {
            Ok(mut came) => {
                assert_eq!(came.len(), 1);
                return came.remove(0);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        wait_for_input(socket);
    }
}

/// Returns whether nothing has come.
fn is_empty(socket: &PacketSocket) -> bool {
    let received = receive(socket, &mut [0; 100], 1);
    matches!(received, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn wait_for_input(socket: &PacketSocket) {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "no frame comes");
}

/// Returns a packet to UDP port 4791, with the tag of a VLAN or without, and where its UDP header is.
fn packet(to: [u8; 6], is_ipv6: bool, tag: Option<[u8; 2]>, payload: usize) -> (Vec<u8>, u16) {
    let mut frame = [&to[..], &NEAR].concat();
    if let Some(tag) = tag {
        frame.extend([0x81, 0x00, tag[0], tag[1]]);
    }
    let udp_len = u16::try_from(8 + payload).unwrap();
    if is_ipv6 {
        let [high, low] = udp_len.to_be_bytes();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, high, low, 17, 64]);
        frame.extend([0xfd; 32]);
    } else {
        let [high, low] = (20 + udp_len).to_be_bytes();
        let ip = [0x45, 0, high, low, 0, 9, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        frame.extend([0x08, 0x00]);
        let at = frame.len();
        frame.extend(ip);
        let sum = !sum(&frame[at..]);
        frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
    }
    let udp = u16::try_from(frame.len()).unwrap();
    let [high, low] = udp_len.to_be_bytes();
    frame.extend([0xc0, 1, 0x12, 0xb7, high, low, 0, 0]);
    frame.extend((0..payload).map(|at| u8::try_from(at / usize::from(SEGMENT)).unwrap()));
    (frame, udp)
}

/// Returns the sum of the words, as checksums have it (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    words.fold(0_u16, |sum, word| {
        let (sum, carry) = sum.overflowing_add(word);
        sum + u16::from(carry)
    })
}

/// The places of the checksums of IPv4 and UDP, which the kernel writes and [`Split`] does not, become 0.
fn without_checksums(mut frame: Vec<u8>) -> Vec<u8> {
    let ip = if frame[12] == 0x81 { 18 } else { 14 };
    let udp = if frame[ip] >> 4 == 4 {
        frame[ip + 10..ip + 12].fill(0);
        ip + 20
    } else {
        ip + 40
    };
    frame[udp + 6..udp + 8].fill(0);
    frame
}

#[test]
fn packets_come_with_the_tags_of_their_vlans() {
    in_namespace(|| {
        let (near, far) = ends();
        for is_ipv6 in [false, true] {
            // Priority 3 in VLAN 5, and a priority in no VLAN.
            for tag in [None, Some([0x60, 5]), Some([0x60, 0])] {
                for to in [FAR, [0xff; 6], [0x33, 0x33, 0, 0, 0, 1]] {
                    let (frame, _) = packet(to, is_ipv6, tag, 100);
                    near.send(&frame, None).unwrap();
                    assert_eq!(wait(&far), (frame, 0));
                }
            }
        }
        assert!(is_empty(&near), "what the socket itself has sent");
    });
}

#[test]
fn what_is_for_others_does_not_come() {
    in_namespace(|| {
        let (near, far) = ends();
        let everything = PacketSocket::open("far", Share::ALL, None).unwrap();
        let (other, _) = packet([0x52, 0x54, 0, 0, 0, 3], false, None, 100);
        near.send(&other, None).unwrap();
        let mut another_port = packet(FAR, false, None, 100).0;
        another_port[37] += 1;
        near.send(&another_port, None).unwrap();
        let (last, _) = packet(FAR, false, None, 99);
        near.send(&last, None).unwrap();
        assert_eq!(wait(&far), (last.clone(), 0));
        assert_eq!([wait(&everything), wait(&everything)], [(other, 0), (last, 0)]);
        assert!(is_empty(&far) && is_empty(&everything));
    });
}

/// Stations come and go while the socket is open.
#[test]
fn stations_are_replaced() {
    in_namespace(|| {
        let (near, far) = ends();
        let other = [0x52, 0x54, 0, 0, 0, 3];
        let packets = [FAR, other].map(|to| packet(to, false, None, 100).0);
        let (last, _) = packet([0xff; 6], false, None, 99);
        for (stations, come) in [
            (Some(&[FAR, other][..]), [true, true]),
            (Some(&[other, other]), [false, true]),
            (None, [true, true]),
            (Some(&[]), [false, false]),
            (Some(&[FAR]), [true, false]),
        ] {
            far.set_stations(stations).unwrap();
            for packet in packets.iter().chain([&last]) {
                near.send(packet, None).unwrap();
            }
            for (packet, _) in packets.iter().zip(come).filter(|(_, comes)| *comes) {
                assert_eq!(wait(&far), (packet.clone(), 0), "{stations:x?}");
            }
            assert_eq!(wait(&far), (last.clone(), 0), "{stations:x?}");
        }
    });
}

/// Sockets that have the shares of one interface each get what is in theirs, also after stations were replaced.
#[test]
fn shares_have_their_own_frames() {
    in_namespace(|| {
        let near = open("near", NEAR);
        let stations = |low: u8| [low, low + 1, low + 2].map(|last| [0x52, 0x54, 0, 0, 0, last]);
        let shares: Vec<_> = Share::divide(NonZeroU8::new(2).unwrap()).collect();
        let sockets: Vec<_> = shares
            .iter()
            .map(|share| PacketSocket::open("far", *share, Some(&stations(2))).unwrap())
            .collect();
        for low in [2, 3] {
            for socket in &sockets {
                socket.set_stations(Some(&stations(low))).unwrap();
            }
            for to in (1..8).map(|last| [0x52, 0x54, 0, 0, 0, last]).chain([[0xff; 6]]) {
                near.send(&packet(to, false, None, 100).0, None).unwrap();
            }
            for (share, socket) in shares.iter().zip(&sockets) {
                let own =
                    stations(low).into_iter().chain([[0xff; 6]]).filter(|mac| share.has(*mac));
                for to in own {
                    assert_eq!(wait(socket), (packet(to, false, None, 100).0, 0), "{share:?}");
                }
                assert!(is_empty(socket), "{share:?}");
            }
        }
    });
}

/// Returns a train of 60 packets, the last of which is shorter, and what is to be sent with it.
fn train(is_ipv6: bool, tag: Option<[u8; 2]>) -> (Vec<u8>, TrainShape) {
    let (frame, udp) = packet(FAR, is_ipv6, tag, 59 * usize::from(SEGMENT) + 500);
    (frame, TrainShape { segment: SEGMENT, udp })
}

#[test]
fn trains_come_whole() {
    in_namespace(|| {
        let (near, far) = ends();
        for is_ipv6 in [false, true] {
            for tag in [None, Some([0x60, 5])] {
                let (frame, description) = train(is_ipv6, tag);
                near.send(&frame, Some(description)).unwrap();
                let (came, segment) = wait(&far);
                assert_eq!(segment, SEGMENT);
                assert!(came == frame, "IPv6: {is_ipv6}, tag: {tag:?}");
            }
        }
        assert!(is_empty(&far));
    });
}

/// One call takes several frames, of all kinds, in their order, and as many as there is room for.
#[test]
fn several_frames_come_at_once() {
    in_namespace(|| {
        // The kernel gives a frame to the socket that was opened first behind all others.
        let observer = open("far", FAR);
        let (near, far) = ends();
        let mut sent = Vec::new();
        for (number, tag) in [None, Some([0x60, 5])].into_iter().cycle().take(40).enumerate() {
            if number % 7 == 3 {
                let (frame, shape) = train(number % 2 == 0, tag);
                near.send(&frame, Some(shape)).unwrap();
                sent.push((frame, SEGMENT));
            } else {
                let (frame, _) = packet(FAR, number % 3 == 0, tag, 100 + number);
                near.send(&frame, None).unwrap();
                sent.push((frame, 0));
            }
        }
        for _ in &sent {
            wait(&observer);
        }
        let (mut left, mut room) = (&sent[..], PacketSocket::room());
        for count in [1, 5, PacketSocket::BATCH, PacketSocket::BATCH + 7] {
            let came = receive(&far, &mut room, count).unwrap();
            let (expected, rest) = left.split_at(count.min(PacketSocket::BATCH));
            assert_eq!(came.len(), expected.len());
            assert!(came == expected, "{count} frames at most");
            left = rest;
        }
        let came = receive(&far, &mut room, PacketSocket::BATCH).unwrap();
        assert!(came == left && came.len() < PacketSocket::BATCH);
        assert!(is_empty(&far));
    });
}

/// That the interface goes down ends one call, and no frame is lost that came before.
#[test]
fn an_error_costs_no_frame() {
    in_namespace(|| {
        let observer = open("far", FAR);
        let (near, far) = ends();
        let frames: Vec<_> = (0..3).map(|at| (packet(FAR, false, None, 100 + at).0, 0)).collect();
        for (frame, _) in &frames {
            near.send(frame, None).unwrap();
            wait(&observer);
        }
        run("ip link set far down");
        let mut room = PacketSocket::room();
        assert_eq!(receive(&far, &mut room, 1).unwrap_err().kind(), ErrorKind::NetworkDown);
        assert_eq!(receive(&far, &mut room, 4).unwrap(), frames);
        assert!(is_empty(&far));
    });
}

#[test]
fn the_kernel_takes_trains_apart_as_we_do() {
    in_namespace(|| {
        run("ethtool -K near tx-udp-segmentation off");
        let (near, far) = ends();
        for is_ipv6 in [false, true] {
            for tag in [None, Some([0x60, 5])] {
                let (mut frame, description) = train(is_ipv6, tag);
                near.send(&frame, Some(description)).unwrap();
                let mut split = Split::new(&frame, SEGMENT);
                while let Some(packet) = split.next(&mut frame) {
                    let (came, segment) = wait(&far);
                    assert_eq!(segment, 0);
                    let expected = without_checksums(frame[packet].to_vec());
                    assert!(without_checksums(came) == expected, "IPv6: {is_ipv6}, tag: {tag:?}");
                }
            }
        }
        assert!(is_empty(&far));
    });
}

#[test]
fn what_is_lost_is_counted() {
    in_namespace(|| {
        let (near, far) = ends();
        assert_eq!(far.take_losses().unwrap(), 0);
        let (frame, _) = packet(FAR, false, None, 1400);
        let sent = 30_000;
        for _ in 0..sent {
            near.send(&frame, None).unwrap();
        }
        let mut came = 0;
        while !is_empty(&far) {
            came += 1;
        }
        // The kernel may have lost some on their way to the socket as well.
        let lost = far.take_losses().unwrap();
        assert!(came > 0 && lost > 0 && came + lost <= sent, "{came} came, {lost} were lost");
        assert_eq!(far.take_losses().unwrap(), 0);
    });
}

#[test]
fn a_frame_that_is_too_long_is_refused() {
    in_namespace(|| {
        let (near, far) = ends();
        let (longest, _) = packet(FAR, false, None, 1500 + 14 - HEADERS);
        near.send(&longest, None).unwrap();
        assert_eq!(wait(&far), (longest, 0));
        let (longer, _) = packet(FAR, false, None, 1500 + 14 - HEADERS + 1);
        let error = near.send(&longer, None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::MSGSIZE.raw_os_error()));
        // A short room gets the beginning of a frame.
        let (frame, _) = packet(FAR, false, Some([0, 5]), 100);
        near.send(&frame, None).unwrap();
        wait_for_input(&far);
        assert_eq!(receive(&far, &mut [0; 60], 1).unwrap(), [(frame[..60].to_vec(), 0)]);
    });
}

#[test]
fn an_interface_that_is_down_is_an_error_until_it_is_up() {
    in_namespace(|| {
        let (near, far) = ends();
        let (frame, _) = packet(FAR, false, None, 100);
        run("ip link set near down");
        assert_eq!(receive(&near, &mut [0; 100], 1).unwrap_err().kind(), ErrorKind::NetworkDown);
        assert_eq!(near.send(&frame, None).unwrap_err().kind(), ErrorKind::NetworkDown);
        assert!(is_empty(&near));
        run("ip link set near up");
        near.send(&frame, None).unwrap();
        assert_eq!(wait(&far), (frame, 0));
    });
}

#[test]
fn not_every_interface_will_do() {
    in_namespace(|| {
        let kind = |name: &str| PacketSocket::open(name, Share::ALL, None).unwrap_err().kind();
        assert_eq!(kind("lo"), ErrorKind::InvalidInput);
        for name in ["", "none", "a name that is too long"] {
            let error = PacketSocket::open(name, Share::ALL, None).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::NODEV.raw_os_error()), "{name:?}");
        }
    });
}

/// Rounds of a measurement, and frames of each.
const ROUNDS: usize = 41;
const FRAMES: usize = 1000;

/// Returns the median, in nanoseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Takes all frames that wait, so many at once, and copies them as the inbox of a guest does. Returns the nanoseconds
/// that one took.
fn time_of_receiving(
    socket: &PacketSocket,
    room: &mut [u8],
    most: usize,
    copies: &mut Vec<u8>,
) -> f64 {
    let (start, mut count) = (Instant::now(), 0_u32);
    let mut copy = |frame: &[u8], _| {
        copies.extend_from_slice(frame);
        count += 1;
    };
    while socket.receive(room, most, &mut copy).is_ok() {}
    copies.clear();
    start.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}

/// Prints how long the socket takes for a frame, by the number of frames that are taken at once, and how long for
/// finding that there is none.
#[test]
#[ignore = "it measures"]
fn speed_of_receiving() {
    let counts = [1, 2, 4, 8, PacketSocket::BATCH];
    in_namespace(|| {
        let (near, far) = ends();
        let (train, shape) = train(false, None);
        let packets = [58, 1058].map(|payload| packet(FAR, false, None, payload).0);
        let (mut room, mut copies) = (PacketSocket::room(), Vec::new());
        let mut measure = |what: &str, fill: &dyn Fn()| {
            let mut times = counts.map(|_| Vec::new());
            for _ in 0..ROUNDS {
                for (most, times) in counts.iter().zip(&mut times) {
                    fill();
                    times.push(time_of_receiving(&far, &mut room, *most, &mut copies));
                }
            }
            print(what, &counts, times);
        };
        for frame in packets {
            let fill = || (0..FRAMES).for_each(|_| near.send(&frame, None).unwrap());
            measure(&format!("a packet of {} bytes", frame.len()), &fill);
        }
        let fill = || (0..30).for_each(|_| near.send(&train, Some(shape)).unwrap());
        measure("a train of 60,000 bytes", &fill);
        let empty = counts.map(|most| {
            let time = |_| {
                let start = Instant::now();
                let mut none = || assert!(far.receive(&mut room, most, |_, _| ()).is_err());
                (0..FRAMES).for_each(|_| none());
                start.elapsed().as_secs_f64() * 1e9 / 1000.0
            };
            (0..ROUNDS).map(time).collect()
        });
        print("nothing", &counts, empty);
    });
}

/// Prints how long it takes to send a frame over the pair, which is when the kernel runs the programs of the sockets at
/// the other end, by the number of shares that these have. The frame is for one of them, or for none.
#[test]
#[ignore = "it measures"]
fn speed_of_shares() {
    let counts = [1, 2, 4, 8];
    in_namespace(|| {
        let near = open("near", NEAR);
        for (what, to) in [("to a station", FAR), ("to another", [0x52, 0x54, 0, 0, 0, 3])] {
            let frame = packet(to, false, None, 1058).0;
            let mut times = counts.map(|_| Vec::new());
            for _ in 0..ROUNDS {
                for (of, times) in counts.iter().zip(&mut times) {
                    let shares = Share::divide(NonZeroU8::new(*of).unwrap());
                    let open = |share| PacketSocket::open("far", share, Some(&[FAR])).unwrap();
                    let _sockets: Vec<_> = shares.map(open).collect();
                    let start = Instant::now();
                    (0..FRAMES).for_each(|_| near.send(&frame, None).unwrap());
                    times.push(start.elapsed().as_secs_f64() * 1e9 / 1000.0);
                }
            }
            print(what, &counts, times);
        }
    });
}

/// Prints the medians of nanoseconds, and their ratios to those of the first count.
fn print<C: Display, const COUNT: usize>(
    what: &str,
    counts: &[C; COUNT],
    times: [Vec<f64>; COUNT],
) {
    let times = times.map(median);
    for (count, time) in counts.iter().zip(times) {
        println!("{what}, {count}: {time:.0} ns, {:.2}", time / times[0]);
    }
}
