// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a test is.

use crate::bench::Bench;
use crate::outcome::Outcome;

/// On which members of the network a test runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Where {
    /// On one.
    One,
    /// Between two QPs: once with both in one member, and once with one in each of two.
    Ends,
    /// On two.
    Two,
}

/// A test.
#[derive(Clone, Copy)]
pub struct Test {
    /// The name.
    pub name: &'static str,
    /// The clauses that it judges. It is about the first one.
    pub clauses: &'static [&'static str],
    /// Where it runs.
    pub place: Where,
    /// The feature bits that it needs.
    pub features: &'static [u32],
    /// Whether the members have started, and have their GIDs, when it begins.
    pub starts: bool,
    /// The test.
    pub run: fn(&mut Bench) -> Outcome,
}

/// Declares the tests of a family.
macro_rules! family {
    ($($name:ident $place:ident [$($feature:ident),*] $([$starts:ident])? : $($clause:literal)+;)*) => {
        /// The tests of this family.
        pub const TESTS: &[$crate::test::Test] = &[$(
            $crate::test::Test {
                name: concat!(module_path!(), "::", stringify!($name)),
                clauses: &[$($clause),+],
                place: $crate::test::Where::$place,
                features: &[$($feature),*],
                starts: $crate::test::family!(@starts $($starts)?),
                run: $name,
            }
        ),*];
    };
    (@starts) => { true };
    (@starts idle) => { false };
}

pub(crate) use family;
