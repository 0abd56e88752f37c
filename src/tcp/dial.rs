//! From an accepted client to a connected target: which addresses there are, which were tried, and
//! which attempts are under way.
//!
//! The addresses of one target race with a head start for each (RFC 8305); the next target gets its
//! turn only when every address of the one before has failed. This is a plain state machine: the
//! server opens the sockets and tells what became of them.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use mio::net::TcpStream;

use crate::sys::socket;
use crate::token::ATTEMPTS;

/// The attempts of one pair to reach a target.
#[derive(Default)]
pub struct Dial {
    /// Addresses of the current target that were not tried yet, the next one last.
    untried: Vec<SocketAddr>,
    running: Vec<Attempt>,
    started: u8,
    /// Index of the current target in the rule.
    target: usize,
    last_failure: Option<Failure>,
    /// The client's end came before any byte of it, so it may have left for good.
    pub client_may_have_left: bool,
    /// The target whose name was waited for last.
    pub waited_for: Option<usize>,
}

struct Attempt {
    number: u8,
    addr: SocketAddr,
    stream: TcpStream,
}

/// Why an address could not be reached.
#[derive(Debug)]
pub struct Failure {
    /// The address; `None` when there was none to try.
    pub addr: Option<SocketAddr>,
    /// What went wrong.
    pub error: io::Error,
}

/// What to do next for a dial.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Open a socket to this address.
    Try(SocketAddr),
    /// Wait for the attempts that run.
    Wait,
    /// Give the addresses of the target with this index ([`Dial::begin_target`]).
    NextTarget(usize),
}

impl Dial {
    /// Index of the target that is being tried.
    pub fn target(&self) -> usize {
        self.target
    }

    /// Goes on to the target with index `target`, which has these addresses in order of preference.
    pub fn begin_target(&mut self, target: usize, mut addrs: Vec<SocketAddr>) {
        self.target = target;
        addrs.reverse();
        self.untried = addrs;
    }

    /// What to do after an attempt has failed, or a target's addresses have come: try the next
    /// address at once.
    pub fn next_step(&mut self) -> Step {
        match self.untried.pop() {
            Some(addr) => Step::Try(addr),
            None if self.running.is_empty() => Step::NextTarget(self.target + 1),
            None => Step::Wait,
        }
    }

    /// What to do when the wait after the last attempt's start is over: with addresses left it was a
    /// head start, without it was the time to connect.
    pub fn waited(&mut self) -> Step {
        if self.untried.is_empty() {
            for attempt in std::mem::take(&mut self.running) {
                self.failed(attempt.addr, io::ErrorKind::TimedOut.into());
            }
        }
        self.next_step()
    }

    /// Whether the wait after an attempt's start is only a head start.
    pub fn has_untried(&self) -> bool {
        !self.untried.is_empty()
    }

    /// Whether an attempt is under way.
    pub fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// The number of the attempt that starts now, for its token.
    pub fn number(&mut self) -> u8 {
        let number = self.started;
        self.started = (self.started + 1) % ATTEMPTS;
        number
    }

    /// Keeps the socket of an attempt that was started.
    pub fn started(&mut self, number: u8, addr: SocketAddr, stream: TcpStream) {
        // Most dials have one, and a thousand clients may come at once.
        self.running.reserve_exact(1);
        self.running.push(Attempt { number, addr, stream });
    }

    /// Notes that an address could not be reached.
    pub fn failed(&mut self, addr: SocketAddr, error: io::Error) {
        self.last_failure = Some(Failure { addr: Some(addr), error });
    }

    /// The attempt with this number has connected; false when it is not a connection to the target
    /// after all, or there is no such attempt.
    pub fn has_reached_target(&self, number: u8) -> bool {
        let attempt = self.running.iter().find(|attempt| attempt.number == number);
        attempt
            .is_some_and(|attempt| !socket::is_connected_to_itself(&attempt.stream, attempt.addr))
    }

    /// Ends the attempt with this number and notes its socket's error; false when there is none.
    pub fn attempt_failed(&mut self, number: u8) -> bool {
        let Some((addr, stream)) = self.take(number) else { return false };
        let error = match stream.take_error() {
            Ok(Some(error)) | Err(error) => error,
            // It was closed under us without an error; no reply is what that amounts to.
            Ok(None) => io::ErrorKind::ConnectionRefused.into(),
        };
        self.failed(addr, error);
        true
    }

    /// The socket of the attempt with this number, which has connected.
    pub fn take(&mut self, number: u8) -> Option<(SocketAddr, TcpStream)> {
        let at = self.running.iter().position(|attempt| attempt.number == number)?;
        let attempt = self.running.swap_remove(at);
        Some((attempt.addr, attempt.stream))
    }

    /// Makes the coming close of every attempt a reset: its target may have accepted already.
    pub fn reset_on_close(&self) {
        for attempt in &self.running {
            socket::reset_on_close(&attempt.stream);
        }
    }

    /// Why the last address failed.
    pub fn failure(&mut self) -> Failure {
        self.last_failure.take().unwrap_or_else(|| Failure {
            addr: None,
            error: io::Error::new(io::ErrorKind::NotFound, "no address is known for it"),
        })
    }
}

/// How long an address is tried alone before the next one joins it: the "Connection Attempt Delay"
/// of RFC 8305, section 5.
pub const HEAD_START: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use super::*;

    fn addr(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    /// A socket to stand for an attempt; what becomes of it does not matter.
    fn stream() -> TcpStream {
        let listener = TcpListener::bind(addr(0)).unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    fn start(dial: &mut Dial, addr: SocketAddr) -> u8 {
        let number = dial.number();
        dial.started(number, addr, stream());
        number
    }

    #[test]
    fn addresses_join_after_their_head_start_and_the_next_target_waits_for_all_of_them() {
        let mut dial = Dial::default();
        dial.begin_target(0, vec![addr(1), addr(2)]);
        assert_eq!(dial.next_step(), Step::Try(addr(1)));
        let first = start(&mut dial, addr(1));
        assert!(dial.has_untried());
        assert_eq!(dial.waited(), Step::Try(addr(2)));
        let second = start(&mut dial, addr(2));
        assert!(!dial.has_untried());
        dial.take(first).expect("it runs");
        dial.failed(addr(1), ErrorKind::ConnectionRefused.into());
        assert_eq!(dial.next_step(), Step::Wait);
        dial.take(second).expect("it runs");
        dial.failed(addr(2), ErrorKind::ConnectionRefused.into());
        assert_eq!(dial.next_step(), Step::NextTarget(1));
    }

    #[test]
    fn a_refusal_brings_the_next_address_at_once() {
        let mut dial = Dial::default();
        dial.begin_target(0, vec![addr(1), addr(2)]);
        assert_eq!(dial.next_step(), Step::Try(addr(1)));
        dial.failed(addr(1), ErrorKind::ConnectionRefused.into());
        assert_eq!(dial.next_step(), Step::Try(addr(2)));
    }

    #[test]
    fn when_the_time_is_over_everything_that_runs_has_failed() {
        let mut dial = Dial::default();
        dial.begin_target(3, vec![addr(1)]);
        dial.next_step();
        let number = start(&mut dial, addr(1));
        assert_eq!(dial.waited(), Step::NextTarget(4));
        assert!(dial.take(number).is_none() && !dial.is_running());
        let failure = dial.failure();
        assert_eq!((failure.addr, failure.error.kind()), (Some(addr(1)), ErrorKind::TimedOut));
    }

    #[test]
    fn an_event_of_an_attempt_that_is_gone_is_nobodys() {
        let mut dial = Dial::default();
        dial.begin_target(0, vec![addr(1)]);
        dial.next_step();
        let number = start(&mut dial, addr(1));
        assert!(!dial.attempt_failed(number + 1));
        assert!(dial.attempt_failed(number));
        assert!(!dial.attempt_failed(number));
    }

    #[test]
    fn a_target_without_addresses_is_passed_over() {
        let mut dial = Dial::default();
        dial.begin_target(0, Vec::new());
        assert_eq!(dial.next_step(), Step::NextTarget(1));
        assert_eq!(dial.failure().addr, None);
    }
}
