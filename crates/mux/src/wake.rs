//! How threads of the mux wake each other.
//!
//! A sleeper says that it is going to sleep, looks for work once more, and only then blocks; who
//! has work for it makes the work visible first and rings after. Both fence in between, so that
//! one of the two sees the other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// One thread's doorbell.
#[derive(Debug)]
pub struct Wake {
    bell: OwnedFd,
    asleep: AtomicBool,
}

impl Wake {
    /// Of a thread that is awake.
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { bell, asleep: AtomicBool::new(false) })
    }

    /// Wakes the thread if it sleeps, after work for it was made visible.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// The thread is about to sleep: it looks for work once more after this.
    pub fn sleeping(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The thread is awake.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}

/// A thread that is rung once more when this goes.
#[derive(Debug)]
pub struct RungLast(pub Arc<Wake>);

impl Drop for RungLast {
    fn drop(&mut self) {
        self.0.ring();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
