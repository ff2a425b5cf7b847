//! Frame formats: what PdP reads and writes on the wire and in trunks.
//!
//! Pure logic: no I/O, no `unsafe`, no clock. A parser never panics for any bytes. It returns
//! `None` or an error, which the caller turns into a counted drop.

#![forbid(unsafe_code)]

/// Defines an enum whose variants have names.
#[macro_export]
macro_rules! named {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// All variants, in the order of their codes.
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Returns the variant with this code, its index among all.
            pub fn from_code(code: u8) -> Option<Self> {
                Self::ALL.get(usize::from(code)).copied()
            }

            /// Returns the name in counters and in the API.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

pub mod bpf;
pub mod checksum;
pub mod ecn;
pub mod ether;
pub mod flow;
pub mod geneve;
pub mod gre;
pub mod ipv4;
pub mod ipv6;
pub mod key;
pub mod offload;
pub mod outer;
pub mod pcap;
pub mod tag;
pub mod tunnel;
pub mod tunnel_kind;
pub mod udp;
pub mod vlan;
pub mod vxlan;
