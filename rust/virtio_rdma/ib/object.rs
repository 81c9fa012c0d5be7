// SPDX-License-Identifier: GPL-2.0

//! The objects of a device: the C structures with what the driver adds to them.

use super::{
    Details,
    Device,
    Driver,
    RecvWrs,
    SendWrs,
    Wcs, //
};
use crate::{
    bindings,
    doorbell,
    kernel_release, //
};
use core::{
    marker::PhantomData,
    ops::Deref,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    },
    types::Opaque, //
};

/// A C structure of the RDMA core, and the driver's data behind it.
///
/// # Invariants
///
/// A reference to an [`Object`] exists only between the initialisation of `handle` and `data` and
/// the drop of `data`.
#[repr(C)]
pub(crate) struct Object<C, T> {
    raw: Opaque<C>,
    handle: u32,
    data: T,
}

// SAFETY: The C part is only read, or handed to the RDMA core, which locks.
unsafe impl<C, T: Send> Send for Object<C, T> {}
// SAFETY: As above.
unsafe impl<C, T: Sync> Sync for Object<C, T> {}

impl<C, T> Object<C, T> {
    /// Bytes that the RDMA core must allocate for the object.
    pub(super) const SIZE: usize = {
        // kmalloc() aligns every size to that of a u64 at least.
        assert!(core::mem::align_of::<Self>() <= core::mem::align_of::<u64>());
        core::mem::size_of::<Self>()
    };

    /// The C structure.
    pub(crate) fn as_raw(&self) -> *mut C {
        self.raw.get()
    }

    /// The number by which the driver finds the object, if it is one that is found so. It is the one
    /// that the driver's data said first.
    pub(super) fn handle(&self) -> u32 {
        self.handle
    }

    /// The object in which `raw` is embedded.
    ///
    /// # Safety
    ///
    /// `raw` must be the structure of an object of this type, valid and initialised for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut C) -> &'a Self {
        // SAFETY: `raw` is at offset 0, and the rest follows from the safety requirements.
        unsafe { &*raw.cast::<Self>() }
    }

    /// Initialises the driver's data in place; `handle` says by which number the object is found.
    ///
    /// # Safety
    ///
    /// `raw` must be the first member of [`Object::SIZE`] bytes that stay where they are, the
    /// driver's data of which is not initialised.
    ///
    /// # Errors
    ///
    /// Those of `init`.
    pub(super) unsafe fn init<'a>(
        raw: *mut C,
        init: impl PinInit<T, Error>,
        handle: impl FnOnce(&T) -> u32,
    ) -> Result<&'a Self> {
        let this = raw.cast::<Self>();
        // SAFETY: By the safety requirements, `handle` and `data` are valid for writes, and `data`
        // is pinned; it is initialised when `handle` gets it.
        unsafe {
            kernel_release::init_in_place(&raw mut (*this).data, init)?;
            (&raw mut (*this).handle).write(handle(&(*this).data));
        }
        // SAFETY: `handle` and `data` have just been initialised.
        Ok(unsafe { &*this })
    }

    /// Initialises the driver's data of an object that is not found by number with a value.
    ///
    /// # Safety
    ///
    /// As for [`Object::init`].
    pub(super) unsafe fn write(raw: *mut C, data: T) {
        let this = raw.cast::<Self>();
        // SAFETY: By the safety requirements, `handle` and `data` are valid for writes.
        unsafe {
            (&raw mut (*this).handle).write(0);
            (&raw mut (*this).data).write(data);
        }
    }

    /// Makes an object that is not found by number, with the C structure zeroed.
    pub(super) fn new(data: T) -> Self
    where
        C: Default,
    {
        Self {
            raw: Opaque::new(C::default()),
            handle: 0,
            data,
        }
    }

    /// Drops the driver's data.
    ///
    /// # Safety
    ///
    /// `raw` must be the structure of an initialised object, to which there is no reference.
    pub(super) unsafe fn drop_data(raw: *mut C) {
        // SAFETY: By the safety requirements.
        unsafe { core::ptr::drop_in_place(&raw mut (*raw.cast::<Self>()).data) };
    }
}

impl<C, T> Deref for Object<C, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

/// A `struct ib_ucontext`.
pub(crate) type Ucontext<D> = Object<bindings::ib_ucontext, <D as Driver>::Ucontext>;
/// A `struct ib_pd`.
pub(crate) type Pd<D> = Object<bindings::ib_pd, <D as Driver>::Pd>;
/// A `struct ib_cq`.
pub(crate) type Cq<D> = Object<bindings::ib_cq, <D as Driver>::Cq>;
/// A `struct ib_qp`.
pub(crate) type Qp<D> = Object<bindings::ib_qp, <D as Driver>::Qp>;
/// A `struct ib_srq`.
pub(crate) type Srq<D> = Object<bindings::ib_srq, <D as Driver>::Srq>;
/// A `struct ib_xrcd`.
pub(crate) type Xrcd<D> = Object<bindings::ib_xrcd, <D as Driver>::Xrcd>;
/// A `struct ib_ah`.
pub(crate) type Ah<D> = Object<bindings::ib_ah, <D as Driver>::Ah>;
/// A `struct ib_mr`.
pub(crate) type Mr<D> = Object<bindings::ib_mr, <D as Driver>::Mr>;
/// A `struct ib_mw`.
pub(crate) type Mw<D> = Object<bindings::ib_mw, <D as Driver>::Mw>;

/// The context of a program that has opened the device.
pub(crate) trait UserContext<D: Driver>: Sized + Send + Sync {
    /// What a provider is told of a context.
    type Description: AsBytes;

    /// Creates the context; `udata` takes the answer to the provider.
    ///
    /// # Errors
    ///
    /// `EFAULT`, or any of the driver's.
    fn alloc(dev: &Device<D>, udata: &Udata<'_>) -> Result<Self>;

    /// What the provider of a program that imports a context is told, as that of the program that
    /// created it was.
    fn describe(dev: &Device<D>) -> Self::Description;
}

/// A protection domain.
pub(crate) trait ProtectionDomain<D: Driver>: Sized + Send + Sync {
    /// Creates the PD. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn alloc(dev: &Device<D>) -> Result<Self>;

    /// Destroys the PD in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self) -> Result;
}

/// An extended connection domain.
pub(crate) trait XrcDomain<D: Driver>: Sized + Send + Sync {
    /// Creates the domain. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has none, or what it says.
    fn alloc(dev: &Device<D>) -> Result<Self>;

    /// Destroys the domain in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self) -> Result;
}

/// What a CQ is created with.
pub(crate) struct CqInitAttr<'a> {
    /// Number of entries.
    pub(crate) cqe: u32,
    /// The completion vector.
    pub(crate) comp_vector: u32,
    /// Flags of `enum ib_uverbs_ex_create_cq_flags`.
    pub(crate) flags: u32,
    /// The way back to the program, if it is for one.
    pub(crate) udata: Option<Udata<'a>>,
}

/// A completion queue.
pub(crate) trait CompletionQueue<D: Driver>: Sized + Send + Sync {
    /// Creates the CQ. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for attributes beyond the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &CqInitAttr<'_>) -> Result<impl PinInit<Self, Error>>;

    /// Destroys the CQ in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// The device's number of the CQ.
    fn number(&self) -> u32;

    /// The number of entries that the CQ has room for.
    fn cqe(&self) -> u32;

    /// Holds completion events back until there are `count` completions, or `period` microseconds
    /// have passed since the first of them; not at all if either is 0. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot, or what it says.
    fn moderate(&self, count: u16, period: u16) -> Result;

    /// Gives a program's CQ room for `cqe` entries. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the CQ cannot be resized, `EINVAL` for sizes, or what the device says.
    fn resize(&self, dev: &Device<D>, cqe: u32, udata: &Udata<'_>) -> Result;

    /// Moves completions to `wcs` until it is full or there are none. Any context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if a program polls the CQ itself.
    fn poll(&self, wcs: &mut Wcs<'_>) -> Result;

    /// Asks for one call of the completion handler, at the next completion or at the next solicited
    /// one. Any context. True if completions are there already and `report_missed` asked to be told.
    fn req_notify(&self, solicited: bool, report_missed: bool) -> bool;

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

/// What a QP is created with.
pub(crate) struct QpInitAttr<'a, D: Driver> {
    /// `enum ib_qp_type`.
    pub(crate) qp_type: u32,
    /// Whether every send work request completes with a CQE.
    pub(crate) signal_all: bool,
    /// The PD; that, the CQs and the domain as far as the type has them.
    pub(crate) pd: Option<&'a Pd<D>>,
    /// The CQ of sends.
    pub(crate) send_cq: Option<&'a Cq<D>>,
    /// The CQ of receives.
    pub(crate) recv_cq: Option<&'a Cq<D>>,
    /// The extended connection domain.
    pub(crate) xrcd: Option<&'a Xrcd<D>>,
    /// Sizes of the work queues.
    pub(crate) cap: bindings::ib_qp_cap,
    /// Flags of `enum ib_qp_create_flags`.
    pub(crate) create_flags: u32,
    /// The shared receive queue that the QP shall receive from.
    pub(crate) srq: Option<&'a Srq<D>>,
    /// The way back to the program, if it is for one.
    pub(crate) udata: Option<Udata<'a>>,
}

impl<D: Driver> QpInitAttr<'_, D> {
    /// The number of the shared receive queue, if there is one.
    pub(crate) fn srq_number(&self) -> Option<u32> {
        self.srq.map(|srq| srq.number())
    }
}

/// A queue pair.
pub(crate) trait QueuePair<D: Driver>: Sized + Send + Sync {
    /// Creates the QP. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for a type or a flag that the driver does not know, `EINVAL` for sizes beyond
    /// the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &QpInitAttr<'_, D>) -> Result<impl PinInit<Self, Error>>;

    /// Changes attributes of the QP. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a transition that IBA does not have, or what the device says.
    fn modify(&self, attr: &bindings::ib_qp_attr, mask: u32) -> Result;

    /// Reads the attributes of the QP, into a structure zeroed before. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn query(&self, attr: &mut bindings::ib_qp_attr) -> Result;

    /// Destroys the QP in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// The device's number of the QP.
    fn number(&self) -> u32;

    /// The sizes that the QP has.
    fn cap(&self) -> bindings::ib_qp_cap;

    /// Whether every send work request completes with a CQE.
    fn signals_all(&self) -> bool;

    /// Posts send work requests. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a work request that is malformed or not allowed in the state of the QP,
    /// `ENOMEM` if the queue is full. Those before the one that `wrs` stopped at are posted.
    fn post_send(&self, wrs: &mut SendWrs<'_, D>) -> Result;

    /// Posts receive work requests. Any context.
    ///
    /// # Errors
    ///
    /// As [`QueuePair::post_send`].
    fn post_recv(&self, wrs: &mut RecvWrs<'_>) -> Result;

    /// Tells the device that a program has posted to a ring of its own: POST_SEND or POST_RECV
    /// without work requests. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the device has failed.
    fn doorbell(&self, ring: doorbell::Ring) -> Result;

    /// Attaches the QP to a multicast group, if it is not yet. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no multicast, `ENOMEM` beyond its limits, or what else the device
    /// says.
    fn attach_mcast(&self, gid: [u8; 16]) -> Result;

    /// Detaches the QP from a multicast group. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not attached to it.
    fn detach_mcast(&self, gid: [u8; 16]) -> Result;

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

/// What an SRQ is created with.
pub(crate) struct SrqInitAttr<'a, D: Driver> {
    /// `enum ib_srq_type`.
    pub(crate) srq_type: u32,
    /// The PD.
    pub(crate) pd: &'a Pd<D>,
    /// Number of work requests.
    pub(crate) max_wr: u32,
    /// SGEs of each.
    pub(crate) max_sge: u32,
    /// Of an SRQ for XRC, the domain, and the CQ that it completes to.
    pub(crate) xrc: Option<(&'a Xrcd<D>, &'a Cq<D>)>,
    /// The way back to the program, if it is for one.
    pub(crate) udata: Option<Udata<'a>>,
}

/// A shared receive queue.
pub(crate) trait SharedReceiveQueue<D: Driver>: Sized + Send + Sync {
    /// Creates the SRQ. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for a type that the driver does not know, or if the device has no SRQs; `EINVAL`
    /// for sizes beyond the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &SrqInitAttr<'_, D>) -> Result<impl PinInit<Self, Error>>;

    /// Asks for one event when fewer than `limit` work requests wait, or for none if it is 0. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for more than the SRQ holds, or what the device says.
    fn arm(&self, limit: u32) -> Result;

    /// Gives a program's SRQ another ring, for at least `max_wr` work requests. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the SRQ cannot be resized, `EINVAL` for sizes, or what the device says; the SRQ
    /// is then as before.
    fn resize(&self, dev: &Device<D>, max_wr: u32, udata: &Udata<'_>) -> Result;

    /// Reads the attributes of the SRQ. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn query(&self, attr: &mut bindings::ib_srq_attr) -> Result;

    /// Destroys the SRQ in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// The device's number of the SRQ.
    fn number(&self) -> u32;

    /// The number of work requests that the SRQ has room for, and SGEs of each. May sleep.
    fn sizes(&self) -> (u32, u32);

    /// Posts receive work requests. Any context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if a program posts itself, `EINVAL` for a work request that is malformed,
    /// `ENOMEM` if the queue is full. Those before the one that `wrs` stopped at are posted.
    fn post_recv(&self, wrs: &mut RecvWrs<'_>) -> Result;

    /// Tells the device that a program has posted to a ring of its own: POST_SRQ_RECV without work
    /// requests. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the device has failed.
    fn doorbell(&self) -> Result;
}

/// An address handle. Its functions come from any context.
pub(crate) trait AddressHandle<D: Driver>: Sized + Send + Sync {
    /// Creates the address handle. With the way back to a program, it may sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an address that RoCE cannot have, `EFAULT`.
    fn create(pd: &Pd<D>, attr: &AhAttr<'_>, udata: Option<&Udata<'_>>) -> Result<Self>;

    /// Reads the address back.
    fn query(&self, attr: &mut bindings::rdma_ah_attr);
}

/// Memory that is to be registered for a program.
#[derive(Clone, Copy)]
pub(crate) struct UserMemory {
    /// Address of the first byte in the program, or its offset in the dma-buf.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) length: u64,
    /// Address by which work requests name the first byte.
    pub(crate) virt_addr: u64,
    /// `enum ib_access_flags`.
    pub(crate) access: u32,
}

/// A memory region.
pub(crate) trait MemoryRegion<D: Driver>: Sized + Send + Sync {
    /// Creates an MR over all memory. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn get_dma(pd: &Pd<D>, access: u32) -> Result<Self>;

    /// Registers memory of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL`, `ENOMEM`, `EFAULT`, or what the device says.
    fn reg_user(dev: &Device<D>, pd: &Pd<D>, memory: &UserMemory) -> Result<Self>;

    /// Registers memory of the dma-buf behind a descriptor of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// `EBADF`, `EINVAL`, `ENOMEM`, what the exporter says, or what the device says: `EFAULT` for memory
    /// that it cannot reach.
    fn reg_dma_buf(dev: &Device<D>, pd: &Pd<D>, fd: c_int, memory: &UserMemory) -> Result<Self>;

    /// Replaces what `flags` name (`enum ib_mr_rereg_flags`) of an MR of a program, which stays as it
    /// was if that fails. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot do that, and for an MR of a dma-buf; as
    /// [`MemoryRegion::reg_user`].
    fn rereg_user(&self, dev: &Device<D>, flags: u32, pd: &Pd<D>, memory: &UserMemory) -> Result;

    /// Creates an MR for fast registration of at most `max_pages` pages, of whatever size its consumer
    /// maps them. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has none, `EINVAL`, `ENOMEM`, or what the device says.
    fn alloc(pd: &Pd<D>, max_pages: u32) -> Result<Self>;

    /// Forgets the pages of an MR for fast registration; those that follow have `page_size` bytes.
    /// Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is none, or if the device has no pages of that size.
    fn begin_pages(&self, page_size: u32) -> Result;

    /// Adds the page at `addr`, a multiple of its size. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not for fast registration, `ENOMEM` if there are too many.
    fn add_page(&self, addr: u64) -> Result;

    /// Destroys the MR, which is in `pd`, in the device. May sleep. It is dropped afterwards, unless
    /// this fails.
    ///
    /// # Errors
    ///
    /// `EBUSY` if a memory window is bound to it, or what else the device says; the object then
    /// lives on.
    fn dereg(&self, pd: &Pd<D>) -> Result;

    /// The local and the remote key.
    fn keys(&self) -> (u32, u32);

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

/// A memory window, which programs bind.
pub(crate) trait MemoryWindow<D: Driver>: Sized + Send + Sync {
    /// Creates a window of this type (`enum ib_mw_type`), not bound yet. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has none, or what the device says.
    fn alloc(pd: &Pd<D>, mw_type: u32) -> Result<Self>;

    /// Destroys the window, which is in `pd`, in the device, bound or not. May sleep. It is dropped
    /// afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self, pd: &Pd<D>) -> Result;

    /// The key that the window begins with.
    fn key(&self) -> u32;
}

impl<T> Object<bindings::ib_cq, T> {
    /// Calls the completion handler, if the consumer has set one by now. Any context.
    pub(crate) fn complete(&self) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid CQ. Its context was set before it came to
        // the driver; `ib_alloc_cq()` sets the handler afterwards, once, and stores one word. So it
        // is loaded once.
        unsafe {
            if let Some(handler) = (&raw const (*raw).comp_handler).read_volatile() {
                handler(raw, (*raw).cq_context);
            }
        }
    }

    /// Reports an asynchronous event of this CQ. Any context.
    pub(crate) fn report(&self, event: bindings::ib_event_type) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid CQ; handler and context were set before it
        // came to the driver.
        unsafe {
            let mut event = new_event((*raw).device, event, Element::Object(raw.cast()));
            if let Some(handler) = (*raw).event_handler {
                handler(&raw mut event, (*raw).cq_context);
            }
        }
    }
}

impl<T> Object<bindings::ib_srq, T> {
    /// Reports an asynchronous event of this SRQ. Any context.
    pub(crate) fn report(&self, event: bindings::ib_event_type) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid SRQ; handler and context were set before it
        // came to the driver.
        unsafe {
            let mut event = new_event((*raw).device, event, Element::Object(raw.cast()));
            if let Some(handler) = (*raw).event_handler {
                handler(&raw mut event, (*raw).srq_context);
            }
        }
    }
}

impl<T> Object<bindings::ib_qp, T> {
    /// Reports an asynchronous event of this QP. May sleep: the core promises handlers of QPs the context
    /// of a work queue (`struct ib_qp_init_attr`).
    pub(crate) fn report(&self, event: bindings::ib_event_type) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid QP; handler and context were set before it
        // came to the driver, but those of an XRC target, which the core sets anew before it lets
        // anybody change the QP's state: the driver reports nothing of a target until then.
        unsafe {
            let mut event = new_event((*raw).device, event, Element::Object(raw.cast()));
            if let Some(handler) = (*raw).event_handler {
                handler(&raw mut event, (*raw).qp_context);
            }
        }
    }

    /// Fills in what the core knows of how the QP was created.
    pub(crate) fn fill_init_attr(&self, init: &mut bindings::ib_qp_init_attr) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants the QP is valid, and these members do not change. There is
        // no reference to the whole, since the core changes others meanwhile.
        unsafe {
            init.event_handler = (*raw).event_handler;
            init.qp_context = (*raw).qp_context;
            init.send_cq = (*raw).send_cq;
            init.recv_cq = (*raw).recv_cq;
            init.srq = (*raw).srq;
            init.xrcd = (*raw).xrcd;
            init.qp_type = (*raw).qp_type;
            init.port_num = (*raw).port;
        }
    }
}

/// What an event concerns.
pub(super) enum Element {
    /// A CQ, QP or SRQ.
    Object(*mut c_void),
    /// A port.
    Port(u32),
}

/// An event of `device`.
pub(super) fn new_event(
    device: *mut bindings::ib_device,
    event: bindings::ib_event_type,
    element: Element,
) -> bindings::ib_event {
    let mut new = bindings::ib_event {
        device,
        event,
        ..Default::default()
    };
    let slot = &raw mut new.element;
    // SAFETY: The members of the union are pointers to objects, and the number of a port.
    unsafe {
        match element {
            Element::Object(object) => slot.cast::<*mut c_void>().write(object),
            Element::Port(port) => slot.cast::<u32>().write(port),
        }
    }
    new
}

/// What a program sent to the driver, and the way back to it: `struct ib_udata`.
pub(crate) struct Udata<'a> {
    raw: NonNull<bindings::ib_udata>,
    _lifetime: PhantomData<&'a ()>,
}

impl Udata<'_> {
    /// `None` for a null pointer: there is no program.
    ///
    /// # Safety
    ///
    /// `raw` must be null, or that of the current system call and valid for the lifetime.
    pub(super) unsafe fn from_raw(raw: *mut bindings::ib_udata) -> Option<Self> {
        Some(Self {
            raw: NonNull::new(raw)?,
            _lifetime: PhantomData,
        })
    }

    /// Copies what the program sent. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is too short, `EOPNOTSUPP` if bytes beyond `T` are not zero, `EFAULT`.
    pub(crate) fn request<T: FromBytes + AsBytes + Zeroable>(&self) -> Result<T> {
        let mut request = T::zeroed();
        let bytes = request.as_bytes_mut();
        // SAFETY: By the contract of `from_raw`, `raw` is valid; `bytes` has room for `T`.
        to_result(unsafe {
            bindings::_ib_copy_validate_udata_in(
                self.raw.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                bytes.len(),
            )
        })?;
        Ok(request)
    }

    /// Refuses what the program sent to an operation that has no request structure, as
    /// `ib_is_udata_in_empty()` does. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if any byte is not zero, `EFAULT`.
    pub(crate) fn no_request(&self) -> Result {
        // SAFETY: By the contract of `from_raw`, `raw` is valid.
        to_result(unsafe { bindings::virtio_rdma_is_udata_in_empty(self.raw.as_ptr()) })
    }

    /// Zeroes what the program has room for behind an operation that has no answer, as
    /// `ib_respond_empty_udata()` does. May sleep.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn no_answer(&self) -> Result {
        // SAFETY: By the contract of `from_raw`, `raw` is valid.
        to_result(unsafe { bindings::virtio_rdma_respond_empty_udata(self.raw.as_ptr()) })
    }

    /// Copies as much of `answer` to the program as it has room for, and zeros behind it. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn respond<T: AsBytes>(&self, answer: &T) -> Result {
        let bytes = answer.as_bytes();
        // SAFETY: By the contract of `from_raw`, `raw` is valid; `bytes` is valid for reads of its
        // length.
        to_result(unsafe {
            bindings::_ib_respond_udata(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len())
        })
    }
}

/// A GID and where it belongs: `struct ib_gid_attr`.
pub(crate) struct GidAttr<'a>(&'a bindings::ib_gid_attr);

impl<'a> GidAttr<'a> {
    pub(super) fn new(raw: &'a bindings::ib_gid_attr) -> Self {
        Self(raw)
    }

    /// The GID, in network order.
    pub(crate) fn gid(&self) -> [u8; 16] {
        gid_bytes(&self.0.gid)
    }

    /// `enum ib_gid_type`.
    pub(crate) fn gid_type(&self) -> u32 {
        self.0.gid_type
    }

    /// The index in the GID table.
    pub(crate) fn index(&self) -> u16 {
        self.0.index
    }

    /// The port.
    pub(crate) fn port(&self) -> u32 {
        self.0.port_num
    }

    /// The VLAN of the network interface that the GID is an address of; `None` if it is in none.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is no interface.
    pub(crate) fn vlan_id(&self) -> Result<Option<u16>> {
        let mut vlan_id = NO_VLAN;
        // SAFETY: The attributes are those of an entry of the core's table, which keeps the
        // interface; the number has room where the pointer says.
        to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(self.0, &mut vlan_id, core::ptr::null_mut())
        })?;
        Ok((vlan_id != NO_VLAN).then_some(vlan_id))
    }
}

/// What the core has for the number of a VLAN where there is none.
const NO_VLAN: u16 = u16::MAX;

/// The bytes of a GID, in network order.
pub(super) fn gid_bytes(gid: &bindings::ib_gid) -> [u8; 16] {
    // SAFETY: All members of the union are 16 bytes without padding.
    unsafe { *core::ptr::from_ref(gid).cast::<[u8; 16]>() }
}

/// An address: `struct rdma_ah_attr` of RoCE.
pub(crate) struct AhAttr<'a>(&'a bindings::rdma_ah_attr);

impl<'a> AhAttr<'a> {
    /// Wraps an address; `None` if it is not one of RoCE, or has no GRH.
    pub(crate) fn new(raw: &'a bindings::rdma_ah_attr) -> Option<Self> {
        let roce = raw.type_ == bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        let grh = u32::from(raw.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;

        (roce && grh).then_some(Self(raw))
    }

    /// The plain members.
    pub(crate) fn raw(&self) -> &bindings::rdma_ah_attr {
        self.0
    }

    /// The destination GID, in network order.
    pub(crate) fn dgid(&self) -> [u8; 16] {
        gid_bytes(&self.0.grh.dgid)
    }

    /// The destination MAC address.
    pub(crate) fn dmac(&self) -> [u8; 6] {
        // SAFETY: The type of the address says which member of the union is in use; its only
        // member is the MAC address.
        unsafe { *(&raw const self.0.__bindgen_anon_1).cast::<[u8; 6]>() }
    }

    /// Writes an address of RoCE with a GRH to `attr`.
    pub(crate) fn write(attr: &mut bindings::rdma_ah_attr, dgid: [u8; 16], dmac: [u8; 6]) {
        attr.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        attr.ah_flags = bindings::ib_ah_flags_IB_AH_GRH as u8;
        // SAFETY: Both unions are at least as long as what is written, and have room for any bytes.
        unsafe {
            (&raw mut attr.grh.dgid).cast::<[u8; 16]>().write(dgid);
            (&raw mut attr.__bindgen_anon_1)
                .cast::<[u8; 6]>()
                .write(dmac);
        }
    }
}
