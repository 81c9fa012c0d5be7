// SPDX-License-Identifier: GPL-2.0

//! Work requests, as the consumers of verbs give them.

use super::{
    c_enum::c_enum,
    object::{
        Ah,
        Mr, //
    },
    wc::WcOpcode,
    Driver, //
};
use crate::{
    bindings,
    trace, //
};
use core::{
    marker::PhantomData,
    ptr, //
};
use kernel::{
    error::from_result,
    prelude::*, //
};

/// Returns what an operation that posts work requests returns, and tells its caller at which work request it
/// stopped, if it did.
///
/// # Safety
///
/// `bad` must be valid for writes.
#[inline]
pub(super) unsafe fn finish_post<W>(
    result: Result,
    current: *const W,
    bad: *mut *const W,
) -> c_int {
    if result.is_err() {
        // SAFETY: The caller promises that `bad` is valid for writes.
        unsafe { *bad = current };
    }
    from_result(|| result.map(|()| 0))
}

c_enum! {
    /// The opcode of a send work request, `enum ib_wr_opcode`, as far as this abstraction knows it.
    WrOpcode {
        /// RDMA WRITE.
        RdmaWrite = ib_wr_opcode_IB_WR_RDMA_WRITE,
        /// RDMA WRITE with immediate data.
        RdmaWriteWithImm = ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
        /// SEND.
        Send = ib_wr_opcode_IB_WR_SEND,
        /// SEND with immediate data.
        SendWithImm = ib_wr_opcode_IB_WR_SEND_WITH_IMM,
        /// RDMA READ.
        RdmaRead = ib_wr_opcode_IB_WR_RDMA_READ,
        /// Compare and swap of 8 bytes.
        AtomicCmpAndSwp = ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
        /// Fetch and add of 8 bytes.
        AtomicFetchAndAdd = ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD,
        /// Invalidates a key of the own side.
        LocalInv = ib_wr_opcode_IB_WR_LOCAL_INV,
        /// SEND that invalidates a key of the other side.
        SendWithInv = ib_wr_opcode_IB_WR_SEND_WITH_INV,
        /// RDMA READ that invalidates the key it reads into.
        RdmaReadWithInv = ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV,
        /// Writes 8 bytes, all at once.
        AtomicWrite = ib_wr_opcode_IB_WR_ATOMIC_WRITE,
        /// Fast registration.
        RegMr = ib_wr_opcode_IB_WR_REG_MR,
    }
}

impl WrOpcode {
    /// Returns what the completion of such a work request says.
    pub(crate) fn completes_as(self) -> WcOpcode {
        match self {
            Self::Send | Self::SendWithImm | Self::SendWithInv => WcOpcode::Send,
            Self::RdmaWrite | Self::RdmaWriteWithImm => WcOpcode::RdmaWrite,
            Self::RdmaRead | Self::RdmaReadWithInv => WcOpcode::RdmaRead,
            Self::AtomicCmpAndSwp => WcOpcode::CompSwap,
            Self::AtomicFetchAndAdd => WcOpcode::FetchAdd,
            Self::AtomicWrite => WcOpcode::AtomicWrite,
            Self::LocalInv => WcOpcode::LocalInv,
            Self::RegMr => WcOpcode::RegMr,
        }
    }
}

/// The remote side of an RDMA READ, RDMA WRITE or ATOMIC WRITE.
pub(crate) struct Rdma {
    /// The address of the first byte there.
    pub(crate) remote_addr: u64,
    /// The key of the memory there.
    pub(crate) rkey: u32,
}

/// The remote side and the operands of an atomic operation.
pub(crate) struct Atomic {
    /// The address of the 8 bytes there.
    pub(crate) remote_addr: u64,
    /// The value to compare with, or to add.
    pub(crate) compare_add: u64,
    /// The value to write if the comparison is true.
    pub(crate) swap: u64,
    /// The key of the memory there.
    pub(crate) rkey: u32,
}

/// The destination of a datagram.
pub(crate) struct Datagram<'a, D: Driver> {
    /// The address.
    pub(crate) ah: &'a Ah<D>,
    /// The QP there.
    pub(crate) remote_qpn: u32,
    /// The Q_Key of that QP.
    pub(crate) remote_qkey: u32,
}

/// A fast registration.
pub(crate) struct FastReg<'a, D: Driver> {
    /// The region.
    pub(crate) mr: &'a Mr<D>,
    /// The new key of the region.
    pub(crate) key: u32,
    /// `enum ib_access_flags`.
    pub(crate) access: u32,
    /// The address by which work requests name the first byte.
    pub(crate) iova: u64,
    /// The number of bytes.
    pub(crate) length: u64,
}

/// A send work request.
pub(crate) struct SendWr<'a, D: Driver> {
    raw: &'a bindings::ib_send_wr,
    datagram: bool,
    poster: Poster,
    _driver: PhantomData<D>,
}

impl<'a, D: Driver> SendWr<'a, D> {
    /// Returns the `wr_id` of the consumer, which may be a pointer of the kernel.
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: The members of the union are an integer and a pointer of 64 bits.
        unsafe { *(&raw const self.raw.__bindgen_anon_1).cast::<u64>() }
    }

    /// Returns what the work request is to do.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an opcode that is not in [`WrOpcode`].
    pub(crate) fn opcode(&self) -> Result<WrOpcode> {
        let opcode = self.raw.opcode;
        let reason = c"a work request with an unknown opcode";
        WrOpcode::try_from(opcode).map_err(|error| trace::refuse(error, reason, opcode.into(), 0))
    }

    /// Returns a value of `enum ib_send_flags`.
    pub(crate) fn send_flags(&self) -> u32 {
        self.raw.send_flags as u32
    }

    /// Returns the immediate data or the key to invalidate, in the order of memory.
    pub(crate) fn ex(&self) -> [u8; 4] {
        // SAFETY: The members of the union are integers of 32 bits.
        unsafe { *(&raw const self.raw.ex).cast::<[u8; 4]>() }
    }

    /// Returns the local memory.
    pub(crate) fn sges(&self) -> &'a [bindings::ib_sge] {
        // SAFETY: A work request has as many SGEs as it says.
        unsafe { sges(self.raw.sg_list, self.raw.num_sge) }
    }

    /// Returns the inline data; `None` for a work request without IB_SEND_INLINE.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a work request of a program, which uverbs hands over with the flag as it is: its SGEs name the data
    /// by addresses of the program, or by any that it likes.
    pub(crate) fn inline_data(&self) -> Result<Option<InlineData<'a>>> {
        if self.raw.send_flags & bindings::ib_send_flags_IB_SEND_INLINE == 0 {
            return Ok(None);
        }
        match self.poster {
            Poster::Kernel => Ok(Some(InlineData { sges: self.sges() })),
            Poster::Program => {
                let reason = c"inline data of a program that the kernel posts for";
                Err(trace::refuse(EINVAL, reason, 0, 0))
            }
        }
    }

    /// Returns the remote side; `None` for an opcode that has none.
    pub(crate) fn rdma(&self) -> Option<Rdma> {
        match self.raw.opcode {
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE
            | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
            | bindings::ib_wr_opcode_IB_WR_RDMA_READ
            | bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV
            | bindings::ib_wr_opcode_IB_WR_ATOMIC_WRITE => {
                // SAFETY: A work request with this opcode is embedded in a `struct ib_rdma_wr`, as
                // its first member.
                let wr = unsafe { &*ptr::from_ref(self.raw).cast::<bindings::ib_rdma_wr>() };
                Some(Rdma {
                    remote_addr: wr.remote_addr,
                    rkey: wr.rkey,
                })
            }
            _ => None,
        }
    }

    /// Returns the remote side and the operands of an atomic operation; `None` for other opcodes.
    pub(crate) fn atomic(&self) -> Option<Atomic> {
        match self.raw.opcode {
            bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP
            | bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD => {
                // SAFETY: A work request with this opcode is embedded in a `struct ib_atomic_wr`,
                // as its first member.
                let wr = unsafe { &*ptr::from_ref(self.raw).cast::<bindings::ib_atomic_wr>() };
                Some(Atomic {
                    remote_addr: wr.remote_addr,
                    compare_add: wr.compare_add,
                    swap: wr.swap,
                    rkey: wr.rkey,
                })
            }
            _ => None,
        }
    }

    /// Returns what a work request for fast registration asks for; `None` for other opcodes.
    pub(crate) fn registration(&self) -> Option<FastReg<'a, D>> {
        if self.raw.opcode != bindings::ib_wr_opcode_IB_WR_REG_MR {
            return None;
        }
        // SAFETY: A work request with this opcode is embedded in a `struct ib_reg_wr`, as its first
        // member.
        let wr = unsafe { &*ptr::from_ref(self.raw).cast::<bindings::ib_reg_wr>() };
        if wr.mr.is_null() {
            return None;
        }
        // SAFETY: The consumer keeps the MR until the work request has completed, and maps nothing
        // meanwhile; MRs of this device are of this driver. There is no reference to the C
        // structure, since the core changes other members.
        unsafe {
            Some(FastReg {
                mr: Mr::<D>::from_raw(wr.mr),
                key: wr.key,
                access: wr.access as u32,
                iova: (*wr.mr).iova,
                length: (*wr.mr).length,
            })
        }
    }

    /// Returns the destination of a datagram; `None` where the QP is connected, or there is no address handle.
    pub(crate) fn datagram(&self) -> Option<Datagram<'a, D>> {
        if !self.datagram {
            return None;
        }
        // SAFETY: A work request to a QP of this type is embedded in a `struct ib_ud_wr`, as its
        // first member.
        let wr = unsafe { &*ptr::from_ref(self.raw).cast::<bindings::ib_ud_wr>() };
        if wr.ah.is_null() {
            return None;
        }
        Some(Datagram {
            // SAFETY: The consumer keeps the AH until the work request is posted, and AHs of this
            // device are of this driver.
            ah: unsafe { Ah::<D>::from_raw(wr.ah) },
            remote_qpn: wr.remote_qpn,
            remote_qkey: wr.remote_qkey,
        })
    }
}

/// The side that posts the work requests of a QP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Poster {
    /// A consumer in the kernel, which owns the memory that it names by addresses of the kernel.
    Kernel,
    /// A program, by uverbs.
    Program,
}

/// Data that a work request is to carry itself. Its SGEs name the data by addresses of the kernel. The memory
/// belongs to the consumer again as soon as the work request is posted.
///
/// # Invariants
///
/// The work request is one of [`Poster::Kernel`].
#[derive(Clone, Copy)]
pub(crate) struct InlineData<'a> {
    sges: &'a [bindings::ib_sge],
}

impl<'a> InlineData<'a> {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }

    /// Returns the bytes, one after the other.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + 'a {
        let pieces = self.sges.iter().filter(|sge| sge.length != 0);
        pieces.flat_map(|sge| {
            let start = core::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
            // SAFETY: By the type invariants the address is one of a consumer in the kernel, which lets the driver read
            // as many bytes there as the SGE says. Nobody changes them while the work request is posted.
            let piece = unsafe { core::slice::from_raw_parts(start, sge.length as usize) };
            piece.iter().copied()
        })
    }
}

/// Returns the SGEs of a work request.
///
/// # Safety
///
/// `list` must point to `len` SGEs, unless `len` is 0 or less.
unsafe fn sges<'a>(list: *const bindings::ib_sge, len: c_int) -> &'a [bindings::ib_sge] {
    match usize::try_from(len) {
        // SAFETY: The caller promises that `list` points to `len` SGEs.
        Ok(len) if len > 0 => unsafe { core::slice::from_raw_parts(list, len) },
        _ => &[],
    }
}

/// A list of send work requests, which remembers how far it got.
pub(crate) struct SendWrs<'a, D: Driver> {
    qp: *const bindings::ib_qp,
    current: *const bindings::ib_send_wr,
    begun: bool,
    datagram: bool,
    poster: Poster,
    _list: PhantomData<&'a D>,
}

impl<D: Driver> SendWrs<'_, D> {
    /// Begins at the first of a list; `datagram` says whether each work request names its own destination.
    ///
    /// # Safety
    ///
    /// `qp` must be a QP, and `head` null or the head of a list of work requests for it; both stay valid for the
    /// lifetime. `datagram` must be true of the QP. `poster` must be [`Poster::Program`] if the QP is one of a program.
    pub(super) unsafe fn new(
        qp: *const bindings::ib_qp,
        head: *const bindings::ib_send_wr,
        datagram: bool,
        poster: Poster,
    ) -> Self {
        Self {
            qp,
            current: head,
            begun: false,
            datagram,
            poster,
            _list: PhantomData,
        }
    }

    /// Returns the work request taken last, or the first.
    pub(super) fn current(&self) -> *const bindings::ib_send_wr {
        self.current
    }
}

impl<'a, D: Driver> Iterator for SendWrs<'a, D> {
    type Item = SendWr<'a, D>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: `current` is an element of the list that `new` got, which is valid for the lifetime, or null.
        let raw = unsafe { next(&mut self.current, &mut self.begun, |wr| wr.next) }?;
        // SAFETY: `new` got a QP and work requests for it.
        unsafe { trace::post_send(self.qp, raw) };
        Some(SendWr {
            raw,
            datagram: self.datagram,
            poster: self.poster,
            _driver: PhantomData,
        })
    }
}

/// A receive work request.
pub(crate) struct RecvWr<'a> {
    raw: &'a bindings::ib_recv_wr,
}

impl<'a> RecvWr<'a> {
    /// Returns the `wr_id` of the consumer, which may be a pointer of the kernel.
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: The members of the union are an integer and a pointer of 64 bits.
        unsafe { *(&raw const self.raw.__bindgen_anon_1).cast::<u64>() }
    }

    /// Returns the local memory.
    pub(crate) fn sges(&self) -> &'a [bindings::ib_sge] {
        // SAFETY: A work request has as many SGEs as it says.
        unsafe { sges(self.raw.sg_list, self.raw.num_sge) }
    }
}

/// The queue that receive work requests are posted to.
#[derive(Clone, Copy)]
pub(super) enum RecvQueue {
    /// The receive queue of a QP.
    Qp(*const bindings::ib_qp),
    /// An SRQ, and its number.
    Srq(*const bindings::ib_srq, u32),
}

/// A list of receive work requests, which remembers how far it got.
pub(crate) struct RecvWrs<'a> {
    queue: RecvQueue,
    current: *const bindings::ib_recv_wr,
    begun: bool,
    _list: PhantomData<&'a ()>,
}

impl RecvWrs<'_> {
    /// Begins at the first of a list.
    ///
    /// # Safety
    ///
    /// `queue` must be that of an object, and `head` null or the head of a list of work requests; both stay valid for
    /// the lifetime.
    pub(super) unsafe fn new(queue: RecvQueue, head: *const bindings::ib_recv_wr) -> Self {
        Self {
            queue,
            current: head,
            begun: false,
            _list: PhantomData,
        }
    }

    /// Returns the work request taken last, or the first.
    pub(super) fn current(&self) -> *const bindings::ib_recv_wr {
        self.current
    }
}

impl<'a> Iterator for RecvWrs<'a> {
    type Item = RecvWr<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: `current` is an element of the list that `new` got, which is valid for the lifetime, or null.
        let raw = unsafe { next(&mut self.current, &mut self.begun, |wr| wr.next) }?;
        // SAFETY: `new` got the queue of an object, and work requests.
        unsafe {
            match self.queue {
                RecvQueue::Qp(qp) => trace::post_recv(qp, raw),
                RecvQueue::Srq(srq, srqn) => trace::post_srq_recv(srq, srqn, raw),
            }
        }
        Some(RecvWr { raw })
    }
}

/// Returns the next element of a list; `current` stays at the last one.
///
/// # Safety
///
/// `current` must be null or an element of a valid list.
unsafe fn next<'a, T>(
    current: &mut *const T,
    begun: &mut bool,
    link: impl FnOnce(&T) -> *mut T,
) -> Option<&'a T> {
    // SAFETY: The caller promises that `current` is null or an element of a valid list.
    let here = unsafe { current.as_ref() }?;
    if !*begun {
        *begun = true;
        return Some(here);
    }
    let next: *const T = link(here);
    // SAFETY: In a valid list, a link is null or points to the next element.
    let element = unsafe { next.as_ref() }?;
    *current = next;
    Some(element)
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ib_wr)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_complete_as() {
        for (opcode, completion) in [
            (WrOpcode::Send, WcOpcode::Send),
            (WrOpcode::SendWithInv, WcOpcode::Send),
            (WrOpcode::RdmaWriteWithImm, WcOpcode::RdmaWrite),
            (WrOpcode::RdmaReadWithInv, WcOpcode::RdmaRead),
            (WrOpcode::AtomicCmpAndSwp, WcOpcode::CompSwap),
            (WrOpcode::AtomicFetchAndAdd, WcOpcode::FetchAdd),
            (WrOpcode::AtomicWrite, WcOpcode::AtomicWrite),
            (WrOpcode::LocalInv, WcOpcode::LocalInv),
            (WrOpcode::RegMr, WcOpcode::RegMr),
        ] {
            assert!(opcode.completes_as() == completion);
        }
        assert!(WrOpcode::try_from(bindings::ib_wr_opcode_IB_WR_LSO).is_err());
    }

    #[test]
    fn lists_remember_how_far_they_got() {
        let sges = [bindings::ib_sge::default(); 2];
        let last = bindings::ib_recv_wr {
            sg_list: sges.as_ptr().cast_mut(),
            num_sge: 2,
            ..Default::default()
        };
        let first = bindings::ib_recv_wr {
            next: ptr::from_ref(&last).cast_mut(),
            ..Default::default()
        };
        let device = bindings::ib_device::default();
        let qp = bindings::ib_qp {
            device: ptr::from_ref(&device).cast_mut(),
            ..Default::default()
        };
        // SAFETY: The QP, and the list of two work requests, live until the end of this function.
        let mut wrs = unsafe { RecvWrs::new(RecvQueue::Qp(&raw const qp), &raw const first) };
        assert!(core::ptr::eq(wrs.current(), &raw const first));
        assert!(wrs.next().is_some_and(|wr| wr.sges().is_empty()));
        assert!(core::ptr::eq(wrs.current(), &raw const first));
        assert!(wrs.next().is_some_and(|wr| wr.sges().len() == 2));
        assert!(wrs.next().is_none());
        // `current` stays at the work request that was taken last.
        assert!(core::ptr::eq(wrs.current(), &raw const last));
    }

    #[test]
    fn inline_data_is_one_piece() {
        let (head, tail) = ([1u8, 2, 3], [4u8, 5]);
        let sge = |bytes: &[u8]| bindings::ib_sge {
            addr: bytes.as_ptr().expose_provenance() as u64,
            length: bytes.len() as u32,
            lkey: 0,
        };
        let sges = [sge(&head), bindings::ib_sge::default(), sge(&tail)];
        let data = InlineData { sges: &sges };
        assert_eq!(data.len(), 5);
        assert!(data.bytes().eq([1, 2, 3, 4, 5]));
    }
}
