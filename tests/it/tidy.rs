//! The house rules that a compiler does not know: style as a test.
//!
//! Every rule looks at the tree as it stands. A rule that finds nothing to look at fails, so that a moved folder does not switch it off.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ckptstream::error::ExitCode;

/// Where `unsafe` may stand: the driver's FFI and the codec's kernels in the product; the emulated driver; the test target's calls of libcuda.
const UNSAFE_FENCE: &[&str] = &[
    "src/driver/",
    "src/codec/",
    "crates/emulated-cuda/",
    "crates/testkit/src/target/cuda.rs",
];

/// Files or folders, and words that may not stand in their code: calls go one way only.
const DIRECTION: &[(&str, &[&str])] = &[
    (
        "src/driver/",
        &[
            "crate::store",
            "crate::pipeline",
            "crate::image",
            "crate::config",
            "aws_sdk_s3",
            "tokio",
        ],
    ),
    (
        "src/store/",
        &[
            "crate::driver",
            "crate::pipeline",
            "crate::image",
            "crate::manifest",
            "cudarc",
        ],
    ),
    (
        "src/plan.rs",
        &[
            "tokio",
            "aws_",
            "cudarc",
            "crate::store",
            "crate::pipeline",
            "crate::driver",
        ],
    ),
    (
        "src/manifest.rs",
        &["tokio", "aws_", "cudarc", "crate::store", "crate::pipeline"],
    ),
    (
        "src/codec/",
        &[
            "tokio",
            "aws_",
            "cudarc",
            "crate::store",
            "crate::driver",
            "crate::pipeline",
        ],
    ),
    (
        "src/pipeline/",
        &[
            "aws_",
            "cudarc",
            "crate::checkpoint",
            "crate::restore",
            "crate::session",
        ],
    ),
];

/// Words that may stand only under these places of the product.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("crate::cli", &["src/cli/"]),
    ("clap", &["src/cli/"]),
    ("indicatif", &["src/cli/"]),
    ("tracing_subscriber", &["src/cli/"]),
    ("aws_sdk_s3", &["src/store/s3.rs", "src/store/s3/"]),
    ("cudarc", &["src/driver/"]),
    // A test of kernels says which ones this CPU could not run.
    ("println!", &["src/cli/", "src/codec/planes/tests.rs"]),
    ("eprintln!", &["src/cli/"]),
    ("print!", &["src/cli/"]),
    ("eprint!", &["src/cli/"]),
    ("io::stdout", &["src/cli/"]),
    ("io::stderr", &["src/cli/"]),
    ("process::exit", &[]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Paths of all files under `places`, relative to the root, with one of these endings.
fn files(places: &[&str], endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = places
        .iter()
        .map(|place| root().join(place))
        .filter(|path| path.exists())
        .collect();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries =
                fs::read_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            open.extend(entries.map(|entry| entry.expect("a directory entry").path()));
        } else if endings
            .iter()
            .any(|ending| path.to_string_lossy().ends_with(ending))
        {
            let relative = path.strip_prefix(root()).expect("under the root");
            found.push(relative.to_string_lossy().into_owned());
        }
    }
    assert!(!found.is_empty(), "nothing to look at under {places:?}");
    found.sort();
    found
}

fn rust_files() -> Vec<String> {
    files(&["src", "crates", "tests", "benches", "examples"], &[".rs"])
}

/// Rust source without comments and the contents of literals, line by line.
fn code(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let skipped = literal_or_comment_len(rest);
        if skipped > 0 {
            out.extend(rest[..skipped].chars().filter(|c| *c == '\n'));
            rest = &rest[skipped..];
        } else {
            out.push(first);
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let mut len = first.len_utf8();
            if is_word(first) {
                // A whole word at once, so that the r of `for"` or `str"` starts no raw string.
                len = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
                out.push_str(&rest[first.len_utf8()..len]);
            }
            rest = &rest[len..];
        }
    }
    out
}

/// Bytes that a comment or literal at the start of `rest` takes; 0 when there is none.
fn literal_or_comment_len(rest: &str) -> usize {
    let until = |start: usize, end: &str| {
        rest[start..]
            .find(end)
            .map_or(rest.len(), |at| start + at + end.len())
    };
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return until(2, "*/");
    }
    let prefix = ["br", "cr", "r"]
        .iter()
        .find(|prefix| rest.starts_with(**prefix))
        .map_or(0, |prefix| prefix.len());
    let hashes = rest[prefix..]
        .bytes()
        .take_while(|byte| *byte == b'#')
        .count();
    if prefix > 0 && rest[prefix + hashes..].starts_with('"') {
        return until(prefix + hashes + 1, &format!("\"{}", "#".repeat(hashes)));
    }
    let prefix =
        usize::from(rest.starts_with("b\"") || rest.starts_with("c\"") || rest.starts_with("b'"));
    match rest.as_bytes().get(prefix) {
        Some(b'"') => escaped_end(rest, prefix + 1, b'"'),
        // A lifetime has no closing quote after one character.
        Some(b'\'') => {
            let inner = rest[prefix + 1..].chars().next();
            let closes = |c: char| rest[prefix + 1 + c.len_utf8()..].starts_with('\'');
            match inner {
                Some('\\') => escaped_end(rest, prefix + 1, b'\''),
                Some(c) if closes(c) => prefix + c.len_utf8() + 2,
                _ => 0,
            }
        }
        _ => 0,
    }
}

fn escaped_end(rest: &str, start: usize, quote: u8) -> usize {
    let bytes = rest.as_bytes();
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 2,
            byte if *byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Line numbers on which `word` stands by itself: no letter, digit or `_` touches it where it begins or ends with one.
fn lines_with(code: &str, word: &str) -> Vec<usize> {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let stands = |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            let before = is_word(line[..at].chars().next_back()) && is_word(word.chars().next());
            let after = is_word(line[at + word.len()..].chars().next())
                && is_word(word.chars().next_back());
            // `aws_` is a beginning, not a word.
            !before && (!after || word.ends_with('_'))
        })
    };
    code.lines()
        .enumerate()
        .filter(|(_, line)| stands(line))
        .map(|(index, _)| index + 1)
        .collect()
}

fn is_under(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| path.starts_with(place))
}

/// Fails with every breach at once.
fn assert_none(rule: &str, breaches: &[String]) {
    assert!(breaches.is_empty(), "{rule}:\n{}", breaches.join("\n"));
}

fn breaches(paths: &[String], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for path in paths {
        let code = code(&text(path));
        for word in words {
            found.extend(
                lines_with(&code, word)
                    .into_iter()
                    .map(|line| format!("{path}:{line}: {word}")),
            );
        }
    }
    found
}

#[test]
fn the_scanner_sees_code_only() {
    let source = "let a = \"unsafe \\\" x\"; // unsafe\nlet r = r#\"unsafe \" \"#; let c = '\"'; fn f<'a>(x: &'a str) { unsafe {} }\n/* unsafe\n*/ b'\\''; 'x'; unsafe_code; aws_sdk";
    let code = code(source);
    assert_eq!(lines_with(&code, "unsafe"), [2]);
    assert_eq!(lines_with(&code, "aws_"), [4]);
    assert_eq!(code.lines().count(), source.lines().count());
}

#[test]
fn unsafe_stays_inside_the_fence() {
    let outside: Vec<String> = rust_files()
        .into_iter()
        .filter(|path| !is_under(path, UNSAFE_FENCE))
        .collect();
    assert_none("unsafe outside the fence", &breaches(&outside, &["unsafe"]));
}

#[test]
fn calls_go_one_way() {
    for (place, words) in DIRECTION {
        let paths = files(&[place], &[".rs"]);
        assert_none(&format!("{place} must not know"), &breaches(&paths, words));
    }
    let product = files(&["src"], &[".rs"]);
    for (word, places) in ONLY_IN {
        let elsewhere: Vec<String> = product
            .iter()
            .filter(|path| !is_under(path, places))
            .cloned()
            .collect();
        assert_none(
            &format!("{word} belongs only in {places:?}"),
            &breaches(&elsewhere, &[word]),
        );
    }
}

#[test]
fn nothing_is_left_for_later() {
    assert_none(
        "unfinished code",
        &breaches(&rust_files(), &["todo!", "dbg!", "unimplemented!"]),
    );
}

#[test]
fn every_module_opens_with_what_it_is() {
    let silent: Vec<String> = files(&["src", "crates", "tests"], &[".rs"])
        .into_iter()
        // A file of unit tests belongs to the module beside it, which says what it is.
        .filter(|path| !path.ends_with("/tests.rs") && !text(path).starts_with("//!"))
        .collect();
    assert_none("no //! at the top", &silent);
}

#[test]
fn main_only_starts_the_library() {
    let lines = text("src/main.rs").lines().count();
    assert!(lines < 60, "src/main.rs has {lines} lines");
}

#[test]
fn every_exit_code_is_documented() {
    let doc = text("docs/exit-codes.md");
    let (table, _of_run) = doc
        .split_once("## `run` and `watch`")
        .expect("a section of the statuses of run");
    let rows = |part: &str| -> Vec<Vec<String>> {
        let cells = |line: &str| {
            line.trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().to_owned())
                .collect()
        };
        let is_row = |line: &&str| {
            line.starts_with("| ") && line.as_bytes().get(2).is_some_and(u8::is_ascii_digit)
        };
        part.lines().filter(is_row).map(cells).collect()
    };
    let documented: Vec<(String, String)> = rows(table)
        .iter()
        .map(|row| (row[0].clone(), row[4].trim_matches('`').to_owned()))
        .collect();
    let real: Vec<(String, String)> = ExitCode::ALL
        .iter()
        .map(|code| (code.code().to_string(), code.next().to_owned()))
        .collect();
    assert_eq!(
        documented, real,
        "docs/exit-codes.md and ExitCode::ALL, code and `next`"
    );
}

#[test]
fn every_promise_names_tests_that_exist() {
    let promises = text("docs/guarantees.md");
    let sources: String = files(&["src", "tests"], &["rs"])
        .iter()
        .map(|path| text(path))
        .collect();
    let quoted = promises.split('`').skip(1).step_by(2);
    // `it::crash::a_name` and, after it, `a_name` alone; modules and globs have shorter words, and no flag has so many.
    let names = quoted.filter_map(|words| words.rsplit("::").next());
    let names: Vec<&str> = names
        .filter(|name| name.matches('_').count() >= 3 && !name.contains([' ', '.', '*', '=']))
        .collect();
    assert!(names.len() > 20, "the promises are not where they were");
    let missing: Vec<&&str> = names
        .iter()
        .filter(|name| !sources.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "no such test: {missing:?}");
}

/// Promises without a patch in tests/mutations, and why.
const NOT_MUTATED: &[(u32, &str)] = &[];

/// What the head of a mutation says in the line `MEMBER: …`.
fn head_of<'a>(patch: &'a str, member: &str) -> Option<&'a str> {
    let head = patch.lines().take_while(|line| !line.starts_with("diff "));
    let mut found = head.filter_map(|line| line.strip_prefix(member)?.strip_prefix(": "));
    found.next().filter(|text| !text.trim().is_empty())
}

/// Whether there is such a test: of the library (`a::tests::name`, in the module's file or one below it), or in `tests/it`.
fn is_test(kind: &str, path: &str) -> bool {
    let Some((modules, name)) = path.rsplit_once("::") else {
        return false;
    };
    let modules: Vec<&str> = modules.split("::").collect();
    let root_of_kind = if kind == "lib" { "src" } else { "tests/it" };
    let places =
        (1..=modules.len()).map(|depth| format!("{root_of_kind}/{}", modules[..depth].join("/")));
    let mut sources = places
        .flat_map(|place| [format!("{place}.rs"), format!("{place}/mod.rs")])
        .filter_map(|file| fs::read_to_string(root().join(file)).ok());
    sources.any(|source| source.contains(&format!("fn {name}(")))
}

#[test]
fn every_promise_has_a_mutation_and_every_mutation_a_test() {
    let is_promise = |line: &str| line.split_once(". **")?.0.parse::<u32>().ok();
    let promises: Vec<u32> = text("docs/guarantees.md")
        .lines()
        .filter_map(is_promise)
        .collect();
    assert!(promises.len() > 20, "the promises are not where they were");
    let (mut flaws, mut covered) = (Vec::new(), BTreeSet::new());
    for path in files(&["tests/mutations"], &[".patch"]) {
        let patch = text(&path);
        let mut must = |holds: bool, what: &str| {
            if !holds {
                flaws.push(format!("{path}: {what}"));
            }
        };
        must(
            head_of(&patch, "Protects").is_some(),
            "no line `Protects: …`",
        );
        let guarantee = head_of(&patch, "Guarantee").and_then(|number| number.parse::<u32>().ok());
        must(
            guarantee.is_some_and(|number| promises.contains(&number)),
            "no line `Guarantee: N` with a number of docs/guarantees.md",
        );
        let starts_with_it =
            guarantee.is_some_and(|number| path.contains(&format!("/{number:02}-")));
        must(starts_with_it, "its name starts with another number");
        let (kind, tests) = head_of(&patch, "Test")
            .and_then(|line| line.split_once(' '))
            .unwrap_or_default();
        must(
            ["lib", "it"].contains(&kind),
            "no line `Test: lib|it NAME…`",
        );
        for test in tests.split(' ') {
            must(is_test(kind, test), &format!("no test {test:?}"));
        }
        let setting = head_of(&patch, "With");
        must(
            setting.is_none_or(|setting| setting.contains('=')),
            "`With` is NAME=VALUE",
        );
        let mut changed = patch
            .lines()
            .filter_map(|line| line.strip_prefix("+++ b/"))
            .peekable();
        must(changed.peek().is_some(), "no diff");
        must(
            changed.all(|file| file.starts_with("src/")),
            "only what is tested is mutated",
        );
        covered.extend(guarantee);
    }
    let bare = promises.iter().filter(|number| {
        let is_exempt = NOT_MUTATED
            .iter()
            .any(|(exempt, why)| exempt == *number && !why.is_empty());
        !covered.contains(number) && !is_exempt
    });
    flaws.extend(bare.map(|number| format!("guarantee {number} has no mutation")));
    assert_none("mutations", &flaws);
}

/// Numbers of the cases of S3 stores; those that are missing in between were never given.
const S3_CASES: &[u32] = &[
    1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 21, 22, 24, 25, 26, 27, 28, 29, 30,
    31, 32,
];

#[test]
fn every_case_of_stores_has_tests_that_exist_and_the_document_says_which() {
    let document = text("docs/stores.md");
    let mut flaws = Vec::new();
    let mut found = Vec::new();
    let table = text("tests/s3-cases.tsv");
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let mut cells = line.split('\t');
        let (case, what) = (cells.next().unwrap_or_default(), cells.next());
        let number = case
            .strip_prefix("S3-")
            .and_then(|it| it.parse::<u32>().ok());
        found.extend(number);
        if what.is_none_or(str::is_empty) {
            flaws.push(format!("{case}: no words"));
        }
        let tests: Vec<&str> = cells.collect();
        if tests.is_empty() {
            flaws.push(format!("{case}: no test"));
        }
        let row = document
            .lines()
            .find(|row| row.starts_with(&format!("| {case} |")));
        for test in tests {
            let (kind, path) = test.split_once(' ').unwrap_or_default();
            if !is_test(kind, path) {
                flaws.push(format!("{case}: no test {test:?}"));
            }
            if !row.is_some_and(|row| row.contains(path)) {
                flaws.push(format!(
                    "{case}: docs/stores.md does not name {path}: run scripts/test-stores.sh --cases"
                ));
            }
        }
    }
    assert_eq!(found, S3_CASES, "tests/s3-cases.tsv");
    assert_none("cases of stores", &flaws);
}

#[test]
fn the_changelog_has_a_place_for_what_is_new() {
    let changelog = text("CHANGELOG.md");
    let first = changelog.lines().find(|line| line.starts_with("## "));
    assert_eq!(first, Some("## Unreleased"));
}

#[test]
fn no_file_names_the_machine_it_was_written_on() {
    let marks = [concat!("/wo", "rk/"), concat!("/tmp/", "wt")];
    let endings = [".rs", ".md", ".toml", ".sh", ".json", ".yml", ".yaml"];
    let places = [
        "src",
        "crates",
        "tests",
        "benches",
        "examples",
        "docs",
        "scripts",
        "README.md",
        "CHANGELOG.md",
        "Cargo.toml",
    ];
    let mut found = Vec::new();
    for path in files(&places, &endings) {
        for (index, line) in text(&path).lines().enumerate() {
            let names = |mark: &str| {
                line.match_indices(mark).any(|(at, _)| {
                    !line[..at].ends_with(|c: char| {
                        c.is_alphanumeric() || matches!(c, '.' | '/' | '}' | '_' | '-')
                    })
                })
            };
            if marks.iter().any(|mark| names(mark)) {
                found.push(format!("{path}:{}: {line}", index + 1));
            }
        }
    }
    assert_none("paths of one machine", &found);
}
