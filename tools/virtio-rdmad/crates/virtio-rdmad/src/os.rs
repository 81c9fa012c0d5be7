// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The resources of the operating system that the process uses: sockets and their files, rights, CPUs, the log.

pub mod access;
pub mod cpus;
pub mod log;
pub mod privileges;
pub mod remover;
pub mod sandbox;
pub mod socket;
