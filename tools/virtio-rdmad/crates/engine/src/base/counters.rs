// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a device.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

counted! {
    /// What a device counts.
    pub enum Counter {
        /// SENDs completed as the requester.
        SendMessages = "send_messages",
        /// Bytes of SENDs completed as the requester.
        SendBytes = "send_bytes",
        /// RDMA WRITEs completed as the requester.
        WriteMessages = "write_messages",
        /// Bytes of RDMA WRITEs completed as the requester.
        WriteBytes = "write_bytes",
        /// RDMA READs completed as the requester.
        ReadMessages = "read_messages",
        /// Bytes of RDMA READs completed as the requester.
        ReadBytes = "read_bytes",
        /// Atomics completed as the requester.
        AtomicMessages = "atomic_messages",
        /// FLUSHes completed as the requester.
        FlushMessages = "flush_messages",
        /// Datagrams sent, delivered or not.
        DatagramMessages = "datagram_messages",
        /// Bytes of datagrams sent, delivered or not.
        DatagramBytes = "datagram_bytes",
        /// Payload bytes sent, READs that were served among them.
        XmitBytes = "xmit_bytes",
        /// Packets that the payload bytes sent would be, with one for each READ and atomic asked for.
        XmitPackets = "xmit_packets",
        /// Payload bytes received, those of READs among them.
        RcvBytes = "rcv_bytes",
        /// Packets that the payload bytes received would be.
        RcvPackets = "rcv_packets",
        /// Packets sent to a multicast group.
        MulticastXmitPackets = "multicast_xmit_packets",
        /// Packets received from a multicast group.
        MulticastRcvPackets = "multicast_rcv_packets",
        /// Receives completed.
        ReceiveMessages = "receive_messages",
        /// Bytes of receives completed.
        ReceiveBytes = "receive_bytes",
        /// Times a peer found no receive posted.
        RnrNaks = "rnr_naks_sent",
        /// Times a peer had no receive posted.
        RnrWaits = "rnr_naks_received",
        /// Times a peer did not answer.
        Timeouts = "timeouts",
        /// Work requests flushed.
        Flushed = "flushed",
        /// Completions with LOC_LEN_ERR.
        LocalLength = "local_length_errors",
        /// Completions with LOC_QP_OP_ERR.
        LocalQpOperation = "local_qp_operation_errors",
        /// Completions with LOC_PROT_ERR.
        LocalProtection = "local_protection_errors",
        /// Completions with LOC_ACCESS_ERR.
        LocalAccess = "local_access_errors",
        /// Completions with MW_BIND_ERR: registrations, invalidations and bindings.
        MemoryManagement = "memory_management_errors",
        /// Completions with REM_INV_REQ_ERR.
        RemoteInvalidRequest = "remote_invalid_request_errors",
        /// Completions with REM_ACCESS_ERR.
        RemoteAccess = "remote_access_errors",
        /// Completions with REM_OP_ERR.
        RemoteOperation = "remote_operation_errors",
        /// Completions with RETRY_EXC_ERR.
        RetryExceeded = "retry_exceeded_errors",
        /// Completions with RNR_RETRY_EXC_ERR.
        RnrRetryExceeded = "rnr_retry_exceeded_errors",
        /// Accesses by a peer that a key, a right or a range forbade.
        AccessViolations = "access_violations",
        /// Messages of a peer for an SRQ that is not of the XRC domain.
        XrcViolations = "xrc_violations",
        /// Datagrams dropped: nobody has the destination.
        DropUnreachable = "drop_unreachable",
        /// Datagrams dropped: wrong Q_Key.
        DropQkey = "drop_qkey",
        /// Datagrams and unreliable messages dropped: no receive posted.
        DropNoReceive = "drop_no_receive",
        /// Datagrams and unreliable messages dropped: they do not fit the receive,
        /// or may not be written.
        DropRefused = "drop_refused",
        /// Messages of an unreliable connection that came over the wire and were dropped: a packet of theirs is
        /// missing.
        MessageCutOff = "message_cut_off",
        /// Packets of an unreliable connection dropped: their message was dropped before, or has not begun.
        DropNoMessage = "drop_no_message",
        /// Packets dropped that came over the wire: a guest of this network has sent them to a multicast group.
        DropEcho = "drop_echo",
        /// Packets dropped that came over the wire: too many had not been looked into.
        DropInboxFull = "drop_inbox_full",
        /// Packets dropped that came over the wire and whose headers are not those of RoCE v2.
        BadPacket = "bad_packet",
        /// Packets that came over the wire marked: they met congestion.
        EcnMarked = "np_ecn_marked_roce_packets",
        /// CNPs sent for packets that came over the wire marked.
        CnpSent = "np_cnp_sent",
        /// CNPs that a QP followed by sending more slowly.
        CnpHandled = "rp_cnp_handled",
        /// CNPs that a QP did not follow: for no connection, less than 25 us behind another one, or 0.1 s behind the
        /// last packet that the QP has sent.
        CnpIgnored = "rp_cnp_ignored",
        /// CNPs from the address of a peer that knows selective acknowledgements, which name no packet that the QP has
        /// sent lately.
        CnpStray = "rp_cnp_stray",
        /// Packets dropped that came over the wire and end too early, or have contradictory lengths.
        BadPacketLength = "bad_packet_length",
        /// Packets dropped that came over the wire with a wrong ICRC.
        BadIcrc = "bad_icrc",
        /// Packets dropped that came over the wire with the P_Key of another partition.
        DropPkey = "drop_pkey",
        /// Packets dropped that came over the wire with the source address of a guest of this network.
        DropSpoofed = "drop_spoofed",
        /// Packets dropped that came over the wire for a QP that does not exist.
        DropNoQp = "drop_no_qp",
        /// Packets dropped that came over the wire for a QP of another transport service.
        DropService = "drop_service",
        /// Packets dropped that came over the wire for a QP in a state in which it takes none.
        DropState = "drop_state",
        /// Packets dropped that came over the wire for a connection, and neither its peer nor its own source
        /// has the addresses that they name.
        DropNotPeer = "drop_not_peer",
        /// Packets dropped that came over the wire with more payload than the port's MTU.
        DropTooLong = "drop_too_long",
        /// Requests that came over the wire and were done before, so that only their answer is repeated.
        DuplicateRequests = "duplicate_requests",
        /// Requests dropped that came over the wire, have the PSN of an earlier one, and do not repeat it.
        DropUnknownDuplicate = "drop_unknown_duplicate",
        /// Answers to repeated READs dropped: their memory is not there any more.
        DropRepeatedAnswer = "drop_repeated_answer",
        /// Requests dropped that came over the wire with a PSN that no requester can have sent.
        DropPsn = "drop_psn",
        /// Requests that came over the wire before the one that is expected.
        OutOfSequence = "out_of_sequence",
        /// Requests that came over the wire too early and are held until the one that is expected has come.
        Held = "held_out_of_order",
        /// Requests dropped that came over the wire too early, as there is no room to hold them.
        DropHoldFull = "drop_hold_full",
        /// Requests dropped that came over the wire and were held for a second, in which the one that is expected has
        /// not come.
        DropHoldLate = "drop_hold_late",
        /// Selective acknowledgements sent over the wire.
        SelectiveAcksSent = "selective_acks_sent",
        /// Selective acknowledgements that came over the wire.
        SelectiveAcksReceived = "selective_acks_received",
        /// Times that an answer over the wire took long, so that packets were sent again before a timeout.
        Probes = "probes",
        /// Requests sent over the wire that were sent before, and READs of missing packets of a response.
        PacketsResent = "packets_resent",
        /// Requests dropped that came over the wire while too many answers wait to be sent.
        DropAnswersFull = "drop_answers_full",
        /// Answers dropped that came over the wire and answer no request that is under way.
        UnexpectedAnswers = "unexpected_answers",
        /// Packets not sent over the wire, as their source is not an address of the guest any more.
        DropNotOwn = "drop_not_own",
        /// Completions that found no buffer.
        CqOverflows = "cq_overflows",
        /// Asynchronous events raised.
        Events = "events",
        /// Completion events raised.
        CompletionEvents = "completion_events",
        /// Doorbells rung.
        Doorbells = "doorbells",
        /// Doorbells for a queue that does not exist.
        BadDoorbell = "bad_doorbell",
        /// Rings that a change of the memory map took away.
        LostRings = "lost_rings",
        /// Times that the thread stood still for more than 1 ms at an access to memory of the guest, or of a guest that
        /// it exchanges messages with, or because it had no processor.
        Stalls = "stalls",
        /// What all visits have cost, in nanoseconds as the device estimates them.
        Work = "work_ns",
        /// Control requests.
        Commands = "commands",
        /// Control requests without room for a status.
        CommandNoStatus = "command_without_status",
        /// Control requests that ended in INVAL.
        CommandInvalid = "command_invalid",
        /// Control requests that ended in NO_OBJECT.
        CommandNoObject = "command_no_object",
        /// Control requests that ended in NO_RESOURCE.
        CommandNoResource = "command_no_resource",
        /// Control requests that ended in BUSY.
        CommandBusy = "command_busy",
        /// Control requests that ended in UNSUPPORTED.
        CommandUnsupported = "command_unsupported",
        /// Control requests that ended in PERM.
        CommandPermission = "command_permission",
        /// Control requests that ended in FAULT.
        CommandFault = "command_fault",
        /// Control requests that ended in LENGTH.
        CommandLength = "command_length",
        /// Control requests that ended in STATE.
        CommandState = "command_state",
        /// Control requests that ended in EXISTS.
        CommandExists = "command_exists",
        /// Control requests that ended in ERR.
        CommandError = "command_error",
        /// Addresses that the guest may not use, and wanted to.
        ForeignAddress = "foreign_address",
        /// Malformed chains in the control queue.
        BadControlChain = "bad_control_chain",
        /// Malformed chains in the doorbell queue.
        BadDoorbellChain = "bad_doorbell_chain",
        /// Malformed chains in a send queue, or producers that ran away.
        BadSendChain = "bad_send_chain",
        /// Malformed chains in a receive queue, or producers that ran away.
        BadReceiveChain = "bad_receive_chain",
        /// Malformed chains in a completion queue, or buffers too small.
        BadCompletionBuffer = "bad_completion_buffer",
        /// Malformed chains in the event queue, or buffers too small.
        BadEventBuffer = "bad_event_buffer",
        /// Malformed send work requests.
        BadSendRequest = "bad_send_request",
        /// REG_MR, invalidations and bindings that were refused.
        BadRegistration = "bad_registration",
        /// Malformed receive work requests.
        BadReceiveRequest = "bad_receive_request",
    }
}

/// The counters of one device. Any thread may use them.
pub(crate) struct Stats {
    /// The guest's name, for logs.
    name: String,
    values: Box<[AtomicU64]>,
}

impl Stats {
    /// Returns the counters of a guest's device, all zero.
    pub fn new(name: String) -> Self {
        Self { name, values: Counter::ALL.iter().map(|_| AtomicU64::new(0)).collect() }
    }

    /// Returns the guest's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds to a counter and returns its value before.
    pub fn add(&self, counter: Counter, value: u64) -> u64 {
        self.values[counter as usize].fetch_add(value, Ordering::Relaxed)
    }

    /// Counts an error of the guest's, and logs the first of its kind.
    pub fn guest_error(&self, counter: Counter, detail: impl Display) {
        if self.add(counter, 1) == 0 {
            tracing::warn!(
                guest = self.name,
                kind = counter.name(),
                "{detail} (further ones are only counted)"
            );
        }
    }

    /// Counts that the thread that serves the guest stood still, for the sake of this guest or of its peer. Logs the
    /// first time, the second, the fourth and so on.
    pub fn stalled(&self, time: Duration, peer: Option<&Self>) {
        let before = self.add(Counter::Stalls, 1);
        if let Some(peer) = peer {
            peer.add(Counter::Stalls, 1);
        }
        if (before + 1).is_power_of_two() {
            tracing::warn!(
                guest = self.name,
                peer = peer.map(Self::name),
                "the worker stood still for {time:.1?} (stall {} of this guest): a page of the guest's memory, or of \
                 its peer's, was not there at once, or the worker, or one that helped it, had no processor",
                before + 1
            );
        }
    }

    /// Returns the counters that are not zero, by name.
    pub fn save(&self) -> Vec<(String, u64)> {
        let all = Counter::ALL.iter().map(|counter| (counter.name().into(), self.get(*counter)));
        all.filter(|(_, value)| *value != 0).collect()
    }

    /// Goes on from these values. Counters of other versions are ignored.
    pub fn load(&self, saved: &[(String, u64)]) {
        for (name, value) in saved {
            if let Some(counter) = Counter::ALL.iter().find(|counter| counter.name() == name) {
                self.values[*counter as usize].store(*value, Ordering::Relaxed);
            }
        }
    }

    /// Returns a counter's value.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize].load(Ordering::Relaxed)
    }
}
