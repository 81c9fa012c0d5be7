// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Registration with libibverbs, and the devices it finds.
//!
//! The kernel's list of driver IDs does not have virtio-rdma, so libibverbs
//! matches by the modalias of the ib_device's parent (rdma-core
//! libibverbs/init.c, `match_modalias_device`): the virtio device, or the PCI
//! function below it.

use crate::{
    bindings::*,
    context::{self, Context},
    errno::{Errno, Result},
    object::{Blank, Owned, Ref},
    ops,
};
use core::{
    ffi::{CStr, c_int, c_void},
    hint,
    mem::MaybeUninit,
    ptr,
};

/// Virtio device 0x2a, any vendor.
const VIRTIO_MODALIAS: &CStr = c"virtio:d0000002Av*";
/// PCI function of a modern virtio device: 0x1040 + 0x2a.
const PCI_MODALIAS: &CStr = c"pci:v00001AF4d0000106Asv*";

/// Read by libibverbs, never written.
#[repr(transparent)]
struct Table<T>(T);

// SAFETY: nobody writes to the tables or to the memory that they point to.
unsafe impl<T> Sync for Table<T> {}

static MATCHES: Table<[verbs_match_ent; 3]> = Table([
    modalias(VIRTIO_MODALIAS),
    modalias(PCI_MODALIAS),
    // The sentinel.
    // SAFETY: plain data; kind 0 is VERBS_MATCH_SENTINEL.
    unsafe { MaybeUninit::zeroed().assume_init() },
]);

const fn modalias(pattern: &'static CStr) -> verbs_match_ent {
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        u: verbs_match_ent__bindgen_ty_1 { modalias: pattern.as_ptr() },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_MODALIAS as u8,
    }
}

static DRIVER: Table<verbs_device_ops> = Table(verbs_device_ops {
    name: c"virtio_rdma".as_ptr(),
    match_min_abi_version: VIRTIO_RDMA_UVERBS_ABI_VERSION,
    match_max_abi_version: VIRTIO_RDMA_UVERBS_ABI_VERSION,
    match_table: (&raw const MATCHES).cast(),
    alloc_context: Some(alloc_context),
    import_context: Some(import_context),
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
    // SAFETY: the other fields are optional function pointers and pointers.
    ..unsafe { MaybeUninit::zeroed().assume_init() }
});

/// Runs when libibverbs has opened this library.
#[used]
#[unsafe(link_section = ".init_array")]
static REGISTER: extern "C" fn() = {
    extern "C" fn register() {
        // `struct verbs_context_ops` may grow while the number of the private interface stays. A
        // libibverbs with a shorter structure lacks one of these functions, so that it does not load
        // this library.
        hint::black_box(newest_verb as unsafe extern "C" fn());
        hint::black_box(ibv_wr_opcode_str as unsafe extern "C" fn());
        // SAFETY: libibverbs is linked and so initialised first; the table
        // lives as long as this library, which libibverbs never closes.
        unsafe { verbs_register_driver((&raw const DRIVER).cast()) }
    }
    register
};

unsafe extern "C" fn alloc_device(_: *mut verbs_sysfs_dev) -> *mut verbs_device {
    Owned::zeroed().map_or(ptr::null_mut(), Owned::into_raw)
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: the device came from `alloc_device`, and libibverbs does not use it any
    // more.
    drop(unsafe { Owned::from_raw(device) });
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
    open: fn(Ref<'_, verbs_context>) -> Result<context::Private>,
) -> *mut verbs_context {
    // SAFETY: device and file are as the function demands; the context stands at the
    // beginning of the allocation, so its offset is 0.
    let raw: *mut verbs_context = unsafe {
        _verbs_init_and_alloc_context(
            device,
            cmd_fd,
            size_of::<Context>(),
            ptr::null_mut(),
            RDMA_DRIVER_UNKNOWN,
        )
    }
    .cast();
    if raw.is_null() {
        return raw;
    }
    // SAFETY: libibverbs just allocated the context by malloc(), and nobody else has it.
    let context = unsafe { Blank::from_raw(raw) };
    match open(context.verbs()) {
        Ok(private) => {
            let path = if private.qp_table.is_some() { &ops::RINGS } else { &ops::KERNEL };
            // SAFETY: the context is initialised; libibverbs copies the tables.
            unsafe {
                verbs_set_ops(raw, &ops::COMMON);
                verbs_set_ops(raw, path);
            }
            context.finish(private).into_raw().cast()
        }
        Err(errno) => {
            abandon(context, errno);
            ptr::null_mut()
        }
    }
}

/// Gives up a context that the kernel refused, and writes a message to the log of libibverbs
/// (`VERBS_LOG_LEVEL`).
fn abandon(context: Blank<verbs_context>, errno: Errno) {
    let verbs = context.verbs();
    // SAFETY: the context is initialised, the format takes one int; nobody
    // else has the context, whose memory `Blank` frees afterwards.
    unsafe {
        __verbs_log(
            verbs.as_ptr(),
            VERBS_LOG_ERR,
            c"virtio_rdma: cannot open a context: errno %d\n".as_ptr(),
            errno.get(),
        );
        verbs_uninit_context(verbs.as_ptr());
    }
    errno.set();
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

    /// A context that the kernel refuses, or whose data path the provider does not know, is freed:
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
        kernel.answer(UVERBS_ATTR_UHW_OUT, opened::description(7));
        assert!(Opened::open(alloc_context).is_none());
        assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
        kernel.answer(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, opened::description(7));
        assert!(Opened::open(import_context).is_none());
        assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
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
