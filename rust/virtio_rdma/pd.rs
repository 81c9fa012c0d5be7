// SPDX-License-Identifier: GPL-2.0

//! Protection domains.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::Hca,
    ib,
    wire::Nothing, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};

/// A protection domain.
pub(crate) struct Pd {
    hca: Arc<Hca>,
    pdn: u32,
    /// The number of memory windows in the PD.
    windows: Pin<KBox<Mutex<u32>>>,
    /// Whether a consumer in the kernel has created a QP in it.
    is_consumers: Atomic<bool>,
}

impl Pd {
    /// Returns the device's number of the PD.
    pub(crate) fn number(&self) -> u32 {
        self.pdn
    }

    /// Returns the device.
    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }

    /// Notes that a consumer in the kernel has created a QP in the PD. May sleep.
    pub(crate) fn consumer_came(&self) {
        if !self.is_consumers.xchg(true, Relaxed) {
            self.hca.consumer_came();
        }
    }

    /// Returns the number of memory windows in the PD. A window is counted before the device makes it, and until the
    /// device has destroyed it.
    pub(crate) fn windows(&self) -> &Mutex<u32> {
        &self.windows
    }
}

impl ib::ProtectionDomain<Hca> for Pd {
    fn alloc(dev: &ib::Device<Hca>) -> Result<Self> {
        let windows = KBox::pin_init(new_mutex!(0), GFP_KERNEL)?;
        let reply = dev.data().execute::<cmd::CreatePd>(&Nothing)?;
        dev.data().pd_came();

        Ok(Self {
            hca: dev.data().clone(),
            pdn: u32::from_le(reply.pdn),
            windows,
            is_consumers: Atomic::new(false),
        })
    }

    fn dealloc(&self) -> Result {
        let request = bindings::virtio_rdma_cmd_destroy_pd {
            pdn: self.pdn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyPd>(&request);
        if self.is_consumers.load(Relaxed) {
            self.hca.consumer_left();
        }
        self.hca.pd_left();
        Ok(())
    }
}
