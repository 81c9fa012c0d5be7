// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue and its commands (specification, chapter 5).

use std::net::Ipv6Addr;
use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_add_gid, virtio_rdma_cmd_create_cq, virtio_rdma_cmd_create_qp,
    virtio_rdma_cmd_del_gid, virtio_rdma_cmd_dereg_mr, virtio_rdma_cmd_destroy_cq,
    virtio_rdma_cmd_destroy_pd, virtio_rdma_cmd_destroy_qp, virtio_rdma_cmd_get_dma_mr,
    virtio_rdma_cmd_query_counters, virtio_rdma_cmd_query_pkey, virtio_rdma_cmd_query_port,
    virtio_rdma_cmd_reg_user_mr, virtio_rdma_cmd_req_notify, virtio_rdma_cmd_rereg_mr,
    virtio_rdma_rsp_create_cq, virtio_rdma_rsp_create_pd, virtio_rdma_rsp_create_qp,
    virtio_rdma_rsp_mr, virtio_rdma_rsp_query_counters, virtio_rdma_rsp_query_pkey,
    virtio_rdma_rsp_query_port, VIRTIO_RDMA_F_COUNTERS, VIRTIO_RDMA_F_FAST_REG,
    VIRTIO_RDMA_F_MCAST, VIRTIO_RDMA_F_REREG_MR, VIRTIO_RDMA_F_VLAN, VIRTIO_RDMA_GID_TYPE_ROCE,
    VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP, VIRTIO_RDMA_NO_VLAN, VIRTIO_RDMA_PORT,
    VIRTIO_RDMA_PORT_CM_SUP, VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK, VIRTIO_RDMA_REREG_ACCESS,
    VIRTIO_RDMA_REREG_PD, VIRTIO_RDMA_REREG_TRANS, VIRTIO_RDMA_SIGNAL_ALL_WR,
    VIRTIO_RDMA_SIGNAL_REQ_WR,
};
use memory::GuestMemory;
use ring::Chain;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::base::by_key::ByKey;
use crate::base::counters::Counter;
use crate::base::slab::Slab;
use crate::base::sync::{lock, read, write};
use crate::base::table::Numbers;
use crate::config::{MAX_MSG_SIZE, MAX_SGE};
use crate::control::mcast::{is_multicast, Attachments};
use crate::control::prepare::Prepared;
use crate::control::rings::{pages_of, QpRings};
use crate::device::Shared;
use crate::memory::mr::{Attributes, Backing, Map, Mr, ResolveError};
use crate::memory::mw::MwEntry;
use crate::qp::halves::QpConfig;
use crate::qp::state::{QpState, QpType};
use crate::queue::cq::valid_notify_flags;
use crate::queue::users::User;
use crate::queue::virtqueue::RingQueue;
use crate::transport::requester::Visit;
use crate::transport::turn::{cost, Turn};
use crate::{Address, Limits};

/// Bytes of a request that are looked at; no command has more.
const MAX_REQUEST: usize = 512;
/// Bytes of the longest reply.
const MAX_REPLY: usize = 256;
/// What REREG_MR may replace.
const REREG: u32 = VIRTIO_RDMA_REREG_TRANS | VIRTIO_RDMA_REREG_PD | VIRTIO_RDMA_REREG_ACCESS;

/// `enum ib_port_state`: active.
const PORT_ACTIVE: u8 = 4;
/// `enum ib_port_phys_state`: link up.
const PHYS_LINK_UP: u8 = 5;
/// `enum ib_mtu`: 4096 bytes.
const MTU_4096: u8 = 5;
/// `enum ib_port_width`: 4 lanes.
const WIDTH_4X: u8 = 2;
/// `enum ib_port_speed`: EDR, 25 Gb/s a lane. Nothing depends on it.
const SPEED_EDR: u16 = 32;
/// The `vlan_id` of a GID that belongs to no VLAN.
const NO_VLAN: u16 = VIRTIO_RDMA_NO_VLAN as u16;
/// Largest number of a VLAN (IEEE 802.1Q, 9.6).
const MAX_VLAN: u16 = 4094;
/// The only P_Key: the default partition, full member.
const DEFAULT_PKEY: u16 = 0xffff;

/// `enum virtio_rdma_status` without OK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Error = abi::VIRTIO_RDMA_STATUS_ERR as u8,
    Invalid = abi::VIRTIO_RDMA_STATUS_INVAL as u8,
    NoObject = abi::VIRTIO_RDMA_STATUS_NO_OBJECT as u8,
    NoResource = abi::VIRTIO_RDMA_STATUS_NO_RESOURCE as u8,
    Busy = abi::VIRTIO_RDMA_STATUS_BUSY as u8,
    Unsupported = abi::VIRTIO_RDMA_STATUS_UNSUPPORTED as u8,
    Permission = abi::VIRTIO_RDMA_STATUS_PERM as u8,
    Fault = abi::VIRTIO_RDMA_STATUS_FAULT as u8,
    Length = abi::VIRTIO_RDMA_STATUS_LENGTH as u8,
    State = abi::VIRTIO_RDMA_STATUS_STATE as u8,
    Exists = abi::VIRTIO_RDMA_STATUS_EXISTS as u8,
}

impl Status {
    /// Why a region cannot be.
    pub(crate) fn of_region(why: ResolveError) -> Self {
        match why {
            ResolveError::Fault => Self::Fault,
            ResolveError::TooManyExtents => Self::NoResource,
        }
    }

    fn counter(self) -> Counter {
        match self {
            Self::Error => Counter::CommandError,
            Self::Invalid => Counter::CommandInvalid,
            Self::NoObject => Counter::CommandNoObject,
            Self::NoResource => Counter::CommandNoResource,
            Self::Busy => Counter::CommandBusy,
            Self::Unsupported => Counter::CommandUnsupported,
            Self::Permission => Counter::CommandPermission,
            Self::Fault => Counter::CommandFault,
            Self::Length => Counter::CommandLength,
            Self::State => Counter::CommandState,
            Self::Exists => Counter::CommandExists,
        }
    }
}

/// A memory region as its guest knows it.
pub(crate) enum MrEntry {
    /// Of GET_DMA_MR and REG_USER_MR.
    Fixed {
        /// What it is.
        attributes: Attributes,
        /// `None` while its memory is not in the guest's map.
        live: Option<Arc<Mr>>,
    },
    /// Of CREATE_MR; the rest is in the table of keys.
    FastReg {
        /// A key with its upper 24 bits.
        key: u32,
        /// Its protection domain.
        pdn: u32,
        /// Extents that are set aside.
        extents: usize,
    },
}

/// A request that was taken from the control queue.
struct Request {
    chain: Chain,
    bytes: [u8; MAX_REQUEST],
    length: usize,
    /// What it needs, which may take more than a turn.
    prepared: Prepared,
}

/// What only control commands change.
pub(crate) struct Control {
    /// The control queue.
    pub ring: RingQueue,
    /// What the next turn goes on with.
    request: Option<Request>,
    /// Regions that nobody can find any more, whose tables are yet to be freed.
    dead: Vec<Arc<Mr>>,
    /// The guest's memory.
    pub memory: GuestMemory,
    /// How many objects belong to each PD.
    pds: Slab<u32>,
    mrs: Slab<MrEntry>,
    /// How many objects belong to each XRC domain; the first has number 1.
    pub xrcds: Slab<u32>,
    /// Memory windows.
    pub mws: Slab<MwEntry>,
    /// Upper 24 bits of the keys of regions that are not in memory.
    invalid_keys: ByKey<()>,
    /// Extents of all regions, and pages of rings.
    pub extents: usize,
    /// Where the search for a free QP on virtqueues begins, so that numbers come
    /// back late.
    next_slot: u16,
    /// Numbers of CQs with rings.
    pub ring_cqs: Numbers,
    /// Places of QPs with rings, without the GSI's.
    pub ring_slots: Numbers,
    /// Places of SRQs.
    pub srq_slots: Numbers,
    /// Attachments to multicast groups.
    pub attachments: Attachments,
}

impl Control {
    /// Nothing.
    pub fn new(limits: &Limits) -> Self {
        Self {
            ring: RingQueue::default(),
            request: None,
            dead: Vec::new(),
            memory: GuestMemory::default(),
            pds: Slab::new(limits.max_pd),
            mrs: Slab::new(limits.max_mr),
            xrcds: Slab::new(limits.max_xrcd),
            mws: Slab::new(limits.max_mw),
            invalid_keys: ByKey::default(),
            extents: 0,
            next_slot: 1,
            ring_cqs: Numbers::new(0, limits.ring_cq),
            ring_slots: Numbers::new(1, limits.ring_qp),
            srq_slots: Numbers::new(0, limits.max_srq),
            attachments: Attachments::default(),
        }
    }

    /// Fails if there is no such PD.
    pub fn require_pd(&self, pdn: u32) -> Result<(), Status> {
        self.pds.get(pdn).map(|_| ()).ok_or(Status::NoObject)
    }

    /// The region of this number.
    pub fn mr(&self, mrn: u32) -> Option<&MrEntry> {
        self.mrs.get(mrn)
    }

    /// A region is gone; what it takes is freed in this turn or the next ones.
    fn bury(&mut self, mr: Arc<Mr>) {
        if mr.extents() != 0 {
            self.dead.push(mr);
        }
    }

    /// Frees what regions that are gone take, until the turn is over; whether nothing is left.
    pub fn free_dead(&mut self, turn: &mut Turn) -> bool {
        while let Some(mr) = self.dead.pop() {
            // A peer that held it lets go of it at the end of its round.
            let mut mr = match Arc::try_unwrap(mr) {
                Ok(mr) => mr,
                Err(mr) => {
                    self.dead.push(mr);
                    return false;
                }
            };
            while mr.extents() != 0 {
                if turn.is_over() {
                    self.dead.push(Arc::new(mr));
                    return false;
                }
                turn.work(mr.shed() * cost::FREE);
            }
        }
        true
    }

    /// Numbers of regions that were given out so far.
    pub fn mr_numbers(&self) -> u32 {
        self.mrs.numbers()
    }

    /// Takes the region of the highest number out, as [`Slab::pop`].
    pub fn pop_mr(&mut self) -> Option<MrEntry> {
        self.mrs.pop()
    }

    /// Puts a region of GET_DMA_MR or REG_USER_MR, or that it is not in memory, in the place of the one
    /// of before, which it returns.
    pub fn set_live(&mut self, mrn: u32, mr: Option<Arc<Mr>>) -> Option<Arc<Mr>> {
        match self.mrs.get_mut(mrn) {
            Some(MrEntry::Fixed { live, .. }) => std::mem::replace(live, mr),
            _ => mr,
        }
    }

    /// Notes whether the region with this key is in memory.
    pub fn set_valid_key(&mut self, key: u32, is_valid: bool) {
        if is_valid {
            self.invalid_keys.remove(key >> 8);
        } else {
            self.invalid_keys.insert(key >> 8, ());
        }
    }

    /// Drops the request that is under way, if there is one, until the turn is over; whether it is gone.
    pub fn drop_request(&mut self, turn: &mut Turn) -> bool {
        let is_gone = self.request.as_mut().is_none_or(|request| request.prepared.shed(turn));
        if is_gone {
            self.request = None;
        }
        is_gone
    }

    /// Nothing, when all objects are gone.
    pub fn clear(&mut self, limits: &Limits) {
        *self = Self::new(limits);
    }

    /// Gives a region its number.
    pub fn insert_mr(&mut self, entry: MrEntry) -> Result<u32, Status> {
        self.mrs.insert(entry).map_err(|_| Status::NoResource)
    }

    /// How many MRs, memory windows and PDs there are.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.mrs.len(), self.mws.len(), self.pds.len())
    }
}

/// Takes a request apart, checks the room for its reply, and only then has it
/// done. Returns the bytes of the reply.
fn exchange<Q: FromBytes, R: IntoBytes + Immutable>(
    request: &[u8],
    reply: &mut [u8],
    command: impl FnOnce(Q) -> Result<R, Status>,
) -> Result<usize, Status> {
    let (request, _) = Q::read_from_prefix(request).map_err(|_| Status::Length)?;
    let room = reply.get_mut(..size_of::<R>()).ok_or(Status::Length)?;
    let answer = command(request)?;
    room.copy_from_slice(answer.as_bytes());
    Ok(room.len())
}

impl Shared {
    /// Serves the control queue.
    pub(crate) fn service_control(self: &Arc<Self>, turn: &mut Turn) -> Visit {
        let mut control = lock(&self.control);
        let mut found = false;
        loop {
            if turn.is_over() || !control.free_dead(turn) {
                break Visit::More;
            }
            if control.request.is_none() {
                match control.ring.pop() {
                    Ok(Some(chain)) => {
                        turn.spend(0);
                        control.request = Some(self.read_request(&control, chain));
                    }
                    Ok(None) => break if found { Visit::Done } else { Visit::Empty },
                    Err(error) => {
                        self.complain(Counter::BadControlChain, &error);
                        self.set_needs_reset();
                        break Visit::Parked;
                    }
                }
            }
            found = true;
            if !self.go_on_request(&mut control, turn) {
                break Visit::More;
            }
        }
    }

    /// Goes on with the request that is under way, if there is one, until the turn is over; whether it
    /// has come to its end.
    pub(crate) fn go_on_request(self: &Arc<Self>, control: &mut Control, turn: &mut Turn) -> bool {
        let Some(mut request) = control.request.take() else { return true };
        let Request { prepared, bytes, length, .. } = &mut request;
        if !self.go_on(prepared, control, &bytes[..*length], turn) {
            control.request = Some(request);
            return false;
        }
        self.answer(control, request);
        turn.work(self.take_charge());
        true
    }

    /// Copies a request.
    fn read_request(&self, control: &Control, chain: Chain) -> Request {
        let mut bytes = [0; MAX_REQUEST];
        let length = chain.read(&mut bytes).unwrap_or(0);
        // A request without room for a status is not carried out.
        let prepared = match chain.writable_len() {
            0 => Prepared::Nothing,
            _ => self.prepare(control, &bytes[..length]),
        };
        Request { chain, bytes, length, prepared }
    }

    /// Handles a request that was prepared, and replies.
    fn answer(self: &Arc<Self>, control: &mut Control, request: Request) {
        let Request { chain, bytes, length, prepared } = request;
        let mut reply = [0; MAX_REPLY];
        let room = chain.writable_len().min(reply.len());
        let written = self.command(control, &bytes[..length], &mut reply[..room], prepared);
        let written = chain.write(&reply[..written]).unwrap_or(0);
        control.ring.give_back(chain.head, written);
        control.ring.signal_if_needed();
    }

    /// Handles a request that did not come by the control queue, at once.
    pub(crate) fn command_at_once(
        self: &Arc<Self>,
        control: &mut Control,
        request: &[u8],
        reply: &mut [u8],
    ) -> usize {
        let mut prepared = self.prepare(control, request);
        self.go_on(&mut prepared, control, request, &mut Turn::endless());
        self.command(control, request, reply, prepared)
    }

    /// Handles one request; how many bytes of `reply` it wrote.
    pub(crate) fn command(
        self: &Arc<Self>,
        control: &mut Control,
        request: &[u8],
        reply: &mut [u8],
        prepared: Prepared,
    ) -> usize {
        self.stats.add(Counter::Commands, 1);
        let Some((status, reply)) = reply.split_first_mut() else {
            self.complain(Counter::CommandNoStatus, &"a request without room for a status");
            return 0;
        };
        let result = match request.split_first() {
            Some((command, body)) => self
                .dispatch(control, (*command).into(), body, reply, prepared)
                .map_err(|status| (status, Some(*command))),
            None => Err((Status::Length, None)),
        };
        match result {
            Ok(length) => {
                *status = abi::VIRTIO_RDMA_STATUS_OK as u8;
                1 + length
            }
            Err((error, command)) => {
                self.complain(
                    error.counter(),
                    &format_args!("control command {command:?} ended in {error:?}"),
                );
                *status = error as u8;
                1
            }
        }
    }

    #[allow(clippy::too_many_lines)] // an arm a command
    fn dispatch(
        self: &Arc<Self>,
        control: &mut Control,
        command: u32,
        request: &[u8],
        reply: &mut [u8],
        prepared: Prepared,
    ) -> Result<usize, Status> {
        let with_rings = matches!(
            command,
            abi::VIRTIO_RDMA_CMD_CREATE_RING_CQ
                | abi::VIRTIO_RDMA_CMD_RESIZE_CQ
                | abi::VIRTIO_RDMA_CMD_CREATE_RING_QP
        );
        let without = matches!(
            command,
            abi::VIRTIO_RDMA_CMD_CREATE_CQ
                | abi::VIRTIO_RDMA_CMD_CREATE_QP
                | abi::VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ
        );
        let with_srq = matches!(
            command,
            abi::VIRTIO_RDMA_CMD_CREATE_SRQ
                | abi::VIRTIO_RDMA_CMD_MODIFY_SRQ
                | abi::VIRTIO_RDMA_CMD_QUERY_SRQ
                | abi::VIRTIO_RDMA_CMD_DESTROY_SRQ
                | abi::VIRTIO_RDMA_CMD_RESIZE_SRQ
        );
        let with_mw =
            matches!(command, abi::VIRTIO_RDMA_CMD_ALLOC_MW | abi::VIRTIO_RDMA_CMD_DEALLOC_MW);
        if with_rings != self.has_rings() && (with_rings || without)
            || with_srq && !self.has_srqs()
            || with_mw && !self.has_mws()
        {
            return Err(Status::Unsupported);
        }
        let feature = match command {
            abi::VIRTIO_RDMA_CMD_CREATE_MR => Some(VIRTIO_RDMA_F_FAST_REG),
            abi::VIRTIO_RDMA_CMD_REREG_MR => Some(VIRTIO_RDMA_F_REREG_MR),
            _ => None,
        };
        if feature.is_some_and(|feature| !self.has(feature)) {
            return Err(Status::Unsupported);
        }
        match command {
            abi::VIRTIO_RDMA_CMD_QUERY_PORT => {
                exchange(request, reply, |request| self.query_port(&request))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_CQ => {
                exchange(request, reply, |request| self.create_cq(&request))
            }
            abi::VIRTIO_RDMA_CMD_DESTROY_CQ => {
                exchange(request, reply, |request| self.destroy_cq(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_PD => exchange(request, reply, |()| create_pd(control)),
            abi::VIRTIO_RDMA_CMD_DESTROY_PD => {
                exchange(request, reply, |request| destroy_pd(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_GET_DMA_MR => {
                exchange(request, reply, |request| self.get_dma_mr(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_MR => {
                exchange(request, reply, |request| self.create_mr(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_REG_USER_MR => {
                exchange(request, reply, |request| self.reg_user_mr(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_REREG_MR => {
                exchange(request, reply, |request| self.rereg_mr(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_DEREG_MR => {
                exchange(request, reply, |request| self.dereg_mr(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_ALLOC_MW => {
                exchange(request, reply, |request| self.alloc_mw(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_DEALLOC_MW => {
                exchange(request, reply, |request| self.dealloc_mw(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_QP => {
                exchange(request, reply, |request| self.create_qp(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_MODIFY_QP => {
                exchange(request, reply, |request| self.modify_qp(&request))
            }
            abi::VIRTIO_RDMA_CMD_QUERY_QP => {
                exchange(request, reply, |request| self.query_qp(&request))
            }
            abi::VIRTIO_RDMA_CMD_DESTROY_QP => {
                exchange(request, reply, |request| self.destroy_qp(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_QUERY_PKEY => {
                exchange(request, reply, |request| query_pkey(&request))
            }
            abi::VIRTIO_RDMA_CMD_ADD_GID => {
                exchange(request, reply, |request| self.add_gid(&request))
            }
            abi::VIRTIO_RDMA_CMD_DEL_GID => {
                exchange(request, reply, |request| self.del_gid(&request))
            }
            abi::VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ => {
                exchange(request, reply, |request| self.req_notify_cq(&request))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_RING_CQ => {
                exchange(request, reply, |request| self.create_ring_cq(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_RESIZE_CQ => {
                exchange(request, reply, |request| self.resize_cq(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_RING_QP => {
                exchange(request, reply, |request| self.create_ring_qp(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_SRQ => {
                exchange(request, reply, |request| self.create_srq(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_MODIFY_SRQ => {
                exchange(request, reply, |request| self.modify_srq(&request))
            }
            abi::VIRTIO_RDMA_CMD_QUERY_SRQ => {
                exchange(request, reply, |request| self.query_srq(&request))
            }
            abi::VIRTIO_RDMA_CMD_DESTROY_SRQ => {
                exchange(request, reply, |request| self.destroy_srq(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_RESIZE_SRQ => {
                exchange(request, reply, |request| self.resize_srq(control, &request, prepared))
            }
            abi::VIRTIO_RDMA_CMD_ATTACH_MCAST if self.has(VIRTIO_RDMA_F_MCAST) => {
                exchange(request, reply, |request| self.attach_mcast(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_DETACH_MCAST if self.has(VIRTIO_RDMA_F_MCAST) => {
                exchange(request, reply, |request| self.detach_mcast(control, &request))
            }
            abi::VIRTIO_RDMA_CMD_QUERY_COUNTERS if self.has(VIRTIO_RDMA_F_COUNTERS) => {
                exchange(request, reply, |request| self.query_counters(&request))
            }
            abi::VIRTIO_RDMA_CMD_ALLOC_XRCD if self.has_xrc() => {
                exchange(request, reply, |()| control.alloc_xrcd())
            }
            abi::VIRTIO_RDMA_CMD_DEALLOC_XRCD if self.has_xrc() => {
                exchange(request, reply, |request| control.dealloc_xrcd(&request))
            }
            abi::VIRTIO_RDMA_CMD_MODIFY_CQ if self.has_cq_moderation() => {
                exchange(request, reply, |request| self.modify_cq(&request))
            }
            // MAP_MR_SG among them: REG_MR brings the pages.
            _ => Err(Status::Unsupported),
        }
    }

    fn query_port(
        &self,
        request: &virtio_rdma_cmd_query_port,
    ) -> Result<virtio_rdma_rsp_query_port, Status> {
        if u32::from(request.port) != VIRTIO_RDMA_PORT {
            return Err(Status::Invalid);
        }
        let count = |counter| u32::try_from(self.stats.get(counter)).unwrap_or(u32::MAX);
        let mut reply = virtio_rdma_rsp_query_port::new_zeroed();
        reply.state = PORT_ACTIVE;
        reply.max_mtu = MTU_4096;
        reply.active_mtu = MTU_4096;
        reply.phys_mtu = 4096;
        reply.gid_tbl_len = self.limits.gid_table.into();
        reply.port_cap_flags = VIRTIO_RDMA_PORT_CM_SUP;
        reply.max_msg_sz = MAX_MSG_SIZE;
        reply.qkey_viol_cntr = count(Counter::DropQkey);
        reply.pkey_tbl_len = 1;
        reply.active_width = WIDTH_4X;
        reply.active_speed = SPEED_EDR;
        reply.phys_state = PHYS_LINK_UP;
        Ok(reply)
    }

    fn query_counters(
        &self,
        request: &virtio_rdma_cmd_query_counters,
    ) -> Result<virtio_rdma_rsp_query_counters, Status> {
        if request.port != VIRTIO_RDMA_PORT {
            return Err(Status::Invalid);
        }
        let mut reply = virtio_rdma_rsp_query_counters::new_zeroed();
        reply.xmit_data = self.stats.get(Counter::XmitBytes);
        reply.rcv_data = self.stats.get(Counter::RcvBytes);
        reply.xmit_packets = self.stats.get(Counter::XmitPackets);
        reply.rcv_packets = self.stats.get(Counter::RcvPackets);
        reply.multicast_xmit_packets = self.stats.get(Counter::MulticastXmitPackets);
        reply.multicast_rcv_packets = self.stats.get(Counter::MulticastRcvPackets);
        reply.xmit_discards = self.stats.get(Counter::DropUnreachable);
        Ok(reply)
    }

    fn create_cq(
        &self,
        request: &virtio_rdma_cmd_create_cq,
    ) -> Result<virtio_rdma_rsp_create_cq, Status> {
        if request.cqe == 0 || request.cqe > self.limits.cq_size.into() {
            return Err(Status::Invalid);
        }
        for (cqn, place) in self.cqs.iter() {
            let mut cq = lock(place);
            if cq.is_live() || cq.size() == 0 {
                continue;
            }
            if request.cqe > cq.size().into() {
                return Err(Status::Invalid);
            }
            cq.create(None);
            return Ok(virtio_rdma_rsp_create_cq { cqn: cqn.into() });
        }
        Err(Status::NoResource)
    }

    /// Calls `f` with a live CQ.
    pub(crate) fn with_cq<R>(
        &self,
        cqn: u32,
        f: impl FnOnce(&mut crate::queue::cq::Cq) -> R,
    ) -> Result<R, Status> {
        let index = u16::try_from(cqn).map_err(|_| Status::NoObject)?;
        let mut cq = lock(self.cqs.get(index).ok_or(Status::NoObject)?);
        if cq.is_live() {
            Ok(f(&mut cq))
        } else {
            Err(Status::NoObject)
        }
    }

    fn destroy_cq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_destroy_cq,
    ) -> Result<(), Status> {
        let pages = self.with_cq(request.cqn, |cq| {
            if !cq.users.is_empty() {
                return Err(Status::Busy);
            }
            let pages = cq.ring().map(|ring| ring.pages_len());
            cq.destroy();
            Ok(pages)
        })??;
        if let (Some(pages), Ok(cqn)) = (pages, u16::try_from(request.cqn)) {
            control.extents -= pages;
            control.ring_cqs.give_back(cqn);
            self.forget_event(cqn);
        }
        Ok(())
    }

    fn req_notify_cq(&self, request: &virtio_rdma_cmd_req_notify) -> Result<(), Status> {
        self.with_cq(request.cqn, |cq| {
            if !valid_notify_flags(request.flags) {
                return Err(Status::Invalid);
            }
            cq.arm(request.flags);
            Ok(())
        })?
    }

    fn get_dma_mr(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_get_dma_mr,
    ) -> Result<virtio_rdma_rsp_mr, Status> {
        control.pds.get(request.pdn).ok_or(Status::NoObject)?;
        if !self.valid_access(request.access_flags) {
            return Err(Status::Invalid);
        }
        let attributes = Attributes {
            key: 0,
            pdn: request.pdn,
            access: request.access_flags,
            iova: 0,
            length: u64::MAX,
            backing: Backing::Dma,
        };
        let map = Map::Dma(control.memory.clone());
        self.register(control, attributes, map)
    }

    fn reg_user_mr(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_reg_user_mr,
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_mr, Status> {
        control.require_pd(request.pdn)?;
        if !self.valid_access(request.access_flags) {
            return Err(Status::Invalid);
        }
        self.prepare_memory(control, request)?;
        if !control.mrs.has_room() {
            return Err(Status::NoResource);
        }
        let Prepared::Memory(found) = prepared else { return Err(Status::Error) };
        let (backing, map) = found.finish(&control.memory)?;
        let attributes = Attributes {
            key: 0,
            pdn: request.pdn,
            access: request.access_flags,
            iova: request.virt_addr,
            length: request.length,
            backing,
        };
        self.register(control, attributes, map)
    }

    /// Replaces attributes of a region; the old ones stay if it fails.
    fn rereg_mr(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_rereg_mr,
        prepared: Prepared,
    ) -> Result<(), Status> {
        let virtio_rdma_cmd_rereg_mr { mrn, flags, mr: new } = request;
        let entry = control.mrs.get(*mrn).ok_or(Status::NoObject)?;
        let MrEntry::Fixed { attributes, live } = entry else { return Err(Status::Invalid) };
        if matches!(attributes.backing, Backing::Dma) || *flags == 0 || flags & !REREG != 0 {
            return Err(Status::Invalid);
        }
        if self.is_windowed(attributes.key) {
            return Err(Status::Busy);
        }
        let (mut after, old_pdn) = (attributes.clone(), attributes.pdn);
        let old_extents = live.as_ref().map_or(0, |mr| mr.extents());
        if flags & VIRTIO_RDMA_REREG_PD != 0 {
            control.require_pd(new.pdn)?;
            after.pdn = new.pdn;
        }
        if flags & VIRTIO_RDMA_REREG_ACCESS != 0 {
            if !self.valid_access(new.access_flags) {
                return Err(Status::Invalid);
            }
            after.access = new.access_flags;
        }
        if flags & VIRTIO_RDMA_REREG_TRANS != 0 {
            self.prepare_memory(control, new)?;
            (after.iova, after.length) = (new.virt_addr, new.length);
        }
        let Prepared::Memory(found) = prepared else { return Err(Status::Error) };
        let (backing, map) = found.finish(&control.memory)?;
        after.backing = backing;
        let mr = Arc::new(Mr::resolved(after.clone(), map));
        let (key, new_pdn) = (after.key, after.pdn);
        let entry = MrEntry::Fixed { attributes: after, live: Some(Arc::clone(&mr)) };
        let Some(place) = control.mrs.get_mut(*mrn) else { return Err(Status::NoObject) };
        let before = std::mem::replace(place, entry);
        control.extents = control.extents - old_extents + mr.extents();
        control.invalid_keys.remove(key >> 8);
        write(&self.keys).insert(mr);
        if let MrEntry::Fixed { live: Some(before), .. } = before {
            self.retire(control, before);
        }
        unuse_pd(control, old_pdn);
        use_pd(control, new_pdn);
        Ok(())
    }

    /// A key for a new region.
    pub(crate) fn choose_key(&self, control: &Control) -> Result<u32, Status> {
        let taken = |key: u32| control.invalid_keys.contains(key >> 8);
        read(&self.keys).choose_key(taken).ok_or(Status::Error)
    }

    /// Gives a region its key and number.
    fn register(
        &self,
        control: &mut Control,
        mut attributes: Attributes,
        map: Map,
    ) -> Result<virtio_rdma_rsp_mr, Status> {
        if !control.mrs.has_room() {
            return Err(Status::NoResource);
        }
        let key = self.choose_key(control)?;
        attributes.key = key;
        let pdn = attributes.pdn;
        let mr = Arc::new(Mr::resolved(attributes.clone(), map));
        let entry = MrEntry::Fixed { attributes, live: Some(Arc::clone(&mr)) };
        let mrn = control.insert_mr(entry)?;
        control.extents += mr.extents();
        write(&self.keys).insert(mr);
        use_pd(control, pdn);
        Ok(virtio_rdma_rsp_mr { mrn, lkey: key, rkey: key })
    }

    fn dereg_mr(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_dereg_mr,
    ) -> Result<(), Status> {
        if let Some(MrEntry::Fixed { attributes, .. }) = control.mrs.get(request.mrn) {
            if self.is_windowed(attributes.key) {
                return Err(Status::Busy);
            }
        }
        let (pdn, live) = match control.mrs.remove(request.mrn).ok_or(Status::NoObject)? {
            MrEntry::Fixed { attributes, live } => {
                write(&self.keys).remove(attributes.key);
                control.invalid_keys.remove(attributes.key >> 8);
                control.extents -= live.as_ref().map_or(0, |mr| mr.extents());
                (attributes.pdn, live)
            }
            MrEntry::FastReg { key, pdn, extents } => {
                control.extents -= extents;
                (pdn, write(&self.keys).remove_fast_reg(key))
            }
        };
        if let Some(mr) = live {
            self.retire(control, mr);
        }
        unuse_pd(control, pdn);
        Ok(())
    }

    /// Ends all use of a region that nobody finds any more. Where a peer has to end its round first,
    /// nothing else is done in this one.
    pub(crate) fn retire(&self, control: &mut Control, mr: Arc<Mr>) {
        if mr.retire() {
            self.charge(cost::WAIT);
        }
        control.bury(mr);
    }

    fn create_qp(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_qp,
    ) -> Result<virtio_rdma_rsp_create_qp, Status> {
        let kind = QpType::from_abi(request.qp_type).ok_or(Status::Unsupported)?;
        if request.max_inline_data != 0 || kind.is_xrc() {
            return Err(Status::Unsupported);
        }
        check_capabilities(request, self.limits.wq_size.into())?;
        let config = self.qp_config(control, kind, request)?;
        let slot = self.free_slot(control, kind)?;
        self.check_virtqueues(slot, request)?;
        self.occupy(slot, request, config, None);
        self.attach(control, slot, config);
        Ok(virtio_rdma_rsp_create_qp { qpn: u32::from(slot) + 1 })
    }

    /// What a QP is created with, if its PD and CQs exist.
    pub(crate) fn qp_config(
        &self,
        control: &Control,
        kind: QpType,
        request: &virtio_rdma_cmd_create_qp,
    ) -> Result<QpConfig, Status> {
        control.pds.get(request.pdn).ok_or(Status::NoObject)?;
        let flags = u32::from(request.create_flags);
        let known = match kind {
            QpType::Ud if self.has(VIRTIO_RDMA_F_MCAST) => {
                VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK
            }
            _ => 0,
        };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        let cq = |cqn| {
            self.with_cq(cqn, |_| ())?;
            u16::try_from(cqn).map_err(|_| Status::NoObject)
        };
        let send_cq = cq(request.send_cqn)?;
        Ok(QpConfig {
            kind,
            pdn: request.pdn,
            xrcdn: 0,
            srq: None,
            recv_pdn: request.pdn,
            send_cq,
            recv_cq: if kind.is_xrc() { send_cq } else { cq(request.recv_cqn)? },
            signal_all: u32::from(request.sq_sig_type) == VIRTIO_RDMA_SIGNAL_ALL_WR,
            max_send_sge: request.max_send_sge as usize,
            max_recv_sge: request.max_recv_sge as usize,
            max_inline: request.max_inline_data as usize,
            // Virtqueues are written by the kernel alone.
            privileged: !self.has_rings(),
            block_loopback: flags & VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK != 0,
        })
    }

    /// A new QP uses its PD or XRC domain, its CQs and its SRQ.
    pub(crate) fn attach(&self, control: &mut Control, slot: u16, config: QpConfig) {
        for cq in config.own_cqs() {
            lock(self.cqs.take(cq)).users.insert(User::Qp(slot));
        }
        if let Some(srq) = config.srq {
            self.attach_srq(srq, slot);
        }
        match config.own_pdn() {
            Some(pdn) => use_pd(control, pdn),
            None => control.use_xrcd(config.xrcdn),
        }
    }

    /// The reverse, when it is gone.
    fn detach(&self, control: &mut Control, slot: u16, config: QpConfig) {
        for cq in config.own_cqs() {
            lock(self.cqs.take(cq)).users.remove(User::Qp(slot));
        }
        if let Some(srq) = config.srq {
            self.detach_srq(srq, slot);
        }
        match config.own_pdn() {
            Some(pdn) => unuse_pd(control, pdn),
            None => control.unuse_xrcd(config.xrcdn),
        }
    }

    /// A place for a QP on virtqueues: the first for the GSI, any other for the
    /// rest.
    fn free_slot(&self, control: &mut Control, kind: QpType) -> Result<u16, Status> {
        let is_free = |slot: u16| {
            let requester = lock(&self.qps.take(slot).requester);
            requester.config.is_none() && requester.queue.size() != 0
        };
        if kind == QpType::Gsi {
            let taken = lock(&self.qps.take(0).requester).config.is_some();
            return match (taken, is_free(0)) {
                (true, _) => Err(Status::Busy),
                (false, true) => Ok(0),
                (false, false) => Err(Status::NoResource),
            };
        }
        let (first, end) = (control.next_slot, self.limits.max_qp);
        let slot = (first..end).chain(1..first).find(|slot| *slot < end && is_free(*slot));
        let slot = slot.ok_or(Status::NoResource)?;
        control.next_slot = slot + 1;
        Ok(slot)
    }

    /// Whether the virtqueues of a place are as long as the QP needs.
    fn check_virtqueues(
        &self,
        slot: u16,
        request: &virtio_rdma_cmd_create_qp,
    ) -> Result<(), Status> {
        let qp = self.qps.take(slot);
        if request.max_send_wr > lock(&qp.requester).queue.size().into()
            || request.max_recv_wr > lock(&qp.responder).queue.size().into()
        {
            return Err(Status::Invalid);
        }
        Ok(())
    }

    /// Makes a QP in its place.
    pub(crate) fn occupy(
        &self,
        slot: u16,
        request: &virtio_rdma_cmd_create_qp,
        config: QpConfig,
        rings: Option<QpRings>,
    ) {
        let qp = self.qps.take(slot);
        let mut requester = lock(&qp.requester);
        let mut responder = lock(&qp.responder);
        if let Some(rings) = rings {
            let (send, receive, region) = rings.into_queues();
            (requester.queue, requester.region, responder.queue) = (send, region, receive);
        }
        requester.reset();
        responder.reset();
        let cap = &mut responder.attr.cap;
        cap.max_send_wr = request.max_send_wr;
        cap.max_send_sge = request.max_send_sge;
        cap.max_recv_wr = request.max_recv_wr;
        cap.max_recv_sge = request.max_recv_sge;
        cap.max_inline_data = request.max_inline_data;
        qp.set_state(&mut responder, QpState::Reset);
        requester.config = Some(config);
        responder.config = Some(config);
        // Receives are found when they are needed.
        responder.notify = false;
        responder.queue.disable_notify();
    }

    /// Whether nothing refuses the end of the QP in place `slot`.
    pub(crate) fn may_destroy_qp(&self, slot: u16) -> bool {
        let Some(qp) = self.qps.get(slot) else { return false };
        let exists = lock(&qp.requester).config.is_some();
        exists && lock(&qp.responder).groups.is_empty()
    }

    /// Parts the QP in place `slot`, which is to end, from its peer: it neither sends nor answers any
    /// more. Own thread only.
    pub(crate) fn part_qp(self: &Arc<Self>, slot: u16) {
        self.last_turn(slot);
        let qp = self.qps.take(slot);
        qp.set_state(&mut lock(&qp.responder), QpState::Reset);
    }

    fn destroy_qp(
        self: &Arc<Self>,
        control: &mut Control,
        request: &virtio_rdma_cmd_destroy_qp,
    ) -> Result<(), Status> {
        let slot = self.slot_of(request.qpn).ok_or(Status::NoObject)?;
        self.last_turn(slot);
        let qp = self.qps.take(slot);
        let mut requester = lock(&qp.requester);
        if !lock(&qp.responder).groups.is_empty() {
            return Err(Status::Busy);
        }
        let config = requester.config.take().ok_or(Status::NoObject)?;
        requester.reset();
        let region = std::mem::take(&mut requester.region);
        requester.queue.drain();
        requester.queue.remove_ring();
        drop(requester);
        self.set_timer(slot, None);
        let mut responder = lock(&qp.responder);
        self.leave_srq(slot, &mut responder);
        responder.config = None;
        responder.reset();
        qp.set_state(&mut responder, QpState::Reset);
        responder.queue.drain();
        responder.queue.remove_ring();
        drop(responder);
        // There are few more than when the command began, or it had gone on.
        loop {
            match self.release_windows(slot) {
                0 => break,
                count => self.charge(count * cost::OBJECT),
            }
        }
        control.extents -= pages_of(&region);
        if self.has_rings() && slot != 0 {
            control.ring_slots.give_back(slot);
        }
        self.detach(control, slot, config);
        Ok(())
    }

    fn add_gid(self: &Arc<Self>, request: &virtio_rdma_cmd_add_gid) -> Result<(), Status> {
        let known = matches!(
            request.gid_type,
            VIRTIO_RDMA_GID_TYPE_ROCE | VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP
        );
        let unicast = request.gid != [0; 16] && !is_multicast(&request.gid);
        if !known || !unicast || request.port_num != VIRTIO_RDMA_PORT {
            return Err(Status::Invalid);
        }
        let address = Address { gid: request.gid, vlan: self.vlan_of(request)? };
        if !self.fabric.may_use(&address, self) {
            let gid = Ipv6Addr::from(address.gid);
            match address.vlan {
                None => self.complain(Counter::ForeignAddress, &format_args!("GID {gid}")),
                Some(vlan) => self
                    .complain(Counter::ForeignAddress, &format_args!("GID {gid} in VLAN {vlan}")),
            }
            return Err(Status::Permission);
        }
        match self.set_gid(request.index.into(), Some(address)) {
            Some(true) => Ok(()),
            Some(false) => Err(Status::Exists),
            None => Err(Status::Invalid),
        }
    }

    /// The VLAN that a GID belongs to.
    fn vlan_of(&self, request: &virtio_rdma_cmd_add_gid) -> Result<Option<u16>, Status> {
        match request.vlan_id {
            _ if !self.has(VIRTIO_RDMA_F_VLAN) => Ok(None),
            NO_VLAN => Ok(None),
            vlan if vlan <= MAX_VLAN => Ok(Some(vlan)),
            _ => Err(Status::Invalid),
        }
    }

    fn del_gid(self: &Arc<Self>, request: &virtio_rdma_cmd_del_gid) -> Result<(), Status> {
        if request.port != VIRTIO_RDMA_PORT {
            return Err(Status::Invalid);
        }
        self.set_gid(request.index.into(), None).map(|_| ()).ok_or(Status::Invalid)
    }
}

/// Checks what a QP is asked to hold; `wr` is the most work requests of a queue.
pub(crate) fn check_capabilities(
    request: &virtio_rdma_cmd_create_qp,
    wr: u32,
) -> Result<(), Status> {
    let sge = MAX_SGE as u32;
    let signal = u32::from(request.sq_sig_type);
    let valid = (1..=wr).contains(&request.max_send_wr)
        && (1..=sge).contains(&request.max_send_sge)
        && request.max_recv_wr <= wr
        && request.max_recv_sge <= sge
        && matches!(signal, VIRTIO_RDMA_SIGNAL_ALL_WR | VIRTIO_RDMA_SIGNAL_REQ_WR);
    if valid {
        Ok(())
    } else {
        Err(Status::Invalid)
    }
}

fn query_pkey(request: &virtio_rdma_cmd_query_pkey) -> Result<virtio_rdma_rsp_query_pkey, Status> {
    if request.port != VIRTIO_RDMA_PORT || request.index != 0 {
        return Err(Status::Invalid);
    }
    Ok(virtio_rdma_rsp_query_pkey { pkey: DEFAULT_PKEY })
}

/// How many pages of `page_size` bytes `length` bytes touch, of which the first is at `start`; no
/// bytes touch none.
pub(crate) fn touched(start: u64, length: u64, page_size: u64) -> u64 {
    match length {
        0 => 0,
        _ => length.saturating_add(start % page_size).div_ceil(page_size),
    }
}

fn create_pd(control: &mut Control) -> Result<virtio_rdma_rsp_create_pd, Status> {
    let pdn = control.pds.insert(0).map_err(|_| Status::NoResource)?;
    Ok(virtio_rdma_rsp_create_pd { pdn })
}

fn destroy_pd(control: &mut Control, request: &virtio_rdma_cmd_destroy_pd) -> Result<(), Status> {
    match control.pds.get(request.pdn) {
        None => Err(Status::NoObject),
        Some(0) => {
            control.pds.remove(request.pdn);
            Ok(())
        }
        Some(_) => Err(Status::Busy),
    }
}

/// One more object belongs to a PD.
pub(crate) fn use_pd(control: &mut Control, pdn: u32) {
    if let Some(users) = control.pds.get_mut(pdn) {
        *users += 1;
    }
}

/// One less.
pub(crate) fn unuse_pd(control: &mut Control, pdn: u32) {
    if let Some(users) = control.pds.get_mut(pdn) {
        *users -= 1;
    }
}
