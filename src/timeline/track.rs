//! What one thread did, in bounded memory.
//!
//! In: events in the order in which they ended. Out: spans, and exact sums. Nothing here can fail or allocate: a track that is full makes one span of neighbours, with the sum of
//! each kind of time, and takes a coarser grain from then on.

/// No lane.
const NO_LANE: u16 = u16::MAX;
/// No label.
const NO_LABEL: u8 = u8::MAX;
/// Most labels of a track: there are fewer codings than that.
const LABELS_MAX: usize = 16;
/// The finest grain. Shorter waits belong to the span before them: no screen shows them, and there is one per chunk.
const GRAIN_NS: u64 = 20_000;

/// What a thread was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It worked.
    Busy,
    /// It waited for input.
    Starved,
    /// It waited for room in the next stage.
    Blocked,
}

/// Something that has just ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) kind: Kind,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) bytes: u64,
    pub(crate) lane: Option<usize>,
    /// How a chunk was coded, or what became of a request.
    pub(crate) label: Option<&'static str>,
    /// Of a request: number of the part, or of the first frame.
    pub(crate) number: Option<u64>,
    /// It is no piece of work of its own: the same state goes on.
    pub(crate) goes_on: bool,
}

/// A time, and what it was spent on. Of one event, or of several that became one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Begin.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Time at work; the three together are at most about the span, because of moments that nobody accounted for.
    pub busy_ns: u64,
    /// Time without input.
    pub starved_ns: u64,
    /// Time without room in the next stage.
    pub blocked_ns: u64,
    /// Bytes worked on.
    pub bytes: u64,
    /// Pieces of work.
    pub count: u32,
    number: u32,
    lane: u16,
    label: u8,
}

/// The sum of what was done in one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LabelTotals {
    /// The way.
    pub label: &'static str,
    /// Pieces of work.
    pub count: u64,
    /// Bytes that went in.
    pub bytes: u64,
    /// Time at work.
    pub busy_ns: u64,
}

/// Exact sums of a track.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) busy_ns: u64,
    pub(super) starved_ns: u64,
    pub(super) blocked_ns: u64,
    pub(super) bytes: u64,
}

/// The spans of a track.
#[derive(Debug)]
pub(super) struct Log {
    spans: Vec<Span>,
    /// Most spans; with 0 there are only sums.
    limit: usize,
    grain_ns: u64,
    totals: Totals,
    labels: Vec<LabelTotals>,
}

impl Span {
    /// Index of the lane, if it was of one.
    pub fn lane(&self) -> Option<usize> {
        (self.lane != NO_LANE).then_some(self.lane.into())
    }

    /// Index of the track's label that most of the work had.
    pub fn label(&self) -> Option<usize> {
        (self.label != NO_LABEL).then_some(self.label.into())
    }

    /// Number of the part or first frame of a request; of several requests, of the longest.
    pub fn number(&self) -> Option<u64> {
        (self.number != u32::MAX).then_some(self.number.into())
    }

    fn of(event: &Event, label: u8) -> Self {
        let spent = event.end_ns - event.start_ns;
        let of_kind = |kind| if event.kind == kind { spent } else { 0 };
        Self {
            start_ns: event.start_ns,
            end_ns: event.end_ns,
            busy_ns: of_kind(Kind::Busy),
            starved_ns: of_kind(Kind::Starved),
            blocked_ns: of_kind(Kind::Blocked),
            bytes: event.bytes,
            count: u32::from(event.bytes > 0),
            number: event
                .number
                .and_then(|number| u32::try_from(number).ok())
                .unwrap_or(u32::MAX),
            lane: event
                .lane
                .and_then(|lane| u16::try_from(lane).ok())
                .unwrap_or(NO_LANE),
            label,
        }
    }

    /// The one kind of time in it, if it is of one.
    fn kind(&self) -> Option<Kind> {
        match (self.busy_ns, self.starved_ns, self.blocked_ns) {
            (_, 0, 0) => Some(Kind::Busy),
            (0, _, 0) => Some(Kind::Starved),
            (0, 0, _) => Some(Kind::Blocked),
            _ => None,
        }
    }

    /// Takes the next span in. Lane, label and number are those of the one that worked longer.
    fn absorb(&mut self, next: &Span) {
        if next.busy_ns > self.busy_ns && next.bytes > 0 {
            (self.lane, self.label, self.number) = (next.lane, next.label, next.number);
        }
        self.end_ns = next.end_ns;
        self.busy_ns += next.busy_ns;
        self.starved_ns += next.starved_ns;
        self.blocked_ns += next.blocked_ns;
        self.bytes += next.bytes;
        self.count = self.count.saturating_add(next.count);
    }
}

impl Log {
    /// An empty log in memory that is there already: as many spans as `spans` has room for.
    pub(super) fn new(spans: Vec<Span>) -> Self {
        Self {
            limit: spans.capacity(),
            spans,
            grain_ns: GRAIN_NS,
            totals: Totals::default(),
            labels: Vec::with_capacity(LABELS_MAX),
        }
    }

    /// Books an event.
    pub(super) fn push(&mut self, event: &Event) {
        let label = self.book(event);
        if self.limit == 0 {
            return;
        }
        let mut span = Span::of(event, label);
        let last_end = self.spans.last().map_or(0, |last| last.end_ns);
        span.start_ns = span.start_ns.max(last_end);
        span.end_ns = span.end_ns.max(span.start_ns);
        // A stage may tell of several times that ended together: what was told first then takes the later ones in, and the time that they all took.
        let is_told_late = (span.end_ns - span.start_ns) * 2 < event.end_ns - event.start_ns;
        if is_told_late || self.joins_last(&span, event.goes_on || event.bytes == 0) {
            let before = self
                .spans
                .len()
                .checked_sub(2)
                .map(|index| self.spans[index].end_ns);
            if let Some(last) = self.spans.last_mut() {
                last.absorb(&span);
                let free_from = before.unwrap_or(0).max(event.start_ns);
                last.start_ns = last.start_ns.min(free_from);
                return;
            }
        }
        if self.spans.len() == self.limit {
            self.compact();
        }
        self.spans.push(span);
    }

    /// Whether `next` is too short to stand alone, or the same going on.
    fn joins_last(&self, next: &Span, is_same_work: bool) -> bool {
        let Some(last) = self.spans.last() else {
            return false;
        };
        let gap = next.start_ns - last.end_ns;
        let is_short = next.end_ns - next.start_ns < self.grain_ns && gap < self.grain_ns;
        // Of pieces of work each stays itself as long as there is room.
        let may_vanish = next.bytes == 0 || self.grain_ns > GRAIN_NS;
        let goes_on = is_same_work && gap < self.grain_ns && last.kind() == next.kind();
        is_short && may_vanish
            || goes_on
            || self.grain_ns > GRAIN_NS && next.end_ns - last.start_ns <= self.grain_ns
    }

    /// Adds to the sums. The label's number.
    fn book(&mut self, event: &Event) -> u8 {
        let spent = event.end_ns - event.start_ns;
        match event.kind {
            Kind::Busy => self.totals.busy_ns += spent,
            Kind::Starved => self.totals.starved_ns += spent,
            Kind::Blocked => self.totals.blocked_ns += spent,
        }
        self.totals.bytes += event.bytes;
        let Some(label) = event.label else {
            return NO_LABEL;
        };
        let found = self.labels.iter().position(|known| known.label == label);
        let index = match found {
            Some(index) => index,
            None if self.labels.len() < LABELS_MAX => {
                self.labels.push(LabelTotals {
                    label,
                    count: 0,
                    bytes: 0,
                    busy_ns: 0,
                });
                self.labels.len() - 1
            }
            None => return NO_LABEL,
        };
        let totals = &mut self.labels[index];
        totals.count += 1;
        totals.bytes += event.bytes;
        totals.busy_ns += spent;
        u8::try_from(index).unwrap_or(NO_LABEL)
    }

    /// Makes room: a coarser grain, until a quarter is free.
    fn compact(&mut self) {
        let whole = match (self.spans.first(), self.spans.last()) {
            (Some(first), Some(last)) => last.end_ns - first.start_ns,
            _ => return,
        };
        self.grain_ns = self.grain_ns.max(whole / self.limit as u64);
        while self.spans.len() > self.limit / 4 * 3 {
            self.grain_ns *= 2;
            let mut kept = 0;
            for index in 1..self.spans.len() {
                let next = self.spans[index];
                if next.end_ns - self.spans[kept].start_ns <= self.grain_ns {
                    self.spans[kept].absorb(&next);
                } else {
                    kept += 1;
                    self.spans[kept] = next;
                }
            }
            self.spans.truncate(kept + 1);
        }
    }

    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn labels(&self) -> &[LabelTotals] {
        &self.labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: Kind, start_us: u64, len_us: u64, bytes: u64) -> Event {
        Event {
            kind,
            start_ns: start_us * 1000,
            end_ns: (start_us + len_us) * 1000,
            bytes,
            lane: None,
            label: None,
            number: None,
            goes_on: false,
        }
    }

    fn sums(spans: &[Span]) -> Totals {
        spans.iter().fold(Totals::default(), |sum, span| Totals {
            busy_ns: sum.busy_ns + span.busy_ns,
            starved_ns: sum.starved_ns + span.starved_ns,
            blocked_ns: sum.blocked_ns + span.blocked_ns,
            bytes: sum.bytes + span.bytes,
        })
    }

    #[test]
    fn a_span_fits_a_cache_line() {
        assert!(size_of::<Span>() <= 64);
    }

    #[test]
    fn a_track_never_grows_and_its_spans_add_up() {
        let mut log = Log::new(Vec::with_capacity(64));
        let limit = log.limit;
        let memory = log.spans.as_ptr();
        let mut at = 0;
        for index in 0..100_000_u64 {
            let len = 1 + index * 7919 % 900;
            let (kind, bytes) = match index % 5 {
                0 => (Kind::Starved, 0),
                1 => (Kind::Blocked, 0),
                _ => (Kind::Busy, 1 << 20),
            };
            log.push(&event(kind, at, len, bytes));
            at += len + index % 3;
            assert!(log.spans().len() <= limit);
        }
        assert_eq!(log.spans.as_ptr(), memory, "it was allocated again");
        assert_eq!(sums(log.spans()), log.totals());
        assert!(log.spans().len() > limit / 4, "needlessly coarse");
        let in_order = |pair: &[Span]| {
            pair[0].start_ns <= pair[0].end_ns && pair[0].end_ns <= pair[1].start_ns
        };
        assert!(log.spans().windows(2).all(in_order));
        let count: u64 = log.spans().iter().map(|span| u64::from(span.count)).sum();
        assert_eq!(count, 60_000);
    }

    #[test]
    fn pieces_of_work_stay_apart_and_moments_do_not() {
        let mut log = Log::new(Vec::with_capacity(64));
        for index in 0..10 {
            log.push(&event(Kind::Starved, index * 1000, 1, 0));
            log.push(&event(Kind::Busy, index * 1000 + 1, 990, 7));
            // Packing: the same work goes on.
            log.push(&event(Kind::Busy, index * 1000 + 991, 9, 0));
        }
        // The first wait had nothing before it.
        assert_eq!(log.spans().len(), 11, "{:?}", log.spans());
        assert_eq!(sums(log.spans()), log.totals());
    }

    #[test]
    fn a_state_that_goes_on_is_one_span() {
        let mut log = Log::new(Vec::with_capacity(64));
        for index in 0..10 {
            let goes_on = Event {
                goes_on: true,
                ..event(Kind::Busy, index * 1000, 1000, 5)
            };
            log.push(&goes_on);
        }
        assert_eq!(log.spans().len(), 1);
        assert_eq!(log.spans()[0].bytes, 50);
    }

    #[test]
    fn times_that_ended_together_fill_the_time_that_they_took() {
        let mut log = Log::new(Vec::with_capacity(64));
        log.push(&event(Kind::Busy, 0, 1000, 1));
        // A thread packed for 800 us, and says first that it also waited for 1 us.
        log.push(&event(Kind::Blocked, 1799, 1, 0));
        log.push(&event(Kind::Busy, 1000, 800, 0));
        let [work, both] = log.spans() else {
            panic!("{:?}", log.spans());
        };
        assert_eq!((work.start_ns, work.end_ns), (0, 1_000_000));
        assert_eq!((both.start_ns, both.end_ns), (1_000_000, 1_800_000));
        assert_eq!((both.busy_ns, both.blocked_ns), (800_000, 1000));
        assert_eq!(sums(log.spans()), log.totals());
    }

    #[test]
    fn a_moment_of_overlap_changes_nothing() {
        let mut log = Log::new(Vec::with_capacity(64));
        log.push(&event(Kind::Starved, 0, 1000, 0));
        log.push(&event(Kind::Busy, 990, 1000, 1));
        assert_eq!(log.spans().len(), 2);
        assert_eq!(log.spans()[1].start_ns, 1_000_000);
    }

    #[test]
    fn without_room_there_are_sums() {
        let mut log = Log::new(Vec::new());
        log.push(&event(Kind::Busy, 0, 1000, 9));
        assert!(log.spans().is_empty());
        assert_eq!((log.totals().busy_ns, log.totals().bytes), (1_000_000, 9));
    }

    #[test]
    fn a_span_has_the_label_of_most_of_its_work_and_the_sums_are_exact() {
        let mut log = Log::new(Vec::with_capacity(16));
        for index in 0..1000_u64 {
            let label = if index % 4 == 0 { "zero" } else { "raw" };
            let labelled = Event {
                label: Some(label),
                ..event(Kind::Busy, index * 1000, 1000, 10)
            };
            log.push(&labelled);
        }
        let counts: Vec<_> = log
            .labels()
            .iter()
            .map(|l| (l.label, l.count, l.bytes))
            .collect();
        assert_eq!(counts, [("zero", 250, 2500), ("raw", 750, 7500)]);
        assert!(log.spans().iter().all(|span| span.label().is_some()));
    }
}
