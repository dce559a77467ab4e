//! What CRIU's two sides have to know of each other: whether it has ended, and whether what it does is still wanted.
//!
//! In: the end of the program; the end of the transfer. Out: each, for the other. Nothing can fail.

use std::sync::atomic::{AtomicBool, Ordering};

/// See the module.
#[derive(Debug, Default)]
pub struct Watch {
    ended: AtomicBool,
    given_up: AtomicBool,
}

impl Watch {
    /// CRIU has ended, well or not: who has not come to the socket does not come.
    pub fn has_ended(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether it has.
    pub fn is_over(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The transfer was given up: CRIU is not to go on.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Whether it was.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}
