//! One loop, so many times: what `scripts/bench-instructions.sh` runs under callgrind. In: a loop's name and how many passes over 512 KiB. Out: nothing; without
//! arguments the names, one a line. Two runs that differ by one pass differ by the instructions of one pass, whatever starting and making the bytes take.

mod kernels;

use std::env;
use std::process::ExitCode;

/// A unit of the widest filter.
const LEN: usize = 512 << 10;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let loops = kernels::all();
    let [name, pass_count] = arguments.as_slice() else {
        loops.iter().for_each(|each| println!("{}", each.name));
        return ExitCode::SUCCESS;
    };
    let wanted = loops.into_iter().find(|each| each.name == *name);
    let (Some(wanted), Ok(pass_count)) = (wanted, pass_count.parse::<u32>()) else {
        eprintln!("instructions: no loop {name}, or {pass_count} is no number of passes");
        return ExitCode::FAILURE;
    };
    let mut pass = wanted.over(LEN);
    (0..pass_count).for_each(|_| pass());
    ExitCode::SUCCESS
}
