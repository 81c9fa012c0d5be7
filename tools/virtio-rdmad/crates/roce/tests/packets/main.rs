// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whole packets: random ones there and back, frames that scapy made, those of adapters, and every cause to refuse one.

mod adapters;
mod causes;
mod random;
mod scapy;
mod train;
