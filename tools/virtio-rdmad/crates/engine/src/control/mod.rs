// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue and its commands (specification, Control queue): a file for each object, the table of
//! commands above them.

pub(crate) mod call;
pub(crate) mod cq;
pub(crate) mod gid;
pub(crate) mod mcast;
pub(crate) mod modify_qp;
pub(crate) mod mr;
pub(crate) mod mw;
pub(crate) mod objects;
pub(crate) mod pd;
pub(crate) mod port;
pub(crate) mod prepare;
pub(crate) mod qp;
pub(crate) mod queue;
mod quota;
pub(crate) mod srq;
pub(crate) mod status;
pub(crate) mod table;
pub(crate) mod xrcd;
