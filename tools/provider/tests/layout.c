/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Prints the layouts, as the C compiler sees them, of the structures that the
 * provider shares with libibverbs and the kernel. The test in src/bindings.rs
 * holds its own against them; the lists must have the same order.
 */
#include <stddef.h>
#include <stdio.h>

#include "../bindings.h"

#define SIZE(type) printf(#type " %zu\n", sizeof(struct type))
#define OFFSET(type, field) printf(#type "." #field " %zu\n", offsetof(struct type, field))

int main(void)
{
	SIZE(verbs_device);
	SIZE(verbs_device_ops);
	OFFSET(verbs_device_ops, match_table);
	OFFSET(verbs_device_ops, alloc_context);
	OFFSET(verbs_device_ops, uninit_device);
	SIZE(verbs_match_ent);
	OFFSET(verbs_match_ent, kind);
	SIZE(verbs_context);
	OFFSET(verbs_context, context);
	SIZE(verbs_context_ops);
	OFFSET(verbs_context_ops, alloc_pd);
	OFFSET(verbs_context_ops, post_send);
	OFFSET(verbs_context_ops, unimport_pd);
	SIZE(ibv_pd);
	SIZE(ibv_ah);
	SIZE(verbs_mr);
	SIZE(verbs_cq);
	SIZE(verbs_qp);
	OFFSET(verbs_qp, comp_mask);
	SIZE(verbs_srq);
	OFFSET(verbs_srq, srq_num);
	SIZE(verbs_xrcd);
	SIZE(ibv_qp_ex);
	OFFSET(ibv_qp_ex, wr_id);
	OFFSET(ibv_qp_ex, wr_flush);
	SIZE(ibv_cq_ex);
	OFFSET(ibv_cq_ex, wr_id);
	OFFSET(ibv_cq_ex, read_completion_wallclock_ns);
	SIZE(ibv_qp_init_attr_ex);
	SIZE(ibv_cq_init_attr_ex);
	SIZE(ibv_parent_domain_init_attr);
	SIZE(ibv_device_attr_ex);
	OFFSET(ibv_device_attr_ex, completion_timestamp_mask);
	OFFSET(ibv_device_attr_ex, hca_core_clock);
	SIZE(ibv_data_buf);
	SIZE(ibv_values_ex);
	SIZE(ibv_command_buffer);
	OFFSET(ibv_command_buffer, uhw_out_idx);
	OFFSET(ibv_command_buffer, hdr);
	SIZE(ib_uverbs_attr);
	SIZE(ibv_send_wr);
	OFFSET(ibv_send_wr, num_sge);
	OFFSET(ibv_send_wr, wr);
	SIZE(ibv_recv_wr);
	SIZE(ibv_sge);
	SIZE(ibv_wc);
	OFFSET(ibv_wc, wc_flags);
	SIZE(ibv_qp_attr);
	SIZE(ibv_qp_init_attr);
	SIZE(ibv_port_attr);
	SIZE(ibv_get_context);
	SIZE(ib_uverbs_get_context_resp);
	SIZE(ibv_alloc_pd);
	SIZE(ibv_reg_mr);
	SIZE(ibv_create_cq);
	SIZE(ibv_create_qp_ex);
	SIZE(ib_uverbs_ex_create_qp_resp);
	SIZE(ibv_modify_qp);
	SIZE(ibv_query_qp);
	SIZE(virtio_rdma_ureq_alloc_ucontext);
	SIZE(virtio_rdma_uresp_alloc_ucontext);
	OFFSET(virtio_rdma_uresp_alloc_ucontext, data_path);
	OFFSET(virtio_rdma_uresp_alloc_ucontext, max_inline_data);
	OFFSET(virtio_rdma_uresp_alloc_ucontext, features);
	OFFSET(virtio_rdma_uresp_alloc_ucontext, comp_mask);
	SIZE(virtio_rdma_ureq_create_cq);
	OFFSET(virtio_rdma_ureq_create_cq, buf_len);
	SIZE(virtio_rdma_uresp_resize_cq);
	OFFSET(virtio_rdma_uresp_resize_cq, moved);
	SIZE(virtio_rdma_ureq_create_qp);
	OFFSET(virtio_rdma_ureq_create_qp, sq_depth);
	OFFSET(virtio_rdma_ureq_create_qp, rq_offset);
	SIZE(virtio_rdma_ureq_create_srq);
	OFFSET(virtio_rdma_ureq_create_srq, depth);
	SIZE(ibv_create_srq);
	SIZE(ibv_modify_srq);
	SIZE(ibv_query_srq);
	SIZE(ibv_srq_init_attr);
	SIZE(ibv_srq_init_attr_ex);
	SIZE(ibv_create_xsrq);
	SIZE(ibv_open_xrcd);
	SIZE(ibv_open_qp);
	SIZE(ibv_qp_open_attr);
	SIZE(virtio_rdma_uresp_create_ah);
	OFFSET(virtio_rdma_uresp_create_ah, reserved_2c);
	SIZE(ibv_resize_cq);
	SIZE(ibv_modify_cq);
	SIZE(ibv_modify_cq_attr);
	SIZE(ib_uverbs_resize_cq_resp);
	SIZE(ib_uverbs_create_ah_resp);
	SIZE(virtio_rdma_qp_ring);
	OFFSET(virtio_rdma_qp_ring, rq_producer);
	OFFSET(virtio_rdma_qp_ring, sq_wake);
	OFFSET(virtio_rdma_qp_ring, rq_wake);
	SIZE(virtio_rdma_srq_ring);
	OFFSET(virtio_rdma_srq_ring, consumer);
	OFFSET(virtio_rdma_srq_ring, wake);
	SIZE(virtio_rdma_cq_ring);
	OFFSET(virtio_rdma_cq_ring, arm_next);
	OFFSET(virtio_rdma_cq_ring, arm_solicited);
	SIZE(virtio_rdma_ring_sq_wqe);
	OFFSET(virtio_rdma_ring_sq_wqe, rkey);
	OFFSET(virtio_rdma_ring_sq_wqe, swap);
	SIZE(virtio_rdma_ring_xrc_wqe);
	OFFSET(virtio_rdma_ring_xrc_wqe, remote_srqn);
	SIZE(virtio_rdma_ring_bind_wqe);
	OFFSET(virtio_rdma_ring_bind_wqe, mw_rkey);
	OFFSET(virtio_rdma_ring_bind_wqe, lkey);
	SIZE(virtio_rdma_ring_flush_wqe);
	OFFSET(virtio_rdma_ring_flush_wqe, rkey);
	OFFSET(virtio_rdma_ring_flush_wqe, length);
	SIZE(ibv_mw);
	OFFSET(ibv_mw, rkey);
	SIZE(ibv_mw_bind);
	OFFSET(ibv_mw_bind, bind_info);
	SIZE(ibv_mw_bind_info);
	OFFSET(ibv_mw_bind_info, mw_access_flags);
	SIZE(virtio_rdma_ring_ud_wqe);
	OFFSET(virtio_rdma_ring_ud_wqe, remote_qpn);
	OFFSET(virtio_rdma_ring_ud_wqe, av);
	SIZE(virtio_rdma_av);
	OFFSET(virtio_rdma_av, dmac);
	SIZE(virtio_rdma_rq_wqe);
	OFFSET(virtio_rdma_rq_wqe, wr_id);
	SIZE(virtio_rdma_sge);
	SIZE(virtio_rdma_ring_cqe);
	OFFSET(virtio_rdma_ring_cqe, qp_num);
	OFFSET(virtio_rdma_ring_cqe, wqe_index);
	OFFSET(virtio_rdma_ring_cqe, srqn);
	OFFSET(virtio_rdma_ring_cqe, lap);
	return 0;
}
