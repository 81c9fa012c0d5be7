// SPDX-License-Identifier: GPL-2.0

//! Work completions, as the consumers of verbs take them.

use super::{
    c_enum::c_enum,
    object::Object, //
};
use crate::{
    bindings,
    trace, //
};
use core::{
    mem::MaybeUninit,
    ptr, //
};
use kernel::prelude::*;

c_enum! {
    /// The operation of a work request that is completed, `enum ib_wc_opcode`.
    #[derive(Default)]
    WcOpcode {
        /// SEND, of any kind.
        #[default]
        Send = ib_wc_opcode_IB_WC_SEND,
        /// RDMA WRITE, with or without immediate data.
        RdmaWrite = ib_wc_opcode_IB_WC_RDMA_WRITE,
        /// RDMA READ, with or without invalidation.
        RdmaRead = ib_wc_opcode_IB_WC_RDMA_READ,
        /// Compare and swap.
        CompSwap = ib_wc_opcode_IB_WC_COMP_SWAP,
        /// Fetch and add.
        FetchAdd = ib_wc_opcode_IB_WC_FETCH_ADD,
        /// ATOMIC WRITE.
        AtomicWrite = ib_wc_opcode_IB_WC_ATOMIC_WRITE,
        /// Local invalidation.
        LocalInv = ib_wc_opcode_IB_WC_LOCAL_INV,
        /// Fast registration.
        RegMr = ib_wc_opcode_IB_WC_REG_MR,
        /// A receive of a SEND.
        Recv = ib_wc_opcode_IB_WC_RECV,
        /// A receive of the immediate data of an RDMA WRITE.
        RecvRdmaWithImm = ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM,
    }
}

/// A work completion.
#[derive(Clone, Copy, Default)]
pub(crate) struct Wc {
    /// The `wr_id` of the consumer.
    pub(crate) wr_id: u64,
    /// `enum ib_wc_status`.
    pub(crate) status: u32,
    /// The operation of the work request.
    pub(crate) opcode: WcOpcode,
    /// A number that says more about an error.
    pub(crate) vendor_err: u32,
    /// Bytes received or read.
    pub(crate) byte_len: u32,
    /// Immediate data or the key that was invalidated, as it is in memory.
    pub(crate) ex: [u8; 4],
    /// The sender's QP.
    pub(crate) src_qp: u32,
    /// `enum ib_wc_flags`.
    pub(crate) wc_flags: u32,
    /// The index of the P_Key.
    pub(crate) pkey_index: u16,
    /// The service level.
    pub(crate) sl: u8,
    /// The port.
    pub(crate) port_num: u8,
    /// The VLAN.
    pub(crate) vlan_id: u16,
}

/// Structures that stand in for QPs, one for each number that a QP may have. Only their number is set.
///
/// When the kernel polls for a program, `copy_wc_to_user()` reads the number of the QP that a completion
/// points to, and nothing keeps that QP from being destroyed by another thread of the program meanwhile.
/// So completions for programs point to these, which live as long as the device.
///
/// # Invariants
///
/// Nobody writes to the elements.
pub(super) struct StandIns(KVVec<bindings::ib_qp>);

// SAFETY: The only member of an element that is not null or 0 is its number.
unsafe impl Send for StandIns {}
// SAFETY: By the type invariants the elements do not change.
unsafe impl Sync for StandIns {}

impl StandIns {
    /// Makes the stand-ins of the numbers below `qps`. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(qps: usize) -> Result<Self> {
        let mut all = KVVec::with_capacity(qps, GFP_KERNEL)?;
        let places: &mut [MaybeUninit<bindings::ib_qp>] = all.spare_capacity_mut();
        // Each is written in its place, because the structure is large for the stack.
        for (number, place) in places.iter_mut().take(qps).enumerate() {
            let place = place.as_mut_ptr();
            // SAFETY: The place is valid for writes of an element.
            unsafe {
                place.write_bytes(0, 1);
                (&raw mut (*place).qp_num).write(number as u32);
            }
        }
        // SAFETY: There is room for `qps` elements, all of which are initialised: an element of zeros is
        // valid, with any number.
        unsafe { all.inc_len(qps) };
        Ok(Self(all))
    }

    /// Returns the stand-in of a number.
    fn get(&self, number: u32) -> Option<*mut bindings::ib_qp> {
        let stand_in = self.0.get(number as usize)?;
        Some(ptr::from_ref(stand_in).cast_mut())
    }
}

/// The array of work completions that a consumer polls into.
pub(crate) struct Wcs<'a> {
    slots: &'a mut [MaybeUninit<bindings::ib_wc>],
    filled: usize,
    /// The stand-ins for QPs to which the completions point, if they are for a program.
    stand_ins: Option<&'a StandIns>,
}

impl<'a> Wcs<'a> {
    pub(super) fn new(
        slots: &'a mut [MaybeUninit<bindings::ib_wc>],
        stand_ins: Option<&'a StandIns>,
    ) -> Self {
        Self {
            slots,
            filled: 0,
            stand_ins,
        }
    }

    /// Returns the number of completions that are filled in.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Returns whether there is no room left.
    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.slots.len()
    }

    /// Appends the completion of a work request of `qp`, if there is room for it.
    pub(crate) fn push<T>(&mut self, qp: &Object<bindings::ib_qp, T>, wc: &Wc) {
        let named = match self.stand_ins {
            Some(stand_ins) => stand_ins.get(qp.handle()),
            None => Some(qp.as_raw()),
        };
        let (Some(slot), Some(named)) = (self.slots.get_mut(self.filled), named) else {
            return;
        };
        let mut raw = bindings::ib_wc {
            status: wc.status,
            opcode: wc.opcode.into(),
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            qp: named,
            src_qp: wc.src_qp,
            wc_flags: wc.wc_flags as c_int,
            pkey_index: wc.pkey_index,
            sl: wc.sl,
            port_num: u32::from(wc.port_num),
            vlan_id: wc.vlan_id,
            ..Default::default()
        };
        // SAFETY: The members of the unions are integers and pointers of 64 and of 32 bits.
        unsafe {
            (&raw mut raw.__bindgen_anon_1)
                .cast::<u64>()
                .write(wc.wr_id);
            (&raw mut raw.ex).cast::<[u8; 4]>().write(wc.ex);
        }
        // SAFETY: An object stands for a QP.
        unsafe { trace::complete(qp.as_raw(), &raw) };
        slot.write(raw);
        self.filled += 1;
    }
}
