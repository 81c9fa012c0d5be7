// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receiver not ready: the retries of a requester whose peer has no receive (IBA 9.7.5.2.8).
//!
//! A requester of hardware tries again after the RNR timer. This one may ask to be told of the next
//! receive, which costs the peer a doorbell and brings one message through. So it asks only where
//! that is all there is to send, or where nothing came for long; else it pauses for a while in which
//! receives gather, and never for longer than the timer.

use std::time::Duration;

use roce::RnrTimer;

use super::hca::{Hca, RequesterHalf};
use super::observe;
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::qp::halves::{Requester, Wait};

/// `rnr_retry` that means for ever.
const RETRY_INFINITE: u8 = 7;

/// The time for which a requester that has more to send tries again by itself, before it asks the peer to tell of a
/// receive.
pub(crate) const PATIENCE: Duration = Duration::from_millis(5);

/// Returns the RNR timer by its encoding (IBA 9.7.5.2.8, table 45).
fn delay(timer: u8) -> Duration {
    RnrTimer::new(timer & 31).map_or(Duration::ZERO, RnrTimer::delay)
}

/// The decision of a requester whose peer has no receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// The requester waits, and is visited again.
    Later,
    /// The requester fails, because no retry is left.
    Exceeded,
}

/// Returns whether a peer that has no receive is asked again in any case, so that it need not tell of
/// one.
#[inline]
pub(crate) fn asks_again(hca: &Hca, requester: &Requester) -> bool {
    match requester.wait {
        Wait::No | Wait::Answer(_) => true,
        Wait::Pause { since, ask, .. } => {
            let now = hca.clock().now();
            now < ask || (now < since + PATIENCE && requester.queue.waiting() > 0)
        }
        Wait::Receive(_) => false,
    }
}

/// Handles the answer of a peer that has no receive; `timer` is the encoded RNR timer. The peer tells of the next
/// receive, unless the requester has said that it asks again.
pub(crate) fn not_ready(hca: &Hca, slot: Slot, half: &mut RequesterHalf, timer: u8) -> Retry {
    let now = hca.clock().now();
    let timer = delay(timer);
    let until = match half.wait {
        Wait::Pause { ask, .. } if now < ask => return Retry::Later,
        Wait::Receive(until) if now < until => return Retry::Later,
        Wait::Pause { until, .. } if now < until => until,
        _ => {
            if !count_retry(hca, slot, half) {
                return Retry::Exceeded;
            }
            now + timer
        }
    };
    let requester = &mut half.requester;
    if requester.asks_again {
        let since = match requester.wait {
            Wait::Pause { since, .. } => since,
            _ => now,
        };
        let more = requester.queue.waiting() > 0;
        let ask = until.min(now + requester.pace.next(more, timer));
        requester.wait = Wait::Pause { since, ask, until };
        hca.set_timer(slot, Some(ask));
    } else {
        requester.wait = Wait::Receive(until);
        hca.set_timer(slot, Some(until));
    }
    Retry::Later
}

/// Takes one of the retries; `false` if no retry is left.
fn count_retry(hca: &Hca, slot: Slot, half: &mut RequesterHalf) -> bool {
    if half.attr.rnr_retry != RETRY_INFINITE {
        let Some(left) = half.rnr_left.checked_sub(1) else { return false };
        half.rnr_left = left;
    }
    hca.stats.add(Counter::RnrWaits, 1);
    if half.observed {
        let left = (half.attr.rnr_retry != RETRY_INFINITE).then_some(half.rnr_left);
        observe::retried(hca, slot, half.sq_psn(), "no receive", left);
    }
    if let Some(peer) = &half.peer {
        peer.device.stats.add(Counter::RnrNaks, 1);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_those_of_iba() {
        assert_eq!(delay(0), Duration::from_micros(655_360));
        assert_eq!(delay(1), Duration::from_micros(10));
        assert_eq!(delay(31), Duration::from_micros(491_520));
    }
}
