//! The table of flows: which client and local address belong to which socket towards the target.
//!
//! Pure: no sockets, no clock. `S` is what a flow carries for its owner. Every flow of a rule is in
//! one of two lists, by the time of its last datagram: those that the target has never answered, and
//! those that it has. They time out from the front of their list, and when a rule has all the flows
//! it may have, the front of the unanswered list makes room, or else that of the other.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use slab::Slab;

use crate::deadline::{Deadlines, List, Millis};
use crate::sys::control::Local;

/// Who a flow belongs to: a client, and the local address and listener that it wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    client: [u8; 16],
    local: [u8; 16],
    /// Index of the listener.
    pub listener: u32,
    scope: u32,
    interface: u32,
    port: u16,
    shape: u8,
}

impl Key {
    /// The key of a datagram from `client` to `local`, which is known on wildcard listeners only.
    pub fn new(listener: u32, client: SocketAddr, local: Option<Local>) -> Key {
        let scope = if let SocketAddr::V6(v6) = client { v6.scope_id() } else { 0 };
        Key {
            client: octets(client.ip()),
            local: local.map_or([0; 16], |local| octets(local.ip)),
            listener,
            scope,
            interface: local.map_or(0, |local| local.interface),
            port: client.port(),
            shape: u8::from(client.is_ipv4())
                | u8::from(local.is_some()) << 1
                | u8::from(local.is_some_and(|local| local.ip.is_ipv4())) << 2,
        }
    }

    /// The client's address, of the family that its listener has.
    pub fn client(&self) -> SocketAddr {
        match ip(self.client, self.shape & 1 != 0) {
            IpAddr::V4(ip) => (ip, self.port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, self.port, 0, self.scope).into(),
        }
    }

    /// The address that answers must leave from.
    pub fn local(&self) -> Option<Local> {
        (self.shape & 2 != 0)
            .then(|| Local { ip: ip(self.local, self.shape & 4 != 0), interface: self.interface })
    }
}

/// One flow.
#[derive(Debug)]
pub struct Flow<S> {
    /// Whose it is.
    pub key: Key,
    /// What its owner keeps with it.
    pub socket: S,
    rule: u32,
    answered: bool,
}

/// All flows of all rules.
pub struct FlowTable<S> {
    flows: Slab<Flow<S>>,
    index: HashMap<Key, u32>,
    deadlines: Deadlines,
    rules: Vec<Rule>,
}

struct Rule {
    unanswered: List,
    answered: List,
    open: u32,
    most: u32,
}

impl<S> Default for FlowTable<S> {
    fn default() -> FlowTable<S> {
        FlowTable {
            flows: Slab::new(),
            index: HashMap::new(),
            deadlines: Deadlines::default(),
            rules: Vec::new(),
        }
    }
}

impl<S> FlowTable<S> {
    /// A rule whose flows end after `timeout` without a datagram (the unanswered ones after at most
    /// [`UNANSWERED`]), of which there may be `most`, at least 1. Returns its index.
    pub fn add_rule(&mut self, timeout: Duration, most: u32) -> u32 {
        let unanswered = self.deadlines.add(timeout.min(UNANSWERED));
        let answered = self.deadlines.add(timeout);
        self.rules.push(Rule { unanswered, answered, open: 0, most });
        self.rules.len() as u32 - 1
    }

    /// How many flows there are in all.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// How many flows `rule` has.
    pub fn open(&self, rule: u32) -> u32 {
        self.rules[rule as usize].open
    }

    /// The flow of this key.
    pub fn find(&self, key: &Key) -> Option<u32> {
        self.index.get(key).copied()
    }

    /// The flow in this slot, if it is still there.
    pub fn slot(&mut self, slot: u32) -> Option<&mut Flow<S>> {
        self.flows.get_mut(slot as usize)
    }

    /// The flow in this slot, to look at.
    pub fn peek(&self, slot: u32) -> Option<&Flow<S>> {
        self.flows.get(slot as usize)
    }

    /// Whether `rule` has all the flows that it may have.
    pub fn is_full(&self, rule: u32) -> bool {
        let rule = &self.rules[rule as usize];
        rule.open >= rule.most
    }

    /// The slot that the next [`insert`](Self::insert) will use.
    pub fn next_slot(&self) -> u32 {
        self.flows.vacant_key() as u32
    }

    /// Takes out the flow of `rule` that is the first to go when there must be room for another: the
    /// oldest that was never answered, or else the oldest.
    pub fn evict(&mut self, rule: u32) -> Option<Flow<S>> {
        let Rule { unanswered, answered, .. } = self.rules[rule as usize];
        let oldest = self.deadlines.oldest(unanswered).or(self.deadlines.oldest(answered))?;
        self.remove(oldest)
    }

    /// Adds a flow, unanswered; its key must not be in the table. Returns its slot.
    pub fn insert(&mut self, key: Key, rule: u32, socket: S, now: Millis) -> u32 {
        let slot = self.flows.insert(Flow { key, socket, rule, answered: false }) as u32;
        let before = self.index.insert(key, slot);
        debug_assert!(before.is_none());
        let rule = &mut self.rules[rule as usize];
        rule.open += 1;
        self.deadlines.set(slot, rule.unanswered, now);
        slot
    }

    /// Notes a datagram from the client.
    pub fn asked(&mut self, slot: u32, now: Millis) {
        let Some(flow) = self.flows.get(slot as usize) else { return };
        let rule = &self.rules[flow.rule as usize];
        let list = if flow.answered { rule.answered } else { rule.unanswered };
        self.deadlines.set(slot, list, now);
    }

    /// Notes a datagram from the target.
    pub fn answered(&mut self, slot: u32, now: Millis) {
        let Some(flow) = self.flows.get_mut(slot as usize) else { return };
        flow.answered = true;
        self.deadlines.set(slot, self.rules[flow.rule as usize].answered, now);
    }

    /// Takes out the flow in `slot`.
    pub fn remove(&mut self, slot: u32) -> Option<Flow<S>> {
        let flow = self.flows.try_remove(slot as usize)?;
        self.index.remove(&flow.key);
        self.deadlines.clear(slot);
        self.rules[flow.rule as usize].open -= 1;
        Some(flow)
    }

    /// Takes out a flow whose time is over.
    pub fn expire(&mut self, now: Millis) -> Option<Flow<S>> {
        let slot = self.deadlines.pop(now)?;
        self.remove(slot)
    }

    /// When the next flow will time out if nothing comes.
    pub fn next_expiry(&mut self) -> Option<Millis> {
        self.deadlines.next()
    }

    /// Gives back the memory that the flows that are left do not need.
    pub fn shrink(&mut self) {
        self.flows.shrink_to_fit();
        self.deadlines.shrink(self.flows.capacity());
        if self.index.capacity() > 4 * self.index.len() {
            self.index.shrink_to_fit();
        }
    }
}

impl<S> Flow<S> {
    /// Index of its rule.
    pub fn rule(&self) -> u32 {
        self.rule
    }
}

/// How long a flow lives that the target has never answered.
pub const UNANSWERED: Duration = Duration::from_secs(30);

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&ip.octets());
            octets
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn ip(octets: [u8; 16], v4: bool) -> IpAddr {
    if v4 {
        let [a, b, c, d, ..] = octets;
        Ipv4Addr::new(a, b, c, d).into()
    } else {
        Ipv6Addr::from(octets).into()
    }
}
