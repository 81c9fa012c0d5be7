// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! libibverbs, as the provider calls it.
//!
//! A process may have several copies of libibverbs: that of the system, and those that Python wheels
//! bring, under names of their own. A plug-in that is linked with libibverbs would be bound to one,
//! and to one release. This provider is not: [`Copies`](copies::Copies) finds the copies when the
//! provider is loaded, a [`Library`] has the functions of one, and its [`Layout`] says
//! where its release differs from the headers that the provider is compiled with.
//!
//! A device belongs to the copy that found it. The functions here have the names of those of libibverbs,
//! and call the copy that their first argument belongs to. What they demand of their caller is what
//! rdma-core libibverbs/driver.h says; they do not write to `errno` unless the function does.

pub mod copies;
pub mod layout;

#[cfg(test)]
use crate::model::log::write as log_of_tests;
use crate::{
    bindings::*,
    causes::Cause,
    errno::Errno,
    object::{Extended, Object, Ref},
};
use copies::Copy;
use core::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::{self, MaybeUninit, offset_of, transmute},
    ptr,
};
use layout::{Layout, PLACES, Verb};

/// The functions of a copy of libibverbs, and those that call them: build.rs makes both from the headers.
#[allow(missing_docs, clippy::all, clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]
mod functions {
    use super::*;

    include!(concat!(env!("OUT_DIR"), "/libibverbs.rs"));
}
pub use functions::*;

/// A copy of libibverbs.
pub struct Library {
    functions: Functions,
    layout: Layout,
    register: Register,
    /// ibv_cmd_query_port_speed(), which releases have from 62 on.
    query_port_speed: Option<QueryPortSpeed>,
    /// The offset of `comp_mask` in `struct verbs_qp`.
    qp_comp_mask: usize,
}

type Register = unsafe extern "C" fn(*const verbs_device_ops);
type QueryPortSpeed = unsafe extern "C" fn(*mut ibv_context, u32, *mut u64) -> c_int;
type GetContext = unsafe extern "C" fn(
    *mut verbs_context,
    *mut ibv_get_context,
    usize,
    *mut c_void,
    *mut ib_uverbs_get_context_resp,
    usize,
) -> c_int;
type CreateQp = unsafe extern "C" fn(
    *mut ibv_context,
    *mut verbs_qp,
    *mut ibv_qp_init_attr_ex,
    *mut ibv_create_qp_ex,
    usize,
    *mut ib_uverbs_ex_create_qp_resp,
    usize,
    *mut ibv_command_buffer,
) -> c_int;

/// The reason why the provider does not serve a copy of libibverbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No release that the provider knows has the versions of the copy.
    Unknown,
    /// The loader does not find the object again.
    NotLoaded,
    /// The copy lacks a function.
    Lacks(&'static CStr),
    /// The copy does not say where a QP has its `comp_mask`.
    NoCompMask,
    /// There is no memory.
    NoMemory,
}

/// A device, and the copy of libibverbs that found it.
pub type Device = Object<verbs_device>;

impl Extended for verbs_device {
    type Private = &'static Library;
}

impl Library {
    /// Looks up the functions of a copy, which stays loaded from then on.
    ///
    /// # Errors
    ///
    /// Says why the provider cannot serve the copy.
    pub fn new(copy: &Copy) -> Result<Self, Refusal> {
        let layout = Layout::of(copy.public, copy.private).ok_or(Refusal::Unknown)?;
        let flags = (RTLD_LAZY | RTLD_NOLOAD) as c_int;
        // SAFETY: the path is a string. The object is loaded already; its constructors are libibverbs' own.
        let handle = unsafe { dlopen(copy.path.as_ptr(), flags) };
        if handle.is_null() {
            return Err(Refusal::NotLoaded);
        }
        let find = |name: &'static CStr| {
            // SAFETY: the object stays loaded.
            let symbol = unsafe { dlsym(handle, name.as_ptr()) };
            if symbol.is_null() { Err(Refusal::Lacks(name)) } else { Ok(symbol) }
        };
        // SAFETY: these are functions of libibverbs with the names of its headers. In the releases of the
        // layouts they have the types of the headers, but where the functions below say otherwise, and
        // ibv_cmd_reg_dmabuf_mr(): its last parameter came with 54, and earlier ones do not look at it.
        unsafe {
            let functions = Functions::new(find)?;
            #[cfg(test)]
            let functions = functions.with_log_of_tests();
            let register = transmute::<*mut c_void, Register>(find(layout.register)?);
            let query_port_speed = find(c"ibv_cmd_query_port_speed").ok();
            let query_port_speed =
                query_port_speed.map(|symbol| transmute::<*mut c_void, QueryPortSpeed>(symbol));
            let qp_comp_mask = comp_mask(functions.ibv_qp_to_qp_ex).ok_or(Refusal::NoCompMask)?;
            Ok(Self { functions, layout, register, query_port_speed, qp_comp_mask })
        }
    }

    /// Returns how long `struct verbs_context` is, in bytes.
    pub fn context_len(&self) -> usize {
        const { assert!(offset_of!(verbs_context, context) == layout::CONTEXT_HEAD) };
        self.layout.context_head + size_of::<ibv_context>()
    }

    /// Registers a provider with the copy.
    ///
    /// # Safety
    ///
    /// The structure lives for ever, with all that it points to.
    pub unsafe fn register(&self, ops: *const verbs_device_ops) {
        // SAFETY: the structure is the same in all releases.
        unsafe { (self.register)(ops) };
    }

    /// Returns whether `struct ibv_qp_ex` has the field at an offset.
    pub fn qp_ex_has(&self, offset: usize) -> bool {
        offset < self.qp_comp_mask
    }

    /// Returns where `comp_mask` stands in `struct verbs_qp`.
    pub fn qp_comp_mask(&self) -> usize {
        self.qp_comp_mask
    }

    /// Makes a context of `device` with `more` zeroed bytes behind it, or returns NULL and sets `errno`: also
    /// if the context is not as long as the layout says. Takes over `cmd_fd`, on failure as well.
    ///
    /// # Safety
    ///
    /// `device` is live, and `cmd_fd` an open file of it.
    pub unsafe fn alloc_context(
        &self,
        device: *mut ibv_device,
        cmd_fd: c_int,
        more: usize,
    ) -> *mut ibv_context {
        let alloc = self.functions._verbs_init_and_alloc_context;
        let len = self.context_len();
        // SAFETY: device and file are as the function demands; the context stands at the beginning of
        // the allocation, so its offset is 0. In every release the `ibv_context` is its last part.
        unsafe {
            let whole = alloc(device, cmd_fd, len + more, ptr::null_mut(), RDMA_DRIVER_UNKNOWN);
            if whole.is_null() {
                return ptr::null_mut();
            }
            let context = whole.byte_add(len - size_of::<ibv_context>()).cast();
            if self::len(context) != len {
                (self.functions.verbs_uninit_context)(whole.cast());
                free(whole);
                Errno::EPROTONOSUPPORT.set();
                return ptr::null_mut();
            }
            context
        }
    }

    /// Closes what libibverbs opened for a context that [`Self::alloc_context`] made, and frees it.
    ///
    /// # Safety
    ///
    /// The context is of this copy, and nobody uses it any more.
    pub unsafe fn free_context(&self, context: *mut ibv_context) {
        // SAFETY: the caller gives up the context.
        unsafe {
            let whole = whole_context(context);
            (self.functions.verbs_uninit_context)(whole);
            free(whole.cast());
        }
    }

    /// Installs verbs. Those that `ops` lacks stay as they are.
    ///
    /// # Safety
    ///
    /// The context is live, and of this copy.
    pub unsafe fn set_ops(
        &self,
        context: *mut ibv_context,
        ops: &verbs_context_ops,
        query_port_speed: Option<QueryPortSpeed>,
    ) {
        // SAFETY: the structure consists of function pointers that may be null.
        let verbs = unsafe { mem::transmute_copy::<verbs_context_ops, [Verb; PLACES]>(ops) };
        let query_port_speed = query_port_speed.filter(|_| self.query_port_speed.is_some());
        let table = self.layout.table(&verbs, query_port_speed.map_or(0, |verb| verb as Verb));
        // SAFETY: libibverbs reads as many places as its release has, which are fewer than there are.
        unsafe {
            (self.functions.verbs_set_ops)(whole_context(context), (&raw const table).cast());
        }
    }

    /// Returns whether the copy took the verbs from the places where the layout puts them, for three of them.
    ///
    /// # Safety
    ///
    /// The context is live, and of this copy; `ops` were installed last.
    pub unsafe fn has_verbs_of(&self, context: *mut ibv_context, ops: &verbs_context_ops) -> bool {
        // SAFETY: the context is live.
        unsafe {
            let installed = &(*context).ops;
            address(installed.poll_cq) == address(ops.poll_cq)
                && address(installed.post_send) == address(ops.post_send)
                && address(installed.req_notify_cq) == address(ops.req_notify_cq)
        }
    }

    /// Writes the cause for which a verb of an object is refused to the log of libibverbs
    /// (`VERBS_LOG_LEVEL`), which formats the text only at that level. Keeps `errno`.
    ///
    /// # Safety
    ///
    /// The context is live, and of this copy.
    pub unsafe fn log(&self, context: *mut ibv_context, kind: &CStr, number: u32, cause: Cause) {
        let log = self.functions.__verbs_log;
        let (level, format, [first, second]) = (cause.level(), cause.format(), cause.numbers());
        // SAFETY: the function takes a context, a level and a format with its arguments; the format of a
        // cause takes two strings and at most three numbers of 32 bits. libibverbs sets the device of a
        // context before it hands it out, and the name of a device is a string.
        unsafe {
            let errno = *__errno_location();
            let (whole, format) = (whole_context(context), format.as_ptr());
            let name = (&raw const (*(*context).device).name).cast::<c_char>();
            log(whole, level, format, name, kind.as_ptr(), number, first, second);
            *__errno_location() = errno;
        }
    }
}

fn address<T: core::marker::Copy>(function: Option<T>) -> Verb {
    const { assert!(size_of::<T>() == size_of::<Verb>()) };
    // SAFETY: `T` is a function pointer, which has the size of an address.
    function.map_or(0, |function| unsafe { mem::transmute_copy::<T, Verb>(&function) })
}

/// Finds out where `struct verbs_qp` has its `comp_mask`: libibverbs shows a QP as extended if the bit
/// is set there.
fn comp_mask(to_qp_ex: unsafe extern "C" fn(*mut ibv_qp) -> *mut ibv_qp_ex) -> Option<usize> {
    // It follows `struct ibv_qp_ex`, which got one function in 44 and one in 45.
    let newest = offset_of!(verbs_qp, comp_mask);
    const FUNCTION: usize = size_of::<usize>();
    [newest - 2 * FUNCTION, newest - FUNCTION, newest].into_iter().find(|offset| {
        // SAFETY: libibverbs allocates the structure zeroed itself; the offset is within it. The function
        // reads the field alone.
        unsafe {
            let mut qp = MaybeUninit::<verbs_qp>::zeroed();
            qp.as_mut_ptr().byte_add(*offset).cast::<u32>().write(VERBS_QP_EX);
            !to_qp_ex(qp.as_mut_ptr().cast()).is_null()
        }
    })
}

/// Returns the length of the `verbs_context` that ends with `context`, which its last field in front
/// says (rdma-core libibverbs/verbs.h, `struct verbs_context`).
///
/// # Safety
///
/// The context is live, and libibverbs made it.
unsafe fn len(context: *mut ibv_context) -> usize {
    // SAFETY: the number stands in front of the context.
    unsafe { context.cast::<usize>().sub(1).read() }
}

/// Returns the whole context of which libibverbs hands out a part.
///
/// # Safety
///
/// The context is live, and libibverbs made it.
pub unsafe fn whole_context(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: `context` is the end of a structure of that length.
    unsafe { context.add(1).byte_sub(len(context)).cast() }
}

impl Refusal {
    /// Returns the reason, and the name of the function that the reason is about, or the empty
    /// string.
    pub fn reason(self) -> (&'static CStr, &'static CStr) {
        match self {
            Self::Unknown => (c"it is of no release of rdma-core from 37 to 65", c""),
            Self::NotLoaded => (c"the loader does not find it by this path", c""),
            Self::Lacks(name) => (c"it lacks the function ", name),
            Self::NoCompMask => (c"it does not know extended QPs", c""),
            Self::NoMemory => (c"out of memory", c""),
        }
    }
}

/// An object that belongs to a context.
pub trait InContext {
    /// Returns the context.
    ///
    /// # Safety
    ///
    /// The object is live, and has its context.
    unsafe fn context(self) -> *mut ibv_context;
}

impl InContext for *mut ibv_context {
    unsafe fn context(self) -> *mut ibv_context {
        self
    }
}

macro_rules! in_context {
    ($($type:ident $(. $field:ident)*),* $(,)?) => {
        $(
            impl InContext for *mut $type {
                unsafe fn context(self) -> *mut ibv_context {
                    // SAFETY: the caller passes a live object.
                    unsafe { (&raw const (*self)$(.$field)*.context).read() }
                }
            }
        )*
    };
}
in_context!(ibv_pd, ibv_cq, ibv_qp, ibv_srq, ibv_ah, ibv_mw, verbs_mr.ibv_mr, verbs_xrcd.xrcd);

/// Returns the copy of libibverbs that an object belongs to.
///
/// # Safety
///
/// The object is live, and its context is of a [`Device`].
pub unsafe fn library<T: InContext>(object: T) -> &'static Library {
    // SAFETY: libibverbs sets the device of a context before it hands it out; a context holds its device.
    unsafe {
        let device = (&raw const (*object.context()).device).read();
        Ref::<'static, Device>::new(device.cast()).private()
    }
}

/// Opens a context in the kernel, without descriptors of a program that was there before.
///
/// # Safety
///
/// As rdma-core libibverbs/driver.h says.
pub unsafe fn ibv_cmd_get_context(
    context: *mut ibv_context,
    cmd: *mut ibv_get_context,
    cmd_size: usize,
    resp: *mut ib_uverbs_get_context_resp,
    resp_size: usize,
) -> c_int {
    // SAFETY: the caller passes what the function demands. Later releases take descriptors, which may
    // be null.
    unsafe {
        let library = library(context);
        let function = library.functions.ibv_cmd_get_context;
        let context = whole_context(context);
        if !library.layout.get_context_takes_fds {
            return function(context, cmd, cmd_size, resp, resp_size);
        }
        let function = transmute::<*const c_void, GetContext>(function as *const c_void);
        function(context, cmd, cmd_size, ptr::null_mut(), resp, resp_size)
    }
}

/// Creates a QP, without attributes of the driver.
///
/// # Safety
///
/// As rdma-core libibverbs/driver.h says.
pub unsafe fn ibv_cmd_create_qp_ex2(
    context: *mut ibv_context,
    qp: *mut verbs_qp,
    attr: *mut ibv_qp_init_attr_ex,
    cmd: *mut ibv_create_qp_ex,
    cmd_size: usize,
    resp: *mut ib_uverbs_ex_create_qp_resp,
    resp_size: usize,
) -> c_int {
    // SAFETY: the caller passes what the function demands. Later releases take attributes, which may be
    // null; earlier ones do not look at a further argument.
    unsafe {
        let function = library(context).functions.ibv_cmd_create_qp_ex2;
        let function = transmute::<*const c_void, CreateQp>(function as *const c_void);
        function(context, qp, attr, cmd, cmd_size, resp, resp_size, ptr::null_mut())
    }
}

/// Reads the speed of a port, in units of 100 Mb/s.
///
/// # Safety
///
/// As rdma-core libibverbs/driver.h says.
pub unsafe fn ibv_cmd_query_port_speed(
    context: *mut ibv_context,
    port_num: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: the caller passes what the function demands.
    unsafe {
        match library(context).query_port_speed {
            Some(function) => function(context, port_num, speed),
            None => EOPNOTSUPP as c_int,
        }
    }
}

#[cfg(test)]
impl Functions {
    /// Replaces the log by that of the tests.
    fn with_log_of_tests(self) -> Self {
        type Log = unsafe extern "C" fn(*mut verbs_context, u32, *const c_char, ...);
        let log = log_of_tests as *const c_void;
        // SAFETY: the function takes the arguments that `Library::log` passes.
        let __verbs_log = unsafe { transmute::<*const c_void, Log>(log) };
        Self { __verbs_log, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        opened::{self, Opened},
        uverbs::Kernel,
    };

    /// Returns the copy of the tests as one with other layouts.
    fn with(layout: Layout) -> &'static Library {
        let copy = copies::Copies::find().iter().next().unwrap();
        Box::leak(Box::new(Library { layout, ..Library::new(&copy).unwrap() }))
    }

    /// Stands for `ibv_qp_to_qp_ex` of a release that has `LACKS` functions fewer than the newest one.
    unsafe extern "C" fn to_qp_ex<const LACKS: usize>(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
        let at = offset_of!(verbs_qp, comp_mask) - LACKS * size_of::<usize>();
        // SAFETY: the caller passes a whole `struct verbs_qp`.
        let mask = unsafe { qp.byte_add(at).cast::<u32>().read() };
        if mask & VERBS_QP_EX == 0 { ptr::null_mut() } else { qp.cast() }
    }

    #[test]
    fn comp_mask_follows_the_functions_of_a_release() {
        let newest = offset_of!(verbs_qp, comp_mask);
        assert_eq!(comp_mask(to_qp_ex::<0>), Some(newest));
        assert_eq!(comp_mask(to_qp_ex::<1>), Some(newest - 8));
        assert_eq!(comp_mask(to_qp_ex::<2>), Some(newest - 16));
        assert_eq!(comp_mask(to_qp_ex::<3>), None);
    }

    /// A context of a release without functions for opcodes has none of these opcodes.
    #[test]
    fn opcodes_without_a_function() {
        let (flush, write) =
            (offset_of!(ibv_qp_ex, wr_flush), offset_of!(ibv_qp_ex, wr_atomic_write));
        // This loads the library.
        let layout = opened::library().layout;
        for (qp_comp_mask, opcodes) in [
            (flush.min(write), [false, false]),
            (flush.max(write), [flush < write, write < flush]),
            (flush.max(write) + 8, [true, true]),
        ] {
            let kernel = Kernel::new();
            let description = opened::description(VIRTIO_RDMA_UDATA_PATH_RINGS);
            kernel.answer(UVERBS_ATTR_UHW_OUT, description);
            let copy = copies::Copies::find().iter().next().unwrap();
            let library = Library { layout, qp_comp_mask, ..Library::new(&copy).unwrap() };
            let open = crate::driver::tests::alloc_context;
            let opened = Opened::open_by(Box::leak(Box::new(library)), open).unwrap();
            let has = |opcode| opened.context().whole().private().opcodes.has(opcode);
            assert_eq!([IBV_WR_FLUSH, IBV_WR_ATOMIC_WRITE].map(has), opcodes);
        }
    }

    /// A context is refused if it is not as long as its release has it, or if the verbs are not where they were
    /// put. Nothing is left of it.
    #[test]
    fn a_context_that_is_not_as_known() {
        let layout = opened::library().layout;
        let other = if layout == Layout::of(18, 65).unwrap() { (16, 59) } else { (18, 65) };
        let other = Layout::of(other.0, other.1).unwrap();
        let context_head = layout.context_head;
        let moved = Layout { public: other.public, ..layout };
        for (layout, is_there) in [(layout, true), (other, false), (moved, false)] {
            let kernel = Kernel::new();
            let description = opened::description(VIRTIO_RDMA_UDATA_PATH_RINGS);
            if layout.context_head == context_head {
                kernel.answer(UVERBS_ATTR_UHW_OUT, description);
            }
            let open = crate::driver::tests::alloc_context;
            let opened = Opened::open_by(with(layout), open);
            assert_eq!(opened.is_some(), is_there);
            if !is_there {
                assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
            }
        }
    }
}
