/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What bindgen translates for src/bindings.rs: see build.rs. */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/cmd_ioctl.h>
#include <infiniband/driver.h>
#include <linux/virtio_rdma.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/virtio_rdma-abi.h>
