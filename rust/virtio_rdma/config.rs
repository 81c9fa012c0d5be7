// SPDX-License-Identifier: GPL-2.0

//! The configuration space: read once, checked, and kept as the limits of the
//! device (specification, Configuration space).

#![deny(unsafe_code)]

use crate::{
    bindings,
    dma::PAGE_SIZE,
    ring,
    virtio, //
};
use core::mem::offset_of;
use kernel::{
    device,
    page,
    prelude::*, //
};

/// The device-specific feature bits that the driver understands (specification, Features).
pub(crate) const FEATURES: &[c_uint] = &[
    bindings::VIRTIO_RDMA_F_EVENTS,
    bindings::VIRTIO_RDMA_F_MAC,
    bindings::VIRTIO_RDMA_F_RINGS,
    bindings::VIRTIO_RDMA_F_SRQ,
    bindings::VIRTIO_RDMA_F_FAST_REG,
    bindings::VIRTIO_RDMA_F_MW,
    bindings::VIRTIO_RDMA_F_REREG_MR,
    bindings::VIRTIO_RDMA_F_FLUSH,
    bindings::VIRTIO_RDMA_F_ATOMIC_WRITE,
    bindings::VIRTIO_RDMA_F_MCAST,
    bindings::VIRTIO_RDMA_F_COUNTERS,
    bindings::VIRTIO_RDMA_F_XRC,
    bindings::VIRTIO_RDMA_F_PAGE_LEVELS,
    bindings::VIRTIO_RDMA_F_VLAN,
    bindings::VIRTIO_RDMA_F_CQ_MODERATION,
    bindings::VIRTIO_RDMA_F_PAGE_SIZES,
    bindings::VIRTIO_RDMA_F_RESET_TO_RTR,
    bindings::VIRTIO_RDMA_F_VIRTQUEUES,
    bindings::VIRTIO_RDMA_F_ATOMICS,
    bindings::VIRTIO_RDMA_F_UC,
    bindings::VIRTIO_RDMA_F_SRQ_RESIZE,
    bindings::VIRTIO_RDMA_F_CQ_RESIZE,
    bindings::VIRTIO_RDMA_F_ATOMICS_GLOBAL,
];

/// Feature bits, each with those that it requires. What they require in turn comes before them.
const REQUIREMENTS: &[(c_uint, u64)] = &[
    (
        bindings::VIRTIO_RDMA_F_EVENTS,
        bindings::VIRTIO_RDMA_REQUIRES_EVENTS as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_SRQ,
        bindings::VIRTIO_RDMA_REQUIRES_SRQ as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_MW,
        bindings::VIRTIO_RDMA_REQUIRES_MW as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_FLUSH,
        bindings::VIRTIO_RDMA_REQUIRES_FLUSH as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_ATOMIC_WRITE,
        bindings::VIRTIO_RDMA_REQUIRES_ATOMIC_WRITE as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_XRC,
        bindings::VIRTIO_RDMA_REQUIRES_XRC as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_CQ_MODERATION,
        bindings::VIRTIO_RDMA_REQUIRES_CQ_MODERATION as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_SRQ_RESIZE,
        bindings::VIRTIO_RDMA_REQUIRES_SRQ_RESIZE as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_CQ_RESIZE,
        bindings::VIRTIO_RDMA_REQUIRES_CQ_RESIZE as u64,
    ),
    (
        bindings::VIRTIO_RDMA_F_ATOMICS_GLOBAL,
        bindings::VIRTIO_RDMA_REQUIRES_ATOMICS_GLOBAL as u64,
    ),
];

/// The most SGEs of a work request that the driver lays out buffers for.
const MAX_SGE: u32 = 32;

/// The most queues that virtio can number.
const MAX_QUEUES: u64 = u16::MAX as u64 + 1;

/// The most QPs, CQs and SRQs with rings that the driver keeps track of.
const MAX_RING_OBJECTS: u32 = 1 << 20;

/// The most entries of a send or receive ring, and of a completion ring, that the driver uses: the
/// rings of an object are at most a few hundred MiB then.
const MAX_RING_WR: u32 = 1 << 16;
const MAX_RING_CQE: u32 = 1 << 22;

/// The most pages of a fast registration that the driver keeps a list for: that of a page.
const MAX_FAST_REG_PAGES: u32 = (PAGE_SIZE / size_of::<u64>()) as u32;

/// The largest MR, in bytes, whose page table the driver puts into one block of contiguous memory.
const MAX_FLAT_MR_SIZE: u64 = 2 << 30;

/// The largest MR, in bytes, whose pages a command can count.
const MAX_MR_SIZE: u64 = (u32::MAX as u64) << bindings::VIRTIO_RDMA_PAGE_SHIFT;

/// Returns the feature bits of [`FEATURES`] that device and driver have.
fn agreed(dev: &virtio::Device<device::Core<'_>>) -> u64 {
    FEATURES
        .iter()
        .filter(|bit| dev.has_feature(**bit))
        .fold(0, |bits, bit| bits | 1 << bit)
}

/// Returns feature bits without those that require one which is not there.
fn closed(mut bits: u64) -> u64 {
    for (bit, required) in REQUIREMENTS {
        if bits & required != *required {
            bits &= !(1 << bit);
        }
    }
    bits
}

/// Declines the feature bits that require one which the device does not offer, or which is declined.
pub(crate) fn decline_dependents(dev: &virtio::Device<device::Core<'_>>) {
    let bits = agreed(dev);
    let declined = bits & !closed(bits);
    FEATURES
        .iter()
        .filter(|bit| declined & 1 << **bit != 0)
        .for_each(|bit| dev.clear_feature(*bit));
}

/// The use of a virtqueue (specification, Rings and Virtqueues for work: Virtqueues).
#[derive(Clone, Copy)]
pub(crate) enum Role {
    /// Commands.
    Control,
    /// Completions of the CQ with this number.
    Completions(u32),
    /// Send work requests of a QP.
    Sends,
    /// Receive work requests of a QP.
    Receives,
    /// Completion events of this vector.
    CompletionEvents(u32),
    /// Doorbells.
    Doorbells,
    /// Asynchronous events.
    Events,
}

/// What atomic operations are atomic against.
#[derive(Clone, Copy)]
pub(crate) enum Atomics {
    /// There are no atomic operations.
    None,
    /// Those of other QPs of the device.
    Device,
    /// The processors of the guest as well.
    Global,
}

impl Atomics {
    fn of(dev: &virtio::Device<device::Core<'_>>) -> Self {
        if dev.has_feature(bindings::VIRTIO_RDMA_F_ATOMICS_GLOBAL) {
            Self::Global
        } else if dev.has_feature(bindings::VIRTIO_RDMA_F_ATOMICS) {
            Self::Device
        } else {
            Self::None
        }
    }
}

/// The limits of multicast groups and of the QPs that attach to them.
pub(crate) struct McastLimits {
    /// Number of groups.
    pub(crate) max_grp: u32,
    /// QPs of one group.
    pub(crate) max_qp_attach: u32,
    /// Attachments in all.
    pub(crate) max_total_qp_attach: u32,
}

/// The limits and attributes of a device, all of them checked.
pub(crate) struct Config {
    /// The device-specific feature bits that are agreed on.
    pub(crate) features: u64,
    /// GUID of the system image, in network order.
    pub(crate) sys_image_guid: [u8; 8],
    /// IEEE OUI of the vendor.
    pub(crate) vendor_id: u32,
    /// The vendor's part number.
    pub(crate) vendor_part_id: u32,
    /// Version of the device.
    pub(crate) hw_ver: u32,
    /// Version of the device's implementation, or 0.
    pub(crate) fw_ver: u64,
    /// Largest MR, in bytes.
    pub(crate) max_mr_size: u64,
    /// Whether the page tables of MRs may have levels.
    pub(crate) page_levels: bool,
    /// Page sizes, bit n for 2^n bytes.
    pub(crate) page_size_cap: u64,
    /// With `VIRTIO_RDMA_F_PAGE_SIZES`, the sizes of pages that page tables of MRs may list.
    pub(crate) mr_page_sizes: Option<u64>,
    /// Number of QPs.
    pub(crate) max_qp: u32,
    /// Work requests of one queue; with virtqueues, clamped to their sizes when these are known.
    pub(crate) max_qp_wr: u32,
    /// SGEs of a send work request.
    pub(crate) max_send_sge: u32,
    /// SGEs of a receive work request.
    pub(crate) max_recv_sge: u32,
    /// SGEs of an RDMA READ.
    pub(crate) max_sge_rd: u32,
    /// Number of CQs.
    pub(crate) max_cq: u32,
    /// Entries of a CQ; with virtqueues, clamped to their sizes when these are known.
    pub(crate) max_cqe: u32,
    /// Bytes of inline data of a send work request.
    pub(crate) max_inline_data: u32,
    /// Number of SRQs; 0 without VIRTIO_RDMA_F_SRQ.
    pub(crate) max_srq: u32,
    /// Work requests of an SRQ.
    pub(crate) max_srq_wr: u32,
    /// SGEs of a work request of an SRQ.
    pub(crate) max_srq_sge: u32,
    /// Whether SRQs can be resized.
    pub(crate) srq_resize: bool,
    /// Whether there are extended reliable connections.
    pub(crate) xrc: bool,
    /// Number of MRs.
    pub(crate) max_mr: u32,
    /// Pages of a fast registration, whatever their size; `None` if the device has no fast registration, or no pages
    /// of the kernel's size.
    pub(crate) fast_reg: Option<u32>,
    /// Whether MRs can be registered again (REREG_MR).
    pub(crate) rereg_mr: bool,
    /// Number of memory windows; 0 without VIRTIO_RDMA_F_MW.
    pub(crate) max_mw: u32,
    /// Whether there is FLUSH.
    pub(crate) flush: bool,
    /// Whether there is ATOMIC_WRITE.
    pub(crate) atomic_write: bool,
    /// Number of PDs.
    pub(crate) max_pd: u32,
    /// READs and atomics that a QP serves.
    pub(crate) max_qp_rd_atom: u32,
    /// READs and atomics that the device serves.
    pub(crate) max_res_rd_atom: u32,
    /// READs and atomics that a QP has under way.
    pub(crate) max_qp_init_rd_atom: u32,
    /// What atomic operations are atomic against.
    pub(crate) atomics: Atomics,
    /// Whether there are unreliable connections.
    pub(crate) uc: bool,
    /// The multicast groups that UD QPs attach to; `None` if the device has none.
    pub(crate) mcast: Option<McastLimits>,
    /// Entries of the P_Key table.
    pub(crate) max_pkeys: u16,
    /// Local CA ACK Delay.
    pub(crate) local_ca_ack_delay: u8,
    /// MAC address of the paired network interface.
    pub(crate) mac: Option<[u8; 6]>,
    /// Whether there is an event queue.
    pub(crate) has_events: bool,
    /// Whether the device counts what its port sends and receives.
    pub(crate) has_counters: bool,
    /// Whether the device knows VLANs.
    pub(crate) vlan: bool,
    /// Whether CQs can be resized.
    pub(crate) cq_resize: bool,
    /// Whether completion events can be held back.
    pub(crate) cq_moderation: bool,
    /// Whether a QP goes from RESET to RTR by one command.
    pub(crate) reset_to_rtr: bool,
    /// The number of completion event queues if work and completion queues are rings in memory;
    /// `None` if they are virtqueues.
    pub(crate) rings: Option<u32>,
    /// Whether the device needs the platform's barriers for devices (VIRTIO_F_ORDER_PLATFORM).
    pub(crate) behind_bus: bool,
}

/// Reads a field of the configuration in one access of its width.
macro_rules! field {
    ($dev:expr, $name:ident: $type:ty) => {
        <$type>::from_le_bytes($dev.config(offset_of!(bindings::virtio_rdma_config, $name)))
    };
}

impl Config {
    /// Reads and checks the configuration of a device whose features are agreed on, after [`decline_dependents`]. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a device of another specification, or a configuration that cannot work; the log says why.
    pub(crate) fn read(dev: &virtio::Device<device::Core<'_>>) -> Result<Self> {
        Self::check_identity(dev)?;
        Self::check_port(dev)?;
        let rings = dev.has_feature(bindings::VIRTIO_RDMA_F_RINGS);
        let srqs = dev.has_feature(bindings::VIRTIO_RDMA_F_SRQ);
        let mws = dev.has_feature(bindings::VIRTIO_RDMA_F_MW);
        let page_levels = dev.has_feature(bindings::VIRTIO_RDMA_F_PAGE_LEVELS);
        let page_size_cap = field!(dev, page_size_cap: u64);
        // Reads the limit for the data path that driver and device have agreed on.
        macro_rules! by_path {
            ($virtqueues:ident: $rings:ident) => {
                if rings {
                    field!(dev, $rings: u32)
                } else {
                    field!(dev, $virtqueues: u32)
                }
            };
        }
        let mut config = Self {
            features: agreed(dev),
            sys_image_guid: dev.config(offset_of!(bindings::virtio_rdma_config, sys_image_guid)),
            vendor_id: field!(dev, vendor_id: u32),
            vendor_part_id: field!(dev, vendor_part_id: u32),
            hw_ver: field!(dev, hw_ver: u32),
            fw_ver: field!(dev, fw_ver: u64),
            max_mr_size: field!(dev, max_mr_size: u64).min(if page_levels {
                MAX_MR_SIZE
            } else {
                MAX_FLAT_MR_SIZE
            }),
            page_levels,
            page_size_cap,
            mr_page_sizes: dev
                .has_feature(bindings::VIRTIO_RDMA_F_PAGE_SIZES)
                .then_some(page_size_cap & !(PAGE_SIZE as u64 - 1)),
            max_qp: by_path!(max_qp: ring_max_qp),
            max_qp_wr: by_path!(max_qp_wr: ring_max_qp_wr),
            max_send_sge: field!(dev, max_send_sge: u32).min(MAX_SGE),
            max_recv_sge: field!(dev, max_recv_sge: u32).min(MAX_SGE),
            max_sge_rd: field!(dev, max_sge_rd: u32),
            max_cq: by_path!(max_cq: ring_max_cq),
            max_cqe: by_path!(max_cqe: ring_max_cqe),
            max_inline_data: if rings {
                field!(dev, ring_max_inline_data: u32)
            } else {
                0
            },
            max_srq: if srqs { field!(dev, max_srq: u32) } else { 0 },
            max_srq_wr: field!(dev, max_srq_wr: u32),
            max_srq_sge: field!(dev, max_srq_sge: u32).min(MAX_SGE),
            srq_resize: dev.has_feature(bindings::VIRTIO_RDMA_F_SRQ_RESIZE),
            xrc: dev.has_feature(bindings::VIRTIO_RDMA_F_XRC),
            max_mr: field!(dev, max_mr: u32),
            fast_reg: dev
                .has_feature(bindings::VIRTIO_RDMA_F_FAST_REG)
                .then(|| field!(dev, max_fast_reg_page_list_len: u32))
                .filter(|pages| *pages != 0)
                // Most consumers map pages of the kernel, which may be larger than 4 KiB.
                .filter(|_| page_size_cap & page::PAGE_SIZE as u64 != 0)
                .map(|pages| pages.min(MAX_FAST_REG_PAGES)),
            rereg_mr: dev.has_feature(bindings::VIRTIO_RDMA_F_REREG_MR),
            max_mw: if mws { field!(dev, max_mw: u32) } else { 0 },
            flush: dev.has_feature(bindings::VIRTIO_RDMA_F_FLUSH),
            atomic_write: dev.has_feature(bindings::VIRTIO_RDMA_F_ATOMIC_WRITE),
            max_pd: field!(dev, max_pd: u32),
            max_qp_rd_atom: field!(dev, max_qp_rd_atom: u32),
            max_res_rd_atom: field!(dev, max_res_rd_atom: u32),
            max_qp_init_rd_atom: field!(dev, max_qp_init_rd_atom: u32),
            atomics: Atomics::of(dev),
            uc: dev.has_feature(bindings::VIRTIO_RDMA_F_UC),
            mcast: dev
                .has_feature(bindings::VIRTIO_RDMA_F_MCAST)
                .then(|| McastLimits {
                    max_grp: field!(dev, max_mcast_grp: u32),
                    max_qp_attach: field!(dev, max_mcast_qp_attach: u32),
                    max_total_qp_attach: field!(dev, max_total_mcast_qp_attach: u32),
                }),
            max_pkeys: field!(dev, max_pkeys: u16),
            local_ca_ack_delay: field!(dev, local_ca_ack_delay: u8),
            mac: dev
                .has_feature(bindings::VIRTIO_RDMA_F_MAC)
                .then(|| Self::read_mac(dev)),
            has_events: rings || dev.has_feature(bindings::VIRTIO_RDMA_F_EVENTS),
            has_counters: dev.has_feature(bindings::VIRTIO_RDMA_F_COUNTERS),
            vlan: dev.has_feature(bindings::VIRTIO_RDMA_F_VLAN),
            cq_resize: dev.has_feature(bindings::VIRTIO_RDMA_F_CQ_RESIZE),
            cq_moderation: dev.has_feature(bindings::VIRTIO_RDMA_F_CQ_MODERATION),
            reset_to_rtr: dev.has_feature(bindings::VIRTIO_RDMA_F_RESET_TO_RTR),
            rings: rings.then(|| field!(dev, num_comp_vectors: u32)),
            behind_bus: dev.has_feature(bindings::VIRTIO_F_ORDER_PLATFORM),
        };
        config.check(dev)?;
        if rings {
            config.check_rings(dev)?;
            config.clamp_rings();
        }
        Ok(config)
    }

    fn read_mac(dev: &virtio::Device<device::Core<'_>>) -> [u8; 6] {
        let offset = offset_of!(bindings::virtio_rdma_config, mac);
        let mut mac = [0; 6];
        for (i, byte) in mac.iter_mut().enumerate() {
            [*byte] = dev.config(offset + i);
        }
        mac
    }

    /// Checks whether the device is one of this driver's specification. Others have the device ID, too.
    fn check_identity(dev: &virtio::Device<device::Core<'_>>) -> Result {
        let magic = field!(dev, magic: u32);
        if magic != bindings::VIRTIO_RDMA_MAGIC {
            dev_err!(
                dev.as_ref(),
                "the device belongs to another specification: its configuration has the magic {:#010x}, not {:#010x}\n",
                magic,
                bindings::VIRTIO_RDMA_MAGIC
            );
            return Err(EINVAL);
        }
        let revision = field!(dev, revision: u32);
        if revision != bindings::VIRTIO_RDMA_REVISION {
            dev_err!(
                dev.as_ref(),
                "the device's configuration has revision {}, and this driver knows {}\n",
                revision,
                bindings::VIRTIO_RDMA_REVISION
            );
            return Err(EINVAL);
        }
        Ok(())
    }

    fn check_port(dev: &virtio::Device<device::Core<'_>>) -> Result {
        let ports = field!(dev, phys_port_cnt: u32);
        if ports != 1 {
            dev_err!(dev.as_ref(), "the device has {} ports, not 1\n", ports);
            return Err(EINVAL);
        }
        Ok(())
    }

    fn check(&self, dev: &virtio::Device<device::Core<'_>>) -> Result {
        for (name, value) in [
            ("max_qp", self.max_qp),
            ("max_cq", self.max_cq),
            ("max_pd", self.max_pd),
            ("max_mr", self.max_mr),
            ("max_qp_wr", self.max_qp_wr),
            ("max_cqe", self.max_cqe),
            ("max_send_sge", self.max_send_sge),
            ("max_recv_sge", self.max_recv_sge),
        ] {
            if value == 0 {
                dev_err!(dev.as_ref(), "the device's configuration has {} 0\n", name);
                return Err(EINVAL);
            }
        }
        if self.page_size_cap & PAGE_SIZE as u64 == 0 {
            dev_err!(dev.as_ref(), "the device has no pages of 4 KiB\n");
            return Err(EINVAL);
        }
        if self.queues() > MAX_QUEUES {
            dev_err!(
                dev.as_ref(),
                "the device's configuration asks for {} virtqueues, more than there can be\n",
                self.queues()
            );
            return Err(EINVAL);
        }
        Ok(())
    }

    /// Checks what only rings have.
    fn check_rings(&self, dev: &virtio::Device<device::Core<'_>>) -> Result {
        for (name, value) in [
            ("ring_max_qp_wr", self.max_qp_wr),
            ("ring_max_cqe", self.max_cqe),
            (
                "max_srq_wr",
                if self.max_srq == 0 {
                    1
                } else {
                    self.max_srq_wr
                },
            ),
        ] {
            if !value.is_power_of_two() {
                dev_err!(
                    dev.as_ref(),
                    "the device's configuration has {} {}, no power of two\n",
                    name,
                    value
                );
                return Err(EINVAL);
            }
        }
        if self.rings == Some(0) {
            dev_err!(dev.as_ref(), "the device has no completion vector\n");
            return Err(EINVAL);
        }
        Ok(())
    }

    fn clamp_rings(&mut self) {
        self.max_qp = self.max_qp.min(MAX_RING_OBJECTS);
        self.max_cq = self.max_cq.min(MAX_RING_OBJECTS);
        self.max_qp_wr = self.max_qp_wr.min(MAX_RING_WR);
        self.max_cqe = self.max_cqe.min(MAX_RING_CQE);
        self.max_srq = self.max_srq.min(MAX_RING_OBJECTS);
        self.max_srq_wr = self.max_srq_wr.min(MAX_RING_WR);
        self.max_inline_data = self.max_inline_data.min(ring::MAX_INLINE_DATA);
    }

    /// Returns the number of virtqueues (specification, Rings and Virtqueues for work: Virtqueues).
    pub(crate) fn queues(&self) -> u64 {
        match self.rings {
            Some(vectors) => 3 + u64::from(vectors),
            None => {
                1 + u64::from(self.max_cq) + 2 * u64::from(self.max_qp) + u64::from(self.has_events)
            }
        }
    }

    /// Returns what the virtqueue with this index is for.
    pub(crate) fn role(&self, index: u32) -> Role {
        match (index, self.rings) {
            (0, _) => Role::Control,
            (_, Some(vectors)) if index <= vectors => Role::CompletionEvents(index - 1),
            (_, Some(vectors)) if index == 1 + vectors => Role::Doorbells,
            (_, Some(_)) => Role::Events,
            (_, None) if index <= self.max_cq => Role::Completions(index - 1),
            (_, None) if index > self.max_cq + 2 * self.max_qp => Role::Events,
            (_, None) if (index - self.max_cq) % 2 == 1 => Role::Sends,
            (_, None) => Role::Receives,
        }
    }

    /// Returns the virtqueue of CQ `cqn`; `None` if there is no such CQ.
    pub(crate) fn cq_queue(&self, cqn: u32) -> Option<u32> {
        (cqn < self.max_cq).then(|| 1 + cqn)
    }

    /// Returns the virtqueue of the send queue of QP `qpn`; the next one is that of its receive queue. `None` if there
    /// is no such QP.
    pub(crate) fn sq_queue(&self, qpn: u32) -> Option<u32> {
        (1..=self.max_qp)
            .contains(&qpn)
            .then(|| 1 + self.max_cq + 2 * (qpn - 1))
    }
}

#[cfg(virtio_rdma_kunit)]
#[kernel::macros::kunit_tests(virtio_rdma_config)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn bits_go_with_what_they_require() {
        use bindings::*;

        let all = FEATURES.iter().fold(0, |bits, bit| bits | 1 << bit);
        assert_eq!(closed(all), all);
        assert_eq!(closed(0), 0);
        let alone = 1 << VIRTIO_RDMA_F_FAST_REG;
        assert_eq!(closed(alone), alone);
        let srqs = 1 << VIRTIO_RDMA_F_SRQ | 1 << VIRTIO_RDMA_F_XRC;
        // XRC requires SRQ, and SRQ requires RINGS.
        assert_eq!(closed(srqs), 0);
        let without = all & !srqs & !(1 << VIRTIO_RDMA_F_SRQ_RESIZE);
        assert_eq!(closed(all & !(1 << VIRTIO_RDMA_F_SRQ)), without);
        let dependents = REQUIREMENTS
            .iter()
            .fold(0, |bits, (bit, _)| bits | 1 << bit);
        // All but these require RINGS, or what requires it.
        let others = 1 << VIRTIO_RDMA_F_ATOMICS_GLOBAL | 1 << VIRTIO_RDMA_F_EVENTS;
        let dependents = dependents & !others;
        let rings = 1 << VIRTIO_RDMA_F_RINGS;
        assert_eq!(closed(all & !rings), all & !rings & !dependents);
    }
}
