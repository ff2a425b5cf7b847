//! Forwarders at a [`crate::site::Site`] or over memif.

pub mod kernel;
pub mod ovs;
pub mod pdp;
pub mod testpmd;
