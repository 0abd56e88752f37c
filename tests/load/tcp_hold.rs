//! tcp-hold: many connections in use at the same time.
//!
//! A connection counts as served when every round trip on it was right: those before the hold and
//! those after it.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use crate::args::Options;
use crate::report::Report;
use crate::tcp_clients::{Lanes, Next, PACE};

pub fn run(options: &Options) -> io::Result<Report> {
    let to = options.target()?;
    let size = options.size.unwrap_or(100);
    let limit = options.seconds.unwrap_or(Duration::from_secs(600));

    let start = Instant::now();
    let mut lanes = Lanes::new(options.connections, size, limit)?;
    let opened = lanes.open(to, options.pace.unwrap_or(PACE))?;
    for _ in 1..options.rounds {
        round(&mut lanes)?;
    }
    let opening_seconds = start.elapsed().as_secs_f64();

    writeln!(io::stderr(), "held {}", lanes.alive())?;
    let mut lost = 0;
    while !lanes.is_over() {
        lost += lanes.turn(|_| Next::Rest)?.lost_resting as u64;
    }
    lanes.extend(GRACE);
    let mut served = lanes.alive();
    for _ in 0..options.rounds {
        served = round(&mut lanes)?;
    }
    Ok(Report::new()
        .count("connections", options.connections as u64)
        .count("opened", opened as u64)
        .number("opening_seconds", opening_seconds)
        .count("lost_while_held", lost)
        .count("served", served as u64)
        .fault("errors", lanes.errors)
        .text("first_error", lanes.first_error.as_deref()))
}

/// One round trip on every lane; how many were right.
fn round(lanes: &mut Lanes) -> io::Result<usize> {
    let mut under_way = lanes.start_all();
    let mut served = 0;
    while under_way > 0 && !lanes.is_late() {
        let turn = lanes.turn(|_| Next::Rest)?;
        served += turn.served;
        under_way -= (turn.served + turn.lost_busy).min(under_way);
    }
    Ok(served)
}

/// Time for the round trips after the hold.
const GRACE: Duration = Duration::from_secs(30);
