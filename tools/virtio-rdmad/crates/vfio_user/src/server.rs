// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection: messages in, replies out.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use memory::{GuestMemory, MapError, Region};
use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::channel::{Channel, ChannelError, Message};
use crate::interrupt::Interrupts;
use crate::pci::{self, ConfigSpace};
use crate::registers::{Action, Registers};
use crate::wire::{self, command, header_flags, irq, region, set_irqs, Header};
use crate::{Backend, Fault, Faults, Setup, MAX_QUEUES};

/// Messages handled before the caller gets to do something else.
const BATCH: usize = 256;
/// Most ranges without a file descriptor that are remembered, for a better error message.
const MAX_UNSHARED: usize = 64;
/// Most bytes of one region access; no register or structure is longer.
const MAX_ACCESS: usize = 4096;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The client closed its end.
    #[error("the client closed the connection")]
    Closed,
    /// The client speaks another protocol, or none.
    #[error("the client speaks version {major}.{minor}, this is 0.0")]
    Version {
        /// Major version proposed.
        major: u16,
        /// Minor version proposed.
        minor: u16,
    },
    /// The first message was another one.
    #[error("the client did not begin with its version")]
    NoVersion,
    /// The backend has more queues than the transport.
    #[error("{0} queues, at most {MAX_QUEUES} are possible")]
    Queues(u16),
    /// The socket failed or is out of step.
    #[error("{0}")]
    Channel(ChannelError),
}

impl From<ChannelError> for Error {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Closed => Self::Closed,
            other => Self::Channel(other),
        }
    }
}

/// The server's end of a connection.
#[derive(Debug)]
pub struct Server {
    channel: Channel,
    negotiated: bool,
    /// The backend was started, and not reset since.
    started: bool,
    config: ConfigSpace,
    registers: Registers,
    interrupts: Arc<Interrupts>,
    memory: GuestMemory,
    /// Ranges that came without a file descriptor: ROM, BARs of other devices, private memory.
    unshared: Vec<(u64, u64)>,
    faults: Faults,
    /// What the last message is answered with, once the backend has done what it asks for.
    held: Option<(Header, Result<Vec<u8>, Fault>)>,
}

impl Server {
    /// Serves virtio device `id`, which is `backend`, on a connected socket.
    pub fn new(socket: UnixStream, id: u16, backend: &impl Backend) -> Result<Self, Error> {
        let count = backend.queue_count();
        if count > MAX_QUEUES {
            return Err(Error::Queues(count));
        }
        let sizes: Vec<u16> = (0..count).map(|queue| backend.queue_max_size(queue)).collect();
        let interrupts = Arc::new(Interrupts::default());
        let registers = Registers::new(backend.features(), &sizes, &interrupts);
        let policy = backend.memory_policy();
        let config_len = u32::try_from(backend.config().len()).unwrap_or(pci::DEVICE.len);
        Ok(Self {
            channel: Channel::new(socket, policy.any_file),
            negotiated: false,
            started: false,
            config: ConfigSpace::new(id, registers.vectors(), config_len),
            registers,
            interrupts,
            memory: GuestMemory::new(policy),
            unshared: Vec::new(),
            faults: Faults::default(),
            held: None,
        })
    }

    /// The socket, to be waited for.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// The guest's memory as the client gave it out so far.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// What the client did wrong so far.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Asks the driver for a reset, because the device cannot go on.
    pub fn needs_reset(&mut self) {
        self.registers.needs_reset();
    }

    /// Answers what the client sent. Does not wait; returns whether there was anything, or the backend
    /// is not settled: call again then.
    ///
    /// When this fails the connection is over, and the caller resets the backend.
    pub fn process(&mut self, backend: &mut impl Backend) -> Result<bool, Error> {
        for done in 0..BATCH {
            if !backend.is_settled() {
                return Ok(true);
            }
            self.send_held()?;
            let Some(message) = self.channel.receive()? else {
                return Ok(done > 0);
            };
            self.answer(message, backend)?;
        }
        Ok(true)
    }

    fn answer(&mut self, message: Message, backend: &mut impl Backend) -> Result<(), Error> {
        let header = message.header;
        if header.flags.get() & header_flags::TYPE != header_flags::COMMAND {
            // A reply, although nothing was asked: there is nothing to answer to.
            self.faults.count(Fault::UnknownCommand);
            return Ok(());
        }
        if !self.negotiated {
            return self.negotiate(&message);
        }
        let result = self.execute(message, backend);
        if let Err(fault) = result {
            self.faults.count(fault);
        }
        if header.flags.get() & header_flags::NO_REPLY == 0 {
            self.held = Some((header, result));
        }
        Ok(())
    }

    /// Sends the reply that waited for the backend.
    fn send_held(&mut self) -> Result<(), Error> {
        match self.held.take() {
            Some((header, Ok(payload))) => self.channel.reply(&header, &payload)?,
            Some((header, Err(fault))) => self.channel.reply_error(&header, fault.errno())?,
            None => {}
        }
        Ok(())
    }

    fn negotiate(&mut self, message: &Message) -> Result<(), Error> {
        if message.header.command.get() != command::VERSION {
            return Err(Error::NoVersion);
        }
        let (version, _) =
            wire::Version::read_from_prefix(&message.payload).map_err(|_| Error::NoVersion)?;
        if version.major.get() != 0 {
            let (major, minor) = (version.major.get(), version.minor.get());
            return Err(Error::Version { major, minor });
        }
        let capabilities = serde_json::json!({ "capabilities": {
            "max_msg_fds": wire::MAX_FDS,
            "max_data_xfer_size": MAX_ACCESS,
        }});
        let mut payload = wire::Version { major: 0.into(), minor: 0.into() }.as_bytes().to_vec();
        payload.extend(capabilities.to_string().as_bytes());
        payload.push(0);
        self.channel.reply(&message.header, &payload)?;
        self.negotiated = true;
        Ok(())
    }

    fn execute(&mut self, message: Message, backend: &mut impl Backend) -> Result<Vec<u8>, Fault> {
        let Message { header, payload, fds, fds_lost, fds_foreign } = message;
        if fds_lost {
            return Err(Fault::DescriptorsLost);
        }
        if fds_foreign {
            return Err(foreign_descriptor(header.command.get(), &payload));
        }
        match header.command.get() {
            command::DMA_MAP => self.dma_map(&payload, &fds, backend).map(|()| Vec::new()),
            command::DMA_UNMAP => self.dma_unmap(&payload, backend),
            command::DEVICE_GET_INFO => device_info(&payload),
            command::DEVICE_GET_REGION_INFO => region_info(&payload),
            command::DEVICE_GET_IRQ_INFO => self.irq_info(&payload),
            command::DEVICE_SET_IRQS => self.set_irqs(&payload, fds).map(|()| Vec::new()),
            command::REGION_READ => self.region_read(&payload, backend),
            command::REGION_WRITE => self.region_write(&payload, backend),
            command::DEVICE_RESET => {
                self.reset(backend);
                Ok(Vec::new())
            }
            _ => Err(Fault::UnknownCommand),
        }
    }

    fn dma_map(
        &mut self,
        payload: &[u8],
        fds: &[OwnedFd],
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        let map: wire::DmaMap = parse(payload)?;
        let (guest_addr, len) = (map.address.get(), map.size.get());
        let fd = match fds {
            [] => {
                if self.unshared.len() < MAX_UNSHARED {
                    self.unshared.push((guest_addr, len));
                }
                return Ok(());
            }
            [fd] => fd.as_fd(),
            _ => return Err(Fault::Descriptors),
        };
        let writable = map.flags.get() & wire::DMA_MAP_WRITE != 0;
        let region = Region { guest_addr, len, fd, offset: map.offset.get(), writable };
        self.memory = self.memory.with_region(&region).map_err(|error| refused_map(&error))?;
        tracing::trace!(guest_addr, len, writable, "DMA_MAP");
        self.publish_memory(backend);
        Ok(())
    }

    fn dma_unmap(&mut self, payload: &[u8], backend: &mut impl Backend) -> Result<Vec<u8>, Fault> {
        let unmap: wire::DmaUnmap = parse(payload)?;
        if unmap.flags.get() & wire::DMA_UNMAP_ALL != 0 {
            self.unshared.clear();
            self.memory = self.memory.cleared();
            self.publish_memory(backend);
            return Ok(unmap.as_bytes().to_vec());
        }
        let range = (unmap.address.get(), unmap.size.get());
        if let Some(index) = self.unshared.iter().position(|other| *other == range) {
            self.unshared.swap_remove(index);
            return Ok(unmap.as_bytes().to_vec());
        }
        let (memory, removed) = self.memory.without(range.0, range.1);
        if removed == 0 && self.unshared.len() < MAX_UNSHARED {
            return Err(Fault::DmaUnknown);
        }
        tracing::trace!(guest_addr = range.0, len = range.1, "DMA_UNMAP");
        self.memory = memory;
        self.publish_memory(backend);
        Ok(unmap.as_bytes().to_vec())
    }

    fn publish_memory(&self, backend: &mut impl Backend) {
        if self.started {
            backend.set_memory(&self.memory);
        }
    }

    fn irq_info(&self, payload: &[u8]) -> Result<Vec<u8>, Fault> {
        let mut info: wire::IrqInfo = parse(payload)?;
        check_argsz(info.argsz.get(), size_of::<wire::IrqInfo>())?;
        let intx = wire::IRQ_FLAGS_MASKABLE | wire::IRQ_FLAGS_AUTOMASKED;
        // MSI-X without NORESIZE: with it, the client sets up all vectors anew for each one more.
        let (flags, count) = match info.index.get() {
            irq::INTX => (wire::IRQ_FLAGS_EVENTFD | intx, 1),
            irq::MSIX => (wire::IRQ_FLAGS_EVENTFD, u32::from(self.registers.vectors())),
            index if index < irq::COUNT => (0, 0),
            _ => return Err(Fault::Irq),
        };
        info.argsz = wire::size_of_u32::<wire::IrqInfo>().into();
        info.flags = flags.into();
        info.count = count.into();
        Ok(info.as_bytes().to_vec())
    }

    fn set_irqs(&mut self, payload: &[u8], fds: Vec<OwnedFd>) -> Result<(), Fault> {
        let (set, data) =
            wire::IrqSet::read_from_prefix(payload).map_err(|_| Fault::ShortPayload)?;
        let (start, count) = (set.start.get() as usize, set.count.get() as usize);
        let vectors = match set.index.get() {
            irq::INTX => 1,
            irq::MSIX => usize::from(self.registers.vectors()),
            index if index < irq::COUNT => 0,
            _ => return Err(Fault::Irq),
        };
        if start.checked_add(count).is_none_or(|end| end > vectors) {
            return Err(Fault::Irq);
        }
        if !fds.iter().all(descriptor::is_eventfd) {
            return Err(Fault::DescriptorKind);
        }
        // For the kernels on which a signal is a write.
        fds.iter().try_for_each(set_nonblocking).map_err(|_| Fault::Descriptors)?;
        let range = start..start + count;
        let msix = set.index.get() == irq::MSIX;
        match set.flags.get() {
            set_irqs::EVENTFD if !fds.is_empty() && fds.len() != count => {
                return Err(Fault::Descriptors)
            }
            set_irqs::EVENTFD if msix => self.interrupts.set_msix(start, count, fds),
            set_irqs::EVENTFD => self.interrupts.set_intx(fds.into_iter().next()),
            set_irqs::NOW if count == 0 && msix => self.interrupts.clear_msix(),
            set_irqs::NOW if count == 0 => self.interrupts.set_intx(None),
            set_irqs::NOW if msix => range.for_each(|vector| self.interrupts.trigger(vector)),
            set_irqs::CHOSEN if msix && data.len() >= count => {
                let chosen = range.zip(data).filter(|(_, wanted)| **wanted != 0);
                chosen.for_each(|(vector, _)| self.interrupts.trigger(vector));
            }
            set_irqs::MASK if !msix => self.interrupts.mask_intx(true),
            set_irqs::UNMASK if !msix => self.interrupts.mask_intx(false),
            _ => return Err(Fault::IrqAction),
        }
        Ok(())
    }

    fn region_read(
        &mut self,
        payload: &[u8],
        backend: &mut impl Backend,
    ) -> Result<Vec<u8>, Fault> {
        let access: wire::RegionAccess = parse(payload)?;
        let len = access.count.get() as usize;
        let at = check_access(&access)?;
        let data = match access.region.get() {
            region::CONFIG => self.config_read(at, len, backend)?,
            index => self.bar_read(index, access.offset.get(), len, backend),
        };
        Ok([access.as_bytes(), &data].concat())
    }

    fn region_write(
        &mut self,
        payload: &[u8],
        backend: &mut impl Backend,
    ) -> Result<Vec<u8>, Fault> {
        let (access, data) =
            wire::RegionAccess::read_from_prefix(payload).map_err(|_| Fault::ShortPayload)?;
        if data.len() != access.count.get() as usize {
            return Err(Fault::RegionBounds);
        }
        let at = check_access(&access)?;
        match access.region.get() {
            region::CONFIG => self.config_write(at, data, backend)?,
            index => self.bar_write(index, access.offset.get(), data, backend)?,
        }
        Ok(access.as_bytes().to_vec())
    }

    fn config_read(
        &mut self,
        at: usize,
        len: usize,
        backend: &mut impl Backend,
    ) -> Result<Vec<u8>, Fault> {
        if let Some(access) = self.config.bar_access(at, len) {
            return Ok(self.bar_read(access.bar, access.offset, access.len, backend));
        }
        let bytes = self.config.read(at, len).ok_or(Fault::RegionBounds)?;
        Ok(bytes.to_vec())
    }

    fn config_write(
        &mut self,
        at: usize,
        data: &[u8],
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        if let Some(access) = self.config.bar_access(at, data.len()) {
            return self.bar_write(access.bar, access.offset, data, backend);
        }
        self.config.write(at, data).ok_or(Fault::RegionBounds)
    }

    /// Reads from a BAR; what is no structure reads as zero.
    fn bar_read(
        &mut self,
        bar: u32,
        offset: u64,
        len: usize,
        backend: &mut impl Backend,
    ) -> Vec<u8> {
        if bar != region::BAR0 {
            return vec![0; len];
        }
        if let Some(at) = pci::COMMON.hit(offset, len) {
            return self.registers.read(at, len);
        }
        if pci::ISR.hit(offset, len).is_some() {
            return vec![self.interrupts.take_isr()];
        }
        let config = pci::DEVICE.hit(offset, len).and_then(|at| backend.config().get(at..at + len));
        config.map_or_else(|| vec![0; len], <[u8]>::to_vec)
    }

    fn bar_write(
        &mut self,
        bar: u32,
        offset: u64,
        data: &[u8],
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        if bar != region::BAR0 {
            return Ok(());
        }
        if let Some(at) = pci::NOTIFY.hit(offset, data.len()) {
            return self.kick(at / pci::NOTIFY_MULTIPLIER as usize, backend);
        }
        let Some(at) = pci::COMMON.hit(offset, data.len()) else {
            return Err(Fault::Register);
        };
        match self.registers.write(at, data) {
            Action::None => Ok(()),
            Action::Refused => Err(Fault::Register),
            Action::Reset => {
                self.reset(backend);
                Ok(())
            }
            Action::Start => {
                self.start(backend);
                Ok(())
            }
        }
    }

    fn kick(&mut self, queue: usize, backend: &mut impl Backend) -> Result<(), Fault> {
        if !self.started || !self.registers.enabled(queue) {
            return Err(Fault::Kick);
        }
        backend.kick(u16::try_from(queue).map_err(|_| Fault::Kick)?);
        Ok(())
    }

    fn start(&mut self, backend: &mut impl Backend) {
        let queues = self.registers.setup();
        let features = self.registers.features();
        let first = queues.iter().flatten().next();
        let private = first.is_some_and(|queue| {
            let inside = |(start, len): &(u64, u64)| {
                queue.desc.checked_sub(*start).is_some_and(|skip| skip < *len)
            };
            !self.memory.contains(queue.desc, 1) && self.unshared.iter().any(inside)
        });
        let memory = self.memory.clone();
        let result = if private {
            Err("the guest's memory is not shared: start QEMU with share=on".to_owned())
        } else {
            backend.start(Setup { features, memory, queues })
        };
        self.started = result.is_ok();
        if let Err(error) = result {
            tracing::error!(error, "the device cannot start");
            self.registers.needs_reset();
        }
    }

    fn reset(&mut self, backend: &mut impl Backend) {
        if std::mem::take(&mut self.started) {
            backend.reset();
        }
        self.registers.reset();
        self.interrupts.take_isr();
    }
}

/// Why a region is not mapped, which the log says with its name.
fn refused_map(error: &MapError) -> Fault {
    tracing::error!(%error, "DMA_MAP: the device does not have this memory");
    match error {
        MapError::Overlap { .. } => Fault::DmaExists,
        MapError::FileSystem { .. } => Fault::DmaFile,
        MapError::TooMany { .. } => Fault::DmaCount,
        MapError::Os { .. } => Fault::DmaRefused,
        MapError::Alignment { .. } | MapError::Overflow { .. } | MapError::Truncated { .. } => {
            Fault::DmaInvalid
        }
    }
}

/// What is wrong with a message that came with a descriptor of no known kind.
fn foreign_descriptor(number: u16, payload: &[u8]) -> Fault {
    match parse::<wire::DmaMap>(payload) {
        Ok(map) if number == command::DMA_MAP => {
            let (guest_addr, len) = (map.address.get(), map.size.get());
            refused_map(&MapError::FileSystem { guest_addr, len })
        }
        _ => Fault::DescriptorKind,
    }
}

fn set_nonblocking(fd: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

fn parse<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<T, Fault> {
    T::read_from_prefix(payload).map(|(value, _)| value).map_err(|_| Fault::ShortPayload)
}

fn check_argsz(argsz: u32, size: usize) -> Result<(), Fault> {
    if (argsz as usize) < size {
        Err(Fault::Argsz)
    } else {
        Ok(())
    }
}

fn device_info(payload: &[u8]) -> Result<Vec<u8>, Fault> {
    let info: wire::DeviceInfo = parse(payload)?;
    check_argsz(info.argsz.get(), size_of::<wire::DeviceInfo>())?;
    let reply = wire::DeviceInfo {
        argsz: wire::size_of_u32::<wire::DeviceInfo>().into(),
        flags: (wire::DEVICE_FLAGS_RESET | wire::DEVICE_FLAGS_PCI).into(),
        num_regions: region::COUNT.into(),
        num_irqs: irq::COUNT.into(),
    };
    Ok(reply.as_bytes().to_vec())
}

/// Size of a region, 0 for one that the device does not have.
fn region_size(index: u32) -> Result<u64, Fault> {
    match index {
        region::BAR0 => Ok(pci::BAR0_SIZE.into()),
        region::BAR1 => Ok(pci::BAR1_SIZE.into()),
        region::CONFIG => Ok(pci::CONFIG_SIZE as u64),
        index if index < region::COUNT => Ok(0),
        _ => Err(Fault::Region),
    }
}

fn region_info(payload: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut info: wire::RegionInfo = parse(payload)?;
    check_argsz(info.argsz.get(), size_of::<wire::RegionInfo>())?;
    let size = region_size(info.index.get())?;
    let flags = if size == 0 { 0 } else { wire::REGION_FLAGS_READ_WRITE };
    info.argsz = wire::size_of_u32::<wire::RegionInfo>().into();
    info.flags = flags.into();
    info.cap_offset = 0.into();
    info.size = size.into();
    info.offset = 0.into();
    Ok(info.as_bytes().to_vec())
}

/// The offset of an access that lies within its region.
fn check_access(access: &wire::RegionAccess) -> Result<usize, Fault> {
    let size = region_size(access.region.get())?;
    let (offset, len) = (access.offset.get(), u64::from(access.count.get()));
    let inside = offset.checked_add(len).is_some_and(|end| end <= size);
    if len == 0 || !inside || len > MAX_ACCESS as u64 {
        return Err(Fault::RegionBounds);
    }
    usize::try_from(offset).map_err(|_| Fault::RegionBounds)
}
