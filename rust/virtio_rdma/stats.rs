// SPDX-License-Identifier: GPL-2.0

//! The counters of a device, which `rdma stat` shows. Bad input from the device
//! is counted by kind, and the first of each kind is logged.
//!
//! Each CPU counts on cache lines of its own, because each post and each poll counts.

#![deny(unsafe_code)]

use crate::ib::StatDesc;
use kernel::{
    cpu::{
        nr_cpu_ids,
        CpuId, //
    },
    device,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
    },
};

/// Declares the counters: the name in the driver, the name in sysfs, and what is logged when the first one is counted.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $label:literal, $message:literal;)*) => {
        /// A counter.
        #[derive(Clone, Copy)]
        pub(crate) enum Counter {
            $($(#[$doc])* $name,)*
        }

        /// The names of the counters in sysfs.
        pub(crate) const DESCRIPTIONS: &[StatDesc] = &[$(StatDesc::new($label),)*];

        const MESSAGES: &[&str] = &[$($message,)*];
    };
}

counters! {
    /// Send work requests posted.
    SendsPosted: c"sends_posted", "";
    /// Receive work requests posted.
    RecvsPosted: c"recvs_posted", "";
    /// Completions polled.
    Completions: c"completions", "";
    /// Completions with an error.
    CompletionErrors: c"completion_errors", "";
    /// Commands executed.
    Commands: c"commands", "";
    /// Commands with an error.
    CommandErrors: c"command_errors", "";
    /// Doorbells rung.
    Doorbells: c"doorbells", "";
    /// Asynchronous events.
    Events: c"events", "";
    /// Replies shorter than the command's structure, or longer than their buffer.
    BadReplyLength: c"bad_reply_length", "a reply has a wrong length";
    /// Replies with a status that is not defined.
    BadReplyStatus: c"bad_reply_status", "a reply has an unknown status";
    /// Replies with a value that makes no sense.
    BadReplyValue: c"bad_reply_value", "a reply has a value out of range";
    /// Handles out of range, or given twice.
    BadHandle: c"bad_handle", "a new object has a number that is out of range or taken";
    /// CQEs of the wrong length.
    BadCqeLength: c"bad_cqe_length", "a CQE has a wrong length";
    /// CQEs that name no QP of their CQ.
    BadCqeQp: c"bad_cqe_qp", "a CQE names no QP of its CQ";
    /// CQEs that name no outstanding work request.
    BadCqeWrId: c"bad_cqe_wr_id", "a CQE names no outstanding work request";
    /// CQEs with an unknown status.
    BadCqeStatus: c"bad_cqe_status", "a CQE has an unknown status";
    /// CQEs of receives with an unknown opcode.
    BadCqeOpcode: c"bad_cqe_opcode", "a CQE has an unknown opcode";
    /// CQEs of receives with more bytes than the work request had room for.
    BadCqeByteLen: c"bad_cqe_byte_len", "a CQE claims more bytes than there was room for";
    /// CQEs with a number that no VLAN has.
    BadCqeVlan: c"bad_cqe_vlan", "a CQE has a number that no VLAN has";
    /// Events of an unknown kind or of the wrong length.
    BadEvent: c"bad_event", "an event is unknown or has a wrong length";
    /// Events of an object that does not exist (any more).
    StaleEvent: c"stale_events", "";
}

/// The counts of the threads on one CPU.
#[repr(align(64))]
struct Share([Atomic<u64>; DESCRIPTIONS.len()]);

/// The values of the counters.
pub(crate) struct Stats {
    dev: ARef<device::Device>,
    /// The share of each CPU.
    shares: KVVec<Share>,
    /// Whether bad input of a kind was logged.
    logged: [Atomic<bool>; DESCRIPTIONS.len()],
}

impl Stats {
    /// Makes counters that log in the name of `dev`. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(dev: ARef<device::Device>) -> Result<Self> {
        let count = nr_cpu_ids() as usize;
        let mut shares = KVVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            let share = Share([const { Atomic::new(0) }; DESCRIPTIONS.len()]);
            shares.push(share, GFP_KERNEL)?;
        }
        Ok(Self {
            dev,
            shares,
            logged: [const { Atomic::new(false) }; DESCRIPTIONS.len()],
        })
    }

    /// Counts one. Any context.
    pub(crate) fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Counts `n`. Any context.
    pub(crate) fn add(&self, counter: Counter, n: u64) {
        // A thread that goes to another CPU meanwhile counts in the share of the first one, which is right too.
        let cpu = CpuId::current().as_u32() as usize;
        if let Some(Share(values)) = self.shares.get(cpu) {
            values[counter as usize].add(n, Relaxed);
        }
    }

    /// Counts bad input from the device. Returns what to log if it is the first of its kind.
    fn first_bad(&self, counter: Counter) -> Option<&'static str> {
        self.count(counter);
        let is_first = !self.logged[counter as usize].xchg(true, Relaxed);
        is_first.then_some(MESSAGES[counter as usize])
    }

    /// Counts bad input from the device, and logs the first of its kind. Any context.
    pub(crate) fn bad(&self, counter: Counter) {
        if let Some(message) = self.first_bad(counter) {
            dev_warn!(
                self.dev,
                "the device misbehaves: {message}; later ones are only counted\n"
            );
        }
    }

    /// Does what [`Stats::bad`] does, for bad input in the reply to the command with this name. Any context.
    pub(crate) fn bad_reply(&self, counter: Counter, command: &str) {
        if let Some(message) = self.first_bad(counter) {
            dev_warn!(
                self.dev,
                "the device misbehaves: {message} ({command}); later ones are only counted\n"
            );
        }
    }

    /// Returns the value of the counter with this index.
    pub(crate) fn value(&self, index: usize) -> u64 {
        self.shares
            .iter()
            .filter_map(|Share(values)| values.get(index))
            .map(|value| value.load(Relaxed))
            .fold(0, u64::wrapping_add)
    }
}
