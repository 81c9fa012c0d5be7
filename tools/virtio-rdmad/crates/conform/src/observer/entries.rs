// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The entries of rings of work requests.

use std::mem::offset_of;
use std::ops::Range;

use abi::*;
use memory::GuestMemory;
use zerocopy::FromBytes;

use super::notes::Notes;

/// The bytes of an SGE.
const SGE: usize = size_of::<virtio_rdma_sge>();
/// The most bytes of the header of an entry.
const HEADER: usize = size_of::<virtio_rdma_ring_ud_wqe>();
/// The flags of a send work request.
const FLAGS: u32 = VIRTIO_RDMA_SEND_FENCE
    | VIRTIO_RDMA_SEND_SIGNALED
    | VIRTIO_RDMA_SEND_SOLICITED
    | VIRTIO_RDMA_SEND_INLINE
    | VIRTIO_RDMA_SEND_IP_CSUM;
/// The operations of a send work request.
const OPCODES: [u32; 14] = [
    VIRTIO_RDMA_WR_RDMA_WRITE,
    VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM,
    VIRTIO_RDMA_WR_SEND,
    VIRTIO_RDMA_WR_SEND_WITH_IMM,
    VIRTIO_RDMA_WR_RDMA_READ,
    VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP,
    VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
    VIRTIO_RDMA_WR_LOCAL_INV,
    VIRTIO_RDMA_WR_BIND_MW,
    VIRTIO_RDMA_WR_SEND_WITH_INV,
    VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
    VIRTIO_RDMA_WR_FLUSH,
    VIRTIO_RDMA_WR_ATOMIC_WRITE,
    VIRTIO_RDMA_WR_REG_MR,
];

/// The form of an entry: the bytes of its header, and which of them are reserved.
struct Form {
    header: usize,
    reserved: Vec<Range<usize>>,
}

/// Returns the form of an entry of a send ring.
fn form_of_send(kind: u32, opcode: u32) -> Form {
    type Send = virtio_rdma_ring_sq_wqe;
    type Ud = virtio_rdma_ring_ud_wqe;
    type Flush = virtio_rdma_ring_flush_wqe;
    type Bind = virtio_rdma_ring_bind_wqe;
    let one = |from: usize, to: usize| Vec::from_iter([Range { start: from, end: to }]);
    let (header, reserved) = match (kind, opcode) {
        (VIRTIO_RDMA_QPT_UD | VIRTIO_RDMA_QPT_GSI, _) => {
            let av = offset_of!(Ud, av) + offset_of!(virtio_rdma_av, reserved);
            let mut reserved = one(offset_of!(Ud, reserved_12), offset_of!(Ud, remote_qpn));
            reserved.push(av..size_of::<Ud>());
            (size_of::<Ud>(), reserved)
        }
        (_, VIRTIO_RDMA_WR_REG_MR) => {
            let at = offset_of!(virtio_rdma_ring_reg_wqe, reserved_13);
            (size_of::<virtio_rdma_ring_reg_wqe>(), one(at, at + 1))
        }
        (_, VIRTIO_RDMA_WR_BIND_MW) => {
            (size_of::<Bind>(), one(offset_of!(Bind, reserved_2c), size_of::<Bind>()))
        }
        (_, VIRTIO_RDMA_WR_FLUSH) => {
            let mut reserved = one(offset_of!(Flush, reserved_0e), offset_of!(Flush, rkey));
            reserved.push(offset_of!(Flush, reserved_28)..size_of::<Flush>());
            (size_of::<Flush>(), reserved)
        }
        _ => {
            let mut reserved = one(offset_of!(Send, reserved_12), offset_of!(Send, rkey));
            let mut header = size_of::<Send>();
            if kind == VIRTIO_RDMA_QPT_XRC_INI {
                header = size_of::<virtio_rdma_ring_xrc_wqe>();
                reserved.push(offset_of!(virtio_rdma_ring_xrc_wqe, reserved_34)..header);
            }
            (header, reserved)
        }
    };
    Form { header, reserved }
}

/// Judges that bytes are zero.
pub fn judge_zero(notes: &mut Notes, what: &str, bytes: &[u8], reserved: &[Range<usize>]) {
    for range in reserved {
        let Some(part) = bytes.get(range.clone()) else { continue };
        let wrong = part.iter().position(|byte| *byte != 0);
        notes.judge("V-TERM-03", wrong.is_none(), || {
            let what = format!("{what}: reserved bytes {}..{}", range.start, range.end);
            [what, "0".into(), format!("{part:02x?}")]
        });
    }
}

/// Returns the bytes of an entry that are looked at: a header, or the stride if that is less.
pub fn looked_at(stride: u32) -> usize {
    HEADER.min(stride as usize)
}

/// Judges an entry of a send ring.
pub fn judge_send(notes: &mut Notes, memory: &GuestMemory, kind: u32, stride: u32, entry: &[u8]) {
    let Ok((head, _)) = virtio_rdma_ring_sq_wqe::read_from_prefix(entry) else { return };
    let (opcode, flags) = (u32::from(head.opcode), u32::from(head.send_flags));
    notes.judge("V-TERM-05", OPCODES.contains(&opcode), || {
        ["opcode of an entry".into(), "one that is listed".into(), opcode.to_string()]
    });
    notes.judge("V-TERM-05", flags & !FLAGS == 0, || {
        ["send_flags of an entry".into(), format!("bits of {FLAGS:#x}"), format!("{flags:#x}")]
    });
    if !OPCODES.contains(&opcode) {
        return;
    }
    let form = form_of_send(kind, opcode);
    judge_zero(notes, "entry of a send ring", entry, &form.reserved);
    let is_inline = flags & VIRTIO_RDMA_SEND_INLINE != 0;
    let data = if is_inline { usize::from(head.inline_len) } else { 0 };
    judge_length(notes, form.header + usize::from(head.num_sge) * SGE + data, stride);
    if opcode == VIRTIO_RDMA_WR_REG_MR {
        judge_list(notes, memory, entry);
    }
}

/// Judges an entry of a receive ring.
pub fn judge_receive(notes: &mut Notes, stride: u32, entry: &[u8]) {
    let Ok((head, _)) = virtio_rdma_rq_wqe::read_from_prefix(entry) else { return };
    let at = offset_of!(virtio_rdma_rq_wqe, reserved_04);
    judge_zero(notes, "entry of a receive ring", entry, &[Range { start: at, end: at + 4 }]);
    let sges = usize::try_from(head.num_sge).unwrap_or(usize::MAX).saturating_mul(SGE);
    judge_length(notes, size_of::<virtio_rdma_rq_wqe>().saturating_add(sges), stride);
}

fn judge_length(notes: &mut Notes, bytes: usize, stride: u32) {
    notes.judge("V-WQE-01", bytes <= stride as usize, || {
        let expected = format!("at most {stride} bytes, which is the stride");
        ["header and SGEs of an entry".into(), expected, format!("{bytes} bytes")]
    });
}

/// Judges the page list of a REG_MR.
fn judge_list(notes: &mut Notes, memory: &GuestMemory, entry: &[u8]) {
    let Ok((reg, _)) = virtio_rdma_ring_reg_wqe::read_from_prefix(entry) else { return };
    let holds = reg.pages % 8 == 0;
    notes.judge("V-FRMR-02", holds, || {
        ["pages of REG_MR".into(), "a multiple of 8".into(), format!("{:#x}", reg.pages)]
    });
    let bytes = 1_u64.checked_shl(reg.page_shift.into()).unwrap_or(0);
    if !holds || bytes == 0 {
        return;
    }
    for at in 0..u64::from(reg.npages) {
        let Some(addr) = reg.pages.checked_add(at * 8) else { return };
        let Ok(page) = memory.read_obj::<u64>(addr) else { return };
        if page % bytes != 0 {
            let expected = format!("a multiple of {bytes}");
            notes.fail("V-FRMR-02", "page of REG_MR", &expected, &format!("{page:#x}"));
            return;
        }
    }
}
