// SPDX-License-Identifier: GPL-2.0

//! The device ABI: the structures of `include/uapi/linux/virtio_rdma.h`, which
//! may be copied to and from memory as bytes, and their sizes.
//!
//! This is an abstraction: the unsafe code that says which structures may be copied,
//! and what their unions hold, is here and nowhere else.

use crate::bindings;
use kernel::{
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

pub(crate) use bindings::{
    virtio_rdma_ah_attr as AhAttr,
    virtio_rdma_av as Av,
    virtio_rdma_comp_event as CompEvent,
    virtio_rdma_cq_ring as CqRing,
    virtio_rdma_cqe as Cqe,
    virtio_rdma_doorbell as Doorbell,
    virtio_rdma_event as Event,
    virtio_rdma_qp_attr as QpAttr,
    virtio_rdma_qp_ring as QpRing,
    virtio_rdma_ring_cqe as RingCqe,
    virtio_rdma_ring_reg_wqe as RingRegWqe,
    virtio_rdma_ring_sq_wqe as RingSqWqe,
    virtio_rdma_ring_ud_wqe as RingUdWqe,
    virtio_rdma_ring_xrc_wqe as RingXrcWqe,
    virtio_rdma_rq_wqe as RqWqe,
    virtio_rdma_rsp_query_port as PortAttr,
    virtio_rdma_sge as Sge,
    virtio_rdma_sq_wqe as SqWqe,
    virtio_rdma_srq_ring as SrqRing, //
};

/// Declares structures of the ABI with their sizes in bytes.
macro_rules! wire {
    ($($name:ident: $size:literal,)*) => {
        $(
            const _: () = assert!(size_of::<bindings::$name>() == $size);

            // SAFETY: The structure consists of integers, arrays of them, and unions, and its padding
            // is written out. All bytes of a union are initialised: it is zeroed, or assigned as a
            // whole by a member of its full length.
            unsafe impl AsBytes for bindings::$name {}
            // SAFETY: Every value of an integer is valid, and so is every value of an array or a
            // union of integers.
            unsafe impl FromBytes for bindings::$name {}
        )*
    };
}

wire! {
    virtio_rdma_cmd_query_port: 1,
    virtio_rdma_rsp_query_port: 164,
    virtio_rdma_cmd_create_cq: 4,
    virtio_rdma_rsp_create_cq: 4,
    virtio_rdma_cmd_destroy_cq: 4,
    virtio_rdma_rsp_create_pd: 4,
    virtio_rdma_cmd_destroy_pd: 4,
    virtio_rdma_cmd_get_dma_mr: 8,
    virtio_rdma_rsp_mr: 12,
    virtio_rdma_cmd_create_mr: 12,
    virtio_rdma_cmd_reg_user_mr: 48,
    virtio_rdma_cmd_rereg_mr: 56,
    virtio_rdma_cmd_dereg_mr: 4,
    virtio_rdma_cmd_alloc_mw: 8,
    virtio_rdma_rsp_alloc_mw: 8,
    virtio_rdma_cmd_dealloc_mw: 4,
    virtio_rdma_cmd_create_qp: 68,
    virtio_rdma_rsp_create_qp: 4,
    virtio_rdma_cmd_modify_qp: 152,
    virtio_rdma_cmd_query_qp: 8,
    virtio_rdma_rsp_query_qp: 144,
    virtio_rdma_cmd_destroy_qp: 4,
    virtio_rdma_cmd_query_pkey: 8,
    virtio_rdma_rsp_query_pkey: 2,
    virtio_rdma_cmd_add_gid: 28,
    virtio_rdma_cmd_del_gid: 8,
    virtio_rdma_cmd_req_notify: 8,
    virtio_rdma_cmd_create_ring_cq: 24,
    virtio_rdma_cmd_modify_cq: 8,
    virtio_rdma_cmd_resize_cq: 24,
    virtio_rdma_rsp_resize_cq: 4,
    virtio_rdma_cmd_create_ring_qp: 152,
    virtio_rdma_cmd_create_srq: 64,
    virtio_rdma_rsp_create_srq: 4,
    virtio_rdma_cmd_modify_srq: 8,
    virtio_rdma_cmd_query_srq: 4,
    virtio_rdma_rsp_query_srq: 16,
    virtio_rdma_cmd_destroy_srq: 4,
    virtio_rdma_cmd_resize_srq: 40,
    virtio_rdma_rsp_resize_srq: 4,
    virtio_rdma_rsp_alloc_xrcd: 4,
    virtio_rdma_cmd_dealloc_xrcd: 4,
    virtio_rdma_cmd_mcast: 24,
    virtio_rdma_cmd_query_counters: 4,
    virtio_rdma_rsp_query_counters: 128,
    virtio_rdma_sge: 16,
    virtio_rdma_sq_wqe: 88,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_1: 16,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_2: 32,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_3: 52,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_4: 48,
    virtio_rdma_rq_wqe: 16,
    virtio_rdma_cqe: 40,
    virtio_rdma_event: 8,
    virtio_rdma_ring_sq_wqe: 48,
    virtio_rdma_ring_reg_wqe: 48,
    virtio_rdma_ring_ud_wqe: 80,
    virtio_rdma_ring_cqe: 64,
    virtio_rdma_doorbell: 8,
    virtio_rdma_comp_event: 8,
    virtio_rdma_ureq_alloc_ucontext: 8,
    virtio_rdma_uresp_alloc_ucontext: 48,
    virtio_rdma_ureq_create_cq: 16,
    virtio_rdma_uresp_resize_cq: 8,
    virtio_rdma_ureq_create_qp: 40,
    virtio_rdma_ureq_create_srq: 32,
    virtio_rdma_uresp_create_ah: 48,
}

const _: () = assert!(size_of::<bindings::virtio_rdma_config>() == 256);
const _: () = assert!(size_of::<Av>() == 44);
const _: () = assert!(size_of::<QpRing>() == 256);
const _: () = assert!(size_of::<CqRing>() == 128);
const _: () = assert!(size_of::<SrqRing>() == 256);
const _: () = assert!(size_of::<RingXrcWqe>() == 64);

/// Declares that a number of the kernel is the device's number for the same thing, so that it is passed on as
/// it is.
macro_rules! same_number {
    ($($kernel:ident = $device:ident,)*) => {
        $(const _: () = assert!(bindings::$kernel == bindings::$device);)*
    };
}

same_number! {
    ib_qp_type_IB_QPT_GSI = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_GSI,
    ib_qp_type_IB_QPT_RC = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_RC,
    ib_qp_type_IB_QPT_UC = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_UC,
    ib_qp_type_IB_QPT_UD = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_UD,
    ib_qp_type_IB_QPT_XRC_INI = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_XRC_INI,
    ib_qp_type_IB_QPT_XRC_TGT = virtio_rdma_qp_type_VIRTIO_RDMA_QPT_XRC_TGT,
    ib_qp_state_IB_QPS_RESET = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_RESET,
    ib_qp_state_IB_QPS_INIT = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_INIT,
    ib_qp_state_IB_QPS_RTR = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_RTR,
    ib_qp_state_IB_QPS_RTS = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_RTS,
    ib_qp_state_IB_QPS_SQD = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_SQD,
    ib_qp_state_IB_QPS_SQE = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_SQE,
    ib_qp_state_IB_QPS_ERR = virtio_rdma_qp_state_VIRTIO_RDMA_QPS_ERR,
    ib_wr_opcode_IB_WR_RDMA_WRITE = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_RDMA_WRITE,
    ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM,
    ib_wr_opcode_IB_WR_SEND = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_SEND,
    ib_wr_opcode_IB_WR_SEND_WITH_IMM = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_SEND_WITH_IMM,
    ib_wr_opcode_IB_WR_RDMA_READ = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_RDMA_READ,
    ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP,
    ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
    ib_wr_opcode_IB_WR_LOCAL_INV = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_LOCAL_INV,
    ib_wr_opcode_IB_WR_SEND_WITH_INV = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_SEND_WITH_INV,
    ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
    ib_wr_opcode_IB_WR_ATOMIC_WRITE = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_ATOMIC_WRITE,
    ib_wr_opcode_IB_WR_REG_MR = virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_REG_MR,
    ib_wc_status_IB_WC_SUCCESS = virtio_rdma_wc_status_VIRTIO_RDMA_WC_SUCCESS,
    ib_wc_status_IB_WC_WR_FLUSH_ERR = virtio_rdma_wc_status_VIRTIO_RDMA_WC_WR_FLUSH_ERR,
    ib_wc_status_IB_WC_GENERAL_ERR = virtio_rdma_wc_status_VIRTIO_RDMA_WC_GENERAL_ERR,
}

// SAFETY: The structure consists of integers, and its padding is written out.
unsafe impl AsBytes for Av {}

/// Returns an address vector as the bytes that programs get.
pub(crate) fn av_bytes(av: &Av) -> [u8; size_of::<Av>()] {
    let mut bytes = [0; size_of::<Av>()];
    bytes.copy_from_slice(av.as_bytes());
    bytes
}

/// A request or reply of no bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Zeroable)]
pub(crate) struct Nothing;

// SAFETY: The structure has no bytes.
unsafe impl AsBytes for Nothing {}
// SAFETY: The structure has no bytes.
unsafe impl FromBytes for Nothing {}

/// The properties that REG_MR gives to a region.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    /// The device's number of the region.
    pub(crate) mrn: u32,
    /// The new key of the region.
    pub(crate) key: u32,
    /// `VIRTIO_RDMA_ACCESS_*`.
    pub(crate) access: u32,
    /// The number of pages.
    pub(crate) npages: u32,
    /// The address of the list of pages, as the device sees it.
    pub(crate) pages: u64,
    /// The address by which work requests name the first byte.
    pub(crate) iova: u64,
    /// The number of bytes.
    pub(crate) length: u64,
    /// The binary logarithm of the bytes of a page.
    pub(crate) page_shift: u8,
}

/// The part of a send work request that its opcode decides.
pub(crate) enum WrBody {
    /// RDMA READ and RDMA WRITE.
    Rdma {
        /// The address of the first byte there.
        remote_addr: u64,
        /// The key of the memory there.
        rkey: u32,
    },
    /// Compare-and-swap, fetch-and-add.
    Atomic {
        /// The address of the 8 bytes there.
        remote_addr: u64,
        /// The value to compare with, or to add.
        compare_add: u64,
        /// The value to write if the comparison is true.
        swap: u64,
        /// The key of the memory there.
        rkey: u32,
    },
    /// A datagram.
    Ud {
        /// The QP there.
        remote_qpn: u32,
        /// The Q_Key of that QP.
        remote_qkey: u32,
        /// The address vector of that QP.
        av: Av,
    },
    /// A fast registration.
    Reg(Registration),
    /// The work request has no further members.
    None,
}

impl WrBody {
    /// Writes the variant to the union of a work request; what is behind it becomes 0.
    fn write(&self, wqe: &mut SqWqe) {
        match *self {
            WrBody::Rdma { remote_addr, rkey } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_1 {
                    remote_addr: remote_addr.to_le(),
                    rkey: rkey.to_le(),
                    reserved_0c: 0,
                },
            ),
            WrBody::Atomic {
                remote_addr,
                compare_add,
                swap,
                rkey,
            } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_2 {
                    remote_addr: remote_addr.to_le(),
                    compare_add: compare_add.to_le(),
                    swap: swap.to_le(),
                    rkey: rkey.to_le(),
                    reserved_1c: 0,
                },
            ),
            WrBody::Ud {
                remote_qpn,
                remote_qkey,
                av,
            } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_3 {
                    remote_qpn: remote_qpn.to_le(),
                    remote_qkey: remote_qkey.to_le(),
                    av,
                },
            ),
            WrBody::Reg(reg) => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_4 {
                    mrn: reg.mrn.to_le(),
                    key: reg.key.to_le(),
                    access: reg.access.to_le(),
                    npages: reg.npages.to_le(),
                    pages: reg.pages.to_le(),
                    iova: reg.iova.to_le(),
                    length: reg.length.to_le(),
                    page_shift: reg.page_shift,
                    reserved_29: [0; 7],
                },
            ),
            WrBody::None => {}
        }
    }

    /// Writes the variant to the header of a work request in the send ring of a connected QP.
    fn write_ring(&self, wqe: &mut RingSqWqe) {
        match *self {
            WrBody::Rdma { remote_addr, rkey } => {
                wqe.remote_addr = remote_addr.to_le();
                wqe.rkey = rkey.to_le();
            }
            WrBody::Atomic {
                remote_addr,
                compare_add,
                swap,
                rkey,
            } => {
                wqe.remote_addr = remote_addr.to_le();
                wqe.compare_add = compare_add.to_le();
                wqe.swap = swap.to_le();
                wqe.rkey = rkey.to_le();
            }
            WrBody::Ud { .. } | WrBody::Reg(_) | WrBody::None => {}
        }
    }
}

/// A send work request without its SGEs.
pub(crate) struct SendRequest {
    /// `enum virtio_rdma_wr_opcode`.
    pub(crate) opcode: u32,
    /// `VIRTIO_RDMA_SEND_*`.
    pub(crate) send_flags: u32,
    /// Immediate data or the key to invalidate, as it is in memory.
    pub(crate) ex: [u8; 4],
    /// The rest.
    pub(crate) body: WrBody,
}

/// The header of a work request in a send ring.
pub(crate) enum RingHeader {
    /// The header for a connected QP.
    Connected(RingSqWqe),
    /// The header for a QP of datagrams.
    Datagram(RingUdWqe),
    /// The header for a fast registration.
    Registration(RingRegWqe),
}

impl SendRequest {
    /// Returns the header for a virtqueue.
    pub(crate) fn to_virtqueue(&self, num_sge: usize, wr_id: u64) -> SqWqe {
        let mut wqe = SqWqe {
            num_sge: (num_sge as u32).to_le(),
            send_flags: self.send_flags.to_le(),
            opcode: self.opcode.to_le(),
            wr_id: wr_id.to_le(),
            ..SqWqe::zeroed()
        };
        wqe.ex.imm_data = u32::from_ne_bytes(self.ex);
        self.body.write(&mut wqe);
        wqe
    }

    /// Returns the header for a ring. The driver's limits keep all numbers within the fields.
    pub(crate) fn to_ring(&self, num_sge: usize, inline_len: u64, wr_id: u64) -> RingHeader {
        let num_sge = num_sge as u8;
        let inline_len = (inline_len as u16).to_le();
        if let WrBody::Ud {
            remote_qpn,
            remote_qkey,
            av,
        } = self.body
        {
            let mut wqe = RingUdWqe {
                wr_id: wr_id.to_le(),
                opcode: self.opcode as u8,
                num_sge,
                inline_len,
                send_flags: (self.send_flags as u16).to_le(),
                remote_qpn: remote_qpn.to_le(),
                remote_qkey: remote_qkey.to_le(),
                av,
                ..RingUdWqe::zeroed()
            };
            wqe.ex.imm_data = u32::from_ne_bytes(self.ex);
            return RingHeader::Datagram(wqe);
        }
        if let WrBody::Reg(reg) = self.body {
            return RingHeader::Registration(RingRegWqe {
                wr_id: wr_id.to_le(),
                opcode: self.opcode as u8,
                send_flags: (self.send_flags as u16).to_le(),
                access: reg.access.to_le(),
                npages: (reg.npages as u16).to_le(),
                key: reg.key.to_le(),
                iova: reg.iova.to_le(),
                pages: reg.pages.to_le(),
                length: reg.length.to_le(),
                page_shift: reg.page_shift,
                ..RingRegWqe::zeroed()
            });
        }
        let mut wqe = RingSqWqe {
            wr_id: wr_id.to_le(),
            opcode: self.opcode as u8,
            num_sge,
            inline_len,
            send_flags: (self.send_flags as u16).to_le(),
            ..RingSqWqe::zeroed()
        };
        wqe.ex.imm_data = u32::from_ne_bytes(self.ex);
        self.body.write_ring(&mut wqe);
        RingHeader::Connected(wqe)
    }
}

/// A completion, as the device says, from either kind of CQ.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    /// The number by which the driver knows the work request: its slot in a virtqueue's memory, or its index in a
    /// ring.
    pub(crate) request: u64,
    /// The `wr_id` that the driver gave it.
    pub(crate) tag: u64,
    /// `enum virtio_rdma_wc_status`.
    pub(crate) status: u32,
    /// `enum virtio_rdma_wc_opcode`.
    pub(crate) opcode: u32,
    /// A number of the device that tells more about an error.
    pub(crate) vendor_err: u32,
    /// Bytes received or read.
    pub(crate) byte_len: u32,
    /// Immediate data or the invalidated key, as it is in memory.
    pub(crate) ex: [u8; 4],
    /// The QP.
    pub(crate) qpn: u32,
    /// The sender's QP.
    pub(crate) src_qp: u32,
    /// `VIRTIO_RDMA_WC_*`.
    pub(crate) wc_flags: u32,
    /// The index of the P_Key.
    pub(crate) pkey_index: u16,
    /// The service level.
    pub(crate) sl: u8,
    /// The VLAN.
    pub(crate) vlan_id: u16,
}

impl Completion {
    /// Returns whether a receive work request completed.
    pub(crate) fn is_recv(&self) -> bool {
        self.opcode & bindings::virtio_rdma_wc_opcode_VIRTIO_RDMA_WC_RECV != 0
    }
}

/// The members that both kinds of CQE have by the same name.
macro_rules! completion {
    ($cqe:ident, $request:expr) => {
        Completion {
            request: $request,
            tag: u64::from_le($cqe.wr_id),
            status: u32::from($cqe.status),
            opcode: u32::from($cqe.opcode),
            vendor_err: u32::from_le($cqe.vendor_err),
            byte_len: u32::from_le($cqe.byte_len),
            // SAFETY: Both members of the union are integers of 32 bits.
            ex: unsafe { $cqe.ex.imm_data }.to_ne_bytes(),
            qpn: u32::from_le($cqe.qp_num),
            src_qp: u32::from_le($cqe.src_qp),
            wc_flags: u32::from_le($cqe.wc_flags),
            pkey_index: u16::from_le($cqe.pkey_index),
            sl: $cqe.sl,
            vlan_id: u16::from_le($cqe.vlan_id),
        }
    };
}

impl From<&Cqe> for Completion {
    fn from(cqe: &Cqe) -> Self {
        completion!(cqe, u64::from_le(cqe.wr_id))
    }
}

impl From<&RingCqe> for Completion {
    fn from(cqe: &RingCqe) -> Self {
        completion!(cqe, u64::from(u32::from_le(cqe.wqe_index)))
    }
}

/// Sets the union of a work request. It is assigned by its longest member, which begins with `body`.
fn set_wr<T: AsBytes>(wqe: &mut SqWqe, body: &T) {
    const LEN: usize = size_of::<bindings::virtio_rdma_sq_wqe__bindgen_ty_2>();
    const { assert!(size_of::<T>() <= LEN) };

    let mut raw = [0; LEN];
    raw[..size_of::<T>()].copy_from_slice(body.as_bytes());
    wqe.wr = bindings::virtio_rdma_sq_wqe__bindgen_ty_2 { raw };
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_wire)]
mod tests {
    use super::*;

    /// Returns a send work request with all members of its head set.
    fn request(opcode: u32, body: WrBody) -> SendRequest {
        SendRequest {
            opcode,
            send_flags: bindings::VIRTIO_RDMA_SEND_FENCE | bindings::VIRTIO_RDMA_SEND_SIGNALED,
            ex: [0xa1, 0xa2, 0xa3, 0xa4],
            body,
        }
    }

    const WR_ID: u64 = 0x1122_3344_5566_7788;

    /// `WR_ID` as the device has it.
    const WR_ID_BYTES: [u8; 8] = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];

    fn has(bytes: &[u8], offset: usize, expected: &[u8]) -> bool {
        bytes.get(offset..offset + expected.len()) == Some(expected)
    }

    #[test]
    fn ring_of_connected_qp() {
        let body = WrBody::Atomic {
            remote_addr: 0x0102_0304_0506_0708,
            compare_add: 0x11,
            swap: 0x22,
            rkey: 0xdead_beef,
        };
        let opcode = bindings::virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP;
        let RingHeader::Connected(wqe) = request(opcode, body).to_ring(2, 300, WR_ID) else {
            assert!(false);
            return;
        };
        let bytes = wqe.as_bytes();
        assert!(has(bytes, 0, &WR_ID_BYTES));
        // These are the opcode, the number of SGEs (2) and the flags.
        assert!(has(bytes, 8, &[5, 2, 3, 0]));
        assert!(has(bytes, 12, &[0xa1, 0xa2, 0xa3, 0xa4]));
        // These are the length of inline data (300) and a reserved member.
        assert!(has(bytes, 16, &[0x2c, 0x01, 0, 0]));
        assert!(has(bytes, 20, &[0xef, 0xbe, 0xad, 0xde]));
        assert!(has(bytes, 24, &[8, 7, 6, 5, 4, 3, 2, 1]));
        assert!(has(bytes, 32, &[0x11, 0, 0, 0, 0, 0, 0, 0]));
        assert!(has(bytes, 40, &[0x22, 0, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn ring_of_send_has_no_remote_side() {
        let opcode = bindings::virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_SEND_WITH_IMM;
        let RingHeader::Connected(wqe) = request(opcode, WrBody::None).to_ring(1, 0, 1) else {
            assert!(false);
            return;
        };
        assert!(has(wqe.as_bytes(), 16, &[0; 32]));
    }

    #[test]
    fn ring_of_datagrams() {
        let av = Av {
            port: 1u32.to_le(),
            pdn: 7u32.to_le(),
            dmac: [1, 2, 3, 4, 5, 6],
            ..Av::zeroed()
        };
        let body = WrBody::Ud {
            remote_qpn: 0x0a0b0c,
            remote_qkey: 0x1234_5678,
            av,
        };
        let opcode = bindings::virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_SEND;
        let RingHeader::Datagram(wqe) = request(opcode, body).to_ring(1, 0, WR_ID) else {
            assert!(false);
            return;
        };
        let bytes = wqe.as_bytes();
        assert!(has(bytes, 0, &WR_ID_BYTES));
        assert!(has(bytes, 20, &[0x0c, 0x0b, 0x0a, 0]));
        assert!(has(bytes, 24, &[0x78, 0x56, 0x34, 0x12]));
        assert!(has(bytes, 28, &av_bytes(&av)));
        assert!(has(bytes, 72, &[0; 8]));
    }

    #[test]
    fn ring_of_registration() {
        let body = WrBody::Reg(Registration {
            mrn: 9,
            key: 0x0101_0103,
            access: bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
            npages: 0x0203,
            pages: 0x4000,
            iova: 0x1_0000,
            length: 0x20_3000,
            page_shift: 12,
        });
        let opcode = bindings::virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_REG_MR;
        let RingHeader::Registration(wqe) = request(opcode, body).to_ring(0, 0, WR_ID) else {
            assert!(false);
            return;
        };
        let bytes = wqe.as_bytes();
        assert!(has(bytes, 8, &[0x20, 0, 3, 0]));
        assert!(has(bytes, 16, &[0x03, 0x02, 12, 0]));
        assert!(has(bytes, 20, &[3, 1, 1, 1]));
        assert!(has(bytes, 24, &[0, 0, 1, 0, 0, 0, 0, 0]));
        assert!(has(bytes, 32, &[0, 0x40, 0, 0, 0, 0, 0, 0]));
        assert!(has(bytes, 40, &[0, 0x30, 0x20, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn virtqueue_of_write() {
        let body = WrBody::Rdma {
            remote_addr: 0x0807,
            rkey: 0x66,
        };
        let opcode = bindings::virtio_rdma_wr_opcode_VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM;
        let wqe = request(opcode, body).to_virtqueue(3, WR_ID);
        let bytes = wqe.as_bytes();
        assert!(has(bytes, 0, &[3, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]));
        assert!(has(bytes, 16, &WR_ID_BYTES));
        assert!(has(bytes, 24, &[0xa1, 0xa2, 0xa3, 0xa4]));
        assert!(has(bytes, 32, &[7, 8, 0, 0, 0, 0, 0, 0, 0x66, 0, 0, 0]));
        // The rest of the union is zero.
        assert!(has(bytes, 44, &[0; 44]));
    }

    #[test]
    fn completions_of_both_kinds() {
        let ring = RingCqe {
            wr_id: WR_ID.to_le(),
            opcode: bindings::virtio_rdma_wc_opcode_VIRTIO_RDMA_WC_RECV as u8,
            byte_len: 4096u32.to_le(),
            qp_num: 5u32.to_le(),
            wqe_index: 77u32.to_le(),
            ..RingCqe::zeroed()
        };
        let completion = Completion::from(&ring);
        assert_eq!(completion.request, 77);
        assert_eq!(completion.tag, WR_ID);
        assert_eq!(completion.byte_len, 4096);
        assert_eq!(completion.qpn, 5);
        assert!(completion.is_recv());

        let virtqueue = Cqe {
            wr_id: 3u64.to_le(),
            status: bindings::virtio_rdma_wc_status_VIRTIO_RDMA_WC_WR_FLUSH_ERR as u8,
            ..Cqe::zeroed()
        };
        let completion = Completion::from(&virtqueue);
        assert_eq!(completion.request, 3);
        assert_eq!(completion.status, bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR);
        assert!(!completion.is_recv());
    }
}
