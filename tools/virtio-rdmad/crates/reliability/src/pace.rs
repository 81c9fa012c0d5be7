// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pauses of a requester whose peer has no receive (RNR NAK, IBA 9.7.5.2.8).

use std::time::Duration;

/// The first pause, and the part of the RNR timer that the first pause is at most: a program that receives by polling
/// posts receives one at a time, and the next one soon.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const FIRST_PAUSES_A_TIMER: u32 = 4;

/// The number of messages since the last pause below which the next pause is twice as long.
const FEW: u32 = 16;

/// The length of pauses, by how many messages the peer has received between them.
#[derive(Clone, Copy, Default)]
pub struct Pace {
    /// The last pause.
    pause: Duration,
    /// The number of messages since the last pause.
    messages: u32,
}

impl Pace {
    /// Counts a message that the peer has received.
    #[inline]
    pub fn count(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }

    /// Returns the next pause. `more` is whether more messages wait to be sent; `timer` is the RNR timer of the peer.
    pub fn next(&mut self, more: bool, timer: Duration) -> Duration {
        let first = FIRST_PAUSE.min(timer / FIRST_PAUSES_A_TIMER);
        let few = std::mem::take(&mut self.messages) < FEW;
        self.pause = if more && few { (2 * self.pause).clamp(first, timer) } else { first };
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
