// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Work requests as ring entries (specification, Work requests: Entries).
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    causes::{Cause, cause},
    errno::Result,
    limits::{Limits, Opcodes, QpType},
    mw::Bind,
    ring::Writer,
    wr::{Rdma, Request, Single},
};

/// Flags of a send work request that have a meaning here.
const FLAGS: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;

/// Opcodes that may carry inline data.
const INLINE: Opcodes = Opcodes::of(&[
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_SEND_WITH_INV,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
]);

/// Opcodes that `struct ibv_send_wr` has no fields for: a program posts them by calls alone.
const BY_CALLS: Opcodes = Opcodes::of(&[IBV_WR_FLUSH]);

/// Returns the bytes of a send entry before its SGEs or inline data.
pub const fn send_header(qp_type: QpType) -> usize {
    match qp_type {
        QpType::XrcInitiator => size_of::<virtio_rdma_ring_xrc_wqe>(),
        QpType::Ud => size_of::<virtio_rdma_ring_ud_wqe>(),
        _ => size_of::<virtio_rdma_ring_sq_wqe>(),
    }
}

/// The bytes of a receive entry before its SGEs.
pub const RECV_HEADER: usize = size_of::<virtio_rdma_rq_wqe>();

/// Returns the bytes of an SGE list of `count` entries.
pub fn sges(count: u32) -> usize {
    (count as usize).saturating_mul(size_of::<virtio_rdma_sge>())
}

/// The form of the data in a send entry: a number of SGEs, or of bytes inline.
#[derive(Clone, Copy)]
struct Data {
    num_sge: u8,
    inline_len: u16,
}

/// Writes a send work request to its entry.
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry.
pub fn send(
    limits: &Limits,
    request: &Request<'_, ibv_send_wr>,
    mut entry: Writer<'_>,
) -> Result<(), Cause> {
    let wr = request.wr();
    check_operation(limits.opcodes.without(BY_CALLS), wr)?;
    let inline = wr.send_flags & IBV_SEND_INLINE != 0;
    if inline && !INLINE.has(wr.opcode) {
        return Err(not_inline(wr.opcode));
    }
    let sges = request.sges(limits.max_send_sge)?;
    if wr.opcode == IBV_WR_ATOMIC_WRITE && sges.is_empty() {
        return Err(cause!(EINVAL, "an ATOMIC_WRITE has no SGE"));
    }
    if wr.opcode == IBV_WR_BIND_MW {
        if !sges.is_empty() {
            return Err(cause!(
                EINVAL,
                "a BIND_MW has %u SGEs, and the most is 0",
                sges.len() as u32
            ));
        }
        return entry.put(binding(wr, request.bind()?));
    }
    let data = data(sges, inline.then_some(limits.max_inline_data))?;
    match limits.qp_type {
        QpType::Ud => {
            let ah = request.ah().ok_or_else(no_address)?;
            entry.put(datagram(request, ah.private().av, data))?;
        }
        QpType::XrcInitiator => entry.put(extended(request, request.remote_srqn(), data))?,
        _ => entry.put(connected(request, data))?,
    }
    match inline {
        true => request.put_inline(limits.max_send_sge, &mut entry),
        false => put_sges(sges, &mut entry),
    }
}

/// Writes a receive work request to its entry.
///
/// # Errors
///
/// As [`send`].
pub fn recv(
    limits: &Limits,
    request: &Request<'_, ibv_recv_wr>,
    mut entry: Writer<'_>,
) -> Result<(), Cause> {
    let sges = request.sges(limits.max_recv_sge)?;
    entry.put(virtio_rdma_rq_wqe {
        num_sge: (sges.len() as u32).to_le(),
        reserved_04: 0,
        wr_id: request.wr().wr_id.to_le(),
    })?;
    put_sges(sges, &mut entry)
}

/// Returns the form of the data that the SGEs name. With `max_inline`, the entry holds the data, of
/// at most as many bytes.
///
/// # Errors
///
/// EINVAL for more SGEs or bytes than that.
fn data(sges: &[ibv_sge], max_inline: Option<u32>) -> Result<Data, Cause> {
    let Some(max) = max_inline else {
        let num_sge = u8::try_from(sges.len()).map_err(|_| {
            cause!(EINVAL, "a work request has %u SGEs, and an entry counts 255", sges.len() as u32)
        })?;
        return Ok(Data { num_sge, inline_len: 0 });
    };
    let len = sges.iter().fold(0, |len: usize, sge| len.saturating_add(sge.length as usize));
    Ok(Data { num_sge: 0, inline_len: inline_len(len, max)? })
}

/// Checks the opcode and the flags of a send work request.
///
/// # Errors
///
/// EINVAL for those that the QP does not have.
#[inline]
fn check_operation(opcodes: Opcodes, wr: &ibv_send_wr) -> Result<(), Cause> {
    if !opcodes.has(wr.opcode) {
        return Err(cause!(EINVAL, "the QP has no work requests with opcode %u", wr.opcode));
    }
    if wr.send_flags & !FLAGS != 0 {
        return Err(cause!(
            EINVAL,
            "a work request has the unknown flags 0x%x",
            wr.send_flags & !FLAGS
        ));
    }
    Ok(())
}

/// Returns the length of inline data as an entry has it.
///
/// # Errors
///
/// EINVAL for more bytes than `max`.
fn inline_len(len: usize, max: u32) -> Result<u16, Cause> {
    let short = u16::try_from(len).ok().filter(|&len| u32::from(len) <= max);
    short.ok_or_else(|| {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        cause!(EINVAL, "a work request has %u bytes of inline data, and the most is %u", len, max)
    })
}

fn not_inline(opcode: ibv_wr_opcode) -> Cause {
    cause!(EINVAL, "a work request with opcode %u has inline data", opcode)
}

fn no_address() -> Cause {
    cause!(EINVAL, "a datagram has no address handle")
}

fn second_data() -> Cause {
    cause!(EINVAL, "a work request has data already")
}

/// Returns the header of an entry of an RC or UC QP.
fn connected(request: &Request<'_, ibv_send_wr>, data: Data) -> virtio_rdma_ring_sq_wqe {
    let wr = request.wr();
    let mut wqe = virtio_rdma_ring_sq_wqe {
        wr_id: wr.wr_id.to_le(),
        opcode: wr.opcode as u8,
        num_sge: data.num_sge,
        send_flags: (wr.send_flags as u16).to_le(),
        inline_len: data.inline_len.to_le(),
        ..Default::default()
    };
    match wr.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ | IBV_WR_ATOMIC_WRITE => {
            let remote = request.rdma();
            wqe.remote_addr = remote.remote_addr.to_le();
            wqe.rkey = remote.rkey.to_le();
        }
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let remote = request.atomic();
            wqe.remote_addr = remote.remote_addr.to_le();
            wqe.rkey = remote.rkey.to_le();
            wqe.compare_add = remote.compare_add.to_le();
            wqe.swap = remote.swap.to_le();
        }
        _ => {}
    }
    match wr.opcode {
        IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM => {
            wqe.ex.imm_data = request.imm_data();
        }
        IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => {
            wqe.ex.invalidate_rkey = request.invalidate_rkey().to_le();
        }
        _ => {}
    }
    wqe
}

/// Returns the header of an entry of an XRC initiator.
fn extended(
    request: &Request<'_, ibv_send_wr>,
    remote_srqn: u32,
    data: Data,
) -> virtio_rdma_ring_xrc_wqe {
    virtio_rdma_ring_xrc_wqe {
        base: connected(request, data),
        remote_srqn: remote_srqn.to_le(),
        ..Default::default()
    }
}

/// Returns the entry of a BIND_MW.
fn binding(wr: &ibv_send_wr, bind: Bind) -> virtio_rdma_ring_bind_wqe {
    virtio_rdma_ring_bind_wqe {
        wr_id: wr.wr_id.to_le(),
        opcode: wr.opcode as u8,
        send_flags: (wr.send_flags as u16).to_le(),
        access: bind.access.to_le(),
        mw_rkey: bind.mw_rkey.to_le(),
        new_rkey: bind.new_rkey.to_le(),
        addr: bind.addr.to_le(),
        length: bind.length.to_le(),
        lkey: bind.lkey.to_le(),
        ..Default::default()
    }
}

/// Returns the header of an entry of a UD QP.
fn datagram(
    request: &Request<'_, ibv_send_wr>,
    av: virtio_rdma_av,
    data: Data,
) -> virtio_rdma_ring_ud_wqe {
    let wr = request.wr();
    let remote = request.ud();
    let mut wqe = virtio_rdma_ring_ud_wqe {
        wr_id: wr.wr_id.to_le(),
        opcode: wr.opcode as u8,
        num_sge: data.num_sge,
        send_flags: (wr.send_flags as u16).to_le(),
        inline_len: data.inline_len.to_le(),
        remote_qpn: remote.remote_qpn.to_le(),
        remote_qkey: remote.remote_qkey.to_le(),
        av,
        ..Default::default()
    };
    if wr.opcode == IBV_WR_SEND_WITH_IMM {
        wqe.ex.imm_data = request.imm_data();
    }
    wqe
}

/// The operands of a FLUSH.
#[derive(Clone, Copy)]
pub struct Flush {
    /// The remote address and its key.
    pub remote: Rdma,
    /// The number of bytes to flush.
    pub length: u64,
    /// `enum ibv_placement_type`, as bits.
    pub placement: u8,
    /// `enum ibv_selectivity_level`
    pub level: u8,
}

/// Returns the entry of a FLUSH.
fn flushing(wr: &ibv_send_wr, flush: Flush) -> virtio_rdma_ring_flush_wqe {
    virtio_rdma_ring_flush_wqe {
        wr_id: wr.wr_id.to_le(),
        opcode: wr.opcode as u8,
        send_flags: (wr.send_flags as u16).to_le(),
        type_: flush.placement,
        level: flush.level,
        rkey: flush.remote.rkey.to_le(),
        remote_addr: flush.remote.remote_addr.to_le(),
        length: flush.length.to_le(),
        ..Default::default()
    }
}

/// The operands that only work requests with one opcode have.
#[derive(Clone, Copy)]
pub enum Body {
    /// The operands of BIND_MW.
    Bind(Bind),
    /// The operands of FLUSH.
    Flush(Flush),
    /// The word that ATOMIC_WRITE writes, as it stands in memory.
    Word([u8; 8]),
}

/// A send work request that a program makes by calls. Its entry of the ring has its data, and
/// does not have its header yet.
pub struct Open {
    single: Single,
    data: Option<Data>,
    av: Option<virtio_rdma_av>,
    remote_srqn: Option<u32>,
    body: Option<Body>,
}

impl Open {
    /// Returns a work request without data. Ignores the SGE list and the address handle of `wr`.
    ///
    /// # Errors
    ///
    /// EINVAL for an opcode or a flag that the QP does not have.
    pub fn new(limits: &Limits, wr: ibv_send_wr) -> Result<Self, Cause> {
        check_operation(limits.opcodes, &wr)?;
        // Whether the data are inline depends on the setter that the program calls.
        let send_flags = wr.send_flags & !IBV_SEND_INLINE;
        let single = Single::new(ibv_send_wr { send_flags, ..wr });
        Ok(Self { single, data: None, av: None, remote_srqn: None, body: None })
    }

    /// Sets the destination of a datagram.
    pub fn set_address(&mut self, av: virtio_rdma_av, remote_qpn: u32, remote_qkey: u32) {
        self.av = Some(av);
        self.single.set_destination(remote_qpn, remote_qkey);
    }

    /// Sets the SRQ that a message of an XRC initiator is for.
    pub fn set_remote_srqn(&mut self, remote_srqn: u32) {
        self.remote_srqn = Some(remote_srqn);
    }

    /// Sets the operands that only work requests with this opcode have.
    pub fn set_body(&mut self, body: Body) {
        self.body = Some(body);
    }

    /// Writes an SGE list as data.
    ///
    /// # Errors
    ///
    /// EINVAL for more SGEs than the QP takes, or if there are data already.
    pub fn set_sges(
        &mut self,
        limits: &Limits,
        sges: &[ibv_sge],
        entry: Writer<'_>,
    ) -> Result<(), Cause> {
        let max = limits.max_send_sge;
        if sges.len() > max as usize {
            let len = u32::try_from(sges.len()).unwrap_or(u32::MAX);
            return Err(cause!(EINVAL, "a work request has %u SGEs, and the most is %u", len, max));
        }
        put_sges(sges, &mut self.behind_header(limits, entry)?)?;
        self.data = Some(data(sges, None)?);
        Ok(())
    }

    /// Calls `put` to write inline data of `len` bytes.
    ///
    /// # Errors
    ///
    /// EINVAL for more bytes than the QP takes, for an opcode without inline
    /// data, or if there are data already.
    pub fn set_inline(
        &mut self,
        limits: &Limits,
        len: usize,
        entry: Writer<'_>,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let inline_len = inline_len(len, limits.max_inline_data)?;
        let opcode = self.single.request().wr().opcode;
        if !INLINE.has(opcode) {
            return Err(not_inline(opcode));
        }
        put(&mut self.behind_header(limits, entry)?)?;
        self.single.add_flags(IBV_SEND_INLINE);
        self.data = Some(Data { num_sge: 0, inline_len });
        Ok(())
    }

    /// Returns a writer behind the header.
    ///
    /// # Errors
    ///
    /// EINVAL if there are data already.
    fn behind_header<'a>(
        &self,
        limits: &Limits,
        mut entry: Writer<'a>,
    ) -> Result<Writer<'a>, Cause> {
        if self.data.is_some() {
            return Err(second_data());
        }
        entry.skip(send_header(limits.qp_type))?;
        Ok(entry)
    }

    /// Writes the header, which completes the work request.
    ///
    /// # Errors
    ///
    /// EINVAL for a datagram without a destination, a message of an XRC initiator
    /// without an SRQ, or data with an opcode that has none.
    pub fn close(&self, limits: &Limits, mut entry: Writer<'_>) -> Result<(), Cause> {
        let request = self.single.request();
        if self.body.is_some() && self.data.is_some() {
            let opcode = request.wr().opcode;
            return Err(cause!(EINVAL, "a work request with opcode %u has data", opcode));
        }
        match self.body {
            Some(Body::Bind(bind)) => return entry.put(binding(request.wr(), bind)),
            Some(Body::Flush(flush)) => return entry.put(flushing(request.wr(), flush)),
            Some(Body::Word(word)) => {
                let header = connected(request, Data { num_sge: 0, inline_len: 0 });
                let compare_add = u64::from_ne_bytes(word);
                return entry.put(virtio_rdma_ring_sq_wqe { compare_add, ..header });
            }
            None => {}
        }
        let data = self.data.unwrap_or(Data { num_sge: 0, inline_len: 0 });
        match limits.qp_type {
            QpType::Ud => entry.put(datagram(request, self.av.ok_or_else(no_address)?, data)),
            QpType::XrcInitiator => {
                let no_srq = || cause!(EINVAL, "a message names no SRQ");
                let remote_srqn = self.remote_srqn.ok_or_else(no_srq)?;
                entry.put(extended(request, remote_srqn, data))
            }
            _ => entry.put(connected(request, data)),
        }
    }
}

/// Appends an SGE list.
fn put_sges(sges: &[ibv_sge], entry: &mut Writer<'_>) -> Result<(), Cause> {
    sges.iter().try_for_each(|sge| {
        entry.put(virtio_rdma_sge {
            addr: sge.addr.to_le(),
            length: sge.length.to_le(),
            lkey: sge.lkey.to_le(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::{
        ah::{Ah, AhPrivate},
        model::device::Memory,
        object::{Blank, Owned},
        ring::{Ring, RingRegion},
        wr::tests::list,
    };
    use core::mem::offset_of;

    const LIMITS: Limits = Limits {
        qp_type: QpType::Rc,
        opcodes: Opcodes::of_type(QpType::Rc),
        max_send_sge: 4,
        max_recv_sge: 2,
        max_inline_data: 64,
    };

    /// Returns the limits of a QP of another type.
    fn limits(qp_type: QpType) -> Limits {
        Limits { qp_type, opcodes: Opcodes::of_type(qp_type), ..LIMITS }
    }

    /// An entry to which one request was written.
    struct Entry(RingRegion, Ring);

    impl Entry {
        fn send(limits: &Limits, wr: &mut ibv_send_wr) -> Result<Self> {
            let ring = Ring::new(256, 4, send_header(limits.qp_type) + 64).unwrap();
            let region = RingRegion::new(ring.end()).unwrap();
            send(limits, &list(wr).next().unwrap(), region.writer(ring, 6).unwrap())
                .map_err(Cause::errno)?;
            Ok(Self(region, ring))
        }

        fn read<T: Copy>(&self, offset: usize) -> T {
            Memory::new(&self.0).read(self.1, 6, offset)
        }

        fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
            Memory::new(&self.0).bytes(self.1, 6, offset, len)
        }
    }

    fn wr(opcode: ibv_wr_opcode, flags: u32, sges: &mut [ibv_sge]) -> ibv_send_wr {
        ibv_send_wr {
            wr_id: 0x1122_3344_5566_7788,
            opcode,
            send_flags: flags,
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as _,
            ..Default::default()
        }
    }

    fn refused(limits: &Limits, mut wr: ibv_send_wr) -> bool {
        Entry::send(limits, &mut wr).err() == Some(Errno::EINVAL)
    }

    #[test]
    fn write_with_imm_and_sges() {
        let mut sges = [1, 2, 3].map(|i| ibv_sge { addr: i << 40, length: i as _, lkey: 9 });
        let mut wr = wr(IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_SIGNALED, &mut sges);
        wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: 7 << 33, rkey: 8 };
        wr.__bindgen_anon_1.imm_data = 0xaabbccdd;
        let entry = Entry::send(&LIMITS, &mut wr).unwrap();
        assert_eq!(entry.read::<u64>(0), wr.wr_id);
        assert_eq!(entry.read::<[u8; 4]>(8), [1, 3, 2, 0]);
        assert_eq!(entry.read::<[u32; 3]>(12), [0xaabbccdd, 0, 8]);
        assert_eq!(entry.read::<[u64; 3]>(24), [7 << 33, 0, 0]);
        for (i, sge) in sges.iter().enumerate() {
            let sges: (u64, u32, u32) =
                (entry.read(48 + 16 * i), entry.read(56 + 16 * i), entry.read(60 + 16 * i));
            assert_eq!(sges, (sge.addr, sge.length, sge.lkey));
        }
    }

    #[test]
    fn atomics() {
        let mut sges = [ibv_sge { addr: 16, length: 8, lkey: 9 }];
        let mut wr = wr(IBV_WR_ATOMIC_CMP_AND_SWP, IBV_SEND_FENCE, &mut sges);
        wr.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: 24,
            compare_add: 5,
            swap: 6,
            rkey: 8,
        };
        let entry = Entry::send(&LIMITS, &mut wr).unwrap();
        assert_eq!(entry.read::<[u8; 4]>(8), [5, 1, 1, 0]);
        assert_eq!(entry.read::<u32>(20), 8);
        assert_eq!(entry.read::<[u64; 3]>(24), [24, 5, 6]);
        wr.send_flags = IBV_SEND_INLINE;
        assert!(refused(&LIMITS, wr));
    }

    #[test]
    fn inline_data_is_gathered() {
        let data: Vec<u8> = (0..65).collect();
        let at = |offset, length| ibv_sge {
            addr: data.as_ptr().expose_provenance() as u64 + offset,
            length,
            lkey: 0,
        };
        let mut sges = [at(0, 3), at(60, 0), at(3, 61)];
        let mut request = wr(IBV_WR_SEND, IBV_SEND_INLINE | IBV_SEND_SOLICITED, &mut sges);
        let entry = Entry::send(&LIMITS, &mut request).unwrap();
        assert_eq!(entry.read::<[u8; 4]>(8), [2, 0, 12, 0]);
        assert_eq!(entry.read::<u16>(16), 64);
        assert_eq!(entry.bytes(48, 64), data[..64]);
        sges[2].length = 62;
        assert!(refused(&LIMITS, wr(IBV_WR_SEND, IBV_SEND_INLINE, &mut sges)));
        let mut huge = [at(0, u32::MAX), at(0, u32::MAX), at(0, 66)];
        assert!(refused(&LIMITS, wr(IBV_WR_SEND, IBV_SEND_INLINE, &mut huge)));
        let entry = Entry::send(&LIMITS, &mut wr(IBV_WR_RDMA_WRITE, IBV_SEND_INLINE, &mut []));
        assert_eq!(entry.unwrap().read::<u16>(16), 0);
    }

    #[test]
    fn opcodes_of_each_type() {
        let (ah, mw) = (ah(), mw(9));
        for (qp_type, allowed) in [
            (QpType::Rc, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15][..]),
            (QpType::XrcInitiator, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
            (QpType::Uc, &[0, 1, 2, 3, 7, 8]),
            (QpType::Ud, &[2, 3]),
        ] {
            for opcode in (0..40).chain([u32::MAX]) {
                // The SGEs of an ATOMIC_WRITE name the word that it writes.
                let mut sges = [ibv_sge { addr: 0, length: 8, lkey: 0 }];
                let count = usize::from(opcode == IBV_WR_ATOMIC_WRITE);
                let mut wr = wr(opcode, 0, &mut sges[..count]);
                wr.wr.ud.ah = ah.as_ref().verbs().as_ptr();
                wr.__bindgen_anon_2.bind_mw = unbind(&mw);
                let limits = limits(qp_type);
                assert_eq!(refused(&limits, wr), !allowed.contains(&opcode), "{opcode}");
            }
        }
    }

    #[test]
    fn message_for_an_srq_at_the_other_end() {
        let mut sges = [ibv_sge { addr: 3, length: 4, lkey: 9 }];
        let mut wr = wr(IBV_WR_SEND_WITH_IMM, IBV_SEND_SIGNALED, &mut sges);
        wr.qp_type.xrc.remote_srqn = 0x12345;
        let limits = limits(QpType::XrcInitiator);
        let entry = Entry::send(&limits, &mut wr).unwrap();
        assert_eq!(entry.read::<[u8; 4]>(8), [3, 1, 2, 0]);
        assert_eq!(entry.read::<[u32; 4]>(48), [0x12345, 0, 0, 0]);
        assert_eq!(entry.read::<(u64, u32, u32)>(64), (3, 4, 9));
    }

    #[test]
    fn what_a_request_may_not_ask_for() {
        let mut sges = [ibv_sge { addr: 0, length: 8, lkey: 0 }; 5];
        assert!(!refused(&LIMITS, wr(IBV_WR_SEND, 0, &mut sges[..4])));
        assert!(refused(&LIMITS, wr(IBV_WR_SEND, 0, &mut sges)));
        assert!(refused(&LIMITS, wr(IBV_WR_SEND, 1 << 5, &mut [])));
        assert!(refused(&LIMITS, wr(IBV_WR_SEND, IBV_SEND_IP_CSUM, &mut [])));
        for num_sge in [-1, i32::MIN, i32::MAX, 1] {
            assert!(refused(&LIMITS, ibv_send_wr { num_sge, opcode: 2, ..Default::default() }));
        }
    }

    fn ah() -> Owned<Ah> {
        let mut av = virtio_rdma_av { port: 1, pdn: 77, ..Default::default() };
        av.dgid = [5; 16];
        av.dmac = [1, 2, 3, 4, 5, 6];
        Blank::<ibv_ah>::new().unwrap().finish(AhPrivate { av })
    }

    fn mw(rkey: u32) -> Owned<ibv_mw> {
        let mw: Owned<ibv_mw> = Owned::zeroed().unwrap();
        mw.as_ref().set_rkey(rkey);
        mw
    }

    fn unbind(mw: &Owned<ibv_mw>) -> ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        let bind_info = ibv_mw_bind_info::default();
        ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: mw.as_ref().as_ptr(), rkey: 5, bind_info }
    }

    #[test]
    fn bind_names_window_and_region() {
        let mw = mw(0x1234);
        let mut mr = ibv_mr { lkey: 77, ..Default::default() };
        let mut request = wr(IBV_WR_BIND_MW, IBV_SEND_SIGNALED, &mut []);
        let mut bind = unbind(&mw);
        bind.rkey = 0x1235;
        bind.bind_info = ibv_mw_bind_info {
            mr: &raw mut mr,
            addr: 7 << 33,
            length: 6 << 32,
            mw_access_flags: IBV_ACCESS_REMOTE_READ,
        };
        request.__bindgen_anon_2.bind_mw = bind;
        let entry = Entry::send(&LIMITS, &mut request).unwrap();
        let wqe: virtio_rdma_ring_bind_wqe = entry.read(0);
        assert_eq!((wqe.wr_id, wqe.opcode, wqe.num_sge), (request.wr_id, 8, 0));
        assert_eq!((wqe.send_flags, wqe.access), (2, IBV_ACCESS_REMOTE_READ));
        assert_eq!((wqe.mw_rkey, wqe.new_rkey, wqe.lkey), (0x1234, 0x1235, 77));
        assert_eq!((wqe.addr, wqe.length), (7 << 33, 6 << 32));

        let mut sges = [ibv_sge { addr: 0, length: 8, lkey: 0 }];
        let mut with_data = wr(IBV_WR_BIND_MW, 0, &mut sges);
        with_data.__bindgen_anon_2.bind_mw = bind;
        assert!(refused(&LIMITS, with_data));
        request.send_flags = IBV_SEND_INLINE;
        assert!(refused(&LIMITS, request));
        request.send_flags = 0;
        bind.bind_info.mr = std::ptr::null_mut();
        request.__bindgen_anon_2.bind_mw = bind;
        assert!(refused(&LIMITS, request));
        bind.mw = std::ptr::null_mut();
        bind.bind_info.length = 0;
        request.__bindgen_anon_2.bind_mw = bind;
        assert!(refused(&LIMITS, request));
    }

    #[test]
    fn datagram_carries_the_address_vector() {
        let limits = limits(QpType::Ud);
        let ah = ah();
        let mut sges = [ibv_sge { addr: 16, length: 8, lkey: 9 }];
        let mut wr = wr(IBV_WR_SEND_WITH_IMM, IBV_SEND_SIGNALED, &mut sges);
        wr.__bindgen_anon_1.imm_data = 5;
        wr.wr.ud.remote_qpn = 10;
        wr.wr.ud.remote_qkey = 11;
        assert!(refused(&limits, wr));
        wr.wr.ud.ah = ah.as_ref().verbs().as_ptr();
        let entry = Entry::send(&limits, &mut wr).unwrap();
        assert_eq!(entry.read::<[u8; 4]>(8), [3, 1, 2, 0]);
        assert_eq!(entry.read::<[u32; 6]>(12), [5, 0, 10, 11, 1, 77]);
        assert_eq!(entry.read::<[u8; 16]>(40), [5; 16]);
        assert_eq!(entry.read::<[u8; 6]>(59), [1, 2, 3, 4, 5, 6]);
        assert_eq!((entry.read::<u64>(80), entry.read::<u32>(88)), (16, 8));
        let data = [7u8; 5];
        let addr = data.as_ptr().expose_provenance() as u64;
        let mut inline = ibv_sge { addr, length: 5, lkey: 0 };
        wr.sg_list = &raw mut inline;
        wr.send_flags = IBV_SEND_INLINE;
        let entry = Entry::send(&limits, &mut wr).unwrap();
        assert_eq!(entry.read::<u16>(offset_of!(virtio_rdma_ring_ud_wqe, inline_len)), 5);
        assert_eq!(entry.bytes(80, 5), data);
    }

    #[test]
    fn receive() {
        let mut sges = [1, 2].map(|i| ibv_sge { addr: i, length: i as _, lkey: 3 });
        let mut wr =
            ibv_recv_wr { wr_id: 4, sg_list: &raw mut sges[0], num_sge: 2, ..Default::default() };
        let ring = Ring::new(256, 1, RECV_HEADER + 32).unwrap();
        let region = RingRegion::new(ring.end()).unwrap();
        let writer = || region.writer(ring, 0).unwrap();
        recv(&LIMITS, &list(&mut wr).next().unwrap(), writer()).unwrap();
        let entry: [u64; 6] = Memory::new(&region).read(ring, 0, 0);
        assert_eq!(entry, [2, 4, 1, 3 << 32 | 1, 2, 3 << 32 | 2]);
        wr.num_sge = 3;
        let result = recv(&LIMITS, &list(&mut wr).next().unwrap(), writer());
        assert_eq!(result.map_err(Cause::errno), Err(Errno::EINVAL));
    }
}
