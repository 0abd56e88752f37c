//! Thin names over the system: pipes and splice, socket options, batches of datagrams, signals,
//! descriptor limits. Knows nothing of rules, pairs or flows.
//!
//! All of it is safe code over `mio`, `nix` and `socket2`, but for [`mmsg`], whose two system calls
//! no crate offers with control data of its own for each datagram.

pub mod control;
pub mod mmsg;
mod pipe;
mod process;
mod signals;
pub mod socket;

pub use pipe::{Pipe, splice_in, splice_out};
pub use process::{MAPPED_ALLOCATION, StandardError, announce, raise_descriptor_limit};
pub use signals::{Signal, Signals};
