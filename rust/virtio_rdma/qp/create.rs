// SPDX-License-Identifier: GPL-2.0

//! The creation of QPs, with each kind of queue (specification, Queue pairs and Rings).

#![deny(unsafe_code)]

use crate::{
    bindings, cmd,
    errno::unsupported,
    hca::Hca,
    ib::{
        self,
        QpType, //
    },
    region::Region,
    ring::{
        self,
        QpLayout,
        WorkRing, //
    },
    trace::refuse,
    wq::{
        self,
        Transport,
        WorkQueue, //
    },
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The flags that a UD QP may be created with.
const CREATE_FLAGS: u32 = bindings::VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK;

/// Returns the sizes that a QP gets: those that were asked for, and at least 1 of each.
///
/// # Errors
///
/// `EINVAL` beyond the limits.
fn check_cap(hca: &Hca, asked: &bindings::ib_qp_cap) -> Result<bindings::ib_qp_cap> {
    let cap = bindings::ib_qp_cap {
        max_send_wr: asked.max_send_wr.max(1),
        max_recv_wr: asked.max_recv_wr.max(1),
        max_send_sge: asked.max_send_sge.max(1),
        max_recv_sge: asked.max_recv_sge.max(1),
        max_inline_data: asked.max_inline_data,
        max_rdma_ctxs: asked.max_rdma_ctxs,
    };
    let config = hca.config();
    for (reason, asked, limit) in [
        (c"max_send_wr of a QP", cap.max_send_wr, hca.max_qp_wr()),
        (c"max_recv_wr of a QP", cap.max_recv_wr, hca.max_qp_wr()),
        (
            c"max_send_sge of a QP",
            cap.max_send_sge,
            config.max_send_sge,
        ),
        (
            c"max_recv_sge of a QP",
            cap.max_recv_sge,
            config.max_recv_sge,
        ),
        (
            c"max_inline_data of a QP",
            cap.max_inline_data,
            config.max_inline_data,
        ),
    ] {
        if asked > limit {
            return Err(refuse(EINVAL, reason, asked.into(), limit.into()));
        }
    }
    Ok(cap)
}

/// Returns the request of CREATE_QP, and what CREATE_RING_QP has of it.
///
/// # Errors
///
/// `EOPNOTSUPP` for a type or a flag that this driver does not know, `EINVAL` for sizes, or if the PD or
/// a CQ is missing.
fn create_request(
    hca: &Hca,
    attr: &ib::QpInitAttr<'_, Hca>,
) -> Result<(bindings::virtio_rdma_cmd_create_qp, bindings::ib_qp_cap)> {
    let known = match attr.qp_type {
        QpType::Gsi | QpType::Rc | QpType::Ud => true,
        QpType::Uc => hca.config().uc,
        // The kernel's work requests have no member for the SRQ of the peer.
        QpType::XrcIni => hca.config().xrc && attr.udata.is_some(),
        // An XRC target has no queues, and `new_xrc_target` creates it.
        QpType::XrcTgt => false,
    };
    let has_flags = attr.qp_type == QpType::Ud && hca.config().mcast.is_some();
    let flags = if has_flags { CREATE_FLAGS } else { 0 };
    if !known {
        let qp_type = attr.qp_type as u64;
        let reason = c"a QP of a type that the device does not have";
        return Err(refuse(unsupported(), reason, qp_type, 0));
    }
    if attr.create_flags & !flags != 0 {
        let (asked, known) = (attr.create_flags.into(), flags.into());
        return Err(refuse(unsupported(), c"create_flags of a QP", asked, known));
    }
    let mut cap = check_cap(hca, &attr.cap)?;
    let initiator = attr.qp_type == QpType::XrcIni;
    if attr.srq.is_some() && (initiator || attr.qp_type == QpType::Gsi) {
        let qp_type = attr.qp_type as u64;
        return Err(refuse(
            EINVAL,
            c"a QP of a type that has no SRQ",
            qp_type,
            0,
        ));
    }
    if attr.srq.is_some() || initiator {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    let recv_cq = match attr.recv_cq {
        _ if initiator => None,
        cq => Some(cq.ok_or_else(|| missing(c"a QP without a CQ of receives"))?),
    };
    let send_cq = attr.send_cq;
    let send_cq = send_cq.ok_or_else(|| missing(c"a QP without a CQ of sends"))?;
    let pd = attr.pd.ok_or_else(|| missing(c"a QP without a PD"))?;
    let request = bindings::virtio_rdma_cmd_create_qp {
        pdn: pd.number().to_le(),
        qp_type: attr.qp_type as u8,
        sq_sig_type: u8::from(!attr.signal_all),
        create_flags: attr.create_flags as u8,
        max_send_wr: cap.max_send_wr.to_le(),
        max_send_sge: cap.max_send_sge.to_le(),
        send_cqn: cq_number(send_cq).to_le(),
        max_recv_wr: cap.max_recv_wr.to_le(),
        max_recv_sge: cap.max_recv_sge.to_le(),
        recv_cqn: recv_cq.map_or(0, cq_number).to_le(),
        max_inline_data: cap.max_inline_data.to_le(),
        ..bindings::virtio_rdma_cmd_create_qp::zeroed()
    };
    Ok((request, cap))
}

/// Returns the error for an object that is missing.
fn missing(reason: &'static CStr) -> Error {
    refuse(EINVAL, reason, 0, 0)
}

/// Returns the device's number of a CQ.
pub(super) fn cq_number(cq: &ib::Cq<Hca>) -> u32 {
    ib::CompletionQueue::number(&**cq)
}

/// The parts of a new QP.
pub(super) struct Parts {
    /// The number of the QP.
    pub(super) qpn: u32,
    /// The send queue.
    pub(super) sq: WorkQueue,
    /// The receive queue.
    pub(super) rq: WorkQueue,
    /// The memory of the rings, if the queues are rings.
    pub(super) region: Option<Region>,
}

/// Checks the number that the device gave a QP: that of the GSI's is given to no other.
///
/// # Errors
///
/// `EIO`.
fn check_number(qp_type: QpType, qpn: u32) -> Result<u32> {
    let is_gsi = qp_type == QpType::Gsi;
    if qpn == 0 || is_gsi != (qpn == bindings::VIRTIO_RDMA_GSI_QPN) {
        return Err(EIO);
    }
    Ok(qpn)
}

/// Creates a QP with virtqueues.
fn new_virtqueues(
    hca: &Arc<Hca>,
    qp_type: QpType,
    request: &bindings::virtio_rdma_cmd_create_qp,
    cap: &bindings::ib_qp_cap,
) -> Result<Parts> {
    let send_size = wq::send_slot_size(cap.max_send_sge);
    let recv_size = wq::recv_slot_size(cap.max_recv_sge);
    let send_memory = hca.alloc(cap.max_send_wr as usize * send_size)?;
    let recv_memory = hca.alloc(cap.max_recv_wr as usize * recv_size)?;
    let send_entries = wq::new_entries(cap.max_send_wr)?;
    let recv_entries = wq::new_entries(cap.max_recv_wr)?;

    let reply = hca.execute::<cmd::CreateQp>(request)?;
    let qpn = check_number(qp_type, u32::from_le(reply.qpn)).map_err(|_| hca.bad_handle())?;
    let (sq, rq) = queues(hca, qpn);
    let sq = Transport::Virtqueue(hca.lease(sq, send_memory)?);
    let rq = Transport::Virtqueue(hca.lease(rq, recv_memory)?);
    Ok(Parts {
        qpn,
        sq: WorkQueue::new(sq, send_entries, cap.max_send_sge, send_size),
        rq: WorkQueue::new(rq, recv_entries, cap.max_recv_sge, recv_size),
        region: None,
    })
}

/// Returns the virtqueues of a QP: send and receive; `None` if it has rings.
pub(super) fn queues(hca: &Hca, qpn: u32) -> (Option<u32>, Option<u32>) {
    let sq = hca
        .config()
        .sq_queue(qpn)
        .filter(|_| hca.config().rings.is_none());
    (sq, sq.map(|sq| sq + 1))
}

/// Returns the bytes of the entries of a QP's send and receive ring.
fn entry_sizes(qp_type: QpType, cap: &bindings::ib_qp_cap) -> (u32, u32) {
    (
        ring::send_entry_size(qp_type, cap.max_send_sge, cap.max_inline_data),
        ring::recv_entry_size(cap.max_recv_sge),
    )
}

/// Sends CREATE_RING_QP. The QP may have as many work requests outstanding as its rings hold.
fn create_rings(
    hca: &Arc<Hca>,
    attr: &ib::QpInitAttr<'_, Hca>,
    base: &bindings::virtio_rdma_cmd_create_qp,
    region: Region,
    layout: &QpLayout,
    flags: u32,
) -> Result<(u32, Region)> {
    let table = region.page_table()?;
    let (sq, rq) = layout.to_wire();
    let request = bindings::virtio_rdma_cmd_create_ring_qp {
        base: bindings::virtio_rdma_cmd_create_qp {
            max_send_wr: sq.depth,
            max_recv_wr: rq.depth,
            ..*base
        },
        flags: flags.to_le(),
        region: table.to_wire(),
        sq,
        rq,
        srqn: attr.srq_number().unwrap_or(0).to_le(),
        ..bindings::virtio_rdma_cmd_create_ring_qp::zeroed()
    };
    let (reply, region) = region.give::<cmd::CreateRingQp>(table, &request)?;
    let qpn =
        check_number(attr.qp_type, u32::from_le(reply.qpn)).inspect_err(|_| hca.bad_number())?;
    Ok((qpn, region))
}

/// Creates a QP with rings of the kernel.
fn new_rings(
    hca: &Arc<Hca>,
    attr: &ib::QpInitAttr<'_, Hca>,
    base: &bindings::virtio_rdma_cmd_create_qp,
    cap: &mut bindings::ib_qp_cap,
) -> Result<Parts> {
    let srqn = attr.srq_number();
    // The result is at most `max_qp_wr`, which is a power of two.
    cap.max_send_wr = cap.max_send_wr.next_power_of_two();
    if srqn.is_none() {
        cap.max_recv_wr = cap.max_recv_wr.next_power_of_two();
    }
    let layout = QpLayout::new(
        (cap.max_send_wr, cap.max_recv_wr),
        entry_sizes(attr.qp_type, cap),
    );
    let pages = Arc::new(hca.alloc_pages(layout.len())?, GFP_KERNEL)?;
    let sq = WorkQueue::new(
        Transport::Ring(WorkRing::send(pages.clone(), &layout)),
        wq::new_entries(cap.max_send_wr)?,
        cap.max_send_sge,
        0,
    );
    let rq = match srqn {
        Some(_) => WorkQueue::of_program(),
        None => WorkQueue::new(
            Transport::Ring(WorkRing::recv(pages.clone(), &layout)),
            wq::new_entries(cap.max_recv_wr)?,
            cap.max_recv_sge,
            0,
        ),
    };
    let region = Region::of_kernel(hca, pages);
    let flags = bindings::VIRTIO_RDMA_QP_PRIVILEGED;
    let (qpn, region) = create_rings(hca, attr, base, region, &layout, flags)?;
    Ok(Parts {
        qpn,
        sq,
        rq,
        region: Some(region),
    })
}

/// Creates a QP with rings of a program.
///
/// # Errors
///
/// `EINVAL` for rings that are smaller than the sizes asked for or do not lie within the buffer, or
/// a buffer that is not made of whole pages or named twice; those of [`Region::pin`] and [`Region::named`]; what the
/// device says.
fn new_program_rings(
    dev: &ib::Device<Hca>,
    attr: &ib::QpInitAttr<'_, Hca>,
    base: &bindings::virtio_rdma_cmd_create_qp,
    cap: &mut bindings::ib_qp_cap,
    udata: &ib::Udata<'_>,
) -> Result<Parts> {
    let hca = dev.data();
    let mut asked: bindings::virtio_rdma_ureq_create_qp = udata.request()?;
    let mut named = None;
    if let Some((region, length)) = Region::named(dev, udata, ib::BufferOf::Qp, 0)? {
        if asked.buf_addr != 0 || asked.buf_len != 0 {
            let reason = c"rings of a QP that are named twice";
            return Err(refuse(EINVAL, reason, asked.buf_addr, asked.buf_len));
        }
        asked.buf_len = length;
        named = Some(region);
    }
    let layout = QpLayout::of_program(&asked, entry_sizes(attr.qp_type, cap))?;
    // A QP that receives nothing, or from an SRQ, has no receive ring.
    let srqn = attr.srq_number();
    let has_none = srqn.is_some() || attr.qp_type == QpType::XrcIni;
    let no_rq = (attr.cap.max_recv_wr == 0 || has_none) && layout.rq.depth == 0;
    let (sq, rq, max) = (layout.sq.depth, layout.rq.depth, hca.max_qp_wr());
    for (wrong, reason, number, limit) in [
        (
            sq < cap.max_send_wr,
            c"a send ring that is too small",
            sq,
            cap.max_send_wr,
        ),
        (
            rq < cap.max_recv_wr && !no_rq,
            c"a receive ring that is too small",
            rq,
            cap.max_recv_wr,
        ),
        (
            rq != 0 && has_none,
            c"a receive ring of a QP that has none",
            rq,
            0,
        ),
        (
            sq.max(rq) > max,
            c"a ring that is too large",
            sq.max(rq),
            max,
        ),
    ] {
        if wrong {
            return Err(refuse(EINVAL, reason, number.into(), limit.into()));
        }
    }
    if !ring::is_region(asked.buf_addr, asked.buf_len) {
        let reason = c"rings that are not made of whole pages";
        return Err(refuse(EINVAL, reason, asked.buf_addr, asked.buf_len));
    }
    cap.max_send_wr = layout.sq.depth;
    cap.max_recv_wr = layout.rq.depth;
    let region = match named {
        Some(region) => region,
        None => Region::pin(
            dev,
            asked.buf_addr,
            asked.buf_len,
            bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
        )?,
    };
    let (qpn, region) = create_rings(hca, attr, base, region, &layout, 0)?;
    Ok(Parts {
        qpn,
        sq: WorkQueue::of_program(),
        rq: WorkQueue::of_program(),
        region: Some(region),
    })
}

/// Creates an XRC target, which has no queues, and so needs nothing but a QP of the device.
///
/// # Errors
///
/// `EOPNOTSUPP` if the device has no XRC, or for flags; `EINVAL` without a domain, or with an SRQ; what the
/// device says.
pub(super) fn new_xrc_target(hca: &Arc<Hca>, attr: &ib::QpInitAttr<'_, Hca>) -> Result<Parts> {
    attr.udata.as_ref().map_or(Ok(()), ib::Udata::no_request)?;
    if !hca.config().xrc || attr.create_flags != 0 {
        let reason = c"an XRC target of a device without XRC, or with create_flags";
        return Err(refuse(unsupported(), reason, attr.create_flags.into(), 0));
    }
    let xrcd = attr.xrcd;
    let xrcd = xrcd.ok_or_else(|| missing(c"an XRC target without an XRC domain"))?;
    if attr.srq.is_some() {
        return Err(refuse(EINVAL, c"an XRC target with an SRQ", 0, 0));
    }
    let request = bindings::virtio_rdma_cmd_create_ring_qp {
        base: bindings::virtio_rdma_cmd_create_qp {
            qp_type: attr.qp_type as u8,
            ..bindings::virtio_rdma_cmd_create_qp::zeroed()
        },
        xrcdn: xrcd.number().to_le(),
        ..bindings::virtio_rdma_cmd_create_ring_qp::zeroed()
    };
    let reply = hca.execute::<cmd::CreateRingQp>(&request)?;
    let qpn =
        check_number(attr.qp_type, u32::from_le(reply.qpn)).inspect_err(|_| hca.bad_number())?;
    Ok(Parts {
        qpn,
        sq: WorkQueue::of_program(),
        rq: WorkQueue::of_program(),
        region: None,
    })
}

/// Creates a QP with queues, of the sizes that it says.
pub(super) fn new_queues(
    dev: &ib::Device<Hca>,
    attr: &ib::QpInitAttr<'_, Hca>,
) -> Result<(Parts, bindings::ib_qp_cap)> {
    let hca = dev.data();
    let (request, mut cap) = create_request(hca, attr)?;
    let parts = match &attr.udata {
        udata if hca.config().rings.is_none() => {
            udata.as_ref().map_or(Ok(()), ib::Udata::no_request)?;
            new_virtqueues(hca, attr.qp_type, &request, &cap)?
        }
        None => new_rings(hca, attr, &request, &mut cap)?,
        Some(udata) => new_program_rings(dev, attr, &request, &mut cap, udata)?,
    };
    Ok((parts, cap))
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_qp_create)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn number_1_is_the_gsi() {
        assert_eq!(check_number(QpType::Gsi, 1), Ok(1));
        assert_eq!(check_number(QpType::Gsi, 2), Err(EIO));
        assert_eq!(check_number(QpType::Rc, 1), Err(EIO));
        assert_eq!(check_number(QpType::Rc, 2), Ok(2));
        assert_eq!(check_number(QpType::Ud, 0), Err(EIO));
    }
}
