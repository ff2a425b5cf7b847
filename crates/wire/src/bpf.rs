//! Programs of classic BPF that select frames: the output of libpcap's filter compiler.
//!
//! A [`BpfProgram`] is checked when it is read. Every jump leads forward to an instruction of
//! it, the last instruction returns, every memory access is within the sixteen words, and
//! no constant divisor is zero. So it ends after at most [`INSTRUCTIONS_MAX`] instructions
//! for any frame, and [`BpfProgram::matches`] never panics. As in the kernel, a frame does
//! not match if the program reads beyond its end.
//!
//! The text form is the output of `tcpdump -ddd`, separated by commas or newlines: the count, then
//! for each instruction its code, jumps and constant, in decimal.
//!
//! Source: McCanne and Jacobson, "The BSD Packet Filter", 1993; the kernel's
//! `bpf_check_classic`. The kernel's own extensions (`SKF_AD_OFF`: offsets
//! from 0xfffff000) read beyond every frame here.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most instructions of a program. The mux runs so many in
/// about the time that it takes to copy a frame.
pub const INSTRUCTIONS_MAX: usize = 256;

/// Most bytes of a program as text: each instruction has at
/// most 5 + 3 + 3 + 10 digits, and four separators.
pub const TEXT_BYTES_MAX: usize = 16 + INSTRUCTIONS_MAX * 25;

/// Words of memory.
const MEMORY: usize = 16;

/// A checked program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BpfProgram(Vec<Instruction>);

/// One instruction, as in the kernel's `sock_filter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Code of the operation.
    pub code: u16,
    /// Instructions to skip if the condition holds.
    pub jt: u8,
    /// Instructions to skip if the condition does not hold.
    pub jf: u8,
    /// Constant operand.
    pub k: u32,
}

/// Reason why a program is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BpfError {
    /// The text is malformed.
    Text,
    /// No instruction, or more than [`INSTRUCTIONS_MAX`].
    Count(usize),
    /// The instruction at this index is invalid, or leads out of the program or its memory.
    Instruction(usize),
    /// The last instruction does not return.
    NoEnd,
}

impl fmt::Display for BpfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("is not what `tcpdump -ddd` prints"),
            Self::Count(count) => {
                write!(f, "has {count} instructions, not 1 to {INSTRUCTIONS_MAX}")
            }
            Self::Instruction(place) => write!(f, "instruction {place} is not one of classic BPF"),
            Self::NoEnd => f.write_str("the last instruction does not return"),
        }
    }
}

impl std::error::Error for BpfError {}

// Classes and modes of codes.
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MISC: u16 = 0x07;
const CLASS: u16 = 0x07;
const WORD: u16 = 0x00;
const HALF: u16 = 0x08;
const BYTE: u16 = 0x10;
const IMM: u16 = 0x00;
const ABS: u16 = 0x20;
const IND: u16 = 0x40;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const MSH: u16 = 0xa0;
const X: u16 = 0x08;
const K: u16 = 0x00;
const A: u16 = 0x10;
const OP: u16 = 0xf0;
const ADD: u16 = 0x00;
const SUB: u16 = 0x10;
const MUL: u16 = 0x20;
const DIV: u16 = 0x30;
const OR: u16 = 0x40;
const AND: u16 = 0x50;
const LSH: u16 = 0x60;
const RSH: u16 = 0x70;
const NEG: u16 = 0x80;
const MOD: u16 = 0x90;
const XOR: u16 = 0xa0;
const JA: u16 = 0x00;
const JEQ: u16 = 0x10;
const JGT: u16 = 0x20;
const JGE: u16 = 0x30;
const JSET: u16 = 0x40;
const TAX: u16 = 0x00;
const TXA: u16 = 0x80;

impl BpfProgram {
    /// Checks the instructions and makes a program of them.
    ///
    /// # Errors
    /// They are not a valid program, which is certain to end.
    pub fn new(instructions: Vec<Instruction>) -> Result<Self, BpfError> {
        let count = instructions.len();
        if !(1..=INSTRUCTIONS_MAX).contains(&count) {
            return Err(BpfError::Count(count));
        }
        for (place, instruction) in instructions.iter().enumerate() {
            if !instruction.is_good(count - place - 1) {
                return Err(BpfError::Instruction(place));
            }
        }
        match instructions.last() {
            Some(last) if last.code & CLASS == RET => Ok(Self(instructions)),
            _ => Err(BpfError::NoEnd),
        }
    }

    /// Returns the instructions.
    pub fn instructions(&self) -> &[Instruction] {
        &self.0
    }

    /// True if the program selects the frame.
    pub fn matches(&self, frame: &[u8]) -> bool {
        self.run(frame).is_some_and(|bytes| bytes != 0)
    }

    /// Runs the program. Returns its result; `None` if it
    /// reads beyond the frame, or divides by zero.
    fn run(&self, frame: &[u8]) -> Option<u32> {
        let length = u32::try_from(frame.len()).ok()?;
        let (mut a, mut x, mut memory, mut at) = (0u32, 0u32, [0u32; MEMORY], 0);
        loop {
            let Instruction { code, jt, jf, k } = *self.0.get(at)?;
            at += 1;
            match code & CLASS {
                LD => {
                    a = match code & 0xe0 {
                        IMM => k,
                        ABS => load(frame, code, k)?,
                        IND => load(frame, code, x.checked_add(k)?)?,
                        MEM => *memory.get(k as usize)?,
                        _ => length,
                    }
                }
                LDX => {
                    x = match code & 0xe0 {
                        IMM => k,
                        MEM => *memory.get(k as usize)?,
                        MSH => 4 * (load(frame, BYTE, k)? & 0xf),
                        _ => length,
                    }
                }
                ST => *memory.get_mut(k as usize)? = a,
                STX => *memory.get_mut(k as usize)? = x,
                ALU => a = calculate(code & OP, a, if code & X == X { x } else { k })?,
                JMP => {
                    let other = if code & X == X { x } else { k };
                    let holds = match code & OP {
                        JA => {
                            at += k as usize;
                            continue;
                        }
                        JEQ => a == other,
                        JGT => a > other,
                        JGE => a >= other,
                        _ => a & other != 0,
                    };
                    at += usize::from(if holds { jt } else { jf });
                }
                RET => return Some(if code & A == A { a } else { k }),
                _ if code & 0xf8 == TXA => a = x,
                _ => x = a,
            }
        }
    }
}

/// Reads a number from the frame, in network byte order.
fn load(frame: &[u8], code: u16, at: u32) -> Option<u32> {
    let rest = frame.get(at as usize..)?;
    match code & 0x18 {
        WORD => rest.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)),
        HALF => rest.first_chunk().map(|bytes| u16::from_be_bytes(*bytes).into()),
        _ => rest.first().map(|byte| (*byte).into()),
    }
}

fn calculate(operation: u16, a: u32, by: u32) -> Option<u32> {
    Some(match operation {
        ADD => a.wrapping_add(by),
        SUB => a.wrapping_sub(by),
        MUL => a.wrapping_mul(by),
        DIV => a.checked_div(by)?,
        MOD => a.checked_rem(by)?,
        OR => a | by,
        AND => a & by,
        XOR => a ^ by,
        // Bits shifted out are lost, for any distance.
        LSH => a.checked_shl(by).unwrap_or(0),
        RSH => a.checked_shr(by).unwrap_or(0),
        _ => a.wrapping_neg(),
    })
}

impl Instruction {
    /// True if the instruction is valid, with `after` instructions behind it.
    fn is_good(&self, after: usize) -> bool {
        let Self { code, jt, jf, k } = *self;
        let sized = |mode: u16| [WORD, HALF, BYTE].iter().any(|size| code == LD | mode | size);
        let memory = (k as usize) < MEMORY;
        match code & CLASS {
            LD if code == LD | MEM => memory,
            LD => sized(ABS) || sized(IND) || [LD | IMM, LD | LEN].contains(&code),
            LDX if code == LDX | MEM => memory,
            LDX => [LDX | IMM, LDX | LEN, LDX | BYTE | MSH].contains(&code),
            ST | STX => code & !CLASS == 0 && memory,
            ALU if code & !(CLASS | OP | X) != 0 => false,
            ALU => match (code & OP, code & X) {
                (DIV | MOD, K) => k != 0,
                (LSH | RSH, K) => k < 32,
                (NEG, source) => source == K,
                (operation, _) => operation <= XOR,
            },
            JMP if code & !(CLASS | OP | X) != 0 => false,
            JMP => match code & (OP | X) {
                JA => (k as usize) < after,
                operation => {
                    operation & OP != JA
                        && operation & OP <= JSET
                        && usize::from(jt) < after
                        && usize::from(jf) < after
                }
            },
            RET => code == RET | K || code == RET | A,
            _ => code == MISC | TAX || code == MISC | TXA,
        }
    }
}

impl FromStr for BpfProgram {
    type Err = BpfError;

    fn from_str(text: &str) -> Result<Self, BpfError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(BpfError::Count(text.len() / 8));
        }
        let mut lines = text.split([',', '\n']).map(str::trim).filter(|line| !line.is_empty());
        let count: usize = lines.next().and_then(|line| line.parse().ok()).ok_or(BpfError::Text)?;
        let instructions: Vec<_> =
            lines.map(instruction).collect::<Option<_>>().ok_or(BpfError::Text)?;
        if instructions.len() != count {
            return Err(BpfError::Text);
        }
        Self::new(instructions)
    }
}

fn instruction(line: &str) -> Option<Instruction> {
    let mut words = line.split_ascii_whitespace();
    let found = Instruction {
        code: words.next()?.parse().ok()?,
        jt: words.next()?.parse().ok()?,
        jf: words.next()?.parse().ok()?,
        k: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some(found)
}

impl fmt::Display for BpfProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.len())?;
        self.0.iter().try_for_each(|it| write!(f, ",{} {} {} {}", it.code, it.jt, it.jf, it.k))
    }
}

impl TryFrom<String> for BpfProgram {
    type Error = BpfError;

    fn try_from(text: String) -> Result<Self, BpfError> {
        text.parse()
    }
}

impl From<BpfProgram> for String {
    fn from(program: BpfProgram) -> Self {
        program.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Output of `tcpdump -ddd 'udp port 53'` for IPv4 only; the test shows what it selects.
    const PORT_53: &str = "14,40 0 0 12,21 11 0 34525,21 0 10 2048,48 0 0 23,21 0 8 17,40 0 0 20,69 6 0 8191,177 0 0 14,\
                           72 0 0 14,21 2 0 53,72 0 0 16,21 0 1 53,6 0 0 262144,6 0 0 0";

    fn datagram(from: u16, to: u16) -> Vec<u8> {
        let mut frame = vec![0; 14 + 20 + 8];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = 17;
        frame[34..36].copy_from_slice(&from.to_be_bytes());
        frame[36..38].copy_from_slice(&to.to_be_bytes());
        frame
    }

    #[test]
    fn bpf_filter_matches_port_53() {
        let program: BpfProgram = PORT_53.replace(',', "\n").parse().unwrap();
        assert_eq!(program.to_string(), PORT_53);
        assert!(program.matches(&datagram(53, 1)) && program.matches(&datagram(1, 53)));
        assert!(!program.matches(&datagram(1, 2)));
        let frame = datagram(1, 53);
        for end in 0..frame.len() - 5 {
            assert!(!program.matches(&frame[..end]), "{end}");
        }
    }

    #[test]
    fn invalid_or_endless_bpf_programs_are_refused() {
        let of = |text: &str| text.parse::<BpfProgram>().map(drop);
        assert_eq!(of("1,6 0 0 1"), Ok(()));
        for text in [
            "",
            "x",
            "2,6 0 0 1",
            "1,6 0 0",
            "1,6 0 0 1 1",
            "1,6 0 0 -1",
            "1,65536 0 0 0",
            "1,6 256 0 0",
        ] {
            assert_eq!(of(text), Err(BpfError::Text), "{text}");
        }
        assert_eq!(of("0"), Err(BpfError::Count(0)));
        assert_eq!(of("1,0 0 0 1"), Err(BpfError::NoEnd));
        for bad in [
            "5 0 0 1",
            "5 0 0 4294967295",
            "21 1 0 0",
            "21 0 1 0",
            "96 0 0 16",
            "97 0 0 16",
            "2 0 0 16",
            "3 0 0 4294967295",
            "52 0 0 0",
            "148 0 0 0",
            "100 0 0 32",
            "8 0 0 0",
            "14 0 0 0",
            "180 0 0 0",
            "85 0 0 0",
            "65535 0 0 0",
            "140 0 0 0",
            "15 0 0 0",
        ] {
            assert_eq!(of(&format!("2,{bad},6 0 0 0")), Err(BpfError::Instruction(0)), "{bad}");
        }
        let long = format!("{}{}", INSTRUCTIONS_MAX + 1, ",6 0 0 0".repeat(INSTRUCTIONS_MAX + 1));
        assert_eq!(of(&long), Err(BpfError::Count(INSTRUCTIONS_MAX + 1)));
        assert!(of(&"6 0 0 0,".repeat(10_000)).is_err());
    }

    fn any_program() -> impl Strategy<Value = Vec<Instruction>> {
        let code = prop_oneof![0u16..0x100, any::<u16>()];
        let k = prop_oneof![0u32..64, any::<u32>()];
        let one =
            (code, 0u8..8, 0u8..8, k).prop_map(|(code, jt, jf, k)| Instruction { code, jt, jf, k });
        (proptest::collection::vec(one, 0..12), 0u32..2).prop_map(|(mut all, k)| {
            all.push(Instruction { code: RET, jt: 0, jf: 0, k });
            all
        })
    }

    proptest! {
        #[test]
        fn accepted_bpf_programs_terminate(all in any_program(), frame: Vec<u8>) {
            if let Ok(program) = BpfProgram::new(all) {
                program.matches(&frame);
                prop_assert_eq!(program.to_string().parse::<BpfProgram>(), Ok(program));
            }
        }

        #[test]
        fn bpf_parser_never_panics(text in "[0-9, \n-]{0,60}") {
            let _ = text.parse::<BpfProgram>();
        }
    }
}
