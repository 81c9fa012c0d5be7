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
    prelude::*,
    sync::Arc, //
};

/// A protection domain.
pub(crate) struct Pd {
    hca: Arc<Hca>,
    pdn: u32,
}

impl Pd {
    /// The device's number of the PD.
    pub(crate) fn number(&self) -> u32 {
        self.pdn
    }

    /// The device.
    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }
}

impl ib::ProtectionDomain<Hca> for Pd {
    fn alloc(dev: &ib::Device<Hca>) -> Result<Self> {
        let reply = dev.data().execute::<cmd::CreatePd>(&Nothing)?;

        Ok(Self {
            hca: dev.data().clone(),
            pdn: u32::from_le(reply.pdn),
        })
    }

    fn dealloc(&self) -> Result {
        let request = bindings::virtio_rdma_cmd_destroy_pd {
            pdn: self.pdn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyPd>(&request);
        Ok(())
    }
}
