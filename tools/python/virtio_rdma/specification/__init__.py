# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The specification's chapters: the form that they have (rules), the tests behind their clauses (manifest), and how
they become LaTeX in VIRTIO's form (latex)."""
