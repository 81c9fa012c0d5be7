// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Declares counters: an `enum` whose members have a name in reports, and a sentence for operators.

/// Declares an `enum` with a name for each member. What documents a member describes it to operators, too.
#[macro_export]
macro_rules! counted {
    (
        $(#[$doc_of_all:meta])*
        pub enum $of_all:ident {
            $($(#[doc = $doc:literal])* $member:ident = $name:literal,)*
        }
    ) => {
        $(#[$doc_of_all])*
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub enum $of_all {
            $($(#[doc = $doc])* $member,)*
        }

        impl $of_all {
            /// All members, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$member,)*];
            /// The number of members.
            pub const COUNT: usize = Self::ALL.len();

            /// Returns the name in reports.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$member => $name,)*
                }
            }

            /// Returns the description of the counter, for operators.
            pub fn help(self) -> &'static str {
                match self {
                    $(Self::$member => concat!($($doc),*).trim_ascii(),)*
                }
            }
        }
    };
}
