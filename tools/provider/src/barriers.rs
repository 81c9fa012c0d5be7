// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The barriers between a program and the device (specification, Rings: Words and orders).
//!
//! The atomics of [`crate::atomic`] order what threads see of each other, and what a device sees that
//! shares memory as a processor does. They are not made for a device behind a bus: with
//! `VIRTIO_RDMA_UDATA_PATH_RINGS_BUS` the platform's barriers for devices are executed in addition to
//! them. These only add to the order, so what `make loom` finds out about the atomics holds for such a
//! device as well.

/// The barriers for words that both the program and the device use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barriers {
    behind_bus: bool,
}

impl Barriers {
    /// The barriers for a device that shares memory as a processor does: the atomics are enough.
    pub const PROCESSORS: Self = Self { behind_bus: false };
    /// The barriers for a device behind a bus.
    pub const BUS: Self = Self { behind_bus: true };

    /// Returns whether the device is behind a bus.
    pub fn are_for_bus(self) -> bool {
        self.behind_bus
    }

    /// Orders all earlier writes before all later writes, as a device behind a bus sees them. A release
    /// store has earlier reads done before it, wherever the device is.
    #[inline]
    pub fn write(self) {
        if self.behind_bus {
            platform::write();
        }
    }

    /// Orders all earlier reads before all later reads of what a device behind a bus writes. An acquire
    /// load comes before later writes, wherever the device is.
    #[inline]
    pub fn read(self) {
        if self.behind_bus {
            platform::read();
        }
    }

    /// Orders all earlier reads and writes before all later ones, as a device behind a bus sees them.
    #[inline]
    pub fn full(self) {
        if self.behind_bus {
            platform::full();
        }
    }
}

/// The barriers of the processor. The compiler moves no access to memory over one of them.
mod platform {
    use core::arch::asm;

    macro_rules! barrier {
        ($name:ident, $x86_64:literal, $aarch64:literal) => {
            #[inline]
            pub fn $name() {
                #[cfg(test)]
                super::executed::$name();
                // SAFETY: the instruction changes no register, no flag, no stack and no memory.
                #[cfg(target_arch = "x86_64")]
                unsafe {
                    asm!($x86_64, options(nostack, preserves_flags))
                };
                // SAFETY: as above.
                #[cfg(target_arch = "aarch64")]
                unsafe {
                    asm!($aarch64, options(nostack, preserves_flags))
                };
                #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
                compile_error!("the barriers of this processor for devices are not known");
            }
        };
    }

    // They are those of the kernel: dma_wmb(), dma_rmb() and dma_mb(). A processor of x86 keeps the order
    // of all accesses to such memory, except that of a write and a later read.
    barrier!(write, "", "dmb oshst");
    barrier!(read, "", "dmb oshld");
    barrier!(full, "mfence", "dmb osh");
}

/// The barriers that a thread of the tests has executed.
#[cfg(test)]
pub(crate) mod executed {
    use std::cell::{Cell, RefCell};

    /// How many barriers were executed, by their kinds.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Executed {
        pub write: u32,
        pub read: u32,
        pub full: u32,
    }

    thread_local! {
        static EXECUTED: Cell<Executed> = const { Cell::new(Executed { write: 0, read: 0, full: 0 }) };
        static AT_READ: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    /// Runs a function once, when this thread next executes the barrier of reads: it stands for what the device does
    /// right after a word was read.
    pub fn at_read(f: impl FnOnce() + 'static) {
        AT_READ.set(Some(Box::new(f)));
    }

    /// Returns the barriers that this thread executes in a function.
    pub fn by<R>(f: impl FnOnce() -> R) -> Executed {
        EXECUTED.take();
        f();
        EXECUTED.take()
    }

    fn count(kind: impl FnOnce(&mut Executed)) {
        let mut executed = EXECUTED.get();
        kind(&mut executed);
        EXECUTED.set(executed);
    }

    pub fn write() {
        count(|executed| executed.write += 1);
    }

    pub fn read() {
        count(|executed| executed.read += 1);
        if let Some(f) = AT_READ.take() {
            f();
        }
    }

    pub fn full() {
        count(|executed| executed.full += 1);
    }
}
