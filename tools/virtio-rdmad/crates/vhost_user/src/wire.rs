// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The protocol's structures and numbers. All integers have the host's byte order.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most bytes of a payload. No payload of the protocol is as long.
pub const MAX_PAYLOAD: usize = 4096;
/// Most file descriptors of a message: one for each region of a memory table.
pub const MAX_FDS: usize = TABLE_REGIONS;
/// Most regions of SET_MEM_TABLE.
pub const TABLE_REGIONS: usize = 8;
/// Most regions that can be added one by one.
pub const MEM_SLOTS: u64 = 509;

/// The header of every message.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Header {
    pub request: u32,
    pub flags: u32,
    pub size: u32,
}

/// Bits of [`Header::flags`].
pub mod flags {
    /// The version of the protocol, in the two lowest bits.
    pub const VERSION: u32 = 1;
    pub const VERSION_MASK: u32 = 3;
    /// The message is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// The sender wants an answer to a request that has none of its own.
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Numbers of the requests that are served.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// `VHOST_USER_F_PROTOCOL_FEATURES`, one of the feature bits: there are protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`.
pub const F_VERSION_1: u64 = 1 << 32;

/// The protocol feature by which every request can have an answer.
pub const PROTOCOL_F_REPLY_ACK: u64 = 1 << 3;
/// The protocol features that are served: several queues, REPLY_ACK, a connection for requests of
/// the back end (kept open for the front end to see its end), configuration space, RESET_DEVICE,
/// memory regions one by one.
///
/// The device status is not: QEMU writes 0 there at each stop of a VM, which would reset the device. Its requests are
/// served for front ends to which an earlier version has offered it.
pub const PROTOCOL_FEATURES: u64 = 1 | PROTOCOL_F_REPLY_ACK | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15;

/// `u64` payload of SET_VRING_KICK and its like: the queue's index.
pub const VRING_INDEX: u64 = 0xff;
/// `u64` payload of SET_VRING_KICK and its like: no file descriptor comes with it.
pub const VRING_NO_FD: u64 = 1 << 8;

/// Payload of SET_VRING_NUM, _BASE, _ENABLE and of GET_VRING_BASE.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct VringState {
    pub index: u32,
    pub num: u32,
}

/// Payload of SET_VRING_ADDR. The addresses are the front end's own.
#[derive(
    Clone, Copy, Debug, Deserialize, FromBytes, Immutable, IntoBytes, KnownLayout, Serialize,
)]
#[repr(C)]
pub struct VringAddr {
    pub index: u32,
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    pub log: u64,
}

/// One region of guest memory.
#[derive(
    Clone, Copy, Debug, Deserialize, FromBytes, Immutable, IntoBytes, KnownLayout, Serialize,
)]
#[repr(C)]
pub struct MemRegion {
    pub guest_addr: u64,
    pub size: u64,
    /// The address where the front end has it, as in [`VringAddr`].
    pub user_addr: u64,
    pub mmap_offset: u64,
}

/// Head of the payload of SET_MEM_TABLE.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct MemTable {
    pub count: u32,
    pub padding: u32,
}

/// Payload of ADD_MEM_REG and REM_MEM_REG.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    pub padding: u64,
    pub region: MemRegion,
}

/// Head of the payload of GET_CONFIG and SET_CONFIG.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct ConfigHead {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}
