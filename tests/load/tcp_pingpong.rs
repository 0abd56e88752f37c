//! tcp-pingpong: round trips per second and their latency.
//!
//! The clock starts when every connection stands and has had one round trip.

use std::io;
use std::time::{Duration, Instant};

use crate::args::Options;
use crate::latency::Latencies;
use crate::report::Report;
use crate::tcp_clients::{Lanes, Next, PACE};

pub fn run(options: &Options) -> io::Result<Report> {
    let to = options.target()?;
    let size = options.size.unwrap_or(100);
    let limit = options.seconds.unwrap_or(match options.messages {
        Some(_) => LONGEST,
        None => Duration::from_secs(5),
    });
    let most = options.messages.unwrap_or(u64::MAX);

    // Opening has its own time; `limit` is for the measured part.
    let mut lanes = Lanes::new(options.connections, size, LONGEST)?;
    let warmed = lanes.open(to, options.pace.unwrap_or(PACE))? as u64;
    lanes.extend(limit + GRACE);

    let start = Instant::now();
    let end = start + limit;
    let mut latencies = Latencies::new();
    let mut started = lanes.start(usize::try_from(most).unwrap_or(usize::MAX)) as u64;
    let mut under_way = started;
    let (mut served, mut last) = (0, start);
    while under_way > 0 && !lanes.is_late() {
        let out_of_time = Instant::now() >= end;
        let turn = lanes.turn(|latency| {
            latencies.record(latency);
            if started < most && !out_of_time {
                started += 1;
                Next::Again
            } else {
                under_way -= 1;
                Next::Rest
            }
        })?;
        served += turn.served as u64;
        under_way -= (turn.lost_busy as u64).min(under_way);
        if turn.served > 0 {
            last = Instant::now();
        }
    }
    let seconds = (last - start).as_secs_f64();
    Ok(Report::new()
        .count("connections", options.connections as u64)
        .count("size", size as u64)
        .count("messages", served)
        .count("round_trips", served + warmed)
        .number("seconds", seconds)
        .number("per_second", served as f64 / seconds)
        .latencies(&latencies)
        .fault("unanswered", under_way)
        .fault("errors", lanes.errors)
        .text("first_error", lanes.first_error.as_deref()))
}

/// Bound of a run that is limited by its count alone.
const LONGEST: Duration = Duration::from_secs(120);
/// How long replies may be late after the end.
const GRACE: Duration = Duration::from_secs(1);
