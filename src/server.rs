//! The poll loop. Owns the poll, every socket's registration, the tables of pairs and flows, the
//! deadlines, the run queue and the clock.
//!
//! One turn: wait, take in the events, let the run queue go on, relay datagrams, end what has timed
//! out, give back what is not needed. Nothing in a turn waits for anything but the poll, and with
//! nothing to do the poll waits without a timeout.

mod dial;
mod flows;
mod open;
mod route;
mod tcp;
mod udp;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::{TcpListener, UdpSocket};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Waker};
use slab::Slab;

use crate::deadline::{Deadlines, List, Millis};
use crate::pool::Pool;
use crate::resolve::{NameId, Names};
use crate::rule::Rule;
use crate::stats::Brake;
use crate::sys::{self, Signal, Signals};
use crate::tcp::{End, Pair};
use crate::token::{Role, Token};
use crate::udp::{FlowTable, Relay};
use flows::FlowSocket;
use route::Route;

/// What holds for all rules together.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// TCP connections at once; as many as there are descriptors for when `None`.
    pub max_connections: Option<u32>,
    /// How long connections may go on after the first signal to stop.
    pub drain: Duration,
}

/// The forwarder.
pub struct Server {
    poll: Poll,
    signals: Signals,
    clock: Instant,
    now: Millis,
    options: Options,
    routes: Vec<Route>,
    listeners: Vec<Listener>,
    /// TCP listeners that are off the poll because nothing more can be accepted.
    paused: Vec<u32>,
    /// Some of them are paused for want of descriptors, which others may give back.
    is_starved: bool,
    pairs: Slab<Pair>,
    /// Tells apart the users of a slab key, in tokens.
    generation: u32,
    /// Pairs that are over; their slots are freed after the current batch of events.
    ended: Vec<u32>,
    run_queue: VecDeque<Work>,
    ready_listeners: VecDeque<u32>,
    ready_flows: VecDeque<(u32, u32)>,
    pool: Pool,
    relay: Relay,
    shared: Shared,
    /// Open pairs whose target's socket has not got all its options yet.
    settling: List,
    /// Pairs whose client may have left before the target has answered.
    leaving: List,
    /// Pairs that wait for the first address of a name: key, generation.
    waiting: Vec<(NameId, u32, u32)>,
    most_flows: usize,
    out_of_descriptors: Brake,
    name_trouble: Brake,
    /// When idle memory is given back and held-back log lines are told; `None` while there is
    /// neither.
    housekeeping: Option<Millis>,
    state: State,
}

/// The tables that rules have their share in.
struct Shared {
    deadlines: Deadlines,
    flows: FlowTable<FlowSocket>,
    names: Names,
}

/// A listening socket.
struct Listener {
    socket: Socket,
    /// `127.0.0.1:32771/tcp -> host:80`
    name: Box<str>,
    route: u32,
    /// Its place in the rule's range of ports.
    offset: u16,
    port: u16,
    /// In the run queue (TCP) or among the ready listeners (UDP).
    queued: bool,
}

enum Socket {
    Tcp(TcpListener),
    Udp {
        socket: UdpSocket,
        /// The largest datagrams that may leave as a run; 0 when none may.
        largest_segment: u16,
        /// Datagrams that its receive buffer had no room for so far.
        overflows: u32,
    },
    Closed,
}

/// What goes on in the next turn without an event.
#[derive(Clone, Copy)]
enum Work {
    Pair { key: u32, generation: u32 },
    Accept(u32),
}

enum State {
    Running,
    Draining { until: Millis },
    Stopped,
}

impl Server {
    /// Opens every listener of every rule, or says which one could not be opened and why.
    pub fn new(rules: &[Rule], options: Options) -> io::Result<Server> {
        let descriptors = sys::raise_descriptor_limit()?;
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), Token::new(Role::Names, 0, 0).into())?;
        let mut deadlines = Deadlines::default();
        // No rule can choose this wait, so no other wait shares the list.
        let settling = deadlines.add(SETTLING);
        let leaving = deadlines.add(dial::LEAVE_GRACE);
        let mut shared =
            Shared { deadlines, flows: FlowTable::default(), names: Names::new(waker) };
        let (mut listeners, mut routes) = (Vec::new(), Vec::with_capacity(rules.len()));
        for rule in rules {
            let opened = open::open(rule, routes.len() as u32)?;
            routes.push(Route::new(rule, &opened, &mut shared));
            listeners.extend(opened);
        }
        // Only now: until here a signal may interrupt a lookup as it does with any program.
        let signals = Signals::new()?;
        register_fd(poll.registry(), signals.raw_fd(), Token::new(Role::Signals, 0, 0))?;
        let mut server = Server {
            poll,
            signals,
            clock: Instant::now(),
            now: Millis(0),
            options,
            routes,
            listeners,
            paused: Vec::new(),
            is_starved: false,
            pairs: Slab::new(),
            generation: 0,
            ended: Vec::new(),
            run_queue: VecDeque::new(),
            ready_listeners: VecDeque::new(),
            ready_flows: VecDeque::new(),
            pool: Pool::default(),
            relay: Relay::default(),
            shared,
            settling,
            leaving,
            waiting: Vec::new(),
            most_flows: 0,
            out_of_descriptors: Brake::default(),
            name_trouble: Brake::default(),
            housekeeping: None,
            state: State::Running,
        };
        for index in 0..server.listeners.len() as u32 {
            server.register_listener(index)?;
        }
        // Half of what is left stays for TCP, whatever UDP clients do.
        let left = descriptors.saturating_sub(server.listeners.len() as u64 + RESERVED);
        server.most_flows = usize::try_from(left / 2).unwrap_or(usize::MAX).max(1);
        Ok(server)
    }

    /// Every listener with its target, in the order of the rules.
    pub fn listening(&self) -> impl Iterator<Item = &str> {
        self.listeners.iter().map(|listener| &*listener.name)
    }

    /// Relays until a signal says stop. An error is one of the poll itself.
    pub fn run(&mut self) -> io::Result<()> {
        self.look_up_names();
        let mut events = Events::with_capacity(EVENTS);
        loop {
            let wait = self.wait();
            match self.poll.poll(&mut events, wait) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            self.now = Millis(self.clock.elapsed().as_millis() as u64);
            for event in &events {
                self.dispatch(event);
            }
            self.run_queue();
            self.relay_datagrams();
            self.expire();
            self.free_ended();
            self.keep_house();
            if self.is_done() {
                return Ok(());
            }
        }
    }

    /// How long the poll may wait: not at all with work left over, for ever with nothing to come.
    fn wait(&mut self) -> Option<Duration> {
        let queues = [self.run_queue.len(), self.ready_listeners.len(), self.ready_flows.len()];
        if queues != [0; 3] {
            return Some(Duration::ZERO);
        }
        let drained = match self.state {
            State::Draining { until } => Some(until),
            _ => None,
        };
        let next = [
            self.shared.deadlines.earliest(),
            self.shared.flows.next_expiry(),
            self.shared.names.next_retry(),
            self.housekeeping,
            drained,
        ];
        next.into_iter().flatten().min().map(|at| at.since(self.now))
    }

    fn dispatch(&mut self, event: &Event) {
        let token = Token::from(event.token());
        match token.role {
            Role::Signals => self.take_signals(),
            Role::Names => self.take_names(),
            Role::TcpListener => self.accept(token.key),
            Role::UdpListener => self.listener_ready(token.key),
            Role::Flow => self.flow_ready(token),
            Role::Client => self.client_event(token, event),
            Role::Target(attempt) => self.target_event(token, attempt, event),
        }
    }

    fn run_queue(&mut self) {
        for _ in 0..self.run_queue.len() {
            match self.run_queue.pop_front() {
                Some(Work::Pair { key, generation }) => self.resume_pair(key, generation),
                Some(Work::Accept(listener)) => {
                    self.listeners[listener as usize].queued = false;
                    self.accept(listener);
                }
                None => break,
            }
        }
    }

    fn expire(&mut self) {
        while let Some((key, list)) = self.shared.deadlines.pop(self.now) {
            if list == self.settling {
                self.settle(key);
            } else {
                self.pair_waited(key);
            }
        }
        while let Some(flow) = self.shared.flows.expire(self.now) {
            log::debug!("{}: flow timed out", flow.key.client());
            // The flow that is gone left room in the tables.
            self.housekeeping.get_or_insert(self.now.after(HOUSEKEEPING));
        }
        if self.shared.names.next_retry().is_some_and(|at| at <= self.now) {
            self.retry_names();
        }
    }

    fn take_signals(&mut self) {
        loop {
            match self.signals.take() {
                Ok(Some(Signal::Stop)) => self.stop(),
                Ok(Some(Signal::Status)) => self.log_status(),
                Ok(Some(Signal::Reload)) => {
                    log::info!("no file to reload; all names are looked up anew");
                    self.shared.names.distrust();
                    self.look_up_names();
                }
                Ok(None) => return,
                Err(error) => {
                    log::error!("read signals: {error}");
                    return;
                }
            }
        }
    }

    fn stop(&mut self) {
        if !matches!(self.state, State::Running) {
            log::info!("stopping at once");
            self.state = State::Stopped;
            return;
        }
        for listener in &mut self.listeners {
            if matches!(listener.socket, Socket::Tcp(_)) {
                listener.socket = Socket::Closed;
            }
        }
        self.paused.clear();
        self.is_starved = false;
        match (self.open_pairs(), self.options.drain) {
            (0, _) => log::info!("stopping"),
            (open, Duration::ZERO) => log::info!("stopping: {open} open connections are cut off"),
            (open, drain) => log::info!(
                "stopping: {open} open connections may go on for {drain:?}; \
                 a second signal cuts them off"
            ),
        }
        self.state = State::Draining { until: self.now.after(self.options.drain) };
    }

    fn is_draining(&self) -> bool {
        !matches!(self.state, State::Running)
    }

    /// Whether the loop is to end; then nothing is open any more.
    fn is_done(&mut self) -> bool {
        let done = match self.state {
            State::Running => false,
            State::Draining { until } => self.pairs.is_empty() || until <= self.now,
            State::Stopped => true,
        };
        if done {
            for key in self.pairs.iter().map(|(key, _)| key as u32).collect::<Vec<_>>() {
                self.end_pair(key, End::Stopped);
            }
            self.free_ended();
        }
        done
    }

    fn log_status(&self) {
        for route in &self.routes {
            let flows = self.shared.flows.open(route.flow_rule);
            log::info!(target: STATUS, "status {}: {} flows-open={flows}", route.label, route.counters);
        }
    }

    /// Gives back memory that is idle and tells of log lines that were held back; asks to be called
    /// again only while there is something of that.
    fn keep_house(&mut self) {
        if self.housekeeping.is_some_and(|at| at <= self.now) {
            self.housekeeping = None;
            self.pool.trim();
            self.relay.trim();
            self.shrink();
            self.flush_brakes();
            self.resume_accepting();
        }
        if self.housekeeping.is_none() && self.has_chores() {
            self.housekeeping = Some(self.now.after(HOUSEKEEPING));
        }
    }

    fn has_chores(&self) -> bool {
        self.pool.holds_memory()
            || self.relay.holds_memory()
            || self.is_starved
            || self.out_of_descriptors.is_holding()
            || self.name_trouble.is_holding()
            || self.routes.iter().any(Route::is_holding_lines)
    }

    fn shrink(&mut self) {
        if self.pairs.capacity() > 4 * self.pairs.len() {
            self.pairs.shrink_to_fit();
            self.shared.deadlines.shrink(self.pairs.capacity());
            self.ended.shrink_to_fit();
            self.run_queue.shrink_to_fit();
        }
        self.shared.flows.shrink();
        self.ready_flows.shrink_to_fit();
    }

    fn flush_brakes(&mut self) {
        let now = self.now;
        if let Some(held) = self.out_of_descriptors.flush(now) {
            log::warn!("out of descriptors{held}");
        }
        if let Some(held) = self.name_trouble.flush(now) {
            log::warn!("names could not be looked up{held}");
        }
        for route in &mut self.routes {
            if let Some(held) = route.unreachable.flush(now) {
                log::warn!("{}: target unreachable{held}", route.label);
            }
            if let Some(held) = route.flow_trouble.flush(now) {
                log::warn!("{}: datagrams or flows were dropped{held}", route.label);
            }
        }
    }

    fn register_listener(&mut self, index: u32) -> io::Result<()> {
        let registry = self.poll.registry();
        match &mut self.listeners[index as usize].socket {
            Socket::Tcp(socket) => {
                let token = Token::new(Role::TcpListener, index, 0);
                registry.register(socket, token.into(), Interest::READABLE)
            }
            Socket::Udp { socket, .. } => {
                let token = Token::new(Role::UdpListener, index, 0);
                registry.register(socket, token.into(), Interest::READABLE)
            }
            Socket::Closed => Ok(()),
        }
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        self.generation
    }
}

fn register_fd(registry: &Registry, fd: RawFd, token: Token) -> io::Result<()> {
    registry.register(&mut SourceFd(&fd), token.into(), Interest::READABLE)
}

/// Whether an error says that descriptors or memory for sockets have run out.
fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// The log target of status lines: they were asked for, so they are written at every verbosity.
pub const STATUS: &str = "status";

/// Events that one turn takes in: enough that the wait costs little beside them, and few enough that
/// their buffer needs no page of its own.
const EVENTS: usize = 64;

/// Descriptors that are not sockets of clients or targets: standard ones, poll, signals, waker, those
/// of a lookup.
const RESERVED: u64 = 12;

/// How long a connection may do without the options of one that lasts. Keepalive counts in seconds
/// and rules in milliseconds, so the odd nanosecond matters to nobody and keeps the list apart.
const SETTLING: Duration = Duration::new(2, 1);

const HOUSEKEEPING: Duration = Duration::from_secs(1);
