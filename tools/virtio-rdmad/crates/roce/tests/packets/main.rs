// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whole packets: random ones there and back, frames that scapy made, and every cause to refuse one.

mod causes;
mod random;
mod scapy;
mod train;
