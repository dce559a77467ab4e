//! The matrix of trees as sections of the document.

use super::super::page::table;
use super::{BOTH, Call, Command, CriuFault, Fault, Mode, RequestFault, Row, Verdict, cells, rows};

/// What stands in the document below the tables for one process.
pub(in super::super) fn sections() -> Vec<String> {
    vec![
        introduction(),
        failures(Command::Save, "A tree is saved, and ended"),
        failures(Command::SaveInPassing, "A tree is saved in passing"),
        failures(Command::Restore, "A tree is restored"),
    ]
}

fn introduction() -> String {
    format!(
        "\
## Whole process trees

The same for a tree of two processes that use GPUs, one of which they share, and a plain one, saved and rebuilt by a real CRIU: {count} cells, in `tests/it/matrix/trees`. *Staged* and *streamed* are the ways of [whole.md](whole.md). Beside what the tables say, it holds in every cell that

- the exit status, the JSON result and the last line on stderr agree, and both processes are found as they tell it. What is found running computes on, the plain process too where both do; and every digest is that of a job that nobody disturbed;
- no process of the tree is stopped, unless with 13; its root is there, unless the image is committed; of a restore that fails no process is left;
- the job's images are those of before, and the new one with exit 0 and 14, and perhaps with 13. The new one verifies. The job's log says what came of the save, and nothing with 13 and 16; an upload that stays open in the store is told of;
- no Complete of a save comes before `sealed.json` is stored, none of a restore before every chunk was copied; nobody is unlocked before all have their memory; of no process is the driver's restore asked for twice, and never with 20.
",
        count = cells().len()
    )
}

fn failures(command: Command, heading: &str) -> String {
    let columns = [
        "mode",
        "while",
        "what fails",
        "exit",
        "failed in",
        "the two processes",
    ];
    let rows = rows();
    let rows = rows.iter().filter(|row| row.command == command);
    let mut lines: Vec<Vec<String>> = Vec::new();
    for row in rows.map(line) {
        match lines.last_mut() {
            // The same of another failure.
            Some(last) if last[..2] == row[..2] && last[3..] == row[3..] => {
                last[2] = format!("{}; {}", last[2], row[2]);
            }
            _ => lines.push(row),
        }
    }
    table(heading, &columns, lines)
}

/// What the verdicts say, equal ones once.
fn each(verdicts: &[Verdict], say: impl Fn(&Verdict) -> String) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in verdicts.iter().map(say) {
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    parts.join(" or ")
}

fn line(row: &Row) -> Vec<String> {
    let mode = match row.modes {
        modes if modes == BOTH => "both",
        [Mode::Staged] => "staged",
        _ => "streamed",
    };
    vec![
        mode.to_owned(),
        row.made_in.to_owned(),
        said(row),
        each(&row.expected, |verdict| verdict.code.to_string()),
        each(&row.expected, |verdict| verdict.phase.to_owned()),
        each(&row.expected, |verdict| verdict.found.join(", ")),
    ]
}

/// What fails, and behind what.
pub(super) fn said(row: &Row) -> String {
    let mut parts = vec![what(row.fault)];
    parts.extend(row.behind.iter().map(|fault| what(*fault)));
    parts.join(", after ")
}

fn what(fault: Fault) -> String {
    match fault {
        Fault::Driver(call, how) => {
            let how = match how {
                Call::Answers(code) => format!("answers {code}"),
                Call::Denies(code) => format!("is done, and answers {code}"),
                Call::Pretends => "answers success, and is not done".to_owned(),
                Call::Death => "comes when its process has died".to_owned(),
            };
            format!("`{call}` {how}")
        }
        Fault::Criu(verb, how) => {
            let how = match how {
                CriuFault::Fails => "fails",
                CriuFault::FailsOnce => "fails once",
                CriuFault::Denies => "is done, and fails",
                CriuFault::Pretends => "ends well, and is not done",
                CriuFault::Death => "fails, and the first process has died",
            };
            format!("`criu {verb}` {how}")
        }
        Fault::Request(site, how) => {
            let how = match how {
                RequestFault::Refused => "403 for good",
                RequestFault::AnswerLost => "done, and the answer is lost",
                RequestFault::AnswersLost => "done, and every answer is lost",
                RequestFault::Unreachable => "never reaches the store",
            };
            format!("{} of the {}: {how}", site.op, site.what)
        }
    }
}
