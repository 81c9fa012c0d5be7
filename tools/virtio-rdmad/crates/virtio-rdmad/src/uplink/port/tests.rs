// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packet sockets at both ends of a pair of veth. Each test runs once more, in a process that has a
//! network namespace of its own.

use std::process::Command;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::*;

/// A variable that only the processes in their own namespaces have.
const INSIDE: &str = "RDMAD_TEST_HAS_A_NAMESPACE";
const NEAR: Mac = [0x52, 0x54, 0, 0, 0, 1];
const FAR: Mac = [0x52, 0x54, 0, 0, 0, 2];

/// Runs a program of the system.
fn run(words: &str) {
    let mut words = words.split(' ');
    assert!(Command::new(words.next().unwrap()).args(words).status().unwrap().success());
}

/// Has the test of this name run `inside` a namespace. Does not run it if this process may make none.
fn in_namespace(test: &str, inside: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        run("ip link add near type veth peer name far");
        // The one that comes up last can send at once.
        run("ip link set far up");
        run("ip link set near up");
        return inside();
    }
    if !Command::new("unshare").args(["--net", "true"]).status().is_ok_and(|done| done.success()) {
        return eprintln!("skipped: this process may not make a network namespace");
    }
    let mut again = Command::new("unshare");
    again.arg("--net").arg(std::env::current_exe().unwrap()).env(INSIDE, "1");
    let test = format!("uplink::port::tests::{test}");
    let output = again.args([&test, "--exact", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

/// An end of the pair.
struct End {
    port: Port,
    counters: Counters,
}

impl End {
    fn open(name: &str, station: Mac) -> Self {
        Self { port: Port::socket(name, Some(&[station])).unwrap(), counters: Counters::new(name) }
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
        self.port.receive(&mut Port::room(), &self.counters, deliver).unwrap();
        came.unwrap()
    }

    fn count(&self, name: &str) -> u64 {
        self.counters.read()[name]
    }
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
