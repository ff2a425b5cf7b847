//! A simulated card that forwards for the routers of several networks.

#![forbid(unsafe_code)]

use std::hash::{BuildHasher, RandomState};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::Parser;
use pdp_card::CardSizes;
use pdp_card::service::CardService;
use pdp_proto::listener::ControlListener;

/// Simulates a card, and forwards for routers as pdpd says.
///
/// Standard input is a listening Unix socket, at which pdpd connects.
#[derive(Debug, Parser)]
#[command(version)]
struct CardArguments {}

fn main() -> anyhow::Result<()> {
    let CardArguments {} = CardArguments::parse();
    let listener = std::io::stdin().as_fd().try_clone_to_owned()?;
    let control = ControlListener::new(listener.into());
    let mut control = control.context("standard input must be a listening Unix socket")?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, stop.clone()).context("signal handler")?;
    }
    // Nobody can choose MAC addresses that share their places.
    let seed = RandomState::new().hash_one(0);
    let mut card = CardService::new(CardSizes::CARD_8, seed).context("can't start")?;
    card.run(&mut control, &stop).context("can't go on")
}
