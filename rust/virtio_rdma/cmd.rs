// SPDX-License-Identifier: GPL-2.0

//! The control queue: typed commands, any number of callers at a time, and the
//! requests for notification that come from atomic context.

#![deny(unsafe_code)]

use crate::{
    bindings,
    kernel_release,
    log,
    stats::{
        Counter,
        Stats, //
    },
    sync::{
        needs_processor,
        new_irq_spinlock,
        Completion,
        IrqGuard,
        IrqSpinLock, //
    },
    trace,
    virtio::{
        Exchange,
        Queue, //
    },
    wire::Nothing, //
};
use core::{
    mem,
    ops::RangeInclusive,
    time::Duration, //
};
use kernel::{
    device, new_condvar, new_mutex,
    prelude::*,
    processor::cpu_relax,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
        rcu,
        CondVar,
        Mutex, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    },
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

/// A command of the control queue (specification, Control queue).
pub(crate) trait Command {
    /// `enum virtio_rdma_cmd`.
    const OPCODE: u32;
    /// The name that the specification has for it.
    const NAME: &'static str;
    /// The part of a command that follows the opcode.
    type Request: AsBytes;
    /// The part of a reply that follows the status, if that is OK.
    type Reply: FromBytes + AsBytes + Zeroable;
}

/// Declares commands: type, name in the specification, request and reply.
macro_rules! commands {
    ($($(#[$doc:meta])* $type:ident = $name:ident ($request:ty) -> $reply:ty;)*) => {
        $(
            $(#[$doc])*
            pub(crate) struct $type;

            impl Command for $type {
                const OPCODE: u32 = ::kernel::macros::paste!(
                    bindings::[<virtio_rdma_cmd_VIRTIO_RDMA_CMD_ $name>]
                );
                const NAME: &'static str = stringify!($name);
                type Request = $request;
                type Reply = $reply;
            }
        )*
    };
}

commands! {
    /// Reads the attributes of a port.
    QueryPort = QUERY_PORT
        (bindings::virtio_rdma_cmd_query_port) -> bindings::virtio_rdma_rsp_query_port;
    /// Creates a CQ.
    CreateCq = CREATE_CQ
        (bindings::virtio_rdma_cmd_create_cq) -> bindings::virtio_rdma_rsp_create_cq;
    /// Destroys a CQ.
    DestroyCq = DESTROY_CQ
        (bindings::virtio_rdma_cmd_destroy_cq) -> Nothing;
    /// Creates a PD.
    CreatePd = CREATE_PD
        (Nothing) -> bindings::virtio_rdma_rsp_create_pd;
    /// Destroys a PD.
    DestroyPd = DESTROY_PD
        (bindings::virtio_rdma_cmd_destroy_pd) -> Nothing;
    /// Creates an MR over all memory.
    GetDmaMr = GET_DMA_MR
        (bindings::virtio_rdma_cmd_get_dma_mr) -> bindings::virtio_rdma_rsp_mr;
    /// Creates an MR for fast registration.
    CreateMr = CREATE_MR
        (bindings::virtio_rdma_cmd_create_mr) -> bindings::virtio_rdma_rsp_mr;
    /// Creates an MR over listed pages.
    RegUserMr = REG_USER_MR
        (bindings::virtio_rdma_cmd_reg_user_mr) -> bindings::virtio_rdma_rsp_mr;
    /// Replaces attributes of an MR over listed pages.
    ReregMr = REREG_MR
        (bindings::virtio_rdma_cmd_rereg_mr) -> Nothing;
    /// Creates a memory window.
    AllocMw = ALLOC_MW
        (bindings::virtio_rdma_cmd_alloc_mw) -> bindings::virtio_rdma_rsp_alloc_mw;
    /// Destroys a memory window.
    DeallocMw = DEALLOC_MW
        (bindings::virtio_rdma_cmd_dealloc_mw) -> Nothing;
    /// Destroys an MR.
    DeregMr = DEREG_MR
        (bindings::virtio_rdma_cmd_dereg_mr) -> Nothing;
    /// Creates a QP.
    CreateQp = CREATE_QP
        (bindings::virtio_rdma_cmd_create_qp) -> bindings::virtio_rdma_rsp_create_qp;
    /// Creates a CQ with a ring.
    CreateRingCq = CREATE_RING_CQ
        (bindings::virtio_rdma_cmd_create_ring_cq) -> bindings::virtio_rdma_rsp_create_cq;
    /// Sets how the events of a CQ are held back.
    ModifyCq = MODIFY_CQ
        (bindings::virtio_rdma_cmd_modify_cq) -> Nothing;
    /// Moves a CQ to another ring.
    ResizeCq = RESIZE_CQ
        (bindings::virtio_rdma_cmd_resize_cq) -> bindings::virtio_rdma_rsp_resize_cq;
    /// Creates a QP with rings.
    CreateRingQp = CREATE_RING_QP
        (bindings::virtio_rdma_cmd_create_ring_qp) -> bindings::virtio_rdma_rsp_create_qp;
    /// Creates an SRQ.
    CreateSrq = CREATE_SRQ
        (bindings::virtio_rdma_cmd_create_srq) -> bindings::virtio_rdma_rsp_create_srq;
    /// Sets the limit of an SRQ.
    ModifySrq = MODIFY_SRQ
        (bindings::virtio_rdma_cmd_modify_srq) -> Nothing;
    /// Reads the attributes of an SRQ.
    QuerySrq = QUERY_SRQ
        (bindings::virtio_rdma_cmd_query_srq) -> bindings::virtio_rdma_rsp_query_srq;
    /// Destroys an SRQ.
    DestroySrq = DESTROY_SRQ
        (bindings::virtio_rdma_cmd_destroy_srq) -> Nothing;
    /// Moves an SRQ to another ring.
    ResizeSrq = RESIZE_SRQ
        (bindings::virtio_rdma_cmd_resize_srq) -> bindings::virtio_rdma_rsp_resize_srq;
    /// Changes attributes of a QP.
    ModifyQp = MODIFY_QP
        (bindings::virtio_rdma_cmd_modify_qp) -> Nothing;
    /// Reads the attributes of a QP.
    QueryQp = QUERY_QP
        (bindings::virtio_rdma_cmd_query_qp) -> bindings::virtio_rdma_rsp_query_qp;
    /// Destroys a QP.
    DestroyQp = DESTROY_QP
        (bindings::virtio_rdma_cmd_destroy_qp) -> Nothing;
    /// Reads an entry of the P_Key table.
    QueryPkey = QUERY_PKEY
        (bindings::virtio_rdma_cmd_query_pkey) -> bindings::virtio_rdma_rsp_query_pkey;
    /// Sets an entry of the GID table.
    AddGid = ADD_GID
        (bindings::virtio_rdma_cmd_add_gid) -> Nothing;
    /// Clears an entry of the GID table.
    DelGid = DEL_GID
        (bindings::virtio_rdma_cmd_del_gid) -> Nothing;
    /// Attaches a QP to a multicast group.
    AttachMcast = ATTACH_MCAST
        (bindings::virtio_rdma_cmd_mcast) -> Nothing;
    /// Detaches a QP from a multicast group.
    DetachMcast = DETACH_MCAST
        (bindings::virtio_rdma_cmd_mcast) -> Nothing;
    /// Reads the counters of a port.
    QueryCounters = QUERY_COUNTERS
        (bindings::virtio_rdma_cmd_query_counters) -> bindings::virtio_rdma_rsp_query_counters;
    /// Creates an extended connection domain.
    AllocXrcd = ALLOC_XRCD
        (Nothing) -> bindings::virtio_rdma_rsp_alloc_xrcd;
    /// Destroys an extended connection domain.
    DeallocXrcd = DEALLOC_XRCD
        (bindings::virtio_rdma_cmd_dealloc_xrcd) -> Nothing;
}

/// The most commands that may be under way at a time, if the ring has room for them.
const MAX_SLOTS: u32 = 16;

/// Descriptors of a command: the request and the reply.
const DESCRIPTORS: u32 = 2;

/// Returns the time after which a device that does not reply has failed.
fn timeout() -> Duration {
    let seconds: u32 = kernel_release::parameter(crate::module_parameters::command_timeout.value());
    Duration::from_secs(seconds.max(1).into())
}

/// The shortest and the longest time that a caller looks for its reply before it sleeps, in nanoseconds. Within the
/// longest, a device that was asleep mostly replies. To fall asleep and be woken by an interrupt takes as long if the
/// processors of the host have other work too.
const POLL: RangeInclusive<u32> = 40_000..=200_000;

/// Within these bounds, a caller looks for this many times as long as a reply takes, as a mean over the last replies
/// that callers found so. A reply that takes longer waits for a processor, perhaps for the one on which the caller looks.
const POLL_TIMES: u32 = 4;

/// The weight of the newest reply in that mean is 1 in this many.
const REPLY_WEIGHT: u32 = 8;

/// A caller that looked in vain makes the next one look longer, by 1 in this many.
const VAIN_WEIGHT: u32 = 32;

/// After so many callers in a row that looked in vain, only one of so many callers looks.
const PATIENCE: u32 = 16;

/// Returns the time for which the next caller looks for its reply, in nanoseconds, after one looked for `look_time`.
/// Its reply `took` so long, or was not found.
fn next_look_time(look_time: u32, took: Option<Delta>) -> u32 {
    let next = match took {
        Some(took) => {
            let took = u32::try_from(took.as_nanos()).unwrap_or(u32::MAX);
            let wanted = took.saturating_mul(POLL_TIMES);
            look_time - look_time / REPLY_WEIGHT + wanted.min(*POLL.end()) / REPLY_WEIGHT
        }
        None => look_time + look_time / VAIN_WEIGHT,
    };
    next.clamp(*POLL.start(), *POLL.end())
}

/// The interval at which a waiting caller looks whether the queue is broken or the device was reset: a transport
/// that vanishes breaks the queue and gives no notice, and nobody tells the driver that somebody else has reset the
/// device.
const LIVENESS: Duration = Duration::from_secs(1);

/// The time that a command waits whose memory cannot be mapped, before it is tried once more.
pub(crate) const UNMAPPED: Delta = Delta::from_millis(10);

/// The time after which such a command fails.
const MAPPING: Delta = Delta::from_secs(5);

/// A status of a reply (specification, The Linux driver): its name, and the error that callers get.
struct Status {
    name: &'static str,
    result: Result,
}

/// Declares the status values, with the error of each.
macro_rules! statuses {
    ($($name:ident => $result:expr,)*) => {
        /// Returns what a status of a reply means; `None` if it is not defined.
        fn status(status: u8) -> Option<Status> {
            ::kernel::macros::paste!(match u32::from(status) {
                $(bindings::[<virtio_rdma_status_VIRTIO_RDMA_STATUS_ $name>] => Some(Status {
                    name: stringify!($name),
                    result: $result,
                }),)*
                _ => None,
            })
        }
    };
}

statuses! {
    OK => Ok(()),
    ERR => Err(EIO),
    INVAL => Err(EINVAL),
    NO_OBJECT => Err(ENOENT),
    NO_RESOURCE => Err(ENOMEM),
    BUSY => Err(EBUSY),
    UNSUPPORTED => Err(crate::errno::unsupported()),
    PERM => Err(EPERM),
    FAULT => Err(EFAULT),
    LENGTH => Err(EMSGSIZE),
    STATE => Err(crate::errno::wrong_state()),
    EXISTS => Err(EEXIST),
}

/// The state of a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The caller owns the memory.
    Idle,
    /// The device owns the memory.
    Sent,
    /// The device replied, and says that it wrote this many bytes.
    Replied(u32),
}

/// The requests for notification of one CQ. At most one of them is under way; what is asked for meanwhile is sent
/// when the device has returned it.
struct Notify {
    sent: bool,
    wanted: u32,
}

struct Inner {
    /// The exchanges with tokens below [`MAX_SLOTS`] are those of the slots, those behind the CQs'.
    queue: Option<Queue>,
    slots: [State; MAX_SLOTS as usize],
    notifies: KVec<Notify>,
    /// Whether requests for notification wait because their memory could not be mapped.
    unmapped: bool,
    /// Callers that look for their replies.
    pollers: u32,
    /// Callers that sleep until the interrupt. It is off while there are pollers and no sleepers.
    sleepers: u32,
}

/// The control queue of a device.
#[pin_data]
pub(crate) struct ControlQueue {
    dev: ARef<device::Device>,
    broken: Atomic<bool>,
    /// Callers that looked for their replies in vain, since the last one whose reply came meanwhile.
    vain: Atomic<u32>,
    /// The time that a caller looks for its reply, in nanoseconds.
    look_time: Atomic<u32>,
    /// Wakes the caller of each slot.
    replies: KVec<Pin<KBox<Completion>>>,
    #[pin]
    inner: IrqSpinLock<Inner>,
    #[pin]
    free: Mutex<KVec<u32>>,
    #[pin]
    freed: CondVar,
}

/// The reason why a command has no reply: the device has failed.
pub(crate) enum Failed {
    /// The transport broke the queue: the device was taken away, or the machine goes down.
    Broken,
    /// The device did not reply in time.
    Silent,
    /// Somebody else has reset the device, which has forgotten the command.
    Reset,
    /// The device replied, and no interrupt said so.
    Untold,
}

impl ControlQueue {
    /// Allocates what the queue of a device needs that notifies of `cqs` CQs by command; `dev` is the device in
    /// messages. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(dev: ARef<device::Device>, cqs: u32) -> Result<impl PinInit<Self, Error>> {
        let mut replies = KVec::new();
        for _ in 0..MAX_SLOTS {
            replies.push(KBox::pin_init(Completion::new(), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        let mut notifies = KVec::new();
        for _ in 0..cqs {
            let notify = Notify {
                sent: false,
                wanted: 0,
            };
            notifies.push(notify, GFP_KERNEL)?;
        }
        let inner = Inner {
            queue: None,
            slots: [State::Idle; MAX_SLOTS as usize],
            notifies,
            unmapped: false,
            pollers: 0,
            sleepers: 0,
        };
        let free = KVec::with_capacity(MAX_SLOTS as usize, GFP_KERNEL)?;

        Ok(try_pin_init!(Self {
            dev,
            broken: Atomic::new(false),
            vain: Atomic::new(0),
            look_time: Atomic::new(*POLL.end()),
            replies,
            inner <- new_irq_spinlock!(inner, "virtio_rdma::ControlQueue"),
            free <- new_mutex!(free),
            freed <- new_condvar!(),
        }? Error))
    }

    /// Starts to use `queue`. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the ring has no room for a command beside one notification of each CQ; `ENOMEM`.
    pub(crate) fn attach(&self, mut queue: Queue) -> Result {
        let reserved = self.inner.lock().notifies.len() as u32;
        let mut exchanges = KVec::new();
        for _ in 0..MAX_SLOTS + reserved {
            exchanges.push(Exchange::new()?, GFP_KERNEL)?;
        }
        queue.set_exchanges(exchanges)?;
        let slots = (queue.size() / DESCRIPTORS)
            .saturating_sub(reserved)
            .min(MAX_SLOTS);
        self.inner.lock().queue = Some(queue);

        if slots == 0 {
            return Err(EINVAL);
        }
        let mut free = self.free.lock();
        for slot in 0..slots {
            free.push(slot, GFP_KERNEL)?;
        }
        Ok(())
    }

    /// Gives the queue up.
    pub(crate) fn detach(&self) -> Option<Queue> {
        self.inner.lock().queue.take()
    }

    /// Fails the commands under way and all later ones; [`ControlQueue::wake_all`] has to follow.
    /// Any context.
    pub(crate) fn fail(&self) {
        self.broken.store(true, Relaxed);
        for reply in &self.replies {
            reply.complete();
        }
    }

    /// Lets those who wait for a slot find out that the queue has failed. May sleep.
    pub(crate) fn wake_all(&self) {
        // A caller that read `broken` before it was set is waiting by the time this function gets the lock.
        let free = self.free.lock();
        self.freed.notify_all();
        drop(free);
    }

    /// Executes a command. Waits until the device replies: looks for the reply for a moment, then sleeps,
    /// uninterruptibly.
    ///
    /// # Errors
    ///
    /// The error behind the status of the reply; `EIO` if that is unknown, if the length of the reply
    /// is wrong, or if the device has failed; `ENOMEM` if the kernel cannot map the command for the device.
    /// `failed` is called if this command is how it was found out that the device has failed.
    /// The kernel's log has the name of a command that the device refused, as a debug message.
    pub(crate) fn execute<C: Command>(
        &self,
        stats: &Stats,
        request: &C::Request,
        failed: impl FnOnce(Failed),
    ) -> Result<C::Reply> {
        let mut reply = C::Reply::zeroed();
        let began = trace::command_begins();

        stats.count(Counter::Commands);
        let result = self.acquire().and_then(|slot| {
            let sent = self.send_when_mapped(slot, C::OPCODE as u8, request.as_bytes());
            if sent == Err(ENOMEM) {
                // The device never had it.
                self.release(slot);
                return sent;
            }
            sent.map_err(|_| Failed::Broken)
                .and_then(|()| self.wait(slot, stats))
                .map_err(|why| {
                    failed(why);
                    EIO
                })?;
            let result = self.collect(slot, C::NAME, stats, reply.as_bytes_mut());
            self.release(slot);
            result
        });
        if let Some(began) = began {
            trace::command(&self.dev, C::NAME, began, result);
        }
        result
            .inspect_err(|_| stats.count(Counter::CommandErrors))
            .map(|()| reply)
    }

    /// Takes a free slot, or waits for one.
    fn acquire(&self) -> Result<u32> {
        let mut free = self.free.lock();
        loop {
            if self.broken.load(Relaxed) {
                return Err(EIO);
            }
            if let Some(slot) = free.pop() {
                return Ok(slot);
            }
            self.freed.wait(&mut free);
        }
    }

    fn release(&self, slot: u32) {
        // The list has room for all slots.
        let _ = self.free.lock().push_within_capacity(slot);
        self.freed.notify_one();
    }

    /// Sends a request when its memory can be mapped. Bounce buffers (swiotlb) may all be in use for a while, and
    /// nobody tells when one is free.
    ///
    /// # Errors
    ///
    /// Those of [`ControlQueue::send`].
    fn send_when_mapped(&self, slot: u32, opcode: u8, request: &[u8]) -> Result {
        let start = Instant::<Monotonic>::now();
        loop {
            let sent = self.send(slot, opcode, request);
            let gives_up = self.broken.load(Relaxed) || start.elapsed() >= MAPPING;
            if sent != Err(ENOMEM) || gives_up {
                return sent;
            }
            fsleep(UNMAPPED);
        }
    }

    /// Waits until the slot of a request that was sent has the reply. A slot whose reply did not come stays the device's.
    fn wait(&self, slot: u32, stats: &Stats) -> Result<(), Failed> {
        let reply = self.replies.get(slot as usize).ok_or(Failed::Broken)?;

        if !self.poll(slot, stats) {
            let result = self.sleep(slot, reply, stats);
            self.inner.lock().sleepers -= 1;
            return result;
        }
        // A buffer that was taken together with the reply may have broken the queue, and no
        // interrupt tells of that.
        if self.transport_is_broken() {
            return Err(Failed::Broken);
        }
        Ok(())
    }

    /// Looks for the reply of a slot that was just sent, for a moment and while no other thread wants the processor.
    /// Returns whether the reply is there. If it is not, the caller is a sleeper from here on.
    fn poll(&self, slot: u32, stats: &Stats) -> bool {
        let vain = self.vain.load(Relaxed);
        let start = Instant::<Monotonic>::now();
        let mut is_there = false;

        if vain < PATIENCE || vain % PATIENCE == 0 {
            let look_time = self.look_time.load(Relaxed);
            let limit = Delta::from_nanos(look_time.into());
            while !is_there && !needs_processor() && start.elapsed() < limit {
                cpu_relax();
                is_there = self.look(slot, stats);
            }
            let looked = start.elapsed();
            // One that was sent away has learned nothing of replies.
            if is_there || looked >= limit {
                let took = is_there.then_some(looked);
                self.look_time
                    .store(next_look_time(look_time, took), Relaxed);
            }
        }
        let vain = if is_there { 0 } else { vain.wrapping_add(1) };
        self.vain.store(vain, Relaxed);
        self.end_poll(is_there, stats);
        is_there
    }

    /// Takes what the device has used. Returns whether the reply of a slot is there.
    fn look(&self, slot: u32, stats: &Stats) -> bool {
        let mut inner = self.inner.lock();
        self.take_used(&mut inner, stats);
        inner.has_reply(slot)
    }

    /// Leaves it to the interrupt to take what the device uses, unless all callers look for replies: one
    /// that looks may lose the processor for long, and must not keep those that sleep waiting.
    fn end_poll(&self, is_there: bool, stats: &Stats) {
        let mut inner = self.inner.lock();
        inner.pollers -= 1;
        if !is_there {
            inner.sleepers += 1;
        }
        // A reply may have come after the last look and before the interrupt was on.
        while (inner.pollers == 0 || inner.sleepers != 0)
            && inner.queue.as_mut().is_some_and(Queue::has_used)
        {
            self.take_used(&mut inner, stats);
        }
    }

    /// Sleeps until the reply of a slot is there.
    fn sleep(&self, slot: u32, reply: &Completion, stats: &Stats) -> Result<(), Failed> {
        let mut waited = Duration::ZERO;
        loop {
            // A thread that looked for its reply may have found that the queue is broken.
            if self.transport_is_broken() {
                return Err(Failed::Broken);
            }
            if waited >= timeout() {
                return Err(self.silence(slot, stats));
            }
            if self.broken.load(Relaxed) || reply.wait_timeout(LIVENESS) {
                break;
            }
            if self.device_was_reset() {
                return Err(Failed::Reset);
            }
            waited += LIVENESS;
        }
        if self.inner.lock().has_reply(slot) {
            Ok(())
        } else {
            Err(Failed::Silent)
        }
    }

    /// Finds out whether a command that timed out has a reply that no interrupt told of.
    fn silence(&self, slot: u32, stats: &Stats) -> Failed {
        // Taking replies fails only if the queue is broken, and then there is no reply.
        let _ = self.interrupt(stats);
        if self.inner.lock().has_reply(slot) {
            Failed::Untold
        } else {
            Failed::Silent
        }
    }

    /// Returns whether somebody else has reset the device. May sleep.
    fn device_was_reset(&self) -> bool {
        let status = self.inner.lock().queue.as_ref().map(Queue::status);
        status.is_some_and(|status| status.is_reset())
    }

    fn transport_is_broken(&self) -> bool {
        self.inner
            .lock()
            .queue
            .as_ref()
            .is_none_or(Queue::is_broken)
    }

    /// Sends a request. [`ControlQueue::end_poll`] has to follow.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the memory of the request or the reply cannot be mapped; others if the queue is broken.
    fn send(&self, slot: u32, opcode: u8, request: &[u8]) -> Result {
        let rcu = rcu::read_lock();
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let queue = inner.queue.as_mut().ok_or(ENODEV)?;
        let state = inner.slots.get_mut(slot as usize).ok_or(EINVAL)?;
        let reply = self.replies.get(slot as usize).ok_or(EINVAL)?;

        reply.reinit();
        queue.exchange(slot)?.set_request(opcode, request)?;
        queue.add_exchange(slot)?;
        *state = State::Sent;
        inner.pollers += 1;
        if inner.sleepers == 0 {
            queue.disable_interrupt();
        }
        let notice = queue.prepare_kick(&rcu);
        drop(guard);
        if let Some(notice) = notice {
            notice.send();
        }
        Ok(())
    }

    /// Checks the reply to the command `name` in a slot, and copies the reply out.
    fn collect(&self, slot: u32, name: &str, stats: &Stats, body: &mut [u8]) -> Result {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let state = inner.slots.get_mut(slot as usize).ok_or(EINVAL)?;
        let State::Replied(written) = *state else {
            return Err(EIO);
        };
        *state = State::Idle;
        // A device that has failed since is reset at once, and its queues are given up.
        let queue = inner.queue.as_mut().ok_or(EIO)?;
        let code = queue.exchange(slot)?.reply(body)?;
        drop(guard);

        let bad = |counter| {
            stats.bad_reply(counter, name);
            EIO
        };
        let written = written as usize;
        if !(1..=Exchange::SIZE).contains(&written) {
            return Err(bad(Counter::BadReplyLength));
        }
        let status = status(code).ok_or_else(|| bad(Counter::BadReplyStatus))?;
        status
            .result
            .inspect_err(|_| log::command_failed(&self.dev, name, status.name))?;
        if written < 1 + body.len() {
            return Err(bad(Counter::BadReplyLength));
        }
        Ok(())
    }

    /// Asks the device to signal CQ `cqn`, with `VIRTIO_RDMA_NOTIFY_*`. Any context.
    ///
    /// Returns whether requests wait because their memory cannot be mapped. The caller has
    /// [`ControlQueue::send_unmapped`] called soon if they do.
    pub(crate) fn notify(&self, cqn: u32, flags: u32) -> bool {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;

        if let Some(entry) = inner.notifies.get_mut(cqn as usize) {
            entry.wanted |= flags;
            inner.send_notify(cqn);
        }
        inner.unmapped
    }

    /// Returns whether requests for notification wait because their memory could not be mapped. Any context.
    pub(crate) fn has_unmapped(&self) -> bool {
        self.inner.lock().unmapped
    }

    /// Sends the requests for notification whose memory could not be mapped. Returns whether some wait still. Any
    /// context.
    pub(crate) fn send_unmapped(&self) -> bool {
        let mut inner = self.inner.lock();

        if mem::take(&mut inner.unmapped) {
            for cqn in 0..inner.notifies.len() as u32 {
                inner.send_notify(cqn);
            }
        }
        inner.unmapped
    }

    /// Forgets what was asked for CQ `cqn` and not sent yet.
    pub(crate) fn cancel_notify(&self, cqn: u32) {
        if let Some(entry) = self.inner.lock().notifies.get_mut(cqn as usize) {
            entry.wanted = 0;
        }
    }

    /// Takes replies from the device. Called by the interrupt.
    ///
    /// # Errors
    ///
    /// `EIO` if the queue is broken: there will be no more replies.
    pub(crate) fn interrupt(&self, stats: &Stats) -> Result {
        let mut inner = self.inner.lock();

        self.take_used(&mut inner, stats);
        if inner.queue.as_ref().is_some_and(Queue::is_broken) {
            return Err(EIO);
        }
        Ok(())
    }

    fn take_used(&self, inner: &mut IrqGuard<'_, Inner>, stats: &Stats) {
        while let Some((token, written)) = inner.queue.as_mut().and_then(Queue::get) {
            match token.checked_sub(MAX_SLOTS) {
                None => self.reply_arrived(inner, token, written),
                Some(cqn) => inner.notify_returned(cqn, written, stats),
            }
        }
    }

    fn reply_arrived(&self, inner: &mut IrqGuard<'_, Inner>, slot: u32, written: u32) {
        let index = slot as usize;
        if let (Some(state), Some(reply)) = (inner.slots.get_mut(index), self.replies.get(index)) {
            *state = State::Replied(written);
            reply.complete();
        }
    }
}

impl Inner {
    /// Returns whether the device has replied to the command of a slot.
    fn has_reply(&self, slot: u32) -> bool {
        matches!(self.slots.get(slot as usize), Some(State::Replied(_)))
    }

    /// Sends what is wanted of a CQ's notification, unless one is under way.
    fn send_notify(&mut self, cqn: u32) {
        let (Some(queue), Some(entry)) = (self.queue.as_mut(), self.notifies.get_mut(cqn as usize))
        else {
            return;
        };
        if entry.sent || entry.wanted == 0 {
            return;
        }
        // A request for the next completion covers one for the next solicited completion.
        let flags = if entry.wanted & bindings::VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION != 0 {
            bindings::VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION
        } else {
            bindings::VIRTIO_RDMA_NOTIFY_SOLICITED
        };
        let request = bindings::virtio_rdma_cmd_req_notify {
            cqn: cqn.to_le(),
            flags: flags.to_le(),
        };
        let opcode = bindings::virtio_rdma_cmd_VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ as u8;

        // The ring has room for one request of each CQ. Adding it fails if the queue is broken, which the next command
        // reports, or if its memory cannot be mapped.
        let token = MAX_SLOTS + cqn;
        let added = queue
            .exchange(token)
            .and_then(|exchange| exchange.set_request(opcode, request.as_bytes()))
            .and_then(|()| queue.add_exchange(token));
        match added {
            Ok(()) => {
                entry.sent = true;
                entry.wanted = 0;
                queue.kick();
            }
            Err(error) => self.unmapped |= error == ENOMEM,
        }
    }

    fn notify_returned(&mut self, cqn: u32, written: u32, stats: &Stats) {
        if let (Some(entry), Some(queue)) =
            (self.notifies.get_mut(cqn as usize), self.queue.as_mut())
        {
            entry.sent = false;
            let status = queue
                .exchange(MAX_SLOTS + cqn)
                .and_then(|exchange| exchange.reply(&mut []));
            if !(1..=Exchange::SIZE).contains(&(written as usize)) {
                stats.bad(Counter::BadReplyLength);
            } else if !matches!(status, Ok(0)) {
                stats.count(Counter::CommandErrors);
            }
        }
        self.send_notify(cqn);
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_cmd)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_their_names() {
        assert_eq!(CreateQp::NAME, "CREATE_QP");
        assert_eq!(
            CreateQp::OPCODE,
            bindings::virtio_rdma_cmd_VIRTIO_RDMA_CMD_CREATE_QP
        );
        assert_eq!(DeallocXrcd::NAME, "DEALLOC_XRCD");
    }

    #[test]
    fn statuses_have_names_and_errors() {
        let code = bindings::virtio_rdma_status_VIRTIO_RDMA_STATUS_NO_RESOURCE as u8;
        assert!(status(code)
            .is_some_and(|status| status.name == "NO_RESOURCE" && status.result == Err(ENOMEM)));
        assert!(status(0).is_some_and(|status| status.name == "OK" && status.result == Ok(())));
        // The specification numbers its statuses without a gap.
        let defined = (0..=u8::MAX).filter(|code| status(*code).is_some()).count();
        assert!(status(defined as u8 - 1).is_some());
        assert!(status(defined as u8).is_none());
    }

    #[test]
    fn callers_look_as_long_as_replies_take() {
        let after = |mut look_time, took: Option<i64>, times| {
            for _ in 0..times {
                look_time = next_look_time(look_time, took.map(Delta::from_micros));
            }
            look_time
        };
        // Replies of 15 us, then of 30 us, and callers that look in vain.
        let short = after(*POLL.end(), Some(15), 100);
        assert!((59_000..=61_000).contains(&short));
        assert!((118_000..=122_000).contains(&after(short, Some(30), 100)));
        assert_eq!(after(short, None, 100), *POLL.end());
        // There are bounds.
        assert_eq!(after(short, Some(0), 100), *POLL.start());
        assert_eq!(after(short, Some(i64::MAX / 1000), 100), *POLL.end());
    }

    #[test]
    fn requests_fit_an_exchange() {
        macro_rules! fits {
            ($($command:ident)*) => {
                $(
                    assert!(size_of::<<$command as Command>::Request>() < Exchange::SIZE);
                    assert!(size_of::<<$command as Command>::Reply>() < Exchange::SIZE);
                )*
            };
        }
        fits!(QueryPort CreateQp CreateRingQp ModifyQp QueryQp RegUserMr CreateSrq QueryCounters);
    }
}
