//! Figure 1 with its data planes swapped. Everything that holds for the demo holds for both.

use pdp_e2e::beside;

use crate::alone::figure1::{Demo, row};

#[test]
fn figure_1_is_the_same_with_planes_swapped() {
    let _turn = beside();
    let demo = Demo { name: format!("swap{}", std::process::id()) };
    let said = demo.up(&["--swap", "--quick"], 2);
    let forwards = row(&said, "forwards");
    assert!(forwards[0] == "the kernel" && forwards[1].contains("fe1"), "{said}");
    demo.down();
}
