/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR Linux-OpenIB */
/*
 * virtio-rdma: what the driver and its libibverbs provider say to each other
 * beyond the common verbs commands.
 *
 * Rules of the kernel's RDMA uAPI: structures are multiples of 8 bytes, only
 * grow at the end, and every byte a later version may use is zero until then: the
 * driver refuses any other with EOPNOTSUPP, also of commands without a structure.
 */
#ifndef VIRTIO_RDMA_ABI_USER_H
#define VIRTIO_RDMA_ABI_USER_H

#include <linux/types.h>

/* ib_device.ops.uverbs_abi_ver; the provider refuses any other. */
#define VIRTIO_RDMA_UVERBS_ABI_VERSION	1

/*
 * The kernel posts and polls on behalf of the program, through the verbs
 * commands POST_SEND, POST_RECV, POLL_CQ and REQ_NOTIFY_CQ.
 */
#define VIRTIO_RDMA_UDATA_PATH_KERNEL	0
/*
 * The program owns the rings of its QPs and CQs (struct virtio_rdma_qp_ring
 * and struct virtio_rdma_cq_ring of <linux/virtio_rdma.h>), and of its SRQs
 * (struct virtio_rdma_srq_ring). POST_SEND, POST_RECV and POST_SRQ_RECV without
 * work requests ring the doorbell of the QP or SRQ.
 *
 * When the device fails or is taken away under the program, the driver sets
 * @closed of each CQ's ring and the wake words of each QP and SRQ: whoever polls
 * sees the one behind the last CQE, and whoever posts has an error from the
 * doorbell.
 */
#define VIRTIO_RDMA_UDATA_PATH_RINGS	1
/*
 * As VIRTIO_RDMA_UDATA_PATH_RINGS, for a device behind a bus: driver and device
 * agreed on VIRTIO_F_ORDER_PLATFORM. The words of the rings that the device uses
 * as well need the platform's barriers for devices in addition to those between
 * processors.
 */
#define VIRTIO_RDMA_UDATA_PATH_RINGS_BUS	2

/*
 * The driver's attribute of UVERBS_METHOD_QUERY_CONTEXT, which is written: the
 * struct virtio_rdma_uresp_alloc_ucontext of the context. The driver's numbers
 * begin at 1 << UVERBS_ID_NS_SHIFT.
 */
#define VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP	(1U << 12)

/**
 * struct virtio_rdma_ureq_alloc_ucontext - driver data of GET_CONTEXT
 * @comp_mask: what the library knows, and may be given; no bit has a meaning
 *	yet, and the driver refuses any
 */
struct virtio_rdma_ureq_alloc_ucontext {
	__aligned_u64 comp_mask;
};

/**
 * struct virtio_rdma_uresp_alloc_ucontext - answer of GET_CONTEXT
 * @data_path: VIRTIO_RDMA_UDATA_PATH_*
 * @max_inline_data: most bytes of inline data of a QP with rings; zero if there are
 *	none, or if the driver does not tell
 * @features: the device's feature bits that the driver agreed on, bit n for
 *	VIRTIO_RDMA_F_* of <linux/virtio_rdma.h> n; not there, or zero with
 *	VIRTIO_RDMA_UDATA_PATH_RINGS, if the driver does not tell
 * @max_cqe: most entries of a CQ; this and the next fields are zero if the driver does not tell
 * @max_qp_wr: most entries of a send or receive queue
 * @max_send_sge: most SGEs of a send work request
 * @max_recv_sge: most SGEs of a receive work request of a QP
 * @max_srq_wr: most entries of an SRQ
 * @max_srq_sge: most SGEs of a work request of an SRQ
 * @comp_mask: the bits of the request that the driver took; zero as long as there are no bits
 */
struct virtio_rdma_uresp_alloc_ucontext {
	__u32 data_path;
	__u32 max_inline_data;
	__aligned_u64 features;
	__u32 max_cqe;
	__u32 max_qp_wr;
	__u32 max_send_sge;
	__u32 max_recv_sge;
	__u32 max_srq_wr;
	__u32 max_srq_sge;
	__aligned_u64 comp_mask;
};

/**
 * struct virtio_rdma_ureq_create_cq - driver data of CREATE_CQ and RESIZE_CQ
 * @buf_addr: the ring, page-aligned and zeroed: struct virtio_rdma_cq_ring and
 *	the CQEs, the number of which is the command's cqe, a power of two
 * @buf_len: bytes of the buffer, a multiple of the page size
 */
struct virtio_rdma_ureq_create_cq {
	__aligned_u64 buf_addr;
	__aligned_u64 buf_len;
};

/**
 * struct virtio_rdma_uresp_resize_cq - answer of RESIZE_CQ
 * @moved: CQEs that were not consumed and stand in the new ring, from index 0
 * @reserved_04: zero
 */
struct virtio_rdma_uresp_resize_cq {
	__u32 moved;
	__u32 reserved_04;
};

/**
 * struct virtio_rdma_ureq_create_qp - driver data of CREATE_QP
 * @buf_addr: the rings, page-aligned and zeroed: struct virtio_rdma_qp_ring
 *	and the entries
 * @buf_len: bytes of the buffer, a multiple of the page size
 * @sq_depth: entries of the send ring, a power of two
 * @sq_stride: bytes of an entry, a power of two, 32 to 4096
 * @sq_offset: of the first entry, a multiple of @sq_stride
 * @rq_depth: the same for the receive ring; 0 if there is none, as with an SRQ
 * @rq_stride: the same
 * @rq_offset: the same
 */
struct virtio_rdma_ureq_create_qp {
	__aligned_u64 buf_addr;
	__aligned_u64 buf_len;
	__u32 sq_depth;
	__u32 sq_stride;
	__u32 sq_offset;
	__u32 rq_depth;
	__u32 rq_stride;
	__u32 rq_offset;
};

/**
 * struct virtio_rdma_ureq_create_srq - driver data of CREATE_SRQ, and of MODIFY_SRQ
 *	with IB_SRQ_MAX_WR
 * @buf_addr: the ring, page-aligned and zeroed: struct virtio_rdma_srq_ring
 *	and the entries
 * @buf_len: bytes of the buffer, a multiple of the page size
 * @depth: entries of the ring, a power of two
 * @stride: bytes of an entry, a power of two, 32 to 4096
 * @offset: of the first entry, a multiple of @stride
 * @reserved_1c: zero
 */
struct virtio_rdma_ureq_create_srq {
	__aligned_u64 buf_addr;
	__aligned_u64 buf_len;
	__u32 depth;
	__u32 stride;
	__u32 offset;
	__u32 reserved_1c;
};

/**
 * struct virtio_rdma_uresp_create_ah - answer of CREATE_AH
 * @av: struct virtio_rdma_av of <linux/virtio_rdma.h>, for work requests
 * @reserved_2c: zero
 */
struct virtio_rdma_uresp_create_ah {
	__u8  av[44];
	__u32 reserved_2c;
};

#endif /* VIRTIO_RDMA_ABI_USER_H */
