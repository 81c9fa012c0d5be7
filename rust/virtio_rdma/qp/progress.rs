// SPDX-License-Identifier: GPL-2.0

//! The state of a QP, and the attributes of INIT that its device does not have yet.
//!
//! A device with `VIRTIO_RDMA_F_RESET_TO_RTR` lets a QP go from RESET to RTR by one command (specification, Queue
//! pairs: Transitions). So the driver keeps the attributes with which a consumer moves a QP to INIT, and sends them
//! with those of RTR. Whatever else needs the QP of the device in INIT has them sent first.

use crate::{
    bindings,
    ib::{
        QpState,
        QpType, //
    },
    wire, //
};

/// The attributes that go with INIT.
const OF_INIT: u32 = bindings::VIRTIO_RDMA_QP_PKEY_INDEX
    | bindings::VIRTIO_RDMA_QP_PORT
    | bindings::VIRTIO_RDMA_QP_QKEY
    | bindings::VIRTIO_RDMA_QP_ACCESS_FLAGS;

/// The access that a device lets a QP grant. The driver has removed FLUSH from the attributes of a device without it.
const PLAIN_ACCESS: u32 = bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_READ
    | bindings::VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC
    | bindings::VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL
    | bindings::VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;

/// Attributes of MODIFY_QP.
#[derive(Clone, Copy)]
pub(super) struct Change {
    /// The values.
    pub(super) attr: wire::QpAttr,
    /// The attributes that change, `VIRTIO_RDMA_QP_*`.
    pub(super) mask: u32,
}

impl Change {
    /// Returns whether no device refuses this change of a QP in RESET or INIT to INIT. A device may have more than one
    /// reason to refuse another one, and is asked.
    fn is_plain_init(&self) -> bool {
        let has = |bit| self.mask & bit != 0;
        let access = u32::from_le(self.attr.qp_access_flags);

        self.mask & !(OF_INIT | bindings::VIRTIO_RDMA_QP_STATE) == 0
            && (!has(bindings::VIRTIO_RDMA_QP_PORT) || self.attr.port_num == 1)
            && (!has(bindings::VIRTIO_RDMA_QP_PKEY_INDEX) || self.attr.pkey_index == 0)
            && (!has(bindings::VIRTIO_RDMA_QP_ACCESS_FLAGS) || access & !PLAIN_ACCESS == 0)
    }

    /// Returns this change together with what an earlier one, to INIT, names besides.
    fn after(mut self, earlier: &Self) -> Self {
        let adds = |bit| earlier.mask & !self.mask & bit != 0;
        let (attr, from) = (&mut self.attr, &earlier.attr);

        if adds(bindings::VIRTIO_RDMA_QP_PKEY_INDEX) {
            attr.pkey_index = from.pkey_index;
        }
        if adds(bindings::VIRTIO_RDMA_QP_PORT) {
            attr.port_num = from.port_num;
        }
        if adds(bindings::VIRTIO_RDMA_QP_QKEY) {
            attr.qkey = from.qkey;
        }
        if adds(bindings::VIRTIO_RDMA_QP_ACCESS_FLAGS) {
            attr.qp_access_flags = from.qp_access_flags;
        }
        self.mask |= earlier.mask;
        self
    }
}

/// What MODIFY_QP left a QP in.
pub(super) struct Progress {
    /// The state that consumers see.
    pub(super) state: QpState,
    /// The change to INIT that the device has not got. The QP of the device is in RESET.
    kept: Option<Change>,
}

impl Progress {
    /// Returns the progress of a new QP.
    pub(super) fn new() -> Self {
        Self {
            state: QpState::Reset,
            kept: None,
        }
    }

    /// Keeps a change to `next` if it is one to INIT that can be sent later. Returns whether it does. The device has
    /// `VIRTIO_RDMA_F_RESET_TO_RTR`.
    pub(super) fn keep(&mut self, kind: QpType, next: QpState, change: &Change) -> bool {
        let is_reset = self.state == QpState::Reset || self.kept.is_some();
        // The RDMA core makes the only QP for the GSI once.
        let keeps =
            is_reset && next == QpState::Init && kind != QpType::Gsi && change.is_plain_init();

        if keeps {
            let mut change = match &self.kept {
                Some(kept) => change.after(kept),
                None => *change,
            };
            // A change that does not name the state may have any value there.
            change.attr.qp_state = QpState::Init as u8;
            change.mask |= bindings::VIRTIO_RDMA_QP_STATE;
            self.kept = Some(change);
        }
        keeps
    }

    /// Returns the change to INIT that has to be sent before a change to `next`, if there is one.
    pub(super) fn due_before(&self, next: QpState, change: &Change) -> Option<Change> {
        let joins = next == QpState::Rtr && change.mask & bindings::VIRTIO_RDMA_QP_CUR_STATE == 0;
        self.kept.filter(|_| next != QpState::Reset && !joins)
    }

    /// Returns the change to INIT that the device has not got.
    pub(super) fn kept(&self) -> Option<Change> {
        self.kept
    }

    /// Returns what is sent for a change to `next`: one to RTR goes together with that to INIT, if that is kept.
    pub(super) fn join(&self, next: QpState, change: Change) -> Change {
        match &self.kept {
            Some(kept) if next == QpState::Rtr => change.after(kept),
            _ => change,
        }
    }

    /// Notes that the device has what it was to have, or does not need it any more.
    pub(super) fn sent(&mut self) {
        self.kept = None;
    }
}

#[cfg(virtio_rdma_kunit)]
#[kernel::macros::kunit_tests(virtio_rdma_qp_progress)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use kernel::prelude::*;

    const STATE: u32 = bindings::VIRTIO_RDMA_QP_STATE;
    const PKEY: u32 = bindings::VIRTIO_RDMA_QP_PKEY_INDEX;
    const PORT: u32 = bindings::VIRTIO_RDMA_QP_PORT;
    const ACCESS: u32 = bindings::VIRTIO_RDMA_QP_ACCESS_FLAGS;
    const CUR: u32 = bindings::VIRTIO_RDMA_QP_CUR_STATE;

    fn init(access: u32, port: u8, mask: u32) -> Change {
        let attr = wire::QpAttr {
            qp_state: QpState::Init as u8,
            qp_access_flags: access.to_le(),
            port_num: port,
            ..wire::QpAttr::zeroed()
        };
        Change { attr, mask }
    }

    fn rtr(mask: u32) -> Change {
        let attr = wire::QpAttr {
            qp_state: QpState::Rtr as u8,
            rq_psn: 77u32.to_le(),
            ..wire::QpAttr::zeroed()
        };
        let mask = STATE | bindings::VIRTIO_RDMA_QP_RQ_PSN | mask;
        Change { attr, mask }
    }

    #[test]
    fn init_goes_with_rtr() {
        let mut progress = Progress::new();
        let basic = STATE | PKEY | PORT | ACCESS;
        assert!(progress.keep(QpType::Rc, QpState::Init, &init(2, 1, basic)));
        progress.state = QpState::Init;
        // A second one changes what it names, which need not be the state.
        let mut second = init(6, 0, ACCESS);
        second.attr.qp_state = QpState::Err as u8;
        assert!(progress.keep(QpType::Rc, QpState::Init, &second));
        let kept = progress.kept();
        assert!(kept.is_some_and(|kept| kept.attr.qp_state == QpState::Init as u8));
        let change = rtr(0);
        assert!(progress.due_before(QpState::Rtr, &change).is_none());
        let joined = progress.join(QpState::Rtr, change);
        assert_eq!(joined.mask, change.mask | basic);
        assert_eq!(u32::from_le(joined.attr.qp_access_flags), 6);
        assert_eq!(joined.attr.port_num, 1);
        assert_eq!(u32::from_le(joined.attr.rq_psn), 77);
        assert_eq!(joined.attr.qp_state, QpState::Rtr as u8);
        progress.sent();
        progress.state = QpState::Rtr;
        assert!(!progress.keep(QpType::Rc, QpState::Init, &init(0, 1, basic)));
    }

    #[test]
    fn rtr_has_its_own_attributes() {
        let mut progress = Progress::new();
        assert!(progress.keep(QpType::Rc, QpState::Init, &init(6, 1, STATE | ACCESS)));
        let joined = progress.join(QpState::Rtr, rtr(ACCESS));
        assert_eq!(joined.attr.qp_access_flags, 0);
    }

    #[test]
    fn datagrams_have_a_key() {
        let mut progress = Progress::new();
        let mut change = init(0, 1, STATE | PKEY | PORT | bindings::VIRTIO_RDMA_QP_QKEY);
        change.attr.qkey = 0x1111u32.to_le();
        assert!(progress.keep(QpType::Ud, QpState::Init, &change));
        let joined = progress.join(QpState::Rtr, rtr(0));
        assert_eq!(u32::from_le(joined.attr.qkey), 0x1111);
        assert_eq!(joined.mask & !rtr(0).mask, change.mask & !STATE);
    }

    #[test]
    fn init_is_sent_before_all_else() {
        let mut progress = Progress::new();
        assert!(progress.keep(QpType::Ud, QpState::Init, &init(0, 1, STATE | PORT)));
        // A change to INIT that is not kept is for a device in INIT.
        assert!(progress
            .due_before(QpState::Init, &init(1 << 5, 1, ACCESS))
            .is_some());
        assert!(progress.due_before(QpState::Err, &rtr(0)).is_some());
        assert!(progress.due_before(QpState::Rtr, &rtr(CUR)).is_some());
        assert!(progress.due_before(QpState::Reset, &rtr(0)).is_none());
    }

    #[test]
    fn a_device_is_asked_if_it_may_refuse() {
        let keeps = |kind, change| Progress::new().keep(kind, QpState::Init, &change);
        let basic = STATE | PKEY | PORT | ACCESS;
        assert!(keeps(QpType::Rc, init(15, 1, basic)));
        assert!(keeps(QpType::Rc, init(15 | 3 << 8, 1, basic)));
        assert!(!keeps(QpType::Gsi, init(0, 1, basic)));
        assert!(!keeps(QpType::Rc, init(0, 2, basic)));
        assert!(!keeps(QpType::Rc, init(1 << 5, 1, basic)));
        assert!(!keeps(QpType::Rc, init(0, 1, basic | CUR)));
    }
}
