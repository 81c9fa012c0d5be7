// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Memory windows (IBA 10.6.7).
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    causes::cause,
    cmd,
    errno::Result,
    log::Refuse,
    object::{Owned, Ref},
};

/// The bits of a window's key that the program may choose.
const KEY_BITS: u32 = 0xff;

/// The binding of a memory window, for a work request.
#[derive(Clone, Copy)]
pub struct Bind {
    /// The window's key.
    pub mw_rkey: u32,
    /// The key that the binding gives the window.
    pub new_rkey: u32,
    /// The lkey of the MR, 0 without an MR.
    pub lkey: u32,
    /// Address of the first byte that the window covers.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// The rights of the remote side (`IBV_ACCESS_*`).
    pub access: u32,
}

impl Bind {
    /// Binds a window to bytes of an MR. Takes the low 8 bits of the new key, which the program may
    /// choose (IBA 10.6.7.2.3), and keeps the window's other bits, whatever the program passes.
    pub fn new(
        mw: Ref<'_, ibv_mw>,
        new_rkey: u32,
        mr: Option<Ref<'_, ibv_mr>>,
        info: &ibv_mw_bind_info,
    ) -> Self {
        Self {
            mw_rkey: mw.rkey(),
            new_rkey: mw.rkey() & !KEY_BITS | new_rkey & KEY_BITS,
            lkey: mr.map_or(0, Ref::lkey),
            addr: info.addr,
            length: info.length,
            access: info.mw_access_flags,
        }
    }
}

/// Allocates a memory window: ibv_alloc_mw(3).
///
/// # Errors
///
/// ENOMEM; the kernel's, for example EOPNOTSUPP for a device without windows.
pub fn alloc(pd: Ref<'_, ibv_pd>, mw_type: ibv_mw_type) -> Result<Owned<ibv_mw>> {
    let mw = Owned::zeroed()?;
    cmd::mw::alloc(pd, mw_type, mw.as_ref())?;
    Ok(mw)
}

/// Returns the work request by which ibv_bind_mw(3) binds a window. The window gets its next key.
///
/// # Errors
///
/// EINVAL for a zero-based window: windows of type 1 cannot be (IBA 10.6.7.2.2).
pub fn bind_request(mw: Ref<'_, ibv_mw>, bind: &ibv_mw_bind) -> Result<ibv_send_wr> {
    if bind.bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0 {
        return Err(mw.refuse(cause!(EINVAL, "a window of type 1 cannot be zero-based")));
    }
    let bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        mw: mw.as_ptr(),
        rkey: next_rkey(mw.rkey()),
        bind_info: bind.bind_info,
    };
    Ok(ibv_send_wr {
        wr_id: bind.wr_id,
        opcode: IBV_WR_BIND_MW,
        send_flags: bind.send_flags,
        __bindgen_anon_2: ibv_send_wr__bindgen_ty_4 { bind_mw },
        ..Default::default()
    })
}

/// Returns the key that follows.
fn next_rkey(rkey: u32) -> u32 {
    rkey & !KEY_BITS | rkey.wrapping_add(1) & KEY_BITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{errno::Errno, model::objects};

    #[test]
    fn keys_wrap() {
        assert_eq!(next_rkey(0x1234_5600), 0x1234_5601);
        assert_eq!(next_rkey(0x1234_56ff), 0x1234_5600);
        assert_eq!(next_rkey(u32::MAX), 0xffff_ff00);
    }

    #[test]
    fn the_upper_bits_of_a_key_stay() {
        let mw: Owned<ibv_mw> = Owned::zeroed().unwrap();
        mw.as_ref().set_rkey(0x5ff);
        for (asked, key) in [(0x600, 0x500), (0xabcd_ef12, 0x512), (7, 0x507)] {
            let bind = Bind::new(mw.as_ref(), asked, None, &ibv_mw_bind_info::default());
            assert_eq!((bind.mw_rkey, bind.new_rkey), (0x5ff, key));
        }
    }

    #[test]
    fn type_1_is_not_zero_based() {
        let (context, mw) = (objects::context(), Owned::<ibv_mw>::zeroed().unwrap());
        mw.as_ref().set_rkey(0x5ff);
        objects::mw_of(&mw, &context);
        let send_flags = IBV_SEND_SIGNALED;
        let mut bind = ibv_mw_bind { wr_id: 7, send_flags, ..Default::default() };
        let request = bind_request(mw.as_ref(), &bind).unwrap();
        assert_eq!((request.wr_id, request.opcode, request.num_sge), (7, IBV_WR_BIND_MW, 0));
        assert_eq!(request.send_flags, send_flags);
        bind.bind_info.mw_access_flags = IBV_ACCESS_ZERO_BASED;
        assert_eq!(bind_request(mw.as_ref(), &bind).err(), Some(Errno::EINVAL));
    }
}
