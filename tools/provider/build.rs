// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Generates the bindings, and the table of the functions of libibverbs.
//!
//! `RDMA_CORE` names the directory that `rdma-core-sdk` made.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The functions of libibverbs that the provider calls. Each release that it supports has all of them.
const LIBIBVERBS: [&str; 44] = [
    "__verbs_log",
    "_verbs_init_and_alloc_context",
    "ibv_cmd_alloc_mw",
    "ibv_cmd_alloc_pd",
    "ibv_cmd_attach_mcast",
    "ibv_cmd_close_xrcd",
    "ibv_cmd_create_ah",
    "ibv_cmd_create_cq",
    "ibv_cmd_create_qp_ex",
    "ibv_cmd_create_qp_ex2",
    "ibv_cmd_create_srq",
    "ibv_cmd_create_srq_ex",
    "ibv_cmd_dealloc_mw",
    "ibv_cmd_dealloc_pd",
    "ibv_cmd_dereg_mr",
    "ibv_cmd_destroy_ah",
    "ibv_cmd_destroy_cq",
    "ibv_cmd_destroy_qp",
    "ibv_cmd_destroy_srq",
    "ibv_cmd_detach_mcast",
    "ibv_cmd_get_context",
    "ibv_cmd_modify_cq",
    "ibv_cmd_modify_qp",
    "ibv_cmd_modify_srq",
    "ibv_cmd_open_qp",
    "ibv_cmd_open_xrcd",
    "ibv_cmd_poll_cq",
    "ibv_cmd_post_recv",
    "ibv_cmd_post_send",
    "ibv_cmd_post_srq_recv",
    "ibv_cmd_query_context",
    "ibv_cmd_query_device_any",
    "ibv_cmd_query_mr",
    "ibv_cmd_query_port",
    "ibv_cmd_query_qp",
    "ibv_cmd_query_srq",
    "ibv_cmd_reg_dmabuf_mr",
    "ibv_cmd_reg_mr",
    "ibv_cmd_req_notify_cq",
    "ibv_cmd_rereg_mr",
    "ibv_cmd_resize_cq",
    "ibv_qp_to_qp_ex",
    "verbs_set_ops",
    "verbs_uninit_context",
];

/// Those of [`LIBIBVERBS`] whose callers name the library themselves, or whose parameters depend on
/// the release: src/libibverbs calls them.
const BY_HAND: [&str; 7] = [
    "__verbs_log",
    "_verbs_init_and_alloc_context",
    "ibv_cmd_create_qp_ex2",
    "ibv_cmd_get_context",
    "ibv_qp_to_qp_ex",
    "verbs_set_ops",
    "verbs_uninit_context",
];

const LIBC: &str = "calloc|aligned_alloc|free|abort|__errno_location|mmap|munmap|sysconf|sched_yield|clock_gettime\
    |dlopen|dlsym|dl_iterate_phdr|dprintf|snprintf";
const TYPES: &str = "verbs_(context|context_ops|device|device_ops|match_ent|mr|qp|qp_mask|cq|srq|xrcd|sysfs_dev)\
    |ibv_.*|ib_uverbs_.*|uverbs_(attrs|methods)_.*|uverbs_default_objects|rdma_driver_id|virtio_rdma_.*\
    |dl_phdr_info|Elf64_(Dyn|Phdr|Verdef|Verdaux)";
const VARIABLES: &str = "IBV_.*|VERBS_.*|VIRTIO_RDMA_.*|UVERBS_(ATTR_F_MANDATORY|ATTR_UHW_(IN|OUT)|OBJECT_DEVICE|METHOD_QUERY_CONTEXT)|IB_USER_VERBS_EX_CMD_.*|_UHW_NO_INDEX|E[A-Z0-9]+\
    |MAP_(SHARED|ANONYMOUS)|PROT_(READ|WRITE)|_SC_PAGESIZE|CLOCK_(MONOTONIC|REALTIME)\
    |PT_(DYNAMIC|LOAD)|DT_(NULL|STRTAB|VERDEF|VERDEFNUM)|RTLD_(LAZY|NOLOAD)";

fn main() {
    println!("cargo:rerun-if-env-changed=RDMA_CORE");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs,-z,relro,-z,now");

    let rdma_core = env::var("RDMA_CORE")
        .map(PathBuf::from)
        .expect("RDMA_CORE is not set: run make, which prepares rdma-core's headers");
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap());
    let uapi = here.join("../../include/uapi");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());

    for input in [
        here.join("build.rs"),
        here.join("bindings.h"),
        uapi.join("linux/virtio_rdma.h"),
        uapi.join("rdma/virtio_rdma-abi.h"),
        rdma_core.join("abi"),
    ] {
        println!("cargo:rerun-if-changed={}", input.display());
    }
    // The C library of the build root has these functions in a newer version, which older ones lack.
    println!("cargo:rustc-link-search=native={}", rdma_core.join("lib").display());
    println!("cargo:rustc-link-lib=dl");
    println!("cargo:rustc-link-lib=c");
    let mut bindings = generate(&here.join("bindings.h"), &rdma_core, &uapi);
    let declarations = LIBIBVERBS.map(|name| (name, take_declaration(&mut bindings, name)));
    fs::write(out.join("bindings.rs"), bindings).unwrap();
    fs::write(out.join("libibverbs.rs"), functions(&declarations)).unwrap();
}

/// Runs bindgen. Returns what it wrote.
fn generate(header: &Path, rdma_core: &Path, uapi: &Path) -> String {
    let output = Command::new("bindgen")
        .arg(header)
        // rustfmt need not be there, and take_declaration() wants the layout of a formatter.
        .args(["--formatter", "prettyplease"])
        .args(["--use-core", "--rust-edition", "2024", "--rust-target", "1.85"])
        .args(["--default-enum-style", "consts", "--no-prepend-enum-name"])
        .args(["--default-non-copy-union-style", "manually_drop"])
        .args(["--with-derive-default", "--no-doc-comments"])
        .args(["--allowlist-function", &format!("{LIBC}|{}", LIBIBVERBS.join("|"))])
        .args(["--allowlist-type", TYPES])
        .args(["--allowlist-var", VARIABLES])
        .arg("--")
        .arg(format!("-I{}", rdma_core.join("include").display()))
        .arg(format!("-I{}", uapi.display()))
        .arg("-D_GNU_SOURCE")
        .output()
        .expect("cannot run bindgen");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "bindgen failed: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).expect("bindings in UTF-8")
}

/// Returns `struct Functions`, which has a pointer to each function of a copy of libibverbs, and
/// functions of the same names, which call the copy that their first argument belongs to.
fn functions(declarations: &[(&str, (String, String))]) -> String {
    let (mut fields, mut found, mut calls) = (String::new(), String::new(), String::new());
    for (name, (parameters, result)) in declarations {
        writeln!(fields, "    pub {name}: unsafe extern \"C\" fn({parameters}){result},").unwrap();
        writeln!(found, "            {name}: transmute::<*mut c_void, _>(find(c\"{name}\")?),")
            .unwrap();
        if BY_HAND.contains(name) {
            continue;
        }
        let arguments: Vec<&str> =
            parameters.split(", ").filter_map(|parameter| parameter.split(':').next()).collect();
        let (first, arguments) = (arguments[0], arguments.join(", "));
        writeln!(
            calls,
            "pub unsafe fn {name}({parameters}){result} {{\n    \
                 unsafe {{ (library({first}).functions.{name})({arguments}) }}\n}}"
        )
        .unwrap();
    }
    format!(
        "pub struct Functions {{\n{fields}}}\n\
         impl Functions {{\n    \
             pub unsafe fn new<E>(find: impl Fn(&'static CStr) -> Result<*mut c_void, E>) -> Result<Self, E> {{\n        \
                 Ok(unsafe {{ Self {{\n{found}        }} }})\n    }}\n}}\n{calls}"
    )
}

/// Removes the declaration of a function, which nothing may be linked with. Returns the parameters of
/// the function, and its result with the arrow.
fn take_declaration(bindings: &mut String, name: &str) -> (String, String) {
    let start = format!("unsafe extern \"C\" {{\n    pub fn {name}(");
    let at = bindings.find(&start).unwrap_or_else(|| panic!("no function {name}"));
    let end = at + bindings[at..].find("\n}\n").expect("the end of a declaration");
    let declaration = bindings[at + start.len()..end].trim_end_matches(';');
    let (parameters, result) = declaration.rsplit_once(')').expect("the end of the parameters");
    let words: Vec<&str> = parameters.split_whitespace().collect();
    let signature = (words.join(" ").trim_end_matches(',').to_string(), result.to_string());
    bindings.replace_range(at..end + 3, "");
    signature
}
