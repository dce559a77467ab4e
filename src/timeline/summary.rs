//! What a timeline comes to, in numbers and one sentence.
//!
//! In: a [`Timeline`]. Out: a [`Summary`]. Nothing here can fail.

use bytesize::ByteSize;

use super::{Kind, LabelTotals, Timeline, why};
use crate::error::Phase;
use crate::outcome::StageOutcome;
use crate::pipeline::slowest;

/// From this share of its time on, a stage's waiting is worth a word.
const WORTH_A_WORD: f64 = 0.2;

/// The numbers behind the headline.
#[derive(Debug, Clone)]
pub struct Summary {
    /// What took how long, and why, in one or two sentences.
    pub verdict: String,
    /// Seconds of the whole run.
    pub total_seconds: f64,
    /// Seconds per phase, each phase once, in order of its first begin.
    pub phases: Vec<(Phase, f64)>,
    /// The stages, in order of flow.
    pub stages: Vec<StageShare>,
    /// Index of the stage that was busy longest.
    pub slowest: Option<usize>,
}

/// How a stage spent its time.
#[derive(Debug, Clone)]
pub struct StageShare {
    /// Its account.
    pub account: StageOutcome,
    /// Shares of the time in which anything flowed: at work, without input, without room; the rest is before its begin or after its end.
    pub busy: f64,
    /// Without input.
    pub starved: f64,
    /// Without room in the next stage.
    pub blocked: f64,
    /// What it mostly waited for, when that was long.
    pub why: Option<&'static str>,
    /// How chunks were coded.
    pub labels: Vec<LabelTotals>,
}

impl Summary {
    /// Sums up.
    pub fn of(timeline: &Timeline) -> Self {
        let accounts: Vec<StageOutcome> = timeline
            .stages
            .iter()
            .map(|stage| stage.account.clone())
            .collect();
        let spent = |account: &StageOutcome| {
            account.busy_seconds + account.starved_seconds + account.blocked_seconds
        };
        let flow_seconds = accounts.iter().map(spent).fold(0.0, f64::max);
        let stages: Vec<StageShare> = timeline
            .stages
            .iter()
            .map(|stage| StageShare::of(&stage.account, &stage.labels, flow_seconds))
            .collect();
        let slowest_name = slowest(&accounts);
        let busiest = |a: &&(usize, &StageOutcome), b: &&(usize, &StageOutcome)| {
            a.1.busy_seconds.total_cmp(&b.1.busy_seconds)
        };
        // Both ways have a copy stage.
        let named: Vec<(usize, &StageOutcome)> = accounts
            .iter()
            .enumerate()
            .filter(|(_, account)| Some(&account.stage) == slowest_name.as_ref())
            .collect();
        let slowest = named.iter().max_by(busiest).map(|(index, _)| *index);
        let mut phases: Vec<(Phase, f64)> = Vec::new();
        for span in &timeline.phases {
            let spent = seconds_of(span.end_ns.saturating_sub(span.start_ns));
            match phases.iter_mut().find(|(phase, _)| *phase == span.phase) {
                Some((_, seconds)) => *seconds += spent,
                None => phases.push((span.phase, spent)),
            }
        }
        let total_seconds = timeline.total.as_secs_f64();
        Self {
            verdict: verdict(&phases, total_seconds, &stages, slowest),
            total_seconds,
            phases,
            stages,
            slowest,
        }
    }
}

impl StageShare {
    fn of(account: &StageOutcome, labels: &[LabelTotals], flow_seconds: f64) -> Self {
        let share = |seconds: f64| {
            if flow_seconds > 0.0 {
                seconds / flow_seconds
            } else {
                0.0
            }
        };
        let (starved, blocked) = (
            share(account.starved_seconds),
            share(account.blocked_seconds),
        );
        let kind = if blocked > starved {
            Kind::Blocked
        } else {
            Kind::Starved
        };
        Self {
            account: account.clone(),
            busy: share(account.busy_seconds),
            starved,
            blocked,
            why: (starved.max(blocked) >= WORTH_A_WORD).then(|| why(&account.stage, kind)),
            labels: labels.to_vec(),
        }
    }
}

fn verdict(
    phases: &[(Phase, f64)],
    total_seconds: f64,
    stages: &[StageShare],
    slowest: Option<usize>,
) -> String {
    let longest = phases.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let phase = longest.map_or_else(String::new, |(phase, seconds)| {
        let share = percent(seconds / total_seconds.max(f64::MIN_POSITIVE));
        format!(
            "Most of the {} went into {phase} ({share}).",
            seconds_text(total_seconds)
        )
    });
    let Some(stage) = slowest.and_then(|index| stages.get(index)) else {
        return format!("{phase} Nothing flowed through the pipeline.");
    };
    let account = &stage.account;
    let wait = stage
        .why
        .map_or_else(String::new, |why| format!("; it waited too: {why}"));
    format!(
        "{phase} The slowest stage was {}: at work {} of the {} in which data flowed, at {}{wait}.",
        account.stage,
        percent(stage.busy),
        seconds_text(account.busy_seconds / stage.busy.max(f64::MIN_POSITIVE)),
        rate_text(account.rate),
    )
}

/// `43 %`
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// `12.3 s`, or milliseconds when it is short.
pub(super) fn seconds_text(seconds: f64) -> String {
    match seconds {
        long if long >= 100.0 => format!("{long:.0} s"),
        long if long >= 10.0 => format!("{long:.1} s"),
        some if some >= 1.0 => format!("{some:.2} s"),
        short => format!("{:.0} ms", short * 1000.0),
    }
}

/// `412.3 MiB`
pub(super) fn size_text(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// `412.3 MiB/s`
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and this is for people"
)]
pub(super) fn rate_text(rate: f64) -> String {
    format!("{}/s", size_text(rate as u64))
}

/// Seconds of nanoseconds.
pub(super) fn seconds_of(ns: u64) -> f64 {
    std::time::Duration::from_nanos(ns).as_secs_f64()
}
