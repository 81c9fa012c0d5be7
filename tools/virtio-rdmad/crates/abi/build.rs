// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Generates `bindings.rs` from `include/uapi/linux/virtio_rdma.h`.

use std::env;
use std::path::PathBuf;

use bindgen::callbacks::{DeriveInfo, DeriveTrait, ImplementsTrait, ParseCallbacks, TypeKind};

/// The unions of the ABI. `src/lib.rs` has plain words of the same size and
/// alignment in their place, so that every structure can be seen as bytes.
const UNIONS: &str = "virtio_rdma_(cqe|sq_wqe|ring_cqe|ring_sq_wqe|ring_ud_wqe)__bindgen_ty_[12]";

/// Makes every structure derive the traits by which safe code reads it from bytes
/// and sees it as bytes.
#[derive(Debug)]
struct Derives;

impl ParseCallbacks for Derives {
    fn add_derives(&self, info: &DeriveInfo<'_>) -> Vec<String> {
        if info.kind != TypeKind::Struct {
            return Vec::new();
        }
        ["FromBytes", "IntoBytes", "Immutable", "KnownLayout"]
            .iter()
            .map(|name| format!("zerocopy::{name}"))
            .collect()
    }

    fn blocklisted_type_implements_trait(
        &self,
        _name: &str,
        derive: DeriveTrait,
    ) -> Option<ImplementsTrait> {
        (derive == DeriveTrait::Copy).then_some(ImplementsTrait::Yes)
    }
}

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let header = manifest.join("../../../../include/uapi/linux/virtio_rdma.h");
    println!("cargo::rerun-if-changed={}", header.display());

    let bindings = bindgen::Builder::default()
        .header(header.to_str().expect("a path in UTF-8"))
        .use_core()
        .allowlist_type("virtio_rdma_.*")
        .allowlist_var("VIRTIO_RDMA_.*")
        .blocklist_type(UNIONS)
        .prepend_enum_name(false)
        .derive_debug(false)
        .generate_comments(false)
        .layout_tests(true)
        .parse_callbacks(Box::new(Derives))
        .generate()
        .expect("the header is valid C");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    bindings.write_to_file(out.join("bindings.rs")).expect("OUT_DIR is writable");
}
