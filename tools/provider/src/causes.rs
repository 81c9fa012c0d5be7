// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The reasons why the provider refuses a verb.
//!
//! A function that does not know the object of the verb returns a [`Cause`]. Its caller has the object
//! say the cause in the log of libibverbs ([`crate::log`]), and returns the error number to the program.
#![forbid(unsafe_code)]

use crate::errno::Errno;
use core::ffi::CStr;

/// The most numbers in a text.
const NUMBERS: usize = 2;

/// The beginning of each text: the device, the kind of the object, and its number.
const OBJECT: &str = "%s: %s %u: ";

/// The text of a cause, as a format of printf(3).
#[derive(Debug, PartialEq, Eq)]
pub struct Text {
    errno: Errno,
    level: u32,
    format: &'static CStr,
}

impl Text {
    /// Takes the format that `cause!` makes, which has this many numbers. The compiler
    /// rejects a format that has more or fewer of them, or whose conversions are not of 32 bits.
    pub const fn new(errno: Errno, level: u32, format: &'static str, numbers: usize) -> Self {
        let bytes = format.as_bytes();
        let (mut at, mut found) = (OBJECT.len(), 0);
        while at < bytes.len() {
            if bytes[at] == b'%' {
                assert!(matches!(bytes[at + 1], b'u' | b'd' | b'x'), "not a number of 32 bits");
                found += 1;
            }
            at += 1;
        }
        assert!(found == numbers && numbers <= NUMBERS, "numbers that the text does not have");
        match CStr::from_bytes_with_nul(bytes) {
            Ok(format) => Self { errno, level, format },
            Err(_) => panic!("a zero within the text"),
        }
    }
}

/// The reason why the provider refuses a verb. It fits in two registers, so that a function that
/// may return one costs the data path nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    text: &'static Text,
    numbers: [u32; NUMBERS],
}

impl Cause {
    /// Returns the cause that a text and its numbers describe; `cause!` calls it.
    #[cold]
    pub const fn new(text: &'static Text, numbers: [u32; NUMBERS]) -> Self {
        Self { text, numbers }
    }

    /// Returns the error number that the program gets.
    pub fn errno(self) -> Errno {
        self.text.errno
    }

    /// Returns the level of the log at which the cause is said.
    pub fn level(self) -> u32 {
        self.text.level
    }

    /// Returns the format of printf(3). It takes the name of the device, the kind of an object, its number,
    /// and at most the two numbers of the cause.
    pub fn format(self) -> &'static CStr {
        self.text.format
    }

    /// Returns the numbers of the text, and zeroes if it has fewer.
    pub fn numbers(self) -> [u32; NUMBERS] {
        self.numbers
    }
}

/// Returns a [`Cause`]: an error number, a text with at most two conversions `%u`, `%d` or `%x`, and a `u32`
/// for each of them. With `debug` in front, the log has the cause only at its highest level: what a correct
/// program does often.
macro_rules! cause {
    (debug $errno:ident, $text:literal $(, $number:expr)* $(,)?) => {
        $crate::causes::cause!(@ $errno, VERBS_LOG_DEBUG, $text, [$($number),*])
    };
    (@ $errno:ident, $level:ident, $text:literal, []) => {
        $crate::causes::cause!(@ $errno, $level, $text, 0, 0, 0)
    };
    (@ $errno:ident, $level:ident, $text:literal, [$first:expr]) => {
        $crate::causes::cause!(@ $errno, $level, $text, 1, $first, 0)
    };
    (@ $errno:ident, $level:ident, $text:literal, [$first:expr, $second:expr]) => {
        $crate::causes::cause!(@ $errno, $level, $text, 2, $first, $second)
    };
    (@ $errno:ident, $level:ident, $text:literal, $count:literal, $first:expr, $second:expr) => {
        $crate::causes::Cause::new(
            const {
                &$crate::causes::Text::new(
                    $crate::errno::Errno::$errno,
                    $crate::bindings::$level,
                    concat!("%s: %s %u: ", $text, "\n\0"),
                    $count,
                )
            },
            [$first, $second],
        )
    };
    ($errno:ident, $text:literal $(, $number:expr)* $(,)?) => {
        $crate::causes::cause!(@ $errno, VERBS_LOG_ERR, $text, [$($number),*])
    };
}
pub(crate) use cause;
