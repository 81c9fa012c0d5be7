// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The log, in which each guest has a limited share.
//!
//! A guest that resets its device in a loop, or a VMM that connects over and over, makes a line
//! each time. So each guest may have some lines of each kind at once and some per minute; further lines
//! are left out and counted. Lines that are more detailed than `info` are not limited: whoever asked for
//! them wants them.
//!
//! Whoever reads the log may stall: a journal whose disk is full, a terminal that is stopped. No thread that serves
//! guests waits for that. Lines go through a queue, from which one thread writes them; what finds the queue full is
//! lost and counted.

use std::collections::HashMap;
use std::io::{Error, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::Layer;

/// The most lines of one kind that a guest may have at once.
const BURST: u32 = 10;
/// Kinds of lines of guests that are counted at a time, besides those of the last 100 s. Guests come and go.
const MOST: usize = 4096;
/// The time after which a guest may have one more line of a kind.
const PERIOD: Duration = Duration::from_secs(10);

/// Most lines that wait to be written.
const WAITING: usize = 4096;
/// The time that the process waits at its end for lines that are to be written.
const END: Duration = Duration::from_secs(1);

/// The number of lines that were left out.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// The queue of lines that wait to be written, once there is a thread that writes them.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Returns how many lines were left out, because a guest had too many of their kind, or because too many waited to be
/// written.
pub fn left_out() -> u64 {
    LEFT_OUT.load(Ordering::Relaxed)
}

/// An entry that waits to be written.
enum Waiting {
    Line(Vec<u8>),
    /// Tell this that everything before it is written.
    Flush(SyncSender<()>),
}

/// A queue of lines, which keeps nobody waiting.
struct Queue {
    sender: SyncSender<Waiting>,
    /// The number of lines that were lost and not told of.
    lost: AtomicU64,
}

impl Queue {
    /// Makes a queue of so many lines.
    fn new(most: usize) -> (Self, Receiver<Waiting>) {
        let (sender, receiver) = sync_channel(most);
        (Self { sender, lost: AtomicU64::new(0) }, receiver)
    }

    /// Puts a line in.
    fn push(&self, line: &[u8]) {
        if self.sender.try_send(Waiting::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
            LEFT_OUT.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes what comes. It ends with the queue.
    fn write(&self, waiting: &Receiver<Waiting>, mut out: impl Write) {
        for line in waiting {
            match line {
                // There is nobody to tell of an error.
                Waiting::Line(line) => {
                    let _ = out.write_all(&line);
                }
                Waiting::Flush(done) => {
                    let _ = done.send(());
                }
            }
            let lost = self.lost.swap(0, Ordering::Relaxed);
            if lost != 0 {
                let _ =
                    writeln!(out, "{lost} lines of the log are lost: nobody read it for a while");
            }
        }
    }

    /// Waits until everything is written, but not longer than this.
    fn flush(&self, limit: Duration) {
        let (done, is_done) = sync_channel(1);
        if self.sender.try_send(Waiting::Flush(done)).is_ok() {
            let _ = is_done.recv_timeout(limit);
        }
    }
}

/// Writes lines where they go at present.
struct Lines;

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        match QUEUE.get() {
            Some(queue) => queue.push(bytes),
            None => std::io::stderr().write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// Starts the thread that writes the log. It calls `confine` first. Call this once.
pub fn start_writer(confine: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let (queue, waiting) = Queue::new(WAITING);
    let write = move || {
        confine();
        if let Some(queue) = QUEUE.get() {
            queue.write(&waiting, std::io::stderr());
        }
    };
    let _ = QUEUE.set(queue);
    std::thread::Builder::new().name("log".to_owned()).spawn(write)?;
    Ok(())
}

/// Waits for a moment until what was logged is written.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(END);
    }
}

/// Logs to standard error from now on what `targets` says, or `RUST_LOG` if that is set and can be read.
pub fn start(targets: &Targets) {
    let of_environment = std::env::var("RUST_LOG").ok().and_then(|text| text.parse().ok());
    let filter: Targets = of_environment.unwrap_or_else(|| targets.clone());
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines =
        tracing_subscriber::fmt::layer().with_writer(|| Lines).with_ansi(ansi).with_target(false);
    tracing_subscriber::registry().with(lines.with_filter(Shares::default())).with(filter).init();
}

/// Counts the lines of each guest and each kind.
#[derive(Debug, Default)]
struct Shares(Mutex<HashMap<(String, Identifier), Share>>);

impl Shares {
    /// Takes a line of a kind from the share of a guest. Returns whether there was one left.
    fn take(&self, guest: String, kind: Identifier, now: Instant) -> bool {
        let mut shares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if shares.len() >= MOST {
            // A share that is whole again is equal to a new one.
            shares.retain(|_, share| now.saturating_duration_since(share.since) < PERIOD * BURST);
        }
        shares.entry((guest, kind)).or_insert(Share { lines: BURST, since: now }).take(now)
    }
}

/// The number of lines that a guest may still have, as of `since`.
#[derive(Debug)]
struct Share {
    lines: u32,
    since: Instant,
}

impl Share {
    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        let more = u32::try_from(passed.as_nanos() / PERIOD.as_nanos()).unwrap_or(BURST).min(BURST);
        if more > 0 {
            self.lines = (self.lines + more).min(BURST);
            self.since = now;
        }
        let left = self.lines.checked_sub(1);
        self.lines = left.unwrap_or(0);
        left.is_some()
    }
}

/// The name of the guest that a span is about.
struct Guest(String);

/// Finds a field that names a guest.
struct Finder {
    field: &'static str,
    found: Option<String>,
}

impl Visit for Finder {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == self.field {
            self.found = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Filter<S> for Shares {
    fn enabled(&self, _metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, context: &Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let of_span = || {
            let mut scope = context.event_scope(event)?;
            scope.find_map(|span| span.extensions().get::<Guest>().map(|guest| guest.0.clone()))
        };
        let mut finder = Finder { field: "guest", found: None };
        event.record(&mut finder);
        let Some(guest) = finder.found.or_else(of_span) else { return true };
        let passes = self.take(guest, event.metadata().callsite(), Instant::now());
        LEFT_OUT.fetch_add(u64::from(!passes), Ordering::Relaxed);
        passes
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().name() != "guest" {
            return;
        }
        let mut finder = Finder { field: "name", found: None };
        attributes.record(&mut finder);
        if let (Some(span), Some(name)) = (context.span(id), finder.found) {
            span.extensions_mut().insert(Guest(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Lines of one guest and one kind are limited. Other guests, and the process itself, still have
    /// theirs.
    #[test]
    fn a_guest_has_its_share_of_the_log() {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
        let log = tracing_subscriber::registry().with(layer.with_filter(Shares::default()));
        tracing::subscriber::with_default(log, || {
            let span = tracing::info_span!("guest", name = "loud");
            for _ in 0..1000 {
                span.in_scope(|| tracing::info!("resets"));
                tracing::warn!(guest = "loud", "comes back");
                tracing::info!("of nobody");
            }
            span.in_scope(|| tracing::info!("another kind"));
            tracing::info_span!("guest", name = "quiet").in_scope(|| tracing::info!("resets"));
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.ends_with(what)).count();
        assert_eq!(count("resets"), 10 + 1);
        assert_eq!(text.lines().filter(|line| line.contains("comes back")).count(), 10);
        assert_eq!(count("of nobody"), 1000);
        assert_eq!(count("another kind"), 1);
        assert!(left_out() >= 2 * 990);
    }

    /// Guests that have gone are not counted for ever.
    #[test]
    fn shares_are_forgotten() {
        let line = tracing::info_span!("a line");
        let Some(metadata) = line.metadata() else { return };
        let (shares, start) = (Shares::default(), Instant::now());
        let take = |guest: usize, now| shares.take(guest.to_string(), metadata.callsite(), now);
        assert!((0..MOST).all(|guest| take(guest, start)));
        assert!(take(MOST, start + PERIOD * BURST));
        assert_eq!(shares.0.lock().unwrap().len(), 1);
    }

    /// Nobody waits for a reader that has stalled. What was lost is told when it reads again.
    #[test]
    fn nobody_waits_for_the_log() {
        let (queue, waiting) = Queue::new(3);
        (0..10).for_each(|line| queue.push(format!("line {line}\n").as_bytes()));
        queue.flush(Duration::ZERO);
        let lines = Lines::default();
        let write = |queue: &Queue| {
            let mut waiting = waiting.try_iter();
            let (sender, receiver) = sync_channel(3);
            waiting.by_ref().for_each(|line| sender.send(line).unwrap());
            drop(sender);
            queue.write(&receiver, lines.clone());
        };
        write(&queue);
        queue.push(b"one more\n");
        write(&queue);
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let lost = "7 lines of the log are lost: nobody read it for a while\n";
        assert_eq!(text, format!("line 0\n{lost}line 1\nline 2\none more\n"));
    }

    #[test]
    fn a_share_grows_again() {
        let start = Instant::now();
        let mut share = Share { lines: BURST, since: start };
        assert_eq!((0..100).filter(|_| share.take(start)).count(), 10);
        assert_eq!((0..100).filter(|_| share.take(start + 2 * PERIOD)).count(), 2);
        assert_eq!((0..100).filter(|_| share.take(start + 1000 * PERIOD)).count(), 10);
    }
}
