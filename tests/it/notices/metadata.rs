//! The metadata servers of EC2, Compute Engine and Azure, against `testkit metadata`: all six columns for each.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::Left::{self, Configured, Told};
use super::Step::{self, *};
use super::{Case, PATIENCE, TOLD, case, run, runtime, start, until};
use crate::support::s3_server::in_environment;

const AWS_TOKEN: &str = "/latest/api/token";
const AWS_ACTION: &str = "/latest/meta-data/spot/instance-action";
const GCP_PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
const GCP_MAINTENANCE: &str = "/computeMetadata/v1/instance/maintenance-event";
const AZURE_EVENTS: &str = "/metadata/scheduledevents";
const AZURE_NAME: &str = "/metadata/instance/compute/name";

/// What the clouds have in common, to make the cases of which none may be without.
struct Cloud {
    source: &'static str,
    config: &'static str,
    path: &'static str,
    notice: Value,
    text: &'static str,
    left: Left,
    /// Status of the answers when there is no notice.
    silence: u64,
    /// What a server may say that is no answer to the question.
    garbage: Vec<String>,
}

/// A script in which a path holds a value.
fn holds(path: &str, value: &Value) -> Value {
    json!({"values": {path: value}})
}

/// A script in which every request for a path has this answer.
fn always(path: &str, action: &Value) -> Value {
    json!({"rules": [{"path": path, "always": true, "action": action}]})
}

/// As an instance action has it.
fn rfc3339(left: Duration) -> String {
    humantime::format_rfc3339_seconds(SystemTime::now() + left).to_string()
}

fn action(action: &str, time: &str) -> Value {
    json!({"action": action, "time": time})
}

fn event(kind: &str, vm: &str, not_before: &str) -> Value {
    json!({
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventStatus": if not_before.is_empty() { "Started" } else { "Scheduled" },
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["other-1", vm],
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1
    })
}

fn events(events: &[Value]) -> Value {
    json!({"DocumentIncarnation": 2, "Events": events})
}

/// As a scheduled event has it.
fn rfc1123(left: Duration) -> String {
    httpdate::fmt_http_date(SystemTime::now() + left)
}

fn aws() -> Cloud {
    let mut garbage = vec!["<html>Sign in to the network</html>".to_owned()];
    garbage.extend(["", "[]", "null", "{\"time\":5}", "{\"action\":5}"].map(str::to_owned));
    Cloud {
        source: "aws",
        config: "sources = [\"aws\"]",
        path: AWS_ACTION,
        notice: action("terminate", &rfc3339(TOLD)),
        text: "terminate",
        left: Told,
        silence: 404,
        garbage,
    }
}

fn gcp() -> Cloud {
    Cloud {
        source: "gcp preempted",
        config: "sources = [\"gcp\"]",
        path: GCP_PREEMPTED,
        notice: json!("TRUE"),
        text: "instance/preempted is TRUE",
        left: Configured,
        silence: 200,
        garbage: ["", "true", "TRUE FALSE", "<html>"]
            .map(str::to_owned)
            .into(),
    }
}

fn azure() -> Cloud {
    let garbage = [
        "",
        "[]",
        "{}",
        "{\"Events\":5}",
        "{\"Events\":[5]}",
        "<?xml?>",
    ];
    Cloud {
        source: "azure",
        config: "sources = [\"azure\"]",
        path: AZURE_EVENTS,
        notice: events(&[event("Preempt", "vm-0", &rfc1123(TOLD))]),
        text: "Preempt of vm-0",
        left: Told,
        silence: 200,
        garbage: garbage.map(str::to_owned).into(),
    }
}

/// What every source must stand.
fn usual_cases(cloud: &Cloud) -> Vec<Case> {
    let (path, text, left) = (cloud.path, cloud.text, cloud.left);
    let notice = || Answers(holds(path, &cloud.notice));
    let make = |name: &str, steps| case(name, cloud.source, cloud.config, steps);
    let mut garbage = Vec::new();
    for body in &cloud.garbage {
        let answer = always(path, &json!({"body": body}));
        garbage.extend([
            Answers(answer),
            Blind("expected "),
            Answers(json!({})),
            Sees,
        ]);
    }
    let long = json!({"body": "x".repeat(100_000)});
    garbage.extend([Answers(always(path, &long)), Blind("does not end well")]);
    garbage.extend([notice(), Notice(text, left), Sees]);
    let failing = |action: Value, why| {
        let steps = vec![
            Answers(always(path, &action)),
            Blind(why),
            Answers(json!({})),
            Sees,
            notice(),
            Notice(text, left),
            // Whoever sees nothing has no news: what stood stands.
            Answers(json!({
                "values": {path: cloud.notice},
                "rules": [{"path": path, "always": true, "action": action}],
            })),
            Blind(why),
            Notice(text, left),
            Raised(1),
        ];
        make(&action.to_string(), steps)
    };
    vec![
        make(
            "normal",
            vec![
                Asked(path, cloud.silence, 1),
                Quiet,
                notice(),
                Notice(text, left),
                Answers(json!({})),
                NoNotice,
                NeverBlind,
            ],
        ),
        make("garbage", garbage),
        failing(json!({"status": 500}), "500"),
        failing(json!({"status": 302, "headers": {"location": "/"}}), "302"),
        failing(json!({"stall": true}), "no answer in 2s"),
        failing(json!({"delay_before_ms": 5000}), "no answer in 2s"),
        failing(json!({"drop": true}), "no answer"),
        make(
            "refused",
            vec![
                Asked(path, cloud.silence, 1),
                Stops,
                Blind("refused"),
                notice(),
                StartsAgain,
                Notice(text, left),
                Sees,
            ],
        ),
        make(
            "late",
            vec![
                Begins(json!({
                    "values": {path: cloud.notice},
                    "rules": [{"path": path, "always": true, "action": {"delay_before_ms": 700}}],
                })),
                Notice(text, left),
            ],
        ),
        make(
            "twice",
            vec![
                notice(),
                Notice(text, left),
                // The same again, as another document, and through more looks.
                notice(),
                Asked(path, 200, 1),
                Raised(1),
                Answers(json!({})),
                NoNotice,
                notice(),
                Notice(text, left),
                Raised(2),
                NeverBlind,
            ],
        ),
    ]
}

#[test]
fn the_instance_action_of_ec2() {
    if !in_environment("notices::metadata::the_instance_action_of_ec2", &[]) {
        return;
    }
    let mut cases = usual_cases(&aws());
    let make = |name: &str, steps| case(name, "aws", "sources = [\"aws\"]", steps);
    let told = || action("terminate", &rfc3339(TOLD));
    let fresh = |document: Value| {
        [
            Answers(json!({})),
            NoNotice,
            Answers(holds(AWS_ACTION, &document)),
        ]
    };
    let short_lived =
        |value: Value| json!({"token_lifetime_ms": 3000, "values": {AWS_ACTION: value}});
    cases.push(make(
        "a token that expires",
        vec![
            Answers(short_lived(Value::Null)),
            Asked(AWS_ACTION, 401, 2),
            Asked(AWS_TOKEN, 200, 2),
            Quiet,
            Answers(short_lived(told())),
            Notice("terminate", Told),
            NeverBlind,
        ],
    ));
    cases.push(case(
        "a token that expires is replaced within the look",
        "aws",
        "sources = [\"aws\"]\npoll = \"60s\"",
        vec![
            Begins(json!({
                "values": {AWS_ACTION: told()},
                "rules": [{"path": AWS_ACTION, "nth": 1, "action": {"status": 401}}],
            })),
            Notice("terminate", Told),
            Asked(AWS_TOKEN, 200, 2),
        ],
    ));
    cases.push(make(
        "404 ten times, then an action",
        vec![
            Answers(json!({
                "values": {AWS_ACTION: told()},
                "rules": [{"path": AWS_ACTION, "always": true, "times": 10, "action": {"status": 404}}],
            })),
            Notice("terminate", Told),
            Asked(AWS_ACTION, 404, 10),
            NeverBlind,
        ],
    ));
    cases.push(make(
        "two failures in a row are none",
        vec![
            Answers(json!({"rules": [
                {"path": AWS_ACTION, "every": 3, "action": {"status": 404}},
                {"path": AWS_ACTION, "always": true, "action": {"status": 503}},
            ]})),
            Asked(AWS_ACTION, 503, 10),
            NeverBlind,
        ],
    ));
    let mut no_token = vec![Asked(AWS_ACTION, 404, 1)];
    for failure in [
        json!({"stall": true}),
        json!({"status": 403}),
        json!({"body": ""}),
        json!({"body": "a\u{1}b\nc"}),
        json!({"drop": true}),
    ] {
        // Whoever had a token before has none after this.
        no_token.push(Answers(json!({
            "values": {AWS_ACTION: told()},
            "rules": [
                {"path": AWS_TOKEN, "always": true, "action": failure},
                {"path": AWS_ACTION, "always": true, "action": {"status": 401}},
            ],
        })));
        no_token.extend([Blind("hop limit"), Answers(json!({})), Sees]);
    }
    no_token.extend([
        Answers(holds(AWS_ACTION, &told())),
        Notice("terminate", Told),
    ]);
    cases.push(make("the token's answer does not arrive", no_token));
    cases.push(make(
        "no token is good enough",
        vec![
            Answers(always(AWS_ACTION, &json!({"status": 401}))),
            Blind("401"),
            Answers(holds(AWS_ACTION, &told())),
            Sees,
            Notice("terminate", Told),
        ],
    ));
    let mut actions = Vec::new();
    actions.extend(fresh(action("hibernate", &rfc3339(TOLD))));
    actions.push(Notice("hibernate", Told));
    actions.extend(fresh(action("stop", &rfc3339(TOLD))));
    actions.push(Notice("stop", Told));
    for document in [
        json!({"action": "stop"}),
        json!({"action": "stop", "time": null}),
        action("stop", "soon"),
        action("stop", "2017-09-18T08:22:00Z"),
        action("stop", "99999-99-99T99:99:99Z"),
    ] {
        actions.extend(fresh(document));
        actions.push(Notice("stop", Configured));
    }
    actions.push(NeverBlind);
    cases.push(make("every action, and times that say nothing", actions));
    run(cases);
}

#[test]
fn the_values_of_compute_engine() {
    if !in_environment("notices::metadata::the_values_of_compute_engine", &[]) {
        return;
    }
    let cloud = gcp();
    let mut cases = usual_cases(&cloud);
    let make = |name: &str, steps| case(name, cloud.source, cloud.config, steps);
    let later = |value: &str| json!([{"value": "FALSE"}, {"after_ms": 2000, "value": value}]);
    let waiting = |nth: u64, action: Value| json!({"path": GCP_PREEMPTED, "query_contains": "wait_for_change=true", "nth": nth, "action": action});
    cases.push(case(
        "TRUE while a request waits",
        cloud.source,
        "sources = [\"gcp\"]\npoll = \"60s\"",
        vec![
            Begins(json!({
                "values": {GCP_PREEMPTED: later("TRUE")},
                // Nobody sees it who asks again and again.
                "rules": [{"path": GCP_PREEMPTED, "from": 3, "action": {"stall": true}}],
            })),
            Notice(cloud.text, cloud.left),
            AskedFor(GCP_PREEMPTED, "timeout_sec=60"),
            NeverBlind,
        ],
    ));
    cases.push(case(
        "a notice that stands at the start",
        cloud.source,
        "sources = [\"gcp\"]\npoll = \"60s\"",
        vec![
            Begins(json!({
                "values": {GCP_PREEMPTED: "TRUE"},
                "rules": [{"path": GCP_PREEMPTED, "query_contains": "wait", "always": true, "action": {"stall": true}}],
            })),
            Notice(cloud.text, cloud.left),
        ],
    ));
    cases.push(make(
        "FALSE with a new ETag",
        vec![
            Begins(json!({
                "values": {GCP_PREEMPTED: later("TRUE")},
                "rules": [
                    waiting(1, json!({"body": "FALSE", "headers": {"etag": "another-1"}})),
                    waiting(2, json!({"body": "FALSE", "headers": {"etag": "W/\"a b&c\""}})),
                ],
            })),
            AskedFor(GCP_PREEMPTED, "last_etag=another-1"),
            AskedFor(GCP_PREEMPTED, "last_etag=W%2F%22a+b%26c%22"),
            Notice(cloud.text, cloud.left),
            Raised(1),
            NeverBlind,
        ],
    ));
    cases.push(make(
        "waiting requests are dropped",
        vec![
            Begins(json!({
                "values": {GCP_PREEMPTED: later("TRUE")},
                "rules": [{
                    "path": GCP_PREEMPTED, "query_contains": "wait", "always": true,
                    "action": {"delay_before_ms": 300, "drop": true},
                }],
            })),
            // The look between two of them is one: it is never blind.
            Asked(GCP_PREEMPTED, 0, 3),
            Notice(cloud.text, cloud.left),
            NeverBlind,
        ],
    ));
    cases.push(make(
        "no ETag",
        vec![
            Begins(json!({
                "values": {GCP_PREEMPTED: later("TRUE")},
                "rules": [{"path": GCP_PREEMPTED, "always": true, "action": {"headers": {"etag": ""}}}],
            })),
            Notice(cloud.text, cloud.left),
            NeverBlind,
        ],
    ));
    let maintenance = |value: &str| Answers(holds(GCP_MAINTENANCE, &json!(value)));
    cases.push(case(
        "the host",
        "gcp maintenance",
        cloud.config,
        vec![
            Asked(GCP_MAINTENANCE, 200, 1),
            maintenance("MIGRATE_ON_HOST_MAINTENANCE"),
            Asked(GCP_MAINTENANCE, 200, 1),
            Quiet,
            maintenance("TERMINATE_ON_HOST_MAINTENANCE"),
            Notice("instance/maintenance-event is TERMINATE", Configured),
            maintenance("NONE"),
            NoNotice,
            maintenance("DANCE_ON_HOST_MAINTENANCE"),
            Blind("expected NONE, MIGRATE"),
            maintenance("TERMINATE_ON_HOST_MAINTENANCE"),
            Notice("instance/maintenance-event is TERMINATE", Configured),
            Sees,
            Raised(2),
        ],
    ));
    run(cases);
}

#[test]
fn the_scheduled_events_of_azure() {
    if !in_environment("notices::metadata::the_scheduled_events_of_azure", &[]) {
        return;
    }
    let cloud = azure();
    let mut cases = usual_cases(&cloud);
    let make = |name: &str, steps| case(name, cloud.source, cloud.config, steps);
    let answers = |list: &[Value]| Answers(holds(AZURE_EVENTS, &events(list)));
    let told = || rfc1123(TOLD);
    cases.push(make(
        "events that are none of ours",
        vec![
            answers(&[
                event("Preempt", "vm-1", &told()),
                event("Terminate", "vm-00", ""),
                event("Reboot", "vm-0", &told()),
                event("Freeze", "vm-0", ""),
            ]),
            Asked(AZURE_EVENTS, 200, 5),
            Quiet,
        ],
    ));
    let mut timeless = Vec::new();
    let mut without = event("Preempt", "vm-0", "");
    without.as_object_mut().unwrap().remove("NotBefore");
    let mut null = event("Preempt", "vm-0", "");
    null["NotBefore"] = Value::Null;
    for event in [
        without,
        null,
        event("Preempt", "vm-0", ""),
        event("Preempt", "vm-0", "Mon, 19 Sep 2016 18:29:47 GMT"),
        event("Preempt", "vm-0", "tomorrow"),
    ] {
        timeless.extend([
            answers(&[event]),
            Notice("Preempt", Configured),
            answers(&[]),
            NoNotice,
        ]);
    }
    timeless.push(NeverBlind);
    cases.push(make("times that say nothing", timeless));
    cases.push(make(
        "several",
        vec![
            answers(&[
                event("Terminate", "vm-0", &rfc1123(4 * TOLD)),
                event("Preempt", "VM-0", &told()),
                event("Preempt", "vm-1", ""),
            ]),
            Notice("Preempt", Told),
            // The other is still there.
            answers(&[event("Terminate", "vm-0", &rfc1123(4 * TOLD))]),
            Asked(AZURE_EVENTS, 200, 3),
            Notice("Preempt", Told),
            Raised(1),
        ],
    ));
    cases.push(case(
        "the name is in the configuration",
        "azure",
        "sources = [\"azure\"]\nazure_vm = \"gpu-7\"",
        vec![
            answers(&[event("Preempt", "vm-0", "")]),
            Asked(AZURE_EVENTS, 200, 3),
            Quiet,
            answers(&[event("Terminate", "GPU-7", &told())]),
            Notice("Terminate of gpu-7", Told),
            NeverAsked(AZURE_NAME),
        ],
    ));
    cases.push(make(
        "the name is asked for until it is there",
        vec![
            Begins(json!({
                "values": {AZURE_EVENTS: events(&[event("Preempt", "vm-9", "")]), AZURE_NAME: "vm-9"},
                "rules": [{"path": AZURE_NAME, "always": true, "times": 5, "action": {"status": 500}}],
            })),
            Notice("Preempt of vm-9", Configured),
            Asked(AZURE_NAME, 500, 5),
            Sees,
        ],
    ));
    cases.push(make(
        "there is no name",
        vec![
            Begins(holds(AZURE_NAME, &Value::Null)),
            Blind("azure_vm"),
            Answers(holds(AZURE_NAME, &json!(" \n"))),
            Asked(AZURE_NAME, 200, 3),
            Blind("azure_vm"),
        ],
    ));
    run(cases);
}

#[test]
fn a_blind_source_takes_no_other_along() {
    if !in_environment(
        "notices::metadata::a_blind_source_takes_no_other_along",
        &[],
    ) {
        return;
    }
    let all = "sources = [\"aws\", \"gcp\", \"azure\"]";
    let script = json!({
        "values": {
            AWS_ACTION: action("terminate", &rfc3339(TOLD)),
            AZURE_EVENTS: events(&[event("Preempt", "vm-0", "")]),
            GCP_MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE",
        },
        "rules": [
            {"path": GCP_PREEMPTED, "always": true, "action": {"status": 500}},
            {"path": AZURE_EVENTS, "always": true, "action": {"stall": true}},
        ],
    });
    let make = |source, steps: Vec<Step>| {
        let mut all_steps = vec![Answers(script.clone())];
        all_steps.extend(steps);
        case("beside others", source, all, all_steps)
    };
    run(vec![
        make("aws", vec![Notice("terminate", Told)]),
        make("gcp maintenance", vec![Notice("TERMINATE", Configured)]),
        make("gcp preempted", vec![Blind("500")]),
        make("azure", vec![Blind("no answer in 2s")]),
    ]);
}

#[test]
fn a_server_that_speaks_no_http_blinds_every_source() {
    if !in_environment(
        "notices::metadata::a_server_that_speaks_no_http_blinds_every_source",
        &[],
    ) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Clients that left already are none of its business.
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n\0\xff\r\n\r\n");
        }
    });
    runtime().block_on(async {
        let watched = start("sources = [\"aws\", \"gcp\", \"azure\"]", &url);
        let sources = ["aws", "azure", "gcp maintenance", "gcp preempted"];
        until("no HTTP", &watched.board, PATIENCE, |standing| {
            standing.blind().map(|(source, _)| source).eq(sources)
        })
        .await;
        assert_eq!(watched.board.standing().notices().count(), 0);
    });
}
