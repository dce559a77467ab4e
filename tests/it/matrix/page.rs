//! The matrix as a document.

use super::driver::{self, ALL, Failure, LATE_MS, Row, TWO};
use super::store::{FAULTS, SITES, Site, Times};
use super::{Command, Verdict, cells, trees};

/// The whole document.
pub(super) fn text() -> String {
    let mut sections = vec![
        introduction(),
        calls(Command::Save, "Driver calls of a save"),
        calls(Command::Restore, "Driver calls of a restore"),
        requests(Command::Save, Times::Once, "Requests of a save: one fails"),
        requests(
            Command::Save,
            Times::Always,
            "Requests of a save: from one on they all fail",
        ),
        requests(
            Command::Restore,
            Times::Once,
            "Requests of a restore: one fails",
        ),
        requests(
            Command::Restore,
            Times::Always,
            "Requests of a restore: from one on they all fail",
        ),
    ];
    sections.extend(trees::page::sections());
    sections.join("\n")
}

fn introduction() -> String {
    let (all, two) = (list(&ALL), list(&TWO));
    format!(
        "\
# The failure matrix

What `checkpoint` and `restore --into-fresh` answer, and how the target is found afterwards, when one driver call or one kind of request to the store fails: {count} cells. `tests/it/matrix.rs` tries each of
them on the emulated driver and the S3 server of the test kit, and prints this page: with `UPDATE_DOCS=1` its test `the_document_is_the_table` writes it, without it compares.

Beside what the tables say, it holds in every cell that

- the exit status, the JSON result and the last line on stderr agree, and the target is found as they tell it. A target that is found running computes on, and every digest that it prints is that of a job that nobody disturbed;
- the job's images are those of before, and the new one with exit 0 and 14, and perhaps with 13. The new one verifies;
- the driver's Complete is called once with 0 and 14, and never without a committed image; in a restore never before every chunk was copied. The driver's restore is asked for once, and never with 20;
- an upload that stays open in the store is told of, unless the table says that it is not.

There is no spill, and no deadline.

A driver call is `FUNCTION#K`, the K-th of its kind in the life of the process. *Any code* is each of {all} (no header has the last one); where nothing is decided by the code, {two} stand for all. `cuEventQuery` has no row: only a copy that is alone under way is asked, which chance decides.

Of requests that fail for good, `403` is not tried again; the others are, for as long as `store.retry_timeout` says. A bar is where there is no body to cut.
",
        count = cells().len()
    )
}

fn list(codes: &[u32]) -> String {
    let codes: Vec<String> = codes.iter().map(u32::to_string).collect();
    codes.join(", ")
}

/// What the verdicts say, one after the other, equal ones once.
fn each(verdicts: &[Verdict], say: impl Fn(&Verdict) -> String) -> String {
    let mut parts: Vec<String> = verdicts.iter().map(say).collect();
    parts.dedup();
    parts.join(" or ")
}

pub(super) fn table(
    heading: &str,
    columns: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let names: Vec<String> = columns.iter().map(|&name| name.to_owned()).collect();
    let rule = format!("|{}\n", "---|".repeat(columns.len()));
    let rows: String = rows.into_iter().map(|row| line(&row)).collect();
    format!("## {heading}\n\n{}{rule}{rows}", line(&names))
}

fn calls(command: Command, heading: &str) -> String {
    let columns = ["while", "call", "which", "exit", "failed in", "target"];
    let mut rows: Vec<Vec<String>> = Vec::new();
    for row in driver::rows(command).iter().map(call) {
        match rows.last_mut() {
            // The same of another call.
            Some(last) if last[0] == row[0] && last[2..] == row[2..] => {
                last[1] = format!("{}, {}", last[1], row[1]);
            }
            _ => rows.push(row),
        }
    }
    table(heading, &columns, rows)
}

fn call(row: &Row) -> Vec<String> {
    let how = match row.failure {
        Failure::Answers(codes) if codes == ALL => "answers any code".to_owned(),
        Failure::Answers(codes) => format!("answers {}", list(codes)),
        Failure::Denies(codes) => format!("is done, and answers {}", list(codes)),
        Failure::Pretends => "answers success, and is not done".to_owned(),
        Failure::Late => format!("is {LATE_MS} ms late"),
        Failure::Death => "comes when the target has died".to_owned(),
    };
    let behind = row.behind.map_or_else(String::new, |fault| {
        let faults = fault.replace(";fault=", "` and `");
        format!(" after `{}`", faults.replace("=code:", "` answered `"))
    });
    let exit = each(&row.expected, |verdict| verdict.code.to_string());
    vec![
        row.made_in.to_owned(),
        format!("`{}`{behind}", row.call),
        how,
        exit,
        each(&row.expected, |verdict| verdict.phase.to_owned()),
        each(&row.expected, target),
    ]
}

fn target(verdict: &Verdict) -> String {
    let found = verdict.found;
    match verdict.told {
        Some(told) if told == found => found.to_owned(),
        Some(told) => format!("{found}; told: {told}"),
        None => format!("{found}; not touched"),
    }
}

fn requests(command: Command, times: Times, heading: &str) -> String {
    let mut columns = vec!["while", "request", "for"];
    columns.extend(FAULTS.map(|(_, name)| name));
    let sites = SITES.iter().filter(|site| site.command == command);
    table(heading, &columns, sites.map(|site| request(site, times)))
}

fn request(site: &Site, times: Times) -> Vec<String> {
    let mut cells = [site.made_in, site.op, site.what]
        .map(str::to_owned)
        .to_vec();
    cells.extend(FAULTS.map(|(fault, _)| {
        if !site.has(fault) {
            return "–".to_owned();
        }
        let expected = site.expected(fault, times);
        let verdicts = each(&expected, |verdict| {
            format!("{} {}", verdict.code, verdict.found)
        });
        if site.leaves_uploads(fault) {
            format!("{verdicts} (to be told of the upload that stays, and is not)")
        } else {
            verdicts
        }
    }));
    cells
}
