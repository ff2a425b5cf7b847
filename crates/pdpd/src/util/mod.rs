//! Small helpers of all other folders.

pub mod shared;

use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pdp_api::Progress;
pub use pdp_container::error_chain;

/// Modes of the state file and of its directory.
pub(crate) const PRIVATE: u32 = 0o600;

/// Receives the steps of a change. Never blocks for long.
pub type ProgressFn<'a> = &'a mut (dyn FnMut(Progress) + Send);

/// Locks a mutex, also after a thread panicked that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The content is consistent after every step; a panic elsewhere does not change that.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Formats bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Replaces the path of the state directory by `STATE`, for clients of the API.
pub fn hide(state: &Path, text: String) -> String {
    match state.to_str().filter(|state| state.len() > 1) {
        Some(state) => text.replace(state, "STATE"),
        None => text,
    }
}

/// Formats a MAC address.
pub(crate) fn mac(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}
