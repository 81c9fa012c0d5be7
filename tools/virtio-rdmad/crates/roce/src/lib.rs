// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The format of RoCE v2 packets (IBA annex A17): RDMA over UDP over IPv4 or IPv6 over Ethernet.
//!
//! [`decode`] checks a frame and returns its headers and its payload. [`encode`] makes a frame. The
//! crate knows what a packet says and nothing of QPs: whether a packet is expected is a question that
//! it does not answer. It does no I/O. A [`Train`] holds several packets in one frame, for the
//! segmentation offload of the kernel, and allocates that frame once; nothing else allocates.
//!
//! # What a receiver ignores
//! [`decode`] ignores what IBA and the RFCs tell a receiver to ignore: reserved bits, the bytes of the
//! pad, the UDP checksum (ICRC covers all that it covers), and bytes behind the end of the IP packet,
//! with which Ethernet fills short frames. [`encode`] writes zeros there, and nothing behind the
//! packet.
//!
//! # Sources
//! "IBA" is the InfiniBand Architecture Specification, volume 1: chapter 9 (transport), annexes A14
//! (XRC), A17 (RoCE v2) and A19 (FLUSH, ATOMIC WRITE). Where IBA leaves a choice, the crate does what
//! the kernel's rxe does (`drivers/infiniband/sw/rxe`), with one exception: [`Bth::new`] sets the bit
//! M, as hardware does.

#![forbid(unsafe_code)]

mod aeth;
mod atomic_eth;
mod bth;
mod deth;
mod ethernet;
mod extended;
mod feth;
mod gid;
mod icrc;
mod ieth;
mod imm;
mod ip;
mod malformed;
mod opcode;
mod packet;
mod psn;
mod qpn;
mod reth;
mod sack;
mod train;
mod udp;
mod wire;
mod xrceth;

pub use aeth::{Aeth, Credits, Msn, NakCode, ReservedSyndrome, RnrTimer, Syndrome};
pub use atomic_eth::{AtomicAckEth, AtomicEth};
pub use bth::{Bth, DEFAULT_PKEY};
pub use deth::Deth;
pub use ethernet::{multicast_mac, Ethernet, Mac, Vlan};
pub use extended::{ExtendedHeader, ExtendedHeaders};
pub use feth::Feth;
pub use gid::{gid_of, ip_of, Gid};
pub use icrc::{icrc, icrc_with_identification};
pub use ieth::Ieth;
pub use imm::ImmDt;
pub use ip::{Ecn, FlowLabel, Ip, Ipv4, Ipv6};
pub use malformed::Malformed;
pub use opcode::{Opcode, Operation, Position, Service};
pub use packet::{decode, destination, encode, encode_with, source, Headers, Packet, Unencodable};
pub use psn::Psn;
pub use qpn::Qpn;
pub use reth::Reth;
pub use sack::SackEth;
pub use train::{Segments, Split, Train};
pub use udp::{source_port, PORT};
pub use xrceth::Xrceth;
