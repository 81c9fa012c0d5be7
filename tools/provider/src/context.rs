// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Contexts: a program's view of a device.
#![forbid(unsafe_code)]

use crate::{
    attr::DeviceAttr,
    barriers::Barriers,
    bindings::*,
    causes::{Cause, cause},
    clock, cmd,
    errno::Result,
    limits::{Opcodes, Sizes},
    log::Refuse,
    object::{Extended, Object, Ref},
    owed::Owed,
    qp_table::QpTable,
};

/// A context: the part of `struct verbs_context` that libibverbs hands out, and the provider's
/// private data.
/// What stands in front of it depends on the release: [`crate::libibverbs`].
pub type Context = Object<ibv_context>;

impl Extended for ibv_context {
    type Private = ContextPrivate;
}

/// The private data of a context.
pub struct ContextPrivate {
    /// The QPs by number, if the program has the rings of its QPs and
    /// CQs; otherwise the kernel posts and polls.
    pub qp_table: Option<QpTable>,
    /// The barriers that the device needs where the program has the rings.
    pub barriers: Barriers,
    /// The doorbells that are owed to the device.
    pub owed: Owed,
    /// The opcodes of send work requests that the device has.
    pub opcodes: Opcodes,
    /// The most that an object can have.
    pub sizes: Sizes,
    /// Most bytes of inline data that a QP may ask for; 0 if the driver does not tell.
    pub max_inline_data: u32,
}

/// Opcodes that not every device has, and the features that bring them; each feature alone is
/// enough.
const OPTIONAL: [(Opcodes, u64); 4] = [
    (
        Opcodes::of(&[IBV_WR_LOCAL_INV, IBV_WR_SEND_WITH_INV]),
        1 << VIRTIO_RDMA_F_FAST_REG | 1 << VIRTIO_RDMA_F_MW,
    ),
    (Opcodes::of(&[IBV_WR_BIND_MW]), 1 << VIRTIO_RDMA_F_MW),
    (Opcodes::of(&[IBV_WR_FLUSH]), 1 << VIRTIO_RDMA_F_FLUSH),
    (Opcodes::of(&[IBV_WR_ATOMIC_WRITE]), 1 << VIRTIO_RDMA_F_ATOMIC_WRITE),
];

/// Returns the opcodes that a device with these features has.
fn opcodes(features: u64) -> Opcodes {
    // An older driver does not report the features. A device that lacks an opcode then completes
    // its work requests with an error.
    if features == 0 {
        return Opcodes::ALL;
    }
    OPTIONAL
        .iter()
        .filter(|(_, with)| features & with == 0)
        .fold(Opcodes::ALL, |opcodes, (missing, _)| opcodes.without(*missing))
}

/// Opens a context in the kernel: ibv_open_device(3).
///
/// # Errors
///
/// The kernel's; ENOMEM; EPROTONOSUPPORT if the driver wants programs to post
/// and poll in a way that this provider does not know, or gives what it did not ask for.
pub fn open(context: Ref<'_, ibv_context>) -> Result<ContextPrivate> {
    ContextPrivate::new(cmd::context::get(context)?).map_err(|cause| context.refuse(cause))
}

/// Imports a context that another program opened: ibv_import_device(3). Each program has QPs and
/// CQs of its own.
///
/// # Errors
///
/// As [`open`].
pub fn import(context: Ref<'_, ibv_context>) -> Result<ContextPrivate> {
    ContextPrivate::new(cmd::context::query(context)?).map_err(|cause| context.refuse(cause))
}

impl ContextPrivate {
    /// Returns the private data of a context that the kernel describes so.
    ///
    /// # Errors
    ///
    /// EPROTONOSUPPORT for a data path or a bit of the mask that this provider does not know; ENOMEM.
    pub(crate) fn new(description: virtio_rdma_uresp_alloc_ucontext) -> Result<Self, Cause> {
        if description.comp_mask != 0 {
            let (low, high) = (description.comp_mask as u32, (description.comp_mask >> 32) as u32);
            let cause =
                cause!(EPROTONOSUPPORT, "the mask 0x%x (+ 0x%x << 32) is unknown", low, high);
            return Err(cause);
        }
        let no_memory = |_| cause!(ENOMEM, "there is no memory for the table of QPs");
        let qp_table = match description.data_path {
            VIRTIO_RDMA_UDATA_PATH_KERNEL => None,
            VIRTIO_RDMA_UDATA_PATH_RINGS | VIRTIO_RDMA_UDATA_PATH_RINGS_BUS => {
                Some(QpTable::new().map_err(no_memory)?)
            }
            path => return Err(cause!(EPROTONOSUPPORT, "the data path %u is unknown", path)),
        };
        let barriers = match description.data_path {
            VIRTIO_RDMA_UDATA_PATH_RINGS_BUS => Barriers::BUS,
            _ => Barriers::PROCESSORS,
        };
        Ok(Self {
            qp_table,
            barriers,
            owed: Owed::default(),
            opcodes: opcodes(description.features),
            sizes: Sizes::from(&description),
            max_inline_data: description.max_inline_data,
        })
    }
}

/// Adds to the attributes of a device what the kernel does not know, or not as text: the version of its
/// firmware, and the clock of the time stamps that polling takes. For ibv_query_device_ex(3).
pub fn complete(attr: &mut DeviceAttr<'_>, fw_ver: u64) {
    attr.set_firmware(fw_ver);
    attr.set_clock(u64::MAX, clock::KHZ);
}

/// Reads the raw clock: ibv_query_rt_values_ex(3). Its ticks stand in `tv_nsec`, as with other
/// providers.
///
/// # Errors
///
/// EINVAL for an unknown value.
pub fn query_rt_values(context: Ref<'_, ibv_context>, values: &mut ibv_values_ex) -> Result {
    let unknown = values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK;
    if unknown != 0 {
        let cause = cause!(EINVAL, "the unknown values 0x%x are asked for", unknown);
        return Err(context.refuse(cause));
    }
    if values.comp_mask != 0 {
        values.raw_clock = timespec { tv_sec: 0, tv_nsec: clock::device() as _ };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::QpType;

    /// Returns the `send_ops_flags` that ibv_create_qp_ex(3) takes for an RC QP.
    fn send_ops(features: u64) -> u64 {
        Opcodes::of_type(QpType::Rc).intersection(opcodes(features)).send_ops_flags()
    }

    #[test]
    fn send_ops_of_a_device() {
        let all = send_ops(0);
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
            assert_eq!(send_ops(rings | 1 << feature), base + more);
        }
        assert_eq!(send_ops(u64::MAX), all);
    }
}
