// SPDX-License-Identifier: GPL-2.0

//! Driver for the virtio RDMA device (virtio device ID 42).
//!
//! `Documentation/specification` says what the device does,
//! `include/uapi/linux/virtio_rdma.h` how it is laid out. A file imports only
//! files that this list names before it (`tools/test/floors` checks it). From the
//! bottom:
//!
//! - the generated [`bindings`], and what differs between kernels
//!   ([`kernel_release`]);
//! - safe abstractions over the kernel and over the structures of the device:
//!   [`errno`], [`sync`], [`reclaim`], [`dma`], [`log`], [`trace`], [`net`], [`wire`], [`virtio`],
//!   [`ib`], [`umem`]; all unsafe code is here, but for single blocks that say so;
//! - what the device has beside objects: the layout of rings ([`ring`]), its limits
//!   ([`config`]), counters ([`stats`]), typed commands ([`cmd`]), doorbells ([`doorbell`]), events
//!   ([`event`]) and the memory that it can reach ([`memory`]);
//! - the device that the objects share ([`hca`]);
//! - memory of objects ([`region`]), work queues ([`wq`]), and the
//!   objects, a file each: [`pd`], [`ah`], [`mr`], [`mw`], [`cq`], [`srq`], [`xrcd`],
//!   [`qp`], [`ucontext`];
//! - what brings interrupts and events to the objects ([`interrupt`]), the port
//!   ([`port`], [`pma`]), the table of verbs ([`device`]), how a device is taken into
//!   service ([`startup`]), when one that failed is tried again ([`backoff`]), and the
//!   life of the device between probe, failure, sleep and removal ([`pm`]).

// Nothing in a module is public, and its documentation is that of private items.
#![allow(rustdoc::private_intra_doc_links)]

use kernel::{
    driver,
    prelude::*,
    sync::Arc, //
};

mod ah;
mod backoff;
mod bindings;
mod cmd;
mod config;
mod cq;
mod device;
mod dma;
mod doorbell;
mod errno;
mod event;
mod hca;
mod ib;
mod interrupt;
mod kernel_release;
mod log;
mod memory;
mod mr;
mod mw;
mod net;
mod pd;
mod pm;
mod pma;
mod port;
mod qp;
mod reclaim;
mod region;
mod ring;
mod srq;
mod startup;
mod stats;
mod sync;
mod trace;
mod ucontext;
mod umem;
mod virtio;
mod wire;
mod wq;
mod xrcd;

// The kernel does not ask Kconfig whether it allows an external module.
#[cfg(not(target_pointer_width = "64"))]
compile_error!(
    "virtio_rdma needs a 64-bit kernel: it keeps addresses and lengths of the device as a usize"
);
#[cfg(not(target_endian = "little"))]
compile_error!("virtio_rdma needs a little-endian kernel: nobody has run it on another");

use pm::Service;
use startup::{
    start,
    Core, //
};

ib::operations_with_enums!(hca::Hca);

module! {
    type: Module,
    name: "virtio_rdma",
    authors: ["The virtio-rdma developers"],
    description: "Virtio RDMA driver",
    license: "GPL",
    params: {
        command_timeout: u32 {
            default: 60,
            description: "Seconds until a device that does not reply to a command has failed",
        },
        recover: u8 {
            default: 1,
            description: "Whether a device that has failed is reset and taken into service again: 1, or 0",
        },
        release_timeout: u32 {
            default: 65,
            description: "Seconds that consumers in the kernel have to let go of a device that has failed",
        },
    },
}

/// The module.
#[pin_data]
struct Module {
    // Members are dropped in the order of their declaration: the workqueues are needed as long as there are devices.
    #[pin]
    _driver: driver::Registration<virtio::Adapter<VirtioRdma>>,
    _queues: reclaim::Queues,
}

impl kernel::InPlaceModule for Module {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _queues: reclaim::Queues::new()?,
            _driver <- driver::Registration::new(<Self as kernel::ModuleMetadata>::NAME, module),
        })
    }
}

kernel_release::device_table!(
    "virtio",
    virtio::DeviceId,
    ID_TABLE,
    [virtio::DeviceId::new(bindings::VIRTIO_RDMA_DEVICE_ID)]
);

/// The driver.
struct VirtioRdma;

/// The driver's data of a bound device.
struct Data {
    service: Arc<Service>,
}

/// Takes a device into service, and registers its RDMA device.
fn bind(dev: &Core<'_>) -> Result<Data> {
    let (hca, dma) = start(dev)?;
    let service = Service::new(dev, hca, &dma)?;
    Ok(Data { service })
}

impl virtio::Driver for VirtioRdma {
    type Data = Data;

    const ID_TABLE: virtio::IdTable = &ID_TABLE;
    const FEATURES: &'static [c_uint] = config::FEATURES;

    fn validate(dev: &Core<'_>) -> Result {
        startup::validate(dev)
    }

    fn probe(dev: &Core<'_>) -> impl PinInit<Data, Error> {
        // The memory of the data is allocated before `bind` takes the device into service.
        pin_init::pin_init_scope(move || Ok(bind(dev)))
    }

    fn config_changed(data: Pin<&Data>) {
        data.service.config_changed();
    }

    fn freeze(dev: &Core<'_>, data: Pin<&Data>) -> Result {
        // The virtio core resets the device when the machine wakes up, and would wait for that for ever.
        if !dev.is_present() {
            return Err(ENODEV);
        }
        data.service.retire(dev);
        data.service.recover_thawed();
        Ok(())
    }

    fn restore(dev: &Core<'_>, data: Pin<&Data>) -> Result {
        let (hca, dma) = start(dev)?;
        data.service.renew(hca, dma);
        Ok(())
    }

    fn shutdown(dev: &Core<'_>, data: Pin<&Data>) {
        data.service.shut_down(dev);
    }

    fn reset_prepare(dev: &Core<'_>, data: Pin<&Data>) -> Result {
        // The virtio core would wait for the reset of a device that is not there for ever.
        if !dev.is_present() {
            return Err(ENODEV);
        }
        data.service.pause(dev);
        Ok(())
    }

    fn reset_done(dev: &Core<'_>, data: Pin<&Data>) {
        data.service.resume(dev);
    }

    fn unbind(dev: &Core<'_>, data: Pin<&Data>) {
        data.service.end(dev);
    }
}
