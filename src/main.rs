//! The program: arguments to settings, settings to a server, its end to an exit code. It and the
//! self-test print by themselves; everything else logs.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use log::LevelFilter;

use tinyfwd::cli::{self, Command, Settings};
use tinyfwd::server::{self, Server};
use tinyfwd::{selftest, sys};

fn main() -> ExitCode {
    match cli::parse(std::env::args_os().skip(1)) {
        Err(errors) => {
            for error in errors {
                complain(&error);
            }
            ExitCode::from(WRONG_USE)
        }
        Ok(Command::Help) => print(&cli::help()),
        Ok(Command::Version) => print(concat!("tinyfwd ", env!("CARGO_PKG_VERSION"), "\n")),
        Ok(Command::SelfTest) => selftest::run(),
        Ok(Command::Run(settings)) => {
            start_log(settings.verbosity);
            match run(&settings) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    complain(&format_args!("tinyfwd: {error}"));
                    ExitCode::FAILURE
                }
            }
        }
    }
}

// Apart from `main`, so that what is on the stack while it reads arguments and starts the log does not
// lie below the loop for good.
#[inline(never)]
fn run(settings: &Settings) -> io::Result<()> {
    let options =
        server::Options { max_connections: settings.max_connections, drain: settings.drain };
    let mut server = Server::new(&settings.rules, options)?;
    let mut lines: String =
        server.listening().map(|listener| format!("listening on {listener}\n")).collect();
    lines.push_str("ready\n");
    sys::announce(lines);
    server.run()
}

fn complain(what: &dyn Display) {
    // Nobody may be listening; the exit code still tells.
    let _ = writeln!(io::stderr(), "{what}");
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// `RUST_LOG` has the last word, as users of env_logger expect.
#[inline(never)]
fn start_log(verbosity: i8) {
    let level = match verbosity {
        ..=-2 => LevelFilter::Error,
        -1 => LevelFilter::Warn,
        0 => LevelFilter::Info,
        1 => LevelFilter::Debug,
        2.. => LevelFilter::Trace,
    };
    env_logger::Builder::new()
        .filter_level(level)
        .filter_module(server::STATUS, LevelFilter::Info)
        .parse_env("RUST_LOG")
        .format(|out, record| writeln!(out, "{}: {}", name(record.level()), record.args()))
        .target(env_logger::Target::Pipe(Box::new(sys::StandardError::default())))
        .init();
}

fn name(level: log::Level) -> &'static str {
    match level {
        log::Level::Error => "error",
        log::Level::Warn => "warn",
        log::Level::Info => "info",
        log::Level::Debug => "debug",
        log::Level::Trace => "trace",
    }
}

const WRONG_USE: u8 = 2;
