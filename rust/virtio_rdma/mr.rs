// SPDX-License-Identifier: GPL-2.0

//! Memory regions.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd,
    dma::Buffer,
    hca::Hca,
    ib,
    umem::Umem, //
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

/// Bytes of an entry of a page table.
const ENTRY: usize = size_of::<u64>();

/// A memory region.
pub(crate) struct Mr {
    hca: Arc<Hca>,
    mrn: u32,
    lkey: u32,
    rkey: u32,
    umem: Option<Umem>,
}

impl Mr {
    fn new(hca: &Arc<Hca>, reply: &bindings::virtio_rdma_rsp_mr, umem: Option<Umem>) -> Self {
        Self {
            hca: hca.clone(),
            mrn: u32::from_le(reply.mrn),
            lkey: u32::from_le(reply.lkey),
            rkey: u32::from_le(reply.rkey),
            umem,
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.hca.is_broken() {
            if let Some(umem) = self.umem.take() {
                self.hca.quarantine(umem, None);
            }
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

/// Writes the addresses of the memory's blocks to a new table.
fn page_table(hca: &Hca, umem: &Umem) -> Result<(Buffer, u32)> {
    let npages = umem.num_blocks();
    let mut table = hca.alloc(npages.checked_mul(ENTRY).ok_or(EINVAL)?)?;
    let mut count = 0;

    for block in umem.blocks() {
        table.write(count * ENTRY, &block.to_le())?;
        count += 1;
    }
    if count != npages {
        return Err(EINVAL);
    }
    Ok((table, u32::try_from(npages)?))
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

        let umem = Umem::pin(dev, memory.start, memory.length, memory.access)?;
        let (table, npages) = page_table(hca, &umem)?;
        let request = bindings::virtio_rdma_cmd_reg_user_mr {
            pdn: pd.number().to_le(),
            access_flags: access_flags.to_le(),
            start: memory.start.to_le(),
            length: memory.length.to_le(),
            virt_addr: memory.virt_addr.to_le(),
            pages: table.span(0, npages as usize * ENTRY)?.addr.to_le(),
            npages: npages.to_le(),
            reserved_2c: 0,
        };
        match hca.execute::<cmd::RegUserMr>(&request) {
            Ok(reply) => Ok(Self::new(hca, &reply, Some(umem))),
            Err(error) => {
                // Of a device whose reply makes no sense nobody knows whether it has the MR.
                if error == EIO || hca.is_broken() {
                    hca.quarantine(umem, Some(table));
                }
                Err(error)
            }
        }
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
}
