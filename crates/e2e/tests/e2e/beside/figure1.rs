//! Figure 1 with its data planes swapped. Everything that holds for the demo holds for both.

use pdp_e2e::beside;

use crate::alone::figure1::{Demo, row};

#[test]
fn figure_1_is_the_same_with_planes_swapped() {
    let _permit = beside();
    let demo = Demo { name: format!("swap{}", std::process::id()) };
    let output = demo.up(&["--swap", "--quick"], 2);
    let forwards = row(&output, "forwards");
    assert!(forwards[0] == "the kernel" && forwards[1].contains("fe1"), "{output}");
    demo.down();
}
