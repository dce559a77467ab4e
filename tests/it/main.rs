//! The integration tests: one binary, one module per subject.

/// The configuration file and flags, from text to a resolved configuration.
mod config;
/// The house rules that a compiler does not know.
mod tidy;
