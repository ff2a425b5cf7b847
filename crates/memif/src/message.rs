//! The messages of the control socket: 128 bytes each, little-endian, packed.
//!
//! Parsing never panics; text is cut at its first zero byte and made printable.
//! Source: DPDK 22.11 drivers/net/memif/memif.h (`memif_msg_t`).

/// Bytes of every message.
pub(crate) const MESSAGE_BYTES: usize = 128;

/// Protocol version 2.0.
pub(crate) const VERSION: u16 = 0x0200;

/// `MEMIF_INTERFACE_MODE_ETHERNET`.
pub(crate) const MODE_ETHERNET: u8 = 0;

const NAME_BYTES: usize = 32;
const REASON_BYTES: usize = 96;
const SECRET_BYTES: usize = 24;

const ACK: u16 = 1;
const HELLO: u16 = 2;
const INIT: u16 = 3;
const ADD_REGION: u16 = 4;
const ADD_RING: u16 = 5;
const CONNECT: u16 = 6;
const CONNECTED: u16 = 7;
const DISCONNECT: u16 = 8;

/// Flag of a ring that the client fills (`MEMIF_MSG_ADD_RING_FLAG_S2M`).
const RING_TO_SERVER: u16 = 1;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Ack,
    Hello(Hello),
    Init(Init),
    AddRegion { index: u16, size: u64 },
    AddRing(AddRing),
    Connect { name: String },
    Connected { name: String },
    Disconnect { reason: String },
}

/// The server's capabilities. The three `_max` are the highest index, not a count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub name: String,
    pub version_min: u16,
    pub version_max: u16,
    pub region_max: u16,
    pub ring_to_client_max: u16,
    pub ring_to_server_max: u16,
    pub ring_log2_max: u8,
}

/// The interface that the client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Init {
    pub version: u16,
    pub interface_id: u32,
    pub mode: u8,
    pub name: String,
}

/// A ring. Its doorbell is passed as a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddRing {
    pub to_server: bool,
    pub index: u16,
    pub region: u16,
    pub offset: u32,
    pub ring_log2: u8,
}

impl Message {
    /// Parses a message; `None` for an unknown type.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let mut fields = MessageFields(&bytes[..]);
        Some(match fields.u16() {
            ACK => Self::Ack,
            HELLO => Self::Hello(Hello {
                name: fields.text(NAME_BYTES),
                version_min: fields.u16(),
                version_max: fields.u16(),
                region_max: fields.u16(),
                ring_to_client_max: fields.u16(),
                ring_to_server_max: fields.u16(),
                ring_log2_max: fields.u8(),
            }),
            INIT => Self::Init(Init {
                version: fields.u16(),
                interface_id: fields.u32(),
                mode: fields.u8(),
                name: {
                    fields.take(SECRET_BYTES);
                    fields.text(NAME_BYTES)
                },
            }),
            ADD_REGION => Self::AddRegion { index: fields.u16(), size: fields.u64() },
            ADD_RING => Self::AddRing(AddRing {
                to_server: fields.u16() & RING_TO_SERVER != 0,
                index: fields.u16(),
                region: fields.u16(),
                offset: fields.u32(),
                ring_log2: fields.u8(),
            }),
            CONNECT => Self::Connect { name: fields.text(NAME_BYTES) },
            CONNECTED => Self::Connected { name: fields.text(NAME_BYTES) },
            DISCONNECT => {
                fields.u32();
                Self::Disconnect { reason: fields.text(REASON_BYTES) }
            }
            _ => return None,
        })
    }

    /// Encodes the message.
    pub fn emit(&self) -> [u8; MESSAGE_BYTES] {
        let mut out = Out { bytes: [0; MESSAGE_BYTES], at: 0 };
        match self {
            Self::Ack => out.put(&ACK.to_le_bytes()),
            Self::Hello(hello) => {
                out.put(&HELLO.to_le_bytes());
                out.text(&hello.name, NAME_BYTES);
                for field in [
                    hello.version_min,
                    hello.version_max,
                    hello.region_max,
                    hello.ring_to_client_max,
                    hello.ring_to_server_max,
                ] {
                    out.put(&field.to_le_bytes());
                }
                out.put(&[hello.ring_log2_max]);
            }
            Self::Init(init) => {
                out.put(&INIT.to_le_bytes());
                out.put(&init.version.to_le_bytes());
                out.put(&init.interface_id.to_le_bytes());
                out.put(&[init.mode]);
                out.put(&[0; SECRET_BYTES]);
                out.text(&init.name, NAME_BYTES);
            }
            Self::AddRegion { index, size } => {
                out.put(&ADD_REGION.to_le_bytes());
                out.put(&index.to_le_bytes());
                out.put(&size.to_le_bytes());
            }
            Self::AddRing(ring) => {
                out.put(&ADD_RING.to_le_bytes());
                out.put(&(if ring.to_server { RING_TO_SERVER } else { 0 }).to_le_bytes());
                out.put(&ring.index.to_le_bytes());
                out.put(&ring.region.to_le_bytes());
                out.put(&ring.offset.to_le_bytes());
                out.put(&[ring.ring_log2]);
            }
            Self::Connect { name } => {
                out.put(&CONNECT.to_le_bytes());
                out.text(name, NAME_BYTES);
            }
            Self::Connected { name } => {
                out.put(&CONNECTED.to_le_bytes());
                out.text(name, NAME_BYTES);
            }
            Self::Disconnect { reason } => {
                out.put(&DISCONNECT.to_le_bytes());
                out.put(&0u32.to_le_bytes());
                out.text(reason, REASON_BYTES);
            }
        }
        out.bytes
    }
}

/// Reads one field after the other. No type's fields together reach [`MESSAGE_BYTES`].
struct MessageFields<'a>(&'a [u8]);

impl<'a> MessageFields<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (field, rest) = self.0.split_at(count);
        self.0 = rest;
        field
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        field.copy_from_slice(self.take(N));
        field
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Reads text, which may end up in a log or on a terminal: only printable ASCII stays.
    fn text(&mut self, bytes: usize) -> String {
        self.take(bytes)
            .iter()
            .take_while(|&&byte| byte != 0)
            .map(|&byte| if (b' '..=b'~').contains(&byte) { char::from(byte) } else { '?' })
            .collect()
    }
}

struct Out {
    bytes: [u8; MESSAGE_BYTES],
    at: usize,
}

impl Out {
    fn put(&mut self, field: &[u8]) {
        self.bytes[self.at..self.at + field.len()].copy_from_slice(field);
        self.at += field.len();
    }

    /// Cuts the text so that a zero byte follows it.
    fn text(&mut self, text: &str, bytes: usize) {
        let length = text.len().min(bytes - 1);
        self.bytes[self.at..self.at + length].copy_from_slice(&text.as_bytes()[..length]);
        self.at += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes assembled by hand from the C declarations.
    #[test]
    fn message_fields_match_the_memif_header() {
        let mut init = [0; MESSAGE_BYTES];
        init[0] = 3;
        init[2..4].copy_from_slice(&[0, 2]);
        init[4..8].copy_from_slice(&[7, 0, 0, 1]);
        init[8] = 0;
        init[33..37].copy_from_slice(b"peer");
        let want = Message::Init(Init {
            version: VERSION,
            interface_id: 0x0100_0007,
            mode: MODE_ETHERNET,
            name: "peer".into(),
        });
        assert_eq!(Message::parse(&init), Some(want.clone()));
        assert_eq!(want.emit(), init);

        let mut ring = [0; MESSAGE_BYTES];
        ring[..13].copy_from_slice(&[5, 0, 1, 0, 2, 0, 3, 0, 4, 0, 0, 1, 10]);
        let want = Message::AddRing(AddRing {
            to_server: true,
            index: 2,
            region: 3,
            offset: 0x0100_0004,
            ring_log2: 10,
        });
        assert_eq!(Message::parse(&ring), Some(want.clone()));
        assert_eq!(want.emit(), ring);

        let mut region = [0; MESSAGE_BYTES];
        region[..12].copy_from_slice(&[4, 0, 1, 0, 0, 16, 0, 0, 0, 0, 0, 1]);
        let want = Message::AddRegion { index: 1, size: 0x0100_0000_0000_1000 };
        assert_eq!(Message::parse(&region), Some(want.clone()));
        assert_eq!(want.emit(), region);

        let mut hello = [0; MESSAGE_BYTES];
        hello[0] = 2;
        hello[2..4].copy_from_slice(b"me");
        hello[34..45].copy_from_slice(&[0, 2, 0, 2, 15, 0, 1, 0, 2, 0, 14]);
        let want = Message::Hello(Hello {
            name: "me".into(),
            version_min: VERSION,
            version_max: VERSION,
            region_max: 15,
            ring_to_client_max: 1,
            ring_to_server_max: 2,
            ring_log2_max: 14,
        });
        assert_eq!(Message::parse(&hello), Some(want.clone()));
        assert_eq!(want.emit(), hello);

        let mut bye = [0; MESSAGE_BYTES];
        bye[0] = 8;
        bye[6..9].copy_from_slice(b"bye");
        let want = Message::Disconnect { reason: "bye".into() };
        assert_eq!(Message::parse(&bye), Some(want.clone()));
        assert_eq!(want.emit(), bye);
    }

    #[test]
    fn message_truncates_and_sanitizes_text() {
        let long = "x".repeat(200);
        let Some(Message::Connect { name }) =
            Message::parse(&Message::Connect { name: long }.emit())
        else {
            panic!("not a connect message");
        };
        assert_eq!(name, "x".repeat(31));
        let mut bytes = Message::Connect { name: String::new() }.emit();
        bytes[2..6].copy_from_slice(&[0x1b, b'[', 0xff, b'\n']);
        assert_eq!(Message::parse(&bytes), Some(Message::Connect { name: "?[??".into() }));
    }

    proptest! {
        #[test]
        fn noise_is_refused_or_read_back(kind in 0u16..12, noise: [[u8; 32]; 4]) {
            let mut bytes = [0; MESSAGE_BYTES];
            bytes.copy_from_slice(&noise.concat());
            bytes[..2].copy_from_slice(&kind.to_le_bytes());
            if let Some(message) = Message::parse(&bytes) {
                let again = Message::parse(&message.emit());
                // A name of all 32 bytes loses its last one.
                prop_assert_eq!(
                    again.map(|m| std::mem::discriminant(&m)),
                    Some(std::mem::discriminant(&message))
                );
            }
        }
    }
}
