//! Names and their addresses: a cache whose lookups run on helper threads, never in the loop.
//!
//! A thread exists only while there is something to look up; there are few of them, and more than
//! one, so that a domain whose servers are dead does not hold up the others.
//!
//! An answer is used while it is fresh, is used on while a newer one is being fetched, and is kept
//! when that fails; a name that cannot be resolved is asked for again after a growing pause, and only
//! while somebody wants it.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use mio::Waker;

use crate::deadline::Millis;

/// All names of all rules.
pub struct Names {
    entries: Vec<Entry>,
    desk: Arc<Desk>,
}

/// One of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameId(u32);

struct Entry {
    name: Box<str>,
    /// In order of preference, families in turn; the ports are 0.
    addrs: Vec<SocketAddr>,
    answered: Option<Millis>,
    asking: bool,
    failures: u32,
    retry: Millis,
    /// Somebody waits for the first address.
    awaited: bool,
    version: u32,
}

/// What became of a lookup.
#[derive(Debug)]
pub struct News {
    /// The name.
    pub id: NameId,
    /// The error when it failed.
    pub error: Option<io::Error>,
}

/// What loop and threads share.
struct Desk {
    state: Mutex<State>,
    waker: Waker,
}

#[derive(Default)]
struct State {
    questions: VecDeque<(u32, Box<str>)>,
    answers: Vec<(u32, io::Result<Vec<SocketAddr>>)>,
    threads: u8,
}

impl Names {
    /// No names yet; `waker` is woken when answers have come.
    pub fn new(waker: Waker) -> Names {
        Names { entries: Vec::new(), desk: Arc::new(Desk { state: Mutex::default(), waker }) }
    }

    /// The identity of `name`.
    pub fn add(&mut self, name: &str) -> NameId {
        let at = self.entries.iter().position(|entry| *entry.name == *name);
        let at = at.unwrap_or_else(|| {
            self.entries.push(Entry {
                name: name.into(),
                addrs: Vec::new(),
                answered: None,
                asking: false,
                failures: 0,
                retry: Millis(0),
                awaited: false,
                version: 0,
            });
            self.entries.len() - 1
        });
        NameId(at as u32)
    }

    /// The name itself.
    pub fn name(&self, id: NameId) -> &str {
        &self.entries[id.0 as usize].name
    }

    /// The addresses known so far, and a number that changes with them. Starts a lookup when they
    /// are older than `refresh` or there are none.
    pub fn addrs(&mut self, id: NameId, refresh: Duration, now: Millis) -> (&[SocketAddr], u32) {
        let entry = &self.entries[id.0 as usize];
        let fresh = entry.answered.is_some_and(|at| now < at.after(refresh));
        if !fresh && !entry.asking && now >= entry.retry {
            self.ask(id);
        }
        let entry = &self.entries[id.0 as usize];
        (&entry.addrs, entry.version)
    }

    /// Makes every answer old, so that the next use of a name starts a lookup at once. The addresses
    /// stay in use meanwhile.
    pub fn distrust(&mut self) {
        for entry in &mut self.entries {
            entry.answered = None;
            entry.retry = Millis(0);
        }
    }

    /// Whether a lookup is under way.
    pub fn is_asking(&self, id: NameId) -> bool {
        self.entries[id.0 as usize].asking
    }

    /// Keeps asking until there is an address, because somebody waits for it.
    pub fn await_first(&mut self, id: NameId) {
        self.entries[id.0 as usize].awaited = true;
    }

    /// Nobody waits for `id` any more.
    pub fn stop_waiting(&mut self, id: NameId) {
        self.entries[id.0 as usize].awaited = false;
    }

    /// When an awaited name is to be asked for again.
    pub fn next_retry(&self) -> Option<Millis> {
        let waiting = self.entries.iter().filter(|entry| entry.awaited && !entry.asking);
        waiting.map(|entry| entry.retry).min()
    }

    /// The awaited names whose pause is over.
    pub fn due(&self, now: Millis) -> Vec<NameId> {
        let all = (0..).zip(&self.entries);
        let due = all.filter(|(_, entry)| entry.awaited && !entry.asking && entry.retry <= now);
        due.map(|(at, _)| NameId(at)).collect()
    }

    /// Takes in the answers that have come.
    pub fn collect(&mut self, now: Millis) -> Vec<News> {
        let answers = std::mem::take(&mut self.desk.lock().answers);
        answers.into_iter().map(|(at, result)| self.take_in(at, result, now)).collect()
    }

    fn take_in(&mut self, at: u32, result: io::Result<Vec<SocketAddr>>, now: Millis) -> News {
        let entry = &mut self.entries[at as usize];
        entry.asking = false;
        let error = match result {
            Ok(addrs) => {
                // The same addresses in another order are no change.
                let mut known = addrs.iter().all(|addr| entry.addrs.contains(addr));
                known &= entry.addrs.iter().all(|addr| addrs.contains(addr));
                if !known {
                    entry.version += 1;
                }
                entry.addrs = addrs;
                entry.answered = Some(now);
                entry.failures = 0;
                entry.retry = Millis(0);
                entry.awaited = false;
                None
            }
            Err(error) => {
                let pause = FIRST_PAUSE * 2u32.saturating_pow(entry.failures.min(16));
                entry.failures += 1;
                entry.retry = now.after(pause.min(LONGEST_PAUSE));
                Some(error)
            }
        };
        News { id: NameId(at), error }
    }

    /// Starts a lookup of a name that none is under way for.
    pub fn ask(&mut self, id: NameId) {
        let entry = &mut self.entries[id.0 as usize];
        entry.asking = true;
        let mut state = self.desk.lock();
        state.questions.push_back((id.0, entry.name.clone()));
        if state.threads >= MOST_THREADS {
            return;
        }
        let desk = Arc::clone(&self.desk);
        let thread = thread::Builder::new().name("names".into()).stack_size(STACK);
        match thread.spawn(move || desk.answer_all()) {
            Ok(_) => state.threads += 1,
            // Those that run will come to it.
            Err(_) if state.threads > 0 => {}
            Err(error) => {
                // Handled like a lookup that failed: it backs off and is tried again.
                state.questions.pop_back();
                state.answers.push((id.0, Err(error)));
                let _ = self.desk.waker.wake();
            }
        }
    }
}

impl Desk {
    /// A thread: answers questions until there are none.
    fn answer_all(&self) {
        loop {
            let mut state = self.lock();
            let Some((at, name)) = state.questions.pop_front() else {
                state.threads -= 1;
                return;
            };
            drop(state);
            let answer = look_up(&name);
            self.lock().answers.push((at, answer));
            // Fails only when the loop is gone, and then nobody waits.
            let _ = self.waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The addresses of `name` with port 0, at least one and at most [`MOST_ADDRESSES`], without doubles,
/// IPv6 and IPv4 in turn as RFC 8305, section 4 has it, beginning with the family that the system
/// prefers. Blocks.
pub fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    let mut addrs: Vec<SocketAddr> = Vec::new();
    for addr in (name, 0).to_socket_addrs()? {
        if !addrs.contains(&addr) {
            addrs.push(addr);
        }
    }
    if addrs.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "it has no address"));
    }
    let mut ordered = in_turn(&addrs);
    ordered.truncate(MOST_ADDRESSES);
    Ok(ordered)
}

fn in_turn(addrs: &[SocketAddr]) -> Vec<SocketAddr> {
    let Some(first) = addrs.first() else { return Vec::new() };
    let (mut preferred, mut others): (VecDeque<SocketAddr>, VecDeque<SocketAddr>) =
        addrs.iter().copied().partition(|addr: &SocketAddr| addr.is_ipv4() == first.is_ipv4());
    let mut ordered = Vec::with_capacity(addrs.len());
    while ordered.len() < addrs.len() {
        ordered.extend(preferred.pop_front());
        ordered.extend(others.pop_front());
    }
    ordered
}

/// Addresses of a name that are of use: nobody waits for a seventeenth attempt, and as many attempts
/// can be told apart.
const MOST_ADDRESSES: usize = crate::token::ATTEMPTS as usize;

/// Lookups at a time.
const MOST_THREADS: u8 = 4;

/// After a lookup that failed; doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Virtual; the resolvers of musl and glibc touch a few tens of kilobytes.
const STACK: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn addrs(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect()
    }

    fn names() -> (mio::Poll, Names, NameId) {
        let poll = mio::Poll::new().unwrap();
        let waker = Waker::new(poll.registry(), mio::Token(0)).unwrap();
        let mut names = Names::new(waker);
        let id = names.add("example.test");
        assert_eq!(names.add("example.test"), id);
        (poll, names, id)
    }

    #[test]
    fn families_take_turns_and_the_preferred_one_begins() {
        assert_eq!(
            in_turn(&addrs(&["::1", "::2", "::3", "1.1.1.1"])),
            addrs(&["::1", "1.1.1.1", "::2", "::3"])
        );
        assert_eq!(in_turn(&[]), []);
    }

    #[test]
    fn a_failed_refresh_keeps_the_last_good_addresses() {
        let (_poll, mut names, id) = names();
        let good = addrs(&["192.0.2.1"]);
        names.take_in(0, Ok(good.clone()), Millis(0));
        let failed = Err(io::ErrorKind::TimedOut.into());
        assert!(names.take_in(0, failed, Millis(70_000)).error.is_some());
        // Long stale, but within the pause after the failure: used, and not asked for again.
        let (known, _) = names.addrs(id, Duration::from_secs(60), Millis(70_001));
        assert_eq!(known, good);
        assert!(!names.entries[0].asking);
    }

    #[test]
    fn pauses_grow_to_a_limit_and_end_with_an_answer() {
        let (_poll, mut names, _) = names();
        names.await_first(NameId(0));
        let mut pauses = Vec::new();
        for _ in 0..40 {
            names.take_in(0, Err(io::ErrorKind::TimedOut.into()), Millis(0));
            pauses.push(names.next_retry().expect("it is awaited").0);
        }
        assert_eq!(pauses[..4], [500, 1000, 2000, 4000]);
        assert_eq!(pauses[39], 30_000);
        names.take_in(0, Ok(addrs(&["192.0.2.1"])), Millis(0));
        assert_eq!(names.next_retry(), None);
    }

    #[test]
    fn only_another_set_of_addresses_is_a_change() {
        let (_poll, mut names, id) = names();
        let mut version = |list: &[&str]| {
            names.take_in(0, Ok(addrs(list)), Millis(0));
            names.addrs(id, Duration::from_secs(60), Millis(1)).1
        };
        let first = version(&["192.0.2.1", "192.0.2.2"]);
        assert_eq!(version(&["192.0.2.2", "192.0.2.1"]), first);
        assert_ne!(version(&["192.0.2.2"]), first);
    }

    #[test]
    fn the_thread_answers_and_ends() {
        let (mut poll, mut names, id) = names();
        let local = names.add("localhost");
        assert_eq!(names.addrs(local, Duration::ZERO, Millis(0)).0, []);
        let mut events = mio::Events::with_capacity(4);
        let mut news = Vec::new();
        while news.is_empty() {
            poll.poll(&mut events, Some(Duration::from_secs(10))).unwrap();
            news = names.collect(Millis(1));
        }
        assert!(news[0].error.is_none() && news[0].id == local && local != id);
        assert!(names.addrs(local, Duration::from_secs(1), Millis(2)).0[0].ip().is_loopback());
        while names.desk.lock().threads > 0 {
            thread::yield_now();
        }
    }
}
