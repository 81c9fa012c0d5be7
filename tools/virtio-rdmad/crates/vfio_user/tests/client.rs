// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client of our own against the server: a driver's set-up, interrupts, and mistakes.

#![allow(clippy::cast_possible_truncation)] // Lengths and indices of a test are small.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use memory::{GuestMemory, Share};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use testkit::socket::{new_eventfd, new_memory};
use testkit::vfio_user::{access, dma_map as dma_map_at, dma_unmap, set_irqs};
use vfio_user::{Fault, ProtocolError, VfioUser};
use virtio_transport::{
    Backend, Change, ConnectionState, Error, Journal, Protocol, QueueSetup, ResumeError, Server,
};

const QUEUES: u16 = 4;
const EPERM: u32 = 1;
const ENOMEM: u32 = 12;
const EINVAL: u32 = 22;
const EEXIST: u32 = 17;
const ENOSYS: u32 = 38;

#[derive(Default)]
struct Device {
    features: u64,
    /// The queues that run, once the device has started.
    started: Option<Vec<QueueSetup>>,
    kicks: Vec<u16>,
    resets: usize,
    memory: Vec<Vec<(u64, u64)>>,
    /// The memory of the last change.
    latest: Option<GuestMemory>,
    /// Whether changes of memory and resets take until the test says otherwise.
    is_slow: bool,
    /// Whether one of them is under way.
    is_busy: bool,
    /// The features that it has and does not offer.
    withheld: u64,
    /// The feature without which it accepts no others, or 0.
    required: u64,
}

impl Backend for Device {
    fn features(&self) -> u64 {
        0b11
    }
    fn offered(&self) -> u64 {
        self.features() & !self.withheld
    }
    fn accepts(&self, features: u64) -> bool {
        features & self.required == self.required
    }
    fn set_features(&mut self, features: u64) {
        self.features = features;
    }
    fn config(&self) -> &[u8] {
        &[7; 256]
    }
    fn queue_count(&self) -> u16 {
        QUEUES
    }
    fn queue_max_size(&self, _queue: u16) -> u16 {
        256
    }
    fn start(&mut self, _memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        self.started = Some(queues);
        Ok(())
    }
    fn set_memory(&mut self, memory: &GuestMemory) {
        self.memory.push(memory.ranges().collect());
        self.latest = Some(memory.clone());
        self.is_busy = self.is_slow;
    }
    fn is_settled(&self) -> bool {
        !self.is_busy
    }
    fn kick(&mut self, queue: u16) {
        self.kicks.push(queue);
    }
    fn reset(&mut self) {
        self.started = None;
        self.resets += 1;
        self.is_busy = self.is_slow;
    }
    fn freeze(&mut self) {
        unreachable!("vfio-user pauses no device");
    }
    fn thaw(&mut self, _queues: Vec<QueueSetup>) -> Result<(), String> {
        unreachable!("vfio-user pauses no device");
    }
}

struct Client {
    socket: UnixStream,
    server: Server<VfioUser>,
    device: Device,
}

impl Client {
    fn unnegotiated() -> Self {
        let (socket, other) = UnixStream::pair().unwrap();
        let device = Device::default();
        let server = vfio_user::serve(other, 42, &device).unwrap();
        Self { socket, server, device }
    }

    fn new() -> Self {
        let mut client = Self::unnegotiated();
        let reply = client.ask(1, &[0, 0, 0, 0], &[]).unwrap();
        assert_eq!(reply[..4], [0, 0, 0, 0], "version 0.0");
        assert!(reply.ends_with(b"}\0"), "the capabilities are a string");
        let said = String::from_utf8_lossy(&reply[4..]);
        let limit = format!("\"max_dma_maps\":{}", memory::MAX_REGIONS);
        assert!(said.contains(&limit), "{said}");
        client
    }

    fn send(&mut self, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        testkit::vfio_user::send(&self.socket, command, flags, payload, fds);
    }

    /// Sends a command and returns the reply's payload, or the errno it failed with.
    fn ask(
        &mut self,
        command: u16,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, u32> {
        self.send(command, 0, payload, fds);
        while self.server.process(&mut self.device).unwrap() {}
        self.reply(command)
    }

    /// Takes the reply to a command.
    fn reply(&mut self, command: u16) -> Result<Vec<u8>, u32> {
        testkit::vfio_user::reply(&self.socket, command).expect("the connection goes on")
    }

    /// Lets the server look at what was sent. Returns whether a reply has come.
    fn is_answered(&mut self) -> bool {
        let again = self.server.process(&mut self.device).unwrap();
        assert!(again || self.device.is_settled(), "nobody looks whether it has followed");
        rustix::io::ioctl_fionread(&self.socket).unwrap() != 0
    }

    fn read(&mut self, region: u32, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        let reply = self.ask(9, &access(region, offset, len, &[]), &[])?;
        Ok(reply[16..].to_vec())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), u32> {
        self.ask(10, &access(region, offset, data.len() as u32, data), &[]).map(drop)
    }

    /// Maps `size` bytes of shared memory at `address`.
    fn map(&mut self, address: u64, size: u64) -> Result<(), u32> {
        self.map_file(address, size, &new_memory(size))
    }

    fn map_file(&mut self, address: u64, size: u64, file: &OwnedFd) -> Result<(), u32> {
        self.ask(2, &dma_map(address, size), &[file.as_fd()]).map(drop)
    }

    fn set_irqs(&mut self, words: [u32; 4], fds: &[BorrowedFd<'_>]) -> Result<(), u32> {
        self.ask(8, &set_irqs(words), fds).map(drop)
    }

    /// Goes on in another process, with what the client has said.
    fn succeed(&mut self, state: ConnectionState) -> Result<(), ResumeError> {
        let socket = self.server.as_fd().try_clone_to_owned().unwrap();
        self.server = vfio_user::resume(socket.into(), 42, Share::default(), state)?;
        self.device = Device::default();
        Ok(())
    }

    /// Maps memory and does what a driver does up to DRIVER_OK, with queue 2 enabled on vector 3.
    fn drive(&mut self) {
        self.map(0, 0x10_0000).unwrap();
        self.set_up();
    }

    /// Does what a driver does up to DRIVER_OK, but maps no memory.
    fn set_up(&mut self) {
        for (offset, data) in [
            (20, &[1][..]),
            (20, &[3]),
            (8, &[1, 0, 0, 0]),
            (12, &[1, 0, 0, 0]),
            (20, &[0xb]),
            (22, &[2, 0]),
            (24, &[128, 0]),
            (26, &[3, 0]),
            (32, &[0, 0x10, 0, 0]),
            (40, &[0, 0x20, 0, 0]),
            (48, &[0, 0x30, 0, 0]),
            (28, &[1, 0]),
            (20, &[0xf]),
        ] {
            self.write(0, offset, data).unwrap();
        }
    }
}

fn dma_map(address: u64, size: u64) -> Vec<u8> {
    dma_map_at(address, size, 0)
}

/// Returns how often an eventfd was signalled since the last call.
fn count(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    rustix::io::read(fd, &mut value).map_or(0, |_| u64::from_ne_bytes(value))
}

#[test]
fn a_driver_sets_up_a_queue_and_kicks_it() {
    let mut client = Client::new();
    client.drive();
    assert_eq!(client.device.features, 1 << 32);
    let queues = client.device.started.as_ref().expect("DRIVER_OK starts the device");
    let [QueueSetup { index: 2, layout, base: 0, kick: None, .. }] = queues.as_slice() else {
        panic!("only queue 2 is enabled");
    };
    assert_eq!((layout.size, layout.desc, layout.avail), (128, 0x1000, 0x2000));
    assert_eq!(layout.used, 0x3000);

    client.write(0, 0x3000 + 4 * 2, &[2, 0]).unwrap();
    // Queue 1 is not enabled.
    client.write(0, 0x3000 + 4, &[1, 0]).unwrap();
    assert_eq!(client.device.kicks, [2]);
    assert_eq!(client.server.protocol().faults().get(Fault::Kick), 1);

    client.write(0, 20, &[0]).unwrap();
    assert_eq!(client.device.resets, 1);
    assert_eq!(client.read(0, 20, 1).unwrap(), [0]);
    assert_eq!(client.read(0, 28, 2).unwrap(), [0, 0], "reset disables the queue");
}

#[test]
fn posted_writes_get_no_reply_and_stay_in_order() {
    let mut client = Client::new();
    client.drive();
    // As many as surely fit into the socket while nobody reads.
    for _ in 0..64 {
        client.send(10, 0x10, &access(0, 0x3008, 2, &[2, 0]), &[]);
    }
    assert_eq!(client.read(0, 20, 1).unwrap(), [0xf]);
    assert_eq!(client.device.kicks, [2; 64]);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut client = Client::new();
    client.write(0, 20, &[3]).unwrap();
    client.write(0, 12, &[4, 0, 0, 0]).unwrap();
    client.write(0, 20, &[0xb]).unwrap();
    assert_eq!(client.read(0, 20, 1).unwrap(), [3], "FEATURES_OK does not stick");
    client.write(0, 20, &[0xf]).unwrap();
    assert_eq!(client.read(0, 20, 1).unwrap(), [3], "nor does DRIVER_OK without it");
    assert_eq!(client.server.protocol().faults().get(Fault::Register), 1);
    assert!(client.device.started.is_none());
    let server = &client.server;
    assert_eq!(server.missing_features(0), 0, "what a driver has not agreed to does not matter");
}

#[test]
fn a_device_need_not_accept_what_it_offers() {
    let mut client = Client::new();
    client.device.required = 2;
    let accept = |client: &mut Client, low: u8| {
        for (offset, data) in [(20, &[0][..]), (20, &[3]), (8, &[0; 4]), (12, &[low, 0, 0, 0])] {
            client.write(0, offset, data).unwrap();
        }
        for (offset, data) in [(8, &[1, 0, 0, 0][..]), (12, &[1, 0, 0, 0]), (20, &[0xb])] {
            client.write(0, offset, data).unwrap();
        }
        client.read(0, 20, 1).unwrap()
    };
    assert_eq!(accept(&mut client, 1), [3], "FEATURES_OK does not stick");
    client.write(0, 20, &[0xf]).unwrap();
    assert_eq!(client.read(0, 20, 1).unwrap(), [3], "nor does it with DRIVER_OK");
    assert!(client.device.started.is_none());
    assert_eq!(accept(&mut client, 3), [0xb]);
}

#[test]
fn features_that_a_successor_does_not_have_are_known() {
    let mut client = Client::new();
    for (offset, data) in
        [(20, &[3][..]), (12, &[2, 0, 0, 0]), (8, &[1, 0, 0, 0]), (12, &[1, 0, 0, 0])]
    {
        client.write(0, offset, data).unwrap();
    }
    client.write(0, 20, &[0xb]).unwrap();
    client.succeed(client.server.protocol().state()).unwrap();
    assert_eq!([0b11, 0b10, 0b01].map(|has| client.server.missing_features(has)), [0, 0, 2]);
    // A driver that was asked for a reset has not followed when the next process starts.
    client.device.withheld = 2;
    client.server.fail(&mut client.device).unwrap();
    client.succeed(client.server.protocol().state()).unwrap();
    assert_eq!(client.server.missing_features(0b01), 2);
    client.write(0, 20, &[0]).unwrap();
    assert_eq!(client.server.missing_features(0b01), 0);
}

/// The next negotiation is about what the successor has, and about nothing that the VMM does not know.
#[test]
fn a_successor_offers_no_more_than_it_has() {
    let mut client = Client::new();
    assert_eq!(client.read(0, 4, 4).unwrap(), [3, 0, 0, 0]);
    client.succeed(client.server.protocol().state()).unwrap();
    client.server.withdraw(0b101);
    assert_eq!(client.read(0, 4, 4).unwrap(), [1, 0, 0, 0]);
    client.write(0, 0, &[1, 0, 0, 0]).unwrap();
    assert_eq!(client.read(0, 4, 4).unwrap(), [3, 0, 0, 0], "the bits of the transport");
}

#[test]
fn every_signal_reaches_the_vector_of_its_queue() {
    let mut client = Client::new();
    let fds: Vec<OwnedFd> = (0..5).map(|_| new_eventfd()).collect();
    for (vector, fd) in fds.iter().enumerate() {
        client.set_irqs([0x24, 2, vector as u32, 1], &[fd.as_fd()]).unwrap();
    }
    client.drive();
    let signal = client.device.started.as_ref().unwrap()[0].signal.clone();
    signal.signal();
    signal.signal();
    assert_eq!(client.read(1, 0x4000, 8).unwrap(), [0; 8], "no interrupt waits in the device");
    assert_eq!(fds.iter().map(count).collect::<Vec<_>>(), [0, 0, 0, 2, 0]);
    client.set_irqs([0x21, 2, 0, 0], &[]).unwrap();
    signal.signal();
    assert!(fds.iter().all(|fd| count(fd) == 0), "a disabled vector is silent");
    assert_eq!(client.read(0, 0x1000, 1).unwrap(), [1], "without MSI-X the ISR says so");
    assert_eq!(client.read(0, 0x1000, 1).unwrap(), [0], "reading clears it");
}

/// The client fills the eventfd and makes writers wait. The device does not wait.
#[test]
fn a_full_eventfd_does_not_block() {
    let mut client = Client::new();
    let fd = new_eventfd();
    client.set_irqs([0x24, 2, 3, 1], &[fd.as_fd()]).unwrap();
    client.drive();
    let signal = client.device.started.as_ref().unwrap()[0].signal.clone();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::empty()).unwrap();
    signal.signal();
    signal.signal();
}

#[test]
fn an_interrupt_is_an_eventfd() {
    let mut client = Client::new();
    let (_read, pipe) = rustix::pipe::pipe().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(client.set_irqs([0x24, 2, 0, 1], &[pipe.as_fd()]), Err(EPERM));
    assert_eq!(client.set_irqs([0x24, 2, 0, 1], &[file.as_fd()]), Err(EPERM));
    assert_eq!(client.server.protocol().faults().get(Fault::DescriptorKind), 2);
}

#[test]
fn intx_is_held_while_it_is_masked() {
    let mut client = Client::new();
    let fd = new_eventfd();
    client.set_irqs([0x24, 0, 0, 1], &[fd.as_fd()]).unwrap();
    client.drive();
    let signal = client.device.started.as_ref().unwrap()[0].signal.clone();
    client.set_irqs([0x09, 0, 0, 1], &[]).unwrap();
    signal.signal();
    assert_eq!(count(&fd), 0);
    client.set_irqs([0x11, 0, 0, 1], &[]).unwrap();
    assert_eq!(count(&fd), 1);
}

/// The device has no MSI, no error and no request interrupt. What a client does to these does not concern INTx.
#[test]
fn interrupts_that_are_not_there_are_not_intx() {
    let mut client = Client::new();
    let fd = new_eventfd();
    client.set_irqs([0x24, 0, 0, 1], &[fd.as_fd()]).unwrap();
    client.drive();
    let signal = client.device.started.as_ref().unwrap()[0].signal.clone();
    for index in [1, 3, 4] {
        client.set_irqs([0x21, index, 0, 0], &[]).unwrap();
        for action in [0x09, 0x11, 0x24] {
            assert_eq!(client.set_irqs([action, index, 0, 0], &[]), Err(EINVAL), "{action:#x}");
        }
    }
    signal.signal();
    assert_eq!(count(&fd), 1);
}

/// The device does not know which memory it has written, and does not say that it has written none.
#[test]
fn nobody_gets_a_bitmap_of_dirty_pages() {
    let mut client = Client::new();
    client.map(0, 0x10_0000).unwrap();
    let mut unmap = dma_unmap(0, 0x10_0000);
    unmap[4] |= 1;
    assert_eq!(client.ask(3, &unmap, &[]), Err(EINVAL));
    client.ask(3, &dma_unmap(0, 0x10_0000), &[]).unwrap();
}

/// A guest may write anywhere in its BARs. The client gets no error for it.
#[test]
fn a_write_that_means_nothing_is_ignored() {
    let mut client = Client::new();
    client.drive();
    for at in [0xff0, 0x2000, 0x3ffc] {
        client.write(0, at, &[0xff; 4]).unwrap();
    }
    assert_eq!(client.read(0, 20, 1).unwrap(), [0xf], "the device goes on");
}

#[test]
fn memory_comes_and_goes() {
    let mut client = Client::new();
    client.drive();
    assert_eq!(client.map(0x8_0000, 0x1000), Err(EEXIST));
    client.map(0x20_0000, 0x1000).unwrap();
    let unmap = dma_unmap(0x20_0000, 0x1000);
    assert_eq!(client.ask(3, &unmap, &[]), Ok(unmap.clone()));
    assert!(client.ask(3, &unmap, &[]).is_err(), "it is gone");
    let both = vec![(0, 0x10_0000), (0x20_0000, 0x1000)];
    assert_eq!(client.device.memory, [both, vec![(0, 0x10_0000)]]);
}

/// The platform translates: an address of the device is the place that DMA_MAP gave it, of whatever file and page.
#[test]
fn an_address_is_what_dma_map_says() {
    let mut client = Client::new();
    client.drive();
    let file = new_memory(0x4000);
    for page in 0..4_u8 {
        rustix::io::pwrite(&file, &[page; 0x1000], u64::from(page) << 12).unwrap();
    }
    for (address, page) in [(0x20_7000, 2_u8), (0x20_1000, 3), (0x20_8000, 0), (1 << 40, 1)] {
        let map = dma_map_at(address, 0x1000, u64::from(page) << 12);
        client.ask(2, &map, &[file.as_fd()]).unwrap();
        let memory = client.device.latest.as_ref().unwrap();
        let mut found = [0; 0x1000];
        memory.read(address, &mut found).unwrap();
        assert_eq!(found, [page; 0x1000], "{address:#x}");
        memory.write(address, &[page + 10; 8]).unwrap();
        let mut found = [0; 8];
        rustix::io::pread(&file, &mut found, u64::from(page) << 12).unwrap();
        assert_eq!(found, [page + 10; 8], "{address:#x}");
    }
}

/// Blocks of one file that come one by one take one descriptor. A block among them can go, and come again.
#[test]
fn neighbours_share_a_descriptor() {
    const BLOCK: u64 = 0x1000;
    const AT: u64 = 0x40_0000;
    let mut client = Client::new();
    client.drive();
    let file = new_memory(64 * BLOCK);
    let map = |client: &mut Client, index: u64| {
        let at = index * BLOCK;
        client.ask(2, &dma_map_at(AT + at, BLOCK, at), &[file.as_fd()]).unwrap();
    };
    let before = client.server.protocol().state().descriptors.len();
    (0..64).for_each(|index| map(&mut client, index));
    assert_eq!(client.server.protocol().state().descriptors.len(), before + 1);
    assert_eq!(client.server.memory().ranges().last(), Some((AT, 64 * BLOCK)));

    client.ask(3, &dma_unmap(AT + 9 * BLOCK, BLOCK), &[]).unwrap();
    assert!(client.ask(3, &dma_unmap(AT + 9 * BLOCK, BLOCK), &[]).is_err(), "it is gone");
    let ranges = |client: &Client| client.server.memory().ranges().skip(1).collect::<Vec<_>>();
    let parts = vec![(AT, 9 * BLOCK), (AT + 10 * BLOCK, 54 * BLOCK)];
    assert_eq!(ranges(&client), parts);
    assert_eq!(client.server.protocol().state().descriptors.len(), before + 2);
    assert_eq!(client.device.memory.last().unwrap()[1..], parts);
    client.succeed(client.server.protocol().state()).unwrap();
    assert_eq!(ranges(&client), parts, "in another process");
    for part in [0_u64, 8, 10, 63] {
        let mut found = [0; 8];
        rustix::io::pwrite(&file, &part.to_ne_bytes(), part * BLOCK).unwrap();
        client.server.memory().read(AT + part * BLOCK, &mut found).unwrap();
        assert_eq!(u64::from_ne_bytes(found), part);
    }
    map(&mut client, 9);
    assert_eq!(client.server.protocol().state().descriptors.len(), before + 1);
    client.ask(3, &dma_unmap(AT, 64 * BLOCK), &[]).unwrap();
    assert!(ranges(&client).is_empty());
    assert_eq!(client.server.protocol().state().descriptors.len(), before);
}

/// When the client has the reply, it may use unmapped memory for something else. When the status is 0,
/// the driver may use what it gave the device.
#[test]
fn a_reply_comes_when_the_device_has_followed() {
    let mut client = Client::new();
    client.drive();
    client.map(0x20_0000, 0x1000).unwrap();
    client.device.is_slow = true;
    let unmap = dma_unmap(0x20_0000, 0x1000);
    client.send(3, 0, &unmap, &[]);
    // Kicks and the next change wait behind it.
    client.send(10, 0x10, &access(0, 0x3008, 2, &[2, 0]), &[]);
    client.send(10, 0, &access(0, 20, 1, &[0]), &[]);
    for _ in 0..3 {
        assert!(!client.is_answered());
        assert_eq!((client.device.memory.len(), client.device.kicks.len()), (2, 0));
    }
    client.device.is_busy = false;
    assert!(client.is_answered());
    assert_eq!(client.reply(3), Ok(unmap));
    // The reset is under way.
    assert_eq!((client.device.kicks.len(), client.device.resets), (1, 1));
    client.send(9, 0, &access(0, 20, 1, &[]), &[]);
    assert!(!client.is_answered());
    client.device.is_busy = false;
    assert!(client.is_answered());
    client.reply(10).unwrap();
    assert_eq!(client.reply(9).unwrap()[16..], [0]);
    // DEVICE_RESET of a device that runs is held back likewise.
    client.device.is_slow = false;
    client.map(0x30_0000, 0x1000).unwrap();
    client.set_up();
    client.device.is_slow = true;
    client.send(13, 0, &[], &[]);
    assert!(!client.is_answered());
    client.device.is_busy = false;
    assert!(client.is_answered());
    client.reply(13).unwrap();
}

#[test]
fn a_client_that_goes_while_the_device_follows_is_noticed_afterwards() {
    for replies in [0, 0x10] {
        let mut client = Client::new();
        client.drive();
        client.device.is_slow = true;
        client.send(3, replies, &dma_unmap(0, 0x10_0000), &[]);
        assert!(!client.is_answered());
        client.socket.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(client.server.process(&mut client.device).unwrap());
        client.device.is_busy = false;
        let ended = client.server.process(&mut client.device);
        assert!(matches!(ended, Err(Error::Closed)), "{ended:?}");
    }
}

#[test]
fn private_memory_is_refused_with_needs_reset() {
    let mut client = Client::new();
    client.ask(2, &dma_map(0, 0x10_0000), &[]).unwrap();
    client.write(0, 20, &[3]).unwrap();
    client.write(0, 8, &[1, 0, 0, 0]).unwrap();
    client.write(0, 12, &[1, 0, 0, 0]).unwrap();
    client.write(0, 20, &[0xb]).unwrap();
    client.write(0, 32, &[0, 0x10, 0, 0]).unwrap();
    client.write(0, 28, &[1, 0]).unwrap();
    client.write(0, 20, &[0xf]).unwrap();
    assert!(client.device.started.is_none());
    assert_eq!(client.read(0, 20, 1).unwrap(), [0x4f]);
    // A device that did not start is neither kicked nor reset.
    client.write(0, 0x3000, &[0, 0]).unwrap();
    assert_eq!(client.server.protocol().faults().get(Fault::Kick), 1);
    client.write(0, 20, &[0]).unwrap();
    assert_eq!((client.device.kicks.len(), client.device.resets), (0, 0));
}

/// With a virtual IOMMU that translates, QEMU maps each page by itself, and neighbours are not so in the file.
#[test]
fn queues_in_single_pages_are_refused_with_needs_reset() {
    let mut client = Client::new();
    for page in 0..4 {
        client.map(page << 12, 0x1000).unwrap();
    }
    client.set_up();
    assert!(client.device.started.is_some(), "128 descriptors fit into a page");
    client.write(0, 20, &[0]).unwrap();
    for (offset, data) in [
        (20, &[3][..]),
        (8, &[1, 0, 0, 0]),
        (12, &[1, 0, 0, 0]),
        (20, &[0xb]),
        (32, &[0, 0x18, 0, 0]),
        (28, &[1, 0]),
        (20, &[0xf]),
    ] {
        client.write(0, offset, data).unwrap();
    }
    assert!(client.device.started.is_none());
    assert_eq!(client.read(0, 20, 1).unwrap(), [0x4f]);
}

#[test]
fn memory_is_refused_by_its_reason() {
    let mut client = Client::new();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(client.ask(2, &dma_map(0, 0x1000), &[file.as_fd()]), Err(EPERM));
    let sealed = memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&sealed, 0x1000).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    assert_eq!(client.ask(2, &dma_map(0, 0x1000), &[sealed.as_fd()]), Err(ENOMEM));
    let faults = client.server.protocol().faults();
    assert_eq!((faults.get(Fault::DmaFile), faults.get(Fault::DmaRefused)), (1, 1));
}

#[test]
fn only_a_reset_clears_the_status() {
    let mut client = Client::new();
    client.drive();
    client.write(0, 20, &[3]).unwrap();
    assert_eq!(client.server.protocol().faults().get(Fault::Register), 1);
    assert_eq!(client.read(0, 20, 1).unwrap(), [0xf], "the device goes on");
    assert_eq!(client.device.resets, 0);
    client.write(0, 20, &[0]).unwrap();
    assert_eq!(client.device.resets, 1);
}

#[test]
fn each_mistake_has_its_error() {
    let mut client = Client::new();
    assert_eq!(client.ask(99, &[], &[]), Err(ENOSYS));
    assert_eq!(client.ask(5, &[0; 8], &[]), Err(EINVAL));
    assert_eq!(client.read(0, 0x4000, 1), Err(EINVAL));
    assert_eq!(client.read(0, u64::MAX, 4), Err(EINVAL));
    assert_eq!(client.read(99, 0, 4), Err(EINVAL));
    assert_eq!(client.set_irqs([0x24, 2, 0, 99], &[]), Err(EINVAL));
    assert_eq!(client.set_irqs([0x24, 2, u32::MAX, u32::MAX], &[]), Err(EINVAL));
    assert_eq!(client.set_irqs([0x3f, 2, 0, 1], &[]), Err(EINVAL));
    assert_eq!(client.map(1, 0x1000), Err(EINVAL));
    let faults = client.server.protocol().faults();
    for fault in [
        Fault::UnknownCommand,
        Fault::ShortPayload,
        Fault::Region,
        Fault::IrqAction,
        Fault::DmaInvalid,
    ] {
        assert_eq!(faults.get(fault), 1, "{fault}");
    }
    assert_eq!((faults.get(Fault::RegionBounds), faults.get(Fault::Irq)), (2, 2));
}

#[test]
fn a_connection_without_its_version_ends() {
    let mut client = Client::unnegotiated();
    client.send(4, 0, &[0; 16], &[]);
    let Err(Error::Protocol(error)) = client.server.process(&mut client.device) else {
        panic!("the connection goes on");
    };
    assert!(matches!(error.downcast_ref(), Some(ProtocolError::NoVersion)));
}

#[test]
fn a_successor_goes_on() {
    let mut client = Client::new();
    let fds: Vec<OwnedFd> = (0..5).map(|_| new_eventfd()).collect();
    for (vector, fd) in fds.iter().enumerate().filter(|(vector, _)| *vector != 2) {
        client.set_irqs([0x24, 2, vector as u32, 1], &[fd.as_fd()]).unwrap();
    }
    client.write(0, 16, &[1, 0]).unwrap();
    client.write(7, 4, &[6, 0]).unwrap();
    client.map(0x40_0000, 0x1000).unwrap();
    client.ask(2, &dma_map(0x80_0000, 0x1000), &[]).unwrap();
    client.drive();
    let before = [(7, 0, 256), (0, 0, 56), (0, 0x2000, 256)]
        .map(|(region, at, len)| client.read(region, at, len).unwrap());
    let memory: Vec<_> = client.server.memory().ranges().collect();

    client.succeed(client.server.protocol().state()).unwrap();
    let queues = client.server.queues();
    let [QueueSetup { index: 2, layout, kick: None, signal, .. }] = queues.as_slice() else {
        panic!("only queue 2 runs");
    };
    assert_eq!((layout.size, layout.desc, layout.used), (128, 0x1000, 0x3000));
    signal.signal();
    assert_eq!(fds.iter().map(count).collect::<Vec<_>>(), [0, 0, 0, 1, 0]);
    assert_eq!(client.server.memory().ranges().collect::<Vec<_>>(), memory);
    let after = [(7, 0, 256), (0, 0, 56), (0, 0x2000, 256)]
        .map(|(region, at, len)| client.read(region, at, len).unwrap());
    assert_eq!(before, after);
    client.write(0, 0x3008, &[2, 0]).unwrap();
    assert_eq!(client.device.kicks, [2]);

    client.server.fail(&mut client.device).unwrap();
    assert_eq!(fds.iter().map(count).collect::<Vec<_>>(), [0, 1, 0, 0, 0], "the vector of changes");
    assert_eq!(client.read(0, 20, 1).unwrap(), [0x4f], "DEVICE_NEEDS_RESET");
    client.write(0, 20, &[0]).unwrap();
    assert_eq!(client.device.resets, 1);
    client.ask(3, &dma_unmap(0x80_0000, 0x1000), &[]).unwrap();
    client.ask(3, &dma_unmap(0x40_0000, 0x1000), &[]).unwrap();
    client.set_up();
    assert!(client.device.started.is_some());
    assert_eq!(client.read(0, 20, 1).unwrap(), [0xf]);
}

/// Whatever the state is, it is refused or makes a connection.
#[test]
fn a_state_that_was_altered_does_no_harm() {
    let mut client = Client::new();
    let fds: Vec<OwnedFd> = (0..3).map(|_| new_eventfd()).collect();
    for (vector, fd) in fds.iter().enumerate() {
        client.set_irqs([0x24, 2, vector as u32, 1], &[fd.as_fd()]).unwrap();
    }
    client.drive();
    let ConnectionState { bytes, descriptors } = client.server.protocol().state();
    let mut try_with = |bytes: Vec<u8>, count: usize| {
        let descriptors = descriptors[..count].to_vec();
        client.succeed(ConnectionState { bytes, descriptors })?;
        client.server.queues();
        client.server.fail(&mut client.device)
    };
    for count in 0..descriptors.len() {
        assert!(matches!(
            try_with(bytes.clone(), count),
            Err(ResumeError::Descriptors { named: 4, there }) if there == count
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

/// Counts what it keeps.
struct Counting(std::sync::Arc<std::sync::Mutex<Vec<Change>>>);

impl Journal for Counting {
    fn keep(&mut self, _state: &ConnectionState, change: Change) {
        self.0.lock().unwrap().push(change);
    }
}

#[test]
fn a_journal_keeps_what_changes() {
    let mut client = Client::new();
    let kept = std::sync::Arc::default();
    client.server.keep_in(Box::new(Counting(std::sync::Arc::clone(&kept))));
    let changes = || std::mem::take(&mut *kept.lock().unwrap());
    assert_eq!(changes(), [Change::Descriptors], "what was said before");
    client.map(0, 0x10_0000).unwrap();
    assert_eq!(changes(), [Change::Descriptors]);
    client.set_up();
    assert_eq!(changes(), [Change::Bytes; 13]);
    client.read(0, 20, 1).unwrap();
    client.write(0, 0x3008, &[2, 0]).unwrap();
    assert_eq!(changes(), [], "kicks and reads change nothing");
    client.set_irqs([0x24, 2, 0, 1], &[new_eventfd().as_fd()]).unwrap();
    assert_eq!(changes(), [Change::Descriptors]);
    for _ in 0..64 {
        client.send(10, 0x10, &access(0, 22, 2, &[2, 0]), &[]);
    }
    client.read(0, 22, 2).unwrap();
    assert_eq!(changes(), [Change::Bytes], "many posted writes change the state once");
}

/// A client whose connection was ended because of what it has sent finds the end of the connection.
#[test]
fn who_sends_nonsense_finds_the_end() {
    let mut client = Client::new();
    (&client.socket).write_all(&[0xff; 64]).unwrap();
    client.server.process(&mut client.device).unwrap_err();
    let Client { server, mut socket, .. } = client;
    drop(server);
    assert_eq!(socket.read(&mut [0; 64]).unwrap(), 0);
}

/// A server that is killed while it handles messages takes none of them with it: its successor handles them, with their
/// descriptors, and the client gets its replies.
#[test]
fn the_successor_of_a_server_that_is_killed_answers() {
    let mut client = Client::new();
    client.set_up();
    let state = client.server.protocol().state();
    client.device.is_slow = true;
    let memory = new_memory(0x10_0000);
    client.send(10, 0x10, &access(0, 0x3008, 2, &[2, 0]), &[]);
    client.send(2, 0, &dma_map(0, 0x10_0000), &[memory.as_fd()]);
    client.send(9, 0, &access(0, 20, 1, &[]), &[]);
    assert!(!client.is_answered(), "the device does not follow yet");
    client.succeed(state).unwrap();
    while client.server.process(&mut client.device).unwrap() {}
    client.reply(2).unwrap();
    assert_eq!(client.reply(9).unwrap()[16..], [0xf], "the status");
    assert_eq!(client.device.memory.last().map(Vec::len), Some(1));
    assert_eq!(client.device.kicks, [2]);
    // Nothing is left that was handled.
    client.map(0x20_0000, 0x10_0000).unwrap();
    assert_eq!(client.device.memory.last().map(Vec::len), Some(2));
}

/// What was answered, or kept, is not handled once more.
#[test]
fn the_successor_of_a_server_that_has_answered_repeats_nothing() {
    let mut client = Client::new();
    client.drive();
    for _ in 0..3 {
        client.send(10, 0x10, &access(0, 0x3008, 2, &[2, 0]), &[]);
    }
    client.read(0, 20, 1).unwrap();
    client.succeed(client.server.protocol().state()).unwrap();
    assert_eq!(client.read(0, 20, 1), Ok(vec![0xf]));
    assert!(client.device.kicks.is_empty());
    assert_eq!(rustix::io::ioctl_fionread(&client.socket), Ok(0), "there is a second reply");
}
