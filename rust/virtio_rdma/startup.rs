// SPDX-License-Identifier: GPL-2.0

//! The steps that take a virtio device into service: when it is bound, when the machine has slept,
//! and when the device has failed.

#![deny(unsafe_code)]

use crate::{
    bindings,
    config::{
        self,
        Config,
        Role, //
    },
    dma,
    hca::Hca,
    interrupt,
    virtio, //
};
use kernel::{
    device,
    prelude::*,
    sync::{
        aref::ARef,
        Arc, //
    },
    types::ScopeGuard, //
};

/// A virtio device in the hands of its driver.
pub(crate) type Core<'a> = virtio::Device<device::Core<'a>>;

/// Declines the features that the driver has no use for, and those that require one which is not there.
///
/// # Errors
///
/// `ENODEV` for a device that is older than VIRTIO 1.0, or has no data path that the driver can use.
pub(crate) fn validate(dev: &Core<'_>) -> Result {
    if !dev.has_feature(bindings::VIRTIO_F_VERSION_1) {
        dev_err!(dev.as_ref(), "the device lacks VIRTIO_F_VERSION_1\n");
        return Err(ENODEV);
    }
    // Chains have one or two descriptors, and are added where nothing can be allocated.
    dev.clear_feature(bindings::VIRTIO_RING_F_INDIRECT_DESC);
    // An armed CQ must signal the next completion even if earlier ones were not polled, and the
    // event index would suppress that.
    dev.clear_feature(bindings::VIRTIO_RING_F_EVENT_IDX);
    choose_path(dev)?;
    config::decline_dependents(dev);
    Ok(())
}

/// Declines one of the two data paths, if the device offers both.
///
/// # Errors
///
/// `ENODEV` if there is no data path.
fn choose_path(dev: &Core<'_>) -> Result {
    if dev.has_feature(bindings::VIRTIO_RDMA_F_RINGS) {
        dev.clear_feature(bindings::VIRTIO_RDMA_F_VIRTQUEUES);
    } else if !dev.has_feature(bindings::VIRTIO_RDMA_F_VIRTQUEUES) {
        dev_err!(
            dev.as_ref(),
            "the device has neither rings that this driver can use nor virtqueues for work\n"
        );
        return Err(ENODEV);
    }
    Ok(())
}

/// Returns the names of the queues, and which of them interrupt.
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

/// Takes a device into service: it has its queues, and is ready. Sleeps.
///
/// # Errors
///
/// `EINVAL` for a configuration that makes no sense, `ENOMEM`, or what the transport says. The device was reset then.
pub(crate) fn start(dev: &Core<'_>) -> Result<(Arc<Hca>, dma::Device)> {
    let transport: &device::Device = dev.as_ref();
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
    // The device has queues now, and must be reset before they are deleted.
    let stop = ScopeGuard::new(|| {
        interrupt::detach(&hca, &dev.reset());
    });
    let dma = dev
        .dma_device(queues.first().ok_or(EINVAL)?, hca.config().behind_bus)
        .inspect_err(|error| {
            dev_err!(
                transport,
                "no device to do DMA, or an IOMMU without VIRTIO_F_ACCESS_PLATFORM: {:?}\n",
                error
            );
        })?;
    hca.attach(queues, dma.clone())?;
    dev.ready();
    interrupt::start_events(&hca);
    stop.dismiss();
    Ok((hca, dma))
}
