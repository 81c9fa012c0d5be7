// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio PCI device behind a socket of vfio-user (QEMU docs/interop/vfio-user.rst).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use memory::GuestMemory;
use ring::Layout;
use testkit::vfio_user::{self as vfio, command, CONFIG, EVENTFD, HEADER, MSIX, TYPE};

use super::attached::{Attach, Memory, Port, SPARE};
use super::wire::{connect, receive, send, word, Signals};
use crate::outcome::{gone, Outcome};

/// The message ID of a client that awaits each reply.
const ID: u16 = 7;
/// The type of a reply, and the flag of one that says why a command failed.
const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;
/// How long a reset may take.
const RESET: Duration = Duration::from_secs(30);
/// The bits of the device status (VIRTIO 1.3, section 2.1).
const ACKNOWLEDGED: u8 = 3;
const FEATURES_OK: u8 = 8;
const DRIVER_OK: u8 = 4;
const NEEDS_RESET: u8 = 0x40;
/// The PCI device ID, and the first one of a device without a legacy interface (VIRTIO 1.3, section 4.1.2).
const DEVICE_ID: u64 = 2;
const MODERN: u16 = 0x1040;
/// Capabilities of PCI, and the structures of VIRTIO 1.3, section 4.1.4.
const CAPABILITIES: usize = 0x34;
const CAP_VENDOR: u8 = 9;
const CAP_MSIX: u8 = 0x11;
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_DEVICE: u8 = 4;
/// Memory accesses and bus mastering, in the command register.
const COMMAND: u64 = 4;
const ENABLE: [u8; 2] = [6, 0];

/// The offsets of the common configuration (VIRTIO 1.3, section 4.1.4.3).
mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    pub const DEVICE_FEATURE: u64 = 4;
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const CONFIG_VECTOR: u64 = 16;
    pub const NUM_QUEUES: u64 = 18;
    pub const STATUS: u64 = 20;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_NOTIFY_OFF: u64 = 30;
    pub const QUEUE_DESC: u64 = 32;
    pub const QUEUE_DRIVER: u64 = 40;
    pub const QUEUE_DEVICE: u64 = 48;
}

/// A socket of vfio-user.
pub struct VfioUser(PathBuf);

impl VfioUser {
    /// Returns the device behind this socket.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }
}

impl Attach for VfioUser {
    fn attach(&self, guest: &Memory) -> Outcome<Box<dyn Port>> {
        let link = Link { socket: connect(&self.0)? };
        // The capabilities are text behind the version.
        let version = link.ask(command::VERSION, &[0; 4], &[])?;
        let migrates = String::from_utf8_lossy(&version).contains("\"migration\"");
        let file = guest.file.try_clone().map_err(gone)?;
        let spare = guest.bytes - SPARE;
        link.ask(command::DMA_MAP, &vfio::dma_map(0, spare, 0), &[file.as_fd()])?;
        link.ask(command::DMA_MAP, &vfio::dma_map(spare, SPARE, spare), &[file.as_fd()])?;
        let pci = Pci::find(&link)?;
        let signals = Signals::new(std::iter::empty());
        let notify = BTreeMap::new();
        let port = Client { link, pci, file, spare, has_spare: true, migrates, signals, notify };
        Ok(Box::new(port))
    }

    fn name(&self) -> String {
        format!("vfio-user {}", self.0.display())
    }
}

/// The connection.
struct Link {
    socket: UnixStream,
}

impl Link {
    /// Sends a command, and returns the payload of its reply.
    fn ask(&self, number: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Outcome<Vec<u8>> {
        send(&self.socket, &vfio::message(ID, number, 0, payload), fds)?;
        let header = receive(&self.socket, HEADER)?;
        let (first, flags) = (word(&header, 0), word(&header, 8));
        if first != u32::from(ID) | u32::from(number) << 16 || flags & TYPE != REPLY {
            return Err(gone(format!("a wrong reply to command {number} of vfio-user")));
        }
        let payload = receive(&self.socket, (word(&header, 4) as usize).saturating_sub(HEADER))?;
        if flags & ERROR != 0 {
            let errno = word(&header, 12);
            return Err(gone(format!("command {number} of vfio-user fails with errno {errno}")));
        }
        Ok(payload)
    }

    fn read(&self, region: u32, at: u64, len: usize) -> Outcome<Vec<u8>> {
        let count = u32::try_from(len).map_err(gone)?;
        let reply = self.ask(command::REGION_READ, &vfio::access(region, at, count, &[]), &[])?;
        let data = reply.get(16..16 + len).map(<[u8]>::to_vec);
        data.ok_or_else(|| gone("a short reply to REGION_READ"))
    }

    fn write(&self, region: u32, at: u64, data: &[u8]) -> Outcome {
        let count = u32::try_from(data.len()).map_err(gone)?;
        self.ask(command::REGION_WRITE, &vfio::access(region, at, count, data), &[]).map(|_| ())
    }
}

/// A structure in a BAR.
#[derive(Clone, Copy)]
struct Place {
    bar: u32,
    offset: u64,
}

/// Where the structures of the device are.
struct Pci {
    common: Place,
    notify: Place,
    multiplier: u64,
    device: Place,
    /// The number of MSI-X vectors.
    vectors: u16,
}

impl Pci {
    /// Reads the capabilities of the device.
    fn find(link: &Link) -> Outcome<Self> {
        let space = link.read(CONFIG, 0, 256)?;
        let (mut places, mut multiplier, mut vectors) = (BTreeMap::new(), 0, 0);
        let mut at = usize::from(space[CAPABILITIES] & !3);
        for _ in 0..48 {
            if at == 0 || at + 20 > space.len() {
                break;
            }
            let kind = space[at + 3];
            match space[at] {
                CAP_VENDOR => {
                    let place =
                        Place { bar: space[at + 4].into(), offset: word(&space, at + 8).into() };
                    places.entry(kind).or_insert(place);
                    if kind == CFG_NOTIFY {
                        multiplier = word(&space, at + 16).into();
                    }
                }
                CAP_MSIX => {
                    vectors = (u16::from_le_bytes([space[at + 2], space[at + 3]]) & 0x7ff) + 1;
                }
                _ => {}
            }
            at = usize::from(space[at + 1] & !3);
        }
        let place = |kind| {
            places.get(&kind).copied().ok_or_else(|| gone(format!("no virtio structure {kind}")))
        };
        let (common, notify, device) = (place(CFG_COMMON)?, place(CFG_NOTIFY)?, place(CFG_DEVICE)?);
        Ok(Self { common, notify, multiplier, device, vectors })
    }

    /// Returns the vector of a queue. The first one is that of configuration changes.
    fn vector(&self, queue: u16) -> u16 {
        match self.vectors {
            0 => u16::MAX,
            1 => 0,
            vectors => 1 + queue % (vectors - 1),
        }
    }
}

/// The client of a device.
struct Client {
    link: Link,
    pci: Pci,
    /// The file of the memory.
    file: OwnedFd,
    /// The address of the memory that the device can lose, and whether it has it.
    spare: u64,
    has_spare: bool,
    /// Whether the device says that it can be migrated.
    migrates: bool,
    signals: Signals,
    /// The offsets at which queues are kicked.
    notify: BTreeMap<u16, u64>,
}

impl Client {
    /// Takes the memory that the device can lose, or gives it back.
    fn map_spare(&mut self, is_there: bool) -> Outcome {
        if self.has_spare == is_there {
            return Ok(());
        }
        self.has_spare = is_there;
        if is_there {
            let map = vfio::dma_map(self.spare, SPARE, self.spare);
            return self.link.ask(command::DMA_MAP, &map, &[self.file.as_fd()]).map(|_| ());
        }
        let unmap = vfio::dma_unmap(self.spare, SPARE);
        self.link.ask(command::DMA_UNMAP, &unmap, &[]).map(|_| ())
    }

    fn get(&self, at: u64, len: usize) -> Outcome<Vec<u8>> {
        self.link.read(self.pci.common.bar, self.pci.common.offset + at, len)
    }

    fn put(&self, at: u64, data: &[u8]) -> Outcome {
        self.link.write(self.pci.common.bar, self.pci.common.offset + at, data)
    }

    fn status(&self) -> Outcome<u8> {
        Ok(self.get(common::STATUS, 1)?[0])
    }

    fn short(&self, at: u64) -> Outcome<u16> {
        let bytes = self.get(at, 2)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn set_up(&mut self, index: u16, layout: &Layout) -> Outcome {
        self.put(common::QUEUE_SELECT, &index.to_le_bytes())?;
        self.put(common::QUEUE_SIZE, &layout.size.to_le_bytes())?;
        self.put(common::QUEUE_VECTOR, &self.pci.vector(index).to_le_bytes())?;
        for (at, address) in [
            (common::QUEUE_DESC, layout.desc),
            (common::QUEUE_DRIVER, layout.avail),
            (common::QUEUE_DEVICE, layout.used),
        ] {
            let halves = address.to_le_bytes();
            self.put(at, &halves[..4])?;
            self.put(at + 4, &halves[4..])?;
        }
        let offset = u64::from(self.short(common::QUEUE_NOTIFY_OFF)?) * self.pci.multiplier;
        self.notify.insert(index, self.pci.notify.offset + offset);
        self.put(common::QUEUE_ENABLE, &[1, 0])
    }

    fn set_irqs(&self) -> Outcome {
        for (index, call) in &self.signals.calls {
            let vector = self.pci.vector(*index);
            if vector != u16::MAX {
                let irqs = vfio::set_irqs([EVENTFD, MSIX, vector.into(), 1]);
                self.link.ask(command::SET_IRQS, &irqs, &[call.as_fd()])?;
            }
        }
        Ok(())
    }
}

impl Port for Client {
    fn offered(&mut self) -> Outcome<u64> {
        let mut offered = 0;
        for half in [0_u32, 1] {
            self.put(common::DEVICE_FEATURE_SELECT, &half.to_le_bytes())?;
            offered |= u64::from(word(&self.get(common::DEVICE_FEATURE, 4)?, 0)) << (32 * half);
        }
        Ok(offered)
    }

    fn is_legacy(&mut self) -> Outcome<Option<bool>> {
        let id = self.link.read(CONFIG, DEVICE_ID, 2)?;
        Ok(Some(u16::from_le_bytes([id[0], id[1]]) < MODERN))
    }

    fn offers_migration(&mut self) -> Outcome<Option<bool>> {
        Ok(Some(self.migrates))
    }

    fn queue_count(&mut self) -> Outcome<Option<u16>> {
        Ok(Some(self.short(common::NUM_QUEUES)?))
    }

    fn queue_max_size(&mut self, queue: u16) -> Outcome<Option<u16>> {
        self.put(common::QUEUE_SELECT, &queue.to_le_bytes())?;
        Ok(Some(self.short(common::QUEUE_SIZE)?))
    }

    fn config(&mut self, len: usize) -> Outcome<Vec<u8>> {
        self.link.read(self.pci.device.bar, self.pci.device.offset, len)
    }

    fn write_config(&mut self, at: usize, bytes: &[u8]) -> Outcome<bool> {
        self.link.write(self.pci.device.bar, self.pci.device.offset + at as u64, bytes)?;
        Ok(true)
    }

    fn negotiate(&mut self, features: u64) -> Outcome<Option<bool>> {
        self.put(common::STATUS, &[ACKNOWLEDGED])?;
        for half in [0_u32, 1] {
            let word = (features >> (32 * half)).to_le_bytes();
            self.put(common::DRIVER_FEATURE_SELECT, &half.to_le_bytes())?;
            self.put(common::DRIVER_FEATURE, &word[..4])?;
        }
        self.put(common::STATUS, &[ACKNOWLEDGED | FEATURES_OK])?;
        Ok(Some(self.status()? & FEATURES_OK != 0))
    }

    fn start(&mut self, _: &GuestMemory, queues: &BTreeMap<u16, Layout>) -> Outcome {
        self.signals = Signals::new(queues.keys().copied());
        self.set_irqs()?;
        self.put(common::CONFIG_VECTOR, &[0, 0])?;
        for (index, layout) in queues {
            self.set_up(*index, layout)?;
        }
        self.link.write(CONFIG, COMMAND, &ENABLE)?;
        self.put(common::STATUS, &[ACKNOWLEDGED | FEATURES_OK | DRIVER_OK])
    }

    fn kick(&mut self, queue: u16) -> Outcome {
        let at = *self.notify.get(&queue).ok_or_else(|| gone("no such queue"))?;
        self.link.write(self.pci.notify.bar, at, &queue.to_le_bytes())
    }

    fn rest(&mut self, at_most: Duration) -> Outcome {
        self.signals.rest(&self.link.socket, at_most)
    }

    fn interrupts(&mut self, queue: u16) -> u64 {
        self.signals.count(queue)
    }

    fn begin_reset(&mut self) -> Outcome<bool> {
        self.put(common::STATUS, &[0]).map(|()| true)
    }

    fn reset(&mut self) -> Outcome {
        let deadline = Instant::now() + RESET;
        self.begin_reset()?;
        while self.status()? != 0 {
            if Instant::now() > deadline {
                return Err(gone("the reset does not end"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.map_spare(true)
    }

    fn set_spare(&mut self, _: &Memory, is_there: bool) -> Outcome<bool> {
        self.map_spare(is_there)?;
        Ok(true)
    }

    fn needs_reset(&mut self) -> Outcome<Option<bool>> {
        Ok(Some(self.status()? & NEEDS_RESET != 0))
    }
}
