// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tests, in a file for each family of clauses.

mod completion;
mod configuration;
mod connection;
mod control;
mod datagram;
mod lost_memory;
mod management;
mod memory;
mod options;
mod port;
mod queue_pair;
mod reset;
mod ring;
mod shared_receive;
mod virtqueues;
mod work_request;
mod xrc;

use crate::test::Test;

/// Returns the tests of all families.
pub fn families() -> Vec<&'static [Test]> {
    vec![
        configuration::TESTS,
        control::TESTS,
        port::TESTS,
        memory::TESTS,
        lost_memory::TESTS,
        ring::TESTS,
        completion::TESTS,
        work_request::TESTS,
        queue_pair::TESTS,
        connection::TESTS,
        datagram::TESTS,
        reset::TESTS,
        shared_receive::TESTS,
        xrc::TESTS,
        management::TESTS,
        options::TESTS,
        virtqueues::TESTS,
    ]
}
