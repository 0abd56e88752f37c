//! Quantiles of latencies in fixed memory.
//!
//! Values fall into buckets of at most 1/64 of their size, so a quantile is right to 1.6 %; the
//! largest value is kept exactly.

use std::time::Duration;

/// A histogram of durations from 1 ns to hours.
pub struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    longest_ns: u64,
}

impl Latencies {
    pub fn new() -> Self {
        Self { buckets: vec![0; bucket(u64::MAX) + 1], count: 0, longest_ns: 0 }
    }

    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(ns)] += 1;
        self.count += 1;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// The latency that `share` (0 to 1) of all values don't exceed, in microseconds; 0 when
    /// nothing was recorded.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, &count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_ns(index).min(self.longest_ns as f64) / 1000.0;
            }
        }
        0.0
    }

    pub fn longest_us(&self) -> f64 {
        self.longest_ns as f64 / 1000.0
    }
}

/// Linear below 128 ns, then 64 buckets per doubling.
fn bucket(ns: u64) -> usize {
    if ns < 2 * STEPS {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEPS.ilog2();
    (u64::from(shift) * STEPS + (ns >> shift)) as usize
}

fn middle_ns(index: usize) -> f64 {
    let index = index as u64;
    if index < 2 * STEPS {
        return index as f64;
    }
    let shift = index / STEPS - 1;
    let start = (index - shift * STEPS) as f64;
    (start + 0.5) * 2f64.powi(shift as i32)
}

const STEPS: u64 = 64;
