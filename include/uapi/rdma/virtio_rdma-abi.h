/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR Linux-OpenIB */
/*
 * virtio-rdma: what the driver and its libibverbs provider say to each other
 * beyond the common verbs commands.
 *
 * Rules of the kernel's RDMA uAPI: structures are multiples of 8 bytes, only
 * grow at the end, and every byte a later version may use is zero until then.
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

/**
 * struct virtio_rdma_uresp_alloc_ucontext - driver data of GET_CONTEXT
 * @data_path: VIRTIO_RDMA_UDATA_PATH_*
 * @reserved_04: zero
 */
struct virtio_rdma_uresp_alloc_ucontext {
	__u32 data_path;
	__u32 reserved_04;
};

#endif /* VIRTIO_RDMA_ABI_USER_H */
