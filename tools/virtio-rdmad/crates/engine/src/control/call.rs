// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The arguments of the handler of a control command.

use std::sync::Arc;

use super::objects::Objects;
use super::prepare::Prepared;
use crate::base::budget::Budget;
use crate::transport::hca::Hca;

/// A control command that is carried out.
pub(crate) struct Call<'a> {
    /// The HCA of the guest.
    pub hca: &'a Arc<Hca>,
    /// The objects that only commands change.
    pub objects: &'a mut Objects,
    /// The preparation of the command.
    pub prepared: Prepared,
    /// The budget that the work is charged to.
    pub budget: &'a mut Budget,
}
