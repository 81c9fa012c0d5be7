# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The specification's chapters: the form that they have (rules), and the tests behind their clauses (manifest)."""
