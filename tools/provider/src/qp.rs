// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Queue pairs and their work requests (IBA 10.2.4, 10.7).
#![forbid(unsafe_code)]

use crate::{
    bindings::{
        IBV_QPT_UD, IBV_SEND_INLINE, ibv_pd, ibv_qp_init_attr, ibv_qp_type, ibv_recv_wr,
        ibv_send_wr, verbs_qp,
    },
    cmd,
    errno::{Errno, Result},
    object::{Owned, Ref},
    wr::{self, PostError, WorkRequest},
};

/// A QP: libibverbs' part, then what does not change after creation.
#[repr(C)]
pub struct Qp {
    /// What libibverbs knows; first, because it hands out its address.
    pub verbs: verbs_qp,
    /// What a work request may ask for.
    pub limits: Limits,
}

/// What a work request on a QP may ask for.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Limits {
    /// Type of the QP.
    pub qp_type: ibv_qp_type,
    /// SGEs of a send work request.
    pub max_send_sge: u32,
    /// SGEs of a receive work request.
    pub max_recv_sge: u32,
}

/// ibv_create_qp(3).
pub fn create(pd: Ref<'_, ibv_pd>, attr: &mut ibv_qp_init_attr) -> Result<Owned<Qp>> {
    let mut qp = Owned::<Qp>::zeroed()?;
    cmd::create_qp(pd, attr, qp.as_ref().qp())?;
    qp.set_limits(Limits {
        qp_type: attr.qp_type,
        max_send_sge: attr.cap.max_send_sge,
        max_recv_sge: attr.cap.max_recv_sge,
    });
    Ok(qp)
}

/// ibv_post_send(3).
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry; what the kernel answers
/// otherwise, among it ENOMEM for a full queue. The requests before the one
/// that the error names are posted.
pub fn post_send(
    qp: Ref<'_, Qp>,
    list: wr::List<'_, ibv_send_wr>,
) -> Result<(), PostError<ibv_send_wr>> {
    let limits = qp.limits();
    wr::post(list, |wr| check_send(limits, wr), |first| first.post(qp.qp()))
}

/// ibv_post_recv(3). Errors as [`post_send`].
pub fn post_recv(
    qp: Ref<'_, Qp>,
    list: wr::List<'_, ibv_recv_wr>,
) -> Result<(), PostError<ibv_recv_wr>> {
    let limits = qp.limits();
    wr::post(list, |wr| check_sge(wr, limits.max_recv_sge), |first| first.post(qp.qp()))
}

/// Checks a send work request for what would make libibverbs or the kernel
/// read what is not there.
///
/// Inline data would have to be copied while posting, which the kernel's
/// command has no room for: a QP has `max_inline_data` 0. A message without
/// data may carry the flag all the same; it has no meaning then.
fn check_send(limits: Limits, wr: &mut ibv_send_wr) -> Result {
    check_sge(wr, limits.max_send_sge)?;
    if wr.send_flags & IBV_SEND_INLINE != 0 {
        if !wr::is_empty(wr) {
            return Err(Errno::EINVAL);
        }
        wr.send_flags &= !IBV_SEND_INLINE;
    }
    if limits.qp_type == IBV_QPT_UD && !wr::has_ah(wr) {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Checks the length of a request's SGE list.
fn check_sge<W: WorkRequest>(wr: &W, max: u32) -> Result {
    let within = u32::try_from(wr.num_sge()).is_ok_and(|count| count <= max);
    let present = wr.num_sge() == 0 || wr.has_sg_list();
    if within && present { Ok(()) } else { Err(Errno::EINVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{IBV_QPT_RC, IBV_SEND_SIGNALED, ibv_ah, ibv_sge};
    use core::ptr;

    const RC: Limits = Limits { qp_type: IBV_QPT_RC, max_send_sge: 4, max_recv_sge: 2 };

    fn send(sge: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
        ibv_send_wr {
            sg_list: sge.as_mut_ptr(),
            num_sge: sge.len() as _,
            send_flags: flags,
            ..Default::default()
        }
    }

    #[test]
    fn sge_count_within_the_qp() {
        let mut sge = [ibv_sge { addr: 0, length: 8, lkey: 0 }; 5];
        for count in 0..=4 {
            assert_eq!(check_send(RC, &mut send(&mut sge[..count], 0)), Ok(()));
        }
        assert_eq!(check_send(RC, &mut send(&mut sge, 0)), Err(Errno::EINVAL));
        for num_sge in [-1, i32::MIN, i32::MAX, 1] {
            let mut wr = ibv_send_wr { num_sge, ..Default::default() };
            assert_eq!(check_send(RC, &mut wr), Err(Errno::EINVAL));
            let wr = ibv_recv_wr { num_sge, ..Default::default() };
            assert_eq!(check_sge(&wr, RC.max_recv_sge), Err(Errno::EINVAL));
        }
    }

    #[test]
    fn inline_without_data_only() {
        let mut sge = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 2];
        let mut wr = send(&mut sge, IBV_SEND_INLINE | IBV_SEND_SIGNALED);
        assert_eq!(check_send(RC, &mut wr), Ok(()));
        assert_eq!(wr.send_flags, IBV_SEND_SIGNALED);
        sge[1].length = 1;
        assert_eq!(check_send(RC, &mut send(&mut sge, IBV_SEND_INLINE)), Err(Errno::EINVAL));
    }

    #[test]
    fn datagram_needs_an_address_handle() {
        let ud = Limits { qp_type: IBV_QPT_UD, ..RC };
        let mut wr = send(&mut [], 0);
        assert_eq!(check_send(ud, &mut wr), Err(Errno::EINVAL));
        wr.wr.ud.ah = ptr::dangling_mut::<ibv_ah>();
        assert_eq!(check_send(ud, &mut wr), Ok(()));
    }
}
