// SPDX-License-Identifier: GPL-2.0

//! Extended connection domains (specification, Extended reliable connections).

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

/// An extended connection domain. An XRC target QP receives from the SRQs of its domain.
pub(crate) struct Xrcd {
    hca: Arc<Hca>,
    xrcdn: u32,
}

impl Xrcd {
    /// Returns the device's number of the domain; not 0.
    pub(crate) fn number(&self) -> u32 {
        self.xrcdn
    }
}

impl ib::XrcDomain<Hca> for Xrcd {
    fn alloc(dev: &ib::Device<Hca>) -> Result<Self> {
        let hca = dev.data();
        if !hca.config().xrc {
            return Err(crate::errno::unsupported());
        }
        let xrcdn = u32::from_le(hca.execute::<cmd::AllocXrcd>(&Nothing)?.xrcdn);
        if xrcdn == 0 {
            hca.bad_number();
            return Err(EIO);
        }
        Ok(Self {
            hca: hca.clone(),
            xrcdn,
        })
    }

    fn dealloc(&self) -> Result {
        let request = bindings::virtio_rdma_cmd_dealloc_xrcd {
            xrcdn: self.xrcdn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DeallocXrcd>(&request);
        Ok(())
    }
}
