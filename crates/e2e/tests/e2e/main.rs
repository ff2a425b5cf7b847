//! All end-to-end tests, in one program: it is linked once, and
//! its tests take turns on the machine ([`pdp_e2e::turn`]).
//!
//! A test is in `alone` if it calls `alone()`, otherwise in `beside`. libtest begins with the names
//! that come first in the alphabet: with `alone`. After these, all threads are free for the others.

mod alone;
mod beside;
