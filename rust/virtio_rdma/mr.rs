// SPDX-License-Identifier: GPL-2.0

//! Memory regions.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    hca::Hca,
    ib,
    region::Region, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The access flags that an MR may have. Optional flags that the device does not know are dropped.
const ACCESS: u32 = bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_READ
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;

/// Flags that only allow, or only hint: dropping them changes nothing that a consumer sees.
const OPTIONAL: u32 = bindings::ib_access_flags_IB_ACCESS_OPTIONAL
    | bindings::VIRTIO_RDMA_ACCESS_RELAXED_ORDERING
    | bindings::VIRTIO_RDMA_ACCESS_HUGETLB;

/// A memory region.
pub(crate) struct Mr {
    hca: Arc<Hca>,
    mrn: u32,
    lkey: u32,
    rkey: u32,
    _region: Option<Region>,
}

impl Mr {
    fn new(hca: &Arc<Hca>, reply: &bindings::virtio_rdma_rsp_mr, region: Option<Region>) -> Self {
        Self {
            hca: hca.clone(),
            mrn: u32::from_le(reply.mrn),
            lkey: u32::from_le(reply.lkey),
            rkey: u32::from_le(reply.rkey),
            _region: region,
        }
    }
}

/// The flags that the device gets.
///
/// # Errors
///
/// `EOPNOTSUPP` for a flag that is neither known nor optional.
fn check_access(access: u32) -> Result<u32> {
    if access & !(ACCESS | OPTIONAL) != 0 {
        return Err(crate::errno::unsupported());
    }
    Ok(access & ACCESS)
}

impl ib::MemoryRegion<Hca> for Mr {
    fn get_dma(pd: &ib::Pd<Hca>, access: u32) -> Result<Self> {
        let request = bindings::virtio_rdma_cmd_get_dma_mr {
            pdn: pd.number().to_le(),
            access_flags: check_access(access)?.to_le(),
        };
        let reply = pd.hca().execute::<cmd::GetDmaMr>(&request)?;

        Ok(Self::new(pd.hca(), &reply, None))
    }

    fn reg_user(dev: &ib::Device<Hca>, pd: &ib::Pd<Hca>, memory: &ib::UserMemory) -> Result<Self> {
        let hca = dev.data();
        let access_flags = check_access(memory.access)?;
        if memory.length == 0 || memory.length > hca.config().max_mr_size {
            return Err(EINVAL);
        }

        let region = Region::pin(dev, memory.start, memory.length, memory.access)?;
        let table = region.page_table()?;
        let request = bindings::virtio_rdma_cmd_reg_user_mr {
            pdn: pd.number().to_le(),
            access_flags: access_flags.to_le(),
            start: memory.start.to_le(),
            length: memory.length.to_le(),
            virt_addr: memory.virt_addr.to_le(),
            pages: table.addr().to_le(),
            npages: table.npages().to_le(),
            reserved_2c: 0,
        };
        let (reply, region) = region.give::<cmd::RegUserMr>(table, &request)?;
        Ok(Self::new(hca, &reply, Some(region)))
    }

    fn dereg(&self) -> Result {
        let request = bindings::virtio_rdma_cmd_dereg_mr {
            mrn: self.mrn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DeregMr>(&request);
        Ok(())
    }

    fn keys(&self) -> (u32, u32) {
        (self.lkey, self.rkey)
    }

    fn details(&self, details: &mut ib::Details<'_>) -> Result {
        details.put(c"mrn", self.mrn)
    }
}
