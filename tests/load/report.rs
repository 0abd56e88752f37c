//! The one line of JSON that a command prints.
//!
//! Values are numbers and short strings, so there is no need for a JSON library. What counts as
//! a fault is told apart by the method that adds it.

use std::fmt::Write as _;

use crate::latency::Latencies;

/// Fields in the order in which they were added.
#[derive(Default)]
pub struct Report {
    fields: String,
    faults: u64,
}

impl Report {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn count(mut self, name: &str, value: u64) -> Self {
        self.push(name, &value.to_string());
        self
    }

    /// A count that makes the exit code 1 unless it is 0.
    pub fn fault(mut self, name: &str, value: u64) -> Self {
        self.faults += value;
        self.count(name, value)
    }

    pub fn number(mut self, name: &str, value: f64) -> Self {
        let value = if value.is_finite() { value } else { 0.0 };
        self.push(name, &format!("{value:.3}"));
        self
    }

    pub fn text(mut self, name: &str, value: Option<&str>) -> Self {
        let quoted = value.map_or_else(|| "null".to_owned(), quote);
        self.push(name, &quoted);
        self
    }

    /// p50, p95, p99 and the maximum, in microseconds.
    pub fn latencies(self, latencies: &Latencies) -> Self {
        self.number("p50_us", latencies.quantile_us(0.50))
            .number("p95_us", latencies.quantile_us(0.95))
            .number("p99_us", latencies.quantile_us(0.99))
            .number("max_us", latencies.longest_us())
    }

    pub fn is_clean(&self) -> bool {
        self.faults == 0
    }

    pub fn print(&self, command: &str) {
        println!("{{\"command\":{}{}}}", quote(command), self.fields);
    }

    fn push(&mut self, name: &str, value: &str) {
        let _ = write!(self.fields, ",\"{name}\":{value}");
    }
}

fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
