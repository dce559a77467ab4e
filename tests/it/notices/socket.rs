//! `ckptstream notify`, and everything else that can connect to the socket of a supervision, or lie where it should be.
//!
//! Late is a notice after one that was dealt with; an error, a socket that nobody listens at. It is never blind: a supervision that cannot make its socket does not begin.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use ckptstream::supervise::Doing;
use serde_json::{Value, json};

use crate::support::Ckptstream;
use crate::support::process::PATIENCE;
use crate::support::scene::{Scene, TARGET, cause, until};
use crate::support::supervised::{Job, REQUEUE, Supervised, notified, socket, status};

/// Behind `[job]`'s.
const CONFIG: &str = "[preempt]\nsources = [\"socket\"]\nnotice = \"10min\"\n";

/// What the first save of a job that was never saved is called.
const IMAGE: &str = "00000003";

/// For the commands that ask.
fn asking(scene: &Scene) -> Ckptstream {
    let config = format!("\n[job]\nstate_dir = \"{}\"\n", scene.state_dir().display());
    scene.saver_with("job", "", &config).cli
}

fn is(scene: &Scene, doing: Doing) -> bool {
    status(scene).doing == doing
}

/// Until the node goes away, as the notice that stands says.
fn left(scene: &Scene) -> Option<f64> {
    let notices = status(scene).notices;
    assert!(notices.len() <= 1, "{notices:?}");
    notices.first().map(|notice| notice.left_seconds)
}

/// Somebody who connects, and has said this.
fn caller(scene: &Scene, words: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(socket(scene)).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    // Whoever says too much may be cut short.
    let _ = stream.write_all(words);
    stream
}

fn notify(left_seconds: f64) -> Vec<u8> {
    let question = json!({"ask": "notify", "left_seconds": left_seconds});
    format!("{question}\n").into_bytes()
}

fn answer(stream: UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream)
        .read_line(&mut line)
        .expect("an answer");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

/// From now on no part lands.
fn hold_up(scene: &Scene) {
    let action = json!({"status": 503, "code": "SlowDown"});
    let rule = json!({"op": "UploadPart", "always": true, "action": action});
    scene.server.set_rules(&json!([rule]));
}

fn let_go(scene: &Scene) {
    scene.server.set_rules(&json!([]));
}

#[test]
fn nonsense_is_answered_and_brings_no_notice() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with(CONFIG);
    let mut run = job.start();
    run.wait_for("step 2 ");
    let too_long = format!("{{\"ask\":\"status\",\"why\":\"{}\"}}\n", "x".repeat(5000));
    let endless = "x".repeat(1 << 20);
    let nonsense: [&[u8]; 14] = [
        b"\n",
        b"status\n",
        b"{}\n",
        b"null\n",
        b"[\"notify\"]\n",
        b"{\"ask\":\"notifies\"}\n",
        b"{\"ask\":\"notify\",\"left_seconds\":-1}\n",
        b"{\"ask\":\"notify\",\"left_seconds\":1e300}\n",
        b"{\"ask\":\"notify\",\"left_seconds\":\"25s\"}\n",
        b"{\"ask\":\"notify\"} {\"ask\":\"status\"}\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"\xff\xfe\0\n",
        too_long.as_bytes(),
        endless.as_bytes(),
    ];
    for words in nonsense {
        let answer = answer(caller(&scene, words));
        let words = String::from_utf8_lossy(&words[..words.len().min(60)]);
        assert!(answer["error"].is_string(), "{words}: {answer}");
    }
    // Half a line, and the end.
    let half = caller(&scene, b"{\"ask\":\"not");
    half.shutdown(Shutdown::Write).expect("it is open");
    assert!(answer(half)["error"].is_string());
    let idle = status(&scene);
    assert_eq!((idle.doing, idle.notices_heard), (Doing::Watching, 0));
    assert!(notified(&scene, None).image.is_some());
    assert_eq!(run.ends().code, REQUEUE);
}

#[test]
fn many_who_say_nothing_keep_nobody_from_being_heard() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with(CONFIG);
    let mut run = job.start();
    run.wait_for("step 2 ");
    let silent: Vec<UnixStream> = (0..50)
        .map(|number| match number % 2 {
            0 => caller(&scene, b""),
            _ => caller(&scene, b"{\"ask\":\"notify\""),
        })
        .collect();
    let asking_at_once: Vec<UnixStream> = (0..50)
        .map(|_| caller(&scene, b"{\"ask\":\"status\"}\n"))
        .collect();
    for stream in asking_at_once {
        let answer = answer(stream);
        assert_eq!(answer["status"]["notices_heard"], 0, "{answer}");
    }
    // They have had their time.
    for stream in silent {
        let answer = answer(stream);
        assert_eq!(answer["error"], "no question came", "{answer}");
    }
    let silent: Vec<UnixStream> = (0..50)
        .map(|_| caller(&scene, b"{\"ask\":\"notify\""))
        .collect();
    let told = asking(&scene).ok("notify");
    assert_eq!(told["image"], IMAGE, "{told}");
    assert_eq!(run.ends().code, REQUEUE);
    drop(silent);
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn all_who_bring_a_notice_wait_for_one_verdict_and_the_earliest_end_counts() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with(CONFIG);
    let mut run = job.start_patiently();
    run.wait_for("step 2 ");
    hold_up(&scene);
    let cli = asking(&scene);
    let mut first = cli.spawn("notify --left 9min");
    until(|| is(&scene, Doing::Saving));
    // Who says what it wants, and hangs up, has said it.
    drop(caller(&scene, &notify(500.0)));
    until(|| left(&scene).is_some_and(|left| left <= 500.0));
    let mut second = cli.spawn("notify --left 450s");
    until(|| left(&scene).is_some_and(|left| left <= 450.0));
    let shorter = caller(&scene, &notify(400.0));
    shorter.shutdown(Shutdown::Write).expect("it is open");
    until(|| left(&scene).is_some_and(|left| left <= 400.0));
    let longer = caller(&scene, &notify(3600.0));
    for _ in 0..50 {
        let status = status(&scene);
        assert_eq!((status.doing, status.notices_heard), (Doing::Saving, 1));
        assert!(status.notices[0].left_seconds <= 400.0, "{status:?}");
    }
    assert!(!first.0.has_ended() && !second.0.has_ended());
    assert_eq!(scene.images("job"), [0_u64; 0]);
    let_go(&scene);
    for caller in [shorter, longer] {
        let told = answer(caller);
        assert_eq!(told["verdict"]["exit_code"], 0, "{told}");
        assert_eq!(told["verdict"]["image"], IMAGE, "{told}");
    }
    for command in [first, second] {
        let told = command.wait();
        assert_eq!(told.code, 0, "{told:?}");
        assert_eq!(told.report["image"], IMAGE, "{told:?}");
    }
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    assert_eq!(ended.stderr.matches("notice from socket").count(), 1);
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_notice_whose_bringer_is_gone_is_a_notice() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with(CONFIG);
    let mut run = job.start();
    run.wait_for("step 2 ");
    drop(caller(&scene, &notify(300.0)));
    assert_eq!(run.ends().code, REQUEUE);
    assert_eq!(scene.images("job"), [1]);
}

#[test]
fn a_notice_after_one_that_was_refused_has_its_verdict() {
    let scene = Scene::new(&[]);
    // Without a GPU there is nothing to save, and it does not mind the signal that it is given instead.
    let script = "trap '' TERM; echo ready pid $$; while :; do sleep 0.1; done";
    let config = format!(
        "\n[job]\nallow_gpu_only = true\nstate_dir = \"{}\"\n{CONFIG}",
        scene.state_dir().display()
    );
    let saver = scene.saver_with("job", "", &config);
    let mut command = saver.cli.command("run");
    command.args(["--", "sh", "-c", script]);
    let mut run = Supervised::start((saver, command));
    run.wait_for("ready");
    let refused = notified(&scene, None);
    assert_eq!(refused.exit_code, 3, "{refused:?}");
    for left in [Some(1000.0), Some(100.0), None] {
        assert_eq!(notified(&scene, left), refused);
    }
    let told = asking(&scene).run("notify --left 50s");
    assert_eq!(told.code, 3, "{told:?}");
    assert!(cause(&told).contains("uses no GPU"), "{told:?}");
    let idle = status(&scene);
    assert_eq!((idle.doing, idle.notices_heard), (Doing::Watching, 1));
    assert!(left(&scene).is_some_and(|left| left <= 50.0));
    run.end_the_job();
    let ended = run.ends();
    assert_eq!(ended.code, 137, "{ended:?}");
}

/// Both commands say that nobody is there.
fn must_be_unanswered(cli: &Ckptstream) {
    for command in ["status", "notify --left 30s"] {
        let told = cli.run(command);
        assert_eq!(told.code, 3, "{command}: {told:?}");
        assert!(cause(&told).contains("preempt.socket"), "{told:?}");
    }
}

#[test]
fn a_socket_that_nobody_listens_at_is_told_and_taken_over() {
    let scene = Scene::new(&[]);
    let job = Job::new(&scene, TARGET).with(CONFIG);
    must_be_unanswered(&asking(&scene));
    let mut run = job.start_patiently();
    run.wait_for("step 2 ");
    hold_up(&scene);
    let cli = asking(&scene);
    let waiting = cli.spawn("notify");
    until(|| is(&scene, Doing::Saving));
    // Whoever waits for a verdict hears that there is none.
    run.process.kill();
    let told = waiting.wait();
    assert_eq!(told.code, 3, "{told:?}");
    assert!(
        cause(&told).contains("ended before it answered"),
        "{told:?}"
    );
    run.end_the_job();
    drop(run);
    assert!(socket(&scene).exists());
    must_be_unanswered(&asking(&scene));
    let_go(&scene);
    let mut next = job.start();
    next.wait_for("step 2 ");
    assert_eq!(status(&scene).pid, next.process.pid());
    assert!(notified(&scene, None).image.is_some());
    assert_eq!(next.ends().code, REQUEUE);
    must_be_unanswered(&asking(&scene));
    assert!(!socket(&scene).exists());
}

/// A run whose socket would be there refuses to begin, with this status and reason.
fn must_not_begin(scene: &Scene, path: &Path, code: i32, why: &str) {
    let config = format!("{CONFIG}socket = \"{}\"\n", path.display());
    let ended = Job::new(scene, TARGET).with(&config).start().ends();
    assert_eq!(ended.code, code, "{ended:?}");
    assert!(ended.stderr.contains(why), "{ended:?}");
    assert_eq!(ended.said, [""; 0]);
}

#[test]
fn what_lies_where_the_socket_should_be_stays_there() {
    let scene = Scene::new(&[]);
    let place = scene.state_dir().with_extension("place");
    std::fs::create_dir(&place).expect("a folder");
    let file = place.join("file");
    std::fs::write(&file, "somebody's").expect("a file");
    must_not_begin(&scene, &file, 203, "preempt.socket");
    let there = std::fs::read_to_string(&file).expect("it is there");
    assert_eq!(there, "somebody's");
    let folder = place.join("folder");
    std::fs::create_dir(&folder).expect("a folder");
    must_not_begin(&scene, &folder, 203, "preempt.socket");
    assert!(folder.is_dir());
    let link = place.join("link");
    std::os::unix::fs::symlink("nowhere", &link).expect("a link");
    must_not_begin(&scene, &link, 203, "preempt.socket");
    assert!(link.is_symlink());
    must_not_begin(&scene, &file.join("sock"), 203, "preempt.socket");
    let long = place.join("x".repeat(200));
    must_not_begin(&scene, &long, 203, "preempt.socket");
    // Somebody listens there: another supervision, for all that we know.
    let theirs = place.join("theirs");
    let listener = UnixListener::bind(&theirs).expect("a socket");
    must_not_begin(&scene, &theirs, 204, "another ckptstream");
    // Who asks there is not left without an end, whatever is said.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            let read = BufReader::new(&stream).read_line(&mut line);
            // Clients that left already are none of its business.
            let _ = read.and_then(|_| stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n"));
        }
    });
    let config = format!("\n{CONFIG}socket = \"{}\"\n", theirs.display());
    must_be_unanswered(&scene.saver_with("job", "", &config).cli);
}

#[test]
fn a_blind_source_is_told_and_heard_when_it_sees_again() {
    let scene = Scene::new(&[]);
    let notice = scene.state_dir().with_extension("notice");
    std::os::unix::fs::symlink(&notice, &notice).expect("a link to itself");
    // Nobody listens on port 1.
    let config = format!(
        "[preempt]\nsources = [\"signals\", \"socket\", \"file\", \"aws\"]\npoll = \"100ms\"\naws_url = \"http://127.0.0.1:1\"\nfile = \"{}\"\n",
        notice.display()
    );
    let mut run = Job::new(&scene, TARGET).with(&config).start();
    run.wait_for("step 2 ");
    until(|| status(&scene).blind.len() == 2);
    let told = asking(&scene).ok("status")["status"].clone();
    let sources = |told: &Value| {
        let blind = told["blind"].as_array().expect("a list");
        let sources = blind.iter().map(|blind| blind["source"].clone());
        sources.collect::<Vec<Value>>()
    };
    assert_eq!(sources(&told), ["aws", "file"], "{told}");
    assert_eq!(told["doing"], "watching", "{told}");
    let text = asking(&scene).output("status").stdout;
    let text = String::from_utf8(text).expect("text");
    for line in ["blind     aws: ", "blind     file: "] {
        assert!(text.contains(line), "{text}");
    }
    // What comes in its place cannot be read to an end, and is there.
    let made = std::process::Command::new("mkfifo")
        .arg(notice.with_extension("fifo"))
        .status();
    assert!(made.expect("mkfifo").success());
    std::fs::rename(notice.with_extension("fifo"), &notice).expect("a FIFO");
    let ended = run.ends();
    assert_eq!(ended.code, REQUEUE, "{ended:?}");
    for words in [
        "file sees no notices now",
        "aws sees no notices now",
        "file sees notices again",
        "notice from file",
    ] {
        assert_eq!(ended.stderr.matches(words).count(), 1, "{words}: {ended:?}");
    }
    assert_eq!(scene.images("job"), [1]);
}
