# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The specification's chapters: the form that they have (rules), and which of them do not have it yet (manifest)."""
