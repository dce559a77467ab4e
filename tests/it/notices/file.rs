//! `preempt.file`: a file that appears, and everything else that can stand in its place. What is there is a notice, whatever it is; blind is only who cannot tell whether something is there.
//!
//! Silence is a file that is opened and says nothing: a FIFO.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Left::{Configured, CutTo, Told};
use super::Step::{self, *};
use super::{Case, TOLD, case, run};
use crate::support::s3_server::in_environment;

/// What a notice says for people.
const THERE: &str = "folder/notice is there";

fn make(name: &str, steps: Vec<Step>) -> Case {
    case(name, "file", "sources = [\"file\"]", steps)
}

/// Puts something there, in place of what is there: a look sees the one or the other.
fn puts(make: impl Fn(&Path) + 'static) -> Step {
    Does(Box::new(move |path| {
        let new = path.with_extension("new");
        make(&new);
        fs::rename(new, path).unwrap();
    }))
}

fn says(text: impl AsRef<[u8]>) -> Step {
    let text = text.as_ref().to_owned();
    puts(move |path| fs::write(path, &text).unwrap())
}

fn links_to(other: &'static str) -> Step {
    puts(move |path| symlink(other, path).unwrap())
}

/// It links to itself: nobody can tell what is there.
fn loops() -> Step {
    links_to("notice")
}

fn removes() -> Step {
    Does(Box::new(|path| match path.is_dir() {
        true => fs::remove_dir(path).unwrap(),
        false => fs::remove_file(path).unwrap(),
    }))
}

fn make_fifo(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.expect("mkfifo").success());
}

/// This is looked at, and all that comes of it is done: whoever could not look could, and cannot again.
fn looked_at(thing: Step) -> [Step; 6] {
    let why = "symbolic links";
    [loops(), Blind(why), thing, Sees, loops(), Blind(why)]
}

#[test]
fn whatever_is_there_is_a_notice() {
    if !in_environment("notices::file::whatever_is_there_is_a_notice", &[]) {
        return;
    }
    let mut cases = vec![make(
        "normal",
        vec![
            says(""),
            Notice(THERE, Configured),
            removes(),
            NoNotice,
            says("600s\n"),
            Notice(THERE, Told),
            removes(),
            NoNotice,
            says(" 9min 50s "),
            Notice(THERE, Told),
            Raised(3),
            NeverBlind,
        ],
    )];
    let mut garbage = Vec::new();
    let nonsense: [&[u8]; 9] = [
        b"soon",
        b"600",
        b"-5s",
        b"1e3s",
        b"99999999999999999999s",
        b"600s 600",
        b"\xff\xfe600s",
        b"\0",
        b" \n\n",
    ];
    for bytes in nonsense {
        garbage.extend([says(bytes), Notice(THERE, Configured), removes(), NoNotice]);
    }
    garbage.push(NeverBlind);
    cases.push(make("garbage", garbage));
    let things: [(&str, Step); 7] = [
        (
            // Nobody has the memory to read it to its end.
            "a file of 1 TiB",
            puts(|path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap()),
        ),
        ("a directory", puts(|path| fs::create_dir(path).unwrap())),
        ("a FIFO that nobody writes to", puts(make_fifo)),
        (
            "a FIFO whose writer says nothing",
            puts(|path| {
                make_fifo(path);
                let writer = fs::File::options().read(true).write(true).open(path);
                // Until this process ends.
                std::mem::forget(writer.unwrap());
            }),
        ),
        (
            "a socket",
            puts(|path| drop(UnixListener::bind(path).unwrap())),
        ),
        ("a device", links_to("/dev/zero")),
        // Root reads what has no permission bits; this, at 0, nobody.
        ("a file that cannot be read", links_to("/proc/self/mem")),
    ];
    for (name, thing) in things {
        let steps = vec![
            thing,
            Notice(THERE, Configured),
            removes(),
            NoNotice,
            // It is looked on.
            says("600s"),
            Notice(THERE, Told),
            NeverBlind,
        ];
        cases.push(make(name, steps));
    }
    run(cases);
}

#[test]
fn whoever_cannot_look_is_blind_and_what_stood_stands() {
    if !in_environment(
        "notices::file::whoever_cannot_look_is_blind_and_what_stood_stands",
        &[],
    ) {
        return;
    }
    let not_a_folder = || {
        Does(Box::new(|path| {
            let folder = path.parent().unwrap();
            fs::remove_dir_all(folder).unwrap();
            fs::write(folder, "").unwrap();
        }))
    };
    let a_folder = || {
        Does(Box::new(|path| {
            let folder = path.parent().unwrap();
            fs::remove_file(folder).unwrap();
            fs::create_dir(folder).unwrap();
        }))
    };
    let no_folder = || {
        Does(Box::new(|path| {
            fs::remove_dir_all(path.parent().unwrap()).unwrap();
        }))
    };
    let makes_the_folder = || {
        Does(Box::new(|path| {
            fs::create_dir(path.parent().unwrap()).unwrap();
        }))
    };
    let mut dangling = Vec::from(looked_at(links_to("other")));
    dangling.extend([
        Raised(0),
        links_to("other"),
        Sees,
        Does(Box::new(|path| {
            fs::write(path.with_file_name("other"), "600s").unwrap()
        })),
        Notice(THERE, Told),
        Raised(1),
    ]);
    run(vec![
        make(
            "error",
            vec![
                loops(),
                Blind("symbolic links"),
                says("600s"),
                Notice(THERE, Told),
                Sees,
                loops(),
                Blind("symbolic links"),
                Notice(THERE, Told),
                says("600s"),
                Sees,
                Raised(1),
                removes(),
                NoNotice,
            ],
        ),
        make(
            "no directory where the file would be",
            vec![
                not_a_folder(),
                Blind("Not a directory"),
                a_folder(),
                Sees,
                says("600s"),
                Notice(THERE, Told),
                // A folder that is gone has no file.
                no_folder(),
                NoNotice,
                makes_the_folder(),
                says(""),
                Notice(THERE, Configured),
                Sees,
            ],
        ),
        make("a link that leads nowhere", dangling),
    ]);
}

#[test]
fn it_comes_late_goes_comes_again_and_cuts_the_time() {
    if !in_environment(
        "notices::file::it_comes_late_goes_comes_again_and_cuts_the_time",
        &[],
    ) {
        return;
    }
    let mut late = Vec::from(looked_at(removes()));
    late.extend([
        Raised(0),
        says("600s"),
        Notice(THERE, Told),
        removes(),
        NoNotice,
        says(""),
        Notice(THERE, Configured),
        Raised(2),
    ]);
    let mut twice = vec![says("600s"), Notice(THERE, Told)];
    // Once more, and with more time: it is one notice, and gives none back.
    for again in ["600s", "2h"] {
        twice.extend(looked_at(says(again)));
        twice.extend([Notice(THERE, CutTo(TOLD)), Raised(1)]);
    }
    let little = Duration::from_secs(20);
    twice.extend([says("20s"), Notice(THERE, CutTo(little))]);
    twice.extend(looked_at(says("600s")));
    twice.extend([
        Notice(THERE, CutTo(little)),
        Raised(1),
        removes(),
        NoNotice,
        says("600s"),
        Notice(THERE, Told),
        Raised(2),
    ]);
    run(vec![make("late", late), make("twice", twice)]);
}
