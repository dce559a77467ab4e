//! Integration tests: one binary of modules.

mod store_contract;
mod support;
