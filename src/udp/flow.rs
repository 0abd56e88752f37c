//! The table of flows: which client and local address belong to which socket towards the target.
//!
//! Pure: no sockets, no clock. `S` is what a flow carries for its owner. Every flow of a rule is in
//! one of two lists, by the time of its last datagram: those that the target has never answered, and
//! those that it has. They time out from the front of their list, and when a rule has all the flows
//! it may have, the front of the unanswered list makes room, or else that of the other.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use hashbrown::HashTable;
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
    /// Slots by the hash of their key, which is secret so that nobody can choose clients that
    /// collide. Only slots, because the keys are in the flows.
    index: HashTable<u32>,
    hasher: RandomState,
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
            index: HashTable::new(),
            hasher: RandomState::new(),
            deadlines: Deadlines::default(),
            rules: Vec::new(),
        }
    }
}

impl<S> FlowTable<S> {
    /// A rule whose flows end after `timeout` without a datagram (the unanswered ones after at most
    /// 30 s), of which there may be `most`, at least 1. Returns its index.
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
        let hash = self.hasher.hash_one(key);
        self.index.find(hash, |slot| self.flows[*slot as usize].key == *key).copied()
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

    /// The rule that has most flows; `None` when no rule has any.
    pub fn largest_rule(&self) -> Option<u32> {
        let (rule, largest) = (0..).zip(&self.rules).max_by_key(|(_, rule)| rule.open)?;
        (largest.open > 0).then_some(rule)
    }

    /// Adds a flow, unanswered; its key must not be in the table. Returns its slot.
    pub fn insert(&mut self, key: Key, rule: u32, socket: S, now: Millis) -> u32 {
        debug_assert!(self.find(&key).is_none());
        let slot = self.flows.insert(Flow { key, socket, rule, answered: false }) as u32;
        let hash = self.hasher.hash_one(key);
        let (flows, hasher) = (&self.flows, &self.hasher);
        self.index.insert_unique(hash, slot, |slot| hasher.hash_one(flows[*slot as usize].key));
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
        let hash = self.hasher.hash_one(flow.key);
        if let Ok(entry) = self.index.find_entry(hash, |at| *at == slot) {
            entry.remove();
        }
        self.deadlines.clear(slot);
        self.rules[flow.rule as usize].open -= 1;
        Some(flow)
    }

    /// Takes out a flow whose time is over.
    pub fn expire(&mut self, now: Millis) -> Option<Flow<S>> {
        let (slot, _) = self.deadlines.pop(now)?;
        self.remove(slot)
    }

    /// When the next flow will time out if nothing comes.
    pub fn next_expiry(&mut self) -> Option<Millis> {
        self.deadlines.earliest()
    }

    /// Gives back the memory that the flows that are left do not need.
    pub fn shrink(&mut self) {
        if self.flows.capacity() > 4 * self.flows.len() {
            self.flows.shrink_to_fit();
            self.deadlines.shrink(self.flows.capacity());
        }
        if self.index.capacity() > 4 * self.index.len() {
            let (flows, hasher) = (&self.flows, &self.hasher);
            self.index.shrink_to_fit(|slot| hasher.hash_one(flows[*slot as usize].key));
        }
    }
}

/// How long a flow lives that the target has never answered.
const UNANSWERED: Duration = Duration::from_secs(30);

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(port: u16) -> Key {
        Key::new(0, SocketAddr::from(([127, 0, 0, 1], port)), None)
    }

    fn table(timeout_s: u64, most: u32) -> FlowTable<()> {
        let mut table = FlowTable::default();
        table.add_rule(Duration::from_secs(timeout_s), most);
        table
    }

    #[test]
    fn a_key_gives_back_what_it_was_made_of() {
        let local = |ip: &str, interface| Some(Local { ip: ip.parse().unwrap(), interface });
        for (client, local) in [
            ("1.2.3.4:5", None),
            ("1.2.3.4:5", local("127.0.0.2", 0)),
            ("[::ffff:1.2.3.4]:5", local("::ffff:127.0.0.2", 0)),
            ("[fe80::1%3]:5", local("fe80::2", 3)),
        ] {
            let client: SocketAddr = client.parse().unwrap();
            let key = Key::new(9, client, local);
            assert_eq!((key.client(), key.local(), key.listener), (client, local, 9));
        }
    }

    #[test]
    fn the_same_client_at_two_local_addresses_has_two_flows() {
        let client = SocketAddr::from(([127, 0, 0, 1], 5));
        let local = |last| Some(Local { ip: Ipv4Addr::new(127, 0, 0, last).into(), interface: 0 });
        assert_ne!(Key::new(0, client, local(1)), Key::new(0, client, local(2)));
        assert_ne!(Key::new(0, client, local(1)), Key::new(1, client, local(1)));
    }

    #[test]
    fn unanswered_flows_expire_sooner_and_both_directions_refresh() {
        let mut table = table(60, 10);
        let asked = table.insert(key(1), 0, (), Millis(0));
        let answered = table.insert(key(2), 0, (), Millis(0));
        table.answered(answered, Millis(1));
        table.asked(asked, Millis(10_000));
        assert_eq!(table.next_expiry(), Some(Millis(40_000)));
        assert!(table.expire(Millis(39_999)).is_none());
        assert_eq!(table.expire(Millis(40_000)).unwrap().key, key(1));
        assert!(table.expire(Millis(60_000)).is_none());
        table.asked(answered, Millis(60_000));
        assert_eq!(table.next_expiry(), Some(Millis(120_000)));
        table.answered(answered, Millis(100_000));
        assert_eq!(table.expire(Millis(160_000)).unwrap().key, key(2));
        assert!(table.is_empty());
    }

    #[test]
    fn a_short_timeout_holds_for_unanswered_flows_too() {
        let mut table = table(2, 10);
        table.insert(key(1), 0, (), Millis(0));
        assert_eq!(table.next_expiry(), Some(Millis(2000)));
    }

    #[test]
    fn the_oldest_unanswered_flow_makes_room_first() {
        let mut table = table(60, 3);
        for port in 1..=3 {
            table.insert(key(port), 0, (), Millis(u64::from(port)));
        }
        let first = table.find(&key(1)).unwrap();
        table.answered(first, Millis(4));
        assert!(table.is_full(0));
        let evicted: Vec<_> = std::iter::from_fn(|| table.evict(0)).map(|flow| flow.key).collect();
        assert_eq!(evicted, [key(2), key(3), key(1)]);
    }

    #[test]
    fn the_rule_with_most_flows_is_found() {
        let mut table = table(60, 10);
        table.add_rule(Duration::from_secs(60), 10);
        assert_eq!(table.largest_rule(), None);
        table.insert(key(1), 1, (), Millis(0));
        assert_eq!(table.largest_rule(), Some(1));
        table.insert(key(2), 0, (), Millis(0));
        table.insert(key(3), 0, (), Millis(0));
        assert_eq!(table.largest_rule(), Some(0));
    }

    #[test]
    fn memory_goes_back_with_the_flows() {
        let mut table = table(60, 1_000_000);
        for port in 0..20_000 {
            table.insert(key(port), 0, (), Millis(0));
        }
        while table.expire(Millis(60_000)).is_some() {}
        table.shrink();
        assert_eq!((table.flows.capacity(), table.index.capacity()), (0, 0));
    }

    proptest! {
        #[test]
        fn slots_keys_and_counts_agree_whatever_happens(
            steps in prop::collection::vec((0u16..20, 0u8..5, 0u64..20_000), 1..300)
        ) {
            let mut table = table(40, 8);
            table.add_rule(Duration::from_secs(25), 5);
            let mut now = 0;
            for (port, what, passed) in steps {
                let rule = u32::from(port % 2);
                now += passed;
                while table.expire(Millis(now)).is_some() {}
                match (table.find(&key(port)), what) {
                    (None, _) => {
                        if table.is_full(rule) {
                            prop_assert!(table.evict(rule).is_some());
                        }
                        let next = table.next_slot();
                        prop_assert_eq!(table.insert(key(port), rule, (), Millis(now)), next);
                    }
                    (Some(slot), 0) => prop_assert!(table.remove(slot).is_some()),
                    (Some(slot), 1 | 2) => table.asked(slot, Millis(now)),
                    (Some(slot), _) => table.answered(slot, Millis(now)),
                }
                let flows: Vec<_> = table.flows.iter().map(|(slot, flow)| (slot as u32, flow.key)).collect();
                prop_assert_eq!(flows.len(), table.index.len());
                prop_assert!(flows.iter().all(|(slot, key)| table.find(key) == Some(*slot)));
                prop_assert!(table.open(0) <= 8 && table.open(1) <= 5);
                prop_assert_eq!(table.open(0) + table.open(1), table.len() as u32);
                prop_assert!(table.next_expiry().is_some() || table.is_empty());
            }
        }
    }
}
