// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a driver does at the transport before the device runs.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::ops::Range;
use std::time::{Duration, Instant};

use abi::*;
use virtio_transport::Deed;

use super::notes::Notes;
use crate::port::F_VERSION_1;

/// The feature bits of a device, of which the others are the transport's.
const OF_DEVICE: u64 = (1 << 24) - 1;
/// VIRTIO_F_EVENT_IDX.
const F_EVENT_IDX: u64 = 1 << 29;
/// The bits of the device status (VIRTIO 1.3, section 2.1).
const DRIVER: u8 = 2;
pub const DRIVER_OK: u8 = 4;
pub const FEATURES_OK: u8 = 8;
const FAILED: u8 = 0x80;
/// The fields of the configuration that are read first.
const FIRST: [Range<usize>; 2] = [
    offset_of!(virtio_rdma_config, magic)..offset_of!(virtio_rdma_config, sys_image_guid),
    offset_of!(virtio_rdma_config, revision)..offset_of!(virtio_rdma_config, max_mr_size),
];

/// What a driver has done at the transport.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Default)]
pub struct Setup {
    /// Whether the driver reads the configuration and enables queues itself.
    sees_all: bool,
    /// The feature bits that are offered.
    offered: u64,
    /// The bytes of the first fields that were read.
    read: BTreeSet<usize>,
    /// The device status, as the driver has written it, but FEATURES_OK where it has read that this does not stand.
    status: u8,
    /// Whether the driver must read 0 from the status before it goes on.
    awaits_zero: bool,
    /// Whether the configuration was read after FEATURES_OK.
    has_read: bool,
    /// The queues that were enabled.
    queues: BTreeSet<u16>,
    is_agreed: bool,
    has_queues: bool,
    /// When a driver first said that it knows the device.
    came: Option<Instant>,
    /// Whether a driver has said that it cannot work with the device.
    has_failed: bool,
    /// Whether the device has ever run.
    has_run: bool,
}

impl Setup {
    /// Returns what a driver has done that has done nothing. With vfio-user, it is seen what the driver reads.
    pub fn new(sees_all: bool, offered: u64) -> Self {
        Self { sees_all, offered, ..Self::default() }
    }

    /// Forgets what was done, because the device was reset.
    pub fn reset(&mut self) {
        (self.status, self.has_read) = (0, false);
        (self.is_agreed, self.has_queues) = (false, false);
        self.queues.clear();
    }

    /// Returns whether a driver has set DRIVER_OK.
    pub fn is_running(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// Notes that the device runs.
    pub fn note_start(&mut self) {
        self.has_run = true;
    }

    /// Returns whether a driver came and has not started the device, although it has had this time or has given up.
    pub fn is_in_vain(&self, patience: Duration) -> bool {
        let is_late = |came: Instant| came.elapsed() >= patience;
        !self.has_run && self.came.is_some_and(|came| self.has_failed || is_late(came))
    }

    /// Judges what the driver does.
    pub fn note(&mut self, notes: &mut Notes, deed: Deed) {
        match deed {
            Deed::ReadConfig { offset, len } if self.sees_all => {
                self.read_config(notes, offset..offset + len);
            }
            Deed::ReadStatus(status) => self.read_status(notes, status),
            Deed::ReadConfig { .. } => {}
            Deed::WriteStatus { status: 0, .. } => {
                notes.step("status 0");
                self.awaits_zero = self.sees_all;
                self.reset();
            }
            Deed::WriteStatus { status, features } => self.write_status(notes, status, features),
            Deed::EnableQueue(index) => self.enable_queue(notes, index),
            Deed::Reset => {
                self.awaits_zero = false;
                self.reset();
            }
        }
    }

    fn read_status(&mut self, notes: &mut Notes, status: u8) {
        if status == 0 && std::mem::take(&mut self.awaits_zero) {
            notes.pass("V-RST-01");
        }
        // The device has not let FEATURES_OK stand, and the driver knows.
        if status & FEATURES_OK == 0 {
            self.status &= !FEATURES_OK;
        }
    }

    fn read_config(&mut self, notes: &mut Notes, bytes: Range<usize>) {
        notes.step(format!("bytes {}..{} of the configuration", bytes.start, bytes.end));
        let is_first = |byte: &usize| FIRST.iter().any(|field| field.contains(byte));
        self.read.extend(bytes.clone().filter(is_first));
        let count = FIRST.iter().map(ExactSizeIterator::len).sum::<usize>();
        if !bytes.clone().all(|byte| is_first(&byte)) {
            notes.judge("V-CFG-01", self.read.len() == count, || {
                let got = format!("bytes {}..{}", bytes.start, bytes.end);
                ["first read of the configuration".into(), "magic and revision".into(), got]
            });
            self.read.extend(FIRST.into_iter().flatten());
        }
        self.has_read |= self.status & FEATURES_OK != 0;
    }

    fn write_status(&mut self, notes: &mut Notes, status: u8, features: u64) {
        notes.step(format!("status {status:#x}"));
        if std::mem::take(&mut self.awaits_zero) {
            let got = format!("no read of 0, and the status {status:#x}");
            notes.fail("V-RST-01", "end of a reset", "a read of the status that finds 0", &got);
        }
        let new = status & !self.status;
        if new & FEATURES_OK != 0 {
            self.agree(notes, features);
        }
        if new & DRIVER != 0 {
            self.came.get_or_insert_with(Instant::now);
        }
        self.has_failed |= new & FAILED != 0;
        if new & DRIVER_OK != 0 && self.status & FEATURES_OK == 0 {
            let got = format!("the status {:#x}", self.status);
            notes.fail("V-INIT-01", "DRIVER_OK", "FEATURES_OK before it", &got);
        }
        self.status = status;
    }

    fn enable_queue(&mut self, notes: &mut Notes, index: u16) {
        notes.step(format!("virtqueue {index}"));
        let is_first = self.queues.is_empty();
        self.queues.insert(index);
        if self.is_running() {
            let got = format!("virtqueue {index} after it");
            notes.fail("V-RING-02", "virtqueues before DRIVER_OK", "all of them", &got);
        }
        if is_first {
            let has_agreed = self.status & FEATURES_OK != 0;
            notes.judge("V-INIT-01", has_agreed && self.has_read, || {
                let got = if has_agreed {
                    "no read of the configuration since FEATURES_OK"
                } else {
                    "no FEATURES_OK"
                };
                let expected = "FEATURES_OK, then the configuration, then the virtqueues";
                ["first virtqueue".into(), expected.into(), got.into()]
            });
        }
    }

    /// Judges the feature bits that the driver accepts.
    pub fn agree(&mut self, notes: &mut Notes, features: u64) {
        if std::mem::replace(&mut self.is_agreed, true) {
            return;
        }
        notes.step(format!("features {features:#x}"));
        let got = || format!("{features:#x}");
        let what = || String::from("features");
        notes.judge("V-TERM-07", features & F_VERSION_1 != 0, || {
            [what(), "VIRTIO_F_VERSION_1, bit 32".into(), got()]
        });
        let closed = closed(features);
        notes.judge("V-FEAT-01", closed == features, || {
            let expected =
                format!("{closed:#x}, without the bits that require one that is not there");
            [what(), expected, got()]
        });
        let has = |bit: u32| features >> bit & 1 != 0;
        let paths = [VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_VIRTQUEUES].map(has);
        notes.judge("V-FEAT-04", paths.contains(&true), || {
            [what(), "VIRTIO_RDMA_F_RINGS or VIRTIO_RDMA_F_VIRTQUEUES".into(), got()]
        });
        notes.judge("V-FEAT-05", paths.contains(&false), || {
            [what(), "one of VIRTIO_RDMA_F_RINGS and VIRTIO_RDMA_F_VIRTQUEUES".into(), got()]
        });
        // A driver that is offered both may take the one or the other.
        if paths[0] || self.offered >> VIRTIO_RDMA_F_VIRTQUEUES & 1 == 0 {
            notes.judge("V-FEAT-06", paths[0], || {
                [what(), "VIRTIO_RDMA_F_RINGS, which alone is offered".into(), got()]
            });
        }
        // A driver does not accept what it is not offered, so that this would say nothing of it.
        let has_idx = features & F_EVENT_IDX != 0;
        if paths == [false, true] && (has_idx || self.offered & F_EVENT_IDX != 0) {
            notes.judge("V-VQ-01", !has_idx, || {
                [what(), "no VIRTIO_F_EVENT_IDX, bit 29".into(), got()]
            });
        }
    }

    /// Judges, at the end, whether the driver works with a device of the base alone: where its work requests complete
    /// was judged then.
    pub fn finish(&self, notes: &mut Notes, patience: Duration) {
        if self.has_base_alone() && self.is_in_vain(patience) {
            notes.step("the end");
            let expected = "a driver that works with VIRTIO_RDMA_F_RINGS alone";
            notes.fail(
                "V-FEAT-02",
                "what the driver does",
                expected,
                "it does not start the device",
            );
        }
    }

    /// Returns whether the device offers VIRTIO_RDMA_F_RINGS and no other bit of its own.
    pub fn has_base_alone(&self) -> bool {
        self.offered & OF_DEVICE == 1 << VIRTIO_RDMA_F_RINGS
    }

    /// Judges that all virtqueues were set up, when the device starts. The others are those that the device has.
    pub fn all_queues(
        &mut self,
        notes: &mut Notes,
        count: u16,
        started: impl Iterator<Item = u16>,
        has_rings: bool,
    ) {
        if std::mem::replace(&mut self.has_queues, true) {
            return;
        }
        let there: BTreeSet<u16> = started.chain(self.queues.iter().copied()).collect();
        let missing: Vec<u16> = (0..count).filter(|index| !there.contains(index)).collect();
        let clause = if has_rings { "V-RING-02" } else { "V-VQ-05" };
        notes.judge(clause, missing.is_empty(), || {
            let got = format!("none of {missing:?}");
            ["virtqueues before DRIVER_OK".into(), format!("all from 0 to {}", count - 1), got]
        });
    }
}
