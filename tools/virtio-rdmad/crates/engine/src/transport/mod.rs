// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a message reaches its QP: the requester, the responder, and what is between them.

pub(crate) mod datagram;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod rnr;
pub(crate) mod turn;
pub(crate) mod xrc;
