//! A small TCP and UDP port forwarder; `tinyfwd` on the command line.
//!
//! The layers, from the bottom. `sys` names what the system can do and knows nothing of us. `pool`,
//! `deadline`, `token` and `stats` are the small things that many share. `tcp` and `udp` hold one
//! connection and the table of datagram flows: passive machines that are told what happened and what
//! time it is, and that never meet each other. `rule` is what a user asked for, `cli` and `config`
//! read it from words, and `resolve` turns its names into addresses. `server` owns the poll, the
//! sockets' registrations and the clock, and drives all of it on one thread.
//!
//! It is a library so that tests and fuzzing can reach the parts; the program is the only user.

pub mod cli;
pub mod config;
pub mod deadline;
pub mod pool;
pub mod resolve;
pub mod rule;
pub mod selftest;
pub mod server;
pub mod stats;
pub mod sys;
pub mod tcp;
pub mod token;
pub mod udp;
