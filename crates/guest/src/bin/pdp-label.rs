//! A network that is not IP: labels of 16 bits instead of addresses, learnt from the frames.
//!
//! ```text
//! bytes 0..12    12..14   14..16   16..18   18      19..
//!       ignored  0x88b5   to       from     hops    data
//! ```
//!
//! A frame to a label that was seen as `from` goes out of the vport where it was
//! last seen. Any other frame, and one to `0xffff`, goes out of all vports
//! except its own. Each router decrements hops. A frame without hops left is
//! dropped, so that loops end. This is the tutorial of docs/guests.md.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use pdp_guest::{Batch, ForwardingProgram, GuestDrop, GuestOptions, environment};

/// IEEE 802 local experimental EtherType 1.
const ETHER_TYPE: [u8; 2] = [0x88, 0xb5];
const HEADER_BYTES: usize = 19;
const EVERYONE: u16 = 0xffff;
const UNSEEN: u16 = u16::MAX;

pub(crate) struct LabelSwitch {
    vports: u16,
    /// By label: vport where it was last seen.
    seen_at: Vec<u16>,
}

impl LabelSwitch {
    pub(crate) fn new(vports: u16) -> Self {
        Self { vports, seen_at: vec![UNSEEN; 1 << 16] }
    }

    fn decide(&mut self, batch: &mut Batch<'_>, frame: usize) {
        let vport = batch.vport(frame);
        let Some(header) = batch.frame_mut(frame).first_chunk_mut::<HEADER_BYTES>() else {
            return batch.drop(frame, GuestDrop::Malformed);
        };
        if header[12..14] != ETHER_TYPE {
            return batch.drop(frame, GuestDrop::Malformed);
        }
        let Some(hops) = header[18].checked_sub(1) else {
            return batch.drop(frame, GuestDrop::Policy);
        };
        header[18] = hops;
        let to = u16::from_be_bytes([header[14], header[15]]);
        let from = u16::from_be_bytes([header[16], header[17]]);
        if from != EVERYONE {
            self.seen_at[usize::from(from)] = vport;
        }
        match self.seen_at[usize::from(to)] {
            UNSEEN => self.flood(batch, frame, vport),
            out if out == vport => batch.drop(frame, GuestDrop::NotForUs),
            out => batch.forward(frame, out),
        }
    }

    /// Copies the frame to all other vports except the last, which gets the frame itself.
    fn flood(&self, batch: &mut Batch<'_>, frame: usize, came_by: u16) {
        let mut others = (0..self.vports).filter(|&vport| vport != came_by);
        let Some(last) = others.next_back() else {
            return batch.drop(frame, GuestDrop::NoRoute);
        };
        for vport in others {
            batch.copy_to(frame, vport);
        }
        batch.forward(frame, last);
    }
}

impl ForwardingProgram for LabelSwitch {
    fn process(&mut self, batch: &mut Batch<'_>) {
        for frame in 0..batch.len() {
            self.decide(batch, frame);
        }
    }
}

/// Switches frames by labels of 16 bits.
#[derive(Debug, Parser)]
#[command(version)]
struct LabelArguments {
    #[command(flatten)]
    guest: GuestOptions,
    /// Vports of the vrouter [default: PDP_PORTS of the environment]
    #[arg(long)]
    vports: Option<u16>,
}

fn main() -> ExitCode {
    let LabelArguments { guest, vports } = LabelArguments::parse();
    let Some(vports) = vports.or_else(|| environment("PDP_PORTS")) else {
        eprintln!("pdp-label: unknown number of vports (set --vports or PDP_PORTS)");
        return ExitCode::FAILURE;
    };
    match pdp_guest::run(&guest, "pdp-label", LabelSwitch::new(vports)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pdp-label: {error}");
            ExitCode::FAILURE
        }
    }
}
