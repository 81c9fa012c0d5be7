// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long a requester pauses whose peer has no receive.

use std::time::Duration;

/// The first pause, and the part of the RNR timer that it may be: a program that receives by
/// polling posts receives one at a time, and is worth waiting for.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const FIRST_PAUSES_A_TIMER: u32 = 4;

/// Messages since the last pause: after fewer, the next pause is twice as long if more are to be sent.
const FEW: u32 = 16;

/// What a requester has learned about its peer's receives.
#[derive(Clone, Copy, Default)]
pub struct Pace {
    /// The last pause.
    pause: Duration,
    /// Messages since then.
    messages: u32,
}

impl Pace {
    /// Counts a message that is through.
    #[inline]
    pub fn count(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }

    /// Returns the next pause; `more` is whether there is more to be sent, `timer` the RNR timer.
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
