//! Timeouts of many things with few distinct lengths: a FIFO list per length, keyed by slab key.
//!
//! All members of a list wait equally long, so the list is in order of time by itself and putting a
//! member at its end is all that a timer needs. A key is in one list at most. A small heap holds one
//! entry for each list that has members; the entry may lag behind its list (it is never too late)
//! and is put right when it comes up. Nothing here reads a clock.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::time::Duration;

/// A point in time: whole milliseconds since the server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Millis(pub u64);

impl Millis {
    /// The time that is `wait` later, rounded up to whole milliseconds.
    pub fn after(self, wait: Duration) -> Millis {
        Millis(self.0.saturating_add(wait.as_nanos().div_ceil(1_000_000) as u64))
    }

    /// How long from `earlier` until this; zero when it is not later.
    pub fn since(self, earlier: Millis) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// One list of a [`Deadlines`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List(u32);

/// Lists of keys in order of their time.
#[derive(Default)]
pub struct Deadlines {
    lists: Vec<Ends>,
    nodes: Vec<Node>,
    /// One `(time, list)` for each list with members, its time not later than that of its head.
    due: BinaryHeap<Reverse<(Millis, u32)>>,
}

impl Deadlines {
    /// A list of its own, whose members wait for `timeout`.
    pub fn add(&mut self, timeout: Duration) -> List {
        self.lists.push(Ends { timeout, head: NONE, tail: NONE, armed: false });
        List(self.lists.len() as u32 - 1)
    }

    /// The list for `timeout`, shared with everyone who waits equally long.
    pub fn shared(&mut self, timeout: Duration) -> List {
        match self.lists.iter().position(|list| list.timeout == timeout) {
            Some(at) => List(at as u32),
            None => self.add(timeout),
        }
    }

    /// Starts (or starts anew) the wait of `key` in `list`; it leaves the list that it was in.
    pub fn set(&mut self, key: u32, list: List, now: Millis) {
        let index = key as usize;
        if index >= self.nodes.len() {
            self.nodes.resize(index + 1, Node::default());
        } else {
            self.clear(key);
        }
        let ends = &mut self.lists[list.0 as usize];
        let at = now.after(ends.timeout);
        self.nodes[index] = Node { at, prev: ends.tail, next: NONE, list: list.0 };
        match ends.tail {
            NONE => ends.head = key,
            tail => self.nodes[tail as usize].next = key,
        }
        ends.tail = key;
        if !ends.armed {
            ends.armed = true;
            self.due.push(Reverse((at, list.0)));
        }
    }

    /// Takes `key` out of its list, if it is in one.
    pub fn clear(&mut self, key: u32) {
        let Some(node) = self.nodes.get_mut(key as usize) else { return };
        let Node { prev, next, list, .. } = std::mem::take(node);
        if list == NONE {
            return;
        }
        let ends = &mut self.lists[list as usize];
        match prev {
            NONE => ends.head = next,
            prev => self.nodes[prev as usize].next = next,
        }
        match next {
            NONE => ends.tail = prev,
            next => self.nodes[next as usize].prev = prev,
        }
    }

    /// The member of `list` that has waited longest.
    pub fn oldest(&self, list: List) -> Option<u32> {
        let head = self.lists[list.0 as usize].head;
        (head != NONE).then_some(head)
    }

    /// The next time at which [`pop`](Self::pop) will have something.
    pub fn earliest(&mut self) -> Option<Millis> {
        loop {
            let mut top = self.due.peek_mut()?;
            let Reverse((at, list)) = *top;
            let ends = &mut self.lists[list as usize];
            if ends.head == NONE {
                ends.armed = false;
                PeekMut::pop(top);
                continue;
            }
            let head = self.nodes[ends.head as usize].at;
            if head <= at {
                return Some(at);
            }
            *top = Reverse((head, list));
        }
    }

    /// A key whose wait is over, and the list that it was in; it is in none afterwards.
    pub fn pop(&mut self, now: Millis) -> Option<(u32, List)> {
        if self.earliest()? > now {
            return None;
        }
        let Reverse((_, list)) = *self.due.peek()?;
        let key = self.lists[list as usize].head;
        self.clear(key);
        Some((key, List(list)))
    }

    /// Gives back the memory for keys from `keys` on; none of them may be in a list.
    pub fn shrink(&mut self, keys: usize) {
        if keys < self.nodes.len() {
            debug_assert!(self.nodes[keys..].iter().all(|node| node.list == NONE));
            self.nodes.truncate(keys);
            self.nodes.shrink_to_fit();
        }
    }
}

#[derive(Clone, Copy)]
struct Ends {
    timeout: Duration,
    head: u32,
    tail: u32,
    /// Whether the heap has an entry for this list.
    armed: bool,
}

#[derive(Clone, Copy)]
struct Node {
    at: Millis,
    prev: u32,
    next: u32,
    list: u32,
}

impl Default for Node {
    fn default() -> Node {
        Node { at: Millis(0), prev: NONE, next: NONE, list: NONE }
    }
}

/// Stands for no key and for no list.
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn nothing_is_due_when_nothing_waits() {
        let mut deadlines = Deadlines::default();
        deadlines.add(ms(5));
        assert_eq!(deadlines.earliest(), None);
        assert_eq!(deadlines.pop(Millis(u64::MAX)), None);
    }

    #[test]
    fn the_earliest_of_all_lists_comes_first() {
        let mut deadlines = Deadlines::default();
        let (long, short) = (deadlines.add(ms(100)), deadlines.add(ms(10)));
        deadlines.set(1, long, Millis(0));
        deadlines.set(2, short, Millis(50));
        assert_eq!(deadlines.earliest(), Some(Millis(60)));
        assert_eq!(deadlines.pop(Millis(59)), None);
        assert_eq!(deadlines.pop(Millis(60)), Some((2, short)));
        assert_eq!(deadlines.earliest(), Some(Millis(100)));
    }

    #[test]
    fn a_member_that_starts_anew_goes_behind_the_others() {
        let mut deadlines = Deadlines::default();
        let list = deadlines.shared(ms(10));
        assert_eq!(deadlines.shared(ms(10)), list);
        deadlines.set(1, list, Millis(0));
        deadlines.set(2, list, Millis(1));
        deadlines.set(1, list, Millis(5));
        assert_eq!(deadlines.oldest(list), Some(2));
        assert_eq!(deadlines.pop(Millis(20)), Some((2, list)));
        assert_eq!(deadlines.pop(Millis(20)), Some((1, list)));
        assert_eq!(deadlines.oldest(list), None);
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_table(
            steps in prop::collection::vec((0u32..12, 0usize..4, 0u64..40), 1..200)
        ) {
            let mut deadlines = Deadlines::default();
            let lists = [deadlines.add(ms(7)), deadlines.add(ms(30)), deadlines.add(ms(30))];
            let waits = [7, 30, 30];
            let mut table = std::collections::BTreeMap::new();
            let mut now = 0;
            for (key, what, passed) in steps {
                now += passed;
                while let Some((popped, _)) = deadlines.pop(Millis(now)) {
                    let at: u64 = table.remove(&popped).expect("only what waits is due");
                    prop_assert!(at <= now);
                }
                prop_assert!(table.values().all(|at| *at > now));
                if let Some(list) = lists.get(what) {
                    deadlines.set(key, *list, Millis(now));
                    table.insert(key, now + waits[what]);
                } else {
                    deadlines.clear(key);
                    table.remove(&key);
                }
                prop_assert_eq!(deadlines.earliest(), table.values().min().copied().map(Millis));
            }
        }
    }
}
