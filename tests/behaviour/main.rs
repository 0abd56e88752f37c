//! What tinyfwd does, seen from outside: every test runs the real binary, talks to it over the
//! network, by signals and through its log, and knows nothing of its inside.
//!
//! The binary is the one cargo built; `TINYFWD_BIN` names another one (the static build). Tests
//! run side by side: each has its own forwarder, its own ports and, where one is needed, its own
//! loopback addresses. Every wait has a deadline; no test asserts a speed.
//!
//! What a machine cannot do (no root, no IPv6) is skipped with a line that says so, and is a
//! failure where `CI=true`.

#![allow(clippy::unwrap_used, reason = "what a test cannot do ends the test")]

mod command_line;
mod descriptors;
mod harness;
mod names;
mod quiet;
mod signals;
mod tcp_bytes;
mod tcp_connect;
mod tcp_ends;
mod udp_datagrams;
mod udp_flows;
mod udp_marks;
