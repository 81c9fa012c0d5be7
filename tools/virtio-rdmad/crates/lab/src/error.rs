// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What keeps the lab from its work.

/// An error, as a sentence.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
