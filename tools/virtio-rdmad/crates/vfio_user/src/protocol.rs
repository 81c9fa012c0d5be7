// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The meaning of the client's messages, and the replies to them.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use memory::{GuestMemory, GuestRegion, MapError, Share, ShareError};
use ring::Layout;
use serde::{Deserialize, Serialize};
use virtio_transport::{
    Backend, Change, ConnectionState, Deed, Error, Faults, Limits, Message, Protocol, QueueSetup,
    ResumeError, Server,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::interrupt::{Interrupts, SavedInterrupts};
use crate::pci::{self, ConfigSpace};
use crate::registers::{Action, Registers, SavedRegisters};
use crate::wire::{self, command, header_flags, irq, region, set_irqs, Header};
use crate::{Fault, MAX_QUEUES};

/// The limits for the messages of a client.
const LIMITS: Limits = Limits { message: wire::MAX_MESSAGE, fds: wire::MAX_FDS, batch: 256 };
/// Most ranges without a file descriptor that are remembered, for a better error message.
const MAX_UNSHARED: usize = 64;
/// Most bytes of one region access; no register or structure is longer.
const MAX_ACCESS: usize = 4096;
/// Bytes of an entry of a descriptor table.
const DESCRIPTOR: u64 = 16;

/// A mistake of the client that ends the connection.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The client speaks another protocol, or none.
    #[error("the client speaks version {major}.{minor}, this is 0.0")]
    Version {
        /// Major version proposed.
        major: u16,
        /// Minor version proposed.
        minor: u16,
    },
    /// The first message was not VERSION.
    #[error("the client did not begin with its version")]
    NoVersion,
    /// The backend has more queues than the transport.
    #[error("{0} queues, at most {MAX_QUEUES} are possible")]
    Queues(u16),
}

/// Serves virtio device `id`, which is `backend`, to a client that has just connected to `socket`.
/// The client finds a device fresh from reset.
pub fn serve(
    socket: UnixStream,
    id: u16,
    backend: &dyn Backend,
) -> Result<Server<VfioUser>, Error> {
    let protocol = VfioUser::new(id, backend)?;
    Ok(Server::new(socket, protocol, LIMITS))
}

/// Goes on with a connection that another process served, whose state this is. See [`serve`]. Its client may give out
/// as many regions of memory as `share` has.
///
/// The caller makes the device what it was, with [`Server::queues`], or has it fail.
pub fn resume(
    socket: UnixStream,
    id: u16,
    share: Share,
    state: ConnectionState,
) -> Result<Server<VfioUser>, ResumeError> {
    Ok(Server::new(socket, VfioUser::load(id, share, state)?, LIMITS))
}

/// A range of guest memory, and the file that it is in.
#[derive(Debug)]
struct Mapped {
    range: SavedRange,
    file: Arc<OwnedFd>,
}

/// A range of guest memory, as DMA_MAP gave it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct SavedRange {
    guest_addr: u64,
    len: u64,
    offset: u64,
    writable: bool,
}

impl SavedRange {
    fn region<'fd>(&self, file: &'fd OwnedFd) -> GuestRegion<'fd> {
        let Self { guest_addr, len, offset, writable } = *self;
        GuestRegion { guest_addr, len, fd: file.as_fd(), offset, writable }
    }

    /// Returns whether the other range begins where this one ends, at its addresses and in a file.
    fn is_before(&self, other: &Self) -> bool {
        self.guest_addr + self.len == other.guest_addr
            && self.offset + self.len == other.offset
            && self.writable == other.writable
    }

    /// Returns what is left of it without the addresses from `from` up to `to`.
    fn without(&self, from: u64, to: u64) -> impl Iterator<Item = Self> {
        let end = self.guest_addr + self.len;
        let parts = [(self.guest_addr, end.min(from)), (self.guest_addr.max(to), end)];
        let range = *self;
        parts.into_iter().filter(|(start, end)| start < end).map(move |(start, end)| {
            let offset = range.offset + (start - range.guest_addr);
            Self { guest_addr: start, len: end - start, offset, ..range }
        })
    }
}

/// The state of a connection: what the client has said, in the order of the descriptors. Those of the ranges come
/// first.
#[derive(Debug, Deserialize, Serialize)]
struct SavedClient {
    negotiated: bool,
    started: bool,
    /// The bytes of PCI configuration space.
    config: Vec<u8>,
    /// The length of the device-specific configuration space.
    config_len: u32,
    registers: SavedRegisters,
    ranges: Vec<SavedRange>,
    unshared: Vec<(u64, u64)>,
    interrupts: SavedInterrupts,
}

/// The state of one connection: all that the client has said so far, and all that it is shown.
#[derive(Debug)]
pub struct VfioUser {
    /// Whether the client has said its version.
    negotiated: bool,
    /// Whether the backend was started, and not reset since.
    started: bool,
    config: ConfigSpace,
    /// The length of the device-specific configuration space.
    config_len: u32,
    registers: Registers,
    interrupts: Arc<Interrupts>,
    memory: GuestMemory,
    /// The ranges of the memory.
    mapped: Vec<Mapped>,
    /// The ranges that came without a file descriptor: ROM, BARs of other devices, private memory.
    unshared: Vec<(u64, u64)>,
    faults: Faults<Fault>,
    /// The reply to the last message, whole.
    reply: Option<Vec<u8>>,
    /// The difference between the state and the state that a journal has.
    change: Change,
}

impl Protocol for VfioUser {
    fn message_length(&self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        let Ok((header, _)) = Header::ref_from_prefix(bytes) else { return Ok(None) };
        let length = header.size.get() as usize;
        if length < size_of::<Header>() {
            return Err(Error::Length(length));
        }
        Ok(Some(length))
    }

    fn handle(&mut self, message: Message, backend: &mut dyn Backend) -> Result<(), Error> {
        let bytes = message.bytes.as_slice();
        let Ok((header, _)) = Header::read_from_prefix(bytes) else {
            return Err(Error::Length(bytes.len()));
        };
        let flags = header.flags.get();
        if flags & header_flags::TYPE != header_flags::COMMAND {
            // This is a reply, although the server asked nothing. There is nothing to answer.
            self.faults.count(Fault::UnknownCommand, header.command.get().into());
            return Ok(());
        }
        if !self.negotiated {
            return self.negotiate(&header, &bytes[size_of::<Header>()..]);
        }
        let result = self.execute(&header, message, backend);
        if let Err(fault) = result {
            self.faults.count(fault, header.command.get().into());
        }
        if flags & header_flags::NO_REPLY == 0 {
            self.reply = Some(match result {
                Ok(payload) => reply(&header, header_flags::REPLY, 0, &payload),
                Err(fault) => {
                    let flags = header_flags::REPLY | header_flags::ERROR;
                    reply(&header, flags, fault.errno(), &[])
                }
            });
        }
        Ok(())
    }

    fn take_reply(&mut self) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.reply.take())
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn needs_reset(&mut self) {
        self.registers.needs_reset();
        self.change = self.change.max(Change::Bytes);
    }

    fn features(&self) -> u64 {
        self.registers.features()
    }

    fn missing_features(&self, features: u64) -> u64 {
        self.registers.missing(features)
    }

    fn withdraw(&mut self, features: u64) {
        self.registers.withdraw(features);
    }

    fn queues(&self) -> Vec<QueueSetup> {
        if self.started {
            self.registers.enabled_queues()
        } else {
            Vec::new()
        }
    }

    fn fail(&mut self, backend: &mut dyn Backend) -> Result<(), ResumeError> {
        let now = registers_of(backend, &self.interrupts)?;
        if !self.registers.is_like(&now) {
            return Err(ResumeError::Device);
        }
        self.registers.offer_as(&now);
        self.needs_reset();
        Ok(())
    }

    fn take_change(&mut self) -> Change {
        std::mem::take(&mut self.change)
    }

    fn state(&self) -> ConnectionState {
        let mut descriptors: Vec<_> = self.mapped.iter().map(|range| range.file.clone()).collect();
        let saved = SavedClient {
            negotiated: self.negotiated,
            started: self.started,
            config: self.config.bytes().to_vec(),
            config_len: self.config_len,
            registers: self.registers.save(),
            ranges: self.mapped.iter().map(|mapped| mapped.range).collect(),
            unshared: self.unshared.clone(),
            interrupts: self.interrupts.save(&mut descriptors),
        };
        // Nothing of this can fail to be encoded into memory.
        ConnectionState { bytes: postcard::to_stdvec(&saved).unwrap_or_default(), descriptors }
    }
}

impl SavedClient {
    /// Decodes the state of a connection.
    fn of(state: &ConnectionState) -> Result<Self, ResumeError> {
        postcard::from_bytes(&state.bytes).map_err(ResumeError::Encoding)
    }
}

impl VfioUser {
    fn new(id: u16, backend: &dyn Backend) -> Result<Self, Error> {
        let interrupts = Arc::new(Interrupts::default());
        let registers = registers_of(backend, &interrupts)?;
        let config_len = u32::try_from(backend.config().len()).unwrap_or(pci::DEVICE.len);
        let config = (ConfigSpace::new(id, registers.vectors(), config_len), config_len);
        Ok(Self::with(config, registers, interrupts, backend.memory_share()))
    }

    fn with(
        (config, config_len): (ConfigSpace, u32),
        registers: Registers,
        interrupts: Arc<Interrupts>,
        share: Share,
    ) -> Self {
        Self {
            negotiated: false,
            started: false,
            config,
            config_len,
            registers,
            interrupts,
            memory: GuestMemory::new(share),
            mapped: Vec::new(),
            unshared: Vec::new(),
            faults: Faults::default(),
            reply: None,
            change: Change::No,
        }
    }

    /// Makes this of what the client has said to another process.
    fn load(id: u16, share: Share, state: ConnectionState) -> Result<Self, ResumeError> {
        let saved = SavedClient::of(&state)?;
        let ConnectionState { descriptors, .. } = state;
        let refused = |what, value| Err(ResumeError::Value { what, value });
        let (named, there) =
            (saved.ranges.len() + saved.interrupts.descriptors(), descriptors.len());
        if named != there {
            return Err(ResumeError::Descriptors { named, there });
        }
        if saved.unshared.len() > MAX_UNSHARED {
            return refused("number of unshared ranges", saved.unshared.len() as u64);
        }
        let interrupts = Arc::new(Interrupts::default());
        let registers = Registers::load(&saved.registers, &interrupts)?;
        if saved.interrupts.vectors() > registers.vectors().into() {
            return refused("number of vectors", saved.interrupts.vectors() as u64);
        }
        let mut config = ConfigSpace::new(id, registers.vectors(), saved.config_len);
        if config.write(0, &saved.config).is_none() {
            return refused("length of configuration space", saved.config.len() as u64);
        }
        let config = (config, saved.config_len);
        let mut this = Self::with(config, registers, interrupts, share);
        let mut descriptors = descriptors.into_iter();
        for (range, file) in saved.ranges.iter().zip(&mut descriptors) {
            this.memory = this.memory.with_region_again(&range.region(&file))?;
            this.mapped.push(Mapped { range: *range, file });
        }
        this.interrupts.load(&saved.interrupts, &mut descriptors);
        this.unshared = saved.unshared;
        (this.negotiated, this.started) = (saved.negotiated, saved.started);
        Ok(this)
    }

    /// Notes that what the client has said is more than a journal has.
    fn note(&mut self, change: Change) {
        self.change = self.change.max(change);
    }

    /// Returns what the client did wrong so far.
    pub fn faults(&self) -> &Faults<Fault> {
        &self.faults
    }

    /// Answers the first message, which must be VERSION.
    fn negotiate(&mut self, header: &Header, payload: &[u8]) -> Result<(), Error> {
        if header.command.get() != command::VERSION {
            return Err(Error::protocol(ProtocolError::NoVersion));
        }
        let (version, _) = wire::Version::read_from_prefix(payload)
            .map_err(|_| Error::protocol(ProtocolError::NoVersion))?;
        let (major, minor) = (version.major.get(), version.minor.get());
        if major != 0 {
            return Err(Error::protocol(ProtocolError::Version { major, minor }));
        }
        let capabilities = serde_json::json!({ "capabilities": {
            "max_msg_fds": wire::MAX_FDS,
            "max_data_xfer_size": MAX_ACCESS,
            "max_dma_maps": memory::MAX_REGIONS,
        }});
        let mut payload = wire::Version { major: 0.into(), minor: 0.into() }.as_bytes().to_vec();
        payload.extend(capabilities.to_string().as_bytes());
        payload.push(0);
        self.reply = Some(reply(header, header_flags::REPLY, 0, &payload));
        self.negotiated = true;
        self.note(Change::Bytes);
        Ok(())
    }

    fn execute(
        &mut self,
        header: &Header,
        message: Message,
        backend: &mut dyn Backend,
    ) -> Result<Vec<u8>, Fault> {
        let Message { bytes, fds, fds_lost, fds_foreign } = message;
        let payload = &bytes[size_of::<Header>()..];
        if fds_lost {
            return Err(Fault::DescriptorsLost);
        }
        if fds_foreign {
            return Err(foreign_descriptor(header.command.get(), payload));
        }
        match header.command.get() {
            command::DMA_MAP => self.dma_map(payload, fds, backend).map(|()| Vec::new()),
            command::DMA_UNMAP => self.dma_unmap(payload, backend),
            command::DEVICE_GET_INFO => device_info(payload),
            command::DEVICE_GET_REGION_INFO => region_info(payload),
            command::DEVICE_GET_IRQ_INFO => self.irq_info(payload),
            command::DEVICE_SET_IRQS => self.set_irqs(payload, fds).map(|()| Vec::new()),
            command::REGION_READ => self.region_read(payload, backend),
            command::REGION_WRITE => self.region_write(payload, backend),
            command::DEVICE_RESET => {
                backend.note(Deed::Reset);
                self.reset(backend);
                Ok(Vec::new())
            }
            _ => Err(Fault::UnknownCommand),
        }
    }

    fn dma_map(
        &mut self,
        payload: &[u8],
        mut fds: Vec<OwnedFd>,
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        let map: wire::DmaMap = parse(payload)?;
        let (guest_addr, len) = (map.address.get(), map.size.get());
        if fds.len() > 1 {
            return Err(Fault::Descriptors);
        }
        self.note(Change::Descriptors);
        let Some(file) = fds.pop() else {
            if self.unshared.len() < MAX_UNSHARED {
                self.unshared.push((guest_addr, len));
            }
            return Ok(());
        };
        let writable = map.flags.get() & wire::DMA_MAP_WRITE != 0;
        let range = SavedRange { guest_addr, len, offset: map.offset.get(), writable };
        let memory = self.memory.with_joined_region(&range.region(&file));
        self.memory = memory.map_err(|error| refused_map(&error))?;
        self.add_range(range, file);
        tracing::trace!(guest_addr, len, writable, "DMA_MAP");
        self.publish_memory(backend);
        Ok(())
    }

    fn dma_unmap(&mut self, payload: &[u8], backend: &mut dyn Backend) -> Result<Vec<u8>, Fault> {
        let unmap: wire::DmaUnmap = parse(payload)?;
        // The device keeps no log of what it has written, so it has no bitmap of dirty pages.
        if unmap.flags.get() & !wire::DMA_UNMAP_ALL != 0 {
            return Err(Fault::DmaInvalid);
        }
        self.note(Change::Descriptors);
        if unmap.flags.get() & wire::DMA_UNMAP_ALL != 0 {
            self.unshared.clear();
            self.mapped.clear();
            self.memory = self.memory.cleared();
            self.publish_memory(backend);
            return Ok(unmap.as_bytes().to_vec());
        }
        let range = (unmap.address.get(), unmap.size.get());
        if let Some(index) = self.unshared.iter().position(|other| *other == range) {
            self.unshared.swap_remove(index);
            return Ok(unmap.as_bytes().to_vec());
        }
        let (from, to) = memory::whole_pages(range.0, range.1);
        let less = self.memory.without_part(range.0, range.1);
        let (memory, removed) = less.map_err(|reason| refused_unmap(range, reason))?;
        if removed == 0 && self.unshared.len() < MAX_UNSHARED {
            return Err(Fault::DmaUnknown);
        }
        tracing::trace!(guest_addr = range.0, len = range.1, "DMA_UNMAP");
        self.memory = memory;
        if removed > 0 {
            self.remove_range(from, to);
        }
        self.publish_memory(backend);
        Ok(unmap.as_bytes().to_vec())
    }

    /// Notes a range. It becomes one with its neighbours of the same file, so that one descriptor is enough for them.
    fn add_range(&mut self, mut range: SavedRange, file: OwnedFd) {
        let is_neighbour = |other: &Mapped, range: &SavedRange| {
            (other.range.is_before(range) || range.is_before(&other.range))
                && memory::is_same_file(other.file.as_fd(), file.as_fd())
        };
        while let Some(at) = self.mapped.iter().position(|other| is_neighbour(other, &range)) {
            let SavedRange { guest_addr, len, offset, .. } = self.mapped.swap_remove(at).range;
            range.guest_addr = range.guest_addr.min(guest_addr);
            range.offset = range.offset.min(offset);
            range.len += len;
        }
        self.mapped.push(Mapped { range, file: Arc::new(file) });
    }

    /// Forgets the addresses from `from` up to `to` of all ranges.
    fn remove_range(&mut self, from: u64, to: u64) {
        let left = |Mapped { range, file }: Mapped| {
            range.without(from, to).map(move |range| Mapped { range, file: file.clone() })
        };
        self.mapped = std::mem::take(&mut self.mapped).into_iter().flat_map(left).collect();
    }

    fn publish_memory(&self, backend: &mut dyn Backend) {
        if self.started {
            backend.set_memory(&self.memory);
        }
    }

    fn irq_info(&self, payload: &[u8]) -> Result<Vec<u8>, Fault> {
        let mut info: wire::IrqInfo = parse(payload)?;
        check_argsz(info.argsz.get(), size_of::<wire::IrqInfo>())?;
        // MSI-X without NORESIZE: with it, the client would set up all vectors again for each one more.
        let (flags, count) = match info.index.get() {
            irq::INTX => (wire::IRQ_FLAGS_EVENTFD | wire::IRQ_FLAGS_MASKABLE, 1),
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
        fds.iter().try_for_each(descriptor::set_nonblocking).map_err(|_| Fault::Descriptors)?;
        self.note(Change::Descriptors);
        match set.index.get() {
            irq::MSIX => self.set_msix(set.flags.get(), start..start + count, data, fds),
            irq::INTX => self.set_intx(set.flags.get(), count, fds),
            // The device has none of these: there is nothing to disable.
            _ if set.flags.get() == set_irqs::NOW => Ok(()),
            _ => Err(Fault::IrqAction),
        }
    }

    /// Does what SET_IRQS asks for with these MSI-X vectors.
    fn set_msix(
        &mut self,
        action: u32,
        vectors: Range<usize>,
        data: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(), Fault> {
        let count = vectors.len();
        match action {
            set_irqs::EVENTFD if !fds.is_empty() && fds.len() != count => {
                return Err(Fault::Descriptors)
            }
            set_irqs::EVENTFD => self.interrupts.set_msix(vectors.start, count, fds),
            set_irqs::NOW if count == 0 => self.interrupts.clear_msix(),
            set_irqs::NOW => vectors.for_each(|vector| self.interrupts.trigger(vector)),
            set_irqs::CHOSEN if data.len() >= count => {
                let chosen = vectors.zip(data).filter(|(_, wanted)| **wanted != 0);
                chosen.for_each(|(vector, _)| self.interrupts.trigger(vector));
            }
            _ => return Err(Fault::IrqAction),
        }
        Ok(())
    }

    /// Does what SET_IRQS asks for with INTx.
    fn set_intx(&mut self, action: u32, count: usize, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        match action {
            set_irqs::EVENTFD if !fds.is_empty() && fds.len() != count => {
                return Err(Fault::Descriptors)
            }
            set_irqs::EVENTFD => self.interrupts.set_intx(fds.into_iter().next()),
            set_irqs::NOW if count == 0 => self.interrupts.set_intx(None),
            set_irqs::MASK => self.interrupts.mask_intx(true),
            set_irqs::UNMASK => self.interrupts.mask_intx(false),
            _ => return Err(Fault::IrqAction),
        }
        Ok(())
    }

    fn region_read(&mut self, payload: &[u8], backend: &mut dyn Backend) -> Result<Vec<u8>, Fault> {
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
        backend: &mut dyn Backend,
    ) -> Result<Vec<u8>, Fault> {
        let (access, data) =
            wire::RegionAccess::read_from_prefix(payload).map_err(|_| Fault::ShortPayload)?;
        if data.len() != access.count.get() as usize {
            return Err(Fault::RegionBounds);
        }
        let at = check_access(&access)?;
        match access.region.get() {
            region::CONFIG => self.config_write(at, data, backend)?,
            index => self.bar_write(index, access.offset.get(), data, backend),
        }
        Ok(access.as_bytes().to_vec())
    }

    fn config_read(
        &mut self,
        at: usize,
        len: usize,
        backend: &mut dyn Backend,
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
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        if let Some(access) = self.config.bar_access(at, data.len()) {
            self.bar_write(access.bar, access.offset, data, backend);
            return Ok(());
        }
        self.note(Change::Bytes);
        self.config.write(at, data).ok_or(Fault::RegionBounds)
    }

    /// Reads from a BAR. Bytes that belong to no structure are zero.
    fn bar_read(
        &mut self,
        bar: u32,
        offset: u64,
        len: usize,
        backend: &mut dyn Backend,
    ) -> Vec<u8> {
        if bar != region::BAR0 {
            return vec![0; len];
        }
        if let Some(at) = pci::COMMON.hit(offset, len) {
            let status = backend.shown_status(self.registers.status());
            if let Some(deed) = Registers::deed_of_read(at, len, status) {
                backend.note(deed);
            }
            return self.registers.read(at, len, status);
        }
        if pci::ISR.hit(offset, len).is_some() {
            return vec![self.interrupts.take_isr()];
        }
        let Some(at) = pci::DEVICE.hit(offset, len) else { return vec![0; len] };
        backend.note(Deed::ReadConfig { offset: at, len });
        backend.config().get(at..at + len).map_or_else(|| vec![0; len], <[u8]>::to_vec)
    }

    /// Writes to a BAR. A write that means nothing is ignored, as on PCI, and counted. It is the guest's mistake: a
    /// client that is told of an error may end the guest.
    fn bar_write(&mut self, bar: u32, offset: u64, data: &[u8], backend: &mut dyn Backend) {
        if let Err(fault) = self.write_registers(bar, offset, data, backend) {
            self.faults.count(fault, command::REGION_WRITE.into());
        }
    }

    fn write_registers(
        &mut self,
        bar: u32,
        offset: u64,
        data: &[u8],
        backend: &mut dyn Backend,
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
        self.note(Change::Bytes);
        self.registers.deed_of_write(at, data).into_iter().for_each(|deed| backend.note(deed));
        match self.registers.write(at, data, |features| backend.accepts(features)) {
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

    fn kick(&mut self, queue: usize, backend: &mut dyn Backend) -> Result<(), Fault> {
        if !self.started || !self.registers.is_enabled(queue) {
            return Err(Fault::Kick);
        }
        backend.kick(u16::try_from(queue).map_err(|_| Fault::Kick)?);
        Ok(())
    }

    /// Starts the backend: the driver set DRIVER_OK. A device that cannot start asks for a reset.
    fn start(&mut self, backend: &mut dyn Backend) {
        let queues = self.registers.enabled_queues();
        let result = if queues.first().is_some_and(|queue| self.is_unshared(queue.layout.desc)) {
            Err("the guest's memory is not shared: start QEMU with share=on".to_owned())
        } else if queues.iter().any(|queue| self.is_in_pieces(&queue.layout)) {
            Err("a virtqueue lies in several DMA regions: boot a guest that has a virtual IOMMU with iommu=pt"
                .to_owned())
        } else {
            backend.set_features(self.registers.features());
            backend.start(&self.memory, queues)
        };
        self.started = result.is_ok();
        if let Err(error) = result {
            tracing::error!(error, "the device cannot start");
            self.registers.needs_reset();
        }
    }

    /// Returns whether the descriptor table of a queue is memory of the guest, and not contiguous in this process.
    fn is_in_pieces(&self, layout: &Layout) -> bool {
        let len = u64::from(layout.size) * DESCRIPTOR;
        self.memory.contains(layout.desc, len) && self.memory.slice(layout.desc, len).is_err()
    }

    /// Returns whether this address is in memory that the client keeps to itself.
    fn is_unshared(&self, addr: u64) -> bool {
        let inside =
            |(start, len): &(u64, u64)| addr.checked_sub(*start).is_some_and(|skip| skip < *len);
        !self.memory.contains(addr, 1) && self.unshared.iter().any(inside)
    }

    fn reset(&mut self, backend: &mut dyn Backend) {
        self.note(Change::Bytes);
        if std::mem::take(&mut self.started) {
            backend.reset();
        }
        self.registers.reset();
        self.interrupts.take_isr();
    }
}

/// Makes the registers of a device that is fresh from reset.
fn registers_of(backend: &dyn Backend, interrupts: &Arc<Interrupts>) -> Result<Registers, Error> {
    let count = backend.queue_count();
    if count > MAX_QUEUES {
        return Err(Error::protocol(ProtocolError::Queues(count)));
    }
    let sizes: Vec<u16> = (0..count).map(|queue| backend.queue_max_size(queue)).collect();
    Ok(Registers::new(backend.offered(), &sizes, interrupts))
}

/// Logs why a region is not mapped, and returns the fault.
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

/// Logs why a part of a range is not unmapped, and returns the fault.
fn refused_unmap((guest_addr, len): (u64, u64), reason: ShareError) -> Fault {
    tracing::error!(%reason, "DMA_UNMAP of {len} bytes at {guest_addr:#x} would split a region");
    Fault::DmaCount
}

/// Returns the fault of a message that came with a descriptor of an unknown kind.
fn foreign_descriptor(number: u16, payload: &[u8]) -> Fault {
    match parse::<wire::DmaMap>(payload) {
        Ok(map) if number == command::DMA_MAP => {
            let (guest_addr, len) = (map.address.get(), map.size.get());
            refused_map(&MapError::FileSystem { guest_addr, len })
        }
        _ => Fault::DescriptorKind,
    }
}

/// Returns a reply to the message with this header.
fn reply(to: &Header, flags: u32, error: u32, payload: &[u8]) -> Vec<u8> {
    let length = size_of::<Header>() + payload.len();
    let header = Header {
        id: to.id,
        command: to.command,
        // No reply is longer than a message may be.
        size: u32::try_from(length).unwrap_or(u32::MAX).into(),
        flags: flags.into(),
        error: error.into(),
    };
    [header.as_bytes(), payload].concat()
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

/// Returns the size of a region, which is 0 for one that the device does not have.
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

/// Returns the offset of an access, which must be within its region.
fn check_access(access: &wire::RegionAccess) -> Result<usize, Fault> {
    let size = region_size(access.region.get())?;
    let (offset, len) = (access.offset.get(), u64::from(access.count.get()));
    let inside = offset.checked_add(len).is_some_and(|end| end <= size);
    if len == 0 || !inside || len > MAX_ACCESS as u64 {
        return Err(Fault::RegionBounds);
    }
    usize::try_from(offset).map_err(|_| Fault::RegionBounds)
}
