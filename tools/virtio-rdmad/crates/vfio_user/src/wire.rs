// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The protocol's structures and numbers.
//!
//! All fields have the byte order of the host that both ends run on, which is little-endian on every
//! machine that this is built for.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most bytes of a message, header included.
pub const MAX_MESSAGE: usize = 16 * 1024;
/// Most file descriptors of a message. QEMU's client has the same limit.
pub const MAX_FDS: usize = 16;

/// Commands, client to server.
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const DEVICE_GET_INFO: u16 = 4;
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub const DEVICE_SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DEVICE_RESET: u16 = 13;
}

/// Bits of [`Header::flags`].
pub mod header_flags {
    pub const TYPE: u32 = 0xf;
    pub const COMMAND: u32 = 0;
    pub const REPLY: u32 = 1;
    pub const NO_REPLY: u32 = 1 << 4;
    pub const ERROR: u32 = 1 << 5;
}

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    pub id: U16,
    pub command: U16,
    pub size: U32,
    pub flags: U32,
    pub error: U32,
}

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Version {
    pub major: U16,
    pub minor: U16,
}

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaMap {
    pub argsz: U32,
    pub flags: U32,
    pub offset: U64,
    pub address: U64,
    pub size: U64,
}

/// Bits of [`DmaMap::flags`].
pub const DMA_MAP_WRITE: u32 = 1 << 1;

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaUnmap {
    pub argsz: U32,
    pub flags: U32,
    pub address: U64,
    pub size: U64,
}

/// Bit of [`DmaUnmap::flags`]: unmap everything (`VFIO_DMA_UNMAP_FLAG_ALL`).
pub const DMA_UNMAP_ALL: u32 = 1 << 1;

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceInfo {
    pub argsz: U32,
    pub flags: U32,
    pub num_regions: U32,
    pub num_irqs: U32,
}

/// Bits of [`DeviceInfo::flags`].
pub const DEVICE_FLAGS_RESET: u32 = 1 << 0;
pub const DEVICE_FLAGS_PCI: u32 = 1 << 1;

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionInfo {
    pub argsz: U32,
    pub flags: U32,
    pub index: U32,
    pub cap_offset: U32,
    pub size: U64,
    pub offset: U64,
}

/// Value of [`RegionInfo::flags`]: the region can be read and written, and not mapped.
pub const REGION_FLAGS_READ_WRITE: u32 = 0b11;

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqInfo {
    pub argsz: U32,
    pub flags: U32,
    pub index: U32,
    pub count: U32,
}

/// Bits of [`IrqInfo::flags`].
pub const IRQ_FLAGS_EVENTFD: u32 = 1 << 0;
pub const IRQ_FLAGS_MASKABLE: u32 = 1 << 1;

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqSet {
    pub argsz: U32,
    pub flags: U32,
    pub index: U32,
    pub start: U32,
    pub count: U32,
}

/// Values of [`IrqSet::flags`], which say where the data is and what to do with it. Other values have no
/// meaning for this device.
pub mod set_irqs {
    const DATA_NONE: u32 = 1 << 0;
    const DATA_BOOL: u32 = 1 << 1;
    const DATA_EVENTFD: u32 = 1 << 2;
    const ACTION_MASK: u32 = 1 << 3;
    const ACTION_UNMASK: u32 = 1 << 4;
    const ACTION_TRIGGER: u32 = 1 << 5;

    /// Signals by these eventfds from now on.
    pub const EVENTFD: u32 = DATA_EVENTFD | ACTION_TRIGGER;
    /// Signals all vectors now; without vectors, disables the interrupt.
    pub const NOW: u32 = DATA_NONE | ACTION_TRIGGER;
    /// Signals the vectors whose byte is not 0.
    pub const CHOSEN: u32 = DATA_BOOL | ACTION_TRIGGER;
    pub const MASK: u32 = DATA_NONE | ACTION_MASK;
    pub const UNMASK: u32 = DATA_NONE | ACTION_UNMASK;
}

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionAccess {
    pub offset: U64,
    pub region: U32,
    pub count: U32,
}

/// Region indices of a PCI device, `linux/vfio.h`.
pub mod region {
    pub const BAR0: u32 = 0;
    pub const BAR1: u32 = 1;
    pub const CONFIG: u32 = 7;
    pub const COUNT: u32 = 9;
}

/// Interrupt indices of a PCI device, `linux/vfio.h`.
pub mod irq {
    pub const INTX: u32 = 0;
    pub const MSIX: u32 = 2;
    pub const COUNT: u32 = 5;
}

/// Returns the size of a structure, for `argsz`.
pub const fn size_of_u32<T>() -> u32 {
    // The structures of this module are a few words long.
    #[allow(clippy::cast_possible_truncation)]
    let size = size_of::<T>() as u32;
    size
}
