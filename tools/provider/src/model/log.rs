// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The log of libibverbs, which a test reads.

use crate::bindings::*;
use core::ffi::{CStr, c_char};
use std::{cell::RefCell, mem};

std::thread_local! {
    static LINES: RefCell<Vec<(u32, String)>> = const { RefCell::new(Vec::new()) };
}

/// Returns the lines of this thread since the last call, each with its level.
pub fn take() -> Vec<(u32, String)> {
    LINES.with_borrow_mut(mem::take)
}

/// Stands for `__verbs_log`, at the highest level. Takes as many arguments as the provider passes, in
/// the registers and on the stack where a function of C with `...` finds them.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn write(
    _: *mut verbs_context,
    level: u32,
    format: *const c_char,
    device: *const c_char,
    kind: *const c_char,
    number: u32,
    first: u32,
    second: u32,
) {
    let mut line = [0u8; 256];
    // SAFETY: the buffer has this length; the provider passes what the format takes.
    let len = unsafe {
        let (at, room) = (line.as_mut_ptr().cast(), line.len() as _);
        snprintf(at, room, format, device, kind, number, first, second)
    };
    assert!((1..line.len() as i32).contains(&len), "a line of {len} bytes");
    let text = CStr::from_bytes_until_nul(&line).unwrap().to_str().unwrap();
    let text = text.strip_suffix('\n').expect("the end of a line");
    LINES.with_borrow_mut(|lines| lines.push((level, text.into())));
}
