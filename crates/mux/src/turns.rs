//! The worker's time, shared among the vnets that are awake; and the frames that wait for it.
//!
//! What arrives from outside gathers here by vnet, so that a visit finds several frames. Vnets are visited in
//! rotation; while the worker is busy those alone for which [`GATHER_FRAMES`] wait, or whose last visit was
//! [`GATHER_NS`] ago. Beside it, as long as it has credit, one is visited when so many wait for it or the
//! first has waited for so long (where frames of many gather, as long as visits to all of these take): so who uses
//! less than its part is served at once, and who wants more waits for the rotation. A visit is charged with the time that it took. Each turn brings credit by the
//! vnet's weight among those awake, and no more than one turn's is kept; who is overdrawn is passed over until
//! it has paid. So whatever the others do, a vnet has its part of the time, and what one does not use goes to
//! whoever wants it.
//!
//! A vnet with power has that part of all of the worker's time before all that: an allowance grows with the
//! time-stamp counter, and as long as there is some its visits come first and are paid from it. Weights alone
//! could not promise it: they have no bound, and are of visits, beside which the worker has other things to do.
//! Its part by weight comes on top. While one with an allowance finds many frames in each round, there may be more
//! outside: others' visits take no more than a quarter of the time then, so that it gets to them.
//!
//! Dear frames hold nobody up: a visit takes as many as are expected to last [`VISIT_CYCLES`], and a round ends
//! after [`ROUND_CYCLES`], or once they took [`ROUND_DEAR_CYCLES`] more than others would have, so that what arrives
//! meanwhile is soon seen.
//!
//! Frames that wait have a bound: for no vnet more of them wait than as many as could wait for it once more,
//! so that n greedy ones have 1/(n+1) of the packets each; of one with power as many as its part of the packets that
//! these leave alone, however many others are greedy.
//! Sources: Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (1995); that who has
//! credit and something new goes first: RFC 8290 section 4.2; the bound: Choudhury and Hahne, "Dynamic queue
//! length thresholds" (1998).

use std::collections::VecDeque;
use std::mem;

use pdp_afxdp::prefetch;
use pdp_proto::mux::POWER_WHOLE;

/// Frames that are worth a visit.
pub const GATHER_FRAMES: usize = 32;

/// How long fewer of them wait for others while the worker is busy, nanoseconds.
pub const GATHER_NS: u64 = 50_000;

/// Visits in one round in rotation, and as many beside it: where more vnets have work, each visit is to
/// find more of it, as long as what waits is no more than [`MANY_PART`] of the packets.
const VISITS_FEW: usize = 4;
const VISITS_MAX: usize = 16;
const MANY_PART: usize = 2;

/// Vnets that are passed over in one round.
const PASSED_MAX: usize = 256;

/// Frames from outside that one visit takes.
const VISIT_FRAMES: usize = 256;

/// Time that a turn brings a vnet of average weight, cycles: what a visit that finds 256 frames takes.
const TURN_CYCLES: i64 = 50_000;

/// A turn brings at most so many times that, and no less than this part of it: parts are exact between
/// weights that differ no more.
const TURN_MAX: i64 = 8;
const TURN_MIN: i64 = 64;

/// The most that a vnet can owe, cycles: about what the dearest visit takes. More goes by only where another
/// had the worker's CPU.
const DEBT_MAX: i64 = 40 * TURN_CYCLES;

/// What a visit is to take at most, cycles, by what a frame of the vnet took before; and what that is where nothing is
/// known.
const VISIT_CYCLES: u64 = 30_000;
const FRAME_CYCLES: u64 = 960;

/// By how much more of it a frame is taken to cost after one visit.
const FRAME_CYCLES_GROW: u64 = 8;

/// Frames that a visit may take however dear they are.
const VISIT_FRAMES_MIN: usize = 2;

/// Visits of one round, cycles; the last one that fits is begun. Enough for all frames that one comes with.
const ROUND_CYCLES: i64 = 150_000;

/// Of these, what frames may take beyond the usual; and that, for each.
const ROUND_DEAR_CYCLES: i64 = 30_000;
const USUAL_CYCLES: u64 = 400;

/// What a visit takes by itself, however few frames it finds, where there are a thousand vnets and what it needs of this
/// one has left the caches. It makes no frame dear: visits would take fewer of them, and rounds end before they took
/// as many as come, so that less room would be left and visits find ever fewer.
const USUAL_VISIT_CYCLES: u64 = 8_000;

/// The part of all time that is for visits by weight, also while those with power have not got theirs: what frames of theirs
/// come is not for them alone to say, and costs time that nobody pays.
const REST_PART: i64 = 4;

/// What is kept of it, and owed, cycles.
const REST_CYCLES: i64 = 50_000;

/// What is kept of a vnet's power that it does not use, cycles of the worker's time: its part of them.
const KEPT_CYCLES: i64 = 5_000_000;

/// Vnets with power that are looked at before one visit.
const LOOKS_MAX: usize = 16;

/// The part of the packets that frames which wait leave alone: what sockets, guests and queues need.
const RESERVE_PART: usize = 8;

/// What is known of one vnet; hot, and so kept apart from the rest of it.
#[derive(Debug)]
struct Account<F> {
    /// Frames from outside that wait for a visit. Visits take the first of many: the others stay where they are.
    frames: VecDeque<F>,
    /// When the first of them came, nanoseconds.
    since_ns: u64,
    /// When it last had its turn, nanoseconds.
    visited_ns: u64,
    /// Cycles that it may take beside the rotation.
    credit: i64,
    weight: u32,
    /// What it has of the worker's time in any case, of [`POWER_WHOLE`].
    power: u32,
    /// Frames of it that may wait for that reason however many of others do: its part of what these leave alone.
    own_room: usize,
    /// What is left of that, in cycles by [`POWER_WHOLE`], as of this cycle.
    allowance: i64,
    allowed: u64,
    /// The round in which it was last visited for it.
    round: u64,
    /// Cycles that a frame takes; 0: nothing is known.
    frame_cycles: u64,
    /// Whether its visit found frames from outside.
    took: bool,
    /// Whether it left some behind, or found none and took about as long as one may.
    has_more: bool,
    generation: u32,
    /// Whether it has a place in the rotation; it rests otherwise.
    awake: bool,
    /// Whether it is among those that gather frames, and among those that have enough.
    gathers: bool,
    is_full: bool,
}

impl<F> Account<F> {
    /// Has what is in `frames` in place of what waits, and the other way: where one of them is empty, nothing is moved
    /// but where they are.
    #[inline]
    fn swap(&mut self, frames: &mut Vec<F>) {
        *frames = mem::replace(&mut self.frames, mem::take(frames).into()).into();
    }

    /// Whether there is an allowance at this cycle.
    #[inline]
    fn is_allowed(&mut self, cycle: u64) -> bool {
        let part = i64::from(self.power);
        let elapsed = cycle.saturating_sub(self.allowed).min(1 << 40) as i64;
        self.allowed = cycle;
        self.allowance = (self.allowance + elapsed * part).min(KEPT_CYCLES * part);
        self.allowance > 0
    }
}

/// Why a frame can't wait for its vnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such vnet, or it has changed since.
    Stale,
    /// Too many wait for it.
    Full,
}

/// Whose turn it is, and what waits for it; `F` is a frame.
#[derive(Debug)]
pub struct Turns<F> {
    /// By slot.
    accounts: Vec<Option<Account<F>>>,
    /// Vnets that do not rest.
    rotation: VecDeque<u16>,
    /// Those of them that have power.
    powered: VecDeque<u16>,
    /// Vnets for which frames gather, by how long.
    gathering: VecDeque<u16>,
    /// Those that have enough of them.
    full: VecDeque<u16>,
    /// Sum of the weights in the rotation.
    weight: i64,
    /// Frames that wait in all.
    waiting: usize,
    /// Packets of the worker.
    packets: usize,
    /// Turns since there was work, or one was passed over that may have some.
    in_vain: usize,
    /// Whose turn, the next, is the one that it has had part of.
    goes_on: Option<u16>,
    /// What is left of the round: visits beside the rotation, visits in it, and vnets to pass over.
    left: [usize; 3],
    /// And cycles, and of these for dear frames.
    left_cycles: i64,
    left_dear_cycles: i64,
    /// Cycles that visits by weight may have in any case.
    rest_cycles: i64,
    /// Whether one with power had much to do in this round, and has not got its part of late.
    is_claimed: bool,
    /// Whether the round before ended for want of cycles.
    was_cut: bool,
    /// The time-stamp counter, now and when the round began.
    cycle: u64,
    began: u64,
    /// Rounds.
    round: u64,
    /// Whether the visit that is made is paid from an allowance.
    by_power: bool,
}

impl<F> Turns<F> {
    /// Of a worker that has so many packets.
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

    /// The vnet in `slot` has this generation, weight and power, a part of [`POWER_WHOLE`], now. It is visited from
    /// now on.
    pub fn put(&mut self, slot: u16, generation: u32, weight: u32, power: u32) {
        let (at, cycle, reserve) = (usize::from(slot), self.cycle, self.packets / RESERVE_PART);
        if self.accounts.len() <= at {
            self.accounts.resize_with(at + 1, || None);
        }
        let account = self.accounts[at].get_or_insert_with(|| Account {
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
        self.rouse(slot);
    }

    /// The vnet in `slot` is gone. Returns the frames that waited for it.
    pub fn remove(&mut self, slot: u16) -> Vec<F> {
        self.rest(slot);
        self.gathering.retain(|other| *other != slot);
        self.full.retain(|other| *other != slot);
        let account = self.accounts.get_mut(usize::from(slot)).and_then(Option::take);
        let frames = account.map(|account| account.frames).unwrap_or_default();
        self.waiting -= frames.len();
        frames.into()
    }

    #[inline]
    fn account(&mut self, slot: u16) -> Option<&mut Account<F>> {
        self.accounts.get_mut(usize::from(slot))?.as_mut()
    }

    /// Vnets that do not rest.
    pub fn awake(&self) -> impl Iterator<Item = u16> {
        self.rotation.iter().copied()
    }

    /// Frames that wait for the vnet in `slot`.
    pub fn waiting(&self, slot: u16) -> usize {
        let account = self.accounts.get(usize::from(slot)).and_then(Option::as_ref);
        account.map_or(0, |account| account.frames.len())
    }

    /// Whether a worker that found nothing to do may have missed something: a vnet was not visited since, or
    /// frames wait.
    pub fn may_have_work(&self) -> bool {
        self.waiting > 0 || self.in_vain < self.rotation.len()
    }

    /// Has `frames` wait for a visit to the vnet in `slot`, of this generation, which must not rest
    /// ([`Turns::rouse`]); `free` is how many packets could be taken now. Leaves those that can't wait.
    pub fn give_all(
        &mut self,
        whose: (u16, u32),
        free: usize,
        now_ns: u64,
        frames: &mut Vec<F>,
    ) -> Result<(), Refused> {
        let room = self.room(free);
        let account = self.account_of(whose).ok_or(Refused::Stale)?;
        let room = room.max(account.own_room);
        let fits = frames.len().min(room.saturating_sub(account.frames.len()));
        let before = account.frames.len();
        if before == 0 && fits == frames.len() {
            account.swap(frames);
        } else {
            account.frames.extend(frames.drain(..fits));
        }
        self.gather(whose.0, before, now_ns);
        if frames.is_empty() { Ok(()) } else { Err(Refused::Full) }
    }

    /// Has the CPU fetch what [`Turns::give`] needs of the vnet in `slot`.
    #[inline]
    pub fn prefetch(&self, slot: u16) {
        let account = self.accounts.get(usize::from(slot));
        account.inspect(|account| prefetch(*account));
    }

    /// As [`Turns::give_all`], for one.
    #[inline]
    pub fn give(
        &mut self,
        whose: (u16, u32),
        free: usize,
        now_ns: u64,
        frame: F,
    ) -> Result<(), (Refused, F)> {
        let room = self.room(free);
        let Some(account) = self.account_of(whose) else { return Err((Refused::Stale, frame)) };
        let before = account.frames.len();
        if before >= room.max(account.own_room) {
            return Err((Refused::Full, frame));
        }
        account.frames.push_back(frame);
        self.gather(whose.0, before, now_ns);
        Ok(())
    }

    /// How many more frames are to be fetched for the vnet in `slot`, for which packets are taken of those that are `free`:
    /// they may surely wait, and one visit may take them with what waits. More would leave the caches until their visit.
    pub fn left(&self, slot: u16, free: usize) -> usize {
        let account = self.accounts.get(usize::from(slot)).and_then(Option::as_ref);
        account.map_or(usize::MAX, |account| {
            let room = self.room(free).max(account.own_room);
            // Each takes a packet, and leaves room for one less.
            let left = room.saturating_sub(account.frames.len()) / 2;
            let left = left.min(VISIT_FRAMES.saturating_sub(account.frames.len()));
            left.max(usize::from(account.frames.is_empty()))
        })
    }

    /// Frames that may wait for one vnet, beside its own room.
    #[inline]
    fn room(&self, free: usize) -> usize {
        let free = free.min(self.packets.saturating_sub(self.waiting));
        free.saturating_sub(self.packets / RESERVE_PART) + 1
    }

    #[inline]
    fn account_of(&mut self, (slot, generation): (u16, u32)) -> Option<&mut Account<F>> {
        self.account(slot).filter(|account| account.generation == generation)
    }

    /// The vnet in `slot` has more frames than the `before` that it had.
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

    /// Takes what waits for the vnet in `slot`, as many as one visit may; `frames` is empty. Returns how many the visit
    /// may take of whatever else there is.
    #[inline]
    pub fn take(&mut self, slot: u16, frames: &mut Vec<F>) -> usize {
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

    /// Gives the vnet in `slot`, which may have work, a place in the rotation; false if it has one.
    pub fn rouse(&mut self, slot: u16) -> bool {
        self.in_vain = 0;
        let Some(account) = self.account(slot) else { return false };
        let rested = !std::mem::replace(&mut account.awake, true);
        if rested {
            // What it left unused while it rested others have had.
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

    /// Takes the vnet in `slot` out of the rotation.
    pub fn rest(&mut self, slot: u16) {
        let Some(account) = self.account(slot) else { return };
        if std::mem::take(&mut account.awake) {
            let (weight, power) = (account.weight, account.power);
            self.weight -= i64::from(weight);
            // It may be one of those that were visited in vain, of which there are to be as many as are left.
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

    /// A round begins, at this `cycle` of the time-stamp counter.
    pub fn begin(&mut self, cycle: u64) {
        let most = if self.waiting > self.packets / MANY_PART { VISITS_MAX } else { VISITS_FEW };
        let visits = self.rotation.len().min(most);
        // Where all have a turn in each round, none is visited twice.
        let some_wait = self.rotation.len() > most || self.was_cut;
        let beside = if some_wait { most } else { 0 };
        self.left = [beside, visits, PASSED_MAX];
        let elapsed = cycle.saturating_sub(self.began).min(DEBT_MAX as u64) as i64;
        self.rest_cycles = (self.rest_cycles + elapsed / REST_PART).min(REST_CYCLES);
        (self.began, self.cycle, self.round) = (cycle, cycle, self.round + 1);
        (self.left_cycles, self.left_dear_cycles) = (ROUND_CYCLES, ROUND_DEAR_CYCLES);
        (self.was_cut, self.is_claimed) = (false, false);
    }

    /// Whom to visit next in this round; `busy` says that the worker has other things to do than to visit
    /// vnets for few frames. Who is visited in its turn is at the end of the rotation then.
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

    /// The next that has an allowance, and enough to do for a visit: of some, who has used the least of its part of late.
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

    /// The next beside the rotation or in it.
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
            let turn = TURN_CYCLES * count * i64::from(account.weight) / weight;
            let turn = turn.clamp(TURN_CYCLES / TURN_MIN, TURN_CYCLES * TURN_MAX);
            if !goes_on {
                account.credit = (account.credit + turn).min(turn);
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

    /// The next for whom enough frames gathered, or for long enough.
    fn next_gathered(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        if let Some(slot) = self.full.pop_front() {
            if let Some(account) = self.account(slot) {
                account.is_full = false;
            }
            return Some(slot);
        }
        let slot = *self.gathering.front()?;
        // By then as many as gather have been visited. Sooner it would find few frames where many have some.
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

    /// So many cycles went by for the vnet in `slot` beside its visits.
    pub fn owe(&mut self, slot: u16, cycles: u64) {
        if let Some(account) = self.account(slot).filter(|_| cycles > 0) {
            account.credit = (account.credit - cycles as i64).max(-DEBT_MAX);
        }
    }

    /// A visit to the vnet in `slot` is over, which took so many cycles for so many `frames`, or whatever else it found
    /// to do.
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
            // Up at once, so that who sends dear ones after many that were not has few long visits; but not by all that it
            // took, where another had the CPU meanwhile.
            let known = account.frame_cycles;
            let most = if known == 0 { u64::MAX } else { known * FRAME_CYCLES_GROW };
            let each = (of_frames / frames as u64).clamp(1, most);
            account.frame_cycles = each.max((known * 3 + each) / 4);
        }
        let waiting = account.frames.len();
        // What its peers have is not known.
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
        // One that had much to do and has not had its part goes on.
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

    /// One that wants what it is given: frames each tick, and what a visit costs beside them.
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

    /// Time between frames, cycles; and what a round takes beside visits, for which nobody pays.
    const TICK_CYCLES: u64 = 2_000_000;
    const ROUND_COSTS: u64 = 10_000;

    /// By then it is known what frames take; what is lost before counts for nothing.
    const START_CYCLES: u64 = 10 * TICK_CYCLES;

    /// Two cycles are a nanosecond.
    fn ns(cycle: u64) -> u64 {
        cycle / 2
    }

    /// Ticks with frames for all of them; returns what each got of the time, and lost of its frames.
    fn run(vnets: &[Vnet], ticks: u64) -> Vec<(f64, usize)> {
        let mut turns: Turns<u32> = Turns::new(PACKETS);
        let mut got = vec![(0u64, 0usize); vnets.len()];
        for (slot, vnet) in vnets.iter().enumerate() {
            turns.put(slot as u16, 7, vnet.weight, vnet.power);
        }
        let mut frames = vec![];
        let (mut cycle, mut last) = (0, 0);
        while cycle < ticks * TICK_CYCLES {
            let before = cycle.saturating_sub(last);
            last = cycle;
            for (slot, vnet) in vnets.iter().enumerate() {
                let free = PACKETS - turns.waiting;
                let due = |cycle: u64| vnet.frames * cycle as usize / TICK_CYCLES as usize;
                let mut due = due(cycle) - due(cycle - before);
                while due > 0 && turns.give((slot as u16, 7), free, ns(cycle), 0).is_ok() {
                    due -= 1;
                }
                got[slot].1 += if cycle < START_CYCLES { 0 } else { due };
            }
            cycle += ROUND_COSTS;
            let now_ns = ns(cycle);
            turns.begin(cycle);
            while let Some(slot) = turns.next(now_ns, true) {
                turns.take(slot, &mut frames);
                let vnet = &vnets[usize::from(slot)];
                let cycles = frames.len() as u64 * vnet.frame_cycles + vnet.visit_cycles;
                got[usize::from(slot)].0 += cycles;
                cycle += cycles;
                turns.charge(slot, cycles, frames.len().max(1));
                frames.clear();
            }
        }
        got.iter().map(|(cycles, lost)| (*cycles as f64 / cycle as f64, *lost)).collect()
    }

    /// One that wants all there is.
    fn hog(weight: u32, frame_cycles: u64) -> Vnet {
        Vnet { weight, frame_cycles, frames: 60_000, ..Vnet::default() }
    }

    /// Where visits take few of many frames that wait, each costs what it takes, however many it leaves: frames that
    /// became dearer by waiting would have visits take fewer still.
    #[test]
    fn what_a_visit_leaves_costs_it_nothing() {
        const COUNT: usize = 12_000;
        // All of them, where no more than so many wait at a time.
        let took = |lot: usize| {
            let mut turns: Turns<[u8; 1024]> = Turns::new(PACKETS);
            turns.put(0, 7, 10, 0);
            // So that a visit takes the fewest.
            turns.charge(0, 2 * VISIT_CYCLES, VISIT_FRAMES_MIN);
            let (mut frames, mut visits, mut took) = (vec![], 0, Duration::ZERO);
            for _ in 0..COUNT / lot {
                while turns.waiting(0) < lot {
                    assert!(turns.give((0, 7), PACKETS - turns.waiting, 0, [0; 1024]).is_ok());
                }
                let since = Instant::now();
                while turns.waiting(0) > 0 {
                    turns.take(0, &mut frames);
                    frames.clear();
                    visits += 1;
                }
                took += since.elapsed();
            }
            assert_eq!(visits, COUNT / VISIT_FRAMES_MIN);
            took
        };
        let (few, all) = (took(60), took(COUNT));
        // Where the rest is moved at each visit, 36 GB are.
        assert!(all < 10 * few + Duration::from_millis(50), "{all:?}, where few wait {few:?}");
    }

    /// Who keeps its frames where they are is asked for no more than a visit may take.
    #[test]
    fn no_more_are_fetched_than_a_visit_takes() {
        let mut turns: Turns<u32> = Turns::new(PACKETS);
        turns.put(0, 7, 10, 0);
        let free = |turns: &Turns<u32>| PACKETS - turns.waiting;
        assert_eq!(turns.left(0, free(&turns)), VISIT_FRAMES);
        turns.give_all((0, 7), free(&turns), 0, &mut vec![0; VISIT_FRAMES - 1]).unwrap();
        assert_eq!(turns.left(0, free(&turns)), 1);
        turns.give_all((0, 7), free(&turns), 0, &mut vec![0; 9]).unwrap();
        assert_eq!(turns.left(0, free(&turns)), 0);
        assert_eq!(turns.left(0, 0), 0);
    }

    #[test]
    fn a_dear_vnet_has_its_part_and_no_more() {
        let cheap = Vnet { weight: 1000, visit_cycles: 2_000, ..Vnet::default() };
        let dear = Vnet { visit_cycles: 400_000, ..cheap.clone() };
        let got = run(&[vec![dear], vec![cheap; 31]].concat(), 2_000);
        // All of what it wants costs 400,000 of 462,000 cycles; its part of what they want is less.
        let (part, _) = got[0];
        let mean = got[1..].iter().map(|(part, _)| part).sum::<f64>() / 31.0;
        assert!(part < 0.55, "{part} beside {mean} each");
        assert!(mean > 0.008, "{part} beside {mean} each");
    }

    #[test]
    fn parts_are_by_weight() {
        for frame_cycles in [50, 200, 5_000] {
            let hogs = [1000, 500, 250, 250].map(|weight| hog(weight, frame_cycles));
            let got = run(&hogs, 500);
            let all: f64 = got.iter().map(|(part, _)| part).sum();
            for ((part, _), want) in got.iter().zip([0.5, 0.25, 0.125, 0.125]) {
                let far = (part / all / want - 1.0).abs();
                assert!(far < 0.15, "{got:?}, {frame_cycles} cycles each");
            }
        }
    }

    /// Beside any number of others of any weight, and though a part of the time is nobody's.
    #[test]
    fn who_has_power_has_that_part_of_all_time() {
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
            // What is left is the others'.
            assert!(got[3..].iter().map(|(part, _)| part).sum::<f64>() > 0.2, "{:?}", &got[..4]);
        }
    }

    /// Where nobody else wants it, there is more than the power.
    #[test]
    fn what_others_leave_is_had_beside_the_power() {
        let powered = Vnet { power: 100_000, ..hog(10, 200) };
        let got = run(&[powered.clone(), hog(10, 200)], 200);
        assert!((got[0].0 - got[1].0 - 0.1).abs() < 0.03, "{got:?}");
        let got = run(&[powered], 200);
        assert!(got[0].0 > 0.5, "{got:?}");
    }

    /// Promised more than there is, they leave something all the same.
    #[test]
    fn too_much_power_starves_nobody() {
        let power = Vnet { power: POWER_WHOLE, ..hog(10, 200) };
        let got = run(&[vec![power; 3], vec![hog(10, 200)]].concat(), 200);
        assert!(got[3].0 > 0.02, "{got:?}");
    }

    /// Where many have frames all the time, a visit finds many, as long as there is room for those that wait.
    #[test]
    fn visits_to_many_find_many_frames_and_none_is_lost() {
        // The last as where what a visit needs has left the caches.
        let cases = [(64, 2_000, 20), (256, 2_000, 20), (1024, 2_000, 12), (1024, 8_000, 12)];
        for (vnets, visit_cycles, least) in cases {
            let mut turns: Turns<u32> = Turns::new(PACKETS);
            (0..vnets).for_each(|slot| turns.put(slot, 1, 10, 0));
            let mut arriving = (0..vnets).cycle();
            let (mut cycle, mut visits, mut found, mut frames) = (0, 0, 0, vec![]);
            for round in 0..4_000 {
                for slot in arriving.by_ref().take(256) {
                    let free = PACKETS - turns.waiting;
                    let given = turns.give((slot, 1), free, ns(cycle), 0);
                    assert!(given.is_ok(), "of {vnets}, {visit_cycles} cycles a visit");
                }
                cycle += ROUND_COSTS;
                let now_ns = ns(cycle);
                turns.begin(cycle);
                while let Some(slot) = turns.next(now_ns, true) {
                    turns.take(slot, &mut frames);
                    let cycles = frames.len() as u64 * 200 + visit_cycles;
                    cycle += cycles;
                    turns.charge(slot, cycles, frames.len());
                    (visits, found) =
                        if round < 2_000 { (0, 0) } else { (visits + 1, found + frames.len()) };
                    frames.clear();
                }
            }
            let each = found / visits;
            assert!(each >= least, "{each} in a visit of {visit_cycles} to each of {vnets}");
        }
    }

    /// However dear frames are, a round is over soon: what came meanwhile is seen.
    #[test]
    fn rounds_are_short_however_dear_frames_are() {
        let mut turns: Turns<u32> = Turns::new(PACKETS);
        (0..40).for_each(|slot| turns.put(slot, 1, 10, if slot < 4 { 100_000 } else { 0 }));
        let (mut cycle, mut longest) = (0, 0);
        let mut frames = vec![];
        for round in 0..5_000 {
            for slot in 0..40 {
                let free = PACKETS - turns.waiting;
                let _ = turns.give_all((slot, 1), free, ns(cycle), &mut vec![0; 64]);
            }
            let began = cycle;
            turns.begin(cycle);
            while let Some(slot) = turns.next(ns(began), true) {
                turns.take(slot, &mut frames);
                let cycles = frames.len() as u64 * 3_000;
                cycle += cycles;
                turns.charge(slot, cycles, frames.len());
                frames.clear();
            }
            // By then it is known what a frame takes.
            longest = longest.max(if round > 1_000 { cycle - began } else { 0 });
        }
        let bound = ROUND_DEAR_CYCLES as u64 * 8 / 7 + 2 * VISIT_CYCLES;
        assert!((1..=bound).contains(&longest), "{longest} cycles");
    }

    /// One that owes time, one that was visited just before while there was much to do, one that is roused: before all
    /// of them were looked at, the worker does not take itself for idle.
    #[test]
    fn who_was_not_visited_may_have_work() {
        type Case = fn(&mut Turns<u32>);
        let cases: [(&str, Case); 3] = [
            ("owes", |turns| turns.charge(0, DEBT_MAX as u64, 1)),
            ("was visited just before", |turns| {
                turns.begin(0);
                assert_eq!(turns.next(1_000_000, true), Some(1));
            }),
            ("is roused", |turns| {
                turns.rest(0);
                visit_all(turns);
                turns.rouse(0);
            }),
        ];
        /// Two rounds that find nothing; who was visited.
        fn visit_all(turns: &mut Turns<u32>) -> Vec<u16> {
            let mut visited = vec![];
            for _ in 0..2 {
                turns.begin(0);
                // Some at a time, as where there are many.
                turns.left[1] = 2;
                while let Some(slot) = turns.next(1_000_000, false) {
                    turns.charge(slot, 1, 0);
                    visited.push(slot);
                }
            }
            visited
        }
        for (what, case) in cases {
            let mut turns: Turns<u32> = Turns::new(256);
            (0..3).for_each(|slot| turns.put(slot, 1, 1, 0));
            turns.begin(0);
            assert_eq!(turns.next(1_000_000, false), Some(0));
            case(&mut turns);
            let mut seen = vec![];
            while turns.may_have_work() {
                seen.extend(visit_all(&mut turns));
            }
            assert!((0..3).all(|slot| seen.contains(&slot)), "{what}: {seen:?}");
        }
    }

    /// Visits to those that rest since are not taken for visits to the others.
    #[test]
    fn who_rests_hides_nobody_that_was_not_visited() {
        let mut turns: Turns<u32> = Turns::new(256);
        (0..3).for_each(|slot| turns.put(slot, 1, 1, 0));
        turns.begin(0);
        for (slot, frames) in [(0, 1), (1, 0), (2, 0)] {
            assert_eq!(turns.next(1_000_000, false), Some(slot));
            turns.charge(slot, 1, frames);
            if slot == 1 {
                turns.rest(slot);
            }
        }
        assert!(turns.may_have_work(), "the first had work, and was not visited since");
    }

    /// The review's case: a thousand with a trickle, one flooded.
    #[test]
    fn a_flood_takes_no_packet_from_a_trickle() {
        let trickle = Vnet { frames: 1, ..Vnet::default() };
        let flood = Vnet { frames: 20_000, ..Vnet::default() };
        let got = run(&[vec![flood], vec![trickle; 200]].concat(), 500);
        assert!(got[0].1 > 0, "the flood is more than there is time for");
        assert!(got[1..].iter().all(|(_, lost)| *lost == 0), "{:?}", &got[1..]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Whoever wants less than its part gets it, beside any mix of others.
        #[test]
        fn who_wants_less_than_its_part_loses_nothing(
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

        /// The same of its power, beside any mix of others that have some, or none, and whose frames are dear.
        #[test]
        fn who_wants_less_than_its_power_loses_nothing(
            others in prop::collection::vec((1u32..5000, 0u32..10_000, 0usize..2000, 0u64..20_000), 1..40),
            power in 20_000u32..100_000,
        ) {
            let others: Vec<Vnet> = others.into_iter()
                .map(|(weight, power, frames, frame_cycles)| {
                    Vnet { weight, power, frames, frame_cycles, ..Vnet::default() }
                })
                .collect();
            // Three quarters of its power, where it is visited every 50 µs.
            let whole = u64::from(POWER_WHOLE);
            let wants = TICK_CYCLES * u64::from(power) * 3 / 4 / whole;
            let visits = TICK_CYCLES / 100_000 * 500;
            let frames = (wants.saturating_sub(visits) / 200) as usize;
            let modest = Vnet { weight: 1, power, frames, ..Vnet::default() };
            let got = run(&[vec![modest], others].concat(), 300);
            prop_assert_eq!(got[0].1, 0);
        }

        /// Whatever comes, waits, rests and goes: nothing is lost or made, each is in the rotation once, and
        /// nothing that waits is forgotten.
        #[test]
        fn books_are_kept(steps in prop::collection::vec((0u8..6, 0u16..5, 0usize..100), 1..300)) {
            let mut turns: Turns<u32> = Turns::new(256);
            let (mut given, mut taken) = (0, 0);
            let mut frames = vec![];
            let mut cycle = 0;
            for (what, slot, count) in steps {
                match what {
                    0 => turns.put(slot, 1, count as u32, count as u32 % 3 * 100_000),
                    1 => {
                        let gone = turns.remove(slot);
                        taken += gone.len();
                        prop_assert_eq!(turns.waiting(slot), 0);
                    }
                    2 | 3 => {
                        turns.rouse(slot);
                        let mut batch: Vec<u32> = (0..count as u32).collect();
                        let _ = turns.give_all((slot, 1), 256 - turns.waiting, 0, &mut batch);
                        given += count - batch.len();
                    }
                    4 => {
                        cycle += 1_000_000;
                        turns.begin(cycle);
                        while let Some(slot) = turns.next(1_000_000, count % 2 == 0) {
                            turns.take(slot, &mut frames);
                            taken += frames.len();
                            frames.clear();
                            turns.charge(slot, count as u64 * 1000, 0);
                            if count % 3 == 0 && turns.waiting(slot) == 0 {
                                turns.rest(slot);
                            }
                        }
                    }
                    _ => _ = turns.rouse(slot),
                }
                prop_assert_eq!(given, taken + turns.waiting);
                let mut awake: Vec<_> = turns.awake().collect();
                awake.sort_unstable();
                let once = awake.windows(2).all(|two| two[0] < two[1]);
                prop_assert!(once, "{:?}", awake);
                for slot in 0..5 {
                    prop_assert!(turns.waiting(slot) == 0 || awake.contains(&slot));
                }
                let weight: i64 = awake.iter()
                    .map(|slot| i64::from(turns.accounts[usize::from(*slot)].as_ref().unwrap().weight))
                    .sum();
                prop_assert_eq!(weight, turns.weight);
                let has_power = |slot: &u16| {
                    turns.accounts[usize::from(*slot)].as_ref().is_some_and(|it| it.power > 0)
                };
                let mut powered: Vec<_> = turns.powered.iter().copied().collect();
                powered.sort_unstable();
                prop_assert_eq!(powered, awake.into_iter().filter(has_power).collect::<Vec<_>>());
            }
            for round in 0..100 {
                cycle += 1_000_000;
                turns.begin(cycle);
                while let Some(slot) = turns.next(2_000_000 + round * GATHER_NS, true) {
                    turns.take(slot, &mut frames);
                    taken += frames.len();
                    frames.clear();
                    turns.charge(slot, 1, 1);
                }
            }
            prop_assert_eq!((given, turns.waiting), (taken, 0));
        }
    }
}
