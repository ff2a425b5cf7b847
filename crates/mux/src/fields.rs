//! Engine code for protocols unknown to PdP. The vrouter's spec says which bytes
//! of a frame form its key, and what is written into frames that are sent.
//!
//! A key consists of the fields one after the other, then zeros, and the
//! ingress vport in its last two bytes. It has 16 bytes if its fields
//! have 14 at most, and 40 otherwise ([`mux::KEY_FIELD_BYTES_MAX`]).

use pdp_proto::mux;
use pdp_proto::slowpath::DATA_BYTES;

use crate::actions::words;

/// Reads keys from frames, and writes into frames.
#[derive(Clone, Debug)]
pub struct FieldForwarder {
    spec: mux::FieldsConfig,
    /// Shortest valid frame, bytes.
    bytes_min: usize,
}

/// Reason why a frame is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// It is too short for the writes.
    Short,
    /// The hop count has run out.
    Hops,
}

impl FieldForwarder {
    /// Returns the code for a spec that was checked.
    pub fn new(spec: &mux::FieldsConfig) -> Self {
        let keys =
            spec.key.iter().map(|field| usize::from(field.offset) + usize::from(field.bytes));
        let writes = spec.write.iter().map(|write| write.end());
        let bytes_min = keys.chain(writes).max().unwrap_or(0);
        Self { spec: spec.clone(), bytes_min }
    }

    /// True if its keys have 40 bytes.
    pub fn is_long(&self) -> bool {
        self.spec.is_long()
    }

    /// True if frames that match no filter go to the control guest.
    pub fn punts(&self) -> bool {
        self.spec.miss == mux::MissPolicy::Punt
    }

    /// Returns the key of a frame that came by `vport`. `None`
    /// if the frame is shorter than its fields or writes.
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

    /// Applies the writes to a frame that is sent by a port with
    /// this MAC address. On an error the frame may be changed, too.
    pub fn write(
        &self,
        frame: &mut [u8],
        data: &[u8; DATA_BYTES],
        mac: &[u8; 6],
    ) -> Result<(), Unsent> {
        for write in &self.spec.write {
            let to = frame.get_mut(usize::from(write.offset)..).ok_or(Unsent::Short)?;
            let from: &[u8] = match write.what {
                mux::WriteSource::Data { from, bytes } => {
                    let from = usize::from(from);
                    data.get(from..from + usize::from(bytes)).ok_or(Unsent::Short)?
                }
                mux::WriteSource::Source => mac,
                mux::WriteSource::Hops => {
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

    /// Rewrites the source address of a copy for another port, with this MAC address.
    pub fn readdress(&self, frame: &mut [u8], mac: &[u8; 6]) {
        for write in self.spec.write.iter().filter(|write| write.what == mux::WriteSource::Source) {
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

    fn spec() -> impl Strategy<Value = mux::FieldsConfig> {
        let field =
            (0..60_u16, 1..5_u8).prop_map(|(offset, bytes)| mux::KeyFieldConfig { offset, bytes });
        let what = prop_oneof![
            (0..12_u8, 1..4_u8).prop_map(|(from, bytes)| mux::WriteSource::Data { from, bytes }),
            Just(mux::WriteSource::Source),
            Just(mux::WriteSource::Hops),
        ];
        let write = (0..60_u16, what).prop_map(|(offset, what)| mux::HeaderWrite { offset, what });
        (vec(field, 1..8), vec(write, 0..4)).prop_map(|(key, write)| mux::FieldsConfig {
            key,
            write,
            miss: mux::MissPolicy::Drop,
        })
    }

    fn bytes<const W: usize>(key: [u64; W]) -> Vec<u8> {
        key.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    proptest! {
        /// The key of any frame consists of its bytes in order.
        /// Writes change exactly the bytes that they name.
        #[test]
        fn field_keys_and_writes_follow_the_spec(
            spec in spec(),
            frame in vec(any::<u8>(), 0..80),
            data: [u8; 16],
            vport: u16,
        ) {
            let fields = FieldForwarder::new(&spec);
            let byte = |at: usize| frame.get(at).copied();
            let ranges = spec.key.iter().map(|it| usize::from(it.offset)..usize::from(it.offset) + usize::from(it.bytes));
            let expected: Option<Vec<u8>> = ranges.flatten().map(byte).collect();
            let written_to = spec.write.iter().map(|it| it.end()).max().unwrap_or(0);
            let expected = expected.filter(|_| frame.len() >= written_to);
            let key = match spec.is_long() {
                false => fields.key::<16, 2>(&frame, vport).map(bytes),
                true => fields.key::<40, 5>(&frame, vport).map(bytes),
            };
            prop_assert_eq!(key.is_some(), expected.is_some());
            let (Some(key), Some(expected)) = (key, expected) else { return Ok(()) };
            prop_assert_eq!(key.len(), if expected.len() > 14 { 40 } else { 16 });
            prop_assert_eq!(&key[..expected.len()], &expected[..]);
            prop_assert!(key[expected.len()..key.len() - 2].iter().all(|byte| *byte == 0));
            prop_assert_eq!(&key[key.len() - 2..], vport.to_be_bytes());
            let mac = [2, 3, 4, 5, 6, 7];
            let (mut written, mut slow, mut ends) = (frame.clone(), frame.clone(), false);
            for write in &spec.write {
                let at = usize::from(write.offset);
                match write.what {
                    mux::WriteSource::Hops if slow[at] <= 1 => {
                        ends = true;
                        break;
                    }
                    mux::WriteSource::Hops => slow[at] -= 1,
                    mux::WriteSource::Source => slow[at..at + 6].copy_from_slice(&mac),
                    mux::WriteSource::Data { from, bytes } => {
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
