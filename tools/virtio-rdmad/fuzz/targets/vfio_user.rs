// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vfio-user client that sends what the fuzzer says: messages with wrong details, or plain bytes.
//!
//! The following must hold:
//! - Every command is answered once and in order, unless it asks for no reply.
//! - Only a device that does not run is started, and only a running device is kicked or reset.
//! - No file descriptor is left open.

#![no_main]

use std::collections::VecDeque;
use std::sync::Arc;

use fuzz::{Conversation, Peer, Program};
use libfuzzer_sys::fuzz_target;
use memory::GuestMemory;
use ring::{Signal, SplitQueue};
use testkit::socket::{longs, words};
use testkit::vfio_user::command::{
    DMA_MAP, DMA_UNMAP, REGION_READ, REGION_WRITE, SET_IRQS, VERSION,
};
use testkit::vfio_user::{access, dma_map, message, CONFIG, HEADER, NO_REPLY, TYPE};
use vfio_user::VfioUser;
use virtio_transport::{Backend, QueueSetup, Server};

const QUEUES: u16 = 5;

/// A virtio device that checks the order in which its functions are called.
#[derive(Default)]
struct Device {
    rings: Option<Vec<(SplitQueue, Arc<dyn Signal>)>>,
}

impl Backend for Device {
    fn features(&self) -> u64 {
        3
    }

    /// The server accepts only features that were offered, and this device has one layout of queues.
    fn set_features(&mut self, _: u64) {}

    fn config(&self) -> &[u8] {
        &[0xc5; 256]
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn queue_max_size(&self, queue: u16) -> u16 {
        16 << queue
    }

    fn start(&mut self, memory: &GuestMemory, queues: Vec<QueueSetup>) -> Result<(), String> {
        assert!(self.rings.is_none(), "started twice");
        let mut rings = Vec::new();
        for QueueSetup { index, layout, base, signal, .. } in queues {
            assert!(layout.size.is_power_of_two() && layout.size <= self.queue_max_size(index));
            let ring = SplitQueue::new(memory, layout, base).map_err(|error| error.to_string())?;
            rings.push((ring, signal));
        }
        self.rings = Some(rings);
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMemory) {
        for (ring, _) in self.rings.as_mut().expect("a running device") {
            let _ = ring.set_memory(memory);
        }
    }

    fn kick(&mut self, queue: u16) {
        assert!(queue < QUEUES);
        for (ring, signal) in self.rings.as_mut().expect("a running device") {
            if let Ok(Some(chain)) = ring.pop() {
                let _ = ring.push(chain.head, 0);
                let _ = ring.publish();
            }
            signal.signal();
        }
    }

    fn reset(&mut self) {
        assert!(self.rings.take().is_some(), "reset of a device that does not run");
    }

    fn freeze(&mut self) {
        unreachable!("vfio-user pauses no device");
    }

    fn thaw(&mut self, _queues: Vec<QueueSetup>) -> Result<(), String> {
        unreachable!("vfio-user pauses no device");
    }
}

/// The server, the device behind it, and the peer.
struct World {
    peer: Peer,
    server: Server<VfioUser>,
    device: Device,
    /// The IDs and commands of the messages that the server has to answer.
    asked: VecDeque<(u16, u16)>,
    id: u16,
}

impl World {
    /// Sends a command with its payload, and mostly with the file descriptors that belong to it.
    fn send(&mut self, command: u16, flags: u32, payload: &[u8], program: &mut Program<'_>) {
        self.id = self.id.wrapping_add(1);
        let message = message(self.id, command, flags, payload);
        let fds = match program.u8() {
            255 => self.peer.fds(program),
            _ if command == DMA_MAP => vec![self.peer.memory()],
            _ if command == SET_IRQS => vec![self.peer.event(); program.below(4)],
            _ => Vec::new(),
        };
        let sent = self.peer.send(&message, &fds);
        if sent && flags & TYPE == 0 && flags & NO_REPLY == 0 {
            self.asked.push_back((self.id, command));
        }
    }

    /// Sends a command that is right but for what the program changes.
    fn command(&mut self, program: &mut Program<'_>) {
        let command = u16::from(program.u8() % 15);
        let mut payload = match command {
            DMA_MAP | DMA_UNMAP => dma(command, program),
            REGION_READ => {
                let (region, offset, len) = place(program);
                access(region, offset, len.into(), &[])
            }
            REGION_WRITE => {
                let (region, offset, len) = place(program);
                access(region, offset, len.into(), &program.array::<8>()[..len.min(8).into()])
            }
            SET_IRQS => {
                let flags = program.pick(&[0x24, 0x21, 0x22, 9, 17, 0x3f]);
                words(&[20, flags, program.pick(&[2, 0, 1]), program.u8().into(), 2, 0x0101_0101])
            }
            _ => words(&[program.pick(&[32, 16, 0]), 0, program.u8().into(), 0, 0, 0, 0, 0]),
        };
        program.patch(&mut payload);
        if program.u8() == 255 {
            payload.truncate(program.u8().into());
        }
        let flags = program.pick(&[0, 0, 0, NO_REPLY, 1, 0x21]);
        self.send(command, flags, &payload, program);
    }

    /// Sends a command that writes to a register of the PCI device.
    fn write(&mut self, offset: u64, data: &[u8], program: &mut Program<'_>) {
        let len = u32::try_from(data.len()).expect("a register");
        self.send(REGION_WRITE, NO_REPLY, &access(0, offset, len, data), program);
    }

    /// Sets the device up as a driver does, up to DRIVER_OK, with one queue or more.
    fn drive(&mut self, program: &mut Program<'_>) {
        for status in [0, 1, 3] {
            self.write(20, &[status], program);
        }
        self.write(8, &[1, 0, 0, 0], program);
        self.write(12, &[1, 0, 0, 0], program);
        self.write(20, &[0xb], program);
        for queue in 0..=u8::try_from(program.below(QUEUES.into())).expect("a few") {
            self.write(22, &[queue, 0], program);
            self.write(26, &[queue, 0], program);
            for (register, addr) in [(32, 0), (40, 0x1000), (48, 0x2000)] {
                let shift = program.pick(&[0, 0, 2, 0x8000]);
                self.write(register, &u32::to_le_bytes(addr + shift), program);
            }
            self.write(28, &[1, 0], program);
        }
        self.write(20, &[0xf], program);
    }
}

impl Conversation for World {
    fn new() -> Self {
        let (peer, socket) = Peer::new();
        let device = Device::default();
        let server = vfio_user::serve(socket, 42, &device).expect("few queues");
        Self { peer, server, device, asked: VecDeque::new(), id: 0 }
    }

    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn messages(&mut self, program: &mut Program<'_>) {
        self.send(VERSION, 0, &[0; 4], &mut Program::new(&[]));
        while let Some(operation) = program.operation() {
            match operation % 9 {
                0..=4 => self.command(program),
                8 => {
                    let status = program.pick(&[0, 1, 3, 0xb, 0xf, 0x83, 0x40]);
                    self.write(20, &[status], program);
                }
                5 => {
                    self.send(DMA_MAP, 0, &dma_map(0, 0x1_0000, 0), program);
                    self.drive(program);
                }
                6 => self.server.needs_reset(),
                _ if !self.process(false) => return,
                _ => {}
            }
        }
        self.process(false);
    }

    fn process(&mut self, plain: bool) -> bool {
        let going = fuzz::serve(&mut self.server, &mut self.device);
        let received = self.peer.received();
        while let Some(header) = received.get(..HEADER) {
            let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
            let size = usize::from(half(4));
            let message = (half(0), half(2));
            assert!(size >= HEADER && header[8] & 0xf == 1, "no reply");
            assert!(received.len() >= size, "half a reply");
            if !plain {
                assert_eq!(self.asked.pop_front(), Some(message), "answered out of order");
            }
            received.drain(..size);
        }
        assert!(plain || !going || self.asked.is_empty(), "not answered");
        going
    }
}

/// Returns a region, an offset in it and a length for an access.
fn place(program: &mut Program<'_>) -> (u32, u64, u8) {
    let len = program.pick(&[1, 2, 4, 8, 3, 0, 64]);
    match program.u8() % 6 {
        0 => (CONFIG, program.u8().into(), len),
        1 => (0, 0x3000 + u64::from(program.u8() % 32), len),
        2 => (0, program.pick(&[0x1000, 0x2000, 0x20f8, 0x3ffc]), len),
        3 => (program.u8().into(), program.u64(), len),
        _ => (0, u64::from(program.u8() & 63), len),
    }
}

/// Returns the payload of a command that maps or unmaps memory.
fn dma(command: u16, program: &mut Program<'_>) -> Vec<u8> {
    let page = |program: &mut Program<'_>| u64::from(program.u8() & 15) << 12;
    let flags = program.pick(&[3, 1, 2, 0]);
    let mut payload = words(&[if command == DMA_MAP { 32 } else { 24 }, flags]);
    if command == DMA_MAP {
        payload.extend(longs(&[page(program)]));
    }
    let (address, size) = (page(program), page(program));
    let address = program.pick(&[0, address, 0u64.wrapping_sub(0x2000)]);
    let size = program.pick(&[0x1_0000, size, u64::MAX]);
    payload.extend(longs(&[address, size]));
    payload
}

// Signals keep descriptors open until the thread ends. These are opened before descriptors are counted.
fuzz_target!(init: descriptor::prepare().unwrap(), |bytes: &[u8]| fuzz::connect::<World>(bytes));
