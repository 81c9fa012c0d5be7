// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Atomics of loom, with an order of all sequentially consistent accesses.

use std::cell::Cell;
use std::sync::atomic::Ordering;

loom::thread_local! {
    /// Whether the last access of the thread was sequentially consistent.
    static LAST: Cell<bool> = Cell::new(false);
}

/// Notes that an access with this order follows, and puts a fence in front of it if it needs one.
fn before(order: Ordering) {
    let is_total = order == Ordering::SeqCst;
    if LAST.with(|last| last.replace(is_total)) && is_total {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Makes a fence, as in `std::sync::atomic`.
pub fn fence(order: Ordering) {
    LAST.with(|last| last.set(false));
    loom::sync::atomic::fence(order);
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// The type of this name in `std::sync::atomic`.
        #[derive(Debug, Default)]
        pub struct $name(loom::sync::atomic::$name);

        #[allow(missing_docs)] // as in `std::sync::atomic`
        impl $name {
            #[track_caller]
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            #[track_caller]
            pub fn load(&self, order: Ordering) -> $value {
                before(order);
                self.0.load(order)
            }

            #[track_caller]
            pub fn store(&self, value: $value, order: Ordering) {
                before(order);
                self.0.store(value, order);
            }

            #[track_caller]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                before(order);
                self.0.swap(value, order)
            }

            #[track_caller]
            pub fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                order: Ordering,
                failed: Ordering,
            ) -> Result<$value, $value> {
                before(order);
                self.0.compare_exchange(from, to, order, failed)
            }

            #[track_caller]
            pub fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                before(order);
                self.0.fetch_and(value, order)
            }

            #[track_caller]
            pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                before(order);
                self.0.fetch_or(value, order)
            }
        }
    };
}

macro_rules! number {
    ($name:ident, $value:ty) => {
        atomic!($name, $value);

        #[allow(missing_docs)] // as in `std::sync::atomic`
        impl $name {
            #[track_caller]
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                before(order);
                self.0.fetch_add(value, order)
            }

            #[track_caller]
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                before(order);
                self.0.fetch_sub(value, order)
            }
        }
    };
}

atomic!(AtomicBool, bool);
number!(AtomicU8, u8);
number!(AtomicU32, u32);
number!(AtomicU64, u64);
number!(AtomicUsize, usize);
