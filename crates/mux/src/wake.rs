//! Wake-ups between threads of the mux.
//!
//! A sleeper announces that it will sleep, checks for work once more, and only then
//! blocks. A thread that has work for it makes the work visible first and rings
//! afterwards. Both place a fence in between, so that one of the two sees the other.

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
    /// Creates the doorbell of a thread that is awake.
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { bell, asleep: AtomicBool::new(false) })
    }

    /// Wakes the thread if it sleeps. Work for it must be visible before.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Announces that the thread is about to sleep. It must check for work once more after this.
    pub fn sleeping(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Announces that the thread is awake.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}

/// A thread that is rung once more when this is dropped.
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
