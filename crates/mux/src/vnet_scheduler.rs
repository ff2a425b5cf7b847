//! Scheduler that divides the worker's time among its
//! active vnets, and queues the frames that wait for them.
//!
//! Frames from outside are collected by vnet, so that a visit finds several. Vnets
//! are visited in rotation. While the worker is busy, a vnet is visited only if
//! [`GATHER_FRAMES`] wait for it, or if its last visit was [`GATHER_NS`] ago.
//!
//! A vnet with credit is also visited outside the rotation. This happens when that many
//! frames wait for it, or when the first one has waited for that long. If frames of many
//! vnets wait, the limit is the time that visits to all of these take. So a vnet that uses
//! less than its part is served at once, and one that wants more waits for the rotation.
//!
//! A visit is charged with the time that it took. Each turn brings credit by the vnet's
//! weight among the active vnets. At most one turn's credit is kept. An overdrawn vnet
//! is skipped until it has paid. So each vnet gets its part of the time, whatever the
//! others do. Time that it does not use goes to any vnet that wants it.
//!
//! A vnet with guaranteed power has that part of all of the worker's time first. Its allowance
//! grows with the time-stamp counter. While it has some, its visits come first and are paid from
//! it. Weights alone could not guarantee a part: they are unbounded, and only divide visits,
//! beside which the worker has other work. Its part by weight comes on top. While a vnet with an
//! allowance finds many frames in each round, more may be waiting outside. Visits to others are
//! then limited to a quarter of the time, so that the worker gets to these frames.
//!
//! Expensive frames delay no other vnet. A visit takes as many frames as are
//! expected to last [`VISIT_CYCLES`]. A round ends after [`ROUND_CYCLES`], or once
//! frames took [`ROUND_DEAR_CYCLES`] more than usual. So new arrivals are seen soon.
//!
//! Queued frames are bounded. A vnet may queue no more frames than could still be queued, so
//! that each of n greedy vnets gets 1/(n+1) of the packets. A vnet with power may always queue
//! its part of the packets that all these leave free, however many other vnets are greedy.
//!
//! Sources: Shreedhar and Varghese, "Efficient fair queueing using deficit round
//! robin" (1995); priority for vnets with credit and new frames: RFC 8290 section
//! 4.2; the bound: Choudhury and Hahne, "Dynamic queue length thresholds" (1998).

use std::collections::VecDeque;
use std::mem;

use pdp_afxdp::prefetch;
use pdp_proto::mux::POWER_WHOLE;

/// Frames that are worth a visit.
pub const GATHER_FRAMES: usize = 32;

/// Time for which fewer frames wait for more while the worker is busy, nanoseconds.
pub const GATHER_NS: u64 = 50_000;

/// Visits of one round in rotation, and as many outside of it. Where
/// more vnets have work, each visit shall find more of it, while the
/// queued frames take no more than one [`MANY_PART`]th of the packets.
const VISITS_FEW: usize = 4;
const VISITS_MAX: usize = 16;
const MANY_PART: usize = 2;

/// Vnets that may be skipped in one round.
const PASSED_MAX: usize = 256;

/// Frames from outside that one visit takes.
const VISIT_FRAMES: usize = 256;

/// Credit for a turn of a vnet of average weight,
/// cycles: the cost of a visit that finds 256 frames.
const TURN_CYCLES: i64 = 50_000;

/// A turn brings at most this many times that credit, and at least
/// this fraction of it. Parts are exact while weights differ no more.
const TURN_MAX: i64 = 8;
const TURN_MIN: i64 = 64;

/// Largest debt of a vnet, cycles: about the cost of the most expensive
/// visit. A visit exceeds it only if another process had the worker's CPU.
const DEBT_MAX: i64 = 40 * TURN_CYCLES;

/// Intended cost of a visit, cycles. It is converted to frames by
/// the vnet's measured cost for each frame, or by the default.
const VISIT_CYCLES: u64 = 30_000;
const FRAME_CYCLES: u64 = 960;

/// Largest growth of that estimate after one visit, as a factor.
const FRAME_CYCLES_GROW: u64 = 8;

/// Frames that a visit may always take, however expensive.
const VISIT_FRAMES_MIN: usize = 2;

/// Cycles for visits of one round. The last visit may exceed
/// them. They suffice for all frames that arrive in one round.
const ROUND_CYCLES: i64 = 150_000;

/// Cycles of these that frames may take beyond the usual, and the usual cycles for each frame.
const ROUND_DEAR_CYCLES: i64 = 30_000;
const USUAL_CYCLES: u64 = 400;

/// Cost of a visit itself, whatever number of frames it finds, with a thousand vnets and
/// this one's data out of the caches. It is not added to the cost of frames. Otherwise
/// visits would take fewer frames, and rounds would end before they took as many as
/// arrive. Then less space would be left, and visits would find ever fewer frames.
const USUAL_VISIT_CYCLES: u64 = 8_000;

/// One REST_PART-th of all time is for visits by weight, even if vnets with
/// power have not had their part. Otherwise their frames alone would determine
/// what the worker receives, which costs time that no vnet is charged for.
const REST_PART: i64 = 4;

/// Most that this time may be saved up or overdrawn, cycles.
const REST_CYCLES: i64 = 50_000;

/// Unused power that a vnet may save up: its part of this many cycles of the worker's time.
const KEPT_CYCLES: i64 = 5_000_000;

/// Vnets with power that are considered before one visit.
const LOOKS_MAX: usize = 16;

/// One RESERVE_PART-th of the packets is not for queued frames. Sockets, guests and queues need it.
const RESERVE_PART: usize = 8;

/// Scheduling state of one vnet. It is hot, and therefore separate from the rest of the vnet.
#[derive(Debug)]
struct VnetAccount<F> {
    /// Frames from outside that wait for a visit. A visit
    /// takes the first ones, and does not move the others.
    frames: VecDeque<F>,
    /// Arrival of the first of them, nanoseconds.
    since_ns: u64,
    /// Time of its last visit, nanoseconds.
    visited_ns: u64,
    /// Cycles that it may use outside the rotation.
    credit: i64,
    weight: u32,
    /// Guaranteed part of the worker's time, of [`POWER_WHOLE`].
    power: u32,
    /// Frames that it may always queue because of its power, however many others queue.
    own_room: usize,
    /// Unused part of its power, in cycles times
    /// [`POWER_WHOLE`], and the cycle at which it was computed.
    allowance: i64,
    allowed: u64,
    /// Round of its last visit by power.
    round: u64,
    /// Cycles for each frame; 0: unknown.
    frame_cycles: u64,
    /// True if its visit found frames from outside.
    took: bool,
    /// True if the visit left frames behind, or if it
    /// found none and took about as long as a visit may.
    has_more: bool,
    generation: u32,
    /// True if it is in the rotation. Otherwise it is idle.
    awake: bool,
    /// True if it is in `gathering`; true if it is in `full`.
    gathers: bool,
    is_full: bool,
}

impl<F> VnetAccount<F> {
    /// Swaps `frames` and the queued frames. If one of
    /// them is empty, only the buffers are exchanged.
    #[inline]
    fn swap(&mut self, frames: &mut Vec<F>) {
        *frames = mem::replace(&mut self.frames, mem::take(frames).into()).into();
    }

    /// True if it has an allowance at this cycle.
    #[inline]
    fn is_allowed(&mut self, cycle: u64) -> bool {
        let part = i64::from(self.power);
        let elapsed = cycle.saturating_sub(self.allowed).min(1 << 40) as i64;
        self.allowed = cycle;
        self.allowance = (self.allowance + elapsed * part).min(KEPT_CYCLES * part);
        self.allowance > 0
    }
}

/// Reason why a frame can't be queued for its vnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnqueueError {
    /// The vnet does not exist, or it has changed since.
    Stale,
    /// Too many frames are queued for it.
    Full,
}

/// Scheduler of a worker's vnets, with their queued frames. `F` is a frame.
#[derive(Debug)]
pub struct VnetScheduler<F> {
    /// Vnets by slot.
    accounts: Vec<Option<VnetAccount<F>>>,
    /// Slots of the active vnets.
    rotation: VecDeque<u16>,
    /// Slots of active vnets with power.
    powered: VecDeque<u16>,
    /// Slots of vnets with queued frames, in the order of their first frame.
    gathering: VecDeque<u16>,
    /// Slots of vnets with enough frames for a visit.
    full: VecDeque<u16>,
    /// Sum of the weights in the rotation.
    weight: i64,
    /// Number of queued frames.
    waiting: usize,
    /// Packets of the worker.
    packets: usize,
    /// Visits since there was work, or since a vnet was skipped that may have some.
    in_vain: usize,
    /// Slot whose next turn is the rest of its current one.
    goes_on: Option<u16>,
    /// Remaining counts of this round: visits outside
    /// the rotation, visits in it, and vnets to skip.
    left: [usize; 3],
    /// Remaining cycles of this round, and of these for expensive frames.
    left_cycles: i64,
    left_dear_cycles: i64,
    /// Cycles that are reserved for visits by weight.
    rest_cycles: i64,
    /// True if a vnet with power had much work in this round, and has not had its part recently.
    is_claimed: bool,
    /// True if the last round ended because its cycles were used up.
    was_cut: bool,
    /// Time-stamp counter now, and when the round began.
    cycle: u64,
    began: u64,
    /// Number of this round.
    round: u64,
    /// True if the current visit is paid from an allowance.
    by_power: bool,
}

impl<F> VnetScheduler<F> {
    /// Creates the scheduler of a worker that has `packets` packets.
    pub fn new(packets: usize) -> Self {
        Self {
            accounts: vec![],
            rotation: VecDeque::new(),
            powered: VecDeque::new(),
            gathering: VecDeque::new(),
            full: VecDeque::new(),
            weight: 0,
            waiting: 0,
            packets,
            in_vain: 0,
            goes_on: None,
            left: [0; 3],
            left_cycles: 0,
            left_dear_cycles: 0,
            rest_cycles: 0,
            is_claimed: false,
            was_cut: false,
            cycle: 0,
            began: 0,
            round: 0,
            by_power: false,
        }
    }

    /// Sets the generation, weight and power of the vnet in `slot`,
    /// and activates it. Power is a part of [`POWER_WHOLE`].
    pub fn insert(&mut self, slot: u16, generation: u32, weight: u32, power: u32) {
        let (at, cycle, reserve) = (usize::from(slot), self.cycle, self.packets / RESERVE_PART);
        if self.accounts.len() <= at {
            self.accounts.resize_with(at + 1, || None);
        }
        let account = self.accounts[at].get_or_insert_with(|| VnetAccount {
            frames: VecDeque::new(),
            since_ns: 0,
            visited_ns: 0,
            credit: 0,
            weight: 0,
            power: 0,
            own_room: 0,
            allowance: 0,
            allowed: cycle,
            round: 0,
            frame_cycles: 0,
            took: false,
            has_more: false,
            generation,
            awake: false,
            gathers: false,
            is_full: false,
        });
        let weight = weight.max(1);
        if account.awake {
            self.weight += i64::from(weight) - i64::from(account.weight);
            if account.power > 0 {
                self.powered.retain(|other| *other != slot);
            }
            if power > 0 {
                self.powered.push_back(slot);
            }
        }
        (account.generation, account.weight, account.power) = (generation, weight, power);
        account.own_room = reserve * power as usize / POWER_WHOLE as usize;
        self.wake(slot);
    }

    /// Removes the vnet in `slot`. Returns its queued frames.
    pub fn remove(&mut self, slot: u16) -> Vec<F> {
        self.set_idle(slot);
        self.gathering.retain(|other| *other != slot);
        self.full.retain(|other| *other != slot);
        let account = self.accounts.get_mut(usize::from(slot)).and_then(Option::take);
        let frames = account.map(|account| account.frames).unwrap_or_default();
        self.waiting -= frames.len();
        frames.into()
    }

    #[inline]
    fn account(&mut self, slot: u16) -> Option<&mut VnetAccount<F>> {
        self.accounts.get_mut(usize::from(slot))?.as_mut()
    }

    /// Returns the slots of the active vnets.
    pub fn awake(&self) -> impl Iterator<Item = u16> {
        self.rotation.iter().copied()
    }

    /// Returns the number of frames queued for the vnet in `slot`.
    pub fn waiting(&self, slot: u16) -> usize {
        let account = self.accounts.get(usize::from(slot)).and_then(Option::as_ref);
        account.map_or(0, |account| account.frames.len())
    }

    /// True if a worker that found no work may have missed some:
    /// a vnet was not visited since, or frames are queued.
    pub fn may_have_work(&self) -> bool {
        self.waiting > 0 || self.in_vain < self.rotation.len()
    }

    /// Queues `frames` for a visit to the vnet with this slot and generation,
    /// which must be active ([`VnetScheduler::wake`]). `free` is the number of packets
    /// that could be taken now. Frames that can't be queued stay in `frames`.
    pub fn enqueue_all(
        &mut self,
        owner: (u16, u32),
        free: usize,
        now_ns: u64,
        frames: &mut Vec<F>,
    ) -> Result<(), EnqueueError> {
        let room = self.room(free);
        let account = self.account_of(owner).ok_or(EnqueueError::Stale)?;
        let room = room.max(account.own_room);
        let fits = frames.len().min(room.saturating_sub(account.frames.len()));
        let before = account.frames.len();
        if before == 0 && fits == frames.len() {
            account.swap(frames);
        } else {
            account.frames.extend(frames.drain(..fits));
        }
        self.gather(owner.0, before, now_ns);
        if frames.is_empty() { Ok(()) } else { Err(EnqueueError::Full) }
    }

    /// Prefetches the data that [`VnetScheduler::enqueue`] needs for the vnet in `slot`.
    #[inline]
    pub fn prefetch(&self, slot: u16) {
        let account = self.accounts.get(usize::from(slot));
        account.inspect(|account| prefetch(*account));
    }

    /// Queues one frame, as [`VnetScheduler::enqueue_all`].
    #[inline]
    pub fn enqueue(
        &mut self,
        owner: (u16, u32),
        free: usize,
        now_ns: u64,
        frame: F,
    ) -> Result<(), (EnqueueError, F)> {
        let room = self.room(free);
        let Some(account) = self.account_of(owner) else {
            return Err((EnqueueError::Stale, frame));
        };
        let before = account.frames.len();
        if before >= room.max(account.own_room) {
            return Err((EnqueueError::Full, frame));
        }
        account.frames.push_back(frame);
        self.gather(owner.0, before, now_ns);
        Ok(())
    }

    /// Returns how many more frames shall be received for the vnet in `slot`, into packets
    /// of those that are `free`. All of them can be queued, and one visit can take them with
    /// the queued ones. More frames would be out of the caches by the time of their visit.
    pub fn receive_limit(&self, slot: u16, free: usize) -> usize {
        let account = self.accounts.get(usize::from(slot)).and_then(Option::as_ref);
        account.map_or(usize::MAX, |account| {
            let room = self.room(free).max(account.own_room);
            // Each frame takes a packet, and thus reduces the limit by one.
            let left = room.saturating_sub(account.frames.len()) / 2;
            let left = left.min(VISIT_FRAMES.saturating_sub(account.frames.len()));
            left.max(usize::from(account.frames.is_empty()))
        })
    }

    /// Returns how many frames may be queued for one vnet without power.
    #[inline]
    fn room(&self, free: usize) -> usize {
        let free = free.min(self.packets.saturating_sub(self.waiting));
        free.saturating_sub(self.packets / RESERVE_PART) + 1
    }

    #[inline]
    fn account_of(&mut self, (slot, generation): (u16, u32)) -> Option<&mut VnetAccount<F>> {
        self.account(slot).filter(|account| account.generation == generation)
    }

    /// Updates the state of the vnet in `slot` after its queue grew from `before` frames.
    #[inline]
    fn gather(&mut self, slot: u16, before: usize, now_ns: u64) {
        let Some(Some(account)) = self.accounts.get_mut(usize::from(slot)) else { return };
        self.waiting += account.frames.len() - before;
        if before == 0 {
            account.since_ns = now_ns;
        }
        if !mem::replace(&mut account.gathers, true) {
            self.gathering.push_back(slot);
        }
        if account.frames.len() >= GATHER_FRAMES && !mem::replace(&mut account.is_full, true) {
            self.full.push_back(slot);
        }
    }

    /// Takes queued frames of the vnet in `slot`, as many as one visit may. `frames`
    /// must be empty. Returns how many frames the visit may take from its other sources.
    #[inline]
    pub fn dequeue(&mut self, slot: u16, frames: &mut Vec<F>) -> usize {
        let Some(account) = self.account(slot) else { return 0 };
        let fit = match account.frame_cycles {
            0 => VISIT_CYCLES / FRAME_CYCLES,
            each => VISIT_CYCLES / each,
        };
        let most = (fit as usize).clamp(VISIT_FRAMES_MIN, VISIT_FRAMES);
        if account.frames.len() <= most {
            account.swap(frames);
        } else {
            frames.extend(account.frames.drain(..most));
        }
        account.took = !frames.is_empty();
        self.waiting -= frames.len();
        most
    }

    /// Activates the vnet in `slot`, which may have work. False if it was active already.
    pub fn wake(&mut self, slot: u16) -> bool {
        self.in_vain = 0;
        let Some(account) = self.account(slot) else { return false };
        let rested = !std::mem::replace(&mut account.awake, true);
        if rested {
            // Time that it left unused while idle went to others.
            account.credit = account.credit.max(1);
            let (weight, power) = (account.weight, account.power);
            self.weight += i64::from(weight);
            self.rotation.push_back(slot);
            if power > 0 {
                self.powered.push_back(slot);
            }
        }
        rested
    }

    /// Makes the vnet in `slot` idle.
    pub fn set_idle(&mut self, slot: u16) {
        let Some(account) = self.account(slot) else { return };
        if std::mem::take(&mut account.awake) {
            let (weight, power) = (account.weight, account.power);
            self.weight -= i64::from(weight);
            // It may have been visited in vain. `in_vain`
            // is compared with the number of active vnets.
            self.in_vain = self.in_vain.saturating_sub(1);
            if power > 0 {
                self.powered.retain(|other| *other != slot);
            }
            match self.rotation.back() {
                Some(last) if *last == slot => _ = self.rotation.pop_back(),
                _ => self.rotation.retain(|other| *other != slot),
            }
        }
    }

    /// Begins a round at this `cycle` of the time-stamp counter.
    pub fn begin(&mut self, cycle: u64) {
        let most = if self.waiting > self.packets / MANY_PART { VISITS_MAX } else { VISITS_FEW };
        let visits = self.rotation.len().min(most);
        // If every vnet has a turn in each round, none is visited twice.
        let some_wait = self.rotation.len() > most || self.was_cut;
        let beside = if some_wait { most } else { 0 };
        self.left = [beside, visits, PASSED_MAX];
        let elapsed = cycle.saturating_sub(self.began).min(DEBT_MAX as u64) as i64;
        self.rest_cycles = (self.rest_cycles + elapsed / REST_PART).min(REST_CYCLES);
        (self.began, self.cycle, self.round) = (cycle, cycle, self.round + 1);
        (self.left_cycles, self.left_dear_cycles) = (ROUND_CYCLES, ROUND_DEAR_CYCLES);
        (self.was_cut, self.is_claimed) = (false, false);
    }

    /// Returns the vnet to visit next in this round. `busy` is true if the
    /// worker has other work than to visit vnets for few frames. A vnet
    /// that is visited in rotation is then at the end of the rotation.
    pub fn next(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        let has_time = self.left_cycles.min(self.left_dear_cycles) > 0;
        let powered = if has_time { self.next_powered(now_ns, busy) } else { None };
        self.by_power = powered.is_some();
        if powered.is_none() && (!has_time || self.is_claimed) && self.rest_cycles <= 0 {
            self.was_cut = true;
            return None;
        }
        powered.or_else(|| self.next_by_weight(now_ns, busy))
    }

    /// Returns the next vnet with an allowance and enough work for a visit. Of the
    /// vnets considered, it is the one that has recently used the least of its part.
    #[inline]
    fn next_powered(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        let mut best: Option<(u16, i64, i64)> = None;
        for _ in 0..self.powered.len().min(LOOKS_MAX) {
            let slot = self.powered.pop_front()?;
            self.powered.push_back(slot);
            let (cycle, round) = (self.cycle, self.round);
            let account = self.account(slot)?;
            let soon = match busy {
                true => now_ns.saturating_sub(account.visited_ns) < GATHER_NS,
                false => account.round == round,
            };
            let much = account.has_more || account.frames.len() >= GATHER_FRAMES;
            if (!soon || much) && account.is_allowed(cycle) {
                // Allowances are below 2^43, parts below 2^20.
                let (allowance, part) = (account.allowance, i64::from(account.power));
                if best.is_none_or(|(_, most, of)| allowance * of > most * part) {
                    best = Some((slot, allowance, part));
                }
            }
        }
        let (slot, ..) = best?;
        let round = self.round;
        let account = self.account(slot)?;
        (account.visited_ns, account.round) = (now_ns, round);
        Some(slot)
    }

    /// Returns the next vnet outside the rotation or in it.
    fn next_by_weight(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        while self.left[0] > 0 {
            let Some(slot) = self.next_gathered(now_ns, busy) else { break };
            if self.account(slot).is_some_and(|it| it.credit > 0 && !it.frames.is_empty()) {
                self.left[0] -= 1;
                return Some(slot);
            }
        }
        while self.left[1] > 0 && self.left[2] > 0 {
            let slot = self.rotation.pop_front()?;
            self.rotation.push_back(slot);
            let (count, weight) = (self.rotation.len() as i64, self.weight.max(1));
            let goes_on = self.goes_on.take() == Some(slot);
            let round = self.round;
            let account = self.account(slot)?;
            if account.round == round && account.frames.is_empty() && !goes_on {
                // It was visited in this round.
                self.left[1] -= 1;
                self.in_vain += 1;
                continue;
            }
            let soon = !goes_on && now_ns.saturating_sub(account.visited_ns) < GATHER_NS;
            if busy && soon && account.frames.len() < GATHER_FRAMES {
                self.left[2] -= 1;
                self.left[1] -= 1;
                self.in_vain = 0;
                continue;
            }
            let grant = TURN_CYCLES * count * i64::from(account.weight) / weight;
            let grant = grant.clamp(TURN_CYCLES / TURN_MIN, TURN_CYCLES * TURN_MAX);
            if !goes_on {
                account.credit = (account.credit + grant).min(grant);
            }
            if account.credit > 0 {
                account.visited_ns = now_ns;
                self.left[1] -= 1;
                self.in_vain += 1;
                return Some(slot);
            }
            self.left[2] -= 1;
            self.in_vain = 0;
        }
        None
    }

    /// Returns the next vnet with enough frames, or with a frame that has waited long enough.
    fn next_gathered(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        if let Some(slot) = self.full.pop_front() {
            if let Some(account) = self.account(slot) {
                account.is_full = false;
            }
            return Some(slot);
        }
        let slot = *self.gathering.front()?;
        // By then all vnets with queued frames have been visited. If
        // many have some, an earlier visit would find few frames.
        let enough_ns = GATHER_NS * (self.gathering.len() / VISITS_MAX).max(1) as u64;
        let account = self.account(slot)?;
        let old = now_ns.saturating_sub(account.since_ns) >= enough_ns;
        if busy && !old && !account.frames.is_empty() {
            return None;
        }
        account.gathers = false;
        self.gathering.pop_front();
        Some(slot)
    }

    /// Charges the vnet in `slot` with cycles that were spent outside its visits.
    pub fn charge_outside_visit(&mut self, slot: u16, cycles: u64) {
        if let Some(account) = self.account(slot).filter(|_| cycles > 0) {
            account.credit = (account.credit - cycles as i64).max(-DEBT_MAX);
        }
    }

    /// Ends a visit to the vnet in `slot`. It took `cycles` for `frames` frames or other work.
    pub fn charge(&mut self, slot: u16, cycles: u64, frames: usize) {
        let work = frames > 0;
        if work {
            self.in_vain = 0;
        }
        self.cycle += cycles;
        let spent = |cycles: u64| cycles.min(DEBT_MAX as u64) as i64;
        self.left_cycles -= spent(cycles);
        let of_frames = cycles.saturating_sub(USUAL_VISIT_CYCLES);
        self.left_dear_cycles -= spent(of_frames.saturating_sub(frames as u64 * USUAL_CYCLES));
        let by_power = self.by_power;
        if !by_power {
            self.rest_cycles = (self.rest_cycles - cycles as i64).max(-REST_CYCLES);
        }
        let Some(account) = self.account(slot) else { return };
        if frames >= VISIT_FRAMES_MIN {
            // The estimate rises at once, so that a vnet whose frames become
            // expensive gets few long visits. The rise is limited, because
            // another process may have had the CPU during the visit.
            let known = account.frame_cycles;
            let most = if known == 0 { u64::MAX } else { known * FRAME_CYCLES_GROW };
            let each = (of_frames / frames as u64).clamp(1, most);
            account.frame_cycles = each.max((known * 3 + each) / 4);
        }
        let waiting = account.frames.len();
        // It is unknown how many frames its peers still have.
        let took_long = !account.took && cycles >= VISIT_CYCLES / 2;
        account.has_more = work && (took_long || waiting >= GATHER_FRAMES);
        if by_power {
            let whole = i64::from(POWER_WHOLE);
            let paid = cycles.min(DEBT_MAX as u64) as i64 * whole;
            account.allowance = (account.allowance - paid).max(-DEBT_MAX * whole);
            self.is_claimed |= frames >= GATHER_FRAMES && account.allowance > 0;
            return;
        }
        account.credit = (account.credit - cycles as i64).max(-DEBT_MAX);
        // A vnet with much work and part of its credit left continues its turn.
        if account.has_more && account.credit > 0 && self.rotation.back() == Some(&slot) {
            self.rotation.rotate_right(1);
            self.goes_on = Some(slot);
            self.left[1] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    /// A vnet that uses all that it gets: its frames in
    /// each tick, and the cost of a visit beside them.
    #[derive(Clone, Debug)]
    struct Vnet {
        weight: u32,
        power: u32,
        frames: usize,
        frame_cycles: u64,
        visit_cycles: u64,
    }

    impl Default for Vnet {
        fn default() -> Self {
            Self { weight: 10, power: 0, frames: 0, frame_cycles: 200, visit_cycles: 500 }
        }
    }

    const PACKETS: usize = 32_768;

    /// Time between frames, cycles, and the cycles of a round that no vnet is charged for.
    const TICK_CYCLES: u64 = 2_000_000;
    const ROUND_COSTS: u64 = 10_000;

    /// By then the cost of frames is known. Losses before it do not count.
    const START_CYCLES: u64 = 10 * TICK_CYCLES;

    /// Converts cycles to nanoseconds: two cycles are one nanosecond.
    fn ns(cycle: u64) -> u64 {
        cycle / 2
    }

    /// Runs ticks with frames for all vnets. Returns each
    /// vnet's part of the time, and its lost frames.
    fn run(vnets: &[Vnet], ticks: u64) -> Vec<(f64, usize)> {
        let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(PACKETS);
        let mut got = vec![(0u64, 0usize); vnets.len()];
        for (slot, vnet) in vnets.iter().enumerate() {
            scheduler.insert(slot as u16, 7, vnet.weight, vnet.power);
        }
        let mut frames = vec![];
        let (mut cycle, mut last) = (0, 0);
        while cycle < ticks * TICK_CYCLES {
            let before = cycle.saturating_sub(last);
            last = cycle;
            for (slot, vnet) in vnets.iter().enumerate() {
                let free = PACKETS - scheduler.waiting;
                let due = |cycle: u64| vnet.frames * cycle as usize / TICK_CYCLES as usize;
                let mut due = due(cycle) - due(cycle - before);
                while due > 0 && scheduler.enqueue((slot as u16, 7), free, ns(cycle), 0).is_ok() {
                    due -= 1;
                }
                got[slot].1 += if cycle < START_CYCLES { 0 } else { due };
            }
            cycle += ROUND_COSTS;
            let now_ns = ns(cycle);
            scheduler.begin(cycle);
            while let Some(slot) = scheduler.next(now_ns, true) {
                scheduler.dequeue(slot, &mut frames);
                let vnet = &vnets[usize::from(slot)];
                let cycles = frames.len() as u64 * vnet.frame_cycles + vnet.visit_cycles;
                got[usize::from(slot)].0 += cycles;
                cycle += cycles;
                scheduler.charge(slot, cycles, frames.len().max(1));
                frames.clear();
            }
        }
        got.iter().map(|(cycles, lost)| (*cycles as f64 / cycle as f64, *lost)).collect()
    }

    /// Returns a vnet that wants all time.
    fn hog(weight: u32, frame_cycles: u64) -> Vnet {
        Vnet { weight, frame_cycles, frames: 60_000, ..Vnet::default() }
    }

    /// With expensive frames and long queues, the cost of a visit does
    /// not depend on how many frames it leaves behind. If frames became
    /// more expensive by waiting, visits would take still fewer.
    #[test]
    fn visit_cost_is_independent_of_remaining_frames() {
        const COUNT: usize = 12_000;
        // Takes all frames, in lots of at most `lot` queued frames.
        let took = |lot: usize| {
            let mut scheduler: VnetScheduler<[u8; 1024]> = VnetScheduler::new(PACKETS);
            scheduler.insert(0, 7, 10, 0);
            // Makes each visit take as few frames as possible.
            scheduler.charge(0, 2 * VISIT_CYCLES, VISIT_FRAMES_MIN);
            let (mut frames, mut visits, mut took) = (vec![], 0, Duration::ZERO);
            for _ in 0..COUNT / lot {
                while scheduler.waiting(0) < lot {
                    assert!(
                        scheduler
                            .enqueue((0, 7), PACKETS - scheduler.waiting, 0, [0; 1024])
                            .is_ok()
                    );
                }
                let since = Instant::now();
                while scheduler.waiting(0) > 0 {
                    scheduler.dequeue(0, &mut frames);
                    frames.clear();
                    visits += 1;
                }
                took += since.elapsed();
            }
            assert_eq!(visits, COUNT / VISIT_FRAMES_MIN);
            took
        };
        let (few, all) = (took(60), took(COUNT));
        // If the rest were moved at each visit, 36 GB would be moved.
        assert!(all < 10 * few + Duration::from_millis(50), "{all:?}, where few wait {few:?}");
    }

    /// A sender that can keep its frames is asked for no more than a visit may take.
    #[test]
    fn scheduler_fetches_at_most_one_visits_frames() {
        let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(PACKETS);
        scheduler.insert(0, 7, 10, 0);
        let free = |scheduler: &VnetScheduler<u32>| PACKETS - scheduler.waiting;
        assert_eq!(scheduler.receive_limit(0, free(&scheduler)), VISIT_FRAMES);
        scheduler.enqueue_all((0, 7), free(&scheduler), 0, &mut vec![0; VISIT_FRAMES - 1]).unwrap();
        assert_eq!(scheduler.receive_limit(0, free(&scheduler)), 1);
        scheduler.enqueue_all((0, 7), free(&scheduler), 0, &mut vec![0; 9]).unwrap();
        assert_eq!(scheduler.receive_limit(0, free(&scheduler)), 0);
        assert_eq!(scheduler.receive_limit(0, 0), 0);
    }

    #[test]
    fn expensive_vnet_gets_only_its_share() {
        let cheap = Vnet { weight: 1000, visit_cycles: 2_000, ..Vnet::default() };
        let dear = Vnet { visit_cycles: 400_000, ..cheap.clone() };
        let got = run(&[vec![dear], vec![cheap; 31]].concat(), 2_000);
        // Its whole demand takes 400,000 of 462,000 cycles. Its
        // part is less, because the others demand time too.
        let (part, _) = got[0];
        let mean = got[1..].iter().map(|(part, _)| part).sum::<f64>() / 31.0;
        assert!(part < 0.55, "{part} beside {mean} each");
        assert!(mean > 0.008, "{part} beside {mean} each");
    }

    #[test]
    fn vnet_shares_follow_weights() {
        for frame_cycles in [50, 200, 5_000] {
            let hogs = [1000, 500, 250, 250].map(|weight| hog(weight, frame_cycles));
            let got = run(&hogs, 500);
            let all: f64 = got.iter().map(|(part, _)| part).sum();
            for ((part, _), want) in got.iter().zip([0.5, 0.25, 0.125, 0.125]) {
                let deviation = (part / all / want - 1.0).abs();
                assert!(deviation < 0.15, "{got:?}, {frame_cycles} cycles each");
            }
        }
    }

    /// It holds beside any number of others of any weight,
    /// although part of the time is charged to no vnet.
    #[test]
    fn powered_vnet_gets_its_share_of_time() {
        for others in [1, 3, 40, 400] {
            let powers = [300_000, 150_000, 50_000];
            let powered = powers.map(|power| Vnet { power, ..hog(1, 300) });
            let others = vec![hog(4_000, 2_000); others];
            let got = run(&[&powered[..], &others[..]].concat(), 200);
            for ((part, _), power) in got.iter().zip(powers) {
                let want = f64::from(power) / f64::from(POWER_WHOLE);
                assert!(*part >= want * 0.98, "{part} of {want} beside {}", others.len());
                assert!(*part <= want * 1.1 + 0.02, "{part} of {want} beside {}", others.len());
            }
            // The others get the rest.
            assert!(got[3..].iter().map(|(part, _)| part).sum::<f64>() > 0.2, "{:?}", &got[..4]);
        }
    }

    /// If no other vnet wants the time, a vnet gets more than its power.
    #[test]
    fn powered_vnet_also_gets_unused_time() {
        let powered = Vnet { power: 100_000, ..hog(10, 200) };
        let got = run(&[powered.clone(), hog(10, 200)], 200);
        assert!((got[0].0 - got[1].0 - 0.1).abs() < 0.03, "{got:?}");
        let got = run(&[powered], 200);
        assert!(got[0].0 > 0.5, "{got:?}");
    }

    /// Vnets whose powers exceed the whole still leave something to others.
    #[test]
    fn overcommitted_power_leaves_time_for_others() {
        let power = Vnet { power: POWER_WHOLE, ..hog(10, 200) };
        let got = run(&[vec![power; 3], vec![hog(10, 200)]].concat(), 200);
        assert!(got[3].0 > 0.02, "{got:?}");
    }

    /// If many vnets always have frames, each visit finds
    /// many, as long as there is space for queued frames.
    #[test]
    fn visits_find_bursts_with_many_vnets() {
        // The last case has the cost of visits whose data is out of the caches.
        let cases = [(64, 2_000, 20), (256, 2_000, 20), (1024, 2_000, 12), (1024, 8_000, 12)];
        for (vnets, visit_cycles, least) in cases {
            let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(PACKETS);
            (0..vnets).for_each(|slot| scheduler.insert(slot, 1, 10, 0));
            let mut arriving = (0..vnets).cycle();
            let (mut cycle, mut visits, mut found, mut frames) = (0, 0, 0, vec![]);
            for round in 0..4_000 {
                for slot in arriving.by_ref().take(256) {
                    let free = PACKETS - scheduler.waiting;
                    let given = scheduler.enqueue((slot, 1), free, ns(cycle), 0);
                    assert!(given.is_ok(), "of {vnets}, {visit_cycles} cycles a visit");
                }
                cycle += ROUND_COSTS;
                let now_ns = ns(cycle);
                scheduler.begin(cycle);
                while let Some(slot) = scheduler.next(now_ns, true) {
                    scheduler.dequeue(slot, &mut frames);
                    let cycles = frames.len() as u64 * 200 + visit_cycles;
                    cycle += cycles;
                    scheduler.charge(slot, cycles, frames.len());
                    (visits, found) =
                        if round < 2_000 { (0, 0) } else { (visits + 1, found + frames.len()) };
                    frames.clear();
                }
            }
            let each = found / visits;
            assert!(each >= least, "{each} in a visit of {visit_cycles} to each of {vnets}");
        }
    }

    /// However expensive frames are, rounds are short, so that new arrivals are seen soon.
    #[test]
    fn rounds_stay_short_with_expensive_frames() {
        let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(PACKETS);
        (0..40).for_each(|slot| scheduler.insert(slot, 1, 10, if slot < 4 { 100_000 } else { 0 }));
        let (mut cycle, mut longest) = (0, 0);
        let mut frames = vec![];
        for round in 0..5_000 {
            for slot in 0..40 {
                let free = PACKETS - scheduler.waiting;
                let _ = scheduler.enqueue_all((slot, 1), free, ns(cycle), &mut vec![0; 64]);
            }
            let began = cycle;
            scheduler.begin(cycle);
            while let Some(slot) = scheduler.next(ns(began), true) {
                scheduler.dequeue(slot, &mut frames);
                let cycles = frames.len() as u64 * 3_000;
                cycle += cycles;
                scheduler.charge(slot, cycles, frames.len());
                frames.clear();
            }
            // By then the cost of a frame is known.
            longest = longest.max(if round > 1_000 { cycle - began } else { 0 });
        }
        let bound = ROUND_DEAR_CYCLES as u64 * 8 / 7 + 2 * VISIT_CYCLES;
        assert!((1..=bound).contains(&longest), "{longest} cycles");
    }

    /// A vnet may be in debt, may have been visited shortly before while the worker was busy, or
    /// may just have been activated. The worker does not go idle before all vnets were visited.
    #[test]
    fn unvisited_vnets_keep_the_worker_awake() {
        type Case = fn(&mut VnetScheduler<u32>);
        let cases: [(&str, Case); 3] = [
            ("owes", |scheduler| scheduler.charge(0, DEBT_MAX as u64, 1)),
            ("was visited just before", |scheduler| {
                scheduler.begin(0);
                assert_eq!(scheduler.next(1_000_000, true), Some(1));
            }),
            ("is roused", |scheduler| {
                scheduler.set_idle(0);
                visit_all(scheduler);
                scheduler.wake(0);
            }),
        ];
        /// Runs two rounds that find no work. Returns the visited vnets.
        fn visit_all(scheduler: &mut VnetScheduler<u32>) -> Vec<u16> {
            let mut visited = vec![];
            for _ in 0..2 {
                scheduler.begin(0);
                // A few visits in each round, as with many vnets.
                scheduler.left[1] = 2;
                while let Some(slot) = scheduler.next(1_000_000, false) {
                    scheduler.charge(slot, 1, 0);
                    visited.push(slot);
                }
            }
            visited
        }
        for (what, case) in cases {
            let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(256);
            (0..3).for_each(|slot| scheduler.insert(slot, 1, 1, 0));
            scheduler.begin(0);
            assert_eq!(scheduler.next(1_000_000, false), Some(0));
            case(&mut scheduler);
            let mut seen = vec![];
            while scheduler.may_have_work() {
                seen.extend(visit_all(&mut scheduler));
            }
            assert!((0..3).all(|slot| seen.contains(&slot)), "{what}: {seen:?}");
        }
    }

    /// Visits to vnets that are idle since do not count as visits to the others.
    #[test]
    fn idle_vnets_do_not_hide_unvisited_ones() {
        let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(256);
        (0..3).for_each(|slot| scheduler.insert(slot, 1, 1, 0));
        scheduler.begin(0);
        for (slot, frames) in [(0, 1), (1, 0), (2, 0)] {
            assert_eq!(scheduler.next(1_000_000, false), Some(slot));
            scheduler.charge(slot, 1, frames);
            if slot == 1 {
                scheduler.set_idle(slot);
            }
        }
        assert!(scheduler.may_have_work(), "the first had work, and was not visited since");
    }

    /// Case from a review: a thousand vnets with few frames, and one that is flooded.
    #[test]
    fn flooded_vnet_costs_small_vnets_no_packet() {
        let trickle = Vnet { frames: 1, ..Vnet::default() };
        let flood = Vnet { frames: 20_000, ..Vnet::default() };
        let got = run(&[vec![flood], vec![trickle; 200]].concat(), 500);
        assert!(got[0].1 > 0, "the flood is more than there is time for");
        assert!(got[1..].iter().all(|(_, lost)| *lost == 0), "{:?}", &got[1..]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// A vnet that wants less than its part gets it, beside any mix of others.
        #[test]
        fn vnet_below_its_share_loses_no_frame(
            others in prop::collection::vec((1u32..64, 0usize..400, 0u64..300_000), 1..40),
            weight in 1u32..64,
        ) {
            let others: Vec<Vnet> = others.into_iter()
                .map(|(weight, frames, visit_cycles)| {
                    Vnet { weight, frames, visit_cycles, ..Vnet::default() }
                })
                .collect();
            let modest = Vnet { weight, frames: 1, visit_cycles: 300, ..Vnet::default() };
            let got = run(&[vec![modest], others].concat(), 3_000);
            prop_assert_eq!(got[0].1, 0);
        }

        /// The same holds for a vnet with power, beside any mix of
        /// others with or without power, whose frames are expensive.
        #[test]
        fn vnet_below_its_power_loses_no_frame(
            others in prop::collection::vec((1u32..5000, 0u32..10_000, 0usize..2000, 0u64..20_000), 1..40),
            power in 20_000u32..100_000,
        ) {
            let others: Vec<Vnet> = others.into_iter()
                .map(|(weight, power, frames, frame_cycles)| {
                    Vnet { weight, power, frames, frame_cycles, ..Vnet::default() }
                })
                .collect();
            // It wants three quarters of its power, and is visited every 50 µs.
            let whole = u64::from(POWER_WHOLE);
            let wants = TICK_CYCLES * u64::from(power) * 3 / 4 / whole;
            let visits = TICK_CYCLES / 100_000 * 500;
            let frames = (wants.saturating_sub(visits) / 200) as usize;
            let modest = Vnet { weight: 1, power, frames, ..Vnet::default() };
            let got = run(&[vec![modest], others].concat(), 300);
            prop_assert_eq!(got[0].1, 0);
        }

        /// Whatever sequence of events happens, no frame is lost or invented.
        /// Each vnet is in the rotation once, and no queued frame is forgotten.
        #[test]
        fn scheduler_accounts_for_every_frame(steps in prop::collection::vec((0u8..6, 0u16..5, 0usize..100), 1..300)) {
            let mut scheduler: VnetScheduler<u32> = VnetScheduler::new(256);
            let (mut given, mut taken) = (0, 0);
            let mut frames = vec![];
            let mut cycle = 0;
            for (what, slot, count) in steps {
                match what {
                    0 => scheduler.insert(slot, 1, count as u32, count as u32 % 3 * 100_000),
                    1 => {
                        let gone = scheduler.remove(slot);
                        taken += gone.len();
                        prop_assert_eq!(scheduler.waiting(slot), 0);
                    }
                    2 | 3 => {
                        scheduler.wake(slot);
                        let mut batch: Vec<u32> = (0..count as u32).collect();
                        let free = 256 - scheduler.waiting;
                        let _ = scheduler.enqueue_all((slot, 1), free, 0, &mut batch);
                        given += count - batch.len();
                    }
                    4 => {
                        cycle += 1_000_000;
                        scheduler.begin(cycle);
                        while let Some(slot) = scheduler.next(1_000_000, count % 2 == 0) {
                            scheduler.dequeue(slot, &mut frames);
                            taken += frames.len();
                            frames.clear();
                            scheduler.charge(slot, count as u64 * 1000, 0);
                            if count % 3 == 0 && scheduler.waiting(slot) == 0 {
                                scheduler.set_idle(slot);
                            }
                        }
                    }
                    _ => _ = scheduler.wake(slot),
                }
                prop_assert_eq!(given, taken + scheduler.waiting);
                let mut awake: Vec<_> = scheduler.awake().collect();
                awake.sort_unstable();
                let once = awake.windows(2).all(|two| two[0] < two[1]);
                prop_assert!(once, "{:?}", awake);
                for slot in 0..5 {
                    prop_assert!(scheduler.waiting(slot) == 0 || awake.contains(&slot));
                }
                let weight: i64 = awake.iter()
                    .map(|slot| scheduler.accounts[usize::from(*slot)].as_ref().unwrap().weight)
                    .map(i64::from)
                    .sum();
                prop_assert_eq!(weight, scheduler.weight);
                let has_power = |slot: &u16| {
                    scheduler.accounts[usize::from(*slot)].as_ref().is_some_and(|it| it.power > 0)
                };
                let mut powered: Vec<_> = scheduler.powered.iter().copied().collect();
                powered.sort_unstable();
                prop_assert_eq!(powered, awake.into_iter().filter(has_power).collect::<Vec<_>>());
            }
            for round in 0..100 {
                cycle += 1_000_000;
                scheduler.begin(cycle);
                while let Some(slot) = scheduler.next(2_000_000 + round * GATHER_NS, true) {
                    scheduler.dequeue(slot, &mut frames);
                    taken += frames.len();
                    frames.clear();
                    scheduler.charge(slot, 1, 1);
                }
            }
            prop_assert_eq!((given, scheduler.waiting), (taken, 0));
        }
    }
}
