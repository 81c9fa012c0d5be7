// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The states of a QP, and which attributes go with each transition.
//!
//! Source: IBA 10.3 and 11.2.5.2; the table agrees with the kernel's
//! `ib_modify_qp_is_ok()` (drivers/infiniband/core/verbs.c).

use abi::{
    virtio_rdma_qp_state, VIRTIO_RDMA_QP_ACCESS_FLAGS as ACCESS, VIRTIO_RDMA_QP_ALT_PATH as ALT,
    VIRTIO_RDMA_QP_AV as AV, VIRTIO_RDMA_QP_CUR_STATE as CUR, VIRTIO_RDMA_QP_DEST_QPN as DEST,
    VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY as NOTIFY, VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC as DEST_RD,
    VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC as RD, VIRTIO_RDMA_QP_MIN_RNR_TIMER as RNR_TIMER,
    VIRTIO_RDMA_QP_PATH_MIG_STATE as MIG, VIRTIO_RDMA_QP_PATH_MTU as MTU,
    VIRTIO_RDMA_QP_PKEY_INDEX as PKEY, VIRTIO_RDMA_QP_PORT as PORT, VIRTIO_RDMA_QP_QKEY as QKEY,
    VIRTIO_RDMA_QP_RATE_LIMIT as RATE, VIRTIO_RDMA_QP_RETRY_CNT as RETRY,
    VIRTIO_RDMA_QP_RNR_RETRY as RNR_RETRY, VIRTIO_RDMA_QP_RQ_PSN as RQ_PSN,
    VIRTIO_RDMA_QP_SQ_PSN as SQ_PSN, VIRTIO_RDMA_QP_STATE as STATE,
    VIRTIO_RDMA_QP_TIMEOUT as TIMEOUT,
};

use crate::base::qp_type::QpType;

/// The state of a QP, `enum virtio_rdma_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QpState {
    /// No work request is posted or under way.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to receive and to send.
    Rts = 3,
    /// The send queue drains.
    Sqd = 4,
    /// A send failed; receives go on (UC, UD).
    Sqe = 5,
    /// Everything posted is flushed.
    Err = 6,
}

impl QpState {
    /// All states.
    pub(crate) const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];

    /// Returns the state of this number.
    pub(crate) fn from_abi(value: u8) -> Option<Self> {
        Some(match virtio_rdma_qp_state::from(value) {
            abi::VIRTIO_RDMA_QPS_RESET => Self::Reset,
            abi::VIRTIO_RDMA_QPS_INIT => Self::Init,
            abi::VIRTIO_RDMA_QPS_RTR => Self::Rtr,
            abi::VIRTIO_RDMA_QPS_RTS => Self::Rts,
            abi::VIRTIO_RDMA_QPS_SQD => Self::Sqd,
            abi::VIRTIO_RDMA_QPS_SQE => Self::Sqe,
            abi::VIRTIO_RDMA_QPS_ERR => Self::Err,
            _ => return None,
        })
    }

    /// Returns whether the QP takes messages in this state.
    pub(crate) fn receives(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }
}

/// Returns the attributes that a transition requires, and those that it allows besides.
/// `None`: there is no such transition.
fn attributes(from: QpState, to: QpState, kind: QpType) -> Option<(u32, u32)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    use QpType::{Gsi, Rc, Uc, Ud, XrcIni, XrcTgt};
    let basic = match kind {
        Rc | Uc | XrcIni | XrcTgt => PKEY | PORT | ACCESS,
        Ud => PKEY | PORT | QKEY,
        Gsi => PKEY | QKEY,
    };
    let running = match kind {
        Rc | XrcTgt => CUR | ALT | ACCESS | RNR_TIMER | MIG,
        Uc | XrcIni => CUR | ALT | ACCESS | MIG,
        Ud | Gsi => CUR | QKEY,
    };
    // The attributes that may change in SQD: `path` at both ends of a reliable connection, `requests` at its requester,
    // and `answers` at its responder.
    let path = PORT | AV | TIMEOUT | ALT | ACCESS | PKEY | MIG;
    let (requests, answers) = (RETRY | RNR_RETRY | RD, DEST_RD | RNR_TIMER);
    Some(match (from, to) {
        (_, Reset) | (Init | Rtr | Rts | Sqd | Sqe | Err, Err) => (0, 0),
        (Reset, Init) => (basic, 0),
        (Init, Init) => (0, basic),
        (Init, Rtr) => match kind {
            Rc | XrcTgt => (AV | MTU | DEST | RQ_PSN | DEST_RD | RNR_TIMER, ALT | ACCESS | PKEY),
            Uc | XrcIni => (AV | MTU | DEST | RQ_PSN, ALT | ACCESS | PKEY),
            Ud | Gsi => (0, PKEY | QKEY),
        },
        (Rtr, Rts) => match kind {
            Rc | XrcIni => (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD, running),
            XrcTgt => (TIMEOUT | SQ_PSN, running),
            Uc | Ud | Gsi => (SQ_PSN, running),
        },
        (Rts | Sqd, Rts) => (0, running),
        (Rts, Sqd) => (0, NOTIFY),
        (Sqd, Sqd) => match kind {
            Rc => (0, path | requests | answers),
            XrcIni => (0, path | requests),
            XrcTgt => (0, path | answers),
            Uc => (0, AV | ALT | ACCESS | PKEY | MIG),
            Ud | Gsi => (0, PKEY | QKEY),
        },
        (Sqe, Rts) => match kind {
            Rc | XrcIni | XrcTgt => (0, 0),
            Uc => (0, CUR | ACCESS),
            Ud | Gsi => (0, CUR | QKEY),
        },
        _ => return None,
    })
}

/// The reason why a transition is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There is no such transition.
    Transition,
    /// An attribute is missing, or one is given that does not belong here.
    Attributes,
}

/// Does what [`attributes`] does for the way from RESET over INIT to RTR in one transition.
fn attributes_to_rtr(kind: QpType) -> Option<(u32, u32)> {
    let (basic, _) = attributes(QpState::Reset, QpState::Init, kind)?;
    let (required, allowed) = attributes(QpState::Init, QpState::Rtr, kind)?;
    Some((basic | required, allowed))
}

/// Checks a transition and the mask of attributes that comes with it. `at_once`: a QP goes from RESET to RTR at once.
pub(crate) fn check(
    from: QpState,
    to: QpState,
    kind: QpType,
    mask: u32,
    at_once: bool,
) -> Result<(), Refused> {
    let found = match (from, to) {
        (QpState::Reset, QpState::Rtr) if at_once => attributes_to_rtr(kind),
        _ => attributes(from, to, kind),
    };
    let (required, allowed) = found.ok_or(Refused::Transition)?;
    let current_ok = matches!(from, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
    if mask & CUR != 0 && !current_ok {
        return Err(Refused::Transition);
    }
    if mask & required != required || mask & !(required | allowed | STATE | RATE) != 0 {
        return Err(Refused::Attributes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTR: u32 = AV | MTU | DEST | RQ_PSN | DEST_RD | RNR_TIMER;

    fn check(from: QpState, to: QpState, kind: QpType, mask: u32) -> Result<(), Refused> {
        super::check(from, to, kind, mask, false)
    }

    #[test]
    fn reset_to_rtr_needs_what_both_steps_need() {
        use QpState::{Reset, Rtr};
        let check = |kind, mask| super::check(Reset, Rtr, kind, STATE | mask, true);
        let basic = PKEY | PORT | ACCESS;
        assert_eq!(check(QpType::Rc, basic | RTR), Ok(()));
        assert_eq!(check(QpType::Rc, RTR), Err(Refused::Attributes));
        assert_eq!(check(QpType::Rc, basic), Err(Refused::Attributes));
        assert_eq!(check(QpType::Rc, basic | RTR | QKEY), Err(Refused::Attributes));
        assert_eq!(check(QpType::Uc, basic | AV | MTU | DEST | RQ_PSN), Ok(()));
        assert_eq!(check(QpType::Ud, PKEY | PORT | QKEY), Ok(()));
        assert_eq!(check(QpType::Gsi, PKEY | QKEY), Ok(()));
        let without = super::check(Reset, Rtr, QpType::Rc, STATE | basic | RTR, false);
        assert_eq!(without, Err(Refused::Transition));
    }

    #[test]
    fn the_usual_way_of_a_connection() {
        use QpState::{Init, Reset, Rtr, Rts, Sqd};
        let rc = QpType::Rc;
        assert_eq!(check(Reset, Init, rc, STATE | PKEY | PORT | ACCESS), Ok(()));
        assert_eq!(check(Init, Rtr, rc, STATE | RTR), Ok(()));
        let rts = STATE | TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD;
        assert_eq!(check(Rtr, Rts, rc, rts), Ok(()));
        assert_eq!(check(Rts, Sqd, rc, STATE | NOTIFY), Ok(()));
        assert_eq!(check(Sqd, Rts, rc, STATE | CUR), Ok(()));
    }

    #[test]
    fn the_ends_of_an_extended_connection() {
        use QpState::{Init, Rtr, Rts, Sqd, Sqe};
        let (ini, tgt) = (QpType::XrcIni, QpType::XrcTgt);
        let rtr = STATE | AV | MTU | DEST | RQ_PSN;
        assert_eq!(check(Init, Rtr, ini, rtr), Ok(()));
        assert_eq!(check(Init, Rtr, tgt, rtr), Err(Refused::Attributes));
        assert_eq!(check(Init, Rtr, tgt, STATE | RTR), Ok(()));
        assert_eq!(check(Init, Rtr, ini, STATE | RTR), Err(Refused::Attributes));
        let rts = STATE | TIMEOUT | SQ_PSN;
        assert_eq!(check(Rtr, Rts, tgt, rts), Ok(()));
        assert_eq!(check(Rtr, Rts, ini, rts), Err(Refused::Attributes));
        assert_eq!(check(Rtr, Rts, ini, rts | RETRY | RNR_RETRY | RD), Ok(()));
        assert_eq!(check(Sqd, Sqd, ini, RETRY | AV), Ok(()));
        assert_eq!(check(Sqd, Sqd, tgt, RETRY | AV), Err(Refused::Attributes));
        assert_eq!(check(Sqd, Sqd, tgt, DEST_RD | RNR_TIMER), Ok(()));
        assert_eq!(check(Sqe, Rts, ini, STATE | CUR), Err(Refused::Attributes));
    }

    #[test]
    fn every_state_leads_to_reset_and_but_one_to_err() {
        for from in 0..=6 {
            let from = QpState::from_abi(from).unwrap();
            assert_eq!(check(from, QpState::Reset, QpType::Ud, STATE), Ok(()));
            let to_err = check(from, QpState::Err, QpType::Ud, STATE);
            assert_eq!(to_err.is_ok(), from != QpState::Reset);
        }
    }

    #[test]
    fn refuses_missing_and_surplus_attributes() {
        use QpState::{Init, Reset, Rts};
        let rc = QpType::Rc;
        assert_eq!(check(Reset, Init, rc, STATE | PKEY), Err(Refused::Attributes));
        let surplus = STATE | PKEY | PORT | ACCESS | QKEY;
        assert_eq!(check(Reset, Init, rc, surplus), Err(Refused::Attributes));
        assert_eq!(check(Reset, Rts, rc, STATE), Err(Refused::Transition));
        assert_eq!(check(Init, Init, rc, CUR), Err(Refused::Transition));
    }
}
