//! Modes of the GPUs that no file and no call of the CUDA driver tells, as NVIDIA's own program `nvidia-smi` does.
//!
//! In: that program, where there is one; the UUIDs of our GPUs. Out: two checks, warnings at most. Nothing can fail: where it is missing, or says nothing that is understood, there are no checks.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Check, State, Subject};

/// It answers within this time, or is ended.
const LIMIT: Duration = Duration::from_secs(2);
/// Pause between two looks whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// What it is to say of each GPU, a line each.
const QUERY: &str = "--query-gpu=uuid,persistence_mode,ecc.mode.current";
/// Most bytes of its answer.
const ANSWER_LEN_MAX: u64 = 64 << 10;

const PERSISTENCE: Subject = Subject {
    name: "node.persistence",
    why: "without it the driver lets a GPU go that nobody uses, and takes seconds to come up again: those of a notice, or of a restore",
    gravity: State::Warning,
    mend: "run nvidia-persistenced, or `nvidia-smi -pm 1`",
};
const ECC: Subject = Subject {
    name: "node.ecc",
    why: "a bit that flips in GPU memory is saved as it is found: digests are of what the GPU holds",
    gravity: State::Warning,
    mend: "`nvidia-smi -e 1`, which counts when the GPU was reset",
};

/// What it says of the GPUs with these UUIDs.
pub(super) fn look(ours: &[String]) -> Vec<Check> {
    match ask() {
        Answer::Said(text) => checks(&text, ours),
        Answer::Nothing => Vec::new(),
        Answer::Late => {
            let found = format!("`nvidia-smi` did not answer within {LIMIT:?}");
            vec![PERSISTENCE.wrong_to_mend(found, "see `dmesg` for NVRM messages")]
        }
    }
}

enum Answer {
    Said(String),
    /// It is not there, or failed.
    Nothing,
    Late,
}

fn ask() -> Answer {
    let mut command = Command::new("nvidia-smi");
    command.args([QUERY, "--format=csv,noheader"]);
    let command = command.stdin(Stdio::null()).stderr(Stdio::null());
    let Ok(mut child) = command.stdout(Stdio::piped()).spawn() else {
        return Answer::Nothing;
    };
    let started = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => break,
            Ok(None) if started.elapsed() < LIMIT => std::thread::sleep(LOOK_EVERY),
            Ok(None) => {
                // One that hangs in the driver dies when the driver lets it, which is not waited for.
                let _ = child.kill();
                return Answer::Late;
            }
            Ok(Some(_)) | Err(_) => return Answer::Nothing,
        }
    }
    // A few words per GPU: the pipe has them all.
    let mut text = String::new();
    let said = child.stdout.take().map(|out| out.take(ANSWER_LEN_MAX));
    match said.map(|mut out| out.read_to_string(&mut text)) {
        Some(Ok(_len)) => Answer::Said(text),
        _ => Answer::Nothing,
    }
}

/// The checks of what it said.
fn checks(text: &str, ours: &[String]) -> Vec<Check> {
    let rows = text.lines().filter_map(|line| {
        let mut cells = line.split(',').map(str::trim);
        let row = (cells.next()?, cells.next()?, cells.next()?);
        ours.iter().any(|uuid| uuid == row.0).then_some(row)
    });
    let rows: Vec<_> = rows.collect();
    let persistence = rows.iter().map(|(uuid, mode, _)| (*uuid, *mode)).collect();
    let ecc = rows.iter().map(|(uuid, _, mode)| (*uuid, *mode)).collect();
    [of(&PERSISTENCE, persistence), of(&ECC, ecc)]
        .into_iter()
        .flatten()
        .collect()
}

/// One mode of all GPUs; `None` where no GPU has it.
fn of(subject: &Subject, modes: Vec<(&str, &str)>) -> Option<Check> {
    let with = |wanted: &str| {
        let found = modes.iter().filter(|(_, mode)| *mode == wanted);
        found.map(|(uuid, _)| *uuid).collect::<Vec<_>>()
    };
    match (with("Enabled").len(), with("Disabled")) {
        (0, off) if off.is_empty() => None,
        (on, off) if off.is_empty() => Some(subject.ok(format!("on, of {on} GPUs"))),
        (_, off) => Some(subject.wrong(format!("off: {}", off.join(", ")))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "GPU-daa54852-18c3-cacc-b758-75ce052242e8";
    const SECOND: &str = "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b";

    /// Name, state and finding of each check, for two GPUs of ours.
    fn told(text: &str) -> Vec<(&'static str, State, String)> {
        let checks = checks(text, &[FIRST.to_owned(), SECOND.to_owned()]);
        let told = checks.into_iter().map(|it| (it.name, it.state, it.found));
        told.collect()
    }

    #[test]
    fn an_h200_says_so() {
        let text = "GPU-daa54852-18c3-cacc-b758-75ce052242e8, Enabled, Enabled\n";
        assert_eq!(
            told(text),
            [
                ("node.persistence", State::Ok, "on, of 1 GPUs".to_owned()),
                ("node.ecc", State::Ok, "on, of 1 GPUs".to_owned()),
            ]
        );
    }

    #[test]
    fn a_gpu_of_ours_whose_mode_is_off_is_named() {
        let text = format!(
            "{FIRST}, Disabled, [N/A]\n{SECOND}, Enabled, Disabled\nGPU-of-others, Disabled, Disabled\n"
        );
        assert_eq!(
            told(&text),
            [
                ("node.persistence", State::Warning, format!("off: {FIRST}")),
                ("node.ecc", State::Warning, format!("off: {SECOND}")),
            ]
        );
    }

    #[test]
    fn what_is_not_understood_is_not_told() {
        let nothing = [
            "",
            "No devices were found\n",
            "GPU-of-others, Disabled, Disabled\n",
        ];
        for text in nothing {
            assert_eq!(told(text), [], "{text:?}");
        }
        let without = format!("{FIRST}, [Not Supported], [N/A]\n{SECOND}\n");
        assert_eq!(told(&without), []);
    }
}
