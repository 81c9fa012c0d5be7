// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Builds work requests in the ring, as the program makes calls (ibv_wr_post(3)).
//!
//! Between ibv_wr_start() and ibv_wr_complete() or ibv_wr_abort() the thread has
//! the lock of the send queue. Each work request is written to the next free
//! entry. At the end the device is told of all of them, or of none. The first call that
//! fails is remembered, and the calls after it have no effect.
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_send_wr, ibv_sge, virtio_rdma_av},
    causes::{Cause, cause},
    doorbell::{self, Queue},
    errno::Result,
    limits::Limits,
    lock::Guard,
    log::Refuse,
    object::Ref,
    qp::{self, Qp, Rings},
    ring::Writer,
    wq::State,
    wqe::{Body, Open},
};

fn not_begun() -> Cause {
    cause!(EINVAL, "a setter is called before a work request is begun")
}

/// Builds the work requests that a thread makes on a QP.
pub struct WrBuilder<'a> {
    qp: Ref<'a, Qp>,
    limits: &'a Limits,
    rings: &'a Rings,
    state: Guard<'a, State>,
}

impl<'a> WrBuilder<'a> {
    /// Returns the builder of the thread that has this guard of the send queue.
    pub fn new(qp: Ref<'a, Qp>, rings: &'a Rings, state: Guard<'a, State>) -> Self {
        Self { qp, limits: qp.private().limits(), rings, state }
    }

    /// Keeps the lock of the send queue for the next call of this thread.
    pub fn keep(self) {
        self.state.keep();
    }

    /// Starts without a work request: ibv_wr_start(3).
    pub fn start(&mut self) {
        self.state.open = None;
        self.state.error = None;
        self.state.discard();
    }

    /// Completes the work request that was begun before, and begins another one.
    pub fn begin(&mut self, wr: ibv_send_wr) {
        self.attempt(|builder| {
            builder.close()?;
            // An entry must be free before its setters come.
            builder.entry()?;
            builder.state.open = Some(Open::new(builder.limits, wr)?);
            Ok(())
        });
    }

    /// Sets the destination of a datagram: ibv_wr_set_ud_addr(3).
    pub fn set_address(&mut self, av: virtio_rdma_av, remote_qpn: u32, remote_qkey: u32) {
        self.set(|open| {
            open.set_address(av, remote_qpn, remote_qkey);
            Ok(())
        });
    }

    /// Sets the SRQ at the remote side: ibv_wr_set_xrc_srqn(3).
    pub fn set_remote_srqn(&mut self, remote_srqn: u32) {
        self.set(|open| {
            open.set_remote_srqn(remote_srqn);
            Ok(())
        });
    }

    /// Sets the fields that only work requests with this opcode have; `body` finds them, or fails.
    /// It is not called after an error.
    pub fn set_body(&mut self, body: impl FnOnce() -> Result<Body, Cause>) {
        self.set(|open| {
            open.set_body(body()?);
            Ok(())
        });
    }

    /// Sets the SGE list: ibv_wr_set_sge_list(3).
    pub fn set_sges(&mut self, sges: &[ibv_sge]) {
        self.attempt(|builder| {
            let entry = builder.entry()?;
            let open = builder.state.open.as_mut().ok_or_else(not_begun)?;
            open.set_sges(builder.limits, sges, entry)
        });
    }

    /// Sets inline data, of which `put` writes `len` bytes: ibv_wr_set_inline_data_list(3).
    pub fn set_inline(
        &mut self,
        len: usize,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), Cause>,
    ) {
        self.attempt(|builder| {
            let entry = builder.entry()?;
            let open = builder.state.open.as_mut().ok_or_else(not_begun)?;
            open.set_inline(builder.limits, len, entry, put)
        });
    }

    /// Fails, as a call that the QP does not have.
    pub fn fail(&mut self, cause: Cause) {
        self.attempt(|_| Err(cause));
    }

    /// Posts all work requests: ibv_wr_complete(3).
    ///
    /// # Errors
    ///
    /// The first error since ibv_wr_start(), and nothing is posted: EINVAL for
    /// a work request that the QP cannot carry, or a QP that is not in a state
    /// to send; ENOMEM for a full queue. EIO or ENODEV if the device is gone.
    pub fn complete(mut self) -> Result {
        self.attempt(|builder| {
            qp::check_can_send(builder.qp)?;
            builder.close()
        });
        if let Some(errno) = self.state.error {
            self.state.discard();
            return Err(errno);
        }
        let doorbell = self.rings.publish(&mut self.state);
        drop(self.state);
        if !doorbell {
            return Ok(());
        }
        doorbell::ring(Queue::Send(self.qp), || self.rings.send_not_rung())
    }

    /// Forgets all work requests: ibv_wr_abort(3).
    pub fn abort(mut self) {
        self.start();
    }

    /// Calls `act` unless an earlier call failed, and remembers its error.
    fn attempt(&mut self, act: impl FnOnce(&mut Self) -> Result<(), Cause>) {
        if self.state.error.is_none() {
            if let Err(cause) = act(self) {
                self.refuse(cause);
            }
        }
    }

    /// Says in the log why a call failed, and remembers its error.
    #[cold]
    #[inline(never)]
    fn refuse(&mut self, cause: Cause) {
        self.state.error = Some(Queue::Send(self.qp).refuse(cause));
    }

    /// Calls `act` with the work request that is being made.
    fn set(&mut self, act: impl FnOnce(&mut Open) -> Result<(), Cause>) {
        self.attempt(|builder| act(builder.state.open.as_mut().ok_or_else(not_begun)?));
    }

    /// Returns the entry of the work request that is being made.
    fn entry(&mut self) -> Result<Writer<'a>, Cause> {
        self.rings.entry(&mut self.state)
    }

    /// Completes the work request that is being made.
    fn close(&mut self) -> Result<(), Cause> {
        if self.state.open.is_none() {
            return Ok(());
        }
        let entry = self.entry()?;
        if let Some(open) = &self.state.open {
            open.close(self.limits, entry)?;
        }
        self.state.open = None;
        self.state.filled();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::{
        bindings::*,
        model::{
            objects,
            send_queue::{DEPTH, SendQueue},
        },
        post,
        wr::{Rdma, tests::list},
    };

    impl SendQueue {
        /// Returns a builder that was started.
        fn start(&self) -> WrBuilder<'_> {
            let rings = self.qp.as_ref().private().rings().unwrap();
            let mut builder = WrBuilder::new(self.qp.as_ref(), rings, rings.send().state().lock());
            builder.start();
            builder
        }
    }

    fn wr(wr_id: u64, opcode: ibv_wr_opcode) -> ibv_send_wr {
        ibv_send_wr { wr_id, opcode, send_flags: IBV_SEND_SIGNALED, ..Default::default() }
    }

    fn sge(addr: u64) -> ibv_sge {
        ibv_sge { addr, length: 8, lkey: 9 }
    }

    #[test]
    fn all_at_the_end() {
        let queue = SendQueue::new(IBV_QPT_RC);
        let mut builder = queue.start();
        let remote = Rdma { remote_addr: 0x1234, rkey: 77 };
        let write = ibv_send_wr { wr: ibv_send_wr__bindgen_ty_2 { rdma: remote }, ..wr(1, 0) };
        builder.begin(ibv_send_wr { opcode: IBV_WR_RDMA_WRITE, ..write });
        builder.set_sges(&[sge(3), sge(4)]);
        builder.begin(wr(2, IBV_WR_SEND));
        builder.set_inline(16, |entry| entry.put(virtio_rdma_sge { addr: 8, length: 7, lkey: 6 }));
        builder.begin(wr(3, IBV_WR_SEND));
        assert_eq!(queue.told(), 0);
        assert_eq!(builder.complete(), Ok(()));
        assert_eq!(queue.told(), 3);

        let first: virtio_rdma_ring_sq_wqe = queue.read(0, 0);
        assert_eq!(
            (first.wr_id, u32::from(first.opcode), first.num_sge),
            (1, IBV_WR_RDMA_WRITE, 2)
        );
        assert_eq!((first.remote_addr, first.rkey, first.inline_len), (0x1234, 77, 0));
        let sges: [virtio_rdma_sge; 2] = queue.read(0, 48);
        assert_eq!((sges[0].addr, sges[1].addr, sges[1].lkey), (3, 4, 9));

        let second: virtio_rdma_ring_sq_wqe = queue.read(1, 0);
        assert_eq!((second.wr_id, second.num_sge, second.inline_len), (2, 0, 16));
        let flags = (IBV_SEND_INLINE | IBV_SEND_SIGNALED) as u16;
        let data: virtio_rdma_sge = queue.read(1, 48);
        assert_eq!((second.send_flags, data.addr, data.length, data.lkey), (flags, 8, 7, 6));

        let third: virtio_rdma_ring_sq_wqe = queue.read(2, 0);
        assert_eq!((third.wr_id, third.num_sge, third.inline_len), (3, 0, 0));
    }

    /// Checks that the calls of `make` fail, and that what is built after that is posted.
    fn refused(qp_type: ibv_qp_type, make: impl FnOnce(&mut WrBuilder<'_>), errno: Errno) {
        let queue = SendQueue::new(qp_type);
        let mut builder = queue.start();
        let av = virtio_rdma_av::default();
        builder.begin(wr(1, IBV_WR_SEND));
        builder.set_address(av, 1, 2);
        make(&mut builder);
        assert_eq!((builder.complete(), queue.told()), (Err(errno), 0));

        let mut builder = queue.start();
        builder.begin(wr(8, IBV_WR_SEND));
        builder.set_address(av, 1, 2);
        assert_eq!((builder.complete(), queue.told()), (Ok(()), 1));
        assert_eq!(queue.read::<u64>(0, 0), 8);
    }

    #[test]
    fn an_error_posts_nothing() {
        let opcode = |opcode| move |builder: &mut WrBuilder<'_>| builder.begin(wr(2, opcode));
        refused(IBV_QPT_RC, opcode(99), Errno::EINVAL);
        refused(IBV_QPT_UD, opcode(IBV_WR_RDMA_READ), Errno::EINVAL);
        let csum = ibv_send_wr { send_flags: IBV_SEND_IP_CSUM, ..wr(2, IBV_WR_SEND) };
        refused(IBV_QPT_RC, |builder| builder.begin(csum), Errno::EINVAL);
        refused(IBV_QPT_RC, |builder| builder.set_sges(&[sge(0); 3]), Errno::EINVAL);
        refused(IBV_QPT_RC, |builder| builder.set_inline(41, |_| Ok(())), Errno::EINVAL);
        refused(IBV_QPT_RC, |builder| builder.set_inline(usize::MAX, |_| Ok(())), Errno::EINVAL);
        let twice = |builder: &mut WrBuilder<'_>| {
            builder.set_sges(&[sge(0)]);
            builder.set_sges(&[sge(0)]);
        };
        refused(IBV_QPT_RC, twice, Errno::EINVAL);
        // Each datagram needs its own destination.
        refused(IBV_QPT_UD, |builder| builder.begin(wr(2, IBV_WR_SEND)), Errno::EINVAL);
        let inline = |builder: &mut WrBuilder<'_>| {
            builder.begin(wr(2, IBV_WR_RDMA_READ));
            builder.set_inline(1, |_| Ok(()));
        };
        refused(IBV_QPT_RC, inline, Errno::EINVAL);
        // Calls after an error have no effect: the first error counts.
        let later = |builder: &mut WrBuilder<'_>| {
            builder.fail(cause!(EOPNOTSUPP, "a test"));
            builder.set_sges(&[sge(0); 3]);
            builder.begin(wr(3, IBV_WR_SEND));
        };
        refused(IBV_QPT_RC, later, Errno::EOPNOTSUPP);
        let many =
            |builder: &mut WrBuilder<'_>| (0..DEPTH.into()).for_each(|id| builder.begin(wr(id, 2)));
        refused(IBV_QPT_RC, many, Errno::ENOMEM);
    }

    #[test]
    fn a_setter_without_a_work_request() {
        let queue = SendQueue::new(IBV_QPT_RC);
        let mut builder = queue.start();
        builder.set_sges(&[sge(0)]);
        assert_eq!(builder.complete(), Err(Errno::EINVAL));
        assert_eq!(queue.start().complete(), Ok(()));
        assert_eq!(queue.told(), 0);
    }

    #[test]
    fn abort_forgets() {
        let queue = SendQueue::new(IBV_QPT_RC);
        for _ in 0..3 {
            let mut builder = queue.start();
            (0..DEPTH.into()).for_each(|id| builder.begin(wr(id, IBV_WR_SEND)));
            builder.abort();
        }
        assert_eq!(queue.told(), 0);
        let mut builder = queue.start();
        (0..DEPTH.into()).for_each(|id| builder.begin(wr(10 + id, IBV_WR_SEND)));
        assert_eq!((builder.complete(), queue.told()), (Ok(()), DEPTH));
        assert_eq!((queue.read::<u64>(0, 0), queue.read::<u64>(3, 0)), (10, 13));
        // Nor does ibv_post_send(3) post what was forgotten.
        let queue = SendQueue::new(IBV_QPT_RC);
        let mut builder = queue.start();
        builder.begin(wr(20, IBV_WR_SEND));
        builder.begin(wr(21, IBV_WR_SEND));
        builder.abort();
        assert!(post::send(queue.qp.as_ref(), list(&mut wr(22, IBV_WR_SEND))).is_ok());
        assert_eq!((queue.told(), queue.read::<u64>(0, 0)), (1, 22));
    }

    #[test]
    fn completions_make_room() {
        let queue = SendQueue::new(IBV_QPT_RC);
        for round in 0..3 {
            let mut builder = queue.start();
            (0..DEPTH.into()).for_each(|id| builder.begin(wr(id, IBV_WR_SEND)));
            assert_eq!(builder.complete(), Ok(()));
            let mut builder = queue.start();
            builder.begin(wr(9, IBV_WR_SEND));
            assert_eq!(builder.complete(), Err(Errno::ENOMEM));
            queue.set_done((round + 1) * DEPTH);
        }
    }

    #[test]
    fn datagram_with_its_destination() {
        let queue = SendQueue::new(IBV_QPT_UD);
        let mut builder = queue.start();
        let av = virtio_rdma_av { dmac: [6; 6], ..Default::default() };
        builder.begin(wr(1, IBV_WR_SEND));
        builder.set_sges(&[sge(5)]);
        builder.set_address(av, 33, 44);
        assert_eq!(builder.complete(), Ok(()));
        let wqe: virtio_rdma_ring_ud_wqe = queue.read(0, 0);
        assert_eq!((wqe.num_sge, wqe.remote_qpn, wqe.remote_qkey), (1, 33, 44));
        assert_eq!(wqe.av.dmac, [6; 6]);
        assert_eq!(queue.read::<virtio_rdma_sge>(0, size_of_val(&wqe)).addr, 5);
    }

    #[test]
    fn message_with_its_srq() {
        let queue = SendQueue::new(IBV_QPT_XRC_SEND);
        let mut builder = queue.start();
        builder.begin(wr(1, IBV_WR_SEND));
        builder.set_remote_srqn(77);
        builder.set_sges(&[sge(5)]);
        assert_eq!(builder.complete(), Ok(()));
        let wqe: virtio_rdma_ring_xrc_wqe = queue.read(0, 0);
        assert_eq!((wqe.base.num_sge, wqe.remote_srqn), (1, 77));
        assert_eq!(queue.read::<virtio_rdma_sge>(0, size_of_val(&wqe)).addr, 5);
        // Each message needs its own SRQ.
        let mut builder = queue.start();
        builder.begin(wr(2, IBV_WR_SEND));
        assert_eq!(builder.complete(), Err(Errno::EINVAL));
    }

    #[test]
    fn a_state_that_cannot_send() {
        let queue = SendQueue::new(IBV_QPT_RC);
        for state in [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR] {
            objects::set_state(&queue.qp, state);
            let mut builder = queue.start();
            builder.begin(wr(1, IBV_WR_SEND));
            assert_eq!((builder.complete(), queue.told()), (Err(Errno::EINVAL), 0));
        }
        objects::set_state(&queue.qp, IBV_QPS_ERR);
        let mut builder = queue.start();
        builder.begin(wr(1, IBV_WR_SEND));
        assert_eq!((builder.complete(), queue.told()), (Ok(()), 1));
    }
}
