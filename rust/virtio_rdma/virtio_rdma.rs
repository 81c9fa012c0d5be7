// SPDX-License-Identifier: GPL-2.0

//! Driver for the virtio RDMA device (virtio device ID 42).
//!
//! `Documentation/specification.md` says what the device does,
//! `include/uapi/linux/virtio_rdma.h` how it is laid out. The driver has layers:
//! the bindings, safe abstractions over them ([`virtio`], [`ib`], [`dma`],
//! [`umem`], [`net`], [`sync`], [`wire`]), the typed commands ([`cmd`]) and the
//! objects, each in its own module. Only the first two have unsafe code.

// Nothing in a module is public, and its documentation is that of private items.
#![allow(rustdoc::private_intra_doc_links)]

use kernel::{
    device as kernel_device,
    new_mutex,
    prelude::*,
    sync::{
        aref::ARef,
        Arc,
        Mutex, //
    },
    types::ScopeGuard, //
};

mod ah;
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
mod mr;
mod mw;
mod net;
mod pd;
mod pma;
mod port;
mod qp;
mod region;
mod ring;
mod srq;
mod stats;
mod sync;
mod ucontext;
mod umem;
mod virtio;
mod wire;
mod wq;
mod xrcd;

use config::{
    Config,
    Role, //
};
use hca::Hca;

kernel::module_driver!(<T>, virtio::Adapter<T>, {
    type: VirtioRdma,
    name: "virtio_rdma",
    authors: ["The virtio-rdma developers"],
    description: "Virtio RDMA driver",
    license: "GPL",
    params: {
        command_timeout: u32 {
            default: 60,
            description: "Seconds until a device that does not reply to a command has failed",
        },
    },
});

const ID_TABLE: kernel::device_id::IdArray<virtio::DeviceId, (), 1> =
    kernel::device_id::IdArray::new_without_index([(
        virtio::DeviceId::new(bindings::VIRTIO_RDMA_DEVICE_ID),
        (),
    )]);

kernel::module_device_table!("virtio", MODULE_ID_TABLE, ID_TABLE);

/// The driver.
struct VirtioRdma;

/// The driver's data of a bound device. What unbinding ends is dropped there, in order.
#[pin_data]
struct Data {
    hca: Arc<Hca>,
    ibdev: Arc<ib::UnregisteredDevice<Hca>>,
    #[pin]
    active: Mutex<Option<Active>>,
}

/// What makes the device usable. First the pairing goes, so that nobody pairs a device that is not
/// registered any more, then the registration: members are dropped in the order of their declaration.
struct Active {
    _notifier: Pin<KBox<net::Notifier<port::Pairing>>>,
    _registration: ib::Registration<Hca>,
}

/// A virtio device in the hands of its driver.
type Core<'a> = virtio::Device<kernel_device::Core<'a>>;

/// The names of the queues, and which of them interrupt.
fn queue_specs(config: &Config) -> Result<KVec<virtio::QueueSpec>> {
    let mut specs = KVec::new();
    for index in 0..config.queues() {
        let (name, interrupt) = match config.role(index as u32) {
            Role::Control => (c"control", true),
            Role::Completions(_) => (c"cq", true),
            Role::Sends => (c"sq", false),
            Role::Receives => (c"rq", false),
            Role::CompletionEvents(_) => (c"completions", true),
            Role::Doorbells => (c"doorbell", true),
            Role::Events => (c"event", true),
        };
        specs.push(virtio::QueueSpec { name, interrupt }, GFP_KERNEL)?;
    }
    Ok(specs)
}

/// Registers the RDMA device of a virtio device that is ready.
fn register(
    dev: &Core<'_>,
    hca: &Arc<Hca>,
    dma: &dma::Device,
) -> Result<(Arc<ib::UnregisteredDevice<Hca>>, Active)> {
    let transport: &kernel_device::Device = dev.as_ref();
    let config = ib::Config {
        parent: transport,
        node_guid: hca.config().sys_image_guid,
        num_comp_vectors: hca.num_comp_vectors(),
        has_pma: hca.config().has_counters,
    };
    let ibdev = ib::UnregisteredDevice::new(hca.clone(), hca.objects().clone(), &config)?;
    let pairing = port::Pairing::new(ibdev.clone(), ARef::from(transport));
    // The interfaces that exist are looked at here: the RDMA core wants to know of the paired one
    // before the device is registered.
    let notifier = KBox::pin_init(net::Notifier::new(pairing), GFP_KERNEL)?;
    let registration = ib::Registration::new(ibdev.clone(), dma)?;
    let active = Active {
        _notifier: notifier,
        _registration: registration,
    };
    Ok((ibdev, active))
}

/// Takes a device into service.
fn start(dev: &Core<'_>) -> Result<(Arc<Hca>, Arc<ib::UnregisteredDevice<Hca>>, Active)> {
    let transport: &kernel_device::Device = dev.as_ref();
    let config = Config::read(dev)?;
    let specs = queue_specs(&config)?;
    let hca = Hca::new(ARef::from(transport), config)?;
    let queues = dev.find_queues(&specs, hca.clone()).inspect_err(|error| {
        dev_err!(
            transport,
            "cannot set up {} virtqueues: {:?}\n",
            specs.len(),
            error
        );
    })?;
    // From here on, the device has queues: it must be reset before they go.
    let stop = ScopeGuard::new(|| {
        hca.detach(&dev.reset());
    });
    let dma = dev
        .dma_device(queues.first().ok_or(EINVAL)?)
        .inspect_err(|error| {
            dev_err!(
                transport,
                "no device to do DMA, or an IOMMU without VIRTIO_F_ACCESS_PLATFORM: {:?}\n",
                error
            );
        })?;
    hca.attach(queues, dma.clone())?;
    dev.ready();
    hca.start_events();
    let (ibdev, active) = register(dev, &hca, &dma)?;
    stop.dismiss();
    Ok((hca, ibdev, active))
}

impl virtio::Driver for VirtioRdma {
    type Data = Data;

    const ID_TABLE: virtio::IdTable = &ID_TABLE;
    const FEATURES: &'static [c_uint] = &[
        bindings::VIRTIO_RDMA_F_EVENTS,
        bindings::VIRTIO_RDMA_F_MAC,
        bindings::VIRTIO_RDMA_F_RINGS,
        bindings::VIRTIO_RDMA_F_SRQ,
        bindings::VIRTIO_RDMA_F_FAST_REG,
        bindings::VIRTIO_RDMA_F_MW,
        bindings::VIRTIO_RDMA_F_REREG_MR,
        bindings::VIRTIO_RDMA_F_FLUSH,
        bindings::VIRTIO_RDMA_F_ATOMIC_WRITE,
        bindings::VIRTIO_RDMA_F_MCAST,
        bindings::VIRTIO_RDMA_F_COUNTERS,
        bindings::VIRTIO_RDMA_F_XRC,
        bindings::VIRTIO_RDMA_F_PAGE_LEVELS,
        bindings::VIRTIO_RDMA_F_VLAN,
        bindings::VIRTIO_RDMA_F_CQ_MODERATION,
    ];

    fn validate(dev: &Core<'_>) -> Result {
        if !dev.has_feature(bindings::VIRTIO_F_VERSION_1) {
            dev_err!(dev.as_ref(), "the device lacks VIRTIO_F_VERSION_1\n");
            return Err(ENODEV);
        }
        // Chains are one or two descriptors, added where nothing can be allocated.
        dev.clear_feature(bindings::VIRTIO_RING_F_INDIRECT_DESC);
        // Rings are shared as between processors; what a device behind a bus needs, virtqueues alone have.
        if dev.has_feature(bindings::VIRTIO_F_ORDER_PLATFORM) {
            dev.clear_feature(bindings::VIRTIO_RDMA_F_RINGS);
        }
        // An armed CQ must signal the next completion even if earlier ones were not polled, and the
        // event index would suppress that.
        dev.clear_feature(bindings::VIRTIO_RING_F_EVENT_IDX);
        Ok(())
    }

    fn probe(dev: &Core<'_>) -> impl PinInit<Data, Error> {
        pin_init::pin_init_scope(move || {
            let (hca, ibdev, active) = start(dev)?;
            Ok(try_pin_init!(Data {
                hca,
                ibdev,
                active <- new_mutex!(Some(active)),
            }? Error))
        })
    }

    fn needs_reset(data: Pin<&Data>) {
        data.hca.fail("it asks for a reset");
    }

    fn unbind(dev: &Core<'_>, data: Pin<&Data>) {
        let active = data.active.lock().take();
        drop(active);
        data.hca.detach(&dev.reset());
    }
}
