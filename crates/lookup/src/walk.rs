//! Iteration over a table in steps, with changes between the steps.

use std::ops::ControlFlow;

use crate::node::NODE;
use crate::table::{NodePrefixes, PrefixTable, STRIDE, depth_of};
use crate::{AddressBits, pool};

/// Position of a walk: after the prefix that it names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkCursor<A> {
    last: Option<(A, u32)>,
}

impl<A: AddressBits> PrefixTable<A> {
    /// Calls `visit` with address, length, value and generation of up to `count_max`
    /// routes after the cursor, and moves it past them. Returns true if there may be more.
    ///
    /// The table may change between two calls: a route
    /// that exists all the time is visited exactly once.
    pub fn walk(
        &self,
        cursor: &mut WalkCursor<A>,
        count_max: usize,
        mut visit: impl FnMut(A, u32, u32, u32),
    ) -> bool {
        let mut left = count_max;
        let after = cursor.last;
        let end = self.walk_routes(after, &mut |address, length, value, generation| {
            if left == 0 {
                return ControlFlow::Break(());
            }
            left -= 1;
            visit(address, length, value, generation);
            cursor.last = Some((address, length));
            ControlFlow::Continue(())
        });
        end.is_break()
    }

    /// Removes routes whose generation is not `keep`, among the next `count_max` routes after
    /// the cursor. Calls `removed` with the value of each. Returns true if there may be more.
    pub fn sweep(
        &mut self,
        cursor: &mut WalkCursor<A>,
        count_max: usize,
        keep: u32,
        mut removed: impl FnMut(u32),
    ) -> bool {
        let mut stale = Vec::new();
        let more = self.walk(cursor, count_max, |address, length, _, generation| {
            if generation != keep {
                stale.push((address, length));
            }
        });
        for (address, length) in stale {
            self.remove(address, length).into_iter().for_each(&mut removed);
        }
        more
    }

    fn walk_routes(
        &self,
        after: Option<(A, u32)>,
        visit: &mut impl FnMut(A, u32, u32, u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let (from_number, from_slot) = resume(after, 0);
        self.walk_control(&self.short, A::default(), 0, from_number, visit)?;
        for slot in from_slot..self.top.len() {
            if self.top[slot] & NODE != 0 {
                let after = after.filter(|&(last, length)| below(last, length, 0, slot));
                let at = A::default().with_slot(0, slot);
                self.walk_node(self.top[slot] & !NODE, STRIDE, at, after, visit)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Visits the prefixes of the node at `depth` of the path `at`, from a number on.
    fn walk_control(
        &self,
        control: &NodePrefixes,
        at: A,
        depth: u32,
        from_number: usize,
        visit: &mut impl FnMut(A, u32, u32, u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut present = if from_number < pool::BLOCK_MAX {
            control.present >> from_number << from_number
        } else {
            0
        };
        while present != 0 {
            let number = present.trailing_zeros() as usize;
            present &= present - 1;
            let route = self.routes.items[control.first_route as usize + control.rank(number)];
            let (address, length) = prefix(at, depth, number);
            visit(address, length, route.value, route.generation)?;
        }
        ControlFlow::Continue(())
    }

    fn walk_node(
        &self,
        node: u32,
        depth: u32,
        at: A,
        after: Option<(A, u32)>,
        visit: &mut impl FnMut(A, u32, u32, u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let control = &self.controls.items[self.nodes.control(node) as usize];
        let (from_number, from_slot) = resume(after, depth);
        self.walk_control(control, at, depth, from_number, visit)?;
        for (slot, child) in self.nodes.children(node, from_slot) {
            let after = after.filter(|&(last, length)| below(last, length, depth, slot));
            self.walk_node(child, depth + STRIDE, at.with_slot(depth, slot), after, visit)?;
        }
        ControlFlow::Continue(())
    }
}

/// Returns the first number and the first child's slot of a node after a prefix in or below it.
fn resume<A: AddressBits>(after: Option<(A, u32)>, depth: u32) -> (usize, usize) {
    match after {
        None => (1, 0),
        Some((address, length)) if depth_of(length) == depth => {
            let bits = length - depth;
            ((1 << bits | address.slot(depth) >> (STRIDE - bits)) + 1, 0)
        }
        Some((address, _)) => (pool::BLOCK_MAX, address.slot(depth)),
    }
}

/// True if a prefix of the node at `depth` is in or below its child at `slot`.
fn below<A: AddressBits>(address: A, length: u32, depth: u32, slot: usize) -> bool {
    depth_of(length) > depth && address.slot(depth) == slot
}

/// Returns the prefix with this number in the node at `depth` of the path `at`.
fn prefix<A: AddressBits>(at: A, depth: u32, number: usize) -> (A, u32) {
    let bits = number.ilog2();
    let slot = (number - (1 << bits)) << (STRIDE - bits);
    (at.with_slot(depth, slot), depth + bits)
}
