// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Extended connection domains (IBA, annex A14; specification, Extended reliable connections).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_context, ibv_xrcd_init_attr, verbs_xrcd},
    cmd,
    errno::Result,
    object::{Owned, Ref},
};

/// Opens an XRC domain: ibv_open_xrcd(3). The kernel looks at the file that names it.
///
/// # Errors
///
/// EOPNOTSUPP if the device has no XRC domains; EINVAL; ENOMEM; the kernel's.
pub fn open(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_xrcd_init_attr,
) -> Result<Owned<verbs_xrcd>> {
    let xrcd = Owned::zeroed()?;
    cmd::xrcd::open(context, xrcd.as_ref(), attr)?;
    Ok(xrcd)
}
