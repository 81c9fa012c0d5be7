# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The tests that tools/test/run starts, a module test_X a suite or kind of suite.

    results      the pytest plugin that lets one test have many results, and writes KTAP
    ktap         reads the KTAP of a program in a guest
    platform     what guests boot, as the command line says (--platform)
    networks     guests for a class of tests, and the judgement at their end
    selftests    runs kselftests in guests
"""
