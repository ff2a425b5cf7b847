fn main() { pdp_container::shim_main() }
