// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Registration with libibverbs, and the devices it finds.
//!
//! The kernel's list of driver IDs does not have virtio-rdma, so libibverbs
//! matches by the modalias of the ib_device's parent (rdma-core
//! libibverbs/init.c, `match_modalias_device`): the virtio device, or the PCI
//! function below it.

use crate::{
    bindings::*,
    causes::cause,
    context::{self, Context, ContextPrivate},
    errno::{Errno, Result},
    libibverbs::{Device, Library, Refusal, copies::Copy, whole_context},
    limits::Opcodes,
    log::Refuse,
    object::{Blank, Owned, Ref},
    ops,
};
use core::{
    ffi::{CStr, c_int, c_void},
    mem::offset_of,
    ptr,
};

/// Virtio device 0x2a, any vendor.
const VIRTIO_MODALIAS: &CStr = c"virtio:d0000002Av*";
/// PCI function of a modern virtio device: 0x1040 + 0x2a.
const PCI_MODALIAS: &CStr = c"pci:v00001AF4d0000106Asv*";

/// A copy of libibverbs with which the provider is registered, and the memory of the registration
/// that the copy reads. Nobody writes to that memory any more.
struct Registration {
    library: Library,
    matches: [verbs_match_ent; 3],
    ops: verbs_device_ops,
}

/// Runs when a copy of libibverbs has opened this library, which no copy ever closes. It runs once for a file: a copy
/// that comes later and asks for the same file is not seen. If the library is loaded from several files, each
/// registers with each copy; libibverbs takes the first of drivers that match alike.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static REGISTER: extern "C" fn() = {
    extern "C" fn register() {
        let copies = crate::libibverbs::copies::Copies::find();
        for copy in copies.iter() {
            if let Err(refusal) = register_with(&copy) {
                let (reason, name) = refusal.reason();
                say(copy.path, reason, name);
            }
        }
        if copies.iter().next().is_none() {
            say(c"libibverbs", c"none is loaded that has an interface for providers", c"");
        }
    }
    register
};

/// Says on standard error, as libibverbs itself does, why programs do not get the device.
#[cfg(not(test))]
fn say(path: &CStr, reason: &CStr, name: &CStr) {
    let format = c"libvirtio_rdma: %s: %s%s\n".as_ptr();
    // SAFETY: the format takes three strings.
    unsafe { dprintf(2, format, path.as_ptr(), reason.as_ptr(), name.as_ptr()) };
}

/// Registers the provider with a copy of libibverbs. Returns the copy as the provider calls it.
pub(crate) fn register_with(copy: &Copy) -> core::result::Result<&'static Library, Refusal> {
    let registration = Registration::leak(Library::new(copy)?).ok_or(Refusal::NoMemory)?;
    // SAFETY: the registration lives for ever. The copy that loads this library has the lock of its list of
    // drivers; another one only appends to its own, which its threads walk when they look for devices.
    unsafe { registration.library.register(&registration.ops) };
    Ok(&registration.library)
}

impl Registration {
    /// Makes a registration that lives for ever, as there is no way to end it.
    fn leak(library: Library) -> Option<&'static Self> {
        // SAFETY: calloc() has no preconditions.
        let at = unsafe { calloc(1, size_of::<Self>() as _) }.cast::<Self>();
        if at.is_null() {
            return None;
        }
        // SAFETY: the memory has room, and nobody else uses it yet. The last entry of the matches is
        // zero, which is VERBS_MATCH_SENTINEL, and so are the optional functions.
        unsafe {
            (&raw mut (*at).library).write(library);
            let library = (&raw mut (*at).library).cast();
            (*at).matches[0] = modalias(VIRTIO_MODALIAS, library);
            (*at).matches[1] = modalias(PCI_MODALIAS, library);
            (*at).ops.name = c"virtio_rdma".as_ptr();
            (*at).ops.match_min_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION;
            (*at).ops.match_max_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION;
            (*at).ops.match_table = (&raw const (*at).matches).cast();
            (*at).ops.alloc_context = Some(alloc_context);
            (*at).ops.import_context = Some(import_context);
            (*at).ops.alloc_device = Some(alloc_device);
            (*at).ops.uninit_device = Some(uninit_device);
            Some(&*at)
        }
    }
}

/// Returns a match of devices with a modalias. libibverbs hands the match to [`alloc_device`].
fn modalias(pattern: &'static CStr, library: *mut c_void) -> verbs_match_ent {
    verbs_match_ent {
        driver_data: library,
        u: verbs_match_ent__bindgen_ty_1 { modalias: pattern.as_ptr() },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_MODALIAS as u8,
    }
}

unsafe extern "C" fn alloc_device(sysfs: *mut verbs_sysfs_dev) -> *mut verbs_device {
    let Ok(device) = Blank::<verbs_device>::new() else { return ptr::null_mut() };
    // SAFETY: libibverbs passes a device that an entry of `Registration::matches` matched.
    let library = unsafe { &*(*(*sysfs).match_).driver_data.cast::<Library>() };
    device.finish(library).into_raw().cast()
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: the device came from `alloc_device`, and libibverbs does not use it any
    // more.
    drop(unsafe { Owned::from_raw(device.cast::<Device>()) });
}

unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private_data: *mut c_void,
) -> *mut verbs_context {
    // SAFETY: libibverbs passes a live device and its open file.
    unsafe { new_context(device, cmd_fd, context::open) }
}

unsafe extern "C" fn import_context(device: *mut ibv_device, cmd_fd: c_int) -> *mut verbs_context {
    // SAFETY: libibverbs passes a live device and its open file.
    unsafe { new_context(device, cmd_fd, context::import) }
}

/// Makes a context, which `open` asks the kernel for. Takes over `cmd_fd`, on failure as well: the
/// file is closed with the context.
///
/// # Safety
///
/// `device` is live, and `cmd_fd` an open file of it.
unsafe fn new_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    open: fn(Ref<'_, ibv_context>) -> Result<ContextPrivate>,
) -> *mut verbs_context {
    const { assert!(align_of::<Context>() <= align_of::<usize>()) };
    let more = size_of::<Context>() - size_of::<ibv_context>();
    // SAFETY: device and file are as the function demands; the device came from `alloc_device`.
    unsafe {
        let library = *Ref::new(device.cast::<Device>()).private();
        let raw = library.alloc_context(device, cmd_fd, more);
        let Some(context) = Ref::optional(raw) else { return ptr::null_mut() };
        if let Err(errno) = open(context).and_then(|private| complete(library, context, private)) {
            let number = errno.get() as u32;
            context.subject().say(cause!(EIO, "it cannot be opened: errno %u", number));
            library.free_context(raw);
            errno.set();
            return ptr::null_mut();
        }
        whole_context(raw)
    }
}

/// Returns the opcodes for which `struct ibv_qp_ex` of the copy's release has no function.
fn without_call(library: &Library) -> Opcodes {
    [
        (offset_of!(ibv_qp_ex, wr_flush), Opcodes::of(&[IBV_WR_FLUSH])),
        (offset_of!(ibv_qp_ex, wr_atomic_write), Opcodes::of(&[IBV_WR_ATOMIC_WRITE])),
    ]
    .into_iter()
    .filter(|(function, _)| !library.qp_ex_has(*function))
    .fold(Opcodes::of(&[]), |all, (_, opcodes)| all.union(opcodes))
}

/// Gives a context its verbs and the provider's private data.
///
/// # Errors
///
/// EPROTONOSUPPORT if the copy of libibverbs does not take the verbs from where they are.
///
/// # Safety
///
/// The context is of the copy, has room for the private data, and nobody else uses it.
unsafe fn complete(
    library: &Library,
    context: Ref<'_, ibv_context>,
    mut private: ContextPrivate,
) -> Result {
    private.opcodes = private.opcodes.without(without_call(library));
    let path = if private.qp_table.is_some() { &ops::RINGS } else { &ops::KERNEL };
    let raw = context.as_ptr();
    // SAFETY: as the caller says.
    unsafe {
        library.set_ops(raw, &ops::COMMON, Some(ops::query_port_speed));
        library.set_ops(raw, path, None);
        if !library.has_verbs_of(raw, path) {
            return Err(Errno::EPROTONOSUPPORT);
        }
        context.whole().complete(private);
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::{
        opened::{self, Opened},
        uverbs::Kernel,
    };
    use core::ffi::c_char;

    /// Opens a context as libibverbs does for ibv_open_device(3).
    pub unsafe fn alloc_context(device: *mut ibv_device, cmd_fd: c_int) -> *mut verbs_context {
        // SAFETY: the tests pass a live device and an open file.
        unsafe { super::alloc_context(device, cmd_fd, ptr::null_mut()) }
    }

    /// Imports a context as libibverbs does for ibv_import_device(3).
    unsafe fn import_context(device: *mut ibv_device, cmd_fd: c_int) -> *mut verbs_context {
        // SAFETY: the tests pass a live device and an open file.
        unsafe { super::import_context(device, cmd_fd) }
    }

    /// The verbs of a context are those of its data path, whether it was opened or imported.
    #[test]
    fn a_context_has_the_verbs_of_its_data_path() {
        let kernel = Kernel::new();
        for (data_path, poll_cq, post_srq_recv) in [
            (VIRTIO_RDMA_UDATA_PATH_RINGS, ops::RINGS.poll_cq, ops::RINGS.post_srq_recv),
            (VIRTIO_RDMA_UDATA_PATH_RINGS_BUS, ops::RINGS.poll_cq, ops::RINGS.post_srq_recv),
            (VIRTIO_RDMA_UDATA_PATH_KERNEL, ops::KERNEL.poll_cq, None),
        ] {
            let description = opened::description(data_path);
            let opened = Opened::new(&kernel, description);
            kernel.answer(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, description);
            let imported = Opened::open(import_context).unwrap();
            for opened in [opened, imported] {
                // SAFETY: the context is live.
                let ops = unsafe { &(*opened.verbs()).ops };
                let address = |poll: Option<_>| poll.map(|poll: PollCq| poll as usize);
                assert_eq!(address(ops.poll_cq), address(poll_cq));
                let is_own = ops.post_srq_recv.map(|post| post as usize)
                    == post_srq_recv.map(|post| post as usize);
                assert_eq!(is_own, post_srq_recv.is_some());
                assert_eq!(opened.holds(), 1);
            }
        }
    }

    type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;

    /// A context that the kernel refuses, or whose data path or mask the provider does not know, is freed:
    /// `errno` says why, and libibverbs does not hold the device any more.
    #[test]
    fn a_context_that_cannot_be() {
        let kernel = Kernel::new();
        for way in [alloc_context, import_context] {
            for errno in [EACCES, ENODEV] {
                kernel.fail(errno);
                assert!(Opened::open(way).is_none());
                assert_eq!(Errno::last().get(), errno as c_int);
            }
        }
        let masked = |comp_mask| virtio_rdma_uresp_alloc_ucontext {
            comp_mask,
            ..opened::description(VIRTIO_RDMA_UDATA_PATH_RINGS)
        };
        for description in [opened::description(7), masked(1), masked(1 << 63)] {
            kernel.answer(UVERBS_ATTR_UHW_OUT, description);
            assert!(Opened::open(alloc_context).is_none());
            assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
            kernel.answer(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, description);
            assert!(Opened::open(import_context).is_none());
            assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
        }
    }

    unsafe extern "C" {
        safe fn fnmatch(pattern: *const c_char, string: *const c_char, flags: c_int) -> c_int;
    }

    /// Matches as libibverbs does.
    fn matched(modalias: &CStr) -> bool {
        [VIRTIO_MODALIAS, PCI_MODALIAS]
            .iter()
            .any(|pattern| fnmatch(pattern.as_ptr(), modalias.as_ptr(), 0) == 0)
    }

    #[test]
    fn modalias_of_virtio_rdma_alone() {
        assert!(matched(c"virtio:d0000002Av00001AF4"));
        assert!(matched(c"virtio:d0000002Av554D4551\n"));
        assert!(matched(c"pci:v00001AF4d0000106Asv00001AF4sd00001100bc02sc00i00"));
        assert!(!matched(c"virtio:d00000001v00001AF4"));
        assert!(!matched(c"virtio:d000000020v00001AF4"));
        assert!(!matched(c"pci:v00001AF4d00001041sv00001AF4sd00001100bc02sc00i00"));
        assert!(!matched(c""));
    }
}
