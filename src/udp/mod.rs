//! Datagrams through the forwarder: [`FlowTable`] remembers who talks to whom, [`Relay`] receives,
//! groups and sends them in batches.
//!
//! Passive like `tcp`: the server opens and registers the sockets and says what time it is. No
//! datagram is ever queued here; one that nobody has room for is dropped and counted.

mod flow;
mod relay;

pub use flow::{FlowTable, Key};
pub use relay::{Door, Received, Refused, Relay, SLOTS, Sent, Way};
