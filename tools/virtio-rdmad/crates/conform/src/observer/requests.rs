// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of the control queue: how long their requests and replies are, and which bytes are reserved.

use std::mem::offset_of;
use std::ops::Range;

use abi::*;

/// A command.
pub struct Command {
    /// The number.
    pub number: u32,
    /// The name.
    pub name: &'static str,
    /// The bytes of the request structure.
    pub request: usize,
    /// The bytes of the reply structure.
    pub reply: usize,
    /// The reserved bytes of the request structure.
    pub reserved: Vec<Range<usize>>,
}

/// A kind of object that requests name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A PD.
    Pd,
    /// A CQ with a ring.
    Cq,
}

/// Returns where a request structure has the numbers of objects of this kind.
fn places(kind: Kind, command: u32) -> &'static [usize] {
    type Qp = virtio_rdma_cmd_create_qp;
    match (kind, command) {
        (Kind::Pd, VIRTIO_RDMA_CMD_DESTROY_PD) => &[offset_of!(virtio_rdma_cmd_destroy_pd, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_GET_DMA_MR) => &[offset_of!(virtio_rdma_cmd_get_dma_mr, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_CREATE_MR) => &[offset_of!(virtio_rdma_cmd_create_mr, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_REG_USER_MR) => &[offset_of!(virtio_rdma_cmd_reg_user_mr, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_ALLOC_MW) => &[offset_of!(virtio_rdma_cmd_alloc_mw, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_CREATE_SRQ) => &[offset_of!(virtio_rdma_cmd_create_srq, pdn)],
        (Kind::Pd, VIRTIO_RDMA_CMD_CREATE_QP | VIRTIO_RDMA_CMD_CREATE_RING_QP) => {
            &[offset_of!(Qp, pdn)]
        }
        (Kind::Cq, VIRTIO_RDMA_CMD_CREATE_RING_QP) => {
            &[offset_of!(Qp, send_cqn), offset_of!(Qp, recv_cqn)]
        }
        (Kind::Cq, VIRTIO_RDMA_CMD_DESTROY_CQ) => &[offset_of!(virtio_rdma_cmd_destroy_cq, cqn)],
        (Kind::Cq, VIRTIO_RDMA_CMD_RESIZE_CQ) => &[offset_of!(virtio_rdma_cmd_resize_cq, cqn)],
        (Kind::Cq, VIRTIO_RDMA_CMD_MODIFY_CQ) => &[offset_of!(virtio_rdma_cmd_modify_cq, cqn)],
        _ => &[],
    }
}

/// Returns the numbers of objects of this kind that a request names.
pub fn named(kind: Kind, command: u32, body: &[u8]) -> Vec<u32> {
    let number = |at: &usize| {
        let word = body.get(*at..at + 4).and_then(|word| word.try_into().ok());
        word.map(u32::from_le_bytes)
    };
    places(kind, command).iter().filter_map(number).collect()
}

/// `base` is at the beginning of CREATE_RING_QP, so that both have the same places.
const _: () = assert!(offset_of!(virtio_rdma_cmd_create_ring_qp, base) == 0);

/// Returns the command of a row: its name in the header, its structures, and its reserved members with the next one.
macro_rules! command {
    ($name:ident, $number:ident, $request:ty, $reply:ty $(, $reserved:ident .. $($next:ident)?)*) => {
        Command {
            number: $number,
            name: stringify!($name),
            request: size_of::<$request>(),
            reply: size_of::<$reply>(),
            reserved: vec![$(
                offset_of!($request, $reserved)..command!(@end $request $(, $next)?)
            ),*],
        }
    };
    (@end $request:ty, $next:ident) => { offset_of!($request, $next) };
    (@end $request:ty) => { size_of::<$request>() };
}

/// Moves ranges to the place at which their structure begins.
fn at(
    place: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> impl Iterator<Item = Range<usize>> {
    ranges.into_iter().map(move |range| range.start + place..range.end + place)
}

/// Returns the reserved bytes of an address vector of MODIFY_QP.
fn of_ah() -> Vec<Range<usize>> {
    type Ah = virtio_rdma_ah_attr;
    let route =
        offset_of!(Ah, grh) + offset_of!(virtio_rdma_global_route, reserved_17)..offset_of!(Ah, sl);
    vec![route, offset_of!(Ah, reserved_22)..size_of::<Ah>()]
}

/// Returns the reserved bytes of MODIFY_QP.
fn of_modify() -> Vec<Range<usize>> {
    type Attr = virtio_rdma_qp_attr;
    let own = offset_of!(Attr, reserved_27)..offset_of!(Attr, rate_limit);
    let attr = std::iter::once(own)
        .chain(at(offset_of!(Attr, ah_attr), of_ah()))
        .chain(at(offset_of!(Attr, alt_ah_attr), of_ah()));
    at(offset_of!(virtio_rdma_cmd_modify_qp, attr), attr).collect()
}

/// Returns the reserved bytes of a region at this place.
fn of_region(place: usize) -> impl Iterator<Item = Range<usize>> {
    type Region = virtio_rdma_ring_region;
    at(place, std::iter::once(offset_of!(Region, reserved_0c)..size_of::<Region>()))
}

/// Returns the reserved bytes of the shape of a ring at this place.
fn of_shape(place: usize) -> impl Iterator<Item = Range<usize>> {
    type Shape = virtio_rdma_ring_shape;
    at(place, std::iter::once(offset_of!(Shape, reserved_0c)..size_of::<Shape>()))
}

/// Returns the reserved bytes of CREATE_QP.
fn of_create_qp() -> Vec<Range<usize>> {
    type Qp = virtio_rdma_cmd_create_qp;
    vec![
        offset_of!(Qp, reserved_07)..offset_of!(Qp, max_send_wr),
        offset_of!(Qp, reserved)..size_of::<Qp>(),
    ]
}

/// Returns the commands that name regions, whose reserved bytes are in other structures.
fn with_regions() -> Vec<Command> {
    type Qp = virtio_rdma_cmd_create_ring_qp;
    type Srq = virtio_rdma_cmd_create_srq;
    let mut cq = command!(
        CREATE_RING_CQ,
        VIRTIO_RDMA_CMD_CREATE_RING_CQ,
        virtio_rdma_cmd_create_ring_cq,
        virtio_rdma_rsp_create_cq
    );
    cq.reserved.extend(of_region(offset_of!(virtio_rdma_cmd_create_ring_cq, region)));
    let mut resize_cq = command!(
        RESIZE_CQ,
        VIRTIO_RDMA_CMD_RESIZE_CQ,
        virtio_rdma_cmd_resize_cq,
        virtio_rdma_rsp_resize_cq
    );
    resize_cq.reserved.extend(of_region(offset_of!(virtio_rdma_cmd_resize_cq, region)));
    let mut qp = command!(
        CREATE_RING_QP,
        VIRTIO_RDMA_CMD_CREATE_RING_QP,
        Qp,
        virtio_rdma_rsp_create_qp,
        reserved..
    );
    qp.reserved.extend(at(offset_of!(Qp, base), of_create_qp()));
    qp.reserved.extend(of_region(offset_of!(Qp, region)));
    qp.reserved.extend(of_shape(offset_of!(Qp, sq)).chain(of_shape(offset_of!(Qp, rq))));
    let mut srq = command!(
        CREATE_SRQ,
        VIRTIO_RDMA_CMD_CREATE_SRQ,
        Srq,
        virtio_rdma_rsp_create_srq,
        reserved..
    );
    srq.reserved.extend(of_region(offset_of!(Srq, region)));
    srq.reserved.extend(of_shape(offset_of!(Srq, ring)));
    let mut resize_srq = command!(
        RESIZE_SRQ,
        VIRTIO_RDMA_CMD_RESIZE_SRQ,
        virtio_rdma_cmd_resize_srq,
        virtio_rdma_rsp_resize_srq,
        reserved_24..
    );
    resize_srq.reserved.extend(of_region(offset_of!(virtio_rdma_cmd_resize_srq, region)));
    resize_srq.reserved.extend(of_shape(offset_of!(virtio_rdma_cmd_resize_srq, ring)));
    vec![cq, resize_cq, qp, srq, resize_srq]
}

/// Returns the commands of QPs.
fn of_qps() -> Vec<Command> {
    let mut create = command!(
        CREATE_QP,
        VIRTIO_RDMA_CMD_CREATE_QP,
        virtio_rdma_cmd_create_qp,
        virtio_rdma_rsp_create_qp
    );
    create.reserved = of_create_qp();
    let mut modify = command!(MODIFY_QP, VIRTIO_RDMA_CMD_MODIFY_QP, virtio_rdma_cmd_modify_qp, ());
    modify.reserved = of_modify();
    vec![
        create,
        modify,
        command!(
            QUERY_QP,
            VIRTIO_RDMA_CMD_QUERY_QP,
            virtio_rdma_cmd_query_qp,
            virtio_rdma_rsp_query_qp
        ),
        command!(DESTROY_QP, VIRTIO_RDMA_CMD_DESTROY_QP, virtio_rdma_cmd_destroy_qp, ()),
        command!(
            ATTACH_MCAST,
            VIRTIO_RDMA_CMD_ATTACH_MCAST,
            virtio_rdma_cmd_mcast,
            (),
            reserved_16..
        ),
        command!(
            DETACH_MCAST,
            VIRTIO_RDMA_CMD_DETACH_MCAST,
            virtio_rdma_cmd_mcast,
            (),
            reserved_16..
        ),
    ]
}

/// Returns the commands of memory.
fn of_memory() -> Vec<Command> {
    type Reg = virtio_rdma_cmd_reg_user_mr;
    let reserved = offset_of!(Reg, reserved_2e)..size_of::<Reg>();
    let mut rereg = command!(REREG_MR, VIRTIO_RDMA_CMD_REREG_MR, virtio_rdma_cmd_rereg_mr, ());
    rereg.reserved.extend(at(offset_of!(virtio_rdma_cmd_rereg_mr, mr), std::iter::once(reserved)));
    vec![
        rereg,
        command!(CREATE_PD, VIRTIO_RDMA_CMD_CREATE_PD, (), virtio_rdma_rsp_create_pd),
        command!(DESTROY_PD, VIRTIO_RDMA_CMD_DESTROY_PD, virtio_rdma_cmd_destroy_pd, ()),
        command!(
            GET_DMA_MR,
            VIRTIO_RDMA_CMD_GET_DMA_MR,
            virtio_rdma_cmd_get_dma_mr,
            virtio_rdma_rsp_mr
        ),
        command!(
            CREATE_MR,
            VIRTIO_RDMA_CMD_CREATE_MR,
            virtio_rdma_cmd_create_mr,
            virtio_rdma_rsp_mr
        ),
        command!(
            MAP_MR_SG,
            VIRTIO_RDMA_CMD_MAP_MR_SG,
            virtio_rdma_cmd_map_mr_sg,
            virtio_rdma_rsp_map_mr_sg
        ),
        command!(REG_USER_MR, VIRTIO_RDMA_CMD_REG_USER_MR, Reg, virtio_rdma_rsp_mr, reserved_2e..),
        command!(DEREG_MR, VIRTIO_RDMA_CMD_DEREG_MR, virtio_rdma_cmd_dereg_mr, ()),
        command!(
            ALLOC_MW,
            VIRTIO_RDMA_CMD_ALLOC_MW,
            virtio_rdma_cmd_alloc_mw,
            virtio_rdma_rsp_alloc_mw,
            reserved_05..
        ),
        command!(DEALLOC_MW, VIRTIO_RDMA_CMD_DEALLOC_MW, virtio_rdma_cmd_dealloc_mw, ()),
    ]
}

/// Returns the other commands.
fn others() -> Vec<Command> {
    vec![
        command!(
            QUERY_PORT,
            VIRTIO_RDMA_CMD_QUERY_PORT,
            virtio_rdma_cmd_query_port,
            virtio_rdma_rsp_query_port
        ),
        command!(
            CREATE_CQ,
            VIRTIO_RDMA_CMD_CREATE_CQ,
            virtio_rdma_cmd_create_cq,
            virtio_rdma_rsp_create_cq
        ),
        command!(DESTROY_CQ, VIRTIO_RDMA_CMD_DESTROY_CQ, virtio_rdma_cmd_destroy_cq, ()),
        command!(MODIFY_CQ, VIRTIO_RDMA_CMD_MODIFY_CQ, virtio_rdma_cmd_modify_cq, ()),
        command!(REQ_NOTIFY_CQ, VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ, virtio_rdma_cmd_req_notify, ()),
        command!(
            QUERY_PKEY,
            VIRTIO_RDMA_CMD_QUERY_PKEY,
            virtio_rdma_cmd_query_pkey,
            virtio_rdma_rsp_query_pkey,
            reserved_06..
        ),
        command!(ADD_GID, VIRTIO_RDMA_CMD_ADD_GID, virtio_rdma_cmd_add_gid, ()),
        command!(DEL_GID, VIRTIO_RDMA_CMD_DEL_GID, virtio_rdma_cmd_del_gid, (), reserved_02..port),
        command!(MODIFY_SRQ, VIRTIO_RDMA_CMD_MODIFY_SRQ, virtio_rdma_cmd_modify_srq, ()),
        command!(
            QUERY_SRQ,
            VIRTIO_RDMA_CMD_QUERY_SRQ,
            virtio_rdma_cmd_query_srq,
            virtio_rdma_rsp_query_srq
        ),
        command!(DESTROY_SRQ, VIRTIO_RDMA_CMD_DESTROY_SRQ, virtio_rdma_cmd_destroy_srq, ()),
        command!(
            QUERY_COUNTERS,
            VIRTIO_RDMA_CMD_QUERY_COUNTERS,
            virtio_rdma_cmd_query_counters,
            virtio_rdma_rsp_query_counters
        ),
        command!(ALLOC_XRCD, VIRTIO_RDMA_CMD_ALLOC_XRCD, (), virtio_rdma_rsp_alloc_xrcd),
        command!(DEALLOC_XRCD, VIRTIO_RDMA_CMD_DEALLOC_XRCD, virtio_rdma_cmd_dealloc_xrcd, ()),
    ]
}

/// Returns all commands.
pub fn all() -> Vec<Command> {
    [with_regions(), of_qps(), of_memory(), others()].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_of_the_header_is_here_once() {
        let header = include_str!("../../../../../../include/uapi/linux/virtio_rdma.h");
        let of_header = header.matches("\tVIRTIO_RDMA_CMD_").count();
        let mut numbers: Vec<u32> = all().iter().map(|command| command.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), of_header);
        assert_eq!(all().len(), of_header);
    }

    #[test]
    fn each_reserved_member_of_a_request_is_here() {
        let bytes = |name: &str| -> usize {
            let of = all().into_iter().find(|command| command.name == name).unwrap();
            of.reserved.iter().map(ExactSizeIterator::len).sum()
        };
        assert_eq!(bytes("MODIFY_QP"), 1 + 2 * 7);
        assert_eq!(bytes("CREATE_RING_QP"), 1 + 32 + 24 + 4 + 2 * 4);
        assert_eq!((bytes("CREATE_SRQ"), bytes("RESIZE_SRQ")), (16 + 8, 4 + 8));
        assert_eq!((bytes("REG_USER_MR"), bytes("REREG_MR")), (2, 2));
        assert_eq!((bytes("ALLOC_MW"), bytes("DEL_GID"), bytes("QUERY_PKEY")), (3, 2, 2));
        assert_eq!((bytes("CREATE_RING_CQ"), bytes("RESIZE_CQ")), (4, 4));
    }
}
