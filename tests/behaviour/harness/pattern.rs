//! Bytes that know their place: a byte that is lost, doubled or moved shows at once.
//!
//! A [`Pattern`] is an endless stream of bytes, cut from one long block whose length is a prime,
//! so that no buffer size divides it. Comparing slices keeps big transfers cheap in a debug build.

use std::sync::OnceLock;

/// An endless stream of bytes; different seeds give different streams.
#[derive(Clone, Copy, Debug)]
pub struct Pattern(pub u64);

impl Pattern {
    /// The longest slice that [`Pattern::bytes`] gives.
    pub const MAX: usize = PERIOD;

    /// The `len` bytes of the stream that start at `offset`.
    pub fn bytes(self, offset: u64, len: usize) -> &'static [u8] {
        assert!(len <= Pattern::MAX, "a slice of {len} bytes is longer than the pattern");
        let start = (self.0.wrapping_mul(7919).wrapping_add(offset) % PERIOD as u64) as usize;
        &block()[start..start + len]
    }

    /// Compares `found` with the stream at `offset` and names the first byte that differs.
    #[track_caller]
    pub fn check(self, offset: u64, found: &[u8]) {
        let expected = self.bytes(offset, found.len());
        if found != expected {
            let at = found.iter().zip(expected).take_while(|(a, b)| a == b).count();
            panic!(
                "stream {} differs at byte {}: found {:02x?}, expected {:02x?}",
                self.0,
                offset + at as u64,
                &found[at..found.len().min(at + 16)],
                &expected[at..expected.len().min(at + 16)],
            );
        }
    }
}

/// Small repeatable random numbers (xorshift); a failure can be run again.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

const PERIOD: usize = 1_048_573;

/// The block twice over, so that a slice may start anywhere in it.
fn block() -> &'static [u8] {
    static BLOCK: OnceLock<Vec<u8>> = OnceLock::new();
    BLOCK.get_or_init(|| {
        let mut random = Random::new(1);
        let once: Vec<u8> = (0..PERIOD).map(|_| random.below(256) as u8).collect();
        once.repeat(2)
    })
}

#[cfg(test)]
mod tests {
    use super::{Pattern, Random};

    #[test]
    fn a_moved_byte_shows() {
        let pattern = Pattern(3);
        pattern.check(17, pattern.bytes(17, 1000));
        let moved = std::panic::catch_unwind(|| pattern.check(18, pattern.bytes(17, 1000)));
        assert!(moved.is_err(), "a stream that is off by one byte was taken");
    }

    #[test]
    fn random_numbers_are_repeatable() {
        let take = || {
            let mut random = Random::new(7);
            (0..50).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(take(), take());
        assert!(take().iter().any(|n| *n > 500));
    }
}
