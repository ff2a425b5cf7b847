//! All end-to-end tests, in one program: it is linked once, and its tests share the machine by turns
//! ([`pdp_e2e::turn`]).
//!
//! A test is in `alone` if it says `alone()`, else in `beside`. libtest begins with those whose names come
//! first in the alphabet: with `alone`, after which all threads are free for the others.

mod alone;
mod beside;
