// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requests of a driver.

use std::mem::offset_of;
use std::time::Duration;

use abi::*;
use memory::GuestMemory;
use testkit::{ARM, CQE, CQ_HEAD, PAGE};
use zerocopy::FromBytes;

use super::entries::judge_zero;
use super::notes::Notes;
use super::objects::{Cq, Objects, Qp, Region, Srq};
use super::requests::Command;
use super::rings;

/// The most entries of a page table that are compared.
const TABLE: u64 = 4096;
/// The access flags.
const ACCESS: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_READ
    | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC
    | VIRTIO_RDMA_ACCESS_MW_BIND
    | VIRTIO_RDMA_ACCESS_ZERO_BASED
    | VIRTIO_RDMA_ACCESS_ON_DEMAND
    | VIRTIO_RDMA_ACCESS_HUGETLB
    | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL
    | VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT
    | VIRTIO_RDMA_ACCESS_RELAXED_ORDERING;
/// The bits of `attr_mask`: those up to DEST_QPN, and RATE_LIMIT.
const ATTRIBUTES: u32 = ((VIRTIO_RDMA_QP_DEST_QPN << 1) - 1) | VIRTIO_RDMA_QP_RATE_LIMIT;
/// The Q_Key of the GSI (IBA 3.9.2.2).
const GSI_QKEY: u32 = 0x8001_0000;
/// The most SGEs of a send, of a receive, and the most inline data that a device may have.
const MOST: [u32; 3] = [251, 255, 4016];

/// What driver and device have agreed on.
#[derive(Clone, Copy)]
pub struct Agreement {
    /// The feature bits.
    pub features: u64,
    /// The configuration of the device.
    pub config: virtio_rdma_config,
    /// How long what must come may take.
    pub patience: Duration,
}

impl Agreement {
    /// Returns whether a feature was agreed on.
    pub fn has(&self, feature: u32) -> bool {
        self.features >> feature & 1 != 0
    }
}

/// Memory that must stay as it is until the driver has the reply.
#[derive(Clone, Debug)]
pub struct Kept {
    clause: &'static str,
    what: &'static str,
    at: Vec<(u64, u64)>,
    bytes: Vec<u8>,
}

impl Kept {
    fn new(
        memory: &GuestMemory,
        clause: &'static str,
        what: &'static str,
        at: Vec<(u64, u64)>,
    ) -> Option<Self> {
        let bytes = read(memory, &at)?;
        Some(Self { clause, what, at, bytes })
    }

    /// Judges that the memory is as it was. The driver does not have the reply yet.
    pub fn judge(&self, notes: &mut Notes, memory: &GuestMemory) {
        let Some(now) = read(memory, &self.at) else { return };
        let wrong = self.bytes.iter().zip(&now).position(|(old, new)| old != new);
        notes.judge(self.clause, wrong.is_none(), || {
            let at = wrong.unwrap_or(0) & !3;
            let some =
                |bytes: &[u8]| format!("{:02x?} at {at}", &bytes[at..bytes.len().min(at + 8)]);
            let expected = format!("{}, as when the request came", some(&self.bytes));
            [format!("{} before the reply", self.what), expected, some(&now)]
        });
    }
}

fn read(memory: &GuestMemory, at: &[(u64, u64)]) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    for (addr, len) in at {
        let mut bytes = vec![0; usize::try_from(*len).ok()?];
        memory.read(*addr, &mut bytes).ok()?;
        all.extend(bytes);
    }
    Some(all)
}

/// Returns the address of a word in a region.
fn word(region: &Region, at: u64) -> Option<(u64, u64)> {
    Some((region.pages.first()?.checked_add(at)?, 4))
}

/// A look at a request.
pub struct Look<'a> {
    /// The notes.
    pub notes: &'a mut Notes,
    /// The memory of the guest.
    pub memory: &'a GuestMemory,
    /// The objects before the request.
    pub objects: &'a mut Objects,
    /// What was agreed on.
    pub agreement: &'a Agreement,
}

impl Look<'_> {
    fn flags(&mut self, name: &str, value: u32, known: u32) {
        self.notes.judge("V-TERM-05", value & !known == 0, || {
            [name.into(), format!("bits of {known:#x}"), format!("{value:#x}")]
        });
    }

    fn at_most(&mut self, clause: &'static str, name: &str, value: u32, most: u32) {
        self.notes.judge(clause, value <= most, || {
            [name.into(), format!("at most {most}"), value.to_string()]
        });
    }

    /// Judges a request. Returns the memory that is to stay until the reply is there.
    pub fn request(&mut self, command: &Command, request: &[u8], room: usize) -> Vec<Kept> {
        let (len, needs) = (request.len(), 1 + command.request);
        let is_whole = len >= needs && room > command.reply;
        self.notes.judge("V-RING-03", is_whole, || {
            let expected = format!("{needs} bytes, and room for {}", 1 + command.reply);
            ["buffers of a command".into(), expected, format!("{len} bytes, and room for {room}")]
        });
        let Some(body) = request.get(1..needs) else { return Vec::new() };
        judge_zero(self.notes, "request", body, &command.reserved);
        self.body(command.number, body)
    }

    fn body(&mut self, number: u32, body: &[u8]) -> Vec<Kept> {
        match number {
            VIRTIO_RDMA_CMD_REG_USER_MR => {
                parse(body).and_then(|mr| self.mr(&mr)).into_iter().collect()
            }
            VIRTIO_RDMA_CMD_REREG_MR => self.rereg(body).into_iter().collect(),
            VIRTIO_RDMA_CMD_GET_DMA_MR => {
                let flags = parse(body).map_or(0, |it: virtio_rdma_cmd_get_dma_mr| it.access_flags);
                self.flags("access_flags", flags, ACCESS);
                Vec::new()
            }
            VIRTIO_RDMA_CMD_CREATE_RING_CQ => {
                if let Some(request) = parse(body) {
                    self.create_cq(&request);
                }
                Vec::new()
            }
            VIRTIO_RDMA_CMD_RESIZE_CQ => parse(body).map_or(Vec::new(), |it| self.resize_cq(&it)),
            VIRTIO_RDMA_CMD_CREATE_RING_QP => {
                if let Some(request) = parse(body) {
                    self.create_qp(&request);
                }
                Vec::new()
            }
            VIRTIO_RDMA_CMD_CREATE_SRQ => {
                if let Some(request) = parse(body) {
                    self.create_srq(&request);
                }
                Vec::new()
            }
            VIRTIO_RDMA_CMD_RESIZE_SRQ => parse(body).map_or(Vec::new(), |it| self.resize_srq(&it)),
            VIRTIO_RDMA_CMD_MODIFY_QP => parse(body).map_or(Vec::new(), |it| self.modify_qp(&it)),
            VIRTIO_RDMA_CMD_ADD_GID => {
                let index = parse(body).map_or(0, |it: virtio_rdma_cmd_add_gid| it.index);
                self.at_most("V-PORT-01", "index of ADD_GID", index.into(), 255);
                Vec::new()
            }
            VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ => {
                let flags = parse(body).map_or(0, |it: virtio_rdma_cmd_req_notify| it.flags);
                let known = VIRTIO_RDMA_NOTIFY_SOLICITED | VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION;
                self.flags("flags of REQ_NOTIFY_CQ", flags, known);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    // Memory regions.

    fn rereg(&mut self, body: &[u8]) -> Option<Kept> {
        let request: virtio_rdma_cmd_rereg_mr = parse(body)?;
        let known = VIRTIO_RDMA_REREG_TRANS | VIRTIO_RDMA_REREG_PD | VIRTIO_RDMA_REREG_ACCESS;
        self.flags("flags of REREG_MR", request.flags, known);
        if request.flags & VIRTIO_RDMA_REREG_TRANS == 0 {
            return None;
        }
        self.mr(&request.mr)
    }

    fn mr(&mut self, mr: &virtio_rdma_cmd_reg_user_mr) -> Option<Kept> {
        self.flags("access_flags", mr.access_flags, ACCESS);
        let has_sizes = self.agreement.has(VIRTIO_RDMA_F_PAGE_SIZES);
        let shift = if has_sizes { u32::from(mr.page_shift) } else { VIRTIO_RDMA_PAGE_SHIFT };
        let has_levels = self.agreement.has(VIRTIO_RDMA_F_PAGE_LEVELS);
        let levels = if has_levels { u32::from(mr.levels) } else { 0 };
        let bytes = 1_u64.checked_shl(shift).unwrap_or(0);
        let is_size = self.agreement.config.page_size_cap & bytes != 0 && bytes >= PAGE;
        let is_level = levels <= VIRTIO_RDMA_MAX_PAGE_LEVELS;
        self.notes.judge("V-MR-04", is_size && is_level, || {
            let expected = "a size of page_size_cap, and at most 3 levels".into();
            ["page_shift and levels".into(), expected, format!("{shift} and {levels}")]
        });
        self.notes.judge("V-MR-01", mr.pages % 8 == 0, || {
            ["pages".into(), "a multiple of 8".into(), format!("{:#x}", mr.pages)]
        });
        if !is_size || !is_level || mr.pages % 8 != 0 {
            return None;
        }
        let span = u128::from(mr.start % bytes) + u128::from(mr.length);
        let count = if mr.length == 0 { 0 } else { span.div_ceil(bytes.into()) };
        self.notes.judge("V-MR-02", u128::from(mr.npages) == count, || {
            ["npages".into(), count.to_string(), mr.npages.to_string()]
        });
        let top = u64::from(mr.npages).div_ceil(512_u64.pow(levels)).min(TABLE);
        let table = Kept::new(self.memory, "V-MR-05", "a page table", vec![(mr.pages, top * 8)])?;
        let unit = if levels == 0 { bytes } else { PAGE };
        let entry = |at: &[u8]| at.try_into().map_or(0, u64::from_le_bytes);
        let wrong = table.bytes.chunks_exact(8).map(entry).find(|page| page % unit != 0);
        self.notes.judge("V-MR-03", wrong.is_none(), || {
            let got = format!("{:#x}", wrong.unwrap_or(0));
            ["entry of a page table".into(), format!("a multiple of {unit}"), got]
        });
        Some(table)
    }

    // Rings.

    /// Judges the region of rings that have so many bytes.
    fn region(&mut self, region: &virtio_rdma_ring_region, bytes: u64) -> Option<Region> {
        let needs = bytes.div_ceil(PAGE);
        let is_listed = u64::from(region.npages) >= needs && region.pages % 8 == 0;
        self.notes.judge("V-RING-16", is_listed, || {
            let got = format!("{} at {:#x}", region.npages, region.pages);
            ["pages of a region".into(), format!("{needs} at a multiple of 8"), got]
        });
        if !is_listed {
            return None;
        }
        let found = Region::read_table(self.memory, region, bytes)?;
        let wrong = found.pages.iter().find(|page| *page % PAGE != 0);
        self.notes.judge("V-RING-16", wrong.is_none(), || {
            let got = format!("{:#x}", wrong.copied().unwrap_or(0));
            ["page of a region".into(), "a multiple of 4096".into(), got]
        });
        // A program may put several of its rings into one page. The first of them is in use then.
        if wrong.is_none() && !self.objects.uses(&found.pages) {
            let dirty = found.first_dirty(self.memory, bytes);
            self.notes.judge("V-RING-17", dirty.is_none(), || {
                let (at, byte) = dirty.unwrap_or_default();
                ["bytes of a new region".into(), "0".into(), format!("{byte:#x} at {at}")]
            });
        }
        Some(found)
    }

    fn depth(&mut self, name: &str, depth: u32, least: u32, most: u32) -> bool {
        let holds = depth.is_power_of_two() && (least..=most).contains(&depth);
        self.notes.judge("V-RING-10", holds, || {
            [name.into(), format!("a power of two from {least} to {most}"), depth.to_string()]
        });
        holds
    }

    /// Judges the shape of a ring. Returns whether it is one with which its bytes can be found.
    fn shape(&mut self, name: &str, shape: &virtio_rdma_ring_shape, entry: u32) -> bool {
        let virtio_rdma_ring_shape { stride, offset, .. } = *shape;
        let is_stride = stride.is_power_of_two() && (32..=4096).contains(&stride);
        self.notes.judge("V-RING-11", is_stride, || {
            [
                format!("stride of {name}"),
                "a power of two from 32 to 4096".into(),
                stride.to_string(),
            ]
        });
        if !is_stride {
            return false;
        }
        self.notes.judge("V-RING-12", stride >= entry, || {
            let expected = format!("{entry} or more, for header and SGEs or inline data");
            [format!("stride of {name}"), expected, stride.to_string()]
        });
        let is_offset = offset % stride == 0 && offset >= 256;
        self.notes.judge("V-RING-13", is_offset, || {
            let expected = format!("a multiple of {stride}, 256 or more");
            [format!("offset of {name}"), expected, offset.to_string()]
        });
        stride >= entry && is_offset
    }

    /// Judges where the rings of a region end. Returns the number of bytes.
    fn ends(&mut self, shapes: &[&virtio_rdma_ring_shape]) -> u64 {
        let bytes =
            |shape: &virtio_rdma_ring_shape| u64::from(shape.depth) * u64::from(shape.stride);
        let end = shapes.iter().map(|shape| u64::from(shape.offset) + bytes(shape)).max();
        let end = end.unwrap_or(256);
        let pages: u64 = shapes.iter().map(|shape| bytes(shape).div_ceil(PAGE) + 1).sum();
        let most = (1 + pages) * PAGE;
        self.notes.judge("V-RING-14", end <= most, || {
            ["end of the rings".into(), format!("at most {most}"), end.to_string()]
        });
        end
    }

    fn create_cq(&mut self, request: &virtio_rdma_cmd_create_ring_cq) {
        let config = &self.agreement.config;
        let (most, vectors) = (config.ring_max_cqe, config.num_comp_vectors);
        self.notes.judge("V-RING-19", request.comp_vector < vectors, || {
            let got = request.comp_vector.to_string();
            ["comp_vector".into(), format!("below {vectors}"), got]
        });
        if self.depth("cqe", request.cqe, 1, most) {
            self.region(&request.region, CQ_HEAD + CQE * u64::from(request.cqe));
        }
    }

    fn resize_cq(&mut self, request: &virtio_rdma_cmd_resize_cq) -> Vec<Kept> {
        if self.depth("cqe", request.cqe, 1, self.agreement.config.ring_max_cqe) {
            self.region(&request.region, CQ_HEAD + CQE * u64::from(request.cqe));
        }
        let Some(cq) = self.objects.cqs.get(&request.cqn) else { return Vec::new() };
        let consumer = word(&cq.region, 0).into_iter().collect();
        let arms = ARM.iter().filter_map(|at| word(&cq.region, *at)).collect();
        let polled = Kept::new(self.memory, "V-CQ-31", "consumer of the CQ", consumer);
        let armed = Kept::new(self.memory, "V-CQ-32", "arm_next and arm_solicited", arms);
        polled.into_iter().chain(armed).collect()
    }

    fn create_qp(&mut self, request: &virtio_rdma_cmd_create_ring_qp) {
        let base = &request.base;
        self.flags("flags of CREATE_RING_QP", request.flags, VIRTIO_RDMA_QP_PRIVILEGED);
        let known = VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK;
        self.flags("create_flags", base.create_flags.into(), known);
        if !self.agreement.has(VIRTIO_RDMA_F_SRQ) {
            self.at_most("V-SRQ-01", "srqn of CREATE_RING_QP", request.srqn, 0);
        }
        if !self.agreement.has(VIRTIO_RDMA_F_XRC) {
            self.at_most("V-TERM-03", "xrcdn of CREATE_RING_QP", request.xrcdn, 0);
        }
        if u32::from(base.qp_type) == VIRTIO_RDMA_QPT_XRC_TGT {
            return;
        }
        let sizes = [base.max_send_sge, base.max_recv_sge, base.max_inline_data];
        for (name, (value, most)) in
            ["max_send_sge", "max_recv_sge", "max_inline_data"].iter().zip(sizes.iter().zip(MOST))
        {
            self.at_most("V-CFG-13", name, *value, most);
        }
        if sizes.iter().zip(MOST).all(|(value, most)| *value <= most) {
            self.qp_rings(request);
        }
    }

    fn qp_rings(&mut self, request: &virtio_rdma_cmd_create_ring_qp) {
        let virtio_rdma_cmd_create_ring_qp { base, sq, rq, .. } = request;
        let header = match u32::from(base.qp_type) {
            VIRTIO_RDMA_QPT_UD | VIRTIO_RDMA_QPT_GSI => size_of::<virtio_rdma_ring_ud_wqe>(),
            VIRTIO_RDMA_QPT_XRC_INI => size_of::<virtio_rdma_ring_xrc_wqe>(),
            _ => size_of::<virtio_rdma_ring_sq_wqe>(),
        };
        let most = self.agreement.config.ring_max_qp_wr;
        let send = header as u32 + base.max_inline_data.max(16 * base.max_send_sge);
        let mut is_right = self.depth("sq.depth", sq.depth, base.max_send_wr, most);
        is_right &= self.shape("the send ring", sq, send);
        let mut shapes = vec![sq];
        if base.max_recv_wr != 0 || rq.depth != 0 {
            is_right &= self.depth("rq.depth", rq.depth, base.max_recv_wr, most);
            is_right &= self.shape("the receive ring", rq, 16 + 16 * base.max_recv_sge);
            shapes.push(rq);
        }
        if !is_right {
            return;
        }
        if let [sq, rq] = shapes[..] {
            let end = |it: &virtio_rdma_ring_shape| {
                u64::from(it.offset) + u64::from(it.depth) * u64::from(it.stride)
            };
            let apart = end(sq) <= rq.offset.into() || end(rq) <= sq.offset.into();
            self.notes.judge("V-RING-15", apart, || {
                let got = format!("{}..{} and {}..{}", sq.offset, end(sq), rq.offset, end(rq));
                ["rings of a QP".into(), "rings that do not overlap".into(), got]
            });
        }
        let end = self.ends(&shapes);
        self.region(&request.region, end);
    }

    fn srq_ring(
        &mut self,
        region: &virtio_rdma_ring_region,
        ring: &virtio_rdma_ring_shape,
        sges: u32,
    ) {
        let most = self.agreement.config.max_srq_wr;
        let entry = 16_u32.saturating_add(sges.saturating_mul(16));
        if self.depth("ring.depth", ring.depth, 1, most) && self.shape("the ring", ring, entry) {
            let end = self.ends(&[ring]);
            self.region(region, end);
        }
    }

    fn create_srq(&mut self, request: &virtio_rdma_cmd_create_srq) {
        if !self.agreement.has(VIRTIO_RDMA_F_XRC) {
            self.at_most(
                "V-TERM-03",
                "xrcdn and cqn of CREATE_SRQ",
                request.xrcdn | request.cqn,
                0,
            );
        }
        self.at_most("V-CFG-13", "max_sge of an SRQ", request.max_sge, MOST[1]);
        self.srq_ring(&request.region, &request.ring, request.max_sge);
    }

    fn resize_srq(&mut self, request: &virtio_rdma_cmd_resize_srq) -> Vec<Kept> {
        self.srq_ring(&request.region, &request.ring, 0);
        let Some(srq) = self.objects.srqs.get(&request.srqn) else { return Vec::new() };
        let producer = word(&srq.region, srq.ring.producer).into_iter().collect();
        Kept::new(self.memory, "V-SRQ-10", "producer of the SRQ", producer).into_iter().collect()
    }

    // QPs.

    fn modify_qp(&mut self, request: &virtio_rdma_cmd_modify_qp) -> Vec<Kept> {
        let (qpn, mask, attr) = (request.qpn, request.attr_mask, &request.attr);
        self.flags("attr_mask", mask, ATTRIBUTES);
        if mask & VIRTIO_RDMA_QP_ACCESS_FLAGS != 0 {
            self.flags("qp_access_flags", attr.qp_access_flags, ACCESS);
        }
        let Some(qp) = self.objects.qps.get(&qpn) else { return Vec::new() };
        if qp.kind == VIRTIO_RDMA_QPT_GSI && mask & VIRTIO_RDMA_QP_QKEY != 0 {
            self.notes.judge("V-GSI-01", attr.qkey == GSI_QKEY, || {
                ["qkey of the GSI".into(), format!("{GSI_QKEY:#x}"), format!("{:#x}", attr.qkey)]
            });
        }
        if mask & VIRTIO_RDMA_QP_STATE == 0 {
            return Vec::new();
        }
        let has_early = self.agreement.has(VIRTIO_RDMA_F_RESET_TO_RTR);
        let patience = self.agreement.patience;
        rings::look_at_qp(self.notes, self.memory, self.objects, qpn, has_early, patience);
        if u32::from(attr.qp_state) == VIRTIO_RDMA_QPS_RESET {
            return self.begin_reset(qpn);
        }
        self.leave_reset(qpn, has_early);
        Vec::new()
    }

    /// Notes that the owner may not post until it has written 0 to the producers, which it may not do before the reply.
    fn begin_reset(&mut self, qpn: u32) -> Vec<Kept> {
        let Some(qp) = self.objects.qps.get_mut(&qpn) else { return Vec::new() };
        let region = &qp.region;
        let mut used = Vec::new();
        for ring in qp.rings.iter_mut().flatten() {
            ring.is_to_restart = true;
            if ring.seen != 0 {
                used.extend(word(region, ring.producer));
            }
        }
        if used.is_empty() {
            return Vec::new();
        }
        Kept::new(self.memory, "V-RING-41", "producers of the QP", used).into_iter().collect()
    }

    /// Judges that the producers are 0 when a QP leaves RESET.
    fn leave_reset(&mut self, qpn: u32, has_early: bool) {
        let Some(qp) = self.objects.qps.get_mut(&qpn) else { return };
        if qp.state != VIRTIO_RDMA_QPS_RESET || !qp.was_reset {
            return;
        }
        for (queue, ring) in qp.rings.iter_mut().enumerate() {
            let Some(ring) = ring else { continue };
            let Some(producer) = qp.region.word(self.memory, ring.producer) else { continue };
            let most = if queue == 1 && has_early { ring.shape.depth } else { 0 };
            self.notes.judge("V-RING-41", producer <= most, || {
                let name = if queue == 0 { "sq_producer" } else { "rq_producer" };
                let what = format!("{name} when the QP leaves RESET");
                [what, format!("at most {most}"), producer.to_string()]
            });
            (ring.is_to_restart, ring.seen, ring.completed) = (false, producer, Some(0));
        }
    }
}

fn parse<T: FromBytes>(body: &[u8]) -> Option<T> {
    T::read_from_prefix(body).ok().map(|(value, _)| value)
}

/// Notes what a request has changed. It was carried out, and the driver does not have the reply yet.
pub fn note_reply(
    memory: &GuestMemory,
    objects: &mut Objects,
    number: u32,
    body: &[u8],
    reply: &[u8],
) {
    let status = reply.first().copied().map(u32::from);
    let is_done = status == Some(VIRTIO_RDMA_STATUS_OK);
    if number == VIRTIO_RDMA_CMD_MODIFY_QP {
        let _ = parse(body).map(|request| note_modify(objects, &request, is_done));
        return;
    }
    if is_done {
        let _ = note_done(memory, objects, number, body, &reply[1..]);
    }
}

fn note_modify(objects: &mut Objects, request: &virtio_rdma_cmd_modify_qp, is_done: bool) {
    let Some(qp) = objects.qps.get_mut(&request.qpn) else { return };
    if request.attr_mask & VIRTIO_RDMA_QP_STATE == 0 {
        return;
    }
    let state = u32::from(request.attr.qp_state);
    if is_done {
        qp.state = state;
        qp.was_reset |= state == VIRTIO_RDMA_QPS_RESET;
    } else if state == VIRTIO_RDMA_QPS_RESET {
        qp.rings.iter_mut().flatten().for_each(|ring| ring.is_to_restart = false);
    }
}

fn note_done(
    memory: &GuestMemory,
    objects: &mut Objects,
    number: u32,
    body: &[u8],
    reply: &[u8],
) -> Option<()> {
    let all = |region: &virtio_rdma_ring_region| {
        Region::read_table(memory, region, u64::from(region.npages) * PAGE)
    };
    match number {
        VIRTIO_RDMA_CMD_CREATE_RING_CQ => {
            let request: virtio_rdma_cmd_create_ring_cq = parse(body)?;
            let region = all(&request.region)?;
            let cq = Cq { region, depth: request.cqe, produced: 0, consumer: 0 };
            objects.cqs.insert(parse(reply)?, cq);
        }
        VIRTIO_RDMA_CMD_RESIZE_CQ => {
            let request: virtio_rdma_cmd_resize_cq = parse(body)?;
            let (region, produced) = (all(&request.region)?, parse(reply)?);
            let cq = Cq { region, depth: request.cqe, produced, consumer: 0 };
            objects.cqs.insert(request.cqn, cq);
        }
        VIRTIO_RDMA_CMD_CREATE_RING_QP => {
            let request: virtio_rdma_cmd_create_ring_qp = parse(body)?;
            objects.qps.insert(parse(reply)?, Qp::new(&request, all(&request.region)?));
        }
        VIRTIO_RDMA_CMD_CREATE_SRQ => {
            let request: virtio_rdma_cmd_create_srq = parse(body)?;
            objects.srqs.insert(parse(reply)?, Srq::new(request.ring, all(&request.region)?));
        }
        VIRTIO_RDMA_CMD_RESIZE_SRQ => {
            let request: virtio_rdma_cmd_resize_srq = parse(body)?;
            let mut srq = Srq::new(request.ring, all(&request.region)?);
            (srq.ring.seen, srq.ring.is_resumed) = (parse(reply)?, true);
            objects.srqs.insert(request.srqn, srq);
        }
        VIRTIO_RDMA_CMD_REG_USER_MR => {
            let reply: virtio_rdma_rsp_mr = parse(reply)?;
            note_mr(memory, objects, reply.mrn, &parse(body)?);
        }
        VIRTIO_RDMA_CMD_REREG_MR => {
            let request: virtio_rdma_cmd_rereg_mr = parse(body)?;
            if request.flags & VIRTIO_RDMA_REREG_TRANS != 0 {
                note_mr(memory, objects, request.mrn, &request.mr);
            }
        }
        VIRTIO_RDMA_CMD_DEREG_MR => drop(objects.mrs.remove(&parse(body)?)),
        VIRTIO_RDMA_CMD_DESTROY_QP => drop(objects.qps.remove(&parse(body)?)),
        VIRTIO_RDMA_CMD_DESTROY_CQ => drop(objects.cqs.remove(&parse(body)?)),
        VIRTIO_RDMA_CMD_DESTROY_SRQ => drop(objects.srqs.remove(&parse(body)?)),
        _ => {}
    }
    Some(())
}

/// Notes the pages of an MR. `levels` is reserved without VIRTIO_RDMA_F_PAGE_LEVELS, and 0 then.
fn note_mr(
    memory: &GuestMemory,
    objects: &mut Objects,
    mrn: u32,
    mr: &virtio_rdma_cmd_reg_user_mr,
) {
    objects.mrs.remove(&mrn);
    let Some(last) = mr.npages.checked_sub(1).filter(|_| mr.levels == 0) else { return };
    let page = |index: u32| memory.read_obj(mr.pages.checked_add(u64::from(index) * 8)?).ok();
    if let (Some(first), Some(last)) = (page(0), page(last)) {
        objects.mrs.insert(mrn, [first, last]);
    }
}

/// Returns the virtqueues of the object that a request ends or resets, with VIRTIO_RDMA_F_VIRTQUEUES.
pub fn queues_that_end(config: &virtio_rdma_config, number: u32, body: &[u8]) -> Vec<u16> {
    let of_qp = |qpn: u32| {
        let first = 1 + u64::from(config.max_cq) + 2 * u64::from(qpn.saturating_sub(1));
        [first, first + 1].into_iter().filter_map(|index| u16::try_from(index).ok()).collect()
    };
    match number {
        VIRTIO_RDMA_CMD_DESTROY_CQ => {
            let cqn: Option<u32> = parse(body);
            cqn.and_then(|cqn| u16::try_from(cqn.checked_add(1)?).ok()).into_iter().collect()
        }
        VIRTIO_RDMA_CMD_DESTROY_QP => parse(body).map_or(Vec::new(), of_qp),
        VIRTIO_RDMA_CMD_MODIFY_QP => {
            let Some(it) = parse::<virtio_rdma_cmd_modify_qp>(body) else { return Vec::new() };
            let is_reset = it.attr_mask & VIRTIO_RDMA_QP_STATE != 0
                && u32::from(it.attr.qp_state) == VIRTIO_RDMA_QPS_RESET;
            if is_reset {
                of_qp(it.qpn)
            } else {
                Vec::new()
            }
        }
        _ => Vec::new(),
    }
}

/// Returns the memory of an available index, which is to stay until the reply is there.
pub fn keep_available(memory: &GuestMemory, avail: u64) -> Option<Kept> {
    let at = vec![(avail.checked_add(2)?, 2)];
    Kept::new(memory, "V-VQ-08", "available index of a queue of the object", at)
}

/// The offset of `consumer` in the head of a CQ is that of its first byte.
const _: () = assert!(offset_of!(virtio_rdma_cq_ring, consumer) == 0);
