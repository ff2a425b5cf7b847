//! An input that consists of several items in sequence.

/// Rest of an input. Past its end all bytes are zero.
pub(crate) struct FuzzInput<'a>(pub &'a [u8]);

impl<'a> FuzzInput<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn long(&mut self) -> u32 {
        u32::from(self.word()) | u32::from(self.word()) << 16
    }

    /// The next bytes; fewer at the end.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns bytes that are preceded by their length.
    pub fn counted(&mut self) -> &'a [u8] {
        let count = self.word();
        self.take(count.into())
    }
}
