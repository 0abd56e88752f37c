//! What is counted for each rule, and the brake on its log lines.
//!
//! Plain numbers, added to where the thing happens and read for the status line.

use std::fmt;

use crate::deadline::Millis;

/// Counters of one rule.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// TCP connections accepted.
    pub accepted: u64,
    /// TCP connections that exist now.
    pub open: u64,
    /// Ended by both sides.
    pub finished: u64,
    /// Reset by a peer, or lost.
    pub reset: u64,
    /// No target could be reached.
    pub unreachable: u64,
    /// The client left before the target was reached.
    pub client_left: u64,
    /// Ended by a timeout.
    pub timed_out: u64,
    /// Bytes from clients and from targets, of connections that have ended.
    pub tcp_bytes: [u64; 2],
    /// UDP flows opened.
    pub flows: u64,
    /// UDP flows that had to make room for others.
    pub evicted: u64,
    /// Datagrams relayed, from clients and from targets.
    pub datagrams: [u64; 2],
    /// Their bytes.
    pub udp_bytes: [u64; 2],
    /// Datagrams dropped because a socket's send buffer was full.
    pub blocked: u64,
    /// Datagrams that the kernel dropped because a socket's receive buffer was full.
    pub overflowed: u64,
    /// Datagrams dropped because they could not be sent, or had no target to go to.
    pub dropped: u64,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: [(&str, u64); 18] = [
            ("accepted", self.accepted),
            ("open", self.open),
            ("finished", self.finished),
            ("reset", self.reset),
            ("unreachable", self.unreachable),
            ("client-left", self.client_left),
            ("timed-out", self.timed_out),
            ("tcp-bytes-up", self.tcp_bytes[0]),
            ("tcp-bytes-down", self.tcp_bytes[1]),
            ("flows-opened", self.flows),
            ("flows-evicted", self.evicted),
            ("datagrams-up", self.datagrams[0]),
            ("datagrams-down", self.datagrams[1]),
            ("udp-bytes-up", self.udp_bytes[0]),
            ("udp-bytes-down", self.udp_bytes[1]),
            ("datagrams-blocked", self.blocked),
            ("datagrams-overflowed", self.overflowed),
            ("datagrams-dropped", self.dropped),
        ];
        let mut gap = "";
        for (name, value) in fields {
            write!(f, "{gap}{name}={value}")?;
            gap = " ";
        }
        Ok(())
    }
}

/// Lets one line a second through and counts the others.
#[derive(Clone, Debug, Default)]
pub struct Brake {
    last: Option<Millis>,
    held: u64,
}

impl Brake {
    /// Whether a line may be written now; if so, with the number that was held back before it.
    pub fn pass(&mut self, now: Millis) -> Option<Held> {
        match self.last {
            Some(last) if now.0 < last.0 + INTERVAL_MS => {
                self.held += 1;
                None
            }
            _ => {
                self.last = Some(now);
                Some(Held(std::mem::take(&mut self.held)))
            }
        }
    }

    /// What was held back and would otherwise never be told, once the second is over.
    pub fn flush(&mut self, now: Millis) -> Option<Held> {
        let over = self.last.is_none_or(|last| now.0 >= last.0 + INTERVAL_MS);
        if self.held > 0 && over { self.pass(now) } else { None }
    }

    /// Whether lines are being held back.
    pub fn is_holding(&self) -> bool {
        self.held > 0
    }
}

/// A number of lines that were held back, as the end of the next line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held(pub u64);

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " (and {} more like it)", self.0) }
    }
}

const INTERVAL_MS: u64 = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brake_lets_one_line_a_second_through_and_counts_the_rest() {
        let mut brake = Brake::default();
        assert_eq!(brake.pass(Millis(5)), Some(Held(0)));
        assert_eq!(brake.pass(Millis(6)), None);
        assert_eq!(brake.pass(Millis(1004)), None);
        assert_eq!(brake.pass(Millis(1005)), Some(Held(2)));
        assert_eq!(brake.pass(Millis(2005)), Some(Held(0)));
    }

    #[test]
    fn what_was_held_back_is_told_in_the_end() {
        let mut brake = Brake::default();
        assert_eq!(brake.flush(Millis(0)), None);
        brake.pass(Millis(0));
        brake.pass(Millis(1));
        assert!(brake.is_holding());
        assert_eq!(brake.flush(Millis(1500)), Some(Held(1)));
        assert!(!brake.is_holding());
        assert_eq!(brake.flush(Millis(5000)), None);
    }
}
