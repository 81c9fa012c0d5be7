// SPDX-License-Identifier: GPL-2.0

//! Memory windows (specification, Memory windows). The driver makes and destroys them. Programs bind
//! them by work requests in their own rings.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::Hca,
    ib, //
    trace::refuse,
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A memory window.
pub(crate) struct Mw {
    hca: Arc<Hca>,
    mwn: u32,
    rkey: u32,
}

impl ib::MemoryWindow<Hca> for Mw {
    fn alloc(pd: &ib::Pd<Hca>, mw_type: u32) -> Result<Self> {
        let hca = pd.hca();
        if hca.config().max_mw == 0 {
            let error = crate::errno::unsupported();
            return Err(refuse(
                error,
                c"a memory window of a device that has none",
                0,
                0,
            ));
        }
        *pd.windows().lock() += 1;
        let request = bindings::virtio_rdma_cmd_alloc_mw {
            pdn: pd.number().to_le(),
            type_: mw_type as u8,
            reserved_05: [0; 3],
        };
        let reply = hca
            .execute::<cmd::AllocMw>(&request)
            .inspect_err(|_| *pd.windows().lock() -= 1)?;
        Ok(Self {
            hca: hca.clone(),
            mwn: u32::from_le(reply.mwn),
            rkey: u32::from_le(reply.rkey),
        })
    }

    fn dealloc(&self, pd: &ib::Pd<Hca>) -> Result {
        let request = bindings::virtio_rdma_cmd_dealloc_mw {
            mwn: self.mwn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DeallocMw>(&request);
        *pd.windows().lock() -= 1;
        Ok(())
    }

    fn key(&self) -> u32 {
        self.rkey
    }
}
