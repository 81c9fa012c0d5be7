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
	SIZE(ibv_create_qp);
	SIZE(ibv_modify_qp);
	SIZE(ibv_query_qp);
	SIZE(virtio_rdma_uresp_alloc_ucontext);
	OFFSET(virtio_rdma_uresp_alloc_ucontext, data_path);
	return 0;
}
