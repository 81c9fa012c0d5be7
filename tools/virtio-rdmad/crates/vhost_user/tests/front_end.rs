// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A front end over a socket pair: what virtio_uml does, and what no front end should do.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use memory::{GuestMemory, Share};
use testkit::socket::{longs, new_eventfd as event, new_memory};
use testkit::vhost_user::{answer, message, region as region_of, single, state, table, NEED_REPLY};
use vhost_user::{BadFlags, Fault, Unanswerable, VhostUser};
use virtio_transport::{
    Backend, ConnectionState, Error, Protocol, QueueSetup, ResumeError, Server,
};

const GUEST: u64 = 0x10_0000;
const SIZE: u64 = 0x4_0000;
/// Where the front end says it has the memory.
const USER: u64 = 0x7f00_0000_0000;

#[derive(Default)]
struct Device {
    started: Vec<QueueSetup>,
    resets: usize,
    freezes: usize,
    is_frozen: bool,
    /// The queues of the last thaw, and how many thaws there were.
    thawed: Vec<QueueSetup>,
    thaws: usize,
    features: u64,
    /// The features that it has and does not offer.
    withheld: u64,
    /// The memory that the device last got.
    memory: Option<GuestMemory>,
    /// The queues of a device that has failed, and where they go on.
    failed: Vec<(u16, u16)>,
    /// Whether changes of memory and resets take until the test says otherwise.
    is_slow: bool,
    /// Whether one of them is under way.
    is_busy: bool,
}

impl Backend for Device {
    fn features(&self) -> u64 {
        3
    }
    fn offered(&self) -> u64 {
        self.features() & !self.withheld
    }
    fn set_features(&mut self, features: u64) {
        assert_eq!(features & !self.features(), 1 << 30 & features | 1 << 32 & features);
        assert!(self.started.is_empty(), "features change while queues run");
        self.features = features;
    }
    fn config(&self) -> &[u8] {
        b"configuration"
    }
    fn queue_count(&self) -> u16 {
        4
    }
    fn queue_max_size(&self, _queue: u16) -> u16 {
        ring::MAX_SIZE
    }
    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.memory = Some(memory.clone());
        self.started.extend(queues);
        Ok(())
    }
    fn set_memory(&mut self, memory: &GuestMemory) {
        self.memory = Some(memory.clone());
        self.is_busy = self.is_slow;
    }
    fn kick(&mut self, queue: u16) {
        panic!("queue {queue} has a descriptor for kicks");
    }
    fn reset(&mut self) {
        self.started.clear();
        self.resets += 1;
        self.is_frozen = false;
        self.is_busy = self.is_slow;
    }
    fn freeze(&mut self) {
        assert!(!self.is_frozen);
        self.freezes += 1;
        self.is_frozen = true;
        self.is_busy = self.is_slow;
    }
    fn thaw(&mut self, queues: Vec<QueueSetup>) -> Result<(), String> {
        assert!(self.is_frozen);
        self.is_frozen = false;
        self.thaws += 1;
        self.thawed = queues;
        Ok(())
    }
    fn is_settled(&self) -> bool {
        !self.is_busy
    }
    fn fail(&mut self, _memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.failed = queues.iter().map(|queue| (queue.index, queue.base)).collect();
        Ok(())
    }
}

struct FrontEnd {
    socket: UnixStream,
    server: Server<VhostUser>,
    device: Device,
    memory: OwnedFd,
}

impl FrontEnd {
    fn new() -> Self {
        let device = Device::default();
        let (socket, other) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let server = vhost_user::serve(other, &device);
        Self { socket, server, device, memory: new_memory(SIZE) }
    }

    /// Makes a front end that can set up queues, with answers to everything.
    fn negotiated() -> Self {
        let mut this = Self::new();
        this.ask(3, &[], &[], 0);
        let protocol = this.u64(15);
        assert_eq!(this.ask(16, &protocol.to_ne_bytes(), &[], 0), None);
        let features = this.u64(1);
        assert_eq!(this.ack(2, &features.to_ne_bytes(), &[]), 0);
        let memory = this.memory.try_clone().unwrap();
        assert_eq!(this.ack(5, &table(&region()), &[memory.as_fd()]), 0);
        this
    }

    /// Goes on in another process, with what the front end has said.
    fn succeed(&mut self, state: ConnectionState) -> Result<(), ResumeError> {
        let socket = self.server.as_fd().try_clone_to_owned().unwrap();
        self.server = vhost_user::resume(socket.into(), Share::default(), state)?;
        self.device = Device::default();
        Ok(())
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(testkit::socket::send(&self.socket, bytes, fds), Ok(bytes.len()));
    }

    fn process(&mut self) -> Result<bool, Error> {
        self.server.process(&mut self.device)
    }

    /// Sends a request and returns the payload of the answer, if one comes.
    fn ask(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        flags: u32,
    ) -> Option<Vec<u8>> {
        self.send(&message(request, flags, payload), fds);
        self.process().unwrap();
        self.answer(request)
    }

    /// Takes the answer to a request, if one has come.
    fn answer(&mut self, request: u32) -> Option<Vec<u8>> {
        answer(&self.socket, request)
    }

    fn u64(&mut self, request: u32) -> u64 {
        let answer = self.ask(request, &[], &[], 0).expect("an answer");
        u64::from_ne_bytes(answer.try_into().unwrap())
    }

    /// Sends a request and returns the acknowledgement.
    fn ack(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> u64 {
        let answer = self.ask(request, payload, fds, NEED_REPLY).expect("an answer");
        u64::from_ne_bytes(answer.try_into().unwrap())
    }

    /// Sets up a queue as virtio_uml does, up to the enabling.
    fn set_up(&mut self, queue: u32, kick: &OwnedFd, call: &OwnedFd) {
        assert_eq!(self.ack(13, &u64::from(queue).to_ne_bytes(), &[call.as_fd()]), 0);
        assert_eq!(self.ack(8, &state(queue, 256), &[]), 0);
        assert_eq!(self.ack(10, &state(queue, 0), &[]), 0);
        assert_eq!(self.ack(9, &addr(queue, USER), &[]), 0);
        assert_eq!(self.ack(12, &u64::from(queue).to_ne_bytes(), &[kick.as_fd()]), 0);
    }

    /// Sends a request that must fail with this fault.
    fn refused(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>], fault: Fault) {
        let before = self.server.protocol().faults().get(fault);
        assert_ne!(self.ack(request, payload, fds), 0, "request {request}");
        assert_eq!(
            self.server.protocol().faults().get(fault),
            before + 1,
            "request {request}: {fault}"
        );
    }
}

fn addr(queue: u32, desc: u64) -> Vec<u8> {
    longs(&[queue.into(), desc, USER + 0x2000, USER + 0x1000, u64::MAX])
}

fn region_at(guest: u64, size: u64, offset: u64) -> Vec<u8> {
    region_of(guest, size, USER, offset)
}

fn region() -> Vec<u8> {
    region_at(GUEST, SIZE, 0)
}

fn config(offset: u32, size: u32) -> Vec<u8> {
    let head = [offset, size, 0].map(u32::to_ne_bytes).concat();
    [head, vec![0; size as usize]].concat()
}

#[test]
fn features_and_configuration() {
    let mut front = FrontEnd::new();
    assert_eq!(front.u64(1), 3 | 1 << 30 | 1 << 32);
    assert_eq!(front.u64(17), 4);
    assert_eq!(front.u64(36), 509);
    // Before REPLY_ACK is negotiated nobody answers.
    assert_eq!(front.ask(3, &[], &[], NEED_REPLY), None);
    let answer = front.ask(24, &config(3, 5), &[], 0).unwrap();
    assert_eq!(answer[12..], *b"figur");
    let answer = front.ask(24, &config(0, 13), &[], 0).unwrap();
    assert_eq!(answer[12..], *b"configuration");
    for (offset, size) in [(0, 14), (13, 1), (u32::MAX, 1)] {
        assert_eq!(front.ask(24, &config(offset, size), &[], 0), Some(Vec::new()));
    }
    assert_eq!(front.server.protocol().faults().get(Fault::ConfigBounds), 3);
}

/// A process that does not offer a feature goes on with a front end that has it from another process.
#[test]
fn features_that_are_not_offered_are_served() {
    let mut front = FrontEnd::negotiated();
    let state = front.server.protocol().state();
    front.succeed(state).unwrap();
    front.device.withheld = 2;
    front.server.fail(&mut front.device).unwrap();
    assert_eq!(front.u64(1), 1 | 1 << 30 | 1 << 32);
    assert_eq!(front.ack(2, &(3_u64 | 1 << 30 | 1 << 32).to_ne_bytes(), &[]), 0);
}

#[test]
fn queues_start_signal_and_stop() {
    let mut front = FrontEnd::negotiated();
    let (kick, call) = (event(), event());
    for queue in [0, 3] {
        front.set_up(queue, &kick, &call);
        assert_eq!(front.ack(18, &state(queue, 1), &[]), 0);
    }
    let setup = &front.device.started[1];
    assert_eq!((setup.index, setup.base, setup.layout.size), (3, 0, 256));
    assert_eq!((setup.layout.desc, setup.layout.avail), (GUEST, GUEST + 0x1000));
    assert_eq!((setup.layout.used, setup.layout.event_idx), (GUEST + 0x2000, false));

    // The kick is the front end's eventfd, the signal too, and writes to memory arrive.
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    assert!(rustix::io::read(setup.kick.as_ref().unwrap(), &mut [0; 8]).is_ok());
    setup.signal.signal();
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok());
    let memory = front.device.memory.as_ref().unwrap();
    memory.write(GUEST + 0x2002, &77_u16.to_le_bytes()).unwrap();

    // The call may change while the queue runs, or go.
    let other = event();
    let signal = setup.signal.clone();
    assert_eq!(front.ack(13, &3_u64.to_ne_bytes(), &[other.as_fd()]), 0);
    signal.signal();
    assert!(rustix::io::read(&call, &mut [0; 8]).is_err());
    assert!(rustix::io::read(&other, &mut [0; 8]).is_ok());
    assert_eq!(front.ack(13, &(3_u64 | 1 << 8).to_ne_bytes(), &[]), 0);
    signal.signal();
    assert!(rustix::io::read(&other, &mut [0; 8]).is_err());

    // One that stops pauses the device; it would go on where the used ring says.
    let base = front.ask(11, &state(3, 0), &[], 0).unwrap();
    assert_eq!(base, state(3, 77));
    assert_eq!(front.ack(18, &state(0, 0), &[]), 0);
    assert_eq!((front.device.started.len(), front.device.resets, front.device.freezes), (2, 0, 1));

    // RESET_DEVICE resets it, and it starts again.
    assert_eq!(front.ack(34, &[], &[]), 0);
    assert_eq!((front.device.started.len(), front.device.resets), (0, 1));
    front.set_up(0, &kick, &call);
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    assert_eq!(front.device.started.len(), 1);
    assert_eq!(front.ack(34, &[], &[]), 0);
    assert_eq!((front.device.started.len(), front.device.resets), (0, 2));
}

/// Returns a front end with the queues 0 and 3, of which the device has used 5 and 0 buffers.
fn running() -> FrontEnd {
    let mut front = FrontEnd::negotiated();
    for queue in [0, 3] {
        front.set_up(queue, &event(), &event());
        let used = USER + 0x8000 * u64::from(queue);
        assert_eq!(front.ack(9, &ring(queue, used), &[]), 0);
        assert_eq!(front.ack(18, &state(queue, 1), &[]), 0);
    }
    rustix::io::pwrite(&front.memory, &5_u16.to_le_bytes(), 2).unwrap();
    front
}

/// The address of a queue whose used ring is at `used`.
fn ring(queue: u32, used: u64) -> Vec<u8> {
    longs(&[queue.into(), USER + 0x4000, used, USER + 0x5000, u64::MAX])
}

/// What the device saw since it started: freezes, thaws, resets; and whether it is frozen.
fn seen(front: &FrontEnd) -> (usize, usize, usize, bool) {
    let device = &front.device;
    (device.freezes, device.thaws, device.resets, device.is_frozen)
}

/// Cloud Hypervisor pauses a VM by this.
#[test]
fn queues_that_are_disabled_and_enabled_pause_the_device() {
    let mut front = running();
    for queue in [3, 0] {
        assert_eq!(front.ack(18, &state(queue, 0), &[]), 0);
        assert_eq!(seen(&front), (1, 0, 0, true), "{queue}");
    }
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    assert_eq!(seen(&front), (1, 0, 0, true), "queue 3 is disabled");
    assert_eq!(front.ack(18, &state(3, 1), &[]), 0);
    assert_eq!(seen(&front), (1, 1, 0, false));
    let thawed: Vec<_> = front.device.thawed.iter().map(|queue| queue.index).collect();
    assert_eq!((thawed, front.device.started.len()), (vec![0, 3], 2));
    // One queue alone.
    assert_eq!(front.ack(18, &state(3, 0), &[]), 0);
    assert_eq!(seen(&front), (2, 1, 0, true));
    assert_eq!(front.ack(18, &state(3, 1), &[]), 0);
    assert_eq!(seen(&front), (2, 2, 0, false));
}

/// QEMU pauses a VM by this. Its features, the memory and the queues come once more, with other descriptors.
#[test]
fn queues_that_stop_and_start_where_they_were_pause_the_device() {
    let mut front = running();
    for (queue, base) in [(0, 5), (3, 0)] {
        assert_eq!(front.ask(11, &state(queue, 0), &[], 0), Some(state(queue, base)));
    }
    assert_eq!(seen(&front), (1, 0, 0, true));
    let features = front.u64(1);
    assert_eq!(front.ack(2, &features.to_ne_bytes(), &[]), 0);
    let memory = front.memory.try_clone().unwrap();
    assert_eq!(front.ack(5, &table(&region()), &[memory.as_fd()]), 0);
    let kicks = [event(), event()];
    let call = event();
    for ((queue, base), kick) in [(0, 5), (3, 0)].into_iter().zip(&kicks) {
        assert_eq!(seen(&front), (1, 0, 0, true), "{queue}");
        assert_eq!(front.ack(8, &state(queue, 256), &[]), 0);
        assert_eq!(front.ack(10, &state(queue, base), &[]), 0);
        assert_eq!(front.ack(9, &ring(queue, USER + 0x8000 * u64::from(queue)), &[]), 0);
        assert_eq!(front.ack(12, &u64::from(queue).to_ne_bytes(), &[kick.as_fd()]), 0);
        assert_eq!(front.ack(13, &u64::from(queue).to_ne_bytes(), &[call.as_fd()]), 0);
        assert_eq!(front.ack(18, &state(queue, 1), &[]), 0);
    }
    assert_eq!(seen(&front), (1, 1, 0, false));
    for (thawed, kick) in front.device.thawed.iter().zip(&kicks) {
        rustix::io::write(kick, &3_u64.to_ne_bytes()).unwrap();
        let mut value = [0; 8];
        assert_eq!(rustix::io::read(thawed.kick.as_ref().unwrap(), &mut value), Ok(8));
        assert_eq!(u64::from_ne_bytes(value), 3);
    }
    front.device.started[1].signal.signal();
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok());
}

/// Begins to set the queues up, and returns the acknowledgement.
type Begin = fn(&mut FrontEnd) -> u64;

/// User-mode Linux only disables the queues when its driver resets the device, and then sets them up.
#[test]
fn other_queues_reset_the_paused_device() {
    let begins: [(&str, Begin); 6] = [
        ("index 0 of the first queue", |front| front.ack(10, &state(0, 0), &[])),
        ("index of a queue", |front| front.ack(10, &state(3, 1), &[])),
        ("size", |front| front.ack(8, &state(3, 128), &[])),
        ("address", |front| front.ack(9, &ring(3, USER + 0x9000), &[])),
        ("address outside of memory", |front| front.ack(9, &ring(3, USER + SIZE), &[])),
        ("features", |front| front.ack(2, &(1_u64 << 32 | 1 << 30 | 1).to_ne_bytes(), &[])),
    ];
    for (what, begin) in begins {
        let mut front = running();
        for queue in [3, 0] {
            assert_eq!(front.ack(18, &state(queue, 0), &[]), 0);
        }
        assert_eq!(begin(&mut front), 0, "{what}");
        assert_eq!((front.device.resets, front.device.started.len()), (1, 0), "{what}");
        for queue in [0, 3] {
            front.set_up(queue, &event(), &event());
            assert_eq!(front.ack(18, &state(queue, 1), &[]), 0);
        }
        assert_eq!(seen(&front), (1, 0, 1, false), "{what}");
        let bases: Vec<_> = front.device.started.iter().map(|queue| queue.base).collect();
        assert_eq!(bases, [0, 0], "{what}");
    }
}

/// An index of 0 is that of a new ring also where the device has used 65,536 buffers of the first queue.
#[test]
fn an_index_of_0_of_the_first_queue_is_that_of_a_new_ring() {
    let mut front = running();
    rustix::io::pwrite(&front.memory, &0_u16.to_le_bytes(), 2).unwrap();
    assert_eq!(front.ask(11, &state(0, 0), &[], 0), Some(state(0, 0)));
    assert_eq!(front.ack(10, &state(0, 0), &[]), 0);
    assert_eq!(front.device.resets, 1);
}

/// What a front end had said of the queues that wait for the last one holds after the reset that the last one brings.
#[test]
fn queues_that_wait_start_after_the_reset() {
    let mut front = running();
    for queue in [0, 3] {
        front.ask(11, &state(queue, 0), &[], 0).unwrap();
    }
    let kick = event();
    assert_eq!(front.ack(12, &0_u64.to_ne_bytes(), &[kick.as_fd()]), 0);
    assert_eq!(front.ack(9, &ring(3, USER + 0x9000), &[]), 0);
    assert_eq!(seen(&front), (1, 0, 1, false));
    assert_eq!(front.ack(12, &3_u64.to_ne_bytes(), &[kick.as_fd()]), 0);
    let started: Vec<_> =
        front.device.started.iter().map(|queue| (queue.index, queue.base)).collect();
    assert_eq!(started, [(3, 0), (0, 5)]);
}

/// A successor of a back end whose device is paused goes on with a paused device.
#[test]
fn a_successor_of_a_paused_back_end_is_paused() {
    let mut front = running();
    assert!(!front.server.is_paused());
    assert_eq!(front.ack(18, &state(0, 0), &[]), 0);
    assert_eq!(front.ask(11, &state(3, 0), &[], 0), Some(state(3, 0)));
    front.succeed(front.server.protocol().state()).unwrap();
    assert!(front.server.is_paused());
    assert_eq!(front.server.queues().len(), 2);
    (front.device.is_frozen, front.device.freezes) = (true, 1);
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    assert!(front.server.is_paused());
    let kick = event();
    assert_eq!(front.ack(12, &3_u64.to_ne_bytes(), &[kick.as_fd()]), 0);
    assert_eq!(seen(&front), (1, 1, 0, false));
    assert!(!front.server.is_paused());
}

/// Cloud Hypervisor ends if the back end refuses what a guest writes to the configuration space.
#[test]
fn a_write_to_the_configuration_is_ignored() {
    let mut front = FrontEnd::negotiated();
    for count in 1..3 {
        assert_eq!(front.ack(25, &config(0, 4), &[]), 0);
        assert_eq!(front.server.protocol().faults().get(Fault::ConfigWrite), count);
    }
    let answer = front.ask(24, &config(0, 13), &[], 0).unwrap();
    assert_eq!(answer[12..], *b"configuration");
}

/// QEMU writes 0 to the status whenever a VM stops.
#[test]
fn the_device_status_is_not_offered() {
    let mut front = FrontEnd::negotiated();
    assert_eq!(front.u64(15) & 1 << 16, 0);
    front.refused(16, &(1_u64 << 16).to_ne_bytes(), &[], Fault::Features);
}

#[test]
fn a_full_socket_does_not_block() {
    let mut front = FrontEnd::negotiated();
    let (read, write) = UnixStream::pair().unwrap();
    let (read, write) = (OwnedFd::from(read), OwnedFd::from(write));
    front.set_up(0, &event(), &write);
    drop(write);
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    let signal = front.device.started[0].signal.clone();
    assert!(!rustix::fs::fcntl_getfl(&read).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    for _ in 0..20_000 {
        signal.signal();
    }
    let mut first = [0; 8];
    assert_eq!(rustix::io::read(&read, &mut first), Ok(8));
    assert_eq!(u64::from_ne_bytes(first), 1);
    drop(read);
    signal.signal();
}

/// The front end fills the eventfd and makes writers wait. The device does not wait.
#[test]
fn a_full_eventfd_does_not_block() {
    let mut front = FrontEnd::negotiated();
    let call = event();
    front.set_up(0, &event(), &call);
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    let signal = front.device.started[0].signal.clone();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    signal.signal();
    signal.signal();
}

/// A descriptor that can make others wait is refused as a kick, as a call and for requests of the back
/// end.
#[test]
fn descriptors_of_other_kinds_are_refused() {
    let mut front = FrontEnd::negotiated();
    let (_read, pipe) = rustix::pipe::pipe().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let memory = front.memory.try_clone().unwrap();
    for fd in [pipe.as_fd(), file.as_fd(), memory.as_fd()] {
        front.refused(12, &0_u64.to_ne_bytes(), &[fd], Fault::DescriptorKind);
        front.refused(13, &0_u64.to_ne_bytes(), &[fd], Fault::DescriptorKind);
    }
    front.refused(21, &[], &[file.as_fd()], Fault::DescriptorKind);
    front.refused(21, &[], &[memory.as_fd()], Fault::DescriptorKind);
    front.refused(21, &[], &[pipe.as_fd()], Fault::DescriptorKind);
    let (socket, _other) = UnixStream::pair().unwrap();
    assert_eq!(front.ack(21, &[], &[socket.as_fd()]), 0);
    front.set_up(0, &event(), &event());
}

#[test]
fn memory_comes_and_goes() {
    let mut front = FrontEnd::negotiated();
    front.set_up(0, &event(), &event());
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    let memory = front.memory.try_clone().unwrap();
    let fd = &[memory.as_fd()];
    let more = single(&region_at(GUEST + SIZE, 0x1000, 0x1000));
    assert_eq!(front.ack(37, &more, fd), 0);
    assert_eq!(front.device.memory.as_ref().unwrap().size(), SIZE + 0x1000);
    assert_eq!(front.ack(38, &more, &[]), 0);
    assert_eq!(front.device.memory.as_ref().unwrap().size(), SIZE);
    front.refused(38, &more, &[], Fault::RegionUnknown);
    front.refused(37, &more, &[], Fault::Descriptors);
    front.refused(37, &single(&region()), fd, Fault::Region);
    front.refused(37, &single(&region_at(u64::MAX, 0x1000, 0)), fd, Fault::Region);
    front.refused(37, &single(&region_at(0, SIZE, 0x1000)), fd, Fault::Region);
    let table = [&9_u32.to_ne_bytes()[..], &[0; 4], &region()].concat();
    front.refused(5, &table, fd, Fault::RegionCount);
    let table = [&2_u32.to_ne_bytes()[..], &[0; 4], &region()].concat();
    front.refused(5, &table, fd, Fault::Payload);
    assert_eq!(front.device.memory.as_ref().unwrap().size(), SIZE);
}

/// Returns a front end whose device runs, and the region that it has given out besides.
fn running_with_more_memory() -> (FrontEnd, Vec<u8>) {
    let mut front = FrontEnd::negotiated();
    front.set_up(0, &event(), &event());
    assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
    let memory = front.memory.try_clone().unwrap();
    let more = single(&region_at(GUEST + SIZE, 0x1000, 0x1000));
    assert_eq!(front.ack(37, &more, &[memory.as_fd()]), 0);
    (front, more)
}

/// When the front end has the answer, it may use memory that it took away for something else.
#[test]
fn an_answer_comes_when_the_device_has_followed() {
    let (mut front, more) = running_with_more_memory();
    front.device.is_slow = true;
    front.send(&message(38, NEED_REPLY, &more), &[]);
    // What comes next waits behind it.
    front.send(&message(39, 0, &0_u64.to_ne_bytes()), &[]);
    front.send(&message(40, 0, &[]), &[]);
    for _ in 0..3 {
        assert!(front.process().unwrap());
        assert_eq!((front.answer(38), front.device.resets), (None, 0));
    }
    front.device.is_busy = false;
    assert!(front.process().unwrap());
    assert_eq!(front.answer(38), Some(vec![0; 8]));
    assert_eq!((front.answer(40), front.device.resets), (None, 1));
    front.device.is_busy = false;
    while front.process().unwrap() {}
    assert_eq!(front.answer(40), Some(vec![0; 8]));
}

/// A back end that is killed while it handles requests takes none of them with it: its successor handles them, with
/// their descriptors, and the front end gets its answers.
#[test]
fn the_successor_of_a_back_end_that_is_killed_answers() {
    let (mut front, more) = running_with_more_memory();
    let memory = front.memory.try_clone().unwrap();
    let state = front.server.protocol().state();
    front.device.is_slow = true;
    front.send(&message(38, NEED_REPLY, &more), &[]);
    front.send(&message(37, NEED_REPLY, &more), &[memory.as_fd()]);
    front.send(&message(40, 0, &[]), &[]);
    assert!(front.process().unwrap());
    assert_eq!(front.answer(38), None, "the device does not follow yet");
    front.succeed(state).unwrap();
    while front.process().unwrap() {}
    for request in [38, 37, 40] {
        assert_eq!(front.answer(request), Some(vec![0; 8]), "{request}");
    }
    // Nothing is left that was handled.
    assert_eq!(front.ack(38, &more, &[]), 0);
    assert_eq!(front.answer(40), None);
}

/// The device writes to a queue until the reset that stops it is done.
#[test]
fn a_queue_goes_on_where_the_device_left_it() {
    let mut front = FrontEnd::negotiated();
    front.set_up(3, &event(), &event());
    assert_eq!(front.ack(18, &state(3, 1), &[]), 0);
    let memory = front.device.memory.clone().unwrap();
    front.device.is_slow = true;
    front.send(&message(11, 0, &state(3, 0)), &[]);
    assert!(front.process().unwrap());
    memory.write(GUEST + 0x2002, &77_u16.to_le_bytes()).unwrap();
    assert!(front.process().unwrap());
    front.device.is_busy = false;
    while front.process().unwrap() {}
    assert_eq!(front.answer(11), Some(state(3, 77)));
}

#[test]
fn a_front_end_that_goes_while_the_device_follows_is_noticed_afterwards() {
    for flags in [0, NEED_REPLY] {
        let mut front = FrontEnd::negotiated();
        front.set_up(0, &event(), &event());
        assert_eq!(front.ack(18, &state(0, 1), &[]), 0);
        front.device.is_slow = true;
        front.send(&message(38, flags, &single(&region())), &[]);
        assert!(front.process().unwrap());
        front.socket.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(front.process().unwrap());
        front.device.is_busy = false;
        assert!(front.process().unwrap_err().is_closed());
    }
}

/// Descriptors get lost if a message has too many, or if the process has as many open as it may. A
/// request that lost some is refused.
#[test]
fn a_message_that_loses_descriptors_is_refused() {
    let mut front = FrontEnd::negotiated();
    let memory = front.memory.try_clone().unwrap();
    let fds = [memory.as_fd(); 9];
    let more = single(&region_at(GUEST + SIZE, 0x1000, 0x1000));
    front.refused(37, &more, &fds, Fault::DescriptorsLost);
    assert_eq!(front.ack(37, &more, &fds[..1]), 0);
}

#[test]
fn memory_is_refused_by_its_reason() {
    let mut front = FrontEnd::negotiated();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let more = single(&region_at(GUEST + SIZE, 0x1000, 0));
    front.refused(37, &more, &[file.as_fd()], Fault::RegionFile);
    let sealed = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, 0x1000).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    front.refused(37, &more, &[sealed.as_fd()], Fault::RegionRefused);
}

#[test]
fn a_device_that_cannot_go_on_says_so_until_it_is_reset() {
    let mut front = FrontEnd::negotiated();
    assert_eq!(front.ack(39, &0xf_u64.to_ne_bytes(), &[]), 0);
    front.server.needs_reset();
    assert_eq!(front.u64(40), 0x4f);
    assert_eq!(front.ack(39, &0xf_u64.to_ne_bytes(), &[]), 0);
    assert_eq!(front.u64(40), 0x4f);
    assert_eq!(front.ack(39, &0_u64.to_ne_bytes(), &[]), 0);
    assert_eq!(front.u64(40), 0);
}

#[test]
fn mistakes_are_named() {
    let mut front = FrontEnd::negotiated();
    let fd = event();
    let fd = &[fd.as_fd()];
    front.refused(99, &[], &[], Fault::UnknownRequest);
    front.refused(2, &[0; 7], &[], Fault::Payload);
    front.refused(2, &(1_u64 << 26).to_ne_bytes(), &[], Fault::Features);
    front.refused(16, &u64::MAX.to_ne_bytes(), &[], Fault::Features);
    front.refused(8, &state(4, 256), &[], Fault::QueueIndex);
    for size in [0, 3, 1 << 16, u32::MAX] {
        front.refused(8, &state(0, size), &[], Fault::QueueValue);
    }
    front.refused(10, &state(0, 1 << 16), &[], Fault::QueueValue);
    front.refused(18, &state(0, 2), &[], Fault::QueueValue);
    front.refused(12, &4_u64.to_ne_bytes(), fd, Fault::QueueIndex);
    front.refused(12, &0x200_u64.to_ne_bytes(), fd, Fault::QueueIndex);
    front.refused(12, &0_u64.to_ne_bytes(), &[], Fault::Descriptors);
    front.refused(13, &0x100_u64.to_ne_bytes(), fd, Fault::Descriptors);
    front.refused(21, &[], &[], Fault::Descriptors);

    front.set_up(0, &event(), &event());
    assert_eq!(front.ack(9, &addr(0, USER + SIZE), &[]), 0);
    front.refused(18, &state(0, 1), &[], Fault::QueueAddress);
    assert_eq!(front.ack(9, &addr(0, USER), &[]), 0);
    assert_eq!(front.device.started.len(), 1, "it was enabled before");
    front.refused(8, &state(0, 128), &[], Fault::QueueRunning);
    front.refused(9, &addr(0, USER), &[], Fault::QueueRunning);
    front.refused(12, &0_u64.to_ne_bytes(), fd, Fault::QueueRunning);
}

/// The error of the protocol that ended a connection.
fn protocol<E: std::error::Error + 'static>(error: Error) -> E {
    let Error::Protocol(error) = error else { panic!("{error}") };
    *error.downcast().unwrap()
}

#[test]
fn a_stream_out_of_step_ends() {
    let end = |bytes: &[u8]| {
        let mut front = FrontEnd::new();
        front.send(bytes, &[]);
        front.process().unwrap_err()
    };
    let error = end(&[1, 1, 4097].map(u32::to_ne_bytes).concat());
    assert!(matches!(error, Error::Length(4109)));
    for flags in [0, 2, 5] {
        let error = end(&[1, flags, 0].map(u32::to_ne_bytes).concat());
        assert_eq!(protocol::<BadFlags>(error).0, flags);
    }
    let error = end(&message(11, 0, &state(9, 0)));
    let Unanswerable { request, fault } = protocol(error);
    assert_eq!((request, fault), (11, Fault::QueueIndex));
    let mut front = FrontEnd::new();
    front.socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(front.process().unwrap_err().is_closed());
}

#[test]
fn messages_arrive_in_pieces() {
    let mut front = FrontEnd::negotiated();
    for byte in message(8, NEED_REPLY, &state(1, 128)) {
        assert!(front.socket.read(&mut [0; 1]).is_err(), "no answer before the end");
        front.send(&[byte], &[]);
        front.process().unwrap();
    }
    let mut answer = [0; 20];
    front.socket.read_exact(&mut answer).unwrap();
    assert_eq!(answer[12..], [0; 8]);
}

#[test]
fn answers_that_nobody_reads_end_it() {
    let mut front = FrontEnd::new();
    let request = message(1, 0, &[]);
    let ended = (0..100_000).find_map(|_| {
        // What is sent is taken at once, so that this never blocks.
        front.socket.write_all(&request).unwrap();
        front.process().err()
    });
    assert!(matches!(ended, Some(Error::Stuck)));
}

#[test]
fn a_successor_goes_on() {
    let mut front = FrontEnd::negotiated();
    let (kick, call) = (event(), event());
    front.set_up(1, &kick, &call);
    assert_eq!(front.ack(18, &state(1, 1), &[]), 0);
    front.set_up(2, &event(), &event());
    rustix::io::pwrite(&front.memory, &7_u16.to_le_bytes(), 0x2000 + 2).unwrap();

    front.succeed(front.server.protocol().state()).unwrap();
    let queues = front.server.queues();
    let [QueueSetup { index: 1, layout, base: 0, kick: Some(same), signal }] = queues.as_slice()
    else {
        panic!("only queue 1 runs");
    };
    assert_eq!((layout.size, layout.desc, layout.used), (256, GUEST, GUEST + 0x2000));
    rustix::io::write(&kick, &5_u64.to_ne_bytes()).unwrap();
    let mut value = [0; 8];
    assert_eq!(rustix::io::read(same, &mut value), Ok(8));
    assert_eq!(u64::from_ne_bytes(value), 5);
    signal.signal();
    assert_eq!(rustix::io::read(&call, &mut value), Ok(8));

    front.server.fail(&mut front.device).unwrap();
    assert_eq!(front.device.failed, [(1, 7)], "where the used ring ends");
    assert_eq!(front.u64(40) & 0x40, 0x40, "DEVICE_NEEDS_RESET");
    front.refused(9, &addr(1, USER), &[], Fault::QueueRunning);
    let base = front.ask(11, &state(1, 0), &[], 0);
    assert_eq!((base, front.device.freezes), (Some(state(1, 7)), 1));
    assert_eq!(front.ack(18, &state(2, 1), &[]), 0);
    assert_eq!(front.device.started.len(), 1, "queue 2 had all but that");
}

/// Whatever the state is, it is refused or makes a connection.
#[test]
fn a_state_that_was_altered_does_no_harm() {
    let mut front = FrontEnd::negotiated();
    front.set_up(1, &event(), &event());
    assert_eq!(front.ack(18, &state(1, 1), &[]), 0);
    let ConnectionState { bytes, descriptors } = front.server.protocol().state();
    let mut try_with = |bytes: Vec<u8>, count: usize| {
        let descriptors = descriptors[..count].to_vec();
        front.succeed(ConnectionState { bytes, descriptors })?;
        front.server.queues();
        front.server.fail(&mut front.device)
    };
    for count in 0..descriptors.len() {
        assert!(matches!(
            try_with(bytes.clone(), count),
            Err(ResumeError::Descriptors { named: 3, there }) if there == count
        ));
    }
    for at in 0..bytes.len() {
        assert!(try_with(bytes[..at].to_vec(), descriptors.len()).is_err(), "{at} bytes");
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut altered = bytes.clone();
            altered[at] = value;
            let _ = try_with(altered, descriptors.len());
        }
    }
    try_with(bytes.clone(), descriptors.len()).unwrap();
}
