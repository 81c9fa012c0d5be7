// SPDX-License-Identifier: GPL-2.0
/*
 * Writes trace events. Rust calls these functions only while the event is
 * switched on.
 */
#include "virtio_rdma_helpers.h"

#define CREATE_TRACE_POINTS
#include "virtio_rdma_trace.h"

void virtio_rdma_trace_post_send(const struct ib_qp *qp,
				 const struct ib_send_wr *wr)
{
	trace_post_send(qp, wr);
}

void virtio_rdma_trace_post_recv(const struct ib_qp *qp,
				 const struct ib_recv_wr *wr)
{
	trace_post_recv(qp->device, qp->qp_num, false, wr);
}

void virtio_rdma_trace_post_srq_recv(const struct ib_srq *srq, u32 srqn,
				     const struct ib_recv_wr *wr)
{
	trace_post_recv(srq->device, srqn, true, wr);
}

void virtio_rdma_trace_complete(const struct ib_qp *qp, const struct ib_wc *wc)
{
	trace_complete(qp, wc);
}

void virtio_rdma_trace_command(const struct device *dev, const char *name,
			       int len, int error, u64 nsecs)
{
	char text[32];

	/* Strings of Rust do not end with a zero. */
	scnprintf(text, sizeof(text), "%.*s", len, name);
	trace_command(dev, text, error, nsecs);
}

void virtio_rdma_trace_refuse(int error, const char *reason, u64 number,
			      u64 limit)
{
	trace_refuse(error, reason, number, limit);
}
