//! The `ckptstream` command. Everything is in the library; this is the only process exit.

fn main() -> std::process::ExitCode {
    ckptstream::cli::main()
}
