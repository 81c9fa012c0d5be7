// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The limits of a work request on a QP, and of an object that a program creates.
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    causes::{Cause, cause},
    errno::Result,
};

/// The transport service of a QP (`enum ibv_qp_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The sending end of an extended reliable connection.
    XrcInitiator,
    /// The receiving end of an extended reliable connection, which has no queues.
    XrcTarget,
    /// A type that the device does not have; the kernel refuses such a QP.
    Unknown,
}

impl From<ibv_qp_type> for QpType {
    fn from(qp_type: ibv_qp_type) -> Self {
        match qp_type {
            IBV_QPT_RC => Self::Rc,
            IBV_QPT_UC => Self::Uc,
            IBV_QPT_UD => Self::Ud,
            IBV_QPT_XRC_SEND => Self::XrcInitiator,
            IBV_QPT_XRC_RECV => Self::XrcTarget,
            _ => Self::Unknown,
        }
    }
}

/// A set of opcodes of send work requests (`enum ibv_wr_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcodes(u32);

impl Opcodes {
    /// All opcodes.
    pub const ALL: Self = Self(u32::MAX);

    /// Returns the set of the opcodes of a list.
    pub const fn of(list: &[ibv_wr_opcode]) -> Self {
        let mut set = 0;
        let mut at = 0;
        // A constant function has no `for`.
        while at < list.len() {
            set |= 1 << list[at];
            at += 1;
        }
        Self(set)
    }

    /// Returns the opcodes of both sets.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the opcodes that both sets have.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the opcodes that the other set does not have.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns whether the set has an opcode. A program may pass any number.
    #[inline]
    pub const fn has(self, opcode: ibv_wr_opcode) -> bool {
        opcode < u32::BITS && self.0 >> opcode & 1 != 0
    }

    /// Returns the opcodes that the send queue of a QP of a type takes (IBA table 41).
    pub const fn of_type(qp_type: QpType) -> Self {
        const UD: Opcodes = Opcodes::of(&[IBV_WR_SEND, IBV_WR_SEND_WITH_IMM]);
        const UC: Opcodes = UD.union(Opcodes::of(&[
            IBV_WR_RDMA_WRITE,
            IBV_WR_RDMA_WRITE_WITH_IMM,
            IBV_WR_LOCAL_INV,
            IBV_WR_BIND_MW,
        ]));
        const XRC: Opcodes = UC.union(Opcodes::of(&[
            IBV_WR_RDMA_READ,
            IBV_WR_ATOMIC_CMP_AND_SWP,
            IBV_WR_ATOMIC_FETCH_AND_ADD,
            IBV_WR_SEND_WITH_INV,
        ]));
        const RC: Opcodes = XRC.union(Opcodes::of(&[IBV_WR_FLUSH, IBV_WR_ATOMIC_WRITE]));
        match qp_type {
            QpType::Rc => RC,
            QpType::XrcInitiator => XRC,
            QpType::Uc => UC,
            _ => UD,
        }
    }

    /// Returns the `IBV_QP_EX_WITH_*` of the opcodes: what ibv_create_qp_ex(3) takes for a QP that
    /// has them.
    pub fn send_ops_flags(self) -> u64 {
        SEND_OPS
            .iter()
            .filter(|(_, opcode)| self.has(*opcode))
            .fold(0, |flags, (flag, _)| flags | u64::from(*flag))
    }
}

/// The flags that a program may set at the creation of a QP, each with the opcode that the program
/// may then post by calls.
const SEND_OPS: [(u32, ibv_wr_opcode); 12] = [
    (IBV_QP_EX_WITH_SEND, IBV_WR_SEND),
    (IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM),
    (IBV_QP_EX_WITH_RDMA_WRITE, IBV_WR_RDMA_WRITE),
    (IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM),
    (IBV_QP_EX_WITH_RDMA_READ, IBV_WR_RDMA_READ),
    (IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP),
    (IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD),
    (IBV_QP_EX_WITH_LOCAL_INV, IBV_WR_LOCAL_INV),
    (IBV_QP_EX_WITH_BIND_MW, IBV_WR_BIND_MW),
    (IBV_QP_EX_WITH_SEND_WITH_INV, IBV_WR_SEND_WITH_INV),
    (IBV_QP_EX_WITH_FLUSH, IBV_WR_FLUSH),
    (IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_WR_ATOMIC_WRITE),
];

/// The limits of a work request on a QP or SRQ.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Type of the QP.
    pub qp_type: QpType,
    /// Opcodes of send work requests.
    pub opcodes: Opcodes,
    /// Most SGEs of a send work request.
    pub max_send_sge: u32,
    /// Most SGEs of a receive work request.
    pub max_recv_sge: u32,
    /// Most bytes of inline data.
    pub max_inline_data: u32,
}

impl Limits {
    /// Returns the limits of a QP that was created with these attributes.
    pub fn new(attr: &ibv_qp_init_attr_ex) -> Self {
        let qp_type = attr.qp_type.into();
        Self {
            qp_type,
            opcodes: Opcodes::of_type(qp_type),
            max_send_sge: attr.cap.max_send_sge,
            max_recv_sge: attr.cap.max_recv_sge,
            max_inline_data: attr.cap.max_inline_data,
        }
    }

    /// Returns the limits of an SRQ, or of an XRC target, which takes no work requests.
    pub fn of_receives(max_recv_sge: u32) -> Self {
        Self {
            qp_type: QpType::XrcTarget,
            opcodes: Opcodes::of(&[]),
            max_send_sge: 0,
            max_recv_sge,
            max_inline_data: 0,
        }
    }
}

/// The most that an object of the device can have; 0 where the driver does not tell.
#[derive(Clone, Copy)]
pub struct Sizes {
    max_cqe: u32,
    max_qp_wr: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_srq_wr: u32,
    max_srq_sge: u32,
}

impl From<&virtio_rdma_uresp_alloc_ucontext> for Sizes {
    fn from(told: &virtio_rdma_uresp_alloc_ucontext) -> Self {
        Self {
            max_cqe: told.max_cqe,
            max_qp_wr: told.max_qp_wr,
            max_send_sge: told.max_send_sge,
            max_recv_sge: told.max_recv_sge,
            max_srq_wr: told.max_srq_wr,
            max_srq_sge: told.max_srq_sge,
        }
    }
}

/// Returns from the function if a number is above its limit, with a text that has both numbers.
macro_rules! most {
    ($number:expr, $limit:expr, $text:literal) => {
        if $limit != 0 && $number > $limit {
            return Err(cause!(EINVAL, $text, $number, $limit));
        }
    };
}

impl Sizes {
    /// Checks how many entries a program asks for in a CQ. Each check comes before the provider allocates
    /// rings, so that no absurd number ends in ENOMEM.
    ///
    /// # Errors
    ///
    /// EINVAL if the device has fewer, here and below.
    pub fn check_cq(&self, cqe: u32) -> Result<(), Cause> {
        most!(cqe, self.max_cqe, "a CQ of %u CQEs is wanted, and the most is %u");
        Ok(())
    }

    /// Checks the capabilities of a QP that a program asks for. With an SRQ the QP has no receive
    /// queue.
    pub fn check_qp(&self, cap: &ibv_qp_cap, has_srq: bool) -> Result<(), Cause> {
        most!(cap.max_send_wr, self.max_qp_wr, "a QP of %u sends is wanted, and the most is %u");
        let sges = cap.max_send_sge;
        most!(sges, self.max_send_sge, "a QP of %u SGEs for a send is wanted, and the most is %u");
        if has_srq {
            return Ok(());
        }
        most!(cap.max_recv_wr, self.max_qp_wr, "a QP of %u receives is wanted, and the most is %u");
        let sges = cap.max_recv_sge;
        most!(
            sges,
            self.max_recv_sge,
            "a QP of %u SGEs for a receive is wanted, and the most is %u"
        );
        Ok(())
    }

    /// Checks the sizes of an SRQ that a program asks for.
    pub fn check_srq(&self, max_wr: u32, max_sge: u32) -> Result<(), Cause> {
        most!(max_wr, self.max_srq_wr, "an SRQ of %u receives is wanted, and the most is %u");
        most!(
            max_sge,
            self.max_srq_sge,
            "an SRQ of %u SGEs for a receive is wanted, and the most is %u"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;

    /// Each limit is checked by itself; a QP with an SRQ has no receive queue.
    #[test]
    fn sizes_within_the_device() {
        let sizes = Sizes::from(&virtio_rdma_uresp_alloc_ucontext {
            max_cqe: 1,
            max_qp_wr: 2,
            max_send_sge: 3,
            max_recv_sge: 4,
            max_srq_wr: 5,
            max_srq_sge: 6,
            ..Default::default()
        });
        let unknown = Sizes::from(&Default::default());
        let most = ibv_qp_cap {
            max_send_wr: 2,
            max_recv_wr: 2,
            max_send_sge: 3,
            max_recv_sge: 4,
            max_inline_data: 0,
        };
        assert!(sizes.check_cq(1).is_ok() && sizes.check_srq(5, 6).is_ok());
        assert!(sizes.check_qp(&most, false).is_ok());
        for (cap, has_srq, fits) in [
            (ibv_qp_cap { max_send_wr: 3, ..most }, false, false),
            (ibv_qp_cap { max_send_sge: 4, ..most }, true, false),
            (ibv_qp_cap { max_recv_wr: 3, ..most }, false, false),
            (ibv_qp_cap { max_recv_wr: 3, ..most }, true, true),
            (ibv_qp_cap { max_recv_sge: 5, ..most }, false, false),
            (ibv_qp_cap { max_recv_sge: 5, ..most }, true, true),
        ] {
            assert_eq!(sizes.check_qp(&cap, has_srq).is_ok(), fits, "{cap:?}");
            assert!(unknown.check_qp(&cap, has_srq).is_ok());
        }
        assert_eq!(sizes.check_cq(2).map_err(Cause::errno), Err(Errno::EINVAL));
        assert_eq!(sizes.check_srq(6, 6).map_err(Cause::errno), Err(Errno::EINVAL));
        assert_eq!(sizes.check_srq(5, 7).map_err(Cause::errno), Err(Errno::EINVAL));
        assert!(unknown.check_cq(u32::MAX).is_ok() && unknown.check_srq(u32::MAX, 1).is_ok());
    }

    #[test]
    fn types_of_qps() {
        for (number, qp_type) in [
            (IBV_QPT_RC, QpType::Rc),
            (IBV_QPT_UC, QpType::Uc),
            (IBV_QPT_UD, QpType::Ud),
            (IBV_QPT_XRC_SEND, QpType::XrcInitiator),
            (IBV_QPT_XRC_RECV, QpType::XrcTarget),
            (IBV_QPT_RAW_PACKET, QpType::Unknown),
        ] {
            assert!(QpType::from(number) == qp_type, "{number}");
        }
    }

    /// Each opcode that a program may post by calls has a flag of its own.
    #[test]
    fn send_ops_flags() {
        let all = SEND_OPS.iter().fold(0, |all, (flag, _)| all | flag);
        assert_eq!(all.count_ones() as usize, SEND_OPS.len());
        for (flag, opcode) in SEND_OPS {
            let only = Opcodes::of(&[opcode]);
            assert_eq!(only.send_ops_flags(), flag.into());
            assert_eq!(Opcodes::ALL.without(only).send_ops_flags(), u64::from(all & !flag));
        }
        assert_eq!(Opcodes::of(&[]).send_ops_flags(), 0);
    }

    /// A program may ask for any number, and no number above 31 is in a set.
    #[test]
    fn opcodes_of_a_set() {
        let set = Opcodes::of(&[IBV_WR_SEND, 31]);
        for opcode in (0..70).chain([u32::MAX]) {
            assert_eq!(set.has(opcode), [IBV_WR_SEND, 31].contains(&opcode));
            assert_eq!(Opcodes::ALL.has(opcode), opcode < 32);
        }
    }
}
