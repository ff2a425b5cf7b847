//! Being written.
/// Main.
pub fn main() {}
