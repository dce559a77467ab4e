//! The integration tests: one binary, one module per subject.

/// What a node can do, measured.
mod bench;
/// Buckets that want more of a request than others do.
mod buckets;
/// The command line as a script sees it.
mod cli;
/// The configuration file and flags, from text to a resolved configuration.
mod config;
/// Death at every step.
mod crash;
/// Images that are not what was saved.
mod damage;
/// A rehearsal: the target locked and let go, a small image there and back.
mod drill;
/// Stores without conditional creates.
mod epochs;
/// What becomes of a target when the store fails after BEGIN.
mod fallback;
/// Driver calls that fail.
mod faults_driver;
/// Requests to the store that fail.
mod faults_store;
/// The golden image, through the real binary.
mod golden;
/// Every failure, and what must follow.
mod matrix;
/// The memory budget, held against what the kernel counts.
mod memory;
/// What is said of errors, word for word.
mod messages;
/// Notices of pre-emption, from every source.
mod notices;
/// The order of events, as the driver and the store see it.
mod order;
/// Who may have what.
mod ownership;
/// What would make a save fail, told beforehand.
mod preflight;
/// Saved and put back: every byte of every shape of memory.
mod roundtrip;
/// A job under `run` and `watch`.
mod run;
/// The protocol of a job's log under a scheduler that does its worst.
mod simulator;
/// The second place of a save, and the way from there into the store.
mod spill;
/// Single cases of stores and the way to them.
mod store_cases;
/// The promises of a store, against every kind of store that there is.
mod store_contract;
/// Our objects through other people's tools.
mod stranger;
/// Servers and processes that the tests start.
mod support;
/// The house rules that a compiler does not know.
mod tidy;
/// The timeline of a run.
mod timeline;
/// Attempts that came to nothing, and images that are old.
mod upkeep;
/// TLS and proxies on the way to the store.
mod way;
/// Whole process trees, with a real CRIU.
mod whole;
