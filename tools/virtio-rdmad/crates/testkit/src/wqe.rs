// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work requests, as they are in a virtqueue or in a ring, and completions.

use std::mem::offset_of;

use abi::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::command::Gid;

/// Returns an SGE.
pub fn sge(addr: u64, length: u32, lkey: u32) -> virtio_rdma_sge {
    virtio_rdma_sge { addr, length, lkey }
}

/// Returns the bytes of a receive work request, which are the same in a virtqueue and in a ring.
pub fn receive(wr_id: u64, sges: &[virtio_rdma_sge]) -> Vec<u8> {
    let header = virtio_rdma_rq_wqe { num_sge: sges.len() as u32, reserved_04: 0, wr_id };
    [header.as_bytes(), sges.as_bytes()].concat()
}

/// Returns the bytes of a doorbell.
pub fn doorbell(number: u32, queue: u32) -> Vec<u8> {
    virtio_rdma_doorbell { number, queue }.as_bytes().to_vec()
}

/// Returns `wr_id`, status and opcode of a CQE.
pub fn brief(cqe: Option<virtio_rdma_cqe>) -> Option<(u64, u32, u32)> {
    cqe.map(|cqe| (cqe.wr_id, cqe.status.into(), cqe.opcode.into()))
}

/// Returns what a CQE of a ring has in common with one of a virtqueue.
pub fn shortened(cqe: &virtio_rdma_ring_cqe) -> virtio_rdma_cqe {
    let mut short = virtio_rdma_cqe::new_zeroed();
    (short.wr_id, short.status, short.opcode) = (cqe.wr_id, cqe.status, cqe.opcode);
    (short.byte_len, short.ex, short.qp_num) = (cqe.byte_len, cqe.ex, cqe.qp_num);
    (short.src_qp, short.wc_flags) = (cqe.src_qp, cqe.wc_flags);
    (short.pkey_index, short.sl, short.port_num) = (cqe.pkey_index, cqe.sl, cqe.port_num);
    short.vlan_id = cqe.vlan_id;
    short
}

/// A send work request.
#[derive(Clone)]
pub struct Send {
    /// The number that comes back in the CQE.
    pub wr_id: u64,
    /// The operation, `VIRTIO_RDMA_WR_*`.
    pub opcode: u32,
    /// The flags, `VIRTIO_RDMA_SEND_*`.
    pub flags: u32,
    /// The immediate data, or the key to invalidate.
    pub imm: u32,
    /// The memory that it names.
    pub sges: Vec<virtio_rdma_sge>,
    /// The union `wr` of a work request in a virtqueue; of BIND_MW and FLUSH, which only rings have, the entry.
    pub wr: Vec<u8>,
    /// The data that it carries in place of SGEs.
    pub inline: Option<Vec<u8>>,
    /// The number of the SRQ for which a message of an XRC initiator is.
    pub srqn: Option<u32>,
}

impl Send {
    /// Returns a work request that ends with a CQE.
    pub fn new(wr_id: u64, opcode: u32, sges: &[virtio_rdma_sge]) -> Self {
        let flags = VIRTIO_RDMA_SEND_SIGNALED;
        let (sges, wr) = (sges.to_vec(), Vec::new());
        Self { wr_id, opcode, flags, imm: 0, sges, wr, inline: None, srqn: None }
    }

    /// Names memory of the peer.
    #[must_use]
    pub fn rdma(mut self, remote_addr: u64, rkey: u32) -> Self {
        self.wr = WrRdma { remote_addr, rkey, reserved_0c: 0 }.as_bytes().to_vec();
        self
    }

    /// Names a word of the peer, and what an atomic operation does with it.
    #[must_use]
    pub fn atomic(mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) -> Self {
        let atomic = WrAtomic { remote_addr, compare_add, swap, rkey, reserved_1c: 0 };
        self.wr = atomic.as_bytes().to_vec();
        self
    }

    /// Sends a datagram to this QP. The PD is that of the sender's address handle.
    #[must_use]
    pub fn ud(mut self, dgid: Gid, qpn: u32, qkey: u32, pdn: u32) -> Self {
        let mut ud = WrUd::new_zeroed();
        (ud.remote_qpn, ud.remote_qkey) = (qpn, qkey);
        (ud.av.port, ud.av.pdn, ud.av.dgid, ud.av.hop_limit) = (1, pdn, dgid, 64);
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Changes the address vector of a datagram.
    fn with_av(mut self, change: impl FnOnce(&mut virtio_rdma_av)) -> Self {
        let mut ud = WrUd::read_from_bytes(&self.wr).expect("a datagram");
        change(&mut ud.av);
        self.wr = ud.as_bytes().to_vec();
        self
    }

    /// Sends the datagram with this traffic class and service level.
    #[must_use]
    pub fn in_class(self, (traffic_class, sl): (u8, u8)) -> Self {
        let class = u32::from(sl) << 28 | u32::from(traffic_class) << 20;
        self.with_av(|av| av.sl_tclass_flowlabel = class)
    }

    /// Sends the datagram to this MAC address.
    #[must_use]
    pub fn at_mac(self, dmac: [u8; 6]) -> Self {
        self.with_av(|av| av.dmac = dmac)
    }

    /// Sends the datagram with this hop limit.
    #[must_use]
    pub fn hops(self, hop_limit: u8) -> Self {
        self.with_av(|av| av.hop_limit = hop_limit)
    }

    /// Sends the datagram from another entry of the GID table.
    #[must_use]
    pub fn from(self, gid_index: u8) -> Self {
        self.with_av(|av| av.gid_index = gid_index)
    }

    /// Carries these bytes in place of SGEs. Only rings have inline data.
    #[must_use]
    pub fn inline(mut self, bytes: &[u8]) -> Self {
        self.flags |= VIRTIO_RDMA_SEND_INLINE;
        self.inline = Some(bytes.to_vec());
        self
    }

    /// Sends the message to an SRQ at the other end of an XRC.
    #[must_use]
    pub fn srqn(mut self, srqn: u32) -> Self {
        self.srqn = Some(srqn);
        self
    }

    /// Returns a REG_MR.
    pub fn reg_mr(wr_id: u64, reg: WrReg) -> Self {
        Self { wr: reg.as_bytes().to_vec(), ..Self::new(wr_id, VIRTIO_RDMA_WR_REG_MR, &[]) }
    }

    /// Returns a BIND_MW, which only rings have.
    pub fn bind_mw(wr_id: u64, bind: virtio_rdma_ring_bind_wqe) -> Self {
        Self { wr: bind.as_bytes().to_vec(), ..Self::new(wr_id, VIRTIO_RDMA_WR_BIND_MW, &[]) }
    }

    /// Sets the key that the work request invalidates.
    #[must_use]
    pub fn invalidate(self, key: u32) -> Self {
        self.imm(key)
    }

    /// Sets the immediate data.
    #[must_use]
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = imm;
        self
    }

    /// Sets all flags.
    #[must_use]
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    /// Returns a structure that `wr` begins with. What is not there is zeros.
    fn wr<T: FromBytes>(&self) -> T {
        let padded = [self.wr.as_slice(), &[0; size_of::<virtio_rdma_sq_wqe>()]].concat();
        T::read_from_prefix(&padded).expect("no structure is longer").0
    }

    /// Returns the work request as an entry of a ring.
    pub fn entry(&self) -> Vec<u8> {
        let (opcode, send_flags) = (self.opcode as u8, self.flags as u16);
        let num_sge = self.sges.len() as u8;
        let sges = self.sges.as_bytes();
        match self.opcode {
            VIRTIO_RDMA_WR_REG_MR => {
                let wr: WrReg = self.wr();
                let mut entry = virtio_rdma_ring_reg_wqe::new_zeroed();
                (entry.wr_id, entry.opcode, entry.send_flags) = (self.wr_id, opcode, send_flags);
                (entry.access, entry.npages, entry.key) = (wr.access, wr.npages as u16, wr.key);
                (entry.iova, entry.pages, entry.length) = (wr.iova, wr.pages, wr.length);
                entry.page_shift = wr.page_shift;
                return entry.as_bytes().to_vec();
            }
            VIRTIO_RDMA_WR_FLUSH => {
                let mut entry: virtio_rdma_ring_flush_wqe = self.wr();
                (entry.wr_id, entry.opcode, entry.send_flags) = (self.wr_id, opcode, send_flags);
                entry.num_sge = num_sge;
                return [entry.as_bytes(), sges].concat();
            }
            VIRTIO_RDMA_WR_BIND_MW => {
                let mut entry: virtio_rdma_ring_bind_wqe = self.wr();
                (entry.wr_id, entry.opcode, entry.send_flags) = (self.wr_id, opcode, send_flags);
                entry.num_sge = num_sge;
                return [entry.as_bytes(), sges].concat();
            }
            _ => {}
        }
        let data = self.inline.as_deref().unwrap_or_default();
        let mut header = virtio_rdma_ring_sq_wqe::new_zeroed();
        (header.wr_id, header.opcode, header.send_flags) = (self.wr_id, opcode, send_flags);
        (header.num_sge, header.ex, header.inline_len) = (num_sge, self.imm, data.len() as u16);
        if self.wr.len() == size_of::<WrUd>() {
            return [self.datagram(&header).as_bytes(), sges, data].concat();
        }
        if self.wr.len() == size_of::<WrAtomic>() {
            let wr: WrAtomic = self.wr();
            (header.remote_addr, header.rkey) = (wr.remote_addr, wr.rkey);
            (header.compare_add, header.swap) = (wr.compare_add, wr.swap);
        } else {
            let wr: WrRdma = self.wr();
            (header.remote_addr, header.rkey) = (wr.remote_addr, wr.rkey);
        }
        if let Some(remote_srqn) = self.srqn {
            let reserved_34 = [0; 12];
            let xrc = virtio_rdma_ring_xrc_wqe { base: header, remote_srqn, reserved_34 };
            return [xrc.as_bytes(), sges, data].concat();
        }
        [header.as_bytes(), sges, data].concat()
    }

    /// Returns the entry of a datagram, with what all entries begin with.
    fn datagram(&self, header: &virtio_rdma_ring_sq_wqe) -> virtio_rdma_ring_ud_wqe {
        let wr: WrUd = self.wr();
        let mut entry = virtio_rdma_ring_ud_wqe::new_zeroed();
        let common = offset_of!(virtio_rdma_ring_ud_wqe, remote_qpn);
        entry.as_mut_bytes()[..common].copy_from_slice(&header.as_bytes()[..common]);
        (entry.remote_qpn, entry.remote_qkey, entry.av) = (wr.remote_qpn, wr.remote_qkey, wr.av);
        entry
    }

    /// Returns the work request as the bytes of a buffer of a virtqueue.
    pub fn bytes(&self) -> Vec<u8> {
        let mut header = virtio_rdma_sq_wqe::new_zeroed();
        header.num_sge = self.sges.len() as u32;
        header.send_flags = self.flags;
        header.opcode = self.opcode;
        header.wr_id = self.wr_id;
        header.ex = self.imm;
        let at = offset_of!(virtio_rdma_sq_wqe, wr);
        header.as_mut_bytes()[at..at + self.wr.len()].copy_from_slice(&self.wr);
        [header.as_bytes(), self.sges.as_bytes()].concat()
    }
}
