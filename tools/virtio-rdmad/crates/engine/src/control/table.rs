// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of control commands (specification, Control queue: Commands).

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::call::Call;
use super::objects::Objects;
use super::prepare::Prepared;
use super::status::Status;
use super::{cq, gid, mcast, modify_qp, mr, mw, pd, port, qp, srq, xrcd};
use crate::base::features::Features;
use crate::transport::hca::Hca;

/// A command as the control queue sees it: without types.
pub(super) struct Command {
    /// Returns whether driver and device agreed on the features that the command needs.
    pub is_offered: fn(&Features) -> bool,
    /// Begins with its long part, if the request is long enough and asks for nothing impossible.
    pub prepare: fn(&Hca, &Objects, &[u8]) -> Option<Prepared>,
    /// Carries it out; returns the bytes of the reply.
    pub handle: Handle,
}

/// Carries out a command by its request and the room for its reply; returns the bytes of the reply.
type Handle = fn(&mut Call<'_>, &[u8], &mut [u8]) -> Result<usize, Status>;

/// Takes a request apart, checks the room for its reply, and only then has it
/// done. Returns the bytes of the reply.
fn exchange<Q: FromBytes, R: IntoBytes + Immutable>(
    call: &mut Call<'_>,
    request: &[u8],
    reply: &mut [u8],
    handler: fn(&mut Call<'_>, &Q) -> Result<R, Status>,
) -> Result<usize, Status> {
    let (request, _) = Q::read_from_prefix(request).map_err(|_| Status::Length)?;
    let room = reply.get_mut(..size_of::<R>()).ok_or(Status::Length)?;
    let answer = handler(call, &request)?;
    room.copy_from_slice(answer.as_bytes());
    Ok(room.len())
}

/// Takes a request apart and begins with its long part.
fn begin<Q: FromBytes>(
    hca: &Hca,
    objects: &Objects,
    request: &[u8],
    prepare: fn(&Hca, &Objects, &Q) -> Option<Prepared>,
) -> Option<Prepared> {
    prepare(hca, objects, &Q::read_from_prefix(request).ok()?.0)
}

/// Declares the commands: opcode, request and reply, the feature that a command needs, the function
/// that prepares it, and its handler.
macro_rules! commands {
    ($($opcode:ident ($request:ident) -> $reply:ident
        $(, if $feature:ident)? $(, prepared by $prepare:path)? => $handler:path;)*) => {
        /// Returns the command of an opcode, `enum virtio_rdma_cmd`.
        pub(super) fn find(opcode: u32) -> Option<&'static Command> {
            Some(match opcode {
                $(abi::$opcode => {
                    const COMMAND: Command = Command {
                        is_offered: commands!(@feature $($feature)?),
                        prepare: commands!(@prepare $request $($prepare)?),
                        handle: |call, request, reply| {
                            exchange::<commands!(@type $request), commands!(@type $reply)>(
                                call, request, reply, $handler,
                            )
                        },
                    };
                    &COMMAND
                })*
                // MAP_MR_SG among them: REG_MR brings the pages.
                _ => return None,
            })
        }
    };
    (@type nothing) => { () };
    (@type $name:ident) => { abi::$name };
    (@feature) => { |_| true };
    (@feature $feature:ident) => { Features::$feature };
    (@prepare $request:ident) => { |_, _, _| None };
    (@prepare $request:ident $prepare:path) => {
        |hca, objects, request| begin::<abi::$request>(hca, objects, request, $prepare)
    };
}

commands! {
    VIRTIO_RDMA_CMD_QUERY_PORT (virtio_rdma_cmd_query_port) -> virtio_rdma_rsp_query_port
        => port::query;
    VIRTIO_RDMA_CMD_QUERY_PKEY (virtio_rdma_cmd_query_pkey) -> virtio_rdma_rsp_query_pkey
        => port::query_pkey;
    VIRTIO_RDMA_CMD_QUERY_COUNTERS (virtio_rdma_cmd_query_counters) -> virtio_rdma_rsp_query_counters,
        if has_counters => port::query_counters;
    VIRTIO_RDMA_CMD_ADD_GID (virtio_rdma_cmd_add_gid) -> nothing => gid::add;
    VIRTIO_RDMA_CMD_DEL_GID (virtio_rdma_cmd_del_gid) -> nothing => gid::del;

    VIRTIO_RDMA_CMD_CREATE_PD (nothing) -> virtio_rdma_rsp_create_pd => pd::create;
    VIRTIO_RDMA_CMD_DESTROY_PD (virtio_rdma_cmd_destroy_pd) -> nothing => pd::destroy;
    VIRTIO_RDMA_CMD_ALLOC_XRCD (nothing) -> virtio_rdma_rsp_alloc_xrcd, if has_xrc => xrcd::alloc;
    VIRTIO_RDMA_CMD_DEALLOC_XRCD (virtio_rdma_cmd_dealloc_xrcd) -> nothing,
        if has_xrc => xrcd::dealloc;

    VIRTIO_RDMA_CMD_GET_DMA_MR (virtio_rdma_cmd_get_dma_mr) -> virtio_rdma_rsp_mr => mr::get_dma;
    VIRTIO_RDMA_CMD_CREATE_MR (virtio_rdma_cmd_create_mr) -> virtio_rdma_rsp_mr,
        if has_fast_reg => mr::create;
    VIRTIO_RDMA_CMD_REG_USER_MR (virtio_rdma_cmd_reg_user_mr) -> virtio_rdma_rsp_mr,
        prepared by mr::prepare_reg_user => mr::reg_user;
    VIRTIO_RDMA_CMD_REREG_MR (virtio_rdma_cmd_rereg_mr) -> nothing,
        if has_rereg_mr, prepared by mr::prepare_rereg => mr::rereg;
    VIRTIO_RDMA_CMD_DEREG_MR (virtio_rdma_cmd_dereg_mr) -> nothing => mr::dereg;
    VIRTIO_RDMA_CMD_ALLOC_MW (virtio_rdma_cmd_alloc_mw) -> virtio_rdma_rsp_alloc_mw,
        if has_mws => mw::alloc;
    VIRTIO_RDMA_CMD_DEALLOC_MW (virtio_rdma_cmd_dealloc_mw) -> nothing, if has_mws => mw::dealloc;

    VIRTIO_RDMA_CMD_CREATE_CQ (virtio_rdma_cmd_create_cq) -> virtio_rdma_rsp_create_cq,
        if has_virtqueues => cq::create;
    VIRTIO_RDMA_CMD_CREATE_RING_CQ (virtio_rdma_cmd_create_ring_cq) -> virtio_rdma_rsp_create_cq,
        if has_rings, prepared by cq::prepare_ring => cq::create_ring;
    VIRTIO_RDMA_CMD_RESIZE_CQ (virtio_rdma_cmd_resize_cq) -> virtio_rdma_rsp_resize_cq,
        if has_cq_resize, prepared by cq::prepare_resize => cq::resize;
    VIRTIO_RDMA_CMD_MODIFY_CQ (virtio_rdma_cmd_modify_cq) -> nothing,
        if has_cq_moderation => cq::modify;
    VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ (virtio_rdma_cmd_req_notify) -> nothing,
        if has_virtqueues => cq::req_notify;
    VIRTIO_RDMA_CMD_DESTROY_CQ (virtio_rdma_cmd_destroy_cq) -> nothing => cq::destroy;

    VIRTIO_RDMA_CMD_CREATE_SRQ (virtio_rdma_cmd_create_srq) -> virtio_rdma_rsp_create_srq,
        if has_srqs, prepared by srq::prepare_create => srq::create;
    VIRTIO_RDMA_CMD_MODIFY_SRQ (virtio_rdma_cmd_modify_srq) -> nothing, if has_srqs => srq::modify;
    VIRTIO_RDMA_CMD_QUERY_SRQ (virtio_rdma_cmd_query_srq) -> virtio_rdma_rsp_query_srq,
        if has_srqs => srq::query;
    VIRTIO_RDMA_CMD_RESIZE_SRQ (virtio_rdma_cmd_resize_srq) -> virtio_rdma_rsp_resize_srq,
        if has_srq_resize, prepared by srq::prepare_resize => srq::resize;
    VIRTIO_RDMA_CMD_DESTROY_SRQ (virtio_rdma_cmd_destroy_srq) -> nothing,
        if has_srqs, prepared by srq::prepare_destroy => srq::destroy;

    VIRTIO_RDMA_CMD_CREATE_QP (virtio_rdma_cmd_create_qp) -> virtio_rdma_rsp_create_qp,
        if has_virtqueues => qp::create;
    VIRTIO_RDMA_CMD_CREATE_RING_QP (virtio_rdma_cmd_create_ring_qp) -> virtio_rdma_rsp_create_qp,
        if has_rings, prepared by qp::prepare_ring => qp::create_ring;
    VIRTIO_RDMA_CMD_MODIFY_QP (virtio_rdma_cmd_modify_qp) -> nothing => modify_qp::modify;
    VIRTIO_RDMA_CMD_QUERY_QP (virtio_rdma_cmd_query_qp) -> virtio_rdma_rsp_query_qp
        => modify_qp::query;
    VIRTIO_RDMA_CMD_DESTROY_QP (virtio_rdma_cmd_destroy_qp) -> nothing,
        prepared by qp::prepare_destroy => qp::destroy;
    VIRTIO_RDMA_CMD_ATTACH_MCAST (virtio_rdma_cmd_mcast) -> nothing, if has_mcast => mcast::attach;
    VIRTIO_RDMA_CMD_DETACH_MCAST (virtio_rdma_cmd_mcast) -> nothing, if has_mcast => mcast::detach;
}
