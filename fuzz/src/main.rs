//! One target of pdp-fuzz under libFuzzer: `PDP_FUZZ_TARGET` names it.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use pdp_fuzz::FuzzTarget;

static TARGET: LazyLock<FuzzTarget> = LazyLock::new(|| {
    let name = std::env::var("PDP_FUZZ_TARGET").unwrap_or_default();
    FuzzTarget::named(&name).unwrap_or_else(|| panic!("PDP_FUZZ_TARGET={name}: no such target"))
});

fuzz_target!(|bytes: &[u8]| TARGET.feed(bytes));
