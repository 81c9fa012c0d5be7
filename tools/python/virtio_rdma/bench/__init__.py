# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The benchmark behind "make bench": what it measures (plan), how (measure), and what it says of it (report, plot)."""
