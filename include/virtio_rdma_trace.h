/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events: what consumers in the kernel post, what they poll, the commands
 * to the device, and why the driver refuses a verb.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM virtio_rdma

#if !defined(_VIRTIO_RDMA_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _VIRTIO_RDMA_TRACE_H

#include <linux/device.h>
#include <linux/tracepoint.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>
#include <trace/misc/rdma.h>

TRACE_EVENT(post_send,
	TP_PROTO(const struct ib_qp *qp, const struct ib_send_wr *wr),
	TP_ARGS(qp, wr),
	TP_STRUCT__entry(
		__string(device, dev_name(&qp->device->dev))
		__field(u64, wr_id)
		__field(u32, qpn)
		__field(u32, opcode)
		__field(u32, send_flags)
		__field(int, num_sge)
	),
	TP_fast_assign(
		__assign_str(device);
		__entry->wr_id = wr->wr_id;
		__entry->qpn = qp->qp_num;
		__entry->opcode = wr->opcode;
		__entry->send_flags = wr->send_flags;
		__entry->num_sge = wr->num_sge;
	),
	TP_printk("%s qpn=%u wr_id=0x%llx opcode=%u send_flags=0x%x num_sge=%d",
		  __get_str(device), __entry->qpn, __entry->wr_id,
		  __entry->opcode, __entry->send_flags, __entry->num_sge)
);

TRACE_EVENT(post_recv,
	TP_PROTO(const struct ib_device *dev, u32 number, bool is_srq,
		 const struct ib_recv_wr *wr),
	TP_ARGS(dev, number, is_srq, wr),
	TP_STRUCT__entry(
		__string(device, dev_name(&dev->dev))
		__field(u64, wr_id)
		__field(u32, number)
		__field(bool, is_srq)
		__field(int, num_sge)
	),
	TP_fast_assign(
		__assign_str(device);
		__entry->wr_id = wr->wr_id;
		__entry->number = number;
		__entry->is_srq = is_srq;
		__entry->num_sge = wr->num_sge;
	),
	TP_printk("%s %s=%u wr_id=0x%llx num_sge=%d", __get_str(device),
		  __entry->is_srq ? "srqn" : "qpn", __entry->number,
		  __entry->wr_id, __entry->num_sge)
);

TRACE_EVENT(complete,
	TP_PROTO(const struct ib_qp *qp, const struct ib_wc *wc),
	TP_ARGS(qp, wc),
	TP_STRUCT__entry(
		__string(device, dev_name(&qp->device->dev))
		__field(u64, wr_id)
		__field(u32, qpn)
		__field(u32, status)
		__field(u32, opcode)
		__field(u32, byte_len)
		__field(u32, vendor_err)
	),
	TP_fast_assign(
		__assign_str(device);
		__entry->wr_id = wc->wr_id;
		__entry->qpn = qp->qp_num;
		__entry->status = wc->status;
		__entry->opcode = wc->opcode;
		__entry->byte_len = wc->byte_len;
		__entry->vendor_err = wc->vendor_err;
	),
	TP_printk("%s qpn=%u wr_id=0x%llx status=%s (%u/0x%x) opcode=%u byte_len=%u",
		  __get_str(device), __entry->qpn, __entry->wr_id,
		  rdma_show_wc_status(__entry->status), __entry->status,
		  __entry->vendor_err, __entry->opcode, __entry->byte_len)
);

TRACE_EVENT(command,
	TP_PROTO(const struct device *dev, const char *name, int error,
		 u64 nsecs),
	TP_ARGS(dev, name, error, nsecs),
	TP_STRUCT__entry(
		__string(device, dev_name(dev))
		__string(name, name)
		__field(u64, nsecs)
		__field(int, error)
	),
	TP_fast_assign(
		__assign_str(device);
		__assign_str(name);
		__entry->nsecs = nsecs;
		__entry->error = error;
	),
	TP_printk("%s %s error=%d nsecs=%llu", __get_str(device),
		  __get_str(name), __entry->error, __entry->nsecs)
);

TRACE_EVENT(refuse,
	TP_PROTO(int error, const char *reason, u64 number, u64 limit),
	TP_ARGS(error, reason, number, limit),
	TP_STRUCT__entry(
		__string(reason, reason)
		__field(u64, number)
		__field(u64, limit)
		__field(int, error)
	),
	TP_fast_assign(
		__assign_str(reason);
		__entry->number = number;
		__entry->limit = limit;
		__entry->error = error;
	),
	TP_printk("error=%d number=%llu limit=%llu: %s", __entry->error,
		  __entry->number, __entry->limit, __get_str(reason))
);

#endif

#undef TRACE_INCLUDE_PATH
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_PATH .
#define TRACE_INCLUDE_FILE virtio_rdma_trace
#include <trace/define_trace.h>
