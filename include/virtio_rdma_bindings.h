/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What bindgen reads to generate the driver's bindings: the headers that the
 * kernel crate's own bindings leave out, the two ABI headers, and the helpers.
 */
#ifndef _VIRTIO_RDMA_BINDINGS_H
#define _VIRTIO_RDMA_BINDINGS_H

#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/iter.h>
#include <rdma/rdma_netlink.h>
#include <rdma/restrack.h>
#include <rdma/uverbs_ioctl.h>

#include <linux/virtio_rdma.h>
#include <rdma/virtio_rdma-abi.h>

#include "virtio_rdma_helpers.h"

#endif /* _VIRTIO_RDMA_BINDINGS_H */
