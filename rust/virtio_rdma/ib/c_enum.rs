// SPDX-License-Identifier: GPL-2.0

//! Enumerations of C as enums.

/// Declares an enum whose variants are constants of C, with the conversions from and to their numbers.
macro_rules! c_enum {
    ($(#[$attr:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $value:ident,)* }) => {
        $(#[$attr])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub(crate) enum $name {
            $($(#[$doc])* $variant = $crate::bindings::$value,)*
        }

        impl TryFrom<u32> for $name {
            type Error = ::kernel::error::Error;

            /// Converts the number of C.
            ///
            /// # Errors
            ///
            /// `EINVAL` for a number that no variant has.
            fn try_from(raw: u32) -> ::kernel::error::Result<Self> {
                match raw {
                    $($crate::bindings::$value => Ok(Self::$variant),)*
                    _ => Err(::kernel::error::code::EINVAL),
                }
            }
        }

        impl From<$name> for u32 {
            fn from(value: $name) -> Self {
                value as u32
            }
        }
    };
}
pub(super) use c_enum;
