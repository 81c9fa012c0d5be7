// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Generates the bindings of one rdma-core release.
//!
//! `RDMA_CORE` names the directory that `rdma-core-sdk` made.

use std::{
    env,
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

const FUNCTIONS: &str = "ibv_cmd_.*|_verbs_init_and_alloc_context|verbs_uninit_context\
    |verbs_set_ops|verbs_register_driver_.*|__verbs_log|calloc|aligned_alloc|free|abort|__errno_location\
    |mmap|munmap|sysconf|sched_yield|clock_gettime";
const TYPES: &str = "verbs_(context|context_ops|device|device_ops|match_ent|mr|qp|qp_mask|cq|srq|xrcd|sysfs_dev)\
    |ibv_.*|ib_uverbs_.*|uverbs_(attrs|methods)_.*|uverbs_default_objects|rdma_driver_id|virtio_rdma_.*";
const VARIABLES: &str = "IBV_.*|VERBS_.*|VIRTIO_RDMA_.*|UVERBS_(ATTR_F_MANDATORY|ATTR_UHW_(IN|OUT)|OBJECT_DEVICE|METHOD_QUERY_CONTEXT)|IB_USER_VERBS_EX_CMD_.*|_UHW_NO_INDEX|E[A-Z0-9]+\
    |MAP_(SHARED|ANONYMOUS)|PROT_(READ|WRITE)|_SC_PAGESIZE|CLOCK_(MONOTONIC|REALTIME)";

fn main() {
    println!("cargo:rerun-if-env-changed=RDMA_CORE");
    println!("cargo:rustc-link-lib=ibverbs");
    println!("cargo:rustc-link-lib=c");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs,-z,relro,-z,now");

    let rdma_core = env::var("RDMA_CORE")
        .map(PathBuf::from)
        .expect("RDMA_CORE is not set: run make, which prepares rdma-core's headers");
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap());
    let uapi = here.join("../../include/uapi");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap()).join("bindings.rs");

    for input in [
        here.join("build.rs"),
        here.join("bindings.h"),
        uapi.join("linux/virtio_rdma.h"),
        uapi.join("rdma/virtio_rdma-abi.h"),
        rdma_core.join("abi"),
    ] {
        println!("cargo:rerun-if-changed={}", input.display());
    }
    let abi = fs::read_to_string(rdma_core.join("abi")).expect("no file abi in RDMA_CORE");
    let abi = abi.trim();
    let newest = fs::read_to_string(rdma_core.join("newest")).expect("no file newest in RDMA_CORE");
    let newest = newest.split(' ').next().expect("no verb in newest");
    println!("cargo:rustc-link-search=native={}", rdma_core.join("lib").display());
    generate(&here.join("bindings.h"), &rdma_core, &uapi, &out);

    // The one function whose name carries the ABI's number gets one without.
    let mut file = OpenOptions::new().append(true).open(out).unwrap();
    writeln!(file, "pub use verbs_register_driver_{abi} as verbs_register_driver;").unwrap();
    // A verb that no older release has, by its name alone.
    writeln!(file, "unsafe extern \"C\" {{ pub fn {newest}(); }}").unwrap();
    writeln!(file, "pub use {newest} as newest_verb;").unwrap();
    // Releases from 40 to 56 have the same newest verb, and this function came in between.
    writeln!(file, "unsafe extern \"C\" {{ pub fn ibv_wr_opcode_str(); }}").unwrap();
    println!("cargo:rustc-check-cfg=cfg(get_context_takes_fds)");
    let driver = fs::read_to_string(rdma_core.join("include/infiniband/driver.h")).unwrap();
    if driver.contains("struct ibv_fd_arr *fd_arr,") {
        println!("cargo:rustc-cfg=get_context_takes_fds");
    }
    println!("cargo:rustc-check-cfg=cfg(create_qp_takes_attrs)");
    let create_qp = driver.split("ibv_cmd_create_qp_ex2(").nth(1).and_then(|s| s.split(';').next());
    if create_qp.is_some_and(|parameters| parameters.contains("ibv_command_buffer")) {
        println!("cargo:rustc-cfg=create_qp_takes_attrs");
    }
    println!("cargo:rustc-check-cfg=cfg(has_port_speed)");
    if driver.contains("ibv_cmd_query_port_speed(") {
        println!("cargo:rustc-cfg=has_port_speed");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvirtio_rdma-rdmav{abi}.so");
}

/// Runs bindgen.
fn generate(header: &Path, rdma_core: &Path, uapi: &Path, out: &Path) {
    let status = Command::new("bindgen")
        .arg(header)
        .args(["--output".as_ref(), out.as_os_str()])
        .args(["--use-core", "--rust-edition", "2024", "--rust-target", "1.85"])
        .args(["--default-enum-style", "consts", "--no-prepend-enum-name"])
        .args(["--default-non-copy-union-style", "manually_drop"])
        .args(["--with-derive-default", "--no-doc-comments"])
        .args(["--allowlist-function", FUNCTIONS])
        .args(["--allowlist-type", TYPES])
        .args(["--allowlist-var", VARIABLES])
        .arg("--")
        .arg(format!("-I{}", rdma_core.join("include").display()))
        .arg(format!("-I{}", uapi.display()))
        .arg("-D_GNU_SOURCE")
        .status()
        .expect("cannot run bindgen");
    assert!(status.success(), "bindgen failed: {status}");
}
