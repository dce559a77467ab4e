use super::*;
use crate::journal::{FORMAT, Head, Journal};
use crate::writer::ProcessIdentity;
use std::process::{Child, Command};

/// A process, and what a saver of it left that died after these steps.
struct Scene {
    child: Child,
    _dir: tempfile::TempDir,
    left: Left,
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn scene(command: &str, steps: &[Step]) -> Scene {
    let child = Command::new("sleep").arg("60").spawn().unwrap();
    let target = Target::look(child.id()).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("state");
    let head = |target| Head {
        format: FORMAT,
        command: command.to_owned(),
        job: "train".to_owned(),
        store: "memory:".to_owned(),
        spill: None,
        by: ProcessIdentity::ours().unwrap(),
        target,
    };
    let journal = Journal::open(&dir, &target, head).unwrap();
    for step in steps {
        journal.step(step).unwrap();
    }
    drop(journal);
    let Some(Found::Dead(left)) = journal::all(&dir).unwrap().pop() else {
        panic!("its owner is gone")
    };
    Scene {
        child,
        _dir: temporary,
        left,
    }
}

fn verdict(scene: &Scene, state: Option<ProcessState>, durable: &Durable) -> (Deed, ExitCode) {
    let (deed, code, told) = judge(state.map(Some), &scene.left, durable);
    assert!(!told.is_empty());
    (deed, code)
}

fn image() -> Durable {
    Durable {
        image: Some(3),
        ..Durable::default()
    }
}

fn sealed() -> Durable {
    Durable {
        is_sealed: true,
        ..Durable::default()
    }
}

#[test]
fn only_a_lock_of_ours_is_undone() {
    let ours = scene("checkpoint", &[Step::Lock]);
    let begun = Step::Attempt {
        attempt: "0123456789abcdef0123456789abcdef".to_owned(),
        next_slot: 2,
    };
    let theirs = scene("checkpoint", &[begun]);
    let restored = scene("restore", &[Step::Restore, Step::RestoreComplete]);
    let none = Durable::default();
    let locked = Some(ProcessState::Locked);
    assert_eq!(verdict(&ours, locked, &none), (Deed::Unlock, ExitCode::Ok));
    assert_eq!(
        verdict(&restored, locked, &none),
        (Deed::Unlock, ExitCode::Ok)
    );
    assert_eq!(
        verdict(&theirs, locked, &none),
        (Deed::Nothing, ExitCode::NotOurs)
    );
}

#[test]
fn a_target_that_was_to_be_given_back_runs_only_if_nobody_else_has_the_job() {
    let steps = [Step::Lock, Step::Begin, Step::Sealed, Step::GiveBack];
    let given_back = scene("checkpoint", &steps);
    let locked = Some(ProcessState::Locked);
    assert_eq!(
        verdict(&given_back, locked, &sealed()),
        (Deed::Unlock, ExitCode::Ok)
    );
    // An image that was made of it meanwhile is of this very moment.
    assert_eq!(
        verdict(&given_back, locked, &image()),
        (Deed::Unlock, ExitCode::Ok)
    );
    let elsewhere = Durable {
        opened_since: Some("writer x opened the job".to_owned()),
        ..sealed()
    };
    assert_eq!(
        verdict(&given_back, locked, &elsewhere),
        (Deed::Nothing, ExitCode::Fenced)
    );
    let hidden = Durable {
        may_be_sealed: true,
        unknown: Some("not mounted".to_owned()),
        ..Durable::default()
    };
    assert_eq!(
        verdict(&given_back, locked, &hidden),
        (Deed::Nothing, ExitCode::Preflight)
    );
    assert_eq!(
        verdict(&given_back, None, &hidden),
        (Deed::Nothing, ExitCode::RolledBack),
        "it is not given up"
    );
}

#[test]
fn what_is_durable_decides_what_is_said_of_a_target_that_does_not_run() {
    use ProcessState::{Checkpointed, Checkpointing, Failed};
    let save = scene("checkpoint", &[Step::Lock, Step::Begin]);
    let elsewhere = Durable {
        opened_since: Some("writer x opened the job".to_owned()),
        ..image()
    };
    for (state, durable, code) in [
        (Checkpointing, Durable::default(), ExitCode::Lost),
        (Checkpointing, image(), ExitCode::CommittedTargetAstray),
        (Checkpointing, sealed(), ExitCode::Spilled),
        (Checkpointed, image(), ExitCode::CommittedTargetAstray),
        (Checkpointed, sealed(), ExitCode::Spilled),
        (Checkpointed, elsewhere, ExitCode::Fenced),
        (Checkpointed, Durable::default(), ExitCode::Lost),
        (Failed, Durable::default(), ExitCode::Lost),
    ] {
        assert_eq!(
            verdict(&save, Some(state), &durable),
            (Deed::Nothing, code),
            "{state} {durable:?}"
        );
    }
    let restore = scene("restore", &[Step::Restore]);
    for (state, code) in [
        (ProcessState::Restoring, ExitCode::RestoreFailed),
        (Failed, ExitCode::RestoreFailed),
        (Checkpointed, ExitCode::RestoreRefused),
    ] {
        assert_eq!(
            verdict(&restore, Some(state), &Durable::default()),
            (Deed::Nothing, code)
        );
    }
}

#[test]
fn what_runs_or_is_gone_is_closed_unless_its_save_may_become_an_image() {
    let save = scene("checkpoint", &[Step::Lock]);
    let running = Some(ProcessState::Running);
    assert_eq!(
        verdict(&save, running, &Durable::default()),
        (Deed::Close, ExitCode::Ok)
    );
    assert_eq!(
        verdict(&save, None, &Durable::default()),
        (Deed::Close, ExitCode::Ok)
    );
    assert_eq!(verdict(&save, None, &image()), (Deed::Forget, ExitCode::Ok));
    assert_eq!(
        verdict(&save, None, &sealed()),
        (Deed::Nothing, ExitCode::Spilled)
    );
}

#[test]
fn the_gravest_verdict_is_the_exit_code() {
    let row = |code| Row {
        pid: 1,
        name: String::new(),
        state: String::new(),
        job: String::new(),
        command: String::new(),
        attempt: None,
        image: None,
        done: "nothing",
        verdict: String::new(),
        next: "none",
        code,
    };
    let of = |codes: &[ExitCode]| Recovered {
        state_dir: String::new(),
        targets: codes.iter().map(|code| row(*code)).collect(),
    };
    assert_eq!(of(&[]).code(), ExitCode::Ok);
    assert_eq!(
        of(&[ExitCode::Ok, ExitCode::Spilled, ExitCode::NotOurs]).code(),
        ExitCode::Spilled
    );
    assert_eq!(
        of(&[ExitCode::Spilled, ExitCode::Lost]).code(),
        ExitCode::Lost
    );
}

#[test]
fn what_is_said_of_a_process_of_a_tree_goes_by_its_whole_tree() {
    use ProcessState::{Checkpointed, Checkpointing, Locked, Running};
    let tree = Step::Tree {
        root: 7,
        root_start: 1,
    };
    let streamed = [tree.clone(), Step::Lock, Step::Begin, Step::Sealed];
    let streamed = scene("checkpoint", &streamed);
    let staged = scene("checkpoint", &[tree, Step::Lock, Step::Stage]);
    let in_store = Durable {
        gpus_are_sealed: true,
        ..Durable::default()
    };
    let hidden = Durable {
        unknown: Some("no answer".to_owned()),
        ..Durable::default()
    };
    let none = Durable::default();
    for (scene, state, durable, deed, code) in [
        (
            &streamed,
            Some(Checkpointed),
            &in_store,
            Deed::Nothing,
            ExitCode::HostMemoryNotSaved,
        ),
        // It did not let its memory go, so nothing is left to be given back.
        (
            &streamed,
            Some(Checkpointing),
            &in_store,
            Deed::Nothing,
            ExitCode::Lost,
        ),
        (
            &streamed,
            Some(Checkpointed),
            &hidden,
            Deed::Nothing,
            ExitCode::Preflight,
        ),
        (
            &streamed,
            Some(Checkpointed),
            &image(),
            Deed::Nothing,
            ExitCode::CommittedTargetAstray,
        ),
        (
            &streamed,
            Some(Running),
            &in_store,
            Deed::Close,
            ExitCode::Ok,
        ),
        // What is sealed is of use to nobody else.
        (&streamed, None, &in_store, Deed::Close, ExitCode::Ok),
        (
            &staged,
            Some(Checkpointed),
            &none,
            Deed::Unstage,
            ExitCode::Ok,
        ),
        (&staged, Some(Locked), &none, Deed::Unlock, ExitCode::Ok),
        (
            &staged,
            Some(Checkpointed),
            &image(),
            Deed::Nothing,
            ExitCode::CommittedTargetAstray,
        ),
    ] {
        assert_eq!(
            verdict(scene, state, durable),
            (deed, code),
            "{state:?} {durable:?}"
        );
    }
}

#[test]
fn who_was_to_be_restored_and_is_locked_was_restored_by_us() {
    // The note of its end may come too late.
    let restored = scene("restore", &[Step::Restore]);
    assert_eq!(
        verdict(&restored, Some(ProcessState::Locked), &Durable::default()),
        (Deed::Unlock, ExitCode::Ok)
    );
}
