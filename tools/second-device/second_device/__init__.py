# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A second virtio-rdma device, written from the text of the specification alone: see README.md."""
