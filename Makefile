# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Everything is built and run inside a build root that tools/vm makes and
# caches; the machine itself needs make, git and what Debian's apt brings.

top := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
vm := $(top)/tools/vm
enter := $(vm)/enter
build := $(top)/build
arm64_kernels := stock-arm64 stock-arm64-16k
kernels := um x86_64 um-debug x86_64-debug stock stock-7.3 $(arm64_kernels)
device := $(top)/tools/virtio-rdmad
device_cargo = cd $(device) && CARGO_TARGET_DIR=$(build)/cargo-virtio-rdmad $(enter)
device_aarch64 = cd $(device) && CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_DIR=$(build)/cargo-aarch64 $(enter) --root stock-arm64
limits_cargo = cd $(top)/tools/bench/limits && CARGO_TARGET_DIR=$(build)/cargo-bench $(enter)
fuzz_cargo = cd $(device)/fuzz && CARGO_TARGET_DIR=$(build)/cargo-fuzz $(enter)
provider := $(MAKE) --no-print-directory -C $(top)/tools/provider

# The suites that "make test" runs: host, conform, uml, stock, debug, and what is in turn, unless T names others.
T ?=

# What "make fuzz" runs, for how many seconds each, or one INPUT once again.
F ?= engine image nic ring roce vfio_user vhost_user vxlan wire
S ?= 60
INPUT ?=

export CARGO_TERM_QUIET ?= true
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:

.PHONY: all
all: build/um build/stock ## the module, the device and the provider

# What guests of a kernel need, and nothing for another kernel.
.PHONY: $(kernels:%=build/%)
$(kernels:%=build/%): build/%: build/module-% device provider

# Guests of arm64 are served by the device of this machine.
$(arm64_kernels:%=build/%): provider-aarch64

.PHONY: $(kernels:%=build/module-%)
$(kernels:%=build/module-%): build/module-%:
	@$(vm)/module $* >/dev/null

ifdef KDIR
# A kernel from elsewhere is built against with the tools that built it: this
# machine's, not the build root's.
.PHONY: modules modules_install
modules: ## the module; KDIR=DIR: against any built kernel with CONFIG_RUST
	@mkdir -p $(build)/modules/kdir
	$(MAKE) -C $(KDIR) M=$(top) MO=$(build)/modules/kdir modules
modules_install:
	$(MAKE) -C $(KDIR) M=$(top) MO=$(build)/modules/kdir modules_install
else
.PHONY: modules
modules: build/module-um build/module-stock
endif

.PHONY: device
device: ## build/virtio-rdmad
	@mkdir -p $(build)
	@$(device_cargo) cargo build --release --locked -p virtio-rdmad
	@$(vm)/install-new $(build)/cargo-virtio-rdmad/release/virtio-rdmad $(build)/virtio-rdmad

# The device of "make run": it is not optimised as a whole.
.PHONY: device-quick
device-quick:
	@mkdir -p $(build)/quick
	@$(device_cargo) cargo build --profile quick --locked -p virtio-rdmad
	@$(vm)/install-new $(build)/cargo-virtio-rdmad/quick/virtio-rdmad $(build)/quick/virtio-rdmad

# A device for tests of the driver, which does what a device must not.
.PHONY: hostile
hostile:
	@mkdir -p $(build)
	@$(device_cargo) cargo build --locked -p hostile
	@$(vm)/install-new $(build)/cargo-virtio-rdmad/debug/virtio-rdma-hostile $(build)/virtio-rdma-hostile

.PHONY: impair
impair: ## build/virtio-rdma-impair, a network cable that loses and changes packets of RoCE v2
	@mkdir -p $(build)
	@$(device_cargo) cargo build --release --locked -p impair
	@$(vm)/install-new $(build)/cargo-virtio-rdmad/release/virtio-rdma-impair $(build)/virtio-rdma-impair

.PHONY: conform
conform: ## build/virtio-rdma-conform, which judges devices and drivers by the clauses of the specification
	@mkdir -p $(build)
	@$(device_cargo) cargo build --release --locked -p conform
	@$(vm)/install-new $(build)/cargo-virtio-rdmad/release/virtio-rdma-conform $(build)/virtio-rdma-conform

.PHONY: provider
provider: ## build/provider/libvirtio_rdma-rdmavNN.so
	@$(provider)

.PHONY: deb
deb: ## Debian packages, in build/deb
	@env -u MAKEFLAGS -u MFLAGS -u MAKEOVERRIDES $(top)/tools/deb/build

.PHONY: lab
lab: ## build/virtio-rdma-lab, one file that boots guests for an ordinary user on any x86-64 Linux
	@$(top)/tools/lab/build

.PHONY: release
release: ## packages, the lab, a list of parts, notes and checksums, in build/release
	@env -u MAKEFLAGS -u MFLAGS -u MAKEOVERRIDES $(top)/tools/release/build

.PHONY: run
run: ## two QEMU guests: the verbs tools over virtio-rdma and over rxe, compared
	@$(top)/tools/test/run-demo

.PHONY: bench
bench: ## every path beside the machine's limits, and goals for its processors; Q=1: in 2 minutes; PROFILE=1: perf
	@# Q is the kernel's own variable, and would reach its build.
	@env -u Q -u MAKEFLAGS -u MFLAGS -u MAKEOVERRIDES $(top)/tools/bench/bench $(if $(Q),--quick) $(if $(PROFILE),--profile)

.PHONY: test
test: ## the suites host, conform, uml, stock, debug, and a share of another in turn (TURN=NAME|none), in MINUTES=65; T="uml ulp ..." names suites
	@$(top)/tools/test/run $(T)

.PHONY: test-all
test-all: ## every suite, whole and one after the other
	@$(top)/tools/test/run all

.PHONY: selftests
selftests: ## the selftests for a VM of your own, in build/selftests (selftests/virtio_rdma/README.md)
	@$(top)/tools/test/stage $(build)/selftests
	@$(enter) make -s -C $(build)/selftests/virtio_rdma OUTPUT=$(build)/selftests/virtio_rdma TEST_GEN_MODS_DIR=

.PHONY: tsan
tsan: ## the provider's tests in which threads meet, under ThreadSanitizer
	@$(provider) tsan

.PHONY: loom loom-device loom-provider
loom: loom-device loom-provider ## what device, provider and their threads see of each other, in each order that a processor allows
loom-device:
	@$(device_cargo) env RUSTFLAGS='--cfg loom' CARGO_PROFILE_TEST_OPT_LEVEL=1 \
		CARGO_TARGET_DIR=$(build)/cargo-loom cargo test --locked -p engine -p memory -p ring -p scheduler -p virtio-rdmad --lib --bins orders::
loom-provider:
	@$(provider) loom

.PHONY: schedules
schedules: ## random schedules of connections over a bad network, judged by a reference; SCHEDULES=7 or 0..50000
	@$(device_cargo) env $(if $(SCHEDULES),SCHEDULES=$(SCHEDULES)) cargo test --locked -p engine --lib \
		schedules:: -- --nocapture

.PHONY: provider-aarch64 device-aarch64 check-aarch64
provider-aarch64: ## build/provider/aarch64/libvirtio_rdma-rdmavNN.so
	@$(provider) aarch64
device-aarch64: ## build/aarch64/virtio-rdmad
	@mkdir -p $(build)/aarch64
	@$(device_aarch64) cargo build --release --locked -p virtio-rdmad --target aarch64-unknown-linux-gnu
	@$(vm)/install-new $(build)/cargo-aarch64/aarch64-unknown-linux-gnu/release/virtio-rdmad $(build)/aarch64/virtio-rdmad
check-aarch64: device-aarch64 provider-aarch64 ## whether device and provider are built for aarch64, and load
	@$(enter) --root stock-arm64 qemu-aarch64 $(build)/aarch64/virtio-rdmad --help | grep -q vfio-user

.PHONY: fuzz
fuzz: ## fuzz the device, S=60 seconds a target; F="engine ring" some of them
	@set -e; for target in $(F); do \
		$(device)/fuzz/corpus/pack -u $$target $(build)/fuzz/$$target; \
		($(fuzz_cargo) cargo run --release --locked --bin $$target -- $(if $(INPUT),$(abspath $(INPUT)), \
			-max_total_time=$(S) -timeout=120 -print_final_stats=1 \
			-artifact_prefix=$(build)/fuzz/$$target- $(build)/fuzz/$$target)); \
	done

.PHONY: clippy
clippy: ## lint all Rust, the kernel part with the kernel's own rules
	@$(vm)/module um CLIPPY=1 KRUSTFLAGS=-Dwarnings CONFIG_INFINIBAND_VIRTIO_RDMA_KUNIT_TEST=y \
		MO=$(build)/modules/clippy >/dev/null
	@$(device_cargo) cargo clippy --locked --all-targets -- -D warnings
	@$(limits_cargo) cargo clippy --locked --all-targets -- -D warnings
	@$(fuzz_cargo) cargo clippy --release --locked -- -D warnings
	@$(provider) clippy

# What cargo-deny checks; C=advisories fetches the RustSec advisory database.
C ?= licenses bans sources
.PHONY: deny
deny: ## licences and sources of all crates that are used; C=advisories: known vulnerabilities, from the network
	@for crates in $(device) $(device)/fuzz $(top)/tools/provider $(top)/tools/bench/limits; do \
		$(enter) $$($(vm)/python-packages)/bin/cargo-deny --locked --log-level error --config $(top)/tools/deny.toml \
			--manifest-path $$crates/Cargo.toml check --hide-inclusion-graph $(C) || exit; \
	done

.PHONY: rustfmt
rustfmt: ## format all Rust
	@$(vm)/rustfmt
	@$(device_cargo) cargo fmt
	@$(limits_cargo) cargo fmt
	@$(fuzz_cargo) cargo fmt
	@$(provider) rustfmt

.PHONY: rustfmtcheck
rustfmtcheck: ## fail where rustfmt would change something
	@$(vm)/rustfmt --check
	@$(device_cargo) cargo fmt --check
	@$(limits_cargo) cargo fmt --check
	@$(fuzz_cargo) cargo fmt --check
	@$(provider) rustfmtcheck

.PHONY: rustdoc
rustdoc: ## documentation of all Rust, below build/doc
	@$(vm)/rustdoc
	@$(device_cargo) env RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items
	@$(provider) rustdoc

.PHONY: specification
specification: ## the specification as LaTeX in the form of VIRTIO's, and as a PDF, in build/specification; VIRTIO=CLONE: in VIRTIO's document, too
	@$(vm)/python --root specification virtio_rdma.specification latex $(build)/specification
ifdef VIRTIO
	@rm -rf $(build)/specification/virtio
	@git clone -q --shared $(VIRTIO) $(build)/specification/virtio
	@$(vm)/python --root virtio virtio_rdma.specification virtio $(build)/specification $(build)/specification/virtio
endif

.PHONY: clean
clean: ## remove build/; what is cached for all checkouts stays
	rm -rf $(build)

.PHONY: help
help: ## this list
	@echo 'Targets:'
	@sed -n 's/^\([a-z0-9_-]*\):.*## \(.*\)/  \1\t\2/p' $(top)/Makefile | expand -t 18
	@echo
	@echo 'tools/vm/vm --help: run a program of your own in guests.'
