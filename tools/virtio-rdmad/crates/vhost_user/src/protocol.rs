// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The meaning of a front end's requests, and the answers to them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use memory::{GuestMemory, GuestRegion, MapError, Share};
use ring::Layout;
use serde::{Deserialize, Serialize};
use virtio_transport::{
    Backend, Change, ConnectionState, Deed, Error, Faults, Limits, Message, Protocol, QueueSetup,
    ResumeError, Server,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::vring::{SavedVring, Vring};
use crate::wire::{
    flags, request, ConfigHead, Header, MemRegion, MemTable, SingleRegion, VringAddr, VringState,
    F_PROTOCOL_FEATURES, F_VERSION_1, MAX_FDS, MAX_PAYLOAD, MEM_SLOTS, PROTOCOL_FEATURES,
    PROTOCOL_F_REPLY_ACK, TABLE_REGIONS, VRING_INDEX, VRING_NO_FD,
};
use crate::Fault;

/// DEVICE_NEEDS_RESET, VIRTIO 1.3, 2.1.
const STATUS_NEEDS_RESET: u64 = 0x40;

/// The limits for the messages of a front end.
const LIMITS: Limits =
    Limits { message: size_of::<Header>() + MAX_PAYLOAD, fds: MAX_FDS, batch: 64 };

/// A message of another version, or a reply to a request that was never made.
#[derive(Debug, thiserror::Error)]
#[error("a message with flags {0:#x}")]
pub struct BadFlags(pub u32);

/// A faulty request to which the protocol knows no answer that says so.
#[derive(Debug, thiserror::Error)]
#[error("request {request}: {fault}")]
pub struct Unanswerable {
    /// The request's number.
    pub request: u32,
    /// The fault of the request.
    pub fault: Fault,
}

/// The answer to a request.
#[derive(Debug)]
enum Answer {
    /// The answer has no payload: it is an acknowledgement if the front end wants one, and is not sent otherwise.
    Done,
    /// A payload that the request asked for.
    Payload(Vec<u8>),
    /// The index at which the queue of this number would go on.
    Base(u32),
}

impl Answer {
    fn of(value: &(impl IntoBytes + Immutable)) -> Self {
        Self::Payload(value.as_bytes().to_vec())
    }
}

/// Serves the device `backend` to a front end that has just connected to `socket`. The front end
/// finds a device fresh from reset.
pub fn serve(socket: UnixStream, backend: &dyn Backend) -> Server<VhostUser> {
    Server::new(socket, VhostUser::new(backend), LIMITS)
}

/// Goes on with a connection that another process served, whose state this is. See [`serve`]. Its front end may give
/// out as many regions of memory as `share` has.
///
/// The caller makes the device what it was, with [`Server::queues`], or has it fail.
pub fn resume(
    socket: UnixStream,
    share: Share,
    state: ConnectionState,
) -> Result<Server<VhostUser>, ResumeError> {
    Ok(Server::new(socket, VhostUser::load(share, state)?, LIMITS))
}

/// The state of a connection: what the front end has said, in the order of the descriptors. Those of the regions come
/// first, that of the back end's requests last.
#[derive(Debug, Deserialize, Serialize)]
struct SavedFrontEnd {
    features: u64,
    protocol_features: u64,
    status: u64,
    regions: Vec<MemRegion>,
    vrings: Vec<SavedVring>,
    has_backend_requests: bool,
}

impl SavedFrontEnd {
    /// Decodes the state of a connection.
    fn of(state: &ConnectionState) -> Result<Self, ResumeError> {
        postcard::from_bytes(&state.bytes).map_err(ResumeError::Encoding)
    }

    /// Returns how many descriptors there are.
    fn descriptors(&self) -> usize {
        let of_vrings: usize = self.vrings.iter().map(SavedVring::descriptors).sum();
        self.regions.len() + of_vrings + usize::from(self.has_backend_requests)
    }
}

/// The state of one connection: all that the front end has said so far.
#[derive(Debug)]
pub struct VhostUser {
    faults: Faults<Fault>,
    features: u64,
    protocol_features: u64,
    status: u64,
    memory: GuestMemory,
    /// The regions of `memory` as the front end named them, and their files.
    regions: Vec<(MemRegion, Arc<OwnedFd>)>,
    vrings: Vec<Vring>,
    /// Kept open so that the front end notices when this process ends.
    backend_requests: Option<Arc<OwnedFd>>,
    /// The difference between the state and the state that a journal has.
    change: Change,
    /// The answer to the last request. It is sent once the backend has done what the request asks for.
    answer: Option<(Header, Result<Answer, Fault>)>,
}

impl Protocol for VhostUser {
    fn message_length(&self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        let Ok((header, _)) = Header::read_from_prefix(bytes) else { return Ok(None) };
        if header.flags & (flags::VERSION_MASK | flags::REPLY) != flags::VERSION {
            return Err(Error::protocol(BadFlags(header.flags)));
        }
        Ok(Some(size_of::<Header>().saturating_add(header.size as usize)))
    }

    fn handle(&mut self, message: Message, backend: &mut dyn Backend) -> Result<(), Error> {
        let bytes = message.bytes.as_slice();
        let Ok((header, _)) = Header::read_from_prefix(bytes) else {
            return Err(Error::Length(bytes.len()));
        };
        let result = self.execute(&header, message, backend);
        if let Err(fault) = result {
            self.faults.count(fault, header.request);
        }
        self.answer = Some((header, result));
        Ok(())
    }

    fn take_reply(&mut self) -> Result<Option<Vec<u8>>, Error> {
        self.note_bases();
        let Some((header, result)) = self.answer.take() else { return Ok(None) };
        let payload = match result {
            Ok(Answer::Payload(payload)) => payload,
            Ok(Answer::Base(index)) => {
                let num = self.vrings[index as usize].base.into();
                VringState { index, num }.as_bytes().to_vec()
            }
            Err(_) if header.request == request::GET_CONFIG => Vec::new(),
            Err(fault) if has_payload(header.request) => {
                return Err(Error::protocol(Unanswerable { request: header.request, fault }))
            }
            // An acknowledgement, if the front end asked for one.
            result if self.wants_acknowledgement(&header) => {
                u64::from(result.is_err()).as_bytes().to_vec()
            }
            _ => return Ok(None),
        };
        Ok(Some(reply(&header, &payload)))
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// A front end learns this when it asks for the status, which user-mode Linux never does.
    fn needs_reset(&mut self) {
        self.status |= STATUS_NEEDS_RESET;
        self.note(Change::Bytes);
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn missing_features(&self, features: u64) -> u64 {
        self.features & !with_own(features)
    }

    /// A front end asks for what is offered each time.
    fn withdraw(&mut self, _features: u64) {}

    fn queues(&self) -> Vec<QueueSetup> {
        let started = (0..self.vrings.len()).filter(|index| self.vrings[*index].started.is_some());
        started.filter_map(|index| self.setup(index).ok()).collect()
    }

    /// One queue that has stopped stops the device: its other queues are of no use without that one.
    fn is_paused(&self) -> bool {
        self.vrings.iter().any(Vring::is_stopped)
    }

    fn fail(&mut self, backend: &mut dyn Backend) -> Result<(), ResumeError> {
        let count = backend.queue_count().min(crate::MAX_QUEUES);
        if self.vrings.len() != count.into() {
            return Err(ResumeError::Device);
        }
        let missing = self.missing_features(backend.features());
        if missing != 0 {
            return Err(ResumeError::Features(missing));
        }
        self.needs_reset();
        let mut queues = self.queues();
        if queues.is_empty() {
            return Ok(());
        }
        for queue in &mut queues {
            queue.base = used_index(&self.memory, &queue.layout);
        }
        backend.set_features(self.features);
        backend.fail(&self.memory, queues).map_err(ResumeError::Fail)
    }

    fn take_change(&mut self) -> Change {
        std::mem::take(&mut self.change)
    }

    fn state(&self) -> ConnectionState {
        let mut descriptors: Vec<_> = self.regions.iter().map(|(_, file)| file.clone()).collect();
        let vrings = self.vrings.iter().map(|vring| vring.save(&mut descriptors)).collect();
        descriptors.extend(self.backend_requests.clone());
        let saved = SavedFrontEnd {
            features: self.features,
            protocol_features: self.protocol_features,
            status: self.status,
            regions: self.regions.iter().map(|(region, _)| *region).collect(),
            vrings,
            has_backend_requests: self.backend_requests.is_some(),
        };
        // Nothing of this can fail to be encoded into memory.
        ConnectionState { bytes: postcard::to_stdvec(&saved).unwrap_or_default(), descriptors }
    }
}

impl VhostUser {
    fn new(backend: &dyn Backend) -> Self {
        Self::with(backend.queue_count().min(crate::MAX_QUEUES), backend.memory_share())
    }

    fn with(count: u16, share: Share) -> Self {
        Self {
            faults: Faults::default(),
            features: 0,
            protocol_features: 0,
            status: 0,
            memory: GuestMemory::new(share),
            regions: Vec::new(),
            vrings: (0..count).map(|_| Vring::default()).collect(),
            backend_requests: None,
            change: Change::No,
            answer: None,
        }
    }

    /// Makes this of what the front end has said to another process.
    fn load(share: Share, state: ConnectionState) -> Result<Self, ResumeError> {
        let saved = SavedFrontEnd::of(&state)?;
        let ConnectionState { descriptors, .. } = state;
        let (named, there) = (saved.descriptors(), descriptors.len());
        if named != there {
            return Err(ResumeError::Descriptors { named, there });
        }
        let count = u16::try_from(saved.vrings.len()).ok().filter(|n| *n <= crate::MAX_QUEUES);
        let too_many = saved.vrings.len() as u64;
        let too_many = ResumeError::Value { what: "number of queues", value: too_many };
        let mut this = Self::with(count.ok_or(too_many)?, share);
        let mut descriptors = descriptors.into_iter();
        for (region, file) in saved.regions.iter().zip(&mut descriptors) {
            this.memory = this.memory.with_region_again(&of_file(region, &file))?;
            this.regions.push((*region, file));
        }
        let load = |saved| Vring::load(saved, &mut descriptors);
        this.vrings = saved.vrings.iter().map(load).collect();
        this.backend_requests = descriptors.next();
        (this.features, this.status) = (saved.features, saved.status);
        this.protocol_features = saved.protocol_features;
        let started = (0..).zip(&saved.vrings).filter(|(_, vring)| vring.has_started());
        for (index, _) in started {
            let refused = |_| ResumeError::Value { what: "address of queue", value: index as u64 };
            this.vrings[index].started = Some(this.layout(index).map_err(refused)?);
        }
        Ok(this)
    }

    /// Notes that what the front end has said is more than a journal has.
    fn note(&mut self, change: Change) {
        self.change = self.change.max(change);
    }

    /// Returns what the front end did wrong so far.
    pub fn faults(&self) -> &Faults<Fault> {
        &self.faults
    }

    fn wants_acknowledgement(&self, header: &Header) -> bool {
        let negotiated = self.protocol_features & PROTOCOL_F_REPLY_ACK != 0;
        negotiated && header.flags & flags::NEED_REPLY != 0
    }

    fn execute(
        &mut self,
        header: &Header,
        message: Message,
        backend: &mut dyn Backend,
    ) -> Result<Answer, Fault> {
        let Message { bytes, fds, fds_lost, fds_foreign } = message;
        let payload = &bytes[size_of::<Header>()..];
        if fds_lost {
            return Err(Fault::DescriptorsLost);
        }
        if fds_foreign {
            return Err(foreign_descriptor(header.request, payload));
        }
        self.note(change_of(header.request));
        match header.request {
            request::GET_FEATURES => return Ok(Answer::of(&with_own(backend.offered()))),
            request::SET_FEATURES => self.set_features(parse(payload)?, backend)?,
            request::GET_PROTOCOL_FEATURES => return Ok(Answer::of(&PROTOCOL_FEATURES)),
            request::SET_PROTOCOL_FEATURES => self.set_protocol_features(parse(payload)?)?,
            request::GET_QUEUE_NUM => return Ok(Answer::of(&(self.vrings.len() as u64))),
            request::SET_OWNER | request::SET_VRING_ERR => {}
            request::RESET_OWNER | request::RESET_DEVICE => self.reset(backend),
            request::SET_MEM_TABLE => self.set_mem_table(payload, fds, backend)?,
            request::GET_MAX_MEM_SLOTS => return Ok(Answer::of(&MEM_SLOTS)),
            request::ADD_MEM_REG => self.add_region(&parse(payload)?, fds, backend)?,
            request::REM_MEM_REG => self.remove_region(&parse(payload)?, backend)?,
            request::SET_VRING_NUM => self.set_size(parse(payload)?, backend)?,
            request::SET_VRING_ADDR => self.set_addr(parse(payload)?, backend)?,
            request::SET_VRING_BASE => self.set_base(parse(payload)?, backend)?,
            request::GET_VRING_BASE => return self.get_base(parse(payload)?, backend),
            request::SET_VRING_KICK => self.set_kick(parse(payload)?, fds, backend)?,
            request::SET_VRING_CALL => self.set_call(parse(payload)?, fds)?,
            request::SET_VRING_ENABLE => self.set_enable(parse(payload)?, backend)?,
            request::SET_BACKEND_REQ_FD => self.set_backend_requests(only(fds)?)?,
            request::GET_CONFIG => {
                let answer = get_config(payload, backend)?;
                backend.note(deed_of(payload));
                return Ok(answer);
            }
            // The fields are read-only, and some front ends end if this is refused.
            request::SET_CONFIG => self.faults.count(Fault::ConfigWrite, header.request),
            request::SET_STATUS => self.set_status(parse(payload)?, backend),
            request::GET_STATUS => return Ok(Answer::of(&self.status)),
            _ => return Err(Fault::UnknownRequest),
        }
        Ok(Answer::Done)
    }

    fn set_features(&mut self, features: u64, backend: &mut dyn Backend) -> Result<(), Fault> {
        // A front end may know the features that an earlier process has offered.
        if features & !with_own(backend.features()) != 0 {
            return Err(Fault::Features);
        }
        if self.is_paused() && features != self.features {
            self.renew(backend);
        }
        self.features = features;
        Ok(())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), Fault> {
        if features & !PROTOCOL_FEATURES != 0 {
            return Err(Fault::Features);
        }
        self.protocol_features = features;
        Ok(())
    }

    fn set_status(&mut self, status: u64, backend: &mut dyn Backend) {
        if let Ok(status) = u8::try_from(status) {
            backend.note(Deed::WriteStatus { status, features: self.features });
        }
        if status == 0 {
            self.reset(backend);
        }
        // Only a reset clears that bit.
        self.status = status | self.status & STATUS_NEEDS_RESET;
    }

    /// Resets the device and forgets what the front end said of its queues.
    fn reset(&mut self, backend: &mut dyn Backend) {
        self.renew(backend);
        for vring in &mut self.vrings {
            *vring = Vring { call: Arc::clone(&vring.call), ..Vring::default() };
        }
    }

    /// Resets the device, if it has started. What the front end said of its queues is for the device's next life.
    fn renew(&mut self, backend: &mut dyn Backend) {
        if self.has_started() {
            backend.reset();
        }
        for vring in &mut self.vrings {
            vring.started = None;
        }
        self.status = 0;
    }

    /// Returns whether the device has a queue.
    fn has_started(&self) -> bool {
        self.vrings.iter().any(|vring| vring.started.is_some())
    }

    /// Stops a queue as `stop` says. A queue that has stopped pauses the device.
    fn stop(
        &mut self,
        index: u64,
        stop: fn(&mut Vring),
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        let was_paused = self.is_paused();
        stop(self.vring(index)?);
        if self.is_paused() && !was_paused {
            backend.freeze();
            for vring in &mut self.vrings {
                vring.is_base_old = vring.started.is_some();
            }
        }
        Ok(())
    }

    /// Notes where the queues that have stopped would go on. The device writes to them no more.
    fn note_bases(&mut self) {
        for vring in &mut self.vrings {
            if let (true, Some(layout)) = (std::mem::take(&mut vring.is_base_old), &vring.started) {
                vring.base = used_index(&self.memory, layout);
            }
        }
    }

    fn set_mem_table(
        &mut self,
        payload: &[u8],
        fds: Vec<OwnedFd>,
        backend: &mut dyn Backend,
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
        for (region, fd) in regions.iter().zip(&fds) {
            memory = map(&memory, region, fd)?;
        }
        self.regions = regions.into_iter().zip(fds.into_iter().map(Arc::new)).collect();
        self.change_memory(memory, backend);
        Ok(())
    }

    fn add_region(
        &mut self,
        single: &SingleRegion,
        fds: Vec<OwnedFd>,
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        let fd = only(fds)?;
        if self.regions.len() as u64 >= MEM_SLOTS {
            return Err(Fault::RegionCount);
        }
        let memory = map(&self.memory, &single.region, &fd)?;
        self.regions.push((single.region, Arc::new(fd)));
        self.change_memory(memory, backend);
        Ok(())
    }

    fn remove_region(
        &mut self,
        single: &SingleRegion,
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        let MemRegion { guest_addr, size, user_addr, .. } = single.region;
        let known = |(r, _): &(MemRegion, _)| {
            (r.guest_addr, r.size, r.user_addr) == (guest_addr, size, user_addr)
        };
        let index = self.regions.iter().position(known).ok_or(Fault::RegionUnknown)?;
        self.regions.remove(index);
        let (memory, _) = self.memory.without(guest_addr, size);
        self.change_memory(memory, backend);
        Ok(())
    }

    fn change_memory(&mut self, memory: GuestMemory, backend: &mut dyn Backend) {
        self.memory = memory;
        if self.has_started() {
            backend.set_memory(&self.memory);
        }
    }

    /// Front ends do not ask for the largest size, so only the limits of rings hold here.
    fn set_size(&mut self, state: VringState, backend: &mut dyn Backend) -> Result<(), Fault> {
        let vring = self.idle(state.index.into())?;
        let size = u16::try_from(state.num).map_err(|_| Fault::QueueValue)?;
        if !size.is_power_of_two() || size > ring::MAX_SIZE {
            return Err(Fault::QueueValue);
        }
        let is_other = vring.started.is_some() && vring.size != size;
        vring.size = size;
        self.renew_if(is_other, backend);
        Ok(())
    }

    fn set_addr(&mut self, addr: VringAddr, backend: &mut dyn Backend) -> Result<(), Fault> {
        let index = addr.index as usize;
        let vring = self.idle(addr.index.into())?;
        vring.addr = Some(addr);
        let started = vring.started.as_ref().map(places);
        let is_other = started.is_some() && started != self.layout(index).ok().as_ref().map(places);
        self.renew_if(is_other, backend);
        self.start_if_ready(index, backend)
    }

    /// All that the driver made came through the first queue. So an index of 0 there is always that of a new ring, or
    /// of a device that has nothing to lose.
    fn set_base(&mut self, state: VringState, backend: &mut dyn Backend) -> Result<(), Fault> {
        let base = u16::try_from(state.num).map_err(|_| Fault::QueueValue)?;
        let vring = self.idle(state.index.into())?;
        let is_first = state.index == 0 && base == 0;
        let is_other = vring.started.is_some() && (vring.base != base || is_first);
        vring.base = base;
        self.renew_if(is_other, backend);
        Ok(())
    }

    /// Resets the device that is paused if a queue `is_other`: the driver has begun again, and the front end has no
    /// other sign of that.
    fn renew_if(&mut self, is_other: bool, backend: &mut dyn Backend) {
        if is_other {
            self.renew(backend);
        }
    }

    /// Stops the queue, and pauses the device with it. The answer says where the queue would go on.
    fn get_base(&mut self, state: VringState, backend: &mut dyn Backend) -> Result<Answer, Fault> {
        self.stop(state.index.into(), |vring| vring.kick = None, backend)?;
        Ok(Answer::Base(state.index))
    }

    fn set_kick(
        &mut self,
        which: u64,
        fds: Vec<OwnedFd>,
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        let fd = vring_fd(which, fds)?;
        check_event(fd.as_ref())?;
        let plain = self.features & F_PROTOCOL_FEATURES == 0;
        let was_paused = self.is_paused();
        let vring = self.idle(which & VRING_INDEX)?;
        vring.kick = fd.map(Arc::new);
        // Without the feature there is no SET_VRING_ENABLE, and the kick starts the queue.
        vring.enabled |= plain;
        self.go_on((which & VRING_INDEX) as usize, was_paused, backend)
    }

    fn set_backend_requests(&mut self, fd: OwnedFd) -> Result<(), Fault> {
        if !descriptor::is_socket(&fd) {
            return Err(Fault::DescriptorKind);
        }
        self.backend_requests = Some(Arc::new(fd));
        Ok(())
    }

    fn set_call(&mut self, which: u64, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        let fd = vring_fd(which, fds)?;
        check_event(fd.as_ref())?;
        let vring = self.vring(which & VRING_INDEX)?;
        vring.call.set(fd).map_err(|_| Fault::Descriptors)
    }

    fn set_enable(&mut self, state: VringState, backend: &mut dyn Backend) -> Result<(), Fault> {
        let enable = match state.num {
            0 => false,
            1 => true,
            _ => return Err(Fault::QueueValue),
        };
        if !enable {
            return self.stop(state.index.into(), |vring| vring.enabled = false, backend);
        }
        let was_paused = self.is_paused();
        self.vring(state.index.into())?.enabled = true;
        self.go_on(state.index as usize, was_paused, backend)
    }

    /// Starts a queue if it is ready, and ends the pause if it was the last one that had stopped.
    fn go_on(
        &mut self,
        index: usize,
        was_paused: bool,
        backend: &mut dyn Backend,
    ) -> Result<(), Fault> {
        if was_paused && !self.is_paused() {
            backend.thaw(self.queues()).map_err(|error| {
                tracing::warn!(queue = index, error, "the device does not go on");
                self.vrings[index].kick = None;
                Fault::QueueSetup
            })?;
        }
        self.start_if_ready(index, backend)
    }

    /// Starts a queue if it is ready. Queues that were ready before a reset by new rings start with the first.
    fn start_if_ready(&mut self, index: usize, backend: &mut dyn Backend) -> Result<(), Fault> {
        if !self.vrings[index].is_ready() {
            return Ok(());
        }
        if self.has_started() {
            return self.start(index, backend);
        }
        backend.set_features(self.features);
        self.start(index, backend)?;
        let others = (0..self.vrings.len()).filter(|other| self.vrings[*other].is_ready());
        others.collect::<Vec<_>>().into_iter().try_for_each(|other| self.start(other, backend))
    }

    fn start(&mut self, index: usize, backend: &mut dyn Backend) -> Result<(), Fault> {
        let queue = self.setup(index)?;
        let layout = queue.layout;
        backend.start(&self.memory, vec![queue]).map_err(|error| {
            tracing::warn!(queue = index, error, "the queue does not start");
            Fault::QueueSetup
        })?;
        self.vrings[index].started = Some(layout);
        Ok(())
    }

    /// Returns where a queue is, of which the front end has said everything.
    fn layout(&self, index: usize) -> Result<Layout, Fault> {
        let vring = &self.vrings[index];
        let addr = vring.addr.ok_or(Fault::QueueSetup)?;
        let guest = |addr| translate(&self.regions, addr).ok_or(Fault::QueueAddress);
        Ok(Layout {
            size: vring.size,
            desc: guest(addr.desc)?,
            avail: guest(addr.avail)?,
            used: guest(addr.used)?,
            event_idx: false,
        })
    }

    /// Returns what the backend needs to start a queue, of which the front end has said everything.
    fn setup(&self, index: usize) -> Result<QueueSetup, Fault> {
        let layout = self.layout(index)?;
        let vring = &self.vrings[index];
        let (kick, signal) = (vring.kick.clone(), vring.call.clone());
        let index = u16::try_from(index).map_err(|_| Fault::QueueIndex)?;
        Ok(QueueSetup { index, layout, base: vring.base, kick, signal })
    }

    fn vring(&mut self, index: u64) -> Result<&mut Vring, Fault> {
        let index = usize::try_from(index).map_err(|_| Fault::QueueIndex)?;
        self.vrings.get_mut(index).ok_or(Fault::QueueIndex)
    }

    /// Returns a queue, which must not run.
    fn idle(&mut self, index: u64) -> Result<&mut Vring, Fault> {
        let is_paused = self.is_paused();
        let vring = self.vring(index)?;
        if vring.started.is_some() && !is_paused {
            return Err(Fault::QueueRunning);
        }
        Ok(vring)
    }
}

/// Returns where the parts of a ring are.
fn places(layout: &Layout) -> [u64; 3] {
    [layout.desc, layout.avail, layout.used]
}

/// Returns the feature bits that a device with these features and this transport offer.
///
/// The event index is not offered: an armed CQ that has CQEs already would not signal the next one.
/// Indirect descriptors are not: no chain of this device has more than two. A driver that declines a bit
/// while it validates makes user-mode Linux forget that it negotiated protocol features.
fn with_own(features: u64) -> u64 {
    features | F_VERSION_1 | F_PROTOCOL_FEATURES
}

/// Returns whether the answer to a request has a payload of its own.
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

/// Returns an answer to the request with this header.
fn reply(to: &Header, payload: &[u8]) -> Vec<u8> {
    // No payload is longer than a request may be.
    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let header = Header { request: to.request, flags: flags::VERSION | flags::REPLY, size };
    [header.as_bytes(), payload].concat()
}

fn parse<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<T, Fault> {
    T::read_from_bytes(payload).map_err(|_| Fault::Payload)
}

/// Returns the file descriptor of a message, which must be the only one.
fn only(fds: Vec<OwnedFd>) -> Result<OwnedFd, Fault> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| Fault::Descriptors)?;
    Ok(fd)
}

/// Returns the file descriptor of SET_VRING_KICK and its like, if the payload says that there is one.
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

/// Refuses a descriptor that is neither an eventfd nor a socket.
fn check_event(fd: Option<&OwnedFd>) -> Result<(), Fault> {
    let suits = |fd| descriptor::is_eventfd(fd) || descriptor::is_socket(fd);
    if fd.is_some_and(|fd| !suits(fd)) {
        return Err(Fault::DescriptorKind);
    }
    Ok(())
}

/// Returns the fault of a message that came with a descriptor of an unknown kind.
fn foreign_descriptor(number: u32, payload: &[u8]) -> Fault {
    match number {
        request::SET_MEM_TABLE => {
            tracing::error!(
                "SET_MEM_TABLE: the file of a region is none of memfd, tmpfs or hugetlbfs"
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

/// Logs why a region is not mapped, and returns the fault.
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
    memory.with_region(&of_file(region, fd)).map_err(|error| refused_region(&error))
}

/// Returns a region of this file.
fn of_file<'fd>(region: &MemRegion, fd: &'fd OwnedFd) -> GuestRegion<'fd> {
    GuestRegion {
        guest_addr: region.guest_addr,
        len: region.size,
        fd: fd.as_fd(),
        offset: region.mmap_offset,
        writable: true,
    }
}

/// Returns how a request of this number changes what the front end has said.
fn change_of(number: u32) -> Change {
    match number {
        request::GET_FEATURES
        | request::GET_PROTOCOL_FEATURES
        | request::GET_QUEUE_NUM
        | request::GET_MAX_MEM_SLOTS
        | request::GET_CONFIG
        | request::GET_STATUS => Change::No,
        request::SET_MEM_TABLE
        | request::ADD_MEM_REG
        | request::REM_MEM_REG
        | request::SET_VRING_KICK
        | request::SET_VRING_CALL
        | request::GET_VRING_BASE
        | request::SET_BACKEND_REQ_FD
        | request::RESET_OWNER
        | request::RESET_DEVICE
        | request::SET_STATUS => Change::Descriptors,
        _ => Change::Bytes,
    }
}

/// Returns the guest address for an address of the front end's own.
fn translate(regions: &[(MemRegion, Arc<OwnedFd>)], user_addr: u64) -> Option<u64> {
    regions.iter().find_map(|(region, _)| {
        let offset = user_addr.checked_sub(region.user_addr)?;
        (offset < region.size).then(|| region.guest_addr + offset)
    })
}

/// Returns the used index of a ring. A queue goes on from there, so that a buffer that was not given
/// back is served again.
fn used_index(memory: &GuestMemory, layout: &Layout) -> u16 {
    let index = memory.read_obj::<u16>(layout.used.wrapping_add(2));
    index.map(u16::from_le).unwrap_or_default()
}

fn get_config(payload: &[u8], backend: &dyn Backend) -> Result<Answer, Fault> {
    let (head, rest) = ConfigHead::read_from_prefix(payload).map_err(|_| Fault::Payload)?;
    let (offset, size) = (head.offset as usize, head.size as usize);
    if rest.len() != size {
        return Err(Fault::Payload);
    }
    let end = offset.checked_add(size).ok_or(Fault::ConfigBounds)?;
    let bytes = backend.config().get(offset..end).ok_or(Fault::ConfigBounds)?;
    Ok(Answer::Payload([head.as_bytes(), bytes].concat()))
}

/// Returns what a front end does for its driver by a GET_CONFIG that has an answer.
fn deed_of(payload: &[u8]) -> Deed {
    let head = ConfigHead::read_from_prefix(payload).map(|(head, _)| (head.offset, head.size));
    let (offset, len) = head.unwrap_or_default();
    Deed::ReadConfig { offset: offset as usize, len: len as usize }
}
