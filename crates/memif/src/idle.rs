//! Order of stores and loads that prevents lost wake-ups.
//!
//! The two sides share two words: the sender's index, and the flag by which the receiver says that
//! it need not be rung. Each side stores its own word, fences, and loads the other's. At least one
//! of them sees the other's store: either the sender rings, or the receiver stays awake. A sender
//! may set the flag again when it rings ([`wakes`]). Then it does not ring twice for a receiver
//! that still waits for a CPU.

use std::sync::atomic::{AtomicU16, Ordering, fence};

/// `MEMIF_RING_FLAG_MASK_INT`: do not ring.
pub(crate) const MASKED: u16 = 1;

/// Shared word. A trait, so that the model checker can substitute its own.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u16;
    fn store(&self, value: u16, order: Ordering);
    fn swap(&self, value: u16, order: Ordering) -> u16;
    /// A sequentially consistent fence.
    fn fence();
}

impl Word for AtomicU16 {
    fn load(&self, order: Ordering) -> u16 {
        AtomicU16::load(self, order)
    }

    fn store(&self, value: u16, order: Ordering) {
        AtomicU16::store(self, value, order);
    }

    fn swap(&self, value: u16, order: Ordering) -> u16 {
        AtomicU16::swap(self, value, order)
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// The sender's half, after it has published the index any number of times. True if the other side
/// sleeps, or may not have seen what was stored before.
pub(crate) fn is_asleep<W: Word>(flags: &W) -> bool {
    W::fence();
    flags.load(Ordering::Relaxed) & MASKED == 0
}

/// Like [`is_asleep`], for a receiver that clears the
/// flag before each of its sleeps. True once per sleep.
pub(crate) fn wakes<W: Word>(flags: &W) -> bool {
    is_asleep(flags) && flags.swap(MASKED, Ordering::AcqRel) & MASKED == 0
}

/// The half of the side that frees slots. Stores its own index and returns the other side's. If the
/// other side missed these free slots, the value is from before it went to sleep.
pub(crate) fn move_on<W: Word>(index: &W, value: u16, others: &W) -> u16 {
    index.store(value, Ordering::Release);
    W::fence();
    others.load(Ordering::Relaxed)
}

/// The receiver's half. True if the index is still `seen`, so that it may sleep.
pub(crate) fn arm<W: Word>(index: &W, seen: u16, flags: &W) -> bool {
    flags.swap(0, Ordering::AcqRel);
    W::fence();
    if index.load(Ordering::Relaxed) == seen {
        return true;
    }
    disarm(flags);
    false
}

/// Marks the receiver awake; it empties its doorbell afterwards. All writers
/// of the flag exchange it, so that this and [`wakes`] are ordered. Otherwise
/// a ring for a finished sleep could be emptied in the next one.
pub(crate) fn disarm<W: Word>(flags: &W) {
    flags.swap(MASKED, Ordering::AcqRel);
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicBool;
    use loom::sync::atomic::AtomicU16 as Model;
    use std::sync::Arc;

    impl Word for Model {
        fn load(&self, order: Ordering) -> u16 {
            Model::load(self, order)
        }

        fn store(&self, value: u16, order: Ordering) {
            Model::store(self, value, order);
        }

        fn swap(&self, value: u16, order: Ordering) -> u16 {
            Model::swap(self, value, order)
        }

        fn fence() {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// The sender publishes two frames and checks the flag after each or after both. The receiver,
    /// masked at first, goes to sleep. In every interleaving the receiver is rung for the frames
    /// that it misses, and sees the others whole.
    #[test]
    fn every_missed_frame_wakes_the_receiver() {
        const FRAMES: u16 = 2;
        let model = |looks_every: u16| {
            let index = Arc::new(Model::new(0));
            let flags = Arc::new(Model::new(MASKED));
            let bell = Arc::new(AtomicBool::new(false));
            let data = Arc::new(Model::new(0));
            let sender = {
                let (index, flags) = (index.clone(), flags.clone());
                let (bell, data) = (bell.clone(), data.clone());
                loom::thread::spawn(move || {
                    for frame in 1..=FRAMES {
                        data.store(frame, Ordering::Relaxed);
                        index.store(frame, Ordering::Release);
                        if frame % looks_every == 0 && is_asleep(&*flags) {
                            bell.store(true, Ordering::SeqCst);
                        }
                    }
                })
            };
            let mut seen = 0;
            let asleep = loop {
                if arm(&*index, seen, &*flags) {
                    break true;
                }
                seen = index.load(Ordering::Acquire);
                assert!(data.load(Ordering::Relaxed) >= seen, "index shown before its frame");
                if seen == FRAMES {
                    break false;
                }
            };
            sender.join().unwrap();
            if asleep && seen != FRAMES {
                assert!(bell.load(Ordering::SeqCst), "asleep at {seen} and nobody rang");
            }
        };
        [1, FRAMES].into_iter().for_each(|looks_every| loom::model(move || model(looks_every)));
    }

    /// As above, with a sender that rings once per sleep. Whenever the receiver sleeps although
    /// there is a frame that it has not seen, it is woken.
    #[test]
    fn one_ring_per_sleep_is_enough() {
        const FRAMES: u16 = 2;
        loom::model(|| {
            let index = Arc::new(Model::new(0));
            let flags = Arc::new(Model::new(MASKED));
            let bell = Arc::new(AtomicBool::new(false));
            let sender = {
                let (index, flags, bell) = (index.clone(), flags.clone(), bell.clone());
                loom::thread::spawn(move || {
                    for frame in 1..=FRAMES {
                        index.store(frame, Ordering::Release);
                        if wakes(&*flags) {
                            bell.swap(true, Ordering::AcqRel);
                        }
                    }
                })
            };
            // Three sleeps: one more than there are reasons to wake up.
            let mut seen = 0;
            let mut asleep = false;
            for _ in 0..=FRAMES {
                asleep = arm(&*index, seen, &*flags);
                if asleep && !bell.load(Ordering::SeqCst) {
                    break;
                }
                disarm(&*flags);
                bell.swap(false, Ordering::AcqRel);
                asleep = false;
                seen = index.load(Ordering::Acquire);
            }
            sender.join().unwrap();
            if asleep && seen != FRAMES {
                assert!(bell.load(Ordering::SeqCst), "asleep at {seen} and nobody rang");
            }
        });
    }

    /// A client fills its ring of two slots and waits for a free one, while the server takes the
    /// first frame. In every interleaving the client finds the free slot, or the server finds that
    /// the ring was full and that the client sleeps.
    #[test]
    fn freed_slot_wakes_the_waiting_client() {
        const SLOTS: u16 = 2;
        loom::model(|| {
            let head = Arc::new(Model::new(0));
            let tail = Arc::new(Model::new(0));
            let flags = Arc::new(Model::new(MASKED));
            let client = {
                let (head, tail, flags) = (head.clone(), tail.clone(), flags.clone());
                loom::thread::spawn(move || {
                    (1..=SLOTS).for_each(|frames| head.store(frames, Ordering::Release));
                    arm(&*tail, 0, &*flags)
                })
            };
            let mut rung = false;
            if head.load(Ordering::Acquire) > 0 {
                let full = move_on(&*tail, 1, &*head) >= SLOTS;
                rung = full && is_asleep(&*flags);
            }
            let took = tail.load(Ordering::Relaxed) == 1;
            let sleeps = client.join().unwrap();
            assert!(!(took && sleeps) || rung, "asleep with room, and nobody rang");
        });
    }
}
