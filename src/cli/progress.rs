//! Progress on stderr while a command works.
//!
//! In: the library's [`Meter`], looked at eight times a second from a thread of its own. Out: bars, plain lines or JSON lines. Nothing here
//! fails: whoever cannot be told about the work does not end it.

use std::collections::{BTreeMap, VecDeque};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::args::ProgressChoice;
use super::console::Console;
use super::units::{float, size, whole};
use crate::error::Phase;
use crate::progress::{LaneMeter, MeterView};
use crate::session::Session;

/// How often the meter is looked at.
const SAMPLE_EVERY: Duration = Duration::from_millis(125);
/// How often a plain line is printed.
const PLAIN_EVERY: Duration = Duration::from_secs(2);
/// How often a JSON line is printed.
const JSON_EVERY: Duration = Duration::from_millis(500);
/// Span over which the rate is taken: long enough to smooth parts of 16 MiB, short enough to follow a network that changes.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// How progress is shown, decided once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Bar,
    Plain,
    Json,
    None,
}

/// What stderr is, as far as output depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terminal {
    /// It can redraw a line.
    pub(super) redraws: bool,
    /// It shows colours, and nobody asked for none.
    pub(super) colours: bool,
}

impl Terminal {
    /// Looks at stderr, `TERM` and `NO_COLOR`.
    pub(super) fn look() -> Self {
        let redraws = std::io::stderr().is_terminal()
            && std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        // https://no-color.org: set and not empty, whatever it says.
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            redraws,
            colours: redraws && !no_color,
        }
    }
}

impl Mode {
    /// What the choice means here. Bars need a terminal; without one, lines tell the same.
    pub(super) fn resolve(choice: ProgressChoice, terminal: Terminal) -> Self {
        match choice {
            ProgressChoice::Auto | ProgressChoice::Bar if terminal.redraws => Mode::Bar,
            ProgressChoice::Auto | ProgressChoice::Bar | ProgressChoice::Plain => Mode::Plain,
            ProgressChoice::Json => Mode::Json,
            ProgressChoice::None => Mode::None,
        }
    }
}

/// The thread that shows progress. Dropping it ends the display.
#[derive(Debug)]
pub(super) struct Progress {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Starts to show what the session's meter says, beside its deadline.
    pub(super) fn start(mode: Mode, session: Session, console: Console) -> Self {
        if mode == Mode::None {
            return Self {
                stop: None,
                thread: None,
            };
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let work = move || {
            let mut view: Box<dyn View> = match mode {
                Mode::Bar => Box::new(Bars::new(console)),
                Mode::Json => Box::new(JsonLines {
                    console,
                    pace: Pace::new(JSON_EVERY),
                }),
                Mode::Plain | Mode::None => Box::new(PlainLines {
                    console,
                    pace: Pace::new(PLAIN_EVERY),
                }),
            };
            let mut sampler = Sampler::new(Instant::now(), None);
            loop {
                sampler.deadline = session.deadline();
                let stopping = !matches!(
                    stopped.recv_timeout(SAMPLE_EVERY),
                    Err(RecvTimeoutError::Timeout)
                );
                let now = Instant::now();
                let (glance, entered) = sampler.sample(&session.meter.view(), now);
                view.show(&glance, &entered, now);
                if stopping {
                    return view.end();
                }
            }
        };
        // A machine that has no thread left for a display may still save.
        let thread = std::thread::Builder::new()
            .name("progress".to_owned())
            .spawn(work);
        if let Err(error) = &thread {
            tracing::warn!("no progress will be shown: {error}");
        }
        Self {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A display that panicked has nothing to say to the work.
            let _ = thread.join();
        }
    }
}

/// One look at the meter, in the words that are shown.
#[derive(Debug, Clone, Serialize)]
struct Glance {
    event: &'static str,
    phase: Option<Phase>,
    /// Since the display began.
    elapsed_seconds: f64,
    devices: Vec<Device>,
    in_flight: u32,
    retries: u64,
    /// How often the store asked for fewer requests; fewer are under way after each.
    slow_downs: u64,
    /// Raw bytes per second that passed the last stage, over the last seconds.
    rate: f64,
    /// Until the last stage is done at this rate; `None` while nothing is known.
    eta_seconds: Option<f64>,
    /// Until the node is gone; negative when it should be gone already.
    deadline_seconds: Option<f64>,
}

/// One GPU's progress. `steps` maps the names of [`flow`] to raw bytes.
#[derive(Debug, Clone, Serialize)]
struct Device {
    device: String,
    total: u64,
    stored: u64,
    #[serde(flatten)]
    steps: BTreeMap<&'static str, u64>,
    /// The same in order of flow, for people.
    #[serde(skip)]
    flow: Vec<(&'static str, u64)>,
}

impl Device {
    /// Raw bytes through the last stage.
    fn done(&self) -> u64 {
        self.flow.last().map_or(0, |(_, done)| *done)
    }
}

/// The steps of a lane in order of flow, each with the raw bytes that passed it. While an image is only read, nothing is copied, so that verifying is the last step.
fn flow(phase: Option<Phase>, lane: &LaneMeter) -> Vec<(&'static str, u64)> {
    let step = |name, counter: &AtomicU64| (name, counter.load(Ordering::Relaxed));
    let fetched = step("fetched", &lane.fetched);
    let copied = step("copied", &lane.copied);
    match phase {
        Some(Phase::Read) => vec![fetched, step("verified", &lane.coded)],
        Some(Phase::Restore | Phase::Unlock) => {
            vec![fetched, step("verified", &lane.coded), copied]
        }
        _ => vec![
            copied,
            step("compressed", &lane.coded),
            step("uploaded", &lane.acknowledged),
        ],
    }
}

/// Turns looks at the meter into glances; knows the past for rates.
#[derive(Debug)]
struct Sampler {
    started: Instant,
    deadline: Option<Instant>,
    phases_seen: usize,
    window: RateWindow,
}

impl Sampler {
    fn new(started: Instant, deadline: Option<Instant>) -> Self {
        Self {
            started,
            deadline,
            phases_seen: 0,
            window: RateWindow::default(),
        }
    }

    /// A glance, and the phases entered since the last one.
    fn sample(&mut self, view: &MeterView, now: Instant) -> (Glance, Vec<Phase>) {
        let phase = view.phase();
        let devices: Vec<Device> = view
            .lanes
            .iter()
            .map(|lane| {
                let flow = flow(phase, lane);
                Device {
                    device: lane.label.clone(),
                    total: lane.total,
                    stored: lane.stored.load(Ordering::Relaxed),
                    steps: flow.iter().copied().collect(),
                    flow,
                }
            })
            .collect();
        let done: u64 = devices.iter().map(Device::done).sum();
        let total: u64 = devices.iter().map(|device| device.total).sum();
        let rate = self.window.add(done, now);
        let entered = view
            .phases
            .get(self.phases_seen..)
            .unwrap_or_default()
            .to_vec();
        self.phases_seen = view.phases.len();
        let left = total.saturating_sub(done);
        let glance = Glance {
            event: "progress",
            phase,
            elapsed_seconds: rounded(now.duration_since(self.started).as_secs_f64()),
            in_flight: view.in_flight,
            retries: view.retries,
            slow_downs: view.slow_downs,
            rate: rate.round(),
            eta_seconds: (rate > 0.0 || left == 0 && total > 0).then(|| {
                if left == 0 {
                    0.0
                } else {
                    rounded(float(left) / rate)
                }
            }),
            deadline_seconds: self
                .deadline
                .map(|deadline| rounded(seconds_until(deadline, now))),
            devices,
        };
        (glance, entered)
    }
}

/// What a counter did lately.
#[derive(Debug, Default)]
struct RateWindow {
    history: VecDeque<(Instant, u64)>,
}

impl RateWindow {
    /// Bytes per second over the window that ends with this look. A count that went down is another transfer: the past is forgotten.
    fn add(&mut self, done: u64, now: Instant) -> f64 {
        let went_down = self.history.back().is_some_and(|(_, last)| *last > done);
        // Waiting before the first byte says nothing about the rate after it.
        if went_down || done == 0 {
            self.history.clear();
        }
        self.history.push_back((now, done));
        while self
            .history
            .get(1)
            .is_some_and(|(at, _)| now.duration_since(*at) >= RATE_WINDOW)
        {
            self.history.pop_front();
        }
        let Some((since, before)) = self.history.front() else {
            return 0.0;
        };
        let seconds = now.duration_since(*since).as_secs_f64();
        if seconds > 0.0 {
            float(done.saturating_sub(*before)) / seconds
        } else {
            0.0
        }
    }
}

trait View {
    fn show(&mut self, glance: &Glance, entered: &[Phase], now: Instant);
    fn end(&mut self);
}

/// Lets one thing through per interval.
struct Pace {
    every: Duration,
    last: Option<Instant>,
}

impl Pace {
    fn new(every: Duration) -> Self {
        Self { every, last: None }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let due = self
            .last
            .is_none_or(|last| now.duration_since(last) >= self.every);
        if due {
            self.last = Some(now);
        }
        due
    }
}

struct JsonLines {
    console: Console,
    pace: Pace,
}

impl View for JsonLines {
    fn show(&mut self, glance: &Glance, entered: &[Phase], now: Instant) {
        for phase in entered {
            self.console.line(&format!(
                "{{\"event\":\"phase\",\"phase\":\"{phase}\",\"elapsed_seconds\":{}}}",
                glance.elapsed_seconds
            ));
        }
        if self.pace.is_due(now) || !entered.is_empty() {
            self.print(glance);
        }
    }

    fn end(&mut self) {}
}

impl JsonLines {
    fn print(&self, glance: &Glance) {
        match serde_json::to_string(glance) {
            Ok(line) => self.console.line(&line),
            Err(error) => tracing::debug!("a progress line could not be written: {error}"),
        }
    }
}

struct PlainLines {
    console: Console,
    pace: Pace,
}

impl View for PlainLines {
    fn show(&mut self, glance: &Glance, entered: &[Phase], now: Instant) {
        for phase in entered {
            self.console
                .line(&format!("{:>7.1}s {phase}", glance.elapsed_seconds));
        }
        let moves = matches!(
            glance.phase,
            Some(Phase::Stream | Phase::Read | Phase::Restore)
        );
        if moves && !glance.devices.is_empty() && self.pace.is_due(now) {
            self.console.line(&plain_line(glance));
        }
    }

    fn end(&mut self) {}
}

fn plain_line(glance: &Glance) -> String {
    let devices: Vec<String> = glance
        .devices
        .iter()
        .map(|device| format!("{}: {}", device.device, steps(device)))
        .collect();
    format!(
        "{:>7.1}s {}; {}",
        glance.elapsed_seconds,
        devices.join("; "),
        tail(glance)
    )
}

/// `copied 43 %, compressed 41 %, uploaded 38 %`.
fn steps(device: &Device) -> String {
    let step = |(name, bytes): &(&str, u64)| format!("{name} {} %", percent(*bytes, device.total));
    let steps: Vec<String> = device.flow.iter().map(step).collect();
    steps.join(", ")
}

/// Rate, ETA, what is on the wire, retries, deadline: what concerns all GPUs together.
fn tail(glance: &Glance) -> String {
    let mut text = format!("{}/s", size(whole(glance.rate)));
    if let Some(eta) = glance.eta_seconds {
        text.push_str(&format!(", ETA {eta:.0} s"));
    }
    if let Some(deadline) = glance.deadline_seconds {
        text.push_str(&format!(", deadline in {deadline:.0} s"));
    }
    text.push_str(&format!(", {} in flight", glance.in_flight));
    if glance.retries > 0 {
        text.push_str(&format!(", {} retries", glance.retries));
    }
    if glance.slow_downs > 0 {
        text.push_str(&format!(", slowed down {} times", glance.slow_downs));
    }
    text
}

/// One bar per GPU, and a line for all of them. No colours, so `NO_COLOR` has nothing to switch off.
struct Bars {
    console: Console,
    bars: MultiProgress,
    summary: ProgressBar,
    lanes: Vec<Lane>,
    /// What the last look said, once there was something to move.
    last: Option<String>,
}

struct Lane {
    label: String,
    total: u64,
    bar: ProgressBar,
    window: RateWindow,
}

impl Bars {
    fn new(console: Console) -> Self {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        console.set_bars(Some(bars.clone()));
        let summary = bars.add(ProgressBar::new_spinner());
        summary.set_style(style("{msg}"));
        Self {
            console,
            bars,
            summary,
            lanes: Vec::new(),
            last: None,
        }
    }

    /// One bar per announced lane; new ones when another transfer begins.
    fn fit(&mut self, devices: &[Device]) {
        let same = self
            .lanes
            .iter()
            .map(|lane| (&lane.label, lane.total))
            .eq(devices.iter().map(|device| (&device.device, device.total)));
        if same {
            return;
        }
        for lane in self.lanes.drain(..) {
            lane.bar.finish_and_clear();
        }
        for device in devices {
            let bar = self
                .bars
                .insert_before(&self.summary, ProgressBar::new(device.total));
            bar.set_style(style("{prefix:<10} [{bar:24}] {msg}").progress_chars("=> "));
            bar.set_prefix(device.device.clone());
            self.lanes.push(Lane {
                label: device.device.clone(),
                total: device.total,
                bar,
                window: RateWindow::default(),
            });
        }
    }
}

/// A template that is a constant of this file; a bad one shows as the default bar.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_bad| ProgressStyle::default_bar())
}

impl View for Bars {
    fn show(&mut self, glance: &Glance, _entered: &[Phase], now: Instant) {
        self.fit(&glance.devices);
        for (lane, device) in self.lanes.iter_mut().zip(&glance.devices) {
            lane.bar.set_position(device.done().min(device.total));
            let rate = lane.window.add(device.done(), now);
            let left = device.total.saturating_sub(device.done());
            let eta = if rate > 0.0 {
                format!(", ETA {:.0} s", float(left) / rate)
            } else {
                String::new()
            };
            lane.bar
                .set_message(format!("{}, {}/s{eta}", steps(device), size(whole(rate))));
        }
        let phase = glance
            .phase
            .map_or_else(String::new, |phase| phase.to_string());
        self.summary.set_message(format!(
            "{phase:<10} {:.1} s, {}",
            glance.elapsed_seconds,
            tail(glance)
        ));
        self.summary.tick();
        if !glance.devices.is_empty() {
            self.last = Some(plain_line(glance));
        }
    }

    /// The bars go; one line stays and says how far it came.
    fn end(&mut self) {
        for lane in &self.lanes {
            lane.bar.finish_and_clear();
        }
        self.summary.finish_and_clear();
        self.console.set_bars(None);
        if let Some(last) = self.last.take() {
            self.console.line(&last);
        }
    }
}

fn percent(bytes: u64, total: u64) -> u64 {
    if total == 0 {
        100
    } else {
        (u128::from(bytes) * 100 / u128::from(total))
            .try_into()
            .unwrap_or(u64::MAX)
    }
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

fn seconds_until(deadline: Instant, now: Instant) -> f64 {
    match deadline.checked_duration_since(now) {
        Some(left) => left.as_secs_f64(),
        None => -now.duration_since(deadline).as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Meter;

    fn at(started: Instant, ms: u64) -> Instant {
        started + Duration::from_millis(ms)
    }

    #[test]
    fn rate_and_eta_follow_the_last_stage() {
        let meter = Meter::new();
        let lane = LaneMeter::new("GPU 0", 1000);
        meter.enter(Phase::Stream);
        meter.announce(vec![lane.clone()]);
        let started = Instant::now();
        let mut sampler = Sampler::new(started, Some(at(started, 9000)));
        let (first, entered) = sampler.sample(&meter.view(), started);
        assert_eq!(
            (entered.as_slice(), first.eta_seconds),
            (&[Phase::Stream][..], None)
        );
        for second in 1..=4u64 {
            lane.copied.store(second * 150, Ordering::Relaxed);
            lane.acknowledged.store(second * 100, Ordering::Relaxed);
            let (glance, entered) = sampler.sample(&meter.view(), at(started, second * 1000));
            assert!(entered.is_empty());
            assert_eq!(glance.rate.round(), 100.0);
            assert_eq!(glance.eta_seconds, Some(float(10 - second)));
        }
        let (late, _) = sampler.sample(&meter.view(), at(started, 10_000));
        assert_eq!(late.deadline_seconds, Some(-1.0));
    }

    #[test]
    fn reading_an_image_back_is_done_when_all_is_verified() {
        let meter = Meter::new();
        let lane = LaneMeter::new("GPU 0", 1000);
        meter.enter(Phase::Read);
        meter.announce(vec![lane.clone()]);
        let started = Instant::now();
        let mut sampler = Sampler::new(started, None);
        let _before = sampler.sample(&meter.view(), started);
        lane.fetched.store(1000, Ordering::Relaxed);
        lane.coded.store(500, Ordering::Relaxed);
        let (glance, _) = sampler.sample(&meter.view(), at(started, 1000));
        assert_eq!(steps(&glance.devices[0]), "fetched 100 %, verified 50 %");
        assert_eq!((glance.rate, glance.eta_seconds), (500.0, Some(1.0)));
    }

    #[test]
    fn a_json_line_names_the_steps_of_its_phase() {
        let meter = Meter::new();
        meter.enter(Phase::Stream);
        meter.announce(vec![LaneMeter::new("GPU 0", 10)]);
        let mut sampler = Sampler::new(Instant::now(), None);
        let line =
            serde_json::to_value(sampler.sample(&meter.view(), Instant::now()).0).expect("json");
        let device = &line["devices"][0];
        assert_eq!(
            (
                &device["copied"],
                &device["compressed"],
                &device["uploaded"]
            ),
            (&0.into(), &0.into(), &0.into())
        );
        meter.enter(Phase::Complete);
        meter.enter(Phase::Restore);
        let (glance, entered) = sampler.sample(&meter.view(), Instant::now());
        let line = serde_json::to_value(glance).expect("json");
        let device = &line["devices"][0];
        assert!(
            device["fetched"].is_u64()
                && device["verified"].is_u64()
                && device["copied"].is_u64()
                && device["flow"].is_null()
        );
        assert_eq!(
            entered,
            [Phase::Complete, Phase::Restore],
            "no phase is missed between two looks"
        );
    }

    #[test]
    fn the_choice_is_made_once() {
        let terminal = Terminal {
            redraws: true,
            colours: true,
        };
        let file = Terminal {
            redraws: false,
            colours: false,
        };
        assert_eq!(Mode::resolve(ProgressChoice::Auto, terminal), Mode::Bar);
        assert_eq!(Mode::resolve(ProgressChoice::Auto, file), Mode::Plain);
        assert_eq!(Mode::resolve(ProgressChoice::Json, terminal), Mode::Json);
        assert_eq!(Mode::resolve(ProgressChoice::None, terminal), Mode::None);
    }

    #[test]
    fn an_extent_of_no_bytes_is_done() {
        assert_eq!(percent(0, 0), 100);
        assert_eq!(percent(u64::MAX / 2, u64::MAX), 49);
    }
}
