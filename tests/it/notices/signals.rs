//! Signals to ckptstream. A signal says nothing, so it cannot say nonsense: what comes nearest is one that is no notice. Silence is no signal, and nothing is blind that the kernel calls: what can be wrong is the configuration.
//!
//! Watching takes over the signals of the whole process, so these cases run one after another. The kernel hands on each signal at its own time: what is to have changed nothing has come when one for the job has, twice.

use ckptstream::config::{Config, Environment, Overrides, RawConfig};
use ckptstream::supervise::Doing;
use rustix::process::Signal;
use serde_json::json;

use super::Left::Configured;
use super::Step::{self, *};
use super::{Case, case, perform, runtime};
use crate::support::s3_server::in_environment;
use crate::support::scene::{Scene, TARGET, until};
use crate::support::supervised::{Job, REQUEUE, Supervised, status};

fn make(name: &str, config: &'static str, steps: Vec<Step>) -> Case {
    case(name, "signal", config, steps)
}

/// Signals, and two rounds through all of their ways.
fn after(signals: &[Signal]) -> Vec<Step> {
    let mut steps: Vec<Step> = signals.iter().map(|signal| Gets(*signal)).collect();
    for _ in 0..2 {
        steps.extend([Gets(Signal::WINCH), ForTheJob(Signal::WINCH)]);
    }
    steps
}

#[test]
fn those_of_the_configuration_are_notices_and_no_others() {
    let name = "notices::signals::those_of_the_configuration_are_notices_and_no_others";
    if !in_environment(name, &[]) {
        return;
    }
    let usual = "sources = [\"signals\"]";
    let mut cases = Vec::new();
    for (signal, text) in [(Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
        let steps = vec![
            Gets(signal),
            Notice(text, Configured),
            Raised(1),
            NeverBlind,
        ];
        cases.push(make("normal", usual, steps));
    }
    let mut harmless = after(&[Signal::HUP, Signal::CONT]);
    harmless.push(Quiet);
    // Late, and after those.
    harmless.extend([Gets(Signal::USR1), Notice("SIGUSR1", Configured)]);
    cases.push(make("SIGHUP and SIGCONT", usual, harmless));
    let mut others = Vec::new();
    for signal in [Signal::INT, Signal::QUIT, Signal::USR2] {
        others.extend([Gets(signal), ForTheJob(signal)]);
    }
    others.push(Quiet);
    cases.push(make("those of the job", usual, others));
    let mut twice = vec![Gets(Signal::TERM), Notice("SIGTERM", Configured)];
    twice.extend(after(&[Signal::TERM, Signal::USR1]));
    // The first one's time and its name.
    twice.extend([Notice("SIGTERM", Configured), Raised(1), NeverBlind]);
    cases.push(make("twice, and another", usual, twice));
    let chosen = "sources = [\"signals\"]\nsignals = [\"SIGUSR2\", \"SIGXCPU\", \"SIGINT\"]";
    for (signal, text) in [
        (Signal::USR2, "SIGUSR2"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::INT, "SIGINT"),
    ] {
        let mut steps = Vec::new();
        for signal in [Signal::TERM, Signal::USR1] {
            steps.extend([Gets(signal), ForTheJob(signal)]);
        }
        steps.extend(after(&[Signal::HUP]));
        steps.extend([Quiet, Gets(signal), Notice(text, Configured)]);
        cases.push(make("a set of its own", chosen, steps));
    }
    let mut none = Vec::new();
    for signal in [Signal::TERM, Signal::USR1] {
        none.extend([Gets(signal), ForTheJob(signal)]);
    }
    none.push(Quiet);
    let elsewhere = "sources = [\"socket\"]";
    cases.push(make("they are no source", elsewhere, none));
    runtime().block_on(async {
        for case in &cases {
            perform(case).await;
        }
    });
}

#[test]
fn one_at_the_start_is_heard_whatever_is_being_done() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET);
    let hold_up = |operation: &str, key: &str, from: u64| {
        let busy = json!({"status": 503, "code": "SlowDown"});
        let rule = json!({"op": operation, "key_contains": key, "from": from, "action": busy});
        scene.server.set_rules(&json!([rule]));
    };
    let gets_them = |run: &Supervised, doing: Doing| {
        until(|| status(&scene).doing == doing);
        for name in ["HUP", "CONT"] {
            run.process.signal(name);
        }
        for _ in 0..20 {
            let told = status(&scene);
            assert_eq!((told.doing, told.notices_heard), (doing, 0));
        }
        run.process.signal("TERM");
    };
    // Nothing is known yet: it is not started.
    hold_up("*", "/log/", 1);
    let run = job.start_patiently();
    gets_them(&run, Doing::Settling);
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(ended.said, [""; 0]);
    scene.server.set_rules(&json!([]));

    let mut run = job.start();
    run.wait_for("step 2 ");
    run.process.signal("TERM");
    assert_eq!(run.ends().code, REQUEUE);
    // What is being restored is not waited for: the image is what it was. The first look at each GPU's object is for what is in it.
    hold_up("GetObject", ".zst", 3);
    let run = job.start_patiently();
    gets_them(&run, Doing::Restoring);
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    scene.server.set_rules(&json!([]));
    assert_eq!(scene.images("job"), [1]);
    let mut next = job.start();
    next.wait_for("resumed ");
    next.wait_for("step ");
}

#[test]
fn what_cannot_be_a_notice_is_no_configuration() {
    for signals in [
        "[\"SIGKILL\"]",
        "[\"SIGTERM\", \"SIGSTOP\"]",
        "[\"SIGHUP\"]",
        "[\"SIGCONT\"]",
        "[\"SIGCHLD\"]",
        "[\"TERM\"]",
        "[\"15\"]",
        "[]",
    ] {
        let overrides = Overrides {
            job: Some("train".to_owned()),
            store: Some("s3://bucket".to_owned()),
            ..Overrides::default()
        };
        let raw = RawConfig::parse(&format!("[preempt]\nsignals = {signals}\n")).unwrap();
        let refused = Config::resolve(&overrides, &raw, &Environment::read()).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("preempt.signals"), "{signals}: {text}");
        assert!(text.contains("SIGTERM"), "{signals}: {text}");
    }
}
