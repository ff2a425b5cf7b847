//! The engine's code for protocols that PdP knows nothing of: which bytes of a frame are its key, and what is written into
//! those that are sent, is as the vrouter's spec says.
//!
//! A key has the fields one after the other, zeros behind the last, and the vport that the frame came by in its last two
//! bytes. It has 16 bytes if its fields have 14 at most, and 40 otherwise ([`mux::KEY_FIELD_BYTES_MAX`]).

use pdp_proto::mux;
use pdp_proto::slowpath::DATA_BYTES;

use crate::actions::words;

/// How frames are looked at and changed.
#[derive(Clone, Debug)]
pub struct Fields {
    spec: mux::Fields,
    /// Bytes that a frame has at least.
    bytes_min: usize,
}

/// Why a frame is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// It is too short for what is to be written.
    Short,
    /// Its count of hops is at its end.
    Hops,
}

impl Fields {
    /// As a spec says that was checked.
    pub fn new(spec: &mux::Fields) -> Self {
        let keys =
            spec.key.iter().map(|field| usize::from(field.offset) + usize::from(field.bytes));
        let writes = spec.write.iter().map(|write| write.end());
        let bytes_min = keys.chain(writes).max().unwrap_or(0);
        Self { spec: spec.clone(), bytes_min }
    }

    /// Whether its keys have 40 bytes.
    pub fn is_long(&self) -> bool {
        self.spec.is_long()
    }

    /// Whether frames that no filter decides on go to the control guest.
    pub fn punts(&self) -> bool {
        self.spec.miss == mux::Miss::Punt
    }

    /// The key of a frame that came by `vport`; `None`: it is shorter than its fields, or than what is written.
    #[inline]
    pub fn key<const B: usize, const W: usize>(
        &self,
        frame: &[u8],
        vport: u16,
    ) -> Option<[u64; W]> {
        if frame.len() < self.bytes_min {
            return None;
        }
        let (mut key, mut at) = ([0; B], 0);
        for field in &self.spec.key {
            let (offset, bytes) = (usize::from(field.offset), usize::from(field.bytes));
            let to = key.get_mut(at..at + bytes)?;
            to.copy_from_slice(frame.get(offset..offset + bytes)?);
            at += bytes;
        }
        key.get_mut(B - 2..)?.copy_from_slice(&vport.to_be_bytes());
        Some(words(key))
    }

    /// Writes what is written into a frame that is sent, by a port with this link address. One that is not sent may be
    /// changed, too.
    pub fn write(
        &self,
        frame: &mut [u8],
        data: &[u8; DATA_BYTES],
        mac: &[u8; 6],
    ) -> Result<(), Unsent> {
        for write in &self.spec.write {
            let to = frame.get_mut(usize::from(write.offset)..).ok_or(Unsent::Short)?;
            let from: &[u8] = match write.what {
                mux::Written::Data { from, bytes } => {
                    let from = usize::from(from);
                    data.get(from..from + usize::from(bytes)).ok_or(Unsent::Short)?
                }
                mux::Written::Source => mac,
                mux::Written::Hops => {
                    let hops = to.first_mut().ok_or(Unsent::Short)?;
                    if *hops <= 1 {
                        return Err(Unsent::Hops);
                    }
                    *hops -= 1;
                    continue;
                }
            };
            to.get_mut(..from.len()).ok_or(Unsent::Short)?.copy_from_slice(from);
        }
        Ok(())
    }

    /// Has a copy of a frame that was sent leave by another port, with this link address.
    pub fn readdress(&self, frame: &mut [u8], mac: &[u8; 6]) {
        for write in self.spec.write.iter().filter(|write| write.what == mux::Written::Source) {
            let at = usize::from(write.offset);
            if let Some(to) = frame.get_mut(at..at + mac.len()) {
                to.copy_from_slice(mac);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn spec() -> impl Strategy<Value = mux::Fields> {
        let field =
            (0..60_u16, 1..5_u8).prop_map(|(offset, bytes)| mux::KeyField { offset, bytes });
        let what = prop_oneof![
            (0..12_u8, 1..4_u8).prop_map(|(from, bytes)| mux::Written::Data { from, bytes }),
            Just(mux::Written::Source),
            Just(mux::Written::Hops),
        ];
        let write = (0..60_u16, what).prop_map(|(offset, what)| mux::Write { offset, what });
        (vec(field, 1..8), vec(write, 0..4)).prop_map(|(key, write)| mux::Fields {
            key,
            write,
            miss: mux::Miss::Drop,
        })
    }

    fn bytes<const W: usize>(key: [u64; W]) -> Vec<u8> {
        key.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    proptest! {
        /// The key of any frame is what its bytes say, one after the other; what is written is where it is to be, and all
        /// else is as it was.
        #[test]
        fn keys_and_writes_are_as_the_spec_says(
            spec in spec(),
            frame in vec(any::<u8>(), 0..80),
            data: [u8; 16],
            vport: u16,
        ) {
            let fields = Fields::new(&spec);
            let byte = |at: usize| frame.get(at).copied();
            let ranges = spec.key.iter().map(|it| usize::from(it.offset)..usize::from(it.offset) + usize::from(it.bytes));
            let wanted: Option<Vec<u8>> = ranges.flatten().map(byte).collect();
            let written_to = spec.write.iter().map(|it| it.end()).max().unwrap_or(0);
            let wanted = wanted.filter(|_| frame.len() >= written_to);
            let key = match spec.is_long() {
                false => fields.key::<16, 2>(&frame, vport).map(bytes),
                true => fields.key::<40, 5>(&frame, vport).map(bytes),
            };
            prop_assert_eq!(key.is_some(), wanted.is_some());
            let (Some(key), Some(wanted)) = (key, wanted) else { return Ok(()) };
            prop_assert_eq!(key.len(), if wanted.len() > 14 { 40 } else { 16 });
            prop_assert_eq!(&key[..wanted.len()], &wanted[..]);
            prop_assert!(key[wanted.len()..key.len() - 2].iter().all(|byte| *byte == 0));
            prop_assert_eq!(&key[key.len() - 2..], vport.to_be_bytes());
            let mac = [2, 3, 4, 5, 6, 7];
            let (mut written, mut slow, mut ends) = (frame.clone(), frame.clone(), false);
            for write in &spec.write {
                let at = usize::from(write.offset);
                match write.what {
                    mux::Written::Hops if slow[at] <= 1 => {
                        ends = true;
                        break;
                    }
                    mux::Written::Hops => slow[at] -= 1,
                    mux::Written::Source => slow[at..at + 6].copy_from_slice(&mac),
                    mux::Written::Data { from, bytes } => {
                        for byte in 0..usize::from(bytes) {
                            slow[at + byte] = data[usize::from(from) + byte];
                        }
                    }
                }
            }
            let result = fields.write(&mut written, &data, &mac);
            prop_assert_eq!(result, if ends { Err(Unsent::Hops) } else { Ok(()) });
            prop_assert_eq!(written, slow);
        }
    }
}
