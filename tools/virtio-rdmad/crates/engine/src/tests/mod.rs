// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the engine as a guest's driver sees it. The tests write rings into anonymous memory, and move
//! the clock themselves.

mod adapter;
mod bad_packets;
mod bounds;
mod cable;
mod congestion;
mod connection;
mod control;
mod cq_moderation;
mod datagram;
mod driver;
mod fast_reg;
mod features;
mod floods;
mod flush;
mod freeze;
mod golden_images;
mod hostile;
mod image;
mod incidents;
mod mcast;
mod mw;
mod observe;
mod page_table;
mod policy;
mod random;
mod rate;
mod rc;
mod recovery;
mod rereg_mr;
mod rights;
mod rings;
mod schedules;
mod selective;
mod shared;
mod slow_memory;
mod speed;
mod srq;
mod status;
mod threads;
mod uc;
mod virtqueues;
mod vlan;
mod wire;
mod xrc;
