// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A switch, and the VMMs of its guests.

use std::io::{ErrorKind, Read, Write};
use std::num::NonZeroU8;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use engine::FabricConfig;
use rustix::net::{
    bind, connect, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};

use super::*;
use crate::forwarding::Mac;
use crate::nic::{Framing, Listener};
use crate::uplink::{namespace, PortSpec, Uplink, WaySpec};
use crate::{vxlan, TunnelSpec};

/// A bound on what does not happen if something is broken.
const LIMIT: Duration = Duration::from_secs(60);

/// A switch, with a guest for each framing in a list. It ends when this is dropped.
struct Running {
    switch: Arc<Switch>,
    intakes: Vec<Arc<Intake>>,
    directory: PathBuf,
    end: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

fn mac(guest: usize) -> Mac {
    [0x52, 0x54, 0, 0, 0, u8::try_from(guest).unwrap()]
}

/// Returns a frame from one guest to another one.
fn frame(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from[..], &[0x88, 0xb5], payload].concat()
}

/// Returns a packet of RoCE v2 from one guest to another one, from an IP address that is no guest's.
fn roce_frame(to: Mac, from: Mac) -> Vec<u8> {
    let send = roce::Opcode::new(roce::Service::Rc, roce::Operation::Send, roce::Position::Only);
    let headers = roce::Headers {
        ethernet: roce::Ethernet { destination: to, source: from, vlan: None },
        ip: roce::Ip::V4(roce::Ipv4 {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [192, 0, 2, 1].into(),
            destination: [224, 0, 0, 1].into(),
        }),
        source_port: 0xc000,
        bth: roce::Bth::new(send.unwrap(), roce::Qpn::new(5).unwrap(), roce::Psn::new(0)),
        extended: roce::ExtendedHeaders::default(),
    };
    let mut frame = vec![0; 256];
    let len = roce::encode(&headers, b"forged", &mut frame).unwrap();
    frame.truncate(len);
    frame
}

/// The socket that the VMM of a guest connects to.
#[derive(Debug)]
struct Socket(UnixListener);

impl Listener for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn accept(&self) -> Result<Option<UnixStream>, Error> {
        match self.0.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn kind(framing: Framing) -> SocketType {
    match framing {
        Framing::Stream => SocketType::STREAM,
        Framing::Packets => SocketType::SEQPACKET,
    }
}

/// Makes the interface of a guest, with a socket in this directory.
fn open(directory: &Path, guest: usize, framing: Framing) -> Nic {
    let path = directory.join(guest.to_string());
    // An interface that was here before has left its file.
    let _ = std::fs::remove_file(&path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind(framing), flags, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    Nic::new(&guest.to_string(), mac(guest), framing, Arc::new(Socket(socket.into())))
}

impl Running {
    fn new(name: &str, framings: &[Framing]) -> Self {
        Self::with_uplink(name, framings, None)
    }

    fn with_uplink(name: &str, framings: &[Framing], uplink: Option<Arc<Uplink>>) -> Self {
        let directory =
            std::env::temp_dir().join(format!("rdmad-switch-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let nic = |(guest, framing): (usize, &Framing)| open(&directory, guest, *framing);
        let nics = framings.iter().enumerate().map(nic).collect();
        let switch = Arc::new(Switch::new(uplink.clone(), nics).unwrap());
        let (end, ended) = UnixStream::pair().unwrap();
        let (of_thread, fabric) = (Arc::clone(&switch), Fabric::new(FabricConfig::default()));
        let intakes = uplink.map(|uplink| Intake::of_lanes(&switch, &uplink, &fabric).unwrap());
        let intakes = intakes.unwrap_or_default();
        let of_switch = intakes.clone();
        let thread = std::thread::spawn(move || run(&of_thread, &fabric, &of_switch, &ended));
        Self { switch, intakes, directory, end: Some(end), thread: Some(thread) }
    }

    /// Connects the VMM of a guest.
    fn connect(&self, guest: usize, framing: Framing) -> Vmm {
        let path = self.directory.join(guest.to_string());
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, kind(framing), flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Vmm { stream, framing }
    }

    /// Connects the VMMs of all guests, and waits until the switch serves them: until each has heard the
    /// others. A frame for somebody who is not there is lost.
    fn connect_all(&self, framings: &[Framing]) -> Vec<Vmm> {
        let vmms: Vec<Vmm> = framings
            .iter()
            .enumerate()
            .map(|(guest, framing)| self.connect(guest, *framing))
            .collect();
        while !self.switch.nics().iter().all(|nic| nic.is_connected()) {
            std::thread::yield_now();
        }
        vmms
    }

    fn count(&self, guest: usize, name: &str) -> u64 {
        self.switch.nics()[guest].counters()[name]
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(JoinHandle::join);
        let _ = std::fs::remove_dir_all(&self.directory);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

/// A VMM.
struct Vmm {
    stream: UnixStream,
    framing: Framing,
}

impl Vmm {
    fn send(&self, frame: &[u8]) {
        if self.framing == Framing::Stream {
            let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
            (&self.stream).write_all(&length).unwrap();
        }
        (&self.stream).write_all(frame).unwrap();
    }

    fn receive(&self) -> Vec<u8> {
        let mut length = 1 << 16;
        if self.framing == Framing::Stream {
            let mut bytes = [0; 4];
            (&self.stream).read_exact(&mut bytes).unwrap();
            length = u32::from_be_bytes(bytes) as usize;
            let mut frame = vec![0; length];
            (&self.stream).read_exact(&mut frame).unwrap();
            return frame;
        }
        let mut frame = vec![0; length];
        length = (&self.stream).read(&mut frame).unwrap();
        frame.truncate(length);
        frame
    }

    /// Waits until the switch ends the connection.
    fn sees_end(&self) -> bool {
        matches!((&self.stream).read(&mut [0]), Ok(0))
            || (&self.stream)
                .read(&mut [0])
                .is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    }
}

const BOTH: [Framing; 4] = [Framing::Stream, Framing::Packets, Framing::Stream, Framing::Packets];

#[test]
fn frames_go_to_whom_they_are_for() {
    let running = Running::new("forwards", &BOTH);
    let vmms = running.connect_all(&BOTH);
    for (from, sender) in vmms.iter().enumerate() {
        for (to, receiver) in vmms.iter().enumerate().filter(|(to, _)| *to != from) {
            for payload in [0, 1, 1500, 60_000] {
                let frame = frame(mac(to), mac(from), &vec![mac(to)[5]; payload]);
                sender.send(&frame);
                assert!(receiver.receive() == frame, "{from} to {to}, {payload} bytes");
            }
        }
        let frame = frame([0xff; 6], mac(from), b"to all");
        sender.send(&frame);
        for (_, receiver) in vmms.iter().enumerate().filter(|(to, _)| *to != from) {
            assert_eq!(receiver.receive(), frame);
        }
    }
}

#[test]
fn what_a_guest_must_not_send_is_dropped_and_counted() {
    for framing in [Framing::Stream, Framing::Packets] {
        let framings = [framing; 2];
        let running = Running::new(&format!("refuses-{framing:?}"), &framings);
        let vmms = running.connect_all(&framings);
        vmms[0].send(&frame(mac(1), mac(7), b"spoofed"));
        vmms[0].send(&frame([0xff; 6], mac(1), b"spoofed"));
        vmms[0].send(&frame(mac(9), mac(0), b"to nobody"));
        vmms[0].send(&frame(mac(0), mac(0), b"to itself"));
        vmms[0].send(&roce_frame([0x01, 0, 0x5e, 0, 0, 1], mac(0)));
        if framing == Framing::Packets {
            vmms[0].send(b"no header");
        }
        let good = frame(mac(1), mac(0), b"good");
        vmms[0].send(&good);
        assert_eq!(vmms[1].receive(), good);
        assert_eq!((running.count(0, "rx_spoofed"), running.count(0, "rx_unknown")), (2, 1));
        assert_eq!(running.count(0, "rx_forged"), 1);
        assert_eq!(running.count(0, "rx_malformed"), u64::from(framing == Framing::Packets));
    }
}

#[test]
fn garbage_ends_its_connection_alone() {
    let framings = [Framing::Stream; 3];
    let running = Running::new("garbage", &framings);
    let mut vmms = running.connect_all(&framings);
    for garbage in [[0, 0, 0, 13], [0, 1, 0, 0], [0xff; 4]] {
        (&vmms[0].stream).write_all(&garbage).unwrap();
        assert!(vmms[0].sees_end());
        let others = frame(mac(2), mac(1), &garbage);
        vmms[1].send(&others);
        assert_eq!(vmms[2].receive(), others);
        // The VMM may connect again; and one that waits comes next when the other one goes.
        vmms[0] = running.connect(0, Framing::Stream);
        let next = running.connect(0, Framing::Stream);
        let frame = frame(mac(1), mac(0), &garbage);
        vmms[0].send(&frame);
        assert_eq!(vmms[1].receive(), frame);
        vmms[0] = next;
        vmms[0].send(&frame);
        assert_eq!(vmms[1].receive(), frame);
    }
    assert_eq!(running.count(0, "bad_length"), 3);
}

#[test]
fn a_guest_that_does_not_read_holds_up_nobody() {
    for framing in [Framing::Stream, Framing::Packets] {
        let framings = [framing; 3];
        let running = Running::new(&format!("slow-{framing:?}"), &framings);
        let vmms = running.connect_all(&framings);
        let (to_slow, to_other) =
            (frame(mac(2), mac(0), &[7; 1400]), frame(mac(1), mac(0), &[8; 1400]));
        for _ in 0..4000 {
            vmms[0].send(&to_slow);
        }
        vmms[0].send(&to_other);
        assert_eq!(vmms[1].receive(), to_other);
        let (sent, lost) = (running.count(2, "tx_frames"), running.count(2, "tx_lost"));
        assert!(sent + lost == 4000 && lost != 0, "{sent} sent, {lost} lost");
        // What was not lost comes, whole, once the guest reads.
        for _ in 0..sent {
            assert_eq!(vmms[2].receive(), to_slow);
        }
        vmms[0].send(&to_slow);
        assert_eq!(vmms[2].receive(), to_slow);
    }
}

#[test]
fn a_storm_has_a_bound() {
    let framings = [Framing::Stream; 2];
    let running = Running::new("storm", &framings);
    let vmms = running.connect_all(&framings);
    let storm = frame([0xff; 6], mac(0), &[]);
    let frames = [&14_u32.to_be_bytes()[..], &storm].concat().repeat(1000);
    while running.count(0, "rx_storm") == 0 {
        (&vmms[0].stream).write_all(&frames).unwrap();
    }
    // What is not for a group is not counted.
    let good = frame(mac(1), mac(0), b"good");
    vmms[0].send(&good);
    while vmms[1].receive() != good {}
}

#[test]
fn frames_come_over_the_uplink() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let at = |end: u8| format!("127.{high}.{low}.{end}");
    let [local, remote] = [0x71, 0x72].map(|end| at(end).parse().unwrap());
    let vni = "9".parse().unwrap();
    let way = WaySpec::Tunnel(TunnelSpec { vni, local, remotes: vec![remote], port: vxlan::PORT });
    let uplink = Uplink::open("default", &way, None, true, Some(&[]), NonZeroU8::MIN).unwrap();
    let framings = [Framing::Stream; 2];
    let running = Running::with_uplink("uplink", &framings, Some(Arc::clone(&uplink)));
    let vmms = running.connect_all(&framings);
    let other = std::net::UdpSocket::bind((at(0x72), 0)).unwrap();
    let come = |frame: &[u8]| {
        let packet = [&vxlan::header("9".parse().unwrap())[..], frame].concat();
        other.send_to(&packet, (at(0x71), vxlan::PORT)).unwrap();
    };
    come(&frame(mac(7), mac(8), b"to nobody"));
    come(&frame(mac(1), mac(0), b"from a guest of this process"));
    let (to_all, to_one) = (frame([0xff; 6], mac(8), b"to all"), frame(mac(1), mac(8), b"to one"));
    come(&to_all);
    come(&to_one);
    assert_eq!((vmms[0].receive(), vmms[1].receive()), (to_all.clone(), to_all));
    assert_eq!(vmms[1].receive(), to_one);
    let counters = uplink.read_counters();
    assert_eq!((counters["rx_unclaimed"], counters["rx_own_source"]), (1, 1));
    assert_eq!(counters["rx_frames"], 4);
}

/// Interfaces come to a switch that runs, and leave it. Another one takes over an index.
#[test]
fn interfaces_come_and_go() {
    let framings = [Framing::Stream, Framing::Packets];
    let running = Running::new("come", &framings);
    let vmms = running.connect_all(&framings);
    for round in 0..20 {
        let added = 2 + round % 2;
        let framing = framings[round % 2];
        running.switch.add_nic(open(&running.directory, added, framing));
        let vmm = running.connect(added, framing);
        let to_first = frame(mac(0), mac(added), &[7; 100]);
        vmm.send(&to_first);
        assert_eq!(vmms[0].receive(), to_first, "round {round}");
        let back = frame(mac(added), mac(0), &[8; 100]);
        vmms[0].send(&back);
        assert_eq!(vmm.receive(), back, "round {round}");
        running.switch.remove_nic(&added.to_string());
        assert_eq!((&vmm.stream).read(&mut [0; 1]).unwrap_or(0), 0, "its connection ends");
        // The others go on.
        let between = frame(mac(1), mac(0), &[9; 100]);
        vmms[0].send(&between);
        assert_eq!(vmms[1].receive(), between);
    }
    running.switch.remove_nic("nobody");
    assert_eq!(running.switch.nics().len(), 2);
}

/// The number of flows, and of packets that a test wants to see.
const FLOWS: u8 = 16;
const PACKETS: u32 = 20_000;

/// Returns a packet of a flow to the first guest, with its number.
fn numbered(flow: u8, number: u32) -> Vec<u8> {
    let ip = [0x45, 0, 0, 33, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let udp = [0xc0, flow, 0, 9, 0, 13, 0, 0];
    let numbers = [&[flow][..], &number.to_be_bytes()].concat();
    [&mac(0)[..], &mac(9), &[0x08, 0x00], &ip, &udp, &numbers].concat()
}

/// Makes threads end when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes packets that came, and asserts that those of each flow come in their order.
fn check_order(vmm: &Vmm) {
    let (mut last, mut count) = ([0; FLOWS as usize], 0);
    while count < PACKETS {
        let frame = vmm.receive();
        // The kernel sends something of its own as well.
        if frame[6..12] == mac(9) {
            let [flow, number @ ..]: [u8; 5] = *frame.last_chunk().unwrap();
            let (number, last) = (u32::from_be_bytes(number), &mut last[usize::from(flow)]);
            assert!(number > *last, "flow {flow}: {number} after {last}");
            *last = number;
            count += 1;
        }
    }
}

/// The packets of a flow keep their order while two threads besides that of the switch take lanes over and give them
/// back. The uplink is a tap with queues, because its frames go to interfaces of guests, where a test sees them.
#[test]
fn packets_keep_their_order_while_lanes_change_hands() {
    let test = "thread::tests::packets_keep_their_order_while_lanes_change_hands";
    namespace::in_namespace(test, || {
        namespace::run("ip tuntap add name tap0 mode tap multi_queue");
        namespace::run("ip link set tap0 up");
        let way = WaySpec::Tap(PortSpec { name: "tap0".to_owned(), trains: true });
        let lanes = NonZeroU8::new(4).unwrap();
        let uplink = Uplink::open("default", &way, None, true, None, lanes).unwrap();
        let running = Running::with_uplink("order", &[Framing::Stream], Some(uplink));
        assert_eq!(running.intakes.len(), 4);
        let vmms = running.connect_all(&[Framing::Stream]);
        let kernel = tap::PacketSocket::open("tap0", tap::Share::ALL, Some(&[])).unwrap();
        let (done, taken) = (AtomicBool::new(false), AtomicUsize::new(0));
        let take_in = |worker| {
            while !done.load(Ordering::Relaxed) {
                for intake in running.intakes.iter().filter(|intake| intake.claim(worker)) {
                    let found = intake.turn(&mut Budget::default());
                    taken.fetch_add(usize::from(found != Found::Nothing), Ordering::Relaxed);
                    intake.give_back();
                }
            }
        };
        let send = || {
            for number in (1..).take_while(|_| !done.load(Ordering::Relaxed)) {
                for flow in 0..FLOWS {
                    // One that is too many is lost.
                    let _ = kernel.send(&numbered(flow, number), None);
                }
            }
        };
        std::thread::scope(|scope| {
            let _ends = Ends(&done);
            scope.spawn(|| take_in(0));
            scope.spawn(|| take_in(1));
            scope.spawn(send);
            check_order(&vmms[0]);
        });
        assert!(taken.into_inner() > 0, "no thread but that of the switch took anything in");
    });
}
