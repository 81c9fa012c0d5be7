// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads of the workers: how they begin together, and how they end together.
//!
//! Guests that another process has served are loaded by all workers at the same time, and saved so, because nobody
//! serves the guests meanwhile. All workers have loaded their guests before any of them runs, and all of them have
//! stopped before any of them saves.

use std::io::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{Resumed, Worker};
use crate::handover::{self, Unreadable};

/// A worker, and the guests that it is to go on with.
pub type Assigned = (Worker, Vec<Resumed>);

/// Steps that threads take together.
#[derive(Default)]
struct Steps {
    state: Mutex<Taken>,
    changed: Condvar,
}

#[derive(Default)]
struct Taken {
    /// The number of threads.
    members: usize,
    /// The number of threads that wait for the next step.
    waiting: usize,
    /// The number of steps that were taken.
    steps: u64,
}

impl Taken {
    /// Takes the step if all threads wait for it.
    fn review(&mut self) {
        if self.waiting == self.members {
            self.waiting = 0;
            self.steps += 1;
        }
    }
}

/// A thread that takes the steps. One that ends, also by a panic, is not waited for any more.
struct Member(Arc<Steps>);

impl Member {
    fn new(steps: &Arc<Steps>) -> Self {
        steps.state.lock().unwrap_or_else(PoisonError::into_inner).members += 1;
        Self(steps.clone())
    }

    /// Waits until all threads want to take this step.
    fn step(&self) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.steps;
        state.waiting += 1;
        state.review();
        self.0.changed.notify_all();
        while state.steps == before {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.members -= 1;
        state.review();
        self.0.changed.notify_all();
    }
}

/// The decision of the main thread, for all threads.
#[derive(Default)]
struct Decision {
    /// Whether the guests are loaded. If not, the process does not start.
    loads: AtomicBool,
    /// Whether the process serves guests. If not, it ends, and leaves everything as it was.
    serves: AtomicBool,
    /// Whether another process is to go on with the guests.
    leaves: AtomicBool,
}

/// The threads of the workers, for the main thread.
pub struct Crew {
    threads: Vec<JoinHandle<()>>,
    member: Member,
    decision: Arc<Decision>,
    unreadable: mpsc::Receiver<Unreadable>,
}

/// The reason why the threads cannot start.
#[derive(Debug)]
pub struct NotPrepared {
    /// The index of the worker.
    pub index: usize,
    /// The reason.
    pub error: String,
}

impl Crew {
    /// Starts a thread for each worker, which calls `prepare` with the worker's index. All of them are prepared when
    /// this returns, and none of them has begun to load its guests.
    pub fn start(
        workers: Vec<Assigned>,
        prepare: impl Fn(usize) -> Result<(), String> + Clone + Send + 'static,
    ) -> Result<Self, NotPrepared> {
        let (steps, decision) = (Arc::default(), Arc::<Decision>::default());
        let (unreadable, of_main) = mpsc::channel();
        let member = Member::new(&steps);
        let mut crew = Self { threads: Vec::new(), member, decision, unreadable: of_main };
        for (index, (worker, resumed)) in workers.into_iter().enumerate() {
            let (ready, is_ready) = mpsc::sync_channel(1);
            let (prepare, unreadable) = (prepare.clone(), unreadable.clone());
            let (member, decision) = (Member::new(&steps), crew.decision.clone());
            let run = move || {
                let prepared = prepare(index);
                let is_prepared = prepared.is_ok();
                // The main thread waits for this, so it cannot fail.
                let _ = ready.send(prepared);
                if is_prepared {
                    serve(worker, resumed, &member, &decision, &unreadable);
                }
            };
            let failed = |error: Error| NotPrepared { index, error: error.to_string() };
            let thread = std::thread::Builder::new().name(format!("worker {index}"));
            crew.threads.push(thread.spawn(run).map_err(failed)?);
            let gone = || Err("its thread ended".to_owned());
            let prepared = is_ready.recv().unwrap_or_else(|_| gone());
            prepared.map_err(|error| NotPrepared { index, error })?;
        }
        Ok(crew)
    }

    /// Makes the workers load their guests, and waits until they have done so. The state that another process has left
    /// does not change. Returns an error for each guest that cannot be read.
    pub fn load(&self) -> Vec<Unreadable> {
        self.decision.loads.store(true, Ordering::SeqCst);
        self.member.step();
        self.member.step();
        self.unreadable.try_iter().collect()
    }

    /// Makes the workers serve their guests. The state that another process has left is this process's from now on.
    pub fn serve(&self) {
        self.decision.serves.store(true, Ordering::SeqCst);
        self.member.step();
    }

    /// Waits until the workers have ended, which were told to. With `leaves` they leave their guests to another
    /// process.
    pub fn end(self, leaves: bool) {
        self.decision.leaves.store(leaves, Ordering::SeqCst);
        let Self { threads, member, .. } = self;
        // The workers take the rest of the steps by themselves.
        drop(member);
        for thread in threads {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

/// Runs the thread of a worker.
fn serve(
    mut worker: Worker,
    resumed: Vec<Resumed>,
    member: &Member,
    decision: &Decision,
    unreadable: &mpsc::Sender<Unreadable>,
) {
    member.step();
    if !decision.loads.load(Ordering::SeqCst) {
        return;
    }
    for error in worker.load(resumed) {
        // The main thread waits for this thread, so it cannot fail.
        let _ = unreadable.send(error);
    }
    member.step();
    member.step();
    if !decision.serves.load(Ordering::SeqCst) {
        // A drop would reset the devices.
        std::mem::forget(worker);
        return;
    }
    worker.begin();
    worker.run();
    // No worker hands a guest to another one after this.
    member.step();
    let stopped = handover::now();
    if !decision.leaves.load(Ordering::SeqCst) {
        return;
    }
    // What one guest still wants may change the devices of others.
    let states = worker.finish();
    member.step();
    worker.leave(&states, stopped);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody takes a step before the others want to, and a thread that panics is not waited for.
    #[test]
    fn threads_take_steps_together() {
        let steps = Arc::<Steps>::default();
        let done = Arc::new(Mutex::new(Vec::new()));
        let member = Member::new(&steps);
        let threads = [0, 1, 2].map(|thread| {
            let (member, done) = (Member::new(&steps), done.clone());
            std::thread::spawn(move || {
                for step in 0..100 {
                    assert!(thread != 1 || step < 50, "for the test");
                    done.lock().unwrap().push(step);
                    member.step();
                }
            })
        });
        drop(member);
        assert_eq!(threads.map(|thread| thread.join().is_ok()), [true, false, true]);
        let done = done.lock().unwrap();
        assert!(done.is_sorted());
        assert_eq!(done.len(), 250);
    }
}
