// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ways to attach to a device, as the VMM of a guest.

mod attached;
mod in_process;
mod vfio_user;
mod vhost_user;
mod wire;

pub use attached::{Attach, Memory, Port, F_ACCESS_PLATFORM, F_ORDER_PLATFORM, F_VERSION_1, SPARE};
pub use in_process::{Defect, InProcess, Network};
pub use vfio_user::VfioUser;
pub use vhost_user::VhostUser;
