// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Contexts: a program's view of a device.
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    clock, cmd,
    doorbell::Owed,
    errno::{Errno, Result},
    object::{Attributes, Ref},
    qpn::Numbers,
};

/// What the provider adds to a context.
pub struct Private {
    /// The QP numbers in use, if the program owns the rings of its QPs and
    /// CQs; otherwise the kernel posts and polls.
    pub numbers: Option<Numbers>,
    /// The doorbells that were not rung.
    pub owed: Owed,
    /// The opcodes of send work requests that the device has, as bits.
    pub opcodes: u32,
    /// Most bytes of inline data that a QP may ask for; 0 if the driver does not tell.
    pub max_inline_data: u32,
}

/// Opcodes that not every device has, and the features that it has them with:
/// each alone is enough.
const OPTIONAL: [(ibv_wr_opcode, u64); 5] = [
    (IBV_WR_LOCAL_INV, 1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_MW),
    (IBV_WR_SEND_WITH_INV, 1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_MW),
    (IBV_WR_BIND_MW, 1 << VIRTIO_RDMA_F_MW),
    (IBV_WR_FLUSH, 1 << VIRTIO_RDMA_F_FLUSH),
    (IBV_WR_ATOMIC_WRITE, 1 << VIRTIO_RDMA_F_ATOMIC_WRITE),
];

/// The opcodes, as bits, that a device with these features has.
fn opcodes(features: u64) -> u32 {
    // A driver that does not tell: a device that lacks one says so when it meets it.
    if features == 0 {
        return u32::MAX;
    }
    OPTIONAL
        .iter()
        .filter(|(_, with)| features & with == 0)
        .fold(u32::MAX, |opcodes, (opcode, _)| opcodes & !(1 << opcode))
}

/// Opens a context in the kernel.
///
/// # Errors
///
/// The kernel's; ENOMEM; EPROTONOSUPPORT when the driver wants programs to post
/// and poll in a way that this provider does not know.
pub fn open(context: Ref<'_, verbs_context>) -> Result<Private> {
    Private::new(cmd::get_context(context)?)
}

/// ibv_import_device(3): a context that another program opened. The QPs and CQs
/// of each are its own, so that neither knows of the other's.
///
/// # Errors
///
/// As [`open`].
pub fn import(context: Ref<'_, verbs_context>) -> Result<Private> {
    Private::new(cmd::query_context(context)?)
}

impl Private {
    /// What a context of which the kernel says this has.
    pub(crate) fn new(description: virtio_rdma_uresp_alloc_ucontext) -> Result<Self> {
        let numbers = match description.data_path {
            VIRTIO_RDMA_UDATA_PATH_KERNEL => None,
            VIRTIO_RDMA_UDATA_PATH_RINGS => Some(Numbers::new()?),
            _ => return Err(Errno::EPROTONOSUPPORT),
        };
        Ok(Self {
            numbers,
            owed: Owed::default(),
            opcodes: opcodes(description.features),
            max_inline_data: description.max_inline_data,
        })
    }
}

/// ibv_query_device_ex(3): what the kernel does not know, the clock of the time
/// stamps that polling takes.
pub fn set_clock(attributes: &mut Attributes<'_>) {
    attributes.set_clock(u64::MAX, clock::KHZ);
}

/// ibv_query_rt_values_ex(3). The raw clock's ticks stand in `tv_nsec`, as other
/// providers have it.
///
/// # Errors
///
/// EINVAL for an unknown value.
pub fn query_rt_values(values: &mut ibv_values_ex) -> Result {
    if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return Err(Errno::EINVAL);
    }
    if values.comp_mask != 0 {
        values.raw_clock = timespec { tv_sec: 0, tv_nsec: clock::device() as _ };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{wqe, wr_ex};

    /// What ibv_create_qp_ex(3) takes for an RC QP.
    fn builders(features: u64) -> u64 {
        wr_ex::builders(wqe::opcodes(IBV_QPT_RC) & opcodes(features))
    }

    #[test]
    fn builders_of_a_device() {
        let all = builders(0);
        let rings = 1 << VIRTIO_RDMA_F_RINGS;
        let flags = |flags: &[u32]| flags.iter().fold(0, |all, flag| all | u64::from(*flag));
        let invalidate = flags(&[IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_SEND_WITH_INV]);
        let bind = flags(&[IBV_QP_EX_WITH_BIND_MW]);
        let (flush, write) =
            (flags(&[IBV_QP_EX_WITH_FLUSH]), flags(&[IBV_QP_EX_WITH_ATOMIC_WRITE]));
        let base = all & !(invalidate | bind | flush | write);
        assert_eq!(all, base + invalidate + bind + flush + write);
        for (feature, more) in [
            (VIRTIO_RDMA_F_RINGS, 0),
            (VIRTIO_RDMA_F_FAST_REG, invalidate),
            (VIRTIO_RDMA_F_MW, invalidate + bind),
            (VIRTIO_RDMA_F_FLUSH, flush),
            (VIRTIO_RDMA_F_ATOMIC_WRITE, write),
        ] {
            assert_eq!(builders(rings | 1 << feature), base + more);
        }
        assert_eq!(builders(u64::MAX), all);
    }
}
