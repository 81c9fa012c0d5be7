// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A context that a program opened, with the kernel of the tests behind it.

use crate::{
    bindings::*,
    driver,
    libibverbs::{Device, Library, copies::Copies},
    model::uverbs::Kernel,
    object::{Blank, Owned, Ref, Zeroable},
    ops,
};
use core::ffi::{CStr, c_int};
use std::{env, ffi::CString, fs::File, os::fd::IntoRawFd, sync::LazyLock};

/// The library that the tests load, if it is not that of the build root.
const PATH: &str = "LIBIBVERBS";

/// Returns the libibverbs of the tests, with which the provider is registered.
pub fn library() -> &'static Library {
    static LIBRARY: LazyLock<&'static Library> = LazyLock::new(|| {
        let path = env::var(PATH).unwrap_or("libibverbs.so.1".into());
        let name = CString::new(path.clone()).unwrap();
        // SAFETY: the library is safe to load.
        let handle = unsafe { dlopen(name.as_ptr(), RTLD_LAZY as c_int) };
        assert!(!handle.is_null(), "cannot load {path}");
        let copy = Copies::find().iter().next().expect("a copy of libibverbs");
        driver::register_with(&copy).unwrap()
    });
    &LIBRARY
}

/// The name of the device of the tests.
pub const DEVICE: &CStr = c"virtio_rdma0";

/// Returns a device that this copy of libibverbs found.
pub fn device(library: &'static Library) -> Owned<Device> {
    let device = Blank::<verbs_device>::new().unwrap();
    // SAFETY: nobody else uses the device, whose name is longer.
    unsafe {
        let name = (&raw mut (*device.verbs().as_ptr()).device.name).cast();
        DEVICE.as_ptr().copy_to_nonoverlapping(name, DEVICE.count_bytes());
    }
    device.finish(library)
}

/// A context that a program opened, and its device.
pub struct Opened {
    /// The context, which is closed with this value.
    context: *mut ibv_context,
    device: Owned<Device>,
    _sysfs: Owned<verbs_sysfs_dev>,
}

// SAFETY: the structure consists of integers and text.
unsafe impl Zeroable for verbs_sysfs_dev {}

impl Opened {
    /// Opens a context that the driver describes so.
    pub fn new(kernel: &Kernel, description: virtio_rdma_uresp_alloc_ucontext) -> Self {
        kernel.answer(UVERBS_ATTR_UHW_OUT, description);
        let opened = Self::open(driver::tests::alloc_context);
        kernel.take();
        opened.expect("a context")
    }

    /// Opens a context whose objects have rings.
    pub fn with_rings(kernel: &Kernel) -> Self {
        Self::new(kernel, description(VIRTIO_RDMA_UDATA_PATH_RINGS))
    }

    /// Opens a context by `way`.
    pub fn open(way: unsafe fn(*mut ibv_device, c_int) -> *mut verbs_context) -> Option<Self> {
        Self::open_by(library(), way)
    }

    /// Opens a context of a device that this copy of libibverbs found, by `way`.
    pub fn open_by(
        library: &'static Library,
        way: unsafe fn(*mut ibv_device, c_int) -> *mut verbs_context,
    ) -> Option<Self> {
        let device = device(library);
        let sysfs = Owned::<verbs_sysfs_dev>::zeroed().unwrap();
        let at = device.as_ref().verbs().as_ptr();
        let file = File::open("/dev/null").unwrap().into_raw_fd();
        // SAFETY: the device is live, and libibverbs frees none that somebody has.
        let context = unsafe {
            (*at).refcount = 1;
            (*at).sysfs = sysfs.as_ref().as_ptr();
            way(&raw mut (*at).device, file)
        };
        if context.is_null() {
            // SAFETY: the device is live.
            assert_eq!(unsafe { (*at).refcount }, 1, "a hold on the device");
            return None;
        }
        // SAFETY: the context is live, and what libibverbs hands out is its last part.
        let context =
            unsafe { context.byte_add(library.context_len()).cast::<ibv_context>().sub(1) };
        Some(Self { context, device, _sysfs: sysfs })
    }

    /// Returns the context as libibverbs hands it to the program.
    pub fn verbs(&self) -> *mut ibv_context {
        self.context
    }

    /// Returns the context as verbs take it.
    pub fn context(&self) -> Ref<'_, ibv_context> {
        // SAFETY: the context is live.
        unsafe { Ref::new(self.verbs()) }
    }

    /// Returns how many holds libibverbs has on the device.
    pub fn holds(&self) -> i32 {
        // SAFETY: the device is live.
        unsafe { (*self.device.as_ref().verbs().as_ptr()).refcount - 1 }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: nobody uses the context any more.
        unsafe { ops::COMMON.free_context.unwrap()(self.verbs()) };
        assert_eq!(self.holds(), 0);
    }
}

/// Returns the description of a context by a driver with this data path.
pub fn description(data_path: u32) -> virtio_rdma_uresp_alloc_ucontext {
    virtio_rdma_uresp_alloc_ucontext { data_path, ..Default::default() }
}
