// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of command lines.

/// A MAC address.
#[derive(Clone, Copy, Debug)]
pub struct Mac(pub [u8; 6]);

/// Returns the MAC address that a text of six bytes in hexadecimal, with colons between them, names.
///
/// # Errors
///
/// What is wrong with the text.
pub fn parse_mac(text: &str) -> Result<Mac, String> {
    let bytes: Result<Vec<u8>, _> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect();
    let bytes = bytes.map_err(|error| error.to_string())?;
    <[u8; 6]>::try_from(bytes).map(Mac).map_err(|_| "not six bytes".to_owned())
}

/// Returns a set of feature bits by their numbers, which are below 64.
#[must_use]
pub fn bits(numbers: &[u32]) -> u64 {
    numbers.iter().fold(0, |bits, bit| bits | 1 << bit)
}
