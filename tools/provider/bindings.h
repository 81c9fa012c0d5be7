/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What bindgen translates for src/bindings.rs: see build.rs. */
#include <errno.h>
#include <stdlib.h>

#include <infiniband/driver.h>
#include <rdma/virtio_rdma-abi.h>
