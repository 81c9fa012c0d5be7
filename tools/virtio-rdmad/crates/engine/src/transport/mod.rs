// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The path of a message to its QP: the requester, the responder, and everything between them.

pub(crate) mod batch;
pub(crate) mod datagram;
pub(crate) mod fabric_core;
pub(crate) mod failure;
pub(crate) mod hca;
pub(crate) mod local;
pub(crate) mod message;
mod observe;
pub(crate) mod receive;
pub(crate) mod receive_queue;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod rights;
pub(crate) mod rnr;
pub(crate) mod round;
pub(crate) mod sender;
pub(crate) mod srq;
pub(crate) mod ud_requester;
pub(crate) mod wire;
pub(crate) mod xrc;
