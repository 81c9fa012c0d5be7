// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration of a QP, which is fixed when the QP is created.

use serde::{Deserialize, Serialize};

use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::queue::wqe::WqConfig;

/// The configuration of a QP.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct QpConfig {
    /// The configuration of its queues, with its transport service.
    pub wq: WqConfig,
    /// Protection domain; of an XRC target, that of `srq`.
    pub pdn: u32,
    /// XRC domain of an XRC target.
    pub xrcdn: u32,
    /// The place of the SRQ that it receives from; of an XRC target, the one that
    /// the message under way names.
    pub srq: Option<Slot>,
    /// Protection domain of receives: the SRQ's, or its own.
    pub recv_pdn: u32,
    /// CQ of the send queue.
    pub send_cq: u16,
    /// CQ of the receive queue; of an XRC target, that of `srq`.
    pub recv_cq: u16,
    /// Whether every send work request makes a CQE.
    pub signal_all: bool,
    /// Whether the kernel owns the queues, and not a program: REG_MR names any
    /// page of the guest.
    pub privileged: bool,
    /// Whether datagrams of the QP to a multicast group do not come back to it.
    pub block_loopback: bool,
}

impl QpConfig {
    /// Returns the configuration of an XRC target, which has nothing of its own but its domain.
    pub fn xrc_target(xrcdn: u32) -> Self {
        Self {
            wq: WqConfig { kind: QpType::XrcTgt, max_send_sge: 0, max_recv_sge: 0, max_inline: 0 },
            pdn: 0,
            xrcdn,
            srq: None,
            recv_pdn: 0,
            send_cq: 0,
            recv_cq: 0,
            signal_all: false,
            privileged: false,
            block_loopback: false,
        }
    }

    /// Returns the protection domain that the QP belongs to.
    pub fn own_pdn(&self) -> Option<u32> {
        (self.wq.kind != QpType::XrcTgt).then_some(self.pdn)
    }

    /// Returns the CQs of the QP's own queues.
    pub fn own_cqs(&self) -> impl Iterator<Item = u16> {
        let send = (self.wq.kind != QpType::XrcTgt).then_some(self.send_cq);
        let receive = (!self.wq.kind.is_xrc()).then_some(self.recv_cq);
        send.into_iter().chain(receive)
    }

    /// Returns the number of the SRQ that CQEs of receives name: an XRC target's, otherwise 0.
    pub fn named_srqn(&self) -> u32 {
        match (self.wq.kind, self.srq) {
            (QpType::XrcTgt, Some(srq)) => srq.number(),
            _ => 0,
        }
    }
}
