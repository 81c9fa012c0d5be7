// SPDX-License-Identifier: GPL-2.0

//! Abstractions for drivers of RDMA devices.
//!
//! A driver implements [`Driver`] for its device and one trait for each kind of
//! object. The objects live in the memory that the RDMA core allocates, behind
//! the C structure ([`object::Object`]): they are initialised in place when the core
//! creates them and dropped when it destroys them.
//!
//! There is a file for each kind of object, with its trait, its attributes and the
//! operations that the RDMA core calls. [`ops`] has the table of these operations,
//! and [`registration`] gives it to the core. A file imports only what is below it:
//! from the top, [`registration`], [`ops`], the objects, [`device`], [`table`],
//! [`wr`], [`wc`] and [`object`]. The traits name [`Driver`] and it names them, so it
//! is here, above all files.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

mod ah;
mod buffer;
mod c_enum;
mod cq;
mod device;
mod event;
mod mad;
mod mr;
mod mw;
mod object;
mod ops;
mod pd;
mod port;
mod qp;
mod registration;
mod restrack;
mod srq;
mod stats;
mod table;
mod ucontext;
mod udata;
mod wc;
mod wr;
mod xrcd;

pub(crate) use ah::{
    AddressHandle,
    AhAttr, //
};
pub(crate) use buffer::BufferOf;
pub(crate) use cq::{
    req_notify_cq,
    CompletionQueue,
    CqInitAttr, //
};
pub(crate) use device::{
    Device,
    Handles, //
};
pub(crate) use event::EventType;
pub(crate) use mad::PerfMad;
pub(crate) use mr::{
    alloc_mr,
    MemoryRegion,
    UserMemory, //
};
pub(crate) use mw::MemoryWindow;
pub(crate) use object::{
    Cq,
    Pd,
    Qp,
    Srq, //
};
pub(crate) use ops::operations_with_enums;
pub(crate) use pd::ProtectionDomain;
pub(crate) use port::GidAttr;
pub(crate) use qp::{
    modify_is_ok,
    QpInitAttr,
    QpState,
    QpType,
    QueuePair, //
};
pub(crate) use registration::{
    Config,
    Namespace,
    Registration,
    UnregisteredDevice, //
};
pub(crate) use restrack::Details;
pub(crate) use srq::{
    modify_srq,
    SharedReceiveQueue,
    SrqInitAttr,
    SrqType, //
};
pub(crate) use stats::StatDesc;
pub(crate) use ucontext::{
    UapiDefinitions,
    UserContext, //
};
pub(crate) use udata::Udata;
pub(crate) use wc::{
    Wc,
    WcOpcode,
    Wcs, //
};
pub(crate) use wr::{
    FastReg,
    InlineData,
    RecvWr,
    RecvWrs,
    SendWr,
    SendWrs,
    WrOpcode, //
};
pub(crate) use xrcd::XrcDomain;

use crate::bindings;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A driver of RDMA devices; the type itself is the driver's data of one device.
pub(crate) trait Driver: Sized + Send + Sync + 'static {
    /// The context of a program.
    type Ucontext: UserContext<Self>;
    /// A protection domain.
    type Pd: ProtectionDomain<Self>;
    /// A completion queue.
    type Cq: CompletionQueue<Self>;
    /// A queue pair.
    type Qp: QueuePair<Self>;
    /// A shared receive queue.
    type Srq: SharedReceiveQueue<Self>;
    /// An extended connection domain.
    type Xrcd: XrcDomain<Self>;
    /// An address handle.
    type Ah: AddressHandle<Self>;
    /// A memory region.
    type Mr: MemoryRegion<Self>;
    /// A memory window.
    type Mw: MemoryWindow<Self>;

    /// The pattern of the device's name, with one `%d`.
    const NAME: &'static CStr;
    /// The version of the ABI between this driver and its user-space provider.
    const UVERBS_ABI_VERSION: u32;
    /// The definitions that the driver adds to the attributes of uverbs.
    const UAPI: UapiDefinitions;
    /// The counters of a port.
    const STATS: &'static [StatDesc];

    /// Called when the device gave a new object a number that is out of range or taken. Any context.
    fn bad_number(self: &Arc<Self>);

    /// Called when a new object is in the [`Handles`]. From now on it is among all objects; what happened to all
    /// objects before did not reach it. Any context.
    fn published(self: &Arc<Self>);

    /// Fills in the attributes of the device.
    ///
    /// # Errors
    ///
    /// Any error of the driver; the device is then not allocated.
    fn query_device(self: &Arc<Self>, attr: &mut bindings::ib_device_attr) -> Result;

    /// Fills in the attributes of a port, zeroed before. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that does not exist, or what the device says.
    fn query_port(dev: &Device<Self>, port: u32, attr: &mut bindings::ib_port_attr) -> Result;

    /// Fills in the attributes of a port that never change. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Driver::query_port`].
    fn port_immutable(
        dev: &Device<Self>,
        port: u32,
        attr: &mut bindings::ib_port_immutable,
    ) -> Result;

    /// Returns an entry of the P_Key table. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an entry that does not exist, or what the device says.
    fn query_pkey(dev: &Device<Self>, port: u32, index: u16) -> Result<u16>;

    /// Tells the device a GID. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn add_gid(dev: &Device<Self>, gid: &GidAttr<'_>) -> Result;

    /// Takes a GID away from the device. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn del_gid(dev: &Device<Self>, gid: &GidAttr<'_>) -> Result;

    /// Answers a Get of performance management (IBA 16.1): `reply` is `request` made a GetResp, with its
    /// data zeroed. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for an attribute that there is not, or what the device says.
    fn perf_mad(dev: &Device<Self>, request: &PerfMad, reply: &mut PerfMad) -> Result;

    /// Returns the value of the counter with this index in [`Driver::STATS`].
    fn stat(&self, index: usize) -> u64;
}
