//! Load generator and targets for the tests and for `scripts/bench`.
//!
//! Each command is one thread around one poll loop, bounded in time or count, and prints one line
//! of JSON with what it saw. Servers print the address they are bound to first. The exit code is 0
//! when nothing went wrong, 1 when something was lost, mixed up or refused, 2 for wrong arguments.

mod args;
mod latency;
mod limits;
mod report;
mod stop;
mod tcp_bulk;
mod tcp_clients;
mod tcp_echo;
mod tcp_hold;
mod tcp_pingpong;
mod udp_batch;
mod udp_count;
mod udp_echo;
mod udp_oneway;
mod udp_pingpong;
mod udp_tag;

use std::io;
use std::process::ExitCode;

use args::{Asked, Command, Options};
use report::Report;

fn main() -> ExitCode {
    let (command, options) = match args::parse(std::env::args_os(), COMMANDS) {
        Ok(Asked::Run(command, options)) => (command, options),
        Ok(Asked::Help(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("load: {error}");
            return ExitCode::from(2);
        }
    };
    match (command.run)(&options) {
        Ok(report) => {
            report.print(command.name);
            if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("load {}: {error}", command.name);
            ExitCode::FAILURE
        }
    }
}

/// What a command does: options in, one report out.
pub type Run = fn(&Options) -> io::Result<Report>;

const COMMANDS: &[Command] = &[
    Command {
        name: "tcp-echo",
        about: "Server: sends every byte back, and the end after the last byte.",
        options: &["listen", "seconds"],
        run: tcp_echo::run,
    },
    Command {
        name: "tcp-sink",
        about: "Server: the other end of tcp-bulk (the client says what goes which way).",
        options: &["listen", "seconds"],
        run: tcp_bulk::serve,
    },
    Command {
        name: "tcp-source",
        about: "Server: the same as tcp-sink, under the name for downloads.",
        options: &["listen", "seconds"],
        run: tcp_bulk::serve,
    },
    Command {
        name: "tcp-pingpong",
        about: "Each connection sends a message, waits for all of it, compares it, and repeats.",
        options: &["to", "connections", "size", "seconds", "messages", "pace"],
        run: tcp_pingpong::run,
    },
    Command {
        name: "tcp-hold",
        about: "Opens connections, uses each, prints `held N` on standard error, holds them until \
                standard input ends or the time is over, uses each again and closes.",
        options: &["to", "connections", "size", "seconds", "rounds", "pace"],
        run: tcp_hold::run,
    },
    Command {
        name: "tcp-bulk",
        about: "Moves bytes to or from tcp-sink or tcp-source; every connection moves all of them.",
        options: &["to", "connections", "bytes", "direction", "seconds", "no-verify"],
        run: tcp_bulk::transfer,
    },
    Command {
        name: "udp-echo",
        about: "Server: sends every datagram back.",
        options: &["listen", "seconds", "skip-empty"],
        run: udp_echo::run,
    },
    Command {
        name: "udp-pingpong",
        about: "Each client keeps a window of tagged datagrams in flight and checks every reply.",
        options: &["to", "clients", "window", "size", "seconds", "messages", "pace"],
        run: udp_pingpong::run,
    },
    Command {
        name: "udp-oneway",
        about: "Sends tagged datagrams as fast as the kernel takes them, or at a rate.",
        options: &["to", "clients", "size", "seconds", "gso", "rate"],
        run: udp_oneway::run,
    },
    Command {
        name: "udp-count",
        about: "Server: counts the datagrams of udp-oneway; reports when standard input ends, on \
                SIGTERM, or when the time is over.",
        options: &["listen", "seconds", "gro"],
        run: udp_count::run,
    },
];
