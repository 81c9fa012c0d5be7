// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receiver not ready: what a requester does when its peer has no receive (IBA 9.7.5.2.8).
//!
//! A requester of hardware tries again after the RNR timer. This one may ask to be told of the next
//! receive, which costs the peer a doorbell and brings one message through. So it asks only where
//! that is all there is to send, or where nothing came for long; else it pauses for a while in which
//! receives gather, and never for longer than the timer.

use std::time::Duration;

use abi::VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR;

use crate::base::counters::Counter;
use crate::device::Shared;
use crate::qp::halves::{Requester, Wait};
use crate::transport::requester::Step;

/// `rnr_retry` that means for ever.
const RETRY_INFINITE: u8 = 7;

/// The first pause, and the part of the RNR timer that it may be: who receives by polling posts
/// again one at a time, and is worth waiting for.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const FIRST_PAUSES_A_TIMER: u32 = 4;

/// With fewer messages since the last pause, the next is twice as long if more are to be sent.
const FEW: u32 = 16;

/// How long a requester that has more to send tries again by itself before it asks to be told.
pub(crate) const PATIENCE: Duration = Duration::from_millis(5);

/// What a requester has learned about its peer's receives.
#[derive(Default)]
pub(crate) struct Pace {
    /// The last pause.
    pause: Duration,
    /// Messages since then.
    messages: u32,
}

impl Pace {
    /// A message is through.
    #[inline]
    pub fn count(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }

    /// The next pause; `more` is whether there is more to be sent.
    fn next(&mut self, more: bool, timer: Duration) -> Duration {
        let first = FIRST_PAUSE.min(timer / FIRST_PAUSES_A_TIMER);
        let few = std::mem::take(&mut self.messages) < FEW;
        self.pause = if more && few { (2 * self.pause).clamp(first, timer) } else { first };
        self.pause
    }
}

/// IBA 9.7.5.2.8, table 45: the RNR timer by its encoding.
fn delay(timer: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(u64::from(HUNDREDTHS_OF_MS[usize::from(timer & 31)]) * 10)
}

impl Shared {
    /// Whether a peer that has no receive is asked again in any case, so that it need not tell of
    /// one.
    pub(crate) fn asks_again(&self, requester: &Requester) -> bool {
        match requester.wait {
            Wait::No | Wait::Answer(_) => true,
            Wait::Pause { since, ask, .. } => {
                let now = self.clock().now();
                now < ask || (now < since + PATIENCE && requester.queue.waiting() > 0)
            }
            Wait::Receive(_) => false,
        }
    }

    /// The peer has no receive. It tells of the next, unless it was said that it is asked again.
    pub(crate) fn not_ready(&self, slot: u16, requester: &mut Requester, timer: u8) -> Step {
        let now = self.clock().now();
        let timer = delay(timer);
        let until = match requester.wait {
            Wait::Pause { ask, .. } if now < ask => return Step::Wait,
            Wait::Receive(until) if now < until => return Step::Wait,
            Wait::Pause { until, .. } if now < until => until,
            _ => {
                if !self.count_retry(requester) {
                    return Step::End(VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR);
                }
                now + timer
            }
        };
        if requester.asks_again {
            let since = match requester.wait {
                Wait::Pause { since, .. } => since,
                _ => now,
            };
            let more = requester.queue.waiting() > 0;
            let ask = until.min(now + requester.pace.next(more, timer));
            requester.wait = Wait::Pause { since, ask, until };
            self.set_timer(slot, Some(ask));
        } else {
            requester.wait = Wait::Receive(until);
            self.set_timer(slot, Some(until));
        }
        Step::Wait
    }

    /// Takes one of the retries; `false` if none is left.
    fn count_retry(&self, requester: &mut Requester) -> bool {
        if requester.attr.rnr_retry != RETRY_INFINITE {
            let Some(left) = requester.rnr_left.checked_sub(1) else { return false };
            requester.rnr_left = left;
        }
        self.stats.add(Counter::RnrWaits, 1);
        if let Some(peer) = &requester.peer {
            peer.device.stats.add(Counter::RnrNaks, 1);
        }
        true
    }
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

    #[test]
    fn pauses_follow_what_comes_through() {
        let timer = Duration::from_millis(1);
        let mut pace = Pace::default();
        let mut after = |messages: u32| {
            (0..messages).for_each(|_| pace.count());
            pace.next(true, timer).as_micros()
        };
        assert_eq!(
            [after(0), after(1), after(0), after(15), after(0)],
            [200, 400, 800, 1000, 1000]
        );
        assert_eq!([after(16), after(2)], [200, 400]);
        assert_eq!(pace.next(false, timer).as_micros(), 200);
        assert_eq!(Pace::default().next(true, Duration::from_micros(100)).as_micros(), 25);
    }
}
