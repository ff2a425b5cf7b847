//! Register writes, and the order in which they use the card's bus.

use std::collections::VecDeque;

use crate::registers;
use crate::table::{TableWord, TableWrite};

/// A write of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterWrite {
    /// Byte address, 25 bits.
    pub address: u32,
    /// The data.
    pub data: u32,
}

impl RegisterWrite {
    /// VE of the page; `None` for the super page.
    pub fn ve(&self) -> Option<u8> {
        (self.address >> 16).checked_sub(1).map(|ve| ve as u8)
    }
}

/// Returns the writes that put an entry into a table, by the page at `base`.
fn entry_writes(base: u32, word: &TableWord) -> impl Iterator<Item = RegisterWrite> + use<> {
    let table = word.table as u32;
    let words = word.data.into_iter().take(registers::ENTRY_WORDS[table as usize]);
    let data = (registers::WRITE_DATA_0..).step_by(4).zip(words);
    let commit = (registers::commit(table), word.index);
    data.chain([commit]).map(move |(offset, data)| RegisterWrite { address: base | offset, data })
}

/// Returns the register writes for a table's entry, by the VE's own page.
pub fn ve_writes(ve: u8, write: &TableWrite) -> impl Iterator<Item = RegisterWrite> + use<> {
    entry_writes(registers::ve_page(ve, 0), &write.word(ve))
}

/// Returns the register writes for a table's entry, by the super page.
pub fn super_writes(ve: u8, write: &TableWrite) -> impl Iterator<Item = RegisterWrite> + use<> {
    let address = registers::super_page(registers::TARGET);
    let target = RegisterWrite { address, data: ve.into() };
    [target].into_iter().chain(entry_writes(registers::super_page(0), &write.word(ve)))
}

/// Returns the super page's register writes for a queue: its guaranteed cells, its share of the
/// pool, and its weight. The last `slot` is that of frames of no VE.
pub fn queue_writes(
    port: u8,
    slot: u16,
    (guarantee, share): (u16, u16),
    weight: u8,
) -> [RegisterWrite; 4] {
    let write = |offset, data| RegisterWrite { address: registers::super_page(offset), data };
    let queue = u32::from(port) << 16 | u32::from(slot);
    let quota = u32::from(guarantee) << 16 | u32::from(share);
    [
        write(registers::WRITE_DATA_0, quota),
        write(registers::commit(registers::TABLE_QUOTA), queue),
        write(registers::WRITE_DATA_0, weight.into()),
        write(registers::commit(registers::TABLE_WEIGHT), queue),
    ]
}

/// Register writes that a VE may use the bus for in one turn: those of the largest entry.
const QUANTUM: usize = 7;

/// Writes of one VE that wait for the bus.
#[derive(Clone, Debug, Default)]
struct WriteQueue {
    entries: VecDeque<TableWrite>,
    /// Register writes that the VE may still make in its turn.
    balance: usize,
}

/// Distributes the bus among VEs by deficit round robin (Shreedhar and Varghese 1995), so that a VE
/// with many changes does not slow another one's. A VE's writes keep their order.
#[derive(Clone, Debug)]
pub struct BusScheduler {
    queues: Vec<WriteQueue>,
    /// VE whose turn it is.
    turn: usize,
    /// Rest of the entry on the bus.
    current: VecDeque<RegisterWrite>,
}

impl BusScheduler {
    /// Makes a scheduler for this number of VEs.
    pub fn new(ves: u32) -> Self {
        let queues = vec![WriteQueue::default(); ves as usize];
        Self { queues, turn: 0, current: VecDeque::new() }
    }

    /// Appends writes of a VE.
    pub fn push(&mut self, ve: u8, writes: impl IntoIterator<Item = TableWrite>) {
        self.queues[usize::from(ve)].entries.extend(writes);
    }

    /// Number of a VE's entries that wait for the bus or have not been taken whole. If it is high,
    /// the caller should read no more changes of that VE for now.
    pub fn waiting(&self, ve: u8) -> usize {
        let is_current = self.current.front().and_then(RegisterWrite::ve) == Some(ve);
        self.queues[usize::from(ve)].entries.len() + usize::from(is_current)
    }

    /// True if no entry waits for the bus.
    pub fn is_empty(&self) -> bool {
        self.current.is_empty() && self.queues.iter().all(|queue| queue.entries.is_empty())
    }

    /// Discards a VE's entries, except the rest of one that has been taken in part.
    pub fn clear(&mut self, ve: u8) {
        self.queues[usize::from(ve)].entries.clear();
    }

    /// Takes the next register write.
    pub fn take(&mut self) -> Option<RegisterWrite> {
        if self.current.is_empty() {
            self.start_entry();
        }
        self.current.pop_front()
    }

    fn start_entry(&mut self) {
        if self.queues.iter().all(|queue| queue.entries.is_empty()) {
            return;
        }
        loop {
            let queue = &mut self.queues[self.turn];
            if let Some(entry) = queue.entries.front() {
                let ve = self.turn as u8;
                self.current.extend(ve_writes(ve, entry));
                if self.current.len() <= queue.balance {
                    queue.balance -= self.current.len();
                    queue.entries.pop_front();
                    return;
                }
                self.current.clear();
            } else {
                queue.balance = 0;
            }
            self.turn = (self.turn + 1) % self.queues.len();
            let next = &mut self.queues[self.turn];
            if !next.entries.is_empty() {
                next.balance += QUANTUM;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{CardTable, GroupEntry};
    use crate::{Leaf, LpmWrite, NodeEntry, RootEntry, RouteFamily};

    const NODE: TableWrite = TableWrite::Lpm(LpmWrite::Node {
        level: 1,
        index: 0,
        entry: NodeEntry { child_map: 0, leaf_map: 1, child_base: 0, leaf_base: 0 },
    });

    #[test]
    fn entries_have_their_words_and_commit() {
        let family = RouteFamily::V6;
        let root = LpmWrite::Root { family, slot: 3, entry: RootEntry::Node(5) };
        let writes: Vec<_> = ve_writes(2, &TableWrite::Lpm(root)).collect();
        let write = |address, data| RegisterWrite { address, data };
        let commit = registers::commit(CardTable::LpmRoot as u32);
        assert_eq!(
            writes,
            [
                write(0x3_0000 | registers::WRITE_DATA_0, 5),
                write(0x3_0000 | registers::WRITE_DATA_1, 2),
                write(0x3_0000 | commit, 259),
            ]
        );
        assert_eq!(ve_writes(0, &NODE).count(), QUANTUM);
    }

    #[test]
    fn busy_ves_share_the_bus() {
        let mut bus = BusScheduler::new(3);
        bus.push(0, [NODE; 1000]);
        let leaf = TableWrite::Lpm(LpmWrite::Leaf { index: 0, leaf: Leaf::NONE });
        bus.push(2, [leaf; 3000]);
        let mut counts = [0usize; 4];
        for _ in 0..2000 {
            let page = bus.take().unwrap().address >> 16;
            counts[page as usize] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!(counts[1].abs_diff(counts[3]) <= 2 * QUANTUM, "{counts:?}");
        // One entry of an idle VE waits for one turn of the others.
        bus.push(1, [TableWrite::Group(0, GroupEntry::Empty)]);
        let until = (0..).find(|_| bus.take().unwrap().address >> 16 == 2).unwrap();
        assert!(until <= 3 * QUANTUM, "{until}");
    }

    #[test]
    fn idle_bus_has_no_writes() {
        let mut bus = BusScheduler::new(2);
        assert_eq!(bus.take(), None);
        bus.push(1, [TableWrite::Group(7, GroupEntry::Empty)]);
        assert_eq!(bus.waiting(1), 1);
        let all: Vec<_> = std::iter::from_fn(|| bus.take()).collect();
        assert_eq!((all.len(), all[1].data, bus.waiting(1)), (2, 7, 0));
        assert_eq!(bus.take(), None);
    }
}
