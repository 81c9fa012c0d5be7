// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The answers to a front end's requests.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use memory::{GuestMemory, MapError, Region};
use ring::Layout;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::channel::{Channel, ChannelError, Message};
use crate::vring::{QueueSetup, Vring};
use crate::wire::{
    flags, request, ConfigHead, Header, MemRegion, MemTable, SingleRegion, VringAddr, VringState,
    F_PROTOCOL_FEATURES, F_VERSION_1, MEM_SLOTS, PROTOCOL_FEATURES, PROTOCOL_F_REPLY_ACK,
    TABLE_REGIONS, VRING_INDEX, VRING_NO_FD,
};
use crate::{Backend, Fault, Faults};

/// DEVICE_NEEDS_RESET, VIRTIO 1.3, 2.1.
const STATUS_NEEDS_RESET: u64 = 0x40;

/// Messages that one call of [`Server::serve`] answers before others have their turn.
const BATCH: usize = 64;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket, or the stream of messages.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A faulty request to which the protocol knows no answer that says so.
    #[error("request {request}: {fault}")]
    Unanswerable {
        /// The request's number.
        request: u32,
        /// What is wrong with it.
        fault: Fault,
    },
}

impl Error {
    /// Whether the front end just went away.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Channel(ChannelError::Closed))
    }
}

/// What a request is answered with.
#[derive(Debug)]
enum Answer {
    /// Nothing, or that it went well if the front end wants to know.
    Done,
    /// A payload that the request asked for.
    Payload(Vec<u8>),
    /// Where the queue of this number would go on.
    Base(u32),
}

impl Answer {
    fn of(value: &(impl IntoBytes + Immutable)) -> Self {
        Self::Payload(value.as_bytes().to_vec())
    }
}

/// One connection of a front end.
///
/// Dropping it does not reset the backend: its owner does, with the backend in hand.
#[derive(Debug)]
pub struct Server {
    channel: Channel,
    faults: Faults,
    features: u64,
    protocol_features: u64,
    status: u64,
    memory: GuestMemory,
    /// The regions of `memory` as the front end named them.
    regions: Vec<MemRegion>,
    vrings: Vec<Vring>,
    /// Held so that the front end notices when this process ends.
    backend_requests: Option<OwnedFd>,
    /// What the last request is answered with, once the backend has done what it asks for.
    held: Option<(Header, Result<Answer, Fault>)>,
}

impl Server {
    /// Serves a front end that has just connected, which finds a device fresh from reset.
    pub fn new(socket: UnixStream, backend: &impl Backend) -> Self {
        let count = backend.queue_count().min(crate::MAX_QUEUES);
        let policy = backend.memory_policy();
        Self {
            channel: Channel::new(socket, policy.any_file),
            faults: Faults::default(),
            features: 0,
            protocol_features: 0,
            status: 0,
            memory: GuestMemory::new(policy),
            regions: Vec::new(),
            vrings: (0..count).map(|_| Vring::default()).collect(),
            backend_requests: None,
            held: None,
        }
    }

    /// What to wait for: when it is readable, call [`Server::serve`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Asks the driver for a reset, because the device cannot go on.
    ///
    /// A front end learns this when it asks for the status. user-mode Linux never does.
    pub fn needs_reset(&mut self) {
        self.status |= STATUS_NEEDS_RESET;
    }

    /// The guest's memory as the front end gave it out so far.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// What the front end did wrong so far.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Answers what the front end sent. Never waits, and does a bounded number of messages. Whether
    /// the backend is not settled: call again then, whether there is something to read or not.
    ///
    /// On an error the connection is over: reset the backend and drop this.
    pub fn serve(&mut self, backend: &mut impl Backend) -> Result<bool, Error> {
        for _ in 0..BATCH {
            if !self.answer_held(backend)? {
                return Ok(true);
            }
            let Some(message) = self.channel.receive()? else { return Ok(false) };
            let header = message.header;
            let result = self.handle(message, backend);
            if let Err(fault) = result {
                self.faults.count(fault, header.request);
            }
            self.held = Some((header, result));
        }
        Ok(!self.answer_held(backend)?)
    }

    /// Answers the request that waits for the backend, if that is settled; whether it is.
    fn answer_held(&mut self, backend: &impl Backend) -> Result<bool, Error> {
        if !backend.is_settled() {
            return Ok(false);
        }
        self.note_bases();
        if let Some((header, result)) = self.held.take() {
            self.answer(header, result)?;
        }
        Ok(true)
    }

    fn answer(&self, header: Header, result: Result<Answer, Fault>) -> Result<(), Error> {
        match result {
            Ok(Answer::Payload(payload)) => self.channel.reply(&header, &payload)?,
            Ok(Answer::Base(index)) => {
                let num = self.vrings[index as usize].base.into();
                self.channel.reply(&header, VringState { index, num }.as_bytes())?;
            }
            Err(_) if header.request == request::GET_CONFIG => self.channel.reply(&header, &[])?,
            Err(fault) if has_payload(header.request) => {
                return Err(Error::Unanswerable { request: header.request, fault })
            }
            Ok(Answer::Done) => self.acknowledge(&header, 0)?,
            Err(_) => self.acknowledge(&header, 1)?,
        }
        Ok(())
    }

    /// Says how a request went, if the front end asked for that.
    fn acknowledge(&self, header: &Header, status: u64) -> Result<(), ChannelError> {
        let negotiated = self.protocol_features & PROTOCOL_F_REPLY_ACK != 0;
        if negotiated && header.flags & flags::NEED_REPLY != 0 {
            self.channel.reply(header, status.as_bytes())?;
        }
        Ok(())
    }

    fn handle(&mut self, message: Message, backend: &mut impl Backend) -> Result<Answer, Fault> {
        let Message { header, payload, fds, fds_lost, fds_foreign } = message;
        if fds_lost {
            return Err(Fault::DescriptorsLost);
        }
        if fds_foreign {
            return Err(foreign_descriptor(header.request, &payload));
        }
        let payload = payload.as_slice();
        match header.request {
            request::GET_FEATURES => return Ok(Answer::of(&offered(backend))),
            request::SET_FEATURES => self.set_features(parse(payload)?, backend)?,
            request::GET_PROTOCOL_FEATURES => return Ok(Answer::of(&PROTOCOL_FEATURES)),
            request::SET_PROTOCOL_FEATURES => self.set_protocol_features(parse(payload)?)?,
            request::GET_QUEUE_NUM => return Ok(Answer::of(&(self.vrings.len() as u64))),
            request::SET_OWNER | request::SET_VRING_ERR => {}
            request::RESET_OWNER | request::RESET_DEVICE => self.reset(backend),
            request::SET_MEM_TABLE => self.set_mem_table(payload, &fds, backend)?,
            request::GET_MAX_MEM_SLOTS => return Ok(Answer::of(&MEM_SLOTS)),
            request::ADD_MEM_REG => self.add_region(&parse(payload)?, &fds, backend)?,
            request::REM_MEM_REG => self.remove_region(&parse(payload)?, backend)?,
            request::SET_VRING_NUM => self.set_size(parse(payload)?)?,
            request::SET_VRING_ADDR => self.set_addr(parse(payload)?, backend)?,
            request::SET_VRING_BASE => self.set_base(parse(payload)?)?,
            request::GET_VRING_BASE => return self.get_base(parse(payload)?, backend),
            request::SET_VRING_KICK => self.set_kick(parse(payload)?, fds, backend)?,
            request::SET_VRING_CALL => self.set_call(parse(payload)?, fds)?,
            request::SET_VRING_ENABLE => self.set_enable(parse(payload)?, backend)?,
            request::SET_BACKEND_REQ_FD => self.set_backend_requests(only(fds)?)?,
            request::GET_CONFIG => return get_config(payload, backend),
            request::SET_CONFIG => return Err(Fault::ConfigWrite),
            request::SET_STATUS => self.set_status(parse(payload)?, backend),
            request::GET_STATUS => return Ok(Answer::of(&self.status)),
            _ => return Err(Fault::UnknownRequest),
        }
        Ok(Answer::Done)
    }

    fn set_features(&mut self, features: u64, backend: &mut impl Backend) -> Result<(), Fault> {
        if features & !offered(backend) != 0 {
            return Err(Fault::Features);
        }
        self.features = features;
        backend.set_features(features);
        Ok(())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), Fault> {
        if features & !PROTOCOL_FEATURES != 0 {
            return Err(Fault::Features);
        }
        self.protocol_features = features;
        Ok(())
    }

    fn set_status(&mut self, status: u64, backend: &mut impl Backend) {
        if status == 0 {
            self.reset(backend);
        }
        // Only a reset takes that back.
        self.status = status | self.status & STATUS_NEEDS_RESET;
    }

    /// Stops every queue and forgets what was said of them.
    fn reset(&mut self, backend: &mut impl Backend) {
        self.stop(backend);
        for vring in &mut self.vrings {
            *vring = Vring { signal: Arc::clone(&vring.signal), ..Vring::default() };
        }
        self.status = 0;
    }

    /// Stops the device, and each queue with it, if any runs.
    fn stop(&mut self, backend: &mut impl Backend) {
        if self.vrings.iter().any(|vring| vring.running.is_some()) {
            backend.reset();
        }
        for vring in &mut self.vrings {
            if let Some(layout) = vring.running.take() {
                vring.stopped = Some(layout);
                vring.enabled = false;
            }
        }
    }

    /// Notes where the queues that have stopped would go on: the device writes to them no more.
    fn note_bases(&mut self) {
        for vring in &mut self.vrings {
            if let Some(layout) = vring.stopped.take() {
                vring.base = used_index(&self.memory, &layout);
            }
        }
    }

    fn set_mem_table(
        &mut self,
        payload: &[u8],
        fds: &[OwnedFd],
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        let (head, rest) = MemTable::read_from_prefix(payload).map_err(|_| Fault::Payload)?;
        let count = head.count as usize;
        if count > TABLE_REGIONS {
            return Err(Fault::RegionCount);
        }
        let regions = entries(rest, count)?;
        if fds.len() != count {
            return Err(Fault::Descriptors);
        }
        let mut memory = self.memory.cleared();
        for (region, fd) in regions.iter().zip(fds) {
            memory = map(&memory, region, fd)?;
        }
        self.regions = regions;
        self.change_memory(memory, backend);
        Ok(())
    }

    fn add_region(
        &mut self,
        single: &SingleRegion,
        fds: &[OwnedFd],
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        let [fd] = fds else { return Err(Fault::Descriptors) };
        if self.regions.len() as u64 >= MEM_SLOTS {
            return Err(Fault::RegionCount);
        }
        let memory = map(&self.memory, &single.region, fd)?;
        self.regions.push(single.region);
        self.change_memory(memory, backend);
        Ok(())
    }

    fn remove_region(
        &mut self,
        single: &SingleRegion,
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        let MemRegion { guest_addr, size, user_addr, .. } = single.region;
        let known =
            |r: &MemRegion| (r.guest_addr, r.size, r.user_addr) == (guest_addr, size, user_addr);
        let index = self.regions.iter().position(known).ok_or(Fault::RegionUnknown)?;
        self.regions.remove(index);
        let (memory, _) = self.memory.without(guest_addr, size);
        self.change_memory(memory, backend);
        Ok(())
    }

    fn change_memory(&mut self, memory: GuestMemory, backend: &mut impl Backend) {
        self.memory = memory;
        if self.vrings.iter().any(|vring| vring.running.is_some()) {
            backend.set_memory(&self.memory);
        }
    }

    /// Front ends choose the size by themselves, so that only the ring's own limits hold.
    fn set_size(&mut self, state: VringState) -> Result<(), Fault> {
        let vring = self.idle(state.index.into())?;
        let size = u16::try_from(state.num).map_err(|_| Fault::QueueValue)?;
        if !size.is_power_of_two() || size > ring::MAX_SIZE {
            return Err(Fault::QueueValue);
        }
        vring.size = size;
        Ok(())
    }

    fn set_addr(&mut self, addr: VringAddr, backend: &mut impl Backend) -> Result<(), Fault> {
        self.idle(addr.index.into())?.addr = Some(addr);
        self.start_if_ready(addr.index as usize, backend)
    }

    fn set_base(&mut self, state: VringState) -> Result<(), Fault> {
        let base = u16::try_from(state.num).map_err(|_| Fault::QueueValue)?;
        self.idle(state.index.into())?.base = base;
        Ok(())
    }

    /// Stops the queue, and with it the device, and says where it would go on.
    fn get_base(&mut self, state: VringState, backend: &mut impl Backend) -> Result<Answer, Fault> {
        let index = state.index as usize;
        self.vring(index as u64)?;
        self.stop(backend);
        self.vring(index as u64)?.kick = None;
        Ok(Answer::Base(state.index))
    }

    fn set_kick(
        &mut self,
        which: u64,
        fds: Vec<OwnedFd>,
        backend: &mut impl Backend,
    ) -> Result<(), Fault> {
        let fd = vring_fd(which, fds)?;
        check_event(fd.as_ref())?;
        let plain = self.features & F_PROTOCOL_FEATURES == 0;
        let vring = self.idle(which & VRING_INDEX)?;
        vring.kick = fd;
        // Without the feature there is no SET_VRING_ENABLE: the kick starts the queue.
        vring.enabled |= plain;
        self.start_if_ready((which & VRING_INDEX) as usize, backend)
    }

    fn set_backend_requests(&mut self, fd: OwnedFd) -> Result<(), Fault> {
        if !descriptor::is_socket(&fd) {
            return Err(Fault::DescriptorKind);
        }
        self.backend_requests = Some(fd);
        Ok(())
    }

    fn set_call(&mut self, which: u64, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        let fd = vring_fd(which, fds)?;
        check_event(fd.as_ref())?;
        let vring = self.vring(which & VRING_INDEX)?;
        vring.signal.set(fd).map_err(|_| Fault::Descriptors)
    }

    fn set_enable(&mut self, state: VringState, backend: &mut impl Backend) -> Result<(), Fault> {
        let enable = match state.num {
            0 => false,
            1 => true,
            _ => return Err(Fault::QueueValue),
        };
        let vring = self.vring(state.index.into())?;
        let runs = vring.running.is_some();
        vring.enabled = enable;
        match (enable, runs) {
            (true, _) => self.start_if_ready(state.index as usize, backend),
            (false, true) => {
                self.stop(backend);
                Ok(())
            }
            (false, false) => Ok(()),
        }
    }

    fn start_if_ready(&mut self, index: usize, backend: &mut impl Backend) -> Result<(), Fault> {
        let vring = &mut self.vrings[index];
        let (true, Some(addr)) = (vring.ready(), vring.addr) else { return Ok(()) };
        let guest = |addr| translate(&self.regions, addr).ok_or(Fault::QueueAddress);
        let layout = Layout {
            size: vring.size,
            desc: guest(addr.desc)?,
            avail: guest(addr.avail)?,
            used: guest(addr.used)?,
            event_idx: false,
        };
        let kick = vring.kick.take().ok_or(Fault::QueueSetup)?;
        let (memory, signal) = (self.memory.clone(), Arc::clone(&vring.signal));
        let setup = QueueSetup { memory, layout, base: vring.base, kick, signal };
        let queue = u16::try_from(index).map_err(|_| Fault::QueueIndex)?;
        backend.start_queue(queue, setup).map_err(|error| {
            tracing::warn!(queue, error, "the queue does not start");
            Fault::QueueSetup
        })?;
        vring.running = Some(layout);
        Ok(())
    }

    fn vring(&mut self, index: u64) -> Result<&mut Vring, Fault> {
        let index = usize::try_from(index).map_err(|_| Fault::QueueIndex)?;
        self.vrings.get_mut(index).ok_or(Fault::QueueIndex)
    }

    /// A queue that does not run.
    fn idle(&mut self, index: u64) -> Result<&mut Vring, Fault> {
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            return Err(Fault::QueueRunning);
        }
        Ok(vring)
    }
}

/// The feature bits that the device and this transport have together.
///
/// Not the event index: it would keep an armed CQ that holds CQEs already from signalling the next.
/// Not indirect descriptors: no chain of this device has more than two. And a driver that declines a
/// bit while it validates makes user-mode Linux forget that it negotiated protocol features.
fn offered(backend: &impl Backend) -> u64 {
    backend.features() | F_VERSION_1 | F_PROTOCOL_FEATURES
}

/// Whether the answer to a request has a payload of its own.
fn has_payload(number: u32) -> bool {
    matches!(
        number,
        request::GET_FEATURES
            | request::GET_PROTOCOL_FEATURES
            | request::GET_QUEUE_NUM
            | request::GET_VRING_BASE
            | request::GET_MAX_MEM_SLOTS
            | request::GET_STATUS
    )
}

fn parse<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<T, Fault> {
    T::read_from_bytes(payload).map_err(|_| Fault::Payload)
}

/// The only file descriptor of a message.
fn only(fds: Vec<OwnedFd>) -> Result<OwnedFd, Fault> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| Fault::Descriptors)?;
    Ok(fd)
}

/// The file descriptor that the payload of SET_VRING_KICK and its like speaks of.
fn vring_fd(which: u64, fds: Vec<OwnedFd>) -> Result<Option<OwnedFd>, Fault> {
    if which & !(VRING_INDEX | VRING_NO_FD) != 0 {
        return Err(Fault::QueueIndex);
    }
    match (which & VRING_NO_FD != 0, fds.is_empty()) {
        (true, true) => Ok(None),
        (false, false) => only(fds).map(Some),
        _ => Err(Fault::Descriptors),
    }
}

fn entries(bytes: &[u8], count: usize) -> Result<Vec<MemRegion>, Fault> {
    let mut rest = bytes;
    let mut regions = Vec::with_capacity(count);
    for _ in 0..count {
        let (region, behind) = MemRegion::read_from_prefix(rest).map_err(|_| Fault::Payload)?;
        regions.push(region);
        rest = behind;
    }
    Ok(regions)
}

/// Refuses what is neither an eventfd nor a socket.
fn check_event(fd: Option<&OwnedFd>) -> Result<(), Fault> {
    let suits = |fd| descriptor::is_eventfd(fd) || descriptor::is_socket(fd);
    if fd.is_some_and(|fd| !suits(fd)) {
        return Err(Fault::DescriptorKind);
    }
    Ok(())
}

/// What is wrong with a message that came with a descriptor of no known kind.
fn foreign_descriptor(number: u32, payload: &[u8]) -> Fault {
    match number {
        request::SET_MEM_TABLE => {
            tracing::error!(
                "SET_MEM_TABLE: the file of a region is none of memfd, tmpfs or hugetlbfs \
                 (any-file=on takes others)"
            );
            Fault::RegionFile
        }
        request::ADD_MEM_REG => match parse::<SingleRegion>(payload) {
            Ok(SingleRegion { region: MemRegion { guest_addr, size: len, .. }, .. }) => {
                refused_region(&MapError::FileSystem { guest_addr, len })
            }
            Err(fault) => fault,
        },
        _ => Fault::DescriptorKind,
    }
}

/// Why a region is not mapped, which the log says with its name.
fn refused_region(error: &MapError) -> Fault {
    tracing::error!(%error, "the device does not have this memory of the guest");
    match error {
        MapError::TooMany { .. } => Fault::RegionCount,
        MapError::FileSystem { .. } => Fault::RegionFile,
        MapError::Os { .. } => Fault::RegionRefused,
        MapError::Alignment { .. }
        | MapError::Overflow { .. }
        | MapError::Overlap { .. }
        | MapError::Truncated { .. } => Fault::Region,
    }
}

fn map(memory: &GuestMemory, region: &MemRegion, fd: &OwnedFd) -> Result<GuestMemory, Fault> {
    if region.user_addr.checked_add(region.size).is_none() {
        return Err(Fault::Region);
    }
    let region = Region {
        guest_addr: region.guest_addr,
        len: region.size,
        fd: fd.as_fd(),
        offset: region.mmap_offset,
        writable: true,
    };
    memory.with_region(&region).map_err(|error| refused_region(&error))
}

/// The guest address of a front end's own address.
fn translate(regions: &[MemRegion], user_addr: u64) -> Option<u64> {
    regions.iter().find_map(|region| {
        let offset = user_addr.checked_sub(region.user_addr)?;
        (offset < region.size).then(|| region.guest_addr + offset)
    })
}

/// The used index of a ring, from which a queue goes on: what was not given back is served again.
fn used_index(memory: &GuestMemory, layout: &Layout) -> u16 {
    let index = memory.read_obj::<u16>(layout.used.wrapping_add(2));
    index.map(u16::from_le).unwrap_or_default()
}

fn get_config(payload: &[u8], backend: &impl Backend) -> Result<Answer, Fault> {
    let (head, rest) = ConfigHead::read_from_prefix(payload).map_err(|_| Fault::Payload)?;
    let (offset, size) = (head.offset as usize, head.size as usize);
    if rest.len() != size {
        return Err(Fault::Payload);
    }
    let end = offset.checked_add(size).ok_or(Fault::ConfigBounds)?;
    let bytes = backend.config().get(offset..end).ok_or(Fault::ConfigBounds)?;
    Ok(Answer::Payload([head.as_bytes(), bytes].concat()))
}
