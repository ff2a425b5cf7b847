# PdP: build, test, install. `make help` lists the targets.

PREFIX ?= /usr/local
DESTDIR ?=
# Where the binaries to install are.
BUILD ?= target/release

# rustup's place, where no login shell has put it into PATH yet.
CARGO_HOME ?= $(HOME)/.cargo
export PATH := $(CARGO_HOME)/bin:$(PATH)

bin := $(DESTDIR)$(PREFIX)/bin
lib := $(DESTDIR)$(PREFIX)/lib/pdp
share := $(DESTDIR)$(PREFIX)/share
units := $(DESTDIR)/etc/systemd/system

# The one daemon of a machine, and one of several by its name.
service_units := pdpd.service pdpd@.service

# The daemon finds what it starts beside itself.
programs := pdpd pdp-mux pdp-tap pdp-mirror pdp-management pdp-shim pdp-init pdp-work pdp-router pdp-label

.PHONY: help deps build demo-build quick test hw-test hw-report hw-wave hundred fuzz demo demo-down soak bench install install-files uninstall

help:
	@echo 'make demo        install what is missing, build, bring Figure 1 up and check it'
	@echo 'make demo-down   remove every trace of the demo'
	@echo 'make soak        the demo under traffic, route churn and random faults for MINUTES minutes'
	@echo '                 (default 30): did anything leak or get lost? soak-report.md'
	@echo 'make quick       format, clippy, unit tests, words'
	@echo 'make test        install what is missing, run every test'
	@echo 'make hw-test     run all tests of the card (docs/hardware.md)'
	@echo 'make hw-report   count the logic and memory of the card (docs/hardware-resources.md)'
	@echo 'make hw-wave     write a waveform of ten frames in the card'
	@echo 'make hundred     run the test TEST=NAME a hundred times beside load'
	@echo 'make fuzz        install what is missing, build, feed hostile bytes to everything that reads'
	@echo '                 what others wrote (MINUTES=10 in all, TARGET=NAME only one)'
	@echo 'make bench       install what is missing, build, measure PdP and its peers ($(BENCH_MINUTES)'
	@echo '                 minutes at most; QUICK=1: shorter, 10): bench/REPORT.md'
	@echo 'make build       build for use (target/release)'
	@echo 'make install     build and install into PREFIX ($(PREFIX)), with the systemd unit'
	@echo 'make uninstall   remove what install installed'
	@echo 'make deps        install what is missing of packages and Rust'

deps:
	@scripts/install-deps

build: deps
	cargo build --release --workspace --bins

# The demo and the soak need no programs of measurements and tests.
demo-build: deps
	cargo build --release $(addprefix --bin ,pdp pdp-demo $(programs))

# End-to-end tests run the binaries of the same profile.
# A shell that starts this in the background has it ignore SIGINT and SIGQUIT, and so would all that tests start.
test: deps
	env --default-signal=INT,QUIT scripts/test

# What to run before each commit.
quick:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo test --workspace --lib
	scripts/prose

hw-test: deps
	MORE=1 WORLDS=300 FRAMES=10000 ROUNDS=40 PROOFS=--all REPLICATED=100000 MUTANTS=1 scripts/hw-test
	CARD_FRAMES=10000000 PDP_CARD_MORE=1 cargo test --workspace --test header_ip --test lpm_model --test lpm_large \
	    --test trie --test driver_excess --test card_ip --test card_updates
	scripts/hw-wave
	scripts/hw-report --quick

# Synthesizes the card and two other designs; takes about an hour on two cores, and a minute if nothing changed.
hw-report: deps
	scripts/hw-report --publish

hw-wave: deps
	scripts/hw-wave

# One test a hundred times beside load: make hundred TEST=NAME.
hundred: deps
	scripts/hundred '$(TEST)'

# Grows the corpora in crates/fuzz/corpus; crashes go to target/fuzz/crashes.
fuzz: deps
	MINUTES='$(MINUTES)' TARGET='$(TARGET)' scripts/fuzz

demo: demo-build
	target/release/pdp-demo up

demo-down: demo-build
	target/release/pdp-demo down

# How long, from when all is up; UPDATES: a file of BGP updates (MRT, gzip) to change routes by.
soak: demo-build
	target/release/pdp-demo soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) \
	    $(if $(UPDATES),--updates '$(UPDATES)')

# Beside it nothing else should run on this machine. It ends by itself in time; what would hang is
# ended two minutes later. There is a report of what was measured in any case.
BENCH_MINUTES ?= $(if $(QUICK),10,37)
bench: build
	timeout --kill-after=60 $$((60 * ($(BENCH_MINUTES) + 2))) target/release/pdp-bench run \
	    --minutes $(BENCH_MINUTES) $(if $(QUICK),--quick); \
	    status=$$?; target/release/pdp-bench report && exit $$status

install: build install-files
	@if [ -z '$(DESTDIR)' ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo 'Start it now and at every boot: systemctl enable --now pdpd'

# Installs from BUILD without building; for packages and images.
install-files:
	install -d '$(bin)' '$(lib)' '$(units)' '$(share)/doc/pdp' \
	    '$(share)/bash-completion/completions' '$(share)/zsh/site-functions' \
	    '$(share)/fish/vendor_completions.d'
	install -m 0755 $(addprefix '$(BUILD)'/,$(programs)) '$(lib)'
	install -m 0755 '$(BUILD)/pdp' '$(bin)'
	strip --strip-debug $(addprefix '$(lib)'/,$(programs)) '$(bin)/pdp'
	ln -sfn ../lib/pdp/pdpd '$(bin)/pdpd'
	for unit in $(service_units); do \
	    sed 's,@PREFIX@,$(PREFIX),' dist/$$unit > '$(units)'/$$unit && chmod 0644 '$(units)'/$$unit || exit; done
	install -m 0644 README.md LICENSE '$(share)/doc/pdp'
	cp -r clients docs examples schema '$(share)/doc/pdp'
	'$(BUILD)/pdp' completion bash > '$(share)/bash-completion/completions/pdp'
	'$(BUILD)/pdp' completion zsh > '$(share)/zsh/site-functions/_pdp'
	'$(BUILD)/pdp' completion fish > '$(share)/fish/vendor_completions.d/pdp.fish'

uninstall:
	@if [ -z '$(DESTDIR)' ] && [ -d /run/systemd/system ]; then \
	    systemctl disable --now pdpd 2> /dev/null || true; fi
	rm -f '$(bin)/pdp' '$(bin)/pdpd' $(addprefix '$(lib)'/,$(programs)) \
	    $(addprefix '$(units)'/,$(service_units)) '$(share)/bash-completion/completions/pdp' \
	    '$(share)/zsh/site-functions/_pdp' '$(share)/fish/vendor_completions.d/pdp.fish'
	rm -rf '$(share)/doc/pdp'
	rmdir '$(lib)' 2> /dev/null || true
