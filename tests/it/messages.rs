//! What `preflight` says of the families of errors that stores, rights and the way there give: the cause and the key that mends it, in one line each, as tests/golden/preflight.txt has them.

use std::fmt::Write as _;
use std::sync::Mutex;

use serde_json::{Value, json};

use super::support::scene::Scene;
use super::support::{Proxy, Run, TlsFront};

/// How the layers below put it.
const CONNECT_TIMEOUT: &str =
    "no answer: timeout: client error (Connect): HTTP connect timeout occurred after Ns: timed out";

/// One line: what is wrong, and what mends it, without what is another one each time.
fn lines(run: &Run) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let checks = run.report["checks"].as_array().cloned().unwrap_or_default();
    // What a busy machine was too slow for is no word on the store.
    let is_told = |check: &&Value| {
        check["state"] != "ok" && !word(&check["found"]).contains("no answer within")
    };
    let wrong = checks.iter().filter(is_told);
    let lines = wrong.map(|check| {
        let [state, name, found, mend] =
            ["state", "name", "found", "mend"].map(|it| word(&check[it]));
        plain(&format!("{state} {name}: {found} => {mend}"))
    });
    lines.collect::<Vec<_>>().join(" && ")
}

/// Ports, nonces, times, counts, paths.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let run_of = |is: fn(&char) -> bool| rest.chars().take_while(is).count();
        let hex = run_of(char::is_ascii_hexdigit);
        let number = run_of(|c| c.is_ascii_digit() || *c == '.');
        if hex == 32 {
            out.push_str("ATTEMPT");
            rest = &rest[hex..];
        } else if first.is_ascii_digit() && out.ends_with("127.0.0.1:")
            || out.ends_with("localhost:")
        {
            out.push_str("PORT");
            rest = &rest[number..];
        } else if first.is_ascii_digit()
            && ["after ", "in ", "within "]
                .iter()
                .any(|before| out.ends_with(before))
        {
            out.push('N');
            rest = &rest[number..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    // Whichever of the limits comes first, and is told.
    out.replace("the deadline has come", "store.retry_timeout = 1.5s")
        .replace(" Nms ", " Ns ")
        .replace(CONNECT_TIMEOUT, "no answer in Ns")
}

/// A request that a rule refuses.
fn refused(
    name: &str,
    config: &str,
    op: &Value,
    action: &Value,
    without: Option<&str>,
) -> (String, String) {
    let scene = Scene::new(&[]);
    let mut rule = json!({"op": op, "always": true, "action": action});
    if let Some(header) = without {
        rule["without_header"] = header.into();
    }
    scene.server.set_rules(&json!([rule]));
    let run = scene
        .saver_with("job", "", config)
        .unhurried()
        .cli
        .run("preflight");
    (name.to_owned(), lines(&run))
}

fn of_the_way(
    name: &str,
    config: &str,
    change: impl FnOnce(&mut Scene) -> Box<dyn std::any::Any>,
) -> (String, String) {
    let mut scene = Scene::new(&[]);
    let _kept = change(&mut scene);
    let run = scene.saver_with("job", "", config).cli.run("preflight");
    (name.to_owned(), lines(&run))
}

fn answer(status: u16, code: &str, message: &str) -> Value {
    json!({"status": status, "code": code, "message": message})
}

/// A case, and what makes its line.
type Case = Box<dyn FnOnce() -> (String, String) + Send>;

fn of_requests() -> Vec<Case> {
    let fixed = "checksum = \"crc64nvme\"\n";
    let part = json!("UploadPart");
    let making = json!(["PutObject", "CreateMultipartUpload"]);
    let denied = answer(403, "AccessDenied", "Access Denied");
    let missing = "A header you provided implies functionality that is not implemented: x-amz-checksum-crc64nvme";
    let elsewhere = json!({"status": 301, "code": "PermanentRedirect", "headers": {"x-amz-bucket-region": "eu-west-1"}});
    let no_word =
        json!({"status": 301, "empty": true, "headers": {"x-amz-bucket-region": "eu-west-1"}});
    let kms = "User: arn:aws:iam::1:user/job is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:x";
    let customer = "x-amz-checksum headers are not supported with customer keys";
    let mut cases: Vec<Case> = Vec::new();
    let mut add = |name: &'static str,
                   config: &'static str,
                   op: &Value,
                   action: &Value,
                   without: Option<&'static str>| {
        let (op, action) = (op.clone(), action.clone());
        cases.push(Box::new(move || {
            refused(name, config, &op, &action, without)
        }));
    };
    add(
        "S3-05 a header that is not known",
        fixed,
        &part,
        &answer(501, "NotImplemented", missing),
        None,
    );
    add(
        "S3-05 another body than was signed",
        "sign_payload = false\n",
        &part,
        &answer(400, "XAmzContentSHA256Mismatch", ""),
        None,
    );
    add(
        "S3-05 a length that is missed",
        fixed,
        &part,
        &answer(411, "MissingContentLength", ""),
        None,
    );
    add(
        "S3-05 framing that is not known",
        fixed,
        &part,
        &answer(
            400,
            "InvalidArgument",
            "aws-chunked encoding is not supported",
        ),
        None,
    );
    add("S3-17 another region", "", &json!("*"), &elsewhere, None);
    add(
        "S3-17 another region, in a header alone",
        "",
        &json!("*"),
        &no_word,
        None,
    );
    add(
        "S3-28 a policy that wants encryption",
        "",
        &making,
        &denied,
        Some("x-amz-server-side-encryption"),
    );
    add(
        "S3-28 parts alone are denied",
        "sse = \"s3\"\n",
        &part,
        &denied,
        None,
    );
    add(
        "S3-28 checksums beside a customer's key",
        fixed,
        &part,
        &answer(400, "InvalidRequest", customer),
        None,
    );
    add(
        "S3-29 complete",
        "",
        &json!("CompleteMultipartUpload"),
        &denied,
        None,
    );
    add(
        "S3-29 the key's service",
        "sse = \"kms\"\n",
        &json!("CompleteMultipartUpload"),
        &answer(403, "AccessDenied", kms),
        None,
    );
    add(
        "S3-29 head",
        "",
        &json!("HeadObject"),
        &json!({"status": 403, "empty": true}),
        None,
    );
    add("S3-29 get", "", &json!("GetObject"), &denied, None);
    add(
        "S3-29 abort",
        "",
        &json!("AbortMultipartUpload"),
        &denied,
        None,
    );
    add("S3-29 delete", "", &json!("DeleteObject"), &denied, None);
    cases
}

fn of_ways() -> Vec<Case> {
    let tls = |scene: &mut Scene| {
        let front = TlsFront::before(&scene.server);
        scene.server.endpoint.clone_from(&front.endpoint);
        front
    };
    let proxied = move |name: &'static str, proxy_args: &'static [&'static str]| -> Case {
        Box::new(move || {
            let proxy = Proxy::start(proxy_args);
            let config = format!("proxy = \"{}\"\n", proxy.url);
            of_the_way(name, &config, |scene| Box::new(tls(scene)))
        })
    };
    vec![
        Box::new(|| {
            of_the_way(
                "S3-18 the bucket before an endpoint's name",
                "path_style = false\n",
                |scene| {
                    scene.server.endpoint = "http://store.invalid:9000".to_owned();
                    Box::new(())
                },
            )
        }),
        Box::new(move || {
            of_the_way("S3-19 an authority that is not trusted", "", |scene| {
                Box::new(tls(scene))
            })
        }),
        proxied("S3-19 a proxy that refuses", &["--refuse", "403"]),
        proxied(
            "S3-19 a proxy that wants to know who asks",
            &["--refuse", "407"],
        ),
        proxied("S3-19 a proxy that hangs", &["--hang"]),
    ]
}

#[test]
fn every_family_of_errors_is_told_in_one_line_with_its_cause_and_its_key() {
    let mut cases = of_requests();
    cases.extend(of_ways());
    let count = cases.len();
    let next = Mutex::new(cases.into_iter().enumerate());
    let told = Mutex::new(vec![String::new(); count]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let case = next.lock().expect("no holder panics").next();
                    let Some((index, case)) = case else { return };
                    let (name, line) = case();
                    told.lock().expect("no holder panics")[index] = format!("{name}\n    {line}\n");
                }
            });
        }
    });
    let told = told.into_inner().expect("no holder panics");
    let mut found = String::new();
    for line in told {
        // What libc says of a name that is not there depends on the machine.
        let line = match line.split_once("failed to lookup address information: ") {
            Some((start, rest)) => format!(
                "{start}UNKNOWN NAME{}",
                rest.find(" => ").map_or("", |at| &rest[at..])
            ),
            None => line,
        };
        write!(found, "{line}").expect("a string");
    }
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/preflight.txt");
    let golden = std::fs::read_to_string(golden).expect("the golden file");
    assert!(
        found == golden,
        "tests/golden/preflight.txt is not what is said:\n{found}"
    );
}
