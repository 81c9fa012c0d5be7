// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The flow of packets of one half of a QP: when the next packet may be sent, and when the peer is told of congestion.

use std::time::{Duration, Instant};

use crate::dcqcn::{Dcqcn, Notifier, IDLE};
use crate::rate_limit::{RateLimit, Turn};
use crate::saved::Moment;
use crate::trains::Trains;

/// The time for which a mark tells that the path marks packets. Congestion marks packets all the time, and a path may
/// change.
const MARKING: Duration = Duration::from_secs(1);

/// The flow of packets of one half of a QP.
#[derive(Default)]
pub struct Flow {
    /// The rate of the flow after a CNP; `None`: the flow has no rate.
    rate: Option<Box<Dcqcn>>,
    /// The reservation of the next packet at the limit of the guest, if the limit was asked.
    turn: Option<Turn>,
    /// The time at which the last packet was sent.
    sent_at: Option<Instant>,
    trains: Trains,
    /// The time at which the last CNP was handled.
    told_at: Option<Instant>,
    /// The CNPs for packets that arrive marked.
    pub notifier: Notifier,
}

impl Flow {
    /// Returns the saved state: the time at which the last packet was sent.
    ///
    /// The rate is not saved, because CNPs set it again as they do for a new flow, nor is whether packets form trains,
    /// which is judged again. The reservation at the limit of the guest is not saved either, which costs a turn, nor is
    /// the time of the last CNP, which costs one CNP more.
    pub fn save(&self, now: Instant) -> Option<Moment> {
        self.sent_at.map(|time| Moment::of(time, now))
    }

    /// Returns the flow of a saved state, without a rate.
    pub fn load(sent_at: Option<Moment>, now: Instant) -> Self {
        Self { sent_at: sent_at.map(|sent| sent.time(now)), ..Self::default() }
    }

    /// Handles a CNP. `line_rate` is the rate of a flow that was never cut, in bytes per second. Returns `false` if the
    /// CNP is ignored: it arrives too soon after another one, or no packet was sent lately that can be marked.
    pub fn cut(&mut self, now: Instant, line_rate: u64) -> bool {
        if self.is_idle(now) {
            return false;
        }
        self.told_at = Some(now);
        if let Some(rate) = &mut self.rate {
            return rate.cut(now);
        }
        self.rate = Some(Box::new(Dcqcn::new(now, line_rate)));
        true
    }

    /// Returns whether a CNP has cut the rate of the flow, and the flow has not recovered.
    pub fn is_cut(&self) -> bool {
        self.rate.is_some()
    }

    /// Returns whether the path marks the packets that are sent: a CNP was handled lately, as seen from the last
    /// packet.
    pub fn is_marked(&self) -> bool {
        self.is_lately(self.told_at)
    }

    /// Returns whether packets that arrive are marked: one was, not long before the last packet was sent.
    pub fn arrives_marked(&self) -> bool {
        self.is_lately(self.notifier.told())
    }

    fn is_lately(&self, mark: Option<Instant>) -> bool {
        let distance =
            self.sent_at.zip(mark).map(|(sent, mark)| sent.saturating_duration_since(mark));
        distance.is_some_and(|distance| distance < MARKING)
    }

    /// Returns whether no packet was sent for so long that nothing is known of the network any more.
    pub fn is_idle(&self, now: Instant) -> bool {
        self.sent_at.is_none_or(|sent| now.saturating_duration_since(sent) >= IDLE)
    }

    /// Returns until when a packet of `bytes` bytes has to wait; `None` if the packet may be sent now.
    pub fn wait(&mut self, now: Instant, bytes: u64, limit: &RateLimit) -> Option<Instant> {
        if let Some(rate) = &self.rate {
            if rate.is_released(now) {
                self.rate = None;
            } else if rate.next() > now {
                return Some(rate.next());
            }
        }
        limit.wait(&mut self.turn, bytes, now)
    }

    /// Returns whether the next packet may leave in a train with those in front of it.
    #[inline]
    pub fn forms_trains(&self) -> bool {
        self.trains.may_form()
    }

    /// Notes that a packet of `bytes` bytes was sent, which [`Self::wait`] has let pass, and whether it was sent before
    /// and lost.
    pub fn sent(&mut self, now: Instant, bytes: u64, is_lost: bool) {
        self.turn = None;
        self.trains.sent(is_lost);
        self.sent_at = Some(now);
        if let Some(rate) = &mut self.rate {
            rate.sent(now, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dcqcn::LINE_RATE;

    #[test]
    fn a_mark_tells_for_a_second_that_a_path_marks() {
        let (start, mut flow) = (Instant::now(), Flow::default());
        let at = |millis| start + Duration::from_millis(millis);
        flow.sent(at(0), 100, false);
        assert!(!flow.is_marked() && !flow.arrives_marked());
        assert!(flow.cut(at(1), LINE_RATE));
        assert!(flow.is_marked() && !flow.arrives_marked());
        flow.notifier.marked(at(500));
        flow.sent(at(1000), 100, false);
        assert!(flow.is_marked() && flow.arrives_marked());
        flow.sent(at(1001), 100, false);
        assert!(!flow.is_marked() && flow.arrives_marked());
        flow.sent(at(1500), 100, false);
        assert!(!flow.arrives_marked());
    }
}
